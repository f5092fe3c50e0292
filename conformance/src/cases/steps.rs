//! Steps: what a job did under a name is written under its claim, once, and read back.

use queue_core::*;

use crate::case::Case;
use crate::case::Failed;
use crate::case::Need;
use crate::case::Outcome;
use crate::case::case;
use crate::case::check;
use crate::case::check_eq;
use crate::cases::data::awkward;
use crate::context::*;
use crate::harness::Damage;
use crate::harness::Hook;

const STEPS: Need = Need::DurableSteps;

pub(super) const CASES: &[Case] = &[
    case!(steps::are_there_as_declared, [], [], "A backend has durable steps exactly if it declares them."),
    case!(steps::are_read_back, [], [STEPS], "What was begun and finished is read back by anybody, by name."),
    case!(
        steps::a_finished_step_is_not_begun_again,
        [S23],
        [STEPS],
        "Whoever begins a step that has a value gets the value, and nothing is written."
    ),
    case!(
        steps::a_lost_claim_writes_nothing,
        [S23 A3],
        [STEPS],
        "Whoever lost the claim neither begins a step nor finishes one, and is told by a conflict."
    ),
    case!(
        steps::every_field_is_compared,
        [A1],
        [STEPS],
        "A step is refused if any one field of the job's fingerprint differs."
    ),
    case!(
        steps::leave_the_job_alone,
        [A6],
        [STEPS],
        "Beginning and finishing a step change nothing of the job, and its holder's outcome is recorded after them."
    ),
    case!(steps::values_are_kept_byte_for_byte, [E5], [STEPS], "The value of a step comes back as it was saved."),
    case!(
        steps::a_newer_claim_takes_over,
        [S23],
        [STEPS],
        "A step that was begun and not finished is begun or finished by the next claim, and shows its fence."
    ),
    case!(
        steps::the_first_value_stays,
        [],
        [STEPS],
        "Saving the same value again is success; another one is refused and the first stays."
    ),
    case!(
        steps::race_of_old_and_new_holder,
        [S23],
        [STEPS],
        "Of a holder that lost its claim and the one that has it only the latter begins a step, however close they are."
    ),
    case!(
        steps::race_of_values,
        [],
        [STEPS],
        "Of many values that are saved for one step at once exactly one is there, and everybody is told which."
    ),
    case!(
        steps::names_are_compared_byte_for_byte,
        [B12],
        [STEPS],
        "Names that differ in case, accents or trailing spaces are steps of their own; odd ones are bound, not spliced."
    ),
    case!(steps::are_of_one_job, [], [STEPS], "The same name in two jobs is two steps."),
    case!(
        steps::too_large_is_refused,
        [E6],
        [STEPS],
        "A value over the cap is refused before anything is written; one at the cap is kept."
    ),
    case!(
        steps::only_of_a_job_that_is_there,
        [],
        [STEPS],
        "A step of a job that does not exist is told apart from a conflict, and none is kept."
    ),
    case!(
        steps::of_an_unreadable_job,
        [],
        [STEPS, Need::Hook(Hook::Damage)],
        "A step of a job in a state of a newer version is refused as unreadable, and nothing is written."
    ),
    case!(
        steps::survive_what_the_job_goes_through,
        [S26],
        [STEPS],
        "Steps stay when the job is tried again, released, ended and run again."
    ),
    case!(
        steps::go_with_their_job,
        [],
        [STEPS],
        "A purge of the job deletes its steps: a job of the same id has none."
    ),
    case!(
        steps::dropped_futures,
        [A15],
        [STEPS],
        "A call that is dropped has written the step or not, and keeps nobody from writing it."
    ),
    case!(steps::many_of_one_job, [], [STEPS], "A job may have five hundred steps, and all are read back."),
];

/// The contract of durable steps on this handle.
pub(super) fn durable(handle: &Handle) -> Result<&dyn DurableSteps, Failed> {
    handle.durable_steps().ok_or_else(|| Failed::new("durable steps are declared, and the handle has none"))
}

/// The steps of a job and their states.
pub(super) async fn states(handle: &Handle, id: JobId) -> Result<Vec<(String, StepState)>, Failed> {
    let steps = durable(handle)?.steps(id).await?;
    Ok(steps.into_iter().map(|step| (step.name.into(), step.state)).collect())
}

fn done(text: &str) -> StepState {
    StepState::Done(json(text))
}

async fn begin(handle: &Handle, seen: &Execution, step: &str) -> Result<Option<Json>, Failed> {
    begin_step(durable(handle)?, seen, &name(step)).await.map_err(|error| Failed::new(format!("begin {step}: {error}")))
}

async fn finish(handle: &Handle, seen: &Execution, step: &str, value: &str) -> Outcome {
    let finished = finish_step(durable(handle)?, seen, &name(step), &json(value)).await;
    finished.map_err(|error| Failed::new(format!("finish {step}: {error}")))
}

/// Fails unless a step was refused because the job is not what it was.
fn refused_as_conflict<T: std::fmt::Debug>(answer: Result<T, StepError>, what: &str) -> Outcome {
    match answer {
        Err(StepError::Transition(TransitionError::Conflict(_))) => Ok(()),
        other => Err(Failed::new(format!("{what} must be refused as a conflict, not {other:?}"))),
    }
}

/// What a running job might have been seen as, each unlike what it is in one field.
pub(super) fn other_moments(seen: &Execution) -> [Fingerprint; 8] {
    let right = seen.fingerprint();
    let later = |at: Option<Timestamp>| at.map(|at| at.saturating_add_millis(1));
    [
        Fingerprint { state: JobState::Claimed, ..right.clone() },
        Fingerprint { attempt: right.attempt + 1, ..right.clone() },
        Fingerprint { claimed_by: Some(worker("b")), ..right.clone() },
        Fingerprint { claimed_by: None, ..right.clone() },
        Fingerprint { claimed_at: later(right.claimed_at), ..right.clone() },
        Fingerprint { claimed_at: None, ..right.clone() },
        Fingerprint { attempted_at: later(right.attempted_at), ..right.clone() },
        Fingerprint { revision: Revision::random(), ..right },
    ]
}

/// The job, given back by its holder and claimed by another worker.
pub(super) async fn claimed_anew(handle: &Handle, seen: &Execution) -> Result<Job, Failed> {
    apply(handle, seen, &Transition::Release).await?;
    let claimed = claim_one(handle, &claim_for(&worker("b"), 1)).await?;
    check_eq!(claimed.id(), seen.id, "the job is claimed again");
    Ok(claimed)
}

async fn are_there_as_declared(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let declared = handle.capabilities().durable_steps;
    check_eq!(handle.durable_steps().is_some(), declared, "durable steps are there as declared");
    check_eq!(declared, context.capabilities.durable_steps, "the harness declares the same");
    Ok(())
}

async fn are_read_back(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    check_eq!(durable(&handle)?.steps(JobId::new()).await?, [], "a job that is not there has no steps");
    check_eq!(durable(&handle)?.steps(job.id()).await?, [], "a new job has no steps");
    for step in ["b", "a", "c"] {
        check_eq!(begin(&handle, &job.execution, step).await?, None, "it is begun for the first time");
    }
    finish(&handle, &job.execution, "a", "{\"paid\":7}").await?;
    let other = context.connect().await?;
    let expected = [("a", done("{\"paid\":7}")), ("b", StepState::Begun), ("c", StepState::Begun)];
    let expected = expected.map(|(step, state)| Step { name: name(step), fence: job.execution.fence, state });
    check_eq!(durable(&other)?.steps(job.id()).await?, expected, "the steps, by name");
    Ok(())
}

async fn a_finished_step_is_not_begun_again(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    begin(&handle, &job.execution, "charge").await?;
    finish(&handle, &job.execution, "charge", "1").await?;
    for round in 1..=2 {
        check_eq!(begin(&handle, &job.execution, "charge").await?, Some(json("1")), "round {round}");
    }
    let next = claimed_anew(&handle, &job.execution).await?;
    check_eq!(begin(&handle, &next.execution, "charge").await?, Some(json("1")), "for the next claim");
    let steps = durable(&handle)?.steps(job.id()).await?;
    check_eq!(steps[0].fence, job.execution.fence, "it stays that of who finished it");
    Ok(())
}

async fn a_lost_claim_writes_nothing(context: Context) -> Outcome {
    let (handle, old) = started(&context).await?;
    let other = context.connect().await?;
    begin(&handle, &old.execution, "begun").await?;
    let new = claimed_anew(&other, &old.execution).await?;
    let before = durable(&handle)?.steps(old.id()).await?;
    for step in ["begun", "fresh"] {
        let steps = durable(&handle)?;
        refused_as_conflict(begin_step(steps, &old.execution, &name(step)).await, "a begin by the old holder")?;
        let finished = finish_step(steps, &old.execution, &name(step), &json("1")).await;
        refused_as_conflict(finished, "an end by the old holder")?;
    }
    check_eq!(durable(&other)?.steps(old.id()).await?, before, "nothing was written");
    check_eq!(read(&other, old.id()).await?, new, "the new claim is as it was");
    finish(&other, &new.execution, "begun", "2").await
}

async fn every_field_is_compared(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    for current in other_moments(&job.execution) {
        let suspension = Transition::Suspend { until: When::Now }.plan(&job.execution)?;
        let wait = NewWait { event: Some(name("e")), suspension };
        for action in [StepAction::Begin, StepAction::Finish(json("1")), StepAction::Wait(wait)] {
            let write = StepWrite { id: job.id(), current: current.clone(), name: name("s"), action };
            let answer = durable(&handle)?.write_step(&write).await?;
            let expected = Stepped::refused(Update::Conflict(job.execution.clone()));
            check_eq!(answer, expected, "{:?} of {current:?}", write.action);
        }
    }
    check_eq!(durable(&handle)?.steps(job.id()).await?, [], "nothing was written");
    check_eq!(read(&handle, job.id()).await?, job, "the job is as it was");
    Ok(())
}

async fn leave_the_job_alone(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    begin(&handle, &job.execution, "s").await?;
    check_eq!(read(&handle, job.id()).await?, job, "after the begin");
    finish(&handle, &job.execution, "s", "1").await?;
    check_eq!(read(&handle, job.id()).await?, job, "after the end");
    let held: Vec<_> = Held::of(&job.execution).into_iter().collect();
    check_eq!(handle.extend_leases(&held, lease(MINUTE)).await?, [Beat::Extended], "its lease is renewed");
    let after = apply(&handle, &job.execution, &complete()).await?;
    check_eq!(after.state(), JobState::Completed, "its outcome is recorded");
    Ok(())
}

async fn values_are_kept_byte_for_byte(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let texts = [vec![Json::null()], awkward(context.capabilities.max_payload)].concat();
    for (index, text) in texts.iter().enumerate() {
        finish(&handle, &job.execution, &format!("step {index:03}"), text.as_str()).await?;
    }
    let steps = durable(&handle)?.steps(job.id()).await?;
    check_eq!(steps.len(), texts.len(), "all steps");
    for (index, (step, text)) in steps.into_iter().zip(texts).enumerate() {
        check_eq!(step.state, StepState::Done(text), "the value of step {index}");
    }
    Ok(())
}

async fn a_newer_claim_takes_over(context: Context) -> Outcome {
    let (handle, old) = started(&context).await?;
    for step in ["begun", "finished"] {
        begin(&handle, &old.execution, step).await?;
    }
    let new = claimed_anew(&handle, &old.execution).await?;
    check_eq!(begin(&handle, &new.execution, "begun").await?, None, "it has no value: it is begun again");
    finish(&handle, &new.execution, "finished", "1").await?;
    let expected = [("begun", StepState::Begun), ("finished", done("1"))];
    let expected = expected.map(|(step, state)| Step { name: name(step), fence: new.execution.fence, state });
    check_eq!(durable(&handle)?.steps(old.id()).await?, expected, "they are the new claim's");
    finish(&handle, &new.execution, "begun", "1").await
}

async fn the_first_value_stays(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    begin(&handle, &job.execution, "s").await?;
    finish(&handle, &job.execution, "s", "1").await?;
    finish(&handle, &job.execution, "s", "1").await?;
    // The same number, and another text.
    for other in ["2", "1.0", " 1", "null"] {
        match finish_step(durable(&handle)?, &job.execution, &name("s"), &json(other)).await {
            Err(StepError::OtherValue { stored, .. }) if stored == json("1") => {}
            answer => return Err(Failed::new(format!("{other:?} is another value: {answer:?}"))),
        }
    }
    check_eq!(states(&handle, job.id()).await?, [("s".to_owned(), done("1"))], "the first stays");
    Ok(())
}

async fn race_of_old_and_new_holder(context: Context) -> Outcome {
    for _ in 0..20 {
        let (handle, old) = started(&context).await?;
        let release = Decision::new(&old.execution, &Transition::Release)?;
        let (other, seen) = (context.connect().await?, old.execution.clone());
        let answers = context
            .race(2, |index| {
                let (handle, other) = (handle.clone(), other.clone());
                let (mut release, seen) = (release.clone(), seen.clone());
                async move {
                    if index == 0 {
                        let begun = begin_step(durable(&handle)?, &seen, &name("s")).await;
                        return Ok::<_, Failed>((matches!(begun, Ok(None)), None));
                    }
                    Transitioner::new(&other).submit(&mut release).await?;
                    // A claim passes the row while the old holder's call has it locked.
                    let new = loop {
                        match other.claim(&claim_for(&worker("b"), 1)).await?.jobs.pop() {
                            Some(new) => break new,
                            None => tokio::task::yield_now().await,
                        }
                    };
                    let begun = begin(&other, &new.execution, "s").await?;
                    Ok((begun.is_none(), Some(new)))
                }
            })
            .await?;
        let mut new = None;
        for answer in answers {
            let (begun, claimed) = answer?;
            // The old holder may have begun before it lost its claim.
            check!(begun || claimed.is_none(), "the new holder begins the step");
            new = new.or(claimed);
        }
        let new = new.ok_or_else(|| Failed::new("nobody claimed the job"))?;
        let expected = [Step { name: name("s"), fence: new.execution.fence, state: StepState::Begun }];
        check_eq!(durable(&handle)?.steps(old.id()).await?, expected, "it is the new holder's");
        let late = begin_step(durable(&handle)?, &old.execution, &name("s")).await;
        refused_as_conflict(late, "the old holder, later")?;
        apply(&handle, &new.execution, &complete()).await?;
    }
    Ok(())
}

async fn race_of_values(context: Context) -> Outcome {
    let mut handles = Vec::new();
    for _ in 0..4 {
        handles.push(context.connect().await?);
    }
    for _ in 0..10 {
        let job = running(&handles[0], &new_job(), &worker("a")).await?;
        let answers = context
            .race(8, |index| {
                let (handle, seen) = (handles[index % 4].clone(), job.execution.clone());
                async move {
                    let steps = durable(&handle)?;
                    match finish_step(steps, &seen, &name("s"), &json(&index.to_string())).await {
                        Ok(()) => Ok((true, json(&index.to_string()))),
                        Err(StepError::OtherValue { stored, .. }) => Ok((false, stored)),
                        Err(error) => Err(Failed::new(format!("an outcome is expected, not {error}"))),
                    }
                }
            })
            .await?;
        let answers: Vec<_> = answers.into_iter().collect::<Result<_, _>>()?;
        check_eq!(answers.iter().filter(|(saved, _)| *saved).count(), 1, "one is saved: {answers:?}");
        check!(answers.iter().all(|(_, value)| *value == answers[0].1), "everybody is told the same: {answers:?}");
        let stored = states(&handles[0], job.id()).await?;
        check_eq!(stored, [("s".to_owned(), StepState::Done(answers[0].1.clone()))], "what is stored");
        apply(&handles[0], &job.execution, &complete()).await?;
    }
    Ok(())
}

async fn names_are_compared_byte_for_byte(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let longest = "n".repeat(Name::MAX_BYTES);
    let names = [
        "a", "A", "a ", " a", "é", "e\u{301}", "a'b", "a\"b", "a\\b", "a.b", "$a", "%", "_", "a\nb", "😀", "?1",
        &longest,
    ];
    for (index, step) in names.iter().enumerate() {
        check_eq!(begin(&handle, &job.execution, step).await?, None, "{step:?} is a step of its own");
        finish(&handle, &job.execution, step, &index.to_string()).await?;
    }
    let stored = states(&handle, job.id()).await?;
    let mut expected: Vec<_> =
        names.iter().enumerate().map(|(index, step)| ((*step).to_owned(), done(&index.to_string()))).collect();
    expected.sort_by(|one, other| one.0.cmp(&other.0));
    check_eq!(stored, expected, "all of them, by the bytes of their names");
    Ok(())
}

async fn are_of_one_job(context: Context) -> Outcome {
    let (handle, one) = started(&context).await?;
    let two = running(&handle, &new_job(), &worker("a")).await?;
    finish(&handle, &one.execution, "s", "1").await?;
    check_eq!(begin(&handle, &two.execution, "s").await?, None, "the other job has not done it");
    finish(&handle, &two.execution, "s", "2").await?;
    for (job, value) in [(one, "1"), (two, "2")] {
        check_eq!(states(&handle, job.id()).await?, [("s".to_owned(), done(value))], "each has its own");
    }
    Ok(())
}

async fn too_large_is_refused(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let cap = context.capabilities.max_payload;
    let text = |bytes: usize| json(&format!("\"{}\"", "x".repeat(bytes - 2)));
    let answer = finish_step(durable(&handle)?, &job.execution, &name("s"), &text(cap + 1)).await;
    let Err(StepError::Transition(TransitionError::Backend(error))) = answer else {
        return Err(Failed::new(format!("a value over the cap must be refused, not {answer:?}")));
    };
    check_eq!((error.kind(), error.certainty()), (ErrorKind::TooLarge, Certainty::NotApplied), "{error}");
    check_eq!(durable(&handle)?.steps(job.id()).await?, [], "nothing was written");
    finish(&handle, &job.execution, "s", text(cap).as_str()).await
}

async fn only_of_a_job_that_is_there(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let gone = Execution { id: JobId::new(), ..job.execution.clone() };
    let answer = begin_step(durable(&handle)?, &gone, &name("s")).await;
    check!(
        matches!(answer, Err(StepError::Transition(TransitionError::Missing { .. }))),
        "there is no such job: {answer:?}"
    );
    check_eq!(durable(&handle)?.steps(gone.id).await?, [], "nothing is kept for it");
    let ended = apply(&handle, &job.execution, &complete()).await?;
    refused_as_conflict(begin_step(durable(&handle)?, &job.execution, &name("s")).await, "a step after the end")?;
    check_eq!(read(&handle, job.id()).await?, ended, "the ended job is as it was");
    Ok(())
}

async fn of_an_unreadable_job(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    context.store.damage(job.id(), Damage::ForeignState).await?;
    context.note(format_args!("job {} has a state of a newer version", job.id()));
    let action = StepAction::Finish(json("1"));
    let write = StepWrite { id: job.id(), current: job.execution.fingerprint(), name: name("s"), action };
    let answer = durable(&handle)?.write_step(&write).await?;
    check!(matches!(&answer.update, Update::Unreadable(row) if row.id == job.id()), "it is unreadable: {answer:?}");
    check_eq!(durable(&handle)?.steps(job.id()).await?, [], "nothing was written");
    Ok(())
}

async fn survive_what_the_job_goes_through(context: Context) -> Outcome {
    let (handle, mut job) = started(&context).await?;
    finish(&handle, &job.execution, "s", "1").await?;
    let expected = [("s".to_owned(), done("1"))];
    for transition in [retry_now(), Transition::Release, snooze(0), complete(), fail(), cancel()] {
        let after = apply(&handle, &job.execution, &transition).await?;
        if after.state().is_final() {
            apply(&handle, &after.execution, &Transition::Rerun).await?;
        }
        check_eq!(states(&handle, job.id()).await?, expected, "after {}", transition.name());
        job = claim_one(&handle, &claim_for(&worker("a"), 1)).await?;
        check_eq!(begin(&handle, &job.execution, "s").await?, Some(json("1")), "after {}", transition.name());
    }
    Ok(())
}

async fn go_with_their_job(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let other = running(&handle, &new_job(), &worker("a")).await?;
    for seen in [&job.execution, &other.execution] {
        finish(&handle, seen, "s", "1").await?;
        begin(&handle, seen, "t").await?;
    }
    apply(&handle, &job.execution, &complete()).await?;
    check_eq!(handle.purge(JobState::Completed, Delay::ZERO, limit(10)).await?, 1, "one job is purged");
    check_eq!(durable(&handle)?.steps(job.id()).await?, [], "its steps are gone");
    check_eq!(durable(&handle)?.steps(other.id()).await?.len(), 2, "those of the other are not");
    apply(&handle, &other.execution, &complete()).await?;
    let again = NewJob { id: job.id(), ..new_job() };
    let again = running(&handle, &again, &worker("a")).await?;
    check_eq!(begin(&handle, &again.execution, "s").await?, None, "a job of the same id has done nothing yet");
    Ok(())
}

async fn dropped_futures(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let other = context.connect().await?;
    for polls in 1..=15 {
        let job = running(&handle, &new_job(), &worker("a")).await?;
        let (steps, seen) = (durable(&handle)?, &job.execution);
        drop_after(polls, begin_step(steps, seen, &name("s"))).await;
        drop_after(polls, finish_step(steps, seen, &name("s"), &json("1"))).await;
        let found = states(&other, job.id()).await?;
        let whole = [vec![], vec![("s".to_owned(), StepState::Begun)], vec![("s".to_owned(), done("1"))]];
        check!(whole.contains(&found), "dropped after {polls} polls: {found:?}");
        finish(&other, seen, "s", "1").await?;
        apply(&other, seen, &complete()).await?;
    }
    Ok(())
}

async fn many_of_one_job(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    for index in 0..500 {
        finish(&handle, &job.execution, &format!("{index:05}"), &index.to_string()).await?;
    }
    let stored = states(&handle, job.id()).await?;
    check_eq!(stored.len(), 500, "all are there");
    for (index, (step, state)) in stored.into_iter().enumerate() {
        check_eq!((step, state), (format!("{index:05}"), done(&index.to_string())), "in order");
    }
    Ok(())
}
