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
    let handle = Arc::get_mut(&mut backend.0).expect("nobody else has it yet");
    let text = statement(&mut handle.sql);
    let broken = text.as_str().replace(right, wrong);
    assert_ne!(broken, text.as_str(), "{right:?} is not in the statement");
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
    assert_caught(Way::ApplicationPool("serializable"), mistake, "claim::skips_locked_rows").await;
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
    assert_caught(Way::ApplicationPool("serializable"), mistake, "update::race_has_one_winner").await;
}

/// `least` passes over null: a time that is to be kept becomes the last that there is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_null_that_the_least_passes_over() {
    let mistake = |backend: &mut PostgresBackend| {
        rewrite(backend, |sql| &mut sql.update, "CASE WHEN e.after IS NOT NULL", "CASE WHEN true");
    };
    assert_caught(Way::Own, mistake, "update::only_the_patch_is_written").await;
}
