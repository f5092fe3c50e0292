//! Databases for tests, on servers that run already.

mod without;

use without::is_left_out;

/// A database of its own on a server.
pub(crate) struct Database {
    server: &'static str,
    server_url: String,
    name: String,
    /// Where it is.
    pub(crate) url: String,
}

/// Where the server is; none if it was excluded by name.
fn server_url(server: &str) -> Option<String> {
    if is_left_out(server) {
        return None;
    }
    let variable = format!("TEST_{}_URL", server.to_uppercase());
    let url = std::env::var(&variable);
    Some(url.unwrap_or_else(|_| panic!("{variable} is not set: scripts/test.sh starts the servers and sets it")))
}

impl Database {
    /// Makes it; none if the server was excluded by name.
    pub(crate) async fn create(server: &'static str, purpose: &str) -> Option<Self> {
        let server_url = server_url(server)?;
        let name = format!("{purpose}_{}", std::process::id());
        let (before, options) = server_url.split_once('?').unwrap_or((&server_url, ""));
        let address = before.rsplit_once('/').map_or(before, |(address, _)| address);
        let url = format!("{address}/{name}?{options}");
        let database = Self { server, server_url, name, url };
        database.tell(&format!("CREATE DATABASE {}", database.name)).await;
        Some(database)
    }

    /// Drops it: after success, so that whoever looks for a failure finds the rows.
    pub(crate) async fn discard(self) {
        let Self { server, server_url, name, .. } = &self;
        match *server {
            "mongodb" => {
                let client = fenced_queue::mongo::mongodb::Client::with_uri_str(server_url).await.expect("connects");
                client.database(name).drop().await.expect("drops");
            }
            "postgres" => self.tell(&format!("DROP DATABASE {name} WITH (FORCE)")).await,
            _ => self.tell(&format!("DROP DATABASE {name}")).await,
        }
    }

    async fn tell(&self, text: &str) {
        match self.server {
            "postgres" => {
                use fenced_queue::postgres::sqlx::{AssertSqlSafe, Connection, PgConnection, query};
                let mut connection = PgConnection::connect(&self.server_url).await.expect("connects");
                query(AssertSqlSafe(text.to_owned())).execute(&mut connection).await.expect("runs");
            }
            "mysql" | "mariadb" => {
                use fenced_queue::mysql::sqlx::{AssertSqlSafe, Connection, MySqlConnection, query};
                let mut connection = MySqlConnection::connect(&self.server_url).await.expect("connects");
                query(AssertSqlSafe(text.to_owned())).execute(&mut connection).await.expect("runs");
            }
            // It makes databases when they are written to.
            _ => {}
        }
    }
}
