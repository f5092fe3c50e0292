//! Rows into jobs, and what is written into rows.

use std::num::NonZeroU32;

use queue_core::Change;
use queue_core::Count;
use queue_core::Error;
use queue_core::Execution;
use queue_core::Failure;
use queue_core::Fingerprint;
use queue_core::Held;
use queue_core::Job;
use queue_core::JobId;
use queue_core::JobState;
use queue_core::Json;
use queue_core::Lease;
use queue_core::LeaseMatch;
use queue_core::Name;
use queue_core::NewJob;
use queue_core::Patch;
use queue_core::Priority;
use queue_core::Revision;
use queue_core::StaleCursor;
use queue_core::Step;
use queue_core::StepState;
use queue_core::Timestamp;
use queue_core::UniqueKey;
use queue_core::Unreadable;
use queue_core::UpdateRequest;
use queue_core::When;
use queue_core::WorkerId;
use queue_core::unreadable_event;
use queue_core::unreadable_step;
use serde::Serialize;
use sqlx::Decode;
use sqlx::Row;
use sqlx::Sqlite;
use sqlx::Type;
use sqlx::sqlite::SqliteRow;
use uuid::Uuid;

/// A column's value, or what is wrong with it.
fn get<'r, T: Decode<'r, Sqlite> + Type<Sqlite>>(row: &'r SqliteRow, column: &str) -> Result<T, String> {
    row.try_get(column).map_err(|error| format!("{column}: {error}"))
}

/// A column's value as one of our types.
fn parse<'r, R, T>(row: &'r SqliteRow, column: &str) -> Result<T, String>
where
    R: Decode<'r, Sqlite> + Type<Sqlite>,
    T: TryFrom<R, Error: ToString>,
{
    T::try_from(get::<R>(row, column)?).map_err(|error| format!("{column}: {}", error.to_string()))
}

/// The same for a column that may be null.
fn parse_optional<'r, R, T>(row: &'r SqliteRow, column: &str) -> Result<Option<T>, String>
where
    R: Decode<'r, Sqlite> + Type<Sqlite>,
    T: TryFrom<R, Error: ToString>,
{
    let value = get::<Option<R>>(row, column)?.map(T::try_from).transpose();
    value.map_err(|error| format!("{column}: {}", error.to_string()))
}

fn execution_columns(row: &SqliteRow) -> Result<Execution, String> {
    Ok(Execution {
        id: get::<Uuid>(row, "id")?.into(),
        state: get::<&str>(row, "state")?.parse().map_err(|error| format!("state: {error}"))?,
        attempt: parse::<i64, _>(row, "attempt")?,
        max_attempts: NonZeroU32::new(parse::<i64, _>(row, "max_attempts")?).ok_or("max_attempts: zero")?,
        fence: parse::<i64, _>(row, "fence")?,
        revision: get::<Uuid>(row, "revision")?.into(),
        claimed_by: parse_optional::<String, _>(row, "claimed_by")?,
        claimed_at: parse_optional::<i64, _>(row, "claimed_at")?,
        attempted_at: parse_optional::<i64, _>(row, "attempted_at")?,
        lease_expires_at: parse_optional::<i64, _>(row, "lease_expires_at")?,
    })
}

fn job_columns(row: &SqliteRow, execution: Execution) -> Result<Job, String> {
    let errors = get::<&str>(row, "errors")?;
    Ok(Job {
        execution,
        queue: parse::<String, Name>(row, "queue")?,
        kind: parse::<String, Name>(row, "kind")?,
        payload: parse::<String, Json>(row, "payload")?,
        priority: Priority::try_from(parse::<i64, u8>(row, "priority")?).map_err(|error| error.to_string())?,
        available_at: parse::<i64, Timestamp>(row, "available_at")?,
        created_at: parse::<i64, Timestamp>(row, "created_at")?,
        finished_at: parse_optional::<i64, Timestamp>(row, "finished_at")?,
        unique_key: parse_optional::<String, UniqueKey>(row, "unique_key")?,
        result: parse_optional::<String, Json>(row, "result")?,
        errors: serde_json::from_str::<Vec<Failure>>(errors).map_err(|error| format!("errors: {error}"))?,
    })
}

/// The row's id. The table admits nothing but 16 bytes.
pub(crate) fn id(row: &SqliteRow) -> JobId {
    get::<Uuid>(row, "id").unwrap_or_default().into()
}

/// The row's place in the order of `stale`. A lease that is no timestamp lies before all that are.
pub(crate) fn stale_cursor(row: &SqliteRow) -> StaleCursor {
    let lease = get::<Option<i64>>(row, "lease_expires_at").unwrap_or_default();
    let lease_expires_at = lease.map(|millis| Timestamp::from_unix_millis(millis).unwrap_or(Timestamp::MIN));
    StaleCursor { lease_expires_at, id: id(row) }
}

/// The row's lifecycle part.
pub(crate) fn execution(row: &SqliteRow) -> Result<Execution, Unreadable> {
    execution_columns(row).map_err(|reason| Unreadable::new(id(row), reason))
}

/// The whole row.
pub(crate) fn job(row: &SqliteRow) -> Result<Job, Unreadable> {
    let execution = execution(row)?;
    job_columns(row, execution.clone()).map_err(|reason| Unreadable::beyond(execution, reason))
}

/// The claim that the row shows, as `extend` answers.
pub(crate) fn held(row: &SqliteRow) -> Option<Held> {
    Some(Held {
        id: id(row),
        revision: get::<Uuid>(row, "revision").ok()?.into(),
        worker: parse::<String, _>(row, "claimed_by").ok()?,
    })
}

/// How many jobs of a queue are in a state.
pub(crate) fn count(row: &SqliteRow) -> Result<Count, String> {
    let state = get::<&str>(row, "state").ok().and_then(|state| state.parse().ok());
    Ok(Count { queue: parse::<String, _>(row, "queue")?, state, jobs: parse::<i64, _>(row, "jobs")? })
}

fn step_columns(row: &SqliteRow) -> Result<Step, String> {
    let state = StepState::from_columns(
        get(row, "state")?,
        parse_optional::<String, _>(row, "event")?,
        parse_optional::<i64, _>(row, "until")?,
        get::<Option<Uuid>>(row, "revision")?.map(Revision::from),
        parse_optional::<String, _>(row, "value")?,
    )?;
    Ok(Step { name: parse::<String, _>(row, "name")?, fence: parse::<i64, _>(row, "fence")?, state })
}

/// A step of this job.
pub(crate) fn step(id: JobId, row: &SqliteRow) -> Result<Step, Error> {
    step_columns(row).map_err(|reason| unreadable_step(id, reason))
}

/// The job of a step. The table admits nothing but 16 bytes.
pub(crate) fn step_of(row: &SqliteRow) -> JobId {
    get::<Uuid>(row, "job_id").unwrap_or_default().into()
}

/// The payload of the event of this key.
pub(crate) fn payload(key: &Name, row: &SqliteRow) -> Result<Json, Error> {
    parse::<String, _>(row, "payload").map_err(|reason| unreadable_event(key, reason))
}

fn hex(uuid: Uuid) -> String {
    uuid.simple().to_string()
}

/// A JSON array for a statement to take apart.
pub(crate) fn array<T: Serialize>(items: impl IntoIterator<Item = T>) -> Result<String, sqlx::Error> {
    let items: Vec<T> = items.into_iter().collect();
    serde_json::to_string(&items).map_err(|error| sqlx::Error::Encode(error.into()))
}

/// A JSON array of ids.
pub(crate) fn ids(ids: impl IntoIterator<Item = JobId>) -> Result<String, sqlx::Error> {
    array(ids.into_iter().map(|id| hex(id.as_uuid())))
}

/// A time to resolve by the store's clock: `at` if it is given, else now + `after`; neither keeps the column.
#[derive(PartialEq, Serialize)]
struct Due {
    at: Option<Timestamp>,
    after: Option<i64>,
}

impl Due {
    fn of(when: Option<When>) -> Self {
        match when {
            None => Self { at: None, after: None },
            Some(When::Now) => Self { at: None, after: Some(0) },
            Some(When::After(delay)) => Self { at: None, after: Some(delay.as_millis()) },
            Some(When::At(instant)) => Self { at: Some(instant), after: None },
        }
    }
}

/// An item of a batch, and which of the shares it has.
#[derive(Serialize)]
struct Sharing<T> {
    share: usize,
    #[serde(flatten)]
    item: T,
}

/// A batch as two JSON arrays: the items, and what they share. Neighbours that share everything share one entry.
fn sharing<T, S>(batch: impl Iterator<Item = (T, S)>) -> Result<(String, String), sqlx::Error>
where
    T: Serialize,
    S: Serialize + PartialEq,
{
    let mut shares = Vec::new();
    let items = batch.map(|(item, share)| {
        if shares.last() != Some(&share) {
            shares.push(share);
        }
        Sharing { share: shares.len() - 1, item }
    });
    Ok((array(items)?, array(shares)?))
}

/// New jobs for a statement to take apart.
pub(crate) fn new_jobs<'a>(jobs: impl IntoIterator<Item = &'a NewJob>) -> Result<(String, String), sqlx::Error> {
    sharing(jobs.into_iter().map(new_job))
}

/// Updates for a statement to take apart.
pub(crate) fn updates(updates: &[UpdateRequest]) -> Result<(String, String), sqlx::Error> {
    sharing(updates.iter().map(update))
}

/// What is a new job's own.
#[derive(Serialize)]
struct NewRow<'a> {
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    unique_key: Option<&'a UniqueKey>,
    payload: &'a Json,
}

/// What it is likely to share with others.
#[derive(PartialEq, Serialize)]
struct NewShare<'a> {
    queue: &'a Name,
    kind: &'a Name,
    priority: Priority,
    max_attempts: NonZeroU32,
    #[serde(flatten)]
    due: Due,
}

fn new_job(job: &NewJob) -> (NewRow<'_>, NewShare<'_>) {
    let NewJob { id, queue, kind, payload, priority, max_attempts, available, unique_key } = job;
    let due = Due::of(Some(*available));
    (
        NewRow { id: hex(id.as_uuid()), unique_key: unique_key.as_ref(), payload },
        NewShare { queue, kind, priority: *priority, max_attempts: *max_attempts, due },
    )
}

/// A claim to renew as the statement takes it apart.
#[derive(Serialize)]
pub(crate) struct HeldRow<'a> {
    id: String,
    revision: String,
    worker: &'a WorkerId,
}

impl<'a> From<&'a Held> for HeldRow<'a> {
    fn from(held: &'a Held) -> Self {
        Self { id: hex(held.id.as_uuid()), revision: hex(held.revision.as_uuid()), worker: &held.worker }
    }
}

/// What is a compare-and-update's own.
#[derive(Serialize)]
struct UpdateRow<'a> {
    id: String,
    seen_revision: String,
    seen_claimed_at: Option<Timestamp>,
    seen_attempted_at: Option<Timestamp>,
    seen_expiry: Option<Timestamp>,
    revision: Option<String>,
    result_text: Option<&'a Json>,
    payload: Option<&'a Json>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<FailureRow<'a>>,
}

/// What it is likely to share with others. A column that may be kept, cleared or set says which, and has its new value in
/// another field.
#[derive(PartialEq, Serialize)]
struct UpdateShare<'a> {
    seen_state: JobState,
    seen_attempt: u32,
    seen_claimed_by: Option<&'a WorkerId>,
    seen_lease: &'static str,
    state: JobState,
    attempt: u32,
    #[serde(flatten)]
    due: Due,
    clear_claim: bool,
    attempted_at: &'static str,
    lease_expires_at: &'static str,
    lease: Option<i64>,
    finished_at: &'static str,
    result: &'static str,
}

/// A [`Failure`] without its time, which the statement adds.
#[derive(Serialize)]
struct FailureRow<'a> {
    attempt: u32,
    fence: u64,
    worker: Option<&'a WorkerId>,
    text: &'a str,
}

fn change<T>(change: &Change<T>) -> (&'static str, Option<&T>) {
    match change {
        Change::Keep => ("keep", None),
        Change::Clear => ("clear", None),
        Change::Set(value) => ("set", Some(value)),
    }
}

fn update(UpdateRequest { id, current, patch }: &UpdateRequest) -> (UpdateRow<'_>, UpdateShare<'_>) {
    // Whole, so that a new field cannot be left out here.
    let Fingerprint {
        state: seen_state,
        attempt: seen_attempt,
        claimed_by: seen_claimed_by,
        claimed_at: seen_claimed_at,
        attempted_at: seen_attempted_at,
        revision: seen_revision,
        lease,
    } = current;
    let (seen_lease, seen_expiry) = match lease {
        LeaseMatch::Any => ("any", None),
        LeaseMatch::Unset => ("unset", None),
        LeaseMatch::Expired(expiry) => ("expired", Some(*expiry)),
    };
    let Patch {
        revision,
        state,
        attempt,
        available,
        clear_claim,
        attempted_at,
        lease,
        finished_at,
        result,
        failure,
        payload,
    } = patch;
    let (lease_expires_at, lease) = change(lease);
    let (result, result_text) = change(result);
    (
        UpdateRow {
            id: hex(id.as_uuid()),
            seen_revision: hex(seen_revision.as_uuid()),
            seen_claimed_at: *seen_claimed_at,
            seen_attempted_at: *seen_attempted_at,
            seen_expiry,
            revision: revision.map(|revision| hex(revision.as_uuid())),
            result_text,
            payload: payload.as_ref(),
            failure: failure.as_ref().map(|failure| FailureRow {
                attempt: failure.attempt,
                fence: failure.fence,
                worker: failure.worker.as_ref(),
                text: failure.text.as_str(),
            }),
        },
        UpdateShare {
            seen_state: *seen_state,
            seen_attempt: *seen_attempt,
            seen_claimed_by: seen_claimed_by.as_ref(),
            seen_lease,
            state: *state,
            attempt: *attempt,
            due: Due::of(*available),
            clear_claim: *clear_claim,
            attempted_at: change(attempted_at).0,
            lease_expires_at,
            lease: lease.map(|lease: &Lease| lease.as_millis()),
            finished_at: change(finished_at).0,
            result,
        },
    )
}
