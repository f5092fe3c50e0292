//! Durable steps and waits. There is one writer at a time: whatever a call reads in its transaction stays so until its end.

use async_trait::async_trait;
use queue_core::Certainty::NotApplied;
use queue_core::Certainty::Unknown;
use queue_core::*;
use sqlx::SqliteConnection;
use sqlx::query;

use crate::backend::SqliteBackend;
use crate::error::failed;
use crate::handle::Handle;
use crate::row;

impl Handle {
    /// The payload of an event that is kept.
    async fn event(&self, connection: &mut SqliteConnection, key: &Name) -> Result<Option<Json>> {
        let rows = query(self.sql.event.clone()).bind(self.now()).bind(key.as_str()).fetch_all(connection).await;
        let rows = rows.map_err(|error| failed("wait", NotApplied, error))?;
        rows.first().map(|row| row::payload(key, row)).transpose()
    }

    async fn step(&self, connection: &mut SqliteConnection, id: JobId, name: &Name) -> Result<Option<Step>> {
        let step = query(self.sql.step.clone()).bind(id.as_uuid()).bind(name.as_str());
        let rows = step.fetch_all(connection).await.map_err(|error| failed("step", NotApplied, error))?;
        rows.first().map(|row| row::step(id, row)).transpose()
    }

    /// A waiting step gets the time at which its job is available as its deadline.
    async fn put_step(&self, connection: &mut SqliteConnection, id: JobId, step: StepColumns<'_>) -> Result<Step> {
        let put = query(self.sql.put_step.clone())
            .bind(id.as_uuid())
            .bind(step.name.as_str())
            .bind(i64::try_from(step.fence).unwrap_or(i64::MAX))
            .bind(step.state)
            .bind(step.event.map(Name::as_str))
            .bind(step.revision.map(|revision| revision.as_uuid()))
            .bind(step.value.map(Json::as_str));
        let rows = put.fetch_all(connection).await.map_err(|error| failed("step", NotApplied, error))?;
        let written = rows.first().map(|row| row::step(id, row)).transpose()?;
        written.ok_or_else(|| Error::not_applied(ErrorKind::Permanent, format!("step {} was not written", step.name)))
    }

    /// Ends the suspension of these jobs.
    async fn wake(&self, connection: &mut SqliteConnection, jobs: impl IntoIterator<Item = JobId>) -> Result<u64> {
        let failed = |error| failed("wake", NotApplied, error);
        let wake = query(self.sql.wake.clone())
            .bind(self.now())
            .bind(Revision::random().as_uuid())
            .bind(row::ids(jobs).map_err(failed)?);
        Ok(wake.execute(connection).await.map_err(failed)?.rows_affected())
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl DurableSteps for SqliteBackend {
    async fn steps(&self, id: JobId) -> Result<Vec<Step>> {
        let mut connection = self.0.reader("steps").await?;
        let rows = query(self.0.sql.steps.clone()).bind(id.as_uuid()).fetch_all(&mut *connection).await;
        let rows = rows.map_err(|error| failed("steps", NotApplied, error))?;
        rows.iter().map(|row| row::step(id, row)).collect()
    }

    async fn write_step(&self, write: &StepWrite) -> Result<Stepped> {
        write.check_size(&self.capabilities())?;
        let handle = &*self.0;
        let mut transaction = handle.begin("step").await?;
        let update = handle.update_one(&mut transaction, &write.check()).await?;
        let Update::Applied(execution) = update else { return Ok(Stepped::refused(update)) };
        let event = match &write.action {
            StepAction::Wait(NewWait { event: Some(key), .. }) => handle.event(&mut transaction, key).await?,
            _ => None,
        };
        let there = handle.step(&mut transaction, write.id, &write.name).await?;
        let stepped = match write.action.plan(there.as_ref().map(|step| &step.state), event.as_ref()) {
            StepPlan::Keep => return Ok(Stepped { update: Update::Applied(execution), step: there }),
            StepPlan::Write(state) => {
                let step = StepColumns::of(write, &execution, &state);
                let step = handle.put_step(&mut transaction, write.id, step).await?;
                Stepped { update: Update::Applied(execution), step: Some(step) }
            }
            StepPlan::Suspend(patch) => {
                let suspend = UpdateRequest { patch, ..write.check() };
                let update = handle.update_one(&mut transaction, &suspend).await?;
                let Update::Applied(execution) = update else { return Ok(Stepped::refused(update)) };
                let step = StepColumns::waiting(write, &execution);
                let step = handle.put_step(&mut transaction, write.id, step).await?;
                Stepped { update: Update::Applied(execution), step: Some(step) }
            }
        };
        transaction.commit("step").await?;
        Ok(stepped)
    }

    async fn hand_over(&self, update: &UpdateRequest, successor: &NewJob) -> Result<(Update, Option<Enqueued>)> {
        let handle = &*self.0;
        update.patch.check(&self.capabilities())?;
        check_new_jobs(std::slice::from_ref(successor), &self.capabilities())?;
        let mut transaction = handle.begin("hand over").await?;
        let answer = handle.update_one(&mut transaction, update).await?;
        if !matches!(answer, Update::Applied(_)) {
            return Ok((answer, None));
        }
        let enqueued = handle.enqueue(&mut transaction, std::slice::from_ref(successor)).await?.first().copied();
        if let Some(Enqueued::Duplicate { existing }) = enqueued {
            return Err(key_taken(successor, existing));
        }
        transaction.commit("hand over").await?;
        handle.signal.notify();
        Ok((answer, enqueued))
    }

    async fn emit(&self, event: &NewEvent) -> Result<Emitted> {
        event.check(&self.capabilities())?;
        let handle = &*self.0;
        let failed = |error| failed("emit", NotApplied, error);
        let mut transaction = handle.begin("emit").await?;
        let put = query(handle.sql.put_event.clone())
            .bind(handle.now())
            .bind(event.key.as_str())
            .bind(event.payload.as_str())
            .bind(event.keep.as_millis());
        if put.execute(&mut *transaction).await.map_err(failed)?.rows_affected() == 0 {
            let kept = query(handle.sql.kept_event.clone()).bind(event.key.as_str());
            let kept = kept.fetch_one(&mut *transaction).await.map_err(failed)?;
            return Ok(Emitted::Kept(row::payload(&event.key, &kept)?));
        }
        let ended = query(handle.sql.end_waits.clone())
            .bind(event.key.as_str())
            .bind(event.payload.as_str())
            .fetch_all(&mut *transaction)
            .await
            .map_err(failed)?;
        let woken = handle.wake(&mut transaction, ended.iter().map(row::step_of)).await?;
        transaction.commit("emit").await?;
        if woken > 0 {
            handle.signal.notify();
        }
        Ok(Emitted::New { woken })
    }

    async fn time_out_waits(&self, limit: Limit) -> Result<Vec<JobId>> {
        let handle = &*self.0;
        let failed = |error| failed("time out", NotApplied, error);
        // Usually none is, and so nobody is to be waited for.
        let overdue = query(handle.sql.overdue.clone()).bind(handle.now()).bind(1);
        if overdue.fetch_all(&mut *handle.reader("time out").await?).await.map_err(failed)?.is_empty() {
            return Ok(Vec::new());
        }
        let mut transaction = handle.begin("time out").await?;
        let overdue = query(handle.sql.overdue.clone()).bind(handle.now()).bind(limit.get());
        let overdue: Vec<_> = overdue.fetch_all(&mut *transaction).await.map_err(failed)?.iter().map(row::id).collect();
        let ids = row::ids(overdue.iter().copied()).map_err(failed)?;
        query(handle.sql.time_out.clone()).bind(ids).execute(&mut *transaction).await.map_err(failed)?;
        handle.wake(&mut transaction, overdue.iter().copied()).await?;
        transaction.commit("time out").await?;
        handle.signal.notify();
        Ok(overdue)
    }

    async fn purge_events(&self, limit: Limit) -> Result<u64> {
        let mut connection = self.0.writer("purge", None).await?;
        let purge = query(self.0.sql.purge_events.clone()).bind(self.0.now()).bind(limit.get());
        let done = purge.execute(&mut *connection).await.map_err(|error| failed("purge", Unknown, error))?;
        Ok(done.rows_affected())
    }
}
