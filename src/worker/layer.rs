//! What surrounds every handler.

use std::fmt;
use std::sync::Arc;

use queue_core::Json;

use super::handler::Running;
use crate::JobContext;
use crate::NotDone;

/// A layer around the handlers of all kinds.
pub(super) type Layer = Arc<dyn Fn(JobContext, Next) -> Running + Send + Sync>;

/// The rest of a job's way to its handler; see [`WorkerBuilder::layer`](crate::WorkerBuilder::layer).
#[must_use = "the job's handler runs only if this is run"]
pub struct Next(Box<dyn FnOnce() -> Running + Send>);

impl Next {
    pub(super) fn new(run: impl FnOnce() -> Running + Send + 'static) -> Self {
        Self(Box::new(run))
    }

    /// Puts layers around it, the first one outermost.
    pub(super) fn within(self, layers: &[Layer], context: &JobContext) -> Self {
        layers.iter().rev().fold(self, |inner, layer| {
            let (layer, context) = (Arc::clone(layer), context.clone());
            Self::new(move || layer(context, inner))
        })
    }

    /// Runs the layers further in and the handler.
    ///
    /// # Errors
    ///
    /// Why the job was not completed.
    pub async fn run(self) -> Result<Json, NotDone> {
        (self.0)().await
    }
}

impl fmt::Debug for Next {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Next").finish_non_exhaustive()
    }
}
