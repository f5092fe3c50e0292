//! Every command, as a document that is built here and nowhere else.
//!
//! Nothing but the prefix of the collections' names is spliced in, and that has been checked. In a filter a text is a value;
//! in an expression one that begins with `$` is a path, so there every value is a `$literal`. The collections are always
//! read through an index that is named, since MongoDB plans by trial and remembers what was good for other values.
//!
//! A field that is missing, by somebody else's hand, is null to the reader (see `row`) and to a filter alike; what is written
//! here always has every field.

mod claim;
mod steps;
mod update;

use std::collections::BTreeMap;

use mongodb::bson::Bson;
use mongodb::bson::Document;
use mongodb::bson::doc;
use queue_core::Delay;
use queue_core::Identifier;
use queue_core::JobId;
use queue_core::JobState;
use queue_core::Limit;
use queue_core::ListFilter;
use queue_core::Name;
use queue_core::NewJob;
use queue_core::Revision;
use queue_core::StaleCursor;
use queue_core::Timestamp;
use queue_core::UniqueKey;
use queue_core::WorkerId;

pub(crate) use steps::Over;
pub(crate) use steps::event_of;
pub(crate) use steps::room;

use crate::row::binary;
use crate::row::date;

/// The states of a job that somebody holds, each with the indexes of its leases and of its holders.
pub(crate) const HELD: [(JobState, &str, &str); 2] = [
    (JobState::Claimed, "claimed_leases", "claimed_holders"),
    (JobState::Running, "running_leases", "running_holders"),
];

/// The field with the mark of the batch that wrote the row last: see [`Ops::update_many`].
pub(crate) const BATCH: &str = "batch";

/// How many kinds a sorted walk through `due` may be merged from: MongoDB sorts whatever it finds above 200 of them.
pub(crate) const KINDS: usize = 100;

/// The names of one handle's collections.
#[derive(Debug)]
pub(crate) struct Ops {
    pub(crate) jobs: String,
    pub(crate) events: String,
    pub(crate) schema: String,
}

/// The server's clock, read once per command, in the whole milliseconds that it has.
fn now(offset: i64) -> Bson {
    after(offset, 0)
}

/// That clock some time later, or earlier. A thousand years more do not overflow.
fn after(offset: i64, later: i64) -> Bson {
    doc! { "$add": ["$$NOW", millis(offset, later)] }.into()
}

fn until(offset: i64, later: i64) -> Bson {
    no_later(millis(offset, later))
}

/// That clock so many milliseconds later, but no later than times can be.
fn no_later(millis: Bson) -> Bson {
    doc! { "$min": [date(Timestamp::MAX), { "$add": ["$$NOW", millis] }] }.into()
}

fn millis(offset: i64, later: i64) -> Bson {
    Bson::Int64(offset.saturating_add(later))
}

fn literal(value: impl Into<Bson>) -> Bson {
    doc! { "$literal": value.into() }.into()
}

fn text(value: Option<&str>) -> Bson {
    value.map_or(Bson::Null, Bson::from)
}

fn id(id: JobId) -> Bson {
    binary(id.as_uuid())
}

fn ids(ids: impl IntoIterator<Item = JobId>) -> Bson {
    Bson::Array(ids.into_iter().map(id).collect())
}

/// What lifecycle decisions are based on.
fn execution() -> Document {
    doc! {
        "state": 1, "attempt": 1, "max_attempts": 1, "fence": 1, "revision": 1, "claimed_by": 1, "claimed_at": 1,
        "attempted_at": 1, "lease_expires_at": 1,
    }
}

/// A job as it is read by those who do not ask for its steps: their values may be large.
fn without_steps() -> Document {
    doc! { "steps": 0 }
}

/// Rows whose id is one; nothing else is ever written, but a collection takes anything.
fn any_id() -> Document {
    doc! { "$gte": binary(uuid::Uuid::nil()), "$lte": binary(uuid::Uuid::max()) }
}

fn after_id(after: Option<JobId>) -> Document {
    match after {
        Some(after) => doc! { "$gt": id(after), "$lte": binary(uuid::Uuid::max()) },
        None => any_id(),
    }
}

impl Ops {
    pub(crate) fn new(prefix: &Identifier) -> Self {
        let name = |of: &str| format!("{prefix}{of}");
        Self { jobs: name("jobs"), events: name("events"), schema: name("schema") }
    }

    /// What the schema says of itself.
    pub(crate) fn version(&self) -> Document {
        doc! { "find": &self.schema, "filter": { "_id": "schema" }, "limit": 1 }
    }

    /// Changes nothing, and is acknowledged when everything that the server had written before is on a majority.
    pub(crate) fn nothing(&self) -> Document {
        let never = doc! { "q": { "_id": "none" }, "u": { "$set": { "none": true } } };
        doc! { "update": &self.schema, "updates": [never] }
    }

    fn find(&self, filter: Document, index: &str) -> Document {
        // All in the first answer, as far as 16 MB go.
        doc! { "find": &self.jobs, "filter": filter, "hint": index, "batchSize": i64::from(Limit::MAX.get()) + 1 }
    }

    /// Rows by id.
    pub(crate) fn get(&self, of: impl IntoIterator<Item = JobId>) -> Document {
        let mut find = self.find(doc! { "_id": { "$in": ids(of) } }, "_id_");
        find.insert("projection", without_steps());
        find
    }

    /// Rows by id, their lifecycle part and the mark of a batch.
    pub(crate) fn executions(&self, of: impl IntoIterator<Item = JobId>) -> Document {
        let mut find = self.get(of);
        let mut fields = execution();
        fields.insert(BATCH, 1);
        find.insert("projection", fields);
        find
    }

    /// Who has the keys of these jobs: rows with `holder`. Nothing, if they have none.
    pub(crate) fn holders(&self, jobs: &[&NewJob]) -> Option<Document> {
        // By queue, so that the index is asked for no pair that nobody has named.
        let mut keys = BTreeMap::<_, Vec<Bson>>::new();
        for job in jobs {
            if let Some(key) = &job.unique_key {
                keys.entry(job.queue.as_str()).or_default().push(key.as_str().into());
            }
        }
        let taken = |(queue, keys)| doc! { "queue": queue, "active_key": { "$in": keys, "$type": "string" } };
        let taken: Vec<_> = keys.into_iter().map(taken).collect();
        if taken.is_empty() {
            return None;
        }
        let mut holders = self.find(doc! { "active_key": { "$type": "string" }, "$or": taken }, "unique");
        holders.insert("projection", doc! { "holder": literal(true), "queue": 1, "active_key": 1 });
        Some(holders)
    }

    /// The clock, which an insert cannot read by itself, and what is stored under these ids: a row with `now`, without which
    /// there is no schema, and rows with `stored`.
    ///
    /// The clock is a round trip old when the insert is made, which only means that a delay counts from the moment at which
    /// it was asked for.
    pub(crate) fn stored(&self, offset: i64, jobs: &[&NewJob]) -> Vec<Document> {
        let clock = vec![doc! { "$match": { "_id": "schema" } }, doc! { "$project": { "now": now(offset) } }];
        let clock = doc! { "aggregate": &self.schema, "pipeline": clock, "cursor": {} };
        let mut stored = self.find(doc! { "_id": { "$in": ids(jobs.iter().map(|job| job.id)) } }, "_id_");
        let content = doc! {
            "stored": literal(true), "queue": 1, "kind": 1, "payload": 1, "priority": 1, "max_attempts": 1,
            "unique_key": 1, "revision": 1,
        };
        stored.insert("projection", content);
        vec![clock, stored]
    }

    /// Stores new jobs, at this time of the server's clock. One that is refused does not keep back those after it.
    pub(crate) fn insert(&self, jobs: &[(&NewJob, Revision)], now: Timestamp) -> Document {
        let row = |(job, revision): &(&NewJob, Revision)| {
            // Whole, so that a new field cannot be left out here.
            let NewJob { id: of, queue, kind, payload, priority, max_attempts, available, unique_key } = job;
            let key = text(unique_key.as_ref().map(UniqueKey::as_str));
            doc! {
                "_id": id(*of),
                "queue": queue.as_str(),
                "kind": kind.as_str(),
                "state": JobState::Waiting.as_str(),
                "priority": i32::from(priority.get()),
                "attempt": 0_i64,
                "max_attempts": i64::from(max_attempts.get()),
                "fence": 0_i64,
                "revision": binary(revision.as_uuid()),
                "available_at": date(available.resolve(now)),
                "created_at": date(now),
                "claimed_by": null,
                "claimed_at": null,
                "attempted_at": null,
                "lease_expires_at": null,
                "finished_at": null,
                "unique_key": key.clone(),
                "active_key": key,
                "limit_key": null,
                "tags": null,
                BATCH: null,
                "wait": null,
                "steps": [],
                "errors": [],
                "result": null,
                "payload": payload.as_str(),
            }
        };
        doc! { "insert": &self.jobs, "documents": jobs.iter().map(row).collect::<Vec<_>>(), "ordered": false }
    }

    /// Stale rows after the cursor: for each state those without a lease, then those whose lease has run out.
    pub(crate) fn stale(&self, after: Option<StaleCursor>, offset: i64, limit: Limit) -> Vec<Document> {
        let mut finds = Vec::new();
        for (state, leases, _) in HELD {
            if after.is_none_or(|after| after.lease_expires_at.is_none()) {
                let ids = after_id(after.map(|after| after.id));
                let unset = doc! { "state": state.as_str(), "lease_expires_at": null, "_id": ids };
                finds.push((unset, leases, doc! { "_id": 1 }));
            }
            let mut expired = doc! {
                "state": state.as_str(), "lease_expires_at": { "$ne": null }, "_id": any_id(),
                "$expr": { "$lte": ["$lease_expires_at", now(offset)] },
            };
            if let Some(StaleCursor { lease_expires_at: Some(lease), id: last }) = after {
                let lease = date(lease);
                expired.insert("lease_expires_at", doc! { "$gte": lease.clone() });
                expired.insert(
                    "$or",
                    [doc! { "lease_expires_at": { "$gt": lease } }, doc! { "_id": { "$gt": id(last) } }].to_vec(),
                );
            }
            finds.push((expired, leases, doc! { "lease_expires_at": 1, "_id": 1 }));
        }
        let page = |(filter, index, sort)| self.page(filter, index, sort, limit, execution());
        finds.into_iter().map(page).collect()
    }

    /// Held rows of a worker, for each state.
    pub(crate) fn claimed_by(
        &self,
        worker: &WorkerId,
        older_than: Delay,
        after_this: Option<JobId>,
        offset: i64,
        limit: Limit,
    ) -> Vec<Document> {
        let find = |(state, _, holders): (JobState, _, _)| {
            let filter = doc! {
                "state": state.as_str(), "claimed_by": worker.as_str(), "_id": after_id(after_this),
                "$expr": { "$lte": ["$claimed_at", after(offset, older_than.as_millis().saturating_neg())] },
            };
            self.page(filter, holders, doc! { "_id": 1 }, limit, execution())
        };
        HELD.into_iter().map(find).collect()
    }

    /// One row more than fits, to tell whether another page follows.
    fn page(&self, filter: Document, index: &str, sort: Document, limit: Limit, projection: Document) -> Document {
        let mut find = self.find(filter, index);
        find.insert("sort", sort);
        find.insert("limit", i64::from(limit.get()) + 1);
        find.insert("projection", projection);
        find
    }

    /// Rows by id.
    pub(crate) fn list(&self, filter: &ListFilter, after: Option<JobId>, limit: Limit) -> Document {
        let mut query = doc! { "_id": after_id(after) };
        let narrows = [
            ("queue", filter.queue.as_ref().map(Name::as_str)),
            ("kind", filter.kind.as_ref().map(Name::as_str)),
            ("state", filter.state.map(JobState::as_str)),
        ];
        query.extend(narrows.into_iter().filter_map(|(field, value)| Some((field.to_owned(), Bson::from(value?)))));
        self.page(query, "_id_", doc! { "_id": 1 }, limit, without_steps())
    }

    /// How many rows of a queue are in a state.
    pub(crate) fn counts(&self) -> Document {
        let group = doc! { "_id": { "queue": "$queue", "state": "$state" }, "jobs": { "$sum": Bson::Int64(1) } };
        doc! { "aggregate": &self.jobs, "pipeline": [{ "$group": group }], "cursor": {} }
    }

    fn ended(state: JobState, older_than: Delay, offset: i64) -> Document {
        let oldest = after(offset, older_than.as_millis().saturating_neg());
        doc! {
            "state": state.as_str(), "finished_at": { "$type": "date" }, "$expr": { "$lte": ["$finished_at", oldest] },
        }
    }

    /// The ids of the jobs that ended first.
    pub(crate) fn purgeable(&self, state: JobState, older_than: Delay, offset: i64, limit: Limit) -> Document {
        let mut filter = Self::ended(state, older_than, offset);
        filter.insert("_id", any_id());
        let mut find = self.find(filter, "ended");
        find.insert("sort", doc! { "finished_at": 1, "_id": 1 });
        find.insert("limit", i64::from(limit.get()));
        find.insert("projection", doc! { "_id": 1 });
        find
    }

    /// Deletes those of these jobs that have ended, and still have.
    pub(crate) fn purge(&self, of: &[JobId], state: JobState, older_than: Delay, offset: i64) -> Document {
        let mut filter = Self::ended(state, older_than, offset);
        filter.insert("_id", doc! { "$in": ids(of.iter().copied()) });
        doc! { "delete": &self.jobs, "deletes": [{ "q": filter, "limit": 0, "hint": "_id_" }] }
    }
}
