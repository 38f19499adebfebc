//! A group as one rank sees it.

use std::fmt;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Mutex, broadcast, watch};
use tokio::task::JoinHandle;

use super::gathered::GatheredMemory;
use super::handles::Passing;
use super::host::Hosted;
use super::kept::Calls;
use super::leave::{leave_behind, say_leave, unmapped};
use super::member::slot;
use super::options::Map;
use super::state::{GroupState, follow, server_lost};
use crate::client::{Notified, discard};
use crate::driver::{Access, HandleType};
use crate::protocol::{Answer, Leave};
use crate::share::{Description, ImportedBuffer, Shared};
use crate::{Address, Client, Error, MemoryError, Refusal, Result};

/// A group that this process has joined as one of its ranks.
///
/// Dropping it unmaps the others' memory first, then the rank leaves in the background. Other ranks may still
/// map this rank's memory at that time; [`leave`](Self::leave) waits for them.
///
/// If this rank started the server, the server [lingers](super::GroupOptions::linger) after a drop, as a task of
/// the runtime that the group was joined in. When that runtime or the process ends, the server ends too, and the
/// other ranks lose it, but not their mappings. Only `leave` waits for all ranks.
///
/// ```
/// use egmem::driver::NodeId;
/// use egmem::exchange::Address;
/// use egmem::exchange::group::{Admission, Group};
/// use egmem::{Buffer, Driver, Machine};
///
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let folder = std::env::temp_dir().join(format!("egmem-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder).unwrap();
/// # let address: Address = format!("unix:{}/group", folder.display()).parse()?;
/// // In each process, with a rank of its own:
/// let rank = async |rank: u32| {
///     let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
///     let buffer = Buffer::on(NodeId(0)).bytes(1 << 20).shareable().allocate(&driver)?;
///     buffer.put(0, rank)?;
///     let group = Group::options("job-7", rank, 2, address.clone(), Admission::SamePeer)
///         .memory(buffer)
///         .join(&driver)
///         .await?;
///     let other = 1 - rank;
///     assert_eq!(group.rank(other)?.get::<u32>(0)?, other);
///     let within = std::time::Duration::from_secs(10);
///     group.barrier(within).await?; // both have read
///     let all = group.gather(&[rank as u8], within).await?;
///     assert_eq!(all, [[0], [1]]);
///     group.leave(within).await
/// };
/// let (first, second) = tokio::join!(rank(0), rank(1));
/// # std::fs::remove_dir_all(&folder).unwrap();
/// first.and(second)
/// # }).unwrap();
/// ```
pub struct Group {
    pub(super) joined: Joined,
    pub(super) state: watch::Receiver<GroupState>,
    /// Barriers and gathers run one after another.
    pub(super) calls: Mutex<Calls>,
    /// `None` once the rank has left.
    pub(super) client: Option<Client>,
    watcher: JoinHandle<()>,
    /// The unmapping of the others' memory; this rank has left only when it is done.
    unmapping: Option<JoinHandle<()>>,
    /// Ended last, so that the others learn that this rank has left.
    hosted: Option<Hosted>,
    /// Runs the background work after a drop.
    runtime: Handle,
}

/// The answer that a rank gets when it has joined.
pub(super) struct Joined {
    pub name: String,
    pub rank: u32,
    pub passing: Passing,
    pub leave: Leave,
    pub members: GatheredMemory,
    pub access: Access,
    pub map: Map,
    pub linger: Duration,
}

impl Group {
    pub(super) fn new(
        joined: Joined,
        client: Client,
        news: broadcast::Receiver<Notified>,
        hosted: Option<Hosted>,
    ) -> Self {
        let (sender, state) = watch::channel(GroupState::default());
        Self {
            watcher: tokio::spawn(follow(news, sender, joined.leave.round)),
            joined,
            calls: Mutex::default(),
            state,
            client: Some(client),
            unmapping: None,
            hosted,
            runtime: Handle::current(),
        }
    }

    /// Returns the group's name.
    pub fn name(&self) -> &str {
        &self.joined.name
    }

    /// Returns this process's rank.
    pub const fn own_rank(&self) -> u32 {
        self.joined.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> u32 {
        self.joined.members.size()
    }

    /// Returns the handle type by which all ranks share their memory.
    pub const fn via(&self) -> HandleType {
        self.joined.passing.via
    }

    /// Returns this rank's own memory.
    pub const fn memory(&self) -> Option<&Shared> {
        self.joined.members.memory()
    }

    /// Returns the addresses of the group's server, if this rank started it.
    pub fn addresses(&self) -> Vec<Address> {
        self.hosted
            .as_ref()
            .map_or_else(Vec::new, Hosted::addresses)
    }

    /// Returns a rank's peer name, as the group's server verified it.
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a rank that does not exist.
    pub fn peer(&self, rank: u32) -> Result<&str> {
        Ok(slot(&self.joined.members.slots, rank)?.peer())
    }

    /// Returns a rank's description of its memory; `None` if it brought none.
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a rank that does not exist.
    pub fn description(&self, rank: u32) -> Result<Option<&Description>> {
        self.joined.members.description(rank)
    }

    /// Returns a rank's mapped memory. With [`Map::Lazy`], and for this rank's own memory,
    /// the first call maps it, which takes as long as the driver needs.
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a rank that does not exist or that brought
    /// no memory; [`Error::Import`], the same in every call.
    #[track_caller]
    pub fn rank(&self, rank: u32) -> Result<&ImportedBuffer> {
        self.joined.members.rank(rank)
    }

    /// Returns how long this rank's server lingers after a drop; `None` if this rank started no server.
    pub(crate) fn lingers(&self) -> Option<Duration> {
        self.hosted.as_ref().map(|_| self.joined.linger)
    }

    /// Returns the state of the group. A rank that dies counts as lost when the server's lease for it has run
    /// out.
    pub fn state(&self) -> GroupState {
        self.state.borrow().clone()
    }

    /// Waits until the state has changed since the last call, and returns it.
    ///
    /// # Cancel safety
    ///
    /// No change is lost.
    pub async fn changed(&mut self) -> GroupState {
        if self.state.changed().await.is_err() {
            // The watcher has ended, so the state is final.
            std::future::pending::<()>().await;
        }
        self.state.borrow_and_update().clone()
    }

    /// Unmaps the other ranks' memory and waits until all ranks have done so. Then only this process uses the
    /// memory that it brought, and the call returns it. Clones of imported buffers must be dropped by the
    /// caller before.
    ///
    /// The rank that started the server ends it after the others have gone, or when `within` is over.
    ///
    /// # Errors
    ///
    /// [`StillHeld`](crate::MemoryError::StillHeld) with the ranks that have not left in time,
    /// [`PeerLost`](crate::ShareError::PeerLost) with those that were lost before, or with the group's server.
    /// In each case this rank has left.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped early, the rank leaves as a dropped group does.
    pub async fn leave(mut self, within: Duration) -> super::Result<Option<Shared>> {
        let members = std::mem::take(&mut self.joined.members.slots);
        let unmapping = tokio::task::spawn_blocking(move || drop(members));
        let unmapped = self.unmapping.insert(unmapping).await;
        self.unmapping = None;
        // Taken only after this call: if the future is dropped meanwhile, the server lingers.
        let Some(client) = self.client.clone() else {
            return Ok(self.joined.members.own.clone());
        };
        let answer = tokio::select! {
            biased;
            answer = say_leave(&client, &self.joined.leave, within) => answer,
            // No server is left to wait for.
            error = server_lost(self.state.clone()) => Err(error),
        };
        self.client = None;
        discard(std::mem::take(&mut self.calls.get_mut().kept)).await;
        let peer = client.peer();
        client.close().await;
        if let Some(hosted) = self.hosted.take() {
            hosted.close().await;
        }
        unmapped.map_err(|error| Error::failed("unmapping", error.to_string()))?;
        match answer? {
            Answer::Done => Ok(self.joined.members.own.clone()),
            Answer::Incomplete(why) => {
                let ranks = why.ranks.iter().map(|rank| format!("rank {rank}"));
                let holders: Vec<_> = ranks.collect();
                let group = &self.joined.name;
                if Refusal::from_word(&why.reason) == Refusal::TimedOut {
                    let name = format!("the memory of group '{group}'");
                    return Err(MemoryError::StillHeld { name, holders }.into());
                }
                let why = format!("before leaving group '{group}'");
                Err(Error::peer_lost(holders.join(", "), why).into())
            }
            _ => Err(Error::protocol(peer, "unexpected answer to a rank that leaves").into()),
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.watcher.abort();
        // Unmap first.
        self.joined.members.slots.clear();
        let Some(client) = self.client.take() else {
            return;
        };
        let leave = self.joined.leave.clone();
        let unmapping = self.unmapping.take();
        let Some(hosted) = self.hosted.take() else {
            return leave_behind(&self.runtime, client, leave, unmapping);
        };
        let linger = self.joined.linger;
        self.runtime.spawn(async move {
            unmapped(unmapping).await;
            // Answered when all ranks have left or are lost.
            let answer = say_leave(&client, &leave, linger).await;
            tracing::debug!(group = leave.group, ?answer, "a dropped rank's server ends");
            client.close().await;
            hosted.close().await;
        });
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("name", &self.joined.name)
            .field("rank", &self.joined.rank)
            .field("size", &self.size())
            .field("via", &self.joined.passing.via)
            .field("state", &*self.state.borrow())
            .finish_non_exhaustive()
    }
}
