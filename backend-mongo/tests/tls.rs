//! Encrypted connections: that they are when the URL asks for it, and that nobody else is taken for the server.

mod common;

use backend_mongo::MongoBackend;
use backend_mongo::MongoOptions;
use common::server::Server;
use common::*;
use queue_core::Certainty::NotApplied;
use queue_core::*;

/// A file beside this one, of an authority, or of a server whose address it vouches for.
macro_rules! fixture {
    ($name:literal) => {
        concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/", $name)
    };
}

#[tokio::test]
async fn as_the_url_asks() {
    let (certificate, authority) = (fixture!("server.pem"), fixture!("authority.pem"));
    let Some(server) = Server::encrypted(certificate, authority).await else { return };
    let connect = async |parameters: &str| {
        let url = format!("{}&serverSelectionTimeoutMS=1000&{parameters}", server.url());
        let options = MongoOptions::from_url(url).expect("a URL").database("jobs").expect("a name");
        MongoBackend::connect_with(options).await
    };
    // The server talks to nobody who does not encrypt.
    let backend = connect(&format!("tls=true&tlsCAFile={authority}")).await.expect("connects");
    backend.migrate().await.expect("migrates");
    running(&backend, 3).await;
    backend.close().await;
    let other = concat!("tls=true&tlsCAFile=", fixture!("other_authority.pem"));
    // Without a file of its own, the authorities of the web.
    for parameters in ["tls=false", "tls=true", other] {
        assert_error(connect(parameters).await, ErrorKind::Unavailable, NotApplied);
    }
}
