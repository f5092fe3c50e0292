//! Which calls a worker makes again after an error, and that there is one outcome.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use fenced_queue::contract::*;
use fenced_queue::*;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::common::*;

on_each_store! {
    an_outcome_is_repeated_with_its_revision_while_the_store_is_busy
    an_outcome_whose_answer_is_lost_is_recognised
    an_outcome_that_gets_no_answer_is_sent_again
    what_cannot_be_recorded_at_all_is_left_to_recovery
    conflicts_are_counted_and_quiet
    failing_claims_and_sweeps_do_not_stop_a_worker
}

fn start(store: &Arc<Store>) -> Running {
    let handler = async |_: JobContext, _: Add| Ok("done");
    Running::start(Worker::builder(&store.queue()).lease(store.lease).register(handler).build().expect("a worker"))
}

/// The revisions that were to be written to this job.
fn revisions(store: &Store, id: JobId) -> Vec<Revision> {
    let updates = store.updates.lock().expect("lock");
    updates.iter().filter(|update| update.id == id).filter_map(|update| update.patch.revision).collect()
}

async fn an_outcome_is_repeated_with_its_revision_while_the_store_is_busy(store: Arc<Store>) {
    store.refuse(Op::Update, 5, busy);
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let running = start(&store);
    let job = store.until_state(id, JobState::Completed).await;
    let report = running.stop().await;
    assert_eq!((report.completed, report.claimed), (1, 1));
    let revisions = revisions(&store, id);
    assert_eq!(revisions.len(), 6);
    assert!(revisions.iter().all(|revision| *revision == job.execution.revision), "{revisions:?}");
}

/// A13, S11
async fn an_outcome_whose_answer_is_lost_is_recognised(store: Arc<Store>) {
    store.lose_answer(Op::Update, 3, lost);
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let running = start(&store);
    let job = store.until_state(id, JobState::Completed).await;
    let report = running.stop().await;
    assert_eq!((report.completed, report.conflicts, report.unrecorded, report.claimed), (1, 0, 0, 1));
    let revisions: HashSet<_> = revisions(&store, id).into_iter().collect();
    assert_eq!(revisions, HashSet::from([job.execution.revision]), "one decision, one revision");
    assert!(store.calls(Op::Update) >= 3);
}

async fn an_outcome_that_gets_no_answer_is_sent_again(store: Arc<Store>) {
    let _never_opened = store.gate(Op::Update);
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let running = start(&store);
    store.until_calls(Op::Update, 2).await;
    let report = running.stop().await;
    // A beat in between found the job settled: only the answer to the outcome judges.
    assert_eq!((report.completed, report.conflicts, report.lost, report.unrecorded, report.claimed), (1, 0, 0, 0, 1));
    let job = store.job(id).await;
    assert!(revisions(&store, id).iter().all(|revision| *revision == job.execution.revision));
}

async fn what_cannot_be_recorded_at_all_is_left_to_recovery(store: Arc<Store>) {
    // The batch, then the row by itself.
    store.refuse(Op::Update, 2, broken);
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let running = start(&store);
    let job = store.until_state(id, JobState::Completed).await;
    assert_eq!((job.execution.fence, job.errors[0].text.as_str()), (2, "lease expired"));
    let report = running.stop().await;
    assert_eq!((report.unrecorded, report.recovered, report.completed), (1, 1, 1));
}

/// A14
async fn conflicts_are_counted_and_quiet(store: Arc<Store>) {
    let queue = store.queue();
    let jobs: Vec<_> = (0..50).map(|_| queue.enqueue(&ADD).into_job().expect("good")).collect();
    queue.enqueue_many(&jobs).await.expect("stored");
    let operator = store.another().queue();
    let handler = move |context: JobContext, _: Add| {
        let operator = operator.clone();
        async move {
            if context.execution().max_attempts.get() == 20 {
                operator.cancel(context.id(), "withdrawn").await?;
            }
            Ok("done")
        }
    };
    let builder = Worker::builder(&queue).lease(store.lease).concurrency(50).register(handler);
    let running = Running::start(builder.build().expect("a worker"));
    for job in &jobs {
        store.until_state(job.id, JobState::Canceled).await;
    }
    let after = queue.enqueue(&ADD).max_attempts(1).await.expect("stored").id();
    store.until_state(after, JobState::Completed).await;
    let report = running.stop().await;
    assert_eq!((report.conflicts, report.completed, report.unrecorded, report.left), (50, 1, 0, 0));
}

async fn failing_claims_and_sweeps_do_not_stop_a_worker(store: Arc<Store>) {
    for op in [Op::Claim, Op::Stale, Op::ClaimedBy] {
        store.refuse(op, 3, broken);
    }
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let running = start(&store);
    store.until_state(id, JobState::Completed).await;
    store.until_calls(Op::Stale, 4).await;
    assert_eq!(running.stop().await.completed, 1);
}

/// A18: one row that cannot be written does not keep the others back.
#[tokio::test(start_paused = true)]
async fn one_bad_row_does_not_keep_the_outcomes_of_others_back() {
    let store = Store::memory();
    let queue = store.queue();
    let jobs: Vec<_> = (0..10).map(|_| queue.enqueue(&ADD).into_job().expect("good")).collect();
    queue.enqueue_many(&jobs).await.expect("stored");
    store.reference().edit(|rows| rows.get_mut(&jobs[3].id).expect("there").poisoned = true);
    let running = start(&store);
    for job in jobs.iter().filter(|job| job.id != jobs[3].id) {
        store.until_state(job.id, JobState::Completed).await;
    }
    let report = running.stop().await;
    assert_eq!((report.completed, report.unrecorded), (9, 1));
}

/// S14
#[tokio::test(start_paused = true)]
async fn a_claim_is_repeated_if_the_store_was_busy_and_never_if_its_outcome_is_unknown() {
    for (error, repeated) in [(busy as fn() -> Error, true), (lost, false)] {
        let store = Store::memory();
        let running = start(&store);
        // By now the pauses between polls are long.
        store.until_calls(Op::Claim, 20).await;
        store.refuse(Op::Claim, 1, error);
        let id = store.queue().enqueue(&ADD).await.expect("stored").id();
        store.until_calls(Op::Claim, 21).await;
        let since = Instant::now();
        store.until_state(id, JobState::Completed).await;
        let soon = since.elapsed() < Duration::from_millis(100);
        assert_eq!(soon, repeated, "{} after {:?}", error(), since.elapsed());
        running.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn outcomes_that_cannot_be_recorded_hold_their_slots_in_the_end() {
    let store = Store::memory();
    let queue = store.queue();
    let jobs: Vec<_> = (0..1_100).map(|_| queue.enqueue(&ADD).into_job().expect("good")).collect();
    queue.enqueue_many(&jobs).await.expect("stored");
    store.refuse(Op::Update, usize::MAX, || Error::not_applied(ErrorKind::Unavailable, "read only"));
    let running = start(&store);
    store.until_calls(Op::Beat, 2).await;
    let claimed = jobs.len()
        - store.reference().edit(|rows| rows.values().filter(|row| row.job.state() == JobState::Waiting).count());
    assert!((1_000..1_050).contains(&claimed), "{claimed} jobs are held");
    store.mend();
    let report = running.stop().await;
    assert_eq!((report.unrecorded, report.left), (0, 0));
    assert_eq!(report.completed, report.claimed - report.released);
}

/// Dropping the future of a worker ends its handlers.
#[tokio::test(start_paused = true)]
async fn a_worker_that_is_dropped_leaves_nothing_running() {
    struct Told(Arc<Notify>);
    impl Drop for Told {
        fn drop(&mut self) {
            self.0.notify_one();
        }
    }
    let store = Store::memory();
    let (dropped, started) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let handler = {
        let (dropped, started) = (Arc::clone(&dropped), Arc::clone(&started));
        move |_: JobContext, _: Add| {
            let (told, started) = (Told(Arc::clone(&dropped)), Arc::clone(&started));
            async move {
                let _told = told;
                started.notify_one();
                std::future::pending::<()>().await;
                Ok(())
            }
        }
    };
    let worker = Worker::builder(&store.queue()).register(handler).build().expect("a worker");
    store.queue().enqueue(&ADD).await.expect("stored");
    tokio::select! {
        _ = worker.run_until(std::future::pending::<()>()) => {}
        () = started.notified() => {}
    }
    dropped.notified().await;
    let calls = store.all_calls();
    tokio::time::advance(Duration::from_secs(600)).await;
    tokio::task::yield_now().await;
    assert_eq!(store.all_calls(), calls);
}

/// A bug in a backend must not turn a worker into one that claims, runs and records nothing.
#[tokio::test(start_paused = true)]
async fn a_panicking_backend_ends_the_worker_with_its_panic() {
    for op in [Op::Update, Op::Claim, Op::Beat, Op::Stale] {
        let store = Store::memory();
        store.refuse(op, 1, || panic!("a bug in the backend"));
        let handler = async |_: JobContext, _: Add| {
            tokio::time::sleep(Duration::from_secs(20)).await;
            Ok(())
        };
        store.queue().enqueue(&ADD).await.expect("stored");
        let worker = Worker::builder(&store.queue()).register(handler).build().expect("a worker");
        let run = tokio::spawn(worker.run_until(std::future::pending::<()>()));
        let ended = tokio::time::timeout(Duration::from_secs(600), run).await.expect("it ends");
        let panic = ended.expect_err("it panics").into_panic();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"a bug in the backend"), "{op:?}");
    }
}
