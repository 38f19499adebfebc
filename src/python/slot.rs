//! The memory of an object, and whether it can be closed.

use std::sync::Arc;

use crate::region::Region;

/// The memory of an object, until it is closed.
pub struct Slot {
    /// The memory.
    pub region: Option<Arc<Region>>,
    /// An array interface of the object itself was read, so uncounted views may exist.
    pub uncounted: bool,
}

/// The views that keep memory from being closed.
pub enum Views {
    /// So many.
    Counted(usize),
    /// An unknown number.
    Uncounted,
}

impl Slot {
    /// Takes the memory out; `None` if it was taken before. The error is no exception: the caller holds the lock.
    pub fn take(&mut self) -> Result<Option<Region>, Views> {
        if self.uncounted && self.region.is_some() {
            return Err(Views::Uncounted);
        }
        let Some(region) = self.region.take() else {
            return Ok(None);
        };
        Arc::try_unwrap(region).map(Some).map_err(|region| {
            let views = Arc::strong_count(&region) - 1;
            self.region = Some(region);
            Views::Counted(views)
        })
    }

    /// Takes the memory out as [`take`](Self::take) does, also while it is offered to other processes.
    pub fn take_offered(&mut self) -> Result<Option<Arc<Region>>, Views> {
        let views = self.region.as_ref().map_or(0, Region::views);
        match views {
            _ if self.uncounted && self.region.is_some() => Err(Views::Uncounted),
            0 => Ok(self.region.take()),
            views => Err(Views::Counted(views)),
        }
    }
}
