//! Handing over: a job ends and another takes its place, both or neither.

use std::num::NonZeroU32;

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
use crate::cases::steps::other_moments;
use crate::context::*;
use crate::harness::Damage;
use crate::harness::Hook;

const STEPS: Need = Need::DurableSteps;

pub(super) const CASES: &[Case] = &[
    case!(
        handover::ends_one_and_enqueues_another,
        [],
        [STEPS],
        "The job is completed with its result, and the successor waits as it was given."
    ),
    case!(
        handover::a_lost_claim_enqueues_nothing,
        [A3],
        [STEPS],
        "Whoever lost the claim hands over nothing: a conflict, and no successor."
    ),
    case!(
        handover::every_field_is_compared,
        [A1],
        [STEPS],
        "Nothing is handed over if any one field of the job's fingerprint differs."
    ),
    case!(
        handover::of_an_unreadable_job,
        [],
        [STEPS, Need::Hook(Hook::Damage)],
        "A job in a state of a newer version is refused as unreadable, and there is no successor."
    ),
    case!(handover::passes_the_key_on, [S25], [STEPS], "The successor has the unique key of the job that ends."),
    case!(
        handover::a_taken_key_ends_nothing,
        [S25],
        [STEPS],
        "If another job has the successor's key, the call is refused, and the job goes on running."
    ),
    case!(
        handover::a_reused_id_ends_nothing,
        [],
        [STEPS],
        "If the successor's id is that of another job, the call is refused, and the job goes on running."
    ),
    case!(
        handover::a_replay_enqueues_no_second_one,
        [S26],
        [STEPS],
        "Handed over again, it is recognised, and there is one successor, also once that has run."
    ),
    case!(
        handover::happens_once_of_many_at_once,
        [],
        [STEPS],
        "Of many successors that are offered at once one is enqueued."
    ),
    case!(
        handover::each_has_its_own_limit,
        [],
        [STEPS],
        "A successor that keeps failing ends at its own limit, and the job before it is not touched."
    ),
    case!(
        handover::too_large_is_refused,
        [E6],
        [STEPS],
        "A successor whose payload is over the cap is refused, and so is a result over it; the job goes on running."
    ),
    case!(handover::dropped_futures, [A15], [STEPS], "A call that is dropped has done both or neither."),
];

async fn hand_over(handle: &Handle, seen: &Execution, successor: &NewJob) -> Result<Settled, TransitionError> {
    let steps = durable(handle).map_err(|error| Error::invalid(error.to_string()))?;
    HandOver::new(seen, Some(json("1")), successor.clone())?.submit(steps).await
}

async fn ends_one_and_enqueues_another(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let next = NewJob { priority: Priority::FIRST, payload: json("[2]"), ..new_job() };
    let settled = hand_over(&handle, &job.execution, &next).await?;
    let ended = read(&handle, job.id()).await?;
    check_eq!(settled, Settled::Applied(ended.execution.clone()), "the answer");
    check_eq!((ended.state(), &ended.result), (JobState::Completed, &Some(json("1"))), "the job that ends");
    let stored = read(&handle, next.id).await?;
    check!(next.repeats(&stored), "the successor is as it was given: {stored:?}");
    check_eq!((stored.state(), stored.execution.fence), (JobState::Waiting, 0), "it waits");
    check_eq!(claim_one(&handle, &claim_for(&worker("b"), 5)).await?.id(), next.id, "it is due");
    Ok(())
}

async fn a_lost_claim_enqueues_nothing(context: Context) -> Outcome {
    let (handle, old) = started(&context).await?;
    let new = claimed_anew(&handle, &old.execution).await?;
    let next = new_job();
    let answer = hand_over(&handle, &old.execution, &next).await;
    check!(matches!(answer, Err(TransitionError::Conflict(_))), "it is a conflict: {answer:?}");
    check_eq!(handle.get(next.id).await?, None, "there is no successor");
    check_eq!(read(&handle, old.id()).await?, new, "the other claim goes on");
    let gone = Execution { id: JobId::new(), ..new.execution };
    let answer = hand_over(&handle, &gone, &next).await;
    check!(matches!(answer, Err(TransitionError::Missing { .. })), "a job that is not there: {answer:?}");
    check_eq!(handle.get(next.id).await?, None, "there is no successor");
    Ok(())
}

async fn every_field_is_compared(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let patch = complete().plan(&job.execution)?;
    let next = new_job();
    for current in other_moments(&job.execution) {
        let update = UpdateRequest { id: job.id(), current, patch: patch.clone() };
        let answer = durable(&handle)?.hand_over(&update, &next).await?;
        check_eq!(answer, (Update::Conflict(job.execution.clone()), None), "{:?}", update.current);
    }
    check_eq!(handle.get(next.id).await?, None, "there is no successor");
    check_eq!(read(&handle, job.id()).await?, job, "the job runs on");
    Ok(())
}

async fn of_an_unreadable_job(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    context.store.damage(job.id(), Damage::ForeignState).await?;
    context.note(format_args!("job {} has a state of a newer version", job.id()));
    let update =
        UpdateRequest { id: job.id(), current: job.execution.fingerprint(), patch: complete().plan(&job.execution)? };
    let next = new_job();
    let answer = durable(&handle)?.hand_over(&update, &next).await?;
    check!(matches!(&answer, (Update::Unreadable(row), None) if row.id == job.id()), "it is unreadable: {answer:?}");
    check_eq!(handle.get(next.id).await?, None, "there is no successor");
    Ok(())
}

async fn passes_the_key_on(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let mut job = running(&handle, &keyed("k"), &worker("a")).await?;
    for round in 0..3 {
        let next = keyed("k");
        hand_over(&handle, &job.execution, &next).await?;
        let duplicate = offer(&handle, &keyed("k")).await?;
        check_eq!(duplicate, Enqueued::Duplicate { existing: next.id }, "round {round}: the successor has the key");
        job = claim_one(&handle, &claim_for(&worker("a"), 5)).await?;
        check_eq!(job.id(), next.id, "round {round}");
    }
    Ok(())
}

async fn a_taken_key_ends_nothing(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    enqueue(&handle, &keyed("taken")).await?;
    let next = keyed("taken");
    let answer = hand_over(&handle, &job.execution, &next).await;
    still_runs(&handle, &job, &next, answer, ErrorKind::Invalid).await
}

async fn a_reused_id_ends_nothing(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let other = new_job();
    enqueue(&handle, &other).await?;
    let next = NewJob { payload: json("[2]"), ..other.clone() };
    let answer = hand_over(&handle, &job.execution, &next).await;
    check!(
        matches!(&answer, Err(TransitionError::Backend(error)) if error.kind() == ErrorKind::IdReused),
        "it is refused: {answer:?}"
    );
    check_eq!(read(&handle, job.id()).await?, job, "the job runs on");
    check_eq!(read(&handle, other.id).await?.payload, other.payload, "the other is as it was");
    apply(&handle, &job.execution, &complete()).await?;
    Ok(())
}

/// It was refused, with nothing written.
async fn still_runs(
    handle: &Handle,
    job: &Job,
    next: &NewJob,
    answer: Result<Settled, TransitionError>,
    kind: ErrorKind,
) -> Outcome {
    let Err(TransitionError::Backend(error)) = answer else {
        return Err(Failed::new(format!("it must be refused, not {answer:?}")));
    };
    check_eq!((error.kind(), error.certainty()), (kind, Certainty::NotApplied), "{error}");
    check_eq!(read(handle, job.id()).await?, *job, "the job runs on");
    check_eq!(handle.get(next.id).await?, None, "there is no successor");
    apply(handle, &job.execution, &complete()).await?;
    Ok(())
}

async fn a_replay_enqueues_no_second_one(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let next = new_job();
    let mut hand_over = HandOver::new(&job.execution, None, next.clone())?;
    let first = hand_over.submit(durable(&handle)?).await?;
    check!(matches!(first, Settled::Applied(_)), "{first:?}");
    let mut rows = stored_rows(&handle).await?;
    for round in 0..2 {
        let again = hand_over.submit(durable(&handle)?).await?;
        check!(matches!(again, Settled::AlreadyApplied(_)), "round {round}: {again:?}");
        check_eq!(stored_rows(&handle).await?, rows, "round {round}: there is one successor");
        if round == 0 {
            let claimed = claim_one(&handle, &claim_for(&worker("b"), 5)).await?;
            apply(&handle, &claimed.execution, &complete()).await?;
            rows = stored_rows(&handle).await?;
        }
    }
    Ok(())
}

async fn happens_once_of_many_at_once(context: Context) -> Outcome {
    let mut handles = Vec::new();
    for _ in 0..4 {
        handles.push(context.connect().await?);
    }
    for round in 0..10 {
        let job = running(&handles[0], &keyed("k"), &worker("a")).await?;
        let answers = context
            .race(4, |index| {
                let (handle, seen) = (handles[index].clone(), job.execution.clone());
                async move {
                    let next = keyed("k");
                    match hand_over(&handle, &seen, &next).await {
                        Ok(_) => Ok(Some(next.id)),
                        Err(TransitionError::Conflict(_)) => Ok(None),
                        Err(error) => Err(Failed::new(format!("an outcome is expected, not {error}"))),
                    }
                }
            })
            .await?;
        let won: Vec<_> = answers.into_iter().collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect();
        check_eq!(won.len(), 1, "round {round}: one is enqueued");
        let claimed = claim_one(&handles[0], &claim_for(&worker("a"), 5)).await?;
        check_eq!(claimed.id(), won[0], "round {round}: it is there");
        apply(&handles[0], &claimed.execution, &complete()).await?;
    }
    Ok(())
}

async fn each_has_its_own_limit(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let first = NewJob { max_attempts: NonZeroU32::MIN, ..keyed("k") };
    let job = running(&handle, &first, &worker("a")).await?;
    let next = NewJob { max_attempts: NonZeroU32::MIN.saturating_add(2), ..keyed("k") };
    hand_over(&handle, &job.execution, &next).await?;
    let ended = read(&handle, job.id()).await?;
    for attempt in 1..=3 {
        let claimed = claim_one(&handle, &claim_for(&worker("a"), 5)).await?;
        check_eq!(claimed.execution.attempt, attempt, "its attempts are its own");
        apply(&handle, &claimed.execution, &retry_now()).await?;
    }
    check_eq!(read(&handle, next.id).await?.state(), JobState::Failed, "it ends at its own limit");
    check_eq!(read(&handle, job.id()).await?, ended, "the job before it is not touched");
    Ok(())
}

async fn too_large_is_refused(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let text = format!("\"{}\"", "x".repeat(context.capabilities.max_payload - 1));
    let next = new_job();
    let answer = HandOver::new(&job.execution, Some(json(&text)), next.clone())?.submit(durable(&handle)?).await;
    let refused = matches!(&answer, Err(TransitionError::Backend(error)) if error.kind() == ErrorKind::TooLarge);
    check!(refused, "a result over the cap: {answer:?}");
    check_eq!(handle.get(next.id).await?, None, "there is no successor");
    let next = NewJob { payload: json(&text), ..next };
    let answer = hand_over(&handle, &job.execution, &next).await;
    still_runs(&handle, &job, &next, answer, ErrorKind::TooLarge).await
}

async fn dropped_futures(context: Context) -> Outcome {
    let (handle, other) = (context.connect().await?, context.connect().await?);
    for polls in 1..=15 {
        let job = running(&handle, &keyed("k"), &worker("a")).await?;
        let next = keyed("k");
        drop_after(polls, hand_over(&handle, &job.execution, &next)).await;
        // Whichever way it went, it is done by sending another.
        let another = keyed("k");
        let answer = hand_over(&other, &job.execution, &another).await;
        let claimed = claim_one(&other, &claim_for(&worker("a"), 5)).await?;
        let expected = if answer.is_ok() { another.id } else { next.id };
        check_eq!(claimed.id(), expected, "dropped after {polls} polls: {answer:?}");
        check_eq!(read(&other, job.id()).await?.state(), JobState::Completed, "dropped after {polls} polls");
        apply(&other, &claimed.execution, &complete()).await?;
    }
    Ok(())
}
