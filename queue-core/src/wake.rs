//! Waking the workers of one process.

use tokio::sync::watch;

/// Wakes those who wait for work in this process: the whole of `wait_for_work` for a backend whose store cannot notify.
#[derive(Clone, Debug, Default)]
pub struct WorkSignal(watch::Sender<()>);

impl WorkSignal {
    /// Wakes everybody who waits.
    pub fn notify(&self) {
        self.0.send_replace(());
    }

    /// Resolves at the first [`notify`](Self::notify) after this future was first polled.
    pub async fn wait(&self) {
        // Cannot fail: the sender lives as long as this borrow.
        let _ = self.0.subscribe().changed().await;
    }
}
