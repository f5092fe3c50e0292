//! What must hold of steps, waits, events and continuation.
//!
//! A run purges nothing, cancels nothing and runs nothing again that has ended.

use std::collections::BTreeSet;
use std::collections::HashMap;
use std::collections::HashSet;

use fenced_queue::contract::Execution;
use fenced_queue::contract::JobId;
use fenced_queue::contract::Json;
use fenced_queue::contract::Name;

use super::Emission;
use super::Figures;
use super::Life;
use super::Look;
use super::Made;
use super::Records;
use super::Registration;
use super::Verdict;
use super::Violation;
use crate::history::Stage;

/// A store's clock counts a time as this machine's does, but for so much.
const SLACK: u64 = 100_000;

pub(super) fn judge(records: &Records, ends: &HashMap<JobId, &Execution>, verdict: &mut Verdict) {
    for (id, life) in &records.lives {
        grants(*id, life, &mut verdict.violations);
        effects(*id, life, verdict);
        let names: BTreeSet<_> = life.looks.iter().flat_map(|look| &look.steps).map(|step| &step.name).collect();
        let told = life.told.iter().map(|told| &told.name);
        for name in told.chain(names).collect::<BTreeSet<_>>() {
            Step::of(*id, name, life).judge(records, verdict);
        }
        if let Some(end) = ends.get(id) {
            successors(*id, life, end, records, ends, verdict);
        }
    }
    events(records, &mut verdict.violations);
}

/// That nobody wrote a step, or was let into its effect, whose claim was over before that was asked.
fn grants(id: JobId, life: &Life, violations: &mut Vec<Violation>) {
    for grant in &life.grants {
        let fence = life.fence_of(grant.from).unwrap_or(grant.row.fence);
        let is_lost = grant.row.revision != grant.from
            || life.claims.iter().any(|claim| claim.row.fence > fence && claim.answered < grant.sent)
            || life
                .edges
                .iter()
                .any(|edge| edge.made == Made::Yes && edge.change.from == grant.from && edge.known < grant.sent);
        if is_lost {
            violations.push(Violation::StepOfALostClaim(id, grant.name.clone()));
        }
    }
}

fn effects(id: JobId, life: &Life, verdict: &mut Verdict) {
    let mut begun = HashSet::new();
    for effect in &life.effects {
        let (name, fence) = (&effect.name, effect.fence);
        if !begun.insert((name, fence)) {
            verdict.violations.push(Violation::EffectTwice(id, name.clone(), fence));
        }
        let is_granted = life.grants.iter().any(|grant| {
            grant.begun
                && (&grant.name, &grant.by) == (name, &effect.by)
                && grant.answered <= effect.at
                && life.fence_of(grant.from) == Some(fence)
        });
        if !is_granted {
            verdict.violations.push(Violation::EffectUngranted(id, name.clone(), fence));
        }
    }
    let names: HashSet<_> = life.effects.iter().map(|effect| &effect.name).collect();
    verdict.figures.effects_repeated += life.effects.len() - names.len();
}

/// A step as somebody saw it.
struct Sight<'h> {
    look: &'h Look,
    /// None if it was not there.
    stage: Option<&'h Stage>,
    fence: u64,
}

impl Sight<'_> {
    /// It only grows.
    fn how_far(&self) -> u8 {
        match self.stage {
            None => 0,
            Some(Stage::Begun | Stage::Waiting) => 1,
            Some(Stage::Done(_) | Stage::TimedOut) => 2,
        }
    }
}

/// One step, or wait, of a job.
struct Step<'h> {
    id: JobId,
    name: &'h Name,
    life: &'h Life,
    sights: Vec<Sight<'h>>,
    /// That it was to be registered as a wait.
    wait: Option<&'h [Registration]>,
}

impl<'h> Step<'h> {
    fn of(id: JobId, name: &'h Name, life: &'h Life) -> Self {
        let sight = |look: &'h Look| match look.steps.iter().find(|step| step.name == *name) {
            Some(step) => Some(Sight { look, stage: Some(&step.stage), fence: step.fence }),
            None => look.all.then_some(Sight { look, stage: None, fence: 0 }),
        };
        let sights = life.looks.iter().filter_map(sight).collect();
        Self { id, name, life, sights, wait: life.waits.get(name).map(Vec::as_slice) }
    }

    fn judge(&self, records: &Records, verdict: &mut Verdict) {
        let mut found = |is_so: bool, violation: fn(JobId, Name) -> Violation| {
            if is_so {
                verdict.violations.push(violation(self.id, self.name.clone()));
            }
        };
        let mut ends: Vec<&Stage> = Vec::new();
        let told = self.life.told.iter().filter(|told| told.name == *self.name);
        let seen = self.sights.iter().filter(|sight| sight.how_far() == 2).filter_map(|sight| sight.stage);
        for end in seen.chain(told.clone().map(|told| &told.stage)) {
            if !ends.contains(&end) {
                ends.push(end);
            }
        }
        found(ends.len() > 1, Violation::SecondEnd);
        found(self.is_forgotten(), Violation::Forgotten);
        found(self.has_gone_on(), Violation::GoneOnWaiting);
        for told in told {
            let is_confirmed = |sight: &Sight| {
                sight.stage == Some(&told.stage) && sight.look.by == told.by && sight.look.answered <= told.at
            };
            found(!self.sights.iter().any(is_confirmed), Violation::ToldUnstored);
        }
        for end in &ends {
            let shown = |sight: &&Sight| sight.stage == Some(*end);
            let Some(known) = self.sights.iter().filter(shown).map(|sight| sight.look.answered).min() else { continue };
            match end {
                Stage::Done(value) => found(!self.is_given(value, known, records), Violation::EndOfNobody),
                _ => self.timed_out(known, records, &mut found),
            }
        }
        count(&mut verdict.figures, self.wait.is_some(), &ends);
    }

    /// Whoever asked after it had been seen must see as much.
    fn is_forgotten(&self) -> bool {
        let later = |one: &Sight| {
            let is_less = |other: &Sight| other.look.sent > one.look.answered && other.how_far() < one.how_far();
            self.sights.iter().any(is_less)
        };
        self.sights.iter().any(later)
    }

    /// A wait gives its job up, so a later claim follows its end.
    fn has_gone_on(&self) -> bool {
        let later = |sight: &Sight| {
            let claims = &self.life.claims;
            claims.iter().any(|claim| claim.row.fence > sight.fence && claim.answered < sight.look.sent)
        };
        self.sights.iter().any(|sight| sight.stage == Some(&Stage::Waiting) && later(sight))
    }

    /// Whether anybody may have given it this value by then.
    fn is_given(&self, value: &Json, known: u64, records: &Records) -> bool {
        let is_it = |emission: &Emission| emission.payload == *value && emission.sent < known;
        self.life.values.iter().any(|(name, given)| (name, given) == (self.name, value))
            || self.emissions(records).any(is_it)
    }

    /// Of the event that it waits for.
    fn emissions<'r>(&self, records: &'r Records) -> impl Iterator<Item = &'r Emission> {
        let events: BTreeSet<_> = self.wait.unwrap_or_default().iter().filter_map(|wait| wait.event.as_ref()).collect();
        events.into_iter().filter_map(|event| records.emissions.get(event)).flatten()
    }

    /// Judges the end by the clock, which somebody knew at that time.
    fn timed_out(&self, known: u64, records: &Records, found: &mut impl FnMut(bool, fn(JobId, Name) -> Violation)) {
        let waits = self.wait.unwrap_or_default();
        let (Some(first), Some(deadline)) = (
            waits.iter().map(|wait| wait.sent).min(),
            // The store's clock began to count it at the earliest when it was asked to.
            waits.iter().map(|wait| wait.sent + wait.time).min(),
        ) else {
            return found(true, Violation::EndOfNobody);
        };
        found(known + SLACK < deadline, Violation::TimedOutEarly);
        // Of the calls that may have done it, the first.
        let named = records.timed_out.get(&self.id).into_iter().flatten();
        let named = named.filter(|(_, answered)| *answered > first).map(|(sent, _)| *sent);
        let ended = named.chain(records.sweeps.iter().copied()).filter(|sent| *sent < known).min();
        found(ended.is_none(), Violation::EndOfNobody);
        // An event ends every wait that is registered, and is found by every one that is registered later. So the wait was over
        // before the event came.
        let missed = |emission: &Emission| {
            emission.answered.as_ref().is_some_and(|(answered, _)| {
                *answered < first || answered + SLACK < deadline || ended.is_some_and(|ended| *answered < ended)
            })
        };
        found(self.emissions(records).any(missed) && self.is_lasting(records), Violation::EventMissed);
    }

    /// None of its events was kept for so short a time that it may not have been found.
    fn is_lasting(&self, records: &Records) -> bool {
        self.emissions(records).all(|emission| emission.until > records.end + SLACK)
    }
}

fn count(figures: &mut Figures, is_wait: bool, ends: &[&Stage]) {
    let counted = match ends.first() {
        Some(Stage::TimedOut) => &mut figures.timed_out,
        Some(Stage::Done(_)) if is_wait => &mut figures.came,
        Some(Stage::Done(_)) => &mut figures.steps,
        _ => return,
    };
    *counted += 1;
}

/// Of events of one key the first counts, for as long as it is kept.
fn events(records: &Records, violations: &mut Vec<Violation>) {
    let mut payloads: HashMap<&Name, BTreeSet<&str>> = HashMap::new();
    for life in records.lives.values() {
        for (name, waits) in &life.waits {
            let steps = life.looks.iter().flat_map(|look| &look.steps).filter(|step| step.name == *name);
            let values = steps.filter_map(|step| if let Stage::Done(value) = &step.stage { Some(value) } else { None });
            if let Some(event) = waits.first().and_then(|wait| wait.event.as_ref()) {
                payloads.entry(event).or_default().extend(values.map(Json::as_str));
            }
        }
    }
    for (event, emissions) in &records.emissions {
        if emissions.iter().any(|emission| emission.until <= records.end + SLACK) {
            continue;
        }
        let answers = || emissions.iter().filter_map(|one| Some((one, one.answered.as_ref()?.1.as_ref())));
        let firsts = answers().filter(|(_, kept)| kept.is_none()).count();
        let counted = payloads.entry(event).or_default();
        counted.extend(answers().map(|(one, kept)| kept.unwrap_or(&one.payload).as_str()));
        if firsts > 1 || counted.len() > 1 {
            violations.push(Violation::SecondEvent(event.clone()));
        }
    }
}

/// That a job went on as another exactly if that is there.
fn successors(
    id: JobId,
    life: &Life,
    end: &Execution,
    records: &Records,
    ends: &HashMap<JobId, &Execution>,
    verdict: &mut Verdict,
) {
    for (successor, change) in &life.successors {
        let made = life.edges.iter().any(|edge| edge.made == Made::Yes && edge.change.to == *change);
        let has_gone_on = made || Some(end.revision) == *change;
        let claimed = records.lives.get(successor).is_some_and(|life| !life.claims.is_empty());
        let is_there = claimed || ends.contains_key(successor);
        verdict.figures.continued += usize::from(has_gone_on && is_there);
        match (has_gone_on, is_there) {
            (true, false) => verdict.violations.push(Violation::NoSuccessor(id, *successor)),
            (false, true) => verdict.violations.push(Violation::SuccessorOfNobody(id, *successor)),
            _ => {}
        }
    }
}
