//! Counters in memory that a GPU reads and writes too, and numbers that another process sends.

use std::sync::atomic::AtomicU64;

use crate::driver::DevicePtr;
use crate::{Error, Result};

/// Returns the counter at `address`.
///
/// # Safety
/// `address` is a multiple of 8. For `'a` its word is mapped, and readable and writable by the CPU. All other
/// code of this process accesses it atomically and as a whole.
pub unsafe fn counter<'a>(address: DevicePtr) -> &'a AtomicU64 {
    let at = std::ptr::with_exposed_provenance_mut(address.0 as usize);
    // SAFETY: the caller's promise.
    unsafe { AtomicU64::from_ptr(at) }
}

/// Returns `found` if it lies in `least..=most`, where counts go on at 0 after 2^64 - 1.
pub const fn check(what: &'static str, found: u64, (least, most): (u64, u64)) -> Result<u64> {
    if found.wrapping_sub(least) <= most.wrapping_sub(least) {
        return Ok(found);
    }
    Err(Error::CursorDamaged {
        what,
        found,
        least,
        most,
    })
}

/// Reads a text of another process: a kind of message, and so many numbers. `None` for any other text.
#[cfg(feature = "share")]
pub fn numbers<const COUNT: usize>(kind: &str, text: &str) -> Option<[u64; COUNT]> {
    let words = text.strip_prefix(kind)?.strip_prefix(' ')?.split(' ');
    let numbers: Option<Vec<u64>> = words.map(|word| word.parse().ok()).collect();
    numbers?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_lies_between_passes(least in any::<u64>(), span in 0..1_000_u64, found in any::<u64>(), near in -3..1_003_i64) {
            let most = least.wrapping_add(span);
            for found in [found, least.wrapping_add_signed(near)] {
                let expected = (0..=span).any(|n| least.wrapping_add(n) == found);
                prop_assert_eq!(check("a cursor", found, (least, most)).is_ok(), expected);
            }
        }
    }
}
