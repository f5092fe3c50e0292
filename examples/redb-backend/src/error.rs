//! What redb's errors mean to the queue.

use queue_core::Certainty;
use queue_core::Error;
use queue_core::ErrorKind;

/// An error of the contract, to which `?` turns those of redb.
#[derive(Debug)]
pub struct Failed(Error);

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Self {
        failed.0
    }
}

macro_rules! before_the_commit {
    ($($error:ty),+) => {$(
        impl From<$error> for Failed {
            fn from(error: $error) -> Self {
                Self(not_applied(error.into()))
            }
        }
    )+};
}
before_the_commit!(redb::DatabaseError, redb::StorageError, redb::TableError, redb::TransactionError);

impl From<redb::CommitError> for Failed {
    /// A poisoned transaction was rolled back; of any other failure redb says that it may have become durable.
    fn from(error: redb::CommitError) -> Self {
        let certainty = match error {
            redb::CommitError::TransactionPoisoned => Certainty::NotApplied,
            _ => Certainty::Unknown,
        };
        Self(not_applied(error.into()).with_certainty(certainty))
    }
}

impl From<serde_json::Error> for Failed {
    fn from(error: serde_json::Error) -> Self {
        Self(Error::not_applied(ErrorKind::Permanent, "the job cannot be written as JSON").with_source(error))
    }
}

/// Without a commit redb has written nothing that counts.
fn not_applied(error: redb::Error) -> Error {
    use redb::Error as E;
    let kind = match error {
        E::Io(_) | E::PreviousIo | E::Backend(_) | E::DatabaseClosed | E::DatabaseAlreadyOpen => ErrorKind::Unavailable,
        E::UpgradeRequired(_) | E::TableTypeMismatch { .. } | E::TypeDefinitionChanged { .. } => ErrorKind::Schema,
        _ => ErrorKind::Permanent,
    };
    Error::not_applied(kind, "redb").with_source(error)
}
