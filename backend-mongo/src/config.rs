//! What a handle can be told when it is made.

use std::fmt;
use std::time::Duration;

use mongodb::options::ClientOptions;
use queue_core::Capabilities;
use queue_core::ClockOffset;
use queue_core::Error;
use queue_core::ErrorKind;
use queue_core::Identifier;
use queue_core::Result;

/// Where the database is and how it is used.
///
/// ```
/// use backend_mongo::MongoOptions;
///
/// # fn example() -> queue_core::Result<()> {
/// let options = MongoOptions::from_url("mongodb://db1,db2,db3/app?replicaSet=rs0")?
///     .collection_prefix("app_".parse()?)
///     .max_payload(64 * 1024)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct MongoOptions {
    url: Option<String>,
    pub(crate) database: Option<String>,
    max_connections: Option<u32>,
    pub(crate) prefix: Identifier,
    pub(crate) max_payload: usize,
    pub(crate) skip_locked_after: Duration,
    pub(crate) lock_timeout: Duration,
    pub(crate) change_streams: Option<bool>,
    pub(crate) clock: ClockOffset,
}

impl fmt::Debug for MongoOptions {
    /// Without the URL, which may hold a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            url: _,
            database,
            max_connections,
            prefix,
            max_payload,
            skip_locked_after,
            lock_timeout,
            change_streams,
            clock,
        } = self;
        f.debug_struct("MongoOptions")
            .field("database", database)
            .field("max_connections", max_connections)
            .field("prefix", prefix)
            .field("max_payload", max_payload)
            .field("skip_locked_after", skip_locked_after)
            .field("lock_timeout", lock_timeout)
            .field("change_streams", change_streams)
            .field("clock", clock)
            .finish_non_exhaustive()
    }
}

impl Default for MongoOptions {
    /// Every default, and no URL: for an application's own client.
    fn default() -> Self {
        Self {
            url: None,
            database: None,
            max_connections: None,
            prefix: Identifier::default(),
            max_payload: Capabilities::DEFAULT_MAX_PAYLOAD,
            skip_locked_after: Duration::from_millis(250),
            lock_timeout: Duration::from_secs(5),
            change_streams: None,
            clock: ClockOffset::default(),
        }
    }
}

impl MongoOptions {
    /// The most that [`max_payload`](Self::max_payload) may be: a row of 16 MB has room for a payload, a result and the
    /// failures. For steps and waits it should be a quarter of that at most.
    pub const LARGEST_MAX_PAYLOAD: usize = 7 * 1024 * 1024;

    /// `mongodb://..`, or `mongodb+srv://..` with the feature `dns`, as MongoDB's manual has them. It names the database, or
    /// [`database`](Self::database) does. What it says of write concern, read preference and retries does not matter.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`]: another scheme. [`ErrorKind::Unsupported`]: `mongodb+srv` without the feature.
    pub fn from_url(url: impl Into<String>) -> Result<Self> {
        let url = url.into();
        match url.split_once("://") {
            Some(("mongodb", _)) => {}
            Some(("mongodb+srv", _)) if cfg!(feature = "dns") => {}
            Some(("mongodb+srv", _)) => {
                let message = "a database URL of the scheme mongodb+srv needs the feature dns of backend-mongo";
                return Err(Error::not_applied(ErrorKind::Unsupported, message));
            }
            _ => return Err(Error::invalid("a database URL must begin with \"mongodb://\" or \"mongodb+srv://\"")),
        }
        Ok(Self { url: Some(url), ..Self::default() })
    }

    /// The database, where the URL names none or another.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`]: a name that MongoDB does not take.
    pub fn database(mut self, name: impl Into<String>) -> Result<Self> {
        self.database = Some(checked_database(name.into())?);
        Ok(self)
    }

    /// What the collections' names begin with, so that several queues share one database. `fenced_` unless told.
    #[must_use]
    pub fn collection_prefix(mut self, prefix: Identifier) -> Self {
        self.prefix = prefix;
        self
    }

    /// The most bytes of a payload or a result. 1 MiB unless told.
    ///
    /// # Errors
    ///
    /// More than [`LARGEST_MAX_PAYLOAD`](Self::LARGEST_MAX_PAYLOAD).
    pub fn max_payload(mut self, bytes: usize) -> Result<Self> {
        if bytes > Self::LARGEST_MAX_PAYLOAD {
            let largest = Self::LARGEST_MAX_PAYLOAD;
            return Err(Error::invalid(format!("max_payload must be at most {largest}, not {bytes}")));
        }
        self.max_payload = bytes;
        Ok(self)
    }

    /// How many connections to a server the client opens at most for calls. What the URL says, or else 100, unless told. An
    /// application's own client keeps its number.
    #[must_use]
    pub fn max_connections(mut self, connections: u32) -> Self {
        self.max_connections = Some(connections.max(1));
        self
    }

    /// How long a claim, a heartbeat or a batch waits for a row that somebody has in an open transaction before it goes on
    /// without: from 50 milliseconds to 10 seconds, a quarter of a second unless told, and two milliseconds more for every
    /// row of a batch. On a server that takes longer to write a row they would often go row by row for nothing.
    #[must_use]
    pub fn skip_locked_after(mut self, wait: Duration) -> Self {
        self.skip_locked_after = wait.clamp(Duration::from_millis(50), Duration::from_secs(10));
        self
    }

    /// How long a write that needs the row, or the key, that somebody has in an open transaction waits for it, and a claim
    /// that finds nothing else: at most an hour, 5 seconds unless told; a claim never longer than a third of its lease. So long a
    /// write waits for a majority, too.
    #[must_use]
    pub fn lock_timeout(mut self, timeout: Duration) -> Self {
        self.lock_timeout = timeout.min(Duration::from_secs(3600));
        self
    }

    /// Whether workers are woken by what other processes enqueue, through a change stream, which from the first wait on takes a
    /// connection for most of the time. They are, unless told, but not through an application's own client, which may have
    /// no connection to spare. Without it they find such jobs when they poll.
    #[must_use]
    pub fn change_streams(mut self, watch: bool) -> Self {
        self.change_streams = Some(watch);
        self
    }

    /// Adds an offset to the server's clock. For tests only: handles with different offsets on one database disagree about
    /// every lease.
    #[must_use]
    pub fn clock(mut self, offset: ClockOffset) -> Self {
        self.clock = offset;
        self
    }

    /// What the driver is told, and the name of the database.
    pub(crate) async fn client(&self) -> Result<(ClientOptions, String)> {
        let Some(url) = &self.url else {
            return Err(Error::invalid("there is no URL to connect to"));
        };
        // The driver's message may repeat a part of the URL, and messages end up in logs.
        let malformed =
            |_| Error::invalid("the database URL is not a MongoDB connection string, or its hosts have no record");
        let mut options = ClientOptions::parse(url).await.map_err(malformed)?;
        if let Some(connections) = self.max_connections {
            // And one for the change stream.
            options.max_pool_size = Some(connections.saturating_add(1));
        }
        // Within the time that a call waits for an answer, so that it is known not to have been sent.
        options.server_selection_timeout = options.server_selection_timeout.or(Some(Duration::from_secs(5)));
        let named = self.database.clone().or_else(|| options.default_database.clone());
        let Some(database) = named else {
            return Err(Error::invalid("the database URL names no database, and neither do the options"));
        };
        Ok((options, checked_database(database)?))
    }
}

pub(crate) fn checked_database(name: String) -> Result<String> {
    if name.is_empty()
        || name.len() > 63
        || name.contains(['/', '\\', '.', ' ', '"', '$', '*', '<', '>', ':', '|', '?', '\0'])
    {
        return Err(Error::invalid("MongoDB does not take this name of a database"));
    }
    Ok(name)
}

#[cfg(test)]
#[path = "../../conformance/tests/fuzz/mod.rs"]
mod fuzz;

#[cfg(test)]
mod tests {
    use super::fuzz::config;
    use super::fuzz::mutated;
    use super::*;
    use proptest::prelude::*;

    const SECRET: &str = "hunter2secret";

    fn shows(value: &impl fmt::Debug) -> bool {
        format!("{value:?}").contains(SECRET)
    }

    proptest! {
        #![proptest_config(config(512))]

        #[test]
        fn no_message_repeats_a_url(
            url in mutated(
                &[
                    "mongodb://u:hunter2secret@host:27017,b:1/db?replicaSet=rs0&maxPoolSize=3",
                    "mongodb://u:hunter2secret@[::1]/?authSource=admin&readConcernLevel=majority&w=1",
                    "mongodb://u:hunter2secret@%2Frun%2Fmongodb.sock/db?tls=false&compressors=zlib",
                ],
                &["%", "%ff", "%00", "?", "&", "=", "@", ":", "/", "[", "]", "#", ",", "tls=", "\0", "é", "9999999"],
            ),
        ) {
            let read = match MongoOptions::from_url(&*url) {
                Ok(options) => {
                    prop_assert!(!shows(&options));
                    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
                    runtime.block_on(options.client()).map(drop)
                }
                Err(error) => Err(error),
            };
            if let Err(error) = read {
                prop_assert_eq!((error.kind(), error.certainty()), (ErrorKind::Invalid, queue_core::Certainty::NotApplied));
                prop_assert!(!error.to_string().contains(SECRET) && !shows(&error), "{:?}", error);
            }
        }
    }
}
