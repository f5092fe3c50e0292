//! What a worker did in its life.

/// What a worker counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counted {
    Claimed,
    Completed,
    Retried,
    Failed,
    Snoozed,
    Canceled,
    Released,
    Conflicts,
    Lost,
    Panicked,
    TimedOut,
    Unrecorded,
    Recovered,
    Purged,
    Suspended,
    WaitsTimedOut,
}

#[cfg(feature = "metrics")]
impl Counted {
    /// As in metrics.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Claimed => "claimed",
            Self::Completed => "completed",
            Self::Retried => "retried",
            Self::Failed => "failed",
            Self::Snoozed => "snoozed",
            Self::Canceled => "canceled",
            Self::Released => "released",
            Self::Conflicts => "conflict",
            Self::Lost => "lost",
            Self::Panicked => "panicked",
            Self::TimedOut => "timed_out",
            Self::Unrecorded => "unrecorded",
            Self::Recovered => "recovered",
            Self::Purged => "purged",
            Self::Suspended => "suspended",
            Self::WaitsTimedOut => "wait_timed_out",
        }
    }
}

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
    /// Handlers that were dropped because their time was over.
    pub timed_out: u64,
    /// Outcomes that the store could not be made to record in time: their jobs are recovered and run again.
    pub unrecorded: u64,
    /// Stale jobs of any worker that were put back.
    pub recovered: u64,
    /// Ended jobs that were deleted because they were old.
    pub purged: u64,
    /// Jobs that were suspended because their handlers wait for something.
    pub suspended: u64,
    /// Waits, of any worker's jobs, that ended because their time was over.
    pub waits_timed_out: u64,
    /// Claims still held when the worker ended: their leases recover them.
    pub left: u64,
}

impl Report {
    pub(super) fn count(&mut self, what: Counted, by: u64) {
        *match what {
            Counted::Claimed => &mut self.claimed,
            Counted::Completed => &mut self.completed,
            Counted::Retried => &mut self.retried,
            Counted::Failed => &mut self.failed,
            Counted::Snoozed => &mut self.snoozed,
            Counted::Canceled => &mut self.canceled,
            Counted::Released => &mut self.released,
            Counted::Conflicts => &mut self.conflicts,
            Counted::Lost => &mut self.lost,
            Counted::Panicked => &mut self.panicked,
            Counted::TimedOut => &mut self.timed_out,
            Counted::Unrecorded => &mut self.unrecorded,
            Counted::Recovered => &mut self.recovered,
            Counted::Purged => &mut self.purged,
            Counted::Suspended => &mut self.suspended,
            Counted::WaitsTimedOut => &mut self.waits_timed_out,
        } += by;
    }
}
