//! Pages of this process: anonymous ones, and those of files.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;

use rustix::fs::{SealFlags, fcntl_get_seals, fstatfs};

use crate::driver::DevicePtr;
use crate::memory::check_range;
use crate::{Error, Result};

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
    base: *mut libc::c_void,
    mapped: usize,
    /// The first byte used.
    start: DevicePtr,
}

// SAFETY: an address range is no thread's own.
unsafe impl Send for Pages {}
// SAFETY: as above; the type itself reads and writes nothing.
unsafe impl Sync for Pages {}

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
        let mut pages = Self::map(
            mapped,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags,
            (-1, 0),
            "mapping memory",
        )?;
        if size == PageSize::Transparent {
            let start = pages.start.0.next_multiple_of(HUGE);
            pages.start = DevicePtr(start);
            let len = bytes.next_multiple_of(HUGE) as usize;
            // SAFETY: the range is in the mapping, which is ours and has no other pages yet. A kernel without such
            // pages refuses, and the memory has base pages.
            unsafe { libc::madvise(start as *mut _, len, libc::MADV_HUGEPAGE) };
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
        Self::map(
            mapped_len(bytes, huge_page_of(file)?)?,
            prot,
            libc::MAP_SHARED,
            (file.as_raw_fd(), at),
            "mapping a file",
        )
    }

    fn map(
        bytes: u64,
        prot: libc::c_int,
        flags: libc::c_int,
        (fd, offset): (libc::c_int, i64),
        what: &str,
    ) -> Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice; the fd, if any, is borrowed by the caller.
        let base = unsafe { libc::mmap(ptr::null_mut(), bytes as usize, prot, flags, fd, offset) };
        if base == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            return Err(Error::system(format!("{what} of {bytes} bytes"), &error));
        }
        Ok(Self {
            base,
            mapped: bytes as usize,
            start: DevicePtr(base.expose_provenance() as u64),
        })
    }

    pub(super) fn start(&self) -> DevicePtr {
        self.start
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours; the owner has made sure that nothing uses it.
        if unsafe { libc::munmap(self.base, self.mapped) } != 0 {
            let error = io::Error::last_os_error();
            tracing::error!(
                %error,
                bytes = self.mapped,
                "cannot unmap memory: it stays mapped until the process ends"
            );
        }
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

/// Returns the size of a file's huge pages, if it is in hugetlbfs. Only there is the file system's block a page: the
/// block of a network file system may be larger than the pages that the kernel maps.
pub(crate) fn huge_page_of(file: &File) -> Result<Option<u64>> {
    let answer = fstatfs(file)
        .map_err(|error| Error::system("asking for a file's file system", &error.into()))?;
    let block = answer.f_bsize as u64;
    Ok((answer.f_type == libc::HUGETLBFS_MAGIC && block > 0).then_some(block))
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
        assert_eq!(pages.mapped as u64, 2 * HUGE);
        // SAFETY: mapped here; nothing uses it.
        let result = unsafe { libc::munmap(pages.base, pages.mapped) };
        mem::forget(pages);
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
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
