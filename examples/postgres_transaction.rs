//! A user and the job that greets them, in one transaction of the application's: both are there, or neither is.
//!
//! ```text
//! cargo run --example postgres_transaction --features postgres -- postgres://user@host/database
//! ```

use std::error::Error;

use fenced_queue::JobArgs;
use fenced_queue::Queue;
use fenced_queue::postgres::PostgresBackend;
use fenced_queue::postgres::sqlx;
use fenced_queue::postgres::sqlx::PgConnection;
use fenced_queue::postgres::sqlx::PgPool;
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
    let url = std::env::args().nth(1).ok_or("usage: postgres_transaction URL")?;
    let pool = PgPool::connect(&url).await?;
    sqlx::query("CREATE TABLE IF NOT EXISTS example_users (name text NOT NULL UNIQUE)").execute(&pool).await?;
    let queue = Queue::new(PostgresBackend::from_pool(pool.clone()).await?);
    queue.migrate().await?;

    let name = format!("user {}", std::process::id());
    let mut transaction = pool.begin().await?;
    sign_up(&queue, &mut transaction, &name).await?;
    transaction.commit().await?;
    println!("committed: {} user, {} job", users(&pool, &name).await?, jobs(&queue).await?);

    // The same name again: the application's own constraint refuses it, after the job was enqueued.
    let before = jobs(&queue).await?;
    let mut transaction = pool.begin().await?;
    let refused = sign_up(&queue, &mut transaction, &name).await.is_err();
    // After any error of the queue or the database: roll back.
    transaction.rollback().await?;
    let after = jobs(&queue).await?;
    println!("rolled back: refused {refused}, {} new jobs", after - before);
    if !refused || after != before {
        return Err("not as claimed".into());
    }

    sqlx::query("DROP TABLE example_users").execute(&pool).await?;
    Ok(())
}

async fn sign_up(queue: &Queue<PostgresBackend>, transaction: &mut PgConnection, name: &str) -> Result<()> {
    queue.enqueue(&Welcome { name: name.to_owned() }).send_in(transaction).await?;
    sqlx::query("INSERT INTO example_users (name) VALUES ($1)").bind(name).execute(transaction).await?;
    Ok(())
}

async fn users(pool: &PgPool, name: &str) -> Result<i64> {
    let query = sqlx::query_scalar("SELECT count(*) FROM example_users WHERE name = $1");
    Ok(query.bind(name).fetch_one(pool).await?)
}

/// How many jobs of this example there are.
async fn jobs(queue: &Queue<PostgresBackend>) -> Result<u64> {
    let counts = queue.counts().await?;
    Ok(counts.iter().filter(|count| count.queue.as_str() == Welcome::QUEUE).map(|count| count.jobs).sum())
}
