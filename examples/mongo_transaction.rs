//! A user and the job that greets them, in one transaction of the application's session: both are there, or neither is.
//!
//! ```text
//! cargo run --example mongo_transaction --features mongo -- mongodb://host/database?replicaSet=rs0
//! ```

use std::error::Error;

use fenced_queue::JobArgs;
use fenced_queue::Queue;
use fenced_queue::mongo::MongoBackend;
use fenced_queue::mongo::mongodb::Client;
use fenced_queue::mongo::mongodb::ClientSession;
use fenced_queue::mongo::mongodb::Collection;
use fenced_queue::mongo::mongodb::bson::Document;
use fenced_queue::mongo::mongodb::bson::doc;
use serde::Deserialize;
use serde::Serialize;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[derive(Serialize, Deserialize)]
struct Welcome {
    name: String,
}

impl JobArgs for Welcome {
    const KIND: &'static str = "welcome";
    const QUEUE: &'static str = "sign_ups";
}

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::args().nth(1).ok_or("usage: mongo_transaction URL")?;
    let client = Client::with_uri_str(&url).await?;
    let database = client.default_database().unwrap_or_else(|| client.database("fenced_queue"));
    let users = database.collection("example_users");
    let queue = Queue::new(MongoBackend::from_client(client.clone(), database.name()).await?);
    queue.migrate().await?;

    let name = format!("user {}", std::process::id());
    let mut session = client.start_session().await?;
    session.start_transaction().await?;
    sign_up(&queue, &users, &mut session, &name).await?;
    session.commit_transaction().await?;
    println!("committed: {} user, {} job", users.count_documents(doc! { "_id": &name }).await?, jobs(&queue).await?);

    // The same name again: the application's own collection refuses it, after the job was enqueued.
    let before = jobs(&queue).await?;
    session.start_transaction().await?;
    let refused = sign_up(&queue, &users, &mut session, &name).await.is_err();
    // After any error of the queue or the database: abort.
    session.abort_transaction().await?;
    let after = jobs(&queue).await?;
    println!("aborted: refused {refused}, {} new jobs", after - before);
    if !refused || after != before {
        return Err("not as claimed".into());
    }

    users.drop().await?;
    Ok(())
}

async fn sign_up(
    queue: &Queue<MongoBackend>,
    users: &Collection<Document>,
    session: &mut ClientSession,
    name: &str,
) -> Result<()> {
    queue.enqueue(&Welcome { name: name.to_owned() }).send_in(session).await?;
    users.insert_one(doc! { "_id": name }).session(session).await?;
    Ok(())
}

/// How many jobs of this example there are.
async fn jobs(queue: &Queue<MongoBackend>) -> Result<u64> {
    let counts = queue.counts().await?;
    Ok(counts.iter().filter(|count| count.queue.as_str() == Welcome::QUEUE).map(|count| count.jobs).sum())
}
