//! What a case is, and how it fails.

use std::fmt;
use std::future::Future;
use std::panic::Location;
use std::pin::Pin;

use queue_core::Capabilities;

use crate::context::Context;
use crate::harness::BoxError;
use crate::harness::Hook;

/// What a case found.
pub type Outcome = Result<(), Failed>;

/// One rule of the contract, checked.
#[derive(Clone, Copy)]
pub struct Case {
    /// Its stable id, `group::sentence`.
    pub id: &'static str,
    /// The rule, in one sentence.
    pub clause: &'static str,
    /// The known failures of queues that it rules out.
    pub covers: &'static [&'static str],
    /// What it cannot run without.
    pub needs: &'static [Need],
    pub(crate) body: fn(Context) -> Pin<Box<dyn Future<Output = Outcome> + Send>>,
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case").field("id", &self.id).field("clause", &self.clause).finish_non_exhaustive()
    }
}

/// Whether every backend must pass a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Every backend.
    Must,
    /// Those that declare a capability.
    Capability,
}

/// Something that a case cannot run without.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Need {
    /// A hook of the harness.
    Hook(Hook),
    /// [`Capabilities::skips_locked_rows`].
    SkipsLockedRows,
    /// [`Capabilities::atomic_batches`].
    AtomicBatches,
    /// [`Capabilities::wakes`].
    Wakes,
    /// [`Capabilities::durable_steps`].
    DurableSteps,
}

impl Need {
    fn is_met(self, hooks: &[Hook], capabilities: Capabilities) -> bool {
        match self {
            Self::Hook(hook) => hooks.contains(&hook),
            Self::SkipsLockedRows => capabilities.skips_locked_rows,
            Self::AtomicBatches => capabilities.atomic_batches,
            Self::Wakes => capabilities.wakes,
            Self::DurableSteps => capabilities.durable_steps,
        }
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hook(hook) => write!(f, "no {hook:?} hook"),
            need => write!(f, "{need:?} not declared"),
        }
    }
}

impl Case {
    /// Whether every backend must pass it.
    pub fn level(&self) -> Level {
        let is_capability = |need: &Need| !matches!(need, Need::Hook(hook) if *hook != Hook::Transaction);
        if self.needs.iter().any(is_capability) { Level::Capability } else { Level::Must }
    }

    /// What it needs and does not get; empty if it can run.
    pub fn unmet(&self, hooks: &[Hook], capabilities: Capabilities) -> Vec<Need> {
        self.needs.iter().copied().filter(|need| !need.is_met(hooks, capabilities)).collect()
    }
}

/// Why a case failed, and where.
#[derive(Debug)]
pub struct Failed {
    text: String,
    at: &'static Location<'static>,
}

impl Failed {
    /// With this text, at the caller's place.
    #[track_caller]
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), at: Location::caller() }
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (at {}:{})", self.text, self.at.file(), self.at.line())
    }
}

macro_rules! failed_from {
    ($($error:ty),*) => {$(
        impl From<$error> for Failed {
            #[track_caller]
            fn from(error: $error) -> Self {
                Self::new(format!("unexpected error: {error}"))
            }
        }
    )*};
}

failed_from!(
    BoxError,
    queue_core::Error,
    queue_core::IllegalTransition,
    queue_core::Invalid,
    queue_core::TransitionError,
    tokio::task::JoinError
);

/// An entry of a group's list: `case!(group::name, [covers], [needs], "clause")`. A body that is not listed is dead code, which the lints
/// refuse; an entry without a body does not compile.
macro_rules! case {
    ($group:ident :: $name:ident, [$($covers:ident)*], [$($needs:expr),*], $clause:literal) => {
        $crate::case::Case {
            id: concat!(stringify!($group), "::", stringify!($name)),
            clause: $clause,
            covers: &[$(stringify!($covers)),*],
            needs: &[$($needs),*],
            body: |context| Box::pin($name(context)),
        }
    };
}
pub(crate) use case;

/// Fails the case unless the condition holds.
macro_rules! check {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err($crate::case::Failed::new(format!($($text)+)));
        }
    };
}
pub(crate) use check;

/// Fails the case unless what was observed is what was expected.
macro_rules! check_eq {
    ($observed:expr, $expected:expr, $($text:tt)+) => {
        match (&$observed, &$expected) {
            (observed, expected) => if observed != expected {
                let text = format!($($text)+);
                return Err($crate::case::Failed::new(format!("{text}\n  expected: {expected:?}\n  observed: {observed:?}")));
            }
        }
    };
}
pub(crate) use check_eq;
