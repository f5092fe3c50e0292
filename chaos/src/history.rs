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
use fenced_queue::contract::Json;
use fenced_queue::contract::Name;
use fenced_queue::contract::Revision;
use fenced_queue::contract::Step;
use fenced_queue::contract::StepState;
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
    /// A step of a job is sent.
    Step {
        /// Which call.
        call: u64,
        /// The job.
        job: JobId,
        /// The step.
        name: Name,
        /// The moment of the job that it is based on.
        from: Revision,
        /// What is done to it.
        action: Action,
    },
    /// It is answered.
    Stepped {
        /// Which call.
        call: u64,
        /// What became of the job.
        answer: Answer,
        /// The step as it is now; none after a refusal.
        step: Option<Seen>,
    },
    /// The steps of a job are asked for.
    Look {
        /// Which call.
        call: u64,
        /// The job.
        job: JobId,
    },
    /// Those are all.
    Looked {
        /// Which call.
        call: u64,
        /// As they are now.
        steps: Vec<Seen>,
    },
    /// A job is to end, and another to go on in its place.
    HandOver {
        /// Which call.
        call: u64,
        /// The end.
        change: Change,
        /// The other job.
        successor: Asked,
    },
    /// It is answered.
    HandedOver {
        /// Which call.
        call: u64,
        /// What became of the first job.
        answer: Answer,
    },
    /// An event is sent.
    Emit {
        /// Which call.
        call: u64,
        /// Its key.
        event: Name,
        /// Its payload.
        payload: Json,
        /// For how many microseconds it is kept.
        keep: u64,
    },
    /// The store has it.
    Emitted {
        /// Which call.
        call: u64,
        /// The payload of one that was kept before, which counts; none if this is the first.
        kept: Option<Json>,
    },
    /// Waits whose time is over are to end.
    TimeOut {
        /// Which call.
        call: u64,
    },
    /// They have ended.
    TimedOut {
        /// Which call.
        call: u64,
        /// The waits of these jobs.
        jobs: Vec<JobId>,
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
    /// The side effect of a step.
    Effect {
        /// The job.
        job: JobId,
        /// The step.
        name: Name,
        /// The fence of the claim.
        fence: u64,
    },
    /// A handler was told how a step of it ended.
    Told {
        /// The job.
        job: JobId,
        /// The step.
        name: Name,
        /// How.
        stage: Stage,
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

/// What is done to a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Action {
    /// Its effect is about to happen.
    Begin,
    /// It has this value.
    Finish(Json),
    /// The job waits.
    Wait {
        /// For this event, or for the time alone.
        event: Option<Name>,
        /// For so many microseconds, from when it is first registered.
        time: u64,
        /// The moment of the job that its suspension makes.
        to: Option<Revision>,
    },
}

/// A step as the store showed it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// Its name.
    pub name: Name,
    /// The fence of the claim that wrote it.
    pub fence: u64,
    /// How far it is.
    pub stage: Stage,
}

/// How far a step is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// Its effect may have happened.
    Begun,
    /// The job waits.
    Waiting,
    /// It has this value.
    Done(Json),
    /// The time was over before the event came.
    TimedOut,
}

impl From<&Step> for Seen {
    fn from(step: &Step) -> Self {
        let stage = match &step.state {
            StepState::Begun => Stage::Begun,
            StepState::Waiting(_) => Stage::Waiting,
            StepState::Done(value) => Stage::Done(value.clone()),
            StepState::TimedOut => Stage::TimedOut,
        };
        Self { name: step.name.clone(), fence: step.fence, stage }
    }
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
