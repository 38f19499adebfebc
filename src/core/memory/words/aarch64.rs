//! aarch64: pairs of registers, 64 bytes a round.
//!
//! The module beside this says why the assembly is sound.

use std::arch::asm;

use super::portable::{self, WORD};

/// The bytes of a round; stores are fast if the destination is a multiple of this.
const LINE: usize = 64;
/// From how many bytes on the rounds are used.
const ROUNDS_FROM: usize = 2 * LINE;

/// Stores whole words.
///
/// # Safety
/// As for [`portable::store_words`].
pub(super) unsafe fn store_words(to: *mut u8, from: &[u8]) {
    let (first, rest) = from.split_at(short_part(to, from.len()));
    let (lines, last) = rest.split_at(rest.len() & !(LINE - 1));
    // SAFETY: the caller's promise, for each part; all are multiples of 8 bytes.
    unsafe {
        portable::store_words(to, first);
        let to = to.add(first.len());
        copy_lines(to, lines.as_ptr(), lines.len() / LINE);
        portable::store_words(to.add(lines.len()), last);
    }
}

/// Loads whole words.
///
/// # Safety
/// As for [`portable::load_words`].
pub(super) unsafe fn load_words(from: *mut u8, to: &mut [u8]) {
    let (first, rest) = to.split_at_mut(short_part(to.as_ptr(), to.len()));
    let (lines, last) = rest.split_at_mut(rest.len() & !(LINE - 1));
    // SAFETY: the caller's promise, for each part; all are multiples of 8 bytes.
    unsafe {
        portable::load_words(from, first);
        let from = from.add(first.len());
        copy_lines(lines.as_mut_ptr(), from, lines.len() / LINE);
        portable::load_words(from.add(lines.len()), last);
    }
}

/// Sets whole words to `value`.
///
/// # Safety
/// As for [`portable::fill_words`].
pub(super) unsafe fn fill_words(to: *mut u8, words: usize, value: u64) {
    let first = short_part(to, words * WORD) / WORD;
    let lines = (words - first) * WORD / LINE;
    let filled = first + lines * LINE / WORD;
    // SAFETY: the caller's promise, for each part. The assembly stores `value` to each word of `lines`
    // lines, which is not 0 there.
    unsafe {
        portable::fill_words(to, first, value);
        if lines > 0 {
            asm!(
                "2:",
                "stp {value}, {value}, [{to}]",
                "stp {value}, {value}, [{to}, #16]",
                "stp {value}, {value}, [{to}, #32]",
                "stp {value}, {value}, [{to}, #48]",
                "add {to}, {to}, #64",
                "subs {lines}, {lines}, #1",
                "b.ne 2b",
                to = inout(reg) to.add(first * WORD) => _,
                lines = inout(reg) lines => _,
                value = in(reg) value,
                options(nostack),
            );
        }
        portable::fill_words(to.add(filled * WORD), words - filled, value);
    }
}

/// Returns how many of `bytes`, a multiple of 8, come before the rounds: all of them if there are few,
/// otherwise those before the destination's next line.
fn short_part(to: *const u8, bytes: usize) -> usize {
    match bytes < ROUNDS_FROM {
        true => bytes,
        false => (to as usize).wrapping_neg() & (LINE - 1) & !(WORD - 1),
    }
}

/// # Safety
/// `lines` lines of 64 bytes are readable at `from` and writable at `to`, and the ranges do not overlap. The
/// shared side begins at a multiple of 8; the other belongs to the caller alone.
unsafe fn copy_lines(to: *mut u8, from: *const u8, lines: usize) {
    if lines == 0 {
        return;
    }
    // SAFETY: the block moves each word of the lines once.
    unsafe {
        asm!(
            "2:",
            "ldp {a}, {b}, [{from}]",
            "ldp {c}, {d}, [{from}, #16]",
            "ldp {e}, {f}, [{from}, #32]",
            "ldp {g}, {h}, [{from}, #48]",
            "stp {a}, {b}, [{to}]",
            "stp {c}, {d}, [{to}, #16]",
            "stp {e}, {f}, [{to}, #32]",
            "stp {g}, {h}, [{to}, #48]",
            "add {from}, {from}, #64",
            "add {to}, {to}, #64",
            "subs {lines}, {lines}, #1",
            "b.ne 2b",
            to = inout(reg) to => _,
            from = inout(reg) from => _,
            lines = inout(reg) lines => _,
            a = out(reg) _,
            b = out(reg) _,
            c = out(reg) _,
            d = out(reg) _,
            e = out(reg) _,
            f = out(reg) _,
            g = out(reg) _,
            h = out(reg) _,
            options(nostack),
        );
    }
}
