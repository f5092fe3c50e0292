//! How the servers go about the statements: the very texts that are run, explained, and the rows that they read counted. (B7)

mod common;

use backend_mysql::MysqlBackend;
use common::*;
use queue_core::*;
use sqlx::AssertSqlSafe;
use sqlx::MySqlConnection;
use sqlx::Row;

/// A statement with these values in place of its parameters.
fn filled(backend: &MysqlBackend, statement: &str, values: &[&str]) -> String {
    let (_, text) = backend.statements().into_iter().find(|(name, _)| *name == statement).expect("a statement");
    let mut parts = text.split('?');
    let mut filled = parts.next().unwrap_or_default().to_owned();
    let mut values = values.iter();
    for part in parts {
        filled += values.next().unwrap_or_else(|| panic!("{statement} has more parameters"));
        filled += part;
    }
    assert!(values.next().is_none(), "{statement} has fewer parameters");
    filled
}

const LIMIT: &str = "10";
const NEVER: &str = "x'00000000000000000000000000000000'";

/// Ids that are stored, as a batch.
async fn batch(database: &Database, condition: &str) -> String {
    let rows = database
        .rows(&format!(
            "SELECT CONCAT('{{\"item\":0,\"failure\":0,\"id\":\"', HEX(id), '\",\"queue\":\"', HEX(queue), '\",\"revision\":\"', HEX(revision), \
             '\",\"worker\":\"', HEX(COALESCE(claimed_by, '')), '\"}}') AS item FROM fenced_jobs WHERE {condition} LIMIT 10"
        ))
        .await;
    let items: Vec<_> = rows.iter().map(|row| String::from_utf8(row.get("item")).expect("text")).collect();
    assert_eq!(items.len(), 10, "{condition}");
    format!("'[{}]'", items.join(","))
}

/// Waits for the event `paid` that jobs are suspended with, as a batch.
async fn waits(database: &Database) -> String {
    let rows = database
        .rows(
            "SELECT CONCAT('{\"failure\":0,\"id\":\"', HEX(job_id), '\",\"name\":\"', HEX(name), '\",\"event\":\"', HEX(event), '\"}') \
             AS item FROM fenced_steps WHERE state = 'waiting' AND event = 'paid' LIMIT 10",
        )
        .await;
    let items: Vec<_> = rows.iter().map(|row| String::from_utf8(row.get("item")).expect("text")).collect();
    assert_eq!(items.len(), 10);
    format!("'[{}]'", items.join(","))
}

/// The statements that look for rows, each with the index that it must use, and whether it may sort (a few rows of
/// several walks).
async fn statements(
    database: &Database,
    backend: &MysqlBackend,
) -> Vec<(&'static str, String, Vec<&'static str>, bool)> {
    let held = batch(database, "queue = 'mail' AND state = 'running'").await;
    let kinds = format!("'{}'", "welcome".bytes().map(|byte| format!("{byte:02X}")).collect::<String>());
    let due = filled(backend, "due", &["'mail'", "0", &kinds, LIMIT]);
    let any_due = filled(backend, "any_due", &["'mail'", "0", &kinds]);
    let unset = ["1", NEVER, LIMIT];
    let expired = ["0", "0", "0", NEVER, LIMIT];
    let stale = [&unset[..], &unset, &expired, &expired, &[LIMIT]].concat();
    let own = ["'web-1/1'", NEVER, "0", "0", LIMIT];
    let waits = waits(database).await;
    let asleep = batch(database, "queue = 'mail' AND state = 'suspended' AND available_at < '2002-01-01'").await;
    let keys: Vec<_> = (b'0'..=b'9').map(|key| format!("{{\"event_key\":\"{key:02X}\"}}")).collect();
    let keys = format!("'[{}]'", keys.join(","));
    let revision = "x'0123456789abcdef0123456789abcdef'";
    let keyed = batch(database, "queue = 'mail' AND state = 'running'").await.replace("\"revision\"", "\"unique_key\"");
    vec![
        ("known", filled(backend, "known", &[&keyed]), vec!["PRIMARY", "jobs_unique"], false),
        ("due", due, vec!["jobs_due", "PRIMARY"], false),
        ("any_due", any_due, vec!["jobs_due"], false),
        ("lock", filled(backend, "lock", &["0", &held]), vec!["PRIMARY"], false),
        ("beat", filled(backend, "beat", &[&held]), vec!["PRIMARY"], false),
        ("extend", filled(backend, "extend", &["0", &held, "60000"]), vec!["PRIMARY"], false),
        ("stale", filled(backend, "stale", &stale), vec!["jobs_leased"], true),
        ("claimed_by", filled(backend, "claimed_by", &[&own[..], &own, &[LIMIT]].concat()), vec!["jobs_held"], true),
        ("old", filled(backend, "old", &["'canceled'", "0", "0", LIMIT]), vec!["jobs_ended", "PRIMARY"], false),
        ("delete", filled(backend, "delete", &[&held]), vec!["PRIMARY"], false),
        ("get", filled(backend, "get", &[NEVER]), vec![], false),
        ("steps", filled(backend, "steps", &[NEVER]), vec!["PRIMARY"], false),
        ("lock_step", filled(backend, "lock_step", &["0", &waits]), vec!["PRIMARY"], false),
        ("touch", filled(backend, "touch", &[NEVER]), vec!["PRIMARY"], false),
        ("hold_event", filled(backend, "hold_event", &["'paid'", "0", "0"]), vec![], false),
        ("event", filled(backend, "event", &["'paid'", "0"]), vec![], false),
        ("put_event", filled(backend, "put_event", &["'paid'", "0", "0", "'1'"]), vec![], false),
        ("waits", filled(backend, "waits", &["'paid'"]), vec!["steps_waiting", "PRIMARY"], false),
        ("end_waits", filled(backend, "end_waits", &[&waits, "'1'"]), vec!["PRIMARY"], false),
        ("overdue", filled(backend, "overdue", &["0", LIMIT]), vec!["jobs_suspended", "PRIMARY"], false),
        ("time_out", filled(backend, "time_out", &[&asleep]), vec!["PRIMARY"], false),
        ("wake", filled(backend, "wake", &["0", &asleep, revision]), vec!["PRIMARY"], false),
        ("old_events", filled(backend, "old_events", &["1", "0", LIMIT]), vec!["events_old", "PRIMARY"], false),
        ("old_places", filled(backend, "old_events", &["0", "0", LIMIT]), vec!["events_old", "PRIMARY"], false),
        ("delete_events", filled(backend, "delete_events", &[&keys]), vec!["PRIMARY"], false),
        (
            "list",
            filled(backend, "list", &[NEVER, "NULL", "NULL", "NULL", "NULL", "NULL", "NULL", LIMIT]),
            vec!["PRIMARY"],
            false,
        ),
    ]
}

/// How many rows and entries of indexes the server hands to a statement, which is rolled back.
async fn reads(connection: &mut MySqlConnection, statement: &str) -> u64 {
    let status = "SHOW SESSION STATUS LIKE 'Handler_read%'";
    let count = async |connection: &mut MySqlConnection| {
        let rows = sqlx::raw_sql(status).fetch_all(connection).await.expect("a status");
        rows.iter().map(|row| row.get::<String, _>(1).parse::<u64>().expect("a number")).sum::<u64>()
    };
    sqlx::raw_sql("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; START TRANSACTION")
        .execute(&mut *connection)
        .await
        .expect("begins");
    let before = count(connection).await;
    sqlx::raw_sql(AssertSqlSafe(statement)).fetch_all(&mut *connection).await.expect("runs");
    let after = count(connection).await;
    sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await.expect("rolls back");
    // What the first look at the counters read itself.
    let again = count(connection).await;
    (after - before).saturating_sub(again - after)
}

async fn assert_plan(
    connection: &mut MySqlConnection,
    server: Server,
    name: &str,
    text: &str,
    keys: &[&str],
    sorts: bool,
) {
    let format = if server == Server::Mysql { "FORMAT = TRADITIONAL " } else { "" };
    let steps = sqlx::raw_sql(AssertSqlSafe(format!("EXPLAIN {format}{text}"))).fetch_all(connection).await;
    let mut used = Vec::new();
    for step in steps.expect("a plan") {
        let column = |name: &str| {
            let bytes = step.try_get_unchecked::<Option<Vec<u8>>, _>(name).expect("a column").unwrap_or_default();
            String::from_utf8(bytes).expect("text")
        };
        let (table, kind, key, extra) = (column("table"), column("type"), column("key"), column("Extra"));
        println!("plan of {name} on {server}: {table} {kind} {key} {extra}");
        if matches!(table.as_str(), "j" | "c" | "holder" | "s" | "v") {
            assert!(!matches!(kind.as_str(), "ALL" | "index"), "{name}: {table} is read from end to end");
            assert!(sorts || !extra.contains("filesort") && !extra.contains("temporary"), "{name}: {extra}");
            used.push(key);
        }
    }
    for key in keys {
        assert!(used.iter().any(|used| used == key), "{name}: {key} is not among {used:?}");
    }
}

/// 100 000 numbers, `n.i`.
fn numbers() -> String {
    let digits = "(SELECT 0 AS d UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4 UNION ALL \
                  SELECT 5 UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 UNION ALL SELECT 9)";
    format!(
        "(SELECT a.d + 10 * b.d + 100 * c.d + 1000 * d.d + 10000 * e.d AS i \
          FROM {digits} a, {digits} b, {digits} c, {digits} d, {digits} e) AS n"
    )
}

/// 100 000 jobs at once.
fn fill(number: u8, queue: &str, kind: &str, state: &str, priority: u8, times: &str) -> String {
    format!(
        "INSERT INTO fenced_jobs (id, queue, kind, state, priority, attempt, max_attempts, fence, revision, created_at, \
           errors, payload, available_at, lease_expires_at, finished_at, claimed_by, claimed_at) \
         SELECT UNHEX(CONCAT('{number:02x}', LPAD(HEX(n.i), 30, '0'))), '{queue}', '{kind}', '{state}', {priority}, 0, 20, 0, \
           UNHEX(LPAD(HEX(n.i), 32, '0')), '2001-01-01', '[]', '1', {times} FROM {}",
        numbers()
    )
}

/// 100 000 steps at once, one of each job that was filled in under this number.
fn fill_steps(number: u8, name: &str, state: &str, event: &str, value: &str) -> String {
    format!(
        "INSERT INTO fenced_steps (job_id, name, fence, state, event, until, revision, value) \
         SELECT UNHEX(CONCAT('{number:02x}', LPAD(HEX(n.i), 30, '0'))), '{name}', 1, '{state}', {event}, '2001-01-01', \
           UNHEX(LPAD(HEX(n.i), 32, '0')), {value} FROM {}",
        numbers()
    )
}

/// 100 000 events, or places of such, at once.
fn fill_events(what: &str, kept_until: &str, payload: &str) -> String {
    format!(
        "INSERT INTO fenced_events (event_key, kept_until, payload) SELECT CONCAT('{what} ', n.i), {kept_until}, {payload} FROM {}",
        numbers()
    )
}

#[tokio::test]
async fn calls_cost_the_same_behind_what_they_do_not_want() {
    on_each_server(async |database, backend| {
        // Of everything that the statements look for, a few.
        let few: Vec<_> = (0..60).map(|_| job("1")).collect();
        backend.enqueue(&few).await.expect("stores");
        let claimed = backend.claim(&request(40)).await.expect("claims").jobs;
        let (stale, rest) = claimed.split_at(10);
        let (canceled, _) = rest.split_at(10);
        for job in canceled {
            let cancel = Transition::Cancel { reason: "no".into() };
            Transitioner::new(backend).apply(&job.execution, &cancel).await.expect("cancels");
        }
        for job in stale {
            let id = job.id().as_uuid().simple();
            database.run(&format!("UPDATE fenced_jobs SET lease_expires_at = '2001-01-01' WHERE id = x'{id}'")).await;
        }
        for job in &rest[10..20] {
            let waits = wait_for(backend, &job.execution, "paid", When::At(Timestamp::MAX)).await;
            assert!(matches!(waits, Suspended::Waits(_)), "{waits:?}");
        }
        let old: Vec<_> = (0..20).map(|key| format!("('{key}', '2001-01-01', IF({key} < 10, '1', NULL))")).collect();
        let old = format!("INSERT INTO fenced_events (event_key, kept_until, payload) VALUES {}", old.join(", "));
        let overdue = "UPDATE fenced_jobs SET available_at = '2001-01-01' WHERE state = 'suspended'";
        database.run(&format!("{old}; {overdue}")).await;
        let mut connection = database.session().await;
        let alone: Vec<_> = {
            let mut alone = Vec::new();
            for (_, text, _, _) in statements(database, backend).await {
                alone.push(reads(&mut connection, &text).await);
            }
            alone
        };
        for (what, rows) in [
            (
                "future jobs of a better priority",
                fill(1, "mail", "welcome", "waiting", 0, "'9999-01-01' - INTERVAL n.i SECOND, NULL, NULL, NULL, NULL"),
            ),
            (
                "finished jobs",
                fill(
                    2,
                    "mail",
                    "welcome",
                    "completed",
                    0,
                    "'2001-01-01', NULL, '2001-01-01' + INTERVAL n.i SECOND, 'web-1/1', '2001-01-01'",
                ),
            ),
            (
                "due jobs of other queues",
                fill(3, "lists", "welcome", "waiting", 0, "'2001-01-01' + INTERVAL n.i SECOND, NULL, NULL, NULL, NULL"),
            ),
            (
                "jobs of other workers with a living lease",
                fill(
                    4,
                    "mail",
                    "welcome",
                    "running",
                    0,
                    "'2001-01-01', '9999-01-01' - INTERVAL n.i SECOND, NULL, 'web-0/1', '2001-01-01'",
                ),
            ),
            (
                "jobs that wait for something else, for longer",
                format!(
                    "{}; {}",
                    fill(
                        5,
                        "mail",
                        "welcome",
                        "suspended",
                        0,
                        "'9999-01-01' - INTERVAL n.i SECOND, NULL, NULL, NULL, NULL"
                    ),
                    fill_steps(5, "w", "waiting", "'other'", "NULL"),
                ),
            ),
            ("waits for the same event that are over", fill_steps(2, "w", "done", "'paid'", "'1'")),
            ("steps that are begun", fill_steps(4, "s", "begun", "NULL", "NULL")),
            ("events that are kept", fill_events("kept", "'9999-01-01' - INTERVAL n.i SECOND", "'1'")),
            ("places of events", fill_events("place", "'9999-01-01' - INTERVAL n.i SECOND", "NULL")),
            ("old events", fill_events("old", "'2001-01-01' - INTERVAL n.i SECOND", "'1'")),
        ] {
            database.run(&rows).await;
            for ((name, text, _, _), alone) in statements(database, backend).await.into_iter().zip(&alone) {
                let reads = reads(&mut connection, &text).await;
                assert!(reads <= alone + alone / 4 + 5, "{name} behind {what}: {reads} reads, alone {alone}");
            }
        }
        for analyzed in [false, true] {
            if analyzed {
                database.rows("ANALYZE TABLE fenced_jobs, fenced_steps, fenced_events").await;
            }
            for (name, text, keys, sorts) in statements(database, backend).await {
                assert_plan(&mut connection, database.server, name, &text, &keys, sorts).await;
            }
        }
        for ((name, _, _, _), alone) in statements(database, backend).await.iter().zip(&alone) {
            println!("{name} on {}: {alone} reads", database.server);
        }
    })
    .await;
}

/// A job without a unique key is looked up by its id alone. By a key that is null MariaDB finds what all such jobs have, and goes
/// through every one that is not committed, or deleted, for each job anew: bulk enqueues at once stood still.
#[tokio::test]
async fn a_job_without_a_key_is_not_looked_up_by_one() {
    const KEYLESS: u64 = 50;
    on_each_server(async |database, _| {
        let pool = database.pool_of(1, "DO 0").await;
        let lent = MysqlBackend::from_pool(pool.clone()).await.expect("a handle");
        let lookups = async || {
            let row = sqlx::raw_sql("SHOW SESSION STATUS LIKE 'Handler_read_key'").fetch_one(&pool).await;
            row.expect("a status").get::<String, _>(1).parse::<u64>().expect("a number")
        };
        // The key has the server look for what is known in each way.
        let jobs = || (0..KEYLESS).map(|_| job("1")).chain([keyed("a key")]).collect::<Vec<_>>();
        lent.enqueue(&jobs()).await.expect("stores");
        let before = lookups().await;
        let outcomes = lent.enqueue(&jobs()).await.expect("stores");
        let done = lookups().await - before;
        assert!(matches!(outcomes.last(), Some(Enqueued::Duplicate { .. })));
        // By each id, by the one key, and a few more for what the server does besides.
        assert!(done <= KEYLESS + 10, "{done} look-ups for {KEYLESS} jobs without a key on {}", database.server);
        lent.close().await;
    })
    .await;
}

/// B7b: found behind jobs of kinds that nobody here knows, of which none is locked or touched.
#[tokio::test]
async fn a_claim_finds_its_kind_behind_others() {
    on_each_server(async |database, backend| {
        let times = "'2001-01-01' + INTERVAL n.i SECOND, NULL, NULL, NULL, NULL";
        database.run(&fill(1, "mail", "foreign", "waiting", 5, times)).await;
        backend.enqueue(&(0..10).map(|_| job("1")).collect::<Vec<_>>()).await.expect("stores");
        assert_eq!(backend.claim(&request(10)).await.expect("claims").jobs.len(), 10);
        let touched =
            "SELECT CAST(COUNT(*) AS SIGNED) FROM fenced_jobs WHERE kind = 'foreign' AND (attempt > 0 OR fence > 0)";
        assert_eq!(database.rows(touched).await[0].get::<i64, _>(0), 0);
    })
    .await;
}

#[tokio::test]
async fn ten_thousand_jobs_in_one_call() {
    on_each_server(async |_, backend| {
        let jobs: Vec<_> = (0..10_000).map(|number| job(&number.to_string())).collect();
        let outcomes = backend.enqueue(&jobs).await.expect("stores");
        assert!(outcomes.iter().zip(&jobs).all(|(outcome, job)| *outcome == Enqueued::New(job.id)));
        let again = backend.enqueue(&jobs).await.expect("stores");
        assert!(again.iter().zip(&jobs).all(|(outcome, job)| *outcome == Enqueued::Existing(job.id)));
        let claimed = backend.claim(&request(10_000)).await.expect("claims");
        let held: Vec<_> = claimed.jobs.iter().filter_map(|job| Held::of(&job.execution)).collect();
        let beats = backend.extend_leases(&held, lease()).await.expect("beats");
        assert_eq!(beats, vec![Beat::Extended; 10_000]);
        let mut decisions: Vec<_> =
            claimed.jobs.iter().map(|job| Decision::new(&job.execution, &complete("1")).expect("legal")).collect();
        let settled = Transitioner::new(backend).submit_all(&mut decisions).await;
        assert_eq!(settled.iter().filter(|settled| settled.is_ok()).count(), 10_000);
        assert_eq!(backend.purge(JobState::Completed, Delay::ZERO, limit(10_000)).await.expect("purges"), 10_000);
    })
    .await;
}
