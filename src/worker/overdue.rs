//! Ends waits whose time is over. Every worker does it, for the jobs of all.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use queue_core::DurableSteps;
use queue_core::Limit;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio::time::sleep_until;
use tokio::time::timeout;

use super::Shared;
use super::heartbeat::no_answer;
use super::held::lock;
use super::report::Counted;
use crate::repeat::jittered;

/// How many waits one statement ends.
const BATCH: usize = 200;

/// When it is tried again after a failure, at the latest.
const AFTER_A_FAILURE: Duration = Duration::from_secs(1);

/// How many deadlines of its own jobs a worker keeps in mind; those beyond are found by looking now and then.
const KEPT: usize = 10_000;

/// When waits that this worker's jobs began will be over.
#[derive(Debug, Default)]
pub(super) struct Alarm {
    deadlines: Mutex<BTreeSet<Instant>>,
    earlier: Notify,
}

impl Alarm {
    /// A wait of one of this worker's jobs ends then, if it has an end.
    pub(super) fn set(&self, deadline: Option<Instant>) {
        let Some(deadline) = deadline else { return };
        let mut deadlines = lock(&self.deadlines);
        if deadlines.len() < KEPT || deadlines.last().is_some_and(|last| deadline < *last) {
            deadlines.insert(deadline);
            if deadlines.len() > KEPT {
                deadlines.pop_last();
            }
            self.earlier.notify_one();
        }
    }

    /// Resolves when a deadline is over, or at the time given.
    async fn rings(&self, at: Instant) {
        loop {
            let next = lock(&self.deadlines).first().map_or(at, |first| at.min(*first));
            tokio::select! {
                () = sleep_until(next) => break,
                () = self.earlier.notified() => {}
            }
        }
        let now = Instant::now();
        lock(&self.deadlines).retain(|deadline| *deadline > now);
    }
}

/// Ends the waits of its own jobs when they are over, and looks now and then for those of others: a worker that runs such jobs once in eight
/// polls at least, and any other as often as it looks for stale jobs.
pub(super) async fn run(shared: Arc<Shared>) {
    let Ok(batch) = Limit::new(BATCH) else { return };
    let Some(steps) = shared.backend.durable_steps() else { return };
    let runs_such = shared.handlers.values().any(|kind| kind.durable);
    let often = if runs_such { shared.config.poll.saturating_mul(8) } else { Duration::MAX };
    let pause = often.min(shared.config.heartbeat);
    loop {
        shared.alarm.rings(Instant::now() + jittered(pause)).await;
        while sweep(&shared, steps, batch).await {}
    }
}

/// Ends some; true if there may be more.
async fn sweep(shared: &Shared, steps: &dyn DurableSteps, batch: Limit) -> bool {
    let swept = timeout(shared.config.lease.duration(), steps.time_out_waits(batch)).await;
    match swept.unwrap_or_else(|_| Err(no_answer())) {
        Ok(ended) => {
            shared.count(Counted::WaitsTimedOut, ended.len());
            for id in &ended {
                tracing::debug!(name: "worker.wait_over", { job.id = %id }, "the time of a wait is over, its job goes on");
            }
            ended.len() == batch.rows()
        }
        Err(error) => {
            tracing::warn!(name: "worker.sweep_failed", %error, "waits whose time is over could not be ended, the next sweep follows");
            // What has rung would not ring again.
            shared.alarm.set(Some(Instant::now() + jittered(shared.config.poll.min(AFTER_A_FAILURE))));
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_rings_at_the_first_deadline() {
        let (alarm, start) = (Alarm::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        for seconds in [5, 3, 9] {
            alarm.set(Some(at(seconds)));
        }
        alarm.set(None);
        for seconds in [3, 5, 8, 9, 20] {
            alarm.rings(at(if seconds == 20 { 20 } else { 8.max(seconds) })).await;
            assert_eq!(Instant::now(), at(seconds));
        }
        let set = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            alarm.set(Some(at(22)));
        };
        tokio::join!(alarm.rings(at(30)), set);
        assert_eq!(Instant::now(), at(22), "also if it is set while somebody waits");
    }
}
