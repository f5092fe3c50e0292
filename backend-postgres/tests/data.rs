//! What is stored comes back as it was, and what cannot be read keeps nothing else back.

mod common;

use backend_postgres::PostgresBackend;
use common::*;
use queue_core::*;

fn texts() -> Vec<String> {
    let large = format!("\"{}\"", "\\\"é😀".repeat(131_071));
    assert!(large.len() > 1024 * 1024 - 100 && large.len() <= 1024 * 1024, "{}", large.len());
    [
        "null",
        "false",
        "0",
        "\"\"",
        "{}",
        "1e400",
        "-0.0",
        "9007199254740993",
        "18446744073709551615",
        "\"\\u0000\"",
        "\"\\ud800\"",
        "\"😀 \u{7f}\u{2028}\"",
        " {\"b\":1,\n\t\"a\":2, \"a\" : 3} ",
        "\"{prefix}'; --\"",
    ]
    .map(String::from)
    .into_iter()
    .chain([format!("{}{}", "[".repeat(50_000), "]".repeat(50_000)), large])
    .collect()
}

/// E3, A16.
#[tokio::test]
async fn json_comes_back_byte_for_byte() {
    let (_scratch, backend) = migrated().await;
    for text in texts() {
        backend.enqueue(&[job(&text)]).await.expect("stores");
        let claimed = claim_one(&backend).await;
        assert_eq!(claimed.payload.as_str(), text);
        Transitioner::new(&backend).apply(&claimed.execution, &complete(&text)).await.expect("settles");
        let job = backend.get(claimed.id()).await.expect("reads").expect("a job");
        assert_eq!((job.payload.as_str(), job.result.expect("a result").as_str()), (text.as_str(), text.as_str()));
        // The other way that a payload is written.
        let rerun = Transitioner::new(&backend).apply(&job.execution, &Transition::Rerun).await.expect("runs again");
        let replace = Transition::Replace { payload: Json::from_text(&*text).expect("JSON"), available: When::Now };
        Transitioner::new(&backend).apply(rerun.execution(), &replace).await.expect("replaces");
        let claimed = claim_one(&backend).await;
        assert_eq!((claimed.payload.as_str(), claimed.result), (text.as_str(), None));
        Transitioner::new(&backend).apply(&claimed.execution, &complete("1")).await.expect("settles");
    }
}

/// D5, D6, B12.
#[tokio::test]
async fn names_and_keys_are_compared_byte_for_byte() {
    let (_scratch, backend) = migrated().await;
    let names =
        ["o'brien", "`", "a\nb", "Mail", "mail", "mail ", "é", "e\u{301}", "e", "\\", "\"", "%", &"😀".repeat(63)];
    for text in names {
        let jobs =
            [NewJob { queue: name(text), kind: name(text), ..keyed(text) }, NewJob { queue: name(text), ..keyed("") }];
        let outcomes = backend.enqueue(&jobs).await.expect("stores");
        assert!(matches!(outcomes[..], [Enqueued::New(_), Enqueued::New(_)]), "{text:?}: {outcomes:?}");
    }
    for text in names {
        let request = ClaimRequest::new(name(text), [name(text)], worker(), lease(), limit(9)).expect("a request");
        let claimed = backend.claim(&request).await.expect("claims").jobs;
        assert_eq!(claimed.len(), 1);
        assert_eq!((claimed[0].queue.as_str(), claimed[0].kind.as_str()), (text, text));
        assert_eq!(claimed[0].unique_key, Some(text.try_into().expect("a key")));
    }
}

#[tokio::test]
async fn the_newest_failures_are_kept_with_the_store_s_time() {
    let scratch = Scratch::new();
    let clock = ClockOffset::default();
    let backend = PostgresBackend::connect_with(scratch.options().clock(clock.clone())).await.expect("connects");
    backend.migrate().await.expect("migrates");
    backend.enqueue(&[job("1")]).await.expect("stores");
    for attempt in 1..=12 {
        let claimed = claim_one(&backend).await;
        let text = format!("{attempt}: \0 😀 \" \\ \u{1} {}", "x".repeat(5_000_000 / 12));
        let retry = Transition::Retry { error: text.clone().into(), available: When::Now };
        Transitioner::new(&backend).apply(&claimed.execution, &retry).await.expect("settles");
        let job = backend.get(claimed.id()).await.expect("reads").expect("a job");
        let last = job.errors.last().expect("an error");
        assert_eq!((last.attempt, last.fence, &last.worker), (attempt, u64::from(attempt), &Some(worker())));
        assert_eq!((&last.text, last.at), (&FailureText::from(text), job.available_at));
        assert_eq!(job.errors.len(), usize::try_from(attempt).expect("small").min(Failure::KEPT));
        assert!(job.errors.is_sorted_by_key(|failure| failure.attempt));
        clock.advance(Delay::from_millis(1000).expect("a delay"));
    }
}

/// B9, C12: claimed or found beside the others, and its failure can be recorded whatever is wrong with it.
#[tokio::test]
async fn rows_that_cannot_be_read_come_back_beside_the_others() {
    for (column, value, settles) in [
        ("payload", "'{oops'", true),
        ("errors", "'\"oops\"'", true),
        ("errors", "'{}'", true),
        ("errors", "'[\"oops\", 1, {}, null]'", true),
        ("result", "'oops'", true),
        ("unique_key", "repeat('k', 256)", true),
        ("priority", "priority + 300", false),
        ("available_at", "'-infinity'", true),
        ("created_at", "'infinity'", true),
        ("created_at", "'200000-01-01'", true),
        ("finished_at", "'0044-03-15 BC'", true),
        ("max_attempts", "0", false),
        ("attempt", "-2", false),
        ("attempt", "9223372036854775807", true),
        ("fence", "9223372036854775807", true),
    ] {
        let (scratch, backend) = migrated().await;
        let jobs = [job("1"), job("2")];
        backend.enqueue(&jobs).await.expect("stores");
        let broken = jobs[0].id.as_uuid().simple().to_string();
        scratch.run(&format!("UPDATE {{schema}}.jobs SET {column} = {value} WHERE id = '{broken}'")).await;
        let claimed = backend.claim(&request(2)).await.expect("claims");
        let others: Vec<_> = claimed.jobs.iter().map(Job::id).collect();
        if column == "priority" || value == "9223372036854775807" {
            assert!(others.contains(&jobs[1].id) && claimed.unreadable.is_empty(), "{column} = {value}");
            continue;
        }
        assert_eq!(others, [jobs[1].id], "{column} = {value}");
        let [unreadable] = &claimed.unreadable[..] else { panic!("{column} = {value}: {claimed:?}") };
        assert_eq!(unreadable.id, jobs[0].id);
        assert!(unreadable.reason.starts_with(column), "{}", unreadable.reason);
        assert_eq!(unreadable.execution.is_some(), settles, "{column} = {value}");
        let error = backend.get(jobs[0].id).await.expect_err("cannot be read");
        assert_eq!((error.kind(), error.certainty()), (ErrorKind::Schema, Certainty::NotApplied));
        let page = backend.list(&ListFilter::default(), None, limit(10)).await.expect("lists");
        assert_eq!((page.items.len(), page.unreadable.len(), page.next), (1, 1, None));
        if let Some(execution) = &unreadable.execution {
            let fail = Transition::Fail { error: "cannot be read".into() };
            let failed = Transitioner::new(&backend).apply(execution, &fail).await.expect("settles");
            assert_eq!(failed.execution().state, JobState::Failed);
        }
    }
}

#[tokio::test]
async fn states_of_a_newer_version_are_left_alone() {
    let (scratch, backend) = migrated().await;
    let jobs = [keyed("k"), keyed("l")];
    backend.enqueue(&jobs).await.expect("stores");
    scratch.run("UPDATE {schema}.jobs SET state = 'paused' WHERE unique_key = 'k'").await;
    scratch.run("UPDATE {schema}.jobs SET state = 'parked' WHERE unique_key = 'l'").await;
    assert_eq!(backend.claim(&request(9)).await.expect("claims"), Claimed::default());
    let counts = backend.counts().await.expect("counts");
    assert_eq!(counts, [Count { queue: name("mail"), state: None, jobs: 2 }]);
    assert_eq!(backend.enqueue(&jobs[..1]).await.expect("is known"), [Enqueued::Existing(jobs[0].id)]);
    let other = backend.enqueue(&[keyed("k")]).await.expect("is an outcome");
    assert_eq!(other, [Enqueued::Duplicate { existing: jobs[0].id }], "it may well be active");
    assert!(backend.stale(None, limit(9)).await.expect("lists").items.is_empty());
}

/// D9, D10, and what a batch says of itself.
#[tokio::test]
async fn a_batch_is_answered_item_by_item() {
    let (_scratch, backend) = migrated().await;
    let (first, second) = (keyed("k"), keyed("k"));
    let outcomes = backend.enqueue(&[first.clone(), second.clone(), first.clone(), job("1")]).await.expect("stores");
    assert_eq!(outcomes[0], Enqueued::New(first.id));
    assert_eq!(outcomes[1], Enqueued::Duplicate { existing: first.id });
    assert_eq!(outcomes[2], Enqueued::Existing(first.id));
    let other = NewJob { payload: Json::null(), ..first.clone() };
    let error = backend.enqueue(&[job("2"), other]).await.expect_err("another job");
    assert_eq!((error.kind(), error.certainty(), error.index()), (ErrorKind::IdReused, Certainty::NotApplied, Some(1)));
    assert_eq!(backend.counts().await.expect("counts")[0].jobs, 2, "nothing was stored");

    // Of a batch that names a job twice, the second update sees what the first one did.
    let claimed = backend.claim(&request(9)).await.expect("claims").jobs;
    let held = claimed.iter().find(|job| job.id() == first.id).expect("claimed");
    let update = |transition: &Transition| Decision::new(&held.execution, transition).expect("legal").request().clone();
    let answers =
        backend.update_many_if_current(&[update(&complete("1")), update(&complete("2"))]).await.expect("updates");
    let [Update::Applied(applied), Update::Conflict(current)] = &answers[..] else { panic!("{answers:?}") };
    assert_eq!(applied, current);
    assert_eq!(
        backend.get(first.id).await.expect("reads").expect("a job").result,
        Some(Json::from_text("1").expect("JSON"))
    );
}

/// Of the same id held twice, only the claim that is there is renewed.
#[tokio::test]
async fn a_beat_tells_an_old_claim_from_the_present_one() {
    let (_scratch, backend) = migrated().await;
    backend.enqueue(&[job("1")]).await.expect("stores");
    let old = Held::of(&claim_one(&backend).await.execution).expect("held");
    let job = backend.get(old.id).await.expect("reads").expect("a job");
    Transitioner::new(&backend).apply(&job.execution, &Transition::Release).await.expect("releases");
    let new = Held::of(&claim_one(&backend).await.execution).expect("held");
    let missing = Held { id: JobId::new(), ..new.clone() };
    let beats = backend.extend_leases(&[old, new.clone(), missing, new], lease()).await.expect("beats");
    assert_eq!(beats, [Beat::Lost, Beat::Extended, Beat::Lost, Beat::Extended]);
}

/// A row whose lease is gone is no row whose lease has run out: a conflict, and not a missing row either.
#[tokio::test]
async fn a_lease_that_is_missing_is_not_the_one_that_was_seen() {
    let (scratch, backend) = migrated().await;
    backend.enqueue(&[job("1")]).await.expect("stores");
    let claimed = claim_one(&backend).await;
    scratch.run("UPDATE {schema}.jobs SET lease_expires_at = now() - interval '1 hour'").await;
    let seen = backend.stale(None, limit(1)).await.expect("lists").items.remove(0);
    scratch.run("UPDATE {schema}.jobs SET lease_expires_at = NULL").await;
    let recover = Decision::new(&seen, &Transition::Recover).expect("legal").request().clone();
    let answers = backend.update_many_if_current(&[recover]).await.expect("answers");
    assert_eq!(answers, [Update::Conflict(Execution { lease_expires_at: None, ..claimed.execution })]);
}

/// What a place to lock is for is over with the transaction that made it; and if one stays it is no event.
#[tokio::test]
async fn a_place_to_lock_is_no_event() {
    let (scratch, backend) = migrated().await;
    backend.enqueue(&[job("1"), job("2")]).await.expect("stores");
    let claimed = backend.claim(&request(2)).await.expect("claims").jobs;
    let places = "SELECT count(*) FROM {schema}.events".replace("{schema}", scratch.schema.as_str());
    let suspension = |job: &Job, step: &str| {
        Suspension::new(&job.execution, name(step), Some(name("e")), When::At(Timestamp::MAX)).expect("legal")
    };
    suspension(&claimed[0], "w").submit(&backend).await.expect("waits");
    until(&places, 0).await;
    let refused = suspension(&claimed[0], "w").submit(&backend).await;
    assert!(matches!(refused, Err(StepError::Transition(TransitionError::Conflict(_)))), "{refused:?}");
    finish_step(&backend, &claimed[1].execution, &name("done"), &Json::null()).await.expect("finishes");
    let ended = suspension(&claimed[1], "done").submit(&backend).await.expect("has ended");
    assert_eq!(ended, Suspended::Came(Json::null()));
    until(&places, 0).await;

    scratch.run("INSERT INTO {schema}.events (key, kept_until) VALUES ('e', '2500-01-01'), ('f', '2020-01-01')").await;
    let event = |payload| NewEvent { key: name("e"), payload, keep: Delay::MAX };
    assert_eq!(backend.emit(&event(Json::null())).await.expect("emits"), Emitted::New { woken: 1 });
    assert_eq!(backend.emit(&event(Json::null())).await.expect("emits"), Emitted::Kept(Json::null()));
    assert_eq!(backend.purge_events(limit(9)).await.expect("purges"), 0, "the other was none");
    until(&places, 1).await;
}

/// A step of a newer version, or a broken one, is told, and stays.
#[tokio::test]
async fn steps_that_cannot_be_read() {
    for (column, value) in [
        ("state", "'of a newer version'"),
        ("value", "'{oops'"),
        ("value", "NULL"),
        ("fence", "-1"),
        ("name", "repeat('n', 256)"),
    ] {
        let (scratch, backend) = migrated().await;
        backend.enqueue(&[job("1")]).await.expect("stores");
        let claimed = claim_one(&backend).await;
        finish_step(&backend, &claimed.execution, &name("s"), &Json::null()).await.expect("finishes");
        scratch.run(&format!("UPDATE {{schema}}.steps SET {column} = {value}")).await;
        assert_error(backend.steps(claimed.id()).await, ErrorKind::Schema);
        let current = claimed.execution.fingerprint();
        let suspension = Transition::Suspend { until: When::Now }.plan(&claimed.execution).expect("legal");
        for action in [StepAction::Begin, StepAction::Wait(NewWait { event: None, suspension })] {
            let write = StepWrite { id: claimed.id(), current: current.clone(), name: name("s"), action };
            if column != "name" {
                assert_error(backend.write_step(&write).await, ErrorKind::Schema);
            }
        }
        assert_error(backend.steps(claimed.id()).await, ErrorKind::Schema);
        assert_eq!(backend.get(claimed.id()).await.expect("reads"), Some(claimed), "{column} = {value}");
    }
}

/// A program of the first schema knows no steps, and purges their jobs all the same.
#[tokio::test]
async fn steps_go_with_their_job_whoever_deletes_it() {
    let (scratch, backend) = migrated().await;
    backend.enqueue(&[job("1")]).await.expect("stores");
    let claimed = claim_one(&backend).await;
    begin_step(&backend, &claimed.execution, &name("s")).await.expect("begins");
    scratch.run("DELETE FROM {schema}.jobs").await;
    assert_eq!(backend.steps(claimed.id()).await.expect("reads"), []);
}
