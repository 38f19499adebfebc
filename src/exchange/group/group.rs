//! A rank's view of its group.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Mutex, broadcast, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::Admission;
use super::calls::Calls;
use super::host::Hosted;
use super::join::{leave_behind, unmapped};
use super::member::Slot;
use super::options::{GroupOptions, Map};
use crate::driver::{Access, Driver, HandleType};
use crate::exchange::client::Notified;
use crate::exchange::limits::deadline;
use crate::exchange::protocol::{Answer, Ask, Leave};
use crate::exchange::{Address, Client};
use crate::share::{Description, ImportOptions, ImportedBuffer, Shared};
use crate::{Error, Refusal, Result};

/// How a group stands.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct GroupState {
    /// Ranks that are gone without having left, in order. Their memory stays mapped here until it
    /// is dropped, but nobody looks after its bytes.
    pub lost: Vec<u32>,
    /// Why nothing more will be heard of the group's server; what is mapped stays mapped. To the
    /// other ranks this one is lost then.
    pub server_lost: Option<Error>,
}

/// A group that this process has joined as one of its ranks.
///
/// Dropped, its mappings end first, then the rank leaves in the background; the memory that it has
/// brought may still be mapped by others then. [`leave`](Self::leave) waits for them.
///
/// The server of a rank that has started it [lingers](GroupOptions::linger) after a drop, as a task
/// of the runtime that the group was joined in: where that runtime or the process ends, so does the
/// server, and the other ranks lose it, though not what they have mapped. Only `leave` is sure.
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
    pub(super) members: Arc<[Slot]>,
    name: String,
    rank: u32,
    via: HandleType,
    leave: Leave,
    memory: Option<Shared>,
    pub(super) access: Access,
    pub(super) map: Map,
    pub(super) driver: Driver,
    pub(super) import: ImportOptions,
    pub(super) state: watch::Receiver<GroupState>,
    /// Barriers and gathers take turns.
    pub(super) calls: Mutex<Calls>,
    /// `None` once the rank has left.
    pub(super) client: Option<Client>,
    watcher: JoinHandle<()>,
    /// The others' memory, being unmapped: until that is done this rank has not left.
    unmapping: Option<JoinHandle<()>>,
    /// Ended last: the others should hear that this rank has left.
    hosted: Option<Hosted>,
    linger: Duration,
    /// Where it goes on after a drop.
    runtime: Handle,
}

/// What a group is made of.
pub(super) struct Parts {
    pub name: String,
    pub rank: u32,
    pub via: HandleType,
    pub leave: Leave,
    pub members: Arc<[Slot]>,
    pub memory: Option<Shared>,
    pub access: Access,
    pub map: Map,
    pub driver: Driver,
    pub import: ImportOptions,
    pub linger: Duration,
    pub client: Client,
    pub news: broadcast::Receiver<Notified>,
}

impl Group {
    /// Options to join the group `name` as `rank` of `size` ranks, at `address`: rank 0 listens
    /// there, the others connect, and may come first. `admission` says which peers may be the other
    /// ranks.
    ///
    /// Between machines it is a TCP address, and [`security`](GroupOptions::security) is needed.
    /// On one machine a Unix socket does as well.
    pub fn options(
        name: impl Into<String>,
        rank: u32,
        size: u32,
        address: Address,
        admission: Admission,
    ) -> GroupOptions {
        GroupOptions::new(name.into(), rank, size, address, admission)
    }

    pub(super) fn new(parts: Parts, hosted: Option<Hosted>) -> Self {
        let (sender, state) = watch::channel(GroupState::default());
        let watcher = tokio::spawn(follow(parts.news, sender, parts.leave.round));
        Self {
            members: parts.members,
            name: parts.name,
            rank: parts.rank,
            via: parts.via,
            leave: parts.leave,
            memory: parts.memory,
            access: parts.access,
            map: parts.map,
            calls: Mutex::default(),
            driver: parts.driver,
            import: parts.import,
            state,
            client: Some(parts.client),
            watcher,
            unmapping: None,
            hosted,
            linger: parts.linger,
            runtime: Handle::current(),
        }
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// This process's rank.
    pub const fn own_rank(&self) -> u32 {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> u32 {
        u32::try_from(self.members.len()).unwrap_or(u32::MAX)
    }

    /// Which life of the group this is, as its server counts.
    pub(super) const fn round(&self) -> u64 {
        self.leave.round
    }

    /// How all ranks share their memory.
    pub const fn via(&self) -> HandleType {
        self.via
    }

    /// The memory that this rank has brought.
    pub const fn memory(&self) -> Option<&Shared> {
        self.memory.as_ref()
    }

    /// Where the group's server listens, if this rank has started it.
    pub fn addresses(&self) -> Vec<Address> {
        self.hosted
            .as_ref()
            .map(Hosted::addresses)
            .unwrap_or_default()
    }

    /// A rank's peer name, as the group's server knows it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a rank that there is not.
    pub fn peer(&self, rank: u32) -> Result<&str> {
        Ok(self.slot(rank)?.peer())
    }

    /// What a rank has said of its memory; `None` where it has brought none.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a rank that there is not.
    pub fn description(&self, rank: u32) -> Result<Option<&Description>> {
        Ok(self.slot(rank)?.memory())
    }

    /// A rank's memory, mapped. With [`Map::Lazy`](super::Map::Lazy), and for the own rank, it is
    /// mapped when this is first called, which takes as long as the driver does.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a rank that there is not or that has brought no memory;
    /// [`Error::Import`], the same at every call.
    pub fn rank(&self, rank: u32) -> Result<&ImportedBuffer> {
        self.slot(rank)?
            .map(rank as usize, &self.driver, &self.import)
    }

    /// How long the server that this rank has started lingers after a drop; `None` where it has
    /// started none.
    pub(crate) fn lingers(&self) -> Option<Duration> {
        self.hosted.as_ref().map(|_| self.linger)
    }

    fn slot(&self, rank: u32) -> Result<&Slot> {
        self.members
            .get(rank as usize)
            .ok_or_else(|| Error::invalid("rank", format!("rank {rank} of {}", self.members.len())))
    }

    /// How the group stands. A rank that dies is known to be lost when the server's lease for it is
    /// over.
    pub fn state(&self) -> GroupState {
        self.state.borrow().clone()
    }

    /// Waits until the state has changed since this was last called, and returns it.
    ///
    /// # Cancel safety
    /// No change is lost.
    pub async fn changed(&mut self) -> GroupState {
        if self.state.changed().await.is_err() {
            // The watcher has told the last thing that there was to tell.
            std::future::pending::<()>().await;
        }
        self.state.borrow_and_update().clone()
    }

    /// Unmaps the other ranks' memory and waits until all ranks have done so: then nobody but this
    /// process uses what it has brought, and it gets that back. Clones of imported buffers are the
    /// caller's to drop before.
    ///
    /// The rank that has started the server ends it after the others have gone, or when `within` is
    /// over.
    ///
    /// # Errors
    /// [`Error::StillHeld`] with the ranks that have not left in time, [`Error::PeerLost`] with
    /// those that were lost before, or with the group's server. This rank has left all the same.
    ///
    /// # Cancel safety
    /// Dropped before it is done, the rank has left as one that is dropped.
    pub async fn leave(mut self, within: Duration) -> Result<Option<Shared>> {
        // The last owner unmaps, off the runtime.
        let members = std::mem::replace(&mut self.members, Arc::new([]));
        let unmapping = tokio::task::spawn_blocking(move || drop(members));
        let unmapped = self.unmapping.insert(unmapping).await;
        self.unmapping = None;
        // Taken only then: dropped meanwhile, the server lingers.
        let Some(client) = self.client.clone() else {
            return Ok(self.memory.clone());
        };
        let answer = tokio::select! {
            biased;
            answer = say_leave(&client, &self.leave, within) => answer,
            // There is nobody to wait for.
            error = server_lost(self.state.clone()) => Err(error),
        };
        self.client = None;
        let peer = client.peer();
        client.close().await;
        if let Some(hosted) = self.hosted.take() {
            hosted.close().await;
        }
        unmapped.map_err(|error| Error::failed("unmapping", error.to_string()))?;
        match answer? {
            Answer::Done(_) => Ok(self.memory.clone()),
            Answer::Incomplete(why) => {
                let ranks = why.ranks.iter().map(|rank| format!("rank {rank}"));
                Err(match Refusal::from_word(&why.reason) {
                    Refusal::TimedOut => Error::StillHeld {
                        name: format!("the memory of group '{}'", self.name),
                        holders: ranks.collect(),
                    },
                    _ => Error::PeerLost {
                        peer: ranks.collect::<Vec<_>>().join(", "),
                        why: format!("before leaving group '{}'", self.name),
                    },
                })
            }
            _ => Err(Error::Protocol {
                peer,
                detail: "another answer to a rank that leaves".into(),
            }),
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.watcher.abort();
        // First the mappings.
        self.members = Arc::new([]);
        let Some(client) = self.client.take() else {
            return;
        };
        let leave = self.leave.clone();
        let unmapping = self.unmapping.take();
        let Some(hosted) = self.hosted.take() else {
            return leave_behind(&self.runtime, client, leave, unmapping);
        };
        let linger = self.linger;
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
            .field("name", &self.name)
            .field("rank", &self.rank)
            .field("size", &self.members.len())
            .field("via", &self.via)
            .field("state", &*self.state.borrow())
            .finish_non_exhaustive()
    }
}

/// Leaves, and waits for the others; once more where the connection breaks meanwhile, since the
/// client goes on with the session.
async fn say_leave(client: &Client, leave: &Leave, within: Duration) -> Result<Answer> {
    let until = deadline(within);
    let ask = || {
        let left = until.saturating_duration_since(Instant::now());
        let ask = Ask::Leave(Leave {
            ms: left.as_millis().try_into().unwrap_or(u64::MAX),
            ..leave.clone()
        });
        client.call(ask, left.saturating_add(Duration::from_secs(5)))
    };
    let broke = match ask().await {
        Err(error @ Error::PeerLost { .. }) => error,
        answer => return answer,
    };
    match ask().await {
        // The server does not know any more whether all have left or some were lost.
        Err(Error::Refused {
            reason: Refusal::NotFound,
            ..
        }) => Err(broke),
        answer => answer,
    }
}

/// Waits until the server is lost.
pub(super) async fn server_lost(mut state: watch::Receiver<GroupState>) -> Error {
    loop {
        if let Some(error) = &state.borrow_and_update().server_lost {
            return error.clone();
        }
        if state.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Keeps the state.
async fn follow(
    mut news: broadcast::Receiver<Notified>,
    state: watch::Sender<GroupState>,
    round: u64,
) {
    loop {
        match news.recv().await {
            Ok(Notified::Lost(lost)) if lost.round == round => state.send_modify(|state| {
                state.lost.extend(&lost.ranks);
                state.lost.sort_unstable();
                state.lost.dedup();
            }),
            Ok(Notified::SessionLost(error)) => {
                // It is said often; the first word counts.
                state.send_if_modified(|state| {
                    let first = state.server_lost.is_none();
                    state
                        .server_lost
                        .get_or_insert_with(|| Arc::unwrap_or_clone(error));
                    first
                });
            }
            // The group itself has ended the connection.
            Ok(Notified::Over) | Err(broadcast::error::RecvError::Closed) => return,
            Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
        }
    }
}
