//! Reaching a server, and the schema: the migrations, the version, and which programs may work on it.

use std::time::Duration;

use queue_core::Certainty;
use queue_core::Error;
use queue_core::ErrorKind;
use queue_core::Identifier;
use queue_core::Result;
use queue_core::SchemaVersion;
use sqlx::AssertSqlSafe;
use sqlx::Connection;
use sqlx::PgPool;
use sqlx::Row;
use sqlx::postgres::PgPoolOptions;
use sqlx::postgres::PgRow;
use sqlx::query;
use sqlx::raw_sql;

use crate::config::PostgresOptions;
use crate::error::failed;
use crate::handle::Handle;
use crate::handle::Session;
use crate::sql;
use crate::sql::Sql;

/// A connection that nobody used for longer than this is tested before it is used.
const IDLE: Duration = Duration::from_secs(5);

/// Opens a pool.
pub(crate) async fn open(options: &PostgresOptions) -> Result<PgPool> {
    let pool = PgPoolOptions::new()
        .max_connections(options.max_connections)
        .acquire_timeout(options.acquire_timeout)
        // Not before each use: that would be a second round trip for every call.
        .test_before_acquire(false)
        .before_acquire(|connection, about| {
            Box::pin(async move {
                if about.idle_for > IDLE {
                    connection.ping().await?;
                }
                Ok(true)
            })
        });
    let pool = match options.transaction_pooler {
        // It has no session to be told.
        true => pool,
        false => pool.after_connect(|connection, _| {
            Box::pin(async move {
                raw_sql(AssertSqlSafe(sql::session())).execute(connection).await?;
                Ok(())
            })
        }),
    };
    let opened = pool.connect_with(options.connection.clone()).await;
    opened.map_err(|error| failed("connecting", Certainty::NotApplied, error))
}

/// The migrations, in the order of the versions that they lead to, beginning with 1. Each sets the version itself, so that
/// an operator can run the text by hand. They are only ever added to.
const MIGRATIONS: &[&str] = &[include_str!("../migrations/0001_jobs.sql")];

/// One step of the schema.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migration {
    /// The schema's version after it.
    pub version: usize,
    /// Its text, to be run in one transaction.
    pub sql: String,
}

/// The migrations as [`migrate`](queue_core::Backend::migrate) runs them for this schema: to be read, or run by
/// hand, in order, each that leads to a version above that in the table `schema`.
pub fn migrations(schema: &Identifier) -> Vec<Migration> {
    let texts = MIGRATIONS.iter().map(|text| text.replace("{schema}", schema.as_str()));
    texts.enumerate().map(|(index, sql)| Migration { version: index + 1, sql }).collect()
}

/// What a handle has to know of the server: whether transactions begin as READ COMMITTED by themselves.
///
/// # Errors
///
/// A server that is too old, or a database whose encoding does not keep every text.
pub(crate) async fn reads_committed(handle: &Handle) -> Result<bool> {
    let rows = handle.read("connecting", query(handle.sql.server.clone())).await?;
    let failed = |error| failed("connecting", Certainty::NotApplied, error);
    let [row] = &rows[..] else {
        return Err(Error::not_applied(ErrorKind::Permanent, "the server says nothing of itself"));
    };
    let version: i64 = row.try_get("version").map_err(failed)?;
    if version < 130_000 {
        let message = format!("PostgreSQL 13 or newer is needed, not {}.{}", version / 10_000, version % 10_000);
        return Err(Error::not_applied(ErrorKind::Unsupported, message));
    }
    let encoding: &str = row.try_get("encoding").map_err(failed)?;
    if encoding != "UTF8" {
        let message = format!("the database is in {encoding}, which does not keep every text; only UTF8 does");
        return Err(Error::not_applied(ErrorKind::Unsupported, message));
    }
    Ok(row.try_get::<&str, _>("isolation").map_err(failed)? == "read committed")
}

/// What the schema says of itself.
///
/// # Errors
///
/// A schema that does not admit this program any more.
async fn admitted(session: &mut Session<'_>, sql: &Sql) -> Result<SchemaVersion> {
    const CALL: &str = "reading the schema's version";
    let read = |error| failed(CALL, Certainty::NotApplied, error);
    let rows = session.fetch(CALL, query(sql.schema_exists.clone())).await?;
    if rows.is_empty() {
        return Ok(SchemaVersion::default());
    }
    let rows = session.fetch(CALL, query(sql.schema.clone())).await?;
    let columns = |row: &PgRow| {
        let (version, oldest_version, oldest_release) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
        sqlx::Result::Ok(SchemaVersion { version, oldest_version, oldest_release })
    };
    let schema = rows.first().map(columns).transpose().map_err(read)?.unwrap_or_default();
    schema.admit(MIGRATIONS.len(), env!("CARGO_PKG_VERSION"))?;
    Ok(schema)
}

/// Whether no migration is missing.
///
/// # Errors
///
/// A schema that does not admit this program any more.
pub(crate) async fn is_current(handle: &Handle) -> Result<bool> {
    const CALL: &str = "reading the schema's version";
    let mut lent = handle.lend(CALL, None).await?;
    let present = admitted(&mut lent.session(Certainty::NotApplied), &handle.sql).await;
    Ok(!lent.end(CALL, Certainty::NotApplied, present).await?.lacks(MIGRATIONS.len()))
}

/// Runs what is missing, in one transaction. The lock that keeps others from doing the same ends with that transaction, and the
/// transaction with its connection, whatever becomes of this call.
pub(crate) async fn migrate(handle: &Handle) -> Result<()> {
    let mut lent = handle.begin("migrate").await?;
    let migrated = run_missing(&mut lent.session(Certainty::NotApplied), handle).await;
    lent.end("migrate", Certainty::Unknown, migrated).await
}

async fn run_missing(session: &mut Session<'_>, handle: &Handle) -> Result<()> {
    session.fetch("migrate", query(handle.sql.migrating.clone())).await?;
    let present = admitted(session, &handle.sql).await?;
    for Migration { version, sql } in migrations(&handle.schema) {
        if !present.lacks(version) {
            continue;
        }
        session.run("migrate", AssertSqlSafe(sql)).await?;
        tracing::info!(schema = %handle.schema, version, "migrated the schema");
    }
    Ok(())
}
