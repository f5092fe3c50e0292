//! What is special about one kind of job.

use std::time::Duration;

use super::retry_policy::RetryPolicy;

/// How jobs of one kind are run, where that differs from the worker's other kinds; see
/// [`WorkerBuilder::register_with`](crate::WorkerBuilder::register_with).
///
/// ```
/// # use std::time::Duration;
/// # use fenced_queue::{KindOptions, RetryPolicy};
/// let thumbnails = KindOptions::new()
///     .timeout(Duration::from_secs(60))
///     .retry(RetryPolicy::exponential(Duration::from_secs(5), Duration::from_secs(300)));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KindOptions {
    pub(super) timeout: Option<Duration>,
    pub(super) retry: Option<RetryPolicy>,
    pub(super) aborts_when_uncertain: bool,
}

impl KindOptions {
    /// Nothing special.
    pub fn new() -> Self {
        Self::default()
    }

    /// How long one attempt may take; without it there is no limit. Leases are renewed all the while, so it may be longer
    /// than the lease.
    ///
    /// Then the token fires, with [`CancelReason::Timeout`](crate::CancelReason::Timeout). A handler that has not ended a second later is
    /// dropped where it awaits, which is a failed attempt.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// When failed attempts are tried again, instead of the worker's policy.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = Some(policy);
        self
    }

    /// Drops the handler as soon as its lease could not be renewed in time, for work that two must rather not do at once.
    /// It may still have been running for a moment while another worker began. Otherwise only its token fires.
    pub fn abort_when_lease_uncertain(mut self) -> Self {
        self.aborts_when_uncertain = true;
        self
    }
}
