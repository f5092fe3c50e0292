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
        url,
        folder: folder.to_owned(),
        workers: 3,
        lasts: Duration::from_secs(10),
        pause: Duration::from_millis(400),
        rate: 200,
        faults: faults.to_vec(),
        program: PathBuf::from(env!("CARGO_BIN_EXE_queue-chaos")),
        crash: None,
        by_id: false,
        patience: Duration::from_secs(60),
    }
}

async fn nothing_is_lost(name: &str, url: String, faults: &[Fault]) {
    let folder = tempfile::tempdir().expect("a folder");
    let options = options(url, folder.path(), faults);
    let outcome = run(&options).await.unwrap_or_else(|error| panic!("{name}: {error}"));
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
    nothing_is_lost(server, database.url.clone(), &EVERYTHING).await;
    database.discard().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sqlite() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("queue.db").display());
    nothing_is_lost("sqlite", url, &[Fault::Kill, Fault::Freeze]).await;
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
