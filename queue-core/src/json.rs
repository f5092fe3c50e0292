//! JSON as the text that it is.

use std::fmt;

use serde::Deserialize;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde::de::IgnoredAny;

use crate::Invalid;

/// A JSON value as text, kept byte for byte: what is enqueued is what the handler gets, whatever a
/// parser would make of its numbers, its key order or its escapes.
///
/// ```
/// use queue_core::Json;
///
/// let json = Json::from_text("{\"n\":1e400, \"n\":-0.0}")?;
/// assert_eq!(json.as_str(), "{\"n\":1e400, \"n\":-0.0}");
/// assert!(Json::from_text("{oops").is_err());
/// # Ok::<(), queue_core::Invalid>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Json(String);

impl Json {
    /// Takes a text that is one JSON value.
    ///
    /// # Errors
    ///
    /// A text that is not JSON. Numbers of any size and nesting of any depth are JSON.
    pub fn from_text(text: impl Into<String>) -> Result<Self, Invalid> {
        let text = text.into();
        match serde_json::from_str::<IgnoredAny>(&text) {
            Ok(_) => Ok(Self(text)),
            Err(error) => Err(Invalid::malformed("JSON", error)),
        }
    }

    /// Writes a value as JSON.
    ///
    /// # Errors
    ///
    /// A value that JSON cannot express, such as a map with keys that are not strings.
    pub fn encode<T: Serialize + ?Sized>(value: &T) -> Result<Self, Invalid> {
        serde_json::to_string(value).map(Self).map_err(|error| Invalid::malformed("value", error))
    }

    /// Reads the text as a value.
    ///
    /// # Errors
    ///
    /// A text of another shape than the type's.
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, Invalid> {
        serde_json::from_str(&self.0).map_err(|error| Invalid::malformed("JSON", error))
    }

    /// The value `null`.
    pub fn null() -> Self {
        Self("null".to_owned())
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The text's length in bytes, which a store's cap is about.
    pub fn bytes(&self) -> usize {
        self.0.len()
    }
}

impl TryFrom<String> for Json {
    type Error = Invalid;

    fn try_from(text: String) -> Result<Self, Invalid> {
        Self::from_text(text)
    }
}

impl From<Json> for String {
    fn from(json: Json) -> Self {
        json.0
    }
}

impl fmt::Debug for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_json_text_is_kept_as_it_is() {
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        for text in
            ["1e400", "-0.0", "18446744073709551615", " {\"a\":1,\"a\":2} ", "\"\\u0000\"", "\"\\ud800\"", &deep]
        {
            assert_eq!(Json::from_text(text).expect("JSON").as_str(), text);
        }
    }

    #[test]
    fn what_is_no_json_is_refused() {
        for text in ["", "{", "nul", "1 2", "\"\u{0}\"", "NaN", "'a'"] {
            assert!(Json::from_text(text).is_err(), "{text:?}");
        }
    }
}
