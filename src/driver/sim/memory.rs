//! Physical memory: a memfd, so that the bytes are real, take no memory until touched, and can be mapped by
//! another process.
//!
//! The simulated GPU accesses it by `pread` and `pwrite`: that needs no mapping, cannot fault, and leaves
//! holes in the file. The memfd's name contains the facts that an importer needs.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use rustix::fs::{
    FallocateFlags, MemfdFlags, OFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals,
    fcntl_getfl, memfd_create,
};

use super::capacity::{Bytes, Charge};
use crate::{Code, HandleTypes, Location, random};

/// The part of a copy that is in flight at a time.
const BOUNCE: usize = 256 << 10;
const MARK: &str = "egmem-sim-1";

/// The use of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// One handle's memory, of a fixed size.
    Physical,
    /// A pool's chunks, one after another; the file grows.
    Pool,
}

/// The information in a memfd's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Label {
    pub purpose: Purpose,
    pub location: Location,
    pub handle_types: HandleTypes,
    /// Identifies the memory among all simulators, past and present.
    pub id: u128,
}

impl Label {
    fn to_name(self) -> String {
        let purpose = match self.purpose {
            Purpose::Physical => "physical",
            Purpose::Pool => "pool",
        };
        let location = match self.location {
            Location::Device(ordinal) => format!("device:{ordinal}"),
            Location::HostNuma(node) => format!("node:{node}"),
            Location::Host | Location::HostNumaCurrent => "host".into(),
        };
        let types = self.handle_types.bits();
        format!("{MARK} {purpose} {location} {types:x} {:032x}", self.id)
    }

    fn from_name(name: &str) -> Option<Self> {
        let mut words = name.split(' ');
        let purpose = match (words.next()?, words.next()?) {
            (MARK, "physical") => Purpose::Physical,
            (MARK, "pool") => Purpose::Pool,
            _ => return None,
        };
        let location = match words.next()?.split_once(':') {
            Some(("device", ordinal)) => Location::Device(ordinal.parse().ok()?),
            Some(("node", node)) => Location::HostNuma(node.parse().ok()?),
            Some(_) => return None,
            None => Location::Host,
        };
        let handle_types = HandleTypes::from_bits(u32::from_str_radix(words.next()?, 16).ok()?);
        let id = u128::from_str_radix(words.next()?, 16).ok()?;
        words.next().is_none().then_some(Self {
            purpose,
            location,
            handle_types,
            id,
        })
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
        let file = File::from(memfd_create(label.to_name(), flags)?);
        if size > 0 {
            file.set_len(size)?;
        }
        // Seals keep an importer from truncating the file, which would remove pages under a mapping.
        let seals = match purpose {
            Purpose::Physical => SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
            Purpose::Pool => SealFlags::SHRINK | SealFlags::SEAL,
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
            let _ = self.fill(offset, 0, len);
        }
    }

    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Code> {
        self.file.read_exact_at(bytes, offset).map_err(|_| FAULT)
    }

    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Code> {
        self.file.write_all_at(bytes, offset).map_err(|_| FAULT)
    }

    /// Sets `len` bytes to `value`.
    pub fn fill(&self, offset: u64, value: u8, len: u64) -> Result<(), Code> {
        let pattern = vec![value; BOUNCE.min(len as usize)];
        pieces(len, |at, n| self.write(offset + at, &pattern[..n]))
    }

    /// Copies `len` bytes from other memory, or from another offset of this.
    pub fn copy_from(
        &self,
        offset: u64,
        from: &Self,
        from_offset: u64,
        len: u64,
    ) -> Result<(), Code> {
        let mut bounce = vec![0; BOUNCE.min(len as usize)];
        pieces(len, |at, n| {
            from.read(from_offset + at, &mut bounce[..n])?;
            self.write(offset + at, &bounce[..n])
        })
    }

    /// Copies `len` bytes from an address of this process. The kernel does it, so a wrong address is an
    /// error, not a fault.
    pub fn copy_from_address(&self, offset: u64, address: u64, len: u64) -> Result<(), Code> {
        self.transfer(offset, address, len, |fd, address, len, offset| {
            // SAFETY: the kernel checks the address and returns EFAULT if it cannot be read. The caller of
            // the copy guarantees that the range may be read.
            unsafe { libc::pwrite64(fd, address as *const _, len, offset) }
        })
    }

    /// Copies `len` bytes to an address of this process, as above.
    ///
    /// # Safety
    /// The caller may overwrite the range.
    pub unsafe fn copy_to_address(&self, offset: u64, address: u64, len: u64) -> Result<(), Code> {
        self.transfer(offset, address, len, |fd, address, len, offset| {
            // SAFETY: as above; the caller guarantees that the range may be overwritten.
            unsafe { libc::pread64(fd, address as *mut _, len, offset) }
        })
    }

    fn transfer(
        &self,
        offset: u64,
        address: u64,
        len: u64,
        call: impl Fn(i32, u64, usize, i64) -> isize,
    ) -> Result<(), Code> {
        let mut done = 0;
        while done < len {
            let (at, n) = (address.checked_add(done).ok_or(FAULT)?, len - done);
            let moved = call(
                self.file.as_raw_fd(),
                at,
                n as usize,
                (offset + done) as i64,
            );
            match moved {
                1.. => done += moved as u64,
                0 => return Err(FAULT),
                _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
                _ => return Err(FAULT),
            }
        }
        Ok(())
    }
}

const FAULT: Code = Code::ILLEGAL_ADDRESS;

fn open_again(file: &File) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    File::options().read(true).write(true).open(path)
}

fn pieces(len: u64, mut each: impl FnMut(u64, usize) -> Result<(), Code>) -> Result<(), Code> {
    let mut at = 0;
    while at < len {
        let n = (len - at).min(BOUNCE as u64);
        each(at, n as usize)?;
        at += n;
    }
    Ok(())
}

/// Asks the kernel to take the file's pages from its node. A machine with one node has no choice; elsewhere a
/// refusal (no such node, no permission) changes only where the pages lie, not the simulator's answers.
pub(super) fn bind(memory: &Memory, offset: u64, len: u64) {
    let Location::HostNuma(node) = memory.label.location else {
        return;
    };
    if len == 0 || !several_nodes() || !(0..1024).contains(&node) {
        return;
    }
    let mut mask = [0_u64; 16];
    mask[node as usize / 64] = 1 << (node % 64);
    // SAFETY: this block creates, binds and unmaps the mapping, and nothing accesses it; the policy of a
    // shared mapping of a memfd stays with the file. `mask` has 1024 bits and outlives the call.
    unsafe {
        let start = libc::mmap64(
            std::ptr::null_mut(),
            len as usize,
            libc::PROT_NONE,
            libc::MAP_SHARED | libc::MAP_NORESERVE,
            memory.file().as_raw_fd(),
            offset as i64,
        );
        if start != libc::MAP_FAILED {
            let (mode, bits) = (libc::MPOL_BIND, 1024_u64);
            libc::syscall(libc::SYS_mbind, start, len, mode, mask.as_ptr(), bits, 0);
            libc::munmap(start, len as usize);
        }
    }
}

fn several_nodes() -> bool {
    static SEVERAL: OnceLock<bool> = OnceLock::new();
    *SEVERAL.get_or_init(|| {
        let online = std::fs::read_to_string("/sys/devices/system/node/online");
        online.is_ok_and(|list| list.trim().contains(['-', ',']))
    })
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
            assert_eq!(Label::from_name(&label.to_name()), Some(label));
        }
        for garbage in ["", "memory", "egmem-sim-1 physical node:x 1 2"] {
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
        let memory = memory(Purpose::Physical);
        assert_eq!(memory.copy_from_address(0, 4096, 16), Err(FAULT));
        // SAFETY: nothing is mapped at the address, so nothing can be overwritten.
        let answer = unsafe { memory.copy_to_address(0, 4096, 16) };
        assert_eq!(answer, Err(FAULT));
        let text = *b"some words";
        memory
            .copy_from_address(5, text.as_ptr() as u64, text.len() as u64)
            .unwrap();
        let mut back = [0_u8; 10];
        // SAFETY: `back` is a local variable and long enough.
        unsafe { memory.copy_to_address(5, back.as_mut_ptr() as u64, 10) }.unwrap();
        assert_eq!(back, text);
    }

    #[test]
    fn discarded_bytes_are_zero() {
        let memory = memory(Purpose::Pool);
        memory.fill(0, 7, 2 << 20).unwrap();
        memory.discard(1 << 20, 1 << 20);
        let mut bytes = [1; 2];
        memory.read((1 << 20) - 1, &mut bytes).unwrap();
        assert_eq!(bytes, [7, 0]);
    }
}
