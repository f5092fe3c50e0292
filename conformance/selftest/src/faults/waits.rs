//! Waits: how they are registered, whom an event wakes, and what the sweep of overdue ones ends.

use async_trait::async_trait;
use queue_core::*;

use super::recover::Stale;
use super::steps::ClearedBy;
use super::steps::Forgets;
use super::steps::Keeps;
use super::steps::renamed;
use crate::Fault;
use crate::broken::Real;
use crate::broken::gap;
use crate::fault::Wrong;

const MINUTE: i64 = 60_000;
const KEYS: &[&str] = &["waits::keys_are_compared_byte_for_byte"];

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "waits::keep_the_claim",
        &Registers(|wait, _| wait.suspension.clear_claim = false),
        "A job that waits is still claimed by who ran it.",
        &["waits::give_the_claim_up"],
    )
    .everywhere(),
    Fault::new(
        "waits::keep_the_lease",
        &Registers(|wait, _| wait.suspension.lease = Change::Keep),
        "A job that waits keeps its lease.",
        &["waits::give_the_claim_up"],
    )
    .everywhere(),
    Fault::new(
        "waits::use_up_the_attempt",
        &Registers(|wait, seen| wait.suspension.attempt = seen.attempt),
        "A job that waits has used up its attempt.",
        &["waits::cost_no_attempt", "waits::give_the_claim_up"],
    )
    .everywhere(),
    Fault::new(
        "waits::own_revision",
        &Registers(|wait, _| wait.suspension.revision = Some(Revision::random())),
        "The store makes the revision of a suspension itself.",
        &["waits::a_replayed_registration_is_recognised"],
    )
    .everywhere(),
    Fault::new(
        "waits::the_end_of_time_is_now",
        &Registers(|wait, _| {
            if wait.suspension.available == Some(When::At(Timestamp::MAX)) {
                wait.suspension.available = Some(When::Now);
            }
        }),
        "The latest deadline overflows.",
        &["waits::for_ever"],
    )
    .everywhere(),
    Fault::new(
        "waits::deadline_in_minutes",
        &Registers(|wait, _| {
            if let Some(When::At(at)) = wait.suspension.available {
                let over = at.unix_millis().rem_euclid(MINUTE);
                wait.suspension.available = Some(When::At(at.saturating_add_millis(-over)));
            }
        }),
        "Deadlines are cut to the minute.",
        &["waits::end_at_their_deadline"],
    )
    .everywhere(),
    Fault::new(
        "waits::registered_unfenced",
        &Does(Mode::RegisteredUnfenced),
        "A wait is registered whoever has the job.",
        &["waits::a_refused_registration_leaves_nothing", "waits::a_replayed_registration_is_recognised"],
    )
    .everywhere(),
    Fault::new(
        "waits::a_refused_one_stays",
        &Keeps(|action| matches!(action, StepAction::Wait(_))),
        "The wait is noted, then the job is compared, and nothing is undone.",
        &["waits::a_refused_registration_leaves_nothing"],
    ),
    Fault::new(
        "waits::suspended_then_noted",
        &Does(Mode::SuspendedThenNoted),
        "The job is suspended in one statement, and the wait noted in a second one without a transaction.",
        &["waits::dropped_futures"],
    ),
    Fault::new(
        "waits::kept_events_are_not_found",
        &Does(Mode::KeptEventsAreNotFound),
        "A wait is for what comes later alone.",
        &["waits::an_event_before_the_wait_is_found", "events::the_first_payload_wins"],
    ),
    Fault::new(
        "waits::event_looked_for_first",
        &Does(Mode::EventLookedForFirst),
        "The event is looked for in one statement, and the job suspended in a second one.",
        &["waits::race_of_registration_and_event"],
    ),
    Fault::new(
        "waits::woken_then_kept",
        &Does(Mode::WokenThenKept),
        "An event wakes those who wait in one statement, and is kept by a second one.",
        &["waits::race_of_registration_and_event"],
    ),
    Fault::new(
        "waits::woken_then_kept_again",
        &Does(Mode::WokenThenKeptAgain),
        "An event of which an old one is there wakes those who wait, and overwrites that by a second statement.",
        &["waits::race_beside_an_old_event"],
    ),
    Fault::new(
        "waits::a_new_deadline_each_time",
        &Forgets(|action, there| matches!((action, there), (StepAction::Wait(_), StepState::Waiting(_)))),
        "A wait that is registered again gets a new deadline.",
        &["waits::the_deadline_is_fixed_once"],
    ),
    Fault::new(
        "waits::suspend_on_a_value",
        &Forgets(|action, there| matches!((action, there), (StepAction::Wait(_), StepState::Done(_)))),
        "A wait that has ended begins again.",
        &["waits::a_step_is_no_wait", "waits::a_woken_job_is_recovered_like_any_other"],
    ),
    Fault::new(
        "waits::a_late_event_counts",
        &Forgets(|action, there| matches!((action, there), (StepAction::Wait(_), StepState::TimedOut))),
        "A wait that timed out begins again.",
        &["waits::end_at_their_deadline"],
    ),
    Fault::new(
        "waits::the_first_is_woken",
        &Emits(|rows, key| waiting_for(rows, key).skip(1).for_each(|row| row.foreign_state = true)),
        "An event wakes one job.",
        &["waits::an_event_wakes_all_who_wait"],
    ),
    Fault::new(
        "waits::a_page_is_woken",
        &Emits(|rows, key| waiting_for(rows, key).skip(100).for_each(|row| row.foreign_state = true)),
        "An event wakes a hundred jobs.",
        &["waits::many_wake_at_once"],
    ),
    Fault::new(
        "waits::everybody_is_woken",
        &Emits(|rows, key| rows.values_mut().filter_map(current_wait).for_each(|wait| wait.event = Some(key.clone()))),
        "An event wakes every job that waits.",
        &["waits::an_event_wakes_all_who_wait", "waits::an_event_of_an_earlier_wait_changes_nothing"],
    ),
    Fault::new(
        "waits::cancellations_are_overrun",
        &Does(Mode::CancellationsAreOverrun),
        "Who is to be woken is looked up, and then woken whatever became of it.",
        &["waits::race_with_a_cancellation"],
    ),
    Fault::new(
        "waits::only_waits_time_out",
        &Sweeps(|rows, now, _| {
            for row in overdue(rows, now) {
                row.foreign_state = current_wait(row).is_none();
            }
        }),
        "The sweep finds jobs by their waits, and so none that was suspended without.",
        &["waits::a_suspension_without_a_wait_ends_too"],
    ),
    Fault::new(
        "waits::ended_jobs_are_woken",
        &Emits(|rows, key| revive(rows, key, JobState::is_final)),
        "An event wakes whose wait it finds, also if the job has ended.",
        &["waits::of_ended_jobs_are_not_woken"],
    ),
    Fault::new(
        "waits::jobs_that_go_on_are_woken",
        &Emits(|rows, key| revive(rows, key, |state| state.is_active() && state != JobState::Suspended)),
        "An event wakes whose wait it finds, also if somebody had the job go on.",
        &["waits::go_on_if_somebody_wants_it"],
    ),
    Fault::new(
        "waits::any_suspension_is_the_waits",
        &Emits(|rows, key| revive(rows, key, |state| state == JobState::Suspended)),
        "An event wakes whose wait it finds and who is suspended; the suspension is not compared.",
        &["waits::an_event_of_an_earlier_wait_changes_nothing"],
    ),
    Fault::new(
        "waits::unknown_states_are_woken",
        &Emits(|rows, _| show(rows)),
        "An event wakes whose wait it finds, unless the job is known to do something else.",
        &["waits::of_unreadable_jobs"],
    ),
    Fault::new(
        "waits::unreadable_jobs_fail_the_event",
        &Does(Mode::UnreadableJobsFailTheEvent),
        "An event reads the jobs that wait for it, and fails if it cannot.",
        &["waits::of_unreadable_jobs"],
    ),
    Fault::new(
        "waits::unreadable_jobs_fail_the_sweep",
        &Does(Mode::UnreadableJobsFailTheSweep),
        "The sweep reads the jobs that are overdue, and fails if it cannot.",
        &["waits::of_unreadable_jobs"],
    ),
    Fault::new(
        "waits::events_remember_whom_they_met",
        &Does(Mode::EventsRememberWhomTheyMet),
        "An event wakes who ever waited for it and is suspended.",
        &["waits::an_event_of_an_earlier_wait_changes_nothing"],
    ),
    Fault::new(
        "waits::timers_know_their_job_alone",
        &Does(Mode::TimersKnowTheirJobAlone),
        "The timer of an earlier wait ends the later one.",
        &["waits::a_timer_of_an_earlier_wait_changes_nothing"],
    ),
    Fault::new(
        "waits::timers_are_not_stopped",
        &Does(Mode::TimersAreNotStopped),
        "The timer of a wait puts its job back, also if the event came first and it runs.",
        &["waits::are_woken_once", "waits::a_timer_of_an_earlier_wait_changes_nothing"],
    ),
    Fault::new(
        "waits::any_overdue_step_ends_it",
        &Sweeps(|rows, now, _| {
            for row in rows.values_mut().filter(|row| is_suspended(row)) {
                let overdue: Vec<_> = waits(row).map(|wait| wait.until).filter(|until| *until <= now).collect();
                row.job.available_at = overdue.into_iter().fold(row.job.available_at, Timestamp::min);
            }
        }),
        "A job is overdue if any wait of it is; the suspension is not compared.",
        &["waits::a_timer_of_an_earlier_wait_changes_nothing"],
    ),
    Fault::new(
        "waits::all_of_a_job_time_out",
        &Sweeps(|rows, now, _| {
            for row in overdue(rows, now) {
                let current = row.job.execution.revision;
                let earlier =
                    |step: &&mut Step| matches!(&step.state, StepState::Waiting(wait) if wait.revision != current);
                row.steps.values_mut().filter(earlier).for_each(|step| step.state = StepState::TimedOut);
            }
        }),
        "A timeout ends every wait that its job ever had.",
        &["waits::a_timer_of_an_earlier_wait_changes_nothing"],
    ),
    Fault::new(
        "waits::a_minute_early",
        &Sweeps(|rows, _, _| {
            for row in rows.values_mut().filter(|row| is_suspended(row)) {
                row.job.available_at = row.job.available_at.saturating_add_millis(-MINUTE);
            }
        }),
        "Waits end a minute before their time.",
        &["waits::end_at_their_deadline"],
    ),
    Fault::new(
        "waits::deadline_is_before_now",
        &Sweeps(|rows, now, _| {
            rows.values_mut().filter(|row| row.job.available_at == now).for_each(|row| row.foreign_state = true);
        }),
        "A wait whose time is over at this millisecond goes on.",
        &["waits::end_at_their_deadline"],
    ),
    Fault::new(
        "waits::without_an_event_never_end",
        &Sweeps(|rows, now, _| {
            for row in overdue(rows, now) {
                row.foreign_state = current_wait(row).is_some_and(|wait| wait.event.is_none());
            }
        }),
        "A wait without an event is null in a join, and never ends.",
        &["waits::for_the_time_alone"],
    ),
    Fault::new(
        "waits::newest_first",
        &Sweeps(|rows, now, limit| {
            let mut due = overdue(rows, now);
            due.sort_by_key(|row| (row.job.available_at, row.job.id()));
            due.iter_mut().rev().skip(limit.rows()).for_each(|row| row.foreign_state = true);
        }),
        "Those that are overdue since just now end first.",
        &["waits::the_oldest_are_timed_out_first"],
    ),
    Fault::new(
        "waits::sweep_ignores_its_limit",
        &Does(Mode::SweepIgnoresItsLimit),
        "All overdue waits end at once, whatever the limit.",
        &["waits::the_oldest_are_timed_out_first"],
    )
    .everywhere(),
    Fault::new(
        "waits::sweep_answers_what_it_read",
        &Does(Mode::SweepAnswersWhatItRead),
        "Overdue waits are read in one statement, and ended by a second one.",
        &["waits::race_of_sweeps", "waits::race_of_event_and_timeout"],
    ),
    Fault::new(
        "waits::event_answers_what_it_read",
        &Does(Mode::EventAnswersWhatItRead),
        "Those who wait are counted in one statement, and woken by a second one.",
        &["waits::race_of_event_and_timeout"],
    ),
    Fault::new(
        "waits::a_locked_job_fails_the_sweep",
        &Does(Mode::ALockedJobFailsTheSweep),
        "One job that somebody has locked fails the sweep.",
        &["waits::locked_jobs_are_skipped"],
    ),
    Fault::new(
        "waits::woken_jobs_keep_their_revision",
        &Wakes(|before, after| after.execution.revision = before.execution.revision),
        "A job that is woken is no new moment.",
        &["waits::an_event_wakes_all_who_wait", "waits::end_at_their_deadline"],
    ),
    Fault::new(
        "waits::woken_jobs_keep_their_deadline",
        &Wakes(|before, after| after.available_at = before.available_at),
        "A job that is woken is due when its wait would have been over.",
        &["waits::an_event_wakes_all_who_wait"],
    ),
    Fault::new(
        "waits::woken_jobs_collide_with_themselves",
        &Does(Mode::WokenJobsCollideWithThemselves),
        "A job that is woken finds its own key taken.",
        &["waits::count_for_the_key"],
    ),
    Fault::new(
        "waits::recovery_clears_them",
        &ClearedBy(|update| matches!(update.current.lease, LeaseMatch::Expired(_))),
        "A job that is recovered begins from nothing.",
        &["waits::a_woken_job_is_recovered_like_any_other"],
    ),
    Fault::new(
        "waits::are_stale",
        &Stale(|row, now| {
            let held = row.state.is_held() || row.state == JobState::Suspended;
            held && row.lease_expires_at.is_none_or(|at| at <= now)
        }),
        "A job that waits is one without a lease, and so is adopted.",
        &["waits::are_held_by_nobody"],
    ),
    Fault::new(
        "waits::beat_on",
        &Does(Mode::BeatOn),
        "The heartbeat of who gave the job up to wait is answered as if it had it.",
        &["waits::are_held_by_nobody"],
    )
    .everywhere(),
    Fault::new("waits::keys_folded/case", &Folds(str::to_lowercase), "Keys of events are compared without case.", KEYS)
        .everywhere(),
    Fault::new(
        "waits::keys_folded/trailing_space",
        &Folds(|key| key.trim_end().to_owned()),
        "Keys of events are compared without trailing spaces.",
        KEYS,
    )
    .everywhere(),
];

#[derive(Clone, Copy)]
enum Mode {
    RegisteredUnfenced,
    SuspendedThenNoted,
    KeptEventsAreNotFound,
    EventLookedForFirst,
    WokenThenKept,
    WokenThenKeptAgain,
    EventsRememberWhomTheyMet,
    TimersKnowTheirJobAlone,
    TimersAreNotStopped,
    SweepIgnoresItsLimit,
    SweepAnswersWhatItRead,
    EventAnswersWhatItRead,
    ALockedJobFailsTheSweep,
    WokenJobsCollideWithThemselves,
    UnreadableJobsFailTheEvent,
    UnreadableJobsFailTheSweep,
    BeatOn,
    CancellationsAreOverrun,
}

fn is_suspended(row: &MemoryRow) -> bool {
    row.job.state() == JobState::Suspended
}

fn is_unreadable(row: &MemoryRow) -> bool {
    row.foreign_state || row.broken
}

/// The waits that were not ended.
fn waits(row: &mut MemoryRow) -> impl Iterator<Item = &mut Wait> {
    row.steps.values_mut().filter_map(|step| match &mut step.state {
        StepState::Waiting(wait) => Some(wait),
        _ => None,
    })
}

/// The wait that a job is suspended with.
fn current_wait(row: &mut MemoryRow) -> Option<&mut Wait> {
    let (suspended, revision) = (is_suspended(row), row.job.execution.revision);
    waits(row).find(|wait| suspended && wait.revision == revision)
}

fn waiting_for<'a>(rows: &'a mut Rows, key: &Name) -> impl Iterator<Item = &'a mut MemoryRow> {
    let waits = |row: &mut MemoryRow| current_wait(row).is_some_and(|wait| wait.event.as_ref() == Some(key));
    let waiting: Vec<_> = rows.values_mut().filter_map(|row| waits(row).then_some(row)).collect();
    waiting.into_iter()
}

fn overdue(rows: &mut Rows, now: Timestamp) -> Vec<&mut MemoryRow> {
    rows.values_mut().filter(|row| is_suspended(row) && row.job.available_at <= now).collect()
}

/// Makes a wait for this event that was not ended one that its job is suspended with.
fn revive(rows: &mut Rows, key: &Name, of: fn(JobState) -> bool) {
    for row in rows.values_mut().filter(|row| of(row.job.state())) {
        let revision = row.job.execution.revision;
        let mut revived = false;
        for wait in waits(row).filter(|wait| wait.event.as_ref() == Some(key)) {
            (wait.revision, revived) = (revision, true);
        }
        if revived {
            row.job.execution.state = JobState::Suspended;
        }
    }
}

/// Shows the jobs that were hidden from a call.
fn show(rows: &mut Rows) {
    rows.values_mut().for_each(|row| row.foreign_state = false);
}

/// Changes a suspension, told what was seen of the job.
struct Registers(fn(&mut NewWait, &Fingerprint));

#[async_trait]
impl Wrong for Registers {
    async fn write_step(&self, real: &Real, write: &StepWrite) -> Result<Stepped> {
        let mut write = write.clone();
        if let StepAction::Wait(wait) = &mut write.action {
            (self.0)(wait, &write.current);
        }
        real.steps()?.write_step(&write).await
    }
}

/// Changes the reference's rows before an event of this key; a row of a foreign state is hidden from it.
struct Emits(fn(&mut Rows, &Name));

#[async_trait]
impl Wrong for Emits {
    async fn emit(&self, real: &Real, event: &NewEvent) -> Result<Emitted> {
        real.memory().edit(|rows| (self.0)(rows, &event.key));
        let emitted = real.steps()?.emit(event).await;
        real.memory().edit(show);
        emitted
    }
}

/// The same before a sweep at this time.
struct Sweeps(fn(&mut Rows, Timestamp, Limit));

#[async_trait]
impl Wrong for Sweeps {
    async fn time_out_waits(&self, real: &Real, limit: Limit) -> Result<Vec<JobId>> {
        let now = real.memory().now();
        real.memory().edit(|rows| (self.0)(rows, now, limit));
        let ended = real.steps()?.time_out_waits(limit).await;
        real.memory().edit(show);
        ended
    }
}

/// Changes jobs that were woken, told what they were before.
struct Wakes(fn(&Job, &mut Job));

impl Wakes {
    async fn spoil<T>(&self, real: &Real, call: impl Future<Output = T> + Send) -> T {
        let suspended: Vec<_> = real
            .memory()
            .edit(|rows| rows.values().filter(|row| is_suspended(row)).map(|row| row.job.clone()).collect());
        let answer = call.await;
        for before in suspended {
            real.edit(before.id(), |row| {
                if row.job.state() == JobState::Waiting {
                    (self.0)(&before, &mut row.job);
                }
            });
        }
        answer
    }
}

#[async_trait]
impl Wrong for Wakes {
    async fn emit(&self, real: &Real, event: &NewEvent) -> Result<Emitted> {
        self.spoil(real, real.steps()?.emit(event)).await
    }

    async fn time_out_waits(&self, real: &Real, limit: Limit) -> Result<Vec<JobId>> {
        self.spoil(real, real.steps()?.time_out_waits(limit)).await
    }
}

/// Compares other keys.
struct Folds(fn(&str) -> String);

#[async_trait]
impl Wrong for Folds {
    async fn write_step(&self, real: &Real, write: &StepWrite) -> Result<Stepped> {
        let mut write = write.clone();
        if let StepAction::Wait(NewWait { event: Some(key), .. }) = &mut write.action {
            *key = renamed(key, self.0);
        }
        real.steps()?.write_step(&write).await
    }

    async fn emit(&self, real: &Real, event: &NewEvent) -> Result<Emitted> {
        real.steps()?.emit(&NewEvent { key: renamed(&event.key, self.0), ..event.clone() }).await
    }
}

/// Jobs that are waiting from now on, whatever they have become.
fn woken_at_all_costs(real: &Real, jobs: Vec<JobId>) -> Vec<JobId> {
    for id in &jobs {
        real.edit(*id, |row| row.job.execution.state = JobState::Waiting);
    }
    jobs
}

struct Does(Mode);

#[async_trait]
impl Wrong for Does {
    async fn extend_leases(&self, real: &Real, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        let mut beats = real.handle.extend_leases(held, lease).await?;
        for (beat, held) in beats.iter_mut().zip(held) {
            let waits = real.row(held.id).await.is_some_and(|row| row.state == JobState::Suspended);
            if matches!(self.0, Mode::BeatOn) && waits {
                *beat = Beat::Extended;
            }
        }
        Ok(beats)
    }

    async fn write_step(&self, real: &Real, write: &StepWrite) -> Result<Stepped> {
        let steps = real.steps()?;
        let StepAction::Wait(wait) = &write.action else { return steps.write_step(write).await };
        match (self.0, &wait.event) {
            (Mode::RegisteredUnfenced, _) => {
                let there = real.row(write.id).await.map(|row| row.fingerprint());
                let current = there.unwrap_or_else(|| write.current.clone());
                steps.write_step(&StepWrite { current, ..write.clone() }).await
            }
            (Mode::SuspendedThenNoted, _) => {
                let stepped = steps.write_step(write).await?;
                let mut noted = None;
                real.edit(write.id, |row| noted = row.steps.remove(&write.name));
                tokio::task::yield_now().await;
                real.edit(write.id, |row| row.steps.extend(noted.map(|step| (write.name.clone(), step))));
                Ok(stepped)
            }
            (Mode::KeptEventsAreNotFound, Some(key)) => registered_blindly(real, write, key).await,
            (Mode::EventLookedForFirst, Some(key)) if !real.shared.payloads().contains_key(key) => {
                gap().await;
                registered_blindly(real, write, key).await
            }
            (Mode::EventsRememberWhomTheyMet | Mode::TimersKnowTheirJobAlone | Mode::TimersAreNotStopped, _) => {
                let stepped = steps.write_step(write).await?;
                real.shared.steps().entry(write.id).or_default().extend(stepped.step.clone());
                Ok(stepped)
            }
            _ => steps.write_step(write).await,
        }
    }

    async fn emit(&self, real: &Real, event: &NewEvent) -> Result<Emitted> {
        let steps = real.steps()?;
        let is_known = matches!(self.0, Mode::WokenThenKeptAgain)
            && real.shared.payloads().insert(event.key.clone(), event.payload.clone()).is_some();
        match self.0 {
            Mode::CancellationsAreOverrun => {
                let read = real.memory().edit(|rows| waiting_for(rows, &event.key).map(|row| row.job.id()).collect());
                gap().await;
                steps.emit(event).await?;
                Ok(Emitted::New { woken: woken_at_all_costs(real, read).len() as u64 })
            }
            Mode::EventLookedForFirst => {
                let emitted = steps.emit(event).await;
                real.shared.payloads().insert(event.key.clone(), event.payload.clone());
                emitted
            }
            Mode::WokenThenKeptAgain if !is_known => steps.emit(event).await,
            Mode::WokenThenKept | Mode::WokenThenKeptAgain => {
                let emitted = steps.emit(&NewEvent { keep: Delay::ZERO, ..event.clone() }).await?;
                if matches!(emitted, Emitted::New { .. }) {
                    gap().await;
                    real.memory().edit(|rows| waiting_for(rows, &event.key).for_each(|row| row.foreign_state = true));
                    steps.emit(event).await?;
                    real.memory().edit(show);
                }
                Ok(emitted)
            }
            Mode::EventAnswersWhatItRead => {
                let read = real.memory().edit(|rows| waiting_for(rows, &event.key).count());
                gap().await;
                match steps.emit(event).await? {
                    Emitted::New { .. } => Ok(Emitted::New { woken: read as u64 }),
                    kept => Ok(kept),
                }
            }
            Mode::EventsRememberWhomTheyMet => {
                let noted = real.shared.steps().clone();
                let key = Some(&event.key);
                let met = |step: &Step| matches!(&step.state, StepState::Waiting(wait) if wait.event.as_ref() == key);
                for (id, _) in noted.iter().filter(|(_, steps)| steps.iter().any(met)) {
                    real.edit(*id, |row| {
                        if let Some(wait) = current_wait(row) {
                            wait.event = Some(event.key.clone());
                        }
                    });
                }
                steps.emit(event).await
            }
            Mode::WokenJobsCollideWithThemselves => {
                let keyed = |row: &mut MemoryRow| row.job.unique_key.is_some();
                match real.memory().edit(|rows| waiting_for(rows, &event.key).any(keyed)) {
                    true => Err(Error::invalid("another active job has its unique key")),
                    false => steps.emit(event).await,
                }
            }
            Mode::UnreadableJobsFailTheEvent => {
                match real.memory().edit(|rows| waiting_for(rows, &event.key).any(|row| is_unreadable(row))) {
                    true => Err(Error::not_applied(ErrorKind::Schema, "unknown state")),
                    false => steps.emit(event).await,
                }
            }
            _ => steps.emit(event).await,
        }
    }

    async fn time_out_waits(&self, real: &Real, limit: Limit) -> Result<Vec<JobId>> {
        let steps = real.steps()?;
        let any_overdue = |of: fn(&MemoryRow) -> bool| {
            let now = real.memory().now();
            real.memory().edit(|rows| overdue(rows, now).into_iter().any(|row| of(row)))
        };
        match self.0 {
            Mode::TimersKnowTheirJobAlone => ring(real, is_suspended),
            Mode::TimersAreNotStopped => ring(real, |row| is_suspended(row) || row.job.state().is_held()),
            Mode::CancellationsAreOverrun => {
                let now = real.memory().now();
                let read = real.memory().edit(|rows| overdue(rows, now).iter().map(|row| row.job.id()).collect());
                gap().await;
                steps.time_out_waits(limit).await?;
                return Ok(woken_at_all_costs(real, read));
            }
            Mode::SweepIgnoresItsLimit => return steps.time_out_waits(Limit::MAX).await,
            Mode::SweepAnswersWhatItRead => {
                let now = real.memory().now();
                let read = real
                    .memory()
                    .edit(|rows| overdue(rows, now).iter().take(limit.rows()).map(|row| row.job.id()).collect());
                gap().await;
                steps.time_out_waits(limit).await?;
                return Ok(read);
            }
            Mode::ALockedJobFailsTheSweep if any_overdue(|row| row.locked) => {
                return Err(Error::not_applied(ErrorKind::Transient, "lock wait timeout exceeded"));
            }
            Mode::UnreadableJobsFailTheSweep if any_overdue(is_unreadable) => {
                return Err(Error::not_applied(ErrorKind::Schema, "unknown state"));
            }
            _ => {}
        }
        steps.time_out_waits(limit).await
    }
}

/// Registers a wait for an event without looking whether that is kept.
async fn registered_blindly(real: &Real, write: &StepWrite, key: &Name) -> Result<Stepped> {
    let mut blind = write.clone();
    if let StepAction::Wait(wait) = &mut blind.action {
        wait.event = None;
    }
    let mut stepped = real.steps()?.write_step(&blind).await?;
    let mut noted = None;
    real.edit(write.id, |row| {
        if let Some(wait) = current_wait(row) {
            wait.event = Some(key.clone());
        }
        noted = row.steps.get(&write.name).cloned();
    });
    stepped.step = stepped.step.and(noted);
    Ok(stepped)
}

/// Has the jobs of which a wait was once registered that would be over now be overdue.
fn ring(real: &Real, of: fn(&MemoryRow) -> bool) {
    let now = real.memory().now();
    for (id, steps) in real.shared.steps().iter() {
        let over = steps.iter().find_map(|step| match &step.state {
            StepState::Waiting(wait) if wait.until <= now => Some(wait.until),
            _ => None,
        });
        if let Some(until) = over {
            real.edit(*id, |row| {
                if of(row) {
                    row.job.execution.state = JobState::Suspended;
                    row.job.available_at = until;
                }
            });
        }
    }
}
