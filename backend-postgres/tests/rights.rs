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
    GRANT USAGE ON SCHEMA {schema} TO {schema}_work, {schema}_produce, {schema}_read, {schema}_purge;
    GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {schema}_work, {schema}_produce, {schema}_read, {schema}_purge;
    GRANT INSERT ON {schema}.jobs TO {schema}_produce;
    GRANT UPDATE ON {schema}.jobs TO {schema}_work;
    GRANT UPDATE, DELETE ON {schema}.jobs TO {schema}_purge;";

const ROLES: [&str; 5] = ["migrate", "work", "produce", "read", "purge"];

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
    for backend in [&work, &produce, &read, &purge] {
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

    for backend in [work, produce, read, purge] {
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
