//! What an update writes and answers.

use async_trait::async_trait;
use queue_core::*;

use super::compare::invented;
use crate::Fault;
use crate::broken::Real;
use crate::fault::Wrong;

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "update::no_op_is_a_conflict",
        &NoOpIsAConflict,
        "Changed rows are counted instead of matched ones, so that restating what is there is a conflict.",
        &["update::restating_what_is_there_applies"],
    )
    .everywhere(),
    Fault::new("update::missing_is_a_conflict", &MissingIsAConflict, "No row updated is always a conflict.", &[
        "update::missing_is_not_a_conflict",
        "update::deleted_is_missing",
    ])
    .everywhere(),
    Fault::new("update::upserts", &Upserts, "A row that is not there is created.", &[
        "update::missing_is_not_a_conflict",
        "update::deleted_is_missing",
    ])
    .everywhere(),
    Fault::new("update::own_revision", &OwnRevision, "The store makes revisions itself instead of writing the patch's.", &[
        "update::the_revision_is_the_patchs",
        "update::a_repeated_decision_is_recognised",
    ])
    .everywhere(),
    Fault::new(
        "update::repeat_is_a_conflict",
        &RepeatIsAConflict,
        "A conflict shows the revision that was asked for, not that of the row, so that one's own decision is not recognised.",
        &["update::a_repeated_decision_is_recognised"],
    )
    .everywhere(),
    Fault::new(
        "update::anothers_decision_is_ones_own",
        &AnothersDecisionIsOnesOwn,
        "A row in the state that was wanted counts as applied, whoever did it.",
        &["update::anothers_decision_is_not_ones_own"],
    )
    .everywhere(),
    Fault::new("update::answers_the_row_before", &AnswersTheRowBefore, "The answer is the row as it was before the update.", &[
        "update::matching_applies",
        "batch::judges_each_row",
    ]),
    Fault::new("update::saves_the_whole_row", &SavesTheWholeRow, "The whole job is saved as the handle knows it, its payload too.", &[
        "update::a_payload_edit_survives_a_settle",
    ]),
    Fault::new("update::keep_clears", &KeepClears, "A column that the patch does not name is set to null.", &[
        "update::only_the_patch_is_written",
    ])
    .everywhere(),
    Fault::new("update::clear_keeps", &ClearKeeps, "`coalesce(?, column)`: a column that should become null stays.", &[
        "update::only_the_patch_is_written",
    ]),
    Fault::new("update::writes_then_refuses", &WritesThenRefuses, "The failure is recorded before the row is compared.", &[
        "update::a_conflict_changes_nothing",
    ]),
    Fault::new("update::error_is_a_conflict", &ErrorIsAConflict, "A store that fails to write is reported as a conflict.", &[
        "update::a_failing_row_is_an_error",
        "batch::a_bad_row_spares_the_others",
        "recover::one_failing_row",
    ])
    .everywhere(),
    Fault::new("update::no_cap", &NoCap, "The cap on results and payloads is checked by nobody.", &["update::too_large_then_smaller"]),
    Fault::new("update::unknown_state_is_a_conflict", &UnknownStateIsAConflict, "A row of a newer version is a conflict with an invented row.", &[
        "update::unreadable_is_not_a_conflict",
    ]),
    Fault::new("update::busy_is_permanent", &BusyIsPermanent, "A row that is locked for a moment is a permanent error.", &[
        "update::waits_for_a_held_row",
    ]),
    Fault::new("update::two_steps", &TwoSteps, "The state is written first, the rest in a second statement without a transaction.", &[
        "update::dropped_futures_leave_a_whole_row",
    ]),
    Fault::new("update::leaves_its_lock", &LeavesItsLock, "A lock is left behind when the future is dropped.", &[
        "update::dropped_futures_leave_a_whole_row",
    ]),
    Fault::new("update::renews_every_revision", &RenewsEveryRevision, "Every update makes a new revision, also one that should keep it.", &[
        "update::the_revision_is_the_patchs",
        "recover::adoption_keeps_the_holder",
        "settle::progress",
    ])
    .everywhere(),
    Fault::new("update::delay_from_the_claim", &DelayFromTheClaim, "A delay counts from the claim, not from the update.", &["settle::retry_waits_for_its_delay"]),
    Fault::new("update::failure_of_nobody", &FailureOfNobody, "A failure is recorded without its worker and fence.", &["data::the_newest_failures_are_kept"])
        .everywhere(),
    Fault::new("update::callers_clock", &CallersClock, "Times are bound by the caller, from its own clock.", &["update::times_are_the_stores"]),
];

struct NoOpIsAConflict;

#[async_trait]
impl Wrong for NoOpIsAConflict {
    async fn update(&self, real: &Real, update: &UpdateRequest) -> Result<Update> {
        let before = real.handle.get(update.id).await;
        let answer = real.update(update).await?;
        match answer {
            Update::Applied(row) if before.is_ok_and(|before| before.is_some_and(|job| job.execution == row)) => {
                Ok(Update::Conflict(row))
            }
            answer => Ok(answer),
        }
    }
}

struct MissingIsAConflict;

#[async_trait]
impl Wrong for MissingIsAConflict {
    async fn answer(&self, _: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        match answer? {
            Update::Missing => Ok(Update::Conflict(invented(asked))),
            answer => Ok(answer),
        }
    }
}

struct Upserts;

#[async_trait]
impl Wrong for Upserts {
    async fn answer(&self, real: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        if !matches!(answer, Ok(Update::Missing)) {
            return answer;
        }
        let name = Name::try_from("upserted")?;
        let job = NewJob { id: asked.id, ..NewJob::new(name.clone(), name, Json::null()) };
        real.handle.enqueue(&[job]).await?;
        real.force(asked.id, &asked.patch).await
    }
}

struct OwnRevision;

#[async_trait]
impl Wrong for OwnRevision {
    async fn ask(&self, _: &Real, update: &mut UpdateRequest) -> Result<()> {
        update.patch.revision = update.patch.revision.map(|_| Revision::random());
        Ok(())
    }
}

struct RepeatIsAConflict;

#[async_trait]
impl Wrong for RepeatIsAConflict {
    async fn answer(&self, _: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        match answer? {
            Update::Conflict(row) => Ok(Update::Conflict(Execution { revision: asked.current.revision, ..row })),
            answer => Ok(answer),
        }
    }
}

struct AnothersDecisionIsOnesOwn;

#[async_trait]
impl Wrong for AnothersDecisionIsOnesOwn {
    async fn answer(&self, _: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        match answer? {
            Update::Conflict(row) if (row.state, row.attempt) == (asked.patch.state, asked.patch.attempt) => {
                Ok(Update::Applied(row))
            }
            answer => Ok(answer),
        }
    }
}

struct AnswersTheRowBefore;

#[async_trait]
impl Wrong for AnswersTheRowBefore {
    async fn answer(&self, _: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        match answer? {
            Update::Applied(row) => {
                let Execution { max_attempts, fence, .. } = row;
                Ok(Update::Applied(Execution { max_attempts, fence, ..invented(asked) }))
            }
            answer => Ok(answer),
        }
    }
}

struct SavesTheWholeRow;

#[async_trait]
impl Wrong for SavesTheWholeRow {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let claimed = real.handle.claim(request).await?;
        real.kept.keep(&claimed.jobs);
        Ok(claimed)
    }

    async fn ask(&self, real: &Real, update: &mut UpdateRequest) -> Result<()> {
        if update.patch.payload.is_none() {
            update.patch.payload = real.kept.jobs().get(&update.id).map(|job| job.payload.clone());
        }
        Ok(())
    }
}

struct KeepClears;

#[async_trait]
impl Wrong for KeepClears {
    async fn ask(&self, _: &Real, update: &mut UpdateRequest) -> Result<()> {
        let Patch { finished_at, result, .. } = &mut update.patch;
        if *finished_at == Change::Keep {
            *finished_at = Change::Clear;
        }
        if *result == Change::Keep {
            *result = Change::Clear;
        }
        Ok(())
    }
}

struct ClearKeeps;

#[async_trait]
impl Wrong for ClearKeeps {
    async fn ask(&self, _: &Real, update: &mut UpdateRequest) -> Result<()> {
        let Patch { attempted_at, lease, finished_at, result, .. } = &mut update.patch;
        for time in [attempted_at, finished_at] {
            if *time == Change::Clear {
                *time = Change::Keep;
            }
        }
        if *lease == Change::Clear {
            *lease = Change::Keep;
        }
        if *result == Change::Clear {
            *result = Change::Keep;
        }
        Ok(())
    }
}

struct WritesThenRefuses;

#[async_trait]
impl Wrong for WritesThenRefuses {
    async fn answer(&self, real: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        if let (Ok(Update::Conflict(_)), Some(failure)) = (&answer, &asked.patch.failure) {
            let NewFailure { attempt, fence, worker, text } = failure.clone();
            let at = real.memory().now();
            real.edit(asked.id, |row| row.job.errors.push(Failure { attempt, fence, worker, at, text }));
        }
        answer
    }
}

struct ErrorIsAConflict;

#[async_trait]
impl Wrong for ErrorIsAConflict {
    async fn answer(&self, real: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        match answer {
            Err(error) if error.kind() == ErrorKind::Permanent => {
                Ok(Update::Conflict(real.row(asked.id).await.unwrap_or_else(|| invented(asked))))
            }
            answer => answer,
        }
    }
}

struct NoCap;

#[async_trait]
impl Wrong for NoCap {
    async fn answer(&self, real: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        match answer {
            Err(error) if error.kind() == ErrorKind::TooLarge => {
                let (memory, mut after) = (real.memory(), None);
                real.edit(asked.id, |row| {
                    asked.patch.apply(&mut row.job, memory.now());
                    after = Some(row.job.execution.clone());
                });
                Ok(after.map_or(Update::Missing, Update::Applied))
            }
            answer => answer,
        }
    }
}

struct UnknownStateIsAConflict;

#[async_trait]
impl Wrong for UnknownStateIsAConflict {
    async fn answer(&self, _: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        match answer {
            Ok(Update::Unreadable(_)) => Ok(Update::Conflict(invented(asked))),
            answer => answer,
        }
    }
}

struct BusyIsPermanent;

#[async_trait]
impl Wrong for BusyIsPermanent {
    async fn answer(&self, _: &Real, _: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        match answer {
            Err(error) if error.kind() == ErrorKind::Transient => {
                Err(Error::not_applied(ErrorKind::Permanent, error.to_string()))
            }
            answer => answer,
        }
    }
}

struct TwoSteps;

#[async_trait]
impl Wrong for TwoSteps {
    async fn update(&self, real: &Real, update: &UpdateRequest) -> Result<Update> {
        let mut first = UpdateRequest { patch: Patch { failure: None, ..update.patch.clone() }, ..update.clone() };
        first.patch.revision = None;
        first.patch.result = Change::Keep;
        let Update::Applied(row) = real.update(&first).await? else { return real.update(update).await };
        tokio::task::yield_now().await;
        real.update(&UpdateRequest { current: row.fingerprint(), ..update.clone() }).await
    }
}

struct LeavesItsLock;

#[async_trait]
impl Wrong for LeavesItsLock {
    async fn update(&self, real: &Real, update: &UpdateRequest) -> Result<Update> {
        real.shared.locked_for(real.update(update)).await
    }
}

struct RenewsEveryRevision;

#[async_trait]
impl Wrong for RenewsEveryRevision {
    async fn ask(&self, _: &Real, update: &mut UpdateRequest) -> Result<()> {
        update.patch.revision.get_or_insert_with(Revision::random);
        Ok(())
    }
}

struct DelayFromTheClaim;

#[async_trait]
impl Wrong for DelayFromTheClaim {
    async fn ask(&self, _: &Real, update: &mut UpdateRequest) -> Result<()> {
        if let (Some(When::After(delay)), Some(at)) = (update.patch.available, update.current.claimed_at) {
            update.patch.available = Some(When::At(at.saturating_add_millis(delay.as_millis())));
        }
        Ok(())
    }
}

struct FailureOfNobody;

#[async_trait]
impl Wrong for FailureOfNobody {
    async fn ask(&self, _: &Real, update: &mut UpdateRequest) -> Result<()> {
        if let Some(failure) = &mut update.patch.failure {
            (failure.worker, failure.fence) = (None, 0);
        }
        Ok(())
    }
}

struct CallersClock;

#[async_trait]
impl Wrong for CallersClock {
    async fn answer(&self, real: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        if let Ok(Update::Applied(_)) = answer {
            let advanced = real.advanced();
            real.edit(asked.id, |row| {
                if asked.patch.finished_at == Change::Set(()) {
                    row.job.finished_at = row.job.finished_at.map(|at| at.saturating_add_millis(-advanced));
                }
            });
        }
        answer
    }
}
