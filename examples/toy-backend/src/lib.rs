//! A backend to learn from: all jobs in one JSON file, one lock around it.
//!
//! It keeps the whole contract, also between processes. What makes it a toy is its cost: every call reads the file, and every
//! write writes all of it. It does not wait for the disk: it survives the end of a process, but not the loss of power.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use queue_core::*;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Jobs in a file.
#[derive(Clone, Debug)]
pub struct ToyBackend {
    /// The file, which need not exist yet.
    pub path: PathBuf,
    /// Zero but in tests.
    pub clock: ClockOffset,
}

/// A job as the file holds it: as a value, so that one row which cannot be read leaves the others alone.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// The job, as JSON.
    pub job: Value,
    /// Nothing may write this row: for tests of stores that fail.
    pub read_only: bool,
}

impl Row {
    fn new(job: &Job) -> Result<Self> {
        Ok(Self { job: serde_json::to_value(job).map_err(broken)?, read_only: false })
    }

    fn execution(&self, id: JobId) -> Result<Execution, Unreadable> {
        serde_json::from_value(self.job["execution"].clone()).map_err(|error| Unreadable::new(id, error))
    }

    fn job(&self, id: JobId) -> Result<Job, Unreadable> {
        let execution = self.execution(id)?;
        serde_json::from_value(self.job.clone()).map_err(|error| Unreadable::beyond(execution, error))
    }

    /// The job as it was enqueued, whatever has become of it: also if that is a state of a newer version.
    fn enqueued(&self, id: JobId) -> Result<Job, Unreadable> {
        let mut row = self.clone();
        row.job["execution"]["state"] = JobState::Waiting.as_str().into();
        row.job(id)
    }

    /// Changes what the patch changes, and nothing else: what cannot be read stays as it is.
    fn patched(&self, seen: Execution, patch: &Patch, now: Timestamp) -> Result<Self> {
        if self.read_only {
            return Err(Error::not_applied(ErrorKind::Permanent, format!("job {} is read-only", seen.id)));
        }
        let stand_in = NewJob::new("?".try_into()?, "?".try_into()?, Json::null()).into_job(now);
        let before = self.job(seen.id).unwrap_or(Job { execution: seen, ..stand_in });
        let (mut after, mut row) = (before.clone(), self.clone());
        patch.apply(&mut after, now);
        let (before, after) = (Self::new(&before)?.job, Self::new(&after)?.job);
        let changed = after.as_object().into_iter().flatten().filter(|(column, value)| before[*column] != **value);
        changed.for_each(|(column, value)| row.job[column] = value.clone());
        Ok(row)
    }

    /// A column, for searching: rows that cannot be read as a whole may still match.
    fn is(&self, pointer: &str, expected: &str) -> bool {
        self.job.pointer(pointer).and_then(Value::as_str) == Some(expected)
    }

    /// `None` for a state of a newer version; it may well be an active one.
    fn state(&self) -> Option<JobState> {
        self.job.pointer("/execution/state")?.as_str()?.parse().ok()
    }

    fn millis(&self, pointer: &str) -> Option<i64> {
        self.job.pointer(pointer).and_then(Value::as_i64)
    }
}

fn broken(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::not_applied(ErrorKind::Permanent, "the file cannot be used").with_source(error)
}

impl ToyBackend {
    /// Opens the file for one call: nobody else has it until what is returned is dropped. It waits without blocking the runtime, and
    /// not for long. What was changed counts when it is saved; from here on there is no await, so a dropped future cannot split it.
    pub async fn open(&self) -> Result<Open> {
        self.open_within(Duration::from_secs(10)).await
    }

    async fn open_within(&self, longest: Duration) -> Result<Open> {
        let begun = Instant::now();
        let lock = File::create(self.path.with_extension("lock")).map_err(broken)?;
        loop {
            match lock.try_lock() {
                Ok(()) => return self.read(lock),
                Err(TryLockError::WouldBlock) if begun.elapsed() < longest => {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::not_applied(ErrorKind::Transient, "somebody else has the file locked"));
                }
                Err(TryLockError::Error(error)) => return Err(broken(error)),
            }
        }
    }

    fn read(&self, lock: File) -> Result<Open> {
        let text = match fs::read(&self.path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => b"{}".to_vec(),
            text => text.map_err(broken)?,
        };
        // The clock is read when the lock is held: a lease starts when the claim happens.
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let now = i64::try_from(since.as_millis()).unwrap_or(i64::MAX).saturating_add(self.clock.millis());
        let (now, rows) = (now.try_into()?, serde_json::from_slice(&text).map_err(broken)?);
        Ok(Open { rows, now, path: self.path.clone(), _lock: lock })
    }
}

/// The file, opened.
#[derive(Debug)]
pub struct Open {
    /// All that the file holds.
    pub rows: BTreeMap<JobId, Row>,
    now: Timestamp,
    path: PathBuf,
    _lock: File,
}

impl Open {
    /// Replaces the file as a whole.
    pub fn save(&self) -> Result<()> {
        let fresh = self.path.with_extension("new");
        fs::write(&fresh, serde_json::to_vec(&self.rows).map_err(broken)?).map_err(broken)?;
        fs::rename(&fresh, &self.path).map_err(broken)
    }

    /// Another active job of the queue that has the key of this one.
    fn holder_of_key(&self, id: JobId, row: &Row) -> Option<JobId> {
        let is_same = |other: &Row| ["unique_key", "queue"].iter().all(|column| other.job[column] == row.job[column]);
        let taken = |(other, row): &(&JobId, &Row)| {
            **other != id && row.state().is_none_or(JobState::is_active) && is_same(row)
        };
        row.job["unique_key"].as_str().and_then(|_| self.rows.iter().find(taken)).map(|(id, _)| *id)
    }
}

#[async_trait]
impl Backend for ToyBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    async fn migrate(&self) -> Result<()> {
        self.open().await?.save()
    }

    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        check_new_jobs(jobs, &self.capabilities())?;
        let (mut open, mut outcomes) = (self.open().await?, Vec::new());
        for (index, new) in jobs.iter().enumerate() {
            let row = Row::new(&new.clone().into_job(open.now))?;
            let stored = open.rows.get(&new.id).map(|row| row.enqueued(new.id));
            outcomes.push(match (stored, open.holder_of_key(new.id, &row)) {
                (Some(Ok(job)), _) if new.repeats(&job) => Enqueued::Existing(new.id),
                (Some(_), _) => return Err(id_reused(new.id).at_index(index)),
                (None, Some(existing)) => Enqueued::Duplicate { existing },
                (None, None) => {
                    open.rows.insert(new.id, row);
                    Enqueued::New(new.id)
                }
            });
        }
        open.save()?;
        Ok(outcomes)
    }

    async fn get(&self, id: JobId) -> Result<Option<Job>> {
        Ok(self.open().await?.rows.get(&id).map(|row| row.job(id)).transpose()?)
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed> {
        let mut open = self.open_within(request.lease().duration() / 3).await?;
        let now = open.now;
        let is_due = |row: &Row| {
            row.state() == Some(JobState::Waiting)
                && row.is("/queue", request.queue().as_str())
                && request.kinds().iter().any(|kind| row.is("/kind", kind.as_str()))
                && row.millis("/available_at").is_some_and(|at| at <= now.unix_millis())
        };
        let mut due: Vec<_> = open.rows.iter_mut().filter(|(_, row)| is_due(row)).collect();
        due.sort_by_key(|(id, row)| (row.millis("/priority"), row.millis("/available_at"), **id));
        let (revision, mut claimed) = (Revision::random(), Claimed::default());
        for (id, row) in due.into_iter().take(request.limit().rows()) {
            let Ok(mut execution) = row.execution(*id) else { continue };
            request.apply(&mut execution, revision, now);
            row.job["execution"] = serde_json::to_value(execution).map_err(broken)?;
            match row.job(*id) {
                Ok(job) => claimed.jobs.push(job),
                Err(row) => claimed.unreadable.push(row),
            }
        }
        open.save()?;
        Ok(claimed)
    }

    async fn update_if_current(&self, id: JobId, current: &Fingerprint, patch: &Patch) -> Result<Update> {
        patch.check(&self.capabilities())?;
        let mut open = self.open().await?;
        let Some(row) = open.rows.get(&id) else { return Ok(Update::Missing) };
        let seen = match row.execution(id) {
            Err(unreadable) => return Ok(Update::Unreadable(unreadable)),
            Ok(seen) if !current.matches(&seen, open.now) => return Ok(Update::Conflict(seen)),
            Ok(seen) => seen,
        };
        let after = row.patched(seen, patch, open.now)?;
        if after.state().is_none_or(JobState::is_active) && open.holder_of_key(id, &after).is_some() {
            return Err(Error::invalid(format!("job {id}: another active job has its unique key")));
        }
        let execution = after.execution(id)?;
        open.rows.insert(id, after);
        open.save()?;
        Ok(Update::Applied(execution))
    }

    async fn extend_leases(&self, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        let (mut open, mut beats) = (self.open_within(lease.duration() / 3).await?, Vec::new());
        let until = open.now.saturating_add_millis(lease.as_millis());
        for held in held {
            let row = open.rows.get_mut(&held.id).and_then(|row| Some((row.execution(held.id).ok()?, row)));
            beats.push(match row {
                Some((mut execution, row)) if Held::of(&execution).as_ref() == Some(held) => {
                    execution.lease_expires_at = execution.lease_expires_at.max(Some(until));
                    row.job["execution"] = serde_json::to_value(execution).map_err(broken)?;
                    Beat::Extended
                }
                _ => Beat::Lost,
            });
        }
        open.save()?;
        Ok(beats)
    }

    async fn stale(&self, after: Option<StaleCursor>, limit: Limit) -> Result<Page<Execution, StaleCursor>> {
        let (open, mut stale) = (self.open().await?, Vec::new());
        for (id, row) in open.rows.iter().filter(|(_, row)| row.state().is_some_and(JobState::is_held)) {
            let lease = row.millis("/execution/lease_expires_at").map(Timestamp::try_from).transpose()?;
            let place = StaleCursor { lease_expires_at: lease, id: *id };
            if lease <= Some(open.now) && Some(place) > after {
                stale.push((place, row.execution(*id)));
            }
        }
        stale.sort_by_key(|(place, _)| *place);
        Ok(Page::collect(stale, limit))
    }

    async fn claimed_by(
        &self,
        worker: &WorkerId,
        older_than: Delay,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Execution, JobId>> {
        let open = self.open().await?;
        let latest = open.now.unix_millis() - older_than.as_millis();
        let held =
            open.rows.iter().filter(|(id, row)| Some(**id) > after && row.state().is_some_and(JobState::is_held));
        let old = held.filter(|(_, row)| row.millis("/execution/claimed_at").is_some_and(|at| at <= latest));
        let mine = old.filter(|(_, row)| row.is("/execution/claimed_by", worker.as_str()));
        Ok(Page::collect(mine.map(|(id, row)| (*id, row.execution(*id))), limit))
    }
}

#[async_trait]
impl Inspect for ToyBackend {
    async fn list(&self, filter: &ListFilter, after: Option<JobId>, limit: Limit) -> Result<Page<Job, JobId>> {
        let wanted = |row: &Row| {
            filter.queue.as_ref().is_none_or(|queue| row.is("/queue", queue.as_str()))
                && filter.kind.as_ref().is_none_or(|kind| row.is("/kind", kind.as_str()))
                && filter.state.is_none_or(|state| row.state() == Some(state))
        };
        let open = self.open().await?;
        let found = open.rows.iter().filter(|(id, row)| Some(**id) > after && wanted(row));
        Ok(Page::collect(found.map(|(id, row)| (*id, row.job(*id))), limit))
    }

    async fn counts(&self) -> Result<Vec<Count>> {
        let group = |row: &Row| {
            let queue = Name::try_from(row.job["queue"].as_str().unwrap_or_default());
            Ok(Count { queue: queue.map_err(|error| error.to_string())?, state: row.state(), jobs: 1 })
        };
        Ok(Count::collect(self.open().await?.rows.values().map(group)))
    }

    async fn purge(&self, state: JobState, older_than: Delay, limit: Limit) -> Result<u64> {
        check_purge(state)?;
        let mut open = self.open().await?;
        let latest = open.now.unix_millis() - older_than.as_millis();
        let ended = open.rows.iter().filter(|(_, row)| row.state() == Some(state));
        let ended = ended.filter_map(|(id, row)| Some((row.millis("/finished_at")?, *id)));
        let mut ended: Vec<_> = ended.filter(|(at, _)| *at <= latest).collect();
        ended.sort();
        ended.truncate(limit.rows());
        ended.iter().for_each(|(_, id)| drop(open.rows.remove(id)));
        open.save()?;
        Ok(ended.len() as u64)
    }
}
