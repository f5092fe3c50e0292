//! Rows into jobs.

use std::num::NonZeroU32;

use queue_core::Count;
use queue_core::Error;
use queue_core::Execution;
use queue_core::Job;
use queue_core::JobId;
use queue_core::Json;
use queue_core::Name;
use queue_core::NewJob;
use queue_core::Priority;
use queue_core::Revision;
use queue_core::StaleCursor;
use queue_core::Step;
use queue_core::StepState;
use queue_core::Timestamp;
use queue_core::Unreadable;
use queue_core::unreadable_event;
use queue_core::unreadable_step;
use sqlx::Decode;
use sqlx::MySql;
use sqlx::Row;
use sqlx::Type;
use sqlx::mysql::MySqlRow;
use time::PrimitiveDateTime;
use uuid::Uuid;

use crate::transaction::Failure;

/// A column's value, or what is wrong with it.
fn get<'r, T: Decode<'r, MySql> + Type<MySql>>(row: &'r MySqlRow, column: &str) -> Result<T, String> {
    row.try_get(column).map_err(|error| format!("{column}: {error}"))
}

/// A column's bytes as text.
fn text(row: &MySqlRow, column: &str) -> Result<String, String> {
    let bytes = get::<&[u8]>(row, column)?;
    str::from_utf8(bytes).map(str::to_owned).map_err(|error| format!("{column}: {error}"))
}

/// A column's text as one of our types.
fn parse<T: TryFrom<String, Error: ToString>>(row: &MySqlRow, column: &str) -> Result<T, String> {
    T::try_from(text(row, column)?).map_err(|error| format!("{column}: {}", error.to_string()))
}

/// The same for a column that may be null.
fn parse_optional<T: TryFrom<String, Error: ToString>>(row: &MySqlRow, column: &str) -> Result<Option<T>, String> {
    match get::<Option<&[u8]>>(row, column)? {
        Some(_) => parse(row, column).map(Some),
        None => Ok(None),
    }
}

fn instant(value: PrimitiveDateTime, column: &str) -> Result<Timestamp, String> {
    let millis = value.assume_utc().unix_timestamp_nanos().div_euclid(1_000_000);
    let millis = i64::try_from(millis).map_err(|error| format!("{column}: {error}"))?;
    Timestamp::from_unix_millis(millis).map_err(|error| format!("{column}: {error}"))
}

fn time(row: &MySqlRow, column: &str) -> Result<Timestamp, String> {
    instant(get(row, column)?, column)
}

fn time_optional(row: &MySqlRow, column: &str) -> Result<Option<Timestamp>, String> {
    get::<Option<PrimitiveDateTime>>(row, column)?.map(|value| instant(value, column)).transpose()
}

fn execution_columns(row: &MySqlRow) -> Result<Execution, String> {
    Ok(Execution {
        id: get::<Uuid>(row, "id")?.into(),
        state: parse(row, "state")?,
        attempt: get(row, "attempt")?,
        max_attempts: NonZeroU32::new(get(row, "max_attempts")?).ok_or("max_attempts: zero")?,
        fence: get(row, "fence")?,
        revision: get::<Uuid>(row, "revision")?.into(),
        claimed_by: parse_optional(row, "claimed_by")?,
        claimed_at: time_optional(row, "claimed_at")?,
        attempted_at: time_optional(row, "attempted_at")?,
        lease_expires_at: time_optional(row, "lease_expires_at")?,
    })
}

fn job_columns(row: &MySqlRow, execution: Execution) -> Result<Job, String> {
    Ok(Job {
        execution,
        queue: parse(row, "queue")?,
        kind: parse(row, "kind")?,
        payload: parse(row, "payload")?,
        priority: Priority::new(get(row, "priority")?).map_err(|error| error.to_string())?,
        available_at: time(row, "available_at")?,
        created_at: time(row, "created_at")?,
        finished_at: time_optional(row, "finished_at")?,
        unique_key: parse_optional(row, "unique_key")?,
        result: parse_optional(row, "result")?,
        errors: serde_json::from_slice(get(row, "errors")?).map_err(|error| format!("errors: {error}"))?,
    })
}

/// The row's id. The column admits nothing but 16 bytes.
pub(crate) fn id(row: &MySqlRow) -> JobId {
    get::<Uuid>(row, "id").unwrap_or_default().into()
}

/// The row's place in the order of `stale`. A lease that is no timestamp lies before all that are.
pub(crate) fn stale_cursor(row: &MySqlRow) -> StaleCursor {
    let lease_expires_at = time_optional(row, "lease_expires_at").unwrap_or(Some(Timestamp::MIN));
    StaleCursor { lease_expires_at, id: id(row) }
}

/// The row's lifecycle part.
pub(crate) fn execution(row: &MySqlRow) -> Result<Execution, Unreadable> {
    execution_columns(row).map_err(|reason| Unreadable::new(id(row), reason))
}

/// The whole row.
pub(crate) fn job(row: &MySqlRow) -> Result<Job, Unreadable> {
    let execution = execution(row)?;
    job_columns(row, execution.clone()).map_err(|reason| Unreadable::beyond(execution, reason))
}

/// When the row is due.
pub(crate) fn available_at(row: &MySqlRow) -> Result<Timestamp, Unreadable> {
    time(row, "available_at").map_err(|reason| Unreadable::new(id(row), reason))
}

fn step_columns(row: &MySqlRow) -> Result<Step, String> {
    let state = StepState::from_columns(
        &text(row, "step_state")?,
        parse_optional(row, "event")?,
        time_optional(row, "until")?,
        get::<Option<Uuid>>(row, "step_revision")?.map(Revision::from),
        parse_optional(row, "value")?,
    )?;
    Ok(Step { name: parse(row, "step_name")?, fence: get(row, "step_fence")?, state })
}

/// A step of this job.
pub(crate) fn step(id: JobId, row: &MySqlRow) -> Result<Step, Error> {
    step_columns(row).map_err(|reason| unreadable_step(id, reason))
}

/// The same where there may be none.
pub(crate) fn step_if_any(id: JobId, row: &MySqlRow) -> Result<Option<Step>, Error> {
    match get::<Option<&[u8]>>(row, "step_name").map_err(|reason| unreadable_step(id, reason))? {
        Some(_) => step(id, row).map(Some),
        None => Ok(None),
    }
}

/// The payload of the event of this key, where there may be none.
pub(crate) fn payload(key: &Name, row: &MySqlRow) -> Result<Option<Json>, Error> {
    parse_optional(row, "event_payload").map_err(|reason| unreadable_event(key, reason))
}

/// The time at which the row was locked.
pub(crate) fn now(row: &MySqlRow) -> Result<Timestamp, Failure> {
    Ok(Timestamp::from_unix_millis(row.try_get("now")?).map_err(Error::from)?)
}

/// How many jobs of a queue are in a state.
pub(crate) fn count(row: &MySqlRow) -> Result<Count, String> {
    let state = text(row, "state").ok().and_then(|state| state.parse().ok());
    let jobs = u64::try_from(get::<i64>(row, "jobs")?).map_err(|error| error.to_string())?;
    Ok(Count { queue: parse(row, "queue")?, state, jobs })
}

/// The number in a column of a statement's own.
pub(crate) fn number(row: &MySqlRow, column: &str) -> sqlx::Result<Option<i64>> {
    row.try_get(column)
}

/// Which item of a batch the row is about.
pub(crate) fn item(row: &MySqlRow) -> sqlx::Result<usize> {
    let item: i64 = row.try_get("item")?;
    usize::try_from(item).map_err(|error| sqlx::Error::Decode(error.into()))
}

/// Whether the row, which may be one that this version cannot read, was made by enqueueing this job.
pub(crate) fn repeats(row: &MySqlRow, job: &NewJob) -> sqlx::Result<bool> {
    let NewJob { id: _, queue, kind, payload, priority, max_attempts, available: _, unique_key } = job;
    Ok(row.try_get::<&[u8], _>("queue")? == queue.as_str().as_bytes()
        && row.try_get::<&[u8], _>("kind")? == kind.as_str().as_bytes()
        && row.try_get::<&[u8], _>("payload")? == payload.as_str().as_bytes()
        && row.try_get::<u8, _>("priority")? == priority.get()
        && row.try_get::<u32, _>("max_attempts")? == max_attempts.get()
        && row.try_get::<Option<&[u8]>, _>("unique_key")? == unique_key.as_ref().map(|key| key.as_str().as_bytes()))
}
