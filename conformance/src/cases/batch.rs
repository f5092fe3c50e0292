//! Many compare-and-updates in one call.

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
    case!(batch::judges_each_row, [], [], "A batch answers for each of its rows by itself, in order."),
    case!(batch::equals_the_single_form, [], [], "A batch leaves the same rows as its updates one by one."),
    case!(batch::takes_one_row_twice, [], [], "Two updates of one row in a batch are judged one after the other."),
    case!(batch::an_empty_one_is_harmless, [], [], "A batch of nothing answers nothing."),
    case!(batch::a_bad_row_writes_nothing, [A18 S9], [Need::Hook(Hook::Damage), Need::AtomicBatches], "A batch that one row makes fail has written nothing."),
    case!(batch::a_bad_row_spares_the_others, [A18 S9 C12], [Need::Hook(Hook::Damage)], "When one row makes a batch fail, the others are still settled."),
];

/// Five running jobs, one of them settled by somebody else, and an id that never was.
async fn mixed_batch(handle: &Handle, queue: &str) -> Result<Vec<UpdateRequest>, Failed> {
    let mut requests = Vec::new();
    for index in 0..5 {
        let mut new = new_job();
        new.queue = name(queue);
        let job = running(handle, &new, &worker("a")).await?;
        let transition = holder_moves()[index].clone();
        let decision = Decision::new(&job.execution, &transition)?;
        if index == 2 {
            apply(handle, &job.execution, &cancel()).await?;
        }
        if let Transition::Retry { .. } | Transition::Release = transition {
            // Out of the way of the next claim.
            let patch = Patch { available: Some(When::After(millis(MINUTE))), ..decision.request().patch.clone() };
            requests.push(UpdateRequest { patch, ..decision.request().clone() });
            continue;
        }
        requests.push(decision.request().clone());
    }
    requests.insert(1, UpdateRequest { id: JobId::new(), ..requests[0].clone() });
    Ok(requests)
}

async fn judges_each_row(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let requests = mixed_batch(&handle, "q").await?;
    let answers = handle.update_many_if_current(&requests).await?;
    check_eq!(answers.len(), requests.len(), "one answer for each");
    for (index, (request, answer)) in requests.iter().zip(answers).enumerate() {
        let there = handle.get(request.id).await?.map(|job| job.execution);
        let expected = match there {
            None => Update::Missing,
            Some(row) if index == 3 => Update::Conflict(row),
            Some(row) => Update::Applied(row),
        };
        check_eq!(answer, expected, "item {index}");
        if let Update::Applied(row) = answer {
            check_eq!(row.state, request.patch.state, "item {index} is moved");
        }
    }
    Ok(())
}

async fn equals_the_single_form(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let batched = mixed_batch(&handle, "q").await?;
    let single = mixed_batch(&handle, "r").await?;
    let mut one_by_one = Vec::new();
    for request in &single {
        one_by_one.push(handle.update_if_current(request.id, &request.current, &request.patch).await?);
    }
    let at_once = handle.update_many_if_current(&batched).await?;
    for (index, (batched, single)) in batched.iter().zip(&single).enumerate() {
        let kind = |update: &Update| std::mem::discriminant(update);
        check_eq!(kind(&at_once[index]), kind(&one_by_one[index]), "item {index} is answered alike");
        let (Some(a), Some(b)) = (handle.get(batched.id).await?, handle.get(single.id).await?) else { continue };
        let texts = |job: &Job| job.errors.iter().map(|failure| failure.text.clone()).collect::<Vec<_>>();
        check_eq!(
            (a.state(), &a.result, texts(&a), a.execution.attempt),
            (b.state(), &b.result, texts(&b), b.execution.attempt),
            "item {index} is left alike"
        );
        check_eq!(
            (a.finished_at.is_some(), a.execution.claimed_by.is_some()),
            (b.finished_at.is_some(), b.execution.claimed_by.is_some()),
            "item {index} is cleared alike"
        );
        check_eq!(a.execution.lease_expires_at, b.execution.lease_expires_at, "item {index} has the same lease");
    }
    Ok(())
}

async fn takes_one_row_twice(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let first = Decision::new(&job.execution, &complete())?.request().clone();
    let second = Decision::new(&job.execution, &fail())?.request().clone();
    let answers = handle.update_many_if_current(&[first, second]).await?;
    check!(
        matches!(answers[..], [Update::Applied(_), Update::Conflict(_)]),
        "the first applies, the second comes too late: {answers:?}"
    );
    check_eq!(read(&handle, job.id()).await?.state(), JobState::Completed, "the first stands");
    Ok(())
}

async fn an_empty_one_is_harmless(context: Context) -> Outcome {
    let handle = context.connect().await?;
    check_eq!(handle.update_many_if_current(&[]).await?, [], "no update, no answer");
    check_eq!(handle.enqueue(&[]).await?, [], "no job, no answer");
    check_eq!(handle.extend_leases(&[], lease(MINUTE)).await?, [], "no claim, no answer");
    Ok(())
}

async fn a_bad_row_writes_nothing(context: Context) -> Outcome {
    let (handle, jobs) = with_a_poisoned_row(&context).await?;
    let requests = jobs.iter().map(|job| Ok(Decision::new(&job.execution, &complete())?.request().clone()));
    let answer = handle.update_many_if_current(&requests.collect::<Result<Vec<_>, Failed>>()?).await;
    let Err(error) = answer else {
        return Err(Failed::new(format!("the batch must fail: {answer:?}")));
    };
    check_eq!(error.certainty(), Certainty::NotApplied, "nothing was applied: {error}");
    for job in jobs {
        check_eq!(read(&handle, job.id()).await?, job, "no row moved");
    }
    Ok(())
}

async fn a_bad_row_spares_the_others(context: Context) -> Outcome {
    let (handle, jobs) = with_a_poisoned_row(&context).await?;
    let mut decisions = Vec::new();
    for job in &jobs {
        decisions.push(Decision::new(&job.execution, &complete())?);
    }
    let answers = Transitioner::new(&handle).submit_all(&mut decisions).await;
    for (index, answer) in answers.iter().enumerate() {
        match (index, answer) {
            (1, Err(TransitionError::Backend(_))) | (0 | 2, Ok(_)) => {}
            _ => return Err(Failed::new(format!("item {index}: {answer:?}"))),
        }
    }
    let states = [read(&handle, jobs[0].id()).await?.state(), read(&handle, jobs[2].id()).await?.state()];
    check_eq!(states, [JobState::Completed; 2], "the others are settled");
    check_eq!(read(&handle, jobs[1].id()).await?, jobs[1], "the bad row is as it was");
    Ok(())
}
