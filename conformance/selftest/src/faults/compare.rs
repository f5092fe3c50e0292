//! What is compared, and how.

use std::num::NonZeroU32;
use std::sync::atomic::Ordering;

use async_trait::async_trait;
use queue_core::*;

use crate::Fault;
use crate::broken::Real;
use crate::broken::gap;
use crate::fault::Wrong;

const FIELDS: &[&str] = &["update::every_field_is_compared"];
const RACES: &[&str] = &["update::race_has_one_winner", "update::chain_has_no_fork", "settle::one_outcome_of_many"];

pub(super) const FAULTS: &[Fault] = &[
    Fault::new("compare::ignores_a_field/state", &Ignores(Field::State), "The state is not compared.", FIELDS)
        .everywhere(),
    Fault::new("compare::ignores_a_field/attempt", &Ignores(Field::Attempt), "The attempt is not compared.", FIELDS),
    Fault::new(
        "compare::ignores_a_field/claimed_by",
        &Ignores(Field::ClaimedBy),
        "The holder is not compared.",
        FIELDS,
    ),
    Fault::new(
        "compare::ignores_a_field/claimed_at",
        &Ignores(Field::ClaimedAt),
        "The time of the claim is not compared.",
        FIELDS,
    ),
    Fault::new(
        "compare::ignores_a_field/attempted_at",
        &Ignores(Field::AttemptedAt),
        "The time of the start is not compared.",
        FIELDS,
    ),
    Fault::new(
        "compare::ignores_a_field/revision",
        &Ignores(Field::Revision),
        "State, attempt and holder are taken for an identity; the revision is not compared.",
        FIELDS,
    )
    .everywhere(),
    Fault::new(
        "compare::ignores_everything",
        &IgnoresEverything,
        "The last writer wins: `UPDATE .. WHERE id = ?`.",
        &[
            "update::a_conflict_changes_nothing",
            "update::newer_execution_in_the_same_state_conflicts",
            "update::race_has_one_winner",
            "recover::old_holder_is_refused",
            "recover::stale_scan_does_not_resurrect",
            "recover::stale_scan_of_reserved_jobs",
            "recover::sweep_against_settles",
        ],
    )
    .everywhere(),
    Fault::new(
        "compare::null_never_equals",
        &NullNeverEquals,
        "Columns are compared with `=`, so that a row with a null never matches.",
        &["update::null_equals_null"],
    )
    .everywhere(),
    Fault::new(
        "compare::null_seen_matches_all",
        &NullSeenMatchesAll,
        "`? IS NULL OR column = ?`: a null seen matches every value.",
        FIELDS,
    )
    .everywhere(),
    Fault::new(
        "compare::null_there_matches_all",
        &NullThereMatchesAll,
        "`column IS NULL OR column = ?`: a null in the row matches every value.",
        FIELDS,
    ),
    Fault::new(
        "compare::reads_then_writes",
        &ReadsThenWrites,
        "SELECT, compare, then UPDATE by id: two statements.",
        RACES,
    )
    .everywhere(),
    Fault::new(
        "compare::loser_gets_an_error",
        &LoserGetsAnError,
        "Who loses a race gets the database's serialization failure.",
        &["update::race_has_one_winner"],
    ),
    Fault::new(
        "compare::state_and_holder_alone",
        &StateAndHolderAlone,
        "A running job of the same worker is taken for the one that was seen.",
        &["recover::same_worker_is_refused_too", "update::every_field_is_compared"],
    )
    .everywhere(),
];

#[derive(Clone, Copy)]
pub(super) enum Field {
    State,
    Attempt,
    ClaimedBy,
    ClaimedAt,
    AttemptedAt,
    Revision,
}

impl Field {
    /// Takes the field from the row that is there.
    pub(super) fn take(self, seen: &mut Fingerprint, there: &Execution) {
        match self {
            Self::State => seen.state = there.state,
            Self::Attempt => seen.attempt = there.attempt,
            Self::ClaimedBy => seen.claimed_by.clone_from(&there.claimed_by),
            Self::ClaimedAt => seen.claimed_at = there.claimed_at,
            Self::AttemptedAt => seen.attempted_at = there.attempted_at,
            Self::Revision => seen.revision = there.revision,
        }
    }
}

struct Ignores(Field);

#[async_trait]
impl Wrong for Ignores {
    async fn ask(&self, real: &Real, update: &mut UpdateRequest) -> Result<()> {
        if let Some(there) = real.row(update.id).await {
            self.0.take(&mut update.current, &there);
        }
        Ok(())
    }
}

struct IgnoresEverything;

#[async_trait]
impl Wrong for IgnoresEverything {
    async fn update(&self, real: &Real, update: &UpdateRequest) -> Result<Update> {
        real.force(update.id, &update.patch).await
    }

    async fn update_many(&self, real: &Real, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        let mut answers = Vec::with_capacity(updates.len());
        for update in updates {
            answers.push(real.force(update.id, &update.patch).await?);
        }
        Ok(answers)
    }
}

struct StateAndHolderAlone;

#[async_trait]
impl Wrong for StateAndHolderAlone {
    async fn ask(&self, real: &Real, update: &mut UpdateRequest) -> Result<()> {
        let seen = &mut update.current;
        if let Some(there) = real.row(update.id).await
            && (there.state, &there.claimed_by) == (seen.state, &seen.claimed_by)
        {
            *seen = Fingerprint { lease: seen.lease, ..there.fingerprint() };
        }
        Ok(())
    }
}

struct NullNeverEquals;

#[async_trait]
impl Wrong for NullNeverEquals {
    async fn ask(&self, _: &Real, update: &mut UpdateRequest) -> Result<()> {
        let seen = &mut update.current;
        if seen.claimed_by.is_none() || seen.claimed_at.is_none() || seen.attempted_at.is_none() {
            seen.revision = Revision::random();
        }
        Ok(())
    }
}

struct NullSeenMatchesAll;

#[async_trait]
impl Wrong for NullSeenMatchesAll {
    async fn ask(&self, real: &Real, update: &mut UpdateRequest) -> Result<()> {
        if let Some(there) = real.row(update.id).await {
            let seen = &mut update.current;
            seen.claimed_by = seen.claimed_by.take().or(there.claimed_by);
            seen.claimed_at = seen.claimed_at.or(there.claimed_at);
            seen.attempted_at = seen.attempted_at.or(there.attempted_at);
        }
        Ok(())
    }
}

struct NullThereMatchesAll;

#[async_trait]
impl Wrong for NullThereMatchesAll {
    async fn ask(&self, real: &Real, update: &mut UpdateRequest) -> Result<()> {
        if let Some(there) = real.row(update.id).await {
            let seen = &mut update.current;
            seen.claimed_by = seen.claimed_by.take().filter(|_| there.claimed_by.is_some());
            seen.claimed_at = seen.claimed_at.filter(|_| there.claimed_at.is_some());
            seen.attempted_at = seen.attempted_at.filter(|_| there.attempted_at.is_some());
        }
        Ok(())
    }
}

struct ReadsThenWrites;

#[async_trait]
impl Wrong for ReadsThenWrites {
    async fn update(&self, real: &Real, update: &UpdateRequest) -> Result<Update> {
        let Some(there) = real.row(update.id).await else { return real.update(update).await };
        let seen = Fingerprint { lease: LeaseMatch::Any, ..update.current.clone() };
        if seen != there.fingerprint() || update.current.lease != LeaseMatch::Any {
            return real.update(update).await;
        }
        gap().await;
        real.force(update.id, &update.patch).await
    }
}

struct LoserGetsAnError;

#[async_trait]
impl Wrong for LoserGetsAnError {
    async fn update(&self, real: &Real, update: &UpdateRequest) -> Result<Update> {
        let others = real.shared.busy.fetch_add(1, Ordering::SeqCst);
        gap().await;
        let answer = real.update(update).await;
        real.shared.busy.fetch_sub(1, Ordering::SeqCst);
        match answer {
            Ok(Update::Conflict(_)) if others > 0 => {
                Err(Error::not_applied(ErrorKind::Transient, "could not serialize access due to concurrent update"))
            }
            answer => answer,
        }
    }
}

/// A row as it may have been when this was seen: what a backend shows that has none to show.
pub(super) fn invented(update: &UpdateRequest) -> Execution {
    let seen = update.current.clone();
    Execution {
        id: update.id,
        state: seen.state,
        attempt: seen.attempt,
        max_attempts: NonZeroU32::MIN,
        fence: 0,
        revision: seen.revision,
        claimed_by: seen.claimed_by,
        claimed_at: seen.claimed_at,
        attempted_at: seen.attempted_at,
        lease_expires_at: None,
    }
}
