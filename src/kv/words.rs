//! A tier's memory as words that several processes read and write at once; hashes of such words, and lists whose lengths they
//! decide.

use std::cell::Cell;
use std::hint::black_box;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::driver::{Access, Location};
use crate::memory::CpuView;
use crate::{MemoryError, Result};

/// Words of 8 bytes by their offset. Each access is checked and atomic, so a word that another process has made wrong leads
/// nowhere outside of the tier.
///
/// Stores happen in the order of the program, because each is a release: a process that is killed has made all stores up to some
/// one, and none after it. (The processor completes the stores of a process that it interrupts.)
pub(crate) struct Words<'a> {
    start: *mut u8,
    len: u64,
    /// A word had a value that no tier writes.
    is_damaged: Cell<bool>,
    memory: PhantomData<&'a AtomicU64>,
}

impl<'a> Words<'a> {
    /// # Errors
    /// [`NotAccessible`](crate::MemoryError::NotAccessible) for memory that the CPU may only read;
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for memory that does not begin at a word.
    #[inline(always)]
    pub(crate) fn new(view: &CpuView<'a>) -> Result<Self> {
        let start = view.as_ptr();
        if !view.is_writable() || !start.addr().is_multiple_of(8) {
            return Err(refused(view).into());
        }
        Ok(Self {
            start,
            len: view.len(),
            is_damaged: Cell::new(false),
            memory: PhantomData,
        })
    }

    /// The words of a test's own memory.
    #[cfg(test)]
    pub(crate) fn over(words: &'a [AtomicU64]) -> Self {
        Self {
            start: words.as_ptr().cast_mut().cast(),
            len: 8 * words.len() as u64,
            is_damaged: Cell::new(false),
            memory: PhantomData,
        }
    }

    #[inline]
    fn word(&self, at: u64) -> Option<&'a AtomicU64> {
        if !at.is_multiple_of(8) || at >= self.len & !7 {
            self.damage();
            return None;
        }
        // SAFETY: the view's memory is mapped and writable for 'a; the word is inside of it and aligned, as just checked;
        // everything else accesses it atomically, as whole words.
        Some(unsafe { AtomicU64::from_ptr(self.start.add(at as usize).cast()) })
    }

    /// Returns a word; 0 outside of the memory.
    #[inline]
    pub(crate) fn get(&self, at: u64) -> u64 {
        self.word(at).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// Has the processor read a word, wherever it may lie.
    #[inline]
    pub(crate) fn read_ahead(&self, at: u64) {
        if at < self.len & !7 {
            black_box(self.get(at));
        }
    }

    /// Sets a word; outside of the memory nothing.
    #[inline]
    pub(crate) fn put(&self, at: u64, value: u64) {
        if is_killed() {
            return;
        }
        if let Some(word) = self.word(at) {
            word.store(value, Ordering::Release);
        }
    }

    /// Adds to a word, of which this process is the only writer at this moment.
    #[inline]
    pub(crate) fn add(&self, at: u64, more: i64) {
        self.put(at, self.get(at).wrapping_add_signed(more));
    }

    /// Sets a word if it has the value `found`. Returns whether it had.
    #[inline]
    pub(crate) fn swap(&self, at: u64, found: u64, value: u64) -> bool {
        let Some(word) = self.word(at).filter(|_| !is_killed()) else {
            return false;
        };
        let (after, failed) = (Ordering::AcqRel, Ordering::Acquire);
        word.compare_exchange(found, value, after, failed).is_ok()
    }

    /// Returns the low half of a word, for the kernel alone: whole words are accessed everywhere else.
    pub(crate) fn low_half(&self, at: u64) -> Option<&'a AtomicU32> {
        let word: *mut u32 = self.word(at)?.as_ptr().cast();
        // SAFETY: the half lies in the word, and is aligned.
        Some(unsafe { AtomicU32::from_ptr(word.add(usize::from(cfg!(target_endian = "big")))) })
    }

    /// Notes that a word has a value that no tier writes.
    pub(crate) fn damage(&self) {
        self.is_damaged.set(true);
    }

    /// Notes damage unless a value is as it must be. Returns whether it is.
    pub(crate) fn expect(&self, is_right: bool) -> bool {
        if !is_right {
            self.damage();
        }
        is_right
    }

    /// Returns whether damage was noted since the last call.
    pub(crate) fn take_damage(&self) -> bool {
        self.is_damaged.take()
    }
}

#[cold]
fn refused(view: &CpuView<'_>) -> MemoryError {
    if view.is_writable() {
        return MemoryError::invalid("memory", "it does not begin at a multiple of 8");
    }
    MemoryError::not_accessible(Location::Host, Access::Read, Access::ReadWrite)
}

/// Returns the two halves of a word, the low one first.
#[inline]
pub(crate) const fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// Returns the word of two halves.
#[inline]
pub(crate) const fn pair(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

#[cfg(not(test))]
const fn is_killed() -> bool {
    false
}

#[cfg(test)]
use kill::is_killed;

/// Ends of a process at any store.
#[cfg(test)]
pub(crate) mod kill {
    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    thread_local! {
        static LEFT: Cell<Option<u64>> = const { Cell::new(None) };
    }

    struct Killed;

    /// Runs `work` in a process that is killed after `stores` stores. `None` if it was.
    pub(crate) fn after<T>(stores: u64, work: impl FnOnce() -> T) -> Option<T> {
        LEFT.set(Some(stores));
        let done = catch_unwind(AssertUnwindSafe(work));
        LEFT.set(None);
        match done {
            Ok(done) => Some(done),
            Err(end) if end.is::<Killed>() => None,
            Err(panic) => resume_unwind(panic),
        }
    }

    /// Counts a store. Returns whether it must not happen: of values that are dropped by a killed process.
    pub(super) fn is_killed() -> bool {
        match LEFT.get() {
            None => false,
            Some(0) if std::thread::panicking() => true,
            Some(0) => resume_unwind(Box::new(Killed)),
            Some(left) => {
                LEFT.set(Some(left - 1));
                false
            }
        }
    }
}

/// Returns the hash of words: FNV-1a over whole words, mixed after each.
pub(crate) fn hash(words: &[u64]) -> u64 {
    words.iter().fold(0xcbf2_9ce4_8422_2325, |hash, word| {
        let hash = (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        hash ^ hash >> 29
    })
}

/// Returns an empty list with room for `count` values.
///
/// # Errors
/// [`System`](crate::MemoryError::System) if the process cannot allocate that much memory.
pub(crate) fn list_for<T>(count: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    list.try_reserve_exact(count).map_err(no_room)?;
    Ok(list)
}

/// Makes room for `more` values in a list that grows.
///
/// # Errors
/// As [`list_for`].
pub(crate) fn make_room_in<T>(list: &mut Vec<T>, more: usize) -> Result<()> {
    Ok(list.try_reserve(more).map_err(no_room)?)
}

fn no_room(error: impl ToString) -> MemoryError {
    MemoryError::failed("allocating the table of a tier", error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_much_is_an_error() {
        assert!(list_for::<u64>(usize::MAX / 8).is_err());
        let mut list = list_for::<u64>(9).unwrap();
        assert!(list.capacity() >= 9);
        assert!(make_room_in(&mut list, usize::MAX / 8).is_err());
        make_room_in(&mut list, 99).unwrap();
        assert!(list.capacity() >= 99);
    }
}
