//! Finds the memory behind addresses, with the checks of a GPU's own memory management.

use std::sync::Arc;

use super::memory::{Memory, Purpose};
use super::state::{Kind, State};
use crate::{Access, Code, HandleTypes, Location};

/// A part of a range.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    /// The simulated physical memory; `None`: the process's own memory.
    memory: Option<Arc<Memory>>,
    /// The offset in that memory, or the address.
    at: u64,
    pub(super) len: u64,
}

/// The hardware that accesses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Engine {
    /// The copy engine: it reaches every allocation of the older kind, on any device.
    Copy,
    /// A kernel: it reaches pageable memory if the GPU is coherent with the CPU.
    Kernel,
}

impl State {
    /// Returns the pieces of a range if `device` has this access to all of them; otherwise the fault.
    pub(super) fn pieces(
        &self,
        device: i32,
        engine: Engine,
        start: u64,
        len: u64,
        need: Access,
    ) -> Result<Vec<Piece>, Code> {
        let end = start.checked_add(len).ok_or(Code::ILLEGAL_ADDRESS)?;
        let mut pieces = Vec::new();
        let mut at = start;
        while at < end {
            let Some((begin, region)) = self.region(at) else {
                break;
            };
            // A range may span mappings only within one reservation; other mappings are adjacent by chance.
            if at > start && self.reservation(start, at - start + 1).is_none() {
                return Err(Code::ILLEGAL_ADDRESS);
            }
            let access = match (&region.kind, engine) {
                (Kind::Allocation { .. }, Engine::Copy) => Access::ReadWrite,
                _ => self.access(region, device),
            };
            if access < need {
                return Err(Code::ILLEGAL_ADDRESS);
            }
            let n = (end - at).min(region.len - (at - begin));
            pieces.push(Piece {
                memory: Some(Arc::clone(&region.memory)),
                at: region.offset + (at - begin),
                len: n,
            });
            at += n;
        }
        let coherent = || self.machine.gpu(device).is_some_and(|gpu| gpu.coherent);
        if at == end {
            Ok(pieces)
        } else if pieces.is_empty()
            && !self.is_ours(start, len)
            && (engine == Engine::Copy || coherent() || self.is_registered(start, len))
        {
            Ok(vec![Piece {
                memory: None,
                at: start,
                len,
            }])
        } else {
            Err(Code::ILLEGAL_ADDRESS)
        }
    }

    /// Returns whether the driver has reserved or allocated any part of a range.
    pub(super) fn is_ours(&self, start: u64, len: u64) -> bool {
        let last = start + (len - 1);
        let reserved = self.reservations.range(..=last).next_back();
        let region = self.regions.range(..=last).next_back();
        reserved.is_some_and(|(&at, range)| at + range.len > start)
            || region.is_some_and(|(&at, region)| at + region.len > start)
    }

    /// Makes the driver's checks of a submitted copy or memset: that the range is allocated, and
    /// that the device has some access. Returns whether it is pageable memory.
    pub(super) fn check_submitted(&self, device: i32, start: u64, len: u64) -> Result<bool, Code> {
        let pieces = self
            .pieces(device, Engine::Copy, start, len, Access::Read)
            .map_err(|_| Code::INVALID_VALUE)?;
        if let Some((_, region)) = self.region(start)
            && let Kind::Chunk { pool } = region.kind
            && !self.pools[&pool].is_live(start, len)
        {
            return Err(Code::INVALID_VALUE);
        }
        let is_of_process = matches!(pieces[..], [Piece { memory: None, .. }]);
        match self.registration(start, 1) {
            // Measured: the driver refuses a copy or fill that ends in another registration, or in none.
            Some(_) if self.registration(start, len).is_none() => Err(Code::INVALID_VALUE),
            registered => Ok(is_of_process && registered.is_none()),
        }
    }
}

impl Piece {
    /// Returns the piece without its first `n` bytes.
    pub(super) fn after(&self, n: u64) -> Self {
        Self {
            at: self.at + n,
            len: self.len - n,
            ..self.clone()
        }
    }

    /// Reads the piece's first bytes.
    pub(super) fn read(&self, bytes: &mut [u8]) -> Result<(), Code> {
        match &self.memory {
            Some(memory) => memory.read(self.at, bytes),
            None => {
                let len = bytes.len() as u64;
                let scratch = scratch(len)?;
                scratch.copy_from_address(0, self.at, len)?;
                scratch.read(0, bytes)
            }
        }
    }

    /// Overwrites the piece's first bytes.
    ///
    /// # Safety
    /// The caller may overwrite the process's own memory there.
    pub(super) unsafe fn write(&self, bytes: &[u8]) -> Result<(), Code> {
        match &self.memory {
            Some(memory) => memory.write(self.at, bytes),
            None => {
                let scratch = scratch(bytes.len() as u64)?;
                scratch.write(0, bytes)?;
                // SAFETY: the caller's promise.
                unsafe { scratch.copy_to_address(0, self.at, bytes.len() as u64) }
            }
        }
    }

    /// Sets every byte.
    ///
    /// # Safety
    /// As for [`Self::write`].
    pub(super) unsafe fn fill(&self, value: u8) -> Result<(), Code> {
        match &self.memory {
            Some(memory) => memory.fill(self.at, value, self.len),
            None => {
                let scratch = scratch(self.len)?;
                scratch.fill(0, value, self.len)?;
                // SAFETY: the caller's promise.
                unsafe { scratch.copy_to_address(0, self.at, self.len) }
            }
        }
    }
}

/// Copies between two ranges of the same length.
///
/// # Safety
/// The caller may overwrite the process's own memory in `dst`.
pub(super) unsafe fn copy(dst: Vec<Piece>, src: Vec<Piece>) -> Result<(), Code> {
    let (mut dst, mut src) = (dst.into_iter(), src.into_iter());
    let (mut to, mut from) = (dst.next(), src.next());
    while let (Some(into), Some(of)) = (&to, &from) {
        let n = into.len.min(of.len);
        match (&into.memory, &of.memory) {
            (Some(memory), Some(from)) => memory.copy_from(into.at, from, of.at, n)?,
            (Some(memory), None) => memory.copy_from_address(into.at, of.at, n)?,
            // SAFETY: the caller's promise.
            (None, Some(memory)) => unsafe { memory.copy_to_address(of.at, into.at, n) }?,
            (None, None) => {
                let scratch = scratch(n)?;
                scratch.copy_from_address(0, of.at, n)?;
                // SAFETY: the caller's promise.
                unsafe { scratch.copy_to_address(0, into.at, n) }?;
            }
        }
        let rest = |piece: &Piece| (piece.len > n).then(|| piece.after(n));
        let (more_to, more_from) = (rest(into), rest(of));
        to = more_to.or_else(|| dst.next());
        from = more_from.or_else(|| src.next());
    }
    Ok(())
}

/// Creates memory to pass bytes through, so that the kernel checks the addresses.
fn scratch(len: u64) -> Result<Memory, Code> {
    let (purpose, location) = (Purpose::Physical, Location::Host);
    Memory::create(purpose, location, HandleTypes::NONE, len, None).map_err(|_| Code::OUT_OF_MEMORY)
}
