//! Where a database is, and what a URL may say.

use backend_mysql::MysqlBackend;
use backend_mysql::MysqlOptions;
use queue_core::*;

#[test]
fn what_is_no_url_is_refused_without_repeating_it() {
    for url in [
        "",
        "jobs",
        "postgres://u:secret@host/db",
        "mysql:u:secret@host/db",
        "mysql://u:secret@host",
        "mysql://u:secret@host/",
        "mariadb://u:secret@host",
        "mysql://u:secret@host:port/db",
        "mysql://u:secret@host/db?ssl_mode=secret",
        "mysql://u:secret@host/db?ssl-mode=secret",
        "mysql://u:secret@host/db?timezone=secret",
        "mysql://u:secret@host/db?charset=secret",
        "mysql://u:secret@host/db?statement-cache-capacity=secret",
        "mysql://u:%ff%secret@host/db",
    ] {
        let error = MysqlOptions::from_url(url).expect_err(url);
        assert_eq!((error.kind(), error.certainty()), (ErrorKind::Invalid, Certainty::NotApplied), "{url}");
        assert!(!format!("{error} {error:?}").contains("secret"), "{error:?}");
    }
}

#[test]
fn what_is_a_url_is_taken() {
    for url in [
        "mysql://host/db",
        "MariaDB://u:p%40ss@host:3307/db",
        "mysql://u@[::1]/db?ssl-mode=REQUIRED&ssl-ca=/etc/ca.pem",
        "mysql://u@localhost/db?socket=/run/mysqld/mysqld.sock",
    ] {
        MysqlOptions::from_url(url).expect(url);
    }
    let options = MysqlOptions::from_url("mysql://u:secret@host/db").expect("a URL");
    assert!(!format!("{options:?}").contains("secret"), "{options:?}");
}

#[tokio::test]
async fn options_without_a_database_lead_nowhere() {
    let error = MysqlBackend::connect_with(MysqlOptions::default()).await.expect_err("no database");
    assert_eq!((error.kind(), error.certainty()), (ErrorKind::Invalid, Certainty::NotApplied));
}
