//! Rows that were changed at random.

mod common;
#[path = "../../conformance/tests/fuzz/mod.rs"]
mod fuzz;
#[path = "../../conformance/tests/fuzz/rows.rs"]
mod rows;

use backend_mongo::MongoBackend;
use backend_mongo::mongodb::bson::Binary;
use backend_mongo::mongodb::bson::Bson;
use backend_mongo::mongodb::bson::DateTime;
use backend_mongo::mongodb::bson::Document;
use backend_mongo::mongodb::bson::doc;
use backend_mongo::mongodb::bson::spec::BinarySubtype;
use common::*;
use fuzz::config;
use proptest::test_runner::TestRunner;
use queue_core::*;
use rows::Change;
use rows::Holds;
use rows::Pair;
use rows::STAGES;
use rows::changes;

/// The value as a field of the right type, or of another one.
fn field(holds: Holds, value: Option<Vec<u8>>, other_type: u8) -> Bson {
    let Some(value) = value else { return Bson::Null };
    let text = String::from_utf8_lossy(&value).into_owned();
    let number = text.parse::<i64>().ok();
    match (other_type, holds, number) {
        (0, ..) => Bson::Array(vec![Bson::Null, text.into(), doc! { "state": "waiting" }.into()]),
        (1, ..) => Bson::Document(doc! { "$set": text, "": 1 }),
        (2, ..) => Bson::Double(f64::NAN),
        (3, ..) => Bson::Boolean(true),
        (4, ..) => Bson::MinKey,
        (5, ..) => Bson::Int32(-1),
        (6, ..) => Bson::Double(number.map_or(0.5, |number| f64::from_bits(number.cast_unsigned()))),
        (_, Holds::Number, Some(number)) => Bson::Int64(number),
        (_, Holds::Time, Some(number)) => Bson::DateTime(DateTime::from_millis(number)),
        (_, Holds::Bytes, _) => {
            let subtype = if value.len().is_multiple_of(2) { BinarySubtype::Uuid } else { BinarySubtype::Generic };
            Binary { subtype, bytes: value }.into()
        }
        _ => text.into(),
    }
}

async fn damage(place: &Place, pair: &Pair, change: &Change, other_type: u8) {
    let Change { table, column, holds, value } = change.clone();
    let value = field(holds, value, other_type);
    let id = uuid(pair.damaged.id().as_uuid());
    let (collection, of, path) = match table {
        "events" => ("fenced_events", Bson::from(pair.kept.key.as_str()), column.to_owned()),
        "steps" => ("fenced_jobs", id, format!("steps.0.{column}")),
        _ => ("fenced_jobs", id, column.to_owned()),
    };
    // Sometimes the field is gone.
    let update = if other_type == 7 {
        doc! { "$unset": { path: 1 } }
    } else {
        doc! { "$set": { path: value } }
    };
    let jobs = place.raw.collection::<Document>(collection);
    drop(jobs.update_one(doc! { "_id": of }, update).await);
}

#[test]
fn a_row_changed_at_random_harms_no_other() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let clock = ClockOffset::default();
    let place = runtime.block_on(Place::new());
    let Some(place) = place else { return };
    let backend = runtime.block_on(async {
        let options = place.options().clock(clock.clone());
        let backend = MongoBackend::connect_with(options).await.expect("connects");
        backend.migrate().await.expect("migrates");
        backend
    });
    let cases = (proptest::sample::select(&STAGES[..]), changes(), 0..24u8);
    let (harmed, config) = (std::cell::Cell::new(0), config(64));
    let cases_tried = config.cases;
    let tried = TestRunner::new(config).run(&cases, |(stage, changes, other_type)| {
        runtime.block_on(async {
            for collection in ["fenced_jobs", "fenced_events"] {
                place.raw.collection::<Document>(collection).delete_many(doc! {}).await.expect("empties");
            }
            let pair = Pair::new(&backend, stage).await;
            for change in &changes {
                damage(&place, &pair, change, other_type).await;
            }
            harmed.set(harmed.get() + u32::from(pair.check(&backend, &clock).await));
        });
        Ok(())
    });
    runtime.block_on(place.gone());
    tried.unwrap_or_else(|failed| panic!("{failed}"));
    assert!(harmed.get() * 8 > cases_tried, "of {cases_tried} rows only {} could not be read", harmed.get());
}
