//! What becomes of a step: every action on everything that may be there.

use queue_core::*;

fn json(text: &str) -> Json {
    Json::from_text(text).expect("JSON")
}

fn waiting(until: Timestamp) -> StepState {
    StepState::Waiting(Wait { event: Some("e".try_into().expect("a name")), until, revision: Revision::random() })
}

/// The suspension of a running job.
fn suspension(until: When) -> Patch {
    let job = NewJob::new("q".try_into().expect("a name"), "k".try_into().expect("a name"), Json::null());
    let mut execution = job.into_job(Timestamp::MIN).execution;
    execution.state = JobState::Running;
    Transition::Suspend { until }.plan(&execution).expect("legal")
}

#[test]
fn every_action_is_as_the_table_says() {
    let first = Timestamp::from_unix_millis(1_000).expect("in range");
    let (later, value) = (When::After(Delay::MAX), json("1"));
    let wait = || StepAction::Wait(NewWait { event: None, suspension: suspension(later) });
    for there in [
        None,
        Some(StepState::Begun),
        Some(waiting(first)),
        Some(StepState::Done(json("2"))),
        Some(StepState::TimedOut),
    ] {
        let ended = matches!(there, Some(StepState::Done(_) | StepState::TimedOut));
        let waits = matches!(there, Some(StepState::Waiting(_)));
        for event in [None, Some(json("3"))] {
            let (there, event) = (there.as_ref(), event.as_ref());
            let expected = |write: StepState| if ended || waits { StepPlan::Keep } else { StepPlan::Write(write) };
            assert_eq!(StepAction::Begin.plan(there, event), expected(StepState::Begun), "{there:?}");
            let done = StepState::Done(value.clone());
            assert_eq!(StepAction::Finish(value.clone()).plan(there, event), expected(done), "{there:?}");
            match (wait().plan(there, event), event) {
                (StepPlan::Keep, _) => assert!(ended, "{there:?}"),
                (StepPlan::Write(state), Some(payload)) => {
                    assert_eq!(state, StepState::Done(payload.clone()), "{there:?}");
                    assert!(!ended, "{there:?}");
                }
                (StepPlan::Suspend(patch), None) => {
                    let until = if waits { When::At(first) } else { later };
                    assert_eq!((patch.state, patch.available), (JobState::Suspended, Some(until)), "{there:?}");
                    assert!(!ended && patch.clear_claim && patch.revision.is_some(), "{there:?}");
                }
                (plan, event) => panic!("{there:?}, {event:?}: {plan:?}"),
            }
        }
    }
}

#[test]
fn a_check_changes_nothing() {
    let mut job = NewJob::new("q".try_into().expect("a name"), "k".try_into().expect("a name"), Json::null())
        .into_job(Timestamp::MIN);
    job.execution.state = JobState::Running;
    job.result = Some(json("7"));
    let current = job.execution.fingerprint();
    let write = StepWrite { id: job.id(), current, name: "s".try_into().expect("a name"), action: StepAction::Begin };
    let before = job.clone();
    write.check().patch.apply(&mut job, Timestamp::MAX);
    assert_eq!(job, before);
}

#[test]
fn columns_make_the_state_that_they_were_made_of() {
    let (event, revision) = (Some("e".try_into().expect("a name")), Some(Revision::random()));
    let read = |state: &str, until, value| StepState::from_columns(state, event.clone(), until, revision, value);
    assert_eq!(read("begun", None, None), Ok(StepState::Begun));
    assert_eq!(read("timed_out", Some(Timestamp::MIN), None), Ok(StepState::TimedOut));
    assert_eq!(read("done", None, Some(json("1"))), Ok(StepState::Done(json("1"))));
    let waits = read("waiting", Some(Timestamp::MIN), None).expect("a wait");
    assert!(matches!(&waits, StepState::Waiting(wait) if wait.event == event && Some(wait.revision) == revision));
    for (broken, word) in
        [(read("done", None, None), "value"), (read("waiting", None, None), "until"), (read("new", None, None), "new")]
    {
        assert!(broken.expect_err("broken").contains(word), "{word}");
    }
}
