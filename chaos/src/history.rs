//! What happened, as every process wrote it down.

use std::fs::File;
use std::fs::OpenOptions;
use std::io;
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fenced_queue::contract::Execution;
use fenced_queue::contract::JobId;
use fenced_queue::contract::JobState;
use fenced_queue::contract::Revision;
use rustix::time::ClockId;
use rustix::time::clock_gettime;
use serde::Deserialize;
use serde::Serialize;

/// One line of a record.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Entry {
    /// By this machine's monotonic clock, in microseconds: all processes of a run share it.
    pub at: u64,
    /// Which process.
    pub by: String,
    /// What it did, or learned.
    pub what: What,
}

/// What a process did, or learned. A call is written down before it is made and when it is answered, under a number that the process
/// gives it once: a process that is killed in between leaves the question without an answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum What {
    /// Jobs are sent to the store.
    Enqueue {
        /// Which call.
        call: u64,
        /// The jobs.
        jobs: Vec<Asked>,
    },
    /// The store has them; `false` for one that it refused, because another has its key.
    Enqueued {
        /// Which call.
        call: u64,
        /// In their order.
        stored: Vec<bool>,
    },
    /// Jobs are asked for.
    Claim {
        /// Which call.
        call: u64,
    },
    /// Jobs were given out.
    Claimed {
        /// Which call.
        call: u64,
        /// As they are now.
        jobs: Vec<Execution>,
    },
    /// Compare-and-updates are sent.
    Update {
        /// Which call.
        call: u64,
        /// Each of them.
        changes: Vec<Change>,
    },
    /// They are answered.
    Updated {
        /// Which call.
        call: u64,
        /// In their order.
        answers: Vec<Answer>,
    },
    /// A call failed.
    Failed {
        /// Which call.
        call: u64,
        /// Whether nothing was written for sure.
        nothing: bool,
    },
    /// A handler begins: the side effect of the job.
    Began {
        /// The job.
        job: JobId,
        /// The fence of its claim.
        fence: u64,
        /// The attempt.
        attempt: u32,
    },
    /// Something was broken.
    Broke {
        /// What.
        what: String,
    },
}

/// A job that is enqueued.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Asked {
    /// The job.
    pub job: JobId,
    /// Its unique key.
    pub key: Option<String>,
    /// How often it may be started.
    pub max_attempts: u32,
}

/// One compare-and-update.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Change {
    /// The job.
    pub job: JobId,
    /// The moment that it is based on.
    pub from: Revision,
    /// The moment that it makes; none if it keeps the old one.
    pub to: Option<Revision>,
    /// The new state.
    pub state: JobState,
    /// Whether it records a failure.
    pub fails: bool,
}

/// What a compare-and-update came to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// It was made, and the row is so.
    Applied(Execution),
    /// The row is so, and was not changed.
    Conflict(Execution),
    /// There is no such row, or it cannot be read.
    Missing,
}

/// Appends to a record. What was written is there also if the process is killed.
#[derive(Debug)]
pub struct Recorder {
    by: String,
    file: Mutex<File>,
    calls: AtomicU64,
}

impl Recorder {
    /// A record of its own for this process, in this folder.
    ///
    /// # Errors
    ///
    /// The file cannot be made, or there is one.
    pub fn create(folder: &Path, by: &str) -> io::Result<Self> {
        let file = OpenOptions::new().create_new(true).append(true).open(folder.join(format!("{by}.jsonl")))?;
        Ok(Self { by: by.to_owned(), file: Mutex::new(file), calls: AtomicU64::new(0) })
    }

    /// A number for a call.
    pub fn call(&self) -> u64 {
        self.calls.fetch_add(1, Ordering::Relaxed)
    }

    /// Writes a line.
    ///
    /// # Panics
    ///
    /// It cannot be written: then the run says nothing.
    pub fn write(&self, what: What) {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = Entry { at: micros(), by: self.by.clone(), what };
        let mut line = serde_json::to_vec(&entry).expect("it is JSON");
        line.push(b'\n');
        // One write, so that a process that is killed leaves whole lines.
        file.write_all(&line).expect("the record can be written");
    }
}

/// By the clock that counts from this machine's start: the wall clocks of a run's processes may differ.
fn micros() -> u64 {
    let now = Duration::try_from(clock_gettime(ClockId::Monotonic)).expect("it counts up from 0");
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

/// The whole history of a folder, in the order of time.
///
/// # Errors
///
/// A file cannot be read, or is no record.
pub fn read(folder: &Path) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for file in folder.read_dir()? {
        let path = file?.path();
        if path.extension().is_some_and(|extension| extension == "jsonl") {
            for line in std::fs::read_to_string(path)?.lines() {
                entries.push(serde_json::from_str(line)?);
            }
        }
    }
    entries.sort_by_key(|entry: &Entry| entry.at);
    Ok(entries)
}
