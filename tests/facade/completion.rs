//! Completing a job in the transaction of what its handler wrote, on every store that has transactions.

use std::sync::Arc;
use std::time::Duration;

use fenced_queue::contract::*;
use fenced_queue::*;
use tokio::sync::mpsc;

use crate::common::ADD;
use crate::common::Add;
use crate::common::Running;

/// An application with a table of its own beside the queue.
pub(crate) trait Application: Send + Sync + 'static {
    type Backend: Transactional + Inspect + 'static;

    fn queue(&self) -> Queue<Self::Backend>;

    /// Adds a row to the table.
    fn write(connection: &mut <Self::Backend as Transactional>::Connection) -> impl Future<Output = ()> + Send;

    /// How many rows the table has.
    fn written(&self) -> impl Future<Output = u64> + Send;
}

/// What a handler does between its write and the end of its transaction.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    Completes,
    LosesTheJob,
    Fails,
    CompletesAndFails,
    CompletesTwice,
}

/// The job after one run of a handler, what the handler saw, and what the worker counted.
async fn run<A: Application>(application: Arc<A>, then: Then) -> (Job, String, Report) {
    let queue = application.queue();
    let id = queue.enqueue(&ADD).await.expect("stored").id();
    let (told, mut said) = mpsc::unbounded_channel();
    let handler = {
        let queue = queue.clone();
        move |context: JobContext, _: Add| {
            let (queue, told) = (queue.clone(), told.clone());
            async move {
                let mut transaction = context.begin(&queue).await?;
                A::write(&mut transaction).await;
                if then == Then::LosesTheJob {
                    // A store with one writer lets nobody in beside the transaction: so before its first write.
                    drop(transaction);
                    Transitioner::new(&**queue.backend()).apply(context.execution(), &Transition::Release).await?;
                    transaction = context.begin(&queue).await?;
                    A::write(&mut transaction).await;
                }
                if then == Then::Fails {
                    return Err(NotDone::fail("no"));
                }
                let completed = transaction.complete(&"in one").await;
                let _ = told.send(completed.as_ref().map_or_else(ToString::to_string, |()| "completed".to_owned()));
                completed?;
                match then {
                    Then::CompletesAndFails => Err(NotDone::fail("too late")),
                    Then::CompletesTwice => {
                        let again = context.begin(&queue).await?.complete(&"twice").await;
                        let _ = told.send(again.expect_err("it has an outcome").to_string());
                        Ok("another")
                    }
                    _ => Ok("another"),
                }
            }
        }
    };
    let hour = Duration::from_secs(3_600);
    let builder = Worker::builder(&queue).lease(Duration::from_secs(9)).concurrency(1).register(handler);
    let builder = builder.retry(RetryPolicy::exponential(hour, hour));
    let running = Running::start(builder.build().expect("a worker"));
    let text = match then {
        Then::Fails => String::new(),
        _ => said.recv().await.expect("it has run"),
    };
    if then == Then::CompletesTwice {
        let again = said.recv().await.expect("it has tried");
        assert_eq!(again, format!("this execution of job {id} has an outcome already"));
    }
    if then == Then::Fails {
        queue.ended(id).await.expect("ended");
    }
    let report = running.stop().await;
    (queue.get(id).await.expect("readable").expect("there"), text, report)
}

pub(crate) async fn both_or_neither<A: Application>(application: A) {
    let application = Arc::new(application);
    let queue = application.queue();
    queue.migrate().await.expect("migrates");

    let (job, text, report) = run(Arc::clone(&application), Then::Completes).await;
    assert_eq!((job.state(), text.as_str()), (JobState::Completed, "completed"));
    assert_eq!(job.result.expect("a result").as_str(), "\"in one\"", "what was recorded with the rows");
    assert_eq!((report.completed, report.conflicts, report.unrecorded, report.left), (1, 0, 0, 0));
    assert_eq!(application.written().await, 1);

    let (job, text, report) = run(Arc::clone(&application), Then::CompletesAndFails).await;
    assert_eq!((job.state(), job.errors.len()), (JobState::Completed, 0), "its word stands: {text}, {:?}", job.errors);
    assert_eq!((report.completed, report.failed), (1, 0));
    assert_eq!(application.written().await, 2);

    run(Arc::clone(&application), Then::CompletesTwice).await;
    assert_eq!(application.written().await, 3);

    // D8
    let (job, text, report) = run(Arc::clone(&application), Then::LosesTheJob).await;
    assert!(text.contains("complete") && text.contains("now"), "a conflict that shows both moments: {text}");
    assert_eq!(report.completed, 0);
    assert_ne!(job.state(), JobState::Completed);
    assert_eq!(application.written().await, 3, "what it wrote is gone with its claim");
    queue.cancel(job.id(), "enough").await.expect("canceled");

    let (job, _, report) = run(Arc::clone(&application), Then::Fails).await;
    assert_eq!((job.state(), report.failed), (JobState::Failed, 1));
    assert_eq!(application.written().await, 3, "and with a failed attempt");
}

#[cfg(feature = "sqlite")]
mod on_sqlite {
    use async_trait::async_trait;
    use fenced_queue::sqlite::SqliteBackend;
    use fenced_queue::sqlite::SqliteTransaction;
    use fenced_queue::sqlite::sqlx;
    use fenced_queue::sqlite::sqlx::SqliteConnection;

    use super::*;

    struct OnSqlite {
        backend: SqliteBackend,
        _folder: tempfile::TempDir,
    }

    impl OnSqlite {
        async fn open() -> Self {
            let folder = tempfile::tempdir().expect("a folder");
            let backend = SqliteBackend::open(folder.path().join("queue.db")).await.expect("opens");
            backend.migrate().await.expect("migrates");
            let mut transaction = backend.begin().await.expect("begins");
            sqlx::query("CREATE TABLE written (n INTEGER)").execute(&mut *transaction).await.expect("creates");
            backend.commit(transaction).await.expect("commits");
            Self { backend, _folder: folder }
        }
    }

    async fn add(connection: &mut SqliteConnection) {
        sqlx::query("INSERT INTO written VALUES (1)").execute(connection).await.expect("writes");
    }

    async fn count(backend: &SqliteBackend) -> u64 {
        let mut transaction = backend.begin().await.expect("begins");
        let counted = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM written").fetch_one(&mut *transaction).await;
        u64::try_from(counted.expect("counts")).expect("a number")
    }

    impl Application for OnSqlite {
        type Backend = SqliteBackend;

        fn queue(&self) -> Queue<SqliteBackend> {
            Queue::new(self.backend.clone())
        }

        async fn write(connection: &mut SqliteConnection) {
            add(connection).await;
        }

        async fn written(&self) -> u64 {
            count(&self.backend).await
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_a_handler_writes_and_its_outcome_are_both_there_or_neither() {
        both_or_neither(OnSqlite::open().await).await;
    }

    /// How a commit ends without an answer.
    #[derive(Clone, Copy)]
    enum Lost {
        AfterIt,
        BeforeIt,
    }

    struct LosesCommits(SqliteBackend, Lost);

    #[async_trait]
    impl Backend for LosesCommits {
        fn capabilities(&self) -> Capabilities {
            self.0.capabilities()
        }

        async fn migrate(&self) -> Result<()> {
            self.0.migrate().await
        }

        async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
            self.0.enqueue(jobs).await
        }

        async fn get(&self, id: JobId) -> Result<Option<Job>> {
            self.0.get(id).await
        }

        async fn claim(&self, request: &ClaimRequest) -> Result<Claimed> {
            self.0.claim(request).await
        }

        async fn update_if_current(&self, id: JobId, current: &Fingerprint, patch: &Patch) -> Result<Update> {
            self.0.update_if_current(id, current, patch).await
        }

        async fn extend_leases(&self, held: &[Held], lease: Lease) -> Result<Vec<Beat>> {
            self.0.extend_leases(held, lease).await
        }

        async fn stale(&self, after: Option<StaleCursor>, limit: Limit) -> Result<Page<Execution, StaleCursor>> {
            self.0.stale(after, limit).await
        }

        async fn claimed_by(
            &self,
            worker: &WorkerId,
            older_than: Delay,
            after: Option<JobId>,
            limit: Limit,
        ) -> Result<Page<Execution, JobId>> {
            self.0.claimed_by(worker, older_than, after, limit).await
        }
    }

    #[async_trait]
    impl Inspect for LosesCommits {
        async fn list(&self, filter: &ListFilter, after: Option<JobId>, limit: Limit) -> Result<Page<Job, JobId>> {
            self.0.list(filter, after, limit).await
        }

        async fn counts(&self) -> Result<Vec<Count>> {
            self.0.counts().await
        }

        async fn purge(&self, state: JobState, older_than: Delay, limit: Limit) -> Result<u64> {
            self.0.purge(state, older_than, limit).await
        }
    }

    #[async_trait]
    impl Transactional for LosesCommits {
        type Connection = SqliteConnection;
        type Transaction = SqliteTransaction;

        async fn begin(&self) -> Result<SqliteTransaction> {
            self.0.begin().await
        }

        async fn begin_for(&self, execution: &Execution) -> Result<SqliteTransaction> {
            self.0.begin_for(execution).await
        }

        async fn commit(&self, transaction: SqliteTransaction) -> Result<()> {
            match self.1 {
                Lost::AfterIt => self.0.commit(transaction).await?,
                Lost::BeforeIt => drop(transaction),
            }
            Err(crate::common::lost())
        }

        async fn enqueue_in(&self, connection: &mut SqliteConnection, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
            self.0.enqueue_in(connection, jobs).await
        }

        async fn update_if_current_in(
            &self,
            connection: &mut SqliteConnection,
            id: JobId,
            current: &Fingerprint,
            patch: &Patch,
        ) -> Result<Update> {
            self.0.update_if_current_in(connection, id, current, patch).await
        }
    }

    struct Losing(Arc<LosesCommits>, OnSqlite);

    impl Losing {
        async fn open(lost: Lost) -> Arc<Self> {
            let store = OnSqlite::open().await;
            Arc::new(Self(Arc::new(LosesCommits(store.backend.clone(), lost)), store))
        }
    }

    impl Application for Losing {
        type Backend = LosesCommits;

        fn queue(&self) -> Queue<LosesCommits> {
            Arc::clone(&self.0).into()
        }

        async fn write(connection: &mut SqliteConnection) {
            add(connection).await;
        }

        async fn written(&self) -> u64 {
            count(&self.1.backend).await
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_commit_whose_answer_is_lost_is_looked_up() {
        let application = Losing::open(Lost::AfterIt).await;
        let (job, text, report) = run(Arc::clone(&application), Then::Completes).await;
        assert_eq!((job.state(), text.as_str(), report.completed), (JobState::Completed, "completed", 1));
        assert_eq!(application.written().await, 1);

        let application = Losing::open(Lost::BeforeIt).await;
        let (job, text, report) = run(Arc::clone(&application), Then::Completes).await;
        assert!(text.contains("connection lost"), "{text}");
        assert_eq!((job.state(), job.errors.len(), report.retried), (JobState::Waiting, 1, 1), "a failed attempt");
        assert_eq!(application.written().await, 0);
    }

    /// A handler that goes on after it has completed its job, until the worker aborts it.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_job_that_was_completed_stays_so_when_its_handler_is_aborted() {
        let application = OnSqlite::open().await;
        let queue = application.queue();
        let id = queue.enqueue(&ADD).await.expect("stored").id();
        let (told, mut said) = mpsc::unbounded_channel();
        let handler = {
            let queue = queue.clone();
            move |context: JobContext, _: Add| {
                let (queue, told) = (queue.clone(), told.clone());
                async move {
                    context.begin(&queue).await?.complete(&"done").await?;
                    let _ = told.send(());
                    std::future::pending::<Result<(), NotDone>>().await
                }
            }
        };
        let builder = Worker::builder(&queue).grace(Duration::ZERO).register(handler);
        let running = Running::start(builder.build().expect("a worker"));
        said.recv().await.expect("completed");
        let report = running.stop().await;
        assert_eq!((report.completed, report.released, report.left), (1, 0, 0));
        assert_eq!(queue.get(id).await.expect("readable").expect("there").state(), JobState::Completed);
    }

    /// A completion that the handler leaves to a task, and does not wait for.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn an_outcome_that_a_task_is_writing_is_waited_for() {
        let application = OnSqlite::open().await;
        let queue = application.queue();
        let id = queue.enqueue(&ADD).await.expect("stored").id();
        // Nobody gets a transaction of this store before that one has ended.
        let handler = {
            let queue = queue.clone();
            move |context: JobContext, _: Add| {
                let queue = queue.clone();
                async move {
                    let (begun, has_begun) = tokio::sync::oneshot::channel();
                    tokio::spawn(async move {
                        let transaction = context.begin(&queue).await.expect("begins");
                        let mut completing = Box::pin(transaction.complete(&"by a task"));
                        let first = std::future::poll_fn(|cx| std::task::Poll::Ready(completing.as_mut().poll(cx)));
                        if first.await.is_pending() {
                            let _ = begun.send(());
                            completing.await.expect("completes");
                        }
                    });
                    has_begun.await?;
                    Ok("by the handler")
                }
            }
        };
        let running = Running::start(Worker::builder(&queue).register(handler).build().expect("a worker"));
        let job = queue.ended(id).await.expect("ended");
        assert_eq!(job.result.expect("a result").as_str(), "\"by a task\"");
        let report = running.stop().await;
        assert_eq!((report.completed, report.conflicts, report.left), (1, 0, 0));
    }
}
