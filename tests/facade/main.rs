//! The facade on every store. `common` has the store that counts, fails and waits.

mod build;
mod common;
mod completion;
#[cfg(any(feature = "postgres", feature = "mysql", feature = "mongo"))]
mod completion_on_servers;
mod durable;
mod faults;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod killed;
mod kinds;
mod lease;
#[cfg(feature = "metrics")]
mod metrics;
mod outcome;
mod prefetch;
mod queue;
mod robust;
#[cfg(any(feature = "postgres", feature = "mysql", feature = "mongo"))]
mod servers;
mod stop;
