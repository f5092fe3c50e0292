//! Encrypted connections: that they are when the URL asks for it, and that nobody else is taken for the server.
//!
//! With the feature `tls` the server must have a certificate for its address, and the file of who vouches for it be on this machine.

mod common;

use backend_mysql::MysqlBackend;
use backend_mysql::MysqlOptions;
use common::*;
use queue_core::*;
#[cfg(feature = "tls")]
use sqlx::Row;
use sqlx::mysql::MySqlSslMode;

/// Nothing is sent that was to be kept secret.
#[cfg(not(feature = "tls"))]
#[tokio::test]
async fn whoever_insists_needs_the_feature() {
    on_each_server(async |database, _| {
        for mode in [MySqlSslMode::Required, MySqlSslMode::VerifyCa, MySqlSslMode::VerifyIdentity] {
            let options = MysqlOptions::connection(database.location().ssl_mode(mode)).expect("a database");
            let error = MysqlBackend::connect_with(options).await.map(drop).expect_err("refused");
            assert_eq!((error.kind(), error.certainty()), (ErrorKind::Unsupported, Certainty::NotApplied), "{error}");
            assert!(error.to_string().contains("tls"), "{error}");
        }
    })
    .await;
}

/// The cipher of a handle's session; empty if it is not encrypted.
#[cfg(feature = "tls")]
async fn cipher(backend: &MysqlBackend) -> String {
    let mut transaction = backend.begin().await.expect("begins");
    let row = sqlx::raw_sql("SHOW SESSION STATUS LIKE 'Ssl_cipher'").fetch_one(&mut *transaction).await;
    let cipher = row.and_then(|row| row.try_get_unchecked::<Vec<u8>, _>(1)).expect("a status");
    drop(transaction);
    String::from_utf8(cipher).expect("text")
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn as_the_url_asks() {
    on_each_server(async |database, _| {
        let authority = database.rows("SELECT CAST(@@ssl_ca AS BINARY)").await.remove(0).get::<Vec<u8>, _>(0);
        let authority = String::from_utf8(authority).expect("text");
        let location = database.location();
        let (host, port, name) = (location.get_host(), location.get_port(), &database.name);
        let connect = async |parameters: &str| {
            let options = MysqlOptions::from_url(&format!("mysql://root@{host}:{port}/{name}?{parameters}"));
            MysqlBackend::connect_with(options.expect("a URL")).await
        };
        let right = format!("ssl-ca={authority}");
        let wrong = concat!("ssl-ca=", env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/other_authority.pem");
        assert_eq!(cipher(&connect("ssl-mode=DISABLED").await.expect("connects")).await, "");
        for parameters in ["REQUIRED", &format!("VERIFY_CA&{right}"), &format!("VERIFY_IDENTITY&{right}")] {
            let backend = connect(&format!("ssl-mode={parameters}")).await.expect("connects");
            assert_ne!(cipher(&backend).await, "", "{parameters}");
            backend.enqueue(&[job("1")]).await.expect("stores");
            backend.close().await;
        }
        // Without a file of its own, the authorities of the web.
        for parameters in ["VERIFY_CA", &format!("VERIFY_CA&{wrong}"), &format!("VERIFY_IDENTITY&{wrong}")] {
            let refused = connect(&format!("ssl-mode={parameters}")).await.map(drop);
            assert_error(refused, ErrorKind::Unavailable);
        }
    })
    .await;
}

/// What MySQL asks for by default goes over an encrypted connection only, unless the feature `rsa` is there.
#[cfg(feature = "tls")]
#[tokio::test]
async fn a_password_over_an_encrypted_connection() {
    on_each_server(async |database, _| {
        let user = format!("p_{}", database.name.trim_start_matches("qc_"));
        let user = &user[user.len().saturating_sub(32)..];
        let grant = format!("CREATE USER {user} IDENTIFIED BY 'secret'; GRANT ALL ON {}.* TO {user}", database.name);
        database.server.run(&grant).await.expect("a user");
        let location = database.location().username(user).password("secret").ssl_mode(MySqlSslMode::Required);
        let options = MysqlOptions::connection(location).expect("a database");
        let backend = MysqlBackend::connect_with(options).await.expect("connects");
        backend.enqueue(&[job("1")]).await.expect("stores");
        backend.close().await;
        database.server.run(&format!("DROP USER {user}")).await.expect("drops");
    })
    .await;
}
