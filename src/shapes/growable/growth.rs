//! How much a growable vector grows by.

use crate::size::Granularity;

/// The most that a vector grows by at a time without being asked for more, in bytes.
const LARGEST_STEP: u64 = 256 << 20;

/// Returns how many bytes the vector that has `mapped` bytes should grow by if it needs `need` more and has addresses
/// for `room`: a multiple of the granularity. `need` and `room` are such multiples, and `need` is at most `room`.
pub(super) fn growth(
    (mapped, need, room): (u64, u64, u64),
    step: u64,
    granularity: Granularity,
) -> u64 {
    let step = match step {
        0 => (mapped / 8).min(LARGEST_STEP),
        step => step,
    };
    let units = step.div_ceil(granularity.bytes()).max(1);
    units.saturating_mul(granularity.bytes()).clamp(need, room)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GRANULE: u64 = 2 << 20;

    proptest! {
        #[test]
        fn growth_is_whole_enough_and_fits(
            mapped in 0_u64..1 << 20,
            need in 1_u64..1 << 12,
            more in 0_u64..1 << 12,
            step in 0_u64..1 << 34,
        ) {
            let [mapped, need, room] = [mapped, need, need + more].map(|units| units * GRANULE);
            let bytes = growth((mapped, need, room), step, Granularity::TWO_MIB);
            prop_assert!(Granularity::TWO_MIB.divides(bytes));
            prop_assert!((need..=room).contains(&bytes));
            let wanted = if step == 0 { (mapped / 8).min(LARGEST_STEP) } else { step };
            prop_assert!(bytes >= wanted.min(room));
            // Never more than the step, except to fit the elements.
            prop_assert!(bytes == need || bytes < wanted + GRANULE || bytes == GRANULE);
        }
    }
}
