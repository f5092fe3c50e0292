//! The wrapper that puts a fault between the suite and a store.

use std::collections::BTreeMap;
use std::fmt;
use std::future::pending;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicI64;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use queue_conformance::BoxError;
use queue_conformance::CallerTransaction;
use queue_conformance::Damage;
use queue_conformance::Harness;
use queue_conformance::Hold;
use queue_conformance::Hook;
use queue_conformance::MemoryHarness;
use queue_conformance::MemoryStore;
use queue_conformance::Scope;
use queue_conformance::Store;
use queue_core::*;

use crate::Fault;
use crate::fault::Wrong;

/// Another harness, every backend of which has this fault.
pub struct Broken {
    fault: Fault,
    /// `None` is the reference, whose rows some faults reach into.
    inner: Option<Arc<dyn Harness>>,
    stopped: Arc<AtomicBool>,
}

impl fmt::Debug for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Broken").field("fault", &self.fault).finish_non_exhaustive()
    }
}

impl Broken {
    /// Round the reference.
    pub fn memory(fault: Fault) -> Self {
        Self { fault, inner: None, stopped: Arc::default() }
    }

    /// Round the stores of this harness.
    pub fn around(fault: Fault, harness: Arc<dyn Harness>) -> Self {
        Self { inner: Some(harness), ..Self::memory(fault) }
    }

    /// Lets no call return any more, so that a case which repeats a call for ever comes to rest.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
    }

    fn inner(&self) -> &dyn Harness {
        self.inner.as_deref().unwrap_or(&MemoryHarness)
    }
}

#[async_trait]
impl Harness for Broken {
    fn name(&self) -> String {
        format!("{}, {}", self.inner().name(), self.fault.name)
    }

    fn capabilities(&self) -> Capabilities {
        self.inner().capabilities()
    }

    fn hooks(&self) -> &'static [Hook] {
        self.inner().hooks()
    }

    async fn provision(&self, scope: &Scope) -> Result<Arc<dyn Store>, BoxError> {
        let (store, memory): (Arc<dyn Store>, _) = match &self.inner {
            Some(harness) => (harness.provision(scope).await?, None),
            None => {
                let store = MemoryStore::new();
                let backend = store.backend().clone();
                (Arc::new(store), Some(backend))
            }
        };
        let (wrong, stopped) = (self.fault.wrong, Arc::clone(&self.stopped));
        Ok(Arc::new(BrokenStore { wrong, store, memory, shared: Arc::default(), stopped }))
    }
}

struct BrokenStore {
    wrong: &'static dyn Wrong,
    store: Arc<dyn Store>,
    memory: Option<MemoryBackend>,
    shared: Arc<Shared>,
    stopped: Arc<AtomicBool>,
}

/// What all handles of one store know.
#[derive(Default)]
pub(crate) struct Shared {
    /// By how many milliseconds the store's clock was moved.
    pub(crate) advanced: AtomicI64,
    /// How many transactions hold a row.
    pub(crate) holds: Arc<AtomicUsize>,
    /// How many calls are at work, where a fault counts them.
    pub(crate) busy: AtomicUsize,
    /// A lock that a fault takes.
    pub(crate) locked: AtomicBool,
    /// What a fault keeps of jobs.
    pub(crate) kept: Kept,
    /// Where pages ended, for a fault that counts rows.
    pub(crate) offsets: Mutex<BTreeMap<JobId, usize>>,
    /// How many handles are open.
    pub(crate) handles: AtomicUsize,
    /// Wakes whom a fault wakes.
    pub(crate) signal: WorkSignal,
    /// A connection that only one call can have.
    pub(crate) turn: tokio::sync::Mutex<()>,
    steps: Mutex<BTreeMap<JobId, Vec<Step>>>,
    payloads: Mutex<BTreeMap<Name, Json>>,
}

impl Shared {
    /// The steps that a fault keeps, by job.
    pub(crate) fn steps(&self) -> MutexGuard<'_, BTreeMap<JobId, Vec<Step>>> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The payloads that a fault keeps, by event.
    pub(crate) fn payloads(&self) -> MutexGuard<'_, BTreeMap<Name, Json>> {
        self.payloads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a call under a lock, which stays if the call is dropped.
    pub(crate) async fn locked_for<T>(&self, call: impl Future<Output = Result<T>> + Send) -> Result<T> {
        let mut tries = 0;
        while self.locked.swap(true, Ordering::SeqCst) {
            tries += 1;
            if tries == 1_000 {
                return Err(Error::not_applied(ErrorKind::Unavailable, "lock wait timeout exceeded"));
            }
            tokio::task::yield_now().await;
        }
        tokio::task::yield_now().await;
        let answer = call.await;
        self.locked.store(false, Ordering::SeqCst);
        answer
    }
}

/// What a fault keeps of jobs.
#[derive(Default)]
pub(crate) struct Kept(Mutex<BTreeMap<JobId, Job>>);

impl Kept {
    pub(crate) fn jobs(&self) -> MutexGuard<'_, BTreeMap<JobId, Job>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn keep<'a>(&self, jobs: impl IntoIterator<Item = &'a Job>) {
        self.jobs().extend(jobs.into_iter().map(|job| (job.id(), job.clone())));
    }
}

/// The right backend under a broken handle.
pub(crate) struct Real {
    pub(crate) handle: Arc<dyn Inspect>,
    pub(crate) store: Arc<dyn Store>,
    memory: Option<MemoryBackend>,
    pub(crate) shared: Arc<Shared>,
    /// What this handle alone keeps.
    pub(crate) kept: Kept,
    /// A lock of this handle alone.
    pub(crate) turn: tokio::sync::Mutex<()>,
}

/// Where another task may run in between: the gap of a fault that only a race shows.
pub(crate) async fn gap() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

impl Real {
    /// The reference, for faults that calls of the contract cannot express.
    pub(crate) fn memory(&self) -> &MemoryBackend {
        self.memory.as_ref().expect("a fault that is not marked `everywhere` runs round the reference alone")
    }

    pub(crate) fn edit(&self, id: JobId, edit: impl FnOnce(&mut MemoryRow)) {
        self.memory().edit(|rows| rows.get_mut(&id).map(edit));
    }

    pub(crate) fn steps(&self) -> Result<&dyn DurableSteps> {
        let missing = || Error::not_applied(ErrorKind::Unsupported, "the store has no durable steps");
        self.handle.durable_steps().ok_or_else(missing)
    }

    pub(crate) async fn update(&self, update: &UpdateRequest) -> Result<Update> {
        self.handle.update_if_current(update.id, &update.current, &update.patch).await
    }

    /// The lifecycle part of a row, if it is there and can be read.
    pub(crate) async fn row(&self, id: JobId) -> Option<Execution> {
        self.handle.get(id).await.ok().flatten().map(|job| job.execution)
    }

    /// Writes whatever is there now.
    pub(crate) async fn force(&self, id: JobId, patch: &Patch) -> Result<Update> {
        loop {
            let Some(row) = self.handle.get(id).await? else { return Ok(Update::Missing) };
            match self.handle.update_if_current(id, &row.execution.fingerprint(), patch).await? {
                Update::Conflict(_) => {}
                answer => return Ok(answer),
            }
        }
    }

    /// Overwrites the lifecycle part of a row.
    pub(crate) async fn set(&self, row: &Execution) -> Result<()> {
        let failed = |error: BoxError| Error::not_applied(ErrorKind::Permanent, error.to_string());
        self.store.overwrite(row).await.map_err(failed)
    }

    pub(crate) fn advanced(&self) -> i64 {
        self.shared.advanced.load(Ordering::SeqCst)
    }
}

impl BrokenStore {
    async fn real(&self) -> Result<Real, BoxError> {
        Ok(Real {
            handle: self.store.connect().await?,
            store: Arc::clone(&self.store),
            memory: self.memory.clone(),
            shared: Arc::clone(&self.shared),
            kept: Kept::default(),
            turn: tokio::sync::Mutex::default(),
        })
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Store for BrokenStore {
    async fn connect(&self) -> Result<Arc<dyn Inspect>, BoxError> {
        let (wrong, stopped, real) = (self.wrong, Arc::clone(&self.stopped), self.real().await?);
        wrong.connected(&real);
        self.shared.handles.fetch_add(1, Ordering::SeqCst);
        Ok(Arc::new(BrokenHandle { wrong, real, stopped }))
    }

    async fn discard(&self) -> Result<(), BoxError> {
        self.store.discard().await
    }

    async fn advance(&self, delay: Delay) -> Result<(), BoxError> {
        self.shared.advanced.fetch_add(delay.as_millis(), Ordering::SeqCst);
        self.store.advance(delay).await
    }

    async fn overwrite(&self, row: &Execution) -> Result<(), BoxError> {
        self.store.overwrite(row).await
    }

    async fn damage(&self, id: JobId, damage: Damage) -> Result<(), BoxError> {
        self.store.damage(id, damage).await
    }

    async fn hold(&self, row: &Execution) -> Result<Box<dyn Hold>, BoxError> {
        let hold = self.store.hold(row).await?;
        let holds = Arc::clone(&self.shared.holds);
        holds.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(CountedHold { hold, holds }))
    }

    async fn begin(&self, settles: Option<&Execution>) -> Result<Box<dyn CallerTransaction>, BoxError> {
        self.wrong.begin(Arc::new(self.real().await?), settles).await
    }
}

struct CountedHold {
    hold: Box<dyn Hold>,
    holds: Arc<AtomicUsize>,
}

#[async_trait]
impl Hold for CountedHold {
    async fn commit(self: Box<Self>) -> Result<(), BoxError> {
        let ended = self.hold.commit().await;
        self.holds.fetch_sub(1, Ordering::SeqCst);
        ended
    }

    async fn roll_back(self: Box<Self>) -> Result<(), BoxError> {
        let ended = self.hold.roll_back().await;
        self.holds.fetch_sub(1, Ordering::SeqCst);
        ended
    }
}

struct BrokenHandle {
    wrong: &'static dyn Wrong,
    real: Real,
    stopped: Arc<AtomicBool>,
}

impl Drop for BrokenHandle {
    fn drop(&mut self) {
        self.real.shared.handles.fetch_sub(1, Ordering::SeqCst);
    }
}

impl BrokenHandle {
    /// Before every call: a case that calls for ever is stopped, and lets others run until then.
    async fn at_work(&self) {
        tokio::task::consume_budget().await;
        if self.stopped.load(Ordering::SeqCst) {
            pending().await
        }
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Backend for BrokenHandle {
    fn capabilities(&self) -> Capabilities {
        self.wrong.capabilities(&self.real)
    }

    async fn migrate(&self) -> Result<()> {
        self.at_work().await;
        self.wrong.migrate(&self.real).await
    }

    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        self.at_work().await;
        self.wrong.enqueue(&self.real, jobs).await
    }

    async fn get(&self, id: JobId) -> Result<Option<Job>> {
        self.at_work().await;
        self.wrong.get(&self.real, id).await
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed> {
        self.at_work().await;
        self.wrong.claim(&self.real, request).await
    }

    async fn update_if_current(&self, id: JobId, current: &Fingerprint, patch: &Patch) -> Result<Update> {
        self.at_work().await;
        let update = UpdateRequest { id, current: current.clone(), patch: patch.clone() };
        self.wrong.update(&self.real, &update).await
    }

    async fn extend_leases(&self, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        self.at_work().await;
        self.wrong.extend_leases(&self.real, held, lease).await
    }

    async fn stale(&self, after: Option<StaleCursor>, limit: Limit) -> Result<Page<Execution, StaleCursor>> {
        self.at_work().await;
        self.wrong.stale(&self.real, after, limit).await
    }

    async fn claimed_by(
        &self,
        worker: &WorkerId,
        older_than: Delay,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Execution, JobId>> {
        self.at_work().await;
        self.wrong.claimed_by(&self.real, worker, older_than, after, limit).await
    }

    async fn update_many_if_current(&self, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        self.at_work().await;
        self.wrong.update_many(&self.real, updates).await
    }

    async fn wait_for_work(&self, queues: &[Name]) -> Result<()> {
        self.at_work().await;
        self.wrong.wait_for_work(&self.real, queues).await
    }

    fn durable_steps(&self) -> Option<&dyn DurableSteps> {
        self.real.handle.durable_steps().filter(|_| self.wrong.passes_steps_on()).map(|_| self as &dyn DurableSteps)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl DurableSteps for BrokenHandle {
    async fn steps(&self, id: JobId) -> Result<Vec<Step>> {
        self.at_work().await;
        self.wrong.steps(&self.real, id).await
    }

    async fn write_step(&self, write: &StepWrite) -> Result<Stepped> {
        self.at_work().await;
        self.wrong.write_step(&self.real, write).await
    }

    async fn hand_over(&self, update: &UpdateRequest, successor: &NewJob) -> Result<(Update, Option<Enqueued>)> {
        self.at_work().await;
        self.wrong.hand_over(&self.real, update, successor).await
    }

    async fn emit(&self, event: &NewEvent) -> Result<Emitted> {
        self.at_work().await;
        self.wrong.emit(&self.real, event).await
    }

    async fn time_out_waits(&self, limit: Limit) -> Result<Vec<JobId>> {
        self.at_work().await;
        self.wrong.time_out_waits(&self.real, limit).await
    }

    async fn purge_events(&self, limit: Limit) -> Result<u64> {
        self.at_work().await;
        self.wrong.purge_events(&self.real, limit).await
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Inspect for BrokenHandle {
    async fn list(&self, filter: &ListFilter, after: Option<JobId>, limit: Limit) -> Result<Page<Job, JobId>> {
        self.at_work().await;
        self.wrong.list(&self.real, filter, after, limit).await
    }

    async fn counts(&self) -> Result<Vec<Count>> {
        self.at_work().await;
        self.wrong.counts(&self.real).await
    }

    async fn purge(&self, state: JobState, older_than: Delay, limit: Limit) -> Result<u64> {
        self.at_work().await;
        self.wrong.purge(&self.real, state, older_than, limit).await
    }
}
