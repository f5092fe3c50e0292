//! Text from outside, changed at random: it is taken and comes back as it is, or refused.

#[path = "../../conformance/tests/fuzz/mod.rs"]
mod fuzz;

use std::fmt::Debug;
use std::fmt::Display;
use std::str::FromStr;

use fuzz::config;
use fuzz::mutated;
use proptest::prelude::*;
use queue_core::*;

/// What is taken is printed as what it was read from, or as what means the same; what is refused is so in a short message.
fn reads<T: FromStr<Err = Invalid> + Display + Debug + PartialEq>(text: &str) -> Result<Option<T>, TestCaseError> {
    match text.parse::<T>() {
        Ok(value) => {
            let printed = value.to_string();
            let again = printed.parse::<T>();
            prop_assert_eq!(again.as_ref(), Ok(&value), "{}", printed);
            Ok(Some(value))
        }
        Err(invalid) => {
            prop_assert!(invalid.to_string().len() < 500, "{}", invalid);
            Ok(None)
        }
    }
}

const NAMES: &[&str] = &["mail", "web-1/3f2a91bc00d4e7a1", "app_2_", "é\u{301}", "", "waiting", "suspended"];
const UUIDS: &[&str] = &[
    "0199a1b2-c3d4-7e5f-8a6b-7c8d9e0f1a2b",
    "urn:uuid:0199a1b2-c3d4-7e5f-8a6b-7c8d9e0f1a2b",
    "{0199a1b2-c3d4-7e5f-8a6b-7c8d9e0f1a2b}",
    "0199a1b2c3d47e5f8a6b7c8d9e0f1a2b",
];
const TIMES: &[&str] = &[
    "2031-01-01T00:00:00Z",
    "0001-01-01T00:00:00.000Z",
    "9999-12-31T23:59:59.999999999+00:00",
    "1969-12-31T23:59:60-23:59",
    "2024-02-29t24:00:00.5+14:00",
];
const JSON: &[&str] =
    &["{\"a\":[1,2.5e-3,\"\\u00e9\\ud83d\\ude00\"],\"b\":null}", "[[[[]]]]", "1e400", "\"\\ud800\"", "-0.0", " true "];
const JOB: &str = r#"{"execution":{"id":"0199a1b2-c3d4-7e5f-8a6b-7c8d9e0f1a2b","state":"running","attempt":1,"max_attempts":3,"fence":2,"revision":"0199a1b2-c3d4-4e5f-8a6b-7c8d9e0f1a2b","claimed_by":"w/1","claimed_at":1,"attempted_at":1,"lease_expires_at":60001},"queue":"q","kind":"k","payload":"{}","priority":5,"available_at":0,"created_at":0,"finished_at":null,"unique_key":null,"result":null,"errors":[{"attempt":1,"fence":1,"worker":"w/1","at":0,"text":"x"}]}"#;
const PIECES: &[&str] =
    &["\0", "\\", "\"", "{", "}", "[", "]", ",", ":", "-", "+", ".", "0", "9", "e", "T", "Z", " ", "é", "\u{10ffff}"];

proptest! {
    #![proptest_config(config(1024))]

    #[test]
    fn names_are_taken_as_they_are(text in mutated(NAMES, PIECES), times in 1..60usize) {
        let text = text.repeat(times);
        let (fits, has_nul) = (text.len() <= 255, text.contains('\0'));
        let name = reads::<Name>(&text)?;
        prop_assert_eq!(name.is_some(), fits && !has_nul && !text.is_empty());
        prop_assert!(name.is_none_or(|name| name.as_str() == text));
        let key = reads::<UniqueKey>(&text)?;
        prop_assert_eq!(key.is_some(), fits && !has_nul);
        prop_assert!(key.is_none_or(|key| key.as_str() == text));
        let worker = reads::<WorkerId>(&text)?;
        prop_assert!(worker.is_none_or(|worker| worker.as_str() == text && text.len() <= WorkerId::MAX_BYTES));
        reads::<JobState>(&text)?;
        if let Some(identifier) = reads::<Identifier>(&text)? {
            let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
            prop_assert!(identifier.as_str() == text && text.len() <= 32 && text.bytes().all(is_plain));
        }
        let failure = FailureText::from(&*text);
        prop_assert!(failure.as_str().len() <= FailureText::MAX_BYTES && !failure.as_str().contains('\0'));
    }

    #[test]
    fn ids_and_times_are_read_as_they_are_printed(id in mutated(UUIDS, PIECES), time in mutated(TIMES, PIECES)) {
        reads::<JobId>(&id)?;
        reads::<Timestamp>(&time)?;
    }

    #[test]
    fn times_and_spans_are_within_their_bounds(millis in any::<i64>(), by in any::<i64>()) {
        if let Ok(instant) = Timestamp::from_unix_millis(millis) {
            prop_assert_eq!(instant.to_string().parse::<Timestamp>(), Ok(instant));
            prop_assert_eq!(instant.unix_millis(), millis);
            let moved = instant.saturating_add_millis(by);
            prop_assert!(moved >= Timestamp::MIN && moved <= Timestamp::MAX);
            if let Ok(delay) = Delay::from_millis(by) {
                prop_assert!(When::After(delay).resolve(instant) >= instant);
            }
        }
    }

    #[test]
    fn json_is_kept_byte_for_byte(text in mutated(JSON, PIECES)) {
        match Json::from_text(&*text) {
            Ok(json) => {
                prop_assert_eq!(json.as_str(), &*text);
                // Whatever a type makes of it, it is an answer.
                let _ = json.decode::<serde_json::Value>();
                let _ = json.decode::<Vec<String>>();
                let quoted = serde_json::to_string(&json).expect("a string");
                prop_assert_eq!(serde_json::from_str::<Json>(&quoted).expect("the same"), json);
            }
            Err(invalid) => {
                prop_assert!(serde_json::from_str::<serde_json::Value>(&text).is_err(), "{}: {}", text, invalid);
                prop_assert!(invalid.to_string().len() < 500);
            }
        }
    }

    #[test]
    fn jobs_as_json_are_read_or_refused(text in mutated(&[JOB], PIECES)) {
        if let Ok(job) = serde_json::from_str::<Job>(&text) {
            let again = serde_json::to_string(&job).expect("a job");
            prop_assert_eq!(serde_json::from_str::<Job>(&again).expect("the same"), job);
        }
    }

    #[test]
    fn steps_are_read_from_their_columns_or_refused(
        state in mutated(&["begun", "waiting", "done", "timed_out"], PIECES),
        until in proptest::option::of(any::<i64>()),
        revision in proptest::option::of(any::<u128>()),
        value in proptest::option::of(Just("1")),
    ) {
        let until = until.and_then(|until| Timestamp::from_unix_millis(until).ok());
        let revision = revision.map(|bits| Revision::from(uuid::Uuid::from_u128(bits)));
        let value = value.map(|text| Json::from_text(text).expect("JSON"));
        if let Ok(read) = StepState::from_columns(&state, None, until, revision, value) {
            prop_assert_eq!(read.as_str(), state);
        }
    }
}

/// Whatever is stored, what is said of it is short.
#[test]
fn messages_do_not_repeat_megabytes() {
    let long = format!("{:?}", "é".repeat(1 << 20));
    let id = JobId::new();
    let Err(of_state) = long.parse::<JobState>() else { panic!("no state") };
    let Err(of_step) = StepState::from_columns(&long, None, None, None, None) else { panic!("no state") };
    let Err(of_json) = Json::from_text(&*long).expect("JSON").decode::<Vec<u8>>() else { panic!("no list") };
    let of_rows = [of_state.to_string(), of_json.to_string(), Unreadable::new(id, &long).reason];
    let of_steps = unreadable_step(id, of_step).to_string();
    for message in of_rows.into_iter().chain([of_steps]) {
        assert!(message.len() < 500 && message.ends_with(" .."), "{} bytes", message.len());
    }
}

#[test]
fn the_job_that_is_changed_is_one() {
    serde_json::from_str::<Job>(JOB).expect("a job");
}
