//! Leases: kept by heartbeats, lost to others, recovered.

use std::sync::Arc;
use std::time::Duration;

use fenced_queue::contract::*;
use fenced_queue::*;
use tokio::sync::Notify;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::common::*;

on_each_store! {
    heartbeats_keep_the_job_of_a_long_handler
    a_lost_lease_fires_the_token_and_the_late_result_is_not_recorded
    a_handler_learns_why_its_job_was_canceled
    the_jobs_of_a_worker_that_dies_are_recovered
    a_frozen_worker_is_told_and_its_late_result_refused
    a_claim_whose_answer_is_lost_is_given_back_with_its_attempt
    an_outcome_that_cannot_be_recorded_is_covered_for_one_more_lease
}

/// A worker whose handlers hand out their contexts, and end when they are told to.
fn worker(store: &Arc<Store>) -> (WorkerBuilder, mpsc::UnboundedReceiver<JobContext>, Arc<Notify>) {
    let (started, contexts) = mpsc::unbounded_channel();
    let end = Arc::new(Notify::new());
    let handler = {
        let end = Arc::clone(&end);
        move |context: JobContext, _: Add| {
            let (started, end) = (started.clone(), Arc::clone(&end));
            async move {
                // The test may have seen enough.
                let _ = started.send(context);
                end.notified().await;
                Ok("late")
            }
        }
    };
    (Worker::builder(&store.queue()).lease(store.lease).register(handler), contexts, end)
}

fn quick(store: &Arc<Store>) -> Running {
    let handler = async |_: JobContext, _: Add| Ok("quick");
    Running::start(Worker::builder(&store.queue()).lease(store.lease).register(handler).build().expect("a worker"))
}

async fn heartbeats_keep_the_job_of_a_long_handler(store: Arc<Store>) {
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let (builder, mut contexts, end) = worker(&store);
    let running = Running::start(builder.build().expect("a worker"));
    let context = contexts.recv().await.expect("it starts");
    let other = store.another();
    let sweeper = quick(&other);
    let deadline = context.lease_deadline();
    store.until_calls(Op::Beat, 6).await;
    other.until_calls(Op::Stale, 3).await;
    assert!(context.lease_deadline() > deadline, "the deadline moves with the heartbeats");
    assert!(!context.cancel_token().is_canceled());
    end.notify_one();
    let job = store.until_state(id, JobState::Completed).await;
    assert_eq!((job.execution.fence, job.result.expect("a result").as_str()), (1, "\"late\""));
    let (report, swept) = (running.stop().await, sweeper.stop().await);
    assert_eq!((report.completed, report.lost, swept.claimed), (1, 0, 0));
}

/// A3
async fn a_lost_lease_fires_the_token_and_the_late_result_is_not_recorded(store: Arc<Store>) {
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let (builder, mut contexts, end) = worker(&store);
    let running = Running::start(builder.concurrency(1).build().expect("a worker"));
    let context = contexts.recv().await.expect("it starts");

    // Somebody takes the job away and gives it to another worker.
    let other = store.another();
    let taken = Transitioner::new(&*other).apply(context.execution(), &Transition::Release).await;
    let taken = taken.expect("released").execution().to_string();
    let theirs = claim_one(&other).await;
    assert_eq!((theirs.id(), theirs.execution.fence), (id, 2));

    // A heartbeat may come between the two.
    let CancelReason::LeaseLost { now } = context.cancel_token().canceled().await else { panic!("its lease is lost") };
    assert!([taken, theirs.execution.to_string()].contains(&now), "{now}");
    let before = store.job(id).await;
    end.notify_one();
    store.until_calls(Op::Update, 1).await;
    let report = running.stop().await;
    assert_eq!((report.lost, report.conflicts, report.completed, report.left), (1, 1, 0, 0));
    assert_eq!(store.job(id).await, before, "their row is as it was");
}

async fn a_handler_learns_why_its_job_was_canceled(store: Arc<Store>) {
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let (builder, mut contexts, end) = worker(&store);
    let running = Running::start(builder.build().expect("a worker"));
    let context = contexts.recv().await.expect("it starts");
    store.another().queue().cancel(id, "the order was withdrawn").await.expect("canceled");
    let reason = context.cancel_token().canceled().await;
    assert_eq!(reason, CancelReason::Canceled { reason: "the order was withdrawn".into() });
    end.notify_one();
    let report = running.stop().await;
    assert_eq!((report.conflicts, report.completed), (1, 0));
    assert_eq!(store.job(id).await.state(), JobState::Canceled);
}

/// C5, C9
async fn the_jobs_of_a_worker_that_dies_are_recovered(store: Arc<Store>) {
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let dying = store.another();
    let (builder, mut contexts, _end) = worker(&dying);
    let running = Running::start(builder.name("web-1").build().expect("a worker"));
    let context = contexts.recv().await.expect("it starts");
    running.kill().await;
    let beats = dying.calls(Op::Beat);

    let handler = async |_: JobContext, _: Add| Ok("quick");
    let builder = Worker::builder(&store.queue()).name("web-1").lease(store.lease).register(handler);
    let successor = Running::start(builder.build().expect("a worker"));
    let job = store.until_state(id, JobState::Completed).await;
    assert_eq!((job.execution.attempt, job.execution.fence), (2, 2), "nobody can tell how far the first one came");
    assert_eq!(job.errors[0].text.as_str(), "lease expired");
    assert_eq!(job.errors[0].worker, context.execution().claimed_by);
    assert_eq!(dying.calls(Op::Beat), beats, "the heartbeat died with its worker");
    assert!(contexts.recv().await.is_none(), "and so did its handlers");
    assert_eq!(successor.stop().await.recovered, 1);
}

/// C4
async fn a_frozen_worker_is_told_and_its_late_result_refused(store: Arc<Store>) {
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let frozen = store.another();
    let (builder, mut contexts, end) = worker(&frozen);
    let running = Running::start(builder.concurrency(1).build().expect("a worker"));
    let context = contexts.recv().await.expect("it starts");
    for op in [Op::Beat, Op::Stale, Op::ClaimedBy] {
        frozen.refuse(op, usize::MAX, lost);
    }
    assert_eq!(context.cancel_token().canceled().await, CancelReason::LeaseUncertain);

    let other = quick(&store);
    let job = store.until_state(id, JobState::Completed).await;
    frozen.mend();
    frozen.until(async || context.cancel_token().reason() != Some(CancelReason::LeaseUncertain)).await;
    let reason = context.cancel_token().reason().expect("a reason");
    assert!(matches!(&reason, CancelReason::LeaseLost { now } if now.contains("completed, fence 2")), "{reason}");
    end.notify_one();
    let (report, theirs) = (running.stop().await, other.stop().await);
    assert_eq!((report.conflicts, report.completed, theirs.completed), (1, 0, 1));
    assert_eq!(store.job(id).await, job);
    assert_eq!(job.result.expect("a result").as_str(), "\"quick\"");
}

/// B10, C18
async fn a_claim_whose_answer_is_lost_is_given_back_with_its_attempt(store: Arc<Store>) {
    store.lose_answer(Op::Claim, 1, lost);
    let orphan = store.queue().enqueue(&ADD).max_attempts(1).await.expect("stored").id();
    let (builder, mut contexts, end) = worker(&store);
    let running = Running::start(builder.build().expect("a worker"));
    store.until_state(orphan, JobState::Running).await;
    // This one is held, and must not be taken for an orphan.
    let held = store.queue().enqueue(&ADD).await.expect("stored").id();
    let mut started: Vec<_> = Vec::new();
    while started.len() < 2 {
        started.push(contexts.recv().await.expect("it starts").id());
    }
    assert_eq!(started, [held, orphan]);
    end.notify_one();
    end.notify_waiters();
    end.notify_one();
    let job = store.until_state(orphan, JobState::Completed).await;
    assert_eq!((job.execution.attempt, job.execution.fence, job.errors.len()), (1, 2, 0));
    end.notify_one();
    let report = running.stop().await;
    assert_eq!((report.released, report.recovered, report.completed), (1, 0, 2));
    assert_eq!(store.job(held).await.execution.fence, 1);
}

/// C8
async fn an_outcome_that_cannot_be_recorded_is_covered_for_one_more_lease(store: Arc<Store>) {
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let broken = store.another();
    broken.refuse(Op::Update, usize::MAX, lost);
    let (builder, mut contexts, end) = worker(&broken);
    let running = Running::start(builder.concurrency(1).build().expect("a worker"));
    contexts.recv().await.expect("it starts");
    broken.refuse(Op::Claim, usize::MAX, lost);
    end.notify_one();
    broken.until_calls(Op::Update, 1).await;
    let (beats, since) = (broken.calls(Op::Beat), Instant::now());
    broken.until_calls(Op::Beat, beats + 2).await;
    assert!(since.elapsed() < store.lease, "the pending outcome is beaten for");

    let other = quick(&store);
    let job = store.until_state(id, JobState::Completed).await;
    assert!(since.elapsed() > store.lease.mul_f64(1.3), "recovered after {:?}", since.elapsed());
    assert_eq!((job.execution.fence, job.result.expect("a result").as_str()), (2, "\"quick\""));
    other.stop().await;
    let report = running.stop().await;
    assert_eq!((report.unrecorded, report.completed, report.left), (1, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn one_heartbeat_is_for_all_held_jobs() {
    let store = Store::memory();
    let queue = store.queue();
    let jobs: Vec<_> = (0..50).map(|_| queue.enqueue(&ADD).into_job().expect("good")).collect();
    queue.enqueue_many(&jobs).await.expect("stored");
    let (builder, mut contexts, end) = worker(&store);
    let running = Running::start(builder.concurrency(50).build().expect("a worker"));
    for _ in 0..50 {
        contexts.recv().await.expect("it starts");
    }
    let since = Instant::now();
    store.until_calls(Op::Beat, 9).await;
    assert!(since.elapsed() > store.lease * 2, "{:?} for 9 beats", since.elapsed());
    end.notify_waiters();
    assert_eq!(running.stop().await.completed, 50);
}

/// C2
#[tokio::test(start_paused = true)]
async fn a_failed_heartbeat_is_no_loss_and_is_not_repeated() {
    let store = Store::memory();
    store.queue().enqueue(&ADD).await.expect("stored");
    let (builder, mut contexts, end) = worker(&store);
    let running = Running::start(builder.build().expect("a worker"));
    let context = contexts.recv().await.expect("it starts");
    for error in [lost as fn() -> Error, broken] {
        store.refuse(Op::Beat, 1, error);
        let beats = store.calls(Op::Beat);
        store.until_calls(Op::Beat, beats + 1).await;
        let since = Instant::now();
        store.until_calls(Op::Beat, beats + 2).await;
        assert!(since.elapsed() >= store.lease / 3, "the next beat came after {:?}", since.elapsed());
    }
    // One that was certainly not applied is.
    store.refuse(Op::Beat, 1, busy);
    let beats = store.calls(Op::Beat);
    store.until_calls(Op::Beat, beats + 1).await;
    let since = Instant::now();
    store.until_calls(Op::Beat, beats + 2).await;
    assert!(since.elapsed() < Duration::from_millis(100), "the beat was repeated after {:?}", since.elapsed());
    assert!(!context.cancel_token().is_canceled());
    end.notify_one();
    assert_eq!(running.stop().await.completed, 1);
}

/// C6b
#[tokio::test(start_paused = true)]
async fn a_row_that_somebody_has_locked_is_not_lost() {
    let store = Store::memory();
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let (builder, mut contexts, end) = worker(&store);
    let running = Running::start(builder.build().expect("a worker"));
    let context = contexts.recv().await.expect("it starts");
    store.reference().edit(|rows| rows.get_mut(&id).expect("there").locked = true);
    let beats = store.calls(Op::Beat);
    store.until_calls(Op::Beat, beats + 1).await;
    store.reference().edit(|rows| rows.get_mut(&id).expect("there").locked = false);
    store.until_calls(Op::Beat, beats + 6).await;
    assert!(!context.cancel_token().is_canceled());
    end.notify_one();
    assert_eq!(running.stop().await.completed, 1);
}

/// Design 6, local deadline
#[tokio::test(start_paused = true)]
async fn a_lease_that_is_not_renewed_in_time_is_uncertain_and_the_outcome_still_offered() {
    let store = Store::memory();
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    store.refuse(Op::Beat, usize::MAX, lost);
    let since = Instant::now();
    let (builder, mut contexts, end) = worker(&store);
    let running = Running::start(builder.build().expect("a worker"));
    let context = contexts.recv().await.expect("it starts");
    assert_eq!(context.cancel_token().canceled().await, CancelReason::LeaseUncertain);
    let after = since.elapsed();
    assert!(store.lease <= after && after < store.lease + Duration::from_millis(50), "{after:?}");
    end.notify_one();
    store.until_state(id, JobState::Completed).await;
    assert_eq!(running.stop().await.completed, 1);
}

/// C3
#[tokio::test(start_paused = true)]
async fn after_an_outage_a_living_worker_keeps_its_jobs() {
    let store = Store::memory();
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let (builder, mut contexts, end) = worker(&store);
    let running = Running::start(builder.build().expect("a worker"));
    contexts.recv().await.expect("it starts");
    // Many times, since either of beat and sweep may come first.
    for _ in 0..10 {
        for op in [Op::Beat, Op::Stale, Op::ClaimedBy, Op::Claim, Op::Update] {
            store.refuse(op, usize::MAX, lost);
        }
        let beats = store.calls(Op::Beat);
        store.until_calls(Op::Beat, beats + 6).await;
        store.mend();
        let sweeps = store.calls(Op::Stale);
        store.until_calls(Op::Stale, sweeps + 3).await;
    }
    end.notify_one();
    let job = store.until_state(id, JobState::Completed).await;
    assert_eq!(job.execution.fence, 1);
    let report = running.stop().await;
    assert_eq!((report.recovered, report.lost, report.completed), (0, 0, 1));
}

/// S10: what a claim brings is no orphan while the claim has not been answered.
#[tokio::test(start_paused = true)]
async fn a_claim_under_way_is_not_taken_for_an_orphan() {
    let store = Store::memory();
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let gate = store.gate(Op::Claim);
    let running = quick(&store);
    gate.reached().await;
    // Past the grace, and within the lease.
    store.until_calls(Op::ClaimedBy, 2).await;
    gate.open();
    let job = store.until_state(id, JobState::Completed).await;
    assert_eq!(job.execution.fence, 1);
    let report = running.stop().await;
    assert_eq!((report.completed, report.released, report.conflicts), (1, 0, 0));
}

/// C20, S18
#[tokio::test(start_paused = true)]
async fn a_claim_that_is_answered_after_its_lease_runs_only_if_a_heartbeat_renews_it() {
    for taken in [false, true] {
        let store = Store::memory();
        let id = store.queue().enqueue(&ADD).await.expect("stored").id();
        let slow = store.another();
        slow.refuse(Op::Stale, usize::MAX, broken);
        let gate = slow.gate(Op::Claim);
        let (builder, mut contexts, end) = worker(&slow);
        let running = Running::start(builder.build().expect("a worker"));
        gate.reached().await;
        tokio::time::advance(store.lease + Duration::from_secs(1)).await;
        if taken {
            let other = quick(&store);
            store.until_state(id, JobState::Completed).await;
            other.stop().await;
        }
        gate.open();
        slow.until_calls(Op::Beat, 1).await;
        if !taken {
            assert_eq!(contexts.recv().await.expect("it starts").id(), id);
            end.notify_one();
            slow.until_state(id, JobState::Completed).await;
        }
        let report = running.stop().await;
        assert_eq!((report.completed, report.conflicts, report.left), (u64::from(!taken), 0, 0));
        assert!(contexts.try_recv().is_err(), "it ran no more than once");
    }
}

/// A4: the same worker claims its own recovered job again, before it knows of the loss.
#[tokio::test(start_paused = true)]
async fn a_job_that_comes_again_is_lost_to_its_first_handler() {
    let store = Store::memory();
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let (builder, mut contexts, end) = worker(&store);
    let running = Running::start(builder.concurrency(2).build().expect("a worker"));
    let first = contexts.recv().await.expect("it starts");
    let released = Transitioner::new(&*store.another()).apply(first.execution(), &Transition::Release).await;
    released.expect("released");
    let second = contexts.recv().await.expect("it starts");
    assert_eq!((first.fence(), second.fence(), second.id()), (1, 2, id));
    assert!(matches!(first.cancel_token().canceled().await, CancelReason::LeaseLost { .. }));
    assert!(!second.cancel_token().is_canceled());
    end.notify_waiters();
    let report = running.stop().await;
    assert_eq!((report.completed, report.conflicts), (1, 1));
    assert_eq!(store.job(id).await.execution.fence, 2);
}
