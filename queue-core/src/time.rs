//! Instants and spans of the contract: whole milliseconds, judged by the store's clock alone.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde::Deserialize;
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::Invalid;

/// An instant in UTC, in whole milliseconds, in the years 1 to 9999: the finest that every store keeps.
///
/// ```
/// use queue_core::Timestamp;
///
/// let instant: Timestamp = "2500-01-01T12:00:00.001Z".parse()?;
/// assert_eq!(instant.to_string(), "2500-01-01T12:00:00.001Z");
/// assert_eq!(Timestamp::from_unix_millis(instant.unix_millis())?, instant);
/// # Ok::<(), queue_core::Invalid>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "i64", into = "i64")]
pub struct Timestamp(i64);

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Timestamp {
    /// 0001-01-01T00:00:00.000Z.
    pub const MIN: Self = Self(-62_135_596_800_000);
    /// 9999-12-31T23:59:59.999Z.
    pub const MAX: Self = Self(253_402_300_799_999);

    /// The instant this many milliseconds after 1970-01-01T00:00:00Z.
    ///
    /// # Errors
    ///
    /// An instant before [`MIN`](Self::MIN) or after [`MAX`](Self::MAX).
    pub fn from_unix_millis(millis: i64) -> Result<Self, Invalid> {
        if (Self::MIN.0..=Self::MAX.0).contains(&millis) {
            Ok(Self(millis))
        } else {
            Err(Invalid::range("timestamp", millis, Self::MIN.0, Self::MAX.0))
        }
    }

    /// Milliseconds since 1970-01-01T00:00:00Z.
    pub fn unix_millis(self) -> i64 {
        self.0
    }

    /// This instant moved by some milliseconds, held at [`MIN`](Self::MIN) and [`MAX`](Self::MAX).
    #[must_use]
    pub fn saturating_add_millis(self, millis: i64) -> Self {
        Self(self.0.saturating_add(millis).clamp(Self::MIN.0, Self::MAX.0))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let instant =
            OffsetDateTime::from_unix_timestamp_nanos(i128::from(self.0) * 1_000_000).map_err(|_| fmt::Error)?;
        let (date, time) = (instant.date(), instant.time());
        write!(
            f,
            "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z",
            date.year(),
            u8::from(date.month()),
            date.day(),
            time.hour(),
            time.minute(),
            time.second(),
            time.millisecond(),
        )
    }
}

impl FromStr for Timestamp {
    type Err = Invalid;

    /// Reads RFC 3339; what is finer than a millisecond is cut off, not rounded.
    fn from_str(text: &str) -> Result<Self, Invalid> {
        let instant = OffsetDateTime::parse(text, &Rfc3339).map_err(|error| Invalid::malformed("timestamp", error))?;
        let millis = instant.unix_timestamp_nanos().div_euclid(1_000_000);
        Self::try_from(i64::try_from(millis).unwrap_or(i64::MAX))
    }
}

impl TryFrom<i64> for Timestamp {
    type Error = Invalid;

    fn try_from(millis: i64) -> Result<Self, Invalid> {
        Self::from_unix_millis(millis)
    }
}

impl From<Timestamp> for i64 {
    fn from(timestamp: Timestamp) -> Self {
        timestamp.0
    }
}

/// A thousand years: far beyond use, and never an overflow when added to a store's clock.
const LONGEST_MILLIS: i64 = 31_557_600_000_000;

fn span(what: &'static str, millis: i64, least: i64) -> Result<i64, Invalid> {
    if (least..=LONGEST_MILLIS).contains(&millis) {
        Ok(millis)
    } else {
        Err(Invalid::range(what, format_args!("{millis} ms"), least, LONGEST_MILLIS))
    }
}

fn whole_millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// A span to wait, from 0 to 1000 years; what is finer than a millisecond is cut off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Delay(i64);

impl Delay {
    /// No wait.
    pub const ZERO: Self = Self(0);
    /// A thousand years.
    pub const MAX: Self = Self(LONGEST_MILLIS);

    /// A span of this many milliseconds.
    ///
    /// # Errors
    ///
    /// A negative span, or one above [`MAX`](Self::MAX).
    pub fn from_millis(millis: i64) -> Result<Self, Invalid> {
        span("delay", millis, 0).map(Self)
    }

    /// A span of this many hours, of which a thousand years have eight million.
    pub const fn from_hours(hours: u16) -> Self {
        Self(hours as i64 * 3_600_000)
    }

    /// The span of this duration, held at [`MAX`](Self::MAX): for computed delays such as a backoff.
    pub fn saturating(duration: Duration) -> Self {
        Self(whole_millis(duration).min(LONGEST_MILLIS))
    }

    /// Whole milliseconds.
    pub fn as_millis(self) -> i64 {
        self.0
    }
}

impl TryFrom<Duration> for Delay {
    type Error = Invalid;

    fn try_from(duration: Duration) -> Result<Self, Invalid> {
        Self::from_millis(whole_millis(duration))
    }
}

/// How long a claim is held without a heartbeat: at least a millisecond, at most 1000 years.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lease(i64);

impl Lease {
    /// A lease of this many milliseconds.
    ///
    /// # Errors
    ///
    /// Zero, a negative span, or more than 1000 years.
    pub fn from_millis(millis: i64) -> Result<Self, Invalid> {
        span("lease", millis, 1).map(Self)
    }

    /// Whole milliseconds.
    pub fn as_millis(self) -> i64 {
        self.0
    }

    /// The same span as a duration.
    pub fn duration(self) -> Duration {
        Duration::from_millis(self.0.unsigned_abs())
    }
}

impl TryFrom<Duration> for Lease {
    type Error = Invalid;

    fn try_from(duration: Duration) -> Result<Self, Invalid> {
        Self::from_millis(whole_millis(duration))
    }
}

/// When a job becomes due. A backend resolves it by the store's clock, inside the statement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum When {
    /// At once.
    #[default]
    Now,
    /// This long after the write.
    After(Delay),
    /// At this instant; one in the past is due at once.
    At(Timestamp),
}

impl When {
    /// The instant meant, when the store's clock shows `now`.
    #[must_use]
    pub fn resolve(self, now: Timestamp) -> Timestamp {
        match self {
            Self::Now => now,
            Self::After(delay) => now.saturating_add_millis(delay.as_millis()),
            Self::At(instant) => instant,
        }
    }
}

/// What tests add to a store's clock, in milliseconds; zero in production.
///
/// Backends read "now" as the store's own clock plus this offset, so that a test of leases and due
/// times needs no sleep. Clones share the offset.
#[derive(Clone, Debug, Default)]
pub struct ClockOffset(Arc<AtomicI64>);

impl ClockOffset {
    /// The offset to bind into a statement.
    pub fn millis(&self) -> i64 {
        self.0.load(Ordering::SeqCst)
    }

    /// Moves the clock of every store that shares this offset.
    pub fn advance(&self, delay: Delay) {
        self.0.fetch_add(delay.as_millis(), Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_print_and_parse_to_the_millisecond() {
        for text in ["0001-01-01T00:00:00.000Z", "9999-12-31T23:59:59.999Z", "1969-12-31T23:59:59.999Z"] {
            let instant: Timestamp = text.parse().expect("in range");
            assert_eq!(instant.to_string(), text);
        }
        let cut: Timestamp = "1969-12-31T23:59:59.9999Z".parse().expect("in range");
        assert_eq!(cut.unix_millis(), -1, "cut off, not rounded");
    }

    #[test]
    fn spans_refuse_what_would_overflow() {
        assert!(Delay::from_millis(-1).is_err());
        assert!(Delay::try_from(Duration::MAX).is_err());
        assert_eq!(Delay::saturating(Duration::MAX), Delay::MAX);
        assert!(Lease::from_millis(0).is_err());
        assert!(Lease::try_from(Duration::from_micros(999)).is_err());
    }
}
