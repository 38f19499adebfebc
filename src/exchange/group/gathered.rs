//! Memory that ranks have shared in a gather.

use std::fmt;
use std::panic::Location as Caller;

use super::member::Slot;
use crate::driver::Driver;
use crate::share::{Description, ImportOptions, ImportedBuffer, Shared};
use crate::{Error, Result};

/// The memory that all ranks contributed to [`Group::gather_memory`](super::Group::gather_memory).
///
/// It is independent of the group. Dropping it unmaps the other ranks' memory, which takes as long as the
/// driver needs. Other ranks may still map this rank's memory at that time. To wait for them, let each rank
/// call [`barrier`](super::Group::barrier) after the drop: once that succeeds, no rank has the memory mapped
/// any more. Drop it before [`Group::leave`](super::Group::leave), which does not wait for gathered memory.
pub struct GatheredMemory {
    // Unmapped before this rank's own memory is released.
    slots: Vec<Slot>,
    own: Option<Shared>,
    driver: Driver,
    import: ImportOptions,
}

impl GatheredMemory {
    pub(super) fn new(
        slots: Vec<Slot>,
        own: Option<Shared>,
        driver: Driver,
        import: ImportOptions,
    ) -> Self {
        Self {
            slots,
            own,
            driver,
            import,
        }
    }

    /// Maps the memory of all ranks but `own`, for a call of the program.
    pub(super) fn map_others(&self, own: u32, site: &'static Caller<'static>) -> Result<()> {
        let import = self.import.clone().or_called_at(site);
        let others = self.slots.iter().enumerate();
        let others = others.filter(|(rank, slot)| *rank != own as usize && slot.memory().is_some());
        for (rank, slot) in others {
            slot.map(rank, &self.driver, &import)?;
        }
        Ok(())
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
        Ok(self.slot(rank)?.memory())
    }

    /// Returns a rank's mapped memory. With [`Map::Lazy`](super::Map::Lazy), and for this rank's own memory,
    /// the first call maps it, which takes as long as the driver needs.
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a rank that does not exist or that
    /// contributed no memory; [`Error::Import`], the same in every call.
    #[track_caller]
    pub fn rank(&self, rank: u32) -> Result<&ImportedBuffer> {
        self.slot(rank)?
            .map(rank as usize, &self.driver, &self.import)
    }

    fn slot(&self, rank: u32) -> Result<&Slot> {
        self.slots
            .get(rank as usize)
            .ok_or_else(|| Error::invalid("rank", format!("rank {rank} of {}", self.slots.len())))
    }
}

impl fmt::Debug for GatheredMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatheredMemory")
            .field("slots", &self.slots)
            .finish_non_exhaustive()
    }
}
