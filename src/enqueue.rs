//! A job on its way into a queue.

use std::fmt;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::time::Duration;

use queue_core::Backend;
use queue_core::Certainty;
use queue_core::Delay;
use queue_core::Enqueued;
use queue_core::Error;
use queue_core::ErrorKind;
use queue_core::Invalid;
use queue_core::Job;
use queue_core::JobId;
use queue_core::JobState;
use queue_core::Json;
use queue_core::Name;
use queue_core::NewJob;
use queue_core::Priority;
use queue_core::Timestamp;
use queue_core::Transactional;
use queue_core::Transition;
use queue_core::TransitionError;
use queue_core::UniqueKey;
use queue_core::When;

use crate::JobArgs;
use crate::Queue;
use crate::QueueError;
use crate::operate::REPLANS;

/// What became of a job that may replace another; see [`Enqueue::send_or_replace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Placed {
    /// It is there, or a job that cannot be replaced has its key.
    Enqueued(Enqueued),
    /// The waiting job of this id has its payload and due time now.
    Replaced(JobId),
}

impl Placed {
    /// The job that stands for the one enqueued.
    pub fn id(self) -> JobId {
        match self {
            Self::Enqueued(enqueued) => enqueued.id(),
            Self::Replaced(id) => id,
        }
    }
}

/// A job that is being put together; made by [`Queue::enqueue`] and stored when it is awaited.
///
/// Values are checked as they come, and the first bad one is the error at the end: nothing is written then.
#[must_use = "a job is stored when this is awaited or sent"]
pub struct Enqueue<'q, B: ?Sized> {
    queue: &'q Queue<B>,
    job: Result<NewJob, QueueError>,
}

impl<'q, B: ?Sized> Enqueue<'q, B> {
    pub(crate) fn new<A: JobArgs>(queue: &'q Queue<B>, args: &A) -> Self {
        let job = || {
            Ok(NewJob::new(
                A::QUEUE.parse().map_err(QueueError::invalid("queue"))?,
                A::KIND.parse().map_err(QueueError::invalid("kind"))?,
                Json::encode(args).map_err(QueueError::invalid("payload"))?,
            ))
        };
        Self { queue, job: job() }
    }

    fn set<T>(mut self, field: &'static str, value: Result<T, Invalid>, set: impl FnOnce(&mut NewJob, T)) -> Self {
        match (&mut self.job, value.map_err(QueueError::invalid(field))) {
            (Ok(job), Ok(value)) => set(job, value),
            (Ok(_), Err(error)) => self.job = Err(error),
            (Err(_), _) => {}
        }
        self
    }

    /// Another queue than that of the arguments' type.
    pub fn queue(self, name: impl Into<String>) -> Self {
        self.set("queue", Name::try_from(name.into()), |job, name| job.queue = name)
    }

    /// Due after this span, by the store's clock.
    pub fn delay(self, delay: Duration) -> Self {
        self.set("delay", Delay::try_from(delay), |job, delay| job.available = When::After(delay))
    }

    /// Due at this instant.
    pub fn at(self, instant: Timestamp) -> Self {
        self.set("at", Ok(instant), |job, instant| job.available = When::At(instant))
    }

    /// Its place among the due jobs of its queue: 0 first, 9 last, 5 by default.
    pub fn priority(self, number: u8) -> Self {
        self.set("priority", Priority::new(number), |job, priority| job.priority = priority)
    }

    /// How many times it may be started before a failure is final; 20 by default.
    pub fn max_attempts(self, attempts: u32) -> Self {
        let attempts = NonZeroU32::new(attempts).ok_or_else(|| Invalid::OutOfRange {
            what: "max_attempts",
            value: attempts.to_string(),
            min: "1".into(),
            max: u32::MAX.to_string(),
        });
        self.set("max_attempts", attempts, |job, attempts| job.max_attempts = attempts)
    }

    /// At most one active job of a queue has this key; the empty one is a key too.
    pub fn unique_key(self, key: impl Into<String>) -> Self {
        self.set("unique_key", UniqueKey::try_from(key.into()), |job, key| job.unique_key = Some(key))
    }

    /// An id of one's own. Enqueueing the same id with the same content again is harmless.
    pub fn id(self, id: impl Into<JobId>) -> Self {
        self.set("id", Ok(id.into()), |job, id| job.id = id)
    }

    /// The same from text.
    pub fn id_text(self, id: &str) -> Self {
        self.set("id", id.parse(), |job, id| job.id = id)
    }

    /// The job itself, unsent: to enqueue it with others by [`Queue::enqueue_many`].
    ///
    /// # Errors
    ///
    /// The first bad value.
    pub fn into_job(self) -> Result<NewJob, QueueError> {
        self.job
    }
}

impl<B: Backend + ?Sized> Enqueue<'_, B> {
    /// Stores the job.
    ///
    /// # Errors
    ///
    /// The first bad value; a payload over the store's cap, an id of another job, or another failure of the store.
    pub async fn send(self) -> Result<Enqueued, QueueError> {
        only(self.queue.enqueue_many(&[self.job?]).await?)
    }

    /// Stores the job; or, if a job of the same kind that has its unique key is still waiting, gives that one this payload and due
    /// time. It keeps its id, its priority and its attempts. If it has been claimed by then, or has steps of an earlier run, it is a
    /// duplicate.
    ///
    /// Who enqueues the job that was replaced once more by its id gets the error
    /// [`ErrorKind::IdReused`]: its content is another by now.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send), and a failure of the store while it replaces.
    pub async fn send_or_replace(self) -> Result<Placed, QueueError> {
        let (queue, job) = (self.queue, self.job?);
        let replace = Transition::Replace { payload: job.payload.clone(), available: job.available };
        let jobs = [job];
        let mut replans = REPLANS;
        loop {
            let answer = only(queue.enqueue_many(&jobs).await?)?;
            let Enqueued::Duplicate { existing } = answer else {
                return Ok(Placed::Enqueued(answer));
            };
            let holder = queue.get(existing).await?;
            let is_meant = |job: &Job| job.state() == JobState::Waiting && job.kind == jobs[0].kind;
            match holder {
                // What it has done was for its arguments of before.
                Some(begun) if is_meant(&begun) && queue.has_steps(&begun).await? => {
                    return Ok(Placed::Enqueued(answer));
                }
                Some(waiting) if is_meant(&waiting) => match queue.decide(&waiting.execution, &replace).await {
                    Ok(_) => return Ok(Placed::Replaced(existing)),
                    Err(QueueError::NotFound { .. }) => {}
                    Err(QueueError::Transition(TransitionError::Conflict(conflict))) if !conflict.may_have_applied => {}
                    Err(error) => return Err(error),
                },
                Some(active) if active.state().is_active() => return Ok(Placed::Enqueued(answer)),
                // It has let go of the key meanwhile.
                _ => {}
            }
            if replans == 0 {
                return Ok(Placed::Enqueued(answer));
            }
            replans -= 1;
        }
    }
}

impl<B: Transactional + ?Sized> Enqueue<'_, B> {
    /// Stores the job in the caller's transaction; see [`Queue::enqueue_in`].
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send); the caller must roll back after one.
    pub async fn send_in(self, connection: &mut B::Connection) -> Result<Enqueued, QueueError> {
        only(self.queue.enqueue_in(connection, &[self.job?]).await?)
    }
}

fn only(answers: Vec<Enqueued>) -> Result<Enqueued, QueueError> {
    let missing = || Error::new(ErrorKind::Permanent, Certainty::Unknown, "the backend gave no answer for the job");
    Ok(answers.first().copied().ok_or_else(missing)?)
}

impl<'q, B: Backend + ?Sized> IntoFuture for Enqueue<'q, B> {
    type Output = Result<Enqueued, QueueError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'q>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.send())
    }
}

impl<B: ?Sized> fmt::Debug for Enqueue<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Enqueue").field("job", &self.job).finish_non_exhaustive()
    }
}
