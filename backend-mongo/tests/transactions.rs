//! In the application's own transaction, and beside those of others. (D2, D7, D8, A10, B4, C6b)

mod common;

use std::time::Duration;

use backend_mongo::MongoBackend;
use backend_mongo::MongoOptions;
use backend_mongo::mongodb::ClientSession;
use backend_mongo::mongodb::bson::Document;
use backend_mongo::mongodb::bson::doc;
use backend_mongo::mongodb::options::WriteConcern;
use common::*;
use queue_conformance::Proxy;
use queue_core::Certainty::NotApplied;
use queue_core::*;

/// A backend, and beside it the application's own collection.
async fn setup() -> Option<(Place, MongoBackend)> {
    let place = Place::new().await?;
    let backend = place.migrated().await;
    place.run(doc! { "create": "orders" }).await;
    Some((place, backend))
}

async fn begin(backend: &MongoBackend) -> ClientSession {
    let mut session = backend.client().start_session().await.expect("a session");
    session.start_transaction().write_concern(WriteConcern::majority()).await.expect("begins");
    session
}

async fn order(place: &Place, session: &mut ClientSession) {
    let orders = session.client().database(place.raw.name()).collection::<Document>("orders");
    orders.insert_one(doc! { "number": 1 }).session(session).await.expect("stores");
}

async fn orders(place: &Place) -> u64 {
    place.raw.collection::<Document>("orders").count_documents(doc! {}).await.expect("counts")
}

#[tokio::test]
async fn a_job_is_stored_with_what_it_is_about_or_not_at_all() {
    let Some((place, backend)) = setup().await else { return };
    for commit in [false, true] {
        let job = job("1");
        let mut session = begin(&backend).await;
        order(&place, &mut session).await;
        let outcomes = backend.enqueue_in(&mut session, std::slice::from_ref(&job)).await.expect("stores");
        assert_eq!(outcomes, [Enqueued::New(job.id)]);
        assert_eq!(backend.get(job.id).await.expect("reads"), None, "not before the commit");
        match commit {
            true => session.commit_transaction().await.expect("commits"),
            false => session.abort_transaction().await.expect("aborts"),
        }
        assert_eq!(backend.get(job.id).await.expect("reads").is_some(), commit);
        assert_eq!(orders(&place).await, u64::from(commit));
    }
    place.gone().await;
}

#[tokio::test]
async fn a_job_is_settled_with_what_it_wrote_or_not_at_all() {
    let Some((place, backend)) = setup().await else { return };
    let claimed = running(&backend, 1).await.remove(0);
    let UpdateRequest { id, current, patch } = decide(&claimed, &complete("1"));
    for commit in [false, true] {
        let mut session = begin(&backend).await;
        order(&place, &mut session).await;
        let answer = backend.update_if_current_in(&mut session, id, &current, &patch).await.expect("updates");
        assert!(matches!(answer, Update::Applied(_)));
        match commit {
            true => session.commit_transaction().await.expect("commits"),
            false => session.abort_transaction().await.expect("aborts"),
        }
        let state = backend.get(id).await.expect("reads").expect("a job").state();
        assert_eq!(state, if commit { JobState::Completed } else { JobState::Running });
    }
    let mut session = begin(&backend).await;
    let answer = backend.update_if_current_in(&mut session, id, &current, &patch).await.expect("answers");
    assert!(matches!(answer, Update::Conflict(_)), "the claim is over");
    let answer = backend.update_if_current_in(&mut session, JobId::new(), &current, &patch).await.expect("answers");
    assert_eq!(answer, Update::Missing);
    session.abort_transaction().await.expect("aborts");
    assert_eq!(orders(&place).await, 1);
    place.gone().await;
}

/// A duplicate that can be seen is an outcome. One that arises in a race ends the transaction, as any error does in MongoDB:
/// the whole of it is to be repeated, and then the duplicate can be seen.
#[tokio::test]
async fn a_race_for_a_key_ends_the_transaction() {
    let Some((place, backend)) = setup().await else { return };
    let mut session = begin(&backend).await;
    // The transaction sees what was there when it first read.
    backend.enqueue_in(&mut session, &[keyed("another")]).await.expect("stores");
    let first = keyed("k");
    backend.enqueue(std::slice::from_ref(&first)).await.expect("stores");
    let answer = backend.enqueue_in(&mut session, &[keyed("k")]).await;
    assert_error(answer, ErrorKind::Transient, NotApplied);
    let answer = backend.enqueue_in(&mut session, &[job("1")]).await;
    assert_error(answer, ErrorKind::Transient, NotApplied);
    session.abort_transaction().await.expect("aborts");

    let mut session = begin(&backend).await;
    let outcomes = backend.enqueue_in(&mut session, &[keyed("k"), keyed("another"), first.clone()]).await;
    let outcomes = outcomes.expect("outcomes");
    assert_eq!(outcomes[0], Enqueued::Duplicate { existing: first.id });
    assert!(matches!(outcomes[1], Enqueued::New(_)), "the first transaction left nothing");
    assert_eq!(outcomes[2], Enqueued::Existing(first.id));
    order(&place, &mut session).await;
    session.commit_transaction().await.expect("commits");
    assert_eq!(orders(&place).await, 1);
    place.gone().await;
}

/// The same for a row that somebody else has changed since the transaction began, or is changing.
#[tokio::test]
async fn a_race_for_a_row_ends_the_transaction() {
    let Some((place, backend)) = setup().await else { return };
    let claimed = running(&backend, 2).await;
    let settle = |job: &Job| decide(job, &complete("1"));
    let mut session = begin(&backend).await;
    backend.enqueue_in(&mut session, &[job("1")]).await.expect("stores");
    let UpdateRequest { id, current, patch } = settle(&claimed[0]);
    backend.update_if_current(id, &current, &patch).await.expect("settles");
    let answer = backend.update_if_current_in(&mut session, id, &current, &patch).await;
    assert_error(answer, ErrorKind::Transient, NotApplied);
    session.abort_transaction().await.expect("aborts");

    let mut other = place.hold(claimed[1].id()).await;
    let mut session = begin(&backend).await;
    let UpdateRequest { id, current, patch } = settle(&claimed[1]);
    let answer = backend.update_if_current_in(&mut session, id, &current, &patch).await;
    assert_error(answer, ErrorKind::Transient, NotApplied);
    session.abort_transaction().await.expect("aborts");
    other.abort_transaction().await.expect("aborts");
    place.gone().await;
}

/// The clock is the server's at each call, not that of the transaction's beginning.
#[tokio::test]
async fn the_clock_goes_on_in_a_transaction() {
    let Some((place, backend)) = setup().await else { return };
    let mut session = begin(&backend).await;
    let first = job("1");
    backend.enqueue_in(&mut session, std::slice::from_ref(&first)).await.expect("stores");
    let clock = async || *place.run(doc! { "hello": 1 }).await.get_datetime("localTime").expect("a time");
    let then = clock().await;
    until("the server's clock has moved on", || async { clock().await > then }).await;
    let outside = job("2");
    backend.enqueue(std::slice::from_ref(&outside)).await.expect("stores");
    let last = job("3");
    backend.enqueue_in(&mut session, std::slice::from_ref(&last)).await.expect("stores");
    session.commit_transaction().await.expect("commits");
    let mut created = Vec::new();
    for job in [&first, &outside, &last] {
        created.push(backend.get(job.id).await.expect("reads").expect("a job").created_at);
    }
    assert!(created[0] < created[1] && created[1] <= created[2], "{created:?}");
    place.gone().await;
}

#[tokio::test]
async fn a_session_of_another_client_is_refused() {
    let Some((place, backend)) = setup().await else { return };
    let mut session = place.raw.client().start_session().await.expect("a session");
    session.start_transaction().await.expect("begins");
    let answer = backend.enqueue_in(&mut session, &[job("1")]).await;
    assert_error(answer, ErrorKind::Invalid, NotApplied);
    place.gone().await;
}

/// B4: also when it is a batch, of which the others are claimed.
#[tokio::test]
async fn a_claim_passes_rows_that_are_locked() {
    let Some((place, backend)) = setup().await else { return };
    let jobs: Vec<_> = (0..6).map(|_| job("1")).collect();
    backend.enqueue(&jobs).await.expect("stores");
    let mut holds = vec![place.hold(jobs[0].id).await, place.hold(jobs[3].id).await];
    let ids = |claimed: &Claimed| claimed.jobs.iter().map(Job::id).collect::<Vec<_>>();
    assert_eq!(ids(&backend.claim(&request(1)).await.expect("claims")), [jobs[1].id]);
    assert_eq!(ids(&backend.claim(&request(2)).await.expect("claims")), [jobs[2].id, jobs[4].id]);
    assert_eq!(ids(&backend.claim(&request(10)).await.expect("claims")), [jobs[5].id]);
    // None is left that could be had: that is not the same as none.
    let options = place.options().lock_timeout(Duration::ZERO);
    let hasty = MongoBackend::connect_with(options).await.expect("connects");
    for rows in [1, 5] {
        assert_error(hasty.claim(&request(rows)).await, ErrorKind::Transient, NotApplied);
    }
    // One that comes while it looks is found.
    let looking = {
        let backend = backend.clone();
        tokio::spawn(async move { backend.claim(&request(5)).await })
    };
    let late = job("\"late\"");
    tokio::task::yield_now().await;
    backend.enqueue(std::slice::from_ref(&late)).await.expect("stores");
    assert_eq!(ids(&looking.await.expect("no panic").expect("claims")), [late.id]);
    for hold in &mut holds {
        hold.abort_transaction().await.expect("aborts");
    }
    assert_eq!(ids(&backend.claim(&request(10)).await.expect("claims")), [jobs[0].id, jobs[3].id]);
    assert_eq!(backend.claim(&request(10)).await.expect("claims"), Claimed::default());
    place.gone().await;
}

/// B3: as many jobs as all of them want, at once: none comes short, whatever the others take before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn claimers_at_once_get_what_they_asked_for() {
    let Some((place, backend)) = setup().await else { return };
    for round in 0..10 {
        let jobs: Vec<_> = (0..40).map(|_| job("1")).collect();
        backend.enqueue(&jobs).await.expect("stores");
        let mut claims = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let handle = place.backend().await;
            claims.spawn(async move { handle.claim(&request(5)).await });
        }
        for claimed in claims.join_all().await {
            assert_eq!(claimed.expect("no error").jobs.len(), 5, "round {round}");
        }
    }
    place.gone().await;
}

/// C6b: the beat answers while the row is held, and renews all others.
#[tokio::test]
async fn a_beat_waits_for_no_row() {
    let Some((place, backend)) = setup().await else { return };
    let claimed = running(&backend, 100).await;
    let mut hold = place.hold(claimed[42].id()).await;
    let held: Vec<_> = claimed.iter().map(held).collect();
    let longer = Lease::from_millis(600_000).expect("a lease");
    let beats = backend.extend_leases(&held, longer).await.expect("beats");
    for (index, (beat, job)) in beats.into_iter().zip(&claimed).enumerate() {
        assert_eq!(beat, if index == 42 { Beat::Busy } else { Beat::Extended }, "claim {index}");
        let now = backend.get(job.id()).await.expect("reads").expect("a job").execution;
        assert_eq!(now.lease_expires_at > job.execution.lease_expires_at, index != 42, "claim {index}");
    }
    hold.abort_transaction().await.expect("aborts");
    assert_eq!(backend.extend_leases(&held[42..43], longer).await.expect("beats"), [Beat::Extended]);
    place.gone().await;
}

/// Of a batch, all are settled but the one that is held; that is told apart, as not applied.
#[tokio::test]
async fn a_batch_does_not_wait_for_the_one_that_is_held() {
    let Some((place, backend)) = setup().await else { return };
    let claimed = running(&backend, 60).await;
    let mut hold = place.hold(claimed[17].id()).await;
    let updates: Vec<_> = claimed.iter().map(|job| decide(job, &complete("1"))).collect();
    let error = assert_error(backend.update_many_if_current(&updates).await, ErrorKind::Transient, NotApplied);
    assert_eq!(error.index(), Some(17));
    let counts = backend.counts().await.expect("counts");
    let completed = counts.iter().find(|count| count.state == Some(JobState::Completed));
    assert_eq!(completed.map(|count| count.jobs), Some(59));

    let mut decisions: Vec<_> =
        claimed.iter().map(|job| Decision::new(&job.execution, &complete("1")).expect("legal")).collect();
    let settled = Transitioner::new(&backend).submit_all(&mut decisions[17..18]).await;
    assert!(matches!(&settled[0], Err(TransitionError::Backend(error)) if error.certainty() == NotApplied));
    hold.abort_transaction().await.expect("aborts");
    let settled = Transitioner::new(&backend).submit(&mut decisions[17]).await.expect("settles");
    assert!(matches!(settled, Settled::Applied(_)));
    place.gone().await;
}

/// Others' open transactions may keep a key for a while; whoever wants it waits, and is told in the end.
#[tokio::test]
async fn a_key_that_is_in_an_open_transaction() {
    let Some((place, _)) = setup().await else { return };
    let options = place.options().lock_timeout(Duration::from_millis(300));
    let backend = MongoBackend::connect_with(options).await.expect("connects");
    let mut session = begin(&backend).await;
    let first = keyed("k");
    backend.enqueue_in(&mut session, std::slice::from_ref(&first)).await.expect("stores");
    let twin = keyed("k");
    let answer = backend.enqueue(std::slice::from_ref(&twin)).await;
    assert_error(answer, ErrorKind::Transient, NotApplied);
    // Those before it in the same call are stored, and the call says that it does not know.
    let batch = [job("1"), twin.clone(), job("2")];
    let answer = backend.enqueue(&batch).await;
    assert_error(answer, ErrorKind::Transient, Certainty::Unknown);
    session.commit_transaction().await.expect("commits");
    let outcomes = backend.enqueue(&batch).await.expect("outcomes");
    assert!(matches!(outcomes[0], Enqueued::Existing(_)), "{outcomes:?}");
    assert_eq!(outcomes[1], Enqueued::Duplicate { existing: first.id });
    place.gone().await;
}

/// Level-triggered; and, through the change stream, by what others do, in transactions too.
#[tokio::test]
async fn workers_are_woken_by_what_makes_work() {
    let Some((place, backend)) = setup().await else { return };
    let quiet = MongoBackend::connect_with(place.options().change_streams(false)).await.expect("connects");
    let queues = [name("mail")];
    let wakes = async |transition: Option<(&Execution, Transition)>| {
        let mut wait = quiet.wait_for_work(&queues);
        assert!(poll_once(&mut wait).await.is_none());
        match transition {
            Some((seen, transition)) => {
                Transitioner::new(&quiet).apply(seen, &transition).await.expect("settles");
            }
            None => drop(quiet.enqueue(&[job("1")]).await.expect("stores")),
        }
        poll_once(&mut wait).await.is_some()
    };
    assert!(wakes(None).await, "a job is new");
    let claimed = claim_one(&quiet).await;
    assert!(wakes(Some((&claimed.execution, Transition::Release))).await, "a job is given back");
    let claimed = claim_one(&quiet).await;
    assert!(!wakes(Some((&claimed.execution, complete("1")))).await, "a job is done");

    // What another handle does, whatever the form: an insert, an update, a batch, a commit.
    let jobs = running(&backend, 4).await;
    backend.wait_for_work(&queues).await.expect("is woken when the stream begins");
    for step in 0..5 {
        let mut wait = backend.wait_for_work(&queues);
        while poll_once(&mut wait).await.is_some() {
            wait = backend.wait_for_work(&queues);
        }
        let release = |job: &Job| decide(job, &Transition::Release);
        match step {
            0 => drop(quiet.enqueue(&[job("1")]).await.expect("stores")),
            1 => {
                let UpdateRequest { id, current, patch } = release(&jobs[0]);
                quiet.update_if_current(id, &current, &patch).await.expect("releases");
            }
            2 => {
                let updates = [release(&jobs[1]), release(&jobs[2])];
                quiet.update_many_if_current(&updates).await.expect("releases");
            }
            _ => {
                let mut session = begin(&quiet).await;
                if step == 3 {
                    quiet.enqueue_in(&mut session, &[job("1")]).await.expect("stores");
                } else {
                    let UpdateRequest { id, current, patch } = release(&jobs[3]);
                    quiet.update_if_current_in(&mut session, id, &current, &patch).await.expect("releases");
                }
                session.commit_transaction().await.expect("commits");
            }
        }
        let woken = tokio::time::timeout(Duration::from_secs(20), wait).await;
        woken.unwrap_or_else(|_| panic!("step {step} woke nobody")).expect("wakes");
    }
    place.gone().await;
}

/// F6: the stream is opened anew, and then wakes for each job again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_stream_that_is_cut_comes_back() {
    let Some((place, _)) = setup().await else { return };
    let quiet = MongoBackend::connect_with(place.options().change_streams(false)).await.expect("connects");
    let server = place.raw.client().database("admin").run_command(doc! { "hello": 1 }).await.expect("answers");
    let proxy = Proxy::start(server.get_str("primary").expect("a primary")).await.expect("starts");
    let url = format!("mongodb://127.0.0.1:{}/?directConnection=true&heartbeatFrequencyMS=500", proxy.port());
    let options = MongoOptions::from_url(url).expect("a URL").database(place.raw.name()).expect("a name");
    let backend = MongoBackend::connect_with(options).await.expect("connects");
    let queues = [name("mail")];
    backend.wait_for_work(&queues).await.expect("is woken when the stream begins");
    for _ in 0..2 {
        proxy.cut();
        for _ in 0..3 {
            let mut wait = backend.wait_for_work(&queues);
            while poll_once(&mut wait).await.is_some() {
                wait = backend.wait_for_work(&queues);
            }
            // A resumed stream misses nothing, and one that is new wakes everybody once.
            quiet.enqueue(&[job("1")]).await.expect("stores");
            let woken = tokio::time::timeout(Duration::from_secs(20), wait).await;
            woken.expect("somebody is woken").expect("wakes");
        }
    }
    place.gone().await;
}
