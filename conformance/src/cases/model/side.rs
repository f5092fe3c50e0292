//! A store with what a history knows of it, and what it answers.

use std::collections::BTreeMap;
use std::collections::BTreeSet;

use queue_core::*;

use super::operation::Operation;
use super::operation::decide;
use super::operation::half_minutes;
use crate::case::Failed;
use crate::cases::steps::durable;
use crate::context::*;

/// What both sides of a history know.
pub(super) struct Plot {
    pub(super) queue: Name,
    pub(super) workers: [WorkerId; 2],
    /// Who claims in place of a worker: whoever is dropped while it claims.
    pub(super) stand_in: Option<WorkerId>,
    /// Every job that was made, whatever became of it.
    pub(super) new: Vec<NewJob>,
    /// Those of which a step may have been written.
    pub(super) with_steps: BTreeSet<JobId>,
}

impl Plot {
    pub(super) fn position(&self, id: JobId) -> Option<usize> {
        self.new.iter().position(|job| job.id == id)
    }

    fn has(&self, id: JobId) -> bool {
        self.position(id).is_some()
    }

    fn event(&self, event: u8) -> Name {
        name(&format!("{} {event}", self.queue))
    }
}

pub(super) struct Side {
    pub(super) handle: Handle,
    /// What was seen of each job, oldest first.
    pub(super) seen: Vec<Vec<Execution>>,
    /// What was submitted for each job last.
    sent: Vec<Option<Sent>>,
}

/// Something that may be submitted again.
#[derive(Clone)]
enum Sent {
    Move(Decision),
    Wait(Suspension),
    HandOver(HandOver),
}

impl Sent {
    /// Submits it; the answer, in words that both sides share. A call that was dropped may hold a lock for a while: as every
    /// decision, this one may be submitted again.
    async fn submit(&mut self, handle: &Handle) -> Result<String, Failed> {
        loop {
            let answer = match self {
                Self::Move(decision) => Transitioner::new(handle).submit(decision).await,
                Self::HandOver(hand_over) => hand_over.submit(durable(handle)?).await,
                Self::Wait(suspension) => match suspension.submit(durable(handle)?).await {
                    Ok(Suspended::Waits(settled)) => Ok(settled),
                    Ok(over) => return Ok(format!("{over:?}")),
                    Err(StepError::Transition(error)) => Err(error),
                    Err(error) => return Ok(error.to_string()),
                },
            };
            if !answer.as_ref().is_err_and(met_a_lock) {
                return Ok(in_words(answer));
            }
            tokio::task::yield_now().await;
        }
    }
}

fn met_a_lock(error: &TransitionError) -> bool {
    matches!(error, TransitionError::Backend(error) if error.kind() == ErrorKind::Transient)
}

/// A job as a look at a store finds it, and in words that both sides share.
pub(super) struct Look {
    pub(super) job: Job,
    pub(super) text: String,
}

pub(super) type Looks = BTreeMap<JobId, Look>;

pub(super) fn texts(looks: &Looks) -> Vec<&str> {
    looks.values().map(|look| look.text.as_str()).collect()
}

/// The jobs of the history as they are now, with their steps if those matter.
pub(super) async fn look(handle: &Handle, plot: &Plot, steps: bool) -> Result<Looks, Failed> {
    let mut looks = Looks::new();
    let mut filter = ListFilter::default();
    filter.queue = Some(plot.queue.clone());
    for job in handle.list(&filter, None, Limit::MAX).await?.items {
        let mut text = describe(&job);
        if steps && plot.with_steps.contains(&job.id()) {
            for Step { name, fence, state } in durable(handle)?.steps(job.id()).await? {
                text.push_str(&format!(", step {name} of fence {fence}: {}", of_step(&state)));
            }
        }
        looks.insert(job.id(), Look { job, text });
    }
    Ok(looks)
}

pub(super) fn pick<T>(jobs: &[T], number: usize) -> Option<usize> {
    number.checked_rem(jobs.len())
}

impl Side {
    pub(super) fn new(handle: Handle) -> Self {
        Self { handle, seen: Vec::new(), sent: Vec::new() }
    }

    /// A job that was seen, and how it was then.
    pub(super) fn seen_of(&self, job: usize, age: usize) -> Option<(usize, Execution)> {
        let job = pick(&self.seen, job)?;
        let seen = &self.seen[job];
        Some((job, seen.get(seen.len().checked_sub(1)?.saturating_sub(age))?.clone()))
    }

    /// The same of a job that runs, if there is one and it is to be as it was seen last.
    pub(super) fn running(&self, job: usize, age: usize) -> Option<(usize, Execution)> {
        self.among(|row| row.state == JobState::Running, job, age)
    }

    fn among(&self, is_one: fn(&Execution) -> bool, job: usize, age: usize) -> Option<(usize, Execution)> {
        let mut jobs: Vec<_> = (0..self.seen.len()).filter(|job| self.seen[*job].last().is_some_and(is_one)).collect();
        jobs.retain(|_| age == 0);
        self.seen_of(pick(&jobs, job).map_or(job, |job| jobs[job]), age)
    }

    /// Makes an operation through its handle; the answer, in words that both sides share.
    pub(super) async fn perform(&mut self, plot: &Plot, operation: &Operation) -> Result<String, Failed> {
        let handle = std::sync::Arc::clone(&self.handle);
        self.perform_on(&handle, plot, operation).await
    }

    /// The same through another handle.
    pub(super) async fn perform_on(
        &mut self,
        handle: &Handle,
        plot: &Plot,
        operation: &Operation,
    ) -> Result<String, Failed> {
        let Plot { queue, workers, stand_in, new, .. } = plot;
        self.seen.resize(new.len(), Vec::new());
        self.sent.resize(new.len(), None);
        match operation {
            Operation::Enqueue { jobs, .. } => {
                let jobs = &new[new.len().saturating_sub(*jobs)..];
                Ok(format!("{:?}", enqueue_in_the_end(handle, jobs).await?))
            }
            Operation::Again { job } => match pick(new, *job) {
                Some(job) => Ok(format!(
                    "{:?}",
                    handle.enqueue(std::slice::from_ref(&new[job])).await.map_err(|error| error.kind())
                )),
                None => Ok(String::new()),
            },
            Operation::Claim { worker, rows, starts } => {
                let worker = stand_in.as_ref().unwrap_or(&workers[*worker]).clone();
                let request = ClaimRequest::new(queue.clone(), [name("k")], worker, half_minutes(3), limit(*rows))?;
                let claimed = handle.claim(&if *starts { request } else { request.reserve() }).await?;
                Ok(format!("{:?}", claimed.jobs.iter().map(Job::id).collect::<Vec<_>>()))
            }
            Operation::Move { job, age, transition: number } => {
                let Some((job, seen)) = self.seen_of(*job, *age) else { return Ok(String::new()) };
                self.submit(handle, job, decide(&seen, *number).map(Sent::Move)).await
            }
            Operation::Batch { job, jobs, transition: number } => {
                let mut decisions = Vec::new();
                let mut keys = BTreeSet::new();
                for next in 0..(*jobs).min(new.len()) {
                    let Some((job, seen)) = self.seen_of(job + next, 0) else { continue };
                    // Which of two gets a key that the other gives up is open.
                    if new[job].unique_key.as_ref().is_some_and(|key| !keys.insert(key.to_string())) {
                        continue;
                    }
                    if let Ok(decision) = decide(&seen, number + next) {
                        // Before it is sent: the call may be dropped.
                        self.sent[job] = Some(Sent::Move(decision.clone()));
                        decisions.push(decision);
                    }
                }
                let answers = Transitioner::new(handle).submit_all(&mut decisions).await;
                let mut words = Vec::new();
                for (mut answer, decision) in answers.into_iter().zip(&mut decisions) {
                    while answer.as_ref().is_err_and(met_a_lock) {
                        tokio::task::yield_now().await;
                        answer = Transitioner::new(handle).submit(decision).await;
                    }
                    words.push(in_words(match answer {
                        // By this very call, when it sent the batch whole, and another row made that fail.
                        Ok(Settled::AlreadyApplied(row)) if !handle.capabilities().atomic_batches => {
                            Ok(Settled::Applied(row))
                        }
                        answer => answer,
                    }));
                }
                Ok(words.join(", "))
            }
            Operation::Repeat { job } => match pick(&self.sent, *job) {
                Some(job) => self.submit_again(handle, job).await,
                None => Ok(String::new()),
            },
            Operation::Beat { job, age, minutes } => {
                let held = self.among(|row| row.state.is_held(), *job, *age).and_then(|(_, seen)| Held::of(&seen));
                let Some(held) = held else { return Ok(String::new()) };
                Ok(format!("{:?}", handle.extend_leases(&[held], half_minutes(*minutes)).await?))
            }
            Operation::Sweep => {
                let sweep = in_the_end(|| recover_stale(handle, half_minutes(3), Limit::MAX, |_| false)).await?;
                // By id: leases that end at one time in the reference do not where the clock does not stand still.
                let recovered: BTreeMap<_, _> =
                    sweep.iter().filter(|row| plot.has(row.id)).map(|row| (row.id, row.state)).collect();
                Ok(format!("{recovered:?}"))
            }
            Operation::Orphans { worker } => {
                let is_held = |id: JobId| plot.position(id).is_some_and(|position| position.is_multiple_of(2));
                let (worker, grace) = (&workers[*worker], millis(3 * MINUTE / 2));
                let sweep = in_the_end(|| release_orphans(handle, worker, grace, Limit::MAX, is_held)).await?;
                Ok(format!("{:?}", ids(&sweep)))
            }
            Operation::Purge { state } => {
                let state = [JobState::Completed, JobState::Failed, JobState::Canceled][*state];
                Ok(format!("{} purged", handle.purge(state, millis(5 * MINUTE / 2), limit(10_000)).await?))
            }
            Operation::Step { job, age, step, value } => {
                let Some((_, seen)) = self.running(*job, *age) else { return Ok(String::new()) };
                let (durable, step) = (durable(handle)?, name(&format!("step {step}")));
                let answer = match value {
                    None => begin_step(durable, &seen, &step).await.map(|value| format!("{value:?}")),
                    Some(value) => {
                        let value = json(&value.to_string());
                        finish_step(durable, &seen, &step, &value).await.map(|()| "finished".to_owned())
                    }
                };
                Ok(match answer {
                    Ok(answer) => answer,
                    Err(StepError::Transition(error)) => in_words(Err(error)),
                    Err(error) => error.to_string(),
                })
            }
            Operation::Wait { job, age, step, event, minutes } => {
                let Some((job, seen)) = self.running(*job, *age) else { return Ok(String::new()) };
                let until = When::After(millis(i64::from(*minutes) * MINUTE + MINUTE / 2));
                let event = event.map(|event| plot.event(event));
                let suspension = Suspension::new(&seen, name(&format!("step {step}")), event, until);
                self.submit(handle, job, suspension.map(Sent::Wait)).await
            }
            Operation::Emit { event, value, minutes } => {
                // For longer than any history, or for a while.
                let keep =
                    minutes.map_or(Delay::from_hours(100), |minutes| millis(i64::from(minutes) * MINUTE + MINUTE / 2));
                let event = NewEvent { key: plot.event(*event), payload: json(&value.to_string()), keep };
                Ok(format!("{:?}", durable(handle)?.emit(&event).await?))
            }
            Operation::TimeOut => {
                let ended = durable(handle)?.time_out_waits(Limit::MAX).await?;
                let mine: BTreeSet<_> = ended.into_iter().filter(|id| plot.has(*id)).collect();
                Ok(format!("{mine:?}"))
            }
            Operation::HandOver { job, age, .. } => {
                let Some((job, seen)) = self.running(*job, *age) else { return Ok(String::new()) };
                let Some(successor) = new.last().cloned() else { return Ok(String::new()) };
                self.submit(handle, job, HandOver::new(&seen, None, successor).map(Sent::HandOver)).await
            }
            Operation::Advance { .. } | Operation::Reconnect => Ok(String::new()),
        }
    }

    async fn submit(
        &mut self,
        handle: &Handle,
        job: usize,
        decided: Result<Sent, IllegalTransition>,
    ) -> Result<String, Failed> {
        match decided {
            Err(illegal) => Ok(format!("illegal from {}", illegal.from)),
            Ok(sent) => {
                // Before it is sent: the call may be dropped.
                self.sent[job] = Some(sent);
                self.submit_again(handle, job).await
            }
        }
    }

    async fn submit_again(&mut self, handle: &Handle, job: usize) -> Result<String, Failed> {
        match &mut self.sent[job] {
            Some(sent) => sent.submit(handle).await,
            None => Ok(String::new()),
        }
    }
}

/// What a sweep put back, and those that followed while a row was locked by a call that was dropped.
async fn in_the_end(mut sweep: impl AsyncFnMut() -> Result<Sweep, Error>) -> Result<Vec<Execution>, Failed> {
    let mut recovered = Vec::new();
    loop {
        let swept = sweep().await?;
        recovered.extend(swept.recovered);
        if !swept.failed.iter().any(|(_, error)| met_a_lock(error)) {
            return Ok(recovered);
        }
        tokio::task::yield_now().await;
    }
}

fn in_words(answer: Result<Settled, TransitionError>) -> String {
    match answer {
        Ok(Settled::Applied(row)) => format!("applied: {row}"),
        Ok(Settled::AlreadyApplied(row)) => format!("already applied: {row}"),
        Err(TransitionError::Conflict(conflict)) => format!("conflict with {}", conflict.current),
        Err(TransitionError::Missing { .. }) => "missing".to_owned(),
        // How certain it is depends on what was dropped before.
        Err(TransitionError::Backend(error)) => format!("error {}", error.kind()),
        Err(error) => error.to_string(),
    }
}

/// Without the identity of a wait, which each side makes for itself.
fn of_step(state: &StepState) -> String {
    match state {
        StepState::Waiting(wait) => format!("waiting for {:?}", wait.event),
        state => format!("{state:?}"),
    }
}

fn describe(job: &Job) -> String {
    let row = &job.execution;
    let set = |at: Option<Timestamp>| if at.is_some() { "set" } else { "none" };
    let errors: Vec<_> =
        job.errors.iter().map(|e| format!("{} in attempt {} (fence {})", e.text, e.attempt, e.fence)).collect();
    format!(
        "{} {row} of {}, claimed {}, attempted {}, lease {}, finished {}, priority {}, key {:?}, payload {}, result {:?}, errors {errors:?}",
        row.id,
        row.max_attempts,
        set(row.claimed_at),
        set(row.attempted_at),
        set(row.lease_expires_at),
        set(job.finished_at),
        job.priority.get(),
        job.unique_key,
        job.payload,
        job.result,
    )
}
