//! Durable steps and waits.
//!
//! A step, and a wait for the time alone, is one write of its job's row. What is about several rows is a transaction; one that
//! meets somebody else's is repeated.

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream;
use mongodb::bson::Bson;
use mongodb::bson::Document;
use queue_core::Certainty::NotApplied;
use queue_core::Certainty::Unknown;
use queue_core::*;

use crate::backend::MongoBackend;
use crate::error::Writes;
use crate::error::failed;
use crate::error::is_about_a_row;
use crate::error::item_errors;
use crate::handle::AT_ONCE;
use crate::handle::Handle;
use crate::handle::ROW_WAITS;
use crate::handle::broken;
use crate::handle::count;
use crate::handle::for_majority;
use crate::handle::present;
use crate::handle::to_the_end;
use crate::ops::Over;
use crate::ops::event_of;
use crate::ops::room;
use crate::row;
use crate::setup::STEPS;

/// How many waits one transaction times out.
const BATCH: usize = 1000;

impl Handle {
    async fn ready_for_steps(&self, call: &str) -> Result<()> {
        self.ready_since(STEPS, call).await
    }

    /// The step as it was written, or as it stays, and its job; `None` if the row did not match.
    fn stepped(write: &StepWrite, reply: &Document) -> Result<Option<Stepped>> {
        let Ok(row) = reply.get_document("value") else { return Ok(None) };
        let execution = row::execution(row).map_err(|row| broken(row, Unknown))?;
        let step = row::steps(write.id, row)?.pop();
        Ok(Some(Stepped { update: Update::Applied(execution), step }))
    }

    /// Why a row did not match.
    async fn refused(&self, write: &StepWrite, room: i64) -> Result<Stepped> {
        let rows = self.read("step", self.ops.measured(write.id), None).await?;
        let Some(row) = rows.first() else { return Ok(Stepped::refused(Update::Missing)) };
        match present(row) {
            Update::Conflict(execution) if Fingerprint::of(&execution) == write.current => Err(match row::size(row) {
                size if size > room => no_room(write, size),
                _ => Error::not_applied(ErrorKind::Transient, format!("step: job {} was being changed", write.id)),
            }),
            update => Ok(Stepped::refused(update)),
        }
    }

    /// Writes a step for which no event's row need be locked.
    async fn write_one(&self, write: &StepWrite, event: Option<&Json>) -> Result<Stepped> {
        let room = room(write, event, self.max_payload);
        let command = self.ops.write_step(write, event, room, self.offset());
        let reply = self.write("step", command, Writes::Row, self.patience(1), self.deadline(1)).await?;
        match Self::stepped(write, &reply)? {
            Some(stepped) => Ok(stepped),
            None => self.refused(write, room).await,
        }
    }

    /// Registers a wait for an event, under the lock of the event's row.
    async fn register(&self, write: &StepWrite, key: &Name) -> Result<Stepped> {
        let failed = |error| failed("wait", Writes::Nothing, error);
        let mut session = self.begin().await?;
        let locked = self.run(self.ops.lock_event(key, self.offset()), Some(&mut session)).await.map_err(failed)?;
        let event = kept(key, &locked)?;
        let room = room(write, event.as_ref(), self.max_payload);
        let command = self.ops.write_step(write, event.as_ref(), room, self.offset());
        let reply = self.run(command, Some(&mut session)).await.map_err(failed)?;
        if let Some(stepped) = Self::stepped(write, &reply)? {
            self.commit(session).await?;
            return Ok(stepped);
        }
        drop(session);
        let refused = self.refused(write, room).await?;
        self.settled("wait", for_majority(self.deadline(1))).await?;
        Ok(refused)
    }

    /// The payload of an event that is kept.
    async fn event(&self, key: &Name) -> Result<Option<Json>> {
        let rows = self.read("wait", self.ops.event(key, self.offset()), None).await?;
        Ok(rows.first().map(|row| row::payload(key, row)).transpose()?.flatten())
    }

    async fn hand_over(&self, update: &UpdateRequest, successor: &NewJob) -> Result<(Update, Option<Enqueued>)> {
        let mut session = self.begin().await?;
        let answer = self.update_one(update, Some(&mut session), self.deadline(1)).await?;
        let mut enqueued = None;
        if matches!(answer, Update::Applied(_)) {
            let successors = std::slice::from_ref(successor);
            enqueued = self.enqueue(Some(&mut session), successors).await?.first().copied();
            if let Some(Enqueued::Duplicate { existing }) = enqueued {
                return Err(key_taken(successor, existing));
            }
        }
        // Also if nothing was written: then a majority has what was read.
        self.commit(session).await?;
        Ok((answer, enqueued))
    }

    async fn emit(&self, event: &NewEvent) -> Result<Emitted> {
        let failed = |error| failed("emit", Writes::Nothing, error);
        let mut session = self.begin().await?;
        let put = self.run(self.ops.put_event(event, self.offset()), Some(&mut session)).await.map_err(failed)?;
        let emitted = match kept(&event.key, &put)? {
            Some(payload) => Emitted::Kept(payload),
            None => {
                let wake = self.ops.wake(event, Revision::random(), self.offset());
                let woken = self.run(wake, Some(&mut session)).await.map_err(failed)?;
                if let Some(error) = item_errors(&woken).pop() {
                    return Err(error.into_error("emit"));
                }
                Emitted::New { woken: count(&woken, "n") as u64 }
            }
        };
        self.commit(session).await?;
        Ok(emitted)
    }

    async fn overdue(&self, limit: usize) -> Result<Vec<JobId>> {
        let rows = self.read("time out", self.ops.overdue(self.offset(), limit), None).await?;
        Ok(rows.iter().map(row::id).collect())
    }

    /// Times all of these jobs out. An error of kind [`ErrorKind::Transient`] if one of them is not overdue any more, or locked.
    async fn time_out_all(&self, jobs: &[JobId]) -> Result<()> {
        let mut session = self.begin().await?;
        let command = self.ops.time_out_these(jobs, Revision::random(), self.offset());
        let reply = self.run(command, Some(&mut session)).await;
        let reply = reply.map_err(|error| failed("time out", Writes::Nothing, error))?;
        if let Some(error) = item_errors(&reply).pop() {
            return Err(error.into_error("time out"));
        }
        if count(&reply, "n") < jobs.len() {
            return Err(Error::not_applied(ErrorKind::Transient, "time out: others were faster"));
        }
        self.commit(session).await
    }

    /// Times out so many jobs, each by itself, past those that cannot be written.
    async fn time_out_singly(&self, missing: usize) -> Result<Vec<JobId>> {
        let revision = Revision::random();
        let one = async |id: JobId| {
            let command = self.ops.time_out_this(id, revision, self.offset());
            let deadline = self.deadline(1);
            self.write("time out", command, Writes::Row, ROW_WAITS[0], deadline).await.map(|reply| (id, reply))
        };
        let mut left = self.overdue(4 * missing + 16).await?.into_iter();
        let (mut ended, mut refusal) = (Vec::new(), None);
        while ended.len() < missing {
            let next: Vec<_> = left.by_ref().take(missing - ended.len()).collect();
            if next.is_empty() {
                break;
            }
            let answers: Vec<_> = stream::iter(next).map(one).buffered(AT_ONCE).collect().await;
            for answer in answers {
                match answer {
                    Ok((id, reply)) => ended.extend(reply.get_document("value").is_ok().then_some(id)),
                    // Locked, for now.
                    Err(error) if error.kind() == ErrorKind::Transient => {}
                    Err(error) if is_about_a_row(&error) => refusal = Some(error),
                    Err(error) => return Err(error.with_certainty(Unknown)),
                }
            }
        }
        match refusal {
            Some(refusal) if ended.is_empty() => Err(refusal),
            _ => Ok(ended),
        }
    }

    /// Times out so many jobs, beginning with these, and notes which.
    async fn time_out(&self, mut overdue: Vec<JobId>, limit: usize, ended: &mut Vec<JobId>) -> Result<()> {
        while !overdue.is_empty() {
            match self.time_out_all(&overdue).await {
                Ok(()) => {}
                Err(error) if is_about_a_row(&error) && error.certainty() == NotApplied => {
                    ended.extend(self.time_out_singly(limit - ended.len()).await?);
                    break;
                }
                Err(error) => return Err(error),
            }
            let were_all = overdue.len() < BATCH;
            ended.append(&mut overdue);
            if !were_all && ended.len() < limit {
                overdue = self.overdue(BATCH.min(limit - ended.len())).await?;
            }
        }
        Ok(())
    }

    async fn purge(&self, over: Over, limit: Limit) -> Result<u64> {
        let rows = self.read("purge", self.ops.over(over, self.offset(), limit), None).await?;
        let keys: Vec<Bson> = rows.into_iter().filter_map(|mut row| row.remove("_id")).collect();
        self.delete(&keys, |keys| self.ops.purge_events(over, keys, self.offset())).await
    }
}

/// The payload of the event in such a row, if it was kept.
fn kept(key: &Name, reply: &Document) -> Result<Option<Json>> {
    Ok(reply.get_document("value").ok().map(|row| row::payload(key, row)).transpose()?.flatten())
}

fn no_room(write: &StepWrite, size: i64) -> Error {
    let StepWrite { id, name, .. } = write;
    let message =
        format!("job {id} has {size} bytes with its steps, which leaves too little of 16 MB for the step {name}");
    Error::not_applied(ErrorKind::TooLarge, message)
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl DurableSteps for MongoBackend {
    async fn steps(&self, id: JobId) -> Result<Vec<Step>> {
        self.0.ready_for_steps("steps").await?;
        let rows = self.0.read("steps", self.0.ops.steps(id), None).await?;
        rows.first().map_or(Ok(Vec::new()), |row| row::steps(id, row))
    }

    async fn write_step(&self, write: &StepWrite) -> Result<Stepped> {
        write.check_size(&self.capabilities())?;
        self.0.ready_for_steps("step").await?;
        let Some(key) = event_of(&write.action) else {
            return self.0.repeated("step", || self.0.write_one(write, None)).await;
        };
        // An event that is kept stays what it is, so no lock is needed.
        if let Some(payload) = self.0.event(key).await? {
            return self.0.repeated("wait", || self.0.write_one(write, Some(&payload))).await;
        }
        let (handle, write, key) = (Arc::clone(&self.0), write.clone(), key.clone());
        to_the_end(async move {
            let _turn = handle.turn("wait", &key).await?;
            handle.repeated("wait", || handle.register(&write, &key)).await
        })
        .await
    }

    async fn hand_over(&self, update: &UpdateRequest, successor: &NewJob) -> Result<(Update, Option<Enqueued>)> {
        update.patch.check(&self.capabilities())?;
        check_new_jobs(std::slice::from_ref(successor), &self.capabilities())?;
        self.0.ready_for_steps("hand over").await?;
        let (handle, update, successor) = (Arc::clone(&self.0), update.clone(), successor.clone());
        to_the_end(async move {
            let answer = handle.repeated("hand over", || handle.hand_over(&update, &successor)).await?;
            if let (_, Some(_)) = answer {
                handle.signal.notify();
            }
            Ok(answer)
        })
        .await
    }

    async fn emit(&self, event: &NewEvent) -> Result<Emitted> {
        event.check(&self.capabilities())?;
        self.0.ready_for_steps("emit").await?;
        let (handle, event) = (Arc::clone(&self.0), event.clone());
        to_the_end(async move {
            let _turn = handle.turn("emit", &event.key).await?;
            let emitted = handle.repeated("emit", || handle.emit(&event)).await?;
            if let Emitted::New { .. } = emitted {
                handle.signal.notify();
            }
            Ok(emitted)
        })
        .await
    }

    async fn time_out_waits(&self, limit: Limit) -> Result<Vec<JobId>> {
        self.0.ready_for_steps("time out").await?;
        let overdue = self.0.overdue(BATCH.min(limit.rows())).await?;
        if overdue.is_empty() {
            return Ok(Vec::new());
        }
        let handle = Arc::clone(&self.0);
        to_the_end(async move {
            let mut ended = Vec::new();
            let answer = handle.time_out(overdue, limit.rows(), &mut ended).await;
            if ended.is_empty() {
                return answer.map(|()| ended);
            }
            handle.signal.notify();
            answer.map(|()| ended).map_err(|error| error.with_certainty(Unknown))
        })
        .await
    }

    async fn purge_events(&self, limit: Limit) -> Result<u64> {
        self.0.ready_for_steps("purge").await?;
        let purged = self.0.purge(Over::Events, limit).await?;
        // Nobody asked for those to be kept, so nobody counts them.
        self.0.purge(Over::Places, Limit::MAX).await.map_err(|error| error.with_certainty(Unknown))?;
        Ok(purged)
    }
}
