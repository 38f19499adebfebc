//! Ten thousand allocations and frees leave the process's memory, files and mappings where they were.

use egmem::{Buffer, Driver, Pool, Stream};
use egmem_tests::{alone, drivers};

const MIB: u64 = 1 << 20;
const CYCLES: usize = 10_000;

#[test]
fn cycles_leave_the_process_as_it_was() {
    let name = "cycles_leave_the_process_as_it_was";
    alone(module_path!(), name, cycles);
}

fn cycles() {
    let simulated = drivers::grace();
    cycle(&simulated);
    drivers::nothing_held(&simulated);
    if let Some(cuda) = drivers::cuda() {
        cycle(&cuda);
    }
}

fn cycle(driver: &Driver) {
    let stream = Stream::new(driver, 0).unwrap();
    let pool = Pool::options(drivers::node(driver))
        .release_threshold(u64::MAX)
        .create(driver)
        .unwrap();
    let cycle = || {
        drop(Buffer::near(driver, 0, MIB).unwrap());
        pool.allocate(4096, &stream)
            .unwrap()
            .free_on(&stream)
            .unwrap();
        stream.synchronize().unwrap();
    };
    (0..CYCLES / 10).for_each(|_| cycle());
    let before = Footprint::now();
    (0..CYCLES).for_each(|_| cycle());
    let after = Footprint::now();
    println!("{driver:?}: {before:?}, then {after:?}");
    assert_eq!(after.fds, before.fds, "files");
    // An allowance for the C library's and the driver's allocators; a leak shows ten thousand times.
    assert!(after.maps <= before.maps + 16, "mappings");
    // Sanitizers keep freed memory, and look for leaks by themselves.
    if std::env::var_os("EGMEM_SANITIZER").is_none() {
        assert!(after.rss <= before.rss + 2 * MIB, "resident memory");
    }
}

#[derive(Debug)]
struct Footprint {
    fds: usize,
    maps: usize,
    rss: u64,
}

impl Footprint {
    fn now() -> Self {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
        // SAFETY: sysconf has no preconditions.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        Self {
            fds: std::fs::read_dir("/proc/self/fd").unwrap().count(),
            maps: maps.lines().count(),
            rss: pages * page,
        }
    }
}
