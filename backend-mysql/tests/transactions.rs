//! In the application's own transaction, and waking its workers. (D2, D7, D8)

mod common;

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

use backend_mysql::MysqlBackend;
use common::*;
use queue_core::*;
use sqlx::MySql;
use sqlx::MySqlPool;
use sqlx::Row;
use sqlx::Transaction;

const LEVELS: [&str; 3] = [
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
    "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE",
];

/// The application's own way to the same database, with a table of its own, at every isolation level.
async fn on_each_level(test: impl AsyncFn(&Database, &MysqlBackend, &MySqlPool)) {
    on_each_server(async |database, backend| {
        for level in LEVELS {
            println!("{level}");
            database
                .run(
                    "CREATE TABLE orders (number BIGINT AUTO_INCREMENT PRIMARY KEY, what INT NOT NULL) ENGINE = InnoDB",
                )
                .await;
            let pool = database.pool_of(2, level).await;
            test(database, backend, &pool).await;
            pool.close().await;
            database.run("DROP TABLE orders; DELETE FROM fenced_jobs").await;
        }
    })
    .await;
}

async fn order(transaction: &mut Transaction<'static, MySql>) -> u64 {
    let done = sqlx::query("INSERT INTO orders (what) VALUES (1)").execute(&mut **transaction).await;
    done.expect("stores").last_insert_id()
}

async fn orders(database: &Database) -> i64 {
    database.rows("SELECT CAST(COUNT(*) AS SIGNED) FROM orders").await[0].get(0)
}

#[tokio::test]
async fn a_job_is_stored_with_what_it_is_about_or_not_at_all() {
    on_each_level(async |database, backend, pool| {
        for commit in [false, true] {
            let job = job("1");
            let mut transaction = pool.begin().await.expect("begins");
            order(&mut transaction).await;
            let outcomes = backend.enqueue_in(&mut transaction, std::slice::from_ref(&job)).await.expect("stores");
            assert_eq!(outcomes, [Enqueued::New(job.id)]);
            assert_eq!(backend.get(job.id).await.expect("reads"), None, "not before the commit");
            match commit {
                true => transaction.commit().await.expect("commits"),
                false => transaction.rollback().await.expect("rolls back"),
            }
            assert_eq!(backend.get(job.id).await.expect("reads").is_some(), commit);
            assert_eq!(orders(database).await, i64::from(commit));
        }
    })
    .await;
}

/// Also where the transaction's snapshot does not show the job that has the key, or the one that has the id.
#[tokio::test]
async fn a_duplicate_leaves_the_transaction_usable() {
    on_each_level(async |database, backend, pool| {
        let mut transaction = pool.begin().await.expect("begins");
        sqlx::query("SELECT * FROM fenced_schema").fetch_all(&mut *transaction).await.expect("has a snapshot");
        let first = keyed("k");
        backend.enqueue(std::slice::from_ref(&first)).await.expect("stores");
        let new = job("1");
        let outcomes =
            backend.enqueue_in(&mut transaction, &[keyed("k"), first.clone(), new.clone()]).await.expect("outcomes");
        let expected =
            [Enqueued::Duplicate { existing: first.id }, Enqueued::Existing(first.id), Enqueued::New(new.id)];
        assert_eq!(outcomes, expected);
        order(&mut transaction).await;
        transaction.commit().await.expect("commits");
        assert_eq!(orders(database).await, 1);
        assert!(backend.get(new.id).await.expect("reads").is_some());
    })
    .await;
}

#[tokio::test]
async fn a_job_is_settled_with_what_it_wrote_or_not_at_all() {
    on_each_level(async |database, backend, pool| {
        backend.enqueue(&[job("1")]).await.expect("stores");
        let claimed = claim_one(backend).await;
        let UpdateRequest { id, current, patch } = decide(&claimed.execution, &complete("1"));
        for commit in [false, true] {
            let mut transaction = pool.begin().await.expect("begins");
            order(&mut transaction).await;
            let answer = backend.update_if_current_in(&mut transaction, id, &current, &patch).await.expect("updates");
            assert!(matches!(answer, Update::Applied(_)));
            match commit {
                true => transaction.commit().await.expect("commits"),
                false => drop(transaction),
            }
            let state = backend.get(claimed.id()).await.expect("reads").expect("a job").state();
            assert_eq!(state, if commit { JobState::Completed } else { JobState::Running });
        }
        let mut transaction = pool.begin().await.expect("begins");
        let answer = backend.update_if_current_in(&mut transaction, id, &current, &patch).await.expect("answers");
        assert!(matches!(answer, Update::Conflict(_)), "the claim is over");
        let missing = JobId::new();
        let answer = backend.update_if_current_in(&mut transaction, missing, &current, &patch).await.expect("answers");
        assert_eq!(answer, Update::Missing);
        transaction.rollback().await.expect("rolls back");
        assert_eq!(orders(database).await, 1);
    })
    .await;
}

/// A conflict shows the row as it is, and not as the transaction's snapshot has it.
#[tokio::test]
async fn a_conflict_is_judged_by_what_is_there() {
    on_each_level(async |_, backend, pool| {
        backend.enqueue(&[job("1")]).await.expect("stores");
        let claimed = claim_one(backend).await;
        let mut transaction = pool.begin().await.expect("begins");
        sqlx::query("SELECT * FROM fenced_schema").fetch_all(&mut *transaction).await.expect("has a snapshot");
        let released =
            Transitioner::new(backend).apply(&claimed.execution, &Transition::Release).await.expect("releases");
        let UpdateRequest { id, current, patch } = decide(&claimed.execution, &complete("1"));
        let answer = backend.update_if_current_in(&mut transaction, id, &current, &patch).await.expect("answers");
        assert_eq!(answer, Update::Conflict(released.execution().clone()));
        transaction.rollback().await.expect("rolls back");
    })
    .await;
}

/// MariaDB refuses what a snapshot does not show instead, if told to, as it is by default from 11.6.2 on.
#[tokio::test]
async fn a_snapshot_that_is_out_of_date_is_to_be_repeated() {
    on_each_server(async |database, backend| {
        if database.server != Server::Mariadb {
            return;
        }
        let session = "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ; SET innodb_snapshot_isolation = ON";
        let pool = database.pool_of(1, session).await;
        backend.enqueue(&[job("1")]).await.expect("stores");
        let claimed = claim_one(backend).await;
        let mut transaction = pool.begin().await.expect("begins");
        sqlx::query("SELECT * FROM fenced_jobs").fetch_all(&mut *transaction).await.expect("has a snapshot");
        Transitioner::new(backend).apply(&claimed.execution, &Transition::Release).await.expect("releases");
        let UpdateRequest { id, current, patch } = decide(&claimed.execution, &complete("1"));
        let answer = backend.update_if_current_in(&mut transaction, id, &current, &patch).await;
        assert_error(answer, ErrorKind::Transient);
        transaction.rollback().await.expect("rolls back");
        // In a transaction of our own, at READ COMMITTED, there is nothing to repeat.
        let lent = MysqlBackend::from_pool(pool.clone()).await.expect("a handle");
        let job = claim_one(&lent).await;
        Transitioner::new(&lent).apply(&job.execution, &complete("1")).await.expect("settles");
        lent.close().await;
    })
    .await;
}

/// What the application inserted last is still what its session says.
#[tokio::test]
async fn the_last_inserted_id_stays_the_application_s() {
    on_each_level(async |_, backend, pool| {
        backend.enqueue(&[job("1")]).await.expect("stores");
        let claimed = claim_one(backend).await;
        let UpdateRequest { id, current, patch } = decide(&claimed.execution, &complete("1"));
        let mut transaction = pool.begin().await.expect("begins");
        let number = order(&mut transaction).await;
        backend.update_if_current_in(&mut transaction, id, &current, &patch).await.expect("updates");
        backend.enqueue_in(&mut transaction, &[job("2")]).await.expect("stores");
        let last = sqlx::query_scalar("SELECT LAST_INSERT_ID()").fetch_one(&mut *transaction).await;
        assert_eq!(last.map(|last: u64| last).expect("reads"), number);
        transaction.rollback().await.expect("rolls back");
    })
    .await;
}

/// A deadlock with the application's transaction: it is told that the whole is to be repeated, and nothing of it is there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadlock_is_the_caller_s_to_repeat() {
    on_each_server(async |database, backend| {
        backend.enqueue(&[job("1"), job("2")]).await.expect("stores");
        let mut claimed = backend.claim(&request(2)).await.expect("claims").jobs;
        claimed.sort_by_key(Job::id);
        let updates: Vec<_> = claimed.iter().map(|job| decide(&job.execution, &complete("1"))).collect();
        let settle = async |transaction: &mut Transaction<'static, MySql>, update: &UpdateRequest| {
            backend.update_if_current_in(transaction, update.id, &update.current, &update.patch).await
        };
        // Two applications, each with one of the rows, that want the other one.
        let (mut one, mut two) =
            (database.pool.begin().await.expect("begins"), database.pool.begin().await.expect("begins"));
        settle(&mut one, &updates[0]).await.expect("updates");
        settle(&mut two, &updates[1]).await.expect("updates");
        let (first, second) = tokio::join!(settle(&mut one, &updates[1]), settle(&mut two, &updates[0]));
        let (victim, survivor, transaction) = match (first, second) {
            (Err(error), Ok(update)) => (error, update, two),
            (Ok(update), Err(error)) => (error, update, one),
            other => panic!("one of them is the victim: {other:?}"),
        };
        assert_eq!((victim.kind(), victim.certainty()), (ErrorKind::Transient, Certainty::NotApplied));
        assert!(matches!(survivor, Update::Applied(_)), "{survivor:?}");
        transaction.commit().await.expect("commits");
        for job in claimed {
            assert_eq!(backend.get(job.id()).await.expect("reads").expect("a job").state(), JobState::Completed);
        }
    })
    .await;
}

/// Level-triggered, and from this process's handles alone.
#[tokio::test]
async fn workers_are_woken_by_what_makes_work() {
    on_each_server(async |database, backend| {
        let queues = [name("mail")];
        let wakes = async |transition: Option<(&Execution, Transition)>| {
            let mut wait = backend.wait_for_work(&queues);
            assert!(!is_ready(&mut wait).await);
            match transition {
                Some((seen, transition)) => {
                    Transitioner::new(backend).apply(seen, &transition).await.expect("settles");
                }
                None => drop(backend.enqueue(&[job("1")]).await.expect("stores")),
            }
            is_ready(&mut wait).await
        };
        assert!(wakes(None).await, "a job is new");
        let claimed = claim_one(backend).await;
        assert!(wakes(Some((&claimed.execution, Transition::Release))).await, "a job is given back");
        let claimed = claim_one(backend).await;
        assert!(!wakes(Some((&claimed.execution, complete("1")))).await, "a job is done");

        let mut wait = backend.wait_for_work(&queues);
        backend.enqueue(&[job("1"), job("2"), job("3")]).await.expect("stores");
        let jobs = backend.claim(&request(3)).await.expect("claims").jobs;
        assert!(!is_ready(&mut wait).await);
        wait_for(backend, &jobs[0].execution, "e", When::At(Timestamp::MAX)).await;
        wait_for(backend, &jobs[1].execution, "late", When::Now).await;
        assert!(!is_ready(&mut wait).await, "jobs wait");
        assert_eq!(backend.emit(&event("e", Delay::ZERO)).await.expect("is kept"), Emitted::New { woken: 1 });
        assert!(is_ready(&mut wait).await, "an event woke one");
        let mut wait = backend.wait_for_work(&queues);
        assert!(!is_ready(&mut wait).await);
        backend.emit(&event("e", Delay::ZERO)).await.expect("is kept");
        assert!(!is_ready(&mut wait).await, "an event woke none");
        assert_eq!(backend.time_out_waits(limit(9)).await.expect("wakes"), [jobs[1].id()]);
        assert!(is_ready(&mut wait).await, "the time of one is over");
        let mut wait = backend.wait_for_work(&queues);
        assert!(!is_ready(&mut wait).await);
        assert!(backend.time_out_waits(limit(9)).await.expect("wakes").is_empty());
        assert!(!is_ready(&mut wait).await, "the time of none is over");
        let end = decide(&jobs[2].execution, &complete("1"));
        backend.hand_over(&end, &job("4")).await.expect("answers");
        assert!(is_ready(&mut wait).await, "a job has a successor");

        let mut wait = backend.wait_for_work(&queues);
        assert!(!is_ready(&mut wait).await);
        let mut transaction = database.pool.begin().await.expect("begins");
        backend.enqueue_in(&mut transaction, &[job("1")]).await.expect("stores");
        transaction.commit().await.expect("commits");
        assert!(!is_ready(&mut wait).await, "nobody here saw the commit");
    })
    .await;
}

/// One poll.
async fn is_ready<F: Future + Unpin>(future: &mut F) -> bool {
    poll_fn(|context| Poll::Ready(Pin::new(&mut *future).poll(context).is_ready())).await
}
