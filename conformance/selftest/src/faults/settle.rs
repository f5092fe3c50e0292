//! Moves of a job's life, as a backend that knows better writes them.

use async_trait::async_trait;
use queue_core::*;

use super::data::Asks;
use crate::Fault;
use crate::broken::Real;
use crate::fault::Wrong;

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "settle::ignores_delays",
        &Asks(|patch| {
            if let Some(When::After(_)) = patch.available {
                patch.available = Some(When::Now)
            }
        }),
        "A delay is not added: the job is due at once.",
        &["settle::retry_waits_for_its_delay", "settle::each_move_writes_its_patch"],
    )
    .everywhere(),
    Fault::new(
        "settle::ignores_instants",
        &Asks(|patch| {
            if let Some(When::At(_)) = patch.available {
                patch.available = Some(When::Now)
            }
        }),
        "An instant is not stored: the job is due at once.",
        &["settle::snooze_until_an_instant"],
    )
    .everywhere(),
    Fault::new(
        "settle::failed_waits_again",
        &Asks(|patch| {
            if patch.state == JobState::Failed {
                patch.state = JobState::Waiting;
                (patch.clear_claim, patch.finished_at, patch.attempted_at) = (true, Change::Clear, Change::Clear);
            }
        }),
        "The store tries every failure again.",
        &["settle::fail_is_final", "settle::retry_ends_with_the_last_attempt"],
    )
    .everywhere(),
    Fault::new(
        "settle::snooze_counts",
        &Asks(|patch| {
            if patch.state == JobState::Waiting {
                patch.attempt += 1
            }
        }),
        "Putting a job off uses up an attempt.",
        &["settle::snoozes_cost_no_attempt"],
    ),
    Fault::new(
        "settle::only_the_holder_cancels",
        &OnlyTheHolderCancels,
        "An update of a row that nobody holds is refused.",
        &["settle::cancel_from_every_active_state", "settle::replace"],
    )
    .everywhere(),
    Fault::new(
        "settle::cancel_has_no_reason",
        &Asks(|patch| {
            if patch.state == JobState::Canceled {
                patch.failure = None
            }
        }),
        "The reason of a cancellation is not kept.",
        &["settle::cancel_from_every_active_state"],
    ),
    Fault::new(
        "settle::cancels_agree",
        &CancelsAgree,
        "Who cancels a job that was canceled meanwhile is told that it was applied.",
        &["settle::cancels_at_once"],
    )
    .everywhere(),
    Fault::new(
        "settle::rerun_keeps_the_result",
        &Asks(|patch| {
            if patch.result == Change::Clear {
                patch.result = Change::Keep
            }
        }),
        "A job that runs again keeps its old result.",
        &["settle::rerun"],
    )
    .everywhere(),
    Fault::new(
        "settle::rerun_starts_a_new_fence",
        &RerunStartsANewFence,
        "A job that runs again counts its fences from nought.",
        &["settle::rerun_keeps_the_fence"],
    )
    .everywhere(),
    Fault::new(
        "settle::payload_is_immutable",
        &Asks(|patch| patch.payload = None),
        "The payload of a stored job is never written.",
        &["settle::replace"],
    )
    .everywhere(),
    Fault::new(
        "settle::latest_replacement_wins",
        &LatestReplacementWins,
        "A payload is written whatever became of the job.",
        &["settle::replace_loses_to_a_claim"],
    ),
    Fault::new(
        "settle::start_is_not_compared",
        &StartIsNotCompared,
        "A start asks only for the state, not for the claim that it belongs to.",
        &["settle::start_is_fenced"],
    )
    .everywhere(),
];

struct OnlyTheHolderCancels;

#[async_trait]
impl Wrong for OnlyTheHolderCancels {
    async fn ask(&self, _: &Real, update: &mut UpdateRequest) -> Result<()> {
        if update.current.state == JobState::Waiting {
            update.current.revision = Revision::random();
        }
        Ok(())
    }
}

struct CancelsAgree;

#[async_trait]
impl Wrong for CancelsAgree {
    async fn answer(&self, _: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        match answer? {
            Update::Conflict(row) if row.state == JobState::Canceled && asked.patch.state == JobState::Canceled => {
                Ok(Update::Applied(row))
            }
            answer => Ok(answer),
        }
    }
}

struct RerunStartsANewFence;

#[async_trait]
impl Wrong for RerunStartsANewFence {
    async fn answer(&self, real: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        match answer? {
            Update::Applied(row) if asked.current.state.is_final() && row.state == JobState::Waiting => {
                let row = Execution { fence: 0, ..row };
                real.set(&row).await?;
                Ok(Update::Applied(row))
            }
            answer => Ok(answer),
        }
    }
}

struct LatestReplacementWins;

#[async_trait]
impl Wrong for LatestReplacementWins {
    async fn answer(&self, real: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        if let Some(payload) = asked.patch.payload.clone() {
            real.edit(asked.id, |row| row.job.payload = payload);
        }
        answer
    }
}

struct StartIsNotCompared;

#[async_trait]
impl Wrong for StartIsNotCompared {
    async fn ask(&self, real: &Real, update: &mut UpdateRequest) -> Result<()> {
        if update.current.state == JobState::Claimed
            && update.patch.state == JobState::Running
            && let Some(there) = real.row(update.id).await.filter(|row| row.state == JobState::Claimed)
        {
            update.current = there.fingerprint();
        }
        Ok(())
    }
}
