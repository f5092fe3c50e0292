//! What a lifecycle write changes.

use crate::Capabilities;
use crate::Error;
use crate::Execution;
use crate::Failure;
use crate::FailureText;
use crate::Fingerprint;
use crate::Job;
use crate::JobState;
use crate::Json;
use crate::Lease;
use crate::Revision;
use crate::Timestamp;
use crate::When;
use crate::WorkerId;
use crate::job::check_size;

/// The columns that a lifecycle write sets; all others stay as they are.
///
/// A patch carries the new revision, made when the decision was made: sent again after a lost
/// answer it is recognised by it. Times are resolved by the store, inside the statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patch {
    /// The new identity; `None` keeps the old one (adoption and progress do).
    pub revision: Option<Revision>,
    /// The new state.
    pub state: JobState,
    /// The new attempt.
    pub attempt: u32,
    /// When the job becomes due; `None` keeps the time.
    pub available: Option<When>,
    /// Whether `claimed_by` and `claimed_at` are cleared.
    pub clear_claim: bool,
    /// `attempted_at`.
    pub attempted_at: Change<()>,
    /// `lease_expires_at`, counted from the store's now.
    pub lease: Change<Lease>,
    /// `finished_at`.
    pub finished_at: Change<()>,
    /// `result`.
    pub result: Change<Json>,
    /// A failure to add to `errors`, of which the newest [`Failure::KEPT`] stay.
    pub failure: Option<NewFailure>,
    /// A new payload; no lifecycle move sets it, only a replacement of a waiting job.
    pub payload: Option<Json>,
}

/// What becomes of one column. `Set(())` sets a time to the store's now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change<T> {
    /// It stays.
    Keep,
    /// It becomes null.
    Clear,
    /// It gets this value.
    Set(T),
}

/// A [`Failure`] to record, at the store's now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewFailure {
    /// The attempt that failed.
    pub attempt: u32,
    /// The fence of its claim.
    pub fence: u64,
    /// Who ran it.
    pub worker: Option<WorkerId>,
    /// What went wrong.
    pub text: FailureText,
}

impl NewFailure {
    pub(crate) fn of(execution: &Execution, text: FailureText) -> Self {
        Self { attempt: execution.attempt, fence: execution.fence, worker: execution.claimed_by.clone(), text }
    }
}

impl<T> Change<T> {
    /// The column's new value, where `old` is the present one and `set` makes the new one.
    pub fn apply<U>(&self, old: &mut Option<U>, set: impl FnOnce(&T) -> U) {
        match self {
            Self::Keep => {}
            Self::Clear => *old = None,
            Self::Set(value) => *old = Some(set(value)),
        }
    }
}

impl Patch {
    /// Changes nothing: for a write that only checks, and locks, the row of this fingerprint.
    pub fn keep(current: &Fingerprint) -> Self {
        Self {
            revision: None,
            state: current.state,
            attempt: current.attempt,
            available: None,
            clear_claim: false,
            attempted_at: Change::Keep,
            lease: Change::Keep,
            finished_at: Change::Keep,
            result: Change::Keep,
            failure: None,
            payload: None,
        }
    }

    /// Refuses what is over the store's cap. Every backend calls it before it writes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::TooLarge`](crate::ErrorKind::TooLarge), not applied.
    pub fn check(&self, capabilities: &Capabilities) -> Result<(), Error> {
        if let Change::Set(result) = &self.result {
            check_size("result", result, capabilities.max_payload)?;
        }
        match &self.payload {
            Some(payload) => check_size("payload", payload, capabilities.max_payload),
            None => Ok(()),
        }
    }

    /// The bytes of the texts that it writes, but for a failure's, which is short.
    pub(crate) fn bytes(&self) -> usize {
        let result = if let Change::Set(result) = &self.result { result.bytes() } else { 0 };
        result + self.payload.as_ref().map_or(0, Json::bytes)
    }

    /// Changes a row that the store holds in memory, when its clock shows `now`. A backend on a
    /// database does the same inside its statement.
    pub fn apply(&self, job: &mut Job, now: Timestamp) {
        self.apply_to_execution(&mut job.execution, now);
        self.finished_at.apply(&mut job.finished_at, |()| now);
        self.result.apply(&mut job.result, Json::clone);
        if let Some(when) = self.available {
            job.available_at = when.resolve(now);
        }
        if let Some(payload) = &self.payload {
            job.payload = payload.clone();
        }
        if let Some(NewFailure { attempt, fence, worker, text }) = self.failure.clone() {
            job.errors.push(Failure { attempt, fence, worker, at: now, text });
            let surplus = job.errors.len().saturating_sub(Failure::KEPT);
            job.errors.drain(..surplus);
        }
    }

    /// The part of [`apply`](Self::apply) that is about the lifecycle.
    pub fn apply_to_execution(&self, execution: &mut Execution, now: Timestamp) {
        execution.revision = self.revision.unwrap_or(execution.revision);
        execution.state = self.state;
        execution.attempt = self.attempt;
        if self.clear_claim {
            execution.claimed_by = None;
            execution.claimed_at = None;
        }
        self.attempted_at.apply(&mut execution.attempted_at, |()| now);
        let until = |lease: &Lease| now.saturating_add_millis(lease.as_millis());
        self.lease.apply(&mut execution.lease_expires_at, until);
    }
}
