//! Other memory behind the same interfaces: the older allocators and the system's own.
//!
//! For comparison with EGM, for the other end of copies, and where one of them is right:
//!
//! | type | memory | right for |
//! |---|---|---|
//! | [`PinnedHost`] | `cudaHostAlloc`: pinned, on no chosen node | small things that live as long as the program |
//! | [`RegisteredHost`] | this process's own pages, pinned later: huge pages, files | memory that must be of a kind, such as a file's |
//! | [`SystemMemory`] | plain pages that GPUs reach as the CPU does, on Grace | data that seldom meet a GPU |
//! | [`ManagedMemory`] | pages that migrate to the CPU or GPU that touches them | data that one side uses for a long time, then the other |
//! | [`DeviceMemory`] | `cudaMalloc`: one GPU's | data that only this GPU uses |
//!
//! The example `host-memory` measures them beside EGM.

mod registered;

pub use registered::{PageSize, RegisteredHost};

use std::mem;
use std::ops::Range;

use crate::driver::{
    Access, AccessDesc, Code, DeviceAttribute, DevicePtr, Driver, Location, Relaxed,
};
use crate::guard::{check_free, on_gpu};
use crate::ledger::{AllocPath, Entry, Grants, NewEntry, Site};
use crate::memory::{AccessChecks, Engine, Memory, impl_memory};
use crate::size::not_empty;
use crate::teardown::{give_back_or_log, unregister};
use crate::{Error, Result};
use registered::Pages;

/// Refuses a feature that a GPU says it lacks. An attribute that the driver does not know says nothing.
fn is_supported(
    driver: &Driver,
    device: i32,
    attribute: DeviceAttribute,
    what: &'static str,
) -> Result<()> {
    match driver.device_attribute(device, attribute) {
        Ok(0) => Err(Error::unsupported(what, None)),
        Err(error) if error.code() == Some(Code::INVALID_VALUE) => Ok(()),
        answer => on_gpu(driver, device, answer).map(drop),
    }
}

/// The memory of the types here, given back when dropped.
#[derive(Debug)]
struct Owned {
    driver: Driver,
    start: DevicePtr,
    len: u64,
    path: AllocPath,
    /// The GPU in whose context it is; 0 for plain pages.
    device: i32,
    writable: bool,
    entry: Entry,
    /// This process's own pages, unmapped after the driver has let them go.
    pages: Option<Pages>,
}

impl Owned {
    /// Takes memory that was allocated; `gpus` and, unless it is a GPU's own, the host may read and write it.
    #[track_caller]
    fn new(
        driver: &Driver,
        (path, device): (AllocPath, i32),
        (start, len): (DevicePtr, u64),
        gpus: Range<i32>,
    ) -> Self {
        let host = (path != AllocPath::Device).then_some(Location::Host);
        let locations = host.into_iter().chain(gpus.map(Location::Device));
        let access = locations.map(|location| AccessDesc::new(location, Access::ReadWrite));
        let new = NewEntry {
            driver,
            bytes: len,
            location: location_of(path, device),
            path,
            label: None,
            site: Site::here(),
        };
        Self {
            entry: Entry::mapped(new, start, Grants::Range(access.collect())),
            driver: driver.clone(),
            start,
            len,
            path,
            device,
            writable: true,
            pages: None,
        }
    }

    fn free(&self) -> Result<()> {
        let (driver, device, start) = (&self.driver, self.device, self.start);
        // Another thread may be capturing its streams.
        let _relaxed = Relaxed::new(driver);
        // SAFETY: allocated or registered by the owner, of this path, and given back once; views of it borrow the owner, so
        // none exist; for a GPU's memory the driver waits for work that uses it.
        unsafe {
            match self.path {
                AllocPath::Pinned => driver.mem_free_host(device, start),
                AllocPath::Registered => unregister(driver, device, start),
                AllocPath::System => Ok(()),
                _ => driver.mem_free(device, start),
            }
        }
    }
}

/// Returns where memory lies; of managed memory, the GPU that it was allocated for.
const fn location_of(path: AllocPath, device: i32) -> Location {
    match path {
        AllocPath::Device | AllocPath::Managed => Location::Device(device),
        _ => Location::Host,
    }
}

impl Drop for Owned {
    /// Pages that the driver does not let go stay mapped. Registered pages stay mapped in a forked child too, because the driver's
    /// state there is the parent's.
    fn drop(&mut self) {
        let what = match self.path {
            AllocPath::Pinned => "pinned host memory",
            AllocPath::Registered => "registered host memory",
            AllocPath::Managed => "managed memory",
            _ => "device memory",
        };
        let mut is_lost = false;
        self.entry.give_back(&self.driver, || {
            is_lost = give_back_or_log(&self.driver, what, || self.free());
            is_lost
        });
        let is_parents = !self.driver.is_of_this_process() && self.path == AllocPath::Registered;
        if is_lost || is_parents {
            mem::forget(self.pages.take());
        }
    }
}

impl_memory! { for Owned, |this| &this.driver, this.start, this.len, location_of(this.path, this.device) }

// SAFETY: the memory is given back when this is dropped. Until then host memory is all GPUs', for reading alone
// if it is not writable: pinned and registered memory is PORTABLE and DEVICEMAP, and for `SystemMemory` every GPU
// uses this process's page tables (ATS). A GPU's memory is open to its own kernels and to every copy engine; kernels
// of other GPUs have no access, because this crate enables no peer access.
unsafe impl AccessChecks for Owned {
    fn gpu_access(&self, gpu: i32, engine: Engine, _: u64, _: u64) -> Result<Access> {
        Ok(match self.location() {
            Location::Device(own) if engine == Engine::Kernel && own != gpu => Access::None,
            _ if self.writable => Access::ReadWrite,
            _ => Access::Read,
        })
    }

    fn is_read_only_for_cpu(&self, _: u64, _: u64) -> bool {
        !self.writable
    }

    fn may_be_on_host(&self, _: u64, _: u64) -> bool {
        self.path != AllocPath::Device
    }

    fn of_one_mapping(&self, _offset: u64, len: u64) -> Option<u64> {
        matches!(self.path, AllocPath::Pinned | AllocPath::Device).then_some(len)
    }
}

/// Implements the common part of all types here, which own an [`Owned`].
macro_rules! owned {
    ($name:ident) => {
        impl $name {
            /// Sets the memory's name in the [ledger](crate::ledger).
            pub fn labelled(self, label: impl Into<$crate::ledger::Label>) -> Self {
                self.0.entry.set_label(label.into());
                self
            }
        }

        $crate::memory::memory_through!(unsafe impl for $name, |this| this.0);
    };
    ($name:ident, for the CPU) => {
        owned!($name);

        impl $name {
            /// Returns the CPU's view of the bytes.
            pub fn cpu(&self) -> $crate::memory::CpuView<'_> {
                let memory = &self.0;
                // SAFETY: the memory is mapped for the CPU, in whole pages, also while GPUs work, until this is
                // dropped. A registered file keeps its pages: by the contract of `of_file`, or by its seals. Safe
                // code reaches the bytes through atomic views only.
                unsafe { $crate::memory::CpuView::new(memory.start, memory.len, memory.writable) }
            }
        }

        impl $crate::memory::CpuMemory for $name {
            fn cpu(&self) -> $crate::Result<$crate::memory::CpuView<'_>> {
                Ok(self.cpu())
            }
        }
    };
}
use owned;

/// Pinned host memory on no particular node, usable by the CPU and every GPU; freed when dropped.
///
/// Its drop waits for kernels that run, and holds up calls of the driver in all threads meanwhile (measured, docs/driver-behaviour.md): a
/// kernel that waits for the host's next call never ends then.
///
/// It goes with the primary context of its GPU: after other code of the process has reset that (`cudaDeviceReset`), the CPU gets
/// SIGSEGV there, and a GPU that uses it faults (measured, docs/driver-behaviour.md). Memory of
/// [`Buffer`](crate::Buffer) by [`Backing::Driver`](crate::Backing::Driver) stays.
///
/// Source: `cuMemHostAlloc` with PORTABLE and DEVICEMAP, which is `cudaHostAlloc`.
#[derive(Debug)]
pub struct PinnedHost(Owned);

impl PinnedHost {
    /// Allocates `bytes` in the primary context of GPU `device`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 bytes, [`Error::NoSuchGpu`]; [`Error::NodesTooFull`] or [`Error::NodeTooFull`] if the
    /// machine has less free; or the driver's error.
    #[track_caller]
    pub fn new(driver: &Driver, device: i32, bytes: u64) -> Result<Self> {
        not_empty(bytes)?;
        check_free(driver, Location::Host, bytes, || 0)?;
        // Every GPU may access it; asked first, so that nothing is allocated if the driver does not say.
        let gpus = 0..driver.device_count()?;
        let _relaxed = Relaxed::new(driver);
        let start = on_gpu(driver, device, driver.mem_host_alloc(device, bytes))?;
        let kind = (AllocPath::Pinned, device);
        let range = (start, bytes);
        Ok(Self(Owned::new(driver, kind, range, gpus)))
    }
}

/// Memory of one GPU; freed when dropped.
///
/// Source: `cuMemAlloc`.
#[derive(Debug)]
pub struct DeviceMemory(Owned);

impl DeviceMemory {
    /// Allocates `bytes` of GPU `device`'s memory.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 bytes, [`Error::NoSuchGpu`], or the driver's error.
    #[track_caller]
    pub fn new(driver: &Driver, device: i32, bytes: u64) -> Result<Self> {
        not_empty(bytes)?;
        let _relaxed = Relaxed::new(driver);
        let start = on_gpu(driver, device, driver.mem_alloc(device, bytes))?;
        let kind = (AllocPath::Device, device);
        let (range, gpus) = ((start, bytes), device..device + 1);
        Ok(Self(Owned::new(driver, kind, range, gpus)))
    }
}

/// Managed memory: its pages move to the CPU or the GPU that touches them.
///
/// For comparison. It is not shared with other processes. Each allocation is at most the GPU's free memory at that
/// time. Several allocations together may exceed the GPU's memory, because pages take none before a GPU touches them:
/// the driver then evicts pages to the CPU's memory.
///
/// Source: `cuMemAllocManaged` with ATTACH_GLOBAL.
///
/// ```
/// use egmem::pinned::ManagedMemory;
/// use egmem::{Driver, Machine};
///
/// let driver = Driver::simulated(Machine::h200x8())?; // Driver::open() on a real machine
/// let memory = ManagedMemory::new(&driver, 0, 4 << 20)?;
/// memory.cpu().put(0, 7_u64)?; // the page is the CPU's
/// assert_eq!(egmem::proof::Prover::new(&driver, 0)?.read(&memory)?, 7); // and the GPU's now
/// assert_eq!(memory.cpu().get::<u64>(0)?, 7); // and the CPU's again
/// # Ok::<(), egmem::Error>(())
/// ```
#[derive(Debug)]
pub struct ManagedMemory(Owned);

impl ManagedMemory {
    /// Allocates `bytes` in the primary context of GPU `device`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 bytes and for more than the GPU has free; [`Error::NoSuchGpu`];
    /// [`Error::PlatformUnsupported`] where the CPU may not touch managed memory while a GPU works, or there is none;
    /// the driver's error.
    #[track_caller]
    pub fn new(driver: &Driver, device: i32, bytes: u64) -> Result<Self> {
        not_empty(bytes)?;
        let attribute = DeviceAttribute::MANAGED_MEMORY;
        is_supported(driver, device, attribute, "managed memory")?;
        // Of every GPU: with one that cannot, the CPU must not touch managed memory while that one works.
        for gpu in 0..driver.device_count()? {
            let attribute = DeviceAttribute::CONCURRENT_MANAGED_ACCESS;
            let what = "managed memory that CPU and GPU use at the same time";
            is_supported(driver, gpu, attribute, what)?;
        }
        let (free, _) = driver.mem_info(device)?;
        if bytes > free {
            let why = format!("{bytes} bytes of managed memory exceed what GPU {device} has free");
            let valid = format!("up to {free} bytes");
            return Err(Error::invalid_of("size", why, valid));
        }
        let _relaxed = Relaxed::new(driver);
        let start = on_gpu(driver, device, driver.mem_alloc_managed(device, bytes))?;
        let kind = (AllocPath::Managed, device);
        let (range, gpus) = ((start, bytes), device..device + 1);
        Ok(Self(Owned::new(driver, kind, range, gpus)))
    }
}

/// Plain memory of this process, as from `malloc`, which GPUs reach through the CPU's page tables (ATS): on Grace
/// machines. Nothing is pinned, and the kernel may move pages between nodes.
///
/// Source: `mmap`; the attribute `PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES`.
///
/// ```
/// use egmem::pinned::{PageSize, PinnedHost, SystemMemory};
/// use egmem::{Driver, Error, Machine};
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let memory = SystemMemory::new(&driver, 4 << 20, PageSize::Base)?;
/// memory.cpu().put(0, 7_u64)?;
/// assert_eq!(egmem::proof::Prover::new(&driver, 0)?.read(&memory)?, 7); // by a kernel
///
/// // Other machines have none: use pinned memory there.
/// let driver = Driver::simulated(Machine::h200x8())?;
/// match SystemMemory::new(&driver, 4 << 20, PageSize::Base) {
///     Err(Error::PlatformUnsupported { what, .. }) => println!("without {what}"),
///     other => panic!("{other:?}"),
/// }
/// PinnedHost::new(&driver, 0, 4 << 20)?;
/// # Ok::<(), egmem::Error>(())
/// ```
#[derive(Debug)]
pub struct SystemMemory(Owned);

impl SystemMemory {
    /// Maps `bytes` of zeros.
    ///
    /// # Errors
    /// [`Error::PlatformUnsupported`] unless all GPUs use the CPU's page tables; [`Error::InvalidArgument`] for 0
    /// bytes; [`Error::System`] if there are no such pages; the driver's error.
    #[track_caller]
    pub fn new(driver: &Driver, bytes: u64, size: PageSize) -> Result<Self> {
        not_empty(bytes)?;
        let gpus = 0..driver.device_count()?;
        let attribute = DeviceAttribute::PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES;
        for gpu in gpus.clone() {
            if driver.device_attribute(gpu, attribute)? != 1 {
                let what = "GPUs that use the CPU's page tables (ATS), which memory that is not pinned needs";
                return Err(Error::unsupported(what, None));
            }
        }
        let pages = Pages::anonymous(bytes, size)?;
        let (kind, range) = ((AllocPath::System, 0), (pages.start(), bytes));
        let mut memory = Owned::new(driver, kind, range, gpus);
        memory.pages = Some(pages);
        Ok(Self(memory))
    }
}

owned!(PinnedHost, for the CPU);
owned!(DeviceMemory);
owned!(ManagedMemory, for the CPU);
owned!(SystemMemory, for the CPU);
