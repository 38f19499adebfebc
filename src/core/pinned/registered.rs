//! Memory of this process, pinned and mapped for GPUs later.

use std::fs::File;

use super::pages::{PageSize, Pages, expect_sealed};
use super::{Owned, is_supported, owned};
use crate::driver::{DeviceAttribute, Driver};
use crate::explain::name_missing_gpu;
use crate::ledger::{AllocPath, Site};
use crate::size::not_empty;
use crate::{Error, Result};

/// Memory that this process has mapped and the driver has pinned afterwards, for the CPU and every GPU: anonymous
/// pages, or those of a file.
///
/// Source: `mmap`, `cuMemHostRegister` with PORTABLE and DEVICEMAP.
///
/// ```
/// use egmem::pinned::{PageSize, RegisteredHost};
/// use egmem::{Driver, Machine};
///
/// let driver = Driver::simulated(Machine::h200x8())?; // Driver::open() on a real machine
/// let memory = RegisteredHost::new(&driver, 0, 4 << 20, PageSize::Transparent)?;
/// memory.cpu().put(0, 7_u64)?;
/// egmem::proof::Prover::new(&driver, 0)?.read(&memory)?; // by a kernel
/// # Ok::<(), egmem::Error>(())
/// ```
#[derive(Debug)]
pub struct RegisteredHost(Owned);

impl RegisteredHost {
    /// Maps `bytes` of zeros and registers them in the primary context of GPU `device`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 bytes; [`Error::NoSuchGpu`]; [`Error::System`] if there are no such pages;
    /// [`Error::PlatformUnsupported`] where memory cannot be registered, or not at the CPU's address; the driver's
    /// error.
    #[track_caller]
    pub fn new(driver: &Driver, device: i32, bytes: u64, size: PageSize) -> Result<Self> {
        not_empty(bytes)?;
        let pages = Pages::anonymous(bytes, size)?;
        Self::register(driver, device, pages, bytes, true)
    }

    /// Maps `bytes` of a sealed memfd from `offset` on, a multiple of the page size, and registers them. The CPU and
    /// the GPUs write to the file. Other processes may write it meanwhile, but the seal keeps them from shortening
    /// it.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Error::InvalidArgument`] unless the file is a memfd without huge pages that is sealed
    /// with `F_SEAL_SHRINK`; [`Error::OutOfRange`] beyond the file's end; [`Error::System`] if the file is not open
    /// for reading and writing, or sealed against writing.
    ///
    /// ```
    /// use egmem::pinned::RegisteredHost;
    /// use egmem::{Driver, Machine};
    /// use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    ///
    /// let driver = Driver::simulated(Machine::h200x8())?; // Driver::open() on a real machine
    /// let file = std::fs::File::from(memfd_create("tokens", MemfdFlags::ALLOW_SEALING)?);
    /// file.set_len(4 << 20)?;
    /// fcntl_add_seals(&file, SealFlags::SHRINK)?;
    /// let memory = RegisteredHost::of_sealed_file(&driver, 0, &file, 0, 4 << 20)?;
    /// memory.cpu().put(0, 7_u64)?;
    /// assert!(file.set_len(0).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[track_caller]
    pub fn of_sealed_file(
        driver: &Driver,
        device: i32,
        file: &File,
        offset: u64,
        bytes: u64,
    ) -> Result<Self> {
        expect_sealed(file)?;
        // SAFETY: the seal cannot be removed, so the file keeps its length; the kernel fills its holes.
        unsafe { Self::of_file(driver, device, file, offset, bytes) }
    }

    /// As [`of_sealed_file`](Self::of_sealed_file), for reading alone, by the CPU and by GPUs. The file may be open
    /// for reading alone, and sealed against writing.
    ///
    /// # Errors
    /// As `of_sealed_file`; [`Error::PlatformUnsupported`] where the GPU has no read-only registrations.
    #[track_caller]
    pub fn of_sealed_file_read_only(
        driver: &Driver,
        device: i32,
        file: &File,
        offset: u64,
        bytes: u64,
    ) -> Result<Self> {
        expect_sealed(file)?;
        // SAFETY: the seal cannot be removed, so the file keeps its length; the kernel fills its holes.
        unsafe { Self::of_file_read_only(driver, device, file, offset, bytes) }
    }

    /// Maps `bytes` of any file from `offset` on, a multiple of the page size, and registers them. The CPU and the
    /// GPUs write to the file, and other processes may write it meanwhile.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Error::OutOfRange`] beyond the file's end. [`Error::System`] if the file was not
    /// opened for reading and writing. The driver's error also where it cannot pin the file system's pages.
    ///
    /// # Safety
    /// While the memory exists, no process shortens the file to an end inside the range, and the file system has room
    /// for each hole in the range: allocate the bytes first (`fallocate`), and let no process punch holes. Otherwise
    /// the next access by the CPU ends this process by SIGBUS.
    #[track_caller]
    pub unsafe fn of_file(
        driver: &Driver,
        device: i32,
        file: &File,
        offset: u64,
        bytes: u64,
    ) -> Result<Self> {
        Self::register_file(driver, device, file, (offset, bytes), true)
    }

    /// As [`of_file`](Self::of_file), for reading alone, by the CPU and by GPUs. The file may be opened for reading.
    ///
    /// # Errors
    /// As `of_file`; [`Error::PlatformUnsupported`] where the GPU has no read-only registrations.
    ///
    /// # Safety
    /// As `of_file`.
    #[track_caller]
    pub unsafe fn of_file_read_only(
        driver: &Driver,
        device: i32,
        file: &File,
        offset: u64,
        bytes: u64,
    ) -> Result<Self> {
        let attribute = DeviceAttribute::READ_ONLY_HOST_REGISTER_SUPPORTED;
        let what = "registering memory that can only be read";
        is_supported(driver, device, attribute, what)?;
        Self::register_file(driver, device, file, (offset, bytes), false)
    }

    #[track_caller]
    fn register_file(
        driver: &Driver,
        device: i32,
        file: &File,
        (offset, bytes): (u64, u64),
        writable: bool,
    ) -> Result<Self> {
        not_empty(bytes)?;
        let pages = Pages::of_file(file, offset, bytes, writable)?;
        Self::register(driver, device, pages, bytes, writable)
    }

    #[track_caller]
    fn register(
        driver: &Driver,
        device: i32,
        pages: Pages,
        bytes: u64,
        writable: bool,
    ) -> Result<Self> {
        let attribute = DeviceAttribute::HOST_REGISTER_SUPPORTED;
        let what = "registering memory of the process";
        is_supported(driver, device, attribute, what)?;
        let gpus = 0..driver.device_count()?;
        let start = pages.start();
        // SAFETY: the pages are mapped, and unmapped after the registration.
        unsafe { driver.mem_host_register(device, start, bytes, !writable, None) }
            .map_err(|error| name_missing_gpu(driver, error, device))?;
        let (kind, range) = ((AllocPath::Registered, device), (start, bytes));
        // From here on a failure ends the registration.
        let mut memory = Owned::new(driver, kind, range, gpus, Site::here());
        memory.writable = writable;
        memory.pages = Some(pages);
        if driver.mem_host_device_pointer(device, start)? != start {
            let what = "registered memory at the CPU's address";
            return Err(Error::unsupported(what, None));
        }
        Ok(Self(memory))
    }
}

owned!(RegisteredHost, for the CPU);
