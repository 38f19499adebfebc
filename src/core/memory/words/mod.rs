//! The CPU's copies into and out of memory that other code may write meanwhile, in whole aligned words.
//!
//! # Why this is sound
//! A GPU, another process or another thread may write the same bytes at any time. A copy through references,
//! or by `ptr::copy`, would be a data race then, which is undefined behaviour.
//!
//! [`portable`] defines the alternative: one relaxed atomic access for each word of 8 bytes that is aligned
//! to 8. Relaxed accesses of the same words do not race with each other. A word that the range covers in part
//! is loaded whole, or changed by an atomic read-modify-write that leaves its other bytes as they are. The
//! other side of a copy is a slice that the caller has borrowed.
//!
//! On x86-64 and aarch64, long runs of whole words are moved by inline assembly. The compiler knows nothing
//! of an assembly block but its operands, so the block must have an effect that Rust code could have had.
//! Each block here has the effect of the loop of the same name in `portable`, in some order of the words;
//! relaxed accesses allow any order:
//! - The processor accesses each word of the shared side once, by an aligned access of 8 bytes, or of 16 by
//!   VMOVDQA, which holds two words. The manuals say that such an access is never split: Intel SDM volume 3,
//!   "Guaranteed Atomic Operations", for each step of a string instruction as for each plain or non-temporal
//!   move, and of 16 bytes where there is AVX; AMD APM volume 2, "Access Atomicity", the same; Arm ARM,
//!   "Requirements for single-copy atomicity", for each register of a pair.
//! - On x86-64, non-temporal stores alone are not ordered with other stores. A block that makes such stores to the
//!   shared side begins with SFENCE, so that a fence by Rust code before the block orders them after earlier stores.
//!   Each block with such stores ends with SFENCE, so that a release store by Rust code after the block orders them.
//!
//! libc's `memcpy` would be as fast, but C leaves a `memcpy` of memory that changes meanwhile undefined, and
//! nothing keeps its implementations from tearing words.
//!
//! Miri has no inline assembly and runs `portable`. The sanitizers do not see into assembly: they check the
//! words at both ends of a copy, and short copies.

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod aarch64;
mod portable;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86_64;

#[cfg(all(target_arch = "aarch64", not(miri)))]
use aarch64::{fill_words, load_words, store_words};
#[cfg(not(any(
    all(target_arch = "aarch64", not(miri)),
    all(target_arch = "x86_64", not(miri))
)))]
use portable::{fill_words, load_words, store_words};
#[cfg(all(target_arch = "x86_64", not(miri)))]
use x86_64::{fill_words, load_words, store_words};

use portable::{WORD, load_part, store_part};

/// Returns the bytes before the first multiple of 8, of `len` at `at`.
fn head(at: *const u8, len: usize) -> usize {
    ((at as usize).wrapping_neg() & (WORD - 1)).min(len)
}

/// Returns whether `len` bytes at `at` are whole words.
fn is_whole(at: *const u8, len: usize) -> bool {
    (at as usize | len).is_multiple_of(WORD)
}

/// Copies `from` to shared memory.
///
/// # Safety
/// The words of `to..to + from.len()` are mapped and writable.
pub(super) unsafe fn store(to: *mut u8, from: &[u8]) {
    // SAFETY: the caller's promise.
    unsafe {
        match is_whole(to, from.len()) {
            true => store_words(to, from),
            false => store_parts(to, from),
        }
    }
}

/// # Safety
/// As for [`store`].
#[inline(never)] // keeps `store` short
unsafe fn store_parts(to: *mut u8, from: &[u8]) {
    let (first, rest) = from.split_at(head(to, from.len()));
    let (middle, last) = rest.split_at(rest.len() & !(WORD - 1));
    // SAFETY: every word is one of the range; the head ends at a multiple of 8.
    unsafe {
        store_part(to, first);
        let to = to.add(first.len());
        store_words(to, middle);
        store_part(to.add(middle.len()), last);
    }
}

/// Copies from shared memory into `to`.
///
/// # Safety
/// The words of `from..from + to.len()` are mapped and readable.
pub(super) unsafe fn load(from: *mut u8, to: &mut [u8]) {
    // SAFETY: the caller's promise; this only loads, so read-only pages suffice.
    unsafe {
        match is_whole(from, to.len()) {
            true => load_words(from, to),
            false => load_parts(from, to),
        }
    }
}

/// # Safety
/// As for [`load`].
#[inline(never)] // keeps `load` short
unsafe fn load_parts(from: *mut u8, to: &mut [u8]) {
    let (first, rest) = to.split_at_mut(head(from, to.len()));
    let (middle, last) = rest.split_at_mut(rest.len() & !(WORD - 1));
    // SAFETY: as for `store_parts`.
    unsafe {
        load_part(from, first);
        let from = from.add(first.len());
        load_words(from, middle);
        load_part(from.add(middle.len()), last);
    }
}

/// Sets `len` bytes of shared memory to `byte`.
///
/// # Safety
/// The words of `to..to + len` are mapped and writable.
pub(super) unsafe fn fill(to: *mut u8, len: usize, byte: u8) {
    // SAFETY: the caller's promise.
    unsafe {
        match is_whole(to, len) {
            true => fill_words(to, len / WORD, u64::from_ne_bytes([byte; WORD])),
            false => fill_parts(to, len, byte),
        }
    }
}

/// # Safety
/// As for [`fill`].
#[inline(never)] // keeps `fill` short
unsafe fn fill_parts(to: *mut u8, len: usize, byte: u8) {
    let bytes = [byte; WORD];
    let first = head(to, len);
    let words = (len - first) / WORD;
    // SAFETY: as for `store_parts`.
    unsafe {
        store_part(to, &bytes[..first]);
        let to = to.add(first);
        fill_words(to, words, u64::from_ne_bytes(bytes));
        store_part(to.add(words * WORD), &bytes[..(len - first) % WORD]);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Long enough for every method of the processors except copies that bypass the caches.
    const LONGEST: usize = 3000;

    /// Returns bytes that differ from their neighbours and from those of `seed + 1`.
    fn bytes(len: usize, seed: usize) -> Vec<u8> {
        (0..len)
            .map(|at| (at * 7 + at / 256 + seed) as u8)
            .collect()
    }

    /// `len` bytes at a multiple of 64 and `offset`, with a line before and after them.
    struct Shared {
        lines: Vec<[u64; 8]>,
        offset: usize,
    }

    impl Shared {
        fn new(offset: usize) -> Self {
            let lines = vec![[u64::from_ne_bytes([0xee; 8]); 8]; LONGEST / 64 + 4];
            Self { lines, offset }
        }

        fn at(&mut self) -> *mut u8 {
            let first: *mut u8 = self.lines.as_mut_ptr().cast();
            let lead = (first as usize).wrapping_neg() & 63;
            // SAFETY: fewer than 64 bytes and at most a line more, of at least four.
            unsafe { first.add(lead + self.offset) }
        }

        /// Returns the bytes there, and whether the bytes beside them are untouched.
        fn split(&mut self, len: usize) -> (Vec<u8>, bool) {
            let skip = self.at() as usize - self.lines.as_ptr() as usize;
            let all: &[u8] = bytemuck::cast_slice(&self.lines);
            let beside = all[..skip].iter().chain(&all[skip + len..]);
            let untouched = beside.into_iter().all(|&byte| byte == 0xee);
            (all[skip..skip + len].to_vec(), untouched)
        }
    }

    proptest! {
        #[test]
        fn copies_are_exact_at_any_place(len in 0..LONGEST, shared in 0_usize..64, own in 0_usize..64) {
            let data = bytes(own + len, 1);
            let mut memory = Shared::new(shared);
            // SAFETY: the range lies in whole words of `memory`, which has no other user.
            unsafe { store(memory.at(), &data[own..]) };
            prop_assert_eq!(memory.split(len), (data[own..].to_vec(), true));

            let mut back = bytes(own + len + 64, 2);
            let mut expected = back.clone();
            expected[own..own + len].copy_from_slice(&data[own..]);
            // SAFETY: as above.
            unsafe { load(memory.at(), &mut back[own..own + len]) };
            prop_assert_eq!(back, expected);

            // SAFETY: as above.
            unsafe { fill(memory.at(), len, 7) };
            prop_assert_eq!(memory.split(len), (vec![7; len], true));
        }
    }

    /// One thread stores words with equal halves, and another never sees a word with different halves.
    #[test]
    fn words_are_never_torn() {
        const WORDS: usize = 256;
        let mut memory = vec![0_u64; WORDS];
        let to = memory.as_mut_ptr().expose_provenance();
        let at = || std::ptr::with_exposed_provenance_mut::<u8>(to);
        std::thread::scope(|scope| {
            let writer = scope.spawn(move || {
                for round in 1..=20_000_u64 {
                    let word = round << 32 | round;
                    // SAFETY: whole words, accessed only through this module.
                    unsafe {
                        match round % 2 {
                            0 => store(at(), bytemuck::cast_slice(&[word; WORDS])),
                            _ => fill(at(), WORDS * WORD, round as u8),
                        }
                    }
                }
            });
            while !writer.is_finished() {
                let mut seen = [0_u64; WORDS];
                // SAFETY: as above.
                unsafe { load(at(), bytemuck::cast_slice_mut(&mut seen)) };
                let torn = seen.iter().find(|&&word| word >> 32 != word & 0xffff_ffff);
                assert_eq!(torn, None);
            }
        });
    }
}
