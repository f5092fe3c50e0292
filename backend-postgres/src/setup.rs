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
use sqlx::PgConnection;
use sqlx::PgPool;
use sqlx::Row;
use sqlx::postgres::PgPoolOptions;
use sqlx::postgres::PgRow;
use sqlx::query;
use sqlx::raw_sql;
use tokio::time::sleep;

use crate::config::PostgresOptions;
use crate::error::failed;
use crate::handle::Handle;
use crate::handle::Session;
use crate::sql;
use crate::sql::Sql;

/// A connection that nobody used for longer than this is tested before it is used.
const IDLE: Duration = Duration::from_secs(5);

/// How long somebody who is not alone waits before he asks again.
const PAUSE: Duration = Duration::from_millis(50);

const MIGRATE: &str = "migrate";

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
    opened.map_err(|error| match error {
        // The driver has none unless told, and sends nothing then.
        sqlx::Error::Tls(_) if cfg!(not(feature = "tls")) => {
            let message = "connecting: an encrypted connection needs the feature tls";
            Error::not_applied(ErrorKind::Unsupported, message).with_source(error)
        }
        error => failed("connecting", Certainty::NotApplied, error),
    })
}

/// The migrations, with the versions that they lead to and whether each runs in a transaction. The last one of a version sets it, so
/// that an operator can run the texts by hand. They are only ever added to.
const MIGRATIONS: [(usize, bool, &str); 3] = [
    (1, true, include_str!("../migrations/0001_jobs.sql")),
    (2, false, include_str!("../migrations/0002_suspended.sql")),
    (2, true, include_str!("../migrations/0002_steps.sql")),
];

/// The schema's version after all migrations.
const VERSION: usize = MIGRATIONS[MIGRATIONS.len() - 1].0;

/// One step of the schema.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migration {
    /// The schema's version after it, and after the others that lead to the same.
    pub version: usize,
    /// Whether its text is to be run in one transaction. If not, each of its statements is to be run by itself, outside any: an index
    /// on a table that others go on working with. It may be run again after whatever became of it.
    pub in_transaction: bool,
    /// Its text.
    pub sql: String,
}

impl Migration {
    /// What to send to the server, one after the other.
    pub fn statements(&self) -> Vec<&str> {
        match self.in_transaction {
            true => vec![&self.sql],
            false => self.sql.split_inclusive(";\n").collect(),
        }
    }
}

/// The migrations as [`migrate`](queue_core::Backend::migrate) runs them for this schema: to be read, or run by
/// hand, in order, each that leads to a version above that in the table `schema`.
pub fn migrations(schema: &Identifier) -> Vec<Migration> {
    let migration = |(version, in_transaction, text): (usize, bool, &str)| Migration {
        version,
        in_transaction,
        sql: text.replace("{schema}", schema.as_str()),
    };
    MIGRATIONS.map(migration).into()
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
    schema.admit(VERSION, env!("CARGO_PKG_VERSION"))?;
    Ok(schema)
}

/// The same, on a connection of the pool.
///
/// # Errors
///
/// A schema that does not admit this program any more.
pub(crate) async fn present(handle: &Handle) -> Result<SchemaVersion> {
    const CALL: &str = "reading the schema's version";
    let mut lent = handle.lend(CALL, None).await?;
    let present = admitted(&mut lent.session(Certainty::NotApplied), &handle.sql).await;
    lent.end(CALL, Certainty::NotApplied, present).await
}

/// Runs what is missing. Usually that is nothing, and so nobody is waited for, and no right to create anything needed.
pub(crate) async fn migrate(handle: &Handle) -> Result<()> {
    let mut has_run = false;
    loop {
        let present = present(handle).await.map_err(|error| after(has_run, error))?;
        if !present.lacks(VERSION) {
            return Ok(());
        }
        let ran = match present.version {
            // Nobody works on it yet: it comes about whole.
            0 => run(handle, &present, &migrations(&handle.schema)).await,
            _ => upgrade(handle).await,
        };
        ran.map_err(|error| after(has_run, error))?;
        has_run = true;
    }
}

/// An error of what comes after a migration that has run, such as the look whether another is missing, is about that alone: what it
/// came after is there.
fn after(has_run: bool, error: Error) -> Error {
    if has_run { error.with_certainty(Certainty::Unknown) } else { error }
}

/// Runs migrations in one transaction, unless the schema is not the one any more that this was decided on. The lock that keeps
/// others from doing the same ends with that transaction, and the transaction with its connection, whatever becomes of this call.
async fn run(handle: &Handle, seen: &SchemaVersion, missing: &[Migration]) -> Result<()> {
    let mut lent = handle.begin(MIGRATE).await?;
    let migrated = run_in(&mut lent.session(Certainty::NotApplied), handle, seen, missing).await;
    lent.end(MIGRATE, Certainty::Unknown, migrated).await
}

async fn run_in(session: &mut Session<'_>, handle: &Handle, seen: &SchemaVersion, missing: &[Migration]) -> Result<()> {
    session.fetch(MIGRATE, query(handle.sql.migrating.clone())).await?;
    if admitted(session, &handle.sql).await? != *seen {
        return Ok(());
    }
    for Migration { version, sql, .. } in missing {
        // In a schema that nobody works on an index is made like any other.
        session.run(MIGRATE, AssertSqlSafe(sql.replace(" CONCURRENTLY", ""))).await?;
        tracing::info!(schema = %handle.schema, version, "migrated the schema");
    }
    Ok(())
}

/// Brings a schema up to date that others go on working with.
async fn upgrade(handle: &Handle) -> Result<()> {
    let alone = alone(handle).await?;
    let mut has_run = false;
    for migration in migrations(&handle.schema) {
        let present = present(handle).await.map_err(|error| after(has_run, error))?;
        if !present.lacks(migration.version) {
            continue;
        }
        let ran = match migration.in_transaction {
            true => run(handle, &present, &[migration]).await,
            false => build(handle, &migration).await,
        };
        ran.map_err(|error| after(has_run, error))?;
        has_run = true;
    }
    // It ends with its connection; this is only the polite way.
    drop(alone.close().await);
    Ok(())
}

/// Builds an index beside whoever works on the table.
async fn build(handle: &Handle, migration: &Migration) -> Result<()> {
    while is_building(handle).await? {
        sleep(PAUSE).await;
    }
    let mut lent = handle.lend_patiently(MIGRATE).await?;
    let mut session = lent.session(Certainty::Unknown);
    for statement in migration.statements() {
        session.run(MIGRATE, AssertSqlSafe(statement)).await?;
    }
    tracing::info!(schema = %handle.schema, version = migration.version, "built an index");
    Ok(())
}

/// Whether a server still does so for one who is gone. It would wait in turn for whoever waits for it in a statement.
async fn is_building(handle: &Handle) -> Result<bool> {
    let rows = handle.read(MIGRATE, query(handle.sql.building.clone())).await?;
    let building = rows.first().map_or(Ok(false), |row| row.try_get("building"));
    building.map_err(|error| failed(MIGRATE, Certainty::NotApplied, error))
}

/// A connection that nobody else has the like of, for this schema, for as long as it lives. It is not one of the pool, which may have
/// no second one, and what it holds is no session's lock, which a pooler would lose: it stays in a transaction in which nothing happens.
///
/// Building an index waits for whoever was in the middle of a statement. So nobody waits for this in one; nor in a transaction, of which a
/// pooler has so many.
async fn alone(handle: &Handle) -> Result<PgConnection> {
    let failed = |error| failed(MIGRATE, Certainty::NotApplied, error);
    let mut connection = PgConnection::connect_with(&handle.pool.connect_options()).await.map_err(failed)?;
    loop {
        raw_sql(handle.sql.begin.clone()).execute(&mut connection).await.map_err(failed)?;
        let lock = query(handle.sql.upgrading.clone()).persistent(false).fetch_all(&mut connection).await;
        if lock.map_err(failed)?.first().map_or(Ok(false), |row| row.try_get("alone")).map_err(failed)? {
            return Ok(connection);
        }
        raw_sql("ROLLBACK").execute(&mut connection).await.map_err(failed)?;
        sleep(PAUSE).await;
    }
}
