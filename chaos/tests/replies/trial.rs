//! Calls of the contract, each on rows of its own, and what their answers and their rows say.

use std::collections::BTreeMap;
use std::iter::repeat_n;

use fenced_queue::contract::*;
use serde::Deserialize;
use serde::Serialize;

use crate::application::Store;

/// Every call, and on how many rows. Of more than one it is one call as well.
pub(crate) const CALLS: [(&str, usize); 26] = [
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
    ("enqueue in a transaction", 1),
    ("enqueue with keys in a transaction", 3),
    ("complete in a transaction", 1),
    ("complete in a transaction for it", 1),
];

/// A call that may be made as often as one likes, and the rows that it is about.
pub(crate) struct Trial {
    pub(crate) recipe: Recipe,
    before: Vec<Row>,
    call: Call,
}

/// What one has to know to make the very same call.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Recipe {
    what: String,
    queue: Name,
    worker: WorkerId,
    ids: Vec<JobId>,
    /// What is decided on, if that runs.
    seen: Vec<Execution>,
    revisions: Vec<Revision>,
    successor: JobId,
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
    /// How many rows of the application's, if there is a transaction of its own.
    written: u64,
}

/// What an answer says of one row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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

pub(crate) fn steps(store: &dyn Store) -> &dyn DurableSteps {
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

impl Recipe {
    fn new(what: &str, rows: usize) -> Self {
        let ids: Vec<_> = (0..rows).map(|_| JobId::new()).collect();
        Self {
            what: what.to_owned(),
            queue: name(&format!("queue {}", JobId::new())),
            worker: WorkerId::new(&name("worker")),
            revisions: ids.iter().map(|_| Revision::random()).collect(),
            seen: Vec::new(),
            successor: JobId::new(),
            ids,
        }
    }

    fn offer(&self, number: usize) -> NewJob {
        let mut job = NewJob::new(self.queue.clone(), name("kind"), json("{ \"of\": 1 }"));
        job.id = self.ids[number];
        let has_key = self.what.contains("with keys") || self.what == "hand over";
        job.unique_key = has_key.then(|| UniqueKey::try_from(format!("key {number}")).expect("a key"));
        job
    }

    fn offered(&self) -> Vec<NewJob> {
        (0..self.ids.len()).map(|number| self.offer(number)).collect()
    }

    fn claim(&self) -> ClaimRequest {
        claim(&self.queue, &self.worker, self.ids.len())
    }

    fn event(&self) -> Name {
        name(&format!("event of {}", self.queue))
    }

    fn decide(&self, number: usize, transition: &Transition) -> UpdateRequest {
        let mut decided = Decision::new(&self.seen[number], transition).expect("legal").request().clone();
        decided.patch.revision = decided.patch.revision.and(Some(self.revisions[number]));
        decided
    }

    fn call(&self) -> Call {
        let write = |action| {
            let seen = &self.seen[0];
            Call::Step(StepWrite { id: seen.id, current: seen.fingerprint(), name: name("step"), action })
        };
        let wait = |event| {
            let suspension = self.decide(0, &Transition::Suspend { until: When::At(Timestamp::MAX) }).patch;
            write(StepAction::Wait(NewWait { event, suspension }))
        };
        let complete = Transition::Complete { result: Some(json("[ 1 ]")) };
        let fail = Transition::Fail { error: "for good".into() };
        let retry = Transition::Retry { error: "again".into(), available: When::Now };
        let update = |transitions: &[&Transition]| {
            let decided = transitions.iter().enumerate().map(|(number, transition)| self.decide(number, transition));
            Call::Update(decided.collect())
        };
        match self.what.as_str() {
            what if what.starts_with("enqueue") => Call::Enqueue(self.offered()),
            "claim" => Call::Claim(self.claim()),
            "reservation" => Call::Claim(self.claim().reserve()),
            what if what.starts_with("complete") => update(&[&complete]),
            "fail" => update(&[&fail]),
            "retry" => update(&[&retry]),
            "release" => update(&[&Transition::Release]),
            "settle" => update(&[&complete, &fail, &retry, &Transition::Release]),
            "heartbeat" => Call::Extend(self.seen.iter().filter_map(Held::of).collect()),
            "purge" => Call::Purge,
            "begin of a step" => write(StepAction::Begin),
            "end of a step" => write(StepAction::Finish(json("{ \"a\" : 1 }"))),
            "wait" => wait(Some(self.event())),
            "wait for the time" => wait(None),
            "hand over" => {
                // It may have the key of the one that ends.
                let successor = NewJob { id: self.successor, ..self.offer(0) };
                Call::HandOver(self.decide(0, &complete), successor)
            }
            "event" => {
                let (key, payload) = (self.event(), json("{ \"b\" : 2 }"));
                Call::Emit(NewEvent { key, payload, keep: Delay::from_hours(1) })
            }
            "time-out" => Call::TimeOut,
            "migrate" => Call::Migrate,
            other => panic!("{other}: no such call"),
        }
    }
}

impl Trial {
    /// That of [`Backend::migrate`], on a store that has no schema.
    pub(crate) fn of_migrating() -> Self {
        let mut trial = Self::of(Recipe::new("migrate", 1));
        trial.before.push(Row::default());
        trial
    }

    /// That which another process has prepared, for the call alone.
    pub(crate) fn of(recipe: Recipe) -> Self {
        Self { before: Vec::new(), call: recipe.call(), recipe }
    }

    pub(crate) async fn prepare(store: &dyn Store, what: &str, rows: usize) -> Self {
        let mut recipe = Recipe::new(what, rows);
        if !what.starts_with("enqueue") {
            store.enqueue(&recipe.offered()).await.expect("stores");
            if !matches!(what, "claim" | "reservation") {
                let claimed = store.claim(&recipe.claim()).await.expect("claims");
                recipe.seen.extend(claimed.jobs.into_iter().map(|job| job.execution));
                assert_eq!(recipe.seen.len(), rows);
            }
        }
        for seen in &recipe.seen {
            match what {
                // Whatever was canceled is purged, so nothing else is canceled here.
                "purge" => {
                    begin_step(steps(store), seen, &name("step")).await.expect("begins");
                    let cancel = Transition::Cancel { reason: "enough".into() };
                    Transitioner::new(store).apply(seen, &cancel).await.expect("ends");
                }
                "end of a step" => {
                    begin_step(steps(store), seen, &name("step")).await.expect("begins");
                }
                "event" | "time-out" => {
                    let until = if what == "event" { When::At(Timestamp::MAX) } else { When::Now };
                    let suspension = Suspension::new(seen, name("step"), Some(recipe.event()), until);
                    let suspended = suspension.expect("it runs").submit(steps(store)).await.expect("suspends");
                    assert!(matches!(suspended, Suspended::Waits(_)), "{suspended:?}");
                }
                _ => {}
            }
        }
        let mut trial = Self::of(recipe);
        trial.before = trial.rows(store).await;
        trial
    }

    fn is_in_transaction(&self) -> bool {
        self.recipe.what.contains("in a transaction")
    }

    /// What the transaction is said to settle when it begins.
    pub(crate) fn settles(&self) -> Option<&Execution> {
        self.recipe.seen.first().filter(|_| self.recipe.what.ends_with("for it"))
    }

    /// The row of the application's.
    pub(crate) fn row(&self) -> JobId {
        self.recipe.ids[0]
    }

    fn enqueued(&self, answers: Vec<Enqueued>) -> Vec<Told> {
        let told = |outcome| match outcome {
            Enqueued::New(_) => Told::New(None),
            Enqueued::Existing(_) => Told::Found(None),
            other => panic!("{}: {other:?}", self.recipe.what),
        };
        answers.into_iter().map(told).collect()
    }

    fn judged(&self, patch: &Patch, update: Update) -> Told {
        match update {
            Update::Applied(execution) => Told::New(Some(execution)),
            Update::Conflict(execution) if patch.revision == Some(execution.revision) => Told::Found(Some(execution)),
            other => panic!("{}: {other:?}", self.recipe.what),
        }
    }

    /// Makes the call in the application's transaction, which is not ended.
    pub(crate) async fn call_in<B: Transactional>(
        &self,
        backend: &B,
        connection: &mut B::Connection,
    ) -> Result<Vec<Told>> {
        match &self.call {
            Call::Enqueue(jobs) => Ok(self.enqueued(backend.enqueue_in(connection, jobs).await?)),
            Call::Update(updates) => {
                let UpdateRequest { id, current, patch } = &updates[0];
                let update = backend.update_if_current_in(connection, *id, current, patch).await?;
                Ok(vec![self.judged(patch, update)])
            }
            _ => panic!("{}: not in a transaction", self.recipe.what),
        }
    }

    /// Makes the call.
    pub(crate) async fn call(&self, handle: &dyn Store) -> Result<Vec<Told>> {
        if self.is_in_transaction() {
            return handle.in_transaction(self).await;
        }
        let Recipe { what, ids, .. } = &self.recipe;
        let all = |told| repeat_n(told, ids.len()).collect();
        Ok(match &self.call {
            Call::Enqueue(jobs) => self.enqueued(handle.enqueue(jobs).await?),
            Call::Claim(request) => {
                let claimed = handle.claim(request).await?;
                assert!(claimed.unreadable.is_empty());
                let mut claimed: BTreeMap<_, _> = claimed.jobs.into_iter().map(|job| (job.id(), job)).collect();
                let told = |id| claimed.remove(id).map_or(Told::Nothing, |job| Told::New(Some(job.execution)));
                ids.iter().map(told).collect()
            }
            Call::Update(updates) => {
                let answers = match &updates[..] {
                    [UpdateRequest { id, current, patch }] => {
                        vec![handle.update_if_current(*id, current, patch).await?]
                    }
                    updates => handle.update_many_if_current(updates).await?,
                };
                updates.iter().zip(answers).map(|(update, answer)| self.judged(&update.patch, answer)).collect()
            }
            Call::Extend(held) => {
                let told = |beat| match beat {
                    Beat::Extended => Told::New(None),
                    Beat::Busy => Told::Nothing,
                    Beat::Lost => panic!("{what}: a claim is lost"),
                };
                handle.extend_leases(held, lease(60)).await?.into_iter().map(told).collect()
            }
            Call::Purge => match handle.purge(JobState::Canceled, Delay::ZERO, Limit::MAX).await? {
                0 => all(Told::Nothing),
                purged => {
                    assert_eq!(purged, ids.len() as u64, "rows that were purged");
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
                    other => panic!("{what}: {other:?}"),
                };
                vec![self.judged(&patch, update)]
            }
            Call::HandOver(update, successor) => {
                let (answer, enqueued) = steps(handle).hand_over(update, successor).await?;
                let told = self.judged(&update.patch, answer);
                let is_new = matches!(told, Told::New(_));
                assert_eq!(enqueued, is_new.then_some(Enqueued::New(successor.id)), "the successor's answer");
                vec![told]
            }
            Call::Emit(event) => match steps(handle).emit(event).await? {
                Emitted::New { woken } => {
                    assert_eq!(woken, ids.len() as u64, "jobs that were woken");
                    all(Told::New(None))
                }
                Emitted::Kept(payload) => {
                    assert_eq!(payload, event.payload);
                    all(Told::Found(None))
                }
            },
            Call::TimeOut => {
                let ended = steps(handle).time_out_waits(Limit::MAX).await?;
                assert!(ended.iter().all(|id| ids.contains(id)), "{ended:?}");
                let told = |id| if ended.contains(id) { Told::New(None) } else { Told::Nothing };
                ids.iter().map(told).collect()
            }
            Call::Migrate => handle.migrate().await.map(|()| all(Told::New(None)))?,
        })
    }

    /// Whether each repetition is answered as the first one is.
    fn is_idempotent(&self) -> bool {
        match &self.call {
            Call::Step(write) => !matches!(write.action, StepAction::Wait(_)),
            call => matches!(call, Call::Extend(_) | Call::Migrate),
        }
    }

    /// Whether the store carries it out on all of its rows or on none.
    pub(crate) fn is_atomic(&self, store: &dyn Store) -> bool {
        let is_one = matches!(&self.call, Call::Step(_) | Call::HandOver(..) | Call::Emit(_));
        is_one || self.is_in_transaction() || store.capabilities().atomic_batches
    }

    /// All that the queue has, by id.
    async fn stored(&self, store: &dyn Store) -> BTreeMap<JobId, Job> {
        let mut filter = ListFilter::default();
        filter.queue = Some(self.recipe.queue.clone());
        let page = store.list(&filter, None, Limit::MAX).await.expect("reads");
        assert!(page.unreadable.is_empty() && page.next.is_none(), "{}: {page:?}", self.recipe.what);
        page.items.into_iter().map(|job| (job.id(), job)).collect()
    }

    /// What is stored of each row: as it was prepared, or as the call leaves it, or this panics.
    pub(crate) async fn rows(&self, store: &dyn Store) -> Vec<Row> {
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
        let written = if self.is_in_transaction() { store.written(self.row()).await } else { 0 };
        let mut rows = Vec::new();
        for (index, id) in self.recipe.ids.iter().enumerate() {
            let successor = match &self.call {
                Call::HandOver(_, successor) => stored.remove(&successor.id),
                _ => None,
            };
            let steps = steps(store).steps(*id).await.expect("reads");
            let mut row = Row { is_done: false, job: stored.remove(id), steps, successor, written };
            if let Some(before) = self.before.get(index).filter(|before| **before != row) {
                assert!(self.is_whole(index, before, &row), "{}: {before:#?} became {row:#?}", self.recipe.what);
                row.is_done = true;
                if let (Call::Extend(_), Some(job)) = (&self.call, &mut row.job) {
                    // All that a repetition moves.
                    job.execution.lease_expires_at = None;
                }
            }
            rows.push(row);
        }
        assert!(stored.is_empty(), "{}: nobody enqueued {stored:?}", self.recipe.what);
        rows
    }

    /// Whether the call, carried out once, makes the one row the other.
    fn is_whole(&self, index: usize, was: &Row, row: &Row) -> bool {
        if row.written != u64::from(self.is_in_transaction()) {
            return false;
        }
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

    /// What was answered is what is stored.
    pub(crate) fn compare(&self, told: &[Told], rows: &[Row]) {
        assert_eq!(told.len(), rows.len());
        for (told, row) in told.iter().zip(rows) {
            assert!(row.is_done && *told != Told::Nothing, "{told:?}, and there is {row:?}");
            if let Told::New(Some(said)) | Told::Found(Some(said)) = told {
                assert_eq!(Some(said), row.job.as_ref().map(|job| &job.execution), "said and stored");
            }
        }
    }

    /// Makes the call again and again until nothing is left to do on these rows, as they were found; then looks at what became of them.
    pub(crate) async fn complete(&self, store: &dyn Store, rows: &[Row]) {
        let mut open: Vec<_> = rows.iter().map(|row| !row.is_done).collect();
        loop {
            match self.call(store).await {
                Ok(told) => {
                    for (told, open) in told.iter().zip(&mut open) {
                        match told {
                            Told::New(_) => assert!(std::mem::take(open) || self.is_idempotent(), "a second time"),
                            Told::Found(_) => assert!(!*open, "{told:?}, and it was not there"),
                            Told::Nothing => {}
                        }
                    }
                }
                // For a moment the rows may still be locked by a session that is gone.
                Err(error) => {
                    let may_repeat = (ErrorKind::Transient, Certainty::NotApplied);
                    assert_eq!((error.kind(), error.certainty()), may_repeat, "{error}");
                }
            }
            if !open.contains(&true) {
                break;
            }
            tokio::task::yield_now().await;
        }
        for (before, after) in rows.iter().zip(self.rows(store).await) {
            assert!(after.is_done, "{after:?}");
            if before.is_done {
                assert_eq!(*before, after, "a repetition changes nothing");
            }
        }
        self.afterwards(store).await;
    }

    /// Gives back what was claimed for nobody, as its worker does; then whatever waits is claimed, once. A new schema serves.
    async fn afterwards(&self, store: &dyn Store) {
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
            let held = store.claimed_by(&self.recipe.worker, Delay::ZERO, None, Limit::MAX).await.expect("reads").items;
            assert!(held.iter().map(|execution| &execution.id).eq(stored.keys()), "{held:?}");
            release_orphans(store, &self.recipe.worker, Delay::ZERO, Limit::MAX, |_| false).await.expect("releases");
            stored = self.stored(store).await;
            for Execution { state, attempt, fence, .. } in stored.values().map(|job| &job.execution) {
                assert_eq!((*state, *attempt, *fence), (JobState::Waiting, 0, 1), "{stored:?}");
            }
        }
        let due = stored.values().filter(|job| job.state() == JobState::Waiting);
        let due: BTreeMap<_, _> = due.map(|job| (job.id(), job.execution.fence + 1)).collect();
        for expected in [due, BTreeMap::new()] {
            let request = claim(&self.recipe.queue, &WorkerId::new(&name("other")), 100);
            let claimed = store.claim(&request).await.expect("claims").jobs;
            let claimed: BTreeMap<_, _> = claimed.iter().map(|job| (job.id(), job.execution.fence)).collect();
            assert_eq!(claimed, expected, "{}: what is due is claimed once", self.recipe.what);
        }
    }
}
