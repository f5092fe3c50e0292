//! The moves of a job's life, planned as pure functions.

use std::num::NonZeroU32;

use crate::Change;
use crate::Execution;
use crate::FailureText;
use crate::Fingerprint;
use crate::JobId;
use crate::JobState;
use crate::Json;
use crate::Lease;
use crate::LeaseMatch;
use crate::NewFailure;
use crate::Patch;
use crate::Revision;
use crate::When;

/// A move that a job may make. (The claim is not among them: it decides nothing about a job that was
/// seen before, and belongs to [`Backend::claim`](crate::Backend::claim).)
///
/// | transition | from | to | attempt |
/// |---|---|---|---|
/// | start | claimed | running | +1 |
/// | progress | running | the same | |
/// | complete | running | completed | |
/// | retry | running | waiting, or failed when the attempts are used up | |
/// | fail | running | failed | |
/// | suspend | running | suspended | given back |
/// | wake | suspended | waiting, due now | |
/// | snooze | running, claimed, waiting | waiting | given back if running |
/// | release | claimed, running | waiting, due now | given back if running |
/// | recover | claimed with a lease | waiting, due now | |
/// | recover | running with a lease | waiting, due now, or failed when the attempts are used up | |
/// | adopt | claimed or running without a lease | the same | |
/// | cancel | waiting, claimed, running, suspended | canceled | |
/// | rerun | completed, failed, canceled | waiting, due now | 0 |
/// | replace | waiting | waiting | |
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transition {
    /// A worker starts what it had reserved; its lease is renewed.
    Start {
        /// The lease from now on.
        lease: Lease,
    },
    /// The holder says how far it is. That is no new moment of the job: whatever was decided on it before stays good.
    Progress {
        /// Shown as the job's result until it leaves the running state.
        value: Json,
    },
    /// The handler ended well.
    Complete {
        /// What it produced; `null` is a result too.
        result: Option<Json>,
    },
    /// The handler failed and may be tried again.
    Retry {
        /// What went wrong.
        error: FailureText,
        /// When to try again.
        available: When,
    },
    /// The handler failed for good, whatever attempts are left.
    Fail {
        /// What went wrong.
        error: FailureText,
    },
    /// The job is put off. A running job only by its holder.
    Snooze {
        /// Until when.
        available: When,
    },
    /// The holder gives the job up until an event comes; [`DurableSteps::write_step`](crate::DurableSteps::write_step) writes it together
    /// with what the job waits for.
    Suspend {
        /// Until when at most.
        until: When,
    },
    /// What the job waits for has come; or somebody wants it to look again, and it will wait again, until the same time, for what
    /// has not.
    Wake,
    /// The holder gives the job back untouched: at shutdown, or when it knows no handler.
    Release,
    /// The lease has run out: whoever sees it puts the job back. Refused by the store if the lease is
    /// alive by its clock, or has been renewed since it was seen.
    Recover,
    /// A held job without a lease gets one, and is recovered only after it has run out. Nothing else
    /// changes: its holder goes on as before.
    Adopt {
        /// The lease.
        lease: Lease,
    },
    /// The job is ended by an operator or by its handler.
    Cancel {
        /// Kept among the job's errors.
        reason: FailureText,
    },
    /// An operator runs an ended job again; its errors stay, its result goes.
    Rerun,
    /// A waiting job gets another payload and due time, and keeps its id.
    Replace {
        /// The new payload.
        payload: Json,
        /// The new due time.
        available: When,
    },
}

/// A move that the contract does not allow; nothing was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("job {id}: {transition} leads to {to}, but not from {from} {}", if *.leased { "with a lease" } else { "without a lease" })]
#[non_exhaustive]
pub struct IllegalTransition {
    /// The job.
    pub id: JobId,
    /// The move's name.
    pub transition: &'static str,
    /// The state that the job was seen in.
    pub from: JobState,
    /// The state that the move leads to.
    pub to: JobState,
    /// Whether the job was seen with a lease.
    pub leased: bool,
}

impl Transition {
    /// The move's name, as in messages and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Start { .. } => "start",
            Self::Progress { .. } => "progress",
            Self::Complete { .. } => "complete",
            Self::Retry { .. } => "retry",
            Self::Fail { .. } => "fail",
            Self::Suspend { .. } => "suspend",
            Self::Wake => "wake",
            Self::Snooze { .. } => "snooze",
            Self::Release => "release",
            Self::Recover => "recover",
            Self::Adopt { .. } => "adopt",
            Self::Cancel { .. } => "cancel",
            Self::Rerun => "rerun",
            Self::Replace { .. } => "replace",
        }
    }

    /// What the move writes, decided on what was seen of the job. No I/O, no clock.
    ///
    /// # Errors
    ///
    /// A move that the table does not have.
    pub fn plan(&self, seen: &Execution) -> Result<Patch, IllegalTransition> {
        use JobState::*;

        let leased = seen.lease_expires_at.is_some();
        let allowed = match self {
            Self::Start { .. } => seen.state == Claimed,
            Self::Progress { .. }
            | Self::Complete { .. }
            | Self::Retry { .. }
            | Self::Fail { .. }
            | Self::Suspend { .. } => seen.state == Running,
            Self::Wake => seen.state == Suspended,
            Self::Snooze { .. } => matches!(seen.state, Running | Claimed | Waiting),
            Self::Release => seen.state.is_held(),
            Self::Recover => seen.state.is_held() && leased,
            Self::Adopt { .. } => seen.state.is_held() && !leased,
            Self::Cancel { .. } => seen.state.is_active(),
            Self::Rerun => seen.state.is_final(),
            Self::Replace { .. } => seen.state == Waiting,
        };
        let patch = match self {
            Self::Start { lease } => Patch {
                attempt: seen.attempt.saturating_add(1),
                attempted_at: Change::Set(()),
                lease: Change::Set(*lease),
                ..unchanged(seen, Running)
            },
            Self::Progress { value } => {
                Patch { revision: None, result: Change::Set(value.clone()), ..unchanged(seen, Running) }
            }
            Self::Complete { result } => {
                Patch { result: result.clone().map_or(Change::Clear, Change::Set), ..ended(seen, Completed) }
            }
            Self::Retry { error, available } => attempt_failed(seen, error.clone(), *available),
            Self::Fail { error } => Patch { failure: Some(NewFailure::of(seen, error.clone())), ..ended(seen, Failed) },
            Self::Suspend { until } => Patch { state: Suspended, attempt: given_back(seen), ..waiting(seen, *until) },
            Self::Wake => waiting(seen, When::Now),
            Self::Snooze { available } => Patch { attempt: given_back(seen), ..waiting(seen, *available) },
            Self::Release => Patch { attempt: given_back(seen), ..waiting(seen, When::Now) },
            Self::Recover if seen.state == Running => attempt_failed(seen, "lease expired".into(), When::Now),
            Self::Recover => waiting(seen, When::Now),
            Self::Adopt { lease } => {
                Patch { revision: None, lease: Change::Set(*lease), ..unchanged(seen, seen.state) }
            }
            Self::Cancel { reason } => {
                Patch { failure: Some(NewFailure::of(seen, reason.clone())), ..ended(seen, Canceled) }
            }
            Self::Rerun => Patch { attempt: 0, ..waiting(seen, When::Now) },
            Self::Replace { payload, available } => {
                Patch { available: Some(*available), payload: Some(payload.clone()), ..unchanged(seen, Waiting) }
            }
        };
        if allowed {
            return Ok(patch);
        }
        let (id, transition, from) = (seen.id, self.name(), seen.state);
        Err(IllegalTransition { id, transition, from, to: patch.state, leased })
    }

    /// What the move compares, decided on what was seen of the job.
    pub(crate) fn fingerprint(&self, seen: &Execution) -> Fingerprint {
        let lease = match (self, seen.lease_expires_at) {
            (Self::Recover, Some(expiry)) => LeaseMatch::Expired(expiry),
            (Self::Adopt { .. }, _) => LeaseMatch::Unset,
            _ => LeaseMatch::Any,
        };
        Fingerprint { lease, ..seen.fingerprint() }
    }
}

fn unchanged(seen: &Execution, state: JobState) -> Patch {
    Patch { revision: Some(Revision::random()), state, ..Patch::keep(&seen.fingerprint()) }
}

/// Held by nobody: every trace of the claim and of an ending goes.
fn waiting(seen: &Execution, available: When) -> Patch {
    Patch {
        available: Some(available),
        clear_claim: true,
        attempted_at: Change::Clear,
        lease: Change::Clear,
        finished_at: Change::Clear,
        result: Change::Clear,
        ..unchanged(seen, JobState::Waiting)
    }
}

/// Ended: who held it, and since when, stays for the reader; what it said of its progress does not.
fn ended(seen: &Execution, state: JobState) -> Patch {
    Patch { lease: Change::Clear, finished_at: Change::Set(()), result: Change::Clear, ..unchanged(seen, state) }
}

/// The cap on attempts holds on every path.
fn attempt_failed(seen: &Execution, error: FailureText, available: When) -> Patch {
    let next = if seen.attempt < NonZeroU32::get(seen.max_attempts) {
        waiting(seen, available)
    } else {
        ended(seen, JobState::Failed)
    };
    Patch { failure: Some(NewFailure::of(seen, error)), ..next }
}

fn given_back(seen: &Execution) -> u32 {
    match seen.state {
        JobState::Running => seen.attempt.saturating_sub(1),
        _ => seen.attempt,
    }
}
