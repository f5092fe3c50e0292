//! Which servers will do, and the schema: the migrations, the version, and which programs may work on it.

use std::fmt;

use mongodb::bson::Bson;
use mongodb::bson::Document;
use mongodb::bson::doc;
use queue_core::Error;
use queue_core::ErrorKind;
use queue_core::Identifier;
use queue_core::Result;
use queue_core::SchemaVersion;

use crate::error::Writes;
use crate::error::exists_already;
use crate::error::failed;
use crate::error::is_taken;
use crate::handle::Handle;
use crate::row;

/// The wire version of MongoDB 5.0: comparisons of expressions use indexes from there on.
const WIRE_VERSION_5_0: i32 = 13;

/// Refuses servers that cannot keep the contract.
pub(crate) async fn check_server(handle: &Handle) -> Result<()> {
    let hello = handle.client.database("admin").run_command(doc! { "hello": 1 }).await;
    suits(&hello.map_err(|error| failed("connecting", Writes::Nothing, error))?)
}

fn suits(hello: &Document) -> Result<()> {
    let unsupported = |message: &str| Err(Error::not_applied(ErrorKind::Unsupported, message));
    let is_router = hello.get_str("msg") == Ok("isdbgrid");
    if !is_router && !hello.contains_key("setName") {
        return unsupported(
            "the server is a standalone one, where no write can be acknowledged by a majority and no transaction begun; \
             a replica set is needed, of one member at least",
        );
    }
    if hello.get_i32("maxWireVersion").unwrap_or_default() < WIRE_VERSION_5_0 {
        return unsupported("the server is older than MongoDB 5.0");
    }
    Ok(())
}

/// One step of the schema.
#[derive(Clone, Debug, PartialEq)]
pub struct Migration {
    /// The schema's version after it.
    pub version: usize,
    /// Its commands, to be run in order. Each does no harm where it has been run before.
    pub commands: Vec<Document>,
}

impl fmt::Display for Migration {
    /// As `mongosh` reads it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "// Schema {}", self.version)?;
        for command in &self.commands {
            writeln!(f, "db.runCommand({command});")?;
        }
        Ok(())
    }
}

/// The migrations as [`migrate`](queue_core::Backend::migrate) runs them for this prefix: to be read, or run by hand, in
/// order, each that leads to a version above that in the collection `schema`. They are only ever added to.
pub fn migrations(prefix: &Identifier) -> Vec<Migration> {
    vec![Migration { version: 1, commands: first(prefix) }, Migration { version: 2, commands: steps(prefix) }]
}

/// The schema that steps, waits and events came with.
pub(crate) const STEPS: i64 = 2;

fn index(name: &str, key: Document, partial: Document) -> Document {
    doc! { "name": name, "key": key, "partialFilterExpression": partial }
}

/// Each command of a migration waits for a majority.
fn acknowledged() -> Document {
    doc! { "w": "majority", "j": true }
}

/// Schema 1: jobs, and which programs may work on them.
///
/// Times are dates; JSON is kept as the text that it was given as. There is no validator: a newer version may add states and
/// fields, and the programs of this one keep running beside it. All indexes are made by one command, which makes all of them
/// or none. The commands name the index that they use, so one that is dropped or renamed raises `oldest_version`.
fn first(prefix: &Identifier) -> Vec<Document> {
    let by_lease = doc! { "lease_expires_at": 1, "_id": 1 };
    let by_holder = doc! { "claimed_by": 1, "_id": 1 };
    let mut unique =
        index("unique", doc! { "queue": 1, "active_key": 1 }, doc! { "active_key": { "$type": "string" } });
    unique.insert("unique", true);
    let indexes = vec![
        // What a claim walks: for each kind level by level, past what is not due.
        index(
            "due",
            doc! { "queue": 1, "kind": 1, "priority": 1, "available_at": 1, "_id": 1 },
            doc! { "state": "waiting" },
        ),
        // What a sweep walks, and what a worker looks its orphans up by. For each of the two states, since MongoDB 5.0 has no
        // partial index for one of several values.
        index("claimed_leases", by_lease.clone(), doc! { "state": "claimed" }),
        index("running_leases", by_lease, doc! { "state": "running" }),
        index("claimed_holders", by_holder.clone(), doc! { "state": "claimed" }),
        index("running_holders", by_holder, doc! { "state": "running" }),
        // What a purge walks.
        index("ended", doc! { "state": 1, "finished_at": 1, "_id": 1 }, doc! { "finished_at": { "$type": "date" } }),
        // One active job per key: active_key is the unique_key until a move into a final state sets it to null.
        unique,
    ];
    let version = doc! { "version": 1_i64, "oldest_version": 1_i64, "oldest_release": "0.1.0" };
    let version = doc! { "q": { "_id": "schema" }, "u": { "$setOnInsert": version }, "upsert": true };
    vec![
        doc! { "create": format!("{prefix}jobs"), "writeConcern": acknowledged() },
        doc! { "createIndexes": format!("{prefix}jobs"), "indexes": indexes, "writeConcern": acknowledged() },
        // One row: the schema's version, and the oldest version that programs may have that work on it. Last.
        doc! { "update": format!("{prefix}schema"), "updates": [version], "writeConcern": acknowledged() },
    ]
}

/// Schema 2: what jobs have done and wait for. Programs of schema 1 work on beside it: they know the state `suspended`, leave the
/// new fields of a job as they are, and store jobs without them, which is the same as empty.
fn steps(prefix: &Identifier) -> Vec<Document> {
    let by_time = doc! { "kept_until": 1, "_id": 1 };
    let suspended = doc! { "state": "suspended" };
    let mut awaited = suspended.clone();
    awaited.insert("wait.event", doc! { "$type": "string" });
    let jobs = vec![
        // Whom an event wakes.
        index("awaited", doc! { "wait.event": 1, "_id": 1 }, awaited),
        // What the sweep of overdue waits walks.
        index("suspended", doc! { "available_at": 1, "_id": 1 }, suspended),
    ];
    let events = vec![
        // What a purge walks: events, and rows that were only locked by those who waited for one.
        index("kept", by_time.clone(), doc! { "payload": { "$type": "string" } }),
        index("places", by_time, doc! { "payload": { "$type": "null" } }),
    ];
    let earlier = doc! { "_id": "schema", "version": { "$lt": 2_i64 } };
    let version = doc! { "q": earlier, "u": { "$set": { "version": 2_i64 } } };
    vec![
        doc! { "createIndexes": format!("{prefix}jobs"), "indexes": jobs, "writeConcern": acknowledged() },
        doc! { "create": format!("{prefix}events"), "writeConcern": acknowledged() },
        doc! { "createIndexes": format!("{prefix}events"), "indexes": events, "writeConcern": acknowledged() },
        doc! { "update": format!("{prefix}schema"), "updates": [version], "writeConcern": acknowledged() },
    ]
}

/// The error of a call where there is no schema.
pub(crate) fn missing(call: &str) -> Error {
    Error::not_applied(ErrorKind::Schema, format!("{call}: the collections are missing; see migrate"))
}

/// What the schema says of itself.
///
/// # Errors
///
/// A schema that does not admit this program any more.
pub(crate) async fn admitted(handle: &Handle) -> Result<SchemaVersion> {
    let rows = handle.read("reading the schema's version", handle.ops.version(), None).await?;
    let unreadable = |reason| Error::not_applied(ErrorKind::Schema, format!("the schema's version: {reason}"));
    let schema = rows.first().map(row::version).transpose().map_err(unreadable)?.unwrap_or_default();
    schema.admit(migrations(&handle.prefix).len(), env!("CARGO_PKG_VERSION"))?;
    Ok(schema)
}

/// Runs what is missing. Any number of processes may do so at once: each command finds done what others did, and the version
/// is set last, so that whoever dies in the middle leaves it to the next. Answers with the version that is there now.
pub(crate) async fn migrate(handle: &Handle) -> Result<i64> {
    let prefix = &handle.prefix;
    let present = admitted(handle).await?;
    let mut missing = migrations(prefix);
    missing.retain(|migration| present.lacks(migration.version));
    for Migration { version, .. } in &missing {
        check_what_is_there(handle, *version).await?;
    }
    let mut reached = present.version;
    for Migration { version, commands } in missing {
        for command in commands {
            match handle.run(command, None).await {
                Err(error) if exists_already(&error) => {}
                Err(error) if is_taken(&error) => return Err(broken_keys(handle).await?),
                Err(error) => {
                    let error = failed("migrating", Writes::Rows, error);
                    let is_in_the_way = error.kind() == ErrorKind::Permanent;
                    let kind = if is_in_the_way { ErrorKind::Schema } else { error.kind() };
                    let message = format!("migrating {prefix}jobs");
                    return Err(Error::new(kind, error.certainty(), message).with_source(error));
                }
                Ok(reply) => {
                    if let crate::error::Concern::Failed(error) = crate::error::concern("migrating", &reply) {
                        return Err(error);
                    }
                }
            }
        }
        tracing::info!(%prefix, version, "migrated the schema");
        reached = i64::try_from(version).unwrap_or(i64::MAX);
    }
    Ok(reached)
}

/// Refuses a collection of a name that a migration wants which is of a kind that does not keep every row and compare every byte,
/// or which has rows that are not ours.
async fn check_what_is_there(handle: &Handle, version: usize) -> Result<()> {
    let in_the_way = |name: &str, reason: &str| {
        Err(Error::not_applied(ErrorKind::Schema, format!("migrating: there is a collection {name} {reason}")))
    };
    let (ours, what, names) = match version {
        1 => {
            let text = doc! { "$type": "string" };
            let job = doc! { "queue": &text, "state": &text, "revision": { "$type": "binData" } };
            (job, "jobs", vec![&handle.ops.jobs, &handle.ops.schema])
        }
        _ => {
            let event = doc! { "_id": { "$type": "string" }, "kept_until": { "$type": "date" } };
            (event, "events", vec![&handle.ops.events])
        }
    };
    let filter = doc! { "name": { "$in": names.clone() } };
    let list = doc! { "listCollections": 1, "filter": filter, "authorizedCollections": true };
    for collection in handle.read("migrating", list, None).await? {
        let name = collection.get_str("name").unwrap_or_default();
        if collection.get_str("type").is_ok_and(|kind| kind != "collection") {
            return in_the_way(name, "that is a view or holds time series");
        }
        let Ok(options) = collection.get_document("options") else { continue };
        if options.contains_key("collation") || options.get_bool("capped") == Ok(true) {
            return in_the_way(name, "with a collation or a cap");
        }
    }
    let rows = names[0];
    let find = doc! { "find": rows, "filter": { "$nor": [ours] }, "limit": 1, "projection": { "_id": 1 } };
    if let Some(other) = handle.read("migrating", find, None).await?.first() {
        let id = other.get("_id").unwrap_or(&Bson::Null);
        return in_the_way(rows, &format!("with rows that are no {what}, such as {id}"));
    }
    Ok(())
}

/// Names the keys that several active jobs have.
async fn broken_keys(handle: &Handle) -> Result<Error> {
    let pipeline = vec![
        doc! { "$match": { "active_key": { "$type": "string" } } },
        doc! { "$group": { "_id": { "queue": "$queue", "key": "$active_key" }, "jobs": { "$sum": 1 } } },
        doc! { "$match": { "jobs": { "$gt": 1 } } },
        doc! { "$limit": 10 },
    ];
    let command = doc! { "aggregate": &handle.ops.jobs, "pipeline": pipeline, "cursor": {}, "allowDiskUse": true };
    let rows = handle.read("migrating", command, None).await?;
    let keys: Vec<_> = rows.iter().filter_map(|row| row.get("_id")).map(Bson::to_string).collect();
    let message = format!("migrating: several active jobs have one unique key: {}", keys.join(", "));
    Ok(Error::not_applied(ErrorKind::Schema, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_that_cannot_keep_the_contract_are_refused_with_the_reason() {
        let member = doc! { "setName": "rs0", "maxWireVersion": 13 };
        suits(&member).expect("a replica set of 5.0");
        suits(&doc! { "msg": "isdbgrid", "maxWireVersion": 21 }).expect("a router of 7.0");
        for (hello, reason) in [
            (doc! { "maxWireVersion": 17 }, "standalone"),
            (doc! { "setName": "rs0", "maxWireVersion": 9 }, "5.0"),
            (doc! { "setName": "rs0" }, "5.0"),
        ] {
            let error = suits(&hello).expect_err("refused");
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains(reason), "{error}");
        }
    }
}
