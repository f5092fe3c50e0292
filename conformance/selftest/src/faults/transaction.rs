//! The application's own transaction. The reference has none, so these run round SQLite.

use std::sync::Arc;
use std::time::SystemTime;

use async_trait::async_trait;
use queue_conformance::BoxError;
use queue_conformance::CallerTransaction;
use queue_core::*;

use crate::Fault;
use crate::broken::Real;
use crate::fault::Wrong;

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "transaction::commits_at_once",
        &Begins(Mode::CommitsAtOnce),
        "Each call commits the caller's transaction.",
        &[
            "transaction::a_commit_shows_everything",
            "transaction::a_rollback_leaves_nothing",
            "transaction::dropped_transactions",
            "transaction::dropped_futures",
            "transaction::a_refused_call_leaves_nothing",
            "transaction::a_conflict_is_reported",
        ],
    )
    .not_round_the_reference(),
    Fault::new(
        "transaction::outlives_its_drop",
        &Begins(Mode::OutlivesItsDrop),
        "A transaction that is dropped stays open, with its locks.",
        &["transaction::dropped_transactions", "transaction::dropped_futures"],
    )
    .not_round_the_reference()
    .hangs(),
    Fault::new(
        "transaction::duplicate_is_an_error",
        &Begins(Mode::DuplicateIsAnError),
        "A duplicate in a transaction is the violated index's error.",
        &["transaction::a_duplicate_leaves_it_usable"],
    )
    .not_round_the_reference(),
    Fault::new(
        "transaction::reads_elsewhere",
        &Begins(Mode::ReadsElsewhere),
        "An update in a transaction looks at the row over another connection first.",
        &["transaction::sees_its_own_writes"],
    )
    .not_round_the_reference(),
    Fault::new(
        "transaction::names_no_item",
        &Begins(Mode::NamesNoItem),
        "A refused enqueue in a transaction does not say which item it is about.",
        &["transaction::a_refused_call_leaves_nothing"],
    )
    .not_round_the_reference(),
    Fault::new(
        "transaction::conflict_is_an_error",
        &Begins(Mode::ConflictIsAnError),
        "A conflict in a transaction is an error without the row.",
        &["transaction::a_conflict_is_reported"],
    )
    .not_round_the_reference(),
    Fault::new(
        "transaction::compares_nothing",
        &Begins(Mode::ComparesNothing),
        "An update in a transaction writes whatever is there.",
        &["transaction::a_conflict_is_reported"],
    )
    .not_round_the_reference(),
    Fault::new(
        "transaction::open_keys_are_taken",
        &Begins(Mode::OpenKeysAreTaken),
        "Who wants a key that an open transaction took is told at once that it is taken.",
        &["transaction::its_end_decides_who_has_the_key"],
    )
    .not_round_the_reference(),
    Fault::new(
        "transaction::now_is_its_beginning",
        &Begins(Mode::NowIsItsBeginning),
        "`now()` is when the transaction began.",
        &["transaction::times_are_the_statements"],
    )
    .not_round_the_reference(),
    Fault::new(
        "transaction::writes_what_it_began_with",
        &Begins(Mode::WritesWhatItBeganWith),
        "A transaction that is to settle a job can only change the row as it was when it began.",
        &["transaction::a_heartbeat_does_no_harm"],
    )
    .not_round_the_reference(),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    CommitsAtOnce,
    OutlivesItsDrop,
    DuplicateIsAnError,
    ReadsElsewhere,
    NamesNoItem,
    ConflictIsAnError,
    ComparesNothing,
    OpenKeysAreTaken,
    NowIsItsBeginning,
    WritesWhatItBeganWith,
}

struct Begins(Mode);

#[async_trait]
impl Wrong for Begins {
    async fn begin(
        &self,
        real: Arc<Real>,
        settles: Option<&Execution>,
    ) -> Result<Box<dyn CallerTransaction>, BoxError> {
        let inner = Some(real.store.begin(settles).await?);
        Ok(Box::new(Broken { mode: self.0, real, inner, began: now() }))
    }

    async fn extend_leases(&self, real: &Real, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        if self.0 == Mode::WritesWhatItBeganWith {
            for held in held {
                real.shared.kept.keep(real.handle.get(held.id).await?.as_slice());
            }
        }
        real.handle.extend_leases(held, lease).await
    }

    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let holder = |job: &NewJob| {
            let kept = real.shared.kept.jobs();
            kept.values().find(|other| job.unique_key.is_some() && other.unique_key == job.unique_key).map(Job::id)
        };
        match jobs {
            [job] if let Some(existing) = holder(job).filter(|id| *id != job.id) => {
                Ok(vec![Enqueued::Duplicate { existing }])
            }
            jobs => real.handle.enqueue(jobs).await,
        }
    }
}

struct Broken {
    mode: Mode,
    real: Arc<Real>,
    /// `None` once it has ended.
    inner: Option<Box<dyn CallerTransaction>>,
    began: Timestamp,
}

/// This process' clock, which is SQLite's too.
fn now() -> Timestamp {
    let millis = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis();
    Timestamp::from_unix_millis(i64::try_from(millis).unwrap_or(i64::MAX)).unwrap_or(Timestamp::MAX)
}

fn ended() -> Error {
    Error::not_applied(ErrorKind::Permanent, "the transaction has ended")
}

impl Broken {
    fn inner(&mut self) -> Result<&mut Box<dyn CallerTransaction>> {
        self.inner.as_mut().ok_or_else(ended)
    }

    async fn called(&mut self) -> Result<()> {
        if self.mode == Mode::CommitsAtOnce {
            let failed = |error: BoxError| Error::not_applied(ErrorKind::Permanent, error.to_string());
            self.inner.take().ok_or_else(ended)?.commit().await.map_err(failed)?;
            self.inner = Some(self.real.store.begin(None).await.map_err(failed)?);
        }
        Ok(())
    }
}

impl Drop for Broken {
    fn drop(&mut self) {
        if self.mode == Mode::OutlivesItsDrop {
            std::mem::forget(self.inner.take());
        }
    }
}

#[async_trait]
impl CallerTransaction for Broken {
    async fn enqueue(&mut self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let mode = self.mode;
        let mut jobs = jobs.to_vec();
        if mode == Mode::NowIsItsBeginning {
            jobs.iter_mut().for_each(|job| job.available = When::At(self.began));
        }
        let answers = self.inner()?.enqueue(&jobs).await.map_err(|error| match mode {
            Mode::NamesNoItem => Error::new(error.kind(), error.certainty(), error.to_string()),
            _ => error,
        })?;
        self.called().await?;
        if mode == Mode::DuplicateIsAnError && answers.iter().any(|answer| matches!(answer, Enqueued::Duplicate { .. }))
        {
            return Err(Error::not_applied(ErrorKind::Permanent, "UNIQUE constraint failed"));
        }
        if mode == Mode::OpenKeysAreTaken {
            let taken: Vec<_> = jobs.iter().map(|job| job.clone().into_job(Timestamp::MIN)).collect();
            self.real.shared.kept.keep(&taken);
        }
        Ok(answers)
    }

    async fn update(&mut self, id: JobId, current: &Fingerprint, patch: &Patch) -> Result<Update> {
        if self.mode == Mode::ReadsElsewhere
            && let Some(there) = self.real.row(id).await.filter(|there| there.fingerprint() != *current)
        {
            return Ok(Update::Conflict(there));
        }
        if self.mode == Mode::WritesWhatItBeganWith && self.real.shared.kept.jobs().contains_key(&id) {
            return Err(Error::not_applied(ErrorKind::Transient, "a write conflict"));
        }
        let mut current = current.clone();
        if self.mode == Mode::ComparesNothing
            && let Some(there) = self.real.row(id).await
        {
            current = there.fingerprint();
        }
        let answer = self.inner()?.update(id, &current, patch).await?;
        self.called().await?;
        match answer {
            Update::Conflict(_) if self.mode == Mode::ConflictIsAnError => {
                Err(Error::not_applied(ErrorKind::Permanent, "the job was changed"))
            }
            answer => Ok(answer),
        }
    }

    async fn commit(mut self: Box<Self>) -> Result<(), BoxError> {
        self.real.shared.kept.jobs().clear();
        self.inner.take().ok_or_else(ended)?.commit().await
    }

    async fn roll_back(mut self: Box<Self>) -> Result<(), BoxError> {
        self.real.shared.kept.jobs().clear();
        self.inner.take().ok_or_else(ended)?.roll_back().await
    }
}
