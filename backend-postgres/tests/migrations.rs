//! The schema: how it comes about, and who may work on it. (F1, F2, F4)

mod common;

use std::future::Future;

use backend_postgres::PostgresBackend;
use backend_postgres::migrations;
use common::*;
use queue_core::*;
use sqlx::AssertSqlSafe;
use sqlx::Connection;
use sqlx::PgConnection;
use sqlx::Row;
use sqlx::postgres::PgRow;
use tokio::task::JoinSet;

/// What is in the schema: its tables, columns, indexes and constraints, and the schema's row.
async fn schema(scratch: &Scratch) -> Vec<String> {
    let mut connection = connection().await;
    let texts = "SELECT format('%s %s %s %s', table_name, column_name, data_type, is_nullable) FROM information_schema.columns \
                   WHERE table_schema = '{schema}' \
                 UNION ALL SELECT indexdef FROM pg_indexes WHERE schemaname = '{schema}' \
                 UNION ALL SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = '{schema}'::regnamespace \
                 UNION ALL SELECT format('%s %s %s', relname, relkind, reloptions) FROM pg_class \
                   WHERE relnamespace = '{schema}'::regnamespace ORDER BY 1";
    let rows = sqlx::query(scratch.text(texts)).fetch_all(&mut connection).await.expect("reads");
    let mut schema: Vec<String> =
        rows.iter().map(|row| row.get::<String, _>(0).replace(scratch.schema.as_str(), "{schema}")).collect();
    let version = scratch.text("SELECT version, oldest_version, oldest_release FROM {schema}.schema");
    if let Ok(rows) = sqlx::query(version).fetch_all(&mut connection).await {
        let row = |row: &PgRow| {
            let (version, oldest, release) = (row.get::<i64, _>(0), row.get::<i64, _>(1), row.get::<String, _>(2));
            format!("{version} {oldest} {release}")
        };
        schema.extend(rows.iter().map(row));
    }
    schema
}

/// The first schema, with a job in every state.
async fn first_schema() -> Scratch {
    let scratch = Scratch::new();
    scratch.run(include_str!("fixtures/schema_v1.sql")).await;
    scratch
}

/// Through a pooler in transaction mode.
async fn behind_a_pooler(scratch: &Scratch) -> PostgresBackend {
    let options = scratch.options_for(&url("TEST_PGBOUNCER_URL")).max_connections(1).transaction_pooler(true);
    PostgresBackend::connect_with(options).await.expect("connects")
}

/// A transaction that has written a job, and that whoever builds an index waits for.
async fn writing(scratch: &Scratch) -> PgConnection {
    let mut writer = connection().await;
    let text = scratch.text("BEGIN; UPDATE {schema}.jobs SET priority = 5 WHERE unique_key = 'order-5'");
    sqlx::raw_sql(text).execute(&mut writer).await.expect("writes");
    writer
}

/// Polls a migration until it waits for the one who writes.
async fn until_it_builds(scratch: &Scratch, migrate: impl Future<Output = Result<()>>) {
    tokio::select! {
        answer = migrate => panic!("it must wait, not {answer:?}"),
        () = until_waiting(scratch, 1) => {}
    }
}

fn invalid_indexes(scratch: &Scratch) -> String {
    let text = "SELECT count(*) FROM pg_index JOIN pg_class ON oid = indexrelid \
                WHERE relnamespace = '{schema}'::regnamespace AND NOT indisvalid";
    text.replace("{schema}", scratch.schema.as_str())
}

fn held_locks(scratch: &Scratch) -> String {
    let text = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid IN \
                (SELECT pid FROM pg_stat_activity WHERE query LIKE '%{schema}%' OR application_name = '{schema}')";
    text.replace("{schema}", scratch.schema.as_str())
}

async fn claim_nothing(backend: &PostgresBackend) {
    assert_eq!(backend.claim(&request(1)).await.expect("claims"), Claimed::default());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn ten_migrate_a_new_database_at_once() {
    let scratch = Scratch::new();
    let mut migrators = JoinSet::new();
    for number in 0..10 {
        let options = scratch.options().max_connections(1);
        let level = if number < 5 { "read committed" } else { "repeatable read" };
        let pool = scratch.pool_with(1, &[("default_transaction_isolation", level)]).await;
        migrators.spawn(async move {
            match number % 2 {
                0 => PostgresBackend::from_pool_with(pool, options).await?.migrate().await,
                _ => PostgresBackend::connect_with(options).await?.migrate().await,
            }
        });
    }
    for answer in migrators.join_all().await {
        answer.expect("each is told that the schema is there");
    }
    let once = schema(&scratch).await;
    assert_eq!(once.last().map(String::as_str), Some("2 1 0.1.0"));
    let backend = scratch.connect().await;
    backend.enqueue(&[job("1")]).await.expect("stores");
    backend.migrate().await.expect("again");
    assert_eq!(schema(&scratch).await, once);
    claim_one(&backend).await;
}

/// The lock of a migrator that is gone is gone, whether it is dropped in the middle, its connection is cut, or it failed.
#[tokio::test]
async fn one_that_ends_in_the_middle_blocks_nobody() {
    let scratch = Scratch::new();
    let backend = scratch.connect().await;
    let statement = |name: &str| {
        let statements = backend.statements();
        let (_, text) = statements.iter().find(|(named, _)| *named == name).expect("a statement");
        AssertSqlSafe((*text).to_owned())
    };
    let mut connection = connection().await;
    sqlx::raw_sql("BEGIN").execute(&mut connection).await.expect("begins");
    sqlx::raw_sql(statement("migrating")).execute(&mut connection).await.expect("has the lock");
    let sql = &migrations(&scratch.schema)[0].sql;
    let half = &sql[..sql.find("CREATE INDEX").expect("an index")];
    sqlx::raw_sql(AssertSqlSafe(half)).execute(&mut connection).await.expect("runs");

    // One that waits is dropped: it must not get the lock later, and keep it.
    let one = scratch.pool(1).await;
    let dropped = scratch.lent(&one).await;
    for (sessions, migrator) in [(1, &dropped), (2, &backend)] {
        let mut migrate = migrator.migrate();
        tokio::select! {
            answer = &mut migrate => panic!("it must wait, not {answer:?}"),
            () = until_waiting(&scratch, sessions) => {}
        }
    }
    let mut migrate = backend.migrate();
    tokio::select! {
        answer = &mut migrate => panic!("it must wait, not {answer:?}"),
        () = until_waiting(&scratch, 3) => {}
    }
    connection.close_hard().await.expect("is gone");
    migrate.await.expect("is not blocked");
    claim_nothing(&backend).await;
    dropped.migrate().await.expect("nor is the pool of the one that was dropped");
    claim_nothing(&dropped).await;
    until(&held_locks(&scratch), 0).await;
}

#[tokio::test]
async fn the_text_is_what_is_run() {
    let by_hand = Scratch::new();
    for migration in migrations(&by_hand.schema) {
        assert!(!migration.sql.contains("{schema}"), "the schema is filled in");
        assert_eq!(migration.statements().concat(), migration.sql);
        for statement in migration.statements() {
            by_hand.run(statement).await;
        }
    }
    let (scratch, _backend) = migrated().await;
    assert_eq!(schema(&by_hand).await, schema(&scratch).await);
    let backend = by_hand.connect().await;
    backend.migrate().await.expect("has nothing to do");
    claim_nothing(&backend).await;
}

/// Two in one database. (F11)
#[tokio::test]
async fn two_schemas_know_nothing_of_each_other() {
    let ((_one, first), (two, second)) = (migrated().await, migrated().await);
    first.enqueue(&[keyed("k")]).await.expect("stores");
    claim_nothing(&second).await;
    let outcomes = second.enqueue(&[keyed("k")]).await.expect("stores");
    assert!(matches!(outcomes[..], [Enqueued::New(_)]));
    let mut writing = connection().await;
    sqlx::raw_sql(two.text("BEGIN; LOCK TABLE {schema}.jobs")).execute(&mut writing).await.expect("locks");
    claim_one(&first).await;
}

#[tokio::test]
async fn a_program_below_the_floor_is_refused_and_writes_nothing() {
    let (scratch, backend) = migrated().await;
    scratch.run("UPDATE {schema}.schema SET version = 9, oldest_version = 7, oldest_release = '3.1.4'").await;
    let before = schema(&scratch).await;
    let connect = PostgresBackend::connect_with(scratch.options()).await.map(drop);
    let lent = PostgresBackend::from_pool_with(scratch.pool(1).await, scratch.options()).await.map(drop);
    for refused in [backend.migrate().await, connect, lent] {
        let error = refused.expect_err("refused");
        assert_eq!((error.kind(), error.certainty()), (ErrorKind::Schema, Certainty::NotApplied));
        for version in [env!("CARGO_PKG_VERSION"), "version 2;", "version 9 ", "version 7,", "3.1.4"] {
            assert!(error.to_string().contains(version), "{version:?} in {error}");
        }
    }
    assert_eq!(schema(&scratch).await, before);
}

/// The rolling deploy: the schema is newer, and admits this program, also one that has its statements prepared.
#[tokio::test]
async fn a_program_that_a_newer_schema_admits_goes_on() {
    let (scratch, backend) = migrated().await;
    for _ in 0..8 {
        backend.enqueue(&[job("1")]).await.expect("stores");
        claim_one(&backend).await;
    }
    scratch.run("UPDATE {schema}.schema SET version = 9; ALTER TABLE {schema}.jobs ADD COLUMN later text").await;
    let before = schema(&scratch).await;
    backend.enqueue(&[job("1")]).await.expect("stores");
    let another = scratch.connect().await;
    another.migrate().await.expect("leaves it as it is");
    assert_eq!(schema(&scratch).await, before);
    let claimed = claim_one(&another).await;
    Transitioner::new(&backend).apply(&claimed.execution, &complete("1")).await.expect("settles");
}

/// What is in the way of the first migration is a table of the same name; later ones may meet rows that break an index.
#[tokio::test]
async fn a_migration_that_meets_what_is_in_its_way_changes_nothing() {
    let scratch = Scratch::new();
    let table = "CREATE SCHEMA {schema}; CREATE TABLE {schema}.jobs (id integer, mine text); \
                 INSERT INTO {schema}.jobs VALUES (1, 'kept')";
    scratch.run(table).await;
    let before = schema(&scratch).await;
    let pool = scratch.pool(1).await;
    let backend = scratch.lent(&pool).await;
    let error = backend.migrate().await.expect_err("the name is taken");
    assert_eq!((error.kind(), error.certainty()), (ErrorKind::Schema, Certainty::NotApplied), "{error}");
    assert!(error.to_string().contains("\"jobs\""), "it names what is in the way: {error}");
    assert_eq!(schema(&scratch).await, before, "nothing was made beside it");
    let kept: String =
        sqlx::query_scalar(scratch.text("SELECT mine FROM {schema}.jobs")).fetch_one(&pool).await.expect("reads");
    assert_eq!(kept, "kept");
    scratch.run("DROP TABLE {schema}.jobs").await;
    backend.migrate().await.expect("on the same connection, in the schema that is there");
}

/// Whoever waits must not be in the middle of a statement, which an index that is being built waits for; nor in a transaction, of which
/// the pooler of the tests has twenty.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn thirty_upgrade_at_once_while_others_write() {
    let scratch = first_schema().await;
    let writer = writing(&scratch).await;
    let strict = [("default_transaction_isolation", "serializable")];
    let mut migrators = JoinSet::new();
    for number in 0..30 {
        let backend = match number {
            0..3 => scratch.lent(&scratch.pool_with(1, &strict).await).await,
            3..6 => scratch.connect().await,
            _ => behind_a_pooler(&scratch).await,
        };
        migrators.spawn(async move { backend.migrate().await });
    }
    let backend = scratch.connect().await;
    until_waiting(&scratch, 1).await;
    for _ in 0..100 {
        backend.enqueue(&[job("1")]).await.expect("stores");
    }
    writer.close_hard().await.expect("is gone");
    for answer in migrators.join_all().await {
        answer.expect("each is told that the schema is there");
    }
    assert_eq!(schema(&scratch).await, schema(&migrated().await.0).await);
    claim_one(&backend).await;
}

/// The server goes on building for one who is gone, holds up neither who works nor the next one, and leaves no lock.
#[tokio::test]
async fn an_upgrade_that_ends_in_the_middle_blocks_nobody() {
    let scratch = first_schema().await;
    let writer = writing(&scratch).await;
    let dropped = scratch.lent(&scratch.pool(1).await).await;
    until_it_builds(&scratch, dropped.migrate()).await;
    let backend = scratch.connect().await;
    for _ in 0..2 {
        // The fixture's, and this one.
        backend.enqueue(&[job("1")]).await.expect("stores");
        let claimed = claim_one(&backend).await;
        Transitioner::new(&backend).apply(&claimed.execution, &complete("1")).await.expect("settles");
    }
    let locks = held_locks(&scratch);
    until(&locks, 0).await;
    let mut next = backend.migrate();
    tokio::select! {
        answer = &mut next => panic!("it must wait, not {answer:?}"),
        () = until(&locks, 1) => {}
    }
    writer.close_hard().await.expect("is gone");
    next.await.expect("is not blocked");
    assert_eq!(schema(&scratch).await, schema(&migrated().await.0).await);
    dropped.migrate().await.expect("nor is the pool of the one that was dropped");
    until(&locks, 0).await;
}

/// As whoever died in the middle, or right after it, has left it.
#[tokio::test]
async fn an_index_that_was_left_over_is_built_anew() {
    for cut in [true, false] {
        let scratch = first_schema().await;
        let mut builder = connection().await;
        let writer = if cut { Some(writing(&scratch).await) } else { None };
        let building = migrations(&scratch.schema).remove(1);
        let [drop, create] = building.statements()[..] else { panic!("{building:?}") };
        sqlx::raw_sql(AssertSqlSafe(drop)).execute(&mut builder).await.expect("there is nothing to drop");
        if cut {
            sqlx::raw_sql("SET lock_timeout = '50ms'").execute(&mut builder).await.expect("sets");
        }
        let built = sqlx::raw_sql(AssertSqlSafe(create)).execute(&mut builder).await;
        assert_eq!(built.is_err(), cut, "{built:?}");
        until(&invalid_indexes(&scratch), i64::from(cut)).await;
        if let Some(writer) = writer {
            writer.close_hard().await.expect("is gone");
        }
        scratch.connect().await.migrate().await.expect("migrates");
        assert_eq!(schema(&scratch).await, schema(&migrated().await.0).await);
        until(&invalid_indexes(&scratch), 0).await;
    }
}

/// Each later migration runs on these rows as well, so the file stays as it is for ever.
#[tokio::test]
async fn jobs_of_the_first_schema_go_on() {
    let scratch = first_schema().await;
    let backend = scratch.connect().await;
    backend.migrate().await.expect("migrates");
    until(&invalid_indexes(&scratch), 0).await;
    assert_eq!(schema(&scratch).await, schema(&migrated().await.0).await, "the same as a new one");
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
    let suspended = page.items.iter().find(|job| job.state() == JobState::Suspended).expect("one");
    assert_eq!(
        backend.time_out_waits(limit(10)).await.expect("wakes"),
        [suspended.id()],
        "nothing it waits for is known"
    );
    let suspended = backend.get(suspended.id()).await.expect("reads").expect("a job");
    assert_eq!(suspended.state(), JobState::Waiting);
    let cancel = Transition::Cancel { reason: "enough".into() };
    Transitioner::new(&backend).apply(&suspended.execution, &cancel).await.expect("is canceled");
}
