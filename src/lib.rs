//! Durable background jobs over the database that an application already runs.
//!
//! > Every lifecycle write is a compare-and-update against the execution that it was decided on. It
//! > applies atomically or not at all, and the caller learns which.
//!
//! A job may run more than once: no queue can stop code that is already running on a machine that was given up. But of
//! each execution at most one outcome is *recorded*, a worker that lost its claim is told, and nothing that it says
//! after that counts.
//!
//! # Produce
//!
//! ```
//! use fenced_queue::{JobArgs, Queue};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Serialize, Deserialize)]
//! struct Welcome { user: u64 }
//!
//! impl JobArgs for Welcome { const KIND: &'static str = "welcome"; }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), fenced_queue::QueueError> {
//! let queue = Queue::connect("memory:").await?; // or "sqlite:jobs.db"
//! queue.enqueue(&Welcome { user: 7 }).await?;
//! # Ok(())
//! # }
//! ```
//!
//! [`Enqueue`] says what else can be said of a job: when it is due, its priority, a unique key, an id of one's own. An
//! enqueue that is repeated with the same id is harmless.
//!
//! # Run
//!
//! ```
//! use std::time::Duration;
//!
//! use fenced_queue::{JobArgs, JobContext, NotDone, Queue, Worker};
//! # use serde::{Deserialize, Serialize};
//! # #[derive(Serialize, Deserialize)]
//! # struct Welcome { user: u64 }
//! # impl JobArgs for Welcome { const KIND: &'static str = "welcome"; }
//!
//! async fn welcome(context: JobContext, args: Welcome) -> Result<String, NotDone> {
//!     if args.user == 0 {
//!         return Err(NotDone::fail("nobody to greet")); // or retry_after, snooze, cancel
//!     }
//!     let greeting = String::from_utf8(b"welcome".to_vec())?; // an error is a failed attempt
//!     Ok(format!("{greeting}, {} (fence {})", args.user, context.fence()))
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let queue = Queue::connect("memory:").await?;
//! # queue.enqueue(&Welcome { user: 7 }).await?;
//! # let shutdown = async { while queue.counts().await.unwrap()[0].state != Some(fenced_queue::JobState::Completed) { tokio::task::yield_now().await } };
//! let worker = Worker::builder(&queue)
//!     .name("web-1")
//!     .concurrency(10)
//!     .lease(Duration::from_secs(30))
//!     .register(welcome)
//!     .build()?;
//! let report = worker.run_until(shutdown).await; // such as tokio::signal::ctrl_c()
//! println!("{} completed", report.completed);
//! # assert_eq!(report.completed, 1);
//! # Ok(())
//! # }
//! ```
//!
//! A handler is an async function of a [`JobContext`] and its arguments. `Ok(value)` completes the job with that value
//! as its result; `?` is a failed attempt, tried again later; [`NotDone`] says everything else. State that handlers
//! share is what a closure captures. Plain functions were chosen over a trait because they need no type of their own and
//! can be called in a test like any other.
//!
//! What is said of one kind, [`KindOptions`], or around all handlers, [`WorkerBuilder::layer`], is said when they are registered. A handler
//! that completes its job in the transaction of its own writes does so by [`JobContext::begin`].
//!
//! # In a transaction of one's own
//!
//! A job that is enqueued in the application's transaction exists if that commits. The backend is then built over the
//! application's pool, and its driver is re-exported, so that both mean the same version:
//!
#![cfg_attr(feature = "sqlite", doc = "```no_run")]
#![cfg_attr(not(feature = "sqlite"), doc = "```ignore")]
//! use fenced_queue::sqlite::SqliteBackend;
//! use fenced_queue::sqlite::sqlx::SqlitePool;
//! # use fenced_queue::{JobArgs, Queue};
//! # #[derive(serde::Serialize, serde::Deserialize)]
//! # struct Welcome { user: u64 }
//! # impl JobArgs for Welcome { const KIND: &'static str = "welcome"; }
//!
//! # async fn sign_up(pool: SqlitePool) -> Result<(), Box<dyn std::error::Error>> {
//! let queue = Queue::new(SqliteBackend::from_pool(pool.clone()).await?);
//! queue.migrate().await?;
//! let mut transaction = pool.begin_with("BEGIN IMMEDIATE").await?;
//! // .. the application's own writes ..
//! queue.enqueue(&Welcome { user: 7 }).send_in(&mut transaction).await?;
//! transaction.commit().await?;
//! # Ok(())
//! # }
//! ```
//!
//! [`Queue::into_dyn`] makes of it what [`Queue::connect`] gives.
//!
//! # Steps and waits
//!
//! A job that is registered by [`WorkerBuilder::register_durable`] keeps what it has done under names, and gives itself up while it waits for
//! events or for a time: [`DurableContext`]. [`Queue::emit`] emits an event, [`Queue::steps`] shows what a job has done.
//!
//! # When a claim is lost
//!
//! A worker holds a job by a lease that heartbeats renew. If its machine stands still for longer, another worker takes
//! over. Then:
//!
//! - the [`CancelToken`] of the context fires, with the [`CancelReason`];
//! - the outcome is offered, refused and counted: [`Report::conflicts`];
//! - other systems can refuse the late writer too, if they are given [`JobContext::fence`] and keep the greatest one.
//!
//! # Events
//!
//! Workers speak through [`tracing`](https://docs.rs/tracing). Handlers run in a span `job` with the fields `job.id`, `kind`,
//! `attempt` and `fence`. The events are named:
//!
//! | event | level | meaning |
//! |---|---|---|
//! | `worker.start`, `worker.stopping`, `worker.stop` | info | its life; the last one carries the report |
//! | `worker.aborted` | warn | handlers did not end within the grace, or one was dropped for its timeout |
//! | `worker.claim_failed`, `worker.wait_failed` | warn | the store could not be asked for work; polling goes on |
//! | `worker.unreadable` | warn | a claimed row cannot be read: a failed attempt |
//! | `worker.attempt_failed` | warn | an attempt failed; the job is tried again |
//! | `worker.job_failed` | error | a job failed for good |
//! | `worker.panic` | warn | a handler panicked: a failed attempt |
//! | `worker.conflict` | debug | an outcome came too late and was refused |
//! | `worker.unrecorded` | error | an outcome could not be recorded in time; the job will run again |
//! | `worker.heartbeat_failed` | warn | leases were not renewed; the next beat follows |
//! | `worker.lease_uncertain` | warn | a lease was not renewed in time |
//! | `worker.lease_lost` | warn | a claim is lost; its handler is told |
//! | `worker.recovered`, `worker.orphan` | warn | a job was put back |
//! | `worker.wait_over` | debug | the time of a wait is over; its job goes on |
//! | `worker.announce_failed` | warn | who waits for a child was not told that it has ended, and will look for itself |
//! | `worker.purge_failed` | warn | old jobs or events could not be deleted |
//! | `worker.sweep_failed` | warn | stale jobs, or waits that are over, could not be looked for, or one not be put back |
//!
//! # Metrics
//!
//! With the feature `metrics`, through whatever recorder the application installs:
//!
//! | metric | kind | labels | meaning |
//! |---|---|---|---|
//! | `fenced_queue_jobs_total` | counter | `event` | jobs that were `claimed`, `completed`, `retried`, `failed`, `snoozed`, `canceled`, `released`, `recovered`, `purged`, `suspended` or whose `wait_timed_out`; that ended in a `conflict`, were `lost` to another or stayed `unrecorded`; whose handlers `panicked` or `timed_out`: as in [`Report`] |
//! | `fenced_queue_jobs_held` | gauge | | jobs that the worker holds, at each heartbeat |
//! | `fenced_queue_job_wait_seconds` | histogram | `kind` | from when a job was due until it was claimed, by the store's clock |
//! | `fenced_queue_job_run_seconds` | histogram | `kind` | from when a handler began until it ended |
//!
//! # Features
//!
//! | feature | scheme | |
//! |---|---|---|
//! | `sqlite` (default) | `sqlite:` | a file, or memory; no server |
//! | `postgres` | `postgres:` | PostgreSQL 13 or newer |
//! | `mysql` | `mysql:`, `mariadb:` | MySQL 8.0 or newer, MariaDB 10.6 or newer |
//! | `mongo` | `mongodb:`, `mongodb+srv:` | MongoDB 5.0 or newer, as a replica set |
//! | `tls` | | encrypted connections to PostgreSQL, MySQL and MariaDB; those to MongoDB can always be |
//! | `full` | | every backend |
//! | `metrics` | | workers speak through the [`metrics`](https://docs.rs/metrics) facade too |
//! | | `memory:` | always there: for tests, forgotten with the last handle |
//!
//! # Testing
//!
//! [`testing::TestJob`] runs one job through a handler. [`MemoryBackend`] keeps the whole contract but durability, on a clock that a
//! test can set.

mod args;
mod connect;
mod enqueue;
mod error;
mod events;
mod operate;
mod queue;
mod repeat;
pub mod testing;
mod worker;

#[cfg(feature = "mongo")]
pub use backend_mongo as mongo;
#[cfg(feature = "mysql")]
pub use backend_mysql as mysql;
#[cfg(feature = "postgres")]
pub use backend_postgres as postgres;
#[cfg(feature = "sqlite")]
pub use backend_sqlite as sqlite;

pub use args::JobArgs;
pub use enqueue::Enqueue;
pub use enqueue::Placed;
pub use error::BuildError;
pub use error::QueueError;
pub use events::Emit;
pub use operate::Bulk;
pub use queue::Queue;
pub use worker::CancelReason;
pub use worker::CancelToken;
pub use worker::Child;
pub use worker::ChildOutcome;
pub use worker::DurableContext;
pub use worker::JobContext;
pub use worker::JobTransaction;
pub use worker::KindOptions;
pub use worker::Next;
pub use worker::NotDone;
pub use worker::Report;
pub use worker::RetryPolicy;
pub use worker::Worker;
pub use worker::WorkerBuilder;

/// The contract itself: for authors of backends, and for what this crate does not wrap.
pub use queue_core as contract;

pub use queue_core::Backend;
pub use queue_core::Capabilities;
pub use queue_core::Certainty;
pub use queue_core::Conflict;
pub use queue_core::Count;
pub use queue_core::Delay;
pub use queue_core::DurableSteps;
pub use queue_core::Emitted;
pub use queue_core::Enqueued;
pub use queue_core::Error;
pub use queue_core::ErrorKind;
pub use queue_core::Execution;
pub use queue_core::Failure;
pub use queue_core::FailureText;
pub use queue_core::IllegalTransition;
pub use queue_core::Inspect;
pub use queue_core::Invalid;
pub use queue_core::Job;
pub use queue_core::JobId;
pub use queue_core::JobState;
pub use queue_core::Json;
pub use queue_core::LazyBackend;
pub use queue_core::ListFilter;
pub use queue_core::MemoryBackend;
pub use queue_core::Name;
pub use queue_core::NewJob;
pub use queue_core::Page;
pub use queue_core::Priority;
pub use queue_core::Step;
pub use queue_core::StepState;
pub use queue_core::Timestamp;
pub use queue_core::Transactional;
pub use queue_core::TransitionError;
pub use queue_core::UniqueKey;
pub use queue_core::When;
pub use queue_core::WorkerId;

/// The examples of the README and of the guide compile.
#[cfg(all(doctest, feature = "sqlite"))]
#[doc = include_str!("../README.md")]
#[doc = include_str!("../docs/durable.md")]
struct Readme;
