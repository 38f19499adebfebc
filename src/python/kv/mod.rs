//! `egmem.kv`: the KV-cache tier, open until Python closes it; keys that Python gives, and the tier's errors.

pub mod copies;
pub mod events;
pub mod store;
pub mod tier;

use std::sync::Arc;

use egmem::backing::Why;
use egmem::driver::Location;
use egmem::kv::{self, AttachOptions, Error, Key, PageId, TierOptions, Verify};
use egmem::{Backing, Explain};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyString};

use crate::args::{Count, OneOrEach, Size, choice, room_for};
use crate::error::{OrRaise, ToPy, closed, explained, invalid};
use crate::interpreter::{Closing, Open, closing, python};
use crate::ledger::backing_at;
use crate::memory::Memory;
use crate::region::{Owner, Region};
use crate::share::{Ends, Offer};

/// Fixed pages of pinned host memory by key, in least-recently-used order: the tier below a serving engine's cache.
///
/// `Tier(pages=4096, page_bytes=65536, node=0)` allocates the memory. Pages lie side by side, and none is rounded up.
/// `Tier(bytes="48GiB", page_bytes=[65536, 18432])` has groups of keys, whose pages have these sizes and share the bytes. `group=` of a
/// method is the group of all keys, or a sequence with one for each; equal bytes in two groups are two keys.
///
/// A key is `bytes`, such as the hash of a block of tokens and of all before it. Keys of up to 64 bytes are kept as they
/// are; of a longer one the tier keeps a hash of 32 bytes: `stored_key`. `near_gpu`, `access_by` and `label` are as for `Buffer`.
/// So is `backing`, whose default is `"auto"` here.
///
/// `verify` is `"never"`, `"sample"` or `"always"`: whether commits compute checksums of pages, and `prepare_load` checks one
/// page in 16, or each. A page with other bytes than were committed is a miss: `NotReady`, and `damaged` in `stats`.
///
/// `progress(done, total)` is called after each chunk of memory, in bytes and with no lock held. If it raises, or a
/// signal does, such as Ctrl-C between two chunks, everything is given back. With `background=True` the tier is there
/// as soon as its first page is: `progress` is called until then, and a thread creates the rest, whose pages are free
/// one after the other (`wait_grown`, `growth`, `stats`).
#[pyclass(extends = Closing, frozen, module = "egmem.kv")]
pub struct Tier {
    // In this order: the offer ends first.
    offered: Open<Offered>,
    inner: Open<kv::Tier>,
    location: Location,
    /// The number of pages.
    #[pyo3(get)]
    pages: u32,
    /// The bytes of a page of each group.
    page_sizes: Vec<u64>,
}

/// Memory that other processes may get until the tier is closed, and the offer that ends then.
type Offered = (Option<Ends>, Option<Arc<Region>>);

impl Tier {
    fn of(tier: kv::Tier, location: Location, offered: Offered) -> PyClassInitializer<Self> {
        let sizes = (0..tier.groups()).filter_map(|group| tier.page_bytes_of(group));
        closing(Self {
            pages: tier.pages(),
            page_sizes: sizes.collect(),
            inner: Open::new(tier),
            offered: Open::new(offered),
            location,
        })
    }

    /// Returns a handle.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument` in a forked child.
    fn handle(&self) -> PyResult<kv::Tier> {
        self.inner.get("tier", kv::Tier::driver)
    }

    /// Returns a handle, and keys of groups.
    ///
    /// # Errors
    /// As [`handle`](Self::handle); those of the keys.
    fn asked(&self, keys: &Keys<'_>, groups: &Groups) -> PyResult<(kv::Tier, Vec<Key>)> {
        let tier = self.handle()?;
        let asked = keys.read(groups, &tier)?;
        Ok((tier, asked))
    }

    /// Returns where the tier's pages are.
    fn place(&self, tier: &kv::Tier) -> (egmem::Driver, Location) {
        (tier.driver().clone(), self.location)
    }

    /// Returns what the memory is, and why.
    ///
    /// # Errors
    /// As [`handle`](Self::handle).
    fn chosen(&self, py: Python<'_>) -> PyResult<(Backing, Why)> {
        let tier = self.handle()?;
        let first = tier.page_ptr(PageId::from_bits(0)).or_raise()?;
        backing_at(py, tier.driver(), first)
    }
}

/// Takes the memory of an object over for a tier. If that fails, the object has its memory again.
///
/// # Errors
/// Those of `open`; `InvalidArgument` for memory that no tier lies in; `InUse` for memory with views; `Closed`.
fn attach(
    py: Python<'_>,
    object: &Memory,
    offer: Option<&Bound<'_, Offer>>,
    open: impl FnOnce(AttachOptions) -> Result<kv::Tier, kv::Error>,
) -> PyResult<PyClassInitializer<Tier>> {
    object.region()?.expect_here()?;
    let region = object.take_offered(py)?.ok_or_else(|| closed("memory"))?;
    let location = region.only_location();
    let opened = region
        .wait_for_gpus(py)
        .and_then(|()| open(options(region.owner().or_raise()?)?).or_raise());
    let tier = match opened {
        Ok(tier) => tier,
        Err(error) => {
            object.put_back(region);
            return Err(error);
        }
    };
    let memory = region.shared_before().map(|_| Arc::clone(&region));
    // The tier keeps the memory, and waits for its own copies.
    drop(Arc::into_inner(region).map(Region::into_owner));
    let offer = offer.map(|offer| offer.get().ends());
    Ok(Tier::of(tier, location, (offer, memory)))
}

/// Returns the options of a tier in memory.
///
/// # Errors
/// `InvalidArgument` for a block, for a part of memory and for a page.
fn options(owner: &Owner) -> PyResult<AttachOptions> {
    match owner {
        Owner::Buffer(memory) => Ok(kv::Tier::attach(Arc::clone(memory))),
        Owner::Remote(memory) => Ok(kv::Tier::attach(Arc::clone(memory))),
        Owner::Imported(memory) => Ok(kv::Tier::attach(Arc::new(memory.clone()))),
        _ => Err(invalid(
            "a tier lies in a Buffer, a RemoteBuffer or a SharedBuffer that is no part of one",
        )),
    }
}

/// Reads which pages are checked.
///
/// # Errors
/// `InvalidArgument`.
fn parse_verify(text: &str) -> PyResult<Verify> {
    let words = [
        ("never", Verify::Never),
        ("sample", Verify::Sample),
        ("always", Verify::Always),
    ];
    choice("verify", text, &words)
}

/// Sets the sizes of a tier.
///
/// # Errors
/// `TypeError` unless `page_bytes` is given, and one of `pages` and `bytes`; `InvalidArgument` for no size, and for a number of
/// pages of several sizes.
fn sized(
    options: TierOptions,
    pages: Option<Count>,
    page_bytes: Option<PageSizes>,
    bytes: Option<Size>,
) -> PyResult<TierOptions> {
    let Some(sizes) = page_bytes.map(sizes) else {
        return Err(PyTypeError::new_err("a tier needs page_bytes"));
    };
    let options = match (pages, bytes, &*sizes) {
        (_, _, []) => {
            let why = "page_bytes is empty; valid: the bytes of a page, or of a page of each group";
            return Err(invalid(why));
        }
        (Some(_), None, [_, _, ..]) => {
            let why = "pages is given for several sizes of pages; valid: bytes, which they share";
            return Err(invalid(why));
        }
        (Some(pages), None, _) => options.pages(pages.0),
        (None, Some(bytes), _) => options.bytes(bytes.0),
        _ => {
            let why = "a tier has either pages, their number, or bytes, those of all its memory";
            return Err(PyTypeError::new_err(why));
        }
    };
    Ok(options.page_sizes(sizes))
}

/// The bytes of a page, or of a page of each group.
type PageSizes = OneOrEach<Size>;

/// Returns the sizes.
fn sizes(given: PageSizes) -> Vec<u64> {
    given.into_iter().map(|size| size.0).collect()
}

/// A list of keys, or another iterable of `bytes`.
struct Keys<'py>(Vec<Bound<'py, PyBytes>>);

impl Keys<'_> {
    /// Returns the keys of a tier that has some groups.
    ///
    /// # Errors
    /// `InvalidArgument` for another number of groups than of keys, and for a group that the tier does not have.
    fn read(&self, of: &Groups, tier: &kv::Tier) -> PyResult<Vec<Key>> {
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
type Groups = OneOrEach<Count>;

impl Default for Groups {
    fn default() -> Self {
        Self::One(Count(0))
    }
}

/// Returns the number of a group that the tier has.
///
/// # Errors
/// `InvalidArgument` for another one.
fn group_of(group: u64, tier: &kv::Tier) -> PyResult<u8> {
    let found = u8::try_from(group).ok();
    let found = found.filter(|found| usize::from(*found) < tier.groups());
    found.ok_or_else(|| no_group(group, tier.groups()))
}

/// Returns the keys of a tier with their pages, and with their groups before them if that is asked for.
///
/// # Errors
/// Python's.
fn listed(py: Python<'_>, keys: Vec<(Key, PageId)>, groups: bool) -> PyResult<Bound<'_, PyAny>> {
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
fn no_group(group: u64, groups: usize) -> PyErr {
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
        let mut keys = room_for(&given)?;
        python(given.py(), || {
            for (index, key) in given.try_iter()?.enumerate() {
                match key?.cast_into::<PyBytes>() {
                    Ok(key) => keys.push(key),
                    Err(error) => return Err(no_key(index, &error.into_inner())?),
                }
            }
            Ok(Self(keys))
        })
    }
}

/// Returns the exception about an object in a list of keys.
fn no_key(index: usize, given: &Bound<'_, PyAny>) -> PyResult<PyErr> {
    let (kind, key) = (given.get_type().name()?, as_key(given)?);
    let why = format!("key {index} is {kind}, and a key is bytes: pass {key}");
    Ok(PyTypeError::new_err(why))
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
