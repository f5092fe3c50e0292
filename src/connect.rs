//! From a URL to a backend.

use std::sync::Arc;

use queue_core::Inspect;
use queue_core::MemoryBackend;

use crate::QueueError;

/// The schemes that there are, and the feature that each needs.
const SCHEMES: [(&str, Option<&str>); 8] = [
    ("sqlite", Some("sqlite")),
    ("postgres", Some("postgres")),
    ("postgresql", Some("postgres")),
    ("mysql", Some("mysql")),
    ("mariadb", Some("mysql")),
    ("mongodb", Some("mongo")),
    ("mongodb+srv", Some("mongo")),
    ("memory", None),
];

/// Connects to the store of this URL. No part of it but its scheme is ever put into a message.
pub(crate) async fn connect(url: &str) -> Result<Arc<dyn Inspect>, QueueError> {
    let scheme = scheme(url);
    let known = SCHEMES.into_iter().find(|(name, _)| Some(*name) == scheme.as_deref());
    match known {
        #[cfg(feature = "sqlite")]
        Some((_, Some("sqlite"))) => Ok(Arc::new(backend_sqlite::SqliteBackend::connect(url).await?)),
        #[cfg(feature = "postgres")]
        Some((_, Some("postgres"))) => Ok(Arc::new(backend_postgres::PostgresBackend::connect(url).await?)),
        #[cfg(feature = "mysql")]
        Some((_, Some("mysql"))) => Ok(Arc::new(backend_mysql::MysqlBackend::connect(url).await?)),
        #[cfg(feature = "mongo")]
        Some((_, Some("mongo"))) => Ok(Arc::new(backend_mongo::MongoBackend::connect(url).await?)),
        Some(("memory", _)) => Ok(Arc::new(MemoryBackend::new())),
        Some((scheme, Some(feature))) => Err(QueueError::FeatureDisabled { scheme, feature }),
        _ => Err(QueueError::UnknownScheme { scheme, known: SCHEMES.map(|(name, _)| name).join(", ") }),
    }
}

/// What stands before the first colon, if it can be a scheme.
fn scheme(url: &str) -> Option<String> {
    let (scheme, _) = url.split_once(':')?;
    let is_scheme = scheme.starts_with(|first: char| first.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    is_scheme.then(|| scheme.to_ascii_lowercase())
}
