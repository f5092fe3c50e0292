//! Which execution a decision was based on.

use crate::Execution;
use crate::JobState;
use crate::Revision;
use crate::Timestamp;
use crate::WorkerId;

/// What a compare-and-update compares: the moment that the decision was based on.
///
/// The revision alone identifies the moment. The other fields are compared too: they make conflicts
/// readable, and they catch rows that were changed by hand. `None` equals `None` and nothing else.
///
/// Nothing that a heartbeat changes is compared for a holder: otherwise a heartbeat whose answer was
/// lost would make the owner's own result bounce. A sweep is the opposite case, see [`LeaseMatch`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// The state seen.
    pub state: JobState,
    /// The attempt seen.
    pub attempt: u32,
    /// The holder seen.
    pub claimed_by: Option<WorkerId>,
    /// The time of the claim seen.
    pub claimed_at: Option<Timestamp>,
    /// The time of the start seen.
    pub attempted_at: Option<Timestamp>,
    /// The identity of the moment seen.
    pub revision: Revision,
    /// What is asked of the lease.
    pub lease: LeaseMatch,
}

/// What a fingerprint asks of the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseMatch {
    /// Nothing: the decision of a holder or of an operator.
    Any,
    /// It equals what was seen and has run out by the store's clock (is not after it): the decision
    /// of a sweep, which must lose against a late heartbeat.
    Expired(Timestamp),
    /// There is none: the adoption of a row of unknown age.
    Unset,
}

impl Fingerprint {
    /// The fingerprint of a holder.
    pub fn of(execution: &Execution) -> Self {
        Self {
            state: execution.state,
            attempt: execution.attempt,
            claimed_by: execution.claimed_by.clone(),
            claimed_at: execution.claimed_at,
            attempted_at: execution.attempted_at,
            revision: execution.revision,
            lease: LeaseMatch::Any,
        }
    }

    /// Whether a row is still what this fingerprint was taken of, when the store's clock shows `now`.
    pub fn matches(&self, current: &Execution, now: Timestamp) -> bool {
        let lease = match self.lease {
            LeaseMatch::Any => true,
            LeaseMatch::Expired(seen) => current.lease_expires_at == Some(seen) && seen <= now,
            LeaseMatch::Unset => current.lease_expires_at.is_none(),
        };
        lease && Self { lease: LeaseMatch::Any, ..self.clone() } == Self::of(current)
    }
}
