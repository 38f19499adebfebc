//! The common case in one call: memory on a node, mapped and granted.

use bytemuck::{AnyBitPattern, NoUninit};

use crate::driver::{
    Access, AccessDesc, AllocationProps, Code, DeviceAttribute, DevicePtr, Driver, HandleTypes,
    Location, NodeId,
};
use crate::memory::{CpuView, Memory, Sealed};
use crate::topology::Topology;
use crate::vmm::{Mapping, PhysicalMemory};
use crate::{Error, Result};

/// What a buffer is to be; [`allocate`](Self::allocate) makes it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `allocate`"]
pub struct BufferOptions {
    location: Location,
    bytes: u64,
    host: Option<Access>,
    gpus: Option<Vec<AccessDesc>>,
    handle_types: HandleTypes,
    overcommit: bool,
}

impl BufferOptions {
    /// The size in bytes: at least 1. What is allocated is this, rounded up to the granularity.
    pub const fn bytes(mut self, bytes: u64) -> Self {
        self.bytes = bytes;
        self
    }

    /// Who may read and write besides the host. Without this, every GPU that can reach the memory.
    pub fn access_by<L: Into<Location>>(mut self, who: impl IntoIterator<Item = L>) -> Self {
        for location in who {
            self = self.access(location, Access::ReadWrite);
        }
        self.gpus.get_or_insert_default();
        self
    }

    /// What one location may do; [`Location::Host`] stands for the CPU.
    pub fn access(mut self, who: impl Into<Location>, access: Access) -> Self {
        let location = who.into();
        if location.is_host() {
            self.host = Some(access);
        } else {
            let gpus = self.gpus.get_or_insert_default();
            gpus.retain(|desc| desc.location != location);
            gpus.push(AccessDesc { location, access });
        }
        self
    }

    /// How the memory may be shared; by default not at all.
    pub const fn handle_types(mut self, handle_types: HandleTypes) -> Self {
        self.handle_types = handle_types;
        self
    }

    /// Whether to ask the driver even for more than the node has free.
    pub const fn overcommit(mut self, on: bool) -> Self {
        self.overcommit = on;
        self
    }

    /// Creates, maps and grants the memory. If a step fails, the steps before it are undone.
    ///
    /// # Errors
    /// Those of [`PhysicalOptions::create`](crate::vmm::PhysicalOptions::create),
    /// [`PhysicalMemory::map`] and [`Mapping::set_access`].
    pub fn allocate(self, driver: &Driver) -> Result<Buffer> {
        let physical = PhysicalMemory::options(self.location)
            .handle_types(self.handle_types)
            .overcommit(self.overcommit)
            .create(driver, self.bytes)?;
        let mut access = match self.gpus {
            Some(gpus) => gpus,
            None => reachable_gpus(driver, self.location)?,
        };
        let host = self.host.unwrap_or(match self.location {
            Location::Device(_) => Access::None,
            _ => Access::ReadWrite,
        });
        if host != Access::None {
            access.push(AccessDesc {
                location: Location::Host,
                access: host,
            });
        }
        let mut mapping = physical.map()?;
        mapping.set_access(&access)?;
        Ok(Buffer { mapping, physical })
    }
}

/// The GPUs that can reach memory at `location`: all for host memory, itself and its peers for a
/// GPU's.
fn reachable_gpus(driver: &Driver, location: Location) -> Result<Vec<AccessDesc>> {
    let mut reachable = Vec::new();
    for gpu in 0..driver.device_count()? {
        let reaches = match location {
            Location::Device(owner) => owner == gpu || driver.device_can_access_peer(gpu, owner)?,
            _ => true,
        };
        if reaches {
            reachable.push(AccessDesc {
                location: Location::Device(gpu),
                access: Access::ReadWrite,
            });
        }
    }
    Ok(reachable)
}

/// Memory on a chosen node, mapped at one address for the CPU and the GPUs, given back when
/// dropped.
///
/// Before it is dropped, GPU work that uses it must have finished: a GPU that touches unmapped
/// addresses loses its context.
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
    // In this order: unmapped first, then released.
    mapping: Mapping,
    physical: PhysicalMemory,
}

impl Buffer {
    /// Options for a buffer at `location`: a node's id, or any [`Location`].
    pub fn on(location: impl Into<Location>) -> BufferOptions {
        BufferOptions {
            location: location.into(),
            bytes: 0,
            host: None,
            gpus: None,
            handle_types: HandleTypes::NONE,
            overcommit: false,
        }
    }

    /// `bytes` on the host node of GPU `gpu`, for the CPU and every GPU.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`]; [`Error::NodeUnknown`] where neither the driver nor the PCI tree knows
    /// the node; those of [`BufferOptions::allocate`].
    pub fn near(driver: &Driver, gpu: i32, bytes: u64) -> Result<Self> {
        Self::on(host_node(driver, gpu)?)
            .bytes(bytes)
            .allocate(driver)
    }

    /// Changes who may do what. See [`Mapping::set_access`].
    ///
    /// # Errors
    /// As there.
    pub fn set_access(&mut self, access: &[AccessDesc]) -> Result<()> {
        self.mapping.set_access(access)
    }

    /// What `location` may do, as the driver tells.
    ///
    /// # Errors
    /// As [`Mapping::access`].
    pub fn access(&self, location: impl Into<Location>) -> Result<Access> {
        self.mapping.access(location.into())
    }

    /// The CPU's window on the buffer.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        self.mapping.cpu()
    }

    /// Copies `values` to `offset` bytes from the start, by the CPU.
    ///
    /// # Errors
    /// [`Error::NotAccessible`], [`Error::OutOfRange`].
    pub fn write_at<T: NoUninit>(&self, offset: u64, values: &[T]) -> Result<()> {
        self.cpu()?.write_at(offset, values)
    }

    /// Copies from `offset` bytes from the start into `values`, by the CPU.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    pub fn read_at<T: AnyBitPattern + NoUninit>(
        &self,
        offset: u64,
        values: &mut [T],
    ) -> Result<()> {
        self.cpu()?.read_at(offset, values)
    }

    /// Writes one value.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    pub fn put<T: NoUninit>(&self, offset: u64, value: T) -> Result<()> {
        self.cpu()?.put(offset, value)
    }

    /// Reads one value.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    pub fn get<T: AnyBitPattern + NoUninit>(&self, offset: u64) -> Result<T> {
        self.cpu()?.get(offset)
    }

    /// Sets every byte to `byte`, by the CPU.
    ///
    /// # Errors
    /// [`Error::NotAccessible`].
    pub fn fill(&self, byte: u8) -> Result<()> {
        self.cpu()?.fill(0, self.len(), byte)
    }

    /// The bytes as a slice.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read.
    ///
    /// # Safety
    /// While the slice lives, nobody may write the bytes: no GPU work in flight, no other process,
    /// no [`CpuView`] in another thread, no other mapping of the same physical memory.
    pub unsafe fn as_slice(&self) -> Result<&[u8]> {
        let view = self.cpu()?;
        // SAFETY: mapped and readable as `view` shows, initialised by the kernel, at most
        // `isize::MAX` bytes by `PaddedSize`; unchanged by the caller's word.
        Ok(unsafe { std::slice::from_raw_parts(view.as_ptr(), view.len() as usize) })
    }

    /// The bytes as a mutable slice.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may read and write.
    ///
    /// # Safety
    /// While the slice lives, nobody else may read or write the bytes: no GPU work in flight, no
    /// other process, no other mapping of the same physical memory.
    pub unsafe fn as_mut_slice(&mut self) -> Result<&mut [u8]> {
        let view = self.cpu()?;
        // An empty write asks whether the view is writable.
        view.write_at::<u8>(0, &[])?;
        // SAFETY: as for `as_slice`, writable as just seen, exclusive by the caller's word.
        Ok(unsafe { std::slice::from_raw_parts_mut(view.as_ptr(), view.len() as usize) })
    }

    /// The physical memory, to export it or map it once more.
    pub const fn physical(&self) -> &PhysicalMemory {
        &self.physical
    }

    /// The mapping.
    pub const fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Location, handle types and flags.
    pub const fn props(&self) -> &AllocationProps {
        self.physical.props()
    }

    /// The address, the same for every GPU and, on a host node, for the CPU.
    pub fn device_ptr(&self) -> DevicePtr {
        self.mapping.device_ptr()
    }

    /// The bytes asked for.
    pub fn len(&self) -> u64 {
        self.mapping.len()
    }

    /// Never: a buffer has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }
}

impl Sealed for Buffer {}

impl Memory for Buffer {
    fn driver(&self) -> &Driver {
        self.mapping.driver()
    }
    fn device_ptr(&self) -> DevicePtr {
        self.mapping.device_ptr()
    }
    fn len(&self) -> u64 {
        self.mapping.len()
    }
    fn location(&self) -> Location {
        self.mapping.location()
    }
}

/// The host node of a GPU: what the driver says, else what the machine's topology knows.
fn host_node(driver: &Driver, gpu: i32) -> Result<NodeId> {
    let count = driver.device_count()?;
    if !(0..count).contains(&gpu) {
        return Err(Error::NoSuchGpu {
            gpu,
            count: count.max(0) as usize,
        });
    }
    match driver.device_attribute(gpu, DeviceAttribute::HOST_NUMA_ID) {
        Ok(node) if node >= 0 => Ok(NodeId(node)),
        Err(error) if error.code() != Some(Code::INVALID_VALUE) => Err(error),
        // Unknown, or a driver without the attribute.
        _ => Topology::discover(driver)?.gpu(gpu)?.host_node(),
    }
}
