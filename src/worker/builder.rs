//! What a worker is told, checked before it runs.

use std::collections::BTreeSet;
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use queue_core::Delay;
use queue_core::Inspect;
use queue_core::Invalid;
use queue_core::JobState;
use queue_core::Json;
use queue_core::Lease;
use queue_core::Name;
use serde::Serialize;

use super::Worker;
use super::handler;
use super::handler::Handlers;
use super::handler::Registered;
use super::kind::KindOptions;
use super::layer::Layer;
use super::layer::Next;
use crate::BuildError;
use crate::DurableContext;
use crate::JobArgs;
use crate::JobContext;
use crate::NotDone;
use crate::RetryPolicy;

/// The most handlers at once, and the most jobs that are reserved for them.
const MAX_CONCURRENCY: usize = 100_000;

/// A worker that is being put together; made by [`Worker::builder`]. Values are checked by [`build`](Self::build).
#[must_use = "a worker runs after it is built"]
pub struct WorkerBuilder {
    backend: Arc<dyn Inspect>,
    name: String,
    queues: Vec<(String, Option<usize>)>,
    default_queues: BTreeSet<&'static str>,
    handlers: Vec<(&'static str, Registered)>,
    layers: Vec<Layer>,
    concurrency: usize,
    prefetch: usize,
    lease: Duration,
    heartbeat: Option<Duration>,
    poll: Duration,
    grace: Duration,
    retry: RetryPolicy,
    retention: Vec<(JobState, Duration)>,
}

/// What a worker was told.
#[derive(Clone, Debug)]
pub(super) struct Config {
    pub(super) name: Name,
    /// Each with how many of its handlers run at once.
    pub(super) queues: Vec<(Name, usize)>,
    pub(super) prefetch: usize,
    pub(super) lease: Lease,
    pub(super) heartbeat: Duration,
    pub(super) poll: Duration,
    pub(super) grace: Duration,
    pub(super) retry: RetryPolicy,
    /// How old jobs of a final state become.
    pub(super) retention: Vec<(JobState, Delay)>,
}

impl WorkerBuilder {
    pub(super) fn new(backend: Arc<dyn Inspect>) -> Self {
        Self {
            backend,
            name: "worker".into(),
            queues: Vec::new(),
            default_queues: BTreeSet::new(),
            handlers: Vec::new(),
            layers: Vec::new(),
            concurrency: 10,
            prefetch: 0,
            lease: Duration::from_secs(30),
            heartbeat: None,
            poll: Duration::from_secs(1),
            grace: Duration::from_secs(30),
            retry: RetryPolicy::default(),
            retention: Vec::new(),
        }
    }

    /// The worker's name in stored jobs and logs, such as the host's; every start adds a random part. `worker` by
    /// default.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// A queue to work on; call it again for more. By default, the queues that the registered kinds name.
    ///
    /// Every queue has handlers of its own, so that none starves behind the jobs of another.
    pub fn queue(mut self, name: impl Into<String>) -> Self {
        self.queues.push((name.into(), None));
        self
    }

    /// A queue to work on, with so many handlers at once.
    pub fn queue_with(mut self, name: impl Into<String>, concurrency: usize) -> Self {
        self.queues.push((name.into(), Some(concurrency)));
        self
    }

    /// How many handlers of one queue run at once, where that was not said with the queue; 10 by default.
    pub fn concurrency(mut self, handlers: usize) -> Self {
        self.concurrency = handlers;
        self
    }

    /// How many jobs of each queue are reserved ahead of free handlers, so that none waits for a claim; none by default.
    ///
    /// They are held, renewed and given back like those that run, and other workers do not get them meanwhile: for many short jobs, not
    /// for few long ones. Their start is one more write, made for many at once.
    pub fn prefetch(mut self, jobs: usize) -> Self {
        self.prefetch = jobs;
        self
    }

    /// How long a job is held without a heartbeat; 30 seconds by default. This is how long the jobs of a worker that
    /// died wait for another.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// How often leases are renewed, and stale jobs looked for: a third of the lease by default, and at most.
    pub fn heartbeat(mut self, interval: Duration) -> Self {
        self.heartbeat = Some(interval);
        self
    }

    /// The longest pause between two looks for work when nothing wakes the worker; 1 second by default. An idle worker
    /// sends one claim per queue each time, and makes the pause longer if it has more than one: a second for each.
    pub fn poll(mut self, longest: Duration) -> Self {
        self.poll = longest;
        self
    }

    /// How long handlers may go on after the worker was told to stop; 30 seconds by default.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// When failed attempts are tried again, unless their kind says otherwise.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = policy;
        self
    }

    /// Deletes jobs that ended in this state so long ago, in small batches and in the background; call it again for
    /// another state. By default nothing is ever deleted.
    pub fn retention(mut self, state: JobState, age: Duration) -> Self {
        self.retention.push((state, age));
        self
    }

    /// Code around the handlers of all kinds: for logging, metrics, limits. The layer that was added first is the outermost.
    ///
    /// ```
    /// # use fenced_queue::{JobContext, MemoryBackend, Next, Queue, Worker};
    /// # let queue = Queue::new(MemoryBackend::new());
    /// let builder = Worker::builder(&queue).layer(|context: JobContext, next: Next| async move {
    ///     println!("{} begins", context.kind());
    ///     let ended = next.run().await;
    ///     println!("{} ends: {}", context.kind(), if ended.is_ok() { "well" } else { "not done" });
    ///     ended
    /// });
    /// ```
    ///
    /// A panic of a layer is one of its job's handler.
    pub fn layer<F, Fut>(mut self, layer: F) -> Self
    where
        F: Fn(JobContext, Next) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Json, NotDone>> + Send + 'static,
    {
        self.layers.push(Arc::new(move |context, next| Box::pin(layer(context, next))));
        self
    }

    /// The handler of one kind: an async function or closure of the context and the arguments. Application state is
    /// what the closure captures.
    ///
    /// A handler shares its threads with others and must not block them: heartbeats come from a task of their own, but
    /// on a runtime with a single thread a handler that blocks it for longer than the lease loses its job.
    pub fn register<A, F, Fut, T>(self, handler: F) -> Self
    where
        A: JobArgs,
        F: Fn(JobContext, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<T, NotDone>> + Send,
        T: Serialize + Send,
    {
        self.register_with(KindOptions::new(), handler)
    }

    /// The same for a kind with a timeout or a retry policy of its own.
    pub fn register_with<A, F, Fut, T>(mut self, options: KindOptions, handler: F) -> Self
    where
        A: JobArgs,
        F: Fn(JobContext, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<T, NotDone>> + Send,
        T: Serialize + Send,
    {
        self.default_queues.insert(A::QUEUE);
        self.handlers.push((A::KIND, Registered { handler: handler::erase(handler), durable: false, options }));
        self
    }

    /// The handler of a kind whose jobs keep what they have done and wait for events; see [`DurableContext`]. The store must keep
    /// [`DurableSteps`](queue_core::DurableSteps), as all of this library's do.
    pub fn register_durable<A, F, Fut, T>(self, handler: F) -> Self
    where
        A: JobArgs,
        F: Fn(DurableContext, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<T, NotDone>> + Send,
        T: Serialize + Send,
    {
        self.register_durable_with(KindOptions::new(), handler)
    }

    /// The same for a kind with a timeout or a retry policy of its own. A timeout is that of one run, not of the whole with its waits.
    pub fn register_durable_with<A, F, Fut, T>(mut self, options: KindOptions, handler: F) -> Self
    where
        A: JobArgs,
        F: Fn(DurableContext, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<T, NotDone>> + Send,
        T: Serialize + Send,
    {
        let handler = handler::erase(move |context, args| handler(DurableContext::new(context), args));
        self.default_queues.insert(A::QUEUE);
        self.handlers.push((A::KIND, Registered { handler, durable: true, options }));
        self
    }

    /// The worker.
    ///
    /// # Errors
    ///
    /// What would not work, or not safely; see [`BuildError`].
    pub fn build(self) -> Result<Worker, BuildError> {
        let lease = Lease::try_from(self.lease).map_err(invalid("lease"))?;
        let most = self.lease / 3;
        let heartbeat = self.heartbeat.unwrap_or(most);
        if heartbeat > most {
            return Err(BuildError::Heartbeat { heartbeat, lease: self.lease });
        }
        let times = self.handlers.iter().filter_map(|(_, kind)| kind.options.timeout);
        for (what, is_zero) in [
            ("heartbeat", self.heartbeat.is_some_and(|interval| interval.as_millis() == 0)),
            ("poll", self.poll.is_zero()),
            ("timeout", times.into_iter().any(|timeout| timeout.is_zero())),
        ] {
            if is_zero {
                return Err(BuildError::Zero { what });
            }
        }
        if self.prefetch > MAX_CONCURRENCY {
            return Err(BuildError::TooMany { what: "prefetch", value: self.prefetch, max: MAX_CONCURRENCY });
        }
        let durable = self.handlers.iter().find(|(_, kind)| kind.durable);
        if let Some((kind, _)) = durable
            && self.backend.durable_steps().is_none()
        {
            return Err(BuildError::NoDurableSteps { kind: (*kind).to_owned() });
        }
        let config = Config {
            name: self.name.parse().map_err(invalid("worker name"))?,
            queues: queues(self.queues, self.default_queues, self.concurrency)?,
            prefetch: self.prefetch,
            lease,
            heartbeat,
            poll: self.poll,
            grace: self.grace,
            retry: self.retry,
            retention: retention(self.retention)?,
        };
        Ok(Worker::new(self.backend, config, handlers(self.handlers)?, self.layers))
    }
}

fn invalid(what: &'static str) -> impl Fn(Invalid) -> BuildError {
    move |reason| BuildError::Invalid { what, reason }
}

fn queues(
    named: Vec<(String, Option<usize>)>,
    default: BTreeSet<&'static str>,
    concurrency: usize,
) -> Result<Vec<(Name, usize)>, BuildError> {
    let named = match named.is_empty() {
        true => default.into_iter().map(|name| (name.to_owned(), None)).collect(),
        false => named,
    };
    let mut seen = HashSet::new();
    let mut queues = Vec::with_capacity(named.len());
    for (queue, own) in named {
        let name = Name::try_from(queue.clone()).map_err(invalid("queue"))?;
        if !seen.insert(name.clone()) {
            return Err(BuildError::DuplicateQueue { queue });
        }
        let value = own.unwrap_or(concurrency);
        match value {
            0 => return Err(BuildError::Zero { what: "concurrency" }),
            1..=MAX_CONCURRENCY => queues.push((name, value)),
            _ => return Err(BuildError::TooMany { what: "concurrency", value, max: MAX_CONCURRENCY }),
        }
    }
    Ok(queues)
}

fn retention(told: Vec<(JobState, Duration)>) -> Result<Vec<(JobState, Delay)>, BuildError> {
    let mut retention: Vec<(JobState, Delay)> = Vec::with_capacity(told.len());
    for (state, age) in told {
        if !state.is_final() || retention.iter().any(|(other, _)| *other == state) {
            return Err(BuildError::Retention { state });
        }
        retention.push((state, Delay::try_from(age).map_err(invalid("retention"))?));
    }
    Ok(retention)
}

fn handlers(registered: Vec<(&'static str, Registered)>) -> Result<Handlers, BuildError> {
    let mut handlers = Handlers::with_capacity(registered.len());
    for (kind, handler) in registered {
        let name = Name::try_from(kind).map_err(invalid("kind"))?;
        if handlers.insert(name, handler).is_some() {
            return Err(BuildError::DuplicateKind { kind: kind.to_owned() });
        }
    }
    match handlers.is_empty() {
        true => Err(BuildError::NoHandlers),
        false => Ok(handlers),
    }
}

impl fmt::Debug for WorkerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerBuilder").field("name", &self.name).field("queues", &self.queues).finish_non_exhaustive()
    }
}
