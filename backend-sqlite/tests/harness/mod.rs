//! SQLite for the conformance suite.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use backend_sqlite::SqliteBackend;
use backend_sqlite::SqliteOptions;
use backend_sqlite::Synchronous;
use queue_conformance::BoxError;
use queue_conformance::CallerTransaction;
use queue_conformance::Damage;
use queue_conformance::Harness;
use queue_conformance::Hold;
use queue_conformance::Hook;
use queue_conformance::OwnTransaction;
use queue_conformance::Scope;
use queue_conformance::Store;
use queue_core::Backend;
use queue_core::Capabilities;
use queue_core::ClockOffset;
use queue_core::Delay;
use queue_core::Enqueued;
use queue_core::Execution;
use queue_core::Fingerprint;
use queue_core::Inspect;
use queue_core::JobId;
use queue_core::NewJob;
use queue_core::Patch;
use queue_core::Transactional;
use queue_core::Update;
use sqlx::Sqlite;
use sqlx::SqlitePool;
use sqlx::Transaction;
use sqlx::query;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::sqlite::SqliteJournalMode;
use sqlx::sqlite::SqlitePoolOptions;
use tempfile::TempDir;

/// A file for every store, and a way to open it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SqliteHarness {
    /// As the backend opens it: a write-ahead log, one writer, several readers.
    Own,
    /// The application's own pool of one connection, with a rollback journal.
    ApplicationPool,
}

#[async_trait]
impl Harness for SqliteHarness {
    fn name(&self) -> String {
        match self {
            Self::Own => "sqlite",
            Self::ApplicationPool => "sqlite-pool",
        }
        .to_owned()
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.atomic_batches = true;
        capabilities.wakes = true;
        capabilities.durable_steps = true;
        capabilities
    }

    fn hooks(&self) -> &'static [Hook] {
        &[Hook::Clock, Hook::Overwrite, Hook::Damage, Hook::Hold, Hook::Transaction]
    }

    async fn describe(&self) -> Result<String, BoxError> {
        let pool = SqlitePool::connect("sqlite::memory:").await?;
        let version: String = sqlx::query_scalar("SELECT sqlite_version()").fetch_one(&pool).await?;
        Ok(match self {
            Self::Own => format!("SQLite {version}, a file with a write-ahead log"),
            Self::ApplicationPool => format!("SQLite {version}, the application's pool of one, a rollback journal"),
        })
    }

    async fn provision(&self, scope: &Scope) -> Result<Arc<dyn Store>, BoxError> {
        let folder = TempDir::with_prefix(scope.name())?;
        let journal_mode = match self {
            Self::Own => SqliteJournalMode::Wal,
            Self::ApplicationPool => SqliteJournalMode::Delete,
        };
        let options = SqliteConnectOptions::new()
            .filename(folder.path().join("jobs.db"))
            .create_if_missing(true)
            .journal_mode(journal_mode)
            .busy_timeout(Duration::from_secs(8));
        let raw = SqlitePoolOptions::new().max_connections(4).connect_with(options.clone()).await?;
        let store = SqliteStore { harness: *self, folder, options, raw, clock: ClockOffset::default() };
        store.backend().await?.migrate().await?;
        for text in [
            "CREATE TABLE poisoned (id BLOB PRIMARY KEY)",
            "CREATE TRIGGER poison BEFORE UPDATE ON fenced_jobs WHEN old.id IN (SELECT id FROM poisoned) \
             BEGIN SELECT RAISE(ABORT, 'poisoned'); END",
        ] {
            query(text).execute(&store.raw).await?;
        }
        Ok(Arc::new(store))
    }
}

struct SqliteStore {
    harness: SqliteHarness,
    folder: TempDir,
    options: SqliteConnectOptions,
    /// For what goes past the backend.
    raw: SqlitePool,
    clock: ClockOffset,
}

impl SqliteStore {
    async fn backend(&self) -> Result<SqliteBackend, BoxError> {
        let file = self.folder.path().join("jobs.db");
        // What is tested is not what survives the loss of power.
        let options = SqliteOptions::file(file).synchronous(Synchronous::Normal).clock(self.clock.clone());
        Ok(match self.harness {
            SqliteHarness::Own => SqliteBackend::connect_with(options).await?,
            SqliteHarness::ApplicationPool => {
                let pool = SqlitePoolOptions::new().max_connections(1).connect_with(self.options.clone()).await?;
                SqliteBackend::from_pool_with(pool, options).await?
            }
        })
    }
}

/// Sets the lifecycle columns of a row.
async fn overwrite<'c>(to: impl sqlx::Executor<'c, Database = Sqlite>, row: &Execution) -> Result<(), BoxError> {
    let millis = |at: Option<queue_core::Timestamp>| at.map(queue_core::Timestamp::unix_millis);
    query(
        "UPDATE fenced_jobs SET state = ?2, attempt = ?3, max_attempts = ?4, fence = ?5, revision = ?6, claimed_by = ?7, \
         claimed_at = ?8, attempted_at = ?9, lease_expires_at = ?10 WHERE id = ?1",
    )
    .bind(row.id.as_uuid())
    .bind(row.state.as_str())
    .bind(i64::from(row.attempt))
    .bind(i64::from(row.max_attempts.get()))
    .bind(i64::try_from(row.fence)?)
    .bind(row.revision.as_uuid())
    .bind(row.claimed_by.as_ref().map(queue_core::WorkerId::as_str))
    .bind(millis(row.claimed_at))
    .bind(millis(row.attempted_at))
    .bind(millis(row.lease_expires_at))
    .execute(to)
    .await?;
    Ok(())
}

#[async_trait]
impl Store for SqliteStore {
    async fn connect(&self) -> Result<Arc<dyn Inspect>, BoxError> {
        Ok(Arc::new(self.backend().await?))
    }

    async fn discard(&self) -> Result<(), BoxError> {
        self.raw.close().await;
        Ok(std::fs::remove_dir_all(self.folder.path())?)
    }

    async fn advance(&self, delay: Delay) -> Result<(), BoxError> {
        self.clock.advance(delay);
        Ok(())
    }

    async fn overwrite(&self, row: &Execution) -> Result<(), BoxError> {
        overwrite(&self.raw, row).await
    }

    async fn damage(&self, id: JobId, damage: Damage) -> Result<(), BoxError> {
        let text = match damage {
            Damage::ForeignState => "UPDATE fenced_jobs SET state = 'of a newer version' WHERE id = ?1",
            Damage::BrokenData => "UPDATE fenced_jobs SET errors = 'no list' WHERE id = ?1",
            Damage::Poison => "INSERT INTO poisoned VALUES (?1)",
        };
        query(text).bind(id.as_uuid()).execute(&self.raw).await?;
        Ok(())
    }

    async fn hold(&self, row: &Execution) -> Result<Box<dyn Hold>, BoxError> {
        let mut transaction = self.raw.begin_with("BEGIN IMMEDIATE").await?;
        overwrite(&mut *transaction, row).await?;
        Ok(Box::new(Held(transaction)))
    }

    async fn begin(&self, settles: Option<&Execution>) -> Result<Box<dyn CallerTransaction>, BoxError> {
        if settles.is_some() || matches!(self.harness, SqliteHarness::Own) {
            return OwnTransaction::begin(self.backend().await?, settles).await;
        }
        // As an application begins one: it becomes a writer only when it writes.
        Ok(Box::new(Caller { backend: self.backend().await?, transaction: self.raw.begin().await? }))
    }
}

struct Held(Transaction<'static, Sqlite>);

#[async_trait]
impl Hold for Held {
    async fn commit(self: Box<Self>) -> Result<(), BoxError> {
        Ok(self.0.commit().await?)
    }

    async fn roll_back(self: Box<Self>) -> Result<(), BoxError> {
        Ok(self.0.rollback().await?)
    }
}

struct Caller {
    backend: SqliteBackend,
    transaction: Transaction<'static, Sqlite>,
}

#[async_trait]
impl CallerTransaction for Caller {
    async fn enqueue(&mut self, jobs: &[NewJob]) -> queue_core::Result<Vec<Enqueued>> {
        self.backend.enqueue_in(&mut self.transaction, jobs).await
    }

    async fn update(&mut self, id: JobId, current: &Fingerprint, patch: &Patch) -> queue_core::Result<Update> {
        self.backend.update_if_current_in(&mut self.transaction, id, current, patch).await
    }

    async fn commit(self: Box<Self>) -> Result<(), BoxError> {
        Ok(self.transaction.commit().await?)
    }

    async fn roll_back(self: Box<Self>) -> Result<(), BoxError> {
        Ok(self.transaction.rollback().await?)
    }
}
