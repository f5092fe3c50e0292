//! How fast the stores are: through the contract, and as hand-written statements on the plain driver ("floor"), in one run.
//!
//! ```text
//! scripts/bench.sh                      every store, on servers of its own
//! scripts/bench.sh --stores sqlite,postgres --quick
//! scripts/bench.sh --only worker --drain 100000    or calls, or growth
//! ```
//!
//! Absolute figures say more about the machine than about the queue; the ratios, and the growth, are what to look at. Both sides
//! of a ratio take turns, so that what else the machine does meets both.

mod engine;
mod floor;
mod growth;
mod measure;
mod mongo;
mod mysql;
mod postgres;
mod sqlite;
mod target;

use std::error::Error;
use std::process::ExitCode;

use target::Target;

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

/// What the command line asks for.
#[derive(Clone, Debug)]
struct Plan {
    stores: Vec<String>,
    /// How often each cell is measured, on each side, in turns.
    rounds: usize,
    /// Divides the jobs of a cell.
    share: usize,
    /// How many jobs are put in front of a claim, beside none.
    fronts: Vec<usize>,
    throughput: bool,
    /// How many jobs a worker drains; none to leave it out.
    drain: usize,
}

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<()> {
    let plan = plan()?;
    let mut targets = Vec::new();
    for name in &plan.stores {
        targets.push(Target::open(name).await?);
    }
    for target in &targets {
        println!("{}: {}", target.name, target.version);
    }
    if plan.throughput {
        println!("\nJobs per second, medians of {} rounds: contract / floor = ratio\n", plan.rounds);
        for target in &targets {
            measure::throughput(target, &plan).await?;
        }
    }
    if !plan.fronts.is_empty() {
        println!("\nA claim of 10 behind other jobs: median microseconds, and the ratio to none in front\n");
        for target in &targets {
            growth::growth(target, &plan).await?;
        }
    }
    if plan.drain > 0 {
        println!("\nA worker: jobs per second that it drains / that claims and settles by hand do = ratio\n");
        for target in &targets {
            engine::engine(target, &plan).await?;
        }
    }
    for target in targets {
        target.discard().await?;
    }
    Ok(())
}

fn plan() -> Result<Plan> {
    let all = ["sqlite", "postgres", "mysql", "mariadb", "mongodb"].map(str::to_owned).to_vec();
    let mut plan =
        Plan { stores: all, rounds: 5, share: 1, fronts: vec![100_000, 1_000_000], throughput: true, drain: 20_000 };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--stores" => {
                let names = arguments.next().ok_or("--stores needs names, separated by commas")?;
                plan.stores = names.split(',').map(str::to_owned).collect();
            }
            "--quick" => (plan.rounds, plan.fronts) = (3, vec![100_000]),
            "--smoke" => (plan.rounds, plan.share, plan.fronts) = (1, 20, vec![1_000]),
            "--only" => {
                let part = arguments.next().ok_or("--only needs calls, growth or worker")?;
                plan.throughput = part == "calls";
                if part != "growth" {
                    plan.fronts.clear();
                }
                if part != "worker" {
                    plan.drain = 0;
                }
            }
            "--drain" => plan.drain = arguments.next().ok_or("--drain needs a number of jobs")?.parse()?,
            // What `cargo bench` adds.
            "--bench" => {}
            other => {
                return Err(format!("{other}: known are --stores, --quick, --smoke, --only and --drain").into());
            }
        }
    }
    Ok(plan)
}
