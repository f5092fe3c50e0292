//! The conformance suite on SQLite: on its own connections, on an application's pool, and through `LazyBackend`.

mod harness;

use std::process::ExitCode;

use harness::SqliteHarness;
use queue_conformance::Lazily;
use queue_conformance::Suite;

fn main() -> ExitCode {
    Suite::new()
        .harness(SqliteHarness::Own)
        .harness(SqliteHarness::ApplicationPool)
        .harness(Lazily(SqliteHarness::Own))
        .run()
}
