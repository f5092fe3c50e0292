//! Storing new jobs.

use std::collections::HashMap;
use std::collections::HashSet;

use mongodb::ClientSession;
use queue_core::Certainty::Unknown;
use queue_core::Enqueued;
use queue_core::Error;
use queue_core::ErrorKind;
use queue_core::JobId;
use queue_core::NewJob;
use queue_core::Result;
use queue_core::Revision;
use queue_core::Timestamp;
use queue_core::chunks;
use queue_core::id_reused;
use tokio::time::Instant;

use crate::error::Writes;
use crate::error::failed;
use crate::error::item_errors;
use crate::handle::Handle;
use crate::handle::for_majority;
use crate::row;
use crate::row::Seen;
use crate::setup;

/// What is known of the jobs of a call before they are stored.
#[derive(Debug, Default)]
struct Look {
    now: Option<Timestamp>,
    /// Ids that are stored: with the same content or another, and in which moment.
    stored: HashMap<JobId, (bool, Option<Revision>)>,
    /// Who has the keys.
    holders: HashMap<(String, String), JobId>,
}

/// What has become of the jobs of a call so far.
#[derive(Debug, Default)]
struct Progress {
    outcomes: HashMap<JobId, Enqueued>,
    /// An insert was cut off since the last look, and may have stored some.
    is_in_doubt: bool,
    /// All of it is part of a transaction that the caller will roll back.
    is_lent: bool,
}

impl Progress {
    /// An error after which some jobs of the call may be stored. The same call again completes it.
    fn ended(&self, error: Error) -> Error {
        let is_stored = self.outcomes.values().any(|outcome| matches!(outcome, Enqueued::New(_)));
        if (is_stored || self.is_in_doubt) && !self.is_lent { error.with_certainty(Unknown) } else { error }
    }
}

fn key(job: &NewJob) -> Option<(String, String)> {
    Some((job.queue.as_str().to_owned(), job.unique_key.as_ref()?.as_str().to_owned()))
}

impl Handle {
    /// Stores jobs that have been checked: in the caller's transaction, or each by itself.
    ///
    /// Everything is looked up before anything is written, so that a call that is refused stores nothing. What then happens
    /// between the look and the insert, the indexes refuse, and a second look says what it was.
    pub(crate) async fn enqueue(
        &self,
        mut session: Option<&mut ClientSession>,
        jobs: &[NewJob],
    ) -> Result<Vec<Enqueued>> {
        let deadline = self.deadline(jobs.len());
        let mut progress = Progress { is_lent: session.is_some(), ..Progress::default() };
        let mut distinct = HashSet::with_capacity(jobs.len());
        let mut open: Vec<_> = jobs.iter().filter(|job| distinct.insert(job.id)).collect();
        // An insert that was cut off is known again by these.
        let revisions: HashMap<_, _> = open.iter().map(|job| (job.id, Revision::random())).collect();
        // Of what has only been read nobody knows yet whether it is on a majority.
        let mut is_acknowledged = true;
        let mut is_first = true;
        loop {
            let look = self.look(&open, session.as_deref_mut()).await;
            let look = look.map_err(|error| progress.ended(error))?;
            let outcomes = &mut progress.outcomes;
            for job in &open {
                match look.stored.get(&job.id) {
                    Some((_, revision)) if *revision == revisions.get(&job.id).copied() => {
                        outcomes.insert(job.id, Enqueued::New(job.id));
                    }
                    Some((true, _)) => drop(outcomes.insert(job.id, Enqueued::Existing(job.id))),
                    Some((false, _)) => {
                        let index = jobs.iter().position(|other| other.id == job.id).unwrap_or_default();
                        return Err(progress.ended(id_reused(job.id).at_index(index)));
                    }
                    None => {
                        if let Some(existing) = key(job).and_then(|key| look.holders.get(&key)).copied() {
                            outcomes.insert(job.id, Enqueued::Duplicate { existing });
                        }
                    }
                }
            }
            progress.is_in_doubt = false;
            let before = open.len();
            open.retain(|job| !progress.outcomes.contains_key(&job.id));
            is_acknowledged &= open.len() == before;
            if open.is_empty() {
                break;
            }
            // After a look, which has told what an insert that was cut off has stored.
            if !is_first && Instant::now() >= deadline {
                let message = "enqueue: others had an id or a key in open transactions for too long";
                return Err(progress.ended(Error::not_applied(ErrorKind::Transient, message)));
            }
            // Of two jobs of one key the first is stored; what became of it the next look tells the second.
            let mut keys = HashSet::new();
            let fresh: Vec<_> =
                open.iter().copied().filter(|job| key(job).is_none_or(|key| keys.insert(key))).collect();
            let now = look.now.unwrap_or(Timestamp::MIN);
            for chunk in chunks(&fresh) {
                let chunk: Vec<_> = chunk.iter().map(|job| (*job, revisions[&job.id])).collect();
                is_acknowledged |=
                    self.insert(&chunk, now, session.as_deref_mut(), deadline, jobs, &mut progress).await?;
            }
            open.retain(|job| !progress.outcomes.contains_key(&job.id));
            if open.is_empty() {
                break;
            }
            is_first = false;
        }
        if !is_acknowledged && session.is_none() {
            self.settled("enqueue", for_majority(deadline)).await?;
        }
        // A job that the call brings twice is new once.
        let mut new = HashSet::new();
        let outcome = |job: &NewJob| match progress.outcomes[&job.id] {
            Enqueued::New(id) if !new.insert(id) => Enqueued::Existing(id),
            outcome => outcome,
        };
        Ok(jobs.iter().map(outcome).collect())
    }

    /// What is stored of these jobs, and who has their keys.
    async fn look(&self, jobs: &[&NewJob], mut session: Option<&mut ClientSession>) -> Result<Look> {
        let mut look = Look::default();
        for chunk in chunks(jobs) {
            // The keys first: an id that is not stored then was not when another had its key, so neither can hide the other.
            let holders = self.ops.holders(chunk).into_iter().collect();
            let mut rows = self.read_all("enqueue", holders, session.as_deref_mut()).await?;
            let stored = self.ops.stored(self.offset(), chunk);
            rows.extend(self.read_all("enqueue", stored, session.as_deref_mut()).await?);
            let asked: HashMap<_, _> = chunk.iter().map(|job| (job.id, *job)).collect();
            for row in rows {
                match row::seen(row) {
                    Ok(Seen::Now(now)) => look.now = Some(now),
                    Ok(Seen::Holder { queue, key, id }) => drop(look.holders.insert((queue, key), id)),
                    Ok(Seen::Stored(row)) => {
                        let id = row::id(&row);
                        let repeats = asked.get(&id).is_some_and(|job| row::repeats(&row, job));
                        look.stored.insert(id, (repeats, row::revision(&row)));
                    }
                    Err(reason) => {
                        let message = format!("enqueue: a row cannot be read: {reason}");
                        return Err(Error::not_applied(ErrorKind::Schema, message));
                    }
                }
            }
        }
        if look.now.is_none() {
            return Err(setup::missing("enqueue"));
        }
        Ok(look)
    }

    /// Inserts jobs, and notes those that are stored. Whether a majority has acknowledged it, and with it what was read before.
    async fn insert(
        &self,
        chunk: &[(&NewJob, Revision)],
        now: Timestamp,
        session: Option<&mut ClientSession>,
        deadline: Instant,
        jobs: &[NewJob],
        progress: &mut Progress,
    ) -> Result<bool> {
        let command = self.ops.insert(chunk, now);
        let wait = self.patience(chunk.len());
        let writes = if chunk.len() == 1 { Writes::Row } else { Writes::Rows };
        let reply = match session {
            Some(session) => {
                let reply = self.run(command, Some(session)).await;
                reply.map_err(|error| failed("enqueue", Writes::Nothing, error))?
            }
            None => match self.write("enqueue", command, writes, wait, deadline.max(Instant::now() + wait)).await {
                Ok(reply) => reply,
                // Some are stored, maybe: the next look tells.
                Err(error) if error.kind() == ErrorKind::Transient => {
                    progress.is_in_doubt |= error.certainty() == Unknown;
                    return Ok(false);
                }
                Err(error) => return Err(progress.ended(error)),
            },
        };
        let mut refused = HashSet::new();
        for error in item_errors(&reply) {
            refused.insert(error.index);
            if error.is_taken() && !progress.is_lent {
                continue;
            }
            let index = chunk.get(error.index).and_then(|(job, _)| jobs.iter().position(|other| other.id == job.id));
            if error.is_taken() {
                let message =
                    "enqueue: an id or a key was taken meanwhile, which ended the transaction: repeat it whole";
                return Err(Error::not_applied(ErrorKind::Transient, message));
            }
            // Those beside it are stored.
            progress.is_in_doubt |= chunk.len() > 1;
            return Err(progress.ended(error.into_error("enqueue").at_index(index.unwrap_or_default())));
        }
        let stored = chunk.iter().enumerate().filter(|(index, _)| !refused.contains(index));
        progress.outcomes.extend(stored.map(|(_, (job, _))| (job.id, Enqueued::New(job.id))));
        Ok(true)
    }
}
