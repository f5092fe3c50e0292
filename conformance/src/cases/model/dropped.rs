//! What becomes of a call that was dropped: the store says so, to another handle.

use queue_core::*;

use super::History;
use super::operation::Dropped;
use super::operation::Operation;
use super::operation::transition;
use super::side::Looks;
use super::side::look;
use crate::case::Failed;
use crate::case::Outcome;
use crate::context::*;

/// So often a look that is not one reading of the store is repeated: a call that was dropped may still be under way.
const LOOKS: usize = 20;

const SNOOZE: usize = 4;
const CANCEL: usize = 7;

impl History {
    /// Learns what a call did that was dropped on the store: the reference does the same, whole, and then what it did and the
    /// store did not is taken back. Afterwards the call can do no more than it has done.
    pub(super) async fn learn(
        &mut self,
        context: &Context,
        other: &Handle,
        operation: &Operation,
        dropped: &Dropped,
    ) -> Outcome {
        let rows = self.model.edit(|rows| rows.clone());
        let before = look(&self.sides[1].handle, &self.plot, context.capabilities.durable_steps).await?;
        self.sides[1].perform(&self.plot, operation).await?;
        let after = look(&self.sides[1].handle, &self.plot, context.capabilities.durable_steps).await?;
        self.check_whole(context, other, operation, [&before, &after]).await?;
        match operation {
            Operation::Claim { .. } => self.take_from_the_claim(context, other, &rows).await,
            Operation::Move { job, age, .. }
            | Operation::Wait { job, age, .. }
            | Operation::HandOver { job, age, .. } => {
                let seen = self.sides.each_ref().map(|side| match operation {
                    Operation::Move { .. } => side.seen_of(*job, *age),
                    _ => side.running(*job, *age),
                });
                let [Some((job, seen)), Some((_, of_model))] = seen else { return Ok(()) };
                // A wait that is over at once leaves its job as it was: both would win.
                let [was, is] = [&before, &after].map(|looks| looks.get(&seen.id).map(|look| &look.job.execution));
                let is_over = was == is && matches!(operation, Operation::Wait { .. });
                match dropped.again || is_over || !seen.state.is_active() {
                    true => self.again(other, &Operation::Repeat { job }).await,
                    false => self.compete(context, other, [&seen, &of_model], rows).await,
                }
            }
            Operation::Batch { job, jobs, .. } => {
                for next in 0..(*jobs).min(self.plot.new.len()) {
                    self.again(other, &Operation::Repeat { job: job + next }).await?;
                }
                Ok(())
            }
            operation => self.again(other, operation).await,
        }
    }

    async fn again(&mut self, other: &Handle, operation: &Operation) -> Outcome {
        self.sides[0].perform_on(other, &self.plot, operation).await?;
        Ok(())
    }

    /// Every row must be as it was or as it is to be, and all of them alike if the operation is one write.
    async fn check_whole(
        &self,
        context: &Context,
        other: &Handle,
        operation: &Operation,
        [before, after]: [&Looks; 2],
    ) -> Outcome {
        let mut wrong = String::new();
        for _ in 0..LOOKS {
            let found = look(other, &self.plot, context.capabilities.durable_steps).await?;
            wrong.clear();
            let (mut done, mut undone) = (0, 0);
            for job in &self.plot.new {
                let text = |looks: &Looks| looks.get(&job.id).map(|look| look.text.clone());
                let (found, before, after) = (text(&found), text(before), text(after));
                match (found == before, found == after) {
                    (true, true) => {}
                    (true, false) => undone += 1,
                    (false, true) => done += 1,
                    (false, false) => {
                        wrong = format!(
                            "the job is neither as it was nor as it is to be\n  before: {before:?}\n  after: {after:?}\n  observed: {found:?}"
                        );
                    }
                }
            }
            if done > 0 && undone > 0 && operation.is_one_write(&context.capabilities) {
                wrong = format!("one write has changed {done} jobs, and {undone} others not");
            }
            if wrong.is_empty() {
                return Ok(());
            }
            tokio::task::yield_now().await;
        }
        Err(Failed::new(wrong))
    }

    /// Takes everything that is due away from a claim: what it has not got by now it does not get any more.
    async fn take_from_the_claim(&mut self, context: &Context, other: &Handle, rows: &Rows) -> Outcome {
        self.late.workers.extend(self.plot.stand_in.clone());
        let now = self.model.now();
        for (id, row) in rows {
            let Some(position) = self.plot.position(*id) else { continue };
            if row.job.state() != JobState::Waiting || row.job.available_at > now {
                continue;
            }
            let Some(seen) = self.sides[0].seen[position].last().cloned() else { continue };
            if self.wins(context, other, &seen, SNOOZE).await? {
                self.model.edit(|rows| rows.insert(*id, row.clone()));
                Transitioner::new(&self.model).apply(&row.job.execution, &transition(SNOOZE)).await?;
            }
        }
        Ok(())
    }

    /// Cancels the job on what the dropped call was decided on: either of the two loses.
    async fn compete(
        &mut self,
        context: &Context,
        other: &Handle,
        [seen, of_model]: [&Execution; 2],
        rows: Rows,
    ) -> Outcome {
        if self.wins(context, other, seen, CANCEL).await? {
            self.model.edit(|now| *now = rows);
            Transitioner::new(&self.model).apply(of_model, &transition(CANCEL)).await?;
        }
        Ok(())
    }

    /// Whether a move through another handle is made before the call that was dropped.
    async fn wins(&self, context: &Context, other: &Handle, seen: &Execution, number: usize) -> Result<bool, Failed> {
        let mut decision = Decision::new(seen, &transition(number))?;
        loop {
            match Transitioner::new(other).submit(&mut decision).await {
                Ok(_) => return Ok(true),
                Err(TransitionError::Conflict(_) | TransitionError::Missing { .. }) => return Ok(false),
                Err(TransitionError::Backend(error)) if error.kind() == ErrorKind::Transient => {
                    context.note(format_args!("the row is locked still"));
                    tokio::task::yield_now().await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}
