//! Durable steps and waits in memory.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use async_trait::async_trait;

use super::MemoryBackend;
use super::MemoryRow;
use super::enqueue_row;
use super::refuse_reused;
use super::update_row;
use crate::*;

/// An event that is kept.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    payload: Json,
    until: Timestamp,
}

impl MemoryBackend {
    fn lock_events(&self) -> MutexGuard<'_, BTreeMap<Name, Kept>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The wait that the row is suspended with.
fn current_wait(row: &MemoryRow) -> Option<(Name, Wait)> {
    let is_suspended = row.is(JobState::Suspended);
    row.steps.values().filter(|_| is_suspended).find_map(|step| match &step.state {
        StepState::Waiting(wait) if wait.revision == row.job.execution.revision => {
            Some((step.name.clone(), wait.clone()))
        }
        _ => None,
    })
}

/// Ends the row's suspension, and the wait that it is suspended with.
fn wake(row: &mut MemoryRow, ended: StepState, now: Timestamp) {
    let wait = current_wait(row);
    if let Ok(patch) = Transition::Wake.plan(&row.job.execution) {
        patch.apply(&mut row.job, now);
        // Suspended by hand, it may have none: it goes on all the same.
        if let Some((name, _)) = wait
            && let Some(step) = row.steps.get_mut(&name)
        {
            step.state = ended;
        }
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl DurableSteps for MemoryBackend {
    async fn steps(&self, id: JobId) -> Result<Vec<Step>> {
        Ok(self.lock().get(&id).map(|row| row.steps.values().cloned().collect()).unwrap_or_default())
    }

    async fn write_step(&self, write: &StepWrite) -> Result<Stepped> {
        write.check_size(&self.capabilities())?;
        let events = self.lock_events();
        let mut rows = self.lock();
        let now = self.now();
        let execution = match update_row(&mut rows, &write.check(), now)? {
            Update::Applied(execution) => execution,
            refused => return Ok(Stepped::refused(refused)),
        };
        let Some(row) = rows.get_mut(&write.id) else { return Ok(Stepped::refused(Update::Missing)) };
        let event = match &write.action {
            StepAction::Wait(NewWait { event: Some(key), .. }) => events.get(key).filter(|kept| kept.until > now),
            _ => None,
        };
        let there = row.steps.get(&write.name).map(|step| &step.state);
        let (state, update) = match write.action.plan(there, event.map(|kept| &kept.payload)) {
            StepPlan::Keep => (None, Update::Applied(execution)),
            StepPlan::Write(state) => (Some(state), Update::Applied(execution)),
            StepPlan::Suspend(patch) => {
                patch.apply(&mut row.job, now);
                let (execution, until) = (row.job.execution.clone(), row.job.available_at);
                let event = match &write.action {
                    StepAction::Wait(wait) => wait.event.clone(),
                    StepAction::Begin | StepAction::Finish(_) => None,
                };
                let wait = Wait { event, until, revision: execution.revision };
                (Some(StepState::Waiting(wait)), Update::Applied(execution))
            }
        };
        if let Some(state) = state {
            let step = Step { name: write.name.clone(), fence: row.job.execution.fence, state };
            row.steps.insert(write.name.clone(), step);
        }
        Ok(Stepped { update, step: row.steps.get(&write.name).cloned() })
    }

    async fn hand_over(&self, update: &UpdateRequest, successor: &NewJob) -> Result<(Update, Option<Enqueued>)> {
        let capabilities = self.capabilities();
        check_updates(std::slice::from_ref(update), &capabilities)?;
        check_new_jobs(std::slice::from_ref(successor), &capabilities)?;
        let mut rows = self.lock();
        let now = self.now();
        let before = rows.get(&update.id).cloned();
        let answer = update_row(&mut rows, update, now)?;
        if !matches!(answer, Update::Applied(_)) {
            return Ok((answer, None));
        }
        let enqueued = refuse_reused(&rows, successor).map(|()| enqueue_row(&mut rows, successor, now));
        let refused = match enqueued {
            Ok(Enqueued::Duplicate { existing }) => Err(key_taken(successor, existing)),
            enqueued => enqueued,
        };
        match refused {
            Err(error) => {
                rows.extend(before.map(|row| (update.id, row)));
                Err(error)
            }
            Ok(enqueued) => {
                drop(rows);
                self.signal.notify();
                Ok((answer, Some(enqueued)))
            }
        }
    }

    async fn emit(&self, event: &NewEvent) -> Result<Emitted> {
        event.check(&self.capabilities())?;
        let mut events = self.lock_events();
        let mut rows = self.lock();
        let now = self.now();
        let kept = Kept { payload: event.payload.clone(), until: now.saturating_add_millis(event.keep.as_millis()) };
        match events.entry(event.key.clone()) {
            Entry::Occupied(there) if there.get().until > now => return Ok(Emitted::Kept(there.get().payload.clone())),
            Entry::Occupied(mut old) => drop(old.insert(kept)),
            Entry::Vacant(free) => {
                free.insert(kept);
            }
        }
        let mut woken = 0;
        for row in rows.values_mut() {
            if current_wait(row).is_some_and(|(_, wait)| wait.event.as_ref() == Some(&event.key)) {
                wake(row, StepState::Done(event.payload.clone()), now);
                woken += 1;
            }
        }
        drop(rows);
        if woken > 0 {
            self.signal.notify();
        }
        Ok(Emitted::New { woken })
    }

    async fn time_out_waits(&self, limit: Limit) -> Result<Vec<JobId>> {
        let mut rows = self.lock();
        let now = self.now();
        let is_overdue =
            |row: &&mut MemoryRow| row.is(JobState::Suspended) && !row.locked && row.job.available_at <= now;
        let mut overdue: Vec<_> = rows.values_mut().filter(is_overdue).collect();
        overdue.sort_by_key(|row| (row.job.available_at, row.job.id()));
        overdue.truncate(limit.rows());
        let mut ids = Vec::with_capacity(overdue.len());
        for row in overdue {
            ids.push(row.job.id());
            wake(row, StepState::TimedOut, now);
        }
        drop(rows);
        if !ids.is_empty() {
            self.signal.notify();
        }
        Ok(ids)
    }

    async fn purge_events(&self, limit: Limit) -> Result<u64> {
        let mut events = self.lock_events();
        let now = self.now();
        let old: Vec<_> = events.iter().filter(|(_, kept)| kept.until <= now).map(|(key, _)| key.clone()).collect();
        let purged = old.len().min(limit.rows());
        for key in &old[..purged] {
            events.remove(key);
        }
        Ok(purged as u64)
    }
}
