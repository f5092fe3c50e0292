//! Listens for the workers' own event about an outcome that was refused.

use std::fmt::Debug;
use std::sync::Mutex;

use tracing::Event;
use tracing::Metadata;
use tracing::Subscriber;
use tracing::field::Field;
use tracing::field::Visit;
use tracing::span;

static REFUSED: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Begins to listen.
pub(crate) fn watch() -> crate::Result<()> {
    Ok(tracing::subscriber::set_global_default(Refusals)?)
}

/// What was refused so far, in the words of the queue.
pub(crate) fn so_far() -> Vec<String> {
    REFUSED.lock().map(|refused| refused.clone()).unwrap_or_default()
}

struct Refusals;

struct Conflict;

impl Visit for Conflict {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "conflict"
            && let Ok(mut refused) = REFUSED.lock()
        {
            refused.push(format!("{value:?}"));
        }
    }
}

impl Subscriber for Refusals {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.name() == "worker.conflict"
    }

    fn event(&self, event: &Event<'_>) {
        event.record(&mut Conflict);
    }

    // Spans are not listened to.
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}
