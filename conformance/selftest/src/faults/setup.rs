//! Schemas, handles, and waking.

use std::future::pending;
use std::sync::atomic::Ordering;

use async_trait::async_trait;
use queue_core::*;

use crate::Fault;
use crate::broken::Real;
use crate::broken::gap;
use crate::fault::Wrong;

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "setup::migrating_starts_anew",
        &MigratingStartsAnew,
        "Migrating makes the tables anew.",
        &["setup::migrating_again_keeps_jobs", "setup::migrating_at_once"],
    ),
    Fault::new(
        "setup::migrating_twice_fails",
        &MigratingTwiceFails,
        "Migrating a store that has its tables fails.",
        &["setup::migrating_again_keeps_jobs"],
    )
    .everywhere(),
    Fault::new(
        "setup::migrating_at_once_fails",
        &MigratingAtOnceFails,
        "Of programs that migrate at once one succeeds, and the others fail.",
        &["setup::migrating_at_once"],
    )
    .everywhere(),
    Fault::new(
        "setup::lost_with_the_last_handle",
        &LostWithTheLastHandle,
        "What was stored is gone with the last connection.",
        &["setup::reconnecting_keeps_everything"],
    ),
    Fault::new(
        "setup::learns_what_it_can",
        &LearnsWhatItCan,
        "A handle knows its capabilities only after its first call.",
        &["setup::capabilities_are_as_declared"],
    )
    .everywhere(),
    Fault::new(
        "wait::never_wakes",
        &NeverWakes,
        "Waking is declared, and never happens.",
        &[
            "wait::wakes_for_what_comes_after_the_first_poll",
            "wait::wakes_everybody",
            "wait::wakes_for_a_job_given_back",
        ],
    )
    .everywhere()
    .hangs(),
    Fault::new(
        "wait::registers_late",
        &RegistersLate,
        "A wait is registered at its second poll, and misses what came after its first.",
        &["wait::wakes_for_what_comes_after_the_first_poll"],
    )
    .hangs(),
    Fault::new("wait::wakes_one", &WakesOne, "One waiter is woken, the others sleep on.", &["wait::wakes_everybody"])
        .hangs(),
    Fault::new(
        "wait::wakes_for_new_jobs_only",
        &WakesForNewJobsOnly,
        "Only an enqueue wakes.",
        &["wait::wakes_for_a_job_given_back"],
    )
    .hangs(),
    Fault::new(
        "wait::always_ready",
        &AlwaysReady,
        "A wait resolves at once, always.",
        &["wait::wakes_for_what_comes_after_the_first_poll"],
    )
    .everywhere(),
    Fault::new(
        "wait::keeps_the_connection",
        &KeepsTheConnection,
        "A wait keeps the one connection that the other calls need.",
        &["wait::holds_nothing_up"],
    )
    .hangs(),
];

struct MigratingStartsAnew;

#[async_trait]
impl Wrong for MigratingStartsAnew {
    async fn migrate(&self, real: &Real) -> Result<()> {
        real.memory().edit(Rows::clear);
        Ok(())
    }
}

struct MigratingTwiceFails;

#[async_trait]
impl Wrong for MigratingTwiceFails {
    async fn migrate(&self, _: &Real) -> Result<()> {
        Err(Error::not_applied(ErrorKind::Permanent, "table jobs already exists"))
    }
}

struct MigratingAtOnceFails;

#[async_trait]
impl Wrong for MigratingAtOnceFails {
    async fn migrate(&self, real: &Real) -> Result<()> {
        let others = real.shared.busy.fetch_add(1, Ordering::SeqCst);
        gap().await;
        real.shared.busy.fetch_sub(1, Ordering::SeqCst);
        match others {
            0 => real.handle.migrate().await,
            _ => {
                Err(Error::not_applied(ErrorKind::Permanent, "duplicate key value violates pg_type_typname_nsp_index"))
            }
        }
    }
}

struct LostWithTheLastHandle;

#[async_trait]
impl Wrong for LostWithTheLastHandle {
    fn connected(&self, real: &Real) {
        if real.shared.handles.load(Ordering::SeqCst) == 0 {
            real.memory().edit(Rows::clear);
        }
    }
}

struct LearnsWhatItCan;

#[async_trait]
impl Wrong for LearnsWhatItCan {
    fn capabilities(&self, real: &Real) -> Capabilities {
        match real.shared.locked.load(Ordering::SeqCst) {
            true => real.handle.capabilities(),
            false => Capabilities::default(),
        }
    }

    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        real.shared.locked.store(true, Ordering::SeqCst);
        real.handle.enqueue(jobs).await
    }
}

struct NeverWakes;

#[async_trait]
impl Wrong for NeverWakes {
    async fn wait_for_work(&self, _: &Real, _: &[Name]) -> Result<()> {
        pending().await
    }
}

struct RegistersLate;

#[async_trait]
impl Wrong for RegistersLate {
    async fn wait_for_work(&self, real: &Real, queues: &[Name]) -> Result<()> {
        tokio::task::yield_now().await;
        real.handle.wait_for_work(queues).await
    }
}

struct WakesOne;

#[async_trait]
impl Wrong for WakesOne {
    async fn wait_for_work(&self, real: &Real, queues: &[Name]) -> Result<()> {
        let others = real.shared.busy.fetch_add(1, Ordering::SeqCst);
        if others > 0 {
            return pending().await;
        }
        let woken = real.handle.wait_for_work(queues).await;
        real.shared.busy.store(0, Ordering::SeqCst);
        woken
    }
}

struct WakesForNewJobsOnly;

#[async_trait]
impl Wrong for WakesForNewJobsOnly {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let answers = real.handle.enqueue(jobs).await?;
        real.shared.signal.notify();
        Ok(answers)
    }

    async fn wait_for_work(&self, real: &Real, _: &[Name]) -> Result<()> {
        real.shared.signal.wait().await;
        Ok(())
    }
}

struct AlwaysReady;

#[async_trait]
impl Wrong for AlwaysReady {
    async fn wait_for_work(&self, _: &Real, _: &[Name]) -> Result<()> {
        Ok(())
    }
}

struct KeepsTheConnection;

#[async_trait]
impl Wrong for KeepsTheConnection {
    async fn enqueue(&self, real: &Real, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let _turn = real.shared.turn.lock().await;
        real.handle.enqueue(jobs).await
    }

    async fn wait_for_work(&self, real: &Real, queues: &[Name]) -> Result<()> {
        let _turn = real.shared.turn.lock().await;
        real.handle.wait_for_work(queues).await
    }
}
