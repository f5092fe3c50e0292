//! What each kind of program needs to be allowed, and that it is enough.

mod common;

use backend_mongo::MongoBackend;
use backend_mongo::MongoOptions;
use backend_mongo::mongodb::Client;
use backend_mongo::mongodb::Database;
use backend_mongo::mongodb::bson::Document;
use backend_mongo::mongodb::bson::doc;
use common::server::Server;
use common::*;
use queue_core::Certainty::NotApplied;
use queue_core::*;

/// What may be done on which collections.
type Privileges = &'static [(&'static str, &'static [&'static str])];

/// The privileges of the crate's documentation.
const PRIVILEGES: [(&str, Privileges); 5] = [
    (
        "work",
        &[
            ("schema", &["find", "update"]),
            ("jobs", &["find", "update", "changeStream"]),
            ("events", &["find", "insert", "update", "remove"]),
        ],
    ),
    ("produce", &[("schema", &["find", "update"]), ("jobs", &["find", "insert"])]),
    (
        "emit",
        &[
            ("schema", &["find", "update"]),
            ("jobs", &["find", "update"]),
            ("events", &["find", "insert", "update", "remove"]),
        ],
    ),
    ("read", &[("schema", &["find"]), ("jobs", &["find"])]),
    ("purge", &[("schema", &["find"]), ("jobs", &["find", "remove"]), ("events", &["find", "remove"])]),
];

struct Guarded {
    server: Server,
    /// Of one who may do everything.
    jobs: Database,
}

impl Guarded {
    fn url(&self, user: &str) -> String {
        self.server.url().replacen("://", &format!("://{user}:secret@"), 1)
    }

    async fn as_user(&self, user: &str) -> MongoBackend {
        let options = MongoOptions::from_url(self.url(user)).expect("a URL").database("jobs").expect("a name");
        MongoBackend::connect_with(options).await.expect("connects")
    }

    /// A handle of a user who may do this, and nothing else.
    async fn as_role(&self, role: &str) -> MongoBackend {
        let on = |collection: &str, actions: &[&str]| {
            let resource = doc! { "db": "jobs", "collection": format!("fenced_{collection}") };
            doc! { "resource": resource, "actions": actions }
        };
        let (_, privileges) = PRIVILEGES.iter().find(|(name, _)| *name == role).expect("a role");
        let privileges: Vec<_> = privileges.iter().map(|(collection, actions)| on(collection, actions)).collect();

        self.jobs
            .run_command(doc! { "createRole": format!("fenced_{role}"), "privileges": privileges, "roles": Vec::<Document>::new() })
            .await
            .expect("is made");
        self.create(role, &format!("fenced_{role}")).await;
        self.as_user(role).await
    }

    async fn create(&self, user: &str, role: &str) {
        let role = doc! { "role": role, "db": "jobs" };
        let admin = self.jobs.client().database("admin");
        admin.run_command(doc! { "createUser": user, "pwd": "secret", "roles": [role] }).await.expect("is made");
    }
}

#[tokio::test]
async fn each_role_can_do_its_work_and_no_more() {
    let Some(server) = Server::guarded().await else { return };
    let root = server.url().replacen("://", "://root:secret@", 1);
    let jobs = Client::with_uri_str(root).await.expect("a client").database("jobs");
    let guarded = Guarded { server, jobs };
    guarded.create("migrate", "readWrite").await;
    guarded.as_user("migrate").await.migrate().await.expect("makes the collections");
    let (work, produce) = (guarded.as_role("work").await, guarded.as_role("produce").await);
    let (read, purge) = (guarded.as_role("read").await, guarded.as_role("purge").await);
    let emit = guarded.as_role("emit").await;
    for backend in [&work, &produce, &emit, &read, &purge] {
        backend.migrate().await.expect("there is nothing to do");
    }
    each_does_its_work(&work, &produce, &read, &purge).await;
    steps_and_events(&guarded, [&work, &produce, &emit, &read, &purge]).await;
}

#[track_caller]
fn refused<T: std::fmt::Debug>(answer: Result<T>) {
    assert_error(answer, ErrorKind::Permanent, NotApplied);
}

async fn each_does_its_work(work: &MongoBackend, produce: &MongoBackend, read: &MongoBackend, purge: &MongoBackend) {
    let queues = [name("mail")];
    work.wait_for_work(&queues).await.expect("is woken when the stream begins");
    let new = [keyed("k"), job("2")];
    produce.enqueue(&new).await.expect("stores");
    let again = produce.enqueue(&[new[0].clone(), keyed("k")]).await.expect("answers");
    assert_eq!(again, [Enqueued::Existing(new[0].id), Enqueued::Duplicate { existing: new[0].id }]);
    let claimed = work.claim(&request(2)).await.expect("claims").jobs;
    let held: Vec<_> = claimed.iter().map(held).collect();
    assert_eq!(work.extend_leases(&held, lease()).await.expect("beats"), [Beat::Extended; 2]);
    let updates: Vec<_> = claimed.iter().map(|job| decide(job, &complete("1"))).collect();
    work.update_many_if_current(&updates).await.expect("settles");
    assert_eq!(work.claimed_by(&worker(), Delay::ZERO, None, limit(9)).await.expect("lists").items, []);
    assert_eq!(work.stale(None, limit(9)).await.expect("lists").items, []);
    assert_eq!(read.counts().await.expect("counts")[0].jobs, 2);
    assert!(read.get(new[0].id).await.expect("reads").is_some());
    assert_eq!(purge.purge(JobState::Completed, Delay::ZERO, limit(9)).await.expect("purges"), 2);

    produce.enqueue(&[job("1")]).await.expect("stores");
    for other in [read, purge, work] {
        refused(other.enqueue(&[job("1")]).await);
    }
    for other in [produce, read, purge] {
        refused(other.claim(&request(1)).await);
    }
    let claimed = claim_one(work).await;
    let end = decide(&claimed, &complete("1"));
    refused(read.update_if_current(end.id, &end.current, &end.patch).await);
    Transitioner::new(work).apply(&claimed.execution, &complete("1")).await.expect("settles");
    for other in [work, produce, read] {
        refused(other.purge(JobState::Completed, Delay::ZERO, limit(9)).await);
    }
    assert_eq!(purge.purge(JobState::Completed, Delay::ZERO, limit(9)).await.expect("purges"), 1);
}

async fn steps_and_events(guarded: &Guarded, roles: [&MongoBackend; 5]) {
    let [work, produce, emit, read, purge] = roles;
    produce.enqueue(&[job("1"), job("2")]).await.expect("stores");
    let claimed = work.claim(&request(2)).await.expect("claims").jobs;
    begin_step(work, &claimed[0].execution, &name("s")).await.expect("begins");
    for (job, until) in claimed.iter().zip([When::At(Timestamp::MAX), When::Now]) {
        let mut wait = Suspension::new(&job.execution, name("w"), Some(name("e")), until).expect("legal");
        wait.submit(work).await.expect("waits");
    }
    assert_eq!(work.time_out_waits(limit(9)).await.expect("wakes"), [claimed[1].id()]);
    let event = NewEvent { key: name("e"), payload: Json::null(), keep: Delay::ZERO };
    for other in [read, produce, purge] {
        refused(other.emit(&event).await);
    }
    assert_eq!(emit.emit(&event).await.expect("emits"), Emitted::New { woken: 1 });
    refused(emit.enqueue(&[job("1")]).await);
    assert_eq!(purge.purge_events(limit(9)).await.expect("purges"), 1);
    assert_eq!(work.purge_events(limit(9)).await.expect("purges"), 0);
    let claimed = claim_one(work).await;
    assert!(!read.steps(claimed.id()).await.expect("reads").is_empty());
    let mut hand_over = HandOver::new(&claimed.execution, None, job("3")).expect("legal");
    let answer = hand_over.submit(work).await;
    assert!(
        matches!(&answer, Err(TransitionError::Backend(error)) if error.kind() == ErrorKind::Permanent),
        "{answer:?}"
    );
    let insert = doc! { "resource": { "db": "jobs", "collection": "fenced_jobs" }, "actions": ["insert"] };
    let granted = doc! { "grantPrivilegesToRole": "fenced_work", "privileges": [insert] };
    guarded.jobs.run_command(granted).await.expect("is granted");
    hand_over.submit(work).await.expect("hands over");
    assert_eq!(purge.purge(JobState::Completed, Delay::ZERO, limit(9)).await.expect("purges"), 1);
}
