//! The conformance suite on MongoDB: on its own client, and on an application's client with awkward settings.

mod harness;

use std::process::ExitCode;

use harness::MongoHarness;
use queue_conformance::Suite;

fn main() -> ExitCode {
    match harness::excluded() {
        true => ExitCode::SUCCESS,
        false => Suite::new().harness(MongoHarness::Own).harness(MongoHarness::ApplicationClient).run(),
    }
}
