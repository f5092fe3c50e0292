//! Throughput: enqueue, claim and settle in batches, both sides in turns.

use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use fenced_queue::Execution;
use fenced_queue::Inspect;
use fenced_queue::Json;
use fenced_queue::NewJob;
use fenced_queue::WorkerId;
use fenced_queue::contract::ClaimRequest;
use fenced_queue::contract::Fingerprint;
use fenced_queue::contract::Lease;
use fenced_queue::contract::Limit;
use fenced_queue::contract::Transition;
use fenced_queue::contract::Update;
use fenced_queue::contract::UpdateRequest;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::Plan;
use crate::Result;
use crate::floor::Floor;
use crate::floor::Ticket;
use crate::target::Target;

pub(crate) const QUEUE: &str = "bench";
pub(crate) const KIND: &str = "work";
pub(crate) const WORKER: &str = "bench/1";
pub(crate) const RESULT: &str = "\"done\"";

/// Jobs of a cell, for each connection: (batch, jobs).
const ENQUEUE: [(usize, usize); 3] = [(1, 200), (100, 4_000), (1_000, 8_000)];
const SETTLE: [(usize, usize); 4] = [(1, 150), (10, 800), (100, 3_000), (500, 6_000)];

/// Due jobs with a payload of 200 bytes.
pub(crate) fn jobs(count: usize) -> Result<Vec<NewJob>> {
    let payload = Json::encode(&"x".repeat(198))?;
    (0..count).map(|_| Ok(NewJob::new(QUEUE.parse()?, KIND.parse()?, payload.clone()))).collect()
}

pub(crate) fn request(limit: usize) -> Result<ClaimRequest> {
    let lease = Lease::from_millis(600_000)?;
    Ok(ClaimRequest::new(QUEUE.parse()?, [KIND.parse()?], WORKER.parse::<WorkerId>()?, lease, Limit::new(limit)?)?)
}

fn completion(execution: &Execution) -> Result<UpdateRequest> {
    let result = Some(Json::from_text(RESULT)?);
    let patch = Transition::Complete { result }.plan(execution)?;
    Ok(UpdateRequest { id: execution.id, current: Fingerprint::of(execution), patch })
}

/// One side of a ratio, on one connection.
enum Side {
    Contract(Arc<dyn Inspect>, Vec<UpdateRequest>),
    Floor(Box<dyn Floor>, Vec<Ticket>),
}

impl Side {
    async fn enqueue(&mut self, jobs: &[NewJob]) -> Result<()> {
        match self {
            Self::Contract(handle, _) => drop(handle.enqueue(jobs).await?),
            Self::Floor(floor, _) => floor.enqueue(jobs).await?,
        }
        Ok(())
    }

    /// Answers how many.
    async fn claim(&mut self, limit: usize) -> Result<usize> {
        match self {
            Self::Contract(handle, held) => {
                let claimed = handle.claim(&request(limit)?).await?;
                for job in &claimed.jobs {
                    held.push(completion(&job.execution)?);
                }
                Ok(claimed.jobs.len())
            }
            Self::Floor(floor, held) => {
                let tickets = floor.claim(limit).await?;
                held.extend(&tickets);
                Ok(tickets.len())
            }
        }
    }

    /// Settles what was claimed, and answers how many.
    async fn settle(&mut self, batch: usize) -> Result<usize> {
        match self {
            Self::Contract(handle, held) => {
                let held = std::mem::take(held);
                for updates in held.chunks(batch) {
                    let answers = handle.update_many_if_current(updates).await?;
                    if !answers.iter().all(|answer| matches!(answer, Update::Applied(_))) {
                        return Err("a settle was refused".into());
                    }
                }
                Ok(held.len())
            }
            Self::Floor(floor, held) => {
                let held = std::mem::take(held);
                for tickets in held.chunks(batch) {
                    if floor.settle(tickets).await? != u64::try_from(tickets.len())? {
                        return Err("a settle of the floor was refused".into());
                    }
                }
                Ok(held.len())
            }
        }
    }
}

/// What all connections do at once, and when all of them are done.
#[derive(Clone, Copy)]
enum Step {
    Enqueue { batch: usize, jobs: usize },
    Claim { batch: usize, jobs: usize },
    Settle { batch: usize },
}

async fn step(side: &mut Side, step: Step, prepared: &[NewJob]) -> Result<usize> {
    match step {
        Step::Enqueue { batch, .. } => {
            for jobs in prepared.chunks(batch) {
                side.enqueue(jobs).await?;
            }
            Ok(prepared.len())
        }
        Step::Claim { batch, jobs } => {
            let mut claimed = 0;
            while claimed < jobs {
                match side.claim(batch.min(jobs - claimed)).await? {
                    0 => break,
                    some => claimed += some,
                }
            }
            Ok(claimed)
        }
        Step::Settle { batch } => side.settle(batch).await,
    }
}

/// Runs a step on every connection at once, and answers jobs per second.
async fn together(sides: Vec<Side>, what: Step) -> Result<(Vec<Side>, f64)> {
    let barrier = Arc::new(Barrier::new(sides.len()));
    let mut running = JoinSet::<Result<_>>::new();
    for mut side in sides {
        let barrier = Arc::clone(&barrier);
        let prepared = match what {
            Step::Enqueue { jobs: count, .. } => jobs(count)?,
            _ => Vec::new(),
        };
        running.spawn(async move {
            barrier.wait().await;
            let begun = Instant::now();
            let done = step(&mut side, what, &prepared).await?;
            Ok((side, done, begun, Instant::now()))
        });
    }
    let (mut sides, mut done, mut begin, mut end) = (Vec::new(), 0, None::<Instant>, None::<Instant>);
    while let Some(ended) = running.join_next().await {
        let (side, jobs, begun, ready) = ended??;
        sides.push(side);
        done += jobs;
        begin = Some(begin.map_or(begun, |begin| begin.min(begun)));
        end = Some(end.map_or(ready, |end| end.max(ready)));
    }
    let took = begin.zip(end).map_or(Duration::ZERO, |(begin, end)| end - begin);
    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    Ok((sides, done as f64 / took.as_secs_f64()))
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// One table of a store.
pub(crate) async fn throughput(target: &Target, plan: &Plan) -> Result<()> {
    println!("{:<10} {:<16} {:>28} {:>28}", target.name, "", "1 connection", "4 connections");
    let mut cells = Vec::new();
    for connections in [1, 4] {
        cells.push(cells_of(target, plan, connections).await?);
    }
    let labels = labels();
    for (index, label) in labels.iter().enumerate() {
        let cell = |column: usize| {
            let (contract, floor) = cells[column][index];
            format!("{contract:>9.0} / {floor:>9.0} = {:.2}", contract / floor)
        };
        println!("{:<10} {:<16} {:>28} {:>28}", "", label, cell(0), cell(1));
    }
    Ok(())
}

fn labels() -> Vec<String> {
    let enqueue = ENQUEUE.iter().map(|(batch, _)| format!("enqueue by {batch}"));
    let claim = SETTLE.iter().map(|(batch, _)| format!("claim by {batch}"));
    let settle = SETTLE.iter().map(|(batch, _)| format!("settle by {batch}"));
    enqueue.chain(claim).chain(settle).collect()
}

/// The medians of every label, on this many connections: contract and floor.
async fn cells_of(target: &Target, plan: &Plan, connections: u32) -> Result<Vec<(f64, f64)>> {
    let handle = target.store.contract(connections).await?;
    let mut cleaner = target.store.floor().await?;
    let mut rates = [vec![Vec::new(); labels().len()], vec![Vec::new(); labels().len()]];
    // The first round warms both sides up.
    for round in 0..=plan.rounds {
        for (which, rates) in rates.iter_mut().enumerate() {
            let mut sides = Vec::new();
            for _ in 0..connections {
                sides.push(match which {
                    0 => Side::Contract(Arc::clone(&handle), Vec::new()),
                    _ => Side::Floor(target.store.floor().await?, Vec::new()),
                });
            }
            for (index, rate) in one_round(sides, plan, cleaner.as_mut()).await?.into_iter().enumerate() {
                if round > 0 {
                    rates[index].push(rate);
                }
            }
        }
    }
    let [contract, floor] = rates;
    Ok(contract.into_iter().map(median).zip(floor.into_iter().map(median)).collect())
}

async fn one_round(mut sides: Vec<Side>, plan: &Plan, cleaner: &mut dyn Floor) -> Result<Vec<f64>> {
    let (mut enqueued, mut claimed, mut settled) = (Vec::new(), Vec::new(), Vec::new());
    let mut rate;
    for (batch, jobs) in ENQUEUE {
        cleaner.clear().await?;
        (sides, rate) = together(sides, Step::Enqueue { batch, jobs: jobs.div_ceil(plan.share) }).await?;
        enqueued.push(rate);
    }
    for (batch, jobs) in SETTLE {
        cleaner.clear().await?;
        let jobs = jobs.div_ceil(plan.share);
        (sides, _) = together(sides, Step::Enqueue { batch: 1_000, jobs }).await?;
        (sides, rate) = together(sides, Step::Claim { batch, jobs }).await?;
        claimed.push(rate);
        (sides, rate) = together(sides, Step::Settle { batch }).await?;
        settled.push(rate);
    }
    cleaner.clear().await?;
    Ok([enqueued, claimed, settled].concat())
}
