//! What a handle holds, and what runs on a connection that it has got.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::collections::HashSet;
use std::time::Duration;

use queue_core::Certainty;
use queue_core::Certainty::NotApplied;
use queue_core::ClockOffset;
use queue_core::Enqueued;
use queue_core::Error;
use queue_core::ErrorKind;
use queue_core::Identifier;
use queue_core::JobId;
use queue_core::Name;
use queue_core::NewJob;
use queue_core::Result;
use queue_core::UniqueKey;
use queue_core::Unreadable;
use queue_core::Update;
use queue_core::UpdateRequest;
use queue_core::WorkSignal;
use queue_core::chunks;
use queue_core::id_reused;
use sqlx::PgConnection;
use sqlx::PgPool;
use sqlx::Postgres;
use sqlx::SqlSafeStr;
use sqlx::SqlStr;
use sqlx::pool::PoolConnection;
use sqlx::postgres::PgArguments;
use sqlx::postgres::PgRow;
use sqlx::query;
use sqlx::query::Query;
use sqlx::raw_sql;
use tokio::time::timeout;

use crate::error::failed;
use crate::error::spoils_the_connection;
use crate::listener::Listener;
use crate::row;
use crate::sql::PATIENCE;
use crate::sql::Sql;

/// What the clones of a backend share.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) pool: PgPool,
    /// Whether every statement needs a transaction around it: behind a pooler, and on a pool whose own transactions are stricter
    /// than READ COMMITTED, under which a statement fails where it should wait and look again.
    pub(crate) explicit: bool,
    /// Whether statements are kept prepared.
    pub(crate) persistent: bool,
    /// Whether writes notify.
    pub(crate) notifies: bool,
    pub(crate) listener: Option<Listener>,
    pub(crate) sql: Sql,
    pub(crate) schema: Identifier,
    pub(crate) max_payload: usize,
    pub(crate) clock: ClockOffset,
    pub(crate) signal: WorkSignal,
}

/// A statement with its parameters.
pub(crate) type Statement<'q> = Query<'q, Postgres, PgArguments>;

/// A connection of the pool, for the time of one call; in a transaction, unless each statement is one by itself.
///
/// Dropped in the middle of a transaction, also of its beginning or its end, it is closed, and so the transaction is rolled
/// back. Not sqlx's: its 0.9 gives a connection back with the transaction open when `begin` is dropped.
#[derive(Debug)]
pub(crate) struct Lent {
    connection: PoolConnection<Postgres>,
    persistent: bool,
    in_transaction: bool,
    spoiled: bool,
}

/// Where statements run: on a connection of ours, or the caller's.
#[derive(Debug)]
pub(crate) struct Session<'c> {
    connection: &'c mut PgConnection,
    persistent: bool,
    /// What is known of a write if the connection is lost in it.
    lost: Certainty,
    spoiled: Option<&'c mut bool>,
    /// How long to wait for a lock; the caller's own session says for itself.
    patience: Option<&'static str>,
}

impl Lent {
    async fn run(&mut self, text: SqlStr) -> sqlx::Result<()> {
        raw_sql(text).execute(&mut *self.connection).await?;
        Ok(())
    }

    pub(crate) fn connection(&self) -> &PgConnection {
        &self.connection
    }

    pub(crate) fn connection_mut(&mut self) -> &mut PgConnection {
        &mut self.connection
    }

    pub(crate) fn session(&mut self, lost: Certainty) -> Session<'_> {
        Session {
            connection: &mut self.connection,
            persistent: self.persistent,
            lost: if self.in_transaction { NotApplied } else { lost },
            spoiled: Some(&mut self.spoiled),
            patience: Some(PATIENCE),
        }
    }

    /// Commits if the call went well, else rolls back.
    pub(crate) async fn end<T>(mut self, call: &'static str, lost: Certainty, answer: Result<T>) -> Result<T> {
        if answer.is_err() {
            // Never a commit after an error: the server would answer it, in all friendliness, with a rollback.
            return self.undo(answer).await;
        }
        if self.in_transaction && !self.spoiled {
            self.run(SqlStr::from_static("COMMIT")).await.map_err(|error| failed(call, lost, error))?;
            self.in_transaction = false;
        }
        answer
    }

    /// Rolls back, whatever the answer.
    pub(crate) async fn undo<T>(mut self, answer: Result<T>) -> Result<T> {
        if self.in_transaction && !self.spoiled {
            self.in_transaction = self.run(SqlStr::from_static("ROLLBACK")).await.is_err();
        }
        answer
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if self.in_transaction || self.spoiled {
            self.connection.close_on_drop();
        }
    }
}

impl<'c> Session<'c> {
    /// The caller's.
    pub(crate) fn of(connection: &'c mut PgConnection, handle: &Handle) -> Self {
        Self { connection, persistent: handle.persistent, lost: NotApplied, spoiled: None, patience: None }
    }

    fn note(&mut self, error: &sqlx::Error) {
        if let Some(spoiled) = &mut self.spoiled {
            **spoiled |= spoils_the_connection(error);
        }
    }

    pub(crate) async fn fetch(&mut self, call: &'static str, statement: Statement<'_>) -> Result<Vec<PgRow>> {
        let answer = statement.persistent(self.persistent).fetch_all(&mut *self.connection).await;
        answer.map_err(|error| {
            self.note(&error);
            failed(call, self.lost, error)
        })
    }

    /// What became of a row that was judged.
    pub(crate) fn judged(&self, row: Option<&PgRow>) -> Result<Update> {
        let Some(row) = row else { return Ok(Update::Missing) };
        match (row::is_applied(row), row::execution(row)) {
            (true, Ok(execution)) => Ok(Update::Applied(execution)),
            (false, Ok(execution)) => Ok(Update::Conflict(execution)),
            (false, Err(unreadable)) => Ok(Update::Unreadable(unreadable)),
            // It matched and was written, and still cannot be read: broken by hand where the statement does not look.
            (true, Err(Unreadable { id, reason, .. })) => {
                let message = format!("job {id} cannot be read: {reason}");
                Err(Error::new(ErrorKind::Schema, self.lost, message))
            }
        }
    }

    /// Runs a text of several statements.
    pub(crate) async fn run(&mut self, call: &'static str, text: impl SqlSafeStr) -> Result<()> {
        let answer = raw_sql(text).execute(&mut *self.connection).await;
        answer.map(drop).map_err(|error| {
            self.note(&error);
            failed(call, self.lost, error)
        })
    }
}

impl Handle {
    pub(crate) fn now(&self) -> i64 {
        self.clock.millis()
    }

    async fn acquire(&self, call: &'static str, at_most: Option<Duration>) -> Result<Lent> {
        let acquired = match at_most {
            None => self.pool.acquire().await,
            Some(wait) => {
                // The pool gets a connection back in the background: a moment for that.
                let wait = wait.max(Duration::from_millis(30));
                timeout(wait, self.pool.acquire()).await.map_err(|_| {
                    let message = format!("{call}: no connection was free for {wait:?}");
                    Error::not_applied(ErrorKind::Transient, message)
                })?
            }
        };
        let connection = acquired.map_err(|error| failed(call, NotApplied, error))?;
        Ok(Lent { connection, persistent: self.persistent, in_transaction: false, spoiled: false })
    }

    async fn begin_with(&self, call: &'static str, at_most: Option<Duration>, text: &SqlStr) -> Result<Lent> {
        let mut lent = self.acquire(call, at_most).await?;
        // Also if it fails, or is dropped: nobody knows whether it began.
        lent.in_transaction = true;
        lent.run(text.clone()).await.map_err(|error| failed(call, NotApplied, error))?;
        Ok(lent)
    }

    /// A connection in a transaction.
    pub(crate) async fn begin(&self, call: &'static str) -> Result<Lent> {
        self.begin_with(call, None, &self.sql.begin).await
    }

    /// A connection in a transaction for statements of the application.
    pub(crate) async fn begin_plainly(&self, call: &'static str) -> Result<Lent> {
        let text = SqlStr::from_static("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE");
        self.begin_with(call, None, &text).await
    }

    /// A connection in a transaction that is to read a table from end to end.
    pub(crate) async fn begin_counting(&self, call: &'static str) -> Result<Lent> {
        self.begin_with(call, None, &self.sql.begin_counting).await
    }

    /// A connection for statements that need no transaction around them.
    pub(crate) async fn lend(&self, call: &'static str, at_most: Option<Duration>) -> Result<Lent> {
        match self.explicit {
            true => self.begin_with(call, at_most, &self.sql.begin).await,
            false => self.acquire(call, at_most).await,
        }
    }

    /// A connection for statements that wait for others as long as it takes, and that no transaction may be around. It is closed after
    /// them.
    pub(crate) async fn lend_patiently(&self, call: &'static str) -> Result<Lent> {
        let mut lent = self.acquire(call, None).await?;
        lent.spoiled = true;
        // Behind a pooler it would be told for others as well.
        if self.persistent {
            let text = SqlStr::from_static("SET lock_timeout = 0");
            lent.run(text).await.map_err(|error| failed(call, NotApplied, error))?;
        }
        Ok(lent)
    }

    /// One statement that writes.
    pub(crate) async fn write(
        &self,
        call: &'static str,
        at_most: Option<Duration>,
        statement: Statement<'_>,
    ) -> Result<Vec<PgRow>> {
        let mut lent = self.lend(call, at_most).await?;
        let rows = lent.session(Certainty::Unknown).fetch(call, statement).await;
        lent.end(call, Certainty::Unknown, rows).await
    }

    /// One statement that reads.
    pub(crate) async fn read(&self, call: &'static str, statement: Statement<'_>) -> Result<Vec<PgRow>> {
        let mut lent = self.lend(call, None).await?;
        let rows = lent.session(NotApplied).fetch(call, statement).await;
        lent.end(call, NotApplied, rows).await
    }

    /// Stores jobs that have been checked. Several need a transaction, which is the caller's to commit; one is whole by itself.
    pub(crate) async fn enqueue(&self, session: &mut Session<'_>, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let mut known = HashSet::with_capacity(jobs.len());
        let mut left: Vec<_> = jobs.iter().filter(|job| known.insert(job.id)).collect();
        // Whoever stores the same keys and ids stores them in this order, so that nobody waits for somebody who waits for him. Of
        // those of one key the first of the call comes first.
        left.sort_by(|a, b| {
            let by_id = || if a.unique_key.is_none() { a.id.cmp(&b.id) } else { Ordering::Equal };
            key(a).cmp(&key(b)).then_with(by_id)
        });
        let mut outcomes = HashMap::with_capacity(left.len());
        // What is in the way may be gone by the time that it is looked for: the key is free again.
        for _ in 0..10 {
            let mut unexplained = Vec::new();
            for chunk in chunks(&left) {
                unexplained.extend(self.insert(session, chunk, &mut outcomes).await?);
            }
            left = unexplained;
            if left.is_empty() {
                break;
            }
            left = self.explain(session, &left, jobs, &mut outcomes).await?;
            if left.is_empty() {
                break;
            }
        }
        let outcome = |job: &NewJob| match outcomes.get(&job.id).copied() {
            // Only the first of the call is new.
            Some(new @ Enqueued::New(id)) => {
                outcomes.insert(id, Enqueued::Existing(id));
                Ok(new)
            }
            Some(outcome) => Ok(outcome),
            None => {
                let message = format!("enqueue: the key of job {} is taken and given back all the time", job.id);
                Err(Error::not_applied(ErrorKind::Transient, message))
            }
        };
        jobs.iter().map(outcome).collect()
    }

    /// Answers the jobs that were left out.
    async fn insert<'j>(
        &self,
        session: &mut Session<'_>,
        jobs: &[&'j NewJob],
        outcomes: &mut HashMap<JobId, Enqueued>,
    ) -> Result<Vec<&'j NewJob>> {
        let statement = query(self.sql.insert.clone()).bind(self.now()).bind(session.patience).bind(self.notifies);
        let rows = session.fetch("enqueue", row::bind_new(statement, jobs)).await?;
        outcomes.extend(rows.iter().map(row::id).map(|id| (id, Enqueued::New(id))));
        Ok(jobs.iter().copied().filter(|job| !outcomes.contains_key(&job.id)).collect())
    }

    /// Finds what was in the way of jobs that were left out; answers those for which there is nothing any more.
    async fn explain<'j>(
        &self,
        session: &mut Session<'_>,
        left: &[&'j NewJob],
        jobs: &[NewJob],
        outcomes: &mut HashMap<JobId, Enqueued>,
    ) -> Result<Vec<&'j NewJob>> {
        let mut reused = HashSet::new();
        for chunk in chunks(left) {
            let rows = session.fetch("enqueue", row::bind_offered(query(self.sql.refused.clone()), chunk)).await?;
            for (job, refused) in row::refused(&rows, chunk) {
                match (refused.stored, refused.repeated, refused.holder) {
                    (true, true, _) => drop(outcomes.insert(job.id, Enqueued::Existing(job.id))),
                    (true, false, _) => drop(reused.insert(job.id)),
                    (false, _, Some(existing)) => drop(outcomes.insert(job.id, Enqueued::Duplicate { existing })),
                    (false, _, None) => {}
                }
            }
        }
        match jobs.iter().position(|job| reused.contains(&job.id)) {
            Some(index) => Err(id_reused(jobs[index].id).at_index(index)),
            None => Ok(left.iter().copied().filter(|job| !outcomes.contains_key(&job.id)).collect()),
        }
    }

    /// A statement that judges updates, of which no two are of one row, before it does whatever it does.
    pub(crate) fn judging<'q>(
        &self,
        statement: &SqlStr,
        session: &Session<'_>,
        updates: &[&UpdateRequest],
    ) -> Statement<'q> {
        row::bind_updates(query(statement.clone()).bind(self.now()).bind(session.patience), updates)
    }

    /// Updates rows, of which no two are the same.
    pub(crate) async fn update(&self, session: &mut Session<'_>, updates: &[&UpdateRequest]) -> Result<Vec<Update>> {
        let statement = self.judging(&self.sql.update, session, updates).bind(self.notifies);
        let rows = session.fetch("update", statement).await?;
        let mut answers = HashMap::with_capacity(updates.len());
        for row in &rows {
            answers.insert(row::id(row), session.judged(Some(row))?);
        }
        Ok(updates.iter().map(|update| answers.remove(&update.id).unwrap_or(Update::Missing)).collect())
    }

    /// The same for one row.
    pub(crate) async fn update_one(&self, session: &mut Session<'_>, update: &UpdateRequest) -> Result<Update> {
        Ok(self.update(session, &[update]).await?.pop().unwrap_or(Update::Missing))
    }
}

fn key(job: &NewJob) -> Option<(&Name, &UniqueKey)> {
    job.unique_key.as_ref().map(|key| (&job.queue, key))
}
