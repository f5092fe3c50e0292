//! Waking the workers of one process.

use tokio::sync::watch;

use crate::JobState;
use crate::Update;
use crate::UpdateRequest;

/// Wakes those who wait for work in this process: the whole of `wait_for_work` for a backend whose store cannot notify.
#[derive(Clone, Debug, Default)]
pub struct WorkSignal(watch::Sender<()>);

impl WorkSignal {
    /// Wakes everybody who waits.
    pub fn notify(&self) {
        self.0.send_replace(());
    }

    /// Wakes everybody who waits if updates that were answered like this made work: a job became waiting, and a due time was
    /// set.
    pub fn notify_of(&self, updates: &[UpdateRequest], answers: &[Update]) {
        let applied =
            |answer: &Update| matches!(answer, Update::Applied(execution) if execution.state == JobState::Waiting);
        if answers.iter().any(applied) && updates.iter().any(|update| update.patch.available.is_some()) {
            self.notify();
        }
    }

    /// Resolves at the first [`notify`](Self::notify) after this future was first polled.
    pub async fn wait(&self) {
        // Cannot fail: the sender lives as long as this borrow.
        let _ = self.0.subscribe().changed().await;
    }
}
