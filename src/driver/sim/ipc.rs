//! Events that other processes use.
//!
//! No process can run another's work. So a record of such an event runs the work before it at once, and what a process
//! sees as recorded has run: a wait for it has nothing to wait for. The handle contains a process of this machine, its fd
//! of a file made for the event, and the file's random name, as a fabric handle does (see `share.rs`).

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};

use super::answer::{Answer, exhausted, fail};
use crate::random;
use crate::{Code, IpcEventHandle};

const MAGIC: [u8; 8] = *b"egmemevt";

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
    pub(super) fn export(&mut self) -> Answer<IpcEventHandle> {
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
        let name = CString::new(name_of(id))?;
        // SAFETY: `name` is a NUL-terminated string that outlives the call.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the fd was just created and has no other owner.
        let file = unsafe { File::from_raw_fd(fd) };
        Ok(Self { file, id })
    }

    fn handle(&self) -> IpcEventHandle {
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&std::process::id().to_le_bytes());
        bytes[12..16].copy_from_slice(&self.file.as_raw_fd().to_le_bytes());
        bytes[16..32].copy_from_slice(&self.id.to_le_bytes());
        IpcEventHandle::from_bytes(&bytes)
    }
}

fn name_of(id: u128) -> String {
    format!("egmem-sim-event {id:032x}")
}

/// Checks that a handle leads to an event of another process.
pub(super) fn check(handle: &IpcEventHandle) -> Answer<()> {
    let bytes = handle.expose_bytes();
    if bytes[..8] != MAGIC || bytes[32..] != [0; 32] {
        return fail(Code::MAP_FAILED);
    }
    let number = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
    let (process, fd) = (number(8), number(12));
    if process == std::process::id() {
        return fail(Code::INVALID_CONTEXT);
    }
    let mut id = [0; 16];
    id.copy_from_slice(&bytes[16..32]);
    // The process may have ended, or destroyed the event.
    let target = std::fs::read_link(format!("/proc/{process}/fd/{fd}"));
    let name = name_of(u128::from_le_bytes(id));
    match target {
        Ok(target) if target.to_string_lossy().contains(&name) => Ok(()),
        _ => fail(Code::INVALID_HANDLE),
    }
}
