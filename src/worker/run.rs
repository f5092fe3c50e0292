//! One job through its handler.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::panic::catch_unwind;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use queue_core::Delay;
use queue_core::Job;
use queue_core::Json;
use queue_core::Transition;
use queue_core::When;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio::time::sleep;
use tokio::time::sleep_until;
use tracing::Instrument;

use super::JobContext;
use super::NotDone;
use super::Shared;
use super::cancel::CancelReason;
use super::fetch::Stopped;
use super::handler::Registered;
use super::handler::Running;
use super::held::Claim;
use super::layer::Next;
use super::metrics;
use super::outcome::Verdict;
use super::report::Counted;
use super::retry_policy::RetryPolicy;
use super::settle::Pending;
use super::shutdown::LAST_WORDS;

/// How an attempt came to its end.
enum Ended {
    Handler(Result<Json, NotDone>),
    Panic(String),
    /// The handler was dropped.
    Aborted(CancelReason),
}

/// Runs the handler and hands its outcome to the settler, where it has taken room for it before.
pub(super) async fn job(
    shared: Arc<Shared>,
    claim: Arc<Claim>,
    job: Job,
    results: mpsc::Sender<Pending>,
    stopped: Stopped,
) {
    let Ok(room) = results.reserve_owned().await else { return };
    // It may have waited for that room: a handler does not begin after the stop, nor for a job that is lost.
    if claim.token().is_canceled() {
        return;
    }
    if stopped.borrow().is_some() {
        if let Some(pending) = Pending::new(&shared, claim, &Transition::Release) {
            room.send(pending);
        }
        return;
    }
    let transition = attempt(&shared, &claim, job).await;
    loop {
        // The handler may have left one to a task of its own.
        claim.written().await;
        if let Some(what) = claim.recorded_as() {
            return recorded(&shared, &claim, what);
        }
        if let Some(pending) = Pending::new(&shared, Arc::clone(&claim), &transition) {
            room.send(pending);
            return;
        }
        if !claim.is_writing() {
            return;
        }
    }
}

/// The handler has recorded its outcome by itself.
pub(super) fn recorded(shared: &Shared, claim: &Arc<Claim>, what: Counted) {
    // It may have been claimed anew by this very worker before the handler ended.
    shared.held.remove(claim);
    shared.count(what, 1);
    if what == Counted::Completed {
        shared.announcer.ended(&shared.backend, [claim.execution().id]);
    }
}

/// Runs the handler to its end, and answers what is to become of the job.
pub(super) async fn attempt(shared: &Arc<Shared>, claim: &Arc<Claim>, job: Job) -> Transition {
    metrics::waited(&job);
    let Job { queue, kind, payload, priority, unique_key, .. } = job;
    let Some(Registered { handler, options, .. }) = shared.handlers.get(&kind).cloned() else {
        return Transition::Release;
    };
    let execution = claim.execution();
    let span = tracing::info_span!(
        "job", job.id = %execution.id, kind = %kind, attempt = execution.attempt, fence = execution.fence
    );
    let began = Instant::now();
    let deadline = options.timeout.and_then(|timeout| began.checked_add(timeout));
    let context = JobContext {
        backend: Arc::clone(&shared.backend),
        claim: Arc::clone(claim),
        alarm: Arc::clone(&shared.alarm),
        token: claim.token(),
        queue,
        kind: kind.clone(),
        priority,
        unique_key,
        deadline: deadline.map(Instant::into_std),
        lease: shared.config.lease.duration(),
    };
    let inner = context.clone();
    let handler = Next::new(move || handler(inner, payload)).within(&shared.layers, &context);
    drop(context);
    let ended = async {
        let mut ended = pin!(caught(Box::pin(handler.run())));
        tokio::select! {
            biased;
            ended = &mut ended => ended,
            reason = uncertain(claim, options.aborts_when_uncertain) => Ended::Aborted(reason),
            reason = timed_out(claim, deadline, options.timeout) => Ended::Aborted(reason),
        }
    };
    let ended = ended.instrument(span.clone()).await;
    metrics::ran(&kind, began.elapsed());
    match &ended {
        Ended::Handler(_) => {}
        Ended::Panic(message) => {
            shared.count(Counted::Panicked, 1);
            tracing::warn!(name: "worker.panic", parent: &span, %message, "a handler panicked");
        }
        Ended::Aborted(reason) => {
            if matches!(reason, CancelReason::Timeout { .. }) {
                shared.count(Counted::TimedOut, 1);
            }
            tracing::warn!(name: "worker.aborted", parent: &span, %reason, "a handler was dropped");
        }
    }
    transition(shared, claim, options.retry.unwrap_or(shared.config.retry), ended)
}

/// A handler that may be dropped before its end, which can panic too.
struct Caught(Option<Running>);

impl Drop for Caught {
    fn drop(&mut self) {
        let running = self.0.take();
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(running))) {
            std::mem::forget(panic);
        }
    }
}

/// The handler's end, or the message that it panicked with.
async fn caught(running: Running) -> Ended {
    let mut running = Caught(Some(running));
    std::future::poll_fn(|context| {
        let polled = catch_unwind(AssertUnwindSafe(|| {
            let polled = running.0.as_mut().map_or(Poll::Pending, |running| running.as_mut().poll(context));
            if polled.is_ready() {
                // What it owns is dropped in here, since that can panic too.
                running.0 = None;
            }
            polled
        }));
        match polled {
            Ok(polled) => polled.map(Ended::Handler),
            Err(panic) => {
                let text = message(&*panic);
                // Even what was thrown can panic when it is dropped.
                if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
                    std::mem::forget(again);
                }
                Poll::Ready(Ended::Panic(text))
            }
        }
    })
    .await
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message").to_owned()
}

/// Fires the token if the lease was not renewed in time, by this machine's monotonic clock. Ends only if the handler is to be
/// dropped then.
async fn uncertain(claim: &Claim, aborts: bool) -> CancelReason {
    loop {
        let deadline = claim.deadline();
        sleep_until(deadline).await;
        if claim.deadline() <= Instant::now() {
            tracing::warn!(name: "worker.lease_uncertain", { job.id = %claim.execution().id }, "a lease was not renewed in time");
            claim.cancel(CancelReason::LeaseUncertain);
            if aborts {
                return CancelReason::LeaseUncertain;
            }
            return std::future::pending().await;
        }
    }
}

/// Fires the token when the attempt has taken too long, and ends when its handler has had time to end by itself.
async fn timed_out(claim: &Claim, deadline: Option<Instant>, timeout: Option<Duration>) -> CancelReason {
    let (Some(deadline), Some(after)) = (deadline, timeout) else { return std::future::pending().await };
    sleep_until(deadline).await;
    claim.cancel(CancelReason::Timeout { after });
    sleep(LAST_WORDS).await;
    CancelReason::Timeout { after }
}

fn transition(shared: &Shared, claim: &Claim, retry: RetryPolicy, ended: Ended) -> Transition {
    let max = shared.backend.capabilities().max_payload;
    let verdict = match ended {
        Ended::Handler(Ok(result)) if result.bytes() > max => {
            let error = format!("result too large: {} bytes, at most {max} are stored", result.bytes()).into();
            return Transition::Fail { error };
        }
        Ended::Handler(Ok(result)) => return Transition::Complete { result: Some(result) },
        Ended::Handler(Err(NotDone(verdict))) => verdict,
        Ended::Panic(message) => Verdict::Retry { error: format!("the handler panicked: {message}"), after: None },
        Ended::Aborted(reason) => Verdict::Retry { error: format!("the handler was dropped: {reason}"), after: None },
    };
    match verdict {
        Verdict::Retry { error, after } => {
            let available = match after {
                Some(after) => When::After(Delay::saturating(after)),
                None => retry.after(claim.execution().attempt),
            };
            Transition::Retry { error: error.into(), available }
        }
        Verdict::Fail { error } => Transition::Fail { error: error.into() },
        Verdict::Snooze { after } => Transition::Snooze { available: When::After(Delay::saturating(after)) },
        // It is recorded; or the handler took it from another job.
        Verdict::Suspended => Transition::Release,
        Verdict::Cancel { reason } => Transition::Cancel { reason: reason.into() },
    }
}
