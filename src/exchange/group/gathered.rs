//! Memory that ranks have given to a gather.

use std::fmt;

use super::member::Slot;
use crate::driver::Driver;
use crate::share::{Description, ImportOptions, ImportedBuffer, Shared};
use crate::{Error, Result};

/// What all ranks have brought to [`Group::gather_memory`](super::Group::gather_memory).
///
/// It is independent of the group: dropped, it unmaps the other ranks' memory, which takes as long as the
/// driver does. The memory that this rank has brought may still be mapped by others then. Where each rank
/// calls [`barrier`](super::Group::barrier) after the drop, nobody has it mapped any more once that succeeds. Drop it before [`Group::leave`](super::Group::leave), whose promise does not cover it.
pub struct GatheredMemory {
    // Unmapped before the own memory is let go.
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

    /// Maps the memory of all ranks but `own`.
    pub(super) fn map_others(&self, own: u32) -> Result<()> {
        let others = self.slots.iter().enumerate();
        let others = others.filter(|(rank, slot)| *rank != own as usize && slot.memory().is_some());
        for (rank, slot) in others {
            slot.map(rank, &self.driver, &self.import)?;
        }
        Ok(())
    }

    /// How many ranks there are.
    pub fn size(&self) -> u32 {
        u32::try_from(self.slots.len()).unwrap_or(u32::MAX)
    }

    /// The memory that this rank has brought.
    pub const fn memory(&self) -> Option<&Shared> {
        self.own.as_ref()
    }

    /// What a rank has said of its memory; `None` where it has brought none.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a rank that there is not.
    pub fn description(&self, rank: u32) -> Result<Option<&Description>> {
        Ok(self.slot(rank)?.memory())
    }

    /// A rank's memory, mapped. With [`Map::Lazy`](super::Map::Lazy), and for the own rank, it is
    /// mapped when this is first called, which takes as long as the driver does.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a rank that there is not or that has brought no memory;
    /// [`Error::Import`], the same at every call.
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
