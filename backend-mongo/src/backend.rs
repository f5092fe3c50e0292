//! The backend: which command answers which call.

use std::fmt;
use std::ops::Deref;
use std::ops::DerefMut;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering;

use async_trait::async_trait;
use mongodb::Client;
use mongodb::ClientSession;
use mongodb::bson::Document;
use queue_core::*;
use tokio::sync::Mutex;

use crate::config::MongoOptions;
use crate::config::checked_database;
use crate::error::Writes;
use crate::handle::Handle;
use crate::ops::Ops;
use crate::row;
use crate::setup;
use crate::wake::Watch;

/// Jobs in a MongoDB database. Clones are one handle.
///
/// Connecting does not create the collections, [`migrate`](Backend::migrate) does. It is refused, with an error of kind
/// [`ErrorKind::Unsupported`], by a standalone server and by one older than 5.0; and with one of kind
/// [`ErrorKind::Schema`], if the database has a schema that does not admit this program any more.
#[derive(Clone, Debug)]
pub struct MongoBackend(pub(crate) Arc<Handle>);

impl MongoBackend {
    /// Connects to the database of this URL: see [`MongoOptions::from_url`].
    ///
    /// # Errors
    ///
    /// A malformed URL, a server that cannot be reached or does not suit, or a schema that does not admit this program.
    pub async fn connect(url: &str) -> Result<Self> {
        Self::connect_with(MongoOptions::from_url(url)?).await
    }

    /// Connects as the options say.
    ///
    /// # Errors
    ///
    /// Options without a URL or a database, a server that cannot be reached or does not suit, or a schema that does not
    /// admit this program.
    pub async fn connect_with(options: MongoOptions) -> Result<Self> {
        let (client, database) = options.client().await?;
        let client =
            Client::with_options(client).map_err(|error| crate::error::failed("connecting", Writes::Nothing, error))?;
        Self::admitted(client, &database, options, true).await
    }

    /// Works through the application's own client, in this database, with every default.
    ///
    /// The client's write concern, read concern, read preference and retries do not matter: every command says for itself
    /// that it waits for a majority and goes to the primary.
    ///
    /// # Errors
    ///
    /// A server that cannot be reached or does not suit, or a schema that does not admit this program.
    pub async fn from_client(client: Client, database: &str) -> Result<Self> {
        Self::from_client_with(client, database, MongoOptions::default()).await
    }

    /// Works through the application's own client. What the options say of the URL and of connections is the client's.
    ///
    /// # Errors
    ///
    /// A server that cannot be reached or does not suit, or a schema that does not admit this program.
    pub async fn from_client_with(client: Client, database: &str, options: MongoOptions) -> Result<Self> {
        let database = checked_database(database.to_owned())?;
        Self::admitted(client, &database, options, false).await
    }

    async fn admitted(client: Client, database: &str, options: MongoOptions, is_own: bool) -> Result<Self> {
        let MongoOptions { prefix, max_payload, skip_locked_after, lock_timeout, change_streams, clock, .. } = options;
        let handle = Handle {
            database: client.database(database),
            client,
            ops: Ops::new(&prefix),
            prefix,
            max_payload,
            skip_locked_after,
            lock_timeout,
            clock,
            signal: WorkSignal::default(),
            watch: Watch::new(change_streams.unwrap_or(is_own)),
            turns: std::array::from_fn(|_| Mutex::default()),
            schema: AtomicI64::new(0),
            #[cfg(test)]
            broken: None,
        };
        setup::check_server(&handle).await?;
        let schema = setup::admitted(&handle).await?;
        handle.schema.store(schema.version, Ordering::Relaxed);
        Ok(Self(Arc::new(handle)))
    }

    /// The client, to begin sessions with for [`Transactional`]: a session of another client is refused.
    pub fn client(&self) -> &Client {
        &self.0.client
    }

    /// Shuts the client down, also an application's, and does not wait for its sessions. A handle that is dropped leaves
    /// that to the client.
    pub async fn close(&self) {
        self.0.watch.stop();
        self.0.client.clone().shutdown().immediate(true).await;
    }

    /// The handle, for tests that break a command of it.
    #[cfg(test)]
    pub(crate) fn handle(&mut self) -> Option<&mut Handle> {
        Arc::get_mut(&mut self.0)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Backend for MongoBackend {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.max_payload = self.0.max_payload;
        capabilities.skips_locked_rows = true;
        capabilities.wakes = true;
        capabilities.durable_steps = true;
        capabilities
    }

    async fn migrate(&self) -> Result<()> {
        let version = setup::migrate(&self.0).await?;
        self.0.schema.store(version, Ordering::Relaxed);
        Ok(())
    }

    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        check_new_jobs(jobs, &self.capabilities())?;
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        let outcomes = self.0.enqueue(None, jobs).await?;
        self.0.signal.notify();
        Ok(outcomes)
    }

    async fn get(&self, id: JobId) -> Result<Option<Job>> {
        self.0.ready("get").await?;
        let rows = self.0.read("get", self.0.ops.get([id]), None).await?;
        Ok(rows.first().map(row::job).transpose()?)
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed> {
        self.0.ready("claim").await?;
        self.0.claim(request).await
    }

    async fn update_if_current(&self, id: JobId, current: &Fingerprint, patch: &Patch) -> Result<Update> {
        let update = UpdateRequest { id, current: current.clone(), patch: patch.clone() };
        let answers = self.update_many_if_current(&[update]).await?;
        Ok(answers.into_iter().next().unwrap_or(Update::Missing))
    }

    async fn extend_leases(&self, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        self.0.ready("extend").await?;
        if held.is_empty() {
            return Ok(Vec::new());
        }
        self.0.extend(held, lease).await
    }

    async fn stale(&self, after: Option<StaleCursor>, limit: Limit) -> Result<Page<Execution, StaleCursor>> {
        self.0.ready("stale").await?;
        let rows = self.0.read_all("stale", self.0.ops.stale(after, self.0.offset(), limit), None).await?;
        Ok(page(rows, limit, row::stale_cursor, row::execution))
    }

    async fn claimed_by(
        &self,
        worker: &WorkerId,
        older_than: Delay,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Execution, JobId>> {
        self.0.ready("claimed_by").await?;
        let finds = self.0.ops.claimed_by(worker, older_than, after, self.0.offset(), limit);
        let rows = self.0.read_all("claimed_by", finds, None).await?;
        Ok(page(rows, limit, row::id, row::execution))
    }

    async fn update_many_if_current(&self, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        let handle = &*self.0;
        handle.ready("update").await?;
        check_updates(updates, &self.capabilities())?;
        let mut answers = Vec::with_capacity(updates.len());
        for chunk in chunks(updates) {
            let answer = handle.update(chunk, handle.deadline(chunk.len())).await;
            answers.extend(answer.map_err(|error| match error.index() {
                Some(index) => error.at_index(answers.len() + index),
                None => error,
            })?);
        }
        handle.signal.notify_of(updates, &answers);
        Ok(answers)
    }

    async fn wait_for_work(&self, _queues: &[Name]) -> Result<()> {
        self.0.watch.start(&self.0.database, &self.0.ops.jobs, &self.0.signal);
        self.0.signal.wait().await;
        Ok(())
    }

    fn durable_steps(&self) -> Option<&dyn DurableSteps> {
        Some(self)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Inspect for MongoBackend {
    async fn list(&self, filter: &ListFilter, after: Option<JobId>, limit: Limit) -> Result<Page<Job, JobId>> {
        self.0.ready("list").await?;
        let rows = self.0.read("list", self.0.ops.list(filter, after, limit), None).await?;
        Ok(page(rows, limit, row::id, row::job))
    }

    async fn counts(&self) -> Result<Vec<Count>> {
        self.0.ready("counts").await?;
        let rows = self.0.read("counts", self.0.ops.counts(), None).await?;
        Ok(Count::collect(rows.iter().map(row::count)))
    }

    async fn purge(&self, state: JobState, older_than: Delay, limit: Limit) -> Result<u64> {
        check_purge(state)?;
        let handle = &*self.0;
        handle.ready("purge").await?;
        let find = handle.ops.purgeable(state, older_than, handle.offset(), limit);
        let ids: Vec<_> = handle.read("purge", find, None).await?.iter().map(row::id).collect();
        handle.delete(&ids, |ids| handle.ops.purge(ids, state, older_than, handle.offset())).await
    }
}

/// In a session of the application, begun with [`MongoBackend::client`], in its transaction, of which these calls begin,
/// commit and abort nothing. Its write concern should be `majority`.
///
/// In MongoDB any error ends the transaction; it cannot do anything then but be aborted. A duplicate that can be seen is an outcome all the same, since it is looked for
/// before anything is written; one that arises in a race, like every other meeting with somebody else's write, is
/// [`ErrorKind::Transient`]: the whole transaction is to be repeated. A transaction sees the rows as they were when it first
/// read; a row that somebody has written since is such a meeting.
#[async_trait]
impl Transactional for MongoBackend {
    type Connection = ClientSession;
    type Transaction = MongoTransaction;

    async fn begin(&self) -> Result<MongoTransaction> {
        Ok(MongoTransaction(self.0.begin().await?))
    }

    async fn begin_for(&self, execution: &Execution) -> Result<MongoTransaction> {
        Ok(MongoTransaction(self.0.begin_for(execution).await?))
    }

    async fn commit(&self, transaction: MongoTransaction) -> Result<()> {
        self.0.commit(transaction.0).await?;
        self.0.signal.notify();
        Ok(())
    }

    async fn enqueue_in(&self, connection: &mut ClientSession, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        check_new_jobs(jobs, &self.capabilities())?;
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        self.0.enqueue(Some(connection), jobs).await
    }

    async fn update_if_current_in(
        &self,
        connection: &mut ClientSession,
        id: JobId,
        current: &Fingerprint,
        patch: &Patch,
    ) -> Result<Update> {
        self.0.ready("update").await?;
        patch.check(&self.capabilities())?;
        let update = UpdateRequest { id, current: current.clone(), patch: patch.clone() };
        self.0.update_one(&update, Some(connection), self.0.deadline(1)).await
    }
}

/// A session with a transaction in it; see [`Transactional::begin`]. The driver aborts the transaction in the background if it is
/// dropped.
pub struct MongoTransaction(ClientSession);

impl fmt::Debug for MongoTransaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MongoTransaction").finish_non_exhaustive()
    }
}

impl Deref for MongoTransaction {
    type Target = ClientSession;

    fn deref(&self) -> &ClientSession {
        &self.0
    }
}

impl DerefMut for MongoTransaction {
    fn deref_mut(&mut self) -> &mut ClientSession {
        &mut self.0
    }
}

/// Rows of which one more than fit was asked for, of each find, to tell whether another page follows.
fn page<T, C: Copy + Ord>(
    rows: Vec<Document>,
    limit: Limit,
    cursor: impl Fn(&Document) -> C,
    read: impl Fn(&Document) -> Result<T, Unreadable>,
) -> Page<T, C> {
    let mut rows: Vec<_> = rows.iter().map(|row| (cursor(row), read(row))).collect();
    rows.sort_by_key(|(cursor, _)| *cursor);
    Page::collect(rows, limit)
}
