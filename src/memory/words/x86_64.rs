//! x86-64: string instructions of 8 bytes a step, non-temporal stores for large copies on Intel, and pairs of
//! words for loads.
//!
//! The module beside this says why the assembly is sound.

mod wide;

use std::arch::asm;
use std::sync::OnceLock;

use super::{WORD, portable};

/// From how many bytes on a string instruction is faster than a loop, its start included.
const STRING_FROM: usize = 512;
/// From how many bytes on a copy goes past the caches, where the processor gains by that.
const STREAM_FROM: usize = 16 << 20;
/// The bytes of a page, and of the pages that a large copy works on side by side.
const PAGE: usize = 4 << 10;
pub(crate) const BLOCK: usize = 4 * PAGE;
/// String instructions are fast where the destination is a multiple of this.
const LINE: usize = 64;

/// Stores whole words.
///
/// # Safety
/// As for [`portable::store_words`].
pub(super) unsafe fn store_words(to: *mut u8, from: &[u8]) {
    let (short, long) = from.split_at(short_part(to, from.len()));
    // SAFETY: the caller's promise, for both parts; the first is a multiple of 8 bytes.
    unsafe {
        portable::store_words(to, short);
        let to = to.add(short.len());
        // It begins at a line, or has no bytes.
        let pairs = match is_just_ahead(to, long.as_ptr()) && wide::is_there() {
            true => wide::store(to, long),
            false => 0,
        };
        let long = &long[pairs..];
        copy_words(to.add(pairs), long.as_ptr(), long.len());
    }
}

/// Whether string instructions are slow: where a store comes just after a load in the low bits of their
/// addresses, the processor takes the one for what the other needs.
fn is_just_ahead(to: *const u8, from: *const u8) -> bool {
    let ahead = (to as usize).wrapping_sub(from as usize) & (PAGE - 1);
    (1..LINE).contains(&ahead)
}

/// Loads whole words.
///
/// # Safety
/// As for [`portable::load_words`].
pub(super) unsafe fn load_words(from: *mut u8, to: &mut [u8]) {
    if to.len() >= STRING_FROM && wide::is_there() {
        // SAFETY: the caller's promise.
        return unsafe { wide::load(from, to) };
    }
    let (short, long) = to.split_at_mut(short_part(to.as_ptr(), to.len()));
    // SAFETY: the caller's promise, for both parts; the first is a multiple of 8 bytes.
    unsafe {
        portable::load_words(from, short);
        copy_words(long.as_mut_ptr(), from.add(short.len()), long.len());
    }
}

/// Sets whole words to `value`.
///
/// # Safety
/// As for [`portable::fill_words`].
pub(super) unsafe fn fill_words(to: *mut u8, words: usize, value: u64) {
    let short = short_part(to, words * WORD) / WORD;
    // SAFETY: the caller's promise, for both parts. The assembly stores `value` to each word after the
    // short part; the direction flag is clear at the start of an assembly block.
    unsafe {
        portable::fill_words(to, short, value);
        if short < words {
            asm!(
                "rep stosq",
                inout("rdi") to.add(short * WORD) => _,
                inout("rcx") words - short => _,
                in("rax") value,
                options(nostack, preserves_flags),
            );
        }
    }
}

/// How many of `bytes`, a multiple of 8, are moved by a loop: all of a few, else those before the next
/// line of the destination.
fn short_part(to: *const u8, bytes: usize) -> usize {
    match bytes < STRING_FROM {
        true => bytes,
        false => (to as usize).wrapping_neg() & (LINE - 1) & !(WORD - 1),
    }
}

/// # Safety
/// `bytes` is a multiple of 8. So many are readable at `from` and writable at `to`, and the ranges do not
/// overlap. The side that is shared begins at a multiple of 8; the other is the caller's alone.
unsafe fn copy_words(to: *mut u8, from: *const u8, bytes: usize) {
    let streamed = match bytes >= STREAM_FROM && is_faster_past_the_caches() {
        true => bytes & !(BLOCK - 1),
        false => 0,
    };
    // SAFETY: the two parts are all of the range; the first is a multiple of `BLOCK`.
    unsafe {
        if streamed > 0 {
            stream(to, from, streamed / BLOCK);
        }
        if streamed < bytes {
            string(to.add(streamed), from.add(streamed), bytes - streamed);
        }
    }
}

/// # Safety
/// As for [`copy_words`].
pub(crate) unsafe fn string(to: *mut u8, from: *const u8, bytes: usize) {
    // SAFETY: the instruction moves each word once; the direction flag is clear at the start of an
    // assembly block.
    unsafe {
        asm!(
            "rep movsq",
            inout("rdi") to => _,
            inout("rsi") from => _,
            inout("rcx") bytes / WORD => _,
            options(nostack, preserves_flags),
        );
    }
}

/// Copies `blocks` times four pages, a line of each at a time: the processor fetches ahead within each page.
///
/// # Safety
/// As for [`copy_words`], `blocks` is at least 1.
pub(crate) unsafe fn stream(to: *mut u8, from: *const u8, blocks: usize) {
    // SAFETY: the block moves each word once, and orders its stores before those that follow. Prefetches
    // beyond the source's end do not fault.
    unsafe {
        asm!(
            "2:",
            "mov {lines:e}, 64",
            "3:",
            ".irp page, 0, 4096, 8192, 12288",
            "prefetcht0 [{from} + \\page + 512]",
            ".irp at, 0, 16, 32, 48",
            "mov {a}, [{from} + \\page + \\at]",
            "mov {b}, [{from} + \\page + \\at + 8]",
            "movnti [{to} + \\page + \\at], {a}",
            "movnti [{to} + \\page + \\at + 8], {b}",
            ".endr",
            ".endr",
            "add {from}, 64",
            "add {to}, 64",
            "dec {lines:e}",
            "jnz 3b",
            "add {from}, 12288",
            "add {to}, 12288",
            "dec {blocks}",
            "jnz 2b",
            "sfence",
            to = inout(reg) to => _,
            from = inout(reg) from => _,
            blocks = inout(reg) blocks => _,
            lines = out(reg) _,
            a = out(reg) _,
            b = out(reg) _,
            options(nostack),
        );
    }
}

/// Whether large copies are to use non-temporal stores: on Intel, as its own and libc's copies do. AMD's
/// string instructions go past the caches by themselves, and are faster there (docs/performance.md).
fn is_faster_past_the_caches() -> bool {
    static INTEL: OnceLock<bool> = OnceLock::new();
    *INTEL.get_or_init(|| {
        // SAFETY: every x86-64 processor has the instruction. (Later compilers need no `unsafe` here.)
        #[allow(unused_unsafe)]
        let vendor = unsafe { std::arch::x86_64::__cpuid(0) };
        [vendor.ebx, vendor.edx, vendor.ecx]
            .map(u32::to_le_bytes)
            .concat()
            == b"GenuineIntel"
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_past_the_caches_are_exact() {
        let from: Vec<u64> = (1..=(3 * BLOCK / WORD) as u64).collect();
        let mut to = vec![0_u64; from.len()];
        // SAFETY: both have three blocks, and the last of `to` is left.
        unsafe { stream(to.as_mut_ptr().cast(), from.as_ptr().cast(), 2) };
        let copied = 2 * BLOCK / WORD;
        assert_eq!(to[..copied], from[..copied]);
        assert!(to[copied..].iter().all(|&word| word == 0));
    }

    #[test]
    fn stores_just_ahead_of_their_source_are_exact() {
        const LEN: usize = STRING_FROM + 3 * LINE + WORD;
        let data: Vec<u8> = (0..2 * PAGE + LEN).map(|at| (at ^ at >> 8) as u8).collect();
        for ahead in 1..LINE {
            let mut to = vec![0_u64; LEN / WORD + 1];
            let at: *mut u8 = to.as_mut_ptr().cast();
            let start = (at as usize).wrapping_sub(ahead + data.as_ptr() as usize) & (PAGE - 1);
            let from = &data[start..start + LEN];
            assert!(is_just_ahead(at, from.as_ptr()));
            // SAFETY: `to` has the words of `from` and one more.
            unsafe { store_words(at, from) };
            let stored: &[u8] = bytemuck::cast_slice(&to);
            assert_eq!(stored[..LEN], *from);
            assert_eq!(to[LEN / WORD], 0);
        }
    }
}
