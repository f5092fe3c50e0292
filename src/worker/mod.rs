//! Running jobs: one loop per file.

mod announce;
mod builder;
mod cancel;
mod completion;
mod context;
mod durable;
mod fetch;
mod handler;
mod heartbeat;
mod held;
mod kind;
mod layer;
mod maintain;
mod metrics;
mod outcome;
mod overdue;
mod report;
mod reserve;
mod retry_policy;
mod run;
mod settle;
mod shutdown;
mod slots;

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use queue_core::ClaimRequest;
use queue_core::Decision;
use queue_core::Inspect;
use queue_core::Limit;
use queue_core::Settled;
use queue_core::TransitionError;
use queue_core::Transitioner;
use queue_core::WorkerId;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio::task::JoinError;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio::time::timeout;

pub use builder::WorkerBuilder;
pub use cancel::CancelReason;
pub use cancel::CancelToken;
pub use completion::JobTransaction;
pub use context::JobContext;
pub use durable::Child;
pub use durable::ChildOutcome;
pub use durable::DurableContext;
pub use kind::KindOptions;
pub use layer::Next;
pub use outcome::NotDone;
pub use report::Report;
pub use retry_policy::RetryPolicy;

use crate::JobArgs;
use crate::Queue;
use crate::QueueError;
use announce::Announcer;
use builder::Config;
use fetch::Fetch;
use handler::Handlers;
use held::Claim;
use held::HeldJobs;
use layer::Layer;
use overdue::Alarm;
use report::Counted;

/// Claims jobs, runs their handlers and records how they went, until it is told to stop.
///
/// # What it does
///
/// One loop claims for the free slots. Each job runs as a task. One settler records outcomes in groups: what ends while
/// one write is under way goes with the next. One heartbeat renews all leases in one call; one maintenance loop puts
/// stale jobs of any worker back.
///
/// # Dropping
///
/// All of it ends with the future of [`run_until`](Self::run_until): if that is dropped, handlers are aborted, heartbeats
/// stop, and what was held is recovered by others when its lease has run out.
pub struct Worker {
    shared: Arc<Shared>,
}

/// What all loops of a worker share.
struct Shared {
    backend: Arc<dyn Inspect>,
    id: WorkerId,
    config: Config,
    handlers: Handlers,
    layers: Vec<Layer>,
    held: HeldJobs,
    alarm: Arc<Alarm>,
    announcer: Announcer,
    /// Since when a claim has been waiting for its answer.
    claiming: Mutex<Option<Instant>>,
    /// The last heartbeat failed: what looks stale may be this worker's own.
    unrenewed: AtomicBool,
    report: Mutex<Report>,
}

impl Shared {
    fn count(&self, what: Counted, by: usize) {
        metrics::counted(what, by);
        held::lock(&self.report).count(what, by as u64);
    }
}

impl Shared {
    /// Submits decisions. A call that hangs is as good as one whose answer was lost; one that is slow must have its time, however
    /// often leases are renewed.
    async fn submit_all(&self, decisions: &mut [Decision]) -> Vec<Result<Settled, TransitionError>> {
        let transitioner = Transitioner::new(&*self.backend);
        let answers = timeout(self.config.lease.duration() / 3, transitioner.submit_all(decisions)).await;
        answers.unwrap_or_else(|_| decisions.iter().map(|_| Err(heartbeat::no_answer().into())).collect())
    }
}

impl Worker {
    /// A worker for the jobs of this queue's store.
    pub fn builder<B: Inspect + ?Sized + 'static>(queue: &Queue<B>) -> WorkerBuilder {
        // A shared pointer to a backend is a backend: so is one to a `dyn` backend.
        WorkerBuilder::new(Arc::new(Arc::clone(queue.backend())))
    }

    fn new(backend: Arc<dyn Inspect>, config: Config, handlers: Handlers, layers: Vec<Layer>) -> Self {
        let id = WorkerId::new(&config.name);
        Self {
            shared: Arc::new(Shared {
                backend,
                id,
                config,
                handlers,
                layers,
                held: HeldJobs::default(),
                alarm: Arc::default(),
                announcer: Announcer::default(),
                claiming: Mutex::default(),
                unrenewed: AtomicBool::new(false),
                report: Mutex::default(),
            }),
        }
    }

    /// Who it is in stored jobs: its name and a random part.
    pub fn id(&self) -> &WorkerId {
        &self.shared.id
    }

    /// Claims one job of this kind, takes it through its handler and records the outcome: for tests of handlers.
    pub(crate) async fn claim_and_run<A: JobArgs>(&self, cancel: Option<CancelReason>) -> Result<(), QueueError> {
        let shared = &self.shared;
        let queue = A::QUEUE.parse().map_err(QueueError::invalid("queue"))?;
        let kinds = shared.handlers.keys().cloned();
        let (lease, one) = (shared.config.lease, Limit::new(1).map_err(QueueError::invalid("limit"))?);
        let request = ClaimRequest::new(queue, kinds, shared.id.clone(), lease, one);
        let request = request.map_err(QueueError::invalid("kinds"))?;
        let deadline = Instant::now() + lease.duration();
        for job in shared.backend.claim(&request).await?.jobs {
            let Some(claim) = Claim::new(job.execution.clone(), deadline) else { continue };
            if let Some(reason) = cancel.clone() {
                claim.cancel(reason);
            }
            let transition = run::attempt(shared, &claim, job).await;
            if claim.recorded_as().is_some() {
                continue;
            }
            Transitioner::new(&*shared.backend).apply(claim.execution(), &transition).await?;
        }
        Ok(())
    }

    /// Works until `shutdown` resolves, then stops gracefully: nothing more is claimed, and what a claim under way
    /// brings is given back; handlers may go on until the grace is over; then their tokens fire, and what has not ended
    /// a second later is aborted and given back with its attempt; what has ended is recorded.
    ///
    /// Call it on a Tokio runtime with time enabled.
    ///
    /// # Panics
    ///
    /// If one of its own loops panics, which a panicking backend can make it do. A panicking handler cannot.
    pub async fn run_until<T>(self, shutdown: impl Future<Output = T>) -> Report {
        self.run_until_or_hurry(shutdown, std::future::pending::<()>()).await
    }

    /// The same, with a second signal: once `hurry` resolves as well, the grace is over. It counts from when the worker was told
    /// to stop.
    ///
    /// ```no_run
    /// # async fn example(worker: fenced_queue::Worker) {
    /// use tokio::signal::ctrl_c;
    ///
    /// let report = worker.run_until_or_hurry(ctrl_c(), async { (ctrl_c().await, ctrl_c().await) }).await;
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// As [`run_until`](Self::run_until).
    pub async fn run_until_or_hurry<T, U>(
        self,
        shutdown: impl Future<Output = T>,
        hurry: impl Future<Output = U>,
    ) -> Report {
        let shared = self.shared;
        tracing::info!(name: "worker.start", worker = %shared.id, "worker starts");
        let mut loops = JoinSet::new();
        loops.spawn(heartbeat::run(Arc::clone(&shared)));
        loops.spawn(maintain::run(Arc::clone(&shared)));
        if shared.backend.durable_steps().is_some() {
            loops.spawn(overdue::run(Arc::clone(&shared)));
        }
        // Handlers take their room before they run, so that none waits with its outcome: as many again as are running.
        let concurrency: usize = shared.config.queues.iter().map(|(_, concurrency)| concurrency).sum();
        let (results, inbox) = mpsc::channel(concurrency.saturating_mul(2));
        let (close, closing) = watch::channel(false);
        let mut settler = JoinSet::new();
        settler.spawn(settle::run(Arc::clone(&shared), inbox, closing));
        let (all_settled, settled) = watch::channel(false);

        let (stop, stopped) = watch::channel(None);
        let mut fetch = Fetch::new(Arc::clone(&shared), results, stopped.clone());
        let (hurry_up, hurried) = watch::channel(false);
        let mut told = pin!(async {
            let stopping = async {
                shutdown.await;
                stop.send_replace(Some(Instant::now()));
            };
            let hurrying = async {
                hurry.await;
                hurry_up.send_replace(true);
            };
            tokio::join!(stopping, hurrying)
        });
        let mut working = pin!(async {
            tokio::select! {
                () = fetch.run() => {}
                () = shutdown::claim_overdue(&shared, stopped.clone(), hurried.clone()) => {}
            }
            *held::lock(&shared.claiming) = None;
            shutdown::drain(&shared, &mut fetch, stopped, hurried).await;
            close.send_replace(true);
            shutdown::flush(&shared, settled).await;
            shared.announcer.flush(shared.config.lease.duration() / 3).await;
            // By now nothing is held but what is given up.
            maintain::last_orphans(&shared).await;
        });
        let mut running = true;
        loop {
            tokio::select! {
                biased;
                _ = &mut told, if running => running = false,
                Some(ended) = loops.join_next() => propagate(ended),
                Some(ended) = settler.join_next() => {
                    propagate(ended);
                    all_settled.send_replace(true);
                }
                () = &mut working => break,
            }
        }
        loops.shutdown().await;
        let mut report = held::lock(&shared.report).clone();
        report.left = shared.held.all().len() as u64;
        tracing::info!(name: "worker.stop", worker = %shared.id, ?report, "worker stopped");
        report
    }
}

/// A loop ended before it was told to: only a panic does that.
fn propagate(ended: Result<(), JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        std::panic::resume_unwind(error.into_panic());
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker")
            .field("id", &self.shared.id)
            .field("config", &self.shared.config)
            .finish_non_exhaustive()
    }
}
