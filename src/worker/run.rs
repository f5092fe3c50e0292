//! One job through its handler.

use std::any::Any;
use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::panic::catch_unwind;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use queue_core::Delay;
use queue_core::Json;
use queue_core::Name;
use queue_core::Transition;
use queue_core::When;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio::time::sleep_until;
use tracing::Instrument;

use super::JobContext;
use super::NotDone;
use super::Shared;
use super::cancel::CancelReason;
use super::fetch::Stopped;
use super::handler::Running;
use super::held::Claim;
use super::outcome::Verdict;
use super::settle::Pending;

/// Runs the handler and hands its outcome to the settler, where it has taken room for it before.
pub(super) async fn job(
    shared: Arc<Shared>,
    claim: Arc<Claim>,
    kind: Name,
    payload: Json,
    results: mpsc::Sender<Pending>,
    stopped: Stopped,
) {
    let Some(handler) = shared.handlers.get(&kind) else {
        return;
    };
    let Ok(room) = results.reserve_owned().await else { return };
    // It may have waited for that room: a handler does not begin after the stop, nor for a job that is lost.
    if claim.token().is_canceled() || stopped.borrow().is_some() {
        return;
    }
    let execution = claim.execution();
    let span = tracing::info_span!(
        "job", job.id = %execution.id, kind = %kind, attempt = execution.attempt, fence = execution.fence
    );
    let running = handler(JobContext::new(Arc::clone(&claim)), payload);
    let ended = async {
        let mut ended = pin!(caught(running));
        tokio::select! {
            biased;
            ended = &mut ended => ended,
            never = uncertain(&claim) => match never {},
        }
    };
    let transition = match ended.instrument(span.clone()).await {
        Ok(result) => transition(&shared, &claim, result),
        Err(message) => {
            shared.count(|report| report.panicked += 1);
            tracing::warn!(name: "worker.panic", parent: &span, %message, "a handler panicked");
            transition(&shared, &claim, Err(NotDone::retry(format_args!("the handler panicked: {message}"))))
        }
    };
    if let Some(pending) = Pending::new(&shared, claim, &transition) {
        room.send(pending);
    }
}

/// The handler's end, or the message that it panicked with.
async fn caught(running: Running) -> Result<Result<Json, NotDone>, String> {
    let mut running = Some(running);
    std::future::poll_fn(|context| {
        let polled = catch_unwind(AssertUnwindSafe(|| {
            let polled = running.as_mut().map_or(Poll::Pending, |running| running.as_mut().poll(context));
            if polled.is_ready() {
                // What it owns is dropped in here, since that can panic too.
                running = None;
            }
            polled
        }));
        match polled {
            Ok(polled) => polled.map(Ok),
            Err(panic) => {
                let text = message(&*panic);
                // Even what was thrown can panic when it is dropped.
                if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
                    std::mem::forget(again);
                }
                Poll::Ready(Err(text))
            }
        }
    })
    .await
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message").to_owned()
}

/// Fires the token if the lease was not renewed in time, by this machine's monotonic clock. Never ends.
async fn uncertain(claim: &Claim) -> Infallible {
    loop {
        let deadline = claim.deadline();
        sleep_until(deadline).await;
        if claim.deadline() <= Instant::now() {
            tracing::warn!(name: "worker.lease_uncertain", { job.id = %claim.execution().id }, "a lease was not renewed in time");
            claim.cancel(CancelReason::LeaseUncertain);
            return std::future::pending().await;
        }
    }
}

fn transition(shared: &Shared, claim: &Claim, ended: Result<Json, NotDone>) -> Transition {
    let max = shared.backend.capabilities().max_payload;
    match ended {
        Ok(result) if result.bytes() > max => {
            let error = format!("result too large: {} bytes, at most {max} are stored", result.bytes()).into();
            Transition::Fail { error }
        }
        Ok(result) => Transition::Complete { result: Some(result) },
        Err(NotDone(Verdict::Retry { error, after })) => {
            let available = match after {
                Some(after) => When::After(Delay::saturating(after)),
                None => shared.config.retry.after(claim.execution().attempt),
            };
            Transition::Retry { error: error.into(), available }
        }
        Err(NotDone(Verdict::Fail { error })) => Transition::Fail { error: error.into() },
        Err(NotDone(Verdict::Snooze { after })) => {
            Transition::Snooze { available: When::After(Delay::saturating(after)) }
        }
        Err(NotDone(Verdict::Cancel { reason })) => Transition::Cancel { reason: reason.into() },
    }
}
