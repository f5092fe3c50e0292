//! The backend: which statement answers which call, and on which connection.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use async_trait::async_trait;
use queue_core::Certainty::NotApplied;
use queue_core::Certainty::Unknown;
use queue_core::*;
use sqlx::SqliteConnection;
use sqlx::SqlitePool;
use sqlx::query;
use sqlx::sqlite::SqliteRow;

use crate::config::SqliteOptions;
use crate::error::failed;
use crate::handle::Handle;
use crate::handle::Patience;
use crate::handle::SqliteTransaction;
use crate::row;
use crate::row::HeldRow;
use crate::setup;
use crate::sql::Sql;

/// Jobs in a SQLite database. Clones are one handle.
///
/// Opening does not create the tables, [`migrate`](Backend::migrate) does. Opening is refused, with an error of kind
/// [`ErrorKind::Schema`], if the database has a schema that does not admit this program any more.
#[derive(Clone, Debug)]
pub struct SqliteBackend(pub(crate) Arc<Handle>);

impl SqliteBackend {
    /// Opens the database of this URL: see [`SqliteOptions::from_url`].
    ///
    /// # Errors
    ///
    /// A malformed URL, a file that cannot be opened, or a schema that does not admit this program.
    pub async fn connect(url: &str) -> Result<Self> {
        Self::connect_with(SqliteOptions::from_url(url)?).await
    }

    /// Opens the file of exactly this name, or creates it.
    ///
    /// # Errors
    ///
    /// A file that cannot be opened, or a schema that does not admit this program.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::connect_with(SqliteOptions::file(path)).await
    }

    /// Opens what the options say.
    ///
    /// # Errors
    ///
    /// A file that cannot be opened, or a schema that does not admit this program.
    pub async fn connect_with(options: SqliteOptions) -> Result<Self> {
        let told = Arc::new(AtomicU64::new(Patience::UNKNOWN));
        let (writer, readers) = setup::open(&options, Arc::clone(&told)).await?;
        let patience = Patience { longest: options.busy_timeout, told };
        Self::admitted(writer, readers, (!options.is_memory()).then_some(patience), options).await
    }

    /// Works in the application's own pool, with every default.
    ///
    /// The pool's settings stay the application's: its journal mode, its `synchronous`, and its `busy_timeout`, which is
    /// then also how long a claim waits. A database in memory needs a pool of one connection that is never closed. A
    /// transaction that was begun in plain SQL and left open on one of its connections takes in what runs there next.
    ///
    /// # Errors
    ///
    /// A pool that gives no connection, or a schema that does not admit this program.
    pub async fn from_pool(pool: SqlitePool) -> Result<Self> {
        Self::from_pool_with(pool, SqliteOptions::default()).await
    }

    /// Works in the application's own pool, with the table prefix, the cap and the clock of these options. Whatever else
    /// they say is about connections, and those are the pool's.
    ///
    /// # Errors
    ///
    /// A pool that gives no connection, or a schema that does not admit this program.
    pub async fn from_pool_with(pool: SqlitePool, options: SqliteOptions) -> Result<Self> {
        Self::admitted(pool.clone(), pool, None, options).await
    }

    async fn admitted(
        writer: SqlitePool,
        readers: SqlitePool,
        patience: Option<Patience>,
        options: SqliteOptions,
    ) -> Result<Self> {
        let SqliteOptions { prefix, max_payload, clock, .. } = options;
        let sql = Sql::new(&prefix);
        let signal = WorkSignal::default();
        let handle = Handle { writer, readers, patience, sql, prefix, max_payload, clock, signal };
        let mut connection = handle.reader("connect").await?;
        setup::refuse_other_encodings(&mut connection).await?;
        setup::admitted(&mut connection, &handle.sql).await?;
        drop(connection);
        Ok(Self(Arc::new(handle)))
    }

    /// The text of every statement by name, as it is run: for `EXPLAIN QUERY PLAN`, and for reviews.
    pub fn statements(&self) -> Vec<(&'static str, &str)> {
        self.0.sql.all()
    }

    /// Closes the pool, also an application's, when calls in flight have ended. A handle that is dropped closes its own
    /// connections in the background.
    pub async fn close(&self) {
        self.0.readers.close().await;
        self.0.writer.close().await;
    }
}

/// A third of the lease: waiting longer would leave too little of it.
fn third(lease: Lease) -> Option<Duration> {
    Some(lease.duration() / 3)
}

fn blob(id: Option<JobId>) -> Vec<u8> {
    id.map(|id| id.as_uuid().as_bytes().to_vec()).unwrap_or_default()
}

fn one_more(limit: Limit) -> i64 {
    i64::from(limit.get()) + 1
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Backend for SqliteBackend {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.max_payload = self.0.max_payload;
        capabilities.atomic_batches = true;
        capabilities.wakes = true;
        capabilities.durable_steps = true;
        capabilities
    }

    async fn migrate(&self) -> Result<()> {
        let handle = &*self.0;
        // Usually there is nothing to do, and so nobody to wait for.
        if setup::is_current(&mut *handle.reader("migrate").await?, &handle.sql).await? {
            return Ok(());
        }
        let mut transaction = handle.begin("migrate").await?;
        setup::migrate(&mut transaction, &handle.sql, &handle.prefix).await?;
        transaction.commit("migrate").await
    }

    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let handle = &*self.0;
        check_new_jobs(jobs, &self.capabilities())?;
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        let mut transaction = handle.begin("enqueue").await?;
        let outcomes = handle.enqueue(&mut transaction, jobs).await?;
        transaction.commit("enqueue").await?;
        handle.signal.notify();
        Ok(outcomes)
    }

    async fn get(&self, id: JobId) -> Result<Option<Job>> {
        let mut connection = self.0.reader("get").await?;
        let rows = query(self.0.sql.get.clone()).bind(id.as_uuid()).fetch_all(&mut *connection).await;
        let rows = rows.map_err(|error| failed("get", NotApplied, error))?;
        Ok(rows.first().map(row::job).transpose()?)
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed> {
        let handle = &*self.0;
        let kinds = row::array(request.kinds()).map_err(|error| failed("claim", NotApplied, error))?;
        let mut connection = handle.writer("claim", third(request.lease())).await?;
        let rows = query(handle.sql.claim.clone())
            .bind(handle.now())
            .bind(request.queue().as_str())
            .bind(kinds)
            .bind(request.limit().get())
            .bind(i64::from(request.starts()))
            .bind(Revision::random().as_uuid())
            .bind(request.worker().as_str())
            .bind(request.lease().as_millis())
            .fetch_all(&mut *connection)
            .await
            .map_err(|error| failed("claim", Unknown, error))?;
        Ok(Claimed::collect(rows.iter().map(row::job)))
    }

    async fn update_if_current(&self, id: JobId, current: &Fingerprint, patch: &Patch) -> Result<Update> {
        let update = UpdateRequest { id, current: current.clone(), patch: patch.clone() };
        let answers = self.update_many_if_current(&[update]).await?;
        Ok(answers.into_iter().next().unwrap_or(Update::Missing))
    }

    async fn extend_leases(&self, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        let handle = &*self.0;
        if held.is_empty() {
            return Ok(Vec::new());
        }
        let batch = row::array(held.iter().map(HeldRow::from)).map_err(|error| failed("extend", NotApplied, error))?;
        let mut connection = handle.writer("extend", third(lease)).await?;
        let rows = query(handle.sql.extend.clone())
            .bind(handle.now())
            .bind(lease.as_millis())
            .bind(batch)
            .fetch_all(&mut *connection)
            .await
            .map_err(|error| failed("extend", Unknown, error))?;
        let extended: Vec<_> = rows.iter().filter_map(row::held).collect();
        let extended: HashMap<_, _> = extended.iter().map(|held| (held.id, held)).collect();
        Ok(held
            .iter()
            .map(|held| if extended.get(&held.id) == Some(&held) { Beat::Extended } else { Beat::Lost })
            .collect())
    }

    async fn stale(&self, after: Option<StaleCursor>, limit: Limit) -> Result<Page<Execution, StaleCursor>> {
        let mut connection = self.0.reader("stale").await?;
        let lease = after.and_then(|after| after.lease_expires_at);
        let rows = query(self.0.sql.stale.clone())
            .bind(self.0.now())
            .bind(lease.is_none())
            .bind(lease.map_or(i64::MIN, Timestamp::unix_millis))
            .bind(blob(after.map(|after| after.id)))
            .bind(one_more(limit))
            .fetch_all(&mut *connection)
            .await
            .map_err(|error| failed("stale", NotApplied, error))?;
        Ok(page(&rows, limit, row::stale_cursor, row::execution))
    }

    async fn claimed_by(
        &self,
        worker: &WorkerId,
        older_than: Delay,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Execution, JobId>> {
        let mut connection = self.0.reader("claimed_by").await?;
        let rows = query(self.0.sql.claimed_by.clone())
            .bind(self.0.now())
            .bind(worker.as_str())
            .bind(blob(after))
            .bind(older_than.as_millis())
            .bind(one_more(limit))
            .fetch_all(&mut *connection)
            .await
            .map_err(|error| failed("claimed_by", NotApplied, error))?;
        Ok(page(&rows, limit, row::id, row::execution))
    }

    async fn update_many_if_current(&self, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        let handle = &*self.0;
        check_updates(updates, &self.capabilities())?;
        if updates.is_empty() {
            return Ok(Vec::new());
        }
        let answers = match &chunks(updates)[..] {
            [whole] => {
                let mut connection = handle.writer("update", None).await?;
                handle.update(&mut connection, whole, Unknown).await?
            }
            chunks => {
                let mut transaction = handle.begin("update").await?;
                let mut answers = Vec::with_capacity(updates.len());
                for chunk in chunks {
                    answers.extend(handle.update(&mut transaction, chunk, NotApplied).await?);
                }
                transaction.commit("update").await?;
                answers
            }
        };
        handle.signal.notify_of(updates, &answers);
        Ok(answers)
    }

    async fn wait_for_work(&self, _queues: &[Name]) -> Result<()> {
        self.0.signal.wait().await;
        Ok(())
    }

    fn durable_steps(&self) -> Option<&dyn DurableSteps> {
        Some(self)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Inspect for SqliteBackend {
    async fn list(&self, filter: &ListFilter, after: Option<JobId>, limit: Limit) -> Result<Page<Job, JobId>> {
        let mut connection = self.0.reader("list").await?;
        let rows = query(self.0.sql.list.clone())
            .bind(blob(after))
            .bind(filter.queue.as_ref().map(Name::as_str))
            .bind(filter.kind.as_ref().map(Name::as_str))
            .bind(filter.state.map(JobState::as_str))
            .bind(one_more(limit))
            .fetch_all(&mut *connection)
            .await
            .map_err(|error| failed("list", NotApplied, error))?;
        Ok(page(&rows, limit, row::id, row::job))
    }

    async fn counts(&self) -> Result<Vec<Count>> {
        let mut connection = self.0.reader("counts").await?;
        let rows = query(self.0.sql.counts.clone()).fetch_all(&mut *connection).await;
        let rows = rows.map_err(|error| failed("counts", NotApplied, error))?;
        Ok(Count::collect(rows.iter().map(row::count)))
    }

    async fn purge(&self, state: JobState, older_than: Delay, limit: Limit) -> Result<u64> {
        check_purge(state)?;
        let mut connection = self.0.writer("purge", None).await?;
        let done = query(self.0.sql.purge.clone())
            .bind(self.0.now())
            .bind(state.as_str())
            .bind(older_than.as_millis())
            .bind(limit.get())
            .execute(&mut *connection)
            .await
            .map_err(|error| failed("purge", Unknown, error))?;
        Ok(done.rows_affected())
    }
}

/// On a connection of the application, in its transaction, of which these calls begin, commit and roll back nothing.
///
/// The transaction should begin with `BEGIN IMMEDIATE`. In one that began as a reader and has read, SQLite refuses the
/// write once somebody else has written: [`ErrorKind::Transient`], and the whole transaction is to be repeated. After
/// any error roll back before anything else is run: SQLite may have ended the transaction by itself, and what follows would
/// be committed statement by statement.
///
/// Workers learn of jobs enqueued like this when they poll, since nobody here sees the commit.
#[async_trait]
impl Transactional for SqliteBackend {
    type Connection = SqliteConnection;
    type Transaction = SqliteTransaction;

    async fn begin(&self) -> Result<SqliteTransaction> {
        self.0.begin("begin").await
    }

    async fn commit(&self, transaction: SqliteTransaction) -> Result<()> {
        transaction.commit("commit").await?;
        self.0.signal.notify();
        Ok(())
    }

    async fn enqueue_in(&self, connection: &mut SqliteConnection, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        check_new_jobs(jobs, &self.capabilities())?;
        let locked = query(self.0.sql.lock.clone()).execute(&mut *connection).await;
        locked.map_err(|error| failed("enqueue", NotApplied, error))?;
        self.0.enqueue(connection, jobs).await
    }

    async fn update_if_current_in(
        &self,
        connection: &mut SqliteConnection,
        id: JobId,
        current: &Fingerprint,
        patch: &Patch,
    ) -> Result<Update> {
        patch.check(&self.capabilities())?;
        let update = UpdateRequest { id, current: current.clone(), patch: patch.clone() };
        self.0.update_one(connection, &update).await
    }
}

/// Rows of which one more than fit was asked for, to tell whether another page follows.
fn page<T, C>(
    rows: &[SqliteRow],
    limit: Limit,
    cursor: impl Fn(&SqliteRow) -> C,
    read: impl Fn(&SqliteRow) -> Result<T, Unreadable>,
) -> Page<T, C> {
    Page::collect(rows.iter().map(|row| (cursor(row), read(row))), limit)
}
