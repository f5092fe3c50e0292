//! Documents into jobs, and values into documents.

use std::num::NonZeroU32;

use mongodb::bson::Binary;
use mongodb::bson::Bson;
use mongodb::bson::DateTime;
use mongodb::bson::Document;
use mongodb::bson::RawDocumentBuf;
use mongodb::bson::spec::BinarySubtype;
use queue_core::Count;
use queue_core::Error;
use queue_core::Execution;
use queue_core::Failure;
use queue_core::FailureText;
use queue_core::Held;
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
use queue_core::UniqueKey;
use queue_core::Unreadable;
use queue_core::unreadable_event;
use queue_core::unreadable_step;
use uuid::Uuid;

use crate::ops::BATCH;

/// A UUID of subtype 4: the same bytes in another subtype are another value to MongoDB.
pub(crate) fn binary(uuid: Uuid) -> Bson {
    Bson::Binary(Binary { subtype: BinarySubtype::Uuid, bytes: uuid.as_bytes().to_vec() })
}

pub(crate) fn date(instant: Timestamp) -> Bson {
    Bson::DateTime(DateTime::from_millis(instant.unix_millis()))
}

/// What a field is not.
fn wrong(field: &str, expected: &str, found: &Bson) -> String {
    format!("{field}: not {expected} but {:?}", found.element_type())
}

/// A field's value; one that is missing, by somebody else's hand, is null, as it is to the filters.
fn get<'r>(row: &'r Document, field: &str) -> &'r Bson {
    row.get(field).unwrap_or(&Bson::Null)
}

fn uuid(row: &Document, field: &str) -> Result<Uuid, String> {
    match get(row, field) {
        Bson::Binary(Binary { subtype: BinarySubtype::Uuid, bytes }) => {
            Uuid::from_slice(bytes).map_err(|error| format!("{field}: {error}"))
        }
        other => Err(wrong(field, "a UUID", other)),
    }
}

fn text<'r>(row: &'r Document, field: &str) -> Result<&'r str, String> {
    match get(row, field) {
        Bson::String(text) => Ok(text),
        other => Err(wrong(field, "a text", other)),
    }
}

/// A number that is whole, of whatever type: a shell writes doubles.
fn integer(row: &Document, field: &str) -> Result<i64, String> {
    match get(row, field) {
        Bson::Int32(number) => Ok(i64::from(*number)),
        Bson::Int64(number) => Ok(*number),
        #[expect(clippy::cast_possible_truncation, reason = "such a double is whole, and no larger than an i64")]
        Bson::Double(number) if number.fract() == 0.0 && number.abs() < 9.0e15 => Ok(*number as i64),
        other => Err(wrong(field, "a whole number", other)),
    }
}

fn number<T: TryFrom<i64, Error: ToString>>(row: &Document, field: &str) -> Result<T, String> {
    T::try_from(integer(row, field)?).map_err(|error| format!("{field}: {}", error.to_string()))
}

fn parsed<T: TryFrom<String, Error: ToString>>(row: &Document, field: &str) -> Result<T, String> {
    T::try_from(text(row, field)?.to_owned()).map_err(|error| format!("{field}: {}", error.to_string()))
}

fn instant(row: &Document, field: &str) -> Result<Timestamp, String> {
    match get(row, field) {
        Bson::DateTime(date) => {
            Timestamp::from_unix_millis(date.timestamp_millis()).map_err(|error| format!("{field}: {error}"))
        }
        other => Err(wrong(field, "a date", other)),
    }
}

fn optional<T>(
    row: &Document,
    field: &str,
    read: impl FnOnce(&Document, &str) -> Result<T, String>,
) -> Result<Option<T>, String> {
    match get(row, field) {
        Bson::Null => Ok(None),
        _ => read(row, field).map(Some),
    }
}

fn execution_fields(row: &Document) -> Result<Execution, String> {
    Ok(Execution {
        id: uuid(row, "_id")?.into(),
        state: text(row, "state")?.parse().map_err(|error| format!("state: {error}"))?,
        attempt: number(row, "attempt")?,
        max_attempts: NonZeroU32::new(number(row, "max_attempts")?).ok_or("max_attempts: zero")?,
        fence: number(row, "fence")?,
        revision: uuid(row, "revision")?.into(),
        claimed_by: optional(row, "claimed_by", parsed)?,
        claimed_at: optional(row, "claimed_at", instant)?,
        attempted_at: optional(row, "attempted_at", instant)?,
        lease_expires_at: optional(row, "lease_expires_at", instant)?,
    })
}

fn failure(row: &Document) -> Result<Failure, String> {
    Ok(Failure {
        attempt: number(row, "attempt")?,
        fence: number(row, "fence")?,
        worker: optional(row, "worker", parsed)?,
        at: instant(row, "at")?,
        text: FailureText::from(text(row, "text")?),
    })
}

fn failures(row: &Document) -> Result<Vec<Failure>, String> {
    let Bson::Array(errors) = get(row, "errors") else {
        return Err(wrong("errors", "a list", get(row, "errors")));
    };
    let read = |error: &Bson| match error {
        Bson::Document(error) => failure(error).map_err(|reason| format!("errors: {reason}")),
        other => Err(wrong("errors", "a list of documents", other)),
    };
    errors.iter().map(read).collect()
}

fn job_fields(row: &Document, execution: Execution) -> Result<Job, String> {
    Ok(Job {
        execution,
        queue: parsed::<Name>(row, "queue")?,
        kind: parsed::<Name>(row, "kind")?,
        payload: parsed::<Json>(row, "payload")?,
        priority: Priority::new(number(row, "priority")?).map_err(|error| error.to_string())?,
        available_at: instant(row, "available_at")?,
        created_at: instant(row, "created_at")?,
        finished_at: optional(row, "finished_at", instant)?,
        unique_key: optional(row, "unique_key", parsed::<UniqueKey>)?,
        result: optional(row, "result", parsed::<Json>)?,
        errors: failures(row)?,
    })
}

/// A row that came as it is on the wire. One that is no document, such as for a text that is not UTF-8, is without fields
/// but for its id.
pub(crate) fn document(raw: &RawDocumentBuf) -> Document {
    Document::try_from(raw.as_ref()).unwrap_or_else(|_| {
        let mut row = Document::new();
        if let Ok(id) = raw.get_binary("_id") {
            row.insert("_id", Binary { subtype: id.subtype, bytes: id.bytes.to_vec() });
        }
        row
    })
}

/// The row's id. No row with another kind of id is ever asked for.
pub(crate) fn id(row: &Document) -> JobId {
    uuid(row, "_id").unwrap_or_default().into()
}

/// The row's place in the order of `stale`. A lease that is no timestamp lies before all that are.
pub(crate) fn stale_cursor(row: &Document) -> StaleCursor {
    let lease_expires_at = optional(row, "lease_expires_at", instant).unwrap_or(Some(Timestamp::MIN));
    StaleCursor { lease_expires_at, id: id(row) }
}

/// The row's place in the order of its queue.
pub(crate) fn due_order(row: &Document) -> (i64, Option<Timestamp>, JobId) {
    (integer(row, "priority").unwrap_or(i64::MAX), instant(row, "available_at").ok(), id(row))
}

/// The row's lifecycle part.
pub(crate) fn execution(row: &Document) -> Result<Execution, Unreadable> {
    execution_fields(row).map_err(|reason| Unreadable::new(id(row), reason))
}

/// The whole row.
pub(crate) fn job(row: &Document) -> Result<Job, Unreadable> {
    let execution = execution(row)?;
    job_fields(row, execution.clone()).map_err(|reason| Unreadable::beyond(execution, reason))
}

pub(crate) fn revision(row: &Document) -> Option<Revision> {
    uuid(row, "revision").ok().map(Revision::from)
}

/// The mark of the batch that wrote the row last.
pub(crate) fn batch(row: &Document) -> Option<Revision> {
    uuid(row, BATCH).ok().map(Revision::from)
}

/// Whether the row shows this claim, whatever else is wrong with it.
pub(crate) fn shows(row: &Document, held: &Held) -> bool {
    let is_held =
        text(row, "state").ok().and_then(|state| state.parse().ok()).is_some_and(queue_core::JobState::is_held);
    is_held && revision(row) == Some(held.revision) && text(row, "claimed_by") == Ok(held.worker.as_str())
}

/// Whether the row has this job's content. Compared as it is stored, so that a row of a newer version, which this one cannot
/// read, is still known again.
pub(crate) fn repeats(row: &Document, job: &NewJob) -> bool {
    let NewJob { id: of, queue, kind, payload, priority, max_attempts, available: _, unique_key } = job;
    let is = |field: &str, value: &str| text(row, field) == Ok(value);
    let key = match unique_key {
        Some(key) => is("unique_key", key.as_str()),
        None => *get(row, "unique_key") == Bson::Null,
    };
    *of == id(row)
        && is("queue", queue.as_str())
        && is("kind", kind.as_str())
        && is("payload", payload.as_str())
        && integer(row, "priority") == Ok(i64::from(priority.get()))
        && integer(row, "max_attempts") == Ok(i64::from(max_attempts.get()))
        && key
}

/// What a row is about that is looked at before an enqueue.
pub(crate) enum Seen {
    /// The server's clock.
    Now(Timestamp),
    /// A row that has one of the ids.
    Stored(Document),
    /// A row that has one of the keys.
    Holder { queue: String, key: String, id: JobId },
}

pub(crate) fn seen(row: Document) -> Result<Seen, String> {
    if row.contains_key("now") {
        return instant(&row, "now").map(Seen::Now);
    }
    if row.contains_key("holder") {
        let (queue, key) = (text(&row, "queue")?.to_owned(), text(&row, "active_key")?.to_owned());
        return Ok(Seen::Holder { queue, key, id: uuid(&row, "_id")?.into() });
    }
    Ok(Seen::Stored(row))
}

fn step(step: &Bson) -> Result<Step, String> {
    let Bson::Document(step) = step else { return Err(wrong("steps", "a list of documents", step)) };
    let state = StepState::from_columns(
        text(step, "state")?,
        optional(step, "event", parsed)?,
        optional(step, "until", instant)?,
        optional(step, "revision", uuid)?.map(Revision::from),
        optional(step, "value", parsed)?,
    )?;
    Ok(Step { name: parsed(step, "name")?, fence: number(step, "fence")?, state })
}

/// The steps in the row of this job, in order of their names.
pub(crate) fn steps(of: JobId, row: &Document) -> Result<Vec<Step>, Error> {
    let steps: Result<Vec<_>, _> = match get(row, "steps") {
        // One that a program of schema 1 stored; but one that is no document has no other field either.
        Bson::Null if row.contains_key("revision") => Ok(Vec::new()),
        Bson::Array(steps) => steps.iter().map(step).collect(),
        other => Err(wrong("steps", "a list", other)),
    };
    let mut steps = steps.map_err(|reason| unreadable_step(of, reason))?;
    steps.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(steps)
}

/// The payload in the row of the event of this key.
pub(crate) fn payload(key: &Name, row: &Document) -> Result<Option<Json>, Error> {
    optional(row, "payload", parsed).map_err(|reason| unreadable_event(key, reason))
}

/// A row's size, as it was measured.
pub(crate) fn size(row: &Document) -> i64 {
    integer(row, "size").unwrap_or_default()
}

/// How many jobs of a queue are in a state.
pub(crate) fn count(row: &Document) -> Result<Count, String> {
    let Bson::Document(group) = get(row, "_id") else { return Err("no group".to_owned()) };
    let state = text(group, "state").ok().and_then(|state| state.parse().ok());
    Ok(Count { queue: parsed(group, "queue")?, state, jobs: number(row, "jobs")? })
}

/// What the schema's document says.
pub(crate) fn version(row: &Document) -> Result<queue_core::SchemaVersion, String> {
    let (version, oldest_version) = (integer(row, "version")?, integer(row, "oldest_version")?);
    Ok(queue_core::SchemaVersion { version, oldest_version, oldest_release: text(row, "oldest_release")?.to_owned() })
}
