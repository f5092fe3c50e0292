//! What a handle holds, and what runs on a connection that it has got.

use std::collections::HashMap;
use std::collections::HashSet;
use std::ops::Deref;
use std::ops::DerefMut;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::time::Instant;

use queue_core::Certainty;
use queue_core::Certainty::NotApplied;
use queue_core::ClockOffset;
use queue_core::Enqueued;
use queue_core::Error;
use queue_core::ErrorKind;
use queue_core::Identifier;
use queue_core::NewJob;
use queue_core::Result;
use queue_core::Revision;
use queue_core::Unreadable;
use queue_core::Update;
use queue_core::UpdateRequest;
use queue_core::WorkSignal;
use queue_core::chunks;
use queue_core::id_reused;
use sqlx::AssertSqlSafe;
use sqlx::Row;
use sqlx::SqlStr;
use sqlx::Sqlite;
use sqlx::SqliteConnection;
use sqlx::SqlitePool;
use sqlx::pool::PoolConnection;
use sqlx::query;
use tokio::time::timeout;
use uuid::Uuid;

use crate::error::failed;
use crate::error::is_taken;
use crate::row;
use crate::sql::Sql;

/// What the clones of a backend share.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) writer: SqlitePool,
    pub(crate) readers: SqlitePool,
    /// How long writes wait for other processes, where that is ours to say.
    pub(crate) patience: Option<Patience>,
    pub(crate) sql: Sql,
    pub(crate) prefix: Identifier,
    pub(crate) max_payload: usize,
    pub(crate) clock: ClockOffset,
    pub(crate) signal: WorkSignal,
}

#[derive(Debug)]
pub(crate) struct Patience {
    pub(crate) longest: Duration,
    /// What the writer has been told, in milliseconds; unknown to a connection that is new.
    pub(crate) told: Arc<AtomicU64>,
}

impl Patience {
    pub(crate) const UNKNOWN: u64 = u64::MAX;
}

/// A transaction for writes; see [`Transactional::begin`](queue_core::Transactional::begin). It is rolled back when it is dropped
/// unfinished, also in the middle of its beginning or its end.
///
/// Not sqlx's: SQLite ends a transaction by itself when the disk is full or fails, and sqlx 0.9 would go on counting it as
/// open, so that nothing could ever begin another on that connection.
#[derive(Debug)]
pub struct SqliteTransaction(Option<PoolConnection<Sqlite>>);

impl SqliteTransaction {
    async fn run(&mut self, text: &SqlStr) -> sqlx::Result<()> {
        sqlx::raw_sql(text.clone()).execute(&mut **self).await?;
        Ok(())
    }

    pub(crate) async fn commit(mut self, call: &'static str) -> Result<()> {
        self.run(&SqlStr::from_static("COMMIT")).await.map_err(|error| failed(call, Certainty::Unknown, error))?;
        self.0 = None;
        Ok(())
    }
}

impl Deref for SqliteTransaction {
    type Target = SqliteConnection;

    fn deref(&self) -> &SqliteConnection {
        self.0.as_ref().expect("only its end takes the connection")
    }
}

impl DerefMut for SqliteTransaction {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        self.0.as_mut().expect("only its end takes the connection")
    }
}

impl Drop for SqliteTransaction {
    fn drop(&mut self) {
        if let Some(mut connection) = self.0.take() {
            // The pool gets the connection back after that. What was sent before is run before; if that ended the
            // transaction, there is none to roll back, and no harm done.
            tokio::spawn(async move { sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await.ok() });
        }
    }
}

impl Handle {
    pub(crate) fn now(&self) -> i64 {
        self.clock.millis()
    }

    pub(crate) async fn reader(&self, call: &'static str) -> Result<PoolConnection<Sqlite>> {
        self.readers.acquire().await.map_err(|error| failed(call, NotApplied, error))
    }

    /// A connection for writes. It waits for other calls of this handle and then for other processes, in all as long as is
    /// configured, or shorter. On an application's pool, that pool says how long.
    pub(crate) async fn writer(&self, call: &'static str, at_most: Option<Duration>) -> Result<PoolConnection<Sqlite>> {
        let failed = |error| failed(call, NotApplied, error);
        let Some(Patience { longest, told }) = &self.patience else {
            return self.writer.acquire().await.map_err(failed);
        };
        let wait = at_most.map_or(*longest, |at_most| at_most.min(*longest));
        let started = Instant::now();
        let busy =
            || Error::not_applied(ErrorKind::Transient, format!("{call}: other calls were writing for {wait:?}"));
        // The pool gets a connection back in the background: a moment for that.
        let mut connection = match timeout(wait.max(Duration::from_millis(30)), self.writer.acquire()).await {
            Ok(Err(sqlx::Error::PoolTimedOut)) | Err(_) => return Err(busy()),
            Ok(acquired) => acquired.map_err(failed)?,
        };
        // What went by in no time is not counted, so that the next call needs not tell SQLite anew.
        let gone = Some(started.elapsed()).filter(|gone| *gone > Duration::from_millis(10)).unwrap_or_default();
        let left = u64::try_from(wait.saturating_sub(gone).as_millis()).unwrap_or(u64::MAX);
        if told.swap(Patience::UNKNOWN, Ordering::SeqCst) != left {
            let text = format!("PRAGMA busy_timeout = {left}");
            query(AssertSqlSafe(text)).persistent(false).fetch_all(&mut *connection).await.map_err(failed)?;
        }
        told.store(left, Ordering::SeqCst);
        Ok(connection)
    }

    /// A transaction on a connection for writes.
    pub(crate) async fn begin(&self, call: &'static str) -> Result<SqliteTransaction> {
        let mut transaction = SqliteTransaction(Some(self.writer(call, None).await?));
        transaction.run(&self.sql.begin).await.map_err(|error| failed(call, NotApplied, error))?;
        Ok(transaction)
    }

    /// Stores jobs that have been checked, in a transaction that is the caller's to commit, or to roll back after an error.
    pub(crate) async fn enqueue(&self, connection: &mut SqliteConnection, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let failed = |error| failed("enqueue", NotApplied, error);
        // One for the whole call: it tells what the call has stored from what was there.
        let revision = Revision::random().as_uuid();
        let mut inserted = 0;
        for chunk in chunks(jobs) {
            let (items, shares) = row::new_jobs(chunk).map_err(failed)?;
            let insert = query(self.sql.insert.clone()).bind(self.now()).bind(items).bind(shares).bind(revision);
            inserted += insert.execute(&mut *connection).await.map_err(failed)?.rows_affected();
        }
        if u64::try_from(jobs.len()) == Ok(inserted) {
            return Ok(jobs.iter().map(|job| Enqueued::New(job.id)).collect());
        }
        self.enqueued(connection, jobs, revision).await
    }

    /// What became of jobs of which some were left out, since their id or their key was taken.
    async fn enqueued(
        &self,
        connection: &mut SqliteConnection,
        jobs: &[NewJob],
        revision: Uuid,
    ) -> Result<Vec<Enqueued>> {
        let failed = |error| failed("enqueue", NotApplied, error);
        let sql = &self.sql;
        let ids = row::ids(jobs.iter().map(|job| job.id)).map_err(failed)?;
        let rows =
            query(sql.stored_ids.clone()).bind(ids).bind(revision).fetch_all(&mut *connection).await.map_err(failed)?;
        let (mut own, mut stored) = (HashSet::new(), HashSet::with_capacity(rows.len()));
        for row in &rows {
            stored.insert(row::id(row));
            if row.try_get("own").map_err(failed)? {
                own.insert(row::id(row));
            }
        }

        let again: Vec<_> = jobs.iter().filter(|job| stored.contains(&job.id) && !own.contains(&job.id)).collect();
        let mut repeated = HashSet::new();
        for chunk in chunks(&again) {
            let (items, shares) = row::new_jobs(chunk.iter().copied()).map_err(failed)?;
            let rows = query(sql.repeated.clone())
                .bind(items)
                .bind(shares)
                .fetch_all(&mut *connection)
                .await
                .map_err(failed)?;
            repeated.extend(rows.iter().map(row::id));
        }
        let reused = |job: &NewJob| stored.contains(&job.id) && !own.contains(&job.id) && !repeated.contains(&job.id);
        if let Some(index) = jobs.iter().position(reused) {
            return Err(id_reused(jobs[index].id).at_index(index));
        }

        let refused: Vec<_> = jobs.iter().filter(|job| !stored.contains(&job.id)).collect();
        let mut holders = HashMap::new();
        for chunk in chunks(&refused) {
            let (items, shares) = row::new_jobs(chunk.iter().copied()).map_err(failed)?;
            let rows = query(sql.holders.clone())
                .bind(items)
                .bind(shares)
                .fetch_all(&mut *connection)
                .await
                .map_err(failed)?;
            for row in &rows {
                holders.insert(row.try_get::<Uuid, _>("item").map_err(failed)?, row::id(row));
            }
        }

        let outcome = |job: &NewJob| match holders.get(&job.id.as_uuid()) {
            // Of a job that is in the call twice, the first one.
            _ if own.remove(&job.id) => Ok(Enqueued::New(job.id)),
            _ if stored.contains(&job.id) => Ok(Enqueued::Existing(job.id)),
            Some(existing) => Ok(Enqueued::Duplicate { existing: *existing }),
            None => Err(Error::not_applied(ErrorKind::Permanent, format!("job {} was left out", job.id))),
        };
        jobs.iter().map(outcome).collect()
    }

    /// The same for one row, in a transaction.
    pub(crate) async fn update_one(&self, connection: &mut SqliteConnection, update: &UpdateRequest) -> Result<Update> {
        let answers = self.update(connection, std::slice::from_ref(update), NotApplied).await?;
        Ok(answers.into_iter().next().unwrap_or(Update::Missing))
    }

    /// Updates rows, of which no two are the same. `lost` is what is known of the write if the connection is lost in it.
    pub(crate) async fn update(
        &self,
        connection: &mut SqliteConnection,
        updates: &[UpdateRequest],
        lost: Certainty,
    ) -> Result<Vec<Update>> {
        let (items, shares) = row::updates(updates).map_err(|error| failed("update", NotApplied, error))?;
        // Not `fetch_one`: it leaves the statement before its commit, whose failure nobody would hear of.
        let update = query(self.sql.update.clone()).bind(self.now()).bind(items).bind(shares);
        let rows = update.fetch_all(&mut *connection).await.map_err(|error| match is_taken(&error) {
            true => Error::invalid("update: another active job has the unique key").with_source(error),
            false => failed("update", lost, error),
        })?;
        let mut answers = HashMap::with_capacity(updates.len());
        for row in &rows {
            // It matched and was written, and still cannot be read: broken by hand where the fingerprint does not look.
            let execution = row::execution(row).map_err(|Unreadable { id, reason, .. }| {
                Error::new(ErrorKind::Schema, lost, format!("job {id} cannot be read: {reason}"))
            })?;
            answers.insert(execution.id, Update::Applied(execution));
        }
        if answers.len() < updates.len() {
            let others = updates.iter().map(|update| update.id).filter(|id| !answers.contains_key(id));
            let applied = if answers.is_empty() { NotApplied } else { lost };
            let failed = |error| failed("update", applied, error).with_certainty(applied);
            let ids = row::ids(others).map_err(failed)?;
            let rows = query(self.sql.executions.clone()).bind(ids).fetch_all(connection).await.map_err(failed)?;
            for row in &rows {
                let answer = row::execution(row).map_or_else(Update::Unreadable, Update::Conflict);
                answers.insert(row::id(row), answer);
            }
        }
        Ok(updates.iter().map(|update| answers.remove(&update.id).unwrap_or(Update::Missing)).collect())
    }
}
