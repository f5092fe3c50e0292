//! The server ends the connection in the middle of a settle.

use std::sync::Arc;
use std::time::Duration;

use fenced_queue::contract::*;
use fenced_queue::*;

use crate::common::*;
use crate::servers::discard;
use crate::servers::open;
use crate::servers::own_name;
use crate::servers::url;

/// Somebody who has locked a row, and may end whoever waits for it.
trait Locker: Sized {
    async fn lock(url: &str, own: &str, id: JobId) -> Self;

    /// Ends the connection that waits for the row, as soon as one does.
    async fn kill_the_waiting(&mut self);

    async fn unlock(self);
}

/// C21, S11
async fn the_settle_is_sent_again<L: Locker>(name: &str) {
    let Some(url) = url(name) else { return };
    let own = own_name();
    let backend = open(name, &url, &own).await;
    backend.migrate().await.expect("migrates");
    // The heartbeat and the sweep would wait, or not, for the same row: they are not what is killed here.
    let store = Store::on_a_server_with(backend, Duration::from_secs(60));
    let queue = store.queue();
    let id = queue.enqueue(&ADD).await.expect("stored").id();
    let (started, mut begun) = tokio::sync::mpsc::unbounded_channel();
    let end = Arc::new(tokio::sync::Notify::new());
    let handler = {
        let end = Arc::clone(&end);
        move |_: JobContext, _: Add| {
            let (started, end) = (started.clone(), Arc::clone(&end));
            async move {
                let _ = started.send(());
                end.notified().await;
                Ok("settled")
            }
        }
    };
    let builder = Worker::builder(&queue).lease(store.lease).register(handler);
    let running = Running::start(builder.build().expect("a worker"));
    begun.recv().await.expect("it begins");
    let mut locker = L::lock(&url, &own, id).await;
    end.notify_one();
    let killed = tokio::time::timeout(Duration::from_secs(60), locker.kill_the_waiting());
    killed.await.expect("the settle waits for the row");
    locker.unlock().await;
    let job = store.until_state(id, JobState::Completed).await;
    assert_eq!((job.execution.attempt, job.execution.fence), (1, 1), "it ran once");
    let report = running.stop().await;
    assert_eq!((report.completed, report.conflicts, report.unrecorded), (1, 0, 0), "one outcome is recorded");
    let sent = store.updates.lock().expect("lock").clone();
    assert!(sent.len() >= 2, "the settle was sent again");
    assert!(sent.iter().all(|update| *update == sent[0]), "it was one decision");
    discard(name, &url, &own).await;
}

#[cfg(feature = "postgres")]
mod on_postgres {
    use fenced_queue::postgres::sqlx::AssertSqlSafe;
    use fenced_queue::postgres::sqlx::Connection;
    use fenced_queue::postgres::sqlx::PgConnection;
    use fenced_queue::postgres::sqlx::query;
    use fenced_queue::postgres::sqlx::query_scalar;
    use fenced_queue::postgres::sqlx::raw_sql;

    use super::*;

    struct OnPostgres {
        holds: PgConnection,
        kills: PgConnection,
        holder: i32,
    }

    impl Locker for OnPostgres {
        async fn lock(url: &str, own: &str, id: JobId) -> Self {
            let mut holds = PgConnection::connect(url).await.expect("connects");
            raw_sql("BEGIN").execute(&mut holds).await.expect("begins");
            let text = format!("SELECT 1 FROM {own}.jobs WHERE id = $1 FOR UPDATE");
            query(AssertSqlSafe(text)).bind(id.as_uuid()).execute(&mut holds).await.expect("locks");
            let holder = query_scalar("SELECT pg_backend_pid()").fetch_one(&mut holds).await.expect("asks");
            let kills = PgConnection::connect(url).await.expect("connects");
            Self { holds, kills, holder }
        }

        async fn kill_the_waiting(&mut self) {
            let text =
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))";
            while query_scalar::<_, i64>(text).bind(self.holder).fetch_one(&mut self.kills).await.expect("kills") == 0 {
            }
        }

        async fn unlock(mut self) {
            raw_sql("ROLLBACK").execute(&mut self.holds).await.expect("rolls back");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_settle_whose_connection_is_terminated_is_sent_again() {
        the_settle_is_sent_again::<OnPostgres>("postgres").await;
    }
}

#[cfg(feature = "mysql")]
mod on_mysql {
    use fenced_queue::mysql::sqlx::AssertSqlSafe;
    use fenced_queue::mysql::sqlx::Connection;
    use fenced_queue::mysql::sqlx::MySqlConnection;
    use fenced_queue::mysql::sqlx::query;
    use fenced_queue::mysql::sqlx::query_scalar;
    use fenced_queue::mysql::sqlx::raw_sql;

    use super::*;

    struct OnMysql {
        holds: MySqlConnection,
        kills: MySqlConnection,
        holder: u64,
    }

    impl Locker for OnMysql {
        async fn lock(url: &str, own: &str, id: JobId) -> Self {
            let mut holds = MySqlConnection::connect(url).await.expect("connects");
            raw_sql("BEGIN").execute(&mut holds).await.expect("begins");
            let text = format!("SELECT 1 FROM {own}jobs WHERE id = ? FOR UPDATE");
            query(AssertSqlSafe(text)).bind(id.as_uuid()).execute(&mut holds).await.expect("locks");
            let holder = query_scalar("SELECT CONNECTION_ID()").fetch_one(&mut holds).await.expect("asks");
            let kills = MySqlConnection::connect(url).await.expect("connects");
            Self { holds, kills, holder }
        }

        async fn kill_the_waiting(&mut self) {
            let version = query_scalar::<_, String>("SELECT VERSION()").fetch_one(&mut self.kills).await.expect("asks");
            let (waits, waiting, blocking) = match version.contains("MariaDB") {
                true => ("information_schema.innodb_lock_waits", "requesting_trx_id", "blocking_trx_id"),
                false => (
                    "performance_schema.data_lock_waits",
                    "requesting_engine_transaction_id",
                    "blocking_engine_transaction_id",
                ),
            };
            let text = format!(
                "SELECT waits.trx_mysql_thread_id FROM {waits} AS w \
                   JOIN information_schema.innodb_trx AS waits ON waits.trx_id = w.{waiting} \
                   JOIN information_schema.innodb_trx AS holds ON holds.trx_id = w.{blocking} \
                 WHERE holds.trx_mysql_thread_id = ?"
            );
            loop {
                let text = AssertSqlSafe(text.clone());
                let waiting = query_scalar::<_, u64>(text).bind(self.holder).fetch_optional(&mut self.kills).await;
                if let Some(thread) = waiting.expect("looks") {
                    let kill = AssertSqlSafe(format!("KILL {thread}"));
                    raw_sql(kill).execute(&mut self.kills).await.expect("kills");
                    return;
                }
                // InnoDB shows what it has collected before to whoever asks again within a tenth of a second.
                tokio::time::sleep(Duration::from_millis(150)).await;
            }
        }

        async fn unlock(mut self) {
            raw_sql("ROLLBACK").execute(&mut self.holds).await.expect("rolls back");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_settle_whose_connection_is_killed_is_sent_again() {
        the_settle_is_sent_again::<OnMysql>("mysql").await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn on_mariadb_too() {
        the_settle_is_sent_again::<OnMysql>("mariadb").await;
    }
}
