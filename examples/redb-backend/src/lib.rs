//! A backend of `fenced-queue` in one file, by the embedded key-value store [`redb`].
//!
//! # What follows from redb
//!
//! - **One process.** redb lets one [`Database`] per file be open (its modes for several processes are not used here). Open
//!   the file once, by [`RedbBackend::open`], and clone what you get: clones share the database, and with it the wake-ups. A
//!   second `open` of the file, in this process or another, fails as [`Unavailable`](ErrorKind::Unavailable), so all of the
//!   queue's workers, and whoever inspects it, live in one process. The file is closed with the last clone, and with the last
//!   call that was begun.
//! - **One writer.** Every change is one write transaction; it reads, compares and writes with nobody in between. Writers take
//!   turns in the order in which they came, and a claim waits for its turn no longer than a third of its lease. Readers
//!   wait for nobody, and see what was committed last.
//! - **Durable when it has answered.** Every commit waits for the disk. After a failed commit redb refuses further writes
//!   until the file is opened again, which repairs it; so it does after a crash.
//! - **The machine's clock.** A clock that is set back delays what is due and what is stale.
//!
//! A call runs on tokio's blocking threads and is not stopped by dropping its future: one that still waits for its turn does
//! nothing, one that has begun ends as if somebody waited for it.

mod error;
pub mod rows;

pub use error::Failed;

use std::collections::HashMap;
use std::fmt;
use std::ops::Bound;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use async_trait::async_trait;
use queue_core::*;
use redb::Database;
use redb::ReadTransaction;
use redb::ReadableDatabase;
use redb::ReadableTable;
use redb::WriteTransaction;
use rows::Label;
use rows::Rows;
use tokio::sync::Mutex;
use tokio::sync::OwnedMutexGuard;
use uuid::Uuid;

/// A queue in a file. Clones share it.
#[derive(Clone)]
pub struct RedbBackend(Arc<Shared>);

struct Shared {
    database: Database,
    /// Whose turn it is to write. redb would let writers wait as well, but each on a thread, and without an end.
    turn: Arc<Mutex<()>>,
    clock: ClockOffset,
    signal: WorkSignal,
}

impl fmt::Debug for RedbBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedbBackend").finish_non_exhaustive()
    }
}

/// The turn to write, and the transaction that it is used for. Dropped, it is rolled back.
pub struct Writing {
    // Fields are dropped in this order: the transaction ends before the next turn begins.
    transaction: WriteTransaction,
    _turn: OwnedMutexGuard<()>,
}

impl fmt::Debug for Writing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writing").finish_non_exhaustive()
    }
}

impl Deref for Writing {
    type Target = WriteTransaction;

    fn deref(&self) -> &WriteTransaction {
        &self.transaction
    }
}

impl Writing {
    /// Commits, and blocks the thread until the disk has it.
    pub fn commit(self) -> Result<(), Failed> {
        Ok(self.transaction.commit()?)
    }
}

impl RedbBackend {
    /// Opens the queue in this file, and makes what of it is missing.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with_clock(path, ClockOffset::default()).await
    }

    /// Opens the queue as a test does, which moves its clock.
    pub async fn open_with_clock(path: impl AsRef<Path>, clock: ClockOffset) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let database = blocking(move || Ok(Database::create(path)?)).await?;
        let backend = Self(Arc::new(Shared { database, turn: Arc::default(), clock, signal: WorkSignal::default() }));
        backend.migrate().await?;
        Ok(backend)
    }

    /// Begins a write transaction on the file, for tables of the application's own, or for [`Rows`]. All others wait to write
    /// until it ends.
    pub async fn begin(&self) -> Result<Writing> {
        let (shared, turn) = (self.0.clone(), self.turn().await);
        blocking(move || shared.begin(turn)).await
    }

    async fn turn(&self) -> OwnedMutexGuard<()> {
        self.0.turn.clone().lock_owned().await
    }

    /// The turn to write, if it comes within a third of a lease: who waits longer gets too little of what it leases.
    async fn turn_within(&self, lease: Lease) -> Option<OwnedMutexGuard<()>> {
        tokio::time::timeout(lease.duration() / 3, self.turn()).await.ok()
    }

    async fn write<T: Send + 'static>(
        &self,
        turn: OwnedMutexGuard<()>,
        work: impl FnOnce(&mut Rows<'_>, Timestamp) -> Result<T, Failed> + Send + 'static,
    ) -> Result<T> {
        let shared = self.0.clone();
        blocking(move || {
            let writing = shared.begin(turn)?;
            let mut rows = Rows::open(&writing)?;
            let answer = work(&mut rows, shared.now())?;
            let (changed, made_work) = (rows.changed, rows.made_work);
            drop(rows);
            if changed {
                writing.commit()?;
            }
            if made_work {
                shared.signal.notify();
            }
            Ok(answer)
        })
        .await
    }

    async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce(&ReadTransaction, Timestamp) -> Result<T, Failed> + Send + 'static,
    ) -> Result<T> {
        let shared = self.0.clone();
        blocking(move || work(&shared.database.begin_read()?, shared.now())).await
    }
}

impl Shared {
    fn begin(&self, turn: OwnedMutexGuard<()>) -> Result<Writing, Failed> {
        Ok(Writing { transaction: self.database.begin_write()?, _turn: turn })
    }

    /// Asked once the transaction has begun.
    fn now(&self) -> Timestamp {
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let millis = i64::try_from(since_1970.as_millis()).unwrap_or(i64::MAX);
        Timestamp::from_unix_millis(millis.saturating_add(self.clock.millis())).unwrap_or(Timestamp::MAX)
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, Failed> + Send + 'static) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(answer) => Ok(answer?),
        // The runtime is shutting down, or the call panicked.
        Err(error) => Err(Error::new(ErrorKind::Permanent, Certainty::Unknown, "the call was lost").with_source(error)),
    }
}

fn before(now: Timestamp, span: Delay) -> Timestamp {
    now.saturating_add_millis(-span.as_millis())
}

/// A page of those entries that stand for a row of it.
fn page<T, C>(
    entries: impl Iterator<Item = Result<Option<(C, Result<T, Unreadable>)>, Failed>>,
    limit: Limit,
) -> Result<Page<T, C>, Failed> {
    // One more than the page has room for tells whether another page follows.
    let found: Vec<_> = entries.filter_map(Result::transpose).take(limit.rows() + 1).collect::<Result<_, _>>()?;
    Ok(Page::collect(found, limit))
}

fn at_index(failed: Failed, index: usize) -> Failed {
    Error::from(failed).at_index(index).into()
}

/// The compare-and-update of one job.
fn update(rows: &mut Rows<'_>, request: &UpdateRequest, now: Timestamp) -> Result<Update, Failed> {
    let old = match rows.head(request.id)? {
        Some(Ok(job)) => job,
        Some(Err(unreadable)) => return Ok(Update::Unreadable(unreadable)),
        None => return Ok(Update::Missing),
    };
    if !request.current.matches(&old.execution, now) {
        return Ok(Update::Conflict(old.execution));
    }
    let (patch, mut new) = (&request.patch, old.clone());
    patch.apply(&mut new, now);
    let execution = new.execution.clone();
    rows.put(Some(&old), new)?;
    if let Some(payload) = &patch.payload {
        rows.set_text(request.id, rows::PAYLOAD, Some(payload))?;
    }
    match &patch.result {
        Change::Keep => {}
        Change::Clear => rows.set_text(request.id, rows::RESULT, None)?,
        Change::Set(result) => rows.set_text(request.id, rows::RESULT, Some(result))?,
    }
    Ok(Update::Applied(execution))
}

fn enqueue(rows: &mut Rows<'_>, new: NewJob, now: Timestamp) -> Result<Enqueued, Failed> {
    let id = new.id;
    if let Some(stored) = rows.enqueued(id)? {
        let stored = stored.map_err(Error::from)?;
        return if new.repeats(&stored) { Ok(Enqueued::Existing(id)) } else { Err(id_reused(id).into()) };
    }
    let job = new.into_job(now);
    if let Some(existing) = rows.owner(&job)? {
        return Ok(Enqueued::Duplicate { existing });
    }
    rows.set_text(id, rows::PAYLOAD, Some(&job.payload))?;
    rows.put(None, job)?;
    Ok(Enqueued::New(id))
}

fn extend(rows: &mut Rows<'_>, held: &Held, lease: Lease, now: Timestamp) -> Result<Beat, Failed> {
    // What cannot be read is in no state that is held.
    let Some(Ok(old)) = rows.head(held.id)? else { return Ok(Beat::Lost) };
    if Held::of(&old.execution).as_ref() != Some(held) {
        return Ok(Beat::Lost);
    }
    let until = now.saturating_add_millis(lease.as_millis());
    if old.execution.lease_expires_at < Some(until) {
        let mut new = old.clone();
        new.execution.lease_expires_at = Some(until);
        rows.put(Some(&old), new)?;
    }
    Ok(Beat::Extended)
}

#[async_trait]
impl Backend for RedbBackend {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.atomic_batches = true;
        capabilities.wakes = true;
        capabilities
    }

    async fn migrate(&self) -> Result<()> {
        self.write(self.turn().await, |rows, _| rows.migrate()).await
    }

    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        check_new_jobs(jobs, &self.capabilities())?;
        let jobs = jobs.to_vec();
        self.write(self.turn().await, move |rows, now| {
            let answers = jobs.into_iter().enumerate();
            answers.map(|(index, job)| enqueue(rows, job, now).map_err(|error| at_index(error, index))).collect()
        })
        .await
    }

    async fn get(&self, id: JobId) -> Result<Option<Job>> {
        self.read(move |transaction, _| {
            let Some(head) = rows::head(&transaction.open_table(rows::JOBS)?, id)? else { return Ok(None) };
            let job = rows::whole(&transaction.open_table(rows::TEXTS)?, head.map_err(Error::from)?)?;
            Ok(Some(job.map_err(Error::from)?))
        })
        .await
    }

    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed> {
        let Some(turn) = self.turn_within(request.lease()).await else {
            return Err(Error::not_applied(ErrorKind::Transient, "others write to the store"));
        };
        let request = request.clone();
        self.write(turn, move |rows, now| {
            let (revision, mut claimed) = (Revision::random(), Vec::new());
            for priority in Priority::FIRST.get()..=Priority::LAST.get() {
                let room = request.limit().rows() - claimed.len();
                if room == 0 {
                    break;
                }
                let mut due = Vec::new();
                for kind in request.kinds() {
                    due.extend(rows.due(request.queue(), kind, priority, now, room)?);
                }
                due.sort_by_key(|job| (job.available_at, job.id()));
                due.truncate(room);
                for old in due {
                    let mut new = old.clone();
                    request.apply(&mut new.execution, revision, now);
                    rows.put(Some(&old), new.clone())?;
                    claimed.push(rows.whole(new)?);
                }
            }
            Ok(Claimed::collect(claimed))
        })
        .await
    }

    async fn update_if_current(&self, id: JobId, current: &Fingerprint, patch: &Patch) -> Result<Update> {
        patch.check(&self.capabilities())?;
        let request = UpdateRequest { id, current: current.clone(), patch: patch.clone() };
        self.write(self.turn().await, move |rows, now| update(rows, &request, now)).await
    }

    async fn extend_leases(&self, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        let Some(turn) = self.turn_within(lease).await else { return Ok(vec![Beat::Busy; held.len()]) };
        let held = held.to_vec();
        self.write(turn, move |rows, now| held.iter().map(|held| extend(rows, held, lease, now)).collect()).await
    }

    async fn stale(&self, after: Option<StaleCursor>, limit: Limit) -> Result<Page<Execution, StaleCursor>> {
        self.read(move |transaction, now| {
            let jobs = transaction.open_table(rows::JOBS)?;
            let first = after.map_or(Bound::Unbounded, |place| {
                Bound::Excluded((place.lease_expires_at.map(Timestamp::unix_millis), place.id.as_uuid()))
            });
            let last = Bound::Included((Some(now.unix_millis()), Uuid::max()));
            let leases = transaction.open_table(rows::LEASES)?;
            let entries = leases.range((first, last))?.map(|entry| {
                let (lease, id) = entry?.0.value();
                let lease_expires_at = lease.and_then(|at| Timestamp::try_from(at).ok());
                let place = StaleCursor { lease_expires_at, id: JobId::from(id) };
                Ok(rows::head(&jobs, place.id)?.map(|head| (place, head.map(|job| job.execution))))
            });
            page(entries, limit)
        })
        .await
    }

    async fn claimed_by(
        &self,
        worker: &WorkerId,
        older_than: Delay,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Execution, JobId>> {
        let worker = worker.clone();
        self.read(move |transaction, now| {
            let jobs = transaction.open_table(rows::JOBS)?;
            let first = after.map_or(Bound::Included((worker.as_str(), Uuid::nil())), |id| {
                Bound::Excluded((worker.as_str(), id.as_uuid()))
            });
            let last = Bound::Included((worker.as_str(), Uuid::max()));
            let (holders, latest) = (transaction.open_table(rows::HOLDERS)?, before(now, older_than));
            let is_old = |execution: &Execution| execution.claimed_at.is_some_and(|at| at <= latest);
            let entries = holders.range((first, last))?.map(|entry| {
                let id = JobId::from(entry?.0.value().1);
                let found = rows::head(&jobs, id)?.map(|head| head.map(|job| job.execution));
                Ok(found.filter(|row| row.as_ref().map_or(true, is_old)).map(|row| (id, row)))
            });
            page(entries, limit)
        })
        .await
    }

    async fn update_many_if_current(&self, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        check_updates(updates, &self.capabilities())?;
        let updates = updates.to_vec();
        self.write(self.turn().await, move |rows, now| {
            let answers = updates.iter().enumerate();
            answers.map(|(index, request)| update(rows, request, now).map_err(|error| at_index(error, index))).collect()
        })
        .await
    }

    async fn wait_for_work(&self, _queues: &[Name]) -> Result<()> {
        self.0.signal.wait().await;
        Ok(())
    }
}

#[async_trait]
impl Inspect for RedbBackend {
    async fn list(&self, filter: &ListFilter, after: Option<JobId>, limit: Limit) -> Result<Page<Job, JobId>> {
        let filter = filter.clone();
        self.read(move |transaction, _| {
            let (jobs, texts) = (transaction.open_table(rows::JOBS)?, transaction.open_table(rows::TEXTS)?);
            let first = after.map_or(Bound::Unbounded, |id| Bound::Excluded(id.as_uuid()));
            let entries = jobs.range((first, Bound::Unbounded))?.map(|entry| {
                let (id, row) = entry?;
                let (id, row) = (JobId::from(id.value()), row.value());
                if !Label::of(row).passes(&filter) {
                    return Ok(None);
                }
                let job = match rows::parse(id, row) {
                    Ok(head) => rows::whole(&texts, head)?,
                    Err(unreadable) => Err(unreadable),
                };
                Ok(Some((id, job)))
            });
            page(entries, limit)
        })
        .await
    }

    async fn counts(&self) -> Result<Vec<Count>> {
        self.read(|transaction, _| {
            let mut groups: HashMap<_, u64> = HashMap::new();
            for entry in transaction.open_table(rows::JOBS)?.iter()? {
                let Label { queue, state, .. } = Label::of(entry?.1.value());
                *groups.entry((queue, state)).or_default() += 1;
            }
            Ok(Count::collect(groups.into_iter().map(|((queue, state), jobs)| match queue {
                Some(queue) => Ok(Count { queue, state, jobs }),
                None => Err(format!("{jobs} rows have no queue")),
            })))
        })
        .await
    }

    async fn purge(&self, state: JobState, older_than: Delay, limit: Limit) -> Result<u64> {
        check_purge(state)?;
        self.write(self.turn().await, move |rows, now| {
            let ended = rows.ended(state, before(now, older_than), limit.rows())?;
            for job in &ended {
                rows.delete(job)?;
            }
            Ok(ended.len() as u64)
        })
        .await
    }
}
