//! A store to measure: how to open it through the contract, and by the plain driver.

use std::sync::Arc;

use async_trait::async_trait;
use fenced_queue::Inspect;

use crate::Result;
use crate::floor::Floor;
use crate::mongo::MongoStore;
use crate::mysql::MysqlStore;
use crate::postgres::PostgresStore;
use crate::sqlite::SqliteStore;

/// A database, schema or file of the benchmark's own, with the tables in it.
#[async_trait]
pub(crate) trait Store: Send + Sync {
    /// What is measured, with its version.
    async fn version(&self) -> Result<String>;

    /// A handle with this many connections.
    async fn contract(&self, connections: u32) -> Result<Arc<dyn Inspect>>;

    /// A connection of the plain driver.
    async fn floor(&self) -> Result<Box<dyn Floor>>;

    async fn discard(self: Box<Self>) -> Result<()>;
}

pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) store: Box<dyn Store>,
}

impl Target {
    pub(crate) async fn open(name: &str) -> Result<Self> {
        let store: Box<dyn Store> = match name {
            "sqlite" => Box::new(SqliteStore::open().await?),
            "postgres" => Box::new(PostgresStore::open(&url(name)?).await?),
            "mysql" | "mariadb" => Box::new(MysqlStore::open(&url(name)?).await?),
            "mongodb" => Box::new(MongoStore::open(&url(name)?).await?),
            other => return Err(format!("{other}: no such store").into()),
        };
        Ok(Self { name: name.to_owned(), version: store.version().await?, store })
    }

    pub(crate) async fn discard(self) -> Result<()> {
        self.store.discard().await
    }
}

fn url(name: &str) -> Result<String> {
    let variable = format!("TEST_{}_URL", name.to_uppercase());
    std::env::var(&variable).map_err(|_| format!("{variable} is not set; scripts/bench.sh starts the servers").into())
}

/// A name for what the benchmark makes in a server that others use too.
pub(crate) fn own_name() -> String {
    format!("fenced_bench_{}", std::process::id())
}
