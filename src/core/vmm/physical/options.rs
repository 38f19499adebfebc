//! Options for physical memory.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use super::{Origin, PhysicalMemory};
use crate::Result;
use crate::driver::{AllocationProps, Driver, GranularityKind, HandleTypes, Location};
use crate::explain::explain_create;
use crate::guard::check_free;
use crate::ledger::{AllocPath, Entry, Label, NewEntry, Site};
use crate::size::{Granularity, PaddedSize};

/// Options for physical memory; [`create`](Self::create) creates it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `create`"]
pub struct PhysicalOptions {
    props: AllocationProps,
    kind: GranularityKind,
    /// The driver's answer, if the caller knows it.
    granularity: Option<Granularity>,
    overcommit: bool,
    path: AllocPath,
    label: Option<Label>,
    /// The program's call; `None`: the caller of [`PhysicalOptions::create`].
    site: Option<Site>,
    /// The ledger's entry of the chunks before it, if it is not the first.
    entry: Option<Arc<Entry>>,
}

impl PhysicalOptions {
    crate::driver::setters! {
        /// Sets how the memory may be shared; by default not at all. FABRIC needs an IMEX channel.
        handle_types(handle_types: HandleTypes) => props.handle_types = handle_types;

        /// Sets whether NICs may access the memory by GPUDirect RDMA; device memory only.
        gpu_direct_rdma(on: bool) => props.gpu_direct_rdma = on;

        /// Sets which granularity the size is rounded up to; by default the minimum.
        granularity(kind: GranularityKind) => kind = kind;

        /// Passes on the granularity that [`granularity_of`](Self::granularity_of) returned for the same options,
        /// which saves a driver call for each memory. The driver refuses sizes that are not multiples of its
        /// granularity.
        known_granularity(granularity: Granularity) => granularity = Some(granularity);

        /// Sets whether to ask the driver for more memory than the node has free. Pinned memory cannot be swapped
        /// out, so the kernel may kill processes to provide it.
        overcommit(on: bool) => overcommit = on;
    }

    /// Sets the memory's name in the [ledger](crate::ledger).
    pub fn label(mut self, label: impl Into<Label>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// Sets the path and the call in the memory's [ledger](crate::ledger) entry, for types that create memory on
    /// behalf of a program.
    pub fn recorded_as(mut self, path: AllocPath, label: Option<Label>, site: Site) -> Self {
        self.path = path;
        self.label = label;
        self.site = Some(site);
        self
    }

    /// Makes the memory a further chunk of one allocation, which has one entry in the [ledger](crate::ledger): that
    /// of `first`.
    pub(crate) fn chunk_of(mut self, first: &PhysicalMemory) -> Self {
        self.entry = Some(Arc::clone(&first.mapped.entry));
        self
    }

    /// Creates at least `bytes` of physical memory; it is zero on every driver measured.
    ///
    /// It is one allocation, however large. [`Growth::MAX_CHUNK`](crate::Growth::MAX_CHUNK) tells why buffers and
    /// heaps make none of 4 GiB or more.
    ///
    /// Source: `cuMemGetAllocationGranularity`, `cuMemCreate`.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for 0 bytes, [`NodeTooFull`](crate::Error::NodeTooFull) for
    /// 64 MiB or more if the host node has less free, [`OutOfMemory`](crate::Error::OutOfMemory),
    /// [`NoImexChannel`](crate::Error::NoImexChannel) for FABRIC without a channel,
    /// [`PlatformUnsupported`](crate::Error::PlatformUnsupported), [`NoSuchNode`](crate::Error::NoSuchNode),
    /// [`NoSuchGpu`](crate::Error::NoSuchGpu), or the driver's own code.
    #[track_caller]
    pub fn create(self, driver: &Driver, bytes: u64) -> Result<PhysicalMemory> {
        let site = self.site.clone().unwrap_or(Site::here());
        let size = PaddedSize::new(bytes, self.granularity_of(driver)?)?;
        if !self.overcommit {
            check_free(driver, self.props.location, size.padded(), || 0)?;
        }
        let handle = driver
            .mem_create(size.padded(), &self.props)
            .map_err(|error| explain_create(driver, error, &self.props, size.padded()))?;
        let entry = match self.entry {
            Some(entry) => {
                entry.add_chunk(size.padded());
                entry
            }
            None => Arc::new(Entry::new(NewEntry {
                driver,
                bytes: size.padded(),
                location: self.props.location,
                path: self.path,
                label: self.label,
                site,
            })),
        };
        Ok(PhysicalMemory {
            driver: driver.clone(),
            handle,
            size,
            props: self.props,
            allocation: OnceLock::new(),
            generation: AtomicU64::new(0),
            mapped: Arc::new(Origin {
                imported: false,
                entry,
            }),
            released: false,
        })
    }

    /// Returns the unit that sizes are rounded up to with exactly these options.
    ///
    /// # Errors
    /// The driver's errors, and [`InvalidArgument`](crate::Error::InvalidArgument) if its answer is not a power of
    /// two.
    pub fn granularity_of(&self, driver: &Driver) -> Result<Granularity> {
        match self.granularity {
            Some(granularity) => Ok(granularity),
            None => Granularity::new(driver.mem_granularity(&self.props, self.kind)?),
        }
    }
}

impl PhysicalMemory {
    /// Returns options for memory at `location`.
    pub fn options(location: impl Into<Location>) -> PhysicalOptions {
        PhysicalOptions {
            props: AllocationProps::at(location.into()),
            kind: GranularityKind::Minimum,
            granularity: None,
            overcommit: false,
            path: AllocPath::Vmm,
            label: None,
            site: None,
            entry: None,
        }
    }
}
