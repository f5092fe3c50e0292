//! Producing, inspecting and operating.

use std::sync::Arc;
use std::time::Duration;

use fenced_queue::contract::*;
use fenced_queue::*;
use serde::Deserialize;
use serde::Serialize;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::common::*;

on_each_store! {
    bad_values_are_typed_errors_and_nothing_is_written
    a_job_is_stored_as_it_was_described
    the_empty_key_is_a_key_and_a_duplicate_is_an_outcome
    the_same_id_is_the_same_job
    a_busy_store_is_asked_again
    a_lost_answer_is_repeated_and_one_job_is_stored
    what_repeating_does_not_mend_is_the_callers_at_once
    a_bad_item_among_many_is_named_and_nothing_is_stored
    of_many_operators_who_cancel_one_job_exactly_one_does
    a_job_that_has_ended_cannot_be_canceled
    a_cancellation_is_decided_anew_if_the_job_changes
    a_cancellation_of_a_job_as_it_was_seen_is_not
    a_cancellation_whose_answer_is_lost_is_recognised
    an_ended_job_runs_again_and_no_other_does
    ended_jobs_are_listed_counted_and_purged_in_batches
    a_waiting_job_is_replaced_and_no_other
    a_replacement_that_loses_to_a_claim_is_a_duplicate
    a_key_that_is_free_again_is_taken
    many_jobs_are_canceled_and_run_again
    an_operation_on_many_jobs_tells_which_it_did_not_change
    the_end_of_a_job_is_awaited
}

/// The name of a queue that is too long by one byte.
fn long() -> String {
    "q".repeat(256)
}

async fn bad_values_are_typed_errors_and_nothing_is_written(store: Arc<Store>) {
    let queue = store.queue();
    let job = || queue.enqueue(&ADD);
    for (field, bad) in [
        ("queue", job().queue("")),
        ("queue", job().queue(long())),
        ("queue", job().queue("a\0b")),
        ("unique_key", job().unique_key(long())),
        ("unique_key", job().unique_key("\0")),
        ("priority", job().priority(10)),
        ("max_attempts", job().max_attempts(0)),
        ("delay", job().delay(Duration::MAX)),
        ("id", job().id_text("no uuid")),
        ("queue", job().queue("").priority(10)),
    ] {
        match bad.await {
            Err(QueueError::Invalid { field: named, .. }) => assert_eq!(named, field),
            other => panic!("{field}: {other:?}"),
        }
    }

    #[derive(Serialize, Deserialize)]
    struct Nameless;
    impl JobArgs for Nameless {
        const KIND: &'static str = "";
    }
    let error = queue.enqueue(&Nameless).await.expect_err("no kind");
    assert_eq!(error.to_string(), "kind: name must not be empty");
    assert!(Delay::from_millis(-1).is_err() && Limit::new(0).is_err() && Json::from_text("{oops").is_err());
    assert!(matches!(queue.list(&ListFilter::default(), None, 0).await, Err(QueueError::Invalid { .. })));
    assert!(matches!(queue.purge(JobState::Failed, Duration::MAX).await, Err(QueueError::Invalid { .. })));
    assert_eq!(store.calls(Op::Enqueue), 0, "nothing was sent");

    #[derive(Serialize, Deserialize)]
    struct Big(String);
    impl JobArgs for Big {
        const KIND: &'static str = "big";
    }
    let cap = store.capabilities().max_payload;
    match queue.enqueue(&Big("x".repeat(cap - 1))).await {
        Err(QueueError::Store(error)) => assert_eq!(error.kind(), ErrorKind::TooLarge),
        other => panic!("{other:?}"),
    }
    assert_eq!(queue.counts().await.expect("counts"), []);
    queue.enqueue(&Big("x".repeat(cap - 2))).await.expect("just fits");
}

async fn a_job_is_stored_as_it_was_described(store: Arc<Store>) {
    let queue = store.queue();
    let id = JobId::new();
    let due = "2500-01-01T00:00:00.001Z".parse().expect("a time");
    let stored = queue.enqueue(&ADD).queue("o'brien").id(id).at(due).priority(0).max_attempts(3).unique_key("k");
    assert_eq!(stored.await.expect("stored"), Enqueued::New(id));
    let job = queue.get(id).await.expect("readable").expect("there");
    assert_eq!((job.queue.as_str(), job.kind.as_str(), job.payload.as_str()), ("o'brien", "add", r#"{"a":1,"b":2}"#));
    assert_eq!((job.available_at, job.priority, job.execution.max_attempts.get()), (due, Priority::FIRST, 3));
    assert_eq!(job.unique_key.expect("a key").as_str(), "k");

    let delayed = queue.enqueue(&ADD).delay(Duration::from_secs(60)).send().await.expect("stored");
    let delayed = store.job(delayed.id()).await;
    assert_eq!(delayed.available_at, delayed.created_at.saturating_add_millis(60_000));
    assert_eq!(queue.get(JobId::new()).await.expect("readable"), None);
}

/// D6
async fn the_empty_key_is_a_key_and_a_duplicate_is_an_outcome(store: Arc<Store>) {
    let queue = store.queue();
    let first = queue.enqueue(&ADD).unique_key("").await.expect("stored").id();
    let second = queue.enqueue(&ADD).unique_key("").await.expect("answered");
    assert_eq!(second, Enqueued::Duplicate { existing: first });
    for other in [queue.enqueue(&ADD), queue.enqueue(&ADD), queue.enqueue(&ADD).unique_key("").queue("other")] {
        assert!(matches!(other.await, Ok(Enqueued::New(_))));
    }
}

/// D9
async fn the_same_id_is_the_same_job(store: Arc<Store>) {
    let queue = store.queue();
    let id = queue.enqueue(&ADD).await.expect("stored").id();
    assert_eq!(queue.enqueue(&ADD).id(id).await.expect("harmless"), Enqueued::Existing(id));
    match queue.enqueue(&Add { a: 2, b: 2 }).id_text(&id.to_string()).await {
        Err(QueueError::Store(error)) => assert_eq!(error.kind(), ErrorKind::IdReused),
        other => panic!("{other:?}"),
    }
    assert_eq!(store.calls(Op::Enqueue), 3, "and is not repeated");
}

async fn a_busy_store_is_asked_again(store: Arc<Store>) {
    store.refuse(Op::Enqueue, 3, busy);
    assert!(matches!(store.queue().enqueue(&ADD).await, Ok(Enqueued::New(_))));
    assert_eq!(store.calls(Op::Enqueue), 4);
}

async fn a_lost_answer_is_repeated_and_one_job_is_stored(store: Arc<Store>) {
    store.lose_answer(Op::Enqueue, 2, lost);
    let answer = store.queue().enqueue(&ADD).await.expect("answered at last");
    assert_eq!(answer, Enqueued::Existing(answer.id()));
    let counts = store.counts().await.expect("counts");
    assert_eq!(counts.iter().map(|count| count.jobs).sum::<u64>(), 1);
}

async fn what_repeating_does_not_mend_is_the_callers_at_once(store: Arc<Store>) {
    store.refuse(Op::Enqueue, 1, broken);
    store.refuse(Op::Enqueue, 1, || Error::not_applied(ErrorKind::Unavailable, "no connection"));
    for kind in [ErrorKind::Permanent, ErrorKind::Unavailable] {
        match store.queue().enqueue(&ADD).await {
            Err(QueueError::Store(error)) => assert_eq!(error.kind(), kind),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(store.calls(Op::Enqueue), 2);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_stays_busy_is_an_error_in_the_end() {
    let store = Store::memory();
    store.refuse(Op::Enqueue, usize::MAX, busy);
    assert!(matches!(store.queue().enqueue(&ADD).await, Err(QueueError::Store(_))));
    assert!((2..20).contains(&store.calls(Op::Enqueue)));
}

/// D10
async fn a_bad_item_among_many_is_named_and_nothing_is_stored(store: Arc<Store>) {
    let queue = store.queue();
    let job = || queue.enqueue(&ADD).into_job().expect("good");
    let mut jobs: Vec<_> = std::iter::repeat_with(job).take(1_000).collect();
    let too_large = Json::encode(&"x".repeat(store.capabilities().max_payload)).expect("JSON");
    let payload = std::mem::replace(&mut jobs[700].payload, too_large);
    match queue.enqueue_many(&jobs).await {
        Err(QueueError::Store(error)) => assert_eq!((error.kind(), error.index()), (ErrorKind::TooLarge, Some(700))),
        other => panic!("{other:?}"),
    }
    assert_eq!(queue.counts().await.expect("counts"), []);
    jobs[700].payload = payload;
    let answers = queue.enqueue_many(&jobs).await.expect("stored");
    assert!(answers.iter().zip(&jobs).all(|(answer, job)| *answer == Enqueued::New(job.id)));
}

/// A21
async fn of_many_operators_who_cancel_one_job_exactly_one_does(store: Arc<Store>) {
    let id = store.queue().enqueue(&ADD).await.expect("stored").id();
    let barrier = Arc::new(Barrier::new(32));
    let mut operators = JoinSet::new();
    for number in 0..32 {
        let (queue, barrier) = (store.queue(), Arc::clone(&barrier));
        operators.spawn(async move {
            barrier.wait().await;
            queue.cancel(id, format!("operator {number}")).await
        });
    }
    let mut winners = 0;
    for answer in operators.join_all().await {
        match answer {
            Ok(execution) => winners += u32::from(execution.state == JobState::Canceled),
            Err(QueueError::Ended { state, .. }) => assert_eq!(state, JobState::Canceled),
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(winners, 1);
    assert_eq!(store.job(id).await.errors.len(), 1, "one reason is recorded");
}

async fn a_job_that_has_ended_cannot_be_canceled(store: Arc<Store>) {
    let queue = store.queue();
    let id = queue.enqueue(&ADD).await.expect("stored").id();
    queue.cancel(id, "no longer needed").await.expect("canceled");
    let error = queue.cancel(id, "again").await.expect_err("ended");
    assert_eq!(error.to_string(), format!("job {id} has ended already: it is canceled"));
    let nobody = JobId::new();
    assert!(matches!(queue.cancel(nobody, "").await, Err(QueueError::NotFound { id }) if id == nobody));
}

async fn a_cancellation_is_decided_anew_if_the_job_changes(store: Arc<Store>) {
    let queue = store.queue();
    let id = queue.enqueue(&ADD).await.expect("stored").id();
    let gate = store.gate(Op::Get);
    let canceling = tokio::spawn(async move { queue.cancel(id, "no longer needed").await });
    gate.reached().await;
    claim_one(&store).await;
    gate.open();
    let execution = canceling.await.expect("no panic").expect("canceled");
    assert_eq!((execution.state, execution.attempt), (JobState::Canceled, 1));
    assert_eq!(store.calls(Op::Update), 2);
}

async fn a_cancellation_of_a_job_as_it_was_seen_is_not(store: Arc<Store>) {
    let queue = store.queue();
    let id = queue.enqueue(&ADD).await.expect("stored").id();
    let seen = store.job(id).await;
    let claimed = claim_one(&store).await;
    match queue.cancel_job(&seen, "no longer needed").await {
        Err(QueueError::Transition(TransitionError::Conflict(conflict))) => {
            assert_eq!((conflict.expected, conflict.current), (seen.execution, claimed.execution.clone()));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(store.job(id).await, claimed, "nothing was changed");
    queue.cancel_job(&claimed, "as it is").await.expect("canceled");
}

/// A13
async fn a_cancellation_whose_answer_is_lost_is_recognised(store: Arc<Store>) {
    let queue = store.queue();
    let id = queue.enqueue(&ADD).await.expect("stored").id();
    store.lose_answer(Op::Update, 2, lost);
    assert_eq!(queue.cancel(id, "once").await.expect("canceled").state, JobState::Canceled);
    assert_eq!((store.calls(Op::Update), store.job(id).await.errors.len()), (3, 1));
}

async fn an_ended_job_runs_again_and_no_other_does(store: Arc<Store>) {
    let queue = store.queue();
    let id = queue.enqueue(&ADD).unique_key("k").await.expect("stored").id();
    let error = queue.rerun(id).await.expect_err("has not ended");
    assert!(matches!(&error, QueueError::Transition(TransitionError::Illegal(_))), "{error}");
    assert!(error.to_string().contains("from waiting"), "{error}");
    queue.cancel(id, "no longer needed").await.expect("canceled");
    let other = queue.enqueue(&ADD).unique_key("k").await.expect("stored").id();
    match queue.rerun(id).await {
        Err(QueueError::Store(error)) => assert_eq!(error.kind(), ErrorKind::Invalid),
        taken => panic!("{taken:?}"),
    }
    queue.cancel(other, "makes room").await.expect("canceled");
    assert_eq!(queue.rerun(id).await.expect("runs again").state, JobState::Waiting);
    assert_eq!(store.job(id).await.errors.len(), 1, "what was recorded stays");
    assert!(matches!(queue.rerun(JobId::new()).await, Err(QueueError::NotFound { .. })));
}

/// F8
async fn ended_jobs_are_listed_counted_and_purged_in_batches(store: Arc<Store>) {
    let queue = store.queue();
    let job = || queue.enqueue(&ADD).into_job().expect("good");
    let jobs: Vec<_> = std::iter::repeat_with(job).take(1_201).collect();
    queue.enqueue_many(&jobs).await.expect("stored");
    let mut decisions: Vec<_> = Vec::new();
    for job in &jobs[1..] {
        let seen = store.job(job.id).await;
        decisions.push(Decision::new(&seen.execution, &Transition::Cancel { reason: "old".into() }).expect("legal"));
    }
    for answer in Transitioner::new(&*store).submit_all(&mut decisions).await {
        answer.expect("canceled");
    }
    let mut filter = ListFilter::default();
    filter.state = Some(JobState::Canceled);
    let page = queue.list(&filter, None, 1_000).await.expect("a page");
    let rest = queue.list(&filter, page.next, 1_000).await.expect("a page");
    assert_eq!((page.items.len(), rest.items.len(), rest.next), (1_000, 200, None));

    assert_eq!(queue.purge(JobState::Canceled, Duration::from_secs(3_600)).await.expect("purged"), 0, "too young");
    store.refuse(Op::Purge, 1, busy);
    assert_eq!(queue.purge(JobState::Canceled, Duration::ZERO).await.expect("purged"), 1_200);
    assert_eq!(store.calls(Op::Purge), 1 + 1 + 2);
    let counts = queue.counts().await.expect("counts");
    assert_eq!((counts.len(), counts[0].state, counts[0].jobs), (1, Some(JobState::Waiting), 1));
    match queue.purge(JobState::Waiting, Duration::ZERO).await {
        Err(QueueError::Store(error)) => assert_eq!(error.kind(), ErrorKind::Invalid),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_scheme_that_cannot_be_used_is_told_and_nothing_secret_with_it() {
    for (url, start) in [
        ("redis://user:hunter2@host/0", "unknown scheme `redis` in the URL; known are "),
        ("hunter2/path", "no scheme in the URL; known are "),
        ("", "no scheme in the URL; known are "),
        (":hunter2", "no scheme in the URL; known are "),
        ("user@hunter2:80", "no scheme in the URL; known are "),
    ] {
        let error = Queue::connect(url).await.expect_err("no store");
        let text = error.to_string();
        assert!(text.starts_with(start) && text.contains("sqlite") && text.contains("memory"), "{text}");
        assert!(!format!("{error:?} {text}").contains("hunter2"), "{error:?}");
    }
}

#[cfg(not(feature = "sqlite"))]
#[tokio::test]
async fn a_backend_that_is_not_compiled_in_is_told_with_its_feature() {
    let error = Queue::connect("SQLite:hunter2.db").await.expect_err("not compiled in");
    let text = "scheme `sqlite` needs the feature `sqlite` of fenced-queue, which is not enabled";
    assert_eq!(error.to_string(), text);
}

#[tokio::test]
async fn connecting_is_enough_to_begin() {
    let queue: Queue = Queue::connect("memory:").await.expect("connects");
    let clone = queue.clone();
    let id = queue.enqueue(&ADD).await.expect("stored").id();
    assert!(clone.get(id).await.expect("readable").is_some(), "clones share the store");
}

#[cfg(feature = "sqlite")]
mod on_sqlite_only {
    use super::*;

    async fn pool(folder: &tempfile::TempDir) -> sqlx::SqlitePool {
        let options = sqlx::sqlite::SqliteConnectOptions::new().filename(folder.path().join("app.db"));
        sqlx::SqlitePool::connect_with(options.create_if_missing(true)).await.expect("connects")
    }

    /// D7
    #[tokio::test]
    async fn a_job_exists_if_the_callers_transaction_commits() {
        let folder = tempfile::tempdir().expect("a folder");
        let pool = pool(&folder).await;
        let queue = Queue::new(sqlite::SqliteBackend::from_pool(pool.clone()).await.expect("a backend"));
        queue.migrate().await.expect("migrates");
        for commits in [false, true] {
            let mut transaction = pool.begin().await.expect("begins");
            let one = queue.enqueue(&ADD).send_in(&mut transaction).await.expect("stored").id();
            let job = queue.enqueue(&ADD).into_job().expect("good");
            let many = queue.enqueue_in(&mut transaction, std::slice::from_ref(&job)).await.expect("stored");
            assert_eq!(many, [Enqueued::New(job.id)]);
            let bad = queue.enqueue(&ADD).priority(10).send_in(&mut transaction).await;
            assert!(matches!(bad, Err(QueueError::Invalid { field: "priority", .. })));
            assert_eq!(queue.get(one).await.expect("readable"), None, "not visible before the commit");
            match commits {
                true => transaction.commit().await.expect("commits"),
                false => transaction.rollback().await.expect("rolls back"),
            }
            for id in [one, job.id] {
                assert_eq!(queue.get(id).await.expect("readable").is_some(), commits);
            }
        }
    }

    #[tokio::test]
    async fn connecting_migrates_unless_that_is_left_to_the_operator() {
        let folder = tempfile::tempdir().expect("a folder");
        let url = format!("sqlite:{}", folder.path().join("a b.db").display());
        let queue = Queue::connect_only(&url).await.expect("connects");
        assert!(matches!(queue.counts().await, Err(QueueError::Store(_))), "there is no schema yet");
        let id = Queue::connect(&url).await.expect("migrates").enqueue(&ADD).await.expect("stored").id();
        assert!(queue.get(id).await.expect("readable").is_some(), "two handles see one store");
    }
}

async fn a_waiting_job_is_replaced_and_no_other(store: Arc<Store>) {
    let queue = store.queue();
    let keyed = |add: &Add| queue.enqueue(add).unique_key("report");
    let first = keyed(&ADD).priority(2).delay(Duration::from_secs(60)).send_or_replace().await.expect("stored");
    let Placed::Enqueued(Enqueued::New(id)) = first else { panic!("{first:?}") };
    let before = store.job(id).await;
    let newer = Add { a: 7, b: 8 };
    let due = "2100-01-01T00:00:00Z".parse().expect("a time");
    let placed = keyed(&newer).at(due).priority(9).send_or_replace().await.expect("replaced");
    assert_eq!(placed, Placed::Replaced(id));
    let after = store.job(id).await;
    assert_eq!((after.payload.as_str(), after.available_at), (r#"{"a":7,"b":8}"#, due));
    assert_eq!(
        (after.priority, after.created_at, after.state()),
        (before.priority, before.created_at, JobState::Waiting)
    );

    #[derive(Serialize, Deserialize)]
    struct Other;
    impl JobArgs for Other {
        const KIND: &'static str = "other";
    }
    let placed = queue.enqueue(&Other).unique_key("report").send_or_replace().await.expect("an outcome");
    assert_eq!(
        placed,
        Placed::Enqueued(Enqueued::Duplicate { existing: id }),
        "another kind does not read that payload"
    );
    assert_eq!(store.job(id).await, after);
}

async fn a_replacement_that_loses_to_a_claim_is_a_duplicate(store: Arc<Store>) {
    let queue = store.queue();
    let id = queue.enqueue(&ADD).unique_key("report").await.expect("stored").id();
    let gate = store.gate_before(Op::Update);
    let other = store.another();
    let newer = Add { a: 7, b: 8 };
    let replacing = queue.enqueue(&newer).unique_key("report").send_or_replace();
    let claiming = async {
        gate.reached().await;
        let claimed = claim_one(&other).await;
        gate.open();
        claimed
    };
    let (placed, claimed) = tokio::join!(replacing, claiming);
    assert_eq!(placed.expect("an outcome"), Placed::Enqueued(Enqueued::Duplicate { existing: id }));
    assert_eq!(store.job(id).await, claimed, "the one that runs is as it was");
}

async fn a_key_that_is_free_again_is_taken(store: Arc<Store>) {
    let queue = store.queue();
    let id = queue.enqueue(&ADD).unique_key("report").await.expect("stored").id();
    let gate = store.gate_before(Op::Update);
    let newer = Add { a: 7, b: 8 };
    let replacing = queue.enqueue(&newer).unique_key("report").send_or_replace();
    let canceling = async {
        gate.reached().await;
        store.another().queue().cancel(id, "not wanted").await.expect("canceled");
        gate.open();
    };
    let (placed, ()) = tokio::join!(replacing, canceling);
    let Ok(Placed::Enqueued(Enqueued::New(second))) = placed else { panic!("{placed:?}") };
    assert_eq!(store.job(second).await.payload.as_str(), r#"{"a":7,"b":8}"#);
    assert_eq!(store.job(id).await.state(), JobState::Canceled);
}

async fn many_jobs_are_canceled_and_run_again(store: Arc<Store>) {
    let queue = store.queue();
    let jobs: Vec<_> = (0..450).map(|_| queue.enqueue(&ADD).into_job().expect("good")).collect();
    queue.enqueue_many(&jobs).await.expect("stored");
    let other = queue.enqueue(&ADD).queue("other").await.expect("stored").id();
    let running = claim_one(&store).await.id();
    let mut filter = ListFilter::default();
    filter.queue = Some("default".parse().expect("a name"));
    store.refuse(Op::Update, 1, busy);
    store.lose_answer(Op::Update, 1, lost);
    let canceled = queue.cancel_all(&filter, "the shop is closed").await.expect("listed");
    assert_eq!((canceled.changed, canceled.refused.len()), (450, 0), "the one that runs is among them");
    assert_eq!(store.job(running).await.errors[0].text.as_str(), "the shop is closed");
    assert_eq!(store.job(other).await.state(), JobState::Waiting);
    assert_eq!(queue.cancel_all(&filter, "again").await.expect("listed").changed, 0, "they have ended");
    filter.state = Some(JobState::Canceled);
    let again = queue.rerun_all(&filter).await.expect("listed");
    assert_eq!((again.changed, again.refused.len()), (450, 0));
    assert_eq!(queue.rerun_all(&filter).await.expect("listed").changed, 0);
}

async fn an_operation_on_many_jobs_tells_which_it_did_not_change(store: Arc<Store>) {
    let queue = store.queue();
    let ended = queue.enqueue(&ADD).unique_key("k").await.expect("stored").id();
    queue.cancel(ended, "first").await.expect("canceled");
    let holder = queue.enqueue(&ADD).unique_key("k").await.expect("stored").id();
    let bulk = queue.rerun_all(&ListFilter::default()).await.expect("listed");
    assert_eq!((bulk.changed, bulk.refused.len()), (0, 1));
    assert_eq!(bulk.refused[0].0, ended, "its key is taken: {}", bulk.refused[0].1);
    assert_eq!(store.job(holder).await.state(), JobState::Waiting);
}

async fn the_end_of_a_job_is_awaited(store: Arc<Store>) {
    let queue = store.queue();
    let id = queue.enqueue(&ADD).await.expect("stored").id();
    let (other, gate) = (store.another(), store.gate(Op::Get));
    let ending = async {
        gate.reached().await;
        other.queue().cancel(id, "no need").await.expect("canceled");
        gate.open();
    };
    store.refuse(Op::Get, 1, lost);
    let (ended, ()) = tokio::join!(queue.ended(id), ending);
    assert_eq!(ended.expect("ended").state(), JobState::Canceled);
    let nobody = queue.ended(JobId::new()).await;
    assert!(matches!(nobody, Err(QueueError::NotFound { .. })), "{nobody:?}");
}
