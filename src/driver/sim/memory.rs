//! Physical memory: a memfd, so that the bytes are real, take no memory until touched, and can be mapped by
//! another process; what leaves the process: memory as an fd, memory and events under a handle of 64 bytes.
//!
//! The simulated GPU accesses it by `pread` and `pwrite`: that needs no mapping, cannot fault, and leaves
//! holes in the file. The memfd's name contains the facts that an importer needs.
//!
//! A simulated handle contains a process of this machine, its fd of a file and the file's random id, which is in the
//! file's name. An importer opens the file through `/proc`, so no server is needed.
//!
//! No process can run another's work. So a record of an event that other processes may open runs the work before it at
//! once, and what a process sees as recorded has run: a wait for it has nothing to wait for.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};

use super::capacity::{Bytes, Charge};
use super::fault::{Answer, fail};
use crate::*;

/// What a memfd's name begins with; a label in JSON follows.
const MARK: &str = "egmem-sim-2 ";

/// The use of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Purpose {
    /// One handle's memory, of a fixed size.
    Physical,
    /// A pool's chunks, one after another; the file grows.
    Pool,
    /// None: an event that left the process.
    Event,
}

/// The information in a memfd's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Label {
    pub purpose: Purpose,
    pub location: Location,
    pub handle_types: HandleTypes,
    /// Identifies the memory among all simulators, past and present.
    pub id: u128,
}

impl Label {
    fn to_name(self) -> io::Result<String> {
        Ok(format!("{MARK}{}", serde_json::to_string(&self)?))
    }

    /// Reads that of a file that a process has open, by the link in `/proc`.
    fn at(link: &str) -> Option<Self> {
        let target = std::fs::read_link(link).ok()?;
        let name = target.to_str()?.strip_prefix("/memfd:")?;
        Self::from_name(name.strip_suffix(" (deleted)").unwrap_or(name))
    }

    fn from_name(name: &str) -> Option<Self> {
        serde_json::from_str(name.strip_prefix(MARK)?).ok()
    }
}

/// Real memory behind simulated physical memory.
#[derive(Debug)]
pub(super) struct Memory {
    file: File,
    pub label: Label,
    /// The bytes that this process's references lock.
    pub bytes: Bytes,
    /// The capacity it takes; `None` for imported memory, which counts at its exporter, and for pools, which
    /// take capacity by the chunk.
    _charge: Option<Charge>,
}

impl Memory {
    /// Creates memory of `size` bytes, all zero. A pool's memory starts empty and grows.
    pub fn create(
        purpose: Purpose,
        location: Location,
        handle_types: HandleTypes,
        size: u64,
        charge: Option<Charge>,
    ) -> io::Result<Self> {
        let label = Label {
            purpose,
            location,
            handle_types,
            id: u128::from_ne_bytes(random()?),
        };
        let file = memfd(&label.to_name()?)?;
        if size > 0 {
            file.set_len(size)?;
        }
        // Seals keep an importer from truncating the file, which would remove pages under a mapping.
        let seals = match purpose {
            Purpose::Physical => libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL,
            Purpose::Pool | Purpose::Event => libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL,
        };
        control(&file, libc::F_ADD_SEALS, seals)?;
        Ok(Self {
            file,
            label,
            bytes: Bytes::new()?,
            _charge: charge,
        })
    }

    /// Opens the memory behind an fd that a simulator exported, in this process or another; `None` for any
    /// other fd.
    pub fn import(fd: BorrowedFd<'_>, purpose: Purpose) -> Option<Self> {
        let given = File::from(fd.try_clone_to_owned().ok()?);
        let label = Self::label_of(&given).filter(|label| label.purpose == purpose)?;
        let seals = control(&given, libc::F_GET_SEALS, 0).ok()?;
        let flags = control(&given, libc::F_GETFL, 0).ok()?;
        if seals & libc::F_SEAL_SHRINK == 0 || flags & libc::O_ACCMODE != libc::O_RDWR {
            return None;
        }
        Some(Self {
            // Opened again: the exporter's file keeps the export's lock.
            file: open_again(&given).ok()?,
            label,
            bytes: Bytes::new().ok()?,
            _charge: None,
        })
    }

    /// Returns an fd for others: one reference until its last duplicate is closed, in any process.
    pub fn export(&self) -> io::Result<OwnedFd> {
        let file = open_again(&self.file)?;
        Bytes::new()?.lock(&file);
        Ok(file.into())
    }

    /// Parses an open file's name; `None` if it is not a simulator's memory.
    pub fn label_of(file: &File) -> Option<Label> {
        Label::at(&format!("/proc/self/fd/{}", file.as_raw_fd()))
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns the current size: another process may have grown a pool's memory.
    pub fn size(&self) -> u64 {
        self.file.metadata().map_or(0, |data| data.len())
    }

    /// Grows the file to at least `size` bytes.
    pub fn grow(&self, size: u64) -> io::Result<()> {
        if self.size() < size {
            self.file.set_len(size)?;
        }
        Ok(())
    }

    /// Frees the pages of a range, which then reads as zero.
    pub fn discard(&self, offset: u64, len: u64) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (fd, at, bytes) = (self.file.as_raw_fd(), offset as i64, len as i64);
        // SAFETY: the fd is open; the call changes the file, whose bytes in this range no allocation has.
        if unsafe { libc::fallocate64(fd, mode, at, bytes) } != 0 {
            // If the kernel refuses, the pages stay until the pool dies, but the bytes must still become
            // zero.
            let _ = self.write(offset, &vec![0; len as usize]);
        }
    }

    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Code> {
        self.file.read_exact_at(bytes, offset).map_err(|_| FAULT)
    }

    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Code> {
        self.file.write_all_at(bytes, offset).map_err(|_| FAULT)
    }
}

pub(super) const FAULT: Code = Code::ILLEGAL_ADDRESS;

/// Creates a file without a place in any file system, which may be sealed.
///
/// The simulator makes such calls by libc, as those for mappings: so this crate is compiled beside rustix, not after it.
pub(super) fn memfd(name: &str) -> io::Result<File> {
    let name = CString::new(name)?;
    // SAFETY: the name ends with a NUL.
    let fd =
        unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just opened the fd, which has no other owner.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Asks about a file, or changes it; returns the answer.
fn control(file: &File, command: i32, argument: i32) -> io::Result<i32> {
    // SAFETY: the fd is open; the commands of the callers take an integer and access no memory.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, argument) } {
        -1 => Err(io::Error::last_os_error()),
        answer => Ok(answer),
    }
}

/// Opens a file as a new open file, not a duplicate: its locks are separate.
pub(super) fn open_again(file: &File) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    File::options().read(true).write(true).open(path)
}

/// What handles of memory and of events begin with.
const MAGIC: &str = "egmemsim";
const EVENT_MAGIC: &str = "egmemevt";

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

    fn to_bytes(&self, magic: &str) -> [u8; 64] {
        let mut bytes = [0; 64];
        let text = format!("{magic} {} {} {:x}", self.process, self.fd, self.id);
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        bytes
    }

    /// Returns `None` for bytes that are not of such a handle.
    fn from_bytes(bytes: &[u8; 64], magic: &str) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?.trim_end_matches('\0');
        let words: Vec<&str> = text.split(' ').collect();
        let &[start, process, fd, id] = &words[..] else {
            return None;
        };
        (start == magic).then_some(Self {
            process: process.parse().ok()?,
            fd: fd.parse().ok()?,
            id: u128::from_str_radix(id, 16).ok()?,
        })
    }

    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", self.process, self.fd)
    }

    /// Returns whether the fd is still that file's: the process may have ended, or closed it and have another under its
    /// number. The name tells; opening a foreign fd may block or have side effects.
    fn is_there(&self) -> bool {
        Label::at(&self.path()).is_some_and(|label| label.id == self.id)
    }
}

/// Makes a handle by which others import the memory.
pub(super) fn export(memory: &Memory, kind: HandleType) -> io::Result<ShareableHandle> {
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
    let handle = match handle {
        ShareableHandle::PosixFd(fd) => {
            let refusal = match purpose {
                Purpose::Physical => Code::UNKNOWN,
                Purpose::Pool | Purpose::Event => Code::INVALID_VALUE,
            };
            return Ok(Memory::import(fd.as_fd(), purpose).ok_or(refusal)?);
        }
        ShareableHandle::Fabric(handle) => handle,
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
    if origin.process == std::process::id() {
        return fail(Code::INVALID_CONTEXT);
    }
    match origin.is_there() {
        true => Ok(()),
        false => fail(Code::INVALID_HANDLE),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn memory(purpose: Purpose) -> Memory {
        let location = Location::HostNuma(3);
        Memory::create(purpose, location, HandleTypes::POSIX_FD, 2 << 20, None).unwrap()
    }

    #[test]
    fn names_read_back() {
        for location in [Location::Device(2), Location::Host, Location::HostNuma(28)] {
            let label = Label {
                purpose: Purpose::Pool,
                location,
                handle_types: HandleTypes::POSIX_FD | HandleTypes::FABRIC,
                id: 0x1234,
            };
            assert_eq!(Label::from_name(&label.to_name().unwrap()), Some(label));
        }
        for garbage in ["", "memory", "egmem-sim-2 {}", "egmem-sim-2 "] {
            assert_eq!(Label::from_name(garbage), None);
        }
    }

    #[test]
    fn an_importer_learns_what_the_memory_is_and_sees_its_bytes() {
        let memory = memory(Purpose::Physical);
        let imported = Memory::import(memory.file().as_fd(), Purpose::Physical).unwrap();
        assert_eq!(imported.label, memory.label);
        memory.write(77, b"both").unwrap();
        let mut bytes = [0; 4];
        imported.read(77, &mut bytes).unwrap();
        assert_eq!(&bytes, b"both");
        assert!(Memory::import(memory.file().as_fd(), Purpose::Pool).is_none());
    }

    #[test]
    fn other_files_are_no_memory() {
        let file = tempfile::tempfile().unwrap();
        assert!(Memory::import(file.as_fd(), Purpose::Physical).is_none());
        let (read, _write) = std::io::pipe().unwrap();
        assert!(Memory::import(read.as_fd(), Purpose::Physical).is_none());
    }

    #[test]
    fn nobody_can_truncate_it() {
        assert!(memory(Purpose::Physical).file().set_len(0).is_err());
        let pool = memory(Purpose::Pool);
        assert!(pool.file().set_len(0).is_err());
        pool.grow(4 << 20).unwrap();
        assert_eq!(pool.size(), 4 << 20);
    }

    #[test]
    fn discarded_bytes_are_zero() {
        let memory = memory(Purpose::Pool);
        memory.write(0, &[7; 2 << 20]).unwrap();
        memory.discard(1 << 20, 1 << 20);
        let mut bytes = [1; 2];
        memory.read((1 << 20) - 1, &mut bytes).unwrap();
        assert_eq!(bytes, [7, 0]);
    }
}
