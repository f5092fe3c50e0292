//! What a history is made of.

use std::fmt;

use proptest::prelude::*;
use queue_core::*;

use crate::context::*;

/// One operation of a history, which may be dropped while it is under way.
#[derive(Clone)]
pub(super) struct Act {
    pub(super) operation: Operation,
    pub(super) dropped: Option<Dropped>,
}

/// How a call is dropped, and how it is found out what became of it.
#[derive(Clone, Debug)]
pub(super) struct Dropped {
    /// A call that is ready before is not dropped.
    pub(super) polls: usize,
    /// The handle is dropped with it, and another one opened.
    pub(super) dies: bool,
    /// Whether the call is repeated; else another change of the same row is tried, which one of the two must lose.
    pub(super) again: bool,
}

impl fmt::Debug for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, dropped } = self;
        match dropped {
            Some(dropped) => write!(f, "{operation:?}, {dropped:?}"),
            None => write!(f, "{operation:?}"),
        }
    }
}

/// Every operation can be made in every situation: jobs and executions are picked by index.
#[derive(Clone, Debug)]
pub(super) enum Operation {
    Enqueue {
        jobs: usize,
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
    /// This job and those after it, each as it was seen last, in one call.
    Batch {
        job: usize,
        jobs: usize,
        transition: usize,
    },
    /// Submits again what was submitted for the job last.
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
    /// Begins a step, or finishes it with a value.
    Step {
        job: usize,
        age: usize,
        step: u8,
        value: Option<u8>,
    },
    Wait {
        job: usize,
        age: usize,
        step: u8,
        event: Option<u8>,
        minutes: u8,
    },
    Emit {
        event: u8,
        value: u8,
        minutes: Option<u8>,
    },
    TimeOut,
    HandOver {
        job: usize,
        age: usize,
        key: Option<u8>,
    },
}

impl Operation {
    /// Whether steps may be written.
    pub(super) fn is_of_steps(&self) -> bool {
        matches!(self, Self::Step { .. } | Self::Wait { .. } | Self::Emit { .. } | Self::TimeOut | Self::Repeat { .. })
    }

    /// Whether it can be learned what became of it. A heartbeat, a purge, an end of waits or an enqueue of an old job that is late
    /// may do at another moment what it did not do at its own.
    pub(super) fn can_be_dropped(&self) -> bool {
        let is_timed = matches!(self, Self::Beat { .. } | Self::Purge { .. } | Self::TimeOut | Self::Again { .. });
        !is_timed && !matches!(self, Self::Advance { .. } | Self::Reconnect)
    }

    /// Whether it changes all rows or none.
    pub(super) fn is_one_write(&self, capabilities: &Capabilities) -> bool {
        match self {
            Self::Enqueue { .. } => capabilities.atomic_batches,
            Self::Claim { .. } | Self::Batch { .. } | Self::Sweep | Self::Orphans { .. } => false,
            _ => true,
        }
    }

    /// As it can be dropped: what the call may still do when it is late is nothing. With a key, a job that was refused could be
    /// stored when the key is free; an event that is not kept any more could be emitted again.
    fn for_a_drop(self) -> Self {
        match self {
            Self::Enqueue { jobs, priority, minutes, max_attempts, .. } => {
                Self::Enqueue { jobs, priority, key: None, minutes, max_attempts }
            }
            Self::Emit { event, value, .. } => Self::Emit { event, value, minutes: None },
            other => other,
        }
    }
}

/// The operations of histories on a store that has durable steps, or has not.
pub(super) fn act(steps: bool) -> BoxedStrategy<Act> {
    let polls = prop_oneof![2 => Just(1), 2 => 2..4usize, 3 => 4..16usize];
    let dropped =
        (polls, any::<bool>(), any::<bool>()).prop_map(|(polls, dies, again)| Dropped { polls, dies, again: !again });
    let operation = if steps { prop_oneof![3 => plain(), 1 => of_steps()].boxed() } else { plain() };
    (operation, proptest::option::weighted(0.3, dropped))
        .prop_map(|(operation, dropped)| match dropped.filter(|_| operation.can_be_dropped()) {
            None => Act { operation, dropped: None },
            dropped => Act { operation: operation.for_a_drop(), dropped },
        })
        .boxed()
}

fn plain() -> BoxedStrategy<Operation> {
    let age = prop_oneof![3 => Just(0usize), 1 => 1..3usize];
    let (job, worker) = (0..8usize, 0..2usize);
    prop_oneof![
        5 => (1..4usize, 0..3u8, proptest::option::of(0..3u8), prop_oneof![Just(0), 1..4u8], 1..3u32)
            .prop_map(|(jobs, priority, key, minutes, max_attempts)| {
                Operation::Enqueue { jobs, priority, key, minutes, max_attempts }
            }),
        1 => job.clone().prop_map(|job| Operation::Again { job }),
        6 => (worker.clone(), 1..4usize, any::<bool>())
            .prop_map(|(worker, rows, starts)| Operation::Claim { worker, rows, starts }),
        6 => (job.clone(), age.clone(), 0..2 * MOVES).prop_map(|(job, age, transition)| Operation::Move { job, age, transition }),
        3 => (job.clone(), 2..4usize, MOVES..2 * MOVES).prop_map(|(job, jobs, transition)| Operation::Batch { job, jobs, transition }),
        2 => job.clone().prop_map(|job| Operation::Repeat { job }),
        2 => (job, age, 2..12u8).prop_map(|(job, age, minutes)| Operation::Beat { job, age, minutes }),
        2 => Just(Operation::Sweep),
        1 => worker.prop_map(|worker| Operation::Orphans { worker }),
        1 => (0..3usize).prop_map(|state| Operation::Purge { state }),
        2 => (1..12u8).prop_map(|minutes| Operation::Advance { minutes }),
        4 => Just(Operation::Reconnect),
    ]
    .boxed()
}

fn of_steps() -> BoxedStrategy<Operation> {
    let event = prop_oneof![4 => Just(0u8), 1 => Just(1u8)];
    let (job, age, step) = (0..8usize, prop_oneof![3 => Just(0usize), 1 => Just(1usize)], 0..2u8);
    prop_oneof![
        3 => (job.clone(), age.clone(), step.clone(), proptest::option::of(0..2u8))
            .prop_map(|(job, age, step, value)| Operation::Step { job, age, step, value }),
        5 => (job.clone(), age.clone(), step, proptest::option::weighted(0.8, event.clone()), 1..6u8)
            .prop_map(|(job, age, step, event, minutes)| Operation::Wait { job, age, step, event, minutes }),
        3 => (event, 0..2u8, proptest::option::of(0..6u8))
            .prop_map(|(event, value, minutes)| Operation::Emit { event, value, minutes }),
        1 => Just(Operation::TimeOut),
        1 => (job, age, proptest::option::of(0..3u8)).prop_map(|(job, age, key)| Operation::HandOver { job, age, key }),
    ]
    .boxed()
}

const MOVES: usize = 12;

/// A decision on what was seen of a job: the move of this number, or from a number on that no move has the first that is legal.
pub(super) fn decide(seen: &Execution, number: usize) -> Result<Decision, IllegalTransition> {
    let legal = (number..number + MOVES).filter(|_| number >= MOVES);
    let legal = legal.filter_map(|number| Decision::new(seen, &transition(number)).ok()).next();
    legal.map_or_else(|| Decision::new(seen, &transition(number)), Ok)
}

/// The move of a number; half minutes, so that no due time and no lease ends with an operation.
pub(super) fn transition(number: usize) -> Transition {
    match number % MOVES {
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

pub(super) fn half_minutes(minutes: u8) -> Lease {
    lease(i64::from(minutes) * MINUTE + MINUTE / 2)
}
