//! Keys that Python gives, and the tier's errors.

use egmem::kv::{Error, Key};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::error::{OrRaise, ToPy, raise};

/// Reads keys of at most 32 bytes.
///
/// # Errors
/// `InvalidArgument` for longer ones.
pub fn keys(given: &[PyBackedBytes]) -> PyResult<Vec<Key>> {
    let keys = given.iter().map(|key| Key::from_bytes(key));
    keys.collect::<Result<_, _>>().or_raise()
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
