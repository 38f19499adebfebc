//! The common case in one call: memory on a node, mapped and granted.

mod access;
mod allocate;
mod growing;

use std::ops::ControlFlow;

use smallvec::{SmallVec, smallvec};

use crate::Result;
use crate::backing::{Backing, Chosen};
use crate::driver::{Access, DevicePtr, Driver, HandleTypes, Location};
use crate::growth::Growth;
use crate::ledger::{AllocPath, Label, Site};
use crate::memory::{
    CpuView, access_checks, check_range, cpu_accessors, impl_cpu_memory, impl_memory,
};
use crate::size::Granularity;
use crate::topology::{Share, Topology, add_once};
use crate::vmm::{MappedRange, Mapping, PhysicalMemory, PhysicalOptions};

pub use access::{RequestedAccess, reachable_gpus};
pub use growing::GrowingBuffer;

/// Room for the probes of 512 importers at a time, in bytes.
const PROBES: u64 = 4096;

/// Options for a buffer; [`allocate`](Self::allocate) creates it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `allocate`"]
pub struct BufferOptions {
    parts: SmallVec<[(Location, u64); 1]>,
    access: RequestedAccess,
    /// How the chunks are created, but for their location.
    memory: PhysicalOptions,
    shareable: bool,
    /// The least number of unused bytes behind the last part.
    room: u64,
    /// Parts are cut into pieces of this size.
    chunk: Option<u64>,
    growth: Growth,
    one_copy: bool,
}

impl BufferOptions {
    /// Sets the size in bytes: at least 1. The allocation is rounded up to the granularity
    /// ([`Buffer::padded`]).
    ///
    /// A spread buffer has the sizes of its shares; this changes the last one.
    #[inline]
    pub fn bytes(mut self, bytes: u64) -> Self {
        if let Some((_, last)) = self.parts.last_mut() {
            *last = bytes;
        }
        self
    }

    /// Sets which locations may read and write besides the host. The default is every GPU that can reach the
    /// memory.
    pub fn access_by<L: Into<Location>>(mut self, who: impl IntoIterator<Item = L>) -> Self {
        self.access.set_all(who);
        self
    }

    /// Sets the access of one location; [`Location::Host`] stands for the CPU.
    pub fn access(mut self, who: impl Into<Location>, access: Access) -> Self {
        self.access.set(who.into(), access);
        self
    }

    crate::driver::setters! {
        /// Sets how the memory may be shared; by default not at all.
        handle_types(handle_types: HandleTypes) => memory.props.handle_types = handle_types;

        /// Makes it shareable as widely as this machine allows, on each of its nodes: see
        /// [`handle_types_of`](crate::capability::shareable::handle_types_of), which also returns the reason if
        /// fabric handles do not work. [Registered](Backing::Registered) memory is shareable by POSIX fds alone.
        shareable() => shareable = true;

        /// Allocates at least 4096 bytes more than are used, so that importers can prove that they see the same
        /// memory: the exchange's probes write their words there, 8 bytes for each importer at a time.
        ///
        /// Without this, memory has such room only in the rest of its last granule. Memory of whole granules
        /// has none, and `RemoteBuffer::proved` says so. With this, such memory takes one granule more: 2 MiB on
        /// every driver measured so far.
        /// [`len`](Buffer::len) stays the requested size, and [`padded`](Buffer::padded) returns the allocated size.
        ///
        /// ```
        /// use egmem::driver::{NodeId, sim::Machine};
        /// use egmem::{Buffer, Driver};
        ///
        /// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
        /// let buffer = Buffer::on(NodeId(0)).bytes(4 << 20).shareable().room_for_probes();
        /// let buffer = buffer.allocate(&driver)?;
        /// assert_eq!((buffer.len(), buffer.padded()), (4 << 20, 6 << 20));
        /// # Ok::<(), egmem::Error>(())
        /// ```
        room_for_probes() => room = PROBES;

        /// Creates the memory in chunks of `bytes` each, so that [`Buffer::set_access_at`] can change the access of
        /// each chunk alone: a driver changes the access of whole allocations only. A multiple of the granularity, 2
        /// MiB on every driver measured so far. Each chunk takes three calls of the driver, and those larger than
        /// [`growth`](Self::growth) says several times three.
        ///
        /// A buffer has at most 1,048,576 chunks ([`Buffer::MAX_PARTS`]), and shared memory at most 4096.
        chunk(bytes: u64) => chunk = Some(bytes);

        /// Sets how much memory on a host node one driver call creates, and how long the allocation rests between two
        /// of them. The default is [`Growth::steady`]: 64 MiB without a rest.
        ///
        /// Larger parts are created in chunks, which lie side by side: [`physical`](Buffer::physical) and
        /// [`mappings`](Buffer::mappings) have one element for each. Memory that can be shared is exported as a handle for
        /// each chunk. All of its parts together are at most 2048 chunks, and one more for each part: beyond 128
        /// GiB (32 GiB with [`Growth::gentle`]) chunks are larger than this says. Registered memory has at most 256: beyond 16 GiB (4
        /// GiB). Memory of GPUs is not divided.
        growth(growth: Growth) => growth = growth;

        /// Sets what the memory is. The default is [`Backing::Driver`].
        ///
        /// A copy by the driver itself, of addresses alone, fails with INVALID_VALUE if it reaches over a border of two
        /// chunks of [registered](Backing::Registered) memory. The copies of this library end there.
        backing(backing: Backing) => memory.backing = backing;

        /// Sets whether other code copies the memory by addresses alone: [`Backing::Auto`] then takes the driver's memory where
        /// registered memory would have several chunks.
        one_copy(on: bool) => one_copy = on;

        /// Sets whether to ask the driver for more memory than the node has free. It then refuses only the chunk for
        /// which there is nothing left.
        overcommit(on: bool) => memory.overcommit = on;
    }

    /// Sets the memory's name in the [ledger](crate::ledger).
    pub fn label(mut self, label: impl Into<Label>) -> Self {
        self.memory.label = Some(label.into());
        self
    }

    /// Sets the path and the call in the memory's [ledger](crate::ledger) entry, for types that create memory on
    /// behalf of a program.
    pub fn recorded_as(mut self, path: AllocPath, site: impl Into<Option<Site>>) -> Self {
        self.memory.path = path;
        self.memory.site = site.into();
        self
    }

    /// Creates, maps and grants the memory. If a step fails, the steps before it are undone.
    ///
    /// # Errors
    /// Those of [`PhysicalOptions::create`](crate::vmm::PhysicalOptions::create), [`PhysicalMemory::map`](crate::vmm::PhysicalMemory::map) and
    /// [`Mapping::set_access`](crate::vmm::Mapping::set_access); [`Error::InvalidArgument`](crate::Error::InvalidArgument) for no share, or one before the
    /// last that is not a multiple of the granularity, for chunks that are not, for chunks of
    /// [`growth`](Self::growth) out of range, and for more than [`Buffer::MAX_PARTS`] parts; the reason why a buffer cannot
    /// be shareable as requested. A shortage names all that was requested of the location.
    #[track_caller]
    pub fn allocate(self, driver: &Driver) -> Result<Buffer> {
        self.allocate_with(driver, |_| ControlFlow::Continue(()))
    }
}

/// Memory on a chosen node, mapped at one address for the CPU and the GPUs, released when dropped.
///
/// Before it is dropped, GPU work that uses it must have finished: a GPU that accesses unmapped addresses
/// loses its context.
///
/// ```
/// use egmem::driver::sim::Machine;
/// use egmem::{Buffer, Driver, Topology};
///
/// let driver = Driver::simulated(Machine::gh200x4())?; // Driver::open() on a real machine
/// let topology = Topology::discover(&driver)?;
/// let gpu = topology.gpu(2)?;
/// let buffer = Buffer::on(gpu.host_node()?)
///     .access_by(topology.gpus())
///     .bytes(4 << 20)
///     .allocate(&driver)?;
/// buffer.write_at(64, &[1.0_f32, 2.0])?;
/// assert_eq!(buffer.get::<f32>(68)?, 2.0);
/// # Ok::<(), egmem::Error>(())
/// ```
#[derive(Debug)]
pub struct Buffer {
    range: MappedRange,
    len: u64,
    chosen: Chosen,
}

impl Buffer {
    /// Returns options for a buffer at `location`: a node's id, or any [`Location`].
    pub fn on(location: impl Into<Location>) -> BufferOptions {
        let location = location.into();
        BufferOptions {
            parts: smallvec![(location, 0)],
            access: RequestedAccess::default(),
            memory: PhysicalMemory::options(location),
            shareable: false,
            room: 0,
            chunk: None,
            growth: Growth::steady(),
            one_copy: false,
        }
    }

    /// Returns options for a buffer in parts on several nodes, at one range of addresses, such as
    /// [`PlacementRequest::place`](crate::topology::PlacementRequest::place) returns. Only the last share
    /// need not be a multiple of the granularity.
    ///
    /// ```
    /// use egmem::{Buffer, Driver, Machine, Topology, topology::Placement};
    ///
    /// let driver = Driver::simulated(Machine::gh200x4())?;
    /// let topology = Topology::discover(&driver)?;
    /// let shares = Placement::Spread.request(40 << 20).place(&topology)?;
    /// let buffer = Buffer::spread(&shares).allocate(&driver)?;
    /// assert_eq!(buffer.physical().len(), 4);
    /// buffer.fill(1)?;
    /// # Ok::<(), egmem::Error>(())
    /// ```
    pub fn spread(shares: &[Share]) -> BufferOptions {
        let parts = shares.iter().map(|share| (share.node.into(), share.bytes));
        let is_whole = |&(_, bytes): &(Location, u64)| Granularity::TWO_MIB.divides(bytes);
        let (whole, rest): (Vec<_>, Vec<_>) = parts.partition(is_whole);
        Self::in_parts(whole.into_iter().chain(rest))
    }

    /// Returns options for a buffer in parts at any locations, side by side in this order: of host nodes, of GPUs, or
    /// of both. Only the last part need not be a multiple of the granularity.
    ///
    /// The CPU is granted the parts on host nodes if there are any, and each GPU the parts that it can reach. With
    /// parts of both kinds, [`cpu_at`](Self::cpu_at) lends the CPU's view.
    ///
    /// ```
    /// use egmem::driver::{Location, NodeId};
    /// use egmem::{Buffer, Driver, Machine};
    ///
    /// // A front in GPU 0's memory, and the rest in the memory of its host node.
    /// let driver = Driver::simulated(Machine::gh200())?;
    /// let parts = [(Location::Device(0), 4 << 20), (NodeId(0).into(), 60 << 20)];
    /// let buffer = Buffer::in_parts(parts).allocate(&driver)?;
    /// buffer.cpu_at(4 << 20, 60 << 20)?.fill(0, 60 << 20, 1)?;
    /// assert!(buffer.cpu().is_err());
    /// # Ok::<(), egmem::Error>(())
    /// ```
    pub fn in_parts(parts: impl IntoIterator<Item = (Location, u64)>) -> BufferOptions {
        BufferOptions {
            parts: parts.into_iter().collect(),
            ..Self::on(Location::Host)
        }
    }

    /// Allocates `bytes` on the host node of GPU `gpu`, for the CPU and every GPU.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`](crate::Error::NoSuchGpu); [`Error::NodeUnknown`](crate::Error::NodeUnknown) if neither the driver nor the PCI tree knows the node;
    /// those of [`BufferOptions::allocate`].
    #[track_caller]
    pub fn near(driver: &Driver, gpu: i32, bytes: u64) -> Result<Self> {
        Self::on(Topology::host_node_of(driver, gpu)?)
            .bytes(bytes)
            .allocate(driver)
    }

    /// Returns the CPU's view of the buffer.
    ///
    /// # Errors
    /// [`Error::NotAccessible`](crate::Error::NotAccessible) unless the host may at least read.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        self.range.cpu(self.len)
    }

    /// Returns the CPU's view of `len` bytes from `offset` on, where the whole buffer is not the CPU's to access.
    ///
    /// # Errors
    /// [`Error::NotAccessible`](crate::Error::NotAccessible) unless the host may at least read the parts that contain them; [`Error::OutOfRange`](crate::Error::OutOfRange).
    pub fn cpu_at(&self, offset: u64, len: u64) -> Result<CpuView<'_>> {
        check_range(offset, len, self.len)?;
        self.range.cpu_at(offset, len)
    }

    // The CPU may have less access to other parts.
    cpu_accessors!(|this, offset, len| (this.cpu_at(offset, len)?, 0));

    /// Returns the physical memory, to export it or to map it again, in the order of addresses: one piece for each
    /// share or chunk, so several for more than 64 MiB of host memory ([`BufferOptions::growth`]).
    pub fn physical(&self) -> &[PhysicalMemory] {
        self.range.parts()
    }

    /// Returns the mappings of the physical memory, in the order of addresses.
    pub fn mappings(&self) -> &[Mapping] {
        self.range.mappings()
    }

    /// Returns where the buffer's parts are, each location once and in ascending order: several for a
    /// [spread](Self::spread) buffer.
    ///
    /// ```
    /// use egmem::driver::Location::HostNuma;
    /// use egmem::{Buffer, Driver, Machine, Topology, topology::Placement};
    ///
    /// let driver = Driver::simulated(Machine::gh200x4())?;
    /// let topology = Topology::discover(&driver)?;
    /// let shares = Placement::Spread.request(40 << 20).place(&topology)?;
    /// let buffer = Buffer::spread(&shares).allocate(&driver)?;
    /// assert_eq!(buffer.locations(), [0, 1, 2, 3].map(HostNuma));
    /// # Ok::<(), egmem::Error>(())
    /// ```
    pub fn locations(&self) -> Vec<Location> {
        let mut locations = Vec::new();
        for part in self.physical() {
            add_once(&mut locations, part.location());
        }
        locations
    }

    /// Returns what the memory is, and why.
    pub const fn backing(&self) -> &Chosen {
        &self.chosen
    }

    /// Returns the address, the same for every GPU and, on a host node, for the CPU.
    pub fn device_ptr(&self) -> DevicePtr {
        self.range.start()
    }

    /// Returns the number of bytes requested.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns the bytes allocated: those requested, with each part rounded up to the granularity.
    pub fn padded(&self) -> u64 {
        self.range.padded()
    }

    /// Returns `false`: a buffer has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }
}

impl_cpu_memory!(Buffer);

access_checks!(unsafe impl for Buffer, |this| this.range);

impl_memory! {
    /// Returns the location of the first part; [`locations`](Buffer::locations) has all.
    for Buffer, |this| this.range.first().driver(), this.range.start(), this.len, this.range.first().location()
}
