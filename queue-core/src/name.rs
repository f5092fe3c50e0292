//! Names that applications choose: checked once, when they are made.

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;
use serde::Serialize;
use uuid::Uuid;

use crate::Invalid;

fn checked(what: &'static str, text: String, max: usize) -> Result<String, Invalid> {
    if text.len() > max {
        return Err(Invalid::TooLong { what, bytes: text.len(), max });
    }
    if text.contains('\0') {
        return Err(Invalid::Nul { what });
    }
    Ok(text)
}

macro_rules! text_type {
    ($name:ident, $check:expr) => {
        impl $name {
            /// The text itself.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = Invalid;

            fn from_str(text: &str) -> Result<Self, Invalid> {
                Self::try_from(text.to_owned())
            }
        }

        impl TryFrom<String> for $name {
            type Error = Invalid;

            fn try_from(text: String) -> Result<Self, Invalid> {
                let check: fn(String) -> Result<String, Invalid> = $check;
                check(text).map(Self)
            }
        }

        impl TryFrom<&str> for $name {
            type Error = Invalid;

            fn try_from(text: &str) -> Result<Self, Invalid> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

/// The name of a queue or of a kind of job: 1 to 255 bytes of UTF-8 without U+0000, compared byte
/// for byte on every backend (case, accents and trailing spaces count).
///
/// ```
/// use queue_core::Name;
///
/// assert!(Name::try_from("mail").is_ok());
/// assert!(Name::try_from("").is_err());
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

impl Name {
    /// The most bytes that a name may have.
    pub const MAX_BYTES: usize = 255;
}

text_type!(Name, |text| {
    if text.is_empty() {
        return Err(Invalid::Empty { what: "name" });
    }
    checked("name", text, Name::MAX_BYTES)
});

/// The key of a unique job: 0 to 255 bytes of UTF-8 without U+0000, compared byte for byte. The
/// empty key is a key like any other; no key at all never conflicts.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct UniqueKey(String);

impl UniqueKey {
    /// The most bytes that a key may have.
    pub const MAX_BYTES: usize = 255;
}

text_type!(UniqueKey, |text| checked("unique key", text, UniqueKey::MAX_BYTES));

/// A worker process: a name, and a random incarnation for every start, as in `web-1/3f2a91bc00d4e7a1`.
///
/// A process that restarts under the same name is a new worker, so that what its predecessor held is
/// recovered and not mistaken for its own.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct WorkerId(String);

impl WorkerId {
    /// The most bytes of the whole text: a name, a slash and the incarnation.
    pub const MAX_BYTES: usize = Name::MAX_BYTES + 17;

    /// A new incarnation of the worker of this name.
    pub fn new(name: &Name) -> Self {
        let (incarnation, _) = Uuid::new_v4().as_u64_pair();
        Self(format!("{name}/{incarnation:016x}"))
    }
}

text_type!(WorkerId, |text| {
    if text.is_empty() {
        return Err(Invalid::Empty { what: "worker" });
    }
    checked("worker", text, WorkerId::MAX_BYTES)
});

/// The identity of a job: a UUID made by the client, so that an enqueue whose answer was lost can be
/// repeated. Version 7 by default; any UUID is accepted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(Uuid);

impl fmt::Debug for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl JobId {
    /// A new id that sorts by its time of creation.
    #[expect(clippy::new_without_default, reason = "a default id would read as one fixed value")]
    pub fn new() -> Self {
        Self(Uuid::now_v7())
    }

    /// The id of a job that this one enqueues under a name: the same every time, and sorted beside this one. It is of version 8, which is
    /// free for uses like this: whoever ends the job knows by it, without asking the store, that somebody is to be told.
    pub fn child(&self, name: &str) -> Self {
        const REST: u128 = (1 << 80) - 1;
        let named = Uuid::new_v5(&self.0, name.as_bytes()).as_u128();
        let bits = (self.0.as_u128() & !REST) | (named & REST);
        Self(
            uuid::Builder::from_u128(bits)
                .with_version(uuid::Version::Custom)
                .with_variant(uuid::Variant::RFC4122)
                .into_uuid(),
        )
    }

    /// Whether it is an id of version 8.
    pub fn is_child(&self) -> bool {
        self.0.get_version() == Some(uuid::Version::Custom)
    }

    /// The UUID.
    pub fn as_uuid(&self) -> Uuid {
        self.0
    }
}

impl From<Uuid> for JobId {
    fn from(uuid: Uuid) -> Self {
        Self(uuid)
    }
}

impl FromStr for JobId {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        Uuid::try_parse(text).map(Self).map_err(|error| Invalid::malformed("job id", error))
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// The identity of one moment in a job's life: a random UUID that every lifecycle write replaces.
///
/// It is random and made by the writer, never a counter of the store, so that a store which lost
/// writes cannot issue the same one twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Revision(Uuid);

impl fmt::Debug for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl Revision {
    /// A revision that no other write has.
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }

    /// The UUID.
    pub fn as_uuid(&self) -> Uuid {
        self.0
    }
}

impl From<Uuid> for Revision {
    fn from(uuid: Uuid) -> Self {
        Self(uuid)
    }
}

/// A name of the queue's own inside a database, which an operator chooses: a schema, or what the names of tables, indexes or
/// collections begin with. A lower-case ASCII letter, then lower-case letters, digits and underscores, at most 32 bytes in
/// all, so that every database takes it unquoted and has room for what is appended. Nothing else is ever spliced into a
/// statement, hence the check.
///
/// ```
/// use queue_core::Identifier;
///
/// assert!("app_".parse::<Identifier>().is_ok());
/// assert!("App; DROP TABLE users".parse::<Identifier>().is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identifier(String);

impl Identifier {
    /// The most bytes that it may have.
    pub const MAX_BYTES: usize = 32;

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for Identifier {
    /// `fenced_`, what table names begin with unless told.
    fn default() -> Self {
        Self("fenced_".to_owned())
    }
}

impl FromStr for Identifier {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let what = "identifier";
        if text.is_empty() {
            return Err(Invalid::Empty { what });
        }
        let text = checked(what, text.to_owned(), Self::MAX_BYTES)?;
        let mut bytes = text.bytes();
        let starts = bytes.next().is_some_and(|byte| byte.is_ascii_lowercase());
        if !starts || !bytes.all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_') {
            let reason =
                format!("{text:?} is not a lower-case letter followed by lower-case letters, digits and \"_\"");
            return Err(Invalid::Malformed { what, reason });
        }
        Ok(Self(text))
    }
}

impl fmt::Display for Identifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_are_known_by_their_ids() {
        let (parent, other) = (JobId::new(), JobId::new());
        assert_eq!(parent.child("a"), parent.child("a"));
        let ids = [parent, parent.child("a"), parent.child("b"), other.child("a"), parent.child("a").child("a")];
        assert_eq!(ids.iter().collect::<std::collections::BTreeSet<_>>().len(), 5, "all differ: {ids:?}");
        assert_eq!(ids.map(|id| id.is_child()), [false, true, true, true, true]);
        assert_eq!(parent.as_uuid().as_bytes()[..6], parent.child("a").as_uuid().as_bytes()[..6], "side by side");
    }

    #[test]
    fn names_are_checked_when_they_are_made() {
        assert_eq!(Name::try_from(""), Err(Invalid::Empty { what: "name" }));
        assert_eq!(Name::try_from("a\0"), Err(Invalid::Nul { what: "name" }));
        assert!(Name::try_from("é".repeat(127)).is_ok());
        assert!(Name::try_from("é".repeat(128)).is_err(), "the limit is in bytes");
        assert!(UniqueKey::try_from("").is_ok(), "the empty key is a key");
        assert!(UniqueKey::try_from("k".repeat(256)).is_err());
        assert!("no-uuid".parse::<JobId>().is_err());
    }

    #[test]
    fn a_restarted_worker_is_a_new_worker() {
        let name = Name::try_from("n".repeat(255)).expect("255 bytes");
        let (first, second) = (WorkerId::new(&name), WorkerId::new(&name));
        assert_ne!(first, second);
        assert_eq!(first.as_str().parse(), Ok(first), "the longest worker id is read back");
    }

    #[test]
    fn an_identifier_goes_into_a_statement_as_it_is() {
        for text in ["", "Upper", "1st", "_a", "a-b", "a;", "a\"", "a`", "a\0", "é", &"a".repeat(33)] {
            assert!(text.parse::<Identifier>().is_err(), "{text:?}");
        }
        for text in ["a", "app_2_", "select", &"a".repeat(32)] {
            assert!(text.parse::<Identifier>().is_ok(), "{text:?}");
        }
    }
}
