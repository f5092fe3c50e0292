//! What the tests share.

#![allow(dead_code, reason = "each test binary uses a part of it")]

pub(crate) mod server;

use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;
use std::time::Instant;

use backend_mongo::MongoBackend;
use backend_mongo::MongoOptions;
use backend_mongo::mongodb::Client;
use backend_mongo::mongodb::ClientSession;
use backend_mongo::mongodb::Database;
use backend_mongo::mongodb::bson::Binary;
use backend_mongo::mongodb::bson::Bson;
use backend_mongo::mongodb::bson::Document;
use backend_mongo::mongodb::bson::doc;
use backend_mongo::mongodb::bson::spec::BinarySubtype;
use backend_mongo::mongodb::event::EventHandler;
use backend_mongo::mongodb::event::command::CommandEvent;
use backend_mongo::mongodb::options::ClientOptions;
use backend_mongo::mongodb::options::WriteConcern;
use queue_core::*;

/// The server to test on; `None` if it is excluded, which is printed.
pub(crate) fn url() -> Option<String> {
    let without = std::env::var("TEST_WITHOUT").unwrap_or_default();
    if without.split(',').any(|name| name.trim() == "mongodb") {
        println!("mongodb: EXCLUDED by TEST_WITHOUT");
        return None;
    }
    let url = std::env::var("TEST_MONGODB_URL");
    Some(url.expect("TEST_MONGODB_URL is not set: scripts/test.sh starts the servers and sets it"))
}

/// The same URL with another parameter.
pub(crate) fn with(url: &str, parameter: &str) -> String {
    let separator = if url.contains('?') { '&' } else { '?' };
    format!("{url}{separator}{parameter}")
}

/// A database of a test's own.
pub(crate) struct Place {
    pub(crate) url: String,
    pub(crate) raw: Database,
}

impl Place {
    /// On the server of all tests; `None` if that is excluded.
    pub(crate) async fn new() -> Option<Self> {
        Some(Self::on(url()?).await)
    }

    pub(crate) async fn on(url: String) -> Self {
        let client = Client::with_uri_str(&url).await.expect("a client");
        let name = format!("fenced_test_{}", uuid::Uuid::new_v4().simple());
        Self { url, raw: client.database(&name) }
    }

    pub(crate) fn options(&self) -> MongoOptions {
        let options = MongoOptions::from_url(&*self.url).expect("a URL");
        options.database(self.raw.name()).expect("a name")
    }

    pub(crate) async fn backend(&self) -> MongoBackend {
        MongoBackend::connect_with(self.options()).await.expect("connects")
    }

    pub(crate) async fn migrated(&self) -> MongoBackend {
        let backend = self.backend().await;
        backend.migrate().await.expect("migrates");
        backend
    }

    /// Runs a command behind the backend's back.
    pub(crate) async fn run(&self, command: Document) -> Document {
        self.raw.run_command(command).await.expect("runs")
    }

    /// Sets fields of a job, as they are given.
    pub(crate) async fn set(&self, id: JobId, fields: Document) {
        let update = doc! { "q": { "_id": uuid(id.as_uuid()) }, "u": { "$set": fields } };
        let done = self.run(doc! { "update": "fenced_jobs", "updates": [update] }).await;
        assert_eq!(done.get_i32("n"), Ok(1));
    }

    /// The fields of a job, as they are.
    pub(crate) async fn row(&self, id: JobId) -> Document {
        let jobs = self.raw.collection::<Document>("fenced_jobs");
        jobs.find_one(doc! { "_id": uuid(id.as_uuid()) }).await.expect("reads").expect("a row")
    }

    /// A transaction of somebody else that has written the row.
    pub(crate) async fn hold(&self, id: JobId) -> ClientSession {
        let mut session = self.raw.client().start_session().await.expect("a session");
        session.start_transaction().write_concern(WriteConcern::majority()).await.expect("begins");
        let jobs = self.raw.collection::<Document>("fenced_jobs");
        let held = jobs.update_one(doc! { "_id": uuid(id.as_uuid()) }, doc! { "$set": { "held": true } });
        assert_eq!(held.session(&mut session).await.expect("writes").matched_count, 1);
        session
    }

    pub(crate) async fn gone(self) {
        self.raw.drop().await.expect("is dropped");
    }
}

pub(crate) fn uuid(uuid: uuid::Uuid) -> Bson {
    Binary { subtype: BinarySubtype::Uuid, bytes: uuid.as_bytes().to_vec() }.into()
}

/// The commands that a client has sent, in order, without those about itself.
#[derive(Clone, Default)]
pub(crate) struct Sent(Arc<Mutex<Vec<Document>>>);

impl Sent {
    /// What was sent since it was asked last.
    pub(crate) fn take(&self) -> Vec<Document> {
        std::mem::take(&mut *self.0.lock().expect("no panic"))
    }

    /// The same, by name.
    pub(crate) fn names(&self) -> Vec<String> {
        self.take().iter().map(name_of).collect()
    }
}

pub(crate) fn name_of(command: &Document) -> String {
    command.keys().next().expect("a name").clone()
}

/// A client whose commands are noted.
pub(crate) async fn noted(url: &str) -> (Client, Sent) {
    let sent = Sent::default();
    let noted = sent.clone();
    let mut options = ClientOptions::parse(url).await.expect("a URL");
    options.command_event_handler = Some(EventHandler::callback(move |event| {
        if let CommandEvent::Started(started) = event
            && !["hello", "endSessions", "killCursors"].contains(&started.command_name.as_str())
        {
            noted.0.lock().expect("no panic").push(started.command);
        }
    }));
    (Client::with_options(options).expect("a client"), sent)
}

/// A backend that takes no slow server for a locked row, so that its commands can be counted.
pub(crate) async fn patient(client: Client, database: &str) -> MongoBackend {
    let options =
        MongoOptions::default().skip_locked_after(Duration::from_secs(10)).lock_timeout(Duration::from_secs(20));
    MongoBackend::from_client_with(client, database, options).await.expect("a handle")
}

pub(crate) fn name(text: &str) -> Name {
    text.try_into().expect("a name")
}

pub(crate) fn worker() -> WorkerId {
    "web-1/1".parse().expect("a worker")
}

pub(crate) fn job(payload: &str) -> NewJob {
    NewJob::new(name("mail"), name("welcome"), Json::from_text(payload).expect("JSON"))
}

pub(crate) fn keyed(key: &str) -> NewJob {
    NewJob { unique_key: Some(key.try_into().expect("a key")), ..job("1") }
}

pub(crate) fn lease() -> Lease {
    Lease::from_millis(60_000).expect("a lease")
}

pub(crate) fn limit(rows: usize) -> Limit {
    Limit::new(rows).expect("a limit")
}

pub(crate) fn request(rows: usize) -> ClaimRequest {
    ClaimRequest::new(name("mail"), [name("welcome")], worker(), lease(), limit(rows)).expect("a request")
}

/// Stores jobs and claims them all, in the order of the queue.
pub(crate) async fn running(backend: &MongoBackend, rows: usize) -> Vec<Job> {
    let jobs: Vec<_> = (0..rows).map(|_| job("1")).collect();
    backend.enqueue(&jobs).await.expect("stores");
    let claimed = backend.claim(&request(rows)).await.expect("claims");
    assert_eq!((claimed.jobs.len(), claimed.unreadable.len()), (rows, 0));
    claimed.jobs
}

/// Claims and starts one job.
pub(crate) async fn claim_one(backend: &MongoBackend) -> Job {
    let mut claimed = backend.claim(&request(1)).await.expect("claims");
    claimed.jobs.pop().expect("a job")
}

pub(crate) fn complete(result: &str) -> Transition {
    Transition::Complete { result: Some(Json::from_text(result).expect("JSON")) }
}

pub(crate) fn decide(job: &Job, transition: &Transition) -> UpdateRequest {
    Decision::new(&job.execution, transition).expect("legal").request().clone()
}

pub(crate) fn held(job: &Job) -> Held {
    Held::of(&job.execution).expect("held")
}

#[track_caller]
pub(crate) fn assert_error<T: std::fmt::Debug>(answer: Result<T>, kind: ErrorKind, certainty: Certainty) -> Error {
    let error = answer.expect_err("refused");
    assert_eq!((error.kind(), error.certainty()), (kind, certainty), "{error}");
    error
}

/// Looks again and again until something is so, for half a minute: less than a server keeps a forgotten transaction.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut is_so: impl FnMut() -> F) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_so().await {
        assert!(Instant::now() < deadline, "it never came about: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// One poll.
pub(crate) async fn poll_once<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    std::future::poll_fn(|context| match std::pin::Pin::new(&mut *future).poll(context) {
        std::task::Poll::Ready(output) => std::task::Poll::Ready(Some(output)),
        std::task::Poll::Pending => std::task::Poll::Ready(None),
    })
    .await
}
