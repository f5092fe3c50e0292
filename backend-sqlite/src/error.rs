//! What an error of the driver means for the caller.

use queue_core::Certainty;
use queue_core::Error;
use queue_core::ErrorKind;

/// SQLite's result codes, without the extension in the upper bits. <https://www.sqlite.org/rescode.html>
mod code {
    pub(super) const ERROR: i32 = 1;
    pub(super) const BUSY: i32 = 5;
    pub(super) const LOCKED: i32 = 6;
    pub(super) const NOMEM: i32 = 7;
    pub(super) const READONLY: i32 = 8;
    pub(super) const INTERRUPT: i32 = 9;
    pub(super) const IOERR: i32 = 10;
    pub(super) const FULL: i32 = 13;
    pub(super) const CANTOPEN: i32 = 14;
    pub(super) const PROTOCOL: i32 = 15;
    pub(super) const SCHEMA: i32 = 17;
    pub(super) const TOOBIG: i32 = 18;
}

/// The error of a call, where `lost` says what became of the write if the connection was lost in it.
pub(crate) fn failed(call: &'static str, lost: Certainty, error: sqlx::Error) -> Error {
    let (kind, certainty) = match &error {
        // The commit may be in the log though writing it out failed: whoever opens the file after a crash finds it.
        sqlx::Error::Database(_) if result_code(&error) == code::IOERR => (ErrorKind::Unavailable, lost),
        // Any other statement or commit that SQLite itself refuses is undone whole.
        sqlx::Error::Database(_) => (database_kind(&error), Certainty::NotApplied),
        // Nothing was sent.
        sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::BeginFailed => {
            (ErrorKind::Unavailable, Certainty::NotApplied)
        }
        sqlx::Error::Configuration(_) | sqlx::Error::Encode(_) | sqlx::Error::InvalidArgument(_) => {
            (ErrorKind::Invalid, Certainty::NotApplied)
        }
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) | sqlx::Error::ColumnNotFound(_) => {
            (ErrorKind::Schema, lost)
        }
        _ => (ErrorKind::Unavailable, lost),
    };
    let message = match kind {
        ErrorKind::Schema => format!("{call}: the tables are missing or not as this version knows them; see migrate"),
        _ => call.to_owned(),
    };
    Error::new(kind, certainty, message).with_source(error)
}

fn database_kind(error: &sqlx::Error) -> ErrorKind {
    match result_code(error) {
        code::BUSY | code::LOCKED | code::INTERRUPT | code::PROTOCOL | code::SCHEMA => ErrorKind::Transient,
        code::FULL | code::IOERR | code::READONLY | code::CANTOPEN | code::NOMEM => ErrorKind::Unavailable,
        // The texts are fixed: what does not compile does not fit the tables.
        code::ERROR => ErrorKind::Schema,
        code::TOOBIG => ErrorKind::TooLarge,
        _ => ErrorKind::Permanent,
    }
}

/// SQLite's result code; 0 if the error is none of SQLite's.
fn result_code(error: &sqlx::Error) -> i32 {
    let code = error.as_database_error().and_then(|error| error.code()?.parse::<i32>().ok());
    code.unwrap_or_default() & 0xff
}

/// Whether somebody else had the database.
pub(crate) fn is_busy(error: &sqlx::Error) -> bool {
    matches!(result_code(error), code::BUSY | code::LOCKED | code::PROTOCOL)
}

/// Whether the error is a broken unique index.
pub(crate) fn is_taken(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|error| error.is_unique_violation())
}
