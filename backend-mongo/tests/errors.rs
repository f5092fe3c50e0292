//! What the server refuses, and what the caller is told: the kind, what became of the write, and that nothing is lost.

mod common;

use std::sync::Mutex;
use std::time::Duration;

use backend_mongo::MongoBackend;
use backend_mongo::MongoOptions;
use backend_mongo::migrations;
use backend_mongo::mongodb::Client;
use backend_mongo::mongodb::bson::Bson;
use backend_mongo::mongodb::bson::Document;
use backend_mongo::mongodb::bson::doc;
use common::server::Server;
use common::*;
use queue_conformance::Direction;
use queue_conformance::Proxy;
use queue_core::Certainty::NotApplied;
use queue_core::Certainty::Unknown;
use queue_core::ErrorKind::*;
use queue_core::*;

/// A server that fails when told, and a backend on it.
async fn failing() -> Option<(Server, Place, MongoBackend, Sent)> {
    let server = Server::failing().await?;
    let place = Place::on(server.url()).await;
    let (client, sent) =
        noted(&with(&server.url(), "appName=tested&retryWrites=true&retryReads=true&heartbeatFrequencyMS=500")).await;
    let options = MongoOptions::default().lock_timeout(Duration::ZERO);
    let backend = MongoBackend::from_client_with(client, place.raw.name(), options).await.expect("a handle");
    backend.migrate().await.expect("migrates");
    Some((server, place, backend, sent))
}

fn code(code: i32) -> Document {
    doc! { "errorCode": code }
}

fn once() -> Bson {
    doc! { "times": 1 }.into()
}

/// What each failure of a settle means, alone and in a batch. 112 and 50 are of the server's own waiting: a batch then goes row
/// by row, which is why they fail there too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settle_that_fails() {
    let Some((server, _place, backend, sent)) = failing().await else { return };
    let lost = doc! { "closeConnection": true };
    for (how, kind, alone, batch) in [
        (code(10107), Unavailable, NotApplied, NotApplied),
        (code(13435), Unavailable, NotApplied, NotApplied),
        (code(10058), Unavailable, NotApplied, NotApplied),
        (code(189), Unavailable, Unknown, Unknown),
        (code(91), Unavailable, Unknown, Unknown),
        (code(11600), Unavailable, Unknown, Unknown),
        (code(11602), Unavailable, Unknown, Unknown),
        (lost, Unavailable, Unknown, Unknown),
        (code(112), Transient, NotApplied, NotApplied),
        (code(50), Transient, NotApplied, NotApplied),
        (code(262), Transient, NotApplied, NotApplied),
        (code(121), Permanent, NotApplied, NotApplied),
        (code(13), Permanent, NotApplied, NotApplied),
        (code(17419), TooLarge, NotApplied, NotApplied),
        (code(2), Schema, NotApplied, NotApplied),
        (code(20), Unsupported, NotApplied, NotApplied),
        (code(14031), Unavailable, NotApplied, NotApplied),
        (code(999_999), Permanent, NotApplied, NotApplied),
    ] {
        let jobs = running(&backend, 3).await;
        let mut decisions: Vec<_> =
            jobs.iter().map(|job| Decision::new(&job.execution, &complete("1")).expect("legal")).collect();
        let UpdateRequest { id, current, patch } = decisions[0].request().clone();
        sent.take();
        server.fail("alwaysOn", "findAndModify", how.clone()).await;
        let answer = backend.update_if_current(id, &current, &patch).await;
        assert_error(answer, kind, alone);
        assert!(kind == Transient || sent.names() == ["findAndModify"], "{how}: not sent again by itself");
        server.works().await;
        // In the batch's own command; and, if that only says that a row is locked, in those for the rows.
        let is_about_rows = kind == Transient;
        server.fail("alwaysOn", "update", how.clone()).await;
        let updates: Vec<_> = decisions[1..].iter().map(|decision| decision.request().clone()).collect();
        let answer = backend.update_many_if_current(&updates).await;
        match is_about_rows {
            true => assert!(matches!(answer.expect("row by row")[..], [Update::Applied(_), Update::Applied(_)])),
            false => drop(assert_error(answer, kind, batch)),
        }
        server.works().await;
        for settled in Transitioner::new(&backend).submit_all(&mut decisions).await {
            assert_eq!(settled.expect("settles").execution().state, JobState::Completed, "{how}");
        }
    }
}

/// A write that is made, while nobody knows whether it lasts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_that_may_not_last() {
    let Some((server, _place, backend, _)) = failing().await else { return };
    for concern in [64, 79, 100] {
        let how = doc! { "writeConcernError": { "code": concern, "errmsg": "no majority" } };
        let jobs = running(&backend, 3).await;
        server.fail(once(), "findAndModify", how.clone()).await;
        let mut decision = Decision::new(&jobs[0].execution, &complete("1")).expect("legal");
        let answer = Transitioner::new(&backend).submit(&mut decision).await;
        let Err(TransitionError::Backend(error)) = answer else { panic!("{concern}: {answer:?}") };
        assert_eq!((error.kind(), error.certainty()), (Unavailable, Unknown), "{error}");
        let settled = Transitioner::new(&backend).submit(&mut decision).await.expect("is recognised");
        assert!(matches!(settled, Settled::AlreadyApplied(_)), "it was written");

        server.fail(once(), "update", how.clone()).await;
        let updates: Vec<_> = jobs[1..].iter().map(|job| decide(job, &complete("1"))).collect();
        assert_error(backend.update_many_if_current(&updates).await, Unavailable, Unknown);

        server.fail(once(), "insert", how).await;
        let new = [job("1")];
        assert_error(backend.enqueue(&new).await, Unavailable, Unknown);
        assert_eq!(backend.enqueue(&new).await.expect("is known"), [Enqueued::Existing(new[0].id)]);
        claim_one(&backend).await;
    }
}

/// The time of a command is short, for the sake of locked rows; a majority that takes longer is waited for all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_majority_that_takes_its_time() {
    let Some((server, _place, backend, sent)) = failing().await else { return };
    let late = doc! { "writeConcernError": { "code": 50, "errmsg": "operation exceeded time limit" } };
    backend.enqueue(&[job("1"), job("2"), job("3")]).await.expect("stores");
    sent.take();
    server.fail(once(), "findAndModify", late.clone()).await;
    let first = claim_one(&backend).await;
    assert_eq!(sent.names(), ["findAndModify", "update"], "one command more");
    server.fail(once(), "findAndModify", late.clone()).await;
    Transitioner::new(&backend).apply(&first.execution, &complete("1")).await.expect("settles");
    // And if that is too late as well, nobody knows.
    let claimed = backend.claim(&request(2)).await.expect("claims").jobs;
    server.fail(doc! { "times": 2 }, "update", late).await;
    let updates: Vec<_> = claimed.iter().map(|job| decide(job, &complete("1"))).collect();
    assert_error(backend.update_many_if_current(&updates).await, Unavailable, Unknown);
    for job in claimed {
        assert_eq!(backend.get(job.id()).await.expect("reads").expect("a job").state(), JobState::Completed);
    }
    // What is only read, because it is there already, is acknowledged by a majority too before the caller is told.
    let again = job("4");
    backend.enqueue(std::slice::from_ref(&again)).await.expect("stores");
    sent.take();
    backend.enqueue(std::slice::from_ref(&again)).await.expect("is known");
    assert_eq!(sent.names().last().map(String::as_str), Some("update"));
}

/// A claim whose answer is still on its way when its lease runs out has won nothing that it could name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_comes_after_the_lease() {
    let Some((server, place, direct, _)) = failing().await else { return };
    let proxy = Proxy::start(format!("127.0.0.1:{}", server.port())).await.expect("starts");
    let url = format!("mongodb://127.0.0.1:{}/?directConnection=true", proxy.port());
    let options = MongoOptions::from_url(url).expect("a URL").database(place.raw.name()).expect("a name");
    let backend = MongoBackend::connect_with(options).await.expect("connects");
    direct.enqueue(&[job("1")]).await.expect("stores");
    proxy.hold(Direction::ToClient);
    let claiming = {
        let backend = backend.clone();
        tokio::spawn(async move { backend.claim(&with_lease(1, 500)).await })
    };
    until("the lease has run out", || async { direct.stale(None, limit(1)).await.expect("lists").items.len() == 1 })
        .await;
    proxy.release();
    assert_error(claiming.await.expect("no panic"), Unavailable, Unknown);
}

/// The lease bounds the wait for a majority too, so that a third of it is left; and a long one does not draw it out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_majority_is_not_waited_for_beyond_the_lease() {
    let Some((server, _place, backend, sent)) = failing().await else { return };
    let late = doc! { "writeConcernError": { "code": 50, "errmsg": "operation exceeded time limit" } };
    for (lease, longest) in [(900, 600), (2_700, 1_800), (4_500, 2_000), (30_000, 10_000)] {
        backend.enqueue(&[job("1")]).await.expect("stores");
        sent.take();
        server.fail(once(), "findAndModify", late.clone()).await;
        backend.claim(&with_lease(1, lease)).await.expect("claims");
        let waits = sent.take().last().expect("a wait").get_i64("maxTimeMS").expect("a limit");
        assert!(waits <= longest && waits > longest - 500, "{lease}: {waits}");
    }
}

fn with_lease(rows: usize, millis: i64) -> ClaimRequest {
    let lease = Lease::from_millis(millis).expect("a lease");
    ClaimRequest::new(name("mail"), [name("welcome")], worker(), lease, limit(rows)).expect("a request")
}

/// S14, B10: a claim and a beat whose answer is lost are not sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_and_a_beat_are_not_repeated() {
    let Some((server, _place, backend, sent)) = failing().await else { return };
    let jobs = running(&backend, 2).await;
    backend.enqueue(&[job("1"), job("2"), job("3")]).await.expect("stores");
    for how in [doc! { "closeConnection": true }, code(91), code(189), code(11602)] {
        sent.take();
        server.fail(once(), "findAndModify", how.clone()).await;
        assert_error(backend.claim(&request(1)).await, Unavailable, Unknown);
        assert_eq!(sent.names(), ["findAndModify"], "{how}");
        server.fail(once(), "update", how.clone()).await;
        assert_error(backend.claim(&request(2)).await, Unavailable, Unknown);
        assert_eq!(sent.names(), ["find", "update"], "{how}");
        server.fail(once(), "update", how.clone()).await;
        let held: Vec<_> = jobs.iter().map(held).collect();
        assert_error(backend.extend_leases(&held, lease()).await, Unavailable, Unknown);
        assert_eq!(sent.names(), ["update"], "{how}");
    }
    // What refuses before it begins is known to have done nothing; and a read that fails claims nothing.
    server.fail(once(), "findAndModify", code(10107)).await;
    assert_error(backend.claim(&request(1)).await, Unavailable, NotApplied);
    server.fail(doc! { "times": 3 }, "find", doc! { "closeConnection": true }).await;
    assert_error(backend.claim(&request(2)).await, Unavailable, NotApplied);
    server.works().await;
    assert_eq!(backend.claim(&request(10)).await.expect("claims").jobs.len(), 3);
}

/// An enqueue that is cut off is completed by the same call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_enqueue_that_fails() {
    let Some((server, place, backend, _)) = failing().await else { return };
    for (how, kind, certainty) in [
        (doc! { "closeConnection": true }, Unavailable, Unknown),
        (code(10107), Unavailable, NotApplied),
        (code(189), Unavailable, Unknown),
        (code(13), Permanent, NotApplied),
    ] {
        let jobs = [keyed("k"), job("2")];
        server.fail(once(), "insert", how).await;
        assert_error(backend.enqueue(&jobs).await, kind, certainty);
        let outcomes = backend.enqueue(&jobs).await.expect("stores");
        assert!(outcomes.iter().zip(&jobs).all(|(outcome, job)| outcome.id() == job.id), "{outcomes:?}");
        for job in backend.claim(&request(2)).await.expect("claims").jobs {
            Transitioner::new(&backend).apply(&job.execution, &complete("1")).await.expect("settles");
        }
    }
    // Cut off by the server's own waiting it goes on by itself, and knows what it has stored before.
    let patient = place.options().lock_timeout(Duration::from_secs(20));
    let client = Client::with_uri_str(with(&server.url(), "appName=tested")).await.expect("a client");
    let patient = MongoBackend::from_client_with(client, place.raw.name(), patient).await.expect("a handle");
    let jobs = [keyed("k"), job("2")];
    server.fail(once(), "insert", code(50)).await;
    let outcomes = patient.enqueue(&jobs).await.expect("stores");
    assert_eq!(outcomes, jobs.clone().map(|job| Enqueued::New(job.id)));
    // One that is not patient does not know; and of a single job, that it is not stored.
    let always = Bson::from("alwaysOn");
    server.fail(always.clone(), "insert", code(50)).await;
    assert_error(backend.enqueue(&[job("3")]).await, Transient, NotApplied);
    server.fail(always, "find", doc! { "closeConnection": true }).await;
    assert_error(backend.enqueue(&[job("3")]).await, Unavailable, NotApplied);
    server.works().await;
    assert_eq!(backend.enqueue(&jobs).await.expect("is known"), jobs.map(|job| Enqueued::Existing(job.id)));
}

/// Of many chunks one fails: what is before it is stored, and the error does not deny it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_enqueue_that_fails_in_the_middle() {
    let Some((server, _place, backend, _)) = failing().await else { return };
    let jobs: Vec<_> = (0..2_500).map(|_| job("1")).collect();
    server.fail(doc! { "skip": 1 }, "insert", code(10107)).await;
    assert_error(backend.enqueue(&jobs).await, Unavailable, Unknown);
    server.works().await;
    let outcomes = backend.enqueue(&jobs).await.expect("stores");
    let known = |outcome: &&Enqueued| matches!(outcome, Enqueued::Existing(_));
    assert_eq!(outcomes.iter().filter(known).count(), 1_000);
}

/// A13, S11: the answer to a settle is lost on the way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_is_lost() {
    let Some((server, place, direct, _)) = failing().await else { return };
    let proxy = Proxy::start(format!("127.0.0.1:{}", server.port())).await.expect("starts");
    let url = format!("mongodb://127.0.0.1:{}/?directConnection=true", proxy.port());
    let options = MongoOptions::from_url(url).expect("a URL").database(place.raw.name()).expect("a name");
    let backend = MongoBackend::connect_with(options).await.expect("connects");
    for rows in [1, 5] {
        let jobs = running(&backend, rows).await;
        let mut decisions: Vec<_> =
            jobs.iter().map(|job| Decision::new(&job.execution, &complete("1")).expect("legal")).collect();
        proxy.hold(Direction::ToClient);
        let settling = {
            let (backend, mut decisions) = (backend.clone(), decisions.clone());
            tokio::spawn(async move { Transitioner::new(&backend).submit_all(&mut decisions).await })
        };
        until("it is committed", || async {
            let last = direct.get(jobs[rows - 1].id()).await.expect("reads").expect("a job");
            last.state() == JobState::Completed
        })
        .await;
        proxy.cut();
        let answers = settling.await.expect("no panic");
        proxy.release();
        for answer in answers {
            let Err(TransitionError::Backend(error)) = answer else { panic!("{answer:?}") };
            assert_eq!((error.kind(), error.certainty()), (Unavailable, Unknown));
        }
        for answer in Transitioner::new(&backend).submit_all(&mut decisions).await {
            let settled = answer.expect("is recognised");
            assert!(matches!(settled, Settled::AlreadyApplied(_)), "{settled:?}");
        }
        for job in &jobs {
            let done = backend.get(job.id()).await.expect("reads").expect("a job");
            assert_eq!((done.state(), done.errors.len()), (JobState::Completed, 0), "one outcome");
        }
    }
}

/// A row of a batch that somebody writes between the write and the reading of its answer: it was applied, but nobody can say what
/// it then was. The same decision, submitted again, is told so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_moves_on_before_it_is_read() {
    let Some((server, place, direct, _)) = failing().await else { return };
    let proxy = Proxy::start(format!("127.0.0.1:{}", server.port())).await.expect("starts");
    let url = format!("mongodb://127.0.0.1:{}/?directConnection=true", proxy.port());
    let options = MongoOptions::from_url(url).expect("a URL").database(place.raw.name()).expect("a name");
    let backend = MongoBackend::connect_with(options).await.expect("connects");
    let jobs = running(&backend, 2).await;
    let mut decisions: Vec<_> =
        jobs.iter().map(|job| Decision::new(&job.execution, &Transition::Release).expect("legal")).collect();
    let updates: Vec<_> = decisions.iter().map(|decision| decision.request().clone()).collect();
    proxy.hold(Direction::ToClient);
    let settling = {
        let (backend, updates) = (backend.clone(), updates.clone());
        tokio::spawn(async move { backend.update_many_if_current(&updates).await })
    };
    until("it is committed", || async {
        let last = direct.get(jobs[1].id()).await.expect("reads").expect("a job");
        last.state() == JobState::Waiting
    })
    .await;
    let again = direct.claim(&request(1)).await.expect("claims").jobs.remove(0);
    assert_eq!(again.id(), jobs[0].id());
    proxy.release();
    let error = assert_error(settling.await.expect("no panic"), Transient, Unknown);
    assert_eq!(error.index(), Some(0));
    let answers = Transitioner::new(&backend).submit_all(&mut decisions).await;
    assert!(matches!(&answers[0], Err(TransitionError::Conflict(conflict)) if conflict.current == again.execution));
    assert!(matches!(answers[1], Ok(Settled::AlreadyApplied(_))));
}

/// F7: the only primary steps down, and is elected again. The same handle goes on, and what was decided before is recorded once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_steps_down() {
    let Some((server, _place, backend, _)) = failing().await else { return };
    let jobs = running(&backend, 4).await;
    let mut decisions: Vec<_> =
        jobs.iter().map(|job| Decision::new(&job.execution, &complete("1")).expect("legal")).collect();
    server.step_down().await;
    let kinds = Mutex::new(Vec::new());
    until("all is settled", || async {
        let answers = Transitioner::new(&backend).submit_all(&mut decisions.clone()).await;
        for answer in &answers {
            if let Err(TransitionError::Backend(error)) = answer {
                kinds.lock().expect("no panic").push(error.kind());
            }
        }
        answers.iter().all(Result::is_ok)
    })
    .await;
    let kinds = kinds.into_inner().expect("no panic");
    assert!(!kinds.is_empty() && kinds.iter().all(|kind| *kind == Unavailable), "{kinds:?}");
    for answer in Transitioner::new(&backend).submit_all(&mut decisions).await {
        let settled = answer.expect("is recognised");
        assert!(matches!(settled, Settled::AlreadyApplied(_)), "{settled:?}");
    }
}

#[tokio::test]
async fn a_database_that_was_not_migrated() {
    let Some(place) = Place::new().await else { return };
    let backend = place.backend().await;
    assert_error(backend.enqueue(&[job("1")]).await, Schema, NotApplied);
    assert_error(backend.claim(&request(1)).await, Schema, NotApplied);
    assert_error(backend.get(JobId::new()).await, Schema, NotApplied);
    assert_error(backend.stale(None, limit(1)).await, Schema, NotApplied);
    assert_error(backend.counts().await, Schema, NotApplied);
    assert_error(backend.purge(JobState::Failed, Delay::ZERO, limit(1)).await, Schema, NotApplied);
    assert_error(backend.steps(JobId::new()).await, Schema, NotApplied);
    assert_error(backend.time_out_waits(limit(1)).await, Schema, NotApplied);
    let event = NewEvent { key: name("e"), payload: Json::null(), keep: Delay::ZERO };
    assert_error(backend.emit(&event).await, Schema, NotApplied);
    // The first schema is enough for all but steps.
    for command in &migrations(&Identifier::default())[0].commands {
        place.run(command.clone()).await;
    }
    backend.enqueue(&[job("1")]).await.expect("now it works, on the same handle");
    let claimed = claim_one(&backend).await;
    let begun = begin_step(&backend, &claimed.execution, &name("s")).await;
    assert!(matches!(begun, Err(StepError::Transition(TransitionError::Backend(_)))), "{begun:?}");
    assert_error(backend.emit(&event).await, Schema, NotApplied);
    let another = place.migrated().await;
    begin_step(&backend, &claimed.execution, &name("s")).await.expect("so do they");
    backend.emit(&event).await.expect("so do they");
    drop(another);
    place.gone().await;
    assert_error(backend.enqueue(&[job("1")]).await, Schema, NotApplied);
}

/// The answer to a settle that makes a job active again whose key is taken.
#[tokio::test]
async fn a_key_that_is_taken() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    backend.enqueue(&[keyed("k")]).await.expect("stores");
    let ended = claim_one(&backend).await;
    let ended = Transitioner::new(&backend).apply(&ended.execution, &complete("1")).await.expect("settles");
    backend.enqueue(&[keyed("k")]).await.expect("stores");
    let other = running_other(&backend).await;
    let mut decision = Decision::new(ended.execution(), &Transition::Rerun).expect("legal");
    let UpdateRequest { id, current, patch } = decision.request().clone();
    assert_error(backend.update_if_current(id, &current, &patch).await, Invalid, NotApplied);
    let batch = [decide(&other, &complete("1")), decision.request().clone()];
    let error = assert_error(backend.update_many_if_current(&batch).await, Invalid, NotApplied);
    assert_eq!(error.index(), Some(1));
    let mut session = backend.client().start_session().await.expect("a session");
    session.start_transaction().await.expect("begins");
    let answer = backend.update_if_current_in(&mut session, id, &current, &patch).await;
    assert_error(answer, Invalid, NotApplied);
    session.abort_transaction().await.expect("aborts");
    let holder = claim_one(&backend).await;
    Transitioner::new(&backend).apply(&holder.execution, &complete("1")).await.expect("settles");
    Transitioner::new(&backend).submit(&mut decision).await.expect("the key is free");
    place.gone().await;
}

/// A job of another queue, started.
async fn running_other(backend: &MongoBackend) -> Job {
    backend.enqueue(&[NewJob { queue: name("other"), ..job("1") }]).await.expect("stores");
    let request = ClaimRequest::new(name("other"), [name("welcome")], worker(), lease(), limit(1));
    backend.claim(&request.expect("a request")).await.expect("claims").jobs.remove(0)
}

/// B5: the wait for a row is over long before the lease is, and no longer than it.
#[tokio::test]
async fn a_claim_with_a_short_lease_does_not_wait_for_long() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let jobs = [job("1")];
    backend.enqueue(&jobs).await.expect("stores");
    let mut hold = place.hold(jobs[0].id).await;
    let short = Lease::from_millis(3_000).expect("a lease");
    let request = ClaimRequest::new(name("mail"), [name("welcome")], worker(), short, limit(1)).expect("a request");
    let error = assert_error(backend.claim(&request).await, Transient, NotApplied);
    assert!(error.to_string().contains("claim"), "{error}");
    hold.abort_transaction().await.expect("aborts");
    let claimed = backend.claim(&request).await.expect("claims").jobs.remove(0).execution;
    assert_eq!(claimed.lease_expires_at, claimed.claimed_at.map(|at| at.saturating_add_millis(3_000)));
    place.gone().await;
}
