//! What a worker did in its life.

/// What a worker did, counted; the answer of [`Worker::run_until`](crate::Worker::run_until).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Jobs that were claimed.
    pub claimed: u64,
    /// Outcomes recorded: completed.
    pub completed: u64,
    /// Outcomes recorded: failed, to be tried again.
    pub retried: u64,
    /// Outcomes recorded: failed for good.
    pub failed: u64,
    /// Outcomes recorded: put off.
    pub snoozed: u64,
    /// Outcomes recorded: canceled by the handler.
    pub canceled: u64,
    /// Jobs given back untouched when the worker stopped, or when its claim's answer had been lost.
    pub released: u64,
    /// Outcomes refused because the job was no longer this worker's: benign.
    pub conflicts: u64,
    /// Claims that a heartbeat found to be lost.
    pub lost: u64,
    /// Handlers that panicked.
    pub panicked: u64,
    /// Outcomes that the store could not be made to record in time: their jobs are recovered and run again.
    pub unrecorded: u64,
    /// Stale jobs of any worker that were put back.
    pub recovered: u64,
    /// Claims still held when the worker ended: their leases recover them.
    pub left: u64,
}
