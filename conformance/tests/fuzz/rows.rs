//! What every call must make of a row that was changed at random behind the contract's back.

#![allow(dead_code, reason = "a store without columns takes the jobs alone")]

use std::time::Duration;

use proptest::prelude::*;
use queue_core::*;

use crate::fuzz::mutated;

/// What a column holds.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Holds {
    Number,
    Time,
    Text,
    Json,
    Bytes,
}

/// The tables' columns, with the names that most stores give them.
const COLUMNS: &[(&str, &str, Holds)] = &[
    ("jobs", "queue", Holds::Text),
    ("jobs", "kind", Holds::Text),
    ("jobs", "state", Holds::Text),
    ("jobs", "priority", Holds::Number),
    ("jobs", "attempt", Holds::Number),
    ("jobs", "max_attempts", Holds::Number),
    ("jobs", "fence", Holds::Number),
    ("jobs", "revision", Holds::Bytes),
    ("jobs", "available_at", Holds::Time),
    ("jobs", "created_at", Holds::Time),
    ("jobs", "claimed_by", Holds::Text),
    ("jobs", "claimed_at", Holds::Time),
    ("jobs", "attempted_at", Holds::Time),
    ("jobs", "lease_expires_at", Holds::Time),
    ("jobs", "finished_at", Holds::Time),
    ("jobs", "unique_key", Holds::Text),
    ("jobs", "errors", Holds::Json),
    ("jobs", "result", Holds::Json),
    ("jobs", "payload", Holds::Json),
    ("steps", "name", Holds::Text),
    ("steps", "fence", Holds::Number),
    ("steps", "state", Holds::Text),
    ("steps", "event", Holds::Text),
    ("steps", "until", Holds::Time),
    ("steps", "revision", Holds::Bytes),
    ("steps", "value", Holds::Json),
    ("events", "kept_until", Holds::Time),
    ("events", "payload", Holds::Json),
];

/// A column of the damaged job's rows, and what is written into it; a store that refuses it is left as it is.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) table: &'static str,
    pub(crate) column: &'static str,
    pub(crate) holds: Holds,
    pub(crate) value: Option<Vec<u8>>,
}

/// Up to three changes of one job.
pub(crate) fn changes() -> impl Strategy<Value = Vec<Change>> {
    let change = proptest::sample::select(COLUMNS).prop_flat_map(|(table, column, holds)| {
        let value = prop_oneof![1 => Just(None), 9 => value(holds).prop_map(Some)];
        value.prop_map(move |value| Change { table, column, holds, value })
    });
    proptest::collection::vec(change, 1..4)
}

fn value(holds: Holds) -> BoxedStrategy<Vec<u8>> {
    const STATES: &[&str] = &["waiting", "running", "suspended", "completed", "paused", "begun", "done", "timed_out"];
    const JSON: &[&str] = &[
        "{\"n\":1}",
        "[]",
        "[{\"attempt\":1,\"fence\":1,\"worker\":null,\"at\":0,\"text\":\"\"}]",
        "[{\"attempt\":1e400,\"fence\":-1,\"worker\":\"\",\"at\":99999999999999999,\"text\":0}]",
    ];
    const TIMES: &[&str] = &[
        "0000-00-00 00:00:00",
        "2024-00-31 00:00:00",
        "2024-02-30 25:61:61",
        "0001-01-01 00:00:00",
        "9999-12-31 23:59:59.999",
        "1970-01-01 00:00:00.0005",
        "infinity",
        "-infinity",
        "4713-01-01 00:00:00 BC",
        "294276-12-31 23:59:59",
        "-62135596800001",
        "253402300800000",
        "-9223372036854775808",
        "9223372036854775807",
    ];
    const PIECES: &[&str] = &["0", "-", "9", "\0", "\"", "\\", "{", "]", "e", "\u{10ffff}", " "];
    let number = prop_oneof![
        any::<i64>().prop_map(|number| number.to_string()),
        (-3..300i64).prop_map(|number| number.to_string()),
        (0..6u32, 8..64u32).prop_map(|(off, bits)| ((1i128 << bits) - 3 + i128::from(off)).to_string()),
    ];
    let text = match holds {
        Holds::Number => number.boxed(),
        Holds::Time => prop_oneof![mutated(TIMES, PIECES), number].boxed(),
        Holds::Json => mutated(JSON, PIECES).boxed(),
        Holds::Text | Holds::Bytes => {
            prop_oneof![3 => mutated(STATES, PIECES), 1 => (0..300usize).prop_map(|bytes| "x".repeat(bytes)), 1 => Just("x".repeat(2_000))].boxed()
        }
    };
    let bytes = proptest::collection::vec(any::<u8>(), 0..40);
    match holds {
        Holds::Bytes => prop_oneof![bytes.clone(), proptest::collection::vec(any::<u8>(), 16)].boxed(),
        _ => prop_oneof![9 => text.prop_map(String::into_bytes), 1 => bytes].boxed(),
    }
}

/// How far the two jobs are when one of them is damaged.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stage {
    Waiting,
    Reserved,
    Running,
    Suspended,
    Completed,
}

pub(crate) const STAGES: [Stage; 5] =
    [Stage::Waiting, Stage::Reserved, Stage::Running, Stage::Suspended, Stage::Completed];

/// Two jobs of one queue, of which the first is to be damaged.
#[derive(Debug)]
pub(crate) struct Pair {
    stage: Stage,
    new: [NewJob; 2],
    worker: WorkerId,
    pub(crate) damaged: Job,
    good: Job,
    /// An event that is kept, and to be damaged as well.
    pub(crate) kept: NewEvent,
}

fn name(text: &str) -> Name {
    text.try_into().expect("a name")
}

fn json(text: &str) -> Json {
    Json::from_text(text).expect("JSON")
}

fn hour() -> Lease {
    Lease::from_millis(3_600_000).expect("a lease")
}

/// A store that answers with nothing, or not at all, is what a row must not make of it.
async fn answer<T>(what: &str, call: impl Future<Output = Result<T>>) -> Result<T> {
    let answer = tokio::time::timeout(Duration::from_secs(20), call).await;
    answer.unwrap_or_else(|_| panic!("{what} does not return"))
}

/// What a call about both says must not depend on one of them.
async fn fine<T>(what: &str, call: impl Future<Output = Result<T>>) -> T {
    answer(what, call).await.unwrap_or_else(|error| panic!("{what} fails for all: {error:?}"))
}

/// A call about the damaged row may fail, as one about that row.
async fn typed<T>(what: &str, call: impl Future<Output = Result<T>>) -> Result<T> {
    let answer = answer(what, call).await;
    if let Err(error) = &answer {
        let is_of_the_store = matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Transient);
        assert!(!is_of_the_store, "{what} blames the store: {error:?}");
        assert!(error.to_string().len() < 1_000, "{what}: {} bytes", error.to_string().len());
    }
    answer
}

impl Pair {
    /// Enqueues them, and brings them so far.
    pub(crate) async fn new(backend: &(impl Inspect + DurableSteps), stage: Stage) -> Self {
        let queue = name(&format!("q{}", JobId::new()));
        let job = |key: &str| NewJob {
            unique_key: Some(key.try_into().expect("a key")),
            ..NewJob::new(queue.clone(), name("k"), json("{\"n\":1}"))
        };
        let new = [job("damaged"), job("good")];
        backend.enqueue(&new).await.expect("stores");
        let worker = WorkerId::new(&name("w"));
        let ids = new.each_ref().map(|job| job.id);
        if !matches!(stage, Stage::Waiting) {
            let limit = Limit::new(2).expect("a limit");
            let request = ClaimRequest::new(queue.clone(), [name("k")], worker.clone(), hour(), limit).expect("a kind");
            let request = if matches!(stage, Stage::Reserved) { request.reserve() } else { request };
            for job in backend.claim(&request).await.expect("claims").jobs {
                let seen = &job.execution;
                match stage {
                    Stage::Waiting | Stage::Reserved => {}
                    Stage::Running => {
                        finish_step(backend, seen, &name("done"), &json("1")).await.expect("is saved");
                    }
                    Stage::Suspended => {
                        let until = When::After(Delay::from_hours(1));
                        let mut wait =
                            Suspension::new(seen, name("wait"), Some(queue.clone()), until).expect("is running");
                        wait.submit(backend).await.expect("suspends");
                    }
                    Stage::Completed => {
                        let complete = Transition::Complete { result: Some(json("[1]")) };
                        Transitioner::new(backend).apply(seen, &complete).await.expect("completes");
                    }
                }
            }
        }
        let kept = NewEvent { key: name(&format!("kept {queue}")), payload: json("1"), keep: Delay::from_hours(1) };
        backend.emit(&kept).await.expect("is kept");
        let read = async |id| backend.get(id).await.expect("reads").expect("a job");
        Self { stage, damaged: read(ids[0]).await, good: read(ids[1]).await, new, worker, kept }
    }

    /// Makes every call, and checks that the good job gets what it is due. Answers whether the damaged one cannot be read.
    pub(crate) async fn check(&self, backend: &(impl Inspect + DurableSteps), clock: &ClockOffset) -> bool {
        let Self { stage, new, damaged, good, worker, kept } = self;
        let limit = Limit::MAX;
        let read = typed("get", backend.get(damaged.id())).await;
        if let Err(error) = &read {
            assert_eq!((error.kind(), error.certainty()), (ErrorKind::Schema, Certainty::NotApplied));
        }
        self.is_untouched(backend).await;

        let mut filter = ListFilter::default();
        for narrow in 0..4 {
            match narrow {
                1 => filter.queue = Some(good.queue.clone()),
                2 => filter.kind = Some(good.kind.clone()),
                3 => filter.state = Some(good.state()),
                _ => {}
            }
            let page = fine("list", backend.list(&filter, None, limit)).await;
            assert!(page.items.contains(good), "the good job is listed");
        }
        fine("counts", backend.counts()).await;
        let held = fine("claimed_by", backend.claimed_by(worker, Delay::ZERO, None, limit)).await;
        let is_held = matches!(stage, Stage::Reserved | Stage::Running);
        assert_eq!(held.items.contains(&good.execution), is_held, "who holds the good job");

        let _ = typed("enqueue of the same", backend.enqueue(&new[..1])).await;
        let again = fine("enqueue of the good one", backend.enqueue(&new[1..])).await;
        assert_eq!(again, [Enqueued::Existing(good.id())]);
        let _ = typed("enqueue of the key", backend.enqueue(&[NewJob { id: JobId::new(), ..new[0].clone() }])).await;
        let _ = typed("steps", backend.steps(damaged.id())).await;
        fine("steps of the good one", backend.steps(good.id())).await;

        let _ = typed("emit of the kept event", backend.emit(kept)).await;
        if let Ok(mut wait) = Suspension::new(&damaged.execution, name("late"), Some(kept.key.clone()), When::Now) {
            let answer = wait.submit(backend).await;
            if let Err(StepError::Transition(TransitionError::Backend(error))) = answer {
                let _ = typed::<()>("wait", async { Err(error) }).await;
            }
        }

        // Changes nothing, but for what the first of them may find.
        let keep = |job: &Job| {
            let current = job.execution.fingerprint();
            UpdateRequest { id: job.id(), patch: Patch::keep(&current), current }
        };
        let (first, second) = (keep(damaged), keep(good));
        let _ = typed("update", backend.update_if_current(first.id, &first.current, &first.patch)).await;
        if let Ok(updates) = typed("update of both", backend.update_many_if_current(&[first, second])).await {
            assert!(matches!(&updates[..], [_, Update::Applied(row)] if *row == good.execution), "{updates:?}");
        }
        self.is_untouched(backend).await;
        self.goes_on(backend, clock).await;
        read.is_err()
    }

    async fn is_untouched(&self, backend: &(impl Inspect + DurableSteps)) {
        let good = fine("get of the good one", backend.get(self.good.id())).await;
        assert_eq!(good.as_ref(), Some(&self.good), "the good job");
    }

    /// The good job takes its next step, with the damaged one beside it.
    async fn goes_on(&self, backend: &(impl Inspect + DurableSteps), clock: &ClockOffset) {
        let Self { stage, damaged, good, .. } = self;
        match stage {
            Stage::Waiting => {
                let worker = WorkerId::new(&name("w"));
                let queue = good.queue.clone();
                let request = ClaimRequest::new(queue, [name("k")], worker, hour(), Limit::MAX).expect("a kind");
                let claimed = fine("claim", backend.claim(&request)).await;
                assert!(claimed.jobs.iter().any(|job| job.id() == good.id()), "the good job is claimed: {claimed:?}");
                for row in claimed.unreadable {
                    assert_eq!(row.id, damaged.id());
                    let fail = Transition::Fail { error: row.reason.clone().into() };
                    if let Some(mut decision) = row.execution.and_then(|seen| Decision::new(&seen, &fail).ok()) {
                        let answer = Transitioner::new(backend).submit(&mut decision).await;
                        assert!(answer.is_ok(), "the failure of a row that was claimed is recorded: {answer:?}");
                    }
                }
            }
            Stage::Reserved | Stage::Running => {
                let held: Vec<_> = [damaged, good].into_iter().filter_map(|job| Held::of(&job.execution)).collect();
                let beats = fine("heartbeat", backend.extend_leases(&held, hour())).await;
                assert_eq!(beats.last(), Some(&Beat::Extended), "the good job's lease");
                clock.advance(Delay::from_hours(2));
                let sweep = fine("sweep", recover_stale(backend, hour(), Limit::MAX, |_| false)).await;
                assert!(sweep.recovered.iter().any(|row| row.id == good.id()), "the good job is recovered: {sweep:?}");
            }
            Stage::Suspended => {
                let event = NewEvent { key: good.queue.clone(), payload: json("1"), keep: Delay::ZERO };
                let emitted = fine("emit", backend.emit(&event)).await;
                let good = fine("get", backend.get(good.id())).await.expect("a job");
                assert_eq!(good.state(), JobState::Waiting, "the good job goes on: {emitted:?}");
            }
            Stage::Completed => {
                fine("purge", backend.purge(JobState::Completed, Delay::ZERO, Limit::MAX)).await;
                assert_eq!(fine("get", backend.get(good.id())).await, None, "the good job is purged");
            }
        }
        clock.advance(Delay::from_hours(2));
        fine("end of waits", backend.time_out_waits(Limit::MAX)).await;
        fine("sweep", recover_stale(backend, hour(), Limit::MAX, |_| false)).await;
    }
}
