//! Claims for the free slots, and starts what the claims bring.

use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use queue_core::Beat;
use queue_core::ClaimRequest;
use queue_core::Claimed;
use queue_core::Error;
use queue_core::Job;
use queue_core::Limit;
use queue_core::Name;
use queue_core::Transition;
use queue_core::Unreadable;
use tokio::sync::Semaphore;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio::time::sleep;
use tokio::time::timeout;

use super::Shared;
use super::heartbeat::no_answer;
use super::held::Claim;
use super::held::lock;
use super::run;
use super::settle::Pending;
use crate::repeat::Backoff;
use crate::repeat::is_busy;

/// How often a claim that the store was too busy for is made again before the next poll.
const BUSY_CLAIMS: u32 = 3;

/// The shortest pause between two looks for work when nothing was found.
const SHORTEST_POLL: Duration = Duration::from_millis(20);

/// Since when the worker is told to stop.
pub(super) type Stopped = watch::Receiver<Option<Instant>>;

pub(super) struct Fetch {
    shared: Arc<Shared>,
    kinds: Vec<Name>,
    slots: Arc<Semaphore>,
    stopped: Stopped,
    /// The queue that is asked first in the next round.
    first: usize,
    results: mpsc::Sender<Pending>,
    pub(super) handlers: JoinSet<()>,
}

/// What a round over the queues came to, from worst to best.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Round {
    Failed,
    Empty,
    /// Some jobs, and no more were to be had.
    Some,
    /// As many jobs as were asked for: there may be more.
    Full,
}

impl Fetch {
    pub(super) fn new(shared: Arc<Shared>, results: mpsc::Sender<Pending>, stopped: Stopped) -> Self {
        let kinds = shared.handlers.keys().cloned().collect();
        let slots = Arc::new(Semaphore::new(shared.config.concurrency));
        Self { shared, kinds, slots, stopped, first: 0, results, handlers: JoinSet::new() }
    }

    /// Works until it is told to stop. A claim that is under way then is awaited, and what it brings is released.
    pub(super) async fn run(&mut self) {
        let poll = self.shared.config.poll;
        let mut idle = Backoff::new(SHORTEST_POLL, poll);
        // What wakes a worker for nothing, its own outcomes among it, must not keep it busy.
        let mut nothing = Backoff::new(Duration::from_millis(1), Duration::from_millis(100).min(poll));
        let mut woken_for_nothing = false;
        loop {
            self.free_slots().await;
            if self.is_stopped() {
                return;
            }
            let shared = Arc::clone(&self.shared);
            // Subscribed before the claim: what becomes due in between wakes it.
            let mut wake = pin!(shared.backend.wait_for_work(&shared.config.queues));
            let early = std::future::poll_fn(|context| match wake.as_mut().poll(context) {
                Poll::Ready(ended) => Poll::Ready(Some(ended)),
                Poll::Pending => Poll::Ready(None),
            })
            .await;
            let round = self.round().await;
            if round >= Round::Some {
                idle.reset();
                nothing.reset();
                woken_for_nothing = false;
            }
            if round == Round::Full {
                continue;
            }
            let woken = async {
                let ended = match early {
                    Some(ended) => ended,
                    None => wake.await,
                };
                if let Err(error) = ended {
                    tracing::warn!(name: "worker.wait_failed", %error, "cannot wait for work, polling goes on");
                    std::future::pending().await
                }
                if woken_for_nothing {
                    sleep(nothing.pause()).await;
                }
            };
            woken_for_nothing = tokio::select! {
                _ = stopped(&mut self.stopped) => false,
                () = sleep(idle.pause()) => false,
                () = woken, if round > Round::Failed => true,
            };
        }
    }

    /// Resolves when there are free slots, or when it is told to stop. As long as handlers keep ending it lets them, so that one
    /// claim fills many slots.
    async fn free_slots(&mut self) {
        tokio::select! {
            _ = stopped(&mut self.stopped) => return,
            _ = self.slots.acquire() => {}
        }
        loop {
            let free = self.slots.available_permits();
            tokio::task::yield_now().await;
            if self.slots.available_permits() <= free {
                break;
            }
        }
        while self.handlers.try_join_next().is_some() {}
    }

    /// One claim for each queue while there are free slots. The queues take turns in being first.
    async fn round(&mut self) -> Round {
        let queues = self.shared.config.queues.clone();
        let first = self.first;
        self.first = (first + 1) % queues.len();
        let mut round = Round::Failed;
        for queue in queues.iter().cycle().skip(first).take(queues.len()) {
            let free = self.slots.available_permits();
            if free == 0 || self.is_stopped() {
                break;
            }
            let came = match self.claim(queue, free).await {
                Ok(0) => Round::Empty,
                Ok(jobs) if jobs < free.min(Limit::MAX.rows()) => Round::Some,
                Ok(_) => Round::Full,
                Err(error) => {
                    tracing::warn!(name: "worker.claim_failed", queue = %queue, %error, "a claim failed");
                    Round::Failed
                }
            };
            round = round.max(came);
        }
        round
    }

    async fn claim(&mut self, queue: &Name, free: usize) -> Result<usize, Error> {
        let shared = Arc::clone(&self.shared);
        let lease = shared.config.lease;
        let limit = Limit::new(free.min(Limit::MAX.rows()))?;
        let request = ClaimRequest::new(queue.clone(), self.kinds.clone(), shared.id.clone(), lease, limit)?;
        let mut busy = Backoff::default();
        let mut left = BUSY_CLAIMS;
        loop {
            let sent = Instant::now();
            *lock(&shared.claiming) = Some(sent);
            // A claim that hangs must not be the last one. What it may have claimed is released as an orphan.
            let answer = timeout(lease.duration().saturating_mul(2), shared.backend.claim(&request)).await;
            match answer.unwrap_or_else(|_| Err(no_answer())) {
                Ok(claimed) => {
                    let count = claimed.jobs.len() + claimed.unreadable.len();
                    self.take_up(claimed, sent + lease.duration()).await;
                    *lock(&shared.claiming) = None;
                    return Ok(count);
                }
                // An unknown outcome is never repeated: what it may have claimed is released as an orphan.
                Err(error) if is_busy(&error) && left > 0 && !self.is_stopped() => left -= 1,
                Err(error) => {
                    *lock(&shared.claiming) = None;
                    return Err(error);
                }
            }
            sleep(busy.pause()).await;
        }
    }

    async fn take_up(&mut self, claimed: Claimed, deadline: Instant) {
        let Claimed { jobs, unreadable } = claimed;
        self.shared.count(|report| report.claimed += (jobs.len() + unreadable.len()) as u64);
        let claims = jobs.into_iter().filter_map(|job| Some((Claim::new(job.execution.clone(), deadline)?, job)));
        let claims: Vec<_> = claims.collect();
        for (claim, _) in &claims {
            self.shared.held.insert(Arc::clone(claim));
        }
        for row in unreadable {
            self.unreadable(row, deadline).await;
        }
        for (claim, job) in self.still_held(claims, deadline).await {
            self.start(claim, job).await;
        }
    }

    /// An answer that took longer than the lease says nothing about who holds the jobs now: one heartbeat does.
    async fn still_held(&self, mut claims: Vec<(Arc<Claim>, Job)>, deadline: Instant) -> Vec<(Arc<Claim>, Job)> {
        let sent = Instant::now();
        if sent < deadline || claims.is_empty() {
            return claims;
        }
        let lease = self.shared.config.lease;
        let held: Vec<_> = claims.iter().map(|(claim, _)| claim.held().clone()).collect();
        let beats = timeout(self.shared.config.heartbeat, self.shared.backend.extend_leases(&held, lease)).await;
        let beats = match beats.unwrap_or_else(|_| Err(no_answer())) {
            Ok(beats) => beats,
            Err(error) => {
                tracing::warn!(name: "worker.heartbeat_failed", %error, "claims came late and could not be renewed");
                Vec::new()
            }
        };
        let mut beats = beats.into_iter();
        claims.retain(|(claim, _)| {
            let extended = beats.next() == Some(Beat::Extended);
            match extended {
                true => claim.renewed_until(sent + lease.duration()),
                false => drop(self.shared.held.remove(claim)),
            }
            extended
        });
        claims
    }

    fn is_stopped(&self) -> bool {
        self.stopped.borrow().is_some()
    }

    async fn start(&mut self, claim: Arc<Claim>, job: Job) {
        let Ok(slot) = Arc::clone(&self.slots).try_acquire_owned() else {
            return self.release(claim).await;
        };
        if self.is_stopped() || !self.shared.handlers.contains_key(&job.kind) {
            return self.release(claim).await;
        }
        let (shared, results, told) = (Arc::clone(&self.shared), self.results.clone(), self.stopped.clone());
        self.handlers.spawn(async move {
            run::job(shared, claim, job.kind, job.payload, results, told).await;
            drop(slot);
        });
    }

    pub(super) async fn release(&self, claim: Arc<Claim>) {
        Pending::offer(&self.shared, claim, &Transition::Release, &self.results).await;
    }

    /// A row that cannot be read is a failed attempt, not given back: otherwise it would come again for ever.
    async fn unreadable(&self, row: Unreadable, deadline: Instant) {
        let Unreadable { id, execution, reason } = row;
        tracing::warn!(name: "worker.unreadable", { job.id = %id, %reason }, "a claimed row cannot be read");
        let Some(claim) = execution.and_then(|execution| Claim::new(*execution, deadline)) else {
            return;
        };
        self.shared.held.insert(Arc::clone(&claim));
        let error = format!("this program cannot read the job: {reason}").into();
        let available = self.shared.config.retry.after(claim.execution().attempt);
        Pending::offer(&self.shared, claim, &Transition::Retry { error, available }, &self.results).await;
    }
}

/// Resolves when the worker is told to stop.
pub(super) async fn stopped(told: &mut Stopped) -> Instant {
    let since = told.wait_for(Option::is_some).await.ok().and_then(|since| *since);
    match since {
        Some(since) => since,
        // Nobody is left to tell it: the worker is being dropped.
        None => std::future::pending().await,
    }
}
