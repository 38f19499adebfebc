//! Memory that Python's objects and views share, and that is freed with the last of them.

use std::fmt;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicUsize, fence};
use std::sync::{Arc, Mutex, PoisonError};

use egmem::driver::{Access, Driver, HandleTypes, Location};
use egmem::memory::Engine;
use egmem::share::Shared;
use pyo3::prelude::*;

use crate::error::{OrRaise, ToPy, raise};
use crate::frees;
use crate::interpreter::{detached, lock};
use crate::places::node_of;

pub use crate::owner::{CpuBytes, Owner, Whole, expect_within};

/// Memory, and where in it a region begins.
pub type Reached<'a> = (&'a dyn Whole, u64);

/// Memory at one range of addresses. It has no reference to a Python object, so any thread may drop it, with the GIL
/// or without.
pub struct Region {
    /// `None` only in `drop` and after `into_owner`.
    owner: Option<Owner>,
    /// The memory's driver.
    pub driver: Driver,
    /// The first address.
    pub address: u64,
    /// The number of bytes.
    pub len: u64,
    /// Where the first byte is.
    pub location: Location,
    /// Where the memory's parts are, each location once.
    pub places: Vec<Location>,
    /// Whether code outside of this crate may have the address.
    exposed: AtomicBool,
    /// An array interface was read, so views may exist that are not counted.
    uncounted: AtomicBool,
    /// The memory as other processes get it, from the first time on that one does.
    shared: Mutex<Option<Arc<Shared>>>,
    /// How many offers keep it.
    offers: AtomicUsize,
}

/// Memory that an offer keeps. It is counted, because a tier may take over memory that is offered, but none with views.
pub struct Offered(Arc<Region>);

impl Offered {
    /// Keeps the memory.
    pub fn new(region: &Arc<Region>) -> Self {
        let kept = Arc::clone(region);
        kept.offers.fetch_add(1, Relaxed);
        Self(kept)
    }

    /// Returns whether this process made the memory, and is no child that was forked from it.
    pub fn is_here(&self) -> bool {
        self.0.driver.is_of_this_process()
    }
}

impl Drop for Offered {
    fn drop(&mut self) {
        self.0.offers.fetch_sub(1, Relaxed);
    }
}

impl Region {
    /// Takes over the owner of the bytes.
    pub fn new(owner: Owner) -> Self {
        let (driver, address, len, location) = owner.facts();
        let places = owner.places(location);
        Self {
            owner: Some(owner),
            driver,
            address,
            len,
            location,
            places,
            exposed: AtomicBool::new(false),
            uncounted: AtomicBool::new(false),
            shared: Mutex::new(None),
            offers: AtomicUsize::new(0),
        }
    }

    /// Returns the owner of the bytes.
    ///
    /// # Errors
    /// None in practice: the owner leaves with the region.
    pub fn owner(&self) -> egmem::Result<&Owner> {
        self.owner
            .as_ref()
            .ok_or_else(|| egmem::Error::invalid("memory", "it was given away"))
    }

    /// Waits for the GPUs if the address was given away.
    ///
    /// # Errors
    /// `NotReady` while a stream is captured; the driver's errors.
    pub fn wait_for_gpus(&self, py: Python<'_>) -> PyResult<()> {
        match self.exposed.load(Relaxed) {
            true => frees::wait_for_gpus(py, &self.driver),
            false => Ok(()),
        }
    }

    /// Gives the owner away, without waiting for GPUs.
    pub fn into_owner(mut self) -> Option<Owner> {
        drop(lock(&self.shared).take());
        self.owner.take()
    }

    /// Returns how many views keep the memory beside its object and its offers.
    pub fn views(self: &Arc<Self>) -> usize {
        // In this order: an offer that ends in between counts as a view.
        let others = Arc::strong_count(self) - 1;
        others.saturating_sub(self.offers.load(Relaxed))
    }

    /// Notes that views are made which keep no share of the memory: from then on its object cannot be closed.
    pub fn count_no_views(&self) {
        self.uncounted.store(true, Relaxed);
    }

    /// Returns whether views may exist that are not counted.
    pub fn is_uncounted(&self) -> bool {
        // With the end of the share of a thread that has noted it.
        fence(Acquire);
        self.uncounted.load(Relaxed)
    }

    /// Returns the memory that this is a part of, or this, and where it begins there.
    pub fn whole(self: &Arc<Self>) -> (&Arc<Self>, u64) {
        match &self.owner {
            Some(Owner::Part { whole, offset, .. }) => (whole, *offset),
            _ => (self, 0),
        }
    }

    /// As [`whole`](Self::whole).
    fn root(&self) -> (&Self, u64) {
        match &self.owner {
            Some(Owner::Part { whole, offset, .. }) => (whole, *offset),
            _ => (self, 0),
        }
    }

    /// Returns the memory as other processes get it, if one has got it or was sent it.
    pub fn shared_before(&self) -> Option<Arc<Shared>> {
        lock(&self.shared).clone()
    }

    /// Returns the memory for other processes; `None` if it was not made shareable by fd. A part has none of its own.
    pub fn shared(&self) -> egmem::Result<Option<Arc<Shared>>> {
        let mut slot = lock(&self.shared);
        if slot.is_none() {
            let made = match self.owner()? {
                Owner::Buffer(memory) => Shared::from(Arc::clone(memory)),
                Owner::Block(memory) => match Arc::clone(memory).share_arc() {
                    Ok(made) => made,
                    // Its heap was built without `shareable`.
                    Err(egmem::Error::InvalidArgument { .. }) => return Ok(None),
                    Err(error) => return Err(error),
                },
                _ => return Ok(None),
            };
            if made.handle_types().contains(HandleTypes::POSIX_FD) {
                *slot = Some(Arc::new(made));
            }
        }
        Ok(slot.clone())
    }

    /// Notes that code outside of this crate has the address: it may have given a GPU work that uses the memory. Blocks that
    /// are freed together and the whole of a part wait for the GPUs themselves, when the last of them ends.
    pub fn expose(&self) {
        match &self.owner {
            Some(Owner::OfMany(many, _)) => many.exposed.store(true, Relaxed),
            Some(Owner::Part { whole, .. }) => whole.expose(),
            _ => self.exposed.store(true, Relaxed),
        }
    }

    /// Returns where the memory is, if that is one place; otherwise the host, without a node.
    pub fn only_location(&self) -> Location {
        match self.places[..] {
            [location] => location,
            _ => Location::Host,
        }
    }

    /// Returns the host nodes that have parts of the memory.
    pub fn nodes(&self) -> Vec<i32> {
        let places = self.places.iter();
        places.filter_map(|place| node_of(*place)).collect()
    }

    /// Returns where the memory is, in words.
    pub fn place(&self) -> String {
        let nodes = self.nodes();
        if nodes.len() > 1 && nodes.len() == self.places.len() {
            let nodes: Vec<_> = nodes.iter().map(i32::to_string).collect();
            return format!("host NUMA nodes {}", nodes.join(", "));
        }
        let places: Vec<_> = self.places.iter().map(Location::to_string).collect();
        places.join(", ")
    }

    /// Checks that this process made the memory, and is no child that was forked from it.
    pub fn expect_here(&self) -> PyResult<()> {
        self.driver.expect_this_process("memory").or_raise()
    }

    /// Returns the bytes as the CPU reaches them. Memory of a pool is waited for, without the GIL.
    ///
    /// # Errors
    /// `NotAccessible` unless the CPU may read; errors of earlier work on a pool's streams.
    pub fn cpu(&self, py: Python<'_>) -> PyResult<CpuBytes> {
        self.expect_here()?;
        let (root, start) = self.root();
        if let Some(Owner::Page { bytes, .. }) = &root.owner {
            return bytes.part(start, self.len);
        }
        if let Location::Device(gpu) = self.location {
            return Err(raise(
                "NotAccessible",
                &format!("the CPU has no access to memory of GPU {gpu}"),
                &format!(
                    "use a view of the GPU (memory.on(\"cuda:{gpu}\")), or copy to memory on a host node \
                     (memory.copy_to)"
                ),
            ));
        }
        py.detach(|| Ok(CpuBytes::of(&root.owner()?.memory()?.cpu()?)))
            .map_err(egmem::Error::to_py)?
            .part(start, self.len)
    }

    /// Returns the bytes as [`cpu`](Self::cpu) does, to write them.
    ///
    /// # Errors
    /// Those of [`cpu`](Self::cpu); `NotAccessible` for memory that the CPU may only read.
    pub fn writable(&self, py: Python<'_>) -> PyResult<CpuBytes> {
        let bytes = self.cpu(py)?;
        if bytes.writable {
            return Ok(bytes);
        }
        let remedy = match &self.root().0.owner {
            Some(Owner::Page { .. }) => {
                "write pages in a store (Tier.prepare_store): a load's are read-only"
            }
            Some(Owner::Remote(_)) => "fetch it with mode=\"rw\", if the exporter allows that",
            Some(Owner::Imported(_)) => "receive it with mode=\"rw\", if it is offered so",
            _ => "allocate it with host=\"rw\"",
        };
        let message = "the CPU may only read this memory";
        Err(raise("NotAccessible", message, remedy))
    }

    /// Checks that GPU `gpu` reaches the memory; returns whether it may write.
    ///
    /// # Errors
    /// `NoSuchPlace` for a GPU that the machine lacks; `NoDeviceInterface` on a simulated driver, whose addresses mean nothing
    /// to a GPU; `NotAccessible`.
    pub fn gpu(&self, py: Python<'_>, gpu: i32) -> PyResult<bool> {
        self.expect_here()?;
        crate::args::expect_gpu(gpu, &self.driver)?;
        if self.driver.is_simulated() {
            let message = "memory of a simulated driver has no address that a GPU can use";
            let remedy = "use the CPU's views (memoryview, NumPy, DLPack for the CPU), or a real driver: egmem.open()";
            return Err(raise("NoDeviceInterface", message, remedy));
        }
        let access = py.detach(|| self.gpu_access(gpu)).or_raise()?;
        match access {
            Access::ReadWrite => Ok(true),
            Access::Read => Ok(false),
            Access::None => {
                let who = Location::Device(gpu);
                Err(egmem::Error::not_accessible(who, Access::None, Access::Read).to_py())
            }
        }
    }

    /// Returns a GPU's access.
    pub fn gpu_access(&self, gpu: i32) -> egmem::Result<Access> {
        let (memory, start) = self.reach()?;
        memory.gpu_access(gpu, Engine::Kernel, start, self.len)
    }

    /// Returns the memory, and where in it this begins.
    ///
    /// # Errors
    /// `InvalidArgument` for a page.
    pub fn reach(&self) -> egmem::Result<Reached<'_>> {
        let (root, start) = self.root();
        Ok((root.owner()?.memory()?, start))
    }

    /// Returns the locations that have access, for `repr`: `", CPU rw, GPUs rw"`. Memory of a pool is not waited for,
    /// so the CPU is left out there; in a forked child the driver is not asked.
    pub fn access_in_words(&self, py: Python<'_>) -> String {
        if !self.driver.is_of_this_process() {
            return String::new();
        }
        let cpu = match &self.owner {
            None | Some(Owner::Pool(_)) => "",
            Some(_) => match self.cpu(py) {
                Ok(bytes) if bytes.writable => ", CPU rw",
                Ok(_) => ", CPU r",
                Err(_) => "",
            },
        };
        let gpus = py.detach(|| {
            let count = self.driver.device_count().unwrap_or(0);
            let access = |gpu| self.gpu_access(gpu).map_or("", access_text);
            (0..count).map(access).collect::<Vec<_>>()
        });
        let same = gpus.windows(2).all(|pair| pair[0] == pair[1]);
        let gpus = match gpus.first() {
            None | Some(&"") if same => String::new(),
            Some(access) if same => format!(", GPUs {access}"),
            _ => (0..)
                .zip(gpus)
                .filter(|(_, access)| !access.is_empty())
                .map(|(gpu, access): (i32, _)| format!(", GPU {gpu} {access}"))
                .collect(),
        };
        format!("{cpu}{gpus}")
    }

    /// Returns the GPU to name where one must be: the memory's own, or the first.
    pub fn default_gpu(&self) -> i32 {
        match self.location {
            Location::Device(gpu) => gpu,
            _ => self.stream().map_or(0, egmem::Stream::device),
        }
    }

    /// Returns the stream that orders a pool's allocation, and its GPU.
    pub fn stream(&self) -> Option<&egmem::Stream> {
        match &self.root().0.owner {
            Some(Owner::Pool(memory)) => Some(memory.stream()),
            _ => None,
        }
    }
}

impl Drop for Region {
    /// Gives the memory back, without the GIL. If the address was given away, only after the GPUs' work: a GPU that
    /// uses freed memory loses its context, or reads data of the heap's next user. In a forked child nothing is given
    /// back: threads that fetched memory waits for are the parent's.
    fn drop(&mut self) {
        let Some(owner) = self.owner.take() else {
            return;
        };
        let shared = self.shared.get_mut();
        let shared = shared.unwrap_or_else(PoisonError::into_inner).take();
        let owner = (shared, owner);
        if !self.driver.is_of_this_process() {
            std::mem::forget(owner);
            return;
        }
        let (driver, bytes, exposed) = (&self.driver, self.len, *self.exposed.get_mut());
        detached(|| match exposed {
            true => frees::free_after_gpus(driver, bytes, owner),
            false => drop(owner),
        });
    }
}

/// Formats access for Python programs: `"rw"`, `"r"` or `""`.
pub fn access_text(access: Access) -> &'static str {
    match access {
        Access::None => "",
        Access::Read => "r",
        Access::ReadWrite => "rw",
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{}", self.address, self.len)
    }
}
