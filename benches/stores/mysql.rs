//! MySQL and MariaDB, in a database of the benchmark's own.

use std::error::Error;
use std::sync::Arc;

use async_trait::async_trait;
use fenced_queue::Inspect;
use fenced_queue::NewJob;
use fenced_queue::contract::Backend;
use fenced_queue::contract::Revision;
use fenced_queue::mysql::MysqlBackend;
use fenced_queue::mysql::MysqlOptions;
use fenced_queue::mysql::sqlx;
use fenced_queue::mysql::sqlx::AssertSqlSafe;
use fenced_queue::mysql::sqlx::Connection;
use fenced_queue::mysql::sqlx::MySqlConnection;
use fenced_queue::mysql::sqlx::Row;
use fenced_queue::mysql::sqlx::query;
use uuid::Uuid;

use crate::Result;
use crate::floor::Floor;
use crate::floor::Ticket;
use crate::measure::KIND;
use crate::measure::QUEUE;
use crate::measure::RESULT;
use crate::measure::WORKER;
use crate::target::Store;
use crate::target::own_name;

const NOW: &str = "UTC_TIMESTAMP(3)";

pub(crate) struct MysqlStore {
    server: String,
    database: String,
}

impl MysqlStore {
    pub(crate) async fn open(url: &str) -> Result<Self> {
        let store = Self { server: url.to_owned(), database: own_name() };
        let mut connection = MySqlConnection::connect(url).await?;
        query(AssertSqlSafe(format!("CREATE DATABASE {}", store.database))).execute(&mut connection).await?;
        store.contract(1).await?.migrate().await?;
        Ok(store)
    }

    /// The URL with another database in it.
    fn url(&self) -> String {
        let (server, _) = self.server.rsplit_once('/').unwrap_or((&self.server, ""));
        format!("{server}/{}", self.database)
    }
}

#[async_trait]
impl Store for MysqlStore {
    async fn version(&self) -> Result<String> {
        let mut connection = MySqlConnection::connect(&self.server).await?;
        let text = "SELECT version(), CAST(@@innodb_flush_log_at_trx_commit AS CHAR), CAST(@@log_bin AS CHAR)";
        let row = query(text).fetch_one(&mut connection).await?;
        let [version, flush, log] = [row.get::<String, _>(0), row.get(1), row.get(2)];
        let product = if version.contains("MariaDB") { "MariaDB" } else { "MySQL" };
        Ok(format!("{product} {version}, innodb_flush_log_at_trx_commit={flush}, log_bin={log}"))
    }

    async fn contract(&self, connections: u32) -> Result<Arc<dyn Inspect>> {
        let options = MysqlOptions::from_url(&self.url())?.max_connections(connections);
        Ok(Arc::new(MysqlBackend::connect_with(options).await?))
    }

    async fn floor(&self) -> Result<Box<dyn Floor>> {
        let mut connection = MySqlConnection::connect(&self.url()).await?;
        let text = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED";
        query(text).execute(&mut connection).await?;
        Ok(Box::new(MysqlFloor(connection)))
    }

    async fn discard(self: Box<Self>) -> Result<()> {
        let mut connection = MySqlConnection::connect(&self.server).await?;
        query(AssertSqlSafe(format!("DROP DATABASE {}", self.database))).execute(&mut connection).await?;
        Ok(())
    }
}

struct MysqlFloor(MySqlConnection);

impl MysqlFloor {
    async fn try_claim(&mut self, limit: usize) -> Result<Vec<Ticket>> {
        let revision = Uuid::new_v4();
        let mut transaction = self.0.begin().await?;
        let text = format!(
            "SELECT id, payload, attempt, fence FROM fenced_jobs WHERE state = 'waiting' AND queue = ? AND priority = 5 \
               AND available_at <= {NOW} AND kind = ? ORDER BY available_at, id LIMIT ? FOR UPDATE SKIP LOCKED"
        );
        let query_ = query(AssertSqlSafe(text)).bind(QUEUE).bind(KIND).bind(i64::try_from(limit)?);
        let rows = query_.fetch_all(&mut *transaction).await?;
        let ticket = |row: &sqlx::mysql::MySqlRow| {
            let _payload: Vec<u8> = row.try_get_unchecked("payload")?;
            Ok(Ticket { id: row.try_get::<Uuid, _>("id")?.into(), revision: Revision::from(revision) })
        };
        let tickets: Vec<_> = rows.iter().map(ticket).collect::<Result<_>>()?;
        if !tickets.is_empty() {
            let text = format!(
                "UPDATE fenced_jobs FORCE INDEX (PRIMARY) SET state = 'running', attempt = attempt + 1, fence = fence + 1, \
                   revision = ?, claimed_by = ?, claimed_at = {NOW}, attempted_at = {NOW}, \
                   lease_expires_at = {NOW} + INTERVAL 600 SECOND WHERE id IN ({})",
                parameters("?", tickets.len())
            );
            let mut query = query(AssertSqlSafe(text)).bind(revision).bind(WORKER);
            for ticket in &tickets {
                query = query.bind(ticket.id.as_uuid());
            }
            query.execute(&mut *transaction).await?;
        }
        transaction.commit().await?;
        Ok(tickets)
    }
}

fn is_deadlock(error: &(dyn Error + 'static)) -> bool {
    match error.downcast_ref::<sqlx::Error>() {
        Some(sqlx::Error::Database(error)) => error.code().as_deref() == Some("40001"),
        _ => false,
    }
}

/// A list of this many parameters.
fn parameters(one: &str, count: usize) -> String {
    vec![one; count].join(", ")
}

#[async_trait]
impl Floor for MysqlFloor {
    async fn enqueue(&mut self, jobs: &[NewJob]) -> Result<()> {
        let row = format!("(?, ?, ?, 'waiting', 5, 0, 25, 0, ?, {NOW}, {NOW}, '[]', ?)");
        let text = format!(
            "INSERT INTO fenced_jobs (id, queue, kind, state, priority, attempt, max_attempts, fence, revision, available_at, \
               created_at, errors, payload) VALUES {}",
            parameters(&row, jobs.len())
        );
        let mut query = query(AssertSqlSafe(text));
        for job in jobs {
            query = query.bind(job.id.as_uuid()).bind(QUEUE).bind(KIND).bind(Uuid::new_v4()).bind(job.payload.as_str());
        }
        query.execute(&mut self.0).await?;
        Ok(())
    }

    /// Claimers that meet in the index deadlock, and repeat.
    async fn claim(&mut self, limit: usize) -> Result<Vec<Ticket>> {
        loop {
            match self.try_claim(limit).await {
                Err(error) if is_deadlock(error.as_ref()) => {}
                done => return done,
            }
        }
    }

    async fn settle(&mut self, tickets: &[Ticket]) -> Result<u64> {
        let mut transaction = self.0.begin().await?;
        let ids = parameters("?", tickets.len());
        let text = format!(
            "SELECT id, state, attempt, claimed_by, revision FROM fenced_jobs FORCE INDEX (PRIMARY) WHERE id IN ({ids}) \
             ORDER BY id FOR UPDATE"
        );
        let mut locking = query(AssertSqlSafe(text));
        for ticket in tickets {
            locking = locking.bind(ticket.id.as_uuid());
        }
        let rows = locking.fetch_all(&mut *transaction).await?;
        let current: std::collections::HashMap<Uuid, Uuid> =
            rows.iter().map(|row| Ok((row.try_get("id")?, row.try_get("revision")?))).collect::<Result<_>>()?;
        let matching: Vec<_> = tickets
            .iter()
            .filter(|ticket| current.get(&ticket.id.as_uuid()) == Some(&ticket.revision.as_uuid()))
            .collect();
        let text = format!(
            "UPDATE fenced_jobs FORCE INDEX (PRIMARY) SET state = 'completed', finished_at = {NOW}, lease_expires_at = NULL, \
               revision = ?, result = ? WHERE id IN ({})",
            parameters("?", matching.len())
        );
        let mut writing = query(AssertSqlSafe(text)).bind(Uuid::new_v4()).bind(RESULT);
        for ticket in matching {
            writing = writing.bind(ticket.id.as_uuid());
        }
        let done = writing.execute(&mut *transaction).await?.rows_affected();
        transaction.commit().await?;
        Ok(done)
    }

    async fn end_everything(&mut self) -> Result<()> {
        // In many transactions, by whose number `rest` tells how far the server has come.
        let text = format!(
            "UPDATE fenced_jobs SET state = 'completed', finished_at = {NOW} WHERE id > ? AND id <= ? AND state <> 'completed'"
        );
        let mut after = Uuid::nil();
        loop {
            let next = query("SELECT id FROM fenced_jobs WHERE id > ? ORDER BY id LIMIT 1 OFFSET 999").bind(after);
            let next = next.fetch_optional(&mut self.0).await?.map(|row| row.try_get::<Uuid, _>(0)).transpose()?;
            let to = next.unwrap_or(Uuid::max());
            query(AssertSqlSafe(text.clone())).bind(after).bind(to).execute(&mut self.0).await?;
            match next {
                Some(next) => after = next,
                None => return Ok(()),
            }
        }
    }

    async fn rest(&mut self) -> Result<()> {
        // Entries of what was changed stay in the indexes, marked as deleted, until the server's purge has come to them. The
        // newest transaction can stay in its list for long.
        let text = "SELECT count FROM information_schema.innodb_metrics WHERE name = 'trx_rseg_history_len'";
        while query(text).fetch_one(&mut self.0).await?.try_get::<i64, _>(0)? > 1 {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        Ok(())
    }

    async fn clear(&mut self) -> Result<()> {
        // Refused otherwise, since steps refer to jobs; here there are none.
        let text = "SET foreign_key_checks = 0; TRUNCATE TABLE fenced_jobs; SET foreign_key_checks = 1";
        sqlx::raw_sql(text).execute(&mut self.0).await?;
        Ok(())
    }
}
