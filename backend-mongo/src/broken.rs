//! The typical mistakes on MongoDB, each made in a command before it is sent, and the case of the suite that finds it.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;

use async_trait::async_trait;
use mongodb::bson::Bson;
use mongodb::bson::DateTime;
use mongodb::bson::Document;
use mongodb::bson::doc;
use queue_conformance::BoxError;
use queue_conformance::CallerTransaction;
use queue_conformance::Damage;
use queue_conformance::Harness;
use queue_conformance::Hold;
use queue_conformance::Hook;
use queue_conformance::Scope;
use queue_conformance::Store;
use queue_conformance::cases;
use queue_conformance::run_case;
use queue_core::Capabilities;
use queue_core::Delay;
use queue_core::Execution;
use queue_core::Inspect;
use queue_core::JobId;

use crate::handle::Broken;
use crate::ops::BATCH;

#[path = "../tests/harness/mod.rs"]
#[allow(dead_code, reason = "the suite itself uses the rest")]
mod harness;

use harness::MongoHarness;
use harness::MongoStore;

/// The filters of a command that writes.
fn filters(command: &mut Document) -> Vec<&mut Document> {
    let mut filters = Vec::new();
    for (field, value) in command.iter_mut() {
        match (field.as_str(), value) {
            ("query", Bson::Document(filter)) => filters.push(filter),
            ("updates" | "deletes", Bson::Array(items)) => {
                let items = items.iter_mut().filter_map(Bson::as_document_mut);
                filters.extend(items.filter_map(|item| item.get_document_mut("q").ok()));
            }
            _ => {}
        }
    }
    filters
}

/// The fields that a command's pipelines set.
fn sets(command: &mut Document) -> Vec<&mut Document> {
    fn set(pipeline: &mut Bson) -> Option<&mut Document> {
        let stage = pipeline.as_array_mut()?.first_mut()?.as_document_mut()?;
        if stage.contains_key("$set") {
            return stage.get_document_mut("$set").ok();
        }
        let merged = stage.get_document_mut("$replaceWith").ok()?.get_document_mut("$let").ok()?;
        let merged = merged.get_document_mut("in").ok()?.get_array_mut("$mergeObjects").ok()?;
        merged.last_mut()?.as_document_mut()
    }
    let mut sets = Vec::new();
    for (field, value) in command.iter_mut() {
        match (field.as_str(), value) {
            ("update", pipeline @ Bson::Array(_)) => sets.extend(set(pipeline)),
            ("updates", Bson::Array(items)) => {
                let items = items.iter_mut().filter_map(Bson::as_document_mut);
                sets.extend(items.filter_map(|item| set(item.get_mut("u")?)));
            }
            _ => {}
        }
    }
    sets
}

/// Puts something else wherever a value is found that should be replaced.
fn replace(value: &mut Bson, with: &impl Fn(&Bson) -> Option<Bson>) {
    if let Some(other) = with(value) {
        *value = other;
    }
    match value {
        Bson::Array(values) => values.iter_mut().for_each(|value| replace(value, with)),
        Bson::Document(values) => values.iter_mut().for_each(|(_, value)| replace(value, with)),
        _ => {}
    }
}

fn is_claim(command: &Document) -> bool {
    command.get_str("hint") == Ok("due")
}

/// The writing of a step, which is decided on by an expression.
fn is_step(command: &Document) -> bool {
    command
        .get_array("update")
        .is_ok_and(|update| update.iter().filter_map(Bson::as_document).any(|stage| stage.contains_key("$replaceWith")))
        && !command.contains_key("upsert")
}

/// The writing of an event's row: to keep an event, or only to lock it.
fn is_event(command: &Document, keeps: bool) -> bool {
    command.get_bool("upsert") == Ok(true) && command.get_bool("new") == Ok(!keeps)
}

/// The end of a condition's list, if the list has this many.
fn otherwise(value: &Bson, is_it: impl Fn(&[Bson]) -> bool) -> Option<Bson> {
    let cases = value.as_document()?.get_array("$cond").ok()?;
    is_it(cases).then(|| cases.last().cloned()).flatten()
}

/// Changes a command wherever it can be changed.
fn replace_all(command: &mut Document, with: &impl Fn(&Bson) -> Option<Bson>) {
    command.iter_mut().for_each(|(_, value)| replace(value, with));
}

/// What a mistake is, where it is made, and the case that finds it.
const MISTAKES: &[(&str, &str, Broken)] = &[
    // Nothing equals null, so a null is left out of the comparison.
    ("nulls are not compared", "update::every_field_is_compared", |command| {
        for filter in filters(command) {
            let nulls: Vec<_> =
                filter.iter().filter(|(_, value)| **value == Bson::Null).map(|(field, _)| field.clone()).collect();
            nulls.iter().for_each(|field| drop(filter.remove(field)));
        }
    }),
    // As after a read that compared in the client.
    ("the fingerprint is compared before the write", "update::race_has_one_winner", |command| {
        if !is_claim(command) {
            for filter in filters(command) {
                filter.retain_only("_id");
            }
        }
    }),
    ("values are not literals", "data::odd_names", |command| {
        let bare = |value: &Bson| value.as_document()?.get("$literal").cloned();
        for set in sets(command) {
            set.iter_mut().for_each(|(_, value)| replace(value, &bare));
        }
    }),
    ("the worker's clock, an hour ahead, says what is due", "claim::not_before_its_time", |command| {
        let ahead = DateTime::from_millis(DateTime::now().timestamp_millis() + 3_600_000);
        let clock = |value: &Bson| (value.as_str() == Some("$$NOW")).then_some(Bson::from(ahead));
        if is_claim(command) {
            let part = if command.contains_key("find") { "filter" } else { "query" };
            command.iter_mut().filter(|(field, _)| *field == part).for_each(|(_, value)| replace(value, &clock));
        }
    }),
    // A variable outside of an expression is a text, after which no date comes.
    ("the clock is no expression", "claim::due_means_not_after_now", |command| {
        let plain = doc! { "$lte": "$$NOW" };
        for part in ["filter", "query"] {
            if let Ok(filter) = command.get_document_mut(part)
                && filter.contains_key("kind")
            {
                filter.remove("$expr");
                filter.insert("available_at", plain.clone());
            }
        }
    }),
    ("a claim reads back what is running, not what it won", "claim::race_gives_each_job_once", |command| {
        if let Ok(filter) = command.get_document_mut("filter")
            && filter.remove("revision").is_some()
        {
            filter.insert("state", "running");
        }
    }),
    ("a key is kept after the end", "unique::every_ending_frees_the_key", |command| {
        for set in sets(command) {
            if set.contains_key("active_key") {
                set.insert("active_key", "$unique_key");
            }
        }
    }),
    ("a key is given up for good", "unique::rerun_into_a_taken_key", |command| {
        for set in sets(command) {
            set.remove("active_key");
            if set.contains_key("finished_at") {
                set.insert("active_key", doc! { "$literal": null });
            }
        }
    }),
    ("a beat sets the lease that it was asked for", "lease::never_shortened", |command| {
        for set in sets(command) {
            if let Ok(longest) = set.get_document("lease_expires_at").and_then(|lease| lease.get_array("$max")) {
                let until = longest[1].clone();
                set.insert("lease_expires_at", until);
            }
        }
    }),
    ("a batch is told how many matched, not which", "batch::judges_each_row", |command| {
        for set in sets(command) {
            set.remove(BATCH);
        }
    }),
    ("a batch writes the values of one job into all", "data::updates_keep_json_byte_for_byte", |command| {
        let first = |value: &Bson| value.as_document()?.contains_key("$indexOfArray").then_some(Bson::Int32(0));
        if let Ok(items) = command.get_array_mut("updates") {
            items.iter_mut().for_each(|item| replace(item, &first));
        }
    }),
    ("a purge deletes what it listed", "purge::spares_a_job_that_runs_again", |command| {
        if command.contains_key("delete") {
            for filter in filters(command) {
                filter.retain_only("_id");
            }
        }
    }),
    ("failures are kept without end", "data::the_newest_failures_are_kept", |command| {
        let all = |value: &Bson| value.as_document()?.get_array("$slice").ok()?.first().cloned();
        for set in sets(command) {
            set.iter_mut().for_each(|(_, value)| replace(value, &all));
        }
    }),
    ("a step is written without the fingerprint", "steps::a_lost_claim_writes_nothing", |command| {
        if is_step(command) {
            for filter in filters(command) {
                filter.retain_only("_id");
            }
        }
    }),
    ("a step is written over what is there", "steps::the_first_value_stays", |command| {
        if is_step(command) {
            let write = |value: &Bson| otherwise(value, |cases| cases.get(1) == Some(&Bson::Document(doc! {})));
            replace_all(command, &write);
        }
    }),
    ("the names of steps are no literals", "steps::names_are_compared_byte_for_byte", |command| {
        if is_step(command) {
            replace_all(command, &|value| value.as_document()?.get("$literal").cloned());
        }
    }),
    ("a wait that is registered again begins anew", "waits::the_deadline_is_fixed_once", |command| {
        if is_step(command) {
            let due = |value: &Bson| otherwise(value, |cases| cases.get(1) == Some(&Bson::from("$$there.until")));
            replace_all(command, &due);
        }
    }),
    ("an event is looked up before a wait, but not locked", "waits::race_of_registration_and_event", |command| {
        if is_event(command, false) {
            command.remove("upsert");
            command.insert("update", [doc! { "$set": { "payload": "$payload" } }].to_vec());
        }
    }),
    ("the last payload of an event is kept", "events::the_first_payload_wins", |command| {
        if is_event(command, true) {
            let put = |value: &Bson| otherwise(value, |cases| cases.get(1) == Some(&Bson::from("$$ROOT")));
            replace_all(command, &put);
        }
    }),
    ("a sweep ends the waits that it listed", "waits::race_of_sweeps", |command| {
        if sets(command).iter().any(|set| set.contains_key("wait")) {
            for filter in filters(command) {
                if filter.contains_key("$expr") && !filter.contains_key("wait.event") {
                    filter.retain_only("_id");
                }
            }
        }
    }),
];

trait RetainOnly {
    fn retain_only(&mut self, field: &str);
}

impl RetainOnly for Document {
    fn retain_only(&mut self, field: &str) {
        let others: Vec<_> = self.keys().filter(|key| *key != field).cloned().collect();
        others.iter().for_each(|other| drop(self.remove(other)));
    }
}

/// A harness whose backends make a mistake, and count how often.
struct Mistaken {
    mistake: Option<Broken>,
    made: Arc<AtomicUsize>,
    /// A store in which something was found is kept by the suite, and discarded here.
    stores: Mutex<Vec<Arc<MistakenStore>>>,
}

#[async_trait]
impl Harness for Mistaken {
    fn name(&self) -> String {
        "mongodb-broken".to_owned()
    }

    fn capabilities(&self) -> Capabilities {
        MongoHarness::Own.capabilities()
    }

    fn hooks(&self) -> &'static [Hook] {
        MongoHarness::Own.hooks()
    }

    async fn provision(&self, scope: &Scope) -> Result<Arc<dyn Store>, BoxError> {
        let store = MongoHarness::Own.store(scope).await?;
        let store = Arc::new(MistakenStore { store, mistake: self.mistake, made: Arc::clone(&self.made) });
        self.stores.lock().map_err(|error| error.to_string())?.push(Arc::clone(&store));
        Ok(store)
    }
}

struct MistakenStore {
    store: MongoStore,
    mistake: Option<Broken>,
    made: Arc<AtomicUsize>,
}

#[async_trait]
impl Store for MistakenStore {
    async fn connect(&self) -> Result<Arc<dyn Inspect>, BoxError> {
        let mut backend = self.store.backend().await?;
        if let Some(handle) = backend.handle() {
            handle.broken = self.mistake.map(|mistake| (mistake, Arc::clone(&self.made)));
        }
        Ok(Arc::new(backend))
    }

    async fn discard(&self) -> Result<(), BoxError> {
        self.store.discard().await
    }

    async fn advance(&self, delay: Delay) -> Result<(), BoxError> {
        self.store.advance(delay).await
    }

    async fn overwrite(&self, row: &Execution) -> Result<(), BoxError> {
        self.store.overwrite(row).await
    }

    async fn damage(&self, id: JobId, damage: Damage) -> Result<(), BoxError> {
        self.store.damage(id, damage).await
    }

    async fn hold(&self, row: &Execution) -> Result<Box<dyn Hold>, BoxError> {
        self.store.hold(row).await
    }

    async fn begin(&self, settles: Option<&Execution>) -> Result<Box<dyn CallerTransaction>, BoxError> {
        self.store.begin(settles).await
    }
}

/// What the case says, and how often the mistake was made.
async fn run(mistake: Option<Broken>, id: &str) -> (Result<(), String>, usize) {
    let case = cases().into_iter().find(|case| case.id == id).expect("a case");
    let made = Arc::new(AtomicUsize::new(0));
    let harness = Mistaken { mistake, made: Arc::clone(&made), stores: Mutex::default() };
    let found = run_case(&harness, &case, 1).await;
    if found.is_err() {
        let stores = std::mem::take(&mut *harness.stores.lock().expect("no panic"));
        for store in stores {
            store.discard().await.expect("is discarded");
        }
    }
    (found, made.load(Ordering::SeqCst))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_mistake_is_found_by_its_case() {
    if harness::excluded() {
        return;
    }
    for (mistake, case, broken) in MISTAKES {
        let (mut found, made) = run(Some(*broken), case).await;
        assert!(made > 0, "{mistake}: it was never made in {case}");
        // The suite can overlook a race that did not happen.
        for _ in 0..4 {
            if found.is_ok() {
                (found, _) = run(Some(*broken), case).await;
            }
        }
        let report = found.expect_err(&format!("{mistake}: not found by {case}"));
        println!("{mistake}: {}", report.lines().nth(1).unwrap_or_default());
        let (found, _) = run(None, case).await;
        found.unwrap_or_else(|report| panic!("without any mistake: {report}"));
    }
}
