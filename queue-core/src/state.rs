//! The states of a job.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;
use serde::Serialize;

use crate::Invalid;

/// Where a job is in its life.
///
/// ```text
/// waiting -> claimed -> running -> completed | failed | canceled
///    ^          |          |  |           |
///    +----------+----------+  +-> suspended (waits for an event)
///      snooze, release, retry, recover; rerun from a final state
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "&'static str")]
#[non_exhaustive]
pub enum JobState {
    /// Not held by anyone; due when its time has come.
    Waiting,
    /// Reserved for a worker that has not started it.
    Claimed,
    /// Started by a worker.
    Running,
    /// Waits for an event, held by nobody.
    Suspended,
    /// Ended well.
    Completed,
    /// Ended badly.
    Failed,
    /// Ended by an operator or by its handler.
    Canceled,
}

impl JobState {
    /// Every state, in the order of a job's life.
    pub const ALL: &[Self] =
        &[Self::Waiting, Self::Claimed, Self::Running, Self::Suspended, Self::Completed, Self::Failed, Self::Canceled];

    /// Whether a worker holds the job: claimed or running.
    pub fn is_held(self) -> bool {
        matches!(self, Self::Claimed | Self::Running)
    }

    /// Whether the job has ended: completed, failed or canceled.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Canceled)
    }

    /// Whether the job counts for its unique key: any state that is not final.
    pub fn is_active(self) -> bool {
        !self.is_final()
    }

    /// The name, as stores keep it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Claimed => "claimed",
            Self::Running => "running",
            Self::Suspended => "suspended",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Canceled => "canceled",
        }
    }
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for JobState {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        Self::ALL
            .iter()
            .copied()
            .find(|state| state.as_str() == text)
            .ok_or_else(|| Invalid::malformed("job state", format_args!("{text:?} is unknown to this version")))
    }
}

impl TryFrom<String> for JobState {
    type Error = Invalid;

    fn try_from(text: String) -> Result<Self, Invalid> {
        text.parse()
    }
}

impl From<JobState> for &'static str {
    fn from(state: JobState) -> Self {
        state.as_str()
    }
}
