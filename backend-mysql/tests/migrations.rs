//! The schema: how it comes about, and who may work on it. (F1, F2, F3, F4)

mod common;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;

use backend_mysql::MysqlBackend;
use backend_mysql::migrations;
use common::*;
use queue_core::*;
use sqlx::Connection;
use sqlx::Executor;
use sqlx::Row;
use tokio::task::JoinSet;

/// What is in the database: how its tables are made, and the schema's row as the last.
async fn schema(database: &Database) -> Vec<String> {
    let tables = "SELECT CAST(table_name AS CHAR) AS name FROM information_schema.tables \
                  WHERE table_schema = DATABASE() ORDER BY table_name = 'fenced_schema', table_name";
    let mut schema = Vec::new();
    for row in database.rows(tables).await {
        let table: String = row.get("name");
        let made = database.rows(&format!("SHOW CREATE TABLE {table}")).await;
        schema.push(made[0].get(1));
        if table == "fenced_schema" {
            schema.extend(version(database).await);
        }
    }
    schema
}

/// The schema's row.
async fn version(database: &Database) -> Option<String> {
    let text = "SELECT CONCAT(version, ' ', oldest_version, ' ', CAST(oldest_release AS CHAR)) FROM fenced_schema";
    database.rows(text).await.first().map(|row| row.get(0))
}

/// The schema's row after the first migration, and once all have run.
const FIRST: Option<&str> = Some("1 1 0.1.0");
const NOW: Option<&str> = Some("2 1 0.1.0");

fn first_schema() -> &'static str {
    include_str!("fixtures/schema_v1.sql")
}

async fn on_each_empty(test: impl AsyncFn(&Database)) {
    for server in Server::all() {
        let database = Database::new(server).await;
        test(&database).await;
        database.discard().await;
    }
}

async fn claim_nothing(backend: &MysqlBackend) {
    assert_eq!(backend.claim(&request(1)).await.expect("claims"), Claimed::default());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn ten_migrate_a_new_database_at_once() {
    on_each_empty(async |database| {
        let mut migrators = JoinSet::new();
        for number in 0..10 {
            // Half of them with a pool of one, which has no connection to spare.
            let options = database.options().max_connections(1 + number % 2);
            migrators.spawn(async move { MysqlBackend::connect_with(options).await?.migrate().await });
        }
        for answer in migrators.join_all().await {
            answer.expect("each is told that the schema is there");
        }
        let once = schema(database).await;
        assert_eq!(once.last().map(String::as_str), NOW);
        let backend = database.connect().await;
        backend.enqueue(&[job("1")]).await.expect("stores");
        backend.migrate().await.expect("again");
        assert_eq!(schema(database).await, once);
        claim_one(&backend).await;
        backend.close().await;
    })
    .await;
}

/// A job, what it does and what it waits for.
async fn works(backend: &MysqlBackend) {
    let new = NewJob { queue: name("new"), ..job("1") };
    let request = ClaimRequest::new(name("new"), [name("welcome")], worker(), lease(), limit(9)).expect("a request");
    backend.enqueue(std::slice::from_ref(&new)).await.expect("stores");
    let claimed = backend.claim(&request).await.expect("claims").jobs.remove(0);
    finish_step(backend, &claimed.execution, &name("s"), &Json::null()).await.expect("is saved");
    let waits = wait_for(backend, &claimed.execution, "e", When::At(Timestamp::MAX)).await;
    assert!(matches!(waits, Suspended::Waits(_)), "{waits:?}");
    assert_eq!(backend.emit(&event("e", Delay::ZERO)).await.expect("is kept"), Emitted::New { woken: 1 });
    let claimed = backend.claim(&request).await.expect("claims").jobs.remove(0);
    Transitioner::new(backend).apply(&claimed.execution, &complete("1")).await.expect("settles");
    assert_eq!(backend.steps(new.id).await.expect("reads").len(), 2);
}

/// Every place at which the migrations can end, with what they have made until then.
#[tokio::test]
async fn one_that_ends_in_the_middle_is_completed() {
    /// So many of them are the first migration.
    const OLD: usize = 3;
    let texts: String = migrations(&Identifier::default()).into_iter().map(|migration| migration.sql).collect();
    let texts: Vec<_> = texts.split_inclusive(";\n").collect();
    for statements in 0..=texts.len() {
        on_each_empty(async |database| {
            if statements > 0 {
                database.run(&texts[..statements].concat()).await;
            }
            let backend = database.connect().await;
            let kept = keyed("kept");
            match statements {
                ..2 => assert_error(backend.enqueue(std::slice::from_ref(&kept)).await, ErrorKind::Schema),
                2..OLD => {}
                OLD.. => {
                    backend.enqueue(std::slice::from_ref(&kept)).await.expect("stores");
                    let claimed = claim_one(&backend).await;
                    Transitioner::new(&backend).apply(&claimed.execution, &complete("1")).await.expect("settles");
                }
            }
            backend.migrate().await.expect("completes it");
            let (other, whole) = Database::migrated(database.server).await;
            assert_eq!(schema(database).await, schema(&other).await, "after {statements} statements");
            assert_eq!(version(database).await.as_deref(), NOW);
            whole.close().await;
            other.discard().await;
            works(&backend).await;
            assert_eq!(backend.get(kept.id).await.expect("reads").is_some(), statements >= OLD);
            backend.close().await;
        })
        .await;
    }
}

/// From the first schema on, while programs of the first release work: none of them is told anything of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn ten_migrate_the_first_schema_beside_its_programs() {
    on_each_empty(async |database| {
        database.run(first_schema()).await;
        let old = database.connect().await;
        let done = Arc::new(AtomicBool::new(false));
        let working = {
            let (old, done) = (old.clone(), Arc::clone(&done));
            tokio::spawn(async move {
                let mut rounds = 0;
                while rounds < 20 || !done.load(Ordering::Relaxed) {
                    old.enqueue(&[keyed("k")]).await.expect("stores");
                    for claimed in old.claim(&request(10)).await.expect("claims").jobs {
                        let settled = Transitioner::new(&old).apply(&claimed.execution, &complete("1")).await;
                        settled.expect("settles");
                    }
                    old.purge(JobState::Completed, Delay::ZERO, limit(10)).await.expect("purges");
                    rounds += 1;
                }
            })
        };
        let mut migrators = JoinSet::new();
        for number in 0..10 {
            let options = database.options().max_connections(1 + number % 2);
            migrators.spawn(async move { MysqlBackend::connect_with(options).await?.migrate().await });
        }
        for answer in migrators.join_all().await {
            answer.expect("each is told that the schema is there");
        }
        done.store(true, Ordering::Relaxed);
        working.await.expect("nothing failed beside it");
        assert_eq!(version(database).await.as_deref(), NOW);
        works(&old).await;
        old.close().await;
    })
    .await;
}

/// Killed while it waits for a transaction that uses the table, between what it has made and what it has not.
#[tokio::test]
async fn one_that_is_killed_in_the_middle_is_completed() {
    on_each_empty(async |database| {
        database.run(first_schema()).await;
        let backend = database.connect().await;
        let mut open = database.pool.begin().await.expect("begins");
        sqlx::query("SELECT 1 FROM fenced_jobs LIMIT 1").fetch_all(&mut *open).await.expect("uses the table");
        let migrating = {
            let backend = backend.clone();
            tokio::spawn(async move { backend.migrate().await })
        };
        let waits = |(_, statement): &(u64, String)| {
            statement.contains("REFERENCES fenced_jobs") || statement.contains("ADD KEY")
        };
        let waiting = async || database.sessions().await.into_iter().find(waits).map(|(id, _)| id);
        until("it waits for the table", async || waiting().await.is_some()).await;
        assert!(!migrating.is_finished());
        database.run(&format!("KILL {}", waiting().await.expect("it waits"))).await;
        let error = migrating.await.expect("no panic").expect_err("is killed");
        assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Transient), "{error}");
        open.rollback().await.expect("rolls back");
        assert_eq!(version(database).await.as_deref(), FIRST, "not yet");
        backend.migrate().await.expect("completes it");
        assert_eq!(version(database).await.as_deref(), NOW);
        works(&backend).await;
        backend.close().await;
    })
    .await;
}

/// Jobs work on, and what needs the newer schema says so.
#[tokio::test]
async fn steps_need_the_second_schema() {
    on_each_empty(async |database| {
        database.run(first_schema()).await;
        let backend = database.connect().await;
        let claimed = claim_one(&backend).await;
        let answer = finish_step(&backend, &claimed.execution, &name("s"), &Json::null()).await;
        let Err(StepError::Transition(TransitionError::Backend(error))) = answer else { panic!("{answer:?}") };
        assert_eq!((error.kind(), error.certainty()), (ErrorKind::Schema, Certainty::NotApplied));
        assert_error(backend.emit(&event("e", Delay::ZERO)).await, ErrorKind::Schema);
        assert_error(backend.time_out_waits(limit(1)).await, ErrorKind::Schema);
        assert_error(backend.purge_events(limit(1)).await, ErrorKind::Schema);
        assert_error(backend.steps(claimed.id()).await, ErrorKind::Schema);
        Transitioner::new(&backend).apply(&claimed.execution, &complete("1")).await.expect("settles");
        backend.migrate().await.expect("migrates");
        works(&backend).await;
        backend.close().await;
    })
    .await;
}

/// The lock is gone with the connection of whoever had it, and is on no connection that the pool hands out.
#[tokio::test]
async fn one_that_dies_while_it_migrates_blocks_nobody() {
    on_each_empty(async |database| {
        let backend = database.connect().await;
        let mut dying = database.session().await;
        let lock = "SELECT CAST(GET_LOCK(CONCAT('fenced_queue_', LEFT(SHA2(CONCAT(DATABASE(), '.fenced_'), 256), 40)), 0) \
                    AS SIGNED)";
        let locked = dying.fetch_one(lock).await.expect("locks");
        assert_eq!(locked.get::<i64, _>(0), 1);
        let migrating = {
            let backend = backend.clone();
            tokio::spawn(async move { backend.migrate().await })
        };
        let waits = |(_, statement): &(u64, String)| statement.contains("GET_LOCK(CONCAT");
        until("it waits", async || database.sessions().await.iter().any(waits)).await;
        assert!(!migrating.is_finished());
        dying.close_hard().await.expect("is gone");
        migrating.await.expect("no panic").expect("is not blocked");

        let free = "SELECT CAST(IS_FREE_LOCK(CONCAT('fenced_queue_', LEFT(SHA2(CONCAT(DATABASE(), '.fenced_'), 256), 40))) \
                    AS SIGNED)";
        until("the lock is free", async || database.rows(free).await[0].get::<i64, _>(0) == 1).await;
        claim_nothing(&backend).await;
        backend.close().await;
    })
    .await;
}

#[tokio::test]
async fn a_migration_that_is_dropped_leaves_a_pool_that_works() {
    on_each_empty(async |database| {
        let backend = MysqlBackend::connect_with(database.options().max_connections(1)).await.expect("connects");
        for micros in [0, 100, 1_000, 3_000, 10_000] {
            let _ = tokio::time::timeout(std::time::Duration::from_micros(micros), backend.migrate()).await;
        }
        backend.migrate().await.expect("migrates");
        claim_nothing(&backend).await;
        backend.close().await;
    })
    .await;
}

#[tokio::test]
async fn the_text_is_what_is_run() {
    on_each_empty(async |database| {
        let prefix: Identifier = "fenced_".parse().expect("a prefix");
        for migration in migrations(&prefix) {
            assert!(!migration.sql.contains("{prefix}"), "the prefix is filled in");
            database.run(&migration.sql).await;
        }
        let by_hand = schema(database).await;
        let backend = database.connect().await;
        backend.migrate().await.expect("has nothing to do");
        claim_nothing(&backend).await;
        backend.close().await;
        let (other, backend) = Database::migrated(database.server).await;
        assert_eq!(schema(&other).await, by_hand);
        backend.close().await;
        other.discard().await;
    })
    .await;
}

#[tokio::test]
async fn a_program_below_the_floor_is_refused_and_writes_nothing() {
    on_each_server(async |database, backend| {
        database.run("UPDATE fenced_schema SET version = 9, oldest_version = 7, oldest_release = '3.1.4'").await;
        let before = schema(database).await;
        let connect = MysqlBackend::connect_with(database.options()).await.map(drop);
        let lent = MysqlBackend::from_pool(database.pool_of(1, "SELECT 1").await).await.map(drop);
        for refused in [backend.migrate().await, connect, lent] {
            let error = refused.expect_err("refused");
            assert_eq!((error.kind(), error.certainty()), (ErrorKind::Schema, Certainty::NotApplied));
            for version in [env!("CARGO_PKG_VERSION"), "version 2;", "version 9 ", "version 7,", "3.1.4"] {
                assert!(error.to_string().contains(version), "{version:?} in {error}");
            }
        }
        assert_eq!(schema(database).await, before);
    })
    .await;
}

/// The rolling deploy: the schema is newer, and admits this program.
#[tokio::test]
async fn a_program_that_a_newer_schema_admits_goes_on() {
    on_each_server(async |database, backend| {
        backend.enqueue(&[job("1")]).await.expect("prepares its statements");
        database.run("UPDATE fenced_schema SET version = 9; ALTER TABLE fenced_jobs ADD COLUMN later TEXT FIRST").await;
        let before = schema(database).await;
        backend.enqueue(&[job("1")]).await.expect("stores, on the same connection");
        let another = database.connect().await;
        another.migrate().await.expect("leaves it as it is");
        assert_eq!(schema(database).await, before);
        for _ in 0..2 {
            let claimed = claim_one(&another).await;
            Transitioner::new(backend).apply(&claimed.execution, &complete("1")).await.expect("settles");
        }
        another.close().await;
    })
    .await;
}

/// What is in the way of the first migration is a table of the same name; later ones may meet rows that break an index.
#[tokio::test]
async fn a_migration_that_meets_what_is_in_its_way_changes_nothing() {
    on_each_empty(async |database| {
        database
            .run("CREATE TABLE fenced_jobs (id INTEGER, mine TEXT); INSERT INTO fenced_jobs VALUES (1, 'kept')")
            .await;
        let before = schema(database).await;
        let backend = database.connect().await;
        for _ in 0..2 {
            let error = backend.migrate().await.expect_err("the name is taken");
            assert_eq!((error.kind(), error.certainty()), (ErrorKind::Schema, Certainty::NotApplied), "{error}");
            assert!(error.to_string().contains("fenced_jobs"), "it names what is in the way: {error}");
            assert_eq!(schema(database).await, before, "nothing was made beside it");
        }
        assert_eq!(database.rows("SELECT mine FROM fenced_jobs").await[0].get::<String, _>(0), "kept");
        backend.close().await;
    })
    .await;
}

/// The tables of the second may be in the way of somebody else's: the first schema stays, and jobs go on.
#[tokio::test]
async fn a_second_migration_that_meets_what_is_in_its_way_keeps_the_first_schema() {
    for table in ["fenced_events", "fenced_steps"] {
        on_each_empty(async |database| {
            database.run(first_schema()).await;
            database.run(&format!("CREATE TABLE {table} (mine TEXT); INSERT INTO {table} VALUES ('kept')")).await;
            let backend = database.connect().await;
            for _ in 0..2 {
                let error = backend.migrate().await.expect_err("the name is taken");
                assert_eq!((error.kind(), error.certainty()), (ErrorKind::Schema, Certainty::NotApplied), "{error}");
                let source = std::error::Error::source(&error).expect("what the server says").to_string();
                assert!(source.contains(table), "it names what is in the way: {source}");
                assert_eq!(version(database).await.as_deref(), FIRST);
            }
            assert_eq!(database.rows(&format!("SELECT mine FROM {table}")).await[0].get::<String, _>(0), "kept");
            claim_one(&backend).await;
            database.run(&format!("DROP TABLE {table}")).await;
            backend.migrate().await.expect("migrates");
            works(&backend).await;
            backend.close().await;
        })
        .await;
    }
}

/// Refused by the server after its first statement: what that made is taken back.
#[tokio::test]
async fn a_migration_without_the_privilege_changes_nothing() {
    on_each_empty(async |database| {
        let user = format!("u{}", &database.name[database.name.len() - 12..]);
        database
            .run(&format!(
                "CREATE USER '{user}'@'%' IDENTIFIED BY ''; GRANT SELECT, INSERT ON {0}.* TO '{user}'@'%'; \
                 GRANT CREATE, DROP ON {0}.fenced_schema TO '{user}'@'%'",
                database.name
            ))
            .await;
        let options = backend_mysql::MysqlOptions::connection(database.location().username(&user)).expect("a database");
        let backend = MysqlBackend::connect_with(options).await.expect("connects");
        assert_error(backend.migrate().await, ErrorKind::Permanent);
        assert_eq!(schema(database).await, Vec::<String>::new());
        // The second has a privilege less each time. The first schema is there by then, and stays.
        for (privileges, table) in [
            ("CREATE", "fenced_jobs"),
            ("CREATE", "fenced_events"),
            ("CREATE", "fenced_steps"),
            ("REFERENCES", "fenced_jobs"),
            ("ALTER, INDEX", "fenced_jobs"),
        ] {
            database.run(&format!("GRANT {privileges} ON {}.{table} TO '{user}'@'%'", database.name)).await;
            let refused = backend.migrate().await.expect_err("it may not");
            // The first time it has written the first schema.
            let certainty = if table == "fenced_jobs" && privileges == "CREATE" {
                Certainty::Unknown
            } else {
                Certainty::NotApplied
            };
            assert_eq!((refused.kind(), refused.certainty()), (ErrorKind::Permanent, certainty), "{refused}");
            assert_eq!(version(database).await.as_deref(), FIRST, "{privileges} on {table}");
        }
        database.run(&format!("GRANT UPDATE ON {}.fenced_schema TO '{user}'@'%'", database.name)).await;
        backend.migrate().await.expect("migrates");
        assert_eq!(version(database).await.as_deref(), NOW);
        backend.close().await;
        database.run(&format!("DROP USER '{user}'@'%'")).await;
    })
    .await;
}

/// F11.
#[tokio::test]
async fn two_prefixes_are_two_queues() {
    on_each_empty(async |database| {
        let open = async |prefix: &str| {
            let options = database.options().table_prefix(prefix.parse().expect("a prefix"));
            let backend = MysqlBackend::connect_with(options).await.expect("connects");
            backend.migrate().await.expect("migrates");
            backend
        };
        let (one, two) = (open("select").await, open("abcdefghijklmnopqrstuvwxyz012345").await);
        one.enqueue(&[keyed("k")]).await.expect("stores");
        assert_eq!(two.claim(&request(1)).await.expect("claims"), Claimed::default());
        assert!(matches!(two.enqueue(&[keyed("k")]).await.expect("stores")[..], [Enqueued::New(_)]));
        assert_eq!(one.claim(&request(10)).await.expect("claims").jobs.len(), 1);
        one.close().await;
        two.close().await;
    })
    .await;
}

/// Whatever the server, the database and the session have for defaults.
#[tokio::test]
async fn the_tables_do_not_depend_on_defaults() {
    on_each_empty(async |database| {
        let plain = {
            database.connect().await.migrate().await.expect("migrates");
            schema(database).await
        };
        let other = Database::new(database.server).await;
        let mut session = other.session().await;
        session
            .execute(
                "SET sql_mode = 'ANSI', default_storage_engine = 'MyISAM', character_set_server = 'latin2'; \
                 SET NAMES latin1",
            )
            .await
            .expect("sets");
        for migration in migrations(&Identifier::default()) {
            sqlx::raw_sql(sqlx::AssertSqlSafe(migration.sql)).execute(&mut session).await.expect("runs");
        }
        assert_eq!(schema(&other).await, plain);
        other.discard().await;
    })
    .await;
}

/// Each later migration runs on these rows as well, so the file stays as it is for ever.
#[tokio::test]
async fn jobs_of_the_first_schema_go_on() {
    on_each_empty(async |database| {
        database.run(first_schema()).await;
        let backend = database.connect().await;
        let before = backend.list(&ListFilter::default(), None, limit(100)).await.expect("lists");
        backend.migrate().await.expect("migrates");
        let page = backend.list(&ListFilter::default(), None, limit(100)).await.expect("lists");
        assert!(page.unreadable.is_empty(), "{page:?}");
        assert_eq!(page.items, before.items, "they are what they were");
        for &state in JobState::ALL {
            assert!(page.items.iter().any(|job| job.state() == state), "one is {state}");
        }

        let worker: WorkerId = "web-1/00000000000000aa".parse().expect("a worker");
        let running = page.items.iter().find(|job| job.state() == JobState::Running).expect("one");
        assert_eq!(running.execution.claimed_by.as_ref(), Some(&worker));
        let held = Held::of(&running.execution).expect("held");
        assert_eq!(backend.extend_leases(&[held], lease()).await.expect("beats"), [Beat::Extended]);
        let settled =
            Transitioner::new(&backend).apply(&running.execution, &complete("\"done\"")).await.expect("settles");
        assert_eq!(settled.execution().state, JobState::Completed);
        let claimed = page.items.iter().find(|job| job.state() == JobState::Claimed).expect("one");
        let start = Transition::Start { lease: lease() };
        Transitioner::new(&backend).apply(&claimed.execution, &start).await.expect("starts");
        assert_eq!(backend.claim(&request(10)).await.expect("claims").jobs.len(), 1, "the waiting one is due");
        let failed = page.items.iter().find(|job| job.state() == JobState::Failed).expect("one");
        assert_eq!(failed.errors.len(), 1);
        let rerun = Transitioner::new(&backend).apply(&failed.execution, &Transition::Rerun).await.expect("runs again");
        assert_eq!(rerun.execution().attempt, 0);
        let taken = page.items.iter().find(|job| job.state() == JobState::Suspended).expect("one");
        let key = taken.unique_key.as_ref().expect("a key").as_str();
        let answer = backend.enqueue(&[keyed(key)]).await.expect("is an outcome");
        assert_eq!(answer, [Enqueued::Duplicate { existing: taken.id() }]);

        // Suspended by hand, and its time is over: found by the new index, though it was there before.
        assert_eq!(backend.time_out_waits(limit(10)).await.expect("wakes"), [taken.id()]);
        let mut woken = backend.claim(&request(10)).await.expect("claims").jobs;
        woken.retain(|job| job.id() == taken.id());
        let waits = wait_for(&backend, &woken[0].execution, "e", When::At(Timestamp::MAX)).await;
        assert!(matches!(waits, Suspended::Waits(_)), "{waits:?}");
        let emitted = backend.emit(&event("e", Delay::ZERO)).await.expect("is kept");
        assert_eq!(emitted, Emitted::New { woken: 1 });
        let steps = backend.steps(taken.id()).await.expect("reads");
        assert!(matches!(steps[..], [Step { state: StepState::Done(_), .. }]), "{steps:?}");
        backend.close().await;
    })
    .await;
}
