//! Waits: a job is suspended until an event comes or its time is over, and goes on once.

use std::collections::BTreeSet;

use queue_core::*;

use crate::case::Case;
use crate::case::Failed;
use crate::case::Need;
use crate::case::Outcome;
use crate::case::case;
use crate::case::check;
use crate::case::check_eq;
use crate::cases::steps::claimed_anew;
use crate::cases::steps::durable;
use crate::cases::steps::states;
use crate::context::*;
use crate::harness::Damage;
use crate::harness::Hook;

const STEPS: Need = Need::DurableSteps;
const CLOCK: Need = Need::Hook(Hook::Clock);

pub(super) const CASES: &[Case] = &[
    case!(
        waits::give_the_claim_up,
        [S16],
        [STEPS],
        "A job that waits is suspended, held by nobody, its attempt given back, and the step shows what it waits for and until when."
    ),
    case!(
        waits::a_refused_registration_leaves_nothing,
        [S13],
        [STEPS],
        "Whoever lost the claim registers no wait, and the claim of the other goes on."
    ),
    case!(
        waits::a_replayed_registration_is_recognised,
        [S13],
        [STEPS],
        "A registration that is sent again is recognised while the job waits, and changes nothing once it was claimed anew."
    ),
    case!(
        waits::an_event_wakes_all_who_wait,
        [],
        [STEPS],
        "An event ends every wait for its key, of no other key, with its payload, and the jobs are due at once."
    ),
    case!(
        waits::an_event_before_the_wait_is_found,
        [],
        [STEPS],
        "A wait whose event is kept ends at once, and the job runs on under its claim."
    ),
    case!(
        waits::end_at_their_deadline,
        [],
        [STEPS, CLOCK],
        "A wait is timed out once its deadline is not after the store's now, and not before."
    ),
    case!(
        waits::the_deadline_is_fixed_once,
        [],
        [STEPS, CLOCK],
        "A wait that is registered again, after somebody woke the job, keeps its first deadline."
    ),
    case!(
        waits::race_of_event_and_timeout,
        [S24],
        [STEPS, CLOCK],
        "Of an event and a timeout that come at once exactly one ends the wait, and the job goes on once."
    ),
    case!(
        waits::a_timer_of_an_earlier_wait_changes_nothing,
        [S24],
        [STEPS, CLOCK],
        "When the deadline of an earlier wait passes, a later wait of the job goes on."
    ),
    case!(
        waits::an_event_of_an_earlier_wait_changes_nothing,
        [S24],
        [STEPS, CLOCK],
        "An event that an earlier wait was for ends no later wait of the job."
    ),
    case!(
        waits::race_of_registration_and_event,
        [],
        [STEPS],
        "An event that is emitted while a wait for it is being registered is found or finds the wait, in 200 rounds."
    ),
    case!(waits::cost_no_attempt, [], [STEPS], "A job that may be attempted once waits five times."),
    case!(
        waits::of_ended_jobs_are_not_woken,
        [],
        [STEPS, CLOCK],
        "A job that was canceled while it waited is woken by neither event nor time."
    ),
    case!(
        waits::are_woken_once,
        [S26],
        [STEPS, CLOCK],
        "Neither an event that is emitted again nor a passed deadline touches a job that was woken and runs."
    ),
    case!(
        waits::a_woken_job_is_recovered_like_any_other,
        [S26],
        [STEPS, CLOCK],
        "A job that was woken and whose worker died is recovered, and finds what it waited for without waiting again."
    ),
    case!(waits::for_the_time_alone, [], [STEPS, CLOCK], "A wait without an event ends when its time is over."),
    case!(
        waits::for_ever,
        [],
        [STEPS, CLOCK],
        "A wait until the end of time is not timed out in a thousand years, and an event ends it."
    ),
    case!(
        waits::count_for_the_key,
        [S25],
        [STEPS],
        "A job that waits has its unique key: another is a duplicate, and waking it breaks nothing."
    ),
    case!(
        waits::the_oldest_are_timed_out_first,
        [],
        [STEPS, CLOCK],
        "At most as many waits end as were asked for, those first that are overdue for longest."
    ),
    case!(
        waits::race_of_sweeps,
        [],
        [STEPS, CLOCK],
        "Of many who end overdue waits at once each wait is ended by one, and none is left."
    ),
    case!(
        waits::locked_jobs_are_skipped,
        [],
        [STEPS, CLOCK, Need::Hook(Hook::Hold), Need::SkipsLockedRows],
        "Ending overdue waits passes a job that somebody has locked."
    ),
    case!(
        waits::dropped_futures,
        [A15],
        [STEPS],
        "A registration that is dropped has suspended the job with its wait, or has done nothing."
    ),
    case!(waits::many_wake_at_once, [], [STEPS], "An event wakes three hundred jobs, each once."),
    case!(
        waits::of_unreadable_jobs,
        [],
        [STEPS, CLOCK, Need::Hook(Hook::Damage)],
        "A job that waits and cannot be read keeps neither an event nor a deadline from the others."
    ),
    case!(
        waits::are_held_by_nobody,
        [],
        [STEPS, CLOCK],
        "A job that waits is not stale, is nobody's orphan, and its old holder is told that it lost it."
    ),
    case!(
        waits::go_on_if_somebody_wants_it,
        [],
        [STEPS, CLOCK],
        "A job that an operator wakes is due at once, and neither event nor time ends its wait any more."
    ),
    case!(
        waits::keys_are_compared_byte_for_byte,
        [B12],
        [STEPS],
        "An event ends waits for its very key alone, whatever characters are in it."
    ),
    case!(
        waits::race_with_a_cancellation,
        [S24],
        [STEPS, CLOCK],
        "Of a cancellation and what ends a wait, at once, exactly one happens, and a canceled job stays so."
    ),
    case!(
        waits::race_beside_an_old_event,
        [],
        [STEPS, CLOCK],
        "An event is not lost either where one of its key is over, and is being purged while the wait is registered."
    ),
    case!(
        waits::a_suspension_without_a_wait_ends_too,
        [],
        [STEPS, CLOCK],
        "A job that was suspended without a wait is due when its time is over."
    ),
    case!(
        waits::a_step_is_no_wait,
        [],
        [STEPS],
        "The name of a step that has a value gives that value to a wait, and the name of a wait is refused to a step."
    ),
];

/// Suspends a job that this worker runs, until an event or a time.
async fn suspend(
    handle: &Handle,
    seen: &Execution,
    step: &str,
    event: Option<&str>,
    until: When,
) -> Result<Suspended, Failed> {
    let mut suspension = Suspension::new(seen, name(step), event.map(name), until)?;
    let answer = suspension.submit(durable(handle)?).await;
    answer.map_err(|error| Failed::new(format!("wait {step}: {error}")))
}

/// A new job that waits under `step`.
async fn waiting(handle: &Handle, step: &str, event: Option<&str>, until: When) -> Result<Job, Failed> {
    let job = running(handle, &new_job(), &worker("a")).await?;
    waits(handle, &job.execution, step, event, until).await
}

/// The same for a job that runs.
async fn waits(handle: &Handle, seen: &Execution, step: &str, event: Option<&str>, until: When) -> Result<Job, Failed> {
    let answer = suspend(handle, seen, step, event, until).await?;
    check!(matches!(&answer, Suspended::Waits(Settled::Applied(_))), "it must wait: {answer:?}");
    let job = read(handle, seen.id).await?;
    check_eq!(job.state(), JobState::Suspended, "it is suspended");
    Ok(job)
}

fn after(by_millis: i64) -> When {
    When::After(millis(by_millis))
}

fn event(key: &str, payload: &str) -> NewEvent {
    NewEvent { key: name(key), payload: json(payload), keep: millis(60 * MINUTE) }
}

async fn emit(handle: &Handle, key: &str, payload: &str) -> Result<Emitted, Failed> {
    Ok(durable(handle)?.emit(&event(key, payload)).await?)
}

async fn time_out(handle: &Handle) -> Result<Vec<JobId>, Failed> {
    Ok(durable(handle)?.time_out_waits(limit(1_000)).await?)
}

async fn reclaim(handle: &Handle) -> Result<Job, Failed> {
    claim_one(handle, &claim_for(&worker("b"), 1)).await
}

fn done(text: &str) -> StepState {
    StepState::Done(json(text))
}

async fn give_the_claim_up(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let before = running(&handle, &new_job(), &worker("a")).await?;
    // What it said of its progress goes with the claim.
    apply(&handle, &before.execution, &Transition::Progress { value: json("7") }).await?;
    let job = waits(&handle, &before.execution, "pay", Some("paid"), after(MINUTE)).await?;
    let waited = Execution {
        state: JobState::Suspended,
        attempt: 0,
        revision: job.execution.revision,
        claimed_by: None,
        claimed_at: None,
        attempted_at: None,
        lease_expires_at: None,
        ..before.execution.clone()
    };
    check_eq!(job, Job { execution: waited, available_at: job.available_at, ..before.clone() }, "the job");
    check!(job.execution.revision != before.execution.revision, "it is a new moment");
    let wait = Wait { event: Some(name("paid")), until: job.available_at, revision: job.execution.revision };
    let expected = [Step { name: name("pay"), fence: before.execution.fence, state: StepState::Waiting(wait) }];
    check_eq!(durable(&handle)?.steps(job.id()).await?, expected, "the step");
    let claimed_at = before.execution.claimed_at.unwrap_or(Timestamp::MIN);
    let least = claimed_at.saturating_add_millis(MINUTE);
    let most = claimed_at.saturating_add_millis(2 * MINUTE);
    check!(job.available_at >= least && job.available_at < most, "until {}, claimed at {claimed_at}", job.available_at);
    let claimed = handle.claim(&claim_for(&worker("b"), 1)).await?;
    check_eq!(claimed.jobs, [], "nobody can claim it");
    Ok(())
}

async fn a_refused_registration_leaves_nothing(context: Context) -> Outcome {
    let (handle, old) = started(&context).await?;
    let mut suspension = Suspension::new(&old.execution, name("pay"), Some(name("paid")), after(MINUTE))?;
    let new = claimed_anew(&handle, &old.execution).await?;
    for round in 1..=2 {
        let answer = suspension.submit(durable(&handle)?).await;
        check!(
            matches!(answer, Err(StepError::Transition(TransitionError::Conflict(_)))),
            "round {round}: it must be refused as a conflict, not {answer:?}"
        );
        check_eq!(durable(&handle)?.steps(old.id()).await?, [], "no wait is left");
        check_eq!(read(&handle, old.id()).await?, new, "the other claim goes on");
    }
    check_eq!(emit(&handle, "paid", "1").await?, Emitted::New { woken: 0 }, "nobody waits");
    let ended = apply(&handle, &new.execution, &complete()).await?;
    check_eq!(ended.state(), JobState::Completed, "its result is recorded");
    Ok(())
}

async fn a_replayed_registration_is_recognised(context: Context) -> Outcome {
    let (handle, old) = started(&context).await?;
    let mut suspension = Suspension::new(&old.execution, name("pay"), Some(name("paid")), after(MINUTE))?;
    let first = suspension.submit(durable(&handle)?).await;
    check!(matches!(first, Ok(Suspended::Waits(Settled::Applied(_)))), "{first:?}");
    let waits = read(&handle, old.id()).await?;
    let again = suspension.submit(durable(&handle)?).await;
    check!(matches!(again, Ok(Suspended::Waits(Settled::AlreadyApplied(_)))), "it is recognised: {again:?}");
    check_eq!(read(&handle, old.id()).await?, waits, "nothing changed");
    check_eq!(emit(&handle, "paid", "1").await?, Emitted::New { woken: 1 }, "it waits once");
    let new = reclaim(&handle).await?;
    let steps = durable(&handle)?.steps(old.id()).await?;
    let late = suspension.submit(durable(&handle)?).await;
    check!(matches!(late, Err(StepError::Transition(TransitionError::Conflict(_)))), "it is refused: {late:?}");
    check_eq!(read(&handle, old.id()).await?, new, "the later claim is not given up");
    check_eq!(durable(&handle)?.steps(old.id()).await?, steps, "the wait has ended and stays so");
    apply(&handle, &new.execution, &complete()).await?;
    Ok(())
}

async fn an_event_wakes_all_who_wait(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let other = context.connect().await?;
    let mut woken = Vec::new();
    for _ in 0..3 {
        woken.push(waiting(&handle, "pay", Some("paid"), after(MINUTE)).await?);
    }
    let sleeps = waiting(&handle, "pay", Some("paid too"), after(MINUTE)).await?;
    check_eq!(emit(&other, "paid", "{\"cents\":7}").await?, Emitted::New { woken: 3 }, "the answer");
    for before in &woken {
        let after = read(&handle, before.id()).await?;
        let execution =
            Execution { state: JobState::Waiting, revision: after.execution.revision, ..before.execution.clone() };
        check_eq!(after, Job { execution, available_at: after.available_at, ..before.clone() }, "a woken job");
        check!(after.execution.revision != before.execution.revision, "it is a new moment");
        check_eq!(states(&handle, before.id()).await?, [("pay".to_owned(), done("{\"cents\":7}"))], "its wait");
    }
    check_eq!(read(&handle, sleeps.id()).await?, sleeps, "who waits for something else does so");
    let claimed = handle.claim(&claim_for(&worker("b"), 10)).await?;
    let claimed: BTreeSet<_> = claimed.jobs.iter().map(Job::id).collect();
    check_eq!(claimed, woken.iter().map(Job::id).collect(), "they are due at once");
    Ok(())
}

async fn an_event_before_the_wait_is_found(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    check_eq!(emit(&handle, "paid", "{\"cents\":7}").await?, Emitted::New { woken: 0 }, "nobody waits yet");
    for round in 1..=2 {
        let answer = suspend(&handle, &job.execution, "pay", Some("paid"), after(MINUTE)).await?;
        check_eq!(answer, Suspended::Came(json("{\"cents\":7}")), "round {round}");
        check_eq!(read(&handle, job.id()).await?, job, "the job runs on under its claim");
        check_eq!(states(&handle, job.id()).await?, [("pay".to_owned(), done("{\"cents\":7}"))], "it is noted");
    }
    apply(&handle, &job.execution, &complete()).await?;
    Ok(())
}

async fn end_at_their_deadline(context: Context) -> Outcome {
    let handle = context.connect().await?;
    // At an instant: it can be met exactly.
    let (_, probe) = started(&context).await?;
    let now = probe.execution.claimed_at.unwrap_or(Timestamp::MIN);
    let until = now.saturating_add_millis(10 * MINUTE);
    let job = waiting(&handle, "pay", Some("paid"), When::At(until)).await?;
    check_eq!(job.available_at, until, "the deadline");
    context.advance(9 * MINUTE).await?;
    check_eq!(time_out(&handle).await?, [], "a minute before");
    check_eq!(read(&handle, job.id()).await?, job, "it waits");
    context.advance(MINUTE).await?;
    check_eq!(time_out(&handle).await?, [job.id()], "at the deadline");
    check_eq!(states(&handle, job.id()).await?, [("pay".to_owned(), StepState::TimedOut)], "the wait");
    let woken = read(&handle, job.id()).await?;
    let execution = Execution { state: JobState::Waiting, revision: woken.execution.revision, ..job.execution.clone() };
    check_eq!(woken, Job { execution, available_at: woken.available_at, ..job.clone() }, "the job");
    check!(woken.execution.revision != job.execution.revision, "it is a new moment");
    check_eq!(emit(&handle, "paid", "1").await?, Emitted::New { woken: 0 }, "the event is too late");
    let claimed = reclaim(&handle).await?;
    check_eq!(claimed.id(), job.id(), "it is due at once");
    let answer = suspend(&handle, &claimed.execution, "pay", Some("paid"), after(MINUTE)).await?;
    check_eq!(answer, Suspended::TimedOut, "registered again it is over");
    check_eq!(read(&handle, job.id()).await?, claimed, "and the job runs on");
    Ok(())
}

async fn the_deadline_is_fixed_once(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let first = waiting(&handle, "pay", Some("paid"), after(10 * MINUTE)).await?;
    for event in ["paid", "paid in another way"] {
        context.advance(MINUTE).await?;
        apply(&handle, &read(&handle, first.id()).await?.execution, &Transition::Wake).await?;
        let claimed = reclaim(&handle).await?;
        let again = waits(&handle, &claimed.execution, "pay", Some(event), after(10 * MINUTE)).await?;
        check_eq!(again.available_at, first.available_at, "when the job is due");
        let wait = Wait { event: Some(name(event)), until: first.available_at, revision: again.execution.revision };
        let expected = [("pay".to_owned(), StepState::Waiting(wait))];
        check_eq!(
            states(&handle, first.id()).await?,
            expected,
            "the wait is registered anew, and has the first deadline"
        );
    }
    check_eq!(emit(&handle, "paid", "1").await?, Emitted::New { woken: 0 }, "what it waited for before");
    check_eq!(emit(&handle, "paid in another way", "2").await?, Emitted::New { woken: 1 }, "what it waits for");
    Ok(())
}

async fn race_of_event_and_timeout(context: Context) -> Outcome {
    let (handle, other) = (context.connect().await?, context.connect().await?);
    let (mut by_event, mut by_time) = (0, 0);
    for round in 0..30 {
        let key = format!("paid {round}");
        let job = waiting(&handle, "pay", Some(&key), after(MINUTE)).await?;
        context.advance(MINUTE).await?;
        let answers = context
            .race(2, |index| {
                let (handle, other, key) = (handle.clone(), other.clone(), key.clone());
                async move {
                    match (index + round) % 2 {
                        0 => Ok::<_, Failed>((emit(&handle, &key, "1").await? == Emitted::New { woken: 1 }, false)),
                        _ => Ok((false, !time_out(&other).await?.is_empty())),
                    }
                }
            })
            .await?;
        let answers: Vec<_> = answers.into_iter().collect::<Result<_, _>>()?;
        let event = answers.iter().any(|(event, _)| *event);
        let mut time = answers.iter().any(|(_, time)| *time);
        check!(!(event && time), "round {round}: one of them ended the wait, not both");
        if !event && !time {
            // A sweep passes what is locked: then the event had it, and it did not end the wait.
            time = !time_out(&other).await?.is_empty();
            check!(time, "round {round}: one of them ends the wait");
        }
        (by_event, by_time) = (by_event + u32::from(event), by_time + u32::from(time));
        let expected = if event { done("1") } else { StepState::TimedOut };
        check_eq!(states(&handle, job.id()).await?, [("pay".to_owned(), expected)], "round {round}: the outcome");
        let claimed = handle.claim(&claim_for(&worker("b"), 10)).await?.jobs;
        check_eq!(claimed.len(), 1, "round {round}: the job goes on once");
        check_eq!(claimed[0].execution.fence, job.execution.fence + 1, "round {round}: by the next claim");
        apply(&handle, &claimed[0].execution, &complete()).await?;
    }
    context.note(format_args!("{by_event} by the event, {by_time} by the time"));
    Ok(())
}

/// The job, which waits: somebody has it go on, and it waits for ninety minutes under this name, for an event of this name.
async fn interrupted(handle: &Handle, id: JobId, step: &str) -> Result<Job, Failed> {
    apply(handle, &read(handle, id).await?.execution, &Transition::Wake).await?;
    let claimed = reclaim(handle).await?;
    waits(handle, &claimed.execution, step, Some(step), after(90 * MINUTE)).await
}

async fn a_timer_of_an_earlier_wait_changes_nothing(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = waiting(&handle, "first", Some("one"), after(MINUTE)).await?;
    emit(&handle, "one", "1").await?;
    let claimed = reclaim(&handle).await?;
    context.advance(2 * MINUTE).await?;
    check_eq!(time_out(&handle).await?, [], "while it runs");
    check_eq!(read(&handle, job.id()).await?, claimed, "it is not disturbed");
    let second = waits(&handle, &claimed.execution, "second", Some("two"), after(60 * MINUTE)).await?;
    check_eq!(time_out(&handle).await?, [], "while it waits for something else");
    check_eq!(read(&handle, job.id()).await?, second, "it waits on");
    let steps = states(&handle, job.id()).await?;
    check_eq!(steps[0], ("first".to_owned(), done("1")), "the first wait ended with the event");
    check!(matches!(steps[1].1, StepState::Waiting(_)), "the second goes on: {steps:?}");
    let third = interrupted(&handle, second.id(), "third").await?;
    context.advance(60 * MINUTE).await?;
    check_eq!(time_out(&handle).await?, [], "when the time of the second, which nothing ended, is over");
    check_eq!(read(&handle, job.id()).await?, third, "it waits on");
    let before = states(&handle, job.id()).await?;
    context.advance(60 * MINUTE).await?;
    check_eq!(time_out(&handle).await?, [job.id()], "when its own time is over");
    let expected = [before[..2].to_vec(), vec![("third".to_owned(), StepState::TimedOut)]].concat();
    check_eq!(states(&handle, job.id()).await?, expected, "the third has timed out, and no other");
    Ok(())
}

async fn an_event_of_an_earlier_wait_changes_nothing(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = waiting(&handle, "first", Some("one"), after(MINUTE)).await?;
    context.advance(2 * MINUTE).await?;
    check_eq!(time_out(&handle).await?, [job.id()], "the first is over");
    let claimed = reclaim(&handle).await?;
    let second = waits(&handle, &claimed.execution, "second", Some("two"), after(60 * MINUTE)).await?;
    check_eq!(emit(&handle, "one", "1").await?, Emitted::New { woken: 0 }, "nobody waits for it any more");
    check_eq!(read(&handle, job.id()).await?, second, "it waits on");
    check_eq!(states(&handle, job.id()).await?[0], ("first".to_owned(), StepState::TimedOut), "the first stays");
    let third = interrupted(&handle, second.id(), "third").await?;
    let before = states(&handle, job.id()).await?;
    check_eq!(emit(&handle, "two", "2").await?, Emitted::New { woken: 0 }, "nor for the second, which nothing ended");
    check_eq!(read(&handle, job.id()).await?, third, "it waits on");
    check_eq!(emit(&handle, "third", "3").await?, Emitted::New { woken: 1 }, "the third ends");
    let expected = [before[..2].to_vec(), vec![("third".to_owned(), done("3"))]].concat();
    check_eq!(states(&handle, job.id()).await?, expected, "and no other");
    Ok(())
}

async fn race_of_registration_and_event(context: Context) -> Outcome {
    let (handle, other) = (context.connect().await?, context.connect().await?);
    for round in 0..200 {
        let key = format!("paid {round}");
        let job = running(&handle, &new_job(), &worker("a")).await?;
        let answers = context
            .race(2, |index| {
                let (handle, other, key, seen) = (handle.clone(), other.clone(), key.clone(), job.execution.clone());
                async move {
                    match (index + round) % 2 {
                        0 => Ok::<_, Failed>((
                            Some(suspend(&handle, &seen, "pay", Some(&key), after(MINUTE)).await?),
                            None,
                        )),
                        _ => Ok((None, Some(emit(&other, &key, "1").await?))),
                    }
                }
            })
            .await?;
        let (mut suspended, mut emitted) = (None, None);
        for answer in answers {
            let (one, other) = answer?;
            (suspended, emitted) = (suspended.or(one), emitted.or(other));
        }
        let row = read(&handle, job.id()).await?;
        let state = row.state();
        match (&suspended, &emitted) {
            (Some(Suspended::Came(_)), Some(Emitted::New { woken: 0 })) => {
                check_eq!(state, JobState::Running, "round {round}: it found the event and runs on");
            }
            (Some(Suspended::Waits(_)), Some(Emitted::New { woken: 1 })) => {
                check_eq!(state, JobState::Waiting, "round {round}: the event found it");
            }
            answers => return Err(Failed::new(format!("round {round}: the event is lost: {answers:?}, {state}"))),
        }
        check_eq!(states(&handle, job.id()).await?, [("pay".to_owned(), done("1"))], "round {round}: the wait");
        apply(&handle, &row.execution, &cancel()).await?;
    }
    Ok(())
}

async fn cost_no_attempt(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let new = NewJob { max_attempts: std::num::NonZeroU32::MIN, ..new_job() };
    let mut job = running(&handle, &new, &worker("a")).await?;
    for round in 0..5 {
        check_eq!(job.execution.attempt, 1, "round {round}: it is the first attempt");
        waits(&handle, &job.execution, &format!("wait {round}"), Some(&format!("event {round}")), after(MINUTE))
            .await?;
        emit(&handle, &format!("event {round}"), "1").await?;
        job = reclaim(&handle).await?;
    }
    check_eq!(states(&handle, job.id()).await?.len(), 5, "all waits are noted");
    check_eq!(apply(&handle, &job.execution, &complete()).await?.state(), JobState::Completed, "it completes");
    Ok(())
}

async fn of_ended_jobs_are_not_woken(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = waiting(&handle, "pay", Some("paid"), after(MINUTE)).await?;
    let canceled = apply(&handle, &job.execution, &cancel()).await?;
    check_eq!(canceled.state(), JobState::Canceled, "a job that waits can be canceled");
    check_eq!(emit(&handle, "paid", "1").await?, Emitted::New { woken: 0 }, "nobody waits");
    context.advance(2 * MINUTE).await?;
    check_eq!(time_out(&handle).await?, [], "nobody is overdue");
    check_eq!(read(&handle, job.id()).await?, canceled, "it stays canceled");
    Ok(())
}

async fn are_woken_once(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = waiting(&handle, "pay", Some("paid"), after(MINUTE)).await?;
    check_eq!(emit(&handle, "paid", "1").await?, Emitted::New { woken: 1 }, "the first");
    check_eq!(emit(&handle, "paid", "2").await?, Emitted::Kept(json("1")), "the second");
    let claimed = reclaim(&handle).await?;
    context.advance(2 * MINUTE).await?;
    check_eq!(emit(&handle, "paid", "3").await?, Emitted::Kept(json("1")), "while it runs");
    check_eq!(time_out(&handle).await?, [], "while it runs");
    check_eq!(read(&handle, job.id()).await?, claimed, "it is not disturbed");
    check_eq!(states(&handle, job.id()).await?, [("pay".to_owned(), done("1"))], "the first payload is what it got");
    Ok(())
}

async fn a_woken_job_is_recovered_like_any_other(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = waiting(&handle, "pay", Some("paid"), after(MINUTE)).await?;
    // Not kept: what it waited for is in its step alone.
    let event = NewEvent { keep: Delay::ZERO, ..event("paid", "1") };
    check_eq!(durable(&handle)?.emit(&event).await?, Emitted::New { woken: 1 }, "it is woken");
    reclaim(&handle).await?;
    // Its worker dies.
    context.advance(2 * MINUTE).await?;
    let sweep = recover_stale(&handle, lease(MINUTE), limit(10), |_| false).await?;
    check_eq!(ids(&sweep.recovered), [job.id()], "it is recovered");
    let claimed = reclaim(&handle).await?;
    check_eq!(claimed.execution.attempt, 2, "the start that died counts");
    let answer = suspend(&handle, &claimed.execution, "pay", Some("paid"), after(MINUTE)).await?;
    check_eq!(answer, Suspended::Came(json("1")), "it does not wait again");
    check_eq!(read(&handle, job.id()).await?, claimed, "it runs on");
    Ok(())
}

async fn for_the_time_alone(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = waiting(&handle, "nap", None, after(MINUTE)).await?;
    check_eq!(time_out(&handle).await?, [], "before");
    context.advance(MINUTE).await?;
    check_eq!(time_out(&handle).await?, [job.id()], "after");
    check_eq!(states(&handle, job.id()).await?, [("nap".to_owned(), StepState::TimedOut)], "the wait");
    Ok(())
}

async fn for_ever(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = waiting(&handle, "pay", Some("paid"), When::At(Timestamp::MAX)).await?;
    check_eq!(job.available_at, Timestamp::MAX, "the deadline");
    context.advance(Delay::MAX.as_millis()).await?;
    check_eq!(time_out(&handle).await?, [], "a thousand years later");
    check_eq!(emit(&handle, "paid", "1").await?, Emitted::New { woken: 1 }, "an event ends it");
    Ok(())
}

async fn count_for_the_key(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = running(&handle, &keyed("order-7"), &worker("a")).await?;
    waits(&handle, &job.execution, "pay", Some("paid"), after(MINUTE)).await?;
    check_eq!(offer(&handle, &keyed("order-7")).await?, Enqueued::Duplicate { existing: job.id() }, "while it waits");
    check_eq!(emit(&handle, "paid", "1").await?, Emitted::New { woken: 1 }, "it is woken");
    check_eq!(offer(&handle, &keyed("order-7")).await?, Enqueued::Duplicate { existing: job.id() }, "once it is woken");
    let claimed = reclaim(&handle).await?;
    apply(&handle, &claimed.execution, &complete()).await?;
    let next = keyed("order-7");
    check_eq!(offer(&handle, &next).await?, Enqueued::New(next.id), "once it has ended");
    Ok(())
}

async fn the_oldest_are_timed_out_first(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let mut jobs = Vec::new();
    for minutes in [3, 1, 2] {
        jobs.push(waiting(&handle, "nap", None, after(minutes * MINUTE)).await?.id());
    }
    context.advance(10 * MINUTE).await?;
    for (rows, expected) in [(1, vec![jobs[1]]), (1, vec![jobs[2]]), (10, vec![jobs[0]]), (10, vec![])] {
        check_eq!(durable(&handle)?.time_out_waits(limit(rows)).await?, expected, "at most {rows}");
    }
    Ok(())
}

async fn race_of_sweeps(context: Context) -> Outcome {
    let mut handles = Vec::new();
    for _ in 0..4 {
        handles.push(context.connect().await?);
    }
    let mut jobs = BTreeSet::new();
    for _ in 0..40 {
        jobs.insert(waiting(&handles[0], "nap", None, after(MINUTE)).await?.id());
    }
    context.advance(MINUTE).await?;
    let answers = context
        .race(4, |index| {
            let handle = handles[index].clone();
            async move {
                let mut ended = Vec::new();
                loop {
                    let more = durable(&handle)?.time_out_waits(limit(7)).await?;
                    if more.is_empty() {
                        return Ok::<_, Failed>(ended);
                    }
                    ended.extend(more);
                }
            }
        })
        .await?;
    let mut ended = Vec::new();
    for answer in answers {
        ended.extend(answer?);
    }
    ended.extend(time_out(&handles[0]).await?);
    check_eq!(ended.len(), jobs.len(), "each by one");
    check_eq!(ended.into_iter().collect::<BTreeSet<_>>(), jobs, "none is left");
    Ok(())
}

async fn locked_jobs_are_skipped(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let locked = waiting(&handle, "nap", None, after(MINUTE)).await?;
    let free = waiting(&handle, "nap", None, after(MINUTE)).await?;
    context.advance(2 * MINUTE).await?;
    let hold = context.store.hold(&locked.execution).await?;
    let ended = time_out(&handle).await;
    hold.roll_back().await?;
    check_eq!(ended?, [free.id()], "the free one");
    check_eq!(time_out(&handle).await?, [locked.id()], "the locked one, later");
    Ok(())
}

async fn dropped_futures(context: Context) -> Outcome {
    let (handle, other) = (context.connect().await?, context.connect().await?);
    for polls in 1..=20 {
        let key = format!("paid {polls}");
        let job = running(&handle, &new_job(), &worker("a")).await?;
        let mut suspension = Suspension::new(&job.execution, name("pay"), Some(name(&key)), after(MINUTE))?;
        drop_after(polls, suspension.submit(durable(&handle)?)).await;
        let answer = suspension.submit(durable(&other)?).await;
        check!(matches!(answer, Ok(Suspended::Waits(_))), "after {polls} polls, sent again: {answer:?}");
        let row = read(&other, job.id()).await?;
        let wait = Wait { event: Some(name(&key)), until: row.available_at, revision: row.execution.revision };
        let expected = [("pay".to_owned(), StepState::Waiting(wait))];
        check_eq!(states(&other, job.id()).await?, expected, "after {polls} polls");
        drop_after(polls, emit(&handle, &key, "1")).await;
        // It was emitted or not, and if not it is now.
        emit(&other, &key, "1").await?;
        check_eq!(states(&other, job.id()).await?, [("pay".to_owned(), done("1"))], "after {polls} polls");
        let row = read(&other, job.id()).await?;
        check_eq!(row.state(), JobState::Waiting, "after {polls} polls");
        apply(&other, &row.execution, &cancel()).await?;
    }
    Ok(())
}

async fn many_wake_at_once(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let jobs: Vec<_> = (0..300).map(|_| new_job()).collect();
    handle.enqueue(&jobs).await?;
    for job in handle.claim(&claim_for(&worker("a"), 300)).await?.jobs {
        suspend(&handle, &job.execution, "pay", Some("paid"), after(MINUTE)).await?;
    }
    check_eq!(emit(&handle, "paid", "1").await?, Emitted::New { woken: 300 }, "all are woken");
    let claimed = handle.claim(&claim_for(&worker("b"), 1_000)).await?;
    check_eq!(claimed.jobs.len(), 300, "all go on");
    check_eq!(states(&handle, jobs[299].id).await?, [("pay".to_owned(), done("1"))], "with the payload");
    Ok(())
}

async fn of_unreadable_jobs(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let (mut pay, mut nap) = (Vec::new(), Vec::new());
    for damage in [Some(Damage::ForeignState), Some(Damage::BrokenData), None] {
        pay.push(waiting(&handle, "pay", Some("paid"), after(2 * MINUTE)).await?.id());
        nap.push(waiting(&handle, "nap", None, after(MINUTE)).await?.id());
        for (id, damage) in [pay.last(), nap.last()].into_iter().flatten().zip(damage.into_iter().cycle()) {
            context.store.damage(*id, damage).await?;
            context.note(format_args!("job {id} is damaged: {damage:?}"));
        }
    }
    context.advance(MINUTE).await?;
    let ended: BTreeSet<_> = time_out(&handle).await?.into_iter().collect();
    check_eq!(ended, BTreeSet::from([nap[1], nap[2]]), "those that are overdue and of this version");
    check_eq!(emit(&handle, "paid", "1").await?, Emitted::New { woken: 2 }, "those of this version");
    for (id, step, expected) in
        [(nap[1], "nap", StepState::TimedOut), (pay[1], "pay", done("1")), (pay[2], "pay", done("1"))]
    {
        check_eq!(states(&handle, id).await?, [(step.to_owned(), expected)], "the wait of job {id}");
    }
    for id in [pay[0], nap[0]] {
        let left = states(&handle, id).await?;
        check!(matches!(left[..], [(_, StepState::Waiting(_))]), "the job of a newer version waits on: {left:?}");
    }
    Ok(())
}

async fn are_held_by_nobody(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let me = worker("a");
    let before = running(&handle, &new_job(), &me).await?;
    let job = waits(&handle, &before.execution, "pay", Some("paid"), after(60 * MINUTE)).await?;
    context.advance(10 * MINUTE).await?;
    let held: Vec<_> = Held::of(&before.execution).into_iter().collect();
    check_eq!(handle.extend_leases(&held, lease(MINUTE)).await?, [Beat::Lost], "the old holder is told");
    check_eq!(handle.stale(None, limit(10)).await?.items, [], "it is not stale");
    let sweep = recover_stale(&handle, lease(MINUTE), limit(10), |_| false).await?;
    check_eq!((sweep.recovered.len(), sweep.adopted.len()), (0, 0), "no sweep touches it");
    let sweep = release_orphans(&handle, &me, Delay::ZERO, limit(10), |_| false).await?;
    check_eq!(sweep.recovered, [], "it is no orphan");
    check_eq!(read(&handle, job.id()).await?, job, "it waits on");
    for transition in holder_moves().into_iter().filter(|transition| !matches!(transition, Transition::Cancel { .. })) {
        conflicts(&handle, &before.execution, &transition).await?;
    }
    Ok(())
}

async fn go_on_if_somebody_wants_it(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = waiting(&handle, "pay", Some("paid"), after(MINUTE)).await?;
    let woken = apply(&handle, &job.execution, &Transition::Wake).await?;
    check_eq!((woken.state(), woken.execution.attempt), (JobState::Waiting, 0), "it is waiting");
    context.advance(2 * MINUTE).await?;
    check_eq!(time_out(&handle).await?, [], "its wait is no more");
    check_eq!(emit(&handle, "paid", "1").await?, Emitted::New { woken: 0 }, "its wait is no more");
    let claimed = reclaim(&handle).await?;
    check_eq!(claimed.id(), job.id(), "it is due");
    let answer = suspend(&handle, &claimed.execution, "pay", Some("paid"), after(MINUTE)).await?;
    check_eq!(answer, Suspended::Came(json("1")), "the event is found");
    Ok(())
}

async fn race_with_a_cancellation(context: Context) -> Outcome {
    let (handle, other) = (context.connect().await?, context.connect().await?);
    for round in 0..30 {
        let key = format!("paid {round}");
        let job = waiting(&handle, "pay", Some(&key), after(MINUTE)).await?;
        context.advance(MINUTE).await?;
        let decision = Decision::new(&job.execution, &cancel())?;
        let answers = context
            .race(2, |index| {
                let (handle, other, key, mut decision) = (handle.clone(), other.clone(), key.clone(), decision.clone());
                async move {
                    // Each is first in turn, and each way to end a wait with it.
                    if index == round / 2 % 2 {
                        return match Transitioner::new(&handle).submit(&mut decision).await {
                            Ok(_) => Ok((true, false)),
                            Err(TransitionError::Conflict(_)) => Ok((false, false)),
                            Err(error) => Err(Failed::from(error)),
                        };
                    }
                    let woken = match round % 2 {
                        0 => emit(&other, &key, "1").await? == Emitted::New { woken: 1 },
                        _ => !time_out(&other).await?.is_empty(),
                    };
                    Ok((false, woken))
                }
            })
            .await?;
        let answers: Vec<_> = answers.into_iter().collect::<Result<_, Failed>>()?;
        let (canceled, woken) = (answers.iter().any(|(it, _)| *it), answers.iter().any(|(_, it)| *it));
        let row = read(&handle, job.id()).await?;
        // A sweep passes what is locked: by the cancellation, which then happened.
        check!(canceled != woken, "round {round}: canceled {canceled}, woken {woken}");
        let expected = if canceled { JobState::Canceled } else { JobState::Waiting };
        check_eq!(row.state(), expected, "round {round}: canceled {canceled}, woken {woken}");
        if woken {
            apply(&handle, &row.execution, &cancel()).await?;
        }
    }
    Ok(())
}

async fn race_beside_an_old_event(context: Context) -> Outcome {
    let handles = [context.connect().await?, context.connect().await?, context.connect().await?];
    for round in 0..50 {
        let job = running(&handles[0], &new_job(), &worker("a")).await?;
        let answers = context
            .race(3, |index| {
                let (handle, seen) = (handles[index].clone(), job.execution.clone());
                async move {
                    match (index + round) % 3 {
                        0 => {
                            let answer = suspend(&handle, &seen, "pay", Some("paid"), after(MINUTE)).await?;
                            Ok::<_, Failed>((Some(matches!(answer, Suspended::Came(_))), None))
                        }
                        1 => {
                            let event = NewEvent { keep: millis(MINUTE), ..event("paid", "1") };
                            let emitted = durable(&handle)?.emit(&event).await?;
                            Ok((None, Some(matches!(emitted, Emitted::New { woken: 1 }))))
                        }
                        _ => Ok(durable(&handle)?.purge_events(limit(10)).await.map(|_| (None, None))?),
                    }
                }
            })
            .await?;
        let (mut found, mut woken) = (None, None);
        for answer in answers {
            let (one, other) = answer?;
            (found, woken) = (found.or(one), woken.or(other));
        }
        check!(found != woken, "round {round}: the event was found: {found:?}, the wait was found: {woken:?}");
        check_eq!(states(&handles[0], job.id()).await?, [("pay".to_owned(), done("1"))], "round {round}: the wait");
        let row = read(&handles[0], job.id()).await?;
        apply(&handles[0], &row.execution, &cancel()).await?;
        // Over, and not purged yet.
        context.advance(2 * MINUTE).await?;
    }
    Ok(())
}

async fn a_suspension_without_a_wait_ends_too(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let suspended = apply(&handle, &job.execution, &Transition::Suspend { until: after(MINUTE) }).await?;
    check_eq!(suspended.state(), JobState::Suspended, "it is suspended");
    check_eq!(time_out(&handle).await?, [], "before");
    context.advance(MINUTE).await?;
    check_eq!(time_out(&handle).await?, [job.id()], "after");
    check_eq!(read(&handle, job.id()).await?.state(), JobState::Waiting, "it goes on");
    check_eq!(durable(&handle)?.steps(job.id()).await?, [], "it has no steps");
    Ok(())
}

async fn keys_are_compared_byte_for_byte(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let longest = "k".repeat(Name::MAX_BYTES);
    let keys = ["a", "A", "a ", " a", "é", "e\u{301}", "'\"\\", "$a.b", "%", "😀", "?1", &longest];
    let mut jobs = Vec::new();
    for key in keys {
        jobs.push(waiting(&handle, "w", Some(key), after(MINUTE)).await?);
    }
    for (key, job) in keys.iter().zip(&jobs) {
        let payload = format!("{key:?}").replace("\\u{301}", "\u{301}");
        let payload = Json::encode(&payload)?;
        check_eq!(emit(&handle, key, payload.as_str()).await?, Emitted::New { woken: 1 }, "{key:?} wakes one");
        check_eq!(
            states(&handle, job.id()).await?,
            [("w".to_owned(), StepState::Done(payload))],
            "the one for {key:?}"
        );
    }
    Ok(())
}

async fn a_step_is_no_wait(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let (step, wait) = (name("step"), name("wait"));
    let steps = durable(&handle)?;
    let failed = |error: StepError| Failed::new(error.to_string());
    finish_step(steps, &job.execution, &step, &json("1")).await.map_err(failed)?;
    let answer = suspend(&handle, &job.execution, "step", Some("e"), after(MINUTE)).await?;
    check_eq!(answer, Suspended::Came(json("1")), "a step that has a value");
    waits(&handle, &job.execution, "wait", Some("e"), after(MINUTE)).await?;
    apply(&handle, &read(&handle, job.id()).await?.execution, &Transition::Wake).await?;
    let claimed = reclaim(&handle).await?;
    let before = states(&handle, job.id()).await?;
    let begun = begin_step(steps, &claimed.execution, &wait).await;
    check!(matches!(begun, Err(StepError::IsWait { .. })), "a wait is not begun as a step: {begun:?}");
    let finished = finish_step(steps, &claimed.execution, &wait, &json("1")).await;
    check!(matches!(finished, Err(StepError::IsWait { .. })), "nor finished: {finished:?}");
    check_eq!(states(&handle, job.id()).await?, before, "nothing changed");
    Ok(())
}
