//! What can be said of kinds and queues: timeouts, retries, layers, progress, retention.

use std::future::pending;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use fenced_queue::contract::*;
use fenced_queue::*;
use tokio::sync::Notify;
use tokio::sync::mpsc;
use tokio::sync::oneshot;

use crate::common::*;

on_each_store! {
    progress_is_shown_until_the_job_ends
    progress_of_a_lost_job_is_refused
    each_queue_has_handlers_of_its_own
    old_jobs_are_deleted
}

fn worker(store: &Arc<Store>) -> WorkerBuilder {
    Worker::builder(&store.queue()).lease(store.lease)
}

async fn progress_is_shown_until_the_job_ends(store: Arc<Store>) {
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let (reported, end) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let handler = {
        let (reported, end) = (Arc::clone(&reported), Arc::clone(&end));
        move |context: JobContext, _: Add| {
            let (reported, end) = (Arc::clone(&reported), Arc::clone(&end));
            async move {
                context.progress(&(1, 2)).await?;
                reported.notify_one();
                end.notified().await;
                Ok("all of it")
            }
        }
    };
    let running = Running::start(worker(&store).register(handler).build().expect("a worker"));
    reported.notified().await;
    let job = store.job(id).await;
    assert_eq!((job.state(), job.result.expect("progress").as_str()), (JobState::Running, "[1,2]"));
    end.notify_one();
    let job = store.until_state(id, JobState::Completed).await;
    assert_eq!(job.result.expect("a result").as_str(), "\"all of it\"");
    assert_eq!(running.stop().await.conflicts, 0, "progress is no new moment of the job");
}

/// A3
async fn progress_of_a_lost_job_is_refused(store: Arc<Store>) {
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let (started, mut contexts) = mpsc::unbounded_channel();
    let handler = move |context: JobContext, _: Add| {
        let _ = started.send(context);
        pending::<Result<(), NotDone>>()
    };
    let running = Running::start(worker(&store).concurrency(1).register(handler).build().expect("a worker"));
    let context = contexts.recv().await.expect("it starts");
    let other = store.another();
    Transitioner::new(&*other).apply(context.execution(), &Transition::Release).await.expect("released");
    let theirs = claim_one(&other).await;
    let error = context.progress(&"half").await.expect_err("refused");
    assert!(matches!(error, QueueError::Transition(TransitionError::Conflict(_))), "{error}");
    assert_eq!(store.job(id).await.result, None, "nothing is shown");
    assert_eq!(store.job(id).await.execution.revision, theirs.execution.revision);
    running.kill().await;
}

async fn each_queue_has_handlers_of_its_own(store: Arc<Store>) {
    let queue = store.queue();
    let job = || queue.enqueue(&ADD).queue("slow").into_job().expect("good");
    queue.enqueue_many(&std::iter::repeat_with(job).take(5).collect::<Vec<_>>()).await.expect("stored");
    let end = Arc::new(Notify::new());
    let (started, mut slow) = mpsc::unbounded_channel();
    let handler = {
        let end = Arc::clone(&end);
        move |context: JobContext, _: Add| {
            let (started, end) = (started.clone(), Arc::clone(&end));
            async move {
                if context.queue().as_str() == "slow" {
                    let _ = started.send(context.id());
                    end.notified().await;
                }
                Ok(())
            }
        }
    };
    let builder = worker(&store).queue_with("slow", 2).queue("quick").concurrency(1).register(handler);
    let running = Running::start(builder.build().expect("a worker"));
    let first = [slow.recv().await, slow.recv().await];
    for _ in 0..3 {
        let id = queue.enqueue(&ADD).queue("quick").await.expect("stored").id();
        store.until_state(id, JobState::Completed).await;
    }
    assert!(slow.try_recv().is_err(), "two of the slow ones at once, and no more: {first:?}");
    end.notify_one();
    assert!(slow.recv().await.is_some(), "the next one follows when one has ended");
    end.notify_waiters();
    running.kill().await;
}

async fn old_jobs_are_deleted(store: Arc<Store>) {
    let queue = store.queue();
    let old = queue.enqueue(&ADD).await.expect("stored").id();
    let failed = queue.enqueue(&ADD).max_attempts(1).await.expect("stored").id();
    let handler = move |context: JobContext, _: Add| async move {
        match context.id() == failed {
            true => Err(NotDone::fail("broken")),
            false => Ok(()),
        }
    };
    let builder = worker(&store).retention(JobState::Completed, Duration::ZERO).register(handler);
    let running = Running::start(builder.build().expect("a worker"));
    store.until(async || store.find(old).await.is_none()).await;
    let waiting = queue.enqueue(&ADD).delay(Duration::from_secs(3_600)).await.expect("stored").id();
    let purges = store.calls(Op::Purge);
    store.until_calls(Op::Purge, purges + 2).await;
    assert_eq!(store.job(failed).await.state(), JobState::Failed, "no age was given for this state");
    assert_eq!(store.job(waiting).await.state(), JobState::Waiting);
    assert_eq!(running.stop().await.purged, 1);
}

/// Runs one job of a worker in memory, and answers what became of it.
async fn run_one(register: impl FnOnce(WorkerBuilder) -> WorkerBuilder) -> (Job, Report) {
    let store = Store::memory();
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let retry = RetryPolicy::exponential(Duration::from_secs(1_000), Duration::from_secs(1_000));
    let running = Running::start(register(worker(&store).retry(retry)).build().expect("a worker"));
    store.until_calls(Op::Update, 1).await;
    let report = running.stop().await;
    (store.job(id).await, report)
}

/// C14
#[tokio::test(start_paused = true)]
async fn a_timeout_longer_than_the_lease_fires_the_token_and_drops_the_handler() {
    let (fired, token) = oneshot::channel();
    let fired = Mutex::new(Some(fired));
    let options = KindOptions::new().timeout(Duration::from_secs(300));
    let (job, report) = run_one(|builder| {
        builder.register_with(options, move |context: JobContext, _: Add| {
            let fired = fired.lock().expect("lock").take();
            async move {
                let left = context.deadline().expect("a deadline") - tokio::time::Instant::now().into_std();
                let reason = context.cancel_token().canceled().await;
                let _ = fired.expect("runs once").send((left, reason));
                pending::<Result<(), NotDone>>().await
            }
        })
    })
    .await;
    let (left, reason) = token.await.expect("it has fired");
    assert_eq!((left.as_secs(), reason), (300, CancelReason::Timeout { after: Duration::from_secs(300) }));
    assert_eq!((report.timed_out, report.retried, report.lost, report.recovered), (1, 1, 0, 0));
    assert_eq!(job.errors[0].text.as_str(), "the handler was dropped: timed out after 300s");
    assert_eq!((job.state(), job.execution.attempt), (JobState::Waiting, 1), "it is a failed attempt");
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_heeds_its_timeout_has_the_last_word() {
    let options = KindOptions::new().timeout(Duration::from_secs(5));
    let (job, report) = run_one(|builder| {
        builder.register_with(options, async |context: JobContext, _: Add| {
            context.cancel_token().canceled().await;
            Ok("half of it")
        })
    })
    .await;
    assert_eq!((job.state(), report.timed_out), (JobState::Completed, 0));
}

#[tokio::test(start_paused = true)]
async fn a_kind_is_tried_again_when_its_own_policy_says() {
    let policy = RetryPolicy::exponential(Duration::from_secs(8), Duration::from_secs(8));
    let options = KindOptions::new().retry(policy);
    let (job, _) = run_one(|builder| {
        builder.register_with(options, async |_: JobContext, _: Add| Err::<(), _>(NotDone::retry("not yet")))
    })
    .await;
    let pause = job.available_at.unix_millis() - job.errors[0].at.unix_millis();
    assert!((4_000..=8_000).contains(&pause), "{pause} ms");
}

#[tokio::test(start_paused = true)]
async fn a_kind_may_ask_to_be_dropped_when_its_lease_is_uncertain() {
    let store = Store::memory();
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let handler = async |_: JobContext, _: Add| pending::<Result<(), NotDone>>().await;
    let options = KindOptions::new().abort_when_lease_uncertain();
    store.refuse(Op::Beat, usize::MAX, lost);
    let running = Running::start(worker(&store).register_with(options, handler).build().expect("a worker"));
    store.until_calls(Op::Update, 1).await;
    store.until(async || store.job(id).await.state() == JobState::Waiting).await;
    let text = store.job(id).await.errors[0].text.to_string();
    assert_eq!(text, "the handler was dropped: lease uncertain");
    running.kill().await;
}

#[tokio::test(start_paused = true)]
async fn layers_surround_every_handler_the_first_one_outermost() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let layer = |name: &'static str| {
        let seen = Arc::clone(&seen);
        move |context: JobContext, next: Next| {
            let seen = Arc::clone(&seen);
            async move {
                seen.lock().expect("lock").push(format!("{name} before {}", context.kind()));
                let ended = next.run().await;
                seen.lock().expect("lock").push(format!("{name} after {}", ended.as_ref().expect("good").as_str()));
                ended
            }
        }
    };
    let (outer, inner) = (layer("outer"), layer("inner"));
    let (job, _) =
        run_one(|builder| builder.layer(outer).layer(inner).register(async |_: JobContext, _: Add| Ok(7))).await;
    assert_eq!(job.result.expect("a result").as_str(), "7");
    let seen = seen.lock().expect("lock").join(", ");
    assert_eq!(seen, "outer before add, inner before add, inner after 7, outer after 7");
}

#[tokio::test(start_paused = true)]
async fn a_layer_may_refuse_a_job_or_panic() {
    let handler = async |_: JobContext, _: Add| Ok(());
    let refuses = async |_: JobContext, _: Next| Err(NotDone::cancel("not on Sundays"));
    let (job, _) = run_one(|builder| builder.layer(refuses).register(handler)).await;
    assert_eq!((job.state(), job.errors[0].text.as_str()), (JobState::Canceled, "not on Sundays"));
    let panics = async |_: JobContext, _: Next| -> Result<Json, NotDone> { panic!("a bad layer") };
    let (job, report) = run_one(|builder| builder.layer(panics).register(handler)).await;
    assert_eq!((job.errors[0].text.as_str(), report.panicked), ("the handler panicked: a bad layer", 1));
}

#[tokio::test(start_paused = true)]
async fn a_second_signal_ends_the_grace() {
    let store = Store::memory();
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let started = Arc::new(Notify::new());
    let handler = {
        let started = Arc::clone(&started);
        move |_: JobContext, _: Add| {
            started.notify_one();
            pending::<Result<(), NotDone>>()
        }
    };
    let builder = worker(&store).grace(Duration::from_secs(100_000)).register(handler);
    let ((stop, stopped), (hurry, hurried)) = (oneshot::channel::<()>(), oneshot::channel::<()>());
    let running = tokio::spawn(builder.build().expect("a worker").run_until_or_hurry(stopped, hurried));
    started.notified().await;
    let began = tokio::time::Instant::now();
    stop.send(()).expect("it runs");
    store.until_calls(Op::Beat, store.calls(Op::Beat) + 5).await;
    assert!(!running.is_finished(), "it has its grace");
    hurry.send(()).expect("it runs");
    let report = running.await.expect("no panic");
    assert_eq!((report.released, report.left), (1, 0));
    assert!(began.elapsed() < Duration::from_secs(1_000), "{:?}", began.elapsed());
    let job = store.job(id).await;
    assert_eq!((job.state(), job.execution.attempt), (JobState::Waiting, 0), "given back with its attempt");
}

#[tokio::test(start_paused = true)]
async fn a_worker_of_many_queues_asks_as_seldom_when_idle() {
    let store = Store::memory();
    let handler = async |_: JobContext, _: Add| Ok(());
    let builder = (0..20).fold(worker(&store), |builder, queue| builder.queue(format!("q{queue}")));
    let running = Running::start(builder.register(handler).build().expect("a worker"));
    store.until_calls(Op::Claim, 400).await;
    let (calls, since) = (store.all_calls().values().sum::<usize>(), tokio::time::Instant::now());
    store.until_calls(Op::Claim, 800).await;
    let rate = (store.all_calls().values().sum::<usize>() - calls) as f64 / since.elapsed().as_secs_f64();
    assert!(rate < 2.0, "{rate} calls a second");
    running.stop().await;
}

#[tokio::test]
async fn a_handler_is_tested_without_a_worker() {
    use fenced_queue::testing::TestJob;

    let handler = async |context: JobContext, add: Add| match context.cancel_token().reason() {
        Some(reason) => Err(NotDone::fail(reason)),
        None if add.a == 0 => panic!("nothing to add"),
        None => Ok((context.attempt(), context.fence(), add.a + add.b)),
    };
    let job = TestJob::new(&ADD).attempt(3).fence(9).run(handler).await;
    assert_eq!((job.state(), job.result.expect("a result").as_str()), (JobState::Completed, "[3,9,3]"));
    let job = TestJob::new(&ADD).canceled(CancelReason::Shutdown).run(handler).await;
    assert_eq!((job.state(), job.errors[0].text.as_str()), (JobState::Failed, "shutdown"));
    let job = TestJob::new(&Add { a: 0, b: 1 }).attempt(2).max_attempts(2).run(handler).await;
    assert_eq!((job.state(), job.errors[0].text.as_str()), (JobState::Failed, "the handler panicked: nothing to add"));
}

/// Nothing wakes a worker for what becomes due by time, so it looks; also while another queue keeps it busy.
#[tokio::test(start_paused = true)]
async fn a_busy_queue_does_not_keep_another_from_being_asked() {
    let store = Store::memory();
    let queue = store.queue();
    let job = || queue.enqueue(&ADD).queue("busy").into_job().expect("good");
    queue.enqueue_many(&std::iter::repeat_with(job).take(10_000).collect::<Vec<_>>()).await.expect("stored");
    let later = queue.enqueue(&ADD).queue("other").delay(Duration::from_secs(5)).await.expect("stored").id();
    let handler = async |_: JobContext, _: Add| {
        tokio::time::sleep(Duration::from_millis(50)).await;
        Ok(())
    };
    let builder = worker(&store).queue("busy").queue("other").concurrency(2).register(handler);
    let running = Running::start(builder.build().expect("a worker"));
    let job = store.until_state(later, JobState::Completed).await;
    let waited = job.execution.claimed_at.expect("claimed").unix_millis() - job.available_at.unix_millis();
    assert!(waited <= 2_000, "{waited} ms after it was due");
    let counts = store.counts().await.expect("counted");
    assert!(
        counts.iter().any(|count| count.state == Some(JobState::Waiting)),
        "the other one is still busy: {counts:?}"
    );
    running.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_panics_when_it_is_dropped_has_had_its_attempt() {
    struct Bad;

    impl Drop for Bad {
        fn drop(&mut self) {
            if !std::thread::panicking() {
                panic!("dropped");
            }
        }
    }

    let options = KindOptions::new().timeout(Duration::from_secs(5));
    let (job, report) = run_one(|builder| {
        builder.register_with(options, async |_: JobContext, _: Add| {
            let _bad = Bad;
            pending::<Result<(), NotDone>>().await
        })
    })
    .await;
    assert_eq!((job.state(), report.timed_out, report.retried, report.left), (JobState::Waiting, 1, 1, 0));
}
