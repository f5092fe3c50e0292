//! Calls in the application's own transaction. Some stores have one writer at a time: while such a transaction is open, the
//! cases only read, or leave it to other tasks to wait.

use std::sync::Arc;
use std::time::Duration;

use queue_core::*;

use crate::case::Case;
use crate::case::Failed;
use crate::case::Need;
use crate::case::Outcome;
use crate::case::case;
use crate::case::check;
use crate::case::check_eq;
use crate::context::*;
use crate::harness::CallerTransaction;
use crate::harness::Hook;

pub(super) const CASES: &[Case] = &[
    case!(
        transaction::a_commit_shows_everything,
        [D7],
        [Need::Hook(Hook::Transaction)],
        "What was written in a transaction is invisible to others before the commit, and all there after it."
    ),
    case!(
        transaction::a_rollback_leaves_nothing,
        [D7],
        [Need::Hook(Hook::Transaction)],
        "What was written in a transaction that is rolled back never was."
    ),
    case!(
        transaction::dropped_transactions,
        [A15],
        [Need::Hook(Hook::Transaction)],
        "A transaction that is dropped leaves nothing, and no lock, behind."
    ),
    case!(
        transaction::dropped_futures,
        [A15],
        [Need::Hook(Hook::Transaction)],
        "A call that is dropped together with its transaction leaves nothing, and no lock, behind."
    ),
    case!(
        transaction::a_duplicate_leaves_it_usable,
        [D2],
        [Need::Hook(Hook::Transaction)],
        "A duplicate is an outcome in a transaction too: what is written after it is committed."
    ),
    case!(
        transaction::sees_its_own_writes,
        [D9],
        [Need::Hook(Hook::Transaction)],
        "A call in a transaction is judged by what the calls before it wrote."
    ),
    case!(
        transaction::a_refused_call_leaves_nothing,
        [D10],
        [Need::Hook(Hook::Transaction)],
        "An enqueue that is refused in a transaction names its item, and after the rollback nothing is there."
    ),
    case!(
        transaction::a_conflict_is_reported,
        [D8],
        [Need::Hook(Hook::Transaction)],
        "A conflict in a transaction shows the row, and after the rollback nothing of the caller's is there."
    ),
    case!(
        transaction::its_end_decides_who_has_the_key,
        [D1],
        // What it took it holds, as a row.
        [Need::Hook(Hook::Transaction), Need::Hook(Hook::Hold)],
        "Those who want a key that an open transaction took get it if that is rolled back, and are told if it commits."
    ),
    case!(
        transaction::times_are_the_statements,
        [C1],
        [Need::Hook(Hook::Transaction)],
        "Now is when a call is made, not when its transaction began."
    ),
    case!(
        transaction::a_heartbeat_does_no_harm,
        [D8],
        [Need::Hook(Hook::Transaction), Need::Hook(Hook::Hold)],
        "A transaction that was begun for settling a job settles it, whatever heartbeats come in between."
    ),
];

async fn begin(context: &Context) -> Result<Box<dyn CallerTransaction>, Failed> {
    context.note(format_args!("the application begins a transaction"));
    Ok(context.store.begin(None).await?)
}

async fn submit(transaction: &mut Box<dyn CallerTransaction>, decision: &Decision) -> Result<Update, Error> {
    let UpdateRequest { id, current, patch } = decision.request();
    transaction.update(*id, current, patch).await
}

/// A transaction that has enqueued two jobs and completed one that runs.
struct Work {
    handle: Handle,
    transaction: Box<dyn CallerTransaction>,
    enqueued: [NewJob; 2],
    running: Job,
    decision: Decision,
    completed: Execution,
}

impl Work {
    async fn begin(context: &Context) -> Result<Self, Failed> {
        let handle = context.connect().await?;
        let running = running(&handle, &new_job(), &worker("a")).await?;
        let enqueued = [keyed("k"), new_job()];
        let mut transaction = begin(context).await?;
        for job in &enqueued {
            let answers = transaction.enqueue(std::slice::from_ref(job)).await?;
            check_eq!(answers, [Enqueued::New(job.id)], "a new job, in the transaction");
        }
        let decision = Decision::new(&running.execution, &complete())?;
        let answer = submit(&mut transaction, &decision).await?;
        let Update::Applied(completed) = answer else {
            return Err(Failed::new(format!("the completion must be applied in the transaction, not {answer:?}")));
        };
        check_eq!(completed.state, JobState::Completed, "the answer is the row as it will be");
        Ok(Self { handle, transaction, enqueued, running, decision, completed })
    }

    /// Checks, by reading alone, that nothing of it is there.
    async fn check_unseen(handle: &Handle, enqueued: &[NewJob], running: &Job) -> Outcome {
        for job in enqueued {
            check_eq!(handle.get(job.id).await?, None, "a job that was not committed");
        }
        check_eq!(read(handle, running.id()).await?, *running, "the running job, its completion not committed");
        check_eq!(stored_rows(handle).await?, 1, "the rows that are there");
        Ok(())
    }

    /// Checks that nothing of it was kept: not even its locks, and all of it can be done anew.
    async fn check_undone(handle: Handle, enqueued: [NewJob; 2], running: Job, mut decision: Decision) -> Outcome {
        Self::check_unseen(&handle, &enqueued, &running).await?;
        let answers = enqueue_in_the_end(&handle, &enqueued).await?;
        check_eq!(answers, enqueued.map(|job| Enqueued::New(job.id)), "the same jobs, outside the transaction");
        let settled = Transitioner::new(&handle).submit(&mut decision).await?;
        check!(matches!(settled, Settled::Applied(_)), "the same completion, for the first time: {settled:?}");
        Ok(())
    }
}

async fn a_commit_shows_everything(context: Context) -> Outcome {
    let Work { handle, transaction, enqueued, running, completed, .. } = Work::begin(&context).await?;
    Work::check_unseen(&handle, &enqueued, &running).await?;
    Work::check_unseen(&context.connect().await?, &enqueued, &running).await?;
    transaction.commit().await?;
    let done = read(&handle, running.id()).await?;
    check_eq!(done.execution, completed, "the completion is as it was answered");
    check_eq!(done.result, Some(json("{\"done\":true}")), "its result is there");
    let claimed = handle.claim(&claim_for(&worker("b"), 10)).await?.jobs;
    let claimed: Vec<_> = claimed.iter().map(Job::id).collect();
    check_eq!(claimed, enqueued.map(|job| job.id), "the new jobs can be claimed");
    Ok(())
}

async fn a_rollback_leaves_nothing(context: Context) -> Outcome {
    let Work { handle, transaction, enqueued, running, decision, .. } = Work::begin(&context).await?;
    transaction.roll_back().await?;
    Work::check_undone(handle, enqueued, running, decision).await
}

async fn dropped_transactions(context: Context) -> Outcome {
    let Work { handle, transaction, enqueued, running, decision, .. } = Work::begin(&context).await?;
    context.note(format_args!("the transaction is dropped"));
    drop(transaction);
    Work::check_undone(handle, enqueued, running, decision).await
}

async fn dropped_futures(context: Context) -> Outcome {
    let handle = context.connect().await?;
    for polls in 1..=10 {
        let jobs: Vec<_> = (0..3).map(|n| keyed(&format!("{polls} {n}"))).collect();
        let mut transaction = begin(&context).await?;
        transaction.enqueue(&jobs[..1]).await?;
        drop_after(polls, transaction.enqueue(&jobs[1..])).await;
        drop(transaction);
        let answers = enqueue_in_the_end(&handle, &jobs).await?;
        let new: Vec<_> = jobs.iter().map(|job| Enqueued::New(job.id)).collect();
        check_eq!(answers, new, "dropped after {polls} polls: nothing is there");
    }
    Ok(())
}

async fn a_duplicate_leaves_it_usable(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let holder = enqueue(&handle, &keyed("k")).await?;
    let before = read(&handle, holder).await?;
    let (twin, other, last) = (keyed("k"), keyed("other"), new_job());
    let mut transaction = begin(&context).await?;
    let duplicate = Enqueued::Duplicate { existing: holder };
    let answers = transaction.enqueue(std::slice::from_ref(&twin)).await?;
    check_eq!(answers, [duplicate], "a taken key, in the transaction");
    let answers = transaction.enqueue(&[keyed("k"), other.clone(), keyed("k")]).await?;
    check_eq!(answers, [duplicate, Enqueued::New(other.id), duplicate], "a free key between duplicates");
    let answers = transaction.enqueue(std::slice::from_ref(&last)).await?;
    check_eq!(answers, [Enqueued::New(last.id)], "a job after duplicates");
    transaction.commit().await?;
    check_eq!(handle.get(twin.id).await?, None, "a duplicate is not stored");
    check_eq!(read(&handle, holder).await?, before, "the holder of the key is as it was");
    for job in [other, last] {
        check_eq!(read(&handle, job.id).await?.state(), JobState::Waiting, "what was new is committed");
    }
    check_eq!(stored_rows(&handle).await?, 3, "and nothing else");
    Ok(())
}

async fn sees_its_own_writes(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = running(&handle, &keyed("freed"), &worker("a")).await?;
    let (new, successor) = (keyed("k"), keyed("freed"));
    let mut transaction = begin(&context).await?;
    transaction.enqueue(std::slice::from_ref(&new)).await?;
    let answers = transaction.enqueue(&[new.clone(), keyed("k")]).await?;
    let expected = [Enqueued::Existing(new.id), Enqueued::Duplicate { existing: new.id }];
    check_eq!(answers, expected, "a repeat, and a duplicate, of a job of this transaction");
    let answers = transaction.enqueue(&[keyed("freed")]).await?;
    check_eq!(answers, [Enqueued::Duplicate { existing: job.id() }], "the key of a job that runs");
    let answer = submit(&mut transaction, &Decision::new(&job.execution, &retry_now())?).await?;
    let Update::Applied(waiting) = answer else {
        return Err(Failed::new(format!("the retry must be applied, not {answer:?}")));
    };
    let answer = submit(&mut transaction, &Decision::new(&waiting, &cancel())?).await?;
    check!(matches!(answer, Update::Applied(_)), "a decision on what this transaction wrote: {answer:?}");
    let answers = transaction.enqueue(std::slice::from_ref(&successor)).await?;
    check_eq!(answers, [Enqueued::New(successor.id)], "a key that this transaction freed");
    transaction.commit().await?;
    let ended = read(&handle, job.id()).await?;
    check_eq!((ended.state(), ended.errors.len()), (JobState::Canceled, 2), "both decisions are there");
    check_eq!(stored_rows(&handle).await?, 3, "one row per job");
    Ok(())
}

async fn a_refused_call_leaves_nothing(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let stored = new_job();
    enqueue(&handle, &stored).await?;
    let before = read(&handle, stored.id).await?;
    let long = "x".repeat(context.capabilities.max_payload);
    let bad = [
        (ErrorKind::IdReused, NewJob { kind: name("other"), ..stored.clone() }),
        (ErrorKind::TooLarge, NewJob { payload: Json::encode(&long)?, ..new_job() }),
    ];
    for (kind, bad) in bad {
        let mut transaction = begin(&context).await?;
        transaction.enqueue(&[new_job()]).await?;
        let answer = transaction.enqueue(&[new_job(), bad, new_job()]).await;
        check_eq!(refused(answer, kind, "the batch")?, Some(1), "the item is named ({kind})");
        transaction.roll_back().await?;
        check_eq!(stored_rows(&handle).await?, 1, "nothing is left of the transaction ({kind})");
    }
    check_eq!(read(&handle, stored.id).await?, before, "what was there is as it was");
    enqueue(&handle, &new_job()).await?;
    Ok(())
}

async fn a_conflict_is_reported(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let lost = running(&handle, &new_job(), &worker("a")).await?;
    apply(&handle, &lost.execution, &Transition::Release).await?;
    let current = claim_one(&handle, &claim_for(&worker("b"), 1)).await?;
    let decision = Decision::new(&lost.execution, &complete())?;
    let UpdateRequest { current: fingerprint, patch, .. } = decision.request();
    for (id, expected) in [(lost.id(), Update::Conflict(current.execution.clone())), (JobId::new(), Update::Missing)] {
        let mut transaction = begin(&context).await?;
        transaction.enqueue(&[keyed("k")]).await?;
        check_eq!(transaction.update(id, fingerprint, patch).await?, expected, "a completion whose claim is gone");
        transaction.roll_back().await?;
        check_eq!(read(&handle, lost.id()).await?, current, "the row is as its claim left it");
        check_eq!(stored_rows(&handle).await?, 1, "what the caller wrote is gone");
    }
    apply(&handle, &current.execution, &complete()).await?;
    Ok(())
}

async fn its_end_decides_who_has_the_key(context: Context) -> Outcome {
    for commit in [false, true] {
        let first = keyed(&format!("commit = {commit}"));
        let mut handles = Vec::new();
        for _ in 0..3 {
            handles.push(context.connect().await?);
        }
        let mut transaction = begin(&context).await?;
        transaction.enqueue(std::slice::from_ref(&first)).await?;
        let wait = |handle: &Handle| {
            let (handle, job) = (Arc::clone(handle), NewJob { id: JobId::new(), ..first.clone() });
            tokio::spawn(async move { enqueue_in_the_end(&handle, &[job]).await })
        };
        let waiting: Vec<_> = handles.iter().map(wait).collect();
        tokio::task::yield_now().await;
        match commit {
            true => transaction.commit().await?,
            false => transaction.roll_back().await?,
        }
        let mut answers = Vec::new();
        for task in waiting {
            answers.extend(task.await??);
        }
        let new = answers.iter().find(|answer| matches!(answer, Enqueued::New(_))).map(|new| new.id());
        let holder = if commit { Some(first.id) } else { new };
        let told = |answer: &&Enqueued| holder.is_some_and(|existing| **answer == Enqueued::Duplicate { existing });
        let duplicates = answers.iter().filter(told).count();
        let expected = if commit { (None, 3) } else { (new.filter(|id| *id != first.id), 2) };
        check_eq!((new, duplicates), expected, "after commit = {commit}: {answers:?}");
        check!(commit || new.is_some(), "the key is free again, and nobody got it: {answers:?}");
    }
    Ok(())
}

async fn times_are_the_statements(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let running = running(&handle, &new_job(), &worker("a")).await?;
    let (first, second) = (new_job(), new_job());
    let mut transaction = begin(&context).await?;
    transaction.enqueue(std::slice::from_ref(&first)).await?;
    // A moved clock would move what a transaction that looked at it once adds to it, too.
    context.note(format_args!("time passes"));
    tokio::time::sleep(Duration::from_millis(20)).await;
    transaction.enqueue(std::slice::from_ref(&second)).await?;
    submit(&mut transaction, &Decision::new(&running.execution, &complete())?).await?;
    transaction.commit().await?;
    let (first, second, done) =
        (read(&handle, first.id).await?, read(&handle, second.id).await?, read(&handle, running.id()).await?);
    check!(first.created_at < second.created_at, "created later: {} and {}", first.created_at, second.created_at);
    check!(first.available_at < second.available_at, "due later: {} and {}", first.available_at, second.available_at);
    check!(Some(second.created_at) <= done.finished_at, "finished last: {:?}", done.finished_at);
    Ok(())
}

async fn a_heartbeat_does_no_harm(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let other = context.connect().await?;
    let job = running(&handle, &new_job(), &worker("a")).await?;
    let held = held(&job.execution)?;
    context.note(format_args!("a transaction begins that is to complete the job"));
    let mut transaction = context.store.begin(Some(&job.execution)).await?;
    // Before and after the transaction writes something else, which may fix what it sees.
    for hours in 1..=2 {
        let (other, held) = (other.clone(), held.clone());
        let mut beat = tokio::spawn(async move { other.extend_leases(&[held], lease(3_600_000 * hours)).await });
        // Where there is one writer at a time it waits for the transaction.
        let _ = tokio::time::timeout(Duration::from_millis(500), &mut beat).await;
        transaction.enqueue(&[new_job()]).await?;
    }
    let answer = submit(&mut transaction, &Decision::new(&job.execution, &complete())?).await?;
    check!(matches!(answer, Update::Applied(_)), "the job is settled, not {answer:?}");
    transaction.commit().await?;
    check_eq!(read(&handle, job.id()).await?.state(), JobState::Completed, "the state");
    check_eq!(stored_rows(&handle).await?, 3, "what the transaction wrote is there");
    Ok(())
}
