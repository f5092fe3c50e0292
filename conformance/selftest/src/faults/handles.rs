//! What is right as long as there is one handle only.

use async_trait::async_trait;
use queue_core::*;

use crate::Fault;
use crate::broken::Real;
use crate::broken::gap;
use crate::fault::Wrong;

pub(super) const FAULTS: &[Fault] = &[
    Fault::new("handles::update_locks_its_own", &UpdateLocksItsOwn, "SELECT, then UPDATE, under a mutex of the handle: atomic within one process.", &[
        "update::race_has_one_winner",
        "update::chain_has_no_fork",
        "settle::one_outcome_of_many",
    ])
    .everywhere(),
    Fault::new("handles::own_cache", &OwnCache, "Each handle reads from a cache, which only its own calls renew.", &["update::two_handles_see_one_row"])
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

