//! The contract that a store keeps.

use std::collections::BTreeMap;
use std::fmt;
use std::future::pending;
use std::ops::DerefMut;

use async_trait::async_trait;

use crate::Delay;
use crate::DurableSteps;
use crate::Enqueued;
use crate::Error;
use crate::ErrorKind;
use crate::Execution;
use crate::Fingerprint;
use crate::Invalid;
use crate::Job;
use crate::JobId;
use crate::JobState;
use crate::Lease;
use crate::Name;
use crate::NewJob;
use crate::Patch;
use crate::Result;
use crate::Revision;
use crate::Timestamp;
use crate::WorkerId;
use crate::error::clipped;

/// A durable store of jobs in which every lifecycle write is a compare-and-update.
///
/// > Every lifecycle write is a compare-and-update against the execution that it was decided on. It
/// > applies atomically or not at all, and the caller learns which.
///
/// Applications use it through `Queue` and `Worker` of `fenced-queue`. Whoever writes a backend
/// implements this trait and runs `queue-conformance`; each method names the cases that check it.
///
/// # What holds for every method
///
/// - **One clock, the store's.** "Now" is read inside the statement, once whatever it had to wait for
///   has been granted; it is never bound by the caller and never the start of a transaction. It is cut to the
///   millisecond, not rounded. Tests add an offset ([`ClockOffset`](crate::ClockOffset)).
/// - **Errors say what became of the write** ([`Error::certainty`]). Nothing is swallowed: a failing
///   store is an error, never an empty answer and never a conflict.
/// - **Futures may be dropped at any await.** The row is then changed whole or not at all, and neither
///   a lock nor a transaction stays behind.
/// - **A row that cannot be read fails no call for the others**: it comes back beside them as
///   [`Unreadable`].
/// - **Bound, never spliced.** Names come from users and may hold any character but U+0000.
/// - **Handles are independent.** Two handles on one store, in two processes, see one state.
///
/// # The classic mistake
///
/// ```text
/// wrong:  row = SELECT .. WHERE id = ?; if row matches { UPDATE .. WHERE id = ? }
/// right:  UPDATE .. WHERE id = ? AND state = ? AND .. AND revision = ?
/// ```
///
/// Between the two statements of the first form another worker writes. Under every isolation
/// level that databases use by default the second statement then overwrites it.
///
/// # Leaving out what makes it safe does not compile
///
/// ```compile_fail,E0046
/// use async_trait::async_trait;
/// use queue_core::*;
///
/// struct Unfenced;
///
/// #[async_trait]
/// impl Backend for Unfenced {
///     fn capabilities(&self) -> Capabilities { unimplemented!() }
///     async fn migrate(&self) -> Result<()> { unimplemented!() }
///     async fn enqueue(&self, _: &[NewJob]) -> Result<Vec<Enqueued>> { unimplemented!() }
///     async fn get(&self, _: JobId) -> Result<Option<Job>> { unimplemented!() }
///     async fn claim(&self, _: &ClaimRequest) -> Result<Claimed> { unimplemented!() }
///     async fn extend_leases(&self, _: &[Held], _: Lease) -> Result<Vec<Beat>> { unimplemented!() }
///     async fn stale(&self, _: Option<StaleCursor>, _: Limit) -> Result<Page<Execution, StaleCursor>> { unimplemented!() }
///     async fn claimed_by(&self, _: &WorkerId, _: Delay, _: Option<JobId>, _: Limit) -> Result<Page<Execution, JobId>> { unimplemented!() }
/// }
/// ```
#[async_trait]
pub trait Backend: Send + Sync {
    /// What this backend offers beyond the contract. Answers without I/O, the same for its whole life.
    fn capabilities(&self) -> Capabilities;

    /// Brings the store's schema to this version. Harmless when it is there already.
    ///
    /// # Contract
    ///
    /// - Any number of processes may call it at once; one that dies in the middle blocks nobody and
    ///   leaves the old schema or the new one. (`setup::migrating_at_once`)
    /// - Jobs that are stored stay as they are. (`setup::migrating_again_keeps_jobs`)
    /// - A program below the oldest version that the schema admits is refused with
    ///   [`ErrorKind::Schema`], both versions in the message, and nothing is written.
    async fn migrate(&self) -> Result<()>;

    /// Stores new jobs, and answers for each, in order.
    ///
    /// # Contract
    ///
    /// - An id that is stored with the same content is [`Enqueued::Existing`], whatever has become of the job
    ///   since, be it a state of a newer version (`enqueue::an_id_in_a_foreign_state`); with other content the whole call is refused with
    ///   [`ErrorKind::IdReused`]. The id is judged before the unique key. (group `enqueue`)
    /// - A unique key that another active job of the queue has is [`Enqueued::Duplicate`], an outcome and no
    ///   error. The store itself enforces it, so that no race admits two. A job in a state of a newer version counts as
    ///   active. (group `unique`)
    /// - A refused call, an item over the cap among them, stores nothing and names the item, also if there is only
    ///   one. (`enqueue::one_bad_item_stores_nothing`) Without [`Capabilities::atomic_batches`] this holds for what can be known before the first
    ///   write: if another call takes an id in between, others of this call may be stored, and the error's certainty is
    ///   [`Unknown`](crate::Certainty::Unknown).
    /// - A call that is dropped has stored all of its jobs or none, with [`Capabilities::atomic_batches`]; without, each of them
    ///   whole or not at all, and the same call again completes it. (`enqueue::dropped_futures`)
    /// - Calls at once, also about the same ids and keys, get outcomes, not errors. (`enqueue::race_of_one_job`)
    /// - A job that is due now can be claimed by the next call of anybody. (`claim::due_means_not_after_now`)
    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>>;

    /// The job of this id, as it is now.
    ///
    /// # Contract
    ///
    /// - Payload and result come back byte for byte. (group `data`)
    /// - A row that cannot be read is an error of kind [`ErrorKind::Schema`].
    async fn get(&self, id: JobId) -> Result<Option<Job>>;

    /// Gives due jobs to a worker: at most [`ClaimRequest::limit`] of those that are waiting in the queue, of one of
    /// the kinds, and not available after now.
    ///
    /// # Contract
    ///
    /// - Each row is given to one caller, and while rows are left nobody is told that there are none. (`claim::race_gives_each_job_once`)
    /// - By priority, then by time of availability, then by id; the jobs come back in that order. (`claim::order`)
    /// - Writes in one step: state `claimed`, or `running` with attempt + 1 and `attempted_at` = now;
    ///   fence + 1; a fresh [`Revision::random`] made for this call (shared by its rows); `claimed_by`;
    ///   `claimed_at` = now; the lease from now. (`claim::writes`)
    /// - The lease is whole when the call returns what it claimed, however long it had to wait. (`claim::lease_starts_when_the_claim_happens`)
    /// - Rows locked by somebody else are skipped where the store can, never waited for longer than a third of the
    ///   lease: a store that gets no lock in that time answers [`ErrorKind::Transient`], not applied. (`claim::skips_locked_rows`,
    ///   `claim::gives_up_on_a_lock`)
    /// - A row that cannot be read is claimed and reported beside the others. (`claim::unreadable_rows`)
    /// - A failed claim has claimed nothing, unless its outcome is unknown. (`claim::a_row_that_cannot_be_written`)
    async fn claim(&self, request: &ClaimRequest) -> Result<Claimed>;

    /// Changes the row, if it still is what the decision was based on.
    ///
    /// # Contract
    ///
    /// - One atomic compare-and-update: of callers with one fingerprint exactly one gets
    ///   [`Update::Applied`], the others [`Update::Conflict`], nobody an error. (`update::race_has_one_winner`)
    /// - Every field of the fingerprint is compared, null equal to null only. (`update::every_field_is_compared`)
    /// - A match is `Applied` also if nothing changes by it. (`update::restating_what_is_there_applies`)
    /// - A conflict changes nothing and shows the row as it is; no row is [`Update::Missing`]; a row in a state of a newer
    ///   version is [`Update::Unreadable`]. (`update::missing_is_not_a_conflict`, `update::unreadable_is_not_a_conflict`)
    /// - Exactly the patch is written, nothing else moves. (`update::only_the_patch_is_written`)
    /// - A patch that would break the unique key is an error of kind
    ///   [`ErrorKind::Invalid`], not applied. (`unique::rerun_into_a_taken_key`)
    async fn update_if_current(&self, id: JobId, current: &Fingerprint, patch: &Patch) -> Result<Update>;

    /// The heartbeat: renews the leases of all jobs that a worker holds, and answers for each, in order.
    ///
    /// # Contract
    ///
    /// - A row is held if id, revision and worker are those given, and its state is claimed or running. (group `lease`)
    /// - The new lease is the later of the old one and now + `lease`: never shortened. An expired lease that nobody has
    ///   recovered is revived, a missing one set. (`lease::never_shortened`, `lease::revives_an_expired_one`)
    /// - Nothing but the lease changes, the revision least of all. (`lease::changes_nothing_else`)
    /// - It waits for no row: one that is locked is [`Beat::Busy`] where the store can tell. With one lock for the whole store it
    ///   waits for that a third of `lease` at most, and then reports all as busy or fails as [`ErrorKind::Transient`], not applied. (`lease::gives_up_on_a_lock`)
    /// - A failed call has extended nothing, unless its outcome is unknown. (`lease::a_row_that_cannot_be_written`)
    async fn extend_leases(&self, held: &[Held], lease: Lease) -> Result<Vec<Beat>>;

    /// Held jobs whose lease has run out by the store's clock, or is missing: a page of them, missing leases
    /// first, then by expiry, then by id, after the cursor.
    ///
    /// # Contract
    ///
    /// - No job with a living lease, none that is not held. (`recover::stale_lists_expired_and_unset_leases`)
    /// - Paging passes every row that stays stale once. (`recover::pages_past_what_it_cannot_recover`)
    async fn stale(&self, after: Option<StaleCursor>, limit: Limit) -> Result<Page<Execution, StaleCursor>>;

    /// Jobs that are held by this worker and were claimed at least `older_than` ago by the store's clock, by id,
    /// after the cursor. (`orphan::released_after_the_grace`)
    async fn claimed_by(
        &self,
        worker: &WorkerId,
        older_than: Delay,
        after: Option<JobId>,
        limit: Limit,
    ) -> Result<Page<Execution, JobId>>;

    /// Many compare-and-updates in one call, answered in their order.
    ///
    /// # Contract
    ///
    /// - Each row is judged by itself. (`batch::judges_each_row`) Two updates of one row are judged one after the other
    ///   (`batch::takes_one_row_twice`), those of different rows in any order: whether one finds the unique key free that
    ///   another one of the batch gives up is not promised.
    /// - If one row makes the store fail, the call fails; whoever needs the others repeats row by row, as
    ///   [`Transitioner::submit_all`](crate::Transitioner::submit_all) does. With
    ///   [`Capabilities::atomic_batches`] nothing was written then; without, the error's certainty is about the row that
    ///   failed, and those before it are written. (`batch::a_bad_row_writes_nothing`)
    ///
    /// Override it where the store can do it in fewer round trips.
    async fn update_many_if_current(&self, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
        let mut answers = Vec::with_capacity(updates.len());
        for update in updates {
            answers.push(self.update_if_current(update.id, &update.current, &update.patch).await?);
        }
        Ok(answers)
    }

    /// Resolves when work may have become due in one of the queues, at some time after this future was first polled.
    ///
    /// A worker polls the future once *before* it claims, and awaits it if the claim came back empty: so no
    /// wake-up falls between the two. It may resolve for nothing, and it may miss what becomes due by time
    /// alone or is enqueued by another process: a worker polls as well. The provided one never resolves.
    ///
    /// # Contract
    ///
    /// - Whatever is enqueued through this handle after the first poll wakes every waiter, if
    ///   [`Capabilities::wakes`] is declared. (`wait::wakes_for_what_comes_after_the_first_poll`)
    /// - A future that was polled and is then left alone holds nothing that another call needs. (`wait::holds_nothing_up`)
    async fn wait_for_work(&self, queues: &[Name]) -> Result<()> {
        let _ = queues;
        pending().await
    }

    /// The contract of durable steps and waits on this store, if it keeps it: it does exactly if
    /// [`Capabilities::durable_steps`] is declared. (`steps::are_there_as_declared`)
    fn durable_steps(&self) -> Option<&dyn DurableSteps> {
        None
    }
}

/// What operators need of a store, beyond what workers do.
#[async_trait]
pub trait Inspect: Backend {
    /// Jobs that match the filter, newest id last, after the cursor. (`inspect::list_pages_by_id`)
    async fn list(&self, filter: &ListFilter, after: Option<JobId>, limit: Limit) -> Result<Page<Job, JobId>>;

    /// How many jobs there are by queue and state; what there is none of is left out, and so are rows whose queue cannot be
    /// read. (`inspect::counts`)
    async fn counts(&self) -> Result<Vec<Count>>;

    /// Deletes ended jobs of this state that finished at least `older_than` ago by the store's clock, at most
    /// `limit` of them, the oldest first, and answers how many. (group `purge`)
    ///
    /// # Contract
    ///
    /// - State and time are tested in the delete itself: a job that is run again meanwhile stays. (`purge::spares_a_job_that_runs_again`)
    /// - A state that is not final is refused with [`ErrorKind::Invalid`].
    async fn purge(&self, state: JobState, older_than: Delay, limit: Limit) -> Result<u64>;
}

/// The contract inside the application's own transaction.
///
/// Nothing is visible to others before the caller commits, and nothing remains if it rolls back. After an error,
/// a conflict or a call that was dropped the caller must roll back.
#[async_trait]
pub trait Transactional: Backend {
    /// What the caller's transaction runs on, such as the database driver's connection or session.
    type Connection: Send;

    /// A transaction on a connection of the backend's; what runs in it runs on what it points to. Dropped unfinished, at any await,
    /// it leaves nothing behind.
    type Transaction: DerefMut<Target = Self::Connection> + Send;

    /// Begins a transaction, at READ COMMITTED where the store has such levels. (group `transaction`)
    async fn begin(&self) -> Result<Self::Transaction>;

    /// Begins a transaction that is to settle this execution: with [`update_if_current_in`](Self::update_if_current_in), after other writes.
    ///
    /// What others write to the row meanwhile, but for a new revision, does not make the transaction fail: a heartbeat above all. Where
    /// a transaction cannot change what was written since it began, it locks the row at once, so that others wait or pass. An
    /// execution that is not current is no error here; the update will say so.
    /// (`transaction::a_heartbeat_does_no_harm`)
    ///
    /// The default is [`begin`](Self::begin), which is enough at READ COMMITTED.
    async fn begin_for(&self, execution: &Execution) -> Result<Self::Transaction> {
        let _ = execution;
        self.begin().await
    }

    /// Commits it. (group `transaction`) An error of certainty [`NotApplied`](crate::Certainty::NotApplied) says that nothing of it was kept.
    ///
    /// Not every store tells that it had undone the transaction before, because of an error that nobody heeded: roll back, by
    /// dropping it, after any error.
    async fn commit(&self, transaction: Self::Transaction) -> Result<()>;

    /// [`Backend::enqueue`] in the caller's transaction. A duplicate is an outcome there too, and leaves
    /// the transaction usable. (group `transaction`)
    async fn enqueue_in(&self, connection: &mut Self::Connection, jobs: &[NewJob]) -> Result<Vec<Enqueued>>;

    /// [`Backend::update_if_current`] in the caller's transaction. (group `transaction`)
    async fn update_if_current_in(
        &self,
        connection: &mut Self::Connection,
        id: JobId,
        current: &Fingerprint,
        patch: &Patch,
    ) -> Result<Update>;
}

/// What a backend offers beyond the contract, and its measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The most bytes of a payload or a result; more is refused before any write.
    pub max_payload: usize,
    /// A failed batch has written nothing, unless its outcome is unknown.
    pub atomic_batches: bool,
    /// A claim passes rows that another transaction has locked.
    pub skips_locked_rows: bool,
    /// `wait_for_work` wakes for what is enqueued through the same handle or its clones.
    pub wakes: bool,
    /// The store keeps [`DurableSteps`] as well.
    pub durable_steps: bool,
}

impl Capabilities {
    /// The cap on payloads and results unless configured: 1 MiB.
    pub const DEFAULT_MAX_PAYLOAD: usize = 1024 * 1024;
}

impl Default for Capabilities {
    /// Nothing beyond the contract, and a cap of [`DEFAULT_MAX_PAYLOAD`](Self::DEFAULT_MAX_PAYLOAD).
    fn default() -> Self {
        Self {
            max_payload: Self::DEFAULT_MAX_PAYLOAD,
            atomic_batches: false,
            skips_locked_rows: false,
            wakes: false,
            durable_steps: false,
        }
    }
}

/// How many rows a call may return or take: 1 to 10 000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Limit(u32);

impl Limit {
    /// The most rows of one call.
    pub const MAX: Self = Self(10_000);

    /// At most this many rows.
    ///
    /// # Errors
    ///
    /// Zero, or more than [`MAX`](Self::MAX).
    pub fn new(rows: usize) -> Result<Self, Invalid> {
        match u32::try_from(rows) {
            Ok(rows) if (1..=Self::MAX.0).contains(&rows) => Ok(Self(rows)),
            _ => Err(Invalid::range("limit", rows, 1, Self::MAX.0)),
        }
    }

    /// The number of rows.
    pub fn get(self) -> u32 {
        self.0
    }

    /// The number of rows.
    pub fn rows(self) -> usize {
        self.0 as usize
    }
}

/// Who wants what: one queue, the kinds that the worker has handlers for, and how many at most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimRequest {
    queue: Name,
    kinds: Vec<Name>,
    worker: WorkerId,
    lease: Lease,
    limit: Limit,
    start: bool,
}

impl ClaimRequest {
    /// A claim that also starts the jobs, in the same write.
    ///
    /// # Errors
    ///
    /// No kinds: a worker without handlers must not claim.
    pub fn new(
        queue: Name,
        kinds: impl IntoIterator<Item = Name>,
        worker: WorkerId,
        lease: Lease,
        limit: Limit,
    ) -> Result<Self, Invalid> {
        let mut kinds: Vec<_> = kinds.into_iter().collect();
        kinds.sort();
        kinds.dedup();
        if kinds.is_empty() {
            return Err(Invalid::Empty { what: "kinds" });
        }
        Ok(Self { queue, kinds, worker, lease, limit, start: true })
    }

    /// Only reserves: the jobs become `claimed`, and their start is a transition of its own.
    #[must_use]
    pub fn reserve(mut self) -> Self {
        self.start = false;
        self
    }

    /// The queue to claim from.
    pub fn queue(&self) -> &Name {
        &self.queue
    }

    /// The kinds to claim, at least one, sorted.
    pub fn kinds(&self) -> &[Name] {
        &self.kinds
    }

    /// Who claims.
    pub fn worker(&self) -> &WorkerId {
        &self.worker
    }

    /// How long each claim is held without a heartbeat.
    pub fn lease(&self) -> Lease {
        self.lease
    }

    /// The most jobs to claim.
    pub fn limit(&self) -> Limit {
        self.limit
    }

    /// Whether the jobs are started by the claim.
    pub fn starts(&self) -> bool {
        self.start
    }

    /// What the claim writes into a row that the store holds in memory, when its clock shows `now`. A
    /// backend on a database does the same inside its statement.
    pub fn apply(&self, execution: &mut Execution, revision: Revision, now: Timestamp) {
        execution.state = if self.start { JobState::Running } else { JobState::Claimed };
        execution.attempt = execution.attempt.saturating_add(u32::from(self.start));
        execution.fence = execution.fence.saturating_add(1);
        execution.revision = revision;
        execution.claimed_by = Some(self.worker.clone());
        execution.claimed_at = Some(now);
        execution.attempted_at = self.start.then_some(now);
        execution.lease_expires_at = Some(now.saturating_add_millis(self.lease.as_millis()));
    }
}

/// What a claim brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claimed {
    /// The jobs, in the order of the queue.
    pub jobs: Vec<Job>,
    /// Rows that were claimed and cannot be read.
    pub unreadable: Vec<Unreadable>,
}

impl Claimed {
    /// From the claimed rows, in any order: jobs in the order of the queue, and what cannot be read beside them.
    pub fn collect(rows: impl IntoIterator<Item = Result<Job, Unreadable>>) -> Self {
        let mut claimed = Self::default();
        for row in rows {
            match row {
                Ok(job) => claimed.jobs.push(job),
                Err(unreadable) => claimed.unreadable.push(unreadable),
            }
        }
        claimed.jobs.sort_by_key(|job| (job.priority, job.available_at, job.id()));
        claimed
    }
}

/// A row that this program cannot read: of a newer version, or broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// The row.
    pub id: JobId,
    /// Its lifecycle part, if that can be read: then its failure can be recorded.
    pub execution: Option<Box<Execution>>,
    /// What is wrong with it, in short.
    pub reason: String,
}

impl Unreadable {
    /// A row of which not even the lifecycle part can be read.
    pub fn new(id: JobId, reason: impl fmt::Display) -> Self {
        Self { id, execution: None, reason: clipped(reason) }
    }

    /// A row whose lifecycle part can be read.
    pub fn beyond(execution: Execution, reason: impl fmt::Display) -> Self {
        Self { id: execution.id, execution: Some(Box::new(execution)), reason: clipped(reason) }
    }
}

impl From<Unreadable> for Error {
    /// For calls that are about this row alone.
    fn from(row: Unreadable) -> Self {
        Self::not_applied(ErrorKind::Schema, format!("job {} cannot be read: {}", row.id, row.reason))
    }
}

/// One page of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page<T, C> {
    /// The rows.
    pub items: Vec<T>,
    /// Rows that cannot be read; they count for the limit.
    pub unreadable: Vec<Unreadable>,
    /// Where the next page begins; `None` if no row follows: no page is empty because the one before it was full.
    pub next: Option<C>,
}

impl<T, C> Page<T, C> {
    /// The first `limit` of the rows found, each with its place; where more follow, the next page begins after the last one taken.
    pub fn collect(found: impl IntoIterator<Item = (C, Result<T, Unreadable>)>, limit: Limit) -> Self {
        let mut page = Self { items: Vec::new(), unreadable: Vec::new(), next: None };
        let mut last = None;
        for (cursor, row) in found {
            if page.items.len() + page.unreadable.len() == limit.rows() {
                page.next = last;
                break;
            }
            match row {
                Ok(item) => page.items.push(item),
                Err(unreadable) => page.unreadable.push(unreadable),
            }
            last = Some(cursor);
        }
        page
    }
}

/// A place in the order of [`Backend::stale`]: after the row of this lease and id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StaleCursor {
    /// The row's lease; a missing one comes first.
    pub lease_expires_at: Option<Timestamp>,
    /// The row's id.
    pub id: JobId,
}

/// One compare-and-update of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpdateRequest {
    /// The job.
    pub id: JobId,
    /// What the decision was based on.
    pub current: Fingerprint,
    /// What it changes.
    pub patch: Patch,
}

/// What became of a compare-and-update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Update {
    /// The row matched; it is now so.
    Applied(Execution),
    /// The row did not match; it is so, unchanged.
    Conflict(Execution),
    /// There is no such row.
    Missing,
    /// The row cannot be read, so it was not compared, and not changed.
    Unreadable(Unreadable),
}

/// A claim as its holder knows it, from the claim's answer until its settle is answered or given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The job.
    pub id: JobId,
    /// The revision of the claim, or of the start that followed it.
    pub revision: Revision,
    /// The holder.
    pub worker: WorkerId,
}

impl Held {
    /// The claim that this execution is held by; `None` if nobody holds it.
    pub fn of(execution: &Execution) -> Option<Self> {
        let worker = execution.claimed_by.clone().filter(|_| execution.state.is_held())?;
        Some(Self { id: execution.id, revision: execution.revision, worker })
    }
}

/// What a heartbeat did for one claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Beat {
    /// The lease runs at least as long as was asked for.
    Extended,
    /// The claim is not held any more; reading the job tells why.
    Lost,
    /// Somebody has the row locked; the claim is not lost, the next beat tries again.
    Busy,
}

/// What a list is narrowed to; an absent field narrows nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListFilter {
    /// Only this queue.
    pub queue: Option<Name>,
    /// Only this kind.
    pub kind: Option<Name>,
    /// Only this state.
    pub state: Option<JobState>,
}

/// How many jobs of a queue are in a state.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Count {
    /// The queue.
    pub queue: Name,
    /// The state; `None` for states of a newer version.
    pub state: Option<JobState>,
    /// How many.
    pub jobs: u64,
}

impl Count {
    /// One count per queue and state, from groups of rows in any order: several states of newer versions are one `None`, and
    /// groups whose queue cannot be read are left out, with a warning.
    pub fn collect(groups: impl IntoIterator<Item = Result<Self, String>>) -> Vec<Self> {
        let mut counts = BTreeMap::new();
        for group in groups {
            match group {
                Ok(Self { queue, state, jobs }) => *counts.entry((queue, state)).or_insert(0) += jobs,
                Err(reason) => {
                    tracing::warn!(%reason, "jobs of a queue whose name cannot be read are not counted");
                }
            }
        }
        counts.into_iter().map(|((queue, state), jobs)| Self { queue, state, jobs }).collect()
    }
}

/// Refuses a batch of updates of which one is over the store's cap, naming it. Every backend calls it before it writes.
///
/// # Errors
///
/// [`ErrorKind::TooLarge`], not applied.
pub fn check_updates(updates: &[UpdateRequest], capabilities: &Capabilities) -> Result<()> {
    for (index, update) in updates.iter().enumerate() {
        update.patch.check(capabilities).map_err(|error| error.at_index(index))?;
    }
    Ok(())
}

/// Refuses a purge of a state that is not final. Every backend calls it before it writes.
///
/// # Errors
///
/// [`ErrorKind::Invalid`], not applied.
pub fn check_purge(state: JobState) -> Result<(), Error> {
    if state.is_final() {
        return Ok(());
    }
    Err(Error::invalid(format!("only ended jobs are purged, not {state} ones")))
}
