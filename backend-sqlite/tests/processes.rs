//! Several processes on one file. A child is this binary again, with a role.

mod common;

use std::collections::HashMap;
use std::env;
use std::io::BufRead;
use std::io::BufReader;
use std::path::Path;
use std::process::Child;
use std::process::Command;
use std::process::ExitCode;
use std::process::Stdio;

use backend_sqlite::SqliteBackend;
use common::*;
use libtest_mimic::Arguments;
use libtest_mimic::Trial;
use queue_core::*;
use sqlx::Connection;
use sqlx::SqliteConnection;
use tokio::task::JoinSet;

const ROLE: &str = "FENCED_TEST_ROLE";
const FILE: &str = "FENCED_TEST_FILE";

fn main() -> ExitCode {
    match env::var(ROLE).as_deref() {
        Ok("works") => in_runtime(works_until_nothing_is_left()),
        Ok(_) => in_runtime(dies_while_it_migrates()),
        Err(_) => return run_tests(),
    }
    ExitCode::SUCCESS
}

fn run_tests() -> ExitCode {
    fn test(name: &str, test: impl Future<Output = ()> + Send + 'static) -> Trial {
        Trial::test(name, move || {
            in_runtime(test);
            Ok(())
        })
    }
    let tests = vec![
        test("each_job_goes_to_one_process", each_job_goes_to_one_process()),
        test("a_process_that_is_killed_while_it_migrates_blocks_nobody", a_process_that_is_killed_while_it_migrates()),
        test("many_handles_open_a_new_file_and_work_at_once", many_handles_open_a_new_file_and_work_at_once()),
        test("of_many_handles_one_settles", of_many_handles_one_settles()),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit_code()
}

fn in_runtime(work: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build();
    runtime.expect("a runtime").block_on(work);
}

fn child(role: &str, path: &Path) -> Child {
    Command::new(env::current_exe().expect("this binary"))
        .env(ROLE, role)
        .env(FILE, path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .expect("a child")
}

/// The lines that a child prints and begins with this word.
fn lines(child: &mut Child, word: &'static str) -> impl Iterator<Item = String> {
    let output = BufReader::new(child.stdout.take().expect("piped"));
    output.lines().map(|line| line.expect("text")).filter_map(move |line| line.strip_prefix(word).map(str::to_owned))
}

fn file() -> String {
    env::var(FILE).expect("run by another test")
}

async fn works_until_nothing_is_left() {
    let backend = SqliteBackend::open(file()).await.expect("opens");
    backend.migrate().await.expect("migrates");
    loop {
        let claimed = backend.claim(&request(3)).await.expect("contention is no error");
        if claimed.jobs.is_empty() {
            break;
        }
        for job in &claimed.jobs {
            println!("claimed {}", job.id());
        }
        let held: Vec<_> = claimed.jobs.iter().filter_map(|job| Held::of(&job.execution)).collect();
        assert!(backend.extend_leases(&held, lease()).await.expect("beats").iter().all(|beat| *beat == Beat::Extended));
        let mut decisions: Vec<_> =
            claimed.jobs.iter().map(|job| Decision::new(&job.execution, &complete("1")).expect("legal")).collect();
        for settled in Transitioner::new(&backend).submit_all(&mut decisions).await {
            settled.expect("contention is no error");
        }
    }
}

async fn dies_while_it_migrates() {
    let mut connection = SqliteConnection::connect_with(&application(Path::new(&file()))).await.expect("connects");
    sqlx::raw_sql("BEGIN IMMEDIATE; CREATE TABLE fenced_jobs (half TEXT)")
        .execute(&mut connection)
        .await
        .expect("runs");
    println!("ready ");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("never comes");
}

/// B1, between processes: each job once, and none left.
async fn each_job_goes_to_one_process() {
    let (_folder, path, backend) = migrated().await;
    let jobs: Vec<_> = (0..300).map(|_| job("1")).collect();
    backend.enqueue(&jobs).await.expect("stores");
    let children: Vec<_> = (0..3).map(|_| child("works", &path)).collect();
    let mut claims: HashMap<String, usize> = HashMap::new();
    for mut child in children {
        lines(&mut child, "claimed ").for_each(|id| *claims.entry(id).or_default() += 1);
        assert!(child.wait().expect("ends").success());
    }
    assert_eq!(claims.len(), 300);
    assert!(claims.values().all(|times| *times == 1));
    let counts = backend.counts().await.expect("counts");
    assert_eq!(counts, [Count { queue: name("mail"), state: Some(JobState::Completed), jobs: 300 }]);
}

/// F1: and what it had written is gone with it.
async fn a_process_that_is_killed_while_it_migrates() {
    let (_folder, path) = folder();
    let mut child = child("dies", &path);
    lines(&mut child, "ready ").next().expect("in the middle");
    child.kill().expect("killed");
    child.wait().expect("gone");
    let backend = SqliteBackend::open(&path).await.expect("opens");
    backend.migrate().await.expect("migrates");
    backend.enqueue(&[job("1")]).await.expect("stores");
}

/// Also the switch to a write-ahead log, which is made once and by one of them.
async fn many_handles_open_a_new_file_and_work_at_once() {
    for _ in 0..5 {
        let (_folder, path) = folder();
        let mut handles = JoinSet::new();
        for _ in 0..8 {
            let path = path.clone();
            handles.spawn(async move {
                let backend = SqliteBackend::open(&path).await?;
                backend.migrate().await?;
                backend.enqueue(&[job("1")]).await?;
                let claimed = backend.claim(&request(1)).await?;
                assert_eq!(claimed.jobs.len(), 1, "there is one for each");
                Ok::<_, Error>(claimed.jobs[0].id())
            });
        }
        let mut ids: Vec<_> = handles.join_all().await.into_iter().collect::<Result<_>>().expect("no error");
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), 8);
    }
}

/// A9: with one fingerprint, exactly one applies and the others see it.
async fn of_many_handles_one_settles() {
    let (_folder, path, backend) = migrated().await;
    let mut handles = Vec::new();
    for _ in 0..6 {
        handles.push(SqliteBackend::open(&path).await.expect("opens"));
    }
    for _ in 0..20 {
        backend.enqueue(&[job("1")]).await.expect("stores");
        let claimed = claim_one(&backend).await;
        let mut settles = JoinSet::new();
        for handle in &handles {
            let handle = handle.clone();
            let decision = Decision::new(&claimed.execution, &complete("1")).expect("legal").request().clone();
            settles
                .spawn(async move { handle.update_if_current(decision.id, &decision.current, &decision.patch).await });
        }
        let answers: Vec<_> = settles.join_all().await.into_iter().collect::<Result<_>>().expect("no error");
        let applied = answers.iter().filter(|answer| matches!(answer, Update::Applied(_))).count();
        let conflicts = answers.iter().filter(|answer| matches!(answer, Update::Conflict(_))).count();
        assert_eq!((applied, conflicts), (1, 5));
    }
}
