//! PostgreSQL for the conformance suite.

use std::str::FromStr;
use std::sync::Arc;

use async_trait::async_trait;
use backend_postgres::PostgresBackend;
use backend_postgres::PostgresOptions;
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
use queue_core::Identifier;
use queue_core::Inspect;
use queue_core::JobId;
use queue_core::NewJob;
use queue_core::Patch;
use queue_core::Transactional;
use queue_core::Update;
use sqlx::AssertSqlSafe;
use sqlx::PgPool;
use sqlx::Postgres;
use sqlx::Transaction;
use sqlx::postgres::PgConnectOptions;
use sqlx::postgres::PgPoolOptions;
use sqlx::query;
use sqlx::raw_sql;

/// A schema for every store, a way to connect to it, and what is done to every handle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PostgresHarness {
    way: Way,
    alter: fn(&mut PostgresBackend),
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Way {
    /// As the backend connects.
    Own,
    /// The application's own pool of one connection, whose transactions are serializable unless told: a snapshot, and more.
    ApplicationPool,
    /// Through a pooler in transaction mode.
    Pooler,
}

impl PostgresHarness {
    pub(crate) fn new(way: Way) -> Self {
        Self::altered(way, |_| {})
    }

    pub(crate) fn altered(way: Way, alter: fn(&mut PostgresBackend)) -> Self {
        Self { way, alter }
    }
}

/// The URL in this variable.
pub(crate) fn url(variable: &str) -> String {
    std::env::var(variable)
        .unwrap_or_else(|_| panic!("{variable} is not set: scripts/test.sh starts the servers and sets it"))
}

fn direct() -> Result<PgConnectOptions, BoxError> {
    Ok(PgConnectOptions::from_str(&url("TEST_POSTGRES_URL"))?)
}

#[async_trait]
impl Harness for PostgresHarness {
    fn name(&self) -> String {
        match self.way {
            Way::Own => "postgres",
            Way::ApplicationPool => "postgres-pool",
            Way::Pooler => "postgres-pooler",
        }
        .to_owned()
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.atomic_batches = true;
        capabilities.skips_locked_rows = true;
        capabilities.wakes = true;
        capabilities.durable_steps = true;
        capabilities
    }

    fn hooks(&self) -> &'static [Hook] {
        &[Hook::Clock, Hook::Overwrite, Hook::Damage, Hook::Hold, Hook::Transaction]
    }

    async fn describe(&self) -> Result<String, BoxError> {
        let pool = PgPool::connect_with(direct()?).await?;
        let version: String = sqlx::query_scalar("SELECT current_setting('server_version')").fetch_one(&pool).await?;
        Ok(match self.way {
            Way::Own => format!("PostgreSQL {version}"),
            Way::ApplicationPool => format!("PostgreSQL {version}, the application's pool of one, serializable"),
            Way::Pooler => format!("PostgreSQL {version}, through a pooler in transaction mode"),
        })
    }

    async fn provision(&self, scope: &Scope) -> Result<Arc<dyn Store>, BoxError> {
        let raw = PgPoolOptions::new().max_connections(4).connect_with(direct()?).await?;
        let schema = scope.name().parse::<Identifier>()?;
        let store = PostgresStore { harness: *self, schema, raw, clock: ClockOffset::default() };
        store.backend().await?.migrate().await?;
        store
            .run(
                "CREATE TABLE {schema}.poisoned (id uuid PRIMARY KEY); \
                 CREATE FUNCTION {schema}.poison() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                   IF EXISTS (SELECT FROM {schema}.poisoned WHERE id = old.id) THEN RAISE EXCEPTION 'poisoned'; END IF; \
                   RETURN new; END $$; \
                 CREATE TRIGGER poison BEFORE UPDATE ON {schema}.jobs FOR EACH ROW EXECUTE FUNCTION {schema}.poison()",
            )
            .await?;
        Ok(Arc::new(store))
    }
}

pub(crate) struct PostgresStore {
    harness: PostgresHarness,
    schema: Identifier,
    /// For what goes past the backend.
    raw: PgPool,
    clock: ClockOffset,
}

impl PostgresStore {
    async fn backend(&self) -> Result<PostgresBackend, BoxError> {
        let url = match self.harness.way {
            Way::Pooler => url("TEST_PGBOUNCER_URL"),
            _ => url("TEST_POSTGRES_URL"),
        };
        let options = PostgresOptions::from_url(&url)?.schema(self.schema.clone())?.clock(self.clock.clone());
        let mut backend = match self.harness.way {
            Way::Own => PostgresBackend::connect_with(options.max_connections(6)).await?,
            Way::Pooler => PostgresBackend::connect_with(options.max_connections(6).transaction_pooler(true)).await?,
            Way::ApplicationPool => {
                let strict = direct()?.options([("default_transaction_isolation", "serializable")]);
                let pool = PgPoolOptions::new().max_connections(1).connect_with(strict).await?;
                PostgresBackend::from_pool_with(pool, options).await?
            }
        };
        (self.harness.alter)(&mut backend);
        Ok(backend)
    }

    fn text(&self, text: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(text.replace("{schema}", self.schema.as_str()))
    }

    async fn run(&self, text: &str) -> Result<(), BoxError> {
        raw_sql(self.text(text)).execute(&self.raw).await?;
        Ok(())
    }

    /// Sets the lifecycle columns of a row.
    async fn overwrite<'c>(
        &self,
        to: impl sqlx::Executor<'c, Database = Postgres>,
        row: &Execution,
    ) -> Result<(), BoxError> {
        let text = |at: Option<queue_core::Timestamp>| at.map(|at| at.to_string());
        query(self.text(
            "UPDATE {schema}.jobs SET state = $2, attempt = $3, max_attempts = $4, fence = $5, revision = $6, \
               claimed_by = $7, claimed_at = $8::text::timestamptz, attempted_at = $9::text::timestamptz, \
               lease_expires_at = $10::text::timestamptz WHERE id = $1",
        ))
        .bind(row.id.as_uuid())
        .bind(row.state.as_str())
        .bind(i64::from(row.attempt))
        .bind(i64::from(row.max_attempts.get()))
        .bind(i64::try_from(row.fence)?)
        .bind(row.revision.as_uuid())
        .bind(row.claimed_by.as_ref().map(queue_core::WorkerId::as_str))
        .bind(text(row.claimed_at))
        .bind(text(row.attempted_at))
        .bind(text(row.lease_expires_at))
        .execute(to)
        .await?;
        Ok(())
    }
}

#[async_trait]
impl Store for PostgresStore {
    async fn connect(&self) -> Result<Arc<dyn Inspect>, BoxError> {
        Ok(Arc::new(self.backend().await?))
    }

    async fn discard(&self) -> Result<(), BoxError> {
        self.run("SET client_min_messages = warning; DROP SCHEMA {schema} CASCADE").await?;
        self.raw.close().await;
        Ok(())
    }

    async fn advance(&self, delay: Delay) -> Result<(), BoxError> {
        self.clock.advance(delay);
        Ok(())
    }

    async fn overwrite(&self, row: &Execution) -> Result<(), BoxError> {
        self.overwrite(&self.raw, row).await
    }

    async fn damage(&self, id: JobId, damage: Damage) -> Result<(), BoxError> {
        let text = match damage {
            Damage::ForeignState => "UPDATE {schema}.jobs SET state = 'of a newer version' WHERE id = $1",
            Damage::BrokenData => "UPDATE {schema}.jobs SET errors = '{\"no\": \"list\"}' WHERE id = $1",
            Damage::Poison => "INSERT INTO {schema}.poisoned VALUES ($1)",
        };
        query(self.text(text)).bind(id.as_uuid()).execute(&self.raw).await?;
        Ok(())
    }

    async fn hold(&self, row: &Execution) -> Result<Box<dyn Hold>, BoxError> {
        let mut transaction = self.raw.begin().await?;
        self.overwrite(&mut *transaction, row).await?;
        Ok(Box::new(Held(transaction)))
    }

    async fn begin(&self, settles: Option<&Execution>) -> Result<Box<dyn CallerTransaction>, BoxError> {
        if settles.is_some() || matches!(self.harness.way, Way::Own) {
            return OwnTransaction::begin(self.backend().await?, settles).await;
        }
        Ok(Box::new(Caller { backend: self.backend().await?, transaction: self.raw.begin().await? }))
    }
}

struct Held(Transaction<'static, Postgres>);

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
    backend: PostgresBackend,
    transaction: Transaction<'static, Postgres>,
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
