//! Which failed calls are made again, and when.

use std::time::Duration;

use queue_core::Certainty;
use queue_core::Error;
use queue_core::ErrorKind;

/// Growing pauses with jitter, so that those who failed together do not come back together.
#[derive(Clone, Debug)]
pub(crate) struct Backoff {
    first: Duration,
    next: Duration,
    cap: Duration,
}

impl Backoff {
    pub(crate) fn new(first: Duration, cap: Duration) -> Self {
        Self { first, next: first.min(cap), cap }
    }

    pub(crate) fn pause(&mut self) -> Duration {
        let nominal = self.next;
        self.next = nominal.saturating_mul(2).min(self.cap);
        jittered(nominal)
    }

    pub(crate) fn reset(&mut self) {
        self.next = self.first.min(self.cap);
    }
}

impl Default for Backoff {
    /// Between calls on a busy store.
    fn default() -> Self {
        Self::new(Duration::from_millis(20), Duration::from_secs(1))
    }
}

/// Between half of a pause and the whole.
pub(crate) fn jittered(pause: Duration) -> Duration {
    let half = pause / 2;
    half.saturating_add(half.mul_f64(fastrand::f64()))
}

/// How often a call of `Queue` is made again. About two seconds pass until it is given up.
const REPEATS: u32 = 8;

/// Repeats calls that recognise their own repetition: an enqueue by its ids, a decision by its revision.
#[derive(Debug)]
pub(crate) struct Repeats {
    left: u32,
    backoff: Backoff,
}

impl Repeats {
    pub(crate) fn new() -> Self {
        Self { left: REPEATS, backoff: Backoff::default() }
    }

    /// Whether the call that failed with this error is to be made again; if so, waits before.
    pub(crate) async fn again(&mut self, error: &Error) -> bool {
        self.pause_if(Self::can_help(error)).await
    }

    /// Whether a call that failed with this error may end otherwise if it is made again.
    pub(crate) fn can_help(error: &Error) -> bool {
        match error.kind() {
            ErrorKind::Transient => true,
            ErrorKind::Unavailable => error.certainty() == Certainty::Unknown,
            _ => false,
        }
    }

    /// The same for a call that only reads: whatever may pass by itself is waited for.
    pub(crate) async fn again_reading(&mut self, error: &Error) -> bool {
        self.pause_if(may_pass(error)).await
    }

    async fn pause_if(&mut self, repeat: bool) -> bool {
        if !repeat || self.left == 0 {
            return false;
        }
        self.left -= 1;
        tokio::time::sleep(self.backoff.pause()).await;
        true
    }
}

/// What is wrong may pass by itself: a decision can be submitted again, also one whose outcome is unknown.
pub(crate) fn may_pass(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Transient | ErrorKind::Unavailable)
}

/// Nothing was written because the store was busy: also a claim and a heartbeat may be made again.
pub(crate) fn is_busy(error: &Error) -> bool {
    error.kind() == ErrorKind::Transient && error.certainty() == Certainty::NotApplied
}
