//! Connecting, and the schema: the migrations, the version, and which programs may work on it.

use std::collections::HashMap;

use queue_core::Certainty;
use queue_core::Error;
use queue_core::ErrorKind;
use queue_core::Identifier;
use queue_core::Result;
use queue_core::SchemaVersion;
use sqlx::AssertSqlSafe;
use sqlx::Connection;
use sqlx::MySqlConnection;
use sqlx::MySqlPool;
use sqlx::Row;
use sqlx::mysql::MySqlConnectOptions;
use sqlx::mysql::MySqlPoolOptions;
use sqlx::mysql::MySqlRow;

use crate::config::MysqlOptions;
use crate::error::failed;
use crate::error::is_unknown_variable;
use crate::sql::Sql;
use crate::transaction::Repeats;

/// How long a migration waits for another one, and for whoever uses a table, in seconds.
const MIGRATION_WAIT: i64 = 60;

/// Opens a pool whose sessions are told once what the server's defaults do not say.
pub(crate) async fn open(options: &MysqlOptions) -> Result<MySqlPool> {
    let Some(connection) = options.connection.clone() else {
        return Err(Error::invalid("there is no database to connect to: the options were made without a URL"));
    };
    let seconds = options.lock_seconds();
    let session = format!(
        "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; \
         SET SESSION innodb_lock_wait_timeout = {seconds}, SESSION lock_wait_timeout = {seconds}"
    );
    MySqlPoolOptions::new()
        .max_connections(options.max_connections)
        .acquire_timeout(options.acquire_timeout)
        // A round trip before every call; a connection that was lost while it was idle is found by the call itself.
        .test_before_acquire(false)
        .after_connect(move |connection, _| {
            let session = session.clone();
            Box::pin(async move {
                sqlx::raw_sql(AssertSqlSafe(session)).execute(&mut *connection).await?;
                be_causal(connection).await
            })
        })
        .connect_with(connection)
        .await
        .map_err(|error| match error {
            // The driver has none unless told, and sends nothing then.
            sqlx::Error::Tls(_) if cfg!(not(feature = "tls")) => {
                let message = "connecting: an encrypted connection needs the feature tls";
                Error::not_applied(ErrorKind::Unsupported, message).with_source(error)
            }
            error => failed("connecting", error),
        })
}

/// On a node of a cluster, has whatever begins on this connection see what any node has answered before: it waits until this
/// node has it too. Other servers do not know the setting, or pay it no heed.
async fn be_causal(connection: &mut MySqlConnection) -> sqlx::Result<()> {
    let text = "SET SESSION wsrep_sync_wait = @@SESSION.wsrep_sync_wait | 1";
    match sqlx::raw_sql(text).execute(connection).await {
        Err(error) if !is_unknown_variable(&error) => Err(error),
        _ => Ok(()),
    }
}

/// Whether the server is a node of a Galera cluster.
///
/// # Errors
///
/// It is, and the session would be shown what another node has changed already.
pub(crate) async fn is_cluster(connection: &mut MySqlConnection) -> Result<bool> {
    let text = "SHOW SESSION VARIABLES WHERE Variable_name IN ('wsrep_provider', 'wsrep_sync_wait')";
    let read = |error| failed("asking the server for its cluster", error);
    let rows = sqlx::raw_sql(text).fetch_all(connection).await.map_err(read)?;
    let mut values = HashMap::new();
    for row in &rows {
        let text = |column| row.try_get_unchecked::<Vec<u8>, usize>(column).map_err(read);
        values.insert(text(0)?, String::from_utf8_lossy(&text(1)?).into_owned());
    }
    let value = |name: &str| values.get(name.as_bytes()).map(String::as_str).unwrap_or_default();
    if matches!(value("wsrep_provider"), "" | "none") {
        return Ok(false);
    }
    if value("wsrep_sync_wait").parse::<u8>().unwrap_or_default() & 1 == 0 {
        let message = "the server is a node of a cluster: the sessions of the pool must have wsrep_sync_wait = 1, \
                       or a node that is behind answers from the past";
        return Err(Error::invalid(message));
    }
    Ok(true)
}

/// Refuses a server that lacks what the statements need, and a cap on payloads that it does not admit.
pub(crate) async fn check_server(connection: &mut MySqlConnection, max_payload: usize) -> Result<()> {
    const MEBIBYTE: u64 = 1024 * 1024;
    /// What a batch of many rows and their names may come to.
    const LEAST_PACKET: u64 = 8 * MEBIBYTE;

    let read = |error| failed("asking the server for its version", error);
    let text = "SELECT CAST(VERSION() AS BINARY), CAST(@@max_allowed_packet AS SIGNED), CAST(DATABASE() AS BINARY)";
    let row = sqlx::query(text).fetch_one(connection).await.map_err(read)?;
    let version = String::from_utf8_lossy(row.try_get(0).map_err(read)?).into_owned();
    let packet: i64 = row.try_get(1).map_err(read)?;
    if row.try_get::<Option<&[u8]>, _>(2).map_err(read)?.is_none() {
        return Err(Error::invalid("the connection has no database selected"));
    }
    if !is_supported(&version) {
        let message = format!("the server is {version}; MySQL 8.0.19 or MariaDB 10.6 is the oldest that will do");
        return Err(Error::not_applied(ErrorKind::Unsupported, message));
    }
    let packet = u64::try_from(packet).unwrap_or_default();
    let needed = u64::try_from(max_payload).unwrap_or(u64::MAX).saturating_mul(2).saturating_add(MEBIBYTE);
    if packet < needed.max(LEAST_PACKET) {
        let message = format!(
            "a max_payload of {max_payload} bytes needs a max_allowed_packet of {} on the server, which has {packet}",
            needed.max(LEAST_PACKET)
        );
        return Err(Error::invalid(message));
    }
    Ok(())
}

/// By the text that `VERSION()` gives: `8.4.3`, or `10.11.19-MariaDB-..`, in old protocols with `5.5.5-` in front.
fn is_supported(version: &str) -> bool {
    let version = version.strip_prefix("5.5.5-").unwrap_or(version);
    let mut numbers = version.split(|character: char| !character.is_ascii_digit()).map(|number| number.parse().ok());
    let mut next = || numbers.next().flatten().unwrap_or(0_u32);
    let present = (next(), next(), next());
    match version.to_ascii_lowercase().contains("mariadb") {
        true => present >= (10, 6, 0),
        false => present >= (8, 0, 19),
    }
}

/// The migrations, in the order of the versions that they lead to, beginning with 1. Each sets the version itself, so that
/// an operator can run the text by hand. They are only ever added to.
const MIGRATIONS: &[&str] =
    &[include_str!("../migrations/0001_jobs.sql"), include_str!("../migrations/0002_steps.sql")];

/// One step of the schema.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migration {
    /// The schema's version after it.
    pub version: usize,
    /// Its text. The server commits its statements one by one; run again, it completes itself.
    pub sql: String,
}

/// The migrations as [`migrate`](queue_core::Backend::migrate) runs them for this table prefix: to be read, or run by
/// hand, in order, each that leads to a version above that in the table `schema`.
pub fn migrations(prefix: &Identifier) -> Vec<Migration> {
    let texts = MIGRATIONS.iter().map(|text| text.replace("{prefix}", prefix.as_str()));
    texts.enumerate().map(|(index, sql)| Migration { version: index + 1, sql }).collect()
}

async fn table_exists(connection: &mut MySqlConnection, sql: &Sql, name: String) -> Result<bool> {
    let rows = sqlx::query(sql.schema_exists.clone()).bind(name.into_bytes()).fetch_all(connection).await;
    Ok(!rows.map_err(|error| failed("looking for the tables", error))?.is_empty())
}

/// What the schema says of itself.
///
/// # Errors
///
/// A schema that does not admit this program any more.
pub(crate) async fn admitted(
    connection: &mut MySqlConnection,
    sql: &Sql,
    prefix: &Identifier,
) -> Result<SchemaVersion> {
    if !table_exists(connection, sql, format!("{prefix}schema")).await? {
        return Ok(SchemaVersion::default());
    }
    let read = |error| failed("reading the schema's version", error);
    let rows = sqlx::query(sql.schema.clone()).fetch_all(connection).await.map_err(read)?;
    let columns = |row: &MySqlRow| {
        let release = String::from_utf8_lossy(row.try_get(2)?).into_owned();
        let (version, oldest_version, oldest_release) = (row.try_get(0)?, row.try_get(1)?, release);
        sqlx::Result::Ok(SchemaVersion { version, oldest_version, oldest_release })
    };
    let schema = rows.first().map(columns).transpose().map_err(read)?.unwrap_or_default();
    schema.admit(MIGRATIONS.len(), env!("CARGO_PKG_VERSION"))?;
    Ok(schema)
}

/// Whether no migration is missing.
pub(crate) async fn is_current(connection: &mut MySqlConnection, sql: &Sql, prefix: &Identifier) -> Result<bool> {
    Ok(!admitted(connection, sql, prefix).await?.lacks(MIGRATIONS.len()))
}

/// Runs what is missing, on a connection of its own, so that the lock that keeps others from doing the same is gone with
/// it, however this ends.
pub(crate) async fn migrate(options: &MySqlConnectOptions, sql: &Sql, prefix: &Identifier) -> Result<()> {
    let connect = |error| failed("connecting to migrate", error);
    let mut connection = MySqlConnection::connect_with(options).await.map_err(connect)?;
    be_causal(&mut connection).await.map_err(connect)?;
    let done = migrate_on(&mut connection, sql, prefix).await;
    // The answer does not depend on a polite end.
    let _ = connection.close().await;
    done
}

async fn migrate_on(connection: &mut MySqlConnection, statements: &Sql, prefix: &Identifier) -> Result<()> {
    // A statement that changes a table waits for transactions that use it: not for the server's own year.
    let patience = format!("SET SESSION lock_wait_timeout = {MIGRATION_WAIT}");
    let told = sqlx::raw_sql(AssertSqlSafe(patience)).execute(&mut *connection).await;
    told.map_err(|error| failed("waiting to migrate", error))?;
    // One per database and prefix; the names of such locks are the server's and short.
    let lock =
        "SELECT CAST(GET_LOCK(CONCAT('fenced_queue_', LEFT(SHA2(CONCAT(DATABASE(), '.', ?), 256), 40)), ?) AS SIGNED)";
    let locked = sqlx::query(lock).bind(prefix.as_str()).bind(MIGRATION_WAIT).fetch_one(&mut *connection).await;
    let locked = locked.and_then(|row| row.try_get::<Option<i64>, _>(0));
    if locked.map_err(|error| failed("waiting to migrate", error))? != Some(1) {
        let message = format!("somebody else has been migrating for {MIGRATION_WAIT} seconds");
        return Err(Error::not_applied(ErrorKind::Transient, message));
    }
    admitted(connection, statements, prefix).await?;
    let is_begun = table_exists(connection, statements, format!("{prefix}schema")).await?;
    if !is_begun && table_exists(connection, statements, format!("{prefix}jobs")).await? {
        let message =
            format!("migrating: there is a table {prefix}jobs that is not of this queue; nothing was changed");
        return Err(Error::not_applied(ErrorKind::Schema, message));
    }
    let mut has_begun = false;
    for Migration { version, sql } in migrations(prefix) {
        let mut repeats = Repeats::default();
        loop {
            let present = admitted(connection, statements, prefix).await;
            let present = present.map_err(|error| match has_begun {
                // What was asked here wrote nothing, but an earlier migration did.
                true => error.with_certainty(Certainty::Unknown),
                false => error,
            })?;
            if !present.lacks(version) {
                break;
            }
            let Err(error) = sqlx::raw_sql(AssertSqlSafe(sql.clone())).execute(&mut *connection).await else {
                tracing::info!(%prefix, version, "migrated the schema");
                has_begun = true;
                break;
            };
            // In a cluster the lock is the node's own, and somebody on another one may have been faster.
            if repeats.again(&error).await {
                continue;
            }
            let refused = matches!(error, sqlx::Error::Database(_));
            let certainty = if refused && !has_begun { Certainty::NotApplied } else { Certainty::Unknown };
            let error = failed("migrating", error).with_certainty(certainty);
            if refused && !is_begun {
                undo_beginning(connection, statements, prefix).await;
            }
            return Err(error);
        }
    }
    Ok(())
}

/// Takes back the table of versions after the first migration was refused, if nothing came after it.
async fn undo_beginning(connection: &mut MySqlConnection, sql: &Sql, prefix: &Identifier) {
    if !matches!(table_exists(connection, sql, format!("{prefix}jobs")).await, Ok(false)) {
        return;
    }
    let text = format!("DROP TABLE IF EXISTS {prefix}schema");
    if let Err(error) = sqlx::raw_sql(AssertSqlSafe(text)).execute(connection).await {
        tracing::warn!(%prefix, %error, "an empty table of versions is left; the next migration uses it");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_told_by_their_version() {
        for version in ["8.0.19", "8.4.3", "9.7.4-2", "10.6.0-MariaDB", "5.5.5-10.11.19-MariaDB-log", "11.8.2-MariaDB"]
        {
            assert!(is_supported(version), "{version}");
        }
        for version in ["5.7.44", "8.0.18", "10.5.29-MariaDB", "5.5.5-10.3.1-MariaDB", "", "unknown"] {
            assert!(!is_supported(version), "{version}");
        }
    }
}
