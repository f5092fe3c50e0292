//! Renews the leases of everything that is held, in one call.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use queue_core::Beat;
use queue_core::Certainty;
use queue_core::Error;
use queue_core::ErrorKind;
use queue_core::JobState;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio::time::MissedTickBehavior;
use tokio::time::interval;
use tokio::time::timeout;

use super::Shared;
use super::cancel::CancelReason;
use super::held::Claim;
use super::metrics;
use super::report::Counted;
use crate::repeat::Backoff;
use crate::repeat::is_busy;

pub(super) async fn run(shared: Arc<Shared>) {
    let mut ticks = interval(shared.config.heartbeat);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut explained = JoinSet::new();
    loop {
        ticks.tick().await;
        metrics::held(&shared.held);
        while explained.try_join_next().is_some() {}
        // A beat must not keep the next one waiting: its outcome is unknown then, and that is no loss.
        let beat = timeout(shared.config.heartbeat, beat(&shared)).await;
        let error = match beat {
            Ok(Ok(lost)) => {
                shared.unrenewed.store(false, Ordering::Relaxed);
                for claim in lost {
                    explained.spawn(explain(Arc::clone(&shared), claim));
                }
                continue;
            }
            Ok(Err(error)) => error,
            Err(_) => no_answer(),
        };
        shared.unrenewed.store(true, Ordering::Relaxed);
        tracing::warn!(name: "worker.heartbeat_failed", %error, "a heartbeat failed, the next one follows");
    }
}

/// One beat; answers which claims are lost.
async fn beat(shared: &Shared) -> Result<Vec<Arc<Claim>>, Error> {
    let lease = shared.config.lease.duration();
    let mut busy = Backoff::default();
    loop {
        // An outcome that cannot be recorded is covered for one more lease.
        let mut claims = shared.held.all();
        claims.retain(|claim| claim.is_renewed(lease));
        if claims.is_empty() {
            return Ok(Vec::new());
        }
        let held: Vec<_> = claims.iter().map(|claim| claim.held().clone()).collect();
        let sent = Instant::now();
        match shared.backend.extend_leases(&held, shared.config.lease).await {
            Ok(beats) => {
                let beaten = claims.into_iter().zip(beats);
                return Ok(beaten.filter_map(|(claim, beat)| is_lost(shared, claim, beat, sent + lease)).collect());
            }
            Err(error) if is_busy(&error) => {}
            Err(error) => return Err(error),
        }
        tokio::time::sleep(busy.pause()).await;
    }
}

fn is_lost(shared: &Shared, claim: Arc<Claim>, beat: Beat, deadline: Instant) -> Option<Arc<Claim>> {
    match beat {
        Beat::Extended => claim.renewed_until(deadline),
        // Somebody's transaction has the row; the next beat tries again.
        Beat::Busy => {}
        // Once there is an outcome, only the answer to it judges; and what is not held any more was settled meanwhile.
        Beat::Lost if claim.settling_for().is_none() && shared.held.remove(&claim) => return Some(claim),
        Beat::Lost => {}
    }
    None
}

/// Reads once what became of a lost job, and tells its handler.
async fn explain(shared: Arc<Shared>, claim: Arc<Claim>) {
    let id = claim.execution().id;
    let read = timeout(shared.config.heartbeat, shared.backend.get(id)).await;
    let reason = match read.unwrap_or_else(|_| Err(no_answer())) {
        Ok(Some(job)) if job.state() == JobState::Canceled => {
            let reason = job.errors.last().map(|failure| failure.text.to_string()).unwrap_or_default();
            CancelReason::Canceled { reason }
        }
        Ok(Some(job)) => CancelReason::LeaseLost { now: job.execution.to_string() },
        Ok(None) => CancelReason::LeaseLost { now: "the job was deleted".into() },
        Err(error) => CancelReason::LeaseLost { now: format!("the job cannot be read: {error}") },
    };
    shared.count(Counted::Lost, 1);
    tracing::warn!(name: "worker.lease_lost", { job.id = %id, %reason }, "a claim is lost, its handler is told");
    claim.cancel(reason);
}

pub(super) fn no_answer() -> Error {
    Error::new(ErrorKind::Unavailable, Certainty::Unknown, "no answer in time")
}
