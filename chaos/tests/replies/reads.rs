//! Calls that change no job: without an answer they end as well, and leave a handle behind that works.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;
use std::time::Instant;

use fenced_queue::contract::*;
use tokio::time::timeout;

use crate::TOO_MANY;
use crate::application::Store;
use crate::behind;
use crate::common::Database;
use crate::counted;
use crate::open;
use crate::trial::name;
use crate::trial::steps;

/// So long a call and the one after it may take, without any time-out of a lost connection.
const PATIENCE: Duration = Duration::from_secs(10);

/// More rows than any server sends at once.
const ROWS: usize = 150;

const READS: [&str; 7] = ["get", "get of nothing", "list", "counts", "stale", "claimed by", "steps"];

struct Stored {
    queue: Name,
    worker: WorkerId,
    id: JobId,
}

impl Stored {
    /// All of them are claimed and stale, and one has a step.
    async fn prepare(store: &dyn Store) -> Self {
        let (queue, kind, worker) = (name("queue"), name("kind"), WorkerId::new(&name("worker")));
        let payload = Json::from_text("1").expect("JSON");
        let jobs: Vec<_> = (0..ROWS).map(|_| NewJob::new(queue.clone(), kind.clone(), payload.clone())).collect();
        store.enqueue(&jobs).await.expect("stores");
        let (lease, limit) = (Lease::from_millis(3000).expect("a lease"), Limit::new(ROWS).expect("a limit"));
        let request = ClaimRequest::new(queue.clone(), [kind], worker.clone(), lease, limit).expect("a kind");
        let claimed = store.claim(&request).await.expect("claims").jobs;
        assert_eq!(claimed.len(), ROWS);
        let id = claimed[0].id();
        begin_step(steps(store), &claimed[0].execution, &name("step")).await.expect("begins");
        while store.stale(None, Limit::MAX).await.expect("reads").items.len() < ROWS {
            tokio::task::yield_now().await;
        }
        Self { queue, worker, id }
    }

    /// Its answer, to be compared with another.
    async fn read(&self, store: &dyn Store, what: &str) -> Result<String> {
        let all = Limit::MAX;
        Ok(match what {
            "get" => format!("{:?}", store.get(self.id).await?.expect("it is there")),
            "get of nothing" => format!("{:?}", store.get(JobId::new()).await?),
            "list" => {
                let mut filter = ListFilter::default();
                filter.queue = Some(self.queue.clone());
                format!("{:?}", store.list(&filter, None, all).await?)
            }
            "counts" => format!("{:?}", store.counts().await?),
            "stale" => format!("{:?}", store.stale(None, all).await?),
            "claimed by" => format!("{:?}", store.claimed_by(&self.worker, Delay::ZERO, None, all).await?),
            "steps" => format!("{:?}", steps(store).steps(self.id).await?),
            other => panic!("{other}: no such call"),
        })
    }
}

async fn every_reply_to_a_read(server: &'static str) {
    let Some(database) = Database::create(server, "reads").await else { return };
    let direct = open(server, &database.url).await;
    direct.migrate().await.expect("migrates");
    let stored = Stored::prepare(&*direct).await;
    for what in READS {
        let expected = stored.read(&*direct, what).await.expect("reads");
        let (proxy, handle) = behind(server, &database.url).await;
        let read = async || {
            let answer = timeout(PATIENCE, stored.read(&*handle, what)).await;
            answer.unwrap_or_else(|_| panic!("{what}: it does not end"))
        };
        // Statements are prepared the first time that they are used.
        read().await.expect("nothing is lost yet");
        let (mut exchanges, mut answered) = (0, 0);
        loop {
            proxy.lose_reply(counted(server, exchanges + 1));
            let answer = read().await;
            let is_lost = proxy.replies_lost() > exchanges;
            match answer {
                Ok(answer) => {
                    assert_eq!(answer, expected, "{what}");
                    answered += u64::from(is_lost);
                }
                Err(error) => {
                    assert!(is_lost, "{what}: {error}");
                    assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Transient), "{what}: {error}");
                    assert_eq!(error.certainty(), Certainty::NotApplied, "{what}: {error}");
                }
            }
            if !is_lost {
                break;
            }
            exchanges += 1;
            assert!(exchanges < TOO_MANY, "{what}: it never ends");
            let next = read().await.unwrap_or_else(|error| panic!("{what}, the call after it: {error}"));
            assert_eq!(next, expected, "{what}: the call after it");
        }
        assert!(exchanges > 0, "{what}: no reply was lost");
        println!("replies {server}: {what}: {exchanges} exchanges: {answered} answered all the same");
    }
    every_reply_to_a_purge_of_events(server, &database.url, &*direct).await;
    database.discard().await;
}

/// What it has done only the next one shows.
async fn every_reply_to_a_purge_of_events(server: &'static str, url: &str, direct: &dyn Store) {
    const EVENTS: u64 = 2;
    let (proxy, handle) = behind(server, url).await;
    let purge = async |store: &dyn Store| {
        let answer = timeout(PATIENCE, steps(store).purge_events(Limit::MAX)).await;
        answer.expect("it ends")
    };
    assert_eq!(purge(&*handle).await.expect("nothing is lost yet"), 0);
    let mut exchanges = 0;
    loop {
        for number in 0..EVENTS {
            let (key, payload) = (name(&format!("event {number}")), Json::from_text("1").expect("JSON"));
            let emitted = steps(direct).emit(&NewEvent { key, payload, keep: Delay::ZERO }).await;
            assert_eq!(emitted.expect("emits"), Emitted::New { woken: 0 });
        }
        handle.get(JobId::new()).await.expect("the connection was replaced");
        proxy.lose_reply(counted(server, exchanges + 1));
        let answer = purge(&*handle).await;
        let is_lost = proxy.replies_lost() > exchanges;
        let mut left = purge(direct).await.expect("purges");
        match answer {
            Ok(purged) => assert_eq!(purged + left, EVENTS),
            Err(error) => {
                assert!(is_lost, "{error}");
                assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Transient), "{error}");
                // For a moment they may still be locked by a session that is gone, and are passed.
                let until = Instant::now() + PATIENCE;
                while error.certainty() == Certainty::NotApplied && left < EVENTS {
                    assert!(Instant::now() < until, "{error}, and {left} are left");
                    left += purge(direct).await.expect("purges");
                }
            }
        }
        if !is_lost {
            break;
        }
        exchanges += 1;
        assert!(exchanges < TOO_MANY, "it never ends");
    }
    assert!(exchanges > 0, "no reply was lost");
    println!("replies {server}: purge of events: {exchanges} exchanges");
}

/// Through a connection of its own, where the store can notify. Whatever answer is lost there, whoever waits is woken by another
/// process, and no wait fails.
async fn every_reply_to_a_wait(server: &'static str) {
    let Some(database) = Database::create(server, "waits").await else { return };
    let direct = open(server, &database.url).await;
    direct.migrate().await.expect("migrates");
    let queues = [name("queue")];
    let mut exchanges = 0;
    loop {
        let (proxy, handle) = behind(server, &database.url).await;
        let woken = async |wait: Pin<&mut (dyn Future<Output = Result<()>> + Send)>, by: &str| {
            let answer = timeout(PATIENCE, wait).await;
            answer.unwrap_or_else(|_| panic!("{by} wakes nobody, {exchanges} answers after the first")).expect("waits");
        };
        proxy.lose_reply(exchanges + 1);
        woken(handle.wait_for_work(&queues).as_mut(), "that it listens").await;
        let mut wait = handle.wait_for_work(&queues);
        // It waits from its first poll on; one that has been woken already is woken again.
        while poll_fn(|context| Poll::Ready(wait.as_mut().poll(context).is_ready())).await {
            wait = handle.wait_for_work(&queues);
        }
        let job = NewJob::new(queues[0].clone(), name("kind"), Json::from_text("1").expect("JSON"));
        direct.enqueue(&[job]).await.expect("stores");
        woken(wait.as_mut(), "a job").await;
        if proxy.replies_lost() == 0 {
            break;
        }
        exchanges += 1;
        assert!(exchanges < TOO_MANY, "it never ends");
    }
    assert!(exchanges > 0, "no reply was lost");
    println!("replies {server}: wait for work: {exchanges} exchanges");
    database.discard().await;
}

#[tokio::test]
async fn to_a_wait_on_postgres() {
    every_reply_to_a_wait("postgres").await;
}

#[tokio::test]
async fn to_a_wait_on_mongodb() {
    every_reply_to_a_wait("mongodb").await;
}

#[tokio::test]
async fn to_reads_on_postgres() {
    every_reply_to_a_read("postgres").await;
}

#[tokio::test]
async fn to_reads_on_mysql() {
    every_reply_to_a_read("mysql").await;
}

#[tokio::test]
async fn to_reads_on_mariadb() {
    every_reply_to_a_read("mariadb").await;
}

#[tokio::test]
async fn to_reads_on_mongodb() {
    every_reply_to_a_read("mongodb").await;
}
