//! Waking workers: of this process, of other processes, when a transaction commits, and without a connection that listens.

mod common;

use std::future::Future;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use backend_postgres::PostgresBackend;
use common::*;
use queue_conformance::Direction;
use queue_conformance::Proxy;
use queue_core::*;

/// Far longer than a wake-up takes; only a missing one waits for it.
const PATIENCE: Duration = Duration::from_secs(20);

type Wait<'a> = Pin<Box<dyn Future<Output = Result<()>> + Send + 'a>>;

/// One poll.
async fn poll(wait: &mut Wait<'_>) -> bool {
    std::future::poll_fn(|context| Poll::Ready(wait.as_mut().poll(context).is_ready())).await
}

async fn waiting(backend: &PostgresBackend) -> Wait<'_> {
    let mut wait: Wait<'_> = Box::pin(async { backend.wait_for_work(&[]).await });
    assert!(!poll(&mut wait).await, "nothing has happened yet");
    wait
}

/// Waits once, so that the handle listens.
async fn listening(scratch: &Scratch, backend: &PostgresBackend) {
    let mut wait = waiting(backend).await;
    let listens = "SELECT count(*) FROM pg_stat_activity WHERE application_name = '{schema}' AND query LIKE 'LISTEN%' \
                   AND state = 'idle'";
    until(&listens.replace("{schema}", scratch.schema.as_str()), 1).await;
    // Whoever waited before it listened is woken once.
    tokio::time::timeout(PATIENCE, &mut wait).await.expect("is woken").expect("waits");
}

async fn woken(wait: Wait<'_>, by: &str) {
    tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("{by} woke nobody")).expect("waits");
}

#[tokio::test]
async fn by_this_process_without_listening() {
    for (notifies, pooler) in [(false, false), (true, true)] {
        let (scratch, _backend) = migrated().await;
        let options = scratch.options().notifications(notifies).transaction_pooler(pooler);
        let backend = PostgresBackend::connect_with(options).await.expect("connects");
        let mut wait = waiting(&backend).await;
        backend.enqueue(&[job("1")]).await.expect("stores");
        assert!(poll(&mut wait).await, "a job is new");
        let claimed = claim_one(&backend).await;
        let mut wait = waiting(&backend).await;
        Transitioner::new(&backend).apply(&claimed.execution, &Transition::Release).await.expect("releases");
        assert!(poll(&mut wait).await, "a job is given back");
        let claimed = claim_one(&backend).await;
        let mut wait = waiting(&backend).await;
        Transitioner::new(&backend).apply(&claimed.execution, &complete("1")).await.expect("settles");
        assert!(!poll(&mut wait).await, "a job is done");
        let text = "SELECT count(*) FROM pg_stat_activity WHERE application_name = '{schema}' AND query LIKE 'LISTEN%'";
        until(&text.replace("{schema}", scratch.schema.as_str()), 0).await;
    }
}

#[tokio::test]
async fn by_another_process() {
    let (scratch, other) = migrated().await;
    let pool = scratch.pool(1).await;
    let backend = scratch.lent(&pool).await;
    listening(&scratch, &backend).await;
    assert_eq!(pool.size(), 1, "the application's only connection is left to it");

    let wait = waiting(&backend).await;
    other.enqueue(&[job("1"), job("2")]).await.expect("stores");
    woken(wait, "new jobs").await;
    let claimed = claim_one(&other).await;
    let wait = waiting(&backend).await;
    Transitioner::new(&other).apply(&claimed.execution, &Transition::Release).await.expect("releases");
    woken(wait, "a job given back").await;

    let mut wait = waiting(&backend).await;
    let mut transaction = pool.begin().await.expect("begins");
    other.enqueue_in(&mut transaction, &[job("3")]).await.expect("stores");
    assert!(!poll(&mut wait).await, "not before the commit");
    transaction.commit().await.expect("commits");
    woken(wait, "a commit").await;
}

/// A job that goes on, because of an event or of the time, and one that another is handed over to.
#[tokio::test]
async fn by_what_ends_a_wait_and_by_what_is_handed_over() {
    let (scratch, other) = migrated().await;
    let backend = scratch.lent(&scratch.pool(1).await).await;
    listening(&scratch, &backend).await;
    let suspended = async |event: &str, until: When| {
        other.enqueue(&[job("1")]).await.expect("stores");
        let claimed = claim_one(&other).await;
        let mut suspension = Suspension::new(&claimed.execution, name("w"), Some(name(event)), until).expect("legal");
        suspension.submit(&other).await.expect("waits");
    };
    let event = |key: &str| NewEvent { key: name(key), payload: Json::null(), keep: Delay::ZERO };

    suspended("a", When::At(Timestamp::MAX)).await;
    let (wait, mut own) = (waiting(&backend).await, waiting(&other).await);
    assert_eq!(other.emit(&event("a")).await.expect("emits"), Emitted::New { woken: 1 });
    assert!(poll(&mut own).await, "its own worker");
    woken(wait, "an event").await;
    claim_one(&backend).await;

    suspended("b", When::Now).await;
    let (wait, mut own) = (waiting(&backend).await, waiting(&other).await);
    assert_eq!(other.time_out_waits(limit(9)).await.expect("wakes").len(), 1);
    assert!(poll(&mut own).await, "its own worker");
    woken(wait, "the time").await;

    let claimed = claim_one(&backend).await;
    let (wait, mut own) = (waiting(&backend).await, waiting(&other).await);
    let mut hand_over = HandOver::new(&claimed.execution, None, job("2")).expect("legal");
    hand_over.submit(&other).await.expect("hands over");
    assert!(poll(&mut own).await, "its own worker");
    woken(wait, "a successor").await;
}

/// What is not due wakes nobody; a marker that follows shows that it would have come by then.
#[tokio::test]
async fn not_by_what_is_not_due() {
    let (scratch, other) = migrated().await;
    let mut listener = sqlx::postgres::PgListener::connect_with(&scratch.pool(1).await).await.expect("connects");
    listener.listen(&format!("{}.jobs", scratch.schema)).await.expect("listens");
    listener.listen(scratch.schema.as_str()).await.expect("listens");
    let later = NewJob { available: When::After(Delay::from_millis(60_000).expect("a delay")), ..job("1") };
    other.enqueue(&[later.clone(), NewJob { id: JobId::new(), ..later.clone() }]).await.expect("stores");
    other.enqueue(std::slice::from_ref(&later)).await.expect("is there");
    let quiet = PostgresBackend::connect_with(scratch.options().notifications(false)).await.expect("connects");
    quiet.enqueue(&[job("1")]).await.expect("stores");
    let claimed = claim_one(&quiet).await;
    Transitioner::new(&quiet).apply(&claimed.execution, &Transition::Release).await.expect("releases");
    let claimed = claim_one(&other).await;
    let snooze = Transition::Snooze { available: When::After(Delay::from_millis(60_000).expect("a delay")) };
    Transitioner::new(&other).apply(&claimed.execution, &snooze).await.expect("snoozes");
    assert_eq!(other.time_out_waits(limit(9)).await.expect("there is none"), []);
    let event = |key: &str| NewEvent { key: name(key), payload: Json::null(), keep: Delay::ZERO };
    assert_eq!(other.emit(&event("nobody waits")).await.expect("emits"), Emitted::New { woken: 0 });
    quiet.enqueue(&[job("1")]).await.expect("stores");
    let claimed = claim_one(&quiet).await;
    let suspension = Suspension::new(&claimed.execution, name("w"), Some(name("e")), When::At(Timestamp::MAX));
    suspension.expect("legal").submit(&other).await.expect("waits");
    assert_eq!(quiet.emit(&event("e")).await.expect("emits"), Emitted::New { woken: 1 });
    claim_one(&quiet).await;
    scratch.run("SELECT pg_notify('{schema}', 'marker')").await;
    let first = listener.recv().await.expect("hears");
    assert_eq!(first.payload(), "marker", "on {}", first.channel());

    // And what is due wakes once for the whole call, and says nothing but that.
    other.enqueue(&(0..50).map(|_| job("1")).collect::<Vec<_>>()).await.expect("stores");
    scratch.run("SELECT pg_notify('{schema}', 'marker')").await;
    let first = listener.recv().await.expect("hears");
    assert_eq!((first.channel(), first.payload()), (&*format!("{}.jobs", scratch.schema), ""));
    assert_eq!(listener.recv().await.expect("hears").payload(), "marker");
}

/// F6: the connection that listens is dead and does not say so; then it is cut, and comes back.
#[tokio::test]
async fn a_connection_that_is_lost_comes_back() {
    let (scratch, other) = migrated().await;
    let server = application();
    let proxy = Proxy::start(format!("{}:{}", server.get_host(), server.get_port())).await.expect("a proxy");
    // What it listens through is the proxy; what it works on is not.
    let pool = scratch.pool(1).await;
    pool.set_connect_options(scratch.application().host("127.0.0.1").port(proxy.port()));
    let backend = scratch.lent(&pool).await;
    listening(&scratch, &backend).await;

    proxy.hold(Direction::ToClient);
    let mut wait = waiting(&backend).await;
    other.enqueue(&[job("1")]).await.expect("stores");
    claim_one(&backend).await;
    assert!(!poll(&mut wait).await, "polling found it");
    backend.enqueue(&[job("2")]).await.expect("stores");
    woken(wait, "its own job").await;
    let wait = waiting(&backend).await;
    proxy.cut();
    proxy.release();
    woken(wait, "the connection that came back").await;
    let wait = waiting(&backend).await;
    other.enqueue(&[job("3")]).await.expect("stores");
    woken(wait, "a job of another process").await;
}

#[tokio::test]
async fn nothing_listens_any_more_when_the_handle_is_gone() {
    let (scratch, _other) = migrated().await;
    let listens = "SELECT count(*) FROM pg_stat_activity WHERE application_name = '{schema}' \
                   AND (query LIKE 'LISTEN%' OR query LIKE 'UNLISTEN%')";
    let listens = listens.replace("{schema}", scratch.schema.as_str());
    for close in [true, false] {
        let backend = scratch.connect().await;
        listening(&scratch, &backend).await;
        match close {
            true => backend.close().await,
            false => drop(backend),
        }
        until(&listens, 0).await;
    }
}
