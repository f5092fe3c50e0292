//! Futures dropped in the middle. (A15)

mod common;

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use backend_sqlite::SqliteBackend;
use backend_sqlite::SqliteOptions;
use backend_sqlite::Synchronous;
use common::*;
use queue_core::*;

/// Polls a call some times, with what it waits for given a moment each time, and drops it. Whether it ended before.
async fn drop_after(polls: usize, call: impl Future) -> bool {
    let mut call = pin!(call);
    for _ in 0..polls {
        // A poll whenever something happened, and at the latest when nothing did for a moment.
        if tokio::time::timeout(Duration::from_micros(50), &mut call).await.is_ok() {
            return true;
        }
    }
    false
}

/// Both handles write, so nobody holds a lock; and both see it, so nobody is in a transaction of yesterday.
async fn assert_whole(backend: &SqliteBackend, other: &SqliteBackend) {
    for (writer, reader) in [(backend, other), (other, backend)] {
        let job = NewJob { queue: name("probe"), ..job("1") };
        writer.enqueue(std::slice::from_ref(&job)).await.expect("stores");
        assert!(reader.get(job.id).await.expect("reads").is_some());
        let request =
            ClaimRequest::new(name("probe"), [name("welcome")], worker(), lease(), limit(1)).expect("a request");
        let claimed = reader.claim(&request).await.expect("claims").jobs.pop().expect("a job");
        Transitioner::new(writer).apply(&claimed.execution, &complete("1")).await.expect("settles");
    }
}

#[tokio::test]
async fn a_dropped_call_is_whole_or_not_at_all_and_leaves_nothing_open() {
    for pooled in [false, true] {
        let (_folder, path, _) = migrated().await;
        let open = || SqliteBackend::connect_with(SqliteOptions::file(&path).synchronous(Synchronous::Normal));
        let other = open().await.expect("opens");
        let backend = match pooled {
            true => SqliteBackend::from_pool(pool(&path, 2).await).await.expect("a handle"),
            false => open().await.expect("opens"),
        };
        for polls in 1..=30 {
            let jobs: Vec<_> = (0..20).map(|_| job("1")).collect();
            let ended = drop_after(polls, backend.enqueue(&jobs)).await;
            assert_whole(&backend, &other).await;
            let mut stored = 0;
            for job in &jobs {
                stored += usize::from(other.get(job.id).await.expect("reads").is_some());
            }
            assert!(stored == 20 || stored == 0 && !ended, "{stored} of 20 after {polls} polls");
            backend.enqueue(&jobs).await.expect("is repeated");

            drop_after(polls, backend.claim(&request(5))).await;
            assert_whole(&backend, &other).await;
            let claimed = backend.claim(&request(10)).await.expect("claims").jobs;
            let updates: Vec<_> = claimed
                .iter()
                .map(|job| Decision::new(&job.execution, &complete("1")).expect("legal").request().clone())
                .collect();
            drop_after(polls, backend.update_many_if_current(&updates)).await;
            assert_whole(&backend, &other).await;
            let mut done = 0;
            for update in &updates {
                let job = other.get(update.id).await.expect("reads").expect("a job");
                done += usize::from(job.state() == JobState::Completed);
            }
            assert!(done == 0 || done == updates.len(), "{done} after {polls} polls");

            let UpdateRequest { id, current, patch } = &updates[0];
            drop_after(polls, backend.update_if_current(*id, current, patch)).await;
            drop_after(polls, backend.purge(JobState::Completed, Delay::ZERO, limit(5))).await;
            drop_after(polls, backend.migrate()).await;
            assert_whole(&backend, &other).await;
        }
    }
}
