//! `egmem.kv.Page`: the CPU's view of a page.

use std::sync::Arc;

use egmem::driver::{Driver, Location};
use egmem::kv;
use egmem::memory::CpuView;
use pyo3::prelude::*;

use crate::error::OrRaise;
use crate::memory::{Memory, make};
use crate::region::{CpuBytes, Owner, PageBytes};

/// The load or store that keeps a page for a view.
pub enum Keeper {
    /// A store writes it.
    Store(Arc<kv::Store>),
    /// A load has it pinned.
    Load(Arc<kv::Load>),
}

/// A page of a tier, kept by a store or a load.
pub struct Page {
    keeper: Keeper,
    index: usize,
    driver: Driver,
    location: Location,
    address: u64,
    len: u64,
}

impl Page {
    /// Makes a Python object of page `index` of a store or a load.
    ///
    /// # Errors
    /// Those of the tier's views.
    pub fn make<'py>(
        py: Python<'py>,
        keeper: Keeper,
        index: usize,
        place: &(Driver, Location),
    ) -> PyResult<Bound<'py, PyAny>> {
        let (driver, location) = place.clone();
        driver.expect_this_process("page").or_raise()?;
        let mut page = Self {
            keeper,
            index,
            driver,
            location,
            address: 0,
            len: 0,
        };
        let bytes = page.cpu()?;
        page.address = bytes.address.addr() as u64;
        page.len = bytes.len;
        make(py, PageView, Owner::Page(Box::new(page)))
    }
}

impl PageBytes for Page {
    fn facts(&self) -> (Driver, u64, u64, Location) {
        (self.driver.clone(), self.address, self.len, self.location)
    }

    /// The bytes of a load are read-only: another load may have the same page.
    fn cpu(&self) -> PyResult<CpuBytes> {
        let bytes = |view: CpuView<'_>, writable| CpuBytes {
            address: view.as_ptr(),
            len: view.len(),
            writable,
        };
        let bytes = match &self.keeper {
            Keeper::Store(store) => store.view(self.index).map(|view| bytes(view, true)),
            Keeper::Load(load) => load.view(self.index).map(|view| bytes(view, false)),
        };
        bytes.or_raise()
    }

    fn fill(&self, offset: u64, len: u64, byte: u8) -> egmem::Result<()> {
        let Keeper::Store(store) = &self.keeper else {
            return Err(egmem::Error::invalid(
                "page",
                "a load's pages are read only",
            ));
        };
        let filled = store
            .view(self.index)
            .map(|view| view.fill(offset, len, byte));
        filled.map_err(|error| match error.memory() {
            Some(error) => error.clone(),
            None => egmem::Error::invalid("page", error.to_string()),
        })?
    }
}

/// The CPU's view of a page, made by `Store.view` and `Load.view`. It keeps the page: a store with live views cannot
/// be committed, and a load's pages stay pinned.
#[pyclass(extends = Memory, subclass, frozen, module = "egmem.kv", name = "Page")]
pub struct PageView;
