//! The worker: how fast it drains a queue, how soon it starts a job when it is idle, and what memory it takes.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::time::Instant;

use fenced_queue::Inspect;
use fenced_queue::JobArgs;
use fenced_queue::JobContext;
use fenced_queue::Queue;
use fenced_queue::Worker;
use serde::Deserialize;
use serde::Serialize;
use tokio::sync::Notify;
use tokio::sync::mpsc;
use tokio::sync::oneshot;

use crate::Plan;
use crate::Result;
use crate::floor::Floor;
use crate::measure::KIND;
use crate::measure::QUEUE;
use crate::measure::jobs;
use crate::measure::median;
use crate::target::Target;

/// Handlers at once, and by how much less than all of the plan's jobs are drained by so few.
const DRAINS: [(usize, usize); 4] = [(1, 20), (10, 4), (100, 1), (500, 1)];
const CONNECTIONS: u32 = 10;
const WAKES: usize = 200;
const HELD: usize = 10_000;

#[derive(Serialize, Deserialize)]
#[serde(transparent)]
struct Payload(String);

impl JobArgs for Payload {
    const KIND: &'static str = KIND;
    const QUEUE: &'static str = QUEUE;
}

/// The lines of a store.
pub(crate) async fn engine(target: &Target, plan: &Plan) -> Result<()> {
    let handle = target.store.contract(CONNECTIONS).await?;
    let mut floor = target.store.floor().await?;
    for (concurrency, less) in DRAINS {
        let count = plan.drain.div_ceil(less * plan.share);
        let (mut drained, mut by_hand) = (Vec::new(), Vec::new());
        for _ in 0..plan.rounds {
            put(&handle, floor.as_mut(), count).await?;
            drained.push(drain(&handle, concurrency, count).await?);
            put(&handle, floor.as_mut(), count).await?;
            by_hand.push(by_floor(floor.as_mut(), concurrency, count).await?);
        }
        let (drained, by_hand) = (median(drained), median(by_hand));
        let ratio = drained / by_hand;
        println!(
            "{:<10} {count:>7} jobs, {concurrency:>3} at once: {drained:>7.0} / {by_hand:>7.0} = {ratio:.2}",
            target.name
        );
    }
    floor.clear().await?;
    let mut waits = starts(&handle, WAKES.div_ceil(plan.share)).await?;
    waits.sort_by(f64::total_cmp);
    let last = waits.len() - 1;
    let (half, most) = (waits[last / 2], waits[last * 99 / 100]);
    println!("{:<10} idle: from enqueued to started {half:.1} ms (p50), {most:.1} ms (p99)", target.name);
    floor.clear().await?;
    let held = HELD.div_ceil(plan.share);
    let [before, idle, full] = memory(&handle, held).await?;
    println!("{:<10} memory: {before} KiB without a worker, +{idle} idle, +{full} with {held} jobs held", target.name);
    floor.clear().await
}

async fn put(handle: &Arc<dyn Inspect>, floor: &mut dyn Floor, count: usize) -> Result<()> {
    floor.clear().await?;
    for batch in jobs(count)?.chunks(1_000) {
        handle.enqueue(batch).await?;
    }
    Ok(())
}

/// Jobs per second of a worker, from its start until the last outcome is recorded.
async fn drain(handle: &Arc<dyn Inspect>, concurrency: usize, count: usize) -> Result<f64> {
    let (ran, all) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let done = Arc::clone(&all);
    let handler = move |_: JobContext, _: Payload| {
        if ran.fetch_add(1, Ordering::Relaxed) + 1 == count {
            all.notify_one();
        }
        async { Ok("done") }
    };
    let queue = Queue::from(Arc::clone(handle));
    let worker = Worker::builder(&queue).concurrency(concurrency).register(handler).build()?;
    let begun = Instant::now();
    let report = worker.run_until(done.notified()).await;
    let took = begun.elapsed();
    if report.completed != u64::try_from(count)? {
        return Err(format!("{} of {count} jobs were completed: {report:?}", report.completed).into());
    }
    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    Ok(count as f64 / took.as_secs_f64())
}

/// The same work by hand: claim so many, settle them, one after the other.
async fn by_floor(floor: &mut dyn Floor, batch: usize, count: usize) -> Result<f64> {
    let begun = Instant::now();
    let mut done = 0;
    loop {
        let tickets = floor.claim(batch).await?;
        if tickets.is_empty() {
            break;
        }
        floor.settle(&tickets).await?;
        done += tickets.len();
    }
    if done != count {
        return Err(format!("the floor settled {done} of {count} jobs").into());
    }
    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    Ok(count as f64 / begun.elapsed().as_secs_f64())
}

/// Milliseconds from when an enqueue was sent until the handler began, of an idle worker that is told of it.
async fn starts(handle: &Arc<dyn Inspect>, count: usize) -> Result<Vec<f64>> {
    let queue = Queue::from(Arc::clone(handle));
    let (started, mut begins) = mpsc::unbounded_channel();
    let handler = move |_: JobContext, _: Payload| {
        let _ = started.send(Instant::now());
        async { Ok(()) }
    };
    let worker = Worker::builder(&queue).register(handler).build()?;
    let (stop, stopped) = oneshot::channel::<()>();
    let running = tokio::spawn(worker.run_until(stopped));
    let mut waits = Vec::with_capacity(count);
    for _ in 0..count {
        // As long as it takes the worker to be idle again.
        tokio::time::sleep(Duration::from_millis(30)).await;
        let sent = Instant::now();
        queue.enqueue(&Payload("x".into())).await?;
        let began = begins.recv().await.ok_or("the worker has ended")?;
        waits.push(began.duration_since(sent).as_secs_f64() * 1_000.0);
    }
    let _ = stop.send(());
    running.await?;
    Ok(waits)
}

/// Resident memory in KiB: before, what an idle worker adds, and what one adds that holds so many jobs.
async fn memory(handle: &Arc<dyn Inspect>, held: usize) -> Result<[u64; 3]> {
    let queue = Queue::from(Arc::clone(handle));
    let before = resident()?;
    let (started, mut begins) = mpsc::unbounded_channel();
    let end = Arc::new(Notify::new());
    let handler = {
        let end = Arc::clone(&end);
        move |_: JobContext, _: Payload| {
            let (started, end) = (started.clone(), Arc::clone(&end));
            async move {
                let ended = end.notified();
                let _ = started.send(());
                ended.await;
                Ok(())
            }
        }
    };
    let worker = Worker::builder(&queue).concurrency(held).register(handler).build()?;
    let (stop, stopped) = oneshot::channel::<()>();
    let running = tokio::spawn(worker.run_until(stopped));
    tokio::time::sleep(Duration::from_millis(200)).await;
    let idle = resident()?;
    for batch in jobs(held)?.chunks(1_000) {
        handle.enqueue(batch).await?;
    }
    for _ in 0..held {
        begins.recv().await.ok_or("the worker has ended")?;
    }
    let full = resident()?;
    end.notify_waiters();
    let _ = stop.send(());
    running.await?;
    Ok([before, idle.saturating_sub(before), full.saturating_sub(idle)])
}

fn resident() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
