//! MySQL and MariaDB for the conformance suite.

use std::env;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;

use async_trait::async_trait;
use backend_mysql::MysqlBackend;
use backend_mysql::MysqlOptions;
use backend_mysql::migrations;
use queue_conformance::BoxError;
use queue_conformance::CallerTransaction;
use queue_conformance::Damage;
use queue_conformance::Harness;
use queue_conformance::Hold;
use queue_conformance::Hook;
use queue_conformance::OwnTransaction;
use queue_conformance::Scope;
use queue_conformance::Store;
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
use sqlx::Connection;
use sqlx::MySql;
use sqlx::MySqlConnection;
use sqlx::MySqlPool;
use sqlx::Transaction;
use sqlx::mysql::MySqlConnectOptions;
use sqlx::mysql::MySqlPoolOptions;
use sqlx::query;

/// A server to test on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Server {
    Mysql,
    Mariadb,
    /// A Galera cluster, each handle on the node after that of the handle before.
    Galera,
    /// One node of it.
    GaleraNode,
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mysql => "mysql",
            Self::Mariadb => "mariadb",
            Self::Galera => "galera",
            Self::GaleraNode => "galera-node",
        })
    }
}

impl Server {
    /// Those that are not excluded by name.
    pub(crate) fn all() -> Vec<Self> {
        let without = env::var("TEST_WITHOUT").unwrap_or_default();
        let is_excluded = |server: &Self| without.split(',').any(|name| name.trim() == server.to_string());
        let (excluded, servers): (Vec<_>, Vec<_>) = [Self::Mysql, Self::Mariadb].into_iter().partition(is_excluded);
        for server in excluded {
            println!("conformance {server}: EXCLUDED by TEST_WITHOUT");
        }
        servers
    }

    /// A cluster and a node of it, if there is one: no script starts it unless it is told.
    #[allow(dead_code, reason = "the broken variants are not tried there")]
    pub(crate) fn clusters() -> Vec<Self> {
        if env::var_os("TEST_GALERA_URL").is_none() {
            println!("conformance galera: not run, since TEST_GALERA_URL is not set");
            return Vec::new();
        }
        vec![Self::Galera, Self::GaleraNode]
    }

    pub(crate) fn is_cluster(self) -> bool {
        matches!(self, Self::Galera | Self::GaleraNode)
    }

    /// Where its nodes are: of a server that is no cluster, where it is.
    pub(crate) fn nodes(self) -> Vec<MySqlConnectOptions> {
        let name = match self {
            Self::Mysql => "TEST_MYSQL_URL",
            Self::Mariadb => "TEST_MARIADB_URL",
            Self::Galera | Self::GaleraNode => "TEST_GALERA_URL",
        };
        let urls = env::var(name)
            .unwrap_or_else(|_| panic!("{name} is not set: scripts/test.sh starts the servers and sets it"));
        let nodes = if self == Self::GaleraNode { 1 } else { usize::MAX };
        let urls = urls.split_whitespace().take(nodes);
        urls.map(|url| url.parse().unwrap_or_else(|_| panic!("{name} is malformed"))).collect()
    }

    /// Where it is.
    pub(crate) fn options(self) -> MySqlConnectOptions {
        self.nodes().swap_remove(0)
    }

    /// Runs statements as its owner.
    pub(crate) async fn run(self, statements: &str) -> Result<(), sqlx::Error> {
        let mut connection = MySqlConnection::connect_with(&self.options()).await?;
        sqlx::raw_sql(AssertSqlSafe(statements)).execute(&mut connection).await?;
        connection.close().await?;
        for node in self.nodes().into_iter().filter(|_| self.is_cluster()) {
            // Until it is so on every node.
            let mut connection = MySqlConnection::connect_with(&node).await?;
            sqlx::raw_sql("SET wsrep_sync_wait = 1; SELECT 1").fetch_all(&mut connection).await?;
            connection.close().await?;
        }
        Ok(())
    }
}

/// A database for every store, and a way to use it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MysqlHarness {
    pub(crate) server: Server,
    /// The application's own pool of one connection, in sessions that are nothing like the backend's own.
    pub(crate) pooled: bool,
}

/// What an application's sessions may be like.
fn awkward(server: Server) -> &'static str {
    match server {
        Server::Mysql => {
            "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE; \
             SET innodb_lock_wait_timeout = 5, time_zone = '+05:00', sql_mode = 'ANSI,STRICT_ALL_TABLES,NO_BACKSLASH_ESCAPES,PAD_CHAR_TO_FULL_LENGTH'"
        }
        Server::Mariadb => {
            "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ; \
             SET innodb_lock_wait_timeout = 5, time_zone = '-03:30', sql_mode = ''; SET NAMES latin1"
        }
        Server::Galera | Server::GaleraNode => {
            "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ; \
             SET innodb_lock_wait_timeout = 5, time_zone = '-03:30', sql_mode = '', wsrep_sync_wait = 7; SET NAMES latin1"
        }
    }
}

#[async_trait]
impl Harness for MysqlHarness {
    fn name(&self) -> String {
        format!("{}{}", self.server, if self.pooled { "-pool" } else { "" })
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
        match self.server {
            // A lock is the node's own: tests/galera.rs has what that means.
            Server::Galera => &[Hook::Clock, Hook::Overwrite, Hook::Damage, Hook::Transaction],
            _ => &[Hook::Clock, Hook::Overwrite, Hook::Damage, Hook::Hold, Hook::Transaction],
        }
    }

    async fn describe(&self) -> Result<String, BoxError> {
        let mut connection = MySqlConnection::connect_with(&self.server.options()).await?;
        let version: Vec<u8> =
            sqlx::query_scalar("SELECT CAST(VERSION() AS BINARY)").fetch_one(&mut connection).await?;
        let version = String::from_utf8(version)?;
        Ok(match self.pooled {
            false => format!("{version}, its own pool"),
            true => format!("{version}, the application's pool of one: {}", awkward(self.server)),
        })
    }

    async fn provision(&self, scope: &Scope) -> Result<Arc<dyn Store>, BoxError> {
        Ok(Arc::new(MysqlStore::provision(*self, scope.name()).await?))
    }
}

/// A database on a server.
pub(crate) struct MysqlStore {
    harness: MysqlHarness,
    database: String,
    /// For what goes past the backend.
    raw: MySqlPool,
    handles: AtomicUsize,
    clock: ClockOffset,
}

impl MysqlStore {
    /// By the text of the migrations, which is what `migrate` runs, and quicker than a handle of its own.
    pub(crate) async fn provision(harness: MysqlHarness, database: &str) -> Result<Self, BoxError> {
        // Defaults that nothing may rely on.
        let charset = if harness.pooled { "latin1" } else { "utf8mb4" };
        let mut statements = format!("CREATE DATABASE {database} CHARACTER SET {charset}; USE {database};");
        for migration in migrations(&Identifier::default()) {
            statements += &migration.sql;
        }
        harness.server.run(&statements).await?;
        let options = harness.server.options().database(database);
        let raw = match harness.pooled {
            true => awkward_pool(harness.server, 4).connect_lazy_with(options),
            false => raw_pool(harness.server).connect_lazy_with(options),
        };
        Ok(Self {
            harness,
            database: database.to_owned(),
            raw,
            handles: AtomicUsize::default(),
            clock: ClockOffset::default(),
        })
    }

    /// Another handle.
    pub(crate) async fn backend(&self) -> Result<MysqlBackend, BoxError> {
        let mut nodes = self.harness.server.nodes();
        let node = self.handles.fetch_add(1, Ordering::Relaxed) % nodes.len();
        let connection = nodes.swap_remove(node).database(&self.database);
        let options = MysqlOptions::connection(connection.clone())?.max_connections(4).clock(self.clock.clone());
        Ok(match self.harness.pooled {
            false => MysqlBackend::connect_with(options).await?,
            true => {
                let pool = awkward_pool(self.harness.server, 1).connect_with(connection).await?;
                MysqlBackend::from_pool_with(pool, options).await?
            }
        })
    }
}

fn raw_pool(server: Server) -> MySqlPoolOptions {
    MySqlPoolOptions::new().max_connections(4).after_connect(move |connection, _| {
        Box::pin(async move {
            let text = if server.is_cluster() { "SET wsrep_sync_wait = 7" } else { "DO 0" };
            sqlx::raw_sql(text).execute(connection).await.map(drop)
        })
    })
}

fn awkward_pool(server: Server, connections: u32) -> MySqlPoolOptions {
    MySqlPoolOptions::new().max_connections(connections).after_connect(move |connection, _| {
        Box::pin(async move {
            sqlx::raw_sql(awkward(server)).execute(connection).await?;
            Ok(())
        })
    })
}

/// Sets the lifecycle columns of a row.
async fn overwrite<'c>(to: impl sqlx::Executor<'c, Database = MySql>, row: &Execution) -> Result<(), BoxError> {
    let millis = |at: Option<queue_core::Timestamp>| at.map(queue_core::Timestamp::unix_millis);
    query(
        "UPDATE fenced_jobs SET state = ?, attempt = ?, max_attempts = ?, fence = ?, revision = ?, claimed_by = ?, \
         claimed_at = TIMESTAMP'1970-01-01 00:00:00' + INTERVAL ? * 1000 MICROSECOND, \
         attempted_at = TIMESTAMP'1970-01-01 00:00:00' + INTERVAL ? * 1000 MICROSECOND, \
         lease_expires_at = TIMESTAMP'1970-01-01 00:00:00' + INTERVAL ? * 1000 MICROSECOND WHERE id = ?",
    )
    .bind(row.state.as_str())
    .bind(row.attempt)
    .bind(row.max_attempts.get())
    .bind(row.fence)
    .bind(row.revision.as_uuid())
    .bind(row.claimed_by.as_ref().map(|worker| worker.as_str().as_bytes()))
    .bind(millis(row.claimed_at))
    .bind(millis(row.attempted_at))
    .bind(millis(row.lease_expires_at))
    .bind(row.id.as_uuid())
    .execute(to)
    .await?;
    Ok(())
}

#[async_trait]
impl Store for MysqlStore {
    async fn connect(&self) -> Result<Arc<dyn Inspect>, BoxError> {
        Ok(Arc::new(self.backend().await?))
    }

    async fn discard(&self) -> Result<(), BoxError> {
        self.raw.close().await;
        Ok(self.harness.server.run(&format!("DROP DATABASE {}", self.database)).await?)
    }

    async fn advance(&self, delay: Delay) -> Result<(), BoxError> {
        self.clock.advance(delay);
        Ok(())
    }

    async fn overwrite(&self, row: &Execution) -> Result<(), BoxError> {
        overwrite(&self.raw, row).await
    }

    async fn damage(&self, id: JobId, damage: Damage) -> Result<(), BoxError> {
        let column = match damage {
            Damage::ForeignState => "state = 'of a newer version'",
            Damage::BrokenData => "errors = 'no list'",
            Damage::Poison => {
                let trigger = "DROP TRIGGER IF EXISTS poison; CREATE TRIGGER poison BEFORE UPDATE ON fenced_jobs FOR EACH ROW BEGIN \
                               IF OLD.tags = 'poison' THEN \
                               SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'poisoned'; END IF; END";
                sqlx::raw_sql(trigger).execute(&self.raw).await?;
                "tags = 'poison'"
            }
        };
        let text = format!("UPDATE fenced_jobs SET {column} WHERE id = ?");
        query(AssertSqlSafe(text)).bind(id.as_uuid()).execute(&self.raw).await?;
        Ok(())
    }

    async fn hold(&self, row: &Execution) -> Result<Box<dyn Hold>, BoxError> {
        let mut transaction = self.raw.begin().await?;
        overwrite(&mut *transaction, row).await?;
        Ok(Box::new(Held(transaction)))
    }

    async fn begin(&self, settles: Option<&Execution>) -> Result<Box<dyn CallerTransaction>, BoxError> {
        if settles.is_some() || !self.harness.pooled {
            return OwnTransaction::begin(self.backend().await?, settles).await;
        }
        Ok(Box::new(Caller { backend: self.backend().await?, transaction: self.raw.begin().await? }))
    }
}

struct Held(Transaction<'static, MySql>);

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
    backend: MysqlBackend,
    transaction: Transaction<'static, MySql>,
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
