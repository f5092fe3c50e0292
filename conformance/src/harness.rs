//! What the author of a backend writes: how to get a store, and how to reach behind the contract.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use queue_core::Capabilities;
use queue_core::Delay;
use queue_core::Enqueued;
use queue_core::Execution;
use queue_core::Fingerprint;
use queue_core::Inspect;
use queue_core::JobId;
use queue_core::LazyBackend;
use queue_core::NewJob;
use queue_core::Patch;
use queue_core::Transactional;
use queue_core::Update;

/// Whatever goes wrong in a harness; it fails the case with this text.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// A kind of store to test.
///
/// ```
/// # use queue_conformance::{MemoryHarness, Suite};
/// // In tests/conformance.rs, with `harness = false` for that test in Cargo.toml:
/// fn main() -> std::process::ExitCode {
/// #   if true { return std::process::ExitCode::SUCCESS }
///     Suite::new().harness(MemoryHarness).run()
/// }
/// ```
#[async_trait]
pub trait Harness: Send + Sync + 'static {
    /// The name before every case of this harness, such as `sqlite`.
    fn name(&self) -> String;

    /// What the backend declares; every handle must say the same.
    fn capabilities(&self) -> Capabilities;

    /// The hooks that the stores of this harness offer. A case that needs one which is missing is listed as ignored, with that reason.
    fn hooks(&self) -> &'static [Hook];

    /// What is tested, for the report: a server and its version.
    async fn describe(&self) -> Result<String, BoxError> {
        Ok(self.name())
    }

    /// Makes a fresh store, empty and isolated from all others, with its schema: a database, a schema, a file.
    async fn provision(&self, scope: &Scope) -> Result<Arc<dyn Store>, BoxError>;
}

/// What makes a store's name unique.
#[derive(Clone, Debug)]
pub struct Scope {
    pub(crate) name: String,
}

impl Scope {
    /// At most 32 bytes of lower-case ASCII letters, digits and underscores, beginning with the time of the run, so
    /// that what an aborted run leaves behind sorts by age.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// One isolated store.
#[async_trait]
pub trait Store: Send + Sync {
    /// Another handle on this store, independent of the others as one in another process would be: races between handles are
    /// what finds bugs.
    async fn connect(&self) -> Result<Arc<dyn Inspect>, BoxError>;

    /// Deletes the store, after a case that passed; after a failure it is kept and named.
    async fn discard(&self) -> Result<(), BoxError>;

    /// [`Hook::Clock`]: moves the clock of the store, for all its handles in this process, open or to come.
    async fn advance(&self, delay: Delay) -> Result<(), BoxError> {
        let _ = delay;
        Err("this harness has no clock hook".into())
    }

    /// [`Hook::Overwrite`]: sets the columns of a row that make up its [`Execution`] to exactly this, and no others, without any
    /// check, as a careless operator would.
    async fn overwrite(&self, row: &Execution) -> Result<(), BoxError> {
        let _ = row;
        Err("this harness has no overwrite hook".into())
    }

    /// [`Hook::Damage`]: breaks a row.
    async fn damage(&self, id: JobId, damage: Damage) -> Result<(), BoxError> {
        let _ = (id, damage);
        Err("this harness has no damage hook".into())
    }

    /// [`Hook::Hold`]: opens a transaction of its own that has set the lifecycle columns of a row to this, and holds it
    /// open, so that the row (or, where there are no row locks, the store) is locked. It must write the row, also where that
    /// changes no value: a row that was only read is not locked on every store.
    async fn hold(&self, row: &Execution) -> Result<Box<dyn Hold>, BoxError> {
        let _ = row;
        Err("this harness has no hold hook".into())
    }

    /// [`Hook::Transaction`]: begins a transaction as an application would; or, if it is to settle an execution, by
    /// [`Transactional::begin_for`].
    async fn begin(&self, settles: Option<&Execution>) -> Result<Box<dyn CallerTransaction>, BoxError> {
        let _ = settles;
        Err("this harness has no transaction hook".into())
    }
}

/// What only a store's owner can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Hook {
    /// [`Store::advance`].
    Clock,
    /// [`Store::overwrite`].
    Overwrite,
    /// [`Store::damage`].
    Damage,
    /// [`Store::hold`].
    Hold,
    /// [`Store::begin`]: for backends that are [`Transactional`](queue_core::Transactional).
    Transaction,
}

/// How a row is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Damage {
    /// A state that this version does not know.
    ForeignState,
    /// Data that cannot be read, in a column that is none of the lifecycle's.
    BrokenData,
    /// Every update of the row fails in the store, as by a violated constraint; reading it works.
    Poison,
}

/// A row, locked in an open transaction.
#[async_trait]
pub trait Hold: Send {
    /// Ends the transaction, so that its change is there.
    async fn commit(self: Box<Self>) -> Result<(), BoxError>;

    /// Ends the transaction, so that its change never was.
    async fn roll_back(self: Box<Self>) -> Result<(), BoxError>;
}

/// The application's own transaction, with the backend's calls in it.
#[async_trait]
pub trait CallerTransaction: Send {
    /// [`Transactional::enqueue_in`](queue_core::Transactional::enqueue_in).
    async fn enqueue(&mut self, jobs: &[NewJob]) -> queue_core::Result<Vec<Enqueued>>;

    /// [`Transactional::update_if_current_in`](queue_core::Transactional::update_if_current_in).
    async fn update(&mut self, id: JobId, current: &Fingerprint, patch: &Patch) -> queue_core::Result<Update>;

    /// Commits it.
    async fn commit(self: Box<Self>) -> Result<(), BoxError>;

    /// Rolls it back.
    async fn roll_back(self: Box<Self>) -> Result<(), BoxError>;
}

/// A transaction that the backend itself begins and commits, for [`Store::begin`]: the cases of the group `transaction` check
/// [`Transactional::begin`] and [`Transactional::commit`] then. A harness that has the application's own transactions too offers those in
/// another variant.
pub struct OwnTransaction<B: Transactional> {
    backend: B,
    transaction: B::Transaction,
}

impl<B: Transactional + 'static> OwnTransaction<B> {
    /// Begins one, which may be for settling an execution.
    ///
    /// # Errors
    ///
    /// Whatever the backend says.
    pub async fn begin(backend: B, settles: Option<&Execution>) -> Result<Box<dyn CallerTransaction>, BoxError> {
        let transaction = match settles {
            Some(execution) => backend.begin_for(execution).await?,
            None => backend.begin().await?,
        };
        Ok(Box::new(Self { backend, transaction }))
    }
}

impl<B: Transactional> fmt::Debug for OwnTransaction<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnTransaction").finish_non_exhaustive()
    }
}

#[async_trait]
impl<B: Transactional> CallerTransaction for OwnTransaction<B> {
    async fn enqueue(&mut self, jobs: &[NewJob]) -> queue_core::Result<Vec<Enqueued>> {
        self.backend.enqueue_in(&mut self.transaction, jobs).await
    }

    async fn update(&mut self, id: JobId, current: &Fingerprint, patch: &Patch) -> queue_core::Result<Update> {
        self.backend.update_if_current_in(&mut self.transaction, id, current, patch).await
    }

    async fn commit(self: Box<Self>) -> Result<(), BoxError> {
        Ok(self.backend.commit(self.transaction).await?)
    }

    async fn roll_back(self: Box<Self>) -> Result<(), BoxError> {
        drop(self.transaction);
        Ok(())
    }
}

/// The stores of another harness, every handle behind a [`LazyBackend`]: proves that it passes every call on.
#[derive(Debug)]
pub struct Lazily<H>(pub H);

#[async_trait]
impl<H: Harness> Harness for Lazily<H> {
    fn name(&self) -> String {
        format!("{}-lazy", self.0.name())
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn hooks(&self) -> &'static [Hook] {
        self.0.hooks()
    }

    async fn describe(&self) -> Result<String, BoxError> {
        Ok(format!("{}, through LazyBackend", self.0.describe().await?))
    }

    async fn provision(&self, scope: &Scope) -> Result<Arc<dyn Store>, BoxError> {
        let store = self.0.provision(scope).await?;
        Ok(Arc::new(LazyStore { store, capabilities: self.capabilities() }))
    }
}

struct LazyStore {
    store: Arc<dyn Store>,
    capabilities: Capabilities,
}

impl fmt::Debug for LazyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LazyStore").finish_non_exhaustive()
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Store for LazyStore {
    async fn connect(&self) -> Result<Arc<dyn Inspect>, BoxError> {
        let store = Arc::clone(&self.store);
        Ok(Arc::new(LazyBackend::new(self.capabilities, move || {
            let store = Arc::clone(&store);
            async move {
                let unavailable = |error: BoxError| {
                    let kind = queue_core::ErrorKind::Unavailable;
                    queue_core::Error::not_applied(kind, "connecting failed").with_source(error)
                };
                store.connect().await.map_err(unavailable)
            }
        })))
    }

    async fn discard(&self) -> Result<(), BoxError> {
        self.store.discard().await
    }

    async fn advance(&self, delay: Delay) -> Result<(), BoxError> {
        self.store.advance(delay).await
    }

    async fn overwrite(&self, row: &Execution) -> Result<(), BoxError> {
        self.store.overwrite(row).await
    }

    async fn damage(&self, id: JobId, damage: Damage) -> Result<(), BoxError> {
        self.store.damage(id, damage).await
    }

    async fn hold(&self, row: &Execution) -> Result<Box<dyn Hold>, BoxError> {
        self.store.hold(row).await
    }

    async fn begin(&self, settles: Option<&Execution>) -> Result<Box<dyn CallerTransaction>, BoxError> {
        self.store.begin(settles).await
    }
}
