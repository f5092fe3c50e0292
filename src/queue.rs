//! Producing and inspecting; `operate` has what operators do.

use std::fmt;
use std::sync::Arc;

use queue_core::Backend;
use queue_core::Count;
use queue_core::Enqueued;
use queue_core::Inspect;
use queue_core::Job;
use queue_core::JobId;
use queue_core::Limit;
use queue_core::ListFilter;
use queue_core::NewJob;
use queue_core::Page;
use queue_core::Step;
use queue_core::Transactional;
use serde::Serialize;

use crate::Emit;
use crate::Enqueue;
use crate::JobArgs;
use crate::QueueError;
use crate::connect;
use crate::repeat::Backoff;
use crate::repeat::Repeats;

/// A handle to the jobs of one store. Clones are cheap and share the store.
///
/// # Repeats
///
/// An enqueue, a cancellation and a rerun recognise their own repetition. They are made again, a few times and with
/// jitter, if the store was busy or the answer was lost. Whatever else fails is the caller's at once.
pub struct Queue<B: ?Sized = dyn Inspect> {
    pub(crate) backend: Arc<B>,
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

    /// An event for the jobs that wait for it, or come to wait as long as it is kept, to be awaited. If one of this key is kept already,
    /// nothing happens, and its payload is the answer: the first one wins.
    ///
    /// ```
    /// # use fenced_queue::{Emitted, MemoryBackend, Queue, QueueError};
    /// # async fn example() -> Result<(), QueueError> {
    /// # let queue = Queue::new(MemoryBackend::new());
    /// match queue.emit("paid/7", &1999).await? {
    ///     Emitted::New { woken } => println!("{woken} jobs go on"),
    ///     Emitted::Kept(payload) => println!("it was paid before: {payload}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// A key that is no name or begins with `fenced-queue/`; a payload over the cap; a store without durable steps; or another
    /// failure of the store, after which it may be emitted again.
    pub fn emit<T: Serialize + ?Sized>(&self, event: &str, payload: &T) -> Emit<'_, B> {
        Emit::new(self, event, payload)
    }

    /// What a job has done so far, and what it waits for, by name; none also if there is no such job.
    ///
    /// # Errors
    ///
    /// A store without durable steps, or another failure of it.
    pub async fn steps(&self, id: JobId) -> Result<Vec<Step>, QueueError> {
        let steps = self.backend.durable_steps().ok_or(QueueError::NoDurableSteps)?;
        Ok(steps.steps(id).await?)
    }

    /// Whether the job has done something that its next run will find.
    pub(crate) async fn has_steps(&self, job: &Job) -> Result<bool, QueueError> {
        match self.backend.durable_steps() {
            // One that was never claimed has done nothing.
            Some(steps) if job.execution.fence > 0 => Ok(!steps.steps(job.id()).await?.is_empty()),
            _ => Ok(false),
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

    /// Waits until the job has ended, and answers with it.
    ///
    /// It reads the job again and again, after pauses that grow from 20 milliseconds to one second: a database tells nobody that a
    /// job has ended. Give it a limit by `tokio::time::timeout`; it may be dropped at any time.
    ///
    /// # Errors
    ///
    /// [`QueueError::NotFound`], also if the job is deleted meanwhile; or a failure of the store that does not pass in about two
    /// seconds.
    pub async fn ended(&self, id: JobId) -> Result<Job, QueueError> {
        let mut pauses = Backoff::default();
        let mut repeats = Repeats::new();
        loop {
            match self.backend.get(id).await {
                Ok(None) => return Err(QueueError::NotFound { id }),
                Ok(Some(job)) if job.state().is_final() => return Ok(job),
                Ok(Some(_)) => {
                    repeats = Repeats::new();
                    tokio::time::sleep(pauses.pause()).await;
                }
                Err(error) => {
                    if !repeats.again_reading(&error).await {
                        return Err(error.into());
                    }
                }
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
