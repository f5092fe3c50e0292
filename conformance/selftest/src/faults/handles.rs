//! What is right as long as there is one handle only.

use async_trait::async_trait;
use queue_core::*;

use crate::Fault;
use crate::broken::Real;
use crate::broken::gap;
use crate::fault::Wrong;

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "handles::update_locks_its_own",
        &UpdateLocksItsOwn,
        "SELECT, then UPDATE, under a mutex of the handle: atomic within one process.",
        &["update::race_has_one_winner", "update::chain_has_no_fork", "settle::one_outcome_of_many"],
    )
    .everywhere(),
    Fault::new(
        "handles::own_cache",
        &OwnCache,
        "Each handle reads from a cache, which only its own calls renew.",
        &["update::two_handles_see_one_row"],
    )
    .everywhere(),
];

struct UpdateLocksItsOwn;

#[async_trait]
impl Wrong for UpdateLocksItsOwn {
    async fn update(&self, real: &Real, update: &UpdateRequest) -> Result<Update> {
        let _turn = real.turn.lock().await;
        let Some(there) = real.row(update.id).await else { return real.update(update).await };
        if update.current != there.fingerprint() {
            return real.update(update).await;
        }
        gap().await;
        real.force(update.id, &update.patch).await
    }
}

struct OwnCache;

#[async_trait]
impl Wrong for OwnCache {
    async fn get(&self, real: &Real, id: JobId) -> Result<Option<Job>> {
        if let Some(job) = real.kept.jobs().get(&id) {
            return Ok(Some(job.clone()));
        }
        let job = real.handle.get(id).await?;
        real.kept.keep(&job);
        Ok(job)
    }

    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let claimed = real.handle.claim(request).await?;
        real.kept.keep(&claimed.jobs);
        Ok(claimed)
    }

    async fn answer(&self, real: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        if let Ok(Update::Applied(_) | Update::Missing) = answer {
            real.kept.jobs().remove(&asked.id);
        }
        answer
    }

    async fn extend_leases(&self, real: &Real, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        real.kept.jobs().clear();
        real.handle.extend_leases(held, lease).await
    }

    async fn purge(&self, real: &Real, state: JobState, older_than: Delay, limit: Limit) -> Result<u64> {
        real.kept.jobs().clear();
        real.handle.purge(state, older_than, limit).await
    }
}
