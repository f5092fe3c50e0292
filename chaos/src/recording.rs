//! A backend that writes down what it is asked and what it answers.

use std::sync::Arc;

use async_trait::async_trait;
use fenced_queue::contract::*;

use crate::history;
use crate::history::Action;
use crate::history::Answer;
use crate::history::Asked;
use crate::history::Recorder;
use crate::history::Seen;
use crate::history::What;

/// Writes down every call that changes jobs, their steps or events, before it is made and when it is answered; and what is read of steps.
pub struct Recording {
    inner: Arc<dyn Inspect>,
    recorder: Arc<Recorder>,
    by_id: bool,
}

impl std::fmt::Debug for Recording {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recording").finish_non_exhaustive()
    }
}

impl Recording {
    /// Around this store.
    pub fn new(inner: Arc<dyn Inspect>, recorder: Arc<Recorder>) -> Self {
        Self { inner, recorder, by_id: false }
    }

    /// Makes changes whatever the row is by then, as queues do that settle by id: for the proof that this is found out.
    #[must_use]
    pub fn by_id(mut self) -> Self {
        self.by_id = true;
        self
    }

    async fn update(&self, id: JobId, current: &Fingerprint, patch: &Patch) -> Result<Update> {
        match self.inner.update_if_current(id, current, patch).await? {
            Update::Conflict(row) if self.by_id && Some(row.revision) != patch.revision => {
                self.inner.update_if_current(id, &row.fingerprint(), patch).await
            }
            update => Ok(update),
        }
    }

    fn steps(&self) -> Result<&dyn DurableSteps> {
        let missing = || Error::not_applied(ErrorKind::Unsupported, "the store has no durable steps");
        self.inner.durable_steps().ok_or_else(missing)
    }

    fn failed(&self, call: u64, error: Error) -> Error {
        self.recorder.write(What::Failed { call, nothing: error.certainty() == Certainty::NotApplied });
        error
    }
}

fn change(id: JobId, current: &Fingerprint, patch: &Patch) -> history::Change {
    let fails = patch.failure.is_some();
    history::Change { job: id, from: current.revision, to: patch.revision, state: patch.state, fails }
}

fn asked(job: &NewJob) -> Asked {
    let key = job.unique_key.as_ref().map(ToString::to_string);
    Asked { job: job.id, key, max_attempts: job.max_attempts.get() }
}

fn micros(delay: Delay) -> u64 {
    u64::try_from(delay.as_millis()).unwrap_or(0).saturating_mul(1_000)
}

fn action(action: &StepAction) -> Action {
    match action {
        StepAction::Begin => Action::Begin,
        StepAction::Finish(value) => Action::Finish(value.clone()),
        StepAction::Wait(NewWait { event, suspension }) => Action::Wait {
            event: event.clone(),
            // Of a time by the store's clock nothing is known here.
            time: match suspension.available {
                Some(When::After(delay)) => micros(delay),
                _ => 0,
            },
            to: suspension.revision,
        },
    }
}

fn answer(update: &Update) -> Answer {
    match update {
        Update::Applied(row) => Answer::Applied(row.clone()),
        Update::Conflict(row) => Answer::Conflict(row.clone()),
        Update::Missing | Update::Unreadable(_) => Answer::Missing,
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Backend for Recording {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn migrate(&self) -> Result<()> {
        self.inner.migrate().await
    }

    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let call = self.recorder.call();
        self.recorder.write(What::Enqueue { call, jobs: jobs.iter().map(asked).collect() });
        let answers = self.inner.enqueue(jobs).await.map_err(|error| self.failed(call, error))?;
        let stored = answers.iter().map(|answer| !matches!(answer, Enqueued::Duplicate { .. })).collect();
        self.recorder.write(What::Enqueued { call, stored });
        Ok(answers)
    }

    async fn get(&self, id: JobId) -> Result<Option<Job>> {
        self.inner.get(id).await
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed> {
        let call = self.recorder.call();
        self.recorder.write(What::Claim { call });
        let claimed = self.inner.claim(request).await.map_err(|error| self.failed(call, error))?;
        let jobs = claimed.jobs.iter().map(|job| job.execution.clone()).collect();
        self.recorder.write(What::Claimed { call, jobs });
        Ok(claimed)
    }

    async fn update_if_current(&self, id: JobId, current: &Fingerprint, patch: &Patch) -> Result<Update> {
        let call = self.recorder.call();
        self.recorder.write(What::Update { call, changes: vec![change(id, current, patch)] });
        let update = self.update(id, current, patch).await;
        let update = update.map_err(|error| self.failed(call, error))?;
        self.recorder.write(What::Updated { call, answers: vec![answer(&update)] });
        Ok(update)
    }

    async fn extend_leases(&self, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        self.inner.extend_leases(held, lease).await
    }

    async fn stale(&self, after: Option<StaleCursor>, limit: Limit) -> Result<Page<Execution, StaleCursor>> {
        self.inner.stale(after, limit).await
    }

    async fn claimed_by(
        &self,
        worker: &WorkerId,
        older_than: Delay,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Execution, JobId>> {
        self.inner.claimed_by(worker, older_than, after, limit).await
    }

    async fn update_many_if_current(&self, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        let call = self.recorder.call();
        let changes = updates.iter().map(|update| change(update.id, &update.current, &update.patch)).collect();
        self.recorder.write(What::Update { call, changes });
        let made = async {
            if !self.by_id {
                return self.inner.update_many_if_current(updates).await;
            }
            let mut answers = Vec::new();
            for update in updates {
                answers.push(self.update(update.id, &update.current, &update.patch).await?);
            }
            Ok(answers)
        };
        let is_whole = updates.len() == 1 || self.inner.capabilities().atomic_batches;
        let answers = made.await.inspect_err(|error| {
            // Where batches are not whole it speaks of the row that failed: others may be written.
            let nothing = is_whole && error.certainty() == Certainty::NotApplied;
            self.recorder.write(What::Failed { call, nothing });
        })?;
        self.recorder.write(What::Updated { call, answers: answers.iter().map(answer).collect() });
        Ok(answers)
    }

    async fn wait_for_work(&self, queues: &[Name]) -> Result<()> {
        self.inner.wait_for_work(queues).await
    }

    fn durable_steps(&self) -> Option<&dyn DurableSteps> {
        self.inner.durable_steps().map(|_| self as &dyn DurableSteps)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl DurableSteps for Recording {
    async fn steps(&self, id: JobId) -> Result<Vec<Step>> {
        let call = self.recorder.call();
        self.recorder.write(What::Look { call, job: id });
        let steps = self.steps()?.steps(id).await.map_err(|error| self.failed(call, error))?;
        self.recorder.write(What::Looked { call, steps: steps.iter().map(Seen::from).collect() });
        Ok(steps)
    }

    async fn write_step(&self, write: &StepWrite) -> Result<Stepped> {
        let call = self.recorder.call();
        let (job, name, from, action) = (write.id, write.name.clone(), write.current.revision, action(&write.action));
        self.recorder.write(What::Step { call, job, name, from, action });
        let stepped = self.steps()?.write_step(write).await.map_err(|error| self.failed(call, error))?;
        let step = stepped.step.as_ref().map(Seen::from);
        self.recorder.write(What::Stepped { call, answer: answer(&stepped.update), step });
        Ok(stepped)
    }

    async fn hand_over(&self, update: &UpdateRequest, successor: &NewJob) -> Result<(Update, Option<Enqueued>)> {
        let call = self.recorder.call();
        let change = change(update.id, &update.current, &update.patch);
        self.recorder.write(What::HandOver { call, change, successor: asked(successor) });
        let handed = self.steps()?.hand_over(update, successor).await;
        let handed = handed.map_err(|error| self.failed(call, error))?;
        self.recorder.write(What::HandedOver { call, answer: answer(&handed.0) });
        Ok(handed)
    }

    async fn emit(&self, event: &NewEvent) -> Result<Emitted> {
        let call = self.recorder.call();
        let NewEvent { key, payload, keep } = event.clone();
        self.recorder.write(What::Emit { call, event: key, payload, keep: micros(keep) });
        let emitted = self.steps()?.emit(event).await.map_err(|error| self.failed(call, error))?;
        let kept = match &emitted {
            Emitted::New { .. } => None,
            Emitted::Kept(payload) => Some(payload.clone()),
        };
        self.recorder.write(What::Emitted { call, kept });
        Ok(emitted)
    }

    async fn time_out_waits(&self, limit: Limit) -> Result<Vec<JobId>> {
        let call = self.recorder.call();
        self.recorder.write(What::TimeOut { call });
        let jobs = self.steps()?.time_out_waits(limit).await.map_err(|error| self.failed(call, error))?;
        self.recorder.write(What::TimedOut { call, jobs: jobs.clone() });
        Ok(jobs)
    }

    async fn purge_events(&self, limit: Limit) -> Result<u64> {
        self.steps()?.purge_events(limit).await
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Inspect for Recording {
    async fn list(&self, filter: &ListFilter, after: Option<JobId>, limit: Limit) -> Result<Page<Job, JobId>> {
        self.inner.list(filter, after, limit).await
    }

    async fn counts(&self) -> Result<Vec<Count>> {
        self.inner.counts().await
    }

    async fn purge(&self, state: JobState, older_than: Delay, limit: Limit) -> Result<u64> {
        self.inner.purge(state, older_than, limit).await
    }
}
