//! Durable steps and waits: a contract of its own, on top of [`Backend`].

use async_trait::async_trait;

use crate::Backend;
use crate::Capabilities;
use crate::Decision;
use crate::Delay;
use crate::Enqueued;
use crate::Error;
use crate::Execution;
use crate::Fingerprint;
use crate::IllegalTransition;
use crate::JobId;
use crate::Json;
use crate::Limit;
use crate::Name;
use crate::NewJob;
use crate::Patch;
use crate::Result;
use crate::Revision;
use crate::Settled;
use crate::Timestamp;
use crate::Transition;
use crate::TransitionError;
use crate::Update;
use crate::UpdateRequest;
use crate::When;
use crate::error::clipped;
use crate::job::check_size;

/// A store that also keeps what a job has done so far, and what it waits for.
///
/// A job that is run again, after a crash or after a wait, finds what it did before under the names that it gave: its *steps*. A
/// *wait* is a step whose value comes from outside: from an *event*, or from the clock.
///
/// # What holds for every method
///
/// What [`Backend`] says, and:
///
/// - **A step is written under its job's fingerprint.** Job and step are judged and written in one atomic step: whoever lost the
///   claim writes nothing, and is told. Since only the holder of a running job, or what ends a wait, writes steps, the
///   steps that a holder has read are what there is until it writes one.
/// - **One row per job and name**, by the store itself.
/// - **A wait is its suspension.** Its identity is the revision that the suspension wrote. An event, or the clock, ends it only
///   while the job is suspended with that revision: once, and never a later wait of the same job.
/// - **Steps go with their job**: a purge deletes them, a rerun keeps them.
#[async_trait]
pub trait DurableSteps: Backend {
    /// The steps of a job, by name; none also if there is no such job. (`steps::are_read_back`)
    ///
    /// # Errors
    ///
    /// A row that cannot be read is an error of kind [`ErrorKind::Schema`](crate::ErrorKind::Schema).
    async fn steps(&self, id: JobId) -> Result<Vec<Step>>;

    /// Writes a step of a job, if the job is what the decision was based on.
    ///
    /// # Contract
    ///
    /// - What becomes of the step is what [`StepAction::plan`] says of what is there, read under the lock of the job. (group `steps`)
    /// - A refusal writes nothing at all, neither step nor job. (`steps::a_lost_claim_writes_nothing`,
    ///   `waits::a_refused_registration_leaves_nothing`)
    /// - Beginning and finishing a step leave the job as it is. (`steps::leave_the_job_alone`)
    /// - A wait whose event is kept ends at once, and the job goes on; else the job is suspended in the same atomic write.
    ///   An event that is emitted at the same time is found or finds the wait: never neither. (`waits::an_event_before_the_wait_is_found`,
    ///   `waits::race_of_registration_and_event`)
    /// - The deadline is resolved by the store's clock when the wait is first registered, and stays when it is registered again.
    ///   (`waits::the_deadline_is_fixed_once`)
    /// - Values come back byte for byte. (`steps::values_are_kept_byte_for_byte`)
    async fn write_step(&self, write: &StepWrite) -> Result<Stepped>;

    /// Ends a job and enqueues another, both or neither.
    ///
    /// # Contract
    ///
    /// - The update is judged as by [`Backend::update_if_current`]; if it is refused, nothing is enqueued and there is no second
    ///   answer. (`handover::a_lost_claim_enqueues_nothing`, `handover::every_field_is_compared`, `handover::of_an_unreadable_job`)
    /// - The new job may have the unique key of the one that ends. (`handover::passes_the_key_on`)
    /// - If another job has its key or its id, that is an error of kind [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) or
    ///   [`ErrorKind::IdReused`](crate::ErrorKind::IdReused), and the first job does not end. (`handover::a_taken_key_ends_nothing`)
    async fn hand_over(&self, update: &UpdateRequest, successor: &NewJob) -> Result<(Update, Option<Enqueued>)>;

    /// Keeps an event, and wakes everybody who waits for it.
    ///
    /// # Contract
    ///
    /// - If an event of this key is kept already, nothing happens and its payload is the answer. (`events::the_first_payload_wins`)
    /// - Otherwise it is kept for its time, by the store's clock, and in the same atomic write every wait for it ends with its payload
    ///   and the job becomes waiting, due now. (`waits::an_event_wakes_all_who_wait`)
    /// - A job that does not wait any more, since it was canceled or its time is over, is not touched. (group `waits`)
    /// - A job that cannot be read keeps the event from nobody else. (`waits::of_unreadable_jobs`)
    async fn emit(&self, event: &NewEvent) -> Result<Emitted>;

    /// Ends waits whose deadline is not after now, at most `limit` of them, those first that are overdue for longest: the step is
    /// timed out and the job becomes waiting, due now, in one atomic write. Answers with the jobs. (group `waits`)
    ///
    /// Jobs that are locked by somebody else are skipped where the store can.
    async fn time_out_waits(&self, limit: Limit) -> Result<Vec<JobId>>;

    /// Deletes events that are kept no longer, at most `limit` of them, and answers how many. (`events::are_kept_for_their_time`)
    async fn purge_events(&self, limit: Limit) -> Result<u64>;
}

/// What a job has done, or waits for, under one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its name, unique within the job.
    pub name: Name,
    /// The fence of the claim that began it, finished it or registered the wait.
    pub fence: u64,
    /// How far it is.
    pub state: StepState,
}

/// How far a step is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepState {
    /// Its effect is under way, or was when its worker died: it may have happened.
    Begun,
    /// The job is suspended until the event comes or the time is over. It waited for it once, if it is not suspended any more.
    Waiting(Wait),
    /// It has this value: what the step produced, or the payload of the event.
    Done(Json),
    /// The time was over before the event came.
    TimedOut,
}

impl StepState {
    /// The name, as stores keep it.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Begun => "begun",
            Self::Waiting(_) => "waiting",
            Self::Done(_) => "done",
            Self::TimedOut => "timed_out",
        }
    }
}

/// A step as a table keeps it, column by column; but for the deadline of a wait, which is when its job is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepColumns<'a> {
    /// Its name.
    pub name: &'a Name,
    /// The fence of the claim that writes it.
    pub fence: u64,
    /// The name of its state.
    pub state: &'static str,
    /// The event that it waits for.
    pub event: Option<&'a Name>,
    /// The suspension that it waits with.
    pub revision: Option<Revision>,
    /// The value that it has.
    pub value: Option<&'a Json>,
}

impl<'a> StepColumns<'a> {
    /// Of a step of [`StepPlan::Write`].
    pub fn of(write: &'a StepWrite, execution: &Execution, state: &'a StepState) -> Self {
        let value = match state {
            StepState::Done(value) => Some(value),
            StepState::Begun | StepState::Waiting(_) | StepState::TimedOut => None,
        };
        Self { name: &write.name, fence: execution.fence, state: state.as_str(), event: None, revision: None, value }
    }

    /// Of a wait of [`StepPlan::Suspend`], once its job is suspended.
    pub fn waiting(write: &'a StepWrite, suspended: &Execution) -> Self {
        let event = match &write.action {
            StepAction::Wait(wait) => wait.event.as_ref(),
            StepAction::Begin | StepAction::Finish(_) => None,
        };
        let (fence, revision) = (suspended.fence, Some(suspended.revision));
        Self { name: &write.name, fence, state: "waiting", event, revision, value: None }
    }
}

impl StepState {
    /// From the columns of a row.
    ///
    /// # Errors
    ///
    /// What is wrong with them.
    pub fn from_columns(
        state: &str,
        event: Option<Name>,
        until: Option<Timestamp>,
        revision: Option<Revision>,
        value: Option<Json>,
    ) -> Result<Self, String> {
        match state {
            "begun" => Ok(Self::Begun),
            "timed_out" => Ok(Self::TimedOut),
            "done" => value.map(Self::Done).ok_or_else(|| "value: missing".to_owned()),
            "waiting" => {
                let until = until.ok_or("until: missing")?;
                let revision = revision.ok_or("revision: missing")?;
                Ok(Self::Waiting(Wait { event, until, revision }))
            }
            other => Err(format!("state: {other:?} is unknown to this version")),
        }
    }
}

/// The error for a step that cannot be read; see [`DurableSteps::steps`].
pub fn unreadable_step(id: JobId, reason: impl std::fmt::Display) -> Error {
    let message = format!("a step of job {id} cannot be read: {}", clipped(reason));
    Error::not_applied(crate::ErrorKind::Schema, message)
}

/// The error for a kept event that cannot be read.
pub fn unreadable_event(key: &Name, reason: impl std::fmt::Display) -> Error {
    Error::not_applied(crate::ErrorKind::Schema, format!("the event {key:?} cannot be read: {}", clipped(reason)))
}

/// What a job waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The event's key; without one it waits for the time alone.
    pub event: Option<Name>,
    /// Until when.
    pub until: Timestamp,
    /// The revision that the suspension wrote: the identity of the wait.
    pub revision: Revision,
}

/// One step to be written, and the job that it is checked against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepWrite {
    /// The job.
    pub id: JobId,
    /// What the decision was based on.
    pub current: Fingerprint,
    /// The step.
    pub name: Name,
    /// What is done to it.
    pub action: StepAction,
}

impl StepWrite {
    /// The compare-and-update of the job that checks whether the write is allowed: it changes nothing yet.
    pub fn check(&self) -> UpdateRequest {
        UpdateRequest { id: self.id, current: self.current.clone(), patch: Patch::keep(&self.current) }
    }

    /// Refuses a value over the store's cap. Every backend calls it before it writes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::TooLarge`](crate::ErrorKind::TooLarge), not applied.
    pub fn check_size(&self, capabilities: &Capabilities) -> Result<()> {
        match &self.action {
            StepAction::Finish(value) => check_size("value of the step", value, capabilities.max_payload),
            StepAction::Begin | StepAction::Wait(_) => Ok(()),
        }
    }
}

/// What is done to a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepAction {
    /// Its effect is about to happen.
    Begin,
    /// Its effect has happened and produced this.
    Finish(Json),
    /// The job waits for something.
    Wait(NewWait),
}

/// A wait to register.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewWait {
    /// The event's key; without one the job waits for the time alone.
    pub event: Option<Name>,
    /// The suspension of the job: when it is due is the deadline, and its new revision is the wait's identity.
    pub suspension: Patch,
}

/// What becomes of a step, and of its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepPlan {
    /// Both stay as they are.
    Keep,
    /// The step becomes this, the job stays as it is.
    Write(StepState),
    /// The job is changed by this patch, and the step becomes waiting with the time at which the job is then available.
    Suspend(Patch),
}

impl StepAction {
    /// What becomes of a step of which this much is `there`, when the event that it would wait for is kept with this payload.
    ///
    /// A step that has ended stays as it is, whatever is done to it: the caller sees that in the answer. So does a wait that is
    /// taken for a step.
    pub fn plan(&self, there: Option<&StepState>, event: Option<&Json>) -> StepPlan {
        match (self, there) {
            (_, Some(StepState::Done(_) | StepState::TimedOut)) => StepPlan::Keep,
            (Self::Begin | Self::Finish(_), Some(StepState::Waiting(_))) => StepPlan::Keep,
            (Self::Begin, None | Some(StepState::Begun)) => StepPlan::Write(StepState::Begun),
            (Self::Finish(value), None | Some(StepState::Begun)) => StepPlan::Write(StepState::Done(value.clone())),
            (Self::Wait(wait), there) => match (event, there) {
                (Some(payload), _) => StepPlan::Write(StepState::Done(payload.clone())),
                (None, Some(StepState::Waiting(before))) => {
                    StepPlan::Suspend(Patch { available: Some(When::At(before.until)), ..wait.suspension.clone() })
                }
                (None, _) => StepPlan::Suspend(wait.suspension.clone()),
            },
        }
    }
}

/// What became of a step that was to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stepped {
    /// What became of the job; anything but [`Update::Applied`] is a refusal.
    pub update: Update,
    /// The step as it is now: as it was written, or as it was, if it had ended before. `None` after a refusal.
    pub step: Option<Step>,
}

impl Stepped {
    /// Nothing was written.
    pub fn refused(update: Update) -> Self {
        Self { update, step: None }
    }
}

/// An event to emit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewEvent {
    /// What it is about: those who wait for this very key are woken.
    pub key: Name,
    /// What they get.
    pub payload: Json,
    /// How long it is kept for those who come later.
    pub keep: Delay,
}

impl NewEvent {
    /// Refuses a payload over the store's cap. Every backend calls it before it writes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::TooLarge`](crate::ErrorKind::TooLarge), not applied.
    pub fn check(&self, capabilities: &Capabilities) -> Result<()> {
        check_size("payload of the event", &self.payload, capabilities.max_payload)
    }
}

/// What became of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Emitted {
    /// It is kept, and so many waits ended with it.
    New {
        /// How many.
        woken: u64,
    },
    /// One of this key was kept already, with this payload.
    Kept(Json),
}

/// A step that could not be begun or finished.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The job is not any more what the decision was based on; or the store failed.
    #[error(transparent)]
    Transition(#[from] TransitionError),
    /// The step has a value already, and it is another one.
    #[error("job {id}: the step {name} has another value already: {stored}")]
    OtherValue {
        /// The job.
        id: JobId,
        /// The step.
        name: Name,
        /// Its value.
        stored: Json,
    },
    /// The name belongs to a wait of the job.
    #[error("job {id}: {name} is a wait and no step")]
    IsWait {
        /// The job.
        id: JobId,
        /// The name.
        name: Name,
    },
}

impl From<Error> for StepError {
    fn from(error: Error) -> Self {
        TransitionError::from(error).into()
    }
}

/// Begins a step: to be called before its effect happens. Answers with its value if it has one: then the effect happened already.
///
/// It may be called again after any error.
///
/// # Errors
///
/// See [`StepError`]. After any of them the effect must not happen.
pub async fn begin_step<B>(backend: &B, seen: &Execution, name: &Name) -> Result<Option<Json>, StepError>
where
    B: DurableSteps + ?Sized,
{
    match write_step(backend, seen, name, StepAction::Begin).await? {
        StepState::Begun => Ok(None),
        StepState::Done(value) => Ok(Some(value)),
        StepState::Waiting(_) | StepState::TimedOut => Err(StepError::IsWait { id: seen.id, name: name.clone() }),
    }
}

/// Saves what a step produced. Saving the same again is success: it may be called again after any error.
///
/// # Errors
///
/// See [`StepError`].
pub async fn finish_step<B>(backend: &B, seen: &Execution, name: &Name, value: &Json) -> Result<(), StepError>
where
    B: DurableSteps + ?Sized,
{
    match write_step(backend, seen, name, StepAction::Finish(value.clone())).await? {
        StepState::Done(stored) if stored == *value => Ok(()),
        StepState::Done(stored) => Err(StepError::OtherValue { id: seen.id, name: name.clone(), stored }),
        _ => Err(StepError::IsWait { id: seen.id, name: name.clone() }),
    }
}

async fn write_step<B>(
    backend: &B,
    seen: &Execution,
    name: &Name,
    action: StepAction,
) -> Result<StepState, TransitionError>
where
    B: DurableSteps + ?Sized,
{
    let transition = if matches!(action, StepAction::Begin) { "begin of a step" } else { "end of a step" };
    let write = StepWrite { id: seen.id, current: seen.fingerprint(), name: name.clone(), action };
    let mut decision = Decision::of(seen, transition, write.check());
    match backend.write_step(&write).await {
        Ok(Stepped { update, step }) => {
            decision.judge(Ok(update))?;
            match step {
                Some(step) => Ok(step.state),
                None => Err(no_second_answer(seen.id).into()),
            }
        }
        Err(error) => Err(decision.judge(Err(error)).err().unwrap_or_else(|| no_second_answer(seen.id).into())),
    }
}

fn no_second_answer(id: JobId) -> Error {
    let message = format!("job {id}: the store says that it wrote, but not what");
    Error::new(crate::ErrorKind::Permanent, crate::Certainty::Unknown, message)
}

/// A decision to suspend a job until an event comes or a time is over. Like every [`Decision`] it may be submitted as often as errors make
/// it necessary.
#[derive(Clone, Debug)]
pub struct Suspension {
    decision: Decision,
    name: Name,
    event: Option<Name>,
}

/// What became of a [`Suspension`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Suspended {
    /// The job waits, and is held by nobody.
    Waits(Settled),
    /// The wait is over already, with this payload: the job runs on.
    Came(Json),
    /// The time was over before: the job runs on.
    TimedOut,
}

impl Suspension {
    /// Decides on it. `until` is the deadline, unless the wait has one from an earlier registration.
    ///
    /// # Errors
    ///
    /// A job that was not seen running.
    pub fn new(seen: &Execution, name: Name, event: Option<Name>, until: When) -> Result<Self, IllegalTransition> {
        Ok(Self { decision: Decision::new(seen, &Transition::Suspend { until })?, name, event })
    }

    /// Submits it: for the first time, or again.
    ///
    /// # Errors
    ///
    /// See [`StepError`].
    pub async fn submit<B: DurableSteps + ?Sized>(&mut self, backend: &B) -> Result<Suspended, StepError> {
        let UpdateRequest { id, current, patch } = self.decision.request().clone();
        let action = StepAction::Wait(NewWait { event: self.event.clone(), suspension: patch });
        let write = StepWrite { id, current, name: self.name.clone(), action };
        let answer = self.decision.send(|_| backend.write_step(&write)).await;
        let (update, step) = match answer {
            Ok(Stepped { update, step }) => (Ok(update), step),
            Err(error) => (Err(error), None),
        };
        let runs_on = matches!(&update, Ok(Update::Applied(execution)) if execution.state.is_held());
        let settled = self.decision.judge(update)?;
        match step.map(|step| step.state) {
            Some(StepState::Done(payload)) if runs_on => Ok(Suspended::Came(payload)),
            Some(StepState::TimedOut) if runs_on => Ok(Suspended::TimedOut),
            _ if runs_on => Err(TransitionError::from(no_second_answer(id)).into()),
            _ => Ok(Suspended::Waits(settled)),
        }
    }
}

/// A decision to complete a job and to enqueue another in its place. Like every [`Decision`] it may be submitted as often as errors make it
/// necessary.
#[derive(Clone, Debug)]
pub struct HandOver {
    decision: Decision,
    successor: NewJob,
}

impl HandOver {
    /// Decides on it.
    ///
    /// # Errors
    ///
    /// A job that was not seen running.
    pub fn new(seen: &Execution, result: Option<Json>, successor: NewJob) -> Result<Self, IllegalTransition> {
        Ok(Self { decision: Decision::new(seen, &Transition::Complete { result })?, successor })
    }

    /// Submits it: for the first time, or again.
    ///
    /// # Errors
    ///
    /// See [`TransitionError`].
    pub async fn submit<B: DurableSteps + ?Sized>(&mut self, backend: &B) -> Result<Settled, TransitionError> {
        let answer = self.decision.send(|update| backend.hand_over(update, &self.successor)).await;
        self.decision.judge(answer.map(|(update, _)| update))
    }
}
