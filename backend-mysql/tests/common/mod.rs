//! What the tests share. Each test runs on every server, in a database of its own.

#![allow(dead_code, reason = "each test binary uses a part of it")]

#[path = "../harness/mod.rs"]
pub(crate) mod harness;

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use backend_mysql::MysqlBackend;
use backend_mysql::MysqlOptions;
pub(crate) use harness::Server;
use queue_core::*;
use sqlx::AssertSqlSafe;
use sqlx::Connection;
use sqlx::MySqlConnection;
use sqlx::MySqlPool;
use sqlx::Row;
use sqlx::mysql::MySqlConnectOptions;
use sqlx::mysql::MySqlPoolOptions;
use sqlx::mysql::MySqlRow;

/// A database of a test, with a pool of the application's.
pub(crate) struct Database {
    pub(crate) server: Server,
    pub(crate) name: String,
    pub(crate) pool: MySqlPool,
}

impl Database {
    /// Without tables.
    pub(crate) async fn new(server: Server) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs();
        let name = format!("qc_{seconds:012x}_{}_t{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        server.run(&format!("CREATE DATABASE {name} CHARACTER SET latin1")).await.expect("a database");
        let pool = MySqlPoolOptions::new().max_connections(8).connect_lazy_with(server.options().database(&name));
        Self { server, name, pool }
    }

    /// With its tables.
    pub(crate) async fn migrated(server: Server) -> (Self, MysqlBackend) {
        let database = Self::new(server).await;
        let backend = database.connect().await;
        backend.migrate().await.expect("migrates");
        (database, backend)
    }

    pub(crate) fn location(&self) -> MySqlConnectOptions {
        self.server.options().database(&self.name)
    }

    pub(crate) fn options(&self) -> MysqlOptions {
        MysqlOptions::connection(self.location()).expect("a database")
    }

    /// Another handle.
    pub(crate) async fn connect(&self) -> MysqlBackend {
        MysqlBackend::connect_with(self.options()).await.expect("connects")
    }

    /// A connection beside all handles.
    pub(crate) async fn session(&self) -> MySqlConnection {
        MySqlConnection::connect_with(&self.location()).await.expect("connects")
    }

    /// A pool of the application, each session of it prepared by this statement.
    pub(crate) async fn pool_of(&self, connections: u32, session: &'static str) -> MySqlPool {
        MySqlPoolOptions::new()
            .max_connections(connections)
            .after_connect(move |connection, _| {
                Box::pin(async move { sqlx::raw_sql(session).execute(connection).await.map(drop) })
            })
            .connect_with(self.location())
            .await
            .expect("a pool")
    }

    /// Runs statements behind the backend's back.
    pub(crate) async fn run(&self, statements: &str) {
        let mut connection = self.session().await;
        sqlx::raw_sql(AssertSqlSafe(statements)).execute(&mut connection).await.expect("runs");
        connection.close().await.expect("closes");
    }

    pub(crate) async fn rows(&self, statement: &str) -> Vec<MySqlRow> {
        sqlx::query(AssertSqlSafe(statement)).fetch_all(&self.pool).await.expect("reads")
    }

    /// The sessions in this database but the asking one, each with the statement that it runs.
    pub(crate) async fn sessions(&self) -> Vec<(u64, String)> {
        let text = "SHOW FULL PROCESSLIST";
        let rows = sqlx::raw_sql(text).fetch_all(&self.pool).await.expect("a list");
        let column = |row: &MySqlRow, name: &str| {
            let bytes = row.try_get_unchecked::<Option<Vec<u8>>, _>(name).expect("a column").unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let rows = rows.iter().filter(|row| column(row, "db") == self.name && column(row, "Info") != text);
        rows.map(|row| (column(row, "Id").parse().expect("a number"), column(row, "Info"))).collect()
    }

    pub(crate) async fn discard(self) {
        self.pool.close().await;
        self.server.run(&format!("DROP DATABASE {}", self.name)).await.expect("drops");
    }
}

/// Runs a test on every server.
pub(crate) async fn on_each_server(test: impl AsyncFn(&Database, &MysqlBackend)) {
    for server in Server::all() {
        println!("on {server}");
        let (database, backend) = Database::migrated(server).await;
        test(&database, &backend).await;
        backend.close().await;
        database.discard().await;
    }
}

/// Waits for something that the server shows, without assuming how long it takes.
pub(crate) async fn until(what: &str, seen: impl AsyncFn() -> bool) {
    for _ in 0..2_000 {
        if seen().await {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    panic!("not seen in time: {what}");
}

pub(crate) fn name(text: &str) -> Name {
    text.try_into().expect("a name")
}

pub(crate) fn worker() -> WorkerId {
    "web-1/1".parse().expect("a worker")
}

pub(crate) fn job(payload: &str) -> NewJob {
    NewJob::new(name("mail"), name("welcome"), Json::from_text(payload).expect("JSON"))
}

pub(crate) fn keyed(key: &str) -> NewJob {
    NewJob { unique_key: Some(key.try_into().expect("a key")), ..job("1") }
}

pub(crate) fn lease() -> Lease {
    Lease::from_millis(60_000).expect("a lease")
}

pub(crate) fn limit(rows: usize) -> Limit {
    Limit::new(rows).expect("a limit")
}

pub(crate) fn request(rows: usize) -> ClaimRequest {
    claim_of(&["welcome"], rows)
}

pub(crate) fn claim_of(kinds: &[&str], rows: usize) -> ClaimRequest {
    let kinds = kinds.iter().map(|kind| name(kind));
    ClaimRequest::new(name("mail"), kinds, worker(), lease(), limit(rows)).expect("a request")
}

/// Claims and starts one job.
pub(crate) async fn claim_one(backend: &MysqlBackend) -> Job {
    let mut claimed = backend.claim(&request(1)).await.expect("claims");
    claimed.jobs.pop().expect("a job")
}

/// Suspends a job that runs, under the name `w`, until this event comes.
pub(crate) async fn wait_for(backend: &MysqlBackend, seen: &Execution, event: &str, until: When) -> Suspended {
    let mut wait = Suspension::new(seen, name("w"), Some(name(event)), until).expect("legal");
    wait.submit(backend).await.expect("answers")
}

pub(crate) fn event(key: &str, keep: Delay) -> NewEvent {
    NewEvent { key: name(key), payload: Json::from_text("1").expect("JSON"), keep }
}

pub(crate) fn complete(result: &str) -> Transition {
    Transition::Complete { result: Some(Json::from_text(result).expect("JSON")) }
}

pub(crate) fn decide(seen: &Execution, transition: &Transition) -> UpdateRequest {
    Decision::new(seen, transition).expect("legal").request().clone()
}

#[track_caller]
pub(crate) fn assert_error<T: std::fmt::Debug>(answer: Result<T>, kind: ErrorKind) {
    let error = answer.expect_err("refused");
    assert_eq!((error.kind(), error.certainty()), (kind, Certainty::NotApplied), "{error}");
}
