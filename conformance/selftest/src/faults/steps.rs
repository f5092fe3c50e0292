//! Steps: what they are written under, what is written, and what is read back.

use std::sync::atomic::Ordering;

use async_trait::async_trait;
use queue_core::*;

use super::compare::Field;
use super::compare::invented;
use super::data::normalised;
use crate::Fault;
use crate::broken::Real;
use crate::broken::gap;
use crate::fault::Wrong;

const FIELDS: &[&str] = &["steps::every_field_is_compared"];
const NAMES: &[&str] = &["steps::names_are_compared_byte_for_byte"];
const SURVIVE: &[&str] = &["steps::survive_what_the_job_goes_through"];

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "steps::undeclared",
        &Undeclared,
        "There are durable steps, and they are not declared.",
        &["steps::are_there_as_declared"],
    )
    .everywhere(),
    Fault::new(
        "steps::not_passed_on",
        &NotPassedOn,
        "A wrapper leaves the provided `durable_steps`, which has none.",
        &["steps::are_there_as_declared", "steps::are_read_back"],
    )
    .everywhere(),
    Fault::new(
        "steps::only_those_with_a_value",
        &Reads(|steps| steps.retain(|step| step.state != StepState::Begun)),
        "Steps that were begun and not finished are not read back.",
        &["steps::are_read_back", "steps::a_newer_claim_takes_over"],
    )
    .everywhere(),
    Fault::new(
        "steps::unordered",
        &Reads(|steps| steps.reverse()),
        "Steps come in any order.",
        &["steps::are_read_back", "steps::many_of_one_job"],
    )
    .everywhere(),
    Fault::new(
        "steps::first_page_only",
        &Reads(|steps| steps.truncate(100)),
        "A hundred steps are read.",
        &["steps::many_of_one_job"],
    )
    .everywhere(),
    Fault::new(
        "steps::begins_again",
        &Forgets(|action, there| *action == StepAction::Begin && matches!(there, StepState::Done(_))),
        "Beginning a step overwrites its value.",
        &["steps::a_finished_step_is_not_begun_again", "steps::survive_what_the_job_goes_through"],
    ),
    Fault::new(
        "steps::a_begun_one_is_begun",
        &Answers(|write, stepped| match (&write.action, stepped.step.take()) {
            (StepAction::Begin, Some(step)) => stepped.step = Some(Step { state: StepState::Begun, ..step }),
            (_, step) => stepped.step = step,
        }),
        "`ON CONFLICT DO NOTHING`: whoever begins a step is told that it is begun, whatever is there.",
        &["steps::a_finished_step_is_not_begun_again", "waits::a_step_is_no_wait"],
    )
    .everywhere(),
    Fault::new(
        "steps::unfenced",
        &Compares(|seen, there| *seen = there.fingerprint()),
        "Steps are written whoever has the job.",
        &[
            "steps::a_lost_claim_writes_nothing",
            "steps::race_of_old_and_new_holder",
            "steps::only_of_a_job_that_is_there",
            "steps::every_field_is_compared",
            "waits::a_refused_registration_leaves_nothing",
            "waits::a_replayed_registration_is_recognised",
        ],
    )
    .everywhere(),
    Fault::new(
        "steps::written_before_the_check",
        &Keeps(|_| true),
        "The step is written, then the job is compared, and nothing is undone.",
        &["steps::a_lost_claim_writes_nothing", "steps::every_field_is_compared", "steps::of_an_unreadable_job"],
    ),
    Fault::new(
        "steps::fenced_by_the_state",
        &Compares(|seen, there| {
            if there.state == seen.state {
                *seen = there.fingerprint();
            }
        }),
        "Any claim may write the steps of a running job.",
        &["steps::a_lost_claim_writes_nothing", "steps::every_field_is_compared"],
    )
    .everywhere(),
    Fault::new(
        "steps::ignores_a_field/state",
        &Compares(|seen, there| Field::State.take(seen, there)),
        "The state of a step's job is not compared.",
        FIELDS,
    ),
    Fault::new(
        "steps::ignores_a_field/attempt",
        &Compares(|seen, there| Field::Attempt.take(seen, there)),
        "The attempt of a step's job is not compared.",
        FIELDS,
    ),
    Fault::new(
        "steps::ignores_a_field/claimed_by",
        &Compares(|seen, there| Field::ClaimedBy.take(seen, there)),
        "The holder of a step's job is not compared.",
        FIELDS,
    ),
    Fault::new(
        "steps::ignores_a_field/claimed_at",
        &Compares(|seen, there| Field::ClaimedAt.take(seen, there)),
        "The time of the claim of a step's job is not compared.",
        FIELDS,
    ),
    Fault::new(
        "steps::ignores_a_field/attempted_at",
        &Compares(|seen, there| Field::AttemptedAt.take(seen, there)),
        "The time of the start of a step's job is not compared.",
        FIELDS,
    ),
    Fault::new(
        "steps::ignores_a_field/revision",
        &Compares(|seen, there| Field::Revision.take(seen, there)),
        "The revision of a step's job is not compared.",
        FIELDS,
    )
    .everywhere(),
    Fault::new(
        "steps::checks_then_writes",
        &Does(Mode::ChecksThenWrites),
        "The job is compared in one statement, and the step written in a second one.",
        &["steps::race_of_old_and_new_holder"],
    ),
    Fault::new(
        "steps::renew_the_revision",
        &Does(Mode::RenewTheRevision),
        "A step makes a new moment of its job.",
        &["steps::leave_the_job_alone"],
    )
    .everywhere(),
    Fault::new(
        "steps::through_a_parser",
        &Writes(|write| {
            if let StepAction::Finish(value) = &mut write.action {
                *value = normalised(value);
            }
        }),
        "Values go through a JSON parser.",
        &["steps::values_are_kept_byte_for_byte"],
    )
    .everywhere(),
    Fault::new(
        "steps::null_is_no_value",
        &Writes(|write| {
            if write.action == StepAction::Finish(Json::null()) {
                write.action = StepAction::Begin;
            }
        }),
        "A step that produced null has no value.",
        &["steps::values_are_kept_byte_for_byte"],
    )
    .everywhere(),
    Fault::new(
        "steps::the_first_claim_keeps_it",
        &Does(Mode::TheFirstClaimKeepsIt),
        "A step that was begun stays that of the claim which began it.",
        &["steps::a_newer_claim_takes_over"],
    )
    .everywhere(),
    Fault::new(
        "steps::finished_by_who_began_it",
        &Does(Mode::FinishedByWhoBeganIt),
        "A step that is finished shows the fence of the claim that began it.",
        &["steps::a_newer_claim_takes_over"],
    ),
    Fault::new(
        "steps::the_last_value_wins",
        &Forgets(|action, there| matches!((action, there), (StepAction::Finish(_), StepState::Done(_)))),
        "A value overwrites the one before it.",
        &["steps::the_first_value_stays", "steps::race_of_values"],
    ),
    Fault::new(
        "steps::compares_parsed_values",
        &Answers(|write, stepped| {
            if let StepAction::Finish(value) = &write.action
                && let Some(Step { state: StepState::Done(stored), .. }) = &mut stepped.step
                && normalised(value) == normalised(stored)
            {
                *stored = value.clone();
            }
        }),
        "Values that mean the same are taken for the same.",
        &["steps::the_first_value_stays"],
    )
    .everywhere(),
    Fault::new(
        "steps::answers_what_was_asked",
        &Answers(|write, stepped| {
            if let StepAction::Finish(value) = &write.action
                && let Some(Step { state: StepState::Done(stored), .. }) = &mut stepped.step
            {
                *stored = value.clone();
            }
        }),
        "Whoever saves a value is told that it was saved.",
        &["steps::race_of_values", "steps::the_first_value_stays"],
    )
    .everywhere(),
    Fault::new(
        "steps::names_folded/case",
        &Writes(|write| write.name = renamed(&write.name, str::to_lowercase)),
        "Names of steps are compared without case.",
        NAMES,
    )
    .everywhere(),
    Fault::new(
        "steps::names_folded/trailing_space",
        &Writes(|write| write.name = renamed(&write.name, |name| name.trim_end().to_owned())),
        "Names of steps are compared without trailing spaces.",
        NAMES,
    )
    .everywhere(),
    Fault::new(
        "steps::names_folded/accents",
        &Writes(|write| write.name = renamed(&write.name, |name| name.replace("e\u{301}", "é"))),
        "Names of steps are compared by a collation, to which accents are accents however they are written.",
        NAMES,
    ),
    Fault::new(
        "steps::names_are_paths",
        &Writes(|write| write.name = renamed(&write.name, |name| name.replace(['.', '$'], "_"))),
        "A name is the name of a field, and so loses the characters that mean something there.",
        NAMES,
    )
    .everywhere(),
    Fault::new(
        "steps::shared_by_all_jobs",
        &Does(Mode::SharedByAllJobs),
        "Steps are known by their names, whatever the job.",
        &["steps::are_of_one_job"],
    ),
    Fault::new(
        "steps::cap_is_exclusive",
        &Refuses(|write, capabilities| match &write.action {
            StepAction::Finish(value) if value.bytes() == capabilities.max_payload => {
                Err(Error::not_applied(ErrorKind::TooLarge, "the value is too large"))
            }
            _ => Ok(()),
        }),
        "A value at the cap is refused.",
        &["steps::too_large_is_refused"],
    )
    .everywhere(),
    Fault::new(
        "steps::too_large_for_the_store",
        &Refuses(|write, capabilities| match &write.action {
            StepAction::Finish(value) if value.bytes() > capabilities.max_payload => {
                Err(Error::new(ErrorKind::Permanent, Certainty::Unknown, "packet too large"))
            }
            _ => Ok(()),
        }),
        "A value over the cap is sent, and the connection breaks.",
        &["steps::too_large_is_refused"],
    )
    .everywhere(),
    Fault::new(
        "steps::missing_is_a_conflict",
        &Answers(|write, stepped| {
            if stepped.update == Update::Missing {
                stepped.update = Update::Conflict(invented(&write.check()));
            }
        }),
        "No job compared is always a conflict.",
        &["steps::only_of_a_job_that_is_there"],
    )
    .everywhere(),
    Fault::new(
        "steps::unreadable_is_missing",
        &Answers(|_, stepped| {
            if matches!(stepped.update, Update::Unreadable(_)) {
                stepped.update = Update::Missing;
            }
        }),
        "A job of a newer version is answered as if it were not there.",
        &["steps::of_an_unreadable_job"],
    )
    .everywhere(),
    Fault::new(
        "steps::cleared/retry",
        &ClearedBy(|update| update.patch.failure.is_some() && update.patch.state == JobState::Waiting),
        "A job that is tried again begins from nothing.",
        SURVIVE,
    ),
    Fault::new(
        "steps::cleared/release",
        &ClearedBy(|update| {
            update.patch.failure.is_none() && update.current.state.is_held() && update.patch.clear_claim
        }),
        "Steps go with the claim, where that is given back.",
        &["steps::survive_what_the_job_goes_through", "steps::a_finished_step_is_not_begun_again"],
    ),
    Fault::new(
        "steps::cleared/end",
        &ClearedBy(|update| update.patch.state.is_final()),
        "Steps are deleted when their job ends.",
        SURVIVE,
    ),
    Fault::new(
        "steps::cleared/rerun",
        &ClearedBy(|update| update.current.state.is_final()),
        "A job that is run again begins from nothing.",
        SURVIVE,
    ),
    Fault::new(
        "steps::outlive_their_job",
        &Does(Mode::OutliveTheirJob),
        "A purge leaves the steps of what it deletes.",
        &["steps::go_with_their_job"],
    )
    .everywhere(),
    Fault::new(
        "steps::leave_a_lock",
        &Does(Mode::LeaveALock),
        "A lock is left behind when the call is dropped.",
        &["steps::dropped_futures", "waits::dropped_futures"],
    )
    .everywhere(),
];

#[derive(Clone, Copy)]
enum Mode {
    ChecksThenWrites,
    RenewTheRevision,
    TheFirstClaimKeepsIt,
    FinishedByWhoBeganIt,
    SharedByAllJobs,
    OutliveTheirJob,
    LeaveALock,
}

/// A name, as something else writes it.
pub(super) fn renamed(name: &Name, fold: fn(&str) -> String) -> Name {
    Name::try_from(fold(name.as_str())).unwrap_or_else(|_| name.clone())
}

struct Undeclared;

#[async_trait]
impl Wrong for Undeclared {
    fn capabilities(&self, real: &Real) -> Capabilities {
        let mut capabilities = real.handle.capabilities();
        capabilities.durable_steps = false;
        capabilities
    }
}

struct NotPassedOn;

#[async_trait]
impl Wrong for NotPassedOn {
    fn passes_steps_on(&self) -> bool {
        false
    }
}

/// Changes what is read.
struct Reads(fn(&mut Vec<Step>));

#[async_trait]
impl Wrong for Reads {
    async fn steps(&self, real: &Real, id: JobId) -> Result<Vec<Step>> {
        let mut steps = real.steps()?.steps(id).await?;
        (self.0)(&mut steps);
        Ok(steps)
    }
}

/// Changes what is written.
struct Writes(fn(&mut StepWrite));

#[async_trait]
impl Wrong for Writes {
    async fn write_step(&self, real: &Real, write: &StepWrite) -> Result<Stepped> {
        let mut write = write.clone();
        (self.0)(&mut write);
        real.steps()?.write_step(&write).await
    }
}

/// Changes the answer.
struct Answers(fn(&StepWrite, &mut Stepped));

#[async_trait]
impl Wrong for Answers {
    async fn write_step(&self, real: &Real, write: &StepWrite) -> Result<Stepped> {
        let mut stepped = real.steps()?.write_step(write).await?;
        (self.0)(write, &mut stepped);
        Ok(stepped)
    }
}

/// Refuses before anything is written.
struct Refuses(fn(&StepWrite, &Capabilities) -> Result<()>);

#[async_trait]
impl Wrong for Refuses {
    async fn write_step(&self, real: &Real, write: &StepWrite) -> Result<Stepped> {
        (self.0)(write, &real.handle.capabilities())?;
        real.steps()?.write_step(write).await
    }
}

/// Takes from the row that is there what is not compared.
struct Compares(fn(&mut Fingerprint, &Execution));

#[async_trait]
impl Wrong for Compares {
    async fn write_step(&self, real: &Real, write: &StepWrite) -> Result<Stepped> {
        let mut write = write.clone();
        if let Some(there) = real.row(write.id).await {
            (self.0)(&mut write.current, &there);
        }
        real.steps()?.write_step(&write).await
    }
}

/// Does not look at a step that is there when this is done to it.
pub(super) struct Forgets(pub(super) fn(&StepAction, &StepState) -> bool);

#[async_trait]
impl Wrong for Forgets {
    async fn write_step(&self, real: &Real, write: &StepWrite) -> Result<Stepped> {
        real.edit(write.id, |row| {
            let is_current = row.job.execution.fingerprint() == write.current;
            row.steps.retain(|name, step| !is_current || *name != write.name || !(self.0)(&write.action, &step.state));
        });
        real.steps()?.write_step(write).await
    }
}

/// Keeps the step of a refused action.
pub(super) struct Keeps(pub(super) fn(&StepAction) -> bool);

#[async_trait]
impl Wrong for Keeps {
    async fn write_step(&self, real: &Real, write: &StepWrite) -> Result<Stepped> {
        let stepped = real.steps()?.write_step(write).await?;
        if !matches!(stepped.update, Update::Applied(_)) && (self.0)(&write.action) {
            real.edit(write.id, |row| {
                let there = row.steps.get(&write.name).map(|step| &step.state);
                let state = match write.action.plan(there, None) {
                    StepPlan::Keep => return,
                    StepPlan::Write(state) => state,
                    StepPlan::Suspend(patch) => {
                        let event = StepColumns::waiting(write, &row.job.execution).event.cloned();
                        let revision = patch.revision.unwrap_or(row.job.execution.revision);
                        StepState::Waiting(Wait { event, until: row.job.available_at, revision })
                    }
                };
                let step = Step { name: write.name.clone(), fence: row.job.execution.fence, state };
                row.steps.insert(write.name.clone(), step);
            });
        }
        Ok(stepped)
    }
}

/// Deletes the steps with such an update.
pub(super) struct ClearedBy(pub(super) fn(&UpdateRequest) -> bool);

#[async_trait]
impl Wrong for ClearedBy {
    async fn answer(&self, real: &Real, asked: &UpdateRequest, answer: Result<Update>) -> Result<Update> {
        if matches!(answer, Ok(Update::Applied(_))) && (self.0)(asked) {
            real.edit(asked.id, |row| row.steps.clear());
        }
        answer
    }
}

struct Does(Mode);

#[async_trait]
impl Wrong for Does {
    async fn update(&self, real: &Real, update: &UpdateRequest) -> Result<Update> {
        if matches!(self.0, Mode::ChecksThenWrites) {
            // The old holder's check comes before its claim is lost, if there is one under way.
            for _ in 0..1_000 {
                if real.shared.busy.load(Ordering::SeqCst) > 0 {
                    break;
                }
                tokio::task::yield_now().await;
            }
        }
        real.update(update).await
    }

    async fn steps(&self, real: &Real, id: JobId) -> Result<Vec<Step>> {
        if matches!(self.0, Mode::OutliveTheirJob) && real.row(id).await.is_none() {
            return Ok(real.shared.steps().get(&id).cloned().unwrap_or_default());
        }
        real.steps()?.steps(id).await
    }

    async fn purge(&self, real: &Real, state: JobState, older_than: Delay, limit: Limit) -> Result<u64> {
        if matches!(self.0, Mode::OutliveTheirJob) {
            for job in real.handle.list(&ListFilter::default(), None, Limit::MAX).await?.items {
                let steps = real.steps()?.steps(job.id()).await?;
                real.shared.steps().insert(job.id(), steps);
            }
        }
        real.handle.purge(state, older_than, limit).await
    }

    async fn write_step(&self, real: &Real, write: &StepWrite) -> Result<Stepped> {
        let right = real.steps()?.write_step(write);
        match self.0 {
            Mode::ChecksThenWrites => checked_then_written(real, write).await,
            Mode::RenewTheRevision => {
                let stepped = right.await?;
                let Update::Applied(row) = &stepped.update else { return Ok(stepped) };
                let current = row.fingerprint();
                let patch = Patch { revision: Some(Revision::random()), ..Patch::keep(&current) };
                let update = real.update(&UpdateRequest { id: write.id, current, patch }).await?;
                Ok(Stepped { update, ..stepped })
            }
            Mode::TheFirstClaimKeepsIt => {
                let steps = real.steps()?.steps(write.id).await?;
                let begun = steps.into_iter().find(|step| step.name == write.name && step.state == StepState::Begun);
                match begun {
                    Some(_) if write.action == StepAction::Begin => answered(real, write, begun).await,
                    _ => right.await,
                }
            }
            Mode::FinishedByWhoBeganIt => {
                let mut began = None;
                real.edit(write.id, |row| began = row.steps.get(&write.name).map(|step| step.fence));
                let mut stepped = right.await?;
                if let (Some(fence), Some(step), StepAction::Finish(_)) = (began, &mut stepped.step, &write.action) {
                    step.fence = fence;
                    real.edit(write.id, |row| drop(row.steps.insert(write.name.clone(), step.clone())));
                }
                Ok(stepped)
            }
            Mode::SharedByAllJobs => {
                let there = real.memory().edit(|rows| {
                    let mut others = rows.values().filter(|row| row.job.id() != write.id);
                    others.find_map(|row| row.steps.get(&write.name).cloned())
                });
                if there.is_some() { answered(real, write, there).await } else { right.await }
            }
            Mode::LeaveALock => real.shared.locked_for(right).await,
            Mode::OutliveTheirJob => right.await,
        }
    }
}

/// Compares the job, and answers with a step without writing it.
async fn answered(real: &Real, write: &StepWrite, step: Option<Step>) -> Result<Stepped> {
    match real.update(&write.check()).await? {
        update @ Update::Applied(_) => Ok(Stepped { update, step }),
        refused => Ok(Stepped::refused(refused)),
    }
}

async fn checked_then_written(real: &Real, write: &StepWrite) -> Result<Stepped> {
    let steps = real.steps()?;
    let Some(seen) = real.row(write.id).await.filter(|there| there.fingerprint() == write.current) else {
        return steps.write_step(write).await;
    };
    // Of two at once the first writes last.
    if real.shared.busy.fetch_add(1, Ordering::SeqCst) == 0 {
        gap().await;
    }
    let current = real.row(write.id).await.unwrap_or_else(|| seen.clone()).fingerprint();
    let stepped = steps.write_step(&StepWrite { current, ..write.clone() }).await;
    real.edit(write.id, |row| {
        if let Some(step) = row.steps.get_mut(&write.name) {
            step.fence = seen.fence;
        }
    });
    real.shared.busy.fetch_sub(1, Ordering::SeqCst);
    stepped
}
