//! Every fault against the cases named for it; every case is named for one at least.

#[allow(dead_code, reason = "one of its two ways to open a store is enough here")]
#[path = "../../../backend-sqlite/tests/harness/mod.rs"]
mod harness;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use harness::SqliteHarness;
use libtest_mimic::Arguments;
use libtest_mimic::Trial;
use queue_conformance_selftest::Around;
use queue_conformance_selftest::Matrix;
use queue_conformance_selftest::faults;

const MATRIX: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../MATRIX.md");

/// `SELFTEST_FAULT=part` runs only the faults of such a name, `SELFTEST_SHOW=case` shows what that case said, `SELFTEST_ALL=1` runs each
/// fault round memory against all the other cases too, to see which happen to catch it, `SELFTEST_BLESS=1` writes `MATRIX.md`.
fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let trial =
        Trial::test("the_suite_bites", || std::panic::catch_unwind(the_suite_bites).map_err(|_| "see above".into()));
    libtest_mimic::run(&arguments, vec![trial]).exit_code()
}

fn the_suite_bites() {
    let begun = Instant::now();
    let part = std::env::var("SELFTEST_FAULT").unwrap_or_default();
    let faults: Vec<_> = faults().into_iter().filter(|fault| fault.name.contains(&part)).collect();
    let round_memory: Vec<_> = faults.iter().filter(|fault| fault.reference).copied().collect();
    let everywhere: Vec<_> = faults.iter().filter(|fault| fault.everywhere).copied().collect();
    let named_only = std::env::var_os("SELFTEST_ALL").is_none();
    let sqlite: Around = Some(Arc::new(SqliteHarness::Own));
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().expect("a runtime");
    let mut matrix = Matrix::new();
    runtime.block_on(async {
        matrix.run_without_fault("memory", None).await;
        matrix.run("memory", None, &round_memory, named_only).await;
        matrix.run("SQLite", sqlite, &everywhere, true).await;
    });
    if part.is_empty() && std::env::var_os("SELFTEST_BLESS").is_some() {
        std::fs::write(MATRIX, matrix.markdown()).expect("MATRIX.md can be written");
    }
    // Cases that hang are left behind.
    runtime.shutdown_background();
    println!("{}\nmatrix done in {} s", matrix.table(), begun.elapsed().as_secs());
    let complaints = if part.is_empty() { matrix.complaints() } else { Vec::new() };
    assert!(complaints.is_empty(), "{} complaints:\n  {}", complaints.len(), complaints.join("\n  "));
    if part.is_empty() {
        check(&matrix.markdown());
    }
}

fn check(markdown: &str) {
    let there = std::fs::read_to_string(MATRIX).unwrap_or_default();
    assert!(there == markdown, "MATRIX.md is not up to date: SELFTEST_BLESS=1 writes it");
}
