//! Opening a database, and its schema: the migrations, the version, and which programs may work on it.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::time::Instant;

use queue_core::Certainty;
use queue_core::Error;
use queue_core::ErrorKind;
use queue_core::Identifier;
use queue_core::Result;
use queue_core::SchemaVersion;
use sqlx::AssertSqlSafe;
use sqlx::Row;
use sqlx::SqliteConnection;
use sqlx::SqlitePool;
use sqlx::sqlite::SqlitePoolOptions;
use sqlx::sqlite::SqliteRow;

use crate::config::SqliteOptions;
use crate::error::failed;
use crate::error::is_busy;
use crate::handle::Patience;
use crate::sql::Sql;

/// How many reads run at a time, beside the one writer.
const READERS: u32 = 4;

/// Opens a pool of one connection for writes, and one for reads. `told` is set back for every new connection for writes.
pub(crate) async fn open(options: &SqliteOptions, told: Arc<AtomicU64>) -> Result<(SqlitePool, SqlitePool)> {
    let connection = options.connection()?;
    // The writer is kept open: with a database in memory it is the database, and with a file whoever closes it last pays
    // for writing the log back. A connection to a file does not go bad, so nothing tests it before each use.
    let pool = || SqlitePoolOptions::new().idle_timeout(None).max_lifetime(None).test_before_acquire(false);
    let failed = |error| failed("opening the database", Certainty::NotApplied, error);
    let writer = pool().max_connections(1).after_connect(move |_, _| {
        told.store(Patience::UNKNOWN, Ordering::SeqCst);
        Box::pin(async { Ok(()) })
    });
    let writer = writer.connect_with(connection.clone()).await.map_err(failed)?;
    if options.is_memory() {
        return Ok((writer.clone(), writer));
    }
    write_ahead(&mut *writer.acquire().await.map_err(failed)?, options.busy_timeout).await?;
    let reading = connection.create_if_missing(false).read_only(true);
    Ok((writer, pool().max_connections(READERS).connect_lazy_with(reading)))
}

/// Readers and the writer shall not wait for each other. The switch is made once in the life of a file, and does not wait
/// as other statements do when several processes make it at once.
async fn write_ahead(connection: &mut SqliteConnection, patience: Duration) -> Result<()> {
    let deadline = Instant::now() + patience;
    loop {
        match sqlx::query("PRAGMA journal_mode = WAL").fetch_all(&mut *connection).await {
            Ok(_) => return Ok(()),
            Err(error) if is_busy(&error) && Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Err(error) => return Err(failed("switching to a write-ahead log", Certainty::NotApplied, error)),
        }
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
    /// Its text, to be run in one transaction.
    pub sql: String,
}

/// The migrations as [`migrate`](queue_core::Backend::migrate) runs them for this table prefix: to be read, or run by
/// hand, in order, each that leads to a version above that in the table `schema`.
pub fn migrations(prefix: &Identifier) -> Vec<Migration> {
    let texts = MIGRATIONS.iter().map(|text| text.replace("{prefix}", prefix.as_str()));
    texts.enumerate().map(|(index, sql)| Migration { version: index + 1, sql }).collect()
}

/// SQLite changes texts on their way to and from UTF-16.
pub(crate) async fn refuse_other_encodings(connection: &mut SqliteConnection) -> Result<()> {
    let failed = |error| failed("reading the encoding", Certainty::NotApplied, error);
    let rows = sqlx::query("PRAGMA encoding").fetch_all(connection).await.map_err(failed)?;
    match rows.first().map(|row| row.try_get::<String, _>(0)).transpose().map_err(failed)?.as_deref() {
        Some("UTF-8") | None => Ok(()),
        Some(other) => {
            let message = format!("the database is in {other}, which does not keep every text; only UTF-8 does");
            Err(Error::not_applied(ErrorKind::Unsupported, message))
        }
    }
}

/// What the schema says of itself.
///
/// # Errors
///
/// A schema that does not admit this program any more.
pub(crate) async fn admitted(connection: &mut SqliteConnection, sql: &Sql) -> Result<SchemaVersion> {
    let read = |error| failed("reading the schema's version", Certainty::NotApplied, error);
    if sqlx::query(sql.schema_exists.clone()).fetch_all(&mut *connection).await.map_err(read)?.is_empty() {
        return Ok(SchemaVersion::default());
    }
    let rows = sqlx::query(sql.schema.clone()).fetch_all(connection).await.map_err(read)?;
    let columns = |row: &SqliteRow| {
        let (version, oldest_version, oldest_release) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
        sqlx::Result::Ok(SchemaVersion { version, oldest_version, oldest_release })
    };
    let schema = rows.first().map(columns).transpose().map_err(read)?.unwrap_or_default();
    schema.admit(MIGRATIONS.len(), env!("CARGO_PKG_VERSION"))?;
    Ok(schema)
}

/// Whether no migration is missing.
pub(crate) async fn is_current(connection: &mut SqliteConnection, sql: &Sql) -> Result<bool> {
    Ok(!admitted(connection, sql).await?.lacks(MIGRATIONS.len()))
}

/// Runs what is missing, inside a transaction that the caller began and commits.
pub(crate) async fn migrate(connection: &mut SqliteConnection, sql: &Sql, prefix: &Identifier) -> Result<()> {
    let present = admitted(connection, sql).await?;
    for Migration { version, sql } in migrations(prefix) {
        if !present.lacks(version) {
            continue;
        }
        sqlx::raw_sql(AssertSqlSafe(sql))
            .execute(&mut *connection)
            .await
            .map_err(|error| failed("migrating", Certainty::NotApplied, error))?;
        tracing::info!(%prefix, version, "migrated the schema");
    }
    Ok(())
}
