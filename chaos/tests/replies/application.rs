//! An application that writes a row of its own in the transaction of a call.

use async_trait::async_trait;
use fenced_queue::contract::*;
use fenced_queue::mongo::MongoBackend;
use fenced_queue::mongo::mongodb::ClientSession;
use fenced_queue::mongo::mongodb::Collection;
use fenced_queue::mongo::mongodb::bson::Document;
use fenced_queue::mongo::mongodb::bson::doc;
use fenced_queue::mysql::MysqlBackend;
use fenced_queue::mysql::sqlx::MySqlConnection;
use fenced_queue::postgres::PostgresBackend;
use fenced_queue::postgres::sqlx::PgConnection;
use fenced_queue::sqlite::SqliteBackend;
use fenced_queue::sqlite::sqlx::AssertSqlSafe;
use fenced_queue::sqlite::sqlx::Row as _;
use fenced_queue::sqlite::sqlx::SqliteConnection;
use fenced_queue::sqlite::sqlx::raw_sql;
use queue_conformance::BoxError;

use crate::trial::Told;
use crate::trial::Trial;

/// A store with a table of the application's.
#[async_trait]
pub(crate) trait Store: Inspect {
    /// Makes the table.
    async fn create_table(&self);

    /// Makes the call in a transaction in which a row of the application's is written too. Of what is not committed nothing may stay.
    async fn in_transaction(&self, trial: &Trial) -> Result<Vec<Told>>;

    /// How many of these rows were committed.
    async fn written(&self, row: JobId) -> u64;
}

/// What differs from one driver to the next.
trait Application: Transactional + Inspect {
    fn create(&self) -> impl Future<Output = Result<(), BoxError>> + Send;

    fn write(connection: &mut Self::Connection, row: JobId) -> impl Future<Output = Result<(), BoxError>> + Send;

    fn count(&self, row: JobId) -> impl Future<Output = Result<u64, BoxError>> + Send;
}

#[async_trait]
impl<A: Application> Store for A {
    async fn create_table(&self) {
        self.create().await.expect("made");
    }

    async fn in_transaction(&self, trial: &Trial) -> Result<Vec<Told>> {
        let mut transaction = match trial.settles() {
            Some(execution) => self.begin_for(execution).await?,
            None => self.begin().await?,
        };
        let written = A::write(&mut transaction, trial.row()).await;
        written
            .map_err(|error| Error::not_applied(ErrorKind::Transient, "the application's row").with_source(error))?;
        let told = trial.call_in(self, &mut transaction).await?;
        // The same transaction has been committed before.
        if !told.iter().any(|told| matches!(told, Told::Found(_))) {
            self.commit(transaction).await?;
        }
        Ok(told)
    }

    async fn written(&self, row: JobId) -> u64 {
        self.count(row).await.expect("counts")
    }
}

macro_rules! with_sql {
    ($backend:ty, $connection:ty) => {
        impl Application for $backend {
            async fn create(&self) -> Result<(), BoxError> {
                let mut transaction = self.begin().await?;
                raw_sql("CREATE TABLE written (id VARCHAR(40) NOT NULL)").execute(&mut *transaction).await?;
                Ok(self.commit(transaction).await?)
            }

            async fn write(connection: &mut $connection, row: JobId) -> Result<(), BoxError> {
                let text = AssertSqlSafe(format!("INSERT INTO written VALUES ('{row}')"));
                raw_sql(text).execute(connection).await?;
                Ok(())
            }

            async fn count(&self, row: JobId) -> Result<u64, BoxError> {
                let mut transaction = self.begin().await?;
                let text = AssertSqlSafe(format!("SELECT count(*) FROM written WHERE id = '{row}'"));
                let counted: i64 = raw_sql(text).fetch_one(&mut *transaction).await?.try_get(0)?;
                self.commit(transaction).await?;
                Ok(u64::try_from(counted)?)
            }
        }
    };
}

with_sql!(PostgresBackend, PgConnection);
with_sql!(MysqlBackend, MySqlConnection);
with_sql!(SqliteBackend, SqliteConnection);

fn written(client: &fenced_queue::mongo::mongodb::Client) -> Collection<Document> {
    client.default_database().expect("the URL names it").collection("written")
}

impl Application for MongoBackend {
    async fn create(&self) -> Result<(), BoxError> {
        let database = self.client().default_database().expect("the URL names it");
        Ok(database.create_collection("written").await?)
    }

    async fn write(session: &mut ClientSession, row: JobId) -> Result<(), BoxError> {
        written(&session.client()).insert_one(doc! { "row": row.to_string() }).session(session).await?;
        Ok(())
    }

    async fn count(&self, row: JobId) -> Result<u64, BoxError> {
        Ok(written(self.client()).count_documents(doc! { "row": row.to_string() }).await?)
    }
}
