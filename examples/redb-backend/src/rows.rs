//! How jobs lie in the file, and the one place that changes them.
//!
//! A store like this has no triggers and nobody who edits it by hand, so what an operator or a test must do behind the contract
//! is done here too: [`Rows`], in a transaction of [`RedbBackend::begin`](crate::RedbBackend::begin).

use queue_core::Error;
use queue_core::ErrorKind;
use queue_core::Job;
use queue_core::JobId;
use queue_core::JobState;
use queue_core::Json;
use queue_core::ListFilter;
use queue_core::Name;
use queue_core::Result;
use queue_core::SchemaVersion;
use queue_core::Timestamp;
use queue_core::Unreadable;
use redb::Key;
use redb::ReadableTable;
use redb::Table;
use redb::TableDefinition;
use redb::WriteTransaction;
use serde_json::Value;
use uuid::Uuid;

use crate::error::Failed;

/// Jobs as JSON, without their payload and result: what a heartbeat or a settle rewrites stays small, and a job whose payload
/// cannot be read can be settled.
pub const JOBS: TableDefinition<Uuid, &str> = TableDefinition::new("jobs");
/// [`PAYLOAD`] and [`RESULT`] of jobs, byte for byte.
pub const TEXTS: TableDefinition<(Uuid, &str), &str> = TableDefinition::new("texts");
/// The name of a payload in [`TEXTS`].
pub const PAYLOAD: &str = "payload";
/// The name of a result in [`TEXTS`].
pub const RESULT: &str = "result";
/// Jobs that must not change, as long as they are named here: a brake for who examines one. A claim, heartbeat or update that meets
/// one fails, with whatever else it was to write.
pub const FROZEN: TableDefinition<Uuid, ()> = TableDefinition::new("frozen");

type Ready = (&'static str, &'static str, u8, i64, Uuid);
/// Waiting jobs by queue, kind, priority, due time and id.
const READY: TableDefinition<Ready, ()> = TableDefinition::new("ready");
/// Held jobs by lease, a missing one first, and id.
pub(crate) const LEASES: TableDefinition<(Option<i64>, Uuid), ()> = TableDefinition::new("leases");
/// Held jobs by holder and id.
pub(crate) const HOLDERS: TableDefinition<(&str, Uuid), ()> = TableDefinition::new("holders");
/// Ended jobs by state, time of the end and id.
const ENDED: TableDefinition<(&str, i64, Uuid), ()> = TableDefinition::new("ended");
/// The active job of a queue and a unique key.
const UNIQUE: TableDefinition<(&str, &str), Uuid> = TableDefinition::new("unique");
/// [`SchemaVersion`], once.
const SCHEMA: TableDefinition<(), (i64, i64, &str)> = TableDefinition::new("schema");
/// The schema's version that this program knows.
const VERSION: usize = 1;

/// The tables, open in a write transaction. Every change goes through [`put`](Self::put), which keeps the indexes.
#[derive(Debug)]
pub struct Rows<'txn> {
    jobs: Table<'txn, Uuid, &'static str>,
    texts: Table<'txn, (Uuid, &'static str), &'static str>,
    frozen: Table<'txn, Uuid, ()>,
    ready: Table<'txn, Ready, ()>,
    leases: Table<'txn, (Option<i64>, Uuid), ()>,
    holders: Table<'txn, (&'static str, Uuid), ()>,
    ended: Table<'txn, (&'static str, i64, Uuid), ()>,
    unique: Table<'txn, (&'static str, &'static str), Uuid>,
    schema: Table<'txn, (), (i64, i64, &'static str)>,
    /// Whether there is something to commit.
    pub(crate) changed: bool,
    /// Whether there may be something new to claim.
    pub(crate) made_work: bool,
}

impl<'txn> Rows<'txn> {
    /// Opens the tables, and makes those that are missing.
    pub fn open(transaction: &'txn WriteTransaction) -> Result<Self, Failed> {
        Ok(Self {
            jobs: transaction.open_table(JOBS)?,
            texts: transaction.open_table(TEXTS)?,
            frozen: transaction.open_table(FROZEN)?,
            ready: transaction.open_table(READY)?,
            leases: transaction.open_table(LEASES)?,
            holders: transaction.open_table(HOLDERS)?,
            ended: transaction.open_table(ENDED)?,
            unique: transaction.open_table(UNIQUE)?,
            schema: transaction.open_table(SCHEMA)?,
            changed: false,
            made_work: false,
        })
    }

    pub(crate) fn migrate(&mut self) -> Result<(), Failed> {
        let stored = self.schema.get(())?.map_or_else(SchemaVersion::default, |row| {
            let (version, oldest_version, oldest_release) = row.value();
            SchemaVersion { version, oldest_version, oldest_release: oldest_release.to_owned() }
        });
        let release = env!("CARGO_PKG_VERSION");
        stored.admit(VERSION, release)?;
        if stored.lacks(VERSION) {
            self.schema.insert((), (1, 1, release))?;
            self.changed = true;
        }
        Ok(())
    }

    /// The job without its payload and result.
    pub fn head(&self, id: JobId) -> Result<Option<Result<Job, Unreadable>>, Failed> {
        head(&self.jobs, id)
    }

    /// The job of this id as it was enqueued, whatever has become of it: also if that is a state of a newer version.
    pub(crate) fn enqueued(&self, id: JobId) -> Result<Option<Result<Job, Unreadable>>, Failed> {
        let Some(row) = self.jobs.get(id.as_uuid())? else { return Ok(None) };
        let mut row: Value = serde_json::from_str(row.value())?;
        row["execution"]["state"] = JobState::Waiting.as_str().into();
        match serde_json::from_value(row) {
            Ok(head) => self.whole(head).map(Some),
            Err(reason) => Ok(Some(Err(Unreadable::new(id, reason)))),
        }
    }

    /// The job of this head, with its payload and result.
    pub(crate) fn whole(&self, head: Job) -> Result<Result<Job, Unreadable>, Failed> {
        whole(&self.texts, head)
    }

    /// The job that has a key among the active ones of a queue.
    pub(crate) fn owner(&self, job: &Job) -> Result<Option<JobId>, Failed> {
        let Some(key) = &job.unique_key else { return Ok(None) };
        Ok(self.unique.get((job.queue.as_str(), key.as_str()))?.map(|id| JobId::from(id.value())))
    }

    /// Heads of the first jobs of a kind and priority that are due. An entry whose row cannot be read stands for nothing.
    pub(crate) fn due(
        &self,
        queue: &Name,
        kind: &Name,
        priority: u8,
        now: Timestamp,
        limit: usize,
    ) -> Result<Vec<Job>, Failed> {
        let first = (queue.as_str(), kind.as_str(), priority, i64::MIN, Uuid::nil());
        let last = (queue.as_str(), kind.as_str(), priority, now.unix_millis(), Uuid::max());
        let ids = self.ready.range(first..=last)?.map(|entry| Ok(entry?.0.value().4));
        self.readable(ids, limit)
    }

    /// Heads of the first jobs that ended in a state, and not after a time.
    pub(crate) fn ended(&self, state: JobState, until: Timestamp, limit: usize) -> Result<Vec<Job>, Failed> {
        let first = (state.as_str(), i64::MIN, Uuid::nil());
        let last = (state.as_str(), until.unix_millis(), Uuid::max());
        let ids = self.ended.range(first..=last)?.map(|entry| Ok(entry?.0.value().2));
        self.readable(ids, limit)
    }

    fn readable(&self, ids: impl Iterator<Item = Result<Uuid, Failed>>, limit: usize) -> Result<Vec<Job>, Failed> {
        let heads = ids.map(|id| self.head(JobId::from(id?)));
        heads.filter_map(|head| head.map(|head| head.and_then(Result::ok)).transpose()).take(limit).collect()
    }

    /// Writes the head of a job where `old` was, and its index entries. It leaves payload and result alone.
    ///
    /// # Errors
    ///
    /// A frozen job, and a unique key that another active job has.
    pub fn put(&mut self, old: Option<&Job>, mut new: Job) -> Result<(), Failed> {
        let id = new.id();
        if self.frozen.get(id.as_uuid())?.is_some() {
            return Err(Error::not_applied(ErrorKind::Permanent, format!("job {id} is frozen")).into());
        }
        if let Some(old) = old {
            self.index(old, false)?;
        }
        if new.state().is_active()
            && let Some(owner) = self.owner(&new)?
        {
            return Err(Error::invalid(format!("job {id}: job {owner} has its unique key")).into());
        }
        self.index(&new, true)?;
        (new.payload, new.result) = (Json::null(), None);
        self.jobs.insert(id.as_uuid(), serde_json::to_string(&new)?.as_str())?;
        self.changed = true;
        self.made_work |= new.state() == JobState::Waiting;
        Ok(())
    }

    /// Writes or removes a payload or a result.
    pub(crate) fn set_text(&mut self, id: JobId, name: &str, text: Option<&Json>) -> Result<(), Failed> {
        match text {
            Some(text) => self.texts.insert((id.as_uuid(), name), text.as_str())?,
            None => self.texts.remove((id.as_uuid(), name))?,
        };
        Ok(())
    }

    /// Deletes a job.
    pub(crate) fn delete(&mut self, job: &Job) -> Result<(), Failed> {
        self.index(job, false)?;
        self.set_text(job.id(), PAYLOAD, None)?;
        self.set_text(job.id(), RESULT, None)?;
        self.jobs.remove(job.id().as_uuid())?;
        self.changed = true;
        Ok(())
    }

    /// Adds the index entries of a job, or removes them: they follow from its head alone.
    fn index(&mut self, job: &Job, add: bool) -> Result<(), Failed> {
        let (execution, id, queue) = (&job.execution, job.id().as_uuid(), job.queue.as_str());
        let state = job.state();
        if state == JobState::Waiting {
            let key = (queue, job.kind.as_str(), job.priority.get(), job.available_at.unix_millis(), id);
            entry(&mut self.ready, key, add)?;
        }
        if state.is_held() {
            entry(&mut self.leases, (execution.lease_expires_at.map(Timestamp::unix_millis), id), add)?;
            if let Some(worker) = &execution.claimed_by {
                entry(&mut self.holders, (worker.as_str(), id), add)?;
            }
        }
        if let (true, Some(at)) = (state.is_final(), job.finished_at) {
            entry(&mut self.ended, (state.as_str(), at.unix_millis(), id), add)?;
        }
        if let (true, Some(key)) = (state.is_active(), &job.unique_key) {
            match add {
                true => self.unique.insert((queue, key.as_str()), id)?,
                false => self.unique.remove((queue, key.as_str()))?,
            };
        }
        Ok(())
    }
}

fn entry<'k, K: Key + 'static>(table: &mut Table<'_, K, ()>, key: K::SelfType<'k>, add: bool) -> Result<(), Failed> {
    match add {
        true => table.insert(key, ())?,
        false => table.remove(key)?,
    };
    Ok(())
}

/// The job of this id without its payload and result.
pub(crate) fn head(
    jobs: &impl ReadableTable<Uuid, &'static str>,
    id: JobId,
) -> Result<Option<Result<Job, Unreadable>>, Failed> {
    Ok(jobs.get(id.as_uuid())?.map(|row| parse(id, row.value())))
}

/// A job as it stands in [`JOBS`].
pub(crate) fn parse(id: JobId, row: &str) -> Result<Job, Unreadable> {
    serde_json::from_str(row).map_err(|reason| Unreadable::new(id, reason))
}

/// The job of this head, with its payload and result.
pub(crate) fn whole(
    texts: &impl ReadableTable<(Uuid, &'static str), &'static str>,
    mut head: Job,
) -> Result<Result<Job, Unreadable>, Failed> {
    let id = head.id().as_uuid();
    let read = |name| Ok::<_, Failed>(texts.get((id, name))?.map(|text| Json::from_text(text.value())).transpose());
    match (read(PAYLOAD)?, read(RESULT)?) {
        (Ok(Some(payload)), Ok(result)) => {
            (head.payload, head.result) = (payload, result);
            Ok(Ok(head))
        }
        (Ok(None), _) => Ok(Err(Unreadable::beyond(head.execution, "its payload is missing"))),
        (Err(reason), _) | (_, Err(reason)) => Ok(Err(Unreadable::beyond(head.execution, reason))),
    }
}

/// What of a row says where it belongs, as far as that can be read.
pub(crate) struct Label {
    pub(crate) queue: Option<Name>,
    pub(crate) kind: Option<Name>,
    pub(crate) state: Option<JobState>,
}

impl Label {
    pub(crate) fn of(row: &str) -> Self {
        let row: Value = serde_json::from_str(row).unwrap_or_default();
        let name = |value: &Value| value.as_str().and_then(|text| Name::try_from(text).ok());
        Self {
            queue: name(&row["queue"]),
            kind: name(&row["kind"]),
            state: row["execution"]["state"].as_str().and_then(|text| text.parse().ok()),
        }
    }

    /// What cannot be read is not what a filter asks for.
    pub(crate) fn passes(&self, filter: &ListFilter) -> bool {
        (filter.queue.is_none() || filter.queue == self.queue)
            && (filter.kind.is_none() || filter.kind == self.kind)
            && (filter.state.is_none() || filter.state == self.state)
    }
}
