//! When a failed attempt is tried again.

use std::time::Duration;

use queue_core::Delay;
use queue_core::When;

use crate::repeat::jittered;

/// Exponential growth with jitter up to a cap: the pause after the first failed attempt, doubled for every further one.
///
/// The jitter takes up to half of a pause away. By default pauses grow from 1 second to 1 hour. An attempt that ended with its
/// worker, or lost its lease, is tried again at once; but it counts, and the pause after a later failure is so much longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    first: Duration,
    cap: Duration,
}

impl RetryPolicy {
    /// Pauses from `first` to `cap`.
    pub fn exponential(first: Duration, cap: Duration) -> Self {
        Self { first, cap }
    }

    /// The pause after this attempt has failed; attempts count from 1.
    pub fn pause(&self, attempt: u32) -> Duration {
        let factor = 2_u32.saturating_pow(attempt.saturating_sub(1));
        jittered(self.first.saturating_mul(factor).min(self.cap))
    }

    pub(super) fn after(&self, attempt: u32) -> When {
        When::After(Delay::saturating(self.pause(attempt)))
    }
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self::exponential(Duration::from_secs(1), Duration::from_secs(3600))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// E5
    #[test]
    fn pauses_grow_to_the_cap_and_never_overflow() {
        let policy = RetryPolicy::exponential(Duration::from_secs(1), Duration::from_secs(60));
        for (attempt, nominal) in [(0, 1), (1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (30_000, 60), (u32::MAX, 60)] {
            let (pause, nominal) = (policy.pause(attempt), Duration::from_secs(nominal));
            assert!(nominal / 2 <= pause && pause <= nominal, "attempt {attempt}: {pause:?}");
        }
        let spread: Vec<_> = (0..200).map(|_| policy.pause(7)).collect();
        let below = spread.iter().filter(|pause| **pause < Duration::from_secs(45)).count();
        assert!((50..150).contains(&below), "the jitter is spread over the half: {below} of 200");
        let endless = RetryPolicy::exponential(Duration::MAX, Duration::MAX);
        assert_eq!(endless.after(30_000), When::After(Delay::MAX));
    }
}
