//! Tests of handlers, without a worker and without a database.
//!
//! ```
//! use fenced_queue::testing::TestJob;
//! use fenced_queue::{JobArgs, JobContext, JobState, NotDone};
//! # #[derive(serde::Serialize, serde::Deserialize)]
//! # struct Welcome { user: u64 }
//! # impl JobArgs for Welcome { const KIND: &'static str = "welcome"; }
//!
//! async fn welcome(context: JobContext, args: Welcome) -> Result<u64, NotDone> {
//!     match context.attempt() {
//!         1 => Err(NotDone::retry("the mail server sleeps")),
//!         _ => Ok(args.user),
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let job = TestJob::new(&Welcome { user: 7 }).run(welcome).await;
//! assert_eq!((job.state(), job.errors[0].text.as_str()), (JobState::Waiting, "the mail server sleeps"));
//!
//! let job = TestJob::new(&Welcome { user: 7 }).attempt(2).run(welcome).await;
//! assert_eq!((job.state(), job.result.unwrap().as_str()), (JobState::Completed, "7"));
//! # }
//! ```
//!
//! A handler with steps finds the events that were emitted before, and is suspended where it waits for another:
//!
//! ```
//! # use std::time::Duration;
//! # use fenced_queue::testing::TestJob;
//! # use fenced_queue::{DurableContext, JobArgs, JobState, NotDone};
//! # #[derive(serde::Serialize, serde::Deserialize)]
//! # struct Order { id: u64 }
//! # impl JobArgs for Order { const KIND: &'static str = "order"; }
//! async fn order(context: DurableContext, args: Order) -> Result<Option<u64>, NotDone> {
//!     context.wait_for("payment", format!("paid/{}", args.id), Duration::from_secs(3)).await
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let job = TestJob::new(&Order { id: 7 }).event("paid/7", &1999).run_durable(order).await;
//! assert_eq!(job.result.unwrap().as_str(), "1999");
//!
//! let job = TestJob::new(&Order { id: 7 }).run_durable(order).await;
//! assert_eq!(job.state(), JobState::Suspended);
//! # }
//! ```
//!
//! For more than one job, give a worker a [`MemoryBackend`], whose clock a test can set.

use std::time::Duration;

use queue_core::DurableSteps;
use queue_core::Job;
use queue_core::MemoryBackend;
use queue_core::NewEvent;
use serde::Serialize;

use crate::CancelReason;
use crate::DurableContext;
use crate::JobArgs;
use crate::JobContext;
use crate::KindOptions;
use crate::NotDone;
use crate::Queue;
use crate::Worker;
use crate::WorkerBuilder;
use crate::events;

/// One job, to be run through a handler.
#[derive(Debug)]
#[must_use = "a job runs when `run` is awaited"]
pub struct TestJob<'a, A> {
    args: &'a A,
    attempt: u32,
    max_attempts: u32,
    fence: u64,
    options: KindOptions,
    cancel: Option<CancelReason>,
    events: Vec<NewEvent>,
}

impl<'a, A: JobArgs> TestJob<'a, A> {
    /// A job of these arguments on its first attempt.
    pub fn new(args: &'a A) -> Self {
        Self {
            args,
            attempt: 1,
            max_attempts: 20,
            fence: 1,
            options: KindOptions::new(),
            cancel: None,
            events: Vec::new(),
        }
    }

    /// Which attempt it is, from 1.
    pub fn attempt(mut self, attempt: u32) -> Self {
        self.attempt = attempt;
        self
    }

    /// How many attempts there are; 20 by default.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = attempts;
        self
    }

    /// The number that the handler hands to other systems; 1 by default.
    pub fn fence(mut self, fence: u64) -> Self {
        self.fence = fence;
        self
    }

    /// How its kind is run.
    pub fn options(mut self, options: KindOptions) -> Self {
        self.options = options;
        self
    }

    /// The handler's token has fired before it begins.
    pub fn canceled(mut self, reason: CancelReason) -> Self {
        self.cancel = Some(reason);
        self
    }

    /// An event that was emitted before the job runs, for a handler with steps.
    ///
    /// # Panics
    ///
    /// If the key is none, or the payload no JSON.
    pub fn event<T: Serialize + ?Sized>(mut self, key: &str, payload: &T) -> Self {
        let event = events::new(key, payload);
        self.events.push(event.unwrap_or_else(|error| panic!("no event: {error}")));
        self
    }

    /// Runs the handler as a worker would, its arguments written and read again, its panics caught, and answers with the job as it
    /// then is: [`Job::state`], `result`, `errors`, `available_at`.
    ///
    /// # Panics
    ///
    /// If a worker could not be built for it, or the job not be enqueued: a bad kind, no attempt at all.
    pub async fn run<F, Fut, T>(self, handler: F) -> Job
    where
        F: Fn(JobContext, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<T, NotDone>> + Send,
        T: Serialize + Send,
    {
        let options = self.options;
        self.through(|builder| builder.register_with(options, handler)).await
    }

    /// The same for a handler with steps. If it waits for what was not emitted the job is suspended.
    ///
    /// # Panics
    ///
    /// As [`run`](Self::run).
    pub async fn run_durable<F, Fut, T>(self, handler: F) -> Job
    where
        F: Fn(DurableContext, A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<T, NotDone>> + Send,
        T: Serialize + Send,
    {
        let options = self.options;
        self.through(|builder| builder.register_durable_with(options, handler)).await
    }

    async fn through(self, register: impl FnOnce(WorkerBuilder) -> WorkerBuilder) -> Job {
        let backend = MemoryBackend::new();
        let queue = Queue::new(backend.clone());
        // No heartbeat renews it.
        let lease = Duration::from_secs(365 * 24 * 3_600);
        for event in &self.events {
            backend.emit(event).await.unwrap_or_else(|error| panic!("an event cannot be emitted: {error}"));
        }
        let worker = register(Worker::builder(&queue).lease(lease)).build();
        let worker = worker.unwrap_or_else(|error| panic!("no worker can be built: {error}"));
        let stored = queue.enqueue(self.args).max_attempts(self.max_attempts).await;
        let id = stored.unwrap_or_else(|error| panic!("the job cannot be enqueued: {error}")).id();
        assert!(self.attempt > 0 && self.fence > 0, "attempts and fences count from 1");
        backend.edit(|rows| {
            if let Some(row) = rows.get_mut(&id) {
                (row.job.execution.attempt, row.job.execution.fence) = (self.attempt - 1, self.fence - 1);
            }
        });
        let run = worker.claim_and_run::<A>(self.cancel).await;
        run.unwrap_or_else(|error| panic!("the outcome was not recorded: {error}"));
        let stored = queue.get(id).await;
        stored.ok().flatten().unwrap_or_else(|| panic!("the job is gone"))
    }
}
