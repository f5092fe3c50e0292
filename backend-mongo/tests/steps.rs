//! Steps, waits and events as rows of MongoDB.

mod common;

use std::time::Duration;

use backend_mongo::MongoBackend;
use backend_mongo::mongodb::Client;
use backend_mongo::mongodb::Collection;
use backend_mongo::mongodb::bson::Bson;
use backend_mongo::mongodb::bson::DateTime;
use backend_mongo::mongodb::bson::Document;
use backend_mongo::mongodb::bson::doc;
use common::server::Server;
use common::*;
use queue_core::Certainty::NotApplied;
use queue_core::*;
use tokio::task::JoinSet;

fn json(text: &str) -> Json {
    Json::from_text(text).expect("JSON")
}

/// A JSON text of this size.
fn large(bytes: usize) -> Json {
    json(&format!("\"{}\"", "x".repeat(bytes - 2)))
}

fn event(key: &str, payload: &Json) -> NewEvent {
    NewEvent { key: name(key), payload: payload.clone(), keep: Delay::from_millis(60_000).expect("a delay") }
}

async fn finish(backend: &MongoBackend, job: &Job, step: &str, value: &Json) -> Result<(), StepError> {
    finish_step(backend, &job.execution, &name(step), value).await
}

/// Has a running job wait under the name `wait`.
async fn wait(backend: &MongoBackend, job: &Job, event: Option<&str>, until: When) -> Result<Suspended, StepError> {
    let suspension = Suspension::new(&job.execution, name("wait"), event.map(name), until);
    suspension.expect("legal").submit(backend).await
}

async fn waits(backend: &MongoBackend, job: &Job, event: Option<&str>, until: When) {
    let answer = wait(backend, job, event, until).await;
    assert!(matches!(answer, Ok(Suspended::Waits(Settled::Applied(_)))), "{answer:?}");
}

const FOR_EVER: When = When::At(Timestamp::MAX);

/// The error of a store, within the error of a step.
#[track_caller]
fn assert_refused<T: std::fmt::Debug>(answer: Result<T, StepError>, kind: ErrorKind) {
    let Err(StepError::Transition(TransitionError::Backend(error))) = answer else { panic!("{kind:?}: {answer:?}") };
    assert_eq!((error.kind(), error.certainty()), (kind, NotApplied), "{error}");
}

/// The steps of a job, each with its state.
async fn steps(backend: &MongoBackend, job: &Job) -> Vec<(String, StepState)> {
    let steps = backend.steps(job.id()).await.expect("reads");
    steps.into_iter().map(|step| (step.name.into(), step.state)).collect()
}

async fn state(backend: &MongoBackend, job: &Job) -> JobState {
    backend.get(job.id()).await.expect("reads").expect("a job").state()
}

/// How often each call goes to the server, and that nobody is sent steps who did not ask for them.
#[tokio::test]
async fn round_trips() {
    let Some(place) = Place::new().await else { return };
    let (client, sent) = noted(&place.url).await;
    let backend = patient(client, place.raw.name()).await;
    backend.migrate().await.expect("migrates");
    let jobs = running(&backend, 4).await;
    sent.take();
    let mut all = Vec::new();
    let mut names = || {
        let commands = sent.take();
        let names: Vec<_> = commands.iter().map(name_of).collect();
        all.extend(commands);
        names
    };
    begin_step(&backend, &jobs[0].execution, &name("s")).await.expect("begins");
    assert_eq!(names(), ["findAndModify"], "a begin");
    finish(&backend, &jobs[0], "s", &json("1")).await.expect("ends");
    assert_eq!(names(), ["findAndModify"], "an end");
    waits(&backend, &jobs[0], None, When::Now).await;
    assert_eq!(names(), ["findAndModify"], "a wait for the time alone");
    waits(&backend, &jobs[1], Some("e"), FOR_EVER).await;
    assert_eq!(names(), ["find", "findAndModify", "findAndModify", "commitTransaction"], "a wait for an event");
    backend.emit(&event("e", &json("1"))).await.expect("emits");
    assert_eq!(names(), ["findAndModify", "update", "commitTransaction"], "an event");
    assert_eq!(wait(&backend, &jobs[2], Some("e"), FOR_EVER).await.expect("waits"), Suspended::Came(json("1")));
    assert_eq!(names(), ["find", "findAndModify"], "a wait for an event that is kept");
    assert_eq!(backend.time_out_waits(limit(5)).await.expect("sweeps"), [jobs[0].id()]);
    assert_eq!(names(), ["find", "update", "commitTransaction"], "a sweep");
    assert_eq!(backend.time_out_waits(limit(5)).await.expect("sweeps"), []);
    assert_eq!(names(), ["find"], "a sweep that finds nothing");
    let mut hand_over = HandOver::new(&jobs[3].execution, None, keyed("k")).expect("legal");
    hand_over.submit(&backend).await.expect("hands over");
    let expected = ["find", "findAndModify", "find", "aggregate", "find", "insert", "commitTransaction"];
    assert_eq!(names(), expected, "a hand-over, in which the key, the clock and the id are looked up");
    backend.purge_events(limit(5)).await.expect("purges");
    assert_eq!(names(), ["find", "find"], "a purge that finds nothing");

    backend.get(jobs[0].id()).await.expect("reads");
    backend.list(&ListFilter::default(), None, limit(10)).await.expect("lists");
    claim_one(&backend).await;
    backend.claim(&request(5)).await.expect("claims");
    backend.steps(jobs[0].id()).await.expect("reads");
    let mut asked = 0;
    drop(names());
    for command in all {
        let of_jobs = command.values().next() == Some(&Bson::from("fenced_jobs"));
        let field = if name_of(&command) == "find" { "projection" } else { "fields" };
        if of_jobs && ["find", "findAndModify"].contains(&&*name_of(&command)) {
            let fields = command.get_document(field).expect("not all fields");
            let excludes = *fields == doc! { "steps": 0 };
            asked += usize::from(fields.contains_key("steps") && !excludes);
            assert!(excludes || fields.values().all(|value| *value != Bson::Int32(0)), "{command}");
        }
    }
    assert_eq!(asked, 6, "those who wrote one are sent it, and who read them all");
    place.gone().await;
}

const MIB: usize = 1024 * 1024;

/// A job that has used up this much by steps.
async fn with_steps(backend: &MongoBackend, mibs: usize, small: usize) -> Job {
    let job = running(backend, 1).await.remove(0);
    for number in 0..mibs {
        finish(backend, &job, &format!("large {number}"), &large(MIB)).await.expect("has room");
    }
    for number in 0..small {
        finish(backend, &job, &format!("small {number}"), &large(100_000)).await.expect("has room");
    }
    job
}

/// Whatever can happen to a job: as many failures as are kept, of the largest size, and the largest result.
async fn goes_on(backend: &MongoBackend, mut job: Job) {
    for _ in 0..Failure::KEPT + 2 {
        let error = "é".repeat(FailureText::MAX_BYTES).as_str().into();
        let retry = Transition::Retry { error, available: When::Now };
        Transitioner::new(backend).apply(&job.execution, &retry).await.expect("is recorded");
        job = claim_one(backend).await;
    }
    let complete = Transition::Complete { result: Some(large(MIB)) };
    Transitioner::new(backend).apply(&job.execution, &complete).await.expect("is recorded");
}

/// A row has 16 MB. Steps leave so much of them that whatever then happens to the job can be written.
#[tokio::test]
async fn a_job_that_has_no_room_for_another_step() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let job = with_steps(&backend, 13, 19).await;
    finish(&backend, &job, "last", &large(100_000)).await.expect("is the last that fits");
    let before = (backend.get(job.id()).await.expect("reads"), backend.steps(job.id()).await.expect("reads"));
    assert_eq!(before.1.len(), 33);
    assert_refused(finish(&backend, &job, "one more", &large(100_000)).await, ErrorKind::TooLarge);
    assert_refused(wait(&backend, &job, Some("e"), FOR_EVER).await, ErrorKind::TooLarge);
    let after = (backend.get(job.id()).await.expect("reads"), backend.steps(job.id()).await.expect("reads"));
    assert_eq!(after, before, "nothing was written");
    // What is there is told all the same.
    let value = begin_step(&backend, &job.execution, &name("large 7")).await.expect("is known");
    assert_eq!(value, Some(large(MIB)));
    let lost = Job { execution: Execution { revision: Revision::random(), ..job.execution.clone() }, ..job.clone() };
    let conflict = finish(&backend, &lost, "one more", &large(100_000)).await;
    assert!(matches!(conflict, Err(StepError::Transition(TransitionError::Conflict(_)))), "{conflict:?}");
    goes_on(&backend, job).await;
    place.gone().await;
}

/// And so much for a job that waits that its event can be emitted: else one such job would keep it from all.
#[tokio::test]
async fn a_job_that_has_just_room_for_an_event() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let job = with_steps(&backend, 13, 9).await;
    finish(&backend, &job, "small too", &large(50_000)).await.expect("has room");
    waits(&backend, &job, Some("e"), FOR_EVER).await;
    let other = with_steps(&backend, 13, 10).await;
    assert_refused(wait(&backend, &other, Some("e"), FOR_EVER).await, ErrorKind::TooLarge);
    waits(&backend, &other, None, FOR_EVER).await;
    assert_eq!(backend.emit(&event("e", &large(MIB))).await.expect("emits"), Emitted::New { woken: 1 });
    goes_on(&backend, claim_one(&backend).await).await;
    place.gone().await;
}

/// In filters a text is a value, and in expressions a literal.
#[tokio::test]
async fn names_that_mean_something_to_mongodb() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    for text in
        ["$queue", "$$NOW", "$$ROOT", "$$step", "$$there", "$", "a.b", ".", "{\"$gt\":\"\"}", "begun", "waiting"]
    {
        let job = running(&backend, 1).await.remove(0);
        let suspension = Suspension::new(&job.execution, name(text), Some(name(text)), FOR_EVER);
        let waiting = suspension.expect("legal").submit(&backend).await;
        assert!(matches!(waiting, Ok(Suspended::Waits(_))), "{text:?}: {waiting:?}");
        let wait = Wait {
            event: Some(name(text)),
            until: Timestamp::MAX,
            revision: backend.get(job.id()).await.expect("reads").expect("a job").execution.revision,
        };
        assert_eq!(steps(&backend, &job).await, [(text.to_owned(), StepState::Waiting(wait))]);
        let value = Json::encode(text).expect("JSON");
        assert_eq!(backend.emit(&event(text, &value)).await.expect("emits"), Emitted::New { woken: 1 }, "{text:?}");
        assert_eq!(backend.emit(&event(text, &json("1"))).await.expect("emits"), Emitted::Kept(value.clone()));
        let job = claim_one(&backend).await;
        let value = StepState::Done(value);
        assert_eq!(steps(&backend, &job).await, [(text.to_owned(), value)], "{text:?}");
        Transitioner::new(&backend).apply(&job.execution, &complete("1")).await.expect("settles");
    }
    place.gone().await;
}

/// A wait ends with its suspension: the same event wakes no later one, also one that came about without a wait.
#[tokio::test]
async fn a_job_that_somebody_else_suspends() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let job = running(&backend, 1).await.remove(0);
    waits(&backend, &job, Some("e"), FOR_EVER).await;
    let waiting = backend.get(job.id()).await.expect("reads").expect("a job");
    Transitioner::new(&backend).apply(&waiting.execution, &Transition::Wake).await.expect("wakes");
    let before = steps(&backend, &job).await;
    let job = claim_one(&backend).await;
    let suspend = Transition::Suspend { until: When::Now };
    Transitioner::new(&backend).apply(&job.execution, &suspend).await.expect("suspends");
    assert_eq!(backend.emit(&event("e", &json("1"))).await.expect("emits"), Emitted::New { woken: 0 });
    assert_eq!(state(&backend, &job).await, JobState::Suspended);
    assert_eq!(backend.time_out_waits(limit(5)).await.expect("sweeps"), [job.id()], "its time is over");
    assert_eq!(steps(&backend, &job).await, before, "the wait was over before");
    place.gone().await;
}

/// Steps that somebody has broken are not read as none, and not written over; and keep neither their job nor another from going on.
#[tokio::test]
async fn steps_that_cannot_be_read() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let broken = [
        Bson::from("no list"),
        vec![Bson::from(1)].into(),
        vec![doc! { "name": "s", "fence": 1_i64, "state": "of a newer version" }].into(),
        vec![doc! { "name": "s", "fence": 1_i64 }].into(),
        vec![doc! { "name": "s", "fence": "1", "state": "done", "value": "1" }].into(),
        vec![doc! { "name": "s", "fence": 1_i64, "state": "done", "value": 1 }].into(),
    ];
    let mut jobs = running(&backend, broken.len()).await;
    for (job, broken) in jobs.iter().zip(&broken) {
        place.set(job.id(), doc! { "steps": broken }).await;
        let error = assert_error(backend.steps(job.id()).await, ErrorKind::Schema, NotApplied);
        assert!(error.to_string().contains(&job.id().to_string()), "{error}");
        if *broken != vec![Bson::from(1)].into() {
            assert_refused(begin_step(&backend, &job.execution, &name("s")).await, ErrorKind::Schema);
            assert_refused(finish(&backend, job, "s", &json("1")).await, ErrorKind::Schema);
            let suspension = Suspension::new(&job.execution, name("s"), Some(name("e")), FOR_EVER).expect("legal");
            assert_refused(suspension.clone().submit(&backend).await, ErrorKind::Schema);
        }
        assert_eq!(place.row(job.id()).await.get("steps"), Some(broken), "nothing was written");
        let job = backend.get(job.id()).await.expect("can be read").expect("a job");
        assert_eq!(job.state(), JobState::Running);
    }
    for job in &jobs {
        place.set(job.id(), doc! { "steps": [] }).await;
        waits(&backend, job, Some("e"), When::Now).await;
    }
    for (job, broken) in jobs.iter().zip(&broken) {
        place.set(job.id(), doc! { "steps": broken }).await;
    }
    let first = jobs.remove(0);
    assert_eq!(backend.time_out_waits(limit(1)).await.expect("sweeps"), [first.id()]);
    let woken = jobs.len() as u64;
    assert_eq!(backend.emit(&event("e", &json("1"))).await.expect("emits"), Emitted::New { woken });
    for job in [first].iter().chain(&jobs) {
        assert_eq!(state(&backend, job).await, JobState::Waiting);
    }
    for (job, broken) in jobs.iter().zip(&broken[1..]) {
        assert_eq!(place.row(job.id()).await.get("steps"), Some(broken), "nothing was written over");
    }
    place.gone().await;
}

/// An event that somebody has broken is no event that did not come.
#[tokio::test]
async fn an_event_that_cannot_be_read() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let job = running(&backend, 1).await.remove(0);
    let later = DateTime::from_millis(4_102_444_800_000);
    let broken = doc! { "_id": "e", "payload": 1, "kept_until": later };
    place.run(doc! { "insert": "fenced_events", "documents": [broken.clone()] }).await;
    assert_refused(wait(&backend, &job, Some("e"), FOR_EVER).await, ErrorKind::Schema);
    assert_error(backend.emit(&event("e", &json("1"))).await, ErrorKind::Schema, NotApplied);
    assert_eq!(backend.get(job.id()).await.expect("reads").expect("a job"), job);
    let events: Collection<Document> = place.raw.collection("fenced_events");
    assert_eq!(events.find_one(doc! {}).await.expect("reads"), Some(broken));
    place.gone().await;
}

/// What a wait locks before its event comes is no event: it is not found, not counted, and goes with the next purge, also if there are
/// many; and the wait is none the worse for it.
#[tokio::test]
async fn what_was_only_locked_is_purged() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let events: Collection<Document> = place.raw.collection("fenced_events");
    let jobs = running(&backend, 3).await;
    for (number, job) in jobs.iter().enumerate() {
        waits(&backend, job, Some(&number.to_string()), FOR_EVER).await;
    }
    backend.emit(&NewEvent { keep: Delay::ZERO, ..event("over", &json("1")) }).await.expect("emits");
    backend.emit(&event("kept", &json("1"))).await.expect("emits");
    let places =
        |number| doc! { "_id": format!("place {number}"), "payload": null, "kept_until": DateTime::from_millis(0) };
    events.insert_many((0..2_500).map(places)).await.expect("stores");
    assert_eq!(events.count_documents(doc! {}).await.expect("counts"), 2_505);
    assert_eq!(backend.purge_events(limit(1)).await.expect("purges"), 1);
    let left = events.find_one(doc! {}).await.expect("reads").expect("one");
    assert_eq!((left.get_str("_id"), events.count_documents(doc! {}).await.expect("counts")), (Ok("kept"), 1));
    for number in 0..3 {
        let emitted = backend.emit(&event(&number.to_string(), &json("1"))).await.expect("emits");
        assert_eq!(emitted, Emitted::New { woken: 1 });
    }
    place.gone().await;
}

/// B4 for waits: also if the one that is locked, or that cannot be written, comes first, and only one is asked for.
#[tokio::test]
async fn a_sweep_passes_what_it_cannot_have() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let jobs = running(&backend, 6).await;
    for job in &jobs {
        waits(&backend, job, None, When::Now).await;
    }
    let ids: Vec<_> = backend.list(&ListFilter::default(), None, limit(10)).await.expect("lists").items;
    let mut ids: Vec<_> = ids.iter().map(|job| (job.available_at, job.id())).collect();
    ids.sort();
    let ids: Vec<_> = ids.into_iter().map(|(_, id)| id).collect();
    let rule = doc! { "poisoned": { "$exists": false } };
    place.run(doc! { "collMod": "fenced_jobs", "validator": rule }).await;
    let poison = doc! { "q": { "_id": uuid(ids[1].as_uuid()) }, "u": { "$set": { "poisoned": true } } };
    place.run(doc! { "update": "fenced_jobs", "updates": [poison], "bypassDocumentValidation": true }).await;
    let mut hold = place.hold(ids[0]).await;
    assert_eq!(backend.time_out_waits(limit(1)).await.expect("sweeps"), [ids[2]]);
    assert_eq!(backend.time_out_waits(limit(2)).await.expect("sweeps"), [ids[3], ids[4]]);
    assert_eq!(backend.time_out_waits(limit(9)).await.expect("sweeps"), [ids[5]]);
    hold.abort_transaction().await.expect("aborts");
    assert_eq!(backend.time_out_waits(limit(9)).await.expect("sweeps"), [ids[0]]);
    // None is left that can be written: that is not the same as none.
    assert_error(backend.time_out_waits(limit(9)).await, ErrorKind::Permanent, NotApplied);
    place.gone().await;
}

/// More than fit into one transaction, each once.
#[tokio::test]
async fn thousands_of_waits() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let jobs = running(&backend, 2_500).await;
    let suspend: Vec<_> = jobs.iter().map(|job| decide(job, &Transition::Suspend { until: When::Now })).collect();
    backend.update_many_if_current(&suspend).await.expect("suspends");
    let mut ended = backend.time_out_waits(limit(2_200)).await.expect("sweeps");
    assert_eq!(ended.len(), 2_200);
    ended.extend(backend.time_out_waits(limit(10_000)).await.expect("sweeps"));
    ended.sort();
    let mut all: Vec<_> = jobs.iter().map(Job::id).collect();
    all.sort();
    assert_eq!(ended, all);
    assert_eq!(backend.claim(&request(10_000)).await.expect("claims").jobs.len(), 2_500, "all go on");
    place.gone().await;
}

/// Every command says for itself what it reads and how safely it writes, in transactions and outside.
#[tokio::test]
async fn settings_of_the_url_do_not_matter() {
    let Some(place) = Place::new().await else { return };
    for settings in [
        "w=1&journal=false&readPreference=secondaryPreferred&readConcernLevel=available&retryWrites=false",
        "w=0&readPreference=nearest&readConcernLevel=linearizable&retryWrites=true&retryReads=true",
    ] {
        let (client, sent) = noted(&with(&place.url, settings)).await;
        let backend = MongoBackend::from_client(client, place.raw.name()).await.expect("a handle");
        backend.migrate().await.expect("migrates");
        let jobs = running(&backend, 3).await;
        sent.take();
        finish(&backend, &jobs[0], "s", &json("1")).await.expect("ends");
        waits(&backend, &jobs[0], Some(settings), FOR_EVER).await;
        assert_eq!(backend.emit(&event(settings, &json("1"))).await.expect("emits"), Emitted::New { woken: 1 });
        assert_eq!(backend.emit(&event(settings, &json("1"))).await.expect("emits"), Emitted::Kept(json("1")));
        waits(&backend, &jobs[1], None, When::Now).await;
        assert_eq!(backend.time_out_waits(limit(5)).await.expect("sweeps"), [jobs[1].id()]);
        let mut hand_over = HandOver::new(&jobs[2].execution, None, job("1")).expect("legal");
        hand_over.submit(&backend).await.expect("hands over");
        let over = NewEvent { keep: Delay::ZERO, ..event("over", &json("1")) };
        backend.emit(&over).await.expect("emits");
        assert_eq!(backend.purge_events(limit(5)).await.expect("purges"), 1);
        backend.steps(jobs[0].id()).await.expect("reads");
        let mut transactions = (0, 0);
        for command in sent.take() {
            let name = name_of(&command);
            let read = command.get_document("readConcern").and_then(|concern| concern.get_str("level"));
            let write = command.get_document("writeConcern");
            if command.contains_key("txnNumber") {
                let begins = command.get_bool("startTransaction") == Ok(true);
                assert_eq!(read.is_ok(), begins, "{command}");
                assert!(!begins || read == Ok("snapshot"), "{command}");
                assert_eq!(write.is_ok(), name == "commitTransaction", "{command}");
                assert!(write.is_err() || write == Ok(&doc! { "w": "majority" }), "{command}");
                transactions = (transactions.0 + u32::from(begins), transactions.1 + u32::from(write.is_ok()));
            } else if name == "find" {
                assert_eq!(read, Ok("local"), "{command}");
            } else {
                assert_eq!(write, Ok(&doc! { "w": "majority", "j": true }), "{command}");
            }
            let preference = command.get_document("$readPreference").ok().and_then(|mode| mode.get("mode"));
            assert!(preference.is_none_or(|mode| *mode == Bson::from("primary")), "{command}");
        }
        assert_eq!(transactions, (6, 6), "a wait, three events, a sweep and a hand-over");
        let canceled = backend.claim(&request(5)).await.expect("claims").jobs;
        assert_eq!(canceled.len(), 3, "all that was done lasts");
    }
    place.gone().await;
}

/// By the handle that makes jobs due, and through the change stream by others.
#[tokio::test]
async fn workers_are_woken_by_what_goes_on() {
    let Some(place) = Place::new().await else { return };
    let watching = place.migrated().await;
    let quiet = MongoBackend::connect_with(place.options().change_streams(false)).await.expect("connects");
    let queues = [name("mail")];
    let jobs = running(&quiet, 3).await;
    watching.wait_for_work(&queues).await.expect("is woken when the stream begins");
    for step in ["event", "sweep", "hand-over"] {
        match step {
            "event" => waits(&quiet, &jobs[0], Some("e"), FOR_EVER).await,
            "sweep" => waits(&quiet, &jobs[1], None, When::Now).await,
            _ => {}
        }
        let mut own = quiet.wait_for_work(&queues);
        assert!(poll_once(&mut own).await.is_none(), "that a job waits wakes nobody");
        let mut wait = watching.wait_for_work(&queues);
        while poll_once(&mut wait).await.is_some() {
            wait = watching.wait_for_work(&queues);
        }
        match step {
            "event" => drop(quiet.emit(&event("e", &json("1"))).await.expect("emits")),
            "sweep" => drop(quiet.time_out_waits(limit(5)).await.expect("sweeps")),
            _ => {
                let mut hand_over = HandOver::new(&jobs[2].execution, None, job("1")).expect("legal");
                hand_over.submit(&quiet).await.expect("hands over");
            }
        }
        assert!(poll_once(&mut own).await.is_some(), "{step} wakes the workers of its handle");
        let woken = tokio::time::timeout(Duration::from_secs(20), wait).await;
        woken.unwrap_or_else(|_| panic!("{step} woke nobody else")).expect("wakes");
    }
    place.gone().await;
}

/// They take turns at the event's row, in one process and in several, and nobody is refused for it; the event finds all of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_begin_to_wait_for_one_event_at_once() {
    let Some(place) = Place::new().await else { return };
    place.migrated().await;
    let mut backends = Vec::new();
    for _ in 0..4 {
        backends.push(patient(Client::with_uri_str(&place.url).await.expect("a client"), place.raw.name()).await);
    }
    let mut waiting = JoinSet::new();
    for (number, job) in running(&backends[0], 60).await.into_iter().enumerate() {
        let backend = backends[number % 4].clone();
        waiting.spawn(async move { wait(&backend, &job, Some("e"), FOR_EVER).await });
    }
    let (mut came, mut waited, mut emitted) = (0, 0, None);
    while let Some(answer) = waiting.join_next().await {
        match answer.expect("no panic").expect("is an outcome") {
            Suspended::Came(_) => came += 1,
            Suspended::Waits(_) => waited += 1,
            Suspended::TimedOut => panic!("there is time"),
        }
        if waited == 30 && emitted.is_none() {
            emitted = Some(backends[0].emit(&event("e", &json("1"))).await.expect("emits"));
        }
    }
    assert_eq!(emitted, Some(Emitted::New { woken: waited }));
    assert_eq!(came + waited, 60);
    println!("{came} found the event, {waited} were found by it");
    place.gone().await;
}

/// A transaction that meets somebody else's is repeated, and one whose commit gets no answer says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_that_fail() {
    let Some(server) = Server::failing().await else { return };
    let place = Place::on(server.url()).await;
    let (client, sent) = noted(&with(&server.url(), "appName=tested")).await;
    let backend = patient(client, place.raw.name()).await;
    backend.migrate().await.expect("migrates");
    let met = doc! { "errorCode": 112, "errorLabels": ["TransientTransactionError"] };
    let jobs = running(&backend, 4).await;
    for command in ["findAndModify", "commitTransaction"] {
        let key = format!("met at the {command}");
        for (failed, job) in [("wait", Some(&jobs[usize::from(command == "commitTransaction")])), ("emit", None)] {
            sent.take();
            server.fail(doc! { "times": 3 }, command, met.clone()).await;
            match job {
                Some(job) => waits(&backend, job, Some(&key), FOR_EVER).await,
                None => {
                    let emitted = backend.emit(&event(&key, &json("1"))).await.expect("emits");
                    assert_eq!(emitted, Emitted::New { woken: 1 }, "{key}");
                }
            }
            assert!(sent.names().iter().filter(|name| *name == command).count() > 3, "{failed}, {key}");
        }
    }
    let mut hand_over = HandOver::new(&jobs[2].execution, None, keyed("k")).expect("legal");
    server.fail(doc! { "times": 2 }, "insert", met).await;
    let settled = hand_over.submit(&backend).await.expect("hands over");
    assert!(matches!(settled, Settled::Applied(_)), "{settled:?}");

    // The driver sends a commit once more by itself.
    let lost = doc! { "writeConcernError": { "code": 91, "errmsg": "shutting down" } };
    server.fail("alwaysOn", "commitTransaction", lost).await;
    let answer = backend.emit(&event("e", &json("1"))).await;
    let error = answer.expect_err("nobody knows whether it lasts");
    assert_eq!(error.certainty(), Certainty::Unknown, "{error}");
    server.works().await;
    assert_eq!(backend.emit(&event("e", &json("2"))).await.expect("emits"), Emitted::Kept(json("1")), "it was made");
}
