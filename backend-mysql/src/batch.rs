//! What travels to the statements: batches as JSON, and their long texts beside them.

use std::num::NonZeroU32;

use queue_core::Change;
use queue_core::Failure;
use queue_core::Held;
use queue_core::JobId;
use queue_core::JobState;
use queue_core::Json;
use queue_core::Name;
use queue_core::NewFailure;
use queue_core::NewJob;
use queue_core::Patch;
use queue_core::Priority;
use queue_core::Revision;
use queue_core::Timestamp;
use queue_core::UniqueKey;
use queue_core::UpdateRequest;
use queue_core::When;
use queue_core::WorkerId;
use serde::Serialize;
use serde_json::value::RawValue;
use sqlx::Row;
use sqlx::mysql::MySqlRow;
use uuid::Uuid;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02X}")).collect()
}

fn uuid_hex(uuid: Uuid) -> String {
    uuid.simple().to_string()
}

/// Names as a list that a statement looks one up in.
pub(crate) fn list<'n>(names: impl IntoIterator<Item = &'n Name>) -> String {
    names.into_iter().map(|name| hex(name.as_str().as_bytes())).collect::<Vec<_>>().join(",")
}

/// A JSON array for a statement to take apart.
pub(crate) fn array<T: Serialize>(items: impl IntoIterator<Item = T>) -> sqlx::Result<String> {
    let items: Vec<T> = items.into_iter().collect();
    serde_json::to_string(&items).map_err(|error| sqlx::Error::Encode(error.into()))
}

/// Long texts that travel as one string of bytes.
#[derive(Debug, Default)]
pub(crate) struct Texts(Vec<u8>);

/// Where a text begins, counted from 1, and how many bytes it has.
#[derive(Clone, Copy)]
struct Place {
    from: usize,
    bytes: usize,
}

impl Texts {
    fn add(&mut self, text: &str) -> Place {
        let place = Place { from: self.0.len() + 1, bytes: text.len() };
        self.0.extend_from_slice(text.as_bytes());
        place
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}

/// A row as the statements look it up.
#[derive(Serialize)]
pub(crate) struct IdRow {
    id: String,
}

impl From<JobId> for IdRow {
    fn from(id: JobId) -> Self {
        Self { id: uuid_hex(id.as_uuid()) }
    }
}

/// A new job as the statements look for what is stored of it.
#[derive(Serialize)]
pub(crate) struct KnownRow {
    item: usize,
    id: String,
    queue: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    unique_key: Option<String>,
}

impl KnownRow {
    pub(crate) fn new(item: usize, job: &NewJob) -> Self {
        let key = |key: &UniqueKey| hex(key.as_str().as_bytes());
        Self {
            item,
            id: uuid_hex(job.id.as_uuid()),
            queue: hex(job.queue.as_str().as_bytes()),
            unique_key: job.unique_key.as_ref().map(key),
        }
    }
}

/// A new job as the statement takes it apart.
#[derive(Serialize)]
pub(crate) struct NewRow {
    #[serde(flatten)]
    known: KnownRow,
    kind: String,
    priority: Priority,
    max_attempts: NonZeroU32,
    revision: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    at: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    after: Option<i64>,
    payload_from: usize,
    payload_bytes: usize,
}

impl NewRow {
    pub(crate) fn new(item: usize, job: &NewJob, payloads: &mut Texts) -> Self {
        let payload = payloads.add(job.payload.as_str());
        let (at, after) = match job.available {
            When::Now => (None, Some(0)),
            When::After(delay) => (None, Some(delay.as_millis())),
            When::At(instant) => (Some(instant), None),
        };
        Self {
            known: KnownRow::new(item, job),
            kind: hex(job.kind.as_str().as_bytes()),
            priority: job.priority,
            max_attempts: job.max_attempts,
            revision: uuid_hex(Revision::random().as_uuid()),
            at,
            after,
            payload_from: payload.from,
            payload_bytes: payload.bytes,
        }
    }
}

/// A claim to renew as the statement takes it apart.
#[derive(Serialize)]
pub(crate) struct HeldRow {
    item: usize,
    id: String,
    revision: String,
    worker: String,
}

impl HeldRow {
    pub(crate) fn new(item: usize, held: &Held) -> Self {
        Self {
            item,
            id: uuid_hex(held.id.as_uuid()),
            revision: uuid_hex(held.revision.as_uuid()),
            worker: hex(held.worker.as_str().as_bytes()),
        }
    }
}

/// A row to lock, and whether its failures are wanted.
#[derive(Serialize)]
pub(crate) struct LockRow {
    id: String,
    failure: u8,
}

impl From<&UpdateRequest> for LockRow {
    fn from(update: &UpdateRequest) -> Self {
        Self { id: uuid_hex(update.id.as_uuid()), failure: u8::from(update.patch.failure.is_some()) }
    }
}

/// How one column changes: `keep`, `clear`, `at` or `after` a number of milliseconds.
struct Moved(&'static str, Option<i64>);

impl Moved {
    fn of<T>(change: &Change<T>, after: impl FnOnce(&T) -> i64) -> Self {
        match change {
            Change::Keep => Self("keep", None),
            Change::Clear => Self("clear", None),
            Change::Set(value) => Self("after", Some(after(value))),
        }
    }

    fn due(when: Option<When>) -> Self {
        match when {
            None => Self("keep", None),
            Some(When::Now) => Self("after", Some(0)),
            Some(When::After(delay)) => Self("after", Some(delay.as_millis())),
            Some(When::At(instant)) => Self("at", Some(instant.unix_millis())),
        }
    }
}

/// What an update writes into a row that matched, as the statement takes it apart.
#[derive(Serialize)]
pub(crate) struct PatchRow {
    id: String,
    state: JobState,
    attempt: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    revision: Option<String>,
    clear_claim: u8,
    available_at: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    available_at_ms: Option<i64>,
    attempted_at: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    attempted_at_ms: Option<i64>,
    lease_expires_at: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease_expires_at_ms: Option<i64>,
    finished_at: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    finished_at_ms: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_from: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_bytes: Option<usize>,
    result: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    result_from: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    result_bytes: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kept_from: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kept_bytes: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failure_from: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failure_bytes: Option<usize>,
}

/// The updates of one statement, and the long texts beside it.
#[derive(Default)]
pub(crate) struct PatchRows {
    pub(crate) rows: Vec<PatchRow>,
    pub(crate) payloads: Texts,
    pub(crate) results: Texts,
    pub(crate) failures: Texts,
}

impl PatchRows {
    /// Adds an update of a row that was found like this.
    pub(crate) fn add(&mut self, id: JobId, patch: &Patch, row: &MySqlRow) -> sqlx::Result<()> {
        // Whole, so that a new field cannot be left out here.
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
        let Moved(available_at, available_at_ms) = Moved::due(*available);
        let Moved(attempted_at, attempted_at_ms) = Moved::of(attempted_at, |()| 0);
        let Moved(lease_expires_at, lease_expires_at_ms) = Moved::of(lease, |lease| lease.as_millis());
        let Moved(finished_at, finished_at_ms) = Moved::of(finished_at, |()| 0);
        let payload = payload.as_ref().map(|payload| self.payloads.add(payload.as_str()));
        let (result, result_text) = match result {
            Change::Keep => ("keep", None),
            Change::Clear => ("clear", None),
            Change::Set(result) => ("set", Some(self.results.add(Json::as_str(result)))),
        };
        let (kept, failure) = match failure {
            None => (None, None),
            Some(failure) => {
                let kept = kept(row.try_get::<Option<&[u8]>, _>("errors")?.unwrap_or_default());
                let text = failure_text(failure, kept.bytes > 0).map_err(|error| sqlx::Error::Encode(error.into()))?;
                (Some(kept), Some(self.failures.add(&text)))
            }
        };
        self.rows.push(PatchRow {
            id: uuid_hex(id.as_uuid()),
            state: *state,
            attempt: *attempt,
            revision: revision.map(|revision| uuid_hex(revision.as_uuid())),
            clear_claim: u8::from(*clear_claim),
            available_at,
            available_at_ms,
            attempted_at,
            attempted_at_ms,
            lease_expires_at,
            lease_expires_at_ms,
            finished_at,
            finished_at_ms,
            payload_from: payload.map(|place| place.from),
            payload_bytes: payload.map(|place| place.bytes),
            result,
            result_from: result_text.map(|place| place.from),
            result_bytes: result_text.map(|place| place.bytes),
            kept_from: kept.map(|place| place.from),
            kept_bytes: kept.map(|place| place.bytes),
            failure_from: failure.map(|place| place.from),
            failure_bytes: failure.map(|place| place.bytes),
        });
        Ok(())
    }
}

/// The part of a list of failures that stays when one is added. What is no list, by somebody else's hand, must not keep the
/// failure from being recorded: of that nothing stays.
fn kept(errors: &[u8]) -> Place {
    let items: Vec<&RawValue> = serde_json::from_slice(errors).unwrap_or_default();
    let surplus = (items.len() + 1).saturating_sub(Failure::KEPT);
    let (Some(first), Some(last)) = (items.get(surplus), items.last()) else {
        return Place { from: 1, bytes: 0 };
    };
    let offset = |item: &RawValue| item.get().as_ptr().addr() - errors.as_ptr().addr();
    let (start, end) = (offset(first), offset(last) + last.get().len());
    Place { from: start + 1, bytes: end - start }
}

/// A [`Failure`] up to its time, which the statement adds, and with it the end of the list.
fn failure_text(failure: &NewFailure, follows: bool) -> serde_json::Result<String> {
    #[derive(Serialize)]
    struct FailureRow<'a> {
        attempt: u32,
        fence: u64,
        worker: Option<&'a WorkerId>,
        text: &'a str,
    }
    let NewFailure { attempt, fence, worker, text } = failure;
    let row = FailureRow { attempt: *attempt, fence: *fence, worker: worker.as_ref(), text: text.as_str() };
    let whole = serde_json::to_string(&row)?;
    let open = whole.strip_suffix('}').unwrap_or(&whole);
    Ok(format!("{}{open},\"at\":", if follows { "," } else { "" }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_failures_are_kept_as_they_are() {
        let cut = |errors: &str| {
            let Place { from, bytes } = kept(errors.as_bytes());
            errors[from - 1..from - 1 + bytes].to_owned()
        };
        assert_eq!(cut("[]"), "");
        assert_eq!(cut(" [ {\"a\": \"]é\"} , 1e400 ] "), "{\"a\": \"]é\"} , 1e400");
        assert_eq!(cut("{}"), "");
        assert_eq!(cut("oops"), "");
        assert_eq!(cut("[0,1,2,3,4,5,6,7,8]"), "0,1,2,3,4,5,6,7,8");
        assert_eq!(cut("[0,1,2,3,4,5,6,7,8,9,10]"), "2,3,4,5,6,7,8,9,10");
    }
}
