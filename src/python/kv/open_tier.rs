//! A tier that is open until Python closes it.

use std::mem::take;
use std::sync::{Arc, Mutex};

use egmem::driver::Location;
use egmem::kv::{self, Key, PageId};
use egmem::size::Bytes;
use pyo3::prelude::*;

use crate::backing::{self, Words};
use crate::error::{OrRaise, closed};
use crate::locks::{copy_of, lock};
use crate::region::Region;
use crate::share::offer::Ends;

use super::keys::{Groups, Keys, no_group};

/// A tier, and what is known of it when it is closed.
pub struct OpenTier {
    inner: Mutex<Option<kv::Tier>>,
    offered: Mutex<Offered>,
    pub location: Location,
    pub pages: u32,
    /// The bytes of a page of each group.
    pub page_sizes: Vec<u64>,
}

/// Memory that other processes may get until the tier is closed. The offer ends first.
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
            inner: Mutex::new(Some(tier)),
            offered: Mutex::new(offered),
            location,
        }
    }

    /// Returns a handle.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument` in a forked child.
    pub fn handle(&self) -> PyResult<kv::Tier> {
        let tier = copy_of(&self.inner).ok_or_else(|| closed("tier"))?;
        tier.driver().expect_this_process("tier").or_raise()?;
        Ok(tier)
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
        backing::at(py, tier.driver(), first)
    }

    pub fn is_closed(&self) -> bool {
        lock(&self.inner).is_none()
    }

    /// Takes what ends when it is dropped, which may wait.
    pub fn end(&self) -> (Offered, Option<kv::Tier>) {
        let offered = take(&mut *lock(&self.offered));
        (offered, lock(&self.inner).take())
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

impl Drop for OpenTier {
    fn drop(&mut self) {
        crate::gil::drop_detached(self.end());
    }
}
