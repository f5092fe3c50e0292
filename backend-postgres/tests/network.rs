//! How often a call goes to the server and back, and what becomes of it when the network or the server does not let it.

mod common;

use backend_postgres::PostgresBackend;
use common::*;
use queue_conformance::Direction;
use queue_conformance::Proxy;
use queue_core::*;
use sqlx::AssertSqlSafe;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

async fn proxy() -> Proxy {
    let server = application();
    Proxy::start(format!("{}:{}", server.get_host(), server.get_port())).await.expect("a proxy")
}

/// A handle with one connection, through the proxy.
async fn behind(proxy: &Proxy, scratch: &Scratch) -> PostgresBackend {
    let server = application();
    let (user, database) = (server.get_username(), server.get_database().unwrap_or("postgres"));
    let url = format!("postgres://{user}@127.0.0.1:{}/{database}", proxy.port());
    PostgresBackend::connect_with(scratch.options_for(&url).max_connections(1)).await.expect("connects")
}

/// Between two calls the driver tests the connection once, in the background, and the second call waits for that: so two calls of
/// n round trips each are 2n + 1, or one more if the test after the call before was still to come.
fn assert_round_trips(what: &str, of_two_calls: u64, each: u64) {
    assert!((2 * each + 1..=2 * each + 2).contains(&of_two_calls), "{what}: {of_two_calls} in two calls");
}

#[tokio::test]
async fn a_call_is_as_many_round_trips_whatever_the_batch() {
    let (scratch, _backend) = migrated().await;
    let proxy = proxy().await;
    let backend = behind(&proxy, &scratch).await;
    // Statements are prepared the first time that they are used.
    for warm in [true, false] {
        for size in [1, 10, 1000] {
            let jobs: Vec<_> = (0..2 * size).map(|_| job("1")).collect();
            let mut at = proxy.round_trips();
            let mut since = || {
                let (now, before) = (proxy.round_trips(), at);
                at = now;
                now - before
            };
            for half in jobs.chunks(size) {
                backend.enqueue(half).await.expect("stores");
            }
            let enqueued = since();
            let mut claimed = Vec::new();
            for _ in 0..2 {
                claimed.push(backend.claim(&request(size)).await.expect("claims").jobs);
            }
            let claims = since();
            assert!(claimed.iter().all(|jobs| jobs.len() == size));
            for jobs in &claimed {
                let held: Vec<_> = jobs.iter().filter_map(|job| Held::of(&job.execution)).collect();
                backend.extend_leases(&held, lease()).await.expect("beats");
            }
            let beats = since();
            for jobs in &claimed {
                let updates: Vec<_> = jobs.iter().map(decide).collect();
                backend.update_many_if_current(&updates).await.expect("settles");
            }
            let settles = since();
            if warm {
                continue;
            }
            assert_round_trips("a claim", claims, 1);
            assert_round_trips("a heartbeat", beats, 1);
            assert_round_trips("a settle", settles, 1);
            assert_round_trips("an enqueue", enqueued, if size == 1 { 1 } else { 3 });
        }
    }
}

/// A handle on a pool of one connection, through the proxy, that is not tested before it is used.
async fn lent_behind(proxy: &Proxy, scratch: &Scratch) -> (PgPool, PostgresBackend) {
    let options = scratch.application().host("127.0.0.1").port(proxy.port());
    let pool = PgPoolOptions::new().max_connections(1).test_before_acquire(false).connect_with(options).await;
    let pool = pool.expect("a pool");
    let backend = scratch.lent(&pool).await;
    (pool, backend)
}

/// Waits until the pool has its connection back.
async fn until_idle(pool: &PgPool) {
    while pool.num_idle() < 1 {
        tokio::task::yield_now().await;
    }
}

fn assert_unknown<T: std::fmt::Debug>(answer: Result<T>) {
    let error = answer.expect_err("nobody answered");
    assert_eq!((error.kind(), error.certainty()), (ErrorKind::Unavailable, Certainty::Unknown), "{error}");
}

/// Sends a call whose answer is lost, once `is_there` says that the server has carried it out.
async fn lose_the_answer<T: std::fmt::Debug>(
    (proxy, pool): (&Proxy, &PgPool),
    call: impl Future<Output = Result<T>>,
    is_there: &str,
) {
    until_idle(pool).await;
    proxy.hold(Direction::ToClient);
    let lost = async {
        until(is_there, 1).await;
        proxy.cut();
    };
    let (answer, ()) = tokio::join!(call, lost);
    // Only now: what was kept back must not get through in the moment of the cut.
    proxy.release();
    assert_unknown(answer);
}

/// A13, B10, D9, C21: what may have been written is said to be unknown, and repeating it is exact.
#[tokio::test]
async fn an_answer_that_is_lost() {
    let (scratch, other) = migrated().await;
    let proxy = proxy().await;
    let (pool, backend) = lent_behind(&proxy, &scratch).await;
    let network = (&proxy, &pool);
    let state = |state: &str| {
        let text = "SELECT least(count(*), 1) FROM {schema}.jobs WHERE state = ";
        format!("{}'{state}'", text.replace("{schema}", scratch.schema.as_str()))
    };
    // Prepared before, so that what is lost is the answer to the statement itself.
    let prepare = async || {
        backend.enqueue(&[NewJob { queue: name("x"), ..job("1") }]).await.expect("stores");
        let request = ClaimRequest::new(name("x"), [name("welcome")], worker(), lease(), limit(1)).expect("a request");
        let claimed = backend.claim(&request).await.expect("claims").jobs.remove(0);
        let cancel = Transition::Cancel { reason: "enough".into() };
        Transitioner::new(&backend).apply(&claimed.execution, &cancel).await.expect("settles");
    };
    prepare().await;
    let new = [keyed("k")];
    lose_the_answer(network, backend.enqueue(&new), &state("waiting")).await;
    assert_eq!(backend.enqueue(&new).await.expect("is repeated"), [Enqueued::Existing(new[0].id)]);
    prepare().await;
    lose_the_answer(network, backend.claim(&request(1)), &state("running")).await;
    // Orphaned: released by its worker, its attempt given back.
    let sweep = release_orphans(&backend, &worker(), Delay::ZERO, limit(10), |_| false).await.expect("sweeps");
    assert_eq!(sweep.recovered.len(), 1);
    let claimed = claim_one(&backend).await;
    assert_eq!((claimed.execution.attempt, claimed.execution.fence), (1, 2));
    let mut decision = Decision::new(&claimed.execution, &complete("1")).expect("legal");
    let UpdateRequest { id, current, patch } = decision.request().clone();
    lose_the_answer(network, backend.update_if_current(id, &current, &patch), &state("completed")).await;
    let settled = Transitioner::new(&backend).submit(&mut decision).await.expect("is repeated");
    assert!(matches!(settled, Settled::AlreadyApplied(_)), "{settled:?}");
    assert_eq!(other.get(id).await.expect("reads").expect("a job").state(), JobState::Completed);
}

/// Lost before the commit was sent, for certain nothing is there; lost with the commit under way, nobody knows.
#[tokio::test]
async fn a_transaction_whose_connection_is_lost() {
    for at_commit in [false, true] {
        let (scratch, other) = migrated().await;
        let proxy = proxy().await;
        let (pool, backend) = lent_behind(&proxy, &scratch).await;
        let gate = "CREATE FUNCTION {schema}.gate() RETURNS trigger LANGUAGE plpgsql AS \
                    $$ BEGIN PERFORM FROM {schema}.schema FOR UPDATE; RETURN new; END $$; \
                    CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON {schema}.jobs DEFERRABLE INITIALLY {when} \
                    FOR EACH ROW EXECUTE FUNCTION {schema}.gate()";
        scratch.run(&gate.replace("{when}", if at_commit { "DEFERRED" } else { "IMMEDIATE" })).await;
        let mut gate = connection().await;
        let close = scratch.text("BEGIN; SELECT FROM {schema}.schema FOR UPDATE");
        sqlx::raw_sql(close).execute(&mut gate).await.expect("locks");
        let jobs = [job("1"), job("2")];
        until_idle(&pool).await;
        let lost = async {
            // At the gate, that is in the middle of the insert or of the commit.
            until_waiting(&scratch, 1).await;
            proxy.hold(Direction::ToClient);
            sqlx::raw_sql("ROLLBACK").execute(&mut gate).await.expect("lets it go on");
            until_waiting(&scratch, 0).await;
            let busy = "SELECT count(*) FROM pg_stat_activity WHERE application_name = '{schema}' AND state = 'active'";
            until(&busy.replace("{schema}", scratch.schema.as_str()), 0).await;
            proxy.cut();
        };
        let (answer, ()) = tokio::join!(backend.enqueue(&jobs), lost);
        proxy.release();
        match at_commit {
            true => assert_unknown(answer),
            false => assert_error(answer, ErrorKind::Unavailable),
        }
        let again = backend.enqueue(&jobs).await.expect("is repeated");
        let is_new = again.iter().all(|outcome| matches!(outcome, Enqueued::New(_)));
        let is_there = again.iter().all(|outcome| matches!(outcome, Enqueued::Existing(_)));
        assert_eq!((is_new, is_there), (!at_commit, at_commit), "{again:?}");
        assert!(other.get(jobs[1].id).await.expect("reads").is_some());
    }
}

/// C21: the server ends the connection, while nobody uses it and in the middle of a statement.
#[tokio::test]
async fn a_connection_that_the_server_ends() {
    let (scratch, other) = migrated().await;
    let pool = scratch.pool(1).await;
    let backend = scratch.lent(&pool).await;
    other.enqueue(&[job("1"), job("2")]).await.expect("stores");
    let claimed = backend.claim(&request(2)).await.expect("claims").jobs;
    let mut decisions: Vec<_> =
        claimed.iter().map(|job| Decision::new(&job.execution, &complete("1")).expect("legal")).collect();

    let mut holder = connection().await;
    let lock = "BEGIN; SELECT id FROM {schema}.jobs FOR UPDATE";
    sqlx::raw_sql(scratch.text(lock)).execute(&mut holder).await.expect("locks");
    let end = "SELECT count(*) FROM (SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
               WHERE application_name = '{schema}' AND wait_event_type = 'Lock') AS ended";
    let UpdateRequest { id, current, patch } = decisions[0].request().clone();
    let ended = async {
        until_waiting(&scratch, 1).await;
        let end = end.replace("{schema}", scratch.schema.as_str());
        sqlx::raw_sql(AssertSqlSafe(end)).execute(&mut holder).await.expect("ends it");
    };
    let (answer, ()) = tokio::join!(backend.update_if_current(id, &current, &patch), ended);
    let error = answer.expect_err("the connection is gone");
    assert_eq!((error.kind(), error.certainty()), (ErrorKind::Unavailable, Certainty::Unknown), "{error}");
    sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.expect("lets go");
    for decision in &mut decisions {
        let settled = Transitioner::new(&backend).submit(decision).await.expect("on a new connection");
        assert!(matches!(settled, Settled::Applied(_)), "{settled:?}");
    }
}
