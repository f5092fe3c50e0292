//! What the tests share.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::str::FromStr;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;

use backend_postgres::PostgresBackend;
use backend_postgres::PostgresOptions;
use queue_core::*;
use sqlx::AssertSqlSafe;
use sqlx::Connection;
use sqlx::PgConnection;
use sqlx::PgPool;
use sqlx::postgres::PgConnectOptions;
use sqlx::postgres::PgPoolOptions;

/// The URL in this variable.
pub(crate) fn url(variable: &str) -> String {
    std::env::var(variable)
        .unwrap_or_else(|_| panic!("{variable} is not set: scripts/test.sh starts the servers and sets it"))
}

/// How an application connects.
pub(crate) fn application() -> PgConnectOptions {
    PgConnectOptions::from_str(&url("TEST_POSTGRES_URL")).expect("a URL")
}

/// Room for a schema, dropped with it.
pub(crate) struct Scratch {
    pub(crate) schema: Identifier,
}

impl Scratch {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let random = Revision::random().as_uuid().simple().to_string();
        let schema = format!("t{}_{count}_{}", std::process::id(), &random[..8]);
        Self { schema: schema.parse().expect("an identifier") }
    }

    pub(crate) fn options(&self) -> PostgresOptions {
        self.options_for(&url("TEST_POSTGRES_URL"))
    }

    pub(crate) fn options_for(&self, url: &str) -> PostgresOptions {
        let named = format!("{url}{}application_name={}", if url.contains('?') { '&' } else { '?' }, self.schema);
        let options = PostgresOptions::from_url(&named).expect("a URL").max_connections(3);
        options.schema(self.schema.clone()).expect("a schema")
    }

    /// How an application connects, for this schema.
    pub(crate) fn application(&self) -> PgConnectOptions {
        application().application_name(self.schema.as_str())
    }

    /// A pool of the application.
    pub(crate) async fn pool(&self, connections: u32) -> PgPool {
        self.pool_with(connections, &[]).await
    }

    /// A pool of the application, whose sessions have these settings.
    pub(crate) async fn pool_with(&self, connections: u32, settings: &[(&str, &str)]) -> PgPool {
        let options = self.application().options(settings.iter().copied());
        PgPoolOptions::new().max_connections(connections).connect_with(options).await.expect("a pool")
    }

    /// Another handle.
    pub(crate) async fn connect(&self) -> PostgresBackend {
        PostgresBackend::connect_with(self.options()).await.expect("connects")
    }

    /// A handle on a pool of the application.
    pub(crate) async fn lent(&self, pool: &PgPool) -> PostgresBackend {
        PostgresBackend::from_pool_with(pool.clone(), self.options()).await.expect("a handle")
    }

    /// A text with the schema filled in.
    pub(crate) fn text(&self, text: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(text.replace("{schema}", self.schema.as_str()))
    }

    /// Runs statements behind the backend's back.
    pub(crate) async fn run(&self, statements: &str) {
        let mut connection = connection().await;
        sqlx::raw_sql(self.text(statements)).execute(&mut connection).await.expect("runs");
        connection.close().await.expect("closes");
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let text = self
            .text("SET lock_timeout = '5s'; SET client_min_messages = warning; DROP SCHEMA IF EXISTS {schema} CASCADE");
        // In a thread: the test's runtime cannot be waited for here.
        let dropping = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async { sqlx::raw_sql(text).execute(&mut connection().await).await.map(drop) })
        });
        if let Ok(Err(error)) = dropping.join() {
            eprintln!("the schema {} is left: {error}", self.schema);
        }
    }
}

pub(crate) async fn connection() -> PgConnection {
    PgConnection::connect_with(&application()).await.expect("connects")
}

/// A migrated schema.
pub(crate) async fn migrated() -> (Scratch, PostgresBackend) {
    let scratch = Scratch::new();
    let backend = scratch.connect().await;
    backend.migrate().await.expect("migrates");
    (scratch, backend)
}

/// Asks the server until the answer is as wanted.
pub(crate) async fn until(question: &str, wanted: i64) {
    let mut connection = connection().await;
    loop {
        let answer: i64 =
            sqlx::query_scalar(AssertSqlSafe(question)).fetch_one(&mut connection).await.expect("answers");
        if answer == wanted {
            return;
        }
        tokio::task::yield_now().await;
    }
}

/// Waits until this many sessions of the schema's tests wait for a lock.
pub(crate) async fn until_waiting(scratch: &Scratch, sessions: i64) {
    let waiting = "application_name = '{schema}' AND wait_event_type = 'Lock'";
    let question = format!("SELECT count(*) FROM pg_stat_activity WHERE {waiting}");
    until(&question.replace("{schema}", scratch.schema.as_str()), sessions).await;
}

/// The server's clock, in milliseconds.
pub(crate) async fn server_now() -> i64 {
    let text = "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint";
    sqlx::query_scalar(text).fetch_one(&mut connection().await).await.expect("answers")
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
    ClaimRequest::new(name("mail"), [name("welcome")], worker(), lease(), limit(rows)).expect("a request")
}

/// Claims and starts one job.
pub(crate) async fn claim_one(backend: &PostgresBackend) -> Job {
    let mut claimed = backend.claim(&request(1)).await.expect("claims");
    claimed.jobs.pop().expect("a job")
}

pub(crate) fn complete(result: &str) -> Transition {
    Transition::Complete { result: Some(Json::from_text(result).expect("JSON")) }
}

pub(crate) fn decide(job: &Job) -> UpdateRequest {
    Decision::new(&job.execution, &complete("1")).expect("legal").request().clone()
}

/// The kind of an error, and that nothing was written.
#[track_caller]
pub(crate) fn assert_error<T: std::fmt::Debug>(answer: Result<T>, kind: ErrorKind) {
    let error = answer.expect_err("refused");
    assert_eq!((error.kind(), error.certainty()), (kind, Certainty::NotApplied), "{error}");
}
