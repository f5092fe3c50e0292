//! What each kind of program needs to be allowed, and that it is enough.

mod common;

use common::*;
use queue_core::*;
use sqlx::Connection;
use sqlx::PgConnection;
use sqlx::postgres::PgPoolOptions;

/// A handle of a role of these rights, which are its only ones.
async fn as_role(scratch: &Scratch, role: &str) -> backend_postgres::PostgresBackend {
    let role = format!("{}_{role}", scratch.schema);
    let options = application().username(&role).application_name(scratch.schema.as_str());
    let pool = PgPoolOptions::new().max_connections(2).connect_with(options).await.expect("a pool");
    scratch.lent(&pool).await
}

/// The grants of the crate's documentation. Nobody but the first may create anything.
const GRANTS: &str = "
    GRANT CREATE ON DATABASE {database} TO {schema}_migrate;
    GRANT USAGE ON SCHEMA {schema} TO {schema}_work, {schema}_produce, {schema}_emit, {schema}_read, {schema}_purge;
    GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {schema}_work, {schema}_produce, {schema}_emit, {schema}_read, {schema}_purge;
    GRANT INSERT ON {schema}.jobs TO {schema}_produce;
    GRANT UPDATE ON {schema}.jobs TO {schema}_work;
    GRANT INSERT, UPDATE ON {schema}.steps TO {schema}_work;
    GRANT INSERT, UPDATE, DELETE ON {schema}.events TO {schema}_work;
    GRANT UPDATE ON {schema}.jobs, {schema}.steps TO {schema}_emit;
    GRANT INSERT, UPDATE ON {schema}.events TO {schema}_emit;
    GRANT UPDATE, DELETE ON {schema}.jobs, {schema}.events TO {schema}_purge;";

const ROLES: [&str; 6] = ["migrate", "work", "produce", "emit", "read", "purge"];

#[tokio::test]
async fn each_role_can_do_its_work_and_no_more() {
    let scratch = Scratch::new();
    for role in ROLES {
        scratch.run(&format!("CREATE ROLE {{schema}}_{role} LOGIN")).await;
    }
    let database: String = sqlx::query_scalar("SELECT current_database()::text")
        .fetch_one(&mut connection().await)
        .await
        .expect("answers");
    let (first, rest) = GRANTS.split_once(';').expect("several grants");
    scratch.run(&first.replace("{database}", &format!("\"{database}\""))).await;
    as_role(&scratch, "migrate").await.migrate().await.expect("creates the schema and what is in it");
    scratch.run(rest).await;

    let (work, produce) = (as_role(&scratch, "work").await, as_role(&scratch, "produce").await);
    let (read, purge) = (as_role(&scratch, "read").await, as_role(&scratch, "purge").await);
    let emit = as_role(&scratch, "emit").await;
    for backend in [&work, &produce, &emit, &read, &purge] {
        backend.migrate().await.expect("there is nothing to do");
    }
    let new = [keyed("k"), job("2")];
    produce.enqueue(&new).await.expect("stores");
    let again = produce.enqueue(&[new[0].clone(), keyed("k")]).await.expect("answers");
    assert_eq!(again, [Enqueued::Existing(new[0].id), Enqueued::Duplicate { existing: new[0].id }]);
    let claimed = work.claim(&request(2)).await.expect("claims").jobs;
    let held: Vec<_> = claimed.iter().filter_map(|job| Held::of(&job.execution)).collect();
    assert_eq!(work.extend_leases(&held, lease()).await.expect("beats"), [Beat::Extended; 2]);
    let updates: Vec<_> = claimed.iter().map(decide).collect();
    work.update_many_if_current(&updates).await.expect("settles");
    assert_eq!(work.claimed_by(&worker(), Delay::ZERO, None, limit(9)).await.expect("lists").items, []);
    assert_eq!(read.counts().await.expect("counts")[0].jobs, 2);
    assert!(read.get(new[0].id).await.expect("reads").is_some());
    assert_eq!(purge.purge(JobState::Completed, Delay::ZERO, limit(9)).await.expect("purges"), 2);

    assert_error(read.enqueue(&[job("1")]).await, ErrorKind::Permanent);
    assert_error(read.claim(&request(1)).await, ErrorKind::Permanent);
    assert_error(produce.claim(&request(1)).await, ErrorKind::Permanent);
    assert_error(work.enqueue(&[job("1")]).await, ErrorKind::Permanent);
    assert_error(work.purge(JobState::Completed, Delay::ZERO, limit(9)).await, ErrorKind::Permanent);

    produce.enqueue(&[job("1"), job("2")]).await.expect("stores");
    let claimed = work.claim(&request(2)).await.expect("claims").jobs;
    begin_step(&work, &claimed[0].execution, &name("s")).await.expect("begins");
    for (job, until) in claimed.iter().zip([When::At(Timestamp::MAX), When::Now]) {
        let mut suspension = Suspension::new(&job.execution, name("w"), Some(name("e")), until).expect("legal");
        suspension.submit(&work).await.expect("waits");
    }
    assert_eq!(work.time_out_waits(limit(9)).await.expect("wakes"), [claimed[1].id()]);
    let event = NewEvent { key: name("e"), payload: Json::null(), keep: Delay::ZERO };
    assert_eq!(emit.emit(&event).await.expect("emits"), Emitted::New { woken: 1 });
    assert_eq!(purge.purge_events(limit(9)).await.expect("purges"), 1);
    assert_eq!(work.purge_events(limit(9)).await.expect("purges"), 0);
    let claimed = claim_one(&work).await;
    assert_eq!(read.steps(claimed.id()).await.expect("reads")[0].state, StepState::TimedOut);
    let mut hand_over = HandOver::new(&claimed.execution, None, job("3")).expect("legal");
    let refused = hand_over.submit(&work).await;
    assert!(matches!(refused, Err(TransitionError::Backend(error)) if error.kind() == ErrorKind::Permanent));
    scratch.run("GRANT INSERT ON {schema}.jobs TO {schema}_work").await;
    hand_over.submit(&work).await.expect("hands over");
    assert_eq!(purge.purge(JobState::Completed, Delay::ZERO, limit(9)).await.expect("purges"), 1, "and its steps");
    assert_error(read.emit(&event).await, ErrorKind::Permanent);
    assert_error(produce.emit(&event).await, ErrorKind::Permanent);

    for backend in [work, produce, emit, read, purge] {
        backend.close().await;
    }
    let mut owner: PgConnection = connection().await;
    sqlx::raw_sql(scratch.text("DROP SCHEMA {schema} CASCADE")).execute(&mut owner).await.expect("drops");
    for role in ROLES {
        let text = format!("DROP OWNED BY {{schema}}_{role}; DROP ROLE {{schema}}_{role}");
        sqlx::raw_sql(scratch.text(&text)).execute(&mut owner).await.expect("drops");
    }
    owner.close().await.expect("closes");
}

/// A role that may not look into the schema is told so when it connects, not that there is none.
#[tokio::test]
async fn a_role_without_any_right() {
    let (scratch, _backend) = migrated().await;
    scratch.run("CREATE ROLE {schema}_none LOGIN").await;
    let options = application().username(&format!("{}_none", scratch.schema));
    let pool = PgPoolOptions::new().max_connections(1).connect_with(options).await.expect("a pool");
    let refused = backend_postgres::PostgresBackend::from_pool_with(pool.clone(), scratch.options()).await;
    assert_error(refused, ErrorKind::Permanent);
    pool.close().await;
    scratch.run("DROP ROLE {schema}_none").await;
}
