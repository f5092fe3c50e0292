//! Purges.

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

pub(super) const CASES: &[Case] = &[
    case!(purge::only_the_named_state, [], [], "A purge deletes ended jobs of the state that it names, and no others."),
    case!(
        purge::only_ended_states,
        [],
        [Need::Hook(Hook::Overwrite)],
        "A purge of a state that is not final is refused, and deletes nothing."
    ),
    case!(
        purge::by_age_to_the_millisecond,
        [C1],
        [Need::Hook(Hook::Clock)],
        "A job is purged when it ended long enough ago by the store's clock, to the millisecond."
    ),
    case!(
        purge::the_oldest_first,
        [],
        [Need::Hook(Hook::Clock)],
        "A purge deletes at most as many as its limit, those that ended first, and says how many."
    ),
    case!(
        purge::spares_a_job_that_runs_again,
        [F8],
        [],
        "A job that is run again is not purged, also when both happen at once."
    ),
    case!(
        purge::counts_from_the_last_end,
        [F8],
        [Need::Hook(Hook::Clock)],
        "A job that ended twice is as old as its second end."
    ),
];

const ENDED: [JobState; 3] = [JobState::Completed, JobState::Failed, JobState::Canceled];

/// A job that has come to this end.
async fn ended(handle: &Handle, state: JobState) -> Result<Job, Failed> {
    let ending = match state {
        JobState::Completed => complete(),
        JobState::Failed => fail(),
        _ => cancel(),
    };
    let job = running(handle, &new_job(), &worker("a")).await?;
    let job = apply(handle, &job.execution, &ending).await?;
    check_eq!(job.state(), state, "the job has ended");
    Ok(job)
}

/// Which of these jobs are still there.
async fn left(handle: &Handle, jobs: &[Job]) -> Result<Vec<bool>, Failed> {
    let mut left = Vec::new();
    for job in jobs {
        let there = handle.get(job.id()).await?;
        check!(there.as_ref().is_none_or(|there| there == job), "what is not purged stays as it was: {there:?}");
        left.push(there.is_some());
    }
    Ok(left)
}

async fn only_the_named_state(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let mut jobs = Vec::new();
    for state in ENDED {
        jobs.push(ended(&handle, state).await?);
    }
    jobs.push(running(&handle, &new_job(), &worker("a")).await?);
    enqueue(&handle, &new_job()).await?;
    jobs.push(claim_one(&handle, &claim_for(&worker("a"), 1).reserve()).await?);
    let waiting = enqueue(&handle, &new_job()).await?;
    jobs.push(read(&handle, waiting).await?);
    for (index, state) in ENDED.into_iter().enumerate() {
        check_eq!(handle.purge(state, Delay::ZERO, limit(10)).await?, 1, "one job is {state}");
        let expected: Vec<_> = (0..jobs.len()).map(|job| job > index).collect();
        check_eq!(left(&handle, &jobs).await?, expected, "what is left after a purge of {state} jobs");
    }
    Ok(())
}

async fn only_ended_states(context: Context) -> Outcome {
    let handle = context.connect().await?;
    // With an end of their own, so that nothing but their states protects them.
    let mut jobs = Vec::new();
    for _ in 0..4 {
        jobs.push(ended(&handle, JobState::Completed).await?);
    }
    for (job, state) in jobs.iter_mut().zip(JobState::ALL.iter().copied().filter(|state| state.is_active())) {
        context.overwrite(&Execution { state, ..job.execution.clone() }).await?;
        *job = read(&handle, job.id()).await?;
    }
    for job in &jobs {
        let answer = handle.purge(job.state(), Delay::ZERO, limit(10)).await;
        refused(answer, ErrorKind::Invalid, &format!("a purge of {} jobs", job.state()))?;
    }
    for state in ENDED {
        check_eq!(handle.purge(state, Delay::ZERO, limit(10)).await?, 0, "no job is {state}");
    }
    check_eq!(left(&handle, &jobs).await?, [true; 4], "nothing is deleted");
    Ok(())
}

/// What the store's clock shows, at least.
async fn now(handle: &Handle) -> Result<Timestamp, Failed> {
    let probe = NewJob { queue: name("probe"), ..new_job() };
    let probe = enqueue(handle, &probe).await?;
    Ok(read(handle, probe).await?.created_at)
}

async fn by_age_to_the_millisecond(context: Context) -> Outcome {
    const DAY: i64 = 86_400_000;
    let handle = context.connect().await?;
    let job = ended(&handle, JobState::Completed).await?;
    let finished = job.finished_at.ok_or_else(|| Failed::new("finished_at must be set"))?;
    context.advance(DAY).await?;
    let age = now(&handle).await?.unix_millis() - finished.unix_millis();
    check!(age >= DAY, "{age} ms old after a day");
    // One millisecond too young: if the store's clock has moved on meanwhile, it may be old enough by now.
    let early = handle.purge(JobState::Completed, millis(age + 1), limit(10)).await?;
    let older = now(&handle).await?.unix_millis() - finished.unix_millis();
    check!(early == 0 || older > age, "purged at an age of {age} ms, where {} were asked for", age + 1);
    let rest = handle.purge(JobState::Completed, millis(age), limit(10)).await?;
    check_eq!(early + rest, 1, "purged at an age of {age} ms");
    Ok(())
}

async fn the_oldest_first(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let mut jobs = Vec::new();
    for _ in 0..5 {
        jobs.push(running(&handle, &new_job(), &worker("a")).await?);
    }
    for index in [3, 0, 4, 1, 2] {
        context.advance(1_000).await?;
        jobs[index] = apply(&handle, &jobs[index].execution, &complete()).await?;
    }
    for (rows, count, expected) in [
        (2, 2, [false, true, true, false, true]),
        (1, 1, [false, true, true, false, false]),
        (10, 2, [false; 5]),
        (10, 0, [false; 5]),
    ] {
        check_eq!(handle.purge(JobState::Completed, Delay::ZERO, limit(rows)).await?, count, "at most {rows}");
        check_eq!(left(&handle, &jobs).await?, expected, "what is left after a purge of {rows}");
    }
    Ok(())
}

async fn spares_a_job_that_runs_again(context: Context) -> Outcome {
    let handles = [context.connect().await?, context.connect().await?];
    let job = ended(&handles[0], JobState::Completed).await?;
    let again = apply(&handles[0], &job.execution, &Transition::Rerun).await?;
    check_eq!(handles[1].purge(JobState::Completed, Delay::ZERO, limit(10)).await?, 0, "it has not ended");
    apply(&handles[0], &again.execution, &cancel()).await?;
    for round in 0..50 {
        let seen = ended(&handles[0], JobState::Completed).await?.execution;
        let answers = context
            .race(2, |task| {
                let (handle, seen) = (Arc::clone(&handles[task]), seen.clone());
                async move {
                    match task {
                        0 => handle.purge(JobState::Completed, Delay::ZERO, limit(10)).await.map_err(Failed::from),
                        _ => match Transitioner::new(&handle).apply(&seen, &Transition::Rerun).await {
                            Err(TransitionError::Missing { .. }) => Ok(0),
                            answer => answer.map(|_| 1).map_err(Failed::from),
                        },
                    }
                }
            })
            .await?;
        let [purged, rerun] = [0, 1].map(|task: usize| answers[task].as_ref().ok().copied());
        let state = handles[0].get(seen.id).await?.map(|job| job.state());
        match (purged, rerun, state) {
            (Some(1), Some(0), None) => {}
            (Some(0), Some(1), Some(JobState::Waiting)) => {
                let waiting = read(&handles[0], seen.id).await?;
                apply(&handles[0], &waiting.execution, &cancel()).await?;
            }
            _ => {
                return Err(Failed::new(format!(
                    "round {round}: purge and rerun say {answers:?}, the job is {state:?}"
                )));
            }
        }
    }
    Ok(())
}

async fn counts_from_the_last_end(context: Context) -> Outcome {
    const HOUR: i64 = 3_600_000;
    let handle = context.connect().await?;
    let job = ended(&handle, JobState::Failed).await?;
    context.advance(2 * HOUR).await?;
    apply(&handle, &job.execution, &Transition::Rerun).await?;
    let claimed = claim_one(&handle, &claim_for(&worker("a"), 1)).await?;
    let failed = apply(&handle, &claimed.execution, &fail()).await?;
    check_eq!(handle.purge(JobState::Failed, millis(HOUR), limit(10)).await?, 0, "it has just ended");
    check_eq!(read(&handle, job.id()).await?, failed, "it stays");
    context.advance(HOUR).await?;
    check_eq!(handle.purge(JobState::Failed, millis(HOUR), limit(10)).await?, 1, "now it is old enough");
    Ok(())
}
