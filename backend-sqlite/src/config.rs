//! What a handle can be told when it is made.

use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use queue_core::Capabilities;
use queue_core::ClockOffset;
use queue_core::Error;
use queue_core::Identifier;
use queue_core::Limit;
use queue_core::Result;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::sqlite::SqliteSynchronous;

/// Where the database is and how it is used.
///
/// ```
/// use backend_sqlite::SqliteOptions;
///
/// # fn example() -> queue_core::Result<()> {
/// let options = SqliteOptions::file("/var/lib/app/jobs.db").table_prefix("app_".parse()?)?.max_payload(64 * 1024)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct SqliteOptions {
    location: Location,
    create_if_missing: bool,
    pub(crate) busy_timeout: Duration,
    synchronous: Synchronous,
    pub(crate) prefix: Identifier,
    pub(crate) max_payload: usize,
    pub(crate) clock: ClockOffset,
}

#[derive(Clone, Debug)]
enum Location {
    Memory,
    File(PathBuf),
}

/// When a commit is on the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Synchronous {
    /// Before the call returns: nothing that was answered is lost.
    #[default]
    Full,
    /// Some time later: a power failure may take the last commits back, a crash of the process does not. Small writes are
    /// two to four times as fast.
    Normal,
}

impl Default for SqliteOptions {
    /// A database in memory, with every default.
    fn default() -> Self {
        Self {
            location: Location::Memory,
            create_if_missing: true,
            busy_timeout: Duration::from_secs(10),
            synchronous: Synchronous::Full,
            prefix: Identifier::default(),
            max_payload: Capabilities::DEFAULT_MAX_PAYLOAD,
            clock: ClockOffset::default(),
        }
    }
}

impl SqliteOptions {
    /// The most that [`max_payload`](Self::max_payload) may be: SQLite takes a statement's texts up to 1 GB, and quotes
    /// can double them on the way.
    pub const LARGEST_MAX_PAYLOAD: usize = 256 * 1024 * 1024;

    /// A database in memory, gone with its handle.
    pub fn memory() -> Self {
        Self::default()
    }

    /// The database in the file of exactly this name: no character of it means anything.
    pub fn file(path: impl AsRef<Path>) -> Self {
        Self { location: Location::File(path.as_ref().to_owned()), ..Self::default() }
    }

    /// `sqlite:path`, `sqlite://path` (three slashes for an absolute path), `sqlite::memory:` or `:memory:`. The path is
    /// percent-decoded, and `?mode=rw` refuses a file that does not exist.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](queue_core::ErrorKind::Invalid): another scheme, no path, or another parameter.
    pub fn from_url(url: &str) -> Result<Self> {
        let rest = match url.split_once(':') {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("sqlite") => rest.strip_prefix("//").unwrap_or(rest),
            _ if url == ":memory:" => url,
            _ => return Err(Error::invalid("a database URL must begin with \"sqlite:\"")),
        };
        let (path, parameters) = rest.split_once('?').unwrap_or((rest, ""));
        let create_if_missing = match parameters {
            "" | "mode=rwc" => true,
            "mode=rw" => false,
            // What it holds is not repeated: messages end up in logs.
            _ => return Err(Error::invalid("the only parameters of a database URL are mode=rwc and mode=rw")),
        };
        if path == ":memory:" {
            return Ok(Self::memory());
        }
        let path = percent_decoded(path)?;
        if path.is_empty() {
            return Err(Error::invalid("the database URL names no file"));
        }
        Ok(Self::file(path).create_if_missing(create_if_missing))
    }

    /// What the tables' names begin with, so that several queues share one database. `fenced_` unless told.
    ///
    /// # Errors
    ///
    /// A prefix that begins with `sqlite_`: SQLite keeps such names to itself.
    pub fn table_prefix(mut self, prefix: Identifier) -> Result<Self> {
        if prefix.as_str().starts_with("sqlite_") {
            return Err(Error::invalid("SQLite keeps names that begin with \"sqlite_\" to itself"));
        }
        self.prefix = prefix;
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

    /// How long a write waits for another process's. 10 seconds unless told.
    #[must_use]
    pub fn busy_timeout(mut self, timeout: Duration) -> Self {
        // What SQLite can count.
        self.busy_timeout = timeout.min(Duration::from_millis(u64::from(i32::MAX.unsigned_abs())));
        self
    }

    /// Whether a file that does not exist is created. It is, unless told.
    #[must_use]
    pub fn create_if_missing(mut self, create: bool) -> Self {
        self.create_if_missing = create;
        self
    }

    /// When a commit is on the disk. [`Synchronous::Full`] unless told.
    #[must_use]
    pub fn synchronous(mut self, synchronous: Synchronous) -> Self {
        self.synchronous = synchronous;
        self
    }

    /// Adds an offset to SQLite's clock. For tests only: handles with different offsets on one file disagree about every
    /// lease.
    #[must_use]
    pub fn clock(mut self, offset: ClockOffset) -> Self {
        self.clock = offset;
        self
    }

    pub(crate) fn is_memory(&self) -> bool {
        matches!(self.location, Location::Memory)
    }

    /// What the driver is told.
    pub(crate) fn connection(&self) -> Result<SqliteConnectOptions> {
        let options = SqliteConnectOptions::new().busy_timeout(self.busy_timeout).synchronous(match self.synchronous {
            Synchronous::Full => SqliteSynchronous::Full,
            Synchronous::Normal => SqliteSynchronous::Normal,
        });
        // All rows of an answer, and the word that it is over: whoever waits takes them all in any case, and SQLite's thread
        // does not stop in between.
        let options = options.row_buffer_size(Limit::MAX.rows() + 2);
        let Location::File(path) = &self.location else {
            return Ok(options);
        };
        if path.to_str().is_none_or(|path| path.contains('\0')) {
            return Err(Error::invalid(format!("{}: SQLite takes paths in UTF-8 without U+0000", path.display())));
        }
        // SQLite gives "file:..", ":memory:" and "" a meaning; an absolute path is none of them.
        let path = std::path::absolute(path)
            .map_err(|error| Error::invalid(format!("{}: not a path of a file", path.display())).with_source(error))?;
        Ok(options.filename(path).create_if_missing(self.create_if_missing))
    }
}

fn percent_decoded(text: &str) -> Result<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let digits = || tail.get(..2).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit));
        let escaped = || u8::from_str_radix(str::from_utf8(digits()?).ok()?, 16).ok();
        match (first, escaped()) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8(bytes).map_err(|error| Error::invalid("database URL: the path is not UTF-8").with_source(error))
}
