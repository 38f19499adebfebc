//! x86-64: string instructions of 8 bytes a step, and pairs of words for large copies and if string
//! instructions are slow.
//!
//! The module beside this says why the assembly is sound.

mod moves;

use super::portable::{self, WORD};
use moves::{BLOCK, ROUND};

/// From how many bytes on the assembly is faster than a loop, including its start.
const LONG_FROM: usize = 256;
/// From how many bytes on a string instruction is faster than pairs: it takes about 10 ns to start
/// (docs/performance.md).
const STRING_FROM: usize = 2 << 10;
/// From how many bytes on a copy bypasses the caches.
const STREAM_FROM: usize = 16 << 20;
/// The bytes of a page.
const PAGE: usize = 4 << 10;
/// Copies are fast if the destination is a multiple of this.
const LINE: usize = 64;
/// The bytes of a pair of words.
const PAIR: usize = 16;

/// How the bulk of a copy is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    String,
    Pairs,
    /// Pairs that bypass the caches.
    Blocks,
}

/// Stores whole words.
///
/// # Safety
/// As for [`portable::store_words`].
pub(super) unsafe fn store_words(to: *mut u8, from: &[u8]) {
    // SAFETY: the caller's promise.
    unsafe {
        match from.len() < LONG_FROM {
            true => portable::store_words(to, from),
            false => store_long(to, from),
        }
    }
}

/// # Safety
/// As for [`store_words`]; there are [`LONG_FROM`] bytes or more.
#[inline(never)] // few bytes are not to save its registers
unsafe fn store_long(to: *mut u8, from: &[u8]) {
    let (short, long) = from.split_at(up_to(LINE, to));
    let method = method(to, from.as_ptr(), from.len());
    // SAFETY: the caller's promise, for each part. The second begins at a line of `to`.
    unsafe {
        portable::store_words(to, short);
        let to = to.add(short.len());
        let moves = (moves::store_pairs as Move, moves::store_blocks as Move);
        let moved = copy(method, moves, to, long.as_ptr(), long.len());
        portable::store_words(to.add(moved), &long[moved..]);
    }
}

/// Loads whole words.
///
/// # Safety
/// As for [`portable::load_words`].
pub(super) unsafe fn load_words(from: *mut u8, to: &mut [u8]) {
    // SAFETY: the caller's promise.
    unsafe {
        match to.len() < LONG_FROM {
            true => portable::load_words(from, to),
            false => load_long(from, to),
        }
    }
}

/// # Safety
/// As for [`load_words`]; there are [`LONG_FROM`] bytes or more.
#[inline(never)] // few bytes are not to save its registers
unsafe fn load_long(from: *mut u8, to: &mut [u8]) {
    let mut method = method(to.as_ptr(), from, to.len());
    // Blocks of both sides begin together only if both sides have the same alignment.
    if method == Method::Blocks && !(to.as_ptr() as usize ^ from as usize).is_multiple_of(PAIR) {
        method = Method::String;
    }
    let (short, long) = to.split_at_mut(match method {
        Method::Pairs => up_to(PAIR, from),
        _ => up_to(LINE, to.as_ptr()),
    });
    // SAFETY: the caller's promise, for each part. The second begins at a pair of `from` if the method needs
    // that; for blocks it then begins at a line of `to` too.
    unsafe {
        portable::load_words(from, short);
        let moves = (moves::load_pairs as Move, moves::load_blocks as Move);
        let from = from.add(short.len());
        let moved = copy(method, moves, long.as_mut_ptr(), from, long.len());
        portable::load_words(from.add(moved), &mut long[moved..]);
    }
}

/// Sets whole words to `value`.
///
/// # Safety
/// As for [`portable::fill_words`].
pub(super) unsafe fn fill_words(to: *mut u8, words: usize, value: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        match words * WORD < LONG_FROM {
            true => portable::fill_words(to, words, value),
            false => fill_long(to, words, value),
        }
    }
}

/// # Safety
/// As for [`fill_words`]; there are [`LONG_FROM`] bytes or more.
#[inline(never)] // few bytes are not to save its registers
unsafe fn fill_long(to: *mut u8, words: usize, value: u64) {
    let short = up_to(LINE, to) / WORD;
    let words = words - short;
    // SAFETY: the caller's promise, for each part. The second begins at a line.
    unsafe {
        portable::fill_words(to, short, value);
        let to = to.add(short * WORD);
        if words * WORD >= STRING_FROM || !moves::has_pairs() {
            return moves::string_fill(to, words, value);
        }
        let rounds = words * WORD / ROUND;
        moves::fill_pairs(to, rounds, value);
        portable::fill_words(to.add(rounds * ROUND), words % (ROUND / WORD), value);
    }
}

/// Returns the bytes of whole words before the next multiple of `unit`.
fn up_to(unit: usize, at: *const u8) -> usize {
    (at as usize).wrapping_neg() & (unit - 1) & !(WORD - 1)
}

/// Chooses how `bytes` bytes are copied.
fn method(to: *const u8, from: *const u8, bytes: usize) -> Method {
    let pairs_are_faster = bytes < STRING_FROM || is_just_ahead(to, from);
    match moves::has_pairs() {
        true if bytes >= STREAM_FROM => Method::Blocks,
        true if pairs_are_faster => Method::Pairs,
        _ => Method::String,
    }
}

/// Returns whether string instructions are slow on some processors: if a store comes just after a load in the low bits of
/// their addresses, the processor takes the load to depend on the store.
///
/// The C library's large allocations start 16 bytes behind a page, so a copy from a page is such a case.
fn is_just_ahead(to: *const u8, from: *const u8) -> bool {
    let ahead = (to as usize).wrapping_sub(from as usize) & (PAGE - 1);
    (1..LINE).contains(&ahead)
}

/// Moves this many rounds or blocks.
type Move = unsafe fn(*mut u8, *const u8, usize);

/// Copies with a string instruction, or with one of `moves`. Returns how many bytes it copied: all but those behind
/// the last round of pairs.
///
/// # Safety
/// As for [`moves::string`]; if the method is one of `moves`, also as for that.
unsafe fn copy(
    method: Method,
    (pairs, blocks): (Move, Move),
    to: *mut u8,
    from: *const u8,
    bytes: usize,
) -> usize {
    // SAFETY: the caller's promise, for both parts of the range; both are multiples of 8.
    unsafe {
        match method {
            Method::Pairs => {
                pairs(to, from, bytes / ROUND);
                bytes - bytes % ROUND
            }
            Method::Blocks => {
                blocks(to, from, bytes / BLOCK);
                let rest = bytes % BLOCK;
                let moved = bytes - rest;
                moves::string(to.add(moved), from.add(moved), rest);
                bytes
            }
            Method::String => {
                moves::string(to, from, bytes);
                bytes
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Loads and stores `len` bytes between places at these distances behind a page.
    fn check(len: usize, shared: usize, own: usize) {
        let data: Vec<u64> = (0..(len + 2 * PAGE) as u64 / 8)
            .map(|n| n * 0x0101_0101_0203)
            .collect();
        let data: &[u8] = bytemuck::cast_slice(&data);
        let behind =
            |at: *const u8, offset: usize| ((at as usize).wrapping_neg() & (PAGE - 1)) + offset;
        let from = &data[behind(data.as_ptr(), own)..][..len];
        let mut memory = vec![0_u64; data.len() / 8];
        let memory: &mut [u8] = bytemuck::cast_slice_mut(&mut memory);
        let start = behind(memory.as_ptr(), shared);
        // SAFETY: this many bytes exist, in whole words, and only this thread uses them.
        unsafe { store_words(memory[start..].as_mut_ptr(), from) };
        assert!(memory[start..start + len] == *from);
        assert!(memory[..start].iter().all(|&byte| byte == 0));
        assert!(memory[start + len..].iter().all(|&byte| byte == 0));

        let mut back = vec![0_u8; data.len()];
        let at = behind(back.as_ptr(), own);
        // SAFETY: as above.
        unsafe { load_words(memory[start..].as_mut_ptr(), &mut back[at..at + len]) };
        assert!(back[at..at + len] == *from);
        assert!(back[..at].iter().all(|&byte| byte == 0));
        assert!(back[at + len..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn copies_are_exact_wherever_the_sides_lie() {
        for own in (0..=LINE + WORD).chain([PAGE - 16]) {
            check(LONG_FROM + 3 * LINE + WORD, 0, own);
            check(LONG_FROM + 3 * LINE + WORD, 24, own);
        }
    }

    #[test]
    fn large_copies_are_exact_wherever_the_sides_lie() {
        for own in [0, 16, 24, 3] {
            check(STREAM_FROM + BLOCK + 2 * LINE + WORD, 8, own);
        }
    }
}
