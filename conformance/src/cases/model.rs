//! Random histories, replayed on the store and on the reference.

mod dropped;
mod operation;
mod side;

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::test_runner::Config;
use proptest::test_runner::RngSeed;
use proptest::test_runner::TestCaseError;
use proptest::test_runner::TestError;
use proptest::test_runner::TestRunner;
use queue_core::*;
use tokio::runtime;
use tokio::task::block_in_place;

use crate::case::Case;
use crate::case::Failed;
use crate::case::Need;
use crate::case::Outcome;
use crate::case::case;
use crate::case::check;
use crate::case::check_eq;
use crate::context::*;
use crate::harness::Hook;

use self::operation::Act;
use self::operation::Operation;
use self::operation::act;
use self::side::Look;
use self::side::Looks;
use self::side::Plot;
use self::side::Side;
use self::side::look;
use self::side::texts;

pub(super) const CASES: &[Case] = &[case!(
    model::random_histories,
    [S22],
    [Need::Hook(Hook::Clock)],
    "Random histories, with calls that are dropped and handles that are opened anew, leave the same jobs, and get the same answers, as on the reference."
)];

const HISTORIES: u32 = 20;
const LONGEST: usize = 40;
/// Time to look for a shorter history that fails as well, within the time of a case.
const SHRINKING_MILLIS: u32 = 10_000;

async fn random_histories(context: Context) -> Outcome {
    let config = Config {
        cases: HISTORIES,
        failure_persistence: None,
        max_shrink_iters: 1_000,
        max_shrink_time: SHRINKING_MILLIS,
        rng_seed: RngSeed::Fixed(context.seed),
        ..Config::default()
    };
    let other = context.connect().await?;
    let outcome = block_in_place(|| {
        let histories = proptest::collection::vec(act(context.capabilities.durable_steps), 1..LONGEST);
        TestRunner::new(config).run(&histories, |history| {
            let replayed = runtime::Handle::current().block_on(replay(&context, &other, &history));
            replayed.map_err(|failed| TestCaseError::fail(failed.to_string()))
        })
    });
    match outcome {
        Ok(()) => Ok(()),
        Err(TestError::Abort(reason)) => Err(Failed::new(format!("aborted: {reason}"))),
        Err(TestError::Fail(reason, history)) => {
            let lines: Vec<_> = history.iter().enumerate().map(|(n, act)| format!("  {:2}  {act:?}", n + 1)).collect();
            Err(Failed::new(format!(
                "{reason}\nthe shortest history found from seed {}, worth a case of its own:\n{}",
                context.seed,
                lines.join("\n")
            )))
        }
    }
}

/// The store's side, then the reference's.
struct History {
    plot: Plot,
    model: MemoryBackend,
    sides: [Side; 2],
    late: Late,
    /// By how much the store's clock is ahead of the reference's, known with the first job.
    ahead: Option<i64>,
}

/// What calls that were dropped could still do, long after, on a machine that stood still.
#[derive(Default)]
struct Late {
    workers: BTreeSet<WorkerId>,
    jobs: BTreeSet<JobId>,
}

impl Late {
    fn has_come(&self, [store, model]: &[Looks; 2]) -> bool {
        store.iter().any(|(id, there)| match model.get(id) {
            None => self.jobs.contains(id),
            Some(expected) => {
                there.text != expected.text
                    && there.job.execution.claimed_by.as_ref().is_some_and(|worker| self.workers.contains(worker))
            }
        })
    }
}

/// Ends and deletes what earlier histories left, so that a history depends on itself alone, and a shorter one fails as it did.
async fn tidy_up(handle: &Handle) -> Outcome {
    let left = handle.list(&ListFilter::default(), None, Limit::MAX).await?.items;
    let mut decisions: Vec<_> = left.iter().filter_map(|job| Decision::new(&job.execution, &cancel()).ok()).collect();
    Transitioner::new(handle).submit_all(&mut decisions).await;
    for state in [JobState::Completed, JobState::Failed, JobState::Canceled] {
        handle.purge(state, Delay::ZERO, limit(10_000)).await?;
    }
    Ok(())
}

async fn replay(context: &Context, other: &Handle, history: &[Act]) -> Outcome {
    tidy_up(other).await?;
    let model = MemoryBackend::at(Timestamp::from_unix_millis(1_924_992_000_000)?);
    let sides = [Side::new(context.connect().await?), Side::new(Arc::new(model.clone()))];
    let plot = Plot {
        queue: name(&format!("q{}", JobId::new())),
        workers: [worker("a"), worker("b")],
        stand_in: None,
        new: Vec::new(),
        with_steps: BTreeSet::new(),
    };
    let mut state = History { plot, model, sides, late: Late::default(), ahead: None };
    for (number, act) in history.iter().enumerate() {
        // Time passes between all operations, so that no order is left to the speed of the store.
        state.advance(context, 1).await?;
        match act.operation {
            Operation::Reconnect => state.sides[0].handle = context.connect().await?,
            Operation::Advance { minutes } => state.advance(context, minutes).await?,
            _ => {
                let ended = state.act(context, other, act).await;
                let ended =
                    ended.map_err(|failed| Failed::new(format!("operation {}, {act:?}: {failed}", number + 1)))?;
                if !ended {
                    context.note(format_args!("what was dropped long before has come late: no verdict"));
                    return Ok(());
                }
            }
        }
    }
    Ok(())
}

impl History {
    async fn advance(&self, context: &Context, minutes: u8) -> Outcome {
        let by = i64::from(minutes) * MINUTE;
        self.model.advance(millis(by));
        context.advance(by).await
    }

    /// Does it on both sides, and compares them; false if nothing can be said about the store any more.
    async fn act(&mut self, context: &Context, other: &Handle, act: &Act) -> Result<bool, Failed> {
        let Act { operation, dropped } = act;
        self.prepare(operation, dropped.is_some())?;
        let polls = dropped.as_ref().map_or(usize::MAX, |dropped| dropped.polls);
        let answer = drop_after(polls, self.sides[0].perform(&self.plot, operation)).await;
        let answers = match (answer, dropped) {
            (Some(answer), _) => Some([answer?, self.sides[1].perform(&self.plot, operation).await?]),
            (None, None) => None,
            (None, Some(dropped)) => {
                context.note(format_args!("dropped after {polls} polls: {operation:?}"));
                if dropped.dies {
                    self.sides[0].handle = context.connect().await?;
                }
                self.learn(context, other, operation, dropped).await?;
                None
            }
        };
        let steps = operation.is_of_steps() || dropped.is_some() && context.capabilities.durable_steps;
        let looks = [
            look(&self.sides[0].handle, &self.plot, steps).await?,
            look(&self.sides[1].handle, &self.plot, steps).await?,
        ];
        if self.late.has_come(&looks) {
            return Ok(false);
        }
        if let Some([store, model]) = answers {
            check_eq!(store, model, "the store's answer, and the reference's");
        }
        check_eq!(texts(&looks[0]), texts(&looks[1]), "the store's jobs, and the reference's");
        self.note(&looks)?;
        Ok(true)
    }

    /// What both sides are to know before the operation.
    fn prepare(&mut self, operation: &Operation, dropped: bool) -> Outcome {
        let plot = &mut self.plot;
        plot.stand_in = None;
        match operation {
            Operation::Enqueue { jobs, priority, key, minutes, max_attempts } => {
                for _ in 0..*jobs {
                    let mut job = new_job();
                    job.queue = plot.queue.clone();
                    job.priority = Priority::new(*priority)?;
                    job.unique_key = key.map(|key| UniqueKey::try_from(format!("key {key}"))).transpose()?;
                    job.max_attempts = std::num::NonZeroU32::new(*max_attempts).unwrap_or(std::num::NonZeroU32::MIN);
                    if *minutes > 0 {
                        job.available = When::After(millis(i64::from(*minutes) * MINUTE - MINUTE / 2));
                    }
                    if dropped {
                        self.late.jobs.insert(job.id);
                    }
                    plot.new.push(job);
                }
            }
            Operation::HandOver { key, .. } => {
                let mut job = new_job();
                job.queue = plot.queue.clone();
                job.unique_key = key.map(|key| UniqueKey::try_from(format!("key {key}"))).transpose()?;
                plot.new.push(job);
            }
            // Whoever is dropped while it claims never claims again.
            Operation::Claim { .. } if dropped => plot.stand_in = Some(worker("late")),
            Operation::Step { job, age, .. } | Operation::Wait { job, age, .. } => {
                plot.with_steps.extend(self.sides[0].running(*job, *age).map(|(_, seen)| seen.id));
            }
            _ => {}
        }
        Ok(())
    }

    /// Notes what was seen, and gives the reference the store's due times, which are not as round.
    fn note(&mut self, [store, model]: &[Looks; 2]) -> Outcome {
        for side in &mut self.sides {
            side.seen.resize(self.plot.new.len(), Vec::new());
        }
        for (id, Look { job, .. }) in store {
            let (Some(position), Some(Look { job: expected, .. })) = (self.plot.position(*id), model.get(id)) else {
                continue;
            };
            let [seen, of_model] = self.sides.each_mut().map(|side| &mut side.seen[position]);
            // Both if either has changed, so that an age means one moment: a lease may be extended by little on one side alone.
            if seen.last() != Some(&job.execution) || of_model.last() != Some(&expected.execution) {
                seen.push(job.execution.clone());
                of_model.push(expected.execution.clone());
            }
            let ahead = job.created_at.unix_millis() - expected.created_at.unix_millis();
            let ahead = *self.ahead.get_or_insert(ahead);
            for ((what, at), (_, expected)) in times(job).into_iter().zip(times(expected)) {
                let off =
                    at.zip(expected).map_or(0, |(at, expected)| at.unix_millis() - ahead - expected.unix_millis());
                check!(off.abs() < MINUTE / 2, "job {id}: {what} is {off} ms later than on the reference");
            }
            let due = job.available_at.saturating_add_millis(-ahead);
            self.model.edit(|rows| rows.get_mut(id).map(|row| row.job.available_at = due));
        }
        Ok(())
    }
}

fn times(job: &Job) -> [(&'static str, Option<Timestamp>); 6] {
    let row = &job.execution;
    [
        ("available_at", Some(job.available_at)),
        ("created_at", Some(job.created_at)),
        ("claimed_at", row.claimed_at),
        ("attempted_at", row.attempted_at),
        ("lease_expires_at", row.lease_expires_at),
        ("finished_at", job.finished_at),
    ]
}
