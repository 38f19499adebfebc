//! A rank's memory, mapped or to be mapped.

use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::driver::{Driver, HandleType, ShareableHandle};
use crate::share::{Description, ImportOptions, ImportedBuffer};
use crate::{Error, Result};

/// A rank.
pub(super) struct Slot {
    peer: String,
    memory: Option<Description>,
    /// Until they are imported, or the import has failed.
    handles: Mutex<Vec<ShareableHandle>>,
    buffer: OnceLock<Result<ImportedBuffer>>,
}

impl Slot {
    pub fn new(peer: String, memory: Option<Description>, handles: Vec<ShareableHandle>) -> Self {
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

    pub const fn memory(&self) -> Option<&Description> {
        self.memory.as_ref()
    }

    /// The rank's memory, mapped now if it has not been before.
    pub fn map(
        &self,
        rank: usize,
        driver: &Driver,
        import: &ImportOptions,
    ) -> Result<&ImportedBuffer> {
        let Some(memory) = &self.memory else {
            return Err(Error::invalid(
                "rank",
                format!("rank {rank} has brought no memory"),
            ));
        };
        let buffer = self.buffer.get_or_init(|| {
            let mut handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
            let handles = std::mem::take(&mut *handles);
            let via = handles
                .first()
                .map_or(HandleType::Fabric, ShareableHandle::handle_type);
            let imported = import.clone().import(driver, memory, handles);
            imported.map_err(|error| Error::Import {
                what: format!("the memory of rank {rank}"),
                peer: self.peer.clone(),
                end: error.end(via),
                source: Box::new(error),
            })
        });
        buffer.as_ref().map_err(Clone::clone)
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot")
            .field("peer", &self.peer)
            .field("mapped", &self.buffer.get().is_some())
            .finish_non_exhaustive()
    }
}
