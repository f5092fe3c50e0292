//! What a handle holds, and what runs on a connection that it has got.

use std::collections::HashMap;
use std::collections::HashSet;
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
use sqlx::sqlite::SqliteRow;
use tokio::time::timeout;

use crate::error::failed;
use crate::error::is_taken;
use crate::row;
use crate::row::KeyRow;
use crate::row::NewRow;
use crate::row::UpdateRow;
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

/// A transaction that is rolled back when it is dropped unfinished, also in the middle of its beginning or its end.
///
/// Not sqlx's: SQLite ends a transaction by itself when the disk is full or fails, and sqlx 0.9 would go on counting it as
/// open, so that nothing could ever begin another on that connection.
#[derive(Debug)]
pub(crate) struct WriteTransaction(Option<PoolConnection<Sqlite>>);

impl WriteTransaction {
    async fn run(&mut self, text: &SqlStr) -> sqlx::Result<()> {
        if let Some(connection) = &mut self.0 {
            sqlx::raw_sql(text.clone()).execute(&mut **connection).await?;
        }
        Ok(())
    }

    pub(crate) fn connection(&mut self) -> Result<&mut SqliteConnection> {
        match &mut self.0 {
            Some(connection) => Ok(connection),
            None => Err(Error::not_applied(ErrorKind::Permanent, "the transaction has ended")),
        }
    }

    pub(crate) async fn commit(mut self, call: &'static str) -> Result<()> {
        self.run(&SqlStr::from_static("COMMIT")).await.map_err(|error| failed(call, Certainty::Unknown, error))?;
        self.0 = None;
        Ok(())
    }
}

impl Drop for WriteTransaction {
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
    pub(crate) async fn begin(&self, call: &'static str) -> Result<WriteTransaction> {
        let mut transaction = WriteTransaction(Some(self.writer(call, None).await?));
        transaction.run(&self.sql.begin).await.map_err(|error| failed(call, NotApplied, error))?;
        Ok(transaction)
    }

    /// One statement about a batch that travels as one parameter.
    async fn batch_query(
        connection: &mut SqliteConnection,
        text: &SqlStr,
        batch: sqlx::Result<String>,
    ) -> sqlx::Result<Vec<SqliteRow>> {
        query(text.clone()).bind(batch?).fetch_all(connection).await
    }

    /// Stores jobs that have been checked, in a transaction that is the caller's to commit.
    pub(crate) async fn enqueue(&self, connection: &mut SqliteConnection, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let failed = |error| failed("enqueue", NotApplied, error);
        let sql = &self.sql;

        let stored = Self::batch_query(connection, &sql.stored_ids, row::ids(jobs.iter().map(|job| job.id))).await;
        let mut stored: HashSet<_> = stored.map_err(failed)?.iter().map(row::id).collect();
        let (again, fresh): (Vec<_>, Vec<_>) = jobs.iter().partition(|job| stored.contains(&job.id));
        let mut repeated = HashSet::new();
        for chunk in chunks(&again) {
            let rows =
                Self::batch_query(connection, &sql.repeated, row::array(chunk.iter().copied().map(NewRow::from))).await;
            repeated.extend(items(&rows.map_err(failed)?, chunk).map(|(job, _)| job.id));
        }
        if let Some(index) = jobs.iter().position(|job| stored.contains(&job.id) && !repeated.contains(&job.id)) {
            return Err(id_reused(jobs[index].id).at_index(index));
        }

        let mut inserted = HashSet::with_capacity(fresh.len());
        for chunk in chunks(&fresh) {
            let batch = row::array(chunk.iter().copied().map(NewRow::from)).map_err(failed)?;
            let rows = query(sql.insert.clone()).bind(self.now()).bind(batch).fetch_all(&mut *connection).await;
            inserted.extend(rows.map_err(failed)?.iter().map(row::id));
        }
        let refused: Vec<_> = fresh.into_iter().filter(|job| !inserted.contains(&job.id)).collect();
        let mut holders = HashMap::new();
        for chunk in chunks(&refused) {
            let rows = Self::batch_query(connection, &sql.holders, row::array(chunk.iter().copied().map(KeyRow::from)))
                .await
                .map_err(failed)?;
            holders.extend(items(&rows, chunk).map(|(job, row)| (job.id, row::id(row))));
        }

        let outcome = |job: &NewJob| {
            if inserted.remove(&job.id) {
                stored.insert(job.id);
                return Ok(Enqueued::New(job.id));
            }
            match holders.get(&job.id) {
                _ if stored.contains(&job.id) => Ok(Enqueued::Existing(job.id)),
                Some(existing) => Ok(Enqueued::Duplicate { existing: *existing }),
                None => Err(Error::not_applied(ErrorKind::Permanent, format!("job {} was left out", job.id))),
            }
        };
        jobs.iter().map(outcome).collect()
    }

    /// Updates rows, of which no two are the same. `lost` is what is known of the write if the connection is lost in it.
    pub(crate) async fn update(
        &self,
        connection: &mut SqliteConnection,
        updates: &[UpdateRequest],
        lost: Certainty,
    ) -> Result<Vec<Update>> {
        let batch =
            row::array(updates.iter().map(UpdateRow::from)).map_err(|error| failed("update", NotApplied, error))?;
        // Not `fetch_one`: it leaves the statement before its commit, whose failure nobody would hear of.
        let rows = query(self.sql.update.clone()).bind(self.now()).bind(batch).fetch_all(&mut *connection).await;
        let rows = rows.map_err(|error| match is_taken(&error) {
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
            let rows = Self::batch_query(connection, &self.sql.executions, row::ids(others)).await;
            let applied = if answers.is_empty() { NotApplied } else { lost };
            for row in &rows.map_err(|error| failed("update", applied, error).with_certainty(applied))? {
                let answer = row::execution(row).map_or_else(Update::Unreadable, Update::Conflict);
                answers.insert(row::id(row), answer);
            }
        }
        Ok(updates.iter().map(|update| answers.remove(&update.id).unwrap_or(Update::Missing)).collect())
    }
}

/// The items that rows are about, by the column `item`.
fn items<'r, 'j>(rows: &'r [SqliteRow], chunk: &[&'j NewJob]) -> impl Iterator<Item = (&'j NewJob, &'r SqliteRow)> {
    rows.iter().filter_map(|row| {
        let item = row.try_get::<i64, _>("item").ok()?;
        Some((*chunk.get(usize::try_from(item).ok()?)?, row))
    })
}
