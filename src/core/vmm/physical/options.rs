//! Options for physical memory.

use super::PhysicalMemory;
use crate::Result;
use crate::backing::choose::choose;
use crate::backing::{Backing, Chosen};
use crate::driver::{AllocationProps, Driver, GranularityKind, HandleTypes, Location};
use crate::guard::check_free;
use crate::guard::explain_create;
use crate::ledger::{AllocPath, Entry, Label, NewEntry, Site};
use crate::size::{Granularity, PaddedSize};
use crate::vmm::pages::{self, Fork, Pages};

/// Options for physical memory; [`create`](Self::create) creates it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `create`"]
pub struct PhysicalOptions {
    pub(crate) props: AllocationProps,
    kind: GranularityKind,
    /// The driver's answer, if the caller knows it.
    granularity: Option<Granularity>,
    pub(crate) overcommit: bool,
    pub(crate) backing: Backing,
    /// The decision, if the caller has made it.
    pub(crate) chosen: Option<Chosen>,
    /// What a forked child has of registered pages that cannot be shared.
    pub(crate) fork: Fork,
    pub(crate) path: AllocPath,
    pub(crate) label: Option<Label>,
    /// The program's call; `None`: the caller of [`PhysicalOptions::create`].
    pub(crate) site: Option<Site>,
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

        /// Sets what the memory is. The default is [`Backing::Driver`], which also stands for [`Backing::Auto`] here:
        /// buffers and heaps decide by all that they need.
        backing(backing: Backing) => backing = backing;

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

    /// Passes on a decision about the [`backing`](Self::backing) that the caller has made, for memory of several parts.
    pub fn chosen(mut self, chosen: Chosen) -> Self {
        self.chosen = Some(chosen);
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
    /// 64 MiB or more if the host node has less free ([`NodesTooFull`](crate::Error::NodesTooFull) at
    /// [`Location::Host`]), [`OutOfMemory`](crate::Error::OutOfMemory),
    /// [`NoImexChannel`](crate::Error::NoImexChannel) for FABRIC without a channel,
    /// [`PlatformUnsupported`](crate::Error::PlatformUnsupported), [`NoSuchNode`](crate::Error::NoSuchNode),
    /// [`NoSuchGpu`](crate::Error::NoSuchGpu), or the driver's own code.
    #[track_caller]
    pub fn create(mut self, driver: &Driver, bytes: u64) -> Result<PhysicalMemory> {
        self.site.get_or_insert(Site::here());
        self.chosen = Some(self.choose(driver)?);
        let size = PaddedSize::new(bytes, self.granularity_of(driver)?)?;
        self.create_chunk(driver, size, !self.overcommit, None)
    }

    /// As [`create`](Self::create), with all decisions made. A further chunk of one allocation has the ledger's entry of
    /// the first, which the caller [adds](Entry::add_chunk) it to.
    pub(crate) fn create_chunk(
        &self,
        driver: &Driver,
        size: PaddedSize,
        check: bool,
        first: Option<&Entry>,
    ) -> Result<PhysicalMemory> {
        let (bytes, props) = (size.padded(), self.props);
        if check {
            check_free(driver, props.location, bytes, || 0)?;
        }
        let chosen = self.decision();
        let (mut handle, mut pages, mut path) = (None, None, self.path);
        if let Some(node) = chosen.node_of_pages(props.location) {
            path = AllocPath::Registered;
            pages = Some(match props.handle_types {
                HandleTypes::NONE => Pages::private(node, self.fork),
                _ => Pages::shareable(node, bytes)?,
            });
        } else {
            let created = driver.mem_create(bytes, &props);
            let explain = |error| explain_create(driver, error, &props, bytes);
            handle = Some(created.map_err(explain)?);
        }
        let entry = match first {
            Some(first) => first.again(),
            None => Entry::new(NewEntry {
                driver,
                bytes,
                location: props.location,
                path,
                label: self.label.clone(),
                site: self.site.clone().unwrap_or(Site::unknown()),
            }),
        };
        entry.backed_by(chosen);
        Ok(PhysicalMemory::new(
            driver, handle, false, size, props, pages, entry,
        ))
    }

    /// Returns the decision about the [`backing`](Self::backing); the driver's memory, if there was none.
    pub(crate) fn decision(&self) -> &Chosen {
        static DRIVER: Chosen = Chosen::DRIVER;
        self.chosen.as_ref().unwrap_or(&DRIVER)
    }

    fn choose(&self, driver: &Driver) -> Result<Chosen> {
        if let Some(chosen) = &self.chosen {
            return Ok(chosen.clone());
        }
        let asked = match self.backing {
            Backing::Auto => Backing::Driver,
            asked => asked,
        };
        choose(
            driver,
            asked,
            (self.props.location, self.props.handle_types),
            &[],
        )
    }

    /// Returns the unit that sizes are rounded up to with exactly these options.
    ///
    /// # Errors
    /// The driver's errors, and [`InvalidArgument`](crate::Error::InvalidArgument) if its answer is not a power of
    /// two.
    pub fn granularity_of(&self, driver: &Driver) -> Result<Granularity> {
        if let Some(granularity) = self.granularity {
            return Ok(granularity);
        }
        let backing = match &self.chosen {
            Some(chosen) => chosen.backing,
            None => self.choose(driver)?.backing,
        };
        match backing {
            Backing::Registered => Ok(pages::GRANULARITY),
            _ => Granularity::new(driver.mem_granularity(&self.props, self.kind)?),
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
            backing: Backing::Driver,
            chosen: None,
            fork: Fork::default(),
            path: AllocPath::Vmm,
            label: None,
            site: None,
        }
    }
}
