//! What a handle can be told when it is made.

use std::fmt;
use std::time::Duration;

use queue_core::Capabilities;
use queue_core::ClockOffset;
use queue_core::Error;
use queue_core::Identifier;
use queue_core::Result;
use sqlx::mysql::MySqlConnectOptions;

/// Where the database is and how it is used.
///
/// ```
/// use backend_mysql::MysqlOptions;
///
/// # fn example() -> queue_core::Result<()> {
/// let options = MysqlOptions::from_url("mysql://app:secret@db.internal/shop?ssl-mode=REQUIRED")?
///     .table_prefix("app_".parse()?)
///     .max_payload(64 * 1024);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct MysqlOptions {
    pub(crate) connection: Option<MySqlConnectOptions>,
    pub(crate) max_connections: u32,
    pub(crate) acquire_timeout: Duration,
    pub(crate) lock_timeout: Duration,
    pub(crate) prefix: Identifier,
    pub(crate) max_payload: usize,
    pub(crate) clock: ClockOffset,
}

impl fmt::Debug for MysqlOptions {
    /// Without the connection, which has a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MysqlOptions")
            .field("max_connections", &self.max_connections)
            .field("lock_timeout", &self.lock_timeout)
            .field("prefix", &self.prefix)
            .field("max_payload", &self.max_payload)
            .finish_non_exhaustive()
    }
}

impl Default for MysqlOptions {
    /// Every default, and no database: for an application's own pool.
    fn default() -> Self {
        Self {
            connection: None,
            max_connections: 10,
            acquire_timeout: Duration::from_secs(10),
            lock_timeout: Duration::from_secs(5),
            prefix: Identifier::default(),
            max_payload: Capabilities::DEFAULT_MAX_PAYLOAD,
            clock: ClockOffset::default(),
        }
    }
}

/// The parameters of a URL that have an effect here. The driver passes over those that it does not know, and a misspelt
/// `ssl-mode` must not go unnoticed.
const PARAMETERS: &[&str] = &[
    "sslmode",
    "ssl-mode",
    "sslca",
    "ssl-ca",
    "sslcert",
    "ssl-cert",
    "sslkey",
    "ssl-key",
    "socket",
    "statement-cache-capacity",
];

impl MysqlOptions {
    /// `mysql://user:password@host:port/database`, or `mariadb://..`, which means the same. Percent-encoded where a
    /// character would mean something else; with the driver's parameters about TLS (such as `?ssl-mode=REQUIRED`), `socket`
    /// and `statement-cache-capacity`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](queue_core::ErrorKind::Invalid): another scheme, no database, or another parameter. No message
    /// repeats a part of the URL, since URLs have passwords and messages end up in logs.
    pub fn from_url(url: &str) -> Result<Self> {
        let scheme = url.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
        if !matches!(scheme.as_deref(), Some("mysql" | "mariadb")) {
            return Err(Error::invalid("a database URL must begin with \"mysql://\" or \"mariadb://\""));
        }
        let (_, parameters) = url.split_once('?').unwrap_or_default();
        let names = parameters.split('&').map(|parameter| parameter.split('=').next().unwrap_or_default());
        if names.filter(|name| !name.is_empty()).any(|name| !PARAMETERS.contains(&name)) {
            let known = PARAMETERS.join(", ");
            return Err(Error::invalid(format!("the only parameters of a database URL are {known}")));
        }
        let connection = url.parse().map_err(|_| Error::invalid("the database URL is malformed"))?;
        Self::connection(connection)
    }

    /// The database that the driver's own options lead to.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](queue_core::ErrorKind::Invalid): they name no database.
    pub fn connection(connection: MySqlConnectOptions) -> Result<Self> {
        if connection.get_database().is_none_or(str::is_empty) {
            return Err(Error::invalid("the database URL names no database: mysql://host/database"));
        }
        Ok(Self { connection: Some(connection), ..Self::default() })
    }

    /// What the tables' names begin with, so that several queues share one database. `fenced_` unless told.
    #[must_use]
    pub fn table_prefix(mut self, prefix: Identifier) -> Self {
        self.prefix = prefix;
        self
    }

    /// The most bytes of a payload or a result. 1 MiB unless told. What the server takes is known when it is connected to:
    /// twice as much and a mebibyte must fit its `max_allowed_packet`, since a job is read with both.
    #[must_use]
    pub fn max_payload(mut self, bytes: usize) -> Self {
        self.max_payload = bytes;
        self
    }

    /// How many connections the pool has at most. 10 unless told, and at least 1.
    #[must_use]
    pub fn max_connections(mut self, connections: u32) -> Self {
        self.max_connections = connections.max(1);
        self
    }

    /// How long a call waits for a connection of the pool, and for the server to answer on a new one. 10 seconds unless
    /// told.
    #[must_use]
    pub fn acquire_timeout(mut self, timeout: Duration) -> Self {
        self.acquire_timeout = timeout;
        self
    }

    /// How long a settle, an enqueue, a step or an event waits for a row, and any call for a table, that somebody else has
    /// locked, in whole seconds, at least one. 5 seconds unless told: the server's own 50 are longer than most leases. On an
    /// application's pool its `innodb_lock_wait_timeout` and `lock_wait_timeout` stay as they are.
    #[must_use]
    pub fn lock_timeout(mut self, timeout: Duration) -> Self {
        self.lock_timeout = timeout;
        self
    }

    /// Adds an offset to the server's clock. For tests only: handles with different offsets on one database disagree about
    /// every lease.
    #[must_use]
    pub fn clock(mut self, offset: ClockOffset) -> Self {
        self.clock = offset;
        self
    }

    /// Whole seconds that the server can count.
    pub(crate) fn lock_seconds(&self) -> u64 {
        self.lock_timeout.as_millis().div_ceil(1000).clamp(1, 31_536_000).try_into().unwrap_or(1)
    }
}
