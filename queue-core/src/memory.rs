//! The contract in memory: the reference that other backends are compared with, and a store for unit tests.

mod steps;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::SystemTime;

use async_trait::async_trait;

use crate::*;

/// A store in this process's memory, forgotten with its last clone.
///
/// It keeps the whole contract but durability. Clones are handles to one store. Its clock is the system's, or stands
/// still until a test moves it:
///
/// ```
/// use queue_core::*;
///
/// # async fn example() -> Result<()> {
/// let backend = MemoryBackend::at("2031-01-01T00:00:00Z".parse()?);
/// let mut job = NewJob::new("mail".try_into()?, "welcome".try_into()?, Json::null());
/// job.available = When::After(Delay::from_millis(60_000)?);
/// backend.enqueue(&[job]).await?;
/// backend.advance(Delay::from_millis(60_000)?); // now it is due
/// # Ok(())
/// # }
/// ```
///
/// Claims look at every row: it is not made for large backlogs.
#[derive(Clone, Debug, Default)]
pub struct MemoryBackend {
    rows: Arc<Mutex<Rows>>,
    /// By key. Whoever locks both locks this first.
    events: Arc<Mutex<BTreeMap<Name, steps::Kept>>>,
    fixed: Option<Timestamp>,
    offset: ClockOffset,
    max_payload: Option<usize>,
    signal: WorkSignal,
}

/// The rows of a [`MemoryBackend`], by id.
pub type Rows = BTreeMap<JobId, MemoryRow>;

/// A row of a [`MemoryBackend`], with what tests can do to it that the contract cannot.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MemoryRow {
    /// The job.
    pub job: Job,
    /// Its steps, by name.
    pub steps: BTreeMap<Name, Step>,
    /// Reading the row's data fails, while its lifecycle part can be read.
    pub broken: bool,
    /// The row has a state that this version does not know.
    pub foreign_state: bool,
    /// Every update of the row fails.
    pub poisoned: bool,
    /// Somebody's transaction has the row locked.
    pub locked: bool,
}

impl From<Job> for MemoryRow {
    fn from(job: Job) -> Self {
        Self { job, steps: BTreeMap::new(), broken: false, foreign_state: false, poisoned: false, locked: false }
    }
}

impl MemoryRow {
    fn is(&self, state: JobState) -> bool {
        !self.foreign_state && self.job.state() == state
    }

    fn is_held(&self) -> bool {
        !self.foreign_state && self.job.state().is_held()
    }

    /// Counts for the unique key; a state that is unknown may well be active.
    fn is_active(&self) -> bool {
        self.foreign_state || self.job.state().is_active()
    }

    fn execution(&self) -> Result<Execution, Unreadable> {
        let execution = self.job.execution.clone();
        match self.foreign_state {
            false => Ok(execution),
            true => Err(Unreadable::new(execution.id, "unknown state")),
        }
    }

    fn job(&self) -> Result<Job, Unreadable> {
        let execution = self.execution()?;
        match self.broken {
            false => Ok(self.job.clone()),
            true => Err(Unreadable::beyond(execution, "broken data")),
        }
    }
}

impl MemoryBackend {
    /// An empty store on the system's clock.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty store whose clock stands at `now` until it is moved.
    pub fn at(now: Timestamp) -> Self {
        Self { fixed: Some(now), ..Self::default() }
    }

    /// Refuses payloads and results of more bytes than this.
    #[must_use]
    pub fn with_max_payload(mut self, bytes: usize) -> Self {
        self.max_payload = Some(bytes);
        self
    }

    /// Moves the store's clock, for all its handles.
    pub fn advance(&self, delay: Delay) {
        self.offset.advance(delay);
    }

    /// What the store's clock shows.
    pub fn now(&self) -> Timestamp {
        let system = || {
            let elapsed = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            Timestamp::from_unix_millis(0).map_or(Timestamp::MIN, |epoch| {
                epoch.saturating_add_millis(i64::try_from(elapsed.as_millis()).unwrap_or(i64::MAX))
            })
        };
        self.fixed.unwrap_or_else(system).saturating_add_millis(self.offset.millis())
    }

    /// Changes rows behind the contract's back, in one step: for tests of what happens to rows that were edited, locked
    /// or broken by others.
    pub fn edit<T>(&self, edit: impl FnOnce(&mut Rows) -> T) -> T {
        edit(&mut self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Rows> {
        // A panic in `edit` leaves the rows as they are: nothing else can panic under the lock.
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Backend for MemoryBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_payload: self.max_payload.unwrap_or(Capabilities::DEFAULT_MAX_PAYLOAD),
            atomic_batches: true,
            skips_locked_rows: true,
            wakes: true,
            durable_steps: true,
        }
    }

    async fn migrate(&self) -> Result<()> {
        Ok(())
    }

    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        check_new_jobs(jobs, &self.capabilities())?;
        let mut rows = self.lock();
        for (index, job) in jobs.iter().enumerate() {
            refuse_reused(&rows, job).map_err(|error| error.at_index(index))?;
        }
        let now = self.now();
        let outcomes = jobs.iter().map(|job| enqueue_row(&mut rows, job, now)).collect();
        drop(rows);
        self.signal.notify();
        Ok(outcomes)
    }

    async fn get(&self, id: JobId) -> Result<Option<Job>> {
        Ok(self.lock().get(&id).map(MemoryRow::job).transpose()?)
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed> {
        let mut rows = self.lock();
        let now = self.now();
        let mut due: Vec<_> = rows
            .values_mut()
            .filter(|row| {
                let job = &row.job;
                row.is(JobState::Waiting)
                    && !row.locked
                    && job.available_at <= now
                    && job.queue == *request.queue()
                    && request.kinds().contains(&job.kind)
            })
            .collect();
        due.sort_by_key(|row| (row.job.priority, row.job.available_at, row.job.id()));
        let revision = Revision::random();
        let claim = |row: &mut MemoryRow| {
            request.apply(&mut row.job.execution, revision, now);
            row.job()
        };
        Ok(Claimed::collect(due.into_iter().take(request.limit().rows()).map(claim)))
    }

    async fn update_if_current(&self, id: JobId, current: &Fingerprint, patch: &Patch) -> Result<Update> {
        let request = UpdateRequest { id, current: current.clone(), patch: patch.clone() };
        let answers = self.update_many_if_current(&[request]).await?;
        Ok(answers.into_iter().next().unwrap_or(Update::Missing))
    }

    async fn extend_leases(&self, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        let mut rows = self.lock();
        let now = self.now();
        let until = now.saturating_add_millis(lease.as_millis());
        let mut beat = |held: &Held| match rows.get_mut(&held.id) {
            Some(row) if row.is_held() && Held::of(&row.job.execution).as_ref() == Some(held) => {
                if row.locked {
                    return Beat::Busy;
                }
                let lease = &mut row.job.execution.lease_expires_at;
                *lease = Some(lease.map_or(until, |old| old.max(until)));
                Beat::Extended
            }
            _ => Beat::Lost,
        };
        Ok(held.iter().map(&mut beat).collect())
    }

    async fn stale(&self, after: Option<StaleCursor>, limit: Limit) -> Result<Page<Execution, StaleCursor>> {
        let cursor = |job: &Job| StaleCursor { lease_expires_at: job.execution.lease_expires_at, id: job.id() };
        let rows = self.lock();
        let now = self.now();
        let mut stale: Vec<_> = rows
            .values()
            .filter(|row| row.is_held() && row.job.execution.lease_expires_at.is_none_or(|expiry| expiry <= now))
            .filter(|row| after.is_none_or(|after| cursor(&row.job) > after))
            .collect();
        stale.sort_by_key(|row| cursor(&row.job));
        Ok(Page::collect(stale.into_iter().map(|row| (cursor(&row.job), row.execution())), limit))
    }

    async fn claimed_by(
        &self,
        worker: &WorkerId,
        older_than: Delay,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Execution, JobId>> {
        let rows = self.lock();
        let latest = self.now().saturating_add_millis(-older_than.as_millis());
        let claimed = rows.values().filter(|row| {
            let execution = &row.job.execution;
            row.is_held()
                && execution.claimed_by.as_ref() == Some(worker)
                && execution.claimed_at.is_some_and(|at| at <= latest)
                && after.is_none_or(|after| execution.id > after)
        });
        Ok(Page::collect(claimed.map(|row| (row.job.id(), row.execution())), limit))
    }

    async fn update_many_if_current(&self, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        check_updates(updates, &self.capabilities())?;
        let mut rows = self.lock();
        let now = self.now();
        let mut before = Vec::new();
        let mut answers = Vec::with_capacity(updates.len());
        for (index, update) in updates.iter().enumerate() {
            before.extend(rows.get(&update.id).cloned());
            match update_row(&mut rows, update, now) {
                Ok(answer) => answers.push(answer),
                Err(error) => {
                    // Latest first, so that the earliest of a row that stands there twice is what remains.
                    rows.extend(before.into_iter().rev().map(|row| (row.job.id(), row)));
                    return Err(error.at_index(index));
                }
            }
        }
        drop(rows);
        self.signal.notify();
        Ok(answers)
    }

    async fn wait_for_work(&self, _queues: &[Name]) -> Result<()> {
        self.signal.wait().await;
        Ok(())
    }

    fn durable_steps(&self) -> Option<&dyn DurableSteps> {
        Some(self)
    }
}

/// Another active job of the queue that has this key.
fn holder_of_key(rows: &Rows, id: JobId, queue: &Name, key: Option<&UniqueKey>) -> Option<JobId> {
    let key = key?;
    let has_key = |row: &&MemoryRow| {
        row.is_active() && row.job.id() != id && row.job.unique_key.as_ref() == Some(key) && row.job.queue == *queue
    };
    rows.values().find(has_key).map(|row| row.job.id())
}

fn refuse_reused(rows: &Rows, job: &NewJob) -> Result<()> {
    match rows.get(&job.id) {
        Some(row) if !job.repeats(&row.job) => Err(id_reused(job.id)),
        _ => Ok(()),
    }
}

/// Stores a job whose id is not another's.
fn enqueue_row(rows: &mut Rows, job: &NewJob, now: Timestamp) -> Enqueued {
    let holder = holder_of_key(rows, job.id, &job.queue, job.unique_key.as_ref());
    match (rows.get(&job.id), holder) {
        (Some(_), _) => Enqueued::Existing(job.id),
        (None, Some(existing)) => Enqueued::Duplicate { existing },
        (None, None) => {
            rows.insert(job.id, job.clone().into_job(now).into());
            Enqueued::New(job.id)
        }
    }
}

fn update_row(rows: &mut Rows, update: &UpdateRequest, now: Timestamp) -> Result<Update> {
    let Some(row) = rows.get(&update.id) else {
        return Ok(Update::Missing);
    };
    if row.locked {
        return Err(Error::not_applied(ErrorKind::Transient, format!("job {} is locked", update.id)));
    }
    let current = match row.execution() {
        Ok(current) => current,
        Err(unreadable) => return Ok(Update::Unreadable(unreadable)),
    };
    if !update.current.matches(&current, now) {
        return Ok(Update::Conflict(current));
    }
    if row.poisoned {
        return Err(Error::not_applied(ErrorKind::Permanent, format!("job {} cannot be written", update.id)));
    }
    let mut job = row.job.clone();
    update.patch.apply(&mut job, now);
    if job.state().is_active() && holder_of_key(rows, job.id(), &job.queue, job.unique_key.as_ref()).is_some() {
        return Err(Error::invalid(format!("job {}: another active job has its unique key", update.id)));
    }
    let execution = job.execution.clone();
    if let Some(row) = rows.get_mut(&update.id) {
        row.job = job;
    }
    Ok(Update::Applied(execution))
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Inspect for MemoryBackend {
    async fn list(&self, filter: &ListFilter, after: Option<JobId>, limit: Limit) -> Result<Page<Job, JobId>> {
        let rows = self.lock();
        let found = rows.values().filter(|row| {
            after.is_none_or(|after| row.job.id() > after)
                && filter.queue.as_ref().is_none_or(|queue| row.job.queue == *queue)
                && filter.kind.as_ref().is_none_or(|kind| row.job.kind == *kind)
                && filter.state.is_none_or(|state| row.is(state))
        });
        Ok(Page::collect(found.map(|row| (row.job.id(), row.job())), limit))
    }

    async fn counts(&self) -> Result<Vec<Count>> {
        let group = |row: &MemoryRow| {
            let state = row.execution().ok().map(|execution| execution.state);
            Ok(Count { queue: row.job.queue.clone(), state, jobs: 1 })
        };
        Ok(Count::collect(self.lock().values().map(group)))
    }

    async fn purge(&self, state: JobState, older_than: Delay, limit: Limit) -> Result<u64> {
        check_purge(state)?;
        let mut rows = self.lock();
        let latest = self.now().saturating_add_millis(-older_than.as_millis());
        let mut ended: Vec<_> = rows
            .values()
            .filter(|row| row.is(state) && !row.locked && row.job.finished_at.is_some_and(|at| at <= latest))
            .map(|row| (row.job.finished_at, row.job.id()))
            .collect();
        ended.sort();
        ended.truncate(limit.rows());
        for (_, id) in &ended {
            rows.remove(id);
        }
        Ok(ended.len() as u64)
    }
}
