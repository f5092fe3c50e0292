//! What is stored comes back as it was.

use std::num::NonZeroU32;

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
    case!(
        data::payloads_are_kept_byte_for_byte,
        [E3],
        [],
        "A payload comes back byte for byte, enqueued alone or among others, read, listed or claimed."
    ),
    case!(
        data::updates_keep_json_byte_for_byte,
        [E3],
        [],
        "A payload and a result that an update writes come back byte for byte, alone or in a batch."
    ),
    case!(
        data::null_is_a_result,
        [A16],
        [],
        "Null, false, 0 and what is empty are results; no result is none of them."
    ),
    case!(
        data::instants_are_kept_to_the_millisecond,
        [E1],
        [],
        "Instants come back to the millisecond, in every century and season."
    ),
    case!(
        data::time_columns_do_not_move_by_themselves,
        [E2],
        [Need::Hook(Hook::Clock)],
        "A write moves no time but those that it sets."
    ),
    case!(data::any_failure_text_is_recorded, [E4], [], "A failure is recorded whatever its text."),
    case!(
        data::failures_fill_their_room,
        [E4],
        [],
        "As many failures as are kept, each of the longest and most awkward text, are recorded."
    ),
    case!(
        data::the_newest_failures_are_kept,
        [],
        [],
        "The newest failures are kept in order, each with its attempt, fence, worker and time."
    ),
    case!(data::failures_outlive_a_rerun, [], [], "A job that runs again keeps the failures it had."),
    case!(
        data::big_numbers,
        [E5],
        [Need::Hook(Hook::Overwrite)],
        "Attempts and fences of any size are kept, counted on and given back."
    ),
    case!(
        data::names_at_their_limits,
        [B12],
        [],
        "Names, keys and workers of the longest kind are kept whole, and told apart by their last byte."
    ),
    case!(data::odd_names, [B12], [], "Names with quotes, line breaks, wildcards and emoji are bound, not spliced."),
];

/// JSON that a parser, a native JSON column or a careless statement would not give back as it was.
pub(super) fn awkward(cap: usize) -> Vec<Json> {
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    let long = format!("\"{}\"", "long ".repeat((cap.min(1024 * 1024) - 2) / 5));
    let texts = [
        "9007199254740993",
        "18446744073709551615",
        "-0.0",
        "1e400",
        "1.10",
        "{\"a\":1,\"a\":2}",
        "{\"z\":1,\"a\":2,\"m\":3}",
        " {\t\"a\" :\r\n[ 1 , 2 ] } ",
        "\"😀 e\u{301} é\"",
        "\"\\u0000\"",
        "\"\\ud800\"",
        "\"\\u00e9\\/\\b\"",
        "\"'); DROP TABLE jobs; -- ' ''\"",
        "\"? $1 :name @p %s {} \\\\\"",
        "{\"$oops\":1,\"$set\":{\"state\":\"failed\"},\"a.b\":null,\"\":0}",
        "\"\"",
        "\"  \"",
        "\"null\"",
        &deep,
        &long,
    ];
    texts.map(json).to_vec()
}

async fn payloads_are_kept_byte_for_byte(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let texts = awkward(context.capabilities.max_payload);
    let jobs: Vec<_> = texts.iter().chain(&texts).map(|text| NewJob { payload: text.clone(), ..new_job() }).collect();
    for job in &jobs[..texts.len()] {
        enqueue(&handle, job).await?;
    }
    handle.enqueue(&jobs[texts.len()..]).await?;
    let listed = handle.list(&ListFilter::default(), None, limit(100)).await?.items;
    let mut claimed = handle.claim(&claim_for(&worker("a"), 100)).await?.jobs;
    claimed.sort_by_key(Job::id);
    check_eq!((listed.len(), claimed.len()), (jobs.len(), jobs.len()), "all are listed, all are claimed");
    for (index, job) in jobs.iter().enumerate() {
        let read = read(&handle, job.id).await?;
        for (way, found) in [("read", &read), ("listed", &listed[index]), ("claimed", &claimed[index])] {
            check_eq!((found.id(), &found.payload), (job.id, &job.payload), "the payload of item {index}, {way}");
        }
    }
    Ok(())
}

/// Writes what was decided, all of it.
async fn write(handle: &Handle, decisions: &[Decision], batched: bool) -> Outcome {
    let requests: Vec<_> = decisions.iter().map(|decision| decision.request().clone()).collect();
    let mut answers = Vec::new();
    match batched {
        true => answers = handle.update_many_if_current(&requests).await?,
        false => {
            for UpdateRequest { id, current, patch } in &requests {
                answers.push(handle.update_if_current(*id, current, patch).await?);
            }
        }
    }
    let applied = answers.iter().filter(|answer| matches!(answer, Update::Applied(_))).count();
    check_eq!(applied, decisions.len(), "all are applied");
    Ok(())
}

async fn updates_keep_json_byte_for_byte(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let texts = awkward(context.capabilities.max_payload);
    for batched in [false, true] {
        let jobs: Vec<_> = texts.iter().map(|_| new_job()).collect();
        handle.enqueue(&jobs).await?;
        let mut decisions = Vec::new();
        for (job, text) in jobs.iter().zip(&texts) {
            let seen = read(&handle, job.id).await?.execution;
            let replace = Transition::Replace { payload: text.clone(), available: When::Now };
            decisions.push(Decision::new(&seen, &replace)?);
        }
        write(&handle, &decisions, batched).await?;
        let mut claimed = handle.claim(&claim_for(&worker("a"), 100)).await?.jobs;
        claimed.sort_by_key(Job::id);
        decisions.clear();
        for (job, text) in claimed.iter().zip(&texts) {
            decisions.push(Decision::new(&job.execution, &Transition::Complete { result: Some(text.clone()) })?);
        }
        write(&handle, &decisions, batched).await?;
        for (index, (job, text)) in jobs.iter().zip(&texts).enumerate() {
            let done = read(&handle, job.id).await?;
            check_eq!(done.payload, *text, "the payload of item {index}, batched = {batched}");
            check_eq!(done.result.as_ref(), Some(text), "the result of item {index}, batched = {batched}");
        }
    }
    Ok(())
}

async fn null_is_a_result(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let results = ["null", "false", "0", "\"\"", "{}", "[]"].map(|text| Some(json(text)));
    for result in results.into_iter().chain([None]) {
        let job = running(&handle, &new_job(), &worker("a")).await?;
        let done = apply(&handle, &job.execution, &Transition::Complete { result: result.clone() }).await?;
        check_eq!(done.result, result, "the result");
    }
    Ok(())
}

async fn instants_are_kept_to_the_millisecond(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let edge = |text: &str| -> Result<[Timestamp; 3], Invalid> {
        let instant: Timestamp = text.parse()?;
        Ok([-1, 0, 1].map(|millis| instant.saturating_add_millis(millis)))
    };
    let mut instants = Vec::new();
    // The ends of the range, of centuries, of 32-bit clocks, and of summer time here and there.
    for text in [
        "0001-01-01T00:00:00Z",
        "1000-01-01T00:00:00Z",
        "1582-10-15T00:00:00Z",
        "1900-01-01T00:00:00Z",
        "1970-01-01T00:00:00Z",
        "2031-03-30T01:00:00Z",
        "2031-03-30T02:30:00.500Z",
        "2031-10-26T01:00:00Z",
        "2031-11-02T06:00:00.250Z",
        "2038-01-19T03:14:08Z",
        "2500-02-28T23:59:59.999Z",
        "9999-12-31T23:59:59.999Z",
    ] {
        instants.extend(edge(text)?);
    }
    let jobs: Vec<_> = instants.iter().map(|at| NewJob { available: When::At(*at), ..new_job() }).collect();
    handle.enqueue(&jobs).await?;
    let moved = enqueue(&handle, &new_job()).await?;
    for (job, instant) in jobs.iter().zip(instants) {
        check_eq!(read(&handle, job.id).await?.available_at, instant, "an instant that was enqueued");
        let seen = read(&handle, moved).await?.execution;
        let snoozed = apply(&handle, &seen, &Transition::Snooze { available: When::At(instant) }).await?;
        check_eq!(snoozed.available_at, instant, "an instant that an update set");
    }
    Ok(())
}

async fn time_columns_do_not_move_by_themselves(context: Context) -> Outcome {
    const HOUR: i64 = 3_600_000;
    let handle = context.connect().await?;
    let id = enqueue(&handle, &new_job()).await?;
    let new = read(&handle, id).await?;
    context.advance(HOUR).await?;
    let claimed = claim_one(&handle, &claim_for(&worker("a"), 1)).await?;
    check_eq!(claimed, Job { execution: claimed.execution.clone(), ..new }, "a claim moves no time but its own");
    context.advance(HOUR).await?;
    let held: Vec<_> = Held::of(&claimed.execution).into_iter().collect();
    handle.extend_leases(&held, lease(MINUTE)).await?;
    let beaten = read(&handle, id).await?;
    let lease_expires_at = beaten.execution.lease_expires_at;
    let expected = Job { execution: Execution { lease_expires_at, ..claimed.execution.clone() }, ..claimed };
    check_eq!(beaten, expected, "a heartbeat moves no time but the lease");
    context.advance(HOUR).await?;
    let done = apply(&handle, &beaten.execution, &complete()).await?;
    let expected = Job {
        execution: Execution {
            lease_expires_at: None,
            attempted_at: beaten.execution.attempted_at,
            ..done.execution.clone()
        },
        ..beaten.clone()
    };
    let unended = Job { finished_at: None, result: None, ..done.clone() };
    check_eq!(unended, expected, "a completion moves no time but its own");
    check_eq!(done.execution.claimed_at, beaten.execution.claimed_at, "not that of the claim either");
    context.advance(HOUR).await?;
    let again = apply(&handle, &done.execution, &Transition::Rerun).await?;
    check_eq!(again.created_at, done.created_at, "a job is created once");
    check!(again.available_at > done.available_at, "a rerun is due at its own time, {}", again.available_at);
    Ok(())
}

async fn any_failure_text_is_recorded(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let (clipped, megabytes) = ("😀".repeat(2_000), "x".repeat(5_000_000));
    let texts = [
        "",
        " ",
        "a\0b",
        "😀 e\u{301}",
        "it's \"odd\" \\ \\u0000 \\n",
        "two\r\nlines\u{2028}\t\u{7f}\u{1b}[0m",
        "\u{fffd}\u{ffff}",
        "null",
        "{\"$oops\":1}",
        "? $1 :name %s",
        &clipped,
        &megabytes,
    ];
    for text in texts {
        let error = FailureText::from(text);
        for transition in [
            Transition::Retry { error: error.clone(), available: When::After(millis(60 * MINUTE)) },
            Transition::Fail { error: error.clone() },
            Transition::Cancel { reason: error.clone() },
        ] {
            let job = running(&handle, &new_job(), &worker("a")).await?;
            // Every move in the form that the others do not take.
            write(
                &handle,
                &[Decision::new(&job.execution, &transition)?],
                matches!(transition, Transition::Fail { .. }),
            )
            .await?;
            let errors = read(&handle, job.id()).await?.errors;
            let recorded: Vec<_> = errors.iter().map(|failure| &failure.text).collect();
            check_eq!(recorded, [&error], "the text of a {}", transition.name());
        }
    }
    Ok(())
}

async fn failures_fill_their_room(context: Context) -> Outcome {
    let handle = context.connect().await?;
    enqueue(&handle, &new_job()).await?;
    let mut expected = Vec::new();
    for filling in ["\u{1}", "\"", "😀", "x"].into_iter().cycle().take(Failure::KEPT) {
        let error = FailureText::from(filling.repeat(FailureText::MAX_BYTES));
        check!(error.as_str().len() == FailureText::MAX_BYTES, "the text is of the longest kind");
        expected.push(error.clone());
        let job = claim_one(&handle, &claim_for(&worker("a"), 1)).await?;
        apply(&handle, &job.execution, &Transition::Retry { error, available: When::Now }).await?;
    }
    let job = claim_one(&handle, &claim_for(&worker("a"), 1)).await?;
    let recorded: Vec<_> = job.errors.into_iter().map(|failure| failure.text).collect();
    check!(recorded == expected, "all {} texts come back as they were", Failure::KEPT);
    Ok(())
}

async fn the_newest_failures_are_kept(context: Context) -> Outcome {
    let handle = context.connect().await?;
    // A claim that is given back sets the fence apart from the attempt.
    let first = running(&handle, &new_job(), &worker("a")).await?;
    apply(&handle, &first.execution, &Transition::Release).await?;
    let mut expected: Vec<Failure> = Vec::new();
    for round in 1..=Failure::KEPT + 3 {
        let seen = claim_one(&handle, &claim_for(&worker("a"), 1)).await?.execution;
        let text = FailureText::from(format!("failure {round}"));
        let transition = match round {
            round if round < Failure::KEPT + 3 => Transition::Retry { error: text.clone(), available: When::Now },
            _ => Transition::Fail { error: text.clone() },
        };
        let job = apply(&handle, &seen, &transition).await?;
        let at = job.errors.last().map(|failure| failure.at).ok_or_else(|| Failed::new("nothing was recorded"))?;
        check!(Some(at) >= seen.attempted_at, "failed at {at}, started at {:?}", seen.attempted_at);
        check_eq!(job.finished_at.unwrap_or(at), at, "one moment");
        expected.push(Failure { attempt: seen.attempt, fence: seen.fence, worker: seen.claimed_by, at, text });
        let surplus = expected.len().saturating_sub(Failure::KEPT);
        check_eq!(job.errors, expected[surplus..], "after {round} failures");
    }
    Ok(())
}

async fn failures_outlive_a_rerun(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = running(&handle, &new_job(), &worker("a")).await?;
    let failed = apply(&handle, &job.execution, &fail()).await?;
    let again = apply(&handle, &failed.execution, &Transition::Rerun).await?;
    check_eq!(again.errors, failed.errors, "the failure is kept");
    let claimed = claim_one(&handle, &claim_for(&worker("b"), 1)).await?;
    let canceled = apply(&handle, &claimed.execution, &cancel()).await?;
    check_eq!(canceled.errors.len(), 2, "the next one is added: {:?}", canceled.errors);
    check_eq!(canceled.errors[..1], failed.errors[..], "after the one that was there");
    Ok(())
}

async fn big_numbers(context: Context) -> Outcome {
    let handle = context.connect().await?;
    // Past 16 and 32 bits, with and without a sign, and past what a double counts exactly.
    for (attempt, fence) in [(30_000, 70_000), (70_000, (1 << 32) + 5), (3_000_000_000, (1 << 53) + 1)] {
        let id = enqueue(&handle, &NewJob { max_attempts: NonZeroU32::MAX, ..new_job() }).await?;
        let row = Execution { attempt, fence, ..read(&handle, id).await?.execution };
        context.overwrite(&row).await?;
        check_eq!(read(&handle, id).await?.execution, row, "the row comes back");
        let claimed = claim_one(&handle, &claim_for(&worker("a"), 1)).await?.execution;
        check_eq!((claimed.attempt, claimed.fence), (attempt + 1, fence + 1), "a claim counts on");
        let retried = apply(&handle, &claimed, &retry_now()).await?;
        let failure = retried.errors.first().ok_or_else(|| Failed::new("nothing was recorded"))?;
        check_eq!((failure.attempt, failure.fence), (attempt + 1, fence + 1), "a failure names them");
        let claimed = claim_one(&handle, &claim_for(&worker("a"), 1)).await?.execution;
        let released = apply(&handle, &claimed, &Transition::Release).await?.execution;
        check_eq!(
            (released.attempt, released.fence),
            (attempt + 1, fence + 2),
            "an attempt is given back, a fence is not"
        );
        apply(&handle, &released, &cancel()).await?;
    }
    Ok(())
}

async fn names_at_their_limits(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let [a, b] = ["a", "b"].map(|last| format!("{}{last}", "é".repeat(127)));
    let job = |queue: &str, kind: &str, key: &str| NewJob { queue: name(queue), kind: name(kind), ..keyed(key) };
    let jobs = [job(&a, &a, &a), job(&a, &b, &b), job(&b, &a, &a)];
    for job in &jobs {
        enqueue(&handle, job).await?;
        let stored = read(&handle, job.id).await?;
        let names = (&stored.queue, &stored.kind, &stored.unique_key);
        check_eq!(names, (&job.queue, &job.kind, &job.unique_key), "the names come back whole");
    }
    let (me, other) = (worker(&a), worker(&a));
    for (job, by) in jobs.iter().zip([&me, &other, &me]) {
        let kinds = [job.kind.clone()];
        let request = ClaimRequest::new(job.queue.clone(), kinds, by.clone(), lease(MINUTE), limit(10))?;
        let claimed = claim_one(&handle, &request).await?;
        check_eq!((claimed.id(), &claimed.execution.claimed_by), (job.id, &Some(by.clone())), "claimed by its names");
        let held: Vec<_> = Held::of(&claimed.execution).into_iter().collect();
        check_eq!(
            handle.extend_leases(&held, lease(MINUTE)).await?,
            [Beat::Extended],
            "the claim is found by its worker"
        );
    }
    let mine = handle.claimed_by(&me, Delay::ZERO, None, limit(10)).await?.items;
    let mine: Vec<_> = mine.iter().map(|row| row.id).collect();
    check_eq!(mine, [jobs[0].id, jobs[2].id], "what this worker holds, and not its other incarnation");
    Ok(())
}

async fn odd_names(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let emoji = "😀".repeat(63);
    for odd in ["o'brien", "a`b", "a\"b", "line\nbreak", "%", "_", "\\", "$oops", "'; DROP TABLE jobs; --", &emoji] {
        let mut job = NewJob::new(name(odd), name(odd), Json::encode(odd)?);
        job.unique_key = Some(UniqueKey::try_from(odd)?);
        enqueue(&handle, &job).await?;
        let me = worker(odd);
        let request = ClaimRequest::new(name(odd), [name(odd)], me.clone(), lease(MINUTE), limit(10))?;
        let claimed = claim_one(&handle, &request).await?;
        check_eq!((claimed.id(), &claimed.queue, &claimed.kind), (job.id, &job.queue, &job.kind), "{odd:?} is kept");
        check_eq!(claimed.execution.claimed_by, Some(me.clone()), "{odd:?} as a worker");
        check_eq!(
            handle.claimed_by(&me, Delay::ZERO, None, limit(10)).await?.items,
            std::slice::from_ref(&claimed.execution),
            "{odd:?} is found by worker"
        );
        let failure = Transition::Fail { error: odd.into() };
        let failed = apply(&handle, &claimed.execution, &failure).await?;
        check_eq!(failed.errors[0].text.as_str(), odd, "{odd:?} as an error");
    }
    Ok(())
}
