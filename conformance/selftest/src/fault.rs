//! What a fault is: a name, what is wrong, who must notice, and the few lines that differ from a right backend.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use queue_conformance::BoxError;
use queue_conformance::CallerTransaction;
use queue_core::*;

use crate::broken::Real;

/// One mistake.
#[derive(Clone, Copy)]
pub struct Fault {
    /// `group::mistake`, or `group::mistake/variant`: variants of one mistake count once.
    pub name: &'static str,
    /// What such a backend does, in one sentence.
    pub what: &'static str,
    /// The cases that must catch it, every time; the one made for it first.
    pub caught_by: &'static [&'static str],
    /// It is put round the reference.
    pub reference: bool,
    /// It is put round the SQLite backend.
    pub everywhere: bool,
    /// A case that does not end, or that panics, has caught it too.
    pub hangs: bool,
    pub(crate) wrong: &'static dyn Wrong,
}

impl Fault {
    /// No fault at all: the wrapper itself must change nothing.
    pub(crate) const NONE: Self = Self::new("none", &Right, "It is right.", &[]);

    pub(crate) const fn new(
        name: &'static str,
        wrong: &'static dyn Wrong,
        what: &'static str,
        caught_by: &'static [&'static str],
    ) -> Self {
        Self { name, what, caught_by, reference: true, everywhere: false, hangs: false, wrong }
    }

    /// Needs nothing but the contract and the harness' hooks.
    pub(crate) const fn everywhere(mut self) -> Self {
        self.everywhere = true;
        self
    }

    /// Makes no difference round the reference: it has no transactions, and no claim waits for a lock there.
    pub(crate) const fn not_round_the_reference(mut self) -> Self {
        (self.reference, self.everywhere) = (false, true);
        self
    }

    pub(crate) const fn hangs(mut self) -> Self {
        self.hangs = true;
        self
    }

    /// The mistake without its variant.
    pub fn mistake(&self) -> &'static str {
        self.name.split('/').next().unwrap_or(self.name)
    }
}

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fault").field("name", &self.name).finish_non_exhaustive()
    }
}

struct Right;

impl Wrong for Right {}

/// A backend's answers, where they differ from those of the right one that `real` is a handle of.
#[async_trait]
pub(crate) trait Wrong: Send + Sync {
    fn capabilities(&self, real: &Real) -> Capabilities {
        real.handle.capabilities()
    }

    /// A handle is being opened.
    fn connected(&self, real: &Real) {
        let _ = real;
    }

    async fn migrate(&self, real: &Real) -> Result<()> {
        real.handle.migrate().await
    }

    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        real.handle.enqueue(jobs).await
    }

    async fn get(&self, real: &Real, id: JobId) -> Result<Option<Job>> {
        real.handle.get(id).await
    }

    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        real.handle.claim(request).await
    }

    /// Spoils a compare-and-update before it is made, in the single form and in batches.
    async fn ask(&self, real: &Real, update: &mut UpdateRequest) -> Result<()> {
        let _ = (real, update);
        Ok(())
    }

    /// Spoils the answer to a compare-and-update, in the single form and in batches.
    async fn answer(&self, real: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        let _ = (real, asked);
        answer
    }

    async fn update(&self, real: &Real, update: &UpdateRequest) -> Result<Update> {
        let mut asked = update.clone();
        self.ask(real, &mut asked).await?;
        let answer = real.update(&asked).await;
        self.answer(real, update, answer).await
    }

    async fn update_many(&self, real: &Real, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        let mut asked = updates.to_vec();
        for update in &mut asked {
            self.ask(real, update).await?;
        }
        let mut answers = Vec::with_capacity(updates.len());
        for (update, answer) in updates.iter().zip(real.handle.update_many_if_current(&asked).await?) {
            answers.push(self.answer(real, update, Ok(answer)).await?);
        }
        Ok(answers)
    }

    async fn extend_leases(&self, real: &Real, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        real.handle.extend_leases(held, lease).await
    }

    async fn stale(
        &self,
        real: &Real,
        after: Option<StaleCursor>,
        limit: Limit,
    ) -> Result<Page<Execution, StaleCursor>> {
        real.handle.stale(after, limit).await
    }

    async fn claimed_by(
        &self,
        real: &Real,
        worker: &WorkerId,
        older_than: Delay,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Execution, JobId>> {
        real.handle.claimed_by(worker, older_than, after, limit).await
    }

    async fn wait_for_work(&self, real: &Real, queues: &[Name]) -> Result<()> {
        real.handle.wait_for_work(queues).await
    }

    async fn list(
        &self,
        real: &Real,
        filter: &ListFilter,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Job, JobId>> {
        real.handle.list(filter, after, limit).await
    }

    async fn counts(&self, real: &Real) -> Result<Vec<Count>> {
        real.handle.counts().await
    }

    async fn purge(&self, real: &Real, state: JobState, older_than: Delay, limit: Limit) -> Result<u64> {
        real.handle.purge(state, older_than, limit).await
    }

    /// Whether a handle gives the contract of durable steps away.
    fn passes_steps_on(&self) -> bool {
        true
    }

    async fn steps(&self, real: &Real, id: JobId) -> Result<Vec<Step>> {
        real.steps()?.steps(id).await
    }

    async fn write_step(&self, real: &Real, write: &StepWrite) -> Result<Stepped> {
        real.steps()?.write_step(write).await
    }

    async fn hand_over(
        &self,
        real: &Real,
        update: &UpdateRequest,
        successor: &NewJob,
    ) -> Result<(Update, Option<Enqueued>)> {
        real.steps()?.hand_over(update, successor).await
    }

    async fn emit(&self, real: &Real, event: &NewEvent) -> Result<Emitted> {
        real.steps()?.emit(event).await
    }

    async fn time_out_waits(&self, real: &Real, limit: Limit) -> Result<Vec<JobId>> {
        real.steps()?.time_out_waits(limit).await
    }

    async fn purge_events(&self, real: &Real, limit: Limit) -> Result<u64> {
        real.steps()?.purge_events(limit).await
    }

    async fn begin(
        &self,
        real: Arc<Real>,
        settles: Option<&Execution>,
    ) -> Result<Box<dyn CallerTransaction>, BoxError> {
        real.store.begin(settles).await
    }
}
