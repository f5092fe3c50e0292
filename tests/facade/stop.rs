//! Stopping gracefully.

use std::future::pending;
use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use fenced_queue::contract::*;
use fenced_queue::*;
use tokio::sync::Notify;

use crate::common::*;

on_each_store! {
    a_worker_that_is_told_before_it_begins_claims_nothing
    handlers_may_end_within_the_grace
    a_claim_under_way_is_released_and_not_run
    what_does_not_end_in_time_is_given_back_with_its_attempt
    a_handler_that_heeds_its_token_may_still_settle
    outcomes_are_recorded_before_the_end
}

fn worker(store: &Arc<Store>) -> WorkerBuilder {
    Worker::builder(&store.queue()).lease(store.lease)
}

/// F9
async fn a_worker_that_is_told_before_it_begins_claims_nothing(store: Arc<Store>) {
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let handler = async |_: JobContext, _: Add| Ok(());
    let report = worker(&store).register(handler).build().expect("a worker").run_until(ready(())).await;
    assert_eq!((report.claimed, store.calls(Op::Claim)), (0, 0));
    assert_eq!(store.job(id).await.state(), JobState::Waiting);
}

async fn handlers_may_end_within_the_grace(store: Arc<Store>) {
    let queue = store.queue();
    let id = queue.enqueue(&ADD).await.expect("stored").id();
    let (started, end) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let handler = {
        let (started, end) = (Arc::clone(&started), Arc::clone(&end));
        move |context: JobContext, _: Add| {
            let (started, end) = (Arc::clone(&started), Arc::clone(&end));
            async move {
                started.notify_one();
                end.notified().await;
                Ok(context.cancel_token().is_canceled())
            }
        }
    };
    let grace = store.lease * 20;
    let running = Running::start(worker(&store).grace(grace).register(handler).build().expect("a worker"));
    started.notified().await;
    let ended = running.tell();
    // C7: it drains for longer than its lease, and beats go on.
    let beats = store.calls(Op::Beat);
    store.until_calls(Op::Beat, beats + 5).await;
    let late = queue.enqueue(&ADD).await.expect("stored").id();
    end.notify_one();
    let report = ended.await.expect("no panic");
    assert_eq!((report.claimed, report.completed, report.released, report.left), (1, 1, 0, 0));
    let job = store.job(id).await;
    assert_eq!((job.execution.fence, job.result.expect("a result").as_str()), (1, "false"));
    assert_eq!(store.job(late).await.execution.fence, 0, "nothing is claimed any more");
}

/// F9
async fn a_claim_under_way_is_released_and_not_run(store: Arc<Store>) {
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let gate = store.gate(Op::Claim);
    let handler = async |_: JobContext, _: Add| Ok(());
    let worker = worker(&store).register(handler).build().expect("a worker");
    let (stop, told) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let shutdown = {
        let (stop, told) = (Arc::clone(&stop), Arc::clone(&told));
        async move {
            stop.notified().await;
            told.notify_one();
        }
    };
    let running = tokio::spawn(worker.run_until(shutdown));
    gate.reached().await;
    assert_eq!(store.job(id).await.state(), JobState::Running);
    stop.notify_one();
    told.notified().await;
    gate.open();
    let report = running.await.expect("no panic");
    assert_eq!((report.claimed, report.completed, report.released, report.left), (1, 0, 1, 0));
    let job = store.job(id).await;
    assert_eq!((job.state(), job.execution.attempt, job.errors.len()), (JobState::Waiting, 0, 0));
}

/// C15
async fn what_does_not_end_in_time_is_given_back_with_its_attempt(store: Arc<Store>) {
    let id = store.queue().enqueue(&ADD).max_attempts(1).await.expect("stored").id();
    let started = Arc::new(Notify::new());
    let handler = {
        let started = Arc::clone(&started);
        move |_: JobContext, _: Add| {
            let started = Arc::clone(&started);
            async move {
                started.notify_one();
                pending::<()>().await;
                Ok(())
            }
        }
    };
    let builder = worker(&store).grace(Duration::from_millis(10)).register(handler);
    let running = Running::start(builder.build().expect("a worker"));
    started.notified().await;
    let report = running.stop().await;
    assert_eq!((report.released, report.failed, report.left), (1, 0, 0));
    let job = store.job(id).await;
    assert_eq!((job.state(), job.execution.attempt, job.errors.len()), (JobState::Waiting, 0, 0));

    let handler = async |_: JobContext, _: Add| Ok(());
    let successor = Running::start(worker(&store).register(handler).build().expect("a worker"));
    store.until_state(id, JobState::Completed).await;
    successor.stop().await;
}

async fn a_handler_that_heeds_its_token_may_still_settle(store: Arc<Store>) {
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let started = Arc::new(Notify::new());
    let handler = {
        let started = Arc::clone(&started);
        move |context: JobContext, _: Add| {
            let started = Arc::clone(&started);
            async move {
                started.notify_one();
                Ok(context.cancel_token().canceled().await.to_string())
            }
        }
    };
    let running = Running::start(worker(&store).grace(Duration::ZERO).register(handler).build().expect("a worker"));
    started.notified().await;
    let report = running.stop().await;
    assert_eq!((report.completed, report.released), (1, 0));
    assert_eq!(store.job(id).await.result.expect("a result").as_str(), "\"shutdown\"");
}

async fn outcomes_are_recorded_before_the_end(store: Arc<Store>) {
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    store.refuse(Op::Update, 4, busy);
    let handler = async |_: JobContext, _: Add| Ok(());
    let running = Running::start(worker(&store).register(handler).build().expect("a worker"));
    store.until_calls(Op::Update, 1).await;
    assert_eq!(running.stop().await.completed, 1);
    assert_eq!(store.job(id).await.state(), JobState::Completed);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_is_never_answered_does_not_keep_a_worker_from_stopping() {
    let store = Store::memory();
    let gate = store.gate(Op::Claim);
    let handler = async |_: JobContext, _: Add| Ok(());
    let running = Running::start(worker(&store).register(handler).build().expect("a worker"));
    gate.reached().await;
    assert_eq!(running.stop().await, Report::default());
}
