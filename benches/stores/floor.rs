//! The same work, by hand-written statements on the plain driver.

use async_trait::async_trait;
use fenced_queue::JobId;
use fenced_queue::NewJob;
use fenced_queue::contract::Revision;

use crate::Result;

/// What a claim brings that a settle needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    pub(crate) id: JobId,
    pub(crate) revision: Revision,
}

/// One connection of the plain driver. The statements do what a queue for one purpose would have: they know beforehand which columns
/// change and to what, and check the fingerprint all the same. Their parameters are made in them, as an application must.
#[async_trait]
pub(crate) trait Floor: Send {
    async fn enqueue(&mut self, jobs: &[NewJob]) -> Result<()>;

    /// Claims and starts, reading everything that a worker needs.
    async fn claim(&mut self, limit: usize) -> Result<Vec<Ticket>>;

    /// Completes with a result, and answers how many matched.
    async fn settle(&mut self, tickets: &[Ticket]) -> Result<u64>;

    /// Ends every job at once, as the raw material of a history.
    async fn end_everything(&mut self) -> Result<()>;

    /// Deletes every job.
    async fn clear(&mut self) -> Result<()>;

    /// Has the server do now what it would do in the background about a million new rows: it is not what is measured.
    async fn rest(&mut self) -> Result<()> {
        Ok(())
    }
}
