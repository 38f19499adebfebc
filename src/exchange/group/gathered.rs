//! Memory that ranks have shared in a gather.

use std::fmt;

use super::member::{Slot, slot};
use crate::Result;
use crate::client::attempt;
use crate::driver::Driver;
use crate::ledger::Site;
use crate::share::{Description, ImportOptions, ImportedBuffer, Shared};

/// The memory that all ranks contributed to [`Group::gather_memory`](super::Group::gather_memory).
///
/// It is independent of the group. Dropping it unmaps the other ranks' memory, which takes as long as the
/// driver needs. Other ranks may still map this rank's memory at that time. To wait for them, let each rank
/// call [`barrier`](super::Group::barrier) after the drop: once that succeeds, no rank has the memory
/// mapped. Drop it before [`Group::leave`](super::Group::leave), which does not wait for gathered memory.
pub struct GatheredMemory {
    // Unmapped before this rank's own memory is released.
    pub(super) slots: Vec<Slot>,
    pub(super) own: Option<Shared>,
    pub(super) driver: Driver,
    pub(super) import: ImportOptions,
}

impl GatheredMemory {
    /// Maps the memory of all ranks but `own` on a blocking thread, for a call of the program.
    pub(super) async fn mapped(self, own: u32, site: Site) -> Result<Self> {
        let map = move || {
            let import = self.import.clone().or_called_at(site);
            for (rank, slot) in self.slots.iter().enumerate() {
                if rank != own as usize && slot.memory().is_some() {
                    slot.map(rank, &self.driver, &import)?;
                }
            }
            Ok(self)
        };
        attempt("mapping the memory of ranks", map).await?
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> u32 {
        u32::try_from(self.slots.len()).unwrap_or(u32::MAX)
    }

    /// Returns this rank's own memory.
    pub const fn memory(&self) -> Option<&Shared> {
        self.own.as_ref()
    }

    /// Returns a rank's description of its memory; `None` if it contributed none.
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a rank that does not exist.
    pub fn description(&self, rank: u32) -> Result<Option<&Description>> {
        Ok(slot(&self.slots, rank)?.memory())
    }

    /// Returns a rank's mapped memory. With [`Map::Lazy`](super::Map::Lazy), and for this rank's own memory,
    /// the first call maps it, which takes as long as the driver needs.
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a rank that does not exist or that
    /// contributed no memory; [`Error::Import`](crate::Error::Import), the same in every call.
    #[track_caller]
    pub fn rank(&self, rank: u32) -> Result<&ImportedBuffer> {
        slot(&self.slots, rank)?.map(rank as usize, &self.driver, &self.import)
    }
}

impl fmt::Debug for GatheredMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatheredMemory")
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}
