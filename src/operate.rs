//! What operators do: cancel, run again, delete.

use std::time::Duration;

use queue_core::Backend;
use queue_core::Decision;
use queue_core::Delay;
use queue_core::Error;
use queue_core::Execution;
use queue_core::FailureText;
use queue_core::Inspect;
use queue_core::Job;
use queue_core::JobId;
use queue_core::JobState;
use queue_core::Limit;
use queue_core::ListFilter;
use queue_core::Settled;
use queue_core::Transition;
use queue_core::TransitionError;
use queue_core::Transitioner;

use crate::Queue;
use crate::QueueError;
use crate::repeat::Repeats;
use crate::repeat::may_pass;

/// How often a decision is made anew when the job keeps changing under it.
pub(crate) const REPLANS: usize = 16;

/// How many ended jobs one statement of [`Queue::purge`] deletes: few, so that workers are not held up.
const PURGE_BATCH: usize = 1_000;

/// How many jobs [`Queue::cancel_all`] and [`Queue::rerun_all`] read and change in one call of the store.
const PAGE: usize = 200;

/// What an operation on many jobs came to.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Bulk {
    /// So many jobs were changed.
    pub changed: u64,
    /// These were not, because they were changed by somebody else meanwhile, their unique key is taken, or the store failed.
    pub refused: Vec<(JobId, QueueError)>,
}

impl<B: Backend + ?Sized> Queue<B> {
    /// Cancels a job wherever it stands; a handler that runs it learns of it, with the reason, through its token.
    ///
    /// If the job changes meanwhile the decision is made anew, a bounded number of times.
    ///
    /// # Errors
    ///
    /// [`QueueError::Ended`], naming the state, if the job has ended already, by another cancellation included;
    /// [`QueueError::NotFound`]; or a failure of the store.
    pub async fn cancel(&self, id: JobId, reason: impl Into<FailureText>) -> Result<Execution, QueueError> {
        let cancel = Transition::Cancel { reason: reason.into() };
        let mut seen = self.get(id).await?.ok_or(QueueError::NotFound { id })?.execution;
        let mut replans = REPLANS;
        loop {
            match self.decide(&seen, &cancel).await {
                // If an earlier submission may have been applied, somebody may have undone it on purpose.
                Err(QueueError::Transition(TransitionError::Conflict(conflict)))
                    if replans > 0 && !conflict.may_have_applied =>
                {
                    seen = conflict.current;
                    replans -= 1;
                }
                other => return other,
            }
        }
    }

    /// Cancels a job as it was seen; if it has changed since, that is the error.
    ///
    /// # Errors
    ///
    /// As [`cancel`](Self::cancel), and a [`Conflict`](queue_core::Conflict) showing both moments.
    pub async fn cancel_job(&self, job: &Job, reason: impl Into<FailureText>) -> Result<Execution, QueueError> {
        self.decide(&job.execution, &Transition::Cancel { reason: reason.into() }).await
    }

    /// Runs an ended job again, from its first attempt; its recorded errors stay, its result goes.
    ///
    /// # Errors
    ///
    /// A job that has not ended; a unique key that another active job has by now; [`QueueError::NotFound`]; a job that
    /// somebody else changed meanwhile; or a failure of the store.
    pub async fn rerun(&self, id: JobId) -> Result<Execution, QueueError> {
        let seen = self.get(id).await?.ok_or(QueueError::NotFound { id })?.execution;
        self.decide(&seen, &Transition::Rerun).await
    }

    /// Decides once, and submits that one decision until the store has answered.
    pub(crate) async fn decide(&self, seen: &Execution, transition: &Transition) -> Result<Execution, QueueError> {
        if seen.state.is_final() && matches!(transition, Transition::Cancel { .. }) {
            return Err(QueueError::Ended { id: seen.id, state: seen.state });
        }
        let mut decision = Decision::new(seen, transition)?;
        let mut repeats = Repeats::new();
        loop {
            match Transitioner::new(&*self.backend).submit(&mut decision).await {
                Ok(Settled::Applied(execution) | Settled::AlreadyApplied(execution)) => return Ok(execution),
                Err(TransitionError::Backend(error)) => {
                    if !repeats.again(&error).await {
                        return Err(error.into());
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl<B: Inspect + ?Sized> Queue<B> {
    /// Cancels every job that matches and has not ended, page by page. Jobs that are enqueued meanwhile may be missed.
    ///
    /// # Errors
    ///
    /// A failure of the store while it lists jobs: those of the pages before stay canceled. What fails for a job by itself is told in
    /// [`Bulk::refused`].
    pub async fn cancel_all(&self, filter: &ListFilter, reason: impl Into<FailureText>) -> Result<Bulk, QueueError> {
        self.decide_all(filter, &Transition::Cancel { reason: reason.into() }, JobState::is_active).await
    }

    /// Runs every job again that matches and has ended, page by page, each as [`rerun`](Self::rerun) does.
    ///
    /// Filter by a state: otherwise completed jobs run again too.
    ///
    /// # Errors
    ///
    /// As [`cancel_all`](Self::cancel_all).
    pub async fn rerun_all(&self, filter: &ListFilter) -> Result<Bulk, QueueError> {
        self.decide_all(filter, &Transition::Rerun, JobState::is_final).await
    }

    async fn decide_all(
        &self,
        filter: &ListFilter,
        transition: &Transition,
        is_meant: impl Fn(JobState) -> bool,
    ) -> Result<Bulk, QueueError> {
        let (mut bulk, mut after) = (Bulk::default(), None);
        loop {
            let page = self.list(filter, after, PAGE).await?;
            let unreadable = page.unreadable.into_iter().map(|row| (row.id, Error::from(row).into()));
            bulk.refused.extend(unreadable);
            let mut decisions = Vec::with_capacity(page.items.len());
            for job in page.items.iter().filter(|job| is_meant(job.state())) {
                decisions.push(Decision::new(&job.execution, transition)?);
            }
            self.submit_all(decisions, &mut bulk).await;
            match page.next {
                Some(next) => after = Some(next),
                None => return Ok(bulk),
            }
        }
    }

    /// Submits decisions until each has an answer.
    async fn submit_all(&self, mut decisions: Vec<Decision>, bulk: &mut Bulk) {
        let mut repeats = Repeats::new();
        while !decisions.is_empty() {
            let answers = Transitioner::new(&*self.backend).submit_all(&mut decisions).await;
            let mut failed = Vec::new();
            for (decision, answer) in decisions.into_iter().zip(answers) {
                match answer {
                    Ok(_) => bulk.changed += 1,
                    Err(TransitionError::Backend(error)) if may_pass(&error) => failed.push((decision, error)),
                    Err(refused) => bulk.refused.push((decision.seen().id, refused.into())),
                }
            }
            let helps = failed.iter().find(|(_, error)| Repeats::can_help(error)).or(failed.first());
            let again = match helps {
                Some((_, error)) => repeats.again(error).await,
                None => false,
            };
            decisions = match again {
                true => failed.into_iter().map(|(decision, _)| decision).collect(),
                false => {
                    bulk.refused.extend(failed.into_iter().map(|(decision, error)| (decision.seen().id, error.into())));
                    Vec::new()
                }
            };
        }
    }

    /// Deletes the jobs that ended in this state at least `older_than` ago, batch by batch, and answers how many.
    ///
    /// # Errors
    ///
    /// A state that is not final, a span beyond what can be stored, or a failure of the store; the batches before it
    /// stay deleted.
    pub async fn purge(&self, state: JobState, older_than: Duration) -> Result<u64, QueueError> {
        let older_than = Delay::try_from(older_than).map_err(QueueError::invalid("older_than"))?;
        purge(|batch| self.backend.purge(state, older_than, batch)).await
    }

    /// Deletes the events that are kept no longer, batch by batch, and answers how many. Workers do it now and then.
    ///
    /// # Errors
    ///
    /// A store without durable steps, or another failure of it; the batches before it stay deleted.
    pub async fn purge_events(&self) -> Result<u64, QueueError> {
        let steps = self.backend.durable_steps().ok_or(QueueError::NoDurableSteps)?;
        purge(|batch| steps.purge_events(batch)).await
    }
}

/// Deletes batches until there is nothing more to delete.
async fn purge<F: Future<Output = Result<u64, Error>>>(old: impl Fn(Limit) -> F) -> Result<u64, QueueError> {
    let batch = Limit::new(PURGE_BATCH).map_err(QueueError::invalid("limit"))?;
    let (mut repeats, mut deleted) = (Repeats::new(), 0);
    loop {
        match old(batch).await {
            Ok(now) => {
                deleted += now;
                if now < u64::from(batch.get()) {
                    return Ok(deleted);
                }
                repeats = Repeats::new();
            }
            // Deleting again is harmless; what a lost answer deleted is only missing from the count.
            Err(error) if repeats.again(&error).await => {}
            Err(error) => return Err(error.into()),
        }
    }
}
