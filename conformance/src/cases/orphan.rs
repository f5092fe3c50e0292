//! Claims whose answer never reached their worker.

use std::collections::BTreeSet;
use std::sync::Arc;

use queue_core::*;

use crate::Damage;
use crate::case::Case;
use crate::case::Need;
use crate::case::Outcome;
use crate::case::case;
use crate::case::check;
use crate::case::check_eq;
use crate::context::*;
use crate::harness::Hook;

const CLOCK: Need = Need::Hook(Hook::Clock);
const DAMAGE: Need = Need::Hook(Hook::Damage);

pub(super) const CASES: &[Case] = &[
    case!(orphan::released_after_the_grace, [C18 S10 B10], [CLOCK], "A claim that never reached its worker survives heartbeats within the grace, and is released after it with its attempt; what is held stays."),
    case!(
        orphan::claimed_by_lists_its_own,
        [C9],
        [CLOCK],
        "Only jobs that this very incarnation holds are listed, in pages by id."
    ),
    case!(
        orphan::claimed_by_reports_what_it_cannot_read,
        [B9],
        [DAMAGE],
        "A held row that cannot be read hides none of the worker's others."
    ),
];

async fn released_after_the_grace(context: Context) -> Outcome {
    const GRACE: i64 = 20_000;
    let handle = context.connect().await?;
    let me = worker("a");
    handle.enqueue(&(0..4).map(|_| new_job()).collect::<Vec<_>>()).await?;
    let jobs = handle.claim(&claim_for(&me, 4)).await?.jobs;
    check_eq!(jobs.len(), 4, "all are claimed");
    // The answer reached the worker for the first two only; the second one's result waits in a buffer, so it is held too.
    let mine = [jobs[0].id(), jobs[1].id()];
    let orphans = |handle: Handle, me: WorkerId| async move {
        release_orphans(&handle, &me, millis(GRACE), limit(1), |id| mine.contains(&id)).await
    };
    context.advance(GRACE / 2).await?;
    handle
        .extend_leases(&jobs[..2].iter().filter_map(|job| Held::of(&job.execution)).collect::<Vec<_>>(), lease(MINUTE))
        .await?;
    let early = orphans(Arc::clone(&handle), me.clone()).await?;
    check_eq!(early.recovered.len(), 0, "within the grace nothing is released");
    context.advance(GRACE).await?;
    let late = orphans(Arc::clone(&handle), me.clone()).await?;
    let released: BTreeSet<_> = ids(&late.recovered).into_iter().collect();
    check_eq!(released, [jobs[2].id(), jobs[3].id()].into(), "past the grace the orphans are released");
    for job in &jobs[..2] {
        let row = read(&handle, job.id()).await?.execution;
        check_eq!((row.state, row.revision), (JobState::Running, job.execution.revision), "what is held stays");
    }
    let again = handle.claim(&claim_for(&worker("b"), 10)).await?.jobs;
    check_eq!(
        again.iter().map(|job| job.execution.attempt).collect::<Vec<_>>(),
        [1, 1],
        "with their attempts given back"
    );
    Ok(())
}

async fn claimed_by_lists_its_own(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let (me, other) = (worker("a"), worker("a"));
    let mut mine = Vec::new();
    for index in 0..9 {
        let job = running(&handle, &new_job(), if index % 3 == 2 { &other } else { &me }).await?;
        match index % 3 {
            2 => {}
            1 if index > 3 => drop(apply(&handle, &job.execution, &complete()).await?),
            _ => mine.push(job.execution),
        }
    }
    enqueue(&handle, &new_job()).await?;
    mine.push(claim_one(&handle, &claim_for(&me, 1).reserve()).await?.execution);
    context.advance(5_000).await?;
    running(&handle, &new_job(), &me).await?;
    mine.sort_by_key(|row| row.id);
    for rows_per_page in [1, 2, 100] {
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let page = handle.claimed_by(&me, millis(4_000), after, limit(rows_per_page)).await?;
            check!(
                page.items.len() <= rows_per_page && found.len() <= mine.len(),
                "paging by {rows_per_page} must end"
            );
            found.extend(page.items);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        check_eq!(found, mine, "held by this incarnation for 4 s, paged by {rows_per_page}");
    }
    Ok(())
}

async fn claimed_by_reports_what_it_cannot_read(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let me = worker("a");
    let broken = running(&handle, &new_job(), &me).await?;
    let foreign = running(&handle, &new_job(), &me).await?;
    let good = running(&handle, &new_job(), &me).await?;
    context.store.damage(broken.id(), Damage::BrokenData).await?;
    context.store.damage(foreign.id(), Damage::ForeignState).await?;
    let page = handle.claimed_by(&me, Delay::ZERO, None, limit(10)).await?;
    check_eq!(ids(&page.items), [broken.id(), good.id()], "what decisions are based on can be read");
    Ok(())
}
