//! Claims and heartbeats.

use mongodb::bson::Bson;
use mongodb::bson::Document;
use mongodb::bson::doc;
use queue_core::ClaimRequest;
use queue_core::Held;
use queue_core::JobId;
use queue_core::JobState;
use queue_core::Lease;
use queue_core::Name;
use queue_core::Revision;

use super::HELD;
use super::Ops;
use super::any_id;
use super::id;
use super::ids;
use super::literal;
use super::now;
use super::text;
use super::until;
use super::without_steps;
use crate::row::binary;

/// The numbers that come after this one; what is no number, by somebody else's hand, stays.
fn counted(field: &str, largest: i64) -> Document {
    let counted = doc! { "$add": [{ "$min": [field, Bson::Int64(largest - 1)] }, Bson::Int64(1)] };
    doc! { "$cond": [{ "$isNumber": field }, counted, field] }
}

impl Ops {
    /// What can be claimed: the walk through `due` is merged from one walk per kind, each of which seeks past future jobs of a
    /// better priority and never meets those of other kinds.
    fn due(&self, request: &ClaimRequest, kinds: &[Name], offset: i64) -> Document {
        let kinds: Vec<_> = kinds.iter().map(|kind| Bson::from(kind.as_str())).collect();
        doc! {
            "queue": request.queue().as_str(),
            "kind": { "$in": kinds },
            "state": JobState::Waiting.as_str(),
            "_id": any_id(),
            "$expr": { "$lte": ["$available_at", now(offset)] },
        }
    }

    fn claimed(request: &ClaimRequest, revision: Revision, offset: i64) -> Vec<Document> {
        let mut set = doc! {
            "state": literal(if request.starts() { JobState::Running } else { JobState::Claimed }.as_str()),
            "fence": counted("$fence", i64::MAX),
            "revision": literal(binary(revision.as_uuid())),
            "claimed_by": literal(request.worker().as_str()),
            "claimed_at": now(offset),
            "attempted_at": literal(Bson::Null),
            "lease_expires_at": until(offset, request.lease().as_millis()),
        };
        if request.starts() {
            set.insert("attempt", counted("$attempt", i64::from(u32::MAX)));
            set.insert("attempted_at", now(offset));
        }
        vec![doc! { "$set": set }]
    }

    /// The ids of the first that can be claimed, each with what they are ordered by.
    pub(crate) fn candidates(&self, request: &ClaimRequest, kinds: &[Name], offset: i64, limit: usize) -> Document {
        let mut find = self.find(self.due(request, kinds, offset), "due");
        find.insert("sort", doc! { "priority": 1, "available_at": 1, "_id": 1 });
        find.insert("limit", i64::try_from(limit).unwrap_or(i64::MAX));
        find.insert("projection", doc! { "priority": 1, "available_at": 1 });
        find
    }

    /// Claims the first job that is due.
    pub(crate) fn claim_first(&self, request: &ClaimRequest, revision: Revision, offset: i64) -> Document {
        doc! {
            "findAndModify": &self.jobs,
            "query": self.due(request, request.kinds(), offset),
            "sort": { "priority": 1, "available_at": 1, "_id": 1 },
            "hint": "due",
            "update": Self::claimed(request, revision, offset),
            "new": true,
            "fields": without_steps(),
        }
    }

    /// Claims this job, if it still can be.
    pub(crate) fn claim_this(&self, request: &ClaimRequest, of: JobId, revision: Revision, offset: i64) -> Document {
        let mut query = self.due(request, request.kinds(), offset);
        query.insert("_id", id(of));
        doc! {
            "findAndModify": &self.jobs, "query": query, "hint": "_id_",
            "update": Self::claimed(request, revision, offset), "new": true, "fields": without_steps(),
        }
    }

    /// Claims those of these jobs that still can be. Which ones they were says the revision, that no other call has.
    pub(crate) fn claim_these(
        &self,
        request: &ClaimRequest,
        of: &[JobId],
        revision: Revision,
        offset: i64,
    ) -> Document {
        let mut query = self.due(request, request.kinds(), offset);
        query.insert("_id", doc! { "$in": ids(of.iter().copied()) });
        let update = doc! { "q": query, "u": Self::claimed(request, revision, offset), "multi": true, "hint": "_id_" };
        doc! { "update": &self.jobs, "updates": [update] }
    }

    /// Those of these jobs that the claim of this revision has.
    pub(crate) fn claimed_now(&self, of: &[JobId], revision: Revision) -> Document {
        let ids = doc! { "$in": ids(of.iter().copied()) };
        let mut find = self.find(doc! { "_id": ids, "revision": binary(revision.as_uuid()) }, "_id_");
        find.insert("projection", without_steps());
        find
    }

    /// Renews leases: one item for each claim call that they came from.
    pub(crate) fn extend(&self, claims: &[Vec<&Held>], lease: Lease, offset: i64) -> Document {
        let held: Vec<_> = HELD.iter().map(|(state, ..)| state.as_str()).collect();
        let longest = doc! { "$max": ["$lease_expires_at", until(offset, lease.as_millis())] };
        let item = |claim: &Vec<&Held>| {
            let query = doc! {
                "_id": { "$in": ids(claim.iter().map(|held| held.id)) },
                "revision": claim.first().map_or(Bson::Null, |held| binary(held.revision.as_uuid())),
                "claimed_by": text(claim.first().map(|held| held.worker.as_str())),
                "state": { "$in": &held },
            };
            doc! { "q": query, "u": [{ "$set": { "lease_expires_at": &longest } }], "multi": true, "hint": "_id_" }
        };
        doc! { "update": &self.jobs, "updates": claims.iter().map(item).collect::<Vec<_>>(), "ordered": false }
    }
}
