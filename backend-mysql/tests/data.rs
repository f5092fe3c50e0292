//! What is stored comes back as it was, and what cannot be read keeps nothing else back.

mod common;

use backend_mysql::MysqlBackend;
use common::*;
use queue_core::*;
use sqlx::Row;

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
        "\"{prefix}'; -- ? \\\\ %\"",
    ]
    .map(String::from)
    .into_iter()
    // Deeper than the servers' own parsers of JSON go.
    .chain([format!("{}{}", "[".repeat(50_000), "]".repeat(50_000)), large])
    .collect()
}

/// E3, A16.
#[tokio::test]
async fn json_comes_back_byte_for_byte() {
    on_each_server(async |database, backend| {
        let latin1 = database.pool_of(1, "SET NAMES latin1; SET sql_mode = 'ANSI,NO_BACKSLASH_ESCAPES'").await;
        let lent = MysqlBackend::from_pool(latin1).await.expect("a handle");
        for handle in [backend, &lent] {
            for text in texts() {
                handle.enqueue(&[job(&text)]).await.expect("stores");
                let claimed = claim_one(handle).await;
                assert_eq!(claimed.payload.as_str(), text);
                Transitioner::new(handle).apply(&claimed.execution, &complete(&text)).await.expect("settles");
                let job = backend.get(claimed.id()).await.expect("reads").expect("a job");
                let kept = (job.payload.as_str(), job.result.as_ref().expect("a result").as_str());
                assert_eq!(kept, (text.as_str(), text.as_str()));
                // The other way that a payload is written.
                let rerun =
                    Transitioner::new(handle).apply(&job.execution, &Transition::Rerun).await.expect("runs again");
                let replace =
                    Transition::Replace { payload: Json::from_text(&*text).expect("JSON"), available: When::Now };
                Transitioner::new(handle).apply(rerun.execution(), &replace).await.expect("replaces");
                let claimed = claim_one(handle).await;
                assert_eq!((claimed.payload.as_str(), claimed.result), (text.as_str(), None));
                Transitioner::new(handle).apply(&claimed.execution, &complete("1")).await.expect("settles");
            }
        }
        lent.close().await;
    })
    .await;
}

/// The texts of a batch travel together: each row gets its own.
#[tokio::test]
async fn a_batch_of_texts_is_cut_where_they_end() {
    on_each_server(async |_, backend| {
        let jobs: Vec<_> = texts().iter().map(|text| job(text)).collect();
        backend.enqueue(&jobs).await.expect("stores");
        let claimed = backend.claim(&request(100)).await.expect("claims").jobs;
        assert_eq!(claimed.len(), jobs.len());
        let end = |job: &Job| Transition::Complete { result: Some(job.payload.clone()) };
        let updates: Vec<_> = claimed.iter().map(|job| decide(&job.execution, &end(job))).collect();
        backend.update_many_if_current(&updates).await.expect("settles");
        for job in jobs {
            let stored = backend.get(job.id).await.expect("reads").expect("a job");
            assert_eq!((&stored.payload, stored.result.as_ref()), (&job.payload, Some(&job.payload)));
        }
    })
    .await;
}

/// D5, D6, B12.
#[tokio::test]
async fn names_and_keys_are_compared_byte_for_byte() {
    on_each_server(async |_, backend| {
        let names = [
            "o'brien",
            "`",
            "a\nb",
            "Mail",
            "mail",
            "mail ",
            "é",
            "e\u{301}",
            "e",
            "\\",
            "\"",
            "%",
            ",",
            &"😀".repeat(63),
        ];
        for text in names {
            let jobs = [
                NewJob { queue: name(text), kind: name(text), ..keyed(text) },
                NewJob { queue: name(text), ..keyed("") },
            ];
            let outcomes = backend.enqueue(&jobs).await.expect("stores");
            assert!(matches!(outcomes[..], [Enqueued::New(_), Enqueued::New(_)]), "{text:?}: {outcomes:?}");
        }
        for text in names {
            let request = ClaimRequest::new(name(text), [name(text)], worker(), lease(), limit(9)).expect("a request");
            let claimed = backend.claim(&request).await.expect("claims").jobs;
            assert_eq!(claimed.len(), 1, "{text:?}");
            assert_eq!((claimed[0].queue.as_str(), claimed[0].kind.as_str()), (text, text));
            assert_eq!(claimed[0].unique_key, Some(text.try_into().expect("a key")));
        }
    })
    .await;
}

#[tokio::test]
async fn the_newest_failures_are_kept_with_the_store_s_time() {
    on_each_server(async |database, _| {
        let clock = ClockOffset::default();
        let backend = MysqlBackend::connect_with(database.options().clock(clock.clone())).await.expect("connects");
        backend.enqueue(&[job("1")]).await.expect("stores");
        for attempt in 1..=12 {
            let claimed = claim_one(&backend).await;
            let text = format!("{attempt}: \0 😀 \" \\ \u{1} ]}} {}", "x".repeat(5_000_000 / 12));
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
        backend.close().await;
    })
    .await;
}

/// B9, C12: claimed or found beside the others, and its failure can be recorded whatever is wrong with it.
#[tokio::test]
async fn rows_that_cannot_be_read_come_back_beside_the_others() {
    on_each_server(async |database, backend| {
        for (column, value, settles) in [
            ("payload", "'{oops'", true),
            ("payload", "x'22ff22'", true),
            ("errors", "'oops'", true),
            ("errors", "'{}'", true),
            ("errors", "'[\"oops\", 1, {}, null]'", true),
            ("result", "'oops'", true),
            ("created_at", "'0000-00-00 00:00:00'", true),
            ("available_at", "'2026-00-10 00:00:00'", true),
            ("finished_at", "'2026-01-00 00:00:00'", true),
            ("max_attempts", "0", false),
        ] {
            let jobs = [job("1"), job("2")];
            backend.enqueue(&jobs).await.expect("stores");
            let broken = jobs[0].id.as_uuid().simple().to_string();
            let update = format!("UPDATE fenced_jobs SET {column} = {value} WHERE id = x'{broken}'");
            database.run(&format!("SET sql_mode = ''; {update}")).await;
            let claimed = backend.claim(&request(2)).await.expect("claims");
            let others: Vec<_> = claimed.jobs.iter().map(Job::id).collect();
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
                let failed = Transitioner::new(backend).apply(execution, &fail).await.expect("settles");
                assert_eq!(failed.execution().state, JobState::Failed);
            }
            database.run("DELETE FROM fenced_jobs").await;
        }
    })
    .await;
}

/// Answers are the rows that were written, also where a trigger of the application's inserts rows of its own.
#[tokio::test]
async fn a_trigger_on_the_table_changes_no_answer() {
    on_each_server(async |database, backend| {
        database
            .run(
                "CREATE TABLE audit (id BIGINT AUTO_INCREMENT PRIMARY KEY, state VARBINARY(32)) ENGINE = InnoDB; \
                 CREATE TRIGGER audited BEFORE UPDATE ON fenced_jobs FOR EACH ROW INSERT INTO audit (state) VALUES (OLD.state)",
            )
            .await;
        backend.enqueue(&[job("1"), job("2")]).await.expect("stores");
        for job in backend.claim(&request(2)).await.expect("claims").jobs {
            assert_eq!(backend.get(job.id()).await.expect("reads").as_ref(), Some(&job));
            let end = decide(&job.execution, &complete("1"));
            let answer = backend.update_if_current(end.id, &end.current, &end.patch).await.expect("updates");
            let stored = backend.get(job.id()).await.expect("reads").expect("a job");
            assert_eq!(answer, Update::Applied(stored.execution));
        }
        assert_eq!(database.rows("SELECT id FROM audit").await.len(), 4);
    })
    .await;
}

/// Numbers at the end of their columns stay there, whatever the SQL mode makes of an overflow.
#[tokio::test]
async fn numbers_at_their_end_stay_there() {
    on_each_server(async |database, backend| {
        let sloppy = database.pool_of(1, "SET sql_mode = ''").await;
        let lent = MysqlBackend::from_pool(sloppy).await.expect("a handle");
        for handle in [backend, &lent] {
            backend.enqueue(&[job("1")]).await.expect("stores");
            database.run("UPDATE fenced_jobs SET attempt = 4294967295, fence = 18446744073709551615").await;
            let claimed = claim_one(handle).await;
            assert_eq!((claimed.execution.attempt, claimed.execution.fence), (u32::MAX, u64::MAX));
            assert_eq!(backend.get(claimed.id()).await.expect("reads"), Some(claimed));
            database.run("DELETE FROM fenced_jobs").await;
        }
        lent.close().await;
    })
    .await;
}

#[tokio::test]
async fn states_of_a_newer_version_are_left_alone() {
    on_each_server(async |database, backend| {
        let jobs = [keyed("k"), keyed("l")];
        backend.enqueue(&jobs).await.expect("stores");
        database.run("UPDATE fenced_jobs SET state = 'paused' WHERE unique_key = 'k'").await;
        database.run("UPDATE fenced_jobs SET state = 'parked' WHERE unique_key = 'l'").await;
        assert_eq!(backend.claim(&request(9)).await.expect("claims"), Claimed::default());
        let counts = backend.counts().await.expect("counts");
        assert_eq!(counts, [Count { queue: name("mail"), state: None, jobs: 2 }]);
        assert_eq!(backend.enqueue(&jobs[..1]).await.expect("is known"), [Enqueued::Existing(jobs[0].id)]);
        let other = backend.enqueue(&[keyed("k")]).await.expect("is an outcome");
        assert_eq!(other, [Enqueued::Duplicate { existing: jobs[0].id }], "it may well be active");
        assert!(backend.stale(None, limit(9)).await.expect("lists").items.is_empty());
    })
    .await;
}

/// D9, D10, and what a batch says of itself.
#[tokio::test]
async fn a_batch_is_answered_item_by_item() {
    on_each_server(async |_, backend| {
        let (first, second) = (keyed("k"), keyed("k"));
        let batch = [first.clone(), second.clone(), first.clone(), job("1"), second.clone()];
        let outcomes = backend.enqueue(&batch).await.expect("stores");
        assert_eq!(outcomes[0], Enqueued::New(first.id));
        assert_eq!(outcomes[1], Enqueued::Duplicate { existing: first.id });
        assert_eq!(outcomes[2], Enqueued::Existing(first.id));
        assert_eq!(outcomes[4], Enqueued::Duplicate { existing: first.id });
        let other = NewJob { payload: Json::null(), ..first.clone() };
        let error = backend.enqueue(&[job("2"), other]).await.expect_err("another job");
        let told = (error.kind(), error.certainty(), error.index());
        assert_eq!(told, (ErrorKind::IdReused, Certainty::NotApplied, Some(1)));
        assert_eq!(backend.counts().await.expect("counts")[0].jobs, 2, "nothing was stored");

        // Of a batch that names a job twice, the second update sees what the first one did.
        let claimed = backend.claim(&request(9)).await.expect("claims").jobs;
        let held = claimed.iter().find(|job| job.id() == first.id).expect("claimed");
        let updates = [decide(&held.execution, &complete("1")), decide(&held.execution, &complete("2"))];
        let answers = backend.update_many_if_current(&updates).await.expect("updates");
        let [Update::Applied(applied), Update::Conflict(current)] = &answers[..] else { panic!("{answers:?}") };
        assert_eq!(applied, current);
        let stored = backend.get(first.id).await.expect("reads").expect("a job");
        assert_eq!(stored.result, Some(Json::from_text("1").expect("JSON")));
    })
    .await;
}

/// Of the same id held twice, only the claim that is there is renewed.
#[tokio::test]
async fn a_beat_tells_an_old_claim_from_the_present_one() {
    on_each_server(async |_, backend| {
        backend.enqueue(&[job("1")]).await.expect("stores");
        let old = Held::of(&claim_one(backend).await.execution).expect("held");
        let job = backend.get(old.id).await.expect("reads").expect("a job");
        Transitioner::new(backend).apply(&job.execution, &Transition::Release).await.expect("releases");
        let new = Held::of(&claim_one(backend).await.execution).expect("held");
        let missing = Held { id: JobId::new(), ..new.clone() };
        let beats = backend.extend_leases(&[old, new.clone(), missing, new], lease()).await.expect("beats");
        assert_eq!(beats, [Beat::Lost, Beat::Extended, Beat::Lost, Beat::Extended]);
    })
    .await;
}

/// Ids at both ends are ids like any other, also as the place where a page begins.
#[tokio::test]
async fn pages_pass_the_first_and_the_last_id() {
    on_each_server(async |database, backend| {
        let ids = [0, 1, u128::MAX - 1, u128::MAX].map(|id| JobId::from(uuid::Uuid::from_u128(id)));
        backend.enqueue(&ids.map(|id| NewJob { id, ..job("1") })).await.expect("stores");
        assert_eq!(backend.claim(&request(4)).await.expect("claims").jobs.len(), 4);
        database.run("UPDATE fenced_jobs SET lease_expires_at = IF(id < x'80', NULL, '2001-01-01') ORDER BY id").await;
        let (mut listed, mut held, mut stale) = (Vec::new(), Vec::new(), Vec::new());
        let mut after = None;
        loop {
            let page = backend.list(&ListFilter::default(), after, limit(1)).await.expect("lists");
            listed.extend(page.items.iter().map(Job::id));
            let Some(next) = page.next else { break };
            after = Some(next);
        }
        let mut after = None;
        loop {
            let page = backend.claimed_by(&worker(), Delay::ZERO, after, limit(1)).await.expect("lists");
            held.extend(page.items.iter().map(|row| row.id));
            let Some(next) = page.next else { break };
            after = Some(next);
        }
        let mut after = None;
        loop {
            let page = backend.stale(after, limit(1)).await.expect("lists");
            stale.extend(page.items.iter().map(|row| row.id));
            let Some(next) = page.next else { break };
            after = Some(next);
        }
        assert_eq!((&listed[..], &held[..], &stale[..]), (&ids[..], &ids[..], &ids[..]));
        assert!(backend.list(&ListFilter::default(), Some(ids[3]), limit(9)).await.expect("lists").items.is_empty());
        for lease_expires_at in [None, Some(Timestamp::MAX)] {
            let after = Some(StaleCursor { lease_expires_at, id: ids[3] });
            let left = backend.stale(after, limit(9)).await.expect("lists").items.len();
            assert_eq!(left, if lease_expires_at.is_none() { 2 } else { 0 });
        }
    })
    .await;
}

/// E1, E2: whatever the zones of the sessions that write, read and change by hand.
#[tokio::test]
async fn instants_do_not_depend_on_a_time_zone() {
    on_each_server(async |database, backend| {
        let far: Timestamp = "2500-03-29T02:30:00.001Z".parse().expect("an instant");
        let mut stored = Vec::new();
        for zone in ["SET time_zone = '+05:00'", "SET time_zone = '-11:30'", "SET time_zone = 'SYSTEM'"] {
            let lent = MysqlBackend::from_pool(database.pool_of(1, zone).await).await.expect("a handle");
            let new = NewJob { available: When::At(far), ..job("1") };
            lent.enqueue(std::slice::from_ref(&new)).await.expect("stores");
            stored.push((new.id, lent.get(new.id).await.expect("reads")));
            lent.close().await;
        }
        database.run("SET time_zone = '+09:00'; UPDATE fenced_jobs SET priority = 3, tags = 'x'").await;
        let mut times = Vec::new();
        for (id, seen) in stored {
            let (job, seen) = (backend.get(id).await.expect("reads").expect("a job"), seen.expect("a job"));
            assert_eq!((job.available_at, job.created_at), (far, seen.created_at));
            times.push(job.created_at.unix_millis());
        }
        assert!(times.iter().max().expect("some") - times.iter().min().expect("some") < 60_000, "{times:?}");
    })
    .await;
}

/// A step or an event that cannot be read is told, and nothing is written on it.
#[tokio::test]
async fn steps_and_events_that_cannot_be_read() {
    on_each_server(async |database, backend| {
        backend.enqueue(&[job("1")]).await.expect("stores");
        let claimed = claim_one(backend).await;
        finish_step(backend, &claimed.execution, &name("w"), &Json::null()).await.expect("is saved");
        let unreadable = |answer: Result<(), StepError>| {
            let Err(StepError::Transition(TransitionError::Backend(error))) = answer else { panic!("{answer:?}") };
            assert_eq!((error.kind(), error.certainty()), (ErrorKind::Schema, Certainty::NotApplied), "{error}");
        };
        for column in ["state = 'of a newer version'", "value = '{oops'", "value = x'22ff22'", "value = NULL"] {
            database.run(&format!("UPDATE fenced_steps SET {column}")).await;
            let before = database.rows("SELECT * FROM fenced_steps").await;
            assert_error(backend.steps(claimed.id()).await, ErrorKind::Schema);
            unreadable(begin_step(backend, &claimed.execution, &name("w")).await.map(drop));
            unreadable(finish_step(backend, &claimed.execution, &name("w"), &Json::null()).await);
            let after = database.rows("SELECT * FROM fenced_steps").await;
            let bytes = |rows: &[sqlx::mysql::MySqlRow]| rows[0].get::<Option<Vec<u8>>, _>("value");
            assert_eq!(bytes(&after), bytes(&before), "{column}");
            database.run("UPDATE fenced_steps SET state = 'done', value = 'null'").await;
        }
        let kept = event("e", Delay::from_hours(1));
        backend.emit(&kept).await.expect("is kept");
        database.run("UPDATE fenced_events SET payload = '{oops'").await;
        assert_error(backend.emit(&kept).await, ErrorKind::Schema);
        let mut wait = Suspension::new(&claimed.execution, name("new"), Some(name("e")), When::Now).expect("legal");
        unreadable(wait.submit(backend).await.map(drop));
        assert_eq!(backend.get(claimed.id()).await.expect("reads"), Some(claimed.clone()), "it runs on");
    })
    .await;
}

/// The rows that are made for events to come are deleted beside those that are over, and do not count.
#[tokio::test]
async fn places_of_events_are_purged_and_not_counted() {
    on_each_server(async |database, _| {
        let clock = ClockOffset::default();
        let backend = MysqlBackend::connect_with(database.options().clock(clock.clone())).await.expect("connects");
        let hours = Delay::from_hours;
        let jobs: Vec<_> = (0..5).map(|_| job("1")).collect();
        backend.enqueue(&jobs).await.expect("stores");
        for (index, job) in backend.claim(&request(5)).await.expect("claims").jobs.iter().enumerate() {
            let waits = wait_for(&backend, &job.execution, &format!("to come {index}"), When::At(Timestamp::MAX)).await;
            assert!(matches!(waits, Suspended::Waits(_)), "{waits:?}");
        }
        for index in 0..3 {
            backend.emit(&event(&format!("kept {index}"), hours(30))).await.expect("is kept");
        }
        let left = async || database.rows("SELECT event_key FROM fenced_events").await.len();
        clock.advance(hours(23));
        assert_eq!((backend.purge_events(limit(9)).await.expect("purges"), left().await), (0, 8), "none is over");
        clock.advance(hours(1));
        assert_eq!((backend.purge_events(limit(4)).await.expect("purges"), left().await), (0, 4), "four places are");
        clock.advance(hours(6));
        // The place that is older keeps no event from being purged.
        for rest in [(1, 2), (1, 1), (1, 0), (0, 0)] {
            assert_eq!((backend.purge_events(limit(1)).await.expect("purges"), left().await), rest);
        }
        // Those who wait need no place.
        for index in 0..5 {
            let emitted = backend.emit(&event(&format!("to come {index}"), Delay::ZERO)).await.expect("is kept");
            assert_eq!(emitted, Emitted::New { woken: 1 });
        }
        backend.close().await;
    })
    .await;
}

/// More than one statement takes, as one moment of all of them.
#[tokio::test]
async fn an_event_wakes_thousands() {
    on_each_server(async |database, backend| {
        let jobs: Vec<_> = (0..2500).map(|_| job("1")).collect();
        backend.enqueue(&jobs).await.expect("stores");
        database
            .run(
                "UPDATE fenced_jobs SET state = 'suspended', available_at = '9999-12-31 23:59:59.999'; \
                 INSERT INTO fenced_steps (job_id, name, fence, state, event, until, revision) \
                 SELECT id, 'w', 0, 'waiting', 'e', available_at, revision FROM fenced_jobs",
            )
            .await;
        assert_eq!(backend.emit(&event("e", Delay::ZERO)).await.expect("is kept"), Emitted::New { woken: 2500 });
        assert_eq!(database.rows("SELECT DISTINCT revision FROM fenced_jobs").await.len(), 1);
        let claimed = backend.claim(&request(10_000)).await.expect("claims").jobs;
        assert_eq!(claimed.len(), 2500);
        let done = "SELECT CAST(COUNT(*) AS SIGNED) FROM fenced_steps WHERE state = 'done' AND value = '1'";
        assert_eq!(database.rows(done).await[0].get::<i64, _>(0), 2500);
    })
    .await;
}
