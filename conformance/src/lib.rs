//! The public conformance suite of `fenced-queue`: every backend must pass it, whoever wrote it.
//!
//! Write a [`Harness`]: how to make a fresh store, how to connect another handle to it, how to delete it, and hooks for
//! what only the store's owner can do. Then one line runs every case, and an upgrade of this crate brings new ones by itself:
//!
//! ```no_run
//! use queue_conformance::{MemoryHarness, Suite};
//!
//! fn main() -> std::process::ExitCode {
//!     Suite::new().harness(MemoryHarness).run()
//! }
//! ```
//!
//! The binary takes the usual arguments of a test binary: a part of a name, `--exact`, `--list`, `--skip`. Each case has a stable id,
//! a one-sentence clause and a [`Level`]; what a harness does not offer is listed as ignored, with the reason. A failure prints the clause, where it was broken, the rows, the calls
//! that the case made, and the command that repeats it.
//!
//! | environment | meaning |
//! |---|---|
//! | `QC_SEED` | the seed of the random histories; printed in the header |
//! | `QC_SLOW` | multiplies the time-out of a case, 60 s |
//!
//! The suite never reports a fault that is none. It can overlook a race that did not happen; the number of rounds makes that rare.

mod case;
mod cases;
mod context;
mod harness;
mod memory;
mod proxy;
mod runner;
mod trace;

pub use case::Case;
pub use case::Failed;
pub use case::Level;
pub use case::Need;
pub use case::Outcome;
pub use cases::cases;
pub use context::Context;
pub use harness::BoxError;
pub use harness::CallerTransaction;
pub use harness::Damage;
pub use harness::Harness;
pub use harness::Hold;
pub use harness::Hook;
pub use harness::Lazily;
pub use harness::OwnTransaction;
pub use harness::Scope;
pub use harness::Store;
pub use memory::MemoryHarness;
pub use memory::MemoryStore;
pub use proxy::Direction;
pub use proxy::Proxy;
pub use runner::Suite;
pub use runner::run_case;
