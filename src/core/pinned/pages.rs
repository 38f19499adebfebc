//! Pages of this process: anonymous ones, and those of files.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{SealFlags, fcntl_get_seals};

use crate::driver::DevicePtr;
use crate::memory::check_range;
use crate::vmm::pages::{advise, huge_page_of, map, unmap};
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
