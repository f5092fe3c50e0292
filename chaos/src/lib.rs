//! Workers that are killed, frozen and cut off from their database, and a checker of what became of their jobs.
//!
//! Every process appends what it asks of the store, and what it is answered, to a file of its own ([`Recorder`], [`Recording`]).
//! In the end the files and the rows are one history, and [`check`] says whether it could have happened if every change of a job is
//! one fenced compare-and-update.

mod check;
mod history;
mod recording;
mod run;
mod work;

pub use check::Figures;
pub use check::Verdict;
pub use check::Violation;
pub use check::check;
pub use history::Action;
pub use history::Answer;
pub use history::Asked;
pub use history::Change;
pub use history::Entry;
pub use history::Recorder;
pub use history::Seen;
pub use history::Stage;
pub use history::What;
pub use history::read;
pub use recording::Recording;
pub use run::Fault;
pub use run::Options;
pub use run::Outcome;
pub use run::behind_proxy;
pub use run::run;
pub use work::work;
