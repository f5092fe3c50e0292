//! Heartbeats.

use std::sync::atomic::Ordering;

use async_trait::async_trait;
use queue_core::*;

use crate::Fault;
use crate::broken::Real;
use crate::broken::gap;
use crate::fault::Wrong;

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "lease::half_a_beat",
        &HalfABeat,
        "Leases are renewed one after the other; the first failure ends the call, and is said to have written nothing.",
        &["lease::a_row_that_cannot_be_written"],
    ),
    Fault::new(
        "lease::shortens",
        &Beats(Plan { lease: |_, until, _| Some(until), ..RIGHT }),
        "The lease becomes now plus the span, though it was longer.",
        &["lease::never_shortened"],
    ),
    Fault::new(
        "lease::in_seconds",
        &Beats(Plan { lease: |old, until, _| old.max(Some(whole_seconds(until))), ..RIGHT }),
        "The lease is cut to whole seconds.",
        &["lease::to_the_millisecond"],
    ),
    Fault::new(
        "lease::adds_to_the_old_one",
        &Beats(Plan {
            lease: |old, until, now| {
                Some(old.map_or(until, |old| old.saturating_add_millis(until.unix_millis() - now.unix_millis())))
            },
            ..RIGHT
        }),
        "The span is added to the lease instead of to now.",
        &["lease::revives_an_expired_one", "lease::many_in_one_call"],
    ),
    Fault::new(
        "lease::doubles_the_span",
        &Beats(Plan {
            lease: |old, until, now| {
                old.max(Some(until.saturating_add_millis(until.unix_millis() - now.unix_millis())))
            },
            ..RIGHT
        }),
        "The span is added twice, in the program and in the statement.",
        &["lease::extends_from_now"],
    ),
    Fault::new(
        "lease::leaves_its_lock",
        &LeavesItsLock,
        "A lock is left behind when the future of a heartbeat is dropped.",
        &["lease::dropped_futures"],
    ),
    Fault::new(
        "lease::leaves_missing_ones",
        &Beats(Plan { lease: |old, until, _| old.map(|old| old.max(until)), ..RIGHT }),
        "`greatest(lease, ?)` of a null is null: a missing lease stays missing.",
        &["lease::sets_a_missing_one"],
    ),
    Fault::new(
        "lease::refuses_expired_ones",
        &Beats(Plan {
            holds: |row, held, now| holds(row, held) && row.lease_expires_at.is_none_or(|at| at > now),
            ..RIGHT
        }),
        "An expired lease counts as lost.",
        &["lease::revives_an_expired_one"],
    ),
    Fault::new(
        "lease::by_id_alone",
        &ByIdAlone,
        "The heartbeat names the id, and renews whoever holds it.",
        &[
            "lease::lost_to_another_worker",
            "lease::lost_to_a_newer_claim_of_the_same_worker",
            "lease::asks_for_the_worker",
        ],
    )
    .everywhere(),
    Fault::new(
        "lease::by_worker",
        &Beats(Plan {
            holds: |row, held, _| row.claimed_by.as_ref() == Some(&held.worker) && row.state.is_held(),
            ..RIGHT
        }),
        "The heartbeat compares the worker, not the claim.",
        &["lease::lost_to_a_newer_claim_of_the_same_worker"],
    ),
    Fault::new(
        "lease::by_revision",
        &Beats(Plan { holds: |row, held, _| row.revision == held.revision && row.state.is_held(), ..RIGHT }),
        "The heartbeat compares the revision, not the worker.",
        &["lease::asks_for_the_worker"],
    ),
    Fault::new(
        "lease::only_running",
        &Beats(Plan { holds: |row, held, _| holds(row, held) && row.state == JobState::Running, ..RIGHT }),
        "Jobs that are only reserved are not renewed.",
        &["lease::extends_a_reserved_job"],
    ),
    Fault::new(
        "lease::in_any_state",
        &Beats(Plan {
            holds: |row, held, _| {
                row.id == held.id && (row.claimed_by.is_none() || row.claimed_by.as_ref() == Some(&held.worker))
            },
            ..RIGHT
        }),
        "A job that has ended, or waits, gets a lease.",
        &["lease::lost_when_not_held", "lease::races_with_a_settle"],
    ),
    Fault::new(
        "lease::new_revision",
        &Beats(Plan { also: |row| row.revision = Revision::random(), ..RIGHT }),
        "A heartbeat makes a new revision, so that its holder's own settle bounces.",
        &["lease::changes_nothing_else"],
    ),
    Fault::new(
        "lease::moves_the_claim",
        &Beats(Plan { also: |row| row.claimed_at = row.claimed_at.map(|at| at.saturating_add_millis(1)), ..RIGHT }),
        "A heartbeat moves the time of the claim.",
        &["lease::changes_nothing_else"],
    ),
    Fault::new(
        "lease::busy_is_lost",
        &Beats(Plan { busy: Some(Beat::Lost), ..RIGHT }),
        "A row that is locked for a moment is reported lost.",
        &["lease::does_not_wait_for_a_held_row"],
    ),
    Fault::new(
        "lease::waits_for_locked_rows",
        &Beats(Plan { busy: None, ..RIGHT }),
        "A heartbeat waits for a locked row, and keeps all others waiting.",
        &["lease::does_not_wait_for_a_held_row", "lease::gives_up_on_a_lock"],
    )
    .hangs(),
    Fault::new(
        "lease::answers_what_it_found",
        &AnswersWhatItFound,
        "Only the claims that were renewed are answered.",
        &["lease::answers_in_order", "lease::lost_when_missing"],
    )
    .everywhere(),
    Fault::new(
        "lease::missing_is_an_error",
        &MissingIsAnError,
        "One job that does not exist fails the whole heartbeat.",
        &["lease::lost_when_missing"],
    ),
    Fault::new(
        "lease::renews_all_of_the_worker",
        &RenewsAllOfTheWorker,
        "`UPDATE .. WHERE claimed_by = ?`: a heartbeat for one claim renews all of its worker.",
        &["lease::lost_to_a_newer_claim_of_the_same_worker"],
    ),
    Fault::new(
        "lease::first_hundred",
        &FirstHundred,
        "Only the first hundred claims of a call are renewed; the others are said to be.",
        &["lease::many_in_one_call"],
    )
    .everywhere(),
    Fault::new(
        "lease::stays_after_the_claim",
        &StaysAfterTheClaim,
        "Holder and lease stay on a job that is given back.",
        &["lease::ends_with_the_claim"],
    )
    .everywhere(),
    Fault::new(
        "lease::two_steps",
        &TwoSteps,
        "A heartbeat clears the lease, then sets it.",
        &["lease::dropped_futures"],
    ),
];

fn whole_seconds(at: Timestamp) -> Timestamp {
    at.saturating_add_millis(-at.unix_millis().rem_euclid(1_000))
}

fn holds(row: &Execution, held: &Held) -> bool {
    Held::of(row).as_ref() == Some(held)
}

/// How a heartbeat renews in the reference.
struct Plan {
    holds: fn(&Execution, &Held, Timestamp) -> bool,
    /// The new lease, of the old one, the one asked for, and now.
    lease: fn(Option<Timestamp>, Timestamp, Timestamp) -> Option<Timestamp>,
    also: fn(&mut Execution),
    /// What a locked row is answered with; `None` waits for it.
    busy: Option<Beat>,
}

/// The plan of a right backend; each fault changes one thing of it.
const RIGHT: Plan = Plan {
    holds: |row, held, _| holds(row, held),
    lease: |old, until, _| old.max(Some(until)),
    also: |_| {},
    busy: Some(Beat::Busy),
};

struct Beats(Plan);

#[async_trait]
impl Wrong for Beats {
    async fn extend_leases(&self, real: &Real, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        let plan = &self.0;
        loop {
            let now = real.memory().now();
            let until = now.saturating_add_millis(lease.as_millis());
            let beat = |rows: &mut Rows, held: &Held| match rows.get_mut(&held.id) {
                Some(row) if !row.foreign_state && (plan.holds)(&row.job.execution, held, now) => {
                    if row.locked {
                        return plan.busy;
                    }
                    let execution = &mut row.job.execution;
                    execution.lease_expires_at = (plan.lease)(execution.lease_expires_at, until, now);
                    (plan.also)(execution);
                    Some(Beat::Extended)
                }
                _ => Some(Beat::Lost),
            };
            match real.memory().edit(|rows| held.iter().map(|held| beat(rows, held)).collect()) {
                Some(beats) => return Ok(beats),
                None => gap().await,
            }
        }
    }
}

struct ByIdAlone;

#[async_trait]
impl Wrong for ByIdAlone {
    async fn extend_leases(&self, real: &Real, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        let mut now_held = Vec::new();
        for held in held {
            let there = real.row(held.id).await.as_ref().and_then(Held::of);
            now_held.push(there.unwrap_or_else(|| held.clone()));
        }
        real.handle.extend_leases(&now_held, lease).await
    }
}

struct AnswersWhatItFound;

#[async_trait]
impl Wrong for AnswersWhatItFound {
    async fn extend_leases(&self, real: &Real, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        let mut beats = real.handle.extend_leases(held, lease).await?;
        beats.retain(|beat| *beat != Beat::Lost);
        Ok(beats)
    }
}

struct RenewsAllOfTheWorker;

#[async_trait]
impl Wrong for RenewsAllOfTheWorker {
    async fn extend_leases(&self, real: &Real, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        let ours = |other: &Held| held.iter().any(|held| held.worker == other.worker);
        let all: Vec<_> = real
            .memory()
            .edit(|rows| rows.values().filter_map(|row| Held::of(&row.job.execution)).filter(ours).collect());
        if !held.is_empty() {
            real.handle.extend_leases(&all, lease).await?;
        }
        real.handle.extend_leases(held, lease).await
    }
}

struct MissingIsAnError;

#[async_trait]
impl Wrong for MissingIsAnError {
    async fn extend_leases(&self, real: &Real, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        for held in held {
            if real.handle.get(held.id).await?.is_none() {
                return Err(Error::not_applied(ErrorKind::Permanent, format!("no job {}", held.id)));
            }
        }
        real.handle.extend_leases(held, lease).await
    }
}

struct FirstHundred;

#[async_trait]
impl Wrong for FirstHundred {
    async fn extend_leases(&self, real: &Real, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        let mut beats = real.handle.extend_leases(held.get(..100).unwrap_or(held), lease).await?;
        beats.resize(held.len(), Beat::Extended);
        Ok(beats)
    }
}

struct StaysAfterTheClaim;

#[async_trait]
impl Wrong for StaysAfterTheClaim {
    async fn ask(&self, _: &Real, update: &mut UpdateRequest) -> Result<()> {
        update.patch.clear_claim = false;
        if update.patch.lease == Change::Clear {
            update.patch.lease = Change::Keep;
        }
        Ok(())
    }
}

struct LeavesItsLock;

#[async_trait]
impl Wrong for LeavesItsLock {
    async fn extend_leases(&self, real: &Real, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        let locked = &real.shared.locked;
        let mut tries = 0;
        while locked.swap(true, Ordering::SeqCst) {
            tries += 1;
            if tries == 1_000 {
                return Err(Error::not_applied(ErrorKind::Unavailable, "lock wait timeout exceeded"));
            }
            tokio::task::yield_now().await;
        }
        tokio::task::yield_now().await;
        let beats = real.handle.extend_leases(held, lease).await;
        locked.store(false, Ordering::SeqCst);
        beats
    }
}

struct TwoSteps;

#[async_trait]
impl Wrong for TwoSteps {
    async fn extend_leases(&self, real: &Real, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        let held_now = |row: &&mut MemoryRow| held.iter().any(|held| holds(&row.job.execution, held));
        let mut old = Vec::new();
        real.memory().edit(|rows| {
            for row in rows.values_mut().filter(held_now) {
                old.push(row.job.execution.lease_expires_at.take());
            }
        });
        tokio::task::yield_now().await;
        real.memory().edit(|rows| {
            for (row, old) in rows.values_mut().filter(held_now).zip(old) {
                row.job.execution.lease_expires_at = old;
            }
        });
        real.handle.extend_leases(held, lease).await
    }
}

struct HalfABeat;

#[async_trait]
impl Wrong for HalfABeat {
    async fn extend_leases(&self, real: &Real, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        let beats = real.handle.extend_leases(held, lease).await?;
        let fails = |held: &Held| real.memory().edit(|rows| rows.get(&held.id).is_some_and(|row| row.poisoned));
        match held.iter().any(fails) {
            true => Err(Error::not_applied(ErrorKind::Permanent, "one row cannot be written")),
            false => Ok(beats),
        }
    }
}
