//! PostgreSQL backend of `fenced-queue`: PostgreSQL 13 or newer, by URL, through a pooler, or in the application's own pool.
//!
//! ```no_run
//! use backend_postgres::PostgresBackend;
//! use queue_core::{Backend, Json, NewJob, Result};
//!
//! # async fn example() -> Result<()> {
//! let backend = PostgresBackend::connect("postgres://app@db.example/app").await?;
//! backend.migrate().await?;
//! backend.enqueue(&[NewJob::new("mail".try_into()?, "welcome".try_into()?, Json::encode("ann@example.com")?)]).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # What it does where
//!
//! - A claim, a heartbeat, a compare-and-update of any number of jobs up to 1000 and 4 MiB, and an enqueue of one job are one
//!   statement and one round trip each. An enqueue of several, and a longer batch, are a transaction.
//! - Beginning a step, finishing it and ending overdue waits are one statement and one round trip each. A transaction are: a job that
//!   is suspended, in six or, for an event, seven round trips; an event, in four; a job that hands over, in four.
//! - "Now" is the server's clock, read by the statement when the locks that it needs have been granted, and cut to the millisecond.
//! - Claims, heartbeats and purges pass rows that somebody has locked. Updates lock their rows in the order of the ids, so that
//!   batches do not wait for each other in a circle; a job whose key somebody is about to take waits for him. Whoever begins to wait
//!   for an event, and whoever emits it, locks the event before any job. Such a wait ends
//!   after ten seconds, or the session's own `lock_timeout`, as [`Transient`](queue_core::ErrorKind::Transient), not applied.
//!   A claim and a heartbeat wait at most a third of their lease for a connection.
//! - Everything runs at READ COMMITTED, whatever is the default: see [`from_pool`](PostgresBackend::from_pool).
//! - Workers are woken through `NOTIFY`, once for each call that makes work, also by other processes and when a transaction with
//!   [`enqueue_in`](queue_core::Transactional::enqueue_in) commits. From the first wait on, a handle listens on a connection of its
//!   own; if that is lost, workers find work by polling until it is back.
//! - Statements name the schema; `search_path` means nothing.
//! - Futures may be dropped at any await, but within a Tokio runtime: the driver gives connections back through it. A statement that
//!   was sent runs to its end all the same, and keeps its connection until then.
//!
//! # Costs
//!
//! Claims, settles, heartbeats and purges go through indexes whatever the size of the table. These calls do not: a claim walks past
//! the due jobs of kinds that it does not want (0.1 to 0.5 s for 100 000 of them); [`stale`](queue_core::Backend::stale) reads
//! all jobs that are held, for every page (about 5 ms for 10 000), since an index by lease would make every heartbeat cost
//! three times as much; [`list`](queue_core::Inspect::list) with a filter that few jobs match, and
//! [`counts`](queue_core::Inspect::counts), read the whole table.
//!
//! A server plans a statement by what it last counted, and keeps the plan. On connections of its own this backend has statements
//! planned for tables of any size. In an application's pool that is the application's to say; there, when a hundred thousand jobs come
//! into a table that was all but empty, a claim can take 100 ms until the server has counted again, usually within a minute.
//!
//! # Migrations
//!
//! A new schema comes about in one transaction. One that is worked on gets indexes on its jobs without a transaction, beside
//! everybody who writes, however long that takes: it waits for transactions that began before. For this
//! [`migrate`](queue_core::Backend::migrate) opens one connection beside those of the pool. A tool of another kind runs
//! [`migrations`] as each of them says, and only one such tool at a time.
//!
//! # Rights
//!
//! Nobody needs more than this, each of them also `SELECT` on the table `schema` and `USAGE` on the schema. A table that a migration
//! adds is to be granted before the programs that know it start.
//!
//! | program | rights |
//! |---|---|
//! | [`migrate`](queue_core::Backend::migrate) where something is missing | `CREATE` on the database, or a schema of its own; later, to own the tables |
//! | workers | `SELECT, UPDATE` on `jobs`, and `INSERT` if jobs hand over; `SELECT, INSERT, UPDATE` on `steps`; `SELECT, INSERT, UPDATE, DELETE` on `events` |
//! | producers | `SELECT, INSERT` on `jobs` |
//! | who emits events | `SELECT, UPDATE` on `jobs` and `steps`; `SELECT, INSERT, UPDATE` on `events` |
//! | [`purge`](queue_core::Inspect::purge), and of events | `SELECT, UPDATE, DELETE` on `jobs`, and on `events` |
//! | who looks on | `SELECT` on `jobs` and `steps` |

mod backend;
#[cfg(test)]
mod broken;
mod config;
mod error;
mod handle;
mod listener;
mod row;
mod setup;
mod sql;
mod steps;

pub use backend::PostgresBackend;
pub use backend::PostgresTransaction;
pub use config::PostgresOptions;
pub use setup::Migration;
pub use setup::migrations;

#[cfg(test)]
extern crate self as backend_postgres;

/// The driver whose pools and connections this crate takes.
pub use sqlx;
