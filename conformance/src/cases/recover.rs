//! Sweeps: putting back what nobody works on any more.

use std::collections::BTreeSet;
use std::sync::Arc;

use queue_core::*;

use crate::Damage;
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
const OVERWRITE: Need = Need::Hook(Hook::Overwrite);
const DAMAGE: Need = Need::Hook(Hook::Damage);

pub(super) const CASES: &[Case] = &[
    case!(
        recover::stale_lists_expired_and_unset_leases,
        [],
        [CLOCK, OVERWRITE],
        "Stale are held jobs whose lease has run out or is missing, and no others."
    ),
    case!(
        recover::stale_at_the_very_millisecond,
        [],
        [OVERWRITE, CLOCK],
        "A lease has run out when it is not after the store's now."
    ),
    case!(
        recover::stale_in_order,
        [],
        [CLOCK, OVERWRITE],
        "Missing leases come first, then by expiry, then by id, over all page sizes."
    ),
    case!(
        recover::running_job_goes_back,
        [],
        [CLOCK],
        "A running job with an expired lease waits again, due now, its attempt counted and the reason recorded."
    ),
    case!(
        recover::reserved_job_goes_back,
        [],
        [CLOCK],
        "A reserved job with an expired lease waits again, its attempt and errors as before."
    ),
    case!(
        recover::cap_on_attempts,
        [C10],
        [CLOCK],
        "A job that kills its workers fails after exactly as many starts as it may have."
    ),
    case!(recover::stale_scan_does_not_resurrect, [A2 S1], [CLOCK], "A job that was settled, snoozed, claimed by another, renewed or deleted after it was listed stays as it is; others of the sweep are recovered."),
    case!(recover::stale_scan_of_reserved_jobs, [A2 S3], [CLOCK], "The same for jobs that were only reserved."),
    case!(
        recover::a_live_lease_is_refused,
        [A22],
        [],
        "Recovering a job with a live lease is refused by the store's clock."
    ),
    case!(
        recover::a_late_heartbeat_wins,
        [A2],
        [CLOCK],
        "A sweep that saw a lease expire loses against a heartbeat that came after it."
    ),
    case!(
        recover::an_unset_lease_is_not_the_one_seen,
        [C13],
        [CLOCK, OVERWRITE],
        "A sweep that saw an expired lease loses to a row whose lease is unset by now."
    ),
    case!(recover::unset_lease_is_adopted, [C13 S17], [CLOCK, OVERWRITE], "A held job without a lease gets one, goes on as before, and is recovered only after that has run out."),
    case!(
        recover::adoption_keeps_the_holder,
        [S17],
        [OVERWRITE, CLOCK],
        "The holder of an adopted job can still settle it with what it knew before."
    ),
    case!(
        recover::adoption_loses_to_a_lease,
        [],
        [OVERWRITE],
        "A job that got a lease after it was seen without one is not adopted again."
    ),
    case!(
        recover::pages_past_what_it_cannot_recover,
        [C11],
        [CLOCK, DAMAGE],
        "Rows that cannot be recovered do not hide those behind them."
    ),
    case!(recover::one_failing_row, [C12 A18 S9], [CLOCK, DAMAGE], "A row that the store fails to write is reported, at every sweep, and the others are recovered."),
    case!(
        recover::unreadable_row,
        [B9],
        [CLOCK, DAMAGE],
        "A held row of a newer version is left alone, and the others are recovered."
    ),
    case!(
        recover::broken_data_is_recovered,
        [B9],
        [CLOCK, DAMAGE],
        "A row whose data cannot be read is recovered like any other, and stops at its attempt limit."
    ),
    case!(recover::sweeps_at_once, [], [CLOCK], "Many sweeps at once recover each job once, and none fails."),
    case!(recover::sweep_against_settles, [A2 S1 S2], [CLOCK], "Sweeps and settles at once: each job has one outcome."),
    case!(recover::old_holder_is_refused, [S4 S15 A3 C4], [CLOCK], "Whoever lost its claim to a sweep can record nothing any more."),
    case!(recover::same_worker_is_refused_too, [A4 S12 A5], [], "A replayed move of an older claim by the same worker changes nothing, the attempt least of all."),
    case!(
        recover::fence_set_back,
        [A17],
        [OVERWRITE],
        "An older claim is refused even if the fence was set back by hand and counted up again."
    ),
];

/// A job that was reserved, or started.
async fn held(handle: &Handle, starts: bool) -> Result<Job, Failed> {
    enqueue(handle, &new_job()).await?;
    let request = claim_for(&worker("old"), 1);
    claim_one(handle, &if starts { request } else { request.reserve() }).await
}

async fn sweep(handle: &Handle) -> Result<Sweep, Failed> {
    Ok(recover_stale(handle, lease(MINUTE), limit(3), |_| false).await?)
}

async fn stale_lists_expired_and_unset_leases(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let expired = [held(&handle, true).await?.execution, held(&handle, false).await?.execution];
    context.advance(2 * MINUTE).await?;
    let mut living = Vec::new();
    for transition in [complete(), snooze(MINUTE), cancel(), fail()] {
        let job = held(&handle, true).await?;
        living.push(apply(&handle, &job.execution, &transition).await?.execution);
    }
    held(&handle, true).await?;
    held(&handle, false).await?;
    let unset = Execution { lease_expires_at: None, ..held(&handle, true).await?.execution };
    context.overwrite(&unset).await?;
    // An old lease on a row that nobody holds: left by hand.
    context.overwrite(&Execution { lease_expires_at: expired[0].lease_expires_at, ..living[1].clone() }).await?;
    let page = handle.stale(None, limit(100)).await?;
    let expected: BTreeSet<_> = ids(expired.iter().chain([&unset])).into_iter().collect();
    check_eq!(ids(&page.items).into_iter().collect::<BTreeSet<_>>(), expected, "expired or unset, and held");
    check_eq!((page.items.len(), page.next, &page.unreadable[..]), (3, None, &[][..]), "one page is all");
    check!(page.items.contains(&expired[0]), "rows come as they are: {:?}", page.items);
    Ok(())
}

async fn stale_at_the_very_millisecond(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = held(&handle, true).await?;
    let claimed = job.execution.claimed_at.ok_or_else(|| Failed::new("claimed_at must be set"))?;
    // Expired at the moment of the claim itself: that moment is not after now.
    let row = Execution { lease_expires_at: Some(claimed), ..job.execution.clone() };
    context.overwrite(&row).await?;
    check_eq!(ids(&handle.stale(None, limit(10)).await?.items), [row.id], "a lease that ends now has run out");
    apply(&handle, &row, &Transition::Recover).await?;
    // Within a second too: whatever is listed can be recovered at once.
    for _ in 0..3 {
        let request = with_lease(&claim_for(&worker("old"), 1), 2_500);
        let soon = claim_one(&handle, &request).await?;
        let stale = loop {
            match handle.stale(None, limit(10)).await?.items.pop() {
                Some(row) => break row,
                None => context.advance(100).await?,
            }
        };
        check_eq!(stale, soon.execution, "the only one");
        apply(&handle, &stale, &Transition::Recover).await?;
    }
    Ok(())
}

async fn stale_in_order(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let mut rows = Vec::new();
    for seconds in [5, 1, 3, 3, 2] {
        let job = held(&handle, true).await?.execution;
        let lease_expires_at = job.claimed_at.map(|at| at.saturating_add_millis(seconds * 1_000));
        rows.push(Execution { lease_expires_at, ..job });
    }
    for _ in 0..2 {
        rows.push(Execution { lease_expires_at: None, ..held(&handle, true).await?.execution });
    }
    // Two of one expiry, so that the id decides.
    rows[3].lease_expires_at = rows[2].lease_expires_at;
    for row in &rows {
        context.overwrite(row).await?;
    }
    context.advance(10 * MINUTE).await?;
    rows.sort_by_key(|row| (row.lease_expires_at, row.id));
    for rows_per_page in [1, 2, 3, 100] {
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let page = handle.stale(after, limit(rows_per_page)).await?;
            check!(page.items.len() <= rows_per_page, "no page is larger than asked for");
            found.extend(page.items);
            after = page.next;
            if after.is_none() {
                break;
            }
            check!(found.len() <= rows.len(), "paging by {rows_per_page} must end");
        }
        check_eq!(found, rows, "paged by {rows_per_page}");
    }
    Ok(())
}

async fn running_job_goes_back(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = held(&handle, true).await?;
    context.advance(MINUTE - 1_000).await?;
    apply_nothing(&handle, &job).await?;
    context.advance(2_000).await?;
    let report = sweep(&handle).await?;
    let after = read(&handle, job.id()).await?;
    check_eq!(report.recovered, std::slice::from_ref(&after.execution), "one job is recovered");
    check_eq!((after.state(), after.execution.attempt), (JobState::Waiting, 1), "the start counts");
    check_eq!(after.errors.len(), 1, "the reason is recorded");
    let failure = &after.errors[0];
    let expected = (1, job.execution.fence, &job.execution.claimed_by, "lease expired");
    check_eq!((failure.attempt, failure.fence, &failure.worker, failure.text.as_str()), expected, "whose lease it was");
    check!(Some(failure.at) >= job.execution.lease_expires_at, "recorded by the store's clock");
    let next = claim_one(&handle, &claim_for(&worker("new"), 1)).await?;
    check_eq!((next.execution.attempt, next.execution.fence), (2, 2), "it runs again at once");
    Ok(())
}

/// A sweep that must do nothing to a job that is held.
async fn apply_nothing(handle: &Handle, job: &Job) -> Outcome {
    let report = sweep(handle).await?;
    check_eq!((report.recovered.len(), report.skipped), (0, 0), "a living lease is not stale");
    check_eq!(read(handle, job.id()).await?, *job, "the job is as it was");
    Ok(())
}

async fn reserved_job_goes_back(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = held(&handle, false).await?;
    apply_nothing(&handle, &job).await?;
    context.advance(2 * MINUTE).await?;
    sweep(&handle).await?;
    let after = read(&handle, job.id()).await?;
    check_eq!(
        (after.state(), after.execution.attempt, after.errors.len()),
        (JobState::Waiting, 0, 0),
        "it never started"
    );
    Ok(())
}

async fn cap_on_attempts(context: Context) -> Outcome {
    let handle = context.connect().await?;
    for max in [1, 3] {
        let mut new = new_job();
        new.max_attempts = std::num::NonZeroU32::new(max).unwrap_or(std::num::NonZeroU32::MIN);
        enqueue(&handle, &new).await?;
        for start in 1..=max {
            let job = claim_one(&handle, &claim_for(&worker("dies"), 1)).await?;
            check_eq!(job.execution.attempt, start, "start {start} of {max}");
            context.advance(2 * MINUTE).await?;
            sweep(&handle).await?;
        }
        let after = read(&handle, new.id).await?;
        check_eq!((after.state(), after.execution.attempt), (JobState::Failed, max), "failed after {max} starts");
        check_eq!(handle.claim(&claim_for(&worker("new"), 1)).await?, Claimed::default(), "it does not start again");
    }
    Ok(())
}

/// Snapshots of stale jobs, each then changed by somebody before the sweep writes.
async fn changed_behind_the_scan(context: &Context, starts: bool) -> Outcome {
    let handle = context.connect().await?;
    let mut seen = Vec::new();
    for _ in 0..7 {
        seen.push(held(&handle, starts).await?.execution);
    }
    context.advance(2 * MINUTE).await?;
    let listed = handle.stale(None, limit(100)).await?.items;
    check_eq!(listed.len(), 7, "all are stale");
    let end = if starts { complete() } else { cancel() };
    apply(&handle, &seen[0], &end).await?;
    apply(&handle, &seen[1], &Transition::Release).await?;
    claim_one(&handle, &claim_for(&worker("new"), 1)).await?;
    apply(&handle, &seen[2], &snooze(MINUTE)).await?;
    handle.extend_leases(&Held::of(&seen[3]).into_iter().collect::<Vec<_>>(), lease(MINUTE)).await?;
    let ended = apply(&handle, &seen[4], &cancel()).await?;
    context.advance(1).await?;
    let purged = handle.purge(JobState::Canceled, Delay::ZERO, limit(10)).await?;
    check_eq!(purged, if starts { 1 } else { 2 }, "job {} is deleted", ended.id());
    let before = rows_of(&handle, &seen[..5]).await?;
    let mut decisions = Vec::new();
    for row in &listed {
        decisions.push(Decision::new(row, &Transition::Recover)?);
    }
    let answers = Transitioner::new(&handle).submit_all(&mut decisions).await;
    for (row, answer) in listed.iter().zip(answers) {
        match (seen[..5].iter().any(|changed| changed.id == row.id), answer) {
            (true, Err(TransitionError::Conflict(_) | TransitionError::Missing { .. }))
            | (false, Ok(Settled::Applied(_))) => {}
            (_, answer) => return Err(Failed::new(format!("job {}: {answer:?}", row.id))),
        }
    }
    check_eq!(rows_of(&handle, &seen[..5]).await?, before, "what others changed stays as it is");
    for row in &seen[5..] {
        check_eq!(read(&handle, row.id).await?.state(), JobState::Waiting, "the others are recovered");
    }
    Ok(())
}

async fn rows_of(handle: &Handle, rows: &[Execution]) -> Result<Vec<Option<Job>>, Failed> {
    let mut found = Vec::new();
    for row in rows {
        found.push(handle.get(row.id).await?);
    }
    Ok(found)
}

async fn stale_scan_does_not_resurrect(context: Context) -> Outcome {
    changed_behind_the_scan(&context, true).await
}

async fn stale_scan_of_reserved_jobs(context: Context) -> Outcome {
    changed_behind_the_scan(&context, false).await
}

async fn a_live_lease_is_refused(context: Context) -> Outcome {
    let handle = context.connect().await?;
    for starts in [true, false] {
        let job = held(&handle, starts).await?;
        conflicts(&handle, &job.execution, &Transition::Recover).await?;
    }
    Ok(())
}

async fn a_late_heartbeat_wins(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = held(&handle, true).await?;
    context.advance(2 * MINUTE).await?;
    let listed = handle.stale(None, limit(1)).await?.items;
    check_eq!(ids(&listed), [job.id()], "its lease has run out");
    handle.extend_leases(&Held::of(&job.execution).into_iter().collect::<Vec<_>>(), lease(MINUTE)).await?;
    // It has run out again when the sweep writes: it was renewed all the same.
    context.advance(2 * MINUTE).await?;
    conflicts(&handle, &listed[0], &Transition::Recover).await?;
    check_eq!(sweep(&handle).await?.recovered.len(), 1, "the next sweep sees the newer lease, expired");
    Ok(())
}

async fn an_unset_lease_is_not_the_one_seen(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = held(&handle, true).await?;
    context.advance(2 * MINUTE).await?;
    let listed = handle.stale(None, limit(1)).await?.items;
    check_eq!(ids(&listed), [job.id()], "its lease has run out");
    context.overwrite(&Execution { lease_expires_at: None, ..listed[0].clone() }).await?;
    conflicts(&handle, &listed[0], &Transition::Recover).await?;
    check_eq!(ids(&sweep(&handle).await?.adopted), [job.id()], "the next sweep adopts it");
    Ok(())
}

async fn unset_lease_is_adopted(context: Context) -> Outcome {
    let handle = context.connect().await?;
    for starts in [true, false] {
        let unset = Execution { lease_expires_at: None, ..held(&handle, starts).await?.execution };
        context.overwrite(&unset).await?;
        let report = sweep(&handle).await?;
        let adopted = read(&handle, unset.id).await?.execution;
        check_eq!((ids(&report.adopted), report.recovered.len()), (vec![unset.id], 0), "adopted, not recovered");
        check_eq!(Execution { lease_expires_at: None, ..adopted.clone() }, unset, "only the lease is new");
        check!(adopted.lease_expires_at.is_some(), "it has a lease");
        check_eq!(sweep(&handle).await?.adopted.len(), 0, "once");
        context.advance(2 * MINUTE).await?;
        check_eq!(ids(&sweep(&handle).await?.recovered), [unset.id], "recovered after its lease has run out");
        apply(&handle, &read(&handle, unset.id).await?.execution, &cancel()).await?;
    }
    Ok(())
}

async fn adoption_keeps_the_holder(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = held(&handle, true).await?.execution;
    context.overwrite(&Execution { lease_expires_at: None, ..job.clone() }).await?;
    context.advance(10 * MINUTE).await?;
    sweep(&handle).await?;
    check_eq!(
        apply(&handle, &job, &complete()).await?.state(),
        JobState::Completed,
        "the older program's result is recorded"
    );
    Ok(())
}

async fn adoption_loses_to_a_lease(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = held(&handle, true).await?.execution;
    let unset = Execution { lease_expires_at: None, ..job.clone() };
    let adopt = Transition::Adopt { lease: lease(1) };
    conflicts(&handle, &unset, &adopt).await?;
    context.overwrite(&unset).await?;
    apply(&handle, &unset, &adopt).await?;
    conflicts(&handle, &unset, &adopt).await?;
    Ok(())
}

async fn pages_past_what_it_cannot_recover(context: Context) -> Outcome {
    const BAD: usize = 25;
    let handle = context.connect().await?;
    for _ in 0..BAD {
        let job = held(&handle, true).await?;
        context.store.damage(job.id(), Damage::Poison).await?;
    }
    context.advance(1_000).await?;
    let good = held(&handle, true).await?;
    context.advance(2 * MINUTE).await?;
    let report = sweep(&handle).await?;
    check_eq!(ids(&report.recovered), [good.id()], "found behind {BAD} that cannot be recovered");
    check_eq!(report.failed.len(), BAD, "each of those is reported");
    Ok(())
}

async fn one_failing_row(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let mut jobs = Vec::new();
    for _ in 0..3 {
        jobs.push(held(&handle, true).await?);
    }
    context.store.damage(jobs[1].id(), Damage::Poison).await?;
    context.advance(2 * MINUTE).await?;
    for (round, recovered) in [(1, 2), (2, 0)] {
        let report = sweep(&handle).await?;
        check_eq!(report.recovered.len(), recovered, "sweep {round}");
        let [(id, TransitionError::Backend(error))] = &report.failed[..] else {
            return Err(Failed::new(format!("sweep {round} must report the row: {:?}", report.failed)));
        };
        check_eq!(*id, jobs[1].id(), "sweep {round}: {error}");
        // Without atomic batches the row's own failure cannot say what became of it in the batch before.
        let is_certain = error.certainty() == Certainty::NotApplied || !context.capabilities.atomic_batches;
        check!(is_certain, "sweep {round}: nothing was written: {error}");
    }
    check_eq!(read(&handle, jobs[1].id()).await?, jobs[1], "it is as it was");
    Ok(())
}

async fn unreadable_row(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let foreign = held(&handle, true).await?;
    context.store.damage(foreign.id(), Damage::ForeignState).await?;
    let good = held(&handle, true).await?;
    context.advance(2 * MINUTE).await?;
    check_eq!(ids(&sweep(&handle).await?.recovered), [good.id()], "the other is recovered");
    let read = handle.get(foreign.id()).await;
    check!(read.is_err_and(|error| error.kind() == ErrorKind::Schema), "it still has the newer version's state");
    Ok(())
}

async fn broken_data_is_recovered(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let new = NewJob { max_attempts: std::num::NonZeroU32::MIN, ..new_job() };
    let job = running(&handle, &new, &worker("old")).await?;
    context.store.damage(job.id(), Damage::BrokenData).await?;
    context.advance(2 * MINUTE).await?;
    let report = sweep(&handle).await?;
    check_eq!(ids(&report.recovered), [job.id()], "recovered: {report:?}");
    check_eq!(report.recovered[0].state, JobState::Failed, "it stops at its attempt limit");
    Ok(())
}

async fn sweeps_at_once(context: Context) -> Outcome {
    const JOBS: usize = 60;
    let handles = [context.connect().await?, context.connect().await?];
    handles[0].enqueue(&(0..JOBS).map(|_| new_job()).collect::<Vec<_>>()).await?;
    handles[0].claim(&claim_for(&worker("old"), JOBS)).await?;
    context.advance(2 * MINUTE).await?;
    let sweeps = context
        .race(8, |task| {
            let handle = Arc::clone(&handles[task % 2]);
            async move { recover_stale(&handle, lease(MINUTE), limit(7), |_| false).await }
        })
        .await?;
    let mut recovered = Vec::new();
    for sweep in sweeps {
        let sweep = sweep?;
        check!(sweep.failed.is_empty(), "no sweep fails: {:?}", sweep.failed);
        recovered.extend(ids(&sweep.recovered));
    }
    check_eq!(recovered.len(), JOBS, "each job is recovered by one sweep");
    check_eq!(recovered.into_iter().collect::<BTreeSet<_>>().len(), JOBS, "all of them");
    let again = handles[0].claim(&claim_for(&worker("new"), JOBS)).await?.jobs;
    check!(again.iter().all(|job| job.execution.attempt == 2 && job.errors.len() == 1), "once each");
    Ok(())
}

async fn sweep_against_settles(context: Context) -> Outcome {
    const ROUNDS: usize = 25;
    let handles = [context.connect().await?, context.connect().await?];
    for round in 0..ROUNDS {
        let job = running(&handles[0], &new_job(), &worker("old")).await?.execution;
        context.advance(2 * MINUTE).await?;
        let outcomes = context
            .race(4, |task| {
                let (handle, job) = (Arc::clone(&handles[task % 2]), job.clone());
                async move {
                    Ok::<_, Failed>(match task {
                        0 => usize::from(Transitioner::new(&handle).apply(&job, &complete()).await.is_ok()),
                        _ => recover_stale(&handle, lease(MINUTE), limit(3), |_| false).await?.recovered.len(),
                    })
                }
            })
            .await?;
        let outcomes = outcomes.into_iter().collect::<Result<Vec<_>, _>>()?;
        check_eq!(outcomes.iter().sum::<usize>(), 1, "round {round}: one of them moved the job");
        let row = read(&handles[0], job.id).await?;
        let expected = if outcomes[0] == 1 { JobState::Completed } else { JobState::Waiting };
        check_eq!(
            (row.state(), row.result.is_some()),
            (expected, outcomes[0] == 1),
            "round {round}: and that is what is stored"
        );
        if expected == JobState::Waiting {
            apply(&handles[0], &row.execution, &cancel()).await?;
        }
    }
    Ok(())
}

async fn old_holder_is_refused(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let old = held(&handle, true).await?.execution;
    let reserved = held(&handle, false).await?.execution;
    context.advance(2 * MINUTE).await?;
    sweep(&handle).await?;
    let mut newer = handle.claim(&claim_for(&worker("new"), 2)).await?.jobs;
    newer.sort_by_key(Job::id);
    for transition in holder_moves() {
        let conflict = conflicts(&handle, &old, &transition).await?;
        check_eq!(conflict.current, read(&handle, old.id).await?.execution, "{} learns who has it", transition.name());
    }
    for transition in [Transition::Start { lease: lease(MINUTE) }, snooze(1), Transition::Release, cancel()] {
        conflicts(&handle, &reserved, &transition).await?;
    }
    let beats = handle
        .extend_leases(&[&old, &reserved].into_iter().filter_map(Held::of).collect::<Vec<_>>(), lease(5 * MINUTE))
        .await?;
    check_eq!(beats, [Beat::Lost; 2], "the heartbeat is told too");
    for job in newer {
        check_eq!(read(&handle, job.id()).await?, job, "the newer claim's row is as it was");
    }
    Ok(())
}

async fn same_worker_is_refused_too(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let me = worker("a");
    let first = running(&handle, &new_job(), &me).await?.execution;
    let mut release = Decision::new(&first, &Transition::Release)?;
    Transitioner::new(&handle).submit(&mut release).await?;
    let second = claim_one(&handle, &claim_for(&me, 1)).await?;
    check_eq!(second.execution.attempt, first.attempt, "the release gave the attempt back");
    // The release is replayed late, and everything else that the first claim might still send.
    let replay = Transitioner::new(&handle).submit(&mut release).await;
    check!(matches!(replay, Err(TransitionError::Conflict(_))), "the replay is fenced: {replay:?}");
    for transition in holder_moves() {
        conflicts(&handle, &first, &transition).await?;
    }
    check_eq!(read(&handle, second.id()).await?, second, "the second claim stands, its attempt unchanged");
    Ok(())
}

async fn fence_set_back(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let me = worker("a");
    let first = running(&handle, &new_job(), &me).await?.execution;
    let released = apply(&handle, &first, &Transition::Release).await?.execution;
    context.overwrite(&Execution { fence: 0, ..released }).await?;
    let second = claim_one(&handle, &claim_for(&me, 1)).await?;
    check_eq!(
        (second.execution.fence, second.execution.attempt),
        (first.fence, first.attempt),
        "the numbers are the same again"
    );
    // The times too, for a claim within the same millisecond.
    let twin = Execution { claimed_at: first.claimed_at, attempted_at: first.attempted_at, ..second.execution.clone() };
    context.overwrite(&twin).await?;
    for transition in holder_moves() {
        conflicts(&handle, &first, &transition).await?;
    }
    Ok(())
}
