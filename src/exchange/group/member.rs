//! A rank's memory: mapped, or to be mapped later.

use std::sync::{Mutex, OnceLock};

use crate::driver::{Driver, HandleType};
use crate::ledger::{Party, Site};
use crate::per_driver::lock;
use crate::share::{Description, ImportOptions, ImportedBuffer, PartHandles, Shared};
use crate::{End, Error, MemoryError, Result};

/// A rank.
pub(super) struct Slot {
    pub peer: String,
    memory: Option<Description>,
    /// Present until they are imported, or the import has failed.
    handles: Mutex<PartHandles>,
    buffer: OnceLock<Result<ImportedBuffer>>,
}

impl Slot {
    pub fn new(peer: String, memory: Option<Description>, handles: PartHandles) -> Self {
        Self {
            peer,
            memory,
            handles: Mutex::new(handles),
            buffer: OnceLock::new(),
        }
    }

    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Returns the rank as the ledger names it.
    pub fn party(&self, rank: usize) -> Party {
        Party {
            pid: None,
            name: format!("rank {rank} ({})", self.peer),
        }
    }

    pub const fn memory(&self) -> Option<&Description> {
        self.memory.as_ref()
    }

    /// Returns the rank's mapped memory, and maps it on the first call. The ledger shows the caller's line, unless
    /// the options have another.
    #[track_caller]
    pub fn map(
        &self,
        rank: usize,
        driver: &Driver,
        import: &ImportOptions,
    ) -> Result<&ImportedBuffer> {
        let site = Site::here();
        let Some(memory) = &self.memory else {
            let why = format!("rank {rank} has brought no memory");
            return Err(Error::invalid("rank", why));
        };
        let buffer = self.buffer.get_or_init(|| {
            let mut handles = lock(&self.handles);
            let handles = std::mem::replace(&mut *handles, Vec::new().into());
            let via = handles.handle_type().unwrap_or(HandleType::Fabric);
            // Not shared with other imports: the server only forwards a rank's description of its memory, so
            // a rank could claim another's identity.
            let import = import.clone().unshared().sender(self.party(rank));
            let import = import.or_called_at(site);
            let imported = import.import_from(driver, memory, handles);
            imported.map_err(|error| Error::Import {
                what: format!("the memory of rank {rank}"),
                peer: self.peer.clone(),
                end: End::of(&error, via, false),
                source: Box::new(error),
            })
        });
        buffer.as_ref().map_err(Clone::clone)
    }
}

/// Returns a rank's slot.
pub(super) fn slot(slots: &[Slot], rank: u32) -> Result<&Slot> {
    let slot = slots.get(rank as usize);
    slot.ok_or_else(|| MemoryError::invalid_index("rank", rank.into(), slots.len() as u64).into())
}

/// Notes in the ledger that the other ranks have handles of this rank's memory.
pub(super) fn note_sent(memory: Option<&Shared>, slots: &[Slot], own: u32) {
    let others = slots.iter().enumerate();
    for (rank, slot) in others.filter(|(rank, _)| *rank != own as usize) {
        if let Some(memory) = memory {
            memory.sent_to(&slot.party(rank));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{Access, NodeId};
    use crate::share::Origin;
    use crate::{Buffer, Machine};

    #[test]
    fn a_rank_that_claims_anothers_memory_gets_its_own() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let [honest, liar] = [1_u32, 2].map(|value| {
            let buffer = Buffer::on(NodeId(0)).bytes(1 << 20).shareable();
            let buffer = buffer.allocate(&driver).unwrap();
            buffer.put(0, value).unwrap();
            Shared::from(buffer)
        });
        let claimed = honest.describe(Access::ReadWrite).unwrap();
        let slot = |of: &Shared| {
            let handles = of.export(HandleType::PosixFd).unwrap();
            Slot::new("a".into(), Some(claimed.clone()), handles.into())
        };
        let (first, second) = (slot(&honest), slot(&liar));
        let import = ImportOptions::new().origin(Origin::User(1));
        let value = |slot: &Slot, rank| {
            let mapped = slot.map(rank, &driver, &import).unwrap();
            mapped.get::<u32>(0).unwrap()
        };
        assert_eq!((value(&first, 0), value(&second, 1)), (1, 2));
    }
}
