//! Metrics by the `metrics` facade, if its feature is enabled; otherwise nothing is measured.

use std::time::Duration;

use queue_core::Job;
use queue_core::Name;

use super::held::HeldJobs;
use super::report::Counted;

#[cfg(feature = "metrics")]
mod names {
    pub(super) const JOBS: &str = "fenced_queue_jobs_total";
    pub(super) const HELD: &str = "fenced_queue_jobs_held";
    pub(super) const WAITED: &str = "fenced_queue_job_wait_seconds";
    pub(super) const RAN: &str = "fenced_queue_job_run_seconds";
}

/// Jobs to which something happened.
#[cfg(feature = "metrics")]
pub(super) fn counted(what: Counted, by: usize) {
    if by > 0 {
        metrics::counter!(names::JOBS, "event" => what.name()).increment(by as u64);
    }
}

/// How many jobs are held.
#[cfg(feature = "metrics")]
pub(super) fn held(jobs: &HeldJobs) {
    metrics::gauge!(names::HELD).set(f64::from(u32::try_from(jobs.all().len()).unwrap_or(u32::MAX)));
}

/// For how long a job was due when it was claimed, by the store's clock.
#[cfg(feature = "metrics")]
pub(super) fn waited(job: &Job) {
    let due = job.available_at.unix_millis();
    let millis = job.execution.claimed_at.map_or(0, |claimed| claimed.unix_millis().saturating_sub(due));
    let waited = Duration::from_millis(u64::try_from(millis).unwrap_or(0));
    metrics::histogram!(names::WAITED, "kind" => job.kind.to_string()).record(waited);
}

/// For how long a handler ran.
#[cfg(feature = "metrics")]
pub(super) fn ran(kind: &Name, span: Duration) {
    metrics::histogram!(names::RAN, "kind" => kind.to_string()).record(span);
}

#[cfg(not(feature = "metrics"))]
pub(super) fn counted(_: Counted, _: usize) {}

#[cfg(not(feature = "metrics"))]
pub(super) fn held(_: &HeldJobs) {}

#[cfg(not(feature = "metrics"))]
pub(super) fn waited(_: &Job) {}

#[cfg(not(feature = "metrics"))]
pub(super) fn ran(_: &Name, _: Duration) {}
