//! Encrypted connections: that they are when the URL asks for it, and that nobody else is taken for the server.
//!
//! With the feature `tls` the server must have a certificate for its address, and the file of who vouches for it be on this machine.

mod common;

use backend_postgres::PostgresBackend;
use common::*;
use queue_core::*;

async fn connect(scratch: &Scratch, parameters: &str) -> Result<PostgresBackend> {
    let url = url("TEST_POSTGRES_URL");
    let url = format!("{url}{}{parameters}", if url.contains('?') { '&' } else { '?' });
    PostgresBackend::connect_with(scratch.options_for(&url)).await
}

/// Nothing is sent that was to be kept secret.
#[cfg(not(feature = "tls"))]
#[tokio::test]
async fn whoever_insists_needs_the_feature() {
    let scratch = Scratch::new();
    for mode in ["require", "verify-ca", "verify-full"] {
        let error = connect(&scratch, &format!("sslmode={mode}")).await.map(drop).expect_err("refused");
        assert_eq!((error.kind(), error.certainty()), (ErrorKind::Unsupported, Certainty::NotApplied), "{error}");
        assert!(error.to_string().contains("tls"), "{error}");
    }
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn as_the_url_asks() {
    let is_encrypted = async |backend: &PostgresBackend| {
        let mut transaction = backend.begin().await.expect("begins");
        let text = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
        sqlx::query_scalar::<_, bool>(text).fetch_one(&mut *transaction).await.expect("an answer")
    };
    let (scratch, _backend) = migrated().await;
    let authority: String =
        sqlx::query_scalar("SHOW ssl_ca_file").fetch_one(&mut connection().await).await.expect("a file");
    let right = format!("sslrootcert={authority}");
    let wrong = concat!("sslrootcert=", env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/other_authority.pem");
    let plain = connect(&scratch, "sslmode=disable").await.expect("connects");
    assert!(!is_encrypted(&plain).await);
    for parameters in ["require", &format!("verify-ca&{right}"), &format!("verify-full&{right}")] {
        let backend = connect(&scratch, &format!("sslmode={parameters}")).await.expect("connects");
        assert!(is_encrypted(&backend).await, "{parameters}");
        backend.enqueue(&[job("1")]).await.expect("stores");
        backend.close().await;
    }
    // Without a file of its own, the authorities of the web.
    for parameters in ["verify-full", &format!("verify-ca&{wrong}"), &format!("verify-full&{wrong}")] {
        let refused = connect(&scratch, &format!("sslmode={parameters}")).await.map(drop);
        assert_error(refused, ErrorKind::Unavailable);
    }
}
