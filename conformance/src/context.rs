//! What a case works with: a store of its own, handles on it, and shorthands for the usual moves.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;

use queue_core::*;
use tokio::sync::Barrier;

use crate::case::Failed;
use crate::case::Outcome;
use crate::case::check;
use crate::case::check_eq;
use crate::harness::Store;
use crate::trace::Log;
use crate::trace::Traced;

/// A handle, whose calls are noted for the report.
pub(crate) type Handle = Arc<dyn Inspect>;

/// The lease of cases that do not care: a minute.
pub(crate) const MINUTE: i64 = 60_000;

/// Handed to every case.
#[derive(Clone)]
pub struct Context {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) log: Arc<Log>,
    pub(crate) handles: Arc<AtomicUsize>,
    pub(crate) seed: u64,
    /// What the harness declares.
    pub(crate) capabilities: Capabilities,
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("seed", &self.seed).finish_non_exhaustive()
    }
}

pub(crate) fn name(text: &str) -> Name {
    Name::try_from(text).expect("the suite's own names are valid")
}

pub(crate) fn lease(millis: i64) -> Lease {
    Lease::from_millis(millis).expect("the suite's own leases are valid")
}

pub(crate) fn millis(millis: i64) -> Delay {
    Delay::from_millis(millis).expect("the suite's own delays are valid")
}

pub(crate) fn limit(rows: usize) -> Limit {
    Limit::new(rows).expect("the suite's own limits are valid")
}

pub(crate) fn json(text: &str) -> Json {
    Json::from_text(text).expect("the suite's own JSON is valid")
}

/// A worker, a new incarnation at every call.
pub(crate) fn worker(text: &str) -> WorkerId {
    WorkerId::new(&name(text))
}

/// A job of queue `q` and kind `k`.
pub(crate) fn new_job() -> NewJob {
    NewJob::new(name("q"), name("k"), json("{\"n\":1}"))
}

/// A job of queue `q` with this key.
pub(crate) fn keyed(key: &str) -> NewJob {
    let mut job = new_job();
    job.unique_key = Some(UniqueKey::try_from(key).expect("the suite's own keys are valid"));
    job
}

/// A claim that starts jobs of queue `q` and kind `k`, for a minute.
pub(crate) fn claim_for(worker: &WorkerId, rows: usize) -> ClaimRequest {
    claim_from("q", worker, rows)
}

pub(crate) fn claim_from(queue: &str, worker: &WorkerId, rows: usize) -> ClaimRequest {
    ClaimRequest::new(name(queue), [name("k")], worker.clone(), lease(MINUTE), limit(rows)).expect("one kind")
}

/// The same claim with another lease.
pub(crate) fn with_lease(request: &ClaimRequest, millis: i64) -> ClaimRequest {
    let (queue, kinds, worker) = (request.queue().clone(), request.kinds().to_vec(), request.worker().clone());
    let changed = ClaimRequest::new(queue, kinds, worker, lease(millis), request.limit()).expect("one kind");
    if request.starts() { changed } else { changed.reserve() }
}

/// The claim of a row, as its holder knows it.
pub(crate) fn held(row: &Execution) -> Result<Held, Failed> {
    Held::of(row).ok_or_else(|| Failed::new(format!("job {} must be held: {row}", row.id)))
}

/// The answer of a call whose lease of 300 milliseconds bounds how long it may wait, with much to spare for a slow machine.
pub(crate) async fn within_patience<T>(call: impl Future<Output = T>) -> Result<T, Failed> {
    let answer = tokio::time::timeout(Duration::from_secs(15), call).await;
    answer.map_err(|_| Failed::new("a third of the lease is long over, and the call still waits"))
}

/// Whether a call that met a lock failed as it should.
pub(crate) fn check_gave_up(error: &Error) -> Outcome {
    let (kind, certainty) = (error.kind(), error.certainty());
    check_eq!(
        (kind, certainty),
        (ErrorKind::Transient, Certainty::NotApplied),
        "another try may meet no lock: {error}"
    );
    Ok(())
}

pub(crate) fn complete() -> Transition {
    Transition::Complete { result: Some(json("{\"done\":true}")) }
}

pub(crate) fn retry_now() -> Transition {
    Transition::Retry { error: "try again".into(), available: When::Now }
}

pub(crate) fn fail() -> Transition {
    Transition::Fail { error: "broken for good".into() }
}

pub(crate) fn snooze(for_millis: i64) -> Transition {
    Transition::Snooze { available: When::After(millis(for_millis)) }
}

pub(crate) fn cancel() -> Transition {
    Transition::Cancel { reason: "no longer wanted".into() }
}

/// Everything that whoever holds a running job can do to it.
pub(crate) fn holder_moves() -> [Transition; 6] {
    [complete(), retry_now(), fail(), snooze(MINUTE), Transition::Release, cancel()]
}

impl Context {
    /// Another independent handle on the store.
    pub(crate) async fn connect(&self) -> Result<Handle, Failed> {
        let inner = self.store.connect().await?;
        let handle = self.handles.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(Arc::new(Traced { inner, log: Arc::clone(&self.log), handle }))
    }

    /// Notes something that the case did behind the contract.
    pub(crate) fn note(&self, text: fmt::Arguments<'_>) {
        self.log.note(text);
    }

    pub(crate) async fn advance(&self, by_millis: i64) -> Result<(), Failed> {
        self.note(format_args!("the store's clock moves by {by_millis} ms"));
        Ok(self.store.advance(millis(by_millis)).await?)
    }

    pub(crate) async fn overwrite(&self, row: &Execution) -> Result<(), Failed> {
        self.note(format_args!("overwritten by hand: {row:?}"));
        Ok(self.store.overwrite(row).await?)
    }

    /// Runs `count` tasks at once, released by a barrier; answers in order of the tasks.
    pub(crate) async fn race<T, F>(&self, count: usize, task: impl Fn(usize) -> F) -> Result<Vec<T>, Failed>
    where
        T: Send + 'static,
        F: Future<Output = T> + Send + 'static,
    {
        let barrier = Arc::new(Barrier::new(count));
        let mut tasks = Vec::with_capacity(count);
        for index in 0..count {
            let (barrier, task) = (Arc::clone(&barrier), task(index));
            tasks.push(tokio::spawn(async move {
                barrier.wait().await;
                task.await
            }));
        }
        let mut answers = Vec::with_capacity(count);
        for task in tasks {
            answers.push(task.await?);
        }
        Ok(answers)
    }
}

/// The job, which must be there.
pub(crate) async fn read(handle: &Handle, id: JobId) -> Result<Job, Failed> {
    handle.get(id).await?.ok_or_else(|| Failed::new(format!("job {id} is gone")))
}

/// Enqueues one new job.
pub(crate) async fn enqueue(handle: &Handle, job: &NewJob) -> Result<JobId, Failed> {
    let outcomes = handle.enqueue(std::slice::from_ref(job)).await?;
    check_eq!(outcomes, [Enqueued::New(job.id)], "a new job must be stored");
    Ok(job.id)
}

/// Enqueues one job, and answers what became of it.
pub(crate) async fn offer(handle: &Handle, job: &NewJob) -> Result<Enqueued, Failed> {
    let outcomes = handle.enqueue(std::slice::from_ref(job)).await?;
    match outcomes[..] {
        [outcome] => Ok(outcome),
        _ => Err(Failed::new(format!("one job needs one answer, not {outcomes:?}"))),
    }
}

/// Repeats an enqueue that was certainly not applied because the store was busy.
pub(crate) async fn enqueue_in_the_end(handle: &Handle, jobs: &[NewJob]) -> Result<Vec<Enqueued>, Error> {
    loop {
        match handle.enqueue(jobs).await {
            Err(error) if error.kind() == ErrorKind::Transient && error.certainty() == Certainty::NotApplied => {
                tokio::task::yield_now().await;
            }
            answer => return answer,
        }
    }
}

/// How many rows the store has, whatever their state.
pub(crate) async fn stored_rows(handle: &Handle) -> Result<u64, Failed> {
    Ok(handle.counts().await?.iter().map(|count| count.jobs).sum())
}

/// Fails unless a call was refused so, for certain with nothing written; answers the item that the error names.
#[track_caller]
pub(crate) fn refused<T: fmt::Debug>(
    answer: Result<T, Error>,
    kind: ErrorKind,
    what: &str,
) -> Result<Option<usize>, Failed> {
    match answer {
        Err(error) if error.kind() == kind && error.certainty() == Certainty::NotApplied => Ok(error.index()),
        other => Err(Failed::new(format!("{what} must be refused as {kind}, with nothing written, not {other:?}"))),
    }
}

/// Claims exactly one job.
pub(crate) async fn claim_one(handle: &Handle, request: &ClaimRequest) -> Result<Job, Failed> {
    let mut claimed = handle.claim(request).await?;
    check!(claimed.unreadable.is_empty(), "unreadable rows: {:?}", claimed.unreadable);
    match (claimed.jobs.pop(), claimed.jobs.len()) {
        (Some(job), 0) => Ok(job),
        (last, before) => {
            Err(Failed::new(format!("one job must be claimed, not {}", before + usize::from(last.is_some()))))
        }
    }
}

/// Enqueues a job and has this worker start it.
pub(crate) async fn running(handle: &Handle, job: &NewJob, worker: &WorkerId) -> Result<Job, Failed> {
    enqueue(handle, job).await?;
    let claimed = claim_one(handle, &claim_from(job.queue.as_str(), worker, 1)).await?;
    check_eq!(claimed.id(), job.id, "the job just enqueued must be claimed");
    Ok(claimed)
}

/// Carries out a transition that must succeed, and reads what it left.
pub(crate) async fn apply(handle: &Handle, seen: &Execution, transition: &Transition) -> Result<Job, Failed> {
    Transitioner::new(handle).apply(seen, transition).await?;
    read(handle, seen.id).await
}

/// Carries out a transition that must be refused as a conflict, and checks that the row did not move.
pub(crate) async fn conflicts(handle: &Handle, seen: &Execution, transition: &Transition) -> Result<Conflict, Failed> {
    let before = handle.get(seen.id).await?;
    let answer = Transitioner::new(handle).apply(seen, transition).await;
    let after = handle.get(seen.id).await?;
    check_eq!(after, before, "a refused {} must change nothing", transition.name());
    match answer {
        Err(TransitionError::Conflict(conflict)) => Ok(*conflict),
        other => Err(Failed::new(format!("{} must be refused as a conflict, not {other:?}", transition.name()))),
    }
}

/// Polls a future a number of times, unless it is ready before, and drops it.
pub(crate) async fn drop_after<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    let mut future = Box::pin(future);
    let mut left = polls;
    std::future::poll_fn(|cx| {
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Pending if left > 0 => Poll::Pending,
            Poll::Pending => Poll::Ready(None),
            Poll::Ready(output) => Poll::Ready(Some(output)),
        }
    })
    .await
}

/// A job that a worker runs, on a fresh handle.
pub(crate) async fn started(context: &Context) -> Result<(Handle, Job), Failed> {
    let handle = context.connect().await?;
    let job = running(&handle, &new_job(), &worker("a")).await?;
    Ok((handle, job))
}

/// Three running jobs, the one in the middle made to fail at every write.
pub(crate) async fn with_a_poisoned_row(context: &Context) -> Result<(Handle, Vec<Job>), Failed> {
    let handle = context.connect().await?;
    let mut jobs = Vec::new();
    for _ in 0..3 {
        jobs.push(running(&handle, &new_job(), &worker("a")).await?);
    }
    context.note(format_args!("job {} is poisoned", jobs[1].id()));
    context.store.damage(jobs[1].id(), crate::Damage::Poison).await?;
    Ok((handle, jobs))
}

pub(crate) fn ids<'a>(rows: impl IntoIterator<Item = &'a Execution>) -> Vec<JobId> {
    rows.into_iter().map(|row| row.id).collect()
}
