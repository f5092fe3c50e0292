//! What operators see.

use queue_core::*;

use crate::Damage;
use crate::case::Case;
use crate::case::Failed;
use crate::case::Need;
use crate::case::Outcome;
use crate::case::case;
use crate::case::check;
use crate::case::check_eq;
use crate::context::*;
use crate::harness::Hook;

pub(super) const CASES: &[Case] = &[
    case!(inspect::list_pages_by_id, [], [], "Pages of any size show every job once, by id, and end with the last."),
    case!(
        inspect::paging_survives_changes,
        [],
        [],
        "Rows that come and go meanwhile neither repeat nor hide the others."
    ),
    case!(inspect::list_filters, [], [], "Each filter narrows by itself and together with the others, byte for byte."),
    case!(
        inspect::list_reports_unreadable_rows,
        [B9],
        [Need::Hook(Hook::Damage)],
        "Rows that cannot be read are reported beside the others, and count for the limit."
    ),
    case!(
        inspect::counts,
        [],
        [Need::Hook(Hook::Overwrite)],
        "Jobs are counted by queue and state, and what there is none of is left out."
    ),
    case!(inspect::an_unknown_id_is_none, [], [], "Reading an id that is not stored finds nothing, which is no error."),
];

/// Follows the pages of a list to its end.
async fn pages(handle: &Handle, filter: &ListFilter, rows: usize) -> Result<(Vec<Job>, Vec<Unreadable>), Failed> {
    let (mut jobs, mut unreadable, mut after) = (Vec::new(), Vec::new(), None);
    loop {
        let page = handle.list(filter, after, limit(rows)).await?;
        let count = page.items.len() + page.unreadable.len();
        check!(count <= rows, "a page of {count} rows where {rows} were asked for");
        check!(count > 0 || after.is_none(), "an empty page after what must have been the last, of {rows} rows");
        jobs.extend(page.items);
        unreadable.extend(page.unreadable);
        match page.next {
            None => return Ok((jobs, unreadable)),
            Some(next) => check!(after.is_none_or(|after| next > after), "the pages go back to {next}"),
        }
        after = page.next;
    }
}

fn ids(jobs: &[Job]) -> Vec<JobId> {
    jobs.iter().map(Job::id).collect()
}

async fn list_pages_by_id(context: Context) -> Outcome {
    let handle = context.connect().await?;
    check_eq!(pages(&handle, &ListFilter::default(), 1).await?.0, [], "nothing is there");
    let mut stored = Vec::new();
    // Ids of every kind, in no order: what a signed, a textual or a mixed-endian comparison would sort otherwise.
    for id in [
        "ffffffff-ffff-ffff-ffff-ffffffffffff",
        "80000000-0000-4000-8000-000000000000",
        "00000000-0000-0000-0000-000000000000",
        "01000000-0200-4000-8000-000000000000",
        "02000000-0100-4000-8000-000000000000",
        "7fffffff-ffff-4fff-bfff-ffffffffffff",
        "a0000000-0000-4000-8000-000000000000",
        "00000000-0000-4000-8000-00000000000a",
    ] {
        let id = enqueue(&handle, &NewJob { id: id.parse()?, ..new_job() }).await?;
        stored.push(read(&handle, id).await?);
    }
    stored.sort_by_key(Job::id);
    for rows in 1..=stored.len() + 1 {
        let (jobs, unreadable) = pages(&handle, &ListFilter::default(), rows).await?;
        check_eq!(jobs, stored, "all jobs by id, in pages of {rows}");
        check_eq!(unreadable, [], "and nothing else, in pages of {rows}");
    }
    Ok(())
}

async fn paging_survives_changes(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let jobs: Vec<_> = (0..10).map(|_| new_job()).collect();
    handle.enqueue(&jobs).await?;
    let all = ListFilter::default();
    let first = handle.list(&all, None, limit(4)).await?;
    check_eq!(first.items.len(), 4, "the first page");
    // The row that the cursor stands at goes, and another before it; one comes before it and one at the end.
    for gone in [&first.items[0], &first.items[3]] {
        apply(&handle, &gone.execution, &cancel()).await?;
    }
    handle.purge(JobState::Canceled, Delay::ZERO, limit(10)).await?;
    enqueue(&handle, &NewJob { id: "00000000-0000-4000-8000-000000000001".parse()?, ..new_job() }).await?;
    let newest = enqueue(&handle, &NewJob { id: "ffffffff-0000-4000-8000-000000000001".parse()?, ..new_job() }).await?;
    let rest = handle.list(&all, first.next, limit(100)).await?;
    let mut expected: Vec<_> = jobs[4..].iter().map(|job| job.id).collect();
    expected.push(newest);
    check_eq!(ids(&rest.items), expected, "the rest, neither twice nor missing");
    check_eq!(rest.next, None, "that was the last page");
    Ok(())
}

async fn list_filters(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let me = worker("a");
    for (queue, kind) in [("q", "k"), ("q", "K"), ("Q", "k"), ("q ", "k"), ("Q", "k ")] {
        let new = || NewJob { queue: name(queue), kind: name(kind), ..new_job() };
        handle.enqueue(&[new(), new(), new()]).await?;
        let request = ClaimRequest::new(name(queue), [name(kind)], me.clone(), lease(MINUTE), limit(2))?;
        let claimed = handle.claim(&request).await?.jobs;
        check_eq!(claimed.len(), 2, "two were asked for");
        apply(&handle, &claimed[0].execution, &complete()).await?;
    }
    let (all, _) = pages(&handle, &ListFilter::default(), 100).await?;
    let queues = [None, Some("q"), Some("Q"), Some("nothing")];
    let kinds = [None, Some("k"), Some("K")];
    let states =
        [None, Some(JobState::Waiting), Some(JobState::Running), Some(JobState::Completed), Some(JobState::Failed)];
    for (queue, kind) in queues.into_iter().flat_map(|queue| kinds.map(|kind| (queue, kind))) {
        for state in states {
            let mut filter = ListFilter::default();
            (filter.queue, filter.kind, filter.state) = (queue.map(name), kind.map(name), state);
            let matching = |job: &&Job| {
                queue.is_none_or(|queue| job.queue.as_str() == queue)
                    && kind.is_none_or(|kind| job.kind.as_str() == kind)
                    && state.is_none_or(|state| job.state() == state)
            };
            let expected: Vec<_> = all.iter().filter(matching).map(Job::id).collect();
            let (found, _) = pages(&handle, &filter, 2).await?;
            check_eq!(ids(&found), expected, "queue {queue:?}, kind {kind:?}, state {state:?}");
        }
    }
    Ok(())
}

async fn list_reports_unreadable_rows(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let jobs: Vec<_> = (0..6).map(|_| new_job()).collect();
    handle.enqueue(&jobs).await?;
    let broken = read(&handle, jobs[1].id).await?.execution;
    context.store.damage(jobs[1].id, Damage::BrokenData).await?;
    context.store.damage(jobs[4].id, Damage::ForeignState).await?;
    context.note(format_args!("job {} is broken, job {} of an unknown state", jobs[1].id, jobs[4].id));
    let good = [0, 2, 3, 5].map(|index: usize| jobs[index].id);
    for rows in 1..=7 {
        let (found, unreadable) = pages(&handle, &ListFilter::default(), rows).await?;
        check_eq!(ids(&found), good, "the good rows, in pages of {rows}");
        let reported: Vec<_> = unreadable.iter().map(|row| row.id).collect();
        check_eq!(reported, [jobs[1].id, jobs[4].id], "the bad rows, in pages of {rows}");
        check!(unreadable.iter().all(|row| !row.reason.is_empty()), "the reason is said: {unreadable:?}");
        let executions: Vec<_> = unreadable.into_iter().map(|row| row.execution.map(|execution| *execution)).collect();
        check_eq!(executions, [Some(broken.clone()), None], "what can be read of them");
    }
    let mut waiting = ListFilter::default();
    waiting.state = Some(JobState::Waiting);
    let (found, unreadable) = pages(&handle, &waiting, 10).await?;
    let reported: Vec<_> = unreadable.iter().map(|row| row.id).collect();
    check_eq!((ids(&found), reported), (good.to_vec(), vec![jobs[1].id]), "what waits, for all that is known");
    Ok(())
}

async fn counts(context: Context) -> Outcome {
    let handle = context.connect().await?;
    check_eq!(handle.counts().await?, [], "nothing is there");
    let mut expected = Vec::new();
    for (index, state) in JobState::ALL.iter().copied().enumerate() {
        let queues = if index % 2 == 0 { &["q", "Q"][..] } else { &["q"] };
        for queue in queues {
            let jobs: Vec<_> = (0..=index).map(|_| NewJob { queue: name(queue), ..new_job() }).collect();
            handle.enqueue(&jobs).await?;
            for job in &jobs {
                let row = read(&handle, job.id).await?.execution;
                context.overwrite(&Execution { state, ..row }).await?;
            }
            expected.push(Count { queue: name(queue), state: Some(state), jobs: jobs.len() as u64 });
        }
    }
    let mut counts = handle.counts().await?;
    counts.sort();
    expected.sort();
    check_eq!(counts, expected, "jobs by queue and state");
    Ok(())
}

async fn an_unknown_id_is_none(context: Context) -> Outcome {
    let handle = context.connect().await?;
    let id = "00000000-0000-0000-0000-000000000000".parse()?;
    check_eq!(handle.get(id).await?, None, "nothing is there");
    enqueue(&handle, &new_job()).await?;
    check_eq!(handle.get(id).await?, None, "another job is there");
    Ok(())
}
