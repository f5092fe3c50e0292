//! Handlers whose jobs keep what they have done, and wait.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fenced_queue::contract::*;
use fenced_queue::*;
use serde::Deserialize;
use serde::Serialize;
use tokio::sync::Notify;

use crate::common::*;

on_each_store! {
    a_step_is_done_once
    a_step_that_was_interrupted_is_done_again_under_the_same_key
    a_worker_that_lost_its_job_is_refused_before_the_effect
    a_name_is_used_once_in_a_run
    a_step_whose_answer_is_lost_is_done_once
    a_value_over_the_cap_fails_the_job_and_is_not_tried_again
    an_event_brings_a_waiting_job_back
    an_event_that_came_before_is_found
    a_wait_ends_when_its_time_is_over
    a_wait_whose_answer_is_lost_is_registered_once
    what_a_handler_does_after_it_waits_counts_for_nothing
    a_waiting_job_is_canceled
    a_value_of_another_shape_is_a_failed_attempt
    a_child_is_awaited
    a_child_that_fails_is_no_failure
    a_child_whose_end_nobody_announced_is_found
    a_job_continues_as_another
    an_event_of_a_handler_is_emitted_once
    two_releases_work_side_by_side
    a_store_that_is_away_for_a_while_costs_no_attempt
    what_is_read_back_is_what_the_first_run_had
    a_name_whose_call_failed_can_be_used_again
    steps_go_side_by_side_and_no_wait_beside_them
    a_job_waits_for_one_thing_at_a_time
    a_wait_and_a_step_do_not_share_a_name
    a_child_that_was_deleted_is_not_enqueued_again
    a_child_that_runs_again_is_awaited_without_haste
    a_job_that_has_begun_is_not_replaced
}

fn worker(store: &Arc<Store>) -> WorkerBuilder {
    let again = RetryPolicy::exponential(Duration::from_millis(1), Duration::from_millis(1));
    Worker::builder(&store.queue()).lease(store.lease).poll(Duration::from_millis(200)).retry(again)
}

fn start(builder: WorkerBuilder) -> Running {
    Running::start(builder.build().expect("a worker"))
}

const LONG: Duration = Duration::from_secs(3_600);

async fn add(store: &Arc<Store>) -> JobId {
    store.queue().enqueue(&ADD).await.expect("stored").id()
}

/// The keys that an effect was called with.
#[derive(Clone, Default)]
struct Effects(Arc<Mutex<Vec<String>>>);

impl Effects {
    fn happen(&self, key: String) -> Result<(), NotDone> {
        self.0.lock().expect("lock").push(key);
        Ok(())
    }

    fn all(&self) -> Vec<String> {
        self.0.lock().expect("lock").clone()
    }
}

async fn a_step_is_done_once(store: Arc<Store>) {
    let (effects, id) = (Effects::default(), add(&store).await);
    let handler = {
        let effects = effects.clone();
        move |context: DurableContext, args: Add| {
            let effects = effects.clone();
            async move {
                let sum = context
                    .step("sum", async |key| {
                        effects.happen(key)?;
                        Ok(args.a + args.b + u64::from(context.attempt()))
                    })
                    .await?;
                match context.attempt() {
                    1 => Err(NotDone::retry("after the step")),
                    _ => Ok(sum),
                }
            }
        }
    };
    let running = start(worker(&store).register_durable(handler));
    let job = store.until_state(id, JobState::Completed).await;
    let report = running.stop().await;
    assert_eq!((job.result.expect("a result").as_str(), job.execution.attempt), ("4", 2), "that of the first run");
    assert_eq!(effects.all(), [format!("{id}/sum")]);
    assert_eq!((report.completed, report.retried, report.suspended), (1, 1, 0));
    let steps = store.queue().steps(id).await.expect("readable");
    assert_eq!(steps[0].state, StepState::Done(Json::from_text("4").expect("JSON")));
}

async fn a_step_that_was_interrupted_is_done_again_under_the_same_key(store: Arc<Store>) {
    let (effects, began, id) = (Effects::default(), Arc::new(Notify::new()), add(&store).await);
    let handler = {
        let (effects, began) = (effects.clone(), Arc::clone(&began));
        move |context: DurableContext, _: Add| {
            let (effects, began) = (effects.clone(), Arc::clone(&began));
            async move {
                context
                    .step("charge", async |key| {
                        effects.happen(key)?;
                        if context.fence() == 1 {
                            began.notify_one();
                            std::future::pending::<()>().await;
                        }
                        Ok(context.fence())
                    })
                    .await
            }
        }
    };
    let running = start(worker(&store).register_durable(handler.clone()));
    began.notified().await;
    running.kill().await;
    let another = start(worker(&store).register_durable(handler));
    let job = store.until_state(id, JobState::Completed).await;
    another.stop().await;
    assert_eq!(job.result.expect("a result").as_str(), "2");
    assert_eq!(effects.all(), [format!("{id}/charge"), format!("{id}/charge")], "one key, by which it is known again");
}

/// S23
async fn a_worker_that_lost_its_job_is_refused_before_the_effect(store: Arc<Store>) {
    let (effects, go, ready) = (Effects::default(), Arc::new(Notify::new()), Arc::new(Notify::new()));
    let id = add(&store).await;
    let handler = {
        let (effects, go, ready) = (effects.clone(), Arc::clone(&go), Arc::clone(&ready));
        move |context: DurableContext, _: Add| {
            let (effects, go, ready) = (effects.clone(), Arc::clone(&go), Arc::clone(&ready));
            async move {
                ready.notify_one();
                go.notified().await;
                let step = context.step("charge", async |key| effects.happen(key)).await;
                ready.notify_one();
                step
            }
        }
    };
    let running = start(worker(&store).concurrency(1).register_durable(handler));
    ready.notified().await;
    let seen = store.job(id).await.execution;
    Transitioner::new(&*store).apply(&seen, &Transition::Release).await.expect("released");
    let other = claim_one(&store).await;
    go.notify_one();
    ready.notified().await;
    assert_eq!(effects.all(), [""; 0], "it was not done");
    let report = running.stop().await;
    assert_eq!(report.completed, 0, "{report:?}");
    assert!(report.conflicts + report.lost > 0, "{report:?}");
    assert_eq!(store.job(id).await.execution.fence, other.execution.fence, "the other one has it");
}

async fn a_name_is_used_once_in_a_run(store: Arc<Store>) {
    let id = add(&store).await;
    let handler = async |context: DurableContext, _: Add| {
        for _ in 0..2 {
            context.step("the same", async |_| Ok(())).await?;
        }
        Ok(())
    };
    let running = start(worker(&store).register_durable(handler));
    let job = store.until_state(id, JobState::Failed).await;
    running.stop().await;
    let text = job.errors[0].text.as_str();
    assert_eq!(text, "the step the same was used twice in one run: each has a name of its own");
}

async fn a_step_whose_answer_is_lost_is_done_once(store: Arc<Store>) {
    let (effects, id) = (Effects::default(), add(&store).await);
    let handler = {
        let effects = effects.clone();
        move |context: DurableContext, _: Add| {
            let effects = effects.clone();
            async move { context.step("charge", async |key| effects.happen(key)).await }
        }
    };
    store.refuse(Op::Steps, 1, lost);
    // Of the begin twice, then of the end.
    store.lose_answer(Op::Step, 3, lost);
    store.refuse(Op::Step, 1, busy);
    let running = start(worker(&store).register_durable(handler));
    let job = store.until_state(id, JobState::Completed).await;
    running.stop().await;
    assert_eq!((effects.all().len(), job.execution.attempt), (1, 1), "it was done once, in one attempt");
}

async fn a_value_over_the_cap_fails_the_job_and_is_not_tried_again(store: Arc<Store>) {
    let (effects, id) = (Effects::default(), add(&store).await);
    let cap = store.capabilities().max_payload;
    let handler = {
        let effects = effects.clone();
        move |context: DurableContext, _: Add| {
            let effects = effects.clone();
            async move {
                let value = context.step("large", async |key| effects.happen(key).map(|()| "x".repeat(cap))).await?;
                Ok(value.len())
            }
        }
    };
    let running = start(worker(&store).register_durable(handler));
    let job = store.until_state(id, JobState::Failed).await;
    running.stop().await;
    assert_eq!((effects.all().len(), job.execution.attempt), (1, 1));
    assert!(job.errors[0].text.as_str().contains("value of the step"), "{}", job.errors[0].text);
}

/// A job that waits for an event, and what it gets.
async fn waits(context: DurableContext, _: Add) -> Result<Option<u64>, NotDone> {
    context.wait_for("payment", "paid", LONG).await
}

async fn an_event_brings_a_waiting_job_back(store: Arc<Store>) {
    let id = add(&store).await;
    let running = start(worker(&store).register_durable(waits));
    let job = store.until_state(id, JobState::Suspended).await;
    assert_eq!((job.execution.attempt, job.execution.claimed_by.as_ref()), (0, None), "given up");
    assert_eq!(store.queue().emit("other", &1).await.expect("emitted"), Emitted::New { woken: 0 });
    assert_eq!(store.queue().emit("paid", &7).await.expect("emitted"), Emitted::New { woken: 1 });
    let job = store.until_state(id, JobState::Completed).await;
    assert_eq!((job.result.expect("a result").as_str(), job.execution.attempt), ("7", 1));
    let kept = store.queue().emit("paid", &8).await.expect("emitted");
    assert_eq!(kept, Emitted::Kept(Json::from_text("7").expect("JSON")), "the first wins");
    let report = running.stop().await;
    assert_eq!((report.claimed, report.suspended, report.completed, report.released), (2, 1, 1, 0), "{report:?}");
}

async fn an_event_that_came_before_is_found(store: Arc<Store>) {
    store.queue().emit("paid", &7).keep(LONG).await.expect("emitted");
    let id = add(&store).await;
    let running = start(worker(&store).register_durable(waits));
    let job = store.until_state(id, JobState::Completed).await;
    let report = running.stop().await;
    assert_eq!((job.result.expect("a result").as_str(), job.execution.fence), ("7", 1), "in one run");
    assert_eq!(report.suspended, 0);
    let refused = store.queue().emit("fenced-queue/x", &1).await.expect_err("the library's own");
    assert!(matches!(refused, QueueError::Invalid { field: "event", .. }), "{refused}");
}

async fn a_wait_ends_when_its_time_is_over(store: Arc<Store>) {
    let id = add(&store).await;
    let handler = async |context: DurableContext, _: Add| {
        context.sleep("nap", Duration::from_millis(300)).await?;
        let came: Option<u64> = context.wait_for("payment", "never", Duration::from_millis(300)).await?;
        Ok(came)
    };
    let running = start(worker(&store).register_durable(handler));
    let job = store.until_state(id, JobState::Completed).await;
    let report = running.stop().await;
    assert_eq!((job.result.expect("a result").as_str(), job.execution.attempt), ("null", 1));
    assert_eq!((report.suspended, report.waits_timed_out, report.completed), (2, 2, 1), "{report:?}");
    let took = job.finished_at.expect("finished").unix_millis() - job.created_at.unix_millis();
    assert!(took >= 600, "both times by the store's clock: {took} ms");
}

async fn a_wait_whose_answer_is_lost_is_registered_once(store: Arc<Store>) {
    let id = add(&store).await;
    store.lose_answer(Op::Step, 2, lost);
    let running = start(worker(&store).register_durable(waits));
    store.until_calls(Op::Step, 3).await;
    let job = store.until_state(id, JobState::Suspended).await;
    assert_eq!(job.execution.fence, 1);
    store.lose_answer(Op::Emit, 1, lost);
    let emitted = store.queue().emit("paid", &7).await.expect("emitted");
    assert_eq!(emitted, Emitted::Kept(Json::from_text("7").expect("JSON")), "by the call whose answer was lost");
    let job = store.until_state(id, JobState::Completed).await;
    let report = running.stop().await;
    assert_eq!((job.result.expect("a result").as_str(), report.suspended), ("7", 1));
}

async fn what_a_handler_does_after_it_waits_counts_for_nothing(store: Arc<Store>) {
    let (effects, id) = (Effects::default(), add(&store).await);
    let handler = {
        let effects = effects.clone();
        move |context: DurableContext, _: Add| {
            let effects = effects.clone();
            async move {
                let waited: Result<Option<u64>, _> = context.wait_for("payment", "paid", LONG).await;
                if waited.is_err() {
                    // It should have ended here.
                    let refused = context.step("late", async |key| effects.happen(key)).await;
                    assert!(refused.is_err());
                    let again: Result<Option<u64>, _> = context.wait_for("another", "more", LONG).await;
                    assert!(again.is_err());
                }
                Ok("swallowed")
            }
        }
    };
    let running = start(worker(&store).register_durable(handler));
    store.until_state(id, JobState::Suspended).await;
    let report = running.stop().await;
    assert_eq!((report.suspended, report.completed, report.panicked), (1, 0, 0), "{report:?}");
    assert_eq!((store.job(id).await.state(), effects.all().len()), (JobState::Suspended, 0));
}

async fn a_waiting_job_is_canceled(store: Arc<Store>) {
    let id = add(&store).await;
    let running = start(worker(&store).register_durable(waits));
    store.until_state(id, JobState::Suspended).await;
    store.queue().cancel(id, "nobody pays").await.expect("canceled");
    assert_eq!(store.queue().emit("paid", &7).await.expect("emitted"), Emitted::New { woken: 0 });
    running.stop().await;
    assert_eq!(store.job(id).await.state(), JobState::Canceled);
}

async fn a_value_of_another_shape_is_a_failed_attempt(store: Arc<Store>) {
    let id = store.queue().enqueue(&ADD).max_attempts(2).await.expect("stored").id();
    let handler = async |context: DurableContext, _: Add| match context.attempt() {
        1 => context.step("s", async |_| Ok("text".to_owned())).await.and(Err(NotDone::retry("a new release"))),
        _ => context.step("s", async |_| Ok(7_u64)).await,
    };
    let running = start(worker(&store).register_durable(handler));
    let job = store.until_state(id, JobState::Failed).await;
    running.stop().await;
    let text = job.errors[1].text.as_str();
    assert!(text.starts_with("the value of s does not fit the handler"), "{text}");
}

#[derive(Serialize, Deserialize)]
struct Parent {
    poison: bool,
}

impl JobArgs for Parent {
    const KIND: &'static str = "parent";
}

/// Has a child add, and answers with how it ended.
async fn parent(queue: Queue<Store>, context: DurableContext, args: Parent) -> Result<String, NotDone> {
    let job = queue.enqueue(&Add { a: u64::from(args.poison), b: u64::from(context.attempt()) }).into_job()?;
    let child = context.spawn("child", job).await?;
    let outcome = context.outcome("sum", &child).await?;
    let result = outcome.result.map(|result| result.to_string());
    Ok(format!("{} {:?} {:?}", outcome.state, result, outcome.error))
}

async fn child(_: JobContext, args: Add) -> Result<u64, NotDone> {
    match args.a {
        0 => Ok(args.b),
        _ => Err(NotDone::fail("poisoned")),
    }
}

async fn family(store: &Arc<Store>, poison: bool) -> (String, Report) {
    let id = store.queue().enqueue(&Parent { poison }).await.expect("stored").id();
    let queue = store.queue();
    let parent = move |context, args| parent(queue.clone(), context, args);
    let running = start(worker(store).register_durable(parent).register(child));
    let job = store.until_state(id, JobState::Completed).await;
    let report = running.stop().await;
    assert_eq!(job.execution.attempt, 1, "waiting costs no attempt");
    (job.result.expect("a result").decode().expect("text"), report)
}

async fn a_child_is_awaited(store: Arc<Store>) {
    let (said, report) = family(&store, false).await;
    assert_eq!(said, "completed Some(\"1\") None");
    assert_eq!(report.completed, 2, "{report:?}");
    assert!(report.suspended <= 1, "{report:?}");
    let jobs: u64 = store.queue().counts().await.expect("counted").iter().map(|count| count.jobs).sum();
    assert_eq!(jobs, 2, "one child");
}

async fn a_child_that_fails_is_no_failure(store: Arc<Store>) {
    let (said, report) = family(&store, true).await;
    assert_eq!(said, "failed None Some(\"poisoned\")");
    assert_eq!((report.completed, report.failed), (1, 1), "{report:?}");
}

/// The worker that would have announced it dies first.
async fn a_child_whose_end_nobody_announced_is_found(store: Arc<Store>) {
    let id = store.queue().enqueue(&Parent { poison: false }).await.expect("stored").id();
    let queue = store.queue();
    let running = start(worker(&store).register_durable(move |context, args| parent(queue.clone(), context, args)));
    let parent_job = store.until_state(id, JobState::Suspended).await;
    let child_job = claim_one(&store).await;
    let done = Transition::Complete { result: Some(Json::null()) };
    Transitioner::new(&*store).apply(&child_job.execution, &done).await.expect("completed");
    // It would look in a minute; somebody wakes it before.
    Transitioner::new(&*store).apply(&parent_job.execution, &Transition::Wake).await.expect("woken");
    let job = store.until_state(id, JobState::Completed).await;
    running.stop().await;
    assert_eq!(job.result.expect("a result").as_str(), "\"completed Some(\\\"null\\\") None\"");
}

async fn a_job_continues_as_another(store: Arc<Store>) {
    let queue = store.queue();
    let first = queue.enqueue(&Add { a: 0, b: 3 }).unique_key("counter").priority(2).max_attempts(4).await;
    let first = first.expect("stored").id();
    let runs = Arc::new(AtomicUsize::new(0));
    let handler = {
        let runs = Arc::clone(&runs);
        move |context: DurableContext, args: Add| {
            let runs = Arc::clone(&runs);
            async move {
                runs.fetch_add(1, Ordering::SeqCst);
                if args.a < args.b {
                    context.step("work", async |_| Ok(())).await?;
                    context.continue_as_new(&Add { a: args.a + 1, b: args.b }).await?;
                }
                Ok(args.a)
            }
        }
    };
    store.lose_answer(Op::HandOver, 2, lost);
    let running = start(worker(&store).register_durable(handler));
    let completed = async || {
        let counts = queue.counts().await.expect("counted");
        counts.iter().filter(|count| count.state == Some(JobState::Completed)).map(|count| count.jobs).sum::<u64>()
    };
    store.until(async || completed().await == 4).await;
    let report = running.stop().await;
    assert_eq!((runs.load(Ordering::SeqCst), report.completed, report.claimed), (4, 4, 4), "{report:?}");
    let filter = ListFilter::default();
    let jobs = store.list(&filter, None, Limit::MAX).await.expect("listed").items;
    assert_eq!(jobs.iter().map(|job| job.payload.as_str()).collect::<Vec<_>>().len(), 4, "one successor of each");
    assert!(jobs.iter().all(|job| job.priority.get() == 2 && job.execution.max_attempts.get() == 4));
    assert!(jobs.iter().all(|job| job.unique_key.as_ref().is_some_and(|key| key.as_str() == "counter")));
    assert_eq!(jobs[0].id(), first);
}

async fn an_event_of_a_handler_is_emitted_once(store: Arc<Store>) {
    let id = add(&store).await;
    let handler = async |context: DurableContext, _: Add| {
        context.emit("tell", "told", &context.attempt()).await?;
        match context.attempt() {
            1 => Err(NotDone::retry("after it")),
            _ => Ok(()),
        }
    };
    let running = start(worker(&store).register_durable(handler));
    store.until_state(id, JobState::Completed).await;
    running.stop().await;
    assert_eq!(store.calls(Op::Emit), 1);
    let kept = store.queue().emit("told", &9).await.expect("emitted");
    assert_eq!(kept, Emitted::Kept(Json::from_text("1").expect("JSON")));
}

fn away() -> Error {
    Error::not_applied(ErrorKind::Unavailable, "connection refused")
}

async fn a_store_that_is_away_for_a_while_costs_no_attempt(store: Arc<Store>) {
    let (effects, id) = (Effects::default(), add(&store).await);
    let handler = {
        let effects = effects.clone();
        move |context: DurableContext, _: Add| {
            let effects = effects.clone();
            async move {
                context.step("charge", async |key| effects.happen(key)).await?;
                let came: Option<u64> = context.wait_for("payment", "paid", LONG).await?;
                context.continue_as_new(&Parent { poison: came.is_none() }).await?;
                Ok(())
            }
        }
    };
    for op in [Op::Steps, Op::Step, Op::HandOver] {
        store.refuse(op, 2, away);
    }
    let running = start(worker(&store).register_durable(handler));
    store.until_state(id, JobState::Suspended).await;
    store.queue().emit("paid", &7).await.expect("emitted");
    let job = store.until_state(id, JobState::Completed).await;
    let report = running.stop().await;
    assert_eq!((effects.all().len(), job.execution.attempt, report.retried), (1, 1, 0), "{report:?}");
}

async fn what_is_read_back_is_what_the_first_run_had(store: Arc<Store>) {
    let id = add(&store).await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let seen = Arc::clone(&seen);
        move |context: DurableContext, _: Add| {
            let seen = Arc::clone(&seen);
            async move {
                let value: Option<()> = context.step("s", async |_| Ok(Some(()))).await?;
                seen.lock().expect("lock").push(value);
                match context.attempt() {
                    1 => Err(NotDone::retry("again")),
                    _ => Ok(()),
                }
            }
        }
    };
    let running = start(worker(&store).register_durable(handler));
    store.until_state(id, JobState::Completed).await;
    running.stop().await;
    assert_eq!(*seen.lock().expect("lock"), [None, None], "as JSON has it, in both runs");
}

async fn a_name_whose_call_failed_can_be_used_again(store: Arc<Store>) {
    let id = add(&store).await;
    let handler = async |context: DurableContext, _: Add| {
        let failed: Result<u64, _> = context.step("s", async |_| Err(NotDone::retry("not yet"))).await;
        assert!(failed.is_err());
        let hangs = context.step("s", async |_| std::future::pending::<Result<u64, NotDone>>().await);
        assert!(tokio::time::timeout(Duration::from_millis(1), hangs).await.is_err());
        context.step("s", async |_| Ok(3_u64)).await
    };
    let running = start(worker(&store).register_durable(handler));
    let job = store.until_state(id, JobState::Completed).await;
    running.stop().await;
    assert_eq!((job.result.expect("a result").as_str(), job.execution.attempt), ("3", 1));
}

async fn steps_go_side_by_side_and_no_wait_beside_them(store: Arc<Store>) {
    let id = add(&store).await;
    let handler = async |context: DurableContext, _: Add| {
        let (one, other) = (context.step("one", async |_| Ok(1)), context.step("other", async |_| Ok(2)));
        let sum = tokio::try_join!(one, other).map(|(one, other): (u64, u64)| one + other)?;
        let waits = async {
            let came: Option<u64> = context.wait_for("payment", "paid", LONG).await?;
            Ok(came)
        };
        let nested = context.step("three", async |_| waits.await).await;
        let error = nested.map(|_| ()).expect_err("it would give the job up in the middle of a step");
        assert!(!error.is_suspended());
        context.step(format!("sum {sum}"), async |_| Ok(())).await?;
        Err::<(), _>(error)
    };
    let running = start(worker(&store).register_durable(handler));
    let job = store.until_state(id, JobState::Failed).await;
    running.stop().await;
    let text = "wait/payment would give the job up while one of its steps is under way";
    assert_eq!(job.errors[0].text.as_str(), text);
    let steps = store.queue().steps(id).await.expect("readable");
    let names: Vec<_> = steps.iter().map(|step| step.name.as_str()).collect();
    assert_eq!(names, ["one", "other", "sum 3", "three"]);
}

async fn a_job_waits_for_one_thing_at_a_time(store: Arc<Store>) {
    let id = add(&store).await;
    let handler = async |context: DurableContext, _: Add| {
        let one = context.wait_for::<u64>("one", "one", LONG);
        let other = context.wait_for::<u64>("other", "other", LONG);
        let (one, other) = tokio::join!(one, other);
        assert!(one.is_err_and(|error| error.is_suspended()), "the first waits");
        Err::<(), _>(other.expect_err("the second is refused"))
    };
    let running = start(worker(&store).register_durable(handler));
    store.until_state(id, JobState::Suspended).await;
    let report = running.stop().await;
    assert_eq!((report.suspended, report.panicked, store.job(id).await.state()), (1, 0, JobState::Suspended));
    assert_eq!(store.queue().steps(id).await.expect("readable").len(), 1);
}

async fn a_wait_and_a_step_do_not_share_a_name(store: Arc<Store>) {
    let (effects, id) = (Effects::default(), add(&store).await);
    store.queue().emit("paid", &()).await.expect("emitted");
    let handler = {
        let effects = effects.clone();
        move |context: DurableContext, _: Add| {
            let effects = effects.clone();
            async move {
                let came: Option<()> = context.wait_for("payment", "paid", LONG).await?;
                assert_eq!(came, Some(()), "it came");
                let like_a_wait = context.step("wait/payment", async |_| Ok(())).await;
                assert!(like_a_wait.is_err());
                context.step("payment", async |key| effects.happen(key)).await
            }
        }
    };
    let running = start(worker(&store).register_durable(handler));
    store.until_state(id, JobState::Completed).await;
    running.stop().await;
    assert_eq!(effects.all().len(), 1, "the step happened");
}

/// A parent that sleeps between its child and its outcome.
async fn slow_parent(queue: Queue<Store>, context: DurableContext, _: Parent) -> Result<String, NotDone> {
    let child = context.spawn("child", queue.enqueue(&Add { a: 0, b: 2 }).into_job()?).await?;
    let _: Option<u64> = context.wait_for("go", "go", LONG).await?;
    let outcome = context.outcome("sum", &child).await?;
    Ok(outcome.state.to_string())
}

async fn a_child_that_was_deleted_is_not_enqueued_again(store: Arc<Store>) {
    let queue = store.queue();
    let id = queue.enqueue(&Parent { poison: false }).await.expect("stored").id();
    let ran = Arc::new(AtomicUsize::new(0));
    let child = {
        let ran = Arc::clone(&ran);
        move |_: JobContext, _: Add| {
            ran.fetch_add(1, Ordering::SeqCst);
            async { Ok(()) }
        }
    };
    let own = queue.clone();
    let parent = move |context, args| slow_parent(own.clone(), context, args);
    let running = start(worker(&store).register_durable(parent).register(child));
    store.until_state(id, JobState::Suspended).await;
    store.until_state(id.child("child"), JobState::Completed).await;
    queue.purge(JobState::Completed, Duration::ZERO).await.expect("purged");
    queue.emit("go", &1).await.expect("emitted");
    let job = store.until_state(id, JobState::Failed).await;
    running.stop().await;
    assert!(job.errors[0].text.as_str().ends_with("was deleted"), "{}", job.errors[0].text);
    assert_eq!(ran.load(Ordering::SeqCst), 1, "it ran once");
}

async fn a_child_that_runs_again_is_awaited_without_haste(store: Arc<Store>) {
    let queue = store.queue();
    let id = queue.enqueue(&Parent { poison: false }).await.expect("stored").id();
    let own = queue.clone();
    let parent = move |context, args| slow_parent(own.clone(), context, args);
    let first = start(worker(&store).register_durable(parent.clone()).register(child));
    store.until_state(id, JobState::Suspended).await;
    let child_id = id.child("child");
    store.until_state(child_id, JobState::Completed).await;
    // Its end is announced; then nobody is there to run it again.
    store.until_calls(Op::Emit, 1).await;
    first.stop().await;
    queue.rerun(child_id).await.expect("runs again");
    let second = start(worker(&store).register_durable(parent));
    queue.emit("go", &1).await.expect("emitted");
    store.until(async || store.job(id).await.execution.fence >= 2).await;
    store.until_state(id, JobState::Suspended).await;
    let looks = store.queue().steps(id).await.expect("readable").len();
    assert_eq!(looks, 4, "the child, the go, the end that was announced, and a pause");
    let row = store.job(child_id).await.execution;
    assert_eq!(row.state, JobState::Waiting);
    second.stop().await;
}

/// What it has done was for its arguments of before.
async fn a_job_that_has_begun_is_not_replaced(store: Arc<Store>) {
    let queue = store.queue();
    let id = queue.enqueue(&ADD).unique_key("order").await.expect("stored").id();
    let handler = async |context: DurableContext, _: Add| {
        context.step("charge", async |_| Ok(())).await?;
        Err::<(), _>(NotDone::retry_after(LONG, "the bank sleeps"))
    };
    let running = start(worker(&store).register_durable(handler));
    store.until(async || store.job(id).await.errors.len() == 1).await;
    running.stop().await;
    let placed = queue.enqueue(&Add { a: 7, b: 7 }).unique_key("order").send_or_replace().await.expect("answered");
    assert_eq!(placed, Placed::Enqueued(Enqueued::Duplicate { existing: id }));
    assert_eq!(store.job(id).await.payload, Json::encode(&ADD).expect("JSON"));
}

/// F5: one that knows neither the new kind nor steps, and one that knows both, on one schema, while one takes over from the other.
async fn two_releases_work_side_by_side(store: Arc<Store>) {
    let old_store = store.another();
    old_store.forgetful.store(true, Ordering::SeqCst);
    let said = |what: &'static str| move |_: JobContext, _: Add| async move { Ok(what) };
    let queue = store.queue();
    let mut jobs = Vec::new();
    for poison in [false, true] {
        jobs.push(queue.enqueue(&Parent { poison }).await.expect("stored").id());
    }
    let old = start(worker(&old_store).register(said("old")));
    let first = old_store.until_state(add(&store).await, JobState::Completed).await;
    assert_eq!(first.result.expect("a result").as_str(), "\"old\"");
    for parent in &jobs {
        assert_eq!(store.job(*parent).await.execution.fence, 0, "what it does not know it leaves alone");
    }
    let waits = |context: DurableContext, _: Parent| async move {
        context.step("begin", async |_| Ok(())).await?;
        let came: Option<u64> = context.wait_for("go", "go", LONG).await?;
        Ok(came)
    };
    let new = start(worker(&store).register(said("new")).register_durable(waits));
    for parent in &jobs {
        store.until_state(*parent, JobState::Suspended).await;
    }
    // The old one looks for what is stale, and finds nothing of these.
    let looks = old_store.calls(Op::Stale);
    store.until(async || old_store.calls(Op::Stale) >= looks + 2).await;
    let (old_id, new_id) = (old.id.clone(), new.id.clone());
    jobs.extend([add(&store).await, add(&store).await]);
    assert_eq!(old.stop().await.left, 0);
    jobs.push(add(&store).await);
    queue.emit("go", &7).await.expect("emitted");
    for (index, id) in jobs.iter().enumerate() {
        let job = store.until_state(*id, JobState::Completed).await;
        let by = job.execution.claimed_by.expect("somebody");
        assert!(by == new_id || by == old_id && (2..4).contains(&index), "job {index} was run by {by}");
        assert_eq!(job.execution.attempt, 1, "once");
    }
    let report = new.stop().await;
    assert_eq!((report.suspended, report.left, report.conflicts), (2, 0, 0), "{report:?}");
}

#[tokio::test]
async fn a_store_without_steps_is_refused_when_it_is_built() {
    let store = Store::memory();
    store.forgetful.store(true, Ordering::SeqCst);
    let built = Worker::builder(&store.queue()).register_durable(waits).build();
    assert_eq!(built.expect_err("refused"), BuildError::NoDurableSteps { kind: "add".into() });
    Worker::builder(&store.queue())
        .register(async |_: JobContext, _: Add| Ok(()))
        .build()
        .expect("a queue all the same");
    let emitted = store.queue().emit("paid", &7).await.expect_err("refused");
    assert!(matches!(emitted, QueueError::NoDurableSteps), "{emitted}");
}

#[tokio::test(start_paused = true)]
async fn old_events_are_purged() {
    let store = Store::memory();
    let queue = store.queue();
    for number in 0..3 {
        queue.emit(&format!("e{number}"), &1).keep(Duration::from_secs(60)).await.expect("emitted");
    }
    assert_eq!(queue.purge_events().await.expect("purged"), 0);
    tokio::time::advance(Duration::from_secs(61)).await;
    assert_eq!(queue.purge_events().await.expect("purged"), 3);
    queue.emit("later", &1).keep(Duration::from_secs(60)).await.expect("emitted");
    let running = start(worker(&store).register_durable(waits));
    store.until_calls(Op::Purge, 5).await;
    running.stop().await;
    assert_eq!(queue.purge_events().await.expect("purged"), 0, "a worker has done it");
}
