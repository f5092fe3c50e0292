//! Puts back what nobody works on any more. Every worker does it; there is no leader.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use queue_core::Delay;
use queue_core::Error;
use queue_core::JobId;
use queue_core::Limit;
use queue_core::Sweep;
use queue_core::recover_stale;
use queue_core::release_orphans;
use tokio::time::sleep;
use tokio::time::timeout;

use super::Shared;
use super::heartbeat::no_answer;
use super::held::lock;
use super::report::Counted;

/// Rows per statement.
const PAGE: usize = 200;

/// How many old jobs one statement deletes, and how many statements one round makes: few, so that nobody waits for them. What
/// is left then has its turn in the next round.
const PURGE: usize = 500;
const PURGES: usize = 20;

/// In every how many rounds old events are looked for: nobody waits for their end.
const EVENTS: u32 = 10;

pub(super) async fn run(shared: Arc<Shared>) {
    let Ok(page) = Limit::new(PAGE) else { return };
    let mut until_events = EVENTS;
    loop {
        // With jitter, so that the workers of a fleet take turns.
        sleep(shared.config.heartbeat.mul_f64(0.5 + 0.5 * fastrand::f64())).await;
        if shared.unrenewed.load(Ordering::Relaxed) {
            // After an outage a living worker keeps its jobs: it beats before it sweeps.
            continue;
        }
        // A call that hangs must not be the last one.
        let (lease, held) = (shared.config.lease, &shared.held);
        let stale = recover_stale(&*shared.backend, lease, page, |id| held.renews(id, lease.duration()));
        match in_time(&shared, stale).await {
            Ok(sweep) => {
                shared.count(Counted::Recovered, sweep.recovered.len());
                for execution in &sweep.recovered {
                    tracing::warn!(name: "worker.recovered", { job.id = %execution.id, now = %execution }, "a stale job was put back");
                }
                let ended = sweep.recovered.iter().filter(|execution| execution.state.is_final());
                shared.announcer.ended(&shared.backend, ended.map(|execution| execution.id));
                log("stale", &sweep);
            }
            Err(error) => failed(&error),
        }
        orphans(&shared, page, grace(&shared), |id| is_held(&shared, id)).await;
        for (state, age) in &shared.config.retention {
            let purged = purge(&shared, state.as_str(), |batch| shared.backend.purge(*state, *age, batch)).await;
            shared.count(Counted::Purged, purged);
        }
        until_events = until_events.saturating_sub(1);
        if let Some(steps) = shared.backend.durable_steps()
            && until_events == 0
        {
            let purged = purge(&shared, "events", |batch| steps.purge_events(batch)).await;
            // Where that was not enough, sooner.
            until_events = if purged < PURGE * PURGES { EVENTS } else { 1 };
        }
    }
}

/// Deletes what is old, and answers how much.
async fn purge<F: Future<Output = Result<u64, Error>>>(shared: &Shared, what: &str, old: impl Fn(Limit) -> F) -> usize {
    let Ok(batch) = Limit::new(PURGE) else { return 0 };
    let mut all = 0;
    for _ in 0..PURGES {
        let purged = timeout(shared.config.lease.duration(), old(batch)).await;
        match purged.unwrap_or_else(|_| Err(no_answer())) {
            Ok(purged) => {
                let purged = usize::try_from(purged).unwrap_or(usize::MAX);
                all += purged;
                if purged < PURGE {
                    break;
                }
            }
            Err(error) => {
                tracing::warn!(name: "worker.purge_failed", what, %error, "what is old could not be deleted, the next round follows");
                break;
            }
        }
    }
    all
}

/// Gives back what was claimed for this worker longer than `grace` ago and is not held.
async fn orphans(shared: &Shared, page: Limit, grace: Delay, is_held: impl Fn(JobId) -> bool) {
    match in_time(shared, release_orphans(&*shared.backend, &shared.id, grace, page, is_held)).await {
        Ok(sweep) => {
            shared.count(Counted::Released, sweep.recovered.len());
            for execution in &sweep.recovered {
                tracing::warn!(name: "worker.orphan", { job.id = %execution.id }, "a job whose claim got no answer was given back");
            }
            log("orphans", &sweep);
        }
        Err(error) => failed(&error),
    }
}

/// Once nothing is claimed any more, whatever is this worker's and not held is an orphan.
pub(super) async fn last_orphans(shared: &Shared) {
    let Ok(page) = Limit::new(PAGE) else { return };
    orphans(shared, page, Delay::ZERO, |id| shared.held.knows(id)).await;
}

async fn in_time(shared: &Shared, sweep: impl Future<Output = Result<Sweep, Error>>) -> Result<Sweep, Error> {
    timeout(shared.config.lease.duration(), sweep).await.unwrap_or_else(|_| Err(no_answer()))
}

/// How long a claim's answer may take.
fn grace(shared: &Shared) -> Delay {
    Delay::saturating(shared.config.heartbeat)
}

/// Also while a claim that may have brought the job has not been answered: its answer can still come.
fn is_held(shared: &Shared, id: JobId) -> bool {
    let claiming = lock(&shared.claiming).is_some_and(|since| since.elapsed() >= shared.config.heartbeat / 2);
    claiming || shared.held.knows(id)
}

fn log(what: &'static str, sweep: &Sweep) {
    for (id, error) in &sweep.failed {
        tracing::warn!(name: "worker.sweep_failed", what, job.id = %id, %error, "a job could not be put back");
    }
    for row in &sweep.unreadable {
        tracing::warn!(name: "worker.sweep_failed", what, job.id = %row.id, reason = %row.reason, "a row cannot be read");
    }
}

fn failed(error: &Error) {
    tracing::warn!(name: "worker.sweep_failed", %error, "a sweep failed, the next one follows");
}
