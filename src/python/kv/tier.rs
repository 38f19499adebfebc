//! `egmem.kv.Tier`: pages by key.

use egmem::GrowthState;
use egmem::kv::{self, Key, PageId};
use egmem::size::Bytes;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{IntoPyDict, PyBytes, PyDict};

use super::copies::{GpuPages, Job, start};
use super::events::{Events, Subscription, telling};
use super::store::{Load, Store};
use super::{Groups, Keys, PageSizes, Tier, attach, listed, no_group, parse_verify, sized, sizes};
use crate::args::{self, Count, GpuArg, NodeArg, OneOrEach, Size, With};
use crate::driver::{Driver, given_or_default};
use crate::error::OrRaise;
use crate::interpreter::{SLICE, closing, drop_detached, python, record, told};
use crate::ledger::from_program;
use crate::memory::Memory;
use crate::places::location;
use crate::share::Offer;

#[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
#[pymethods]
impl Tier {
    #[new]
    #[pyo3(signature = (
        pages=None, page_bytes=None, *, bytes=None, node=None, near_gpu=None, access_by=None, label=None, backing=None, verify="never",
        progress=None, background=false, driver=None,
    ))]
    fn new(
        py: Python<'_>,
        pages: Option<Count>,
        page_bytes: Option<PageSizes>,
        bytes: Option<Size>,
        node: Option<NodeArg>,
        near_gpu: Option<GpuArg>,
        access_by: Option<OneOrEach<GpuArg>>,
        label: Option<String>,
        backing: Option<&str>,
        verify: &str,
        progress: Option<&Bound<'_, PyAny>>,
        background: bool,
        driver: Option<&Bound<'_, Driver>>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let driver = given_or_default(py, driver)?;
        let location = location(py, &driver, node, near_gpu, None)?;
        let options = kv::Tier::on(location).verify(parse_verify(verify)?);
        let options = sized(options, pages, page_bytes, bytes)?
            .with(access_by, kv::TierOptions::access_by)
            .with(
                backing.map(args::backing).transpose()?,
                kv::TierOptions::backing,
            )
            .label(label.unwrap_or_else(|| "egmem.kv".into()));
        let tier = from_program(py, || {
            told(py, progress, |tell| match background {
                true => options.create_in_background(&driver, tell),
                false => options.create_with(&driver, tell),
            })
        })?;
        Ok(Self::of(tier, location, (None, None)))
    }

    /// Attaches the tier in memory that outlives the process, or that several processes have: a `RemoteBuffer` of
    /// `egmem serve`, a `SharedBuffer`, or a `Buffer`. The tier takes the memory over, and the object is closed. Memory
    /// of zeros becomes a new tier, which needs `page_bytes`; of a tier, the ready pages are kept with their keys and
    /// their order of use.
    ///
    /// Memory that was pickled or is offered (`Memory.share`) may be had by other processes until the tier is closed.
    /// `offer` is such an offer, which then ends.
    ///
    /// `pages` and `page_bytes` must be those of the tier, if they are given. `tag`, bytes of any length, identifies the
    /// contents: the model and the cache's layout; another tag is refused. Other processes may have the tier: `members`.
    /// Whether one in another container has ended is not known: `InUse` is raised, unless `take_over` says that it has.
    /// `reset` creates a new tier over any data, but raises `InUse` while the tier has members. For other data and another
    /// tier `InvalidArgument` is raised. After an error the memory is still open. `verify` is as for `Tier`; pages that a process
    /// without it has stored are not checked.
    #[staticmethod]
    #[pyo3(signature = (
        memory, *, pages=None, page_bytes=None, tag=None, take_over=false, reset=false, verify="never", offer=None,
    ))]
    fn attach(
        py: Python<'_>,
        memory: &Bound<'_, Memory>,
        pages: Option<Count>,
        page_bytes: Option<PageSizes>,
        tag: Option<PyBackedBytes>,
        take_over: bool,
        reset: bool,
        verify: &str,
        offer: Option<&Bound<'_, Offer>>,
    ) -> PyResult<Py<Self>> {
        let verify = parse_verify(verify)?;
        let with = |options: kv::AttachOptions| {
            let tag = tag.map_or([0; Key::BYTES], |tag| Key::digest(&tag));
            let options = options
                .tag(tag)
                .take_over(take_over)
                .reset(reset)
                .verify(verify)
                .with(pages, |options, pages| options.pages(pages.0))
                .with(page_bytes, |options, bytes| {
                    options.page_sizes(sizes(bytes))
                });
            py.detach(|| options.open())
        };
        Py::new(py, attach(py, memory.get(), offer, with)?)
    }

    /// Returns how many bytes of memory a tier takes, for the size of memory that it is to be attached in.
    #[staticmethod]
    fn bytes_needed(pages: Count, page_bytes: Size) -> PyResult<u64> {
        kv::Tier::bytes_needed(pages.0, page_bytes.0).or_raise()
    }

    /// Returns the bytes that a tier keeps for a key, which `keys` and `Store.evicted` return: a key of up to 64 bytes
    /// itself, and a hash of 32 bytes of a longer one.
    #[staticmethod]
    fn stored_key<'py>(py: Python<'py>, key: &[u8]) -> Bound<'py, PyBytes> {
        PyBytes::new(py, Key::from_bytes(key).as_bytes())
    }

    /// What the memory is: `"driver"` or `"registered"`.
    #[getter]
    fn backing(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.chosen(py)?.0.to_string())
    }

    /// Why it is that.
    #[getter]
    fn backing_reason(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.chosen(py)?.1.to_string())
    }

    /// The contents that `attach` found, as a dictionary: `generation` (how often the tier was attached), `ready`
    /// (pages kept), `unfinished` (pages that were being written), `damaged`, and `is_new`.
    #[getter]
    fn found<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = self.handle()?.found();
        let numbers = [
            ("generation", found.generation),
            ("ready", found.ready),
            ("unfinished", found.unfinished),
            ("damaged", found.damaged),
        ];
        let dictionary = numbers.into_py_dict(py)?;
        dictionary.set_item("is_new", found.is_new)?;
        Ok(dictionary)
    }

    /// Returns how many of the first keys are ready. Changes no order.
    #[pyo3(signature = (keys, *, group=Groups::default()), text_signature = "($self, keys, *, group=0)")]
    fn lookup(&self, py: Python<'_>, keys: Keys<'_>, group: Groups) -> PyResult<usize> {
        let (tier, asked) = self.asked(&keys, &group)?;
        let found = tier.try_lookup(&asked);
        Ok(found.unwrap_or_else(|| py.detach(|| tier.lookup(&asked))))
    }

    /// Makes the ready ones among the keys the most recently used pages.
    #[pyo3(signature = (keys, *, group=Groups::default()), text_signature = "($self, keys, *, group=0)")]
    fn touch(&self, py: Python<'_>, keys: Keys<'_>, group: Groups) -> PyResult<()> {
        let (tier, asked) = self.asked(&keys, &group)?;
        let touched = tier.try_touch(&asked);
        touched.unwrap_or_else(|| py.detach(|| tier.touch(&asked)));
        Ok(())
    }

    /// Finds a page for each of the keys that the tier does not have, and evicts the least recently used pages if
    /// there are too few: never pinned ones. Raises `OutOfMemory` if too few can be evicted.
    #[pyo3(signature = (keys, *, group=Groups::default()), text_signature = "($self, keys, *, group=0)")]
    fn prepare_store(&self, py: Python<'_>, keys: Keys<'_>, group: Groups) -> PyResult<Store> {
        let (tier, asked) = self.asked(&keys, &group)?;
        let store = telling(py, || tier.prepare_store(&asked)).or_raise()?;
        Ok(Store::new(store, &keys.0, self.place(&tier)))
    }

    /// Pins the pages of the keys, all of which must be ready; raises `NotReady` otherwise.
    #[pyo3(signature = (keys, *, group=Groups::default()), text_signature = "($self, keys, *, group=0)")]
    fn prepare_load(&self, py: Python<'_>, keys: Keys<'_>, group: Groups) -> PyResult<Load> {
        let (tier, asked) = self.asked(&keys, &group)?;
        let load = telling(py, || tier.prepare_load(&asked)).or_raise()?;
        Ok(Load::new(load, self.place(&tier)))
    }

    /// Frees the pages of the keys that are ready and not pinned; returns how many.
    #[pyo3(signature = (keys, *, group=Groups::default()), text_signature = "($self, keys, *, group=0)")]
    fn remove(&self, py: Python<'_>, keys: Keys<'_>, group: Groups) -> PyResult<usize> {
        let (tier, asked) = self.asked(&keys, &group)?;
        telling(py, || tier.remove(&asked)).or_raise()
    }

    /// Returns the keys that are ready with their pages; the least recently used first. Of a key of more than 64 bytes it
    /// is the hash that `stored_key` returns. With `groups=True` each has its group before it: (group, key, page).
    #[pyo3(signature = (*, groups=false))]
    fn keys<'py>(&self, py: Python<'py>, groups: bool) -> PyResult<Bound<'py, PyAny>> {
        let tier = self.handle()?;
        listed(py, py.detach(|| tier.keys()), groups)
    }

    /// Copies pages, which a `Load` has pinned, to blocks of a GPU's cache, and returns at once with a `Job`. `pages`
    /// and `blocks` are lists of numbers, or NumPy arrays of 64 bits, which are read faster.
    ///
    /// The copies run on `stream`, in its order: an `egmem.Stream`, or PyTorch's, CuPy's or another library's. Without
    /// it they run on the current stream of the library whose arrays `GpuPages.from_tensors` was given, on their GPU.
    /// For a cache that was given as addresses, `stream` must be given: `InvalidArgument` otherwise. `gpu` is the GPU
    /// of a stream whose GPU is unknown: by default that of the cache's arrays, or GPU 0. `method` is `"auto"`,
    /// `"kernel"`, which `"kernel:16"` gives a number of blocks, `"batch"` or `"loop"`.
    #[pyo3(signature = (pages, blocks, gpu_pages, *, stream=None, gpu=None, method="auto"))]
    fn load(
        &self,
        py: Python<'_>,
        pages: &Bound<'_, PyAny>,
        blocks: &Bound<'_, PyAny>,
        gpu_pages: &Bound<'_, GpuPages>,
        stream: Option<&Bound<'_, PyAny>>,
        gpu: Option<GpuArg>,
        method: &str,
    ) -> PyResult<Job> {
        let (tier, on) = (self.handle()?, (stream, gpu, method));
        start(py, (&tier, true), (pages, blocks), gpu_pages, on)
    }

    /// Copies blocks of a GPU's cache to pages of a `Store`. Wait for the job before the store's commit. See `load`.
    #[pyo3(signature = (pages, blocks, gpu_pages, *, stream=None, gpu=None, method="auto"))]
    fn store(
        &self,
        py: Python<'_>,
        pages: &Bound<'_, PyAny>,
        blocks: &Bound<'_, PyAny>,
        gpu_pages: &Bound<'_, GpuPages>,
        stream: Option<&Bound<'_, PyAny>>,
        gpu: Option<GpuArg>,
        method: &str,
    ) -> PyResult<Job> {
        let (tier, on) = (self.handle()?, (stream, gpu, method));
        start(py, (&tier, false), (pages, blocks), gpu_pages, on)
    }

    /// Returns the address of a page, the same for the CPU and every GPU. Its contents are the caller's only while a
    /// store or a load has the page.
    fn page_address(&self, page: Count) -> PyResult<u64> {
        let page = PageId::from_bits(page.0);
        Ok(self.handle()?.page_ptr(page).or_raise()?.0)
    }

    /// Returns the tier's statistics as a dictionary of numbers. The counters begin when the tier is created or attached.
    ///
    /// - `pages`, `page_bytes`: the pages of the tier, and the bytes of each
    /// - `usable`: the pages whose memory is there, which the numbers below count; fewer than `pages` while the tier grows
    /// - `free`, `writing`, `ready`: the pages that are free, that stores are writing, and that can be loaded
    /// - `pinned`: those of the ready pages that loads and copies hold
    /// - `hits`, `misses`: the keys that `lookup` found, and did not find
    /// - `stores`, `evictions`: the pages that became ready by a commit, and that made room for others
    /// - `damaged`: the pages that were found to have other bytes than were committed
    /// - `loaded_bytes`, `stored_bytes`: the bytes that jobs have copied to GPUs and from them
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let tier = self.handle()?;
        let stats = py.detach(|| tier.stats());
        let numbers = [
            ("pages", stats.pages),
            ("usable", stats.usable),
            ("page_bytes", stats.page_bytes),
            ("free", stats.free),
            ("writing", stats.writing),
            ("ready", stats.ready),
            ("pinned", stats.pinned),
            ("hits", stats.hits),
            ("misses", stats.misses),
            ("stores", stats.stores),
            ("evictions", stats.evictions),
            ("damaged", stats.damaged),
            ("loaded_bytes", stats.loaded_bytes),
            ("stored_bytes", stats.stored_bytes),
        ];
        numbers.into_py_dict(py)
    }

    /// Returns the changes of keys from now on that this tier makes, in a queue for `capacity` keys. Keys that do not fit are lost:
    /// `Events.lost`. Changes that other processes make are not among them, nor are keys that `attach` found.
    #[pyo3(signature = (capacity=Count(1 << 16)), text_signature = "($self, capacity=65536)")]
    fn events(&self, py: Python<'_>, capacity: Count) -> PyResult<Py<Events>> {
        let tier = self.handle()?;
        let events = tier.events(usize::try_from(capacity.0).unwrap_or(usize::MAX));
        Py::new(py, closing(Events::new(events, tier.driver())))
    }

    /// Calls `function` with each event, as `events` has them, until the returned subscription is closed or deleted: in the thread
    /// whose call made the change, before the call returns. The function may use the tier. Threads that change keys at the same
    /// time may call it in another order, which `TierEvent.number` tells. An exception of the function goes to
    /// `sys.unraisablehook`.
    fn on_event(&self, function: &Bound<'_, PyAny>) -> PyResult<Py<Subscription>> {
        let subscription = Subscription::new(&self.handle()?, function)?;
        Py::new(function.py(), closing(subscription))
    }

    /// Returns the numbers of `stats` in Prometheus' text format (0.0.4): each with its help and its type, and with labels, such as
    /// `{"engine": 0}`, which distinguish tiers.
    #[pyo3(signature = (labels=None))]
    fn metrics(&self, py: Python<'_>, labels: Option<&Bound<'_, PyDict>>) -> PyResult<String> {
        let tier = self.handle()?;
        let text = |(name, value): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
            Ok((name.str()?.to_string(), value.str()?.to_string()))
        };
        let labels = labels.into_iter().flat_map(|labels| labels.iter());
        let labels = labels.map(text).collect::<PyResult<Vec<_>>>()?;
        let labels = labels.iter().map(|(name, value)| (&**name, &**value));
        let labels: Vec<_> = labels.collect();
        Ok(py.detach(|| tier.metrics(&labels)))
    }

    /// Whether the tier grows in the background: `"growing"`, `"complete"`, or `"stopped"` by an error or by
    /// `cancel_growth`. A tier whose growth was stopped keeps the pages that are there.
    #[getter]
    fn growth(&self) -> PyResult<&'static str> {
        Ok(match self.handle()?.growth() {
            GrowthState::Complete => "complete",
            GrowthState::Growing => "growing",
            _ => "stopped",
        })
    }

    /// Waits until all pages of a tier that grows in the background are there. Raises `Error` after `cancel_growth`, and
    /// the driver's error if that stopped the growth. `progress(done, total)` is called in this thread while it waits, in
    /// bytes. If it raises, or a signal does, such as Ctrl-C, the wait ends and the growth goes on.
    #[pyo3(signature = (progress=None))]
    fn wait_grown(&self, py: Python<'_>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let mut told = None;
        loop {
            // Each time, so that the wait does not keep a tier that was closed.
            let tier = self.handle()?;
            let ended = py.detach(|| tier.wait_grown_timeout(SLICE));
            let made = tier.grown();
            drop_detached(tier);
            if let Some(progress) = progress
                && told != Some(made)
            {
                python(py, || progress.call1((made.done, made.total)))?;
                told = Some(made);
            }
            match ended {
                Some(grown) => return grown.or_raise(),
                None => py.check_signals()?,
            }
        }
    }

    /// Stops the growth in the background after the chunk of memory under way. The tier keeps the pages that are there.
    fn cancel_growth(&self) -> PyResult<()> {
        self.handle()?.cancel_growth();
        Ok(())
    }

    /// The bytes of a page; of group 0, if there are several.
    #[getter]
    fn page_bytes(&self) -> u64 {
        self.page_sizes.first().copied().unwrap_or_default()
    }

    /// The number of groups of keys, each of which has a size of pages.
    #[getter]
    fn groups(&self) -> usize {
        self.page_sizes.len()
    }

    /// Returns the bytes of a page of a group.
    fn page_bytes_of(&self, group: Count) -> PyResult<u64> {
        let found = usize::try_from(group.0).ok();
        let bytes = found.and_then(|group| self.page_sizes.get(group)).copied();
        bytes.ok_or_else(|| no_group(group.0, self.page_sizes.len()))
    }

    /// Returns the open tiers on this memory, of this process and others.
    fn members<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let tier = self.handle()?;
        let members = py.detach(|| tier.members());
        let member = |member: &kv::Member| record(py, "Member", (member.pid, member.is_self));
        members.iter().map(member).collect()
    }

    /// The driver that the tier belongs to.
    #[getter]
    fn driver(&self) -> PyResult<Driver> {
        Ok(Driver::of(self.handle()?.driver()))
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Ends the tier's use. Its memory is given back with its last store, load, job and view.
    fn close(&self, py: Python<'_>) {
        let ended = (self.offered.take(), self.inner.take());
        py.detach(|| drop(ended)); // in this order
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { " closed" } else { "" };
        let sizes = self.page_sizes.iter().map(|size| Bytes(*size).to_string());
        let sizes = sizes.collect::<Vec<_>>().join(", ");
        let pages = match self.page_sizes.len() {
            1 => format!("{} pages of {sizes}", self.pages),
            groups => format!("{groups} groups of pages of {sizes}"),
        };
        format!("<egmem.kv.Tier{state} of {pages} on {}>", self.location)
    }
}
