//! A worker that freezes: its lease runs out, another takes over, and its late result is refused.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;
use std::time::Instant;

use fenced_queue::JobArgs;
use fenced_queue::JobContext;
use fenced_queue::JobId;
use fenced_queue::JobState;
use fenced_queue::ListFilter;
use fenced_queue::NotDone;
use fenced_queue::Queue;
use fenced_queue::Report;
use fenced_queue::Worker;
use serde::Deserialize;
use serde::Serialize;
use tokio::sync::oneshot;

use crate::Result;
use crate::ensure;
use crate::refusals;
use crate::screen::paint;

const LEASE: Duration = Duration::from_secs(1);

#[derive(Serialize, Deserialize)]
struct Charge {
    cents: u64,
}

impl JobArgs for Charge {
    const KIND: &'static str = "charge";
    const QUEUE: &'static str = "payments";
}

/// Shows it with a new job, and answers its id.
pub(crate) async fn demonstrate(queue: &Queue, url: &str) -> Result<JobId> {
    clear(queue).await?;
    let id = queue.enqueue(&Charge { cents: 4_200 }).await?.id();
    let begin = Instant::now();
    let say = |text: String| println!("   {} {text}", paint(2, &format!("{:>4} ms", begin.elapsed().as_millis())));

    let (started, starts) = oneshot::channel();
    let (thaw, thawed) = mpsc::channel();
    let (stop, stopped) = oneshot::channel();
    let frozen = freeze(url.to_owned(), started, thawed, stopped);
    let fence = starts.await.map_err(|_| "the worker did not start the job")?;
    say(format!("worker `frozen` started job {id} with fence {fence}, and froze: no heartbeat any more"));

    let (healthy_stop, healthy_stopped) = oneshot::channel();
    let handler = async |context: JobContext, charge: Charge| {
        Ok(format!("charged {} cents with fence {}", charge.cents, context.fence()))
    };
    let worker = Worker::builder(queue).name("healthy").lease(LEASE).register(handler).build()?;
    let healthy = tokio::spawn(worker.run_until(async {
        let _ = healthy_stopped.await;
    }));
    let mut ticks = tokio::time::interval(Duration::from_millis(20));
    while queue.get(id).await?.ok_or("the job is gone")?.state() != JobState::Completed {
        ensure(begin.elapsed() < LEASE * 8, "another worker takes over when the lease has run out")?;
        ticks.tick().await;
    }
    say("the lease ran out; worker `healthy` recovered the job and completed it".into());

    thaw.send(())?;
    let _ = stop.send(());
    let late = tokio::task::spawn_blocking(|| frozen.join()).await?.map_err(|_| "the frozen worker panicked")??;
    let refusals = refusals::so_far();
    let refusal = refusals.iter().find(|refusal| refusal.contains(&id.to_string()));
    say("worker `frozen` woke up and sent its result; the answer:".into());
    println!("           {}", paint(31, refusal.ok_or("not as claimed: the late result is refused")?));
    ensure((late.conflicts, late.completed) == (1, 0), "the late result is refused, and counted")?;

    let _ = healthy_stop.send(());
    ensure(healthy.await?.completed == 1, "the other worker's result is recorded")?;
    Ok(id)
}

/// Cancels what a run that was interrupted left behind.
async fn clear(queue: &Queue) -> Result<()> {
    let mut filter = ListFilter::default();
    filter.queue = Some(Charge::QUEUE.parse()?);
    for state in JobState::ALL.iter().copied().filter(|state| state.is_active()) {
        filter.state = Some(state);
        for job in queue.list(&filter, None, 1_000).await?.items {
            queue.cancel(job.id(), "left behind by an interrupted run").await?;
        }
    }
    Ok(())
}

/// A worker on a thread of its own, which its handler blocks: nothing of it moves, as when a machine stands still.
fn freeze(
    url: String,
    started: oneshot::Sender<u64>,
    thawed: mpsc::Receiver<()>,
    stopped: oneshot::Receiver<()>,
) -> JoinHandle<Result<Report>> {
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let once = Arc::new(Mutex::new(Some((started, thawed))));
        runtime.block_on(async {
            let handler = move |context: JobContext, _: Charge| {
                let once = Arc::clone(&once);
                async move {
                    let once = once.lock().ok().and_then(|mut once| once.take());
                    let (started, thawed) = once.ok_or_else(|| NotDone::fail("it froze once already"))?;
                    let _ = started.send(context.fence());
                    // On purpose: this blocks the whole worker.
                    let _ = thawed.recv();
                    Ok("charged by a worker that had lost its claim")
                }
            };
            let queue = Queue::connect(&url).await?;
            let worker =
                Worker::builder(&queue).name("frozen").concurrency(1).lease(LEASE).register(handler).build()?;
            Ok(worker
                .run_until(async {
                    let _ = stopped.await;
                })
                .await)
        })
    })
}

/// What was recorded of it.
pub(crate) async fn table(queue: &Queue, id: JobId) -> Result<()> {
    let job = queue.get(id).await?.ok_or("the job is gone")?;
    let result = job.result.as_ref().ok_or("no result")?.as_str();
    println!("\n   the job that a worker froze in:");
    println!("   now       {}, result {}", job.execution, paint(32, result));
    for failure in &job.errors {
        let worker = failure.worker.as_ref().map_or("nobody", |worker| worker.as_str());
        println!("   before    attempt {} by {worker} (fence {}): {}", failure.attempt, failure.fence, failure.text);
    }
    ensure(job.execution.fence == 2 && job.errors.len() == 1, "two claims, one recorded outcome")
}
