//! What a handler knows of its execution.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use queue_core::Decision;
use queue_core::Execution;
use queue_core::Inspect;
use queue_core::JobId;
use queue_core::Json;
use queue_core::Name;
use queue_core::Priority;
use queue_core::Transactional;
use queue_core::Transition;
use queue_core::Transitioner;
use queue_core::UniqueKey;
use serde::Serialize;

use super::cancel::CancelToken;
use super::completion::JobTransaction;
use super::held::Claim;
use super::overdue::Alarm;
use crate::Queue;
use crate::QueueError;

/// What a handler knows of its execution. Clones are of the same execution.
#[derive(Clone)]
pub struct JobContext {
    /// No more of the worker, so that a context which outlives it keeps no handler alive.
    pub(super) backend: Arc<dyn Inspect>,
    pub(super) claim: Arc<Claim>,
    pub(super) alarm: Arc<Alarm>,
    pub(super) token: CancelToken,
    pub(super) queue: Name,
    pub(super) kind: Name,
    pub(super) priority: Priority,
    pub(super) unique_key: Option<UniqueKey>,
    pub(super) deadline: Option<Instant>,
    pub(super) lease: Duration,
}

impl JobContext {
    /// The job.
    pub fn id(&self) -> JobId {
        self.execution().id
    }

    /// The job's queue.
    pub fn queue(&self) -> &Name {
        &self.queue
    }

    /// The job's kind.
    pub fn kind(&self) -> &Name {
        &self.kind
    }

    /// Which attempt this is, from 1.
    pub fn attempt(&self) -> u32 {
        self.execution().attempt
    }

    /// The number to hand to other systems, so that they can refuse an older writer: every claim of a job has a greater
    /// one than those before.
    pub fn fence(&self) -> u64 {
        self.execution().fence
    }

    /// The execution as it was claimed.
    pub fn execution(&self) -> &Execution {
        self.claim.execution()
    }

    /// When the attempt has taken as long as its kind may, by this machine's monotonic clock; `None` if there is no limit.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// When the lease runs out unless a heartbeat renews it, by this machine's monotonic clock.
    pub fn lease_deadline(&self) -> Instant {
        self.claim.deadline().into_std()
    }

    /// Fires when the handler should end.
    pub fn cancel_token(&self) -> &CancelToken {
        &self.token
    }

    /// Begins a transaction of the queue's store in which the handler writes what is the application's, and then completes the job:
    /// both are there, or neither. See [`JobTransaction`].
    ///
    /// Be brief: while it is open the lease may not be renewed (MongoDB, SQLite), and nothing else of this job can be written there, such as
    /// [`progress`](Self::progress) or a step: that would wait in vain.
    ///
    /// # Errors
    ///
    /// A failure of the store.
    pub async fn begin<B: Transactional + ?Sized>(
        &self,
        queue: &Queue<B>,
    ) -> Result<JobTransaction<'_, B>, QueueError> {
        let backend = Arc::clone(queue.backend());
        let transaction = backend.begin_for(self.execution()).await?;
        Ok(JobTransaction::new(self, backend, transaction))
    }

    /// Stores how far the work is, for operators to see: as the result of the job, which it is until the job ends or is given
    /// back. One write, checked like every other; call it now and then, not for every row.
    ///
    /// # Errors
    ///
    /// A value that is no JSON or over the store's cap; a [`Conflict`](queue_core::Conflict) if the job is not this handler's any
    /// more; or a failure of the store, after which the value may be stored or not.
    pub async fn progress<T: Serialize + ?Sized>(&self, value: &T) -> Result<(), QueueError> {
        let value = Json::encode(value).map_err(QueueError::invalid("progress"))?;
        let mut decision = Decision::new(self.execution(), &Transition::Progress { value })?;
        Transitioner::new(&*self.backend).submit(&mut decision).await?;
        Ok(())
    }
}

impl fmt::Debug for JobContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobContext").field("kind", &self.kind).field("claim", &self.claim).finish_non_exhaustive()
    }
}
