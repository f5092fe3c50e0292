//! The public conformance suite on this backend.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use queue_conformance::BoxError;
use queue_conformance::Damage;
use queue_conformance::Harness;
use queue_conformance::Hold;
use queue_conformance::Hook;
use queue_conformance::Scope;
use queue_conformance::Store;
use queue_conformance::Suite;
use queue_core::Capabilities;
use queue_core::ClockOffset;
use queue_core::Delay;
use queue_core::Error;
use queue_core::Execution;
use queue_core::Inspect;
use queue_core::Job;
use queue_core::JobId;
use queue_core::JobState;
use redb::ReadableTable;
use redb_backend::RedbBackend;
use redb_backend::Writing;
use redb_backend::rows;
use redb_backend::rows::Rows;

fn main() -> ExitCode {
    Suite::new().harness(RedbHarness).run()
}

struct RedbHarness;

#[async_trait]
impl Harness for RedbHarness {
    fn name(&self) -> String {
        "redb".to_owned()
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.atomic_batches = true;
        capabilities.wakes = true;
        capabilities
    }

    fn hooks(&self) -> &'static [Hook] {
        &[Hook::Clock, Hook::Overwrite, Hook::Damage, Hook::Hold]
    }

    async fn provision(&self, scope: &Scope) -> Result<Arc<dyn Store>, BoxError> {
        let path = std::env::temp_dir().join(format!("{}.redb", scope.name()));
        let clock = ClockOffset::default();
        let backend = RedbBackend::open_with_clock(&path, clock.clone()).await?;
        Ok(Arc::new(RedbStore { path, clock, backend }))
    }
}

/// The file, which only one handle and its clones can have open.
struct RedbStore {
    path: PathBuf,
    clock: ClockOffset,
    backend: RedbBackend,
}

impl RedbStore {
    /// A transaction in which the head of a job has been changed.
    async fn change(&self, id: JobId, change: impl FnOnce(&mut Job)) -> Result<Writing, BoxError> {
        let writing = self.backend.begin().await?;
        let mut rows = Rows::open(&writing).map_err(Error::from)?;
        let old = rows.head(id).map_err(Error::from)?.ok_or("no such job")?.map_err(Error::from)?;
        let mut new = old.clone();
        change(&mut new);
        rows.put(Some(&old), new).map_err(Error::from)?;
        drop(rows);
        Ok(writing)
    }
}

#[async_trait]
impl Store for RedbStore {
    async fn connect(&self) -> Result<Arc<dyn Inspect>, BoxError> {
        Ok(Arc::new(self.backend.clone()))
    }

    async fn discard(&self) -> Result<(), BoxError> {
        Ok(std::fs::remove_file(&self.path)?)
    }

    async fn advance(&self, delay: Delay) -> Result<(), BoxError> {
        self.clock.advance(delay);
        Ok(())
    }

    async fn overwrite(&self, row: &Execution) -> Result<(), BoxError> {
        Ok(self.change(row.id, |job| job.execution = row.clone()).await?.commit().map_err(Error::from)?)
    }

    async fn damage(&self, id: JobId, damage: Damage) -> Result<(), BoxError> {
        let key = id.as_uuid();
        let writing = match damage {
            Damage::ForeignState => {
                // No index has suspended jobs, and their keys stay taken: so it is with a state that only a newer version knows.
                let writing = self.change(id, |job| job.execution.state = JobState::Suspended).await?;
                let mut jobs = writing.open_table(rows::JOBS)?;
                let row = jobs.get(key)?.ok_or("no such job")?.value().replace("\"suspended\"", "\"foreign\"");
                jobs.insert(key, row.as_str())?;
                drop(jobs);
                writing
            }
            Damage::BrokenData => {
                let writing = self.backend.begin().await?;
                writing.open_table(rows::TEXTS)?.insert((key, rows::PAYLOAD), "{oops")?;
                writing
            }
            Damage::Poison => {
                let writing = self.backend.begin().await?;
                writing.open_table(rows::FROZEN)?.insert(key, ())?;
                writing
            }
        };
        Ok(writing.commit().map_err(Error::from)?)
    }

    async fn hold(&self, row: &Execution) -> Result<Box<dyn Hold>, BoxError> {
        Ok(Box::new(Held(self.change(row.id, |job| job.execution = row.clone()).await?)))
    }
}

/// A row, and with it the store, that is locked.
struct Held(Writing);

#[async_trait]
impl Hold for Held {
    async fn commit(self: Box<Self>) -> Result<(), BoxError> {
        Ok(self.0.commit().map_err(Error::from)?)
    }

    async fn roll_back(self: Box<Self>) -> Result<(), BoxError> {
        Ok(())
    }
}
