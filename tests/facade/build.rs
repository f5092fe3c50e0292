//! Misuse is refused when a worker is built, and the value named.

use std::time::Duration;

use fenced_queue::contract::*;
use fenced_queue::*;
use serde::Deserialize;
use serde::Serialize;

use crate::common::*;

#[derive(Serialize, Deserialize)]
struct End;

impl JobArgs for End {
    const KIND: &'static str = "end";
}

fn builder() -> WorkerBuilder {
    Worker::builder(&Queue::new(MemoryBackend::new())).register(async |_: JobContext, _: Add| Ok(()))
}

fn refused(builder: WorkerBuilder) -> String {
    builder.build().expect_err("misuse").to_string()
}

/// C6
#[test]
fn misuse_is_refused_and_the_value_named() {
    let seconds = Duration::from_secs;
    assert_eq!(refused(builder().concurrency(0)), "concurrency must not be zero");
    assert_eq!(refused(builder().concurrency(usize::MAX)), format!("a concurrency of {} is above 100000", usize::MAX));
    assert_eq!(refused(builder().prefetch(100_001)), "a prefetch of 100001 is above 100000");
    assert!(refused(builder().lease(Duration::ZERO)).starts_with("lease: lease must be from 1 to "));
    assert!(refused(builder().lease(Duration::MAX)).starts_with("lease: lease must be from 1 to "));
    assert_eq!(
        refused(builder().lease(seconds(30)).heartbeat(Duration::from_millis(10_001))),
        "a heartbeat every 10.001s is too slow for a lease of 30s: at most a third of it is allowed"
    );
    assert_eq!(refused(builder().heartbeat(Duration::ZERO)), "heartbeat must not be zero");
    assert_eq!(refused(builder().poll(Duration::ZERO)), "poll must not be zero");
    assert_eq!(refused(builder().name("")), "worker name: name must not be empty");
    assert_eq!(refused(builder().queue_with("a", 0)), "concurrency must not be zero");
    let never =
        builder().register_with(KindOptions::new().timeout(Duration::ZERO), async |_: JobContext, _: End| Ok(()));
    assert_eq!(refused(never), "timeout must not be zero");
    let refusal = |state| format!("no retention, or a second one, can be given for the state {state}");
    assert_eq!(refused(builder().retention(JobState::Waiting, seconds(1))), refusal("waiting"));
    let twice = builder().retention(JobState::Failed, seconds(1)).retention(JobState::Failed, seconds(2));
    assert_eq!(refused(twice), refusal("failed"));
    assert!(refused(builder().retention(JobState::Failed, Duration::MAX)).starts_with("retention: "));
    assert_eq!(refused(builder().queue("")), "queue: name must not be empty");
    assert_eq!(refused(builder().queue("a").queue("b").queue("a")), "queue `a` is named twice");
    let twice = builder().register(async |_: JobContext, _: Add| Ok(()));
    assert_eq!(refused(twice), "kind `add` has two handlers");
    let none = Worker::builder(&Queue::new(MemoryBackend::new()));
    assert_eq!(refused(none), "a worker needs at least one handler");

    #[derive(Serialize, Deserialize)]
    struct Nameless;
    impl JobArgs for Nameless {
        const KIND: &'static str = "";
    }
    assert_eq!(refused(builder().register(async |_: JobContext, _: Nameless| Ok(()))), "kind: name must not be empty");
    builder().lease(seconds(30)).heartbeat(seconds(10)).concurrency(100_000).build().expect("the limits are allowed");
}

/// C9
#[test]
fn every_worker_is_another_one() {
    let build = || builder().name("web-1").build().expect("a worker");
    let (first, second) = (build(), build());
    assert_ne!(first.id(), second.id());
    assert!(first.id().as_str().starts_with("web-1/"));
}
