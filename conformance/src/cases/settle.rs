//! What each move of a job's life leaves in the store.

use std::sync::Arc;

use queue_core::*;

use crate::case::Case;
use crate::case::Failed;
use crate::case::Need;
use crate::case::Outcome;
use crate::case::case;
use crate::case::check;
use crate::case::check_eq;
use crate::context::*;
use crate::harness::Hook;

const CLOCK: Need = Need::Hook(Hook::Clock);

pub(super) const CASES: &[Case] = &[
    case!(
        settle::each_move_writes_its_patch,
        [],
        [],
        "Every move, from every state that allows it, leaves exactly the row that its patch says."
    ),
    case!(
        settle::retry_waits_for_its_delay,
        [],
        [CLOCK],
        "A retry makes the job due after its delay, by the store's clock, and not before."
    ),
    case!(settle::retry_ends_with_the_last_attempt, [C10], [], "A retry on the last attempt fails the job for good."),
    case!(settle::fail_is_final, [], [], "A failure for good ends the job, whatever attempts are left."),
    case!(settle::snoozes_cost_no_attempt, [], [], "A job can be snoozed more often than it may be attempted."),
    case!(
        settle::snooze_until_an_instant,
        [E1],
        [CLOCK],
        "A snooze until an instant makes the job due at that very instant."
    ),
    case!(
        settle::cancel_from_every_active_state,
        [],
        [],
        "A waiting, reserved or running job can be canceled, and the reason is kept."
    ),
    case!(
        settle::cancels_at_once,
        [A21],
        [],
        "Of many who cancel one job exactly one does; the others see it canceled by another's decision."
    ),
    case!(
        settle::rerun,
        [F8],
        [],
        "An ended job that is run again waits, due now, without attempts and result, its errors kept."
    ),
    case!(
        settle::progress,
        [A1 A3],
        [],
        "A holder's progress shows as the result while it runs, is no new moment of the job, and is refused to a holder of old."
    ),
    case!(settle::rerun_keeps_the_fence, [], [], "The claims of a job that runs again go on counting."),
    case!(settle::replace, [], [CLOCK], "A waiting job gets another payload and due time, and keeps everything else."),
    case!(
        settle::replace_loses_to_a_claim,
        [],
        [],
        "A replacement that comes after a claim is a conflict, and the payload stays."
    ),
    case!(settle::start_is_fenced, [A3 S3 S16], [], "A reserved job that was released is not started by its old holder."),
    case!(settle::one_outcome_of_many, [S2 S4], [], "Of different outcomes offered for one execution at once exactly one is recorded."),
    case!(
        settle::last_attempt_released,
        [C15],
        [],
        "A release on the last attempt leaves attempt and errors as before the start, and the job can run again."
    ),
    case!(settle::release_touches_only_its_row, [C19 S21], [], "Giving one job back, at once or later, changes no other row."),
];

/// A fresh job, moved to a state.
async fn job_in(handle: &Handle, state: JobState) -> Result<Job, Failed> {
    let new = new_job();
    enqueue(handle, &new).await?;
    let (me, request) = (worker("a"), |me| claim_for(me, 1));
    match state {
        JobState::Waiting => read(handle, new.id).await,
        JobState::Claimed => claim_one(handle, &request(&me).reserve()).await,
        _ => {
            let job = claim_one(handle, &request(&me)).await?;
            match state {
                JobState::Completed => apply(handle, &job.execution, &complete()).await,
                JobState::Failed => apply(handle, &job.execution, &fail()).await,
                JobState::Canceled => apply(handle, &job.execution, &cancel()).await,
                _ => Ok(job),
            }
        }
    }
}

async fn each_move_writes_its_patch(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let moves = [
        Transition::Start { lease: lease(MINUTE) },
        Transition::Progress { value: json("7") },
        complete(),
        Transition::Complete { result: None },
        retry_now(),
        fail(),
        snooze(MINUTE),
        Transition::Release,
        cancel(),
        Transition::Rerun,
        Transition::Replace { payload: json("[7]"), available: When::After(millis(MINUTE)) },
    ];
    let mut allowed = 0;
    for state in JobState::ALL.iter().copied().filter(|state| *state != JobState::Suspended) {
        for transition in &moves {
            let before = job_in(&handle, state).await?;
            if let Ok(mut decision) = Decision::new(&before.execution, transition) {
                allowed += 1;
                let settled = Transitioner::new(&handle).submit(&mut decision).await?;
                let after = read(&handle, before.id()).await?;
                check_eq!(
                    *settled.execution(),
                    after.execution,
                    "{} from {state}: the answer is what is stored",
                    transition.name()
                );
                same_but_for_now(&before, &after, &decision.request().patch, transition.name())?;
            }
            // Out of the way of the next one.
            let row = read(&handle, before.id()).await?;
            if row.state().is_active() {
                apply(&handle, &row.execution, &cancel()).await?;
            }
        }
    }
    check_eq!(allowed, 18, "every move that the table allows was made");
    Ok(())
}

/// Checks the row against its patch, whatever the store's clock showed.
fn same_but_for_now(before: &Job, after: &Job, patch: &Patch, transition: &str) -> Outcome {
    let mut expected = before.clone();
    let set = [
        after.finished_at.filter(|_| matches!(patch.finished_at, Change::Set(()))),
        after.execution.attempted_at.filter(|_| matches!(patch.attempted_at, Change::Set(()))),
        after.errors.last().filter(|_| patch.failure.is_some()).map(|failure| failure.at),
        Some(after.available_at).filter(|_| patch.available == Some(When::Now)),
    ];
    // One of the times that the patch sets, or the one that it counts from. Progress has none.
    let counted_from = patch.available.map(|_| after.available_at.saturating_add_millis(-MINUTE));
    let now = set.into_iter().flatten().next().or(counted_from).unwrap_or(before.created_at);
    patch.apply(&mut expected, now);
    check_eq!(*after, expected, "{transition} from {}", before.state());
    check!(now >= before.created_at, "{transition}: the times are the store's");
    Ok(())
}

async fn retry_waits_for_its_delay(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = job_in(&handle, JobState::Running).await?;
    context.advance(MINUTE / 2).await?;
    let retry = Transition::Retry { error: "later".into(), available: When::After(millis(10 * MINUTE)) };
    let after = apply(&handle, &job.execution, &retry).await?;
    check_eq!(
        after.available_at,
        after.errors[0].at.saturating_add_millis(10 * MINUTE),
        "counted from the store's now"
    );
    context.advance(9 * MINUTE).await?;
    check_eq!(handle.claim(&claim_for(&worker("b"), 1)).await?, Claimed::default(), "not before its time");
    context.advance(MINUTE).await?;
    check_eq!(claim_one(&handle, &claim_for(&worker("b"), 1)).await?.execution.attempt, 2, "the second attempt");
    Ok(())
}

async fn retry_ends_with_the_last_attempt(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let mut new = new_job();
    new.max_attempts = std::num::NonZeroU32::new(2).unwrap_or(std::num::NonZeroU32::MIN);
    enqueue(&handle, &new).await?;
    for (attempt, state) in [(1, JobState::Waiting), (2, JobState::Failed)] {
        let job = claim_one(&handle, &claim_for(&worker("a"), 1)).await?;
        let after = apply(&handle, &job.execution, &retry_now()).await?;
        check_eq!((after.state(), after.execution.attempt), (state, attempt), "after attempt {attempt}");
        check_eq!(after.finished_at.is_some(), state == JobState::Failed, "ended after attempt {attempt}?");
    }
    Ok(())
}

async fn fail_is_final(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = job_in(&handle, JobState::Running).await?;
    let after = apply(&handle, &job.execution, &fail()).await?;
    check_eq!((after.state(), after.execution.attempt), (JobState::Failed, 1), "failed on the first of many attempts");
    check_eq!(after.errors[0].text.as_str(), "broken for good", "the reason is kept");
    check_eq!(handle.claim(&claim_for(&worker("b"), 1)).await?, Claimed::default(), "it does not run again");
    Ok(())
}

async fn snoozes_cost_no_attempt(context: Context) -> Outcome {
    let handle = context.connect().await?;
    enqueue(&handle, &NewJob { max_attempts: std::num::NonZeroU32::MIN, ..new_job() }).await?;
    for round in 1..=5 {
        let job = claim_one(&handle, &claim_for(&worker("a"), 1)).await?;
        check_eq!(job.execution.attempt, 1, "round {round}");
        let after = apply(&handle, &job.execution, &snooze(0)).await?;
        check_eq!(
            (after.state(), after.execution.attempt, after.errors.len()),
            (JobState::Waiting, 0, 0),
            "round {round}"
        );
    }
    Ok(())
}

async fn snooze_until_an_instant(context: Context) -> Outcome {
    let handle = context.connect().await?;
    for state in [JobState::Waiting, JobState::Claimed, JobState::Running] {
        let job = job_in(&handle, state).await?;
        let at = job.created_at.saturating_add_millis(3_600_001);
        let after = apply(&handle, &job.execution, &Transition::Snooze { available: When::At(at) }).await?;
        check_eq!((after.available_at, after.execution.attempt), (at, 0), "from {state}, to the millisecond");
    }
    check_eq!(handle.claim(&claim_for(&worker("b"), 3)).await?, Claimed::default(), "not before");
    context.advance(3_600_001).await?;
    check_eq!(handle.claim(&claim_for(&worker("b"), 3)).await?.jobs.len(), 3, "all are due");
    Ok(())
}

async fn cancel_from_every_active_state(context: Context) -> Outcome {
    let handle = context.connect().await?;
    for state in [JobState::Waiting, JobState::Claimed, JobState::Running] {
        let job = job_in(&handle, state).await?;
        let after = apply(&handle, &job.execution, &cancel()).await?;
        check_eq!(after.state(), JobState::Canceled, "from {state}");
        check_eq!(
            after.errors.last().map(|failure| failure.text.as_str()),
            Some("no longer wanted"),
            "the reason is kept"
        );
        check_eq!(after.execution.attempt, job.execution.attempt, "the attempt stays");
    }
    check_eq!(handle.claim(&claim_for(&worker("b"), 3)).await?, Claimed::default(), "none of them runs");
    Ok(())
}

async fn cancels_at_once(context: Context) -> Outcome {
    const ROUNDS: usize = 20;
    let handles = [context.connect().await?, context.connect().await?];
    for round in 0..ROUNDS {
        let job = job_in(&handles[0], JobState::Waiting).await?.execution;
        let answers = context
            .race(16, |task| {
                let (handle, job) = (Arc::clone(&handles[task % 2]), job.clone());
                async move { Transitioner::new(&handle).apply(&job, &cancel()).await }
            })
            .await?;
        let mut won = Vec::new();
        for answer in answers {
            match answer {
                Ok(Settled::Applied(row)) => won.push(row.revision),
                Err(TransitionError::Conflict(conflict)) if conflict.current.state == JobState::Canceled => {}
                other => return Err(Failed::new(format!("round {round}: {other:?}"))),
            }
        }
        let row = read(&handles[0], job.id).await?;
        check_eq!(won, [row.execution.revision], "round {round}: one canceled it, and its revision is there");
        check_eq!(row.errors.len(), 1, "round {round}: one reason is recorded");
    }
    Ok(())
}

async fn rerun(context: Context) -> Outcome {
    let handle = context.connect().await?;
    for state in [JobState::Completed, JobState::Failed, JobState::Canceled] {
        let ended = job_in(&handle, state).await?;
        let again = apply(&handle, &ended.execution, &Transition::Rerun).await?;
        check_eq!((again.state(), again.execution.attempt), (JobState::Waiting, 0), "from {state}");
        check_eq!(
            (&again.result, again.finished_at, &again.errors),
            (&None, None, &ended.errors),
            "from {state}: errors stay"
        );
        check!(Some(again.available_at) >= ended.finished_at, "from {state}: due now");
        check_eq!(claim_one(&handle, &claim_for(&worker("b"), 1)).await?.id(), ended.id(), "from {state}: it runs");
    }
    Ok(())
}

async fn progress(context: Context) -> Outcome {
    let (handle, old) = started(&context).await?;
    let half = Transition::Progress { value: json("{\"half\":true}") };
    for round in 1..=2 {
        let reported = apply(&handle, &old.execution, &half).await?;
        check_eq!(reported.execution, old.execution, "round {round}: no new moment");
        let shown = read(&handle, old.id()).await?;
        check_eq!(shown, Job { result: Some(json("{\"half\":true}")), ..old.clone() }, "nothing else is changed");
    }
    apply(&handle, &old.execution, &Transition::Release).await?;
    check_eq!(read(&handle, old.id()).await?.result, None, "gone with the claim");
    let newer = claim_one(&handle, &claim_for(&worker("b"), 1)).await?;
    conflicts(&handle, &old.execution, &half).await?;
    check_eq!(read(&handle, old.id()).await?, newer, "the newer run is as it was");
    apply(&handle, &newer.execution, &half).await?;
    apply(&handle, &newer.execution, &fail()).await?;
    check_eq!(read(&handle, old.id()).await?.result, None, "a failed job has no result");
    Ok(())
}

async fn rerun_keeps_the_fence(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let ended = job_in(&handle, JobState::Completed).await?;
    apply(&handle, &ended.execution, &Transition::Rerun).await?;
    let again = claim_one(&handle, &claim_for(&worker("b"), 1)).await?;
    check_eq!((again.execution.fence, again.execution.attempt), (2, 1), "the second claim, the first attempt");
    conflicts(&handle, &ended.execution, &Transition::Rerun).await?;
    Ok(())
}

async fn replace(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let id = enqueue(&handle, &keyed("replace")).await?;
    let before = read(&handle, id).await?;
    let replace = Transition::Replace { payload: json("\"new\""), available: When::After(millis(MINUTE)) };
    let after = apply(&handle, &before.execution, &replace).await?;
    let expected = Job {
        execution: Execution { revision: after.execution.revision, ..before.execution.clone() },
        payload: json("\"new\""),
        available_at: after.available_at,
        ..before.clone()
    };
    check_eq!(after, expected, "payload and due time");
    check!(after.execution.revision != before.execution.revision, "a replacement is a new moment");
    check_eq!(handle.claim(&claim_for(&worker("a"), 1)).await?, Claimed::default(), "not due any more");
    context.advance(MINUTE).await?;
    check_eq!(
        claim_one(&handle, &claim_for(&worker("a"), 1)).await?.payload,
        json("\"new\""),
        "the handler gets the new payload"
    );
    Ok(())
}

async fn replace_loses_to_a_claim(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let waiting = job_in(&handle, JobState::Waiting).await?;
    let claimed = claim_one(&handle, &claim_for(&worker("a"), 1)).await?;
    conflicts(&handle, &waiting.execution, &Transition::Replace { payload: json("0"), available: When::Now }).await?;
    let released = apply(&handle, &claimed.execution, &Transition::Release).await?;
    check_eq!(released.payload, waiting.payload, "the payload stays");
    // It waits again, but it is another moment.
    conflicts(&handle, &waiting.execution, &Transition::Replace { payload: json("0"), available: When::Now }).await?;
    Ok(())
}

async fn start_is_fenced(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let start = Transition::Start { lease: lease(MINUTE) };
    let reserved = job_in(&handle, JobState::Claimed).await?.execution;
    apply(&handle, &reserved, &Transition::Release).await?;
    conflicts(&handle, &reserved, &start).await?;
    let newer = claim_one(&handle, &claim_for(&worker("b"), 1).reserve()).await?;
    for transition in [start, Transition::Release, snooze(1), cancel()] {
        conflicts(&handle, &reserved, &transition).await?;
    }
    check_eq!(read(&handle, newer.id()).await?, newer, "the newer reservation stands");
    Ok(())
}

async fn one_outcome_of_many(context: Context) -> Outcome {
    const ROUNDS: usize = 20;
    let handles = [context.connect().await?, context.connect().await?];
    for round in 0..ROUNDS {
        let job = job_in(&handles[0], JobState::Running).await?.execution;
        let answers = context
            .race(holder_moves().len(), |task| {
                let (handle, job, transition) =
                    (Arc::clone(&handles[task % 2]), job.clone(), holder_moves()[task].clone());
                async move { Transitioner::new(&handle).apply(&job, &transition).await }
            })
            .await?;
        let applied: Vec<_> = answers.iter().flatten().map(|settled| settled.execution().clone()).collect();
        let row = read(&handles[0], job.id).await?;
        check_eq!(applied, std::slice::from_ref(&row.execution), "round {round}: one outcome, and it is stored");
        check!(row.errors.len() <= 1, "round {round}: no trace of the others: {:?}", row.errors);
        if row.state().is_active() {
            apply(&handles[0], &row.execution, &cancel()).await?;
        }
    }
    Ok(())
}

async fn last_attempt_released(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let new = NewJob { max_attempts: std::num::NonZeroU32::MIN, ..new_job() };
    let job = running(&handle, &new, &worker("a")).await?;
    check_eq!(job.execution.attempt, 1, "its only attempt");
    let released = apply(&handle, &job.execution, &Transition::Release).await?;
    check_eq!(
        (released.state(), released.execution.attempt, released.errors.len()),
        (JobState::Waiting, 0, 0),
        "as before the start"
    );
    let again = claim_one(&handle, &claim_for(&worker("b"), 1)).await?;
    check_eq!(again.execution.attempt, 1, "available at once");
    Ok(())
}

async fn release_touches_only_its_row(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let mut others = Vec::new();
    for transition in [Transition::Release, snooze(5_000)] {
        let job = running(&handle, &keyed("one"), &worker("a")).await?;
        let beside = running(&handle, &new_job(), &worker("a")).await?;
        let hidden = NewJob { available: When::After(millis(MINUTE)), ..keyed("two") };
        let hidden = handle.enqueue(&[hidden, new_job()]).await?;
        others.push(beside.id());
        others.extend(hidden.iter().map(|outcome| outcome.id()));
        let before = jobs_of(&handle, &others).await?;
        let after = apply(&handle, &job.execution, &transition).await?;
        check_eq!(after.execution.attempt, 0, "{} gives the attempt back", transition.name());
        check_eq!(jobs_of(&handle, &others).await?, before, "{} changes no other row", transition.name());
        apply(&handle, &after.execution, &cancel()).await?;
        let left = handle.claim(&claim_for(&worker("b"), 10)).await?.jobs;
        for job in left {
            apply(&handle, &job.execution, &complete()).await?;
        }
    }
    Ok(())
}

async fn jobs_of(handle: &Handle, ids: &[JobId]) -> Result<Vec<Job>, Failed> {
    let mut jobs = Vec::new();
    for id in ids {
        jobs.push(read(handle, *id).await?);
    }
    Ok(jobs)
}
