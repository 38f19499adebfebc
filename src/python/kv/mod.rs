//! `egmem.kv`: the KV-cache tier. Here are keys that Python gives, and the tier's errors.

pub mod events;
pub mod gpu_pages;
pub mod open_tier;
pub mod store;
pub mod tier;

use egmem::Explain;
use egmem::kv::{Error, Key, PageId, Tier};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyByteArray, PyBytes, PyString};

use crate::args::{Count, OneOrEach};
use crate::error::{ToPy, explained, invalid};

/// A list of keys, or another iterable of `bytes`.
pub struct Keys<'py>(pub Vec<Bound<'py, PyBytes>>);

impl Keys<'_> {
    /// Returns the keys of a tier that has some groups.
    ///
    /// # Errors
    /// `InvalidArgument` for another number of groups than of keys, and for a group that the tier does not have.
    pub fn read(&self, of: &Groups, tier: &Tier) -> PyResult<Vec<Key>> {
        let keys = self.0.iter().map(|key| Key::from_bytes(key.as_bytes()));
        if let Groups::One(group) = of {
            let group = group_of(group.0, tier)?;
            return Ok(keys.map(|key| key.in_group(group)).collect());
        }
        let groups = of.each("group", self.0.len(), "key")?;
        keys.zip(groups)
            .map(|(key, group)| Ok(key.in_group(group_of(group.0, tier)?)))
            .collect()
    }
}

/// The group of all keys, or of each.
pub type Groups = OneOrEach<Count>;

impl Default for Groups {
    fn default() -> Self {
        Self::One(Count(0))
    }
}

/// Returns the number of a group that the tier has.
///
/// # Errors
/// `InvalidArgument` for another one.
fn group_of(group: u64, tier: &Tier) -> PyResult<u8> {
    let found = u8::try_from(group).ok();
    let found = found.filter(|found| usize::from(*found) < tier.groups());
    found.ok_or_else(|| no_group(group, tier.groups()))
}

/// Returns the keys of a tier with their pages, and with their groups before them if that is asked for.
///
/// # Errors
/// Python's.
pub fn listed(
    py: Python<'_>,
    keys: Vec<(Key, PageId)>,
    groups: bool,
) -> PyResult<Bound<'_, PyAny>> {
    let bytes = |key: &Key| PyBytes::new(py, key.as_bytes());
    let keys = keys.iter();
    if groups {
        let with_groups = keys.map(|(key, page)| (key.group(), bytes(key), page.to_bits()));
        return with_groups.collect::<Vec<_>>().into_pyobject(py);
    }
    let listed = keys.map(|(key, page)| (bytes(key), page.to_bits()));
    listed.collect::<Vec<_>>().into_pyobject(py)
}

/// Returns the exception about a group that a tier does not have.
pub fn no_group(group: u64, groups: usize) -> PyErr {
    let last = groups.saturating_sub(1);
    invalid(&format!("group is {group}; valid: 0 to {last}"))
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
            Self::StillCopying { .. }
            | Self::InUse { .. }
            | Self::TooManyMembers { .. }
            | Self::Busy { .. } => "InUse",
            Self::UnusableMethod { .. } => "NotSupported",
            _ => "Error",
        };
        let raised = explained(class, &self, self.untold_call());
        if let Self::Full { evicted, .. } = &self
            && !evicted.is_empty()
        {
            Python::try_attach(|py| {
                let exception = raised.value(py);
                let keys = evicted.iter();
                let keys: Vec<_> = keys
                    .map(|gone| PyBytes::new(py, gone.key.as_bytes()))
                    .collect();
                let groups = evicted.iter().map(|gone| u32::from(gone.key.group()));
                let groups: Vec<_> = groups.collect();
                // Python's classes have a dictionary.
                let _ = exception.setattr("evicted", keys);
                let _ = exception.setattr("evicted_groups", groups);
            });
        }
        raised
    }
}

/// Reads a list or another sequence of numbers. A NumPy array is read as a whole, without a Python object for each
/// number.
///
/// # Errors
/// `InvalidArgument` for an array of another kind; Python's errors for an object that is no sequence of numbers
/// from 0 on.
pub fn numbers(given: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    if !given.hasattr("astype")? {
        let numbers: Vec<Count> = given.extract()?;
        return Ok(numbers.into_iter().map(|number| number.0).collect());
    }
    let kind: String = given.getattr("dtype")?.getattr("kind")?.extract()?;
    let dimensions: usize = given.getattr("ndim")?.extract()?;
    if !matches!(kind.as_str(), "i" | "u") || dimensions != 1 {
        return Err(invalid(
            "an array of pages or blocks has one dimension and integers",
        ));
    }
    // A negative number becomes one that no tier and no cache has.
    let words = given.call_method1("astype", ("<u8",))?;
    let bytes: PyBackedBytes = words.call_method0("tobytes")?.extract()?;
    let words = bytes.chunks_exact(8).map(|word| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(word);
        u64::from_le_bytes(bytes)
    });
    Ok(words.collect())
}

/// Returns pages as numbers: a page's number, and above bit 32 how often it was free before, so that an old one is
/// refused.
pub fn bits(pages: &[PageId]) -> Vec<u64> {
    pages.iter().map(|page| page.to_bits()).collect()
}
