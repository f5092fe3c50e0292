//! A job, new and stored, and the part of it that lifecycle decisions are based on.

use std::collections::HashMap;
use std::fmt;
use std::num::NonZeroU32;

use serde::Deserialize;
use serde::Serialize;

use crate::Capabilities;
use crate::Error;
use crate::ErrorKind;
use crate::Fingerprint;
use crate::Invalid;
use crate::JobId;
use crate::JobState;
use crate::Json;
use crate::Name;
use crate::Revision;
use crate::Timestamp;
use crate::UniqueKey;
use crate::When;
use crate::WorkerId;

/// The order in which due jobs of a queue are claimed: 0 first, 9 last, 5 by default.
///
/// The range is closed on purpose: a claim probes level after level through an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Priority(u8);

impl Priority {
    /// Claimed first.
    pub const FIRST: Self = Self(0);
    /// Claimed last.
    pub const LAST: Self = Self(9);

    /// The priority of this number.
    ///
    /// # Errors
    ///
    /// A number above 9.
    pub fn new(number: u8) -> Result<Self, Invalid> {
        if number <= Self::LAST.0 {
            Ok(Self(number))
        } else {
            Err(Invalid::range("priority", number, Self::FIRST.0, Self::LAST.0))
        }
    }

    /// The number.
    pub fn get(self) -> u8 {
        self.0
    }
}

impl Default for Priority {
    fn default() -> Self {
        Self(5)
    }
}

impl TryFrom<u8> for Priority {
    type Error = Invalid;

    fn try_from(number: u8) -> Result<Self, Invalid> {
        Self::new(number)
    }
}

impl From<Priority> for u8 {
    fn from(priority: Priority) -> Self {
        priority.0
    }
}

/// A job to enqueue. Every field has been checked by its type, so nothing here can be refused later
/// but a payload over the store's cap.
///
/// ```
/// use queue_core::{Json, Name, NewJob, Priority};
///
/// let mut job = NewJob::new(Name::try_from("mail")?, Name::try_from("welcome")?, Json::encode(&42)?);
/// job.priority = Priority::new(2)?;
/// # Ok::<(), queue_core::Invalid>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewJob {
    /// Made by the client. Enqueueing the same id with the same content again is harmless.
    pub id: JobId,
    /// Where workers look for it.
    pub queue: Name,
    /// Which handler runs it.
    pub kind: Name,
    /// What the handler gets.
    pub payload: Json,
    /// Its place among the due jobs of its queue.
    pub priority: Priority,
    /// How many times it may be started before a failure is final.
    pub max_attempts: NonZeroU32,
    /// When it becomes due.
    pub available: When,
    /// At most one active job of a queue has this key.
    pub unique_key: Option<UniqueKey>,
}

impl NewJob {
    /// How many times a job may be started, unless it says otherwise.
    pub const DEFAULT_MAX_ATTEMPTS: NonZeroU32 = NonZeroU32::new(20).expect("not zero");

    /// A job with a new id, due now, of the default priority, without a key.
    pub fn new(queue: Name, kind: Name, payload: Json) -> Self {
        Self {
            id: JobId::new(),
            queue,
            kind,
            payload,
            priority: Priority::default(),
            max_attempts: Self::DEFAULT_MAX_ATTEMPTS,
            available: When::Now,
            unique_key: None,
        }
    }

    /// Whether this is `stored`, enqueued again: the same id and the same content. The due
    /// time is not compared, since retries and snoozes move it.
    pub fn repeats(&self, stored: &Job) -> bool {
        let Self { id, queue, kind, payload, priority, max_attempts, available: _, unique_key } = self;
        *id == stored.execution.id
            && *queue == stored.queue
            && *kind == stored.kind
            && *payload == stored.payload
            && *priority == stored.priority
            && *max_attempts == stored.execution.max_attempts
            && *unique_key == stored.unique_key
    }

    /// The row to store, when the store's clock shows `now`.
    pub fn into_job(self, now: Timestamp) -> Job {
        Job {
            execution: Execution {
                id: self.id,
                state: JobState::Waiting,
                attempt: 0,
                max_attempts: self.max_attempts,
                fence: 0,
                revision: Revision::random(),
                claimed_by: None,
                claimed_at: None,
                attempted_at: None,
                lease_expires_at: None,
            },
            queue: self.queue,
            kind: self.kind,
            payload: self.payload,
            priority: self.priority,
            available_at: self.available.resolve(now),
            created_at: now,
            finished_at: None,
            unique_key: self.unique_key,
            result: None,
            errors: Vec::new(),
        }
    }
}

/// Refuses a batch with a payload over the cap, or with one id for two contents, naming the item.
/// Every backend calls it before it writes.
///
/// # Errors
///
/// [`ErrorKind::TooLarge`] or [`ErrorKind::IdReused`], not applied.
pub fn check_new_jobs(jobs: &[NewJob], capabilities: &Capabilities) -> Result<(), Error> {
    let mut first = HashMap::with_capacity(jobs.len());
    for (index, job) in jobs.iter().enumerate() {
        check_size("payload", &job.payload, capabilities.max_payload).map_err(|error| error.at_index(index))?;
        if let Some(first) = first.insert(job.id, job)
            && !job.repeats(&first.clone().into_job(Timestamp::MIN))
        {
            return Err(id_reused(job.id).at_index(index));
        }
    }
    Ok(())
}

/// Refuses a text over the cap.
pub(crate) fn check_size(what: &str, json: &Json, max: usize) -> Result<(), Error> {
    if json.bytes() <= max {
        return Ok(());
    }
    let message = format!("the {what} has {} bytes; at most {max} are stored", json.bytes());
    Err(Error::not_applied(ErrorKind::TooLarge, message))
}

/// The error for an id that another job has.
pub fn id_reused(id: JobId) -> Error {
    Error::not_applied(ErrorKind::IdReused, format!("job {id} exists with other content"))
}

/// The error for a successor whose unique key another job has; see [`DurableSteps::hand_over`](crate::DurableSteps::hand_over).
pub fn key_taken(successor: &NewJob, existing: JobId) -> Error {
    Error::invalid(format!("job {}: job {existing} is active and has its unique key", successor.id))
}

/// What became of a job that was enqueued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Enqueued {
    /// It is stored.
    New(JobId),
    /// The same job had been enqueued before, and may have run since.
    Existing(JobId),
    /// Another active job of the queue has its unique key; nothing was stored.
    Duplicate {
        /// The job that has the key.
        existing: JobId,
    },
}

impl Enqueued {
    /// The job that stands for the one enqueued.
    pub fn id(self) -> JobId {
        match self {
            Self::New(id) | Self::Existing(id) | Self::Duplicate { existing: id } => id,
        }
    }
}

/// The part of a job that a lifecycle decision is based on, without its payload.
///
/// It is what transitions are planned from and what compare-and-updates answer with, so a settle
/// moves no payload, and a row with an unreadable payload can still be settled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Execution {
    /// The job.
    pub id: JobId,
    /// Where it is in its life.
    pub state: JobState,
    /// How many times it was started, less what was given back; never an identity.
    pub attempt: u32,
    /// How many times it may be started.
    pub max_attempts: NonZeroU32,
    /// Raised by every claim and never lowered: the number to hand to other systems, so that they
    /// can refuse an older writer.
    pub fence: u64,
    /// The identity of this moment.
    pub revision: Revision,
    /// Who holds it, or held it when it ended.
    pub claimed_by: Option<WorkerId>,
    /// When it was claimed.
    pub claimed_at: Option<Timestamp>,
    /// When it was started.
    pub attempted_at: Option<Timestamp>,
    /// Until when it is held without a heartbeat.
    pub lease_expires_at: Option<Timestamp>,
}

impl Execution {
    /// The fingerprint of a holder: everything but the lease, which heartbeats move.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(self)
    }
}

impl fmt::Display for Execution {
    /// As in `attempt 2 by web-2/91bc (running, fence 5)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "attempt {}", self.attempt)?;
        if let Some(worker) = &self.claimed_by {
            write!(f, " by {worker}")?;
        }
        write!(f, " ({}, fence {})", self.state, self.fence)
    }
}

/// A stored job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// Its identity and where it is in its life.
    pub execution: Execution,
    /// Where workers look for it.
    pub queue: Name,
    /// Which handler runs it.
    pub kind: Name,
    /// What the handler gets, byte for byte as it was enqueued.
    pub payload: Json,
    /// Its place among the due jobs of its queue.
    pub priority: Priority,
    /// Due when this is not after the store's clock.
    pub available_at: Timestamp,
    /// When it was enqueued.
    pub created_at: Timestamp,
    /// When it ended.
    pub finished_at: Option<Timestamp>,
    /// The key that it alone has among the active jobs of its queue.
    pub unique_key: Option<UniqueKey>,
    /// What it completed with; `null` is a result too. While it runs, what its handler last said of its progress.
    pub result: Option<Json>,
    /// The newest failures, oldest first, at most [`Failure::KEPT`].
    pub errors: Vec<Failure>,
}

impl Job {
    /// Its id.
    pub fn id(&self) -> JobId {
        self.execution.id
    }

    /// Where it is in its life.
    pub fn state(&self) -> JobState {
        self.execution.state
    }
}

/// One recorded failure of an attempt, or the reason of a cancellation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The attempt that failed.
    pub attempt: u32,
    /// The fence of its claim.
    pub fence: u64,
    /// Who ran it.
    pub worker: Option<WorkerId>,
    /// When it was recorded, by the store's clock.
    pub at: Timestamp,
    /// What went wrong.
    pub text: FailureText,
}

impl Failure {
    /// How many failures a job keeps; older ones are dropped.
    pub const KEPT: usize = 10;
}

/// The text of a failure, made to fit: at most 4 KiB, cut at a character, U+0000 replaced. Recording
/// a failure can therefore never fail because of its text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct FailureText(String);

impl FailureText {
    /// The most bytes that are kept.
    pub const MAX_BYTES: usize = 4096;

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<String> for FailureText {
    fn from(mut text: String) -> Self {
        // The replacement is longer than what it replaces: cut first, so that 5 MB are not scanned.
        text.truncate(text.floor_char_boundary(Self::MAX_BYTES));
        if text.contains('\0') {
            text = text.replace('\0', "\u{fffd}");
            text.truncate(text.floor_char_boundary(Self::MAX_BYTES));
        }
        Self(text)
    }
}

impl From<&str> for FailureText {
    fn from(text: &str) -> Self {
        text[..text.floor_char_boundary(Self::MAX_BYTES)].to_owned().into()
    }
}

impl From<FailureText> for String {
    fn from(text: FailureText) -> Self {
        text.0
    }
}

impl fmt::Display for FailureText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(payload: &str) -> NewJob {
        let name = Name::try_from("n").expect("a name");
        NewJob::new(name.clone(), name, Json::from_text(payload).expect("JSON"))
    }

    #[test]
    fn failure_texts_are_clipped_at_a_character() {
        let text = FailureText::from("😀".repeat(2_000));
        assert_eq!(text.as_str().len(), 4096);
        let text = FailureText::from(format!("a{}", "😀".repeat(2_000)));
        assert_eq!(text.as_str().len(), 4093);
        let text = FailureText::from("\0".repeat(4096).as_str());
        assert!(text.as_str().len() <= 4096 && text.as_str().starts_with('\u{fffd}'));
    }

    #[test]
    fn a_batch_is_checked_as_a_whole_and_the_item_named() {
        let capabilities = Capabilities { max_payload: 5, ..Capabilities::default() };
        let error = check_new_jobs(&[job("1"), job("\"four\"")], &capabilities).expect_err("too large");
        assert_eq!((error.kind(), error.index()), (ErrorKind::TooLarge, Some(1)));

        let first = job("1");
        let again = NewJob { available: When::After(crate::Delay::MAX), ..first.clone() };
        check_new_jobs(&[first.clone(), again], &capabilities).expect("the same job twice is harmless");
        let other = NewJob { payload: Json::null(), ..first.clone() };
        let error = check_new_jobs(&[first, other], &capabilities).expect_err("one id, two contents");
        assert_eq!((error.kind(), error.index()), (ErrorKind::IdReused, Some(1)));
    }
}
