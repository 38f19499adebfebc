//! The memory that work on streams may reach.

use super::*;

#[test]
fn what_is_unmapped_before_its_work_ran_is_a_fault() {
    let driver = h200();
    let memory = Mapped::new(&driver, Location::HostNuma(0), GRANULE);
    memory.grant_all(&driver);
    let stream = driver.stream_create(0).unwrap();
    memset(&driver, memory.ptr, 1, 8, stream);
    memory.give_back(&driver);
    assert_eq!(
        code(driver.stream_synchronize(stream)),
        Code::ILLEGAL_ADDRESS
    );
}

#[test]
fn copies_know_every_kind_of_memory() {
    let driver = h200();
    let stream = driver.stream_create(0).unwrap();
    let numa = Mapped::new(&driver, Location::HostNuma(0), GRANULE);
    numa.grant_all(&driver);
    let device = driver.mem_alloc(0, MIB).unwrap();
    let peer = driver.mem_alloc(5, MIB).unwrap();
    let host = driver.mem_host_alloc(0, MIB).unwrap();
    let source: Vec<u8> = (0..MIB).map(|i| ((i * 7) >> 3) as u8).collect();
    let mut back = vec![0_u8; MIB as usize];
    let mut at = source.as_ptr() as u64;
    for next in [numa.ptr, device, peer, host, numa.ptr.add(MIB)] {
        assert_eq!(copy(&driver, next.0, at, MIB, stream), Code::SUCCESS);
        at = next.0;
    }
    assert_eq!(
        copy(&driver, back.as_mut_ptr() as u64, at, MIB, stream),
        Code::SUCCESS
    );
    assert!(
        back == source,
        "a copy to pageable memory is done when the call returns"
    );
    let middle = copy(&driver, device.0 + 3, numa.ptr.0 + 5, 1001, stream);
    assert_eq!(middle, Code::SUCCESS);
    let to = back.as_mut_ptr() as u64;
    assert_eq!(copy(&driver, to, device.0 + 3, 1001, stream), Code::SUCCESS);
    assert_eq!(back[..1001], source[5..1006]);
    let pageable = copy(&driver, to, source.as_ptr() as u64, MIB, stream);
    assert_eq!(pageable, Code::SUCCESS);
    assert!(back == source);
    // SAFETY: the test is done with them.
    unsafe {
        driver.mem_free(0, device).unwrap();
        driver.mem_free(5, peer).unwrap();
        driver.mem_free_host(0, host).unwrap();
        assert_eq!(code(driver.mem_free(0, device)), Code::INVALID_VALUE);
        assert_eq!(code(driver.mem_free_host(0, host)), Code::INVALID_VALUE);
    }
}

#[test]
fn wrong_addresses_are_errors_at_the_call() {
    let driver = h200();
    let stream = driver.stream_create(0).unwrap();
    let device = driver.mem_alloc(0, MIB).unwrap();
    let ungranted = Mapped::new(&driver, Location::HostNuma(0), GRANULE);
    let reserved = driver.mem_address_reserve(GRANULE, 0, 0).unwrap();
    for wrong in [
        8,
        ungranted.ptr.0,
        reserved.0,
        u64::MAX - 10,
        device.0 + MIB - 1,
    ] {
        let expected = Code::INVALID_VALUE;
        assert_eq!(
            copy(&driver, device.0, wrong, 16, stream),
            expected,
            "{wrong:#x}"
        );
        assert_eq!(
            copy(&driver, wrong, device.0, 16, stream),
            expected,
            "{wrong:#x}"
        );
        assert_eq!(memset(&driver, DevicePtr(wrong), 0, 16, stream), expected);
    }
    driver.stream_synchronize(stream).unwrap();
    let gone = stream;
    // SAFETY: no work is submitted to it.
    unsafe { driver.stream_destroy(stream) }.unwrap();
    assert_eq!(code(driver.stream_synchronize(gone)), Code::INVALID_HANDLE);
}

#[test]
fn ranges_do_not_run_from_one_allocation_into_the_next() {
    let driver = h200();
    let stream = driver.stream_create(0).unwrap();
    let first = driver.mem_address_reserve(GRANULE, 0, 0).unwrap();
    // Right behind the first, if the address space allows it.
    let second = driver
        .mem_address_reserve(GRANULE, 0, first.0 + GRANULE)
        .unwrap();
    let props = AllocationProps::at(Location::HostNuma(0));
    for ptr in [first, second] {
        let handle = driver.mem_create(GRANULE, &props).unwrap();
        let all = [
            desc(Location::Host, Access::ReadWrite),
            desc(Location::Device(0), Access::ReadWrite),
        ];
        // SAFETY: the ranges are this test's own.
        unsafe {
            driver.mem_map(ptr, GRANULE, 0, handle).unwrap();
            driver.mem_set_access(ptr, GRANULE, &all).unwrap();
            let both = driver.mem_set_access(first, 2 * GRANULE, &all);
            assert_eq!(code(both), Code::INVALID_VALUE);
        }
    }
    let across = memset(&driver, first.add(GRANULE - 8), 1, 16, stream);
    assert_eq!(across, Code::INVALID_VALUE);
    // Within one reservation a range may span several mappings.
    let wide = driver.mem_address_reserve(2 * GRANULE, 0, 0).unwrap();
    for ptr in [wide, wide.add(GRANULE)] {
        let handle = driver.mem_create(GRANULE, &props).unwrap();
        // SAFETY: as above.
        unsafe { driver.mem_map(ptr, GRANULE, 0, handle) }.unwrap();
    }
    let gpu = [desc(Location::Device(0), Access::ReadWrite)];
    // SAFETY: as above.
    unsafe { driver.mem_set_access(wide, 2 * GRANULE, &gpu) }.unwrap();
    let across = memset(&driver, wide.add(GRANULE - 8), 1, 16, stream);
    assert_eq!(across, Code::SUCCESS);
    driver.stream_synchronize(stream).unwrap();
}

#[test]
fn a_coherent_gpu_reads_pageable_memory_and_another_faults() {
    let words = [3_u64, 5, 9];
    for (machine, expected) in [
        (Machine::gh200(), Code::SUCCESS),
        (Machine::h200x8(), Code::ILLEGAL_ADDRESS),
    ] {
        let driver = driver(machine);
        let stream = driver.stream_create(0).unwrap();
        let report = driver.mem_host_alloc(0, 8).unwrap();
        let read = function(&driver, 0, kernels::READ);
        launch(&driver, read, &[words.as_ptr() as u64, 3, report.0], stream);
        assert_eq!(code(driver.stream_synchronize(stream)), expected);
        if expected == Code::SUCCESS {
            assert_eq!(peek(report), 3 ^ 5 ^ 9);
        }
    }
}
