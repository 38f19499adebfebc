//! Bounds how many exported fds a process keeps for later exports.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};

use crate::Driver;
use crate::driver::ShareableHandle;
use crate::per_driver::{PerDriver, lock};

/// The most exported fds that a process keeps open for later exports, over all memory of a driver. A memory has an fd
/// for each part, and a process has 1024 by default.
pub(super) const MAX_KEPT: usize = 16;

/// A place for a part's exported fd.
pub(super) type Place = Mutex<Option<ShareableHandle>>;

/// The places of one driver with an fd, the oldest first.
type Kept = Arc<Mutex<VecDeque<Weak<Place>>>>;

/// Records that `place` has an fd now, and closes the oldest ones beyond [`MAX_KEPT`]. The caller holds the lock of no
/// place.
pub(super) fn note(driver: &Driver, place: &Arc<Place>) {
    static KEPT: PerDriver<Kept> = PerDriver::new();
    let of_driver = KEPT.of(driver);
    let mut kept = lock(&of_driver);
    kept.retain(|other| other.strong_count() > 0);
    kept.push_back(Arc::downgrade(place));
    let beyond = kept.len().saturating_sub(MAX_KEPT);
    let oldest: Vec<_> = kept.drain(..beyond).collect();
    drop(kept);
    for place in oldest.iter().filter_map(Weak::upgrade) {
        let fd = lock(&place).take();
        // The last copy's close takes the driver's time.
        drop(fd);
    }
}
