//! Lists, counts, and purges.

use async_trait::async_trait;
use queue_core::*;

use crate::Fault;
use crate::broken::Real;
use crate::broken::gap;
use crate::fault::Wrong;

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "inspect::pages_by_offset",
        &PagesByOffset,
        "A page is found by counting rows, and moves when rows come and go.",
        &["inspect::paging_survives_changes"],
    )
    .everywhere(),
    Fault::new(
        "inspect::newest_first",
        &NewestFirst,
        "Lists come with the newest id first.",
        &["inspect::list_pages_by_id"],
    )
    .everywhere(),
    Fault::new(
        "inspect::ends_a_page_late",
        &EndsAPageLate,
        "A full page always has a next one, which may be empty.",
        &["inspect::list_pages_by_id"],
    )
    .everywhere(),
    Fault::new(
        "inspect::filters_after_the_limit",
        &FiltersAfterTheLimit,
        "Rows are taken from the list first and filtered by state afterwards.",
        &["inspect::list_filters"],
    )
    .everywhere(),
    Fault::new(
        "inspect::filters_by_collation",
        &FiltersByCollation,
        "A filter's names are compared without case.",
        &["inspect::list_filters"],
    )
    .everywhere(),
    Fault::new(
        "inspect::unreadable_fails_the_list",
        &UnreadableFailsTheList,
        "One row that cannot be read fails the list.",
        &["inspect::list_reports_unreadable_rows"],
    )
    .everywhere(),
    Fault::new(
        "inspect::unreadable_is_dropped",
        &UnreadableIsDropped,
        "A row that cannot be read is left out of the list.",
        &["inspect::list_reports_unreadable_rows"],
    )
    .everywhere(),
    Fault::new(
        "inspect::unknown_state_is_not_counted",
        &UnknownStateIsNotCounted,
        "Jobs in states of a newer version are not counted.",
        &["claim::foreign_states_are_left_alone", "unique::an_unknown_state_keeps_its_key"],
    )
    .everywhere(),
    Fault::new(
        "inspect::counts_one_queue",
        &CountsOneQueue,
        "Jobs are counted by state, under the first queue's name.",
        &["inspect::counts"],
    )
    .everywhere(),
    Fault::new(
        "inspect::unknown_id_is_an_error",
        &UnknownIdIsAnError,
        "Reading an id that is not stored is an error.",
        &["inspect::an_unknown_id_is_none"],
    )
    .everywhere(),
    Fault::new(
        "purge::any_state",
        &Purges(Plan { states: |row, _| row.is_final(), ..RIGHT }),
        "A purge deletes every ended job, whichever state was named.",
        &["purge::only_the_named_state"],
    ),
    Fault::new(
        "purge::accepts_any",
        &Purges(Plan { checks: false, ..RIGHT }),
        "A purge of waiting jobs is carried out.",
        &["purge::only_ended_states"],
    ),
    Fault::new(
        "purge::ignores_age",
        &Purges(Plan { old_enough: |_, _| true, ..RIGHT }),
        "A purge does not look at the age.",
        &["purge::by_age_to_the_millisecond"],
    ),
    Fault::new(
        "purge::older_than_is_strict",
        &Purges(Plan { old_enough: |at, latest| at < latest, ..RIGHT }),
        "A job that ended exactly so long ago stays.",
        &["purge::by_age_to_the_millisecond"],
    ),
    Fault::new(
        "purge::by_creation",
        &Purges(Plan { age: |job| Some(job.created_at), ..RIGHT }),
        "The age of a job counts from its creation.",
        &["purge::counts_from_the_last_end", "purge::the_oldest_first"],
    ),
    Fault::new(
        "purge::by_id",
        &Purges(Plan { by_id: true, ..RIGHT }),
        "A purge takes the first rows by id, not those that ended first.",
        &["purge::the_oldest_first"],
    ),
    Fault::new(
        "purge::ignores_the_limit",
        &IgnoresTheLimit,
        "A purge deletes all that it finds.",
        &["purge::the_oldest_first"],
    )
    .everywhere(),
    Fault::new(
        "purge::deletes_by_id",
        &Purges(Plan { two_steps: true, ..RIGHT }),
        "SELECT the ended jobs, then DELETE them by id.",
        &["purge::spares_a_job_that_runs_again"],
    ),
    Fault::new(
        "purge::first_end_counts",
        &FirstEndCounts,
        "The time of the end is written once and never moved.",
        &["purge::counts_from_the_last_end"],
    ),
];

struct PagesByOffset;

#[async_trait]
impl Wrong for PagesByOffset {
    async fn list(
        &self,
        real: &Real,
        filter: &ListFilter,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Job, JobId>> {
        let offsets = &real.shared.offsets;
        let known = after.and_then(|after| offsets.lock().expect("no panic").get(&after).copied());
        let all = real.handle.list(filter, if known.is_some() { None } else { after }, Limit::MAX).await?;
        let skipped = known.unwrap_or(0);
        let items: Vec<_> = all.items.iter().skip(skipped).take(limit.rows()).cloned().collect();
        let end = skipped + items.len();
        let next = items.last().map(Job::id).filter(|_| end < all.items.len());
        if let Some(next) = next {
            offsets.lock().expect("no panic").insert(next, end);
        }
        let unreadable = if next.is_none() { all.unreadable } else { Vec::new() };
        Ok(Page { items, unreadable, next })
    }
}

struct NewestFirst;

#[async_trait]
impl Wrong for NewestFirst {
    async fn list(
        &self,
        real: &Real,
        filter: &ListFilter,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Job, JobId>> {
        let mut page = real.handle.list(filter, after, limit).await?;
        page.items.reverse();
        Ok(page)
    }
}

struct EndsAPageLate;

#[async_trait]
impl Wrong for EndsAPageLate {
    async fn list(
        &self,
        real: &Real,
        filter: &ListFilter,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Job, JobId>> {
        let mut page = real.handle.list(filter, after, limit).await?;
        if page.items.len() == limit.rows() {
            page.next = page.items.last().map(Job::id);
        }
        Ok(page)
    }
}

struct FiltersAfterTheLimit;

#[async_trait]
impl Wrong for FiltersAfterTheLimit {
    async fn list(
        &self,
        real: &Real,
        filter: &ListFilter,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Job, JobId>> {
        let mut wider = filter.clone();
        wider.state = None;
        let mut page = real.handle.list(&wider, after, limit).await?;
        page.items.retain(|job| filter.state.is_none_or(|state| job.state() == state));
        Ok(page)
    }
}

struct FiltersByCollation;

#[async_trait]
impl Wrong for FiltersByCollation {
    async fn list(
        &self,
        real: &Real,
        filter: &ListFilter,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Job, JobId>> {
        let Some(queue) = &filter.queue else { return real.handle.list(filter, after, limit).await };
        let mut wider = filter.clone();
        wider.queue = None;
        let mut page = real.handle.list(&wider, after, Limit::MAX).await?;
        page.items.retain(|job| job.queue.as_str().eq_ignore_ascii_case(queue.as_str()));
        let more = page.items.len() > limit.rows();
        page.items.truncate(limit.rows());
        page.next = page.items.last().map(Job::id).filter(|_| more);
        Ok(page)
    }
}

struct UnreadableFailsTheList;

#[async_trait]
impl Wrong for UnreadableFailsTheList {
    async fn list(
        &self,
        real: &Real,
        filter: &ListFilter,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Job, JobId>> {
        let page = real.handle.list(filter, after, limit).await?;
        match page.unreadable.first() {
            Some(bad) => Err(Error::not_applied(ErrorKind::Schema, bad.reason.clone())),
            None => Ok(page),
        }
    }
}

struct UnreadableIsDropped;

#[async_trait]
impl Wrong for UnreadableIsDropped {
    async fn list(
        &self,
        real: &Real,
        filter: &ListFilter,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Job, JobId>> {
        Ok(Page { unreadable: Vec::new(), ..real.handle.list(filter, after, limit).await? })
    }
}

struct UnknownStateIsNotCounted;

#[async_trait]
impl Wrong for UnknownStateIsNotCounted {
    async fn counts(&self, real: &Real) -> Result<Vec<Count>> {
        let mut counts = real.handle.counts().await?;
        counts.retain(|count| count.state.is_some());
        Ok(counts)
    }
}

struct CountsOneQueue;

#[async_trait]
impl Wrong for CountsOneQueue {
    async fn counts(&self, real: &Real) -> Result<Vec<Count>> {
        let mut counts: Vec<Count> = Vec::new();
        for count in real.handle.counts().await? {
            match counts.iter_mut().find(|other| other.state == count.state) {
                Some(other) => other.jobs += count.jobs,
                None => counts.push(count),
            }
        }
        Ok(counts)
    }
}

struct UnknownIdIsAnError;

#[async_trait]
impl Wrong for UnknownIdIsAnError {
    async fn get(&self, real: &Real, id: JobId) -> Result<Option<Job>> {
        match real.handle.get(id).await? {
            None => Err(Error::not_applied(ErrorKind::Permanent, "no rows returned by a query that expected one")),
            job => Ok(job),
        }
    }
}

/// How the reference is purged.
#[derive(Clone, Copy)]
struct Plan {
    checks: bool,
    states: fn(JobState, JobState) -> bool,
    age: fn(&Job) -> Option<Timestamp>,
    old_enough: fn(Timestamp, Timestamp) -> bool,
    by_id: bool,
    two_steps: bool,
}

/// The plan of a right backend; each fault changes one thing of it.
const RIGHT: Plan = Plan {
    checks: true,
    states: |row, named| row == named,
    age: |job| job.finished_at,
    old_enough: |at, latest| at <= latest,
    by_id: false,
    two_steps: false,
};

struct Purges(Plan);

#[async_trait]
impl Wrong for Purges {
    async fn purge(&self, real: &Real, state: JobState, older_than: Delay, limit: Limit) -> Result<u64> {
        let plan = &self.0;
        if plan.checks {
            check_purge(state)?;
        }
        let latest = real.memory().now().saturating_add_millis(-older_than.as_millis());
        let find = |rows: &Rows| {
            let of_state = rows.values().filter(|row| !row.foreign_state && (plan.states)(row.job.state(), state));
            let age = |job: &Job| (plan.age)(job).or(Some(job.created_at).filter(|_| !plan.checks));
            let mut found: Vec<_> = of_state
                .filter(|row| age(&row.job).is_some_and(|at| (plan.old_enough)(at, latest)))
                .map(|row| (age(&row.job).filter(|_| !plan.by_id), row.job.id()))
                .collect();
            found.sort();
            found.truncate(limit.rows());
            found
        };
        let delete = |rows: &mut Rows, found: &[(Option<Timestamp>, JobId)]| {
            found.iter().filter(|(_, id)| rows.remove(id).is_some()).count() as u64
        };
        if !plan.two_steps {
            return Ok(real.memory().edit(|rows| {
                let found = find(rows);
                delete(rows, &found)
            }));
        }
        let found = real.memory().edit(|rows| find(rows));
        gap().await;
        Ok(real.memory().edit(|rows| delete(rows, &found)))
    }
}

struct IgnoresTheLimit;

#[async_trait]
impl Wrong for IgnoresTheLimit {
    async fn purge(&self, real: &Real, state: JobState, older_than: Delay, _: Limit) -> Result<u64> {
        real.handle.purge(state, older_than, Limit::MAX).await
    }
}

struct FirstEndCounts;

#[async_trait]
impl Wrong for FirstEndCounts {
    async fn answer(&self, real: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        if let (Ok(Update::Applied(_)), Change::Set(())) = (&answer, asked.patch.finished_at) {
            real.edit(asked.id, |row| {
                let mut kept = real.shared.kept.jobs();
                let first = kept.entry(asked.id).or_insert_with(|| row.job.clone());
                row.job.finished_at = first.finished_at;
            });
        }
        answer
    }
}
