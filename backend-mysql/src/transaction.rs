//! Connections of the pool and transactions on them, which a dropped future leaves in no doubtful state.

use std::ops::Deref;
use std::ops::DerefMut;
use std::time::Duration;

use queue_core::Error;
use queue_core::ErrorKind;
use queue_core::Lease;
use queue_core::Result;
use sqlx::Executor;
use sqlx::MySql;
use sqlx::MySqlConnection;
use sqlx::MySqlPool;
use sqlx::mysql::MySqlArguments;
use sqlx::mysql::MySqlRow;
use sqlx::pool::PoolConnection;
use sqlx::query::Query;
use tokio::time::Instant;
use tokio::time::timeout_at;
use uuid::Uuid;

use crate::error::commit_failed;
use crate::error::ends_connection;
use crate::error::failed;
use crate::error::is_conflict;
use crate::error::is_in_transaction;
use crate::error::is_lost;
use crate::error::is_overtaken;
use crate::sql::Sql;

/// A connection of the pool, which is closed when it is dropped in the middle of a statement.
///
/// The driver does not know then which answer belongs to which statement, nor, since sqlx 0.9 counts a transaction as begun
/// only when the server has answered, that the server has begun one: the next call on that connection would write into it, and
/// nobody would commit. The server rolls back what a closed connection leaves open.
#[derive(Debug)]
pub(crate) struct Session {
    connection: PoolConnection<MySql>,
    is_idle: bool,
}

impl Session {
    pub(crate) async fn of(pool: &MySqlPool, call: &'static str, deadline: Deadline) -> Result<Self> {
        let busy = || Error::not_applied(ErrorKind::Transient, format!("{call}: no connection became free in time"));
        let acquired = deadline.limit(pool.acquire()).await.ok_or_else(busy)?;
        Ok(Self { connection: acquired.map_err(|error| failed(call, error))?, is_idle: false })
    }

    pub(crate) fn connection(&mut self) -> &mut MySqlConnection {
        &mut self.connection
    }

    fn connection_ref(&self) -> &MySqlConnection {
        &self.connection
    }

    /// No statement is being run any more.
    pub(crate) fn give_back(mut self) {
        self.is_idle = true;
    }

    /// After an answer the connection may go back, unless the answer shows that it should not.
    fn answered<T>(&mut self, answer: &sqlx::Result<T>) {
        self.is_idle = !answer.as_ref().is_err_and(ends_connection);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if !self.is_idle {
            self.connection.close_on_drop();
        }
    }
}

/// One statement that changes nothing. It is sent again if it finds that the connection was lost while it was idle.
pub(crate) async fn read<'q>(
    pool: &MySqlPool,
    call: &'static str,
    query: impl Fn() -> Query<'q, MySql, MySqlArguments>,
) -> Result<Vec<MySqlRow>> {
    let mut connections = pool.options().get_max_connections();
    loop {
        let mut session = Session::of(pool, call, Deadline::NEVER).await?;
        let answer = query().fetch_all(&mut *session.connection).await;
        session.answered(&answer);
        match answer {
            Err(error) if is_lost(&error) && connections > 0 => connections -= 1,
            answer => return answer.map_err(|error| failed(call, error)),
        }
    }
}

/// Until when a call may wait for what others hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    /// The server's own patience decides.
    pub(crate) const NEVER: Self = Self(None);

    /// A third of the lease, or a second where that is longer: less is no time to ask a server anything.
    pub(crate) fn third(lease: Lease) -> Self {
        Self(Instant::now().checked_add((lease.duration() / 3).max(Duration::from_secs(1))))
    }

    async fn limit<F: Future>(self, step: F) -> Option<F::Output> {
        match self.0 {
            Some(deadline) => timeout_at(deadline, step).await.ok(),
            None => Some(step.await),
        }
    }

    /// What runs in a transaction; the connection of one that was too late is closed.
    pub(crate) async fn within<T>(self, step: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        self.limit(step).await.unwrap_or(Err(Failure::Late))
    }
}

/// Why a transaction does not come to its commit.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The driver or the server says no.
    Driver(sqlx::Error),
    /// We do; the server has nothing against it.
    Refused(Error),
    /// It did not answer in time.
    Late,
}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        Self::Driver(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

impl Failure {
    /// In words for the caller; the transaction is not committed.
    pub(crate) fn told(self, call: &'static str) -> Error {
        match self {
            Self::Driver(error) => failed(call, error),
            Self::Refused(error) => error,
            Self::Late => {
                Error::not_applied(ErrorKind::Transient, format!("{call}: the server did not answer in time"))
            }
        }
    }
}

/// How a transaction ends, and with what answer.
#[derive(Debug)]
pub(crate) enum End<T> {
    Commit(T),
    /// It has written nothing that should stay.
    RollBack(T),
}

/// How often a call has been repeated because the server chose it as the victim of a conflict.
#[derive(Debug, Default)]
pub(crate) struct Repeats(u32);

impl Repeats {
    const MOST: u32 = 20;

    /// Whether to try again, after a moment that differs from one call to the next.
    pub(crate) async fn again(&mut self, error: &sqlx::Error) -> bool {
        if !is_overtaken(error) || self.0 == Self::MOST {
            return false;
        }
        self.0 += 1;
        let (random, _) = Uuid::new_v4().as_u64_pair();
        tokio::time::sleep(Duration::from_micros(random % (1_000 << self.0.min(5)))).await;
        true
    }
}

/// A transaction at READ COMMITTED; see [`Transactional::begin`](queue_core::Transactional::begin). Dropped unfinished, at any
/// await, it takes its connection along.
#[derive(Debug)]
pub struct MysqlTransaction {
    session: Session,
    is_marked: bool,
}

impl Deref for MysqlTransaction {
    type Target = MySqlConnection;

    fn deref(&self) -> &MySqlConnection {
        self.session.connection_ref()
    }
}

impl DerefMut for MysqlTransaction {
    fn deref_mut(&mut self) -> &mut MySqlConnection {
        self.session.connection()
    }
}

/// Has a node of a cluster prepare what may be run in a transaction, as far as it has not yet.
///
/// A node undoes a transaction for what another node has committed, and tells it by the next answer. It does not if it is just
/// preparing a statement of it: that is answered as if nothing had been, each statement that follows is committed by itself, and
/// the commit at their end has nothing to do and succeeds.
async fn prepare(connection: &mut MySqlConnection, sql: &Sql) -> sqlx::Result<()> {
    for text in sql.in_transactions() {
        match (&mut *connection).prepare(text.clone()).await {
            // The session may have no right to what its program never does; a statement that it does run says so itself.
            Err(error) if error.as_database_error().is_none() || ends_connection(&error) => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

impl MysqlTransaction {
    pub(crate) async fn begin(
        pool: &MySqlPool,
        sql: &Sql,
        is_cluster: bool,
        call: &'static str,
        deadline: Deadline,
    ) -> Result<Self> {
        let mut connections = pool.options().get_max_connections();
        loop {
            let mut session = Session::of(pool, call, deadline).await?;
            let connection = session.connection();
            let begun = async {
                if is_cluster {
                    prepare(connection, sql).await?;
                }
                sqlx::raw_sql(sql.begin.clone()).execute(connection).await
            };
            match deadline.limit(begun).await {
                Some(Ok(_)) => return Ok(Self { session, is_marked: is_cluster }),
                // A transaction that somebody left open on an application's connection (a beginning that was dropped) would
                // take ours in. It ends with the connection; nobody has it to commit it.
                Some(Err(error)) if (is_lost(&error) || is_in_transaction(&error)) && connections > 0 => {
                    connections -= 1
                }
                Some(Err(error)) => return Err(failed(call, error)),
                None => return Err(Failure::Late.told(call)),
            }
        }
    }

    pub(crate) fn connection(&mut self) -> &mut MySqlConnection {
        self.session.connection()
    }

    /// Commits what the application did in it.
    pub(crate) async fn commit(mut self) -> Result<()> {
        self.run_commit().await.map_err(|error| commit_failed("commit", error))
    }

    /// Ends it as what ran in it says. No answer: it was undone by the server, and is to be repeated.
    ///
    /// # Errors
    ///
    /// What failed in it or, with an unknown outcome, at its commit.
    pub(crate) async fn end<T>(
        mut self,
        call: &'static str,
        answer: Result<End<T>, Failure>,
        repeats: &mut Repeats,
    ) -> Result<Option<T>> {
        match answer {
            Ok(End::Commit(answer)) => match self.run_commit().await {
                Ok(()) => Ok(Some(answer)),
                Err(error) if is_conflict(&error) && repeats.again(&error).await => Ok(None),
                Err(error) => Err(commit_failed(call, error)),
            },
            Ok(End::RollBack(answer)) => {
                self.roll_back().await;
                Ok(Some(answer))
            }
            Err(failure) => {
                match &failure {
                    // Also after a conflict, which the server has rolled back: the next statement would begin a transaction
                    // where autocommit is off.
                    Failure::Driver(error) if !ends_connection(error) => self.roll_back().await,
                    Failure::Refused(_) => self.roll_back().await,
                    Failure::Driver(_) | Failure::Late => {}
                }
                drop(self);
                match failure {
                    Failure::Driver(error) if repeats.again(&error).await => Ok(None),
                    failure => Err(failure.told(call)),
                }
            }
        }
    }

    /// In a cluster it fails where the server has undone the transaction and told nobody: the savepoint is gone with it. By itself,
    /// since between two statements of one message a node loses the same.
    async fn run_commit(&mut self) -> sqlx::Result<()> {
        if self.is_marked {
            self.run("RELEASE SAVEPOINT fenced_queue").await?;
        }
        self.run("COMMIT").await
    }

    async fn run(&mut self, text: &'static str) -> sqlx::Result<()> {
        let answer = sqlx::raw_sql(text).execute(self.session.connection()).await;
        self.session.answered(&answer);
        answer.map(drop)
    }

    /// If that fails, the connection is closed, which does the same.
    async fn roll_back(&mut self) {
        if let Err(error) = self.run("ROLLBACK").await {
            self.session.is_idle = false;
            tracing::debug!(%error, "a rollback failed; its connection is closed");
        }
    }
}
