//! MongoDB for the conformance suite.

use std::sync::Arc;
use std::sync::Mutex;

use async_trait::async_trait;
use backend_mongo::MongoBackend;
use backend_mongo::MongoOptions;
use backend_mongo::mongodb::Client;
use backend_mongo::mongodb::ClientSession;
use backend_mongo::mongodb::Database;
use backend_mongo::mongodb::bson::Binary;
use backend_mongo::mongodb::bson::Bson;
use backend_mongo::mongodb::bson::DateTime;
use backend_mongo::mongodb::bson::Document;
use backend_mongo::mongodb::bson::doc;
use backend_mongo::mongodb::bson::spec::BinarySubtype;
use backend_mongo::mongodb::options::ClientOptions;
use backend_mongo::mongodb::options::ReadPreference;
use backend_mongo::mongodb::options::SelectionCriteria;
use backend_mongo::mongodb::options::WriteConcern;
use queue_conformance::BoxError;
use queue_conformance::CallerTransaction;
use queue_conformance::Damage;
use queue_conformance::Harness;
use queue_conformance::Hold;
use queue_conformance::Hook;
use queue_conformance::OwnTransaction;
use queue_conformance::Scope;
use queue_conformance::Store;
use queue_core::Backend;
use queue_core::Capabilities;
use queue_core::ClockOffset;
use queue_core::Delay;
use queue_core::Enqueued;
use queue_core::Execution;
use queue_core::Fingerprint;
use queue_core::Inspect;
use queue_core::JobId;
use queue_core::NewJob;
use queue_core::Patch;
use queue_core::Timestamp;
use queue_core::Transactional;
use queue_core::Update;
use queue_core::WorkerId;

/// Whether these tests are left out, which is printed.
pub(crate) fn excluded() -> bool {
    let without = std::env::var("TEST_WITHOUT").unwrap_or_default();
    let excluded = without.split(',').any(|name| name.trim() == "mongodb");
    if excluded {
        println!("conformance mongodb: EXCLUDED by TEST_WITHOUT");
    }
    excluded
}

/// The server to test on.
pub(crate) fn url() -> String {
    std::env::var("TEST_MONGODB_URL")
        .expect("TEST_MONGODB_URL is not set: scripts/test.sh starts the servers and sets it")
}

/// The same URL with what no queue should be used with.
pub(crate) fn awkward_url() -> String {
    let url = url();
    let separator = if url.contains('?') { '&' } else { '?' };
    format!("{url}{separator}w=1&readPreference=secondaryPreferred&retryWrites=false&maxPoolSize=1")
}

/// One database for the whole run, since making one costs more than making collections; each case has its own prefix.
const DATABASE: &str = "fenced_conformance";

/// Collections of their own for every store, and a way to them.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MongoHarness {
    /// Each handle connects by itself.
    Own,
    /// The application's own client for each handle, whose settings would not do.
    ApplicationClient,
}

#[async_trait]
impl Harness for MongoHarness {
    fn name(&self) -> String {
        match self {
            Self::Own => "mongodb",
            Self::ApplicationClient => "mongodb-client",
        }
        .to_owned()
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::default();
        capabilities.skips_locked_rows = true;
        capabilities.wakes = true;
        capabilities.durable_steps = true;
        capabilities
    }

    fn hooks(&self) -> &'static [Hook] {
        &[Hook::Clock, Hook::Overwrite, Hook::Damage, Hook::Hold, Hook::Transaction]
    }

    async fn describe(&self) -> Result<String, BoxError> {
        let client = Client::with_uri_str(url()).await?;
        let build = client.database("admin").run_command(doc! { "buildInfo": 1 }).await?;
        let version = build.get_str("version")?.to_owned();
        Ok(match self {
            Self::Own => format!("MongoDB {version}, a replica set"),
            Self::ApplicationClient => {
                format!("MongoDB {version}, the application's client with w=1 and secondary reads")
            }
        })
    }

    async fn provision(&self, scope: &Scope) -> Result<Arc<dyn Store>, BoxError> {
        Ok(Arc::new(self.store(scope).await?))
    }
}

impl MongoHarness {
    pub(crate) async fn store(self, scope: &Scope) -> Result<MongoStore, BoxError> {
        // Identifiers are shorter than names of stores.
        let prefix = format!("c{}_", &scope.name()[scope.name().len().saturating_sub(28)..]);
        let raw = Client::with_uri_str(url()).await?.database(DATABASE);
        let clients = Mutex::new(vec![raw.client().clone()]);
        let store = MongoStore { harness: self, prefix, raw, clock: ClockOffset::default(), clients };
        store.backend().await?.migrate().await?;
        // Every update of a row that is marked breaks a rule; marking it does not ask.
        let rule = doc! { "poisoned": { "$exists": false } };
        store.raw.run_command(doc! { "collMod": store.jobs(), "validator": rule }).await?;
        Ok(store)
    }
}

/// One store, for tests that break the backend: those connect by themselves.
pub(crate) struct MongoStore {
    harness: MongoHarness,
    prefix: String,
    /// For what goes past the backend.
    raw: Database,
    clock: ClockOffset,
    /// To be shut down in the end: the driver panics in the background where a client outlives its runtime.
    clients: Mutex<Vec<Client>>,
}

impl MongoStore {
    fn jobs(&self) -> String {
        format!("{}jobs", self.prefix)
    }

    pub(crate) async fn backend(&self) -> Result<MongoBackend, BoxError> {
        let options = MongoOptions::from_url(url())?
            .database(DATABASE)?
            .collection_prefix(self.prefix.parse()?)
            .clock(self.clock.clone());
        let backend = match self.harness {
            MongoHarness::Own => MongoBackend::connect_with(options).await?,
            MongoHarness::ApplicationClient => {
                let client = Client::with_options(ClientOptions::parse(awkward_url()).await?)?;
                MongoBackend::from_client_with(client, DATABASE, options).await?
            }
        };
        self.clients.lock().map_err(|error| error.to_string())?.push(backend.client().clone());
        Ok(backend)
    }

    async fn set(&self, id: JobId, change: Document, session: Option<&mut ClientSession>) -> Result<(), BoxError> {
        let raw = match &session {
            Some(session) => session.client().database(DATABASE),
            None => self.raw.clone(),
        };
        let jobs = raw.collection::<Document>(&self.jobs());
        let update = jobs.update_one(doc! { "_id": uuid(id.as_uuid()) }, doc! { "$set": change });
        let update = update.bypass_document_validation(true);
        let updated = match session {
            Some(session) => update.session(session).await?,
            None => update.await?,
        };
        match updated.matched_count {
            1 => Ok(()),
            _ => Err(format!("no job {id}").into()),
        }
    }
}

fn uuid(uuid: uuid::Uuid) -> Bson {
    Binary { subtype: BinarySubtype::Uuid, bytes: uuid.as_bytes().to_vec() }.into()
}

/// The lifecycle fields of a row.
fn fields(row: &Execution) -> Result<Document, BoxError> {
    let date = |at: Option<Timestamp>| at.map(|at| DateTime::from_millis(at.unix_millis()));
    Ok(doc! {
        "state": row.state.as_str(),
        "attempt": i64::from(row.attempt),
        "max_attempts": i64::from(row.max_attempts.get()),
        "fence": i64::try_from(row.fence)?,
        "revision": uuid(row.revision.as_uuid()),
        "claimed_by": row.claimed_by.as_ref().map(WorkerId::as_str),
        "claimed_at": date(row.claimed_at),
        "attempted_at": date(row.attempted_at),
        "lease_expires_at": date(row.lease_expires_at),
    })
}

#[async_trait]
impl Store for MongoStore {
    async fn connect(&self) -> Result<Arc<dyn Inspect>, BoxError> {
        Ok(Arc::new(self.backend().await?))
    }

    async fn discard(&self) -> Result<(), BoxError> {
        for collection in ["jobs", "events", "schema"] {
            self.raw.collection::<Document>(&format!("{}{collection}", self.prefix)).drop().await?;
        }
        let clients = std::mem::take(&mut *self.clients.lock().map_err(|error| error.to_string())?);
        for client in clients {
            client.shutdown().immediate(true).await;
        }
        Ok(())
    }

    async fn advance(&self, delay: Delay) -> Result<(), BoxError> {
        self.clock.advance(delay);
        Ok(())
    }

    async fn overwrite(&self, row: &Execution) -> Result<(), BoxError> {
        self.set(row.id, fields(row)?, None).await
    }

    async fn damage(&self, id: JobId, damage: Damage) -> Result<(), BoxError> {
        let change = match damage {
            Damage::ForeignState => doc! { "state": "of a newer version" },
            Damage::BrokenData => doc! { "errors": "no list" },
            Damage::Poison => doc! { "poisoned": true },
        };
        self.set(id, change, None).await
    }

    async fn hold(&self, row: &Execution) -> Result<Box<dyn Hold>, BoxError> {
        let mut session = self.raw.client().start_session().await?;
        session.start_transaction().await?;
        // MongoDB locks no row by writing what is there already.
        let mut change = fields(row)?;
        change.insert("held", true);
        self.set(row.id, change, Some(&mut session)).await?;
        Ok(Box::new(Held(session)))
    }

    async fn begin(&self, settles: Option<&Execution>) -> Result<Box<dyn CallerTransaction>, BoxError> {
        if settles.is_some() || matches!(self.harness, MongoHarness::Own) {
            return OwnTransaction::begin(self.backend().await?, settles).await;
        }
        let backend = self.backend().await?;
        let mut session = backend.client().start_session().await?;
        let primary = SelectionCriteria::ReadPreference(ReadPreference::Primary);
        session.start_transaction().selection_criteria(primary).write_concern(WriteConcern::majority()).await?;
        Ok(Box::new(Caller { backend, session }))
    }
}

struct Held(ClientSession);

#[async_trait]
impl Hold for Held {
    async fn commit(mut self: Box<Self>) -> Result<(), BoxError> {
        Ok(self.0.commit_transaction().await?)
    }

    async fn roll_back(mut self: Box<Self>) -> Result<(), BoxError> {
        Ok(self.0.abort_transaction().await?)
    }
}

struct Caller {
    backend: MongoBackend,
    session: ClientSession,
}

#[async_trait]
impl CallerTransaction for Caller {
    async fn enqueue(&mut self, jobs: &[NewJob]) -> queue_core::Result<Vec<Enqueued>> {
        self.backend.enqueue_in(&mut self.session, jobs).await
    }

    async fn update(&mut self, id: JobId, current: &Fingerprint, patch: &Patch) -> queue_core::Result<Update> {
        self.backend.update_if_current_in(&mut self.session, id, current, patch).await
    }

    async fn commit(mut self: Box<Self>) -> Result<(), BoxError> {
        Ok(self.session.commit_transaction().await?)
    }

    async fn roll_back(mut self: Box<Self>) -> Result<(), BoxError> {
        Ok(self.session.abort_transaction().await?)
    }
}
