//! Events: the first payload of a key is what everybody gets, for as long as it is kept.

use std::collections::BTreeSet;

use queue_core::*;

use crate::case::Case;
use crate::case::Failed;
use crate::case::Need;
use crate::case::Outcome;
use crate::case::case;
use crate::case::check;
use crate::case::check_eq;
use crate::cases::data::awkward;
use crate::cases::steps::durable;
use crate::context::*;
use crate::harness::Hook;

const STEPS: Need = Need::DurableSteps;
const CLOCK: Need = Need::Hook(Hook::Clock);

pub(super) const CASES: &[Case] = &[
    case!(
        events::the_first_payload_wins,
        [],
        [STEPS],
        "Emitting a key again changes nothing, and answers with the payload that is kept."
    ),
    case!(
        events::are_kept_for_their_time,
        [],
        [STEPS, CLOCK],
        "An event is found until its time is over, not after it, and is purged then and not before."
    ),
    case!(
        events::come_again_after_their_time,
        [],
        [STEPS, CLOCK],
        "After an event's time the same key is a new event, also if the old one was not purged."
    ),
    case!(
        events::that_are_not_kept,
        [],
        [STEPS],
        "An event that is kept for no time ends the waits that there are, and is found by none that comes later."
    ),
    case!(
        events::emitted_at_once,
        [],
        [STEPS],
        "Of many who emit one key at once exactly one does, and all are told its payload."
    ),
    case!(events::payloads_are_kept_byte_for_byte, [E5], [STEPS], "Whoever waits gets the payload as it was emitted."),
    case!(events::too_large_is_refused, [E6], [STEPS], "A payload over the cap is refused before anything is written."),
    case!(
        events::purges_are_limited,
        [],
        [STEPS, CLOCK],
        "A purge deletes at most as many events as it was told, and in the end all that are over."
    ),
];

fn event(key: &str, payload: &str, keep: i64) -> NewEvent {
    NewEvent { key: name(key), payload: json(payload), keep: millis(keep) }
}

/// What a running job finds that waits for this key; it does not come to wait.
async fn found(handle: &Handle, key: &str) -> Result<Option<Json>, Failed> {
    let job = running(handle, &new_job(), &worker("a")).await?;
    let mut suspension = Suspension::new(&job.execution, name("w"), Some(name(key)), When::At(Timestamp::MAX))?;
    let answer = suspension.submit(durable(handle)?).await;
    let row = read(handle, job.id()).await?;
    apply(handle, &row.execution, &cancel()).await?;
    match answer {
        Ok(Suspended::Came(payload)) => Ok(Some(payload)),
        Ok(Suspended::Waits(_)) => Ok(None),
        other => Err(Failed::new(format!("a wait must end or begin, not {other:?}"))),
    }
}

async fn the_first_payload_wins(context: Context) -> Outcome {
    let (handle, other) = (context.connect().await?, context.connect().await?);
    check_eq!(durable(&handle)?.emit(&event("e", "1", MINUTE)).await?, Emitted::New { woken: 0 }, "the first");
    for payload in ["1", "2"] {
        let again = durable(&other)?.emit(&event("e", payload, MINUTE)).await?;
        check_eq!(again, Emitted::Kept(json("1")), "emitted again with {payload}");
    }
    check_eq!(found(&other, "e").await?, Some(json("1")), "what is found");
    Ok(())
}

async fn are_kept_for_their_time(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let steps = durable(&handle)?;
    steps.emit(&event("short", "1", 10 * MINUTE)).await?;
    steps.emit(&event("long", "2", 60 * MINUTE)).await?;
    // Emitting it again does not keep it longer.
    steps.emit(&event("short", "1", 60 * MINUTE)).await?;
    context.advance(9 * MINUTE).await?;
    check_eq!(steps.purge_events(limit(10)).await?, 0, "none is over");
    check_eq!(found(&handle, "short").await?, Some(json("1")), "a minute before its time");
    context.advance(MINUTE).await?;
    check_eq!(found(&handle, "short").await?, None, "after its time");
    check_eq!(steps.purge_events(limit(10)).await?, 1, "one is over");
    check_eq!(found(&handle, "short").await?, None, "once it is purged");
    check_eq!(found(&handle, "long").await?, Some(json("2")), "the other is kept");
    Ok(())
}

async fn come_again_after_their_time(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let steps = durable(&handle)?;
    steps.emit(&event("e", "1", MINUTE)).await?;
    context.advance(MINUTE).await?;
    check_eq!(steps.emit(&event("e", "2", MINUTE)).await?, Emitted::New { woken: 0 }, "it is new");
    check_eq!(found(&handle, "e").await?, Some(json("2")), "the new one is found");
    check_eq!(steps.emit(&event("e", "3", MINUTE)).await?, Emitted::Kept(json("2")), "the new one is kept");
    context.advance(MINUTE / 2).await?;
    check_eq!(found(&handle, "e").await?, Some(json("2")), "for its own time");
    Ok(())
}

async fn that_are_not_kept(context: Context) -> Outcome {
    let (handle, job) = started(&context).await?;
    let mut suspension = Suspension::new(&job.execution, name("w"), Some(name("e")), When::At(Timestamp::MAX))?;
    let waits = suspension.submit(durable(&handle)?).await;
    check!(matches!(waits, Ok(Suspended::Waits(_))), "it waits: {waits:?}");
    for woken in [1, 0] {
        let emitted = durable(&handle)?.emit(&event("e", "1", 0)).await?;
        check_eq!(emitted, Emitted::New { woken }, "it is new every time");
    }
    check_eq!(read(&handle, job.id()).await?.state(), JobState::Waiting, "who waited goes on");
    apply(&handle, &read(&handle, job.id()).await?.execution, &cancel()).await?;
    check_eq!(found(&handle, "e").await?, None, "who comes later waits");
    Ok(())
}

async fn emitted_at_once(context: Context) -> Outcome {
    let mut handles = Vec::new();
    for _ in 0..4 {
        handles.push(context.connect().await?);
    }
    for round in 0..10 {
        let key = format!("e {round}");
        let job = running(&handles[0], &new_job(), &worker("a")).await?;
        let mut suspension = Suspension::new(&job.execution, name("w"), Some(name(&key)), When::At(Timestamp::MAX))?;
        let waits = suspension.submit(durable(&handles[0])?).await;
        check!(matches!(waits, Ok(Suspended::Waits(_))), "it waits: {waits:?}");
        let answers = context
            .race(8, |index| {
                let (handle, key) = (handles[index % 4].clone(), key.clone());
                async move {
                    let emitted = durable(&handle)?.emit(&event(&key, &index.to_string(), MINUTE)).await?;
                    Ok::<_, Failed>((index, emitted))
                }
            })
            .await?;
        let (mut new, mut kept) = (Vec::new(), BTreeSet::new());
        for answer in answers {
            match answer? {
                (index, Emitted::New { woken: 1 }) => new.push(json(&index.to_string())),
                (_, Emitted::Kept(payload)) => drop(kept.insert(payload.as_str().to_owned())),
                other => return Err(Failed::new(format!("round {round}: {other:?}"))),
            }
        }
        check_eq!(new.len(), 1, "round {round}: one emits it, and wakes the one who waits");
        check_eq!(kept, BTreeSet::from([new[0].as_str().to_owned()]), "round {round}: all are told its payload");
        let steps = durable(&handles[0])?.steps(job.id()).await?;
        check_eq!(steps[0].state, StepState::Done(new[0].clone()), "round {round}: what the job got");
        apply(&handles[0], &read(&handles[0], job.id()).await?.execution, &cancel()).await?;
    }
    Ok(())
}

async fn payloads_are_kept_byte_for_byte(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let texts = [vec![Json::null()], awkward(context.capabilities.max_payload)].concat();
    for (index, text) in texts.iter().enumerate() {
        let key = format!("e {index}");
        let job = running(&handle, &new_job(), &worker("a")).await?;
        let mut suspension = Suspension::new(&job.execution, name("w"), Some(name(&key)), When::At(Timestamp::MAX))?;
        let waits = suspension.submit(durable(&handle)?).await;
        check!(matches!(waits, Ok(Suspended::Waits(_))), "it waits: {waits:?}");
        durable(&handle)?.emit(&event(&key, text.as_str(), MINUTE)).await?;
        let steps = durable(&handle)?.steps(job.id()).await?;
        check_eq!(steps[0].state, StepState::Done(text.clone()), "who waited for item {index}");
        apply(&handle, &read(&handle, job.id()).await?.execution, &cancel()).await?;
        check_eq!(found(&handle, &key).await?.as_ref(), Some(text), "who comes after item {index}");
        let again = durable(&handle)?.emit(&event(&key, "0", MINUTE)).await?;
        check_eq!(again, Emitted::Kept(text.clone()), "who emits item {index} again");
    }
    Ok(())
}

async fn too_large_is_refused(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let cap = context.capabilities.max_payload;
    let text = format!("\"{}\"", "x".repeat(cap - 1));
    let answer = durable(&handle)?.emit(&event("e", &text, MINUTE)).await;
    refused(answer, ErrorKind::TooLarge, "a payload over the cap")?;
    check_eq!(found(&handle, "e").await?, None, "nothing is kept");
    Ok(())
}

async fn purges_are_limited(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let steps = durable(&handle)?;
    for index in 0..5 {
        steps.emit(&event(&format!("e {index}"), "1", MINUTE)).await?;
    }
    steps.emit(&event("kept", "1", 60 * MINUTE)).await?;
    context.advance(2 * MINUTE).await?;
    for expected in [2, 2, 1, 0] {
        check_eq!(steps.purge_events(limit(2)).await?, expected, "at most two at a time");
    }
    check_eq!(found(&handle, "kept").await?, Some(json("1")), "what is not over stays");
    Ok(())
}
