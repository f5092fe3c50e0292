//! What a claim writes into the rows that it takes.

use std::sync::atomic::Ordering;
use std::time::Instant;

use async_trait::async_trait;
use queue_core::*;

use crate::Fault;
use crate::broken::Real;
use crate::broken::gap;
use crate::fault::Wrong;

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "writes::lease_in_seconds",
        &Writes(|row, _| row.lease_expires_at = row.lease_expires_at.map(whole_seconds)),
        "The lease is cut to whole seconds.",
        &["claim::lease_to_the_millisecond"],
    )
    .everywhere(),
    Fault::new(
        "writes::no_new_revision",
        &Writes(|row, _| row.revision = Revision::from(row.id.as_uuid())),
        "A claim makes no new revision.",
        &["claim::every_claim_is_a_new_moment"],
    )
    .everywhere(),
    Fault::new(
        "writes::no_fence",
        &Writes(|row, _| row.fence -= 1),
        "A claim does not raise the fence.",
        &["claim::writes", "claim::every_claim_is_a_new_moment"],
    )
    .everywhere(),
    Fault::new(
        "writes::fence_is_the_attempt",
        &Writes(|row, _| row.fence = row.attempt.into()),
        "The attempt serves as the fence, and goes back with it.",
        &["claim::fence_never_goes_back"],
    ),
    Fault::new(
        "writes::attempt_is_not_counted",
        &Writes(|row, starts| row.attempt -= u32::from(starts)),
        "The attempt is counted when it ends, not when it starts.",
        &["claim::writes"],
    ),
    Fault::new(
        "writes::reserve_counts",
        &Writes(|row, starts| row.attempt += u32::from(!starts)),
        "Reserving a job counts as an attempt.",
        &["claim::reserve_writes", "claim::start_of_a_reserved_job"],
    ),
    Fault::new(
        "writes::reserve_starts",
        &ReserveStarts,
        "A claim that only reserves starts the job.",
        &["claim::reserve_writes"],
    ),
    Fault::new(
        "writes::old_start_stays",
        &Writes(|row, starts| {
            if !starts {
                row.attempted_at = row.claimed_at
            }
        }),
        "Reserving a job writes the time of a start.",
        &["claim::reserve_writes", "model::random_histories"],
    ),
    Fault::new(
        "writes::process_clock",
        &ProcessClock,
        "Claims take the time from the process, not from the store.",
        &["claim::clock_a_year_on"],
    ),
    Fault::new(
        "writes::lease_from_before_the_wait",
        &LeaseFromBeforeTheWait { all: false },
        "The lease is computed before the claim waits for its turn.",
        &["claim::lease_starts_when_the_claim_happens"],
    ),
    Fault::new(
        "writes::times_from_before_the_wait",
        &LeaseFromBeforeTheWait { all: true },
        "All times of a claim are those of the transaction's start, before it waited for its turn.",
        &["claim::lease_starts_when_the_claim_happens"],
    )
    .not_round_the_reference(),
    Fault::new(
        "writes::resets_the_row",
        &ResetsTheRow,
        "A claim clears the errors of earlier attempts.",
        &["claim::keeps_the_rest_of_the_row"],
    ),
    Fault::new(
        "writes::answers_what_it_read",
        &AnswersWhatItRead,
        "A claim answers the rows as they were before it.",
        &["claim::writes", "claim::takes_what_it_says"],
    ),
    Fault::new(
        "writes::two_steps",
        &TwoSteps,
        "A claim marks its rows first, and writes holder and lease in a second statement.",
        &["claim::dropped_futures"],
    ),
];

fn whole_seconds(at: Timestamp) -> Timestamp {
    at.saturating_add_millis(-at.unix_millis().rem_euclid(1_000))
}

/// Rewrites each claimed row; told whether the claim starts it.
struct Writes(fn(&mut Execution, bool));

impl Writes {
    async fn rewrite(&self, real: &Real, claimed: &mut Claimed, starts: bool) -> Result<()> {
        for job in &mut claimed.jobs {
            (self.0)(&mut job.execution, starts);
            real.set(&job.execution).await?;
        }
        Ok(())
    }
}

#[async_trait]
impl Wrong for Writes {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let mut claimed = real.handle.claim(request).await?;
        self.rewrite(real, &mut claimed, request.starts()).await?;
        Ok(claimed)
    }
}

struct ReserveStarts;

#[async_trait]
impl Wrong for ReserveStarts {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let (queue, kinds, worker) = (request.queue().clone(), request.kinds().to_vec(), request.worker().clone());
        real.handle.claim(&ClaimRequest::new(queue, kinds, worker, request.lease(), request.limit())?).await
    }
}

/// Moves every time that the claim wrote.
fn move_times(row: &mut Execution, by_millis: i64) {
    for time in [&mut row.claimed_at, &mut row.attempted_at, &mut row.lease_expires_at] {
        *time = time.map(|at| at.saturating_add_millis(by_millis));
    }
}

struct ProcessClock;

#[async_trait]
impl Wrong for ProcessClock {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let mut claimed = real.handle.claim(request).await?;
        for job in &mut claimed.jobs {
            move_times(&mut job.execution, -real.advanced());
            real.set(&job.execution).await?;
        }
        Ok(claimed)
    }
}

/// Round a store that has row locks: this one locks the whole store, and so waits.
struct LeaseFromBeforeTheWait {
    all: bool,
}

#[async_trait]
impl Wrong for LeaseFromBeforeTheWait {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let (before, since) = (real.advanced(), Instant::now());
        while real.shared.holds.load(Ordering::SeqCst) > 0 {
            gap().await;
        }
        let elapsed = i64::try_from(since.elapsed().as_millis()).unwrap_or(i64::MAX);
        let waited = match real.advanced() - before + elapsed {
            0 => 0,
            // Its transaction began long before, however late the case's task had its turn.
            waited => waited.max(100),
        };
        let mut claimed = real.handle.claim(request).await?;
        for job in &mut claimed.jobs {
            let row = &mut job.execution;
            match self.all {
                true => move_times(row, -waited),
                false => row.lease_expires_at = row.lease_expires_at.map(|at| at.saturating_add_millis(-waited)),
            }
            real.set(row).await?;
        }
        Ok(claimed)
    }
}

struct ResetsTheRow;

#[async_trait]
impl Wrong for ResetsTheRow {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let mut claimed = real.handle.claim(request).await?;
        for job in &mut claimed.jobs {
            job.errors.clear();
            real.edit(job.id(), |row| row.job.errors.clear());
        }
        Ok(claimed)
    }
}

struct AnswersWhatItRead;

#[async_trait]
impl Wrong for AnswersWhatItRead {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let before = real.memory().edit(|rows| rows.clone());
        let mut claimed = real.handle.claim(request).await?;
        for job in &mut claimed.jobs {
            if let Some(row) = before.get(&job.id()) {
                job.execution.fence = row.job.execution.fence;
                job.execution.attempt = row.job.execution.attempt;
            }
        }
        Ok(claimed)
    }
}

struct TwoSteps;

#[async_trait]
impl Wrong for TwoSteps {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let claimed = real.handle.claim(request).await?;
        for job in &claimed.jobs {
            let half = Execution { lease_expires_at: None, attempted_at: None, ..job.execution.clone() };
            real.set(&half).await?;
        }
        tokio::task::yield_now().await;
        for job in &claimed.jobs {
            real.set(&job.execution).await?;
        }
        Ok(claimed)
    }
}
