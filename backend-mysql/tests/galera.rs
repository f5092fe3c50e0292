//! A Galera cluster, every node of which is written to: what its nodes do not know of each other, and what holds all the same.
//!
//! Nothing starts one unless it is told: `eval "$(scripts/servers.sh up galera)"`.

mod common;

use std::process::ExitCode;
use std::time::Duration;

use backend_mysql::MysqlBackend;
use backend_mysql::MysqlOptions;
use common::*;
use libtest_mimic::Arguments;
use libtest_mimic::Failed;
use libtest_mimic::Trial;
use queue_core::*;
use sqlx::Connection;
use sqlx::Executor;
use sqlx::MySqlConnection;
use sqlx::Row;
use tokio::task::JoinHandle;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let is_there = std::env::var_os("TEST_GALERA_URL").is_some();
    let trial = |name: &str, run: fn(Cluster) -> BoxFuture| {
        let body = move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
            runtime.block_on(async {
                let cluster = Cluster::new().await;
                // A panic of its own, so that it is this test's failure alone.
                let ended = tokio::time::timeout(Duration::from_secs(60), tokio::spawn(run(cluster))).await;
                ended?.map_err(|panic| Failed::from(panic.to_string()))
            })
        };
        let reason = if is_there { "" } else { "TEST_GALERA_URL is not set" };
        Trial::test(name, body).with_ignored_flag(!is_there).with_kind(reason)
    };
    let trials = vec![
        trial("what_one_node_answered_the_others_know", |cluster| {
            Box::pin(what_one_node_answered_the_others_know(cluster))
        }),
        trial("a_pool_that_would_read_the_past_is_refused", |cluster| {
            Box::pin(a_pool_that_would_read_the_past_is_refused(cluster))
        }),
        trial("a_lost_worker_begins_no_step", |cluster| Box::pin(a_lost_worker_begins_no_step(cluster))),
        trial("an_event_finds_a_wait_that_another_node_registers", |cluster| {
            Box::pin(an_event_finds_a_wait_that_another_node_registers(cluster))
        }),
        trial("a_lock_is_the_node_s_own", |cluster| Box::pin(a_lock_is_the_node_s_own(cluster))),
        trial("a_key_is_taken_at_the_commit", |cluster| Box::pin(a_key_is_taken_at_the_commit(cluster))),
        trial("a_heartbeat_elsewhere_undoes_a_transaction", |cluster| {
            Box::pin(a_heartbeat_elsewhere_undoes_a_transaction(cluster))
        }),
        trial("a_node_without_the_others_answers_nothing", |cluster| {
            Box::pin(a_node_without_the_others_answers_nothing(cluster))
        }),
        trial("all_nodes_migrate_at_once", |cluster| Box::pin(all_nodes_migrate_at_once(cluster))),
        trial("nothing_is_prepared_in_a_transaction", |cluster| {
            Box::pin(nothing_is_prepared_in_a_transaction(cluster))
        }),
        trial("what_was_undone_in_silence_is_not_committed", |cluster| {
            Box::pin(what_was_undone_in_silence_is_not_committed(cluster))
        }),
        trial("each_node_has_its_own_clock", |cluster| Box::pin(each_node_has_its_own_clock(cluster))),
    ];
    // They keep nodes busy, or from answering.
    libtest_mimic::run(&Arguments { test_threads: Some(1), ..arguments }, trials).exit_code()
}

type BoxFuture = std::pin::Pin<Box<dyn Future<Output = ()> + Send>>;

/// A database on the cluster, and a handle for each node.
struct Cluster {
    database: Database,
    nodes: Vec<MysqlBackend>,
}

impl Cluster {
    async fn new() -> Self {
        let (database, backend) = Database::migrated(Server::Galera).await;
        backend.close().await;
        database.run("CREATE TABLE many (number INT, text VARCHAR(100))").await;
        database.run("INSERT INTO many SELECT 1, REPEAT('x', 100) FROM seq_1_to_5000").await;
        let mut nodes = Vec::new();
        for node in 0..3 {
            nodes.push(MysqlBackend::connect_with(options(&database, node)).await.expect("connects"));
        }
        Self { database, nodes }
    }

    /// A connection beside the handles.
    async fn session(&self, node: usize) -> MySqlConnection {
        let location = Server::Galera.nodes()[node].clone().database(&self.database.name);
        let mut session = MySqlConnection::connect_with(&location).await.expect("connects");
        session.execute("SET wsrep_sync_wait = 7").await.expect("waits for the other nodes from now on");
        session
    }

    /// Has the other nodes write for a second or two what this one has written at once: they learn of nothing that it writes after that until then.
    async fn hold_up_others(&self, node: usize) {
        // All rows are alike and have no key, so that each is looked for among all.
        self.session(node).await.execute("UPDATE many SET number = number + 1").await.expect("writes");
    }

    /// Whether a node has yet to write what another one has.
    async fn is_behind(&self, node: usize, other: usize) -> bool {
        self.committed_by(node).await < self.committed_by(other).await
    }

    /// The number of the last transaction that a node has written.
    async fn committed_by(&self, node: usize) -> u64 {
        let mut session = self.session(node).await;
        session.execute("SET wsrep_sync_wait = 0").await.expect("does not wait");
        let row = session.fetch_one("SHOW STATUS LIKE 'wsrep_last_committed'").await.expect("a status");
        row.get::<String, _>(1).parse().expect("a number")
    }

    async fn discard(self) {
        for node in self.nodes {
            node.close().await;
        }
        self.database.discard().await;
    }
}

fn options(database: &Database, node: usize) -> MysqlOptions {
    MysqlOptions::connection(Server::Galera.nodes()[node].clone().database(&database.name)).expect("a database")
}

/// Stops whoever writes a step on a node, after all that is locked and written before it, until it is opened: appliers of what other
/// nodes have written run no triggers.
struct Gate(MySqlConnection);

impl Gate {
    async fn close(cluster: &Cluster, node: usize) -> Self {
        let trigger = "CREATE TRIGGER gate BEFORE INSERT ON fenced_steps FOR EACH ROW BEGIN \
                       DO GET_LOCK(CONCAT('gate ', DATABASE()), 60); DO RELEASE_LOCK(CONCAT('gate ', DATABASE())); END";
        let mut session = cluster.session(node).await;
        session.execute(trigger).await.expect("a trigger");
        session.execute("DO GET_LOCK(CONCAT('gate ', DATABASE()), 0)").await.expect("is closed");
        Self(session)
    }

    async fn is_reached<T>(&mut self, by: &JoinHandle<T>) {
        let text = "SELECT 1 FROM information_schema.processlist WHERE db = DATABASE() AND state = 'User lock'";
        while self.0.fetch_optional(text).await.expect("a list").is_none() {
            assert!(!by.is_finished(), "it went another way");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn open(mut self) {
        self.0.execute("DO RELEASE_LOCK(CONCAT('gate ', DATABASE()))").await.expect("is open");
    }
}

fn spawn<T: Send + 'static>(call: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(call)
}

async fn what_one_node_answered_the_others_know(cluster: Cluster) {
    let [first, second, third] = &cluster.nodes[..] else { panic!("three nodes") };
    cluster.hold_up_others(0).await;
    let new = keyed("k");
    first.enqueue(std::slice::from_ref(&new)).await.expect("stores");
    assert!(cluster.is_behind(1, 0).await && cluster.is_behind(2, 0).await, "else this shows nothing");
    assert!(second.get(new.id).await.expect("reads").is_some());
    cluster.hold_up_others(1).await;
    let claimed = claim_one(second).await;
    assert!(cluster.is_behind(2, 1).await, "else this shows nothing");
    Transitioner::new(third)
        .apply(&claimed.execution, &complete("1"))
        .await
        .expect("settles what was claimed elsewhere");
    cluster.hold_up_others(2).await;
    let again = keyed("k");
    assert_eq!(
        first.enqueue(std::slice::from_ref(&again)).await.expect("stores"),
        [Enqueued::New(again.id)],
        "the key is free"
    );
    cluster.discard().await;
}

async fn a_pool_that_would_read_the_past_is_refused(cluster: Cluster) {
    let pool = cluster.database.pool_of(1, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").await;
    assert_error(MysqlBackend::from_pool(pool).await.map(drop), ErrorKind::Invalid);
    let pool = cluster.database.pool_of(1, "SET SESSION wsrep_sync_wait = 1").await;
    MysqlBackend::from_pool(pool).await.expect("is taken").close().await;
    cluster.discard().await;
}

/// The row of the job is locked on the worker's node, and changed on another one.
async fn a_lost_worker_begins_no_step(cluster: Cluster) {
    let [first, second, _] = &cluster.nodes[..] else { panic!("three nodes") };
    first.enqueue(&[job("1")]).await.expect("stores");
    let claimed = claim_one(first).await;
    let mut gate = Gate::close(&cluster, 0).await;
    let (handle, seen) = (first.clone(), claimed.execution.clone());
    let begins = spawn(async move { begin_step(&handle, &seen, &name("s")).await });
    gate.is_reached(&begins).await;
    cluster.hold_up_others(1).await;
    let cancel = Transition::Cancel { reason: "no longer wanted".into() };
    Transitioner::new(second).apply(&claimed.execution, &cancel).await.expect("is canceled");
    assert!(cluster.is_behind(0, 1).await, "else this shows nothing");
    gate.open().await;
    let answer = begins.await.expect("ends");
    assert!(matches!(answer, Err(StepError::Transition(TransitionError::Conflict(_)))), "{answer:?}");
    assert_eq!(first.steps(claimed.id()).await.expect("reads"), []);
    cluster.discard().await;
}

/// The row of the event is locked on the worker's node, and the event emitted on another one.
async fn an_event_finds_a_wait_that_another_node_registers(cluster: Cluster) {
    for before in [None, Some(Delay::ZERO)] {
        let [first, second, _] = &cluster.nodes[..] else { panic!("three nodes") };
        let key = if before.is_some() { "old" } else { "new" };
        first.enqueue(&[job("1"), job("2")]).await.expect("stores");
        let mut claimed = first.claim(&request(2)).await.expect("claims").jobs;
        let waiter = claimed.pop().expect("a job").execution;
        // There is a row for it: of who waits already, or of an event that is over.
        match before {
            Some(keep) => drop(first.emit(&event(key, keep)).await.expect("emits")),
            None => drop(wait_for(first, &claimed[0].execution, key, When::At(Timestamp::MAX)).await),
        }
        let mut gate = Gate::close(&cluster, 0).await;
        let (handle, seen, awaited) = (first.clone(), waiter.clone(), key.to_owned());
        let waits = spawn(async move { wait_for(&handle, &seen, &awaited, When::At(Timestamp::MAX)).await });
        gate.is_reached(&waits).await;
        cluster.hold_up_others(1).await;
        second.emit(&event(key, Delay::MAX)).await.expect("emits");
        assert!(cluster.is_behind(0, 1).await, "else this shows nothing");
        gate.open().await;
        waits.await.expect("ends");
        let step = first.steps(waiter.id).await.expect("reads").remove(0);
        assert_eq!(step.state, StepState::Done(Json::from_text("1").expect("JSON")), "{key}");
        cluster.database.run("DROP TRIGGER gate").await;
    }
    cluster.discard().await;
}

/// What the suite's cases about locked rows show is not so: a claim takes what another node has locked, and undoes who has locked it.
async fn a_lock_is_the_node_s_own(cluster: Cluster) {
    let [first, second, _] = &cluster.nodes[..] else { panic!("three nodes") };
    first.enqueue(&[job("1")]).await.expect("stores");
    let mut holder = cluster.session(0).await;
    holder.execute("START TRANSACTION").await.expect("begins");
    holder.execute("UPDATE fenced_jobs SET tags = 'mine'").await.expect("is written, and locked");
    assert_eq!(first.claim(&request(1)).await.expect("answers").jobs, [], "on this node it is locked");
    let claimed = claim_one(second).await;
    let refused = holder.execute("COMMIT").await.expect_err("is undone");
    let refused = refused.as_database_error().expect("the server's").code();
    assert_eq!(refused.as_deref(), Some("40001"), "as the victim of a deadlock");
    assert_eq!(first.get(claimed.id()).await.expect("reads"), Some(claimed));
    cluster.discard().await;
}

/// Who wants a key that an open transaction on another node took does not wait for its end: whoever commits first has it.
async fn a_key_is_taken_at_the_commit(cluster: Cluster) {
    let [first, second, _] = &cluster.nodes[..] else { panic!("three nodes") };
    let (slow, fast) = (keyed("k"), keyed("k"));
    let mut transaction = first.begin().await.expect("begins");
    let answer = first.enqueue_in(&mut transaction, std::slice::from_ref(&slow)).await.expect("answers");
    assert_eq!(answer, [Enqueued::New(slow.id)]);
    assert_eq!(second.enqueue(std::slice::from_ref(&fast)).await.expect("answers"), [Enqueued::New(fast.id)]);
    assert_error(first.commit(transaction).await, ErrorKind::Transient);
    assert_eq!(first.get(slow.id).await.expect("reads"), None);
    let answer = first.enqueue(&[slow]).await.expect("answers");
    assert_eq!(answer, [Enqueued::Duplicate { existing: fast.id }], "repeated, it is told");
    cluster.discard().await;
}

/// So a worker and its transactions are to use one node.
async fn a_heartbeat_elsewhere_undoes_a_transaction(cluster: Cluster) {
    let [first, second, _] = &cluster.nodes[..] else { panic!("three nodes") };
    first.enqueue(&[job("1")]).await.expect("stores");
    let claimed = claim_one(first).await;
    let held = Held::of(&claimed.execution).expect("held");
    let mut transaction = first.begin_for(&claimed.execution).await.expect("begins");
    let end = decide(&claimed.execution, &complete("1"));
    let settled = first.update_if_current_in(&mut transaction, end.id, &end.current, &end.patch).await;
    assert!(matches!(settled, Ok(Update::Applied(_))), "{settled:?}");
    assert_eq!(first.extend_leases(std::slice::from_ref(&held), lease()).await.expect("answers"), [Beat::Busy], "here");
    assert_eq!(second.extend_leases(&[held], lease()).await.expect("answers"), [Beat::Extended], "and elsewhere");
    assert_error(first.commit(transaction).await, ErrorKind::Transient);
    let job = first.get(claimed.id()).await.expect("reads").expect("a job");
    assert_eq!((job.state(), job.execution.revision), (JobState::Running, claimed.execution.revision));
    Transitioner::new(first).apply(&job.execution, &complete("1")).await.expect("repeated, it settles");
    cluster.discard().await;
}

async fn a_node_without_the_others_answers_nothing(cluster: Cluster) {
    let [first, _, third] = &cluster.nodes[..] else { panic!("three nodes") };
    third.enqueue(&[job("1")]).await.expect("stores");
    let claimed = claim_one(third).await;
    let held = Held::of(&claimed.execution).expect("held");
    // The very answer of a node that is not among the greater part of the cluster.
    let mut session = cluster.session(2).await;
    session.execute("SET GLOBAL wsrep_reject_queries = ALL").await.expect("answers no more");
    let answers = [
        third.enqueue(&[job("1")]).await.map(drop),
        third.get(claimed.id()).await.map(drop),
        third.claim(&request(1)).await.map(drop),
        third.extend_leases(&[held], lease()).await.map(drop),
    ];
    let settled = Transitioner::new(third).apply(&claimed.execution, &complete("1")).await;
    session.execute("SET GLOBAL wsrep_reject_queries = NONE").await.expect("answers again");
    for answer in answers {
        assert_error(answer, ErrorKind::Unavailable);
    }
    let Err(TransitionError::Backend(error)) = settled else { panic!("{settled:?}") };
    assert_error::<()>(Err(error), ErrorKind::Unavailable);
    assert_eq!(first.get(claimed.id()).await.expect("reads").as_ref(), Some(&claimed));
    Transitioner::new(third).apply(&claimed.execution, &complete("1")).await.expect("settles, on other connections");
    cluster.discard().await;
}

async fn all_nodes_migrate_at_once(cluster: Cluster) {
    let text = "DROP TABLE fenced_steps, fenced_events, fenced_jobs, fenced_schema";
    for _ in 0..5 {
        cluster.database.run(text).await;
        let handles = cluster.nodes.iter().cycle().take(6).cloned();
        let migrating: Vec<_> = handles.map(|node| spawn(async move { node.migrate().await })).collect();
        for node in migrating {
            node.await.expect("ends").expect("migrates");
        }
        for node in &cluster.nodes {
            node.enqueue(&[job("1")]).await.expect("stores");
        }
    }
    cluster.discard().await;
}

/// Leases and due times are judged by the node that is asked.
async fn each_node_has_its_own_clock(cluster: Cluster) {
    let [first, ..] = &cluster.nodes[..] else { panic!("three nodes") };
    let location = Server::Galera.nodes()[1].clone().database(&cluster.database.name);
    // The clock of one session stands for that of its node.
    let ahead = "SET SESSION wsrep_sync_wait = 1, timestamp = UNIX_TIMESTAMP() + 3600";
    let pool = sqlx::mysql::MySqlPoolOptions::new()
        .max_connections(1)
        .after_connect(move |connection, _| Box::pin(async move { connection.execute(ahead).await.map(drop) }))
        .connect_with(location)
        .await
        .expect("a pool");
    let ahead = MysqlBackend::from_pool(pool).await.expect("a handle");
    first.enqueue(&[job("1")]).await.expect("stores");
    let claimed = claim_one(first).await;
    assert_eq!(first.stale(None, limit(9)).await.expect("reads").items, []);
    assert_eq!(ahead.stale(None, limit(9)).await.expect("reads").items, [claimed.execution], "an hour too early");
    ahead.close().await;
    cluster.discard().await;
}

/// A node that undoes a transaction while it prepares a statement of it tells nobody.
async fn nothing_is_prepared_in_a_transaction(cluster: Cluster) {
    let mut log = cluster.session(0).await;
    log.execute("SET GLOBAL log_output = 'TABLE'").await.expect("is set");
    log.execute("SET GLOBAL general_log = ON").await.expect("writes down what it is told");
    let handle = &MysqlBackend::connect_with(options(&cluster.database, 0)).await.expect("connects");
    every_call(handle).await;
    log.execute("SET GLOBAL general_log = OFF").await.expect("no longer");
    let text = "SELECT CAST(thread_id AS SIGNED), CAST(command_type AS CHAR), CAST(argument AS CHAR) FROM mysql.general_log WHERE thread_id IN \
                (SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID())";
    let rows = log.fetch_all(text).await.expect("a log");
    let (mut open, mut ended) = (std::collections::HashSet::new(), 0);
    for row in &rows {
        let (session, command, text) = (row.get::<i64, _>(0), row.get::<String, _>(1), row.get::<String, _>(2));
        match command.as_str() {
            "Query" if text.contains("START TRANSACTION") => drop(open.insert(session)),
            "Query" if text.contains("COMMIT") || text.contains("ROLLBACK") => {
                ended += usize::from(open.remove(&session))
            }
            "Prepare" => assert!(!open.contains(&session), "{text}"),
            _ => {}
        }
    }
    assert!(ended > 12, "else this shows nothing: {ended} transactions of {} lines", rows.len());
    handle.close().await;
    cluster.discard().await;
}

/// All that begins a transaction, so that each of its statements is run.
async fn every_call(handle: &MysqlBackend) {
    let claim = async |payload: &str| {
        handle.enqueue(&[job(payload)]).await.expect("stores");
        claim_one(handle).await
    };
    let (waits, late, steps, goes_on) = (claim("1").await, claim("2").await, claim("3").await, claim("4").await);
    wait_for(handle, &waits.execution, "e", When::At(Timestamp::MAX)).await;
    handle.emit(&event("e", Delay::ZERO)).await.expect("emits");
    wait_for(handle, &late.execution, "never", When::At(Timestamp::MIN)).await;
    assert_eq!(handle.time_out_waits(limit(9)).await.expect("ends waits"), [late.id()]);
    begin_step(handle, &steps.execution, &name("s")).await.expect("begins");
    let held = Held::of(&steps.execution).expect("held");
    assert_eq!(handle.extend_leases(&[held], lease()).await.expect("renews"), [Beat::Extended]);
    let end = decide(&goes_on.execution, &complete("1"));
    handle.hand_over(&end, &job("5")).await.expect("goes on");
    let mut transaction = handle.begin().await.expect("begins");
    handle.enqueue_in(&mut transaction, &[keyed("k")]).await.expect("stores");
    let end = decide(&steps.execution, &complete("1"));
    let settled = handle.update_if_current_in(&mut transaction, end.id, &end.current, &end.patch).await;
    assert!(matches!(settled, Ok(Update::Applied(_))), "{settled:?}");
    handle.commit(transaction).await.expect("commits");
    handle.purge(JobState::Completed, Delay::ZERO, limit(9)).await.expect("purges");
    handle.purge_events(limit(9)).await.expect("purges");
}

/// What an application prepares in its transaction can be the moment in which a node undoes it. Here it is undone by hand.
async fn what_was_undone_in_silence_is_not_committed(cluster: Cluster) {
    let [first, ..] = &cluster.nodes[..] else { panic!("three nodes") };
    let mut transaction = first.begin().await.expect("begins");
    first.enqueue_in(&mut transaction, &[job("1")]).await.expect("stores");
    transaction.execute("ROLLBACK").await.expect("is undone");
    let error = first.commit(transaction).await.expect_err("is not there any more");
    assert_eq!((error.kind(), error.certainty()), (ErrorKind::Transient, Certainty::Unknown), "{error}");
    first.enqueue(&[job("2")]).await.expect("stores, on another connection");
    cluster.discard().await;
}
