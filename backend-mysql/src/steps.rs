//! Durable steps and waits.
//!
//! Whatever a call locks, it locks in one order: the row of the event, then jobs by their ids. Steps are read and written under
//! the lock of their job, and need none of their own. An event that nobody has emitted has a row as well, as soon as somebody
//! waits for it: so an event and a wait that come at once meet there, and the later of them sees the other.

use async_trait::async_trait;
use queue_core::*;
use sqlx::MySqlConnection;
use sqlx::Row;
use sqlx::mysql::MySqlRow;
use sqlx::query;

use crate::backend::MysqlBackend;
use crate::batch;
use crate::batch::EventRow;
use crate::batch::PatchRows;
use crate::batch::StepLockRow;
use crate::batch::StepRow;
use crate::handle::Handle;
use crate::handle::batch_of;
use crate::handle::write;
use crate::row;
use crate::transaction::Deadline;
use crate::transaction::End;
use crate::transaction::Failure;
use crate::transaction::Repeats;

/// Rows of one statement.
const ROWS: usize = 1000;

fn awaited(write: &StepWrite) -> Option<&Name> {
    match &write.action {
        StepAction::Begin | StepAction::Finish(_) => None,
        StepAction::Wait(wait) => wait.event.as_ref(),
    }
}

impl Handle {
    /// Locks the row of the event of this key, which is made if there is none.
    async fn hold_event(&self, connection: &mut MySqlConnection, key: &Name) -> Result<(), Failure> {
        let (key, offset) = (key.as_str().as_bytes(), self.offset());
        let hold = query(self.sql.hold_event.clone()).bind(key).bind(offset).bind(offset);
        hold.execute(connection).await?;
        Ok(())
    }

    async fn write_step(&self, connection: &mut MySqlConnection, write: &StepWrite) -> Result<End<Stepped>, Failure> {
        let awaited = awaited(write);
        if let Some(key) = awaited {
            self.hold_event(connection, key).await?;
        }
        // The row of an event stays that was made for it: several who wait for the end of an insert get into a deadlock when it is
        // undone.
        let unchanged = |stepped| match awaited {
            Some(_) => End::Commit(stepped),
            None => End::RollBack(stepped),
        };
        let refused = |update| Ok(unchanged(Stepped::refused(update)));
        let batch = batch::array([StepLockRow::new(write)])?;
        let lock = query(self.sql.lock_step.clone()).bind(self.offset()).bind(batch);
        let rows = lock.fetch_all(&mut *connection).await?;
        let Some(row) = rows.first() else { return refused(Update::Missing) };
        let mut execution = match row::execution(row) {
            Ok(execution) => execution,
            Err(unreadable) => return refused(Update::Unreadable(unreadable)),
        };
        if !write.current.matches(&execution, row::now(row)?) {
            return refused(Update::Conflict(execution));
        }
        let there = row::step_if_any(write.id, row)?;
        let event = awaited.map(|key| row::payload(key, row)).transpose()?.flatten();
        let state = match write.action.plan(there.as_ref().map(|step| &step.state), event.as_ref()) {
            StepPlan::Keep => {
                return Ok(unchanged(Stepped { update: Update::Applied(execution), step: there }));
            }
            StepPlan::Write(state) => {
                if self.is_cluster {
                    self.touch(connection, write.id).await?;
                }
                state
            }
            StepPlan::Suspend(patch) => {
                let mut patches = PatchRows::default();
                patches.add(&execution, &patch, row)?;
                let now = self.patch(connection, patches).await?;
                patch.apply_to_execution(&mut execution, now);
                let until = match patch.available {
                    Some(when) => when.resolve(now),
                    None => row::available_at(row).map_err(Error::from)?,
                };
                StepState::Waiting(Wait { event: awaited.cloned(), until, revision: execution.revision })
            }
        };
        let step = Step { name: write.name.clone(), fence: execution.fence, state };
        self.put_step(connection, write.id, &step).await?;
        Ok(End::Commit(Stepped { update: Update::Applied(execution), step: Some(step) }))
    }

    /// Writes the row of a job that is locked, and leaves it as it was: so a cluster refuses the transaction if another node has
    /// changed the job meanwhile. The lock is this node's own, and a step that is written only refers to its job.
    async fn touch(&self, connection: &mut MySqlConnection, id: JobId) -> Result<(), Failure> {
        for _ in 0..2 {
            write(connection, query(self.sql.touch.clone()).bind(id.as_uuid()), 1).await?;
        }
        Ok(())
    }

    /// Writes a step of a job that is locked, in the place of what is there of it.
    async fn put_step(&self, connection: &mut MySqlConnection, id: JobId, step: &Step) -> Result<(), Failure> {
        let (wait, value) = match &step.state {
            StepState::Begun | StepState::TimedOut => (None, None),
            StepState::Waiting(wait) => (Some(wait), None),
            StepState::Done(value) => (None, Some(value)),
        };
        let put = query(self.sql.put_step.clone())
            .bind(id.as_uuid())
            .bind(step.name.as_str().as_bytes())
            .bind(step.fence)
            .bind(step.state.as_str().as_bytes())
            .bind(wait.and_then(|wait| wait.event.as_ref()).map(|key| key.as_str().as_bytes()))
            .bind(wait.map(|wait| wait.until.unix_millis()))
            .bind(wait.map(|wait| wait.revision.as_uuid()))
            .bind(value.map(|value| value.as_str().as_bytes()));
        put.execute(connection).await?;
        Ok(())
    }

    async fn hand_over(
        &self,
        connection: &mut MySqlConnection,
        update: &UpdateRequest,
        successor: &NewJob,
    ) -> Result<End<(Update, Option<Enqueued>)>, Failure> {
        let (answers, _) = self.update(connection, std::slice::from_ref(update)).await?;
        let answer = answers.into_iter().next().unwrap_or(Update::Missing);
        if !matches!(answer, Update::Applied(_)) {
            return Ok(End::RollBack((answer, None)));
        }
        let outcomes = self.enqueue(connection, std::slice::from_ref(successor), Some(&self.sql.known)).await?;
        match outcomes.first().copied() {
            Some(Enqueued::Duplicate { existing }) => Err(key_taken(successor, existing).into()),
            outcome => Ok(End::Commit((answer, outcome))),
        }
    }

    async fn emit(&self, connection: &mut MySqlConnection, event: &NewEvent) -> Result<End<Emitted>, Failure> {
        let key = event.key.as_str().as_bytes();
        self.hold_event(connection, &event.key).await?;
        let kept = query(self.sql.event.clone()).bind(key).bind(self.offset()).fetch_all(&mut *connection).await?;
        if let Some(row) = kept.first()
            && let Some(payload) = row::payload(&event.key, row)?
        {
            return Ok(End::RollBack(Emitted::Kept(payload)));
        }
        let put = query(self.sql.put_event.clone())
            .bind(key)
            .bind(self.offset())
            .bind(event.keep.as_millis())
            .bind(event.payload.as_str().as_bytes());
        put.execute(&mut *connection).await?;
        let waits = query(self.sql.waits.clone()).bind(key).fetch_all(&mut *connection).await?;
        for waits in waits.chunks(ROWS) {
            let steps = waits.iter().map(|wait| Ok(StepRow::new(row::id(wait), wait.try_get("name")?)));
            let steps = batch::array(steps.collect::<sqlx::Result<Vec<_>>>()?)?;
            let end = query(self.sql.end_waits.clone()).bind(steps).bind(event.payload.as_str().as_bytes());
            write(connection, end, waits.len()).await?;
        }
        self.wake(connection, &waits).await?;
        Ok(End::Commit(Emitted::New { woken: waits.len() as u64 }))
    }

    async fn time_out_waits(&self, connection: &mut MySqlConnection, limit: Limit) -> Result<End<Vec<JobId>>, Failure> {
        let overdue = query(self.sql.overdue.clone()).bind(self.offset()).bind(limit.get());
        let overdue = overdue.fetch_all(&mut *connection).await?;
        if overdue.is_empty() {
            return Ok(End::RollBack(Vec::new()));
        }
        // A job that was suspended by hand has no wait.
        let time_out = query(self.sql.time_out.clone()).bind(batch_of(overdue.iter().map(row::id))?);
        time_out.execute(&mut *connection).await?;
        self.wake(connection, &overdue).await?;
        Ok(End::Commit(overdue.iter().map(row::id).collect()))
    }

    /// Ends the suspension of jobs that are locked, as [`Transition::Wake`] does: once their waits are found and ended, since it
    /// changes the revision that these are known by.
    async fn wake(&self, connection: &mut MySqlConnection, jobs: &[MySqlRow]) -> Result<(), Failure> {
        let revision = Revision::random();
        for jobs in jobs.chunks(ROWS) {
            let wake = query(self.sql.wake.clone())
                .bind(self.offset())
                .bind(batch_of(jobs.iter().map(row::id))?)
                .bind(revision.as_uuid());
            write(connection, wake, jobs.len()).await?;
        }
        Ok(())
    }

    /// Deletes the oldest events that are kept no longer and not locked, and as many rows that never became one.
    async fn purge_events(&self, connection: &mut MySqlConnection, limit: Limit) -> Result<End<u64>, Failure> {
        let mut old = Vec::new();
        let mut purged = 0;
        for is_event in [true, false] {
            let walk = query(self.sql.old_events.clone()).bind(is_event).bind(self.offset()).bind(limit.get());
            let found = walk.fetch_all(&mut *connection).await?;
            purged += if is_event { found.len() as u64 } else { 0 };
            old.extend(found);
        }
        if old.is_empty() {
            return Ok(End::RollBack(0));
        }
        let keys = old.iter().map(|row| Ok(EventRow::new(row.try_get("event_key")?)));
        let keys = batch::array(keys.collect::<sqlx::Result<Vec<_>>>()?)?;
        write(connection, query(self.sql.delete_events.clone()).bind(keys), old.len()).await?;
        Ok(End::Commit(purged))
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl DurableSteps for MysqlBackend {
    async fn steps(&self, id: JobId) -> Result<Vec<Step>> {
        let rows = self.0.read("steps", || query(self.0.sql.steps.clone()).bind(id.as_uuid())).await?;
        rows.iter().map(|row| row::step(id, row)).collect()
    }

    async fn write_step(&self, write: &StepWrite) -> Result<Stepped> {
        let handle = &*self.0;
        write.check_size(&self.capabilities())?;
        let mut repeats = Repeats::default();
        loop {
            let mut transaction = handle.begin("step", Deadline::NEVER).await?;
            let answer = handle.write_step(transaction.connection(), write).await;
            if let Some(stepped) = transaction.end("step", answer, &mut repeats).await? {
                return Ok(stepped);
            }
        }
    }

    async fn hand_over(&self, update: &UpdateRequest, successor: &NewJob) -> Result<(Update, Option<Enqueued>)> {
        let handle = &*self.0;
        update.patch.check(&self.capabilities())?;
        check_new_jobs(std::slice::from_ref(successor), &self.capabilities())?;
        let mut repeats = Repeats::default();
        loop {
            let mut transaction = handle.begin("hand over", Deadline::NEVER).await?;
            let answer = handle.hand_over(transaction.connection(), update, successor).await;
            if let Some(answer) = transaction.end("hand over", answer, &mut repeats).await? {
                if answer.1.is_some() {
                    handle.signal.notify();
                }
                return Ok(answer);
            }
        }
    }

    async fn emit(&self, event: &NewEvent) -> Result<Emitted> {
        let handle = &*self.0;
        event.check(&self.capabilities())?;
        let mut repeats = Repeats::default();
        loop {
            let mut transaction = handle.begin("emit", Deadline::NEVER).await?;
            let answer = handle.emit(transaction.connection(), event).await;
            if let Some(emitted) = transaction.end("emit", answer, &mut repeats).await? {
                if matches!(emitted, Emitted::New { woken: 1.. }) {
                    handle.signal.notify();
                }
                return Ok(emitted);
            }
        }
    }

    async fn time_out_waits(&self, limit: Limit) -> Result<Vec<JobId>> {
        let handle = &*self.0;
        let mut repeats = Repeats::default();
        loop {
            let mut transaction = handle.begin("time out", Deadline::NEVER).await?;
            let answer = handle.time_out_waits(transaction.connection(), limit).await;
            if let Some(timed_out) = transaction.end("time out", answer, &mut repeats).await? {
                if !timed_out.is_empty() {
                    handle.signal.notify();
                }
                return Ok(timed_out);
            }
        }
    }

    async fn purge_events(&self, limit: Limit) -> Result<u64> {
        let handle = &*self.0;
        let mut repeats = Repeats::default();
        loop {
            let mut transaction = handle.begin("purge", Deadline::NEVER).await?;
            let answer = handle.purge_events(transaction.connection(), limit).await;
            if let Some(purged) = transaction.end("purge", answer, &mut repeats).await? {
                return Ok(purged);
            }
        }
    }
}
