//! PostgreSQL, in a schema of the benchmark's own.

use std::sync::Arc;

use async_trait::async_trait;
use fenced_queue::Inspect;
use fenced_queue::NewJob;
use fenced_queue::contract::Backend;
use fenced_queue::contract::Revision;
use fenced_queue::postgres::PostgresBackend;
use fenced_queue::postgres::PostgresOptions;
use fenced_queue::postgres::sqlx;
use fenced_queue::postgres::sqlx::AssertSqlSafe;
use fenced_queue::postgres::sqlx::Connection;
use fenced_queue::postgres::sqlx::PgConnection;
use fenced_queue::postgres::sqlx::Row;
use fenced_queue::postgres::sqlx::query;
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

const NOW: &str = "date_trunc('milliseconds', statement_timestamp())";

pub(crate) struct PostgresStore {
    url: String,
    schema: String,
}

impl PostgresStore {
    pub(crate) async fn open(url: &str) -> Result<Self> {
        let store = Self { url: url.to_owned(), schema: own_name() };
        store.contract(1).await?.migrate().await?;
        Ok(store)
    }
}

#[async_trait]
impl Store for PostgresStore {
    async fn version(&self) -> Result<String> {
        let mut connection = PgConnection::connect(&self.url).await?;
        let text = "SELECT current_setting('server_version'), current_setting('synchronous_commit')";
        let row = query(text).fetch_one(&mut connection).await?;
        Ok(format!("PostgreSQL {}, synchronous_commit={}", row.get::<String, _>(0), row.get::<String, _>(1)))
    }

    async fn contract(&self, connections: u32) -> Result<Arc<dyn Inspect>> {
        let options = PostgresOptions::from_url(&self.url)?.schema(self.schema.parse()?)?.max_connections(connections);
        Ok(Arc::new(PostgresBackend::connect_with(options).await?))
    }

    async fn floor(&self) -> Result<Box<dyn Floor>> {
        let jobs = format!("{}.jobs", self.schema);
        let mut connection = PgConnection::connect(&self.url).await?;
        // The table has just been emptied, so the planner takes it to be small. The contract's statements need no such help.
        let text = "SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SET jit = off";
        sqlx::raw_sql(text).execute(&mut connection).await?;
        Ok(Box::new(PostgresFloor { connection, jobs }))
    }

    async fn discard(self: Box<Self>) -> Result<()> {
        let mut connection = PgConnection::connect(&self.url).await?;
        let text = format!("DROP SCHEMA {} CASCADE", self.schema);
        query(AssertSqlSafe(text)).execute(&mut connection).await?;
        Ok(())
    }
}

struct PostgresFloor {
    connection: PgConnection,
    jobs: String,
}

#[async_trait]
impl Floor for PostgresFloor {
    async fn enqueue(&mut self, jobs: &[NewJob]) -> Result<()> {
        let ids: Vec<_> = jobs.iter().map(|job| job.id.as_uuid()).collect();
        let payloads: Vec<_> = jobs.iter().map(|job| job.payload.as_str()).collect();
        let text = format!(
            "INSERT INTO {} (id, queue, kind, state, priority, attempt, max_attempts, fence, revision, available_at, created_at, \
               payload) \
             SELECT new.id, $3, $4, 'waiting', 5, 0, 25, 0, gen_random_uuid(), {NOW}, {NOW}, new.payload \
             FROM unnest($1::uuid[], $2::text[]) AS new (id, payload) ON CONFLICT DO NOTHING",
            self.jobs
        );
        let query = query(AssertSqlSafe(text)).bind(ids).bind(payloads).bind(QUEUE).bind(KIND);
        query.execute(&mut self.connection).await?;
        Ok(())
    }

    async fn claim(&mut self, limit: usize) -> Result<Vec<Ticket>> {
        let revision = Uuid::new_v4();
        let text = format!(
            "WITH due AS MATERIALIZED (SELECT id FROM {0} WHERE state = 'waiting' AND queue = $1 AND priority = 5 \
               AND available_at <= statement_timestamp() AND kind = $2 ORDER BY available_at, id LIMIT $3 FOR UPDATE SKIP LOCKED) \
             UPDATE {0} AS j SET state = 'running', attempt = attempt + 1, fence = fence + 1, revision = $4, claimed_by = $5, \
               claimed_at = {NOW}, attempted_at = {NOW}, lease_expires_at = {NOW} + interval '600 s' \
             FROM due WHERE j.id = due.id RETURNING j.id, j.payload, j.attempt, j.fence, j.claimed_at",
            self.jobs
        );
        let query = query(AssertSqlSafe(text)).bind(QUEUE).bind(KIND).bind(i64::try_from(limit)?);
        let rows = query.bind(revision).bind(WORKER).fetch_all(&mut self.connection).await?;
        let ticket = |row: &sqlx::postgres::PgRow| {
            let _payload: String = row.try_get("payload")?;
            Ok(Ticket { id: row.try_get::<Uuid, _>("id")?.into(), revision: Revision::from(revision) })
        };
        rows.iter().map(ticket).collect()
    }

    async fn settle(&mut self, tickets: &[Ticket]) -> Result<u64> {
        let ids: Vec<_> = tickets.iter().map(|held| held.id.as_uuid()).collect();
        let revisions: Vec<_> = tickets.iter().map(|held| held.revision.as_uuid()).collect();
        let text = format!(
            "WITH seen AS MATERIALIZED (SELECT j.id FROM unnest($1::uuid[], $2::uuid[]) AS t (id, revision) JOIN {0} AS j \
               ON j.id = t.id AND j.revision = t.revision AND j.state = 'running' AND j.attempt = 1 AND j.claimed_by = $3 \
               ORDER BY j.id FOR UPDATE OF j) \
             UPDATE {0} AS j SET state = 'completed', finished_at = {NOW}, lease_expires_at = NULL, revision = gen_random_uuid(), \
               result = $4 FROM seen WHERE j.id = seen.id RETURNING j.id",
            self.jobs
        );
        let query = query(AssertSqlSafe(text)).bind(ids).bind(revisions).bind(WORKER).bind(RESULT);
        Ok(u64::try_from(query.fetch_all(&mut self.connection).await?.len())?)
    }

    async fn end_everything(&mut self) -> Result<()> {
        let text =
            format!("UPDATE {} SET state = 'completed', finished_at = {NOW} WHERE state <> 'completed'", self.jobs);
        query(AssertSqlSafe(text)).execute(&mut self.connection).await?;
        Ok(())
    }

    async fn rest(&mut self) -> Result<()> {
        query(AssertSqlSafe(format!("VACUUM ANALYZE {}", self.jobs))).execute(&mut self.connection).await?;
        query("CHECKPOINT").execute(&mut self.connection).await?;
        Ok(())
    }

    async fn clear(&mut self) -> Result<()> {
        query(AssertSqlSafe(format!("TRUNCATE {} CASCADE", self.jobs))).execute(&mut self.connection).await?;
        Ok(())
    }
}
