//! One job per file: hash it, count its bytes and lines.

use std::collections::BTreeMap;
use std::collections::HashSet;
use std::path::Path;

use fenced_queue::Enqueued;
use fenced_queue::Job;
use fenced_queue::JobArgs;
use fenced_queue::JobContext;
use fenced_queue::JobId;
use fenced_queue::JobState;
use fenced_queue::ListFilter;
use fenced_queue::NewJob;
use fenced_queue::NotDone;
use fenced_queue::Queue;
use serde::Deserialize;
use serde::Serialize;
use sha2::Digest;
use sha2::Sha256;
use uuid::Uuid;

use crate::Result;
use crate::ensure;
use crate::screen::paint;

pub(crate) const QUEUE: &str = "files";

/// So many files are enough to see it work.
pub(crate) const MOST: usize = 2_000;

#[derive(Serialize, Deserialize)]
pub(crate) struct Measure {
    path: String,
}

impl JobArgs for Measure {
    const KIND: &'static str = "measure";
    const QUEUE: &'static str = QUEUE;
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Measured {
    sha256: String,
    bytes: usize,
    lines: usize,
}

/// The handler.
pub(crate) async fn measure(_: JobContext, file: Measure) -> Result<Measured, NotDone> {
    // What blocks or computes for long goes to a thread of its own: heartbeats run beside the handlers.
    tokio::task::spawn_blocking(move || measured(&file.path)).await?
}

fn measured(path: &str) -> Result<Measured, NotDone> {
    // Trying again would not mend it; the next run of this program does, if the file is back.
    let content = std::fs::read(path).map_err(NotDone::fail)?;
    let sha256 = Sha256::digest(&content).iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(Measured { sha256, bytes: content.len(), lines: content.split(|byte| *byte == b'\n').count() - 1 })
}

/// A job for each file, with an id made of path and content.
pub(crate) fn jobs(queue: &Queue, folder: &Path) -> Result<Vec<NewJob>> {
    let (mut folders, mut jobs) = (vec![folder.to_owned()], Vec::new());
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        for entry in entries {
            let entry = entry?;
            let (name, kind) = (entry.file_name(), entry.file_type()?);
            if kind.is_dir() && name != "target" && name != ".git" {
                folders.push(entry.path());
            }
            // A name that is not text, or a file that cannot be read, is passed over.
            let path = entry.path().to_str().map(str::to_owned);
            let (Some(path), true) = (path, kind.is_file() && jobs.len() < MOST) else { continue };
            let Ok(content) = std::fs::read(&path) else { continue };
            let digest = Sha256::new().chain_update(&path).chain_update([0]).chain_update(content).finalize();
            let mut id = [0; 16];
            id.copy_from_slice(&digest[..16]);
            jobs.push(queue.enqueue(&Measure { path }).id(Uuid::new_v8(id)).into_job()?);
        }
    }
    ensure(!jobs.is_empty(), "the folder has a file that can be read")?;
    Ok(jobs)
}

/// Enqueues them all in one call, and answers how many were new. What failed in an earlier run is run again.
pub(crate) async fn enqueue(queue: &Queue, jobs: &[NewJob]) -> Result<usize> {
    let answers = queue.enqueue_many(jobs).await?;
    let known: HashSet<_> =
        answers.iter().filter(|answer| !matches!(answer, Enqueued::New(_))).map(|answer| answer.id()).collect();
    for job in all(queue).await?.into_values() {
        if job.state() == JobState::Failed && known.contains(&job.id()) {
            queue.rerun(job.id()).await?;
        }
    }
    Ok(answers.iter().filter(|answer| matches!(answer, Enqueued::New(_))).count())
}

/// Every job of the queue.
async fn all(queue: &Queue) -> Result<BTreeMap<JobId, Job>> {
    let mut found = BTreeMap::new();
    let mut filter = ListFilter::default();
    filter.queue = Some(QUEUE.parse()?);
    let mut after = None;
    loop {
        let page = queue.list(&filter, after, 1_000).await?;
        found.extend(page.items.into_iter().map(|job| (job.id(), job)));
        match page.next {
            Some(next) => after = Some(next),
            None => return Ok(found),
        }
    }
}

/// Reads the outcomes back and shows them.
pub(crate) async fn table(queue: &Queue, jobs: &[NewJob]) -> Result<()> {
    let found = all(queue).await?;
    let mut measured = Vec::new();
    for job in jobs.iter().filter_map(|job| found.get(&job.id)).filter(|job| job.state() == JobState::Completed) {
        let (file, result) = (job.payload.decode::<Measure>()?, job.result.as_ref().ok_or("no result")?);
        measured.push((result.decode::<Measured>()?, file.path, &job.execution));
    }
    ensure(measured.len() == jobs.len(), "every file has a completed job")?;

    println!("   {:<10} {:<10} {:>6}", "queue", "state", "jobs");
    for count in queue.counts().await? {
        let state = count.state.map_or("unknown", JobState::as_str);
        println!("   {:<10} {state:<10} {:>6}", count.queue.as_str(), count.jobs);
    }
    measured.sort_by_key(|(measured, ..)| std::cmp::Reverse(measured.bytes));
    println!("\n   {:>9} {:>7}  {:<10} {:>7} {:>5}  biggest files", "bytes", "lines", "sha-256", "attempt", "fence");
    for (Measured { sha256, bytes, lines }, path, execution) in measured.iter().take(5) {
        let (hash, attempt, fence) = (&sha256[..10], execution.attempt, execution.fence);
        let path = Path::new(path).strip_prefix(std::env::current_dir()?).unwrap_or(Path::new(path)).display();
        println!("   {bytes:>9} {lines:>7}  {} {attempt:>7} {fence:>5}  {path}", paint(36, hash));
    }
    Ok(())
}
