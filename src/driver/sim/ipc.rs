//! Events that other processes use.
//!
//! No process can run another's work. So a record of such an event runs the work before it at once, and what a process
//! sees as recorded has run: a wait for it has nothing to wait for. The handle contains a process of this machine, its fd
//! of a file made for the event, and the file's random id, as a fabric handle does (see `share.rs`).

use std::fs::File;
use std::io;

use rustix::fs::{MemfdFlags, memfd_create};

use super::answer::{Answer, exhausted, fail};
use super::share::Origin;
use crate::random;
use crate::{Code, IpcEventHandle};

const MAGIC: &[u8; 8] = b"egmemevt";

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
        let name = format!("egmem-sim-event {id:032x}");
        let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC)?);
        Ok(Self { file, id })
    }

    fn handle(&self) -> IpcEventHandle {
        let origin = Origin::of(&self.file, self.id);
        IpcEventHandle::from_bytes(&origin.to_bytes(MAGIC))
    }
}

/// Checks that a handle leads to an event of another process.
pub(super) fn check(handle: &IpcEventHandle) -> Answer<()> {
    let origin = Origin::from_bytes(handle.expose_bytes(), MAGIC).ok_or(Code::MAP_FAILED)?;
    if origin.is_of_this_process() {
        return fail(Code::INVALID_CONTEXT);
    }
    match origin.is_there() {
        true => Ok(()),
        false => fail(Code::INVALID_HANDLE),
    }
}
