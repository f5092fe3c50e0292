//! Which servers, databases and settings will do.

mod common;

use std::collections::BTreeSet;
use std::time::Duration;

use backend_mongo::MongoBackend;
use backend_mongo::MongoOptions;
use backend_mongo::mongodb::Client;
use backend_mongo::mongodb::bson::Bson;
use backend_mongo::mongodb::bson::doc;
use common::server::Server;
use common::*;
use queue_core::Certainty::NotApplied;
use queue_core::*;

#[test]
fn what_is_no_url_is_refused_and_not_repeated() {
    for url in ["jobs", "postgres://root:secret@host/db", "sqlite:secret.db", "", "mongodb:/secret", "MONGODB://secret"]
    {
        let error = assert_error(MongoOptions::from_url(url), ErrorKind::Invalid, NotApplied);
        assert!(!error.to_string().contains("secret"), "{error}");
    }
    let options = MongoOptions::from_url("mongodb://root:secret@host/db").expect("a URL");
    assert!(!format!("{options:?}").contains("secret"), "{options:?}");
}

#[cfg(not(feature = "dns"))]
#[test]
fn what_needs_the_feature_says_so() {
    let error = assert_error(MongoOptions::from_url("mongodb+srv://host/db"), ErrorKind::Unsupported, NotApplied);
    assert!(error.to_string().contains("dns"), "{error}");
}

#[tokio::test]
async fn an_error_never_repeats_the_url() {
    for url in [
        "mongodb://root:se/cret@127.0.0.1/db",
        "mongodb://root:secret@127.0.0.1:1/db?serverSelectionTimeoutMS=50",
        "mongodb://127.0.0.1/db?secret=1&w=secret",
        "mongodb://127.0.0.1/db?w=-secret",
        "mongodb://secret:70000/db",
    ] {
        let error = MongoBackend::connect(url).await.expect_err("refused");
        for text in [error.to_string(), format!("{error:?}")] {
            assert!(!text.contains("secret") && !text.contains("cret@"), "{url}: {text}");
        }
        assert_eq!(error.certainty(), NotApplied);
    }
}

/// The same URL naming this database, or none.
fn naming(url: &str, database: &str) -> String {
    let (scheme, rest) = url.split_once("://").expect("a URL");
    let (address, parameters) = rest.split_once('?').unwrap_or((rest, ""));
    let hosts = address.split('/').next().expect("hosts");
    format!("{scheme}://{hosts}/{database}?{parameters}")
}

#[tokio::test]
async fn a_database_must_be_named_by_somebody() {
    let Some(place) = Place::new().await else { return };
    let error = assert_error(MongoBackend::connect(&naming(&place.url, "")).await, ErrorKind::Invalid, NotApplied);
    assert!(error.to_string().contains("database"), "{error}");
    for name in ["", "a.b", "a b", "a$", "a/b", "a\0", &"a".repeat(64)] {
        let options = MongoOptions::from_url(&*place.url).expect("a URL");
        assert_error(options.database(name), ErrorKind::Invalid, NotApplied);
        let client = place.raw.client().clone();
        assert_error(MongoBackend::from_client(client, name).await, ErrorKind::Invalid, NotApplied);
    }
    // Named by the URL.
    let url = naming(&place.url, place.raw.name());
    let backend = MongoBackend::connect(&url).await.expect("connects");
    backend.migrate().await.expect("migrates");
    let names = place.raw.list_collection_names().await.expect("lists");
    assert!(names.contains(&"fenced_jobs".to_owned()), "{names:?}");
    place.gone().await;
}

#[tokio::test]
async fn a_server_that_is_not_there() {
    let options = MongoOptions::from_url("mongodb://127.0.0.1:1/db?serverSelectionTimeoutMS=50").expect("a URL");
    assert_error(MongoBackend::connect_with(options).await, ErrorKind::Unavailable, NotApplied);
    let nowhere = MongoOptions::default();
    assert_error(MongoBackend::connect_with(nowhere).await, ErrorKind::Invalid, NotApplied);
}

#[tokio::test]
async fn a_standalone_server_is_refused_with_the_reason() {
    let Some(server) = Server::standalone().await else { return };
    let options = MongoOptions::from_url(server.url()).expect("a URL").database("jobs").expect("a name");
    let error = assert_error(MongoBackend::connect_with(options).await, ErrorKind::Unsupported, NotApplied);
    assert!(error.to_string().contains("replica set"), "{error}");
    let client = Client::with_uri_str(server.url()).await.expect("a client");
    let names = client.list_database_names().await.expect("lists");
    assert!(!names.contains(&"jobs".to_owned()), "nothing was written: {names:?}");
}

/// The role that the documentation names, for everything that a backend does.
#[tokio::test]
async fn who_may_read_and_write_may_do_everything() {
    let Some(server) = Server::guarded().await else { return };
    let url = |user: &str| server.url().replacen("://", &format!("://{user}@"), 1);
    let root = Client::with_uri_str(url("root:secret")).await.expect("a client");
    let role = doc! { "role": "readWrite", "db": "jobs" };
    let user = doc! { "createUser": "queue", "pwd": "hidden", "roles": [role] };
    root.database("admin").run_command(user).await.expect("is made");

    let connect = async |user: &str| {
        let options = MongoOptions::from_url(url(user)).expect("a URL").database("jobs").expect("a name");
        MongoBackend::connect_with(options).await
    };
    let error = assert_error(connect("queue:hiddem").await, ErrorKind::Permanent, NotApplied);
    assert!(!error.to_string().contains("hiddem"), "{error}");
    let backend = connect("queue:hidden").await.expect("connects");
    backend.migrate().await.expect("migrates");
    let queues = [name("mail")];
    backend.wait_for_work(&queues).await.expect("is woken when the stream begins");
    let claimed = running(&backend, 3).await;
    let held: Vec<_> = claimed.iter().map(held).collect();
    assert_eq!(backend.extend_leases(&held, lease()).await.expect("beats"), [Beat::Extended; 3]);
    let updates: Vec<_> = claimed.iter().map(|job| decide(job, &complete("1"))).collect();
    backend.update_many_if_current(&updates[1..]).await.expect("settles");
    assert_eq!(backend.counts().await.expect("counts").len(), 2);
    assert_eq!(backend.purge(JobState::Completed, Delay::ZERO, limit(10)).await.expect("purges"), 2);
    begin_step(&backend, &claimed[0].execution, &name("s")).await.expect("begins");
    let wait = Suspension::new(&claimed[0].execution, name("w"), Some(name("e")), When::Now).expect("legal");
    wait.clone().submit(&backend).await.expect("waits");
    let event = NewEvent { key: name("e"), payload: Json::null(), keep: Delay::ZERO };
    assert_eq!(backend.emit(&event).await.expect("emits"), Emitted::New { woken: 1 });
    assert_eq!(backend.purge_events(limit(10)).await.expect("purges"), 1);
    let elsewhere = MongoOptions::from_url(url("queue:hidden")).expect("a URL").database("other").expect("a name");
    assert_error(MongoBackend::connect_with(elsewhere).await, ErrorKind::Permanent, NotApplied);
}

/// Every command says for itself that it waits for a majority, and goes to the primary; none is retried by the driver.
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
        let jobs = [keyed("k"), job("1"), job("2"), job("3")];
        backend.enqueue(&jobs).await.expect("stores");
        backend.enqueue(&jobs).await.expect("knows them");
        let mut claimed = backend.claim(&request(2)).await.expect("claims").jobs;
        claimed.push(claim_one(&backend).await);
        let held: Vec<_> = claimed.iter().map(held).collect();
        backend.extend_leases(&held, lease()).await.expect("beats");
        let updates: Vec<_> = claimed.iter().map(|job| decide(job, &complete("1"))).collect();
        backend.update_many_if_current(&updates[..2]).await.expect("settles");
        let UpdateRequest { id, current, patch } = &updates[2];
        backend.update_if_current(*id, current, patch).await.expect("settles");
        backend.stale(None, limit(1)).await.expect("lists");
        backend.claimed_by(&worker(), Delay::ZERO, None, limit(1)).await.expect("lists");
        backend.list(&ListFilter::default(), None, limit(1)).await.expect("lists");
        backend.counts().await.expect("counts");
        backend.get(*id).await.expect("reads");
        backend.purge(JobState::Completed, Delay::ZERO, limit(10)).await.expect("purges");

        let mut seen = BTreeSet::new();
        for command in sent.take() {
            let name = name_of(&command);
            match name.as_str() {
                "find" | "aggregate" | "listCollections" => {
                    let level = command.get_document("readConcern").and_then(|concern| concern.get_str("level"));
                    assert_eq!(level, Ok("local"), "{command}");
                }
                _ => {
                    let concern = command.get_document("writeConcern").expect("a write concern");
                    assert_eq!(*concern, doc! { "w": "majority", "j": true }, "{command}");
                }
            }
            let preference = command.get_document("$readPreference").ok().and_then(|mode| mode.get("mode"));
            assert!(preference.is_none_or(|mode| *mode == Bson::from("primary")), "{command}");
            assert!(!command.contains_key("txnNumber"), "the driver would send it again by itself: {command}");
            seen.insert(name);
        }
        let all = ["aggregate", "createIndexes", "delete", "find", "findAndModify", "insert", "update"];
        for name in all {
            assert!(seen.contains(name) || name == "createIndexes", "{name} is not among {seen:?}");
        }
    }
    place.gone().await;
}

/// How often a call goes to the server, whatever the batch. (A claim of one is one command, a claim of many finds, claims and
/// reads; a settle of one is one, of many it writes and reads.)
#[tokio::test]
async fn round_trips() {
    let Some(place) = Place::new().await else { return };
    let (client, sent) = noted(&place.url).await;
    let backend = patient(client, place.raw.name()).await;
    backend.migrate().await.expect("migrates");
    for rows in [1, 10, 100, 500] {
        let jobs: Vec<_> = (0..rows).map(|_| job("1")).collect();
        sent.take();
        backend.enqueue(&jobs).await.expect("stores");
        let mut names = sent.names();
        names[..2].sort();
        assert_eq!(names, ["aggregate", "find", "insert"], "two round trips, the first of them twofold");
        let claimed = backend.claim(&request(rows)).await.expect("claims").jobs;
        let expected: &[&str] = if rows == 1 { &["findAndModify"] } else { &["find", "update", "find"] };
        assert_eq!(sent.names(), expected, "a claim of {rows}");
        let held: Vec<_> = claimed.iter().map(held).collect();
        backend.extend_leases(&held, lease()).await.expect("beats");
        assert_eq!(sent.names(), ["update", "find"], "a beat of {rows}");
        let updates: Vec<_> = claimed.iter().map(|job| decide(job, &complete("1"))).collect();
        backend.update_many_if_current(&updates).await.expect("settles");
        let expected: &[&str] = if rows == 1 { &["findAndModify"] } else { &["update", "find"] };
        assert_eq!(sent.names(), expected, "a settle of {rows}");
        backend.claim(&request(rows)).await.expect("claims");
        let expected = if rows == 1 { "findAndModify" } else { "find" };
        assert_eq!(sent.names(), [expected], "nothing is left");
        backend.purge(JobState::Completed, Delay::ZERO, limit(1000)).await.expect("purges");
    }
    place.gone().await;
}

/// F11.
#[tokio::test]
async fn two_prefixes_are_two_queues() {
    let Some(place) = Place::new().await else { return };
    let open = async |prefix: &str| {
        let options = place.options().collection_prefix(prefix.parse().expect("a prefix"));
        let backend = MongoBackend::connect_with(options).await.expect("connects");
        backend.migrate().await.expect("migrates");
        backend
    };
    let (one, two) = (open("select").await, open("a").await);
    one.enqueue(&[keyed("k")]).await.expect("stores");
    assert_eq!(two.claim(&request(1)).await.expect("claims"), Claimed::default());
    assert!(matches!(two.enqueue(&[keyed("k")]).await.expect("stores")[..], [Enqueued::New(_)]));
    let claimed = one.claim(&request(10)).await.expect("claims").jobs;
    assert_eq!(claimed.len(), 1);
    let wait = Suspension::new(&claimed[0].execution, name("w"), Some(name("e")), When::Now).expect("legal");
    wait.clone().submit(&one).await.expect("waits");
    let event = NewEvent { key: name("e"), payload: Json::null(), keep: Delay::MAX };
    for (backend, woken) in [(&two, 0), (&one, 1)] {
        assert_eq!(backend.emit(&event).await.expect("emits"), Emitted::New { woken });
    }
    place.gone().await;
}

/// F10, also beside a change stream that takes the only connection for most of the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_application_lends_a_client_of_any_size() {
    let Some(place) = Place::new().await else { return };
    for (connections, watches) in [(1, false), (1, true), (3, true)] {
        let client =
            Client::with_uri_str(with(&place.url, &format!("maxPoolSize={connections}"))).await.expect("a client");
        let options = MongoOptions::default().change_streams(watches);
        let backend = MongoBackend::from_client_with(client, place.raw.name(), options).await.expect("a handle");
        backend.migrate().await.expect("migrates");
        let queues = [name("mail")];
        let mut wait = backend.wait_for_work(&queues);
        assert!(poll_once(&mut wait).await.is_none());
        let jobs: Vec<_> = (0..8).map(|_| job("1")).collect();
        backend.enqueue(&jobs).await.expect("stores");
        let work = |backend: MongoBackend| async move {
            let mut done = 0;
            while let Some(job) = backend.claim(&request(1)).await.expect("claims").jobs.pop() {
                assert_eq!(backend.extend_leases(&[held(&job)], lease()).await.expect("beats"), [Beat::Extended]);
                Transitioner::new(&backend).apply(&job.execution, &complete("1")).await.expect("settles");
                done += 1;
            }
            done
        };
        let workers: Vec<_> = (0..4).map(|_| tokio::spawn(work(backend.clone()))).collect();
        let mut done = 0;
        for worker in workers {
            done += worker.await.expect("no panic");
        }
        assert_eq!(done, 8);
    }
    place.gone().await;
}

#[tokio::test]
async fn options_are_checked() {
    let most = MongoOptions::LARGEST_MAX_PAYLOAD;
    assert_error(MongoOptions::default().max_payload(most + 1), ErrorKind::Invalid, NotApplied);
    let Some(place) = Place::new().await else { return };
    let options = place
        .options()
        .max_payload(most)
        .expect("fits")
        .max_connections(2)
        .lock_timeout(Duration::ZERO)
        .skip_locked_after(Duration::MAX);
    let backend = MongoBackend::connect_with(options).await.expect("connects");
    backend.migrate().await.expect("migrates");
    // As much as a row can ever hold.
    let text = Json::encode(&"x".repeat(most - 2)).expect("JSON");
    backend.enqueue(&[NewJob { payload: text.clone(), ..job("1") }]).await.expect("stores");
    for _ in 0..Failure::KEPT {
        let claimed = claim_one(&backend).await;
        let retry = Transition::Retry { error: "\u{1}".repeat(FailureText::MAX_BYTES).into(), available: When::Now };
        Transitioner::new(&backend).apply(&claimed.execution, &retry).await.expect("settles");
    }
    let claimed = claim_one(&backend).await;
    let end = Transition::Complete { result: Some(text.clone()) };
    Transitioner::new(&backend).apply(&claimed.execution, &end).await.expect("settles");
    let done = backend.get(claimed.id()).await.expect("reads").expect("a job");
    assert_eq!((done.payload, done.result), (text.clone(), Some(text)));
    backend.close().await;
    assert_error(backend.get(claimed.id()).await, ErrorKind::Unavailable, NotApplied);
    place.gone().await;
}
