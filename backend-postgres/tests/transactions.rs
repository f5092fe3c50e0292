//! In the application's own transaction. (D2, D7, D8)

mod common;

use backend_postgres::PostgresBackend;
use common::*;
use queue_core::*;
use sqlx::AssertSqlSafe;
use sqlx::PgPool;
use sqlx::Postgres;
use sqlx::Transaction;

/// A backend, and the application's own way to the same database, with a table of its own.
async fn setup() -> (Scratch, PostgresBackend, PgPool) {
    let (scratch, backend) = migrated().await;
    scratch.run("CREATE TABLE {schema}.orders (number integer)").await;
    let pool = scratch.pool(3).await;
    (scratch, backend, pool)
}

async fn begin(pool: &PgPool) -> Transaction<'static, Postgres> {
    pool.begin().await.expect("begins")
}

async fn begin_at(pool: &PgPool, level: &str) -> Transaction<'static, Postgres> {
    let text = format!("BEGIN ISOLATION LEVEL {level}");
    pool.begin_with(AssertSqlSafe(text)).await.expect("begins")
}

async fn order(scratch: &Scratch, transaction: &mut Transaction<'static, Postgres>) {
    let text = scratch.text("INSERT INTO {schema}.orders VALUES (1)");
    sqlx::query(text).execute(&mut **transaction).await.expect("stores");
}

async fn orders(scratch: &Scratch, pool: &PgPool) -> i64 {
    sqlx::query_scalar(scratch.text("SELECT count(*) FROM {schema}.orders")).fetch_one(pool).await.expect("counts")
}

#[tokio::test]
async fn a_job_is_stored_with_what_it_is_about_or_not_at_all() {
    let (scratch, backend, pool) = setup().await;
    for commit in [false, true] {
        let job = job("1");
        let mut transaction = begin(&pool).await;
        order(&scratch, &mut transaction).await;
        let outcomes = backend.enqueue_in(&mut transaction, std::slice::from_ref(&job)).await.expect("stores");
        assert_eq!(outcomes, [Enqueued::New(job.id)]);
        assert_eq!(backend.get(job.id).await.expect("reads"), None, "not before the commit");
        match commit {
            true => transaction.commit().await.expect("commits"),
            false => transaction.rollback().await.expect("rolls back"),
        }
        assert_eq!(backend.get(job.id).await.expect("reads").is_some(), commit);
        assert_eq!(orders(&scratch, &pool).await, i64::from(commit));
    }
}

#[tokio::test]
async fn a_duplicate_leaves_the_transaction_usable() {
    let (scratch, backend, pool) = setup().await;
    let first = keyed("k");
    backend.enqueue(std::slice::from_ref(&first)).await.expect("stores");
    let mut transaction = begin(&pool).await;
    let outcomes = backend.enqueue_in(&mut transaction, &[keyed("k"), first.clone()]).await.expect("outcomes");
    assert_eq!(outcomes, [Enqueued::Duplicate { existing: first.id }, Enqueued::Existing(first.id)]);
    order(&scratch, &mut transaction).await;
    transaction.commit().await.expect("commits");
    assert_eq!(orders(&scratch, &pool).await, 1);
}

#[tokio::test]
async fn a_job_is_settled_with_what_it_wrote_or_not_at_all() {
    let (scratch, backend, pool) = setup().await;
    backend.enqueue(&[job("1")]).await.expect("stores");
    let claimed = claim_one(&backend).await;
    let decision = Decision::new(&claimed.execution, &complete("1")).expect("legal");
    let UpdateRequest { id, current, patch } = decision.request();
    for commit in [false, true] {
        let mut transaction = begin(&pool).await;
        order(&scratch, &mut transaction).await;
        let answer = backend.update_if_current_in(&mut transaction, *id, current, patch).await.expect("updates");
        assert!(matches!(answer, Update::Applied(_)));
        match commit {
            true => transaction.commit().await.expect("commits"),
            false => drop(transaction),
        }
        let state = backend.get(claimed.id()).await.expect("reads").expect("a job").state();
        assert_eq!(state, if commit { JobState::Completed } else { JobState::Running });
    }
    let mut transaction = begin(&pool).await;
    let answer = backend.update_if_current_in(&mut transaction, *id, current, patch).await.expect("answers");
    assert!(matches!(answer, Update::Conflict(_)), "the claim is over");
    let answer = backend.update_if_current_in(&mut transaction, JobId::new(), current, patch).await.expect("answers");
    assert_eq!(answer, Update::Missing);
    transaction.rollback().await.expect("rolls back");
    assert_eq!(orders(&scratch, &pool).await, 1);
}

/// D2: the race for a key, which the one who comes second waits for.
#[tokio::test]
async fn a_key_that_another_transaction_takes() {
    for commit in [true, false] {
        let (scratch, backend, pool) = setup().await;
        let (first, second) = (keyed("k"), keyed("k"));
        let mut one = begin(&pool).await;
        backend.enqueue_in(&mut one, std::slice::from_ref(&first)).await.expect("stores");
        let waiting = tokio::spawn({
            let (backend, pool, second, scratch) =
                (backend.clone(), pool.clone(), second.clone(), scratch.schema.clone());
            async move {
                let mut two = begin(&pool).await;
                let outcomes = backend.enqueue_in(&mut two, &[job("1"), second]).await.expect("outcomes");
                let text = format!("INSERT INTO {scratch}.orders VALUES (1)");
                sqlx::query(AssertSqlSafe(text)).execute(&mut *two).await.expect("is usable");
                two.commit().await.expect("commits");
                outcomes[1]
            }
        });
        until_waiting(&scratch, 1).await;
        let expected = match commit {
            true => {
                one.commit().await.expect("commits");
                Enqueued::Duplicate { existing: first.id }
            }
            false => {
                one.rollback().await.expect("rolls back");
                Enqueued::New(second.id)
            }
        };
        assert_eq!(waiting.await.expect("runs"), expected);
        assert_eq!(orders(&scratch, &pool).await, 1, "what came after is committed");
    }
}

/// D2: a transaction that sees the database as it was when it began is told to begin anew.
#[tokio::test]
async fn a_stricter_transaction_is_to_be_repeated() {
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let (scratch, backend, pool) = setup().await;
        let mut stored = Vec::new();
        for same in [true, false] {
            let first = keyed(level);
            let first = NewJob { queue: name(&same.to_string()), ..first };
            let again = if same { first.clone() } else { NewJob { id: JobId::new(), ..first.clone() } };
            let mut transaction = begin_at(&pool, level).await;
            order(&scratch, &mut transaction).await;
            backend.enqueue(std::slice::from_ref(&first)).await.expect("stores");
            assert_error(backend.enqueue_in(&mut transaction, &[again]).await, ErrorKind::Transient);
            assert_error(backend.enqueue_in(&mut transaction, &[job("1")]).await, ErrorKind::Transient);
            transaction.rollback().await.expect("rolls back");
            stored.push(first);
        }
        backend.enqueue(&[job("1")]).await.expect("stores");
        let mut transaction = begin_at(&pool, level).await;
        let twin = NewJob { id: JobId::new(), ..stored[1].clone() };
        let outcomes = backend.enqueue_in(&mut transaction, &[stored[0].clone(), twin]).await.expect("outcomes");
        let expected = [Enqueued::Existing(stored[0].id), Enqueued::Duplicate { existing: stored[1].id }];
        assert_eq!(outcomes, expected, "repeated, it sees the others");

        let claimed = claim_one(&backend).await;
        let UpdateRequest { id, current, patch } = decide(&claimed);
        assert_error(backend.update_if_current_in(&mut transaction, id, &current, &patch).await, ErrorKind::Transient);
        transaction.rollback().await.expect("rolls back");
        let mut transaction = begin_at(&pool, level).await;
        let answer = backend.update_if_current_in(&mut transaction, id, &current, &patch).await.expect("answers");
        assert!(matches!(answer, Update::Applied(_)), "{answer:?}");
        transaction.commit().await.expect("commits");
        assert_eq!(orders(&scratch, &pool).await, 0, "what was rolled back never was");
    }
}

/// "Now" is when a statement runs, not when the transaction began.
#[tokio::test]
async fn the_time_is_the_statements_also_in_a_long_transaction() {
    let (_scratch, backend, pool) = setup().await;
    let mut transaction = begin(&pool).await;
    sqlx::query("SELECT 1").execute(&mut *transaction).await.expect("has begun");
    let begun: i64 = sqlx::query_scalar("SELECT floor(extract(epoch FROM now()) * 1000)::bigint")
        .fetch_one(&mut *transaction)
        .await
        .expect("answers");
    backend.enqueue(&[job("1")]).await.expect("stores");
    while server_now().await <= begun + 1 {
        tokio::task::yield_now().await;
    }
    let claimed = claim_one(&backend).await;
    let new = NewJob { available: When::After(Delay::from_millis(1000).expect("a delay")), ..job("2") };
    let UpdateRequest { id, current, patch } = decide(&claimed);
    backend.update_if_current_in(&mut transaction, id, &current, &patch).await.expect("updates");
    backend.enqueue_in(&mut transaction, std::slice::from_ref(&new)).await.expect("stores");
    transaction.commit().await.expect("commits");
    let done = backend.get(id).await.expect("reads").expect("a job");
    assert!(done.finished_at >= claimed.execution.claimed_at, "{done:?}");
    let stored = backend.get(new.id).await.expect("reads").expect("a job");
    assert!(Some(stored.created_at) >= done.finished_at, "{stored:?}");
    assert_eq!(stored.available_at, stored.created_at.saturating_add_millis(1000));
}

/// Whatever a statement had to wait for, its time is read after that.
#[tokio::test]
async fn the_time_is_read_when_the_wait_is_over() {
    let (scratch, backend, pool) = setup().await;
    backend.enqueue(&[job("1"), job("2")]).await.expect("stores");
    let claimed = claim_one(&backend).await;

    let mut holder = begin(&pool).await;
    let lock = scratch.text("SELECT id FROM {schema}.jobs FOR UPDATE");
    sqlx::query(lock).fetch_all(&mut *holder).await.expect("locks");
    let settling = tokio::spawn({
        let (backend, UpdateRequest { id, current, patch }) = (backend.clone(), decide(&claimed));
        async move { backend.update_if_current(id, &current, &patch).await }
    });
    until_waiting(&scratch, 1).await;
    let waited = server_now().await;
    holder.rollback().await.expect("rolls back");
    settling.await.expect("runs").expect("settles");
    let done = backend.get(claimed.id()).await.expect("reads").expect("a job");
    assert!(done.finished_at.is_some_and(|at| at.unix_millis() >= waited), "{done:?}, waited until {waited}");

    // S18: a claim waits for no row, but whoever changes the table is in everybody's way.
    let mut holder = begin(&pool).await;
    sqlx::query(scratch.text("LOCK TABLE {schema}.jobs")).execute(&mut *holder).await.expect("locks");
    let claiming = tokio::spawn({
        let backend = backend.clone();
        async move { backend.claim(&request(1)).await }
    });
    until_waiting(&scratch, 1).await;
    let waited = server_now().await;
    holder.rollback().await.expect("rolls back");
    let claimed = claiming.await.expect("runs").expect("claims").jobs.pop().expect("a job").execution;
    let at = claimed.claimed_at.expect("claimed");
    assert!(at.unix_millis() >= waited, "{claimed:?}, waited until {waited}");
    assert_eq!(claimed.lease_expires_at, Some(at.saturating_add_millis(60_000)), "a whole lease");
}

/// A10: what was changed while an update waited for the row is what it is compared with, and what the conflict shows.
#[tokio::test]
async fn a_conflict_shows_the_row_as_it_is_after_the_wait() {
    for commit in [false, true] {
        let (scratch, backend, pool) = setup().await;
        backend.enqueue(&[job("1"), job("2")]).await.expect("stores");
        let claimed = backend.claim(&request(2)).await.expect("claims").jobs;
        let mut holder = begin(&pool).await;
        let bump = scratch.text("UPDATE {schema}.jobs SET attempt = 7 WHERE payload = '1'");
        sqlx::query(bump).execute(&mut *holder).await.expect("updates");
        let updates: Vec<_> = claimed.iter().map(decide).collect();
        let settling = tokio::spawn({
            let backend = backend.clone();
            async move { backend.update_many_if_current(&updates).await }
        });
        until_waiting(&scratch, 1).await;
        match commit {
            true => holder.commit().await.expect("commits"),
            false => holder.rollback().await.expect("rolls back"),
        }
        let answers = settling.await.expect("runs").expect("answers");
        match (&answers[..], commit) {
            ([Update::Conflict(current), Update::Applied(_)], true) => {
                assert_eq!(*current, Execution { attempt: 7, ..claimed[0].execution.clone() });
            }
            ([Update::Applied(_), Update::Applied(_)], false) => {}
            _ => panic!("{answers:?} after commit = {commit}"),
        }
    }
}

/// The caller's settings are the caller's.
#[tokio::test]
async fn a_call_changes_no_setting_of_the_transaction() {
    let (_scratch, backend, pool) = setup().await;
    let settings = "SELECT string_agg(name || '=' || setting, ' ' ORDER BY name) FROM pg_settings";
    for before in ["SELECT 1", "SET LOCAL lock_timeout = '7s'"] {
        let mut transaction = begin(&pool).await;
        sqlx::query(before).execute(&mut *transaction).await.expect("runs");
        let was: String = sqlx::query_scalar(settings).fetch_one(&mut *transaction).await.expect("answers");
        backend.enqueue_in(&mut transaction, &[job("1")]).await.expect("stores");
        let update = decide(&{
            backend.enqueue(&[job("2")]).await.expect("stores");
            claim_one(&backend).await
        });
        let answer = backend.update_if_current_in(&mut transaction, update.id, &update.current, &update.patch).await;
        assert!(matches!(answer, Ok(Update::Applied(_))), "{answer:?}");
        let is: String = sqlx::query_scalar(settings).fetch_one(&mut *transaction).await.expect("answers");
        assert_eq!(is, was);
        transaction.rollback().await.expect("rolls back");
    }
}
