//! A backend that connects on first use.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use async_trait::async_trait;
use tokio::sync::OnceCell;

use crate::*;

type Connecting<B> = Pin<Box<dyn Future<Output = Result<B>> + Send>>;

/// Connects on first use, once, also when many calls come first at the same time.
///
/// A connection that fails is the error of the call that needed it, and is tried again by the next one.
///
/// ```
/// use queue_core::{Capabilities, LazyBackend, MemoryBackend};
///
/// let backend = LazyBackend::new(Capabilities::default(), || async { Ok(MemoryBackend::new()) });
/// ```
pub struct LazyBackend<B> {
    capabilities: Capabilities,
    connect: Box<dyn Fn() -> Connecting<B> + Send + Sync>,
    connected: OnceCell<B>,
}

impl<B> LazyBackend<B> {
    /// A backend that `connect` makes. `capabilities` are those of what it makes, which are asked for before
    /// there is a connection.
    pub fn new<F, C>(capabilities: Capabilities, connect: F) -> Self
    where
        F: Fn() -> C + Send + Sync + 'static,
        C: Future<Output = Result<B>> + Send + 'static,
    {
        Self { capabilities, connect: Box::new(move || Box::pin(connect())), connected: OnceCell::new() }
    }

    /// The connected backend.
    ///
    /// # Errors
    ///
    /// What connecting failed with.
    pub async fn connected(&self) -> Result<&B> {
        self.connected.get_or_try_init(|| (self.connect)()).await
    }
}

impl<B> fmt::Debug for LazyBackend<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LazyBackend").field("connected", &self.connected.initialized()).finish_non_exhaustive()
    }
}

// Waiting does not connect: a worker leaves that future alone while it claims, and the claim would wait for a connection that nobody
// makes. Until there is one it resolves at once, so that the worker claims.
crate::delegate::delegate!([B: Backend] [B: Inspect] LazyBackend<B>, |self| self.capabilities, self.connected().await?, wait for self.connected.get(), steps self.capabilities.durable_steps.then_some(self as &dyn DurableSteps));

impl<B: Backend> LazyBackend<B> {
    async fn connected_steps(&self) -> Result<&dyn DurableSteps> {
        let missing = || {
            let message = "the backend that was connected has no durable steps, though they are declared";
            Error::not_applied(ErrorKind::Unsupported, message)
        };
        self.connected().await?.durable_steps().ok_or_else(missing)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<B: Backend> DurableSteps for LazyBackend<B> {
    async fn steps(&self, id: JobId) -> Result<Vec<Step>> {
        self.connected_steps().await?.steps(id).await
    }

    async fn write_step(&self, write: &StepWrite) -> Result<Stepped> {
        self.connected_steps().await?.write_step(write).await
    }

    async fn hand_over(&self, update: &UpdateRequest, successor: &NewJob) -> Result<(Update, Option<Enqueued>)> {
        self.connected_steps().await?.hand_over(update, successor).await
    }

    async fn emit(&self, event: &NewEvent) -> Result<Emitted> {
        self.connected_steps().await?.emit(event).await
    }

    async fn time_out_waits(&self, limit: Limit) -> Result<Vec<JobId>> {
        self.connected_steps().await?.time_out_waits(limit).await
    }

    async fn purge_events(&self, limit: Limit) -> Result<u64> {
        self.connected_steps().await?.purge_events(limit).await
    }
}
