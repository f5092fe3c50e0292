//! Compare-and-updates.

use std::collections::HashMap;

use mongodb::bson::Bson;
use mongodb::bson::Document;
use mongodb::bson::doc;
use queue_core::Change;
use queue_core::Execution;
use queue_core::Failure;
use queue_core::Fingerprint;
use queue_core::JobId;
use queue_core::LeaseMatch;
use queue_core::NewFailure;
use queue_core::Patch;
use queue_core::Revision;
use queue_core::UpdateRequest;
use queue_core::When;
use queue_core::WorkerId;

use super::BATCH;
use super::Ops;
use super::execution;
use super::id;
use super::literal;
use super::millis;
use super::no_later;
use super::now;
use super::text;
use super::until;
use crate::row::binary;
use crate::row::date;

/// A row that a decision was based on, but for its id. What could not be answered for afterwards, because it is out of range
/// where the fingerprint does not look, is not written either.
pub(super) fn as_seen(seen: &Fingerprint, offset: i64) -> Document {
    // Whole, so that a new field cannot be left out here.
    let Fingerprint { state, attempt, claimed_by, claimed_at, attempted_at, revision, lease } = seen;
    let mut filter = doc! {
        "state": state.as_str(),
        "attempt": i64::from(*attempt),
        "claimed_by": text(claimed_by.as_ref().map(WorkerId::as_str)),
        "claimed_at": claimed_at.map_or(Bson::Null, date),
        "attempted_at": attempted_at.map_or(Bson::Null, date),
        "revision": binary(revision.as_uuid()),
        "fence": { "$gte": 0_i64 },
        "max_attempts": { "$gte": 1_i64, "$lte": i64::from(u32::MAX) },
    };
    match lease {
        LeaseMatch::Any => {}
        LeaseMatch::Expired(expiry) => {
            filter.insert("lease_expires_at", date(*expiry));
            filter.insert("$expr", doc! { "$lte": [date(*expiry), now(offset)] });
        }
        LeaseMatch::Unset => drop(filter.insert("lease_expires_at", Bson::Null)),
    }
    filter
}

/// The fields that a patch sets, each with its expression. What differs from job to job in the same move, `value` puts into
/// words. The key is in the unique index while the job is active, and in a state that a newer version added it is whatever
/// that version says.
pub(super) fn changes(patch: &Patch, offset: i64, mut value: impl FnMut(&'static str, Bson) -> Bson) -> Document {
    use Change::*;

    // Whole, so that a new field cannot be left out here.
    let Patch {
        revision,
        state,
        attempt,
        available,
        clear_claim,
        attempted_at,
        lease,
        finished_at,
        result,
        failure,
        payload,
    } = patch;
    let key = if state.is_active() { doc! { "$ifNull": ["$unique_key", null] }.into() } else { literal(Bson::Null) };
    let mut set = doc! { "state": literal(state.as_str()), "attempt": literal(i64::from(*attempt)), "active_key": key };
    if let Some(revision) = revision {
        set.insert("revision", value("revision", binary(revision.as_uuid())));
    }
    if let Some(when) = available {
        let due = match *when {
            When::Now => now(offset),
            When::After(delay) => no_later(value("available_at", millis(offset, delay.as_millis()))),
            When::At(instant) => value("available_at", date(instant)),
        };
        set.insert("available_at", due);
    }
    if *clear_claim {
        set.insert("claimed_by", literal(Bson::Null));
        set.insert("claimed_at", literal(Bson::Null));
    }
    let mut change = |field: &str, value: Option<Bson>| drop(value.map(|value| set.insert(field, value)));
    let time = |change: &Change<()>| match change {
        Keep => None,
        Clear => Some(literal(Bson::Null)),
        Set(()) => Some(now(offset)),
    };
    change("attempted_at", time(attempted_at));
    change("finished_at", time(finished_at));
    change(
        "lease_expires_at",
        match lease {
            Keep => None,
            Clear => Some(literal(Bson::Null)),
            Set(lease) => Some(until(offset, lease.as_millis())),
        },
    );
    change(
        "result",
        match result {
            Keep => None,
            Clear => Some(literal(Bson::Null)),
            Set(result) => Some(value("result", result.as_str().into())),
        },
    );
    change("payload", payload.as_ref().map(|payload| value("payload", payload.as_str().into())));
    change("errors", failure.as_ref().map(|failure| with_failure(value("failure", new_failure(failure)), offset)));
    set
}

/// A failure, but for its time.
fn new_failure(failure: &NewFailure) -> Bson {
    let NewFailure { attempt, fence, worker, text: reason } = failure;
    let failure = doc! {
        "attempt": i64::from(*attempt),
        "fence": i64::try_from(*fence).unwrap_or(i64::MAX),
        "worker": text(worker.as_ref().map(WorkerId::as_str)),
        "text": reason.as_str(),
    };
    failure.into()
}

/// The failures with another one. What is no list, by somebody else's hand, must not keep it from being recorded.
fn with_failure(new: Bson, offset: i64) -> Bson {
    let kept = i64::try_from(Failure::KEPT).unwrap_or(i64::MAX);
    let new = doc! { "$mergeObjects": [new, { "at": now(offset) }] };
    let old = doc! { "$cond": [{ "$isArray": "$errors" }, "$errors", []] };
    doc! { "$slice": [{ "$concatArrays": [old, [new]] }, Bson::Int64(-kept)] }.into()
}

/// Jobs of a batch that were seen alike, but for their ids, and change alike, but for the values.
struct Alike {
    seen: Document,
    set: Document,
    ids: Vec<Bson>,
    values: Vec<Bson>,
}

impl Alike {
    /// Their statement. Each row is compared and written by itself, with the values that stand where its id stands.
    fn item(self, mark: &Bson) -> Document {
        let Self { mut seen, mut set, ids, values } = self;
        // Of a list that is a literal the server makes an index of its own.
        let place = doc! { "$indexOfArray": [literal(ids.clone()), "$_id"] };
        let values = doc! { "values": { "$arrayElemAt": [literal(values), place] } };
        seen.insert("_id", doc! { "$in": ids });
        set.insert(BATCH, mark);
        let written = doc! { "$let": { "vars": values, "in": { "$mergeObjects": ["$$ROOT", set] } } };
        doc! { "q": seen, "u": [{ "$replaceWith": written }], "multi": true, "hint": "_id_" }
    }
}

impl Ops {
    /// A compare-and-update, that answers with the row as it then is.
    pub(crate) fn update(&self, of: JobId, current: &Fingerprint, patch: &Patch, offset: i64) -> Document {
        let mut query = as_seen(current, offset);
        query.insert("_id", id(of));
        let update = [doc! { "$set": changes(patch, offset, |_, value| literal(value)) }];
        doc! {
            "findAndModify": &self.jobs, "query": query, "hint": "_id_", "update": update.to_vec(), "new": true,
            "fields": execution(),
        }
    }

    /// Locks the row of an execution, if that is current, and changes nothing but the mark.
    pub(crate) fn lock(&self, seen: &Execution, offset: i64) -> Document {
        let mut query = as_seen(&seen.fingerprint(), offset);
        query.insert("_id", id(seen.id));
        // MongoDB locks no row by writing what is there already.
        let mark = doc! { "$set": { BATCH: binary(Revision::random().as_uuid()) } };
        doc! { "findAndModify": &self.jobs, "query": query, "hint": "_id_", "update": mark, "fields": { "_id": 1 } }
    }

    /// Many compare-and-updates of different jobs, which leave this mark in the rows that matched: MongoDB says how many
    /// matched, and not which. The revision alone would not tell a row that this call wrote from one that the same decision,
    /// submitted before, had written.
    ///
    /// A statement costs the server three times what a row costs it. So those that were claimed together and end alike share
    /// one.
    pub(crate) fn update_many(&self, updates: &[UpdateRequest], mark: Revision, offset: i64) -> Document {
        // By revision, since hardly any two of one revision differ otherwise.
        let mut groups = HashMap::<_, Vec<Alike>>::new();
        for UpdateRequest { id: of, current, patch } in updates {
            let mut values = Document::new();
            let set = changes(patch, offset, |field, value| {
                values.insert(field, value);
                format!("$$values.{field}").into()
            });
            let seen = as_seen(current, offset);
            let groups = groups.entry(current.revision).or_default();
            let place = groups.iter().position(|group| group.seen == seen && group.set == set);
            let place = place.unwrap_or_else(|| {
                groups.push(Alike { seen, set, ids: Vec::new(), values: Vec::new() });
                groups.len() - 1
            });
            groups[place].ids.push(id(*of));
            groups[place].values.push(values.into());
        }
        let mark = literal(binary(mark.as_uuid()));
        let updates: Vec<_> = groups.into_values().flatten().map(|group| group.item(&mark)).collect();
        doc! { "update": &self.jobs, "updates": updates, "ordered": false }
    }
}
