//! An order that charges, waits for its payment, and ships or refunds. Kill it where you like, start it again: it goes on.
//!
//! ```text
//! cargo run --example order [-- [--url URL] [--shop FOLDER]]    three orders, from the beginning to the end
//! cargo run --example order -- --work [--url URL] [--shop FOLDER]    whatever orders there are, until it is killed
//! ```
//!
//! Of the three the first is paid after a second, the second never, the third before anybody asks. What the shop does is a file in
//! its folder, named by the key of the step: a bank, or a parcel service, is given that key to know a repeated call again.

use std::error::Error;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use fenced_queue::DurableContext;
use fenced_queue::JobArgs;
use fenced_queue::NotDone;
use fenced_queue::Queue;
use fenced_queue::RetryPolicy;
use fenced_queue::Worker;
use serde::Deserialize;
use serde::Serialize;
use uuid::Uuid;

#[derive(Serialize, Deserialize)]
struct Order {
    number: u64,
}

impl JobArgs for Order {
    const KIND: &'static str = "order";
}

/// Its first three lines and its last two run each time the job does; what is inside the steps happens once.
async fn order(shop: Shop, context: DurableContext, Order { number }: Order) -> Result<&'static str, NotDone> {
    context.step("charge", async |key| shop.does("charge", &key).await).await?;
    let event = format!("paid/{number}");
    let paid: Option<u64> = context.wait_for("payment", event, Duration::from_secs(3)).await?;
    let (step, end) = if paid.is_some() { ("ship", "shipped") } else { ("refund", "refunded") };
    context.step(step, async |key| shop.does(step, &key).await).await?;
    Ok(end)
}

/// The world outside.
#[derive(Clone)]
struct Shop {
    folder: PathBuf,
}

impl Shop {
    async fn does(&self, what: &str, key: &str) -> Result<(), NotDone> {
        let file = self.folder.join(key.replace('/', "-"));
        writeln!(OpenOptions::new().create(true).append(true).open(file)?, "{what}")?;
        println!("   {what:<7} {key}");
        // The answer takes its time: here a crash leaves it open whether it happened.
        tokio::time::sleep(Duration::from_millis(20)).await;
        Ok(())
    }
}

type Failed = Box<dyn Error + Send + Sync>;

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("order: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Failed> {
    let Arguments { url, shop, work } = arguments()?;
    std::fs::create_dir_all(&shop)?;
    let queue = Queue::connect(&url).await?;
    let shop = Shop { folder: shop };
    let worker = Worker::builder(&queue)
        .lease(Duration::from_secs(1)) // so that it goes on soon after a crash
        .retry(RetryPolicy::exponential(Duration::from_secs(1), Duration::from_secs(5))) // and after many
        .register_durable(move |context, args| order(shop.clone(), context, args))
        .build()?;
    if work {
        worker.run_until(std::future::pending::<()>()).await;
        return Ok(());
    }
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(worker.run_until(stopped));

    queue.emit("paid/3", &1999).await?;
    let mut orders = Vec::new();
    for number in 1..=3 {
        // An id made of the number: started again, it is the same order.
        let id = Uuid::from_u128(number);
        orders.push(queue.enqueue(&Order { number: u64::try_from(number)? }).id(id).max_attempts(1_000).await?.id());
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    queue.emit("paid/1", &1999).await?;
    for id in orders {
        let job = queue.ended(id).await?;
        let result = job.result.map(|result| result.to_string()).unwrap_or_default();
        println!("order {id} is {}: {result}", job.execution.state);
    }
    let _ = stop.send(());
    running.await?;
    Ok(())
}

struct Arguments {
    url: String,
    shop: PathBuf,
    work: bool,
}

fn arguments() -> Result<Arguments, Failed> {
    let mut arguments = Arguments { url: "sqlite:order.db".into(), shop: "order-shop".into(), work: false };
    let mut given = std::env::args().skip(1);
    while let Some(argument) = given.next() {
        match argument.as_str() {
            "--work" => arguments.work = true,
            "--url" => arguments.url = given.next().ok_or("--url needs a URL")?,
            "--shop" => arguments.shop = given.next().ok_or("--shop needs a folder")?.into(),
            other => return Err(format!("{other}: known are --url, --shop and --work").into()),
        }
    }
    Ok(arguments)
}
