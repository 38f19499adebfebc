//! Registered memory is pages of the process: the kernel counts them as its own, and its calls take them. tests/all/files.rs
//! has O_DIRECT and io_uring.

use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use egmem::driver::{HandleTypes, Location};
use egmem::ledger::{Allocation, Ledger, Report};
use egmem::proof::{check_pattern, write_pattern};
use egmem::{Backing, Buffer, Driver, Growth, Memory, Topology};

use crate::nodes::pages::try_nodes_of;
use egmem_tests::drivers::on_both;

const MIB: u64 = 1 << 20;
const BYTES: u64 = 8 * MIB;

/// Returns registered memory near GPU 0, private and shareable, of several chunks, filled with a pattern.
fn registered(driver: &Driver) -> [Buffer; 2] {
    let topology = Topology::discover(driver).unwrap();
    let node = topology.gpu(0).unwrap().host_node().unwrap();
    [HandleTypes::NONE, HandleTypes::POSIX_FD].map(|types| {
        let options = Buffer::on(node).bytes(BYTES).backing(Backing::Registered);
        let options = options
            .growth(Growth::steady().chunk(2 * MIB))
            .handle_types(types);
        let buffer = options.allocate(driver).unwrap();
        write_pattern(&buffer.cpu().unwrap(), 5).unwrap();
        buffer
    })
}

fn addresses(buffer: &Buffer) -> Range<u64> {
    let start = buffer.cpu().unwrap().as_ptr().expose_provenance() as u64;
    start..start + buffer.len()
}

/// Returns a number of KiB in a line of `/proc/self/smaps`, in bytes.
fn bytes_of(line: &str, name: &str) -> Option<u64> {
    let kib = line.strip_prefix(name)?.strip_suffix("kB")?;
    kib.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// Returns the resident bytes of the mappings that lie in a range.
fn resident(range: &Range<u64>) -> u64 {
    let mut inside = false;
    let mut sum = 0;
    for line in fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let ends = line.split(' ').next().and_then(|ends| ends.split_once('-'));
        let ends =
            ends.map(|(start, end)| (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16)));
        if let Some((Ok(start), Ok(end))) = ends {
            inside = range.start <= start && end <= range.end;
        } else if inside {
            sum += bytes_of(line, "Rss:").unwrap_or(0);
        }
    }
    sum
}

/// In a process of its own: the kernel joins neighbouring mappings, also with those of other tests.
fn they_are_resident_memory_of_the_process(driver: &Driver) {
    let module = match driver.is_simulated() {
        true => concat!(module_path!(), "::simulated"),
        false => concat!(module_path!(), "::cuda"),
    };
    egmem_tests::alone(module, "they_are_resident_memory_of_the_process", || {
        // Without the program's own file, which the kernel may drop from memory.
        let process = || {
            let all = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
            let anonymous = |line| bytes_of(line, "Anonymous:");
            all.lines().find_map(anonymous).unwrap()
        };
        let before = process();
        let buffers = registered(driver);
        let ranges = buffers.each_ref().map(addresses);
        assert_eq!(ranges.each_ref().map(resident), [BYTES, BYTES]);
        assert!(
            process() >= before + BYTES,
            "the private pages, beside {before}"
        );
        drop(buffers);
        assert_eq!(ranges.each_ref().map(resident), [0, 0]);
    });
}

fn the_kernel_tells_their_nodes(driver: &Driver) {
    for buffer in registered(driver) {
        let nodes = match try_nodes_of((addresses(&buffer).start, BYTES)) {
            Err(error) => return println!("skipped: move_pages is forbidden here: {error}"),
            Ok(nodes) => nodes,
        };
        assert!(nodes.keys().all(|&node| node >= 0), "{nodes:?}");
        assert_eq!(nodes.values().sum::<usize>() as u64, BYTES / 4096);
    }
}

/// Advises the kernel about a range of this process from outside; returns the bytes that it took.
fn process_madvise(range: &Range<u64>, advice: libc::c_int) -> io::Result<u64> {
    // SAFETY: the call takes numbers, and returns a new fd, which nothing else owns.
    let pidfd = match unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) } {
        fd if fd < 0 => return Err(io::Error::last_os_error()),
        // SAFETY: as above.
        fd => unsafe { OwnedFd::from_raw_fd(fd as i32) },
    };
    let iov = libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(range.start as usize),
        iov_len: (range.end - range.start) as usize,
    };
    let fd = pidfd.as_raw_fd();
    // SAFETY: the kernel reads one iovec; the advice changes no byte of the range, which is mapped.
    let done =
        unsafe { libc::syscall(libc::SYS_process_madvise, fd, &raw const iov, 1, advice, 0) };
    u64::try_from(done).map_err(|_| io::Error::last_os_error())
}

fn process_madvise_takes_them(driver: &Driver) {
    for buffer in registered(driver) {
        for advice in [libc::MADV_COLD, libc::MADV_WILLNEED, libc::MADV_PAGEOUT] {
            match process_madvise(&addresses(&buffer), advice) {
                Ok(done) => assert_eq!(done, BYTES, "advice {advice}"),
                // It needs CAP_SYS_NICE on older kernels.
                Err(error) => match error.raw_os_error() {
                    Some(libc::EPERM | libc::ENOSYS) => {
                        return println!("skipped: process_madvise is forbidden here: {error}");
                    }
                    _ => panic!("advice {advice}: {error}"),
                },
            }
        }
        check_pattern(&buffer.cpu().unwrap(), 5).unwrap();
    }
}

/// `egmem ps` and `egmem doctor` count them as the kernel does, and not once more as the ledger's.
fn a_nodes_sums_have_them_once(driver: &Driver) {
    let buffers = registered(driver);
    let node = buffers[0].location();
    let own = Ledger::of_this_process();
    let of_buffer = |buffer: &Buffer| -> u64 {
        let range = addresses(buffer);
        let maps = |entry: &&Allocation| entry.mapped.iter().any(|at| range.contains(&at.start));
        own.allocations
            .iter()
            .filter(maps)
            .map(|entry| entry.bytes)
            .sum()
    };
    assert_eq!(buffers.each_ref().map(of_buffer), [BYTES, BYTES]);
    let report = Report::gather(Some(driver));
    let sums = report
        .nodes
        .iter()
        .find(|sums| Location::from(sums.node) == node);
    let sums = sums.unwrap();
    assert!(
        sums.kernel >= Some(2 * BYTES) && sums.used >= 2 * BYTES,
        "{sums:?}"
    );
    if driver.is_simulated() {
        // Nothing else is in use on this machine.
        assert_eq!(
            (sums.used, sums.unaccounted),
            (2 * BYTES, Some(0)),
            "{sums:?}"
        );
    }
}

on_both! {
    egmem::Machine::h200x8();
    they_are_resident_memory_of_the_process,
    the_kernel_tells_their_nodes,
    process_madvise_takes_them,
    a_nodes_sums_have_them_once,
}
