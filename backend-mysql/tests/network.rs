//! How often a call goes to the server, and what becomes of it when the network, the server or the caller gives up. (A13, A15,
//! B10, C21, S11)

mod common;

use std::time::Duration;

use backend_mysql::MysqlBackend;
use backend_mysql::MysqlOptions;
use common::*;
use queue_conformance::Direction;
use queue_conformance::Proxy;
use queue_core::*;
use sqlx::mysql::MySqlPoolOptions;
use sqlx::mysql::MySqlSslMode;

async fn proxy(database: &Database) -> Proxy {
    let location = database.location();
    Proxy::start(format!("{}:{}", location.get_host(), location.get_port())).await.expect("a proxy")
}

fn through(proxy: &Proxy, database: &Database) -> sqlx::mysql::MySqlConnectOptions {
    database.location().host("127.0.0.1").port(proxy.port()).ssl_mode(MySqlSslMode::Disabled)
}

async fn behind(proxy: &Proxy, database: &Database, connections: u32) -> MysqlBackend {
    let options = MysqlOptions::connection(through(proxy, database)).expect("a database");
    MysqlBackend::connect_with(options.max_connections(connections)).await.expect("connects")
}

/// What goes to the server for a call; the driver's own check of a connection that comes back to the pool is waited for, and
/// not counted.
async fn round_trips<T>(proxy: &Proxy, call: impl Future<Output = Result<T>>) -> (u64, T) {
    let settled = async || {
        let mut seen = proxy.round_trips();
        loop {
            tokio::time::sleep(Duration::from_millis(30)).await;
            let now = proxy.round_trips();
            if now == seen {
                return now;
            }
            seen = now;
        }
    };
    let before = settled().await;
    let answer = call.await.expect("answers");
    (settled().await - before - 1, answer)
}

/// A claim, a settle and an enqueue of keys cost four round trips whatever the batch: begin, look and lock, write, commit. One
/// less where nothing was to be written, and for an enqueue without keys.
#[tokio::test]
async fn calls_cost_a_fixed_number_of_round_trips() {
    on_each_server(async |database, _| {
        let proxy = proxy(database).await;
        let own = behind(&proxy, database, 1).await;
        let pool = MySqlPoolOptions::new()
            .max_connections(1)
            .test_before_acquire(false)
            .connect_with(through(&proxy, database))
            .await
            .expect("a pool");
        let lent = MysqlBackend::from_pool(pool).await.expect("a handle");
        for (whose, handle) in [("own", &own), ("lent", &lent)] {
            // The first time that a connection meets a statement it is prepared.
            handle.enqueue(&[job("1"), keyed("first")]).await.expect("stores");
            let warm = handle.claim(&request(2)).await.expect("claims").jobs;
            let held = Held::of(&warm[0].execution).expect("held");
            handle.extend_leases(&[held], lease()).await.expect("beats");
            let updates: Vec<_> = warm.iter().map(|job| decide(&job.execution, &complete("1"))).collect();
            handle.update_many_if_current(&updates).await.expect("updates");
            handle.purge(JobState::Completed, Delay::ZERO, limit(10)).await.expect("purges");
            handle.get(JobId::new()).await.expect("reads");
            handle.stale(None, limit(10)).await.expect("reads");

            for rows in [1, 100, 900] {
                let jobs: Vec<_> = (0..rows).map(|_| job("1")).collect();
                let (enqueue, _) = round_trips(&proxy, handle.enqueue(&jobs)).await;
                let later = |key: &str| NewJob { available: When::After(Delay::MAX), ..keyed(key) };
                let keys: Vec<_> = (0..rows).map(|number| later(&format!("{whose} {rows} {number}"))).collect();
                let (keyed, _) = round_trips(&proxy, handle.enqueue(&keys)).await;
                let (claim, claimed) = round_trips(&proxy, handle.claim(&request(rows))).await;
                assert_eq!(claimed.jobs.len(), rows);
                let held: Vec<_> = claimed.jobs.iter().filter_map(|job| Held::of(&job.execution)).collect();
                let (beat, _) = round_trips(&proxy, handle.extend_leases(&held, lease())).await;
                let error = Transition::Retry { error: "again".into(), available: When::After(Delay::MAX) };
                let updates: Vec<_> = claimed
                    .jobs
                    .iter()
                    .enumerate()
                    .map(|(index, job)| match index % 2 {
                        0 => decide(&job.execution, &complete("1")),
                        _ => decide(&job.execution, &error),
                    })
                    .collect();
                let (settle, answers) = round_trips(&proxy, handle.update_many_if_current(&updates)).await;
                assert!(answers.iter().all(|answer| matches!(answer, Update::Applied(_))));
                let (conflict, _) = round_trips(&proxy, handle.update_many_if_current(&updates)).await;
                let (purge, _) = round_trips(&proxy, handle.purge(JobState::Completed, Delay::ZERO, limit(rows))).await;
                println!(
                    "{whose}, {rows}: enqueue {enqueue}, with keys {keyed}, claim {claim}, beat {beat}, settle {settle}, \
                     conflict {conflict}, purge {purge}"
                );
                let calls = [enqueue, keyed, claim, beat, settle, conflict, purge];
                assert_eq!(calls, [3, 4, 4, 4, 4, 3, 4], "{whose}, {rows}");
            }
            let (empty, _) = round_trips(&proxy, handle.claim(&request(10))).await;
            // Whoever finds nothing looks first the next time: an idle worker is one statement for each look.
            handle.claim(&request(10)).await.expect("prepares it");
            let (idle, nothing) = round_trips(&proxy, handle.claim(&request(10))).await;
            assert_eq!((idle, nothing), (1, Claimed::default()), "{whose}");
            handle.enqueue(&[job("1")]).await.expect("stores");
            // The look, the driver's ping of a connection that goes back, and the claim.
            let (found, one) = round_trips(&proxy, handle.claim(&request(10))).await;
            assert_eq!((found, one.jobs.len()), (6, 1), "{whose}");
            let (get, _) = round_trips(&proxy, handle.get(JobId::new())).await;
            let (stale, _) = round_trips(&proxy, handle.stale(None, limit(10))).await;
            assert_eq!([empty, get, stale], [3, 1, 1], "{whose}");
        }
        own.close().await;
        lent.close().await;
    })
    .await;
}

/// Four for a step, six for a wait, and eight for an event, however many it wakes: fewer where there is less to do.
#[tokio::test]
async fn steps_and_waits_cost_a_fixed_number_of_round_trips() {
    on_each_server(async |database, _| {
        let proxy = proxy(database).await;
        let handle = behind(&proxy, database, 1).await;
        let (hour, never) = (Delay::from_hours(1), When::At(Timestamp::MAX));
        let write = |job: &Job, action| StepWrite {
            id: job.id(),
            current: job.execution.fingerprint(),
            name: name("s"),
            action,
        };
        let wait = |job: &Job, event: &str, until| {
            let suspension = decide(&job.execution, &Transition::Suspend { until }).patch;
            write(job, StepAction::Wait(NewWait { event: Some(name(event)), suspension }))
        };
        // The first round prepares the statements.
        for (round, rows) in [1, 1, 100].into_iter().enumerate() {
            let key = format!("e {round}");
            let successor = job("1");
            let jobs: Vec<_> = (0..rows + 4).map(|_| job("1")).collect();
            handle.enqueue(&jobs).await.expect("stores");
            let mut claimed = handle.claim(&request(rows + 4)).await.expect("claims").jobs;
            let (first, second) = (claimed.remove(0), claimed.remove(0));
            let begin = round_trips(&proxy, handle.write_step(&write(&first, StepAction::Begin))).await.0;
            let value = StepAction::Finish(Json::null());
            let finish = round_trips(&proxy, handle.write_step(&write(&first, value))).await.0;
            let again = round_trips(&proxy, handle.write_step(&write(&first, StepAction::Begin))).await.0;
            let steps = round_trips(&proxy, handle.steps(first.id())).await.0;
            let end = decide(&first.execution, &complete("1"));
            let over = round_trips(&proxy, handle.hand_over(&end, &successor)).await.0;
            let late = round_trips(&proxy, handle.write_step(&write(&first, StepAction::Begin))).await.0;
            let new = round_trips(&proxy, handle.emit(&event(&format!("new {round}"), hour))).await.0;
            let kept = round_trips(&proxy, handle.emit(&event(&format!("new {round}"), hour))).await.0;
            let came = wait(&second, &format!("new {round}"), never);
            let came = round_trips(&proxy, handle.write_step(&came)).await.0;
            let (due, asleep) = claimed.split_at(2);
            let mut waits = 0;
            for job in asleep {
                (waits, _) = round_trips(&proxy, handle.write_step(&wait(job, &key, never))).await;
            }
            let (wake, woken) = round_trips(&proxy, handle.emit(&event(&key, Delay::ZERO))).await;
            assert_eq!(woken, Emitted::New { woken: rows as u64 });
            for job in due {
                handle.write_step(&wait(job, "never", When::Now)).await.expect("suspends");
            }
            let (time_out, timed_out) = round_trips(&proxy, handle.time_out_waits(limit(10))).await;
            assert_eq!(timed_out.len(), 2);
            let nothing = round_trips(&proxy, handle.time_out_waits(limit(10))).await.0;
            let (purge, purged) = round_trips(&proxy, handle.purge_events(limit(10))).await;
            assert_eq!(purged, 1);
            let none = round_trips(&proxy, handle.purge_events(limit(10))).await.0;
            println!(
                "{rows}: begin {begin}, finish {finish}, again {again}, steps {steps}, hand over {over}, late {late}, new {new}, \
                 kept {kept}, came {came}, wait {waits}, wake {wake}, time out {time_out}, nothing {nothing}, purge {purge}, \
                 none {none}"
            );
            database.run("DELETE FROM fenced_jobs").await;
            let calls = [begin, finish, again, steps, over, late];
            let events = [new, kept, came, waits, wake, time_out, nothing, purge, none];
            if round > 0 {
                assert_eq!(calls, [4, 4, 3, 1, 6, 3], "{rows}");
                assert_eq!(events, [6, 4, 5, 6, 8, 5, 3, 5, 4], "{rows}");
            }
        }
        handle.close().await;
    })
    .await;
}

/// The answer to a commit is lost: the outcome is unknown, and the same decision again is recognised.
#[tokio::test]
async fn a_lost_answer_is_an_unknown_outcome() {
    on_each_server(async |database, backend| {
        let proxy = proxy(database).await;
        let cut_off = behind(&proxy, database, 1).await;
        let mut lost = false;
        // An answer may slip through before it is kept back, and the round has shown nothing then.
        for _ in 0..50 {
            cut_off.enqueue(&[job("1")]).await.expect("stores");
            let claimed = claim_one(&cut_off).await;
            let decision = Decision::new(&claimed.execution, &complete("1")).expect("legal");
            let mut settling = {
                let (backend, mut decision) = (cut_off.clone(), decision);
                tokio::spawn(async move {
                    let answer = Transitioner::new(&backend).submit(&mut decision).await;
                    (answer, decision)
                })
            };
            // Answers go through one by one, until the row is seen as settled from outside while one is kept back.
            let stepping = async {
                loop {
                    proxy.until_arrival(Direction::ToServer, std::future::pending::<()>()).await;
                    proxy.hold(Direction::ToClient);
                    proxy.until_arrival(Direction::ToClient, tokio::time::sleep(Duration::from_millis(50))).await;
                    let job = backend.get(claimed.id()).await.expect("reads").expect("a job");
                    if job.state() == JobState::Completed {
                        return;
                    }
                    proxy.release();
                }
            };
            tokio::select! {
                () = stepping => {}
                _ = tokio::time::sleep(Duration::from_secs(2)) => {}
                ended = &mut settling => {
                    let (answer, _) = ended.expect("no panic");
                    proxy.release();
                    answer.expect("nothing was lost");
                    continue;
                }
            }
            proxy.cut();
            proxy.release();
            let (answer, mut unsure) = settling.await.expect("no panic");
            let Err(TransitionError::Backend(error)) = answer else { continue };
            let settled = Transitioner::new(&cut_off).submit(&mut unsure).await.expect("is recognised");
            if error.certainty() == Certainty::Unknown {
                assert_eq!(error.kind(), ErrorKind::Unavailable);
                assert!(matches!(settled, Settled::AlreadyApplied(_)), "{settled:?}");
                lost = true;
                break;
            }
        }
        assert!(lost, "no answer was lost in any round");
        cut_off.close().await;
    })
    .await;
}

/// The driver's own transactions are left open on the connection when their beginning is dropped. Ours are not: what the pool of
/// one connection writes next is there for everybody.
#[tokio::test]
async fn a_dropped_beginning_leaves_no_transaction_open() {
    on_each_server(async |database, backend| {
        let proxy = proxy(database).await;
        let pool = MySqlPoolOptions::new()
            .max_connections(1)
            .after_connect(|connection, _| {
                Box::pin(async move {
                    let text = "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ";
                    sqlx::raw_sql(text).execute(connection).await.map(drop)
                })
            })
            .connect_with(through(&proxy, database))
            .await
            .expect("a pool");
        let lent = MysqlBackend::from_pool(pool.clone()).await.expect("a handle");
        let own = behind(&proxy, database, 1).await;
        for handle in [&lent, &own] {
            handle.enqueue(&[job("1")]).await.expect("stores");
            for direction in [Direction::ToClient, Direction::ToServer] {
                let jobs = [job("2")];
                proxy.hold(direction);
                proxy.until_arrival(direction, handle.enqueue(&jobs)).await;
                proxy.release();
                let next = job("3");
                handle.enqueue(std::slice::from_ref(&next)).await.expect("stores");
                assert!(backend.get(next.id).await.expect("reads").is_some(), "it is committed");
                assert!(backend.get(jobs[0].id).await.expect("reads").is_none(), "the dropped one is not");
            }
        }
        // The application's own writes, too, on the connection that it lent.
        database.run("CREATE TABLE orders (number INT)").await;
        proxy.hold(Direction::ToClient);
        proxy.until_arrival(Direction::ToClient, lent.claim(&request(1))).await;
        proxy.release();
        sqlx::query("INSERT INTO orders VALUES (1)").execute(&pool).await.expect("stores");
        assert_eq!(database.rows("SELECT number FROM orders").await.len(), 1);
        lent.close().await;
        own.close().await;
    })
    .await;
}

/// What the application's own dropped beginning leaves open on its pool does not take our writes in.
#[tokio::test]
async fn a_transaction_that_the_application_left_open() {
    on_each_server(async |database, backend| {
        let pool = database.pool_of(1, "SELECT 1").await;
        let lent = MysqlBackend::from_pool(pool.clone()).await.expect("a handle");
        for text in ["BEGIN", "START TRANSACTION WITH CONSISTENT SNAPSHOT"] {
            sqlx::raw_sql(text).execute(&pool).await.expect("begins, and is forgotten");
            let new = job("1");
            lent.enqueue(std::slice::from_ref(&new)).await.expect("stores");
            assert!(backend.get(new.id).await.expect("reads").is_some(), "it is committed");
        }
        lent.close().await;
    })
    .await;
}

/// A connection that the server closed while it was idle, and one that is killed in the middle of a call.
#[tokio::test]
async fn killed_connections() {
    on_each_server(async |database, _| {
        let own = MysqlBackend::connect_with(database.options().max_connections(2)).await.expect("connects");
        own.enqueue(&[job("1"), job("2")]).await.expect("stores");
        let kill_all = async |wanted: &str| {
            let mut killed = 0;
            for (id, statement) in database.sessions().await {
                if statement.contains(wanted) {
                    let _ = sqlx::raw_sql(sqlx::AssertSqlSafe(format!("KILL {id}"))).execute(&database.pool).await;
                    killed += 1;
                }
            }
            killed
        };
        // While they are idle: nobody notices.
        for _ in 0..3 {
            assert!(kill_all("").await > 0);
            assert!(own.get(JobId::new()).await.expect("reads again").is_none());
            assert!(kill_all("").await > 0);
            own.enqueue(&[job("3")]).await.expect("begins again");
        }
        let claimed = own.claim(&request(1)).await.expect("claims").jobs.remove(0);

        // In the middle, while it waits for the row: certainly not applied.
        let mut transaction = database.pool.begin().await.expect("begins");
        let lock = sqlx::query("SELECT id FROM fenced_jobs WHERE id = ? FOR UPDATE").bind(claimed.id().as_uuid());
        lock.fetch_all(&mut *transaction).await.expect("locks");
        let settling = {
            let (own, seen) = (own.clone(), claimed.execution.clone());
            tokio::spawn(async move { Transitioner::new(&own).apply(&seen, &complete("1")).await })
        };
        until("the settle waits", async || kill_all("JSON_TABLE").await > 0).await;
        let answer = settling.await.expect("no panic");
        let Err(TransitionError::Backend(error)) = answer else { panic!("{answer:?}") };
        assert_eq!(error.certainty(), Certainty::NotApplied, "{error}");
        assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Transient), "{error}");
        transaction.rollback().await.expect("rolls back");
        Transitioner::new(&own).apply(&claimed.execution, &complete("1")).await.expect("settles");
        own.close().await;
    })
    .await;
}
