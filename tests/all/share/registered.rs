//! Registered memory between processes: its bytes, and the files that a hostile peer can send in its place.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};

use egmem::driver::{Access, HandleType, HandleTypes, Location, ShareableHandle};
use egmem::proof::{check_pattern, write_pattern};
use egmem::share::{Description, ImportOptions, ImportedBuffer, Shared};
use egmem::{Backing, Buffer, Driver, Error, Growth, Result, Stream};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, memfd_create};

use super::memory::{owner_dies, shows_the_same_bytes};
use super::{MIB, node, nothing_held, open};

/// Memory for the CPU and all GPUs.
pub fn registered(driver: &Driver, bytes: u64) -> Shared {
    let buffer = Buffer::on(node(driver))
        .handle_types(HandleTypes::POSIX_FD)
        .backing(Backing::Registered)
        .growth(Growth::steady().chunk(4 * MIB))
        .bytes(bytes)
        .allocate(driver)
        .unwrap();
    Shared::from(buffer)
}

#[test]
fn registered_memory_shows_the_same_bytes_to_both() {
    let driver = open();
    for (bytes, parts) in [(3 * MIB, 1), (15 * MIB, 4)] {
        let shared = registered(&driver, bytes);
        assert_eq!(shared.part_count(), parts);
        shows_the_same_bytes(&driver, shared);
    }
}

#[test]
fn an_owner_of_registered_memory_that_is_killed_leaves_it() {
    owner_dies("registered-owner");
}

/// A peer that was granted memory can make holes in its file.
#[test]
fn holes_are_zeros_and_fault_nobody() {
    let driver = open();
    let shared = registered(&driver, 4 * MIB);
    let description = shared.describe(Access::ReadWrite).unwrap();
    let cpu = ImportOptions::new().access_by::<Location>([]);
    let fds = shared.export(HandleType::PosixFd).unwrap();
    let imported = cpu.import(&driver, &description, fds).unwrap();
    write_pattern(&imported.cpu().unwrap(), 4).unwrap();

    let handles = shared.export(HandleType::PosixFd).unwrap();
    let [ShareableHandle::PosixFd(fd)] = &handles[..] else {
        panic!("no fd");
    };
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(fd, hole, 0, 4 * MIB).unwrap();
    let mut bytes = vec![1_u8; 4 << 20];
    imported.read_at(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0));
    imported.put(3 * MIB, 7_u64).unwrap();
    // The owner's CPU sees the same; its GPU has the pages from before, or these, and does not fault.
    let owner = shared.buffer().unwrap();
    assert_eq!(owner.get(3 * MIB), Ok(7_u64));
    let stream = Stream::new(&driver, 0).unwrap();
    stream.fill(&**owner, 0, owner.len(), 9).unwrap();
    drop((stream, imported, handles));
    // A new mapping has the file's pages for CPU and GPU.
    let again = import(&driver, &description, &shared);
    write_pattern(&again.cpu().unwrap(), 5).unwrap();
    check_pattern(&owner.cpu().unwrap(), 5).unwrap();
    drop((again, shared));
    nothing_held(&driver);
}

fn import(driver: &Driver, description: &Description, shared: &Shared) -> ImportedBuffer {
    let fds = shared.export(HandleType::PosixFd).unwrap();
    ImportOptions::new()
        .import(driver, description, fds)
        .unwrap()
}

const OURS: &str = "egmem-pages node 0";
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

fn memfd(name: &str, flags: MemfdFlags, seals: SealFlags) -> File {
    let file = memfd_create(name, MemfdFlags::ALLOW_SEALING | flags).unwrap();
    let file = File::from(file);
    file.set_len(4 * MIB).unwrap();
    if !flags.contains(MemfdFlags::HUGETLB) {
        // On a real machine a file without its pages is refused for that.
        fallocate(&file, FallocateFlags::empty(), 0, 4 * MIB).unwrap();
    }
    if !seals.is_empty() {
        fcntl_add_seals(&file, seals).unwrap();
    }
    file
}

#[test]
fn another_file_than_sealed_memory_is_refused() {
    let driver = open();
    let shared = registered(&driver, 4 * MIB);
    let right = shared.describe(Access::ReadWrite).unwrap();
    let as_described = |description: &Description, file: File| -> Result<ImportedBuffer> {
        let handle = ShareableHandle::PosixFd(OwnedFd::from(file));
        ImportOptions::new().import(&driver, description, vec![handle])
    };
    let none = MemfdFlags::empty();
    let read_only = memfd(OURS, none, SEALS);
    let read_only = File::open(format!("/proc/self/fd/{}", read_only.as_raw_fd())).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let plain = OpenOptions::new()
        .create_new(true)
        .read(true)
        .write(true)
        .open(folder.path().join(OURS));
    let plain = plain.unwrap();
    plain.set_len(4 * MIB).unwrap();
    let refused = |file, what: &str| {
        let error = as_described(&right, file).unwrap_err();
        let found = match &error {
            Error::InvalidArgument { what, .. } => *what,
            Error::System { .. } => "system",
            _ if error.driver_error().is_some() => "driver",
            _ => "",
        };
        assert_eq!(found, what, "{error}");
    };
    let shrinking = SealFlags::GROW | SealFlags::SEAL;
    refused(memfd(OURS, none, SealFlags::empty()), "fd");
    refused(memfd(OURS, none, shrinking), "fd");
    refused(memfd(OURS, none, SealFlags::SHRINK | SealFlags::GROW), "fd");
    refused(memfd("another", none, SEALS), "driver");
    refused(plain, "driver");
    // Nobody can write them: they cannot be mapped.
    refused(read_only, "system");
    refused(memfd(OURS, none, SEALS | SealFlags::FUTURE_WRITE), "system");
    let huge = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    if memfd_create("huge", huge).is_ok() {
        refused(memfd(OURS, huge, SEALS), "fd");
    }
    let mut larger = right.clone();
    larger.parts[0].bytes = 6 * MIB;
    larger.len = 6 * MIB;
    let error = as_described(&larger, memfd(OURS, none, SEALS)).unwrap_err();
    let is_size = matches!(error, Error::InvalidArgument { what: "size", .. });
    assert!(is_size, "{error}");
    drop(as_described(&right, memfd(OURS, none, SEALS)).unwrap());
    drop(shared);
    nothing_held(&driver);
}
