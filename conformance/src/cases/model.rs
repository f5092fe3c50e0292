//! Random histories, replayed on the store and on the reference.

use proptest::prelude::*;
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
use crate::case::check_eq;
use crate::context::*;
use crate::harness::Hook;

pub(super) const CASES: &[Case] = &[case!(
    model::random_histories,
    [S22],
    [Need::Hook(Hook::Clock)],
    "Random histories leave the same jobs, and get the same answers, as on the reference."
)];

const HISTORIES: u32 = 24;
const LONGEST: usize = 40;

/// Every operation can be made in every situation: jobs and executions are picked by index.
#[derive(Clone, Debug)]
enum Operation {
    Enqueue {
        priority: u8,
        key: Option<u8>,
        minutes: u8,
        max_attempts: u32,
    },
    Again {
        job: usize,
    },
    Claim {
        worker: usize,
        rows: usize,
        starts: bool,
    },
    /// `age` 0 is what was seen last, 1 what was seen before, and so on.
    Move {
        job: usize,
        age: usize,
        transition: usize,
    },
    Repeat {
        job: usize,
    },
    Beat {
        job: usize,
        age: usize,
        minutes: u8,
    },
    Sweep,
    Orphans {
        worker: usize,
    },
    Purge {
        state: usize,
    },
    Advance {
        minutes: u8,
    },
    Reconnect,
}

fn operation() -> impl Strategy<Value = Operation> {
    let (job, age, worker) = (0..8usize, 0..3usize, 0..2usize);
    prop_oneof![
        4 => (0..3u8, proptest::option::of(0..3u8), 0..4u8, 1..3u32)
            .prop_map(|(priority, key, minutes, max_attempts)| Operation::Enqueue { priority, key, minutes, max_attempts }),
        1 => job.clone().prop_map(|job| Operation::Again { job }),
        5 => (worker.clone(), 1..4usize, any::<bool>())
            .prop_map(|(worker, rows, starts)| Operation::Claim { worker, rows, starts }),
        6 => (job.clone(), age.clone(), 0..MOVES).prop_map(|(job, age, transition)| Operation::Move { job, age, transition }),
        2 => job.clone().prop_map(|job| Operation::Repeat { job }),
        2 => (job, age, 0..12u8).prop_map(|(job, age, minutes)| Operation::Beat { job, age, minutes }),
        2 => Just(Operation::Sweep),
        1 => worker.prop_map(|worker| Operation::Orphans { worker }),
        1 => (0..3usize).prop_map(|state| Operation::Purge { state }),
        2 => (1..12u8).prop_map(|minutes| Operation::Advance { minutes }),
        1 => Just(Operation::Reconnect),
    ]
}

const MOVES: usize = 12;

/// The move of a number; half minutes, so that no due time and no lease ends with an operation.
fn transition(number: usize) -> Transition {
    match number {
        0 => Transition::Start { lease: half_minutes(5) },
        1 => complete(),
        2 => Transition::Retry { error: "again".into(), available: When::After(millis(3 * MINUTE / 2)) },
        3 => fail(),
        4 => snooze(5 * MINUTE / 2),
        5 => Transition::Release,
        6 => Transition::Recover,
        7 => cancel(),
        8 => Transition::Rerun,
        9 => Transition::Replace { payload: json("[9]"), available: When::Now },
        10 => Transition::Progress { value: json("[10]") },
        _ => Transition::Adopt { lease: half_minutes(3) },
    }
}

fn half_minutes(minutes: u8) -> Lease {
    lease(i64::from(minutes) * MINUTE + MINUTE / 2)
}

async fn random_histories(context: Context) -> Outcome {
    let config = Config {
        cases: HISTORIES,
        failure_persistence: None,
        max_shrink_iters: 400,
        rng_seed: RngSeed::Fixed(context.seed),
        ..Config::default()
    };
    let histories = proptest::collection::vec(operation(), 1..LONGEST);
    let outcome = block_in_place(|| {
        TestRunner::new(config).run(&histories, |history| {
            let replayed = runtime::Handle::current().block_on(replay(&context, &history));
            replayed.map_err(|failed| TestCaseError::fail(failed.to_string()))
        })
    });
    match outcome {
        Ok(()) => Ok(()),
        Err(TestError::Abort(reason)) => Err(Failed::new(format!("aborted: {reason}"))),
        Err(TestError::Fail(reason, history)) => {
            let lines: Vec<_> = history.iter().enumerate().map(|(n, op)| format!("  {:2}  {op:?}", n + 1)).collect();
            Err(Failed::new(format!(
                "{reason}\nthe shortest history found, worth a case of its own:\n{}",
                lines.join("\n")
            )))
        }
    }
}

/// A store with what a history knows of it.
struct Side {
    handle: Handle,
    /// What was seen of each job, oldest first.
    seen: Vec<Vec<Execution>>,
    decisions: Vec<Option<Decision>>,
}

struct History {
    queue: Name,
    workers: [WorkerId; 2],
    new: Vec<NewJob>,
    model: MemoryBackend,
    sides: [Side; 2],
}

async fn replay(context: &Context, history: &[Operation]) -> Outcome {
    let model = MemoryBackend::at(Timestamp::from_unix_millis(1_924_992_000_000)?);
    let side = |handle| Side { handle, seen: Vec::new(), decisions: Vec::new() };
    let sides = [side(context.connect().await?), side(std::sync::Arc::new(model.clone()))];
    let queue = name(&format!("q{}", JobId::new()));
    let mut state = History { queue, workers: [worker("a"), worker("b")], new: Vec::new(), model, sides };
    for (number, operation) in history.iter().enumerate() {
        // Time passes between all operations, so that no order is left to the speed of the store.
        state.advance(context, 1).await?;
        if let Operation::Reconnect = operation {
            state.sides[0].handle = context.connect().await?;
            continue;
        }
        if let Operation::Advance { minutes } = operation {
            state.advance(context, *minutes).await?;
            continue;
        }
        if let Operation::Enqueue { priority, key, minutes, max_attempts } = operation {
            state.add(*priority, *key, *minutes, *max_attempts)?;
        }
        let mut answers = Vec::new();
        for index in 0..2 {
            answers.push(state.perform(index, operation).await?);
        }
        check_eq!(
            answers[0],
            answers[1],
            "operation {}, {operation:?}: the store's answer, and the reference's",
            number + 1
        );
        let rows = [state.rows(0).await?, state.rows(1).await?];
        check_eq!(
            rows[0],
            rows[1],
            "after operation {}, {operation:?}: the store's jobs, and the reference's",
            number + 1
        );
    }
    Ok(())
}

impl History {
    async fn advance(&self, context: &Context, minutes: u8) -> Outcome {
        let by = i64::from(minutes) * MINUTE;
        self.model.advance(millis(by));
        context.advance(by).await
    }

    fn add(&mut self, priority: u8, key: Option<u8>, minutes: u8, max_attempts: u32) -> Outcome {
        let mut job = new_job();
        job.queue = self.queue.clone();
        job.priority = Priority::new(priority)?;
        job.unique_key = key.map(|key| UniqueKey::try_from(format!("key {key}"))).transpose()?;
        job.max_attempts = std::num::NonZeroU32::new(max_attempts).unwrap_or(std::num::NonZeroU32::MIN);
        if minutes > 0 {
            job.available = When::After(millis(i64::from(minutes) * MINUTE - MINUTE / 2));
        }
        self.new.push(job);
        Ok(())
    }

    /// Makes an operation on one of the sides; the answer, in words that both sides share.
    async fn perform(&mut self, index: usize, operation: &Operation) -> Result<String, Failed> {
        let (new, queue, workers) = (&self.new, &self.queue, &self.workers);
        let side = &mut self.sides[index];
        side.seen.resize(new.len(), Vec::new());
        side.decisions.resize(new.len(), None);
        let handle = std::sync::Arc::clone(&side.handle);
        match operation {
            Operation::Enqueue { .. } => match new.last() {
                Some(job) => Ok(format!("{:?}", handle.enqueue(std::slice::from_ref(job)).await?)),
                None => Ok(String::new()),
            },
            Operation::Again { job } => match pick(new, *job) {
                Some(job) => Ok(format!(
                    "{:?}",
                    handle.enqueue(std::slice::from_ref(&new[job])).await.map_err(|error| error.kind())
                )),
                None => Ok(String::new()),
            },
            Operation::Claim { worker, rows, starts } => {
                let kinds = [name("k")];
                let request =
                    ClaimRequest::new(queue.clone(), kinds, workers[*worker].clone(), half_minutes(3), limit(*rows))?;
                let claimed = handle.claim(&if *starts { request } else { request.reserve() }).await?;
                Ok(format!("{:?}", claimed.jobs.iter().map(Job::id).collect::<Vec<_>>()))
            }
            Operation::Move { job, age, transition: number } => {
                let Some((job, seen)) = side.seen_of(*job, *age) else { return Ok(String::new()) };
                match Decision::new(&seen, &transition(*number)) {
                    Err(illegal) => Ok(format!("illegal from {}", illegal.from)),
                    Ok(mut decision) => {
                        let answer = Transitioner::new(&handle).submit(&mut decision).await;
                        side.decisions[job] = Some(decision);
                        Ok(in_words(answer))
                    }
                }
            }
            Operation::Repeat { job } => {
                let Some(job) = pick(&side.decisions, *job) else { return Ok(String::new()) };
                match &mut side.decisions[job] {
                    Some(decision) => Ok(in_words(Transitioner::new(&handle).submit(decision).await)),
                    None => Ok(String::new()),
                }
            }
            Operation::Beat { job, age, minutes } => {
                let held = side.seen_of(*job, *age).and_then(|(_, seen)| Held::of(&seen));
                let Some(held) = held else { return Ok(String::new()) };
                Ok(format!("{:?}", handle.extend_leases(&[held], half_minutes(*minutes)).await?))
            }
            Operation::Sweep => {
                // In one page: what is put back in two has two due times where the clock does not stand still, and one in the
                // reference.
                let sweep = recover_stale(&handle, half_minutes(3), Limit::MAX, |_| false).await?;
                let mine = |row: &&Execution| new.iter().any(|job| job.id == row.id);
                Ok(format!(
                    "{:?}",
                    sweep.recovered.iter().filter(mine).map(|row| (row.id, row.state)).collect::<Vec<_>>()
                ))
            }
            Operation::Orphans { worker } => {
                let is_held = |id: JobId| id.as_uuid().as_bytes()[15].is_multiple_of(2);
                let sweep =
                    release_orphans(&handle, &workers[*worker], millis(3 * MINUTE / 2), Limit::MAX, is_held).await?;
                Ok(format!("{:?}", sweep.recovered.iter().map(|row| row.id).collect::<Vec<_>>()))
            }
            Operation::Purge { state } => {
                let state = [JobState::Completed, JobState::Failed, JobState::Canceled][*state];
                // All that earlier histories left as well: the rows, not the number, are compared.
                handle.purge(state, millis(5 * MINUTE / 2), limit(10_000)).await?;
                Ok(String::new())
            }
            Operation::Advance { .. } | Operation::Reconnect => Ok(String::new()),
        }
    }

    /// The jobs of this history as they are now, in words that both sides share; and notes them as seen.
    async fn rows(&mut self, index: usize) -> Result<Vec<String>, Failed> {
        let filter = {
            let mut filter = ListFilter::default();
            filter.queue = Some(self.queue.clone());
            filter
        };
        let side = &mut self.sides[index];
        let page = side.handle.list(&filter, None, Limit::MAX).await?;
        side.seen.resize(self.new.len(), Vec::new());
        let mut rows = Vec::new();
        for job in page.items {
            let seen = self.new.iter().position(|new| new.id == job.id()).map(|position| &mut side.seen[position]);
            if let Some(seen) = seen.filter(|seen| seen.last() != Some(&job.execution)) {
                seen.push(job.execution.clone());
            }
            rows.push(describe(&job));
        }
        Ok(rows)
    }
}

fn pick<T>(jobs: &[T], number: usize) -> Option<usize> {
    number.checked_rem(jobs.len())
}

impl Side {
    fn seen_of(&self, job: usize, age: usize) -> Option<(usize, Execution)> {
        let job = pick(&self.seen, job)?;
        let seen = &self.seen[job];
        Some((job, seen.get(seen.len().checked_sub(1)?.saturating_sub(age))?.clone()))
    }
}

fn in_words(answer: Result<Settled, TransitionError>) -> String {
    match answer {
        Ok(Settled::Applied(row)) => format!("applied: {row}"),
        Ok(Settled::AlreadyApplied(row)) => format!("already applied: {row}"),
        Err(TransitionError::Conflict(conflict)) => format!("conflict with {}", conflict.current),
        Err(TransitionError::Missing { .. }) => "missing".to_owned(),
        Err(TransitionError::Backend(error)) => format!("error {} {:?}", error.kind(), error.certainty()),
        Err(error) => error.to_string(),
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
