//! Tells who waits for a child that it has ended.

use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use queue_core::Delay;
use queue_core::Inspect;
use queue_core::JobId;
use queue_core::Json;
use queue_core::Name;
use queue_core::NewEvent;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::held::lock;
use crate::events;

/// For how long a parent may be on its way to wait for a child that has ended.
const KEPT: Delay = Delay::from_hours(1);

/// How many announcements are under way at once, and how many wait for their turn. Who is not told looks for itself.
const AT_ONCE: usize = 4;
const MOST: usize = 10_000;

/// What a parent waits for.
pub(super) fn key(child: JobId) -> Name {
    format!("{}ended/{child}", events::OWN).parse().expect("short, and without U+0000")
}

/// Announces beside everything else: no outcome waits for it.
#[derive(Debug)]
pub(super) struct Announcer {
    under_way: Mutex<JoinSet<()>>,
    turns: Arc<Semaphore>,
}

impl Default for Announcer {
    fn default() -> Self {
        Self { under_way: Mutex::default(), turns: Arc::new(Semaphore::new(AT_ONCE)) }
    }
}

impl Announcer {
    /// Of these jobs, which have ended, those are announced that somebody may wait for.
    pub(super) fn ended(&self, backend: &Arc<dyn Inspect>, jobs: impl IntoIterator<Item = JobId>) {
        for id in jobs.into_iter().filter(JobId::is_child) {
            let mut under_way = lock(&self.under_way);
            while under_way.try_join_next().is_some() {}
            if under_way.len() >= MOST {
                tracing::warn!(name: "worker.announce_failed", { job.id = %id }, "too many children have ended to announce this one");
                continue;
            }
            let (backend, turns) = (Arc::clone(backend), Arc::clone(&self.turns));
            under_way.spawn(async move {
                let Ok(_turn) = turns.acquire().await else { return };
                let Some(steps) = backend.durable_steps() else { return };
                let event = NewEvent { key: key(id), payload: Json::null(), keep: KEPT };
                if let Err(error) = events::emit(steps, &event).await {
                    tracing::warn!(name: "worker.announce_failed", { job.id = %id, %error }, "the end of a child was not announced");
                }
            });
        }
    }

    /// Waits for what is under way, but not for long.
    pub(super) async fn flush(&self, patience: Duration) {
        let mut under_way = std::mem::take(&mut *lock(&self.under_way));
        let _ = timeout(patience, async { while under_way.join_next().await.is_some() {} }).await;
    }
}
