//! A first look: one job per file of a folder, a worker that freezes, and what the database says afterwards.
//!
//! ```text
//! cargo run --example quickstart [-- [FOLDER] [--url URL]]
//! cargo run --example quickstart --features postgres -- --url postgres://user@host/database
//! ```
//!
//! The features are `postgres`, `mysql` (for MariaDB too) and `mongo`; SQLite needs none.
//!
//! Run it twice: the second run enqueues nothing new, since the same id is the same job.

mod files;
mod frozen;
mod refusals;
mod screen;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use fenced_queue::JobState;
use fenced_queue::Queue;
use fenced_queue::Worker;
use tokio::sync::oneshot;

/// Whatever went wrong, for the reader.
type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nquickstart: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<()> {
    let (folder, url) = arguments()?;
    refusals::watch()?;
    let queue = Queue::connect(&url).await?;

    screen::title("1  Enqueue: one job per file");
    println!("   folder    {}", folder.display());
    println!("   database  {}", without_secrets(&url));
    let jobs = files::jobs(&queue, &folder)?;
    let new = files::enqueue(&queue, &jobs).await?;
    let known = jobs.len() - new;
    if jobs.len() == files::MOST {
        println!("   only the first {} files are taken", files::MOST);
    }
    match new {
        0 => println!("   nothing new: all {known} files are known, by ids made of path and content"),
        _ => println!("   {new} new jobs, {known} known already"),
    }

    screen::title("2  Work");
    let (stop, stopped) = oneshot::channel();
    let worker = Worker::builder(&queue).name("quickstart").concurrency(8).register(files::measure).build()?;
    let working = tokio::spawn(worker.run_until(async {
        let _ = stopped.await;
    }));
    watch(&queue, jobs.len()).await?;
    let _ = stop.send(());
    let report = working.await?;
    match report.completed {
        0 => println!("   all of them had ended already"),
        done => println!("   {done} completed now, {} outcomes refused", report.conflicts),
    }

    screen::title("3  A worker freezes in the middle of a job");
    let frozen = frozen::demonstrate(&queue, &url).await?;

    screen::title("4  What the database says");
    files::table(&queue, &jobs).await?;
    frozen::table(&queue, frozen).await
}

/// Draws the progress until every job of this run has ended.
async fn watch(queue: &Queue, jobs: usize) -> Result<()> {
    let mut bar = screen::Bar::new(jobs);
    let mut ticks = tokio::time::interval(Duration::from_millis(40));
    loop {
        ticks.tick().await;
        let counts = queue.counts().await?;
        let active = counts.iter().filter(|count| count.queue.as_str() == files::QUEUE);
        let active = active.filter(|count| count.state.is_some_and(JobState::is_active)).map(|count| count.jobs);
        let active = usize::try_from(active.sum::<u64>())?;
        bar.draw(jobs.saturating_sub(active));
        if active == 0 {
            return Ok(());
        }
    }
}

fn arguments() -> Result<(PathBuf, String)> {
    let (mut folder, mut url) = (None, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--url" => url = Some(arguments.next().ok_or("--url needs a URL")?),
            option if option.starts_with('-') => return Err("usage: quickstart [FOLDER] [--url URL]".into()),
            _ => folder = Some(PathBuf::from(argument)),
        }
    }
    let folder = folder.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let folder = folder.canonicalize().map_err(|error| format!("{}: {error}", folder.display()))?;
    let url = url.unwrap_or_else(default_url);
    if url.contains("memory:") {
        return Err("quickstart needs a file or a server, since it opens the store twice".into());
    }
    Ok((folder, url))
}

/// The URL without the user, the password and the parameters.
fn without_secrets(url: &str) -> String {
    let (rest, _) = url.split_once('?').unwrap_or((url, ""));
    match (rest.split_once("://"), rest.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, place))) => format!("{scheme}://{place}"),
        _ => rest.to_owned(),
    }
}

/// Beside what Cargo builds, so that the next run finds it.
fn default_url() -> String {
    let program = std::env::current_exe().ok();
    let target = program.as_deref().and_then(|program| program.ancestors().nth(3).map(PathBuf::from));
    let path = target.unwrap_or_else(std::env::temp_dir).join("quickstart.db");
    // In a URL these two have a meaning.
    format!("sqlite:{}", path.display().to_string().replace('%', "%25").replace('?', "%3F"))
}

/// What this program claims must be so.
fn ensure(holds: bool, claim: &str) -> Result<()> {
    match holds {
        true => Ok(()),
        false => Err(format!("not as claimed: {claim}").into()),
    }
}
