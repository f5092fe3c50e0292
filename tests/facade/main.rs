//! The facade on every store. `common` has the store that counts, fails and waits.

mod build;
mod common;
mod faults;
mod lease;
mod outcome;
mod queue;
mod robust;
mod stop;
