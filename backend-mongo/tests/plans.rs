//! How MongoDB goes about the commands: the very ones that are sent, explained, and what they look at counted.

mod common;

use backend_mongo::MongoBackend;
use backend_mongo::mongodb::Collection;
use backend_mongo::mongodb::bson::Bson;
use backend_mongo::mongodb::bson::DateTime;
use backend_mongo::mongodb::bson::Document;
use backend_mongo::mongodb::bson::RawDocumentBuf;
use backend_mongo::mongodb::bson::doc;
use common::*;
use queue_core::*;

/// How MongoDB would run a command that was sent: its stages, and the keys and rows that it looks at.
#[derive(Debug)]
struct Plan {
    stages: Vec<String>,
    keys: i64,
    rows: i64,
}

impl Plan {
    async fn of(place: &Place, sent: &Document) -> Self {
        let mut command = sent.clone();
        for of_the_driver in
            ["lsid", "$db", "$clusterTime", "txnNumber", "startTransaction", "autocommit", "$readPreference"]
        {
            command.remove(of_the_driver);
        }
        for of_the_call in ["readConcern", "writeConcern", "maxTimeMS", "ordered"] {
            command.remove(of_the_call);
        }
        // One item of a batch can be explained.
        for items in ["updates", "deletes"] {
            if let Ok(items) = command.get_array_mut(items) {
                items.truncate(1);
            }
        }
        let explained = place.run(doc! { "explain": command, "verbosity": "executionStats" }).await;
        let executed = explained.get_document("executionStats").expect("was run");
        let mut stages = Vec::new();
        note_stages(executed.get_document("executionStages").expect("stages"), &mut stages);
        let number = |field| i64::from(executed.get_i32(field).expect("a number"));
        Self { stages, keys: number("totalKeysExamined"), rows: number("totalDocsExamined") }
    }

    /// Walks this index, and no other; sorts nothing, and reads no collection from end to end.
    #[track_caller]
    fn assert_index(&self, index: &str) {
        assert!(self.stages.iter().any(|stage| *stage == format!("IXSCAN {index}")), "{index}: {self:?}");
        for stage in &self.stages {
            assert!(!stage.starts_with("IXSCAN") || stage.ends_with(&format!(" {index}")), "{index}: {self:?}");
            assert!(stage != "COLLSCAN" && stage != "SORT", "{index}: {self:?}");
        }
    }
}

fn note_stages(stage: &Document, stages: &mut Vec<String>) {
    let name = stage.get_str("stage").expect("a name");
    stages.push(match stage.get_str("indexName") {
        Ok(index) => format!("{name} {index}"),
        Err(_) => name.to_owned(),
    });
    if let Ok(input) = stage.get_document("inputStage") {
        note_stages(input, stages);
    }
    for input in stage.get_array("inputStages").into_iter().flatten().filter_map(Bson::as_document) {
        note_stages(input, stages);
    }
}

/// What is in front of the jobs that a test is about.
const MANY: u32 = 100_000;

/// Stores many rows like each of these, and then makes the indexes, which is far faster than the other way round.
async fn fill(place: &Place, likes: &[(&str, Document)]) {
    let listed = place.run(doc! { "listIndexes": "fenced_jobs" }).await;
    let all = listed.get_document("cursor").and_then(|cursor| cursor.get_array("firstBatch")).expect("indexes");
    let is_own = |index: &Bson| index.as_document().is_some_and(|index| index.get_str("name") != Ok("_id_"));
    let indexes: Vec<_> = all.iter().filter(|index| is_own(index)).cloned().collect();
    place.run(doc! { "dropIndexes": "fenced_jobs", "index": "*" }).await;
    for (what, like) in likes {
        store_many(place, like).await;
        println!("{MANY} {what}");
    }
    place.run(doc! { "createIndexes": "fenced_jobs", "indexes": indexes }).await;
}

/// Each with an id of its own.
async fn store_many(place: &Place, like: &Document) {
    let rows: Collection<RawDocumentBuf> = place.raw.collection("fenced_jobs");
    let rows = rows.clone_with_type::<RawDocumentBuf>();
    // The id comes first: its bytes follow the length, the type, the name and the length and subtype of the value.
    let pattern = RawDocumentBuf::try_from(like).expect("a row").into_bytes();
    assert_eq!(&pattern[5..9], b"_id\0");
    for _ in 0..10 {
        let row = |_| {
            let mut bytes = pattern.clone();
            bytes[14..30].copy_from_slice(uuid::Uuid::new_v4().as_bytes());
            RawDocumentBuf::from_bytes(bytes).expect("a row")
        };
        rows.insert_many((0..MANY / 10).map(row)).ordered(false).await.expect("stores");
    }
}

/// A row as the backend stores it, with some fields changed.
async fn row(place: &Place, backend: &MongoBackend, changed: Document) -> Document {
    let pattern = job("1");
    backend.enqueue(std::slice::from_ref(&pattern)).await.expect("stores");
    let mut row = place.row(pattern.id).await;
    let delete = doc! { "q": { "_id": uuid(pattern.id.as_uuid()) }, "limit": 1 };
    place.run(doc! { "delete": "fenced_jobs", "deletes": [delete] }).await;
    row.extend(changed);
    row
}

fn date(millis: i64) -> Bson {
    DateTime::from_millis(millis).into()
}

/// B7, B7b: with many rows of every kind that a call is not about in front of those that it is about, each looks at as many as
/// it is about, and a few more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_looks_at_what_it_is_about() {
    let Some(place) = Place::new().await else { return };
    let (client, sent) = noted(&place.url).await;
    let backend = patient(client, place.raw.name()).await;
    backend.migrate().await.expect("migrates");
    let future = 4_102_444_800_000;
    let mut likes = Vec::new();
    for (what, changed) in [
        ("future jobs of a better priority", doc! { "priority": 0, "available_at": date(future) }),
        (
            "due jobs of a kind that nobody here knows",
            doc! { "priority": 0, "kind": "foreign", "available_at": date(1) },
        ),
        ("due jobs of another queue", doc! { "priority": 0, "queue": "other", "available_at": date(1) }),
        ("ended jobs", doc! { "state": "completed", "finished_at": date(future), "claimed_by": "web-1/1" }),
        (
            "running jobs of other workers, with living leases",
            doc! {
                "state": "running", "claimed_by": "web-2/2", "claimed_at": date(1), "lease_expires_at": date(future),
            },
        ),
    ] {
        likes.push((what, row(&place, &backend, changed).await));
    }
    fill(&place, &likes).await;
    let jobs: Vec<_> = (0..40).map(|number| keyed(&number.to_string())).collect();
    sent.take();
    backend.enqueue(&jobs).await.expect("stores");
    let look = sent.take();
    for (command, index) in look.iter().filter(|command| name_of(command) == "find").zip(["unique", "_id_"]) {
        let plan = Plan::of(&place, command).await;
        plan.assert_index(index);
        assert!(plan.keys <= 3 * 40 && plan.rows <= 40, "{index}: {plan:?}");
    }

    // For each level and each kind a few keys are looked at, to see that nothing there is due.
    let levels = 10 * 2;
    let kinds = [name("welcome"), name("unheard of")];
    let request = |rows| ClaimRequest::new(name("mail"), kinds.clone(), worker(), lease(), limit(rows)).expect("valid");
    let mut claimed = backend.claim(&request(1)).await.expect("claims").jobs;
    claimed.extend(backend.claim(&request(9)).await.expect("claims").jobs);
    assert_eq!(claimed.len(), 10);
    let commands = sent.take();
    let names: Vec<_> = commands.iter().map(name_of).collect();
    assert_eq!(names, ["findAndModify", "find", "update", "find"]);
    for (command, (index, rows)) in commands.iter().zip([("due", 1), ("due", 9), ("_id_", 9), ("_id_", 9)]) {
        let plan = Plan::of(&place, command).await;
        println!("claim, {}: {} keys and {} rows for {rows}", name_of(command), plan.keys, plan.rows);
        plan.assert_index(index);
        assert!(plan.keys <= rows + levels && plan.rows <= rows + 2, "{plan:?}");
    }

    let held: Vec<_> = claimed.iter().map(held).collect();
    backend.extend_leases(&held, lease()).await.expect("beats");
    backend.stale(None, limit(5)).await.expect("lists");
    let cursor = StaleCursor { lease_expires_at: Some(Timestamp::MIN), id: claimed[0].id() };
    backend.stale(Some(cursor), limit(5)).await.expect("lists");
    backend.claimed_by(&worker(), Delay::ZERO, None, limit(5)).await.expect("lists");
    let updates: Vec<_> = claimed.iter().map(|job| decide(job, &complete("1"))).collect();
    backend.update_many_if_current(&updates[1..]).await.expect("settles");
    let UpdateRequest { id, current, patch } = &updates[0];
    backend.update_if_current(*id, current, patch).await.expect("settles");
    backend.purge(JobState::Completed, Delay::ZERO, limit(5)).await.expect("purges");
    backend.get(*id).await.expect("reads");
    backend.list(&ListFilter::default(), Some(claimed[0].id()), limit(5)).await.expect("lists");
    let commands = sent.take();
    let (leases, holders) = (["claimed_leases", "running_leases"], ["claimed_holders", "running_holders"]);
    let expected = [
        ("_id_", 10),
        ("_id_", 10),
        (leases[0], 0),
        (leases[0], 0),
        (leases[1], 0),
        (leases[1], 0),
        (leases[0], 0),
        (leases[1], 0),
        (holders[0], 0),
        (holders[1], 6),
        ("_id_", 9),
        ("_id_", 9),
        ("_id_", 1),
        ("ended", 5),
        ("_id_", 5),
        ("_id_", 1),
        ("_id_", 6),
    ];
    assert_eq!(commands.len(), expected.len(), "{:?}", commands.iter().map(name_of).collect::<Vec<_>>());
    for (command, (index, rows)) in commands.iter().zip(expected) {
        let plan = Plan::of(&place, command).await;
        println!("{} on {index}: {} keys and {} rows for {rows}", name_of(command), plan.keys, plan.rows);
        plan.assert_index(index);
        assert!(plan.keys <= 2 * rows + 3 && plan.rows <= rows + 2, "{command}: {plan:?}");
    }
    place.gone().await;
}

/// The same for steps, waits and events.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_about_steps_looks_at_what_it_is_about() {
    let Some(place) = Place::new().await else { return };
    let (client, sent) = noted(&place.url).await;
    let backend = patient(client, place.raw.name()).await;
    backend.migrate().await.expect("migrates");
    let future = date(4_102_444_800_000);
    // What the job that it is stored with waits for, and what it waited for before.
    let waiting = |event: Option<&str>| {
        let (moment, fence) = (uuid(uuid::Uuid::nil()), 1_i64);
        let step = doc! {
            "name": "w", "fence": fence, "state": "waiting", "event": event, "until": &future, "revision": &moment,
        };
        doc! {
            "state": "suspended", "available_at": &future, "revision": &moment,
            "wait": { "event": event, "revision": &moment }, "steps": [step],
        }
    };
    let with = |changed: Document, event: Option<&str>| {
        let mut row = waiting(event);
        row.extend(changed);
        row
    };
    let mut likes = Vec::new();
    for (what, changed) in [
        ("waits for another event", waiting(Some("another"))),
        ("waits for the time alone", waiting(None)),
        (
            "canceled waits",
            with(doc! { "state": "canceled", "finished_at": date(1), "available_at": date(1) }, Some("e")),
        ),
        ("jobs that wait no more", with(doc! { "state": "waiting" }, Some("e"))),
    ] {
        likes.push((what, row(&place, &backend, changed).await));
    }
    fill(&place, &likes).await;
    for (what, row) in [
        ("events", doc! { "payload": "1", "kept_until": &future }),
        ("places", doc! { "payload": null, "kept_until": &future }),
    ] {
        let events: Collection<Document> = place.raw.collection("fenced_events");
        let like = |number: u32| {
            let mut event = doc! { "_id": format!("{number:06} {what}") };
            event.extend(row.clone());
            event
        };
        for batch in 0..10 {
            let batch = (batch * MANY / 10..(batch + 1) * MANY / 10).map(like);
            events.insert_many(batch).ordered(false).await.expect("stores");
        }
        println!("{MANY} {what} that are kept");
    }
    let jobs = running(&backend, 9).await;
    sent.take();
    let step = name("s");
    begin_step(&backend, &jobs[0].execution, &step).await.expect("begins");
    finish_step(&backend, &jobs[0].execution, &step, &Json::null()).await.expect("ends");
    backend.steps(jobs[0].id()).await.expect("reads");
    let wait = async |job: &Job, event: Option<&str>, until| {
        // Once more in every claim.
        let step = name(&format!("w {}", job.execution.fence));
        let mut suspension = Suspension::new(&job.execution, step, event.map(name), until).expect("legal");
        let answer = suspension.submit(&backend).await.expect("waits");
        assert!(matches!(answer, Suspended::Waits(_)), "{answer:?}");
    };
    for job in &jobs[..3] {
        wait(job, Some("e"), When::At(Timestamp::MAX)).await;
    }
    let event = NewEvent { key: name("e"), payload: Json::null(), keep: Delay::ZERO };
    assert_eq!(backend.emit(&event).await.expect("emits"), Emitted::New { woken: 3 });
    for job in &jobs[3..8] {
        wait(job, None, When::Now).await;
    }
    assert_eq!(backend.time_out_waits(limit(4)).await.expect("sweeps").len(), 4);
    let mut hold = place.hold(jobs[7].id()).await;
    assert_eq!(backend.time_out_waits(limit(4)).await.expect("sweeps"), []);
    hold.abort_transaction().await.expect("aborts");
    wait(&jobs[8], Some("f"), When::At(Timestamp::MAX)).await;
    assert_eq!(backend.purge_events(limit(4)).await.expect("purges"), 1);
    let commands: Vec<_> =
        sent.take().into_iter().filter(|command| !name_of(command).ends_with("Transaction")).collect();
    // The commands are explained on as many rows as they met.
    let again = backend.claim(&request(7)).await.expect("claims").jobs;
    for job in &again[..3] {
        wait(job, Some("e"), When::At(Timestamp::MAX)).await;
    }
    for job in &again[3..] {
        wait(job, None, When::Now).await;
    }
    backend.emit(&NewEvent { key: name("over"), ..event.clone() }).await.expect("emits");
    let waits = [("_id_", 1); 3];
    let singly = [("suspended", 4), ("_id_", 1), ("suspended", 4), ("_id_", 1)];
    let expected = [
        &[("_id_", 1), ("_id_", 1), ("_id_", 1)][..],
        &waits,
        &waits,
        &waits,
        &[("_id_", 1), ("awaited", 3)],
        &[("_id_", 1); 5],
        &[("suspended", 4), ("_id_", 4)],
        &singly,
        &waits,
        &[("kept", 1), ("_id_", 1), ("places", 1), ("_id_", 1)],
    ]
    .concat();
    assert_eq!(commands.len(), expected.len(), "{:?}", commands.iter().map(name_of).collect::<Vec<_>>());
    for (command, (index, rows)) in commands.iter().zip(expected) {
        let plan = Plan::of(&place, command).await;
        println!("{} on {index}: {} keys and {} rows for {rows}", name_of(command), plan.keys, plan.rows);
        plan.assert_index(index);
        assert!(plan.keys <= 2 * rows + 3 && plan.rows <= rows + 2, "{command}: {plan:?}");
        assert!(index == "_id_" || plan.rows + 1 >= rows, "{command}: it has met nothing that it is about: {plan:?}");
    }
    place.gone().await;
}

#[tokio::test]
async fn ten_thousand_jobs_in_one_call() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let jobs: Vec<_> = (0..10_000).map(|number| job(&number.to_string())).collect();
    let outcomes = backend.enqueue(&jobs).await.expect("stores");
    assert!(outcomes.iter().zip(&jobs).all(|(outcome, job)| *outcome == Enqueued::New(job.id)));
    let again = backend.enqueue(&jobs).await.expect("stores");
    assert!(again.iter().zip(&jobs).all(|(outcome, job)| *outcome == Enqueued::Existing(job.id)));
    let claimed = backend.claim(&request(10_000)).await.expect("claims");
    let mut decisions: Vec<_> =
        claimed.jobs.iter().map(|job| Decision::new(&job.execution, &complete("1")).expect("legal")).collect();
    let settled = Transitioner::new(&backend).submit_all(&mut decisions).await;
    assert_eq!(settled.iter().filter(|settled| settled.is_ok()).count(), 10_000);
    assert_eq!(backend.purge(JobState::Completed, Delay::ZERO, limit(10_000)).await.expect("purges"), 10_000);
    place.gone().await;
}
