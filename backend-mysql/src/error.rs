//! What an error of the driver means for the caller.

use queue_core::Certainty;
use queue_core::Error;
use queue_core::ErrorKind;
use sqlx::mysql::MySqlDatabaseError;

/// The servers' error numbers. <https://dev.mysql.com/doc/mysql-errors/8.4/en/server-error-reference.html>,
/// <https://mariadb.com/kb/en/mariadb-error-code-reference/>
pub(crate) mod number {
    pub(crate) const DISK_FULL: u16 = 1021;
    pub(crate) const KEY_NOT_FOUND_IN_SNAPSHOT: u16 = 1020;
    pub(crate) const OUT_OF_MEMORY: u16 = 1037;
    pub(crate) const OUT_OF_SORT_MEMORY: u16 = 1038;
    pub(crate) const TOO_MANY_CONNECTIONS: u16 = 1040;
    pub(crate) const OUT_OF_RESOURCES: u16 = 1041;
    pub(crate) const NOT_PREPARED_FOR_QUERIES: u16 = 1047;
    pub(crate) const SHUTDOWN: u16 = 1053;
    pub(crate) const BAD_COLUMN: u16 = 1054;
    pub(crate) const TABLE_EXISTS: u16 = 1050;
    pub(crate) const KEY_EXISTS: u16 = 1061;
    pub(crate) const DUPLICATE: u16 = 1062;
    pub(crate) const KILLED: u16 = 1927;
    pub(crate) const FILE_FULL: u16 = 1114;
    pub(crate) const NO_TABLE: u16 = 1146;
    pub(crate) const PACKET_TOO_LARGE: u16 = 1153;
    pub(crate) const BAD_INDEX: u16 = 1176;
    pub(crate) const NEW_ABORTING_CONNECTION: u16 = 1184;
    pub(crate) const USER_TOO_MANY_CONNECTIONS: u16 = 1203;
    pub(crate) const ERROR_DURING_COMMIT: u16 = 1180;
    pub(crate) const UNKNOWN_VARIABLE: u16 = 1193;
    pub(crate) const LOCK_WAIT_TIMEOUT: u16 = 1205;
    pub(crate) const DEADLOCK: u16 = 1213;
    pub(crate) const USER_LIMIT_REACHED: u16 = 1226;
    pub(crate) const READ_ONLY_OPTION: u16 = 1290;
    /// At the commit of a transaction on a node of a cluster: the server has undone it before, and told nobody.
    pub(crate) const NO_SAVEPOINT: u16 = 1305;
    pub(crate) const INTERRUPTED: u16 = 1317;
    pub(crate) const TABLE_CHANGED: u16 = 1412;
    pub(crate) const TRANSACTION_OPEN: u16 = 1568;
    pub(crate) const NEEDS_PREPARE: u16 = 1615;
    pub(crate) const NEEDS_ROW_LOGGING: u16 = 1665;
    pub(crate) const READ_ONLY_TRANSACTION: u16 = 1792;
    pub(crate) const READ_ONLY_MODE: u16 = 1836;
    pub(crate) const STATEMENT_TIMEOUT: u16 = 1969;
    pub(crate) const QUERY_TIMEOUT: u16 = 3024;
    pub(crate) const ROLLED_BACK_AT_COMMIT: u16 = 3101;
    pub(crate) const NO_WAIT: u16 = 3572;
    pub(crate) const IDLE: u16 = 4031;
}

/// The server's number; 0 if the error is none of a server's.
pub(crate) fn server_number(error: &sqlx::Error) -> u16 {
    let error = error.as_database_error().and_then(|error| error.try_downcast_ref::<MySqlDatabaseError>());
    error.map(MySqlDatabaseError::number).unwrap_or_default()
}

/// The error of a statement that changes nothing by itself: a read, or one inside a transaction that is not committed.
pub(crate) fn failed(call: &'static str, error: sqlx::Error) -> Error {
    told(call, Certainty::NotApplied, error)
}

/// The error of a commit.
pub(crate) fn commit_failed(call: &'static str, error: sqlx::Error) -> Error {
    let certainty = match server_number(&error) {
        // The server says that it has rolled back, or did not begin to commit.
        number::DEADLOCK
        | number::LOCK_WAIT_TIMEOUT
        | number::KEY_NOT_FOUND_IN_SNAPSHOT
        | number::READ_ONLY_OPTION
        | number::READ_ONLY_MODE
        | number::READ_ONLY_TRANSACTION
        | number::NOT_PREPARED_FOR_QUERIES
        | number::ROLLED_BACK_AT_COMMIT => Certainty::NotApplied,
        _ => Certainty::Unknown,
    };
    told(call, certainty, error)
}

fn told(call: &'static str, certainty: Certainty, error: sqlx::Error) -> Error {
    let kind = match &error {
        sqlx::Error::Database(_) => server_kind(server_number(&error)),
        sqlx::Error::Configuration(_) | sqlx::Error::Encode(_) | sqlx::Error::InvalidArgument(_) => ErrorKind::Invalid,
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) | sqlx::Error::ColumnNotFound(_) => ErrorKind::Schema,
        _ => ErrorKind::Unavailable,
    };
    let message = match kind {
        ErrorKind::Schema => format!("{call}: the tables are missing or not as this version knows them; see migrate"),
        _ => call.to_owned(),
    };
    Error::new(kind, certainty, message).with_source(error)
}

fn server_kind(number: u16) -> ErrorKind {
    match number {
        number::DEADLOCK
        | number::LOCK_WAIT_TIMEOUT
        | number::KEY_NOT_FOUND_IN_SNAPSHOT
        | number::NO_WAIT
        | number::INTERRUPTED
        | number::QUERY_TIMEOUT
        | number::STATEMENT_TIMEOUT
        | number::TABLE_CHANGED
        | number::NEEDS_PREPARE
        | number::ROLLED_BACK_AT_COMMIT
        | number::TRANSACTION_OPEN
        | number::NO_SAVEPOINT
        // Somebody was faster with an id or a key; where the call itself is wrong, it says so before.
        | number::DUPLICATE => ErrorKind::Transient,
        number::SHUTDOWN
        | number::IDLE
        | number::KILLED
        | number::NOT_PREPARED_FOR_QUERIES
        | number::NEW_ABORTING_CONNECTION
        | number::TOO_MANY_CONNECTIONS
        | number::USER_TOO_MANY_CONNECTIONS
        | number::USER_LIMIT_REACHED
        | number::READ_ONLY_OPTION
        | number::READ_ONLY_MODE
        | number::READ_ONLY_TRANSACTION
        // Among others a node of a cluster that lost the others in the middle of it.
        | number::ERROR_DURING_COMMIT
        | number::DISK_FULL
        | number::FILE_FULL
        | number::OUT_OF_MEMORY
        | number::OUT_OF_SORT_MEMORY
        | number::OUT_OF_RESOURCES => ErrorKind::Unavailable,
        number::NO_TABLE | number::BAD_COLUMN | number::BAD_INDEX | number::TABLE_EXISTS => ErrorKind::Schema,
        number::PACKET_TOO_LARGE => ErrorKind::TooLarge,
        // A log of statements cannot repeat what READ COMMITTED does.
        number::NEEDS_ROW_LOGGING => ErrorKind::Unsupported,
        _ => ErrorKind::Permanent,
    }
}

/// Whether the server chose this transaction as the victim of a conflict: it is undone, and the same again may well work.
pub(crate) fn is_conflict(error: &sqlx::Error) -> bool {
    matches!(server_number(error), number::DEADLOCK | number::KEY_NOT_FOUND_IN_SNAPSHOT | number::ROLLED_BACK_AT_COMMIT)
}

/// Whether the error is a broken unique index.
pub(crate) fn is_taken(error: &sqlx::Error) -> bool {
    server_number(error) == number::DUPLICATE
}

/// Whether the connection was lost, so that a statement which was sent on it may never have been run.
pub(crate) fn is_lost(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(_) => {
            matches!(server_number(error), number::SHUTDOWN | number::IDLE | number::KILLED)
        }
        sqlx::Error::Io(_) | sqlx::Error::Tls(_) | sqlx::Error::Protocol(_) => true,
        _ => false,
    }
}

/// Whether somebody was faster, so that the same from its beginning may well work.
pub(crate) fn is_overtaken(error: &sqlx::Error) -> bool {
    // The last of a migration's index.
    is_conflict(error) || is_taken(error) || server_number(error) == number::KEY_EXISTS
}

/// Whether the server has no such setting.
pub(crate) fn is_unknown_variable(error: &sqlx::Error) -> bool {
    server_number(error) == number::UNKNOWN_VARIABLE
}

/// Whether somebody left a transaction open on the connection.
pub(crate) fn is_in_transaction(error: &sqlx::Error) -> bool {
    server_number(error) == number::TRANSACTION_OPEN
}

/// Whether the connection is of no more use: it is lost, or leads to a server that cannot write any more.
pub(crate) fn ends_connection(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(_) => matches!(
            server_number(error),
            number::SHUTDOWN
                | number::IDLE
                | number::KILLED
                | number::NOT_PREPARED_FOR_QUERIES
                | number::NEW_ABORTING_CONNECTION
                | number::PACKET_TOO_LARGE
                | number::READ_ONLY_OPTION
                | number::READ_ONLY_MODE
                | number::READ_ONLY_TRANSACTION
                | number::NEEDS_PREPARE
                | number::TRANSACTION_OPEN
                | number::NO_SAVEPOINT
        ),
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::ColumnNotFound(_) => false,
        _ => true,
    }
}
