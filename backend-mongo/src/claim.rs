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
use crate::handle::ROW_WAIT;
use crate::handle::changed;
use crate::handle::patience;
use crate::ops::KINDS;
use crate::row;

/// A third of the lease: waiting longer would leave too little of it. A lease so short that this is next to nothing is not
/// kept up by more than a moment.
fn third(lease: Lease) -> Duration {
    (lease.duration() / 3).max(ROW_WAIT)
}

/// How often rows that could not be had in their time are tried: a server that is slow looks like a row that is locked.
const PASSES: usize = 4;

/// One claim on its way.
struct Claim<'a> {
    handle: &'a Handle,
    request: &'a ClaimRequest,
    /// The claim's own, which says which rows it won.
    revision: Revision,
    deadline: Instant,
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

    /// The row that a command for a single one claimed, if it did.
    async fn one(&mut self, command: Document, wait: Duration) -> Result<Option<Document>> {
        let reply = self.handle.write("claim", command, Writes::Row, wait, self.deadline).await;
        match reply {
            Ok(reply) => Ok(reply.get_document("value").ok().cloned()),
            Err(error) if is_about_a_row(&error) => {
                self.refusal = Some(error);
                Ok(None)
            }
            Err(error) => Err(error),
        }
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
            let wait = patience(window.len());
            let reply = self.handle.write("claim", command, Writes::Rows, wait, self.deadline).await;
            let won = match reply {
                Ok(reply) => match item_errors(&reply).pop() {
                    None => changed(&reply),
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
            if Instant::now() >= self.deadline {
                let message = "claim: others were faster, again and again";
                self.refusal = Some(Error::not_applied(ErrorKind::Transient, message));
                return Ok(());
            }
            is_first = false;
        }
    }

    /// Claims row by row, past those that cannot be had.
    async fn past_refusals(&mut self, rows: &mut Vec<Document>) -> Result<()> {
        let missing = self.limit().saturating_sub(rows.len());
        let candidates = self.candidates(4 * missing + 16).await?;
        if candidates.is_empty() {
            // What could not be had is gone.
            self.refusal = None;
        }
        let mut left = candidates.into_iter();
        while rows.len() < self.limit() && Instant::now() < self.deadline {
            let next: Vec<_> = left.by_ref().take(self.limit() - rows.len()).collect();
            if next.is_empty() {
                break;
            }
            let one = async |id: JobId| {
                let command = self.handle.ops.claim_this(self.request, id, self.revision, self.offset());
                self.handle.write("claim", command, Writes::Row, ROW_WAIT, self.deadline).await
            };
            let replies: Vec<_> = stream::iter(next).map(one).buffered(AT_ONCE).collect().await;
            for reply in replies {
                match reply {
                    Ok(reply) => rows.extend(reply.get_document("value").ok().cloned()),
                    Err(error) if is_about_a_row(&error) => self.refusal = Some(error),
                    Err(error) => return Err(error.with_certainty(Unknown)),
                }
            }
        }
        Ok(())
    }

    async fn run(mut self) -> Result<Claimed> {
        let mut rows = Vec::new();
        if self.limit() == 1 && self.request.kinds().len() <= KINDS {
            let command = self.handle.ops.claim_first(self.request, self.revision, self.offset());
            rows.extend(self.one(command, patience(1)).await?);
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
        for _ in 0..PASSES {
            if self.refusal.is_none() || rows.len() >= self.limit() || Instant::now() >= self.deadline {
                break;
            }
            let has_some = !rows.is_empty();
            let gone_on = self.past_refusals(&mut rows).await;
            gone_on.map_err(|error| if has_some { error.with_certainty(Unknown) } else { error })?;
            if !rows.is_empty() {
                break;
            }
        }
        match self.refusal {
            // There may be more: not to be mistaken for an empty queue.
            Some(refusal) if rows.is_empty() => Err(refusal.with_certainty(NotApplied)),
            _ => Ok(Claimed::collect(rows.iter().map(row::job))),
        }
    }
}

/// A number below this one.
fn random(below: usize) -> usize {
    let (_, random) = Revision::random().as_uuid().as_u64_pair();
    usize::try_from(random % below.max(1) as u64).unwrap_or_default()
}

impl Handle {
    pub(crate) async fn claim(&self, request: &ClaimRequest) -> Result<Claimed> {
        let wait = third(request.lease());
        let claim = Claim {
            handle: self,
            request,
            revision: Revision::random(),
            deadline: Instant::now() + wait,
            tried: Vec::new(),
            refusal: None,
        };
        crate::handle::within("claim", Writes::Rows, wait, claim.run()).await
    }

    /// Renews leases: all in one command, and if that meets a row which it would have to wait for, row by row.
    pub(crate) async fn extend(&self, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
        let wait = third(lease);
        let deadline = Instant::now() + wait;
        crate::handle::within("extend", Writes::Rows, wait, async {
            let passed = self.extend_all(held, lease, deadline).await?;
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
    async fn extend_all(&self, held: &[Held], lease: Lease, deadline: Instant) -> Result<Passed> {
        let mut claims: HashMap<_, Vec<&Held>> = HashMap::new();
        for held in held {
            claims.entry((held.revision, &held.worker)).or_default().push(held);
        }
        let claims: Vec<_> = claims.into_values().collect();
        let command = self.ops.extend(&claims, lease, self.offset());
        let reply = self.write("extend", command, Writes::Rows, patience(held.len()), deadline).await;
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
        for _ in 0..PASSES {
            let calls: Vec<_> = single.iter().map(|held| self.extend_one(held, lease, deadline)).collect();
            let written: Vec<_> = stream::iter(calls).buffered(AT_ONCE).collect().await;
            let mut left = Vec::new();
            for (held, is_written) in single.into_iter().zip(written) {
                match is_written? {
                    true => drop(passed.0.insert((held.id, held.revision))),
                    false => left.push(held),
                }
            }
            single = left;
        }
        Ok(passed)
    }

    async fn extend_one(&self, held: &Held, lease: Lease, deadline: Instant) -> Result<bool> {
        if Instant::now() >= deadline {
            return Ok(false);
        }
        let command = self.ops.extend(&[vec![held]], lease, self.offset());
        match self.write("extend", command, Writes::Row, ROW_WAIT, deadline).await {
            Ok(reply) => Ok(item_errors(&reply).is_empty()),
            Err(error) if error.kind() == ErrorKind::Transient => Ok(false),
            Err(error) => Err(error.with_certainty(Unknown)),
        }
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
