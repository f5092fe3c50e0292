//! A store for tests: it counts calls, makes chosen ones fail or wait, and tells when something happened.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use fenced_queue::contract::*;
use fenced_queue::*;
use serde::Deserialize;
use serde::Serialize;
use tokio::sync::Notify;
use tokio::sync::oneshot;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Op {
    Enqueue,
    Get,
    Claim,
    /// Compare-and-updates, single and in batches.
    Update,
    Beat,
    Stale,
    ClaimedBy,
    Purge,
    Steps,
    /// Of one step or wait.
    Step,
    HandOver,
    Emit,
    TimeOut,
}

struct Fault {
    op: Op,
    left: usize,
    applies: bool,
    error: fn() -> Error,
}

/// Holds one call up: it has done its work, and its answer waits.
#[derive(Clone, Default)]
pub(crate) struct Gate {
    reached: Arc<Notify>,
    open: Arc<Notify>,
}

impl Gate {
    pub(crate) async fn reached(&self) {
        self.reached.notified().await;
    }

    pub(crate) fn open(&self) {
        self.open.notify_one();
    }
}

pub(crate) struct Store {
    inner: Arc<dyn Inspect>,
    /// The reference store's clock follows the runtime's, which tests pause.
    memory: Option<MemoryBackend>,
    started: Instant,
    synced: Arc<Mutex<i64>>,
    faults: Mutex<Vec<Fault>>,
    gates: Mutex<Vec<(Op, bool, Gate)>>,
    calls: Mutex<HashMap<Op, usize>>,
    pub(crate) updates: Mutex<Vec<UpdateRequest>>,
    changed: watch::Sender<()>,
    pub(crate) lease: Duration,
    /// Waiting for work ends at once, for nothing.
    pub(crate) restless: AtomicBool,
    /// It has no durable steps.
    pub(crate) forgetful: AtomicBool,
    _folder: Option<tempfile::TempDir>,
}

impl Store {
    fn over(inner: Arc<dyn Inspect>, memory: Option<MemoryBackend>, lease: Duration) -> Self {
        Self {
            inner,
            memory,
            started: Instant::now(),
            synced: Arc::default(),
            faults: Mutex::default(),
            gates: Mutex::default(),
            calls: Mutex::default(),
            updates: Mutex::default(),
            changed: watch::Sender::default(),
            lease,
            restless: AtomicBool::default(),
            forgetful: AtomicBool::default(),
            _folder: None,
        }
    }

    pub(crate) fn memory() -> Arc<Self> {
        Self::memory_with_cap(Capabilities::DEFAULT_MAX_PAYLOAD)
    }

    pub(crate) fn memory_with_cap(cap: usize) -> Arc<Self> {
        let start = "2031-01-01T00:00:00Z".parse().expect("a time");
        let memory = MemoryBackend::at(start).with_max_payload(cap);
        Arc::new(Self::over(Arc::new(memory.clone()), Some(memory), Duration::from_secs(30)))
    }

    #[cfg(feature = "sqlite")]
    pub(crate) async fn sqlite() -> Arc<Self> {
        let folder = tempfile::tempdir().expect("a folder");
        let url = format!("sqlite:{}", folder.path().join("queue.db").display());
        let backend = sqlite::SqliteBackend::connect(&url).await.expect("connects");
        backend.migrate().await.expect("migrates");
        let store = Self::over(Arc::new(backend), None, Duration::from_millis(900));
        Arc::new(Self { _folder: Some(folder), ..store })
    }

    /// A lease that is short, for tests that wait for its end, and longer than a busy machine stands still.
    #[cfg(any(feature = "postgres", feature = "mysql", feature = "mongo"))]
    pub(crate) fn on_a_server(backend: Arc<dyn Inspect>) -> Arc<Self> {
        Self::on_a_server_with(backend, Duration::from_millis(900))
    }

    #[cfg(any(feature = "postgres", feature = "mysql", feature = "mongo"))]
    pub(crate) fn on_a_server_with(backend: Arc<dyn Inspect>, lease: Duration) -> Arc<Self> {
        Arc::new(Self::over(backend, None, lease))
    }

    /// Another handle to the same jobs, with calls and faults of its own.
    pub(crate) fn another(&self) -> Arc<Self> {
        let handle = Self::over(Arc::clone(&self.inner), self.memory.clone(), self.lease);
        Arc::new(Self { started: self.started, synced: Arc::clone(&self.synced), ..handle })
    }

    pub(crate) fn queue(self: &Arc<Self>) -> Queue<Self> {
        Arc::clone(self).into()
    }

    pub(crate) fn reference(&self) -> &MemoryBackend {
        self.memory.as_ref().expect("on memory")
    }

    /// Makes the next calls fail, before they do anything.
    pub(crate) fn refuse(&self, op: Op, calls: usize, error: fn() -> Error) {
        self.faults.lock().expect("lock").push(Fault { op, left: calls, applies: false, error });
    }

    /// Makes the next calls fail, after they have done everything.
    pub(crate) fn lose_answer(&self, op: Op, calls: usize, error: fn() -> Error) {
        self.faults.lock().expect("lock").push(Fault { op, left: calls, applies: true, error });
    }

    /// The store works again.
    pub(crate) fn mend(&self) {
        self.faults.lock().expect("lock").clear();
    }

    /// Holds the next call up after it has done its work.
    pub(crate) fn gate(&self, op: Op) -> Gate {
        self.gated(op, false)
    }

    /// Holds the next call up before it does anything.
    pub(crate) fn gate_before(&self, op: Op) -> Gate {
        self.gated(op, true)
    }

    fn gated(&self, op: Op, before: bool) -> Gate {
        let gate = Gate::default();
        self.gates.lock().expect("lock").push((op, before, gate.clone()));
        gate
    }

    async fn pass_gate(&self, op: Op, before: bool) {
        let gate = {
            let mut gates = self.gates.lock().expect("lock");
            let place = gates.iter().position(|(gated, when, _)| (*gated, *when) == (op, before));
            place.map(|place| gates.remove(place).2)
        };
        if let Some(gate) = gate {
            gate.reached.notify_one();
            gate.open.notified().await;
        }
    }

    pub(crate) fn calls(&self, op: Op) -> usize {
        self.calls.lock().expect("lock").get(&op).copied().unwrap_or(0)
    }

    pub(crate) fn all_calls(&self) -> HashMap<Op, usize> {
        self.calls.lock().expect("lock").clone()
    }

    /// Waits until the condition holds; it is looked at whenever a call has ended.
    pub(crate) async fn until(&self, mut condition: impl AsyncFnMut() -> bool) {
        let mut changed = self.changed.subscribe();
        let waited = tokio::time::timeout(Duration::from_secs(3_600), async {
            while !condition().await {
                changed.changed().await.expect("the store lives");
            }
        });
        waited.await.expect("it happens");
    }

    pub(crate) async fn until_calls(&self, op: Op, calls: usize) {
        self.until(async || self.calls(op) >= calls).await;
    }

    /// Waits until the job is in this state.
    pub(crate) async fn until_state(&self, id: JobId, state: JobState) -> Job {
        self.until(async || self.job(id).await.state() == state).await;
        self.job(id).await
    }

    /// The job, past all faults.
    pub(crate) async fn job(&self, id: JobId) -> Job {
        self.find(id).await.expect("there")
    }

    /// The same of a job that may have been deleted.
    pub(crate) async fn find(&self, id: JobId) -> Option<Job> {
        self.inner.get(id).await.expect("readable")
    }

    fn sync(&self) {
        if let Some(memory) = &self.memory {
            let mut synced = self.synced.lock().expect("lock");
            let elapsed = Delay::saturating(self.started.elapsed()).as_millis();
            memory.advance(Delay::from_millis(elapsed - *synced).expect("forward"));
            *synced = elapsed;
        }
    }

    fn fault(&self, op: Op, applies: bool) -> Result<()> {
        let error = {
            let mut faults = self.faults.lock().expect("lock");
            let found = faults.iter_mut().find(|fault| fault.op == op && fault.applies == applies && fault.left > 0);
            found.map(|fault| {
                fault.left -= 1;
                fault.error
            })
        };
        // Outside of the lock: it may panic.
        error.map_or(Ok(()), |error| Err(error()))
    }

    async fn call<T>(&self, op: Op, call: impl Future<Output = Result<T>>) -> Result<T> {
        *self.calls.lock().expect("lock").entry(op).or_default() += 1;
        self.pass_gate(op, true).await;
        self.sync();
        let answer = match self.fault(op, false) {
            Ok(()) => call.await,
            Err(error) => Err(error),
        };
        self.pass_gate(op, false).await;
        let answer = answer.and_then(|answer| self.fault(op, true).map(|()| answer));
        self.changed.send_replace(());
        answer
    }
}

#[async_trait]
impl Backend for Store {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn migrate(&self) -> Result<()> {
        self.inner.migrate().await
    }

    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        self.call(Op::Enqueue, self.inner.enqueue(jobs)).await
    }

    async fn get(&self, id: JobId) -> Result<Option<Job>> {
        self.call(Op::Get, self.inner.get(id)).await
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed> {
        self.call(Op::Claim, self.inner.claim(request)).await
    }

    async fn update_if_current(&self, id: JobId, current: &Fingerprint, patch: &Patch) -> Result<Update> {
        let request = UpdateRequest { id, current: current.clone(), patch: patch.clone() };
        self.updates.lock().expect("lock").push(request);
        self.call(Op::Update, self.inner.update_if_current(id, current, patch)).await
    }

    async fn extend_leases(&self, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        self.call(Op::Beat, self.inner.extend_leases(held, lease)).await
    }

    async fn stale(&self, after: Option<StaleCursor>, limit: Limit) -> Result<Page<Execution, StaleCursor>> {
        self.call(Op::Stale, self.inner.stale(after, limit)).await
    }

    async fn claimed_by(
        &self,
        worker: &WorkerId,
        older_than: Delay,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Execution, JobId>> {
        self.call(Op::ClaimedBy, self.inner.claimed_by(worker, older_than, after, limit)).await
    }

    async fn update_many_if_current(&self, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        self.updates.lock().expect("lock").extend_from_slice(updates);
        self.call(Op::Update, self.inner.update_many_if_current(updates)).await
    }

    async fn wait_for_work(&self, queues: &[Name]) -> Result<()> {
        match self.restless.load(Ordering::SeqCst) {
            true => Ok(()),
            false => self.inner.wait_for_work(queues).await,
        }
    }

    fn durable_steps(&self) -> Option<&dyn DurableSteps> {
        (!self.forgetful.load(Ordering::SeqCst)).then_some(self as &dyn DurableSteps)
    }
}

impl Store {
    fn inner_steps(&self) -> &dyn DurableSteps {
        self.inner.durable_steps().expect("every store of the library has them")
    }
}

#[async_trait]
impl DurableSteps for Store {
    async fn steps(&self, id: JobId) -> Result<Vec<Step>> {
        self.call(Op::Steps, self.inner_steps().steps(id)).await
    }

    async fn write_step(&self, write: &StepWrite) -> Result<Stepped> {
        self.call(Op::Step, self.inner_steps().write_step(write)).await
    }

    async fn hand_over(&self, update: &UpdateRequest, successor: &NewJob) -> Result<(Update, Option<Enqueued>)> {
        self.call(Op::HandOver, self.inner_steps().hand_over(update, successor)).await
    }

    async fn emit(&self, event: &NewEvent) -> Result<Emitted> {
        self.call(Op::Emit, self.inner_steps().emit(event)).await
    }

    async fn time_out_waits(&self, limit: Limit) -> Result<Vec<JobId>> {
        self.call(Op::TimeOut, self.inner_steps().time_out_waits(limit)).await
    }

    async fn purge_events(&self, limit: Limit) -> Result<u64> {
        self.call(Op::Purge, self.inner_steps().purge_events(limit)).await
    }
}

#[async_trait]
impl Inspect for Store {
    async fn list(&self, filter: &ListFilter, after: Option<JobId>, limit: Limit) -> Result<Page<Job, JobId>> {
        self.inner.list(filter, after, limit).await
    }

    async fn counts(&self) -> Result<Vec<Count>> {
        self.inner.counts().await
    }

    async fn purge(&self, state: JobState, older_than: Delay, limit: Limit) -> Result<u64> {
        self.call(Op::Purge, self.inner.purge(state, older_than, limit)).await
    }
}

/// Arguments of a job that does as little as possible.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Add {
    pub(crate) a: u64,
    pub(crate) b: u64,
}

impl JobArgs for Add {
    const KIND: &'static str = "add";
}

pub(crate) const ADD: Add = Add { a: 1, b: 2 };

/// Claims a job as some other worker would.
pub(crate) async fn claim_one(store: &Store) -> Job {
    let worker = WorkerId::new(&"by-hand".parse().expect("a name"));
    let (lease, limit) = (Lease::from_millis(60_000).expect("a lease"), Limit::new(1).expect("a limit"));
    let queue = "default".parse().expect("a name");
    let kinds = ["add".parse().expect("a name")];
    let request = ClaimRequest::new(queue, kinds, worker, lease, limit).expect("a request");
    store.claim(&request).await.expect("claimed").jobs.remove(0)
}

/// A worker at work.
pub(crate) struct Running {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Report>,
    pub(crate) id: WorkerId,
}

impl Running {
    pub(crate) fn start(worker: Worker) -> Self {
        let (stop, stopped) = oneshot::channel();
        let id = worker.id().clone();
        let task = tokio::spawn(worker.run_until(async {
            let _ = stopped.await;
        }));
        Self { stop, task, id }
    }

    /// Tells it to stop, and waits for the end.
    pub(crate) async fn stop(self) -> Report {
        let _ = self.stop.send(());
        self.task.await.expect("no panic")
    }

    /// Tells it to stop; what waits for the end is answered.
    pub(crate) fn tell(self) -> JoinHandle<Report> {
        let _ = self.stop.send(());
        self.task
    }

    /// The process dies.
    pub(crate) async fn kill(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

pub(crate) fn busy() -> Error {
    Error::not_applied(ErrorKind::Transient, "busy")
}

pub(crate) fn lost() -> Error {
    Error::new(ErrorKind::Unavailable, Certainty::Unknown, "connection lost")
}

pub(crate) fn broken() -> Error {
    Error::not_applied(ErrorKind::Permanent, "broken")
}

/// Runs each scenario on every store: in memory under a paused clock, on a database under the real one.
macro_rules! on_each_store {
    ($($scenario:ident)*) => {
        mod on_memory {
            $(
                #[tokio::test(start_paused = true)]
                async fn $scenario() {
                    let scenario = super::$scenario(crate::common::Store::memory());
                    tokio::time::timeout(std::time::Duration::from_secs(7_200), scenario).await.expect("it ends");
                }
            )*
        }

        #[cfg(feature = "sqlite")]
        mod on_sqlite {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $scenario() {
                    let scenario = super::$scenario(crate::common::Store::sqlite().await);
                    tokio::time::timeout(std::time::Duration::from_secs(120), scenario).await.expect("it ends");
                }
            )*
        }

        crate::common::on_server!(on_postgres, "postgres", "postgres", $($scenario)*);
        crate::common::on_server!(on_mysql, "mysql", "mysql", $($scenario)*);
        crate::common::on_server!(on_mariadb, "mysql", "mariadb", $($scenario)*);
        crate::common::on_server!(on_mongodb, "mongo", "mongodb", $($scenario)*);
    };
}
pub(crate) use on_each_store;

macro_rules! on_server {
    ($module:ident, $feature:literal, $name:literal, $($scenario:ident)*) => {
        #[cfg(feature = $feature)]
        mod $module {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $scenario() {
                    crate::servers::run($name, super::$scenario).await;
                }
            )*
        }
    };
}
pub(crate) use on_server;
