//! Where memory continues in another mapping.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use crate::Driver;
use crate::driver::DevicePtr;
use crate::memory::AccessChecks;
use egmem_core::per_driver::lock;

/// The borders of a memory that may grow: each is looked for once.
#[derive(Debug, Default)]
pub(crate) struct Borders(Mutex<(u64, Arc<[u64]>)>);

impl Borders {
    /// Returns at which places in the first `bytes` bytes, which only grow, `memory` continues in another mapping; `None` if
    /// it does not report that.
    pub(crate) fn of(
        &self,
        memory: &(impl AccessChecks + ?Sized),
        bytes: u64,
    ) -> Option<Arc<[u64]>> {
        let mut known = lock(&self.0);
        if known.0 < bytes {
            // A mapping that ended the memory until now is looked at again.
            let last = known.1.last().copied().unwrap_or(0);
            let more = of(memory, last..bytes)?.into_iter().map(|at| last + at);
            *known = (bytes, known.1.iter().copied().chain(more).collect());
        }
        Some(Arc::clone(&known.1))
    }
}

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
