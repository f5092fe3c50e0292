//! The backend: which statement answers which call, and on which connection.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;

use async_trait::async_trait;
use queue_core::*;
use sqlx::MySqlConnection;
use sqlx::MySqlPool;
use sqlx::mysql::MySqlRow;
use sqlx::query;
use uuid::Uuid;

use crate::config::MysqlOptions;
use crate::error::failed;
use crate::error::is_taken;
use crate::handle::Handle;
use crate::row;
use crate::setup;
use crate::sql::Sql;
use crate::transaction::Deadline;
use crate::transaction::End;
use crate::transaction::Failure;
use crate::transaction::MysqlTransaction;
use crate::transaction::Repeats;
use crate::transaction::Session;

/// Jobs in a database of a MySQL or MariaDB server. Clones are one handle.
///
/// Connecting does not create the tables, [`migrate`](Backend::migrate) does. Connecting is refused, with an error of kind
/// [`ErrorKind::Schema`], if the database has a schema that does not admit this program any more.
#[derive(Clone, Debug)]
pub struct MysqlBackend(pub(crate) Arc<Handle>);

impl MysqlBackend {
    /// Connects to the database of this URL: see [`MysqlOptions::from_url`].
    ///
    /// # Errors
    ///
    /// A malformed URL, a server that cannot be reached or is too old, or a schema that does not admit this program.
    pub async fn connect(url: &str) -> Result<Self> {
        Self::connect_with(MysqlOptions::from_url(url)?).await
    }

    /// Connects to what the options say.
    ///
    /// # Errors
    ///
    /// A server that cannot be reached, is too old or does not admit the cap on payloads, or a schema that does not admit
    /// this program.
    pub async fn connect_with(options: MysqlOptions) -> Result<Self> {
        Self::admitted(setup::open(&options).await?, true, options).await
    }

    /// Works in the application's own pool, with every default.
    ///
    /// The pool's settings stay the application's, whatever their isolation level, time zone and SQL mode; its
    /// `innodb_lock_wait_timeout` is how long a settle or an enqueue waits for a locked row. Its sessions must have autocommit
    /// on, as they do unless told, and on a Galera cluster `wsrep_sync_wait = 1`. Each transaction of this crate sets its isolation level in the message that begins it, so a
    /// proxy in between must pass on two statements in one message.
    ///
    /// # Errors
    ///
    /// A pool that gives no connection or, on a cluster, shows the past, a server that is too old, or a schema that does not
    /// admit this program.
    pub async fn from_pool(pool: MySqlPool) -> Result<Self> {
        Self::from_pool_with(pool, MysqlOptions::default()).await
    }

    /// Works in the application's own pool, with the table prefix, the cap and the clock of these options. Whatever else
    /// they say is about connections, and those are the pool's.
    ///
    /// # Errors
    ///
    /// A pool that gives no connection, a server that is too old or does not admit the cap on payloads, or a schema that does
    /// not admit this program.
    pub async fn from_pool_with(pool: MySqlPool, options: MysqlOptions) -> Result<Self> {
        Self::admitted(pool, false, options).await
    }

    async fn admitted(pool: MySqlPool, is_ours: bool, options: MysqlOptions) -> Result<Self> {
        let MysqlOptions { prefix, max_payload, clock, .. } = options;
        let mut session = Session::of(&pool, "connecting", Deadline::NEVER).await?;
        setup::check_server(session.connection(), max_payload).await?;
        let is_cluster = setup::is_cluster(session.connection()).await?;
        let handle = Handle {
            pool,
            sql: Sql::new(&prefix, is_ours, is_cluster),
            prefix,
            max_payload,
            clock,
            is_cluster,
            signal: WorkSignal::default(),
            idle: AtomicBool::default(),
        };
        setup::admitted(session.connection(), &handle.sql, &handle.prefix).await?;
        session.give_back();
        Ok(Self(Arc::new(handle)))
    }

    /// The text of every statement by name, as it is run: for `EXPLAIN`, and for reviews.
    pub fn statements(&self) -> Vec<(&'static str, &str)> {
        self.0.sql.all()
    }

    /// Closes the pool, also an application's, when calls in flight have ended. A handle that is dropped closes its own
    /// connections in the background.
    pub async fn close(&self) {
        self.0.pool.close().await;
    }
}

/// The first id that may follow; `None` if there is none. (A comparison with a shorter value than an id would be padded.)
fn following(after: Option<JobId>) -> Option<Uuid> {
    match after {
        None => Some(Uuid::nil()),
        Some(id) => id.as_uuid().as_u128().checked_add(1).map(Uuid::from_u128),
    }
}

fn one_more(limit: Limit) -> u32 {
    limit.get() + 1
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Backend for MysqlBackend {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.max_payload = self.0.max_payload;
        capabilities.atomic_batches = true;
        capabilities.skips_locked_rows = true;
        capabilities.wakes = true;
        capabilities.durable_steps = true;
        capabilities
    }

    async fn migrate(&self) -> Result<()> {
        let Handle { pool, sql, prefix, .. } = &*self.0;
        // Usually there is nothing to do, and so nobody to wait for.
        let mut session = Session::of(pool, "migrate", Deadline::NEVER).await?;
        let is_current = setup::is_current(session.connection(), sql, prefix).await?;
        session.give_back();
        if is_current {
            return Ok(());
        }
        setup::migrate(&pool.connect_options(), sql, prefix).await
    }

    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let handle = &*self.0;
        check_new_jobs(jobs, &self.capabilities())?;
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        let mut repeats = Repeats::default();
        // An id is new unless its call is repeated, and then the insert meets it; keys are taken every day.
        let mut known = jobs.iter().any(|job| job.unique_key.is_some()).then_some(&handle.sql.known);
        loop {
            let mut transaction = handle.begin("enqueue", Deadline::NEVER).await?;
            let answer = handle.enqueue(transaction.connection(), jobs, known).await.map(End::Commit);
            if let Some(outcomes) = transaction.end("enqueue", answer, &mut repeats).await? {
                handle.signal.notify();
                return Ok(outcomes);
            }
            known = Some(&handle.sql.known);
        }
    }

    async fn get(&self, id: JobId) -> Result<Option<Job>> {
        let rows = self.0.read("get", || query(self.0.sql.get.clone()).bind(id.as_uuid())).await?;
        Ok(rows.first().map(row::job).transpose()?)
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed> {
        let handle = &*self.0;
        if handle.idle.load(Ordering::Relaxed) && !handle.is_anything_due(request).await? {
            return Ok(Claimed::default());
        }
        let deadline = Deadline::third(request.lease());
        let mut repeats = Repeats::default();
        loop {
            let mut transaction = handle.begin("claim", deadline).await?;
            let answer = deadline.within(handle.claim(transaction.connection(), request)).await;
            if let Some(claimed) = transaction.end("claim", answer, &mut repeats).await? {
                handle.idle.store(claimed == Claimed::default(), Ordering::Relaxed);
                return Ok(claimed);
            }
        }
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
        let deadline = Deadline::third(lease);
        let mut repeats = Repeats::default();
        loop {
            let mut transaction = handle.begin("extend", deadline).await?;
            let answer = deadline.within(handle.extend(transaction.connection(), held, lease)).await;
            if let Some(beats) = transaction.end("extend", answer, &mut repeats).await? {
                return Ok(beats);
            }
        }
    }

    async fn stale(&self, after: Option<StaleCursor>, limit: Limit) -> Result<Page<Execution, StaleCursor>> {
        let cursor = after.unwrap_or(StaleCursor { lease_expires_at: None, id: Uuid::nil().into() });
        let id = if after.is_some() { following(Some(cursor.id)) } else { Some(Uuid::nil()) };
        // Among the missing leases from an id on, and among the others from a lease and an id on.
        let (unset, lease, id) = match (cursor.lease_expires_at, id) {
            (None, Some(id)) => (Some(id), Timestamp::MIN.unix_millis(), Uuid::nil()),
            (None, None) => (None, Timestamp::MIN.unix_millis(), Uuid::nil()),
            (Some(lease), Some(id)) => (None, lease.unix_millis(), id),
            (Some(lease), None) => (None, lease.saturating_add_millis(1).unix_millis(), Uuid::nil()),
        };
        let statement = || {
            let mut statement = query(self.0.sql.stale.clone());
            for _ in 0..2 {
                statement = statement.bind(unset.is_some()).bind(unset.unwrap_or_default()).bind(one_more(limit));
            }
            for _ in 0..2 {
                statement = statement.bind(self.0.offset()).bind(lease).bind(lease).bind(id).bind(one_more(limit));
            }
            statement.bind(one_more(limit))
        };
        let rows = self.0.read("stale", statement).await?;
        Ok(page(&rows, limit, row::stale_cursor, row::execution))
    }

    async fn claimed_by(
        &self,
        worker: &WorkerId,
        older_than: Delay,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Execution, JobId>> {
        let Some(first) = following(after) else { return Ok(page(&[], limit, row::id, row::execution)) };
        let statement = || {
            let mut statement = query(self.0.sql.claimed_by.clone());
            for _ in 0..2 {
                let worker = worker.as_str().as_bytes();
                statement = statement.bind(worker).bind(first).bind(self.0.offset()).bind(older_than.as_millis());
                statement = statement.bind(one_more(limit));
            }
            statement.bind(one_more(limit))
        };
        let rows = self.0.read("claimed_by", statement).await?;
        Ok(page(&rows, limit, row::id, row::execution))
    }

    async fn update_many_if_current(&self, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        let handle = &*self.0;
        check_updates(updates, &self.capabilities())?;
        if updates.is_empty() {
            return Ok(Vec::new());
        }
        let mut repeats = Repeats::default();
        loop {
            let mut transaction = handle.begin("update", Deadline::NEVER).await?;
            let answer = self.update_chunks(transaction.connection(), updates).await;
            if let Some(answers) = transaction.end("update", answer, &mut repeats).await? {
                handle.signal.notify_of(updates, &answers);
                return Ok(answers);
            }
        }
    }

    async fn wait_for_work(&self, _queues: &[Name]) -> Result<()> {
        self.0.signal.wait().await;
        Ok(())
    }

    fn durable_steps(&self) -> Option<&dyn DurableSteps> {
        Some(self)
    }
}

impl MysqlBackend {
    async fn update_chunks(
        &self,
        connection: &mut MySqlConnection,
        updates: &[UpdateRequest],
    ) -> Result<End<Vec<Update>>, Failure> {
        let mut answers = Vec::with_capacity(updates.len());
        let mut wrote = false;
        for chunk in chunks(updates) {
            let (updates, inserted) = self.0.update(connection, chunk).await?;
            answers.extend(updates);
            wrote |= inserted.is_some();
        }
        Ok(if wrote { End::Commit(answers) } else { End::RollBack(answers) })
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Inspect for MysqlBackend {
    async fn list(&self, filter: &ListFilter, after: Option<JobId>, limit: Limit) -> Result<Page<Job, JobId>> {
        let Some(first) = following(after) else { return Ok(page(&[], limit, row::id, row::job)) };
        let statement = || {
            let queue = filter.queue.as_ref().map(|queue| queue.as_str().as_bytes());
            let kind = filter.kind.as_ref().map(|kind| kind.as_str().as_bytes());
            let state = filter.state.map(|state| state.as_str().as_bytes());
            query(self.0.sql.list.clone())
                .bind(first)
                .bind(queue)
                .bind(queue)
                .bind(kind)
                .bind(kind)
                .bind(state)
                .bind(state)
                .bind(one_more(limit))
        };
        let rows = self.0.read("list", statement).await?;
        Ok(page(&rows, limit, row::id, row::job))
    }

    async fn counts(&self) -> Result<Vec<Count>> {
        let rows = self.0.read("counts", || query(self.0.sql.counts.clone())).await?;
        Ok(Count::collect(rows.iter().map(row::count)))
    }

    async fn purge(&self, state: JobState, older_than: Delay, limit: Limit) -> Result<u64> {
        check_purge(state)?;
        let handle = &*self.0;
        let mut repeats = Repeats::default();
        loop {
            let mut transaction = handle.begin("purge", Deadline::NEVER).await?;
            let answer = handle.purge(transaction.connection(), state, older_than, limit).await;
            if let Some(purged) = transaction.end("purge", answer, &mut repeats).await? {
                return Ok(purged);
            }
        }
    }
}

/// On a connection of the application, in its transaction, of which these calls begin, commit and roll back nothing.
///
/// At READ COMMITTED a duplicate is an outcome, and a row that somebody else has locked is waited for as long as the
/// session's `innodb_lock_wait_timeout` says. After any error roll back before anything else is run: after a deadlock the
/// server has rolled the whole transaction back by itself, and what follows would be committed statement by statement.
/// Then, and where a stricter isolation level meets another's write ([`ErrorKind::Transient`]), the whole transaction is to be
/// repeated.
///
/// Workers learn of jobs enqueued like this when they poll, since nobody here sees the commit.
#[async_trait]
impl Transactional for MysqlBackend {
    type Connection = MySqlConnection;
    type Transaction = MysqlTransaction;

    async fn begin(&self) -> Result<MysqlTransaction> {
        self.0.begin("begin", Deadline::NEVER).await
    }

    async fn commit(&self, transaction: MysqlTransaction) -> Result<()> {
        transaction.commit().await?;
        self.0.signal.notify();
        Ok(())
    }

    async fn enqueue_in(&self, connection: &mut MySqlConnection, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        /// How often somebody else may be faster with one of the ids or keys, and gone again.
        const REPEATS: u32 = 20;
        check_new_jobs(jobs, &self.capabilities())?;
        for repeat in 0.. {
            // Again: by what is there at this moment, whatever the transaction's snapshot shows.
            let known = if repeat > 0 { &self.0.sql.known_now } else { &self.0.sql.known };
            match self.0.enqueue(connection, jobs, Some(known)).await {
                // That statement alone is undone. What it met is committed, so it is seen by looking again.
                Err(Failure::Driver(error)) if is_taken(&error) && repeat < REPEATS => {}
                answer => return answer.map_err(|failure| failure.told("enqueue")),
            }
        }
        Ok(Vec::new())
    }

    async fn update_if_current_in(
        &self,
        connection: &mut MySqlConnection,
        id: JobId,
        current: &Fingerprint,
        patch: &Patch,
    ) -> Result<Update> {
        patch.check(&self.capabilities())?;
        let updates = [UpdateRequest { id, current: current.clone(), patch: patch.clone() }];
        let answer = self.0.update(connection, &updates).await;
        let (answers, inserted) = answer.map_err(|failure| failure.told("update"))?;
        if let Some(inserted) = inserted {
            let restored = self.0.restore_inserted(connection, inserted).await;
            restored.map_err(|error| failed("update", error))?;
        }
        Ok(answers.into_iter().next().unwrap_or(Update::Missing))
    }
}

/// Rows of which one more than fit was asked for, to tell whether another page follows.
fn page<T, C>(
    rows: &[MySqlRow],
    limit: Limit,
    cursor: impl Fn(&MySqlRow) -> C,
    read: impl Fn(&MySqlRow) -> Result<T, Unreadable>,
) -> Page<T, C> {
    Page::collect(rows.iter().map(|row| (cursor(row), read(row))), limit)
}
