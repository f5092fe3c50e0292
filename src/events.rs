//! Events: what jobs wait for.

use std::fmt;
use std::pin::Pin;
use std::time::Duration;

use queue_core::Backend;
use queue_core::Delay;
use queue_core::DurableSteps;
use queue_core::Emitted;
use queue_core::Error;
use queue_core::Invalid;
use queue_core::Json;
use queue_core::Name;
use queue_core::NewEvent;
use serde::Serialize;

use crate::Queue;
use crate::QueueError;
use crate::repeat::Repeats;

/// How long an event is kept unless it was said: a week.
pub(crate) const KEPT: Delay = Delay::from_hours(7 * 24);

/// What the library's own events begin with.
pub(crate) const OWN: &str = "fenced-queue/";

/// The key of an event of the application.
pub(crate) fn key(text: &str) -> Result<Name, Invalid> {
    match text.starts_with(OWN) {
        true => Err(Invalid::malformed("event key", format_args!("{OWN} is the beginning of the library's own"))),
        false => text.parse(),
    }
}

/// An event of the application, kept for the usual time.
pub(crate) fn new<T: Serialize + ?Sized>(event: &str, payload: &T) -> Result<NewEvent, QueueError> {
    let key = key(event).map_err(QueueError::invalid("event"))?;
    let payload = Json::encode(payload).map_err(QueueError::invalid("payload"))?;
    Ok(NewEvent { key, payload, keep: KEPT })
}

/// Emits, again after what may pass: emitting twice is harmless.
pub(crate) async fn emit(steps: &dyn DurableSteps, event: &NewEvent) -> Result<Emitted, Error> {
    let mut repeats = Repeats::new();
    loop {
        match steps.emit(event).await {
            Err(error) if repeats.again(&error).await => {}
            answer => return answer,
        }
    }
}

/// An event that is being put together; made by [`Queue::emit`] and emitted when it is awaited.
#[must_use = "an event is emitted when this is awaited"]
pub struct Emit<'q, B: ?Sized> {
    queue: &'q Queue<B>,
    event: Result<NewEvent, QueueError>,
}

impl<'q, B: Backend + ?Sized> Emit<'q, B> {
    pub(crate) fn new<T: Serialize + ?Sized>(queue: &'q Queue<B>, event: &str, payload: &T) -> Self {
        Self { queue, event: new(event, payload) }
    }

    /// How long it is kept for jobs that come to wait for it later; a week by default. Kept for no time, it wakes only who waits now.
    pub fn keep(mut self, time: Duration) -> Self {
        match (&mut self.event, Delay::try_from(time).map_err(QueueError::invalid("keep"))) {
            (Ok(event), Ok(keep)) => event.keep = keep,
            (Ok(_), Err(error)) => self.event = Err(error),
            (Err(_), _) => {}
        }
        self
    }

    async fn send(self) -> Result<Emitted, QueueError> {
        let event = self.event?;
        let steps = self.queue.backend.durable_steps().ok_or(QueueError::NoDurableSteps)?;
        Ok(emit(steps, &event).await?)
    }
}

impl<'q, B: Backend + ?Sized> IntoFuture for Emit<'q, B> {
    type Output = Result<Emitted, QueueError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'q>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.send())
    }
}

impl<B: ?Sized> fmt::Debug for Emit<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Emit").field("event", &self.event).finish_non_exhaustive()
    }
}
