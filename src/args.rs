//! Typed arguments of jobs.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The arguments of one kind of job: what the producer writes and the handler gets.
///
/// ```
/// use fenced_queue::JobArgs;
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize)]
/// struct Welcome {
///     user: u64,
/// }
///
/// impl JobArgs for Welcome {
///     const KIND: &'static str = "welcome";
///     const QUEUE: &'static str = "mail";
/// }
/// ```
///
/// Jobs outlive releases: add fields with `#[serde(default)]`, and give a new shape a new kind.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the arguments of a job",
    note = "derive `serde::Serialize` and `serde::Deserialize` and implement `fenced_queue::JobArgs`"
)]
pub trait JobArgs: Serialize + DeserializeOwned + Send + 'static {
    /// The name under which handlers are found. It is stored with each job, and **must** be unique.
    const KIND: &'static str;

    /// The queue, unless the job names another.
    const QUEUE: &'static str = "default";
}
