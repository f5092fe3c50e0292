//! Runs the cases, and reports.

use std::fmt::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::time::SystemTime;

use libtest_mimic::Arguments;
use libtest_mimic::Failed as TestFailed;
use libtest_mimic::Trial;

use crate::case::Case;
use crate::case::Level;

use crate::cases::cases;
use crate::context::Context;
use crate::harness::BoxError;
use crate::harness::Harness;
use crate::harness::Scope;
use crate::harness::Store;
use crate::trace::Log;
use crate::trace::clipped;

const CASE_TIMEOUT: Duration = Duration::from_secs(60);

/// All cases, over one or several harnesses, as a test binary.
#[derive(Default)]
pub struct Suite {
    harnesses: Vec<Arc<dyn Harness>>,
}

impl std::fmt::Debug for Suite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Suite").field("harnesses", &self.harnesses.len()).finish()
    }
}

impl Suite {
    /// No harness yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a harness; its cases are named after it.
    #[must_use]
    pub fn harness(mut self, harness: impl Harness) -> Self {
        self.harnesses.push(Arc::new(harness));
        self
    }

    /// Runs what the command line asks for, as the whole of `main`.
    pub fn run(self) -> ExitCode {
        let arguments = Arguments::from_args();
        let seed = seed();
        let mut trials = Vec::new();
        for harness in &self.harnesses {
            if !arguments.list {
                println!("{}", header(harness.as_ref(), seed));
            }
            for case in cases() {
                let unmet = case.unmet(harness.hooks(), harness.capabilities());
                let kind = unmet.iter().map(|need| format!("{need}")).collect::<Vec<_>>().join(", ");
                let test_name = format!("{}::{}", harness.name(), case.id);
                let harness = Arc::clone(harness);
                let trial = Trial::test(test_name, move || {
                    run_in_runtime(harness.as_ref(), &case, seed).map_err(TestFailed::from)
                });
                trials.push(trial.with_ignored_flag(!unmet.is_empty()).with_kind(kind));
            }
        }
        libtest_mimic::run(&arguments, trials).exit_code()
    }
}

fn seed() -> u64 {
    std::env::var("QC_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(0x5eed)
}

fn timeout() -> Duration {
    let factor = std::env::var("QC_SLOW").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    CASE_TIMEOUT * factor
}

fn header(harness: &dyn Harness, seed: u64) -> String {
    let described = match runtime() {
        Ok(runtime) => runtime.block_on(in_time("described", harness.describe())).unwrap_or_else(|error| error),
        Err(error) => error,
    };
    let all = cases();
    let runs = all.iter().filter(|case| case.unmet(harness.hooks(), harness.capabilities()).is_empty()).count();
    let must = all.iter().filter(|case| case.level() == Level::Must).count();
    format!(
        "conformance {}: {described}: {runs} of {} cases to run ({must} must, {} by capability), {} ignored; suite {}, seed {seed}",
        harness.name(),
        all.len(),
        all.len() - must,
        all.len() - runs,
        env!("CARGO_PKG_VERSION"),
    )
}

fn runtime() -> Result<tokio::runtime::Runtime, String> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.map_err(|error| format!("no runtime: {error}"))
}

fn run_in_runtime(harness: &dyn Harness, case: &Case, seed: u64) -> Result<(), String> {
    runtime()?.block_on(run_case(harness, case, seed))
}

/// Runs one case on a fresh store, for runners other than [`Suite`]. Needs a multi-threaded Tokio runtime with time enabled.
///
/// # Errors
///
/// The report of the failure.
pub async fn run_case(harness: &dyn Harness, case: &Case, seed: u64) -> Result<(), String> {
    let scope = Scope { name: scope_name() };
    let store =
        harness.provision(&scope).await.map_err(|error| format!("the store could not be provisioned: {error}"))?;
    let log = Arc::new(Log::default());
    let context = Context {
        store: Arc::clone(&store),
        log: Arc::clone(&log),
        handles: Arc::new(AtomicUsize::new(0)),
        seed,
        capabilities: harness.capabilities(),
    };
    // In a task of its own: a panic of the backend fails this case only.
    let mut task = tokio::spawn((case.body)(context));
    let outcome = match tokio::time::timeout(timeout(), &mut task).await {
        Ok(Ok(outcome)) => outcome.map_err(|failed| failed.to_string()),
        Ok(Err(panic)) => Err(format!("panicked: {panic}")),
        Err(_) => {
            task.abort();
            Err(format!("not done within {:?}; QC_SLOW=n multiplies that", timeout()))
        }
    };
    match outcome {
        Ok(()) => in_time("discarded", store.discard()).await,
        Err(text) => Err(report(harness, case, &scope, store.as_ref(), &log, &text, seed).await),
    }
}

/// What the harness does, within the time of a case.
async fn in_time<T>(what: &str, step: impl Future<Output = Result<T, BoxError>>) -> Result<T, String> {
    match tokio::time::timeout(timeout(), step).await {
        Ok(answer) => answer.map_err(|error| format!("the store could not be {what}: {error}")),
        Err(_) => Err(format!("the store was not {what} within {:?}", timeout())),
    }
}

/// As in `qc_0007a1b2c3d4_4711_12`.
fn scope_name() -> String {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    format!("qc_{seconds:09x}_{}_{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

async fn report(
    harness: &dyn Harness,
    case: &Case,
    scope: &Scope,
    store: &dyn Store,
    log: &Log,
    text: &str,
    seed: u64,
) -> String {
    let mut report = format!("{}: {}\n{text}\n", case.id, case.clause);
    // Writing to a String cannot fail.
    let _ =
        writeln!(report, "\nits first jobs, as it last read them and as they are (store {} is kept):", scope.name());
    match tokio::time::timeout(timeout(), store.connect()).await {
        Ok(Ok(handle)) => {
            for (id, before) in log.jobs() {
                let _ = writeln!(report, "  {id}\n    read  {}", before.as_deref().unwrap_or("never"));
                let _ = match tokio::time::timeout(timeout(), handle.get(id)).await {
                    Ok(Ok(Some(job))) => writeln!(report, "    is    {}", clipped(format_args!("{job:?}"))),
                    Ok(Ok(None)) => writeln!(report, "    is    gone"),
                    Ok(Err(error)) => writeln!(report, "    not readable: {error}"),
                    Err(_) => writeln!(report, "    not readable in time"),
                };
            }
        }
        Ok(Err(error)) => drop(writeln!(report, "  not readable: {error}")),
        Err(_) => report.push_str("  not readable in time\n"),
    }
    report.push_str("\nwhat the case did last:\n");
    for line in log.lines() {
        let _ = writeln!(report, "{line}");
    }
    let _ = writeln!(
        report,
        "\nagain: QC_SEED={seed} cargo test --test conformance -- --exact {}::{}",
        harness.name(),
        case.id
    );
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scope_names_fit_every_store() {
        let name = scope_name();
        assert!(
            name.len() <= 32 && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'),
            "{name}"
        );
        assert_ne!(name, scope_name());
    }
}
