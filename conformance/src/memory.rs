//! The harness of the reference.

use std::sync::Arc;

use async_trait::async_trait;
use queue_core::Backend;
use queue_core::Capabilities;
use queue_core::Delay;
use queue_core::Execution;
use queue_core::Inspect;
use queue_core::JobId;
use queue_core::MemoryBackend;
use queue_core::MemoryRow;
use queue_core::Timestamp;

use crate::harness::BoxError;
use crate::harness::Damage;
use crate::harness::Harness;
use crate::harness::Hold;
use crate::harness::Hook;
use crate::harness::Scope;
use crate::harness::Store;

/// Tests [`MemoryBackend`], with every hook but transactions.
#[derive(Clone, Copy, Debug)]
pub struct MemoryHarness;

#[async_trait]
impl Harness for MemoryHarness {
    fn name(&self) -> String {
        "memory".to_owned()
    }

    fn capabilities(&self) -> Capabilities {
        MemoryBackend::new().capabilities()
    }

    fn hooks(&self) -> &'static [Hook] {
        &[Hook::Clock, Hook::Overwrite, Hook::Damage, Hook::Hold]
    }

    async fn provision(&self, _scope: &Scope) -> Result<Arc<dyn Store>, BoxError> {
        Ok(Arc::new(MemoryStore::new()))
    }
}

/// One [`MemoryBackend`], with its hooks.
#[derive(Clone, Debug)]
pub struct MemoryStore(MemoryBackend);

impl MemoryStore {
    /// An empty one, in the year 2031.
    #[expect(clippy::new_without_default, reason = "the year is no obvious default")]
    pub fn new() -> Self {
        let start = Timestamp::from_unix_millis(1_924_992_000_123).unwrap_or(Timestamp::MIN);
        Self(MemoryBackend::at(start))
    }

    /// The backend; a clone of it is a handle.
    pub fn backend(&self) -> &MemoryBackend {
        &self.0
    }

    fn edit<T>(&self, id: JobId, edit: impl FnOnce(&mut MemoryRow) -> T) -> Result<T, BoxError> {
        self.0.edit(|rows| rows.get_mut(&id).map(edit)).ok_or_else(|| format!("no job {id}").into())
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn connect(&self) -> Result<Arc<dyn Inspect>, BoxError> {
        Ok(Arc::new(self.0.clone()))
    }

    async fn discard(&self) -> Result<(), BoxError> {
        Ok(())
    }

    async fn advance(&self, delay: Delay) -> Result<(), BoxError> {
        self.0.advance(delay);
        Ok(())
    }

    async fn overwrite(&self, to: &Execution) -> Result<(), BoxError> {
        self.edit(to.id, |row| row.job.execution = to.clone())
    }

    async fn damage(&self, id: JobId, damage: Damage) -> Result<(), BoxError> {
        self.edit(id, |row| match damage {
            Damage::ForeignState => row.foreign_state = true,
            Damage::BrokenData => row.broken = true,
            Damage::Poison => row.poisoned = true,
        })
    }

    async fn hold(&self, to: &Execution) -> Result<Box<dyn Hold>, BoxError> {
        self.edit(to.id, |row| row.locked = true)?;
        Ok(Box::new(MemoryHold { store: self.clone(), to: to.clone() }))
    }
}

#[derive(Debug)]
struct MemoryHold {
    store: MemoryStore,
    to: Execution,
}

#[async_trait]
impl Hold for MemoryHold {
    async fn commit(self: Box<Self>) -> Result<(), BoxError> {
        self.store.overwrite(&self.to).await?;
        self.roll_back().await
    }

    async fn roll_back(self: Box<Self>) -> Result<(), BoxError> {
        self.store.edit(self.to.id, |row| row.locked = false)
    }
}
