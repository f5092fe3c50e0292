//! Giving back what nobody works on any more. Any worker may do it at any time: there is no leader.

use crate::Backend;
use crate::Decision;
use crate::Delay;
use crate::Error;
use crate::ErrorKind;
use crate::Execution;
use crate::JobId;
use crate::Lease;
use crate::Limit;
use crate::Settled;
use crate::Transition;
use crate::TransitionError;
use crate::Transitioner;
use crate::Unreadable;
use crate::WorkerId;

/// What a sweep did.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Sweep {
    /// Jobs that were put back (recovered, or released), or failed for good because their attempts are used up.
    pub recovered: Vec<Execution>,
    /// Jobs without a lease that got one.
    pub adopted: Vec<Execution>,
    /// Jobs that somebody else changed meanwhile: benign.
    pub skipped: usize,
    /// Jobs that the store failed to change, each with its error. They are tried again by the next sweep.
    pub failed: Vec<(JobId, TransitionError)>,
    /// Rows that cannot be read.
    pub unreadable: Vec<Unreadable>,
}

impl Sweep {
    /// Submits a page of decisions and notes what became of each.
    async fn submit<B: Backend + ?Sized>(&mut self, backend: &B, mut decisions: Vec<Decision>) -> Result<(), Error> {
        if decisions.is_empty() {
            return Ok(());
        }
        let answers = Transitioner::new(backend).submit_all(&mut decisions).await;
        for (decision, answer) in decisions.into_iter().zip(answers) {
            match answer {
                // Of what a sweep does, adoption alone keeps the revision.
                Ok(Settled::Applied(execution) | Settled::AlreadyApplied(execution)) => {
                    match decision.request().patch.revision {
                        Some(_) => self.recovered.push(execution),
                        None => self.adopted.push(execution),
                    }
                }
                Err(TransitionError::Conflict(_) | TransitionError::Missing { .. }) => self.skipped += 1,
                Err(TransitionError::Backend(error)) if error.kind() == ErrorKind::Unavailable => return Err(error),
                Err(error) => self.failed.push((decision.seen().id, error)),
            }
        }
        Ok(())
    }
}

/// Puts back every job whose lease has run out, and gives a lease to held jobs without one.
///
/// Each job is written by [`Transition::Recover`], so that one whose holder settled, or sent a heartbeat, after it was
/// listed stays untouched. A job without a lease is of unknown age (an older program's, or made by hand): it gets
/// `unset_lease`, and is recovered only after that has run out.
///
/// `is_held` says what the caller itself holds and is alive to renew: after a standstill or an outage it must not take its own
/// jobs away before its next heartbeat. Who holds nothing passes `|_| false`.
///
/// # Errors
///
/// A store that cannot list, or cannot be reached. The error of a single job does not end the sweep; it stands in
/// [`Sweep::failed`].
pub async fn recover_stale<B: Backend + ?Sized>(
    backend: &B,
    unset_lease: Lease,
    page: Limit,
    is_held: impl Fn(JobId) -> bool,
) -> Result<Sweep, Error> {
    let mut sweep = Sweep::default();
    let mut after = None;
    loop {
        let stale = backend.stale(after, page).await?;
        sweep.unreadable.extend(stale.unreadable);
        let mut decisions = Vec::with_capacity(stale.items.len());
        for seen in stale.items.iter().filter(|seen| !is_held(seen.id)) {
            let transition = match seen.lease_expires_at {
                Some(_) => Transition::Recover,
                None => Transition::Adopt { lease: unset_lease },
            };
            match Decision::new(seen, &transition) {
                Ok(decision) => decisions.push(decision),
                Err(illegal) => sweep.failed.push((seen.id, illegal.into())),
            }
        }
        sweep.submit(backend, decisions).await?;
        match stale.next {
            Some(next) => after = Some(next),
            None => return Ok(sweep),
        }
    }
}

/// Releases jobs that were claimed for a worker which never got the answer.
///
/// A worker calls it for itself. What it claimed longer than `grace` ago (by the store's clock) and does not hold *now* is an orphan: it
/// goes back with its attempt. `is_held` is asked after the list came back, so a job that was taken up meanwhile counts as held.
/// It must also say so of a job that was run and whose outcome was given up: that attempt was used, and its lease will end it.
///
/// # Errors
///
/// A store that cannot list, or cannot be reached.
pub async fn release_orphans<B: Backend + ?Sized>(
    backend: &B,
    worker: &WorkerId,
    grace: Delay,
    page: Limit,
    is_held: impl Fn(JobId) -> bool,
) -> Result<Sweep, Error> {
    let mut sweep = Sweep::default();
    let mut after = None;
    loop {
        let claimed = backend.claimed_by(worker, grace, after, page).await?;
        sweep.unreadable.extend(claimed.unreadable);
        let mut decisions = Vec::new();
        for seen in claimed.items.iter().filter(|seen| !is_held(seen.id)) {
            match Decision::new(seen, &Transition::Release) {
                Ok(decision) => decisions.push(decision),
                Err(illegal) => sweep.failed.push((seen.id, illegal.into())),
            }
        }
        sweep.submit(backend, decisions).await?;
        match claimed.next {
            Some(next) => after = Some(next),
            None => return Ok(sweep),
        }
    }
}
