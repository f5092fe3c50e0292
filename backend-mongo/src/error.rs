//! What an error of the driver, or one inside a server's answer, means for the caller.

use std::time::Duration;

use mongodb::bson::Bson;
use mongodb::bson::Document;
use mongodb::error::ErrorKind as Driver;
use mongodb::error::TRANSIENT_TRANSACTION_ERROR;
use mongodb::error::UNKNOWN_TRANSACTION_COMMIT_RESULT;
use queue_core::Certainty;
use queue_core::Certainty::NotApplied;
use queue_core::Certainty::Unknown;
use queue_core::Error;
use queue_core::ErrorKind;

/// The server's error codes. <https://www.mongodb.com/docs/manual/reference/error-codes/>
mod code {
    pub(super) const HOST_UNREACHABLE: i32 = 6;
    pub(super) const HOST_NOT_FOUND: i32 = 7;
    pub(super) const BAD_VALUE: i32 = 2;
    pub(super) const LOCK_TIMEOUT: i32 = 24;
    pub(super) const NAMESPACE_NOT_FOUND: i32 = 26;
    pub(super) const CURSOR_NOT_FOUND: i32 = 43;
    pub(super) const MAX_TIME_EXPIRED: i32 = 50;
    pub(super) const NETWORK_TIMEOUT: i32 = 89;
    pub(super) const SHUTDOWN_IN_PROGRESS: i32 = 91;
    pub(super) const WRITE_CONFLICT: i32 = 112;
    pub(super) const QUERY_PLAN_KILLED: i32 = 175;
    pub(super) const PRIMARY_STEPPED_DOWN: i32 = 189;
    pub(super) const SNAPSHOT_UNAVAILABLE: i32 = 246;
    pub(super) const NO_SUCH_TRANSACTION: i32 = 251;
    pub(super) const EXCEEDED_TIME_LIMIT: i32 = 262;
    pub(super) const NOT_SUPPORTED_IN_TRANSACTION: i32 = 263;
    pub(super) const ILLEGAL_OPERATION: i32 = 20;
    pub(super) const SOCKET_EXCEPTION: i32 = 9001;
    pub(super) const NOT_MASTER: i32 = 10058;
    pub(super) const NOT_WRITABLE_PRIMARY: i32 = 10107;
    pub(super) const OBJECT_TOO_LARGE: i32 = 10334;
    pub(super) const DUPLICATE_KEY: i32 = 11000;
    pub(super) const INTERRUPTED_AT_SHUTDOWN: i32 = 11600;
    pub(super) const INTERRUPTED: i32 = 11601;
    pub(super) const INTERRUPTED_BY_STATE_CHANGE: i32 = 11602;
    pub(super) const NOT_PRIMARY_NO_SECONDARY_OK: i32 = 13435;
    pub(super) const NOT_PRIMARY_OR_SECONDARY: i32 = 13436;
    pub(super) const OUT_OF_DISK_SPACE: i32 = 14031;
    pub(super) const DOCUMENT_TOO_LARGE_AFTER_UPDATE: i32 = 17419;
    pub(super) const DOCUMENT_TOO_LARGE_BY_UPDATE: i32 = 17420;
}

/// What a command writes, and so what is known of the write when the command was cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writes {
    /// Nothing, or nothing yet: it is part of a transaction that is somebody else's to commit.
    Nothing,
    /// One row: if the server itself ended the command, it is as it was.
    Row,
    /// Several rows, one after the other.
    Rows,
}

impl Writes {
    /// If the server ended the command.
    fn ended(self) -> Certainty {
        if self == Self::Rows { Unknown } else { NotApplied }
    }

    /// If nobody knows what the server did.
    pub(crate) fn lost(self) -> Certainty {
        if self == Self::Nothing { NotApplied } else { Unknown }
    }
}

/// What a server's error code means.
fn meaning(code: i32, writes: Writes) -> (ErrorKind, Certainty) {
    match code {
        code::WRITE_CONFLICT | code::NO_SUCH_TRANSACTION | code::SNAPSHOT_UNAVAILABLE | code::LOCK_TIMEOUT => {
            (ErrorKind::Transient, NotApplied)
        }
        // Ended while it ran.
        code::MAX_TIME_EXPIRED
        | code::EXCEEDED_TIME_LIMIT
        | code::INTERRUPTED
        | code::QUERY_PLAN_KILLED
        | code::CURSOR_NOT_FOUND => (ErrorKind::Transient, writes.ended()),
        // Refused before it began.
        code::NOT_WRITABLE_PRIMARY | code::NOT_PRIMARY_NO_SECONDARY_OK | code::NOT_MASTER => {
            (ErrorKind::Unavailable, NotApplied)
        }
        // The server went away or stepped down, maybe after the write.
        code::PRIMARY_STEPPED_DOWN
        | code::SHUTDOWN_IN_PROGRESS
        | code::INTERRUPTED_AT_SHUTDOWN
        | code::INTERRUPTED_BY_STATE_CHANGE
        | code::NOT_PRIMARY_OR_SECONDARY
        | code::HOST_UNREACHABLE
        | code::HOST_NOT_FOUND
        | code::NETWORK_TIMEOUT
        | code::SOCKET_EXCEPTION => (ErrorKind::Unavailable, writes.lost()),
        code::OUT_OF_DISK_SPACE => (ErrorKind::Unavailable, NotApplied),
        code::OBJECT_TOO_LARGE | code::DOCUMENT_TOO_LARGE_AFTER_UPDATE | code::DOCUMENT_TOO_LARGE_BY_UPDATE => {
            (ErrorKind::TooLarge, NotApplied)
        }
        code::DUPLICATE_KEY => (ErrorKind::Invalid, NotApplied),
        code::ILLEGAL_OPERATION | code::NOT_SUPPORTED_IN_TRANSACTION => (ErrorKind::Unsupported, NotApplied),
        // The commands are fixed: what does not run does not fit the collections, most often for want of an index.
        code::BAD_VALUE | code::NAMESPACE_NOT_FOUND => (ErrorKind::Schema, NotApplied),
        _ => (ErrorKind::Permanent, NotApplied),
    }
}

fn named(call: &str, kind: ErrorKind, certainty: Certainty) -> Error {
    let message = match kind {
        ErrorKind::Schema => {
            format!("{call}: the collections are missing or not as this version knows them; see migrate")
        }
        _ => call.to_owned(),
    };
    Error::new(kind, certainty, message)
}

/// The error of a call that sent such a command.
pub(crate) fn failed(call: &str, writes: Writes, error: mongodb::error::Error) -> Error {
    let (kind, certainty) = match &*error.kind {
        // In a transaction, the whole of which is to be repeated: no commit was sent.
        _ if error.contains_label(TRANSIENT_TRANSACTION_ERROR) => (ErrorKind::Transient, NotApplied),
        Driver::Command(command) if command.code == code::DUPLICATE_KEY => return taken(call),
        Driver::Command(command) => meaning(command.code, writes),
        // Nothing was sent.
        Driver::ServerSelection { .. } | Driver::Shutdown | Driver::DnsResolve { .. } => {
            (ErrorKind::Unavailable, NotApplied)
        }
        Driver::Authentication { .. } | Driver::InvalidTlsConfig { .. } => (ErrorKind::Permanent, NotApplied),
        Driver::IncompatibleServer { .. } | Driver::SessionsNotSupported => (ErrorKind::Unsupported, NotApplied),
        Driver::InvalidArgument { .. } | Driver::BsonSerialization(_) | Driver::Transaction { .. } => {
            (ErrorKind::Invalid, NotApplied)
        }
        Driver::BsonDeserialization(_) | Driver::InvalidResponse { .. } => (ErrorKind::Schema, writes.lost()),
        // The connection, and whatever the driver may add.
        _ => (ErrorKind::Unavailable, writes.lost()),
    };
    // The whole error would show the server's answer as bytes.
    named(call, kind, certainty).with_source(*error.kind)
}

/// The error of a commit.
pub(crate) fn commit_failed(error: mongodb::error::Error) -> Error {
    let is_unknown = error.contains_label(UNKNOWN_TRANSACTION_COMMIT_RESULT);
    let failed = failed("commit", Writes::Rows, error);
    match is_unknown {
        true => failed.with_certainty(Unknown),
        false => failed,
    }
}

/// Nothing came back in time.
pub(crate) fn silent(call: &str, writes: Writes, waited: Duration) -> Error {
    Error::new(ErrorKind::Unavailable, writes.lost(), format!("{call}: no answer within {waited:?}"))
}

/// An error of one item of a write, out of the list in the server's answer: the call itself has succeeded.
#[derive(Clone, Debug)]
pub(crate) struct ItemError {
    pub(crate) index: usize,
    pub(crate) code: i32,
    message: String,
}

impl ItemError {
    /// The error of the call.
    pub(crate) fn into_error(self, call: &str) -> Error {
        if self.is_taken() {
            return taken(call);
        }
        let (kind, certainty) = meaning(self.code, Writes::Row);
        named(call, kind, certainty).with_source(format!("error code {}: {}", self.code, self.message))
    }

    /// Whether an id or a unique key is taken.
    pub(crate) fn is_taken(&self) -> bool {
        self.code == code::DUPLICATE_KEY
    }
}

fn code_of(error: &Document) -> i32 {
    match error.get("code") {
        Some(Bson::Int32(code)) => *code,
        Some(Bson::Int64(code)) => i32::try_from(*code).unwrap_or_default(),
        _ => 0,
    }
}

/// The errors of the items of a write.
pub(crate) fn item_errors(reply: &Document) -> Vec<ItemError> {
    let Ok(errors) = reply.get_array("writeErrors") else { return Vec::new() };
    let read = |error: &Bson| {
        let error = error.as_document()?;
        let index = usize::try_from(error.get_i32("index").ok()?).ok()?;
        Some(ItemError { index, code: code_of(error), message: error.get_str("errmsg").unwrap_or_default().to_owned() })
    };
    errors.iter().filter_map(read).collect()
}

/// What the server says of the write concern of a write that it has made.
pub(crate) enum Concern {
    /// The write is on a majority.
    Met,
    /// The time of the command was up before it was.
    Late,
    /// It cannot be met, or who knows.
    Failed(Error),
}

pub(crate) fn concern(call: &str, reply: &Document) -> Concern {
    let Ok(error) = reply.get_document("writeConcernError") else { return Concern::Met };
    let code = code_of(error);
    if code == code::MAX_TIME_EXPIRED {
        return Concern::Late;
    }
    let message = format!("error code {code}: {}", error.get_str("errmsg").unwrap_or_default());
    let text = format!("{call}: written, but maybe not to a majority");
    Concern::Failed(Error::new(ErrorKind::Unavailable, Unknown, text).with_source(message))
}

/// A patch that would break the unique key.
fn taken(call: &str) -> Error {
    Error::invalid(format!("{call}: another active job has the unique key"))
}

/// Whether the driver says that rows break a unique index.
pub(crate) fn is_taken(error: &mongodb::error::Error) -> bool {
    matches!(&*error.kind, Driver::Command(command) if command.code == code::DUPLICATE_KEY)
}

/// Whether there is such a collection already.
pub(crate) fn exists_already(error: &mongodb::error::Error) -> bool {
    const NAMESPACE_EXISTS: i32 = 48;
    matches!(&*error.kind, Driver::Command(command) if command.code == NAMESPACE_EXISTS)
}

/// Whether a row kept the call from being made: somebody had it in an open transaction, or it cannot be written. Then others
/// still can be.
pub(crate) fn is_about_a_row(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Transient | ErrorKind::Permanent | ErrorKind::Invalid | ErrorKind::TooLarge)
}
