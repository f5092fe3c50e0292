//! The compare-and-update.

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
use crate::harness::Hook;

pub(super) const CASES: &[Case] = &[
    case!(update::matching_applies, [S5], [], "A matching update is applied, and answered with the row as it then is."),
    case!(update::restating_what_is_there_applies, [S6 A7], [], "A matching update that changes nothing is applied, every time."),
    case!(
        update::every_field_is_compared,
        [A6],
        [Need::Hook(Hook::Overwrite)],
        "Each field of the fingerprint is compared by itself, null equal to null only."
    ),
    case!(update::null_equals_null, [A6], [], "A fingerprint of a row that nobody claimed matches that row."),
    case!(update::newer_execution_in_the_same_state_conflicts, [S7 S2], [], "A newer execution in the same state fails the comparison."),
    case!(update::a_conflict_changes_nothing, [S2 A3], [], "A refused update leaves the row as it was, and shows it."),
    case!(
        update::missing_is_not_a_conflict,
        [A8],
        [],
        "An update of a row that is not there is missing, and creates nothing."
    ),
    case!(
        update::deleted_is_missing,
        [A8],
        [],
        "An update of a row that was purged is missing, and does not bring it back."
    ),
    case!(
        update::race_has_one_winner,
        [A9],
        [],
        "Of tasks on two handles with one fingerprint exactly one is applied; the others conflict, none gets an error."
    ),
    case!(
        update::chain_has_no_fork,
        [A9],
        [],
        "Concurrent updates form one chain: each applied one follows the one whose fingerprint it had."
    ),
    case!(update::only_the_patch_is_written, [A11], [], "What the patch does not name stays as it is."),
    case!(
        update::a_payload_edit_survives_a_settle,
        [A11],
        [],
        "A payload that was edited while the job ran is still there after the settle."
    ),
    case!(update::two_handles_see_one_row, [], [], "What one handle wrote, another reads and compares at once."),
    case!(
        update::the_revision_is_the_patchs,
        [S16],
        [],
        "The row gets the revision that the patch carries, and keeps its own if the patch has none."
    ),
    case!(update::a_repeated_decision_is_recognised, [A13 S11], [], "A decision that is submitted again is already applied, and recorded once."),
    case!(update::anothers_decision_is_not_ones_own, [A19 A20], [], "A row in the state that was wanted, by another's decision, is a conflict."),
    case!(update::a_failing_row_is_an_error, [A18 S9], [Need::Hook(Hook::Damage)], "A store that fails to write a row says so: no conflict, no success."),
    case!(
        update::times_are_the_stores,
        [C1],
        [Need::Hook(Hook::Clock)],
        "Times that an update sets are the store's now, in whole milliseconds."
    ),
    case!(
        update::waits_for_a_held_row,
        [A10],
        [Need::Hook(Hook::Hold)],
        "An update of a row that somebody holds and rolls back applies in the end, and conflicts if it was changed."
    ),
    case!(update::too_large_then_smaller, [A12 E6], [], "A result over the cap is refused before any write; a smaller one from the same snapshot is recorded."),
    case!(
        update::dropped_futures_leave_a_whole_row,
        [A15],
        [],
        "An update whose future is dropped is there whole or not at all, and the store works on."
    ),
    case!(
        update::unreadable_is_not_a_conflict,
        [B9],
        [Need::Hook(Hook::Damage)],
        "A row in a state of a newer version is neither overwritten nor taken for a conflict."
    ),
];

async fn submit(handle: &Handle, decision: &Decision) -> Result<Update, Error> {
    let UpdateRequest { id, current, patch } = decision.request();
    handle.update_if_current(*id, current, patch).await
}

async fn matching_applies(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let decision = Decision::new(&job.execution, &complete())?;
    let answer = submit(&handle, &decision).await?;
    let after = read(&handle, job.id()).await?;
    check_eq!(answer, Update::Applied(after.execution.clone()), "the answer is the row as it is now");
    check_eq!(after.state(), JobState::Completed, "the move is made");
    check_eq!(after.result, Some(json("{\"done\":true}")), "the result is recorded");
    Ok(())
}

async fn restating_what_is_there_applies(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let done = apply(&handle, &job.execution, &Transition::Complete { result: None }).await?;
    let keep = keep(&done);
    for round in 1..=2 {
        let answer = handle.update_if_current(job.id(), &done.execution.fingerprint(), &keep).await?;
        check_eq!(
            answer,
            Update::Applied(done.execution.clone()),
            "round {round}: a match is applied though nothing changes"
        );
    }
    check_eq!(read(&handle, job.id()).await?, done, "nothing changed");
    Ok(())
}

/// A patch that writes what the row has already.
fn keep(job: &Job) -> Patch {
    Patch {
        revision: Some(job.execution.revision),
        state: job.state(),
        attempt: job.execution.attempt,
        available: None,
        clear_claim: false,
        attempted_at: Change::Keep,
        lease: Change::Keep,
        finished_at: Change::Keep,
        result: Change::Keep,
        failure: None,
        payload: None,
    }
}

async fn every_field_is_compared(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = running(&handle, &new_job(), &worker("a")).await?;
    let true_row = job.execution;
    let later = true_row.claimed_at.map(|at| at.saturating_add_millis(1));
    let changed: [(&str, Execution); 9] = [
        ("state", Execution { state: JobState::Claimed, ..true_row.clone() }),
        ("attempt", Execution { attempt: 2, ..true_row.clone() }),
        ("claimed_by", Execution { claimed_by: Some(worker("a")), ..true_row.clone() }),
        ("claimed_by", Execution { claimed_by: None, ..true_row.clone() }),
        ("claimed_at", Execution { claimed_at: later, ..true_row.clone() }),
        ("claimed_at", Execution { claimed_at: None, ..true_row.clone() }),
        ("attempted_at", Execution { attempted_at: later, ..true_row.clone() }),
        ("attempted_at", Execution { attempted_at: None, ..true_row.clone() }),
        ("revision", Execution { revision: Revision::random(), ..true_row.clone() }),
    ];
    for (field, row) in changed {
        // What was seen is the true row, what is there has one field changed; then the other way round.
        for (seen, there) in [(&true_row, &row), (&row, &true_row)] {
            context.overwrite(there).await?;
            let answer = handle.update_if_current(seen.id, &seen.fingerprint(), &release(seen)).await?;
            check_eq!(answer, Update::Conflict(there.clone()), "another {field} is a conflict");
            check_eq!(read(&handle, seen.id).await?.execution, *there, "a conflict over {field} changes nothing");
        }
    }
    context.overwrite(&true_row).await?;
    let answer = handle.update_if_current(true_row.id, &true_row.fingerprint(), &release(&true_row)).await?;
    check!(matches!(answer, Update::Applied(_)), "the true row still matches: {answer:?}");
    Ok(())
}

/// Releases the row whatever its state: the store does not judge the move.
fn release(seen: &Execution) -> Patch {
    let held = Execution { state: JobState::Running, ..seen.clone() };
    Transition::Release.plan(&held).expect("a running job can be released")
}

async fn null_equals_null(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let id = enqueue(&handle, &new_job()).await?;
    let waiting = read(&handle, id).await?;
    let after = apply(&handle, &waiting.execution, &cancel()).await?;
    check_eq!(after.state(), JobState::Canceled, "a row full of nulls matches itself");
    Ok(())
}

async fn newer_execution_in_the_same_state_conflicts(context: Context) -> Outcome {
    let (handle, first) = started(&context).await?;
    apply(&handle, &first.execution, &Transition::Release).await?;
    let second = claim_one(&handle, &claim_for(&worker("b"), 1)).await?;
    check_eq!(second.state(), first.state(), "both run");
    let conflict = conflicts(&handle, &first.execution, &complete()).await?;
    check_eq!(conflict.current, second.execution, "the conflict shows the newer execution");
    check_eq!(conflict.expected, first.execution, "and the older one");
    apply(&handle, &second.execution, &complete()).await?;
    Ok(())
}

async fn a_conflict_changes_nothing(context: Context) -> Outcome {
    let (handle, first) = started(&context).await?;
    let first = apply(&handle, &first.execution, &retry_now()).await?;
    let current = claim_one(&handle, &claim_for(&worker("b"), 1)).await?;
    for transition in [cancel(), snooze(1), Transition::Replace { payload: json("0"), available: When::Now }] {
        conflicts(&handle, &first.execution, &transition).await?;
    }
    check_eq!(read(&handle, current.id()).await?, current, "the row is as its claim left it");
    Ok(())
}

async fn missing_is_not_a_conflict(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let never = JobId::new();
    let UpdateRequest { current, patch, .. } = Decision::new(&job.execution, &complete())?.request().clone();
    check_eq!(handle.update_if_current(never, &current, &patch).await?, Update::Missing, "there is no such row");
    check_eq!(handle.get(never).await?, None, "none was created");
    let answers = handle.update_many_if_current(&[UpdateRequest { id: never, current, patch }]).await?;
    check_eq!(answers, [Update::Missing], "a batch says so too");
    Ok(())
}

async fn deleted_is_missing(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let done = apply(&handle, &job.execution, &complete()).await?;
    check_eq!(handle.purge(JobState::Completed, Delay::ZERO, limit(10)).await?, 1, "the ended job is purged");
    let answer = Transitioner::new(&handle).apply(&done.execution, &Transition::Rerun).await;
    check!(matches!(answer, Err(TransitionError::Missing { .. })), "a purged job is missing: {answer:?}");
    check_eq!(handle.get(job.id()).await?, None, "it does not come back");
    Ok(())
}

const RACERS: usize = 16;
const ROUNDS: usize = 50;

async fn race_has_one_winner(context: Context) -> Outcome {
    let handles = [context.connect().await?, context.connect().await?];
    let id = enqueue(&handles[0], &new_job()).await?;
    for round in 0..ROUNDS {
        let seen = read(&handles[0], id).await?.execution;
        let answers = context
            .race(RACERS, |task| {
                let (handle, seen) = (Arc::clone(&handles[task % 2]), seen.clone());
                async move { Transitioner::new(&handle).apply(&seen, &snooze(0)).await }
            })
            .await?;
        let mut winners = 0;
        for answer in answers {
            match answer {
                Ok(Settled::Applied(_)) => winners += 1,
                Err(TransitionError::Conflict(_)) => {}
                other => return Err(Failed::new(format!("round {round}: a loser must get a conflict, not {other:?}"))),
            }
        }
        check_eq!(winners, 1, "round {round}: exactly one must win");
    }
    Ok(())
}

async fn chain_has_no_fork(context: Context) -> Outcome {
    const WRITERS: usize = 8;
    const STEPS: usize = 12;
    let first = context.connect().await?;
    let id = enqueue(&first, &new_job()).await?;
    let start = read(&first, id).await?.execution.revision;
    let mut handles = Vec::new();
    for _ in 0..WRITERS {
        handles.push(context.connect().await?);
    }
    // Each writer moves the row on until it has won its share of steps, and notes each step it won.
    let steps = context
        .race(WRITERS, |task| {
            let handle = Arc::clone(&handles[task]);
            async move {
                let mut won = Vec::new();
                while won.len() < STEPS {
                    let seen = read(&handle, id).await?.execution;
                    match Transitioner::new(&handle).apply(&seen, &snooze(0)).await {
                        Ok(settled) => won.push((seen.revision, settled.execution().revision)),
                        Err(TransitionError::Conflict(_)) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                Ok::<_, Failed>(won)
            }
        })
        .await?;
    let steps: Vec<_> = steps.into_iter().collect::<Result<Vec<_>, _>>()?.concat();
    let mut next: std::collections::HashMap<_, _> = steps.iter().copied().collect();
    check_eq!(next.len(), steps.len(), "no moment was followed by two: the chain forks");
    let mut at = start;
    while let Some(after) = next.remove(&at) {
        at = after;
    }
    check!(next.is_empty(), "{} applied updates are not part of the chain", next.len());
    check_eq!(read(&first, id).await?.execution.revision, at, "the row is the chain's end");
    Ok(())
}

async fn only_the_patch_is_written(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let mut new = keyed("only");
    new.priority = Priority::FIRST;
    let seen = running(&handle, &new, &worker("a")).await?;
    let mut expected = seen.clone();
    let transition = Transition::Fail { error: "one".into() };
    let decision = Decision::new(&seen.execution, &transition)?;
    submit(&handle, &decision).await?;
    let after = read(&handle, seen.id()).await?;
    let now = after.finished_at.ok_or_else(|| Failed::new("finished_at must be set"))?;
    decision.request().patch.apply(&mut expected, now);
    check_eq!(after, expected, "the row is what it was, changed by the patch");
    // And a patch that touches nothing but one column.
    let mut again = after.clone();
    let patch = Patch { result: Change::Set(json("[1]")), revision: None, ..keep(&after) };
    patch.apply(&mut again, now);
    handle.update_if_current(seen.id(), &after.execution.fingerprint(), &patch).await?;
    check_eq!(read(&handle, seen.id()).await?, again, "one column, and no other");
    Ok(())
}

async fn a_payload_edit_survives_a_settle(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let edit = Patch { payload: Some(json("{\"edited\":1}")), revision: None, ..keep(&job) };
    let answer = handle.update_if_current(job.id(), &job.execution.fingerprint(), &edit).await?;
    check!(matches!(answer, Update::Applied(_)), "the operator's edit is applied: {answer:?}");
    let after = apply(&handle, &job.execution, &complete()).await?;
    check_eq!(after.payload, json("{\"edited\":1}"), "the settle does not bring the old payload back");
    Ok(())
}

async fn two_handles_see_one_row(context: Context) -> Outcome {
    let (first, job) = started(&context).await?;
    let second = context.connect().await?;
    let seen = read(&second, job.id()).await?;
    check_eq!(seen, job, "both read the same row");
    apply(&second, &seen.execution, &complete()).await?;
    conflicts(&first, &job.execution, &fail()).await?;
    check_eq!(read(&first, job.id()).await?.state(), JobState::Completed, "the first sees what the second wrote");
    let third = context.connect().await?;
    check_eq!(read(&third, job.id()).await?.state(), JobState::Completed, "so does one that connects later");
    Ok(())
}

async fn the_revision_is_the_patchs(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let decision = Decision::new(&job.execution, &retry_now())?;
    submit(&handle, &decision).await?;
    let after = read(&handle, job.id()).await?;
    check_eq!(Some(after.execution.revision), decision.request().patch.revision, "the patch's revision is stored");
    let keep = Patch { revision: None, ..keep(&after) };
    handle.update_if_current(job.id(), &after.execution.fingerprint(), &keep).await?;
    check_eq!(
        read(&handle, job.id()).await?.execution.revision,
        after.execution.revision,
        "no revision keeps the old one"
    );
    Ok(())
}

async fn a_repeated_decision_is_recognised(context: Context) -> Outcome {
    for transition in holder_moves() {
        let (handle, job) = started(&context).await?;
        let mut decision = Decision::new(&job.execution, &transition)?;
        // As when the answer was lost: the store has it, the caller does not know.
        submit(&handle, &decision).await?;
        let landed = read(&handle, job.id()).await?;
        let again = Transitioner::new(&handle).submit(&mut decision).await?;
        check_eq!(
            again,
            Settled::AlreadyApplied(landed.execution.clone()),
            "{} again is recognised",
            transition.name()
        );
        check_eq!(read(&handle, job.id()).await?, landed, "{} again changes nothing", transition.name());
        if landed.state().is_active() {
            apply(&handle, &landed.execution, &cancel()).await?;
        }
    }
    Ok(())
}

async fn anothers_decision_is_not_ones_own(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    // Both put the job back, with the same fence and the same attempt; the snooze lands second.
    let snoozed = Decision::new(&job.execution, &snooze(3_600_000))?;
    let released = apply(&handle, &job.execution, &Transition::Release).await?;
    let mut late = snoozed.clone();
    let answer = Transitioner::new(&handle).submit(&mut late).await;
    check!(matches!(answer, Err(TransitionError::Conflict(_))), "the snooze did not happen: {answer:?}");
    check_eq!(read(&handle, job.id()).await?, released, "the release stands");
    // A retry that landed and whose job was claimed again since.
    let again = claim_one(&handle, &claim_for(&worker("b"), 1)).await?;
    let mut retry = Decision::new(&again.execution, &retry_now())?;
    submit(&handle, &retry).await?;
    let newest = claim_one(&handle, &claim_for(&worker("c"), 1)).await?;
    let answer = Transitioner::new(&handle).submit(&mut retry).await;
    check!(matches!(answer, Err(TransitionError::Conflict(_))), "the retry has no second effect: {answer:?}");
    check_eq!(read(&handle, job.id()).await?, newest, "the newest claim stands");
    Ok(())
}

async fn a_failing_row_is_an_error(context: Context) -> Outcome {
    let (handle, jobs) = with_a_poisoned_row(&context).await?;
    let answer = Transitioner::new(&handle).apply(&jobs[1].execution, &complete()).await;
    let Err(TransitionError::Backend(error)) = answer else {
        return Err(Failed::new(format!("the store's failure must reach the caller: {answer:?}")));
    };
    check_eq!(error.certainty(), Certainty::NotApplied, "nothing was written: {error}");
    check_eq!(read(&handle, jobs[1].id()).await?, jobs[1], "the row is as it was");
    Ok(())
}

async fn times_are_the_stores(context: Context) -> Outcome {
    const YEARS: i64 = 10 * 365 * 86_400_000;
    let (handle, job) = started(&context).await?;
    context.advance(YEARS).await?;
    let after = apply(&handle, &job.execution, &complete()).await?;
    let elapsed = |at: Option<Timestamp>| at.map(|at| at.unix_millis() - job.created_at.unix_millis());
    let finished = elapsed(after.finished_at).ok_or_else(|| Failed::new("finished_at must be set"))?;
    check!((YEARS..YEARS + MINUTE * 10).contains(&finished), "finished {finished} ms after it was enqueued");
    // Another handle, connected after the clock was moved, reads the same clock.
    let second = context.connect().await?;
    let later = enqueue(&second, &new_job()).await?;
    let later = read(&handle, later).await?.created_at;
    check!(Some(later) >= after.finished_at, "created at {later}, after {:?}", after.finished_at);
    Ok(())
}

/// Repeats what was certainly not applied, as a settle does.
async fn settle(handle: &Handle, decision: &mut Decision) -> Result<Settled, TransitionError> {
    loop {
        match Transitioner::new(handle).submit(decision).await {
            Err(TransitionError::Backend(error))
                if error.kind() == ErrorKind::Transient && error.certainty() == Certainty::NotApplied =>
            {
                tokio::task::yield_now().await;
            }
            answer => return answer,
        }
    }
}

async fn waits_for_a_held_row(context: Context) -> Outcome {
    for commit in [false, true] {
        let (handle, job) = started(&context).await?;
        let bumped = Execution { revision: Revision::random(), attempt: 7, ..job.execution.clone() };
        context.note(format_args!("held in a transaction that sets {bumped:?}"));
        let hold = context.store.hold(&bumped).await?;
        let mut decision = Decision::new(&job.execution, &complete())?;
        let mut waiting = {
            let handle = Arc::clone(&handle);
            tokio::spawn(async move { settle(&handle, &mut decision).await })
        };
        // Until it is waiting, which only the store knows: without this an answer from before the wait would go unseen at times.
        let answered = tokio::time::timeout(Duration::from_millis(50), &mut waiting).await;
        check!(answered.is_err(), "what is not decided yet must not be answered: {answered:?}");
        match commit {
            true => hold.commit().await?,
            false => hold.roll_back().await?,
        }
        let answer = waiting.await?;
        match (commit, &answer) {
            (false, Ok(Settled::Applied(_))) => {}
            (true, Err(TransitionError::Conflict(conflict))) => {
                check_eq!(conflict.current, bumped, "the conflict shows it")
            }
            _ => return Err(Failed::new(format!("after commit = {commit}: {answer:?}"))),
        }
    }
    Ok(())
}

async fn too_large_then_smaller(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let max = handle.capabilities().max_payload;
    let over = Transition::Complete { result: Some(Json::encode(&"x".repeat(max - 1))?) };
    let decision = Decision::new(&job.execution, &over)?;
    let answer = submit(&handle, &decision).await;
    let Err(error) = answer else {
        return Err(Failed::new(format!("a result of {} bytes must be refused", max + 1)));
    };
    check_eq!((error.kind(), error.certainty()), (ErrorKind::TooLarge, Certainty::NotApplied), "{error}");
    let batch = handle.update_many_if_current(std::slice::from_ref(decision.request())).await;
    check!(batch.is_err_and(|error| error.kind() == ErrorKind::TooLarge), "a batch refuses it too");
    check_eq!(read(&handle, job.id()).await?, job, "nothing was written");
    let largest = Json::encode(&"x".repeat(max - 2))?;
    let after = apply(&handle, &job.execution, &Transition::Complete { result: Some(largest.clone()) }).await?;
    check_eq!(after.result, Some(largest), "a result of just the cap is recorded");
    Ok(())
}

async fn dropped_futures_leave_a_whole_row(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let other = context.connect().await?;
    for polls in 1..=20 {
        let job = running(&handle, &new_job(), &worker("a")).await?;
        let mut decision = Decision::new(&job.execution, &complete())?;
        drop_after(polls, submit(&handle, &decision)).await;
        // Submitting it again says which way it went, on either handle.
        let settled = settle(if polls % 2 == 0 { &handle } else { &other }, &mut decision).await?;
        let after = read(&handle, job.id()).await?;
        check_eq!(*settled.execution(), after.execution, "dropped after {polls} polls");
        check!(after.state() == JobState::Completed && after.result.is_some(), "the row is whole: {after:?}");
    }
    Ok(())
}

async fn unreadable_is_not_a_conflict(context: Context) -> Outcome {
    let (handle, foreign) = started(&context).await?;
    let good = running(&handle, &new_job(), &worker("a")).await?;
    context.store.damage(foreign.id(), crate::Damage::ForeignState).await?;
    context.note(format_args!("job {} has a state of a newer version", foreign.id()));
    let decide = |job: &Job| Decision::new(&job.execution, &complete());
    let mut decisions = [decide(&foreign)?, decide(&good)?];
    let requests: Vec<_> = decisions.iter().map(|decision| decision.request().clone()).collect();
    let answers = handle.update_many_if_current(&requests).await?;
    check!(
        matches!(&answers[..], [Update::Unreadable(row), Update::Applied(_)] if row.id == foreign.id()),
        "it is told apart, and keeps nothing from the other: {answers:?}"
    );
    let answer = Transitioner::new(&handle).submit(&mut decisions[0]).await;
    let Err(TransitionError::Backend(error)) = answer else {
        return Err(Failed::new(format!("a state of a newer version cannot be compared: {answer:?}")));
    };
    check_eq!((error.kind(), error.certainty()), (ErrorKind::Schema, Certainty::NotApplied), "{error}");
    let read = handle.get(foreign.id()).await;
    check!(read.is_err_and(|error| error.kind() == ErrorKind::Schema), "reading it is an error too");
    Ok(())
}
