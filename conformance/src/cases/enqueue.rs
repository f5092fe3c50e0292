//! Enqueueing.

use std::num::NonZeroU32;
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
use crate::harness::Damage;
use crate::harness::Hook;

pub(super) const CASES: &[Case] = &[
    case!(enqueue::stored_as_given, [], [], "A new job waits, unclaimed, with every field as it was given."),
    case!(enqueue::bulk_equals_single, [D4], [], "Many jobs in one call are stored as each would be by itself."),
    case!(
        enqueue::due_times_are_the_stores,
        [C1],
        [Need::Hook(Hook::Clock)],
        "The store's clock says when a job was created, and when it is due."
    ),
    case!(
        enqueue::past_and_far_due_times,
        [E1],
        [],
        "A due time is kept as given: one in the past is due at once, one centuries ahead is not."
    ),
    case!(enqueue::answers_in_order, [], [], "Each job of a call is answered, in the order of the call."),
    case!(
        enqueue::a_repeat_is_existing,
        [D9],
        [],
        "A job that is enqueued again is existing, whatever has become of it, and is left as it is."
    ),
    case!(
        enqueue::other_content_is_refused,
        [D9],
        [],
        "An id that is stored with other content, in whichever field, is refused."
    ),
    case!(enqueue::the_id_comes_before_the_key, [D9], [], "The id is judged before the unique key."),
    case!(
        enqueue::a_purged_id_is_new_again,
        [],
        [],
        "An id whose row was purged is new again, as a moment of its own."
    ),
    case!(
        enqueue::one_bad_item_stores_nothing,
        [D10 E6],
        [],
        "One item that is refused refuses the whole call, which stores nothing and names the item."
    ),
    case!(
        enqueue::payload_cap,
        [E6],
        [],
        "A payload of just the cap, in bytes, is stored; one byte more is refused before any write."
    ),
    case!(enqueue::thousands_in_one_call, [D10], [], "Ten thousand jobs in one call are all stored."),
    case!(
        enqueue::thousands_are_refused_as_one,
        [D10],
        [],
        "Ten thousand jobs of which the last is refused leave nothing behind."
    ),
    case!(
        enqueue::dropped_futures,
        [A15 D9],
        [],
        "An enqueue whose future is dropped has stored all or nothing, and repeating it leaves one row per job."
    ),
    case!(
        enqueue::race_of_one_job,
        [D9],
        [],
        "A job that is enqueued by many at once is new to one of them and existing to the others."
    ),
    case!(
        enqueue::race_of_two_contents,
        [D9],
        [],
        "Of two contents that race for one id one is stored; the other is refused to all who bring it."
    ),
    case!(
        enqueue::concurrent_batches,
        [B11 D9],
        [],
        "Overlapping batches in different orders store each job once, and nobody gets an error."
    ),
    case!(
        enqueue::an_id_in_a_foreign_state,
        [D1],
        [Need::Hook(Hook::Damage)],
        "A job that is stored in a state of a newer version is stored: enqueued again, it is the same job."
    ),
];

/// A job with nothing at its default, and jobs with one thing that is not.
fn variants() -> Result<Vec<NewJob>, Failed> {
    let all = NewJob {
        priority: Priority::new(8)?,
        max_attempts: NonZeroU32::MIN.saturating_add(2),
        available: When::At("2033-03-03T03:03:03.033Z".parse()?),
        unique_key: Some(UniqueKey::try_from("all")?),
        ..NewJob::new(name("another queue"), name("another kind"), json(" { \"b\":1, \"a\":[ ] } "))
    };
    Ok(vec![
        new_job(),
        all,
        keyed(""),
        keyed("one"),
        NewJob { available: When::After(millis(1_001)), ..new_job() },
        NewJob { priority: Priority::FIRST, ..new_job() },
        NewJob { priority: Priority::LAST, ..new_job() },
        NewJob { max_attempts: NonZeroU32::MIN, ..new_job() },
        NewJob { max_attempts: NonZeroU32::MAX, ..new_job() },
        new_job(),
    ])
}

/// Fails unless the job is stored as the contract has it.
async fn check_stored(handle: &Handle, new: &NewJob) -> Outcome {
    let stored = read(handle, new.id).await?;
    let mut expected = new.clone().into_job(stored.created_at);
    expected.execution.revision = stored.execution.revision;
    check_eq!(stored, expected, "the job as it was given");
    Ok(())
}

async fn stored_as_given(context: Context) -> Outcome {
    let handle = context.connect().await?;
    for new in variants()? {
        enqueue(&handle, &new).await?;
        check_stored(&handle, &new).await?;
    }
    Ok(())
}

async fn bulk_equals_single(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let jobs = variants()?;
    handle.enqueue(&jobs).await?;
    for new in &jobs {
        check_stored(&handle, new).await?;
    }
    Ok(())
}

async fn due_times_are_the_stores(context: Context) -> Outcome {
    const YEARS: i64 = 10 * 365 * 86_400_000;
    let handle = context.connect().await?;
    let first = enqueue(&handle, &new_job()).await?;
    let earliest = read(&handle, first).await?.created_at.saturating_add_millis(YEARS);
    context.advance(YEARS).await?;
    let spans = [When::After(Delay::ZERO), When::After(millis(1)), When::After(Delay::MAX)];
    for available in [When::Now, When::At(earliest)].into_iter().chain(spans) {
        let id = enqueue(&handle, &NewJob { available, ..new_job() }).await?;
        let stored = read(&handle, id).await?;
        let created = stored.created_at;
        let latest = earliest.saturating_add_millis(10 * MINUTE);
        check!(created >= earliest && created < latest, "created at {created}, not soon after {earliest}");
        check_eq!(stored.available_at, available.resolve(created), "due {available:?}, created at {created}");
    }
    Ok(())
}

async fn past_and_far_due_times(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let (mut past, mut far) = (Vec::new(), Vec::new());
    for text in ["0001-01-01T00:00:00Z", "1969-12-31T23:59:59.999Z", "2001-09-09T01:46:40Z"] {
        past.push(NewJob { available: When::At(text.parse()?), ..new_job() });
    }
    for text in ["2500-01-01T00:00:00Z", "9999-12-31T23:59:59.999Z"] {
        far.push(NewJob { available: When::At(text.parse()?), ..new_job() });
    }
    far.push(NewJob { available: When::After(Delay::MAX), ..new_job() });
    for job in far.iter().chain(&past) {
        enqueue(&handle, job).await?;
        check_stored(&handle, job).await?;
    }
    let claimed = handle.claim(&claim_for(&worker("a"), 10)).await?.jobs;
    let expected: Vec<_> = past.iter().map(|job| job.id).collect();
    check_eq!(claimed.iter().map(Job::id).collect::<Vec<_>>(), expected, "those of the past are due, and no others");
    Ok(())
}

async fn answers_in_order(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let (stored, holder) = (new_job(), keyed("taken"));
    handle.enqueue(&[stored.clone(), holder.clone()]).await?;
    // Of descending ids, with answers of every kind between them.
    let mut new: Vec<_> = (0..4).map(|_| new_job()).collect();
    new.reverse();
    let batch = [&new[0], &keyed("taken"), &new[1], &stored, &new[2], &new[0], &keyed("taken"), &holder, &new[3]];
    let answers = handle.enqueue(&batch.map(NewJob::clone)).await?;
    let duplicate = Enqueued::Duplicate { existing: holder.id };
    let expected = [
        Enqueued::New(new[0].id),
        duplicate,
        Enqueued::New(new[1].id),
        Enqueued::Existing(stored.id),
        Enqueued::New(new[2].id),
        Enqueued::Existing(new[0].id),
        duplicate,
        Enqueued::Existing(holder.id),
        Enqueued::New(new[3].id),
    ];
    check_eq!(answers, expected, "the answers, in the order of the jobs");
    check_eq!(stored_rows(&handle).await?, 6, "only what was new was stored");
    Ok(())
}

/// Enqueues a stored job again, also with another due time, and checks that nothing comes of it.
async fn repeat(handle: &Handle, job: &NewJob, stage: &str) -> Outcome {
    let before = read(handle, job.id).await?;
    for available in [job.available, When::After(millis(MINUTE)), When::At(Timestamp::MIN)] {
        let again = NewJob { available, ..job.clone() };
        check_eq!(offer(handle, &again).await?, Enqueued::Existing(job.id), "a repeat of a {stage} job");
    }
    check_eq!(read(handle, job.id).await?, before, "a repeat leaves a {stage} job as it is");
    Ok(())
}

async fn a_repeat_is_existing(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = keyed("k");
    enqueue(&handle, &job).await?;
    repeat(&handle, &job, "waiting").await?;
    let claimed = claim_one(&handle, &claim_for(&worker("a"), 1)).await?;
    repeat(&handle, &job, "running").await?;
    let snoozed = apply(&handle, &claimed.execution, &snooze(MINUTE)).await?;
    repeat(&handle, &job, "snoozed").await?;
    let canceled = apply(&handle, &snoozed.execution, &cancel()).await?;
    repeat(&handle, &job, "canceled").await?;
    let again = apply(&handle, &canceled.execution, &Transition::Rerun).await?;
    let claimed = claim_one(&handle, &claim_for(&worker("a"), 1)).await?;
    check_eq!(claimed.id(), again.id(), "the job runs again");
    apply(&handle, &claimed.execution, &complete()).await?;
    repeat(&handle, &job, "completed").await?;
    let successor = keyed("k");
    enqueue(&handle, &successor).await?;
    repeat(&handle, &job, "completed and succeeded").await?;
    repeat(&handle, &successor, "succeeding").await?;
    check_eq!(stored_rows(&handle).await?, 2, "one row for each");
    Ok(())
}

async fn other_content_is_refused(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = keyed("k");
    enqueue(&handle, &job).await?;
    let before = read(&handle, job.id).await?;
    let keyless = new_job();
    enqueue(&handle, &keyless).await?;
    let others = [
        ("queue", NewJob { queue: name("Q"), ..job.clone() }),
        ("kind", NewJob { kind: name("K"), ..job.clone() }),
        ("payload", NewJob { payload: json("{\"n\":2}"), ..job.clone() }),
        ("payload's spaces", NewJob { payload: json("{\"n\": 1}"), ..job.clone() }),
        ("priority", NewJob { priority: Priority::new(6)?, ..job.clone() }),
        ("max_attempts", NewJob { max_attempts: NonZeroU32::MIN, ..job.clone() }),
        ("unique key", NewJob { unique_key: Some(UniqueKey::try_from("K")?), ..job.clone() }),
        ("unique key", NewJob { unique_key: None, ..job.clone() }),
        ("unique key", NewJob { unique_key: Some(UniqueKey::try_from("")?), ..keyless.clone() }),
    ];
    for (field, other) in others {
        let answer = handle.enqueue(std::slice::from_ref(&other)).await;
        let index = refused(answer, ErrorKind::IdReused, &format!("another {field}"))?;
        check_eq!(index, Some(0), "the item is named, another {field}");
    }
    check_eq!(read(&handle, job.id).await?, before, "the stored job is as it was");
    check_eq!(stored_rows(&handle).await?, 2, "nothing else was stored");
    Ok(())
}

async fn the_id_comes_before_the_key(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let (holder, stored) = (keyed("taken"), new_job());
    handle.enqueue(&[holder.clone(), stored.clone()]).await?;
    let other = NewJob { unique_key: holder.unique_key.clone(), ..stored };
    let answer = handle.enqueue(&[other]).await;
    refused(answer, ErrorKind::IdReused, "a stored id with other content and a taken key")?;
    let twice = keyed("free");
    let answers = handle.enqueue(&[twice.clone(), twice.clone()]).await?;
    let expected = [Enqueued::New(twice.id), Enqueued::Existing(twice.id)];
    check_eq!(answers, expected, "one job twice in a call is no duplicate of itself");
    let twice = keyed("taken");
    let answers = handle.enqueue(&[twice.clone(), twice]).await?;
    check_eq!(answers, [Enqueued::Duplicate { existing: holder.id }; 2], "one job twice in a call, of a taken key");
    Ok(())
}

async fn a_purged_id_is_new_again(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = new_job();
    enqueue(&handle, &job).await?;
    let first = read(&handle, job.id).await?;
    apply(&handle, &first.execution, &cancel()).await?;
    handle.purge(JobState::Canceled, Delay::ZERO, limit(10)).await?;
    enqueue(&handle, &job).await?;
    let second = read(&handle, job.id).await?;
    check!(first.execution.revision != second.execution.revision, "both rows have one revision");
    let late = conflicts(&handle, &first.execution, &cancel()).await?;
    check_eq!(late.current, second.execution, "a decision on the first row is not one on the second");
    Ok(())
}

/// A job whose payload, of characters of four bytes, has this many bytes.
fn with_payload_of(bytes: usize) -> NewJob {
    let (wide, narrow) = ((bytes - 2) / 4, (bytes - 2) % 4);
    NewJob { payload: json(&format!("\"{}{}\"", "😀".repeat(wide), "x".repeat(narrow))), ..new_job() }
}

async fn one_bad_item_stores_nothing(context: Context) -> Outcome {
    const BAD: usize = 7;
    let handle = context.connect().await?;
    let stored = new_job();
    enqueue(&handle, &stored).await?;
    let batch: Vec<_> = (0..12).map(|n| keyed(&n.to_string())).collect();
    let bad = [
        (ErrorKind::TooLarge, with_payload_of(context.capabilities.max_payload + 1)),
        (ErrorKind::IdReused, NewJob { kind: name("other"), ..stored }),
        (ErrorKind::IdReused, NewJob { kind: name("other"), ..batch[2].clone() }),
    ];
    for (kind, bad) in bad {
        let mut batch = batch.clone();
        batch[BAD] = bad;
        let index = refused(handle.enqueue(&batch).await, kind, "the batch")?;
        check_eq!(index, Some(BAD), "the item is named ({kind})");
        check_eq!(stored_rows(&handle).await?, 1, "nothing of the batch is stored ({kind})");
    }
    let answers = handle.enqueue(&batch).await?;
    let expected: Vec<_> = batch.iter().map(|job| Enqueued::New(job.id)).collect();
    check_eq!(answers, expected, "the good ones can still be stored");
    Ok(())
}

async fn payload_cap(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let cap = context.capabilities.max_payload;
    let over = with_payload_of(cap + 1);
    let answer = handle.enqueue(std::slice::from_ref(&over)).await;
    refused(answer, ErrorKind::TooLarge, &format!("a payload of {} bytes", over.payload.bytes()))?;
    check_eq!(handle.get(over.id).await?, None, "nothing was stored");
    let largest = with_payload_of(cap);
    enqueue(&handle, &largest).await?;
    check!(read(&handle, largest.id).await?.payload == largest.payload, "{cap} bytes come back as they were");
    Ok(())
}

async fn thousands_in_one_call(context: Context) -> Outcome {
    let handle = context.connect().await?;
    for count in [1_000_usize, 10_000] {
        let jobs: Vec<_> = (0..count).map(|n| NewJob { payload: json(&n.to_string()), ..new_job() }).collect();
        let answers = handle.enqueue(&jobs).await?;
        check_eq!(answers.len(), count, "one answer for each");
        for (index, (job, answer)) in jobs.iter().zip(answers).enumerate() {
            check_eq!(answer, Enqueued::New(job.id), "item {index} of {count}");
        }
        for index in [0, 1, count / 2, count - 1] {
            check_stored(&handle, &jobs[index]).await?;
        }
    }
    check_eq!(stored_rows(&handle).await?, 11_000, "all of them are stored");
    Ok(())
}

async fn thousands_are_refused_as_one(context: Context) -> Outcome {
    const LAST: usize = 9_999;
    let handle = context.connect().await?;
    let stored = new_job();
    enqueue(&handle, &stored).await?;
    let mut jobs: Vec<_> = (0..LAST).map(|_| new_job()).collect();
    jobs.push(NewJob { kind: name("other"), ..stored });
    let index = refused(handle.enqueue(&jobs).await, ErrorKind::IdReused, "the batch")?;
    check_eq!(index, Some(LAST), "the item is named");
    check_eq!(stored_rows(&handle).await?, 1, "nothing of the batch is stored");
    Ok(())
}

async fn dropped_futures(context: Context) -> Outcome {
    let handles = [context.connect().await?, context.connect().await?];
    for polls in 1..=20 {
        let jobs: Vec<_> = (0..3).map(|n| keyed(&format!("{polls} {n}"))).collect();
        drop_after(polls, handles[0].enqueue(&jobs)).await;
        let again = enqueue_in_the_end(&handles[polls % 2], &jobs).await?;
        let new: Vec<_> = jobs.iter().map(|job| Enqueued::New(job.id)).collect();
        let existing: Vec<_> = jobs.iter().map(|job| Enqueued::Existing(job.id)).collect();
        let is_whole = !context.capabilities.atomic_batches || again == new || again == existing;
        check!(is_whole, "dropped after {polls} polls: all or none, not {again:?}");
        for job in &jobs {
            check_stored(&handles[1], job).await?;
        }
    }
    check_eq!(stored_rows(&handles[1]).await?, 60, "one row per job");
    Ok(())
}

const RACERS: usize = 16;
const ROUNDS: usize = 20;

async fn race_of_one_job(context: Context) -> Outcome {
    let handles = [context.connect().await?, context.connect().await?];
    for round in 0..ROUNDS {
        let job = if round % 2 == 0 { new_job() } else { keyed(&round.to_string()) };
        let answers = context
            .race(RACERS, |task| {
                let (handle, job) = (Arc::clone(&handles[task % 2]), job.clone());
                async move { offer(&handle, &job).await }
            })
            .await?;
        let answers = answers.into_iter().collect::<Result<Vec<_>, _>>()?;
        let count = |outcome| answers.iter().filter(|answer| **answer == outcome).count();
        let counts = (count(Enqueued::New(job.id)), count(Enqueued::Existing(job.id)));
        check_eq!(counts, (1, RACERS - 1), "round {round}: new to one, existing to the others: {answers:?}");
        check_stored(&handles[0], &job).await?;
    }
    Ok(())
}

async fn race_of_two_contents(context: Context) -> Outcome {
    let handles = [context.connect().await?, context.connect().await?];
    for round in 0..ROUNDS {
        let one = new_job();
        let contents = [one.clone(), NewJob { payload: json("\"other\""), ..one.clone() }];
        let answers = context
            .race(RACERS, |task| {
                let (handle, job) = (Arc::clone(&handles[task % 2]), contents[task / 2 % 2].clone());
                async move { (job.payload.clone(), handle.enqueue(&[job]).await) }
            })
            .await?;
        let stored = read(&handles[0], one.id).await?.payload;
        let mut new = 0;
        for (payload, answer) in answers {
            match answer {
                answer if payload != stored => drop(refused(answer, ErrorKind::IdReused, "the other content")?),
                Ok(outcomes) if outcomes == [Enqueued::New(one.id)] => new += 1,
                answer => check_eq!(answer?, [Enqueued::Existing(one.id)], "round {round}: the content that is stored"),
            }
        }
        check_eq!(new, 1, "round {round}: new to one");
    }
    Ok(())
}

async fn concurrent_batches(context: Context) -> Outcome {
    const TASKS: usize = 8;
    let handles = [context.connect().await?, context.connect().await?];
    for round in 0..5 {
        let jobs: Vec<_> = (0..60).map(|n| keyed(&format!("{round} {n}"))).collect();
        let answers = context
            .race(TASKS, |task| {
                let (handle, mut mine) = (Arc::clone(&handles[task % 2]), jobs.clone());
                mine.rotate_left(task * 7);
                if task / 2 % 2 == 0 {
                    mine.reverse();
                }
                async move { Ok::<_, Failed>((handle.enqueue(&mine).await?, mine)) }
            })
            .await?;
        let mut new = Vec::new();
        for answer in answers {
            let (outcomes, mine) = answer?;
            for (outcome, job) in outcomes.into_iter().zip(mine) {
                check_eq!(outcome.id(), job.id, "round {round}: each is answered for itself, not {outcome:?}");
                new.extend(matches!(outcome, Enqueued::New(_)).then_some(job.id));
            }
        }
        new.sort();
        let expected: Vec<_> = jobs.iter().map(|job| job.id).collect();
        check_eq!(new, expected, "round {round}: each is new to one");
    }
    Ok(())
}

async fn an_id_in_a_foreign_state(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let job = new_job();
    enqueue(&handle, &job).await?;
    context.store.damage(job.id, Damage::ForeignState).await?;
    context.note(format_args!("job {} has a state of a newer version", job.id));
    let answer = offer(&handle, &job).await?;
    check_eq!(answer, Enqueued::Existing(job.id), "whatever has become of it since");
    let other = NewJob { payload: json("\"other\""), ..job };
    let answer = handle.enqueue(&[other]).await;
    refused(answer, ErrorKind::IdReused, "another content under its id")?;
    check_eq!(stored_rows(&handle).await?, 1, "there is one row");
    Ok(())
}
