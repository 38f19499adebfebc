//! Keys that Python gives, and the tier's errors.

use egmem::Explain;
use egmem::kv::{Error, Key};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyString};

use crate::error::{ToPy, explained};

/// A list of keys, or another iterable of `bytes`.
pub struct Keys<'py>(pub Vec<Bound<'py, PyBytes>>);

impl Keys<'_> {
    /// Returns the tier's keys.
    pub fn read(&self) -> Vec<Key> {
        let keys = self.0.iter();
        keys.map(|key| Key::from_bytes(key.as_bytes())).collect()
    }
}

impl<'py> FromPyObject<'_, 'py> for Keys<'py> {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let is_one = given.is_instance_of::<PyBytes>()
            || given.is_instance_of::<PyByteArray>()
            || given.is_instance_of::<PyString>();
        if is_one {
            let kind = given.get_type().name()?;
            let why = format!("keys is {kind}: pass a list of keys: [{}]", as_key(&given)?);
            return Err(PyTypeError::new_err(why));
        }
        let mut keys = Vec::with_capacity(given.len().unwrap_or(0));
        for (index, key) in given.try_iter()?.enumerate() {
            let key = key?;
            match key.cast_into::<PyBytes>() {
                Ok(key) => keys.push(key),
                Err(error) => return Err(no_key(index, &error.into_inner())),
            }
        }
        Ok(Self(keys))
    }
}

/// Returns the exception about an object in a list of keys.
fn no_key(index: usize, given: &Bound<'_, PyAny>) -> PyErr {
    let why = || {
        let kind = given.get_type().name()?;
        Ok::<_, PyErr>(format!(
            "key {index} is {kind}, and a key is bytes: pass {}",
            as_key(given)?
        ))
    };
    match why() {
        Ok(why) => PyTypeError::new_err(why),
        Err(error) => error,
    }
}

/// Returns how a program writes an object as a key.
fn as_key(given: &Bound<'_, PyAny>) -> PyResult<String> {
    Ok(if given.is_instance_of::<PyString>() {
        format!("{}.encode()", given.repr()?)
    } else if given.is_instance_of::<PyBytes>() {
        given.repr()?.to_string()
    } else {
        "bytes(key)".into()
    })
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
            Self::UnusableMethod { .. } => "NotSupported",
            _ => "Error",
        };
        explained(class, &self, self.untold_call())
    }
}
