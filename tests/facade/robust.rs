//! Calls that hang, stops at bad moments, handlers that misbehave: nothing is stuck, and nothing recorded that is not true.

use std::future::Ready;
use std::future::ready;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use fenced_queue::contract::*;
use fenced_queue::*;
use tokio::sync::Notify;

use crate::common::*;

fn builder(store: &Arc<Store>) -> WorkerBuilder {
    Worker::builder(&store.queue()).lease(Duration::from_secs(30))
}

async fn done(_: JobContext, _: Add) -> Result<(), NotDone> {
    Ok(())
}

/// A handler that counts its runs.
fn counting(runs: &Arc<Mutex<u32>>) -> impl Fn(JobContext, Add) -> Ready<Result<(), NotDone>> + Send + Sync + 'static {
    let runs = Arc::clone(runs);
    move |_, _| {
        *runs.lock().expect("lock") += 1;
        ready(Ok(()))
    }
}

/// The claim has its time to be answered, however short the grace: a store may have it wait for a third of its lease.
#[tokio::test(start_paused = true)]
async fn a_stop_without_grace_gives_back_what_the_claim_in_flight_brings() {
    let store = Store::memory();
    let id = store.queue().enqueue(&ADD).max_attempts(1).await.expect("stored").id();
    let gate = store.gate(Op::Claim);
    let running = Running::start(builder(&store).grace(Duration::ZERO).register(done).build().expect("a worker"));
    gate.reached().await;
    let ended = running.tell();
    tokio::time::sleep(Duration::from_secs(9)).await;
    gate.open();
    let report = ended.await.expect("no panic");
    let job = store.job(id).await;
    assert_eq!((job.state(), job.execution.attempt), (JobState::Waiting, 0), "given back with its attempt");
    assert_eq!((report.released, report.left), (1, 0));
}

/// Also one that the store has not begun: it would take its job after the worker has gone.
#[tokio::test(start_paused = true)]
async fn a_stop_waits_for_a_claim_that_the_store_lets_wait() {
    let store = Store::memory();
    store.queue().enqueue(&ADD).max_attempts(1).await.expect("stored");
    let gate = store.gate_before(Op::Claim);
    let running = Running::start(builder(&store).grace(Duration::ZERO).register(done).build().expect("a worker"));
    gate.reached().await;
    let ended = running.tell();
    tokio::time::sleep(Duration::from_secs(9)).await;
    gate.open();
    let report = ended.await.expect("no panic");
    assert_eq!((report.claimed, report.released, report.left), (1, 1, 0), "it was answered");
}

/// What a lost answer claimed is given back at the stop, not left to its lease.
#[tokio::test(start_paused = true)]
async fn a_stop_gives_back_what_a_lost_answer_claimed() {
    let store = Store::memory();
    let id = store.queue().enqueue(&ADD).max_attempts(1).await.expect("stored").id();
    store.lose_answer(Op::Claim, 1, lost);
    let running = Running::start(builder(&store).register(done).build().expect("a worker"));
    store.until_calls(Op::Claim, 1).await;
    let report = running.stop().await;
    let job = store.job(id).await;
    assert_eq!((job.state(), job.execution.attempt), (JobState::Waiting, 0), "given back with its attempt");
    assert_eq!(report.released, 1);
}

/// One call that never ends must not be the last one.
#[tokio::test(start_paused = true)]
async fn a_call_that_hangs_does_not_stop_the_worker() {
    for op in [Op::Claim, Op::Stale, Op::ClaimedBy, Op::Beat, Op::Update] {
        let store = Store::memory();
        let _never_opened = store.gate(op);
        let running = Running::start(builder(&store).register(done).build().expect("a worker"));
        let first = store.queue().enqueue(&ADD).await.expect("stored").id();
        store.until_state(first, JobState::Completed).await;
        let second = store.queue().enqueue(&ADD).await.expect("stored").id();
        store.until_state(second, JobState::Completed).await;
        let calls = store.calls(op);
        if op != Op::Beat {
            store.until_calls(op, calls + 1).await;
        }
        running.stop().await;
    }
}

/// However often leases are renewed, a slow store has its time to record an outcome.
#[tokio::test(start_paused = true)]
async fn a_slow_store_records_outcomes_under_a_quick_heartbeat() {
    let store = Store::memory();
    let gate = store.gate(Op::Update);
    let quick = builder(&store).heartbeat(Duration::from_millis(300));
    let running = Running::start(quick.register(done).build().expect("a worker"));
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    gate.reached().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(store.calls(Op::Update), 1, "five seconds are not too long for a lease of thirty");
    gate.open();
    store.until_state(id, JobState::Completed).await;
    assert_eq!(running.stop().await.unrecorded, 0);
}

/// After a standstill the sweep comes first by chance: it leaves this worker's own jobs alone.
#[tokio::test(start_paused = true)]
async fn a_worker_does_not_recover_its_own_living_jobs() {
    let store = Store::memory();
    let (started, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let handler = {
        let (started, go_on) = (Arc::clone(&started), Arc::clone(&go_on));
        move |_: JobContext, _: Add| {
            let (started, go_on) = (Arc::clone(&started), Arc::clone(&go_on));
            async move {
                started.notify_one();
                go_on.notified().await;
                Ok(())
            }
        }
    };
    // Beats hang for a while, and the sweep sees leases that have run out.
    let running = Running::start(builder(&store).register(handler).build().expect("a worker"));
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    started.notified().await;
    store.reference().advance(Delay::from_millis(3_600_000).expect("an hour"));
    let sweeps = store.calls(Op::Stale);
    store.until_calls(Op::Stale, sweeps + 1).await;
    go_on.notify_one();
    let job = store.until_state(id, JobState::Completed).await;
    assert_eq!((job.execution.attempt, job.errors.len()), (1, 0), "its first attempt is the one that counts");
    assert_eq!(running.stop().await.recovered, 0);
}

/// A claim that came too late, and whose heartbeat failed or met a locked row, is not run.
#[tokio::test(start_paused = true)]
async fn a_late_claim_that_cannot_be_renewed_is_not_run() {
    let store = Store::memory();
    let ran = Arc::new(Mutex::new(0));
    let handler = counting(&ran);
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let gate = store.gate(Op::Claim);
    let running = Running::start(builder(&store).register(handler).build().expect("a worker"));
    gate.reached().await;
    tokio::time::sleep(Duration::from_secs(31)).await;
    store.reference().edit(|rows| rows.get_mut(&id).expect("there").locked = true);
    gate.open();
    let beats = store.calls(Op::Beat);
    store.until_calls(Op::Beat, beats + 1).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(*ran.lock().expect("lock"), 0, "nobody knows who holds it");
    store.reference().edit(|rows| rows.get_mut(&id).expect("there").locked = false);
    store.until_state(id, JobState::Completed).await;
    assert_eq!(*ran.lock().expect("lock"), 1, "once it was claimed again");
    running.stop().await;
}

/// Even what a handler throws can panic when it is dropped.
#[tokio::test(start_paused = true)]
async fn a_panic_that_panics_again_is_one_failed_attempt() {
    struct Mine;
    impl Drop for Mine {
        fn drop(&mut self) {
            panic!("again");
        }
    }
    let store = Store::memory();
    let handler = async |_: JobContext, _: Add| -> Result<(), NotDone> { std::panic::panic_any(Mine) };
    let running = Running::start(builder(&store).register(handler).build().expect("a worker"));
    let id = store.queue().enqueue(&ADD).max_attempts(1).await.expect("stored").id();
    let job = store.until_state(id, JobState::Failed).await;
    assert_eq!(job.errors.len(), 1);
    assert_eq!(running.stop().await.left, 0);
}

/// A thread that is blocked keeps its task, and not the worker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_blocked_handler_does_not_hold_the_stop_up() {
    let store = Store::memory();
    let (started, release) = (Arc::new(Notify::new()), Arc::new((Mutex::new(false), std::sync::Condvar::new())));
    let handler = {
        let (started, release) = (Arc::clone(&started), Arc::clone(&release));
        move |_: JobContext, _: Add| {
            let (started, release) = (Arc::clone(&started), Arc::clone(&release));
            async move {
                started.notify_one();
                let (may, told) = &*release;
                let _may = told.wait_while(may.lock().expect("lock"), |may| !*may).expect("lock");
                Ok(())
            }
        }
    };
    let worker = builder(&store).grace(Duration::ZERO).register(handler).build().expect("a worker");
    let running = Running::start(worker);
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    started.notified().await;
    // Twice its lease is a minute, and the handler is blocked until the worker has ended.
    let report = tokio::time::timeout(Duration::from_secs(40), running.stop()).await;
    *release.0.lock().expect("lock") = true;
    release.1.notify_all();
    assert_eq!(report.expect("it ends").released, 1);
    assert_eq!(store.job(id).await.state(), JobState::Waiting, "what the handler says after that is not recorded");
}

/// However long it would sleep.
#[tokio::test(start_paused = true)]
async fn an_idle_worker_stops_at_once() {
    let store = Store::memory();
    let idle = builder(&store).poll(Duration::from_secs(86_400)).register(done).build().expect("a worker");
    let running = Running::start(idle);
    store.until_calls(Op::Claim, 8).await;
    let told = tokio::time::Instant::now();
    running.stop().await;
    assert!(told.elapsed() < Duration::from_secs(1), "{:?}", told.elapsed());
}

/// A handler waits for room for its outcome; if the worker is told to stop meanwhile, it does not begin.
#[tokio::test(start_paused = true)]
async fn no_handler_begins_after_the_stop() {
    let store = Store::memory();
    let begun = Arc::new(Mutex::new(0));
    let handler = counting(&begun);
    let queue = store.queue();
    let jobs: Vec<_> = (0..8).map(|_| queue.enqueue(&ADD).into_job().expect("good")).collect();
    queue.enqueue_many(&jobs).await.expect("stored");
    let gate = store.gate(Op::Update);
    let running = Running::start(builder(&store).concurrency(1).register(handler).build().expect("a worker"));
    gate.reached().await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    let ended = running.tell();
    tokio::time::sleep(Duration::from_millis(1)).await;
    let before = *begun.lock().expect("lock");
    gate.open();
    let report = ended.await.expect("no panic");
    assert_eq!(*begun.lock().expect("lock"), before, "{report:?}");
    assert_eq!((report.claimed, report.left), (report.completed + report.released, 0), "{report:?}");
}

/// A refusal that repeating does not mend stays one after a lost answer.
#[tokio::test(start_paused = true)]
async fn a_final_refusal_after_a_lost_answer_is_not_repeated() {
    let store = Store::memory();
    store.refuse(Op::Update, 1, lost);
    store.refuse(Op::Update, 1_000, broken);
    store.queue().enqueue(&ADD).await.expect("stored");
    let running = Running::start(builder(&store).register(done).build().expect("a worker"));
    store.until_calls(Op::Update, 2).await;
    let report = running.stop().await;
    assert_eq!((report.unrecorded, store.calls(Op::Update)), (1, 2));
}

/// A handler that blocks its thread, on a runtime of so many threads; another worker is elsewhere. Answers with the job and the
/// worker's report.
fn block_a_thread(threads: usize) -> (Job, Report) {
    let lease = Duration::from_millis(800);
    let backend = MemoryBackend::new();
    let queue = Queue::new(backend.clone());
    let mut runtime = match threads {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    let runtime = runtime.worker_threads(threads).enable_all().build().expect("a runtime");
    let (started, has_started) = std::sync::mpsc::channel();
    let blocks = {
        move |context: JobContext, _: Add| {
            let first = context.fence() == 1;
            let _ = started.send(());
            async move {
                if first {
                    std::thread::sleep(lease * 3);
                }
                Ok(first)
            }
        }
    };
    let id = runtime.block_on(async { queue.enqueue(&ADD).await.expect("stored").id() });
    let elsewhere = std::thread::spawn({
        let queue = queue.clone();
        move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            has_started.recv().expect("the first one begins");
            let handler = async |_: JobContext, _: Add| Ok(false);
            let worker = Worker::builder(&queue).lease(lease).register(handler).build().expect("a worker");
            runtime.block_on(worker.run_until(queue.ended(id)))
        }
    });
    let worker = Worker::builder(&queue).lease(lease).register(blocks).build().expect("a worker");
    let report = runtime.block_on(async {
        // On a task, where a runtime of several threads has another one for the heartbeats.
        let queue = queue.clone();
        tokio::spawn(worker.run_until(async move { queue.ended(id).await })).await.expect("no panic")
    });
    elsewhere.join().expect("no panic");
    let job = runtime.block_on(async { queue.get(id).await.expect("readable").expect("there") });
    (job, report)
}

#[test]
fn a_handler_that_blocks_the_only_thread_loses_its_job() {
    let (job, report) = block_a_thread(1);
    assert_eq!((job.execution.fence, job.result.expect("a result").as_str()), (2, "false"), "another worker ran it");
    assert_eq!((report.completed, report.conflicts), (0, 1), "its outcome is refused");
}

#[test]
fn a_handler_that_blocks_one_of_several_threads_keeps_its_job() {
    let (job, report) = block_a_thread(2);
    assert_eq!((job.execution.fence, job.result.expect("a result").as_str()), (1, "true"));
    assert_eq!((report.completed, report.lost), (1, 0));
}
