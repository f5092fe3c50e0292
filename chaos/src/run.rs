//! Processes that work while this one breaks things.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::process::Stdio;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use fenced_queue::JobArgs;
use fenced_queue::Queue;
use fenced_queue::contract::Execution;
use fenced_queue::contract::JobState;
use fenced_queue::contract::Limit;
use fenced_queue::contract::ListFilter;
use fenced_queue::contract::NewJob;
use queue_conformance::BoxError;
use queue_conformance::Direction;
use queue_conformance::Proxy;
use tokio::process::Child;
use tokio::process::Command;
use tokio::task::JoinHandle;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio::time::sleep;

use crate::check::Verdict;
use crate::check::check;
use crate::history::Recorder;
use crate::history::What;
use crate::history::read;
use crate::recording::Recording;
use crate::work::Errand;
use crate::work::LEASE;
use crate::work::events;
use crate::work::job;
use crate::work::recorded;

/// What libfaketime is told about the wall clock of one worker after the other.
const CLOCKS: [&str; 3] = ["+1h", "-1h", "+0"];

/// What is broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A worker is killed, and another started.
    Kill,
    /// A worker is stopped for longer than its lease, and goes on.
    Freeze,
    /// The connections of a worker are cut.
    Cut,
    /// The answers to a worker are lost: they are held back, and then its connections cut.
    Lose,
    /// A worker and the database hear nothing of each other for longer than the lease, and then everything.
    Silence,
    /// Whatever a shell's command breaks, and mends again before it ends. One runs at a time, beside the other faults.
    Command {
        /// What people call it.
        name: String,
        /// The command.
        command: String,
    },
}

impl Fault {
    const NAMES: [(&str, Self); 5] = [
        ("kill", Self::Kill),
        ("freeze", Self::Freeze),
        ("cut", Self::Cut),
        ("lose", Self::Lose),
        ("silence", Self::Silence),
    ];
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::NAMES.into_iter().find(|(name, _)| *name == text);
        known
            .map(|(_, fault)| fault)
            .ok_or_else(|| format!("{text}: known are {}", Self::NAMES.map(|(n, _)| n).join(", ")))
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Self::Command { name, .. } = self {
            return f.write_str(name);
        }
        let known = Self::NAMES.iter().find(|(_, fault)| fault == self);
        f.write_str(known.map_or("", |(name, _)| name))
    }
}

/// A run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The store, which must be empty: of a cluster its nodes, which workers use in turn.
    pub urls: Vec<String>,
    /// For the records; it must be empty.
    pub folder: PathBuf,
    /// How many workers.
    pub workers: usize,
    /// For how long things are broken.
    pub lasts: Duration,
    /// How long after a fault the next one follows.
    pub pause: Duration,
    /// How many jobs are enqueued in a second.
    pub rate: usize,
    /// What is broken, one after the other, in an order that changes.
    pub faults: Vec<Fault>,
    /// The program that is told `work --url URL --folder FOLDER --by NAME`.
    pub program: PathBuf,
    /// The library of libfaketime, if the workers' wall clocks are to be an hour fast, an hour slow, or right, in turns.
    pub clocks: Option<PathBuf>,
    /// Whether every second worker has a pool of one connection. SQLite only.
    pub one_connection: bool,
    /// Whether the workers settle by id, as no worker should: for the proof that this is found out.
    pub by_id: bool,
    /// For how long it may be, once nothing is broken any more, that no further job ends, before all have.
    pub patience: Duration,
}

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The checker's word.
    pub verdict: Verdict,
    /// How often which fault was injected.
    pub faults: Vec<(Fault, usize)>,
    /// How often a worker could not begin, as where the server was down, and another was started in its place.
    pub unstarted: usize,
    /// From the last fault until every job had ended.
    pub recovered_after: Duration,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let faults: Vec<_> = self.faults.iter().map(|(fault, times)| format!("{times} {fault}")).collect();
        let figures = self.verdict.figures;
        write!(
            f,
            "{} jobs, {} runs ({} repeated), {} steps ({} effects repeated), {} events came, {} waits timed out, {} jobs went on as \
             another, faults: {}; {} workers could not begin; {} stale writes refused, {} calls unanswered, {} violations; \
             at most {:.1} s without an outcome, all ended {:.1} s after the last fault",
            figures.jobs,
            figures.runs,
            figures.repeated,
            figures.steps,
            figures.effects_repeated,
            figures.came,
            figures.timed_out,
            figures.continued,
            faults.join(", "),
            self.unstarted,
            figures.refused,
            figures.unanswered,
            self.verdict.violations.len(),
            figures.longest_pause.as_secs_f64(),
            self.recovered_after.as_secs_f64()
        )
    }
}

/// A worker's process, with a network of its own where there is one.
struct Process {
    by: String,
    child: Child,
    proxy: Option<Arc<Proxy>>,
}

struct Processes<'o> {
    options: &'o Options,
    started: usize,
    unstarted: usize,
    running: Vec<Process>,
    /// Faults that are not over yet.
    lasting: JoinSet<io::Result<()>>,
    /// The last [`Fault::Command`].
    command: Option<JoinHandle<Result<(), BoxError>>>,
}

impl Processes<'_> {
    async fn start(&mut self) -> Result<Process, BoxError> {
        let options = self.options;
        let url = &options.urls[self.started % options.urls.len()];
        // Behind a URL of several servers the driver would go past the proxy.
        let (url, proxy) = if url.contains("://") && !url.contains(',') {
            let given = url.split_once('?').map_or("", |(_, given)| given);
            // Else MongoDB's driver would ask the set for its members' addresses, and go past the proxy.
            let given = if url.starts_with("mongodb") { "directConnection=true" } else { given };
            let (url, proxy) = behind_proxy(url, given).await?;
            (url, Some(Arc::new(proxy)))
        } else {
            (url.clone(), None)
        };
        let by = format!("worker-{}", self.started);
        let mut command = Command::new(&options.program);
        command.args(["work", "--url", &url, "--by", &by, "--folder"]).arg(&options.folder);
        if options.by_id {
            command.args(["--by-id", "true"]);
        }
        if options.one_connection && self.started % 2 == 1 {
            command.args(["--one-connection", "true"]);
        }
        if let Some(library) = &options.clocks {
            wrong_clock(&mut command, library, CLOCKS[self.started % CLOCKS.len()]);
        }
        let log = File::create(options.folder.join(format!("{by}.log")))?;
        command.stdout(Stdio::null()).stderr(log).kill_on_drop(true);
        self.started += 1;
        Ok(Process { by, child: command.spawn()?, proxy })
    }

    async fn inject(&mut self, fault: &Fault) -> Result<(), BoxError> {
        let place = fastrand::usize(..self.running.len());
        let longer = LEASE + LEASE / 2;
        let process = &self.running[place];
        match (fault, process.proxy.clone(), process.child.id()) {
            (Fault::Kill, ..) => {
                self.running[place].child.kill().await?;
                self.running[place] = self.start().await?;
            }
            (Fault::Freeze, _, Some(pid)) => {
                signal(pid, "STOP").await?;
                self.lasting.spawn(async move {
                    sleep(longer).await;
                    signal(pid, "CONT").await
                });
            }
            (Fault::Cut, Some(proxy), _) => proxy.cut(),
            (Fault::Lose, Some(proxy), _) => {
                proxy.hold(Direction::ToClient);
                sleep(Duration::from_millis(200)).await;
                proxy.cut();
                proxy.release();
            }
            (Fault::Silence, Some(proxy), _) => {
                proxy.hold(Direction::ToServer);
                proxy.hold(Direction::ToClient);
                self.lasting.spawn(async move {
                    sleep(longer).await;
                    proxy.release();
                    Ok(())
                });
            }
            (Fault::Command { command, .. }, ..) => self.command = Some(tokio::spawn(shell(command.clone()))),
            // It ended just now.
            (Fault::Freeze, ..) => {}
            _ => return Err(format!("{fault} needs a URL of one server").into()),
        }
        Ok(())
    }

    async fn command_is_over(&mut self) -> Result<(), BoxError> {
        match self.command.take() {
            Some(command) => command.await?,
            None => Ok(()),
        }
    }

    /// Starts those anew that could not begin.
    ///
    /// # Errors
    ///
    /// One has ended otherwise: only being killed ends a worker.
    async fn mend(&mut self) -> Result<(), BoxError> {
        for place in 0..self.running.len() {
            let Process { by, child, .. } = &mut self.running[place];
            let Some(status) = child.try_wait()? else { continue };
            if status.code() != Some(1) {
                return Err(format!("{by} has ended by itself: {status}").into());
            }
            self.unstarted += 1;
            self.running[place] = self.start().await?;
        }
        Ok(())
    }
}

async fn shell(command: String) -> Result<(), BoxError> {
    let ended = Command::new("sh").args(["-c", &command]).stdin(Stdio::null()).stdout(Stdio::null()).status().await?;
    if !ended.success() {
        return Err(format!("{command}: {ended}").into());
    }
    Ok(())
}

/// Has the program read this wall clock; what it measures durations with is left alone.
fn wrong_clock(command: &mut Command, library: &Path, clock: &str) {
    command.env("LD_PRELOAD", library).env("FAKETIME", clock).env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
}

/// That a worker would read a wrong clock.
async fn clocks_are_wrong(program: &Path, library: &Path) -> Result<(), BoxError> {
    const NEARLY_AN_HOUR: u64 = 3500;
    let mut command = Command::new(program);
    wrong_clock(command.arg("clock"), library, CLOCKS[0]);
    let said = String::from_utf8(command.output().await?.stdout)?;
    let right = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs();
    match said.trim().parse::<u64>() {
        Ok(wrong) if wrong > right + NEARLY_AN_HOUR => Ok(()),
        _ => Err(format!("{} does not change the clock of {}: {said:?}", library.display(), program.display()).into()),
    }
}

async fn signal(pid: u32, signal: &str) -> io::Result<()> {
    // It may have ended meanwhile.
    Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]).stderr(Stdio::null()).status().await.map(drop)
}

/// The URL of the same database through a proxy of its own, with these options in the place of the URL's.
///
/// # Errors
///
/// A URL without a server, or a proxy that cannot be started.
pub async fn behind_proxy(url: &str, options: &str) -> Result<(String, Proxy), BoxError> {
    let (scheme, rest) = url.split_once("://").ok_or("the URL names no server")?;
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (user, server) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
    let proxy = Proxy::start(server).await?;
    let database = path.split('?').next().unwrap_or_default();
    Ok((format!("{scheme}://{user}127.0.0.1:{}/{database}?{options}", proxy.port()), proxy))
}

/// Breaks things while workers work, waits until every job has ended, and judges what happened.
///
/// # Errors
///
/// It cannot be done, or not every job has ended in time. Violations are no error here: they are in the outcome.
pub async fn run(options: &Options) -> Result<Outcome, BoxError> {
    let url = options.urls.first().ok_or("no store is named")?;
    let queue = Queue::connect(url).await?;
    let recorder = Arc::new(Recorder::create(&options.folder, "run")?);
    if let Some(library) = &options.clocks {
        clocks_are_wrong(&options.program, library).await?;
    }
    let (running, lasting) = (Vec::new(), JoinSet::new());
    let mut processes = Processes { options, started: 0, unstarted: 0, running, lasting, command: None };
    for _ in 0..options.workers {
        let process = processes.start().await?;
        processes.running.push(process);
    }
    let end = Instant::now() + options.lasts;
    let producing = tokio::spawn(produce(url.clone(), Arc::clone(&recorder), options.rate, end));
    let mut faults: Vec<_> = options.faults.iter().map(|fault| (fault.clone(), 0)).collect();
    let mut turns = Vec::new();
    while Instant::now() < end {
        sleep(options.pause).await;
        processes.mend().await?;
        if turns.is_empty() {
            turns.extend(0..faults.len());
            fastrand::shuffle(&mut turns);
        }
        if let Some((fault, times)) = turns.pop().map(|turn| &mut faults[turn]) {
            if let Fault::Command { .. } = fault {
                processes.command_is_over().await?;
            }
            recorder.write(What::Broke { what: fault.to_string() });
            processes.inject(fault).await?;
            *times += 1;
        }
    }
    processes.command_is_over().await?;
    while let Some(over) = processes.lasting.join_next().await {
        over??;
    }
    let quiet = Instant::now();
    producing.await??;
    let (mut ended, mut since) = (0, Instant::now());
    loop {
        processes.mend().await?;
        // Those connections that the last fault broke fail once more.
        let state = match queue.counts().await {
            Ok(counts) => {
                let (done, open): (Vec<_>, Vec<_>) =
                    counts.iter().partition(|count| count.state.is_some_and(JobState::is_final));
                if open.is_empty() {
                    break;
                }
                let done = done.iter().map(|count| count.jobs).sum();
                if done > ended {
                    (ended, since) = (done, Instant::now());
                }
                format!("{counts:?}")
            }
            Err(error) => error.to_string(),
        };
        if since.elapsed() > options.patience {
            return Err(format!("nothing has ended for {} s: {state}", since.elapsed().as_secs()).into());
        }
        sleep(Duration::from_millis(100)).await;
    }
    let recovered_after = quiet.elapsed();
    for process in &mut processes.running {
        process.child.kill().await?;
    }
    let ends = ends(&Queue::new(recorded(url, &recorder).await?)).await?;
    let verdict = check(&read(&options.folder)?, &ends);
    Ok(Outcome { verdict, faults, unstarted: processes.unstarted, recovered_after })
}

/// Enqueues until it is over. What was not answered is sent again, under the same ids.
async fn produce(url: String, recorder: Arc<Recorder>, rate: usize, end: Instant) -> Result<(), BoxError> {
    const BATCHES: usize = 20;
    let queue = Queue::new(recorded(&url, &recorder).await?);
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / u32::try_from(BATCHES)?);
    let mut number = 0;
    let mut emissions = JoinSet::new();
    while Instant::now() < end {
        ticks.tick().await;
        let mut jobs: Vec<NewJob> = Vec::new();
        for _ in 0..rate.div_ceil(BATCHES) {
            number += 1;
            jobs.push(job(&queue, number)?);
            for (event, after) in events(number) {
                let queue = queue.clone();
                emissions.spawn(async move {
                    sleep(after).await;
                    // One that fails may come, or not: as the record says.
                    let _ = queue.emit(&event, &fastrand::u64(..)).await;
                });
            }
        }
        let patience = Instant::now() + Duration::from_secs(60);
        while let Err(error) = queue.enqueue_many(&jobs).await {
            if Instant::now() > patience {
                return Err(error.into());
            }
            sleep(Duration::from_millis(100)).await;
        }
        while emissions.try_join_next().is_some() {}
    }
    while emissions.join_next().await.is_some() {}
    Ok(())
}

/// What is there in the end; what is read of steps goes into the record.
async fn ends(queue: &Queue<Recording>) -> Result<Vec<Execution>, BoxError> {
    let mut ends = Vec::new();
    let mut after = None;
    loop {
        let page = queue.list(&ListFilter::default(), after, Limit::MAX.rows()).await?;
        for job in page.items {
            if job.kind.as_str() == Errand::KIND {
                queue.steps(job.id()).await?;
            }
            ends.push(job.execution);
        }
        match page.next {
            Some(next) => after = Some(next),
            None => return Ok(ends),
        }
    }
}
