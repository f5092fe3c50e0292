//! How many handlers may begin.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;

use tokio::sync::Notify;

/// The slots of one queue.
#[derive(Debug)]
pub(super) struct Slots {
    limit: usize,
    taken: AtomicUsize,
    /// Shared by all queues: one of them has a free slot again.
    freed: Arc<Notify>,
}

/// A taken slot, free again when it is dropped.
#[derive(Debug)]
pub(super) struct Slot(Arc<Slots>);

impl Slots {
    pub(super) fn new(limit: usize, freed: Arc<Notify>) -> Arc<Self> {
        Arc::new(Self { limit, taken: AtomicUsize::new(0), freed })
    }

    pub(super) fn free(&self) -> usize {
        self.limit.saturating_sub(self.taken.load(Ordering::SeqCst))
    }

    /// A slot, if one is free. Only the fetch loop takes any.
    pub(super) fn take(self: &Arc<Self>) -> Option<Slot> {
        if self.free() == 0 {
            return None;
        }
        self.taken.fetch_add(1, Ordering::SeqCst);
        Some(Slot(Arc::clone(self)))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::SeqCst);
        self.0.freed.notify_one();
    }
}
