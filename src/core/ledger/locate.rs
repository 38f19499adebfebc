//! Finds out whose memory is at an address.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::allocation::Allocation;
use super::registry::{Range, Registry};
use crate::Result;
use crate::driver::{Code, DevicePtr, Driver, HandleTypes, Location, PointerAttribute};

/// The memory at an address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Located {
    /// Memory of this process's ledger.
    Allocation {
        /// The allocation. For a heap's block it is the chunk.
        allocation: Box<Allocation>,
        /// Which of [`Allocation::mapped`] contains the address.
        mapping: usize,
        /// The bytes from that mapping's start.
        offset: u64,
    },
    /// Memory that the driver knows and this crate has not allocated.
    Foreign(Foreign),
    /// Memory that the driver does not know, such as a program's plain memory, or nothing.
    Unknown,
}

/// The driver's answers for memory that this crate has not allocated. `None`: it does not say.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Foreign {
    /// [`Location::Host`] for host memory, whose node the driver does not report, or the GPU.
    pub location: Option<Location>,
    /// The start of the allocation.
    pub start: Option<u64>,
    /// The size of the allocation in bytes.
    pub bytes: Option<u64>,
    /// The address for the CPU.
    pub host_address: Option<u64>,
    /// How the memory may be exported.
    pub handle_types: Option<HandleTypes>,
}

/// `CU_MEMORYTYPE_HOST`, `CU_MEMORYTYPE_DEVICE`
const HOST: u64 = 1;
const DEVICE: u64 = 2;

/// Returns whose memory is at `address`: this process's allocation with its offset, its location, its users' access
/// and its label, or the driver's answers for memory of others.
///
/// It looks at every entry of the ledger: it is for diagnosis, not for a hot path.
///
/// Source for foreign memory: `cuPointerGetAttribute`, `cuMemGetAddressRange`.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) in a forked child, whose memory the driver's is not; the driver's errors except
/// INVALID_VALUE, which means that it does not know the address.
///
/// ```
/// use egmem::driver::NodeId;
/// use egmem::ledger::{self, Located};
/// use egmem::{Buffer, Driver, Machine};
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let buffer = Buffer::on(NodeId(0)).bytes(2 << 20).label("weights").allocate(&driver)?;
/// let found = ledger::locate(&driver, buffer.device_ptr().add(4096))?;
/// let Located::Allocation { allocation, offset, .. } = found else { panic!() };
/// assert_eq!((allocation.label.as_deref(), offset), (Some("weights"), 4096));
/// # Ok::<(), egmem::Error>(())
/// ```
pub fn locate(driver: &Driver, address: DevicePtr) -> Result<Located> {
    driver.expect_this_process("driver")?;
    let of = driver.address();
    let records = Registry::current().copies(|record| {
        let mut ranges = record.mapped.iter();
        let contains = |range: &Range| address.0.wrapping_sub(range.start.0) < range.bytes;
        record.driver == of && ranges.any(contains)
    });
    if let Some(record) = records.first() {
        let allocation = record.to_allocation(Instant::now());
        let mut ranges = allocation.mapped.iter().enumerate();
        let found = ranges.find_map(|(index, range)| Some((index, range.offset_of(address.0)?)));
        if let Some((mapping, offset)) = found {
            return Ok(Located::Allocation {
                allocation: Box::new(allocation),
                mapping,
                offset,
            });
        }
    }
    foreign(driver, address)
}

/// Asks the driver.
fn foreign(driver: &Driver, address: DevicePtr) -> Result<Located> {
    let attribute = |attribute| driver.pointer_attribute(address, attribute);
    let kind = match attribute(PointerAttribute::MemoryType) {
        Ok(kind) => kind,
        Err(error) if error.code() == Some(Code::INVALID_VALUE) => return Ok(Located::Unknown),
        Err(error) => return Err(error),
    };
    let ordinal = || attribute(PointerAttribute::DeviceOrdinal).ok();
    let location = match kind {
        HOST => Some(Location::Host),
        DEVICE => ordinal()
            .and_then(|gpu| i32::try_from(gpu).ok())
            .map(Location::Device),
        _ => None,
    };
    // The attributes RANGE_START_ADDR and RANGE_SIZE are no help: they are the reservation's for a mapping, and an
    // offset for a pool's memory. For mapped host memory the base here is 0: see docs/driver-behaviour.md.
    let range = driver.mem_address_range(address).ok();
    let start = range.map(|(base, _)| base.0).filter(|&start| start != 0);
    let bytes = range.map(|(_, bytes)| bytes);
    let host = attribute(PointerAttribute::HostPointer);
    let handles = attribute(PointerAttribute::AllowedHandleTypes).ok();
    Ok(Located::Foreign(Foreign {
        location,
        start,
        bytes,
        host_address: host.ok().filter(|&at| at != 0),
        handle_types: handles
            .and_then(|bits| u32::try_from(bits).ok())
            .map(HandleTypes::from_bits),
    }))
}
