//! MySQL and MariaDB backend of `fenced-queue`: MySQL 8.0.19 or newer and MariaDB 10.6 or newer, on connections of its own or
//! on the application's pool.
//!
//! ```no_run
//! use backend_mysql::MysqlBackend;
//! use queue_core::{Backend, Json, NewJob, Result};
//!
//! # async fn example() -> Result<()> {
//! let backend = MysqlBackend::connect("mysql://app:secret@db.internal/shop").await?;
//! backend.migrate().await?;
//! backend.enqueue(&[NewJob::new("mail".try_into()?, "welcome".try_into()?, Json::encode("ann@example.com")?)]).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # What it does where
//!
//! - A claim, a compare-and-update of any number of rows, an enqueue, a heartbeat and a purge are each one transaction at READ
//!   COMMITTED, whatever the session's default: begin, look and lock, write, commit. The fingerprint is compared with the row as
//!   it is when it is locked, and what is written is answered from that row and the time that the server wrote.
//! - Rows are locked through their primary key alone, settles in the order of their ids, claims, heartbeats and purges without
//!   waiting. A deadlock that the server finds all the same (two bulk enqueues about the same new keys) is repeated inside, up
//!   to twenty times.
//! - A step, a wait, an event and a sweep of waits are each one transaction as well. Each locks the row of the event first, then
//!   jobs by their ids, and reads and writes steps under the lock of their job. An event that nobody has emitted has a row as soon
//!   as somebody waits for it, where the two meet; it goes, by the same purge as events, a day later.
//! - A settle, an enqueue, a step and an event wait for a row that somebody else has locked at most
//!   [`lock_timeout`](MysqlOptions::lock_timeout), on an application's pool its `innodb_lock_wait_timeout`; a claim, a heartbeat
//!   and the sweeps wait for no row, and the first two for a connection or a table that is locked as a whole a third of their
//!   lease, or a second where that is longer. Then it fails as [`Transient`](queue_core::ErrorKind::Transient), not applied.
//! - "Now" is `UTC_TIMESTAMP` of the statement that writes, which comes after the rows were locked. (The insert of an enqueue may
//!   itself have to wait for a key that somebody else is about to take: then the job counts from when it began to.)
//! - Workers of the same process are woken by what the process enqueues or wakes through this handle or its clones; other
//!   processes' jobs, and those of [`enqueue_in`](queue_core::Transactional::enqueue_in), are found by polling: the servers cannot
//!   notify.
//! - Futures may be dropped at any await, but within a Tokio runtime. A call that is dropped in the middle costs its connection,
//!   which the server then rolls back; the next call opens another.
//!
//! # Costs
//!
//! Four round trips for a claim, a settle, an enqueue, a heartbeat, a purge and a step, whatever the batch (up to 1000 rows and
//! 4 MiB in one statement each way; longer batches take two more for every such piece), three where nothing was to be written and
//! for an enqueue without unique keys (of which one that was stored before takes four more), one for everything that only reads.
//! A wait for an event takes six and so does a job that hands over, an event six, or eight if it wakes anybody. The first use of a
//! statement on a connection takes one more to prepare it. There is one text for each statement however many rows it is about,
//! some thirty in all, so a cache of statements of the driver's usual size never runs over. An application's pool that tests its
//! connections before each use takes one more for that.
//!
//! Claims, settles, heartbeats, steps, events, sweeps and purges go through indexes whatever the size of the table. Two kinds of
//! calls do not:
//! a claim walks past the due jobs of kinds that it does not want (about 50 ms for 100 000 of them), and
//! [`list`](queue_core::Inspect::list) with a filter that few jobs match and [`counts`](queue_core::Inspect::counts) read the
//! whole table, without locking.
//!
//! # What the tables are like
//!
//! Names, keys and JSON are bytes (`VARBINARY`, `LONGBLOB`): the collations of text differ between servers, most of them ignore
//! trailing spaces, the one called `utf8mb4_bin` too, and no session's character set comes between. To read them by hand,
//! `SELECT CONVERT(payload USING utf8mb4) ..`, or a client with `--skip-binary-as-hex`. Times are `DATETIME(3)` in UTC. Engine, row
//! format and collation are named, and no statement depends on `sql_mode`, `time_zone`, character sets or the default isolation
//! level. Three settings do matter: autocommit must be on, `sql_safe_updates` off and, where the server keeps a binary log,
//! `binlog_format` ROW or MIXED, as all three are unless told.
//!
//! Steps refer to their job by a foreign key, which deletes them with it, whoever does that. So the table of jobs cannot be
//! truncated as long as the session checks such keys.
//!
//! # Where the two servers differ
//!
//! The statements are the same. What differs, they avoid:
//!
//! | | MySQL | MariaDB | so |
//! |---|---|---|---|
//! | entries of an index that a locking read passes over | are unlocked again | stay locked | the walk locks nothing, a subquery locks each row by its key |
//! | a `LIMIT` over `UNION ALL` of locking reads | stops early | reads, and locks, all of them | one walk over a range per priority |
//! | `UPDATE .. RETURNING`, `LATERAL` | none, yes | none, none | neither is used |
//! | a join by an index whose value is null | does not look it up | passes each version of each row that has a null | a job without a key names no queue to look in |
//! | rows locked beside `JSON_TABLE` | refused (3569) | yes | `JSON_TABLE` stands in a bracket |
//! | a finer instant put into `DATETIME(3)` | is rounded | is cut | times are cut to milliseconds before they are stored |
//! | a snapshot that meets another's write, at REPEATABLE READ | reads the new row | from 11.6.2 on error 1020 | that is [`Transient`](queue_core::ErrorKind::Transient), in an application's own transaction only |
//! | an idle connection that was closed | error 4031 | a lost connection | either is noticed before anything is written, and the call goes on with another connection |
//!
//! # Galera
//!
//! Handles may be on any node of a cluster, each on the one that its URL names. Whatever begins sees what any node has answered
//! before, and what was decided by a row that another node has changed is undone by the cluster and repeated inside, like a
//! deadlock; a step writes its job's row for that, twice, which takes two round trips more, and each transaction asks once before
//! it commits whether it is still there. But locks and clocks are each node's own: what follows from that stands in
//! `docs/guarantees.md`.
//!
//! # Privileges
//!
//! Nobody needs more than this, each of them also `SELECT` on the table `schema`. A table that a migration adds is to be granted
//! before the programs that know it start.
//!
//! | program | privileges |
//! |---|---|
//! | [`migrate`](queue_core::Backend::migrate) where something is missing | `SELECT, INSERT, UPDATE, CREATE, ALTER, INDEX, REFERENCES, DROP` on the database |
//! | workers | `SELECT, UPDATE` on `jobs`, and `INSERT` if jobs hand over; `SELECT, INSERT, UPDATE, DELETE` on `steps` and on `events` |
//! | producers | `SELECT, INSERT` on `jobs` |
//! | who emits events | `SELECT, UPDATE` on `jobs` and on `steps`; `SELECT, INSERT, UPDATE, DELETE` on `events` |
//! | [`purge`](queue_core::Inspect::purge), and of events | `SELECT, DELETE` on `jobs`, and on `events` |
//! | who looks on | `SELECT` on `jobs` and on `steps` |
//!
//! MySQL's `caching_sha2_password` needs an encrypted connection (feature `tls`) or the feature `rsa`, unless the
//! password is empty; the driver does not know MariaDB's `ed25519`.

// So that the harness of the tests, which names this crate, can be used inside it.
#[cfg(test)]
extern crate self as backend_mysql;

mod backend;
mod batch;
#[cfg(test)]
mod broken;
mod config;
mod error;
mod handle;
mod row;
mod setup;
mod sql;
mod steps;
mod transaction;

pub use backend::MysqlBackend;
pub use config::MysqlOptions;
pub use setup::Migration;
pub use setup::migrations;
pub use transaction::MysqlTransaction;

/// The driver whose pools and connections this crate takes.
pub use sqlx;
