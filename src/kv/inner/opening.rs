//! The opening of a tier.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

use super::{Inner, PATIENCE};
use crate::borders::Borders;
use crate::copy::{CopyMethod, Kernels};
use crate::driver::{Access, Location};
use crate::events::Hub;
use crate::geometry::Geometry;
use crate::header;
use crate::members::Members;
use crate::memory::{CpuView, is_of_one_kind};
use crate::table::Found;
use crate::verify::Checks;
use crate::words::Words;
use crate::{MemoryError, Result, TierMemory};
use egmem_core::GrowingBuffer;

/// A tier in formatted memory, before this process is a member of it.
pub(crate) struct Opening {
    pub(crate) memory: Arc<dyn TierMemory>,
    pub(crate) geometry: Geometry,
    /// The memory that grows in the background, with its bytes that are there.
    pub(crate) growing: Option<(Arc<GrowingBuffer>, Arc<AtomicU64>)>,
    pub(crate) method: CopyMethod,
    /// Members elsewhere have ended.
    pub(crate) take_over: bool,
}

impl Opening {
    /// Becomes a member.
    ///
    /// # Errors
    /// [`NotAccessible`](crate::MemoryError::NotAccessible) unless the CPU may read and write the memory;
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) if it is too small; those of [`Members::claim`] and
    /// [`Lock::acquire`].
    pub(crate) fn open(self) -> Result<Inner> {
        let Self {
            memory,
            geometry,
            growing,
            method,
            take_over,
        } = self;
        let front = match growing {
            Some(_) => geometry.front(),
            None => geometry.total,
        };
        expect_room(memory.len(), front)?;
        let grants = memory.hold_grants();
        let view = memory.cpu()?;
        expect_writable(&view)?;
        view.slice(0, front)?;
        if !is_of_one_kind(&*memory, 0, front) {
            // The driver crashes the process when one copy touches both.
            let why = "it has memory of the CPU and of a GPU";
            return Err(MemoryError::invalid("memory", why).into());
        }
        let words = Words::new(&view)?;
        let member = Members::of(&words).claim(take_over)?;
        let (growing, grown) = growing.unzip();
        let mut tier = Inner {
            own: Mutex::default(),
            member,
            checks: Checks::default(),
            events: Hub::new(memory.driver().clone()),
            geometry,
            borders: Borders::default(),
            memory: Arc::clone(&memory),
            growing,
            grown,
            kernels: Kernels::default(),
            no_batches: AtomicBool::new(false),
            method,
            found: Found::default(),
            _grants: grants,
        };
        // If this fails, dropping the tier gives the membership up.
        let usable = tier.usable();
        let found = {
            let mut held = tier.hold(&words, PATIENCE)?;
            let (mut table, _) = held.table();
            let found = table.join(usable, take_over)?;
            table.expect_undamaged()?;
            found
        };
        tier.found = found;
        tier.found.generation = header::next_generation(&view)?;
        Ok(tier)
    }
}

/// Checks that memory of `bytes` bytes has room for the `needed` bytes of a tier.
///
/// # Errors
/// [`InvalidArgument`](crate::MemoryError::InvalidArgument).
pub(crate) fn expect_room(bytes: u64, needed: u64) -> Result<()> {
    if bytes >= needed {
        return Ok(());
    }
    let why = format!("it has {bytes} bytes");
    let valid = format!("{needed} bytes or more for this tier");
    Err(MemoryError::invalid_of("memory", why, valid).into())
}

/// # Errors
/// [`NotAccessible`](crate::MemoryError::NotAccessible) unless the CPU may write.
pub(crate) fn expect_writable(view: &CpuView<'_>) -> Result<()> {
    if view.is_writable() {
        return Ok(());
    }
    let (who, have, need) = (Location::Host, Access::Read, Access::ReadWrite);
    Err(MemoryError::NotAccessible { who, have, need }.into())
}
