//! Read-mostly data with a copy on each of several nodes and GPUs.

mod near;
mod options;
mod plan;
mod publish;
mod readers;
mod replica;
mod version;
#[cfg(feature = "share")]
mod view;

use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex};

use egmem_core::per_driver::lock;

use crate::driver::{Access, Driver, Location};
use crate::{Buffer, Error, Result, Stream};

pub use options::ReplicatedOptions;
pub use replica::Replica;
#[cfg(feature = "share")]
pub use view::ReplicatedView;

use near::Near;
use plan::Wave;
use readers::Readers;
use version::Version;

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
        let who = who.into();
        let place = self.near.place(who)?.ok_or(Error::NotAccessible {
            who,
            have: Access::None,
            need: Access::Read,
        })?;
        let current = lock(&self.current);
        let version = Arc::clone(&self.versions[*current]);
        Ok(Replica::new(version, place))
    }

    /// Returns the number of the newest version: 1 is the first.
    pub fn epoch(&self) -> u64 {
        self.versions[*lock(&self.current)].epoch()
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
        let buffers = self.versions[0].buffers().iter();
        buffers
            .map(|buffer| egmem_core::Memory::location(&**buffer))
            .collect()
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
