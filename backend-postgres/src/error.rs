//! What an error of the driver means for the caller.

use queue_core::Certainty;
use queue_core::Error;
use queue_core::ErrorKind;
use sqlx::postgres::PgDatabaseError;
use sqlx::postgres::PgSeverity;

/// The error of a call, where `lost` says what became of the write if the connection was lost in it.
pub(crate) fn failed(call: &'static str, lost: Certainty, error: sqlx::Error) -> Error {
    let (kind, certainty) = match &error {
        sqlx::Error::Database(_) => match postgres(&error) {
            Some(error) if is_taken(error) => (ErrorKind::Invalid, Certainty::NotApplied),
            // The connection ends with it; whether before or after the commit is not said.
            Some(error) if ends_the_session(error) => (database_kind(error.code()), lost),
            // The server does not know either.
            Some(error) if error.code() == "40003" || error.code().starts_with("08") => (ErrorKind::Unavailable, lost),
            // Whatever else the server refuses is undone whole.
            Some(error) => (database_kind(error.code()), Certainty::NotApplied),
            None => (ErrorKind::Permanent, lost),
        },
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
        ErrorKind::Invalid if postgres(&error).is_some_and(is_taken) => {
            format!("{call}: another active job has the unique key")
        }
        ErrorKind::Unsupported => {
            format!("{call}: this looks like a pooler in transaction mode; see transaction_pooler")
        }
        _ => call.to_owned(),
    };
    Error::new(kind, certainty, message).with_source(error)
}

/// <https://www.postgresql.org/docs/current/errcodes-appendix.html>
fn database_kind(code: &str) -> ErrorKind {
    match code {
        // Serialization, deadlock, lock time-out, cancelled; the caller's transaction, which has failed before; and a statement
        // prepared for tables that have changed since, which works on a new connection.
        "40001" | "40P01" | "55P03" | "57014" | "25P02" | "0A000" => ErrorKind::Transient,
        // A server that became a standby.
        "25006" => ErrorKind::Unavailable,
        // Prepared statements of somebody else.
        "26000" | "42P05" => ErrorKind::Unsupported,
        "42501" => ErrorKind::Permanent,
        _ => match code.get(..2) {
            Some("08" | "53" | "57" | "58") => ErrorKind::Unavailable,
            Some("54") => ErrorKind::TooLarge,
            // The texts are fixed: what does not compile does not fit the tables.
            Some("42" | "3F") => ErrorKind::Schema,
            _ => ErrorKind::Permanent,
        },
    }
}

fn postgres(error: &sqlx::Error) -> Option<&PgDatabaseError> {
    error.as_database_error()?.try_downcast_ref()
}

fn ends_the_session(error: &PgDatabaseError) -> bool {
    matches!(error.severity(), PgSeverity::Fatal | PgSeverity::Panic)
}

/// Whether the connection is of no use any more: it failed, it will fail, it leads to a server that cannot write, or it would
/// give the same answer to the same statement for ever.
pub(crate) fn spoils_the_connection(error: &sqlx::Error) -> bool {
    match postgres(error) {
        Some(error) => ends_the_session(error) || matches!(error.code(), "25006" | "0A000" | "26000" | "42P05"),
        None => true,
    }
}

/// Whether the error is the unique key of an active job, as of a rerun.
fn is_taken(error: &PgDatabaseError) -> bool {
    error.code() == "23505" && error.constraint() == Some("jobs_unique")
}
