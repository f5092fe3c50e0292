//! What a handler knows of its execution.

use std::sync::Arc;
use std::time::Instant;

use queue_core::Execution;
use queue_core::JobId;

use super::cancel::CancelToken;
use super::held::Claim;

/// What a handler knows of its execution.
#[derive(Clone, Debug)]
pub struct JobContext {
    claim: Arc<Claim>,
    token: CancelToken,
}

impl JobContext {
    pub(super) fn new(claim: Arc<Claim>) -> Self {
        let token = claim.token();
        Self { claim, token }
    }

    /// The job.
    pub fn id(&self) -> JobId {
        self.execution().id
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

    /// When the lease runs out unless a heartbeat renews it, by this machine's monotonic clock.
    pub fn deadline(&self) -> Instant {
        self.claim.deadline().into_std()
    }

    /// Fires when the handler should end.
    pub fn cancel_token(&self) -> &CancelToken {
        &self.token
    }
}
