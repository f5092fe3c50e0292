//! Unique keys.

use std::num::NonZeroU32;
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

pub(super) const CASES: &[Case] = &[
    case!(
        unique::one_active_job_per_key,
        [S20],
        [],
        "A waiting, claimed or running job has its key alone: another is a duplicate, which stores and changes nothing."
    ),
    case!(
        unique::a_suspended_job_keeps_its_key,
        [S25],
        [Need::Hook(Hook::Overwrite)],
        "A suspended job has its key alone, too."
    ),
    case!(
        unique::an_unknown_state_keeps_its_key,
        [B9],
        [Need::Hook(Hook::Damage)],
        "A job in a state of a newer version counts as active."
    ),
    case!(
        unique::every_ending_frees_the_key,
        [],
        [],
        "Every ending frees the key for the next job, which then has it alone."
    ),
    case!(
        unique::a_job_that_comes_back_keeps_its_key,
        [D3],
        [Need::Hook(Hook::Clock)],
        "A job that is put back keeps its key, and does not collide with itself when it is due again."
    ),
    case!(unique::keys_are_per_queue, [], [], "The same key in another queue is another key."),
    case!(unique::keys_are_compared_byte_for_byte, [D5], [], "Keys that differ in a byte are different keys."),
    case!(
        unique::no_key_never_collides,
        [D6],
        [],
        "Jobs without a key never collide; the empty key is a key like any other."
    ),
    case!(unique::within_one_call, [D4], [], "Jobs of one call obey the same rule, each after those before it."),
    case!(
        unique::race_has_one_winner,
        [S20 D1],
        [],
        "Of many jobs that race for a key one is stored, and the others are duplicates of it."
    ),
    case!(
        unique::rerun_into_a_taken_key,
        [],
        [],
        "A rerun into a taken key is refused as invalid, alone and in a batch, and changes nothing."
    ),
    case!(unique::rerun_takes_a_free_key, [], [], "A rerun into a free key takes it."),
    case!(
        unique::race_with_a_completion,
        [],
        [],
        "Jobs that race with the end of the key's holder are its duplicates or its one successor's, never an error."
    ),
    case!(unique::race_with_a_rerun, [], [], "Of a rerun and new jobs that race for one key exactly one gets it."),
];

/// Offers a job of a key that another has, and checks that nothing comes of it.
async fn check_duplicate(handle: &Handle, key: &str, holder: JobId, what: &str) -> Outcome {
    let before = read(handle, holder).await?;
    let twin = NewJob { payload: json("\"twin\""), priority: Priority::FIRST, ..keyed(key) };
    let answer = offer(handle, &twin).await?;
    check_eq!(answer, Enqueued::Duplicate { existing: holder }, "a job of the same key as {what}");
    check_eq!(handle.get(twin.id).await?, None, "a duplicate of {what} is not stored");
    check_eq!(read(handle, holder).await?, before, "a duplicate leaves {what} as it is");
    Ok(())
}

async fn one_active_job_per_key(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let id = enqueue(&handle, &keyed("k")).await?;
    check_duplicate(&handle, "k", id, "a waiting job").await?;
    let claimed = claim_one(&handle, &claim_for(&worker("a"), 1).reserve()).await?;
    check_duplicate(&handle, "k", id, "a claimed job").await?;
    apply(&handle, &claimed.execution, &Transition::Start { lease: lease(MINUTE) }).await?;
    check_duplicate(&handle, "k", id, "a running job").await?;
    check_eq!(stored_rows(&handle).await?, 1, "there is one row");
    Ok(())
}

async fn a_suspended_job_keeps_its_key(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let id = enqueue(&handle, &keyed("k")).await?;
    let waiting = read(&handle, id).await?.execution;
    context.overwrite(&Execution { state: JobState::Suspended, ..waiting }).await?;
    check_duplicate(&handle, "k", id, "a suspended job").await?;
    let suspended = read(&handle, id).await?.execution;
    apply(&handle, &suspended, &cancel()).await?;
    enqueue(&handle, &keyed("k")).await?;
    Ok(())
}

async fn an_unknown_state_keeps_its_key(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let id = enqueue(&handle, &keyed("k")).await?;
    context.store.damage(id, Damage::ForeignState).await?;
    context.note(format_args!("job {id} has a state of a newer version"));
    let answer = offer(&handle, &keyed("k")).await?;
    check_eq!(answer, Enqueued::Duplicate { existing: id }, "who knows whether it is active");
    check_eq!(stored_rows(&handle).await?, 1, "there is one row");
    Ok(())
}

async fn every_ending_frees_the_key(context: Context) -> Outcome {
    let handle = context.connect().await?;
    for ending in [complete(), fail(), retry_now(), cancel()] {
        let new = NewJob { max_attempts: NonZeroU32::MIN, ..keyed("k") };
        let job = running(&handle, &new, &worker("a")).await?;
        check_duplicate(&handle, "k", new.id, "a running job").await?;
        let ended = apply(&handle, &job.execution, &ending).await?;
        check!(ended.state().is_final(), "{} ends the job: {ended:?}", ending.name());
        check_eq!(ended.unique_key, new.unique_key, "the key can still be read after {}", ending.name());
    }
    let id = enqueue(&handle, &keyed("k")).await?;
    let waiting = read(&handle, id).await?;
    apply(&handle, &waiting.execution, &cancel()).await?;
    let last = enqueue(&handle, &keyed("k")).await?;
    check_duplicate(&handle, "k", last, "the last job").await
}

async fn a_job_that_comes_back_keeps_its_key(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let id = enqueue(&handle, &keyed("k")).await?;
    let retry_later = Transition::Retry { error: "later".into(), available: When::After(millis(MINUTE)) };
    for transition in [retry_later, snooze(MINUTE), Transition::Release, Transition::Recover] {
        let claimed = claim_one(&handle, &claim_for(&worker("a"), 1)).await?;
        check_eq!(claimed.id(), id, "it is due again");
        if transition == Transition::Recover {
            context.advance(2 * MINUTE).await?;
        }
        apply(&handle, &claimed.execution, &transition).await?;
        check_duplicate(&handle, "k", id, &format!("a job after {}", transition.name())).await?;
        context.advance(2 * MINUTE).await?;
    }
    let claimed = claim_one(&handle, &claim_for(&worker("a"), 1)).await?;
    check_eq!((claimed.id(), claimed.execution.attempt), (id, 3), "it is due again, two of its attempts used up");
    Ok(())
}

async fn keys_are_per_queue(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let jobs = ["q", "Q", "q ", "r"].map(|queue| NewJob { queue: name(queue), ..keyed("k") });
    for job in &jobs {
        enqueue(&handle, job).await?;
    }
    for job in &jobs {
        let twin = NewJob { queue: job.queue.clone(), ..keyed("k") };
        let answer = offer(&handle, &twin).await?;
        check_eq!(answer, Enqueued::Duplicate { existing: job.id }, "the key is taken in {:?}", job.queue);
    }
    Ok(())
}

async fn keys_are_compared_byte_for_byte(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let longest = "k".repeat(UniqueKey::MAX_BYTES - 1);
    let [first, second] = ["1", "2"].map(|last| format!("{longest}{last}"));
    let keys = [
        "Bot-A", "bot-a", "bot_a", "é", "e\u{301}", "e", "E", "k", "k ", " k", "k\t", "", " ", "%", "ß", "ss", "ı",
        "i", "😀", "😁", "1", "01", "1.0", "null", &first, &second,
    ];
    let mut holders = Vec::new();
    for key in keys {
        let answer = offer(&handle, &keyed(key)).await?;
        check!(matches!(answer, Enqueued::New(_)), "{key:?} is a key of its own, not {answer:?}");
        holders.push(answer.id());
    }
    for (key, holder) in keys.into_iter().zip(holders) {
        check_duplicate(&handle, key, holder, &format!("the job of {key:?}")).await?;
    }
    Ok(())
}

async fn no_key_never_collides(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let (keyless, empty) = ([new_job(), new_job(), new_job()], keyed(""));
    enqueue(&handle, &keyless[0]).await?;
    let answers = handle.enqueue(&[keyless[1].clone(), empty.clone(), keyless[2].clone()]).await?;
    let expected = [&keyless[1], &empty, &keyless[2]].map(|job| Enqueued::New(job.id));
    check_eq!(answers, expected, "jobs without a key, and one with the empty key");
    check_duplicate(&handle, "", empty.id, "the job of the empty key").await
}

async fn within_one_call(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let holder = enqueue(&handle, &keyed("taken")).await?;
    let jobs = ["a", "b", "a", "taken", "a", "b"].map(keyed);
    let [a, b] = [jobs[0].id, jobs[1].id];
    let expected = [
        Enqueued::New(a),
        Enqueued::New(b),
        Enqueued::Duplicate { existing: a },
        Enqueued::Duplicate { existing: holder },
        Enqueued::Duplicate { existing: a },
        Enqueued::Duplicate { existing: b },
    ];
    check_eq!(handle.enqueue(&jobs).await?, expected, "the first of a key is stored");
    check_eq!(stored_rows(&handle).await?, 3, "no duplicate is stored");
    Ok(())
}

const RACERS: usize = 16;
const ROUNDS: u64 = 20;

/// What becomes of new jobs of one key, offered at once beside what the first task does instead.
async fn race_for<F>(
    context: &Context,
    handles: &[Handle; 2],
    key: &str,
    first: impl Fn() -> F,
) -> Result<Vec<Enqueued>, Failed>
where
    F: Future<Output = Outcome> + Send + 'static,
{
    let answers = context
        .race(RACERS, |task| {
            let (handle, job, first) = (Arc::clone(&handles[task % 2]), keyed(key), (task == 0).then(&first));
            async move {
                match first {
                    Some(first) => first.await.map(|()| None),
                    None => offer(&handle, &job).await.map(Some),
                }
            }
        })
        .await?;
    answers.into_iter().filter_map(Result::transpose).collect()
}

/// The one that is new, if any, of which the others must be duplicates; unless they are of `holder`.
fn winner(answers: &[Enqueued], holder: Option<JobId>) -> Result<Option<JobId>, Failed> {
    let new: Vec<_> = answers.iter().filter(|answer| matches!(answer, Enqueued::New(_))).map(|new| new.id()).collect();
    check!(new.len() <= 1, "the key was given to {} jobs: {answers:?}", new.len());
    for answer in answers {
        let known = new.contains(&answer.id()) || Some(answer.id()) == holder;
        check!(known && !matches!(answer, Enqueued::Existing(_)), "{answer:?} names a job that has not got the key");
    }
    Ok(new.first().copied())
}

async fn active_rows(handle: &Handle) -> Result<u64, Failed> {
    let active = |count: &&Count| count.state.is_some_and(JobState::is_active);
    Ok(handle.counts().await?.iter().filter(active).map(|count| count.jobs).sum())
}

async fn race_has_one_winner(context: Context) -> Outcome {
    let handles = [context.connect().await?, context.connect().await?];
    let handle = &handles[0];
    for round in 1..=ROUNDS {
        let answers = race_for(&context, &handles, &format!("key {round}"), || async { Ok(()) }).await?;
        let winner = winner(&answers, None)?.ok_or_else(|| Failed::new("nobody got the key"))?;
        check_duplicate(handle, &format!("key {round}"), winner, "the winner").await?;
        check_eq!(stored_rows(handle).await?, round, "round {round}: only the winners are stored");
    }
    Ok(())
}

async fn rerun_into_a_taken_key(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = running(&handle, &keyed("k"), &worker("a")).await?;
    let ended = apply(&handle, &job.execution, &complete()).await?;
    let holder = enqueue(&handle, &keyed("k")).await?;
    let holder = read(&handle, holder).await?;
    let bystander = running(&handle, &NewJob { queue: name("r"), ..keyed("k") }, &worker("a")).await?;
    let rerun = Decision::new(&ended.execution, &Transition::Rerun)?;
    let UpdateRequest { id, current, patch } = rerun.request();
    refused(handle.update_if_current(*id, current, patch).await, ErrorKind::Invalid, "the rerun")?;
    let batch = handle.update_many_if_current(std::slice::from_ref(rerun.request())).await;
    refused(batch, ErrorKind::Invalid, "the rerun in a batch")?;
    let mut decisions = [Decision::new(&bystander.execution, &complete())?, rerun];
    let answers = Transitioner::new(&handle).submit_all(&mut decisions).await;
    let invalid =
        |error: &TransitionError| matches!(error, TransitionError::Backend(e) if e.kind() == ErrorKind::Invalid);
    check!(
        matches!(&answers[..], [Ok(_), Err(error)] if invalid(error)),
        "the rerun beside another row is refused by itself: {answers:?}"
    );
    check_eq!(read(&handle, ended.id()).await?, ended, "the ended job is as it was");
    check_eq!(read(&handle, holder.id()).await?, holder, "so is the one that has the key");
    Ok(())
}

async fn rerun_takes_a_free_key(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let first = running(&handle, &keyed("k"), &worker("a")).await?;
    let ended = apply(&handle, &first.execution, &fail()).await?;
    let successor = running(&handle, &keyed("k"), &worker("a")).await?;
    apply(&handle, &successor.execution, &complete()).await?;
    let again = apply(&handle, &ended.execution, &Transition::Rerun).await?;
    check_eq!(again.state(), JobState::Waiting, "the key is free");
    check_duplicate(&handle, "k", again.id(), "the job that runs again").await
}

async fn race_with_a_completion(context: Context) -> Outcome {
    let handles = [context.connect().await?, context.connect().await?];
    let handle = &handles[0];
    for round in 0..ROUNDS {
        let job = running(handle, &keyed("k"), &worker("a")).await?;
        let answers = race_for(&context, &handles, "k", || {
            let (handle, seen) = (Arc::clone(handle), job.execution.clone());
            async move { apply(&handle, &seen, &complete()).await.map(drop) }
        })
        .await?;
        let successor = winner(&answers, Some(job.id()))?;
        check_eq!(active_rows(handle).await?, u64::from(successor.is_some()), "round {round}: active jobs of the key");
        if let Some(id) = successor {
            let successor = read(handle, id).await?;
            apply(handle, &successor.execution, &cancel()).await?;
        }
    }
    Ok(())
}

async fn race_with_a_rerun(context: Context) -> Outcome {
    let handles = [context.connect().await?, context.connect().await?];
    let handle = &handles[0];
    for round in 0..ROUNDS {
        let job = running(handle, &keyed("k"), &worker("a")).await?;
        let ended = apply(handle, &job.execution, &complete()).await?;
        let answers = race_for(&context, &handles, "k", || {
            let (handle, seen) = (Arc::clone(handle), ended.execution.clone());
            async move {
                match Transitioner::new(&handle).apply(&seen, &Transition::Rerun).await {
                    Err(TransitionError::Backend(error)) if error.kind() == ErrorKind::Invalid => Ok(()),
                    answer => answer.map(drop).map_err(Failed::from),
                }
            }
        })
        .await?;
        let runs_again = read(handle, ended.id()).await?.state().is_active();
        let new = winner(&answers, runs_again.then(|| ended.id()))?;
        check!(new.is_some() != runs_again, "round {round}: rerun {runs_again}, {answers:?}");
        check_eq!(active_rows(handle).await?, 1, "round {round}: active jobs of the key");
        let holder = read(handle, new.unwrap_or(ended.id())).await?;
        apply(handle, &holder.execution, &cancel()).await?;
    }
    Ok(())
}
