//! Handlers of all kinds behind one type.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;

use queue_core::Json;
use queue_core::Name;
use serde::Serialize;

use crate::JobArgs;
use crate::JobContext;
use crate::NotDone;
use crate::worker::KindOptions;

/// A handler at work: ends with the result as JSON.
pub(super) type Running = Pin<Box<dyn Future<Output = Result<Json, NotDone>> + Send>>;

/// A handler that takes the payload as JSON.
pub(super) type Handler = Arc<dyn Fn(JobContext, Json) -> Running + Send + Sync>;

/// A handler and how its kind is run.
#[derive(Clone)]
pub(super) struct Registered {
    pub(super) handler: Handler,
    /// Whether it needs durable steps.
    pub(super) durable: bool,
    pub(super) options: KindOptions,
}

/// The handlers by kind.
pub(super) type Handlers = HashMap<Name, Registered>;

/// Wraps a typed handler. All of the application's code, reading the arguments included, runs inside the future.
pub(super) fn erase<A, F, Fut, T>(handler: F) -> Handler
where
    A: JobArgs,
    F: Fn(JobContext, A) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<T, NotDone>> + Send,
    T: Serialize + Send,
{
    let handler = Arc::new(handler);
    Arc::new(move |context, payload| {
        let handler = Arc::clone(&handler);
        Box::pin(async move {
            let args = payload
                .decode()
                .map_err(|error| NotDone::retry(format_args!("the payload does not fit the handler: {error}")))?;
            drop(payload);
            let value = handler(context, args).await?;
            // The work is done: doing it again would not mend this.
            Json::encode(&value).map_err(|error| NotDone::fail(format_args!("the result is no JSON: {error}")))
        })
    })
}
