//! Memory that leaves the process: as an fd, or under a fabric handle.
//!
//! A simulated fabric handle contains a process of this machine, its fd and the memory's random id; an
//! importer opens the memory through `/proc`, so no server is needed.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use super::answer::{Answer, fail};
use super::memory::{Memory, Purpose};
use crate::{Code, FabricHandle, HandleType, ShareableHandle};

const MAGIC: [u8; 8] = *b"egmemsim";

pub(super) fn export(memory: &Memory, kind: HandleType) -> io::Result<ShareableHandle> {
    Ok(match kind {
        HandleType::PosixFd => ShareableHandle::PosixFd(memory.export()?),
        HandleType::Fabric => {
            let mut bytes = [0; 64];
            bytes[..8].copy_from_slice(&MAGIC);
            bytes[8..12].copy_from_slice(&std::process::id().to_le_bytes());
            bytes[12..16].copy_from_slice(&memory.file().as_raw_fd().to_le_bytes());
            bytes[16..32].copy_from_slice(&memory.label.id.to_le_bytes());
            ShareableHandle::Fabric(FabricHandle::from_bytes(&bytes))
        }
    })
}

/// Opens the memory that a fabric handle refers to.
pub(super) fn import(handle: &FabricHandle, purpose: Purpose, imex: bool) -> Answer<Memory> {
    let bytes = handle.expose_bytes();
    if bytes[..8] != MAGIC || bytes[32..] != [0; 32] {
        return fail(Code::NOT_SUPPORTED);
    }
    if !imex {
        return fail(Code::NOT_PERMITTED);
    }
    let number = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
    let path = format!("/proc/{}/fd/{}", number(8), number(12));
    let mut id = [0; 16];
    id.copy_from_slice(&bytes[16..32]);
    // The fd may have been closed and its number reused: the id tells. Only a file whose name looks right is
    // opened, because opening a foreign fd may block or have side effects.
    let ours = std::fs::read_link(&path).is_ok_and(|target| {
        let name = target.to_string_lossy();
        name.contains(&format!("{:032x}", u128::from_le_bytes(id)))
    });
    if !ours {
        return fail(Code::INVALID_VALUE);
    }
    let file = File::options().read(true).write(true).open(&path);
    let memory = file
        .ok()
        .and_then(|file| Memory::import(file.as_fd(), purpose))
        .filter(|memory| memory.label.id == u128::from_le_bytes(id));
    Ok(memory.ok_or(Code::INVALID_VALUE)?)
}
