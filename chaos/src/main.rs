//! Breaks things while workers work, and says what became of their jobs.
//!
//! ```text
//! queue-chaos run --url URL.. [--seconds N] [--workers N] [--rate JOBS_PER_SECOND] [--pause MILLISECONDS]
//!     [--faults NAME,..] [--do NAME=COMMAND].. [--clocks LIBRARY] [--one-connection true] [--by-id true]
//! ```
//!
//! The store must be empty; of a cluster, `--url` names one node each time. Faults: kill, freeze, cut, lose, silence; `--do` is another, which a shell's command injects and mends again,
//! such as one that kills the server and starts it. `--clocks` is the library of libfaketime, by which the workers' wall clocks are set an
//! hour apart. `--one-connection true` gives every second worker a pool of one connection to SQLite. `--by-id true` makes the workers settle
//! by id, as no worker should: the checker must find it. The program starts itself as the workers: `queue-chaos work`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use std::time::SystemTime;

use queue_chaos::Fault;
use queue_chaos::Options;
use queue_chaos::run;
use queue_chaos::work;
use queue_conformance::BoxError;

#[tokio::main]
async fn main() -> ExitCode {
    match told().await {
        Ok(code) => code,
        Err(error) => {
            eprintln!("queue-chaos: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn told() -> Result<ExitCode, BoxError> {
    let mut arguments = std::env::args().skip(1);
    let what = arguments.next().unwrap_or_default();
    let folder = std::env::temp_dir().join(format!("queue-chaos-{}", std::process::id()));
    let mut by = String::new();
    let mut commands = Vec::new();
    let mut options = Options {
        urls: Vec::new(),
        folder,
        workers: 4,
        lasts: Duration::from_secs(20),
        pause: Duration::from_millis(500),
        rate: 100,
        faults: vec!["kill".parse()?, "freeze".parse()?],
        program: std::env::current_exe()?,
        clocks: None,
        one_connection: false,
        by_id: false,
        patience: Duration::from_secs(120),
    };
    while let Some(argument) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{argument} needs a value"))?;
        match argument.as_str() {
            "--url" => options.urls.push(value),
            "--folder" => options.folder = PathBuf::from(value),
            "--by" => by = value,
            "--seconds" => options.lasts = Duration::from_secs(value.parse()?),
            "--workers" => options.workers = value.parse()?,
            "--rate" => options.rate = value.parse()?,
            "--pause" => options.pause = Duration::from_millis(value.parse()?),
            "--faults" => options.faults = value.split(',').map(str::parse).collect::<Result<_, _>>()?,
            "--by-id" => options.by_id = value.parse()?,
            "--one-connection" => options.one_connection = value.parse()?,
            "--clocks" => options.clocks = Some(PathBuf::from(value)),
            "--do" => {
                let (name, command) = value.split_once('=').ok_or_else(|| format!("{value}: no NAME=COMMAND"))?;
                commands.push(Fault::Command { name: name.to_owned(), command: command.to_owned() });
            }
            _ => return Err(format!("{argument}: no such option").into()),
        }
    }
    options.faults.append(&mut commands);
    match what.as_str() {
        "work" => {
            let Options { urls, folder, by_id, one_connection, .. } = &options;
            work(&urls.concat(), folder, &by, *by_id, *one_connection).await.map(|()| ExitCode::SUCCESS)
        }
        // What the wall clock of a worker says.
        "clock" => {
            println!("{}", SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs());
            Ok(ExitCode::SUCCESS)
        }
        "run" => {
            std::fs::create_dir_all(&options.folder)?;
            let outcome = run(&options).await?;
            println!("{outcome}");
            for violation in &outcome.verdict.violations {
                println!("VIOLATION: {violation}");
            }
            match outcome.verdict.violations.is_empty() {
                true => {
                    std::fs::remove_dir_all(&options.folder)?;
                    Ok(ExitCode::SUCCESS)
                }
                false => Err(format!("the records are in {}", options.folder.display()).into()),
            }
        }
        _ => Err("say `run` or `work`".into()),
    }
}
