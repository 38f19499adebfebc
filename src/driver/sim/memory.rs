//! Physical memory: a memfd, so that the bytes are real, take no memory until touched, and can be mapped by
//! another process.
//!
//! The simulated GPU accesses it by `pread` and `pwrite`: that needs no mapping, cannot fault, and leaves
//! holes in the file. The memfd's name contains the facts that an importer needs.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{
    FallocateFlags, MemfdFlags, OFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals,
    fcntl_getfl, memfd_create,
};
use serde::{Deserialize, Serialize};

use super::capacity::{Bytes, Charge};
use crate::{Code, HandleTypes, Location, random};

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
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create(label.to_name()?, flags)?);
        if size > 0 {
            file.set_len(size)?;
        }
        // Seals keep an importer from truncating the file, which would remove pages under a mapping.
        let seals = match purpose {
            Purpose::Physical => SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
            Purpose::Pool | Purpose::Event => SealFlags::SHRINK | SealFlags::SEAL,
        };
        fcntl_add_seals(&file, seals)?;
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
        let (seals, flags) = (fcntl_get_seals(&given).ok()?, fcntl_getfl(&given).ok()?);
        if !seals.contains(SealFlags::SHRINK) || flags & OFlags::ACCMODE != OFlags::RDWR {
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

    /// Opens the memory as a new open file, not a duplicate: its locks are separate.
    pub fn open_again(&self) -> io::Result<File> {
        open_again(&self.file)
    }

    /// Returns an fd for others: one reference until its last duplicate is closed, in any process.
    pub fn export(&self) -> io::Result<OwnedFd> {
        let file = self.open_again()?;
        Bytes::new()?.lock(&file);
        Ok(file.into())
    }

    /// Parses an open file's name; `None` if it is not a simulator's memory.
    pub fn label_of(file: &File) -> Option<Label> {
        let target = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
        let name = target.to_str()?.strip_prefix("/memfd:")?;
        Label::from_name(name.strip_suffix(" (deleted)").unwrap_or(name))
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
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if fallocate(&self.file, mode, offset, len).is_err() {
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

const FAULT: Code = Code::ILLEGAL_ADDRESS;

fn open_again(file: &File) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    File::options().read(true).write(true).open(path)
}

/// Reads this process's own memory. The kernel does it, so a wrong address is an error, not a fault.
pub(super) fn read_own(address: u64, bytes: &mut [u8]) -> Result<(), Code> {
    let file = scratch()?;
    // SAFETY: the kernel checks the address and returns EFAULT if it cannot be read. The caller of the driver's call
    // guarantees that the range may be read.
    let moved = unsafe { libc::pwrite64(file.as_raw_fd(), address as *const _, bytes.len(), 0) };
    if moved != bytes.len() as isize {
        return Err(FAULT);
    }
    file.read_exact_at(bytes, 0).map_err(|_| FAULT)
}

/// Overwrites this process's own memory, as above.
///
/// # Safety
/// The caller may overwrite the range.
pub(super) unsafe fn write_own(address: u64, bytes: &[u8]) -> Result<(), Code> {
    let file = scratch()?;
    file.write_all_at(bytes, 0).map_err(|_| FAULT)?;
    // SAFETY: as above; the caller guarantees that the range may be overwritten.
    let moved = unsafe { libc::pread64(file.as_raw_fd(), address as *mut _, bytes.len(), 0) };
    if moved == bytes.len() as isize {
        Ok(())
    } else {
        Err(FAULT)
    }
}

/// Creates a file to pass bytes through.
fn scratch() -> Result<File, Code> {
    let file = memfd_create("egmem-sim-scratch", MemfdFlags::CLOEXEC);
    file.map(File::from).map_err(|_| Code::OUT_OF_MEMORY)
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
    fn a_wrong_address_is_an_error() {
        assert_eq!(read_own(4096, &mut [0; 16]), Err(FAULT));
        // SAFETY: nothing is mapped at the address, so nothing can be overwritten.
        assert_eq!(unsafe { write_own(4096, &[0; 16]) }, Err(FAULT));
        let (text, mut read, mut back) = (*b"some words", [0; 10], [0_u8; 10]);
        read_own(text.as_ptr() as u64, &mut read).unwrap();
        // SAFETY: `back` is a local variable and long enough.
        unsafe { write_own(back.as_mut_ptr() as u64, &read) }.unwrap();
        assert_eq!(back, text);
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
