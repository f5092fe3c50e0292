//! Durable steps and waits. Everybody takes his locks in one order: an event, jobs by their ids, steps.

use async_trait::async_trait;
use queue_core::Certainty::NotApplied;
use queue_core::Certainty::Unknown;
use queue_core::*;
use sqlx::query;

use crate::backend::PostgresBackend;
use crate::backend::counted;
use crate::handle::Handle;
use crate::handle::Session;
use crate::row;

impl Handle {
    /// The payload of the event of this key, if it is kept. Nobody else emits it, or begins to wait for it, until the transaction ends.
    async fn lock_event(&self, session: &mut Session<'_>, key: &Name) -> Result<Option<Json>> {
        let lock = query(self.sql.lock_event.clone()).bind(self.now()).bind(key.as_str());
        let rows = session.fetch("event", lock).await?;
        Ok(rows.first().map(|row| row::payload(key, row)).transpose()?.flatten())
    }

    async fn step(&self, session: &mut Session<'_>, id: JobId, name: &Name) -> Result<Option<Step>> {
        let step = query(self.sql.step.clone()).bind(id.as_uuid()).bind(name.as_str());
        session.fetch("step", step).await?.first().map(|row| row::step(id, row)).transpose()
    }

    /// A waiting step gets the time at which its job is available as its deadline.
    async fn put_step(&self, session: &mut Session<'_>, id: JobId, step: StepColumns<'_>) -> Result<Step> {
        let put = query(self.sql.put_step.clone())
            .bind(id.as_uuid())
            .bind(step.name.as_str())
            .bind(i64::try_from(step.fence).unwrap_or(i64::MAX))
            .bind(step.state)
            .bind(step.event.map(Name::as_str))
            .bind(step.revision.map(|revision| revision.as_uuid()))
            .bind(step.value.map(Json::as_str));
        let rows = session.fetch("step", put).await?;
        let written = rows.first().map(|row| row::step(id, row)).transpose()?;
        written.ok_or_else(|| Error::not_applied(ErrorKind::Permanent, format!("step {} was not written", step.name)))
    }

    /// Writes what is planned where nothing is there yet, and where the step was begun; anything else stays. The job goes on.
    async fn write_step(&self, session: &mut Session<'_>, write: &StepWrite, state: &StepState) -> Result<Stepped> {
        let value = match state {
            StepState::Done(value) => Some(value.as_str()),
            StepState::Begun | StepState::Waiting(_) | StepState::TimedOut => None,
        };
        let statement = self
            .judging(&self.sql.write_step, session, &[&write.check()])
            .bind(write.name.as_str())
            .bind(state.as_str())
            .bind(value);
        let rows = session.fetch("step", statement).await?;
        let row = rows.first();
        let update = session.judged(row)?;
        let row = row.filter(|_| matches!(update, Update::Applied(_)));
        Ok(Stepped { step: row.map(|row| row::step(write.id, row)).transpose()?, update })
    }

    /// Writes a step as it is planned, its job too, in a transaction; answers also whether that is to be committed.
    async fn write_planned(&self, session: &mut Session<'_>, write: &StepWrite) -> Result<(Stepped, bool)> {
        let event = match &write.action {
            StepAction::Wait(NewWait { event: Some(key), .. }) => self.lock_event(session, key).await?,
            _ => None,
        };
        let check = self.judging(&self.sql.check, session, &[&write.check()]);
        let rows = session.fetch("step", check).await?;
        let update = session.judged(rows.first())?;
        let Update::Applied(execution) = update else { return Ok((Stepped::refused(update), false)) };
        // Not in the statement that locks the job: that one may have begun before somebody else wrote the step.
        let there = self.step(session, write.id, &write.name).await?;
        let (execution, step) = match write.action.plan(there.as_ref().map(|step| &step.state), event.as_ref()) {
            StepPlan::Keep => return Ok((Stepped { update: Update::Applied(execution), step: there }, false)),
            StepPlan::Write(state) => {
                let step = self.put_step(session, write.id, StepColumns::of(write, &execution, &state)).await?;
                (execution, step)
            }
            StepPlan::Suspend(patch) => {
                let update = self.update_one(session, &UpdateRequest { patch, ..write.check() }).await?;
                let Update::Applied(execution) = update else { return Ok((Stepped::refused(update), false)) };
                let step = self.put_step(session, write.id, StepColumns::waiting(write, &execution)).await?;
                (execution, step)
            }
        };
        Ok((Stepped { update: Update::Applied(execution), step: Some(step) }, true))
    }

    /// Keeps an event, in a transaction.
    async fn emit(&self, session: &mut Session<'_>, event: &NewEvent) -> Result<Emitted> {
        if let Some(kept) = self.lock_event(session, &event.key).await? {
            return Ok(Emitted::Kept(kept));
        }
        let wake = query(self.sql.wake.clone())
            .bind(self.now())
            .bind(event.key.as_str())
            .bind(event.payload.as_str())
            .bind(event.keep.as_millis())
            .bind(Revision::random().as_uuid())
            .bind(self.notifies);
        let rows = session.fetch("emit", wake).await?;
        Ok(Emitted::New { woken: counted("emit", &rows, "jobs", NotApplied)? })
    }

    /// Ends a job and stores its successor, in a transaction.
    async fn hand_over(
        &self,
        session: &mut Session<'_>,
        update: &UpdateRequest,
        successor: &NewJob,
    ) -> Result<(Update, Option<Enqueued>)> {
        let answer = self.update_one(session, update).await?;
        if !matches!(answer, Update::Applied(_)) {
            return Ok((answer, None));
        }
        match self.enqueue(session, std::slice::from_ref(successor)).await?.first().copied() {
            Some(Enqueued::Duplicate { existing }) => Err(key_taken(successor, existing)),
            enqueued => Ok((answer, enqueued)),
        }
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl DurableSteps for PostgresBackend {
    async fn steps(&self, id: JobId) -> Result<Vec<Step>> {
        let rows = self.0.read("steps", query(self.0.sql.steps.clone()).bind(id.as_uuid())).await?;
        rows.iter().map(|row| row::step(id, row)).collect()
    }

    async fn write_step(&self, write: &StepWrite) -> Result<Stepped> {
        let handle = &*self.0;
        write.check_size(&self.capabilities())?;
        match write.action.plan(None, None) {
            StepPlan::Write(state) => {
                let mut lent = handle.lend("step", None).await?;
                let stepped = handle.write_step(&mut lent.session(Unknown), write, &state).await;
                lent.end("step", Unknown, stepped).await
            }
            StepPlan::Keep | StepPlan::Suspend(_) => {
                let mut lent = handle.begin("step").await?;
                match handle.write_planned(&mut lent.session(Unknown), write).await {
                    Ok((stepped, true)) => lent.end("step", Unknown, Ok(stepped)).await,
                    Ok((stepped, false)) => lent.undo(Ok(stepped)).await,
                    Err(error) => lent.undo(Err(error)).await,
                }
            }
        }
    }

    async fn hand_over(&self, update: &UpdateRequest, successor: &NewJob) -> Result<(Update, Option<Enqueued>)> {
        let handle = &*self.0;
        update.patch.check(&self.capabilities())?;
        check_new_jobs(std::slice::from_ref(successor), &self.capabilities())?;
        let mut lent = handle.begin("hand over").await?;
        let answer = handle.hand_over(&mut lent.session(Unknown), update, successor).await;
        let answer = lent.end("hand over", Unknown, answer).await?;
        if answer.1.is_some() {
            handle.signal.notify();
        }
        Ok(answer)
    }

    async fn emit(&self, event: &NewEvent) -> Result<Emitted> {
        event.check(&self.capabilities())?;
        let handle = &*self.0;
        let mut lent = handle.begin("emit").await?;
        let emitted = handle.emit(&mut lent.session(Unknown), event).await;
        let emitted = lent.end("emit", Unknown, emitted).await?;
        if matches!(emitted, Emitted::New { woken: 1.. }) {
            handle.signal.notify();
        }
        Ok(emitted)
    }

    async fn time_out_waits(&self, limit: Limit) -> Result<Vec<JobId>> {
        let handle = &*self.0;
        let statement = query(handle.sql.time_out.clone())
            .bind(handle.now())
            .bind(i64::from(limit.get()))
            .bind(Revision::random().as_uuid())
            .bind(handle.notifies);
        let overdue: Vec<_> = handle.write("time out", None, statement).await?.iter().map(row::id).collect();
        if !overdue.is_empty() {
            handle.signal.notify();
        }
        Ok(overdue)
    }

    async fn purge_events(&self, limit: Limit) -> Result<u64> {
        let handle = &*self.0;
        let purge = query(handle.sql.purge_events.clone()).bind(handle.now()).bind(i64::from(limit.get()));
        counted("purge", &handle.write("purge", None, purge).await?, "events", Unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        text.try_into().expect("a name")
    }

    /// `write_step` in `sql` has the plan's rules in its own words: other rules need other words.
    #[test]
    fn the_plan_has_the_rules_of_the_statement() {
        let value = Json::from_text("1").expect("JSON");
        let until = Timestamp::from_unix_millis(0).expect("a time");
        let wait = Wait { event: Some(name("e")), until, revision: Revision::random() };
        for action in [StepAction::Begin, StepAction::Finish(value.clone())] {
            let written = action.plan(None, None);
            assert!(matches!(written, StepPlan::Write(_)), "{action:?}");
            assert_eq!(action.plan(Some(&StepState::Begun), None), written, "{action:?}");
            for ended in [StepState::Done(Json::null()), StepState::TimedOut, StepState::Waiting(wait.clone())] {
                assert_eq!(action.plan(Some(&ended), None), StepPlan::Keep, "{action:?} over {ended:?}");
            }
        }
    }
}
