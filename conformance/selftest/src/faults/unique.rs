//! Unique keys.

use async_trait::async_trait;
use queue_core::*;

use crate::Fault;
use crate::broken::Real;
use crate::broken::gap;
use crate::fault::Wrong;

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "unique::checked_before",
        &CheckedBefore,
        "The key is looked for, then the job is inserted: nothing enforces it.",
        &["unique::race_has_one_winner"],
    )
    .everywhere(),
    Fault::new(
        "unique::running_frees_it",
        &Keys {
            counts: |row| matches!(row.job.state(), JobState::Waiting | JobState::Suspended) || row.foreign_state,
            ..RIGHT
        },
        "Only waiting jobs count for the key.",
        &["unique::one_active_job_per_key"],
    ),
    Fault::new(
        "unique::suspended_frees_it",
        &Keys { counts: |row| (RIGHT.counts)(row) && row.job.state() != JobState::Suspended, ..RIGHT },
        "A suspended job does not count for the key.",
        &["unique::a_suspended_job_keeps_its_key", "waits::count_for_the_key"],
    ),
    Fault::new(
        "unique::unknown_state_frees_it",
        &Keys { counts: |row| row.job.state().is_active() && !row.foreign_state, ..RIGHT },
        "A job in a state of a newer version does not count for the key.",
        &["unique::an_unknown_state_keeps_its_key"],
    ),
    Fault::new(
        "unique::ended_jobs_keep_it",
        &Keys { counts: |_| true, ..RIGHT },
        "The key is unique for ever: a plain unique index.",
        &["unique::every_ending_frees_the_key"],
    ),
    Fault::new(
        "unique::failed_jobs_keep_it",
        &Keys { counts: |row| (RIGHT.counts)(row) || row.job.state() == JobState::Failed, ..RIGHT },
        "A failed job keeps its key.",
        &["unique::every_ending_frees_the_key"],
    ),
    Fault::new(
        "unique::over_all_queues",
        &Keys { same: |job, new| job.unique_key == new.unique_key && new.unique_key.is_some(), ..RIGHT },
        "The key is unique over all queues.",
        &["unique::keys_are_per_queue"],
    ),
    Fault::new(
        "unique::by_collation",
        &Keys {
            same: |job, new| {
                job.queue == new.queue && folded(&job.unique_key) == folded(&new.unique_key) && new.unique_key.is_some()
            },
            ..RIGHT
        },
        "Keys are compared by a collation that ignores case and trailing spaces.",
        &["unique::keys_are_compared_byte_for_byte"],
    ),
    Fault::new(
        "unique::no_key_is_a_key",
        &Keys { same: |job, new| job.queue == new.queue && job.unique_key == new.unique_key, ..RIGHT },
        "Jobs without a key collide with each other.",
        &["unique::no_key_never_collides"],
    ),
    Fault::new(
        "unique::empty_is_no_key",
        &Keys {
            same: |job, new| (RIGHT.same)(job, new) && folded(&new.unique_key).is_some_and(|key| !key.is_empty()),
            ..RIGHT
        },
        "The empty key counts as none.",
        &["unique::no_key_never_collides"],
    ),
    Fault::new(
        "unique::calls_are_judged_at_once",
        &Keys { sees_its_own: false, ..RIGHT },
        "All jobs of a call are judged by what was stored before it.",
        &["unique::within_one_call"],
    ),
    Fault::new(
        "unique::updates_are_not_judged",
        &UpdatesAreNotJudged,
        "An update into a taken key is written.",
        &["unique::rerun_into_a_taken_key", "unique::race_with_a_rerun"],
    ),
    Fault::new(
        "unique::taken_key_is_a_conflict",
        &TakenKeyIsAConflict,
        "An update into a taken key is reported as a conflict.",
        &["unique::rerun_into_a_taken_key"],
    )
    .everywhere(),
    Fault::new(
        "unique::collides_with_itself",
        &CollidesWithItself,
        "A job that is put back finds its own key taken.",
        &["unique::a_job_that_comes_back_keeps_its_key"],
    )
    .everywhere(),
    Fault::new(
        "unique::ending_forgets_it",
        &EndingForgetsIt,
        "An ending frees the key by setting it to null.",
        &["unique::rerun_takes_a_free_key"],
    ),
    Fault::new(
        "unique::holder_vanished",
        &HolderVanished,
        "Who finds the key taken, and its holder ended a moment later, gets an error.",
        &["unique::race_with_a_completion"],
    ),
];

fn folded(key: &Option<UniqueKey>) -> Option<String> {
    key.as_ref().map(|key| key.as_str().trim_end().to_lowercase())
}

/// How a key is judged in the reference.
struct Keys {
    counts: fn(&MemoryRow) -> bool,
    same: fn(&Job, &NewJob) -> bool,
    sees_its_own: bool,
}

/// As a right backend does; each fault changes one thing of it.
const RIGHT: Keys = Keys {
    counts: |row| row.foreign_state || row.job.state().is_active(),
    same: |job, new| job.queue == new.queue && job.unique_key == new.unique_key && new.unique_key.is_some(),
    sees_its_own: true,
};

#[async_trait]
impl Wrong for Keys {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        check_new_jobs(jobs, &real.handle.capabilities())?;
        let now = real.memory().now();
        let answers = real.memory().edit(|rows| {
            for (index, job) in jobs.iter().enumerate() {
                if rows.get(&job.id).is_some_and(|row| !job.repeats(&row.job)) {
                    return Err(id_reused(job.id).at_index(index));
                }
            }
            let before: Vec<_> = rows.keys().copied().collect();
            let mut answers = Vec::with_capacity(jobs.len());
            for job in jobs {
                let judged = |row: &&MemoryRow| self.sees_its_own || before.binary_search(&row.job.id()).is_ok();
                let keyed = job.unique_key.is_some() || (self.same)(&job.clone().into_job(now), job);
                let mut holders = rows.values().filter(|row| keyed && (self.counts)(row) && (self.same)(&row.job, job));
                answers.push(match (rows.contains_key(&job.id), holders.find(judged)) {
                    (true, _) => Enqueued::Existing(job.id),
                    (false, Some(holder)) => Enqueued::Duplicate { existing: holder.job.id() },
                    (false, None) => {
                        rows.insert(job.id, job.clone().into_job(now).into());
                        Enqueued::New(job.id)
                    }
                });
            }
            Ok(answers)
        })?;
        // Wakes those who wait.
        real.handle.update_many_if_current(&[]).await?;
        Ok(answers)
    }
}

struct CheckedBefore;

#[async_trait]
impl Wrong for CheckedBefore {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let [job] = jobs else { return real.handle.enqueue(jobs).await };
        let Some(key) = &job.unique_key else { return real.handle.enqueue(jobs).await };
        let mut filter = ListFilter::default();
        filter.queue = Some(job.queue.clone());
        let stored = real.handle.list(&filter, None, Limit::MAX).await?.items;
        if stored.iter().any(|other| other.unique_key.as_ref() == Some(key) || other.id() == job.id) {
            return real.handle.enqueue(jobs).await;
        }
        gap().await;
        // Without the index there is nothing to stop it: stored without the key, and the key not compared.
        match real.handle.enqueue(jobs).await?[..] {
            [Enqueued::Duplicate { .. }] => {
                real.handle.enqueue(&[NewJob { unique_key: None, ..job.clone() }]).await?;
                Ok(vec![Enqueued::New(job.id)])
            }
            [answer] => Ok(vec![answer]),
            _ => Ok(Vec::new()),
        }
    }
}

struct UpdatesAreNotJudged;

#[async_trait]
impl Wrong for UpdatesAreNotJudged {
    async fn answer(&self, real: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        match answer {
            Err(error) if error.kind() == ErrorKind::Invalid => {
                let (now, mut after) = (real.memory().now(), None);
                real.edit(asked.id, |row| {
                    asked.patch.apply(&mut row.job, now);
                    after = Some(row.job.execution.clone());
                });
                Ok(after.map_or(Update::Missing, Update::Applied))
            }
            answer => answer,
        }
    }
}

struct TakenKeyIsAConflict;

#[async_trait]
impl Wrong for TakenKeyIsAConflict {
    async fn answer(&self, real: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        match answer {
            Err(error) if error.kind() == ErrorKind::Invalid => {
                Ok(real.row(asked.id).await.map_or(Update::Missing, Update::Conflict))
            }
            answer => answer,
        }
    }
}

struct CollidesWithItself;

#[async_trait]
impl Wrong for CollidesWithItself {
    async fn ask(&self, real: &Real, update: &mut UpdateRequest) -> Result<()> {
        let job = real.handle.get(update.id).await.ok().flatten();
        let comes_back = |job: &Job| job.unique_key.is_some() && job.state().is_held();
        match update.patch.state == JobState::Waiting && job.as_ref().is_some_and(comes_back) {
            true => Err(Error::invalid("another active job has its unique key")),
            false => Ok(()),
        }
    }
}

struct EndingForgetsIt;

#[async_trait]
impl Wrong for EndingForgetsIt {
    async fn answer(&self, real: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        if let Ok(Update::Applied(row)) = &answer
            && row.state.is_final()
        {
            real.edit(asked.id, |row| row.job.unique_key = None);
        }
        answer
    }
}

struct HolderVanished;

#[async_trait]
impl Wrong for HolderVanished {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let answers = real.handle.enqueue(jobs).await?;
        gap().await;
        for answer in &answers {
            if let Enqueued::Duplicate { existing } = answer
                && real.row(*existing).await.is_none_or(|row| row.state.is_final())
            {
                return Err(Error::not_applied(ErrorKind::Permanent, "no row has this key"));
            }
        }
        Ok(answers)
    }
}
