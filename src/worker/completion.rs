//! Completing a job in the transaction of what it wrote.

use std::fmt;
use std::ops::Deref;
use std::ops::DerefMut;
use std::sync::Arc;

use queue_core::Certainty;
use queue_core::Decision;
use queue_core::Error;
use queue_core::Json;
use queue_core::Transactional;
use queue_core::Transition;
use queue_core::Transitioner;
use serde::Serialize;

use super::JobContext;
use super::report::Counted;
use crate::QueueError;

/// A transaction in which a handler writes what is the application's and completes its job; made by [`JobContext::begin`].
///
/// It points to the connection, or session, of the database's driver. Dropped without [`complete`](Self::complete), also after an
/// error and at any await, it is rolled back: so let `?` end the handler after an error of the database, and write on in no
/// transaction that has had one.
///
/// ```no_run
/// # #[cfg(feature = "sqlite")] mod example {
/// # use fenced_queue::{JobArgs, JobContext, NotDone, Queue};
/// # use fenced_queue::sqlite::{SqliteBackend, sqlx};
/// # #[derive(serde::Serialize, serde::Deserialize)]
/// # struct Transfer { from: i64, to: i64, cents: i64 }
/// # impl JobArgs for Transfer { const KIND: &'static str = "transfer"; }
/// async fn transfer(
///     queue: Queue<SqliteBackend>, context: JobContext, args: Transfer,
/// ) -> Result<i64, NotDone> {
///     let mut transaction = context.begin(&queue).await?;
///     for (account, cents) in [(args.from, -args.cents), (args.to, args.cents)] {
///         sqlx::query("UPDATE accounts SET cents = cents + ?1 WHERE id = ?2")
///             .bind(cents).bind(account).execute(&mut *transaction).await?;
///     }
///     transaction.complete(&args.cents).await?; // an error if the job is not this handler's any more
///     Ok(args.cents)
/// }
/// # }
/// ```
#[must_use = "it is rolled back unless `complete` is awaited"]
pub struct JobTransaction<'c, B: Transactional + ?Sized> {
    context: &'c JobContext,
    backend: Arc<B>,
    transaction: B::Transaction,
}

impl<'c, B: Transactional + ?Sized> JobTransaction<'c, B> {
    pub(super) fn new(context: &'c JobContext, backend: Arc<B>, transaction: B::Transaction) -> Self {
        Self { context, backend, transaction }
    }

    /// Completes the job with this value as its result and commits, checked like every other outcome. What the handler returns
    /// after that changes nothing.
    ///
    /// A commit whose answer was lost is looked up: the row tells whether it was made.
    ///
    /// # Errors
    ///
    /// A value that is no JSON or over the store's cap; a [`Conflict`](queue_core::Conflict) if the job is not this handler's any more,
    /// or has an outcome; or a failure of the store. Nothing is kept then, the handler's own writes included; unless the
    /// certainty of the error is [`Unknown`](Certainty::Unknown).
    pub async fn complete<T: Serialize + ?Sized>(self, value: &T) -> Result<(), QueueError> {
        let Self { context, backend, mut transaction } = self;
        let result = Some(Json::encode(value).map_err(QueueError::invalid("result"))?);
        let mut decision = Decision::new(context.execution(), &Transition::Complete { result })?;
        // As long as this is under way nobody else offers an outcome; if it is given up, they may.
        let Some(_under_way) = context.claim.begin_write() else {
            return Err(QueueError::Settled { id: context.id() });
        };
        Transitioner::new(&*backend).submit_in(&mut transaction, &mut decision).await?;
        if let Err(error) = backend.commit(transaction).await {
            if error.certainty() == Certainty::NotApplied {
                return Err(error.into());
            }
            if !was_made(&*backend, &decision, &error).await? {
                // Not yet, at least: the server may still be about to make it.
                return Err(error.into());
            }
        }
        context.claim.recorded(Counted::Completed);
        Ok(())
    }
}

/// Whether the commit that failed with this error was made after all.
async fn was_made<B: Transactional + ?Sized>(
    backend: &B,
    decision: &Decision,
    error: &Error,
) -> Result<bool, QueueError> {
    let unknown = || Error::new(error.kind(), Certainty::Unknown, format!("{error}; and the job cannot be looked up"));
    let row = backend.get(decision.seen().id).await.map_err(|cause| unknown().with_source(cause))?;
    let revision = row.map(|job| job.execution.revision);
    if revision == decision.request().patch.revision {
        return Ok(true);
    }
    match revision == Some(decision.seen().revision) {
        true => Ok(false),
        // Somebody has changed it since, before or after a commit.
        false => Err(unknown().into()),
    }
}

impl<B: Transactional + ?Sized> Deref for JobTransaction<'_, B> {
    type Target = B::Connection;

    fn deref(&self) -> &B::Connection {
        &self.transaction
    }
}

impl<B: Transactional + ?Sized> DerefMut for JobTransaction<'_, B> {
    fn deref_mut(&mut self) -> &mut B::Connection {
        &mut self.transaction
    }
}

impl<B: Transactional + ?Sized> fmt::Debug for JobTransaction<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobTransaction").field("context", self.context).finish_non_exhaustive()
    }
}
