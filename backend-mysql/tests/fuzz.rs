//! Rows and URLs that were changed at random.

mod common;
#[path = "../../conformance/tests/fuzz/mod.rs"]
mod fuzz;
#[path = "../../conformance/tests/fuzz/rows.rs"]
mod rows;

use backend_mysql::MysqlBackend;
use backend_mysql::MysqlOptions;
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
use sqlx::MySqlPool;

/// Writes it, as a session without any rules would; unless a constraint of the table refuses it.
async fn damage(sloppy: &MySqlPool, pair: &Pair, change: &Change) {
    let Change { table, column, holds, value } = change;
    let (row, of) = match *table {
        "events" => ("event_key", pair.kept.key.as_str().as_bytes().to_vec()),
        "steps" => ("job_id", pair.damaged.id().as_uuid().as_bytes().to_vec()),
        _ => ("id", pair.damaged.id().as_uuid().as_bytes().to_vec()),
    };
    let update = sqlx::query(AssertSqlSafe(format!("UPDATE fenced_{table} SET `{column}` = ? WHERE {row} = ?")));
    let update = match holds {
        Holds::Number | Holds::Time => {
            update.bind(value.as_ref().map(|value| String::from_utf8_lossy(value).into_owned()))
        }
        Holds::Text | Holds::Json | Holds::Bytes => update.bind(value.clone()),
    };
    drop(update.bind(of).execute(sloppy).await);
}

#[test]
fn a_row_changed_at_random_harms_no_other() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    for server in Server::all() {
        println!("on {server}");
        let clock = ClockOffset::default();
        let (database, sloppy, backend) = runtime.block_on(async {
            let database = Database::new(server).await;
            let options = database.options().clock(clock.clone());
            let backend = MysqlBackend::connect_with(options).await.expect("connects");
            backend.migrate().await.expect("migrates");
            let sloppy = database.pool_of(1, "SET sql_mode = ''").await;
            (database, sloppy, backend)
        });
        let cases = (proptest::sample::select(&STAGES[..]), changes());
        let (harmed, config) = (std::cell::Cell::new(0), config(64));
        let cases_tried = config.cases;
        let tried = TestRunner::new(config).run(&cases, |(stage, changes)| {
            runtime.block_on(async {
                let empty = "DELETE FROM fenced_jobs; DELETE FROM fenced_events";
                sqlx::raw_sql(empty).execute(&sloppy).await.expect("empties");
                let pair = Pair::new(&backend, stage).await;
                for change in &changes {
                    damage(&sloppy, &pair, change).await;
                }
                harmed.set(harmed.get() + u32::from(pair.check(&backend, &clock).await));
            });
            Ok(())
        });
        runtime.block_on(async {
            sloppy.close().await;
            backend.close().await;
            database.discard().await;
        });
        tried.unwrap_or_else(|failed| panic!("{server}: {failed}"));
        assert!(harmed.get() * 8 > cases_tried, "of {cases_tried} rows only {} could not be read", harmed.get());
    }
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
                "mysql://u:hunter2secret@host:3306/db?ssl-mode=REQUIRED",
                "MariaDB://u:hunter2secret@[::1]/db?socket=/run/mysqld.sock&statement-cache-capacity=9",
            ],
            &["%", "%ff", "%00", "?", "&", "=", "@", ":", "/", "[", "]", "#", "ssl-mode", "ssl-ca=", "charset=", "\0", "é", "9999999"],
        ),
    ) {
        match MysqlOptions::from_url(&url) {
            Ok(options) => prop_assert!(!shows(&options)),
            Err(error) => {
                prop_assert_eq!((error.kind(), error.certainty()), (ErrorKind::Invalid, Certainty::NotApplied));
                prop_assert!(!error.to_string().contains(SECRET) && !shows(&error), "{:?}", error);
            }
        }
    }
}
