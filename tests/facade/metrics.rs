//! What a worker tells the `metrics` facade.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;

use fenced_queue::*;
use metrics::Counter;
use metrics::Gauge;
use metrics::Histogram;
use metrics::HistogramFn;
use metrics::Key;
use metrics::KeyName;
use metrics::Metadata;
use metrics::Recorder;
use metrics::SharedString;
use metrics::Unit;

use crate::common::*;

#[derive(Default)]
struct Values {
    numbers: Mutex<BTreeMap<String, Arc<AtomicU64>>>,
    spans: Mutex<BTreeMap<String, Arc<Spans>>>,
}

#[derive(Default)]
struct Spans(Mutex<Vec<f64>>);

impl HistogramFn for Spans {
    fn record(&self, value: f64) {
        self.0.lock().expect("lock").push(value);
    }
}

fn text(key: &Key) -> String {
    let labels: Vec<_> = key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
    format!("{}{{{}}}", key.name(), labels.join(","))
}

impl Values {
    fn number(&self, key: &Key) -> Arc<AtomicU64> {
        Arc::clone(self.numbers.lock().expect("lock").entry(text(key)).or_default())
    }
}

impl Recorder for Values {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.number(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.number(key))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::clone(self.spans.lock().expect("lock").entry(text(key)).or_default()))
    }
}

#[test]
fn a_worker_counts_its_jobs_and_measures_their_times() {
    let values = Values::default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    metrics::with_local_recorder(&values, || {
        runtime.expect("a runtime").block_on(async {
            let store = Store::memory();
            let queue = store.queue();
            let good = queue.enqueue(&ADD).await.expect("stored").id();
            let bad = queue.enqueue(&Add { a: 0, b: 0 }).await.expect("stored").id();
            let handler = async |_: JobContext, add: Add| match add.a {
                0 => Err(NotDone::fail("nothing to add")),
                _ => {
                    tokio::time::sleep(std::time::Duration::from_secs(45)).await;
                    Ok(())
                }
            };
            let builder = Worker::builder(&queue).lease(store.lease).register(handler);
            let running = Running::start(builder.build().expect("a worker"));
            store.until_state(bad, JobState::Failed).await;
            store.until_state(good, JobState::Completed).await;
            running.stop().await;
        });
    });
    let numbers = values.numbers.lock().expect("lock");
    let count = |event: &str| numbers[&format!("fenced_queue_jobs_total{{event={event}}}")].load(Ordering::SeqCst);
    assert_eq!((count("claimed"), count("completed"), count("failed")), (2, 1, 1));
    assert!(numbers.contains_key("fenced_queue_jobs_held{}"), "{numbers:?}");
    let spans = values.spans.lock().expect("lock");
    let of = |name: &str| spans[&format!("{name}{{kind=add}}")].0.lock().expect("lock").clone();
    assert_eq!(of("fenced_queue_job_wait_seconds").len(), 2);
    let mut ran = of("fenced_queue_job_run_seconds");
    ran.sort_by(f64::total_cmp);
    assert!(ran[0] < 1.0 && (45.0..46.0).contains(&ran[1]), "{ran:?}");
}
