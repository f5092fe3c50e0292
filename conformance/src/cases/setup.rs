//! Schemas and handles.

use std::sync::Arc;

use queue_core::*;

use crate::case::Case;
use crate::case::Failed;
use crate::case::Outcome;
use crate::case::case;
use crate::case::check_eq;
use crate::context::*;

pub(super) const CASES: &[Case] = &[
    case!(
        setup::migrating_again_keeps_jobs,
        [F4],
        [],
        "Migrating a store that is up to date changes nothing, and disturbs no handle."
    ),
    case!(setup::migrating_at_once, [F1], [], "Any number of handles may migrate at once, beside one that works."),
    case!(
        setup::reconnecting_keeps_everything,
        [],
        [],
        "What was stored is there for whoever connects after all others have gone."
    ),
    case!(
        setup::capabilities_are_as_declared,
        [],
        [],
        "Every handle has the declared capabilities, before and after its first call."
    ),
];

/// Jobs in many states, with all that jobs can have.
async fn various(handle: &Handle) -> Result<Vec<Job>, Failed> {
    let mut jobs = Vec::new();
    for (index, transition) in holder_moves().into_iter().enumerate() {
        let new = NewJob { queue: name(&index.to_string()), ..keyed("k") };
        let job = running(handle, &new, &worker("a")).await?;
        jobs.push(apply(handle, &job.execution, &transition).await?);
    }
    jobs.push(running(handle, &keyed("running"), &worker("a")).await?);
    enqueue(handle, &keyed("claimed")).await?;
    jobs.push(claim_one(handle, &claim_for(&worker("a"), 1).reserve()).await?);
    let waiting = enqueue(handle, &new_job()).await?;
    jobs.push(read(handle, waiting).await?);
    Ok(jobs)
}

async fn check_there(handle: &Handle, jobs: &[Job]) -> Outcome {
    for job in jobs {
        check_eq!(read(handle, job.id()).await?, *job, "the job as it was");
    }
    check_eq!(stored_rows(handle).await?, jobs.len() as u64, "and no others");
    Ok(())
}

async fn migrating_again_keeps_jobs(context: Context) -> Outcome {
    let (first, second) = (context.connect().await?, context.connect().await?);
    let mut jobs = various(&first).await?;
    for round in 0..2 {
        second.migrate().await?;
        let third = context.connect().await?;
        for handle in [&first, &second, &third] {
            check_there(handle, &jobs).await?;
        }
        // The handle that was there before works on.
        let id = enqueue(&first, &keyed(&format!("after {round}"))).await?;
        jobs.push(read(&third, id).await?);
    }
    Ok(())
}

async fn migrating_at_once(context: Context) -> Outcome {
    const MIGRATORS: usize = 16;
    let mut handles = Vec::new();
    for _ in 0..=MIGRATORS {
        handles.push(context.connect().await?);
    }
    let mut jobs = various(&handles[0]).await?;
    let answers = context
        .race(MIGRATORS + 1, |task| {
            let handle = Arc::clone(&handles[task]);
            async move {
                if task > 0 {
                    return Ok(handle.migrate().await.map(|()| None)?);
                }
                let id = enqueue(&handle, &keyed("meanwhile")).await?;
                read(&handle, id).await.map(Some)
            }
        })
        .await?;
    for answer in answers {
        jobs.extend(answer?);
    }
    check_there(&handles[MIGRATORS], &jobs).await
}

async fn reconnecting_keeps_everything(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let jobs = various(&handle).await?;
    let counts = handle.counts().await?;
    drop(handle);
    let handle = context.connect().await?;
    check_there(&handle, &jobs).await?;
    let (mut before, mut after) = (counts, handle.counts().await?);
    before.sort();
    after.sort();
    check_eq!(after, before, "the counts");
    let held = jobs.iter().filter_map(|job| Held::of(&job.execution)).collect::<Vec<_>>();
    check_eq!(handle.extend_leases(&held, lease(MINUTE)).await?, [Beat::Extended; 2], "claims outlive the connection");
    Ok(())
}

async fn capabilities_are_as_declared(context: Context) -> Outcome {
    for number in ["first", "second"] {
        let handle = context.connect().await?;
        check_eq!(handle.capabilities(), context.capabilities, "the {number} handle, just connected");
        enqueue(&handle, &new_job()).await?;
        check_eq!(handle.capabilities(), context.capabilities, "the {number} handle, after its first call");
    }
    Ok(())
}
