//! Faults against cases.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use queue_conformance::Case;
use queue_conformance::Harness;
use queue_conformance::Level;
use queue_conformance::cases;
use queue_conformance::run_case;
use tokio::sync::Semaphore;

use crate::Broken;
use crate::Fault;

const SEED: u64 = 0x5eed;
/// A case round a fault that is not done by then has not caught it, unless the fault may hang.
const PATIENCE: Duration = Duration::from_secs(20);
/// The same for faults that may hang.
const LITTLE_PATIENCE: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Passed,
    Caught,
    /// Panicked, or was not done in time.
    Broke,
}

/// What every case made of every fault.
#[derive(Debug, Default)]
pub struct Matrix {
    parts: Vec<Part>,
    complaints: Vec<String>,
    faults: Vec<Fault>,
}

/// The faults round one harness, in the order of their list.
#[derive(Debug)]
struct Part {
    name: String,
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Row {
    fault: Fault,
    ran: BTreeSet<&'static str>,
    caught: BTreeSet<&'static str>,
    broke: BTreeSet<&'static str>,
}

impl Row {
    fn take(&mut self, case: &'static str, verdict: Verdict) {
        self.ran.insert(case);
        let to = match verdict {
            Verdict::Passed => return,
            Verdict::Broke if !self.fault.hangs => &mut self.broke,
            Verdict::Caught | Verdict::Broke => &mut self.caught,
        };
        to.insert(case);
    }
}

async fn verdict(harness: &Broken, case: &Case, patience: Duration) -> (Verdict, String) {
    match tokio::time::timeout(patience, run_case(harness, case, SEED)).await {
        Ok(Ok(())) => (Verdict::Passed, String::new()),
        Ok(Err(report)) => {
            // The second line of a report says why.
            let why = report.lines().nth(1).unwrap_or_default();
            let broke = why.contains("panicked") || why.contains("not done within");
            (if broke { Verdict::Broke } else { Verdict::Caught }, report)
        }
        Err(_) => (Verdict::Broke, format!("{}: not done within {patience:?}", case.id)),
    }
}

/// A harness to put faults round: one of one's own, or the reference.
pub type Around = Option<Arc<dyn Harness>>;

fn broken(fault: Fault, around: &Around) -> Broken {
    match around {
        None => Broken::memory(fault),
        Some(harness) => Broken::around(fault, Arc::clone(harness)),
    }
}

impl Matrix {
    /// Nothing has run yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Runs all cases round the harness without a fault: what is right must pass, also through the wrapper.
    pub async fn run_without_fault(&mut self, name: &str, around: Around) {
        for case in cases() {
            let right = broken(Fault::NONE, &around);
            if !case.unmet(right.hooks(), right.capabilities()).is_empty() {
                continue;
            }
            let (verdict, report) = verdict(&right, &case, PATIENCE).await;
            if verdict != Verdict::Passed {
                self.complaints.push(format!("{name}, without a fault: {report}"));
            }
        }
    }

    /// Runs faults round the harness, each against the cases named for it, and unless `named_only` against the others too.
    pub async fn run(&mut self, name: &str, around: Around, faults: &[Fault], named_only: bool) {
        self.faults.extend(faults);
        let permits = Arc::new(Semaphore::new(8));
        let mut running = Vec::new();
        for fault in faults {
            let mut tasks = Vec::new();
            for case in cases() {
                let harness = broken(*fault, &around);
                let runs = fault.caught_by.contains(&case.id) || !named_only && !fault.hangs;
                if !runs || !case.unmet(harness.hooks(), harness.capabilities()).is_empty() {
                    continue;
                }
                let patience = if fault.hangs { LITTLE_PATIENCE } else { PATIENCE };
                let permit = Arc::clone(&permits).acquire_owned().await;
                let task = tokio::spawn(async move {
                    let _permit = permit;
                    let (verdict, report) = verdict(&harness, &case, patience).await;
                    harness.stop();
                    if std::env::var("SELFTEST_SHOW").is_ok_and(|shown| shown == case.id) {
                        println!("{}: {verdict:?} {report}", harness.name());
                    }
                    verdict
                });
                tasks.push((case.id, task));
            }
            running.push((*fault, tasks));
        }
        let mut part = Part { name: name.to_owned(), rows: Vec::new() };
        for (fault, tasks) in running {
            let mut row = Row { fault, ran: BTreeSet::new(), caught: BTreeSet::new(), broke: BTreeSet::new() };
            for (case, task) in tasks {
                row.take(case, task.await.unwrap_or(Verdict::Broke));
            }
            // A fault of what this harness does not offer.
            if row.ran.iter().any(|case| fault.caught_by.contains(case)) || fault.caught_by.is_empty() {
                part.rows.push(row);
            }
        }
        self.parts.push(part);
    }

    fn rows(&self) -> impl Iterator<Item = (&Part, &Row)> {
        self.parts.iter().flat_map(|part| part.rows.iter().map(move |row| (part, row)))
    }

    /// How many faults there are round this harness, and how many different mistakes.
    pub fn counts(&self, name: &str) -> (usize, usize) {
        let names: Vec<_> =
            self.rows().filter(|(part, _)| part.name == name).map(|(_, row)| row.fault.mistake()).collect();
        (names.len(), names.iter().collect::<BTreeSet<_>>().len())
    }

    /// What is wrong with the suite or with the faults.
    pub fn complaints(&self) -> Vec<String> {
        let mut complaints = self.complaints.clone();
        let known: BTreeSet<_> = cases().iter().map(|case| case.id).collect();
        let mut named = BTreeSet::new();
        for (Part { name, .. }, Row { fault, ran, caught, broke }) in self.rows() {
            for case in fault.caught_by {
                named.insert(*case);
                if ran.contains(case) && !caught.contains(case) {
                    let how = if broke.contains(case) { "panicked or hung at" } else { "did not catch" };
                    complaints.push(format!("{name}: {case} {how} {}; caught by {caught:?}", fault.name));
                }
            }
            if fault.caught_by.is_empty() {
                complaints.push(format!("{name}: no case is named for {}; caught by {caught:?}", fault.name));
            }
        }
        for fault in &self.faults {
            for case in fault.caught_by.iter().filter(|case| !known.contains(*case)) {
                complaints.push(format!("{}: there is no case {case}", fault.name));
            }
            if !self.rows().any(|(_, row)| row.fault.name == fault.name) {
                complaints.push(format!("{}: none of its cases ran", fault.name));
            }
        }
        for case in known.difference(&named) {
            complaints.push(format!(
                "{case} is idle: no fault names it; it happens to catch {:?}",
                self.caught_by_case(case)
            ));
        }
        complaints
    }

    fn caught_by_case(&self, case: &str) -> BTreeSet<&'static str> {
        self.rows().filter(|(_, row)| row.caught.contains(case)).map(|(_, row)| row.fault.name).collect()
    }

    /// This run, the weakest rows first.
    pub fn table(&self) -> String {
        let mut text = String::new();
        for part in &self.parts {
            let (faults, mistakes) = self.counts(&part.name);
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "\nmatrix {}: {faults} broken backends, {mistakes} different mistakes, every one caught by the cases named for it",
                part.name
            );
            let mut rows: Vec<_> = part.rows.iter().collect();
            rows.sort_by_key(|row| (row.caught.len(), row.fault.name));
            for Row { fault, ran, caught, broke } in rows {
                let first: Vec<_> = caught.iter().take(4).copied().collect();
                let broke = if broke.is_empty() { String::new() } else { format!(" (broke {broke:?})") };
                let (caught, ran) = (caught.len(), ran.len());
                let _ = writeln!(text, "{caught:4} of {ran:3}  {:42} {}{broke}", fault.name, first.join(" "));
            }
        }
        let mut by_case: Vec<_> = cases().iter().map(|case| (self.caught_by_case(case.id), case.id)).collect();
        by_case.sort_by_key(|(faults, case)| (faults.len(), *case));
        let _ = writeln!(text, "\n{} cases", by_case.len());
        for (faults, case) in by_case {
            let first: Vec<_> = faults.iter().take(4).copied().collect();
            let _ = writeln!(text, "{:4}  {case:48} {}", faults.len(), first.join(" "));
        }
        text
    }

    /// What holds in every run, for `MATRIX.md`.
    pub fn markdown(&self) -> String {
        let mut faults: BTreeMap<_, (Fault, Vec<&str>)> = BTreeMap::new();
        for (part, row) in self.rows() {
            faults.entry(row.fault.name).or_insert((row.fault, Vec::new())).1.push(&part.name);
        }
        let mut text = String::from(
            "# Faults and the cases that catch them\n\n\
             Written by `SELFTEST_BLESS=1 cargo test -p queue-conformance-selftest`, and checked by the same test without\n\
             the variable. Every fault is caught by every case named here, in every run; most are caught by others as well.\n\n",
        );
        for part in &self.parts {
            let (faults, mistakes) = self.counts(&part.name);
            let _ = writeln!(text, "- Round {}: {faults} faults, {mistakes} different mistakes.", part.name);
        }
        text.push_str("\n## By fault\n\n| fault | round | what it does | caught by |\n|---|---|---|---|\n");
        let code = |names: &[&str]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        for (name, (fault, parts)) in &faults {
            let (parts, cases) = (parts.join(", "), code(fault.caught_by));
            let _ = writeln!(text, "| `{name}` | {parts} | {} | {cases} |", fault.what.replace('|', "\\|"));
        }
        text.push_str(
            "\n## By case, those with the fewest first\n\n| case | level | the rule | faults | such as |\n|---|---|---|---|---|\n",
        );
        let mut by_case = Vec::new();
        for case in cases() {
            let names: Vec<_> = faults
                .values()
                .filter(|(fault, _)| fault.caught_by.contains(&case.id))
                .map(|(fault, _)| fault.name)
                .collect();
            by_case.push((names, case));
        }
        by_case.sort_by_key(|(names, case)| (names.len(), case.id));
        for (names, case) in by_case {
            let _ = writeln!(
                text,
                "| `{}` | {} | {} | {} | {} |",
                case.id,
                match case.level() {
                    Level::Must => "must",
                    Level::Capability => "capability",
                },
                case.clause,
                names.len(),
                code(names.get(..3).unwrap_or(&names))
            );
        }
        text
    }
}
