//! `completion` on the servers.

use fenced_queue::contract::*;
use fenced_queue::*;

use crate::completion::Application;
use crate::completion::both_or_neither;
use crate::servers::discard;
use crate::servers::own_name;
use crate::servers::url;

/// The application's table, which the test drops; it cannot take its name along into `write`.
const TABLE: &str = "fenced_queue_test_written";

#[cfg(feature = "postgres")]
mod on_postgres {
    use fenced_queue::postgres::PostgresBackend;
    use fenced_queue::postgres::PostgresOptions;
    use fenced_queue::postgres::sqlx::AssertSqlSafe;
    use fenced_queue::postgres::sqlx::PgConnection;
    use fenced_queue::postgres::sqlx::query;
    use fenced_queue::postgres::sqlx::query_scalar;

    use super::*;

    struct OnPostgres(PostgresBackend);

    impl OnPostgres {
        async fn run(&self, text: &str) {
            let mut transaction = self.0.begin().await.expect("begins");
            query(AssertSqlSafe(text.to_owned())).execute(&mut *transaction).await.expect("runs");
            self.0.commit(transaction).await.expect("commits");
        }
    }

    impl Application for OnPostgres {
        type Backend = PostgresBackend;

        fn queue(&self) -> Queue<PostgresBackend> {
            Queue::new(self.0.clone())
        }

        async fn write(connection: &mut PgConnection) {
            query(AssertSqlSafe(format!("INSERT INTO {TABLE} VALUES (1)"))).execute(connection).await.expect("writes");
        }

        async fn written(&self) -> u64 {
            let mut transaction = self.0.begin().await.expect("begins");
            let text = AssertSqlSafe(format!("SELECT count(*) FROM {TABLE}"));
            let count = query_scalar::<_, i64>(text).fetch_one(&mut *transaction).await.expect("counts");
            u64::try_from(count).expect("a number")
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_a_handler_writes_and_its_outcome_are_both_there_or_neither() {
        let Some(url) = url("postgres") else { return };
        let own = own_name();
        let options = PostgresOptions::from_url(&url).expect("a URL").schema(own.parse().expect("a name"));
        let backend = PostgresBackend::connect_with(options.expect("ours")).await.expect("connects");
        let application = OnPostgres(backend.clone());
        application.run(&format!("DROP TABLE IF EXISTS {TABLE}")).await;
        application.run(&format!("CREATE TABLE {TABLE} (n integer)")).await;
        both_or_neither(application).await;

        // An error that nobody heeded: the server would answer the commit with a rollback, as if all were well.
        let mut transaction = backend.begin().await.expect("begins");
        OnPostgres::write(&mut transaction).await;
        query("SELECT 1 / 0").execute(&mut *transaction).await.expect_err("no number");
        let error = backend.commit(transaction).await.expect_err("not committed");
        assert_eq!(error.certainty(), Certainty::NotApplied, "{error}");
        let application = OnPostgres(backend.clone());
        assert_eq!(application.written().await, 3);
        application.run(&format!("DROP TABLE {TABLE}")).await;
        discard("postgres", &url, &own).await;
    }
}

#[cfg(feature = "mysql")]
mod on_mysql {
    use fenced_queue::mysql::MysqlBackend;
    use fenced_queue::mysql::MysqlOptions;
    use fenced_queue::mysql::sqlx::AssertSqlSafe;
    use fenced_queue::mysql::sqlx::MySqlConnection;
    use fenced_queue::mysql::sqlx::query;
    use fenced_queue::mysql::sqlx::query_scalar;

    use super::*;

    struct OnMysql(MysqlBackend);

    impl OnMysql {
        async fn run(&self, text: &str) {
            let mut transaction = self.0.begin().await.expect("begins");
            query(AssertSqlSafe(text.to_owned())).execute(&mut *transaction).await.expect("runs");
            self.0.commit(transaction).await.expect("commits");
        }
    }

    impl Application for OnMysql {
        type Backend = MysqlBackend;

        fn queue(&self) -> Queue<MysqlBackend> {
            Queue::new(self.0.clone())
        }

        async fn write(connection: &mut MySqlConnection) {
            query(AssertSqlSafe(format!("INSERT INTO {TABLE} VALUES (1)"))).execute(connection).await.expect("writes");
        }

        async fn written(&self) -> u64 {
            let mut transaction = self.0.begin().await.expect("begins");
            let text = AssertSqlSafe(format!("SELECT count(*) FROM {TABLE}"));
            let count = query_scalar::<_, i64>(text).fetch_one(&mut *transaction).await.expect("counts");
            u64::try_from(count).expect("a number")
        }
    }

    async fn on(name: &str) {
        let Some(url) = url(name) else { return };
        let own = own_name();
        let options = MysqlOptions::from_url(&url).expect("a URL").table_prefix(own.parse().expect("a prefix"));
        let backend = MysqlBackend::connect_with(options).await.expect("connects");
        let application = OnMysql(backend.clone());
        application.run(&format!("DROP TABLE IF EXISTS {TABLE}")).await;
        application.run(&format!("CREATE TABLE {TABLE} (n integer)")).await;
        both_or_neither(application).await;
        OnMysql(backend).run(&format!("DROP TABLE {TABLE}")).await;
        discard(name, &url, &own).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_a_handler_writes_and_its_outcome_are_both_there_or_neither() {
        on("mysql").await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn on_mariadb_too() {
        on("mariadb").await;
    }
}

#[cfg(feature = "mongo")]
mod on_mongodb {
    use fenced_queue::mongo::MongoBackend;
    use fenced_queue::mongo::MongoOptions;
    use fenced_queue::mongo::mongodb::Client;
    use fenced_queue::mongo::mongodb::ClientSession;
    use fenced_queue::mongo::mongodb::Collection;
    use fenced_queue::mongo::mongodb::bson::Document;
    use fenced_queue::mongo::mongodb::bson::doc;

    use super::*;

    struct OnMongodb(MongoBackend, Collection<Document>);

    fn collection(client: &Client) -> Collection<Document> {
        client.database(TABLE).collection("written")
    }

    impl Application for OnMongodb {
        type Backend = MongoBackend;

        fn queue(&self) -> Queue<MongoBackend> {
            Queue::new(self.0.clone())
        }

        async fn write(session: &mut ClientSession) {
            let written = collection(&session.client());
            written.insert_one(doc! { "n": 1 }).session(session).await.expect("writes");
        }

        async fn written(&self) -> u64 {
            self.1.count_documents(doc! {}).await.expect("counts")
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_a_handler_writes_and_its_outcome_are_both_there_or_neither() {
        let Some(url) = url("mongodb") else { return };
        let own = own_name();
        let client = Client::with_uri_str(&url).await.expect("connects");
        let written = collection(&client);
        written.drop().await.expect("drops");
        written.insert_one(doc! { "_id": "made" }).await.expect("made");
        written.delete_many(doc! {}).await.expect("empty");
        let options = MongoOptions::from_url(&url).expect("a URL").database(own.clone()).expect("a database");
        let backend = MongoBackend::connect_with(options).await.expect("connects");
        both_or_neither(OnMongodb(backend, written)).await;
        client.database(TABLE).drop().await.expect("drops");
        discard("mongodb", &url, &own).await;
    }
}
