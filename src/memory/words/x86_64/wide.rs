//! Pairs of words by AVX: 16 bytes that are aligned to 16, which processors with AVX do not split.
//!
//! They are as fast at any distance of the two sides, which string instructions are not: what the allocator
//! gives for large memory lies 16 bytes behind a page, just ahead of a view's page.

use std::arch::asm;

use super::{LINE, STREAM_FROM, portable};

/// The bytes of a pair.
const PAIR: usize = 16;
/// The bytes of the widest registers here.
const WIDE: usize = 32;
/// The bytes of a round.
const ROUND: usize = 128;

/// Whether the processor has the instructions.
pub(super) fn is_there() -> bool {
    std::is_x86_feature_detected!("avx2")
}

/// Loads whole words.
///
/// # Safety
/// As for [`portable::load_words`]; the processor [has the instructions](is_there).
pub(super) unsafe fn load(from: *mut u8, to: &mut [u8]) {
    // Up to a pair of the shared side and, where that is possible, a wide register's place on the other.
    let mut lead = (from as usize).wrapping_neg() & (PAIR - 1);
    if (to.as_ptr() as usize + lead) % WIDE == PAIR {
        lead += PAIR;
    }
    let (first, rest) = to.split_at_mut(lead.min(to.len()));
    let (rounds, last) = rest.split_at_mut(rest.len() & !(ROUND - 1));
    let is_large = rounds.len() >= STREAM_FROM && (rounds.as_ptr() as usize).is_multiple_of(WIDE);
    // SAFETY: the caller's promise, for each part; all are multiples of 8 bytes, and the shared side of the
    // rounds begins at a multiple of 16.
    unsafe {
        portable::load_words(from, first);
        let from = from.add(first.len());
        match is_large {
            true => stream_rounds(from, rounds),
            false => load_rounds(from, rounds),
        }
        portable::load_words(from.add(rounds.len()), last);
    }
}

/// # Safety
/// As for [`load`]; `from` is a multiple of 16, and `to` has a multiple of [`ROUND`] bytes.
unsafe fn load_rounds(from: *const u8, to: &mut [u8]) {
    if to.is_empty() {
        return;
    }
    // SAFETY: the block loads each pair once, by an aligned access, and writes only `to`.
    unsafe {
        asm!(
            "2:",
            ".irp at, 0, 64",
            "vmovdqa xmm0, [rsi + \\at]",
            "vmovdqa xmm1, [rsi + \\at + 16]",
            "vmovdqa xmm2, [rsi + \\at + 32]",
            "vmovdqa xmm3, [rsi + \\at + 48]",
            "vinserti128 ymm0, ymm0, xmm1, 1",
            "vinserti128 ymm2, ymm2, xmm3, 1",
            "vmovdqu [rdi + \\at], ymm0",
            "vmovdqu [rdi + \\at + 32], ymm2",
            ".endr",
            "add rsi, 128",
            "add rdi, 128",
            "dec rcx",
            "jnz 2b",
            "vzeroupper",
            inout("rdi") to.as_mut_ptr() => _,
            inout("rsi") from => _,
            inout("rcx") to.len() / ROUND => _,
            clobber_abi("C"), // VZEROUPPER changes every vector register
            options(nostack),
        );
    }
}

/// The same past the caches, for memory that they would not hold.
///
/// # Safety
/// As for [`load_rounds`]; `to` begins at a multiple of 32.
unsafe fn stream_rounds(from: *const u8, to: &mut [u8]) {
    if to.is_empty() {
        return;
    }
    // SAFETY: as for `load_rounds`; the stores are ordered before those that follow. Prefetches beyond the
    // source's end do not fault.
    unsafe {
        asm!(
            "2:",
            ".irp at, 0, 64",
            "prefetcht0 [rsi + \\at + 1024]",
            "vmovdqa xmm0, [rsi + \\at]",
            "vmovdqa xmm1, [rsi + \\at + 16]",
            "vmovdqa xmm2, [rsi + \\at + 32]",
            "vmovdqa xmm3, [rsi + \\at + 48]",
            "vinserti128 ymm0, ymm0, xmm1, 1",
            "vinserti128 ymm2, ymm2, xmm3, 1",
            "vmovntdq [rdi + \\at], ymm0",
            "vmovntdq [rdi + \\at + 32], ymm2",
            ".endr",
            "add rsi, 128",
            "add rdi, 128",
            "dec rcx",
            "jnz 2b",
            "vzeroupper",
            "sfence",
            inout("rdi") to.as_mut_ptr() => _,
            inout("rsi") from => _,
            inout("rcx") to.len() / ROUND => _,
            clobber_abi("C"), // VZEROUPPER changes every vector register
            options(nostack),
        );
    }
}

/// Stores the whole lines of `from`, and tells how many bytes that were.
///
/// # Safety
/// As for [`portable::store_words`]; `to` is a multiple of 16 where `from` has a line, and the processor
/// [has the instructions](is_there).
pub(super) unsafe fn store(to: *mut u8, from: &[u8]) -> usize {
    let lines = from.len() / LINE;
    if lines == 0 {
        return 0;
    }
    // SAFETY: the block stores each pair once, by an aligned access, and reads only `from`.
    unsafe {
        asm!(
            "2:",
            "vmovdqu xmm0, [rsi]",
            "vmovdqu xmm1, [rsi + 16]",
            "vmovdqu xmm2, [rsi + 32]",
            "vmovdqu xmm3, [rsi + 48]",
            "vmovdqa [rdi], xmm0",
            "vmovdqa [rdi + 16], xmm1",
            "vmovdqa [rdi + 32], xmm2",
            "vmovdqa [rdi + 48], xmm3",
            "add rsi, 64",
            "add rdi, 64",
            "dec rcx",
            "jnz 2b",
            inout("rdi") to => _,
            inout("rsi") from.as_ptr() => _,
            inout("rcx") lines => _,
            clobber_abi("C"),
            options(nostack),
        );
    }
    lines * LINE
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines that begin at a multiple of 64, and the first byte of them.
    fn lines(bytes: &mut Vec<u8>, len: usize) -> usize {
        bytes.resize(len + LINE, 0);
        (bytes.as_ptr() as usize).wrapping_neg() & (LINE - 1)
    }

    #[test]
    fn pairs_are_stored_and_loaded_past_the_caches_exactly() {
        const LEN: usize = 5 * ROUND;
        if !is_there() {
            return;
        }
        let data: Vec<u8> = (0..LEN + 40).map(|at| (at ^ at >> 8) as u8).collect();
        let mut shared = Vec::new();
        let at = lines(&mut shared, LEN + LINE);
        // SAFETY: both have so many bytes; `at` is the index of a line's start.
        let stored = unsafe { store(shared[at..].as_mut_ptr(), &data[..LEN + 40]) };
        assert_eq!(stored, LEN);
        assert_eq!(shared[at..at + LEN], data[..LEN]);
        assert!(shared[at + LEN..].iter().all(|&byte| byte == 0));

        let mut own = Vec::new();
        let start = lines(&mut own, LEN);
        // SAFETY: as above.
        unsafe { stream_rounds(shared[at..].as_ptr(), &mut own[start..start + LEN]) };
        assert_eq!(own[start..start + LEN], data[..LEN]);
        assert!(own[start + LEN..].iter().all(|&byte| byte == 0));
    }
}
