//! Jobs that are reserved ahead of free handlers.

use std::sync::Arc;
use std::time::Duration;

use fenced_queue::contract::*;
use fenced_queue::*;
use tokio::sync::Semaphore;
use tokio::sync::mpsc;

use crate::common::*;

on_each_store! {
    reserved_jobs_are_renewed_and_run_in_their_turn
    a_reserved_job_that_was_taken_away_does_not_run
    a_stop_gives_reserved_jobs_back_with_their_attempts
    a_start_is_repeated_with_its_revision
}

/// A worker of one handler that reserves four jobs; handlers end as permits are given.
struct Scene {
    running: Running,
    started: mpsc::UnboundedReceiver<JobContext>,
    ends: Arc<Semaphore>,
    jobs: Vec<JobId>,
}

impl Scene {
    async fn set(store: &Arc<Store>, jobs: usize) -> Self {
        let queue = store.queue();
        let job = || queue.enqueue(&ADD).into_job().expect("good");
        let jobs: Vec<_> = std::iter::repeat_with(job).take(jobs).collect();
        queue.enqueue_many(&jobs).await.expect("stored");
        let (started, contexts) = mpsc::unbounded_channel();
        let ends = Arc::new(Semaphore::new(0));
        let handler = {
            let ends = Arc::clone(&ends);
            move |context: JobContext, _: Add| {
                let (started, ends) = (started.clone(), Arc::clone(&ends));
                async move {
                    let _ = started.send(context);
                    ends.acquire().await?.forget();
                    Ok(())
                }
            }
        };
        let builder = Worker::builder(&queue).lease(store.lease).concurrency(1).prefetch(4).grace(Duration::ZERO);
        let running = Running::start(builder.register(handler).build().expect("a worker"));
        let jobs = jobs.iter().map(|job| job.id).collect();
        Self { running, started: contexts, ends, jobs }
    }
}

async fn count(store: &Store, state: JobState) -> u64 {
    let counts = store.counts().await.expect("counted");
    counts.iter().filter(|count| count.state == Some(state)).map(|count| count.jobs).sum()
}

/// B13
async fn reserved_jobs_are_renewed_and_run_in_their_turn(store: Arc<Store>) {
    let mut scene = Scene::set(&store, 8).await;
    let first = scene.started.recv().await.expect("it starts");
    assert_eq!((first.id(), first.attempt(), first.fence()), (scene.jobs[0], 1, 1));
    assert_eq!((count(&store, JobState::Running).await, count(&store, JobState::Claimed).await), (1, 4));
    let other = store.another();
    let handler = async |_: JobContext, _: Add| Ok(());
    let sweeper = Worker::builder(&other.queue()).queue("nothing").lease(store.lease).register(handler);
    let sweeper = Running::start(sweeper.build().expect("a worker"));
    // For more than a lease.
    store.until_calls(Op::Beat, store.calls(Op::Beat) + 6).await;
    other.until_calls(Op::Stale, 4).await;
    assert_eq!(count(&store, JobState::Claimed).await, 4, "they are renewed like the one that runs");
    scene.ends.add_permits(100);
    for id in &scene.jobs {
        let job = store.until_state(*id, JobState::Completed).await;
        assert_eq!((job.execution.attempt, job.execution.fence), (1, 1), "claimed once, started once");
    }
    let (report, swept) = (scene.running.stop().await, sweeper.stop().await);
    assert_eq!((report.completed, report.lost, report.conflicts, report.left), (8, 0, 0, 0));
    assert_eq!((swept.claimed, swept.recovered), (0, 0));
}

/// A3, S3
async fn a_reserved_job_that_was_taken_away_does_not_run(store: Arc<Store>) {
    // One runs and three are reserved: so many that the worker claims no more.
    let mut scene = Scene::set(&store, 4).await;
    scene.started.recv().await.expect("it starts");
    let taken = store.job(scene.jobs[1]).await;
    assert_eq!(taken.state(), JobState::Claimed);
    let other = store.another();
    let released = Transitioner::new(&*other).apply(&taken.execution, &Transition::Release).await;
    released.expect("released");
    let theirs = claim_one(&other).await;
    assert_eq!(theirs.id(), scene.jobs[1]);
    scene.ends.add_permits(100);
    store.until_state(scene.jobs[3], JobState::Completed).await;
    let report = scene.running.stop().await;
    assert_eq!((report.completed, report.lost), (3, 1));
    assert_eq!(store.job(theirs.id()).await, theirs, "their row is as it was");
    let ran: Vec<_> = std::iter::from_fn(|| scene.started.try_recv().ok()).map(|context| context.id()).collect();
    assert_eq!(ran, scene.jobs[2..], "its handler did not begin");
}

async fn a_stop_gives_reserved_jobs_back_with_their_attempts(store: Arc<Store>) {
    let mut scene = Scene::set(&store, 5).await;
    scene.started.recv().await.expect("it starts");
    let report = scene.running.stop().await;
    assert_eq!((report.released, report.left), (5, 0));
    for id in scene.jobs {
        let job = store.job(id).await;
        assert_eq!((job.state(), job.execution.attempt), (JobState::Waiting, 0));
    }
}

async fn a_start_is_repeated_with_its_revision(store: Arc<Store>) {
    store.refuse(Op::Update, 1, busy);
    store.lose_answer(Op::Update, 1, lost);
    let mut scene = Scene::set(&store, 1).await;
    let context = scene.started.recv().await.expect("it starts in the end");
    assert_eq!((context.attempt(), context.fence()), (1, 1));
    let sent = store.updates.lock().expect("lock").clone();
    assert!(sent.len() >= 2 && sent.iter().all(|update| *update == sent[0]), "one decision: {sent:?}");
    scene.ends.add_permits(1);
    store.until_state(scene.jobs[0], JobState::Completed).await;
    assert_eq!(scene.running.stop().await.completed, 1);
}

/// A heartbeat that comes between a start whose answer was lost and its repeat finds the older claim no more.
#[tokio::test(start_paused = true)]
async fn a_start_of_unknown_outcome_is_not_taken_for_a_loss() {
    let store = Store::memory();
    store.lose_answer(Op::Update, 1, lost);
    let gate = store.gate(Op::Update);
    let mut scene = Scene::set(&store, 1).await;
    gate.reached().await;
    assert_eq!(store.job(scene.jobs[0]).await.state(), JobState::Running, "it was applied");
    store.refuse(Op::Update, usize::MAX, lost);
    gate.open();
    store.until_calls(Op::Beat, store.calls(Op::Beat) + 1).await;
    store.mend();
    let context = scene.started.recv().await.expect("it starts in the end");
    assert_eq!((context.attempt(), context.fence()), (1, 1));
    scene.ends.add_permits(1);
    store.until_state(scene.jobs[0], JobState::Completed).await;
    let report = scene.running.stop().await;
    assert_eq!((report.completed, report.lost, report.released), (1, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_stop_gives_reserved_jobs_back_before_the_grace_is_over() {
    let store = Store::memory();
    let queue = store.queue();
    let job = || queue.enqueue(&ADD).into_job().expect("good");
    queue.enqueue_many(&std::iter::repeat_with(job).take(5).collect::<Vec<_>>()).await.expect("stored");
    let (started, mut begun) = mpsc::unbounded_channel();
    let end = Arc::new(Semaphore::new(0));
    let handler = {
        let end = Arc::clone(&end);
        move |_: JobContext, _: Add| {
            let (started, end) = (started.clone(), Arc::clone(&end));
            async move {
                let _ = started.send(());
                end.acquire().await?.forget();
                Ok(())
            }
        }
    };
    let builder = Worker::builder(&queue).lease(store.lease).concurrency(1).prefetch(4);
    let builder = builder.grace(Duration::from_secs(100_000)).register(handler);
    let running = Running::start(builder.build().expect("a worker"));
    begun.recv().await.expect("it starts");
    let stopping = running.tell();
    store.until(async || count(&store, JobState::Waiting).await == 4).await;
    assert_eq!(count(&store, JobState::Running).await, 1, "that one has its grace");
    end.add_permits(1);
    let report = stopping.await.expect("no panic");
    assert_eq!((report.completed, report.released, report.left), (1, 4, 0));
}
