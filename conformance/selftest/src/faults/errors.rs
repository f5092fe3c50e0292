//! What errors say, and rows that cannot be read.

use async_trait::async_trait;
use queue_core::*;

use crate::Fault;
use crate::broken::Real;
use crate::fault::Wrong;

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "errors::never_certain",
        &Says(|error| Error::new(error.kind(), Certainty::Unknown, error.to_string())),
        "Every error leaves open whether something was written.",
        &["update::too_large_then_smaller", "update::a_failing_row_is_an_error"],
    )
    .everywhere(),
    Fault::new(
        "errors::one_kind",
        &Says(|error| Error::new(ErrorKind::Permanent, error.certainty(), error.to_string())),
        "Every error is a permanent one.",
        &["enqueue::other_content_is_refused", "enqueue::payload_cap", "unique::rerun_into_a_taken_key"],
    )
    .everywhere(),
    Fault::new(
        "errors::unreadable_is_gone",
        &UnreadableIsGone,
        "Reading a row that cannot be read finds nothing.",
        &["update::unreadable_is_not_a_conflict"],
    )
    .everywhere(),
];

struct Says(fn(Error) -> Error);

impl Says {
    fn say(&self, error: Error) -> Error {
        let index = error.index();
        let error = (self.0)(error);
        index.map_or(Error::new(error.kind(), error.certainty(), error.to_string()), |index| error.at_index(index))
    }
}

#[async_trait]
impl Wrong for Says {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        real.handle.enqueue(jobs).await.map_err(|error| self.say(error))
    }

    async fn answer(&self, _: &Real, _: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        answer.map_err(|error| self.say(error))
    }
}

struct UnreadableIsGone;

#[async_trait]
impl Wrong for UnreadableIsGone {
    async fn get(&self, real: &Real, id: JobId) -> Result<Option<Job>> {
        Ok(real.handle.get(id).await.unwrap_or(None))
    }
}
