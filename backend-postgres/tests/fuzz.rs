//! Rows and URLs that were changed at random.

mod common;
#[path = "../../conformance/tests/fuzz/mod.rs"]
mod fuzz;
#[path = "../../conformance/tests/fuzz/rows.rs"]
mod rows;

use backend_postgres::PostgresBackend;
use backend_postgres::PostgresOptions;
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
use sqlx::PgPool;

/// Writes it, unless its type or a constraint of the table refuses it.
async fn damage(scratch: &Scratch, pool: &PgPool, pair: &Pair, change: &Change) {
    let Change { table, column, holds, value } = change;
    let (row, of) = match *table {
        "events" => ("key", pair.kept.key.to_string()),
        "steps" => ("job_id::text", pair.damaged.id().to_string()),
        _ => ("id::text", pair.damaged.id().to_string()),
    };
    let cast = match (holds, *column) {
        (Holds::Number, "priority") => "smallint",
        (Holds::Number, _) => "bigint",
        (Holds::Time, _) => "timestamptz",
        (Holds::Bytes, _) => "uuid",
        (Holds::Json, "errors") => "json",
        (Holds::Json | Holds::Text, _) => "text",
    };
    let value = value.as_ref().and_then(|value| match holds {
        Holds::Bytes => value.first_chunk().map(|bytes| uuid::Uuid::from_bytes(*bytes).to_string()),
        _ => Some(String::from_utf8_lossy(value).into_owned()),
    });
    let text = format!("UPDATE {{schema}}.{table} SET {column} = CAST($1 AS {cast}) WHERE {row} = $2");
    drop(sqlx::query(scratch.text(&text)).bind(value).bind(of).execute(pool).await);
}

#[test]
fn a_row_changed_at_random_harms_no_other() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let clock = ClockOffset::default();
    let scratch = Scratch::new();
    let (pool, backend) = runtime.block_on(async {
        let backend = PostgresBackend::connect_with(scratch.options().clock(clock.clone())).await.expect("connects");
        backend.migrate().await.expect("migrates");
        (scratch.pool(1).await, backend)
    });
    let cases = (proptest::sample::select(&STAGES[..]), changes());
    let (harmed, config) = (std::cell::Cell::new(0), config(96));
    let cases_tried = config.cases;
    let tried = TestRunner::new(config).run(&cases, |(stage, changes)| {
        runtime.block_on(async {
            let empty = scratch.text("DELETE FROM {schema}.jobs; DELETE FROM {schema}.events");
            sqlx::raw_sql(empty).execute(&pool).await.expect("empties");
            let pair = Pair::new(&backend, stage).await;
            for change in &changes {
                damage(&scratch, &pool, &pair, change).await;
            }
            harmed.set(harmed.get() + u32::from(pair.check(&backend, &clock).await));
        });
        Ok(())
    });
    runtime.block_on(pool.close());
    tried.unwrap_or_else(|failed| panic!("{failed}"));
    assert!(harmed.get() * 8 > cases_tried, "of {cases_tried} rows only {} could not be read", harmed.get());
}

const SECRET: &str = "hunter2secret";

fn shows(value: &impl std::fmt::Debug) -> bool {
    format!("{value:?}").contains(SECRET)
}

proptest! {
    #![proptest_config(config(512))]

    #[test]
    fn a_url_changed_at_random_is_taken_or_refused(
        url in mutated(
            &[
                "postgres://u:hunter2secret@host:5432/db?sslmode=require",
                "postgresql://u:hunter2secret@[::1]/db?options=-c%20geqo%3Doff&application_name=a",
                "postgres:///db?host=/run/postgresql&user=u&password=hunter2secret&statement-cache-capacity=9",
            ],
            &["%", "%ff", "%00", "?", "&", "=", "@", ":", "/", "[", "]", "#", "options[", "sslmode", "port=", "hostaddr=", "\0", "é", "9999999"],
        ),
    ) {
        match PostgresOptions::from_url(&url) {
            Ok(options) => prop_assert!(!shows(&options)),
            Err(error) => {
                prop_assert_eq!((error.kind(), error.certainty()), (ErrorKind::Invalid, Certainty::NotApplied));
                prop_assert!(!error.to_string().contains(SECRET) && !shows(&error), "{:?}", error);
            }
        }
    }
}
