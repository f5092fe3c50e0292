//! What a handle holds, and how commands are run.

use std::collections::HashMap;
use std::future::Future;
use std::hash::BuildHasher;
use std::hash::BuildHasherDefault;
use std::hash::DefaultHasher;
#[cfg(test)]
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
#[cfg(test)]
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::TryStreamExt;
use futures_util::future::try_join_all;
use futures_util::stream;
use mongodb::Client;
use mongodb::ClientSession;
use mongodb::Database;
use mongodb::bson::Document;
use mongodb::bson::RawDocumentBuf;
use mongodb::bson::doc;
use mongodb::options::ReadConcern;
use mongodb::options::ReadPreference;
use mongodb::options::SelectionCriteria;
use mongodb::options::WriteConcern;
use queue_core::Certainty::NotApplied;
use queue_core::Certainty::Unknown;
use queue_core::ClockOffset;
use queue_core::Error;
use queue_core::ErrorKind;
use queue_core::Execution;
use queue_core::Identifier;
use queue_core::JobId;
use queue_core::Name;
use queue_core::Result;
use queue_core::Revision;
use queue_core::Unreadable;
use queue_core::Update;
use queue_core::UpdateRequest;
use queue_core::WorkSignal;
use tokio::sync::Mutex;
use tokio::sync::MutexGuard;
use tokio::task::JoinError;
use tokio::time::Instant;
use tokio::time::sleep;
use tokio::time::timeout;
use tokio::time::timeout_at;

use crate::error::Concern;
use crate::error::Writes;
use crate::error::commit_failed;
use crate::error::concern;
use crate::error::failed;
use crate::error::item_errors;
use crate::error::silent;
use crate::ops::Ops;
use crate::row;
use crate::setup;
use crate::wake::Watch;

/// How long a command waits for one row of several that are gone through row by row, because of one that cannot be had: each
/// time longer, since a server that is busy answers late as well.
pub(crate) const ROW_WAITS: [Duration; 3] =
    [Duration::from_millis(100), Duration::from_millis(400), Duration::from_millis(1600)];

/// How many rows of such a batch are on their way at once.
pub(crate) const AT_ONCE: usize = 8;

/// How long a majority is waited for at least, but for a lease so short that too little of it would be left.
pub(crate) const MAJORITY_WAIT: Duration = Duration::from_secs(2);

/// How much longer than a command may run its answer is waited for: the driver would wait for a silent network for ever.
const NETWORK: Duration = Duration::from_secs(10);

/// What the clones of a backend share.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) client: Client,
    pub(crate) database: Database,
    pub(crate) ops: Ops,
    pub(crate) prefix: Identifier,
    pub(crate) max_payload: usize,
    /// How long one command waits for a row that somebody has in an open transaction. MongoDB has no lock wait of its own, it
    /// tries again until the command's time is up; and it reads its clock when a command begins. So the time is short, and
    /// who may wait longer sends the command again.
    pub(crate) skip_locked_after: Duration,
    /// How long that may go on.
    pub(crate) lock_timeout: Duration,
    pub(crate) clock: ClockOffset,
    pub(crate) signal: WorkSignal,
    pub(crate) watch: Watch,
    /// The schema that has been seen: MongoDB finds nothing in a collection that is not there, and says nothing of it.
    pub(crate) schema: AtomicI64,
    /// Those of this process who are about one event take turns: in the store, where they would have to as well, they would
    /// meet again and again.
    pub(crate) turns: [Mutex<()>; 64],
    /// Changes commands before they are sent, and counts which it changed.
    #[cfg(test)]
    pub(crate) broken: Option<(Broken, Arc<AtomicUsize>)>,
}

/// A mistake that a test makes in commands.
#[cfg(test)]
pub(crate) type Broken = fn(&mut Document);

/// A number in a write's answer: `n` rows matched, `nModified` were changed.
pub(crate) fn count(reply: &Document, field: &str) -> usize {
    usize::try_from(reply.get_i32(field).unwrap_or_default()).unwrap_or_default()
}

impl Handle {
    pub(crate) fn offset(&self) -> i64 {
        self.clock.millis()
    }

    /// How long one command of some rows may take until they are written.
    pub(crate) fn patience(&self, rows: usize) -> Duration {
        self.skip_locked_after + Duration::from_millis(2) * u32::try_from(rows).unwrap_or(u32::MAX)
    }

    /// When a write of some rows gives up waiting: not before it has had the time that it may take.
    pub(crate) fn deadline(&self, rows: usize) -> Instant {
        Instant::now() + self.lock_timeout.max(self.patience(rows))
    }

    #[cfg_attr(not(test), expect(clippy::unused_self, reason = "the tests break commands"))]
    fn sent(&self, command: Document) -> Document {
        #[cfg(test)]
        let command = {
            let mut changed = command.clone();
            if let Some((broken, times)) = &self.broken {
                broken(&mut changed);
                times.fetch_add(usize::from(changed != command), Ordering::SeqCst);
            }
            changed
        };
        command
    }

    /// Runs a command, on the primary whatever the client prefers.
    pub(crate) async fn run(
        &self,
        command: Document,
        session: Option<&mut ClientSession>,
    ) -> mongodb::error::Result<Document> {
        let command = self.database.run_command(self.sent(command));
        match session {
            Some(session) => command.session(session).await,
            None => command.await,
        }
    }

    /// A session in a transaction that reads one snapshot and is acknowledged by a majority.
    pub(crate) async fn begin(&self) -> Result<ClientSession> {
        self.ready("begin").await?;
        let begun = async {
            let mut session = self.client.start_session().await?;
            let (reads, writes) = (ReadConcern::snapshot(), WriteConcern::majority());
            let primary = SelectionCriteria::ReadPreference(ReadPreference::Primary);
            let transaction = session.start_transaction().read_concern(reads).write_concern(writes);
            transaction.selection_criteria(primary).await?;
            Ok(session)
        };
        begun.await.map_err(|error| failed("begin", Writes::Nothing, error))
    }

    /// The same, and locks the row of an execution, if that is current: a transaction cannot change what was written after its first
    /// read, and a heartbeat would be enough.
    pub(crate) async fn begin_for(&self, execution: &Execution) -> Result<ClientSession> {
        let locked = async || {
            let mut session = self.begin().await?;
            // Before anything is locked: see `update_one`.
            self.read("begin", self.ops.executions([execution.id]), Some(&mut session)).await?;
            let locked = self.run(self.ops.lock(execution, self.offset()), Some(&mut session)).await;
            locked.map_err(|error| failed("begin", Writes::Nothing, error))?;
            Ok(session)
        };
        self.repeated("begin", locked).await
    }

    /// Commits. The driver repeats that once by itself; so may the caller of the whole, who finds out what became of it.
    pub(crate) async fn commit(&self, mut session: ClientSession) -> Result<()> {
        to_the_end(async move { session.commit_transaction().await.map_err(commit_failed) }).await
    }

    /// Waits for its turn at an event, as long as a write may wait. Events may share one.
    pub(crate) async fn turn(&self, call: &str, event: &Name) -> Result<MutexGuard<'_, ()>> {
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(event);
        let turn = &self.turns[usize::try_from(hash % self.turns.len() as u64).unwrap_or_default()];
        let late =
            |_| Error::not_applied(ErrorKind::Transient, format!("{call}: too many are about the event at once"));
        timeout_at(self.deadline(1), turn.lock()).await.map_err(late)
    }

    /// Repeats a write that meets somebody else's, for as long as a write may wait.
    pub(crate) async fn repeated<T, F>(&self, call: &str, attempt: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        const LONGEST_PAUSE: usize = 32_000;
        let deadline = self.deadline(1);
        let mut pause = 500;
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).max(MAJORITY_WAIT);
            match within(call, Writes::Rows, left, attempt()).await {
                Err(error)
                    if error.kind() == ErrorKind::Transient
                        && error.certainty() == NotApplied
                        && Instant::now() < deadline =>
                {
                    // At random, so that those who met do not meet again.
                    sleep(Duration::from_micros(random(pause) as u64)).await;
                    pause = LONGEST_PAUSE.min(2 * pause);
                }
                answer => return answer,
            }
        }
    }

    /// The rows of a command that reads, from the primary.
    ///
    /// They are the newest there are, not the newest on a majority: a row that a compare-and-update has just lost to must be
    /// seen. What the caller is told of them as a fact has been acknowledged by a majority: by the write that came before,
    /// which says so of everything before it also if it changed nothing, or by [`settled`](Self::settled).
    pub(crate) async fn read(
        &self,
        call: &str,
        mut command: Document,
        session: Option<&mut ClientSession>,
    ) -> Result<Vec<Document>> {
        let raw: mongodb::error::Result<Vec<RawDocumentBuf>> = match session {
            Some(session) => {
                async {
                    let command = self.database.run_cursor_command(self.sent(command));
                    let cursor = command.session(&mut *session).await?;
                    cursor.with_type::<RawDocumentBuf>().stream(session).try_collect().await
                }
                .await
            }
            None => {
                async {
                    command.insert("readConcern", doc! { "level": "local" });
                    let cursor = self.database.run_cursor_command(self.sent(command)).await?;
                    cursor.with_type::<RawDocumentBuf>().try_collect().await
                }
                .await
            }
        };
        let raw = raw.map_err(|error| failed(call, Writes::Nothing, error))?;
        Ok(raw.iter().map(row::document).collect())
    }

    /// The rows of several commands that read: at once, but one after the other in a session.
    pub(crate) async fn read_all(
        &self,
        call: &str,
        commands: Vec<Document>,
        session: Option<&mut ClientSession>,
    ) -> Result<Vec<Document>> {
        let mut rows = Vec::new();
        match session {
            None => rows = try_join_all(commands.into_iter().map(|command| self.read(call, command, None))).await?,
            Some(session) => {
                for command in commands {
                    rows.push(self.read(call, command, Some(&mut *session)).await?);
                }
            }
        }
        Ok(rows.into_iter().flatten().collect())
    }

    /// Runs a command that writes, until a majority has journaled it. It waits for rows no longer than its patience, and not
    /// beyond the deadline; for the majority a while at least.
    pub(crate) async fn write(
        &self,
        call: &str,
        command: Document,
        writes: Writes,
        patience: Duration,
        deadline: Instant,
    ) -> Result<Document> {
        let patience = patience.min(deadline.saturating_duration_since(Instant::now()));
        self.write_until(call, command, writes, patience, for_majority(deadline)).await
    }

    /// The same, and gives up the majority at this time.
    pub(crate) async fn write_until(
        &self,
        call: &str,
        mut command: Document,
        writes: Writes,
        patience: Duration,
        majority: Instant,
    ) -> Result<Document> {
        let left = majority.saturating_duration_since(Instant::now());
        let waits = acknowledged(&mut command, patience.min(left));
        let reply = within(call, writes, left.max(waits), async {
            self.run(command, None).await.map_err(|error| failed(call, writes, error))
        })
        .await?;
        match concern(call, &reply) {
            Concern::Met => {}
            Concern::Late => self.settled(call, majority).await?,
            Concern::Failed(error) => return Err(error),
        }
        Ok(reply)
    }

    /// Waits until everything that the primary has written is on a majority.
    pub(crate) async fn settled(&self, call: &str, majority: Instant) -> Result<()> {
        let mut command = self.ops.nothing();
        let waits = acknowledged(&mut command, majority.saturating_duration_since(Instant::now()));
        // Whatever it is, the write before it was made.
        let unsettled = |error: Error| {
            let message = format!("{call}: written, but maybe not to a majority");
            Error::new(ErrorKind::Unavailable, Unknown, message).with_source(error)
        };
        let reply = within(call, Writes::Rows, waits, async {
            self.run(command, None).await.map_err(|error| failed(call, Writes::Rows, error))
        })
        .await
        .map_err(unsettled)?;
        match concern(call, &reply) {
            Concern::Met => Ok(()),
            Concern::Failed(error) => Err(error),
            Concern::Late => Err(unsettled(silent(call, Writes::Rows, waits))),
        }
    }

    /// Refuses to work where there is no schema.
    pub(crate) async fn ready(&self, call: &str) -> Result<()> {
        self.ready_since(1, call).await
    }

    /// The same where there is none of this version or a later one.
    pub(crate) async fn ready_since(&self, version: i64, call: &str) -> Result<()> {
        if self.schema.load(Ordering::Relaxed) >= version {
            return Ok(());
        }
        let found = setup::admitted(self).await?.version;
        self.schema.store(found, Ordering::Relaxed);
        if found < version { Err(setup::missing(call)) } else { Ok(()) }
    }

    /// Deletes rows that are over, some at once, and answers how many still were.
    pub(crate) async fn delete<T>(&self, of: &[T], command: impl Fn(&[T]) -> Document) -> Result<u64> {
        const AT_ONCE: usize = 1000;
        let mut purged = 0;
        for of in of.chunks(AT_ONCE) {
            let (wait, deadline) = (self.patience(of.len()), self.deadline(of.len()));
            let reply = self.write("purge", command(of), Writes::Rows, wait, deadline).await;
            let reply = reply.map_err(|error| if purged > 0 { error.with_certainty(Unknown) } else { error })?;
            if let Some(error) = item_errors(&reply).pop() {
                return Err(error.into_error("purge").with_certainty(Unknown));
            }
            purged += count(&reply, "n") as u64;
        }
        Ok(purged)
    }

    /// One compare-and-update, in the caller's transaction or in none.
    pub(crate) async fn update_one(
        &self,
        update: &UpdateRequest,
        session: Option<&mut ClientSession>,
        deadline: Instant,
    ) -> Result<Update> {
        let UpdateRequest { id, current, patch } = update;
        let command = || self.ops.update(*id, current, patch, self.offset());
        let Some(session) = session else {
            loop {
                match self.write("update", command(), Writes::Row, self.patience(1), deadline).await {
                    Ok(reply) => return self.judged(*id, &reply, None).await,
                    // With a later now, if there is still time.
                    Err(error) if error.kind() == ErrorKind::Transient && Instant::now() < deadline => {}
                    Err(error) => return Err(error),
                }
            }
        };
        // Before anything is locked: a transaction whose first command was dropped the driver takes for one that has not
        // begun, and does not abort it; the server would keep its locks for a minute.
        self.read("update", self.ops.executions([*id]), Some(&mut *session)).await?;
        let reply = self.run(command(), Some(&mut *session)).await;
        let reply = reply.map_err(|error| failed("update", Writes::Nothing, error))?;
        self.judged(*id, &reply, Some(session)).await
    }

    /// What the answer to a compare-and-update says; if nothing matched, what is there.
    async fn judged(&self, id: JobId, reply: &Document, session: Option<&mut ClientSession>) -> Result<Update> {
        let certainty = if session.is_some() { Writes::Nothing.lost() } else { Unknown };
        if let Ok(row) = reply.get_document("value") {
            return row::execution(row).map(Update::Applied).map_err(|row| broken(row, certainty));
        }
        let rows = self.read("update", self.ops.executions([id]), session).await?;
        Ok(rows.first().map_or(Update::Missing, present))
    }

    /// Updates rows, of which no two are the same.
    pub(crate) async fn update(&self, updates: &[UpdateRequest], deadline: Instant) -> Result<Vec<Update>> {
        if let [update] = updates {
            return Ok(vec![self.update_one(update, None, deadline).await?]);
        }
        let mark = Revision::random();
        let command = self.ops.update_many(updates, mark, self.offset());
        let written = self.write("update", command, Writes::Rows, self.patience(updates.len()), deadline).await;
        // How many matched; unknown, if one of them cannot be written or is in somebody's open transaction.
        let matched = match written {
            Ok(reply) => item_errors(&reply).is_empty().then(|| count(&reply, "n")),
            Err(error) if error.kind() == ErrorKind::Transient => None,
            Err(error) => return Err(error),
        };
        let rows = self.read("update", self.ops.executions(updates.iter().map(|update| update.id)), None).await;
        let rows = rows.map_err(|error| error.with_certainty(Unknown))?;
        let rows: HashMap<_, _> = rows.iter().map(|row| (row::id(row), row)).collect();
        let is_marked = |row: &Document| row::batch(row) == Some(mark);
        let marked = rows.values().filter(|row| is_marked(row)).count();
        let Some(matched) = matched else {
            if marked == updates.len() {
                self.settled("update", for_majority(deadline)).await?;
            }
            let deadline = deadline.max(Instant::now() + self.patience(updates.len()));
            // Those that the batch did not come to, row by row: none need wait for another.
            let one = async |(index, update): (usize, &UpdateRequest)| {
                let answer = match rows.get(&update.id) {
                    Some(row) if is_marked(row) => written_as(update, row),
                    _ => self.update_one(update, None, deadline.min(Instant::now() + self.patience(1))).await,
                };
                answer.map_err(|error| error.at_index(index))
            };
            let answers: Vec<Result<Update>> =
                stream::iter(updates.iter().enumerate().map(one)).buffered(AT_ONCE).collect().await;
            return answers.into_iter().collect();
        };
        let answer = |(index, update): (usize, &UpdateRequest)| match rows.get(&update.id) {
            Some(row) if is_marked(row) => written_as(update, row).map_err(|error| error.at_index(index)),
            // Some that matched has lost its mark to another batch, or is gone; which one nobody knows.
            _ if marked < matched => Err(superseded(update.id).at_index(index)),
            Some(row) => Ok(present(row)),
            None => Ok(Update::Missing),
        };
        updates.iter().enumerate().map(answer).collect()
    }
}

/// Runs to its end what must not be left in the middle, also if nobody waits for it any more. Of a transaction whose first
/// command, or whose commit, was dropped the driver thinks that there is nothing to abort, and the server would keep its locks
/// for a minute.
pub(crate) async fn to_the_end<T: Send + 'static>(call: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
    match tokio::spawn(call).await.map_err(JoinError::try_into_panic) {
        Ok(answer) => answer,
        Err(Ok(panic)) => std::panic::resume_unwind(panic),
        Err(Err(_)) => Err(Error::new(ErrorKind::Unavailable, Unknown, "the runtime shut down")),
    }
}

/// A number below this one.
pub(crate) fn random(below: usize) -> usize {
    let (_, random) = Revision::random().as_uuid().as_u64_pair();
    usize::try_from(random % below.max(1) as u64).unwrap_or_default()
}

/// Until when a write with this deadline waits for a majority.
pub(crate) fn for_majority(deadline: Instant) -> Instant {
    deadline.max(Instant::now() + MAJORITY_WAIT)
}

/// Makes a command wait until a majority has journaled what it wrote, and answers how long it then may take.
fn acknowledged(command: &mut Document, time: Duration) -> Duration {
    let time = time.max(Duration::from_millis(1));
    command.insert("writeConcern", doc! { "w": "majority", "j": true });
    command.insert("maxTimeMS", i64::try_from(time.as_millis()).unwrap_or(i64::MAX));
    time
}

/// Gives up an answer that does not come.
pub(crate) async fn within<T>(
    call: &str,
    writes: Writes,
    time: Duration,
    answer: impl Future<Output = Result<T>>,
) -> Result<T> {
    let time = time + NETWORK;
    timeout(time, answer).await.unwrap_or_else(|_| Err(silent(call, writes, time)))
}

/// A row that did not match.
pub(crate) fn present(row: &Document) -> Update {
    row::execution(row).map_or_else(Update::Unreadable, Update::Conflict)
}

/// A row that matched and was written, as it was read after that.
fn written_as(update: &UpdateRequest, row: &Document) -> Result<Update> {
    if row::revision(row) != Some(update.patch.revision.unwrap_or(update.current.revision)) {
        return Err(superseded(update.id));
    }
    row::execution(row).map(Update::Applied).map_err(|row| broken(row, Unknown))
}

/// It matched and was written, and still cannot be read: broken by hand where the fingerprint does not look.
pub(crate) fn broken(row: Unreadable, certainty: queue_core::Certainty) -> Error {
    let Unreadable { id, reason, .. } = row;
    Error::new(ErrorKind::Schema, certainty, format!("job {id} cannot be read: {reason}"))
}

/// Somebody wrote the row before its answer could be read. It was applied, for all that is known, but what it then was nobody
/// can say; the same decision, submitted again, is told of the conflict and of its own part in it.
fn superseded(id: JobId) -> Error {
    Error::new(ErrorKind::Transient, Unknown, format!("update: job {id} was changed again before the answer was read"))
}
