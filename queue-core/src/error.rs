//! The one error type of the contract: what went wrong, and what became of the write.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

/// The result of a call on the store.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What happened to the write that a failed call was asked to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Certainty {
    /// Nothing was written, for certain: the call may be made again.
    NotApplied,
    /// It may or may not have been written (a lost connection, a time-out). Only calls that
    /// recognise their own repetition may be made again; see [`Decision`](crate::Decision).
    Unknown,
}

/// What kind of failure it was, and so what the caller can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The store was busy or chose this call as the victim of a conflict: repeat it soon.
    Transient,
    /// The store cannot be reached or cannot write at the moment: repeat it later.
    Unavailable,
    /// The id of a new job belongs to another job already: choose another id.
    IdReused,
    /// The call itself is wrong: it must be changed.
    Invalid,
    /// A payload or a result exceeds [`Capabilities::max_payload`](crate::Capabilities::max_payload).
    TooLarge,
    /// The schema, or a row, is of a version that this program cannot read or may not write.
    Schema,
    /// This backend does not offer what was asked for.
    Unsupported,
    /// The store refused for a reason that repeating does not mend.
    Permanent,
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Transient => "transient",
            Self::Unavailable => "unavailable",
            Self::IdReused => "id reused",
            Self::Invalid => "invalid",
            Self::TooLarge => "too large",
            Self::Schema => "schema",
            Self::Unsupported => "unsupported",
            Self::Permanent => "permanent",
        })
    }
}

/// A call on the store that failed.
///
/// Decide by [`kind`](Self::kind) and [`certainty`](Self::certainty), never by the text.
///
/// ```
/// use queue_core::{Certainty, Error, ErrorKind};
///
/// let error = Error::new(ErrorKind::Unavailable, Certainty::Unknown, "connection lost");
/// assert_eq!(error.certainty(), Certainty::Unknown);
/// assert_eq!(error.to_string(), "unavailable, outcome unknown: connection lost");
/// ```
#[derive(Clone, Debug)]
pub struct Error(Arc<Inner>);

#[derive(Clone, Debug)]
struct Inner {
    kind: ErrorKind,
    certainty: Certainty,
    message: String,
    index: Option<usize>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error of this kind; the message is lower case, without a final stop, and names no secret.
    pub fn new(kind: ErrorKind, certainty: Certainty, message: impl Into<String>) -> Self {
        Self(Arc::new(Inner { kind, certainty, message: message.into(), index: None, source: None }))
    }

    /// An error of this kind, before anything was written.
    pub fn not_applied(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self::new(kind, Certainty::NotApplied, message)
    }

    /// Bad input, refused before anything was written.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::not_applied(ErrorKind::Invalid, message)
    }

    /// Names the item of a batch that the error is about.
    #[must_use]
    pub fn at_index(mut self, index: usize) -> Self {
        Arc::make_mut(&mut self.0).index = Some(index);
        self
    }

    /// The same error, with another word on what became of the write.
    #[must_use]
    pub fn with_certainty(mut self, certainty: Certainty) -> Self {
        Arc::make_mut(&mut self.0).certainty = certainty;
        self
    }

    /// Keeps the error underneath: its text becomes the end of this one's.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Arc::make_mut(&mut self.0).source = Some(source.into().into());
        self
    }

    /// What kind of failure it was.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What happened to the write.
    pub fn certainty(&self) -> Certainty {
        self.0.certainty
    }

    /// The item of a batch that the error is about, counted from 0.
    pub fn index(&self) -> Option<usize> {
        self.0.index
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { kind, certainty, message, index, source } = &*self.0;
        write!(f, "{kind}")?;
        if *certainty == Certainty::Unknown {
            f.write_str(", outcome unknown")?;
        }
        if let Some(index) = index {
            write!(f, ", item {index}")?;
        }
        write!(f, ": {message}")?;
        match source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl StdError for Error {
    /// What is below the error underneath, whose own text stands in this one's already.
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().and_then(StdError::source)
    }
}

impl From<Invalid> for Error {
    fn from(invalid: Invalid) -> Self {
        Self::invalid(invalid.to_string())
    }
}

/// A value that the contract does not admit, refused before anything was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Invalid {
    /// A name was empty.
    #[error("{what} must not be empty")]
    Empty {
        /// Which value.
        what: &'static str,
    },
    /// A text was too long.
    #[error("{what} has {bytes} bytes; at most {max} are allowed")]
    TooLong {
        /// Which value.
        what: &'static str,
        /// Its length.
        bytes: usize,
        /// The most that is allowed.
        max: usize,
    },
    /// A text held U+0000, which some stores cannot keep.
    #[error("{what} must not contain U+0000")]
    Nul {
        /// Which value.
        what: &'static str,
    },
    /// A number was outside its range.
    #[error("{what} must be from {min} to {max}, not {value}")]
    OutOfRange {
        /// Which value.
        what: &'static str,
        /// What was given.
        value: String,
        /// The least that is allowed.
        min: String,
        /// The most that is allowed.
        max: String,
    },
    /// A text could not be read as what it should be.
    #[error("{what} is not valid: {reason}")]
    Malformed {
        /// Which value.
        what: &'static str,
        /// Why not.
        reason: String,
    },
}

impl Invalid {
    /// A number outside its range.
    pub fn range(what: &'static str, value: impl fmt::Display, min: impl fmt::Display, max: impl fmt::Display) -> Self {
        Self::OutOfRange { what, value: value.to_string(), min: min.to_string(), max: max.to_string() }
    }

    /// A text that is not what it should be.
    pub fn malformed(what: &'static str, reason: impl fmt::Display) -> Self {
        Self::Malformed { what, reason: clipped(reason) }
    }
}

/// Of a reason that repeats what somebody has stored, which may be a megabyte, the beginning: it ends up in messages and logs.
pub(crate) fn clipped(reason: impl fmt::Display) -> String {
    const BYTES: usize = 400;
    let mut reason = reason.to_string();
    if reason.len() > BYTES {
        reason.truncate(reason.floor_char_boundary(BYTES));
        reason.push_str(" ..");
    }
    reason
}
