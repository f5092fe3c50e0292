//! What a handle holds, and what runs on a connection that it has got.

use std::collections::HashMap;
use std::collections::HashSet;
use std::sync::atomic::AtomicBool;

use queue_core::Beat;
use queue_core::ClaimRequest;
use queue_core::Claimed;
use queue_core::ClockOffset;
use queue_core::Delay;
use queue_core::Enqueued;
use queue_core::Error;
use queue_core::ErrorKind;
use queue_core::Execution;
use queue_core::Held;
use queue_core::Identifier;
use queue_core::Job;
use queue_core::JobId;
use queue_core::JobState;
use queue_core::Lease;
use queue_core::Limit;
use queue_core::NewJob;
use queue_core::Result;
use queue_core::Revision;
use queue_core::Timestamp;
use queue_core::Unreadable;
use queue_core::Update;
use queue_core::UpdateRequest;
use queue_core::WorkSignal;
use queue_core::chunks;
use queue_core::id_reused;
use sqlx::MySql;
use sqlx::MySqlConnection;
use sqlx::MySqlPool;
use sqlx::Row;
use sqlx::SqlStr;
use sqlx::mysql::MySqlArguments;
use sqlx::mysql::MySqlQueryResult;
use sqlx::mysql::MySqlRow;
use sqlx::query;
use sqlx::query::Query;

use crate::batch;
use crate::batch::HeldRow;
use crate::batch::IdRow;
use crate::batch::KnownRow;
use crate::batch::LockRow;
use crate::batch::NewRows;
use crate::batch::PatchRows;
use crate::error::is_taken;
use crate::row;
use crate::sql::Sql;
use crate::transaction::Deadline;
use crate::transaction::End;
use crate::transaction::Failure;
use crate::transaction::MysqlTransaction;

/// What the clones of a backend share.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) pool: MySqlPool,
    pub(crate) sql: Sql,
    pub(crate) prefix: Identifier,
    pub(crate) max_payload: usize,
    pub(crate) clock: ClockOffset,
    /// A row that is locked on one node of a cluster may be changed on another.
    pub(crate) is_cluster: bool,
    pub(crate) signal: WorkSignal,
    /// The last claim found nothing: the next one looks before it begins a transaction for nothing.
    pub(crate) idle: AtomicBool,
}

/// A statement that writes, with the number of rows that it must match: they are locked.
pub(crate) async fn write(
    connection: &mut MySqlConnection,
    query: Query<'_, MySql, MySqlArguments>,
    rows: usize,
) -> Result<MySqlQueryResult, Failure> {
    let done = query.execute(connection).await?;
    if usize::try_from(done.rows_affected()).is_ok_and(|affected| affected == rows) {
        return Ok(done);
    }
    let message = format!("{rows} locked rows were to be written, and the server wrote {}", done.rows_affected());
    Err(Error::not_applied(ErrorKind::Permanent, message).into())
}

/// Ids as a batch, in the order in which rows are locked.
pub(crate) fn batch_of(ids: impl IntoIterator<Item = JobId>) -> sqlx::Result<String> {
    let mut ids: Vec<_> = ids.into_iter().collect();
    ids.sort_unstable();
    ids.dedup();
    batch::array(ids.into_iter().map(IdRow::from))
}

impl Handle {
    /// What is added to the server's clock.
    pub(crate) fn offset(&self) -> i64 {
        self.clock.millis()
    }

    pub(crate) async fn read<'q>(
        &self,
        call: &'static str,
        query: impl Fn() -> Query<'q, MySql, MySqlArguments>,
    ) -> Result<Vec<MySqlRow>> {
        crate::transaction::read(&self.pool, call, query).await
    }

    pub(crate) async fn begin(&self, call: &'static str, deadline: Deadline) -> Result<MysqlTransaction> {
        MysqlTransaction::begin(&self.pool, &self.sql, self.is_cluster, call, deadline).await
    }

    /// The now that a statement wrote.
    async fn now_of(&self, connection: &mut MySqlConnection, done: &MySqlQueryResult) -> Result<Timestamp, Failure> {
        let millis: u64 = match done.last_insert_id() {
            0 => query(self.sql.told.clone()).fetch_one(connection).await?.try_get(0)?,
            millis => millis,
        };
        let now = i64::try_from(millis).ok().and_then(|millis| Timestamp::from_unix_millis(millis).ok());
        now.ok_or_else(|| Error::not_applied(ErrorKind::Permanent, "the server does not say what time it wrote").into())
    }

    /// Stores jobs that have been checked. `known` is the statement that looks for what is stored of them, without locking; what
    /// it has not seen is the error of a taken key, upon which the whole is repeated. None: nothing is expected to be stored.
    pub(crate) async fn enqueue(
        &self,
        connection: &mut MySqlConnection,
        jobs: &[NewJob],
        known: Option<&SqlStr>,
    ) -> Result<Vec<Enqueued>, Failure> {
        const ROWS: usize = 1000;
        let (mut stored, mut holders) = (HashSet::new(), HashMap::new());
        for (chunk_index, chunk) in jobs.chunks(ROWS).enumerate() {
            let Some(known) = known else { break };
            let batch = batch::array(chunk.iter().enumerate().map(|(item, job)| KnownRow::new(item, job)))?;
            for row in query(known.clone()).bind(batch).fetch_all(&mut *connection).await? {
                let item = row::item(&row)?;
                let Some(job) = chunk.get(item) else { continue };
                if row::number(&row, "is_stored")? == Some(1) {
                    if !row::repeats(&row, job)? {
                        return Err(id_reused(job.id).at_index(chunk_index * ROWS + item).into());
                    }
                    stored.insert(job.id);
                }
                if let (Some(holder), Some(key)) = (row.try_get::<Option<uuid::Uuid>, _>("holder")?, &job.unique_key) {
                    holders.insert((&job.queue, key), JobId::from(holder));
                }
            }
        }

        let mut fresh = Vec::new();
        let mut outcomes = Vec::with_capacity(jobs.len());
        for job in jobs {
            let key = job.unique_key.as_ref().map(|key| (&job.queue, key));
            outcomes.push(match key.and_then(|key| holders.get(&key)) {
                _ if stored.contains(&job.id) => Enqueued::Existing(job.id),
                Some(existing) => Enqueued::Duplicate { existing: *existing },
                None => {
                    stored.insert(job.id);
                    holders.extend(key.map(|key| (key, job.id)));
                    fresh.push(job);
                    Enqueued::New(job.id)
                }
            });
        }

        // In one order, so that two calls about the same keys do not wait for each other.
        fresh.sort_unstable_by_key(|job| (&job.queue, &job.unique_key, job.id));
        for chunk in chunks(&fresh) {
            let mut new = NewRows::default();
            chunk.iter().for_each(|job| new.add(job));
            let names = new.names.into_bytes();
            let insert = query(self.sql.insert.clone())
                .bind(&names)
                .bind(&names)
                .bind(&names)
                .bind(new.payloads.into_bytes())
                .bind(self.offset())
                .bind(batch::array(new.rows)?);
            write(connection, insert, chunk.len()).await?;
        }
        Ok(outcomes)
    }

    /// Claims what is due and not locked.
    /// Whether there is something to claim, by one statement that locks nothing.
    pub(crate) async fn is_anything_due(&self, request: &ClaimRequest) -> Result<bool> {
        let statement = || {
            query(self.sql.any_due.clone())
                .bind(request.queue().as_str().as_bytes())
                .bind(self.offset())
                .bind(batch::list(request.kinds()))
        };
        Ok(!self.read("claim", statement).await?.is_empty())
    }

    pub(crate) async fn claim(
        &self,
        connection: &mut MySqlConnection,
        request: &ClaimRequest,
    ) -> Result<End<Claimed>, Failure> {
        let rows = query(self.sql.due.clone())
            .bind(request.queue().as_str().as_bytes())
            .bind(self.offset())
            .bind(batch::list(request.kinds()))
            .bind(request.limit().get())
            .fetch_all(&mut *connection)
            .await?;
        if rows.is_empty() {
            return Ok(End::RollBack(Claimed::default()));
        }
        let revision = Revision::random();
        let state = if request.starts() { JobState::Running } else { JobState::Claimed };
        let claim = query(self.sql.claim.clone())
            .bind(self.offset())
            .bind(batch_of(rows.iter().map(row::id))?)
            .bind(state.as_str().as_bytes())
            .bind(i64::from(request.starts()))
            .bind(i64::from(request.starts()))
            .bind(revision.as_uuid())
            .bind(request.worker().as_str().as_bytes())
            .bind(i64::from(request.starts()))
            .bind(request.lease().as_millis());
        let done = write(connection, claim, rows.len()).await?;
        let now = self.now_of(connection, &done).await?;
        let claimed = |execution: &mut Execution| request.apply(execution, revision, now);
        Ok(End::Commit(Claimed::collect(rows.iter().map(|row| {
            row::job(row)
                .map(|mut job: Job| {
                    claimed(&mut job.execution);
                    job
                })
                .map_err(|mut row: Unreadable| {
                    row.execution.as_deref_mut().map(claimed);
                    row
                })
        }))))
    }

    /// Updates rows, of which no two are the same. Also what the application had inserted last, if anything was written.
    pub(crate) async fn update(
        &self,
        connection: &mut MySqlConnection,
        updates: &[UpdateRequest],
    ) -> Result<(Vec<Update>, Option<u64>), Failure> {
        let mut ordered: Vec<_> = updates.iter().collect();
        ordered.sort_unstable_by_key(|update| update.id);
        let batch = batch::array(ordered.into_iter().map(LockRow::from))?;
        let rows = query(self.sql.lock.clone()).bind(self.offset()).bind(batch).fetch_all(&mut *connection).await?;
        let rows: HashMap<_, _> = rows.iter().map(|row| (row::id(row), row)).collect();

        let mut patches = PatchRows::default();
        let (mut inserted, mut matched) = (None, Vec::new());
        let mut answers = Vec::with_capacity(updates.len());
        for UpdateRequest { id, current, patch } in updates {
            answers.push(match rows.get(id).map(|row| (row, row::execution(row))) {
                None => Update::Missing,
                Some((_, Err(unreadable))) => Update::Unreadable(unreadable),
                Some((row, Ok(execution))) => {
                    let now = row::now(row)?;
                    if current.matches(&execution, now) {
                        patches.add(&execution, patch, row)?;
                        matched.push((answers.len(), patch));
                        inserted = Some(row.try_get("inserted")?);
                    }
                    Update::Conflict(execution)
                }
            });
        }
        if matched.is_empty() {
            return Ok((answers, None));
        }
        let now = self.patch(connection, patches).await?;
        for (index, patch) in matched {
            if let Update::Conflict(execution) = &answers[index] {
                let mut execution = execution.clone();
                patch.apply_to_execution(&mut execution, now);
                answers[index] = Update::Applied(execution);
            }
        }
        Ok((answers, inserted))
    }

    /// Writes what was decided on rows that are locked, of which no two are the same, and answers with the time that it wrote.
    pub(crate) async fn patch(
        &self,
        connection: &mut MySqlConnection,
        patches: PatchRows,
    ) -> Result<Timestamp, Failure> {
        let rows = patches.rows.len();
        let update = query(self.sql.update.clone())
            .bind(self.offset())
            .bind(batch::array(patches.rows)?)
            .bind(patches.payloads.into_bytes())
            .bind(patches.results.into_bytes())
            .bind(patches.failures.into_bytes());
        let done = write(connection, update, rows).await.map_err(|failure| match failure {
            Failure::Driver(error) if is_taken(&error) => {
                Error::invalid("update: another active job has the unique key").with_source(error).into()
            }
            failure => failure,
        })?;
        self.now_of(connection, &done).await
    }

    /// Renews what is held and not locked.
    pub(crate) async fn extend(
        &self,
        connection: &mut MySqlConnection,
        held: &[Held],
        lease: Lease,
    ) -> Result<End<Vec<Beat>>, Failure> {
        let mut ordered: Vec<_> = held.iter().enumerate().collect();
        ordered.sort_unstable_by_key(|(_, held)| held.id);
        let batch = batch::array(ordered.into_iter().map(|(item, held)| HeldRow::new(item, held)))?;
        let rows = query(self.sql.beat.clone()).bind(batch).fetch_all(&mut *connection).await?;
        let mut beats = vec![Beat::Lost; held.len()];
        for row in &rows {
            let beat = match row::number(row, "is_held")? {
                Some(0) => Beat::Lost,
                Some(_) => Beat::Extended,
                None => Beat::Busy,
            };
            if let Some(answer) = beats.get_mut(row::item(row)?) {
                *answer = beat;
            }
        }
        let renewed = held.iter().zip(&beats).filter(|(_, beat)| **beat == Beat::Extended).map(|(held, _)| held.id);
        let renewed: HashSet<_> = renewed.collect();
        if renewed.is_empty() {
            return Ok(End::RollBack(beats));
        }
        let rows = renewed.len();
        let extend =
            query(self.sql.extend.clone()).bind(self.offset()).bind(batch_of(renewed)?).bind(lease.as_millis());
        write(connection, extend, rows).await?;
        Ok(End::Commit(beats))
    }

    /// Deletes the oldest ended rows that are not locked.
    pub(crate) async fn purge(
        &self,
        connection: &mut MySqlConnection,
        state: JobState,
        older_than: Delay,
        limit: Limit,
    ) -> Result<End<u64>, Failure> {
        let rows = query(self.sql.old.clone())
            .bind(state.as_str().as_bytes())
            .bind(self.offset())
            .bind(older_than.as_millis())
            .bind(limit.get())
            .fetch_all(&mut *connection)
            .await?;
        if rows.is_empty() {
            return Ok(End::RollBack(0));
        }
        let delete = query(self.sql.delete.clone()).bind(batch_of(rows.iter().map(row::id))?);
        Ok(End::Commit(write(connection, delete, rows.len()).await?.rows_affected()))
    }

    /// Gives the application's connection back the id that it inserted last: ours went over it.
    pub(crate) async fn restore_inserted(&self, connection: &mut MySqlConnection, inserted: u64) -> sqlx::Result<()> {
        let text: SqlStr = self.sql.inserted.clone();
        query(text).bind(inserted).fetch_all(connection).await.map(drop)
    }
}
