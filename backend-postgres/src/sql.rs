//! Every statement, as text that is built once per handle.
//!
//! Nothing but the schema is spliced in, and that has been checked. `$1` is the clock's offset wherever the clock is read.
//! Batches travel as one array per column, so that a text does not depend on how many rows it is about.

use std::sync::Arc;

use queue_core::Failure;
use queue_core::Identifier;
use queue_core::Priority;
use sqlx::AssertSqlSafe;
use sqlx::SqlSafeStr;
use sqlx::SqlStr;

/// The server's clock in whole milliseconds, cut, not rounded, at this very moment: the time that `statement_timestamp()` gives lies
/// before the locks of the statement were granted, and `now()` is the transaction's beginning.
const INSTANT: &str = "(date_trunc('milliseconds', clock_timestamp()) + $1 * interval '1 millisecond')";

/// The same, read once per statement: when the locks of its tables have been granted, or those of the rows of `after`.
fn clock(after: Option<&str>) -> String {
    let after = after.map(|rows| format!(" FROM (SELECT count(*) FROM {rows}) AS granted")).unwrap_or_default();
    format!("clock AS MATERIALIZED (SELECT {INSTANT} AS now{after})")
}

const NOW: &str = "(SELECT now FROM clock)";
const FIRST: &str = "'0001-01-01 00:00:00+00'::timestamptz";
const LAST: &str = "'9999-12-31 23:59:59.999+00'::timestamptz";

/// As in the partial indexes: a condition must be written as an index has it for the index to be used.
const ENDED: &str = "('completed', 'failed', 'canceled')";
const HELD: &str = "('claimed', 'running')";

/// How long a statement waits for a lock, in milliseconds, unless the session says how long: longer than any call of ours
/// takes, and short enough for somebody to be told.
pub(crate) const PATIENCE: &str = "10000";

/// How statements are planned where that is ours to say. A plan is kept, also one that was made when the table was a page, and a
/// hundred thousand jobs may come before somebody counts again. So: once for all parameters, by index whatever the size, and
/// without a loop over all rows where it is not written as one. Where it is, the planner takes it for so dear that it would
/// compile the statement to machine code, for a fifth of a second.
const PLANNER: [&str; 4] =
    ["enable_seqscan = off", "enable_nestloop = off", "plan_cache_mode = force_generic_plan", "jit = off"];

/// What a connection of our own is told once.
pub(crate) fn session() -> String {
    let planner = PLANNER.map(|setting| format!("SET {setting}")).join("; ");
    format!(
        "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED; SET lock_timeout = {PATIENCE}; {planner}"
    )
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

fn execution(of: &str) -> String {
    EXECUTION.map(|column| format!("{of}.{column}")).join(", ")
}

/// The whole row of `j`. The driver takes no json for a text.
fn job() -> String {
    let data =
        "j.queue, j.kind, j.payload, j.priority, j.available_at, j.created_at, j.finished_at, j.unique_key, j.result";
    format!("{}, {data}, j.errors::text AS errors", execution("j"))
}

/// A step, but for its job; named so that it can stand beside an execution.
fn step(of: &str) -> String {
    format!(
        "{of}.name, {of}.fence AS step_fence, {of}.state AS step_state, {of}.event, {of}.until, {of}.revision AS step_revision, \
         {of}.value"
    )
}

/// The statements of one handle.
#[derive(Debug)]
pub(crate) struct Sql {
    pub(crate) begin: SqlStr,
    pub(crate) begin_counting: SqlStr,
    pub(crate) server: SqlStr,
    pub(crate) migrating: SqlStr,
    pub(crate) upgrading: SqlStr,
    pub(crate) building: SqlStr,
    pub(crate) schema_exists: SqlStr,
    pub(crate) schema: SqlStr,
    pub(crate) insert: SqlStr,
    pub(crate) refused: SqlStr,
    pub(crate) get: SqlStr,
    pub(crate) claim: SqlStr,
    pub(crate) update: SqlStr,
    pub(crate) extend: SqlStr,
    pub(crate) stale: SqlStr,
    pub(crate) claimed_by: SqlStr,
    pub(crate) list: SqlStr,
    pub(crate) counts: SqlStr,
    pub(crate) purge: SqlStr,
    pub(crate) steps: SqlStr,
    pub(crate) step: SqlStr,
    pub(crate) check: SqlStr,
    pub(crate) write_step: SqlStr,
    pub(crate) put_step: SqlStr,
    pub(crate) lock_event: SqlStr,
    pub(crate) wake: SqlStr,
    pub(crate) time_out: SqlStr,
    pub(crate) purge_events: SqlStr,
}

impl Sql {
    pub(crate) fn new(schema: &Identifier) -> Self {
        let text = |text: String| AssertSqlSafe(Arc::<str>::from(text)).into_sql_str();
        let [jobs, steps, events] = ["jobs", "steps", "events"].map(|table| format!("\"{schema}\".{table}"));
        let (execution, job, step, clock) = (execution("j"), job(), step("s"), clock(None));
        // A lease of before all timestamps is the first of them, in the cursor too.
        let expiry = format!(
            "CASE WHEN j.lease_expires_at IS NULL THEN '-infinity' ELSE greatest(j.lease_expires_at, {FIRST}) END"
        );
        let claim_of_e =
            format!("j.id = e.id AND j.revision = e.revision AND j.claimed_by = e.worker AND j.state IN {HELD}");
        let begin = format!(
            "BEGIN ISOLATION LEVEL READ COMMITTED; \
             SELECT set_config('lock_timeout', '{PATIENCE}', true) WHERE current_setting('lock_timeout') = '0'; "
        );
        Self {
            begin: text(format!("{begin}{}", PLANNER.map(|setting| format!("SET LOCAL {setting}")).join("; "))),
            begin_counting: text(format!("{begin}SET LOCAL enable_seqscan = on")),
            server: text(
                "SELECT current_setting('server_version_num')::bigint AS version, \
                   current_setting('server_encoding') AS encoding, \
                   current_setting('default_transaction_isolation') AS isolation"
                    .to_owned(),
            ),
            // Whoever migrates may take long, and is waited for; an old reader of the table is not, since everybody else would
            // then wait behind us.
            migrating: text(format!(
                "SELECT set_config('lock_timeout', '0', true), \
                   pg_advisory_xact_lock(hashtextextended('fenced_queue {schema}', 0))::text, \
                   set_config('lock_timeout', '{PATIENCE}', true)"
            )),
            // Asked for again and again. What does nothing meanwhile is not to be ended for that.
            upgrading: text(format!(
                "SELECT set_config('idle_in_transaction_session_timeout', '0', true), \
                   pg_try_advisory_xact_lock(hashtextextended('fenced_queue {schema} upgrade', 0)) AS alone"
            )),
            // Seen until it has committed, which is after it has given up its locks. Not a statement like this one.
            building: text(format!(
                "SELECT EXISTS (SELECT FROM pg_catalog.pg_stat_activity WHERE datname = current_database() AND state = 'active' \
                   AND query LIKE '%INDEX CONCURRENTLY %\"{schema}\".%' AND pid <> pg_backend_pid()) AS building"
            )),
            // Not to_regclass, which remembers what there was not.
            schema_exists: text(format!(
                "SELECT true FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace \
                 WHERE n.nspname = '{schema}' AND c.relname = 'schema'"
            )),
            schema: text(format!("SELECT version, oldest_version, oldest_release FROM \"{schema}\".schema")),
            insert: text(insert(&jobs, schema)),
            // What keeps the items that were left out: a row of that id, with that content or another, or a row of that key.
            refused: text(format!(
                "SELECT e.item, j.id AS stored, h.id AS holder, \
                   (j.queue = e.queue AND j.kind = e.kind AND j.payload = e.payload AND j.priority = e.priority \
                     AND j.max_attempts = e.max_attempts AND j.unique_key IS NOT DISTINCT FROM e.unique_key) AS repeated \
                 FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::smallint[], $6::bigint[], $7::text[]) \
                   WITH ORDINALITY AS e(id, queue, kind, payload, priority, max_attempts, unique_key, item) \
                 LEFT JOIN LATERAL (SELECT id, queue, kind, payload, priority, max_attempts, unique_key FROM {jobs} \
                   WHERE id = e.id OFFSET 0) AS j ON true \
                 LEFT JOIN LATERAL (SELECT id FROM {jobs} WHERE queue = e.queue AND unique_key = e.unique_key \
                   AND state NOT IN {ENDED} OFFSET 0) AS h ON true"
            )),
            get: text(format!("SELECT {job} FROM {jobs} AS j WHERE j.id = $1")),
            claim: text(claim(&jobs)),
            update: text(update(&jobs, schema)),
            // A claim that is held, and was not free to be locked, is busy; one that is not held is left out.
            extend: text(format!(
                "WITH {clock}, \
                 held AS MATERIALIZED (SELECT j.id, j.revision, j.claimed_by, free.id AS free \
                   FROM (SELECT * FROM unnest($3::uuid[], $4::uuid[], $5::text[]) AS e(id, revision, worker) ORDER BY id) AS e \
                   CROSS JOIN LATERAL (SELECT j.id, j.revision, j.claimed_by FROM {jobs} AS j WHERE {claim_of_e} OFFSET 0) AS j \
                   LEFT JOIN LATERAL (SELECT j.id FROM {jobs} AS j WHERE {claim_of_e} FOR UPDATE SKIP LOCKED) AS free ON true), \
                 extended AS (UPDATE {jobs} AS j SET lease_expires_at = \
                     greatest(j.lease_expires_at, least(clock.now + $2 * interval '1 millisecond', {LAST})) \
                   FROM clock WHERE j.id = ANY (ARRAY(SELECT free FROM held)) RETURNING j.id) \
                 SELECT held.id, held.revision, held.claimed_by, extended.id IS NOT NULL AS extended \
                 FROM held LEFT JOIN extended ON extended.id = held.free"
            )),
            // $2 and $3 are the cursor, of which the lease may be missing; $3 is missing on the first page.
            stale: text(format!(
                "WITH {clock} SELECT {execution} FROM {jobs} AS j \
                 WHERE j.state IN {HELD} AND (j.lease_expires_at IS NULL OR j.lease_expires_at <= {NOW}) \
                   AND ($3::uuid IS NULL OR ({expiry}, j.id) > (coalesce($2::timestamptz, '-infinity'), $3)) \
                 ORDER BY {expiry}, j.id LIMIT $4"
            )),
            claimed_by: text(format!(
                "WITH {clock} SELECT {execution} FROM {jobs} AS j \
                 WHERE j.state IN {HELD} AND j.claimed_by = $2 AND ($3::uuid IS NULL OR j.id > $3) \
                   AND j.claimed_at <= {NOW} - $4 * interval '1 millisecond' ORDER BY j.id LIMIT $5"
            )),
            list: text(format!(
                "SELECT {job} FROM {jobs} AS j WHERE ($1::uuid IS NULL OR j.id > $1) AND ($2::text IS NULL OR j.queue = $2) \
                   AND ($3::text IS NULL OR j.kind = $3) AND ($4::text IS NULL OR j.state = $4) ORDER BY j.id LIMIT $5"
            )),
            counts: text(format!("SELECT queue, state, count(*) AS jobs FROM {jobs} GROUP BY queue, state")),
            purge: text(format!(
                "WITH {clock}, \
                 gone AS (DELETE FROM {jobs} AS j WHERE j.id = ANY (ARRAY(SELECT ended.id FROM {jobs} AS ended \
                   WHERE ended.state = $2 AND ended.finished_at <= {NOW} - $3 * interval '1 millisecond' \
                   ORDER BY ended.finished_at, ended.id LIMIT $4 FOR UPDATE SKIP LOCKED)) RETURNING j.id) \
                 SELECT count(*) AS jobs FROM gone"
            )),
            steps: text(format!("SELECT {step} FROM {steps} AS s WHERE s.job_id = $1 ORDER BY s.name")),
            step: text(format!("SELECT {step} FROM {steps} AS s WHERE s.job_id = $1 AND s.name = $2")),
            check: text(format!(
                "WITH {} SELECT coalesce(j.matches, false) AS applied, {execution} FROM judged AS j",
                judged(&jobs),
            )),
            write_step: text(write_step(&jobs, &steps)),
            // What becomes of a wait. The place to lock that was made for it goes with it. A deadline is when the job is available.
            put_step: text(format!(
                "WITH place AS (DELETE FROM {events} AS e WHERE e.key = $5 AND e.payload IS NULL) \
                 INSERT INTO {steps} AS s (job_id, name, fence, state, event, revision, value, until) \
                 VALUES ($1, $2, $3, $4, $5, $6, $7, \
                   CASE WHEN $4 = 'waiting' THEN (SELECT j.available_at FROM {jobs} AS j WHERE j.id = $1) END) \
                 ON CONFLICT (job_id, name) DO UPDATE SET fence = excluded.fence, state = excluded.state, event = excluded.event, \
                   revision = excluded.revision, value = excluded.value, until = excluded.until \
                 RETURNING {step}"
            )),
            // Writes what there is, which waits for whoever else has it and then keeps him out; a place to lock if there is nothing.
            lock_event: text(format!(
                "INSERT INTO {events} AS e (key, kept_until) VALUES ($2, {INSTANT}) \
                 ON CONFLICT (key) DO UPDATE SET kept_until = e.kept_until \
                 RETURNING CASE WHEN e.kept_until > {INSTANT} THEN e.payload END AS payload"
            )),
            wake: text(wake(&jobs, &steps, &events, schema)),
            time_out: text(time_out(&jobs, &steps, schema)),
            purge_events: text(format!(
                "WITH {clock}, \
                 gone AS (DELETE FROM {events} AS e WHERE e.key = ANY (ARRAY(SELECT old.key FROM {events} AS old \
                   WHERE old.kept_until <= {NOW} ORDER BY old.kept_until LIMIT $2 FOR UPDATE SKIP LOCKED)) \
                   RETURNING e.payload IS NOT NULL AS is_event) \
                 SELECT count(*) FILTER (WHERE is_event) AS events FROM gone"
            )),
        }
    }

    /// The statements by name.
    pub(crate) fn all(&self) -> Vec<(&'static str, &str)> {
        [
            ("begin", &self.begin),
            ("begin_counting", &self.begin_counting),
            ("server", &self.server),
            ("migrating", &self.migrating),
            ("upgrading", &self.upgrading),
            ("building", &self.building),
            ("schema_exists", &self.schema_exists),
            ("schema", &self.schema),
            ("insert", &self.insert),
            ("refused", &self.refused),
            ("get", &self.get),
            ("claim", &self.claim),
            ("update", &self.update),
            ("extend", &self.extend),
            ("stale", &self.stale),
            ("claimed_by", &self.claimed_by),
            ("list", &self.list),
            ("counts", &self.counts),
            ("purge", &self.purge),
            ("steps", &self.steps),
            ("step", &self.step),
            ("check", &self.check),
            ("write_step", &self.write_step),
            ("put_step", &self.put_step),
            ("lock_event", &self.lock_event),
            ("wake", &self.wake),
            ("time_out", &self.time_out),
            ("purge_events", &self.purge_events),
        ]
        .map(|(name, text)| (name, text.as_str()))
        .into()
    }
}

/// The channel on which workers are woken.
pub(crate) fn channel(schema: &Identifier) -> String {
    format!("{schema}.jobs")
}

/// One row, from which the items of a batch are joined: so the time-out is in force before any of them is locked or stored.
/// In the caller's transaction `$2` is null, and the session's own is set, to what it is.
fn patience() -> String {
    "(SELECT set_config('lock_timeout', CASE current_setting('lock_timeout') WHEN '0' THEN coalesce($2, '0') \
       ELSE current_setting('lock_timeout') END, true) AS patience) AS waits"
        .to_owned()
}

/// `$2` the patience, `$3` whether to notify, then the batch. An item that is left out has an id or a key that is taken.
///
/// Stored in the order of the batch, which is the same for everybody who stores the same: else two would wait for each other.
fn insert(jobs: &str, schema: &Identifier) -> String {
    format!(
        "WITH {}, \
         stored AS (INSERT INTO {jobs} AS j (id, revision, fence, attempt, max_attempts, available_at, created_at, priority, \
             state, queue, kind, unique_key, payload) \
           SELECT e.id, e.revision, 0, 0, e.max_attempts, \
             coalesce(e.at, least(clock.now + e.after * interval '1 millisecond', {LAST})), clock.now, e.priority, \
             'waiting', e.queue, e.kind, e.unique_key, e.payload \
           FROM {} CROSS JOIN clock CROSS JOIN unnest($4::uuid[], $5::uuid[], $6::bigint[], $7::timestamptz[], $8::bigint[], \
             $9::smallint[], $10::text[], $11::text[], $12::text[], $13::text[]) WITH ORDINALITY \
             AS e(id, revision, max_attempts, at, after, priority, queue, kind, unique_key, payload, item) \
           WHERE waits.patience IS NOT NULL ORDER BY e.item \
           ON CONFLICT DO NOTHING RETURNING j.id, j.available_at) \
         SELECT stored.id, {} AS woken FROM stored",
        clock(None),
        patience(),
        notify(schema, &format!("stored WHERE $3 AND stored.available_at <= {NOW}")),
    )
}

/// Once for the whole statement, if a row that is due comes from there. It says nothing but that there is work.
fn notify(schema: &Identifier, from: &str) -> String {
    format!("(SELECT pg_notify('{}', '')::text FROM {from} LIMIT 1)", channel(schema))
}

/// `$2` queue, `$3` kinds, `$4` limit, `$5` whether to start, `$6` revision, `$7` worker, `$8` lease.
///
/// One probe per priority: with one `ORDER BY` over all of them, due jobs would be found behind every future job of a
/// better priority, entry by entry. A probe runs only if those before it left room in the outer limit, and locks only what it
/// gives. An array, since a plain `IN` may be run anew for every row, and pass what it has locked itself; and since a plan that is
/// kept takes an array for ten rows, but `LIMIT` for a tenth of all, for which it would read the whole table.
fn claim(jobs: &str) -> String {
    let (first, last) = (Priority::FIRST.get(), Priority::LAST.get());
    format!(
        "WITH {} \
         UPDATE {jobs} AS j SET state = CASE WHEN $5 THEN 'running' ELSE 'claimed' END, \
           attempt = least(j.attempt, {} - $5::int) + $5::int, fence = least(j.fence, {} - 1) + 1, revision = $6, \
           claimed_by = $7, claimed_at = clock.now, attempted_at = CASE WHEN $5 THEN clock.now END, \
           lease_expires_at = least(clock.now + $8 * interval '1 millisecond', {LAST}) \
         FROM clock WHERE j.id = ANY (ARRAY(\
           SELECT probe.id FROM generate_series({first}, {last}) AS level(priority) \
           CROSS JOIN LATERAL (SELECT due.id FROM {jobs} AS due \
             WHERE due.state = 'waiting' AND due.queue = $2 AND due.priority = level.priority::smallint \
               AND due.available_at <= {NOW} AND due.kind = ANY ($3) \
             ORDER BY due.available_at, due.id LIMIT $4 FOR UPDATE SKIP LOCKED) AS probe \
           LIMIT $4)) \
         RETURNING {}",
        clock(None),
        u32::MAX,
        i64::MAX,
        job(),
    )
}

/// The rows of compare-and-updates as `judged`, each with whether it `matches`. `$2` the patience, `$3` to `$25` the batch; see `row`
/// for how it travels.
///
/// The rows are locked in the order of their ids, and compared as they are then, whatever this statement saw when it began. The
/// clock is read after that, since it may have waited. A row that could not be answered for, because another column of its
/// lifecycle is out of range, does not match.
fn judged(jobs: &str) -> String {
    format!(
        "locked AS MATERIALIZED (SELECT e.*, j.* FROM {} \
           CROSS JOIN (SELECT * FROM unnest($3::uuid[], $4::text[], $5::bigint[], $6::text[], $7::timestamptz[], \
             $8::timestamptz[], $9::uuid[], $10::text[], $11::timestamptz[], $12::text[], $13::bigint[], $14::uuid[], \
             $15::timestamptz[], $16::bigint[], $17::boolean[], $18::text[], $19::text[], $20::bigint[], $21::text[], \
             $22::text[], $23::text[], $24::text[], $25::text[]) \
             AS e(seen_id, seen_state, seen_attempt, seen_claimed_by, seen_claimed_at, seen_attempted_at, seen_revision, \
               seen_lease, seen_expiry, new_state, new_attempt, new_revision, at, after, clear_claim, set_attempted_at, \
               set_lease_expires_at, new_lease, set_finished_at, set_result, new_result, new_payload, failure) \
             ORDER BY seen_id) AS e \
           CROSS JOIN LATERAL (SELECT {} FROM {jobs} AS j WHERE j.id = e.seen_id FOR UPDATE) AS j \
           WHERE waits.patience IS NOT NULL), \
         {}, \
         judged AS MATERIALIZED (SELECT e.*, clock.now, e.state = e.seen_state AND e.attempt = e.seen_attempt \
             AND e.claimed_by IS NOT DISTINCT FROM e.seen_claimed_by AND e.claimed_at IS NOT DISTINCT FROM e.seen_claimed_at \
             AND e.attempted_at IS NOT DISTINCT FROM e.seen_attempted_at AND e.revision = e.seen_revision \
             AND e.fence >= 0 AND e.max_attempts BETWEEN 1 AND {} \
             AND (e.lease_expires_at IS NULL OR e.lease_expires_at BETWEEN {FIRST} AND {LAST}) \
             AND CASE e.seen_lease WHEN 'any' THEN true WHEN 'unset' THEN e.lease_expires_at IS NULL \
                 ELSE e.lease_expires_at = e.seen_expiry AND e.lease_expires_at <= clock.now END AS matches \
           FROM locked AS e CROSS JOIN clock)",
        patience(),
        execution("j"),
        clock(Some("locked")),
        u32::MAX,
    )
}

/// What [`judged`] takes, and `$26`, whether to notify. The array has the rows looked up by id once more, whatever is the best plan
/// for the join with it.
fn update(jobs: &str, schema: &Identifier) -> String {
    let changed = |column: &str, set: &str| {
        format!("{column} = CASE e.set_{column} WHEN 'set' THEN {set} WHEN 'keep' THEN j.{column} END")
    };
    // What is no list, by somebody else's hand, must not keep the failure from being recorded.
    let errors = format!(
        "CASE WHEN e.failure IS NULL THEN j.errors ELSE (SELECT json_agg(kept.failure ORDER BY kept.n) FROM (\
           SELECT old.failure, old.n FROM json_array_elements(\
             CASE json_typeof(j.errors) WHEN 'array' THEN j.errors ELSE '[]' END) WITH ORDINALITY AS old(failure, n) \
           UNION ALL SELECT (left(e.failure, -1) || ',\"at\":' || (extract(epoch FROM e.now) * 1000)::bigint || '}}')::json, \
             {} ORDER BY n DESC LIMIT {}) AS kept) END",
        i64::MAX,
        Failure::KEPT,
    );
    format!(
        "WITH {}, \
         updated AS (UPDATE {jobs} AS j SET state = e.new_state, attempt = e.new_attempt, \
             revision = coalesce(e.new_revision, j.revision), \
             available_at = coalesce(e.at, CASE WHEN e.after IS NOT NULL \
               THEN least(e.now + e.after * interval '1 millisecond', {LAST}) END, j.available_at), \
             claimed_by = CASE WHEN e.clear_claim THEN NULL ELSE j.claimed_by END, \
             claimed_at = CASE WHEN e.clear_claim THEN NULL ELSE j.claimed_at END, \
             {}, {}, {}, {}, payload = coalesce(e.new_payload, j.payload), errors = {errors} \
           FROM judged AS e \
           WHERE j.id = ANY (ARRAY(SELECT id FROM judged WHERE matches)) AND j.id = e.id AND e.matches \
           RETURNING {}, j.available_at) \
         SELECT true AS applied, {}, {} AS woken FROM updated \
         UNION ALL SELECT false, {}, NULL FROM judged WHERE matches IS NOT TRUE",
        judged(jobs),
        changed("attempted_at", "e.now"),
        changed("lease_expires_at", &format!("least(e.now + e.new_lease * interval '1 millisecond', {LAST})")),
        changed("finished_at", "e.now"),
        changed("result", "e.new_result"),
        execution("j"),
        execution("updated"),
        notify(schema, &format!("updated WHERE $26 AND updated.state = 'waiting' AND updated.available_at <= {NOW}")),
        execution("judged"),
    )
}

/// A step that is begun or has ended. What [`judged`] takes, of one row; `$26` the name, `$27` the state, `$28` the value.
///
/// The rules are [`StepAction::plan`](queue_core::StepAction::plan)'s: what is there stays, unless it is a step that was begun. They are
/// asked of the row as it is once nobody else can write it, not as this statement saw it when it began.
fn write_step(jobs: &str, steps: &str) -> String {
    let put = |column: &str| format!("{column} = CASE s.state WHEN 'begun' THEN excluded.{column} ELSE s.{column} END");
    format!(
        "WITH {}, \
         put AS (INSERT INTO {steps} AS s (job_id, name, fence, state, value) \
           SELECT e.id, $26, e.fence, $27, $28 FROM judged AS e WHERE e.matches \
           ON CONFLICT (job_id, name) DO UPDATE SET {}, {}, {} \
           RETURNING s.job_id, {}) \
         SELECT coalesce(judged.matches, false) AS applied, {}, put.* FROM judged LEFT JOIN put ON put.job_id = judged.id",
        judged(jobs),
        put("fence"),
        put("state"),
        put("value"),
        step("s"),
        execution("judged"),
    )
}

/// Ends the suspension of the jobs of `locked`, as [`Transition::Wake`](queue_core::Transition::Wake) does.
fn woken(jobs: &str, revision: &str) -> String {
    format!(
        "woken AS (UPDATE {jobs} AS j SET state = 'waiting', revision = {revision}, available_at = clock.now, claimed_by = NULL, \
             claimed_at = NULL, attempted_at = NULL, lease_expires_at = NULL, finished_at = NULL, result = NULL \
           FROM clock WHERE j.id = ANY (ARRAY(SELECT id FROM locked)) RETURNING j.id)"
    )
}

/// `$2` key, `$3` payload, `$4` for how long, `$5` revision, `$6` whether to notify. The event is locked, and so whoever began to wait for
/// it has done so, or does so after this.
///
/// It wakes those whom it still finds suspended with that wait once it has their locks; nobody else then writes the wait. Locked in
/// the order of their ids, since batches of updates lock them too. Jobs and waits that are known by their ids are not looked up by
/// a state: where few have it, the server would take the index of that state for the shorter one, and read the whole of it.
fn wake(jobs: &str, steps: &str, events: &str, schema: &Identifier) -> String {
    format!(
        "WITH locked AS MATERIALIZED (SELECT j.id, e.name FROM (SELECT s.job_id, s.name, s.revision, 'suspended' AS state \
             FROM {steps} AS s WHERE s.state = 'waiting' AND s.event = $2 ORDER BY s.job_id) AS e \
           CROSS JOIN LATERAL (SELECT j.id FROM {jobs} AS j WHERE j.id = e.job_id AND j.state = e.state \
             AND j.revision = e.revision FOR UPDATE) AS j), \
         {}, \
         kept AS (UPDATE {events} AS e SET payload = $3, \
             kept_until = least(clock.now + $4 * interval '1 millisecond', {LAST}) FROM clock WHERE e.key = $2), \
         ended AS (UPDATE {steps} AS s SET state = 'done', value = $3 FROM locked AS e \
           WHERE s.job_id = ANY (ARRAY(SELECT id FROM locked)) AND s.job_id = e.id AND s.name = e.name), \
         {} \
         SELECT count(*) AS jobs, {} AS woken FROM woken",
        clock(Some("locked")),
        woken(jobs, "$5"),
        notify(schema, "woken WHERE $6"),
    )
}

/// `$2` limit, `$3` revision, `$4` whether to notify.
///
/// A job is found by its index and locked by its id, if it is still that very suspension: its wait is seen only as it was when this
/// statement began. The limit stops the walk.
fn time_out(jobs: &str, steps: &str, schema: &Identifier) -> String {
    format!(
        "WITH {}, \
         locked AS MATERIALIZED (SELECT e.* FROM (SELECT j.id, j.state, j.revision, j.available_at FROM {jobs} AS j \
             WHERE j.state = 'suspended' AND j.available_at <= {NOW} ORDER BY j.available_at, j.id) AS e \
           CROSS JOIN LATERAL (SELECT j.id FROM {jobs} AS j WHERE j.id = e.id AND j.state = e.state \
             AND j.revision = e.revision FOR UPDATE SKIP LOCKED) AS j LIMIT $2), \
         ended AS (UPDATE {steps} AS s SET state = 'timed_out' FROM locked AS e \
           WHERE s.job_id = ANY (ARRAY(SELECT id FROM locked)) AND s.job_id = e.id AND s.revision = e.revision), \
         {} \
         SELECT locked.id, {} AS woken FROM locked ORDER BY locked.available_at, locked.id",
        clock(None),
        woken(jobs, "$3"),
        notify(schema, "woken WHERE $4"),
    )
}
