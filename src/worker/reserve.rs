//! Jobs that are reserved ahead of free slots. They are held and renewed like those that run, and their start is one more
//! compare-and-update.

use std::collections::VecDeque;
use std::sync::Arc;

use queue_core::Certainty;
use queue_core::Decision;
use queue_core::Job;
use queue_core::Settled;
use queue_core::Transition;
use queue_core::TransitionError;
use tokio::time::Instant;

use super::Shared;
use super::held::Claim;
use super::held::UnderWay;
use super::report::Counted;
use crate::repeat::may_pass;

/// The reserved jobs of a queue, in the order in which they were claimed.
#[derive(Default)]
pub(super) struct Reserved(VecDeque<Reservation>);

struct Reservation {
    claim: Arc<Claim>,
    job: Job,
    /// Kept over its repeats, so that a start whose answer was lost is recognised.
    start: Decision,
    /// A start was sent and its outcome is not known: a heartbeat that does not find the claim any more says nothing.
    under_way: Option<UnderWay>,
}

impl Reserved {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Keeps a job until there is a slot for it.
    pub(super) fn keep(&mut self, shared: &Shared, claim: Arc<Claim>, job: Job) {
        let start = Transition::Start { lease: shared.config.lease };
        match Decision::new(claim.execution(), &start) {
            Ok(start) => self.0.push_back(Reservation { claim, job, start, under_way: None }),
            // Whatever the store gave out, it is not reserved: it is left to its lease.
            Err(_) => drop(shared.held.remove(&claim)),
        }
    }

    /// All of them, to be given back.
    pub(super) fn take(&mut self) -> Vec<Arc<Claim>> {
        self.0.drain(..).map(|reservation| reservation.claim).collect()
    }

    /// Starts the next ones, and answers with those that are this worker's to run; and whether more can be started at once. What
    /// the store could not do is kept behind the others, to be asked for again.
    pub(super) async fn start(&mut self, shared: &Shared, most: usize) -> (Vec<(Arc<Claim>, Job)>, bool) {
        let mut batch: Vec<_> = self.0.drain(..most.min(self.0.len())).collect();
        // Lost meanwhile: a heartbeat has said so.
        batch.retain(|reservation| !reservation.claim.token().is_canceled());
        for reservation in &mut batch {
            if reservation.under_way.is_none() {
                reservation.under_way = reservation.claim.begin_write();
            }
        }
        let mut decisions: Vec<_> = batch.iter().map(|reservation| reservation.start.clone()).collect();
        let (sent, lease) = (Instant::now(), shared.config.lease.duration());
        let answers = shared.submit_all(&mut decisions).await;
        let mut started = Vec::with_capacity(batch.len());
        let mut failed = false;
        for ((reservation, start), answer) in batch.into_iter().zip(decisions).zip(answers) {
            let Reservation { claim, mut job, under_way, .. } = reservation;
            match answer {
                Ok(settled) => {
                    let deadline = match &settled {
                        Settled::Applied(_) => sent + lease,
                        // Its lease counts from a start that was sent before, not later than the last renewal.
                        Settled::AlreadyApplied(_) => claim.deadline(),
                    };
                    job.execution = settled.execution().clone();
                    if let Some(running) = Claim::new(job.execution.clone(), deadline) {
                        shared.held.replace(&claim, Arc::clone(&running));
                        started.push((running, job));
                    }
                }
                Err(TransitionError::Backend(error)) if may_pass(&error) => {
                    failed = true;
                    let under_way = under_way.filter(|_| error.certainty() == Certainty::Unknown);
                    self.0.push_back(Reservation { claim, job, start, under_way });
                }
                Err(error) => {
                    tracing::warn!(name: "worker.lease_lost", { job.id = %job.id(), %error }, "a reserved job cannot be started");
                    // Unless a heartbeat has found it out before.
                    if shared.held.remove(&claim) {
                        shared.count(Counted::Lost, 1);
                    }
                }
            }
        }
        let more = !failed || !started.is_empty();
        (started, more)
    }
}
