//! New jobs.

use std::sync::atomic::Ordering;

use async_trait::async_trait;
use queue_core::*;

use crate::Fault;
use crate::broken::Real;
use crate::broken::gap;
use crate::fault::Wrong;

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "enqueue::loses_the_priority",
        &Stores(|job, _| job.priority = Priority::default()),
        "The priority is not stored.",
        &["enqueue::stored_as_given"],
    )
    .everywhere(),
    Fault::new(
        "enqueue::bulk_loses_the_delay",
        &Stores(|job, many| {
            if many {
                job.available = When::Now
            }
        }),
        "The bulk form does not store when a job is due.",
        &["enqueue::bulk_equals_single"],
    )
    .everywhere(),
    Fault::new(
        "enqueue::past_becomes_now",
        &Stores(|job, _| {
            if matches!(job.available, When::At(_)) {
                job.available = When::Now
            }
        }),
        "A due time is raised to now.",
        &["enqueue::past_and_far_due_times"],
    ),
    Fault::new(
        "enqueue::callers_clock",
        &CallersClock,
        "Due times are computed by the caller, from its own clock.",
        &["enqueue::due_times_are_the_stores"],
    ),
    Fault::new(
        "enqueue::new_ones_first",
        &NewOnesFirst,
        "What is stored is answered before what was there.",
        &["enqueue::answers_in_order"],
    )
    .everywhere(),
    Fault::new(
        "enqueue::reads_what_is_there",
        &ReadsWhatIsThere,
        "A job that is stored is read as a whole for the comparison, and one of a newer version cannot be.",
        &["enqueue::an_id_in_a_foreign_state"],
    )
    .everywhere(),
    Fault::new(
        "enqueue::upserts",
        &Upserts,
        "`ON CONFLICT DO UPDATE`: a repeated job is stored anew.",
        &["enqueue::a_repeat_is_existing", "enqueue::race_of_one_job"],
    ),
    Fault::new(
        "enqueue::any_content_is_a_repeat",
        &AnyContentIsARepeat,
        "`ON CONFLICT DO NOTHING`: an id that is stored is existing, whatever its content.",
        &["enqueue::other_content_is_refused", "enqueue::one_bad_item_stores_nothing", "enqueue::race_of_two_contents"],
    )
    .everywhere(),
    Fault::new(
        "enqueue::key_before_id",
        &KeyBeforeId,
        "The unique key is judged first: a repeated job is a duplicate, of itself.",
        &["enqueue::the_id_comes_before_the_key"],
    )
    .everywhere(),
    Fault::new(
        "enqueue::remembers_purged_ids",
        &RemembersPurgedIds,
        "An id that was ever stored stays known after its row is gone.",
        &["enqueue::a_purged_id_is_new_again"],
    ),
    Fault::new(
        "enqueue::one_by_one",
        &OneByOne,
        "A batch is a loop of inserts without a transaction.",
        &["enqueue::one_bad_item_stores_nothing", "enqueue::thousands_are_refused_as_one", "enqueue::dropped_futures"],
    ),
    Fault::new(
        "enqueue::in_chunks",
        &InChunks,
        "Long batches are stored in chunks, each in a transaction of its own.",
        &["enqueue::thousands_are_refused_as_one"],
    )
    .everywhere(),
    Fault::new(
        "enqueue::names_no_item",
        &NamesNoItem,
        "The error of a refused batch does not say which item it is about.",
        &["enqueue::one_bad_item_stores_nothing", "enqueue::other_content_is_refused"],
    ),
    Fault::new("enqueue::no_cap", &NoCap, "Payloads over the cap are stored.", &["enqueue::payload_cap"]),
    Fault::new(
        "enqueue::at_most_thousand",
        &AtMostThousand,
        "A batch with more values than the driver can bind fails.",
        &["enqueue::thousands_in_one_call"],
    )
    .everywhere(),
    Fault::new(
        "enqueue::insert_after_select",
        &InsertAfterSelect,
        "SELECT the ids, then INSERT the new ones: who loses that race gets a violated primary key.",
        &["enqueue::race_of_one_job", "enqueue::concurrent_batches"],
    ),
    Fault::new(
        "enqueue::batches_deadlock",
        &BatchesDeadlock,
        "Rows are locked in the order of the call: overlapping batches deadlock.",
        &["enqueue::concurrent_batches"],
    ),
];

/// Changes what is stored; told whether it is one of many.
pub(super) struct Stores(pub(super) fn(&mut NewJob, bool));

#[async_trait]
impl Wrong for Stores {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let mut stored = jobs.to_vec();
        for job in &mut stored {
            (self.0)(job, jobs.len() > 1);
        }
        real.handle.enqueue(&stored).await
    }
}

struct CallersClock;

#[async_trait]
impl Wrong for CallersClock {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let mut stored = jobs.to_vec();
        let now = real.memory().now().saturating_add_millis(-real.advanced());
        for job in &mut stored {
            job.available = When::At(job.available.resolve(now));
        }
        real.handle.enqueue(&stored).await
    }
}

struct NewOnesFirst;

#[async_trait]
impl Wrong for NewOnesFirst {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let mut answers = real.handle.enqueue(jobs).await?;
        answers.sort_by_key(|answer| !matches!(answer, Enqueued::New(_)));
        Ok(answers)
    }
}

struct Upserts;

#[async_trait]
impl Wrong for Upserts {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        real.memory().edit(|rows| {
            for job in jobs {
                rows.remove(&job.id);
            }
        });
        real.handle.enqueue(jobs).await
    }
}

struct AnyContentIsARepeat;

#[async_trait]
impl Wrong for AnyContentIsARepeat {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let (mut new, mut there) = (Vec::new(), Vec::new());
        for job in jobs {
            match real.row(job.id).await {
                Some(_) => there.push(job.id),
                None => new.push(job.clone()),
            }
        }
        let mut answers = match real.handle.enqueue(&new).await {
            // Stored by another meanwhile.
            Err(error) if error.kind() == ErrorKind::IdReused && new.len() == 1 => vec![Enqueued::Existing(new[0].id)],
            answers => answers?,
        }
        .into_iter();
        let answer = |job: &NewJob| match there.contains(&job.id) {
            true => Some(Enqueued::Existing(job.id)),
            false => answers.next(),
        };
        Ok(jobs.iter().filter_map(answer).collect())
    }
}

struct KeyBeforeId;

#[async_trait]
impl Wrong for KeyBeforeId {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let mut answers = real.handle.enqueue(jobs).await?;
        for (job, answer) in jobs.iter().zip(&mut answers) {
            let keyed = job.unique_key.is_some();
            if keyed && *answer == Enqueued::Existing(job.id) {
                let there = real.row(job.id).await;
                if there.is_some_and(|row| row.state.is_active()) {
                    *answer = Enqueued::Duplicate { existing: job.id };
                }
            }
        }
        Ok(answers)
    }
}

struct RemembersPurgedIds;

#[async_trait]
impl Wrong for RemembersPurgedIds {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let known = |id| real.shared.kept.jobs().contains_key(&id);
        let new: Vec<_> = jobs.iter().filter(|job| !known(job.id)).cloned().collect();
        if new.len() < jobs.len() && real.row(jobs[0].id).await.is_none() {
            return Ok(jobs.iter().map(|job| Enqueued::Existing(job.id)).collect());
        }
        let answers = real.handle.enqueue(jobs).await?;
        real.memory()
            .edit(|rows| real.shared.kept.keep(new.iter().filter_map(|job| rows.get(&job.id)).map(|row| &row.job)));
        Ok(answers)
    }
}

struct OneByOne;

#[async_trait]
impl Wrong for OneByOne {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let mut answers = Vec::with_capacity(jobs.len());
        for (index, job) in jobs.iter().enumerate() {
            let answer = real.handle.enqueue(std::slice::from_ref(job)).await;
            answers.extend(answer.map_err(|error| error.at_index(index))?);
            if jobs.len() < 100 {
                tokio::task::yield_now().await;
            }
        }
        Ok(answers)
    }
}

struct InChunks;

#[async_trait]
impl Wrong for InChunks {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let mut answers = Vec::with_capacity(jobs.len());
        for (chunk, jobs) in jobs.chunks(1_000).enumerate() {
            answers.extend(real.handle.enqueue(jobs).await.map_err(|error| match error.index() {
                Some(index) => error.at_index(chunk * 1_000 + index),
                None => error,
            })?);
        }
        Ok(answers)
    }
}

struct NamesNoItem;

#[async_trait]
impl Wrong for NamesNoItem {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let anonymous = |error: Error| Error::new(error.kind(), error.certainty(), error.to_string());
        real.handle.enqueue(jobs).await.map_err(anonymous)
    }
}

struct NoCap;

#[async_trait]
impl Wrong for NoCap {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        match real.handle.enqueue(jobs).await {
            Err(error) if error.kind() == ErrorKind::TooLarge => {
                let now = real.memory().now();
                let stored = jobs.iter().map(|job| (job.id, job.clone().into_job(now).into()));
                real.memory().edit(|rows| rows.extend(stored));
                Ok(jobs.iter().map(|job| Enqueued::New(job.id)).collect())
            }
            answer => answer,
        }
    }
}

struct AtMostThousand;

#[async_trait]
impl Wrong for AtMostThousand {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        match jobs.len() {
            0..=2_000 => real.handle.enqueue(jobs).await,
            _ => Err(Error::not_applied(ErrorKind::Permanent, "too many SQL variables")),
        }
    }
}

struct InsertAfterSelect;

#[async_trait]
impl Wrong for InsertAfterSelect {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let mut new = Vec::new();
        for job in jobs {
            if real.row(job.id).await.is_none() {
                new.push(job.id);
            }
        }
        gap().await;
        let answers = real.handle.enqueue(jobs).await?;
        match answers.iter().find(|answer| matches!(answer, Enqueued::Existing(id) if new.contains(id))) {
            Some(_) => Err(Error::new(ErrorKind::Permanent, Certainty::NotApplied, "duplicate key value")),
            None => Ok(answers),
        }
    }
}

struct BatchesDeadlock;

#[async_trait]
impl Wrong for BatchesDeadlock {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        if jobs.len() == 1 {
            return real.handle.enqueue(jobs).await;
        }
        let others = real.shared.busy.fetch_add(1, Ordering::SeqCst);
        gap().await;
        real.shared.busy.fetch_sub(1, Ordering::SeqCst);
        match others {
            0 => real.handle.enqueue(jobs).await,
            _ => Err(Error::not_applied(ErrorKind::Permanent, "deadlock found when trying to get lock")),
        }
    }
}

struct ReadsWhatIsThere;

#[async_trait]
impl Wrong for ReadsWhatIsThere {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        for job in jobs {
            real.handle.get(job.id).await?;
        }
        real.handle.enqueue(jobs).await
    }
}
