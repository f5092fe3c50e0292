//! In the application's own transaction. (D2, D7, D8)

mod common;

use backend_sqlite::SqliteBackend;
use common::*;
use queue_core::*;
use sqlx::SqlitePool;
use sqlx::Transaction;

/// A backend, and the application's own way to the same file, with a table of its own.
async fn setup() -> (tempfile::TempDir, SqliteBackend, SqlitePool) {
    let (folder, path, backend) = migrated().await;
    run(&path, "CREATE TABLE orders (number INTEGER)").await;
    (folder, backend, pool(&path, 2).await)
}

async fn immediate(pool: &SqlitePool) -> Transaction<'static, sqlx::Sqlite> {
    pool.begin_with("BEGIN IMMEDIATE").await.expect("begins")
}

async fn order(transaction: &mut Transaction<'static, sqlx::Sqlite>) {
    sqlx::query("INSERT INTO orders VALUES (1)").execute(&mut **transaction).await.expect("stores");
}

async fn orders(pool: &SqlitePool) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM orders").fetch_one(pool).await.expect("counts")
}

#[tokio::test]
async fn a_job_is_stored_with_what_it_is_about_or_not_at_all() {
    let (_folder, backend, pool) = setup().await;
    for commit in [false, true] {
        let job = job("1");
        let mut transaction = immediate(&pool).await;
        order(&mut transaction).await;
        let outcomes = backend.enqueue_in(&mut transaction, std::slice::from_ref(&job)).await.expect("stores");
        assert_eq!(outcomes, [Enqueued::New(job.id)]);
        assert_eq!(backend.get(job.id).await.expect("reads"), None, "not before the commit");
        match commit {
            true => transaction.commit().await.expect("commits"),
            false => transaction.rollback().await.expect("rolls back"),
        }
        assert_eq!(backend.get(job.id).await.expect("reads").is_some(), commit);
        assert_eq!(orders(&pool).await, i64::from(commit));
    }
}

#[tokio::test]
async fn a_duplicate_leaves_the_transaction_usable() {
    let (_folder, backend, pool) = setup().await;
    let first = keyed("k");
    backend.enqueue(std::slice::from_ref(&first)).await.expect("stores");
    let mut transaction = immediate(&pool).await;
    let outcomes = backend.enqueue_in(&mut transaction, &[keyed("k"), first.clone()]).await.expect("outcomes");
    assert_eq!(outcomes, [Enqueued::Duplicate { existing: first.id }, Enqueued::Existing(first.id)]);
    order(&mut transaction).await;
    transaction.commit().await.expect("commits");
    assert_eq!(orders(&pool).await, 1);
}

#[tokio::test]
async fn a_job_is_settled_with_what_it_wrote_or_not_at_all() {
    let (_folder, backend, pool) = setup().await;
    backend.enqueue(&[job("1")]).await.expect("stores");
    let claimed = claim_one(&backend).await;
    let decision = Decision::new(&claimed.execution, &complete("1")).expect("legal");
    let UpdateRequest { id, current, patch } = decision.request();
    for commit in [false, true] {
        let mut transaction = immediate(&pool).await;
        order(&mut transaction).await;
        let answer = backend.update_if_current_in(&mut transaction, *id, current, patch).await.expect("updates");
        assert!(matches!(answer, Update::Applied(_)));
        match commit {
            true => transaction.commit().await.expect("commits"),
            false => drop(transaction),
        }
        let state = backend.get(claimed.id()).await.expect("reads").expect("a job").state();
        assert_eq!(state, if commit { JobState::Completed } else { JobState::Running });
    }
    let mut transaction = immediate(&pool).await;
    let answer = backend.update_if_current_in(&mut transaction, *id, current, patch).await.expect("answers");
    assert!(matches!(answer, Update::Conflict(_)), "the claim is over");
    let answer = backend.update_if_current_in(&mut transaction, JobId::new(), current, patch).await.expect("answers");
    assert_eq!(answer, Update::Missing);
    transaction.rollback().await.expect("rolls back");
    assert_eq!(orders(&pool).await, 1);
}

/// The application's `begin()` begins as a reader. It becomes a writer by what we do first, unless it has read before and
/// somebody has written since: then the whole transaction is to be repeated.
#[tokio::test]
async fn a_transaction_that_began_as_a_reader() {
    let (_folder, backend, pool) = setup().await;
    let mut transaction = pool.begin().await.expect("begins");
    backend.enqueue(&[job("1")]).await.expect("stores");
    backend.enqueue_in(&mut transaction, &[job("2")]).await.expect("has not read before");
    transaction.commit().await.expect("commits");
    assert_eq!(backend.counts().await.expect("counts")[0].jobs, 2);

    let claimed = claim_one(&backend).await;
    let decision = Decision::new(&claimed.execution, &complete("1")).expect("legal");
    let UpdateRequest { id, current, patch } = decision.request();
    for settles in [false, true] {
        let mut transaction = pool.begin().await.expect("begins");
        sqlx::query("SELECT * FROM orders").fetch_all(&mut *transaction).await.expect("reads");
        backend.enqueue(&[job("1")]).await.expect("stores");
        let error = match settles {
            false => backend.enqueue_in(&mut transaction, &[job("2")]).await.expect_err("too late"),
            true => {
                let answer = backend.update_if_current_in(&mut transaction, *id, current, patch).await;
                answer.expect_err("too late")
            }
        };
        assert_eq!((error.kind(), error.certainty()), (ErrorKind::Transient, Certainty::NotApplied));
        transaction.rollback().await.expect("rolls back");
    }
}

/// Level-triggered, and from this process's handles alone.
#[tokio::test]
async fn workers_are_woken_by_what_makes_work() {
    let (_folder, backend, pool) = setup().await;
    let queues = [name("mail")];
    let nothing = async |backend: &SqliteBackend, transition: Option<(&Execution, Transition)>| {
        let mut wait = backend.wait_for_work(&queues);
        assert!(futures_poll(&mut wait).await.is_none());
        match transition {
            Some((seen, transition)) => {
                Transitioner::new(backend).apply(seen, &transition).await.expect("settles");
            }
            None => drop(backend.enqueue(&[job("1")]).await.expect("stores")),
        }
        futures_poll(&mut wait).await.is_some()
    };
    assert!(nothing(&backend, None).await, "a job is new");
    let claimed = claim_one(&backend).await;
    assert!(nothing(&backend, Some((&claimed.execution, Transition::Release))).await, "a job is given back");
    let claimed = claim_one(&backend).await;
    assert!(!nothing(&backend, Some((&claimed.execution, complete("1")))).await, "a job is done");

    let mut wait = backend.wait_for_work(&queues);
    assert!(futures_poll(&mut wait).await.is_none());
    let mut transaction = immediate(&pool).await;
    backend.enqueue_in(&mut transaction, &[job("1")]).await.expect("stores");
    transaction.commit().await.expect("commits");
    assert!(futures_poll(&mut wait).await.is_none(), "nobody here saw the commit");
}

/// One poll.
async fn futures_poll<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    std::future::poll_fn(|context| match std::pin::Pin::new(&mut *future).poll(context) {
        std::task::Poll::Ready(output) => std::task::Poll::Ready(Some(output)),
        std::task::Poll::Pending => std::task::Poll::Ready(None),
    })
    .await
}
