//! Whether a history could have happened if every change of a job is one fenced compare-and-update.
//!
//! Nothing here trusts a worker's or the store's word alone. A change that was answered is known to have been made; one whose answer never
//! came may have been. What each process did is ordered by its own clock readings only where one was over before the other began.

use std::collections::HashMap;
use std::collections::HashSet;
use std::fmt;
use std::time::Duration;

use fenced_queue::contract::Execution;
use fenced_queue::contract::JobId;
use fenced_queue::contract::JobState;
use fenced_queue::contract::Revision;

use crate::history::Answer;
use crate::history::Change;
use crate::history::Entry;
use crate::history::What;

/// What must not be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The store said that it has the job, and it is not there.
    Lost(JobId),
    /// All is over, and the job is held by somebody.
    Unfinished(JobId, JobState),
    /// Two claims of one job have the same fence.
    FenceTwice(JobId, u64),
    /// A claim that began after another was answered has a lower fence, or the row has.
    FenceFell(JobId, u64),
    /// Two changes were made that are based on the same moment.
    Forked(JobId, Revision),
    /// A change, or a claim, was made, and what came after it is not based on it.
    Overwritten(JobId, Revision),
    /// Two outcomes of one job were recorded.
    SecondOutcome(JobId),
    /// A change was made under a claim that was not the newest any more.
    FromALostClaim(JobId, u64),
    /// The job has ended in a way that nobody asked for.
    OutcomeOfNobody(JobId),
    /// A job completed under a claim whose handler never began.
    CompletedUnseen(JobId, u64),
    /// A handler began twice under the same claim.
    BeganTwice(JobId, u64),
    /// A handler began under a claim that the store never gave.
    BeganUnclaimed(JobId, u64),
    /// More starts than the job may have.
    TooManyAttempts(JobId, u32),
    /// Two jobs had the same unique key at the same time.
    KeyTwice(JobId, JobId),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(job) => write!(f, "job {job} was accepted and is gone"),
            Self::Unfinished(job, state) => write!(f, "job {job} is {state} after all is over"),
            Self::FenceTwice(job, fence) => write!(f, "job {job} was given out twice with fence {fence}"),
            Self::FenceFell(job, fence) => write!(f, "job {job} fell back to fence {fence}"),
            Self::Forked(job, revision) => {
                write!(f, "job {job} was changed twice from the moment {}", revision.as_uuid())
            }
            Self::Overwritten(job, revision) => {
                write!(f, "job {job}: what made the moment {} was overwritten", revision.as_uuid())
            }
            Self::SecondOutcome(job) => write!(f, "job {job} has a second outcome"),
            Self::FromALostClaim(job, fence) => write!(f, "job {job} was changed under the lost claim {fence}"),
            Self::OutcomeOfNobody(job) => write!(f, "job {job} has an outcome that nobody recorded"),
            Self::CompletedUnseen(job, fence) => write!(f, "job {job} completed under claim {fence} without a handler"),
            Self::BeganTwice(job, fence) => write!(f, "job {job} began twice under claim {fence}"),
            Self::BeganUnclaimed(job, fence) => write!(f, "job {job} began under claim {fence}, which was never given"),
            Self::TooManyAttempts(job, attempts) => {
                write!(f, "job {job} was started {attempts} times, more than it may")
            }
            Self::KeyTwice(job, other) => write!(f, "jobs {job} and {other} had one key at the same time"),
        }
    }
}

/// What is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Jobs that the store accepted.
    pub jobs: usize,
    /// Handlers that began.
    pub runs: usize,
    /// Jobs that were begun again because nothing was heard of the run before: at least once is what is promised.
    pub repeated: usize,
    /// Changes that the store refused because the row was not as they assumed.
    pub refused: usize,
    /// Calls whose outcome nobody was told.
    pub unanswered: usize,
    /// The longest time between two outcomes of any jobs.
    pub longest_pause: Duration,
}

/// What a history comes to.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// None, if all is well.
    pub violations: Vec<Violation>,
    /// What was counted.
    pub figures: Figures,
}

/// A change that makes a moment, from its first question to its last answer.
struct Edge {
    change: Change,
    sent: u64,
    /// What is known of it.
    made: Made,
    /// The row that it made, if that was answered.
    row: Option<Execution>,
    /// The process that sent it has claimed the job before: else it is a sweep.
    is_own: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Made {
    Yes,
    No,
    Perhaps,
}

struct Claim {
    by: String,
    row: Execution,
    sent: u64,
    answered: u64,
}

/// One job.
#[derive(Default)]
struct Life {
    key: Option<String>,
    max_attempts: u32,
    /// When the store first said that it has it.
    accepted: Option<u64>,
    edges: Vec<Edge>,
    claims: Vec<Claim>,
    /// By fence.
    began: HashMap<u64, (u32, usize)>,
}

impl Life {
    /// The fence of a claim, or of a change that followed one.
    fn fence_of(&self, moment: Revision) -> Option<u64> {
        if let Some(claim) = self.claims.iter().find(|claim| claim.row.revision == moment) {
            return Some(claim.row.fence);
        }
        self.edges.iter().find(|edge| edge.change.to == Some(moment))?.row.as_ref().map(|row| row.fence)
    }
}

/// Judges a history by the rows that are there in the end.
pub fn check(history: &[Entry], ends: &[Execution]) -> Verdict {
    let mut verdict = Verdict::default();
    let lives = lives(history, &mut verdict.figures);
    let ends: HashMap<_, _> = ends.iter().map(|end| (end.id, end)).collect();
    for (id, life) in &lives {
        verdict.figures.jobs += usize::from(life.accepted.is_some());
        let runs: usize = life.began.values().map(|(_, times)| times).sum();
        let failures =
            life.edges.iter().filter(|edge| edge.made == Made::Yes && edge.change.fails && edge.is_own).count();
        verdict.figures.runs += runs;
        verdict.figures.repeated += runs.saturating_sub(1 + failures);
        judge(*id, life, ends.get(id).copied(), &mut verdict.violations);
    }
    keys(&lives, &ends, &mut verdict.violations);
    verdict
}

fn lives(history: &[Entry], figures: &mut Figures) -> HashMap<JobId, Life> {
    let mut lives: HashMap<JobId, Life> = HashMap::new();
    let mut asked = HashMap::new();
    let mut last_outcome = None;
    for entry in history {
        let question = |call: &u64| (entry.by.as_str(), *call);
        match &entry.what {
            What::Enqueue { call, jobs } => {
                for job in jobs {
                    let life = lives.entry(job.job).or_default();
                    (life.key, life.max_attempts) = (job.key.clone(), job.max_attempts);
                }
                asked.insert(question(call), entry);
            }
            What::Claim { call } => drop(asked.insert(question(call), entry)),
            What::Update { call, changes } => {
                // One that keeps the moment, such as progress, is no part of the chain.
                for change in changes.iter().filter(|change| change.to.is_some()) {
                    let life = lives.entry(change.job).or_default();
                    match edge(&mut life.edges, change) {
                        None => {
                            let is_own = life.claims.last().is_some_and(|claim| claim.by == entry.by);
                            let change = change.clone();
                            life.edges.push(Edge { change, sent: entry.at, made: Made::Perhaps, row: None, is_own });
                        }
                        // Not made before, it can be made by this sending.
                        Some(edge) if edge.made == Made::No => (edge.made, edge.sent) = (Made::Perhaps, entry.at),
                        // Sent again, it is the same change.
                        Some(_) => {}
                    }
                }
                asked.insert(question(call), entry);
            }
            What::Enqueued { call, stored } => {
                if let Some(What::Enqueue { jobs, .. }) = asked.remove(&question(call)).map(|asked| &asked.what) {
                    for (job, _) in jobs.iter().zip(stored).filter(|(_, stored)| **stored) {
                        lives.entry(job.job).or_default().accepted.get_or_insert(entry.at);
                    }
                }
            }
            What::Claimed { call, jobs } => {
                let sent = asked.remove(&question(call)).map_or(0, |asked| asked.at);
                for row in jobs {
                    let claim = Claim { by: entry.by.clone(), row: row.clone(), sent, answered: entry.at };
                    lives.entry(row.id).or_default().claims.push(claim);
                }
            }
            What::Updated { call, answers } => {
                if let Some(What::Update { changes, .. }) = asked.remove(&question(call)).map(|asked| &asked.what) {
                    for (change, answer) in changes.iter().zip(answers) {
                        let edges = &mut lives.entry(change.job).or_default().edges;
                        if change.state.is_final() && matches!(answer, Answer::Applied(_)) {
                            let pause = entry.at - last_outcome.replace(entry.at).unwrap_or(entry.at);
                            figures.longest_pause = figures.longest_pause.max(Duration::from_micros(pause));
                        }
                        if let Some(edge) = edge(edges, change) {
                            figures.refused += usize::from(!answered(edge, answer));
                        }
                    }
                }
            }
            What::Failed { call, nothing } => {
                figures.unanswered += usize::from(!nothing);
                if let Some(asked) = asked.remove(&question(call)).filter(|_| *nothing)
                    && let What::Update { changes, .. } = &asked.what
                {
                    for change in changes {
                        let edges = &mut lives.entry(change.job).or_default().edges;
                        // Another sending of it may have been made.
                        if let Some(edge) = edge(edges, change).filter(|edge| edge.sent >= asked.at) {
                            edge.made = Made::No;
                        }
                    }
                }
            }
            What::Began { job, fence, attempt } => {
                let (last, times) = lives.entry(*job).or_default().began.entry(*fence).or_default();
                (*last, *times) = (*attempt, *times + 1);
            }
            What::Broke { .. } => {}
        }
    }
    figures.unanswered += asked.len();
    lives
}

fn edge<'e>(edges: &'e mut [Edge], change: &Change) -> Option<&'e mut Edge> {
    edges.iter_mut().rev().find(|edge| edge.change.to == change.to)
}

/// Takes the answer in; false if the store refused the change.
fn answered(edge: &mut Edge, answer: &Answer) -> bool {
    match answer {
        Answer::Applied(row) => (edge.made, edge.row) = (Made::Yes, Some(row.clone())),
        // The row tells that an earlier sending of it was made.
        Answer::Conflict(row) if Some(row.revision) == edge.change.to => {
            (edge.made, edge.row) = (Made::Yes, Some(row.clone()));
        }
        // Made before, and gone on since; or never.
        Answer::Conflict(_) | Answer::Missing => return false,
    }
    true
}

fn judge(id: JobId, life: &Life, end: Option<&Execution>, violations: &mut Vec<Violation>) {
    let Some(end) = end else {
        if life.accepted.is_some() {
            violations.push(Violation::Lost(id));
        }
        return;
    };
    if end.state.is_held() {
        violations.push(Violation::Unfinished(id, end.state));
    }
    fences(id, life, end, violations);
    moments(id, life, end, violations);
    outcomes(id, life, end, violations);
    handlers(id, life, end, violations);
}

fn fences(id: JobId, life: &Life, end: &Execution, violations: &mut Vec<Violation>) {
    let mut given = HashSet::new();
    for claim in &life.claims {
        let fence = claim.row.fence;
        if !given.insert(fence) {
            violations.push(Violation::FenceTwice(id, fence));
        }
        if life.claims.iter().any(|later| later.sent > claim.answered && later.row.fence < fence) || end.fence < fence {
            violations.push(Violation::FenceFell(id, fence));
        }
    }
}

/// That what was made was built upon, and once only.
fn moments(id: JobId, life: &Life, end: &Execution, violations: &mut Vec<Violation>) {
    let made = || life.edges.iter().filter(|edge| edge.made == Made::Yes);
    let mut based = HashSet::new();
    for edge in made() {
        if !based.insert(edge.change.from) {
            violations.push(Violation::Forked(id, edge.change.from));
        }
        // Of the moment that it is based on: the row that was made tells the fence of whatever was there.
        let fence = life.fence_of(edge.change.from).or(edge.row.as_ref().map(|row| row.fence));
        let was_lost = |fence: u64| {
            edge.row.as_ref().is_some_and(|row| row.fence > fence)
                || life.claims.iter().any(|claim| claim.row.fence > fence && claim.answered < edge.sent)
        };
        if let Some(fence) = fence.filter(|fence| was_lost(*fence)) {
            violations.push(Violation::FromALostClaim(id, fence));
        }
    }
    let goes_on = |revision: Revision| {
        end.revision == revision || life.edges.iter().any(|edge| edge.made != Made::No && edge.change.from == revision)
    };
    for claim in &life.claims {
        if !goes_on(claim.row.revision) {
            violations.push(Violation::Overwritten(id, claim.row.revision));
        }
    }
    for (edge, revision) in made().filter_map(|edge| Some((edge, edge.change.to?))) {
        // A claim follows a job that waits without saying what it was based on.
        let claimed =
            edge.change.state == JobState::Waiting && edge.row.as_ref().is_none_or(|row| end.fence > row.fence);
        if !claimed && !goes_on(revision) {
            violations.push(Violation::Overwritten(id, revision));
        }
    }
}

fn outcomes(id: JobId, life: &Life, end: &Execution, violations: &mut Vec<Violation>) {
    let outcomes = || life.edges.iter().filter(|edge| edge.change.state.is_final());
    if outcomes().filter(|edge| edge.made == Made::Yes).count() > 1 {
        violations.push(Violation::SecondOutcome(id));
    }
    let recorded =
        |edge: &Edge| edge.made != Made::No && edge.change.to == Some(end.revision) && edge.change.state == end.state;
    if end.state.is_final() && !outcomes().any(recorded) {
        violations.push(Violation::OutcomeOfNobody(id));
    }
    if end.state == JobState::Completed && !life.began.contains_key(&end.fence) {
        violations.push(Violation::CompletedUnseen(id, end.fence));
    }
}

fn handlers(id: JobId, life: &Life, end: &Execution, violations: &mut Vec<Violation>) {
    for (fence, (attempt, times)) in &life.began {
        if *times > 1 {
            violations.push(Violation::BeganTwice(id, *fence));
        }
        if !life.claims.iter().any(|claim| claim.row.fence == *fence) {
            violations.push(Violation::BeganUnclaimed(id, *fence));
        }
        if *attempt > life.max_attempts {
            violations.push(Violation::TooManyAttempts(id, *attempt));
        }
    }
    if end.attempt > life.max_attempts {
        violations.push(Violation::TooManyAttempts(id, end.attempt));
    }
}

/// That of two jobs with one key one was over before the other was accepted.
fn keys(lives: &HashMap<JobId, Life>, ends: &HashMap<JobId, &Execution>, violations: &mut Vec<Violation>) {
    struct Holder {
        id: JobId,
        accepted: u64,
        /// When it was first asked to end.
        freed: Option<u64>,
    }
    let mut by_key: HashMap<&str, Vec<Holder>> = HashMap::new();
    for (id, life) in lives {
        let (Some(key), Some(accepted)) = (&life.key, life.accepted) else { continue };
        let ended = |edge: &&Edge| edge.made != Made::No && edge.change.state.is_final();
        let freed = life.edges.iter().filter(ended).map(|edge| edge.sent).min();
        let freed = freed.filter(|_| ends.get(id).is_none_or(|end| end.state.is_final()));
        by_key.entry(key).or_default().push(Holder { id: *id, accepted, freed });
    }
    for holders in by_key.values() {
        for (place, one) in holders.iter().enumerate() {
            for other in &holders[place + 1..] {
                let before = |one: &Holder, other: &Holder| one.freed.is_some_and(|freed| freed <= other.accepted);
                if !before(one, other) && !before(other, one) {
                    violations.push(Violation::KeyTwice(one.id, other.id));
                }
            }
        }
    }
}
