//! What the server refuses, and what the caller is told: the kind, what became of the write, and that nothing is lost.

mod common;

use std::time::Duration;

use backend_postgres::PostgresBackend;
use backend_postgres::PostgresOptions;
use common::*;
use queue_core::*;
use sqlx::postgres::PgPoolOptions;

fn event(key: &str) -> NewEvent {
    NewEvent { key: name(key), payload: Json::null(), keep: Delay::MAX }
}

#[tokio::test]
async fn a_url_is_never_repeated() {
    for url in [
        "mysql://me:secret@localhost/x",
        "secret",
        "postgres://me:secret@localhost:99999/x",
        "postgres://me:secret@local host/x",
        "postgres://me@localhost/x?sslmode=secret",
        "postgres://me@localhost/x?port=secret",
    ] {
        let error = PostgresOptions::from_url(url).expect_err("malformed");
        assert_eq!((error.kind(), error.certainty()), (ErrorKind::Invalid, Certainty::NotApplied), "{url}");
        for text in [error.to_string(), format!("{error:?}")] {
            assert!(!text.contains("secret") && !text.contains("localhost"), "{text}");
        }
    }
    let options = PostgresOptions::from_url("postgresql://me:secret@localhost/x").expect("a URL");
    assert!(!format!("{options:?}").contains("secret"));
    let mut pool = PgPoolOptions::new().max_connections(1);
    pool = pool.acquire_timeout(Duration::from_millis(50));
    let pool = pool.connect_lazy("postgres://me:secret@127.0.0.1:1/x").expect("a pool");
    let error = PostgresBackend::from_pool(pool).await.expect_err("nobody is there");
    assert!(!format!("{error} {error:?}").contains("secret"));
}

#[tokio::test]
async fn names_that_the_server_keeps_to_itself() {
    for schema in ["pg_jobs", "information_schema"] {
        let schema = schema.parse().expect("an identifier");
        assert_error(PostgresOptions::default().schema(schema), ErrorKind::Invalid);
    }
    // Any other word will do, also one of SQL's own.
    let scratch = Scratch { schema: "select".parse().expect("an identifier") };
    scratch.run("DROP SCHEMA IF EXISTS \"select\" CASCADE").await;
    let backend = scratch.connect().await;
    backend.migrate().await.expect("migrates");
    backend.enqueue(&[job("1")]).await.expect("stores");
    claim_one(&backend).await;
    scratch.run("DROP SCHEMA \"select\" CASCADE").await;
}

#[tokio::test]
async fn a_server_that_cannot_be_reached() {
    let scratch = Scratch::new();
    let options = scratch.options_for("postgres://postgres@127.0.0.1:1/postgres");
    assert_error(
        PostgresBackend::connect_with(options.acquire_timeout(Duration::from_millis(50))).await,
        ErrorKind::Unavailable,
    );
    let server = application();
    let nowhere = format!("postgres://postgres@{}:{}/no_such_database", server.get_host(), server.get_port());
    assert_error(PostgresBackend::connect_with(scratch.options_for(&nowhere)).await, ErrorKind::Permanent);
}

#[tokio::test]
async fn a_database_that_was_not_migrated() {
    let scratch = Scratch::new();
    let backend = scratch.connect().await;
    assert_error(backend.enqueue(&[job("1")]).await, ErrorKind::Schema);
    assert_error(backend.enqueue(&[job("1"), job("2")]).await, ErrorKind::Schema);
    assert_error(backend.claim(&request(1)).await, ErrorKind::Schema);
    assert_error(backend.get(JobId::new()).await, ErrorKind::Schema);
    assert_error(backend.stale(None, limit(1)).await, ErrorKind::Schema);
    assert_error(backend.steps(JobId::new()).await, ErrorKind::Schema);
    assert_error(backend.emit(&event("e")).await, ErrorKind::Schema);
    assert_error(backend.time_out_waits(limit(1)).await, ErrorKind::Schema);
    backend.migrate().await.expect("migrates");
    backend.enqueue(&[job("1")]).await.expect("now it works, on the same connections");
    claim_one(&backend).await;
}

/// Texts would come back changed, or not go in.
#[tokio::test]
async fn a_database_that_is_not_in_utf_8() {
    let scratch = Scratch::new();
    let database = scratch.schema.as_str();
    let create = format!("CREATE DATABASE {database} ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0");
    scratch.run(&create).await;
    let pool = PgPoolOptions::new().max_connections(1).connect_with(application().database(database)).await;
    let pool = pool.expect("a pool");
    assert_error(PostgresBackend::from_pool(pool.clone()).await, ErrorKind::Unsupported);
    pool.close().await;
    scratch.run(&format!("DROP DATABASE {database}")).await;
}

/// F7: a server that became a standby under open connections, for which a session that only reads stands in.
#[tokio::test]
async fn a_server_that_is_read_only() {
    let (scratch, backend) = migrated().await;
    backend.enqueue(&[job("1")]).await.expect("stores");
    let claimed = claim_one(&backend).await;
    let pool = scratch.pool_with(1, &[("default_transaction_read_only", "on")]).await;
    let reader = scratch.lent(&pool).await;
    let session = "SELECT pg_backend_pid()::bigint";
    let first: i64 = sqlx::query_scalar(session).fetch_one(&pool).await.expect("answers");
    assert_error(reader.enqueue(&[job("1")]).await, ErrorKind::Unavailable);
    let second: i64 = sqlx::query_scalar(session).fetch_one(&pool).await.expect("answers");
    assert_ne!(first, second, "the connection is thrown away");
    assert_error(reader.enqueue(&[job("1"), job("2")]).await, ErrorKind::Unavailable);
    assert_error(reader.claim(&request(1)).await, ErrorKind::Unavailable);
    assert_error(reader.purge(JobState::Failed, Delay::ZERO, limit(1)).await, ErrorKind::Unavailable);
    let answer = Transitioner::new(&reader).apply(&claimed.execution, &complete("1")).await;
    assert!(matches!(answer, Err(TransitionError::Backend(error)) if error.kind() == ErrorKind::Unavailable));
    assert_eq!(reader.get(claimed.id()).await.expect("reads"), Some(claimed.clone()));
    reader.migrate().await.expect("there is nothing to write");

    // The pool connects to the next one.
    pool.set_connect_options(scratch.application());
    assert_error(reader.claim(&request(1)).await, ErrorKind::Unavailable);
    Transitioner::new(&reader).apply(&claimed.execution, &complete("1")).await.expect("settles");
}

#[tokio::test]
async fn a_pool_that_has_no_connection_left() {
    let (scratch, _backend) = migrated().await;
    let options = PgPoolOptions::new().max_connections(1).acquire_timeout(Duration::from_millis(20));
    let pool = options.connect_with(application()).await.expect("a pool");
    let backend = scratch.lent(&pool).await;
    let taken = pool.acquire().await.expect("a connection");
    assert_error(backend.claim(&request(1)).await, ErrorKind::Unavailable);
    assert_error(backend.get(JobId::new()).await, ErrorKind::Unavailable);
    drop(taken);
    pool.close().await;
    assert_error(backend.claim(&request(1)).await, ErrorKind::Unavailable);
}

/// B5: a claim and a heartbeat wait a third of their lease for a connection, and are not sent after that.
#[tokio::test]
async fn a_claim_and_a_beat_wait_for_a_third_of_the_lease() {
    let (scratch, backend) = migrated().await;
    backend.enqueue(&[job("1"), job("2")]).await.expect("stores");
    let held = Held::of(&claim_one(&backend).await.execution).expect("held");
    let pool = scratch.pool(1).await;
    let backend = scratch.lent(&pool).await;
    let taken = pool.acquire().await.expect("a connection");
    let short = Lease::from_millis(60).expect("a lease");
    let request = ClaimRequest::new(name("mail"), [name("welcome")], worker(), short, limit(1)).expect("a request");
    assert_error(backend.claim(&request).await, ErrorKind::Transient);
    assert_error(backend.extend_leases(&[held], short).await, ErrorKind::Transient);
    drop(taken);
    claim_one(&backend).await;
}

/// A wait for a row ends: as the session says, and after ten seconds where it says nothing.
#[tokio::test]
async fn a_row_that_somebody_has_locked() {
    let (scratch, backend) = migrated().await;
    backend.enqueue(&[keyed("k"), job("2")]).await.expect("stores");
    let claimed = backend.claim(&request(2)).await.expect("claims").jobs;
    let updates: Vec<_> = claimed.iter().map(decide).collect();
    let mut holder = scratch.pool(1).await.begin().await.expect("begins");
    let lock = scratch.text("SELECT id FROM {schema}.jobs WHERE state = 'running' FOR UPDATE");
    sqlx::query(lock).execute(&mut *holder).await.expect("locks");

    let patient = scratch.lent(&scratch.pool(1).await).await;
    let impatient = scratch.lent(&scratch.pool_with(1, &[("lock_timeout", "50ms")]).await).await;
    assert_error(impatient.update_many_if_current(&updates).await, ErrorKind::Transient);
    let strict = [("lock_timeout", "50ms"), ("default_transaction_isolation", "serializable")];
    let strict = scratch.pool_with(1, &strict).await;
    assert_error(scratch.lent(&strict).await.update_many_if_current(&updates).await, ErrorKind::Transient);
    let (ours, theirs) =
        tokio::join!(backend.update_many_if_current(&updates[..1]), patient.update_many_if_current(&updates[1..]));
    assert_error(ours, ErrorKind::Transient);
    assert_error(theirs, ErrorKind::Transient);
    let beats = claimed.iter().filter_map(|job| Held::of(&job.execution)).collect::<Vec<_>>();
    let beats = impatient.extend_leases(&beats, lease()).await.expect("waits for nobody");
    assert_eq!(beats, [Beat::Busy; 2]);
    holder.rollback().await.expect("rolls back");
    let answers = impatient.update_many_if_current(&updates).await.expect("the connection is good");
    assert!(answers.iter().all(|answer| matches!(answer, Update::Applied(_))));
}

/// The same for an event, and for a job that an event wakes; and nothing of the call stays.
#[tokio::test]
async fn an_event_that_somebody_has_locked() {
    let (scratch, backend) = migrated().await;
    backend.enqueue(&[job("1"), job("2")]).await.expect("stores");
    let claimed = backend.claim(&request(2)).await.expect("claims").jobs;
    let suspension = |job: &Job| {
        Suspension::new(&job.execution, name("w"), Some(name("e")), When::At(Timestamp::MAX)).expect("legal")
    };
    suspension(&claimed[0]).submit(&backend).await.expect("waits");
    let impatient = scratch.lent(&scratch.pool_with(1, &[("lock_timeout", "50ms")]).await).await;
    for lock in
        ["INSERT INTO {schema}.events (key, kept_until) VALUES ('e', now())", "SELECT id FROM {schema}.jobs FOR UPDATE"]
    {
        let mut holder = scratch.pool(1).await.begin().await.expect("begins");
        sqlx::query(scratch.text(lock)).execute(&mut *holder).await.expect("locks");
        assert_error(impatient.emit(&event("e")).await, ErrorKind::Transient);
        let answer = suspension(&claimed[1]).submit(&impatient).await;
        let Err(StepError::Transition(TransitionError::Backend(error))) = answer else { panic!("{answer:?}") };
        assert_eq!((error.kind(), error.certainty()), (ErrorKind::Transient, Certainty::NotApplied), "{error}");
        assert_eq!(backend.time_out_waits(limit(9)).await.expect("waits for nobody"), []);
        assert_eq!(backend.purge_events(limit(9)).await.expect("waits for nobody"), 0);
        holder.rollback().await.expect("rolls back");
    }
    assert_eq!(impatient.emit(&event("e")).await.expect("the connection is good"), Emitted::New { woken: 1 });
    let came = suspension(&claimed[1]).submit(&impatient).await.expect("it is kept");
    assert_eq!(came, Suspended::Came(Json::null()));
}

/// Waits for events, and what ends them, beside updates of many jobs: everybody locks events first, and jobs in one order.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn waits_that_overlap_with_batches() {
    let (scratch, backend) = migrated().await;
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..4 {
        let backend = scratch.connect().await;
        tasks.spawn(async move {
            for _ in 0..20 {
                backend.enqueue(&(0..10).map(|_| job("1")).collect::<Vec<_>>()).await?;
                let mut claimed = backend.claim(&request(10)).await?.jobs;
                claimed.reverse();
                for job in &claimed {
                    let until = if task == 0 { When::Now } else { When::At(Timestamp::MAX) };
                    let mut wait = Suspension::new(&job.execution, name("w"), Some(name("e")), until).expect("legal");
                    wait.submit(&backend).await.map_err(|error| Error::invalid(error.to_string()))?;
                }
                let mut suspended = ListFilter::default();
                suspended.state = Some(JobState::Suspended);
                let page = backend.list(&suspended, None, limit(100)).await?;
                let updates: Vec<_> =
                    page.items.iter().map(|job| UpdateRequest { patch: keep(job), ..cancel(job) }).collect();
                backend.update_many_if_current(&updates).await?;
                backend.time_out_waits(limit(100)).await?;
                backend.emit(&NewEvent { keep: Delay::ZERO, ..event("e") }).await?;
                backend.purge_events(limit(100)).await?;
            }
            Ok::<_, Error>(())
        });
    }
    tasks.join_all().await.into_iter().collect::<Result<Vec<_>>>().expect("no error");
    let mut suspended = ListFilter::default();
    suspended.state = Some(JobState::Suspended);
    backend.emit(&NewEvent { keep: Delay::ZERO, ..event("e") }).await.expect("wakes whoever is left");
    assert!(backend.list(&suspended, None, limit(100)).await.expect("lists").items.is_empty());
}

fn cancel(job: &Job) -> UpdateRequest {
    let cancel = Transition::Cancel { reason: "enough".into() };
    Decision::new(&job.execution, &cancel).expect("legal").request().clone()
}

/// D1: whoever waits for a key in vain is told.
#[tokio::test]
async fn a_key_that_somebody_is_about_to_take() {
    let (scratch, backend) = migrated().await;
    let application = scratch.pool(1).await;
    let mut transaction = application.begin().await.expect("begins");
    backend.enqueue_in(&mut transaction, &[keyed("k")]).await.expect("stores");
    let impatient = scratch.lent(&scratch.pool_with(1, &[("lock_timeout", "50ms")]).await).await;
    assert_error(impatient.enqueue(&[keyed("k")]).await, ErrorKind::Transient);
    assert_error(impatient.enqueue(&[job("1"), keyed("k")]).await, ErrorKind::Transient);
    transaction.rollback().await.expect("rolls back");
    let outcomes = impatient.enqueue(&[job("1"), keyed("k")]).await.expect("stores");
    assert!(matches!(outcomes[..], [Enqueued::New(_), Enqueued::New(_)]));
    assert_eq!(backend.counts().await.expect("counts")[0].jobs, 2, "nothing of the calls before");
}

/// The answer to a settle that makes a job active again whose key is taken.
#[tokio::test]
async fn a_key_that_is_taken() {
    let (_scratch, backend) = migrated().await;
    backend.enqueue(&[keyed("k")]).await.expect("stores");
    let ended = claim_one(&backend).await;
    let ended = Transitioner::new(&backend).apply(&ended.execution, &complete("1")).await.expect("settles");
    backend.enqueue(&[keyed("k")]).await.expect("stores");
    let mut decision = Decision::new(ended.execution(), &Transition::Rerun).expect("legal");
    let UpdateRequest { id, current, patch } = decision.request().clone();
    assert_error(backend.update_if_current(id, &current, &patch).await, ErrorKind::Invalid);
    assert_error(backend.update_many_if_current(&[decision.request().clone()]).await, ErrorKind::Invalid);
    let holder = claim_one(&backend).await;
    Transitioner::new(&backend).apply(&holder.execution, &complete("1")).await.expect("settles");
    Transitioner::new(&backend).submit(&mut decision).await.expect("the key is free");
}

/// Overlapping batches lock in one order, whatever order the callers have: nobody is chosen as the victim of a deadlock.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn batches_that_overlap() {
    let (scratch, backend) = migrated().await;
    let jobs: Vec<_> = (0..60).map(|number| keyed(&number.to_string())).collect();
    backend.enqueue(&jobs).await.expect("stores");
    let claimed = backend.claim(&request(60)).await.expect("claims").jobs;
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..4 {
        let (backend, mut mine, mut jobs) = (scratch.connect().await, claimed.clone(), jobs.clone());
        tasks.spawn(async move {
            for round in 0..20 {
                mine.rotate_left(7 * task + round);
                jobs.rotate_left(11 * task + round);
                if task % 2 == 0 {
                    mine.reverse();
                    jobs.reverse();
                }
                // Restates what is there: everybody's match, every time.
                let updates: Vec<_> =
                    mine.iter().map(|job| UpdateRequest { patch: keep(job), ..decide(job) }).collect();
                let answers = backend.update_many_if_current(&updates).await?;
                assert!(answers.iter().all(|answer| matches!(answer, Update::Applied(_))));
                backend.enqueue(&jobs).await?;
            }
            Ok::<_, Error>(())
        });
    }
    tasks.join_all().await.into_iter().collect::<Result<Vec<_>>>().expect("no error");
}

/// A patch that writes what the row has already.
fn keep(job: &Job) -> Patch {
    Patch {
        revision: None,
        state: job.state(),
        attempt: job.execution.attempt,
        available: None,
        clear_claim: false,
        attempted_at: Change::Keep,
        lease: Change::Keep,
        finished_at: Change::Keep,
        result: Change::Keep,
        failure: None,
        payload: None,
    }
}

/// A statement prepared before a column changed its type fails once, not for ever.
#[tokio::test]
async fn a_statement_that_was_prepared_for_another_table() {
    let (scratch, _backend) = migrated().await;
    let backend = scratch.lent(&scratch.pool(1).await).await;
    let new = job("1");
    backend.enqueue(std::slice::from_ref(&new)).await.expect("stores");
    for _ in 0..8 {
        backend.get(new.id).await.expect("reads");
    }
    scratch.run("ALTER TABLE {schema}.jobs ALTER COLUMN kind TYPE varchar(255) COLLATE \"C\"").await;
    assert_error(backend.get(new.id).await, ErrorKind::Transient);
    assert!(backend.get(new.id).await.expect("on another connection").is_some());
}

/// A row that cannot be answered for is told apart, stays as it is, and keeps nothing from the others.
#[tokio::test]
async fn a_row_whose_lifecycle_is_out_of_range() {
    for column in ["fence = -1", "max_attempts = 0", "max_attempts = 4294967296", "lease_expires_at = 'infinity'"] {
        let (scratch, backend) = migrated().await;
        backend.enqueue(&[job("1"), job("2"), job("3")]).await.expect("stores");
        let claimed = backend.claim(&request(3)).await.expect("claims").jobs;
        let bad = claimed[1].id();
        scratch.run(&format!("UPDATE {{schema}}.jobs SET {column} WHERE id = '{bad}'")).await;
        let updates: Vec<_> = claimed.iter().map(decide).collect();
        let answers = backend.update_many_if_current(&updates).await.expect("answers for each");
        assert!(matches!(answers[..], [Update::Applied(_), Update::Unreadable(_), Update::Applied(_)]), "{answers:?}");
        let mut filter = ListFilter::default();
        filter.state = Some(JobState::Running);
        let left = backend.list(&filter, None, limit(10)).await.expect("lists").unreadable;
        assert_eq!(left.iter().map(|row| row.id).collect::<Vec<_>>(), [claimed[1].id()], "{column}");
        let (mut after, mut listed) = (None, 0);
        scratch.run("UPDATE {schema}.jobs SET state = 'running', lease_expires_at = '-infinity'").await;
        loop {
            let page = backend.stale(after, limit(1)).await.expect("lists");
            listed += page.unreadable.len();
            assert!(page.items.is_empty() && listed <= 3, "{page:?}");
            match page.next {
                Some(next) => after = Some(next),
                None => break,
            }
        }
        assert_eq!(listed, 3, "each once");
    }
}

/// A queue's name that cannot be read does not keep the others from being counted.
#[tokio::test]
async fn counts_beside_a_broken_row() {
    let (scratch, backend) = migrated().await;
    backend.enqueue(&[job("1"), job("2")]).await.expect("stores");
    scratch.run("UPDATE {schema}.jobs SET queue = '' WHERE payload = '1'").await;
    let counts = backend.counts().await.expect("counts");
    assert_eq!(counts.iter().map(|count| count.jobs).collect::<Vec<_>>(), [1]);
}
