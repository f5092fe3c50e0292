//! What is stored comes back as it was, and what cannot be read keeps nothing else back.

mod common;

use backend_mongo::mongodb::bson::Binary;
use backend_mongo::mongodb::bson::Bson;
use backend_mongo::mongodb::bson::DateTime;
use backend_mongo::mongodb::bson::Document;
use backend_mongo::mongodb::bson::doc;
use backend_mongo::mongodb::bson::spec::BinarySubtype;
use common::*;
use queue_core::*;

/// Texts that mean something in an expression, or that a parser would not give back.
fn texts() -> Vec<String> {
    let large = format!("\"{}\"", "\\\"é😀".repeat(131_071));
    assert!(large.len() > 1024 * 1024 - 100 && large.len() <= 1024 * 1024, "{}", large.len());
    [
        "null",
        "\"\"",
        "1e400",
        "-0.0",
        "9007199254740993",
        "18446744073709551615",
        "\"\\u0000\"",
        "\"\\ud800\"",
        "{\"$literal\":{\"$oops\":\"$$NOW\"}}",
        "\"$queue\"",
        "{\"a.b\":{\"$gt\":1},\"a\":2}",
        " {\"b\":1,\n\t\"a\":2, \"a\" : 3} ",
    ]
    .map(String::from)
    .into_iter()
    .chain([format!("{}{}", "[".repeat(50_000), "]".repeat(50_000)), large])
    .collect()
}

/// E3, A16.
#[tokio::test]
async fn json_comes_back_byte_for_byte() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    for text in texts() {
        backend.enqueue(&[job(&text)]).await.expect("stores");
        let claimed = claim_one(&backend).await;
        assert_eq!(claimed.payload.as_str(), text);
        Transitioner::new(&backend).apply(&claimed.execution, &complete(&text)).await.expect("settles");
        let job = backend.get(claimed.id()).await.expect("reads").expect("a job");
        assert_eq!((job.payload.as_str(), job.result.expect("a result").as_str()), (text.as_str(), text.as_str()));
        let rerun = Transitioner::new(&backend).apply(&job.execution, &Transition::Rerun).await.expect("runs again");
        let replace = Transition::Replace { payload: Json::from_text(&*text).expect("JSON"), available: When::Now };
        Transitioner::new(&backend).apply(rerun.execution(), &replace).await.expect("replaces");
        let claimed = claim_one(&backend).await;
        assert_eq!((claimed.payload.as_str(), claimed.result), (text.as_str(), None));
        Transitioner::new(&backend).apply(&claimed.execution, &complete("1")).await.expect("settles");
    }
    place.gone().await;
}

/// D5, D6, B12: in filters, in expressions, and in the indexes.
#[tokio::test]
async fn names_that_mean_something_to_mongodb() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let names = ["$queue", "$$NOW", "$$ROOT", "$", "a.b", ".", "{\"$gt\":\"\"}", "o'brien", "a\nb", "é", "e\u{301}"];
    for text in names {
        let jobs =
            [NewJob { queue: name(text), kind: name(text), ..keyed(text) }, NewJob { queue: name(text), ..keyed("") }];
        let outcomes = backend.enqueue(&jobs).await.expect("stores");
        assert!(matches!(outcomes[..], [Enqueued::New(_), Enqueued::New(_)]), "{text:?}: {outcomes:?}");
        let twin = NewJob { queue: name(text), ..keyed(text) };
        let duplicate = backend.enqueue(&[twin]).await.expect("is an outcome");
        assert_eq!(duplicate, [Enqueued::Duplicate { existing: jobs[0].id }], "{text:?}");
        let worker = WorkerId::new(&name(text));
        for rows in [1, 2] {
            let request = ClaimRequest::new(name(text), [name(text)], worker.clone(), lease(), limit(rows));
            let claimed = backend.claim(&request.expect("a request")).await.expect("claims").jobs;
            assert_eq!(claimed.len(), 1, "{text:?}");
            assert_eq!(claimed[0].execution.claimed_by.as_ref(), Some(&worker));
            assert_eq!(backend.extend_leases(&[held(&claimed[0])], lease()).await.expect("beats"), [Beat::Extended]);
            let retry = Transition::Retry { error: text.into(), available: When::Now };
            let updates =
                [decide(&claimed[0], &retry), UpdateRequest { id: JobId::new(), ..decide(&claimed[0], &retry) }];
            let answers = backend.update_many_if_current(&updates[..rows]).await.expect("settles");
            assert!(matches!(answers[0], Update::Applied(_)), "{text:?}: {answers:?}");
        }
        let errors = backend.get(jobs[0].id).await.expect("reads").expect("a job").errors;
        assert!(errors.len() == 2 && errors.iter().all(|failure| failure.text.as_str() == text), "{errors:?}");
    }
    place.gone().await;
}

/// Jobs of one claim share statements, each with its own values; and what the same decision wrote before is not taken for
/// written by this call.
#[tokio::test]
async fn one_claim_settled_in_one_batch() {
    let Some(place) = Place::new().await else { return };
    let (client, sent) = noted(&place.url).await;
    let backend = patient(client, place.raw.name()).await;
    backend.migrate().await.expect("migrates");
    let jobs = running(&backend, 12).await;
    let seconds = |number: usize| i64::try_from(1_000 * number).expect("small");
    let when = |number| When::After(Delay::from_millis(seconds(number)).expect("a delay"));
    let of = |number: usize| match number % 3 {
        0 => complete(&number.to_string()),
        1 => Transition::Retry { error: format!("$no {number}").into(), available: when(number) },
        _ => Transition::Fail { error: format!("$never {number}").into() },
    };
    let mut updates: Vec<_> = jobs.iter().enumerate().map(|(number, job)| decide(job, &of(number))).collect();
    // A row that somebody else has settled, one that the same decision has, and one that is not there.
    let other = decide(&jobs[3], &Transition::Release);
    backend.update_if_current(other.id, &other.current, &other.patch).await.expect("settles");
    backend.update_if_current(updates[6].id, &updates[6].current, &updates[6].patch).await.expect("settles");
    updates[9].id = JobId::new();
    sent.take();
    let answers = backend.update_many_if_current(&updates).await.expect("settles");
    let commands = sent.take();
    assert_eq!(commands.iter().map(name_of).collect::<Vec<_>>(), ["update", "find"]);
    assert_eq!(commands[0].get_array("updates").expect("statements").len(), 3, "one for each kind of move");
    for (number, answer) in answers.iter().enumerate() {
        let row = backend.get(updates[number].id).await.expect("reads");
        match (answer, row) {
            (Update::Conflict(row), Some(job)) if [3, 6].contains(&number) => assert_eq!(*row, job.execution),
            (Update::Missing, None) if number == 9 => {}
            (Update::Applied(row), Some(job)) => {
                assert_eq!(*row, job.execution);
                let text = job.errors.first().map(|failure| failure.text.as_str().to_owned());
                let result = job.result.as_ref().map(|result| result.as_str().to_owned());
                let expected = match number % 3 {
                    0 => (Some(number.to_string()), None),
                    1 => (None, Some(format!("$no {number}"))),
                    _ => (None, Some(format!("$never {number}"))),
                };
                assert_eq!((result, text), expected);
                if number % 3 == 1 {
                    let failed_at = job.errors[0].at;
                    assert_eq!(job.available_at, failed_at.saturating_add_millis(seconds(number)));
                }
            }
            other => panic!("{number}: {other:?}"),
        }
    }
    // All of it again: nothing is applied twice.
    let again = backend.update_many_if_current(&updates).await.expect("answers");
    assert!(again.iter().all(|answer| !matches!(answer, Update::Applied(_))), "{again:?}");
    place.gone().await;
}

/// Whatever is written by whichever call, no field is ever left out.
#[tokio::test]
async fn every_field_is_always_there() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    backend.enqueue(&[keyed("k"), job("1"), job("2")]).await.expect("stores");
    let jobs = backend.list(&ListFilter::default(), None, limit(10)).await.expect("lists").items;
    let fields: Vec<_> = place.row(jobs[0].id()).await.keys().cloned().collect();
    assert_eq!(fields.len(), 26, "{fields:?}");
    let claimed = backend.claim(&request(3)).await.expect("claims").jobs;
    let moves = [
        Transition::Release,
        Transition::Fail { error: "no".into() },
        Transition::Complete { result: Some(Json::null()) },
    ];
    let updates: Vec<_> = claimed.iter().zip(&moves).map(|(job, transition)| decide(job, transition)).collect();
    backend.update_many_if_current(&updates).await.expect("settles");
    let again = claim_one(&backend).await;
    let held = [held(&again)];
    backend.extend_leases(&held, lease()).await.expect("beats");
    begin_step(&backend, &again.execution, &name("s")).await.expect("begins");
    let suspension = Suspension::new(&again.execution, name("w"), Some(name("e")), When::Now).expect("legal");
    suspension.clone().submit(&backend).await.expect("waits");
    let event = NewEvent { key: name("e"), payload: Json::null(), keep: Delay::ZERO };
    backend.emit(&event).await.expect("emits");
    let again = claim_one(&backend).await;
    Suspension::new(&again.execution, name("v"), None, When::Now)
        .expect("legal")
        .submit(&backend)
        .await
        .expect("waits");
    backend.time_out_waits(limit(5)).await.expect("sweeps");
    for job in &jobs {
        assert_eq!(place.row(job.id()).await.keys().cloned().collect::<Vec<_>>(), fields);
    }
    place.gone().await;
}

/// A field that somebody has taken away is null, to the reader and to the comparison.
#[tokio::test]
async fn a_missing_field_is_null() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let job = job("1");
    backend.enqueue(std::slice::from_ref(&job)).await.expect("stores");
    let fields = doc! { "claimed_by": "", "claimed_at": "", "attempted_at": "", "lease_expires_at": "", "result": "" };
    let update = doc! { "q": { "_id": uuid(job.id.as_uuid()) }, "u": { "$unset": fields } };
    place.run(doc! { "update": "fenced_jobs", "updates": [update] }).await;
    let seen = backend.get(job.id).await.expect("reads").expect("a job");
    assert_eq!((&seen.execution.claimed_by, &seen.result), (&None, &None));
    let snooze = Transition::Snooze { available: When::Now };
    let snoozed = Transitioner::new(&backend).apply(&seen.execution, &snooze).await.expect("matches");
    let updates = [
        Decision::new(snoozed.execution(), &snooze).expect("legal").request().clone(),
        decide(&Job { execution: Execution { id: JobId::new(), ..seen.execution.clone() }, ..seen }, &snooze),
    ];
    let answers = backend.update_many_if_current(&updates).await.expect("matches");
    assert!(matches!(answers[..], [Update::Applied(_), Update::Missing]), "{answers:?}");
    place.gone().await;
}

/// What a shell writes: doubles for numbers, another subtype for bytes.
#[tokio::test]
async fn values_of_other_types() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let jobs = [job("1"), job("2")];
    backend.enqueue(&jobs).await.expect("stores");
    place.set(jobs[0].id, doc! { "attempt": 2.0, "max_attempts": 3_i32, "fence": 7.0, "priority": 5.0 }).await;
    // The same bytes in another subtype are another id, which nobody asks for.
    let stranger = Binary { subtype: BinarySubtype::Generic, bytes: jobs[1].id.as_uuid().as_bytes().to_vec() };
    let rows = place.raw.collection::<Document>("fenced_jobs");
    for id in [Bson::from(stranger), Bson::from(1), Bson::from("x")] {
        let mut row = place.row(jobs[1].id).await;
        row.insert("_id", id);
        rows.insert_one(row).await.expect("stores");
    }
    let claimed = backend.claim(&request(10)).await.expect("claims");
    assert!(claimed.unreadable.is_empty(), "{claimed:?}");
    let ids: Vec<_> = claimed.jobs.iter().map(Job::id).collect();
    assert_eq!(ids, [jobs[0].id, jobs[1].id], "a row without a UUID is no job");
    assert_eq!((claimed.jobs[0].execution.attempt, claimed.jobs[0].execution.fence), (3, 8));
    let retry = Transition::Retry { error: "no".into(), available: When::Now };
    let settled = Transitioner::new(&backend).apply(&claimed.jobs[0].execution, &retry).await.expect("settles");
    assert_eq!(settled.execution().state, JobState::Failed, "three of three attempts");
    let page = backend.list(&ListFilter::default(), None, limit(10)).await.expect("lists");
    assert_eq!((page.items.len(), page.unreadable.len()), (2, 0));
    place.gone().await;
}

/// B9, C12: claimed or found beside the others, and its failure can be recorded whatever is wrong with it.
#[tokio::test]
async fn rows_that_cannot_be_read_come_back_beside_the_others() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let long_ago = DateTime::from_millis(-90_000_000_000_000_000);
    for (field, value, settles) in [
        ("payload", Bson::from("{oops"), true),
        ("payload", Bson::Null, true),
        ("errors", Bson::from("oops"), true),
        ("errors", Bson::from(vec![Bson::from("oops"), Bson::from(doc! {}), Bson::Null]), true),
        ("result", Bson::from(1), true),
        ("available_at", Bson::from(long_ago), true),
        ("available_at", Bson::from(1), true),
        ("created_at", Bson::from("now"), true),
        ("max_attempts", Bson::from(0), false),
        ("attempt", Bson::from(-2), false),
        ("attempt", Bson::from("two"), false),
        ("fence", Bson::from("two"), false),
    ] {
        let what = format!("{field} = {value}");
        let jobs = [job("1"), job("2")];
        backend.enqueue(&jobs).await.expect("stores");
        place.set(jobs[0].id, doc! { field: value }).await;
        let claimed = backend.claim(&request(2)).await.expect("claims");
        assert_eq!(claimed.jobs.iter().map(Job::id).collect::<Vec<_>>(), [jobs[1].id], "{what}");
        let [unreadable] = &claimed.unreadable[..] else { panic!("{what}: {claimed:?}") };
        assert_eq!(unreadable.id, jobs[0].id);
        assert!(unreadable.reason.starts_with(field), "{}", unreadable.reason);
        assert_eq!(unreadable.execution.is_some(), settles, "{what}");
        let error = backend.get(jobs[0].id).await;
        assert_error(error, ErrorKind::Schema, Certainty::NotApplied);
        let page = backend.list(&ListFilter::default(), None, limit(10)).await.expect("lists");
        assert_eq!((page.items.len(), page.unreadable.len(), page.next), (1, 1, None));
        let fail = Transition::Fail { error: "cannot be read".into() };
        match &unreadable.execution {
            Some(execution) => {
                let failed = Transitioner::new(&backend).apply(execution, &fail).await.expect("settles");
                assert_eq!(failed.execution().state, JobState::Failed);
            }
            None => {
                // Neither matched nor taken for a conflict, alone and in a batch.
                let mut update = decide(&claimed.jobs[0], &fail);
                update.id = jobs[0].id;
                let before = place.row(jobs[0].id).await;
                let answer = backend.update_if_current(update.id, &update.current, &update.patch).await;
                assert!(matches!(answer, Ok(Update::Unreadable(_))), "{what}: {answer:?}");
                let updates = [update, decide(&claimed.jobs[0], &complete("1"))];
                let answers = backend.update_many_if_current(&updates).await.expect("answers for each");
                assert!(matches!(answers[..], [Update::Unreadable(_), Update::Applied(_)]), "{what}: {answers:?}");
                assert_eq!(place.row(jobs[0].id).await, before, "{what}");
            }
        }
        place.raw.collection::<Document>("fenced_jobs").delete_many(doc! {}).await.expect("empties");
    }
    place.gone().await;
}

#[tokio::test]
async fn states_of_a_newer_version_are_left_alone() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let jobs = [keyed("k"), keyed("l")];
    backend.enqueue(&jobs).await.expect("stores");
    place.set(jobs[0].id, doc! { "state": "paused" }).await;
    place.set(jobs[1].id, doc! { "state": "parked" }).await;
    assert_eq!(backend.claim(&request(9)).await.expect("claims"), Claimed::default());
    let counts = backend.counts().await.expect("counts");
    assert_eq!(counts, [Count { queue: name("mail"), state: None, jobs: 2 }]);
    assert_eq!(backend.enqueue(&jobs[..1]).await.expect("is known"), [Enqueued::Existing(jobs[0].id)]);
    let other = backend.enqueue(&[keyed("k")]).await.expect("is an outcome");
    assert_eq!(other, [Enqueued::Duplicate { existing: jobs[0].id }], "it may well be active");
    assert!(backend.stale(None, limit(9)).await.expect("lists").items.is_empty());
    place.gone().await;
}

/// A queue's name that cannot be read does not keep the others from being counted.
#[tokio::test]
async fn counts_beside_a_broken_row() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let jobs = [job("1"), job("2")];
    backend.enqueue(&jobs).await.expect("stores");
    place.set(jobs[0].id, doc! { "queue": 7 }).await;
    let counts = backend.counts().await.expect("counts");
    assert_eq!(counts.iter().map(|count| count.jobs).collect::<Vec<_>>(), [1]);
    place.gone().await;
}

/// A lease that is no date is stale before all that are dates.
#[tokio::test]
async fn leases_of_other_types() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let claimed = running(&backend, 4).await;
    for (job, lease) in claimed.iter().zip([Bson::from(DateTime::from_millis(1)), Bson::from("x"), Bson::Null]) {
        place.set(job.id(), doc! { "lease_expires_at": lease }).await;
    }
    let page = backend.stale(None, limit(9)).await.expect("lists");
    assert_eq!(page.items.iter().map(|row| row.id).collect::<Vec<_>>(), [claimed[2].id(), claimed[0].id()]);
    assert_eq!(page.unreadable.iter().map(|row| row.id).collect::<Vec<_>>(), [claimed[1].id()]);
    let first = backend.stale(None, limit(1)).await.expect("lists");
    let second = backend.stale(first.next, limit(1)).await.expect("lists");
    let third = backend.stale(second.next, limit(1)).await.expect("lists");
    assert_eq!((first.items.len(), second.unreadable.len(), third.items.len()), (1, 1, 1));
    assert_eq!(third.next, None);
    place.gone().await;
}

/// D9, D10, and what a batch says of itself.
#[tokio::test]
async fn a_batch_is_answered_item_by_item() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let (first, second) = (keyed("k"), keyed("k"));
    let outcomes = backend.enqueue(&[first.clone(), second.clone(), first.clone(), job("1")]).await.expect("stores");
    assert_eq!(outcomes[0], Enqueued::New(first.id));
    assert_eq!(outcomes[1], Enqueued::Duplicate { existing: first.id });
    assert_eq!(outcomes[2], Enqueued::Existing(first.id));
    let other = NewJob { payload: Json::null(), ..first.clone() };
    let answer = backend.enqueue(&[job("2"), other]).await;
    let error = assert_error(answer, ErrorKind::IdReused, Certainty::NotApplied);
    assert_eq!(error.index(), Some(1));
    assert_eq!(backend.counts().await.expect("counts")[0].jobs, 2, "nothing was stored");

    // Of a batch that names a job twice, the second update sees what the first one did.
    let claimed = backend.claim(&request(9)).await.expect("claims").jobs;
    let held = claimed.iter().find(|job| job.id() == first.id).expect("claimed");
    let updates = [decide(held, &complete("1")), decide(held, &complete("2"))];
    let answers = backend.update_many_if_current(&updates).await.expect("updates");
    let [Update::Applied(applied), Update::Conflict(current)] = &answers[..] else { panic!("{answers:?}") };
    assert_eq!(applied, current);
    place.gone().await;
}

/// More kinds than one walk is merged from: all are found, in the order of the queue.
#[tokio::test]
async fn hundreds_of_kinds() {
    let Some(place) = Place::new().await else { return };
    let backend = place.migrated().await;
    let kinds: Vec<_> = (0..250).map(|number| name(&format!("kind {number}"))).collect();
    let jobs: Vec<_> = (0..500_usize)
        .map(|number| NewJob { kind: kinds[number * 7 % 250].clone(), ..job(&number.to_string()) })
        .collect();
    backend.enqueue(&jobs).await.expect("stores");
    let mut found = Vec::new();
    for rows in [1, 20, 1, 1000] {
        let request = ClaimRequest::new(name("mail"), kinds.clone(), worker(), lease(), limit(rows));
        found.extend(backend.claim(&request.expect("a request")).await.expect("claims").jobs.iter().map(Job::id));
    }
    let mut expected: Vec<_> = jobs.iter().map(|job| job.id).collect();
    expected.sort();
    assert_eq!(found, expected);
    place.gone().await;
}
