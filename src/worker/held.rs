//! What the worker holds: every claim from the claim's answer until its settle is answered or given up.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use queue_core::Execution;
use queue_core::Held;
use queue_core::JobId;
use tokio::sync::watch;
use tokio::time::Instant;

use super::cancel::CancelReason;
use super::cancel::CancelSource;
use super::cancel::CancelToken;
use super::report::Counted;

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
    settling: watch::Sender<Settling>,
}

/// A write of the claim's that only its own answer judges, not a heartbeat. If nothing is recorded by the time that this is
/// dropped, another one may be offered.
#[derive(Debug)]
pub(super) struct UnderWay(Arc<Claim>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.settling.send_if_modified(|settling| {
            let given_up = matches!(settling, Settling::Writing(_));
            if given_up {
                *settling = Settling::Not;
            }
            given_up
        });
    }
}

/// Whether a claim has an outcome.
#[derive(Clone, Copy, Debug)]
enum Settling {
    Not,
    /// A write is under way that may be given up.
    Writing(Instant),
    /// The settler has it.
    Since(Instant),
    /// By its handler, and how it counts.
    Recorded(Counted),
}

impl Claim {
    /// `None` if the store gave a job that it does not show as held.
    pub(super) fn new(execution: Execution, deadline: Instant) -> Option<Arc<Self>> {
        Some(Arc::new(Self {
            held: Held::of(&execution)?,
            execution,
            cancel: CancelSource::default(),
            deadline: Mutex::new(deadline),
            settling: watch::Sender::new(Settling::Not),
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
        self.begin(Settling::Since(Instant::now()))
    }

    /// The same for a write that may be given up.
    pub(super) fn begin_write(self: &Arc<Self>) -> Option<UnderWay> {
        self.begin(Settling::Writing(Instant::now())).then(|| UnderWay(Arc::clone(self)))
    }

    fn begin(&self, how: Settling) -> bool {
        self.settling.send_if_modified(|settling| {
            let is_first = matches!(settling, Settling::Not);
            if is_first {
                *settling = how;
            }
            is_first
        })
    }

    /// Resolves when no write is under way.
    pub(super) async fn written(&self) {
        let mut settling = self.settling.subscribe();
        // The sender is `self`.
        let _ = settling.wait_for(|settling| !matches!(settling, Settling::Writing(_))).await;
    }

    /// The handler has recorded the outcome.
    pub(super) fn recorded(&self, what: Counted) {
        self.settling.send_replace(Settling::Recorded(what));
    }

    pub(super) fn is_writing(&self) -> bool {
        matches!(*self.settling.borrow(), Settling::Writing(_))
    }

    /// What the handler has recorded.
    pub(super) fn recorded_as(&self) -> Option<Counted> {
        match *self.settling.borrow() {
            Settling::Recorded(what) => Some(what),
            _ => None,
        }
    }

    /// Whether heartbeats go on: an outcome that cannot be recorded is covered for so long.
    pub(super) fn is_renewed(&self, cover: Duration) -> bool {
        self.settling_for().is_none_or(|pending| pending < cover)
    }

    /// For how long the outcome has been pending; `None` while there is none.
    pub(super) fn settling_for(&self) -> Option<Duration> {
        match *self.settling.borrow() {
            Settling::Not => None,
            Settling::Writing(since) | Settling::Since(since) => Some(since.elapsed()),
            // Its lease has gone with it.
            Settling::Recorded(_) => Some(Duration::MAX),
        }
    }
}

/// All claims, by job.
#[derive(Debug, Default)]
pub(super) struct HeldJobs(Mutex<HashMap<JobId, Entry>>);

#[derive(Debug)]
enum Entry {
    Held(Arc<Claim>),
    /// Started, and its outcome cannot be recorded. It is no orphan, which would get its attempt back: the lease ends it.
    GivenUp {
        since: Instant,
    },
}

impl HeldJobs {
    /// Takes a claim up. An older one of the same job is lost by that: the store gave the job out again.
    pub(super) fn insert(&self, claim: Arc<Claim>) {
        let now = claim.execution().to_string();
        if let Some(Entry::Held(older)) = lock(&self.0).insert(claim.held.id, Entry::Held(claim)) {
            older.cancel(CancelReason::LeaseLost { now });
        }
    }

    /// Puts a claim in the place of an older one of the same worker, which it follows.
    pub(super) fn replace(&self, older: &Arc<Claim>, claim: Arc<Claim>) {
        let mut entries = lock(&self.0);
        if is_held(&entries, older) || !entries.contains_key(&claim.held.id) {
            entries.insert(claim.held.id, Entry::Held(claim));
        }
    }

    /// Drops a claim; false if it was dropped before.
    pub(super) fn remove(&self, claim: &Arc<Claim>) -> bool {
        let mut entries = lock(&self.0);
        let is_held = is_held(&entries, claim);
        if is_held {
            entries.remove(&claim.held.id);
        }
        is_held
    }

    /// Drops a claim whose outcome cannot be recorded. Its lease should be long past after `forget`.
    pub(super) fn give_up(&self, claim: &Arc<Claim>, forget: Duration) {
        let mut entries = lock(&self.0);
        if is_held(&entries, claim) {
            entries.retain(|_, entry| !matches!(entry, Entry::GivenUp { since } if since.elapsed() >= forget));
            entries.insert(claim.held.id, Entry::GivenUp { since: Instant::now() });
        }
    }

    /// Whether the job is held and its lease renewed: until its outcome has been pending for `cover`.
    pub(super) fn renews(&self, id: JobId, cover: Duration) -> bool {
        matches!(lock(&self.0).get(&id), Some(Entry::Held(claim)) if claim.is_renewed(cover))
    }

    /// Whether the job is held, or was given up and waits for its lease to run out.
    pub(super) fn knows(&self, id: JobId) -> bool {
        lock(&self.0).contains_key(&id)
    }

    pub(super) fn all(&self) -> Vec<Arc<Claim>> {
        let held = |entry: &Entry| match entry {
            Entry::Held(claim) => Some(Arc::clone(claim)),
            Entry::GivenUp { .. } => None,
        };
        lock(&self.0).values().filter_map(held).collect()
    }
}

fn is_held(entries: &HashMap<JobId, Entry>, claim: &Arc<Claim>) -> bool {
    matches!(entries.get(&claim.held.id), Some(Entry::Held(current)) if Arc::ptr_eq(current, claim))
}
