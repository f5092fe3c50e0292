//! Steps, waits and events.
//!
//! A job's steps are a list in its row, so that a step and its job are one write, and go together. What it is suspended with
//! is in the field `wait` as well, for the index: `event`, and the `revision` of the suspension. It stays when somebody else
//! moves the job on, and means nothing then, since the job's revision is another one.

use mongodb::bson::Bson;
use mongodb::bson::Document;
use mongodb::bson::doc;
use queue_core::Failure;
use queue_core::FailureText;
use queue_core::JobId;
use queue_core::JobState;
use queue_core::Json;
use queue_core::Limit;
use queue_core::Name;
use queue_core::NewEvent;
use queue_core::NewWait;
use queue_core::Revision;
use queue_core::StepAction;
use queue_core::StepPlan;
use queue_core::StepState;
use queue_core::StepWrite;
use queue_core::Timestamp;
use queue_core::Wait;

use super::Ops;
use super::any_id;
use super::execution;
use super::id;
use super::ids;
use super::literal;
use super::now;
use super::text;
use super::until;
use super::update::as_seen;
use super::update::changes;
use crate::row::binary;

/// What a row may have at most.
const ROW: usize = 16 * 1024 * 1024;

/// What a row needs beside payload, steps and result: its failures, and some for its other fields.
const LIFECYCLE: usize = Failure::KEPT * (FailureText::MAX_BYTES + 1024) + 4096;

/// What a step and a wait need beside the value: their names.
const STEP: usize = 4 * Name::MAX_BYTES + 1024;

/// A row's steps. One that a program of schema 1 stored has no such field.
fn steps() -> Bson {
    doc! { "$ifNull": ["$steps", []] }.into()
}

/// The steps of which this is so.
fn steps_where(condition: Document) -> Bson {
    doc! { "$filter": { "input": steps(), "as": "step", "cond": condition } }.into()
}

fn has_name(name: &Name) -> Document {
    doc! { "$eq": ["$$step.name", literal(name.as_str())] }
}

/// What to do with the step of this name, if there is one, under the name `there`. Where there are no steps that could be read,
/// by somebody else's hand, it is one in no state.
fn with_step(name: &Name, done: Document) -> Document {
    let first = doc! { "$arrayElemAt": [steps_where(has_name(name)), 0] };
    let there = doc! { "$cond": [{ "$isArray": [steps()] }, first, {}] };
    doc! { "$let": { "vars": { "there": there }, "in": done } }
}

/// Whether the step that is there is one that this action leaves as it is: it has ended, or is none that this version knows.
fn stays(write: &StepWrite, event: Option<&Json>) -> Document {
    let wait = Wait { event: None, until: Timestamp::MIN, revision: write.current.revision };
    let known = [None, Some(StepState::Begun), Some(StepState::Waiting(wait))];
    let changed = known.iter().filter(|there| write.action.plan(there.as_ref(), event) != StepPlan::Keep);
    let changed: Vec<_> = changed.map(|there| text(there.as_ref().map(StepState::as_str))).collect();
    let is_new = doc! { "$eq": [{ "$type": "$$there" }, "missing"] };
    let state = doc! { "$cond": [is_new, null, { "$ifNull": ["$$there.state", "unknown"] }] };
    doc! { "$not": [{ "$in": [state, literal(changed)] }] }
}

/// The row's steps with this one instead of the one of its name.
fn replaced(name: &Name, step: Document) -> Document {
    doc! { "$concatArrays": [steps_where(doc! { "$not": [has_name(name)] }), [step]] }
}

/// The fields that a write sets.
fn planned(write: &StepWrite, event: Option<&Json>, offset: i64) -> Document {
    let name = &write.name;
    let mut step = doc! { "name": literal(name.as_str()), "fence": "$fence" };
    match write.action.plan(None, event) {
        StepPlan::Keep => Document::new(),
        StepPlan::Write(state) => {
            step.insert("state", literal(state.as_str()));
            if let StepState::Done(value) = state {
                step.insert("value", literal(value.as_str()));
            }
            doc! { "steps": replaced(name, step) }
        }
        StepPlan::Suspend(patch) => {
            let mut set = changes(&patch, offset, |_, value| literal(value));
            let due = set.get("available_at").cloned().unwrap_or_else(|| "$available_at".into());
            // That of an earlier registration stays.
            let until = doc! { "$cond": [{ "$eq": [{ "$type": "$$there.until" }, "date"] }, "$$there.until", due] };
            let revision = literal(binary(patch.revision.unwrap_or(write.current.revision).as_uuid()));
            let event = literal(text(event_of(&write.action).map(Name::as_str)));
            set.insert("available_at", &until);
            set.insert("wait", doc! { "event": &event, "revision": &revision });
            step.extend(doc! { "state": literal("waiting"), "event": event, "until": until, "revision": revision });
            set.insert("steps", replaced(name, step));
            set
        }
    }
}

/// The event that is waited for.
pub(crate) fn event_of(action: &StepAction) -> Option<&Name> {
    match action {
        StepAction::Wait(NewWait { event, .. }) => event.as_ref(),
        StepAction::Begin | StepAction::Finish(_) => None,
    }
}

/// How large a row may be for a step to be written: so that there is room for the step, and for whatever happens to the job
/// afterwards, a result of the largest size included; and for the payload of the event that it waits for, which else could be
/// emitted to nobody.
pub(crate) fn room(write: &StepWrite, event: Option<&Json>, max_payload: usize) -> i64 {
    let value = match (&write.action, event) {
        (StepAction::Finish(value), _) | (StepAction::Wait(_), Some(value)) => value.as_str().len(),
        (StepAction::Wait(NewWait { event: Some(_), .. }), None) => max_payload,
        (StepAction::Begin | StepAction::Wait(_), _) => 0,
    };
    let used = LIFECYCLE + max_payload + STEP + value;
    i64::try_from(ROW.saturating_sub(used)).unwrap_or_default()
}

/// The payload of the event, if it is kept at this time; else null.
fn kept(offset: i64) -> Document {
    doc! { "payload": { "$cond": [is_kept(offset), "$payload", null] } }
}

fn is_kept(offset: i64) -> Document {
    let has_payload = doc! { "$ne": [{ "$ifNull": ["$payload", null] }, null] };
    doc! { "$and": [has_payload, { "$gt": ["$kept_until", now(offset)] }] }
}

/// What an event's row is changed by in any case, since MongoDB locks no row by writing what is there already.
fn touch() -> Bson {
    literal(binary(Revision::random().as_uuid()))
}

/// Ends the suspension of a row, and the step that it is suspended with. What is no list of steps, by somebody else's hand, must
/// not keep it from going on.
fn woken(step: Document, revision: Revision, offset: i64) -> Vec<Document> {
    let is_over =
        doc! { "$and": [{ "$eq": ["$$step.state", "waiting"] }, { "$eq": ["$$step.revision", "$revision"] }] };
    let over = doc! { "$mergeObjects": [{ "name": "$$step.name", "fence": "$$step.fence" }, step] };
    let ended = doc! { "$map": { "input": steps(), "as": "step", "in": { "$cond": [is_over, over, "$$step"] } } };
    let null = literal(Bson::Null);
    vec![doc! { "$set": {
        "state": literal(JobState::Waiting.as_str()),
        "revision": literal(binary(revision.as_uuid())),
        "available_at": now(offset),
        "claimed_by": &null,
        "claimed_at": &null,
        "attempted_at": &null,
        "lease_expires_at": &null,
        "finished_at": &null,
        "result": &null,
        "wait": &null,
        "steps": { "$cond": [{ "$isArray": [steps()] }, ended, "$steps"] },
    } }]
}

fn timed_out(revision: Revision, offset: i64) -> Vec<Document> {
    woken(doc! { "state": literal(StepState::TimedOut.as_str()) }, revision, offset)
}

/// Rows whose wait is over.
fn overdue(offset: i64) -> Document {
    doc! {
        "state": JobState::Suspended.as_str(), "_id": any_id(), "$expr": { "$lte": ["$available_at", now(offset)] },
    }
}

/// Which rows of the events a purge is about; each kind has an index of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Over {
    /// Events that are kept no longer.
    Events,
    /// Rows that were only locked by those who waited for an event that has not come.
    Places,
}

impl Over {
    fn filter(self, offset: i64) -> (Document, &'static str) {
        let (payload, index) = match self {
            Self::Events => ("string", "kept"),
            Self::Places => ("null", "places"),
        };
        let filter = doc! { "payload": { "$type": payload }, "$expr": { "$lte": ["$kept_until", now(offset)] } };
        (filter, index)
    }
}

impl Ops {
    /// The steps of a job: of a row that can be read its revision is there, too.
    pub(crate) fn steps(&self, of: JobId) -> Document {
        let mut find = self.get([of]);
        find.insert("projection", doc! { "revision": 1, "steps": 1 });
        find
    }

    /// Writes a step, and suspends its job if it is to wait, in a row that is no larger than this; answers with the row's
    /// lifecycle part and that step, as they then are. `event` is the payload of the event, if that is kept.
    pub(crate) fn write_step(&self, write: &StepWrite, event: Option<&Json>, room: i64, offset: i64) -> Document {
        let name = &write.name;
        let stays = stays(write, event);
        let mut query = as_seen(&write.current, offset);
        query.insert("_id", id(write.id));
        let fits = doc! { "$or": [&stays, { "$lte": [{ "$bsonSize": "$$ROOT" }, room] }] };
        query.insert("$and", [doc! { "$expr": with_step(name, fits) }].to_vec());
        let changed = doc! { "$cond": [stays, {}, planned(write, event, offset)] };
        let written = with_step(name, doc! { "$mergeObjects": ["$$ROOT", changed] });
        let mut fields = execution();
        let own = steps_where(has_name(name));
        fields.insert("steps", doc! { "$cond": [{ "$isArray": [steps()] }, own, "$steps"] });
        doc! {
            "findAndModify": &self.jobs, "query": query, "hint": "_id_", "update": [{ "$replaceWith": written }],
            "new": true, "fields": fields,
        }
    }

    /// A row's lifecycle part, and how large it is.
    pub(crate) fn measured(&self, of: JobId) -> Document {
        let mut find = self.get([of]);
        let mut fields = execution();
        fields.insert("size", doc! { "$bsonSize": "$$ROOT" });
        find.insert("projection", fields);
        find
    }

    /// The payload of an event.
    pub(crate) fn event(&self, key: &Name, offset: i64) -> Document {
        let filter = doc! { "_id": key.as_str() };
        doc! { "find": &self.events, "filter": filter, "hint": "_id_", "limit": 1, "projection": kept(offset) }
    }

    /// The same, and locks the event's row, also if there is none: an event and a wait for it that come at once meet there.
    pub(crate) fn lock_event(&self, key: &Name, offset: i64) -> Document {
        let locked = doc! {
            "payload": { "$ifNull": ["$payload", null] },
            "kept_until": { "$ifNull": ["$kept_until", now(offset)] },
            "locked": touch(),
        };
        doc! {
            "findAndModify": &self.events, "query": { "_id": key.as_str() }, "hint": "_id_",
            "update": [{ "$set": locked }], "upsert": true, "new": true, "fields": kept(offset),
        }
    }

    /// Keeps an event, and locks its row, if none is kept; answers with the payload of the one that is.
    pub(crate) fn put_event(&self, event: &NewEvent, offset: i64) -> Document {
        let put = doc! {
            "_id": "$_id",
            "payload": literal(event.payload.as_str()),
            "kept_until": until(offset, event.keep.as_millis()),
            "locked": touch(),
        };
        doc! {
            "findAndModify": &self.events, "query": { "_id": event.key.as_str() }, "hint": "_id_",
            "update": [{ "$replaceWith": { "$cond": [is_kept(offset), "$$ROOT", put] } }], "upsert": true, "new": false,
            "fields": kept(offset),
        }
    }

    /// Ends all waits for this event.
    pub(crate) fn wake(&self, event: &NewEvent, revision: Revision, offset: i64) -> Document {
        let done = StepState::Done(event.payload.clone());
        let step = doc! { "state": literal(done.as_str()), "value": literal(event.payload.as_str()) };
        let query = doc! {
            "state": JobState::Suspended.as_str(),
            "wait.event": { "$eq": event.key.as_str(), "$type": "string" },
            "_id": any_id(),
            // It is the wait that the job is suspended with, and no earlier one.
            "$expr": { "$eq": ["$wait.revision", "$revision"] },
        };
        let update = doc! { "q": query, "u": woken(step, revision, offset), "multi": true, "hint": "awaited" };
        doc! { "update": &self.jobs, "updates": [update] }
    }

    /// The ids of the rows that are overdue for longest.
    pub(crate) fn overdue(&self, offset: i64, limit: usize) -> Document {
        let mut find = self.find(overdue(offset), "suspended");
        find.insert("sort", doc! { "available_at": 1, "_id": 1 });
        find.insert("limit", i64::try_from(limit).unwrap_or(i64::MAX));
        find.insert("projection", doc! { "_id": 1 });
        find
    }

    /// Times those of these rows out that are overdue.
    pub(crate) fn time_out_these(&self, of: &[JobId], revision: Revision, offset: i64) -> Document {
        let mut query = overdue(offset);
        query.insert("_id", doc! { "$in": ids(of.iter().copied()) });
        let update = doc! { "q": query, "u": timed_out(revision, offset), "multi": true, "hint": "_id_" };
        doc! { "update": &self.jobs, "updates": [update] }
    }

    /// Times this row out, if it is overdue.
    pub(crate) fn time_out_this(&self, of: JobId, revision: Revision, offset: i64) -> Document {
        let mut query = overdue(offset);
        query.insert("_id", id(of));
        doc! {
            "findAndModify": &self.jobs, "query": query, "hint": "_id_", "update": timed_out(revision, offset),
            "new": true, "fields": { "_id": 1 },
        }
    }

    /// The keys of rows of the events that are over, the oldest first.
    pub(crate) fn over(&self, over: Over, offset: i64, limit: Limit) -> Document {
        let (filter, index) = over.filter(offset);
        doc! {
            "find": &self.events, "filter": filter, "hint": index, "sort": { "kept_until": 1, "_id": 1 },
            "limit": i64::from(limit.get()), "batchSize": i64::from(limit.get()), "projection": { "_id": 1 },
        }
    }

    /// Deletes those of them that still are.
    pub(crate) fn purge_events(&self, over: Over, keys: &[Bson], offset: i64) -> Document {
        let (mut filter, _) = over.filter(offset);
        filter.insert("_id", doc! { "$in": keys.to_vec() });
        doc! { "delete": &self.events, "deletes": [{ "q": filter, "limit": 0, "hint": "_id_" }] }
    }
}
