//! What only a history shows: it takes several operations, a handle that is opened in the middle, or a call that is dropped there.

use async_trait::async_trait;
use queue_core::*;

use crate::Fault;
use crate::broken::Real;
use crate::fault::Wrong;

const HISTORIES: &[&str] = &["model::random_histories"];

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "histories::failure_in_a_second_statement",
        &FailureLater { batches: false },
        "A failure is added to the row by a second statement without a transaction.",
        HISTORIES,
    ),
    Fault::new(
        "histories::failure_in_a_second_statement/of_a_batch",
        &FailureLater { batches: true },
        "The failures of a batch are added to its rows by a second statement without a transaction.",
        HISTORIES,
    ),
    Fault::new(
        "histories::first_claim_forgets_the_fence",
        &FirstClaimForgetsTheFence,
        "The first claim of a handle does not raise the fence of jobs that were claimed before it was opened.",
        HISTORIES,
    ),
];

/// Takes as long as its round trip.
async fn second_statement() {
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
}

struct FailureLater {
    batches: bool,
}

/// Adds the failures of those that were applied.
fn add_failures<'a>(real: &Real, answers: impl IntoIterator<Item = (&'a UpdateRequest, &'a Update)>) {
    let at = real.memory().now();
    for (update, answer) in answers {
        if let (Update::Applied(_), Some(NewFailure { attempt, fence, worker, text })) =
            (answer, update.patch.failure.clone())
        {
            real.edit(update.id, |row| {
                row.job.errors.push(Failure { attempt, fence, worker, at, text });
                let surplus = row.job.errors.len().saturating_sub(Failure::KEPT);
                row.job.errors.drain(..surplus);
            });
        }
    }
}

fn without_failure(update: &UpdateRequest) -> UpdateRequest {
    UpdateRequest { patch: Patch { failure: None, ..update.patch.clone() }, ..update.clone() }
}

#[async_trait]
impl Wrong for FailureLater {
    async fn update(&self, real: &Real, update: &UpdateRequest) -> Result<Update> {
        if self.batches || update.patch.failure.is_none() {
            return real.update(update).await;
        }
        let answer = real.update(&without_failure(update)).await?;
        second_statement().await;
        add_failures(real, [(update, &answer)]);
        Ok(answer)
    }

    async fn update_many(&self, real: &Real, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        if !self.batches || updates.iter().all(|update| update.patch.failure.is_none()) {
            return real.handle.update_many_if_current(updates).await;
        }
        let first: Vec<_> = updates.iter().map(without_failure).collect();
        let answers = real.handle.update_many_if_current(&first).await?;
        second_statement().await;
        add_failures(real, updates.iter().zip(&answers));
        Ok(answers)
    }
}

struct FirstClaimForgetsTheFence;

#[async_trait]
impl Wrong for FirstClaimForgetsTheFence {
    fn connected(&self, real: &Real) {
        let claimed = |row: &&mut MemoryRow| row.job.execution.fence > 0;
        real.kept.keep(
            real.memory()
                .edit(|rows| rows.values_mut().filter(claimed).map(|row| row.job.clone()).collect::<Vec<_>>())
                .iter(),
        );
    }

    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let mut claimed = real.handle.claim(request).await?;
        let known = std::mem::take(&mut *real.kept.jobs());
        for job in claimed.jobs.iter_mut().filter(|job| known.contains_key(&job.id())) {
            job.execution.fence -= 1;
            real.edit(job.id(), |row| row.job.execution.fence -= 1);
        }
        Ok(claimed)
    }
}
