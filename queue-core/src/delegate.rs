//! References, boxes and shared pointers to a backend are backends.

use std::sync::Arc;

use async_trait::async_trait;

use crate::Backend;
use crate::Beat;
use crate::Capabilities;
use crate::ClaimRequest;
use crate::Claimed;
use crate::Count;
use crate::Delay;
use crate::DurableSteps;
use crate::Enqueued;
use crate::Execution;
use crate::Fingerprint;
use crate::Held;
use crate::Inspect;
use crate::Job;
use crate::JobId;
use crate::JobState;
use crate::Lease;
use crate::Limit;
use crate::ListFilter;
use crate::Name;
use crate::NewJob;
use crate::Page;
use crate::Patch;
use crate::Result;
use crate::StaleCursor;
use crate::Update;
use crate::UpdateRequest;
use crate::WorkerId;

/// Implements [`Backend`] and [`Inspect`] by passing every call on, provided methods included; clippy
/// refuses one that is left out. `$target` is the expression to call, given `self`; `$waits` the one to wait for work with, if there
/// is one yet; `$steps` the one for durable steps.
macro_rules! delegate {
    ([$($generics:tt)*] [$($inspect:tt)*] $type:ty, |$self:ident| $capabilities:expr, $target:expr, wait for $waits:expr, steps $steps:expr) => {
        #[async_trait]
        #[deny(clippy::missing_trait_methods)]
        impl<$($generics)*> Backend for $type {
            fn capabilities(&$self) -> Capabilities {
                $capabilities
            }

            async fn migrate(&$self) -> Result<()> {
                $target.migrate().await
            }

            async fn enqueue(&$self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
                $target.enqueue(jobs).await
            }

            async fn get(&$self, id: JobId) -> Result<Option<Job>> {
                $target.get(id).await
            }

            async fn claim(&$self, request: &ClaimRequest) -> Result<Claimed> {
                $target.claim(request).await
            }

            async fn update_if_current(&$self, id: JobId, current: &Fingerprint, patch: &Patch) -> Result<Update> {
                $target.update_if_current(id, current, patch).await
            }

            async fn extend_leases(&$self, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
                $target.extend_leases(held, lease).await
            }

            async fn stale(&$self, after: Option<StaleCursor>, limit: Limit) -> Result<Page<Execution, StaleCursor>> {
                $target.stale(after, limit).await
            }

            async fn claimed_by(
                &$self,
                worker: &WorkerId,
                older_than: Delay,
                after: Option<JobId>,
                limit: Limit,
            ) -> Result<Page<Execution, JobId>> {
                $target.claimed_by(worker, older_than, after, limit).await
            }

            async fn update_many_if_current(&$self, updates: &[UpdateRequest]) -> Result<Vec<Update>> {
                $target.update_many_if_current(updates).await
            }

            async fn wait_for_work(&$self, queues: &[Name]) -> Result<()> {
                match $waits {
                    Some(target) => target.wait_for_work(queues).await,
                    None => Ok(()),
                }
            }

            fn durable_steps(&$self) -> Option<&dyn DurableSteps> {
                $steps
            }
        }

        #[async_trait]
        #[deny(clippy::missing_trait_methods)]
        impl<$($inspect)*> Inspect for $type {
            async fn list(&$self, filter: &ListFilter, after: Option<JobId>, limit: Limit) -> Result<Page<Job, JobId>> {
                $target.list(filter, after, limit).await
            }

            async fn counts(&$self) -> Result<Vec<Count>> {
                $target.counts().await
            }

            async fn purge(&$self, state: JobState, older_than: Delay, limit: Limit) -> Result<u64> {
                $target.purge(state, older_than, limit).await
            }
        }
    };
}
pub(crate) use delegate;

delegate!([B: Backend + ?Sized] [B: Inspect + ?Sized] &B, |self| (**self).capabilities(), (**self), wait for Some(&**self), steps (**self).durable_steps());
delegate!([B: Backend + ?Sized] [B: Inspect + ?Sized] Box<B>, |self| (**self).capabilities(), (**self), wait for Some(&**self), steps (**self).durable_steps());
delegate!([B: Backend + ?Sized] [B: Inspect + ?Sized] Arc<B>, |self| (**self).capabilities(), (**self), wait for Some(&**self), steps (**self).durable_steps());
