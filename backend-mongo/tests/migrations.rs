//! The schema: how it comes about, and who may work on it. (F1, F2, F3, F4, S27, S28)

mod common;
#[path = "fixtures/schema_v1.rs"]
mod schema_v1;

use backend_mongo::Migration;
use backend_mongo::MongoBackend;
use backend_mongo::migrations;
use backend_mongo::mongodb::Client;
use backend_mongo::mongodb::bson::Document;
use backend_mongo::mongodb::bson::doc;
use common::*;
use queue_core::Certainty::NotApplied;
use queue_core::*;
use tokio::task::JoinSet;

/// What is in the database: collections, their indexes, and the schema's row.
async fn schema(place: &Place) -> Vec<String> {
    let mut schema = Vec::new();
    let mut names = place.raw.list_collection_names().await.expect("lists");
    names.sort();
    for name in names {
        let indexes = place.run(doc! { "listIndexes": &name }).await;
        let indexes =
            indexes.get_document("cursor").and_then(|cursor| cursor.get_array("firstBatch")).expect("indexes");
        let mut indexes: Vec<_> = indexes.iter().map(|index| format!("{name}: {index}")).collect();
        indexes.sort();
        schema.extend(indexes);
    }
    let row = place.raw.collection::<Document>("fenced_schema").find_one(doc! {}).await.expect("reads");
    schema.extend(row.map(|row| row.to_string()));
    schema
}

async fn works(backend: &MongoBackend) {
    backend.enqueue(&[job("1")]).await.expect("stores");
    let claimed = claim_one(backend).await;
    Transitioner::new(backend).apply(&claimed.execution, &complete("1")).await.expect("settles");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn ten_migrate_at_once() {
    for rows in [false, true] {
        let Some(place) = Place::new().await else { return };
        if rows {
            for command in schema_v1::commands() {
                place.run(command).await;
            }
        }
        ten_migrate(place).await;
    }
}

async fn ten_migrate(place: Place) {
    let mut migrators = JoinSet::new();
    for _ in 0..10 {
        let options = place.options();
        migrators.spawn(async move { MongoBackend::connect_with(options).await?.migrate().await });
    }
    for answer in migrators.join_all().await {
        answer.expect("each is told that the schema is there");
    }
    let once = schema(&place).await;
    let version = r#"{ "_id": "schema", "oldest_release": "0.1.0", "oldest_version": 1, "version": 2 }"#;
    for index in ["due", "awaited", "suspended", "kept", "places"] {
        let name = format!("\"name\": \"{index}\"");
        assert_eq!(once.iter().filter(|line| line.contains(&name)).count(), 1, "{index}: {once:?}");
    }
    assert!(once.last().is_some_and(|row| row.len() == version.len()), "{once:?}");
    let backend = place.backend().await;
    works(&backend).await;
    backend.migrate().await.expect("again");
    assert_eq!(schema(&place).await, once);
    place.gone().await;
}

/// Wherever the one before it died, the next goes on; and a pool of one is enough.
#[tokio::test]
async fn one_that_ends_in_the_middle_blocks_nobody() {
    let Some(whole) = Place::new().await else { return };
    whole.migrated().await;
    let expected = schema(&whole).await;
    whole.gone().await;
    let commands: Vec<_> =
        migrations(&Identifier::default()).into_iter().flat_map(|migration| migration.commands).collect();
    for done in 0..=commands.len() {
        let Some(place) = Place::new().await else { return };
        for command in &commands[..done] {
            place.run(command.clone()).await;
        }
        let client = Client::with_uri_str(with(&place.url, "maxPoolSize=1")).await.expect("a client");
        let backend = MongoBackend::from_client(client, place.raw.name()).await.expect("a handle");
        backend.migrate().await.expect("is not blocked");
        assert_eq!(schema(&place).await, expected, "after {done} commands");
        works(&backend).await;
        place.gone().await;
    }
}

#[tokio::test]
async fn the_text_is_what_is_run() {
    let Some(place) = Place::new().await else { return };
    let prefix: Identifier = "fenced_".parse().expect("a prefix");
    let begin = ["{ \"create\": \"fenced_jobs\"", "{ \"createIndexes\": \"fenced_jobs\""];
    for (migration, begins) in migrations(&prefix).into_iter().zip(begin) {
        let text = migration.to_string();
        assert!(text.starts_with(&format!("// Schema {}\ndb.runCommand({begins}", migration.version)), "{text}");
        let Migration { commands, .. } = migration;
        for command in commands {
            assert!(text.contains(&format!("db.runCommand({command});")));
            place.run(command).await;
        }
    }
    let by_hand = schema(&place).await;
    let backend = place.backend().await;
    backend.migrate().await.expect("has nothing to do");
    assert_eq!(schema(&place).await, by_hand);
    works(&backend).await;
    place.gone().await;
}

#[tokio::test]
async fn a_program_below_the_floor_is_refused_and_writes_nothing() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let later = doc! { "version": 9_i64, "oldest_version": 7_i64, "oldest_release": "3.1.4" };
    let update = doc! { "q": { "_id": "schema" }, "u": { "$set": later } };
    place.run(doc! { "update": "fenced_schema", "updates": [update] }).await;
    let before = schema(&place).await;
    let own = MongoBackend::connect_with(place.options()).await.map(drop);
    let lent = MongoBackend::from_client(place.raw.client().clone(), place.raw.name()).await.map(drop);
    for refused in [backend.migrate().await, own, lent] {
        let error = assert_error(refused, ErrorKind::Schema, NotApplied);
        for version in [env!("CARGO_PKG_VERSION"), "version 2;", "version 9 ", "version 7,", "3.1.4"] {
            assert!(error.to_string().contains(version), "{version:?} in {error}");
        }
    }
    assert_eq!(schema(&place).await, before);
    place.gone().await;
}

/// The rolling deploy: the schema is newer, and admits this program.
#[tokio::test]
async fn a_program_that_a_newer_schema_admits_goes_on() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let update = doc! { "q": { "_id": "schema" }, "u": { "$set": { "version": 9_i64, "later": true } } };
    place.run(doc! { "update": "fenced_schema", "updates": [update] }).await;
    let before = schema(&place).await;
    let another = place.backend().await;
    another.migrate().await.expect("leaves it as it is");
    assert_eq!(schema(&place).await, before);
    let jobs = [job("1")];
    backend.enqueue(&jobs).await.expect("stores");
    place.set(jobs[0].id, doc! { "later": "kept" }).await;
    let claimed = claim_one(&another).await;
    Transitioner::new(&backend).apply(&claimed.execution, &complete("1")).await.expect("settles");
    assert_eq!(place.row(jobs[0].id).await.get_str("later"), Ok("kept"), "what a newer program wrote stays");
    place.gone().await;
}

/// F3, S27: whatever is in the way, it is named, and nothing is made beside it.
#[tokio::test]
async fn a_migration_that_meets_what_is_in_its_way_changes_nothing() {
    let ours = |id: i32, key: &str| {
        doc! { "_id": id, "queue": "q", "state": "waiting", "revision": uuid(uuid::Uuid::nil()), "active_key": key }
    };
    let index = doc! { "name": "due", "key": { "other": 1 } };
    let insert = |rows: Vec<Document>| doc! { "insert": "fenced_jobs", "documents": rows };
    for (what, there, named) in [
        (
            "a collation",
            vec![doc! { "create": "fenced_jobs", "collation": { "locale": "en", "strength": 1 } }],
            "collation",
        ),
        ("a cap", vec![doc! { "create": "fenced_schema", "capped": true, "size": 4096 }], "cap"),
        ("a view", vec![doc! { "create": "fenced_jobs", "viewOn": "other", "pipeline": [] }], "view"),
        ("rows of the application", vec![insert(vec![doc! { "_id": "mine" }])], "mine"),
        (
            "keys that several jobs have",
            vec![insert(vec![ours(1, "twice"), ours(2, "twice"), ours(3, "once"), ours(4, "$too"), ours(5, "$too")])],
            "twice",
        ),
        ("a view for events", vec![doc! { "create": "fenced_events", "viewOn": "other", "pipeline": [] }], "view"),
        (
            "a collation for events",
            vec![doc! { "create": "fenced_events", "collation": { "locale": "en", "strength": 1 } }],
            "collation",
        ),
        (
            "events of the application",
            vec![doc! { "insert": "fenced_events", "documents": [doc! { "_id": "mine" }] }],
            "mine",
        ),
        ("an index of the name", vec![doc! { "createIndexes": "fenced_jobs", "indexes": [index] }], "fenced_jobs"),
    ] {
        let Some(place) = Place::new().await else { return };
        for command in there {
            place.run(command).await;
        }
        let names = place.raw.list_collection_names().await.expect("lists");
        let indexes = if what.starts_with("a view") { Vec::new() } else { schema(&place).await };
        let backend = place.backend().await;
        let error = assert_error(backend.migrate().await, ErrorKind::Schema, NotApplied);
        assert!(error.to_string().contains(named), "{what}: {error}");
        assert_eq!(place.raw.list_collection_names().await.expect("lists").len(), names.len(), "{what}");
        if !what.starts_with("a view") {
            assert_eq!(schema(&place).await, indexes, "{what}");
        }
        assert_error(backend.enqueue(&[job("1")]).await, ErrorKind::Schema, NotApplied);
        if what == "keys that several jobs have" {
            assert!(error.to_string().contains("$too") && !error.to_string().contains("once"), "{error}");
            // Mended, it works, and the rows are kept.
            let delete = doc! { "q": { "_id": { "$in": [2, 5] } }, "limit": 0 };
            place.run(doc! { "delete": "fenced_jobs", "deletes": [delete] }).await;
            backend.migrate().await.expect("nothing is in the way any more");
            works(&backend).await;
        }
        place.gone().await;
    }
}

/// Each later migration runs on these rows as well, so the file stays as it is for ever.
#[tokio::test]
async fn jobs_of_the_first_schema_go_on() {
    let Some(place) = Place::new().await else { return };
    for command in schema_v1::commands() {
        place.run(command).await;
    }
    let backend = place.migrated().await;
    let page = backend.list(&ListFilter::default(), None, limit(100)).await.expect("lists");
    assert!(page.unreadable.is_empty(), "{page:?}");
    for &state in JobState::ALL {
        assert!(page.items.iter().any(|job| job.state() == state), "one is {state}");
    }
    let of = |state| page.items.iter().find(move |job| job.state() == state).expect("one");
    let stale = backend.stale(None, limit(100)).await.expect("lists").items;
    assert_eq!(stale.len(), 2, "the leases have run out");
    let worker: WorkerId = "web-1/00000000000000aa".parse().expect("a worker");
    assert_eq!(backend.claimed_by(&worker, Delay::ZERO, None, limit(9)).await.expect("lists").items.len(), 2);

    let twin = |job: &Job| NewJob { unique_key: job.unique_key.clone(), ..job_of(job) };
    let running = of(JobState::Running);
    for job in [of(JobState::Waiting), running, of(JobState::Suspended)] {
        let outcomes = backend.enqueue(&[twin(job)]).await.expect("is an outcome");
        assert_eq!(outcomes, [Enqueued::Duplicate { existing: job.id() }], "{} has its key", job.state());
    }
    assert_eq!(backend.extend_leases(&[held(running)], lease()).await.expect("beats"), [Beat::Extended]);
    let step = name("step");
    assert_eq!(backend.steps(running.id()).await.expect("reads"), []);
    assert_eq!(begin_step(&backend, &running.execution, &step).await.expect("begins"), None);
    finish_step(&backend, &running.execution, &step, &Json::null()).await.expect("ends");
    assert_eq!(backend.steps(running.id()).await.expect("reads").len(), 1);
    let settled = Transitioner::new(&backend).apply(&running.execution, &complete("\"done\"")).await.expect("settles");
    assert_eq!(settled.execution().state, JobState::Completed);
    let start = Transition::Start { lease: lease() };
    Transitioner::new(&backend).apply(&of(JobState::Claimed).execution, &start).await.expect("starts");
    let suspended = of(JobState::Suspended);
    let event = NewEvent { key: name("e"), payload: Json::null(), keep: Delay::ZERO };
    assert_eq!(backend.emit(&event).await.expect("emits"), Emitted::New { woken: 0 }, "it waits for no event");
    assert_eq!(backend.time_out_waits(limit(10)).await.expect("sweeps"), [suspended.id()], "its time is over");
    assert_eq!(backend.steps(suspended.id()).await.expect("reads"), []);
    let claimed = backend.claim(&request(10)).await.expect("claims").jobs;
    assert_eq!(claimed.len(), 2, "the waiting one is due, and the one that was suspended");
    let woken = claimed.iter().find(|job| job.id() == suspended.id()).expect("it goes on");
    let suspension = Suspension::new(&woken.execution, step, Some(name("e")), When::At(Timestamp::MAX));
    let answer = suspension.expect("legal").submit(&backend).await.expect("waits");
    assert!(matches!(answer, Suspended::Waits(_)), "{answer:?}");
    assert_eq!(backend.emit(&event).await.expect("emits"), Emitted::New { woken: 1 });
    let failed = of(JobState::Failed);
    assert_eq!(failed.errors.len(), 1);
    let rerun = Transitioner::new(&backend).apply(&failed.execution, &Transition::Rerun).await.expect("runs again");
    assert_eq!(rerun.execution().attempt, 0);
    let purged = backend.purge(JobState::Canceled, Delay::ZERO, limit(10)).await.expect("purges");
    assert_eq!(purged, 1);
    place.gone().await;
}

fn job_of(job: &Job) -> NewJob {
    NewJob::new(job.queue.clone(), job.kind.clone(), Json::null())
}
