//! Keys that Python gives, and the tier's errors.

use egmem::kv::{Error, Key};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::error::{ToPy, raise};

/// Reads keys.
pub fn keys(given: &[PyBackedBytes]) -> Vec<Key> {
    given.iter().map(|key| Key::from_bytes(key)).collect()
}

impl ToPy for Error {
    fn to_py(self) -> PyErr {
        let class = match &self {
            Self::Memory(error) => return error.clone().to_py(),
            Self::Full { .. } => "OutOfMemory",
            Self::NotReady { .. } => "NotReady",
            Self::WrongState { .. } | Self::NotATier { .. } | Self::OtherTier { .. } => {
                "InvalidArgument"
            }
            Self::StillCopying { .. } | Self::InUse { .. } => "InUse",
            _ => "Error",
        };
        raise(class, &self.to_string(), self.remedy(), None)
    }
}
