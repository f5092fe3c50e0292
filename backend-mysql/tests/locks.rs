//! Which rows a call locks, and that no two calls wait for each other for ever. (B4, B7b, B11)

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;

use backend_mysql::MysqlBackend;
use common::*;
use queue_core::*;
use sqlx::Executor;
use sqlx::MySqlConnection;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

/// The claim as far as its locks go, in a transaction that stays open.
async fn claiming(database: &Database, backend: &MysqlBackend, kind: &str, rows: u32) -> (MySqlConnection, usize) {
    let statements = backend.statements();
    let text = |wanted: &str| statements.iter().find(|(name, _)| *name == wanted).expect("a statement").1.to_owned();
    let mut session = database.session().await;
    session
        .execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; START TRANSACTION READ WRITE")
        .await
        .expect("begins");
    let kind: String = kind.bytes().map(|byte| format!("{byte:02X}")).collect();
    let due = sqlx::query(sqlx::AssertSqlSafe(text("due"))).bind(&b"mail"[..]).bind(0).bind(kind).bind(rows);
    let locked = due.fetch_all(&mut session).await.expect("locks").len();
    (session, locked)
}

/// B7b: rows of foreign kinds, which a claim passes, and rows of worse priorities, which it does not come to, are for others
/// to claim while it is open.
#[tokio::test]
async fn a_claim_locks_what_it_takes_and_nothing_else() {
    on_each_server(async |database, backend| {
        let mut jobs = Vec::new();
        for priority in 0..10 {
            for number in 0..20 {
                let kind = name(if number % 2 == 0 { "foreign" } else { "welcome" });
                let priority = Priority::new(priority).expect("a priority");
                jobs.push(NewJob { kind, priority, ..job("1") });
            }
        }
        backend.enqueue(&jobs).await.expect("stores");
        let (session, locked) = claiming(database, backend, "welcome", 15).await;
        assert_eq!(locked, 15);
        let foreign = backend.claim(&claim_of(&["foreign"], 1000)).await.expect("claims").jobs;
        assert_eq!(foreign.len(), 100, "none of the other kind is locked");
        let others = backend.claim(&request(1000)).await.expect("claims").jobs;
        assert_eq!(others.len(), 85, "nor any that was not taken");
        assert!(others.iter().all(|job| job.priority > Priority::FIRST), "those taken were the first");
        drop(session);
    })
    .await;
}

/// Settles in opposite orders, bulk enqueues about the same keys, sweeps, heartbeats and purges at once: nobody hears of a
/// deadlock, and nothing is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_deadlock_reaches_a_caller() {
    const ROUNDS: usize = 25;
    on_each_server(async |database, backend| {
        let handles = [backend.clone(), database.connect().await];
        let barrier = Arc::new(Barrier::new(8 + 4 + 2 + 1));
        let mut tasks = JoinSet::new();
        for claimer in 0..8 {
            let (backend, barrier) = (handles[claimer % 2].clone(), Arc::clone(&barrier));
            tasks.spawn(async move {
                barrier.wait().await;
                for round in 0..ROUNDS {
                    let claimed = backend.claim(&request(20)).await?.jobs;
                    let held: Vec<_> = claimed.iter().filter_map(|job| Held::of(&job.execution)).collect();
                    backend.extend_leases(&held, lease()).await?;
                    let mut updates: Vec<_> = claimed
                        .iter()
                        .map(|job| match round % 3 {
                            0 => decide(&job.execution, &Transition::Release),
                            _ => decide(&job.execution, &complete("1")),
                        })
                        .collect();
                    if claimer % 2 == 0 {
                        updates.reverse();
                    }
                    for answer in backend.update_many_if_current(&updates).await? {
                        assert!(matches!(answer, Update::Applied(_)), "{answer:?}");
                    }
                }
                Result::<_>::Ok(())
            });
        }
        for producer in 0..4 {
            let (backend, barrier) = (handles[producer % 2].clone(), Arc::clone(&barrier));
            tasks.spawn(async move {
                barrier.wait().await;
                for round in 0..ROUNDS {
                    let mut jobs: Vec<_> = (0..40).map(|number| keyed(&format!("{}", number % 30))).collect();
                    jobs.extend((0..40).map(|_| job("1")));
                    if (producer + round) % 2 == 0 {
                        jobs.reverse();
                    }
                    backend.enqueue(&jobs).await?;
                }
                Ok(())
            });
        }
        for backend in &handles {
            let (backend, barrier) = (backend.clone(), Arc::clone(&barrier));
            tasks.spawn(async move {
                barrier.wait().await;
                for _ in 0..ROUNDS {
                    let sweep = recover_stale(&backend, lease(), limit(50), |_| false).await?;
                    assert!(sweep.failed.is_empty(), "{sweep:?}");
                    backend.purge(JobState::Completed, Delay::ZERO, limit(30)).await?;
                }
                Ok(())
            });
        }
        let backend = handles[1].clone();
        tasks.spawn(async move {
            barrier.wait().await;
            for _ in 0..ROUNDS {
                let ended = backend.list(&ListFilter::default(), None, limit(200)).await?.items;
                let reruns: Vec<_> = ended
                    .iter()
                    .filter(|job| job.state() == JobState::Completed && job.unique_key.is_none())
                    .map(|job| decide(&job.execution, &Transition::Rerun))
                    .collect();
                backend.update_many_if_current(&reruns).await?;
            }
            Ok(())
        });
        for answer in tasks.join_all().await {
            answer.expect("no error reaches a caller");
        }
        // What is left is each there once, and can be claimed.
        let left = handles[0].claim(&request(10_000)).await.expect("claims").jobs;
        let ids: BTreeSet<_> = left.iter().map(Job::id).collect();
        assert_eq!(ids.len(), left.len());
        let held = handles[0].counts().await.expect("counts");
        let running: u64 =
            held.iter().filter(|count| count.state == Some(JobState::Running)).map(|count| count.jobs).sum();
        assert_eq!(running, left.len() as u64, "no claim was lost");
        handles[1].close().await;
    })
    .await;
}

/// C6b, C17: a beat passes a row that is locked, and says so.
#[tokio::test]
async fn a_beat_waits_for_no_row() {
    on_each_server(async |database, backend| {
        backend.enqueue(&(0..3).map(|_| job("1")).collect::<Vec<_>>()).await.expect("stores");
        let claimed = backend.claim(&request(3)).await.expect("claims").jobs;
        let held: Vec<_> = claimed.iter().filter_map(|job| Held::of(&job.execution)).collect();
        let mut transaction = database.pool.begin().await.expect("begins");
        let lock = sqlx::query("SELECT id FROM fenced_jobs WHERE id = ? FOR UPDATE").bind(held[1].id.as_uuid());
        lock.fetch_all(&mut *transaction).await.expect("locks");
        let beats = backend.extend_leases(&held, lease()).await.expect("beats");
        assert_eq!(beats, [Beat::Extended, Beat::Busy, Beat::Extended]);
        transaction.rollback().await.expect("rolls back");
        assert_eq!(backend.extend_leases(&held[1..2], lease()).await.expect("beats"), [Beat::Extended]);
    })
    .await;
}

/// A settle waits for a row as long as the options say, and then has changed nothing.
#[tokio::test]
async fn a_settle_waits_a_bounded_time() {
    on_each_server(async |database, backend| {
        backend.enqueue(&[job("1"), job("2")]).await.expect("stores");
        let claimed = backend.claim(&request(2)).await.expect("claims").jobs;
        let options = database.options().lock_timeout(std::time::Duration::from_millis(300)).max_connections(1);
        let impatient = MysqlBackend::connect_with(options).await.expect("connects");
        let mut transaction = database.pool.begin().await.expect("begins");
        let lock = sqlx::query("SELECT id FROM fenced_jobs WHERE id = ? FOR UPDATE").bind(claimed[1].id().as_uuid());
        lock.fetch_all(&mut *transaction).await.expect("locks");
        let updates: Vec<_> = claimed.iter().map(|job| decide(&job.execution, &complete("1"))).collect();
        assert_error(impatient.update_many_if_current(&updates).await, ErrorKind::Transient);
        // Nothing of it is left behind on the only connection: neither the lock nor the transaction.
        assert!(matches!(
            impatient.update_many_if_current(&updates[..1]).await.expect("updates")[..],
            [Update::Applied(_)]
        ));
        let seen = backend.get(claimed[0].id()).await.expect("reads").expect("a job");
        assert_eq!(seen.state(), JobState::Completed);
        transaction.rollback().await.expect("rolls back");
        assert!(matches!(
            impatient.update_many_if_current(&updates[1..]).await.expect("updates")[..],
            [Update::Applied(_)]
        ));
        impatient.close().await;
    })
    .await;
}
