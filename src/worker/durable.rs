//! Handlers whose jobs go on where they were: steps, waits, children.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use queue_core::Delay;
use queue_core::DurableSteps;
use queue_core::Enqueued;
use queue_core::ErrorKind;
use queue_core::HandOver;
use queue_core::Invalid;
use queue_core::JobId;
use queue_core::JobState;
use queue_core::Json;
use queue_core::Name;
use queue_core::NewJob;
use queue_core::StepError;
use queue_core::StepState;
use queue_core::Suspended;
use queue_core::Suspension;
use queue_core::TransitionError;
use queue_core::When;
use queue_core::begin_step;
use queue_core::finish_step;
use serde::Deserialize;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::OnceCell;
use tokio::time::Instant;
use tokio::time::sleep;
use tokio::time::timeout;

use super::JobContext;
use super::NotDone;
use super::announce;
use super::heartbeat::no_answer;
use super::held::UnderWay;
use super::held::lock;
use super::report::Counted;
use crate::JobArgs;
use crate::events;
use crate::repeat::Backoff;
use crate::repeat::may_pass;

/// The context of a handler whose job keeps what it has done; see [`WorkerBuilder::register_durable`](crate::WorkerBuilder::register_durable).
/// It is a [`JobContext`] as well.
///
/// The handler runs from its beginning whenever the job does: after a failure, a crash, a wait. What it did before by
/// [`step`](Self::step) is not done again, but read back; what it waited for by [`wait_for`](Self::wait_for) is there. Everything
/// outside of steps is done again each time. So what a handler does must depend on nothing but its arguments and the
/// values of its steps: the time, random numbers and what other systems say belong into steps.
///
/// Each step and wait has a name that is its own within the job, and stays the same from one release to the next as long as
/// jobs are under way. Using one for two calls of a run is an error. Steps may be under way side by side, as by `join!`; while one is, the
/// job cannot be given up, by a wait or otherwise, and a job waits for one thing at a time.
///
/// ```
/// # use std::time::Duration;
/// # use fenced_queue::{DurableContext, JobArgs, NotDone};
/// # #[derive(serde::Serialize, serde::Deserialize)]
/// # struct Order { id: u64, cents: u64 }
/// # impl JobArgs for Order { const KIND: &'static str = "order"; }
/// # async fn charge(key: &str, cents: u64) -> Result<u64, std::io::Error> { Ok(cents) }
/// # async fn ship(key: &str) -> Result<String, std::io::Error> { Ok("parcel".into()) }
/// # async fn refund(key: &str) -> Result<(), std::io::Error> { Ok(()) }
/// async fn order(context: DurableContext, args: Order) -> Result<&'static str, NotDone> {
///     context.step("charge", |key| async move { Ok(charge(&key, args.cents).await?) }).await?;
///     let paid: Option<u64> = context.wait_for("payment", format!("paid/{}", args.id), Duration::from_secs(3)).await?;
///     match paid {
///         Some(_) => context.step("ship", |key| async move { Ok(ship(&key).await?) }).await.map(|_| "shipped"),
///         None => context.step("refund", |key| async move { Ok(refund(&key).await?) }).await.map(|()| "refunded"),
///     }
/// }
/// ```
#[derive(Clone)]
pub struct DurableContext {
    job: JobContext,
    run: Arc<Run>,
}

/// What the calls of one run share.
#[derive(Default)]
struct Run {
    /// The steps as they were when the run began: nobody else writes any while it goes on.
    before: OnceCell<BTreeMap<Name, StepState>>,
    under_way: Mutex<Activity>,
}

/// What a run is about.
#[derive(Default)]
struct Activity {
    /// The names that were used.
    names: BTreeSet<Name>,
    /// How many effects are.
    effects: usize,
    /// A wait is, or was registered: the job is given up.
    wait: bool,
}

/// A name that a call of this run uses. It is given back if the call ends in an error or is dropped.
struct Used<'a> {
    run: &'a Run,
    name: Name,
    keep: bool,
}

impl Drop for Used<'_> {
    fn drop(&mut self) {
        if !self.keep {
            lock(&self.run.under_way).names.remove(&self.name);
        }
    }
}

/// An effect, or a wait, that is under way.
struct Busy<'a> {
    run: &'a Run,
    wait: bool,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        let mut under_way = lock(&self.run.under_way);
        match self.wait {
            true => under_way.wait = false,
            false => under_way.effects -= 1,
        }
    }
}

impl Run {
    fn use_name(&self, name: Name) -> Result<Used<'_>, NotDone> {
        if !lock(&self.under_way).names.insert(name.clone()) {
            let text = format!("the step {name} was used twice in one run: each has a name of its own");
            return Err(NotDone::fail(text));
        }
        Ok(Used { run: self, name, keep: false })
    }

    fn begin_effect(&self, name: &Name) -> Result<Busy<'_>, NotDone> {
        let mut under_way = lock(&self.under_way);
        if under_way.wait {
            return Err(NotDone::fail(format_args!("the step {name} began while the job was about to wait")));
        }
        under_way.effects += 1;
        Ok(Busy { run: self, wait: false })
    }

    /// The job is about to be given up.
    fn begin_wait(&self, name: &Name) -> Result<Busy<'_>, NotDone> {
        let mut under_way = lock(&self.under_way);
        if under_way.effects > 0 {
            return Err(NotDone::fail(format_args!(
                "{name} would give the job up while one of its steps is under way"
            )));
        }
        if std::mem::replace(&mut under_way.wait, true) {
            return Err(NotDone::fail(format_args!("{name} began while the job was about to wait for something else")));
        }
        Ok(Busy { run: self, wait: true })
    }
}

/// A job that another one enqueued by [`DurableContext::spawn`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Child {
    id: JobId,
}

impl Child {
    /// The job.
    pub fn id(&self) -> JobId {
        self.id
    }
}

/// How a child ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ChildOutcome {
    /// Completed, failed or canceled.
    pub state: JobState,
    /// What it completed with.
    pub result: Option<Json>,
    /// The last failure, or the reason of the cancellation.
    pub error: Option<String>,
}

/// How long a call is made again: as long as a lease, as an outcome is.
struct Patience {
    lease: Duration,
    began: Instant,
    backoff: Backoff,
}

impl Patience {
    fn new(lease: Duration) -> Self {
        Self { lease, began: Instant::now(), backoff: Backoff::default() }
    }

    /// Awaits a call that recognises its own repetition. `None` if it is to be made again; then a pause has passed. A call that hangs is as
    /// good as one whose answer was lost.
    async fn ask<T, E: Into<StepError>>(
        &mut self,
        call: impl Future<Output = Result<T, E>>,
    ) -> Result<Option<T>, NotDone> {
        let error = match timeout(self.lease / 3, call).await {
            Ok(Ok(answer)) => return Ok(Some(answer)),
            Ok(Err(error)) => error.into(),
            Err(_) => no_answer().into(),
        };
        match error {
            StepError::Transition(TransitionError::Backend(error))
                if may_pass(&error) && self.began.elapsed() < self.lease =>
            {
                sleep(self.backoff.pause()).await;
                Ok(None)
            }
            // What is too large now is so the next time, and the effect would happen again for nothing.
            StepError::Transition(TransitionError::Backend(error)) if error.kind() == ErrorKind::TooLarge => {
                Err(NotDone::fail(error))
            }
            error @ StepError::Transition(_) => Err(NotDone::from(error)),
            // Not by this worker, nor by any other: the handler does not fit what is stored.
            error => Err(NotDone::fail(error)),
        }
    }
}

/// Makes a call until it is answered, as [`Patience`] says.
macro_rules! insist {
    ($context:expr, $call:expr) => {{
        let mut patience = Patience::new($context.job.lease);
        loop {
            if let Some(answer) = patience.ask($call).await? {
                break answer;
            }
        }
    }};
}

impl DurableContext {
    pub(super) fn new(job: JobContext) -> Self {
        Self { job, run: Arc::default() }
    }

    fn steps(&self) -> Result<&dyn DurableSteps, NotDone> {
        // The worker was not built without them.
        self.job.backend.durable_steps().ok_or_else(|| NotDone::fail("the store has no durable steps"))
    }

    /// Takes a name for one call of this run, and tells what is stored under it.
    async fn take(&self, name: Result<Name, Invalid>) -> Result<(Used<'_>, Option<StepState>), NotDone> {
        let name = name.map_err(|error| NotDone::fail(format_args!("a step: {error}")))?;
        let used = self.run.use_name(name)?;
        let read = || async {
            let steps = self.steps()?;
            let read = insist!(self, steps.steps(self.id()));
            Ok::<_, NotDone>(read.into_iter().map(|step| (step.name, step.state)).collect())
        };
        let before: &BTreeMap<_, _> = self.run.before.get_or_try_init(read).await?;
        let state = before.get(&used.name).cloned();
        Ok((used, state))
    }

    /// Does something once: `effect` runs unless a value is stored under this name, and its value is stored.
    ///
    /// Before it runs, the store notes that it does, and only for who holds the job: a worker that lost its claim is refused before
    /// anything happens. If the worker dies before the value is stored, `effect` runs again: it gets a key, the same every
    /// time and no other step's, by which the system that it talks to can know it again.
    ///
    /// An error of `effect` is that of the call, and nothing is stored: it runs again with the next attempt.
    ///
    /// # Errors
    ///
    /// What `effect` ends with; a lost claim; a name that was used before in this run or for a wait; a stored value that is no `T`; a
    /// value that is no JSON or over the store's cap; or a failure of the store that does not pass for as long as a lease.
    pub async fn step<T, F, Fut>(&self, name: impl AsRef<str>, effect: F) -> Result<T, NotDone>
    where
        T: Serialize + DeserializeOwned,
        F: FnOnce(String) -> Fut,
        Fut: Future<Output = Result<T, NotDone>>,
    {
        let (mut used, before) = self.take(step_name(name.as_ref())).await?;
        let (name, steps) = (used.name.clone(), self.steps()?);
        let value = match before {
            Some(StepState::Done(value)) => value,
            _ => {
                let _under_way = self.run.begin_effect(&name)?;
                match insist!(self, begin_step(steps, self.execution(), &name)) {
                    Some(value) => value,
                    None => {
                        let value = effect(format!("{}/{name}", self.id())).await?;
                        let value =
                            Json::encode(&value).map_err(|error| NotDone::fail(format_args!("{name}: {error}")))?;
                        insist!(self, finish_step(steps, self.execution(), &name, &value));
                        value
                    }
                }
            }
        };
        used.keep = true;
        // Also in the first run: what a later one reads back is what this one goes on with.
        decode(&name, &value)
    }

    /// Waits for an event, at most so long: `None` if it did not come in time.
    ///
    /// If it is not there, the job is suspended and given up, its attempt back, and this call ends with a [`NotDone`] that the handler must
    /// pass on, as `?` does: what it did otherwise would not count, a second wait neither: a job waits for one thing at a time. When the event comes, or the time is over, the job runs again
    /// from its beginning, and this call then answers. The time counts from when the job first waited, by the store's clock.
    ///
    /// # Errors
    ///
    /// The wait itself; a lost claim; a name that was used before in this run; a payload that is no `T`; or a failure of the store.
    pub async fn wait_for<T: DeserializeOwned>(
        &self,
        name: impl AsRef<str>,
        event: impl AsRef<str>,
        timeout: Duration,
    ) -> Result<Option<T>, NotDone> {
        let event = event.as_ref();
        let key = events::key(event).map_err(|error| NotDone::fail(format_args!("event {event:?}: {error}")))?;
        let came = self.suspend(wait_name(name.as_ref()), Some(key), timeout).await?;
        came.map(|payload| decode(event, &payload)).transpose()
    }

    /// Gives the job up for so long. As [`wait_for`](Self::wait_for) without an event.
    ///
    /// # Errors
    ///
    /// As [`wait_for`](Self::wait_for).
    pub async fn sleep(&self, name: impl AsRef<str>, time: Duration) -> Result<(), NotDone> {
        self.suspend(wait_name(name.as_ref()), None, time).await.map(drop)
    }

    async fn suspend(
        &self,
        name: Result<Name, Invalid>,
        event: Option<Name>,
        time: Duration,
    ) -> Result<Option<Json>, NotDone> {
        let (mut used, before) = self.take(name).await?;
        let came = match before {
            Some(StepState::Done(payload)) => Some(payload),
            Some(StepState::TimedOut) => None,
            _ => {
                let busy = self.run.begin_wait(&used.name)?;
                let until = When::After(Delay::saturating(time));
                let suspension = Suspension::new(self.execution(), used.name.clone(), event, until);
                let mut suspension = suspension.map_err(|error| NotDone::retry(error.to_string()))?;
                let (steps, _under_way) = (self.steps()?, self.begin_write()?);
                match insist!(self, suspension.submit(steps)) {
                    Suspended::Came(payload) => Some(payload),
                    Suspended::TimedOut => None,
                    Suspended::Waits(_) => {
                        self.job.claim.recorded(Counted::Suspended);
                        // Nothing more begins in this run.
                        std::mem::forget(busy);
                        // Counted from the answer: never before the store thinks that the time is over.
                        self.job.alarm.set(Instant::now().checked_add(time));
                        return Err(NotDone::suspended());
                    }
                }
            }
        };
        used.keep = true;
        Ok(came)
    }

    /// As long as this is under way nobody else offers an outcome; if it is given up, they may.
    fn begin_write(&self) -> Result<UnderWay, NotDone> {
        self.job.claim.begin_write().ok_or_else(|| NotDone::retry("this execution has an outcome already"))
    }

    /// Emits an event once, as a step of this name; see [`Queue::emit`](crate::Queue::emit). It is kept for a week.
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step).
    pub async fn emit<T: Serialize + ?Sized>(
        &self,
        name: impl AsRef<str>,
        event: impl AsRef<str>,
        payload: &T,
    ) -> Result<(), NotDone> {
        let steps = self.steps()?;
        let event = events::new(event.as_ref(), payload).map_err(NotDone::fail)?;
        let emit = async |_| {
            insist!(self, steps.emit(&event));
            Ok(())
        };
        self.step(name, emit).await
    }

    /// Enqueues a job once, as a step of this name, to be awaited by [`outcome`](Self::outcome).
    /// [`Enqueue::into_job`](crate::Enqueue::into_job) makes it; its id is made here, of this job's and the name: however often it is
    /// enqueued, it is one job, and what was enqueued first counts.
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step). A unique key that another job has is a failed attempt.
    pub async fn spawn(&self, name: impl AsRef<str>, job: NewJob) -> Result<Child, NotDone> {
        let name = name.as_ref();
        let job = NewJob { id: self.id().child(name), ..job };
        let enqueue = async || match self.job.backend.enqueue(std::slice::from_ref(&job)).await {
            Err(error) if error.kind() == ErrorKind::IdReused => Ok(Vec::new()),
            answer => answer,
        };
        let once = async |_| match insist!(self, enqueue())[..] {
            [Enqueued::Duplicate { existing }] => {
                Err(NotDone::retry(format_args!("job {existing} has the unique key of the child")))
            }
            _ => Ok(()),
        };
        self.step(name, once).await?;
        Ok(Child { id: job.id })
    }

    /// Waits until a child has ended, and tells how; from then on the answer is stored under this name.
    ///
    /// Workers announce the end of a child to who waits for it. Where that is lost, with the worker or because an operator ended the
    /// child, the job looks for itself: after a minute, and after longer and longer times up to an hour.
    ///
    /// The end is that of the very job that was spawned: one that continues as another is completed. A child that is purged before its
    /// parent has looked fails the parent: keep ended jobs for longer than their parents are under way.
    ///
    /// # Errors
    ///
    /// As [`wait_for`](Self::wait_for); a child that was deleted; a result that together with what else is stored is over the
    /// store's cap.
    pub async fn outcome(&self, name: impl AsRef<str>, child: &Child) -> Result<ChildOutcome, NotDone> {
        let (mut used, before) = self.take(step_name(name.as_ref())).await?;
        if let Some(StepState::Done(outcome)) = before {
            used.keep = true;
            return decode(&used.name, &outcome);
        }
        let (mut pause, mut event) = (LOOKS, Some(announce::key(child.id)));
        for look in 1.. {
            let job = insist!(self, self.job.backend.get(child.id));
            let job = job.ok_or_else(|| NotDone::fail(format_args!("the child {} was deleted", child.id)))?;
            if job.state().is_final() {
                let error = job.errors.last().filter(|_| job.state() != JobState::Completed);
                let error = error.map(|failure| failure.text.to_string());
                let outcome = ChildOutcome { state: job.state(), result: job.result, error };
                let (steps, json) = (self.steps()?, Json::encode(&outcome)?);
                insist!(self, finish_step(steps, self.execution(), &used.name, &json));
                used.keep = true;
                return Ok(outcome);
            }
            let wait = wait_name(&format!("look {look} for {}", child.id));
            if self.suspend(wait, event.clone(), pause).await?.is_some() {
                // It had ended and runs again: what is kept of its first end tells nothing of the second.
                event = None;
            }
            pause = pause.saturating_mul(2).min(RAREST);
        }
        unreachable!("the loop has no end")
    }

    /// Completes this job and enqueues another one, of the same queue, priority, attempts and unique key, in its place, in one write: for
    /// what goes on for ever, and whose steps would become too many. What the handler returns after that changes nothing.
    ///
    /// # Errors
    ///
    /// A value that is no JSON or over the store's cap; a step that is under way; a lost claim; or a failure of the store that does not
    /// pass for as long as a lease.
    pub async fn continue_as_new<A: JobArgs>(&self, args: &A) -> Result<JobId, NotDone> {
        let invalid = |error: Invalid| NotDone::fail(format_args!("the successor: {error}"));
        let kind = Name::try_from(A::KIND).map_err(invalid)?;
        let mut successor = NewJob::new(self.queue().clone(), kind, Json::encode(args).map_err(invalid)?);
        successor.max_attempts = self.execution().max_attempts;
        successor.priority = self.job.priority;
        successor.unique_key = self.job.unique_key.clone();
        let (id, busy) = (successor.id, self.run.begin_wait(&successor.kind)?);
        let hand_over = HandOver::new(self.execution(), None, successor);
        let mut hand_over = hand_over.map_err(|error| NotDone::retry(error.to_string()))?;
        let (steps, _under_way) = (self.steps()?, self.begin_write()?);
        insist!(self, hand_over.submit(steps));
        self.job.claim.recorded(Counted::Completed);
        std::mem::forget(busy);
        Ok(id)
    }
}

/// When a job first looks for a child whose end nobody announced, and the longest pause between two looks.
const LOOKS: Duration = Duration::from_secs(60);
const RAREST: Duration = Duration::from_secs(3_600);

fn decode<T: DeserializeOwned>(name: impl fmt::Display, value: &Json) -> Result<T, NotDone> {
    value
        .decode()
        .map_err(|error| NotDone::retry(format_args!("the value of {name} does not fit the handler: {error}")))
}

/// What the names of waits begin with in the store, so that none is taken for a step.
const WAIT: &str = "wait/";

fn step_name(name: &str) -> Result<Name, Invalid> {
    match name.starts_with(WAIT) {
        true => Err(Invalid::malformed("name of a step", format_args!("{WAIT} is the beginning of waits"))),
        false => name.parse(),
    }
}

fn wait_name(name: &str) -> Result<Name, Invalid> {
    format!("{WAIT}{name}").parse()
}

impl Deref for DurableContext {
    type Target = JobContext;

    fn deref(&self) -> &JobContext {
        &self.job
    }
}

impl fmt::Debug for DurableContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DurableContext").field("job", &self.job).finish_non_exhaustive()
    }
}
