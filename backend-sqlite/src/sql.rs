//! Every statement, as text that is built once per handle.
//!
//! Nothing but the table prefix is spliced in, and that has been checked. `?1` is the clock's offset wherever the clock is
//! read. Ids and revisions travel as hex, since JSON has no bytes; batches travel as JSON arrays, so that a text does
//! not depend on how many rows it is about. What the items of a batch are likely to share travels once for all of them,
//! since every field that is looked up in every item has its price.

use std::sync::Arc;

use queue_core::Failure;
use queue_core::Identifier;
use queue_core::Priority;
use queue_core::Timestamp;
use sqlx::AssertSqlSafe;
use sqlx::SqlSafeStr;
use sqlx::SqlStr;

/// SQLite's clock in whole milliseconds. It counts them itself, then divides by 1000: `round` gives back what it counted.
/// The clock is read once per statement, when the lock that the statement needs has been granted.
const NOW: &str = "(CAST(round(unixepoch('subsec') * 1000) AS INTEGER) + ?1)";

/// What lifecycle decisions are based on.
const EXECUTION: &str = "id, state, attempt, max_attempts, fence, revision, claimed_by, claimed_at, attempted_at, \
                         lease_expires_at";

/// What a job has beyond its execution.
const DATA: &str = "queue, kind, payload, priority, available_at, created_at, finished_at, unique_key, result, errors";

/// A step, but for its job.
const STEP: &str = "name, fence, state, event, until, revision, value";

/// As in the partial indexes: a condition must be written as an index has it for the index to be used. The indexes are named
/// in the statements, for the reason that the first migration gives.
const ENDED: &str = "('completed', 'failed', 'canceled')";
const HELD: &str = "('claimed', 'running')";

/// Has an update begin with the batch and look the rows up, also if statistics say that the table is smaller: a join in it
/// cannot be ordered by `CROSS JOIN`.
const FEW: &str = "likelihood(e.value IS NOT NULL, 0.000001)";

/// The statements of one handle.
#[derive(Debug)]
pub(crate) struct Sql {
    pub(crate) begin: SqlStr,
    pub(crate) schema_exists: SqlStr,
    pub(crate) schema: SqlStr,
    pub(crate) lock: SqlStr,
    pub(crate) stored_ids: SqlStr,
    pub(crate) repeated: SqlStr,
    pub(crate) insert: SqlStr,
    pub(crate) holders: SqlStr,
    pub(crate) get: SqlStr,
    pub(crate) claim: SqlStr,
    pub(crate) update: SqlStr,
    pub(crate) executions: SqlStr,
    pub(crate) extend: SqlStr,
    pub(crate) stale: SqlStr,
    pub(crate) claimed_by: SqlStr,
    pub(crate) list: SqlStr,
    pub(crate) counts: SqlStr,
    pub(crate) purge: SqlStr,
    pub(crate) steps: SqlStr,
    pub(crate) step: SqlStr,
    pub(crate) put_step: SqlStr,
    pub(crate) event: SqlStr,
    pub(crate) kept_event: SqlStr,
    pub(crate) put_event: SqlStr,
    pub(crate) end_waits: SqlStr,
    pub(crate) overdue: SqlStr,
    pub(crate) time_out: SqlStr,
    pub(crate) wake: SqlStr,
    pub(crate) purge_events: SqlStr,
}

impl Sql {
    pub(crate) fn new(prefix: &Identifier) -> Self {
        let text = |text: String| AssertSqlSafe(Arc::<str>::from(text)).into_sql_str();
        let jobs = format!("{prefix}jobs");
        let schema = format!("{prefix}schema");
        let (steps, events) = (format!("{prefix}steps"), format!("{prefix}events"));
        // It is the wait that the job is suspended with, and no earlier one.
        let is_current = format!(
            "EXISTS (SELECT 1 FROM {jobs} AS j INDEXED BY {jobs}_id WHERE j.id = job_id AND j.state = 'suspended' \
               AND j.revision = {steps}.revision)"
        );
        let (first, last) = (Timestamp::MIN.unix_millis(), Timestamp::MAX.unix_millis());
        Self {
            // A transaction that reads before it writes must not begin as a reader: SQLite refuses to make a writer of it
            // once somebody else has written, without waiting.
            begin: text("BEGIN IMMEDIATE".to_owned()),
            schema_exists: text(format!("SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = '{schema}'")),
            schema: text(format!("SELECT version, oldest_version, oldest_release FROM {schema}")),
            // Changes nothing: it takes the write lock in a transaction that the caller may have begun as a reader.
            lock: text(format!("UPDATE {schema} SET version = version WHERE false")),
            // `?2` is the call's revision: whether it stored the row itself.
            stored_ids: text(format!(
                "SELECT id, revision = ?2 AS own FROM {jobs} INDEXED BY {jobs}_id \
                 WHERE id IN (SELECT unhex(value) FROM json_each(?1))"
            )),
            // Which items are stored with this content. Compared here, so that a row of a newer version, which
            // this one cannot read, is still known again.
            repeated: text(format!(
                "SELECT j.id FROM {} CROSS JOIN {jobs} AS j INDEXED BY {jobs}_id ON j.id = unhex(e.value ->> 'id') \
                 WHERE j.queue = e.queue AND j.kind = e.kind AND j.payload = e.value ->> 'payload' \
                   AND j.priority = e.priority AND j.max_attempts = e.max_attempts \
                   AND j.unique_key IS e.value ->> 'unique_key'",
                sharing_batch("?1", "?2", NEW),
            )),
            // An item that is left out has an id or a key that is taken.
            insert: text(format!(
                "INSERT INTO {jobs} (id, queue, kind, state, priority, attempt, max_attempts, fence, revision, \
                   available_at, created_at, unique_key, payload) \
                 SELECT unhex(value ->> 'id'), queue, kind, 'waiting', priority, 0, max_attempts, 0, ?4, \
                   coalesce(\"at\", min({NOW} + \"after\", {last})), {NOW}, value ->> 'unique_key', value ->> 'payload' \
                 FROM {} WHERE true ON CONFLICT DO NOTHING",
                sharing_batch("?2", "?3", NEW),
            )),
            holders: text(format!(
                "SELECT unhex(e.value ->> 'id') AS item, j.id FROM {} CROSS JOIN {jobs} AS j \
                   INDEXED BY {jobs}_unique ON j.queue = e.queue AND j.unique_key = e.value ->> 'unique_key' \
                 WHERE j.state NOT IN {ENDED}",
                sharing_batch("?1", "?2", NEW),
            )),
            get: text(format!("SELECT {EXECUTION}, {DATA} FROM {jobs} INDEXED BY {jobs}_id WHERE id = ?1")),
            claim: text(claim(&jobs)),
            update: text(update(&jobs)),
            executions: text(format!(
                "SELECT {EXECUTION} FROM {jobs} INDEXED BY {jobs}_id WHERE id IN (SELECT unhex(value) FROM json_each(?1))"
            )),
            extend: text(format!(
                "UPDATE {jobs} AS j INDEXED BY {jobs}_id \
                 SET lease_expires_at = max(coalesce(j.lease_expires_at, {first}), min({NOW} + ?2, {last})) \
                 FROM {} \
                 WHERE {FEW} AND j.id = unhex(e.value ->> 'id') AND j.revision = unhex(e.value ->> 'revision') \
                   AND j.claimed_by = e.value ->> 'worker' AND j.state IN {HELD} \
                 RETURNING id, revision, claimed_by",
                batch("?3"),
            )),
            // Two walks through one index: ?2 is whether the cursor is among the missing leases, ?3 and ?4 are the cursor.
            stale: text(format!(
                "SELECT * FROM (SELECT {EXECUTION} FROM {jobs} INDEXED BY {jobs}_leased WHERE state IN {HELD} \
                   AND lease_expires_at IS NULL AND ?2 AND id > ?4 ORDER BY id LIMIT ?5) \
                 UNION ALL \
                 SELECT * FROM (SELECT {EXECUTION} FROM {jobs} INDEXED BY {jobs}_leased WHERE state IN {HELD} \
                   AND lease_expires_at <= {NOW} AND (lease_expires_at, id) > (?3, ?4) \
                   ORDER BY lease_expires_at, id LIMIT ?5) \
                 LIMIT ?5"
            )),
            claimed_by: text(format!(
                "SELECT {EXECUTION} FROM {jobs} INDEXED BY {jobs}_held WHERE state IN {HELD} AND claimed_by = ?2 AND id > ?3 \
                   AND claimed_at <= max({NOW} - ?4, {first}) ORDER BY id LIMIT ?5"
            )),
            list: text(format!(
                "SELECT {EXECUTION}, {DATA} FROM {jobs} INDEXED BY {jobs}_id WHERE id > ?1 AND (?2 IS NULL OR queue = ?2) \
                   AND (?3 IS NULL OR kind = ?3) AND (?4 IS NULL OR state = ?4) ORDER BY id LIMIT ?5"
            )),
            counts: text(format!("SELECT queue, state, count(*) AS jobs FROM {jobs} GROUP BY queue, state")),
            purge: text(format!(
                "DELETE FROM {jobs} INDEXED BY {jobs}_id WHERE id IN (SELECT id FROM {jobs} INDEXED BY {jobs}_ended \
                   WHERE state = ?2 AND finished_at <= max({NOW} - ?3, {first}) ORDER BY finished_at, id LIMIT ?4)"
            )),
            steps: text(format!("SELECT {STEP} FROM {steps} INDEXED BY {steps}_name WHERE job_id = ?1 ORDER BY name")),
            step: text(format!("SELECT {STEP} FROM {steps} INDEXED BY {steps}_name WHERE job_id = ?1 AND name = ?2")),
            put_step: text(format!(
                "INSERT INTO {steps} (job_id, name, fence, state, event, until, revision, value) \
                 VALUES (?1, ?2, ?3, ?4, ?5, \
                   CASE ?4 WHEN 'waiting' THEN (SELECT available_at FROM {jobs} INDEXED BY {jobs}_id WHERE id = ?1) END, ?6, ?7) \
                 ON CONFLICT (job_id, name) DO UPDATE SET fence = excluded.fence, state = excluded.state, event = excluded.event, \
                   until = excluded.until, revision = excluded.revision, value = excluded.value \
                 RETURNING {STEP}"
            )),
            event: text(format!(
                "SELECT payload FROM {events} INDEXED BY {events}_key WHERE key = ?2 AND kept_until > {NOW}"
            )),
            kept_event: text(format!("SELECT payload FROM {events} INDEXED BY {events}_key WHERE key = ?1")),
            put_event: text(format!(
                "INSERT INTO {events} (key, payload, kept_until) VALUES (?2, ?3, min({NOW} + ?4, {last})) \
                 ON CONFLICT (key) DO UPDATE SET payload = excluded.payload, kept_until = excluded.kept_until \
                   WHERE {events}.kept_until <= {NOW}"
            )),
            end_waits: text(format!(
                "UPDATE {steps} INDEXED BY {steps}_waiting SET state = 'done', value = ?2 \
                 WHERE state = 'waiting' AND event = ?1 AND {is_current} RETURNING job_id"
            )),
            overdue: text(format!(
                "SELECT id FROM {jobs} INDEXED BY {jobs}_suspended WHERE state = 'suspended' AND available_at <= {NOW} \
                   ORDER BY available_at, id LIMIT ?2"
            )),
            time_out: text(format!(
                "UPDATE {steps} INDEXED BY {steps}_name SET state = 'timed_out' \
                 WHERE job_id IN (SELECT unhex(value) FROM json_each(?1)) AND state = 'waiting' AND {is_current}"
            )),
            wake: text(format!(
                "UPDATE {jobs} INDEXED BY {jobs}_id SET state = 'waiting', revision = ?2, available_at = {NOW}, \
                   claimed_by = NULL, claimed_at = NULL, attempted_at = NULL, lease_expires_at = NULL, finished_at = NULL, \
                   result = NULL \
                 WHERE id IN (SELECT unhex(value) FROM json_each(?3)) AND state = 'suspended'"
            )),
            purge_events: text(format!(
                "DELETE FROM {events} INDEXED BY {events}_key WHERE key IN (SELECT key FROM {events} INDEXED BY {events}_old \
                   WHERE kept_until <= {NOW} ORDER BY kept_until LIMIT ?2)"
            )),
        }
    }

    /// The statements by name.
    pub(crate) fn all(&self) -> Vec<(&'static str, &str)> {
        [
            ("begin", &self.begin),
            ("schema_exists", &self.schema_exists),
            ("schema", &self.schema),
            ("lock", &self.lock),
            ("stored_ids", &self.stored_ids),
            ("repeated", &self.repeated),
            ("insert", &self.insert),
            ("holders", &self.holders),
            ("get", &self.get),
            ("claim", &self.claim),
            ("update", &self.update),
            ("executions", &self.executions),
            ("extend", &self.extend),
            ("stale", &self.stale),
            ("claimed_by", &self.claimed_by),
            ("list", &self.list),
            ("counts", &self.counts),
            ("purge", &self.purge),
            ("steps", &self.steps),
            ("step", &self.step),
            ("put_step", &self.put_step),
            ("event", &self.event),
            ("kept_event", &self.kept_event),
            ("put_event", &self.put_event),
            ("end_waits", &self.end_waits),
            ("overdue", &self.overdue),
            ("time_out", &self.time_out),
            ("wake", &self.wake),
            ("purge_events", &self.purge_events),
        ]
        .map(|(name, text)| (name, text.as_str()))
        .into()
    }
}

/// The items of a batch. The limit, which is none, keeps SQLite from writing an item out anew for every field that is read
/// of it.
fn batch(parameter: &str) -> String {
    format!("(SELECT key, value FROM json_each({parameter}) LIMIT -1) AS e")
}

/// The fields of [`NewShare`](crate::row::NewShare).
const NEW: &[&str] = &["queue", "kind", "priority", "max_attempts", "at", "after"];

/// The fields of [`UpdateShare`](crate::row::UpdateShare).
const UPDATE: &[&str] = &[
    "seen_state",
    "seen_attempt",
    "seen_claimed_by",
    "seen_lease",
    "state",
    "attempt",
    "at",
    "after",
    "clear_claim",
    "attempted_at",
    "lease_expires_at",
    "lease",
    "finished_at",
    "result",
];

/// The items of a batch, each beside the fields that it shares with others.
fn sharing_batch(items: &str, shares: &str, fields: &[&str]) -> String {
    let fields: Vec<_> = fields.iter().map(|field| format!("value ->> '{field}' AS \"{field}\"")).collect();
    format!(
        "(SELECT e.value, s.* FROM {} CROSS JOIN (SELECT key AS share, {} FROM {} LIMIT -1) AS s \
           ON s.share = e.value ->> 'share' LIMIT -1) AS e",
        batch(items),
        fields.join(", "),
        batch(shares),
    )
}

/// `?2` queue, `?3` kinds, `?4` limit, `?5` 1 to start or 0 to reserve, `?6` revision, `?7` worker, `?8` lease.
///
/// One probe per priority: with one `ORDER BY` over all of them, due jobs would be found behind every future job of a
/// better priority, entry by entry. A probe runs only if those before it left room in the outer limit.
fn claim(jobs: &str) -> String {
    let last = Timestamp::MAX.unix_millis();
    let probe = |priority| {
        format!(
            "SELECT id FROM (SELECT id FROM {jobs} INDEXED BY {jobs}_due WHERE state = 'waiting' AND queue = ?2 \
               AND priority = {priority} AND available_at <= {NOW} AND kind IN (SELECT value FROM json_each(?3)) \
               ORDER BY available_at, id LIMIT ?4)"
        )
    };
    let probes: Vec<_> = (Priority::FIRST.get()..=Priority::LAST.get()).map(probe).collect();
    format!(
        "UPDATE {jobs} INDEXED BY {jobs}_id SET state = CASE ?5 WHEN 1 THEN 'running' ELSE 'claimed' END, \
           attempt = min(attempt, {} - ?5) + ?5, fence = min(fence, {} - 1) + 1, revision = ?6, claimed_by = ?7, \
           claimed_at = {NOW}, attempted_at = CASE ?5 WHEN 1 THEN {NOW} END, lease_expires_at = min({NOW} + ?8, {last}) \
         WHERE id IN ({} LIMIT ?4) RETURNING {EXECUTION}, {DATA}",
        u32::MAX,
        i64::MAX,
        probes.join(" UNION ALL "),
    )
}

/// `?2` the batch, `?3` what its items share. The `WHERE` is the fingerprint, the `SET` the patch; see `row` for how they
/// travel. A row that could not be answered for, because another column of its lifecycle is out of range, is not written
/// either.
fn update(jobs: &str) -> String {
    let last = Timestamp::MAX.unix_millis();
    let changed = |column: &str, set: &str| {
        format!("{column} = CASE e.{column} WHEN 'set' THEN {set} WHEN 'keep' THEN j.{column} END")
    };
    // What is no list, by somebody else's hand, must not keep the failure from being recorded. `json_each` passes through
    // a list in its order.
    let errors = format!(
        "CASE WHEN e.value -> 'failure' IS NULL THEN j.errors ELSE json_insert(\
           (SELECT json_group_array(kept.list -> old.fullkey) FROM (SELECT \
              CASE WHEN json_valid(j.errors) AND json_type(j.errors) = 'array' THEN j.errors ELSE '[]' END AS list) AS kept, \
              json_each(kept.list) AS old WHERE old.key > json_array_length(kept.list) - {}), \
           '$[#]', json_set(e.value -> 'failure', '$.at', {NOW})) END",
        Failure::KEPT,
    );
    format!(
        "UPDATE {jobs} AS j INDEXED BY {jobs}_id SET state = e.state, attempt = e.attempt, \
           revision = coalesce(unhex(e.value ->> 'revision'), j.revision), \
           available_at = coalesce(e.\"at\", min({NOW} + e.\"after\", {last}), j.available_at), \
           claimed_by = CASE WHEN e.clear_claim THEN NULL ELSE j.claimed_by END, \
           claimed_at = CASE WHEN e.clear_claim THEN NULL ELSE j.claimed_at END, \
           {}, {}, {}, {}, payload = coalesce(e.value ->> 'payload', j.payload), errors = {errors} \
         FROM {} \
         WHERE {FEW} AND j.id = unhex(e.value ->> 'id') AND j.state = e.seen_state \
           AND j.attempt = e.seen_attempt AND j.claimed_by IS e.seen_claimed_by \
           AND j.claimed_at IS e.value ->> 'seen_claimed_at' AND j.attempted_at IS e.value ->> 'seen_attempted_at' \
           AND j.revision = unhex(e.value ->> 'seen_revision') \
           AND j.fence >= 0 AND j.max_attempts BETWEEN 1 AND {} \
           AND CASE e.seen_lease WHEN 'any' THEN true WHEN 'unset' THEN j.lease_expires_at IS NULL \
               ELSE j.lease_expires_at = e.value ->> 'seen_expiry' AND j.lease_expires_at <= {NOW} END \
         RETURNING {EXECUTION}",
        changed("attempted_at", NOW),
        changed("lease_expires_at", &format!("min({NOW} + e.lease, {last})")),
        changed("finished_at", NOW),
        changed("result", "e.value ->> 'result_text'"),
        sharing_batch("?2", "?3", UPDATE),
        u32::MAX,
    )
}
