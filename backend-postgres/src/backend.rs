//! The backend: which statement answers which call, and on which connection.

use std::collections::HashMap;
use std::ops::Deref;
use std::ops::DerefMut;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use queue_core::Certainty::Unknown;
use queue_core::*;
use sqlx::PgConnection;
use sqlx::PgPool;
use sqlx::postgres::PgRow;
use sqlx::query;

use crate::config::PostgresOptions;
use crate::handle::Handle;
use crate::handle::Lent;
use crate::handle::Session;
use crate::listener::Listener;
use crate::row;
use crate::row::Instant;
use crate::setup;
use crate::sql::Sql;
use crate::sql::channel;

/// Jobs in a PostgreSQL database. Clones are one handle.
///
/// Connecting does not create the tables, [`migrate`](Backend::migrate) does. It is refused, with an error of kind
/// [`ErrorKind::Schema`], if the database has a schema that does not admit this program any more.
#[derive(Clone, Debug)]
pub struct PostgresBackend(pub(crate) Arc<Handle>);

impl PostgresBackend {
    /// Connects to the database of this URL: see [`PostgresOptions::from_url`].
    ///
    /// # Errors
    ///
    /// A malformed URL, a server that cannot be reached, or a schema that does not admit this program.
    pub async fn connect(url: &str) -> Result<Self> {
        Self::connect_with(PostgresOptions::from_url(url)?).await
    }

    /// Connects as the options say.
    ///
    /// # Errors
    ///
    /// A server that cannot be reached, or a schema that does not admit this program.
    pub async fn connect_with(options: PostgresOptions) -> Result<Self> {
        let pool = setup::open(&options).await?;
        Self::admitted(pool, options, true).await
    }

    /// Works in the application's own pool, with every default.
    ///
    /// The pool's settings stay the application's, its isolation level among them: where it is stricter than READ COMMITTED,
    /// every call is a transaction of its own at READ COMMITTED, in three round trips. Where it sets no `lock_timeout`, writes wait
    /// for a row for ten seconds. It may have one connection only: what listens for work is another, made with the pool's options.
    ///
    /// # Errors
    ///
    /// A pool that gives no connection, or a schema that does not admit this program.
    pub async fn from_pool(pool: PgPool) -> Result<Self> {
        Self::from_pool_with(pool, PostgresOptions::default()).await
    }

    /// Works in the application's own pool, with the schema, the cap, the clock, [`notifications`](PostgresOptions::notifications)
    /// and [`transaction_pooler`](PostgresOptions::transaction_pooler) of these options. Whatever else they say is about
    /// connections, and those are the pool's.
    ///
    /// # Errors
    ///
    /// A pool that gives no connection, or a schema that does not admit this program.
    pub async fn from_pool_with(pool: PgPool, options: PostgresOptions) -> Result<Self> {
        Self::admitted(pool, options, false).await
    }

    async fn admitted(pool: PgPool, options: PostgresOptions, own: bool) -> Result<Self> {
        let PostgresOptions { schema, max_payload, notifications, transaction_pooler, clock, .. } = options;
        let signal = WorkSignal::default();
        // A pooler forgets who listens.
        let listener = (notifications && !transaction_pooler)
            .then(|| Listener::new(pool.clone(), channel(&schema), signal.clone()));
        let mut handle = Handle {
            pool,
            explicit: transaction_pooler,
            persistent: !transaction_pooler,
            notifies: notifications,
            listener,
            sql: Sql::new(&schema),
            schema,
            max_payload,
            clock,
            signal,
        };
        handle.explicit |= !setup::reads_committed(&handle).await? && !own;
        setup::present(&handle).await?;
        Ok(Self(Arc::new(handle)))
    }

    /// The text of every statement by name, as it is run: for `EXPLAIN`, and for reviews.
    pub fn statements(&self) -> Vec<(&'static str, &str)> {
        self.0.sql.all()
    }

    /// Closes the pool, also an application's, when calls in flight have ended. A handle that is dropped closes its own
    /// connections in the background.
    pub async fn close(&self) {
        if let Some(listener) = &self.0.listener {
            listener.stop();
        }
        self.0.pool.close().await;
    }
}

/// A third of the lease: waiting longer would leave too little of it.
fn third(lease: Lease) -> Option<Duration> {
    Some(lease.duration() / 3)
}

fn one_more(limit: Limit) -> i64 {
    i64::from(limit.get()) + 1
}

fn uuid(id: Option<JobId>) -> Option<uuid::Uuid> {
    id.map(|id| id.as_uuid())
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Backend for PostgresBackend {
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
        setup::migrate(&self.0).await
    }

    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let handle = &*self.0;
        check_new_jobs(jobs, &self.capabilities())?;
        let mut lent = match jobs {
            [] => return Ok(Vec::new()),
            [_] => handle.lend("enqueue", None).await?,
            _ => handle.begin("enqueue").await?,
        };
        let outcomes = handle.enqueue(&mut lent.session(Unknown), jobs).await;
        let outcomes = lent.end("enqueue", Unknown, outcomes).await?;
        handle.signal.notify();
        Ok(outcomes)
    }

    async fn get(&self, id: JobId) -> Result<Option<Job>> {
        let rows = self.0.read("get", query(self.0.sql.get.clone()).bind(id.as_uuid())).await?;
        Ok(rows.first().map(row::job).transpose()?)
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed> {
        let handle = &*self.0;
        let statement = query(handle.sql.claim.clone())
            .bind(handle.now())
            .bind(request.queue().as_str())
            .bind(request.kinds().iter().map(Name::as_str).collect::<Vec<_>>())
            .bind(i64::from(request.limit().get()))
            .bind(request.starts())
            .bind(Revision::random().as_uuid())
            .bind(request.worker().as_str())
            .bind(request.lease().as_millis());
        let rows = handle.write("claim", third(request.lease()), statement).await?;
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
        let statement = query(handle.sql.extend.clone()).bind(handle.now()).bind(lease.as_millis());
        let rows = handle.write("extend", third(lease), row::bind_held(statement, held)).await?;
        let found: Vec<_> = rows.iter().filter_map(row::extended).collect();
        let found: HashMap<_, _> = found.iter().map(|(held, extended)| (held.id, (held, *extended))).collect();
        Ok(held
            .iter()
            .map(|held| match found.get(&held.id) {
                Some((there, true)) if *there == held => Beat::Extended,
                Some((there, false)) if *there == held => Beat::Busy,
                _ => Beat::Lost,
            })
            .collect())
    }

    async fn stale(&self, after: Option<StaleCursor>, limit: Limit) -> Result<Page<Execution, StaleCursor>> {
        let statement = query(self.0.sql.stale.clone())
            .bind(self.0.now())
            .bind(after.and_then(|after| after.lease_expires_at).map(Instant::from))
            .bind(uuid(after.map(|after| after.id)))
            .bind(one_more(limit));
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
        let statement = query(self.0.sql.claimed_by.clone())
            .bind(self.0.now())
            .bind(worker.as_str())
            .bind(uuid(after))
            .bind(older_than.as_millis())
            .bind(one_more(limit));
        let rows = self.0.read("claimed_by", statement).await?;
        Ok(page(&rows, limit, row::id, row::execution))
    }

    async fn update_many_if_current(&self, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        let handle = &*self.0;
        check_updates(updates, &self.capabilities())?;
        if updates.is_empty() {
            return Ok(Vec::new());
        }
        // Over several statements too rows are locked in the order of their ids, of one row as the call has them.
        let mut order: Vec<_> = (0..updates.len()).collect();
        order.sort_by_key(|index| updates[*index].id);
        let sorted: Vec<_> = order.iter().map(|index| &updates[*index]).collect();
        let chunks = chunks(&sorted);
        let mut lent = match chunks[..] {
            [_] => handle.lend("update", None).await?,
            _ => handle.begin("update").await?,
        };
        let mut session = lent.session(Unknown);
        let mut answers = Ok(Vec::with_capacity(updates.len()));
        for chunk in chunks {
            match (handle.update(&mut session, chunk).await, &mut answers) {
                (Ok(more), Ok(answers)) => answers.extend(more),
                (more, _) => {
                    answers = more;
                    break;
                }
            }
        }
        let answers = lent.end("update", Unknown, answers).await?;
        let mut answers: Vec<_> = order.into_iter().zip(answers).collect();
        answers.sort_by_key(|(index, _)| *index);
        let answers: Vec<_> = answers.into_iter().map(|(_, answer)| answer).collect();
        handle.signal.notify_of(updates, &answers);
        Ok(answers)
    }

    async fn wait_for_work(&self, _queues: &[Name]) -> Result<()> {
        if let Some(listener) = &self.0.listener {
            listener.start();
        }
        self.0.signal.wait().await;
        Ok(())
    }

    fn durable_steps(&self) -> Option<&dyn DurableSteps> {
        Some(self)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Inspect for PostgresBackend {
    async fn list(&self, filter: &ListFilter, after: Option<JobId>, limit: Limit) -> Result<Page<Job, JobId>> {
        let statement = query(self.0.sql.list.clone())
            .bind(uuid(after))
            .bind(filter.queue.as_ref().map(Name::as_str))
            .bind(filter.kind.as_ref().map(Name::as_str))
            .bind(filter.state.map(JobState::as_str))
            .bind(one_more(limit));
        let rows = self.0.read("list", statement).await?;
        Ok(page(&rows, limit, row::id, row::job))
    }

    async fn counts(&self) -> Result<Vec<Count>> {
        let mut lent = self.0.begin_counting("counts").await?;
        let rows = lent.session(Unknown).fetch("counts", query(self.0.sql.counts.clone())).await;
        let rows = lent.end("counts", Certainty::NotApplied, rows).await?;
        Ok(Count::collect(rows.iter().map(row::count)))
    }

    async fn purge(&self, state: JobState, older_than: Delay, limit: Limit) -> Result<u64> {
        check_purge(state)?;
        let statement = query(self.0.sql.purge.clone())
            .bind(self.0.now())
            .bind(state.as_str())
            .bind(older_than.as_millis())
            .bind(i64::from(limit.get()));
        let rows = self.0.write("purge", None, statement).await?;
        counted("purge", &rows, "jobs", Unknown)
    }
}

/// On a connection of the application, in its transaction, of which these calls begin, commit and roll back nothing, and change
/// no setting. They wait for a row as long as its `lock_timeout` says.
///
/// The transaction should be READ COMMITTED, PostgreSQL's default. In a stricter one, whatever somebody else has written since
/// it began makes the call fail as [`ErrorKind::Transient`], and the whole transaction is to be repeated; a job that was stored since
/// then is [`Update::Missing`]. After any error only a rollback is possible, and a commit would be answered as if it had been one.
///
/// Workers are woken when the transaction commits, those of other processes too.
#[async_trait]
impl Transactional for PostgresBackend {
    type Connection = PgConnection;
    type Transaction = PostgresTransaction;

    async fn begin(&self) -> Result<PostgresTransaction> {
        Ok(PostgresTransaction(self.0.begin_plainly("begin").await?))
    }

    async fn commit(&self, transaction: PostgresTransaction) -> Result<()> {
        let mut lent = transaction.0;
        // After an error that nobody heeded the server refuses this; the commit it would answer with a rollback, as if all were well.
        let usable = lent.session(Unknown).run("commit", "SELECT 1").await;
        lent.end("commit", Unknown, usable).await?;
        self.0.signal.notify();
        Ok(())
    }

    async fn enqueue_in(&self, connection: &mut PgConnection, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        check_new_jobs(jobs, &self.capabilities())?;
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        self.0.enqueue(&mut Session::of(connection, &self.0), jobs).await
    }

    async fn update_if_current_in(
        &self,
        connection: &mut PgConnection,
        id: JobId,
        current: &Fingerprint,
        patch: &Patch,
    ) -> Result<Update> {
        patch.check(&self.capabilities())?;
        let update = UpdateRequest { id, current: current.clone(), patch: patch.clone() };
        self.0.update_one(&mut Session::of(connection, &self.0), &update).await
    }
}

/// A transaction on a connection of the backend's pool; see [`Transactional::begin`]. Its connection is closed if it is dropped.
#[derive(Debug)]
pub struct PostgresTransaction(Lent);

impl Deref for PostgresTransaction {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        self.0.connection()
    }
}

impl DerefMut for PostgresTransaction {
    fn deref_mut(&mut self) -> &mut PgConnection {
        self.0.connection_mut()
    }
}

/// How many a statement says that it wrote.
pub(crate) fn counted(call: &str, rows: &[PgRow], column: &str, lost: Certainty) -> Result<u64> {
    let counted = rows.first().map_or(Ok(0), |row| row::number(row, column));
    counted.map_err(|reason| Error::new(ErrorKind::Schema, lost, format!("{call}: {reason}")))
}

/// Rows of which one more than fit was asked for, to tell whether another page follows.
fn page<T, C>(
    rows: &[PgRow],
    limit: Limit,
    cursor: impl Fn(&PgRow) -> C,
    read: impl Fn(&PgRow) -> Result<T, Unreadable>,
) -> Page<T, C> {
    Page::collect(rows.iter().map(|row| (cursor(row), read(row))), limit)
}
