//! What leaves the process: memory as an fd, memory and events under a handle of 64 bytes.
//!
//! A simulated handle contains a process of this machine, its fd of a file and the file's random id, which is in the
//! file's name. An importer opens the file through `/proc`, so no server is needed.
//!
//! No process can run another's work. So a record of an event that other processes may open runs the work before it at
//! once, and what a process sees as recorded has run: a wait for it has nothing to wait for.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use super::fault::{Answer, fail};
use super::memory::{Memory, Purpose};
use crate::*;

const MAGIC: &[u8; 8] = b"egmemsim";
const EVENT_MAGIC: &[u8; 8] = b"egmemevt";

/// A process's fd of a file, as a handle has it.
struct Origin {
    process: u32,
    fd: u32,
    id: u128,
}

impl Origin {
    /// Returns this process's, of a memory's file, whose name contains its id.
    fn of(memory: &Memory) -> Self {
        Self {
            process: std::process::id(),
            fd: memory.file().as_raw_fd() as u32,
            id: memory.label.id,
        }
    }

    fn to_bytes(&self, magic: &[u8; 8]) -> [u8; 64] {
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(magic);
        bytes[8..12].copy_from_slice(&self.process.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.fd.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.id.to_le_bytes());
        bytes
    }

    /// Returns `None` for bytes that are not of such a handle.
    fn from_bytes(bytes: &[u8; 64], magic: &[u8; 8]) -> Option<Self> {
        let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let is_one = bytes[..8] == *magic && bytes[32..] == [0; 32];
        is_one.then(|| Self {
            process: number(8),
            fd: number(12),
            id: u128::from_le_bytes(std::array::from_fn(|i| bytes[16 + i])),
        })
    }

    fn is_of_this_process(&self) -> bool {
        self.process == std::process::id()
    }

    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", self.process, self.fd)
    }

    /// Returns whether the fd is still that file's: the process may have ended, or closed it and have another under its
    /// number. The name tells; opening a foreign fd may block or have side effects.
    fn is_there(&self) -> bool {
        std::fs::read_link(self.path()).is_ok_and(|target| {
            let name = target.to_string_lossy();
            name.contains(&self.id.to_string())
        })
    }
}

pub fn export(memory: &Memory, kind: HandleType) -> io::Result<ShareableHandle> {
    Ok(match kind {
        HandleType::PosixFd => ShareableHandle::PosixFd(memory.export()?),
        HandleType::Fabric => {
            let origin = Origin::of(memory).to_bytes(MAGIC);
            ShareableHandle::Fabric(FabricHandle::from_bytes(&origin))
        }
    })
}

/// Opens the memory that a handle refers to.
pub(super) fn import(handle: &ShareableHandle, purpose: Purpose, imex: bool) -> Answer<Memory> {
    let handle = match (handle, purpose) {
        (ShareableHandle::PosixFd(fd), Purpose::Physical) => {
            return Ok(Memory::import(fd.as_fd(), purpose).ok_or(Code::UNKNOWN)?);
        }
        (ShareableHandle::PosixFd(fd), _) => {
            return Ok(Memory::import(fd.as_fd(), purpose).ok_or(Code::INVALID_VALUE)?);
        }
        (ShareableHandle::Fabric(handle), _) => handle,
    };
    let origin = Origin::from_bytes(handle.expose_bytes(), MAGIC).ok_or(Code::NOT_SUPPORTED)?;
    if !imex {
        return fail(Code::NOT_PERMITTED);
    }
    if !origin.is_there() {
        return fail(Code::INVALID_VALUE);
    }
    let file = File::options().read(true).write(true).open(origin.path());
    let memory = file
        .ok()
        .and_then(|file| Memory::import(file.as_fd(), purpose))
        .filter(|memory| memory.label.id == origin.id);
    Ok(memory.ok_or(Code::INVALID_VALUE)?)
}

/// How other processes get at an event.
#[derive(Debug)]
pub(super) enum Sharing {
    /// This process alone has it.
    Private,
    /// Others may open it: exported so far as this, a file that is open for as long as the event exists.
    Interprocess(Option<Memory>),
    /// It is another process's.
    Imported,
}

impl Sharing {
    /// Returns the event's handle.
    pub fn export(&mut self) -> Answer<IpcEventHandle> {
        let exported = match self {
            Self::Interprocess(Some(exported)) => exported,
            Self::Interprocess(none) => {
                let (location, types) = (Location::Host, HandleTypes::NONE);
                none.insert(Memory::create(Purpose::Event, location, types, 0, None)?)
            }
            Self::Private | Self::Imported => return fail(Code::INVALID_HANDLE),
        };
        let origin = Origin::of(exported).to_bytes(EVENT_MAGIC);
        Ok(IpcEventHandle::from_bytes(&origin))
    }
}

/// Checks that a handle leads to an event of another process.
pub(super) fn check(handle: &IpcEventHandle) -> Answer {
    let origin = Origin::from_bytes(handle.expose_bytes(), EVENT_MAGIC).ok_or(Code::MAP_FAILED)?;
    if origin.is_of_this_process() {
        return fail(Code::INVALID_CONTEXT);
    }
    match origin.is_there() {
        true => Ok(()),
        false => fail(Code::INVALID_HANDLE),
    }
}
