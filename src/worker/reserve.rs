//! Jobs that are reserved ahead of free slots. They are held and renewed like those that run, and their start is one more
//! compare-and-update.

use std::collections::VecDeque;
use std::sync::Arc;

use queue_core::Decision;
use queue_core::ErrorKind;
use queue_core::Job;
use queue_core::Transition;
use queue_core::TransitionError;
use queue_core::Transitioner;
use tokio::time::Instant;
use tokio::time::timeout;

use super::Shared;
use super::heartbeat::no_answer;
use super::held::Claim;
use super::report::Counted;

/// The reserved jobs of a queue, in the order in which they were claimed.
#[derive(Default)]
pub(super) struct Reserved(VecDeque<Reservation>);

struct Reservation {
    claim: Arc<Claim>,
    job: Job,
    /// Kept over its repeats, so that a start whose answer was lost is recognised.
    start: Decision,
}

impl Reserved {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Keeps a job until there is a slot for it.
    pub(super) fn keep(&mut self, shared: &Shared, claim: Arc<Claim>, job: Job) {
        let start = Transition::Start { lease: shared.config.lease };
        match Decision::new(claim.execution(), &start) {
            Ok(start) => self.0.push_back(Reservation { claim, job, start }),
            // Whatever the store gave out, it is not reserved: it is left to its lease.
            Err(_) => drop(shared.held.remove(&claim)),
        }
    }

    /// Starts the next ones, and answers with those that are this worker's to run; and whether the store did all that it was
    /// asked. What it could not do is kept, to be asked for again.
    pub(super) async fn start(&mut self, shared: &Shared, most: usize) -> (Vec<(Arc<Claim>, Job)>, bool) {
        let mut batch: Vec<_> = self.0.drain(..most.min(self.0.len())).collect();
        // Lost meanwhile: a heartbeat has said so.
        batch.retain(|reservation| !reservation.claim.token().is_canceled());
        let under_way: Vec<_> = batch.iter().map(|reservation| reservation.claim.begin_write()).collect();
        let mut decisions: Vec<_> = batch.iter().map(|reservation| reservation.start.clone()).collect();
        let (sent, lease) = (Instant::now(), shared.config.lease.duration());
        let transitioner = Transitioner::new(&*shared.backend);
        let answers = timeout(lease / 3, transitioner.submit_all(&mut decisions)).await;
        let answers = answers.unwrap_or_else(|_| decisions.iter().map(|_| Err(no_answer().into())).collect());
        let (mut started, mut left) = (Vec::with_capacity(batch.len()), VecDeque::new());
        for ((reservation, start), answer) in batch.into_iter().zip(decisions).zip(answers) {
            let Reservation { claim, mut job, .. } = reservation;
            match answer {
                Ok(settled) => {
                    job.execution = settled.execution().clone();
                    if let Some(running) = Claim::new(job.execution.clone(), sent + lease) {
                        shared.held.replace(&claim, Arc::clone(&running));
                        started.push((running, job));
                    }
                }
                Err(TransitionError::Backend(error))
                    if matches!(error.kind(), ErrorKind::Transient | ErrorKind::Unavailable) =>
                {
                    left.push_back(Reservation { claim, job, start });
                }
                Err(error) => {
                    tracing::warn!(name: "worker.lease_lost", { job.id = %job.id(), %error }, "a reserved job cannot be started");
                    shared.held.remove(&claim);
                    shared.count(Counted::Lost, 1);
                }
            }
        }
        drop(under_way);
        let all = left.is_empty();
        left.append(&mut self.0);
        self.0 = left;
        (started, all)
    }
}
