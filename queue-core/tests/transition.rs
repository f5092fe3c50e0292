//! The table of transitions, every cell of it.

use std::num::NonZeroU32;

use queue_core::*;

const MAX_ATTEMPTS: NonZeroU32 = NonZeroU32::new(3).expect("not zero");

fn seen(state: JobState, attempt: u32, leased: bool) -> Execution {
    let at = Timestamp::from_unix_millis(1_000).expect("in range");
    Execution {
        id: JobId::new(),
        state,
        attempt,
        max_attempts: MAX_ATTEMPTS,
        fence: 4,
        revision: Revision::random(),
        claimed_by: Some(WorkerId::new(&Name::try_from("w").expect("a name"))),
        claimed_at: Some(at),
        attempted_at: Some(at),
        lease_expires_at: leased.then_some(at),
    }
}

fn lease() -> Lease {
    Lease::from_millis(60_000).expect("a minute")
}

fn moves() -> Vec<Transition> {
    let later = When::After(Delay::from_millis(5_000).expect("five seconds"));
    vec![
        Transition::Start { lease: lease() },
        Transition::Progress { value: Json::null() },
        Transition::Complete { result: None },
        Transition::Retry { error: "e".into(), available: later },
        Transition::Fail { error: "e".into() },
        Transition::Suspend { until: later },
        Transition::Wake,
        Transition::Snooze { available: later },
        Transition::Release,
        Transition::Recover,
        Transition::Adopt { lease: lease() },
        Transition::Cancel { reason: "r".into() },
        Transition::Rerun,
        Transition::Replace { payload: Json::null(), available: later },
    ]
}

/// Where a move leads from a state, and the attempt then; `None` where it is illegal. Attempt 2 of 3, or 3 of 3.
fn table(transition: &str, from: JobState, attempt: u32, leased: bool) -> Option<(JobState, u32)> {
    use JobState::*;
    let used_up = attempt == MAX_ATTEMPTS.get();
    match (transition, from) {
        ("start", Claimed) => Some((Running, attempt + 1)),
        ("progress", Running) => Some((Running, attempt)),
        ("complete", Running) => Some((Completed, attempt)),
        ("retry", Running) if used_up => Some((Failed, attempt)),
        ("retry", Running) => Some((Waiting, attempt)),
        ("fail", Running) => Some((Failed, attempt)),
        ("suspend", Running) => Some((Suspended, attempt - 1)),
        ("wake", Suspended) => Some((Waiting, attempt)),
        ("snooze" | "release", Running) => Some((Waiting, attempt - 1)),
        ("snooze" | "release", Claimed) => Some((Waiting, attempt)),
        ("snooze", Waiting) => Some((Waiting, attempt)),
        ("recover", Claimed) if leased => Some((Waiting, attempt)),
        ("recover", Running) if leased && used_up => Some((Failed, attempt)),
        ("recover", Running) if leased => Some((Waiting, attempt)),
        ("adopt", Claimed | Running) if !leased => Some((from, attempt)),
        ("cancel", Waiting | Claimed | Running | Suspended) => Some((Canceled, attempt)),
        ("rerun", Completed | Failed | Canceled) => Some((Waiting, 0)),
        ("replace", Waiting) => Some((Waiting, attempt)),
        _ => None,
    }
}

#[test]
fn every_move_from_every_state_is_as_the_table_says() {
    for transition in moves() {
        for &from in JobState::ALL {
            for (attempt, leased) in [(2, true), (2, false), (3, true), (3, false)] {
                let seen = seen(from, attempt, leased);
                let planned = transition.plan(&seen);
                let expected = table(transition.name(), from, attempt, leased);
                let cell = format!("{} from {from}, attempt {attempt}, lease {leased}", transition.name());
                match (planned, expected) {
                    (Ok(patch), Some(expected)) => assert_eq!((patch.state, patch.attempt), expected, "{cell}"),
                    (Err(illegal), None) => {
                        assert_eq!((illegal.from, illegal.transition), (from, transition.name()), "{cell}");
                        assert!(illegal.to_string().contains(from.as_str()), "{cell}: {illegal}");
                        assert!(illegal.to_string().contains(illegal.to.as_str()), "{cell}: {illegal}");
                    }
                    (planned, expected) => panic!("{cell}: {planned:?}, expected {expected:?}"),
                }
            }
        }
    }
}

#[test]
fn a_move_writes_by_where_it_leads() {
    for transition in moves() {
        for &from in JobState::ALL {
            for leased in [true, false] {
                let seen = seen(from, 2, leased);
                let Ok(patch) = transition.plan(&seen) else { continue };
                let cell = format!("{} from {from}", transition.name());
                let keeps = matches!(transition, Transition::Adopt { .. } | Transition::Progress { .. });
                assert_eq!(patch.revision.is_none(), keeps, "{cell}: every other move is a new moment");
                assert_ne!(patch.revision, Some(seen.revision), "{cell}");
                let edits = matches!(transition, Transition::Replace { .. });
                assert_eq!(patch.payload.is_some(), edits, "{cell}: no lifecycle move touches the payload");
                match patch.state {
                    JobState::Waiting | JobState::Suspended if !edits => {
                        assert!(patch.clear_claim && patch.available.is_some(), "{cell}");
                        let cleared = (patch.attempted_at, patch.lease, patch.finished_at, patch.result);
                        assert_eq!(cleared, (Change::Clear, Change::Clear, Change::Clear, Change::Clear), "{cell}");
                    }
                    state if state.is_final() => {
                        assert!(!patch.clear_claim && patch.attempted_at == Change::Keep, "{cell}: who ran it stays");
                        let cleared = (patch.lease, patch.finished_at, patch.result);
                        assert_eq!(cleared, (Change::Clear, Change::Set(()), Change::Clear), "{cell}");
                    }
                    _ => assert!(!patch.clear_claim, "{cell}"),
                }
            }
        }
    }
}

#[test]
fn only_a_sweep_asks_for_the_lease() {
    for transition in moves() {
        for &from in JobState::ALL {
            for leased in [true, false] {
                let seen = seen(from, 2, leased);
                let Ok(decision) = Decision::new(&seen, &transition) else { continue };
                let expected = match (&transition, seen.lease_expires_at) {
                    (Transition::Recover, Some(expiry)) => LeaseMatch::Expired(expiry),
                    (Transition::Adopt { .. }, _) => LeaseMatch::Unset,
                    _ => LeaseMatch::Any,
                };
                assert_eq!(decision.request().current.lease, expected, "{} from {from}", transition.name());
                assert_eq!(decision.seen(), &seen, "what was seen is not changed");
            }
        }
    }
}
