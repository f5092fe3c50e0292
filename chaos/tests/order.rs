//! The example `order`, a process that is killed and started again at random points, on every store but memory.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::process::Child;
use std::process::Command;
use std::process::Stdio;
use std::time::Duration;

use common::Database;
use fenced_queue::contract::ErrorKind;
use fenced_queue::contract::JobState;
use fenced_queue::*;
use serde::Deserialize;
use serde::Serialize;

const KILLS: u32 = 100;
const ORDERS: u64 = 40;

/// As the example has it.
#[derive(Serialize, Deserialize)]
struct Order {
    number: u64,
}

impl JobArgs for Order {
    const KIND: &'static str = "order";
}

/// The example's program: built with the tests of the workspace, unless one crate alone was asked for.
fn program() -> PathBuf {
    let this = std::env::current_exe().expect("this binary");
    let folder = this.parent().and_then(Path::parent).expect("target/debug/deps");
    let program = folder.join("examples").join("order");
    assert!(
        program.exists(),
        "{} is missing: `cargo build --example order --features full` makes it",
        program.display()
    );
    program
}

fn start(url: &str, shop: &Path) -> Child {
    let mut command = Command::new(program());
    command.args(["--work", "--url", url, "--shop"]).arg(shop);
    command.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().expect("it starts")
}

fn kill(mut child: Child) {
    child.kill().expect("killed");
    child.wait().expect("it has ended");
}

/// What the shop did, by order: the names of its steps, and how often each was called.
fn effects(shop: &Path) -> BTreeMap<String, BTreeMap<String, usize>> {
    let mut effects: BTreeMap<String, BTreeMap<String, usize>> = BTreeMap::new();
    for file in fs::read_dir(shop).expect("a folder") {
        let path = file.expect("a file").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        let (id, step) = name.rsplit_once('-').expect("id and step");
        let calls = fs::read_to_string(&path).expect("text").lines().count();
        effects.entry(id.to_owned()).or_default().insert(step.to_owned(), calls);
    }
    effects
}

/// On MongoDB whoever was killed in the middle of a transaction keeps its locks for up to a minute: it is refused, and made again.
async fn pay(queue: &Queue, number: u64) {
    loop {
        match queue.emit(&format!("paid/{number}"), &1).await {
            Ok(_) => return,
            Err(QueueError::Store(error)) if error.kind() == ErrorKind::Transient => {}
            Err(error) => panic!("not emitted: {error}"),
        }
    }
}

async fn killed_at_random(url: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let shop = folder.path();
    let queue = Queue::connect(url).await.expect("connects");
    let mut orders = Vec::new();
    for kills in 0..KILLS {
        let child = start(url, shop);
        let (many, turn) = (u32::try_from(ORDERS).expect("few"), kills % 2);
        if turn == 0 && kills / 2 < many {
            let number = u64::from(kills / 2);
            let stored = queue.enqueue(&Order { number }).max_attempts(1_000).await.expect("stored");
            orders.push((number, stored.id()));
            if number % 3 == 0 {
                pay(&queue, number).await;
            }
        } else if kills / 2 < many && (kills / 2) % 3 == 1 {
            pay(&queue, u64::from(kills / 2)).await;
        }
        // How long it lives is what is tried here, and nothing waits for it.
        tokio::time::sleep(Duration::from_millis(fastrand::u64(20..400))).await;
        kill(child);
    }
    let charged = effects(shop).len();
    assert!(charged * 4 > orders.len(), "only {charged} of {} orders got anywhere before the last start", orders.len());
    let child = start(url, shop);
    let mut ends = BTreeMap::new();
    for (number, id) in &orders {
        let job = queue.ended(*id).await.expect("it ends");
        assert_eq!(job.state(), JobState::Completed, "order {number}: {:?}", job.errors);
        let end: String = job.result.expect("an end").decode().expect("text");
        ends.insert(id.to_string(), (*number, end));
    }
    kill(child);
    let effects = effects(shop);
    assert_eq!(effects.len(), orders.len(), "every order is charged");
    let (mut shipped, mut refunded, mut repeated) = (0, 0, 0);
    for (id, (number, end)) in &ends {
        let steps: Vec<_> = effects[id].keys().map(String::as_str).collect();
        match end.as_str() {
            "shipped" => assert_eq!(steps, ["charge", "ship"], "order {number}"),
            "refunded" => assert_eq!(steps, ["charge", "refund"], "order {number}"),
            other => panic!("order {number}: {other}"),
        }
        (shipped, refunded) = if end == "shipped" { (shipped + 1, refunded) } else { (shipped, refunded + 1) };
        assert!(number % 3 != 0 || end == "shipped", "order {number} was paid before it waited");
        assert!(number % 3 != 2 || end == "refunded", "order {number} was never paid");
        repeated += effects[id].values().filter(|calls| **calls > 1).count();
    }
    println!("{KILLS} kills: {shipped} shipped, {refunded} refunded, {repeated} calls repeated under their key");
    drop(queue);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sqlite() {
    let folder = tempfile::tempdir().expect("a folder");
    killed_at_random(&format!("sqlite:{}", folder.path().join("order.db").display())).await;
}

async fn on(server: &'static str) {
    let Some(database) = Database::create(server, "order").await else { return };
    killed_at_random(&database.url).await;
    database.discard().await;
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
