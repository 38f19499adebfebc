//! The frames of a call.

use std::backtrace::Backtrace;
use std::fmt::{self, Display};
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::text::cut;

/// The most bytes of frames that are kept as text.
const MAX_TEXT: usize = 64 << 10;

/// The frames of the call that allocated. Formatting them takes milliseconds: it is done where they are displayed or
/// serialized.
#[derive(Clone)]
pub struct Frames(Arc<dyn Display + Send + Sync>);

impl Frames {
    pub(super) fn captured(frames: Arc<Backtrace>) -> Self {
        Self(frames)
    }
}

/// The frames of another language's stack, as text: at most 64 KiB are kept.
impl From<&str> for Frames {
    fn from(text: &str) -> Self {
        Self(Arc::new(cut(text, MAX_TEXT).to_owned()))
    }
}

impl Display for Frames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
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
        Arc::ptr_eq(&self.0, &other.0) || self.to_string() == other.to_string()
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
        Ok(String::deserialize(from)?.as_str().into())
    }
}
