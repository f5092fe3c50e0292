//! SQLite backend of `fenced-queue`: a file that any number of processes share, a database in memory, or the
//! application's own pool.
//!
//! ```
//! use backend_sqlite::SqliteBackend;
//! use queue_core::{Backend, Json, NewJob, Result};
//!
//! # async fn example() -> Result<()> {
//! let backend = SqliteBackend::connect("sqlite:jobs.db").await?;
//! backend.migrate().await?;
//! backend.enqueue(&[NewJob::new("mail".try_into()?, "welcome".try_into()?, Json::encode("ann@example.com")?)]).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # What it does where
//!
//! - A claim is one `UPDATE .. RETURNING`, a compare-and-update one `UPDATE .. FROM json_each(..) .. RETURNING` with the
//!   whole fingerprint in its `WHERE`. An enqueue, and a batch of more than 1000 rows or 4 MiB, are a transaction around
//!   such statements.
//! - "Now" is SQLite's clock, read by the statement when it has the write lock. All processes on one file are on one
//!   machine, so it is one clock.
//! - SQLite has one writer at a time and no row locks. A write waits for another process's at most
//!   [`busy_timeout`](SqliteOptions::busy_timeout); a claim and a heartbeat at most a third of their lease. Then it fails
//!   as [`Transient`](queue_core::ErrorKind::Transient), not applied.
//! - Workers of the same process are woken by what the process enqueues through this handle or its clones; other
//!   processes' jobs, and those of [`enqueue_in`](queue_core::Transactional::enqueue_in), are found by polling.
//! - Futures may be dropped at any await, but within a Tokio runtime: the driver gives connections back through it.
//!
//! # Costs
//!
//! Claims, settles, heartbeats, sweeps and purges go through indexes whatever the size of the table. Two kinds of calls
//! do not: a claim walks past the due jobs of kinds that it does not want (about 20 ms for 100 000 of them), and
//! [`list`](queue_core::Inspect::list) with a filter that few jobs match and [`counts`](queue_core::Inspect::counts)
//! read the whole table, beside the writers and without holding them up.

mod backend;
mod config;
mod error;
mod handle;
mod row;
mod setup;
mod sql;
mod steps;

pub use backend::SqliteBackend;
pub use config::SqliteOptions;
pub use config::Synchronous;
pub use handle::SqliteTransaction;
pub use setup::Migration;
pub use setup::migrations;

/// The driver whose pools and connections this crate takes.
pub use sqlx;
