//! Waiting for work.

use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use queue_core::*;

use crate::case::Case;
use crate::case::Failed;
use crate::case::Need;
use crate::case::Outcome;
use crate::case::case;
use crate::case::check_eq;
use crate::context::*;

pub(super) const CASES: &[Case] = &[
    case!(
        wait::wakes_for_what_comes_after_the_first_poll,
        [],
        [Need::Wakes],
        "Whoever polled before a job was enqueued is woken by it, also if it awaits only afterwards."
    ),
    case!(wait::wakes_everybody, [], [Need::Wakes], "Every waiter of the handle is woken, not only one of them."),
    case!(wait::wakes_for_a_job_given_back, [], [Need::Wakes], "A job that is put back, due now, wakes too."),
    case!(wait::holds_nothing_up, [A15 F6], [], "Waits that are left alone or dropped, as a worker does at every poll, keep nothing from the other calls."),
];

/// Far longer than a wake-up takes; only a missing one waits for it.
const PATIENCE: Duration = Duration::from_secs(10);

type Wait = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

/// A wait that was polled once and is pending, as when a worker is about to claim. It may resolve for nothing, but not always.
async fn polled(handle: &Handle) -> Result<Wait, Failed> {
    for _ in 0..10 {
        let waiting = Arc::clone(handle);
        let mut wait: Wait = Box::pin(async move { waiting.wait_for_work(&[name("q")]).await });
        let first = std::future::poll_fn(|cx| Poll::Ready(wait.as_mut().poll(cx))).await;
        match first {
            Poll::Pending => return Ok(wait),
            Poll::Ready(answer) => answer?,
        }
        handle.claim(&claim_for(&worker("a"), 1)).await?;
    }
    Err(Failed::new("a wait that resolves for nothing, again and again, keeps a worker busy"))
}

async fn woken(wait: Wait, by: &str) -> Outcome {
    match tokio::time::timeout(PATIENCE, wait).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(Failed::new(format!("{by} woke nobody"))),
    }
}

async fn wakes_for_what_comes_after_the_first_poll(context: Context) -> Outcome {
    let handle = context.connect().await?;
    for round in 0..20 {
        let wait = polled(&handle).await?;
        check_eq!(handle.claim(&claim_for(&worker("a"), 1)).await?, Claimed::default(), "round {round}: nothing yet");
        let id = enqueue(&handle, &new_job()).await?;
        woken(wait, "the job").await?;
        check_eq!(claim_one(&handle, &claim_for(&worker("a"), 1)).await?.id(), id, "round {round}: the job is there");
    }
    Ok(())
}

async fn wakes_everybody(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let waits = [polled(&handle).await?, polled(&handle).await?, polled(&handle).await?];
    enqueue(&handle, &new_job()).await?;
    for wait in waits {
        woken(wait, "the job").await?;
    }
    Ok(())
}

async fn wakes_for_a_job_given_back(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = running(&handle, &new_job(), &worker("a")).await?;
    let wait = polled(&handle).await?;
    apply(&handle, &job.execution, &Transition::Release).await?;
    woken(wait, "the released job").await
}

async fn holds_nothing_up(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let mut left_alone = Vec::new();
    for _ in 0..50 {
        let waiting = Arc::clone(&handle);
        let mut wait: Wait = Box::pin(async move { waiting.wait_for_work(&[name("q")]).await });
        let _ = std::future::poll_fn(|cx| Poll::Ready(wait.as_mut().poll(cx))).await;
        left_alone.push(wait);
    }
    let working = async {
        for transition in holder_moves() {
            let job = running(&handle, &new_job(), &worker("a")).await?;
            let after = apply(&handle, &job.execution, &transition).await?;
            if after.state().is_active() {
                apply(&handle, &after.execution, &cancel()).await?;
            }
        }
        Ok(())
    };
    let worked = tokio::time::timeout(PATIENCE, working).await;
    drop(left_alone);
    running(&handle, &new_job(), &worker("a")).await?;
    worked.map_err(|_| Failed::new("waits that nobody polls hold other calls up"))?
}
