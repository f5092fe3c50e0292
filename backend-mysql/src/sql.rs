//! Every statement, as text that is built once per handle: the same texts for MySQL and MariaDB.
//!
//! Nothing but the table prefix is spliced in, and that has been checked. A batch travels as one JSON array of plain ASCII
//! (ids as hex), so that a text does not depend on how many rows it is about, and its long texts beside it, in strings of bytes
//! that the statement cuts them out of: no parser of the server's ever sees them.
//!
//! Rows are locked by their primary key alone, in the order of their ids or without waiting, so that no two calls wait for
//! each other. Where rows are found by another index, that is an ordinary read which locks nothing, and each row is locked by a
//! subquery as the outer statement passes it.

use std::sync::Arc;

use queue_core::Delay;
use queue_core::Identifier;
use queue_core::Priority;
use queue_core::Timestamp;
use sqlx::AssertSqlSafe;
use sqlx::SqlSafeStr;
use sqlx::SqlStr;

use crate::batch::Width;

/// The server's clock in whole milliseconds, cut and not rounded, and `?` what is added to it. It is the time at which the
/// statement began, so a statement that may wait for rows must not write it.
const NOW: &str = "(TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', UTC_TIMESTAMP(6)) DIV 1000 + ?)";

/// The clock of a statement, read once: one row, `n.now`.
fn clock() -> String {
    format!("(SELECT {NOW} AS now) AS n")
}

/// Always true. The server's answer to the statement brings what it wrote as now along, as the id that it inserted last, and so
/// the caller learns it without asking again. (A trigger of the application's on the table keeps it out of the answer; then
/// `told` asks.)
const TOLD: &str = "LAST_INSERT_ID(n.now) > 0";

/// Milliseconds as a column keeps them.
fn at(millis: &str) -> String {
    format!("(TIMESTAMP'1970-01-01 00:00:00' + INTERVAL ({millis}) * 1000 MICROSECOND)")
}

/// Some time after now, or the last that there is.
fn after(millis: &str) -> String {
    at(&format!("LEAST(n.now + {millis}, {})", Timestamp::MAX.unix_millis()))
}

/// What lifecycle decisions are based on.
const EXECUTION: [&str; 10] = [
    "id",
    "state",
    "attempt",
    "max_attempts",
    "fence",
    "revision",
    "claimed_by",
    "claimed_at",
    "attempted_at",
    "lease_expires_at",
];

/// A step, but for its job; its columns stand beside those of the job.
const STEP: &str = "s.name AS step_name, s.fence AS step_fence, s.state AS step_state, s.event, s.until, \
                    s.revision AS step_revision, s.value";

/// How long a row stays that is no event, but was made so that an event and who waits for it lock the same.
const PLACE: Delay = Delay::from_hours(24);

/// What a job has beyond its execution.
const DATA: [&str; 10] = [
    "queue",
    "kind",
    "payload",
    "priority",
    "available_at",
    "created_at",
    "finished_at",
    "unique_key",
    "result",
    "errors",
];

fn columns(table: &str, columns: &[&str]) -> String {
    let columns: Vec<_> = columns.iter().map(|column| format!("{table}.{column}")).collect();
    columns.join(", ")
}

/// The states in which a worker holds a job.
const HELD: &str = "('claimed', 'running')";

/// The items of a batch, `?` the JSON array. A field that an item lacks is null.
fn batch(fields: &[(&str, &str)]) -> String {
    let fields: Vec<_> = fields.iter().map(|(name, kind)| format!("{name} {kind} PATH '$.{name}'")).collect();
    format!("JSON_TABLE(?, '$[*]' COLUMNS ({})) AS e", fields.join(", "))
}

/// The same for a statement that locks rows: MySQL refuses to lock those of a table that is computed, but not of one in a bracket.
fn batch_beside_locks(fields: &[(&str, &str)]) -> String {
    format!("(SELECT * FROM {}) AS e", batch(fields))
}

const UUID: &str = "VARCHAR(32)";
const NAME: &str = "VARCHAR(544)";
const NUMBER: &str = "BIGINT";

/// The items of a batch that have many fields, `?` the JSON array: each is one [`Packed`] text, and a field stands in it at a
/// fixed place. Each column of a JSON object costs a search through it.
fn packed(fields: &[(&str, Width)]) -> String {
    let mut from = 1;
    let mut columns = Vec::new();
    for (name, width) in fields {
        let text = format!("SUBSTRING(p.item, {from}, {})", width.characters());
        columns.push(match width {
            Width::Uuid => format!("{text} AS {name}"),
            Width::Word => format!("LTRIM({text}) AS {name}"),
            Width::Number => format!("CAST({text} AS SIGNED) AS {name}"),
        });
        from += width.characters();
    }
    format!(
        "(SELECT {} FROM JSON_TABLE(?, '$[*]' COLUMNS (item VARCHAR({from}) PATH '$')) AS p) AS e",
        columns.join(", ")
    )
}

/// A long text of an item, cut out of the string `?`.
fn cut(text: &str) -> String {
    format!("SUBSTRING(?, e.{text}_from, e.{text}_bytes)")
}

/// The statements of one handle.
#[derive(Debug)]
pub(crate) struct Sql {
    pub(crate) begin: SqlStr,
    pub(crate) schema_exists: SqlStr,
    pub(crate) schema: SqlStr,
    pub(crate) known: SqlStr,
    pub(crate) known_now: SqlStr,
    pub(crate) insert: SqlStr,
    pub(crate) get: SqlStr,
    pub(crate) due: SqlStr,
    pub(crate) any_due: SqlStr,
    pub(crate) claim: SqlStr,
    pub(crate) lock: SqlStr,
    pub(crate) update: SqlStr,
    pub(crate) told: SqlStr,
    pub(crate) inserted: SqlStr,
    pub(crate) beat: SqlStr,
    pub(crate) extend: SqlStr,
    pub(crate) stale: SqlStr,
    pub(crate) claimed_by: SqlStr,
    pub(crate) list: SqlStr,
    pub(crate) counts: SqlStr,
    pub(crate) old: SqlStr,
    pub(crate) delete: SqlStr,
    pub(crate) steps: SqlStr,
    pub(crate) lock_step: SqlStr,
    pub(crate) touch: SqlStr,
    pub(crate) put_step: SqlStr,
    pub(crate) hold_event: SqlStr,
    pub(crate) event: SqlStr,
    pub(crate) put_event: SqlStr,
    pub(crate) waits: SqlStr,
    pub(crate) end_waits: SqlStr,
    pub(crate) overdue: SqlStr,
    pub(crate) time_out: SqlStr,
    pub(crate) wake: SqlStr,
    pub(crate) old_events: SqlStr,
    pub(crate) delete_events: SqlStr,
}

impl Sql {
    /// `session_is_ours`: the sessions were told their isolation level when they were opened.
    pub(crate) fn new(prefix: &Identifier, session_is_ours: bool, is_cluster: bool) -> Self {
        let text = |text: String| AssertSqlSafe(Arc::<str>::from(text)).into_sql_str();
        let jobs = format!("{prefix}jobs");
        let schema = format!("{prefix}schema");
        let (steps, events) = (format!("{prefix}steps"), format!("{prefix}events"));
        let first = at(&Timestamp::MIN.unix_millis().to_string());
        let execution = columns("j", &EXECUTION);
        let job = columns("j", &[EXECUTION, DATA].concat());
        let ids = batch(&[("id", UUID)]);
        let by_id = format!("STRAIGHT_JOIN {jobs} AS j FORCE INDEX (PRIMARY) ON j.id = UNHEX(e.id)");
        // One message, and so one round trip.
        let level = if session_is_ours { "" } else { "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; " };
        let mark = if is_cluster { "; SAVEPOINT fenced_queue" } else { "" };
        let begin = format!("{level}START TRANSACTION READ WRITE{mark}");
        Self {
            begin: text(begin),
            schema_exists: text(
                "SELECT 1 FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = ?".to_owned(),
            ),
            schema: text(format!("SELECT version, oldest_version, oldest_release FROM {schema}")),
            known: text(known(&jobs)),
            // The same about what is there at this moment, whatever the transaction's snapshot shows.
            known_now: text(format!("{} LOCK IN SHARE MODE", known(&jobs))),
            insert: text(insert(&jobs)),
            get: text(format!("SELECT {job} FROM {jobs} AS j WHERE j.id = ?")),
            due: text(due(&jobs)),
            any_due: text(format!("SELECT 1 FROM {} LIMIT 1", are_due(&jobs))),
            claim: text(format!(
                "UPDATE {} STRAIGHT_JOIN {ids} {by_id} SET j.state = ?, \
                   j.attempt = LEAST(j.attempt, {} - ?) + ?, j.fence = LEAST(j.fence, {} - 1) + 1, j.revision = ?, \
                   j.claimed_by = ?, j.claimed_at = {now}, j.attempted_at = IF(?, {now}, NULL), \
                   j.lease_expires_at = {} WHERE {TOLD}",
                clock(),
                u32::MAX,
                u64::MAX,
                after("?"),
                now = at("n.now"),
            )),
            lock: text(format!(
                "SELECT {execution}, IF(e.failure, j.errors, NULL) AS errors, n.now, LAST_INSERT_ID() AS inserted \
                 FROM {} STRAIGHT_JOIN {} {by_id} FOR UPDATE",
                clock(),
                batch_beside_locks(&[("id", UUID), ("failure", NUMBER)]),
            )),
            update: text(update(&jobs)),
            told: text("SELECT LAST_INSERT_ID()".to_owned()),
            // On a connection of the application, which may ask for the id that it inserted.
            inserted: text("SELECT LAST_INSERT_ID(?)".to_owned()),
            // By what is there when the row is locked; null where somebody else has it locked.
            beat: text(format!(
                "SELECT e.item, (SELECT j.revision = UNHEX(e.revision) AND COALESCE(j.claimed_by = UNHEX(e.worker), FALSE) \
                   AND j.state IN {HELD} FROM {jobs} AS j FORCE INDEX (PRIMARY) WHERE j.id = c.id \
                   FOR UPDATE SKIP LOCKED) AS is_held \
                 FROM {} STRAIGHT_JOIN {jobs} AS c FORCE INDEX (PRIMARY) ON c.id = UNHEX(e.id)",
                batch(&[("item", NUMBER), ("id", UUID), ("revision", UUID), ("worker", NAME)]),
            )),
            extend: text(format!(
                "UPDATE {} STRAIGHT_JOIN {ids} {by_id} \
                 SET j.lease_expires_at = GREATEST(COALESCE(j.lease_expires_at, {first}), {})",
                clock(),
                after("?"),
            )),
            stale: text(stale(&jobs)),
            claimed_by: text(merged(
                &["'claimed'", "'running'"].map(|state| {
                    format!(
                        "SELECT {execution} FROM {jobs} AS j FORCE INDEX (jobs_held) WHERE j.claimed_by = ? \
                           AND j.state = {state} AND j.id >= ? AND j.claimed_at <= {} ORDER BY j.id LIMIT ?",
                        at(&format!("GREATEST({NOW} - ?, {})", Timestamp::MIN.unix_millis())),
                    )
                }),
                "id",
            )),
            list: text(format!(
                "SELECT {job} FROM {jobs} AS j FORCE INDEX (PRIMARY) WHERE j.id >= ? AND (? IS NULL OR j.queue = ?) \
                   AND (? IS NULL OR j.kind = ?) AND (? IS NULL OR j.state = ?) ORDER BY j.id LIMIT ?"
            )),
            counts: text(format!(
                "SELECT queue, state, COUNT(*) AS jobs FROM {jobs} FORCE INDEX (jobs_due) GROUP BY queue, state"
            )),
            old: text(format!(
                "SELECT c.id, (SELECT 1 FROM {jobs} AS j FORCE INDEX (PRIMARY) WHERE j.id = c.id AND j.state = c.state \
                   AND j.finished_at = c.finished_at FOR UPDATE SKIP LOCKED) AS is_locked \
                 FROM {jobs} AS c FORCE INDEX (jobs_ended) WHERE c.state = ? AND c.finished_at <= {} \
                 HAVING is_locked IS NOT NULL ORDER BY c.finished_at, c.id LIMIT ?",
                at(&format!("GREATEST({NOW} - ?, {})", Timestamp::MIN.unix_millis())),
            )),
            delete: text(format!("DELETE j FROM {ids} {by_id}")),
            steps: text(format!(
                "SELECT {STEP} FROM {steps} AS s FORCE INDEX (PRIMARY) WHERE s.job_id = ? ORDER BY s.name"
            )),
            // From left to right: the job is locked, and then its step is read.
            lock_step: text(format!(
                "SELECT {execution}, j.available_at, IF(e.failure, j.errors, NULL) AS errors, n.now, {STEP}, \
                   v.payload AS event_payload \
                 FROM {} STRAIGHT_JOIN {} {by_id} \
                   LEFT JOIN {steps} AS s FORCE INDEX (PRIMARY) ON s.job_id = j.id AND s.name = UNHEX(e.name) \
                   LEFT JOIN {events} AS v FORCE INDEX (PRIMARY) ON v.event_key = UNHEX(e.event) AND v.kept_until > {} \
                 FOR UPDATE",
                clock(),
                batch_beside_locks(&[("id", UUID), ("name", NAME), ("failure", NUMBER), ("event", NAME)]),
                at("n.now"),
            )),
            // Run twice it has written the row, and changed nothing.
            touch: text(format!(
                "UPDATE {jobs} AS j FORCE INDEX (PRIMARY) SET j.attempt = j.attempt ^ 1 WHERE j.id = ?"
            )),
            put_step: text(format!(
                "REPLACE INTO {steps} (job_id, name, fence, state, event, until, revision, value) \
                 VALUES (?, ?, ?, ?, ?, {}, ?, ?)",
                at("?"),
            )),
            // An event that is there is locked and stays as it is. What is no event, or none any more, is written: in a cluster
            // a lock is the node's own, and only who has written the same row learns of each other.
            hold_event: text(format!(
                "INSERT INTO {events} (event_key, kept_until) VALUES (?, {}) \
                 ON DUPLICATE KEY UPDATE kept_until = {events}.kept_until - INTERVAL \
                   IF({events}.payload IS NOT NULL AND {events}.kept_until > {}, 0, 1000) MICROSECOND",
                at(&format!("LEAST({NOW} + {}, {})", PLACE.as_millis(), Timestamp::MAX.unix_millis())),
                at(NOW),
            )),
            event: text(format!(
                "SELECT v.payload AS event_payload FROM {events} AS v FORCE INDEX (PRIMARY) \
                 WHERE v.event_key = ? AND v.payload IS NOT NULL AND v.kept_until > {} FOR UPDATE",
                at(NOW),
            )),
            put_event: text(format!(
                "REPLACE INTO {events} (event_key, kept_until, payload) VALUES (?, {}, ?)",
                at(&format!("LEAST({NOW} + ?, {})", Timestamp::MAX.unix_millis())),
            )),
            // Whose job is suspended with this very wait, and locked now.
            waits: text(format!(
                "SELECT c.job_id AS id, c.name, (SELECT 1 FROM {jobs} AS j FORCE INDEX (PRIMARY) WHERE j.id = c.job_id \
                   AND j.state = 'suspended' AND j.revision = c.revision FOR UPDATE) AS is_locked \
                 FROM {steps} AS c FORCE INDEX (steps_waiting) WHERE c.state = 'waiting' AND c.event = ? \
                 HAVING is_locked IS NOT NULL ORDER BY c.job_id, c.name"
            )),
            end_waits: text(format!(
                "UPDATE {} STRAIGHT_JOIN {steps} AS s FORCE INDEX (PRIMARY) ON s.job_id = UNHEX(e.id) AND s.name = UNHEX(e.name) \
                 SET s.state = 'done', s.value = ?",
                batch(&[("id", UUID), ("name", NAME)]),
            )),
            overdue: text(format!(
                "SELECT c.id, (SELECT 1 FROM {jobs} AS j FORCE INDEX (PRIMARY) WHERE j.id = c.id AND j.state = c.state \
                   AND j.available_at = c.available_at FOR UPDATE SKIP LOCKED) AS is_locked \
                 FROM {jobs} AS c FORCE INDEX (jobs_suspended) WHERE c.state = 'suspended' AND c.available_at <= {} \
                 HAVING is_locked IS NOT NULL ORDER BY c.available_at, c.id LIMIT ?",
                at(NOW),
            )),
            time_out: text(format!(
                "UPDATE {ids} {by_id} STRAIGHT_JOIN {steps} AS s FORCE INDEX (PRIMARY) ON s.job_id = j.id \
                 SET s.state = 'timed_out' WHERE s.state = 'waiting' AND s.revision = j.revision"
            )),
            wake: text(format!(
                "UPDATE {} STRAIGHT_JOIN {ids} {by_id} SET j.state = 'waiting', j.revision = ?, j.available_at = {}, \
                   j.claimed_by = NULL, j.claimed_at = NULL, j.attempted_at = NULL, j.lease_expires_at = NULL, \
                   j.finished_at = NULL, j.result = NULL",
                clock(),
                at("n.now"),
            )),
            old_events: text(format!(
                "SELECT c.event_key, (SELECT 1 FROM {events} AS v FORCE INDEX (PRIMARY) WHERE v.event_key = c.event_key \
                   AND v.is_event = c.is_event AND v.kept_until = c.kept_until FOR UPDATE SKIP LOCKED) AS is_locked \
                 FROM {events} AS c FORCE INDEX (events_old) WHERE c.is_event = ? AND c.kept_until <= {} \
                 HAVING is_locked IS NOT NULL ORDER BY c.kept_until, c.event_key LIMIT ?",
                at(NOW),
            )),
            delete_events: text(format!(
                "DELETE v FROM {} STRAIGHT_JOIN {events} AS v FORCE INDEX (PRIMARY) ON v.event_key = UNHEX(e.event_key)",
                batch(&[("event_key", NAME)]),
            )),
        }
    }

    /// The statements by name.
    pub(crate) fn all(&self) -> Vec<(&'static str, &str)> {
        self.texts().map(|(name, text)| (name, text.as_str())).into()
    }

    /// What may be run in a transaction.
    pub(crate) fn in_transactions(&self) -> impl Iterator<Item = &SqlStr> {
        const OUTSIDE: [&str; 10] =
            ["begin", "schema_exists", "schema", "get", "any_due", "stale", "claimed_by", "list", "counts", "steps"];
        self.texts().into_iter().filter(|(name, _)| !OUTSIDE.contains(name)).map(|(_, text)| text)
    }

    fn texts(&self) -> [(&'static str, &SqlStr); 36] {
        [
            ("begin", &self.begin),
            ("schema_exists", &self.schema_exists),
            ("schema", &self.schema),
            ("known", &self.known),
            ("known_now", &self.known_now),
            ("insert", &self.insert),
            ("get", &self.get),
            ("due", &self.due),
            ("any_due", &self.any_due),
            ("claim", &self.claim),
            ("lock", &self.lock),
            ("update", &self.update),
            ("told", &self.told),
            ("inserted", &self.inserted),
            ("beat", &self.beat),
            ("extend", &self.extend),
            ("stale", &self.stale),
            ("claimed_by", &self.claimed_by),
            ("list", &self.list),
            ("counts", &self.counts),
            ("old", &self.old),
            ("delete", &self.delete),
            ("steps", &self.steps),
            ("lock_step", &self.lock_step),
            ("touch", &self.touch),
            ("put_step", &self.put_step),
            ("hold_event", &self.hold_event),
            ("event", &self.event),
            ("put_event", &self.put_event),
            ("waits", &self.waits),
            ("end_waits", &self.end_waits),
            ("overdue", &self.overdue),
            ("time_out", &self.time_out),
            ("wake", &self.wake),
            ("old_events", &self.old_events),
            ("delete_events", &self.delete_events),
        ]
    }
}

/// What is stored under the ids of new jobs, and who has their keys.
fn known(jobs: &str) -> String {
    format!(
        "SELECT e.item, j.id IS NOT NULL AS is_stored, j.queue, j.kind, j.payload, j.priority, j.max_attempts, j.unique_key, \
           holder.id AS holder \
         FROM {} LEFT JOIN {jobs} AS j FORCE INDEX (PRIMARY) ON j.id = UNHEX(e.id) \
           LEFT JOIN {jobs} AS holder FORCE INDEX (jobs_unique) \
             ON holder.queue = UNHEX(e.queue) AND holder.active_key = UNHEX(e.unique_key)",
        batch_beside_locks(&[("item", NUMBER), ("id", UUID), ("queue", NAME), ("unique_key", NAME)]),
    )
}

/// The first `?` are what queues, kinds, keys and payloads are cut out of.
fn insert(jobs: &str) -> String {
    let fields = packed(&[
        ("id", Width::Uuid),
        ("revision", Width::Uuid),
        ("priority", Width::Number),
        ("max_attempts", Width::Number),
        ("available_at", Width::Word),
        ("available_at_ms", Width::Number),
        ("queue_from", Width::Number),
        ("queue_bytes", Width::Number),
        ("kind_from", Width::Number),
        ("kind_bytes", Width::Number),
        ("unique_key_from", Width::Number),
        ("unique_key_bytes", Width::Number),
        ("payload_from", Width::Number),
        ("payload_bytes", Width::Number),
    ]);
    format!(
        "INSERT INTO {jobs} (id, queue, kind, state, priority, attempt, max_attempts, fence, revision, available_at, \
           created_at, unique_key, errors, payload) \
         SELECT UNHEX(e.id), {}, {}, 'waiting', e.priority, 0, e.max_attempts, 0, UNHEX(e.revision), \
           IF(e.available_at = 'at', {}, {}), {}, IF(e.unique_key_from, {}, NULL), '[]', {} \
         FROM {} STRAIGHT_JOIN {fields}",
        cut("queue"),
        cut("kind"),
        at("e.available_at_ms"),
        after("e.available_at_ms"),
        at("n.now"),
        cut("unique_key"),
        cut("payload"),
        clock(),
    )
}

/// The due rows of the queue; `?` the queue, the clock, the kinds as a list of hex.
fn are_due(jobs: &str) -> String {
    let levels: Vec<_> = (Priority::FIRST.get()..=Priority::LAST.get()).map(|level| level.to_string()).collect();
    format!(
        "{jobs} AS c FORCE INDEX (jobs_due) WHERE c.queue = ? AND c.state = 'waiting' AND c.priority IN ({}) \
           AND c.available_at <= {} AND FIND_IN_SET(HEX(c.kind), ?)",
        levels.join(", "),
        at(NOW),
    )
}

/// The first of them, locked; `?` the limit as well.
///
/// One range per priority, which the server walks in order and only as far as the limit: with one range over all of them, due
/// jobs would be found behind every future job of a better priority, entry by entry. A row is locked when it is passed, if
/// nobody else has it locked, and if it is still the moment that the walk sees. The condition on the kind is no subquery, so that
/// the entries of other kinds are passed within the index.
fn due(jobs: &str) -> String {
    format!(
        "SELECT {}, (SELECT 1 FROM {jobs} AS j FORCE INDEX (PRIMARY) WHERE j.id = c.id AND j.state = 'waiting' \
           AND j.revision = c.revision FOR UPDATE SKIP LOCKED) AS is_locked \
         FROM {} HAVING is_locked IS NOT NULL ORDER BY c.priority, c.available_at, c.id LIMIT ?",
        columns("c", &[EXECUTION, DATA].concat()),
        are_due(jobs),
    )
}

/// What the caller has compared, in rows that it has locked. A column says how it changes: `keep`, `clear`, `at` or `after`
/// a number of milliseconds. The last three `?` are what payloads, results and failures are cut out of.
///
/// A month or day 0, which only a session with a lax `sql_mode` stores, a strict one does not even write back: it becomes the first day.
fn update(jobs: &str) -> String {
    let moved = |column: &str| {
        format!(
            "j.{column} = CASE e.{column} \
               WHEN 'keep' THEN IF(MONTH(j.{column}) = 0 OR DAY(j.{column}) = 0, '0001-01-01', j.{column}) \
               WHEN 'at' THEN {} WHEN 'after' THEN {} END",
            at(&format!("e.{column}_ms")),
            after(&format!("e.{column}_ms")),
        )
    };
    let fields = packed(&[
        ("id", Width::Uuid),
        ("revision", Width::Uuid),
        ("state", Width::Word),
        ("attempt", Width::Number),
        ("clear_claim", Width::Number),
        ("available_at", Width::Word),
        ("available_at_ms", Width::Number),
        ("attempted_at", Width::Word),
        ("attempted_at_ms", Width::Number),
        ("lease_expires_at", Width::Word),
        ("lease_expires_at_ms", Width::Number),
        ("finished_at", Width::Word),
        ("finished_at_ms", Width::Number),
        ("payload_from", Width::Number),
        ("payload_bytes", Width::Number),
        ("result", Width::Word),
        ("result_from", Width::Number),
        ("result_bytes", Width::Number),
        ("kept_from", Width::Number),
        ("kept_bytes", Width::Number),
        ("failure_from", Width::Number),
        ("failure_bytes", Width::Number),
    ]);
    format!(
        "UPDATE {} STRAIGHT_JOIN {fields} STRAIGHT_JOIN {jobs} AS j FORCE INDEX (PRIMARY) ON j.id = UNHEX(e.id) \
         SET j.state = e.state, j.attempt = e.attempt, j.revision = UNHEX(e.revision), \
           j.claimed_by = IF(e.clear_claim, NULL, j.claimed_by), j.claimed_at = IF(e.clear_claim, NULL, j.claimed_at), \
           {}, {}, {}, {}, j.payload = IF(e.payload_from, {}, j.payload), \
           j.result = CASE e.result WHEN 'keep' THEN j.result WHEN 'set' THEN {} END, \
           j.errors = IF(e.failure_from, \
             CONCAT('[', SUBSTRING(j.errors, e.kept_from, e.kept_bytes), {}, n.now, '}}]'), j.errors) \
         WHERE {TOLD}",
        clock(),
        moved("available_at"),
        moved("attempted_at"),
        moved("lease_expires_at"),
        moved("finished_at"),
        cut("payload"),
        cut("result"),
        cut("failure"),
    )
}

/// Rows of several walks, each of them in this order and as many as are wanted in all.
fn merged(walks: &[String], order: &str) -> String {
    let walks: Vec<_> = walks.iter().map(|walk| format!("({walk})")).collect();
    format!("SELECT * FROM ({}) AS merged ORDER BY {order} LIMIT ?", walks.join(" UNION ALL "))
}

/// Of each held state the rows without a lease after an id, then those whose lease has run out after a lease and an id.
fn stale(jobs: &str) -> String {
    let walk = |state: &str, lease: &str, order: &str| {
        let execution = columns("j", &EXECUTION);
        format!(
            "SELECT {execution} FROM {jobs} AS j FORCE INDEX (jobs_leased) WHERE j.state = '{state}' AND {lease} \
             ORDER BY {order} LIMIT ?"
        )
    };
    let unset = |state| walk(state, "j.lease_expires_at IS NULL AND ? AND j.id >= ?", "j.id");
    let expired = |state| {
        let seen = at("?");
        let lease = format!(
            "j.lease_expires_at <= {} AND j.lease_expires_at >= {seen} AND (j.lease_expires_at > {seen} OR j.id >= ?)",
            at(NOW)
        );
        walk(state, &lease, "j.lease_expires_at, j.id")
    };
    let walks = [unset("claimed"), unset("running"), expired("claimed"), expired("running")];
    merged(&walks, "lease_expires_at, id")
}
