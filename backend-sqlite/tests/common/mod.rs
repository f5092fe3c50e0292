//! What the tests share.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use backend_sqlite::SqliteBackend;
use queue_core::*;
use sqlx::SqlitePool;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::sqlite::SqlitePoolOptions;
use tempfile::TempDir;

/// A folder with room for a database, gone with it.
pub(crate) fn folder() -> (TempDir, PathBuf) {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("jobs.db");
    (folder, path)
}

/// A migrated file.
pub(crate) async fn migrated() -> (TempDir, PathBuf, SqliteBackend) {
    let (folder, path) = folder();
    let backend = SqliteBackend::open(&path).await.expect("opens");
    backend.migrate().await.expect("migrates");
    (folder, path, backend)
}

/// How an application opens a file of its own.
pub(crate) fn application(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new().filename(path).create_if_missing(true).busy_timeout(Duration::from_secs(10))
}

/// A pool of the application.
pub(crate) async fn pool(path: &Path, connections: u32) -> SqlitePool {
    SqlitePoolOptions::new().max_connections(connections).connect_with(application(path)).await.expect("a pool")
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
pub(crate) async fn claim_one(backend: &SqliteBackend) -> Job {
    let mut claimed = backend.claim(&request(1)).await.expect("claims");
    claimed.jobs.pop().expect("a job")
}

pub(crate) fn complete(result: &str) -> Transition {
    Transition::Complete { result: Some(Json::from_text(result).expect("JSON")) }
}

/// Runs a statement behind the backend's back.
pub(crate) async fn run(path: &Path, statements: &str) {
    let pool = pool(path, 1).await;
    sqlx::raw_sql(sqlx::AssertSqlSafe(statements)).execute(&pool).await.expect("runs");
    pool.close().await;
}
