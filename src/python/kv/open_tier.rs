//! The class `egmem.kv.Tier`, open until Python closes it; its methods are in `tier.rs`.

use std::sync::Arc;

use egmem::backing::Chosen;
use egmem::driver::Location;
use egmem::kv::{self, AttachOptions, Key, PageId, TierOptions, Verify};
use egmem::size::Bytes;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use super::{Groups, Keys};
use crate::args::{Count, OneOrEach, Size, choice};
use crate::error::{OrRaise, closed, invalid};
use crate::interpreter::{Closing, Open, SLICE, closing, drop_detached};
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
    pub(super) page_sizes: Vec<u64>,
}

/// Memory that other processes may get until the tier is closed.
#[derive(Default)]
pub struct Offered {
    _offer: Option<Ends>,
    _memory: Option<Arc<Region>>,
}

impl Tier {
    pub fn of(tier: kv::Tier, location: Location, offered: Offered) -> PyClassInitializer<Self> {
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
    pub fn handle(&self) -> PyResult<kv::Tier> {
        self.inner.get("tier", kv::Tier::driver)
    }

    /// Returns a handle, and keys of groups.
    ///
    /// # Errors
    /// As [`handle`](Self::handle); those of the keys.
    pub fn asked(&self, keys: &Keys<'_>, groups: &Groups) -> PyResult<(kv::Tier, Vec<Key>)> {
        let tier = self.handle()?;
        let asked = keys.read(groups, &tier)?;
        Ok((tier, asked))
    }

    /// Returns where the tier's pages are.
    pub fn place(&self, tier: &kv::Tier) -> (egmem::Driver, Location) {
        (tier.driver().clone(), self.location)
    }

    /// Returns what the memory is, and why.
    ///
    /// # Errors
    /// As [`handle`](Self::handle).
    pub fn chosen(&self, py: Python<'_>) -> PyResult<Option<Chosen>> {
        let tier = self.handle()?;
        let first = tier.page_ptr(PageId::from_bits(0)).or_raise()?;
        backing_at(py, tier.driver(), first)
    }

    pub fn is_closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Ends the tier, which may wait.
    pub fn end(&self, py: Python<'_>) {
        let (offered, tier) = (self.offered.take(), self.inner.take());
        py.detach(|| {
            drop(offered);
            drop(tier);
        });
    }

    /// Waits for the end of the growth without the GIL, and calls `progress(done, total)` when it has changed. It takes a handle
    /// each time, so that the wait does not keep a tier that was closed.
    ///
    /// # Errors
    /// Those of [`handle`](Self::handle), of `progress`, of a signal handler and of the growth.
    pub fn wait_until_grown(
        &self,
        py: Python<'_>,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let mut told = None;
        loop {
            let tier = self.handle()?;
            let ended = py.detach(|| tier.wait_grown_timeout(SLICE));
            let made = tier.grown();
            drop_detached(tier);
            if let Some(progress) = progress
                && told != Some(made)
            {
                progress.call1((made.done, made.total))?;
                told = Some(made);
            }
            match ended {
                Some(grown) => return grown.or_raise(),
                None => py.check_signals()?,
            }
        }
    }

    /// Returns Python's `repr`.
    pub fn text(&self) -> String {
        let state = if self.is_closed() { " closed" } else { "" };
        let sizes = self.page_sizes.iter().map(|size| Bytes(*size).to_string());
        let sizes = sizes.collect::<Vec<_>>().join(", ");
        let pages = match self.page_sizes.len() {
            1 => format!("{} pages of {sizes}", self.pages),
            groups => format!("{groups} groups of pages of {sizes}"),
        };
        format!("<egmem.kv.Tier{state} of {pages} on {}>", self.location)
    }
}

/// Takes the memory of an object over for a tier. If that fails, the object has its memory again.
///
/// # Errors
/// Those of `open`; `InvalidArgument` for memory that no tier lies in; `InUse` for memory with views; `Closed`.
pub fn attach(
    py: Python<'_>,
    object: &Memory,
    offer: Option<&Bound<'_, Offer>>,
    open: impl FnOnce(AttachOptions) -> Result<kv::Tier, kv::Error>,
) -> PyResult<PyClassInitializer<Tier>> {
    object.region()?.expect_here()?;
    let region = object.take_offered()?.ok_or_else(|| closed("memory"))?;
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
    let offered = Offered {
        _offer: offer.map(|offer| offer.get().ends()),
        _memory: memory,
    };
    Ok(Tier::of(tier, location, offered))
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
pub fn verify(text: &str) -> PyResult<Verify> {
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
/// `TypeError` unless `page_bytes` is given, and one of `pages` and `bytes`.
pub fn sized(
    options: TierOptions,
    pages: Option<Count>,
    page_bytes: Option<PageSizes>,
    bytes: Option<Size>,
) -> PyResult<TierOptions> {
    let Some(page_bytes) = page_bytes else {
        return Err(PyTypeError::new_err("a tier needs page_bytes"));
    };
    let options = match (pages, bytes) {
        (Some(pages), None) => options.pages(pages.0),
        (None, Some(bytes)) => options.bytes(bytes.0),
        _ => {
            let why = "a tier has either pages, their number, or bytes, those of all its memory";
            return Err(PyTypeError::new_err(why));
        }
    };
    Ok(options.page_sizes(page_bytes.sizes()))
}

/// The bytes of a page, or of a page of each group.
pub type PageSizes = OneOrEach<Size>;

impl PageSizes {
    /// Returns the sizes.
    pub fn sizes(self) -> Vec<u64> {
        let sizes = match self {
            Self::One(size) => vec![size],
            Self::Each(sizes) => sizes,
        };
        sizes.into_iter().map(|size| size.0).collect()
    }
}
