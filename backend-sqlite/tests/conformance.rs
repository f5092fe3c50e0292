//! The conformance suite on SQLite: on its own connections, and on an application's pool.

mod harness;

use std::process::ExitCode;

use harness::SqliteHarness;
use queue_conformance::Suite;

fn main() -> ExitCode {
    Suite::new().harness(SqliteHarness::Own).harness(SqliteHarness::ApplicationPool).run()
}
