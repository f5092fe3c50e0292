//! What the database refuses, and what the caller is told: the kind, what became of the write, and that nothing is lost.

mod common;

use std::path::Path;
use std::time::Duration;
use std::time::Instant;

use backend_sqlite::SqliteBackend;
use backend_sqlite::SqliteOptions;
use common::*;
use queue_core::*;
use sqlx::Connection;
use sqlx::SqliteConnection;
use sqlx::sqlite::SqlitePoolOptions;

fn assert_error<T: std::fmt::Debug>(answer: Result<T>, kind: ErrorKind) {
    let error = answer.expect_err("refused");
    assert_eq!((error.kind(), error.certainty()), (kind, Certainty::NotApplied), "{error}");
}

/// A write of somebody else that is not finished.
async fn writing(path: &Path) -> SqliteConnection {
    let mut connection = SqliteConnection::connect_with(&application(path)).await.expect("connects");
    sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut connection).await.expect("begins");
    connection
}

#[tokio::test]
async fn a_folder_that_does_not_exist() {
    let (_folder, path) = folder();
    assert_error(SqliteBackend::open(path.join("no/where.db")).await, ErrorKind::Unavailable);
}

#[tokio::test]
async fn a_file_that_is_no_database() {
    let (_folder, path) = folder();
    let text = "no database, but long enough to be one ".repeat(50);
    std::fs::write(&path, &text).expect("writes");
    assert_error(SqliteBackend::open(&path).await, ErrorKind::Permanent);
    assert_eq!(std::fs::read_to_string(&path).expect("reads"), text, "left as it is");
}

#[tokio::test]
async fn a_database_that_was_not_migrated() {
    let (_folder, path) = folder();
    let backend = SqliteBackend::open(&path).await.expect("opens");
    assert_error(backend.enqueue(&[job("1")]).await, ErrorKind::Schema);
    assert_error(backend.claim(&request(1)).await, ErrorKind::Schema);
    assert_error(backend.get(JobId::new()).await, ErrorKind::Schema);
    assert_error(backend.stale(None, limit(1)).await, ErrorKind::Schema);
    backend.migrate().await.expect("migrates");
    backend.enqueue(&[job("1")]).await.expect("now it works, on the same connections");
    claim_one(&backend).await;
}

#[tokio::test]
async fn a_database_that_is_read_only() {
    let (_folder, path, backend) = migrated().await;
    backend.enqueue(&[job("1")]).await.expect("stores");
    let claimed = claim_one(&backend).await;
    let reading = SqlitePoolOptions::new().connect_with(application(&path).read_only(true)).await.expect("a pool");
    let reader = SqliteBackend::from_pool(reading).await.expect("reading is all that this needs");
    assert_error(reader.enqueue(&[job("1")]).await, ErrorKind::Unavailable);
    assert_error(reader.claim(&request(1)).await, ErrorKind::Unavailable);
    assert_error(reader.purge(JobState::Failed, Delay::ZERO, limit(1)).await, ErrorKind::Unavailable);
    let answer = Transitioner::new(&reader).apply(&claimed.execution, &complete("1")).await;
    assert!(matches!(answer, Err(TransitionError::Backend(error)) if error.kind() == ErrorKind::Unavailable));
    assert_eq!(reader.get(claimed.id()).await.expect("reads"), Some(claimed));
}

/// Also that the connection is good again afterwards: SQLite ends some transactions by itself when the disk is full.
#[tokio::test]
async fn a_disk_that_is_full() {
    let (_folder, path, backend) = migrated().await;
    backend.enqueue(&[job("1")]).await.expect("stores");
    let claimed = claim_one(&backend).await;
    let small = SqlitePoolOptions::new()
        .max_connections(1)
        .after_connect(|connection, _| {
            Box::pin(async move {
                // Less than there is: no page more.
                sqlx::raw_sql("PRAGMA max_page_count = 1; PRAGMA cache_spill = 1; PRAGMA cache_size = 1")
                    .execute(connection)
                    .await?;
                Ok(())
            })
        })
        .connect_with(application(&path))
        .await
        .expect("a pool");
    let full = SqliteBackend::from_pool(small.clone()).await.expect("a handle");
    let large = Json::encode(&"x".repeat(200_000)).expect("JSON");
    let jobs: Vec<_> = (0..30).map(|_| NewJob { payload: large.clone(), ..job("1") }).collect();
    for _ in 0..3 {
        assert_error(full.enqueue(&jobs).await, ErrorKind::Unavailable);
        let end = Transition::Complete { result: Some(large.clone()) };
        let mut decisions = [Decision::new(&claimed.execution, &end).expect("legal")];
        let answer = Transitioner::new(&full).submit_all(&mut decisions).await.remove(0);
        assert!(matches!(answer, Err(TransitionError::Backend(error)) if error.kind() == ErrorKind::Unavailable));
        assert_error(full.update_many_if_current(&[decisions[0].request().clone()]).await, ErrorKind::Unavailable);
    }
    assert_eq!(backend.get(jobs[0].id).await.expect("reads"), None);
    assert_eq!(backend.get(claimed.id()).await.expect("reads"), Some(claimed.clone()));

    sqlx::raw_sql("PRAGMA max_page_count = 1000000").execute(&small).await.expect("room again");
    full.enqueue(&jobs).await.expect("stores");
    Transitioner::new(&full).apply(&claimed.execution, &complete("1")).await.expect("settles");
    assert_eq!(backend.get(claimed.id()).await.expect("reads").expect("a job").state(), JobState::Completed);
}

#[tokio::test]
async fn a_database_that_somebody_else_is_writing() {
    let (_folder, path, backend) = migrated().await;
    backend.enqueue(&[job("1")]).await.expect("stores");
    let options = SqliteOptions::file(&path).busy_timeout(Duration::from_millis(20));
    let impatient = SqliteBackend::connect_with(options).await.expect("opens");
    let writer = writing(&path).await;
    assert_error(impatient.enqueue(&[job("1")]).await, ErrorKind::Transient);
    assert_error(impatient.claim(&request(1)).await, ErrorKind::Transient);
    assert_error(impatient.purge(JobState::Failed, Delay::ZERO, limit(1)).await, ErrorKind::Transient);
    impatient.migrate().await.expect("there is nothing to write");
    assert_eq!(impatient.counts().await.expect("readers do not wait").len(), 1);
    writer.close().await.expect("gives up");
    claim_one(&impatient).await;
}

/// B5: and the third is over before the lease is.
#[tokio::test]
async fn a_claim_and_a_beat_wait_for_a_third_of_the_lease() {
    let (_folder, path, backend) = migrated().await;
    backend.enqueue(&[job("1"), job("2")]).await.expect("stores");
    let held = Held::of(&claim_one(&backend).await.execution).expect("held");
    let writer = writing(&path).await;
    let short = Lease::from_millis(60).expect("a lease");
    let request = ClaimRequest::new(name("mail"), [name("welcome")], worker(), short, limit(1)).expect("a request");
    let start = Instant::now();
    assert_error(backend.claim(&request).await, ErrorKind::Transient);
    assert_error(backend.extend_leases(&[held], short).await, ErrorKind::Transient);
    assert!(start.elapsed() < Duration::from_secs(5), "the busy timeout is ten seconds");

    // What is no claim has all its patience back.
    let jobs = [job("1")];
    let mut enqueue = backend.enqueue(&jobs);
    assert!(tokio::time::timeout(Duration::from_millis(200), &mut enqueue).await.is_err(), "waits longer than a claim");
    // Nor does a claim wait any longer for another call of its own handle, which has the connection for writes.
    let start = Instant::now();
    assert_error(backend.claim(&request).await, ErrorKind::Transient);
    assert!(start.elapsed() < Duration::from_secs(5), "the enqueue waits for ten seconds");
    writer.close().await.expect("gives up");
    enqueue.await.expect("stores");
}

#[tokio::test]
async fn a_pool_that_has_no_connection_left() {
    let (_folder, path, _backend) = migrated().await;
    let options = SqlitePoolOptions::new().max_connections(1).acquire_timeout(Duration::from_millis(20));
    let pool = options.connect_with(application(&path)).await.expect("a pool");
    let backend = SqliteBackend::from_pool(pool.clone()).await.expect("a handle");
    let taken = pool.acquire().await.expect("a connection");
    assert_error(backend.claim(&request(1)).await, ErrorKind::Unavailable);
    drop(taken);
    pool.close().await;
    assert_error(backend.claim(&request(1)).await, ErrorKind::Unavailable);
}

/// The answer to a settle that makes a job active again whose key is taken.
#[tokio::test]
async fn a_key_that_is_taken() {
    let (_folder, _path, backend) = migrated().await;
    backend.enqueue(&[keyed("k")]).await.expect("stores");
    let ended = claim_one(&backend).await;
    let ended = Transitioner::new(&backend).apply(&ended.execution, &complete("1")).await.expect("settles");
    backend.enqueue(&[keyed("k")]).await.expect("stores");
    let mut decision = Decision::new(ended.execution(), &Transition::Rerun).expect("legal");
    let UpdateRequest { id, current, patch } = decision.request().clone();
    assert_error(backend.update_if_current(id, &current, &patch).await, ErrorKind::Invalid);
    assert_error(backend.update_many_if_current(&[decision.request().clone()]).await, ErrorKind::Invalid);
    let holder = claim_one(&backend).await;
    Transitioner::new(&backend).apply(&holder.execution, &complete("1")).await.expect("settles");
    Transitioner::new(&backend).submit(&mut decision).await.expect("the key is free");
}

/// Texts would come back changed.
#[tokio::test]
async fn a_database_that_is_not_in_utf_8() {
    let (_folder, path) = folder();
    run(&path, "PRAGMA encoding = 'UTF-16'; CREATE TABLE mine (id INTEGER)").await;
    assert_error(SqliteBackend::open(&path).await, ErrorKind::Unsupported);
}

/// A row that cannot be answered for is told apart, stays as it is, and keeps nothing from the others.
#[tokio::test]
async fn a_row_whose_lifecycle_is_out_of_range() {
    for column in ["fence = -1", "max_attempts = 0", "max_attempts = 4294967296"] {
        let (_folder, path, backend) = migrated().await;
        backend.enqueue(&[job("1"), job("2"), job("3")]).await.expect("stores");
        let claimed = backend.claim(&request(3)).await.expect("claims").jobs;
        let bad = claimed[1].id().as_uuid().simple().to_string();
        run(&path, &format!("UPDATE fenced_jobs SET {column} WHERE id = x'{bad}'")).await;
        let decide = |job: &Job| Decision::new(&job.execution, &complete("1")).expect("legal").request().clone();
        let updates: Vec<_> = claimed.iter().map(decide).collect();
        let answers = backend.update_many_if_current(&updates).await.expect("answers for each");
        assert!(matches!(answers[..], [Update::Applied(_), Update::Unreadable(_), Update::Applied(_)]), "{answers:?}");
        let mut filter = ListFilter::default();
        filter.state = Some(JobState::Running);
        let left = backend.list(&filter, None, limit(10)).await.expect("lists").unreadable;
        assert_eq!(left.iter().map(|row| row.id).collect::<Vec<_>>(), [claimed[1].id()], "{column}");
    }
}

/// A queue's name that cannot be read does not keep the others from being counted.
#[tokio::test]
async fn counts_beside_a_broken_row() {
    let (_folder, path, backend) = migrated().await;
    backend.enqueue(&[job("1"), job("2")]).await.expect("stores");
    run(&path, "UPDATE fenced_jobs SET queue = '' WHERE payload = '1'").await;
    let counts = backend.counts().await.expect("counts");
    assert_eq!(counts.iter().map(|count| count.jobs).collect::<Vec<_>>(), [1]);
}
