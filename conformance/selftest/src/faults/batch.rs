//! Batches that differ from the single form.

use std::collections::BTreeSet;

use async_trait::async_trait;
use queue_core::*;

use crate::Fault;
use crate::broken::Real;
use crate::fault::Wrong;

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "batch::not_atomic",
        &NotAtomic,
        "A batch is declared atomic and is a loop.",
        &["batch::a_bad_row_writes_nothing"],
    )
    .everywhere(),
    Fault::new(
        "batch::answers_by_id",
        &AnswersById,
        "A batch answers in the order of its rows' ids.",
        &["batch::judges_each_row", "batch::equals_the_single_form"],
    ),
    Fault::new(
        "batch::one_conflict_refuses_all",
        &OneConflictRefusesAll,
        "One conflict in a batch refuses all of it.",
        &["batch::judges_each_row"],
    ),
    Fault::new(
        "batch::judges_what_was_there_before",
        &JudgesWhatWasThereBefore,
        "A batch compares all its rows before it writes the first.",
        &["batch::takes_one_row_twice"],
    ),
    Fault::new(
        "batch::loses_the_failure",
        &LosesTheFailure,
        "A batch does not record failures, the single form does.",
        &["batch::equals_the_single_form"],
    )
    .everywhere(),
    Fault::new(
        "batch::empty_is_an_error",
        &EmptyIsAnError,
        "An empty batch is a syntax error: `IN ()`.",
        &["batch::an_empty_one_is_harmless"],
    ),
    Fault::new(
        "batch::swallows_a_bad_row",
        &SwallowsABadRow,
        "A batch answers a row that the store failed to write as missing.",
        &["batch::a_bad_row_spares_the_others"],
    ),
];

struct NotAtomic;

#[async_trait]
impl Wrong for NotAtomic {
    async fn update_many(&self, real: &Real, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        let mut answers = Vec::new();
        for update in updates {
            answers.push(real.update(update).await?);
        }
        Ok(answers)
    }
}

struct AnswersById;

#[async_trait]
impl Wrong for AnswersById {
    async fn update_many(&self, real: &Real, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        let answers = real.handle.update_many_if_current(updates).await?;
        let mut by_id: Vec<_> = updates.iter().map(|update| update.id).zip(answers).collect();
        by_id.sort_by_key(|(id, _)| *id);
        Ok(by_id.into_iter().map(|(_, answer)| answer).collect())
    }
}

struct OneConflictRefusesAll;

#[async_trait]
impl Wrong for OneConflictRefusesAll {
    async fn update_many(&self, real: &Real, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        let mut rows = Vec::new();
        for update in updates {
            rows.push(real.row(update.id).await);
        }
        let stands = |(row, update): (&Option<Execution>, &UpdateRequest)| {
            row.as_ref().is_none_or(|row| row.revision == update.current.revision)
        };
        if rows.iter().zip(updates).all(stands) {
            return real.handle.update_many_if_current(updates).await;
        }
        Ok(rows.into_iter().map(|row| row.map_or(Update::Missing, Update::Conflict)).collect())
    }
}

struct JudgesWhatWasThereBefore;

#[async_trait]
impl Wrong for JudgesWhatWasThereBefore {
    async fn update_many(&self, real: &Real, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        let (mut written, mut answers) = (BTreeSet::new(), Vec::new());
        for update in updates {
            let answer = match written.contains(&update.id) {
                true => real.force(update.id, &update.patch).await?,
                false => real.update(update).await?,
            };
            if let Update::Applied(_) = answer {
                written.insert(update.id);
            }
            answers.push(answer);
        }
        Ok(answers)
    }
}

struct LosesTheFailure;

#[async_trait]
impl Wrong for LosesTheFailure {
    async fn update_many(&self, real: &Real, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        let mut updates = updates.to_vec();
        for update in &mut updates {
            update.patch.failure = None;
        }
        real.handle.update_many_if_current(&updates).await
    }
}

struct EmptyIsAnError;

#[async_trait]
impl Wrong for EmptyIsAnError {
    async fn update_many(&self, real: &Real, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        match updates {
            [] => Err(Error::not_applied(ErrorKind::Permanent, "syntax error near \")\"")),
            updates => real.handle.update_many_if_current(updates).await,
        }
    }
}

struct SwallowsABadRow;

#[async_trait]
impl Wrong for SwallowsABadRow {
    async fn update_many(&self, real: &Real, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        let mut answers = Vec::new();
        for update in updates {
            answers.push(real.update(update).await.unwrap_or(Update::Missing));
        }
        Ok(answers)
    }
}
