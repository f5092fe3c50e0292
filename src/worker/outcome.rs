//! How a handler ends, other than well.

use std::error::Error;
use std::fmt::Display;
use std::time::Duration;

/// Why a handler did not complete its job, and what is to become of it.
///
/// A handler returns `Result<T, NotDone>`. `Ok(value)` completes the job with that value as its result. `?` on any error
/// is a failed attempt, to be tried again by the worker's [`RetryPolicy`](crate::RetryPolicy) as long as attempts are
/// left. The rest is said by the constructors:
///
/// ```
/// # use fenced_queue::NotDone;
/// # use std::time::Duration;
/// # fn handler(line: &str) -> Result<u64, NotDone> {
/// let number: u64 = line.parse()?;
/// match number {
///     0 => Err(NotDone::fail("zero is never right")),
///     1..10 => Err(NotDone::snooze(Duration::from_secs(60))),
///     10..20 => Err(NotDone::retry_after(Duration::from_secs(5), "too small yet")),
///     20..30 => Err(NotDone::cancel("nobody wants it")),
///     _ => Ok(number),
/// }
/// # }
/// # assert!(handler("30").is_ok());
/// ```
#[derive(Debug)]
pub struct NotDone(pub(super) Verdict);

#[derive(Debug)]
pub(super) enum Verdict {
    Retry {
        error: String,
        after: Option<Duration>,
    },
    Fail {
        error: String,
    },
    Snooze {
        after: Duration,
    },
    Cancel {
        reason: String,
    },
    /// The job waits: it is recorded already.
    Suspended,
}

impl NotDone {
    /// The attempt failed; the next one comes when the retry policy says.
    pub fn retry(error: impl Display) -> Self {
        Self(Verdict::Retry { error: error.to_string(), after: None })
    }

    /// The attempt failed; the next one comes after this span.
    pub fn retry_after(after: Duration, error: impl Display) -> Self {
        Self(Verdict::Retry { error: error.to_string(), after: Some(after) })
    }

    /// The job failed for good, whatever attempts are left.
    pub fn fail(error: impl Display) -> Self {
        Self(Verdict::Fail { error: error.to_string() })
    }

    /// Not yet: the job is put off and the attempt given back.
    pub fn snooze(after: Duration) -> Self {
        Self(Verdict::Snooze { after })
    }

    /// The job waits, which is recorded.
    pub(super) fn suspended() -> Self {
        Self(Verdict::Suspended)
    }

    /// Whether it is no failure but a wait, of a handler with steps: the job is suspended already, and what is returned instead of
    /// this counts for nothing.
    pub fn is_suspended(&self) -> bool {
        matches!(self.0, Verdict::Suspended)
    }

    /// The job is not wanted any more.
    pub fn cancel(reason: impl Display) -> Self {
        Self(Verdict::Cancel { reason: reason.to_string() })
    }
}

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for NotDone {
    /// A failed attempt, with the causes of the error in its text.
    fn from(error: E) -> Self {
        let error = error.into();
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            if !text.contains(&cause_text) {
                text = format!("{text}: {cause_text}");
            }
            source = cause.source();
        }
        Self::retry(text)
    }
}
