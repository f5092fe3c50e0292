//! Futures dropped in the middle. (A15)

mod common;

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use backend_postgres::PostgresBackend;
use common::*;
use queue_conformance::Direction;
use queue_conformance::Proxy;
use queue_core::*;
use sqlx::postgres::PgPoolOptions;

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

/// Both handles write, so nobody holds a lock; and both see it, so nobody is in a transaction of yesterday.
async fn assert_whole(backend: &PostgresBackend, other: &PostgresBackend) {
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

/// What was dropped while it held the event or the job holds neither, and is not in the way of whoever does the same.
async fn waits_and_hands_over(polls: usize, backend: &PostgresBackend, other: &PostgresBackend, seen: &Execution) {
    let key = name(&format!("paid {}", seen.id));
    drop_after(polls, begin_step(backend, seen, &name("charge"))).await;
    let mut suspension =
        Suspension::new(seen, name("pay"), Some(key.clone()), When::At(Timestamp::MAX)).expect("legal");
    drop_after(polls, suspension.submit(backend)).await;
    assert_whole(backend, other).await;
    let event = NewEvent { key, payload: Json::null(), keep: Delay::MAX };
    drop_after(polls, backend.emit(&event)).await;
    drop_after(polls, backend.time_out_waits(limit(5))).await;
    drop_after(polls, backend.purge_events(limit(5))).await;
    assert_whole(backend, other).await;
    other.emit(&event).await.expect("nobody holds the event");
    let answer = suspension.submit(other).await;
    assert!(!matches!(answer, Err(StepError::Transition(TransitionError::Backend(_)))), "nobody holds it: {answer:?}");
    let mut hand_over = HandOver::new(seen, None, job("1")).expect("legal");
    drop_after(polls, hand_over.submit(backend)).await;
    assert_whole(backend, other).await;
}

async fn dropped_calls(scratch: &Scratch, backend: PostgresBackend) {
    let other = scratch.connect().await;
    for polls in 1..=20 {
        let jobs: Vec<_> = (0..20).map(|_| job("1")).collect();
        let ended = drop_after(polls, backend.enqueue(&jobs)).await;
        assert_whole(&backend, &other).await;
        // What was dropped may still be on its way; what is repeated waits for it.
        backend.enqueue(&jobs).await.expect("is repeated");
        let mut stored = 0;
        for job in &jobs {
            stored += usize::from(other.get(job.id).await.expect("reads").is_some());
        }
        assert_eq!(stored, 20, "after {polls} polls, ended {ended}");

        drop_after(polls, backend.claim(&request(5))).await;
        assert_whole(&backend, &other).await;
        let claimed = backend.claim(&request(10)).await.expect("claims").jobs;
        let updates: Vec<_> = claimed.iter().map(decide).collect();
        drop_after(polls, backend.update_many_if_current(&updates)).await;
        assert_whole(&backend, &other).await;
        // The same again says which way it went: for all of them the same.
        let answers = backend.update_many_if_current(&updates).await.expect("is repeated");
        let applied = answers.iter().filter(|answer| matches!(answer, Update::Applied(_))).count();
        assert!(applied == 0 || applied == updates.len(), "{applied} after {polls} polls");

        let UpdateRequest { id, current, patch } = &updates[0];
        drop_after(polls, backend.update_if_current(*id, current, patch)).await;
        drop_after(polls, backend.purge(JobState::Completed, Delay::ZERO, limit(5))).await;
        drop_after(polls, backend.counts()).await;
        drop_after(polls, backend.migrate()).await;
        assert_whole(&backend, &other).await;
        let claimed = claimed.last().expect("five at least");
        waits_and_hands_over(polls, &backend, &other, &claimed.execution).await;
    }
}

#[tokio::test]
async fn a_dropped_call_is_whole_or_not_at_all_and_leaves_nothing_open() {
    let (scratch, backend) = migrated().await;
    dropped_calls(&scratch, backend).await;
}

#[tokio::test]
async fn neither_on_a_pool_of_one_whose_transactions_are_strict() {
    let (scratch, _backend) = migrated().await;
    let pool = scratch.pool_with(1, &[("default_transaction_isolation", "serializable")]).await;
    let backend = scratch.lent(&pool).await;
    dropped_calls(&scratch, backend).await;
}

/// How many sessions of this name are in a transaction.
fn in_transaction(name: &str) -> String {
    format!(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = '{name}' \
         AND (state = 'idle in transaction' OR state = 'active')"
    )
}

/// The beginning of a transaction is on its way when the call is dropped: what the connection does next must not be part of it.
#[tokio::test]
async fn a_beginning_that_was_dropped_is_no_part_of_what_follows() {
    let (scratch, other) = migrated().await;
    let server = application();
    let proxy = Proxy::start(format!("{}:{}", server.get_host(), server.get_port())).await.expect("a proxy");
    let behind = application().host("127.0.0.1").port(proxy.port()).application_name(scratch.schema.as_str());
    // What is held is the answer to a beginning, not to a test of the connection.
    let pool = PgPoolOptions::new().max_connections(1).test_before_acquire(false).connect_with(behind).await;
    let backend = scratch.lent(&pool.expect("a pool")).await;
    let open = in_transaction(scratch.schema.as_str());
    let jobs = [job("1"), job("2")];
    for _ in 0..3 {
        proxy.hold(Direction::ToClient);
        proxy.until_arrival(Direction::ToClient, backend.enqueue(&jobs)).await;
        proxy.release();
        until(&open, 0).await;
        let after = job("3");
        backend.enqueue(std::slice::from_ref(&after)).await.expect("stores");
        assert!(other.get(after.id).await.expect("reads").is_some(), "committed, and seen by others");
        assert_eq!(other.get(jobs[0].id).await.expect("reads"), None, "the transaction that was dropped is not");
    }
    backend.enqueue(&jobs).await.expect("stores");
}
