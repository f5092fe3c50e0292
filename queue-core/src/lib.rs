//! The contract of `fenced-queue`: what a durable job queue over a database promises, in types.
//!
//! > Every lifecycle write is a compare-and-update against the execution that it was decided on. It
//! > applies atomically or not at all, and the caller learns which.
//!
//! Applications use `fenced-queue`; this crate is for authors of backends, who implement [`Backend`]
//! and prove it with `queue-conformance`, and for whoever wants the rules without a runtime.
//!
//! # Words
//!
//! | word | meaning |
//! |---|---|
//! | job | a unit of work that is stored: [`NewJob`], then [`Job`] |
//! | execution | where a job is in its life: what decisions are based on, [`Execution`] |
//! | claim | a due job given to one worker, in one atomic write: [`Backend::claim`] |
//! | lease | until when a claim is held without a heartbeat: [`Lease`] |
//! | heartbeat | the renewal of leases: [`Backend::extend_leases`] |
//! | fence | a number that every claim raises, for other systems to refuse an older writer: [`Execution::fence`] |
//! | revision | the random identity of one moment of a job's life: [`Revision`] |
//! | fingerprint | what a write compares before it applies: [`Fingerprint`] |
//! | settle | to record how an execution went: [`Transitioner`] |
//! | conflict | the job is no longer what a decision was based on: [`Conflict`] |
//! | stale | held with a lease that has run out: [`Backend::stale`] |
//! | recover | to put a stale job back: [`recover_stale`] |
//! | step | what a job did under a name, kept for when it runs again: [`DurableSteps`] |
//! | wait, event | a step whose value comes from outside: [`DurableSteps::emit`] |
//!
//! # What is not promised
//!
//! A job may run more than once: no queue can stop code that is already running on a machine that was
//! given up. What is promised is that at most one outcome is *recorded* per execution, and that whoever
//! lost its claim is told.

mod backend;
mod batch;
mod delegate;
mod error;
mod fingerprint;
mod job;
mod json;
mod lazy;
mod memory;
mod name;
mod patch;
mod recovery;
mod schema;
mod state;
mod steps;
mod time;
mod transition;
mod transitioner;
mod wake;

pub use backend::Backend;
pub use backend::Beat;
pub use backend::Capabilities;
pub use backend::ClaimRequest;
pub use backend::Claimed;
pub use backend::Count;
pub use backend::Held;
pub use backend::Inspect;
pub use backend::Limit;
pub use backend::ListFilter;
pub use backend::Page;
pub use backend::StaleCursor;
pub use backend::Transactional;
pub use backend::Unreadable;
pub use backend::Update;
pub use backend::UpdateRequest;
pub use backend::check_purge;
pub use backend::check_updates;
pub use batch::BatchItem;
pub use batch::chunks;
pub use error::Certainty;
pub use error::Error;
pub use error::ErrorKind;
pub use error::Invalid;
pub use error::Result;
pub use fingerprint::Fingerprint;
pub use fingerprint::LeaseMatch;
pub use job::Enqueued;
pub use job::Execution;
pub use job::Failure;
pub use job::FailureText;
pub use job::Job;
pub use job::NewJob;
pub use job::Priority;
pub use job::check_new_jobs;
pub use job::id_reused;
pub use job::key_taken;
pub use json::Json;
pub use lazy::LazyBackend;
pub use memory::MemoryBackend;
pub use memory::MemoryRow;
pub use memory::Rows;
pub use name::Identifier;
pub use name::JobId;
pub use name::Name;
pub use name::Revision;
pub use name::UniqueKey;
pub use name::WorkerId;
pub use patch::Change;
pub use patch::NewFailure;
pub use patch::Patch;
pub use recovery::Sweep;
pub use recovery::recover_stale;
pub use recovery::release_orphans;
pub use schema::SchemaVersion;
pub use state::JobState;
pub use steps::DurableSteps;
pub use steps::Emitted;
pub use steps::HandOver;
pub use steps::NewEvent;
pub use steps::NewWait;
pub use steps::Step;
pub use steps::StepAction;
pub use steps::StepColumns;
pub use steps::StepError;
pub use steps::StepPlan;
pub use steps::StepState;
pub use steps::StepWrite;
pub use steps::Stepped;
pub use steps::Suspended;
pub use steps::Suspension;
pub use steps::Wait;
pub use steps::begin_step;
pub use steps::finish_step;
pub use steps::unreadable_event;
pub use steps::unreadable_step;
pub use time::ClockOffset;
pub use time::Delay;
pub use time::Lease;
pub use time::Timestamp;
pub use time::When;
pub use transition::IllegalTransition;
pub use transition::Transition;
pub use transitioner::Conflict;
pub use transitioner::Decision;
pub use transitioner::Settled;
pub use transitioner::TransitionError;
pub use transitioner::Transitioner;
pub use wake::WorkSignal;
