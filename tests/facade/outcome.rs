//! What handlers return, and what becomes of their jobs.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fenced_queue::contract::*;
use fenced_queue::*;
use serde::Deserialize;
use serde::Serialize;
use tokio::sync::Barrier;
use tokio::sync::Notify;

use crate::common::*;

on_each_store! {
    a_value_is_the_result
    every_outcome_is_recorded_as_it_was_meant
    an_error_with_its_causes_is_a_failed_attempt
    the_last_attempt_fails_for_good
    a_panic_is_a_failed_attempt_and_the_worker_goes_on
    a_payload_that_does_not_fit_is_a_failed_attempt
    only_known_kinds_are_claimed
    no_more_jobs_are_claimed_than_there_are_free_slots
    a_busy_queue_does_not_starve_another
    a_job_runs_again_with_a_greater_fence
    outcomes_are_recorded_in_groups
}

fn worker(store: &Arc<Store>) -> WorkerBuilder {
    Worker::builder(&store.queue()).lease(store.lease).retry(RetryPolicy::exponential(TICK, TICK))
}

const TICK: Duration = Duration::from_millis(5);

async fn a_value_is_the_result(store: Arc<Store>) {
    let handler = async |_: JobContext, add: Add| Ok(add.a + add.b);
    let running = Running::start(worker(&store).register(handler).build().expect("a worker"));
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let job = store.until_state(id, JobState::Completed).await;
    assert_eq!(job.result.expect("a result").as_str(), "3");
    assert_eq!(job.execution.claimed_by, Some(running.id.clone()));
    let report = running.stop().await;
    assert_eq!((report.claimed, report.completed, report.left), (1, 1, 0));
}

/// How a handler shall end.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum End {
    Unit,
    Retry,
    Fail,
    Snooze,
    Cancel,
    Panic,
}

impl JobArgs for End {
    const KIND: &'static str = "end";
}

async fn end(context: JobContext, end: End) -> Result<(), NotDone> {
    let hour = Duration::from_secs(3_600);
    match end {
        End::Unit => Ok(()),
        End::Retry => Err(NotDone::retry_after(hour, "not now")),
        End::Fail => Err(NotDone::fail("never")),
        End::Snooze => Err(NotDone::snooze(hour)),
        End::Cancel => Err(NotDone::cancel("nobody wants it")),
        End::Panic if context.attempt() == 1 => panic!("attempt {}", context.attempt()),
        End::Panic => Ok(()),
    }
}

async fn every_outcome_is_recorded_as_it_was_meant(store: Arc<Store>) {
    let queue = store.queue();
    let running = Running::start(worker(&store).register(end).build().expect("a worker"));
    for (args, state, attempt, error) in [
        (End::Unit, JobState::Completed, 1, None),
        (End::Retry, JobState::Waiting, 1, Some("not now")),
        (End::Fail, JobState::Failed, 1, Some("never")),
        (End::Snooze, JobState::Waiting, 0, None),
        (End::Cancel, JobState::Canceled, 1, Some("nobody wants it")),
    ] {
        let id = queue.enqueue(&args).await.expect("stored").id();
        store
            .until(async || {
                let job = store.job(id).await;
                job.execution.fence == 1 && !job.state().is_held()
            })
            .await;
        let job = store.job(id).await;
        assert_eq!((job.state(), job.execution.attempt), (state, attempt), "{args:?}");
        assert_eq!(job.errors.last().map(|failure| failure.text.as_str()), error, "{args:?}");
        if state == JobState::Waiting {
            let due = job.available_at.unix_millis() - job.created_at.unix_millis();
            assert!((3_600_000..3_700_000).contains(&due), "{args:?}: due after {due} ms");
        }
    }
    let report = running.stop().await;
    let counts = (report.completed, report.retried, report.failed, report.snoozed, report.canceled);
    assert_eq!(counts, (1, 1, 1, 1, 1));
}

async fn an_error_with_its_causes_is_a_failed_attempt(store: Arc<Store>) {
    #[derive(Debug, thiserror::Error)]
    #[error("no greeting")]
    struct NoGreeting(#[source] std::num::ParseIntError);

    let handler = async |context: JobContext, _: Add| {
        if context.attempt() == 1 {
            "x".parse::<u64>().map_err(NoGreeting)?;
        }
        Ok(context.attempt())
    };
    let running = Running::start(worker(&store).register(handler).build().expect("a worker"));
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let job = store.until_state(id, JobState::Completed).await;
    assert_eq!(job.result.expect("a result").as_str(), "2");
    let failure = &job.errors[0];
    assert_eq!(failure.text.as_str(), "no greeting: invalid digit found in string");
    assert_eq!((failure.attempt, failure.worker.as_ref()), (1, Some(&running.id)));
    assert_eq!(running.stop().await.retried, 1);
}

/// C10
async fn the_last_attempt_fails_for_good(store: Arc<Store>) {
    let handler = async |_: JobContext, _: Add| Err::<(), _>(NotDone::retry("again and again"));
    let running = Running::start(worker(&store).register(handler).build().expect("a worker"));
    let id = store.queue().enqueue(&ADD).max_attempts(3).await.expect("stored").id();
    let job = store.until_state(id, JobState::Failed).await;
    assert_eq!((job.execution.attempt, job.execution.fence, job.errors.len()), (3, 3, 3));
    let report = running.stop().await;
    assert_eq!((report.retried, report.failed), (2, 1));
}

async fn a_panic_is_a_failed_attempt_and_the_worker_goes_on(store: Arc<Store>) {
    let running = Running::start(worker(&store).register(end).build().expect("a worker"));
    let id = store.queue().enqueue(&End::Panic).await.expect("stored").id();
    let job = store.until_state(id, JobState::Completed).await;
    assert_eq!(job.errors[0].text.as_str(), "the handler panicked: attempt 1");
    let report = running.stop().await;
    assert_eq!((report.panicked, report.retried, report.completed), (1, 1, 1));
}

async fn a_payload_that_does_not_fit_is_a_failed_attempt(store: Arc<Store>) {
    let handler = async |_: JobContext, _: Add| Ok(());
    let running = Running::start(worker(&store).register(handler).build().expect("a worker"));
    let queue = store.queue();
    let mut job = queue.enqueue(&ADD).max_attempts(1).into_job().expect("good");
    job.payload = Json::encode("not numbers").expect("JSON");
    queue.enqueue_many(std::slice::from_ref(&job)).await.expect("stored");
    let failed = store.until_state(job.id, JobState::Failed).await;
    assert!(failed.errors[0].text.as_str().starts_with("the payload does not fit the handler: "), "{failed:?}");
    let good = queue.enqueue(&ADD).await.expect("stored").id();
    store.until_state(good, JobState::Completed).await;
    running.stop().await;
}

/// F5
async fn only_known_kinds_are_claimed(store: Arc<Store>) {
    let queue = store.queue();
    let foreign = queue.enqueue(&End::Unit).priority(0).await.expect("stored").id();
    let known = queue.enqueue(&ADD).priority(9).await.expect("stored").id();
    let handler = async |_: JobContext, _: Add| Ok(());
    let running = Running::start(worker(&store).register(handler).build().expect("a worker"));
    store.until_state(known, JobState::Completed).await;
    let report = running.stop().await;
    assert_eq!((report.claimed, store.job(foreign).await.execution.fence), (1, 0));
}

async fn no_more_jobs_are_claimed_than_there_are_free_slots(store: Arc<Store>) {
    let queue = store.queue();
    let job = || queue.enqueue(&ADD).into_job().expect("good");
    let jobs: Vec<_> = std::iter::repeat_with(job).take(8).collect();
    queue.enqueue_many(&jobs).await.expect("stored");
    let together = Arc::new(Barrier::new(4));
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let handler = {
        let (running, most) = (Arc::clone(&running), Arc::clone(&most));
        move |_: JobContext, _: Add| {
            let (together, running, most) = (Arc::clone(&together), Arc::clone(&running), Arc::clone(&most));
            async move {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                together.wait().await;
                running.fetch_sub(1, Ordering::SeqCst);
                Ok(())
            }
        }
    };
    let running = Running::start(worker(&store).concurrency(4).register(handler).build().expect("a worker"));
    for job in &jobs {
        store.until_state(job.id, JobState::Completed).await;
    }
    assert_eq!(most.load(Ordering::SeqCst), 4);
    let report = running.stop().await;
    assert_eq!((report.completed, report.claimed, report.released), (8, 8, 0));
}

async fn a_busy_queue_does_not_starve_another(store: Arc<Store>) {
    let queue = store.queue();
    let job = || queue.enqueue(&ADD).queue("busy").into_job().expect("good");
    let jobs: Vec<_> = std::iter::repeat_with(job).take(40).collect();
    queue.enqueue_many(&jobs).await.expect("stored");
    let other = queue.enqueue(&ADD).queue("other").await.expect("stored").id();
    let order = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let order = Arc::clone(&order);
        move |context: JobContext, _: Add| {
            order.lock().expect("lock").push(context.id());
            async { Ok(()) }
        }
    };
    let builder = worker(&store).queue("busy").queue("other").concurrency(2).register(handler);
    let running = Running::start(builder.build().expect("a worker"));
    store.until_state(other, JobState::Completed).await;
    running.stop().await;
    let place = order.lock().expect("lock").iter().position(|id| *id == other).expect("it ran");
    assert!(place <= 6, "it was the {place}. to run");
}

async fn a_job_runs_again_with_a_greater_fence(store: Arc<Store>) {
    let fences = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let fences = Arc::clone(&fences);
        move |context: JobContext, _: Add| {
            fences.lock().expect("lock").push((context.attempt(), context.fence()));
            async { Ok(()) }
        }
    };
    let running = Running::start(worker(&store).register(handler).build().expect("a worker"));
    let queue = store.queue();
    let id = queue.enqueue(&ADD).await.expect("stored").id();
    store.until_state(id, JobState::Completed).await;
    queue.rerun(id).await.expect("runs again");
    store.until(async || fences.lock().expect("lock").len() == 2).await;
    store.until_state(id, JobState::Completed).await;
    assert_eq!(*fences.lock().expect("lock"), [(1, 1), (1, 2)], "a rerun counts attempts anew, and fences on");
    running.stop().await;
}

/// A12, design 7
#[tokio::test(start_paused = true)]
async fn a_result_over_the_cap_fails_the_job_and_never_runs_it_again() {
    let store = Store::memory_with_cap(100);
    let handler = async |_: JobContext, _: Add| Ok("x".repeat(99));
    let running = Running::start(worker(&store).register(handler).build().expect("a worker"));
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let job = store.until_state(id, JobState::Failed).await;
    assert_eq!(job.errors[0].text.as_str(), "result too large: 101 bytes, at most 100 are stored");
    assert_eq!(running.stop().await.claimed, 1);
}

#[tokio::test(start_paused = true)]
async fn a_result_that_the_store_refuses_as_too_large_fails_the_job() {
    let store = Store::memory();
    let too_large = || Error::not_applied(ErrorKind::TooLarge, "the packet is full");
    store.refuse(Op::Update, 1, too_large);
    let handler = async |_: JobContext, _: Add| Ok("x");
    let running = Running::start(worker(&store).register(handler).build().expect("a worker"));
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let job = store.until_state(id, JobState::Failed).await;
    assert_eq!(job.errors[0].text.as_str(), "result too large: too large: the packet is full");
    assert_eq!(running.stop().await.claimed, 1);
}

/// B9
#[tokio::test(start_paused = true)]
async fn a_row_that_cannot_be_read_fails_at_its_last_attempt_and_keeps_nobody_waiting() {
    let store = Store::memory();
    let queue = store.queue();
    let bad = queue.enqueue(&ADD).priority(0).max_attempts(2).await.expect("stored").id();
    let good = queue.enqueue(&ADD).await.expect("stored").id();
    store.reference().edit(|rows| rows.get_mut(&bad).expect("there").broken = true);
    let handler = async |_: JobContext, _: Add| Ok(());
    let running = Running::start(worker(&store).register(handler).build().expect("a worker"));
    store.until_state(good, JobState::Completed).await;
    let state = || store.reference().edit(|rows| rows[&bad].job.state());
    store.until(async || state() == JobState::Failed).await;
    store.reference().edit(|rows| {
        let job = &rows[&bad].job;
        assert_eq!((job.execution.attempt, job.errors.len()), (2, 2));
        assert_eq!(job.errors[0].text.as_str(), "this program cannot read the job: broken data");
    });
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_idle_worker_asks_seldom() {
    let store = Store::memory();
    let handler = async |_: DurableContext, _: Add| Ok(());
    let running = Running::start(worker(&store).register_durable(handler).build().expect("a worker"));
    store.until_calls(Op::Claim, 10).await;
    let (calls, since) = (store.all_calls().values().sum::<usize>(), tokio::time::Instant::now());
    store.until_calls(Op::Claim, 110).await;
    let rate = (store.all_calls().values().sum::<usize>() - calls) as f64 / since.elapsed().as_secs_f64();
    assert!(rate < 2.0, "{rate} calls a second");
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_is_woken_for_nothing_does_not_spin() {
    let store = Store::memory();
    store.restless.store(true, Ordering::SeqCst);
    let handler = async |_: JobContext, _: Add| Ok(());
    let running = Running::start(worker(&store).register(handler).build().expect("a worker"));
    store.until_calls(Op::Stale, 10).await;
    let (calls, since) = (store.calls(Op::Claim), tokio::time::Instant::now());
    store.until_calls(Op::Stale, 20).await;
    let rate = (store.calls(Op::Claim) - calls) as f64 / since.elapsed().as_secs_f64();
    assert!(rate < 40.0, "{rate} claims a second");
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_new_job_wakes_an_idle_worker() {
    let store = Store::memory();
    let handler = async |_: JobContext, _: Add| Ok(());
    let running = Running::start(worker(&store).register(handler).build().expect("a worker"));
    store.until_calls(Op::Claim, 20).await;
    let since = tokio::time::Instant::now();
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    store.until_state(id, JobState::Completed).await;
    assert!(since.elapsed() < Duration::from_millis(5), "{:?}", since.elapsed());
    running.stop().await;
}

/// Few calls, and each is a fixed number of round trips: four at most, as the tests of the backends count.
async fn outcomes_are_recorded_in_groups(store: Arc<Store>) {
    let queue = store.queue();
    let job = || queue.enqueue(&ADD).into_job().expect("good");
    let jobs: Vec<_> = std::iter::repeat_with(job).take(5_000).collect();
    queue.enqueue_many(&jobs).await.expect("stored");
    let done = Arc::new(AtomicUsize::new(0));
    let all = Arc::new(Notify::new());
    let handler = {
        let (done, all) = (Arc::clone(&done), Arc::clone(&all));
        move |_: JobContext, _: Add| {
            if done.fetch_add(1, Ordering::SeqCst) == 4_999 {
                all.notify_one();
            }
            async { Ok(()) }
        }
    };
    let running = Running::start(worker(&store).concurrency(100).register(handler).build().expect("a worker"));
    all.notified().await;
    let report = running.stop().await;
    assert_eq!(report.completed, 5_000);
    let calls = store.all_calls();
    let per_job = (calls.values().sum::<usize>() - calls[&Op::Enqueue]) as f64 / 5_000.0;
    println!("{per_job} calls a job: {calls:?}");
    assert!(per_job < 0.05, "{per_job} calls a job: {calls:?}");
}
