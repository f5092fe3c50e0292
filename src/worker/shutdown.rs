//! Stopping: let handlers end, tell those that do not, give back the rest, record what is left to record.

use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio::time::timeout;

use super::Shared;
use super::cancel::CancelReason;
use super::fetch::Fetch;
use super::fetch::Stopped;
use super::fetch::stopped;
use super::run;

/// How long a handler may take to end once its token has fired.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(1);

/// Resolves this long after the worker was told to stop, or when it is told to hurry.
async fn after_stop(mut told: Stopped, mut hurry: watch::Receiver<bool>, span: Duration) {
    let since = stopped(&mut told).await;
    tokio::select! {
        () = sleep(span.saturating_sub(since.elapsed())) => {}
        Ok(_) = hurry.wait_for(|hurry| *hurry) => {}
    }
}

/// Resolves when a claim under way has had its time to be answered, after the worker was told to stop.
pub(super) async fn claim_overdue(shared: &Shared, told: Stopped, hurry: watch::Receiver<bool>) {
    // A store may have it wait for a third of its lease, and then it takes its jobs all the same.
    let answer = shared.config.lease.duration() / 3 + LAST_WORDS;
    after_stop(told.clone(), hurry, shared.config.grace.max(answer)).await;
    // Also to one who hurries: an answer on its way brings jobs that would wait for their leases.
    sleep(LAST_WORDS).await;
}

/// Ends the handlers, and gives back what has no outcome then.
pub(super) async fn drain(shared: &Shared, fetch: &mut Fetch, told: Stopped, hurry: watch::Receiver<bool>) {
    tracing::info!(name: "worker.stopping", running = fetch.handlers.len(), "worker stops, handlers may end");
    let patience = shared.config.lease.duration().saturating_mul(2);
    // Not in time: what is left is reported.
    let _ = timeout(patience, fetch.release_reserved()).await;
    let in_time = tokio::select! {
        biased;
        () = ended(&mut fetch.handlers) => true,
        () = after_stop(told, hurry, shared.config.grace) => false,
    };
    if !in_time {
        for claim in shared.held.all() {
            claim.cancel(CancelReason::Shutdown);
        }
        if timeout(LAST_WORDS, ended(&mut fetch.handlers)).await.is_err() {
            tracing::warn!(name: "worker.aborted", running = fetch.handlers.len(), "handlers did not end, their jobs are given back");
            fetch.handlers.abort_all();
            // Until they are dropped where they stand: one may be in the middle of a write.
            let _ = timeout(LAST_WORDS, ended(&mut fetch.handlers)).await;
        }
    }
    let _ = timeout(patience, async {
        for claim in shared.held.all() {
            match claim.recorded_as() {
                Some(what) => run::recorded(shared, &claim, what),
                None => fetch.release(claim).await,
            }
        }
    })
    .await;
}

async fn ended(handlers: &mut JoinSet<()>) {
    while handlers.join_next().await.is_some() {}
}

/// Waits for the settler, which gives up what it cannot record within a lease.
pub(super) async fn flush(shared: &Shared, mut settled: watch::Receiver<bool>) {
    let patience = shared.config.lease.duration().saturating_mul(2);
    // Not in time, or never: what is left is reported.
    let _ = timeout(patience, settled.wait_for(|settled| *settled)).await;
}
