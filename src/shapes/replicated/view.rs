//! Replicated data of another process.

use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{Ordering::SeqCst, fence};
use std::sync::{Arc, Mutex};

use bytemuck::{AnyBitPattern, NoUninit};
use egmem_core::per_driver::lock;
use egmem_share::{Channel, Description, ImportOptions, ImportedBuffer, Link, Offer, Shared};

use super::near::Near;
use super::publish::{Control, Reader};
use super::version::{Copy, Source, Version};
use super::{Replica, Replicated};
use crate::driver::{Access, Driver, HandleTypes, Location};
use crate::ledger::Site;
use crate::memory::{AccessChecks, Engine, Memory};
use crate::topology::Topology;
use crate::{Buffer, Error, Result, Stream, numbers};

/// The beginning of the text before the copies: the kind of message and its version.
const KIND: &str = "egmem-replicated 1";

/// The most bytes of the text.
const MAX_TEXT: usize = 128;

/// The most places of another process's data.
const MAX_PLACES: u64 = 256;

/// How often a reader looks again where the publisher has published meanwhile.
const TRIES: usize = 10_000;

impl<T> Replicated<T> {
    /// Sends the data to another process, which reads them by [`ReplicatedView::receive`]: all copies, of which each process
    /// maps what its GPUs and its CPU can read. The data were created with
    /// [`shareable`](crate::ReplicatedOptions::shareable).
    ///
    /// From then on [`publish`](Self::publish) counts the replicas of that process too, until it drops its view or ends. A
    /// process that is stopped with a replica holds up a publisher as a thread here does. A reader has one granule of host memory
    /// for the words by which both agree. Publishers wait while the data are sent.
    ///
    /// The handles allow the other process to write: send them only to processes that may.
    ///
    /// # Errors
    /// [`InvalidArgument`](Error::InvalidArgument) for data that are not shareable, and in a forked child; those of
    /// [`BufferOptions::allocate`](crate::BufferOptions::allocate); nothing is sent then. Those of [`Channel::send`]; the
    /// channel is closed then.
    pub fn share(&self, channel: &mut Channel) -> egmem_share::Result<()> {
        self.driver.expect_this_process("replicated data")?;
        let _publishing = lock(&self.publishing);
        let mut copies = self.versions.iter().flat_map(|version| &version.buffers);
        let is_shareable = |copy: &Arc<Buffer>| {
            let mut parts = copy.physical().iter();
            parts.all(|part| part.props().handle_types.contains(HandleTypes::POSIX_FD))
        };
        if !copies.clone().all(is_shareable) {
            let why = "they were created without `shareable`";
            return Err(Error::invalid("replicated data", why).into());
        }
        self.readers.forget_ended();
        let control = Buffer::on(self.control_place())
            .access_by([] as [Location; 0])
            .shareable();
        let control = Arc::new(
            control
                .bytes(Control::<Arc<Buffer>>::BYTES)
                .allocate(&self.driver)?,
        );
        let mut words = [0; Control::<Arc<Buffer>>::BYTES as usize / size_of::<u64>()];
        words[0] = self.epoch();
        control.write_at(0, &words)?;
        let (places, element) = (self.places().len(), size_of::<T>());
        let link = channel.together(|channel| {
            channel.send_text(&format!("{KIND} {element} {} {places}", self.len))?;
            copies
                .try_for_each(|copy| channel.send(&Shared::from(Arc::clone(copy)), Access::Read))?;
            channel.send(&Shared::from(Arc::clone(&control)), Access::ReadWrite)?;
            channel.send_link()
        })?;
        lock(&self.readers.0).push(Reader {
            // SAFETY: the CPU may read and write a buffer on a host node, and nothing else here has this one.
            control: unsafe { Control::new(control) },
            link,
            peer: channel.peer(),
        });
        Ok(())
    }

    /// Returns the place of the words by which the two processes agree: a node near to a copy, as others may have no memory.
    fn control_place(&self) -> Location {
        let (places, topology) = (self.places(), &self.near.topology);
        let near = |place: &Location| match place {
            Location::Device(gpu) => Some(topology.gpu(*gpu).ok()?.host_node().ok()?.into()),
            host => Some(*host),
        };
        let hosts = places.iter().filter(|place| place.is_host());
        let mut found = hosts.chain(&places).filter_map(near);
        let first = || topology.nodes().first().map(|node| node.id.into());
        found.next().or_else(first).unwrap_or(Location::Host)
    }
}

/// Another process's [`Replicated`] data, of which this process reads the copies near to its GPUs and its CPU.
///
/// [`local`](Self::local) returns the newest version, as [`Replicated::local`] does, without a call to the other process. The
/// version stays as it is while the [`Replica`] lives. If the other process ends, the newest version stays
/// ([`is_alone`](Self::is_alone)).
///
/// GPU work after [`Replica::release_after`] counts until it has run and this process calls `local` again, or drops a
/// replica or this value.
///
/// ```
/// use egmem::driver::NodeId;
/// use egmem::share::{Channel, ImportOptions, Peers};
/// use egmem::shapes::Replicated;
/// use egmem::shapes::replicated::ReplicatedView;
/// use egmem::{Driver, Machine};
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// # let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
/// # let mut channel = Channel::new(one, &Peers::same_user())?;
/// # let mut others_channel = Channel::new(other, &Peers::same_user())?;
/// // One process, which has accepted a connection as `channel`:
/// let table = Replicated::on([NodeId(0)]).shareable().create(&driver, &[1.0_f32; 1000])?;
/// table.share(&mut channel)?;
///
/// // Another process:
/// let view = ReplicatedView::<f32>::receive(&driver, &mut others_channel, ImportOptions::new())?;
/// let old = view.local(NodeId(0))?;
/// table.publish(&[2.0; 1000])?;
/// assert_eq!((old.get(0)?, view.local(NodeId(0))?.get(0)?), (1.0, 2.0));
/// assert!(table.publish(&[3.0; 1000]).is_err()); // `old` has these copies
/// drop(old);
/// assert_eq!(table.publish(&[3.0; 1000])?, 3);
/// # Ok::<(), egmem::share::Error>(())
/// ```
pub struct ReplicatedView<T> {
    shared: Arc<ViewShared>,
    elements: PhantomData<fn() -> T>,
}

/// What a view and its replicas have.
#[derive(Debug)]
struct ViewShared {
    // The copies go first, once the GPU work that reads them has ended; then the publisher may know.
    versions: [Version<ImportedBuffer>; 2],
    control: Arc<Control<ImportedBuffer>>,
    /// How many holds there are of each slot. Whoever has the lock changes this reader's words.
    holds: Mutex<[usize; 2]>,
    near: Near,
    driver: Driver,
    len: usize,
    link: Arc<Link>,
}

impl Drop for ViewShared {
    /// Where the driver does not say that GPU work has ended, the publisher sees this reader, and its use of the version, until
    /// this process ends.
    fn drop(&mut self) {
        let leaked = self.versions.each_mut().map(Version::end);
        if leaked.contains(&true) {
            std::mem::forget((Arc::clone(&self.control), Arc::clone(&self.link)));
        }
    }
}

impl ViewShared {
    /// Marks a slot as unused if neither a replica nor GPU work has it.
    fn look(&self, slot: usize, holds: &[usize; 2]) {
        // Work that the driver does not tell about may still run.
        if holds[slot] == 0 && self.versions[slot].pending_work() == Ok(0) {
            self.control.in_use(slot).store(0, SeqCst);
        }
    }

    /// Takes hold of the newest version.
    fn hold(self: &Arc<Self>) -> Result<Hold> {
        let mut holds = lock(&self.holds);
        (0..2).for_each(|slot| self.look(slot, &holds));
        for _ in 0..TRIES {
            let epoch = self.control.current().load(SeqCst);
            let slot = epoch as usize & 1;
            self.control.in_use(slot).store(1, SeqCst);
            fence(SeqCst);
            if self.control.current().load(SeqCst) == epoch {
                holds[slot] += 1;
                return Ok(Hold {
                    shared: Arc::clone(self),
                    slot,
                    epoch,
                });
            }
            self.look(slot, &holds);
        }
        let why = "the other process publishes again and again";
        Err(Error::failed("replicated data", why))
    }
}

/// A use of one version by this process.
#[derive(Debug)]
struct Hold {
    shared: Arc<ViewShared>,
    slot: usize,
    epoch: u64,
}

impl Source for Hold {
    fn epoch(&self) -> u64 {
        self.epoch
    }
    fn copy(&self, place: usize) -> &dyn Copy {
        &self.shared.versions[self.slot].buffers[place]
    }
    fn read_by(&self, stream: &Stream) -> Result<()> {
        self.shared.versions[self.slot].read_by(stream)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if !self.shared.driver.is_of_this_process() {
            return;
        }
        let mut holds = lock(&self.shared.holds);
        holds[self.slot] -= 1;
        self.shared.look(self.slot, &holds);
    }
}

impl<T: AnyBitPattern + NoUninit> ReplicatedView<T> {
    /// Waits for the data of another process, and maps their copies. The options say which GPUs may read them:
    /// each of those gets access to the copies that it can reach.
    ///
    /// # Errors
    /// The channel's: after a timeout the caller may retry if nothing had arrived, and the channel is closed otherwise.
    /// [`InvalidArgument`](Error::InvalidArgument) for another kind of message, for elements of another size and for copies
    /// that do not fit together; those of [`ImportOptions::import`]. The channel stays usable after these, but what belongs to
    /// another kind of message comes next.
    #[track_caller]
    pub fn receive(
        driver: &Driver,
        channel: &mut Channel,
        options: ImportOptions,
    ) -> egmem_share::Result<Self> {
        let (element, len, places) = read(&channel.receive_text(MAX_TEXT)?)?;
        let bytes = len
            .checked_mul(element)
            .filter(|_| element == size_of::<T>() as u64);
        let bytes = bytes.ok_or_else(|| refused(format!("{len} elements of {element} bytes")));
        // Each GPU reads the copies that it reaches.
        let options = options.or_called_at(Site::here()).skip_unreachable();
        let (mut first, control, link) =
            receive_all(driver, channel, &options, (bytes, 2 * places))?;
        let second = first.split_off(places as usize);
        let located = |copies: &[ImportedBuffer]| copies.iter().map(Memory::location).collect();
        let at: Vec<Location> = located(&first);
        if at != located(&second) {
            return Err(refused("its versions lie in different places").into());
        }
        let may_read = |who, place: usize| {
            Ok(is_readable(&first[place], who)? && is_readable(&second[place], who)?)
        };
        let near = Near::new(Topology::of(driver)?, &at, may_read)?;
        let shared = ViewShared {
            versions: [first, second].map(|copies| Version::new(driver, copies)),
            // SAFETY: the host may read and write it, as the import has granted, and nothing else here has this one.
            control: Arc::new(unsafe { Control::new(control) }),
            holds: Mutex::default(),
            near,
            driver: driver.clone(),
            len: len as usize,
            link: Arc::new(link),
        };
        Ok(Self {
            shared: Arc::new(shared),
            elements: PhantomData,
        })
    }
}

impl<T> ReplicatedView<T> {
    /// Returns the newest version in the copy near to a GPU or to the CPUs of a node, as [`Replicated::local`] does: among
    /// the copies to which the import's options give it access.
    ///
    /// # Errors
    /// As [`Replicated::local`]; [`System`](Error::System) if the other process keeps changing its epoch.
    pub fn local(&self, who: impl Into<Location>) -> Result<Replica<T>> {
        self.shared.driver.expect_this_process("replicated data")?;
        let place = self.shared.near.place(who.into())?;
        Ok(Replica::new(Arc::new(self.shared.hold()?), place))
    }

    /// Returns the number of the newest version.
    pub fn epoch(&self) -> u64 {
        self.shared.control.current().load(SeqCst)
    }

    /// Returns the number of elements: at least 1.
    pub fn len(&self) -> usize {
        self.shared.len
    }

    /// Returns `false`: there is at least one element.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns whether the other process has dropped its data or has ended, so that no new version will come.
    pub fn is_alone(&self) -> bool {
        self.shared.link.is_cut()
    }
}

/// Reads the text of another process: the size of an element, the number of elements, and of places.
fn read(text: &str) -> Result<(u64, u64, u64)> {
    match numbers(KIND, text) {
        Some([element, len, places]) if len > 0 && (1..=MAX_PLACES).contains(&places) => {
            Ok((element, len, places))
        }
        _ => Err(refused("the other process sent another kind of text")),
    }
}

/// Receives what comes behind the text: as many copies of so many bytes, the control page, and the link.
///
/// Each is imported before the next comes: the sender may wait until its fds are taken. Those after one that is refused are
/// dropped, so that the channel stays usable.
#[track_caller]
fn receive_all(
    driver: &Driver,
    channel: &mut Channel,
    options: &ImportOptions,
    (bytes, count): (Result<u64>, u64),
) -> egmem_share::Result<(Vec<ImportedBuffer>, ImportedBuffer, Link)> {
    let host = ImportOptions::new().access_by([] as [Location; 0]);
    let host = host.access(Location::Host, Access::ReadWrite);
    let host = host.or_called_at(Site::here());
    let (copies, control, link) = channel.together(|channel| {
        let mut copies = bytes.clone().map(|_| Vec::new());
        for _ in 0..count {
            let offer = channel.receive()?.read_only();
            if let (Ok(list), Ok(bytes)) = (&mut copies, &bytes) {
                let copy = check(&offer, |len| len == *bytes)
                    .and_then(|()| offer.import(driver, options.clone()));
                match copy {
                    Ok(copy) => list.push(copy),
                    Err(error) => copies = Err(error),
                }
            }
        }
        let offer = channel.receive()?;
        let control = check(&offer, |len| len >= Control::<ImportedBuffer>::BYTES)
            .and_then(|()| offer.import(driver, host));
        Ok((copies, control, channel.receive_link()?))
    })?;
    Ok((copies?, control?, link))
}

/// Returns whether the import gives a GPU, or the CPU, access to a copy.
fn is_readable(copy: &ImportedBuffer, who: Location) -> Result<bool> {
    if let Location::Device(gpu) = who {
        let access = copy.gpu_access(gpu, Engine::Kernel, 0, copy.len())?;
        return Ok(access >= Access::Read);
    }
    match copy.cpu() {
        Err(error) if !matches!(error, Error::NotAccessible { .. }) => Err(error),
        cpu => Ok(cpu.is_ok()),
    }
}

/// Refuses memory of another size, and a window on larger memory.
fn check(offer: &Offer, is_right: impl Fn(u64) -> bool) -> Result<()> {
    let Description { len, offset, .. } = *offer.description();
    if !is_right(len) || offset.is_some() {
        return Err(refused("its copies have other sizes"));
    }
    Ok(())
}

fn refused(why: impl Into<String>) -> Error {
    Error::invalid("replicated data", why.into())
}

impl<T> fmt::Debug for ReplicatedView<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplicatedView")
            .field("len", &self.len())
            .field("epoch", &self.epoch())
            .finish_non_exhaustive()
    }
}
