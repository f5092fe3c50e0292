//! The schema: how it comes about, and who may work on it. (F1, F2, F4)

mod common;

use std::path::Path;

use backend_sqlite::SqliteBackend;
use backend_sqlite::SqliteOptions;
use backend_sqlite::migrations;
use common::*;
use queue_core::*;
use sqlx::AssertSqlSafe;
use sqlx::Connection;
use sqlx::Row;
use sqlx::SqliteConnection;
use tokio::task::JoinSet;

/// What is in the file: the texts of the schema, and the schema's row.
async fn schema(path: &Path) -> Vec<String> {
    let mut connection = SqliteConnection::connect_with(&application(path)).await.expect("connects");
    let texts = "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY name";
    let mut schema: Vec<String> =
        sqlx::query(texts).fetch_all(&mut connection).await.expect("reads").iter().map(|row| row.get(0)).collect();
    if let Ok(rows) = sqlx::query("SELECT * FROM fenced_schema").fetch_all(&mut connection).await {
        let row = |row: &sqlx::sqlite::SqliteRow| {
            let (version, oldest, release) = (row.get::<i64, _>(1), row.get::<i64, _>(2), row.get::<String, _>(3));
            format!("{version} {oldest} {release}")
        };
        schema.extend(rows.iter().map(row));
    }
    schema
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn ten_migrate_a_new_file_at_once() {
    let (_folder, path) = folder();
    let mut migrators = JoinSet::new();
    for _ in 0..10 {
        let path = path.clone();
        migrators.spawn(async move { SqliteBackend::open(&path).await?.migrate().await });
    }
    for answer in migrators.join_all().await {
        answer.expect("each is told that the schema is there");
    }
    let once = schema(&path).await;
    assert_eq!(once.last().map(String::as_str), Some("2 1 0.1.0"));
    let backend = SqliteBackend::open(&path).await.expect("opens");
    backend.enqueue(&[job("1")]).await.expect("stores");
    backend.migrate().await.expect("again");
    assert_eq!(schema(&path).await, once);
    claim_one(&backend).await;
}

#[tokio::test]
async fn one_that_ends_in_the_middle_leaves_nothing() {
    let (_folder, path) = folder();
    let backend = SqliteBackend::open(&path).await.expect("opens");
    let sql = &migrations(&Identifier::default())[0].sql;
    let mut connection = SqliteConnection::connect_with(&application(&path)).await.expect("connects");
    let half = &sql[..sql.find("CREATE TABLE fenced_schema").expect("a table")];
    sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut connection).await.expect("begins");
    sqlx::raw_sql(AssertSqlSafe(half)).execute(&mut connection).await.expect("runs");
    let mut migrate = backend.migrate();
    assert!(tokio::time::timeout(std::time::Duration::from_millis(50), &mut migrate).await.is_err(), "waits");
    connection.close_hard().await.expect("is gone");
    migrate.await.expect("is not blocked");
    claim_nothing(&backend).await;
}

async fn claim_nothing(backend: &SqliteBackend) {
    assert_eq!(backend.claim(&request(1)).await.expect("claims"), Claimed::default());
}

#[tokio::test]
async fn the_text_is_what_is_run() {
    let (_folder, by_hand) = folder();
    let prefix: Identifier = "fenced_".parse().expect("a prefix");
    for migration in migrations(&prefix) {
        assert!(!migration.sql.contains(['{', '}']), "the prefix is filled in");
        run(&by_hand, &migration.sql).await;
    }
    let (_other, path, _backend) = migrated().await;
    assert_eq!(schema(&by_hand).await, schema(&path).await);
    let backend = SqliteBackend::open(&by_hand).await.expect("opens");
    backend.migrate().await.expect("has nothing to do");
    claim_nothing(&backend).await;
}

#[tokio::test]
async fn a_program_below_the_floor_is_refused_and_writes_nothing() {
    let (_folder, path, backend) = migrated().await;
    run(&path, "UPDATE fenced_schema SET version = 9, oldest_version = 7, oldest_release = '3.1.4'").await;
    let before = schema(&path).await;
    let open = SqliteBackend::open(&path).await.map(drop);
    let lent = SqliteBackend::from_pool(pool(&path, 1).await).await.map(drop);
    for refused in [backend.migrate().await, open, lent] {
        let error = refused.expect_err("refused");
        assert_eq!((error.kind(), error.certainty()), (ErrorKind::Schema, Certainty::NotApplied));
        for version in [env!("CARGO_PKG_VERSION"), "version 2;", "version 9 ", "version 7,", "3.1.4"] {
            assert!(error.to_string().contains(version), "{version:?} in {error}");
        }
    }
    assert_eq!(schema(&path).await, before);
}

/// The rolling deploy: the schema is newer, and admits this program.
#[tokio::test]
async fn a_program_that_a_newer_schema_admits_goes_on() {
    let (_folder, path, backend) = migrated().await;
    run(&path, "UPDATE fenced_schema SET version = 9; ALTER TABLE fenced_jobs ADD COLUMN later TEXT").await;
    let before = schema(&path).await;
    backend.enqueue(&[job("1")]).await.expect("stores");
    let another = SqliteBackend::open(&path).await.expect("opens");
    another.migrate().await.expect("leaves it as it is");
    assert_eq!(schema(&path).await, before);
    let claimed = claim_one(&another).await;
    Transitioner::new(&backend).apply(&claimed.execution, &complete("1")).await.expect("settles");
}

/// What is in the way of the first migration is a table of the same name; later ones may meet rows that break an index.
#[tokio::test]
async fn a_migration_that_meets_what_is_in_its_way_changes_nothing() {
    let (_folder, path) = folder();
    run(&path, "CREATE TABLE fenced_jobs (id INTEGER, mine TEXT); INSERT INTO fenced_jobs VALUES (1, 'kept')").await;
    let before = schema(&path).await;
    let backend = SqliteBackend::open(&path).await.expect("opens");
    let error = backend.migrate().await.expect_err("the name is taken");
    assert_eq!((error.kind(), error.certainty()), (ErrorKind::Schema, Certainty::NotApplied), "{error}");
    assert!(error.to_string().contains("fenced_jobs"), "it names what is in the way: {error}");
    assert_eq!(schema(&path).await, before, "nothing was made beside it");
    let mut connection = SqliteConnection::connect_with(&application(&path)).await.expect("connects");
    let kept = sqlx::query("SELECT mine FROM fenced_jobs").fetch_all(&mut connection).await.expect("reads");
    assert_eq!(kept[0].get::<String, _>(0), "kept");
}

/// Each later migration runs on these rows as well, so the file stays as it is for ever.
#[tokio::test]
async fn jobs_of_the_first_schema_go_on() {
    let (_folder, path) = folder();
    run(&path, include_str!("fixtures/schema_v1.sql")).await;
    let clock = ClockOffset::default();
    let backend = SqliteBackend::connect_with(SqliteOptions::file(&path).clock(clock)).await.expect("opens");
    backend.migrate().await.expect("migrates");
    let mut connection = SqliteConnection::connect_with(&application(&path)).await.expect("connects");
    let check = sqlx::query("PRAGMA integrity_check").fetch_all(&mut connection).await.expect("checks");
    assert_eq!(check[0].get::<String, _>(0), "ok", "rows and indexes agree");
    let page = backend.list(&ListFilter::default(), None, limit(100)).await.expect("lists");
    assert!(page.unreadable.is_empty(), "{page:?}");
    for &state in JobState::ALL {
        assert!(page.items.iter().any(|job| job.state() == state), "one is {state}");
    }

    let worker: WorkerId = "web-1/00000000000000aa".parse().expect("a worker");
    let running = page.items.iter().find(|job| job.state() == JobState::Running).expect("one");
    assert_eq!(running.execution.claimed_by.as_ref(), Some(&worker));
    let held = Held::of(&running.execution).expect("held");
    assert_eq!(backend.extend_leases(&[held], lease()).await.expect("beats"), [Beat::Extended]);
    let settled = Transitioner::new(&backend).apply(&running.execution, &complete("\"done\"")).await.expect("settles");
    assert_eq!(settled.execution().state, JobState::Completed);
    let claimed = page.items.iter().find(|job| job.state() == JobState::Claimed).expect("one");
    let start = Transition::Start { lease: lease() };
    Transitioner::new(&backend).apply(&claimed.execution, &start).await.expect("starts");
    assert_eq!(backend.claim(&request(10)).await.expect("claims").jobs.len(), 1, "the waiting one is due");
    let failed = page.items.iter().find(|job| job.state() == JobState::Failed).expect("one");
    assert_eq!(failed.errors.len(), 1);
    let rerun = Transitioner::new(&backend).apply(&failed.execution, &Transition::Rerun).await.expect("runs again");
    assert_eq!(rerun.execution().attempt, 0);
}

/// What jobs have done and wait for came with the second schema: jobs of the first have done nothing, and go on.
#[tokio::test]
async fn jobs_of_the_first_schema_have_steps_from_then_on() {
    let (_folder, path) = folder();
    run(&path, include_str!("fixtures/schema_v1.sql")).await;
    // A program of the first schema, which is not asked to migrate and works on beside it.
    let older = SqliteBackend::open(&path).await.expect("opens");
    let backend = SqliteBackend::open(&path).await.expect("opens");
    backend.migrate().await.expect("migrates");
    let page = backend.list(&ListFilter::default(), None, limit(100)).await.expect("lists");
    let of = |state| page.items.iter().find(|job| job.state() == state).expect("one").clone();

    let running = of(JobState::Running);
    let (step, wait, event) = (name("s"), name("w"), name("e"));
    finish_step(&backend, &running.execution, &step, &Json::null()).await.expect("saved");
    let mut suspension = Suspension::new(&running.execution, wait, Some(event.clone()), When::At(Timestamp::MAX));
    suspension.as_mut().expect("legal").submit(&backend).await.expect("waits");

    // Suspended when there were no waits: it goes on when it is due.
    let suspended = of(JobState::Suspended);
    let is_due = suspended.available_at <= running.execution.claimed_at.expect("claimed");
    let woken = backend.time_out_waits(limit(10)).await.expect("ends waits");
    assert_eq!(woken, if is_due { vec![suspended.id()] } else { vec![] });

    let payload = Json::null();
    let emitted = backend.emit(&NewEvent { key: event, payload, keep: Delay::ZERO }).await.expect("emits");
    assert_eq!(emitted, Emitted::New { woken: 1 });
    assert_eq!(backend.steps(running.id()).await.expect("reads").len(), 2);
    let canceled = Transition::Cancel { reason: "enough".into() };
    let row = older.get(running.id()).await.expect("reads").expect("there");
    Transitioner::new(&older).apply(&row.execution, &canceled).await.expect("canceled");
    // The statement of the first schema, which knows of no steps.
    run(&path, "DELETE FROM fenced_jobs WHERE state = 'canceled'").await;
    assert_eq!(backend.steps(running.id()).await.expect("reads"), [], "they went with the job");
}
