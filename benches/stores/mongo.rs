//! MongoDB, in a database of the benchmark's own.

use std::sync::Arc;

use async_trait::async_trait;
use fenced_queue::Inspect;
use fenced_queue::NewJob;
use fenced_queue::contract::Backend;
use fenced_queue::contract::Revision;
use fenced_queue::mongo::MongoBackend;
use fenced_queue::mongo::MongoOptions;
use fenced_queue::mongo::mongodb::Client;
use fenced_queue::mongo::mongodb::Collection;
use fenced_queue::mongo::mongodb::Database;
use fenced_queue::mongo::mongodb::bson::Binary;
use fenced_queue::mongo::mongodb::bson::Bson;
use fenced_queue::mongo::mongodb::bson::DateTime;
use fenced_queue::mongo::mongodb::bson::Document;
use fenced_queue::mongo::mongodb::bson::doc;
use fenced_queue::mongo::mongodb::bson::spec::BinarySubtype;
use fenced_queue::mongo::mongodb::options::ClientOptions;
use fenced_queue::mongo::mongodb::options::WriteConcern;
use futures_util::TryStreamExt;
use uuid::Uuid;

use crate::Result;
use crate::floor::Floor;
use crate::floor::Ticket;
use crate::measure::KIND;
use crate::measure::QUEUE;
use crate::measure::RESULT;
use crate::measure::WORKER;
use crate::target::Store;
use crate::target::own_name;

pub(crate) struct MongoStore {
    url: String,
    database: String,
}

impl MongoStore {
    pub(crate) async fn open(url: &str) -> Result<Self> {
        let store = Self { url: url.to_owned(), database: own_name() };
        store.contract(1).await?.migrate().await?;
        Ok(store)
    }

    async fn plain(&self) -> Result<Client> {
        let mut options = ClientOptions::parse(&self.url).await?;
        options.write_concern = Some(WriteConcern::majority());
        Ok(Client::with_options(options)?)
    }
}

#[async_trait]
impl Store for MongoStore {
    async fn version(&self) -> Result<String> {
        let info = self.plain().await?.database("admin").run_command(doc! { "buildInfo": 1 }).await?;
        Ok(format!("MongoDB {}, w=majority", info.get_str("version")?))
    }

    /// The driver opens as many connections as calls need at once.
    async fn contract(&self, _connections: u32) -> Result<Arc<dyn Inspect>> {
        let options = MongoOptions::from_url(&self.url)?.database(&self.database)?;
        Ok(Arc::new(MongoBackend::connect_with(options).await?))
    }

    async fn floor(&self) -> Result<Box<dyn Floor>> {
        let database = self.plain().await?.database(&self.database);
        Ok(Box::new(MongoFloor(database.collection("fenced_jobs"))))
    }

    async fn discard(self: Box<Self>) -> Result<()> {
        Ok(self.plain().await?.database(&self.database).drop().await?)
    }
}

struct MongoFloor(Collection<Document>);

fn binary(id: Uuid) -> Bson {
    Bson::Binary(Binary { subtype: BinarySubtype::Uuid, bytes: id.as_bytes().to_vec() })
}

#[async_trait]
impl Floor for MongoFloor {
    async fn enqueue(&mut self, jobs: &[NewJob]) -> Result<()> {
        // The application's clock, where the backend takes the server's: an insert has no other.
        let now = DateTime::now();
        let documents = jobs.iter().map(|job| {
            doc! {
                "_id": binary(job.id.as_uuid()), "queue": QUEUE, "kind": KIND, "state": "waiting", "priority": 5, "attempt": 0_i64,
                "max_attempts": 25_i64, "fence": 0_i64, "revision": binary(Uuid::new_v4()), "available_at": now, "created_at": now,
                "claimed_by": null, "claimed_at": null, "attempted_at": null, "lease_expires_at": null, "finished_at": null,
                "unique_key": null, "result": null, "errors": [], "payload": job.payload.as_str(),
            }
        });
        self.0.insert_many(documents).ordered(false).await?;
        Ok(())
    }

    async fn claim(&mut self, limit: usize) -> Result<Vec<Ticket>> {
        let revision = Uuid::new_v4();
        let due = doc! { "queue": QUEUE, "priority": 5, "state": "waiting", "kind": KIND, "$expr": { "$lte": ["$available_at", "$$NOW"] } };
        let candidates = self.0.find(due).projection(doc! { "_id": 1 }).sort(doc! { "available_at": 1, "_id": 1 });
        // A window that is larger than the batch, so that claimers at once do not all want the same rows.
        let window = i64::try_from(limit * 8)?;
        let mut ids: Vec<Bson> = candidates
            .limit(window)
            .await?
            .try_collect::<Vec<_>>()
            .await?
            .into_iter()
            .filter_map(|mut document| document.remove("_id"))
            .collect();
        let pieces = ids.len().div_ceil(limit).max(1);
        let first = fastrand::usize(..pieces) * limit;
        ids = ids.into_iter().skip(first).take(limit).collect();
        let set = doc! {
            "state": "running", "attempt": { "$add": ["$attempt", 1] }, "fence": { "$add": ["$fence", 1] },
            "revision": { "$literal": binary(revision) }, "claimed_by": { "$literal": WORKER }, "claimed_at": "$$NOW",
            "attempted_at": "$$NOW", "lease_expires_at": { "$add": ["$$NOW", 600_000] },
        };
        let claimable = doc! { "_id": { "$in": ids.clone() }, "state": "waiting" };
        self.0.update_many(claimable, vec![doc! { "$set": set }]).await?;
        let won = self.0.find(doc! { "_id": { "$in": ids }, "revision": binary(revision) });
        let won: Vec<_> = won.await?.try_collect().await?;
        let ticket = |document: &Document| {
            let _payload = document.get_str("payload")?;
            let Some(Bson::Binary(id)) = document.get("_id") else {
                return Err("an id that is none".into());
            };
            Ok(Ticket { id: Uuid::from_slice(&id.bytes)?.into(), revision: Revision::from(revision) })
        };
        won.iter().map(ticket).collect()
    }

    /// What was claimed together has one revision, and so one fingerprint: one command settles it.
    async fn settle(&mut self, tickets: &[Ticket]) -> Result<u64> {
        let mut by_revision = std::collections::BTreeMap::<Uuid, Vec<Bson>>::new();
        for ticket in tickets {
            by_revision.entry(ticket.revision.as_uuid()).or_default().push(binary(ticket.id.as_uuid()));
        }
        let mut matched = 0;
        for (revision, ids) in by_revision {
            let current = doc! {
                "_id": { "$in": ids }, "revision": binary(revision), "state": "running", "attempt": 1_i64, "claimed_by": WORKER,
            };
            let set = doc! {
                "state": "completed", "finished_at": "$$NOW", "lease_expires_at": null, "result": { "$literal": RESULT },
                "revision": { "$literal": binary(Uuid::new_v4()) },
            };
            matched += self.0.update_many(current, vec![doc! { "$set": set }]).await?.matched_count;
        }
        Ok(matched)
    }

    async fn end_everything(&mut self) -> Result<()> {
        let set = doc! { "state": "completed", "finished_at": "$$NOW" };
        self.0.update_many(doc! { "state": { "$ne": "completed" } }, vec![doc! { "$set": set }]).await?;
        Ok(())
    }

    async fn rest(&mut self) -> Result<()> {
        let past = "minSnapshotHistoryWindowInSeconds";
        let admin = self.0.client().database("admin");
        let kept = admin.run_command(doc! { "getParameter": 1, past: 1 }).await?.get_i32(past)?;
        admin.run_command(doc! { "setParameter": 1, past: 0 }).await?;
        let forgotten = forget(&admin).await;
        admin.run_command(doc! { "setParameter": 1, past: kept }).await?;
        forgotten
    }

    async fn clear(&mut self) -> Result<()> {
        self.0.delete_many(doc! {}).await?;
        Ok(())
    }
}

/// Entries of what was changed stay in the indexes, marked as deleted, for the five minutes for which the server keeps the past,
/// and until a checkpoint comes to them. With no past to keep, it has come to all when two in a row find none.
async fn forget(admin: &Database) -> Result<()> {
    let (mut removed, mut idle) = (0, 0);
    while idle < 2 {
        // Something new, before which there is a past.
        let note =
            doc! { "appendOplogNote": 1, "data": { "of": "the benchmark" }, "writeConcern": { "w": "majority" } };
        admin.run_command(note).await?;
        admin.run_command(doc! { "fsync": 1 }).await?;
        let status = admin.run_command(doc! { "serverStatus": 1 }).await?;
        let cleanup = status.get_document("wiredTiger")?.get_document("checkpoint-cleanup")?;
        let so_far = cleanup.get_i64("pages removed").or_else(|_| cleanup.get_i32("pages removed").map(i64::from))?;
        idle = if so_far == removed { idle + 1 } else { 0 };
        removed = so_far;
    }
    Ok(())
}
