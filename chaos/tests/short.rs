//! A short run on every store: nothing is lost, and no stale write recorded, whatever is broken. `scripts/chaos.sh` is the long form.

mod common;

use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use common::Database;
use queue_chaos::Fault;
use queue_chaos::Options;
use queue_chaos::Violation;
use queue_chaos::run;

const EVERYTHING: [Fault; 5] = [Fault::Kill, Fault::Freeze, Fault::Cut, Fault::Lose, Fault::Silence];

fn options(url: String, folder: &Path, faults: &[Fault]) -> Options {
    Options {
        urls: vec![url],
        folder: folder.to_owned(),
        workers: 3,
        lasts: Duration::from_secs(10),
        pause: Duration::from_millis(400),
        rate: 200,
        faults: faults.to_vec(),
        program: PathBuf::from(env!("CARGO_BIN_EXE_queue-chaos")),
        clocks: None,
        one_connection: false,
        by_id: false,
        patience: Duration::from_secs(60),
    }
}

/// With something else that happens meanwhile.
async fn nothing_is_lost(name: &str, url: String, faults: &[Fault], meanwhile: impl Future<Output = ()>) {
    let folder = tempfile::tempdir().expect("a folder");
    let options = Options { one_connection: name == "sqlite", ..options(url, folder.path(), faults) };
    let (outcome, ()) = tokio::join!(run(&options), meanwhile);
    let outcome = outcome.unwrap_or_else(|error| panic!("{name}: {error}"));
    println!("chaos {name}: {outcome}");
    if !outcome.verdict.violations.is_empty() {
        panic!("{name}: {:?}; the records are in {}", outcome.verdict.violations, folder.keep().display());
    }
    assert!(outcome.faults.iter().all(|(_, times)| *times > 0), "every fault was injected: {outcome}");
    let figures = outcome.verdict.figures;
    assert!(figures.jobs > 100, "there was work: {outcome}");
    assert!(figures.repeated + figures.refused + figures.unanswered > 0, "the faults were felt: {outcome}");
}

/// On a database of its own, which is dropped after success.
async fn on(server: &'static str) {
    let Some(database) = Database::create(server, "chaos").await else { return };
    let meanwhile = async {
        match server {
            "postgres" => postgres_ends_sessions(&database.url).await,
            "mongodb" => {}
            _ => mysql_ends_sessions(&database.url).await,
        }
    };
    nothing_is_lost(server, database.url.clone(), &EVERYTHING, meanwhile).await;
    database.discard().await;
}

/// How often all sessions are ended: at last while the workers still have some seconds to go.
const TIMES: usize = 4;

async fn a_pause() {
    tokio::time::sleep(Duration::from_millis(1500)).await;
}

/// Every other time the new sessions can write nothing for the first second, and would not later: they must be given up.
async fn postgres_ends_sessions(url: &str) {
    use fenced_queue::postgres::sqlx::{AssertSqlSafe, Connection, PgConnection, query, query_scalar};
    const END: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                       WHERE datname = current_database() AND pid <> pg_backend_pid()";
    let mut own = PgConnection::connect(url).await.expect("connects");
    let name: String = query_scalar("SELECT current_database()").fetch_one(&mut own).await.expect("a name");
    for time in 0..TIMES {
        a_pause().await;
        if time % 2 == 1 {
            let text = AssertSqlSafe(format!("ALTER DATABASE {name} SET default_transaction_read_only = on"));
            query(text).execute(&mut own).await.expect("runs");
        }
        let ended = query(END).fetch_all(&mut own).await.expect("runs");
        assert!(!ended.is_empty(), "there were sessions");
        tokio::time::sleep(Duration::from_secs(1)).await;
        let text = AssertSqlSafe(format!("ALTER DATABASE {name} RESET default_transaction_read_only"));
        query(text).execute(&mut own).await.expect("runs");
    }
}

async fn mysql_ends_sessions(url: &str) {
    use fenced_queue::mysql::sqlx::mysql::MySqlDatabaseError;
    use fenced_queue::mysql::sqlx::{AssertSqlSafe, Connection, Error, MySqlConnection, query, query_scalar};
    const SESSIONS: &str = "SELECT CAST(id AS UNSIGNED) FROM information_schema.processlist \
                            WHERE db = DATABASE() AND id <> CONNECTION_ID()";
    let mut own = MySqlConnection::connect(url).await.expect("connects");
    for _ in 0..TIMES {
        a_pause().await;
        let sessions: Vec<u64> = loop {
            match query_scalar(SESSIONS).fetch_all(&mut own).await {
                // MySQL makes a text of each statement that runs, and fails if one holds bytes that are none.
                Err(Error::Database(error)) if error.downcast_ref::<MySqlDatabaseError>().number() == 3854 => {}
                sessions => break sessions.expect("runs"),
            }
        };
        assert!(!sessions.is_empty(), "there were sessions");
        for session in sessions {
            // It may have ended by itself meanwhile.
            let _ = query(AssertSqlSafe(format!("KILL {session}"))).execute(&mut own).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sqlite() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("queue.db").display());
    nothing_is_lost("sqlite", url, &[Fault::Kill, Fault::Freeze], async {}).await;
}

/// The proof that the run and its checker can fail: what most queues do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_settle_by_id_are_found_out() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("queue.db").display());
    let options = Options { by_id: true, ..options(url, folder.path(), &[Fault::Freeze]) };
    let outcome = run(&options).await.expect("it ends");
    println!("chaos by id: {outcome}");
    let found = |is_it: fn(&Violation) -> bool| outcome.verdict.violations.iter().any(is_it);
    assert!(found(|violation| matches!(violation, Violation::Overwritten(..))), "{outcome}");
    assert!(found(|violation| matches!(violation, Violation::FromALostClaim(..))), "{outcome}");
}

/// And a fault that could not be injected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_end_by_themselves_are_found_out() {
    let fails = |program: &'static str, fault| async move {
        let folder = tempfile::tempdir().expect("a folder");
        let url = format!("sqlite:{}", folder.path().join("queue.db").display());
        let options = Options { program: program.into(), ..options(url, folder.path(), &[fault]) };
        run(&options).await.expect_err("it fails").to_string()
    };
    let does = |command: &str| Fault::Command { name: "it".to_owned(), command: command.to_owned() };
    let said = fails("true", does("true")).await;
    assert!(said.contains("has ended by itself"), "{said}");
    let said = fails(env!("CARGO_BIN_EXE_queue-chaos"), does("exit 3")).await;
    assert!(said.starts_with("exit 3: "), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_postgres() {
    on("postgres").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_mysql() {
    on("mysql").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_mariadb() {
    on("mariadb").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_mongodb() {
    on("mongodb").await;
}
