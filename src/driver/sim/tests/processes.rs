//! Memory between processes. Each test runs itself again as a child, which plays the other process.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;

use super::*;

const HANDLE: &str = "EGMEM_SIM_TEST_HANDLE";
const WORDS: u64 = GRANULE / 8;

fn props(bits: u32) -> AllocationProps {
    AllocationProps::at(Location::HostNuma(0)).handle_types(HandleTypes::from_bits(bits))
}

/// Returns the parent's fd, which the child got as its standard input.
fn inherited() -> ShareableHandle {
    ShareableHandle::PosixFd(std::io::stdin().as_fd().try_clone_to_owned().unwrap())
}

/// Maps the shared memory, checks the parent's word and answers with another.
fn answer(driver: &Driver, shared: &ShareableHandle) {
    let handle = driver.mem_import(shared).unwrap();
    let found = driver.mem_properties(handle).unwrap();
    assert_eq!(found, props(0));
    let memory = Mapped::of(driver, handle, GRANULE);
    memory.grant_all(driver);
    assert_eq!(peek(memory.ptr), 41);
    let stream = driver.stream_create(0).unwrap();
    // SAFETY: the parent waits for this process before it reads.
    unsafe { driver.memset_d8_async(memory.ptr.add(8), 9, 8, stream) }.unwrap();
    driver.stream_synchronize(stream).unwrap();
    poke(memory.ptr, 42);
    memory.give_back(driver);
}

#[test]
fn an_fd_is_memory_in_another_process() {
    let driver = h200();
    if is_child() {
        return answer(&driver, &inherited());
    }
    let handle = driver.mem_create(GRANULE, &props(1)).unwrap();
    let memory = Mapped::of(&driver, handle, GRANULE);
    memory.grant_all(&driver);
    poke(memory.ptr, 41);
    let Ok(ShareableHandle::PosixFd(fd)) = driver.mem_export(handle, HandleType::PosixFd) else {
        panic!("no fd");
    };
    let name = "processes::an_fd_is_memory_in_another_process";
    assert!(child(name, &[], fd.into()).success());
    assert_eq!(peek(memory.ptr), 42);
    assert_eq!(peek(memory.ptr.add(8)), u64::from_ne_bytes([9; 8]));
}

#[test]
fn a_fabric_handle_is_memory_in_another_process() {
    let driver = driver(Machine::gh200());
    if is_child() {
        let handle = FabricHandle::from_bytes(&bytes_of(HANDLE));
        return answer(&driver, &ShareableHandle::Fabric(handle));
    }
    let handle = driver.mem_create(GRANULE, &props(9)).unwrap();
    let memory = Mapped::of(&driver, handle, GRANULE);
    memory.grant_all(&driver);
    poke(memory.ptr, 41);
    let Ok(ShareableHandle::Fabric(fabric)) = driver.mem_export(handle, HandleType::Fabric) else {
        panic!("no fabric handle");
    };
    let name = "processes::a_fabric_handle_is_memory_in_another_process";
    let environment = [(HANDLE, hex(fabric.expose_bytes()))];
    assert!(child(name, &environment, Stdio::null()).success());
    assert_eq!(peek(memory.ptr), 42);
}

#[test]
fn a_pools_pointer_is_memory_in_another_process() {
    let driver = h200();
    let pools = driver.driver_pools();
    let stream = driver.stream_create(0).unwrap();
    if is_child() {
        let pool = pools.pool_import(&inherited()).unwrap();
        let export = PoolPtrExport(bytes_of(HANDLE));
        let ptr = pools.pool_import_pointer(pool, &export).unwrap();
        assert_eq!(peek(ptr.add(8 * (WORDS - 1))), 41);
        poke(ptr, 42);
        // SAFETY: this process is done with both.
        unsafe {
            pools.free_async(ptr, stream).unwrap();
            pools.pool_destroy(pool).unwrap();
        }
        driver.stream_synchronize(stream).unwrap();
        return assert_eq!(sim(&driver).held().streams, 1);
    }
    let props = PoolProps {
        location: Location::HostNuma(0),
        handle_types: HandleTypes::POSIX_FD,
        max_size: 0,
    };
    let pool = pools.pool_create(&props).unwrap();
    let Ok(ShareableHandle::PosixFd(fd)) = pools.pool_export(pool, HandleType::PosixFd) else {
        panic!("no fd");
    };
    pools.alloc_from_pool_async(pool, 5000, stream).unwrap();
    let ptr = pools.alloc_from_pool_async(pool, GRANULE, stream).unwrap();
    poke(ptr.add(8 * (WORDS - 1)), 41);
    let export = pools.pool_export_pointer(ptr).unwrap();
    let name = "processes::a_pools_pointer_is_memory_in_another_process";
    assert!(child(name, &[(HANDLE, hex(&export.0))], fd.into()).success());
    assert_eq!(peek(ptr), 42);
}

#[test]
fn an_import_outlives_its_exporter() {
    let driver = h200();
    let name = "processes::an_import_outlives_its_exporter";
    if is_child() {
        // The exporter: it puts its memory where its parent finds it, and exits.
        let handle = driver.mem_create(GRANULE, &props(1)).unwrap();
        let memory = Mapped::of(&driver, handle, GRANULE);
        memory.grant_all(&driver);
        poke(memory.ptr, 41);
        let Ok(ShareableHandle::PosixFd(fd)) = driver.mem_export(handle, HandleType::PosixFd)
        else {
            panic!("no fd");
        };
        send(&std::io::stdin().as_fd().try_clone_to_owned().unwrap(), &fd);
        std::process::abort();
    }
    let (ours, theirs) = std::os::unix::net::UnixDatagram::pair().unwrap();
    let status = child(name, &[], OwnedFd::from(theirs).into());
    assert_eq!(status.signal(), Some(libc::SIGABRT));
    let shared = ShareableHandle::PosixFd(receive(&ours.into()));
    let handle = driver.mem_import(&shared).unwrap();
    let memory = Mapped::of(&driver, handle, GRANULE);
    memory.grant_all(&driver);
    assert_eq!(peek(memory.ptr), 41);
}

/// Returns the signal that ends a process when it accesses memory granted with `access`.
fn touch(name: &str, access: &[AccessDesc], touch: fn(DevicePtr)) -> Option<i32> {
    if !is_child() {
        return child(&format!("processes::{name}"), &[], Stdio::null()).signal();
    }
    // SAFETY: this installs no handler; a sanitizer's handler would report the intended fault.
    unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
    let driver = h200();
    let memory = Mapped::new(&driver, Location::HostNuma(0), GRANULE);
    memory.grant(&driver, access);
    touch(memory.ptr);
    None
}

fn look(ptr: DevicePtr) {
    peek(ptr);
}

#[test]
fn touching_what_only_the_gpu_may_touch_faults() {
    let gpu = [desc(Location::Device(0), Access::ReadWrite)];
    let end = touch("touching_what_only_the_gpu_may_touch_faults", &gpu, look);
    assert!(is_child() || end == Some(libc::SIGSEGV), "{end:?}");
}

#[test]
fn writing_what_may_only_be_read_faults() {
    let host = [desc(Location::Host, Access::Read)];
    let write: fn(DevicePtr) = |ptr| {
        look(ptr);
        poke(ptr, 1);
    };
    let end = touch("writing_what_may_only_be_read_faults", &host, write);
    assert!(is_child() || end == Some(libc::SIGSEGV), "{end:?}");
}

fn send(socket: &OwnedFd, fd: &OwnedFd) {
    pass(socket, Some(fd));
}

fn receive(socket: &OwnedFd) -> OwnedFd {
    pass(socket, None).unwrap()
}

/// Sends an fd over a socket, or receives one.
fn pass(socket: &OwnedFd, fd: Option<&OwnedFd>) -> Option<OwnedFd> {
    use std::os::fd::{AsRawFd, FromRawFd};
    let mut byte = [0_u8];
    let mut control = [0_u64; 8];
    let mut vector = libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: 1,
    };
    // SAFETY: all pointers are to locals that outlive the calls, with their sizes; the control buffer is
    // aligned and has room for one fd; a received fd has no other owner.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut vector;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(4) as _;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        match fd {
            Some(fd) => {
                (*header).cmsg_level = libc::SOL_SOCKET;
                (*header).cmsg_type = libc::SCM_RIGHTS;
                (*header).cmsg_len = libc::CMSG_LEN(4) as _;
                libc::CMSG_DATA(header)
                    .cast::<i32>()
                    .write_unaligned(fd.as_raw_fd());
                assert_eq!(libc::sendmsg(socket.as_raw_fd(), &raw const message, 0), 1);
                None
            }
            None => {
                assert_eq!(libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0), 1);
                let header = libc::CMSG_FIRSTHDR(&raw const message);
                let fd = libc::CMSG_DATA(header).cast::<i32>().read_unaligned();
                Some(OwnedFd::from_raw_fd(fd))
            }
        }
    }
}
