//! Histories that cannot be: the checker must find each, and nothing in one that can.

use fenced_queue::contract::Execution;
use fenced_queue::contract::JobId;
use fenced_queue::contract::JobState;
use fenced_queue::contract::JobState::*;
use fenced_queue::contract::Json;
use fenced_queue::contract::Name;
use fenced_queue::contract::Revision;
use queue_chaos::Action;
use queue_chaos::Answer;
use queue_chaos::Asked;
use queue_chaos::Change;
use queue_chaos::Entry;
use queue_chaos::Seen;
use queue_chaos::Stage;
use queue_chaos::Verdict;
use queue_chaos::Violation;
use queue_chaos::What;
use queue_chaos::check;

/// A history that is made up, one millisecond after the other.
#[derive(Default)]
struct History {
    entries: Vec<Entry>,
    ends: Vec<Execution>,
    calls: u64,
    now: u64,
}

fn name(text: &str) -> Name {
    text.parse().expect("a name")
}

fn json(text: &str) -> Json {
    Json::from_text(text).expect("JSON")
}

fn done(value: &str) -> Stage {
    Stage::Done(json(value))
}

fn moved(row: &Execution, state: JobState) -> Execution {
    Execution { state, revision: Revision::random(), ..row.clone() }
}

/// A millisecond, and a time far beyond what two clocks may differ by.
const SHORT: u64 = 1_000;
const LONG: u64 = 10_000_000;

impl History {
    fn call(&mut self) -> u64 {
        self.calls += 1;
        self.calls
    }

    fn write(&mut self, by: &str, what: What) {
        self.now += 1_000;
        self.entries.push(Entry { at: self.now, by: by.into(), what });
    }

    /// A job that the store has accepted; what it then is.
    fn enqueue(&mut self, key: Option<&str>) -> Execution {
        let (call, job) = (self.call(), JobId::new());
        let asked = Asked { job, key: key.map(Into::into), max_attempts: 3 };
        self.write("producer", What::Enqueue { call, jobs: vec![asked] });
        self.write("producer", What::Enqueued { call, stored: vec![true] });
        Execution {
            id: job,
            state: Waiting,
            attempt: 0,
            max_attempts: 3.try_into().expect("not zero"),
            fence: 0,
            revision: Revision::random(),
            claimed_by: None,
            claimed_at: None,
            attempted_at: None,
            lease_expires_at: None,
        }
    }

    /// A claim that starts the job, and its handler.
    fn claim(&mut self, by: &str, row: &Execution) -> Execution {
        let claimed = Execution {
            state: Running,
            attempt: row.attempt + 1,
            fence: row.fence + 1,
            revision: Revision::random(),
            ..row.clone()
        };
        self.give(by, &claimed);
        self.begin(by, &claimed);
        claimed
    }

    fn give(&mut self, by: &str, row: &Execution) {
        let call = self.call();
        self.write(by, What::Claim { call });
        self.write(by, What::Claimed { call, jobs: vec![row.clone()] });
    }

    fn begin(&mut self, by: &str, row: &Execution) {
        self.write(by, What::Began { job: row.id, fence: row.fence, attempt: row.attempt });
    }

    fn send(&mut self, by: &str, from: &Execution, to: &Execution) -> u64 {
        let call = self.call();
        let fails = to.state == Waiting;
        let change = Change { job: from.id, from: from.revision, to: Some(to.revision), state: to.state, fails };
        self.write(by, What::Update { call, changes: vec![change] });
        call
    }

    /// A change that the store has made.
    fn update(&mut self, by: &str, from: &Execution, state: JobState) -> Execution {
        let to = Execution { state, revision: Revision::random(), ..from.clone() };
        let call = self.send(by, from, &to);
        self.write(by, What::Updated { call, answers: vec![Answer::Applied(to.clone())] });
        to
    }

    fn ask(&mut self, by: &str, row: &Execution, step: &str, action: Action) -> u64 {
        let call = self.call();
        self.write(by, What::Step { call, job: row.id, name: name(step), from: row.revision, action });
        call
    }

    fn stepped(&mut self, by: &str, call: u64, step: &str, row: &Execution, stage: Stage) {
        let step = Some(Seen { name: name(step), fence: row.fence, stage });
        self.write(by, What::Stepped { call, answer: Answer::Applied(row.clone()), step });
    }

    /// A step that is granted, and its effect.
    fn effect(&mut self, by: &str, row: &Execution, step: &str) {
        let call = self.ask(by, row, step, Action::Begin);
        self.stepped(by, call, step, row, Stage::Begun);
        self.write(by, What::Effect { job: row.id, name: name(step), fence: row.fence });
    }

    fn finish(&mut self, by: &str, row: &Execution, step: &str, value: &str) {
        let call = self.ask(by, row, step, Action::Finish(json(value)));
        self.stepped(by, call, step, row, done(value));
    }

    /// A wait for `event`, to be registered.
    fn ask_to_wait(&mut self, by: &str, row: &Execution, to: &Execution, time: u64) -> u64 {
        let (event, to) = (Some(name("event")), Some(to.revision));
        self.ask(by, row, "wait", Action::Wait { event, time, to })
    }

    /// A wait that is registered.
    fn wait(&mut self, by: &str, row: &Execution, time: u64) -> Execution {
        let to = Execution { attempt: row.attempt - 1, ..moved(row, Suspended) };
        let call = self.ask_to_wait(by, row, &to, time);
        self.stepped(by, call, "wait", &to, Stage::Waiting);
        to
    }

    /// `event`, emitted for the first time.
    fn emit(&mut self, payload: &str) {
        self.emit_for(payload, 1_000 * LONG, None);
    }

    fn emit_for(&mut self, payload: &str, keep: u64, kept: Option<&str>) {
        let call = self.call();
        self.write("producer", What::Emit { call, event: name("event"), payload: json(payload), keep });
        self.write("producer", What::Emitted { call, kept: kept.map(json) });
    }

    /// A call that ends waits.
    fn time_out(&mut self, row: &Execution) {
        let call = self.call();
        self.write("a", What::TimeOut { call });
        self.write("a", What::TimedOut { call, jobs: vec![row.id] });
    }

    /// How the wait is, as its handler reads it.
    fn look(&mut self, by: &str, row: &Execution, fence: u64, stage: Stage) {
        self.look_at(by, row, &[("wait", fence, stage)]);
    }

    fn look_at(&mut self, by: &str, row: &Execution, steps: &[(&str, u64, Stage)]) {
        let call = self.call();
        self.write(by, What::Look { call, job: row.id });
        let seen =
            |(step, fence, stage): &(&str, u64, Stage)| Seen { name: name(step), fence: *fence, stage: stage.clone() };
        self.write(by, What::Looked { call, steps: steps.iter().map(seen).collect() });
    }

    fn tell(&mut self, by: &str, row: &Execution, step: &str, stage: Stage) {
        self.write(by, What::Told { job: row.id, name: name(step), stage });
    }

    /// A job to go on in the place of this one, not answered yet: the end, the other job, the call.
    fn ask_to_hand_over(&mut self, by: &str, row: &Execution) -> (Execution, Execution, u64) {
        let (call, to) = (self.call(), moved(row, Completed));
        let other = Execution { id: JobId::new(), attempt: 0, fence: 0, ..moved(row, Waiting) };
        let change = Change { job: row.id, from: row.revision, to: Some(to.revision), state: Completed, fails: false };
        let successor = Asked { job: other.id, key: None, max_attempts: 3 };
        self.write(by, What::HandOver { call, change, successor });
        (to, other, call)
    }

    /// The job completes.
    fn complete(&mut self, by: &str, row: &Execution) {
        let row = self.update(by, row, Completed);
        self.end(&row);
    }

    /// That is how the job is in the end.
    fn end(&mut self, row: &Execution) {
        self.ends.push(row.clone());
    }

    fn verdict(&self) -> Verdict {
        check(&self.entries, &self.ends)
    }

    fn violations(&self) -> Vec<Violation> {
        self.verdict().violations
    }

    fn finds(&self, violation: Violation) {
        let violations = self.violations();
        assert!(violations.contains(&violation), "{violation:?} is not among {violations:?}");
    }
}

/// A job that runs.
fn running() -> (History, Execution) {
    let mut history = History::default();
    let row = history.enqueue(None);
    let row = history.claim("a", &row);
    (history, row)
}

#[test]
fn what_can_be_is_no_violation() {
    let (mut history, first) = running();
    // It fails, another worker has it, is not heard of any more, and is recovered by the first.
    let row = history.update("a", &first, Waiting);
    let second = history.claim("b", &row);
    let row = history.update("a", &second, Waiting);
    let third = history.claim("a", &row);
    // What the second did comes late and is refused.
    let late = Execution { state: Completed, revision: Revision::random(), ..second.clone() };
    let call = history.send("b", &second, &late);
    history.write("b", What::Updated { call, answers: vec![Answer::Conflict(third.clone())] });
    // The third's outcome is lost on the way, sent again, and there already.
    let done = Execution { state: Completed, revision: Revision::random(), ..third.clone() };
    let call = history.send("a", &third, &done);
    history.write("a", What::Failed { call, nothing: false });
    let call = history.send("a", &third, &done);
    history.write("a", What::Updated { call, answers: vec![Answer::Conflict(done.clone())] });
    history.end(&done);
    let verdict = history.verdict();
    assert_eq!(verdict.violations, []);
    let figures = verdict.figures;
    assert_eq!((figures.jobs, figures.runs, figures.repeated), (1, 3, 1), "one run failed, one was repeated");
    assert_eq!((figures.refused, figures.unanswered), (1, 1));
}

#[test]
fn a_claim_whose_answer_was_lost_is_no_violation() {
    let mut history = History::default();
    let row = history.enqueue(None);
    let call = history.call();
    history.write("a", What::Claim { call });
    // Nobody began it, and it is released from a moment that nobody was told of.
    let hidden = Execution { state: Running, attempt: 1, fence: 1, revision: Revision::random(), ..row };
    let row = history.update("b", &hidden, Waiting);
    let row = history.claim("b", &row);
    let row = history.update("b", &row, Completed);
    history.end(&row);
    assert_eq!(history.violations(), []);
    assert_eq!(history.verdict().figures.unanswered, 1);
}

#[test]
fn what_was_not_made_at_first_may_be_made_when_it_is_sent_again() {
    let (mut history, first) = running();
    let row = Execution { state: Waiting, revision: Revision::random(), ..first.clone() };
    let call = history.send("a", &first, &row);
    history.write("a", What::Failed { call, nothing: true });
    let call = history.send("a", &first, &row);
    history.write("a", What::Failed { call, nothing: false });
    // The next claim tells that it was made.
    let second = history.claim("b", &row);
    let done = history.update("b", &second, Completed);
    history.end(&done);
    assert_eq!(history.violations(), []);
}

#[test]
fn a_process_that_died_may_have_done_it() {
    let (mut history, row) = running();
    let done = Execution { state: Completed, revision: Revision::random(), ..row.clone() };
    history.send("a", &row, &done);
    history.end(&done);
    assert_eq!(history.violations(), []);
}

#[test]
fn what_was_refused_and_sent_again_may_have_been_made() {
    let (mut history, row) = running();
    let done = moved(&row, Completed);
    let call = history.send("a", &row, &done);
    history.write("a", What::Failed { call, nothing: true });
    history.send("a", &row, &done);
    history.end(&done);
    assert_eq!(history.violations(), []);
}

#[test]
fn a_lost_job() {
    let mut history = History::default();
    let row = history.enqueue(None);
    assert_eq!(history.violations(), [Violation::Lost(row.id)]);
}

#[test]
fn a_job_that_was_refused_is_not_lost() {
    let mut history = History::default();
    let (call, job) = (history.call(), JobId::new());
    history.write("producer", What::Enqueue { call, jobs: vec![Asked { job, key: None, max_attempts: 1 }] });
    history.write("producer", What::Enqueued { call, stored: vec![false] });
    assert_eq!(history.violations(), []);
}

#[test]
fn a_job_that_is_held_for_ever() {
    let (mut history, row) = running();
    history.end(&row);
    assert_eq!(history.violations(), [Violation::Unfinished(row.id, Running)]);
}

#[test]
fn a_job_that_is_given_out_twice() {
    let (mut history, row) = running();
    let twin = Execution { revision: Revision::random(), ..row.clone() };
    history.give("b", &twin);
    let row = history.update("b", &twin, Completed);
    history.end(&row);
    let violations = history.violations();
    assert!(violations.contains(&Violation::FenceTwice(row.id, 1)), "{violations:?}");
}

#[test]
fn a_fence_that_falls() {
    let (mut history, row) = running();
    let row = history.update("a", &row, Waiting);
    let row = history.claim("a", &row);
    let row = history.update("a", &row, Waiting);
    let fallen = Execution { state: Running, fence: 1, revision: Revision::random(), attempt: 3, ..row };
    history.give("b", &fallen);
    let row = history.update("b", &fallen, Failed);
    history.end(&row);
    let violations = history.violations();
    assert!(violations.contains(&Violation::FenceFell(row.id, 2)), "{violations:?}");
}

#[test]
fn two_changes_of_one_moment() {
    let (mut history, row) = running();
    history.update("b", &row, Waiting);
    let done = history.update("a", &row, Completed);
    history.end(&done);
    let violations = history.violations();
    assert!(violations.contains(&Violation::Forked(row.id, row.revision)), "{violations:?}");
}

#[test]
fn an_outcome_that_is_overwritten() {
    let (mut history, row) = running();
    let done = history.update("a", &row, Completed);
    let again = Execution { state: Running, fence: 2, attempt: 2, revision: Revision::random(), ..row.clone() };
    history.give("b", &again);
    history.begin("b", &again);
    let end = history.update("b", &again, Completed);
    history.end(&end);
    let violations = history.violations();
    assert!(violations.contains(&Violation::Overwritten(row.id, done.revision)), "{violations:?}");
    assert!(violations.contains(&Violation::SecondOutcome(row.id)), "{violations:?}");
}

#[test]
fn a_claim_that_is_overwritten() {
    let (mut history, row) = running();
    // Another worker has it, and nobody took it from the first.
    let other = Execution { fence: 2, attempt: 2, revision: Revision::random(), ..row.clone() };
    history.give("b", &other);
    history.begin("b", &other);
    let end = history.update("b", &other, Completed);
    history.end(&end);
    assert_eq!(history.violations(), [Violation::Overwritten(row.id, row.revision)]);
}

#[test]
fn an_outcome_of_a_lost_claim() {
    let (mut history, first) = running();
    let row = history.update("b", &first, Waiting);
    let second = history.claim("b", &row);
    // As a queue does that settles by id.
    let done = history.update("a", &first, Completed);
    history.end(&done);
    let violations = history.violations();
    assert!(violations.contains(&Violation::FromALostClaim(first.id, 1)), "{violations:?}");
    assert!(violations.contains(&Violation::Overwritten(second.id, second.revision)), "{violations:?}");
}

#[test]
fn an_outcome_that_nobody_recorded() {
    let (mut history, row) = running();
    let done = Execution { state: Failed, revision: Revision::random(), ..row.clone() };
    history.end(&done);
    let violations = history.violations();
    assert!(violations.contains(&Violation::OutcomeOfNobody(row.id)), "{violations:?}");
}

#[test]
fn an_outcome_that_the_store_had_refused() {
    let (mut history, row) = running();
    let done = Execution { state: Completed, revision: Revision::random(), ..row.clone() };
    let call = history.send("a", &row, &done);
    history.write("a", What::Failed { call, nothing: true });
    history.end(&done);
    let violations = history.violations();
    assert!(violations.contains(&Violation::OutcomeOfNobody(row.id)), "{violations:?}");
}

#[test]
fn a_job_that_completes_unseen() {
    let mut history = History::default();
    let row = history.enqueue(None);
    let row = Execution { state: Running, attempt: 1, fence: 1, revision: Revision::random(), ..row };
    history.give("a", &row);
    let row = history.update("a", &row, Completed);
    history.end(&row);
    assert_eq!(history.violations(), [Violation::CompletedUnseen(row.id, 1)]);
}

#[test]
fn a_handler_that_begins_twice() {
    let (mut history, row) = running();
    history.begin("a", &row);
    let row = history.update("a", &row, Completed);
    history.end(&row);
    assert_eq!(history.violations(), [Violation::BeganTwice(row.id, 1)]);
}

#[test]
fn a_handler_without_a_claim() {
    let (mut history, row) = running();
    history.begin("a", &Execution { fence: 9, ..row.clone() });
    let row = history.update("a", &row, Completed);
    history.end(&row);
    assert_eq!(history.violations(), [Violation::BeganUnclaimed(row.id, 9)]);
}

#[test]
fn one_start_too_many() {
    let (mut history, mut row) = running();
    for _ in 0..3 {
        row = history.update("a", &row, Waiting);
        row = history.claim("a", &row);
    }
    let row = history.update("a", &row, Failed);
    history.end(&row);
    let violations = history.violations();
    assert!(violations.iter().all(|one| *one == Violation::TooManyAttempts(row.id, 4)), "{violations:?}");
    assert!(!violations.is_empty());
}

#[test]
fn two_jobs_with_one_key() {
    let mut history = History::default();
    let one = history.enqueue(Some("k"));
    let other = history.enqueue(Some("k"));
    for row in [&one, &other] {
        let row = history.claim("a", row);
        let row = history.update("a", &row, Completed);
        history.end(&row);
    }
    let violations = history.violations();
    let pair = [Violation::KeyTwice(one.id, other.id), Violation::KeyTwice(other.id, one.id)];
    assert!(violations.len() == 1 && pair.contains(&violations[0]), "{violations:?}");
}

#[test]
fn a_key_that_was_free_again() {
    let mut history = History::default();
    for _ in 0..3 {
        let row = history.enqueue(Some("k"));
        let row = history.claim("a", &row);
        let row = history.update("a", &row, Completed);
        history.end(&row);
    }
    let unkeyed = history.enqueue(Some("another"));
    history.end(&unkeyed);
    assert_eq!(history.violations(), []);
}

/// A job that waits, from its first moment on.
fn waiting(time: u64) -> (History, Execution) {
    let (mut history, row) = running();
    let row = history.wait("a", &row, time);
    (history, row)
}

#[test]
fn steps_that_can_be_are_no_violation() {
    let (mut history, first) = running();
    // The effect happens, and nobody is told of it; another worker has the job, and another value.
    history.effect("a", &first, "step");
    let row = history.update("b", &first, Waiting);
    let second = history.claim("b", &row);
    history.look_at("b", &second, &[("step", 1, Stage::Begun)]);
    history.effect("b", &second, "step");
    // Late, and refused.
    let call = history.ask("a", &first, "step", Action::Finish(json("1")));
    history.write("a", What::Stepped { call, answer: Answer::Conflict(second.clone()), step: None });
    // The answer is lost; the second time it is there.
    let call = history.ask("b", &second, "step", Action::Finish(json("2")));
    history.write("b", What::Failed { call, nothing: false });
    history.finish("b", &second, "step", "2");
    history.tell("b", &second, "step", done("2"));
    let row = history.wait("b", &second, LONG);
    history.emit("3");
    let third = history.claim("a", &row);
    history.look_at("a", &third, &[("step", 2, done("2")), ("wait", 2, done("3"))]);
    history.tell("a", &third, "step", done("2"));
    history.tell("a", &third, "wait", done("3"));
    let (done, other, call) = history.ask_to_hand_over("a", &third);
    history.write("a", What::Failed { call, nothing: false });
    let change =
        Change { job: third.id, from: third.revision, to: Some(done.revision), state: Completed, fails: false };
    let (call, successor) = (history.call(), Asked { job: other.id, key: None, max_attempts: 3 });
    history.write("a", What::HandOver { call, change, successor });
    history.write("a", What::HandedOver { call, answer: Answer::Conflict(done.clone()) });
    history.end(&done);
    let row = history.claim("b", &other);
    // This one finds the event, and goes on.
    let call = history.ask_to_wait("b", &row, &moved(&row, Suspended), LONG);
    history.stepped("b", call, "wait", &row, Stage::Done(json("3")));
    history.complete("b", &row);
    let verdict = history.verdict();
    assert_eq!(verdict.violations, []);
    let figures = verdict.figures;
    assert_eq!(
        (figures.jobs, figures.runs, figures.repeated),
        (2, 4, 1),
        "one is a run of the other job, one after a wait"
    );
    assert_eq!((figures.steps, figures.effects_repeated, figures.came, figures.timed_out), (1, 1, 2, 0));
    assert_eq!((figures.continued, figures.refused, figures.unanswered), (1, 1, 2));
}

#[test]
fn a_wait_that_times_out_is_no_violation() {
    let (mut history, row) = waiting(SHORT);
    history.time_out(&row);
    // It comes too late.
    history.emit("1");
    let row = history.claim("b", &row);
    history.look("b", &row, 1, Stage::TimedOut);
    history.tell("b", &row, "wait", Stage::TimedOut);
    history.complete("b", &row);
    let verdict = history.verdict();
    assert_eq!(verdict.violations, []);
    assert_eq!((verdict.figures.came, verdict.figures.timed_out), (0, 1));
}

#[test]
fn whoever_died_may_have_ended_a_wait() {
    let (mut history, row) = waiting(SHORT);
    let call = history.call();
    history.write("b", What::TimeOut { call });
    history.emit("1");
    let row = history.claim("b", &row);
    history.look("b", &row, 1, Stage::TimedOut);
    history.complete("b", &row);
    assert_eq!(history.violations(), []);
}

#[test]
fn an_emission_without_an_answer_may_have_ended_a_wait() {
    let (mut history, row) = waiting(LONG);
    let call = history.call();
    history.write("b", What::Emit { call, event: name("event"), payload: json("1"), keep: LONG });
    let row = history.claim("b", &row);
    history.look("b", &row, 1, done("1"));
    history.complete("b", &row);
    assert_eq!(history.violations(), []);
}

#[test]
fn a_registration_whose_answer_was_lost_is_no_violation() {
    let (mut history, row) = running();
    let to = Execution { attempt: 0, ..moved(&row, Suspended) };
    let call = history.ask_to_wait("a", &row, &to, LONG);
    history.write("a", What::Failed { call, nothing: false });
    let call = history.ask_to_wait("a", &row, &to, LONG);
    history.write("a", What::Stepped { call, answer: Answer::Conflict(to.clone()), step: None });
    history.emit("1");
    let row = history.claim("a", &to);
    history.look("a", &row, 1, done("1"));
    history.complete("a", &row);
    assert_eq!(history.violations(), []);
}

#[test]
fn an_event_that_was_kept_for_a_moment_may_be_missed() {
    let (mut history, row) = running();
    history.emit_for("1", SHORT, None);
    history.now += LONG;
    let row = history.wait("a", &row, SHORT);
    history.time_out(&row);
    history.emit_for("2", SHORT, None);
    let row = history.claim("a", &row);
    history.look("a", &row, 1, Stage::TimedOut);
    history.complete("a", &row);
    history.now += LONG;
    history.write("run", What::Broke { what: "nothing".into() });
    assert_eq!(history.violations(), []);
}

#[test]
fn a_step_that_is_granted_to_a_lost_claim() {
    let (mut history, first) = running();
    let row = history.update("b", &first, Waiting);
    let second = history.claim("b", &row);
    history.effect("a", &first, "step");
    history.complete("b", &second);
    assert_eq!(history.violations(), [Violation::StepOfALostClaim(first.id, name("step"))]);
}

#[test]
fn a_step_that_is_granted_by_the_row_of_another_claim() {
    let (mut history, first) = running();
    let row = history.update("b", &first, Waiting);
    // It is asked before anybody knows of the second claim.
    let call = history.ask("a", &first, "step", Action::Finish(json("1")));
    let second = history.claim("b", &row);
    history.stepped("a", call, "step", &second, done("1"));
    history.complete("b", &second);
    assert_eq!(history.violations(), [Violation::StepOfALostClaim(first.id, name("step"))]);
}

#[test]
fn a_step_after_the_job_was_given_up() {
    let (mut history, first) = running();
    let row = history.wait("a", &first, LONG);
    history.effect("a", &first, "step");
    history.emit("1");
    let row = history.claim("a", &row);
    history.complete("a", &row);
    assert_eq!(history.violations(), [Violation::StepOfALostClaim(first.id, name("step"))]);
}

#[test]
fn an_effect_that_was_not_granted() {
    let (mut history, row) = running();
    let call = history.ask("a", &row, "step", Action::Begin);
    history.write("a", What::Effect { job: row.id, name: name("step"), fence: 1 });
    history.stepped("a", call, "step", &row, Stage::Begun);
    history.complete("a", &row);
    assert_eq!(history.violations(), [Violation::EffectUngranted(row.id, name("step"), 1)]);
}

#[test]
fn an_effect_that_happens_twice_under_one_claim() {
    let (mut history, row) = running();
    history.effect("a", &row, "step");
    history.effect("a", &row, "step");
    history.complete("a", &row);
    assert_eq!(history.violations(), [Violation::EffectTwice(row.id, name("step"), 1)]);
}

#[test]
fn a_step_with_two_values() {
    let (mut history, first) = running();
    history.effect("a", &first, "step");
    history.finish("a", &first, "step", "1");
    let row = history.update("a", &first, Waiting);
    let second = history.claim("b", &row);
    history.finish("b", &second, "step", "2");
    history.complete("b", &second);
    assert_eq!(history.violations(), [Violation::SecondEnd(first.id, name("step"))]);
}

#[test]
fn a_handler_that_is_told_another_value() {
    let (mut history, row) = running();
    history.effect("a", &row, "step");
    history.finish("a", &row, "step", "1");
    history.tell("a", &row, "step", done("2"));
    history.complete("a", &row);
    history.finds(Violation::SecondEnd(row.id, name("step")));
    history.finds(Violation::ToldUnstored(row.id, name("step")));
}

#[test]
fn a_handler_that_is_told_what_is_not_stored_yet() {
    let (mut history, row) = running();
    history.effect("a", &row, "step");
    history.tell("a", &row, "step", done("1"));
    history.finish("a", &row, "step", "1");
    history.complete("a", &row);
    assert_eq!(history.violations(), [Violation::ToldUnstored(row.id, name("step"))]);
}

#[test]
fn a_wait_that_ends_in_both_ways() {
    let (mut history, row) = waiting(SHORT);
    history.time_out(&row);
    history.emit("1");
    let row = history.claim("a", &row);
    history.look("a", &row, 1, Stage::TimedOut);
    history.look("a", &row, 1, done("1"));
    history.complete("a", &row);
    assert_eq!(history.violations(), [Violation::SecondEnd(row.id, name("wait"))]);
}

#[test]
fn a_wait_from_which_a_job_goes_on_twice() {
    let (mut history, row) = waiting(SHORT);
    history.emit("1");
    let second = history.claim("a", &row);
    // The time ends it as well, and takes the job from its holder.
    history.time_out(&row);
    let third = history.claim("b", &second);
    let late = moved(&second, Completed);
    let call = history.send("a", &second, &late);
    history.write("a", What::Updated { call, answers: vec![Answer::Conflict(third.clone())] });
    history.complete("b", &third);
    assert_eq!(history.violations(), [Violation::Overwritten(row.id, second.revision)]);
}

#[test]
fn a_suspension_that_is_overwritten() {
    let (mut history, first) = running();
    let suspended = history.wait("a", &first, LONG);
    history.complete("a", &first);
    history.finds(Violation::Forked(first.id, first.revision));
    history.finds(Violation::Overwritten(first.id, suspended.revision));
}

#[test]
fn a_suspended_job_that_is_left_for_ever() {
    let (mut history, row) = waiting(LONG);
    history.end(&row);
    assert_eq!(history.violations(), [Violation::Unfinished(row.id, Suspended)]);
}

#[test]
fn a_job_that_goes_on_before_its_wait_has_ended() {
    let (mut history, row) = waiting(LONG);
    let row = history.claim("a", &row);
    history.look("a", &row, 1, Stage::Waiting);
    history.complete("a", &row);
    assert_eq!(history.violations(), [Violation::GoneOnWaiting(row.id, name("wait"))]);
}

#[test]
fn a_step_that_is_forgotten() {
    let (mut history, row) = running();
    history.effect("a", &row, "step");
    history.look_at("a", &row, &[]);
    history.complete("a", &row);
    assert_eq!(history.violations(), [Violation::Forgotten(row.id, name("step"))]);
}

#[test]
fn an_effect_that_begins_again_after_its_end() {
    let (mut history, first) = running();
    history.effect("a", &first, "step");
    history.finish("a", &first, "step", "1");
    let row = history.update("a", &first, Waiting);
    let second = history.claim("b", &row);
    history.effect("b", &second, "step");
    history.complete("b", &second);
    assert_eq!(history.violations(), [Violation::Forgotten(first.id, name("step"))]);
}

#[test]
fn a_value_of_nobody() {
    let (mut history, row) = running();
    history.look_at("a", &row, &[("step", 1, done("1"))]);
    history.complete("a", &row);
    assert_eq!(history.violations(), [Violation::EndOfNobody(row.id, name("step"))]);
}

#[test]
fn a_payload_of_nobody() {
    let (mut history, row) = waiting(LONG);
    let row = history.claim("a", &row);
    history.look("a", &row, 1, done("1"));
    history.complete("a", &row);
    assert_eq!(history.violations(), [Violation::EndOfNobody(row.id, name("wait"))]);
}

#[test]
fn a_wait_that_nobody_timed_out() {
    let (mut history, row) = waiting(SHORT);
    let row = history.claim("a", &row);
    history.look("a", &row, 1, Stage::TimedOut);
    history.time_out(&row);
    history.complete("a", &row);
    assert_eq!(history.violations(), [Violation::EndOfNobody(row.id, name("wait"))]);
}

#[test]
fn a_wait_that_times_out_early() {
    let (mut history, row) = waiting(LONG);
    history.time_out(&row);
    let row = history.claim("a", &row);
    history.look("a", &row, 1, Stage::TimedOut);
    history.complete("a", &row);
    assert_eq!(history.violations(), [Violation::TimedOutEarly(row.id, name("wait"))]);
}

/// A wait times out that began when `before` was over, and for whose end `meanwhile` waited.
fn missed(before: fn(&mut History), time: u64, meanwhile: fn(&mut History)) {
    let (mut history, row) = running();
    before(&mut history);
    let row = history.wait("a", &row, time);
    meanwhile(&mut history);
    history.time_out(&row);
    let row = history.claim("a", &row);
    history.look("a", &row, 1, Stage::TimedOut);
    history.complete("a", &row);
    assert_eq!(history.violations(), [Violation::EventMissed(row.id, name("wait"))]);
}

#[test]
fn an_event_that_was_there_before_the_wait() {
    missed(|history| history.emit("1"), SHORT, |_| {});
}

#[test]
fn an_event_that_came_before_the_time_was_over() {
    let come = |history: &mut History| {
        // A call that was never answered may have ended waits before.
        let call = history.call();
        history.write("b", What::TimeOut { call });
        history.emit("1");
        history.now += LONG;
    };
    missed(|_| {}, LONG, come);
}

#[test]
fn an_event_that_came_before_anybody_ended_the_wait() {
    missed(|_| {}, SHORT, |history| history.emit("1"));
}

#[test]
fn an_event_that_was_known_to_be_kept() {
    missed(|_| {}, SHORT, |history| history.emit_for("1", 1_000 * LONG, Some("1")));
}

#[test]
fn two_events_that_were_the_first() {
    let mut history = History::default();
    history.emit("1");
    history.emit("1");
    assert_eq!(history.violations(), [Violation::SecondEvent(name("event"))]);
}

#[test]
fn an_event_with_two_payloads() {
    let (mut history, row) = waiting(LONG);
    history.emit("1");
    history.emit_for("2", 1_000 * LONG, Some("1"));
    let row = history.claim("a", &row);
    history.look("a", &row, 1, done("2"));
    history.complete("a", &row);
    assert_eq!(history.violations(), [Violation::SecondEvent(name("event"))]);
}

#[test]
fn a_job_that_goes_on_as_nobody() {
    let (mut history, row) = running();
    let (done, other, call) = history.ask_to_hand_over("a", &row);
    history.write("a", What::Failed { call, nothing: false });
    history.end(&done);
    assert_eq!(history.violations(), [Violation::NoSuccessor(row.id, other.id)]);
}

#[test]
fn a_job_that_goes_on_as_two() {
    let (mut history, first) = running();
    let (_, other, call) = history.ask_to_hand_over("a", &first);
    history.write("a", What::Failed { call, nothing: false });
    let row = history.update("b", &first, Waiting);
    let second = history.claim("b", &row);
    let (done, another, call) = history.ask_to_hand_over("b", &second);
    history.write("b", What::HandedOver { call, answer: Answer::Applied(done.clone()) });
    history.end(&done);
    for row in [&other, &another] {
        let row = history.claim("b", row);
        history.complete("b", &row);
    }
    assert_eq!(history.violations(), [Violation::SuccessorOfNobody(first.id, other.id)]);
}

#[test]
fn a_refused_continuation_is_none() {
    let (mut history, first) = running();
    let row = history.update("b", &first, Waiting);
    let second = history.claim("b", &row);
    let (_, _, call) = history.ask_to_hand_over("a", &first);
    history.write("a", What::HandedOver { call, answer: Answer::Conflict(second.clone()) });
    history.complete("b", &second);
    let verdict = history.verdict();
    assert_eq!(verdict.violations, []);
    assert_eq!((verdict.figures.continued, verdict.figures.refused), (0, 1));
}
