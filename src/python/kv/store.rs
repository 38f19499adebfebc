//! `egmem.kv.Store` and `egmem.kv.Load`: pages that are being written, and pages that are pinned.

use std::any::Any;
use std::ptr::null_mut;
use std::sync::Arc;

use egmem::driver::{Driver, Location};
use egmem::kv::{self, PageId};
use pyo3::exceptions::PyResourceWarning;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use super::events::telling;
use crate::args::Count;
use crate::error::{OrRaise, closed, raise, warn};
use crate::interpreter::{Open, drop_detached, python};
use crate::memory::{Memory, make};
use crate::region::{CpuBytes, Owner};

/// Pages for keys that the tier does not have, made by `Tier.prepare_store`. Copy the contents to them, wait, and
/// `commit`.
///
/// Without a commit the pages become free again, at the end of a `with` block or of the object. A `ResourceWarning` says
/// so; not after `close`, nor if an exception ends the block.
#[pyclass(frozen, module = "egmem.kv")]
pub struct Store {
    inner: Open<Arc<kv::Store>>,
    /// The caller's own key objects.
    keys: Vec<Py<PyBytes>>,
    place: (Driver, Location),
}

impl Store {
    /// Wraps a store; `asked` are the keys that it was made for.
    pub fn new(store: kv::Store, asked: &[Bound<'_, PyBytes>], place: (Driver, Location)) -> Self {
        let keys = store.indices().iter();
        Self {
            keys: keys.map(|&index| asked[index].clone().unbind()).collect(),
            inner: Open::new(Arc::new(store)),
            place,
        }
    }

    /// Returns how many pages are discarded if a store ends now: in a forked child none of its parent's.
    fn discarded(&self, store: Option<&kv::Store>) -> usize {
        match store {
            Some(store) if !store.is_committed() && self.place.0.is_of_this_process() => {
                store.pages().len()
            }
            _ => 0,
        }
    }

    /// Returns the value that `read` takes from the store. It takes no share, which `commit` would find in use.
    fn read<T>(&self, read: impl FnOnce(&kv::Store) -> T) -> PyResult<T> {
        let value = self.inner.lock().as_deref().map(read);
        value.ok_or_else(|| closed("store"))
    }
}

#[pymethods]
impl Store {
    /// The keys that the tier did not have, in the order asked for.
    #[getter]
    fn keys(&self, py: Python<'_>) -> Vec<Py<PyBytes>> {
        self.keys.iter().map(|key| key.clone_ref(py)).collect()
    }

    /// The places of `keys` in the list that was asked for.
    #[getter]
    fn indices(&self) -> PyResult<Vec<usize>> {
        self.read(|store| store.indices().to_vec())
    }

    /// The page of each of `keys`, as a number below 2^63. A page that had other keys before gets another number
    /// each time: the tier refuses old ones.
    #[getter]
    fn pages(&self) -> PyResult<Vec<u64>> {
        self.read(|store| bits(store.pages()))
    }

    /// The keys that made room: the tier has them no longer. Of a key of more than 64 bytes it is the hash that
    /// `Tier.stored_key` returns.
    #[getter]
    fn evicted<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let evicted = self.read(|store| store.evicted().to_vec())?;
        let keys = evicted.iter().map(|evicted| evicted.key.as_bytes());
        Ok(keys.map(|key| PyBytes::new(py, key)).collect())
    }

    /// The group of each of `evicted`.
    #[getter]
    fn evicted_groups(&self) -> PyResult<Vec<usize>> {
        self.read(|store| {
            let evicted = store.evicted().iter();
            evicted.map(|evicted| evicted.key.group().into()).collect()
        })
    }

    /// Returns the CPU's view of page `index` of `pages`, to write it.
    fn view<'py>(&self, py: Python<'py>, index: Count) -> PyResult<Bound<'py, PyAny>> {
        let store = self.inner.value().ok_or_else(|| closed("store"))?;
        let bytes = CpuBytes::of(&store.view(index.0 as usize).or_raise()?);
        page(py, store, &self.place, bytes)
    }

    /// Makes the pages ready: lookups find them from now on. Raises `InUse` while a view or a copy into one of them
    /// lives.
    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        // The lock ends before this thread asks for the GIL: others wait for the lock with the GIL.
        let committed = telling(py, || {
            let mut inner = self.inner.lock();
            let shared = inner.as_mut()?;
            Some(Arc::get_mut(shared).map(kv::Store::commit))
        });
        match committed.ok_or_else(|| closed("store"))? {
            Some(committed) => committed.or_raise(),
            None => Err(raise(
                "InUse",
                "the store cannot be committed: its pages have live views",
                "delete the views, then commit",
            )),
        }
    }

    /// Gives the pages up, unless they were committed.
    fn close(&self, py: Python<'_>) {
        self.inner.close(py);
    }

    fn __len__(&self) -> usize {
        self.keys.len()
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let store = self.inner.take();
        let discarded = match kind.is_none() {
            true => self.discarded(store.as_deref()),
            false => 0,
        };
        py.detach(|| drop(store));
        warn_of(py, discarded)
    }

    fn __repr__(&self) -> String {
        format!("<egmem.kv.Store of {} page(s)>", self.keys.len())
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let store = self.inner.take();
        let discarded = self.discarded(store.as_deref());
        drop_detached(store);
        if discarded > 0 {
            warn_at_the_end(discarded);
        }
    }
}

/// # Errors
/// The warning, where the program has warnings raised.
fn warn_of(py: Python<'_>, discarded: usize) -> PyResult<()> {
    if discarded == 0 {
        return Ok(());
    }
    let text = format!(
        "egmem.kv.Store ended without commit: {discarded} page(s) are discarded; call commit(), or close() to give them up"
    );
    warn::<PyResourceWarning>(py, &text)
}

/// Warns while an object is freed, which may happen with an exception set: it stays set. At the interpreter's end there
/// is no warning.
fn warn_at_the_end(discarded: usize) {
    Python::try_attach(|py| {
        let (mut kind, mut value, mut traceback) = (null_mut(), null_mut(), null_mut());
        // SAFETY: the thread is attached, and the three are writable. They own what they get.
        unsafe { ffi::PyErr_Fetch(&raw mut kind, &raw mut value, &raw mut traceback) };
        if let Err(error) = warn_of(py, discarded) {
            python(py, || error.write_unraisable(py, None));
        }
        // SAFETY: the thread is attached; this gives away what `PyErr_Fetch` returned.
        unsafe { ffi::PyErr_Restore(kind, value, traceback) };
    });
}

/// Pages that are pinned, made by `Tier.prepare_load`: none is evicted until `release`, the end of a `with` block or
/// of the object.
#[pyclass(frozen, module = "egmem.kv")]
pub struct Load {
    inner: Open<Arc<kv::Load>>,
    place: (Driver, Location),
}

impl Load {
    /// Wraps a load.
    pub fn new(load: kv::Load, place: (Driver, Location)) -> Self {
        Self {
            inner: Open::new(Arc::new(load)),
            place,
        }
    }

    fn get(&self) -> PyResult<Arc<kv::Load>> {
        self.inner.value().ok_or_else(|| closed("load"))
    }
}

#[pymethods]
impl Load {
    /// The page of each key, as a number: see `Store.pages`.
    #[getter]
    fn pages(&self) -> PyResult<Vec<u64>> {
        Ok(bits(self.get()?.pages()))
    }

    /// Returns the CPU's view of page `index` of `pages`, to read it.
    fn view<'py>(&self, py: Python<'py>, index: Count) -> PyResult<Bound<'py, PyAny>> {
        let load = self.get()?;
        let mut bytes = CpuBytes::of(&load.view(index.0 as usize).or_raise()?);
        bytes.writable = false; // another load may have the same page
        page(py, load, &self.place, bytes)
    }

    /// Releases the pages. Views and copies that run keep theirs.
    fn release(&self, py: Python<'_>) {
        self.inner.close(py);
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_args))]
    fn __exit__(&self, py: Python<'_>, _args: &Bound<'_, PyTuple>) {
        self.release(py);
    }

    fn __repr__(&self) -> String {
        match self.pages() {
            Ok(pages) => format!("<egmem.kv.Load of {} page(s)>", pages.len()),
            Err(_) => "<egmem.kv.Load released>".into(),
        }
    }
}

/// The CPU's view of a page, made by `Store.view` and `Load.view`. It keeps the page: a store with live views cannot
/// be committed, and a load's pages stay pinned.
#[pyclass(extends = Memory, subclass, frozen, module = "egmem.kv", name = "Page")]
pub struct PageView;

/// Makes the view of a page that `keeper` has, a store or a load.
fn page<'py>(
    py: Python<'py>,
    keeper: Arc<dyn Any + Send + Sync>,
    place: &(Driver, Location),
    bytes: CpuBytes,
) -> PyResult<Bound<'py, PyAny>> {
    let page = Owner::Page {
        keeper,
        place: place.clone(),
        bytes,
    };
    make(py, PageView, page)
}

/// Returns pages as numbers: a page's number, and above bit 32 how often it was free before, so that an old one is
/// refused.
fn bits(pages: &[PageId]) -> Vec<u64> {
    pages.iter().map(|page| page.to_bits()).collect()
}
