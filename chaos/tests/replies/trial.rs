//! Calls of the contract, each on rows of its own, and what their answers and their rows say.

use std::collections::BTreeMap;
use std::iter::repeat_n;

use fenced_queue::contract::*;

/// Every call, and on how many rows. Of more than one it is one call as well.
pub(crate) const CALLS: [(&str, usize); 22] = [
    ("enqueue", 1),
    ("enqueue", 3),
    ("enqueue with keys", 1),
    ("enqueue with keys", 3),
    ("claim", 1),
    ("claim", 3),
    ("reservation", 2),
    ("complete", 1),
    ("fail", 1),
    ("retry", 1),
    ("release", 1),
    ("settle", 4),
    ("heartbeat", 1),
    ("heartbeat", 3),
    ("purge", 2),
    ("begin of a step", 1),
    ("end of a step", 1),
    ("wait", 1),
    ("wait for the time", 1),
    ("hand over", 1),
    ("event", 2),
    ("time-out", 2),
];

/// A call that may be made as often as one likes, and the rows that it is about.
pub(crate) struct Trial {
    what: &'static str,
    queue: Name,
    worker: WorkerId,
    ids: Vec<JobId>,
    before: Vec<Row>,
    call: Call,
}

enum Call {
    Enqueue(Vec<NewJob>),
    Claim(ClaimRequest),
    Update(Vec<UpdateRequest>),
    Extend(Vec<Held>),
    Purge,
    Step(StepWrite),
    HandOver(UpdateRequest, NewJob),
    Emit(NewEvent),
    TimeOut,
    Migrate,
}

/// What is stored of one job.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Row {
    /// Whether the call has been carried out on it.
    pub(crate) is_done: bool,
    pub(crate) job: Option<Job>,
    steps: Vec<Step>,
    successor: Option<Job>,
}

/// What an answer says of one row.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Told {
    /// This call wrote it, so.
    New(Option<Execution>),
    /// The same call before did, and it is so.
    Found(Option<Execution>),
    /// Nothing.
    Nothing,
}

pub(crate) fn name(text: &str) -> Name {
    Name::try_from(text).expect("a name")
}

fn json(text: &str) -> Json {
    Json::from_text(text).expect("JSON")
}

fn lease(minutes: i64) -> Lease {
    Lease::from_millis(minutes * 60_000).expect("a lease")
}

fn claim(queue: &Name, worker: &WorkerId, rows: usize) -> ClaimRequest {
    let limit = Limit::new(rows).expect("a limit");
    ClaimRequest::new(queue.clone(), [name("kind")], worker.clone(), lease(1), limit).expect("a kind")
}

fn steps(store: &dyn Inspect) -> &dyn DurableSteps {
    store.durable_steps().expect("every server keeps steps")
}

/// Whether the job is what this patch makes of it at some time, of which the row has kept something.
fn is_patched(before: &Job, patch: &Patch, job: &Job) -> bool {
    let times = [job.finished_at, Some(job.available_at), job.errors.last().map(|failure| failure.at)];
    times.into_iter().flatten().any(|now| {
        let mut expected = before.clone();
        patch.apply(&mut expected, now);
        expected == *job
    })
}

/// Whether the job's wait is over: it is due, and its revision a new one.
fn is_woken(before: &Job, job: &Job) -> bool {
    let wake = Transition::Wake.plan(&before.execution).expect("it is suspended");
    let revision = job.execution.revision;
    revision != before.execution.revision && is_patched(before, &Patch { revision: Some(revision), ..wake }, job)
}

impl Trial {
    /// That of [`Backend::migrate`], on a store that has no schema.
    pub(crate) fn of_migrating() -> Self {
        let worker = WorkerId::new(&name("worker"));
        let (ids, before) = (vec![JobId::new()], vec![Row::default()]);
        Self { what: "migrate", queue: name("queue"), worker, ids, before, call: Call::Migrate }
    }

    pub(crate) async fn prepare(store: &dyn Inspect, what: &'static str, rows: usize) -> Self {
        let queue = name(&format!("queue {}", JobId::new()));
        let worker = WorkerId::new(&name("worker"));
        let offer = |number: usize| {
            let mut job = NewJob::new(queue.clone(), name("kind"), json("{ \"of\": 1 }"));
            let has_key = matches!(what, "enqueue with keys" | "hand over");
            job.unique_key = has_key.then(|| UniqueKey::try_from(format!("key {number}")).expect("a key"));
            job
        };
        let offered: Vec<_> = (0..rows).map(offer).collect();
        let request = claim(&queue, &worker, rows);
        let mut running = Vec::new();
        if !what.starts_with("enqueue") {
            store.enqueue(&offered).await.expect("stores");
            if !matches!(what, "claim" | "reservation") {
                let claimed = store.claim(&request).await.expect("claims");
                running.extend(claimed.jobs.into_iter().map(|job| job.execution));
                assert_eq!(running.len(), rows);
            }
        }
        let seen = running.first();
        let (step, key) = (name("step"), name(&format!("event of {queue}")));
        let never = When::At(Timestamp::MAX);
        let decide = |seen: &Execution, transition: &Transition| {
            Decision::new(seen, transition).expect("legal").request().clone()
        };
        let write = |action| {
            let seen = seen.expect("one is running");
            Call::Step(StepWrite { id: seen.id, current: seen.fingerprint(), name: step.clone(), action })
        };
        let wait = |event| {
            let suspension = decide(seen.expect("one is running"), &Transition::Suspend { until: never }).patch;
            write(StepAction::Wait(NewWait { event, suspension }))
        };
        let complete = Transition::Complete { result: Some(json("[ 1 ]")) };
        let fail = Transition::Fail { error: "for good".into() };
        let retry = Transition::Retry { error: "again".into(), available: When::Now };
        let cancel = Transition::Cancel { reason: "enough".into() };
        let update = |transitions: &[&Transition]| {
            let decided = running.iter().zip(transitions).map(|(seen, transition)| decide(seen, transition));
            Call::Update(decided.collect())
        };
        let call = match what {
            "enqueue" | "enqueue with keys" => Call::Enqueue(offered.clone()),
            "claim" => Call::Claim(request),
            "reservation" => Call::Claim(request.reserve()),
            "complete" => update(&[&complete]),
            "fail" => update(&[&fail]),
            "retry" => update(&[&retry]),
            "release" => update(&[&Transition::Release]),
            "settle" => update(&[&complete, &fail, &retry, &Transition::Release]),
            "heartbeat" => Call::Extend(running.iter().filter_map(Held::of).collect()),
            // Whatever was canceled is purged, so nothing else is canceled here.
            "purge" => {
                for seen in &running {
                    begin_step(steps(store), seen, &step).await.expect("begins");
                    Transitioner::new(store).apply(seen, &cancel).await.expect("ends");
                }
                Call::Purge
            }
            "begin of a step" => write(StepAction::Begin),
            "end of a step" => {
                begin_step(steps(store), seen.expect("one is running"), &step).await.expect("begins");
                write(StepAction::Finish(json("{ \"a\" : 1 }")))
            }
            "wait" => wait(Some(key)),
            "wait for the time" => wait(None),
            // It may have the key of the one that ends.
            "hand over" => Call::HandOver(decide(&running[0], &complete), offer(0)),
            "event" | "time-out" => {
                let until = if what == "event" { never } else { When::Now };
                for seen in &running {
                    let suspension = Suspension::new(seen, step.clone(), Some(key.clone()), until);
                    let suspended = suspension.expect("it runs").submit(steps(store)).await.expect("suspends");
                    assert!(matches!(suspended, Suspended::Waits(_)), "{suspended:?}");
                }
                match what {
                    "event" => Call::Emit(NewEvent { key, payload: json("{ \"b\" : 2 }"), keep: Delay::from_hours(1) }),
                    _ => Call::TimeOut,
                }
            }
            other => panic!("{other}: no such call"),
        };
        let ids = offered.iter().map(|job| job.id).collect();
        let mut trial = Self { what, queue, worker, ids, before: Vec::new(), call };
        trial.before = trial.rows(store).await;
        trial
    }

    /// Makes the call.
    pub(crate) async fn call(&self, handle: &dyn Inspect) -> Result<Vec<Told>> {
        let all = |told| repeat_n(told, self.ids.len()).collect();
        let judged = |patch: &Patch, update| match update {
            Update::Applied(execution) => Told::New(Some(execution)),
            Update::Conflict(execution) if patch.revision == Some(execution.revision) => Told::Found(Some(execution)),
            other => panic!("{}: {other:?}", self.what),
        };
        Ok(match &self.call {
            Call::Enqueue(jobs) => {
                let told = |outcome| match outcome {
                    Enqueued::New(_) => Told::New(None),
                    Enqueued::Existing(_) => Told::Found(None),
                    other => panic!("{}: {other:?}", self.what),
                };
                handle.enqueue(jobs).await?.into_iter().map(told).collect()
            }
            Call::Claim(request) => {
                let claimed = handle.claim(request).await?;
                assert!(claimed.unreadable.is_empty());
                let mut claimed: BTreeMap<_, _> = claimed.jobs.into_iter().map(|job| (job.id(), job)).collect();
                let told = |id| claimed.remove(id).map_or(Told::Nothing, |job| Told::New(Some(job.execution)));
                self.ids.iter().map(told).collect()
            }
            Call::Update(updates) => {
                let answers = match &updates[..] {
                    [UpdateRequest { id, current, patch }] => {
                        vec![handle.update_if_current(*id, current, patch).await?]
                    }
                    updates => handle.update_many_if_current(updates).await?,
                };
                updates.iter().zip(answers).map(|(update, answer)| judged(&update.patch, answer)).collect()
            }
            Call::Extend(held) => {
                let told = |beat| match beat {
                    Beat::Extended => Told::New(None),
                    Beat::Busy => Told::Nothing,
                    Beat::Lost => panic!("{}: a claim is lost", self.what),
                };
                handle.extend_leases(held, lease(60)).await?.into_iter().map(told).collect()
            }
            Call::Purge => match handle.purge(JobState::Canceled, Delay::ZERO, Limit::MAX).await? {
                0 => all(Told::Nothing),
                purged => {
                    assert_eq!(purged, self.ids.len() as u64, "rows that were purged");
                    all(Told::New(None))
                }
            },
            Call::Step(write) => {
                let Stepped { update, step } = steps(handle).write_step(write).await?;
                let patch = match (&write.action, step.map(|step| step.state)) {
                    (StepAction::Wait(wait), Some(StepState::Waiting(Wait { event, revision, .. }))) => {
                        assert_eq!((event, Some(revision)), (wait.event.clone(), wait.suspension.revision));
                        wait.suspension.clone()
                    }
                    (StepAction::Wait(wait), None) => wait.suspension.clone(),
                    (StepAction::Begin, Some(StepState::Begun)) => Patch::keep(&write.current),
                    (StepAction::Finish(value), Some(StepState::Done(kept))) if kept == *value => {
                        Patch::keep(&write.current)
                    }
                    other => panic!("{}: {other:?}", self.what),
                };
                vec![judged(&patch, update)]
            }
            Call::HandOver(update, successor) => {
                let (answer, enqueued) = steps(handle).hand_over(update, successor).await?;
                let told = judged(&update.patch, answer);
                let is_new = matches!(told, Told::New(_));
                assert_eq!(enqueued, is_new.then_some(Enqueued::New(successor.id)), "the successor's answer");
                vec![told]
            }
            Call::Emit(event) => match steps(handle).emit(event).await? {
                Emitted::New { woken } => {
                    assert_eq!(woken, self.ids.len() as u64, "jobs that were woken");
                    all(Told::New(None))
                }
                Emitted::Kept(payload) => {
                    assert_eq!(payload, event.payload);
                    all(Told::Found(None))
                }
            },
            Call::TimeOut => {
                let ended = steps(handle).time_out_waits(Limit::MAX).await?;
                assert!(ended.iter().all(|id| self.ids.contains(id)), "{ended:?}");
                let told = |id| if ended.contains(id) { Told::New(None) } else { Told::Nothing };
                self.ids.iter().map(told).collect()
            }
            Call::Migrate => handle.migrate().await.map(|()| all(Told::New(None)))?,
        })
    }

    /// Whether each repetition is answered as the first one is.
    pub(crate) fn is_idempotent(&self) -> bool {
        match &self.call {
            Call::Step(write) => !matches!(write.action, StepAction::Wait(_)),
            call => matches!(call, Call::Extend(_) | Call::Migrate),
        }
    }

    /// Whether the store carries it out on all of its rows or on none.
    pub(crate) fn is_atomic(&self, store: &dyn Inspect) -> bool {
        let is_one = matches!(&self.call, Call::Step(_) | Call::HandOver(..) | Call::Emit(_));
        is_one || store.capabilities().atomic_batches
    }

    /// All that the queue has, by id.
    async fn stored(&self, store: &dyn Inspect) -> BTreeMap<JobId, Job> {
        let mut filter = ListFilter::default();
        filter.queue = Some(self.queue.clone());
        let page = store.list(&filter, None, Limit::MAX).await.expect("reads");
        assert!(page.unreadable.is_empty() && page.next.is_none(), "{}: {page:?}", self.what);
        page.items.into_iter().map(|job| (job.id(), job)).collect()
    }

    /// What is stored of each row: as it was prepared, or as the call leaves it, or this panics.
    pub(crate) async fn rows(&self, store: &dyn Inspect) -> Vec<Row> {
        if let Call::Migrate = self.call {
            let is_done = match store.counts().await {
                Ok(_) => true,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Schema, "{error}");
                    false
                }
            };
            return vec![Row { is_done, ..Row::default() }];
        }
        let mut stored = self.stored(store).await;
        let mut rows = Vec::new();
        for (index, id) in self.ids.iter().enumerate() {
            let successor = match &self.call {
                Call::HandOver(_, successor) => stored.remove(&successor.id),
                _ => None,
            };
            let steps = steps(store).steps(*id).await.expect("reads");
            let mut row = Row { is_done: false, job: stored.remove(id), steps, successor };
            if let Some(before) = self.before.get(index).filter(|before| **before != row) {
                assert!(self.is_whole(index, before, &row), "{}: {before:#?} became {row:#?}", self.what);
                row.is_done = true;
                if let (Call::Extend(_), Some(job)) = (&self.call, &mut row.job) {
                    // All that a repetition moves.
                    job.execution.lease_expires_at = None;
                }
            }
            rows.push(row);
        }
        assert!(stored.is_empty(), "{}: nobody enqueued {stored:?}", self.what);
        rows
    }

    /// Whether the call, carried out once, makes the one row the other.
    fn is_whole(&self, index: usize, was: &Row, row: &Row) -> bool {
        let is_new = |new: &NewJob, job: &Job| {
            let Execution { state, attempt, fence, .. } = job.execution;
            new.repeats(job) && (state, attempt, fence) == (JobState::Waiting, 0, 0) && job.errors.is_empty()
        };
        let (before, job) = match (&was.job, &row.job, &self.call) {
            (None, Some(job), Call::Enqueue(new)) => return is_new(&new[index], job) && row.steps.is_empty(),
            (Some(_), None, Call::Purge) => return row.steps.is_empty(),
            (Some(before), Some(job), _) => (before, job),
            _ => return false,
        };
        let one_step = |state| {
            let step = Step { name: name("step"), fence: before.execution.fence, state };
            row.steps == [step]
        };
        match &self.call {
            Call::Claim(request) => {
                let Execution { revision, claimed_at, .. } = job.execution;
                let mut expected = before.clone();
                request.apply(&mut expected.execution, revision, claimed_at.unwrap_or(Timestamp::MIN));
                expected == *job && revision != before.execution.revision && row.steps == was.steps
            }
            Call::Update(updates) => is_patched(before, &updates[index].patch, job) && row.steps == was.steps,
            Call::Extend(_) => {
                let mut expected = before.clone();
                expected.execution.lease_expires_at = job.execution.lease_expires_at;
                let is_longer = job.execution.lease_expires_at > before.execution.lease_expires_at;
                expected == *job && is_longer && row.steps == was.steps
            }
            Call::Step(StepWrite { action: StepAction::Begin, .. }) => before == job && one_step(StepState::Begun),
            Call::Step(StepWrite { action: StepAction::Finish(value), .. }) => {
                before == job && one_step(StepState::Done(value.clone()))
            }
            Call::Step(StepWrite { action: StepAction::Wait(NewWait { event, suspension }), .. }) => {
                let (until, revision) = (job.available_at, job.execution.revision);
                let wait = Wait { event: event.clone(), until, revision };
                is_patched(before, suspension, job) && one_step(StepState::Waiting(wait))
            }
            Call::HandOver(update, new) => {
                let is_there = row.successor.as_ref().is_some_and(|successor| is_new(new, successor));
                is_patched(before, &update.patch, job) && is_there && row.steps == was.steps
            }
            Call::Emit(event) => is_woken(before, job) && one_step(StepState::Done(event.payload.clone())),
            Call::TimeOut => is_woken(before, job) && one_step(StepState::TimedOut),
            Call::Enqueue(_) | Call::Purge | Call::Migrate => false,
        }
    }

    /// Gives back what was claimed for nobody, as its worker does; then whatever waits is claimed, once. A new schema serves.
    pub(crate) async fn afterwards(&self, store: &dyn Inspect) {
        if let Call::Migrate = self.call {
            for (what, rows) in [("event", 2), ("hand over", 1)] {
                let trial = Self::prepare(store, what, rows).await;
                trial.call(store).await.expect("works");
                assert!(trial.rows(store).await.iter().all(|row| row.is_done));
            }
            return;
        }
        let mut stored = self.stored(store).await;
        if let Call::Claim(_) = self.call {
            let held = store.claimed_by(&self.worker, Delay::ZERO, None, Limit::MAX).await.expect("reads").items;
            assert!(held.iter().map(|execution| &execution.id).eq(stored.keys()), "{held:?}");
            release_orphans(store, &self.worker, Delay::ZERO, Limit::MAX, |_| false).await.expect("releases");
            stored = self.stored(store).await;
            for Execution { state, attempt, fence, .. } in stored.values().map(|job| &job.execution) {
                assert_eq!((*state, *attempt, *fence), (JobState::Waiting, 0, 1), "{stored:?}");
            }
        }
        let due = stored.values().filter(|job| job.state() == JobState::Waiting);
        let due: BTreeMap<_, _> = due.map(|job| (job.id(), job.execution.fence + 1)).collect();
        for expected in [due, BTreeMap::new()] {
            let request = claim(&self.queue, &WorkerId::new(&name("other")), 100);
            let claimed = store.claim(&request).await.expect("claims").jobs;
            let claimed: BTreeMap<_, _> = claimed.iter().map(|job| (job.id(), job.execution.fence)).collect();
            assert_eq!(claimed, expected, "{}: what is due is claimed once", self.what);
        }
    }
}
