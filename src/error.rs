//! What can go wrong in the facade.

use std::time::Duration;

use queue_core::Error;
use queue_core::IllegalTransition;
use queue_core::Invalid;
use queue_core::JobId;
use queue_core::JobState;
use queue_core::TransitionError;

/// A call of [`Queue`](crate::Queue) that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// A value was refused before anything was written.
    #[error("{field}: {reason}")]
    Invalid {
        /// Which value.
        field: &'static str,
        /// What is wrong with it.
        reason: Invalid,
    },
    /// The URL's scheme, if it has one, belongs to no backend.
    #[error("{} in the URL; known are {known}", match .scheme {
        Some(scheme) => format!("unknown scheme `{scheme}`"),
        None => "no scheme".to_owned(),
    })]
    UnknownScheme {
        /// The scheme.
        scheme: Option<String>,
        /// The schemes that there are, in one text.
        known: String,
    },
    /// The URL's backend was not compiled in.
    #[error("scheme `{scheme}` needs the feature `{feature}` of fenced-queue, which is not enabled")]
    FeatureDisabled {
        /// The scheme.
        scheme: &'static str,
        /// The feature to enable.
        feature: &'static str,
    },
    /// There is no such job.
    #[error("there is no job {id}")]
    NotFound {
        /// The job.
        id: JobId,
    },
    /// The job has ended already; nothing was changed.
    #[error("job {id} has ended already: it is {state}")]
    Ended {
        /// The job.
        id: JobId,
        /// How it ended.
        state: JobState,
    },
    /// The handler's execution has an outcome already, or one under way; nothing was changed.
    #[error("this execution of job {id} has an outcome already")]
    Settled {
        /// The job.
        id: JobId,
    },
    /// The store keeps no steps and events.
    #[error("the store has no durable steps, and so keeps no events")]
    NoDurableSteps,
    /// The job may not make this move; or it was changed by somebody else, and nothing was changed by this call.
    #[error(transparent)]
    Transition(TransitionError),
    /// The store failed; see [`Error::kind`] and [`Error::certainty`].
    #[error(transparent)]
    Store(#[from] Error),
}

impl QueueError {
    pub(crate) fn invalid(field: &'static str) -> impl Fn(Invalid) -> Self {
        move |reason| Self::Invalid { field, reason }
    }
}

impl From<TransitionError> for QueueError {
    fn from(error: TransitionError) -> Self {
        match error {
            TransitionError::Backend(error) => Self::Store(error),
            TransitionError::Missing { id, .. } => Self::NotFound { id },
            other => Self::Transition(other),
        }
    }
}

impl From<IllegalTransition> for QueueError {
    fn from(error: IllegalTransition) -> Self {
        Self::Transition(error.into())
    }
}

/// A worker that cannot be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A value was refused.
    #[error("{what}: {reason}")]
    Invalid {
        /// Which value.
        what: &'static str,
        /// What is wrong with it.
        reason: Invalid,
    },
    /// A value was zero.
    #[error("{what} must not be zero")]
    Zero {
        /// Which value.
        what: &'static str,
    },
    /// More handlers at once, or reserved jobs, than a worker admits.
    #[error("a {what} of {value} is above {max}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// What was asked for.
        value: usize,
        /// The most that is allowed.
        max: usize,
    },
    /// A lease would run out after two lost heartbeats.
    #[error("a heartbeat every {heartbeat:?} is too slow for a lease of {lease:?}: at most a third of it is allowed")]
    Heartbeat {
        /// The interval.
        heartbeat: Duration,
        /// The lease.
        lease: Duration,
    },
    /// Two handlers for one kind.
    #[error("kind `{kind}` has two handlers")]
    DuplicateKind {
        /// The kind.
        kind: String,
    },
    /// One queue twice.
    #[error("queue `{queue}` is named twice")]
    DuplicateQueue {
        /// The queue.
        queue: String,
    },
    /// Only jobs that have ended are deleted for their age, and each state can have one.
    #[error("no retention, or a second one, can be given for the state {state}")]
    Retention {
        /// The state.
        state: JobState,
    },
    /// A kind needs durable steps, and the store has none.
    #[error("kind `{kind}` needs durable steps, which the store does not have")]
    NoDurableSteps {
        /// The kind.
        kind: String,
    },
    /// Nothing to run.
    #[error("a worker needs at least one handler")]
    NoHandlers,
}
