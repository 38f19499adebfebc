//! Memory of this process, pinned and mapped for GPUs later.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{SealFlags, fcntl_get_seals};

use super::{Owned, is_supported, owned};
use crate::driver::{DeviceAttribute, DevicePtr, Driver, Location, Relaxed};
use crate::guard::{check_free, on_gpu};
use crate::ledger::AllocPath;
use crate::memory::check_range;
use crate::size::not_empty;
use crate::vmm::pages::{advise, huge_page_of, map, unmap};
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
    /// [`Error::InvalidArgument`] for 0 bytes; [`Error::NoSuchGpu`]; [`Error::NodesTooFull`] or [`Error::NodeTooFull`] if the
    /// machine has less free; [`Error::System`] if there are no such pages;
    /// [`Error::PlatformUnsupported`] where memory cannot be registered, or not at the CPU's address; the driver's
    /// error.
    #[track_caller]
    pub fn new(driver: &Driver, device: i32, bytes: u64, size: PageSize) -> Result<Self> {
        not_empty(bytes)?;
        if size != PageSize::Reserved {
            check_free(driver, Location::Host, bytes, || 0)?;
        }
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
        let _relaxed = Relaxed::new(driver);
        // SAFETY: the pages are mapped, and unmapped after the registration.
        let done = unsafe { driver.mem_host_register(device, start, bytes, !writable, None) };
        on_gpu(driver, device, done)?;
        let (kind, range) = ((AllocPath::Registered, device), (start, bytes));
        // From here on a failure ends the registration.
        let mut memory = Owned::new(driver, kind, range, gpus);
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

/// The size of a huge page here.
const HUGE: u64 = 2 << 20;

/// Which pages anonymous memory gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PageSize {
    /// The kernel's own size.
    #[default]
    Base,
    /// 2 MiB where the kernel has them, without reserving any: transparent huge pages (`MADV_HUGEPAGE`).
    Transparent,
    /// 2 MiB each, of those that the administrator has reserved (`MAP_HUGETLB`, `vm.nr_hugepages`).
    Reserved,
}

/// A mapping of this process, unmapped when dropped.
#[derive(Debug)]
pub(super) struct Pages {
    base: u64,
    mapped: u64,
    /// The first byte used.
    start: u64,
}

impl Pages {
    /// Maps at least `bytes` of zeros, from a multiple of 2 MiB on except for base pages.
    pub(super) fn anonymous(bytes: u64, size: PageSize) -> Result<Self> {
        let too_many = || Error::invalid("size", format!("{bytes} bytes exceed the address space"));
        let (mapped, flags) = match size {
            PageSize::Base => (bytes, 0),
            // Room to begin at a multiple.
            PageSize::Transparent => (
                bytes
                    .checked_next_multiple_of(HUGE)
                    .and_then(|bytes| bytes.checked_add(HUGE))
                    .ok_or_else(too_many)?,
                0,
            ),
            PageSize::Reserved => (
                bytes.checked_next_multiple_of(HUGE).ok_or_else(too_many)?,
                libc::MAP_HUGETLB | libc::MAP_HUGE_2MB,
            ),
        };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags;
        let mut pages = Self::map(mapped, protection, flags, None, "mapping memory")?;
        if size == PageSize::Transparent {
            let start = pages.start.next_multiple_of(HUGE);
            pages.start = start;
            // A kernel without such pages refuses, and the memory has base pages.
            let _ = advise(
                &(start..start + bytes.next_multiple_of(HUGE)),
                libc::MADV_HUGEPAGE,
            );
        }
        Ok(pages)
    }

    /// Maps `bytes` of a file from `offset` on, shared with all that have it open.
    pub(super) fn of_file(file: &File, offset: u64, bytes: u64, writable: bool) -> Result<Self> {
        let size = file
            .metadata()
            .map_err(|error| Error::system("asking for a file's size", &error))?
            .len();
        check_range(offset, bytes, size)?;
        let prot = match writable {
            true => libc::PROT_READ | libc::PROT_WRITE,
            false => libc::PROT_READ,
        };
        let at = i64::try_from(offset).map_err(|_| Error::invalid("offset", "it is too large"))?;
        let len = mapped_len(bytes, huge_page_of(file)?)?;
        let file = Some((file.as_fd(), at));
        Self::map(len, prot, libc::MAP_SHARED, file, "mapping a file")
    }

    fn map(
        mapped: u64,
        prot: libc::c_int,
        flags: libc::c_int,
        file: Option<(BorrowedFd<'_>, i64)>,
        what: &str,
    ) -> Result<Self> {
        let base = map(0, mapped, prot, flags, file)
            .map_err(|error| Error::system(format!("{what} of {mapped} bytes"), &error))?;
        Ok(Self {
            base,
            mapped,
            start: base,
        })
    }

    pub(super) fn start(&self) -> DevicePtr {
        DevicePtr(self.start)
    }
}

impl Drop for Pages {
    /// The owner has made sure that nothing uses the mapping.
    fn drop(&mut self) {
        unmap(self.base, self.mapped);
    }
}

/// Returns how many bytes the kernel maps for `bytes`: whole huge pages, if the file has them. `munmap` accepts no
/// other length.
fn mapped_len(bytes: u64, huge_page: Option<u64>) -> Result<u64> {
    match huge_page {
        Some(page) => bytes.checked_next_multiple_of(page).ok_or_else(|| {
            Error::invalid("size", format!("{bytes} bytes exceed the address space"))
        }),
        None => Ok(bytes),
    }
}

/// Refuses a file that can shrink, or whose pages can be lost while it is mapped: each access to a lost page would
/// end the process by SIGBUS.
///
/// A sealed memfd keeps its size, and its holes are filled on access. Only huge pages are a limited supply, of which
/// a file may lose some: another process can punch a hole, and nothing is reserved for that.
pub(super) fn expect_sealed(file: &File) -> Result<()> {
    const VALID: &str = "a memfd without huge pages, sealed with F_SEAL_SHRINK; for other files, the unsafe functions";
    // Files other than memfds have no seals: EINVAL.
    if !fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
        let why = "another process may shorten it while it is mapped";
        return Err(Error::invalid_of("file", why, VALID));
    }
    match huge_page_of(file)? {
        Some(_) => Err(Error::invalid_of("file", "it has huge pages", VALID)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::mem;

    use rustix::fs::{MemfdFlags, fcntl_add_seals, memfd_create};

    use super::*;

    fn memfd(name: &str, flags: MemfdFlags) -> File {
        memfd_create(name, flags).unwrap().into()
    }

    #[test]
    fn whole_huge_pages_are_unmapped() {
        let base = memfd("base", MemfdFlags::empty());
        assert_eq!(huge_page_of(&base), Ok(None));
        assert_eq!(mapped_len(5, None), Ok(5));
        let huge = memfd("huge", MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB);
        assert_eq!(huge_page_of(&huge), Ok(Some(HUGE)));
        assert_eq!(mapped_len(HUGE, Some(HUGE)), Ok(HUGE));
        assert_eq!(mapped_len(HUGE + 1, Some(HUGE)), Ok(2 * HUGE));
        assert!(mapped_len(u64::MAX, Some(HUGE)).is_err());
    }

    /// Where this machine has reserved huge pages, the kernel accepts the length.
    #[test]
    fn a_file_of_huge_pages_is_unmapped() {
        let file = memfd("huge", MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB);
        file.set_len(2 * HUGE).unwrap();
        let pages = match Pages::of_file(&file, 0, HUGE + 4096, true) {
            Err(error) => return println!("skipped: {error}"),
            Ok(pages) => pages,
        };
        assert_eq!(pages.mapped, 2 * HUGE);
        let at = std::ptr::with_exposed_provenance_mut(pages.base as usize);
        // SAFETY: mapped here; nothing uses it.
        let result = unsafe { libc::munmap(at, pages.mapped as usize) };
        mem::forget(pages);
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    }

    #[test]
    fn only_a_file_that_cannot_shrink_counts_as_sealed() {
        let refused = |file: &File, part: &str| {
            let error = expect_sealed(file).unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, Error::InvalidArgument { what: "file", .. }));
            assert!(
                text.contains(part) && text.contains("F_SEAL_SHRINK"),
                "{text}"
            );
        };
        refused(&tempfile::tempfile().unwrap(), "shorten");
        refused(&tempfile::tempfile_in("/dev/shm").unwrap(), "shorten");
        refused(&memfd("unsealed", MemfdFlags::ALLOW_SEALING), "shorten");
        let grows = memfd("grows", MemfdFlags::ALLOW_SEALING);
        fcntl_add_seals(&grows, SealFlags::GROW).unwrap();
        refused(&grows, "shorten");
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let huge = memfd("huge", flags);
        fcntl_add_seals(&huge, SealFlags::SHRINK).unwrap();
        refused(&huge, "huge pages");
        let sealed = memfd("sealed", MemfdFlags::ALLOW_SEALING);
        fcntl_add_seals(&sealed, SealFlags::SHRINK).unwrap();
        expect_sealed(&sealed).unwrap();
    }
}
