//! SQLite, on a file in the temporary folder.

use std::sync::Arc;

use async_trait::async_trait;
use fenced_queue::Inspect;
use fenced_queue::NewJob;
use fenced_queue::contract::Backend;
use fenced_queue::contract::Revision;
use fenced_queue::sqlite::SqliteBackend;
use sqlx::ConnectOptions;
use sqlx::Row;
use sqlx::SqliteConnection;
use sqlx::query;
use sqlx::sqlite::SqliteConnectOptions;
use tempfile::TempDir;
use uuid::Uuid;

use crate::Result;
use crate::floor::Floor;
use crate::floor::Ticket;
use crate::measure::KIND;
use crate::measure::QUEUE;
use crate::measure::RESULT;
use crate::measure::WORKER;
use crate::target::Store;

const NOW: &str = "CAST(round(unixepoch('subsec') * 1000) AS INTEGER)";

pub(crate) struct SqliteStore {
    folder: TempDir,
}

impl SqliteStore {
    pub(crate) async fn open() -> Result<Self> {
        let store = Self { folder: TempDir::new()? };
        store.contract(1).await?.migrate().await?;
        Ok(store)
    }

    fn file(&self) -> std::path::PathBuf {
        self.folder.path().join("jobs.db")
    }

    async fn plain(&self) -> Result<SqliteConnection> {
        let options =
            SqliteConnectOptions::new().filename(self.file()).busy_timeout(std::time::Duration::from_secs(10));
        Ok(options.connect().await?)
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn version(&self) -> Result<String> {
        let rows = query("SELECT sqlite_version()").fetch_all(&mut self.plain().await?).await?;
        Ok(format!("SQLite {}, WAL, synchronous=FULL", rows[0].get::<String, _>(0)))
    }

    /// A handle always has one connection for writes.
    async fn contract(&self, _connections: u32) -> Result<Arc<dyn Inspect>> {
        Ok(Arc::new(SqliteBackend::open(self.file()).await?))
    }

    async fn floor(&self) -> Result<Box<dyn Floor>> {
        Ok(Box::new(SqliteFloor(self.plain().await?)))
    }

    async fn discard(self: Box<Self>) -> Result<()> {
        Ok(self.folder.close()?)
    }
}

struct SqliteFloor(SqliteConnection);

fn hex(id: Uuid) -> String {
    id.simple().to_string()
}

#[async_trait]
impl Floor for SqliteFloor {
    async fn enqueue(&mut self, jobs: &[NewJob]) -> Result<()> {
        let items: Vec<_> = jobs.iter().map(|job| (hex(job.id.as_uuid()), job.payload.as_str())).collect();
        let text = format!(
            "INSERT INTO fenced_jobs (id, queue, kind, state, priority, attempt, max_attempts, fence, revision, available_at, \
               created_at, payload) \
             SELECT unhex(value ->> 0), ?2, ?3, 'waiting', 5, 0, 25, 0, randomblob(16), {NOW}, {NOW}, value ->> 1 \
             FROM json_each(?1) WHERE true ON CONFLICT DO NOTHING"
        );
        let query = query(sqlx::AssertSqlSafe(text)).bind(serde_json::to_string(&items)?).bind(QUEUE).bind(KIND);
        query.execute(&mut self.0).await?;
        Ok(())
    }

    async fn claim(&mut self, limit: usize) -> Result<Vec<Ticket>> {
        let revision = Uuid::new_v4();
        let text = format!(
            "UPDATE fenced_jobs SET state = 'running', attempt = attempt + 1, fence = fence + 1, revision = ?1, claimed_by = ?2, \
               claimed_at = {NOW}, attempted_at = {NOW}, lease_expires_at = {NOW} + 600000 \
             WHERE id IN (SELECT id FROM fenced_jobs INDEXED BY fenced_jobs_due WHERE state = 'waiting' AND queue = ?3 \
               AND priority = 5 AND available_at <= {NOW} AND kind = ?4 ORDER BY available_at, id LIMIT ?5) \
             RETURNING id, payload, attempt, fence, claimed_at"
        );
        let query = query(sqlx::AssertSqlSafe(text)).bind(revision).bind(WORKER).bind(QUEUE).bind(KIND);
        let rows = query.bind(i64::try_from(limit)?).fetch_all(&mut self.0).await?;
        let ticket = |row: &sqlx::sqlite::SqliteRow| {
            let _payload: String = row.try_get("payload")?;
            Ok(Ticket { id: row.try_get::<Uuid, _>("id")?.into(), revision: Revision::from(revision) })
        };
        rows.iter().map(ticket).collect()
    }

    async fn settle(&mut self, tickets: &[Ticket]) -> Result<u64> {
        let items: Vec<_> =
            tickets.iter().map(|held| (hex(held.id.as_uuid()), hex(held.revision.as_uuid()), RESULT)).collect();
        let text = format!(
            "UPDATE fenced_jobs AS j SET state = 'completed', finished_at = {NOW}, lease_expires_at = NULL, \
               revision = randomblob(16), result = e.value ->> 2 \
             FROM (SELECT value FROM json_each(?1) LIMIT -1) AS e WHERE j.id = unhex(e.value ->> 0) \
               AND j.revision = unhex(e.value ->> 1) AND j.state = 'running' AND j.attempt = 1 AND j.claimed_by = ?2 \
             RETURNING id"
        );
        let query = query(sqlx::AssertSqlSafe(text)).bind(serde_json::to_string(&items)?).bind(WORKER);
        Ok(u64::try_from(query.fetch_all(&mut self.0).await?.len())?)
    }

    async fn end_everything(&mut self) -> Result<()> {
        let text =
            format!("UPDATE fenced_jobs SET state = 'completed', finished_at = {NOW} WHERE state <> 'completed'");
        query(sqlx::AssertSqlSafe(text)).execute(&mut self.0).await?;
        Ok(())
    }

    async fn clear(&mut self) -> Result<()> {
        query("DELETE FROM fenced_jobs").execute(&mut self.0).await?;
        Ok(())
    }
}
