//! A worker's process.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fenced_queue::DurableContext;
use fenced_queue::JobArgs;
use fenced_queue::JobContext;
use fenced_queue::NotDone;
use fenced_queue::Queue;
use fenced_queue::QueueError;
use fenced_queue::RetryPolicy;
use fenced_queue::Worker;
use fenced_queue::contract::Inspect;
use fenced_queue::contract::Json;
use fenced_queue::contract::Name;
use fenced_queue::contract::NewJob;
use fenced_queue::sqlite::SqliteBackend;
use fenced_queue::sqlite::sqlx::sqlite::SqlitePoolOptions;
use queue_conformance::BoxError;
use serde::Deserialize;
use serde::Serialize;
use tokio::time::sleep;

use crate::history::Recorder;
use crate::history::Stage;
use crate::history::What;
use crate::recording::Recording;

/// How long a job is held without a heartbeat: a process that is frozen for longer loses its jobs.
pub(crate) const LEASE: Duration = Duration::from_secs(2);

#[derive(Serialize, Deserialize)]
struct Work {
    number: u64,
}

impl JobArgs for Work {
    const KIND: &'static str = "work";
}

/// A job of several steps, which waits for its event in between.
#[derive(Serialize, Deserialize)]
pub(crate) struct Errand {
    number: u64,
    /// It goes on in the place of another.
    again: bool,
}

impl JobArgs for Errand {
    const KIND: &'static str = "errand";
}

/// How long an errand waits for its event.
const TIME: Duration = Duration::from_millis(700);

/// What an errand waits for.
fn event(number: u64) -> String {
    format!("errand/{number}")
}

/// The errand that is the job of this number.
fn errand_of(number: u64) -> Option<u64> {
    (number % 10 == 9).then_some(number / 10)
}

/// The job of this number.
pub(crate) fn job(queue: &Queue<Recording>, number: u64) -> Result<NewJob, QueueError> {
    let (job, key) = match errand_of(number) {
        Some(errand) => (
            queue.enqueue(&Errand { number: errand, again: false }),
            errand.is_multiple_of(8).then(|| format!("errand {}", errand % 40)),
        ),
        None => (queue.enqueue(&Work { number }), number.is_multiple_of(5).then(|| format!("key {}", number % 50))),
    };
    let job = job.max_attempts(if number.is_multiple_of(7) { 3 } else { 100 });
    match key {
        Some(key) => job.unique_key(key).into_job(),
        None => job.into_job(),
    }
}

/// The events to be emitted when the job of this number is enqueued, and how long after. Some come before anybody waits for them,
/// some when the time is just over, some twice, and some never.
pub(crate) fn events(number: u64) -> Vec<(String, Duration)> {
    let Some(errand) = errand_of(number) else { return Vec::new() };
    match errand % 8 {
        0 => vec![(event(errand + 8), Duration::ZERO)],
        1 => vec![(event(errand), Duration::ZERO)],
        4 | 5 => vec![(event(errand), TIME + Duration::from_millis(fastrand::u64(..100)))],
        6 => vec![(event(errand), TIME / 2); 2],
        // Those of 2 come from the errands 3.
        _ => Vec::new(),
    }
}

/// Works until it is killed, and writes down what it does; with `by_id` as a queue that settles by id: see [`Recording::by_id`]; with
/// `one_connection` on a pool of one connection, which SQLite alone can be told here.
///
/// # Errors
///
/// The store cannot be reached, or the record not be written.
pub async fn work(url: &str, folder: &Path, by: &str, by_id: bool, one_connection: bool) -> Result<(), BoxError> {
    let recorder = Arc::new(Recorder::create(folder, by)?);
    let recording = match one_connection {
        true => Recording::new(on_one_connection(url).await?, Arc::clone(&recorder)),
        false => recorded(url, &recorder).await?,
    };
    let queue = Queue::new(if by_id { recording.by_id() } else { recording });
    let errands = Arc::clone(&recorder);
    let worker = Worker::builder(&queue)
        .lease(LEASE)
        .concurrency(20)
        .poll(Duration::from_millis(200))
        .retry(RetryPolicy::exponential(Duration::from_millis(20), Duration::from_millis(200)))
        .register(move |context, args| handle(Arc::clone(&recorder), context, args))
        .register_durable(move |context, args| errand(Run { recorder: Arc::clone(&errands), context }, args))
        .build()?;
    worker.run_until(std::future::pending::<()>()).await;
    Ok(())
}

/// A store whose calls are written down.
pub(crate) async fn recorded(url: &str, recorder: &Arc<Recorder>) -> Result<Recording, BoxError> {
    let inner: Arc<dyn Inspect> = Arc::clone(Queue::connect_only(url).await?.backend());
    Ok(Recording::new(inner, Arc::clone(recorder)))
}

async fn on_one_connection(url: &str) -> Result<Arc<dyn Inspect>, BoxError> {
    let pool = SqlitePoolOptions::new().max_connections(1).connect(url).await?;
    Ok(Arc::new(SqliteBackend::from_pool(pool).await?))
}

async fn handle(recorder: Arc<Recorder>, context: JobContext, Work { number }: Work) -> Result<u64, NotDone> {
    recorder.write(What::Began { job: context.id(), fence: context.fence(), attempt: context.attempt() });
    // Some are slow, so that there is always something to interrupt, and some fail.
    sleep(Duration::from_millis(fastrand::u64(..50))).await;
    match number % 10 {
        0 if context.attempt() == 1 => Err(NotDone::retry("the first time it fails")),
        1 if context.attempt() == 1 => panic!("the first time it panics"),
        _ => Ok(number),
    }
}

async fn errand(run: Run, Errand { number, again }: Errand) -> Result<u64, NotDone> {
    let Run { recorder, context } = &run;
    let is_first = context.attempt() == 1;
    recorder.write(What::Began { job: context.id(), fence: context.fence(), attempt: context.attempt() });
    run.step("first", is_first && number % 7 == 1).await?;
    if number % 8 == 3 {
        context.emit("tell", event(number - 1), &fastrand::u64(..)).await?;
    }
    let came = context.wait_for("event", event(number), TIME).await?;
    run.told("wait/event", came);
    if is_first && number % 5 == 2 {
        return Err(NotDone::retry("the first time it fails"));
    }
    let value = run.step(if came.is_some() { "came" } else { "missed" }, false).await?;
    context.sleep("nap", Duration::from_millis(fastrand::u64(..50))).await?;
    run.told("wait/nap", None);
    if number.is_multiple_of(4) && !again {
        context.continue_as_new(&Errand { number, again: true }).await?;
    }
    Ok(value)
}

/// A run of an errand.
struct Run {
    recorder: Arc<Recorder>,
    context: DurableContext,
}

impl Run {
    /// A step whose effect comes to another value each time; it may fail after its effect.
    async fn step(&self, name: &str, may_fail: bool) -> Result<u64, NotDone> {
        let (job, fence) = (self.context.id(), self.context.fence());
        // Before it and within it there is something to interrupt.
        sleep(Duration::from_millis(fastrand::u64(..300))).await;
        let effect = async |_key| {
            self.recorder.write(What::Effect { job, name: stored(name), fence });
            sleep(Duration::from_millis(fastrand::u64(..300))).await;
            match may_fail && fastrand::bool() {
                true => Err(NotDone::retry("the effect happened, and nobody was told")),
                false => Ok(fastrand::u64(..)),
            }
        };
        let value = self.context.step(name, effect).await?;
        self.told(name, Some(value));
        Ok(value)
    }

    fn told(&self, name: &str, value: Option<u64>) {
        let value = value.map(|value| Stage::Done(Json::encode(&value).expect("a number is JSON")));
        let stage = value.unwrap_or(Stage::TimedOut);
        self.recorder.write(What::Told { job: self.context.id(), name: stored(name), stage });
    }
}

fn stored(name: &str) -> Name {
    name.parse().expect("short, and without U+0000")
}
