//! Every call of the contract on SQLite, by a process that is killed at each system call of its that writes: before every page, every
//! header, every flush and every deletion of a file. Then what is stored is whole or not there at all, the file is sound, and the same
//! call made again completes it once. The process is this binary again, with a task.
//!
//! What the operating system has taken survives the process. So this says nothing about a loss of power, and `synchronous` changes
//! nothing in it.

#[path = "replies/application.rs"]
mod application;
#[path = "replies/trial.rs"]
mod trial;
#[path = "common/without.rs"]
mod without;

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::env;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::path::PathBuf;
use std::process::ExitCode;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use application::Store;
use fenced_queue::contract::Backend;
use fenced_queue::sqlite::SqliteBackend;
use fenced_queue::sqlite::sqlx::Connection;
use fenced_queue::sqlite::sqlx::SqliteConnection;
use fenced_queue::sqlite::sqlx::SqlitePool;
use fenced_queue::sqlite::sqlx::query_scalar;
use fenced_queue::sqlite::sqlx::raw_sql;
use fenced_queue::sqlite::sqlx::sqlite::SqliteConnectOptions;
use fenced_queue::sqlite::sqlx::sqlite::SqlitePoolOptions;
use libtest_mimic::Arguments;
use serde::Deserialize;
use serde::Serialize;
use tokio::process::Command;
use tokio::task::JoinSet;
use tokio::time::timeout;
use trial::CALLS;
use trial::Recipe;
use trial::Told;
use trial::Trial;
use without::is_left_out;

const TASK: &str = "FENCED_TEST_TASK";

/// With which SQLite changes files, under the names that one architecture or another has for them.
const WRITES: &str =
    "?pwrite64,?pwritev,?write,?ftruncate,?fallocate,?fsync,?fdatasync,?unlink,?unlinkat,?rename,?renameat";

/// How long a process may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// So many processes at once; two tests run beside each other.
const AT_ONCE: usize = 2;

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Journal {
    /// A write-ahead log, which the backend chooses for a file of its own.
    Log,
    /// A rollback journal, SQLite's default, which an application's pool may use.
    Rollback,
}

impl fmt::Display for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Log => "write-ahead log",
            Self::Rollback => "rollback journal",
        })
    }
}

impl Journal {
    async fn open(self, file: &Path) -> SqliteBackend {
        match self {
            Self::Log => SqliteBackend::open(file).await.expect("opens"),
            Self::Rollback => SqliteBackend::from_pool(pool(file).await).await.expect("opens"),
        }
    }
}

/// An application's pool, of one connection, with the journal that the file has.
async fn pool(file: &Path) -> SqlitePool {
    let options = SqliteConnectOptions::new().filename(file).create_if_missing(true);
    SqlitePoolOptions::new().max_connections(1).connect_with(options).await.expect("opens")
}

/// What a process is to do.
#[derive(Serialize, Deserialize)]
struct Task {
    journal: Journal,
    file: PathBuf,
    recipe: Recipe,
    /// Whether to write the log back after it, as one call in many does.
    checkpoints: bool,
}

/// The `nth` of these system calls in a thread.
#[derive(Clone, Debug)]
struct Kill {
    call: String,
    nth: usize,
}

fn main() -> ExitCode {
    match env::var(TASK) {
        Ok(task) => in_runtime(make_the_call(serde_json::from_str(&task).expect("a task"))),
        Err(_) => return run_tests(),
    }
    ExitCode::SUCCESS
}

fn run_tests() -> ExitCode {
    let test = |name: &str, journal| {
        libtest_mimic::Trial::test(name, move || {
            if !is_left_out("strace") {
                in_runtime(every_write(journal));
            }
            Ok(())
        })
    };
    let tests = vec![test("with_a_log", Journal::Log), test("with_a_rollback_journal", Journal::Rollback)];
    libtest_mimic::run(&Arguments::from_args(), tests).exit_code()
}

fn in_runtime(work: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime").block_on(work);
}

async fn make_the_call(Task { journal, file, recipe, checkpoints }: Task) {
    let trial = Trial::of(recipe);
    let tell = |told: Result<Vec<Told>, _>| {
        println!("{}", serde_json::to_string(&told.expect("nobody else is there")).expect("JSON"));
    };
    if checkpoints {
        // On the connection of the call, so that one thread writes.
        let pool = pool(&file).await;
        tell(trial.call(&SqliteBackend::from_pool(pool.clone()).await.expect("opens")).await);
        raw_sql("PRAGMA wal_checkpoint(TRUNCATE)").execute(&pool).await.expect("writes back");
    } else {
        tell(trial.call(&journal.open(&file).await).await);
    }
    // Nothing is closed in order.
    std::process::exit(0);
}

/// What was found after a kill: the later it comes, the more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Found {
    Nothing,
    Stored,
    Answered,
}

/// What became of a process.
struct Ended {
    was_killed: bool,
    told: Option<Vec<Told>>,
}

/// Has another process do it, and notes in `log` how it writes to the database's files.
async fn run(task: &Task, kill: Option<&Kill>, log: &Path) -> Ended {
    let mut command = Command::new("strace");
    command.args(["-f", "-qq", "-o"]).arg(log);
    for suffix in ["", "-wal", "-journal"] {
        command.arg("-P").arg(beside(&task.file, suffix));
    }
    command.arg("-P").arg(task.file.parent().expect("in a folder"));
    command.arg("-e").arg(format!("trace={WRITES}"));
    if let Some(Kill { call, nth }) = kill {
        command.arg("-e").arg(format!("inject={call}:signal=KILL:when={nth}"));
    }
    command.arg(env::current_exe().expect("this binary"));
    command.env(TASK, serde_json::to_string(task).expect("JSON")).stdin(Stdio::null()).kill_on_drop(true);
    let ended = timeout(PATIENCE, command.output()).await.expect("it ends");
    let ended = ended.unwrap_or_else(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            panic!("strace is missing: scripts/test.sh installs it; `--without strace` leaves these tests out")
        }
        _ => panic!("strace: {error}"),
    });
    let was_killed = ended.status.signal() == Some(9);
    assert!(
        was_killed || ended.status.success(),
        "{kill:?}: {}: {}",
        ended.status,
        String::from_utf8_lossy(&ended.stderr)
    );
    let told = Some(ended.stdout).filter(|told| !told.is_empty());
    Ended { was_killed, told: told.map(|told| serde_json::from_slice(&told).expect("an answer")) }
}

fn beside(file: &Path, suffix: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Every system call of the log, in its order, as one to be killed at.
fn kills(log: &Path) -> Vec<Kill> {
    let mut counts: BTreeMap<(String, String), usize> = BTreeMap::new();
    let mut kills = Vec::new();
    for line in fs::read_to_string(log).expect("a log").lines() {
        // `4711 pwrite64(3, ..`; what was interrupted goes on as `4711 <... pwrite64 resumed>`.
        let mut words = line.split(['(', ' ']).filter(|word| !word.is_empty());
        let (Some(thread), Some(call)) = (words.next(), words.next()) else { continue };
        if call.starts_with(|first: char| first.is_ascii_lowercase()) {
            let nth = counts.entry((thread.to_owned(), call.to_owned())).or_default();
            *nth += 1;
            kills.push(Kill { call: call.to_owned(), nth: *nth });
        }
    }
    let threads: BTreeSet<_> = counts.keys().map(|(thread, _)| thread).collect();
    assert_eq!(threads.len(), 1, "one thread writes: else a count would mean several calls");
    kills
}

/// What there is to be found in a file that a process has left, and whether the call was carried out.
async fn check(trial: &Trial, journal: Journal, file: &Path, told: Option<&[Told]>) -> bool {
    let store = journal.open(file).await;
    let rows = trial.rows(&store).await;
    let mut connection = SqliteConnection::connect(&file.to_string_lossy()).await.expect("opens");
    let sound: String = query_scalar("PRAGMA integrity_check").fetch_one(&mut connection).await.expect("runs");
    assert_eq!(sound, "ok");
    connection.close().await.expect("closes");
    let done = rows.iter().filter(|row| row.is_done).count();
    assert!(trial.is_atomic(&store) && (done == 0 || done == rows.len()), "in part: {rows:?}");
    if let Some(told) = told {
        trial.compare(told, &rows);
    }
    timeout(PATIENCE, trial.complete(&store, &rows)).await.expect("a repetition completes it");
    store.close().await;
    done > 0
}

/// From now on the file alone has everything, whoever else has it open.
async fn write_back(file: &Path) {
    let mut connection = SqliteConnection::connect(&file.to_string_lossy()).await.expect("opens");
    let busy: i64 = query_scalar("PRAGMA wal_checkpoint(TRUNCATE)").fetch_one(&mut connection).await.expect("runs");
    assert_eq!(busy, 0);
    connection.close().await.expect("closes");
}

/// A file of its own with what is there before the call.
fn copy(before: &Path, folder: &Path) -> PathBuf {
    fs::create_dir_all(folder).expect("a folder");
    let file = folder.join("queue.db");
    if before.exists() {
        fs::copy(before, &file).expect("a copy");
    }
    file
}

async fn every_write_of(trial: Trial, journal: Journal, what: &str, before: &Path, folder: &Path) {
    let begun = Instant::now();
    let checkpoints = matches!(journal, Journal::Log) && what == "settle (4)";
    let task = move |file, recipe| Task { journal, file, recipe, checkpoints };
    let unharmed = copy(before, &folder.join("unharmed"));
    let log = folder.join("log");
    let ended = run(&task(unharmed.clone(), trial.recipe.clone()), None, &log).await;
    assert!(
        check(&trial, journal, &unharmed, ended.told.as_deref()).await && ended.told.is_some(),
        "{what}: it was made"
    );
    let kills = kills(&log);
    let trial = Arc::new(trial);
    let (mut running, mut ended) = (JoinSet::new(), Vec::new());
    for (place, kill) in kills.into_iter().enumerate() {
        if running.len() == AT_ONCE {
            ended.extend(running.join_next().await.map(|ended| ended.expect("it holds")));
        }
        let folder = folder.join(place.to_string());
        let task = task(copy(before, &folder), trial.recipe.clone());
        let trial = Arc::clone(&trial);
        running.spawn(async move {
            let Ended { was_killed, told } = run(&task, Some(&kill), &folder.join("log")).await;
            assert!(was_killed, "{kill:?} did not come again");
            let is_done = check(&trial, journal, &task.file, told.as_deref()).await;
            fs::remove_dir_all(folder).expect("deletes");
            match (told, is_done) {
                (Some(_), _) => (place, Found::Answered),
                (None, true) => (place, Found::Stored),
                (None, false) => (place, Found::Nothing),
            }
        });
    }
    ended.extend(running.join_all().await);
    ended.sort_unstable();
    let found: Vec<_> = ended.into_iter().map(|(_, found)| found).collect();
    assert!(found.first() == Some(&Found::Nothing) && found.is_sorted(), "{what}: {found:?}");
    let groups = found.chunk_by(|one, other| one == other);
    let groups: Vec<_> = groups.map(|group| format!("{} {:?}", group.len(), group[0])).collect();
    let (kills, lasted) = (found.len(), begun.elapsed());
    println!("kills {journal}: {what}: {kills} kills: {} ({lasted:.1?})", groups.join(", "));
}

async fn every_write(journal: Journal) {
    let folder = tempfile::tempdir().expect("a folder");
    // As the process's descriptors will show it.
    let folder = folder.path().canonicalize().expect("a folder");
    let migrated = folder.join("migrated.db");
    let store = journal.open(&migrated).await;
    store.migrate().await.expect("migrates");
    store.create_table().await;
    write_back(&migrated).await;
    store.close().await;
    for (number, (what, rows)) in CALLS.into_iter().enumerate() {
        let folder = folder.join(number.to_string());
        let before = copy(&migrated, &folder);
        let store = journal.open(&before).await;
        let trial = Trial::prepare(&store, what, rows).await;
        write_back(&before).await;
        store.close().await;
        every_write_of(trial, journal, &format!("{what} ({rows})"), &before, &folder).await;
    }
    let nothing = folder.join("nothing.db");
    every_write_of(Trial::of_migrating(), journal, "migrate", &nothing, &folder.join("migrate")).await;
}
