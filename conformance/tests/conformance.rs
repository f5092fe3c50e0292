//! The reference passes its own suite, directly and through `LazyBackend`.

use std::process::ExitCode;

use queue_conformance::Lazily;
use queue_conformance::MemoryHarness;
use queue_conformance::Suite;

fn main() -> ExitCode {
    Suite::new().harness(MemoryHarness).harness(Lazily(MemoryHarness)).run()
}
