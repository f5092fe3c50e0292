//! Which rows a call locks, and that no two calls wait for each other for ever. (B4, B7b, B11)

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;

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

/// Steps, waits, events that come meanwhile, sweeps of what is overdue, purges of jobs with their steps and of events, and cancels
/// at once, about a few events: nobody hears of a deadlock or of a lock, no event is lost, and no job is woken twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_deadlock_of_waits_reaches_a_caller() {
    const ROUNDS: usize = 12;
    const KEYS: usize = 3;
    let millis = |millis: i64| Delay::from_millis(millis).expect("a delay");
    on_each_server(async |database, backend| {
        let handles = [backend.clone(), database.connect().await];
        let barrier = Arc::new(Barrier::new(6 + 3 + 2 + 1));
        let working = Arc::new(AtomicUsize::new(6));
        let mut tasks = JoinSet::new();
        for worker in 0..6 {
            let (backend, barrier) = (handles[worker % 2].clone(), Arc::clone(&barrier));
            let working = Arc::clone(&working);
            tasks.spawn(async move {
                barrier.wait().await;
                for round in 0..ROUNDS {
                    let new: Vec<_> = (0..3).map(|_| job("1")).collect();
                    backend.enqueue(&new).await?;
                    for job in backend.claim(&request(4)).await?.jobs {
                        let applied = |update: &Update| matches!(update, Update::Applied(_));
                        let write = |name: &str, action| StepWrite {
                            id: job.id(),
                            current: job.execution.fingerprint(),
                            name: name.try_into().expect("a name"),
                            action,
                        };
                        let begun = backend.write_step(&write("s", StepAction::Begin)).await?;
                        assert!(applied(&begun.update), "{begun:?}");
                        let suspend = Transition::Suspend { until: When::After(millis(3)) };
                        let suspension = decide(&job.execution, &suspend).patch;
                        let event = Some(name(&format!("e {}", (worker + round) % KEYS)));
                        // Refused once the row of a new event is made, which several do at once.
                        let event_to_be = Some(name(&format!("to be {round}")));
                        let wait = StepAction::Wait(NewWait { event: event_to_be, suspension: suspension.clone() });
                        let mut lost = write("lost", wait);
                        lost.current.revision = Revision::random();
                        let refused = backend.write_step(&lost).await?;
                        assert!(matches!(refused.update, Update::Conflict(_)), "{refused:?}");
                        let wait = StepAction::Wait(NewWait { event, suspension });
                        let waits = backend.write_step(&write(&format!("w {round}"), wait)).await?;
                        assert!(applied(&waits.update), "{waits:?}");
                        if let Some(Step { state: StepState::Done(_), .. }) = waits.step {
                            let (end, next) = (decide(&job.execution, &complete("1")), keyed(&job.id().to_string()));
                            let (ended, enqueued) = backend.hand_over(&end, &next).await?;
                            assert!(applied(&ended) && enqueued == Some(Enqueued::New(next.id)), "{ended:?}");
                        }
                    }
                }
                working.fetch_sub(1, Ordering::Relaxed);
                Result::<_>::Ok(0)
            });
        }
        for emitter in 0..3 {
            let (backend, barrier) = (handles[emitter % 2].clone(), Arc::clone(&barrier));
            let working = Arc::clone(&working);
            tasks.spawn(async move {
                barrier.wait().await;
                let mut all = 0;
                for round in 0.. {
                    let key = format!("e {}", (emitter + round) % KEYS);
                    if let Emitted::New { woken } = backend.emit(&event(&key, millis(2))).await? {
                        all += woken;
                    }
                    backend.purge_events(limit(2)).await?;
                    if working.load(Ordering::Relaxed) == 0 {
                        break;
                    }
                }
                Ok(all)
            });
        }
        for backend in &handles {
            let (backend, barrier, working) = (backend.clone(), Arc::clone(&barrier), Arc::clone(&working));
            tasks.spawn(async move {
                barrier.wait().await;
                while working.load(Ordering::Relaxed) > 0 {
                    backend.time_out_waits(limit(5)).await?;
                    backend.purge(JobState::Completed, Delay::ZERO, limit(10)).await?;
                    backend.purge(JobState::Canceled, Delay::ZERO, limit(10)).await?;
                }
                Ok(0)
            });
        }
        let backend = handles[1].clone();
        tasks.spawn(async move {
            barrier.wait().await;
            while working.load(Ordering::Relaxed) > 0 {
                let mut filter = ListFilter::default();
                filter.state = Some(JobState::Suspended);
                let cancel = Transition::Cancel { reason: "no".into() };
                let asleep = backend.list(&filter, None, limit(100)).await?.items;
                let updates: Vec<_> = asleep.iter().step_by(8).map(|job| decide(&job.execution, &cancel)).collect();
                backend.update_many_if_current(&updates).await?;
            }
            Ok(0)
        });
        let mut woken = 0;
        for answer in tasks.join_all().await {
            woken += answer.expect("no error reaches a caller");
        }
        assert!(woken > 0, "events and waits met");
        // Whoever waits still waits for the time, and has one wait that is its own.
        for job in handles[0].list(&ListFilter::default(), None, limit(10_000)).await.expect("lists").items {
            let steps = handles[0].steps(job.id()).await.expect("reads");
            let own = steps.iter().filter(|step| match &step.state {
                StepState::Waiting(wait) => wait.revision == job.execution.revision && wait.until == job.available_at,
                _ => false,
            });
            assert_eq!(own.count(), usize::from(job.state() == JobState::Suspended), "{job:?}: {steps:?}");
        }
        until("all waits are over", async || {
            handles[0].time_out_waits(limit(1000)).await.expect("wakes");
            let counts = handles[0].counts().await.expect("counts");
            counts.iter().all(|count| count.state != Some(JobState::Suspended))
        })
        .await;
        handles[1].close().await;
    })
    .await;
}

/// An event whose row somebody has locked is waited for as long as the options say, and then nothing has changed.
#[tokio::test]
async fn an_event_is_waited_for_a_bounded_time() {
    on_each_server(async |database, backend| {
        backend.enqueue(&[job("1")]).await.expect("stores");
        let claimed = claim_one(backend).await;
        let options = database.options().lock_timeout(std::time::Duration::from_millis(300)).max_connections(1);
        let impatient = MysqlBackend::connect_with(options).await.expect("connects");
        let hour = Delay::from_hours(1);
        database.run("INSERT INTO fenced_events (event_key, kept_until) VALUES ('e', '2001-01-01')").await;
        let mut transaction = database.pool.begin().await.expect("begins");
        let lock = "SELECT * FROM fenced_events WHERE event_key = 'e' FOR UPDATE";
        sqlx::query(lock).fetch_all(&mut *transaction).await.expect("locks");
        assert_error(impatient.emit(&event("e", hour)).await, ErrorKind::Transient);
        let mut wait = Suspension::new(&claimed.execution, name("w"), Some(name("e")), When::Now).expect("legal");
        let answer = wait.submit(&impatient).await;
        let Err(StepError::Transition(TransitionError::Backend(error))) = answer else { panic!("{answer:?}") };
        assert_eq!((error.kind(), error.certainty()), (ErrorKind::Transient, Certainty::NotApplied));
        // A purge passes it.
        assert_eq!(impatient.purge_events(limit(10)).await.expect("purges"), 0);
        assert_eq!(backend.get(claimed.id()).await.expect("reads"), Some(claimed.clone()));
        transaction.rollback().await.expect("rolls back");
        assert!(matches!(wait.submit(&impatient).await.expect("answers"), Suspended::Waits(_)));
        assert_eq!(impatient.emit(&event("e", hour)).await.expect("is kept"), Emitted::New { woken: 1 });
        impatient.close().await;
    })
    .await;
}
