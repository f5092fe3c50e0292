//! Records outcomes, in groups: what ends while one write is under way goes with the next.

use std::sync::Arc;

use queue_core::Decision;
use queue_core::ErrorKind;
use queue_core::JobState;
use queue_core::Settled;
use queue_core::Transition;
use queue_core::TransitionError;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio::time::sleep_until;

use super::Shared;
use super::held::Claim;
use super::report::Counted;
use crate::repeat::Backoff;
use crate::repeat::may_pass;

/// The most outcomes that wait in the settler itself; then handlers wait with theirs, and no slot becomes free.
const MOST_PENDING: usize = 1_000;

/// An outcome that is not recorded yet. Its decision is kept over all repeats.
pub(super) struct Pending {
    decision: Decision,
    about: About,
}

/// Whose outcome it is, and when it is to be written.
struct About {
    claim: Arc<Claim>,
    due: Instant,
    backoff: Backoff,
}

impl Pending {
    /// Hands an outcome in as soon as there is room, unless the claim has one already.
    pub(super) async fn offer(
        shared: &Shared,
        claim: Arc<Claim>,
        transition: &Transition,
        results: &mpsc::Sender<Self>,
    ) {
        // The settler is gone only if the whole worker is.
        let Ok(room) = results.reserve().await else { return };
        if let Some(pending) = Self::new(shared, claim, transition) {
            room.send(pending);
        }
    }

    /// The outcome of a claim, which has no other from then on; `None` if it has one already.
    pub(super) fn new(shared: &Shared, claim: Arc<Claim>, transition: &Transition) -> Option<Self> {
        if !claim.begin_settle() {
            return None;
        }
        match Decision::new(claim.execution(), transition) {
            Ok(decision) => {
                let (due, backoff) = (Instant::now(), Backoff::default());
                Some(Self { decision, about: About { claim, due, backoff } })
            }
            Err(error) => {
                give_up(shared, &claim, &error.into());
                None
            }
        }
    }
}

/// Ends when it is told that nothing more comes, and all that came is recorded or given up. It does not wait for the senders:
/// a handler that blocks its thread keeps one.
pub(super) async fn run(shared: Arc<Shared>, mut inbox: mpsc::Receiver<Pending>, mut closing: watch::Receiver<bool>) {
    let mut waiting: Vec<Pending> = Vec::new();
    let mut open = true;
    while open || !waiting.is_empty() {
        let mut ready = Vec::new();
        let room = MOST_PENDING.saturating_sub(waiting.len());
        let next = waiting.iter().map(|pending| pending.about.due).min();
        tokio::select! {
            received = inbox.recv_many(&mut ready, room), if open && room > 0 => open = received > 0,
            () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {}
            () = told(&mut closing), if open => {
                open = false;
                ready.extend(std::iter::from_fn(|| inbox.try_recv().ok()));
            }
        }
        let now = Instant::now();
        ready.extend(waiting.extract_if(.., |pending| pending.about.due <= now));
        if !ready.is_empty() {
            waiting.extend(flush(&shared, ready).await);
        }
    }
}

async fn told(closing: &mut watch::Receiver<bool>) {
    // Nobody is left to tell: the worker is being dropped.
    let _ = closing.wait_for(|closing| *closing).await;
}

/// Writes outcomes in one call, and returns those that must be written again.
async fn flush(shared: &Shared, ready: Vec<Pending>) -> Vec<Pending> {
    let (mut decisions, abouts): (Vec<_>, Vec<_>) =
        ready.into_iter().map(|pending| (pending.decision, pending.about)).unzip();
    let answers = shared.submit_all(&mut decisions).await;
    let settled = answers.iter().flatten().map(Settled::execution);
    let ended: Vec<_> = settled.filter(|settled| settled.state.is_final()).map(|settled| settled.id).collect();
    let mut again = Vec::new();
    for ((decision, about), answer) in decisions.into_iter().zip(abouts).zip(answers) {
        again.extend(judge(shared, Pending { decision, about }, answer));
    }
    shared.announcer.ended(&shared.backend, ended);
    again
}

/// What an answer means; the outcome itself if it must be written again.
fn judge(shared: &Shared, mut pending: Pending, answer: Result<Settled, TransitionError>) -> Option<Pending> {
    let claim = Arc::clone(&pending.about.claim);
    let error = match answer {
        Ok(settled) => {
            shared.held.remove(&claim);
            recorded(shared, &pending.decision, settled.execution().state);
            return None;
        }
        Err(TransitionError::Backend(error)) => error,
        Err(conflict) => {
            shared.held.remove(&claim);
            shared.count(Counted::Conflicts, 1);
            tracing::debug!(name: "worker.conflict", %conflict, "an outcome came too late");
            return None;
        }
    };
    if error.kind() == ErrorKind::TooLarge && pending.decision.transition() == "complete" {
        let error = format!("result too large: {error}").into();
        let fail = Transition::Fail { error };
        // From the same moment: the refused write changed nothing.
        if let Ok(decision) = Decision::new(claim.execution(), &fail) {
            pending.decision = decision;
            return Some(pending);
        }
    }
    let mends = may_pass(&error);
    let in_time = claim.settling_for().is_some_and(|pending| pending < shared.config.lease.duration());
    // The kind says whether a repeat can help; the certainty is about what was sent before, too.
    if mends && in_time {
        pending.about.due = Instant::now() + pending.about.backoff.pause();
        return Some(pending);
    }
    give_up(shared, &claim, &error.into());
    None
}

fn recorded(shared: &Shared, decision: &Decision, state: JobState) {
    let name = decision.transition();
    if let Some(failure) = &decision.request().patch.failure {
        let (id, attempt, error) = (decision.seen().id, failure.attempt, failure.text.as_str());
        match state {
            JobState::Waiting => {
                tracing::warn!(name: "worker.attempt_failed", { job.id = %id, attempt, error }, "an attempt failed, the job is tried again");
            }
            JobState::Failed => {
                tracing::error!(name: "worker.job_failed", { job.id = %id, attempt, error }, "a job failed for good");
            }
            _ => {}
        }
    }
    let what = match (name, state) {
        ("complete", _) => Counted::Completed,
        ("retry", JobState::Waiting) => Counted::Retried,
        ("snooze", _) => Counted::Snoozed,
        ("release", _) => Counted::Released,
        ("cancel", _) => Counted::Canceled,
        _ => Counted::Failed,
    };
    shared.count(what, 1);
}

/// The job stays as it is until its lease runs out.
fn give_up(shared: &Shared, claim: &Arc<Claim>, error: &TransitionError) {
    shared.held.give_up(claim, shared.config.lease.duration().saturating_mul(4));
    shared.count(Counted::Unrecorded, 1);
    let id = claim.execution().id;
    tracing::error!(name: "worker.unrecorded", { job.id = %id, %error }, "an outcome could not be recorded, the job will run again");
}
