//! The assembly: string instructions, and pairs of words by AVX.
//!
//! A pair is 16 bytes that are aligned to 16 on the shared side. Processors with AVX do not split such an
//! access.

use std::arch::asm;

use super::super::portable::WORD;

/// The bytes that [`load_pairs`] and [`store_pairs`] move at a time.
pub(super) const ROUND: usize = 128;
/// The bytes that [`load_blocks`] and [`store_blocks`] move at a time: eight pages.
pub(super) const BLOCK: usize = 32 << 10;

/// Returns whether the processor has the instructions for pairs.
pub(super) fn has_pairs() -> bool {
    std::is_x86_feature_detected!("avx")
}

/// Moves words by a string instruction.
///
/// # Safety
/// `bytes` is a multiple of 8. As many are readable at `from` and writable at `to`, and the ranges do not
/// overlap. The shared side begins at a multiple of 8; the other belongs to the caller alone.
pub(super) unsafe fn string(to: *mut u8, from: *const u8, bytes: usize) {
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

/// Sets words to `value` by a string instruction.
///
/// # Safety
/// `to` is a multiple of 8, and `words` words are writable there.
pub(super) unsafe fn string_fill(to: *mut u8, words: usize, value: u64) {
    // SAFETY: the instruction stores each word once; the direction flag is clear at the start of an
    // assembly block.
    unsafe {
        asm!(
            "rep stosq",
            inout("rdi") to => _,
            inout("rcx") words => _,
            in("rax") value,
            options(nostack, preserves_flags),
        );
    }
}

/// Sets pairs of words to `value`.
///
/// # Safety
/// `to` is a multiple of 16, and `rounds` times [`ROUND`] bytes are writable there. The processor
/// [has pairs](has_pairs).
pub(super) unsafe fn fill_pairs(to: *mut u8, rounds: usize, value: u64) {
    if rounds == 0 {
        return;
    }
    // SAFETY: the block stores each pair once, aligned, and accesses only the range.
    unsafe {
        asm!(
            "vmovq xmm0, rax",
            "vpunpcklqdq xmm0, xmm0, xmm0",
            "2:",
            ".irp at, 0, 16, 32, 48, 64, 80, 96, 112",
            "vmovdqa [rdi + \\at], xmm0",
            ".endr",
            "add rdi, 128",
            "dec rcx",
            "jnz 2b",
            inout("rdi") to => _,
            inout("rcx") rounds => _,
            inout("rax") value => _,
            clobber_abi("C"),
            options(nostack),
        );
    }
}

macro_rules! pairs {
    ($(#[$doc:meta])* $name:ident, $load:literal, $store:literal) => {
        $(#[$doc])*
        pub(super) unsafe fn $name(to: *mut u8, from: *const u8, rounds: usize) {
            if rounds == 0 {
                return;
            }
            // SAFETY: the block accesses each pair of the shared side once, aligned, and only the two ranges.
            unsafe {
                asm!(
                    "2:",
                    ".irp i, 0, 1, 2, 3, 4, 5, 6, 7",
                    concat!($load, " xmm\\i, [rsi + 16 * \\i]"),
                    ".endr",
                    ".irp i, 0, 1, 2, 3, 4, 5, 6, 7",
                    concat!($store, " [rdi + 16 * \\i], xmm\\i"),
                    ".endr",
                    "add rsi, 128",
                    "add rdi, 128",
                    "dec rcx",
                    "jnz 2b",
                    inout("rdi") to => _,
                    inout("rsi") from => _,
                    inout("rcx") rounds => _,
                    clobber_abi("C"),
                    options(nostack),
                );
            }
        }
    };
}

pairs! {
    /// Loads pairs of words.
    ///
    /// # Safety
    /// As for [`string`], of `rounds` times [`ROUND`] bytes; `from`, which is shared, is a multiple of 16.
    /// The processor [has pairs](has_pairs).
    load_pairs, "vmovdqa", "vmovdqu"
}

pairs! {
    /// Stores pairs of words.
    ///
    /// # Safety
    /// As for [`load_pairs`]; `to`, which is shared, is the multiple of 16.
    store_pairs, "vmovdqu", "vmovdqa"
}

/// Loads pairs of words and stores them past the caches, 128 bytes of each of eight pages in turn, because the
/// processor prefetches within a page. Two pairs are stored at a time: this side is the caller's alone.
///
/// # Safety
/// As for [`load_pairs`], of `blocks` times [`BLOCK`] bytes; `to` is a multiple of 32.
pub(super) unsafe fn load_blocks(to: *mut u8, from: *const u8, blocks: usize) {
    if blocks == 0 {
        return;
    }
    // SAFETY: the block loads each pair once, aligned, and accesses only the two ranges. SFENCE orders the
    // non-temporal stores before those that follow.
    unsafe {
        asm!(
            "2:",
            "mov edx, 32",
            "3:",
            ".irp page, 0, 4096, 8192, 12288, 16384, 20480, 24576, 28672",
            ".irp i, 0, 1, 2, 3, 4, 5, 6, 7",
            "vmovdqa xmm\\i, [rsi + \\page + 16 * \\i]",
            ".endr",
            "vinsertf128 ymm0, ymm0, xmm1, 1",
            "vinsertf128 ymm2, ymm2, xmm3, 1",
            "vinsertf128 ymm4, ymm4, xmm5, 1",
            "vinsertf128 ymm6, ymm6, xmm7, 1",
            "vmovntdq [rdi + \\page], ymm0",
            "vmovntdq [rdi + \\page + 32], ymm2",
            "vmovntdq [rdi + \\page + 64], ymm4",
            "vmovntdq [rdi + \\page + 96], ymm6",
            ".endr",
            "add rsi, 128",
            "add rdi, 128",
            "dec edx",
            "jnz 3b",
            "add rsi, 28672",
            "add rdi, 28672",
            "dec rcx",
            "jnz 2b",
            "sfence",
            "vzeroupper",
            inout("rdi") to => _,
            inout("rsi") from => _,
            inout("rcx") blocks => _,
            clobber_abi("C"),
            options(nostack),
        );
    }
}

/// Stores words past the caches, in the order of [`load_blocks`]. The manuals do not say that the
/// non-temporal store of a pair is not split, so each stores a word.
///
/// # Safety
/// As for [`string`], of `blocks` times [`BLOCK`] bytes; `to` is the side that is shared.
pub(super) unsafe fn store_blocks(to: *mut u8, from: *const u8, blocks: usize) {
    if blocks == 0 {
        return;
    }
    // SAFETY: as for `load_blocks`; each word is stored once. The first SFENCE keeps these stores behind those
    // before them.
    unsafe {
        asm!(
            "sfence",
            "2:",
            "mov edx, 32",
            "3:",
            ".irp page, 0, 4096, 8192, 12288, 16384, 20480, 24576, 28672",
            ".irp at, 0, 32, 64, 96",
            "mov rax, [rsi + \\page + \\at]",
            "mov r8, [rsi + \\page + \\at + 8]",
            "mov r9, [rsi + \\page + \\at + 16]",
            "mov r10, [rsi + \\page + \\at + 24]",
            "movnti [rdi + \\page + \\at], rax",
            "movnti [rdi + \\page + \\at + 8], r8",
            "movnti [rdi + \\page + \\at + 16], r9",
            "movnti [rdi + \\page + \\at + 24], r10",
            ".endr",
            ".endr",
            "add rsi, 128",
            "add rdi, 128",
            "dec edx",
            "jnz 3b",
            "add rsi, 28672",
            "add rdi, 28672",
            "dec rcx",
            "jnz 2b",
            "sfence",
            inout("rdi") to => _,
            inout("rsi") from => _,
            inout("rcx") blocks => _,
            clobber_abi("C"),
            options(nostack),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Move = unsafe fn(*mut u8, *const u8, usize);

    /// Moves `count` times `unit` bytes between ranges that begin `to` and `from` bytes behind a line, and
    /// checks them and the bytes beside them.
    fn check(moves: Move, (unit, count): (usize, usize), to: usize, from: usize) {
        let len = unit * count;
        let data: Vec<u64> = (0..(len + 128) as u64 / 8)
            .map(|n| n * 0x0101_0101_0203)
            .collect();
        let mut memory = vec![u64::MAX; data.len()];
        let lead = |at: *const u64| (at as usize).wrapping_neg() & 63;
        let from = &bytemuck::cast_slice::<_, u8>(&data)[lead(data.as_ptr()) + from..][..len];
        let start = lead(memory.as_ptr()) + to;
        let all: &mut [u8] = bytemuck::cast_slice_mut(&mut memory);
        // SAFETY: both ranges have this many bytes, which only this thread uses, and begin as required.
        unsafe { moves(all[start..].as_mut_ptr(), from.as_ptr(), count) };
        assert_eq!(all[start..start + len], *from);
        let beside = all[..start].iter().chain(&all[start + len..]);
        assert!(beside.into_iter().all(|&byte| byte == 0xff));
    }

    #[test]
    fn pairs_and_blocks_are_exact() {
        if !has_pairs() {
            return;
        }
        for count in [0, 1, 3] {
            for own in [0, 1, 16, 24] {
                check(load_pairs, (ROUND, count), own, 48);
                check(store_pairs, (ROUND, count), 48, own);
                check(store_blocks, (BLOCK, count), 0, own);
            }
            check(load_blocks, (BLOCK, count), 0, 48);
        }
    }

    /// One thread stores words of equal halves, and another never sees a word with two halves.
    #[test]
    fn words_are_never_torn() {
        if !has_pairs() {
            return;
        }
        #[repr(align(64))]
        struct Memory([u64; BLOCK / 8]);
        let mut memory = Memory([0; BLOCK / 8]);
        let at = memory.0.as_mut_ptr().expose_provenance();
        let at = || std::ptr::with_exposed_provenance_mut::<u8>(at);
        std::thread::scope(|scope| {
            let writer = scope.spawn(move || {
                for round in 1..=4_000_u64 {
                    let own = vec![round << 32 | round; BLOCK / 8];
                    // SAFETY: both have the bytes of a block, and begin as is asked for.
                    unsafe {
                        match round % 2 {
                            0 => store_pairs(at(), own.as_ptr().cast(), BLOCK / ROUND),
                            _ => store_blocks(at(), own.as_ptr().cast(), 1),
                        }
                    }
                }
            });
            let mut own = Memory([0; BLOCK / 8]);
            let mut blocks = false;
            while !writer.is_finished() {
                blocks = !blocks;
                // SAFETY: as above.
                unsafe {
                    match blocks {
                        true => load_blocks(own.0.as_mut_ptr().cast(), at(), 1),
                        false => load_pairs(own.0.as_mut_ptr().cast(), at(), BLOCK / ROUND),
                    }
                }
                let torn = own.0.iter().find(|&&word| word >> 32 != word & 0xffff_ffff);
                assert_eq!(torn, None);
            }
        });
    }
}
