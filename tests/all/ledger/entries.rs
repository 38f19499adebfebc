//! Entries of each path, and whose memory is at an address.

use std::alloc::Layout;
use std::os::unix::net::UnixStream;

use egmem::driver::{Access, DevicePtr, HandleTypes, Location};
use egmem::ledger::{self, AllocPath, Allocation, CallSite, Located};
use egmem::pinned::{DeviceMemory, PinnedHost};
use egmem::shapes::{Growable, Replicated, Ring, Stripes};
use egmem::share::{Channel, ImportOptions, Peers, Shared};
use egmem::{Backing, Buffer, Driver, Heap, Memory, Pool, Stream};

use crate::ledger::{MIB, labelled, node};

fn found(driver: &Driver, address: DevicePtr) -> (Allocation, u64) {
    match ledger::locate(driver, address).unwrap() {
        Located::Allocation {
            allocation, offset, ..
        } => (*allocation, offset),
        other => panic!("{other:?}"),
    }
}

/// Looks for memory by an address in it, and returns its path.
fn path(driver: &Driver, memory: &dyn Memory, label: &str) -> AllocPath {
    let at = memory.len() - 1;
    let (entry, offset) = found(driver, memory.device_ptr().add(at));
    assert_eq!(entry.label.as_deref(), Some(label));
    assert_eq!((entry.location, offset), (memory.location(), at));
    assert!(entry.bytes >= memory.len());
    let site = entry.site.unwrap();
    assert!(site.file.ends_with("entries.rs"), "{site}");
    entry.path
}

pub fn each_path_has_its_entry(driver: &Driver) {
    let label = "each path";
    let stream = Stream::new(driver, 0).unwrap();
    let buffer = Buffer::on(node(driver)).bytes(MIB).label(label);
    let buffer = buffer.allocate(driver).unwrap();
    let pool = Pool::options(node(driver)).label(label);
    let pooled = pool.create(driver).unwrap().allocate(MIB, &stream).unwrap();
    let pinned = PinnedHost::new(driver, 0, MIB).unwrap().labelled(label);
    let device = DeviceMemory::new(driver, 0, MIB).unwrap().labelled(label);
    let growable = Growable::<u64>::on(node(driver)).max_len(1 << 20);
    let mut growable = growable.label(label).create(driver).unwrap();
    growable.push(1).unwrap();
    for (memory, expected) in [
        (&buffer as &dyn Memory, AllocPath::Vmm),
        (&pooled, AllocPath::Pool),
        (&pinned, AllocPath::Pinned),
        (&device, AllocPath::Device),
        (&growable, AllocPath::ShapeChunk),
    ] {
        assert_eq!(path(driver, memory, label), expected);
    }
    assert_eq!(labelled(driver, label).len(), 5);
    growable.truncate(0);
    growable.shrink_to_fit().unwrap();
    assert_eq!(labelled(driver, label).len(), 4);
    drop((buffer, pooled, pinned, device));
    assert!(labelled(driver, label).is_empty());
}

pub fn each_shape_has_its_entries(driver: &Driver) {
    let label = "each shape";
    let place: Location = node(driver).into();
    let replicated = Replicated::on([place, Location::Device(0)]).label(label);
    let replicated = replicated.create(driver, &[1_u64; 100]).unwrap();
    for who in [place, Location::Device(0)] {
        let replica = replicated.local(who).unwrap();
        assert_eq!(path(driver, &replica, label), AllocPath::ShapeChunk);
    }
    // Two versions in two places.
    assert_eq!(labelled(driver, label).len(), 4);
    let striped = Stripes::over([place]).options(MIB).unwrap().label(label);
    let striped = striped.allocate(driver).unwrap();
    assert_eq!(path(driver, &striped, label), AllocPath::ShapeChunk);
    drop(striped);
    let striped = Stripes::over([place]).allocate(driver, MIB).unwrap();
    let (entry, _) = found(driver, striped.device_ptr());
    assert!(entry.site.unwrap().file.ends_with("entries.rs"));
    let mut ring = Ring::<u64>::on(place).label(label).create(driver).unwrap();
    ring.producer.try_push(1).unwrap();
    assert_eq!(labelled(driver, label).len(), 4 + 2);
    drop((replicated, ring));
    assert!(labelled(driver, label).is_empty());
}

pub fn a_block_is_found_in_its_heaps_chunk(driver: &Driver) {
    let heap = Heap::on(node(driver)).chunk(4 * MIB).label("block's heap");
    let heap = heap.build(driver).unwrap();
    let block = heap.allocate(Layout::new::<[u64; 100]>()).unwrap();
    let (entry, offset) = found(driver, block.device_ptr().add(8));
    let path = match heap.backing().backing {
        Backing::Registered => AllocPath::Registered,
        _ => AllocPath::HeapChunk,
    };
    assert_eq!(entry.path, path);
    assert_eq!(entry.mapped[0].start + offset, block.device_ptr().0 + 8);
    let who: Vec<_> = entry.mapped[0]
        .access
        .iter()
        .map(|desc| desc.location)
        .collect();
    assert!(
        who.contains(&Location::Host) && who.contains(&Location::Device(0)),
        "{who:?}"
    );
    drop((block, heap));
    assert!(labelled(driver, "block's heap").is_empty());
}

/// Also those that other calls and other threads add later.
pub fn chunks_have_the_line_that_built_their_heap(driver: &Driver) {
    let label = "line of a heap";
    let options = Heap::on(node(driver)).chunk(2 * MIB).label(label);
    let site = CallSite::new("train.py", 7).function("setup");
    let heap = ledger::called_from(Some(site.clone()), || options.build(driver)).unwrap();
    heap.reserve(2 * MIB).unwrap();
    let elsewhere = CallSite::new("other.py", 1);
    std::thread::scope(|scope| {
        let grow = || ledger::called_from(Some(elsewhere), || heap.reserve(6 * MIB));
        scope.spawn(grow).join().unwrap().unwrap();
    });
    let entries = labelled(driver, label);
    assert!(entries.len() > 1, "{entries:?}");
    for entry in entries {
        let mut found = entry.site.unwrap();
        found.backtrace = None;
        assert_eq!(found, site);
    }
}

pub fn heaps_blocks_have_no_entries(driver: &Driver) {
    let heap = Heap::on(node(driver))
        .chunk(8 * MIB)
        .limit(8 * MIB)
        .label("many blocks");
    let heap = heap.build(driver).unwrap();
    let block = || heap.allocate(Layout::new::<[u64; 16]>()).unwrap();
    let blocks: Vec<_> = (0..1000).map(|_| block()).collect();
    let [chunk] = &labelled(driver, "many blocks")[..] else {
        panic!("a heap of one chunk has one entry");
    };
    assert_eq!(chunk.bytes, 8 * MIB);
    drop(blocks);
}

pub fn an_import_tells_where_it_comes_from(driver: &Driver) {
    let buffer = Buffer::on(node(driver)).bytes(MIB).label("sent");
    let buffer = buffer.handle_types(HandleTypes::POSIX_FD);
    let shared = Shared::from(buffer.allocate(driver).unwrap());
    let (one, other) = UnixStream::pair().unwrap();
    let peers = Peers::same_user();
    let mut one = Channel::new(one, &peers).unwrap();
    let mut other = Channel::new(other, &peers).unwrap();
    one.send(&shared, Access::ReadWrite).unwrap();
    let offer = other.receive().unwrap();
    let options = ImportOptions::new().label("sent and received");
    let imported = offer.import(driver, options).unwrap();

    let this = Some(std::process::id());
    let [sent, received] = &labelled(driver, "sent")[..] else {
        panic!("{:?}", labelled(driver, "sent"));
    };
    assert_eq!((sent.exports, sent.exported_to[0].pid), (1, this));
    assert_eq!(received.path, AllocPath::Import);
    let from = received.imported.as_ref().unwrap();
    assert_eq!(from.from.as_ref().unwrap().pid, this);
    assert!(from.identity.is_some() && from.identity == sent.identity);
    let (entry, offset) = found(driver, imported.device_ptr());
    assert_eq!((entry.number, offset), (received.number, 0));
    drop(imported);
    assert_eq!(labelled(driver, "sent").len(), 1);
}

pub fn foreign_memory_is_what_the_driver_says(driver: &Driver) {
    let start = driver.mem_host_alloc(0, 8192).unwrap();
    let Located::Foreign(found) = ledger::locate(driver, start).unwrap() else {
        panic!("the driver knows it");
    };
    assert_eq!(found.location, Some(Location::Host));
    assert!(found.bytes.is_none_or(|bytes| bytes >= 8192), "{found:?}");
    // SAFETY: allocated above, and used by nothing.
    unsafe { driver.mem_free_host(0, start).unwrap() };
    let plain = Box::new(0_u8);
    let address = DevicePtr((&raw const *plain).addr() as u64);
    // With the host's page tables a GPU knows all of the program's memory.
    let of_program = ledger::locate(driver, address).unwrap();
    assert!(
        !matches!(of_program, Located::Allocation { .. }),
        "{of_program:?}"
    );
}
