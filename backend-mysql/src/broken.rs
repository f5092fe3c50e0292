//! The typical mistakes on these servers, each made on purpose, and the case of the suite that catches it there.

#[path = "../tests/harness/mod.rs"]
mod harness;

use std::sync::Arc;
use std::sync::Mutex;

use async_trait::async_trait;
use harness::MysqlHarness;
use harness::MysqlStore;
use harness::Server;
use queue_conformance::BoxError;
use queue_conformance::CallerTransaction;
use queue_conformance::Damage;
use queue_conformance::Harness;
use queue_conformance::Hold;
use queue_conformance::Hook;
use queue_conformance::Scope;
use queue_conformance::Store;
use queue_conformance::cases;
use queue_conformance::run_case;
use queue_core::Capabilities;
use queue_core::Delay;
use queue_core::Execution;
use queue_core::Inspect;
use queue_core::JobId;
use sqlx::AssertSqlSafe;
use sqlx::SqlSafeStr;
use sqlx::SqlStr;

use crate::handle::Handle;

/// A statement of a handle.
type Statement = fn(&mut Handle) -> &mut SqlStr;

/// What is wrong.
#[derive(Clone, Copy)]
enum Mistake {
    None,
    /// In a statement, as its first and its second text.
    Statement(Statement, &'static str, &'static str),
    /// In several statements at once.
    Statements(&'static [(Statement, &'static str, &'static str)]),
    /// In the whole of a statement: what stands for it.
    Whole(Statement, &'static str),
    /// In the tables.
    Tables(&'static str),
}

struct Broken {
    harness: MysqlHarness,
    mistake: Mistake,
    /// A store is kept after a failure, which here is what is wanted.
    databases: Mutex<Vec<String>>,
}

struct BrokenStore {
    store: MysqlStore,
    mistake: Mistake,
}

#[async_trait]
impl Harness for Broken {
    fn name(&self) -> String {
        format!("{}, broken", self.harness.name())
    }

    fn capabilities(&self) -> Capabilities {
        self.harness.capabilities()
    }

    fn hooks(&self) -> &'static [Hook] {
        self.harness.hooks()
    }

    async fn provision(&self, scope: &Scope) -> Result<Arc<dyn Store>, BoxError> {
        if let Ok(mut databases) = self.databases.lock() {
            databases.push(scope.name().to_owned());
        }
        let store = MysqlStore::provision(self.harness, scope.name()).await?;
        if let Mistake::Tables(text) = self.mistake {
            self.harness.server.run(&format!("USE {}; {text}", scope.name())).await?;
        }
        Ok(Arc::new(BrokenStore { store, mistake: self.mistake }))
    }
}

fn change(statement: &mut SqlStr, right: &str, wrong: &str) -> Result<(), BoxError> {
    let changed = statement.as_str().replace(right, wrong);
    if changed == statement.as_str() {
        return Err(format!("the statement does not have {right:?}").into());
    }
    *statement = AssertSqlSafe(changed).into_sql_str();
    Ok(())
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Store for BrokenStore {
    async fn connect(&self) -> Result<Arc<dyn Inspect>, BoxError> {
        let mut backend = self.store.backend().await?;
        let handle = Arc::get_mut(&mut backend.0).ok_or("the handle is shared")?;
        match self.mistake {
            Mistake::None | Mistake::Tables(_) => {}
            Mistake::Statement(statement, right, wrong) => change(statement(handle), right, wrong)?,
            Mistake::Statements(changes) => {
                for (statement, right, wrong) in changes {
                    change(statement(handle), right, wrong)?;
                }
            }
            Mistake::Whole(statement, wrong) => *statement(handle) = SqlStr::from_static(wrong),
        }
        Ok(Arc::new(backend))
    }

    async fn discard(&self) -> Result<(), BoxError> {
        self.store.discard().await
    }

    async fn advance(&self, delay: Delay) -> Result<(), BoxError> {
        self.store.advance(delay).await
    }

    async fn overwrite(&self, row: &Execution) -> Result<(), BoxError> {
        self.store.overwrite(row).await
    }

    async fn damage(&self, id: JobId, damage: Damage) -> Result<(), BoxError> {
        self.store.damage(id, damage).await
    }

    async fn hold(&self, row: &Execution) -> Result<Box<dyn Hold>, BoxError> {
        self.store.hold(row).await
    }

    async fn begin(&self, settles: Option<&Execution>) -> Result<Box<dyn CallerTransaction>, BoxError> {
        self.store.begin(settles).await
    }
}

/// What the case says of a backend with this mistake.
async fn judge(harness: MysqlHarness, mistake: Mistake, case: &str) -> Result<(), String> {
    let case = cases().into_iter().find(|known| known.id == case).expect("a case of the suite");
    let broken = Broken { harness, mistake, databases: Mutex::default() };
    let verdict = run_case(&broken, &case, 1).await;
    for database in broken.databases.into_inner().expect("not poisoned") {
        let text = format!("DROP DATABASE IF EXISTS {database}");
        harness.server.run(&text).await.expect("drops");
    }
    verdict
}

/// That the case passes without the mistake and fails with it, and by what it checks.
async fn caught(pooled: bool, case: &str, mistake: impl Fn(Server) -> Mistake) {
    for server in Server::all() {
        let harness = MysqlHarness { server, pooled };
        judge(harness, Mistake::None, case).await.expect("the backend as it is passes");
        let verdict = judge(harness, mistake(server), case).await;
        let report = verdict.expect_err("the mistake must be caught");
        assert!(report.starts_with(case) && !report.contains("provisioned"), "{report}");
        println!("{server}: {}", report.lines().nth(1).unwrap_or_default());
        assert!(!report.contains("does not have") && !report.contains("is shared"), "{report}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_compared_row_that_is_not_locked() {
    caught(false, "update::race_has_one_winner", |_| {
        Mistake::Statement(|handle| &mut handle.sql.lock, " FOR UPDATE", "")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_locks_nothing() {
    caught(false, "claim::race_gives_each_job_once", |_| {
        Mistake::Statement(|handle| &mut handle.sql.due, "FOR UPDATE SKIP LOCKED", "")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_waits_for_locked_rows() {
    caught(false, "claim::skips_locked_rows", |_| {
        Mistake::Statement(|handle| &mut handle.sql.due, "FOR UPDATE SKIP LOCKED", "FOR UPDATE")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_beat_that_waits_for_locked_rows() {
    caught(false, "lease::does_not_wait_for_a_held_row", |_| {
        Mistake::Statement(|handle| &mut handle.sql.beat, "FOR UPDATE SKIP LOCKED", "FOR UPDATE")
    })
    .await;
}

/// As where affected rows count those that changed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_rows_instead_of_matched_ones() {
    let unchanged = "WHERE NOT (j.state <=> e.state AND j.attempt <=> e.attempt \
                     AND j.revision = COALESCE(UNHEX(e.revision), j.revision)) AND LAST_INSERT_ID";
    caught(false, "update::restating_what_is_there_applies", |_| {
        Mistake::Statement(|handle| &mut handle.sql.update, "WHERE LAST_INSERT_ID", unchanged)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_null_that_is_compared_with_equals() {
    caught(false, "recover::stale_lists_expired_and_unset_leases", |_| {
        Mistake::Statement(|handle| &mut handle.sql.stale, "lease_expires_at IS NULL", "lease_expires_at = NULL")
    })
    .await;
}

/// Of sessions whose zones are east and west of Greenwich.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_session_s_clock() {
    caught(true, "claim::due_means_not_after_now", |server| match server {
        Server::Mysql => Mistake::Statement(|handle| &mut handle.sql.insert, "UTC_TIMESTAMP(6)", "NOW(6)"),
        _ => Mistake::Statement(|handle| &mut handle.sql.due, "UTC_TIMESTAMP(6)", "NOW(6)"),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_that_ignore_case_and_trailing_spaces() {
    // That of a server's defaults, and the one that is called binary.
    for tables in [
        "ALTER TABLE fenced_jobs MODIFY active_key VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci \
         GENERATED ALWAYS AS (CASE WHEN state IN ('completed', 'failed', 'canceled') THEN NULL \
         ELSE CONVERT(unique_key USING utf8mb4) END) STORED",
        "ALTER TABLE fenced_jobs MODIFY active_key VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin \
         GENERATED ALWAYS AS (CASE WHEN state IN ('completed', 'failed', 'canceled') THEN NULL \
         ELSE CONVERT(unique_key USING utf8mb4) END) STORED",
    ] {
        caught(false, "unique::keys_are_compared_byte_for_byte", |_| Mistake::Tables(tables)).await;
    }
}

/// It would hide a truncated value as well as a taken key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_insert_that_ignores_what_it_cannot_store() {
    caught(false, "unique::race_has_one_winner", |_| {
        Mistake::Statement(|handle| &mut handle.sql.insert, "INSERT INTO", "INSERT IGNORE INTO")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn texts_that_are_cut_by_characters() {
    caught(false, "data::payloads_are_kept_byte_for_byte", |_| {
        Mistake::Statement(|handle| &mut handle.sql.insert, "SUBSTRING(?,", "SUBSTRING(CONVERT(? USING utf8mb4),")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_beat_that_shortens_a_lease() {
    caught(false, "lease::never_shortened", |_| {
        Mistake::Statement(
            |handle| &mut handle.sql.extend,
            "GREATEST(COALESCE(j.lease_expires_at,",
            "LEAST(COALESCE(j.lease_expires_at,",
        )
    })
    .await;
}

/// At SERIALIZABLE the walk of a claim locks what it passes, and waits for what others have locked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_session_s_isolation_level() {
    caught(true, "claim::skips_locked_rows", |_| {
        Mistake::Statement(|handle| &mut handle.sql.begin, "READ COMMITTED", "SERIALIZABLE")
    })
    .await;
}

/// The event and the wait that come at once do not meet: each has looked before the other has written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_is_read_without_being_locked_first() {
    caught(false, "waits::race_of_registration_and_event", |_| {
        Mistake::Whole(|handle| &mut handle.sql.hold_event, "DO ? IS NULL, ? IS NULL, ? IS NULL")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_whose_job_is_not_locked() {
    caught(false, "steps::race_of_values", |_| {
        Mistake::Statement(|handle| &mut handle.sql.lock_step, " FOR UPDATE", "")
    })
    .await;
}

/// The job is locked and as it is, and the step as it was when the transaction began.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_that_a_snapshot_shows() {
    caught(false, "steps::race_of_values", |_| {
        Mistake::Statements(&[
            (
                |handle| &mut handle.sql.begin,
                "START TRANSACTION",
                "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; START TRANSACTION WITH CONSISTENT SNAPSHOT,",
            ),
            (
                |handle| &mut handle.sql.lock_step,
                "fenced_steps AS s FORCE INDEX (PRIMARY)",
                "(SELECT * FROM fenced_steps) AS s",
            ),
        ])
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sweep_of_waits_that_waits_for_locked_rows() {
    caught(false, "waits::locked_jobs_are_skipped", |_| {
        Mistake::Statement(|handle| &mut handle.sql.overdue, "FOR UPDATE SKIP LOCKED", "FOR UPDATE")
    })
    .await;
}

/// A release that knows no steps purges jobs as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_that_the_store_does_not_delete_with_their_job() {
    caught(false, "steps::go_with_their_job", |_| {
        Mistake::Tables("ALTER TABLE fenced_steps DROP FOREIGN KEY fenced_steps_job")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_of_steps_that_ignore_trailing_spaces() {
    caught(false, "steps::names_are_compared_byte_for_byte", |_| {
        Mistake::Tables(
            "ALTER TABLE fenced_steps MODIFY name VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL",
        )
    })
    .await;
}

/// Of sessions whose zones are east and west of Greenwich: events are kept for too long, or not at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_session_s_clock_for_events() {
    caught(true, "events::are_kept_for_their_time", |_| {
        Mistake::Statement(|handle| &mut handle.sql.put_event, "UTC_TIMESTAMP(6)", "NOW(6)")
    })
    .await;
}
