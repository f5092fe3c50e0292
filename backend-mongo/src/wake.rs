//! Waking workers for what other processes enqueue.

use std::sync::OnceLock;
use std::time::Duration;

use futures_util::StreamExt;
use mongodb::Collection;
use mongodb::Database;
use mongodb::bson::Document;
use mongodb::bson::doc;
use mongodb::options::CollectionOptions;
use mongodb::options::ReadConcern;
use mongodb::options::ReadPreference;
use mongodb::options::SelectionCriteria;
use queue_core::JobState;
use queue_core::WorkSignal;
use tokio::task::AbortHandle;

/// A change stream on the jobs, from the first wait until the handle is gone.
#[derive(Debug)]
pub(crate) struct Watch {
    is_wanted: bool,
    task: OnceLock<AbortHandle>,
}

impl Watch {
    pub(crate) fn new(is_wanted: bool) -> Self {
        Self { is_wanted, task: OnceLock::new() }
    }

    /// Begins to watch, the first time.
    pub(crate) fn start(&self, database: &Database, jobs: &str, signal: &WorkSignal) {
        if !self.is_wanted {
            return;
        }
        self.task.get_or_init(|| {
            let options = CollectionOptions::builder()
                .selection_criteria(SelectionCriteria::ReadPreference(ReadPreference::Primary))
                .read_concern(ReadConcern::majority())
                .build();
            let jobs = database.collection_with_options(jobs, options);
            tokio::spawn(watch(jobs, signal.clone())).abort_handle()
        });
    }

    /// Ends it.
    pub(crate) fn stop(&self) {
        if let Some(task) = self.task.get() {
            task.abort();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Wakes everybody whenever a row begins to wait. The driver resumes a stream whose connection was lost; one that ends for
/// another reason is opened anew, and what it missed meanwhile is made up for by waking everybody once.
async fn watch(jobs: Collection<Document>, signal: WorkSignal) {
    const FIRST_PAUSE: Duration = Duration::from_millis(500);
    const LONGEST_PAUSE: Duration = Duration::from_secs(30);
    let waiting = JobState::Waiting.as_str();
    let pipeline = [
        doc! { "$match": { "$or": [
            { "operationType": { "$in": ["insert", "replace"] }, "fullDocument.state": waiting },
            { "operationType": "update", "updateDescription.updatedFields.state": waiting },
        ] } },
        // No data is needed, and none of a payload's size shall travel.
        doc! { "$project": { "operationType": 1 } },
    ];
    let mut pause = FIRST_PAUSE;
    loop {
        match jobs.watch().pipeline(pipeline.clone()).await {
            Ok(mut events) => {
                signal.notify();
                while let Some(event) = events.next().await {
                    match event {
                        Ok(_) => {
                            pause = FIRST_PAUSE;
                            signal.notify();
                        }
                        Err(error) => {
                            tracing::debug!(error = %error.kind, "the change stream on the jobs ended");
                            break;
                        }
                    }
                }
            }
            Err(error) => tracing::debug!(error = %error.kind, "no change stream on the jobs; workers poll"),
        }
        tokio::time::sleep(pause).await;
        pause = LONGEST_PAUSE.min(pause * 2);
    }
}
