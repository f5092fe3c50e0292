//! How the server goes about the statements: the very texts that are run, explained, and the rows that they read, counted.

mod common;

use std::collections::BTreeMap;

use backend_postgres::PostgresBackend;
use common::*;
use queue_core::*;
use sqlx::AssertSqlSafe;
use sqlx::Row;

/// What a connection of the backend's own is told, and a connection of an application.
const OWN: &str = "SET enable_seqscan = off; SET enable_nestloop = off";
const APPLICATIONS: &str = "SET enable_seqscan = on; SET enable_nestloop = on";

/// The plan of a statement, one step a line, as it is kept for any parameters.
async fn plan(backend: &PostgresBackend, session: &str, statement: &str) -> String {
    let (_, text) = backend.statements().into_iter().find(|(name, _)| *name == statement).expect("a statement");
    let parameters = (1..).take_while(|number| text.contains(&format!("${number}"))).count();
    let nulls = vec!["NULL"; parameters].join(", ");
    let mut connection = connection().await;
    let prepare = format!("{session}; SET plan_cache_mode = force_generic_plan; PREPARE explained AS {text}");
    sqlx::raw_sql(AssertSqlSafe(prepare)).execute(&mut connection).await.expect("prepares");
    let explain = format!("EXPLAIN (COSTS off) EXECUTE explained({nulls})");
    let steps = sqlx::raw_sql(AssertSqlSafe(explain)).fetch_all(&mut connection).await.expect("a plan");
    let steps: Vec<String> = steps.iter().map(|step| step.get(0)).collect();
    steps.join("\n")
}

/// The steps that the plan must have, and that it reads no table from end to end.
async fn assert_plans(backend: &PostgresBackend, session: &str) {
    for (statement, steps, sorts) in [
        ("claim", vec!["Index Scan using jobs_due on jobs", "jobs_id"], false),
        ("update", vec!["Index Scan using jobs_id on jobs"], true),
        ("extend", vec!["Index Scan using jobs_held on jobs", "jobs_id"], true),
        ("stale", vec!["jobs_held"], true),
        ("claimed_by", vec!["jobs_held"], true),
        ("purge", vec!["jobs_ended", "jobs_id"], true),
        ("list", vec!["Index Scan using jobs_id on jobs"], false),
        ("get", vec!["Index Scan using jobs_id on jobs"], false),
        ("refused", vec!["Index Scan using jobs_id on jobs", "jobs_unique"], false),
        ("steps", vec!["steps_name"], true),
        ("step", vec!["Index Scan using steps_name on steps"], false),
        ("check", vec!["Index Scan using jobs_id on jobs"], true),
        ("write_step", vec!["Index Scan using jobs_id on jobs", "Conflict Arbiter Indexes: steps_name"], true),
        ("put_step", vec!["jobs_id", "Conflict Arbiter Indexes: steps_name", "events_key"], false),
        ("lock_event", vec!["Conflict Arbiter Indexes: events_key"], false),
        ("wake", vec!["Index Scan using steps_waiting on steps", "jobs_id", "steps_name", "events_key"], true),
        ("time_out", vec!["Index Scan using jobs_suspended on jobs", "jobs_id", "steps_name"], true),
        ("purge_events", vec!["Index Scan using events_old on events", "events_key"], false),
    ] {
        let plan = plan(backend, session, statement).await;
        for step in steps {
            assert!(plan.contains(step), "{session}: {statement}: {step}\n{plan}");
        }
        assert!(!plan.contains("Seq Scan"), "{session}: {statement}\n{plan}");
        assert!(sorts || !plan.contains("Sort"), "{session}: {statement}\n{plan}");
    }
}

fn fill(queue: &str, kind: &str, priority: u8, available: &str, state: &str) -> String {
    format!(
        "INSERT INTO {{schema}}.jobs (id, queue, kind, state, priority, attempt, max_attempts, fence, revision, available_at, \
           created_at, finished_at, payload) \
         SELECT gen_random_uuid(), '{queue}', '{kind}', '{state}', {priority}, 0, 20, 0, gen_random_uuid(), \
           {available} + n * interval '1 millisecond', '2020-01-01', CASE '{state}' WHEN 'waiting' THEN NULL \
           ELSE timestamptz '2020-01-01' + n * interval '1 millisecond' END, '1' FROM generate_series(1, 100000) AS n; "
    )
}

/// 100 000 rows of each kind that nobody here asks for.
fn crowd() -> String {
    let past = "timestamptz '2020-01-01'";
    let mut text = fill("mail", "welcome", 0, "timestamptz '2500-01-01'", "waiting");
    text += &fill("mail", "welcome", 0, past, "completed");
    text += &fill("another", "welcome", 0, past, "waiting");
    text += &fill("mail", "welcome", 9, past, "waiting");
    text
}

/// What was read of the table and of each of its indexes, once this many rows have been stored and updated.
async fn reads(scratch: &Scratch, inserted: i64, updated: i64) -> BTreeMap<String, i64> {
    reads_of(scratch, "jobs", inserted, updated).await
}

async fn reads_of(scratch: &Scratch, table: &str, inserted: i64, updated: i64) -> BTreeMap<String, i64> {
    let written = "SELECT (n_tup_ins + 1000000000 * n_tup_upd)::bigint FROM pg_stat_user_tables \
                   WHERE schemaname = '{schema}' AND relname = '{table}'";
    let of_table = |text: &str| text.replace("{table}", table).replace("{schema}", scratch.schema.as_str());
    until(&of_table(written), inserted + 1_000_000_000 * updated).await;
    let text = "SELECT 'whole' AS name, seq_scan AS reads FROM pg_stat_user_tables \
                  WHERE schemaname = '{schema}' AND relname = '{table}' \
                UNION ALL SELECT indexrelname, idx_tup_read FROM pg_stat_user_indexes \
                  WHERE schemaname = '{schema}' AND relname = '{table}'";
    let text = AssertSqlSafe(of_table(text));
    let rows = sqlx::query(text).fetch_all(&mut connection().await).await.expect("answers");
    rows.iter().map(|row| (row.get::<String, _>("name"), row.get::<i64, _>("reads"))).collect()
}

/// A life of ten jobs, as often as it takes for plans to be kept, and more.
async fn live(backend: &PostgresBackend, rounds: usize) {
    for _ in 0..rounds {
        backend.enqueue(&(0..10).map(|_| job("1")).collect::<Vec<_>>()).await.expect("stores");
        let claimed = backend.claim(&request(10)).await.expect("claims").jobs;
        assert!(claimed.len() == 10 && claimed.iter().all(|job| job.priority == Priority::default()));
        let held: Vec<_> = claimed.iter().filter_map(|job| Held::of(&job.execution)).collect();
        assert_eq!(backend.extend_leases(&held, lease()).await.expect("beats"), [Beat::Extended; 10]);
        assert_eq!(backend.stale(None, limit(10)).await.expect("lists").items, []);
        let mine = backend.claimed_by(&worker(), Delay::ZERO, None, limit(100)).await.expect("lists").items;
        assert_eq!(mine.len(), 10);
        let updates: Vec<_> = claimed.iter().map(decide).collect();
        let answers = backend.update_many_if_current(&updates).await.expect("settles");
        assert!(answers.iter().all(|answer| matches!(answer, Update::Applied(_))));
        backend.purge(JobState::Completed, Delay::ZERO, limit(5)).await.expect("purges");
    }
}

/// B7: whatever stands in front, what is read is what it is about, and entries of earlier rounds that nobody has cleared away:
/// a few hundred, where a single claim that walks past one of the crowds reads 100 000.
fn assert_few(before: &BTreeMap<String, i64>, after: &BTreeMap<String, i64>) {
    // The table was read whole for each of its indexes when it was made, and not since.
    let indexes = i64::try_from(after.len()).expect("a few") - 1;
    for (name, reads) in after {
        let read = reads - before[name];
        println!("{name}: {read}");
        let most = if name == "whole" { indexes } else { 10_000 };
        assert!(read <= most, "{name}: {read}");
    }
}

#[tokio::test]
async fn nothing_is_read_but_what_is_asked_for() {
    let (scratch, backend) = migrated().await;
    scratch.run(&crowd()).await;
    scratch.run("ANALYZE {schema}.jobs").await;
    assert_plans(&backend, OWN).await;
    assert_plans(&backend, APPLICATIONS).await;
    let before = reads(&scratch, 400_000, 0).await;
    // The server says what a session read when it ends.
    backend.close().await;
    for (round, lent) in [(1, false), (2, true)] {
        let backend = match lent {
            true => scratch.lent(&scratch.pool(1).await).await,
            false => scratch.connect().await,
        };
        live(&backend, 8).await;
        backend.close().await;
        let after = reads(&scratch, 400_000 + 80 * round, 240 * round).await;
        assert_few(&before, &after);
    }
}

/// 100 000 of each that nobody here asks for: jobs that wait, steps that are done, waits that a job was woken from, waits for another
/// event, and events.
const CROWD_OF_STEPS: &str = "
    INSERT INTO {schema}.jobs (id, queue, kind, state, priority, attempt, max_attempts, fence, revision, available_at, created_at, payload)
      SELECT gen_random_uuid(), 'mail', 'welcome', 'suspended', 5, 0, 20, 1, gen_random_uuid(),
        timestamptz '2500-01-01' + n * interval '1 millisecond', '2020-01-01', '1' FROM generate_series(1, 100000) AS n;
    INSERT INTO {schema}.steps (job_id, name, fence, state, value) SELECT id, 'charge', 1, 'done', '1' FROM {schema}.jobs;
    INSERT INTO {schema}.steps (job_id, name, fence, state, event, until, revision)
      SELECT id, 'pay', 1, 'waiting', 'paid by another', available_at, gen_random_uuid() FROM {schema}.jobs;
    INSERT INTO {schema}.steps (job_id, name, fence, state, event, until, revision)
      SELECT id, 'ship', 1, 'waiting', 'shipped', available_at, revision FROM {schema}.jobs;
    INSERT INTO {schema}.events (key, kept_until, payload)
      SELECT 'event ' || n, timestamptz '2500-01-01' + n * interval '1 millisecond', '1' FROM generate_series(1, 100000) AS n;";

/// What two jobs do that wait, one for an event and one for the time. Jobs are written 10 times, steps and events 3 times, beside what
/// is stored: 2 jobs, 3 steps and 1 event, and a place to lock.
async fn live_with_steps(backend: &PostgresBackend, rounds: usize) {
    for round in 0..rounds {
        backend.enqueue(&[job("1"), job("2")]).await.expect("stores");
        let claimed = backend.claim(&request(2)).await.expect("claims").jobs;
        let (first, second) = (&claimed[0].execution, &claimed[1].execution);
        assert_eq!(begin_step(backend, first, &name("charge")).await.expect("begins"), None);
        finish_step(backend, first, &name("charge"), &Json::null()).await.expect("finishes");
        assert_eq!(backend.steps(first.id).await.expect("reads").len(), 1);
        let key = name(&format!("paid {round} {}", first.id));
        for (seen, event, until) in [(first, Some(&key), When::At(Timestamp::MAX)), (second, None, When::Now)] {
            let mut suspension = Suspension::new(seen, name("pay"), event.cloned(), until).expect("legal");
            assert!(matches!(suspension.submit(backend).await, Ok(Suspended::Waits(_))));
        }
        assert_eq!(backend.time_out_waits(limit(10)).await.expect("wakes"), [second.id]);
        let event = NewEvent { key: key.clone(), payload: Json::null(), keep: Delay::ZERO };
        assert_eq!(backend.emit(&event).await.expect("wakes"), Emitted::New { woken: 1 });
        assert_eq!(backend.purge_events(limit(10)).await.expect("purges"), 1);
        let claimed = backend.claim(&request(2)).await.expect("claims").jobs;
        for job in &claimed {
            Transitioner::new(backend).apply(&job.execution, &complete("1")).await.expect("settles");
        }
        assert_eq!(
            backend.purge(JobState::Completed, Delay::ZERO, limit(10)).await.expect("purges"),
            2,
            "and their steps"
        );
    }
}

/// The same for steps, waits and events: also what a purge deletes with its jobs.
#[tokio::test]
async fn of_steps_and_events_neither() {
    let (scratch, backend) = migrated().await;
    scratch.run(CROWD_OF_STEPS).await;
    scratch.run("ANALYZE {schema}.jobs, {schema}.steps, {schema}.events").await;
    assert_plans(&backend, OWN).await;
    assert_plans(&backend, APPLICATIONS).await;
    let tables = [("jobs", 100_000, 2, 10), ("steps", 300_000, 3, 3), ("events", 100_000, 2, 1)];
    let mut before = Vec::new();
    for (table, stored, ..) in tables {
        before.push(reads_of(&scratch, table, stored, 0).await);
    }
    backend.close().await;
    for (round, lent) in [(1, false), (2, true)] {
        let backend = match lent {
            true => scratch.lent(&scratch.pool(1).await).await,
            false => scratch.connect().await,
        };
        live_with_steps(&backend, 8).await;
        backend.close().await;
        for ((table, stored, inserted, updated), before) in tables.into_iter().zip(&before) {
            let after = reads_of(&scratch, table, stored + 8 * round * inserted, 8 * round * updated).await;
            assert_few(before, &after);
        }
    }
}

/// Statistics are as old as the last ANALYZE, and plans are kept: of when there was next to nothing.
#[tokio::test]
async fn what_was_small_when_it_was_counted_is_not_read_whole_when_it_has_grown() {
    let (scratch, backend) = migrated().await;
    backend.enqueue(&[NewJob { queue: name("x"), ..job("1") }]).await.expect("stores");
    scratch.run("VACUUM ANALYZE {schema}.jobs, {schema}.steps, {schema}.events").await;
    assert_plans(&backend, OWN).await;
    let before = reads(&scratch, 1, 0).await;
    let backend = PostgresBackend::connect_with(scratch.options().max_connections(1)).await.expect("connects");
    live(&backend, 8).await;
    scratch.run(&fill("mail", "welcome", 0, "timestamptz '2500-01-01'", "waiting")).await;
    scratch.run(&fill("mail", "welcome", 9, "timestamptz '2020-01-01'", "waiting")).await;
    live(&backend, 8).await;
    backend.close().await;
    let after = reads(&scratch, 200_161, 480).await;
    assert_few(&before, &after);
}

/// B7b: found behind jobs of kinds that nobody here knows, entry by entry; none of them is touched.
#[tokio::test]
async fn a_claim_finds_its_kind_behind_others() {
    let (scratch, backend) = migrated().await;
    let before = reads(&scratch, 0, 0).await;
    scratch.run(&fill("mail", "foreign", 5, "timestamptz '2020-01-01'", "waiting")).await;
    backend.enqueue(&(0..10).map(|_| job("1")).collect::<Vec<_>>()).await.expect("stores");
    assert_eq!(backend.claim(&request(10)).await.expect("claims").jobs.len(), 10);
    backend.close().await;
    let after = reads(&scratch, 100_010, 10).await;
    let walked = after["jobs_due"] - before["jobs_due"];
    assert!(walked <= 100_010 && after["jobs_id"] <= 100, "{before:?} {after:?}");
    let backend = scratch.connect().await;
    let mut filter = ListFilter::default();
    filter.kind = Some(name("foreign"));
    let untouched = backend.list(&filter, None, limit(1000)).await.expect("lists");
    assert!(untouched.items.iter().all(|job| job.execution.attempt == 0 && job.execution.fence == 0));
}

/// A heartbeat writes to no index: none names the lease, and its page has room for another version of the row.
#[tokio::test]
async fn a_heartbeat_is_a_heap_only_update() {
    let (scratch, backend) = migrated().await;
    backend.enqueue(&(0..5).map(|_| job("1")).collect::<Vec<_>>()).await.expect("stores");
    let claimed = backend.claim(&request(5)).await.expect("claims").jobs;
    let held: Vec<_> = claimed.iter().filter_map(|job| Held::of(&job.execution)).collect();
    backend.extend_leases(&held, Lease::from_millis(90_000).expect("a lease")).await.expect("beats");
    backend.close().await;
    reads(&scratch, 5, 10).await;
    let text = "SELECT n_tup_hot_upd FROM pg_stat_user_tables WHERE schemaname = '{schema}' AND relname = 'jobs'";
    let heap_only: i64 =
        sqlx::query_scalar(scratch.text(text)).fetch_one(&mut connection().await).await.expect("answers");
    assert_eq!(heap_only, 5, "the five claims are not, the five heartbeats are");
}

#[tokio::test]
async fn ten_thousand_jobs_in_one_call() {
    let (_scratch, backend) = migrated().await;
    let jobs: Vec<_> = (0..10_000).map(|number| job(&number.to_string())).collect();
    let outcomes = backend.enqueue(&jobs).await.expect("stores");
    assert!(outcomes.iter().zip(&jobs).all(|(outcome, job)| *outcome == Enqueued::New(job.id)));
    let again = backend.enqueue(&jobs).await.expect("stores");
    assert!(again.iter().zip(&jobs).all(|(outcome, job)| *outcome == Enqueued::Existing(job.id)));
    let claimed = backend.claim(&request(10_000)).await.expect("claims");
    let mut decisions: Vec<_> =
        claimed.jobs.iter().map(|job| Decision::new(&job.execution, &complete("1")).expect("legal")).collect();
    let settled = Transitioner::new(&backend).submit_all(&mut decisions).await;
    assert_eq!(settled.iter().filter(|settled| settled.is_ok()).count(), 10_000);
}
