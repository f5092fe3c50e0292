//! Claims.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use queue_core::*;
use tokio::sync::oneshot;

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

pub(super) const CASES: &[Case] = &[
    case!(
        claim::writes,
        [S16],
        [],
        "A claim that starts writes state, attempt, fence, revision, holder, times and lease in one step."
    ),
    case!(
        claim::reserve_writes,
        [S16],
        [],
        "A claim that only reserves leaves the attempt and the time of the start alone."
    ),
    case!(
        claim::start_of_a_reserved_job,
        [],
        [Need::Hook(Hook::Clock)],
        "Starting a reserved job counts the attempt and renews the lease."
    ),
    case!(claim::race_gives_each_job_once, [B1 B3], [], "Jobs claimed by many at once go to one worker each, and all of them are found."),
    case!(
        claim::each_of_many_finds_one,
        [B3],
        [],
        "As many claimers of one job each as there are jobs, at once: each of them gets one."
    ),
    case!(claim::race_for_one_job, [B2], [], "Of many claimers of one job exactly one gets it, and nobody an error."),
    case!(
        claim::order,
        [],
        [Need::Hook(Hook::Clock)],
        "Jobs come by priority, then by time of availability, then by id, also within one claim."
    ),
    case!(
        claim::respects_the_limit,
        [],
        [],
        "No more rows are claimed than were asked for; the others stay as they are."
    ),
    case!(claim::only_its_queue, [], [], "Only jobs of the queue are claimed, names compared byte for byte."),
    case!(claim::only_its_kinds, [F5], [], "Only jobs of the kinds asked for are claimed; the others are not touched."),
    case!(
        claim::finds_its_kind_behind_others,
        [B7b],
        [],
        "A job of a known kind is found behind a thousand of other kinds."
    ),
    case!(
        claim::not_before_its_time,
        [],
        [Need::Hook(Hook::Clock)],
        "A job is not claimed before its time, and is claimed at the very millisecond."
    ),
    case!(
        claim::due_means_not_after_now,
        [B8],
        [],
        "A job that was just enqueued without a delay can be claimed at once, by anybody."
    ),
    case!(claim::behind_future_jobs, [B7], [], "A due job is found behind future jobs of a better priority."),
    case!(claim::only_waiting_jobs, [], [], "A job in any state but waiting is not claimed."),
    case!(claim::every_claim_is_a_new_moment, [S16 A4 A17], [], "Every claim has a new revision and a higher fence, also for the same worker."),
    case!(claim::fence_never_goes_back, [], [], "Giving an attempt back does not lower the fence."),
    case!(claim::lease_to_the_millisecond, [B6], [], "A lease is kept to the millisecond, not cut to seconds."),
    case!(claim::lease_starts_when_the_claim_happens, [B5 S18], [Need::Hook(Hook::Hold), Need::Hook(Hook::Clock)], "A claim that had to wait for its turn gets a whole lease."),
    case!(
        claim::skips_locked_rows,
        [B4],
        [Need::Hook(Hook::Hold), Need::SkipsLockedRows],
        "A row that somebody has locked is passed over without waiting."
    ),
    case!(
        claim::gives_up_on_a_lock,
        [B4],
        [Need::Hook(Hook::Hold)],
        "A claim waits for nobody's lock without an end: it brings other jobs, none, or a transient error."
    ),
    case!(
        claim::a_row_that_cannot_be_written,
        [A18 S9],
        [Need::Hook(Hook::Damage)],
        "If a row makes the store fail a claim, the claim has claimed nothing, or what it says."
    ),
    case!(
        claim::unreadable_rows,
        [B9],
        [Need::Hook(Hook::Damage)],
        "A row that cannot be read is claimed and reported beside the others, and its failure can be recorded."
    ),
    case!(
        claim::foreign_states_are_left_alone,
        [B9],
        [Need::Hook(Hook::Damage)],
        "A row in a state of a newer version is not claimed and does not fail the claim."
    ),
    case!(claim::takes_what_it_says, [B10], [], "What a claim answers is what is stored."),
    case!(claim::dropped_futures, [A15 C18], [], "A claim whose future is dropped has claimed each row whole or not at all, and nothing is lost."),
    case!(claim::keeps_the_rest_of_the_row, [], [], "A claim changes nothing of a job but what a claim writes."),
    case!(claim::clock_a_year_on, [C1], [Need::Hook(Hook::Clock)], "A claim's times come from the store's clock."),
    case!(claim::contended_queue_drains, [C20 S19], [Need::Hook(Hook::Hold)], "Claimers behind a holder that blocks get no expired lease, and the queue drains."),
];

async fn writes(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let a = worker("a");
    let id = enqueue(&handle, &new_job()).await?;
    let before = read(&handle, id).await?;
    let job = claim_one(&handle, &claim_for(&a, 1)).await?;
    let row = &job.execution;
    let now = row.claimed_at.ok_or_else(|| Failed::new("claimed_at must be set"))?;
    let expected = Execution {
        state: JobState::Running,
        attempt: 1,
        fence: 1,
        revision: row.revision,
        claimed_by: Some(a),
        claimed_at: Some(now),
        attempted_at: Some(now),
        lease_expires_at: Some(now.saturating_add_millis(MINUTE)),
        ..before.execution.clone()
    };
    check_eq!(*row, expected, "a claim that starts");
    check!(row.revision != before.execution.revision, "the revision is new");
    check!(now >= before.created_at, "claimed at {now}, created at {}", before.created_at);
    check_eq!(read(&handle, id).await?, job, "the answer is what is stored");
    Ok(())
}

async fn reserve_writes(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let a = worker("a");
    let id = enqueue(&handle, &new_job()).await?;
    let before = read(&handle, id).await?.execution;
    let job = claim_one(&handle, &claim_for(&a, 1).reserve()).await?;
    let now = job.execution.claimed_at.ok_or_else(|| Failed::new("claimed_at must be set"))?;
    let expected = Execution {
        state: JobState::Claimed,
        fence: 1,
        revision: job.execution.revision,
        claimed_by: Some(a),
        claimed_at: Some(now),
        lease_expires_at: Some(now.saturating_add_millis(MINUTE)),
        ..before.clone()
    };
    check_eq!(job.execution, expected, "a claim that reserves");
    check!(job.execution.revision != before.revision, "the revision is new");
    check_eq!(read(&handle, id).await?, job, "the answer is what is stored");
    Ok(())
}

async fn start_of_a_reserved_job(context: Context) -> Outcome {
    let handle = context.connect().await?;
    enqueue(&handle, &new_job()).await?;
    let reserved = claim_one(&handle, &claim_for(&worker("a"), 1).reserve()).await?.execution;
    context.advance(MINUTE / 2).await?;
    let started = apply(&handle, &reserved, &Transition::Start { lease: lease(MINUTE) }).await?.execution;
    let expected = Execution {
        state: JobState::Running,
        attempt: 1,
        revision: started.revision,
        attempted_at: started.attempted_at,
        lease_expires_at: started.attempted_at.map(|at| at.saturating_add_millis(MINUTE)),
        ..reserved.clone()
    };
    check_eq!(started, expected, "the start");
    check!(started.revision != reserved.revision, "the start is a moment of its own");
    check!(started.lease_expires_at > reserved.lease_expires_at, "the lease is renewed");
    conflicts(&handle, &reserved, &Transition::Start { lease: lease(MINUTE) }).await?;
    Ok(())
}

async fn race_gives_each_job_once(context: Context) -> Outcome {
    const JOBS: usize = 200;
    const CLAIMERS: usize = 32;
    for (round, rows) in [(1, 1), (2, 3)] {
        let handles = [context.connect().await?, context.connect().await?];
        let jobs: Vec<_> = (0..JOBS).map(|_| new_job()).collect();
        handles[0].enqueue(&jobs).await?;
        let claimed = context
            .race(CLAIMERS, |task| {
                let handle = Arc::clone(&handles[task % 2]);
                async move {
                    let (me, mut mine) = (worker("w"), Vec::new());
                    loop {
                        let claimed = handle.claim(&claim_for(&me, rows)).await?;
                        if claimed.jobs.is_empty() {
                            return Ok::<_, Error>(mine);
                        }
                        mine.extend(claimed.jobs.iter().map(Job::id));
                    }
                }
            })
            .await?;
        let all = claimed.into_iter().collect::<Result<Vec<_>, _>>()?.concat();
        let distinct: BTreeSet<_> = all.iter().copied().collect();
        check_eq!(all.len(), distinct.len(), "round {round}: a job was given to two workers");
        let expected: BTreeSet<_> = jobs.iter().map(|job| job.id).collect();
        check_eq!(
            expected.difference(&distinct).count(),
            0,
            "round {round}: claimers were told that nothing is left while jobs waited"
        );
    }
    Ok(())
}

async fn each_of_many_finds_one(context: Context) -> Outcome {
    const ROUNDS: usize = 20;
    const CLAIMERS: usize = 10;
    let handles = [context.connect().await?, context.connect().await?];
    for round in 0..ROUNDS {
        handles[0].enqueue(&(0..CLAIMERS).map(|_| new_job()).collect::<Vec<_>>()).await?;
        let answers = context
            .race(CLAIMERS, |task| {
                let handle = Arc::clone(&handles[task % 2]);
                async move { handle.claim(&claim_for(&worker("w"), 1)).await }
            })
            .await?;
        let mut claimed = BTreeSet::new();
        for answer in answers {
            claimed.extend(answer?.jobs.iter().map(Job::id));
        }
        check_eq!(claimed.len(), CLAIMERS, "round {round}: one for each, and nobody is told that there are none");
    }
    Ok(())
}

async fn race_for_one_job(context: Context) -> Outcome {
    const ROUNDS: usize = 40;
    let handles = [context.connect().await?, context.connect().await?];
    let id = enqueue(&handles[0], &new_job()).await?;
    for round in 0..ROUNDS {
        let answers = context
            .race(32, |task| {
                let handle = Arc::clone(&handles[task % 2]);
                async move { handle.claim(&claim_for(&worker("w"), 1)).await }
            })
            .await?;
        let mut winners = Vec::new();
        for answer in answers {
            winners.extend(answer?.jobs);
        }
        check_eq!(winners.len(), 1, "round {round}: exactly one must get the job");
        check_eq!(read(&handles[0], id).await?, winners[0], "round {round}: the winner's claim is stored");
        apply(&handles[0], &winners[0].execution, &Transition::Release).await?;
    }
    Ok(())
}

async fn order(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let mut jobs = Vec::new();
    // Enqueued in an order that is neither that of priority nor that of time.
    for (priority, seconds) in [(5, 3), (0, 9), (9, 1), (5, 1), (0, 2), (5, 2), (5, 2), (3, 4)] {
        let mut job = new_job();
        job.priority = Priority::new(priority)?;
        job.available = When::After(millis(seconds * 1_000));
        jobs.push(job);
    }
    handle.enqueue(&jobs[..4]).await?;
    handle.enqueue(&jobs[4..]).await?;
    context.advance(10_000).await?;
    let mut stored = Vec::new();
    for job in &jobs {
        stored.push(read(&handle, job.id).await?);
    }
    stored.sort_by_key(|job| (job.priority, job.available_at, job.id()));
    let expected: Vec<_> = stored.iter().map(Job::id).collect();
    let a = worker("a");
    let mut claimed = Vec::new();
    for rows in [1, 3, 4] {
        claimed.extend(handle.claim(&claim_for(&a, rows)).await?.jobs.iter().map(Job::id));
    }
    check_eq!(claimed, expected, "the order of the queue");
    Ok(())
}

async fn respects_the_limit(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let jobs: Vec<_> = (0..7).map(|_| new_job()).collect();
    handle.enqueue(&jobs).await?;
    check_eq!(handle.claim(&claim_for(&worker("a"), 3)).await?.jobs.len(), 3, "three were asked for");
    let waiting = handle.counts().await?.into_iter().find(|count| count.state == Some(JobState::Waiting));
    check_eq!(waiting.map(|count| count.jobs), Some(4), "the others wait");
    check_eq!(handle.claim(&claim_for(&worker("b"), 10)).await?.jobs.len(), 4, "all that is left");
    check_eq!(handle.claim(&claim_for(&worker("c"), 10)).await?, Claimed::default(), "nothing is left");
    Ok(())
}

async fn only_its_queue(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let queues = ["Q", "q ", "é", "e", "q"];
    for queue in &queues[..4] {
        let mut job = new_job();
        job.queue = name(queue);
        enqueue(&handle, &job).await?;
    }
    check_eq!(handle.claim(&claim_for(&worker("a"), 10)).await?, Claimed::default(), "none of them is q");
    for queue in &queues[..4] {
        let claimed = claim_one(&handle, &claim_from(queue, &worker("a"), 10)).await?;
        check_eq!(claimed.queue.as_str(), *queue, "its own queue");
    }
    Ok(())
}

async fn only_its_kinds(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let mut others = Vec::new();
    for kind in ["K", "k ", "other", "k"] {
        let mut job = new_job();
        job.kind = name(kind);
        others.push(enqueue(&handle, &job).await?);
    }
    let mine = others.pop();
    let claimed = claim_one(&handle, &claim_for(&worker("a"), 10)).await?;
    check_eq!(Some(claimed.id()), mine, "only the known kind");
    for id in others {
        let job = read(&handle, id).await?;
        check_eq!(
            (job.state(), job.execution.attempt, job.execution.fence),
            (JobState::Waiting, 0, 0),
            "kind {} is not touched",
            job.kind
        );
    }
    let two = ClaimRequest::new(name("q"), [name("K"), name("other")], worker("b"), lease(MINUTE), limit(10))?;
    check_eq!(handle.claim(&two).await?.jobs.len(), 2, "several kinds at once");
    Ok(())
}

async fn finds_its_kind_behind_others(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let mut jobs: Vec<_> = (0..1_000).map(|_| NewJob { kind: name("unknown"), ..new_job() }).collect();
    jobs.push(NewJob { priority: Priority::LAST, ..new_job() });
    handle.enqueue(&jobs).await?;
    let claimed = claim_one(&handle, &claim_for(&worker("a"), 1)).await?;
    check_eq!(claimed.id(), jobs[1_000].id, "the one that is known");
    let waiting: u64 = handle
        .counts()
        .await?
        .iter()
        .filter(|count| count.state == Some(JobState::Waiting))
        .map(|count| count.jobs)
        .sum();
    check_eq!(waiting, 1_000, "the others wait as before");
    Ok(())
}

async fn not_before_its_time(context: Context) -> Outcome {
    const HOUR: i64 = 3_600_000;
    let handle = context.connect().await?;
    let mut job = new_job();
    job.available = When::After(millis(HOUR));
    let id = enqueue(&handle, &job).await?;
    let stored = read(&handle, id).await?;
    check_eq!(stored.available_at, stored.created_at.saturating_add_millis(HOUR), "due after an hour");
    context.advance(HOUR / 2).await?;
    check_eq!(handle.claim(&claim_for(&worker("a"), 1)).await?, Claimed::default(), "not yet due");
    // Due at an instant that lies in the store's past by then.
    let mut at = new_job();
    at.available = When::At(stored.available_at);
    enqueue(&handle, &at).await?;
    context.advance(HOUR / 2).await?;
    let claimed = handle.claim(&claim_for(&worker("a"), 10)).await?.jobs;
    check_eq!(claimed.len(), 2, "both are due at that millisecond or after it");
    // Within a second too: whenever it is claimed, its time has come.
    for _ in 0..3 {
        enqueue(&handle, &NewJob { available: When::After(millis(500)), ..new_job() }).await?;
        let soon = loop {
            match handle.claim(&claim_for(&worker("a"), 1)).await?.jobs.pop() {
                Some(job) => break job,
                None => context.advance(100).await?,
            }
        };
        let (claimed, due) = (soon.execution.claimed_at, soon.available_at);
        check!(claimed >= Some(due), "claimed at {claimed:?}, due at {due}");
    }
    Ok(())
}

async fn due_means_not_after_now(context: Context) -> Outcome {
    let (producer, consumer) = (context.connect().await?, context.connect().await?);
    for round in 0..50 {
        let id = enqueue(&producer, &new_job()).await?;
        let claimed = consumer.claim(&claim_for(&worker("a"), 1)).await?.jobs;
        check_eq!(claimed.iter().map(Job::id).collect::<Vec<_>>(), [id], "round {round}: just enqueued, and due");
    }
    Ok(())
}

async fn behind_future_jobs(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let future = |_| NewJob { priority: Priority::FIRST, available: When::After(millis(MINUTE)), ..new_job() };
    handle.enqueue(&(0..1_000).map(future).collect::<Vec<_>>()).await?;
    let id = enqueue(&handle, &NewJob { priority: Priority::LAST, ..new_job() }).await?;
    check_eq!(claim_one(&handle, &claim_for(&worker("a"), 10)).await?.id(), id, "the one that is due");
    Ok(())
}

async fn only_waiting_jobs(context: Context) -> Outcome {
    let handle = context.connect().await?;
    for transition in [complete(), fail(), cancel()] {
        let job = running(&handle, &new_job(), &worker("a")).await?;
        apply(&handle, &job.execution, &transition).await?;
    }
    running(&handle, &new_job(), &worker("a")).await?;
    enqueue(&handle, &new_job()).await?;
    claim_one(&handle, &claim_for(&worker("a"), 1).reserve()).await?;
    check_eq!(handle.claim(&claim_for(&worker("b"), 10)).await?, Claimed::default(), "none of them waits");
    Ok(())
}

async fn every_claim_is_a_new_moment(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let (a, mut revisions) = (worker("a"), BTreeSet::new());
    enqueue(&handle, &new_job()).await?;
    for round in 1..=5 {
        let job = claim_one(&handle, &claim_for(&a, 1)).await?;
        check_eq!(job.execution.fence, round, "the fence counts claims");
        check!(revisions.insert(job.execution.revision), "claim {round} has a revision that was used before");
        let released = apply(&handle, &job.execution, &Transition::Release).await?;
        check!(revisions.insert(released.execution.revision), "release {round} has a revision that was used before");
        conflicts(&handle, &job.execution, &complete()).await?;
    }
    Ok(())
}

async fn fence_never_goes_back(context: Context) -> Outcome {
    let handle = context.connect().await?;
    enqueue(&handle, &new_job()).await?;
    let mut fence = 0;
    for transition in [Transition::Release, snooze(0), retry_now()] {
        let job = claim_one(&handle, &claim_for(&worker("a"), 1)).await?;
        check!(job.execution.fence > fence, "fence {} after {fence}", job.execution.fence);
        fence = job.execution.fence;
        let after = apply(&handle, &job.execution, &transition).await?;
        check_eq!(after.execution.fence, fence, "{} leaves the fence", transition.name());
    }
    check_eq!(claim_one(&handle, &claim_for(&worker("a"), 1)).await?.execution.attempt, 2, "one attempt was used up");
    Ok(())
}

async fn lease_to_the_millisecond(context: Context) -> Outcome {
    let handle = context.connect().await?;
    for span in [1, 5_800, 61_500, 86_400_001] {
        enqueue(&handle, &new_job()).await?;
        let row = claim_one(&handle, &with_lease(&claim_for(&worker("a"), 1), span)).await?.execution;
        let expected = row.claimed_at.map(|at| at.saturating_add_millis(span));
        check_eq!(row.lease_expires_at, expected, "a lease of {span} ms");
    }
    Ok(())
}

/// A job to be claimed, and another whose row (or, without row locks, whose store) somebody holds.
async fn held_beside_a_due_one(context: &Context) -> Result<(Handle, Box<dyn crate::Hold>), Failed> {
    let handle = context.connect().await?;
    let held = running(&handle, &new_job(), &worker("holder")).await?.execution;
    enqueue(&handle, &new_job()).await?;
    let hold = context.store.hold(&held).await?;
    context.note(format_args!("job {} is held in an open transaction", held.id));
    Ok((handle, hold))
}

/// Repeats a claim that was certainly not applied because the store was busy.
async fn claim_in_the_end(handle: &Handle, request: &ClaimRequest) -> Result<Claimed, Error> {
    loop {
        match handle.claim(request).await {
            Err(error) if error.kind() == ErrorKind::Transient && error.certainty() == Certainty::NotApplied => {
                tokio::task::yield_now().await;
            }
            answer => return answer,
        }
    }
}

async fn lease_starts_when_the_claim_happens(context: Context) -> Outcome {
    const HELD_FOR: Duration = Duration::from_millis(60);
    let before = Instant::now();
    let (handle, hold) = held_beside_a_due_one(&context).await?;
    let held = Instant::now();
    let (begins, begun) = oneshot::channel();
    let claiming = {
        let handle = Arc::clone(&handle);
        tokio::spawn(async move {
            let _ = begins.send(());
            claim_in_the_end(&handle, &claim_for(&worker("a"), 1)).await
        })
    };
    begun.await.map_err(|_| Failed::new("the claim did not begin"))?;
    // The moved clock is of no use here: a backend binds the offset before it waits. So real time passes, and more of it than between
    // the enqueue and the hold: so what was read before the wait is told from what was read after it by the age of the job.
    let waits = Instant::now();
    while waits.elapsed() < (held - before) + HELD_FOR {
        tokio::task::yield_now().await;
    }
    let held_for = i64::try_from(held.elapsed().as_millis()).unwrap_or(i64::MAX);
    hold.roll_back().await?;
    let claimed = claiming.await??;
    let job = claimed.jobs.first().ok_or_else(|| Failed::new("the claim must bring a job"))?;
    let row = &job.execution;
    let whole = row.claimed_at.map(|at| at.saturating_add_millis(MINUTE));
    check_eq!(row.lease_expires_at, whole, "the lease runs from the claim");
    if !handle.capabilities().skips_locked_rows {
        // Without row locks the claim happened when the store was free again; a little less for two clocks.
        let free = job.created_at.saturating_add_millis(held_for - 10);
        check!(
            row.claimed_at >= Some(free),
            "claimed at {:?}, but the store was not free before {free}",
            row.claimed_at
        );
    }
    Ok(())
}

async fn skips_locked_rows(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let first = enqueue(&handle, &NewJob { priority: Priority::FIRST, ..new_job() }).await?;
    let second = enqueue(&handle, &new_job()).await?;
    let locked = read(&handle, first).await?.execution;
    let hold = context.store.hold(&locked).await?;
    let claimed = claim_one(&handle, &claim_for(&worker("a"), 1)).await?;
    check_eq!(claimed.id(), second, "the locked row is passed over");
    hold.roll_back().await?;
    check_eq!(claim_one(&handle, &claim_for(&worker("a"), 1)).await?.id(), first, "and claimed once it is free");
    Ok(())
}

async fn gives_up_on_a_lock(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let id = enqueue(&handle, &new_job()).await?;
    let hold = context.store.hold(&read(&handle, id).await?.execution).await?;
    let request = with_lease(&claim_for(&worker("a"), 1), 300);
    match within_patience(handle.claim(&request)).await? {
        Ok(claimed) => check_eq!(claimed, Claimed::default(), "the only job is locked"),
        Err(error) => check_gave_up(&error)?,
    }
    hold.roll_back().await?;
    let claimed = claim_in_the_end(&handle, &claim_for(&worker("a"), 1)).await?.jobs;
    check_eq!(claimed.iter().map(Job::id).collect::<Vec<_>>(), [id], "it is claimed once it is free");
    check_eq!(claimed[0].execution.fence, 1, "for the first time");
    Ok(())
}

async fn unreadable_rows(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let mut bad = NewJob { priority: Priority::FIRST, ..new_job() };
    bad.max_attempts = std::num::NonZeroU32::MIN;
    let (bad, good) = (enqueue(&handle, &bad).await?, enqueue(&handle, &new_job()).await?);
    context.store.damage(bad, Damage::BrokenData).await?;
    context.note(format_args!("job {bad} is broken"));
    let claimed = handle.claim(&claim_for(&worker("a"), 10)).await?;
    check_eq!(claimed.jobs.iter().map(Job::id).collect::<Vec<_>>(), [good], "the good one is claimed");
    let [unreadable] = &claimed.unreadable[..] else {
        return Err(Failed::new(format!("the bad one must be reported: {:?}", claimed.unreadable)));
    };
    check_eq!(unreadable.id, bad, "the bad one is named");
    check!(!unreadable.reason.is_empty(), "the reason is said");
    let Some(execution) = &unreadable.execution else {
        return Err(Failed::new("its lifecycle part can be read"));
    };
    check_eq!((execution.state, execution.attempt), (JobState::Running, 1), "it was claimed, and its attempt counts");
    let settled = Transitioner::new(&handle).apply(execution, &retry_now()).await?;
    check_eq!(settled.execution().state, JobState::Failed, "its last attempt is recorded as a failure");
    check_eq!(handle.claim(&claim_for(&worker("a"), 10)).await?, Claimed::default(), "it does not come again");
    Ok(())
}

async fn a_row_that_cannot_be_written(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let mut before = Vec::new();
    for _ in 0..3 {
        let id = enqueue(&handle, &new_job()).await?;
        before.push(read(&handle, id).await?);
    }
    context.store.damage(before[1].id(), Damage::Poison).await?;
    context.note(format_args!("job {} is poisoned", before[1].id()));
    let claimed = match handle.claim(&claim_for(&worker("a"), 10)).await {
        Ok(claimed) => claimed.jobs,
        Err(error) => {
            check_eq!(error.certainty(), Certainty::NotApplied, "a store that fails to write a row knows it: {error}");
            Vec::new()
        }
    };
    for job in before {
        let expected = claimed.iter().find(|claimed| claimed.id() == job.id()).unwrap_or(&job);
        check_eq!(read(&handle, job.id()).await?, *expected, "what the claim did not answer it did not claim");
    }
    Ok(())
}

async fn foreign_states_are_left_alone(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let foreign = enqueue(&handle, &NewJob { priority: Priority::FIRST, ..new_job() }).await?;
    let good = enqueue(&handle, &new_job()).await?;
    context.store.damage(foreign, Damage::ForeignState).await?;
    context.note(format_args!("job {foreign} has a state of a newer version"));
    check_eq!(claim_one(&handle, &claim_for(&worker("a"), 10)).await?.id(), good, "only the good one");
    let foreign = handle.counts().await?.into_iter().find(|count| count.state.is_none());
    check_eq!(foreign.map(|count| count.jobs), Some(1), "it is still there, and counted");
    Ok(())
}

async fn takes_what_it_says(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let jobs: Vec<_> = (0..20).map(|n| NewJob { payload: json(&n.to_string()), ..new_job() }).collect();
    handle.enqueue(&jobs).await?;
    let claimed = handle.claim(&claim_for(&worker("a"), 15)).await?.jobs;
    for job in &claimed {
        check_eq!(read(&handle, job.id()).await?, *job, "the answer is what is stored");
    }
    let running = handle.counts().await?.into_iter().find(|count| count.state == Some(JobState::Running));
    check_eq!(running.map(|count| count.jobs), Some(claimed.len() as u64), "nothing was claimed beside the answer");
    Ok(())
}

async fn dropped_futures(context: Context) -> Outcome {
    const JOBS: usize = 40;
    let (handle, other) = (context.connect().await?, context.connect().await?);
    handle.enqueue(&(0..JOBS).map(|_| new_job()).collect::<Vec<_>>()).await?;
    let me = worker("a");
    for polls in 1..=20 {
        drop_after(polls, handle.claim(&claim_for(&me, 1))).await;
    }
    // What the dropped claims took is held by this worker, and nothing else happened to any job.
    let rest = other.claim(&claim_for(&worker("b"), JOBS)).await?.jobs;
    let taken = handle.claimed_by(&me, Delay::ZERO, None, limit(JOBS)).await?.items;
    check_eq!(rest.len() + taken.len(), JOBS, "every job is with one of them");
    for row in taken {
        let whole =
            row.state == JobState::Running && row.attempt == 1 && row.fence == 1 && row.lease_expires_at.is_some();
        check!(whole, "a claim is whole: {row:?}");
    }
    // Orphans of a living worker go back with their attempt.
    let orphans = release_orphans(&handle, &me, Delay::ZERO, limit(7), |_| false).await?;
    let again = other.claim(&claim_for(&worker("b"), JOBS)).await?.jobs;
    check_eq!(again.len(), orphans.recovered.len(), "all orphans are found again");
    check!(again.iter().all(|job| job.execution.attempt == 1), "their attempts were given back");
    Ok(())
}

async fn keeps_the_rest_of_the_row(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let mut new = keyed("rest");
    new.priority = Priority::LAST;
    let first = running(&handle, &new, &worker("a")).await?;
    let before = apply(&handle, &first.execution, &retry_now()).await?;
    let after = claim_one(&handle, &claim_for(&worker("b"), 1)).await?;
    check_eq!(before.errors.len(), 1, "the failure is kept");
    check_eq!(after, Job { execution: after.execution.clone(), ..before }, "only the execution moves");
    Ok(())
}

async fn clock_a_year_on(context: Context) -> Outcome {
    const YEAR: i64 = 365 * 86_400_000;
    let handle = context.connect().await?;
    let id = enqueue(&handle, &new_job()).await?;
    let created = read(&handle, id).await?.created_at;
    context.advance(YEAR).await?;
    let row = claim_one(&context.connect().await?, &claim_for(&worker("a"), 1)).await?.execution;
    check!(
        row.claimed_at >= Some(created.saturating_add_millis(YEAR)),
        "claimed at {:?}, a year after {created}",
        row.claimed_at
    );
    check_eq!(row.attempted_at, row.claimed_at, "one moment");
    Ok(())
}

async fn contended_queue_drains(context: Context) -> Outcome {
    const JOBS: usize = 16;
    let (handle, hold) = held_beside_a_due_one(&context).await?;
    let last_attempt = |_| NewJob { max_attempts: std::num::NonZeroU32::MIN, ..new_job() };
    let release = tokio::spawn(async move { hold.roll_back().await });
    loop {
        let jobs: Vec<_> = (1..JOBS).map(last_attempt).collect();
        match handle.enqueue(&jobs).await {
            Err(error) if error.kind() == ErrorKind::Transient => tokio::task::yield_now().await,
            answer => break drop(answer?),
        }
    }
    let short = 3_000;
    let answers = context
        .race(JOBS, |_| {
            let handle = Arc::clone(&handle);
            async move { claim_in_the_end(&handle, &with_lease(&claim_for(&worker("w"), 1), short)).await }
        })
        .await?;
    release.await??;
    let mut settled = 0;
    for answer in answers {
        for job in answer?.jobs {
            let whole = job.execution.claimed_at.map(|at| at.saturating_add_millis(short));
            check_eq!(job.execution.lease_expires_at, whole, "no lease is shorter than asked for");
            settled += usize::from(apply(&handle, &job.execution, &complete()).await?.state() == JobState::Completed);
        }
    }
    check_eq!(settled, JOBS, "the queue drains, and every final outcome is recorded");
    Ok(())
}
