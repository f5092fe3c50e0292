//! A worker's process.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fenced_queue::JobArgs;
use fenced_queue::JobContext;
use fenced_queue::NotDone;
use fenced_queue::Queue;
use fenced_queue::RetryPolicy;
use fenced_queue::Worker;
use fenced_queue::contract::Inspect;
use fenced_queue::sqlite::SqliteBackend;
use fenced_queue::sqlite::sqlx::sqlite::SqlitePoolOptions;
use queue_conformance::BoxError;
use serde::Deserialize;
use serde::Serialize;

use crate::history::Recorder;
use crate::history::What;
use crate::recording::Recording;

/// How long a job is held without a heartbeat: a process that is frozen for longer loses its jobs.
pub(crate) const LEASE: Duration = Duration::from_secs(2);

#[derive(Serialize, Deserialize)]
pub(crate) struct Work {
    pub(crate) number: u64,
}

impl JobArgs for Work {
    const KIND: &'static str = "work";
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
    let worker = Worker::builder(&queue)
        .lease(LEASE)
        .concurrency(20)
        .poll(Duration::from_millis(200))
        .retry(RetryPolicy::exponential(Duration::from_millis(20), Duration::from_millis(200)))
        .register(move |context, args| handle(Arc::clone(&recorder), context, args))
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
    tokio::time::sleep(Duration::from_millis(fastrand::u64(..50))).await;
    match number % 10 {
        0 if context.attempt() == 1 => Err(NotDone::retry("the first time it fails")),
        1 if context.attempt() == 1 => panic!("the first time it panics"),
        _ => Ok(number),
    }
}
