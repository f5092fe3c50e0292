//! What the worker holds: every claim from the claim's answer until its settle is answered or given up.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::OnceLock;
use std::sync::PoisonError;
use std::time::Duration;

use queue_core::Execution;
use queue_core::Held;
use queue_core::JobId;
use tokio::time::Instant;

use super::cancel::CancelReason;
use super::cancel::CancelSource;
use super::cancel::CancelToken;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks can panic halfway.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One claim.
#[derive(Debug)]
pub(super) struct Claim {
    execution: Execution,
    held: Held,
    cancel: CancelSource,
    deadline: Mutex<Instant>,
    settling: OnceLock<Instant>,
}

impl Claim {
    /// `None` if the store gave a job that it does not show as held.
    pub(super) fn new(execution: Execution, deadline: Instant) -> Option<Arc<Self>> {
        Some(Arc::new(Self {
            held: Held::of(&execution)?,
            execution,
            cancel: CancelSource::default(),
            deadline: Mutex::new(deadline),
            settling: OnceLock::new(),
        }))
    }

    pub(super) fn execution(&self) -> &Execution {
        &self.execution
    }

    pub(super) fn held(&self) -> &Held {
        &self.held
    }

    pub(super) fn token(&self) -> CancelToken {
        self.cancel.token()
    }

    pub(super) fn cancel(&self, reason: CancelReason) {
        self.cancel.fire(reason);
    }

    /// When the lease runs out, as far as this process can tell: never later than the store thinks.
    pub(super) fn deadline(&self) -> Instant {
        *lock(&self.deadline)
    }

    pub(super) fn renewed_until(&self, deadline: Instant) {
        *lock(&self.deadline) = deadline;
    }

    /// Whether the caller is the one to settle the claim: the first to ask is.
    pub(super) fn begin_settle(&self) -> bool {
        self.settling.set(Instant::now()).is_ok()
    }

    /// For how long the outcome has been pending; `None` while there is none.
    pub(super) fn settling_for(&self) -> Option<Duration> {
        self.settling.get().map(Instant::elapsed)
    }
}

/// All claims, by job.
#[derive(Debug, Default)]
pub(super) struct HeldJobs {
    claims: Mutex<HashMap<JobId, Arc<Claim>>>,
    given_up: Mutex<HashMap<JobId, Instant>>,
}

impl HeldJobs {
    /// Takes a claim up. An older one of the same job is lost by that: the store gave the job out again.
    pub(super) fn insert(&self, claim: Arc<Claim>) {
        let now = claim.execution().to_string();
        lock(&self.given_up).remove(&claim.held.id);
        if let Some(older) = lock(&self.claims).insert(claim.held.id, claim) {
            older.cancel(CancelReason::LeaseLost { now });
        }
    }

    /// Drops a claim; false if it was dropped before.
    pub(super) fn remove(&self, claim: &Arc<Claim>) -> bool {
        let mut held = lock(&self.claims);
        let is_held = held.get(&claim.held.id).is_some_and(|current| Arc::ptr_eq(current, claim));
        if is_held {
            held.remove(&claim.held.id);
        }
        is_held
    }

    /// Drops a claim that was started and whose outcome cannot be recorded. It is no orphan, which would get its attempt
    /// back: the lease is to end it, and that should be long past after `forget`.
    pub(super) fn give_up(&self, claim: &Arc<Claim>, forget: Duration) {
        if self.remove(claim) {
            let mut given_up = lock(&self.given_up);
            given_up.retain(|_, since| since.elapsed() < forget);
            given_up.insert(claim.held.id, Instant::now());
        }
    }

    /// Whether the job is held, or was given up and waits for its lease to run out.
    pub(super) fn knows(&self, id: JobId) -> bool {
        lock(&self.claims).contains_key(&id) || lock(&self.given_up).contains_key(&id)
    }

    pub(super) fn all(&self) -> Vec<Arc<Claim>> {
        lock(&self.claims).values().cloned().collect()
    }
}
