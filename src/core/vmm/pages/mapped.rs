//! Pages at their addresses, registered once a GPU is granted access.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};

use super::addresses::Addresses;
use super::pool::Job;
use super::{Fork, GRANULARITY, Pages, advise, expect_whole, map, map_anonymous, place};
use crate::driver::{Access, AccessDesc, Code, DevicePtr, Driver, Location, NodeId, Relaxed};
use crate::guard::name_missing;
use crate::teardown::unregister;
use crate::{Error, Result};

const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
/// No registration.
const NONE: i32 = -1;

/// Pages mapped in addresses of the process.
///
/// Nothing is given back when this is dropped: the owner calls [`unmap`](Self::unmap).
#[derive(Debug)]
pub struct PagesMapping {
    range: Range<u64>,
    /// The creation of the pages; `None` if they exist, or come when they are touched.
    job: Option<Arc<Job>>,
    node: NodeId,
    /// The number of GPUs, to all of which a registration opens the pages.
    gpus: i32,
    /// The GPU in whose primary context the pages are registered.
    registered_by: AtomicI32,
    /// The protection of the addresses, as `Access::flags`.
    protection: AtomicU8,
}

impl PagesMapping {
    /// Maps pages at a range of `addresses`, and begins to create them on their node, unless they exist. Those of a
    /// simulated machine, whose nodes are none of this machine's, come when they are touched.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if private pages are mapped already, or something is mapped at the addresses;
    /// [`Error::System`] if the kernel refuses.
    pub fn new(
        driver: &Driver,
        addresses: &Addresses,
        pages: &Pages,
        range: Range<u64>,
    ) -> Result<Self> {
        let gpus = driver.device_count()?;
        addresses.take(&range)?;
        if let Err(error) = pages.claim() {
            addresses.give_back(&range);
            return Err(error);
        }
        let mut mapping = Self {
            range,
            job: None,
            node: pages.node,
            gpus,
            registered_by: AtomicI32::new(NONE),
            protection: AtomicU8::new(Access::ReadWrite.flags() as u8),
        };
        if let Err(error) = mapping.begin(driver, addresses, pages) {
            mapping.leave(addresses, pages);
            return Err(error);
        }
        Ok(mapping)
    }

    /// Maps the pages, of which none need exist, and begins to create them.
    fn begin(&mut self, driver: &Driver, addresses: &Addresses, pages: &Pages) -> Result<()> {
        let range = &self.range;
        let mapped = match &pages.file {
            None if addresses.use_prepared(range) => Ok(()),
            None => map_anonymous(range, pages.fork),
            Some(file) => {
                let (protection, flags) = (READ_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
                let (size, file) = (range.end - range.start, Some((file.as_fd(), 0)));
                let mapped = map(range.start, size, protection, flags, file);
                // The kernel follows it where its settings allow files huge pages.
                mapped.map(|_| advise(range, libc::MADV_HUGEPAGE).unwrap_or_default())
            }
        };
        mapped.map_err(|error| refused(range, &error))?;
        let exist = pages.file.is_some() && pages.placed.load(Ordering::Acquire);
        if !exist && !driver.is_simulated() {
            let (pool, shmem) = (addresses.pool(pages.node), pages.fork == Fork::Shared);
            self.job = Some(pool.begin(driver, pages.node, range.clone(), shmem)?);
        }
        Ok(())
    }

    /// Leaves the addresses without pages. There is no way back: GPUs no longer have the pages.
    fn leave(&self, addresses: &Addresses, pages: &Pages) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        let Range { start, end } = self.range;
        if let Err(error) = map(start, end - start, libc::PROT_NONE, flags, None) {
            let error = refused(&self.range, &error);
            tracing::error!(%error, "addresses keep a mapping until others replace it, or the range is given back");
            let dropped = advise(&self.range, libc::MADV_DONTNEED);
            dropped.unwrap_or_else(|error| tracing::error!(%error, "pages stay with the mapping"));
        }
        pages.release();
        addresses.give_back(&self.range);
    }

    /// Grants access. If a GPU is named, the driver registers the pages, which opens them to all GPUs. The CPU keeps the
    /// access that it had if none is given for it, or if the registration fails.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for GPUs with less than read-write access, and to take it from one that has it;
    /// [`Error::PlatformUnsupported`] if GPUs would know the pages by other addresses; [`Error::OutOfMemory`]; the driver's;
    /// [`Error::System`] if the pages could not be created on their node.
    pub fn grant(&self, driver: &Driver, access: &[AccessDesc]) -> Result<()> {
        self.wait()?;
        let is_of_gpu = |desc: &&AccessDesc| !desc.location.is_host();
        let is_registered = self.registered_by.load(Ordering::Relaxed) != NONE;
        for desc in access.iter().filter(is_of_gpu) {
            let is_wanted = desc.access != Access::None;
            if desc.access == Access::Read || (!is_wanted && is_registered) {
                let why = format!(
                    "{} for {}, but registered memory is open to every GPU",
                    desc.access, desc.location
                );
                let valid = "read-write access, or the driver's memory";
                return Err(Error::invalid_of("access", why, valid));
            }
        }
        let named = access.iter().filter_map(|desc| match desc.location {
            Location::Device(gpu) if desc.access != Access::None => Some(gpu),
            _ => None,
        });
        let before = self.protection();
        let mut registered = Ok(());
        if named.clone().next().is_some() && !is_registered {
            // The driver pins what the CPU may write.
            self.protect(Access::ReadWrite)?;
            registered = self.register_by_one(driver, named);
        }
        let host = access.iter().rfind(|desc| desc.location.is_host());
        let host = host.filter(|_| registered.is_ok());
        let protected = self.protect(host.map_or(before, |host| host.access));
        registered.and(protected)
    }

    /// Waits until all pages exist.
    fn wait(&self) -> Result<()> {
        self.job.as_ref().map_or(Ok(()), |job| job.wait())
    }

    /// Registers the pages by the first GPU that has a context, or else by the first that is named. If that one is lost, by the next
    /// with a context, and then by the others, which get one for it.
    fn register_by_one(&self, driver: &Driver, named: impl Iterator<Item = i32>) -> Result<()> {
        let used = (0..self.gpus).filter(|&gpu| driver.has_context(gpu) == Some(true));
        let mut lost = Ok(());
        for device in driver.active_device().into_iter().chain(used).chain(named) {
            let Err(error) = self.register(driver, device) else {
                return Ok(());
            };
            let goes_on = lost.is_err() || matches!(error, Error::ContextLost { .. });
            lost = lost.and(Err(error));
            if !goes_on {
                break;
            }
        }
        lost
    }

    fn register(&self, driver: &Driver, device: i32) -> Result<()> {
        let (start, size) = (
            DevicePtr(self.range.start),
            self.range.end - self.range.start,
        );
        // Another thread may be capturing its streams.
        let _relaxed = Relaxed::new(driver);
        // SAFETY: the range is mapped, and its owner ends the registration before it unmaps it.
        unsafe { driver.mem_host_register(device, start, size, false, Some(self.node)) }.map_err(
            |error| match error {
                Error::Driver(source) if source.code == Code::OUT_OF_MEMORY => Error::OutOfMemory {
                    location: self.node.into(),
                    requested: size,
                    source,
                },
                other => name_missing(driver, other, Location::Device(device)),
            },
        )?;
        self.registered_by.store(device, Ordering::Relaxed);
        let is_same = match driver.mem_host_device_pointer(device, start) {
            Ok(address) if address == start => return Ok(()),
            Ok(_) => Error::unsupported("registered memory at the CPU's address", None),
            Err(error) => error,
        };
        self.unregister(driver)?;
        Err(is_same)
    }

    fn unregister(&self, driver: &Driver) -> Result<()> {
        let device = self.registered_by.load(Ordering::Relaxed);
        if device == NONE {
            return Ok(());
        }
        let _relaxed = Relaxed::new(driver);
        // SAFETY: registered by `self`; the owner of the mapping makes sure that nothing uses it.
        unsafe { unregister(driver, device, DevicePtr(self.range.start)) }?;
        self.registered_by.store(NONE, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the access of a GPU.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`].
    pub fn access(&self, gpu: i32) -> Result<Access> {
        Error::expect_gpu(gpu, self.gpus)?;
        Ok(match self.registered_by.load(Ordering::Relaxed) {
            NONE => Access::None,
            _ => Access::ReadWrite,
        })
    }

    /// Returns the access of all GPUs, named or not.
    pub fn gpus(&self) -> Vec<AccessDesc> {
        let access = |gpu| {
            Some(AccessDesc::new(
                Location::Device(gpu),
                self.access(gpu).ok()?,
            ))
        };
        (0..self.gpus).filter_map(access).collect()
    }

    /// Returns the CPU's access to the addresses.
    fn protection(&self) -> Access {
        let flags = self.protection.load(Ordering::Relaxed);
        Access::from_flags(flags.into()).unwrap_or(Access::None)
    }

    fn protect(&self, access: Access) -> Result<()> {
        if self.protection() == access {
            return Ok(());
        }
        let protection = match access {
            Access::None => libc::PROT_NONE,
            Access::Read => libc::PROT_READ,
            Access::ReadWrite => READ_WRITE,
        };
        let Range { start, end } = self.range;
        let at = ptr::with_exposed_provenance_mut(start as usize);
        // SAFETY: the range is a mapping of ours; the caller borrows it exclusively, so no view relies on the access.
        let result = unsafe { libc::mprotect(at, (end - start) as usize, protection) };
        if result != 0 {
            let error = std::io::Error::last_os_error();
            return Err(Error::system("changing the CPU's access to memory", &error));
        }
        self.protection
            .store(access.flags() as u8, Ordering::Relaxed);
        Ok(())
    }

    /// Ends the registration and takes the pages out of the addresses, which stay reserved. After an error the pages are
    /// registered as before, and it may be tried again.
    ///
    /// # Errors
    /// The driver's error.
    pub fn unmap(&self, driver: &Driver, addresses: &Addresses, pages: &Pages) -> Result<()> {
        let is_whole = self.job.as_ref().is_none_or(|job| job.cancel());
        // Threads create the pieces that they have begun.
        if self.wait().is_ok() && is_whole {
            let is_first = !pages.placed.swap(true, Ordering::AcqRel);
            let is_pinned = self.registered_by.load(Ordering::Relaxed) != NONE;
            // Such pages, a service's reserve for instance, exist without a pin until an importer registers them.
            if pages.file.is_some() && self.job.is_some() && is_first && !is_pinned {
                place::bind_file(pages.node, &self.range);
            }
        }
        self.unregister(driver)?;
        if pages.file.is_none() && pages.fork == Fork::Shared {
            // The mappings beside this one may have the same pages' file, which would keep these.
            advise(&self.range, libc::MADV_REMOVE).unwrap_or_else(
                |error| tracing::warn!(%error, "pages stay until their neighbours go"),
            );
        }
        self.leave(addresses, pages);
        Ok(())
    }
}

fn refused(range: &Range<u64>, error: &std::io::Error) -> Error {
    let what = format!("mapping {} bytes", range.end - range.start);
    match error.raw_os_error() {
        Some(libc::ENOMEM) => {
            let why = format!(
                "{error}: vm.max_map_count, RLIMIT_AS and vm.overcommit_memory limit a process's mappings"
            );
            Error::failed(what, why)
        }
        _ => Error::system(what, error),
    }
}

impl Pages {
    /// Returns an fd of shareable pages for another process. All of them exist then.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for private pages; [`Error::System`].
    pub fn export(&self, driver: &Driver) -> Result<OwnedFd> {
        let Some(file) = &self.file else {
            return Err(Error::invalid("memory", "its pages are private"));
        };
        if !driver.is_simulated() && expect_whole(file).is_err() {
            self.create_missing(driver, file)?;
        }
        let fd = file.as_fd().try_clone_to_owned();
        fd.map_err(|error| Error::system("duplicating the fd of memory", &error))
    }

    /// Creates the pages of a file that do not exist, by a mapping of its own.
    fn create_missing(&self, driver: &Driver, file: &File) -> Result<()> {
        let metadata = file.metadata();
        let metadata = metadata.map_err(|error| Error::system("looking at memory", &error))?;
        let addresses = Addresses::reserve(metadata.len(), GRANULARITY.bytes(), 0)?;
        let range = addresses.start()..addresses.start() + metadata.len();
        self.placed.store(false, Ordering::Release);
        let mapping = PagesMapping::new(driver, &addresses, self, range)?;
        // Waits for the pages.
        let created = mapping.grant(driver, &[]);
        mapping.unmap(driver, &addresses, self)?;
        created
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Machine;
    use crate::driver::Call;

    /// Returns what the kernel lets this process do at an address.
    fn permissions(address: u64) -> String {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let number = |hex| u64::from_str_radix(hex, 16).unwrap();
        let found = maps.lines().find_map(|line| {
            let (range, rest) = line.split_once(' ')?;
            let (start, end) = range.split_once('-')?;
            let is_inside = (number(start)..number(end)).contains(&address);
            is_inside.then(|| rest[..2].to_owned())
        });
        found.unwrap()
    }

    #[test]
    fn a_lost_gpu_keeps_no_pages_and_takes_none_from_the_others() {
        let driver = Driver::simulated(Machine::gh200x4()).unwrap();
        let size = GRANULARITY.bytes();
        let addresses = Addresses::reserve(2 * size, size, 0).unwrap();
        let start = addresses.start();
        let pages = [0, 1].map(|_| Pages::private(NodeId(0), Fork::Zeros));
        let map = |pages, at| PagesMapping::new(&driver, &addresses, pages, at..at + size).unwrap();
        let gpus = [0, 1].map(|gpu| AccessDesc::read_write(Location::Device(gpu)));
        let before = map(&pages[0], start);
        before.grant(&driver, &gpus).unwrap();
        let read_only = crate::Buffer::on(NodeId(0)).access(Location::Device(0), Access::Read);
        let read_only = read_only.bytes(8).allocate(&driver).unwrap();
        let stream = crate::Stream::new(&driver, 0).unwrap();
        // SAFETY: the memory outlives the work, which faults.
        unsafe { stream.memset_async(read_only.device_ptr(), 1, 8) }.unwrap();
        stream.synchronize().unwrap_err();
        let after = map(&pages[1], start + size);
        after.grant(&driver, &gpus).unwrap();
        assert_eq!(after.registered_by.load(Ordering::Relaxed), 1);
        let alone = after.register(&driver, 0).unwrap_err();
        assert!(matches!(alone, Error::ContextLost { .. }), "{alone}");
        for (mapping, pages) in [before, after].iter().zip(&pages) {
            mapping.unmap(&driver, &addresses, pages).unwrap();
            assert_eq!(permissions(mapping.range.start), "--");
        }
    }

    #[test]
    fn a_grant_to_a_gpu_alone_leaves_the_cpu_the_access_that_it_had() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let size = GRANULARITY.bytes();
        let addresses = Addresses::reserve(size, size, 0).unwrap();
        let range = addresses.start()..addresses.start() + size;
        let pages = Pages::private(NodeId(0), Fork::Zeros);
        let mapping = PagesMapping::new(&driver, &addresses, &pages, range.clone()).unwrap();
        let sim = driver.sim().unwrap();
        let gpu = AccessDesc::read_write(Location::Device(0));
        for (access, expected) in [(Access::None, "--"), (Access::Read, "r-")] {
            let host = AccessDesc::new(Location::Host, access);
            mapping.grant(&driver, &[host]).unwrap();
            assert_eq!(permissions(range.start), expected);
            sim.fail(Call::MemHostRegister, 1, Code::UNKNOWN);
            let both = [gpu, AccessDesc::read_write(Location::Host)];
            mapping.grant(&driver, &both).unwrap_err();
            assert_eq!(permissions(range.start), expected);
            assert_eq!(mapping.access(0), Ok(Access::None));
            mapping.grant(&driver, &[gpu]).unwrap();
            assert_eq!(permissions(range.start), expected);
            assert_eq!(mapping.access(0), Ok(Access::ReadWrite));
            mapping.unregister(&driver).unwrap();
        }
        mapping.unmap(&driver, &addresses, &pages).unwrap();
    }
}
