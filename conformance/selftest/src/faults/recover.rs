//! Sweeps: what they list, and what their updates compare.

use std::sync::atomic::Ordering;

use async_trait::async_trait;
use queue_core::*;

use crate::Fault;
use crate::broken::Real;
use crate::fault::Wrong;

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "recover::ignores_the_lease_it_saw",
        &Asks(|_, _| LeaseMatch::Any),
        "A sweep's update does not compare the lease.",
        &["recover::a_late_heartbeat_wins", "recover::a_live_lease_is_refused", "recover::adoption_loses_to_a_lease"],
    )
    .everywhere(),
    Fault::new(
        "recover::any_expired_lease",
        &Asks(|asked, there| match (asked, there) {
            (LeaseMatch::Expired(_), Some(at)) => LeaseMatch::Expired(at),
            _ => asked,
        }),
        "A sweep's update asks only that the lease has run out, not that it is the one seen.",
        &["recover::a_late_heartbeat_wins"],
    )
    .everywhere(),
    Fault::new(
        "recover::unset_is_as_good_as_seen",
        &Asks(|asked, there| match (asked, there) {
            (LeaseMatch::Expired(_), None) => LeaseMatch::Unset,
            _ => asked,
        }),
        "A sweep's update takes a lease that is not set for the one seen.",
        &["recover::an_unset_lease_is_not_the_one_seen"],
    )
    .everywhere(),
    Fault::new(
        "recover::trusts_the_sweeps_clock",
        &Asks(|asked, there| match asked {
            LeaseMatch::Expired(seen) if there == Some(seen) => LeaseMatch::Any,
            _ => asked,
        }),
        "A sweep's update compares the lease it saw, and believes that it has run out.",
        &["recover::a_live_lease_is_refused"],
    )
    .everywhere(),
    Fault::new(
        "recover::adopts_any",
        &Asks(|asked, _| match asked {
            LeaseMatch::Unset => LeaseMatch::Any,
            _ => asked,
        }),
        "An adoption overwrites a lease that came meanwhile.",
        &["recover::adoption_loses_to_a_lease"],
    ),
    Fault::new(
        "recover::compares_the_holders_lease",
        &ComparesTheHoldersLease,
        "A holder's settle compares the lease too, so that its own heartbeat makes it bounce.",
        &["recover::adoption_keeps_the_holder", "lease::changes_nothing_else"],
    ),
    Fault::new(
        "recover::expired_is_before_now",
        &Stale(|row, now| row.state.is_held() && row.lease_expires_at.is_none_or(|at| at < now)),
        "A lease that ends at this millisecond still lives.",
        &["recover::stale_at_the_very_millisecond"],
    ),
    Fault::new(
        "recover::leaves_unset_leases",
        &Stale(|row, now| row.state.is_held() && row.lease_expires_at.is_some_and(|at| at <= now)),
        "`lease <= now` of a null is null: jobs without a lease are never found.",
        &["recover::stale_lists_expired_and_unset_leases", "recover::unset_lease_is_adopted"],
    ),
    Fault::new(
        "recover::leaves_reserved_jobs",
        &Stale(|row, now| row.state == JobState::Running && row.lease_expires_at.is_none_or(|at| at <= now)),
        "Jobs that were reserved and never started are not recovered.",
        &["recover::reserved_job_goes_back", "recover::stale_lists_expired_and_unset_leases"],
    ),
    Fault::new(
        "recover::lists_what_is_not_held",
        &Stale(|row, now| {
            row.lease_expires_at.is_some_and(|at| at <= now) || row.state.is_held() && row.lease_expires_at.is_none()
        }),
        "The state is not asked for: an old lease on any row is stale.",
        &["recover::stale_lists_expired_and_unset_leases"],
    ),
    Fault::new(
        "recover::lists_living_leases",
        &Stale(|row, _| row.state.is_held()),
        "Every held job is listed, whatever its lease.",
        &["recover::stale_lists_expired_and_unset_leases", "recover::running_job_goes_back"],
    ),
    Fault::new(
        "recover::by_the_sweeps_clock",
        &BySweepsClock,
        "Leases are judged by the clock of the process that sweeps.",
        &["recover::running_job_goes_back"],
    ),
    Fault::new(
        "recover::first_page_only",
        &FirstPageOnly,
        "The first page is the last.",
        &["recover::pages_past_what_it_cannot_recover", "recover::stale_in_order"],
    )
    .everywhere(),
    Fault::new(
        "recover::page_by_expiry_alone",
        &PageByExpiryAlone,
        "A page begins after the expiry of the last row, and loses those of the same expiry.",
        &["recover::stale_in_order"],
    ),
    Fault::new(
        "recover::page_repeats_its_start",
        &PageRepeatsItsStart,
        "A page begins with the last row of the one before.",
        &["recover::stale_in_order"],
    )
    .hangs(),
    Fault::new("recover::unordered", &Unordered, "A page's rows come in any order.", &["recover::stale_in_order"])
        .everywhere(),
    Fault::new(
        "recover::unreadable_fails_the_list",
        &UnreadableFailsTheList,
        "One row of a newer version fails the lists.",
        &["recover::unreadable_row", "orphan::claimed_by_reports_what_it_cannot_read"],
    ),
    Fault::new(
        "recover::leaves_broken_data",
        &LeavesBrokenData,
        "A list of stale jobs leaves out rows whose data cannot be read.",
        &["recover::broken_data_is_recovered"],
    )
    .everywhere(),
    Fault::new(
        "recover::orphans_without_grace",
        &Orphans { grace: false, worker: true, after: true },
        "The grace is not asked for: a claim on its way is an orphan.",
        &["orphan::released_after_the_grace"],
    )
    .everywhere(),
    Fault::new(
        "recover::orphans_of_all",
        &Orphans { grace: true, worker: false, after: true },
        "All held jobs are listed, whoever holds them.",
        &["orphan::claimed_by_lists_its_own"],
    ),
    Fault::new(
        "recover::orphans_from_the_start",
        &Orphans { grace: true, worker: true, after: false },
        "The cursor of the list of claims is not looked at.",
        &["orphan::claimed_by_lists_its_own"],
    )
    .hangs(),
    Fault::new(
        "recover::claims_of_ended_jobs",
        &ClaimsOf(|row, latest| row.claimed_at.is_some_and(|at| at <= latest)),
        "Jobs that the worker held when they ended are listed as held.",
        &["orphan::claimed_by_lists_its_own"],
    ),
    Fault::new(
        "recover::grace_is_strict",
        &ClaimsOf(|row, latest| row.state.is_held() && row.claimed_at.is_some_and(|at| at < latest)),
        "A claim that is exactly as old as asked for is not listed.",
        &["orphan::claimed_by_reports_what_it_cannot_read"],
    ),
    Fault::new(
        "recover::expiry_in_seconds",
        &Stale(|row, now| {
            row.state.is_held()
                && row.lease_expires_at.is_none_or(|at| at.unix_millis() / 1_000 <= now.unix_millis() / 1_000)
        }),
        "Leases are judged by the second.",
        &["recover::stale_at_the_very_millisecond"],
    ),
    Fault::new(
        "recover::worker_by_name",
        &WorkerByName,
        "A worker is known by its name, without its incarnation.",
        &["orphan::claimed_by_lists_its_own"],
    ),
    Fault::new(
        "recover::release_touches_all",
        &ReleaseTouchesAll,
        "A job that is given back moves the due time of all jobs of its queue.",
        &["settle::release_touches_only_its_row"],
    ),
    Fault::new(
        "recover::fence_is_the_identity",
        &FenceIsTheIdentity,
        "The fence is compared instead of the revision.",
        &["recover::fence_set_back"],
    ),
    Fault::new(
        "recover::release_keeps_the_attempt",
        &ReleaseKeepsTheAttempt,
        "A job that is given back has used up its attempt.",
        &["settle::last_attempt_released"],
    ),
    Fault::new(
        "recover::no_cap_on_attempts",
        &NoCapOnAttempts,
        "A recovered job waits again, whatever its attempts.",
        &["recover::cap_on_attempts"],
    ),
    Fault::new(
        "recover::loser_gets_an_error",
        &LoserGetsAnError,
        "Of sweeps at once, those that come second get a deadlock error.",
        &["recover::sweeps_at_once"],
    ),
];

/// Changes what an update asks of the lease, given the one that is there.
struct Asks(fn(LeaseMatch, Option<Timestamp>) -> LeaseMatch);

#[async_trait]
impl Wrong for Asks {
    async fn ask(&self, real: &Real, update: &mut UpdateRequest) -> Result<()> {
        let there = real.row(update.id).await.and_then(|row| row.lease_expires_at);
        update.current.lease = (self.0)(update.current.lease, there);
        Ok(())
    }
}

struct ComparesTheHoldersLease;

#[async_trait]
impl Wrong for ComparesTheHoldersLease {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let claimed = real.handle.claim(request).await?;
        real.shared.kept.keep(&claimed.jobs);
        Ok(claimed)
    }

    async fn ask(&self, real: &Real, update: &mut UpdateRequest) -> Result<()> {
        let there = real.row(update.id).await;
        let moved = |claimed: &Job, there: &Execution| {
            claimed.execution.revision == there.revision && claimed.execution.lease_expires_at != there.lease_expires_at
        };
        let kept = real.shared.kept.jobs().get(&update.id).cloned();
        if update.current.lease == LeaseMatch::Any
            && kept.zip(there).is_some_and(|(claimed, there)| moved(&claimed, &there))
        {
            update.current.revision = Revision::random();
        }
        Ok(())
    }
}

/// Lists other rows of the reference as stale.
pub(super) struct Stale(pub(super) fn(&Execution, Timestamp) -> bool);

fn cursor(row: &Execution) -> StaleCursor {
    StaleCursor { lease_expires_at: row.lease_expires_at, id: row.id }
}

fn list_stale(
    real: &Real,
    after: Option<StaleCursor>,
    limit: Limit,
    is_stale: impl Fn(&Execution) -> bool,
) -> Page<Execution, StaleCursor> {
    let mut rows: Vec<_> = real.memory().edit(|rows| {
        let known = rows.values().filter(|row| !row.foreign_state).map(|row| &row.job.execution);
        known.filter(|row| is_stale(row) && after.is_none_or(|after| cursor(row) > after)).cloned().collect()
    });
    rows.sort_by_key(cursor);
    let more = rows.len() > limit.rows();
    rows.truncate(limit.rows());
    Page { next: rows.last().filter(|_| more).map(cursor), items: rows, unreadable: Vec::new() }
}

#[async_trait]
impl Wrong for Stale {
    async fn stale(
        &self,
        real: &Real,
        after: Option<StaleCursor>,
        limit: Limit,
    ) -> Result<Page<Execution, StaleCursor>> {
        let now = real.memory().now();
        Ok(list_stale(real, after, limit, |row| (self.0)(row, now)))
    }
}

struct BySweepsClock;

#[async_trait]
impl Wrong for BySweepsClock {
    async fn stale(
        &self,
        real: &Real,
        after: Option<StaleCursor>,
        limit: Limit,
    ) -> Result<Page<Execution, StaleCursor>> {
        let now = real.memory().now().saturating_add_millis(-real.advanced());
        Ok(list_stale(real, after, limit, |row| row.state.is_held() && row.lease_expires_at.is_none_or(|at| at <= now)))
    }
}

struct FirstPageOnly;

#[async_trait]
impl Wrong for FirstPageOnly {
    async fn stale(
        &self,
        real: &Real,
        after: Option<StaleCursor>,
        limit: Limit,
    ) -> Result<Page<Execution, StaleCursor>> {
        Ok(Page { next: None, ..real.handle.stale(after, limit).await? })
    }
}

struct PageByExpiryAlone;

#[async_trait]
impl Wrong for PageByExpiryAlone {
    async fn stale(
        &self,
        real: &Real,
        after: Option<StaleCursor>,
        limit: Limit,
    ) -> Result<Page<Execution, StaleCursor>> {
        let now = real.memory().now();
        Ok(list_stale(real, after, limit, |row| {
            row.state.is_held()
                && row.lease_expires_at.is_none_or(|at| at <= now)
                && after.is_none_or(|after| row.lease_expires_at > after.lease_expires_at)
        }))
    }
}

struct PageRepeatsItsStart;

#[async_trait]
impl Wrong for PageRepeatsItsStart {
    async fn stale(
        &self,
        real: &Real,
        after: Option<StaleCursor>,
        limit: Limit,
    ) -> Result<Page<Execution, StaleCursor>> {
        let mut page = real.handle.stale(after, limit).await?;
        if let Some(row) = match after {
            Some(after) => real.row(after.id).await.filter(|row| row.state.is_held()),
            None => None,
        } {
            page.items.insert(0, row);
            page.items.truncate(limit.rows());
            page.next =
                page.items.last().map(cursor).filter(|_| page.next.is_some() || page.items.len() == limit.rows());
        }
        Ok(page)
    }
}

struct Unordered;

#[async_trait]
impl Wrong for Unordered {
    async fn stale(
        &self,
        real: &Real,
        after: Option<StaleCursor>,
        limit: Limit,
    ) -> Result<Page<Execution, StaleCursor>> {
        let mut page = real.handle.stale(after, limit).await?;
        page.items.reverse();
        Ok(page)
    }
}

struct UnreadableFailsTheList;

fn all_readable<T, C>(page: Page<T, C>) -> Result<Page<T, C>> {
    match page.unreadable.first() {
        Some(bad) => Err(Error::not_applied(ErrorKind::Schema, bad.reason.clone())),
        None => Ok(page),
    }
}

#[async_trait]
impl Wrong for UnreadableFailsTheList {
    async fn stale(
        &self,
        real: &Real,
        after: Option<StaleCursor>,
        limit: Limit,
    ) -> Result<Page<Execution, StaleCursor>> {
        // Whoever parses the state in the program reads a foreign one as an error.
        let foreign = real.memory().edit(|rows| rows.values().any(|row| row.foreign_state));
        match foreign {
            true => Err(Error::not_applied(ErrorKind::Schema, "unknown state")),
            false => all_readable(real.handle.stale(after, limit).await?),
        }
    }

    async fn claimed_by(
        &self,
        real: &Real,
        worker: &WorkerId,
        older_than: Delay,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Execution, JobId>> {
        let foreign = real.memory().edit(|rows| rows.values().any(|row| row.foreign_state || row.broken));
        match foreign {
            true => Err(Error::not_applied(ErrorKind::Schema, "unknown state")),
            false => real.handle.claimed_by(worker, older_than, after, limit).await,
        }
    }
}

struct LeavesBrokenData;

#[async_trait]
impl Wrong for LeavesBrokenData {
    async fn stale(
        &self,
        real: &Real,
        after: Option<StaleCursor>,
        limit: Limit,
    ) -> Result<Page<Execution, StaleCursor>> {
        let page = real.handle.stale(after, limit).await?;
        let mut items = Vec::new();
        for row in page.items {
            if real.handle.get(row.id).await.is_ok() {
                items.push(row);
            }
        }
        Ok(Page { items, ..page })
    }
}

/// What of the question after a worker's claims is heard.
struct Orphans {
    grace: bool,
    worker: bool,
    after: bool,
}

#[async_trait]
impl Wrong for Orphans {
    async fn claimed_by(
        &self,
        real: &Real,
        worker: &WorkerId,
        older_than: Delay,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Execution, JobId>> {
        let older_than = if self.grace { older_than } else { Delay::ZERO };
        let after = after.filter(|_| self.after);
        if self.worker {
            return real.handle.claimed_by(worker, older_than, after, limit).await;
        }
        let mut items: Vec<_> = real.memory().edit(|rows| {
            let held = rows.values().map(|row| row.job.execution.clone()).filter(|row| row.state.is_held());
            held.filter(|row| after.is_none_or(|after| row.id > after)).collect()
        });
        items.truncate(limit.rows());
        Ok(Page { next: items.last().map(|row| row.id), items, unreadable: Vec::new() })
    }
}

/// Lists other rows of a worker, given the latest time of their claim.
struct ClaimsOf(fn(&Execution, Timestamp) -> bool);

#[async_trait]
impl Wrong for ClaimsOf {
    async fn claimed_by(
        &self,
        real: &Real,
        worker: &WorkerId,
        older_than: Delay,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Execution, JobId>> {
        let latest = real.memory().now().saturating_add_millis(-older_than.as_millis());
        let mut items: Vec<_> = real.memory().edit(|rows| {
            let known = rows.values().filter(|row| !row.foreign_state).map(|row| row.job.execution.clone());
            known
                .filter(|row| {
                    row.claimed_by.as_ref() == Some(worker)
                        && (self.0)(row, latest)
                        && after.is_none_or(|after| row.id > after)
                })
                .collect()
        });
        let more = items.len() > limit.rows();
        items.truncate(limit.rows());
        Ok(Page { next: items.last().filter(|_| more).map(|row| row.id), items, unreadable: Vec::new() })
    }
}

struct WorkerByName;

#[async_trait]
impl Wrong for WorkerByName {
    async fn claimed_by(
        &self,
        real: &Real,
        worker: &WorkerId,
        older_than: Delay,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Execution, JobId>> {
        let name = |worker: &WorkerId| worker.as_str().rsplit_once('/').map(|(name, _)| name.to_owned());
        let latest = real.memory().now().saturating_add_millis(-older_than.as_millis());
        let mut items: Vec<_> = real.memory().edit(|rows| {
            let held = rows.values().map(|row| row.job.execution.clone()).filter(|row| row.state.is_held());
            held.filter(|row| {
                row.claimed_by.as_ref().and_then(name) == name(worker)
                    && row.claimed_at.is_some_and(|at| at <= latest)
                    && after.is_none_or(|after| row.id > after)
            })
            .collect()
        });
        let more = items.len() > limit.rows();
        items.truncate(limit.rows());
        Ok(Page { next: items.last().filter(|_| more).map(|row| row.id), items, unreadable: Vec::new() })
    }
}

struct ReleaseTouchesAll;

#[async_trait]
impl Wrong for ReleaseTouchesAll {
    async fn answer(&self, real: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        if let (Ok(Update::Applied(_)), Some(when)) = (&answer, asked.patch.available) {
            let at = when.resolve(real.memory().now());
            real.memory().edit(|rows| {
                for row in rows.values_mut().filter(|row| row.job.state() == JobState::Waiting) {
                    row.job.available_at = at;
                }
            });
        }
        answer
    }
}

struct FenceIsTheIdentity;

#[async_trait]
impl Wrong for FenceIsTheIdentity {
    async fn claim(&self, real: &Real, request: &ClaimRequest) -> Result<Claimed> {
        let claimed = real.handle.claim(request).await?;
        // Which fence a revision had.
        let mut kept = real.shared.kept.jobs();
        for job in &claimed.jobs {
            kept.insert(job.execution.revision.as_uuid().into(), job.clone());
        }
        drop(kept);
        Ok(claimed)
    }

    async fn ask(&self, real: &Real, update: &mut UpdateRequest) -> Result<()> {
        let seen = real.shared.kept.jobs().get(&update.current.revision.as_uuid().into()).cloned();
        if let (Some(seen), Some(there)) = (seen, real.row(update.id).await)
            && seen.execution.fence == there.fence
            && there.state == update.current.state
            && there.claimed_by == update.current.claimed_by
        {
            update.current = Fingerprint { lease: update.current.lease, ..there.fingerprint() };
        }
        Ok(())
    }
}

struct ReleaseKeepsTheAttempt;

#[async_trait]
impl Wrong for ReleaseKeepsTheAttempt {
    async fn ask(&self, _: &Real, update: &mut UpdateRequest) -> Result<()> {
        update.patch.attempt = update.patch.attempt.max(update.current.attempt);
        Ok(())
    }
}

struct NoCapOnAttempts;

#[async_trait]
impl Wrong for NoCapOnAttempts {
    async fn ask(&self, _: &Real, update: &mut UpdateRequest) -> Result<()> {
        if let (LeaseMatch::Expired(_), JobState::Failed) = (update.current.lease, update.patch.state) {
            let patch = &mut update.patch;
            patch.state = JobState::Waiting;
            (patch.clear_claim, patch.finished_at, patch.attempted_at) = (true, Change::Clear, Change::Clear);
            patch.available = Some(When::Now);
        }
        Ok(())
    }
}

struct LoserGetsAnError;

#[async_trait]
impl Wrong for LoserGetsAnError {
    async fn stale(
        &self,
        real: &Real,
        after: Option<StaleCursor>,
        limit: Limit,
    ) -> Result<Page<Execution, StaleCursor>> {
        let others = real.shared.busy.fetch_add(1, Ordering::SeqCst);
        crate::broken::gap().await;
        real.shared.busy.fetch_sub(1, Ordering::SeqCst);
        match others {
            0 => real.handle.stale(after, limit).await,
            _ => Err(Error::not_applied(ErrorKind::Transient, "deadlock found when trying to get lock")),
        }
    }
}
