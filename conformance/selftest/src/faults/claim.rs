//! Claims: which rows, in what order, and to whom.

use std::sync::atomic::Ordering;

use async_trait::async_trait;
use queue_core::*;

use crate::Fault;
use crate::broken::Real;
use crate::broken::gap;
use crate::fault::Wrong;

const CLAIM_RACES: &[&str] = &["claim::race_for_one_job", "claim::race_gives_each_job_once"];

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "claim::one_row_to_two",
        &OneRowToTwo,
        "SELECT the due rows, then UPDATE them by id: two claimers get one row.",
        CLAIM_RACES,
    )
    .everywhere(),
    Fault::new(
        "claim::gives_up_after_losing",
        &GivesUpAfterLosing,
        "A claimer that lost the head row to another says that nothing is left.",
        &["claim::each_of_many_finds_one", "claim::contended_queue_drains"],
    ),
    Fault::new(
        "claim::half_a_claim",
        &HalfAClaim,
        "Rows are claimed one after the other; what came before the one that fails stays claimed.",
        &["claim::a_row_that_cannot_be_written"],
    ),
    Fault::new(
        "claim::loser_gets_an_error",
        &LoserGetsAnError,
        "Of claimers at once, those that come second get a deadlock error.",
        CLAIM_RACES,
    ),
    Fault::new(
        "claim::ignores_priority",
        &Due(Plan { order: |row| (Priority::FIRST, row.job.available_at, row.job.id()), ..RIGHT }),
        "Jobs come by time alone.",
        &["claim::order", "model::random_histories"],
    ),
    Fault::new(
        "claim::ignores_time_in_order",
        &Due(Plan { order: |row| (row.job.priority, Timestamp::MIN, row.job.id()), ..RIGHT }),
        "Jobs of one priority come by id.",
        &["claim::order"],
    ),
    Fault::new(
        "claim::answers_unordered",
        &Unordered,
        "`UPDATE .. RETURNING` without an order: the rows of one claim come back in any.",
        &["claim::order"],
    )
    .everywhere(),
    Fault::new(
        "claim::ignores_the_due_time",
        &Due(Plan { due: |_, _| true, ..RIGHT }),
        "Jobs are claimed before their time.",
        &["claim::not_before_its_time", "claim::behind_future_jobs"],
    ),
    Fault::new(
        "claim::due_is_before_now",
        &Due(Plan { due: |job, now| job.available_at < now, ..RIGHT }),
        "A job that is due at this millisecond is not due yet.",
        &["claim::due_means_not_after_now", "claim::not_before_its_time"],
    ),
    Fault::new(
        "claim::due_in_seconds",
        &Due(Plan { due: |job, now| job.available_at.unix_millis() / 1_000 <= now.unix_millis() / 1_000, ..RIGHT }),
        "Due times are judged by the second.",
        &["claim::not_before_its_time"],
    ),
    Fault::new(
        "claim::first_kind_only",
        &FirstKindOnly,
        "Only the first of the kinds is asked for.",
        &["claim::only_its_kinds"],
    )
    .everywhere(),
    Fault::new(
        "claim::ignores_the_queue",
        &Due(Plan { queue: |_, _| true, ..RIGHT }),
        "Any queue's jobs are claimed.",
        &["claim::only_its_queue"],
    ),
    Fault::new(
        "claim::names_by_collation",
        &Due(Plan { queue: collated, kind: collated, ..RIGHT }),
        "Names are compared by a collation that ignores case and trailing spaces.",
        &["claim::only_its_queue", "claim::only_its_kinds"],
    ),
    Fault::new(
        "claim::ignores_kinds",
        &Due(Plan { kind: |_, _| true, ..RIGHT }),
        "Jobs of kinds that the worker does not know are claimed.",
        &["claim::only_its_kinds", "claim::finds_its_kind_behind_others"],
    ),
    Fault::new(
        "claim::limits_before_kinds",
        &Due(Plan { kinds_after_limit: true, ..RIGHT }),
        "The first rows of the queue are taken, and those of other kinds left out.",
        &["claim::finds_its_kind_behind_others"],
    ),
    Fault::new(
        "claim::limits_before_due",
        &Due(Plan { due_after_limit: true, ..RIGHT }),
        "The first rows by priority are taken, and those not due left out.",
        &["claim::behind_future_jobs"],
    ),
    Fault::new(
        "claim::takes_held_jobs",
        &Due(Plan { states: |state| state.is_active(), ..RIGHT }),
        "A job that another runs is claimed.",
        &["claim::only_waiting_jobs"],
    ),
    Fault::new(
        "claim::takes_ended_jobs",
        &Due(Plan { states: |state| !state.is_held(), ..RIGHT }),
        "A job that has ended is claimed again.",
        &["claim::only_waiting_jobs"],
    ),
    Fault::new(
        "claim::waits_for_locked_rows",
        &Due(Plan { skips_locked: false, ..RIGHT }),
        "SKIP LOCKED was left out: a locked row is waited for.",
        &["claim::skips_locked_rows", "claim::gives_up_on_a_lock"],
    )
    .hangs(),
    Fault::new(
        "claim::takes_foreign_states",
        &Due(Plan { foreign: true, ..RIGHT }),
        "A row in a state of a newer version counts as waiting.",
        &["claim::foreign_states_are_left_alone"],
    ),
    Fault::new(
        "claim::ignores_the_limit",
        &IgnoresTheLimit,
        "All due rows are claimed, whatever was asked for.",
        &["claim::respects_the_limit"],
    )
    .everywhere(),
    Fault::new(
        "claim::takes_more_than_it_says",
        &TakesMoreThanItSays,
        "One more row is claimed than is answered.",
        &["claim::takes_what_it_says", "claim::respects_the_limit"],
    )
    .everywhere(),
    Fault::new(
        "claim::unreadable_fails_all",
        &UnreadableFailsAll,
        "One row that cannot be read fails the claim.",
        &["claim::unreadable_rows"],
    ),
    Fault::new(
        "claim::unreadable_is_dropped",
        &UnreadableIsDropped,
        "A row that cannot be read is claimed and not reported.",
        &["claim::unreadable_rows"],
    ),
    Fault::new("claim::splices_names", &SplicesNames, "Names are pasted into the statement.", &["data::odd_names"]),
];

type Order = (Priority, Timestamp, JobId);

/// How a claim finds its rows in the reference.
#[derive(Clone, Copy)]
struct Plan {
    states: fn(JobState) -> bool,
    queue: fn(&Name, &Name) -> bool,
    kind: fn(&Name, &Name) -> bool,
    due: fn(&Job, Timestamp) -> bool,
    order: fn(&MemoryRow) -> Order,
    skips_locked: bool,
    foreign: bool,
    kinds_after_limit: bool,
    due_after_limit: bool,
}

/// The plan of a right backend; each fault changes one thing of it.
const RIGHT: Plan = Plan {
    states: |state| state == JobState::Waiting,
    queue: |a, b| a == b,
    kind: |a, b| a == b,
    due: |job, now| job.available_at <= now,
    order: |row| (row.job.priority, row.job.available_at, row.job.id()),
    skips_locked: true,
    foreign: false,
    kinds_after_limit: false,
    due_after_limit: false,
};

fn collated(a: &Name, b: &Name) -> bool {
    let folded = |name: &Name| name.as_str().trim_end().to_lowercase();
    folded(a) == folded(b)
}

struct Due(Plan);

impl Plan {
    /// `None` if a row that is wanted is locked, and is waited for.
    fn claim(&self, rows: &mut Rows, request: &ClaimRequest, now: Timestamp) -> Option<Claimed> {
        let kind = |row: &MemoryRow| request.kinds().iter().any(|kind| (self.kind)(kind, &row.job.kind));
        let due = |row: &MemoryRow| (self.due)(&row.job, now);
        let mut found: Vec<_> = rows
            .values_mut()
            .filter(|row| {
                ((self.states)(row.job.state()) && !row.foreign_state || self.foreign && row.foreign_state)
                    && !(self.skips_locked && row.locked)
                    && (self.queue)(request.queue(), &row.job.queue)
                    && (self.kinds_after_limit || kind(row))
                    && (self.due_after_limit || due(row))
            })
            .collect();
        found.sort_by_key(|row| (self.order)(row));
        found.truncate(request.limit().rows());
        found.retain(|row| kind(row) && due(row));
        if found.iter().any(|row| row.locked) {
            return None;
        }
        let (revision, mut claimed) = (Revision::random(), Claimed::default());
        for row in found {
            request.apply(&mut row.job.execution, revision, now);
            let execution = row.job.execution.clone();
            match row.broken {
                false => claimed.jobs.push(row.job.clone()),
                true => claimed.unreadable.push(Unreadable {
                    id: execution.id,
                    execution: Some(Box::new(execution)),
                    reason: "broken data".to_owned(),
                }),
            }
            row.foreign_state = false;
        }
        Some(claimed)
    }
}

#[async_trait]
impl Wrong for Due {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        loop {
            let now = real.memory().now();
            if let Some(claimed) = real.memory().edit(|rows| self.0.claim(rows, request, now)) {
                return Ok(claimed);
            }
            gap().await;
        }
    }
}

/// The waiting rows of a queue, as a SELECT finds them.
async fn waiting(real: &Real, request: &ClaimRequest) -> Result<Vec<Job>> {
    let mut filter = ListFilter::default();
    filter.queue = Some(request.queue().clone());
    filter.state = Some(JobState::Waiting);
    let mut jobs = real.handle.list(&filter, None, Limit::MAX).await?.items;
    jobs.retain(|job| request.kinds().contains(&job.kind));
    jobs.sort_by_key(|job| (job.priority, job.available_at, job.id()));
    jobs.truncate(request.limit().rows());
    Ok(jobs)
}

struct OneRowToTwo;

#[async_trait]
impl Wrong for OneRowToTwo {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let found = waiting(real, request).await?;
        gap().await;
        let mut claimed = real.handle.claim(request).await?;
        // Those that others took in the gap are updated all the same.
        for job in found {
            if claimed.jobs.iter().any(|mine| mine.id() == job.id()) || claimed.jobs.len() == request.limit().rows() {
                continue;
            }
            let Some(mut now) = real.handle.get(job.id()).await? else { continue };
            if let Some(at) = now.execution.claimed_at.filter(|_| now.state().is_held()) {
                request.apply(&mut now.execution, Revision::random(), at);
                real.set(&now.execution).await?;
                claimed.jobs.push(now);
            }
        }
        Ok(claimed)
    }
}

struct GivesUpAfterLosing;

#[async_trait]
impl Wrong for GivesUpAfterLosing {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let found = waiting(real, request).await?;
        gap().await;
        match found.first() {
            Some(head) if real.row(head.id()).await.is_some_and(|row| row.state != JobState::Waiting) => {
                Ok(Claimed::default())
            }
            _ => real.handle.claim(request).await,
        }
    }
}

struct LoserGetsAnError;

#[async_trait]
impl Wrong for LoserGetsAnError {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let others = real.shared.busy.fetch_add(1, Ordering::SeqCst);
        gap().await;
        real.shared.busy.fetch_sub(1, Ordering::SeqCst);
        if others > 0 {
            return Err(Error::not_applied(ErrorKind::Transient, "deadlock found when trying to get lock"));
        }
        real.handle.claim(request).await
    }
}

struct FirstKindOnly;

#[async_trait]
impl Wrong for FirstKindOnly {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let (queue, kind, worker) = (request.queue().clone(), request.kinds()[0].clone(), request.worker().clone());
        let changed = ClaimRequest::new(queue, [kind], worker, request.lease(), request.limit())?;
        real.handle.claim(&if request.starts() { changed } else { changed.reserve() }).await
    }
}

struct Unordered;

#[async_trait]
impl Wrong for Unordered {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let mut claimed = real.handle.claim(request).await?;
        claimed.jobs.reverse();
        Ok(claimed)
    }
}

/// The same claim for this many rows.
fn with_limit(request: &ClaimRequest, limit: Limit) -> Result<ClaimRequest> {
    let (queue, kinds, worker) = (request.queue().clone(), request.kinds().to_vec(), request.worker().clone());
    let changed = ClaimRequest::new(queue, kinds, worker, request.lease(), limit)?;
    Ok(if request.starts() { changed } else { changed.reserve() })
}

struct IgnoresTheLimit;

#[async_trait]
impl Wrong for IgnoresTheLimit {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        real.handle.claim(&with_limit(request, Limit::MAX)?).await
    }
}

struct TakesMoreThanItSays;

#[async_trait]
impl Wrong for TakesMoreThanItSays {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let limit = request.limit();
        let one_more = Limit::new(limit.rows() + 1).unwrap_or(limit);
        let mut claimed = real.handle.claim(&with_limit(request, one_more)?).await?;
        claimed.jobs.truncate(limit.rows());
        Ok(claimed)
    }
}

struct UnreadableFailsAll;

#[async_trait]
impl Wrong for UnreadableFailsAll {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let claimed = real.handle.claim(request).await?;
        match claimed.unreadable.first() {
            Some(bad) => Err(Error::new(ErrorKind::Schema, Certainty::Unknown, bad.reason.clone())),
            None => Ok(claimed),
        }
    }
}

struct UnreadableIsDropped;

#[async_trait]
impl Wrong for UnreadableIsDropped {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let claimed = real.handle.claim(request).await?;
        Ok(Claimed { unreadable: Vec::new(), ..claimed })
    }
}

struct SplicesNames;

#[async_trait]
impl Wrong for SplicesNames {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        if request.queue().as_str().contains('\'') {
            return Err(Error::not_applied(ErrorKind::Permanent, "syntax error near \"brien\""));
        }
        real.handle.claim(request).await
    }
}

struct HalfAClaim;

#[async_trait]
impl Wrong for HalfAClaim {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let claimed = real.handle.claim(request).await?;
        let fails = |job: &Job| real.memory().edit(|rows| rows.get(&job.id()).is_some_and(|row| row.poisoned));
        match claimed.jobs.iter().any(fails) {
            true => Err(Error::not_applied(ErrorKind::Permanent, "one row cannot be written")),
            false => Ok(claimed),
        }
    }
}
