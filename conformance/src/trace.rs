//! Remembers what a case did, for the report of its failure.

use std::collections::VecDeque;
use std::fmt;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;

use async_trait::async_trait;
use queue_core::*;

const CALLS_KEPT: usize = 30;
const JOBS_KEPT: usize = 3;
const CHARACTERS_KEPT: usize = 700;

/// The last calls of a case, and the jobs that it enqueued, as it last read them.
#[derive(Debug, Default)]
pub(crate) struct Log(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    calls: VecDeque<String>,
    count: usize,
    jobs: Vec<(JobId, Option<String>)>,
}

impl Log {
    pub(crate) fn note(&self, entry: fmt::Arguments<'_>) {
        self.with(|entries| {
            entries.count += 1;
            let line = format!("{:4}  {}", entries.count, clipped(entry));
            if entries.calls.len() == CALLS_KEPT {
                entries.calls.pop_front();
            }
            entries.calls.push_back(line);
        });
    }

    /// The first jobs that the case enqueued, each with what it was when the case last read it.
    pub(crate) fn jobs(&self) -> Vec<(JobId, Option<String>)> {
        self.with(|entries| entries.jobs.clone())
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.with(|entries| entries.calls.iter().cloned().collect())
    }

    fn enqueued(&self, jobs: &[NewJob]) {
        self.with(|entries| {
            let room = JOBS_KEPT.saturating_sub(entries.jobs.len());
            entries.jobs.extend(jobs.iter().take(room).map(|job| (job.id, None)));
        });
    }

    fn read(&self, job: &Job) {
        self.with(|entries| {
            if let Some((_, text)) = entries.jobs.iter_mut().find(|(id, _)| *id == job.id()) {
                *text = Some(clipped(format_args!("{job:?}")));
            }
        });
    }

    fn with<T>(&self, f: impl FnOnce(&mut Entries) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

pub(crate) fn clipped(text: fmt::Arguments<'_>) -> String {
    let mut clipped = Clipped(String::new());
    // An error only says that the text was full.
    let _ = clipped.write_fmt(text);
    clipped.0
}

/// Text that stops growing: formatting a batch of ten thousand jobs ends early.
struct Clipped(String);

impl Write for Clipped {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = CHARACTERS_KEPT.saturating_sub(self.0.len());
        if text.len() <= room {
            self.0.push_str(text);
            return Ok(());
        }
        self.0.push_str(&text[..text.floor_char_boundary(room)]);
        self.0.push_str(" ..");
        Err(fmt::Error)
    }
}

/// A handle whose calls are noted.
pub(crate) struct Traced {
    pub(crate) inner: Arc<dyn Inspect>,
    pub(crate) log: Arc<Log>,
    pub(crate) handle: usize,
}

impl Traced {
    fn note<T: fmt::Debug>(&self, call: fmt::Arguments<'_>, answer: T) -> T {
        self.log.note(format_args!("handle {}: {call} -> {answer:?}", self.handle));
        answer
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Backend for Traced {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn migrate(&self) -> Result<()> {
        let answer = self.inner.migrate().await;
        self.note(format_args!("migrate"), answer)
    }

    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let answer = self.inner.enqueue(jobs).await;
        self.log.enqueued(jobs);
        match jobs {
            [job] => self.note(format_args!("enqueue {job:?}"), answer),
            _ => self.note(format_args!("enqueue {} jobs", jobs.len()), answer),
        }
    }

    async fn get(&self, id: JobId) -> Result<Option<Job>> {
        let answer = self.inner.get(id).await;
        if let Ok(Some(job)) = &answer {
            self.log.read(job);
        }
        self.note(format_args!("get {id}"), answer)
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed> {
        let answer = self.inner.claim(request).await;
        let (worker, limit) = (request.worker(), request.limit().get());
        self.note(format_args!("claim {limit} for {worker}"), answer)
    }

    async fn update_if_current(&self, id: JobId, current: &Fingerprint, patch: &Patch) -> Result<Update> {
        let answer = self.inner.update_if_current(id, current, patch).await;
        self.note(format_args!("update {id} to {} if {current:?}", patch.state), answer)
    }

    async fn extend_leases(&self, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        let answer = self.inner.extend_leases(held, lease).await;
        self.note(format_args!("extend {} leases by {} ms", held.len(), lease.as_millis()), answer)
    }

    async fn stale(&self, after: Option<StaleCursor>, limit: Limit) -> Result<Page<Execution, StaleCursor>> {
        let answer = self.inner.stale(after, limit).await;
        self.note(format_args!("stale"), answer)
    }

    async fn claimed_by(
        &self,
        worker: &WorkerId,
        older_than: Delay,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Execution, JobId>> {
        let answer = self.inner.claimed_by(worker, older_than, after, limit).await;
        self.note(format_args!("claimed by {worker}"), answer)
    }

    async fn update_many_if_current(&self, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        let answer = self.inner.update_many_if_current(updates).await;
        self.note(format_args!("update {} jobs", updates.len()), answer)
    }

    async fn wait_for_work(&self, queues: &[Name]) -> Result<()> {
        let answer = self.inner.wait_for_work(queues).await;
        self.note(format_args!("wait for work"), answer)
    }

    fn durable_steps(&self) -> Option<&dyn DurableSteps> {
        self.inner.durable_steps().map(|_| self as &dyn DurableSteps)
    }
}

impl Traced {
    fn steps(&self) -> Result<&dyn DurableSteps> {
        let missing = || Error::not_applied(ErrorKind::Unsupported, "the handle has no durable steps");
        self.inner.durable_steps().ok_or_else(missing)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl DurableSteps for Traced {
    async fn steps(&self, id: JobId) -> Result<Vec<Step>> {
        let answer = self.steps()?.steps(id).await;
        self.note(format_args!("steps of {id}"), answer)
    }

    async fn write_step(&self, write: &StepWrite) -> Result<Stepped> {
        let answer = self.steps()?.write_step(write).await;
        self.note(format_args!("write {write:?}"), answer)
    }

    async fn hand_over(&self, update: &UpdateRequest, successor: &NewJob) -> Result<(Update, Option<Enqueued>)> {
        let answer = self.steps()?.hand_over(update, successor).await;
        self.note(format_args!("hand {} over to {successor:?}", update.id), answer)
    }

    async fn emit(&self, event: &NewEvent) -> Result<Emitted> {
        let answer = self.steps()?.emit(event).await;
        self.note(format_args!("emit {event:?}"), answer)
    }

    async fn time_out_waits(&self, limit: Limit) -> Result<Vec<JobId>> {
        let answer = self.steps()?.time_out_waits(limit).await;
        self.note(format_args!("time out at most {} waits", limit.get()), answer)
    }

    async fn purge_events(&self, limit: Limit) -> Result<u64> {
        let answer = self.steps()?.purge_events(limit).await;
        self.note(format_args!("purge events"), answer)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Inspect for Traced {
    async fn list(&self, filter: &ListFilter, after: Option<JobId>, limit: Limit) -> Result<Page<Job, JobId>> {
        let answer = self.inner.list(filter, after, limit).await;
        self.note(format_args!("list"), answer)
    }

    async fn counts(&self) -> Result<Vec<Count>> {
        let answer = self.inner.counts().await;
        self.note(format_args!("counts"), answer)
    }

    async fn purge(&self, state: JobState, older_than: Delay, limit: Limit) -> Result<u64> {
        let answer = self.inner.purge(state, older_than, limit).await;
        self.note(format_args!("purge {state}"), answer)
    }
}
