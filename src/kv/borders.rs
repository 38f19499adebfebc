//! Where memory continues in another mapping.

use std::ops::Range;

use crate::Driver;
use crate::driver::DevicePtr;
use crate::memory::AccessChecks;

/// Returns at which places in `range` of `memory` it continues in another mapping, in bytes from the range's start
/// and in ascending order: copies end there. `None` if the memory does not report it.
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

/// As [`of`], for `bytes` bytes at an address of other code's memory, such as a framework that maps several
/// allocations side by side. The driver is asked once for each allocation; if it has no answer, the rest counts as
/// one.
///
/// Source: `cuMemGetAddressRange`, which returns 0 as the base of mapped host memory.
pub(crate) fn of_raw(driver: &Driver, base: DevicePtr, bytes: u64) -> Vec<u64> {
    let mut borders = Vec::new();
    let mut at = 0;
    while let Ok((start, len)) = driver.mem_address_range(base.add(at)) {
        let end = start.0.saturating_add(len).saturating_sub(base.0);
        if start.0 > base.0 + at || end <= at || end >= bytes {
            break;
        }
        borders.push(end);
        at = end;
    }
    borders
}
