//! The access to new memory, changes of the access to a buffer, and its bytes without a view: as a Rust slice, and for devices other
//! than GPUs.

use std::os::fd::OwnedFd;

use super::Buffer;
use crate::driver::{Access, AccessDesc, Code, Driver, Location};
use crate::guard::name_missing;
use crate::ledger::AccessList;
use crate::memory::{AccessChecks, Memory, check_range};
use crate::vmm::{Mapping, PhysicalMemory};
use crate::{Error, Result};

/// The access that a program asked for, with defaults for the locations that it left out.
#[derive(Clone, Debug, Default)]
pub struct RequestedAccess {
    /// The CPU's access; `None`: read and write, if the memory is the host's.
    pub host: Option<Access>,
    /// The GPUs' access; `None`: read and write, for each that can reach the memory.
    pub gpus: Option<AccessList>,
}

impl RequestedAccess {
    /// Sets the access of one location; any location on the host stands for the CPU.
    pub fn set(&mut self, location: Location, access: Access) {
        if location.is_host() {
            self.host = Some(access);
        } else {
            let gpus = self.gpus.get_or_insert_default();
            gpus.retain(|desc| desc.location != location);
            gpus.push(AccessDesc { location, access });
        }
    }

    /// Lets these locations read and write. GPUs that no call has named get no access.
    pub fn set_all<L: Into<Location>>(&mut self, who: impl IntoIterator<Item = L>) {
        for location in who {
            self.set(location.into(), Access::ReadWrite);
        }
        self.gpus.get_or_insert_default();
    }

    /// Returns the grants for memory at `location`: the host's first.
    ///
    /// # Errors
    /// The driver's error, when it is asked which GPUs reach the memory.
    pub fn grants(&self, driver: &Driver, location: Location) -> Result<AccessList> {
        let host = self.host.unwrap_or(match location {
            Location::Device(_) => Access::None,
            _ => Access::ReadWrite,
        });
        let mut grants = AccessList::new();
        if host != Access::None {
            grants.push(AccessDesc::new(Location::Host, host));
        }
        match &self.gpus {
            Some(gpus) => grants.extend(gpus.iter().copied()),
            None => grants.extend(reachable_gpus(driver, location)?),
        }
        Ok(grants)
    }
}

/// Returns the GPUs that can reach memory at `location`: all for host memory, itself and its peers for a
/// GPU's.
///
/// # Errors
/// [`Error::NoSuchGpu`]; the driver's.
pub fn reachable_gpus(driver: &Driver, location: Location) -> Result<AccessList> {
    let mut reachable = AccessList::new();
    for gpu in 0..driver.device_count()? {
        let reaches = match location {
            Location::Device(owner) => {
                owner == gpu
                    || driver
                        .device_can_access_peer(gpu, owner)
                        .map_err(|error| name_missing(driver, error, location))?
            }
            _ => true,
        };
        if reaches {
            reachable.push(AccessDesc::read_write(Location::Device(gpu)));
        }
    }
    Ok(reachable)
}

impl Buffer {
    /// The most parts of one buffer: 2 TiB in chunks or stripes of 2 MiB. Shared memory has at most 4096.
    pub const MAX_PARTS: usize = 1 << 20;

    /// Changes the access of locations. See [`Mapping::set_access`](crate::vmm::Mapping::set_access).
    ///
    /// # Errors
    /// As `Mapping::set_access`; the parts of a buffer in several before the failing one are changed then.
    pub fn set_access(&mut self, access: &[AccessDesc]) -> Result<()> {
        self.range.set_access(access)
    }

    /// Changes the access of locations to `len` bytes from `offset` on, which are whole parts: chunks
    /// ([`BufferOptions::chunk`](super::BufferOptions::chunk)), shares or stripes. The last part counts with its padding or without.
    ///
    /// A location that may only read is held to it by its page tables: the CPU that writes gets SIGSEGV, and a GPU
    /// whose kernel writes fails with ILLEGAL_ADDRESS and is lost to the process. Safe calls refuse such work before
    /// ([`Error::NotAccessible`]). Take access away only when no work of the program that uses it is left.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a range that begins or ends inside a part;
    /// [`Error::OutOfRange`]; otherwise as [`set_access`](Self::set_access).
    ///
    /// ```
    /// use egmem::driver::{Access, AccessDesc, Location, NodeId};
    /// use egmem::{Buffer, Driver, Machine};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
    /// let mut buffer = Buffer::on(NodeId(0)).bytes(64 << 20).chunk(4 << 20).allocate(&driver)?;
    /// // The first 16 MiB are complete: from here on they are only read.
    /// let readers = [Location::Host, Location::Device(0)];
    /// let reads = readers.map(|who| AccessDesc::new(who, Access::Read));
    /// buffer.set_access_at(0, 16 << 20, &reads)?;
    /// assert!(buffer.put(0, 1_u8).is_err());
    /// buffer.put(16 << 20, 1_u8)?;
    /// # Ok::<(), egmem::Error>(())
    /// ```
    pub fn set_access_at(&mut self, offset: u64, len: u64, access: &[AccessDesc]) -> Result<()> {
        let end = offset.saturating_add(len);
        if end > self.padded() {
            check_range(offset, len, self.len)?;
        }
        let len = match end == self.len {
            true => self.padded() - offset,
            false => len,
        };
        self.range.set_access_at(offset, len, access)
    }

    /// Returns the least that `location` may do with any part, as the driver reports it.
    ///
    /// # Errors
    /// As [`Mapping::access`](crate::vmm::Mapping::access).
    pub fn access(&self, location: impl Into<Location>) -> Result<Access> {
        let location = location.into();
        let mut mappings = self.range.mappings().iter();
        mappings.try_fold(Access::ReadWrite, |least, mapping| {
            Ok(least.min(mapping.access(location)?))
        })
    }
}

/// The unit of DMA-BUFs.
const PAGE: u64 = 4096;

impl Buffer {
    /// Returns the bytes as a slice.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read.
    ///
    /// # Safety
    /// While the slice lives, nothing may write the bytes: no GPU work in flight, no other process, no
    /// [`CpuView`](crate::memory::CpuView) in another thread, no other mapping of the same physical memory. A
    /// live [ticket](crate::stream::Transfer) to an `Arc` of the buffer counts as work in flight, also one
    /// that was passed to [`mem::forget`](std::mem::forget).
    pub unsafe fn as_slice(&self) -> Result<&[u8]> {
        let view = self.cpu()?;
        // SAFETY: `view` shows that the bytes are mapped and readable; the kernel initialised them; they are
        // at most `isize::MAX` by `PaddedSize`; the caller promises that nothing changes them.
        Ok(unsafe { std::slice::from_raw_parts(view.as_ptr(), view.len() as usize) })
    }

    /// Returns the bytes as a mutable slice.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may read and write.
    ///
    /// # Safety
    /// While the slice lives, nothing else may read or write the bytes: no GPU work in flight, no other
    /// process, no other mapping of the same physical memory. A [ticket](crate::stream::Transfer) owns the
    /// buffer or an `Arc` of it, so that none exists while the slice borrows the buffer.
    /// [`exclusive_slice`](Self::exclusive_slice) checks all of this if only the host may use the memory.
    pub unsafe fn as_mut_slice(&mut self) -> Result<&mut [u8]> {
        let view = self.cpu()?;
        // An empty write fails unless the view is writable.
        view.write_at::<u8>(0, &[])?;
        // SAFETY: as for `as_slice`; writable as just checked, exclusive by the caller's promise.
        Ok(unsafe { std::slice::from_raw_parts_mut(view.as_ptr(), view.len() as usize) })
    }

    /// Returns the bytes as a mutable slice, if the types show that nothing else can access them: only the
    /// host has access to the memory, it cannot be shared and it is mapped once.
    ///
    /// ```
    /// use egmem::driver::{Access, AccessDesc, Location, NodeId};
    /// use egmem::{Buffer, Driver, Machine};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?;
    /// let mut buffer = Buffer::on(NodeId(0))
    ///     .access_by([] as [Location; 0])
    ///     .bytes(1 << 20)
    ///     .allocate(&driver)?;
    /// buffer.exclusive_slice()?.fill(7); // before a GPU may touch it
    /// buffer.set_access(&[AccessDesc::new(Location::Device(0), Access::ReadWrite)])?;
    /// assert!(buffer.exclusive_slice().is_err());
    /// # Ok::<(), egmem::Error>(())
    /// ```
    ///
    /// # Why this is safe
    /// - **Views and safe GPU work** (`CpuView`, `Stream::copy`, `Prover`, cudarc's slices) borrow the
    ///   buffer, which is borrowed exclusively while the slice lives. So does
    ///   [`set_access`](Self::set_access). [Tickets](crate::stream::Transfer) own it, or an `Arc` of it,
    ///   which then lends no exclusive borrow.
    /// - **GPUs** were never granted the memory. Once one was, this function always refuses: work in flight
    ///   may use the access that it had when it began.
    /// - **Other mappings** of the same physical memory are counted, and none is made while the slice lives,
    ///   for that takes a borrow of [`physical`](Self::physical).
    /// - **Other processes** cannot import it: memory of no handle type cannot be exported. A child that was
    ///   forked is refused; a slice must not be used on both sides of a `fork`, which is unsafe for that
    ///   reason.
    /// - **Unsafe calls**, such as launches and copies by address, promise that nothing uses the memory
    ///   meanwhile except through `CpuView`. That covers GPUs that use the CPU's page tables (Grace-Hopper):
    ///   only a launch makes them access memory that they were not granted.
    ///
    /// A heap's block has no such method: its chunk is mapped once for all blocks, and GPUs have access to
    /// it.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may read and write; [`Error::InvalidArgument`] if the memory
    /// is or was granted to a GPU, can be shared, is mapped more than once, or belongs to a parent process.
    pub fn exclusive_slice(&mut self) -> Result<&mut [u8]> {
        if let Some(why) = self.why_not_exclusive() {
            let instead = "use the view from `cpu`, or `as_mut_slice` where the program knows more";
            let why = format!("{why}: {instead}");
            return Err(Error::invalid("exclusive slice", why));
        }
        // SAFETY: as the documentation argues, nothing else can read or write the bytes while `self` is
        // borrowed exclusively.
        unsafe { self.as_mut_slice() }
    }

    fn why_not_exclusive(&self) -> Option<&'static str> {
        let granted = self.mappings().iter().any(Mapping::was_granted_to_gpus);
        let own = |memory: &PhysicalMemory| memory.is_mapped_once_and_private();
        if granted {
            Some("a GPU is or was granted the memory, and its work may write it")
        } else if !self.physical().iter().all(own) {
            Some("the memory can be exported or is mapped more than once")
        } else if !self.range.first().driver().is_of_this_process() {
            Some("the memory is the parent process's")
        } else {
            None
        }
    }

    /// Exports `len` bytes from `offset` on as a DMA-BUF, for a network card or a disk: whole pages of 4 KiB, in a
    /// GPU's memory. Its users reach the bytes without any grant, and it keeps the memory after the buffer is
    /// dropped.
    ///
    /// Drivers export no host memory. A device of the machine reaches that without: by its CPU address, as any memory
    /// of the process, such as by `ibv_reg_mr`, by direct I/O or by
    /// [`CpuView::read_from_file`](crate::memory::CpuView::read_from_file).
    ///
    /// Source: `cuMemGetHandleForAddressRange`.
    ///
    /// # Errors
    /// [`Error::PlatformUnsupported`] for a range with host memory, and where there are no DMA-BUFs;
    /// [`Error::InvalidArgument`] for parts of pages; [`Error::OutOfRange`]; the driver's error.
    ///
    /// ```
    /// use egmem::driver::{Location, NodeId};
    /// use egmem::{Buffer, Driver, Error, Machine};
    ///
    /// let driver = Driver::simulated(Machine::h200x8())?; // Driver::open() on a real machine
    /// let mut memory = Buffer::on(Location::Device(0)).bytes(4 << 20).allocate(&driver)?;
    /// let fd = memory.dma_buf(1 << 20, 2 << 20)?; // for ibv_reg_dmabuf_mr
    ///
    /// // Host memory is registered by its CPU address instead.
    /// let mut memory = Buffer::on(NodeId(0)).bytes(4 << 20).allocate(&driver)?;
    /// let refused = memory.dma_buf(0, 4 << 20).unwrap_err();
    /// assert!(matches!(refused, Error::PlatformUnsupported { .. }));
    /// let address = memory.cpu()?.as_ptr(); // for ibv_reg_mr
    /// # drop((fd, address));
    /// # Ok::<(), egmem::Error>(())
    /// ```
    pub fn dma_buf(&mut self, offset: u64, len: u64) -> Result<OwnedFd> {
        check_range(offset, len, self.padded())?;
        if len == 0 || !offset.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) {
            let why = format!("{len} bytes at {offset} are not whole pages");
            return Err(Error::invalid_of("range", why, "multiples of 4096"));
        }
        let is_host = self.range.may_be_on_host(offset, len);
        // From now on no slice of it is lent: something else may write the bytes.
        self.range.note_other_writers();
        let driver = self.range.first().driver();
        // SAFETY: writes through the fd reach memory of this buffer alone, of which safe code holds no reference: it
        // is borrowed exclusively, and lends none from now on.
        let exported = unsafe { driver.mem_dma_buf(self.device_ptr().add(offset), len) };
        if exported.is_ok() {
            self.range.note_export(offset, len);
        }
        exported.map_err(|error| match (error.code(), is_host) {
            (Some(Code::NOT_SUPPORTED), _) => Error::unsupported("DMA-BUFs", error.driver_error()),
            (Some(Code::INVALID_VALUE), true) => {
                Error::unsupported("DMA-BUFs of host memory", error.driver_error())
            }
            _ => error,
        })
    }
}
