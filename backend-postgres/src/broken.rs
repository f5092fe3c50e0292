//! The typical mistakes on this database, each in a backend that makes only that one, and the case of the suite that catches it.

use std::sync::Arc;

use queue_conformance::cases;
use queue_conformance::run_case;
use sqlx::AssertSqlSafe;
use sqlx::SqlSafeStr;
use sqlx::SqlStr;

use crate::PostgresBackend;
use crate::sql::Sql;
use harness::PostgresHarness;
use harness::Way;

#[path = "../tests/harness/mod.rs"]
mod harness;

/// Writes one part of one statement another way.
fn rewrite(backend: &mut PostgresBackend, statement: fn(&mut Sql) -> &mut SqlStr, right: &str, wrong: &str) {
    rewrite_from_to(backend, statement, (right, ""), wrong);
}

/// The same for the parts that begin and end with these words.
fn rewrite_from_to(
    backend: &mut PostgresBackend,
    statement: fn(&mut Sql) -> &mut SqlStr,
    (from, to): (&str, &str),
    wrong: &str,
) {
    let handle = Arc::get_mut(&mut backend.0).expect("nobody else has it yet");
    let [from, wrong] = [from, wrong].map(|text| text.replace("{schema}", handle.schema.as_str()));
    let text = statement(&mut handle.sql);
    let (mut broken, mut rest) = (String::new(), text.as_str());
    while let Some((before, after)) = rest.split_once(&from) {
        let (_, after) = after.split_once(to).expect("an end");
        broken += &format!("{before}{wrong}");
        rest = after;
    }
    broken += rest;
    assert_ne!(broken, text.as_str(), "{from:?} is not in the statement");
    *text = AssertSqlSafe(broken).into_sql_str();
}

/// Fails unless the case passes as the backend is, and fails with the mistake.
async fn assert_caught(way: Way, mistake: fn(&mut PostgresBackend), id: &str) {
    let case = cases().into_iter().find(|case| case.id == id).expect("a case");
    run_case(&PostgresHarness::new(way), &case, 1).await.expect("passes without the mistake");
    let report = run_case(&PostgresHarness::altered(way, mistake), &case, 1).await.expect_err("the mistake is caught");
    println!("{}", report.lines().take(3).collect::<Vec<_>>().join("\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn null_that_equals_nothing() {
    let mistake = |backend: &mut PostgresBackend| {
        let (right, wrong) =
            ("e.claimed_by IS NOT DISTINCT FROM e.seen_claimed_by", "e.claimed_by = e.seen_claimed_by");
        rewrite(backend, |sql| &mut sql.update, right, wrong);
    };
    assert_caught(Way::Own, mistake, "update::null_equals_null").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_field_that_is_not_compared() {
    let mistake = |backend: &mut PostgresBackend| {
        rewrite(backend, |sql| &mut sql.update, "AND e.revision = e.seen_revision", "");
    };
    assert_caught(Way::Own, mistake, "update::every_field_is_compared").await;
}

/// Select, compare, then update by id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_is_compared_but_not_locked() {
    let mistake = |backend: &mut PostgresBackend| {
        rewrite(backend, |sql| &mut sql.update, "WHERE j.id = e.seen_id FOR UPDATE", "WHERE j.id = e.seen_id OFFSET 0");
    };
    assert_caught(Way::Own, mistake, "update::race_has_one_winner").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_waits_for_locked_rows() {
    let mistake = |backend: &mut PostgresBackend| {
        rewrite(backend, |sql| &mut sql.claim, "FOR UPDATE SKIP LOCKED", "FOR UPDATE");
        // Not part of the mistake: it need not take ten seconds.
        rewrite(backend, |sql| &mut sql.begin, "'10000'", "'100'");
    };
    assert_caught(Way::ApplicationPool, mistake, "claim::skips_locked_rows").await;
}

/// Behind a pooler a statement without a transaction is sent in two parts, to two sessions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_that_a_pooler_takes_apart() {
    let mistake = |backend: &mut PostgresBackend| {
        Arc::get_mut(&mut backend.0).expect("nobody else has it yet").explicit = false;
    };
    assert_caught(Way::Pooler, mistake, "claim::race_for_one_job").await;
}

/// Without the lock two claimers choose the same rows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_does_not_lock() {
    let mistake = |backend: &mut PostgresBackend| {
        rewrite(backend, |sql| &mut sql.claim, "FOR UPDATE SKIP LOCKED", "");
    };
    assert_caught(Way::Own, mistake, "claim::race_gives_each_job_once").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_duplicate_that_is_an_error() {
    let mistake = |backend: &mut PostgresBackend| {
        rewrite(backend, |sql| &mut sql.insert, "ON CONFLICT DO NOTHING", "");
    };
    assert_caught(Way::Own, mistake, "unique::race_has_one_winner").await;
}

/// Only the waiting ones are looked at for whoever has the key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_whose_holder_is_not_found() {
    let mistake = |backend: &mut PostgresBackend| {
        let right = "AND state NOT IN ('completed', 'failed', 'canceled')";
        rewrite(backend, |sql| &mut sql.refused, right, "AND state = 'waiting'");
    };
    assert_caught(Way::Own, mistake, "unique::one_active_job_per_key").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_heartbeat_that_shortens_a_lease() {
    let mistake = |backend: &mut PostgresBackend| {
        rewrite(backend, |sql| &mut sql.extend, "greatest(j.lease_expires_at, ", "greatest(");
    };
    assert_caught(Way::Own, mistake, "lease::never_shortened").await;
}

/// The transaction is as strict as the application's pool has it: what should wait fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_isolation_level_that_is_left_to_the_pool() {
    let mistake = |backend: &mut PostgresBackend| {
        rewrite(backend, |sql| &mut sql.begin, "BEGIN ISOLATION LEVEL READ COMMITTED", "BEGIN");
    };
    assert_caught(Way::ApplicationPool, mistake, "update::race_has_one_winner").await;
}

/// `least` passes over null: a time that is to be kept becomes the last that there is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_null_that_the_least_passes_over() {
    let mistake = |backend: &mut PostgresBackend| {
        rewrite(backend, |sql| &mut sql.update, "CASE WHEN e.after IS NOT NULL", "CASE WHEN true");
    };
    assert_caught(Way::Own, mistake, "update::only_the_patch_is_written").await;
}

/// The wait is registered by somebody who looked for the event before it was emitted, and is not there yet when it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_is_looked_for_but_not_locked() {
    let mistake = |backend: &mut PostgresBackend| {
        let read = " FROM \"{schema}\".events AS e WHERE e.key = $2";
        rewrite_from_to(backend, |sql| &mut sql.lock_event, ("INSERT", "RETURNING"), "SELECT");
        rewrite(backend, |sql| &mut sql.lock_event, "AS payload", &format!("AS payload{read}"));
        // Not part of the mistake: what nobody locked may not be there.
        let upsert = "INSERT INTO \"{schema}\".events (key, payload, kept_until) \
                      SELECT $2, $3, now + $4 * interval '1 millisecond' FROM clock \
                      ON CONFLICT (key) DO UPDATE SET payload = excluded.payload, kept_until = excluded.kept_until)";
        rewrite_from_to(backend, |sql| &mut sql.wake, ("UPDATE \"{schema}\".events", "e.key = $2)"), upsert);
    };
    assert_caught(Way::Own, mistake, "waits::race_of_registration_and_event").await;
}

/// The job is suspended, and its wait written, each in a transaction of its own: the event comes in between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_that_is_written_in_parts() {
    let mistake = |backend: &mut PostgresBackend| {
        rewrite(backend, |sql| &mut sql.begin, "BEGIN ISOLATION LEVEL READ COMMITTED; ", "");
    };
    assert_caught(Way::Own, mistake, "waits::race_of_registration_and_event").await;
}

/// Nothing equals, or differs from, an event that is null.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_for_the_time_that_is_compared_by_its_event() {
    let mistake = |backend: &mut PostgresBackend| {
        let right = "s.revision = e.revision";
        rewrite(backend, |sql| &mut sql.time_out, right, &format!("{right} AND s.event = s.event"));
    };
    assert_caught(Way::Own, mistake, "waits::for_the_time_alone").await;
}

/// Any suspension will do, also a later one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_that_is_known_by_its_event_alone() {
    let mistake = |backend: &mut PostgresBackend| {
        rewrite(backend, |sql| &mut sql.wake, "AND j.revision = e.revision", "");
    };
    assert_caught(Way::Own, mistake, "waits::an_event_of_an_earlier_wait_changes_nothing").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sweep_of_waits_that_waits_for_locked_rows() {
    let mistake = |backend: &mut PostgresBackend| {
        rewrite(backend, |sql| &mut sql.time_out, "FOR UPDATE SKIP LOCKED", "FOR UPDATE");
        // Not part of the mistake: it need not take ten seconds.
        rewrite(backend, |sql| &mut sql.begin, "'10000'", "'100'");
    };
    assert_caught(Way::ApplicationPool, mistake, "waits::locked_jobs_are_skipped").await;
}

/// What is there is judged as the statement saw it when it began, and not as it is when it gets the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_that_is_judged_before_its_job_is_locked() {
    let mistake = |backend: &mut PostgresBackend| {
        let seen = "CASE coalesce((SELECT old.state FROM \"{schema}\".steps AS old WHERE old.job_id = s.job_id \
                    AND old.name = s.name), 'begun')";
        rewrite(backend, |sql| &mut sql.write_step, "CASE s.state", seen);
    };
    assert_caught(Way::Own, mistake, "steps::race_of_values").await;
}
