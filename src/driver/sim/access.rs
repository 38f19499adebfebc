//! Finds the memory behind addresses, with the checks of a GPU's own memory management.

use std::sync::Arc;

use super::memory::{Memory, Purpose};
use super::state::{Kind, State};
use crate::{Access, Code, HandleTypes, Location};

/// A part of a range, in memory that the driver knows or at an address of the process.
#[derive(Clone, Debug)]
pub(super) enum Piece {
    /// In simulated physical memory.
    Known {
        memory: Arc<Memory>,
        offset: u64,
        len: u64,
    },
    /// In the process's own memory.
    Pageable { address: u64, len: u64 },
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
                (Kind::Device { .. }, Engine::Copy) => Access::ReadWrite,
                _ => self.access(region, device),
            };
            if access < need {
                return Err(Code::ILLEGAL_ADDRESS);
            }
            let n = (end - at).min(region.len - (at - begin));
            pieces.push(Piece::Known {
                memory: Arc::clone(&region.memory),
                offset: region.offset + (at - begin),
                len: n,
            });
            at += n;
        }
        let coherent = || self.machine.gpu(device).is_some_and(|gpu| gpu.coherent);
        if at == end {
            Ok(pieces)
        } else if pieces.is_empty()
            && !self.is_ours(start, len)
            && (engine == Engine::Copy || coherent() || self.registration(start, len).is_some())
        {
            Ok(vec![Piece::Pageable {
                address: start,
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
        reserved.is_some_and(|(&at, range)| at + range.len() > start)
            || region.is_some_and(|(&at, region)| at + region.len > start)
    }

    /// Checks what the driver checks when a copy or memset is submitted: that the range is allocated, and
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
        let is_pinned = || self.registration(start, len).is_some();
        Ok(matches!(pieces[..], [Piece::Pageable { .. }]) && !is_pinned())
    }
}

impl Piece {
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Known { len, .. } | Self::Pageable { len, .. } => *len,
        }
    }

    /// Splits off the first `n` bytes.
    fn split(&mut self, n: u64) -> Self {
        let mut first = self.clone();
        match (&mut first, self) {
            (Self::Known { len: a, .. }, Self::Known { offset, len: b, .. }) => {
                *a = n;
                *offset += n;
                *b -= n;
            }
            (Self::Pageable { len: a, .. }, Self::Pageable { address, len: b }) => {
                *a = n;
                *address += n;
                *b -= n;
            }
            _ => {}
        }
        first
    }

    pub(super) fn read(&self, bytes: &mut [u8]) -> Result<(), Code> {
        match self {
            Self::Known { memory, offset, .. } => memory.read(*offset, bytes),
            Self::Pageable { address, .. } => {
                let len = bytes.len() as u64;
                let scratch = scratch(len)?;
                scratch.copy_from_address(0, *address, len)?;
                scratch.read(0, bytes)
            }
        }
    }

    /// Overwrites the piece from `at` on.
    ///
    /// # Safety
    /// If the piece is pageable, the caller may overwrite it.
    pub(super) unsafe fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Code> {
        match self {
            Self::Known { memory, offset, .. } => memory.write(offset + at, bytes),
            Self::Pageable { address, .. } => {
                let scratch = scratch(bytes.len() as u64)?;
                scratch.write(0, bytes)?;
                // SAFETY: the caller's promise.
                unsafe { scratch.copy_to_address(0, address + at, bytes.len() as u64) }
            }
        }
    }

    /// Sets every byte.
    ///
    /// # Safety
    /// As for [`Self::write`].
    pub(super) unsafe fn fill(&self, value: u8) -> Result<(), Code> {
        match self {
            Self::Known {
                memory,
                offset,
                len,
            } => memory.fill(*offset, value, *len),
            Self::Pageable { len, .. } => {
                // SAFETY: the caller's promise.
                unsafe { self.write(0, &vec![value; *len as usize]) }
            }
        }
    }
}

/// Copies between two ranges of the same length.
///
/// # Safety
/// The caller may overwrite the pageable pieces of `dst`.
pub(super) unsafe fn copy(mut dst: Vec<Piece>, mut src: Vec<Piece>) -> Result<(), Code> {
    dst.reverse();
    src.reverse();
    while let (Some(to), Some(from)) = (dst.last_mut(), src.last_mut()) {
        let n = to.len().min(from.len());
        let (to, from) = (to.split(n), from.split(n));
        match (&to, &from) {
            (
                Piece::Known { memory, offset, .. },
                Piece::Known {
                    memory: from,
                    offset: from_offset,
                    ..
                },
            ) => memory.copy_from(*offset, from, *from_offset, n)?,
            (Piece::Known { memory, offset, .. }, Piece::Pageable { address, .. }) => {
                memory.copy_from_address(*offset, *address, n)?;
            }
            (Piece::Pageable { address, .. }, Piece::Known { memory, offset, .. }) => {
                // SAFETY: the caller's promise.
                unsafe { memory.copy_to_address(*offset, *address, n) }?;
            }
            (Piece::Pageable { address: to, .. }, Piece::Pageable { address: from, .. }) => {
                let scratch = scratch(n)?;
                scratch.copy_from_address(0, *from, n)?;
                // SAFETY: the caller's promise.
                unsafe { scratch.copy_to_address(0, *to, n) }?;
            }
        }
        dst.pop_if(|piece| piece.len() == 0);
        src.pop_if(|piece| piece.len() == 0);
    }
    Ok(())
}

/// Creates memory to pass bytes through, so that the kernel checks the addresses.
fn scratch(len: u64) -> Result<Memory, Code> {
    Memory::create(
        Purpose::Physical,
        Location::Host,
        HandleTypes::NONE,
        len,
        None,
    )
    .map_err(|_| Code::OUT_OF_MEMORY)
}
