//! How SQLite goes about the statements: the very texts that are run, explained, and their steps counted.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;

use backend_sqlite::SqliteBackend;
use common::*;
use queue_core::*;
use sqlx::AssertSqlSafe;
use sqlx::Row;

/// The plan of a statement, one step a line.
async fn plan(path: &Path, backend: &SqliteBackend, statement: &str) -> String {
    let (_, text) = backend.statements().into_iter().find(|(name, _)| *name == statement).expect("a statement");
    let pool = pool(path, 1).await;
    let explain = AssertSqlSafe(format!("EXPLAIN QUERY PLAN {text}"));
    let steps = sqlx::query(explain).fetch_all(&pool).await.expect("a plan");
    let steps: Vec<String> = steps.iter().map(|step| step.get("detail")).collect();
    steps.join("\n")
}

/// The steps that the plan must have, and that it reads no table from end to end and sorts nothing.
async fn assert_plans(path: &Path, backend: &SqliteBackend) {
    for (statement, steps) in [
        ("claim", vec![("USING COVERING INDEX fenced_jobs_due (queue=? AND priority=? AND available_at<?)", 10)]),
        ("update", vec![("SEARCH j USING INDEX fenced_jobs_id (id=?)", 1)]),
        ("executions", vec![("SEARCH fenced_jobs USING INDEX fenced_jobs_id (id=?)", 1)]),
        ("extend", vec![("SEARCH j USING INDEX fenced_jobs_id (id=?)", 1)]),
        (
            "stale",
            vec![
                ("USING INDEX fenced_jobs_leased (lease_expires_at=? AND id>?)", 1),
                ("USING INDEX fenced_jobs_leased ((lease_expires_at,id)>(?,?) AND lease_expires_at<?)", 1),
            ],
        ),
        ("claimed_by", vec![("USING INDEX fenced_jobs_held (claimed_by=? AND id>?)", 1)]),
        ("purge", vec![("USING COVERING INDEX fenced_jobs_ended (state=? AND finished_at<?)", 1)]),
        ("list", vec![("USING INDEX fenced_jobs_id (id>?)", 1)]),
        ("get", vec![("USING INDEX fenced_jobs_id (id=?)", 1)]),
        ("stored_ids", vec![("USING INDEX fenced_jobs_id (id=?)", 1)]),
        ("repeated", vec![("SEARCH j USING INDEX fenced_jobs_id (id=?)", 1)]),
        ("steps", vec![("SEARCH fenced_steps USING INDEX fenced_steps_name (job_id=?)", 1)]),
        ("step", vec![("SEARCH fenced_steps USING INDEX fenced_steps_name (job_id=? AND name=?)", 1)]),
        ("put_step", vec![("SEARCH fenced_jobs USING INDEX fenced_jobs_id (id=?)", 1)]),
        ("event", vec![("SEARCH fenced_events USING INDEX fenced_events_key (key=?)", 1)]),
        ("kept_event", vec![("SEARCH fenced_events USING INDEX fenced_events_key (key=?)", 1)]),
        (
            "end_waits",
            vec![
                ("SEARCH fenced_steps USING INDEX fenced_steps_waiting (event=?)", 1),
                ("SEARCH j USING INDEX fenced_jobs_id (id=?)", 1),
            ],
        ),
        ("overdue", vec![("SEARCH fenced_jobs USING COVERING INDEX fenced_jobs_suspended (available_at<?)", 1)]),
        (
            "time_out",
            vec![
                ("SEARCH fenced_steps USING INDEX fenced_steps_name (job_id=?)", 1),
                ("SEARCH j USING INDEX fenced_jobs_id (id=?)", 1),
            ],
        ),
        ("wake", vec![("SEARCH fenced_jobs USING INDEX fenced_jobs_id (id=?)", 1)]),
        ("purge_events", vec![("SEARCH fenced_events USING INDEX fenced_events_old (kept_until<?)", 1)]),
        ("holders", vec![("SEARCH j USING INDEX fenced_jobs_unique (queue=? AND unique_key=?)", 1)]),
    ] {
        let plan = plan(path, backend, statement).await;
        for (step, times) in steps {
            assert_eq!(plan.matches(step).count(), times, "{statement}: {step}\n{plan}");
        }
        for table in ["fenced_jobs", "j\n", "fenced_steps", "fenced_events"] {
            assert!(!plan.contains(&format!("SCAN {table}")), "{statement}\n{plan}");
        }
        assert!(!plan.contains("TEMP B-TREE"), "{statement}\n{plan}");
    }
}

#[tokio::test]
async fn the_hot_paths_go_through_indexes() {
    let (_folder, path, backend) = migrated().await;
    assert_plans(&path, &backend).await;
}

/// Applications run ANALYZE, also when there is next to nothing to count.
#[tokio::test]
async fn statistics_do_not_change_that() {
    for rows in [0, 1, 2_000] {
        let (_folder, path, backend) = migrated().await;
        backend.enqueue(&(0..rows).map(|_| job("1")).collect::<Vec<_>>()).await.expect("stores");
        backend.claim(&request(rows / 2 + 1)).await.expect("claims");
        run(&path, "ANALYZE").await;
        drop(backend);
        let backend = SqliteBackend::open(&path).await.expect("opens");
        assert_plans(&path, &backend).await;
    }
}

/// How many steps SQLite's machine takes for a claim of ten jobs, which it rolls back. Counted, not timed: the same on
/// every machine.
async fn steps_of_a_claim(path: &Path, backend: &SqliteBackend) -> u64 {
    let (_, text) = backend.statements().into_iter().find(|(name, _)| *name == "claim").expect("a statement");
    let pool = pool(path, 1).await;
    let mut connection = pool.acquire().await.expect("a connection");
    let steps = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&steps);
    connection.lock_handle().await.expect("a handle").set_progress_handler(1, move || {
        counted.fetch_add(1, Ordering::Relaxed);
        true
    });
    sqlx::query("BEGIN IMMEDIATE").execute(&mut *connection).await.expect("begins");
    let before = steps.load(Ordering::Relaxed);
    let claimed = sqlx::query(AssertSqlSafe(text.to_owned()))
        .bind(0)
        .bind("mail")
        .bind("[\"welcome\"]")
        .bind(10)
        .bind(1)
        .bind(Revision::random().as_uuid())
        .bind(worker().as_str())
        .bind(60_000)
        .fetch_all(&mut *connection)
        .await
        .expect("claims");
    assert_eq!(claimed.len(), 10);
    let after = steps.load(Ordering::Relaxed);
    sqlx::query("ROLLBACK").execute(&mut *connection).await.expect("rolls back");
    after - before
}

fn fill(priority: u8, available: &str, state: &str, kind: &str) -> String {
    format!(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000) \
         INSERT INTO fenced_jobs (id, queue, kind, state, priority, attempt, max_attempts, fence, revision, \
           available_at, created_at, finished_at, payload) \
         SELECT randomblob(16), 'mail', '{kind}', '{state}', {priority}, 0, 20, 0, randomblob(16), {available}, 0, 0, \
           '1' FROM n"
    )
}

/// B7, and that a later level is not probed when the batch is full.
#[tokio::test]
async fn a_claim_costs_the_same_behind_what_it_does_not_want() {
    let mut alone = None;
    for (what, rows) in [
        ("nothing", String::new()),
        ("100 000 future jobs of a better priority", fill(0, "253402300799999 - i", "waiting", "welcome")),
        ("100 000 finished jobs", fill(0, "0", "completed", "welcome")),
        ("100 000 due jobs of the same priority", fill(5, "i", "waiting", "welcome")),
        ("100 000 due jobs of other kinds on a level that is not needed", fill(9, "i", "waiting", "foreign")),
    ] {
        let (_folder, path, backend) = migrated().await;
        run(&path, &rows).await;
        backend.enqueue(&(0..10).map(|_| job("1")).collect::<Vec<_>>()).await.expect("stores");
        let steps = steps_of_a_claim(&path, &backend).await;
        println!("claim of 10 behind {what}: {steps} steps");
        let alone = *alone.get_or_insert(steps);
        assert!(steps <= alone + alone / 4, "behind {what}: {steps} steps, alone {alone}");
    }
}

/// B7b: found behind jobs of kinds that nobody here knows, in steps that grow with their number and no faster; none of them is touched.
#[tokio::test]
async fn a_claim_finds_its_kind_behind_others() {
    let (_folder, path, backend) = migrated().await;
    run(&path, &fill(5, "i", "waiting", "foreign")).await;
    backend.enqueue(&(0..10).map(|_| job("1")).collect::<Vec<_>>()).await.expect("stores");
    let steps = steps_of_a_claim(&path, &backend).await;
    println!("claim of 10 behind 100 000 due jobs of other kinds: {steps} steps");
    assert!(steps < 40 * 100_000, "a few steps of the index for each: {steps}");
    assert_eq!(backend.claim(&request(10)).await.expect("claims").jobs.len(), 10);
    let mut filter = ListFilter::default();
    filter.kind = Some(name("foreign"));
    let untouched = backend.list(&filter, None, limit(1000)).await.expect("lists");
    assert!(untouched.items.iter().all(|job| job.execution.attempt == 0 && job.execution.fence == 0));
}

#[tokio::test]
async fn ten_thousand_jobs_in_one_call() {
    let (_folder, _path, backend) = migrated().await;
    let jobs: Vec<_> = (0..10_000).map(|number| job(&number.to_string())).collect();
    let outcomes = backend.enqueue(&jobs).await.expect("stores");
    assert!(outcomes.iter().zip(&jobs).all(|(outcome, job)| *outcome == Enqueued::New(job.id)));
    let again = backend.enqueue(&jobs).await.expect("stores");
    assert!(again.iter().zip(&jobs).all(|(outcome, job)| *outcome == Enqueued::Existing(job.id)));
    let claimed = backend.claim(&request(10_000)).await.expect("claims");
    let mut decisions: Vec<_> =
        claimed.jobs.iter().map(|job| Decision::new(&job.execution, &complete("1")).expect("legal")).collect();
    let settled = Transitioner::new(&backend).submit_all(&mut decisions).await;
    assert_eq!(settled.iter().filter(|settled| settled.is_ok()).count(), 10_000);
}
