//! Stores on real servers: each scenario gets tables of its own, which are dropped when it has passed.

use std::sync::Arc;

use fenced_queue::contract::Backend;
use fenced_queue::contract::Inspect;

use crate::common::Store;

/// Where the server is; none if it was excluded by name.
pub(crate) fn url(name: &str) -> Option<String> {
    let without = std::env::var("TEST_WITHOUT").unwrap_or_default();
    if without.split(',').any(|excluded| excluded == name) {
        println!("{name}: EXCLUDED by TEST_WITHOUT");
        return None;
    }
    let variable = format!("TEST_{}_URL", name.to_uppercase());
    let url = std::env::var(&variable);
    Some(url.unwrap_or_else(|_| panic!("{variable} is not set: scripts/test.sh starts the servers and sets it")))
}

/// A name for tables of one test.
pub(crate) fn own_name() -> String {
    format!("facade_{}", uuid::Uuid::new_v4().simple())[..30].to_owned()
}

/// Runs a scenario on the server that `TEST_{NAME}_URL` points to.
pub(crate) async fn run<F: Future<Output = ()>>(name: &str, scenario: impl FnOnce(Arc<Store>) -> F) {
    let Some(url) = url(name) else { return };
    let own = own_name();
    let backend = open(name, &url, &own).await;
    backend.migrate().await.expect("migrates");
    let scenario = scenario(Store::on_a_server(backend));
    tokio::time::timeout(std::time::Duration::from_secs(120), scenario).await.expect("it ends");
    discard(name, &url, &own).await;
}

pub(crate) async fn open(name: &str, url: &str, own: &str) -> Arc<dyn Inspect> {
    match name {
        #[cfg(feature = "postgres")]
        "postgres" => {
            use fenced_queue::postgres::{PostgresBackend, PostgresOptions};
            let options =
                PostgresOptions::from_url(url).expect("a URL").schema(own.parse().expect("a schema")).expect("ours");
            Arc::new(PostgresBackend::connect_with(options).await.expect("connects"))
        }
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => {
            use fenced_queue::mysql::{MysqlBackend, MysqlOptions};
            let options = MysqlOptions::from_url(url).expect("a URL").table_prefix(own.parse().expect("a prefix"));
            Arc::new(MysqlBackend::connect_with(options).await.expect("connects"))
        }
        #[cfg(feature = "mongo")]
        "mongodb" => {
            use fenced_queue::mongo::{MongoBackend, MongoOptions};
            let options = MongoOptions::from_url(url).expect("a URL").database(own).expect("a database");
            Arc::new(MongoBackend::connect_with(options).await.expect("connects"))
        }
        other => panic!("{other}: no such server"),
    }
}

pub(crate) async fn discard(name: &str, url: &str, own: &str) {
    match name {
        #[cfg(feature = "postgres")]
        "postgres" => {
            use fenced_queue::postgres::sqlx::{AssertSqlSafe, Connection, PgConnection, query};
            let mut connection = PgConnection::connect(url).await.expect("connects");
            let text = format!("DROP SCHEMA {own} CASCADE");
            query(AssertSqlSafe(text)).execute(&mut connection).await.expect("drops");
        }
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => {
            use fenced_queue::mysql::sqlx::{AssertSqlSafe, Connection, MySqlConnection, query};
            let mut connection = MySqlConnection::connect(url).await.expect("connects");
            let text = format!("DROP TABLE {own}steps, {own}events, {own}jobs, {own}schema");
            query(AssertSqlSafe(text)).execute(&mut connection).await.expect("drops");
        }
        #[cfg(feature = "mongo")]
        "mongodb" => {
            let client = fenced_queue::mongo::mongodb::Client::with_uri_str(url).await.expect("connects");
            client.database(own).drop().await.expect("drops");
        }
        other => panic!("{other}: no such server"),
    }
}
