//! Whether a history could have happened if every change of a job is one fenced compare-and-update.
//!
//! Nothing here trusts a worker's or the store's word alone. A change that was answered is known to have been made; one whose answer never
//! came may have been. What each process did is ordered by its own clock readings only where one was over before the other began.

mod steps;

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::collections::HashSet;
use std::fmt;
use std::time::Duration;

use fenced_queue::contract::Execution;
use fenced_queue::contract::JobId;
use fenced_queue::contract::JobState;
use fenced_queue::contract::Json;
use fenced_queue::contract::Name;
use fenced_queue::contract::Revision;

use crate::history::Action;
use crate::history::Answer;
use crate::history::Change;
use crate::history::Entry;
use crate::history::Seen;
use crate::history::Stage;
use crate::history::What;

/// What must not be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The store said that it has the job, and it is not there.
    Lost(JobId),
    /// All is over, and the job is held by somebody, or waits.
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
    /// A step was begun, finished or read back in the name of a claim that was over.
    StepOfALostClaim(JobId, Name),
    /// The effect of a step happened, and the store had not granted it to this claim.
    EffectUngranted(JobId, Name, u64),
    /// The effect of a step happened twice under one claim.
    EffectTwice(JobId, Name, u64),
    /// A step, or a wait, ended in two ways: with two values, or with an event and because its time was over.
    SecondEnd(JobId, Name),
    /// A step is less far than it was known to be before.
    Forgotten(JobId, Name),
    /// A handler was told of an end that the store had not confirmed to its process.
    ToldUnstored(JobId, Name),
    /// A step has a value that nobody gave it, or a wait ended and nobody ended it.
    EndOfNobody(JobId, Name),
    /// The job was given out again, and its wait had not ended.
    GoneOnWaiting(JobId, Name),
    /// A wait was over before its time, and no event came.
    TimedOutEarly(JobId, Name),
    /// A wait timed out although its event was there in time.
    EventMissed(JobId, Name),
    /// An event was the first of its key, and so was another; or two payloads count.
    SecondEvent(Name),
    /// The first job went on as the second, which is not there.
    NoSuccessor(JobId, JobId),
    /// The second job is there, and the first did not go on as it.
    SuccessorOfNobody(JobId, JobId),
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
            Self::StepOfALostClaim(job, step) => write!(f, "job {job}: {step} was granted to a claim that was over"),
            Self::EffectUngranted(job, step, fence) => {
                write!(f, "job {job}: the effect of {step} began under claim {fence}, and was not granted")
            }
            Self::EffectTwice(job, step, fence) => {
                write!(f, "job {job}: the effect of {step} began twice under claim {fence}")
            }
            Self::SecondEnd(job, step) => write!(f, "job {job}: {step} ended in two ways"),
            Self::Forgotten(job, step) => write!(f, "job {job}: {step} was further before"),
            Self::ToldUnstored(job, step) => write!(f, "job {job}: the handler was told an end of {step} that is none"),
            Self::EndOfNobody(job, step) => write!(f, "job {job}: {step} ended, and nobody ended it so"),
            Self::GoneOnWaiting(job, step) => write!(f, "job {job} went on, and {step} had not ended"),
            Self::TimedOutEarly(job, step) => write!(f, "job {job}: {step} timed out before its time was over"),
            Self::EventMissed(job, step) => write!(f, "job {job}: {step} timed out, and its event was there"),
            Self::SecondEvent(event) => write!(f, "the event {event} counts twice"),
            Self::NoSuccessor(job, other) => write!(f, "job {job} went on as job {other}, which is not there"),
            Self::SuccessorOfNobody(job, other) => write!(f, "job {other} is there, and job {job} did not go on as it"),
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
    /// Steps that have a value.
    pub steps: usize,
    /// Effects of steps that began again: at least once is what is promised.
    pub effects_repeated: usize,
    /// Waits that ended with their event.
    pub came: usize,
    /// Waits whose time was over.
    pub timed_out: usize,
    /// Jobs that went on as another.
    pub continued: usize,
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
    /// When it was first known to be made.
    known: u64,
    /// How often it was sent and not refused, as far as is known.
    open: usize,
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

impl Edge {
    /// Takes the answer in; false if the store refused the change.
    fn answered(&mut self, answer: &Answer, at: u64) -> bool {
        match answer {
            // A wait that was over already: the job stays as it is.
            Answer::Applied(row) if self.is_suspension() && row.revision == self.change.from => self.refused(),
            Answer::Applied(row) => self.is_made(row, at),
            // The row tells that an earlier sending of it was made.
            Answer::Conflict(row) if Some(row.revision) == self.change.to => self.is_made(row, at),
            // Made before, and gone on since; or never.
            Answer::Conflict(_) | Answer::Missing => {
                self.refused();
                return false;
            }
        }
        true
    }

    fn is_suspension(&self) -> bool {
        self.change.state == JobState::Suspended
    }

    fn is_made(&mut self, row: &Execution, at: u64) {
        if self.made != Made::Yes {
            self.known = at;
        }
        (self.made, self.row) = (Made::Yes, Some(row.clone()));
    }

    /// One sending of it changed nothing.
    fn refused(&mut self) {
        self.open = self.open.saturating_sub(1);
        if self.open == 0 && self.made == Made::Perhaps {
            self.made = Made::No;
        }
    }
}

struct Claim {
    by: String,
    row: Execution,
    sent: u64,
    answered: u64,
}

/// A step that was written, or found ended, and its job as it was then.
struct Grant {
    by: String,
    name: Name,
    from: Revision,
    sent: u64,
    answered: u64,
    row: Execution,
    /// Its effect may happen.
    begun: bool,
}

/// Steps as the store showed them.
struct Look {
    by: String,
    sent: u64,
    answered: u64,
    steps: Vec<Seen>,
    /// There are no others.
    all: bool,
}

/// A wait that was to be registered.
struct Registration {
    sent: u64,
    time: u64,
    event: Option<Name>,
}

struct Effect {
    at: u64,
    by: String,
    name: Name,
    fence: u64,
}

struct ToldEnd {
    at: u64,
    by: String,
    name: Name,
    stage: Stage,
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
    grants: Vec<Grant>,
    looks: Vec<Look>,
    /// The values that steps were to have.
    values: Vec<(Name, Json)>,
    waits: BTreeMap<Name, Vec<Registration>>,
    effects: Vec<Effect>,
    told: Vec<ToldEnd>,
    /// As whom it was to go on, and by which change.
    successors: Vec<(JobId, Option<Revision>)>,
}

impl Life {
    /// The fence of a claim, or of a change that followed one.
    fn fence_of(&self, moment: Revision) -> Option<u64> {
        if let Some(claim) = self.claims.iter().find(|claim| claim.row.revision == moment) {
            return Some(claim.row.fence);
        }
        self.edges.iter().find(|edge| edge.change.to == Some(moment))?.row.as_ref().map(|row| row.fence)
    }

    /// That the change was sent.
    fn asked(&mut self, entry: &Entry, change: &Change) {
        // Sent again, it is the same change.
        if let Some(edge) = edge(&mut self.edges, change) {
            edge.open += 1;
            // Not made before, it can be made by this sending.
            if edge.made == Made::No {
                (edge.made, edge.sent) = (Made::Perhaps, entry.at);
            }
        } else if change.to.is_some() {
            let is_own = self.claims.last().is_some_and(|claim| claim.by == entry.by);
            let (change, sent, made) = (change.clone(), entry.at, Made::Perhaps);
            self.edges.push(Edge { change, sent, known: 0, open: 1, made, row: None, is_own });
        }
    }
}

fn edge<'e>(edges: &'e mut [Edge], change: &Change) -> Option<&'e mut Edge> {
    // One that keeps the moment, such as progress, is no part of the chain.
    edges.iter_mut().rev().find(|edge| change.to.is_some() && edge.change.to == change.to)
}

/// An event that was emitted.
struct Emission {
    payload: Json,
    sent: u64,
    /// Until when it is kept at least.
    until: u64,
    /// When that was answered, and with which payload if another was kept.
    answered: Option<(u64, Option<Json>)>,
}

/// What the records tell.
#[derive(Default)]
struct Records {
    lives: HashMap<JobId, Life>,
    emissions: HashMap<Name, Vec<Emission>>,
    /// The calls that ended waits of a job: when they were sent and answered.
    timed_out: HashMap<JobId, Vec<(u64, u64)>>,
    /// When calls were sent that may have ended waits, of which nobody knows.
    sweeps: Vec<u64>,
    /// The last of all.
    end: u64,
}

/// Judges a history by the rows that are there in the end.
pub fn check(history: &[Entry], ends: &[Execution]) -> Verdict {
    let mut verdict = Verdict::default();
    let records = Records::of(history, &mut verdict.figures);
    let ends: HashMap<_, _> = ends.iter().map(|end| (end.id, end)).collect();
    for (id, life) in &records.lives {
        verdict.figures.jobs += usize::from(life.accepted.is_some());
        let runs: usize = life.began.values().map(|(_, times)| times).sum();
        let announced = |edge: &&Edge| edge.change.fails || edge.is_suspension();
        let goes_on = life.edges.iter().filter(|edge| edge.made == Made::Yes && edge.is_own).filter(announced).count();
        verdict.figures.runs += runs;
        verdict.figures.repeated += runs.saturating_sub(1 + goes_on);
        judge(*id, life, ends.get(id).copied(), &mut verdict.violations);
    }
    keys(&records.lives, &ends, &mut verdict.violations);
    steps::judge(&records, &ends, &mut verdict);
    verdict
}

impl Records {
    fn of(history: &[Entry], figures: &mut Figures) -> Self {
        let mut records = Self { end: history.last().map_or(0, |entry| entry.at), ..Self::default() };
        let mut asked = HashMap::new();
        let mut last_outcome = None;
        for entry in history {
            match &entry.what {
                What::Enqueue { call, .. }
                | What::Claim { call }
                | What::Update { call, .. }
                | What::Step { call, .. }
                | What::Look { call, .. }
                | What::HandOver { call, .. }
                | What::Emit { call, .. }
                | What::TimeOut { call } => {
                    records.asked(entry);
                    asked.insert((entry.by.as_str(), *call), entry);
                }
                What::Enqueued { call, .. }
                | What::Claimed { call, .. }
                | What::Updated { call, .. }
                | What::Stepped { call, .. }
                | What::Looked { call, .. }
                | What::HandedOver { call, .. }
                | What::Emitted { call, .. }
                | What::TimedOut { call, .. } => {
                    if let Some(question) = asked.remove(&(entry.by.as_str(), *call)) {
                        let (refused, outcomes) = records.answered(question, entry);
                        figures.refused += refused;
                        if outcomes > 0 {
                            let pause = entry.at - last_outcome.replace(entry.at).unwrap_or(entry.at);
                            figures.longest_pause = figures.longest_pause.max(Duration::from_micros(pause));
                        }
                    }
                }
                What::Failed { call, nothing } => {
                    if let Some(question) = asked.remove(&(entry.by.as_str(), *call)) {
                        records.failed(question, *nothing);
                        figures.unanswered += usize::from(!nothing);
                    }
                }
                What::Began { job, fence, attempt } => {
                    let (last, times) = records.life(*job).began.entry(*fence).or_default();
                    (*last, *times) = (*attempt, *times + 1);
                }
                What::Effect { job, name, fence } => {
                    let effect = Effect { at: entry.at, by: entry.by.clone(), name: name.clone(), fence: *fence };
                    records.life(*job).effects.push(effect);
                }
                What::Told { job, name, stage } => {
                    let (name, stage) = (name.clone(), stage.clone());
                    records.life(*job).told.push(ToldEnd { at: entry.at, by: entry.by.clone(), name, stage });
                }
                What::Broke { .. } => {}
            }
        }
        for question in asked.into_values() {
            records.failed(question, false);
            figures.unanswered += usize::from(!matches!(question.what, What::Look { .. }));
        }
        records
    }

    fn life(&mut self, job: JobId) -> &mut Life {
        self.lives.entry(job).or_default()
    }

    fn asked(&mut self, entry: &Entry) {
        match &entry.what {
            What::Enqueue { jobs, .. } => {
                for job in jobs {
                    let life = self.life(job.job);
                    (life.key, life.max_attempts) = (job.key.clone(), job.max_attempts);
                }
            }
            What::Step { job, name, action, .. } => {
                let life = self.life(*job);
                match action {
                    Action::Begin => {}
                    Action::Finish(value) => life.values.push((name.clone(), value.clone())),
                    Action::Wait { event, time, .. } => {
                        let registration = Registration { sent: entry.at, time: *time, event: event.clone() };
                        life.waits.entry(name.clone()).or_default().push(registration);
                    }
                }
            }
            What::HandOver { change, successor, .. } => {
                let life = self.life(successor.job);
                (life.key, life.max_attempts) = (successor.key.clone(), successor.max_attempts);
                let known = (successor.job, change.to);
                let successors = &mut self.life(change.job).successors;
                if !successors.contains(&known) {
                    successors.push(known);
                }
            }
            _ => {}
        }
        for change in changes(&entry.what) {
            self.life(change.job).asked(entry, &change);
        }
    }

    /// How many changes were refused, and how many jobs ended.
    fn answered(&mut self, question: &Entry, entry: &Entry) -> (usize, usize) {
        let (by, sent, answered) = (&entry.by, question.at, entry.at);
        let answers = match (&question.what, &entry.what) {
            (What::Update { .. }, What::Updated { answers, .. }) => answers.clone(),
            (What::HandOver { successor, change, .. }, What::HandedOver { answer, .. }) => {
                let is_stored = match answer {
                    Answer::Applied(_) => true,
                    Answer::Conflict(row) => Some(row.revision) == change.to,
                    Answer::Missing => false,
                };
                if is_stored {
                    self.life(successor.job).accepted.get_or_insert(answered);
                }
                vec![answer.clone()]
            }
            (What::Step { job, name, from, action, .. }, What::Stepped { answer, step, .. }) => {
                let life = self.life(*job);
                let by = by.clone();
                if let Answer::Applied(row) = answer {
                    let is_suspended = matches!(action, Action::Wait { to, .. } if *to == Some(row.revision));
                    let begun = step.as_ref().is_some_and(|step| step.stage == Stage::Begun);
                    let steps = step.iter().cloned().collect();
                    life.looks.push(Look { by: by.clone(), sent, answered, steps, all: false });
                    if !is_suspended {
                        let (name, from, row) = (name.clone(), *from, row.clone());
                        life.grants.push(Grant { by, name, from, sent, answered, row, begun });
                    }
                }
                match action {
                    Action::Wait { .. } => vec![answer.clone()],
                    Action::Begin | Action::Finish(_) => {
                        return (usize::from(!matches!(answer, Answer::Applied(_))), 0);
                    }
                }
            }
            (What::Look { job, .. }, What::Looked { steps, .. }) => {
                let (by, steps) = (by.clone(), steps.clone());
                self.life(*job).looks.push(Look { by, sent, answered, steps, all: true });
                Vec::new()
            }
            (What::Enqueue { jobs, .. }, What::Enqueued { stored, .. }) => {
                for (job, _) in jobs.iter().zip(stored).filter(|(_, stored)| **stored) {
                    self.life(job.job).accepted.get_or_insert(answered);
                }
                Vec::new()
            }
            (What::Claim { .. }, What::Claimed { jobs, .. }) => {
                for row in jobs {
                    let claim = Claim { by: by.clone(), row: row.clone(), sent, answered };
                    self.life(row.id).claims.push(claim);
                }
                Vec::new()
            }
            (What::Emit { .. }, What::Emitted { kept, .. }) => {
                self.emission(question, Some((answered, kept.clone())));
                Vec::new()
            }
            (What::TimeOut { .. }, What::TimedOut { jobs, .. }) => {
                for job in jobs {
                    self.timed_out.entry(*job).or_default().push((sent, answered));
                }
                Vec::new()
            }
            _ => Vec::new(),
        };
        let (mut refused, mut outcomes) = (0, 0);
        for (change, answer) in changes(&question.what).iter().zip(&answers) {
            outcomes += usize::from(change.state.is_final() && matches!(answer, Answer::Applied(_)));
            if let Some(edge) = edge(&mut self.life(change.job).edges, change) {
                refused += usize::from(!edge.answered(answer, entry.at));
            }
        }
        (refused, outcomes)
    }

    /// The call ended in an error, or was never answered.
    fn failed(&mut self, question: &Entry, nothing: bool) {
        match &question.what {
            What::TimeOut { .. } if !nothing => self.sweeps.push(question.at),
            What::Emit { .. } if !nothing => self.emission(question, None),
            what if nothing => {
                for change in changes(what) {
                    if let Some(edge) = edge(&mut self.life(change.job).edges, &change) {
                        edge.refused();
                    }
                }
            }
            _ => {}
        }
    }

    fn emission(&mut self, question: &Entry, answered: Option<(u64, Option<Json>)>) {
        if let What::Emit { event, payload, keep, .. } = &question.what {
            let (sent, until) = (question.at, question.at.saturating_add(*keep));
            let emission = Emission { payload: payload.clone(), sent, until, answered };
            self.emissions.entry(event.clone()).or_default().push(emission);
        }
    }
}

/// The compare-and-updates of a question.
fn changes(question: &What) -> Vec<Change> {
    match question {
        What::Update { changes, .. } => changes.clone(),
        What::HandOver { change, .. } => vec![change.clone()],
        What::Step { job, from, action: Action::Wait { to, .. }, .. } => {
            vec![Change { job: *job, from: *from, to: *to, state: JobState::Suspended, fails: false }]
        }
        _ => Vec::new(),
    }
}

fn judge(id: JobId, life: &Life, end: Option<&Execution>, violations: &mut Vec<Violation>) {
    let Some(end) = end else {
        if life.accepted.is_some() {
            violations.push(Violation::Lost(id));
        }
        return;
    };
    if end.state.is_held() || end.state == JobState::Suspended {
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
        // A claim follows a job that waits without saying what it was based on, and so does the end of a suspension.
        let claimed = edge.row.as_ref().is_none_or(|row| end.fence > row.fence);
        let is_followed = match edge.change.state {
            JobState::Waiting => claimed,
            JobState::Suspended => claimed || end.state == JobState::Waiting,
            _ => false,
        };
        if !is_followed && !goes_on(revision) {
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
