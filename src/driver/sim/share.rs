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

use rustix::fs::{MemfdFlags, memfd_create};

use super::fault::{Answer, exhausted, fail};
use super::memory::{Memory, Purpose};
use crate::{Code, FabricHandle, HandleType, IpcEventHandle, ShareableHandle, random};

const MAGIC: &[u8; 8] = b"egmemsim";
const EVENT_MAGIC: &[u8; 8] = b"egmemevt";

/// A process's fd of a file, as a handle has it.
struct Origin {
    process: u32,
    fd: u32,
    id: u128,
}

impl Origin {
    /// Returns this process's, of a file whose name contains `id`.
    fn of(file: &File, id: u128) -> Self {
        Self {
            process: std::process::id(),
            fd: file.as_raw_fd() as u32,
            id,
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
        let number = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
        let mut id = [0; 16];
        id.copy_from_slice(&bytes[16..32]);
        let is_one = bytes[..8] == *magic && bytes[32..] == [0; 32];
        is_one.then(|| Self {
            process: number(8),
            fd: number(12),
            id: u128::from_le_bytes(id),
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
            let origin = Origin::of(memory.file(), memory.label.id);
            ShareableHandle::Fabric(FabricHandle::from_bytes(&origin.to_bytes(MAGIC)))
        }
    })
}

/// Opens the memory that a fabric handle refers to.
pub(super) fn import(handle: &FabricHandle, purpose: Purpose, imex: bool) -> Answer<Memory> {
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
    /// Others may open it: exported so far as this.
    Interprocess(Option<Exported>),
    /// It is another process's.
    Imported,
}

impl Sharing {
    /// Returns the event's handle.
    pub fn export(&mut self) -> Answer<IpcEventHandle> {
        match self {
            Self::Interprocess(Some(exported)) => Ok(exported.handle()),
            Self::Interprocess(none) => {
                let exported = none.insert(Exported::new().map_err(exhausted)?);
                Ok(exported.handle())
            }
            Self::Private | Self::Imported => fail(Code::INVALID_HANDLE),
        }
    }
}

/// A file that is open for as long as the event exists, and its random number.
#[derive(Debug)]
pub(super) struct Exported {
    file: File,
    id: u128,
}

impl Exported {
    fn new() -> io::Result<Self> {
        let id = u128::from_ne_bytes(random()?);
        let name = format!("egmem-sim-event {id}");
        let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC)?);
        Ok(Self { file, id })
    }

    fn handle(&self) -> IpcEventHandle {
        let origin = Origin::of(&self.file, self.id);
        IpcEventHandle::from_bytes(&origin.to_bytes(EVENT_MAGIC))
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
