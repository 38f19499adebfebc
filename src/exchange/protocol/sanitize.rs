//! Texts as a client reads them: names are checked, texts for people are escaped and cut.
//!
//! For `#[serde(deserialize_with)]` on fields of a server's messages. A server checks requests itself, so that it can
//! answer with a refusal.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use super::check_name;
use crate::text::{MAX_TEXT, bounded, is_unsafe};

/// The longest path of a Unix socket in bytes: `sockaddr_un` has 108, including a final NUL.
const MAX_PATH: usize = 107;

/// Deserializes a name of memory.
pub(super) fn name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let name = String::deserialize(deserializer)?;
    check_name(&name).map_err(D::Error::custom)?;
    Ok(name)
}

/// Deserializes a text for people: at most [`MAX_TEXT`] bytes, without control characters.
pub(super) fn words<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    Ok(bounded(&text, MAX_TEXT))
}

/// Deserializes an optional text for people.
pub(super) fn maybe_words<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<String>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    Ok(text.map(|text| bounded(&text, MAX_TEXT)))
}

/// Deserializes the path of a Unix socket that a client may connect to: absolute, or an abstract name after `@`, and
/// short enough for an address.
pub(super) fn path<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let Some(path) = Option::<String>::deserialize(deserializer)? else {
        return Ok(None);
    };
    let why = if !path.starts_with(['/', '@']) {
        "a socket's path that is not absolute"
    } else if path.len() > MAX_PATH {
        "a socket's path of more than 107 bytes"
    } else if path.contains(is_unsafe) {
        "a socket's path with a control character"
    } else {
        return Ok(Some(path));
    };
    Err(D::Error::custom(why))
}
