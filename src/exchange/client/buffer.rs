//! Leases as their holder sees them, leased memory before and after its import, and the proof that the two ends of a fabric handle see the same bytes.
//!
//! A successful import does not show that one end's writes reach the other: a fabric handle can be opened
//! although the link behind it is down. So each end writes a random word into unused padding, and the other
//! looks for it; this end by a GPU if there is one that may read the memory, because the CPU may have another way.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use tokio::sync::watch;
use tokio::time::timeout;

use super::session::{ClientSession, OffThread, SessionUser, run_blocking};
use crate::driver::{Access, DevicePtr, Driver, HandleType, Location, ShareableHandle, random};
use crate::ledger::{Party, Site};
use crate::memory::{
    AccessChecks, CpuView, Memory, access_checks, cpu_accessors, impl_cpu_memory, memory_through,
};
use crate::per_driver::lock;
use crate::pinned::PinnedHost;
use crate::protocol::{Answer, Ask, Probed};
use crate::share::{Description, ImportOptions, ImportedBuffer, InstanceId, Origin, PartHandles};
use crate::{End, Error, MemoryResult, Owner, PeerName, Refusal, Result, Stream};

/// A lease, and the server's details about its memory.
#[derive(Debug)]
pub(super) struct Grant {
    pub(super) lease: ClientLease,
    pub(super) name: String,
    /// The place of the word for probes.
    pub(super) probe: Option<u64>,
    pub(super) no_fabric: Option<String>,
    pub(super) owner: Owner,
}

/// Memory that is leased and not imported yet; dropping it releases the lease.
#[derive(Debug)]
pub struct Leased {
    // In this order: the handles are closed before the lease is released.
    pub(super) handles: PartHandles,
    pub(super) grant: Grant,
    pub(super) description: Description,
    pub(super) via: HandleType,
    /// The program's call, for the ledger.
    pub(super) site: Site,
}

impl Leased {
    /// Returns the name's owner, as the server reports it.
    pub const fn owner(&self) -> &Owner {
        &self.grant.owner
    }

    /// Returns the exporter's description of the memory.
    pub const fn description(&self) -> &Description {
        &self.description
    }

    /// Returns the handles, one for each part: secrets. Code that imports them without
    /// [`import`](Self::import) unmaps the memory before this is dropped.
    pub fn handles(&self) -> &[ShareableHandle] {
        self.handles.here()
    }

    /// Returns the type of the handles.
    pub const fn via(&self) -> HandleType {
        self.via
    }

    /// Receives the fds that come through a queue, so that all are here.
    pub(super) async fn receive(mut self) -> Result<Self> {
        if !self.handles.here().is_empty() {
            return Ok(self);
        }
        // With the lease, which must not be released before the handles are closed.
        let receive = move || {
            let handles = std::mem::replace(&mut self.handles, Vec::new().into());
            self.handles = handles.all(self.description.parts.len())?.into();
            Ok(self)
        };
        run_blocking("receiving handles", receive).await?
    }

    /// Ends the lease, and waits until the exporter has recorded it. Code that imported the handles has
    /// unmapped the memory before.
    ///
    /// # Errors
    /// Those of [`RemoteBuffer::release`].
    ///
    /// # Cancel safety
    /// If dropped before completion, the lease ends anyway.
    pub async fn release(self) -> Result<()> {
        drop(self.handles);
        self.grant.lease.release(&self.grant.name).await
    }

    /// Imports the memory, maps and grants it.
    ///
    /// # Errors
    /// [`Error::Import`], which says at which end to look. The lease is released then.
    ///
    /// # Cancel safety
    /// If dropped before completion, nothing stays leased or mapped.
    pub async fn import(self, options: ImportOptions) -> Result<RemoteBuffer> {
        let session = self.grant.lease.session.0.clone();
        let driver = session.driver()?.clone();
        let terms = session.terms();
        let server = Party {
            pid: terms.pid,
            name: terms.peer.clone(),
        };
        let mut options = options.sender(server).or_label(self.grant.name.as_str());
        options = options.or_called_at(self.site.clone());
        // Imports are shared with others of the same server, if that is authenticated.
        options = match &terms.server {
            PeerName::Certificate(name) | PeerName::Spiffe(name) => {
                options.origin(Origin::Peer(name.to_string()))
            }
            PeerName::User(uid) => options.origin(Origin::User(*uid)),
            _ => options,
        };
        let work = move || {
            let (handles, grant, via) = (self.handles, self.grant, self.via);
            // On every path the lease is dropped after the import.
            let imported = options.import_from(&driver, &self.description, handles);
            let memory = imported.map_err(|error| Error::Import {
                what: format!("'{}'", grant.name),
                peer: terms.peer.clone(),
                end: End::of(&error, via, terms.welcome.boot == session.dial.boot),
                source: Box::new(error),
            })?;
            let proof = Proof::none(match via {
                HandleType::PosixFd => "a POSIX fd names memory of this machine",
                HandleType::Fabric => "no probe was asked for",
            });
            Ok(RemoteBuffer {
                memory,
                grant,
                proof,
            })
        };
        // The driver takes up to seconds for many gigabytes.
        run_blocking("an import", work).await?
    }
}

/// Another process's memory, mapped here, with a lease on it: the exporter knows that this process holds it.
///
/// Dropping it unmaps the memory and then releases the lease, in the background. GPU work that uses the
/// memory must have finished before. Unmapping takes the driver's time, about 15 ms for a gigabyte, which
/// [`release`](Self::release) spends on another thread.
#[derive(Debug)]
pub struct RemoteBuffer {
    // In this order: unmapped first, then released.
    pub(super) memory: ImportedBuffer,
    pub(super) grant: Grant,
    pub(super) proof: Proof,
}

impl RemoteBuffer {
    /// Returns the name that it was fetched by.
    pub fn name(&self) -> &str {
        &self.grant.name
    }

    /// Returns the name's owner, as the server reports it. See
    /// [`FetchOptions::expect_owner`](super::FetchOptions::expect_owner).
    pub const fn owner(&self) -> &Owner {
        &self.grant.owner
    }

    /// Returns the exporter's description of it.
    pub fn description(&self) -> &Description {
        self.memory.description()
    }

    /// Returns the type of handle that it was imported through.
    pub fn via(&self) -> HandleType {
        self.memory.via()
    }

    /// Returns why it was not imported by fabric handle, if this machine, the exporter's or the fabric does
    /// not support that. `None` if it was, or if a POSIX fd was simply shorter.
    pub fn no_fabric(&self) -> Option<&str> {
        self.grant.no_fabric.as_deref()
    }

    /// Returns the result of the probe at the fetch, or [why nothing was proved](Proof::why_not).
    pub const fn proved(&self) -> &Proof {
        &self.proof
    }

    /// Returns the state of the lease.
    pub fn state(&self) -> LeaseState {
        self.grant.lease.seen().borrow_and_update().clone()
    }

    /// Waits for a state that neither this nor [`state`](Self::state) has returned yet; once the lease is
    /// [`Lost`](LeaseState::Lost), it returns at once.
    ///
    /// # Cancel safety
    /// No state is missed.
    pub async fn changed(&self) -> LeaseState {
        let mut state = self.grant.lease.states();
        if state.has_changed().is_ok_and(|changed| !changed) && !state.borrow().is_lost() {
            // An error means that the session has forgotten the lease; the last state stands.
            let _ = state.changed().await;
        }
        self.state()
    }

    /// Unmaps the memory, ends the lease, and waits until the exporter has recorded it. GPU work that uses
    /// the memory must have finished.
    ///
    /// # Errors
    /// Why the lease was [`Lost`](LeaseState::Lost) before, or the connection while waiting;
    /// [`TimedOut`](crate::ShareError::TimedOut). The memory is unmapped anyway.
    ///
    /// # Cancel safety
    /// If dropped before completion, unmapping and releasing continue in the background.
    pub async fn release(self) -> Result<()> {
        let Self { memory, grant, .. } = self;
        let unmap = move || {
            drop(memory);
            grant
        };
        let grant = run_blocking("unmapping", unmap).await?;
        grant.lease.release(&grant.name).await
    }

    pub(super) fn session(&self) -> &Arc<ClientSession> {
        &self.grant.lease.session.0
    }

    /// Returns the access of `location`, as the driver reports it.
    ///
    /// # Errors
    /// As [`ImportedBuffer::access`].
    pub fn access(&self, location: impl Into<Location>) -> MemoryResult<Access> {
        self.memory.access(location)
    }

    /// Returns the CPU's view of the memory.
    ///
    /// # Errors
    /// [`NotAccessible`](crate::MemoryError::NotAccessible) unless the host may at least read.
    pub fn cpu(&self) -> MemoryResult<CpuView<'_>> {
        self.memory.cpu()
    }

    cpu_accessors!();

    /// Returns the address, the same for every GPU and, on a host node, for the CPU. It is valid in this
    /// process: another process has other addresses for the same memory.
    pub fn device_ptr(&self) -> DevicePtr {
        self.memory.device_ptr()
    }

    /// Returns the number of usable bytes.
    pub fn len(&self) -> u64 {
        self.memory.len()
    }

    /// Returns `false`: shared memory has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }
}

impl_cpu_memory!(RemoteBuffer);

// The import that it owns lives as long.
memory_through!(unsafe impl for RemoteBuffer, |this| this.memory);

/// The result of a probe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Proof {
    /// The processor of this end that words of the exporter reach: a GPU, or the CPU ([`Location::Host`]) where no GPU
    /// may read the memory. `None` if nothing was proved.
    pub by: Option<Location>,
    /// Whether this end wrote too, and the exporter found it; otherwise it may only read.
    pub both_ways: bool,
    /// Why nothing was proved, in that case.
    pub why_not: Option<String>,
}

impl Proof {
    fn none(why_not: &str) -> Self {
        Self {
            why_not: Some(why_not.into()),
            ..Self::default()
        }
    }
}

/// Proves memory that was imported by fabric handle, if its exporter has given a place for that. Where it fails or is given
/// up, another thread unmaps the memory.
pub(super) async fn prove(mut remote: RemoteBuffer) -> Result<RemoteBuffer> {
    let Some(at) = remote.grant.probe else {
        // With a remedy for its owner.
        remote.proof = Proof::none(if remote.description().is_window() {
            "a window on larger memory has no place for a probe"
        } else {
            "the exporter gave no place for a probe: all of the memory is in use \
             (`BufferOptions::room_for_probes` makes room), or its owner published it without probes"
        });
        return Ok(remote);
    };
    let begin = move || begin(&remote.memory, at).map(|begun| (remote, begun));
    let (mut remote, begun) = run_blocking("a probe", begin).await??;
    let Some((by, wrote)) = begun else {
        remote.proof = Proof::none("neither a GPU nor the CPU may read it here");
        return Ok(remote);
    };
    let (session, lease) = (Arc::clone(remote.session()), remote.grant.lease.lease);
    let mut kept = OffThread(Some(remote));
    let reply = session.request(Ask::Probe { lease }, session.timeout());
    let probed = match reply.await.map(|reply| reply.answer) {
        Ok(Answer::Probed(probed)) => Ok(Some(probed)),
        Ok(_) => Err(Error::protocol(
            session.peer(),
            "unexpected answer to a probe",
        )),
        Err(error) if error.refusal() == Some(&Refusal::Unsupported) => Ok(None),
        Err(error) => Err(error),
    };
    let finish = move || {
        let remote = kept.0.take();
        let mut remote = remote.ok_or_else(|| Error::failed("a probe", "it has no memory"))?;
        // On every path the memory is unmapped before this returns.
        let Some(probed) = probed? else {
            remote.proof = Proof::none("the exporter does not answer probes");
            return Ok(remote);
        };
        let read = get(&remote.memory, at, by)?;
        if let Some(detail) = mismatch(by, wrote, probed, read) {
            let (what, peer) = (format!("'{}'", remote.name()), session.peer());
            return Err(Error::DataPlane { what, peer, detail });
        }
        remote.proof = Proof {
            by: Some(by),
            both_ways: wrote.is_some(),
            why_not: None,
        };
        Ok(remote)
    };
    run_blocking("a probe", finish).await?
}

/// Chooses the processor, and writes a word with it if it may write. Returns both.
fn begin(memory: &ImportedBuffer, at: u64) -> Result<Option<(Location, Option<u64>)>> {
    let Some((by, access)) = processor(memory) else {
        return Ok(None);
    };
    if access != Access::ReadWrite {
        return Ok(Some((by, None)));
    }
    let word = random().map_err(|error| Error::system("reading random bytes", &error))?;
    let word = u64::from_le_bytes(word);
    put(memory, at, by, word)?;
    Ok(Some((by, Some(word))))
}

/// Returns the first GPU that may read the memory, otherwise the CPU, with its access.
fn processor(memory: &ImportedBuffer) -> Option<(Location, Access)> {
    // A GPU's word comes from host memory: the driver would write it with the CPU.
    let most = if memory.is_read_only_for_cpu(0, memory.len()) {
        Access::Read
    } else {
        Access::ReadWrite
    };
    let gpus = 0..memory.driver().device_count().unwrap_or(0);
    let gpu = gpus.map(Location::Device).find_map(|by| {
        let access = memory.access(by).ok()?.min(most);
        (access != Access::None).then_some((by, access))
    });
    gpu.or_else(|| {
        memory.cpu().ok()?;
        // Queries the node: for the host as a whole the driver returns the least of several answers.
        let node = match memory.location() {
            node @ Location::HostNuma(_) => node,
            _ => Location::HostNuma(0),
        };
        let access = memory.access(node).ok()?;
        (access != Access::None).then_some((Location::Host, access))
    })
}

/// Describes the fault, if there is one. Shows no word, because random words mean nothing.
fn mismatch(by: Location, wrote: Option<u64>, probed: Probed, read: u64) -> Option<String> {
    let there = wrote.is_none_or(|wrote| wrote == probed.found);
    let here = read == probed.wrote;
    let fault = match (there, here) {
        (true, true) => return None,
        (false, true) => format!("a word that {by} writes here does not arrive there"),
        (true, false) => format!("a word written there does not reach {by} here"),
        (false, false) => format!("words of {by} and of the exporter do not reach the other"),
    };
    Some(fault)
}

fn put(memory: &ImportedBuffer, at: u64, by: Location, word: u64) -> MemoryResult<()> {
    match by {
        Location::Device(gpu) => {
            let own = PinnedHost::new(memory.driver(), gpu, 8)?;
            own.cpu().put(0, word)?;
            Stream::new(memory.driver(), gpu)?.copy(&Padded(memory), at, &own, 0, 8)
        }
        _ => memory.put_word(at, word),
    }
}

fn get(memory: &ImportedBuffer, at: u64, by: Location) -> MemoryResult<u64> {
    match by {
        Location::Device(gpu) => {
            let own = PinnedHost::new(memory.driver(), gpu, 8)?;
            own.cpu().put(0, 0_u64)?;
            Stream::new(memory.driver(), gpu)?.copy(&own, 0, &Padded(memory), at, 8)?;
            own.cpu().get(0)
        }
        _ => memory.word(at),
    }
}

/// Imported memory with its padding.
struct Padded<'a>(&'a ImportedBuffer);

// The mapping that it borrows lives as long, and has the padding too.
access_checks!(unsafe impl for Padded<'_>, |this| *this.0);

impl Memory for Padded<'_> {
    fn driver(&self) -> &Driver {
        self.0.driver()
    }
    fn device_ptr(&self) -> DevicePtr {
        self.0.device_ptr()
    }
    fn len(&self) -> u64 {
        self.0.description().padded()
    }
    fn location(&self) -> Location {
        self.0.location()
    }
}

/// The state of a lease.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum LeaseState {
    /// The exporter knows that this process holds the memory, and keeps it.
    Held,
    /// The exporter recalls the memory: unmap and release it.
    Withdrawing {
        /// When the exporter stops waiting.
        until: Instant,
    },
    /// The exporter is gone, or no longer keeps the memory for this process. This is final. The mapping can
    /// still be read and written, but nothing guarantees its contents.
    Lost(Error),
}

impl LeaseState {
    /// Returns whether the lease is lost.
    pub const fn is_lost(&self) -> bool {
        matches!(self, Self::Lost(_))
    }
}

impl fmt::Display for LeaseState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Held => f.write_str("held"),
            Self::Withdrawing { .. } => f.write_str("being withdrawn"),
            Self::Lost(error) => write!(f, "lost: {error}"),
        }
    }
}

/// The session's state of a lease.
pub(super) struct HeldLease {
    pub(super) name: String,
    /// Dropped once the lease is released.
    pub(super) state: watch::Sender<LeaseState>,
}

impl HeldLease {
    /// Sets the state, unless the lease is lost, which is final.
    pub(super) fn set_state(&self, to: LeaseState) {
        self.state.send_if_modified(|now| {
            let changes = !now.is_lost() && *now != to;
            if changes {
                *now = to;
            }
            changes
        });
    }
}

/// A lease of this client, released when dropped; it keeps the connection open until then.
#[derive(Debug)]
pub(super) struct ClientLease {
    pub(super) session: SessionUser,
    pub(super) instance: InstanceId,
    pub(super) lease: u64,
    /// Under a lock, for the version that was last returned.
    pub(super) state: Mutex<watch::Receiver<LeaseState>>,
}

impl ClientLease {
    pub(super) fn seen(&self) -> MutexGuard<'_, watch::Receiver<LeaseState>> {
        lock(&self.state)
    }

    /// Returns a receiver of the lease's states of its own; the last state stays after the release.
    pub(super) fn states(&self) -> watch::Receiver<LeaseState> {
        self.seen().clone()
    }

    /// Ends the lease, and waits until the server has recorded it.
    ///
    /// # Errors
    /// Why the lease was lost, or its release refused; [`TimedOut`](crate::ShareError::TimedOut).
    pub(super) async fn release(self, name: &str) -> Result<()> {
        let mut states = self.states();
        // Keeps the connection until the answer.
        let user = self.session.clone();
        drop(self);
        let released = async { while states.changed().await.is_ok() {} };
        let within = user.0.timeout();
        if timeout(within, released).await.is_err() {
            return Err(Error::timed_out(format!("the release of '{name}'"), within));
        }
        match &*states.borrow() {
            LeaseState::Lost(error) => Err(error.clone()),
            _ => Ok(()),
        }
    }
}

impl Drop for ClientLease {
    fn drop(&mut self) {
        self.session.0.release(self.instance, self.lease);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_that_does_not_arrive_is_told_by_direction() {
        let probed = |found, wrote| Probed { found, wrote };
        assert_eq!(mismatch(Location::Host, Some(1), probed(1, 2), 2), None);
        assert_eq!(mismatch(Location::Host, None, probed(7, 2), 2), None);
        for (wrote, probed, read, word) in [
            (Some(1), probed(9, 2), 2, "does not arrive there"),
            (Some(1), probed(1, 2), 9, "GPU 3 here"),
            (Some(1), probed(9, 2), 9, "the other"),
            (None, probed(0, 2), 9, "GPU 3 here"),
        ] {
            let detail = mismatch(Location::Device(3), wrote, probed, read).unwrap();
            assert!(detail.contains(word), "{detail}");
        }
    }
}
