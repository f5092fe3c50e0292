//! Futures dropped in the middle. (A15)

mod common;

use std::pin::pin;
use std::time::Duration;

use backend_mongo::MongoBackend;
use backend_mongo::MongoOptions;
use backend_mongo::mongodb::bson::Document;
use backend_mongo::mongodb::options::WriteConcern;
use common::server::Server;
use common::*;
use queue_conformance::Direction;
use queue_conformance::Proxy;
use queue_core::*;

/// Polls a call some times, with what it waits for given a moment each time, and drops it. Whether it ended before.
async fn drop_after(polls: u32, call: impl Future) -> bool {
    let mut call = pin!(call);
    for _ in 0..polls {
        // A poll whenever something happened, and at the latest when nothing did for a moment.
        if tokio::time::timeout(Duration::from_micros(50), &mut call).await.is_ok() {
            return true;
        }
    }
    false
}

/// Both handles write, so nobody holds a row; and both see it.
async fn assert_whole(backend: &MongoBackend, other: &MongoBackend) {
    for (writer, reader) in [(backend, other), (other, backend)] {
        let job = NewJob { queue: name("probe"), ..job("1") };
        writer.enqueue(std::slice::from_ref(&job)).await.expect("stores");
        let request =
            ClaimRequest::new(name("probe"), [name("welcome")], worker(), lease(), limit(1)).expect("a request");
        let claimed = reader.claim(&request).await.expect("claims").jobs.pop().expect("a job");
        assert_eq!(claimed.id(), job.id);
        Transitioner::new(writer).apply(&claimed.execution, &complete("1")).await.expect("settles");
    }
}

/// What a server counts of what is left open.
fn left_open(status: &Document) -> (i64, i64) {
    let number = |path: &[&str], field: &str| {
        let mut at = status;
        for part in path {
            at = at.get_document(part).expect("a part of the status");
        }
        at.get_i64(field).or_else(|_| at.get_i32(field).map(i64::from)).expect("a number")
    };
    (number(&["metrics", "cursor", "open"], "total"), number(&["transactions"], "currentOpen"))
}

#[tokio::test]
async fn a_dropped_call_is_whole_or_not_at_all_and_leaves_nothing_open() {
    let Some(server) = Server::failing().await else { return };
    let place = Place::on(server.url()).await;
    let open = async || {
        let options = place.options().change_streams(false);
        MongoBackend::connect_with(options).await.expect("connects")
    };
    let (backend, other) = (open().await, open().await);
    backend.migrate().await.expect("migrates");
    for polls in 1..=30 {
        let jobs: Vec<_> = (0..20).map(|_| job("1")).collect();
        drop_after(polls, backend.enqueue(&jobs)).await;
        assert_whole(&backend, &other).await;
        // Each of them whole or not at all, and the same call again completes it.
        backend.enqueue(&jobs).await.expect("is repeated");
        let outcomes = other.enqueue(&jobs).await.expect("is known");
        assert!(outcomes.iter().zip(&jobs).all(|(outcome, job)| *outcome == Enqueued::Existing(job.id)));

        drop_after(polls, backend.claim(&request(5))).await;
        drop_after(polls, backend.claim(&request(1))).await;
        let taken = other.claimed_by(&worker(), Delay::ZERO, None, limit(100)).await.expect("lists").items;
        assert!(taken.iter().all(|row| row.state == JobState::Running && row.lease_expires_at.is_some()));
        let claimed = backend.claim(&request(10)).await.expect("claims").jobs;
        let held: Vec<_> = claimed.iter().map(held).collect();
        drop_after(polls, backend.extend_leases(&held, lease())).await;
        let updates: Vec<_> = claimed.iter().map(|job| decide(job, &complete("1"))).collect();
        drop_after(polls, backend.update_many_if_current(&updates)).await;
        assert_whole(&backend, &other).await;
        for update in &updates {
            let job = other.get(update.id).await.expect("reads").expect("a job");
            let is_done = job.state() == JobState::Completed;
            assert_eq!((job.result.is_some(), job.finished_at.is_some()), (is_done, is_done), "{job:?}");
        }
        if let Some(UpdateRequest { id, current, patch }) = updates.first() {
            drop_after(polls, backend.update_if_current(*id, current, patch)).await;
        }
        drop_after(polls, backend.list(&ListFilter::default(), None, limit(1000))).await;
        drop_after(polls, backend.purge(JobState::Completed, Delay::ZERO, limit(5))).await;
        drop_after(polls, backend.migrate()).await;
        steps_are_whole_or_not_at_all(&backend, &other, polls).await;
        assert_whole(&backend, &other).await;
        release_orphans(&backend, &worker(), Delay::ZERO, limit(100), |_| false).await.expect("releases");
    }
    until("no cursor and no transaction is open", || async { left_open(&server.status().await) == (0, 0) }).await;
}

/// The calls that are about steps. Those that are transactions go on to their end, which the other handle has to wait for.
async fn steps_are_whole_or_not_at_all(backend: &MongoBackend, other: &MongoBackend, polls: u32) {
    let key = name(&format!("event {polls}"));
    let of_its_own = |job| NewJob { queue: name("steps"), ..job };
    let next = async || {
        let request = ClaimRequest::new(name("steps"), [name("welcome")], worker(), lease(), limit(1));
        other.claim(&request.expect("a request")).await.expect("claims").jobs.pop().expect("a job")
    };
    other.enqueue(&[of_its_own(job("1"))]).await.expect("stores");
    let job = next().await;
    drop_after(polls, begin_step(backend, &job.execution, &name("s"))).await;
    finish_step(other, &job.execution, &name("s"), &Json::null()).await.expect("ends");
    let suspension = Suspension::new(&job.execution, name("w"), Some(key.clone()), When::At(Timestamp::MAX));
    let mut suspension = suspension.expect("legal");
    drop_after(polls, suspension.clone().submit(backend)).await;
    let waits = suspension.submit(other).await.expect("waits");
    assert!(matches!(waits, Suspended::Waits(_)), "{waits:?}");
    let event = NewEvent { key, payload: Json::null(), keep: Delay::MAX };
    drop_after(polls, backend.emit(&event)).await;
    other.emit(&event).await.expect("emits");
    let steps = other.steps(job.id()).await.expect("reads");
    assert!(steps.iter().all(|step| step.state == StepState::Done(Json::null())), "{steps:?}");

    let job = next().await;
    let successor = of_its_own(keyed("successor"));
    let mut hand_over = HandOver::new(&job.execution, None, successor.clone()).expect("legal");
    drop_after(polls, hand_over.clone().submit(backend)).await;
    hand_over.submit(other).await.expect("hands over");
    let job = next().await;
    assert_eq!(job.id(), successor.id);
    let suspend = Transition::Suspend { until: When::Now };
    Transitioner::new(other).apply(&job.execution, &suspend).await.expect("suspends");
    drop_after(polls, backend.time_out_waits(limit(5))).await;
    until("the wait is over", || async {
        other.time_out_waits(limit(5)).await.expect("sweeps");
        other.get(job.id()).await.expect("reads").expect("a job").state() == JobState::Waiting
    })
    .await;
    drop_after(polls, backend.purge_events(limit(5))).await;
    drop_after(polls, backend.steps(job.id())).await;
    let job = next().await;
    Transitioner::new(other).apply(&job.execution, &complete("1")).await.expect("settles");
}

/// A commit that is dropped is made, or nothing of the transaction is left.
#[tokio::test]
async fn a_dropped_commit() {
    let Some(server) = Server::failing().await else { return };
    let place = Place::on(server.url()).await;
    let backend = place.migrated().await;
    for polls in 1..=10 {
        let first = keyed(&polls.to_string());
        let mut transaction = backend.begin().await.expect("begins");
        backend.enqueue_in(&mut transaction, std::slice::from_ref(&first)).await.expect("stores");
        let mut commit = backend.commit(transaction);
        for _ in 0..polls {
            if poll_once(&mut commit).await.is_some() {
                break;
            }
            tokio::task::yield_now().await;
        }
        drop(commit);
        until("the key is free, or taken for good", || async {
            match backend.enqueue(&[keyed(&polls.to_string())]).await {
                Ok(outcomes) => matches!(outcomes[..], [Enqueued::New(_) | Enqueued::Duplicate { .. }]),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Transient, "{error}");
                    false
                }
            }
        })
        .await;
    }
    until("no transaction is open", || async { left_open(&server.status().await).1 == 0 }).await;
}

/// A call that is given up when its request has gone out, and its answer never comes: it happens, or not, and holds nobody up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_given_up_on_its_way() {
    let Some(server) = Server::failing().await else { return };
    let place = Place::on(server.url()).await;
    let direct = place.migrated().await;
    for held_up in [Direction::ToServer, Direction::ToClient] {
        let proxy = Proxy::start(format!("127.0.0.1:{}", server.port())).await.expect("starts");
        let url = format!("mongodb://127.0.0.1:{}/?directConnection=true", proxy.port());
        let options = MongoOptions::from_url(url).expect("a URL").database(place.raw.name()).expect("a name");
        let backend = MongoBackend::connect_with(options).await.expect("connects");
        let jobs = running(&direct, 2).await;
        let updates: Vec<_> = jobs.iter().map(|job| decide(job, &complete("1"))).collect();
        proxy.hold(held_up);
        proxy.until_arrival(held_up, backend.update_many_if_current(&updates)).await;
        proxy.release();
        until("the batch has been answered", || async {
            let answers = direct.update_many_if_current(&updates).await.expect("answers");
            answers.iter().all(|answer| matches!(answer, Update::Conflict(row) if row.state == JobState::Completed))
        })
        .await;
        // The connection that the call was on is not used again.
        assert_whole(&backend, &direct).await;
    }
}

/// The same for the first call of a transaction, of which the driver has had no answer yet: it does not abort that one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_call_of_a_transaction_that_is_given_up() {
    let Some(server) = Server::failing().await else { return };
    let place = Place::on(server.url()).await;
    let direct = place.migrated().await;
    let job = running(&direct, 1).await.remove(0);
    let UpdateRequest { id, current, patch } = decide(&job, &complete("1"));
    for (held_up, calls) in [(Direction::ToServer, 1), (Direction::ToClient, 1), (Direction::ToClient, 2)] {
        let proxy = Proxy::start(format!("127.0.0.1:{}", server.port())).await.expect("starts");
        let url = format!("mongodb://127.0.0.1:{}/?directConnection=true", proxy.port());
        let options = MongoOptions::from_url(url).expect("a URL").database(place.raw.name()).expect("a name");
        let backend = MongoBackend::connect_with(options).await.expect("connects");
        for keyed_job in [false, true] {
            let mut session = backend.client().start_session().await.expect("a session");
            session.start_transaction().await.expect("begins");
            for _ in 1..calls {
                backend.update_if_current_in(&mut session, JobId::new(), &current, &patch).await.expect("is missing");
            }
            proxy.hold(held_up);
            match keyed_job {
                true => proxy.until_arrival(held_up, backend.enqueue_in(&mut session, &[keyed("k")])).await,
                false => {
                    let call = backend.update_if_current_in(&mut session, id, &current, &patch);
                    proxy.until_arrival(held_up, call).await;
                }
            }
            drop(session);
            proxy.release();
            // The row and the key are free at once, or as soon as the driver has aborted what it knows of.
            until("the row is free", || async {
                direct.extend_leases(&[held(&job)], lease()).await.expect("beats") == [Beat::Extended]
            })
            .await;
            let stored = direct.enqueue(&[keyed("k")]).await.expect("stores");
            assert!(matches!(stored[..], [Enqueued::New(_)]), "{stored:?}");
            let canceled = direct.get(stored[0].id()).await.expect("reads").expect("a job").execution;
            let cancel = Transition::Cancel { reason: "enough".into() };
            Transitioner::new(&direct).apply(&canceled, &cancel).await.expect("cancels");
        }
    }
}

/// The application's session and a call in it, dropped together.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_transaction_leaves_no_lock() {
    let Some(server) = Server::failing().await else { return };
    let place = Place::on(server.url()).await;
    let backend = place.migrated().await;
    for polls in 1..=15 {
        let jobs = [keyed(&format!("{polls} a")), keyed(&format!("{polls} b"))];
        let mut session = backend.client().start_session().await.expect("a session");
        session.start_transaction().write_concern(WriteConcern::majority()).await.expect("begins");
        backend.enqueue_in(&mut session, &jobs[..1]).await.expect("stores");
        drop_after(polls, backend.enqueue_in(&mut session, &jobs[1..])).await;
        drop(session);
        until("the keys are free", || async {
            match backend.enqueue(&jobs).await {
                Ok(outcomes) => {
                    assert_eq!(outcomes, jobs.clone().map(|job| Enqueued::New(job.id)), "nothing was there");
                    true
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Transient, "{error}");
                    false
                }
            }
        })
        .await;
    }
    until("no transaction is open", || async { left_open(&server.status().await).1 == 0 }).await;
}
