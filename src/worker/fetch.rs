//! Claims for the free slots, and starts what the claims bring.

use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use queue_core::Beat;
use queue_core::ClaimRequest;
use queue_core::Claimed;
use queue_core::Error;
use queue_core::Job;
use queue_core::JobState;
use queue_core::Limit;
use queue_core::Name;
use queue_core::Transition;
use queue_core::Transitioner;
use queue_core::Unreadable;
use tokio::sync::Notify;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio::time::sleep;
use tokio::time::sleep_until;
use tokio::time::timeout;

use super::Shared;
use super::heartbeat::no_answer;
use super::held::Claim;
use super::held::lock;
use super::report::Counted;
use super::reserve::Reserved;
use super::run;
use super::settle::Pending;
use super::slots::Slots;
use crate::repeat::Backoff;
use crate::repeat::is_busy;
use crate::repeat::jittered;

/// How often a claim that the store was too busy for is made again before the next poll.
const BUSY_CLAIMS: u32 = 3;

/// The shortest pause between two looks for work when nothing was found.
const SHORTEST_POLL: Duration = Duration::from_millis(20);

/// Since when the worker is told to stop.
pub(super) type Stopped = watch::Receiver<Option<Instant>>;

pub(super) struct Fetch {
    shared: Arc<Shared>,
    kinds: Vec<Name>,
    queues: Vec<FromQueue>,
    /// A handler has ended.
    freed: Arc<Notify>,
    stopped: Stopped,
    results: mpsc::Sender<Pending>,
    pub(super) handlers: JoinSet<()>,
}

/// A queue that jobs are claimed from.
struct FromQueue {
    name: Name,
    slots: Arc<Slots>,
    /// There may be more to claim: the last claim brought all that it asked for, or it is time to look again.
    more: bool,
    reserved: Reserved,
    /// How many of them there should be.
    prefetch: usize,
    /// The last start of reserved jobs failed, and it is not yet time to try again.
    waits: bool,
    /// When to look again, if nothing wakes the worker before.
    next_look: Instant,
    idle: Backoff,
}

impl FromQueue {
    /// How many jobs a claim should bring. Jobs are reserved half of them at a time, so that one claim is for many.
    fn wanted(&self) -> usize {
        let (free, reserved) = (self.slots.free(), self.reserved.len());
        let wanted = match self.prefetch {
            0 => free,
            prefetch if reserved * 2 <= prefetch => (free + prefetch).saturating_sub(reserved),
            _ => 0,
        };
        if self.more { wanted.min(Limit::MAX.rows()) } else { 0 }
    }

    /// How many reserved jobs can be started.
    fn startable(&self) -> usize {
        if self.waits { 0 } else { self.slots.free().min(self.reserved.len()) }
    }

    /// It is time to look again.
    fn look(&mut self) {
        (self.more, self.waits) = (true, false);
    }

    fn is_waiting(&self) -> bool {
        !self.more || self.waits
    }

    fn has_work(&self) -> bool {
        self.wanted() > 0 || self.startable() > 0
    }
}

/// What a round over the queues came to, from worst to best.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Round {
    Failed,
    Nothing,
    Jobs,
}

/// Who wakes the worker.
enum Wake<'b> {
    /// Subscribed once it has been polled.
    Waiting(Pin<Box<dyn Future<Output = Result<(), Error>> + Send + 'b>>),
    Came,
    /// Polling goes on.
    Failed,
}

impl Wake<'_> {
    /// Subscribes: what becomes due from now on is not missed.
    async fn subscribe(&mut self) {
        std::future::poll_fn(|context| {
            if let Self::Waiting(wait) = self
                && let Poll::Ready(ended) = wait.as_mut().poll(context)
            {
                self.ended(ended);
            }
            Poll::Ready(())
        })
        .await;
    }

    /// Resolves when work may have become due.
    async fn came(&mut self) {
        if let Self::Waiting(wait) = self {
            let ended = wait.await;
            self.ended(ended);
        }
        if matches!(self, Self::Failed) {
            std::future::pending::<()>().await;
        }
    }

    fn ended(&mut self, ended: Result<(), Error>) {
        *self = match ended {
            Ok(()) => Self::Came,
            Err(error) => {
                tracing::warn!(name: "worker.wait_failed", %error, "cannot wait for work, polling goes on");
                Self::Failed
            }
        };
    }
}

impl Fetch {
    pub(super) fn new(shared: Arc<Shared>, results: mpsc::Sender<Pending>, stopped: Stopped) -> Self {
        let kinds = shared.handlers.keys().cloned().collect();
        let freed = Arc::new(Notify::new());
        let several =
            Duration::from_secs(1).saturating_mul(u32::try_from(shared.config.queues.len()).unwrap_or(u32::MAX));
        let longest = match shared.config.queues.len() {
            1 => shared.config.poll,
            _ => shared.config.poll.max(several),
        };
        let queue = |(name, concurrency): &(Name, usize)| FromQueue {
            name: name.clone(),
            slots: Slots::new(*concurrency, Arc::clone(&freed)),
            more: true,
            reserved: Reserved::default(),
            prefetch: shared.config.prefetch,
            waits: false,
            next_look: Instant::now(),
            idle: Backoff::new(SHORTEST_POLL, longest),
        };
        let queues = shared.config.queues.iter().map(queue).collect();
        Self { shared, kinds, queues, freed, stopped, results, handlers: JoinSet::new() }
    }

    /// Works until it is told to stop. A claim that is under way then is awaited, and what it brings is released.
    pub(super) async fn run(&mut self) {
        let shared = Arc::clone(&self.shared);
        let names: Vec<_> = self.queues.iter().map(|queue| queue.name.clone()).collect();
        // What wakes a worker for nothing, its own outcomes among it, must not keep it busy.
        let mut nothing = Backoff::new(Duration::from_millis(1), Duration::from_millis(100).min(shared.config.poll));
        let mut woken_for_nothing = false;
        let mut wake = Wake::Waiting(shared.backend.wait_for_work(&names));
        loop {
            while self.handlers.try_join_next().is_some() {}
            if self.is_stopped() {
                return;
            }
            wake.subscribe().await;
            let round = self.round().await;
            if round == Some(Round::Jobs) {
                nothing.reset();
                woken_for_nothing = false;
            }
            let next_look = self.queues.iter().filter(|queue| queue.is_waiting()).map(|queue| queue.next_look).min();
            let woken = async {
                wake.came().await;
                if woken_for_nothing {
                    sleep(nothing.pause()).await;
                }
            };
            tokio::select! {
                biased;
                _ = stopped(&mut self.stopped) => return,
                () = sleep_until(next_look.unwrap_or_else(Instant::now)), if next_look.is_some() => {
                    woken_for_nothing = false;
                    let now = Instant::now();
                    self.queues.iter_mut().filter(|queue| queue.next_look <= now).for_each(FromQueue::look);
                }
                () = room(&self.queues, &self.freed) => {}
                () = woken, if next_look.is_some() && round != Some(Round::Failed) => {
                    woken_for_nothing = true;
                    self.queues.iter_mut().for_each(FromQueue::look);
                    wake = Wake::Waiting(shared.backend.wait_for_work(&names));
                }
            }
            // Not at once: the next look is soon enough.
            if matches!(wake, Wake::Failed) && self.queues.iter().any(|queue| queue.more) {
                wake = Wake::Waiting(shared.backend.wait_for_work(&names));
            }
        }
    }

    /// One claim for each queue that may have more and wants some; `None` if there is no such queue. Reserved jobs are started
    /// before and after.
    async fn round(&mut self) -> Option<Round> {
        let mut round = None;
        for index in 0..self.queues.len() {
            self.start_reserved(index).await;
            let wanted = self.queues[index].wanted();
            if wanted == 0 {
                continue;
            }
            if self.is_stopped() {
                break;
            }
            self.queues[index].more = false;
            let came = match self.claim(index, wanted).await {
                Ok(0) => Round::Nothing,
                Ok(jobs) => {
                    let queue = &mut self.queues[index];
                    queue.more = jobs >= wanted;
                    queue.idle.reset();
                    self.start_reserved(index).await;
                    Round::Jobs
                }
                Err(error) => {
                    tracing::warn!(name: "worker.claim_failed", queue = %self.queues[index].name, %error, "a claim failed");
                    Round::Failed
                }
            };
            let queue = &mut self.queues[index];
            queue.next_look = Instant::now() + queue.idle.pause();
            round = round.max(Some(came));
        }
        round
    }

    async fn start_reserved(&mut self, from: usize) {
        let queue = &mut self.queues[from];
        let most = queue.startable();
        if most == 0 || self.stopped.borrow().is_some() {
            return;
        }
        let (started, more) = queue.reserved.start(&self.shared, most).await;
        if !more {
            queue.waits = true;
            queue.next_look = Instant::now() + jittered(SHORTEST_POLL);
        }
        for (claim, job) in started {
            self.start(from, claim, job).await;
        }
    }

    async fn claim(&mut self, from: usize, limit: usize) -> Result<usize, Error> {
        let shared = Arc::clone(&self.shared);
        let lease = shared.config.lease;
        let queue = self.queues[from].name.clone();
        let request = ClaimRequest::new(queue, self.kinds.clone(), shared.id.clone(), lease, Limit::new(limit)?)?;
        let request = if shared.config.prefetch > 0 { request.reserve() } else { request };
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
                    self.take_up(from, claimed, sent + lease.duration()).await;
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

    async fn take_up(&mut self, from: usize, claimed: Claimed, deadline: Instant) {
        let Claimed { jobs, unreadable } = claimed;
        self.shared.count(Counted::Claimed, jobs.len() + unreadable.len());
        let claims = jobs.into_iter().filter_map(|job| Some((Claim::new(job.execution.clone(), deadline)?, job)));
        let claims: Vec<_> = claims.collect();
        for (claim, _) in &claims {
            self.shared.held.insert(Arc::clone(claim));
        }
        for row in unreadable {
            self.unreadable(row, deadline).await;
        }
        for (claim, job) in self.still_held(claims, deadline).await {
            match self.shared.config.prefetch {
                0 => self.start(from, claim, job).await,
                _ => self.queues[from].reserved.keep(&self.shared, claim, job),
            }
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

    async fn start(&mut self, from: usize, claim: Arc<Claim>, job: Job) {
        let Some(slot) = self.queues[from].slots.take() else {
            return self.release(claim).await;
        };
        if self.is_stopped() || !self.shared.handlers.contains_key(&job.kind) {
            return self.release(claim).await;
        }
        let (shared, results, told) = (Arc::clone(&self.shared), self.results.clone(), self.stopped.clone());
        self.handlers.spawn(async move {
            run::job(shared, claim, job, results, told).await;
            drop(slot);
        });
    }

    /// Gives back what was reserved and will not be started.
    pub(super) async fn release_reserved(&mut self) {
        let reserved: Vec<_> = self.queues.iter_mut().flat_map(|queue| queue.reserved.take()).collect();
        for claim in reserved {
            self.release(claim).await;
        }
    }

    pub(super) async fn release(&self, claim: Arc<Claim>) {
        Pending::offer(&self.shared, claim, &Transition::Release, &self.results).await;
    }

    /// A row that cannot be read is a failed attempt, not given back: otherwise it would come again for ever.
    async fn unreadable(&self, row: Unreadable, deadline: Instant) {
        let Unreadable { id, execution, reason } = row;
        tracing::warn!(name: "worker.unreadable", { job.id = %id, %reason }, "a claimed row cannot be read");
        let Some(execution) = execution else { return };
        let execution = match execution.state {
            // An attempt that is to count must have begun.
            JobState::Claimed => {
                let start = Transition::Start { lease: self.shared.config.lease };
                let transitioner = Transitioner::new(&*self.shared.backend);
                let started = timeout(self.shared.config.lease.duration() / 3, transitioner.apply(&execution, &start));
                match started.await {
                    Ok(Ok(settled)) => settled.execution().clone(),
                    // Not held, so it is given back as an orphan, and comes again.
                    _ => return,
                }
            }
            _ => *execution,
        };
        let Some(claim) = Claim::new(execution, deadline) else { return };
        self.shared.held.insert(Arc::clone(&claim));
        let error = format!("this program cannot read the job: {reason}").into();
        let available = self.shared.config.retry.after(claim.execution().attempt);
        Pending::offer(&self.shared, claim, &Transition::Retry { error, available }, &self.results).await;
    }
}

/// Resolves when more can be claimed. As long as handlers keep ending it lets them, so that one claim fills many slots.
async fn room(queues: &[FromQueue], freed: &Notify) {
    while !queues.iter().any(FromQueue::has_work) {
        freed.notified().await;
    }
    let free = || queues.iter().map(|queue| queue.slots.free()).sum::<usize>();
    loop {
        let before = free();
        tokio::task::yield_now().await;
        if free() <= before {
            return;
        }
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
