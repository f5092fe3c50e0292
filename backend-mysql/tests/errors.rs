//! What the server refuses, and what the caller is told: the kind, what became of the write, and that nothing is lost.

mod common;

use std::time::Duration;

use backend_mysql::MysqlBackend;
use backend_mysql::MysqlOptions;
use common::*;
use queue_core::*;
use sqlx::mysql::MySqlPoolOptions;

fn unavailable(answer: Result<Settled, TransitionError>) -> bool {
    matches!(answer, Err(TransitionError::Backend(error))
        if (error.kind(), error.certainty()) == (ErrorKind::Unavailable, Certainty::NotApplied))
}

#[tokio::test]
async fn a_database_that_was_not_migrated() {
    for server in Server::all() {
        let database = Database::new(server).await;
        let backend = database.connect().await;
        assert_error(backend.enqueue(&[job("1")]).await, ErrorKind::Schema);
        assert_error(backend.claim(&request(1)).await, ErrorKind::Schema);
        assert_error(backend.get(JobId::new()).await, ErrorKind::Schema);
        assert_error(backend.stale(None, limit(1)).await, ErrorKind::Schema);
        backend.migrate().await.expect("migrates");
        backend.enqueue(&[job("1")]).await.expect("now it works, on the same connections");
        claim_one(&backend).await;
        backend.close().await;
        database.discard().await;
    }
}

#[tokio::test]
async fn a_server_that_is_not_there() {
    let options = MysqlOptions::from_url("mysql://root@127.0.0.1:1/jobs").expect("a URL");
    let answer = MysqlBackend::connect_with(options.acquire_timeout(Duration::from_millis(100))).await.map(drop);
    assert_error(answer, ErrorKind::Unavailable);
}

#[tokio::test]
async fn a_database_that_does_not_exist() {
    for server in Server::all() {
        let options = MysqlOptions::connection(server.options().database("qc_there_is_none")).expect("a database");
        let answer = MysqlBackend::connect_with(options.acquire_timeout(Duration::from_millis(500))).await.map(drop);
        assert_error(answer, ErrorKind::Permanent);
        let none = MySqlPoolOptions::new().connect_lazy_with(
            sqlx::mysql::MySqlConnectOptions::new()
                .host(server.options().get_host())
                .port(server.options().get_port())
                .username(server.options().get_username()),
        );
        assert_error(MysqlBackend::from_pool(none).await.map(drop), ErrorKind::Invalid);
    }
}

/// E6: as long as the server takes it, and refused when the handle is made where not.
#[tokio::test]
async fn a_cap_on_payloads_that_the_server_does_not_admit() {
    on_each_server(async |database, _| {
        let answer = MysqlBackend::connect_with(database.options().max_payload(1 << 40)).await.map(drop);
        assert_error(answer, ErrorKind::Invalid);
        let roomy = MysqlBackend::connect_with(database.options().max_payload(7 << 20)).await.expect("connects");
        let large = Json::encode(&"x".repeat((7 << 20) - 2)).expect("JSON");
        let new = NewJob { payload: large.clone(), ..job("1") };
        roomy.enqueue(&[new.clone(), NewJob { id: JobId::new(), ..new.clone() }]).await.expect("stores");
        let claimed = roomy.claim(&request(1)).await.expect("claims").jobs.remove(0);
        let end = Transition::Complete { result: Some(large.clone()) };
        Transitioner::new(&roomy).apply(&claimed.execution, &end).await.expect("settles");
        let job = roomy.get(claimed.id()).await.expect("reads, with both").expect("a job");
        assert_eq!((&job.payload, job.result.as_ref()), (&large, Some(&large)));
        let longer = NewJob { payload: Json::encode(&"x".repeat((7 << 20) - 1)).expect("JSON"), ..new };
        assert_error(roomy.enqueue(&[longer]).await, ErrorKind::TooLarge);
        roomy.close().await;
    })
    .await;
}

/// F7: a server that turned read-only under open sessions. The connection is thrown out, so that the next one may lead to
/// another server; when that can write, everything works without a restart.
#[tokio::test]
async fn a_server_that_turned_read_only() {
    on_each_server(async |database, backend| {
        database.run("CREATE TABLE mode (ro INT); INSERT INTO mode VALUES (0)").await;
        backend.enqueue(&[job("1")]).await.expect("stores");
        let claimed = claim_one(backend).await;
        // Triggers stand in for the server, which is shared: with its very numbers.
        for number in [1290, 1836, 1792] {
            for (when, table) in [("UPDATE", "u"), ("INSERT", "i"), ("DELETE", "d")] {
                database
                    .run(&format!(
                        "CREATE TRIGGER ro_{table} BEFORE {when} ON fenced_jobs FOR EACH ROW BEGIN \
                         IF (SELECT ro FROM mode) THEN \
                         SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {number}, MESSAGE_TEXT = 'read-only'; END IF; END"
                    ))
                    .await;
            }
            database.run("UPDATE mode SET ro = 1").await;
            let pool = database.pool_of(1, "SELECT 1").await;
            let lent = MysqlBackend::from_pool(pool.clone()).await.expect("a handle");
            let session = async || {
                let id = sqlx::query_scalar("SELECT CAST(CONNECTION_ID() AS SIGNED)").fetch_one(&pool).await;
                id.map(|id: i64| id).expect("an id")
            };
            let before = session().await;
            assert_error(lent.enqueue(&[job("1")]).await, ErrorKind::Unavailable);
            assert_ne!(session().await, before, "another connection");
            assert!(unavailable(Transitioner::new(&lent).apply(&claimed.execution, &complete("1")).await));
            let held = Held::of(&claimed.execution).expect("held");
            // The server rolls back behind the connection that was closed: this waits for the row until it has.
            database.rows("SELECT id FROM fenced_jobs FOR UPDATE").await;
            assert_error(lent.extend_leases(std::slice::from_ref(&held), lease()).await, ErrorKind::Unavailable);
            assert_eq!(lent.get(claimed.id()).await.expect("reads"), Some(claimed.clone()));
            database.run("UPDATE mode SET ro = 0; DROP TRIGGER ro_u; DROP TRIGGER ro_i; DROP TRIGGER ro_d").await;
            assert_eq!(
                lent.extend_leases(&[held], Lease::from_millis(1).expect("a lease")).await.expect("beats"),
                [Beat::Extended]
            );
            lent.close().await;
        }
        Transitioner::new(backend).apply(&claimed.execution, &complete("1")).await.expect("settles");
    })
    .await;
}

/// The real thing, as far as one session can be told: begun read-write in spite of its default.
#[tokio::test]
async fn a_session_that_is_read_only_by_default() {
    on_each_server(async |database, _| {
        let pool = database.pool_of(1, "SET SESSION TRANSACTION READ ONLY").await;
        let lent = MysqlBackend::from_pool(pool).await.expect("a handle");
        lent.enqueue(&[job("1")]).await.expect("stores");
        let claimed = claim_one(&lent).await;
        Transitioner::new(&lent).apply(&claimed.execution, &complete("1")).await.expect("settles");
        lent.close().await;
    })
    .await;
}

/// What the server says while a statement runs; the numbers cannot be had from a shared server by other means.
#[tokio::test]
async fn each_number_has_its_kind() {
    on_each_server(async |database, backend| {
        backend.enqueue(&[job("1")]).await.expect("stores");
        let claimed = claim_one(backend).await;
        let update = decide(&claimed.execution, &complete("1"));
        for (number, kind) in [
            (1205, ErrorKind::Transient),
            (1317, ErrorKind::Transient),
            (3024, ErrorKind::Transient),
            (1412, ErrorKind::Transient),
            (1040, ErrorKind::Unavailable),
            (1203, ErrorKind::Unavailable),
            (1053, ErrorKind::Unavailable),
            (1114, ErrorKind::Unavailable),
            (1021, ErrorKind::Unavailable),
            (1054, ErrorKind::Schema),
            (1153, ErrorKind::TooLarge),
            (1665, ErrorKind::Unsupported),
            (1142, ErrorKind::Permanent),
            (1644, ErrorKind::Permanent),
        ] {
            database
                .run(&format!(
                    "CREATE TRIGGER says BEFORE UPDATE ON fenced_jobs FOR EACH ROW \
                     SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = {number}, MESSAGE_TEXT = 'no'"
                ))
                .await;
            assert_error(backend.update_many_if_current(std::slice::from_ref(&update)).await, kind);
            database.run("DROP TRIGGER says").await;
            assert_eq!(backend.get(claimed.id()).await.expect("reads"), Some(claimed.clone()), "{number}");
        }
        Transitioner::new(backend).apply(&claimed.execution, &complete("1")).await.expect("settles");
    })
    .await;
}

/// A conflict that does not end is told in the end; one that ends is not.
#[tokio::test]
async fn a_conflict_is_repeated_a_bounded_number_of_times() {
    on_each_server(async |database, backend| {
        backend.enqueue(&[job("1")]).await.expect("stores");
        let claimed = claim_one(backend).await;
        let update = decide(&claimed.execution, &complete("1"));
        for number in [1213, 1020] {
            // Counted where a rollback does not reach.
            database
                .run(&format!(
                    "SET @@SESSION.sql_mode = ''; CREATE TABLE tries (id INT AUTO_INCREMENT PRIMARY KEY) ENGINE = MyISAM; \
                     CREATE TRIGGER says BEFORE UPDATE ON fenced_jobs FOR EACH ROW BEGIN INSERT INTO tries VALUES (NULL); \
                     IF (SELECT COUNT(*) FROM tries) <> 25 THEN \
                     SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = {number}, MESSAGE_TEXT = 'no'; END IF; END"
                ))
                .await;
            assert_error(backend.update_many_if_current(std::slice::from_ref(&update)).await, ErrorKind::Transient);
            let tries = database.rows("SELECT CAST(COUNT(*) AS SIGNED) FROM tries").await;
            assert_eq!(sqlx::Row::get::<i64, _>(&tries[0], 0), 21);
            // The fourth from here on goes through, and nobody hears of the others.
            let renewed = Held::of(&claimed.execution).expect("held");
            assert_eq!(backend.extend_leases(&[renewed], lease()).await.expect("beats"), [Beat::Extended]);
            database.run("DROP TRIGGER says; DROP TABLE tries").await;
        }
        Transitioner::new(backend).apply(&claimed.execution, &complete("1")).await.expect("settles");
    })
    .await;
}

/// The same of steps, waits and events, wherever in their transactions it happens.
#[tokio::test]
async fn a_conflict_about_steps_is_repeated() {
    on_each_server(async |database, backend| {
        let triggers = |tries: u32| {
            let trigger = |when: &str, table: &str| {
                format!(
                    "CREATE TRIGGER says_{table}_{when} BEFORE {when} ON fenced_{table} FOR EACH ROW BEGIN \
                     INSERT INTO tries VALUES (NULL); IF (SELECT COUNT(*) FROM tries) < {tries} THEN \
                     SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'no'; END IF; END; "
                )
            };
            let all = [("INSERT", "steps"), ("UPDATE", "steps"), ("INSERT", "events"), ("DELETE", "events")];
            // Counted where a rollback does not reach.
            "CREATE TABLE tries (id INT AUTO_INCREMENT PRIMARY KEY) ENGINE = MyISAM; ".to_owned()
                + &all.map(|(when, table)| trigger(when, table)).concat()
        };
        const NONE: &str = "DROP TRIGGER says_steps_INSERT; DROP TRIGGER says_steps_UPDATE; DROP TRIGGER says_events_INSERT; \
                            DROP TRIGGER says_events_DELETE; DROP TABLE tries";
        let afresh = "DELETE FROM tries";
        backend.enqueue(&[job("1"), job("2")]).await.expect("stores");
        let jobs = backend.claim(&request(2)).await.expect("claims").jobs;
        database.run(&triggers(4)).await;
        begin_step(backend, &jobs[0].execution, &name("s")).await.expect("is begun");
        for (job, until) in jobs.iter().zip([When::At(Timestamp::MAX), When::Now]) {
            database.run(afresh).await;
            let waits = wait_for(backend, &job.execution, "e", until).await;
            assert!(matches!(waits, Suspended::Waits(Settled::Applied(_))), "{waits:?}");
        }
        database.run(afresh).await;
        assert_eq!(backend.time_out_waits(limit(9)).await.expect("wakes"), [jobs[1].id()]);
        database.run(afresh).await;
        assert_eq!(backend.emit(&event("e", Delay::ZERO)).await.expect("is kept"), Emitted::New { woken: 1 });
        database.run(afresh).await;
        assert_eq!(backend.purge_events(limit(9)).await.expect("purges"), 1);
        database.run(&format!("{NONE}; {}", triggers(1000))).await;
        assert_error(backend.emit(&event("e", Delay::ZERO)).await, ErrorKind::Transient);
        let tries = database.rows("SELECT CAST(COUNT(*) AS SIGNED) FROM tries").await;
        assert_eq!(sqlx::Row::get::<i64, _>(&tries[0], 0), 21, "not for ever");
        database.run(NONE).await;
    })
    .await;
}

#[tokio::test]
async fn a_pool_that_has_no_connection_left() {
    on_each_server(async |database, _| {
        let options = MySqlPoolOptions::new().max_connections(1).acquire_timeout(Duration::from_millis(50));
        let pool = options.connect_with(database.location()).await.expect("a pool");
        let backend = MysqlBackend::from_pool(pool.clone()).await.expect("a handle");
        let taken = pool.acquire().await.expect("a connection");
        assert_error(backend.claim(&request(1)).await, ErrorKind::Unavailable);
        assert_error(backend.get(JobId::new()).await, ErrorKind::Unavailable);
        drop(taken);
        pool.close().await;
        assert_error(backend.claim(&request(1)).await, ErrorKind::Unavailable);
    })
    .await;
}

/// The answer to a settle that makes a job active again whose key is taken.
#[tokio::test]
async fn a_key_that_is_taken() {
    on_each_server(async |_, backend| {
        backend.enqueue(&[keyed("k")]).await.expect("stores");
        let ended = claim_one(backend).await;
        let ended = Transitioner::new(backend).apply(&ended.execution, &complete("1")).await.expect("settles");
        backend.enqueue(&[keyed("k")]).await.expect("stores");
        let mut decision = Decision::new(ended.execution(), &Transition::Rerun).expect("legal");
        let UpdateRequest { id, current, patch } = decision.request().clone();
        assert_error(backend.update_if_current(id, &current, &patch).await, ErrorKind::Invalid);
        assert_error(backend.update_many_if_current(&[decision.request().clone()]).await, ErrorKind::Invalid);
        let holder = claim_one(backend).await;
        Transitioner::new(backend).apply(&holder.execution, &complete("1")).await.expect("settles");
        Transitioner::new(backend).submit(&mut decision).await.expect("the key is free");
    })
    .await;
}

/// A table that somebody has locked as a whole: a claim and a beat give up in time, and hold nothing up afterwards.
#[tokio::test]
async fn a_claim_and_a_beat_wait_for_a_bounded_time() {
    on_each_server(async |database, _| {
        let pool = database.pool_of(1, "SET lock_wait_timeout = 20").await;
        let lent = MysqlBackend::from_pool(pool).await.expect("a handle");
        lent.enqueue(&[job("1"), job("2")]).await.expect("stores");
        let held = Held::of(&claim_one(&lent).await.execution).expect("held");
        let mut locker = database.session().await;
        sqlx::raw_sql("LOCK TABLES fenced_jobs WRITE").execute(&mut locker).await.expect("locks");
        let short = Lease::from_millis(60).expect("a lease");
        let claim = ClaimRequest::new(name("mail"), [name("welcome")], worker(), short, limit(1)).expect("a request");
        assert_error(lent.claim(&claim).await, ErrorKind::Transient);
        assert_error(lent.extend_leases(std::slice::from_ref(&held), short).await, ErrorKind::Transient);
        sqlx::raw_sql("UNLOCK TABLES").execute(&mut locker).await.expect("unlocks");
        assert_eq!(lent.extend_leases(&[held], lease()).await.expect("beats"), [Beat::Extended]);
        assert_eq!(lent.claim(&claim).await.expect("claims").jobs.len(), 1);
        lent.close().await;
    })
    .await;
}

/// A row that cannot be answered for is told apart, stays as it is, and keeps nothing from the others.
#[tokio::test]
async fn a_row_whose_lifecycle_is_out_of_range() {
    on_each_server(async |database, backend| {
        for column in ["max_attempts = 0", "claimed_by = x'ff'", "claimed_by = ''"] {
            backend.enqueue(&[job("1"), job("2"), job("3")]).await.expect("stores");
            let claimed = backend.claim(&request(3)).await.expect("claims").jobs;
            let bad = claimed[1].id().as_uuid().simple().to_string();
            database.run(&format!("UPDATE fenced_jobs SET {column} WHERE id = x'{bad}'")).await;
            let updates: Vec<_> = claimed.iter().map(|job| decide(&job.execution, &complete("1"))).collect();
            let answers = backend.update_many_if_current(&updates).await.expect("answers for each");
            assert!(
                matches!(answers[..], [Update::Applied(_), Update::Unreadable(_), Update::Applied(_)]),
                "{answers:?}"
            );
            let mut filter = ListFilter::default();
            filter.state = Some(JobState::Running);
            let left = backend.list(&filter, None, limit(10)).await.expect("lists").unreadable;
            assert_eq!(left.iter().map(|row| row.id).collect::<Vec<_>>(), [claimed[1].id()], "{column}");
            database.run("DELETE FROM fenced_jobs").await;
        }
    })
    .await;
}

/// A queue's name that cannot be read does not keep the others from being counted.
#[tokio::test]
async fn counts_beside_a_broken_row() {
    on_each_server(async |database, backend| {
        backend.enqueue(&[job("1"), job("2")]).await.expect("stores");
        database.run("UPDATE fenced_jobs SET queue = '' WHERE payload = '1'").await;
        let counts = backend.counts().await.expect("counts");
        assert_eq!(counts.iter().map(|count| count.jobs).collect::<Vec<_>>(), [1]);
    })
    .await;
}
