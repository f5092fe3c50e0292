//! Data on its way in and out.

use async_trait::async_trait;
use queue_core::*;

use super::enqueue::Stores;
use crate::Fault;
use crate::broken::Real;
use crate::fault::Wrong;

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "data::normalises_payloads",
        &Stores(|job, _| job.payload = normalised(&job.payload)),
        "Payloads go through a JSON value: spaces, key order and big numbers change.",
        &["data::payloads_are_kept_byte_for_byte"],
    )
    .everywhere(),
    Fault::new(
        "data::normalises_updates",
        &Asks(|patch| {
            patch.payload = patch.payload.as_ref().map(normalised);
            if let Change::Set(result) = &mut patch.result {
                *result = normalised(result);
            }
        }),
        "Results go through a JSON value.",
        &["data::updates_keep_json_byte_for_byte"],
    )
    .everywhere(),
    Fault::new(
        "data::null_is_no_result",
        &Asks(|patch| {
            if patch.result == Change::Set(Json::null()) {
                patch.result = Change::Clear
            }
        }),
        "A result of null is stored as none.",
        &["data::null_is_a_result"],
    )
    .everywhere(),
    Fault::new(
        "data::due_in_seconds",
        &Stores(|job, _| {
            if let When::At(at) = job.available {
                job.available = When::At(at.saturating_add_millis(-at.unix_millis().rem_euclid(1_000)))
            }
        }),
        "Due times are cut to whole seconds.",
        &["data::instants_are_kept_to_the_millisecond", "enqueue::past_and_far_due_times"],
    )
    .everywhere(),
    Fault::new(
        "data::time_moves_by_itself",
        &TimeMovesByItself,
        "A time column is set to now by every update, as MariaDB's first timestamp column is.",
        &["data::time_columns_do_not_move_by_themselves"],
    ),
    Fault::new(
        "data::three_byte_texts",
        &Asks(|patch| {
            if let Some(failure) = &mut patch.failure {
                let text: String =
                    failure.text.as_str().chars().map(|c| if c.len_utf8() > 3 { '?' } else { c }).collect();
                failure.text = text.into();
            }
        }),
        "Texts lose their characters of four bytes.",
        &["data::any_failure_text_is_recorded"],
    )
    .everywhere(),
    Fault::new(
        "data::short_texts",
        &Asks(|patch| {
            if let Some(failure) = &mut patch.failure {
                let text = failure.text.as_str();
                failure.text = text[..text.floor_char_boundary(255)].into();
            }
        }),
        "A failure's text is cut to 255 bytes.",
        &["data::any_failure_text_is_recorded"],
    ),
    Fault::new(
        "data::failures_have_no_room",
        &FailuresHaveNoRoom,
        "Recorded failures do not fit their column when each is long.",
        &["data::failures_fill_their_room"],
    ),
    Fault::new(
        "data::failures_unbounded",
        &Failures { dropped: |old, _| old, keeps_all: true },
        "The list of failures grows without end.",
        &["data::the_newest_failures_are_kept"],
    ),
    Fault::new(
        "data::oldest_failures_kept",
        &OldestFailuresKept,
        "Once the list of failures is full, new ones are dropped.",
        &["data::the_newest_failures_are_kept"],
    ),
    Fault::new(
        "data::rerun_forgets_failures",
        &Failures { dropped: |old, rerun| if rerun { Vec::new() } else { old }, keeps_all: false },
        "A rerun clears the failures.",
        &["data::failures_outlive_a_rerun", "settle::rerun"],
    ),
    Fault::new(
        "data::small_attempts",
        &Asks(|patch| patch.attempt = patch.attempt.min(255)),
        "Attempts are kept in a byte.",
        &["data::big_numbers"],
    )
    .everywhere(),
    Fault::new(
        "data::short_names",
        &Stores(|job, _| {
            let text = job.kind.as_str();
            if let Ok(name) = Name::try_from(&text[..text.floor_char_boundary(254)]) {
                job.kind = name;
            }
        }),
        "Names are cut to the length of their column.",
        &["data::names_at_their_limits"],
    )
    .everywhere(),
];

pub(super) fn normalised(json: &Json) -> Json {
    let value = json.decode::<serde_json::Value>().and_then(|value| Json::encode(&value));
    value.unwrap_or_else(|_| json.clone())
}

/// Changes what an update writes.
pub(super) struct Asks(pub(super) fn(&mut Patch));

#[async_trait]
impl Wrong for Asks {
    async fn ask(&self, _: &Real, update: &mut UpdateRequest) -> Result<()> {
        (self.0)(&mut update.patch);
        Ok(())
    }
}

struct TimeMovesByItself;

#[async_trait]
impl Wrong for TimeMovesByItself {
    async fn answer(&self, real: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        if let Ok(Update::Applied(_)) = answer {
            let now = real.memory().now();
            real.edit(asked.id, |row| row.job.created_at = now);
        }
        answer
    }
}

struct FailuresHaveNoRoom;

#[async_trait]
impl Wrong for FailuresHaveNoRoom {
    async fn ask(&self, real: &Real, update: &mut UpdateRequest) -> Result<()> {
        let Some(failure) = &update.patch.failure else { return Ok(()) };
        let job = real.handle.get(update.id).await.ok().flatten();
        let kept: usize = job.iter().flat_map(|job| &job.errors).map(|failure| failure.text.as_str().len()).sum();
        match kept + failure.text.as_str().len() > 16_384 {
            true => Err(Error::not_applied(ErrorKind::Permanent, "data too long for column errors")),
            false => Ok(()),
        }
    }
}

/// What becomes of the failures that a row had, told whether it runs again.
struct Failures {
    dropped: fn(Vec<Failure>, bool) -> Vec<Failure>,
    keeps_all: bool,
}

#[async_trait]
impl Wrong for Failures {
    async fn ask(&self, real: &Real, update: &mut UpdateRequest) -> Result<()> {
        let job = real.handle.get(update.id).await.ok().flatten();
        real.kept.keep(&job);
        Ok(())
    }

    async fn answer(&self, real: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        if let (Ok(Update::Applied(row)), Some(before)) = (&answer, real.kept.jobs().remove(&asked.id)) {
            let rerun = before.state().is_final() && row.state == JobState::Waiting;
            real.edit(asked.id, |row| {
                let newest = row.job.errors.pop().filter(|_| asked.patch.failure.is_some());
                row.job.errors = (self.dropped)(before.errors, rerun);
                row.job.errors.extend(newest);
                let surplus = row.job.errors.len().saturating_sub(Failure::KEPT);
                row.job.errors.drain(..if self.keeps_all { 0 } else { surplus });
            });
        }
        answer
    }
}

struct OldestFailuresKept;

#[async_trait]
impl Wrong for OldestFailuresKept {
    async fn ask(&self, real: &Real, update: &mut UpdateRequest) -> Result<()> {
        let job = real.handle.get(update.id).await.ok().flatten();
        if job.is_some_and(|job| job.errors.len() == Failure::KEPT) {
            update.patch.failure = None;
        }
        Ok(())
    }
}
