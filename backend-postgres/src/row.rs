//! Rows into jobs, and what is written into rows.

use std::num::NonZeroU32;

use queue_core::Change;
use queue_core::Count;
use queue_core::Error;
use queue_core::Execution;
use queue_core::Failure;
use queue_core::Held;
use queue_core::Job;
use queue_core::JobId;
use queue_core::Json;
use queue_core::Lease;
use queue_core::LeaseMatch;
use queue_core::Name;
use queue_core::NewFailure;
use queue_core::NewJob;
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
use sqlx::Encode;
use sqlx::Postgres;
use sqlx::Row;
use sqlx::Type;
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::PgArgumentBuffer;
use sqlx::postgres::PgHasArrayType;
use sqlx::postgres::PgRow;
use sqlx::postgres::PgTypeInfo;
use sqlx::postgres::PgValueFormat;
use sqlx::postgres::PgValueRef;
use sqlx::postgres::types::Oid;
use uuid::Uuid;

use crate::handle::Statement;

/// A `timestamptz` as the server sends it. The driver's own types panic on an `infinity` that somebody has stored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instant(Timestamp);

impl Instant {
    /// What the server counts from: the year 2000, in microseconds.
    const EPOCH_MILLIS: i64 = 946_684_800_000;
}

impl From<Timestamp> for Instant {
    fn from(at: Timestamp) -> Self {
        Self(at)
    }
}

impl From<Instant> for Timestamp {
    fn from(instant: Instant) -> Self {
        instant.0
    }
}

impl Type<Postgres> for Instant {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(Oid(1184))
    }
}

impl PgHasArrayType for Instant {
    fn array_type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(Oid(1185))
    }
}

impl Encode<'_, Postgres> for Instant {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        let micros = (self.0.unix_millis() - Self::EPOCH_MILLIS) * 1000;
        Encode::<Postgres>::encode_by_ref(&micros, buffer)
    }
}

impl Decode<'_, Postgres> for Instant {
    fn decode(value: PgValueRef<'_>) -> Result<Self, BoxDynError> {
        if value.format() != PgValueFormat::Binary {
            return Err("a timestamp as text".into());
        }
        let micros = i64::from_be_bytes(value.as_bytes()?.try_into()?);
        // Infinity is the largest number; rows that were made by hand may have microseconds.
        let millis = micros.div_euclid(1000) + Self::EPOCH_MILLIS;
        Ok(Self(Timestamp::from_unix_millis(millis)?))
    }
}

/// A column's value, or what is wrong with it.
fn get<'r, T: Decode<'r, Postgres> + Type<Postgres>>(row: &'r PgRow, column: &str) -> Result<T, String> {
    row.try_get(column).map_err(|error| format!("{column}: {error}"))
}

/// A column's value as one of our types.
fn parse<'r, R, T>(row: &'r PgRow, column: &str) -> Result<T, String>
where
    R: Decode<'r, Postgres> + Type<Postgres>,
    T: TryFrom<R, Error: ToString>,
{
    T::try_from(get::<R>(row, column)?).map_err(|error| format!("{column}: {}", error.to_string()))
}

/// The same for a column that may be null.
fn parse_optional<'r, R, T>(row: &'r PgRow, column: &str) -> Result<Option<T>, String>
where
    R: Decode<'r, Postgres> + Type<Postgres>,
    T: TryFrom<R, Error: ToString>,
{
    let value = get::<Option<R>>(row, column)?.map(T::try_from).transpose();
    value.map_err(|error| format!("{column}: {}", error.to_string()))
}

fn execution_columns(row: &PgRow) -> Result<Execution, String> {
    Ok(Execution {
        id: get::<Uuid>(row, "id")?.into(),
        state: get::<&str>(row, "state")?.parse().map_err(|error| format!("state: {error}"))?,
        attempt: parse::<i64, _>(row, "attempt")?,
        max_attempts: NonZeroU32::new(parse::<i64, _>(row, "max_attempts")?).ok_or("max_attempts: zero")?,
        fence: parse::<i64, _>(row, "fence")?,
        revision: get::<Uuid>(row, "revision")?.into(),
        claimed_by: parse_optional::<String, _>(row, "claimed_by")?,
        claimed_at: parse_optional::<Instant, _>(row, "claimed_at")?,
        attempted_at: parse_optional::<Instant, _>(row, "attempted_at")?,
        lease_expires_at: parse_optional::<Instant, _>(row, "lease_expires_at")?,
    })
}

fn job_columns(row: &PgRow, execution: Execution) -> Result<Job, String> {
    let errors = get::<&str>(row, "errors")?;
    Ok(Job {
        execution,
        queue: parse::<String, Name>(row, "queue")?,
        kind: parse::<String, Name>(row, "kind")?,
        payload: parse::<String, Json>(row, "payload")?,
        priority: Priority::try_from(parse::<i16, u8>(row, "priority")?).map_err(|error| error.to_string())?,
        available_at: parse::<Instant, Timestamp>(row, "available_at")?,
        created_at: parse::<Instant, Timestamp>(row, "created_at")?,
        finished_at: parse_optional::<Instant, Timestamp>(row, "finished_at")?,
        unique_key: parse_optional::<String, UniqueKey>(row, "unique_key")?,
        result: parse_optional::<String, Json>(row, "result")?,
        errors: serde_json::from_str::<Vec<Failure>>(errors).map_err(|error| format!("errors: {error}"))?,
    })
}

/// The row's id. The table admits nothing but a UUID.
pub(crate) fn id(row: &PgRow) -> JobId {
    get::<Uuid>(row, "id").unwrap_or_default().into()
}

/// The row's place in the order of `stale`. A lease that is no timestamp can only lie before all that are: the others have not
/// run out.
pub(crate) fn stale_cursor(row: &PgRow) -> StaleCursor {
    let lease = get::<Option<Instant>>(row, "lease_expires_at").unwrap_or(Some(Instant(Timestamp::MIN)));
    StaleCursor { lease_expires_at: lease.map(Timestamp::from), id: id(row) }
}

/// The row's lifecycle part.
pub(crate) fn execution(row: &PgRow) -> Result<Execution, Unreadable> {
    execution_columns(row).map_err(|reason| Unreadable::new(id(row), reason))
}

/// The whole row.
pub(crate) fn job(row: &PgRow) -> Result<Job, Unreadable> {
    let execution = execution(row)?;
    job_columns(row, execution.clone()).map_err(|reason| Unreadable::beyond(execution, reason))
}

/// Whether the row is what an update was decided on, as `update` answers, and what judges as it does.
pub(crate) fn is_applied(row: &PgRow) -> bool {
    get(row, "applied").unwrap_or_default()
}

/// A claim that is held, and whether its lease was extended, as `extend` answers.
pub(crate) fn extended(row: &PgRow) -> Option<(Held, bool)> {
    let revision = get::<Uuid>(row, "revision").ok()?.into();
    let held = Held { id: id(row), revision, worker: parse::<String, _>(row, "claimed_by").ok()? };
    Some((held, get(row, "extended").ok()?))
}

/// What is in the way of a new job, as `refused` answers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refused {
    pub(crate) stored: bool,
    pub(crate) repeated: bool,
    pub(crate) holder: Option<JobId>,
}

/// The items that were refused, with what is in their way.
pub(crate) fn refused<'r, 'j>(
    rows: &'r [PgRow],
    chunk: &'r [&'j NewJob],
) -> impl Iterator<Item = (&'j NewJob, Refused)> + use<'r, 'j> {
    rows.iter().filter_map(|row| {
        let item = get::<i64>(row, "item").ok()?;
        let refused = Refused {
            stored: get::<Option<Uuid>>(row, "stored").ok()?.is_some(),
            repeated: get::<Option<bool>>(row, "repeated").ok()?.unwrap_or_default(),
            holder: get::<Option<Uuid>>(row, "holder").ok()?.map(JobId::from),
        };
        Some((*chunk.get(usize::try_from(item).ok()?.checked_sub(1)?)?, refused))
    })
}

/// How many jobs of a queue are in a state.
pub(crate) fn count(row: &PgRow) -> Result<Count, String> {
    let state = get::<&str>(row, "state").ok().and_then(|state| state.parse().ok());
    Ok(Count { queue: parse::<String, _>(row, "queue")?, state, jobs: number(row, "jobs")? })
}

/// A column that counts.
pub(crate) fn number(row: &PgRow, column: &str) -> Result<u64, String> {
    parse::<i64, _>(row, column)
}

fn step_columns(row: &PgRow) -> Result<Step, String> {
    let state = StepState::from_columns(
        get(row, "step_state")?,
        parse_optional::<String, _>(row, "event")?,
        parse_optional::<Instant, _>(row, "until")?,
        get::<Option<Uuid>>(row, "step_revision")?.map(Revision::from),
        parse_optional::<String, _>(row, "value")?,
    )?;
    Ok(Step { name: parse::<String, _>(row, "name")?, fence: parse::<i64, _>(row, "step_fence")?, state })
}

/// A step of this job.
pub(crate) fn step(id: JobId, row: &PgRow) -> Result<Step, Error> {
    step_columns(row).map_err(|reason| unreadable_step(id, reason))
}

/// The payload of the event of this key, if there is one, as `lock_event` answers.
pub(crate) fn payload(key: &Name, row: &PgRow) -> Result<Option<Json>, Error> {
    parse_optional::<String, _>(row, "payload").map_err(|reason| unreadable_event(key, reason))
}

/// One column of a batch.
fn column<'j, J, T>(items: &'j [&'j J], value: impl FnMut(&'j J) -> T) -> Vec<T> {
    items.iter().copied().map(value).collect()
}

/// A time to resolve by the store's clock: the first if it is given, else now and so many milliseconds; neither keeps the column.
fn due(when: Option<When>) -> (Option<Instant>, Option<i64>) {
    match when {
        None => (None, None),
        Some(When::Now) => (None, Some(0)),
        Some(When::After(delay)) => (None, Some(delay.as_millis())),
        Some(When::At(instant)) => (Some(instant.into()), None),
    }
}

fn instant(at: Option<Timestamp>) -> Option<Instant> {
    at.map(Instant::from)
}

fn priority(job: &NewJob) -> i16 {
    i16::from(job.priority.get())
}

/// New jobs as `insert` takes them.
pub(crate) fn bind_new<'q>(statement: Statement<'q>, jobs: &[&NewJob]) -> Statement<'q> {
    statement
        .bind(column(jobs, |job| job.id.as_uuid()))
        .bind(column(jobs, |_| Revision::random().as_uuid()))
        .bind(column(jobs, |job| i64::from(job.max_attempts.get())))
        .bind(column(jobs, |job| due(Some(job.available)).0))
        .bind(column(jobs, |job| due(Some(job.available)).1))
        .bind(column(jobs, priority))
        .bind(column(jobs, |job| job.queue.as_str()))
        .bind(column(jobs, |job| job.kind.as_str()))
        .bind(column(jobs, |job| job.unique_key.as_ref().map(UniqueKey::as_str)))
        .bind(column(jobs, |job| job.payload.as_str()))
}

/// New jobs as `refused` compares them.
pub(crate) fn bind_offered<'q>(statement: Statement<'q>, jobs: &[&NewJob]) -> Statement<'q> {
    statement
        .bind(column(jobs, |job| job.id.as_uuid()))
        .bind(column(jobs, |job| job.queue.as_str()))
        .bind(column(jobs, |job| job.kind.as_str()))
        .bind(column(jobs, |job| job.payload.as_str()))
        .bind(column(jobs, priority))
        .bind(column(jobs, |job| i64::from(job.max_attempts.get())))
        .bind(column(jobs, |job| job.unique_key.as_ref().map(UniqueKey::as_str)))
}

/// Claims to renew as `extend` takes them.
pub(crate) fn bind_held<'q>(statement: Statement<'q>, held: &[Held]) -> Statement<'q> {
    statement
        .bind(held.iter().map(|held| held.id.as_uuid()).collect::<Vec<_>>())
        .bind(held.iter().map(|held| held.revision.as_uuid()).collect::<Vec<_>>())
        .bind(held.iter().map(|held| held.worker.as_str()).collect::<Vec<_>>())
}

/// A [`Failure`] without its time, which the statement adds.
#[derive(Serialize)]
struct FailureRow<'a> {
    attempt: u32,
    fence: u64,
    worker: Option<&'a WorkerId>,
    text: &'a str,
}

fn failure(failure: &NewFailure) -> Option<String> {
    let NewFailure { attempt, fence, worker, text } = failure;
    let row = FailureRow { attempt: *attempt, fence: *fence, worker: worker.as_ref(), text: text.as_str() };
    // Cannot fail: it has no map.
    serde_json::to_string(&row).ok()
}

fn change<T>(change: &Change<T>) -> (&'static str, Option<&T>) {
    match change {
        Change::Keep => ("keep", None),
        Change::Clear => ("clear", None),
        Change::Set(value) => ("set", Some(value)),
    }
}

fn lease_match(lease: LeaseMatch) -> (&'static str, Option<Instant>) {
    match lease {
        LeaseMatch::Any => ("any", None),
        LeaseMatch::Unset => ("unset", None),
        LeaseMatch::Expired(expiry) => ("expired", Some(expiry.into())),
    }
}

/// Compare-and-updates as `update` takes them. A column that may be kept, cleared or set says which, and has its new value in
/// another one.
pub(crate) fn bind_updates<'q>(statement: Statement<'q>, updates: &[&UpdateRequest]) -> Statement<'q> {
    statement
        .bind(column(updates, |update| update.id.as_uuid()))
        .bind(column(updates, |update| update.current.state.as_str()))
        .bind(column(updates, |update| i64::from(update.current.attempt)))
        .bind(column(updates, |update| update.current.claimed_by.as_ref().map(WorkerId::as_str)))
        .bind(column(updates, |update| instant(update.current.claimed_at)))
        .bind(column(updates, |update| instant(update.current.attempted_at)))
        .bind(column(updates, |update| update.current.revision.as_uuid()))
        .bind(column(updates, |update| lease_match(update.current.lease).0))
        .bind(column(updates, |update| lease_match(update.current.lease).1))
        .bind(column(updates, |update| update.patch.state.as_str()))
        .bind(column(updates, |update| i64::from(update.patch.attempt)))
        .bind(column(updates, |update| update.patch.revision.map(|revision| revision.as_uuid())))
        .bind(column(updates, |update| due(update.patch.available).0))
        .bind(column(updates, |update| due(update.patch.available).1))
        .bind(column(updates, |update| update.patch.clear_claim))
        .bind(column(updates, |update| change(&update.patch.attempted_at).0))
        .bind(column(updates, |update| change(&update.patch.lease).0))
        .bind(column(updates, |update| change(&update.patch.lease).1.map(|lease: &Lease| lease.as_millis())))
        .bind(column(updates, |update| change(&update.patch.finished_at).0))
        .bind(column(updates, |update| change(&update.patch.result).0))
        .bind(column(updates, |update| change(&update.patch.result).1.map(Json::as_str)))
        .bind(column(updates, |update| update.patch.payload.as_ref().map(Json::as_str)))
        .bind(column(updates, |update| update.patch.failure.as_ref().and_then(failure)))
}
