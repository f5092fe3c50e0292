//! The version of a store's schema, and which programs may work on it.

use crate::Error;
use crate::ErrorKind;

/// What a store's schema says of itself: every backend keeps it in the store, next to the jobs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchemaVersion {
    /// Its version: 1 after the first migration, 0 where there is no schema yet.
    pub version: i64,
    /// The oldest version that programs may know and still work on it.
    pub oldest_version: i64,
    /// The release that `oldest_version` came with.
    pub oldest_release: String,
}

impl SchemaVersion {
    /// Refuses to let a program work on a schema that has left it behind: to be asked when a handle is opened, and before
    /// migrating. `known` is the version that the program knows, `release` its own.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Schema`], not applied, with both versions in its message.
    pub fn admit(&self, known: usize, release: &str) -> Result<(), Error> {
        let Self { version, oldest_version, oldest_release } = self;
        if *oldest_version <= i64::try_from(known).unwrap_or(i64::MAX) {
            return Ok(());
        }
        let message = format!(
            "release {release} knows the schema up to version {known}; the database is at version {version} and admits none \
             below version {oldest_version}, which came with release {oldest_release}"
        );
        Err(Error::not_applied(ErrorKind::Schema, message))
    }

    /// Whether a migration that leads to `version` is still missing.
    pub fn lacks(&self, version: usize) -> bool {
        i64::try_from(version).is_ok_and(|version| version > self.version)
    }
}
