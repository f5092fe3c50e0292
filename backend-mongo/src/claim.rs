//! Claims, and the heartbeats that keep them.

use std::collections::HashMap;
use std::collections::HashSet;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream;
use mongodb::bson::Document;
use queue_core::Beat;
use queue_core::Certainty::NotApplied;
use queue_core::Certainty::Unknown;
use queue_core::ClaimRequest;
use queue_core::Claimed;
use queue_core::Error;
use queue_core::ErrorKind;
use queue_core::Held;
use queue_core::JobId;
use queue_core::Lease;
use queue_core::Result;
use queue_core::Revision;
use tokio::time::Instant;

use crate::error::Writes;
use crate::error::is_about_a_row;
use crate::error::item_errors;
use crate::handle::AT_ONCE;
use crate::handle::Handle;
use crate::handle::MAJORITY_WAIT;
use crate::handle::ROW_WAITS;
use crate::handle::count;
use crate::handle::random;
use crate::handle::within;
use crate::ops::KINDS;
use crate::row;

/// No answer of a server can be relied upon to come within a lease that is shorter.
const SHORTEST_LEASE: Duration = ROW_WAITS[0];

/// Until when a claim or a heartbeat may wait.
#[derive(Clone, Copy, Debug)]
struct Wait {
    /// For rows: a third of the lease, since waiting longer would leave too little of it. A lease so short that this is next
    /// to nothing is not kept up by more than a moment.
    rows: Instant,
    /// For a majority, which no lease can hurry: for a while at least, if a third of the lease is left then.
    majority: Instant,
}

impl Wait {
    fn of(lease: Lease) -> Self {
        let (now, lease) = (Instant::now(), lease.duration());
        let third = lease / 3;
        let majority = if lease < SHORTEST_LEASE { MAJORITY_WAIT } else { MAJORITY_WAIT.min(2 * third) };
        Self { rows: now + third.max(ROW_WAITS[0]), majority: now + third.max(majority) }
    }

    fn is_over(self) -> bool {
        Instant::now() >= self.rows
    }

    /// So much of a command's patience as is left.
    fn at_most(self, patience: Duration) -> Duration {
        patience.min(self.rows.saturating_duration_since(Instant::now()))
    }
}

/// One claim on its way.
struct Claim<'a> {
    handle: &'a Handle,
    request: &'a ClaimRequest,
    /// The claim's own, which says which rows it won.
    revision: Revision,
    wait: Wait,
    /// The leases of what it has won run from here on, or from later.
    since: Instant,
    /// Until when it looks for something that can be had.
    gives_up: Instant,
    /// What was tried, and so may have been won.
    tried: Vec<JobId>,
    /// Why a row could not be had.
    refusal: Option<Error>,
}

impl Claim<'_> {
    fn limit(&self) -> usize {
        self.request.limit().rows()
    }

    fn offset(&self) -> i64 {
        self.handle.offset()
    }

    /// The first that can be claimed, in the order of the queue.
    async fn candidates(&self, limit: usize) -> Result<Vec<JobId>> {
        let Self { handle, request, .. } = self;
        let mut found = Vec::new();
        for kinds in request.kinds().chunks(KINDS) {
            let find = handle.ops.candidates(request, kinds, self.offset(), limit);
            found.extend(handle.read("claim", find, None).await?.iter().map(row::due_order));
        }
        if request.kinds().len() > KINDS {
            found.sort();
            found.truncate(limit);
        }
        Ok(found.into_iter().map(|(_, _, id)| id).collect())
    }

    async fn write(&self, command: Document, writes: Writes, patience: Duration) -> Result<Document> {
        self.handle.write_until("claim", command, writes, self.wait.at_most(patience), self.wait.majority).await
    }

    /// Claims the first ones at once; if others were faster, those at a random place behind, so that not everybody fights for
    /// the same ones. Ends with as many as were asked for, or with none left, or at a row that cannot be had.
    async fn many(&mut self) -> Result<()> {
        let (mut missing, mut is_first) = (self.limit(), true);
        loop {
            let asked = if is_first { missing } else { 4 * missing + 16 };
            let candidates = self.candidates(asked).await?;
            if candidates.is_empty() {
                return Ok(());
            }
            let windows = candidates.len().div_ceil(missing);
            let window = if is_first { 0 } else { random(windows) * missing };
            let window = &candidates[window..candidates.len().min(window + missing)];
            let before = self.tried.len();
            self.tried.extend(window);
            let command = self.handle.ops.claim_these(self.request, window, self.revision, self.offset());
            let reply = self.write(command, Writes::Rows, self.handle.patience(window.len())).await;
            let won = match reply {
                Ok(reply) => match item_errors(&reply).pop() {
                    None => count(&reply, "nModified"),
                    Some(error) => {
                        self.refusal = Some(error.into_error("claim"));
                        return Ok(());
                    }
                },
                Err(error) => {
                    if error.certainty() == NotApplied {
                        self.tried.truncate(before);
                    }
                    if !is_about_a_row(&error) {
                        return Err(error);
                    }
                    self.refusal = Some(error);
                    return Ok(());
                }
            };
            missing = missing.saturating_sub(won);
            let was_all = candidates.len() < asked && window.len() == candidates.len() && won == window.len();
            if missing == 0 || was_all {
                return Ok(());
            }
            if self.wait.is_over() {
                let message = "claim: others were faster, again and again";
                self.refusal = Some(Error::not_applied(ErrorKind::Transient, message));
                return Ok(());
            }
            is_first = false;
        }
    }

    /// Claims row by row, past those that cannot be had. If there are no others it tries again for a while, and looks for new
    /// ones: to a server that is busy every row may seem to be locked.
    async fn past_refusals(&mut self, rows: &mut Vec<Document>) -> Result<()> {
        let mut waits = ROW_WAITS.into_iter();
        let mut patience = ROW_WAITS[0];
        loop {
            patience = waits.next().unwrap_or(patience);
            if rows.is_empty() {
                self.since = Instant::now();
            }
            let missing = self.limit().saturating_sub(rows.len());
            let candidates = self.candidates(4 * missing + 16).await?;
            if candidates.is_empty() {
                // What could not be had is gone.
                self.refusal = None;
                return Ok(());
            }
            let mut left = candidates.into_iter();
            let mut is_hopeless = false;
            while rows.len() < self.limit() && !self.wait.is_over() {
                let next: Vec<_> = left.by_ref().take(self.limit() - rows.len()).collect();
                if next.is_empty() {
                    break;
                }
                let one = async |id: JobId| {
                    let command = self.handle.ops.claim_this(self.request, id, self.revision, self.offset());
                    self.write(command, Writes::Row, patience).await
                };
                let replies: Vec<_> = stream::iter(next).map(one).buffered(AT_ONCE).collect().await;
                for reply in replies {
                    match reply {
                        Ok(reply) => rows.extend(reply.get_document("value").ok().cloned()),
                        Err(error) if is_about_a_row(&error) => {
                            is_hopeless = error.kind() != ErrorKind::Transient;
                            self.refusal = Some(error);
                        }
                        Err(error) => return Err(error.with_certainty(Unknown)),
                    }
                }
            }
            if !rows.is_empty() || is_hopeless || Instant::now() >= self.gives_up {
                return Ok(());
            }
        }
    }

    async fn run(mut self) -> Result<Claimed> {
        let mut rows = Vec::new();
        if self.limit() == 1 && self.request.kinds().len() <= KINDS {
            let command = self.handle.ops.claim_first(self.request, self.revision, self.offset());
            match self.write(command, Writes::Row, self.handle.patience(1)).await {
                Ok(reply) => rows.extend(reply.get_document("value").ok().cloned()),
                Err(error) if is_about_a_row(&error) => self.refusal = Some(error),
                Err(error) => return Err(error),
            }
        } else {
            // The rows of earlier rounds are claimed whatever ends a later one.
            let ended = self.many().await;
            ended.map_err(|error| if self.tried.is_empty() { error } else { error.with_certainty(Unknown) })?;
            self.tried.sort();
            self.tried.dedup();
            if !self.tried.is_empty() {
                let claimed = self.handle.ops.claimed_now(&self.tried, self.revision);
                let claimed = self.handle.read("claim", claimed, None).await;
                rows = claimed.map_err(|error| error.with_certainty(Unknown))?;
            }
        }
        if self.refusal.is_some() && rows.len() < self.limit() {
            let has_some = !rows.is_empty();
            let gone_on = self.past_refusals(&mut rows).await;
            gone_on.map_err(|error| if has_some { error.with_certainty(Unknown) } else { error })?;
        }
        match self.refusal {
            // There may be more: not to be mistaken for an empty queue.
            Some(refusal) if rows.is_empty() => Err(refusal.with_certainty(NotApplied)),
            // Claimed, but for nobody: by now a sweep may have given them to others.
            _ if !rows.is_empty() && has_run_out(self.request.lease(), self.since) => {
                Err(Error::new(ErrorKind::Unavailable, Unknown, "claim: the answer came after the lease had run out"))
            }
            _ => Ok(Claimed::collect(rows.iter().map(row::job))),
        }
    }
}

/// Whether a lease that began after this may be over.
fn has_run_out(lease: Lease, since: Instant) -> bool {
    lease.duration() >= SHORTEST_LEASE && since.elapsed() >= lease.duration()
}

impl Handle {
    pub(crate) async fn claim(&self, request: &ClaimRequest) -> Result<Claimed> {
        let wait = Wait::of(request.lease());
        let claim = Claim {
            handle: self,
            request,
            revision: Revision::random(),
            wait,
            since: Instant::now(),
            gives_up: wait.rows.min(Instant::now() + self.lock_timeout),
            tried: Vec::new(),
            refusal: None,
        };
        let longest = wait.majority.saturating_duration_since(Instant::now());
        within("claim", Writes::Rows, longest, claim.run()).await
    }

    /// Renews leases: all in one command, and if that meets a row which it would have to wait for, row by row.
    pub(crate) async fn extend(&self, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        let wait = Wait::of(lease);
        let longest = wait.majority.saturating_duration_since(Instant::now());
        within("extend", Writes::Rows, longest, async {
            let passed = self.extend_all(held, lease, wait).await?;
            // Who is still held now was held then: a claim that is lost does not come back.
            let rows = self.read("extend", self.ops.executions(held.iter().map(|held| held.id)), None).await;
            let rows = rows.map_err(|error| error.with_certainty(Unknown))?;
            let rows: HashMap<_, _> = rows.iter().map(|row| (row::id(row), row)).collect();
            let beat = |held: &Held| match rows.get(&held.id).is_some_and(|row| row::shows(row, held)) {
                false => Beat::Lost,
                true if passed.contains(held) => Beat::Extended,
                true => Beat::Busy,
            };
            Ok(held.iter().map(beat).collect())
        })
        .await
    }

    /// The claims whose rows were written, if they are still held.
    async fn extend_all(&self, held: &[Held], lease: Lease, wait: Wait) -> Result<Passed> {
        let mut claims: HashMap<_, Vec<&Held>> = HashMap::new();
        for held in held {
            claims.entry((held.revision, &held.worker)).or_default().push(held);
        }
        let claims: Vec<_> = claims.into_values().collect();
        let command = self.ops.extend(&claims, lease, self.offset());
        let patience = wait.at_most(self.patience(held.len()));
        let reply = self.write_until("extend", command, Writes::Rows, patience, wait.majority).await;
        let refused: HashSet<_> = match reply {
            Ok(reply) => item_errors(&reply).into_iter().map(|error| error.index).collect(),
            Err(error) if error.kind() == ErrorKind::Transient => (0..claims.len()).collect(),
            Err(error) => return Err(error),
        };
        let mut passed = Passed::default();
        let mut single = Vec::new();
        for (index, claim) in claims.iter().enumerate() {
            match refused.contains(&index) {
                false => passed.0.extend(claim.iter().map(|held| (held.id, held.revision))),
                true => single.extend(claim.iter().copied()),
            }
        }
        let calls: Vec<_> = single.into_iter().map(|held| self.extend_one(held, lease, wait)).collect();
        let mut written = stream::iter(calls).buffer_unordered(AT_ONCE);
        while let Some(written) = written.next().await {
            passed.0.extend(written?);
        }
        Ok(passed)
    }

    /// The claim, if its row could be written in time.
    async fn extend_one(&self, held: &Held, lease: Lease, wait: Wait) -> Result<Option<(JobId, Revision)>> {
        for patience in ROW_WAITS {
            if wait.is_over() {
                break;
            }
            let command = self.ops.extend(&[vec![held]], lease, self.offset());
            match self.write_until("extend", command, Writes::Row, wait.at_most(patience), wait.majority).await {
                Ok(reply) => return Ok(item_errors(&reply).is_empty().then_some((held.id, held.revision))),
                Err(error) if error.kind() == ErrorKind::Transient => {}
                Err(error) => return Err(error.with_certainty(Unknown)),
            }
        }
        Ok(None)
    }
}

/// Rows that were written if they were held.
#[derive(Default)]
struct Passed(HashSet<(JobId, Revision)>);

impl Passed {
    fn contains(&self, held: &Held) -> bool {
        self.0.contains(&(held.id, held.revision))
    }
}
