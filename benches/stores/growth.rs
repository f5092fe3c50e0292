//! Whether a claim gets slower by what stands in front of it.

use std::sync::Arc;
use std::time::Instant;

use fenced_queue::Delay;
use fenced_queue::Inspect;
use fenced_queue::NewJob;
use fenced_queue::Priority;
use fenced_queue::When;

use crate::Plan;
use crate::Result;
use crate::floor::Floor;
use crate::measure::jobs;
use crate::measure::median;
use crate::measure::request;
use crate::target::Target;

/// Claims that are measured.
const CLAIMS: usize = 200;
const BATCH: usize = 10;

#[derive(Clone, Copy)]
enum Front {
    Finished,
    /// Due in a year, and of the best priority.
    Future,
}

/// One line of the table.
pub(crate) async fn growth(target: &Target, plan: &Plan) -> Result<()> {
    let handle = target.store.contract(1).await?;
    let mut floor = target.store.floor().await?;
    // Twice: what is measured first pays for what is cold.
    claims(&handle).await?;
    let none = claims(&handle).await?;
    print!("{:<10} none {none:>6.0}", target.name);
    for front in [Front::Finished, Front::Future] {
        for count in &plan.fronts {
            floor.clear().await?;
            put(&handle, floor.as_mut(), front, *count).await?;
            let took = claims(&handle).await?;
            let what = match front {
                Front::Finished => "finished",
                Front::Future => "future",
            };
            print!("   {count} {what} {took:>6.0} = {:.2}", took / none);
        }
    }
    println!();
    floor.clear().await
}

async fn put(handle: &Arc<dyn Inspect>, floor: &mut dyn Floor, front: Front, count: usize) -> Result<()> {
    let year = Delay::from_millis(365 * 24 * 3_600_000)?;
    for _ in 0..count / 1_000 {
        let batch: Vec<_> = match front {
            Front::Finished => jobs(1_000)?,
            Front::Future => {
                let future = |job| NewJob { available: When::After(year), priority: Priority::FIRST, ..job };
                jobs(1_000)?.into_iter().map(future).collect()
            }
        };
        handle.enqueue(&batch).await?;
    }
    if matches!(front, Front::Finished) {
        floor.end_everything().await?;
    }
    floor.rest().await
}

/// The median time of a claim, in microseconds.
async fn claims(handle: &Arc<dyn Inspect>) -> Result<f64> {
    for _ in 0..CLAIMS * BATCH / 1_000 {
        handle.enqueue(&jobs(1_000)?).await?;
    }
    let request = request(BATCH)?;
    let mut times = Vec::with_capacity(CLAIMS);
    for _ in 0..CLAIMS {
        let begun = Instant::now();
        let claimed = handle.claim(&request).await?;
        times.push(begun.elapsed().as_secs_f64() * 1e6);
        if claimed.jobs.len() != BATCH {
            return Err(format!("a claim brought {} jobs of {BATCH}", claimed.jobs.len()).into());
        }
    }
    Ok(median(times))
}
