//! Read-mostly data with a copy on each of several nodes and GPUs.

mod near;
mod publish;
mod version;
mod view;

use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex};

use bytemuck::{AnyBitPattern, NoUninit};
use egmem_core::per_driver::lock;

use crate::driver::{Access, Driver, Location, setters};
use crate::ledger::{AllocPath, Label, Site};
use crate::memory::Memory;
use crate::topology::Topology;
use crate::{Buffer, BufferOptions, Error, Result, Stream};

use near::{Near, Wave, waves};
use publish::Readers;
use version::Version;

pub use version::Replica;
pub use view::ReplicatedView;

/// Data with a copy on each of several host nodes and GPUs, which are replaced as a whole: tables, weights, routes.
///
/// [`local`](Self::local) returns the copy near to a GPU or a node, and [`publish`](Self::publish) a new version to all of
/// them. Every copy has two slots. Readers use the one, and a new version is written into the other:
///
/// ```text
///                    node 0       GPU 0        GPU 1
///   readers ──▶    ┌────────┐   ┌────────┐   ┌────────┐
///   epoch 7        │ slot A │   │ slot A │   │ slot A │
///                  └────────┘   └────────┘   └────────┘
///                  ┌────────┐   ┌────────┐   ┌────────┐
///   publish ──▶    │ slot B │──▶│ slot B │──▶│ slot B │    epoch 8, once all of them are written:
///                  └────────┘   └────────┘   └────────┘    one step for all readers
/// ```
///
/// # What readers see
/// - A [`Replica`] is one version, whole, and stays as it is while it lives. `local` returns the version of the last `publish`
///   that has returned, or of one that is just returning. Two replicas of one epoch have the same bytes wherever they are.
/// - `publish` writes a slot only after its readers have gone: every [`Replica`] of it has been dropped, and every event of
///   [`Replica::release_after`] has passed. While they have not, it returns [`Error::StillHeld`], or waits
///   ([`publish_within`](Self::publish_within)). Readers of the newest version are never in the way: only those of the one
///   before it, so a reader may keep a version for as long as one `publish`.
/// - **The CPU** reads through the replica, so it cannot read too late.
/// - **A GPU** reads when its work runs. Work counts as a reader while it has the replica, as a ticket of
///   [`Stream::start_copy`] has, or until the event of `release_after` passes, which is recorded behind all work that was
///   submitted to the stream by then. Before `publish` returns, all copies have ended, so work that is submitted later,
///   on any stream, sees the new bytes without further synchronisation.
///
/// # Cost
/// Twice the bytes at each location, and 64 MiB of host memory at most where no copy is on a host node. `local` takes a
/// lock for a moment and calls no driver. `publish` writes copies on host nodes by the CPU, on all nodes at the same time. A
/// GPU behind NVLink-C2C reads the copy of its own node, if there is one. Of other GPUs that NVLink connects to each other,
/// one reads from the CPU and the others from GPUs that have the bytes already. Which GPUs those are, the driver's attributes
/// tell ([`PeerLinkKind`](crate::topology::PeerLinkKind)).
///
/// # Dropping
/// When this or the last replica of a version is dropped, the thread waits for the GPU work of
/// [`Replica::release_after`] on that version: its memory must not be unmapped before. If the driver does not say that the
/// work has ended, the memory is never unmapped, which is logged. A thread that must not wait keeps them until the streams
/// are done ([`Stream::is_done`]).
///
/// ```
/// use egmem::driver::{Location, NodeId};
/// use egmem::shapes::Replicated;
/// use egmem::{Driver, Machine};
///
/// let driver = Driver::simulated(Machine::h200x8())?; // Driver::open() on a real machine
/// let places = [Location::Device(0), Location::Device(1), NodeId(0).into()];
/// let table = Replicated::on(places).create(&driver, &[1.0_f32; 1000])?;
///
/// let old = table.local(Location::Device(1))?; // GPU 1's own copy: its kernels take old.device_ptr()
/// assert_eq!(table.publish(&[2.0; 1000])?, 2);
/// let new = table.local(NodeId(0))?; // for the CPU
/// assert_eq!((old.epoch(), new.epoch(), new.get(999)?), (1, 2, 2.0));
/// // The next version would overwrite the one that `old` holds.
/// assert!(table.publish(&[3.0; 1000]).is_err());
/// drop(old);
/// assert_eq!(table.publish(&[3.0; 1000])?, 3);
/// # Ok::<(), egmem::Error>(())
/// ```
pub struct Replicated<T> {
    driver: Driver,
    near: Near,
    len: usize,
    /// Two. Their `Arc`s are cloned for replicas alone, under `current`'s lock.
    versions: Vec<Arc<Version>>,
    /// Which version is handed out.
    current: Mutex<usize>,
    /// Held by a publisher.
    publishing: Mutex<()>,
    waves: Vec<Wave>,
    /// For each place that is a GPU.
    streams: Vec<Option<Stream>>,
    staging: Option<Arc<Buffer>>,
    /// In other processes.
    readers: Readers,
    elements: PhantomData<fn() -> T>,
}

impl<T> Replicated<T> {
    /// Returns the newest version in the copy near to a GPU, or to the CPUs of a node; [`Location::HostNumaCurrent`] is the
    /// node of the CPU that the calling thread runs on now, [`Location::Host`] any copy that the CPU can read.
    ///
    /// A GPU's own memory comes first. Over NVLink-C2C its own node follows, then GPUs that NVLink connects; over PCIe
    /// those GPUs come before the node. Then other nodes by their distance, then other GPUs.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`], [`Error::NoSuchNode`]; [`Error::NotAccessible`] if it can read none of the copies;
    /// [`Error::InvalidArgument`] in a forked child; for `HostNumaCurrent` those of
    /// [`Topology::current_node`](crate::topology::Topology::current_node).
    pub fn local(&self, who: impl Into<Location>) -> Result<Replica<T>> {
        self.driver.expect_this_process("replicated data")?;
        let place = self.near.place(who.into())?;
        let current = lock(&self.current);
        let version = Arc::clone(&self.versions[*current]);
        Ok(Replica::new(version, place))
    }

    /// Returns the number of the newest version: 1 is the first.
    pub fn epoch(&self) -> u64 {
        let epochs = self.versions.iter().map(|version| version.epoch());
        epochs.max().unwrap_or(0)
    }

    /// Returns the number of elements: at least 1.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `false`: there is at least one element.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the copies' locations.
    pub fn places(&self) -> Vec<Location> {
        let buffers = self.versions[0].buffers.iter();
        buffers.map(|buffer| buffer.location()).collect()
    }
}

impl<T> fmt::Debug for Replicated<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replicated")
            .field("len", &self.len)
            .field("epoch", &self.epoch())
            .field("places", &self.places())
            .finish_non_exhaustive()
    }
}

/// The most bytes of host memory that pass data on where no copy is on a host node.
const STAGING: u64 = 64 << 20;

/// Options for replicated data; [`create`](Self::create) creates them.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `create`"]
pub struct ReplicatedOptions<T> {
    places: Vec<Location>,
    overcommit: bool,
    shareable: bool,
    label: Option<Label>,
    elements: PhantomData<fn() -> T>,
}

impl<T: AnyBitPattern + NoUninit> Replicated<T> {
    /// Returns options for data with a copy at each of these locations: host nodes, GPUs, or both.
    pub fn on<L: Into<Location>>(places: impl IntoIterator<Item = L>) -> ReplicatedOptions<T> {
        ReplicatedOptions {
            places: places.into_iter().map(Into::into).collect(),
            overcommit: false,
            shareable: false,
            label: None,
            elements: PhantomData,
        }
    }
}

impl<T: AnyBitPattern + NoUninit> ReplicatedOptions<T> {
    setters! {
        /// Sets whether to ask the driver for more memory than a node has free.
        overcommit(on: bool) => overcommit = on;
        /// Makes the copies shareable, so that other processes can read them: see `Replicated::share`. By default they are not.
        shareable() => shareable = true;
    }

    /// Sets the copies' name in the ledger.
    pub fn label(mut self, label: impl Into<Label>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// Creates the copies, each twice, and publishes `values` as epoch 1. The number of elements stays the same from
    /// then on.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no location, one that is named twice, one that is neither a node nor a GPU, and
    /// for no element or elements of no bytes; those of [`BufferOptions::allocate`](crate::BufferOptions::allocate),
    /// [`Topology::discover`] and [`Stream::copy`].
    #[track_caller]
    pub fn create(self, driver: &Driver, values: &[T]) -> Result<Replicated<T>> {
        let site = Site::here();
        let bytes = size_of_val(values) as u64;
        if bytes == 0 {
            let why = "they have 0 bytes";
            return Err(Error::invalid_of("values", why, "1 byte or more"));
        }
        self.check_places()?;
        let topology = Topology::of(driver)?;
        let copy = |&place: &Location| {
            let options = self.copy_at(&topology, place).bytes(bytes);
            let buffer = self.named(options, site.clone()).allocate(driver);
            buffer.map(Arc::new)
        };
        let version = |_| {
            let buffers = self.places.iter().map(copy).collect::<Result<_>>()?;
            Ok(Arc::new(Version::new(driver, buffers)))
        };
        let versions = (0..2).map(version).collect::<Result<_>>()?;
        let waves = waves(&topology, &self.places);
        let streams = self.places.iter().map(|place| match place {
            Location::Device(gpu) => Stream::new(driver, *gpu).map(Some),
            _ => Ok(None),
        });
        let streams = streams.collect::<Result<_>>()?;
        let from_cpu = waves.iter().flatten().find(|(_, from)| from.is_none());
        let staging = match from_cpu.map(|&(to, _)| self.places[to]) {
            Some(Location::Device(gpu)) => {
                let node = topology.gpu(gpu)?.host_node()?;
                let options = Buffer::on(node).bytes(bytes.min(STAGING));
                Some(Arc::new(
                    self.named(options, site.clone()).allocate(driver)?,
                ))
            }
            _ => None,
        };
        let replicated = Replicated {
            driver: driver.clone(),
            near: Near::new(topology, &self.places, |_, _| Ok(true))?,
            len: values.len(),
            versions,
            current: Mutex::new(0),
            publishing: Mutex::default(),
            waves,
            streams,
            staging,
            readers: Readers::default(),
            elements: PhantomData,
        };
        replicated.publish(values)?;
        Ok(replicated)
    }

    fn check_places(&self) -> Result<()> {
        let bad = |why: String| Err(Error::invalid("locations", why));
        if self.places.is_empty() {
            return bad("the list is empty".into());
        }
        for (index, place) in self.places.iter().enumerate() {
            if !matches!(place, Location::Device(_) | Location::HostNuma(_)) {
                return bad(format!("{place} is neither a GPU nor a host node"));
            }
            if self.places[..index].contains(place) {
                return bad(format!("{place} is named twice"));
            }
        }
        Ok(())
    }

    /// Returns options for a copy. GPUs may read; the GPU whose memory it is writes when a version is published, and
    /// the CPU writes its own.
    fn copy_at(&self, topology: &Topology, place: Location) -> BufferOptions {
        let mut options = Buffer::on(place).overcommit(self.overcommit);
        if self.shareable {
            options = options.shareable();
        }
        for gpu in topology.gpus() {
            options = match place {
                Location::Device(owner) if owner == gpu.ordinal => {
                    options.access(gpu, Access::ReadWrite)
                }
                Location::Device(owner) if !gpu.peers.contains(&owner) => options,
                _ => options.access(gpu, Access::Read),
            };
        }
        options
    }

    /// Sets the path, the call and the label in a buffer's ledger entry.
    fn named(&self, options: BufferOptions, site: Site) -> BufferOptions {
        let options = options.recorded_as(AllocPath::ShapeChunk, site);
        match &self.label {
            Some(label) => options.label(label.as_str()),
            None => options,
        }
    }
}

#[cfg(test)]
mod tests {
    use egmem_core::Machine;

    use super::*;
    use crate::driver::NodeId;

    /// A thread that a forked child does not have may hold the lock.
    #[test]
    fn the_newest_version_is_known_without_a_lock() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let table = Replicated::on([NodeId(0)]).create(&driver, &[1]).unwrap();
        table.publish(&[2]).unwrap();
        let _held = lock(&table.current);
        assert_eq!(table.epoch(), 2);
        assert!(format!("{table:?}").contains("epoch: 2"));
    }
}
