//! Producing, inspecting and operating.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use queue_core::Backend;
use queue_core::Count;
use queue_core::Decision;
use queue_core::Delay;
use queue_core::Enqueued;
use queue_core::Error;
use queue_core::Execution;
use queue_core::FailureText;
use queue_core::Inspect;
use queue_core::Job;
use queue_core::JobId;
use queue_core::JobState;
use queue_core::Limit;
use queue_core::ListFilter;
use queue_core::NewJob;
use queue_core::Page;
use queue_core::Settled;
use queue_core::Transactional;
use queue_core::Transition;
use queue_core::TransitionError;
use queue_core::Transitioner;

use crate::Enqueue;
use crate::JobArgs;
use crate::QueueError;
use crate::connect;
use crate::repeat::Repeats;

/// How often [`Queue::cancel`] decides anew when the job keeps changing under it.
const REPLANS: usize = 16;

/// How many ended jobs one statement of [`Queue::purge`] deletes: few, so that workers are not held up.
const PURGE_BATCH: usize = 1_000;

/// A handle to the jobs of one store. Clones are cheap and share the store.
///
/// # Repeats
///
/// An enqueue, a cancellation and a rerun recognise their own repetition. They are made again, a few times and with
/// jitter, if the store was busy or the answer was lost. Whatever else fails is the caller's at once.
pub struct Queue<B: ?Sized = dyn Inspect> {
    backend: Arc<B>,
}

impl Queue {
    /// Connects to the store of this URL, by the backend of its scheme, and brings its schema up to date.
    ///
    /// Where operators migrate separately, use [`connect_only`](Self::connect_only).
    ///
    /// # Errors
    ///
    /// A scheme that is unknown, or whose feature is not enabled; a store that cannot be reached or migrated. No
    /// message holds a user, a password or a parameter of the URL.
    pub async fn connect(url: &str) -> Result<Self, QueueError> {
        let queue = Self::connect_only(url).await?;
        queue.migrate().await?;
        Ok(queue)
    }

    /// Connects as [`connect`](Self::connect) does and leaves the schema alone.
    ///
    /// # Errors
    ///
    /// As `connect`.
    pub async fn connect_only(url: &str) -> Result<Self, QueueError> {
        connect::connect(url).await.map(Self::from)
    }
}

impl<B> Queue<B> {
    /// The jobs of this store: for a backend with a pool, options or a client of one's own.
    pub fn new(backend: B) -> Self {
        Arc::new(backend).into()
    }
}

impl<B: Inspect + 'static> Queue<B> {
    /// The same queue without its backend's type, as [`Queue::connect`] gives it.
    pub fn into_dyn(self) -> Queue {
        Queue { backend: self.backend }
    }
}

impl<B: ?Sized> Queue<B> {
    /// The store itself.
    pub fn backend(&self) -> &Arc<B> {
        &self.backend
    }
}

impl<B: Backend + ?Sized> Queue<B> {
    /// Brings the store's schema to this version. Harmless when it is there already, or when many do it at once.
    ///
    /// # Errors
    ///
    /// A store that cannot be reached, or whose schema is too new for this program.
    pub async fn migrate(&self) -> Result<(), QueueError> {
        Ok(self.backend.migrate().await?)
    }

    /// A job of these arguments, to be awaited, possibly after more has been said about it.
    ///
    /// ```
    /// # use fenced_queue::{JobArgs, MemoryBackend, Queue, QueueError};
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct Welcome { user: u64 }
    /// # impl JobArgs for Welcome { const KIND: &'static str = "welcome"; }
    /// # async fn example() -> Result<(), QueueError> {
    /// # let queue = Queue::new(MemoryBackend::new());
    /// let stored = queue.enqueue(&Welcome { user: 7 }).priority(2).unique_key("welcome-7").await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// If the answer of the store was lost and the enqueue had to be repeated, a new job may be reported as
    /// [`Enqueued::Existing`].
    pub fn enqueue<A: JobArgs>(&self, args: &A) -> Enqueue<'_, B> {
        Enqueue::new(self, args)
    }

    /// Stores many jobs in one call, answered in order. [`Enqueue::into_job`] makes them.
    ///
    /// # Errors
    ///
    /// A payload over the cap or an id of another job, naming the item; or another failure of the store.
    pub async fn enqueue_many(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, QueueError> {
        let mut repeats = Repeats::new();
        loop {
            let error = match self.backend.enqueue(jobs).await {
                Ok(answers) => return Ok(answers),
                Err(error) => error,
            };
            if !repeats.again(&error).await {
                return Err(error.into());
            }
        }
    }

    /// The job of this id, as it is now.
    ///
    /// # Errors
    ///
    /// A failure of the store, or a row that this program cannot read.
    pub async fn get(&self, id: JobId) -> Result<Option<Job>, QueueError> {
        Ok(self.backend.get(id).await?)
    }

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
    async fn decide(&self, seen: &Execution, transition: &Transition) -> Result<Execution, QueueError> {
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
    /// A page of the jobs that match, by id, after the cursor: [`Page::next`] of the page before.
    ///
    /// # Errors
    ///
    /// A limit of zero or above [`Limit::MAX`], or a failure of the store.
    pub async fn list(
        &self,
        filter: &ListFilter,
        after: Option<JobId>,
        limit: usize,
    ) -> Result<Page<Job, JobId>, QueueError> {
        let limit = Limit::new(limit).map_err(QueueError::invalid("limit"))?;
        Ok(self.backend.list(filter, after, limit).await?)
    }

    /// How many jobs there are by queue and state.
    ///
    /// # Errors
    ///
    /// A failure of the store.
    pub async fn counts(&self) -> Result<Vec<Count>, QueueError> {
        Ok(self.backend.counts().await?)
    }

    /// Deletes the jobs that ended in this state at least `older_than` ago, batch by batch, and answers how many.
    ///
    /// # Errors
    ///
    /// A state that is not final, a span beyond what can be stored, or a failure of the store; the batches before it
    /// stay deleted.
    pub async fn purge(&self, state: JobState, older_than: Duration) -> Result<u64, QueueError> {
        let older_than = Delay::try_from(older_than).map_err(QueueError::invalid("older_than"))?;
        let batch = Limit::new(PURGE_BATCH).map_err(QueueError::invalid("limit"))?;
        let mut deleted = 0;
        loop {
            let now = self.purge_batch(state, older_than, batch).await?;
            deleted += now;
            if now < u64::from(batch.get()) {
                return Ok(deleted);
            }
        }
    }

    async fn purge_batch(&self, state: JobState, older_than: Delay, batch: Limit) -> Result<u64, Error> {
        let mut repeats = Repeats::new();
        loop {
            let error = match self.backend.purge(state, older_than, batch).await {
                Ok(deleted) => return Ok(deleted),
                Err(error) => error,
            };
            // Deleting again is harmless; what a lost answer deleted is only missing from the count.
            if !repeats.again(&error).await {
                return Err(error);
            }
        }
    }
}

impl<B: Transactional + ?Sized> Queue<B> {
    /// Stores jobs in the caller's transaction: they exist if it commits. Nothing is repeated here; after an error the
    /// caller must roll back.
    ///
    /// # Errors
    ///
    /// As [`enqueue_many`](Self::enqueue_many).
    pub async fn enqueue_in(
        &self,
        connection: &mut B::Connection,
        jobs: &[NewJob],
    ) -> Result<Vec<Enqueued>, QueueError> {
        Ok(self.backend.enqueue_in(connection, jobs).await?)
    }
}

impl<B: ?Sized> From<Arc<B>> for Queue<B> {
    fn from(backend: Arc<B>) -> Self {
        Self { backend }
    }
}

impl<B: ?Sized> Clone for Queue<B> {
    fn clone(&self) -> Self {
        Self { backend: Arc::clone(&self.backend) }
    }
}

impl<B: ?Sized> fmt::Debug for Queue<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").finish_non_exhaustive()
    }
}
