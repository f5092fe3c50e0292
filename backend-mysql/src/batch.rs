//! What travels to the statements: batches as JSON, and their long texts beside them.

use std::fmt;

use queue_core::Change;
use queue_core::Execution;
use queue_core::Failure;
use queue_core::Held;
use queue_core::JobId;
use queue_core::Json;
use queue_core::Name;
use queue_core::NewFailure;
use queue_core::NewJob;
use queue_core::Patch;
use queue_core::Revision;
use queue_core::StepAction;
use queue_core::StepWrite;
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

/// A new job as the statements look for what is stored of it. Without a key it names no queue either: MariaDB would look up
/// the null, and pass every version of every job of the queue that has no key, until it finds one that it may see.
#[derive(Serialize)]
pub(crate) struct KnownRow {
    item: usize,
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    queue: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unique_key: Option<String>,
}

impl KnownRow {
    pub(crate) fn new(item: usize, job: &NewJob) -> Self {
        let key = job.unique_key.as_ref();
        Self {
            item,
            id: uuid_hex(job.id.as_uuid()),
            queue: key.map(|_| hex(job.queue.as_str().as_bytes())),
            unique_key: key.map(|key| hex(key.as_str().as_bytes())),
        }
    }
}

/// A field of a packed item, by how many characters it has; shorter ones are filled up on their left.
#[derive(Clone, Copy)]
pub(crate) enum Width {
    Uuid,
    /// A state, or what is to be done with a column.
    Word,
    /// Of milliseconds, of bytes, or less.
    Number,
}

impl Width {
    pub(crate) const fn characters(self) -> usize {
        match self {
            Self::Uuid => 32,
            Self::Word => 9,
            Self::Number => 16,
        }
    }
}

/// An item as one text, its fields in the order in which the statement names them.
#[derive(Default, Serialize)]
#[serde(transparent)]
pub(crate) struct Packed(String);

impl Packed {
    fn add(mut self, width: Width, field: impl fmt::Display) -> Self {
        self.0 += &format!("{field:>0$}", width.characters());
        self
    }

    fn uuid(self, uuid: Uuid) -> Self {
        self.add(Width::Uuid, uuid.simple())
    }

    fn word(self, word: &str) -> Self {
        self.add(Width::Word, word)
    }

    fn number(self, number: impl Into<i64>) -> Self {
        self.add(Width::Number, number.into())
    }

    /// No text begins at 0.
    fn place(self, place: Option<Place>) -> Self {
        let Place { from, bytes } = place.unwrap_or(Place { from: 0, bytes: 0 });
        self.add(Width::Number, from).add(Width::Number, bytes)
    }

    fn moved(self, Moved(how, millis): Moved) -> Self {
        self.word(how).number(millis)
    }
}

/// New jobs of one statement, and the texts beside it.
#[derive(Default)]
pub(crate) struct NewRows {
    pub(crate) rows: Vec<Packed>,
    pub(crate) names: Texts,
    pub(crate) payloads: Texts,
}

impl NewRows {
    pub(crate) fn add(&mut self, job: &NewJob) {
        // Whole, so that a new field cannot be left out here.
        let NewJob { id, queue, kind, payload, priority, max_attempts, available, unique_key } = job;
        let row = Packed::default()
            .uuid(id.as_uuid())
            .uuid(Revision::random().as_uuid())
            .number(priority.get())
            .number(max_attempts.get())
            .moved(Moved::due(Some(*available)))
            .place(Some(self.names.add(queue.as_str())))
            .place(Some(self.names.add(kind.as_str())))
            .place(unique_key.as_ref().map(|key| self.names.add(key.as_str())))
            .place(Some(self.payloads.add(payload.as_str())));
        self.rows.push(row);
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

/// A step as the statements look it up. Its name is taken as it is in the table.
#[derive(Serialize)]
pub(crate) struct StepRow {
    id: String,
    name: String,
}

impl StepRow {
    pub(crate) fn new(id: JobId, name: &[u8]) -> Self {
        Self { id: uuid_hex(id.as_uuid()), name: hex(name) }
    }
}

/// A step to write: its job is locked, and the event looked for that it would wait for.
#[derive(Serialize)]
pub(crate) struct StepLockRow {
    #[serde(flatten)]
    step: StepRow,
    failure: u8,
    #[serde(skip_serializing_if = "Option::is_none")]
    event: Option<String>,
}

impl StepLockRow {
    pub(crate) fn new(write: &StepWrite) -> Self {
        let (event, failure) = match &write.action {
            StepAction::Begin | StepAction::Finish(_) => (None, false),
            StepAction::Wait(wait) => (wait.event.as_ref(), wait.suspension.failure.is_some()),
        };
        Self {
            step: StepRow::new(write.id, write.name.as_str().as_bytes()),
            failure: u8::from(failure),
            event: event.map(|key| hex(key.as_str().as_bytes())),
        }
    }
}

/// An event as the statements look it up. Its key is taken as it is in the table.
#[derive(Serialize)]
pub(crate) struct EventRow {
    event_key: String,
}

impl EventRow {
    pub(crate) fn new(key: &[u8]) -> Self {
        Self { event_key: hex(key) }
    }
}

/// How one column changes: `keep`, `clear`, `at` or `after` a number of milliseconds.
struct Moved(&'static str, i64);

impl Moved {
    fn of<T>(change: &Change<T>, after: impl FnOnce(&T) -> i64) -> Self {
        match change {
            Change::Keep => Self("keep", 0),
            Change::Clear => Self("clear", 0),
            Change::Set(value) => Self("after", after(value)),
        }
    }

    fn due(when: Option<When>) -> Self {
        match when {
            None => Self("keep", 0),
            Some(When::Now) => Self("after", 0),
            Some(When::After(delay)) => Self("after", delay.as_millis()),
            Some(When::At(instant)) => Self("at", instant.unix_millis()),
        }
    }
}

/// The updates of one statement, and the long texts beside it.
#[derive(Default)]
pub(crate) struct PatchRows {
    pub(crate) rows: Vec<Packed>,
    pub(crate) payloads: Texts,
    pub(crate) results: Texts,
    pub(crate) failures: Texts,
}

impl PatchRows {
    /// Adds an update of a row that was found like this.
    pub(crate) fn add(&mut self, found: &Execution, patch: &Patch, row: &MySqlRow) -> sqlx::Result<()> {
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
        let row = Packed::default()
            .uuid(found.id.as_uuid())
            .uuid(revision.unwrap_or(found.revision).as_uuid())
            .word(state.as_str())
            .number(*attempt)
            .number(*clear_claim)
            .moved(Moved::due(*available))
            .moved(Moved::of(attempted_at, |()| 0))
            .moved(Moved::of(lease, |lease| lease.as_millis()))
            .moved(Moved::of(finished_at, |()| 0))
            .place(payload.as_ref().map(|payload| self.payloads.add(payload.as_str())))
            .word(result)
            .place(result_text)
            .place(kept)
            .place(failure);
        self.rows.push(row);
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
