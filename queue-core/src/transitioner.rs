//! Plan, then compare-and-update, then tell the caller which way it went.

use crate::Backend;
use crate::Certainty;
use crate::Error;
use crate::ErrorKind;
use crate::Execution;
use crate::IllegalTransition;
use crate::JobId;
use crate::Revision;
use crate::Transactional;
use crate::Transition;
use crate::Update;
use crate::UpdateRequest;

/// A transition that was decided on what was seen of a job, ready to be written.
///
/// It keeps its new revision over all repeats, so that sending it again after a lost answer is
/// recognised exactly: it may be submitted as often as errors make it necessary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    seen: Execution,
    transition: &'static str,
    request: UpdateRequest,
    may_have_applied: bool,
}

impl Decision {
    /// Decides on a transition. `seen` is not changed.
    ///
    /// # Errors
    ///
    /// A move that the contract does not allow from what was seen.
    pub fn new(seen: &Execution, transition: &Transition) -> Result<Self, IllegalTransition> {
        let request =
            UpdateRequest { id: seen.id, current: transition.fingerprint(seen), patch: transition.plan(seen)? };
        Ok(Self::of(seen, transition.name(), request))
    }

    /// A compare-and-update that is no move of a job's life.
    pub(crate) fn of(seen: &Execution, transition: &'static str, request: UpdateRequest) -> Self {
        Self { seen: seen.clone(), transition, request, may_have_applied: false }
    }

    /// What the decision was based on.
    pub fn seen(&self) -> &Execution {
        &self.seen
    }

    /// The move's name.
    pub fn transition(&self) -> &'static str {
        self.transition
    }

    /// The compare-and-update that carries it out.
    pub fn request(&self) -> &UpdateRequest {
        &self.request
    }

    /// Awaits a call that submits it. If that is dropped, it may have applied.
    pub(crate) async fn send<'a, T, F>(&'a mut self, call: impl FnOnce(&'a UpdateRequest) -> F) -> T
    where
        F: Future<Output = T>,
    {
        let Self { request, may_have_applied, .. } = self;
        // Stays so if this future is dropped.
        let before = std::mem::replace(may_have_applied, true);
        let answer = call(request).await;
        *may_have_applied = before;
        answer
    }

    pub(crate) fn judge(&mut self, answer: Result<Update, Error>) -> Result<Settled, TransitionError> {
        let id = self.seen.id;
        let settled = match answer {
            Ok(Update::Applied(execution)) => Ok(Settled::Applied(execution)),
            Ok(Update::Conflict(current)) if self.wrote(current.revision) => Ok(Settled::AlreadyApplied(current)),
            Ok(Update::Conflict(current)) => Err(TransitionError::Conflict(Box::new(Conflict {
                transition: self.transition,
                expected: self.seen.clone(),
                current,
                may_have_applied: self.may_have_applied,
            }))),
            Ok(Update::Missing) => {
                let (transition, may_have_applied) = (self.transition, self.may_have_applied);
                Err(TransitionError::Missing { id, transition, may_have_applied })
            }
            Ok(Update::Unreadable(row)) => Err(self.failed(row.into())),
            Err(error) => Err(self.failed(error)),
        };
        match &settled {
            Ok(_) => {
                tracing::debug!(job.id = %id, transition = self.transition, fence = self.seen.fence, "job settled")
            }
            Err(error) => {
                tracing::debug!(job.id = %id, transition = self.transition, fence = self.seen.fence, %error, "job not settled")
            }
        }
        settled
    }

    /// A failure that was certainly not applied says nothing about the submissions before it.
    fn failed(&mut self, error: Error) -> TransitionError {
        self.may_have_applied |= error.certainty() == Certainty::Unknown;
        TransitionError::Backend(match self.may_have_applied {
            true => error.with_certainty(Certainty::Unknown),
            false => error,
        })
    }

    fn wrote(&self, revision: Revision) -> bool {
        self.request.patch.revision == Some(revision)
    }
}

/// A decision that is recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settled {
    /// By this call.
    Applied(Execution),
    /// By an earlier submission of the same decision, whose answer was lost.
    AlreadyApplied(Execution),
}

impl Settled {
    /// The job as the decision left it.
    pub fn execution(&self) -> &Execution {
        match self {
            Self::Applied(execution) | Self::AlreadyApplied(execution) => execution,
        }
    }
}

/// A transition that was not recorded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransitionError {
    /// The contract does not allow the move; nothing was sent.
    #[error(transparent)]
    Illegal(#[from] IllegalTransition),
    /// The job is not any more what the decision was based on; nothing was changed.
    #[error("{0}")]
    Conflict(Box<Conflict>),
    /// There is no such job any more; nothing was created.
    #[error("job {id}: {transition} found no such job")]
    Missing {
        /// The job.
        id: JobId,
        /// The move's name.
        transition: &'static str,
        /// An earlier submission ended with an unknown outcome: it may have been applied before the job was deleted.
        may_have_applied: bool,
    },
    /// The store failed. The certainty is about all submissions of the decision.
    #[error(transparent)]
    Backend(#[from] Error),
}

/// The two moments of a conflict.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Conflict {
    /// The move's name.
    pub transition: &'static str,
    /// What the decision was based on.
    pub expected: Execution,
    /// What is there now.
    pub current: Execution,
    /// An earlier submission ended with an unknown outcome: it may have been applied, and what is there now came after it.
    pub may_have_applied: bool,
}

impl std::fmt::Display for Conflict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { transition, expected, current, may_have_applied } = self;
        write!(f, "job {}: {transition} was decided on {expected}, now {current}", expected.id)?;
        match may_have_applied {
            true => f.write_str("; an earlier submission may have been applied before that"),
            false => Ok(()),
        }
    }
}

/// Carries transitions out on a store.
///
/// ```
/// use queue_core::*;
///
/// # async fn example(backend: &dyn Backend, job: &Job) -> Result<(), TransitionError> {
/// let cancel = Transition::Cancel { reason: "no longer needed".into() };
/// match Transitioner::new(backend).apply(&job.execution, &cancel).await {
///     Ok(settled) => println!("{}", settled.execution()),
///     Err(TransitionError::Conflict(conflict)) => println!("somebody was faster: {conflict}"),
///     Err(error) => return Err(error),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Transitioner<'a, B: ?Sized> {
    backend: &'a B,
}

impl<'a, B: Backend + ?Sized> Transitioner<'a, B> {
    /// For this store.
    pub fn new(backend: &'a B) -> Self {
        Self { backend }
    }

    /// Decides and submits, once.
    ///
    /// # Errors
    ///
    /// See [`TransitionError`]. To repeat after an error of the store, keep the [`Decision`] and use
    /// [`submit`](Self::submit): deciding anew would take one's own lost write for a conflict.
    pub async fn apply(&self, seen: &Execution, transition: &Transition) -> Result<Settled, TransitionError> {
        self.submit(&mut Decision::new(seen, transition)?).await
    }

    /// Submits a decision: for the first time, or again after an error of the store, or after a submission that was dropped.
    ///
    /// # Errors
    ///
    /// See [`TransitionError`].
    pub async fn submit(&self, decision: &mut Decision) -> Result<Settled, TransitionError> {
        let answer = self.update(decision).await;
        decision.judge(answer)
    }

    async fn update(&self, decision: &mut Decision) -> Result<Update, Error> {
        decision.send(|UpdateRequest { id, current, patch }| self.backend.update_if_current(*id, current, patch)).await
    }

    /// Submits a decision in the caller's transaction: it holds if that commits. After any error, a conflict too, roll back.
    ///
    /// # Errors
    ///
    /// As [`submit`](Self::submit).
    pub async fn submit_in(
        &self,
        connection: &mut B::Connection,
        decision: &mut Decision,
    ) -> Result<Settled, TransitionError>
    where
        B: Transactional,
    {
        let UpdateRequest { id, current, patch } = &decision.request;
        let answer = self.backend.update_if_current_in(connection, *id, current, patch).await;
        decision.judge(answer)
    }

    /// Submits many decisions in one call of the store, answered in order.
    ///
    /// If the call fails because of one row, the batch is halved until that row is by itself, so that it does not keep the
    /// others back. A store that cannot be reached, or is locked as a whole, is not asked again: all that is left gets that error.
    pub async fn submit_all(&self, decisions: &mut [Decision]) -> Vec<Result<Settled, TransitionError>> {
        let mut answers = Vec::with_capacity(decisions.len());
        // Batches that are still to be submitted, the first one last.
        let mut batches = vec![&mut *decisions];
        while let Some(batch) = batches.pop() {
            let error = match self.update_many(batch).await {
                Ok(updates) => {
                    answers.extend(batch.iter_mut().zip(updates).map(|(decision, update)| decision.judge(Ok(update))));
                    continue;
                }
                // The error is about the row that failed: those before it are written.
                Err(error) if batch.len() > 1 && !self.backend.capabilities().atomic_batches => {
                    error.with_certainty(Certainty::Unknown)
                }
                Err(error) => error,
            };
            let is_hopeless = self.is_hopeless(&error);
            if batch.len() > 1 && !is_hopeless {
                for decision in &mut *batch {
                    decision.may_have_applied |= error.certainty() == Certainty::Unknown;
                }
                let (first, second) = batch.split_at_mut(batch.len() / 2);
                batches.extend([second, first]);
                continue;
            }
            answers.extend(batch.iter_mut().map(|decision| decision.judge(Err(error.clone()))));
            if is_hopeless {
                let not_sent = error.with_certainty(Certainty::NotApplied);
                let left = batches.drain(..).rev().flatten();
                answers.extend(left.map(|decision| decision.judge(Err(not_sent.clone()))));
            }
        }
        answers
    }

    async fn update_many(&self, batch: &mut [Decision]) -> Result<Vec<Update>, Error> {
        if let [decision] = batch {
            return Ok(vec![self.update(decision).await?]);
        }
        let requests: Vec<_> = batch.iter().map(|decision| decision.request.clone()).collect();
        // Stays so if this future is dropped.
        let before: Vec<_> =
            batch.iter_mut().map(|decision| std::mem::replace(&mut decision.may_have_applied, true)).collect();
        let answer = self.backend.update_many_if_current(&requests).await;
        for (decision, before) in batch.iter_mut().zip(before) {
            decision.may_have_applied = before;
        }
        answer
    }

    /// Whether the error is about the store and not about a row.
    fn is_hopeless(&self, error: &Error) -> bool {
        match error.kind() {
            ErrorKind::Unavailable => true,
            // Where rows are not locked one by one, every other row would wait as long.
            ErrorKind::Transient => !self.backend.capabilities().skips_locked_rows,
            _ => false,
        }
    }
}
