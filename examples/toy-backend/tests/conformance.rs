//! The suite, run on the toy: what an author of a backend writes.

use std::process::ExitCode;
use std::sync::Arc;

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
use queue_core::Execution;
use queue_core::Inspect;
use queue_core::JobId;
use tempfile::TempDir;
use toy_backend::Open;
use toy_backend::Row;
use toy_backend::ToyBackend;

fn main() -> ExitCode {
    Suite::new().harness(ToyHarness).run()
}

struct ToyHarness;

#[async_trait::async_trait]
impl Harness for ToyHarness {
    fn name(&self) -> String {
        "toy".to_owned()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    fn hooks(&self) -> &'static [Hook] {
        &[Hook::Clock, Hook::Overwrite, Hook::Damage, Hook::Hold]
    }

    async fn provision(&self, scope: &Scope) -> Result<Arc<dyn Store>, BoxError> {
        Ok(Arc::new(ToyStore { folder: TempDir::with_prefix(scope.name())?, clock: ClockOffset::default() }))
    }
}

struct ToyStore {
    folder: TempDir,
    clock: ClockOffset,
}

impl ToyStore {
    fn backend(&self) -> ToyBackend {
        ToyBackend { path: self.folder.path().join("jobs.json"), clock: self.clock.clone() }
    }

    async fn edit(&self, id: JobId, edit: impl FnOnce(&mut Row)) -> Result<(), BoxError> {
        let mut open = self.backend().open().await?;
        open.rows.entry(id).and_modify(edit);
        Ok(open.save()?)
    }
}

#[async_trait::async_trait]
impl Store for ToyStore {
    async fn connect(&self) -> Result<Arc<dyn Inspect>, BoxError> {
        Ok(Arc::new(self.backend()))
    }

    async fn discard(&self) -> Result<(), BoxError> {
        Ok(std::fs::remove_dir_all(self.folder.path())?)
    }

    async fn advance(&self, delay: Delay) -> Result<(), BoxError> {
        self.clock.advance(delay);
        Ok(())
    }

    async fn overwrite(&self, row: &Execution) -> Result<(), BoxError> {
        let value = serde_json::to_value(row)?;
        self.edit(row.id, |row| row.job["execution"] = value).await
    }

    async fn damage(&self, id: JobId, damage: Damage) -> Result<(), BoxError> {
        self.edit(id, |row| match damage {
            Damage::ForeignState => row.job["execution"]["state"] = "of a newer version".into(),
            Damage::BrokenData => row.job["errors"] = 7.into(),
            Damage::Poison => row.read_only = true,
        })
        .await
    }

    async fn hold(&self, row: &Execution) -> Result<Box<dyn Hold>, BoxError> {
        let mut open = self.backend().open().await?;
        let value = serde_json::to_value(row)?;
        open.rows.entry(row.id).and_modify(|row| row.job["execution"] = value);
        Ok(Box::new(ToyHold(open)))
    }
}

/// The file is nobody else's until this is saved or dropped.
struct ToyHold(Open);

#[async_trait::async_trait]
impl Hold for ToyHold {
    async fn commit(self: Box<Self>) -> Result<(), BoxError> {
        Ok(self.0.save()?)
    }

    async fn roll_back(self: Box<Self>) -> Result<(), BoxError> {
        Ok(())
    }
}
