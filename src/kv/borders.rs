//! Where memory continues in another mapping.

use std::ops::Range;

use crate::memory::AccessChecks;

/// Returns at which places in `range` of `memory` it continues in another mapping, in bytes from the range's start and in
/// ascending order: copies end there. `None` if the memory does not tell.
pub(crate) fn of(memory: &(impl AccessChecks + ?Sized), range: Range<u64>) -> Option<Vec<u64>> {
    let mut borders = Vec::new();
    let mut at = range.start;
    loop {
        at += memory.of_one_mapping(at, range.end - at)?.max(1);
        if at >= range.end {
            return Some(borders);
        }
        borders.push(at - range.start);
    }
}
