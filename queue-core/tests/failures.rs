//! What the transitioner, the sweeps and the lazy backend do when the store fails, or answers late.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;
use std::task::Poll;

use async_trait::async_trait;
use queue_core::*;
use tokio::sync::Barrier;

/// A store whose next calls answer as told: the error is returned without the call, or after it.
struct Faulty {
    inner: MemoryBackend,
    faults: Mutex<Vec<Fault>>,
    /// How many batches were sent.
    calls: AtomicUsize,
    /// How many single updates pass before a fault is looked for.
    passes: AtomicUsize,
    /// No capability: a batch is one update after the other, and the store is locked as a whole.
    is_plain: bool,
}

/// Which call fails, whether it is made before it fails, and how.
type Fault = (&'static str, bool, ErrorKind, Certainty);

impl Faulty {
    fn new(faults: &[Fault]) -> Self {
        Self {
            inner: MemoryBackend::new(),
            faults: Mutex::new(faults.to_vec()),
            calls: AtomicUsize::new(0),
            passes: AtomicUsize::new(0),
            is_plain: false,
        }
    }

    async fn call<T>(&self, name: &str, call: impl Future<Output = Result<T>> + Send) -> Result<T> {
        let fault = {
            let mut faults = self.faults.lock().expect("not poisoned");
            let next = faults.iter().position(|(call, ..)| *call == name);
            next.map(|next| faults.remove(next))
        };
        match fault {
            None => call.await,
            Some((_, is_made, kind, certainty)) => {
                if is_made {
                    call.await?;
                }
                Err(Error::new(kind, certainty, format!("{name} was made to fail")))
            }
        }
    }
}

#[async_trait]
impl Backend for Faulty {
    fn capabilities(&self) -> Capabilities {
        if self.is_plain { Capabilities::default() } else { self.inner.capabilities() }
    }

    async fn migrate(&self) -> Result<()> {
        self.inner.migrate().await
    }

    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        self.inner.enqueue(jobs).await
    }

    async fn get(&self, id: JobId) -> Result<Option<Job>> {
        self.inner.get(id).await
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed> {
        self.inner.claim(request).await
    }

    async fn update_if_current(&self, id: JobId, current: &Fingerprint, patch: &Patch) -> Result<Update> {
        let pass = |left: usize| left.checked_sub(1);
        match self.passes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, pass) {
            Ok(_) => self.inner.update_if_current(id, current, patch).await,
            Err(_) => self.call("update", self.inner.update_if_current(id, current, patch)).await,
        }
    }

    async fn extend_leases(&self, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        self.inner.extend_leases(held, lease).await
    }

    async fn stale(&self, after: Option<StaleCursor>, limit: Limit) -> Result<Page<Execution, StaleCursor>> {
        self.call("stale", self.inner.stale(after, limit)).await
    }

    async fn claimed_by(
        &self,
        worker: &WorkerId,
        older_than: Delay,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Execution, JobId>> {
        self.call("claimed by", self.inner.claimed_by(worker, older_than, after, limit)).await
    }

    async fn update_many_if_current(&self, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        if self.is_plain {
            let mut answers = Vec::new();
            for update in updates {
                answers.push(self.update_if_current(update.id, &update.current, &update.patch).await?);
            }
            return Ok(answers);
        }
        self.call("update many", self.inner.update_many_if_current(updates)).await
    }
}

fn name() -> Name {
    Name::try_from("n").expect("a name")
}

fn lease(millis: i64) -> Lease {
    Lease::from_millis(millis).expect("a lease")
}

async fn running(backend: &dyn Backend, count: usize) -> (WorkerId, Vec<Execution>) {
    let worker = WorkerId::new(&name());
    let jobs: Vec<_> = (0..count).map(|_| NewJob::new(name(), name(), Json::null())).collect();
    backend.enqueue(&jobs).await.expect("enqueued");
    let limit = Limit::new(count).expect("a limit");
    let request = ClaimRequest::new(name(), [name()], worker.clone(), lease(60_000), limit).expect("one kind");
    let claimed = backend.claim(&request).await.expect("claimed").jobs;
    (worker, claimed.into_iter().map(|job| job.execution).collect())
}

const COMPLETE: Transition = Transition::Complete { result: None };

/// S9, A18: neither a conflict nor a success.
#[tokio::test]
async fn a_failing_store_is_the_callers_error() {
    for certainty in [Certainty::NotApplied, Certainty::Unknown] {
        let backend = Faulty::new(&[("update", false, ErrorKind::Permanent, certainty)]);
        let (_, rows) = running(&backend, 1).await;
        match Transitioner::new(&backend).apply(&rows[0], &COMPLETE).await {
            Err(TransitionError::Backend(error)) => {
                assert_eq!((error.kind(), error.certainty()), (ErrorKind::Permanent, certainty));
            }
            other => panic!("{other:?}"),
        }
    }
}

/// S11, A13: the write landed, its answer was lost.
#[tokio::test]
async fn a_lost_answer_is_recognised_when_the_decision_is_submitted_again() {
    let backend = Faulty::new(&[("update", true, ErrorKind::Unavailable, Certainty::Unknown)]);
    let (_, rows) = running(&backend, 1).await;
    let mut decision = Decision::new(&rows[0], &COMPLETE).expect("legal");
    let transitioner = Transitioner::new(&backend as &dyn Backend);
    transitioner.submit(&mut decision).await.expect_err("the answer is lost");
    let again = transitioner.submit(&mut decision).await.expect("recorded");
    assert!(matches!(again, Settled::AlreadyApplied(_)), "{again:?}");
}

/// A20: what came after it may hide that it was applied, and the conflict says so.
#[tokio::test]
async fn a_conflict_after_an_unknown_outcome_says_that_it_may_have_been_applied() {
    let backend = Faulty::new(&[("update", true, ErrorKind::Unavailable, Certainty::Unknown)]);
    let (_, rows) = running(&backend, 1).await;
    let retry = Transition::Retry { error: "e".into(), available: When::Now };
    let mut decision = Decision::new(&rows[0], &retry).expect("legal");
    let transitioner = Transitioner::new(&backend);
    transitioner.submit(&mut decision).await.expect_err("the answer is lost");
    let request = ClaimRequest::new(name(), [name()], WorkerId::new(&name()), lease(1), Limit::MAX).expect("one kind");
    backend.claim(&request).await.expect("claimed again");
    match transitioner.submit(&mut decision).await {
        Err(TransitionError::Conflict(conflict)) => {
            assert!(conflict.may_have_applied);
            let text = conflict.to_string();
            assert!(text.contains("decided on attempt 1 by n/") && text.contains("now attempt 2 by n/"), "{text}");
        }
        other => panic!("{other:?}"),
    }
    match transitioner.apply(&rows[0], &COMPLETE).await {
        Err(TransitionError::Conflict(conflict)) => {
            assert!(!conflict.may_have_applied, "this one was never sent before")
        }
        other => panic!("{other:?}"),
    }
}

/// A submission that was dropped may have been applied, and a conflict after it says so.
#[tokio::test]
async fn a_dropped_submission_may_have_been_applied() {
    let backend = MemoryBackend::new();
    let (_, rows) = running(&backend, 2).await;
    let decide = |row| Decision::new(row, &COMPLETE).expect("legal");
    let mut decisions = [decide(&rows[0]), decide(&rows[1])];
    let slow = LazyBackend::new(Capabilities::default(), || async {
        tokio::task::yield_now().await;
        Ok(MemoryBackend::new())
    });
    let transitioner = Transitioner::new(&slow);
    let (first, second) = decisions.split_at_mut(1);
    let mut one = Box::pin(transitioner.submit(&mut first[0]));
    let mut many = Box::pin(transitioner.submit_all(second));
    let polled = poll_fn(|cx| Poll::Ready(one.as_mut().poll(cx).is_pending() && many.as_mut().poll(cx).is_pending()));
    assert!(polled.await, "both are dropped in the middle");
    drop((one, many));
    let transitioner = Transitioner::new(&backend);
    for (row, decision) in rows.iter().zip(&mut decisions) {
        transitioner.apply(row, &Transition::Release).await.expect("released by another");
        match transitioner.submit(decision).await {
            Err(TransitionError::Conflict(conflict)) => assert!(conflict.may_have_applied, "{conflict}"),
            other => panic!("{other:?}"),
        }
    }
}

/// A batch that failed is submitted row by row, and a lost batch is recognised.
#[tokio::test]
async fn a_failed_batch_is_submitted_row_by_row() {
    for (is_made, certainty) in [(false, Certainty::NotApplied), (true, Certainty::Unknown)] {
        let backend = Faulty::new(&[("update many", is_made, ErrorKind::Transient, certainty)]);
        let (_, rows) = running(&backend, 3).await;
        let mut decisions: Vec<_> = rows.iter().map(|row| Decision::new(row, &COMPLETE).expect("legal")).collect();
        for settled in Transitioner::new(&backend).submit_all(&mut decisions).await {
            match (is_made, settled) {
                (false, Ok(Settled::Applied(_))) | (true, Ok(Settled::AlreadyApplied(_))) => {}
                (_, other) => panic!("{other:?}"),
            }
        }
    }
}

/// What came after an unknown outcome cannot make it certain.
#[tokio::test]
async fn a_certain_failure_does_not_hide_an_uncertain_one() {
    let lost = ("update many", true, ErrorKind::Transient, Certainty::Unknown);
    let busy = ("update", false, ErrorKind::Transient, Certainty::NotApplied);
    let backend = Faulty::new(&[lost, busy, busy]);
    let (_, rows) = running(&backend, 2).await;
    let mut decisions: Vec<_> = rows.iter().map(|row| Decision::new(row, &COMPLETE).expect("legal")).collect();
    for settled in Transitioner::new(&backend).submit_all(&mut decisions).await {
        let Err(TransitionError::Backend(error)) = settled else { panic!("{settled:?}") };
        assert_eq!(error.certainty(), Certainty::Unknown, "the rows are written: {error}");
    }
}

/// Without atomic batches a batch that failed has written the rows before the one that failed.
#[tokio::test]
async fn a_failed_batch_of_a_store_without_atomic_batches_is_uncertain() {
    for kind in [ErrorKind::Transient, ErrorKind::Unavailable] {
        let fault = ("update", false, kind, Certainty::NotApplied);
        let backend = Faulty { is_plain: true, ..Faulty::new(&[fault]) };
        let (_, rows) = running(&backend, 4).await;
        let mut decisions: Vec<_> = rows.iter().map(|row| Decision::new(row, &COMPLETE).expect("legal")).collect();
        backend.passes.store(2, Ordering::SeqCst);
        for (index, settled) in Transitioner::new(&backend).submit_all(&mut decisions).await.into_iter().enumerate() {
            let row = backend.get(rows[index].id).await.expect("readable").expect("there");
            match settled {
                Ok(_) => assert_eq!(row.state(), JobState::Completed),
                Err(TransitionError::Backend(error)) => assert!(
                    row.state() == JobState::Running || error.certainty() == Certainty::Unknown,
                    "row {index} is {}, and the error says {error}",
                    row.state()
                ),
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// A store that is gone is not asked once for every row.
#[tokio::test]
async fn an_unreachable_store_is_asked_once() {
    let gone = |n| (0..n).map(|_| ("update many", false, ErrorKind::Unavailable, Certainty::NotApplied));
    let backend = Faulty::new(&gone(2).collect::<Vec<_>>());
    let (_, rows) = running(&backend, 8).await;
    let mut decisions: Vec<_> = rows.iter().map(|row| Decision::new(row, &COMPLETE).expect("legal")).collect();
    for settled in Transitioner::new(&backend).submit_all(&mut decisions).await {
        let Err(TransitionError::Backend(error)) = settled else { panic!("{settled:?}") };
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(error.to_string(), "unavailable: update many was made to fail");
    }
    assert_eq!(backend.faults.lock().expect("not poisoned").len(), 1, "the second failure was not met");
}

/// One bad row among many costs a call for every halving, not one for every row.
#[tokio::test]
async fn a_bad_row_is_found_by_halving() {
    let backend = Faulty::new(&[]);
    let (_, rows) = running(&backend, 256).await;
    let bad = rows[100].id;
    backend.inner.edit(|rows| rows.get_mut(&bad).expect("there").poisoned = true);
    let mut decisions: Vec<_> = rows.iter().map(|row| Decision::new(row, &COMPLETE).expect("legal")).collect();
    let answers = Transitioner::new(&backend).submit_all(&mut decisions).await;
    for (row, answer) in rows.iter().zip(answers) {
        match answer {
            Ok(settled) => assert_eq!((settled.execution().id, row.id == bad), (row.id, false), "in order"),
            Err(error) => assert_eq!(row.id, bad, "{error}"),
        }
    }
    assert!(backend.calls.load(Ordering::SeqCst) <= 17, "{:?} calls", backend.calls);
}

/// S9, A18: never an empty success.
#[tokio::test]
async fn a_sweep_that_cannot_list_or_reach_the_store_fails() {
    let fault = |call| Faulty::new(&[(call, false, ErrorKind::Unavailable, Certainty::Unknown)]);
    for backend in [fault("stale"), fault("update many")] {
        running(&backend, 2).await;
        backend.inner.advance(Delay::from_millis(120_000).expect("two minutes"));
        let error = recover_stale(&backend, lease(1), Limit::MAX, |_| false).await.expect_err("the store is gone");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let sweep = recover_stale(&backend, lease(1), Limit::MAX, |_| false).await.expect("the store is back");
        assert_eq!(sweep.recovered.len(), 2);
    }
    for backend in [fault("claimed by"), fault("update many")] {
        let (worker, _) = running(&backend, 2).await;
        release_orphans(&backend, &worker, Delay::ZERO, Limit::MAX, |_| false).await.expect_err("the store is gone");
    }
}

/// S8: connects once, also for a hundred first calls, and passes on what it is asked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lazy_backend_connects_once() {
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connections);
    let lazy = Arc::new(LazyBackend::new(Capabilities::default(), move || {
        let counted = Arc::clone(&counted);
        async move {
            counted.fetch_add(1, Ordering::SeqCst);
            tokio::task::yield_now().await;
            Ok(MemoryBackend::new())
        }
    }));
    assert_eq!(lazy.capabilities(), Capabilities::default(), "known without a connection");
    assert_eq!(connections.load(Ordering::SeqCst), 0, "not before the first call");
    let barrier = Arc::new(Barrier::new(100));
    let calls: Vec<_> = (0..100)
        .map(|_| {
            let (lazy, barrier) = (Arc::clone(&lazy), Arc::clone(&barrier));
            tokio::spawn(async move {
                barrier.wait().await;
                lazy.enqueue(&[NewJob::new(name(), name(), Json::null())]).await
            })
        })
        .collect();
    for call in calls {
        call.await.expect("no panic").expect("enqueued");
    }
    assert_eq!(connections.load(Ordering::SeqCst), 1);
    assert_eq!(lazy.counts().await.expect("counted")[0].jobs, 100, "all of them reached one store");
}

#[tokio::test]
async fn a_lazy_backend_tries_a_failed_connection_again() {
    let tries = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&tries);
    let lazy = LazyBackend::new(Capabilities::default(), move || {
        let tried = counted.fetch_add(1, Ordering::SeqCst);
        async move {
            match tried {
                0 => Err(Error::not_applied(ErrorKind::Unavailable, "not yet")),
                _ => Ok(MemoryBackend::new()),
            }
        }
    });
    let error = lazy.get(JobId::new()).await.expect_err("the first connection fails");
    assert_eq!((error.kind(), error.certainty()), (ErrorKind::Unavailable, Certainty::NotApplied));
    assert_eq!(lazy.get(JobId::new()).await.expect("the second one does not"), None);
    assert_eq!(tries.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn the_provided_wait_never_resolves() {
    let backend = Faulty::new(&[]);
    let queues = [name()];
    let mut wait = std::pin::pin!(backend.wait_for_work(&queues));
    let polled = poll_fn(|cx| Poll::Ready(wait.as_mut().poll(cx).is_pending())).await;
    assert!(polled);
}
