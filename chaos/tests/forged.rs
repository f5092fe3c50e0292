//! Histories that cannot be: the checker must find each, and nothing in one that can.

use fenced_queue::contract::Execution;
use fenced_queue::contract::JobId;
use fenced_queue::contract::JobState;
use fenced_queue::contract::JobState::*;
use fenced_queue::contract::Revision;
use queue_chaos::Answer;
use queue_chaos::Asked;
use queue_chaos::Change;
use queue_chaos::Entry;
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
}

impl History {
    fn call(&mut self) -> u64 {
        self.calls += 1;
        self.calls
    }

    fn write(&mut self, by: &str, what: What) {
        let at = 1_000 * (self.entries.len() as u64 + 1);
        self.entries.push(Entry { at, by: by.into(), what });
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
