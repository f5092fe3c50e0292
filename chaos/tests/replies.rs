//! Every call of the contract with its answer lost, at every exchange that it has with the server: the request is carried out, the
//! answer never comes, and the connection is gone. Then what is stored is compared with what was said, and the same call made again.
//! Nothing is lost, nothing happens twice. So too from the beginning to the commit of an application's transaction, whose own row
//! shares its fate.

#[path = "replies/application.rs"]
mod application;
mod common;
#[path = "replies/reads.rs"]
mod reads;
#[path = "replies/trial.rs"]
mod trial;

use std::sync::Arc;
use std::time::Duration;

use application::Store;
use common::Database;
use fenced_queue::contract::Certainty;
use fenced_queue::contract::ErrorKind;
use fenced_queue::contract::JobId;
use fenced_queue::mongo::MongoBackend;
use fenced_queue::mysql::MysqlBackend;
use fenced_queue::mysql::MysqlOptions;
use fenced_queue::postgres::PostgresBackend;
use fenced_queue::postgres::PostgresOptions;
use queue_chaos::behind_proxy;
use queue_conformance::Proxy;
use tokio::time::timeout;
use trial::CALLS;
use trial::Trial;

/// How long a call may take, also one that finds the connection gone.
const PATIENCE: Duration = Duration::from_secs(30);

/// A handle of one connection, where the driver can be told: what is counted is the call, not how a second one is set up.
async fn open(server: &str, url: &str) -> Arc<dyn Store> {
    match server {
        "postgres" => {
            let options = PostgresOptions::from_url(url).expect("a URL").max_connections(1);
            Arc::new(PostgresBackend::connect_with(options).await.expect("connects"))
        }
        "mongodb" => Arc::new(MongoBackend::connect(url).await.expect("connects")),
        _ => {
            let options = MysqlOptions::from_url(url).expect("a URL").max_connections(1);
            Arc::new(MysqlBackend::connect_with(options).await.expect("connects"))
        }
    }
}

/// The same through a proxy of its own, over which nothing goes but its calls.
async fn behind(server: &str, url: &str) -> (Proxy, Arc<dyn Store>) {
    let options = match server {
        "postgres" => "sslmode=disable",
        // Past the proxy it would go to the set's members, and a monitor would ask every few seconds how the server is.
        "mongodb" => "directConnection=true&serverMonitoringMode=poll&heartbeatFrequencyMS=600000",
        _ => "ssl-mode=disabled",
    };
    let (url, proxy) = behind_proxy(url, options).await.expect("a proxy");
    let handle = open(server, &url).await;
    (proxy, handle)
}

/// What the proxy is told, for the `nth` exchange of the call that follows the handle's last one at once: sqlx tests a connection that
/// comes back to the pool in the background, which is then, on a runtime of one thread, the first exchange after this call has begun, and
/// nothing after it has ended.
fn counted(server: &str, nth: u64) -> u64 {
    if server == "mongodb" { nth } else { nth + 1 }
}

/// Makes the call with its `nth` reply lost, checks what became of it, and makes it again. How the loss was answered; none if the call
/// ended before.
///
/// Nothing may be awaited between the handle's last call and this one: see [`counted`].
async fn lose(
    trial: &Trial,
    nth: u64,
    server: &str,
    (proxy, handle): &(Proxy, Arc<dyn Store>),
    direct: &dyn Store,
) -> Option<&'static str> {
    proxy.lose_reply(counted(server, nth));
    let answer = timeout(PATIENCE, trial.call(&**handle)).await.expect("it ends, with its reply or without");
    let was_lost = proxy.replies_lost() > 0;
    let rows = trial.rows(direct).await;
    let done = rows.iter().filter(|row| row.is_done).count();
    let said = match &answer {
        Ok(told) => {
            trial.compare(told, &rows);
            "answered"
        }
        Err(error) => {
            assert!(was_lost, "{error}");
            assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Transient), "{error}");
            match error.certainty() {
                Certainty::NotApplied => {
                    assert_eq!(done, 0, "{error}, and there is {rows:?}");
                    "not applied"
                }
                Certainty::Unknown if done == rows.len() => "unknown (stored)",
                Certainty::Unknown if done == 0 => "unknown (not stored)",
                Certainty::Unknown => {
                    assert!(!trial.is_atomic(direct), "{error}, and there is {rows:?}");
                    "unknown (stored in part)"
                }
            }
        }
    };
    if !was_lost {
        return None;
    }
    timeout(PATIENCE, trial.complete(direct, &rows)).await.expect("a repetition completes it");
    Some(said)
}

/// So many exchanges no call has.
const TOO_MANY: u64 = 100;

fn report(server: &str, what: &str, answers: &[&str]) {
    assert!(!answers.is_empty(), "{what}: no reply was lost");
    assert!((answers.len() as u64) < TOO_MANY, "{what}: it never ends");
    let is_there = |answer: &&str| matches!(*answer, "answered" | "unknown (stored)");
    assert!(answers.last().is_some_and(is_there), "{what}: it is carried out by its last exchange: {answers:?}");
    let groups = answers.chunk_by(|one, other| one == other);
    let groups: Vec<_> = groups.map(|group| format!("{} {}", group.len(), group[0])).collect();
    println!("replies {server}: {what}: {} exchanges: {}", answers.len(), groups.join(", "));
}

async fn every_reply(server: &'static str) {
    let Some(database) = Database::create(server, "replies").await else { return };
    let direct = open(server, &database.url).await;
    direct.migrate().await.expect("migrates");
    direct.create_table().await;
    for (what, rows) in CALLS {
        let mut answers = Vec::new();
        for nth in 1..=TOO_MANY {
            let cut_off = behind(server, &database.url).await;
            // Statements are prepared the first time that they are used.
            let warm = Trial::prepare(&*direct, what, rows).await;
            warm.call(&*cut_off.1).await.expect("nothing is lost yet");
            let trial = Trial::prepare(&*direct, what, rows).await;
            cut_off.1.get(JobId::new()).await.expect("nothing is lost yet");
            match lose(&trial, nth, server, &cut_off, &*direct).await {
                Some(answer) => answers.push(answer),
                None => break,
            }
        }
        report(server, &format!("{what} ({rows})"), &answers);
    }
    database.discard().await;
    let mut answers = Vec::new();
    for nth in 1..=TOO_MANY {
        let Some(database) = Database::create(server, &format!("replies_{nth}")).await else { return };
        let direct = open(server, &database.url).await;
        let cut_off = behind(server, &database.url).await;
        let answer = lose(&Trial::of_migrating(), nth, server, &cut_off, &*direct).await;
        database.discard().await;
        match answer {
            Some(answer) => answers.push(answer),
            None => break,
        }
    }
    report(server, "migrate", &answers);
}

#[tokio::test]
async fn on_postgres() {
    every_reply("postgres").await;
}

#[tokio::test]
async fn on_mysql() {
    every_reply("mysql").await;
}

#[tokio::test]
async fn on_mariadb() {
    every_reply("mariadb").await;
}

#[tokio::test]
async fn on_mongodb() {
    every_reply("mongodb").await;
}
