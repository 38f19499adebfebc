//! The frames of a call.

use std::backtrace::Backtrace;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::bounded;

/// The most bytes of frames that are read from another process, or kept as text.
const MAX_READ: usize = 64 << 10;

/// The frames of the call that allocated. Formatting them takes milliseconds: it is done where they are displayed or
/// serialized.
#[derive(Clone)]
pub struct Frames(Inner);

#[derive(Clone)]
enum Inner {
    Captured(Arc<Backtrace>),
    Text(Arc<str>),
}

impl Frames {
    pub(super) const fn captured(frames: Arc<Backtrace>) -> Self {
        Self(Inner::Captured(frames))
    }

    /// Returns whether these are this process's frames, and not their text.
    #[cfg(test)]
    pub(super) const fn is_captured(&self) -> bool {
        matches!(self.0, Inner::Captured(_))
    }
}

/// The frames of another language's stack, as text: at most 64 KiB are kept.
impl From<&str> for Frames {
    fn from(text: &str) -> Self {
        Self(Inner::Text(bounded::cut(text, MAX_READ).into()))
    }
}

impl fmt::Display for Frames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Inner::Captured(frames) => frames.fmt(f),
            Inner::Text(text) => f.write_str(text),
        }
    }
}

impl fmt::Debug for Frames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Frames")
    }
}

/// Frames are equal if their texts are.
impl PartialEq for Frames {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Inner::Captured(one), Inner::Captured(two)) if Arc::ptr_eq(one, two) => true,
            _ => self.to_string() == other.to_string(),
        }
    }
}

impl Eq for Frames {}

impl Serialize for Frames {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Frames {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = bounded::text::<D, MAX_READ>(from)?;
        Ok(text.as_str().into())
    }
}
