//! MongoDB backend of `fenced-queue`: a replica set of MongoDB 5.0 or newer, or the application's own client of one.
//!
//! ```no_run
//! use backend_mongo::MongoBackend;
//! use queue_core::{Backend, Json, NewJob, Result};
//!
//! # async fn example() -> Result<()> {
//! let backend = MongoBackend::connect("mongodb://db1,db2,db3/app?replicaSet=rs0").await?;
//! backend.migrate().await?;
//! backend.enqueue(&[NewJob::new("mail".try_into()?, "welcome".try_into()?, Json::encode("ann@example.com")?)]).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # What it does where
//!
//! - A compare-and-update is one `findAndModify` with the whole fingerprint in its filter. A batch of them is one `update`,
//!   whose statements each move the jobs that were claimed together and end alike, and which marks in the field `batch` the
//!   rows that matched; and one `find` for the marks and the answers. A claim of one is one
//!   `findAndModify`; a claim of many finds them, updates those that still can be claimed, and reads back by its own
//!   revision which ones it won. No transaction is opened but by the application.
//! - "Now" is the clock of the primary, `$$NOW`, read at the beginning of each command. An insert cannot read it: an enqueue
//!   asks for it in the round trip before.
//! - Every write says for itself that it waits until a majority has journaled it, and every command goes to the primary,
//!   whatever the URL or the application's client says. The driver repeats none of them by itself; who may repeat what is
//!   the contract's to say.
//! - Reads see the newest rows of the primary, which a failover may take back. No decision rests on that: whatever a call
//!   answers as done, or as done before, a majority has acknowledged.
//! - MongoDB has no lock wait of its own: it tries a write on a row again that somebody has in an open transaction, until the
//!   command's time is up. After [`skip_locked_after`](MongoOptions::skip_locked_after), a quarter of a second, claims pass
//!   such a row, a batch of settles goes row by row past it, and a heartbeat tries it a few times more, reports it as busy
//!   and renews the others. Whoever needs that row waits for [`lock_timeout`](MongoOptions::lock_timeout), and so long every
//!   write waits for a majority, two seconds at least; a claim or a heartbeat for a third of its lease, or up to two thirds
//!   for those two seconds. A claim that is answered after its lease is an error of unknown certainty; a lease of less than a
//!   tenth of a second is not timed.
//! - A job's steps are a list in its row, which no other call reads and which goes with it. Beginning or finishing one, and
//!   waiting for the time alone, is one `findAndModify` with the fingerprint in its filter; what becomes of the step is decided
//!   in it, on the server.
//! - Events are a collection of their own. Emitting one, and waiting for one that is not kept, are transactions that both write
//!   the event's row, so that none falls between; a row that a wait has made for that is deleted by the next purge. Handing
//!   over, and ending a batch of overdue waits, are transactions too; the batch goes row by row past one that somebody has. A
//!   transaction that meets somebody else's is repeated for `lock_timeout` at most. It runs in a task of its own, to its end
//!   also if the call is dropped.
//! - Workers are woken by what this handle enqueues, and by a change stream for what others do, also in transactions.
//! - Futures may be dropped at any await, but within a Tokio runtime. A client should be dropped, or
//!   [closed](MongoBackend::close), before its runtime ends: the driver says good-bye to the server in the background.
//!
//! # What is different on this database
//!
//! - A batch is not atomic. Each row of it is written or not, as the answers say; a call that fails has written the others.
//!   An enqueue that loses a race for an id to other content may have stored the other jobs of its call, and then says that
//!   its outcome is unknown.
//! - In a transaction any error ends the whole of it: see [`Transactional`](queue_core::Transactional) on [`MongoBackend`].
//! - A row, with payload, steps, result and failures, has 16 MB: [`MongoOptions::LARGEST_MAX_PAYLOAD`]. A step that would leave
//!   no room for failures and a result of `max_payload` is refused as too large, and so is a wait that would leave none for
//!   its event's payload either: whatever happens to the job afterwards can be written.
//! - Those who begin to wait for one event at once take turns at its row.
//! - Whoever makes or moves a row by hand has to set `active_key` as well: to `unique_key` in an active state, else to null.
//!
//! # Costs
//!
//! Claims, settles, heartbeats, sweeps, events and purges go through indexes that are named, whatever the size of the
//! collection; what is due later, of other kinds or ended they do not look at, but for one key per kind and level of priority.
//! A claim of more than 100 kinds asks several times. [`list`](queue_core::Inspect::list) with a filter that few jobs match and
//! [`counts`](queue_core::Inspect::counts) read the whole collection. Whoever writes a job has the server write its whole row,
//! steps included.
//!
//! The index entries of jobs that were claimed MongoDB keeps, marked as deleted, for as long as it keeps the past, five minutes
//! unless its parameter `minSnapshotHistoryWindowInSeconds` says otherwise. A claim passes those of its queue and kinds, which
//! takes about a millisecond for a million of them.
//!
//! # Privileges
//!
//! The role `readWrite` on the database is enough for everything, [`migrate`](queue_core::Backend::migrate) too, where something
//! is missing. A role of its own needs no more than these privileges on the collections, each of them also `find` on `schema`:
//!
//! | program | privileges |
//! |---|---|
//! | workers | `find, update` on `jobs`, `changeStream` to be woken by others, and `insert` if jobs hand over; `find, insert, update, remove` on `events`; `update` on `schema` |
//! | producers | `find, insert` on `jobs`; `update` on `schema` |
//! | who emits events | `find, update` on `jobs`; `find, insert, update, remove` on `events`; `update` on `schema` |
//! | [`purge`](queue_core::Inspect::purge), and of events | `find, remove` on `jobs` and on `events` |
//! | who looks on | `find` on `jobs` |
//!
//! Whoever finds what another process has written waits until a majority has it, by a write on `schema` that changes nothing.

mod backend;
#[cfg(test)]
mod broken;
mod claim;
mod config;
mod enqueue;
mod error;
mod handle;
mod ops;
mod row;
mod setup;
mod steps;
mod wake;

pub use backend::MongoBackend;
pub use backend::MongoTransaction;
pub use config::MongoOptions;
pub use setup::Migration;
pub use setup::migrations;

/// The driver whose clients and sessions this crate takes.
pub use mongodb;

// The harness of the suite names the crate as any user does; the tests of mistakes use it from inside.
#[cfg(test)]
extern crate self as backend_mongo;
