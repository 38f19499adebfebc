//! How much memory each place has and how much of it is in use; how often a memory is exported, imported and mapped for CPUs,
//! over all processes.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use super::Machine;
use super::memory::{Memory, open_again};
use crate::fork::Generation;
use crate::{Location, random};

/// The machine's memories. Counters are independent of the simulator's lock, so that memory that dies late (a
/// mapping outlives its handle) returns its bytes wherever it dies.
#[derive(Debug, Default)]
pub(super) struct Capacity(Vec<Arc<Place>>);

#[derive(Debug)]
struct Place {
    /// A host node or a GPU.
    location: Location,
    total: u64,
    used: AtomicU64,
}

impl Capacity {
    pub fn of(machine: &Machine) -> Self {
        let nodes = machine.nodes.iter();
        let nodes = nodes.map(|node| (Location::HostNuma(node.id), node.memory));
        let gpus = machine.gpus.iter().zip(0..);
        let gpus = gpus.map(|(gpu, ordinal)| (Location::Device(ordinal), gpu.memory));
        let place = |(location, total)| {
            let used = AtomicU64::new(0);
            Arc::new(Place {
                location,
                total,
                used,
            })
        };
        Self(nodes.chain(gpus).map(place).collect())
    }

    /// Returns the free bytes at a location; for the host as a whole, the sum over its nodes.
    pub fn free(&self, location: Location) -> u64 {
        let free = self.at(location).map(|place| place.free());
        free.fold(0, u64::saturating_add)
    }

    /// Returns the most that any place of a location could ever hold.
    pub fn largest(&self, location: Location) -> u64 {
        let totals = self.at(location).map(|place| place.total);
        totals.max().unwrap_or(0)
    }

    /// Takes `bytes` at a location; for the host as a whole, on the node with the most free.
    pub fn take(&self, location: Location, bytes: u64) -> Option<Charge> {
        let place = self.at(location).max_by_key(|place| place.free())?;
        let more = |used: u64| used.checked_add(bytes).filter(|&used| used <= place.total);
        let order = Ordering::Relaxed;
        place.used.fetch_update(order, order, more).ok()?;
        let place = Arc::clone(place);
        Some(Charge { place, bytes })
    }

    fn at(&self, location: Location) -> impl Iterator<Item = &Arc<Place>> {
        self.0.iter().filter(move |place| match location {
            Location::Host | Location::HostNumaCurrent => place.location.is_host(),
            _ => place.location == location,
        })
    }
}

impl Place {
    fn free(&self) -> u64 {
        self.total - self.used.load(Ordering::Relaxed)
    }
}

/// Bytes taken; returned when dropped.
#[derive(Debug)]
pub(super) struct Charge {
    place: Arc<Place>,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.place.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The first byte to lock: no memory is as large.
const FIRST: i64 = 1 << 62;
/// How often to try for an unlocked byte; the first try almost always succeeds.
const TRIES: usize = 8;

/// The bytes that one open file locks, from a random one on, so that two files do not collide.
#[derive(Debug)]
pub(super) struct Bytes(AtomicI64);

impl Bytes {
    pub fn new() -> io::Result<Self> {
        let start = i64::from_ne_bytes(random()?) & (FIRST / 2 - 1);
        Ok(Self(AtomicI64::new(FIRST + start)))
    }

    /// Locks the next byte, through `file`. `None` if the system has no such locks or no room for one: the
    /// reference is then not counted.
    pub fn lock(&self, file: &File) -> Option<i64> {
        (0..TRIES).find_map(|_| {
            let at = self.0.fetch_add(1, Ordering::Relaxed);
            let locked = control(file, libc::F_OFD_SETLK, libc::F_WRLCK, at, 1);
            locked.is_ok().then_some(at)
        })
    }
}

/// An import or a CPU mapping, counted until dropped.
#[derive(Debug)]
pub(super) struct Counted {
    memory: Arc<Memory>,
    at: Option<i64>,
    /// A forked child's lock is its parent's.
    born: Generation,
}

impl Counted {
    /// Counts a reference of this process, even beyond the limit.
    pub fn new(memory: &Arc<Memory>) -> Self {
        Self {
            memory: Arc::clone(memory),
            at: memory.bytes.lock(memory.file()),
            born: Generation::current(),
        }
    }

    /// Counts a reference unless there are `limit` already; if processes race for the last one, all may fail.
    pub fn within(memory: &Arc<Memory>, limit: Option<u32>) -> Option<Self> {
        let counted = Self::new(memory);
        let over = |limit: u32| exceeds(memory, limit.into()).unwrap_or(false);
        (!limit.is_some_and(over)).then_some(counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if let Some(at) = self.at.filter(|_| self.born.is_current()) {
            // If this fails, closing the file releases the lock.
            let _ = control(self.memory.file(), libc::F_OFD_SETLK, libc::F_UNLCK, at, 1);
        }
    }
}

/// Returns whether a memory has more than `limit` references.
fn exceeds(memory: &Memory, limit: u64) -> io::Result<bool> {
    // The query omits an open file's own locks, so a fresh open file asks.
    let asker = open_again(memory.file())?;
    let mut open = vec![(FIRST, i64::MAX)];
    let mut found = 0;
    while let Some((start, end)) = open.pop() {
        if start >= end {
            continue;
        }
        // Any lock there; the kernel merges adjacent locks of one file.
        let lock = control(&asker, libc::F_OFD_GETLK, libc::F_WRLCK, start, end - start)?;
        if i32::from(lock.l_type) == libc::F_UNLCK {
            continue;
        }
        let last = match lock.l_len {
            0 => i64::MAX, // 0 means to the end of the file
            len => lock.l_start.saturating_add(len),
        };
        let (first, last) = (lock.l_start.max(start), last.min(end));
        found += last.saturating_sub(first).max(1) as u64;
        if found > limit {
            return Ok(true);
        }
        open.extend([(start, first), (last, end)]);
    }
    Ok(false)
}

/// Makes a call about locks of `len` bytes of a file from `start` on; returns what it answers.
fn control(file: &File, call: i32, kind: i32, start: i64, len: i64) -> io::Result<libc::flock> {
    let mut range = libc::flock {
        l_type: kind as _,
        l_whence: libc::SEEK_SET as _,
        l_start: start,
        l_len: len,
        l_pid: 0,
    };
    // SAFETY: the fd is open, and `range` lives during the call, which reads it and may write it.
    match unsafe { libc::fcntl(file.as_raw_fd(), call, &raw mut range) } {
        0 => Ok(range),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use proptest::prelude::*;

    use super::*;
    use crate::HandleTypes;
    use crate::sim::memory::Purpose;

    proptest! {
        #[test]
        fn what_is_taken_and_given_back_adds_up(
            steps in prop::collection::vec((0_i32..5, 0_u64..200 << 30, any::<bool>()), 0..60),
        ) {
            let capacity = Capacity::of(&Machine::gh200x4());
            let mut charges: Vec<(i32, Charge)> = Vec::new();
            let mut used = [0_u64; 4];
            for (node, bytes, give_back) in steps {
                if give_back && !charges.is_empty() {
                    let (node, charge) = charges.remove(0);
                    used[node as usize] -= charge.bytes;
                } else {
                    let free = capacity.free(Location::HostNuma(node));
                    let taken = capacity.take(Location::HostNuma(node), bytes);
                    prop_assert_eq!(taken.is_some(), node < 4 && bytes <= free);
                    if let Some(charge) = taken {
                        used[node as usize] += bytes;
                        charges.push((node, charge));
                    }
                }
                for (node, used) in (0..).zip(used) {
                    prop_assert_eq!(capacity.free(Location::HostNuma(node)), (120 << 30) - used);
                }
            }
            drop(charges);
            prop_assert_eq!(capacity.free(Location::Host), 480 << 30);
        }
    }

    #[test]
    fn threads_cannot_take_more_than_there_is() {
        let capacity = Capacity::of(&Machine::gh200());
        let kept = std::sync::Mutex::new(Vec::new());
        let taken: usize = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        (0..200)
                            .map_while(|_| capacity.take(Location::Device(0), 1 << 30))
                            .map(|charge| kept.lock().unwrap().push(charge))
                            .count()
                    })
                })
                .collect();
            workers.into_iter().map(|w| w.join().unwrap()).sum()
        });
        assert_eq!(taken, 96);
    }

    fn memory() -> Arc<Memory> {
        let types = HandleTypes::POSIX_FD;
        let memory = Memory::create(Purpose::Physical, Location::Host, types, 2 << 20, None);
        Arc::new(memory.unwrap())
    }

    fn count(memory: &Memory) -> u64 {
        (0..).find(|&n| !exceeds(memory, n).unwrap()).unwrap()
    }

    #[test]
    fn references_count_together_until_they_end() {
        let memory = memory();
        assert_eq!(count(&memory), 0);
        let mut counted: Vec<_> = (0..5).map(|_| Counted::new(&memory)).collect();
        assert_eq!(count(&memory), 5);
        counted.remove(2);
        assert_eq!(count(&memory), 4);
        let export = memory.export().unwrap();
        assert_eq!(count(&memory), 5);
        // A second open file, as in another process.
        let import = Memory::import(export.as_fd(), Purpose::Physical).unwrap();
        let import = Arc::new(import);
        assert_eq!(count(&memory), 5, "an import counts, a look does not");
        let theirs = Counted::new(&import);
        assert_eq!((count(&memory), count(&import)), (6, 6));
        drop((theirs, counted));
        assert_eq!(count(&import), 1);
    }

    #[test]
    fn a_duplicate_is_no_reference_and_separate_exports_are() {
        let memory = memory();
        let first = memory.export().unwrap();
        let copies: Vec<_> = (0..20).map(|_| first.try_clone().unwrap()).collect();
        assert_eq!(count(&memory), 1);
        drop(first);
        assert_eq!(count(&memory), 1, "the copies keep it");
        let more: Vec<_> = (0..20).map(|_| memory.export().unwrap()).collect();
        assert_eq!(count(&memory), 21);
        drop((copies, more));
    }

    #[test]
    fn the_limit_is_the_last_that_is_granted() {
        let memory = memory();
        let _export = memory.export().unwrap();
        let mut counted: Vec<_> =
            std::iter::from_fn(|| Counted::within(&memory, Some(7))).collect();
        assert_eq!(counted.len(), 6);
        assert_eq!(count(&memory), 7, "what is refused is not counted");
        assert!(Counted::within(&memory, None).is_some());
        counted.pop();
        assert!(Counted::within(&memory, Some(7)).is_some());
    }
}
