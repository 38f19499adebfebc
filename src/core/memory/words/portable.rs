//! Each access in Rust: this defines the behaviour of the assembly beside it, and serves other processors and Miri.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The bytes of a word.
pub(super) const WORD: usize = 8;

/// # Safety
/// `at` is a multiple of 8, and the 8 bytes there are mapped for the caller's accesses.
unsafe fn word<'a>(at: *mut u8) -> &'a AtomicU64 {
    // SAFETY: aligned and mapped; read-only pages allow relaxed loads of this size.
    unsafe { &*at.cast::<AtomicU64>() }
}

/// Changes some bytes of one word and leaves the others as they are.
///
/// # Safety
/// The bytes lie in one word, which is mapped and writable.
pub(super) unsafe fn store_part(to: *mut u8, from: &[u8]) {
    if from.is_empty() {
        return;
    }
    let skip = to as usize & (WORD - 1);
    // SAFETY: the word of `to` starts `skip` bytes before it.
    let word = unsafe { word(to.sub(skip)) };
    let _ = word.fetch_update(Relaxed, Relaxed, |old| {
        let mut bytes = old.to_ne_bytes();
        bytes[skip..skip + from.len()].copy_from_slice(from);
        Some(u64::from_ne_bytes(bytes))
    });
}

/// Loads some bytes of one word.
///
/// # Safety
/// The bytes lie in one word, which is mapped and readable.
pub(super) unsafe fn load_part(from: *mut u8, to: &mut [u8]) {
    if to.is_empty() {
        return;
    }
    let skip = from as usize & (WORD - 1);
    // SAFETY: the word of `from` starts `skip` bytes before it.
    let bytes = unsafe { word(from.sub(skip)) }.load(Relaxed).to_ne_bytes();
    to.copy_from_slice(&bytes[skip..skip + to.len()]);
}

/// Stores whole words.
///
/// # Safety
/// `to` is a multiple of 8, `from` has a multiple of 8 bytes, and as many are mapped and writable at `to`.
pub(super) unsafe fn store_words(to: *mut u8, from: &[u8]) {
    let mut at = to;
    for bytes in from.chunks_exact(WORD) {
        let value = u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
        // SAFETY: a word of the range.
        unsafe {
            word(at).store(value, Relaxed);
            at = at.add(WORD);
        }
    }
}

/// Loads whole words.
///
/// # Safety
/// `from` is a multiple of 8, `to` has a multiple of 8 bytes, and as many are mapped and readable at `from`.
pub(super) unsafe fn load_words(from: *mut u8, to: &mut [u8]) {
    let mut at = from;
    for bytes in to.chunks_exact_mut(WORD) {
        // SAFETY: a word of the range.
        unsafe {
            bytes.copy_from_slice(&word(at).load(Relaxed).to_ne_bytes());
            at = at.add(WORD);
        }
    }
}

/// Sets whole words to `value`.
///
/// # Safety
/// `to` is a multiple of 8, and `words` words there are mapped and writable.
pub(super) unsafe fn fill_words(to: *mut u8, words: usize, value: u64) {
    let mut at = to;
    for _ in 0..words {
        // SAFETY: a word of the range.
        unsafe {
            word(at).store(value, Relaxed);
            at = at.add(WORD);
        }
    }
}
