//! Rows and URLs that were changed at random.

mod common;
#[path = "../../conformance/tests/fuzz/mod.rs"]
mod fuzz;
#[path = "../../conformance/tests/fuzz/rows.rs"]
mod rows;

use backend_sqlite::SqliteBackend;
use backend_sqlite::SqliteOptions;
use common::*;
use fuzz::config;
use fuzz::mutated;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use queue_core::*;
use rows::Change;
use rows::Holds;
use rows::Pair;
use rows::STAGES;
use rows::changes;
use sqlx::AssertSqlSafe;
use sqlx::SqlitePool;

/// Writes it, unless a constraint of the table refuses it.
async fn damage(pool: &SqlitePool, pair: &Pair, change: &Change) {
    let Change { table, column, holds, value } = change;
    let row = if *table == "events" {
        "key"
    } else if *table == "steps" {
        "job_id"
    } else {
        "id"
    };
    let value = value.clone();
    let number = value.as_ref().and_then(|value| str::from_utf8(value).ok()?.parse::<i64>().ok());
    let taken = match (holds, number) {
        (Holds::Text | Holds::Json, _) => "CAST(? AS TEXT)",
        _ => "?",
    };
    let text = format!("UPDATE fenced_{table} SET {column} = {taken} WHERE {row} = ?");
    let update = sqlx::query(AssertSqlSafe(text));
    let update = match number.filter(|_| matches!(holds, Holds::Number | Holds::Time)) {
        Some(number) => update.bind(number),
        None => update.bind(value),
    };
    let update = match *table {
        "events" => update.bind(pair.kept.key.as_str().to_owned()),
        _ => update.bind(pair.damaged.id().as_uuid()),
    };
    drop(update.execute(pool).await);
}

#[test]
fn a_row_changed_at_random_harms_no_other() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let (_folder, path) = folder();
    let clock = ClockOffset::default();
    let (pool, backend) = runtime.block_on(async {
        let options = SqliteOptions::file(&path).clock(clock.clone()).synchronous(backend_sqlite::Synchronous::Normal);
        let backend = SqliteBackend::connect_with(options).await.expect("opens");
        backend.migrate().await.expect("migrates");
        (pool(&path, 1).await, backend)
    });
    let cases = (proptest::sample::select(&STAGES[..]), changes());
    let (harmed, config) = (std::cell::Cell::new(0), config(96));
    let cases_tried = config.cases;
    let tried = TestRunner::new(config).run(&cases, |(stage, changes)| {
        runtime.block_on(async {
            sqlx::raw_sql("DELETE FROM fenced_jobs; DELETE FROM fenced_events").execute(&pool).await.expect("empties");
            let pair = Pair::new(&backend, stage).await;
            for change in &changes {
                damage(&pool, &pair, change).await;
            }
            harmed.set(harmed.get() + u32::from(pair.check(&backend, &clock).await));
        });
        Ok(())
    });
    tried.unwrap_or_else(|failed| panic!("{failed}"));
    assert!(harmed.get() * 8 > cases_tried, "of {cases_tried} rows only {} could not be read", harmed.get());
}

proptest! {
    #![proptest_config(config(512))]

    #[test]
    fn a_url_changed_at_random_is_taken_or_refused(
        url in mutated(
            &["sqlite:jobs.db", "sqlite:///var/lib/%6Aobs.db?mode=rw", "sqlite::memory:", ":memory:", "SQLITE:a?mode=rwc"],
            &["%", "%2", "%ff", "%00", "?", "&", "=", "mode=rw", ":", "/", "\0", "é"],
        ),
    ) {
        match SqliteOptions::from_url(&url) {
            Ok(options) => drop(format!("{options:?}")),
            Err(error) => {
                prop_assert_eq!((error.kind(), error.certainty()), (ErrorKind::Invalid, Certainty::NotApplied));
                drop(format!("{error} {error:?}"));
            }
        }
    }
}
