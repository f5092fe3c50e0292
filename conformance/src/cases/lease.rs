//! Leases and heartbeats.

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
        lease::extends_from_now,
        [],
        [CLOCK],
        "A heartbeat sets the lease to the store's now plus the span asked for."
    ),
    case!(lease::extends_a_reserved_job, [B13], [CLOCK], "A job that is only reserved is kept by heartbeats too."),
    case!(lease::never_shortened, [C6c], [CLOCK], "A heartbeat for less than what is left does not shorten the lease."),
    case!(
        lease::revives_an_expired_one,
        [C3],
        [CLOCK],
        "A heartbeat revives an expired lease that nobody has recovered."
    ),
    case!(lease::sets_a_missing_one, [C13 S17], [Need::Hook(Hook::Overwrite)], "A heartbeat gives a lease to a held job without one."),
    case!(lease::changes_nothing_else, [A1 S1], [CLOCK], "A heartbeat changes the lease and nothing else, so that a settle decided before it still applies."),
    case!(lease::lost_to_another_worker, [A3 S15], [], "A job that another worker holds is lost, and its lease not touched."),
    case!(lease::lost_to_a_newer_claim_of_the_same_worker, [A4 S15], [], "A newer claim by the same worker is another claim: the older one is lost."),
    case!(lease::lost_when_not_held, [S16], [], "A job that has ended or waits again is lost, and gets no lease."),
    case!(lease::lost_when_missing, [A8], [], "A job that does not exist is lost, and none is created."),
    case!(lease::asks_for_the_worker, [], [], "A heartbeat in another worker's name does not extend."),
    case!(lease::answers_in_order, [], [], "One call answers for every claim, in order, whatever became of each."),
    case!(lease::to_the_millisecond, [B6], [CLOCK], "A heartbeat's lease is kept to the millisecond."),
    case!(lease::many_in_one_call, [], [CLOCK], "Hundreds of claims are renewed in one call, each of them."),
    case!(lease::does_not_wait_for_a_held_row, [C6b C17 S19], [Need::Hook(Hook::Hold), CLOCK], "A heartbeat that meets a locked row extends whole or reports busy; it is never lost for that."),
    case!(
        lease::gives_up_on_a_lock,
        [C6b C17 S19],
        [Need::Hook(Hook::Hold)],
        "A heartbeat waits for nobody's lock without an end: it renews, reports busy, or fails for the moment."
    ),
    case!(
        lease::a_row_that_cannot_be_written,
        [A18 S9],
        [Need::Hook(Hook::Damage), CLOCK],
        "If a row makes the store fail a heartbeat, it has extended nothing, or what it says; nothing is lost for that."
    ),
    case!(
        lease::ends_with_the_claim,
        [S16],
        [],
        "No lease and no holder are left on a job that waits, and no lease on one that has ended, on every path."
    ),
    case!(
        lease::dropped_futures,
        [A15],
        [CLOCK],
        "A heartbeat whose future is dropped has extended each lease whole or not at all."
    ),
    case!(
        lease::races_with_a_settle,
        [],
        [],
        "A heartbeat and a settle at once: the settle is recorded, and the heartbeat leaves no lease behind."
    ),
];

async fn beat(handle: &Handle, row: &Execution, span: i64) -> Result<Beat, Failed> {
    let beats = handle.extend_leases(&[held(row)?], lease(span)).await?;
    check_eq!(beats.len(), 1, "one claim, one answer");
    Ok(beats[0])
}

/// What the lease is now, in milliseconds after the claim.
async fn lease_after_claim(handle: &Handle, id: JobId) -> Result<i64, Failed> {
    let row = read(handle, id).await?.execution;
    match (row.claimed_at, row.lease_expires_at) {
        (Some(claimed), Some(expires)) => Ok(expires.unix_millis() - claimed.unix_millis()),
        _ => Err(Failed::new(format!("a claim and a lease are expected: {row:?}"))),
    }
}

/// How long the case itself may take by the store's clock, where that is not frozen.
const SLACK: i64 = 30_000;

async fn extends_from_now(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    context.advance(50_000).await?;
    check_eq!(beat(&handle, &job.execution, 2 * MINUTE).await?, Beat::Extended, "the claim is held");
    let after = lease_after_claim(&handle, job.id()).await?;
    check!((170_000..170_000 + SLACK).contains(&after), "the lease ends {after} ms after the claim, not about 170 000");
    Ok(())
}

async fn extends_a_reserved_job(context: Context) -> Outcome {
    let handle = context.connect().await?;
    enqueue(&handle, &new_job()).await?;
    let job = claim_one(&handle, &claim_for(&worker("a"), 1).reserve()).await?;
    context.advance(MINUTE / 2).await?;
    check_eq!(beat(&handle, &job.execution, MINUTE).await?, Beat::Extended, "a reservation is held");
    check!(lease_after_claim(&handle, job.id()).await? >= MINUTE + MINUTE / 2, "its lease is longer now");
    Ok(())
}

async fn never_shortened(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    context.advance(1_000).await?;
    check_eq!(beat(&handle, &job.execution, 1_500).await?, Beat::Extended, "the claim is held");
    check_eq!(lease_after_claim(&handle, job.id()).await?, MINUTE, "the longer lease stays");
    Ok(())
}

async fn revives_an_expired_one(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    context.advance(2 * MINUTE).await?;
    check_eq!(beat(&handle, &job.execution, MINUTE).await?, Beat::Extended, "nobody has recovered it");
    check_eq!(handle.stale(None, limit(10)).await?.items, [], "it is not stale any more");
    let recover = Transition::Recover.plan(&job.execution)?;
    let fingerprint = Decision::new(&job.execution, &Transition::Recover)?.request().current.clone();
    let answer = handle.update_if_current(job.id(), &fingerprint, &recover).await?;
    check!(matches!(answer, Update::Conflict(_)), "a sweep that saw the expired lease loses: {answer:?}");
    Ok(())
}

async fn sets_a_missing_one(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    context.overwrite(&Execution { lease_expires_at: None, ..job.execution.clone() }).await?;
    check_eq!(beat(&handle, &job.execution, MINUTE).await?, Beat::Extended, "the claim is held");
    check!(lease_after_claim(&handle, job.id()).await? >= MINUTE, "it has a lease now");
    Ok(())
}

async fn changes_nothing_else(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let settle = Decision::new(&job.execution, &complete())?;
    context.advance(1_000).await?;
    beat(&handle, &job.execution, MINUTE).await?;
    let after = read(&handle, job.id()).await?;
    let lease_expires_at = after.execution.lease_expires_at;
    check!(lease_expires_at > job.execution.lease_expires_at, "the lease moved");
    let expected = Job { execution: Execution { lease_expires_at, ..job.execution.clone() }, ..job };
    check_eq!(after, expected, "nothing else moved");
    // The answer to the heartbeat was lost: the holder settles with what it knew before.
    let settled = Transitioner::new(&handle).submit(&mut settle.clone()).await?;
    check_eq!(settled.execution().state, JobState::Completed, "its result is recorded");
    Ok(())
}

async fn lost_to_another_worker(context: Context) -> Outcome {
    let (handle, old) = started(&context).await?;
    apply(&handle, &old.execution, &Transition::Release).await?;
    let new = claim_one(&handle, &claim_for(&worker("b"), 1)).await?;
    check_eq!(beat(&handle, &old.execution, 5 * MINUTE).await?, Beat::Lost, "the claim is another's");
    check_eq!(read(&handle, new.id()).await?, new, "the other's claim is not touched");
    Ok(())
}

async fn lost_to_a_newer_claim_of_the_same_worker(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let me = worker("a");
    let old = running(&handle, &new_job(), &me).await?;
    apply(&handle, &old.execution, &Transition::Release).await?;
    let new = claim_one(&handle, &claim_for(&me, 1)).await?;
    check_eq!(beat(&handle, &old.execution, 5 * MINUTE).await?, Beat::Lost, "that claim is over");
    check_eq!(read(&handle, new.id()).await?, new, "the newer claim is not touched by the older one's heartbeat");
    check_eq!(beat(&handle, &new.execution, MINUTE).await?, Beat::Extended, "the newer one is held");
    Ok(())
}

async fn lost_when_not_held(context: Context) -> Outcome {
    for transition in holder_moves() {
        let (handle, job) = started(&context).await?;
        let after = apply(&handle, &job.execution, &transition).await?;
        // With the revision that the row has now: only the state says that nobody holds it.
        let claim = Held { revision: after.execution.revision, ..held(&job.execution)? };
        let beats = handle.extend_leases(&[held(&job.execution)?, claim], lease(MINUTE)).await?;
        check_eq!(beats, [Beat::Lost; 2], "after {} nobody holds it", transition.name());
        check_eq!(read(&handle, job.id()).await?, after, "after {} it gets no lease", transition.name());
        if after.state().is_active() {
            apply(&handle, &after.execution, &cancel()).await?;
        }
    }
    Ok(())
}

async fn lost_when_missing(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let never = Held { id: JobId::new(), ..held(&job.execution)? };
    check_eq!(
        handle.extend_leases(std::slice::from_ref(&never), lease(MINUTE)).await?,
        [Beat::Lost],
        "there is no such job"
    );
    check_eq!(handle.get(never.id).await?, None, "none was created");
    Ok(())
}

async fn asks_for_the_worker(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let claim = Held { worker: worker("a"), ..held(&job.execution)? };
    let beats = handle.extend_leases(&[claim], lease(5 * MINUTE)).await?;
    check_eq!(beats, [Beat::Lost], "another incarnation of the worker holds nothing");
    check_eq!(read(&handle, job.id()).await?, job, "the lease is not touched");
    Ok(())
}

async fn answers_in_order(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let mut claims = Vec::new();
    let mut expected = Vec::new();
    for index in 0..6 {
        let job = running(&handle, &new_job(), &worker("a")).await?;
        claims.push(held(&job.execution)?);
        expected.push(if index % 2 == 0 { Beat::Extended } else { Beat::Lost });
        if index % 2 == 1 {
            apply(&handle, &job.execution, &fail()).await?;
        }
    }
    claims.push(Held { id: JobId::new(), ..claims[0].clone() });
    expected.push(Beat::Lost);
    // In an order that is not that of the ids.
    claims.reverse();
    expected.reverse();
    claims.swap(0, 3);
    expected.swap(0, 3);
    check_eq!(handle.extend_leases(&claims, lease(MINUTE)).await?, expected, "one answer each, in order");
    Ok(())
}

async fn to_the_millisecond(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    for span in [90_001, 150_800] {
        context.advance(1).await?;
        beat(&handle, &job.execution, span).await?;
        let after = lease_after_claim(&handle, job.id()).await?;
        check!((span + 1..span + 2 + SLACK).contains(&after), "a lease of {span} ms ends {after} ms after the claim");
        let fraction = after % 1_000;
        beat(&handle, &job.execution, 1).await?;
        check_eq!(lease_after_claim(&handle, job.id()).await? % 1_000, fraction, "no part of a second is lost");
    }
    Ok(())
}

async fn many_in_one_call(context: Context) -> Outcome {
    const JOBS: usize = 300;
    let handle = context.connect().await?;
    handle.enqueue(&(0..JOBS).map(|_| new_job()).collect::<Vec<_>>()).await?;
    let jobs = handle.claim(&claim_for(&worker("a"), JOBS)).await?.jobs;
    let claims = jobs.iter().map(|job| held(&job.execution)).collect::<Result<Vec<_>, _>>()?;
    context.advance(2 * MINUTE).await?;
    check_eq!(handle.extend_leases(&claims, lease(MINUTE)).await?, vec![Beat::Extended; JOBS], "all are held");
    check_eq!(handle.stale(None, limit(JOBS)).await?.items.len(), 0, "none is stale");
    Ok(())
}

async fn does_not_wait_for_a_held_row(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let other = running(&handle, &new_job(), &worker("a")).await?;
    let hold = context.store.hold(&job.execution).await?;
    context.advance(MINUTE / 2).await?;
    let claims = [held(&job.execution)?, held(&other.execution)?];
    let beating = {
        let (handle, claims) = (Arc::clone(&handle), claims.clone());
        tokio::spawn(async move { handle.extend_leases(&claims, lease(MINUTE)).await })
    };
    // With row locks the beat is answered while the row is held; without, it may have to wait for the store.
    let answer = if handle.capabilities().skips_locked_rows {
        let answer = beating.await?;
        hold.roll_back().await?;
        answer?
    } else {
        tokio::task::yield_now().await;
        hold.roll_back().await?;
        match beating.await? {
            Err(error) if error.kind() == ErrorKind::Transient => handle.extend_leases(&claims, lease(MINUTE)).await?,
            answer => answer?,
        }
    };
    check!(answer[0] != Beat::Lost, "a locked row is not lost");
    check_eq!(answer[1], Beat::Extended, "the claim beside it is renewed");
    let row = read(&handle, other.id()).await?.execution;
    check!(row.lease_expires_at > other.execution.lease_expires_at, "its lease is longer: {row:?}");
    check_eq!(beat(&handle, &job.execution, MINUTE).await?, Beat::Extended, "the next beat renews the other one");
    Ok(())
}

async fn gives_up_on_a_lock(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let hold = context.store.hold(&job.execution).await?;
    match within_patience(handle.extend_leases(&[held(&job.execution)?], lease(300))).await? {
        Ok(beats) => check!(beats != [Beat::Lost], "a locked row is not lost"),
        Err(error) => check_gave_up(&error)?,
    }
    hold.roll_back().await?;
    check_eq!(beat(&handle, &job.execution, MINUTE).await?, Beat::Extended, "the next beat renews it");
    Ok(())
}

async fn a_row_that_cannot_be_written(context: Context) -> Outcome {
    let (handle, jobs) = with_a_poisoned_row(&context).await?;
    context.advance(1_000).await?;
    let claims = jobs.iter().map(|job| held(&job.execution)).collect::<Result<Vec<_>, _>>()?;
    let beats = match handle.extend_leases(&claims, lease(MINUTE)).await {
        Ok(beats) => beats,
        Err(error) => {
            check_eq!(error.certainty(), Certainty::NotApplied, "a store that fails to write a row knows it: {error}");
            vec![Beat::Busy; claims.len()]
        }
    };
    for (job, beat) in jobs.iter().zip(beats) {
        check!(beat != Beat::Lost, "job {} is held all the same", job.id());
        let moved = read(&handle, job.id()).await?.execution.lease_expires_at > job.execution.lease_expires_at;
        check_eq!(moved, beat == Beat::Extended, "job {}: the lease moved, and the answer {beat:?}", job.id());
    }
    Ok(())
}

async fn ends_with_the_claim(context: Context) -> Outcome {
    for transition in holder_moves() {
        let (handle, job) = started(&context).await?;
        let after = apply(&handle, &job.execution, &transition).await?;
        let row = &after.execution;
        check_eq!(row.lease_expires_at, None, "{} ends the lease", transition.name());
        check!(row.revision != job.execution.revision, "{} is a new moment", transition.name());
        check_eq!(row.fence, job.execution.fence, "{} leaves the fence", transition.name());
        if row.state.is_final() {
            let kept = (&row.claimed_by, row.claimed_at, row.attempted_at);
            let before = &job.execution;
            check_eq!(
                kept,
                (&before.claimed_by, before.claimed_at, before.attempted_at),
                "{}: who ran it stays",
                transition.name()
            );
            check!(after.finished_at.is_some(), "{} sets the end", transition.name());
        } else {
            check_eq!(
                (&row.claimed_by, row.claimed_at, row.attempted_at),
                (&None, None, None),
                "{} ends the claim",
                transition.name()
            );
            check_eq!((after.finished_at, after.result), (None, None), "{} leaves no ending", transition.name());
            apply(&handle, row, &cancel()).await?;
        }
    }
    Ok(())
}

async fn dropped_futures(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    for polls in 1..=20 {
        context.advance(10).await?;
        let before = read(&handle, job.id()).await?.execution.lease_expires_at;
        drop_after(polls, handle.extend_leases(&[held(&job.execution)?], lease(MINUTE))).await;
        let after = read(&handle, job.id()).await?.execution.lease_expires_at;
        check!(after >= before, "dropped after {polls} polls: {after:?}, before {before:?}");
    }
    check_eq!(beat(&handle, &job.execution, 2 * MINUTE).await?, Beat::Extended, "the store works on");
    let other = context.connect().await?;
    apply(&other, &job.execution, &complete()).await?;
    Ok(())
}

async fn races_with_a_settle(context: Context) -> Outcome {
    const ROUNDS: usize = 40;
    let handles = [context.connect().await?, context.connect().await?];
    for round in 0..ROUNDS {
        let job = running(&handles[0], &new_job(), &worker("a")).await?.execution;
        let answers = context
            .race(2, |task| {
                let (handle, job) = (Arc::clone(&handles[task]), job.clone());
                async move {
                    match task {
                        0 => apply(&handle, &job, &complete()).await.map(drop),
                        _ => beat(&handle, &job, MINUTE).await.map(drop),
                    }
                }
            })
            .await?;
        answers.into_iter().collect::<Result<Vec<_>, _>>()?;
        let row = read(&handles[0], job.id).await?.execution;
        check_eq!((row.state, row.lease_expires_at), (JobState::Completed, None), "round {round}");
    }
    Ok(())
}
