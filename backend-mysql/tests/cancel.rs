//! Futures dropped in the middle. (A15)

mod common;

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use backend_mysql::MysqlBackend;
use common::*;
use queue_core::*;

/// Polls a call some times, with what it waits for given a moment each time, and drops it. Whether it ended before.
async fn drop_after(polls: usize, call: impl Future) -> bool {
    let mut call = pin!(call);
    for _ in 0..polls {
        // A poll whenever something happened, and at the latest when nothing did for a moment.
        if tokio::time::timeout(Duration::from_micros(50), &mut call).await.is_ok() {
            return true;
        }
    }
    false
}

/// Both handles write, and both see it, so nobody is in a transaction of yesterday.
async fn assert_whole(backend: &MysqlBackend, other: &MysqlBackend) {
    for (writer, reader) in [(backend, other), (other, backend)] {
        let job = NewJob { queue: name("probe"), ..job("1") };
        writer.enqueue(std::slice::from_ref(&job)).await.expect("stores");
        assert!(reader.get(job.id).await.expect("reads").is_some());
        let request =
            ClaimRequest::new(name("probe"), [name("welcome")], worker(), lease(), limit(1)).expect("a request");
        let claimed = reader.claim(&request).await.expect("claims").jobs.pop().expect("a job");
        Transitioner::new(writer).apply(&claimed.execution, &complete("1")).await.expect("settles");
    }
}

#[tokio::test]
async fn a_dropped_call_is_whole_or_not_at_all_and_leaves_nothing_open() {
    on_each_server(async |database, other| {
        for pooled in [false, true] {
            let level = "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ";
            let backend = match pooled {
                true => MysqlBackend::from_pool(database.pool_of(1, level).await).await.expect("a handle"),
                false => database.connect().await,
            };
            for polls in (1..=40).step_by(2) {
                let jobs: Vec<_> = (0..20).map(|_| job("1")).collect();
                let ended = drop_after(polls, backend.enqueue(&jobs)).await;
                assert_whole(&backend, other).await;
                // A commit that was sent may still be on its way.
                let stored = async || {
                    let mut stored = 0;
                    for job in &jobs {
                        stored += usize::from(other.get(job.id).await.expect("reads").is_some());
                    }
                    stored
                };
                let first = stored().await;
                assert!(first == 20 || !ended, "{first} of 20 after {polls} polls");
                // The same again waits for whatever is left of it, and completes it.
                let again = backend.enqueue(&jobs).await.expect("is repeated");
                let new = again.iter().filter(|outcome| matches!(outcome, Enqueued::New(_))).count();
                assert!(new == 0 || new == 20, "{new} of 20 were new after {polls} polls");
                assert_eq!(stored().await, 20);

                drop_after(polls, backend.claim(&request(5))).await;
                assert_whole(&backend, other).await;
                let claimed = backend.claim(&request(10)).await.expect("claims").jobs;
                let updates: Vec<_> = claimed.iter().map(|job| decide(&job.execution, &complete("1"))).collect();
                drop_after(polls, backend.update_many_if_current(&updates)).await;
                assert_whole(&backend, other).await;
                // All or none: the same decisions again find all of them made, or none.
                let answers = backend.update_many_if_current(&updates).await.expect("updates");
                let made = answers.iter().filter(|answer| matches!(answer, Update::Applied(_))).count();
                assert!(made == 0 || made == updates.len(), "{made} after {polls} polls");
                for update in &updates {
                    let job = other.get(update.id).await.expect("reads").expect("a job");
                    assert_eq!(job.state(), JobState::Completed);
                }

                let UpdateRequest { id, current, patch } = &updates[0];
                drop_after(polls, backend.update_if_current(*id, current, patch)).await;
                drop_after(polls, backend.get(*id)).await;
                drop_after(polls, backend.stale(None, limit(5))).await;
                drop_after(polls, backend.purge(JobState::Completed, Delay::ZERO, limit(5))).await;
                drop_after(polls, backend.migrate()).await;
                assert_whole(&backend, other).await;

                other.enqueue(&[job("1"), job("2")]).await.expect("stores");
                let (waits, ends) = (claim_one(other).await, claim_one(other).await);
                let key = format!("e {polls}");
                let mut wait = Suspension::new(&waits.execution, name("w"), Some(name(&key)), When::At(Timestamp::MAX))
                    .expect("legal");
                drop_after(polls, wait.submit(&backend)).await;
                let waited = wait.submit(other).await.expect("answers");
                assert!(matches!(waited, Suspended::Waits(_)), "after {polls} polls: {waited:?}");
                drop_after(polls, backend.emit(&event(&key, Delay::ZERO))).await;
                other.emit(&event(&key, Delay::ZERO)).await.expect("is kept");
                let woken = other.get(waits.id()).await.expect("reads").expect("a job");
                assert_eq!(woken.state(), JobState::Waiting, "after {polls} polls");
                let cancel = Transition::Cancel { reason: "no".into() };
                Transitioner::new(other).apply(&woken.execution, &cancel).await.expect("cancels");
                let (end, next) = (decide(&ends.execution, &complete("1")), NewJob { queue: name("next"), ..job("1") });
                drop_after(polls, backend.hand_over(&end, &next)).await;
                let (answer, _) = other.hand_over(&end, &next).await.expect("answers");
                let stored = other.get(next.id).await.expect("reads").is_some();
                assert!(stored && !matches!(answer, Update::Missing), "after {polls} polls: {answer:?}");
                drop_after(polls, backend.time_out_waits(limit(5))).await;
                drop_after(polls, backend.purge_events(limit(5))).await;
                drop_after(polls, backend.steps(ends.id())).await;
                assert_whole(&backend, other).await;
            }
            backend.close().await;
        }
    })
    .await;
}

/// F10, and that nothing needs more than one connection at a time.
#[tokio::test]
async fn an_application_lends_its_pool_of_any_size() {
    on_each_server(async |database, _| {
        for connections in [1, 3] {
            let pool = database.pool_of(connections, "SET sql_mode = ''").await;
            let backend = MysqlBackend::from_pool(pool).await.expect("a handle");
            backend.migrate().await.expect("migrates");
            let jobs: Vec<_> = (0..50).map(|_| job("1")).collect();
            backend.enqueue(&jobs).await.expect("stores");
            let work = |backend: MysqlBackend| async move {
                let mut done = 0;
                while let Some(job) = backend.claim(&request(1)).await.expect("claims").jobs.pop() {
                    let held = Held::of(&job.execution).expect("held");
                    assert_eq!(backend.extend_leases(&[held], lease()).await.expect("beats"), [Beat::Extended]);
                    let mut decisions = [Decision::new(&job.execution, &complete("1")).expect("legal")];
                    Transitioner::new(&backend).submit_all(&mut decisions).await.remove(0).expect("settles");
                    done += 1;
                }
                done
            };
            let workers: Vec<_> = (0..4).map(|_| tokio::spawn(work(backend.clone()))).collect();
            let mut done = 0;
            for worker in workers {
                done += worker.await.expect("no panic");
            }
            assert_eq!(done, 50);
            backend.close().await;
        }
    })
    .await;
}
