//! How a handler learns that it should end.

use std::fmt;
use std::time::Duration;

use tokio::sync::watch;

/// Why a handler should end.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CancelReason {
    /// The claim is somebody else's, or nobody's, by now: nothing that this handler reports will be recorded.
    LeaseLost {
        /// What became of the job, as in `attempt 2 by web-2/91bc (running, fence 5)`.
        now: String,
    },
    /// The lease could not be renewed in time. The claim may be lost; the outcome is still offered, and the fence decides.
    LeaseUncertain,
    /// An operator canceled the job.
    Canceled {
        /// The reason given.
        reason: String,
    },
    /// The attempt took as long as its kind may: it is dropped and counts as failed unless its handler ends now.
    Timeout {
        /// How long that is.
        after: Duration,
    },
    /// The worker stops and its grace is over: the job is given back unless its handler ends now.
    Shutdown,
}

impl fmt::Display for CancelReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LeaseLost { now } => write!(f, "lease lost: {now}"),
            Self::LeaseUncertain => f.write_str("lease uncertain"),
            Self::Canceled { reason } => write!(f, "canceled: {reason}"),
            Self::Timeout { after } => write!(f, "timed out after {after:?}"),
            Self::Shutdown => f.write_str("shutdown"),
        }
    }
}

/// Fires when a handler should end. Clones share it; it may be moved to other tasks and threads.
#[derive(Clone, Debug)]
pub struct CancelToken(watch::Receiver<Option<CancelReason>>);

impl CancelToken {
    /// Whether it has fired.
    pub fn is_canceled(&self) -> bool {
        self.0.borrow().is_some()
    }

    /// Why it has fired. "Lease uncertain" may give way to a reason that is certain.
    pub fn reason(&self) -> Option<CancelReason> {
        self.0.borrow().clone()
    }

    /// Resolves when it fires, at once if it has.
    pub async fn canceled(&self) -> CancelReason {
        let mut receiver = self.0.clone();
        if let Ok(reason) = receiver.wait_for(Option::is_some).await
            && let Some(reason) = reason.clone()
        {
            return reason;
        }
        // Nobody is left to fire it.
        std::future::pending().await
    }
}

/// The end of the token that the worker holds.
#[derive(Debug, Default)]
pub(super) struct CancelSource(watch::Sender<Option<CancelReason>>);

impl CancelSource {
    pub(super) fn token(&self) -> CancelToken {
        CancelToken(self.0.subscribe())
    }

    /// Fires, unless it has fired for a reason that is certain.
    pub(super) fn fire(&self, reason: CancelReason) {
        self.0.send_if_modified(|current| {
            let fires = matches!(current, None | Some(CancelReason::LeaseUncertain));
            if fires {
                *current = Some(reason);
            }
            fires
        });
    }
}
