//! Handing over: what ends without a successor, and what is enqueued without an end.

use async_trait::async_trait;
use queue_core::*;

use crate::Fault;
use crate::broken::Real;
use crate::broken::gap;
use crate::fault::Wrong;

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "handover::loses_the_result",
        &Asks(|update, _| update.patch.result = Change::Clear),
        "The result of the job that ends is not stored.",
        &["handover::ends_one_and_enqueues_another"],
    )
    .everywhere(),
    Fault::new(
        "handover::loses_the_priority",
        &Asks(|_, successor| successor.priority = Priority::default()),
        "The successor has the usual priority.",
        &["handover::ends_one_and_enqueues_another"],
    )
    .everywhere(),
    Fault::new(
        "handover::enqueues_first",
        &Does(Mode::EnqueuesFirst),
        "The successor is stored, then the job is compared, and nothing is undone.",
        &["handover::a_lost_claim_enqueues_nothing", "handover::every_field_is_compared"],
    )
    .everywhere(),
    Fault::new(
        "handover::unfenced",
        &Compares(|seen, there| *seen = there.fingerprint()),
        "A job is handed over by whoever ran it once.",
        &[
            "handover::a_lost_claim_enqueues_nothing",
            "handover::every_field_is_compared",
            "handover::a_replay_enqueues_no_second_one",
        ],
    )
    .everywhere(),
    Fault::new(
        "handover::fenced_by_the_state",
        &Compares(|seen, there| {
            if there.state == seen.state {
                *seen = there.fingerprint();
            }
        }),
        "Any claim may hand a running job over.",
        &["handover::every_field_is_compared", "handover::a_lost_claim_enqueues_nothing"],
    )
    .everywhere(),
    Fault::new(
        "handover::revision_alone",
        &Compares(|seen, there| {
            if there.revision == seen.revision {
                *seen = there.fingerprint();
            }
        }),
        "Nothing but the revision is compared.",
        &["handover::every_field_is_compared"],
    )
    .everywhere(),
    Fault::new(
        "handover::unreadable_is_missing",
        &Does(Mode::UnreadableIsMissing),
        "A job of a newer version is answered as if it were not there.",
        &["handover::of_an_unreadable_job"],
    )
    .everywhere(),
    Fault::new(
        "handover::key_before_the_end",
        &Does(Mode::KeyBeforeTheEnd),
        "The successor's key is judged while the job that ends still has it.",
        &["handover::passes_the_key_on", "handover::each_has_its_own_limit"],
    )
    .everywhere(),
    Fault::new(
        "handover::a_taken_key_ends_it",
        &Does(Mode::AnErrorEndsIt(ErrorKind::Invalid)),
        "What the store did before it found the key taken is not undone.",
        &["handover::a_taken_key_ends_nothing"],
    )
    .everywhere(),
    Fault::new(
        "handover::a_taken_key_is_an_outcome",
        &Does(Mode::ATakenKeyIsAnOutcome),
        "A taken key is a duplicate, and the job ends without a successor.",
        &["handover::a_taken_key_ends_nothing"],
    )
    .everywhere(),
    Fault::new(
        "handover::a_reused_id_ends_it",
        &Does(Mode::AnErrorEndsIt(ErrorKind::IdReused)),
        "What the store did before it found the id taken is not undone.",
        &["handover::a_reused_id_ends_nothing"],
    )
    .everywhere(),
    Fault::new(
        "handover::too_large_ends_it",
        &Does(Mode::AnErrorEndsIt(ErrorKind::TooLarge)),
        "The successor's payload is looked at when the job has ended.",
        &["handover::too_large_is_refused"],
    )
    .everywhere(),
    Fault::new(
        "handover::no_cap_on_the_result",
        &Does(Mode::NoCapOnTheResult),
        "The size of the result is checked by nobody.",
        &["handover::too_large_is_refused"],
    )
    .everywhere(),
    Fault::new(
        "handover::a_replay_enqueues_another",
        &Does(Mode::AReplayEnqueuesAnother),
        "A replay is recognised, and enqueues a successor of its own.",
        &["handover::a_replay_enqueues_no_second_one"],
    )
    .everywhere(),
    Fault::new(
        "handover::own_revision",
        &Asks(|update, _| update.patch.revision = Some(Revision::random())),
        "The store makes the revision of the end itself.",
        &["handover::a_replay_enqueues_no_second_one"],
    )
    .everywhere(),
    Fault::new(
        "handover::checks_then_writes",
        &Does(Mode::ChecksThenWrites),
        "The job is compared in one statement, and both are written by others.",
        &["handover::happens_once_of_many_at_once"],
    )
    .everywhere(),
    Fault::new(
        "handover::attempts_are_counted_on",
        &Does(Mode::AttemptsAreCountedOn),
        "The successor begins with the attempts of the job that ends.",
        &["handover::each_has_its_own_limit"],
    )
    .everywhere(),
    Fault::new(
        "handover::limit_is_inherited",
        &Does(Mode::LimitIsInherited),
        "The successor has the limit of the job that ends.",
        &["handover::each_has_its_own_limit"],
    )
    .everywhere(),
    Fault::new(
        "handover::ends_then_enqueues",
        &Does(Mode::EndsThenEnqueues),
        "The job ends in one statement, and its successor is stored by a second one without a transaction.",
        &["handover::dropped_futures", "handover::a_taken_key_ends_nothing", "handover::a_reused_id_ends_nothing"],
    ),
    Fault::new(
        "handover::leaves_its_lock",
        &Does(Mode::LeavesItsLock),
        "A lock is left behind when the call is dropped.",
        &["handover::dropped_futures"],
    )
    .everywhere(),
];

#[derive(Clone, Copy)]
enum Mode {
    EnqueuesFirst,
    UnreadableIsMissing,
    NoCapOnTheResult,
    KeyBeforeTheEnd,
    AnErrorEndsIt(ErrorKind),
    ATakenKeyIsAnOutcome,
    AReplayEnqueuesAnother,
    ChecksThenWrites,
    AttemptsAreCountedOn,
    LimitIsInherited,
    EndsThenEnqueues,
    LeavesItsLock,
}

type HandedOver = Result<(Update, Option<Enqueued>)>;

/// Changes what is asked for.
struct Asks(fn(&mut UpdateRequest, &mut NewJob));

#[async_trait]
impl Wrong for Asks {
    async fn hand_over(&self, real: &Real, update: &UpdateRequest, successor: &NewJob) -> HandedOver {
        let (mut update, mut successor) = (update.clone(), successor.clone());
        (self.0)(&mut update, &mut successor);
        real.steps()?.hand_over(&update, &successor).await
    }
}

/// Takes from the row that is there what is not compared.
struct Compares(fn(&mut Fingerprint, &Execution));

#[async_trait]
impl Wrong for Compares {
    async fn hand_over(&self, real: &Real, update: &UpdateRequest, successor: &NewJob) -> HandedOver {
        let mut update = update.clone();
        if let Some(there) = real.row(update.id).await {
            (self.0)(&mut update.current, &there);
        }
        real.steps()?.hand_over(&update, successor).await
    }
}

struct Does(Mode);

#[async_trait]
impl Wrong for Does {
    async fn hand_over(&self, real: &Real, update: &UpdateRequest, successor: &NewJob) -> HandedOver {
        let right = real.steps()?.hand_over(update, successor);
        match self.0 {
            Mode::EnqueuesFirst => {
                enqueue(real, successor).await?;
                right.await
            }
            Mode::UnreadableIsMissing => match right.await? {
                (Update::Unreadable(_), enqueued) => Ok((Update::Missing, enqueued)),
                answer => Ok(answer),
            },
            Mode::NoCapOnTheResult => match right.await {
                Err(error) if error.kind() == ErrorKind::TooLarge => {
                    let patch = Patch { result: Change::Clear, ..update.patch.clone() };
                    real.steps()?.hand_over(&UpdateRequest { patch, ..update.clone() }, successor).await
                }
                answer => answer,
            },
            Mode::KeyBeforeTheEnd => {
                let jobs = real.handle.list(&ListFilter::default(), None, Limit::MAX).await?.items;
                let has_key = |job: &&Job| job.state().is_active() && job.unique_key == successor.unique_key;
                match jobs.iter().filter(|job| job.unique_key.is_some()).find(has_key) {
                    Some(holder) => Err(key_taken(successor, holder.id())),
                    None => right.await,
                }
            }
            Mode::AnErrorEndsIt(kind) => {
                let answer = right.await;
                if matches!(&answer, Err(error) if error.kind() == kind) {
                    real.update(update).await?;
                }
                answer
            }
            Mode::ATakenKeyIsAnOutcome => match right.await {
                Err(error) if error.kind() == ErrorKind::Invalid => Ok((real.update(update).await?, None)),
                answer => answer,
            },
            Mode::AReplayEnqueuesAnother => {
                let answer = right.await?;
                if matches!(&answer.0, Update::Conflict(row) if Some(row.revision) == update.patch.revision) {
                    enqueue(real, &NewJob { id: JobId::new(), ..successor.clone() }).await?;
                }
                Ok(answer)
            }
            Mode::ChecksThenWrites => {
                let there = real.row(update.id).await.map(|row| row.fingerprint());
                if there.as_ref() != Some(&update.current) {
                    return right.await;
                }
                gap().await;
                let answer = real.force(update.id, &update.patch).await?;
                Ok((answer, Some(enqueue(real, successor).await?)))
            }
            Mode::AttemptsAreCountedOn => {
                let answer = right.await?;
                if let (Update::Applied(_), Some(row)) = (&answer.0, real.row(successor.id).await) {
                    real.set(&Execution { attempt: update.current.attempt, ..row }).await?;
                }
                Ok(answer)
            }
            Mode::LimitIsInherited => {
                let limit = real.row(update.id).await.map(|row| row.max_attempts);
                let max_attempts = limit.unwrap_or(successor.max_attempts);
                real.steps()?.hand_over(update, &NewJob { max_attempts, ..successor.clone() }).await
            }
            Mode::EndsThenEnqueues => {
                let answer = real.update(update).await?;
                if !matches!(answer, Update::Applied(_)) {
                    return Ok((answer, None));
                }
                tokio::task::yield_now().await;
                match enqueue(real, successor).await? {
                    Enqueued::Duplicate { existing } => Err(key_taken(successor, existing)),
                    enqueued => Ok((answer, Some(enqueued))),
                }
            }
            Mode::LeavesItsLock => real.shared.locked_for(right).await,
        }
    }
}

async fn enqueue(real: &Real, job: &NewJob) -> Result<Enqueued> {
    let answers = real.handle.enqueue(std::slice::from_ref(job)).await?;
    answers.into_iter().next().ok_or_else(|| Error::not_applied(ErrorKind::Permanent, "no answer"))
}
