//! A tier that is open until Python closes it.

use std::sync::Arc;

use egmem::GrowthState;
use egmem::driver::Location;
use egmem::kv::{self, AttachOptions, Key, PageId, TierOptions, Verify};
use egmem::size::Bytes;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use super::{Groups, Keys, no_group};
use crate::args::{Count, OneOrEach, Size, choice};
use crate::error::{OrRaise, closed, invalid};
use crate::interpreter::{Open, SLICE};
use crate::ledger::{Words, backing_at};
use crate::memory::Memory;
use crate::region::{Owner, Region};
use crate::share::Ends;

/// A tier, and what is known of it when it is closed.
pub struct OpenTier {
    // In this order: the offer ends first.
    offered: Open<Offered>,
    inner: Open<kv::Tier>,
    pub location: Location,
    pub pages: u32,
    /// The bytes of a page of each group.
    pub page_sizes: Vec<u64>,
}

/// Memory that other processes may get until the tier is closed.
#[derive(Default)]
pub struct Offered {
    pub _offer: Option<Ends>,
    pub _memory: Option<Arc<Region>>,
}

impl OpenTier {
    pub fn of(tier: kv::Tier, location: Location, offered: Offered) -> Self {
        Self {
            pages: tier.pages(),
            page_sizes: (0..tier.groups())
                .filter_map(|group| tier.page_bytes_of(group))
                .collect(),
            inner: Open::new(tier),
            offered: Open::new(offered),
            location,
        }
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

    /// Returns the bytes of a page of a group.
    ///
    /// # Errors
    /// `InvalidArgument` for no group of the tier.
    pub fn page_bytes_of(&self, group: u64) -> PyResult<u64> {
        let found = usize::try_from(group).ok();
        let bytes = found.and_then(|group| self.page_sizes.get(group)).copied();
        bytes.ok_or_else(|| no_group(group, self.page_sizes.len()))
    }

    /// Returns what the memory is, and why.
    ///
    /// # Errors
    /// As [`handle`](Self::handle).
    pub fn words(&self, py: Python<'_>) -> PyResult<Words> {
        let tier = self.handle()?;
        let first = tier.page_ptr(PageId::from_bits(0)).or_raise()?;
        backing_at(py, tier.driver(), first)
    }

    pub fn is_closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Ends the tier, which may wait.
    pub fn close(&self, py: Python<'_>) {
        let (offered, tier) = (self.offered.take(), self.inner.take());
        py.detach(|| {
            drop(offered);
            drop(tier);
        });
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

/// A tier, its place, and memory that other processes may get while the tier is open.
pub type Attached = (kv::Tier, Location, Option<Arc<Region>>);

/// Takes the memory of an object over for a tier. If that fails, the object has its memory again.
///
/// # Errors
/// Those of `open`; `InvalidArgument` for memory that no tier lies in; `InUse` for memory with views; `Closed`.
pub fn attach(
    py: Python<'_>,
    object: &Memory,
    open: impl FnOnce(AttachOptions) -> Result<kv::Tier, kv::Error>,
) -> PyResult<Attached> {
    let region = object.region()?;
    region.expect_here()?;
    let location = region.only_location();
    drop(region);
    let region = object.take_offered()?.ok_or_else(|| closed("memory"))?;
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
    if region.shared_before().is_some() {
        return Ok((tier, location, Some(region)));
    }
    // The tier keeps the memory, and waits for its own copies.
    drop(Arc::into_inner(region).map(Region::into_owner));
    Ok((tier, location, None))
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

/// Returns the word for whether a tier grows.
pub fn growth(tier: &kv::Tier) -> &'static str {
    match tier.growth() {
        GrowthState::Complete => "complete",
        GrowthState::Growing => "growing",
        _ => "stopped",
    }
}

/// Waits for the end of a tier's growth without the GIL, and calls `progress(done, total)` when it has changed. `tier` is asked
/// for a handle each time, so that the wait does not keep a tier that was closed.
///
/// # Errors
/// Those of `tier`, of `progress`, of a signal handler and of the growth.
pub fn waiting(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    tier: impl Fn() -> PyResult<kv::Tier>,
) -> PyResult<()> {
    let mut told = None;
    loop {
        let tier = tier()?;
        let ended = py.detach(|| tier.wait_grown_timeout(SLICE));
        let made = tier.grown();
        crate::interpreter::drop_detached(tier);
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
