//! What programs do by hand: huge pages, touched by all CPUs, and one registration.

use std::num::NonZeroUsize;
use std::ptr;
use std::thread;

use egmem::driver::DevicePtr;
use egmem::{Driver, Error, Result};

/// A huge page.
const HUGE: usize = 2 << 20;

/// Registered pages, given back when dropped.
pub struct Recipe {
    driver: Driver,
    gpu: i32,
    /// What was mapped, and where its first huge page begins.
    base: *mut libc::c_void,
    mapped: usize,
    start: usize,
}

impl Recipe {
    pub fn new(driver: &Driver, gpu: i32, bytes: u64) -> Result<Self> {
        let len = bytes as usize;
        let mapped = len + HUGE;
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(ptr::null_mut(), mapped, protection, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(Error::system(
                "mapping memory",
                &std::io::Error::last_os_error(),
            ));
        }
        let start = (base.expose_provenance()).next_multiple_of(HUGE);
        // SAFETY: the range is in the mapping.
        unsafe {
            libc::madvise(
                ptr::with_exposed_provenance_mut(start),
                len,
                libc::MADV_HUGEPAGE,
            )
        };
        let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let share = len.div_ceil(threads).next_multiple_of(HUGE);
        thread::scope(|scope| {
            for from in (0..len).step_by(share) {
                scope.spawn(move || {
                    for at in (from..len.min(from + share)).step_by(4096) {
                        // SAFETY: in the mapping, and no other thread writes this page.
                        unsafe {
                            ptr::with_exposed_provenance_mut::<u8>(start + at).write_volatile(0)
                        };
                    }
                });
            }
        });
        let recipe = Self {
            driver: driver.clone(),
            gpu,
            base,
            mapped,
            start,
        };
        // SAFETY: the pages are mapped, and unmapped after the registration.
        unsafe { driver.mem_host_register(gpu, DevicePtr(start as u64), bytes, false, None)? };
        Ok(recipe)
    }
}

impl Drop for Recipe {
    fn drop(&mut self) {
        // SAFETY: registered in `new`, unless that failed, which the driver tells; nothing uses the pages.
        let _ = unsafe {
            self.driver
                .mem_host_unregister(self.gpu, DevicePtr(self.start as u64))
        };
        // SAFETY: mapped in `new`.
        unsafe { libc::munmap(self.base, self.mapped) };
    }
}
