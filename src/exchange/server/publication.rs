//! Published memory, and the slots for probe words in its padding.

use std::collections::{BTreeSet, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use tokio::sync::Notify;
use tokio_util::task::TaskTracker;

use super::quota::Counted;
use crate::driver::{HandleType, HandleTypes, ShareableHandle};
use crate::per_driver::lock;
use crate::protocol::{Entry, Secret};
use crate::share::{Description, Shared, best_handle_types};
use crate::{Error, Owner, PeerList, PeerName, Result};

/// The part that does not change while it is published.
#[derive(Debug)]
pub(super) struct Publication {
    /// Unique in a server: a name that is published again is another publication.
    pub id: u64,
    pub name: Arc<str>,
    /// `None` once it was withdrawn: the caller of the withdrawal has it.
    pub memory: Mutex<Option<Memory>>,
    pub owner: Owner,
    /// How many parts the memory has.
    pub parts: usize,
    pub handle_types: HandleTypes,
    /// Fetches that are not decided yet, and handles of this process that pin the memory until they are closed.
    pub exports: TaskTracker,
    /// Woken when a holder is gone.
    pub changed: Notify,
    /// Whether a process that held it has ended without releasing it: it may have passed the memory on.
    pub left_by_dead: AtomicBool,
    /// The holders when the server ended, if any: the server no longer tracks them.
    pub left_held: OnceLock<Vec<String>>,
}

/// Memory, and handles of it.
#[derive(Debug)]
pub(super) struct Memory {
    shared: Shared,
    /// Exported once: every grantee gets the same handles, or learns why there are none.
    fabric: Option<Result<Arc<[Secret]>, String>>,
}

impl From<Shared> for Memory {
    fn from(shared: Shared) -> Self {
        let fabric = None;
        Self { shared, fabric }
    }
}

/// The part that changes.
#[derive(Debug)]
pub(super) struct Registered {
    pub publication: Arc<Publication>,
    /// Without its parts, which nothing counts, once only holders are tracked.
    pub description: Arc<Description>,
    /// The peers that may import it.
    pub peers: PeerList,
    /// It is being withdrawn: new fetches no longer find it.
    pub closing: bool,
    /// The deadline for its holders.
    pub until: Option<Instant>,
    pub probes: ProbeSlots,
    pub holders: Holders,
    /// Counts it for the peer that owns it.
    pub counted: Option<Counted>,
}

/// The leases of a publication.
#[derive(Debug, Default)]
pub(super) struct Holders {
    pub live: BTreeSet<u64>,
    /// In the order in which they expired.
    pub expired: VecDeque<u64>,
    /// Expired leases that are only counted.
    pub more: usize,
}

impl Registered {
    /// Returns whether a peer can see it now.
    pub fn is_visible_to(&self, peer: &PeerName) -> bool {
        !self.closing && self.peers.admits(peer)
    }

    /// Returns its entry.
    pub fn entry(&self) -> Entry {
        Entry {
            name: self.publication.name.to_string(),
            memory: Description::clone(&self.description),
            leases: u32::try_from(self.holders.live.len()).unwrap_or(u32::MAX),
            owner: self.publication.owner.clone(),
        }
    }
}

impl Publication {
    /// Waits for the exports, once nothing is granted any more.
    pub async fn exports_end(&self) {
        self.exports.close();
        self.exports.wait().await;
    }

    /// Returns the memory.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) once it was withdrawn.
    pub fn shared(&self) -> Result<Shared> {
        let memory = lock(&self.memory);
        let shared = memory.as_ref().map(|memory| memory.shared.clone());
        shared.ok_or_else(withdrawn)
    }

    /// Takes the memory out of the publication, which forgets its handles.
    pub fn take(&self) -> Result<Shared> {
        let taken = lock(&self.memory).take();
        taken.map(|memory| memory.shared).ok_or_else(withdrawn)
    }

    /// Returns what [`export_fabric`](Self::export_fabric) does, if that is known.
    pub fn fabric(&self) -> Option<Result<Arc<[Secret]>, String>> {
        lock(&self.memory).as_ref()?.fabric.clone()
    }

    /// Returns its fabric handles, or the reason why there are none. The first call asks the driver.
    pub fn export_fabric(&self) -> Result<Arc<[Secret]>, String> {
        if let Some(known) = self.fabric() {
            return known;
        }
        let shared = self.shared().map_err(|error| error.to_string())?;
        let has_fabric = self.handle_types.contains(HandleType::Fabric.into());
        let found = if has_fabric {
            let secrets = Secret::of_fabric(&shared);
            secrets.map(Arc::from).map_err(|error| error.to_string())
        } else {
            Err(made_without_fabric(&shared))
        };
        // If two callers do this at once, either result is good. A driver's error may pass.
        if (found.is_ok() || !has_fabric)
            && let Some(memory) = &mut *lock(&self.memory)
        {
            memory.fabric = Some(found.clone());
        }
        found
    }

    /// Exports the fds of the first `count` parts. It calls the driver.
    pub fn export_fds(&self, count: usize) -> Result<Vec<OwnedFd>> {
        let handles = self.shared()?.export_parts(0..count, HandleType::PosixFd)?;
        let fds = handles.into_iter().filter_map(|handle| match handle {
            ShareableHandle::PosixFd(fd) => Some(fd),
            ShareableHandle::Fabric(_) => None,
        });
        Ok(fds.collect())
    }
}

/// Returns why memory has no fabric handles that was made without them: perhaps it could not be allocated with them.
pub(crate) fn made_without_fabric(memory: &Shared) -> String {
    let best = best_handle_types(memory.driver(), memory.location());
    let why = best.map(|best| best.no_fabric).unwrap_or_else(Some);
    let why = why.map_or_else(String::new, |why| format!(": {why}"));
    format!("its memory was made without fabric handles{why}")
}

fn withdrawn() -> Error {
    let why = "it was withdrawn, which gave its memory back";
    Error::invalid("publication", why)
}

/// The most slots of one memory: the rest of its padding is not used.
const MAX_SLOTS: u64 = 65_536;

/// Bytes of a word, and its alignment.
const WORD: u64 = 8;

/// The free slots for probe words: in the padding beyond a memory's usable bytes, one for each lease.
#[derive(Debug, Default)]
pub(super) struct ProbeSlots {
    first: u64,
    count: u64,
    /// ProbeSlots from here on were never used.
    fresh: u64,
    returned: BTreeSet<u64>,
}

impl ProbeSlots {
    /// Returns the slots between `len` and `padded`.
    pub fn between(len: u64, padded: u64) -> Self {
        let first = len.div_ceil(WORD).saturating_mul(WORD);
        Self {
            first,
            count: (padded.saturating_sub(first) / WORD).min(MAX_SLOTS),
            fresh: 0,
            returned: BTreeSet::new(),
        }
    }

    /// Takes a slot, in bytes from the memory's start; `None` if there is none left.
    pub fn take(&mut self) -> Option<u64> {
        let index = match self.returned.pop_first() {
            Some(index) => index,
            None if self.fresh < self.count => {
                self.fresh += 1;
                self.fresh - 1
            }
            None => return None,
        };
        Some(self.first + index * WORD)
    }

    /// Returns a slot.
    pub fn give_back(&mut self, slot: u64) {
        self.returned.insert((slot - self.first) / WORD);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_lie_in_the_padding_and_are_aligned() {
        let mut slots = ProbeSlots::between(13, 40);
        assert_eq!(slots.take(), Some(16));
        assert_eq!(slots.take(), Some(24));
        assert_eq!(slots.take(), Some(32));
        assert_eq!(slots.take(), None);
        slots.give_back(24);
        assert_eq!(slots.take(), Some(24));
        assert_eq!(slots.take(), None);
    }

    #[test]
    fn without_room_there_is_none() {
        for (len, padded) in [(40, 40), (33, 40), (39, 40), (u64::MAX, u64::MAX)] {
            assert_eq!(ProbeSlots::between(len, padded).take(), None, "{len}");
        }
        assert_eq!(ProbeSlots::between(32, 40).take(), Some(32));
    }
}
