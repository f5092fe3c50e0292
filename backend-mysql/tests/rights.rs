//! What each kind of program needs to be allowed, and that it is enough.

mod common;

use backend_mysql::MysqlBackend;
use common::*;
use queue_core::*;
use sqlx::Connection;
use sqlx::Executor;
use sqlx::MySqlConnection;
use sqlx::mysql::MySqlConnectOptions;
use sqlx::mysql::MySqlPoolOptions;

/// The grants of the crate's documentation.
const GRANTS: [(&str, &str); 6] = [
    ("migrate", "GRANT SELECT, INSERT, UPDATE, CREATE, ALTER, INDEX, REFERENCES, DROP ON {database}.* TO {user}"),
    (
        "work",
        "GRANT SELECT ON {database}.fenced_schema TO {user}; GRANT SELECT, UPDATE ON {database}.fenced_jobs TO {user}; \
         GRANT SELECT, INSERT, UPDATE, DELETE ON {database}.fenced_steps TO {user}; \
         GRANT SELECT, INSERT, UPDATE, DELETE ON {database}.fenced_events TO {user}",
    ),
    (
        "produce",
        "GRANT SELECT ON {database}.fenced_schema TO {user}; GRANT SELECT, INSERT ON {database}.fenced_jobs TO {user}",
    ),
    (
        "emit",
        "GRANT SELECT ON {database}.fenced_schema TO {user}; GRANT SELECT, UPDATE ON {database}.fenced_jobs TO {user}; \
         GRANT SELECT, UPDATE ON {database}.fenced_steps TO {user}; \
         GRANT SELECT, INSERT, UPDATE, DELETE ON {database}.fenced_events TO {user}",
    ),
    (
        "read",
        "GRANT SELECT ON {database}.fenced_schema TO {user}; GRANT SELECT ON {database}.fenced_jobs TO {user}; \
         GRANT SELECT ON {database}.fenced_steps TO {user}",
    ),
    (
        "purge",
        "GRANT SELECT ON {database}.fenced_schema TO {user}; GRANT SELECT, DELETE ON {database}.fenced_jobs TO {user}; \
         GRANT SELECT, DELETE ON {database}.fenced_events TO {user}",
    ),
];

/// Names of users have at most 32 characters.
fn user(database: &Database, role: &str) -> String {
    let (_, distinct) = database.name.split_at("qc_0123456789ab_".len());
    format!("{role}_{distinct}")
}

fn location(database: &Database, role: &str) -> MySqlConnectOptions {
    let server = database.server.options();
    MySqlConnectOptions::new()
        .host(server.get_host())
        .port(server.get_port())
        .username(&user(database, role))
        .database(&database.name)
}

async fn grant(database: &Database, role: &str, grants: &str) {
    let grants = grants.replace("{database}", &database.name).replace("{user}", &user(database, role));
    database.server.run(&grants).await.expect("is granted");
}

/// A handle of a user who may do this, and nothing else.
async fn as_role(database: &Database, role: &str) -> MysqlBackend {
    let (_, grants) = GRANTS.iter().find(|(name, _)| *name == role).expect("a role");
    database.server.run(&format!("CREATE USER {}", user(database, role))).await.expect("a user");
    grant(database, role, grants).await;
    let pool = MySqlPoolOptions::new().max_connections(2).connect_with(location(database, role)).await.expect("a pool");
    MysqlBackend::from_pool(pool).await.expect("a handle")
}

#[tokio::test]
async fn each_role_can_do_its_work_and_no_more() {
    for server in Server::all() {
        println!("on {server}");
        let database = Database::new(server).await;
        let migrate = as_role(&database, "migrate").await;
        migrate.migrate().await.expect("creates the tables");
        let (work, produce) = (as_role(&database, "work").await, as_role(&database, "produce").await);
        let (read, purge) = (as_role(&database, "read").await, as_role(&database, "purge").await);
        let emit = as_role(&database, "emit").await;
        for backend in [&work, &produce, &emit, &read, &purge] {
            backend.migrate().await.expect("there is nothing to do");
        }
        each_does_its_work(&work, &produce, &read, &purge).await;
        in_a_transaction(&database, &produce, &work).await;
        steps_and_events(&database, [&work, &produce, &emit, &read, &purge]).await;
        let foreign = "CREATE TABLE {database}.foreign_table (id INT)".replace("{database}", &database.name);
        for backend in [work, produce, emit, read, purge] {
            let mut connection = backend.begin().await.expect("begins");
            connection.execute(sqlx::AssertSqlSafe(foreign.clone())).await.expect_err("creates nothing");
            drop(connection);
            backend.close().await;
        }
        migrate.close().await;
        let users: Vec<_> = GRANTS.iter().map(|(role, _)| user(&database, role)).collect();
        server.run(&format!("DROP USER {}", users.join(", "))).await.expect("drops");
        database.discard().await;
    }
}

async fn each_does_its_work(work: &MysqlBackend, produce: &MysqlBackend, read: &MysqlBackend, purge: &MysqlBackend) {
    let new = [keyed("k"), job("2")];
    produce.enqueue(&new).await.expect("stores");
    let again = produce.enqueue(&[new[0].clone(), keyed("k")]).await.expect("answers");
    assert_eq!(again, [Enqueued::Existing(new[0].id), Enqueued::Duplicate { existing: new[0].id }]);
    let claimed = work.claim(&request(2)).await.expect("claims").jobs;
    let held: Vec<_> = claimed.iter().filter_map(|job| Held::of(&job.execution)).collect();
    assert_eq!(work.extend_leases(&held, lease()).await.expect("beats"), [Beat::Extended; 2]);
    let updates: Vec<_> = claimed.iter().map(|job| decide(&job.execution, &complete("1"))).collect();
    work.update_many_if_current(&updates).await.expect("settles");
    assert_eq!(work.claimed_by(&worker(), Delay::ZERO, None, limit(9)).await.expect("lists").items, []);
    assert_eq!(work.stale(None, limit(9)).await.expect("lists").items, []);
    assert_eq!(read.counts().await.expect("counts")[0].jobs, 2);
    assert!(read.get(new[0].id).await.expect("reads").is_some());
    assert_eq!(purge.purge(JobState::Completed, Delay::ZERO, limit(9)).await.expect("purges"), 2);

    produce.enqueue(&[job("1")]).await.expect("stores");
    assert_error(read.enqueue(&[job("1")]).await, ErrorKind::Permanent);
    assert_error(read.claim(&request(1)).await, ErrorKind::Permanent);
    assert_error(produce.claim(&request(1)).await, ErrorKind::Permanent);
    assert_error(purge.claim(&request(1)).await, ErrorKind::Permanent);
    assert_error(work.enqueue(&[job("1")]).await, ErrorKind::Permanent);
    let claimed = claim_one(work).await;
    Transitioner::new(work).apply(&claimed.execution, &complete("1")).await.expect("settles");
    assert_error(work.purge(JobState::Completed, Delay::ZERO, limit(9)).await, ErrorKind::Permanent);
    assert_error(produce.purge(JobState::Completed, Delay::ZERO, limit(9)).await, ErrorKind::Permanent);
    assert_eq!(purge.purge(JobState::Completed, Delay::ZERO, limit(9)).await.expect("purges"), 1);
}

/// Also what a producer asks when somebody was faster whom its snapshot does not show.
async fn in_a_transaction(database: &Database, produce: &MysqlBackend, work: &MysqlBackend) {
    let mut session = MySqlConnection::connect_with(&location(database, "produce")).await.expect("connects");
    let begin = "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ; START TRANSACTION WITH CONSISTENT SNAPSHOT";
    let connection = &mut session;
    connection.execute(begin).await.expect("begins");
    let faster = keyed("faster");
    produce.enqueue(std::slice::from_ref(&faster)).await.expect("stores");
    let answer = produce.enqueue_in(connection, &[keyed("faster"), job("1")]).await.expect("answers");
    assert_eq!(answer[0], Enqueued::Duplicate { existing: faster.id });
    connection.execute("COMMIT").await.expect("commits");

    for claimed in work.claim(&request(2)).await.expect("claims").jobs {
        let end = decide(&claimed.execution, &complete("1"));
        let mut transaction = work.begin_for(&claimed.execution).await.expect("begins");
        let answer = work.update_if_current_in(&mut transaction, end.id, &end.current, &end.patch).await;
        assert!(matches!(answer, Ok(Update::Applied(_))), "{answer:?}");
        work.commit(transaction).await.expect("commits");
    }
}

async fn steps_and_events(database: &Database, roles: [&MysqlBackend; 5]) {
    let [work, produce, emit, read, purge] = roles;
    produce.enqueue(&[job("1"), job("2")]).await.expect("stores");
    let claimed = work.claim(&request(2)).await.expect("claims").jobs;
    begin_step(work, &claimed[0].execution, &name("s")).await.expect("begins");
    for (job, until) in claimed.iter().zip([When::At(Timestamp::MAX), When::Now]) {
        wait_for(work, &job.execution, "e", until).await;
    }
    assert_eq!(work.time_out_waits(limit(9)).await.expect("wakes"), [claimed[1].id()]);
    let emitted = event("e", Delay::ZERO);
    assert_error(read.emit(&emitted).await, ErrorKind::Permanent);
    assert_error(produce.emit(&emitted).await, ErrorKind::Permanent);
    assert_error(purge.emit(&emitted).await, ErrorKind::Permanent);
    assert_eq!(emit.emit(&emitted).await.expect("emits"), Emitted::New { woken: 1 });
    assert_error(emit.enqueue(&[job("1")]).await, ErrorKind::Permanent);
    assert_eq!(purge.purge_events(limit(9)).await.expect("purges"), 1);
    assert_eq!(work.purge_events(limit(9)).await.expect("purges"), 0);
    let claimed = claim_one(work).await;
    assert!(!read.steps(claimed.id()).await.expect("reads").is_empty());
    let mut hand_over = HandOver::new(&claimed.execution, None, job("3")).expect("legal");
    let refused = hand_over.submit(work).await;
    assert!(matches!(refused, Err(TransitionError::Backend(error)) if error.kind() == ErrorKind::Permanent));
    grant(database, "work", "GRANT INSERT ON {database}.fenced_jobs TO {user}").await;
    hand_over.submit(work).await.expect("hands over");
    let purged = purge.purge(JobState::Completed, Delay::ZERO, limit(9)).await.expect("purges");
    assert_eq!(purged, 3, "and the steps with them");
}

/// A user who may not look at the tables is told so, not that there are none.
#[tokio::test]
async fn a_user_without_any_right() {
    on_each_server(async |database, _| {
        let user = user(database, "none");
        database.server.run(&format!("CREATE USER {user}")).await.expect("a user");
        let pool = MySqlPoolOptions::new().max_connections(1).connect_lazy_with(location(database, "none"));
        assert_error(MysqlBackend::from_pool(pool).await.map(drop), ErrorKind::Permanent);
        database.server.run(&format!("DROP USER {user}")).await.expect("drops");
    })
    .await;
}
