//! Everything is released, and threads do not disturb each other.

use super::super::Held;
use super::*;
use crate::kernels;

/// Returns this process's open fds and mapped ranges.
fn open() -> (usize, usize) {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ours = maps.lines().filter(|line| line.contains("egmem-sim"));
    (fds, ours.count())
}

/// Creates one of everything, and releases it if `tidy`.
fn use_everything(driver: &Driver, tidy: bool) {
    let props = AllocationProps::at(Location::HostNuma(0)).handle_types(HandleTypes::POSIX_FD);
    let handle = driver.mem_create(GRANULE, &props).unwrap();
    let fd = driver.mem_export(handle, HandleType::PosixFd).unwrap();
    let memory = Mapped::of(driver, handle, GRANULE);
    memory.grant_all(driver);
    let imported = Mapped::of(driver, driver.mem_import(&fd).unwrap(), GRANULE);
    let stream = driver.stream_create(0).unwrap();
    let event = driver.event_create(0, true).unwrap();
    let module = driver.module_load(0, kernels::PTX).unwrap();
    let device = driver.mem_alloc(0, 4096).unwrap();
    let host = driver.mem_host_alloc(0, 4096).unwrap();
    let managed = driver.mem_alloc_managed(0, 4096).unwrap();
    let pools = driver.driver_pools();
    let props = PoolProps {
        location: Location::HostNuma(0),
        handle_types: HandleTypes::POSIX_FD,
        max_size: 0,
    };
    let pool = pools.pool_create(&props).unwrap();
    let fd = pools.pool_export(pool, HandleType::PosixFd).unwrap();
    let ptr = pools.alloc_from_pool_async(pool, 4096, stream).unwrap();
    let guest = pools.pool_import(&fd).unwrap();
    let export = pools.pool_export_pointer(ptr).unwrap();
    let shared = pools.pool_import_pointer(guest, &export).unwrap();
    driver.event_record(event, stream).unwrap();
    if !tidy {
        return;
    }
    // SAFETY: this function is done with all of it.
    unsafe {
        pools.free_async(shared, stream).unwrap();
        pools.pool_destroy(guest).unwrap();
        pools.free_async(ptr, stream).unwrap();
        pools.pool_destroy(pool).unwrap();
        driver.stream_synchronize(stream).unwrap();
        driver.stream_destroy(stream).unwrap();
        driver.event_destroy(event).unwrap();
        driver.module_unload(0, module).unwrap();
        driver.mem_free(0, device).unwrap();
        driver.mem_free_host(0, host).unwrap();
        driver.mem_free(0, managed).unwrap();
    }
    imported.give_back(driver);
    memory.give_back(driver);
}

#[test]
fn cycles_leave_no_fd_and_no_mapping() {
    if !is_child() {
        // In a process of its own, because other tests open and map too.
        let name = "leaks::cycles_leave_no_fd_and_no_mapping";
        assert!(child(name, &[], Stdio::null()).success());
        return;
    }
    let before = open();
    let driver = h200();
    use_everything(&driver, true);
    let warm = open();
    for _ in 0..1000 {
        use_everything(&driver, true);
    }
    assert_eq!(open(), warm);
    assert!(sim(&driver).held().is_empty(), "{}", sim(&driver).held());
    assert_eq!(sim(&driver).free_bytes(Location::HostNuma(0)), 560 << 30);
    for _ in 0..10 {
        use_everything(&driver, false);
    }
    assert!(open().0 > before.0 && open().1 > before.1);
    let copy = driver.clone();
    drop(driver);
    assert!(open().1 > before.1, "a clone is the same driver");
    drop(copy);
    assert_eq!(open(), before, "the last clone gives all of it back");
}

#[test]
fn held_counts_everything() {
    let driver = h200();
    use_everything(&driver, false);
    let expected = Held {
        physical_handles: 2,
        reservations: 2,
        mappings: 2,
        pools: 2,
        pool_allocations: 2,
        device_allocations: 1,
        host_allocations: 1,
        managed_allocations: 1,
        registrations: 0,
        streams: 1,
        events: 1,
        modules: 1,
        ..Held::default()
    };
    assert_eq!(sim(&driver).held(), expected);
    assert!(!sim(&driver).held().is_empty());
    let words = sim(&driver).held().to_string();
    assert!(
        words.starts_with("physical handles: 2, reservations: 2"),
        "{words}"
    );
    assert_eq!(Held::default().to_string(), "nothing");
}

#[test]
fn threads_do_not_disturb_each_other() {
    const THREADS: u64 = 6;
    let driver = h200();
    let pools = driver.driver_pools();
    let props = PoolProps {
        location: Location::HostNuma(0),
        handle_types: HandleTypes::NONE,
        max_size: 0,
    };
    let pool = pools.pool_create(&props).unwrap();
    let everybody: Vec<_> = (0..8)
        .map(|gpu| desc(Location::Device(gpu), Access::ReadWrite))
        .collect();
    // SAFETY: nothing is allocated yet.
    unsafe { pools.pool_set_access(pool, &everybody) }.unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let driver = &driver;
            scope.spawn(move || work(driver, pool, thread));
        }
    });
    // SAFETY: all threads are done.
    unsafe { pools.pool_destroy(pool) }.unwrap();
    assert!(sim(&driver).held().is_empty(), "{}", sim(&driver).held());
    assert_eq!(sim(&driver).free_bytes(Location::Host), 560 << 30);
}

/// Allocates both ways, has a GPU write, and checks that the bytes belong to this thread.
fn work(driver: &Driver, pool: PoolHandle, thread: u64) {
    let device = thread as i32;
    let pools = driver.driver_pools();
    let stream = driver.stream_create(device).unwrap();
    let module = driver.module_load(device, kernels::PTX).unwrap();
    let write = driver
        .module_function(device, module, kernels::WRITE)
        .unwrap();
    let dims = LaunchDims {
        blocks: 1,
        threads: 32,
    };
    for round in 0..40 {
        let memory = Mapped::new(driver, Location::HostNuma(0), GRANULE);
        memory.grant_all(driver);
        let words = 512 + 64 * (round % 7);
        let ptr = pools
            .alloc_from_pool_async(pool, 8 * words, stream)
            .unwrap();
        let seed = thread << 32 | round;
        // SAFETY: both ranges are this thread's and long enough.
        unsafe {
            driver
                .launch_kernel(write, dims, &[ptr.0, words, seed], stream)
                .unwrap();
            driver
                .memcpy_async(memory.ptr, ptr, 8 * words, stream)
                .unwrap();
            pools.free_async(ptr, stream).unwrap();
        }
        driver.stream_synchronize(stream).unwrap();
        for i in 0..words {
            assert_eq!(peek(memory.ptr.add(8 * i)), kernels::pattern(seed, i));
        }
        memory.give_back(driver);
    }
    // SAFETY: this thread is done with them.
    unsafe {
        driver.module_unload(device, module).unwrap();
        driver.stream_destroy(stream).unwrap();
    }
}
