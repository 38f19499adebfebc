//! Growable vectors in other processes, which follow their growth.
//!
//! ```text
//! exporter:  Growable ─▶ GrowableExport ── send ──┐  how many elements there are, and the new chunks
//!                                                 │  Unix socket (share::Channel)
//! importer:  GrowableView ◀── receive, follow ────┘  one range of addresses, reserved at the start
//! ```
//!
//! The exporter decides when it sends: after it has added elements. An update has the new chunks, each once, and the number of
//! elements; so the importer's addresses never change either. A chunk's handle grants all of the chunk, also the elements that
//! come later, and to write: give it only to peers that may have that. A channel checks the other end
//! ([`Peers`](egmem_share::Peers)); a process that it does not admit gets nothing.

mod view;

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use egmem_share::{Channel, Exports, Holds, Result, Shared};

use crate::Error;
use crate::driver::{Access, DevicePtr, HandleType, HandleTypes};
use crate::growable::Growable;
use crate::vmm::{MappedPart, PhysicalMemory};

use view::{MAX_CHUNKS, Update};

pub use view::GrowableView;

/// The chunks of a [`Growable`] that other processes map. It exports each once, for any number of them.
///
/// The vector gives no chunk back, and changes the access to none, that was sent while this lives. An importer keeps
/// the memory alive even afterwards.
///
/// ```
/// use egmem::driver::{Access, NodeId};
/// use egmem::shapes::sharing::{GrowableExport, GrowableView};
/// use egmem::shapes::Growable;
/// use egmem::share::{Channel, ImportOptions, Peers};
/// use egmem::{Driver, Machine};
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// # let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
/// # let channel = Channel::new(one, &Peers::same_user())?;
/// # let mut others_channel = Channel::new(other, &Peers::same_user())?;
/// // One process, which has accepted a connection as `channel`:
/// let options = Growable::<u64>::on(NodeId(0)).max_len(1 << 30).shareable();
/// let mut samples = options.create(&driver)?;
/// let mut export = GrowableExport::new(&samples);
/// let mut reader = export.follower(channel, Access::Read);
/// samples.push(7)?;
/// export.send(&samples, &mut reader)?;
///
/// // Another process:
/// let mut view = GrowableView::<u64>::receive(&driver, &mut others_channel, ImportOptions::new())?;
/// assert_eq!((view.len(), view.get(0)?), (1, 7));
///
/// // The first again, and later the other:
/// samples.extend_from_slice(&[8; 1 << 20])?;
/// export.send(&samples, &mut reader)?;
/// view.follow(&mut others_channel)?;
/// assert_eq!((view.len(), view.get(1 << 20)?), ((1 << 20) + 1, 8));
/// # Ok::<(), egmem::share::Error>(())
/// ```
#[derive(Debug)]
pub struct GrowableExport<T> {
    chunks: Vec<Arc<SharedPart<MappedPart>>>,
    /// Which export this is, for its followers.
    identity: Arc<()>,
    start: DevicePtr,
    max_len: usize,
    elements: PhantomData<fn() -> T>,
}

/// Memory that a part of a shape is.
pub(crate) trait HasPhysical: fmt::Debug + Send + Sync {
    fn physical(&self) -> &PhysicalMemory;
}

impl HasPhysical for PhysicalMemory {
    fn physical(&self) -> &PhysicalMemory {
        self
    }
}

impl HasPhysical for MappedPart {
    fn physical(&self) -> &PhysicalMemory {
        self.memory()
    }
}

/// A part of a shape and its handles.
#[derive(Debug)]
pub(crate) struct SharedPart<M> {
    // In this order: the exports are dropped before the memory.
    exports: Exports,
    part: Arc<M>,
}

impl<M> SharedPart<M> {
    pub(crate) fn new(part: Arc<M>) -> Arc<Self> {
        let exports = Exports::default();
        Arc::new(Self { exports, part })
    }
}

impl<M: HasPhysical> Holds for SharedPart<M> {
    fn physical(&self) -> &PhysicalMemory {
        self.part.physical()
    }
    fn exports(&self) -> &Exports {
        &self.exports
    }
}

/// Returns parts to be sent, whose handles exist from then on: no message begins that cannot be sent whole.
pub(crate) fn share<M: HasPhysical + 'static>(parts: &[Arc<SharedPart<M>>]) -> Result<Shared> {
    let bytes = parts.iter().map(|part| part.physical().size().padded());
    let bytes = bytes.sum();
    let parts = parts.iter().map(|part| Arc::clone(part) as Arc<dyn Holds>);
    let shared = Shared::from_held(parts.collect(), 0, bytes, ())?;
    shared.export(HandleType::PosixFd)?;
    Ok(shared)
}

/// Another process that follows a vector, and how much of it was sent to that process.
#[derive(Debug)]
pub struct Follower {
    channel: Channel,
    access: Access,
    /// The export that it follows.
    export: Arc<()>,
    /// Chunks sent, and their bytes.
    sent: (usize, u64),
}

impl Follower {
    /// Returns the channel, for messages of the program's own between two updates.
    pub const fn channel(&mut self) -> &mut Channel {
        &mut self.channel
    }
}

impl<T> GrowableExport<T> {
    /// Returns the export of a vector. Nothing of the vector was sent yet.
    pub fn new(vector: &Growable<T>) -> Self {
        Self {
            chunks: Vec::new(),
            identity: Arc::default(),
            start: vector.device_ptr(),
            max_len: vector.max_len(),
            elements: PhantomData,
        }
    }

    /// Returns a follower that sends to the process at the other end of a channel. That process is asked to map with
    /// `access` only, but a handle itself allows everything: a process that must not write must not get one.
    pub fn follower(&self, channel: Channel, access: Access) -> Follower {
        Follower {
            channel,
            access,
            export: Arc::clone(&self.identity),
            sent: (0, 0),
        }
    }

    /// Sends the number of elements to a follower, and the chunks that it has not got.
    ///
    /// # Errors
    /// [`InvalidArgument`](Error::InvalidArgument) if the vector was created without
    /// [`shareable`](crate::GrowableOptions::shareable), or is not the exported one, or the follower is of another
    /// export: nothing is sent then. Those of [`Channel::send`]: the channel is closed then, but not if handles cannot be made; the
    /// next call goes on from there.
    pub fn send(&mut self, vector: &Growable<T>, to: &mut Follower) -> Result<()> {
        self.take(vector, to)?;
        loop {
            let (sent, before) = to.sent;
            let new = &self.chunks[sent..];
            let batch = &new[..new.len().min(MAX_CHUNKS)];
            let shared = match batch.is_empty() {
                true => None,
                false => Some(share(batch)?),
            };
            let more = new.len() > batch.len();
            let update = Update {
                element: size_of::<T>() as u64,
                max_len: vector.max_len() as u64,
                len: vector.len() as u64,
                before,
                chunks: batch.len() as u64,
                more: u64::from(more),
            };
            to.channel.together(|channel| {
                channel.send_text(&update.to_string())?;
                shared
                    .iter()
                    .try_for_each(|shared| channel.send(shared, to.access))
            })?;
            if let Some(shared) = shared {
                to.sent = (sent + batch.len(), before + shared.len());
            }
            if !more {
                return Ok(());
            }
        }
    }

    /// Takes the vector's new chunks.
    fn take(&mut self, vector: &Growable<T>, to: &Follower) -> Result<()> {
        let all = vector.chunk_list();
        let wrong = |why: &str| Err(Error::invalid("growable vector", why).into());
        // Chunks that were sent never leave their vector.
        let known = self.chunks.iter().zip(&all);
        let are_known = known
            .into_iter()
            .all(|(old, new)| Arc::ptr_eq(&old.part, new));
        let is_it = (vector.device_ptr(), vector.max_len()) == (self.start, self.max_len);
        if !is_it || !are_known || all.len() < self.chunks.len() {
            return wrong("it is not the one that is exported");
        }
        if !Arc::ptr_eq(&to.export, &self.identity) {
            return wrong("the follower is of another export");
        }
        let is_shareable = |chunk: &Arc<MappedPart>| {
            let types = chunk.memory().props().handle_types;
            types.contains(HandleTypes::POSIX_FD)
        };
        if !all.iter().all(is_shareable) {
            return wrong("it was created without `shareable`");
        }
        let new = all.into_iter().skip(self.chunks.len());
        self.chunks.extend(new.map(SharedPart::new));
        Ok(())
    }
}
