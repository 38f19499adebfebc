//! The ledger on the simulator: each path has its entry, for exactly as long as its memory lives.

use std::sync::{Arc, Mutex};

use super::*;
use crate::driver::{
    Access, AccessDesc, AllocationProps, Call, Code, DevicePtr, HandleType, HandleTypes, Location,
    PoolApi, PoolProps,
};
#[cfg(not(miri))]
use crate::fork_check::in_a_child;
use crate::per_driver::lock;
#[cfg(not(miri))]
use crate::per_driver::tests::alone;
use crate::pinned::{DeviceMemory, PinnedHost};
use crate::vmm::{PhysicalMemory, Reservation};
use crate::{Buffer, Machine, Pool, Stream};

const MIB: u64 = 1 << 20;
const NODE: Location = Location::HostNuma(0);

fn machine() -> Driver {
    Driver::simulated(Machine::gh200x4()).unwrap()
}

fn one_byte(driver: &Driver) -> Entry {
    Entry::new(NewEntry {
        driver,
        bytes: 1,
        location: NODE,
        path: AllocPath::Vmm,
        label: None,
        site: Site::unknown(),
    })
}

fn only(driver: &Driver) -> Allocation {
    let mut all = allocations(driver);
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(0)
}

fn located(driver: &Driver, address: DevicePtr) -> (Allocation, usize, u64) {
    match locate(driver, address).unwrap() {
        Located::Allocation {
            allocation,
            mapping,
            offset,
        } => (*allocation, mapping, offset),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_buffer_is_found_by_each_of_its_addresses() {
    let driver = machine();
    let line = line!() + 5;
    let buffer = Buffer::on(NODE)
        .bytes(3 * MIB)
        .access_by([Location::Device(1)])
        .label("weights")
        .allocate(&driver)
        .unwrap();
    let entry = only(&driver);
    assert_eq!((entry.bytes, entry.location), (4 * MIB, NODE));
    assert_eq!((entry.path, entry.lost), (AllocPath::Vmm, false));
    let site = entry.site.as_ref().unwrap();
    assert!(
        site.file.ends_with("tests.rs") && site.line == line,
        "{site}"
    );
    assert!(site.backtrace.is_none());
    let access =
        [Location::Host, Location::Device(1)].map(|who| AccessDesc::new(who, Access::ReadWrite));
    assert_eq!(entry.mapped[0].access, access);
    for offset in [0, 1, 4 * MIB - 1] {
        let (found, mapping, at) = located(&driver, buffer.device_ptr().add(offset));
        assert_eq!((found.number, mapping, at), (entry.number, 0, offset));
        assert_eq!(found.label.as_deref(), Some("weights"));
    }
    let behind = buffer.device_ptr().add(4 * MIB);
    assert_eq!(locate(&driver, behind).unwrap(), Located::Unknown);
    let start = buffer.device_ptr();
    drop(buffer);
    assert_eq!(locate(&driver, start).unwrap(), Located::Unknown);
    assert!(allocations(&driver).is_empty());
}

#[test]
fn physical_memory_lives_until_its_last_mapping_is_gone() {
    let driver = machine();
    let memory = PhysicalMemory::options(NODE).create(&driver, MIB).unwrap();
    assert!(only(&driver).mapped.is_empty());
    let (one, two) = (memory.map().unwrap(), memory.map().unwrap());
    assert_eq!(only(&driver).mapped.len(), 2);
    let at = crate::Memory::device_ptr(&two);
    assert_eq!(located(&driver, at.add(7)).2, 7);
    one.unmap().unwrap();
    memory.release().unwrap();
    let entry = only(&driver);
    assert_eq!((entry.mapped.len(), entry.mapped[0].start), (1, at.0));
    drop(two);
    assert!(allocations(&driver).is_empty());
}

/// A binding's line is in the entry, and its frames in place of the native ones.
#[test]
fn a_binding_gives_the_line_of_its_program() {
    let driver = machine();
    let frames = "  File \"train.py\", line 12, in load\n";
    let site = CallSite::new("train.py", 12).function("load");
    let site = site.backtrace(frames);
    let pool = Pool::options(NODE).create(&driver).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let (buffer, pooled) = called_from(Some(site.clone()), || {
        let buffer = Buffer::on(NODE).bytes(1).allocate(&driver).unwrap();
        (buffer, pool.allocate(100, &stream).unwrap())
    });
    let unknown = called_from(None, || PinnedHost::new(&driver, 0, 1).unwrap());
    let rust = PinnedHost::new(&driver, 0, 1).unwrap();
    let sites: Vec<_> = allocations(&driver)
        .into_iter()
        .map(|entry| entry.site)
        .collect();
    assert_eq!(sites[..3], [Some(site.clone()), Some(site), None]);
    let own = sites[3].as_ref().unwrap();
    assert!(own.file.ends_with("tests.rs") && own.function.is_none());
    let read: CallSite = {
        let text = serde_json::to_string(&sites[0]).unwrap();
        assert!(
            text.contains("train.py") && text.contains("in load"),
            "{text}"
        );
        serde_json::from_str(&text).unwrap()
    };
    assert_eq!(Some(read), sites[0]);
    // As an older version sends it.
    let read: CallSite =
        serde_json::from_str(r#"{"file":"a.rs","line":1,"backtrace":null}"#).unwrap();
    assert_eq!(read, CallSite::new("a.rs", 1));
    pooled.free_on(&stream).unwrap();
    drop((buffer, unknown, rust));
}

#[test]
fn pools_and_the_older_allocators_have_entries_too() {
    let driver = machine();
    let pool = Pool::options(NODE)
        .label("batches")
        .create(&driver)
        .unwrap();
    assert!(allocations(&driver).is_empty(), "a pool has no memory yet");
    let stream = Stream::new(&driver, 0).unwrap();
    let pooled = pool.allocate(100, &stream).unwrap();
    let pinned = PinnedHost::new(&driver, 0, 200).unwrap().labelled("ring");
    let device = DeviceMemory::new(&driver, 1, 300).unwrap();
    let all = allocations(&driver);
    let found: Vec<_> = all
        .iter()
        .map(|entry| {
            (
                entry.path,
                entry.location,
                entry.bytes,
                entry.label.as_deref(),
            )
        })
        .collect();
    assert_eq!(
        found,
        [
            (AllocPath::Pool, NODE, 100, Some("batches")),
            (AllocPath::Pinned, Location::Host, 200, Some("ring")),
            (AllocPath::Device, Location::Device(1), 300, None),
        ]
    );
    assert_eq!(all[0].mapped[0].access.len(), 5, "the host and four GPUs");
    pool.set_access(&[AccessDesc::new(Location::Device(3), Access::None)])
        .unwrap();
    let start = crate::Memory::device_ptr(&pooled);
    let (entry, ..) = located(&driver, start.add(99));
    assert_eq!(entry.mapped[0].access.len(), 4, "later changes count");
    pooled.free_on(&stream).unwrap();
    drop((pinned, device));
    assert!(allocations(&driver).is_empty());
}

#[test]
fn access_is_what_was_granted_last() {
    let driver = machine();
    let mut mapping = PhysicalMemory::options(NODE)
        .create(&driver, MIB)
        .unwrap()
        .map()
        .unwrap();
    let gpu = |access| AccessDesc::new(Location::Device(2), access);
    mapping.set_access(&[gpu(Access::Read)]).unwrap();
    assert_eq!(only(&driver).mapped[0].access, [gpu(Access::Read)]);
    let sim = driver.sim().unwrap();
    sim.fail(Call::MemSetAccess, 1, Code::UNKNOWN);
    mapping.set_access(&[gpu(Access::ReadWrite)]).unwrap_err();
    assert_eq!(
        only(&driver).mapped[0].access,
        [gpu(Access::Read)],
        "as the driver says"
    );
    mapping.set_access(&[gpu(Access::None)]).unwrap();
    assert!(only(&driver).mapped[0].access.is_empty());
}

#[test]
fn exports_and_imports_tell_of_each_other() {
    let driver = machine();
    let memory = PhysicalMemory::options(NODE)
        .handle_types(HandleTypes::POSIX_FD)
        .create(&driver, MIB)
        .unwrap();
    let handle = memory.export(HandleType::PosixFd).unwrap();
    let to = |pid| Party {
        pid: Some(pid),
        name: format!("process {pid}"),
    };
    for pid in (0..40).chain([30]) {
        memory.sent_to(to(pid));
    }
    let entry = only(&driver);
    assert_eq!((entry.exports, entry.identity), (1, memory.identity().ok()));
    assert_eq!(entry.exported_to.len(), MAX_PARTIES);
    assert_eq!(entry.exported_to.last(), Some(&to(30)));
    let imported = PhysicalMemory::import(&driver, &handle, 2 * MIB).unwrap();
    assert!(PhysicalMemory::import(&driver, &handle, MIB).is_err());
    let [_, entry] = &allocations(&driver)[..] else {
        panic!("one was refused");
    };
    assert_eq!((entry.path, entry.location), (AllocPath::Import, NODE));
    assert!(entry.path.is_import() && !AllocPath::Vmm.is_import());
    drop(imported);
    assert_eq!(allocations(&driver).len(), 1);
}

#[test]
fn what_the_driver_does_not_take_back_stays_as_lost() {
    let driver = machine();
    let sim = driver.sim().unwrap();
    let pinned = PinnedHost::new(&driver, 0, 4096).unwrap();
    let start = crate::Memory::device_ptr(&pinned);
    sim.fail(Call::MemFreeHost, 1, Code::INVALID_VALUE);
    drop(pinned);
    let (entry, _, offset) = located(&driver, start.add(5));
    assert_eq!((entry.lost, offset), (true, 5));

    let memory = PhysicalMemory::options(NODE).create(&driver, MIB).unwrap();
    sim.fail(Call::MemRelease, 1, Code::INVALID_VALUE);
    memory.release().unwrap_err();
    let mapping = PhysicalMemory::options(NODE)
        .create(&driver, MIB)
        .unwrap()
        .map()
        .unwrap();
    sim.fail(Call::MemUnmap, 1, Code::INVALID_VALUE);
    drop(mapping);
    let lost = allocations(&driver);
    assert!(
        lost.len() == 3 && lost.iter().all(|entry| entry.lost),
        "{lost:?}"
    );
    assert_eq!(lost[2].mapped.len(), 1);
}

#[test]
fn memory_of_others_is_what_the_driver_says() {
    let driver = machine();
    let start = driver.mem_host_alloc(0, 8192).unwrap();
    let Located::Foreign(found) = locate(&driver, start.add(1)).unwrap() else {
        panic!("the driver knows it");
    };
    assert_eq!(found.location, Some(Location::Host));
    assert_eq!(found.host_address, Some(start.0 + 1));
    let devices = [0, 1].map(|gpu| driver.mem_alloc(gpu, 8192).unwrap());
    for (gpu, device) in devices.into_iter().enumerate() {
        let Located::Foreign(found) = locate(&driver, device.add(7)).unwrap() else {
            panic!("the driver knows it");
        };
        assert_eq!(found.location, Some(Location::Device(gpu as i32)));
        let known = (gpu == 0).then_some((device.0, 8192));
        let found = found.start.zip(found.bytes);
        assert_eq!(found, known, "only GPU 0 is asked");
    }
    let plain = Box::new(1_u64);
    let at = DevicePtr((&raw const *plain).addr() as u64);
    assert_eq!(locate(&driver, at).unwrap(), Located::Unknown);
    let sim = driver.sim().unwrap();
    sim.fail(Call::PointerGetAttribute, 1, Code::NOT_INITIALIZED);
    assert!(locate(&driver, at).is_err());
    // SAFETY: allocated above and used by nothing.
    unsafe {
        driver.mem_free(0, devices[0]).unwrap();
        driver.mem_free(1, devices[1]).unwrap();
        driver.mem_free_host(0, start).unwrap();
    }
}

/// Where memory that this crate has not allocated begins, and its size.
fn foreign_range(driver: &Driver, address: DevicePtr) -> (Option<u64>, Option<u64>) {
    match locate(driver, address).unwrap() {
        Located::Foreign(found) => (found.start, found.bytes),
        other => panic!("{other:?}"),
    }
}

/// A pool's memory, whose attribute of its start is an offset; mappings, whose attributes are the reservation's.
#[test]
fn the_ranges_of_others_memory_are_their_allocations() {
    let driver = machine();
    let calls = driver.pools(PoolApi::Driver).unwrap();
    let props = PoolProps {
        location: NODE,
        handle_types: HandleTypes::NONE,
        max_size: 0,
    };
    let pool = calls.pool_create(&props).unwrap();
    let stream = driver.stream_create(0).unwrap();
    // SAFETY: pool and stream are live, and nothing uses the memory.
    let pooled =
        [1000, 4096].map(|size| unsafe { calls.alloc_from_pool_async(pool, size, stream) });
    for (start, bytes) in pooled.into_iter().zip([1000, 4096]) {
        let start = start.unwrap();
        let expected = match driver.mem_address_range(start) {
            Ok((base, size)) => (Some(base.0), Some(size)),
            Err(_) => (None, None),
        };
        assert_eq!(foreign_range(&driver, start.add(bytes - 1)), expected);
        assert!(expected.0.is_none_or(|base| base == start.0));
    }

    let range = driver.mem_address_reserve(8 * MIB, 0, 0).unwrap();
    for (location, start) in [(NODE, None), (Location::Device(0), Some(range.0 + 4 * MIB))] {
        let props = AllocationProps::at(location);
        let handle = driver.mem_create(2 * MIB, &props).unwrap();
        let at = range.add(if start.is_some() { 4 * MIB } else { 0 });
        // SAFETY: the range is this test's own.
        unsafe { driver.mem_map(at, 2 * MIB, 0, handle) }.unwrap();
        let unknown = foreign_range(&driver, at.add(5));
        assert_eq!(unknown, (None, None), "GPU 0 has no access");
        let gpu = AccessDesc::new(Location::Device(0), Access::ReadWrite);
        // SAFETY: as above.
        unsafe { driver.mem_set_access(at, 2 * MIB, &[gpu]) }.unwrap();
        let known = foreign_range(&driver, at.add(5));
        assert_eq!(
            known,
            (start, Some(2 * MIB)),
            "the driver has base 0 for host memory"
        );
    }
}

#[test]
fn a_dma_buf_counts_as_an_export_of_the_parts_that_it_reaches() {
    let driver = machine();
    let mut buffer = Buffer::on(Location::Device(0))
        .bytes(6 * MIB)
        .chunk(2 * MIB)
        .handle_types(HandleTypes::POSIX_FD)
        .allocate(&driver)
        .unwrap();
    drop(buffer.physical()[1].export(HandleType::PosixFd).unwrap());
    drop(buffer.dma_buf(2 * MIB - 4096, 8192).unwrap());
    driver
        .sim()
        .unwrap()
        .fail(Call::MemGetHandleForAddressRange, 1, Code::UNKNOWN);
    buffer.dma_buf(0, 4096).unwrap_err();
    let entries = allocations(&driver);
    let exports: Vec<u64> = entries.iter().map(|entry| entry.exports).collect();
    assert_eq!(exports, [1, 2, 0]);
    let identity = buffer.physical()[1].identity().ok();
    assert!(entries[0].identity.is_none() && entries[1].identity == identity);
}

#[test]
fn drivers_do_not_see_each_others_memory() {
    let (one, two) = (machine(), machine());
    let buffer = Buffer::on(NODE).bytes(1).allocate(&one).unwrap();
    assert_eq!(locate(&two, buffer.device_ptr()).unwrap(), Located::Unknown);
    assert!(allocations(&two).is_empty());
    assert!(all_allocations().contains(&only(&one)) || count() > 0);
}

#[test]
fn a_reservation_alone_is_no_memory() {
    let driver = machine();
    let reservation = Arc::new(Reservation::options().reserve(&driver, 4 * MIB).unwrap());
    assert!(allocations(&driver).is_empty());
    let memory = PhysicalMemory::options(NODE).create(&driver, MIB).unwrap();
    let mapping = reservation.map(2 * MIB, &memory).unwrap();
    assert_eq!(located(&driver, reservation.start().add(2 * MIB)).2, 0);
    drop(mapping);
    assert!(only(&driver).mapped.is_empty());
}

#[test]
fn the_last_chunk_of_memory_removes_its_record() {
    let driver = machine();
    let first = one_byte(&driver);
    let second = first.again();
    second.add_chunk(2);
    drop(first);
    assert_eq!(only(&driver).bytes, 3);
    drop(second);
    assert!(allocations(&driver).is_empty());
}

/// Entries that were made before a fork are the parent's.
#[cfg(not(miri))]
#[test]
fn a_forked_child_has_a_ledger_of_its_own() {
    let _alone = alone();
    let driver = machine();
    let buffer = Buffer::on(NODE).bytes(1).allocate(&driver).unwrap();
    let mut buffer = Some(buffer);
    assert!(in_a_child(|| {
        let none = count() == 0 && allocations(&driver).is_empty();
        let buffer = buffer.take();
        let refused = buffer.is_some_and(|buffer| locate(&driver, buffer.device_ptr()).is_err());
        let entry = one_byte(&driver);
        let own = count() == 1;
        drop(entry);
        none && refused && own && count() == 0
    }));
    assert_eq!(only(&driver).bytes, 2 * MIB);
    drop(buffer);
    assert!(allocations(&driver).is_empty());
}

/// A tier that looks at the ledger while it is asked, and when it ends.
struct Fake {
    driver: Driver,
    address: u64,
    lock: Mutex<()>,
}

impl ShowTier for Fake {
    fn show(self: Arc<Self>) -> TierUse {
        let _own = lock(&self.lock);
        allocations(&self.driver);
        Registry::current().tiers();
        TierUse::new(Location::Host, DevicePtr(self.address))
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        Registry::current().tiers();
    }
}

fn fake(driver: &Driver, address: u64) -> Arc<Fake> {
    let driver = driver.clone();
    let lock = Mutex::default();
    let tier = Arc::new(Fake {
        driver,
        address,
        lock,
    });
    add_tier(&tier.driver, &tier);
    tier
}

fn addresses(driver: &Driver) -> Vec<u64> {
    let tiers = tiers(driver);
    tiers.iter().map(|tier| tier.address).collect()
}

#[test]
fn the_tiers_that_live_are_shown_by_driver() {
    let (one, two) = (machine(), machine());
    let [first, second] = [1, 2].map(|address| fake(&one, address));
    let other = fake(&two, 3);
    assert_eq!((addresses(&one), addresses(&two)), (vec![1, 2], vec![3]));
    // Other tests may have more than are shown.
    assert!(all_tiers().len() >= 3);
    drop(first);
    assert_eq!(addresses(&one), [2]);
    drop((second, other));
    assert_eq!((addresses(&one), addresses(&two)), (vec![], vec![]));
}

#[test]
fn the_oldest_tiers_are_shown() {
    let driver = machine();
    let kept: Vec<_> = (0..MAX_TIERS as u64 + 2)
        .map(|address| fake(&driver, address))
        .collect();
    let shown = addresses(&driver);
    assert_eq!((shown.len(), shown[MAX_TIERS - 1]), (MAX_TIERS, 1023));
    drop(kept);
}

#[cfg(not(miri))]
#[test]
fn a_forked_child_has_no_tier_and_waits_for_none() {
    let _alone = alone();
    let driver = machine();
    let tier = fake(&driver, 1);
    // As a thread that the child does not have.
    let held = lock(&tier.lock);
    assert!(in_a_child(
        || tiers(&driver).is_empty() && all_tiers().is_empty()
    ));
    drop(held);
    assert_eq!(addresses(&driver), [1]);
}
