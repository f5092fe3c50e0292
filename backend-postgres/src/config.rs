//! What a handle can be told when it is made.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use queue_core::Capabilities;
use queue_core::ClockOffset;
use queue_core::Error;
use queue_core::Identifier;
use queue_core::Result;
use sqlx::postgres::PgConnectOptions;

/// Where the database is and how it is used.
///
/// ```
/// use backend_postgres::PostgresOptions;
///
/// # fn example() -> queue_core::Result<()> {
/// let options = PostgresOptions::from_url("postgres://app@db.example/app")?.schema("app_jobs".parse()?)?.max_connections(5);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct PostgresOptions {
    pub(crate) connection: PgConnectOptions,
    pub(crate) schema: Identifier,
    pub(crate) max_payload: usize,
    pub(crate) max_connections: u32,
    pub(crate) acquire_timeout: Duration,
    pub(crate) notifications: bool,
    pub(crate) transaction_pooler: bool,
    pub(crate) clock: ClockOffset,
}

impl fmt::Debug for PostgresOptions {
    /// Without the connection, which has a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresOptions")
            .field("schema", &self.schema)
            .field("max_payload", &self.max_payload)
            .field("max_connections", &self.max_connections)
            .field("acquire_timeout", &self.acquire_timeout)
            .field("notifications", &self.notifications)
            .field("transaction_pooler", &self.transaction_pooler)
            .finish_non_exhaustive()
    }
}

impl Default for PostgresOptions {
    /// The server that the environment names (`PGHOST`, `PGUSER` and the others that PostgreSQL's own tools read), with every
    /// default.
    fn default() -> Self {
        Self::from(PgConnectOptions::new())
    }
}

impl From<PgConnectOptions> for PostgresOptions {
    fn from(connection: PgConnectOptions) -> Self {
        Self {
            connection,
            schema: "fenced_queue".parse().expect("an identifier"),
            max_payload: Capabilities::DEFAULT_MAX_PAYLOAD,
            max_connections: 10,
            acquire_timeout: Duration::from_secs(10),
            notifications: true,
            transaction_pooler: false,
            clock: ClockOffset::default(),
        }
    }
}

impl PostgresOptions {
    /// The most that [`max_payload`](Self::max_payload) may be: PostgreSQL takes messages and rows of up to 1 GB.
    pub const LARGEST_MAX_PAYLOAD: usize = 256 * 1024 * 1024;

    /// `postgres://user:password@host:port/database`, with the driver's parameters, such as `?sslmode=require`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](queue_core::ErrorKind::Invalid): another scheme, or a URL that cannot be read.
    pub fn from_url(url: &str) -> Result<Self> {
        // What the URL holds is not repeated, and neither is what the driver says of it: messages end up in logs.
        match url.split_once(':') {
            Some(("postgres" | "postgresql", _)) => {}
            _ => return Err(Error::invalid("a database URL must begin with \"postgres:\"")),
        }
        let connection = PgConnectOptions::from_str(url).map_err(|_| {
            Error::invalid(
                "the database URL cannot be read: postgres://user:password@host:port/database, percent-encoded",
            )
        })?;
        Ok(Self::from(connection))
    }

    /// The schema that the tables are in, so that several queues share one database. `fenced_queue` unless told.
    ///
    /// # Errors
    ///
    /// A name that begins with `pg_`, and `information_schema`: PostgreSQL keeps those to itself.
    pub fn schema(mut self, schema: Identifier) -> Result<Self> {
        if schema.as_str().starts_with("pg_") || schema.as_str() == "information_schema" {
            return Err(Error::invalid(format!("PostgreSQL keeps the schema \"{schema}\" to itself")));
        }
        self.schema = schema;
        Ok(self)
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

    /// How many connections a handle opens at most, beside the one that it listens on. 10 unless told.
    #[must_use]
    pub fn max_connections(mut self, connections: u32) -> Self {
        self.max_connections = connections.max(1);
        self
    }

    /// How long a call waits for a connection. 10 seconds unless told; a claim and a heartbeat wait at most a third of their
    /// lease.
    #[must_use]
    pub fn acquire_timeout(mut self, timeout: Duration) -> Self {
        self.acquire_timeout = timeout;
        self
    }

    /// Whether workers are woken, also by other processes, through `NOTIFY` and a connection that listens. They are, unless
    /// told. A server makes transactions that notify wait for each other when they commit, so a process that stores single jobs
    /// at a high rate may do better without; workers then find by polling what other processes store.
    #[must_use]
    pub fn notifications(mut self, notifications: bool) -> Self {
        self.notifications = notifications;
        self
    }

    /// Whether the server is reached through a pooler in transaction mode, such as pgbouncer with `pool_mode = transaction`, that
    /// does not keep prepared statements apart. It is not, unless told; and without being told, one statement may be answered
    /// for another.
    ///
    /// Every call is then a transaction of its own, with statements that are not kept prepared: four round trips in place of
    /// one. Nothing of the session is used, so it does not listen.
    #[must_use]
    pub fn transaction_pooler(mut self, is_one: bool) -> Self {
        self.transaction_pooler = is_one;
        self
    }

    /// Adds an offset to the server's clock. For tests only: handles with different offsets on one schema disagree about every
    /// lease.
    #[must_use]
    pub fn clock(mut self, offset: ClockOffset) -> Self {
        self.clock = offset;
        self
    }
}
