//! Compare-and-updates.

use mongodb::bson::Bson;
use mongodb::bson::Document;
use mongodb::bson::doc;
use queue_core::Change;
use queue_core::Failure;
use queue_core::Fingerprint;
use queue_core::JobId;
use queue_core::LeaseMatch;
use queue_core::NewFailure;
use queue_core::Patch;
use queue_core::UpdateRequest;
use queue_core::WorkerId;

use super::Ops;
use super::due;
use super::execution;
use super::id;
use super::literal;
use super::now;
use super::text;
use super::until;
use crate::row::binary;
use crate::row::date;

/// The row that a decision was based on, whatever its lease. What could not be answered for afterwards, because it is out of
/// range where the fingerprint does not look, is not written either.
fn as_seen(of: JobId, seen: &Fingerprint) -> Document {
    // Whole, so that a new field cannot be left out here.
    let Fingerprint { state, attempt, claimed_by, claimed_at, attempted_at, revision, lease } = seen;
    let mut filter = doc! {
        "_id": id(of),
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
        LeaseMatch::Expired(expiry) => drop(filter.insert("lease_expires_at", date(*expiry))),
        LeaseMatch::Unset => drop(filter.insert("lease_expires_at", Bson::Null)),
    }
    filter
}

/// Whether the lease that was seen has run out, for decisions that ask.
fn has_expired(seen: &Fingerprint, offset: i64) -> Option<Document> {
    match seen.lease {
        LeaseMatch::Expired(expiry) => Some(doc! { "$lte": [date(expiry), now(offset)] }),
        LeaseMatch::Any | LeaseMatch::Unset => None,
    }
}

/// The fields that a patch sets. The key is in the unique index while the job is active, and in a state that a newer version
/// added it is whatever that version says.
fn changes(patch: &Patch, offset: i64) -> Document {
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
        set.insert("revision", literal(binary(revision.as_uuid())));
    }
    if let Some(when) = available {
        set.insert("available_at", due(offset, *when));
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
            Set(result) => Some(literal(result.as_str())),
        },
    );
    change("payload", payload.as_ref().map(|payload| literal(payload.as_str())));
    change("errors", failure.as_ref().map(|failure| with_failure(failure, offset).into()));
    set
}

/// The failures with another one. What is no list, by somebody else's hand, must not keep it from being recorded.
fn with_failure(failure: &NewFailure, offset: i64) -> Document {
    let NewFailure { attempt, fence, worker, text: reason } = failure;
    let kept = i64::try_from(Failure::KEPT).unwrap_or(i64::MAX);
    let new = doc! {
        "attempt": i64::from(*attempt),
        "fence": i64::try_from(*fence).unwrap_or(i64::MAX),
        "worker": text(worker.as_ref().map(WorkerId::as_str)),
        "text": reason.as_str(),
    };
    let new = doc! { "$mergeObjects": [literal(new), { "at": now(offset) }] };
    let old = doc! { "$cond": [{ "$isArray": "$errors" }, "$errors", []] };
    doc! { "$slice": [{ "$concatArrays": [old, [new]] }, Bson::Int64(-kept)] }
}

impl Ops {
    /// A compare-and-update, that answers with the row as it then is.
    pub(crate) fn update(&self, of: JobId, current: &Fingerprint, patch: &Patch, offset: i64) -> Document {
        let mut query = as_seen(of, current);
        if let Some(expired) = has_expired(current, offset) {
            query.insert("$expr", expired);
        }
        let update = [doc! { "$set": changes(patch, offset) }];
        doc! {
            "findAndModify": &self.jobs, "query": query, "hint": "_id_", "update": update.to_vec(), "new": true,
            "fields": execution(),
        }
    }

    /// Many compare-and-updates, of which each that does not match is answered with an error of its own.
    ///
    /// MongoDB says how many items of a batch matched, and not which. So each item is an upsert that cannot insert: where no
    /// row matches, its pipeline is run on what the filter says of the row, meets that there is no queue, and fails; and so
    /// it does if a lease has not run out, which the filter of an upsert may not ask. An item without an error has matched,
    /// for certain, and was written in the same step, whatever has become of the row since.
    pub(crate) fn update_many(&self, updates: &[UpdateRequest], offset: i64) -> Document {
        let item = |UpdateRequest { id: of, current, patch }: &UpdateRequest| {
            let mut set = changes(patch, offset);
            let mut seen = vec![doc! { "$ne": [{ "$type": "$queue" }, "missing"] }];
            seen.extend(has_expired(current, offset));
            // Not a constant, which would be computed when the command is parsed.
            let fails = doc! { "$toInt": { "$concat": ["not as seen: ", "$state"] } };
            set.insert("state", doc! { "$cond": [{ "$and": seen }, literal(patch.state.as_str()), fails] });
            doc! { "q": as_seen(*of, current), "u": [{ "$set": set }], "upsert": true, "hint": "_id_" }
        };
        doc! { "update": &self.jobs, "updates": updates.iter().map(item).collect::<Vec<_>>(), "ordered": false }
    }
}
