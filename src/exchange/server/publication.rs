//! Published memory, its slots for probe words in the padding, its holders, and whether a process of this machine still runs,
//! which `/proc` tells: no fd is kept for it.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use egmem_core::host::ProcessStat;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use tokio::sync::Notify;
use tokio_util::task::TaskTracker;

use super::quota::Counted;
use crate::driver::{HandleType, HandleTypes, ShareableHandle};
use crate::per_driver::lock;
use crate::protocol::{Entry, Secret};
use crate::share::fd::has_ended;
use crate::share::{Description, Shared, best_handle_types};
use crate::transport::Connection;
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

/// The most bytes of a program's name.
const MAX_PROGRAM: usize = 15;

/// The state of a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HolderState {
    /// It holds the memory and is alive.
    Held,
    /// It has been asked to release the memory.
    Withdrawing,
    /// It fell silent, and its lease has ended: it may still have the memory mapped.
    Expired,
}

/// A holder of published memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The peer.
    pub peer: PeerName,
    /// The lease.
    pub lease: u64,
    /// When it got the lease.
    pub since: Instant,
    /// Its state.
    pub state: HolderState,
    /// Over a Unix socket: the process.
    pub process: Option<HolderProcess>,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.process {
            Some(process) => write!(f, "{}, {process}", self.peer),
            None => self.peer.fmt(f),
        }
    }
}

/// Describes holders, for a message.
pub(super) fn describe(holders: &[Holder], more: usize) -> Vec<String> {
    const SHOWN: usize = 16;
    let now = Instant::now();
    let one = |holder: &Holder| {
        let seconds = now.saturating_duration_since(holder.since).as_secs_f32();
        match holder.state {
            HolderState::Expired => format!(
                "{holder} (for {seconds:.1} s; silent, its lease has ended: it may still have it mapped)"
            ),
            _ => format!("{holder} (for {seconds:.1} s)"),
        }
    };
    let mut list: Vec<_> = holders.iter().take(SHOWN).map(one).collect();
    let rest = holders.len().saturating_sub(SHOWN) + more;
    if rest > 0 {
        list.push(format!("{rest} more"));
    }
    list
}

/// A process of this machine that holds something, for display: after its end its number may be reused.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct HolderProcess {
    /// Its number in the server's PID namespace.
    pub pid: u32,
    /// The program's name, as the process reports it: at most 15 ASCII letters, digits and signs, `?` for
    /// others.
    pub program: Arc<str>,
    /// Its start, in ticks since the machine started: a later process with the same number has another.
    started: u64,
}

impl fmt::Display for HolderProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({})", self.pid, self.program)
    }
}

impl HolderProcess {
    /// Returns the process at the other end of a Unix socket. `None` if it is not visible, or if it has ended since:
    /// another may have the socket now.
    pub(super) fn of_peer(connection: &mut Connection) -> Option<Self> {
        let pidfd = connection.process.take();
        let process = Self::of(connection.pid?)?;
        // While it runs its number is not reused.
        (!pidfd.as_ref().is_some_and(has_ended)).then_some(process)
    }

    /// Returns the process with that number now; `None` if `/proc` does not show it.
    pub(super) fn of(pid: u32) -> Option<Self> {
        let text = std::fs::read_to_string(path(pid)).ok()?;
        let stat = ProcessStat::parse(&text)?;
        Some(Self {
            pid,
            program: program(stat.name),
            started: stat.started,
        })
    }

    /// Returns one of many processes that do not exist.
    #[cfg(test)]
    pub(super) fn without(started: u32) -> Self {
        Self {
            pid: i32::MAX as u32,
            program: "".into(),
            started: started.into(),
        }
    }

    /// Returns whether it has certainly ended. If that cannot be found out, it counts as running.
    pub(super) fn has_ended(&self) -> bool {
        match std::fs::read_to_string(path(self.pid)) {
            Ok(text) => ProcessStat::parse(&text).is_some_and(|now| self.has_ended_by(&now)),
            // `/proc` may hide other users' processes (hidepid), and this one may have changed its user
            // since. A test signal finds all.
            Err(_) => self.is_unknown(),
        }
    }

    /// Returns whether no process has its number.
    fn is_unknown(&self) -> bool {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        pid.is_some_and(|pid| test_kill_process(pid) == Err(Errno::SRCH))
    }

    fn has_ended_by(&self, now: &ProcessStat<'_>) -> bool {
        now.has_ended() || now.started != self.started
    }
}

/// Returns a program's name, which the process chooses itself, for display.
fn program(name: &str) -> Arc<str> {
    let shown = |c: char| if matches!(c, ' '..='~') { c } else { '?' };
    let shown: String = name.chars().take(MAX_PROGRAM).map(shown).collect();
    shown.into()
}

/// Returns the path for its first thread, which stands for the process: for `/proc/PID/stat` QEMU's user mode
/// invents one, with the start time of the thread that reads it.
fn path(pid: u32) -> String {
    format!("/proc/{pid}/task/{pid}/stat")
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

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

    const LINE: &str = "42 (a) b (c)) S 1 42 42 0 -1 4194560 9 0 0 0 1 2 3 4 20 0 7 0 123456 8 9";

    fn process(pid: u32, started: u64) -> HolderProcess {
        HolderProcess {
            pid,
            started,
            ..HolderProcess::without(0)
        }
    }

    #[test]
    fn another_start_or_a_zombie_without_threads_has_ended() {
        let stat = ProcessStat::parse(LINE).unwrap();
        let process = process(42, 123_456);
        for (state, threads, started, ended) in [
            ('S', 7, 123_456, false),
            ('T', 7, 123_456, false),
            ('Z', 7, 123_456, false),
            ('Z', 1, 123_456, true),
            ('S', 7, 123_457, true),
        ] {
            let now = ProcessStat {
                state,
                threads,
                started,
                ..stat
            };
            assert_eq!(process.has_ended_by(&now), ended, "{now:?}");
        }
    }

    #[test]
    fn names_of_programs_can_be_printed() {
        for (own, name) in [
            ("a) b (c)", "a) b (c)"),
            ("a\u{1b}[2J\n\u{e9}", "a?[2J??"),
            ("0123456789abcdefgh", "0123456789abcde"),
            ("", ""),
        ] {
            assert_eq!(&*program(own), name);
        }
    }

    #[test]
    fn a_child_runs_until_it_has_ended() {
        let own = HolderProcess::of(std::process::id()).unwrap();
        assert!(!own.has_ended());
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let running = HolderProcess::of(child.id()).unwrap();
        assert!(!running.has_ended());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(running.has_ended());
        // One whose number is reused.
        let before = process(own.pid, own.started - 1);
        assert!(before.has_ended());
    }

    #[test]
    fn a_process_that_proc_hides_is_not_taken_for_ended() {
        // Its own, and process 1, which belongs to another user: a signal could not be sent.
        for pid in [std::process::id(), 1] {
            let hidden = process(pid, 0);
            assert!(!hidden.is_unknown(), "{pid}");
        }
        for pid in [0, u32::MAX] {
            let none = process(pid, 0);
            assert!(!none.is_unknown(), "{pid} is no number of a process");
        }
        // Linux has at most 2^22.
        let none = HolderProcess::without(0);
        assert!(none.is_unknown() && none.has_ended());
    }
}
