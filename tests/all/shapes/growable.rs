//! Vectors that grow in place.

use egmem::driver::{Access, AccessDesc, Call, Code, Location};
use egmem::memory::{AccessChecks, Engine};
use egmem::proof::Prover;
use egmem::shapes::Growable;
use egmem::{Buffer, Driver, Error, Growth, Memory, Stream};

use crate::shapes::{MIB, grace, node, nothing_held};

/// A vector of up to 64 MiB in chunks of 2 MiB.
fn words(driver: &Driver) -> Growable<u64> {
    let options = Growable::on(node(driver)).max_len(8 << 20).step(2 * MIB);
    options.create(driver).unwrap()
}

fn numbers(range: std::ops::Range<u64>) -> Vec<u64> {
    range.collect()
}

pub fn it_grows_in_place(driver: &Driver) {
    let mut vector = words(driver);
    let start = vector.device_ptr();
    assert_eq!(
        (vector.len(), vector.capacity(), vector.chunks()),
        (0, 0, 0)
    );
    assert_eq!(vector.cpu().unwrap().len(), 0);
    vector.push(7).unwrap();
    vector.extend_from_slice(&numbers(1..600_000)).unwrap();
    assert_eq!((vector.len(), vector.mapped_bytes()), (600_000, 6 * MIB));
    assert_eq!(vector.device_ptr(), start);
    assert_eq!(vector.get(0), Ok(7));
    for index in [1, 262_143, 262_144, 599_999] {
        assert_eq!(vector.get(index), Ok(index as u64));
    }
    vector.set(262_144, 1).unwrap();
    assert_eq!(vector.cpu().unwrap().get(262_144 * 8), Ok(1_u64));
    // Room that is there already needs no call.
    let chunks = vector.chunks();
    vector.extend_from_slice(&numbers(0..1000)).unwrap();
    assert_eq!(vector.chunks(), chunks);
    drop(vector);
    nothing_held(driver);
}

/// Growing costs the calls that map memory, and no query besides.
#[test]
fn a_step_is_three_driver_calls() {
    let driver = Driver::simulated(egmem::Machine::gh200()).unwrap();
    let sim = driver.sim().unwrap();
    let calls = || Call::ALL.iter().map(|&call| sim.count(call)).sum::<u64>();
    let mut vector = words(&driver);
    vector.extend_unwritten(1).unwrap();
    let before = calls();
    vector.reserve(vector.capacity()).unwrap();
    assert_eq!(vector.chunks(), 2);
    assert_eq!(calls() - before, 3);
}

pub fn a_gpu_reads_what_is_there_while_more_is_added(driver: &Driver) {
    let stream = Stream::new(driver, 0).unwrap();
    let mut vector = words(driver);
    for round in 0..20_u64 {
        vector
            .extend_from_slice(&numbers(round * 100_000..(round + 1) * 100_000))
            .unwrap();
        let prefix = vector.prefix();
        let bytes = prefix.len() as u64 * 8;
        let to = Buffer::near(driver, 0, bytes).unwrap();
        let copy = stream.start_copy((to, 0), (prefix, 0), bytes).unwrap();
        // Meanwhile the vector grows, and shrinks again.
        let len = vector.len();
        vector.extend_from_slice(&vec![u64::MAX; 300_000]).unwrap();
        vector.truncate(len);
        vector.shrink_to_fit().unwrap();
        let (to, prefix) = copy.wait().unwrap();
        let mut seen = vec![0_u64; len];
        to.read_at(0, &mut seen).unwrap();
        assert_eq!(seen, numbers(0..len as u64));
        assert_eq!(prefix.get(len - 1), Ok(len as u64 - 1));
    }
}

pub fn a_gpu_writes_elements_that_others_read(driver: &Driver) {
    let prover = Prover::new(driver, 0).unwrap();
    let mut vector = words(driver);
    vector.extend_unwritten(400_000).unwrap();
    assert_eq!(vector.get(399_999), Ok(0));
    prover.write(&vector, 3).unwrap();
    assert_eq!(vector.get(300_000), Ok(egmem::kernels::pattern(3, 300_000)));
    prover.write(&vector.prefix(), 4).unwrap();
    assert_eq!(vector.get(399_999), Ok(egmem::kernels::pattern(4, 399_999)));
}

pub fn a_prefix_keeps_its_memory(driver: &Driver) {
    let mut vector = words(driver);
    for chunk in 0..3 {
        let (from, to) = (chunk * 262_144, (chunk + 1) * 262_144);
        vector.extend_from_slice(&numbers(from..to)).unwrap();
    }
    let all = vector.prefix();
    vector.truncate(10);
    let few = vector.prefix();
    // Three chunks, all of which `all` keeps.
    assert_eq!(
        (vector.shrink_to_fit(), vector.mapped_bytes()),
        (Ok(0), 6 * MIB)
    );
    assert_eq!(all.get(786_431), Ok(786_431));
    drop(all.clone());
    drop(all);
    assert_eq!(
        (vector.shrink_to_fit(), vector.mapped_bytes()),
        (Ok(4 * MIB), 2 * MIB)
    );
    assert_eq!(few.len(), 10);
    assert!(matches!(few.get(10), Err(Error::OutOfRange { .. })));
    drop(vector);
    assert_eq!(few.get(9), Ok(9));
    drop(few);
    nothing_held(driver);
}

pub fn what_is_behind_the_elements_is_given_back(driver: &Driver) {
    let mut vector = words(driver);
    vector.reserve(1 << 20).unwrap();
    assert_eq!((vector.len(), vector.mapped_bytes()), (0, 8 * MIB));
    vector.extend_from_slice(&numbers(0..10)).unwrap();
    // It came in one chunk, which is in use.
    assert_eq!(vector.shrink_to_fit(), Ok(0));
    vector.reserve(2 << 20).unwrap();
    assert_eq!(vector.chunks(), 2);
    assert_eq!(
        vector.shrink_to_fit(),
        Ok(vector_growth(8 * MIB, (2 << 20) + 10))
    );
    vector.truncate(0);
    assert_eq!(
        (vector.shrink_to_fit(), vector.mapped_bytes()),
        (Ok(8 * MIB), 0)
    );
    // The same addresses are used again, by new memory.
    vector.push(5).unwrap();
    assert_eq!((vector.get(0), vector.mapped_bytes()), (Ok(5), 2 * MIB));
}

/// The bytes that a vector of `mapped` bytes takes to hold `words`.
fn vector_growth(mapped: u64, words: u64) -> u64 {
    (words * 8 - mapped).next_multiple_of(2 * MIB)
}

pub fn access_is_changed_for_all_chunks_or_for_one(driver: &Driver) {
    let gpu = Location::Device(0);
    let mut vector = words(driver);
    for _ in 0..3 {
        vector.extend_from_slice(&vec![1; 262_144]).unwrap();
    }
    let prover = Prover::new(driver, 0).unwrap();
    let stream = Stream::new(driver, 0).unwrap();
    prover.write(&vector, 1).unwrap();
    let read_only = [AccessDesc::new(gpu, Access::Read)];
    assert_eq!(
        vector.set_access_of(262_144..262_145, &read_only),
        Ok(262_144..524_288)
    );
    let error = prover.write(&vector, 2).unwrap_err();
    let (have, need) = (Access::Read, Access::ReadWrite);
    assert_eq!(
        error,
        Error::NotAccessible {
            who: gpu,
            have,
            need
        }
    );
    // The chunks beside it are as they were.
    stream.fill(&vector, 0, 2 * MIB, 0).unwrap();
    stream.fill(&vector, 4 * MIB, 2 * MIB, 0).unwrap();
    stream.fill(&vector, 4 * MIB - 8, 8, 0).unwrap_err();

    let prefix = vector.prefix();
    let held = vector.set_access(&read_only).unwrap_err();
    assert!(matches!(held, Error::StillHeld { .. }), "{held}");
    drop(prefix);
    vector.set_access(&read_only).unwrap();
    // Memory that comes later is granted alike.
    vector.extend_from_slice(&vec![1; 262_144]).unwrap();
    for offset in [0, 6 * MIB] {
        assert!(stream.fill(&vector, offset, 8, 0).is_err());
    }
    assert!(matches!(
        vector.set_access_of(usize::MAX - 1..usize::MAX, &read_only),
        Err(Error::OutOfRange { .. })
    ));
    prover.read(&vector).unwrap();
    // The CPU may still write the other chunks if it may only read one.
    let cpu_reads = [AccessDesc::new(Location::Host, Access::Read)];
    vector.set_access_of(0..1, &cpu_reads).unwrap();
    vector.push(5).unwrap();
    vector.set(262_144, 6).unwrap();
    assert_eq!(vector.get(262_144), Ok(6));
    assert_eq!(vector.get(0), vector.prefix().get(0));
    let error = vector.set(0, 1).unwrap_err();
    assert!(matches!(error, Error::NotAccessible { .. }), "{error}");
}

pub fn what_cannot_be_is_refused(driver: &Driver) {
    let invalid = |error: Error, argument: &str| {
        assert!(
            matches!(error, Error::InvalidArgument { what, .. } if what == argument),
            "{error}"
        );
    };
    let node = node(driver);
    invalid(
        Growable::<()>::on(node).create(driver).unwrap_err(),
        "element type",
    );
    for len in [0, usize::MAX] {
        let error = Growable::<u64>::on(node)
            .max_len(len)
            .create(driver)
            .unwrap_err();
        invalid(error, "max_len");
    }
    let error = Growable::<[[[[u8; 4096]; 4096]; 4096]; 4096]>::on(node).create(driver);
    let error = error.unwrap_err();
    assert!(error.to_string().contains("more than"), "{error}");
    invalid(error, "element type");
    let mut vector = Growable::<u32>::on(node)
        .max_len(100)
        .create(driver)
        .unwrap();
    assert_eq!((vector.max_len(), vector.memory_len()), (100, 0));
    vector.extend_from_slice(&[1; 100]).unwrap();
    // Its memory has room for more, but it was created for no more.
    for more in [1, usize::MAX] {
        let error = vector.reserve(more).unwrap_err();
        assert!(
            matches!(error, Error::OutOfRange { size: 400, .. }),
            "{error}"
        );
    }
    vector.push(1).unwrap_err();
    assert_eq!(vector.len(), 100);
    assert!(matches!(vector.get(100), Err(Error::OutOfRange { .. })));
    assert!(matches!(
        vector.set(usize::MAX, 1),
        Err(Error::OutOfRange { .. })
    ));
    // By default it may grow to the node's memory.
    let topology = egmem::Topology::discover(driver).unwrap();
    let total = topology.node(node).unwrap().memory_total;
    let vector = Growable::<[u8; 3]>::on(node).create(driver).unwrap();
    assert_eq!(vector.max_len() as u64, total / 3);
}

/// The bytes that a vector has as memory.
trait MemoryLen {
    fn memory_len(&self) -> u64;
}

impl<T> MemoryLen for Growable<T> {
    fn memory_len(&self) -> u64 {
        Memory::len(self)
    }
}

/// Some drivers fault at each 4 GiB of a larger one.
#[test]
fn no_chunk_has_4_gib_or_more() {
    let driver = Driver::simulated(egmem::Machine::gh200()).unwrap();
    let options = Growable::<u64>::on(node(&driver)).max_len(100 << 30);
    let mut vector = options.create(&driver).unwrap();
    let sim = driver.sim().unwrap();
    sim.fail(Call::MemCreate, 3, Code::OUT_OF_MEMORY);
    vector.reserve((9 << 30) / 8).unwrap_err();
    assert_eq!((vector.chunks(), vector.mapped_bytes()), (0, 0));
    // More than the node has is refused before any is created.
    let before = sim.count(Call::MemCreate);
    vector.reserve((600 << 30) / 8).unwrap_err();
    assert_eq!(sim.count(Call::MemCreate), before);
    vector.reserve((9 << 30) / 8).unwrap();
    assert_eq!((vector.chunks(), vector.mapped_bytes()), (3, 9 << 30));
    vector.push(1).unwrap();
    assert_eq!(
        vector.shrink_to_fit().unwrap(),
        (9 << 30) - (4 << 30) + (2 << 20)
    );
    drop(vector);
    nothing_held(&driver);
}

/// Chunks that the driver does not unmap after a failure are there for later elements.
#[test]
fn chunks_that_cannot_be_unmapped_after_a_failure_stay() {
    let more = (9 << 30) / 8;
    // The last chunk that was added is refused, or the one before. The driver is asked twice.
    for (first_refusal, chunks) in [(1, 3), (2, 2)] {
        let driver = Driver::simulated(egmem::Machine::gh200()).unwrap();
        let options = Growable::<u64>::on(node(&driver)).max_len(more + 1);
        let mut vector = options.create(&driver).unwrap();
        vector.push(5).unwrap();
        let sim = driver.sim().unwrap();
        sim.fail(Call::MemCreate, 3, Code::OUT_OF_MEMORY);
        for nth in [first_refusal, first_refusal + 1] {
            sim.fail(Call::MemUnmap, nth, Code::UNKNOWN);
        }
        vector.reserve(more).unwrap_err();
        assert_eq!(sim.cancel_all(), 0, "all faults have happened");
        assert_eq!((vector.len(), vector.chunks()), (1, chunks));
        let stayed = (chunks as u64 - 1) * Growth::MAX_CHUNK;
        assert_eq!(vector.mapped_bytes(), 2 * MIB + stayed);
        vector.extend_unwritten(more).unwrap();
        vector.set(more, 7).unwrap();
        assert_eq!((vector.get(0), vector.get(more)), (Ok(5), Ok(7)));
        drop(vector);
        nothing_held(&driver);
    }
}

/// Where the larger step fails, chunks that stay may be room enough.
#[test]
fn chunks_that_stay_count_for_the_smaller_step() {
    let driver = Driver::simulated(egmem::Machine::gh200()).unwrap();
    let options = Growable::<u64>::on(node(&driver)).max_len(2 << 30);
    let mut vector = options.step(9 << 30).create(&driver).unwrap();
    let sim = driver.sim().unwrap();
    sim.fail(Call::MemCreate, 3, Code::OUT_OF_MEMORY);
    for nth in [1, 2] {
        sim.fail(Call::MemUnmap, nth, Code::UNKNOWN);
    }
    vector.push(5).unwrap();
    assert_eq!(sim.cancel_all(), 0, "all faults have happened");
    let stayed = 2 * Growth::MAX_CHUNK;
    assert_eq!((vector.chunks(), vector.mapped_bytes()), (2, stayed));
    assert_eq!((sim.count(Call::MemCreate), vector.get(0)), (3, Ok(5)));
    drop(vector);
    nothing_held(&driver);
}

#[test]
fn failures_leave_the_vector_as_it_was() {
    for call in [Call::MemCreate, Call::MemMap, Call::MemSetAccess] {
        let driver = grace();
        let sim = driver.sim().unwrap();
        let mut vector = words(&driver);
        vector.extend_from_slice(&numbers(0..1000)).unwrap();
        let held = sim.held();
        sim.fail(call, 1, Code::UNKNOWN);
        vector.extend_from_slice(&numbers(0..500_000)).unwrap_err();
        assert_eq!((vector.len(), vector.mapped_bytes()), (1000, 2 * MIB));
        assert_eq!(sim.held(), held);
        vector.extend_from_slice(&numbers(1000..500_000)).unwrap();
        assert_eq!(vector.get(499_999), Ok(499_999));
        drop(vector);
        nothing_held(&driver);
    }
    // Memory that cannot be unmapped stays, and is given back later.
    let driver = grace();
    let mut vector = words(&driver);
    vector.reserve(100).unwrap();
    for nth in [1, 2] {
        driver
            .sim()
            .unwrap()
            .fail(Call::MemUnmap, nth, Code::UNKNOWN);
    }
    vector.shrink_to_fit().unwrap_err();
    assert_eq!(vector.mapped_bytes(), 2 * MIB);
    vector.push(1).unwrap();
    drop(vector);
    nothing_held(&driver);
}

/// Small chunks add up to more than a node has free.
#[test]
fn the_nodes_free_memory_is_respected() {
    let mut machine = egmem::Machine::gh200();
    machine.nodes[0].memory = 100 * MIB;
    let driver = Driver::simulated(machine).unwrap();
    let options = Growable::<u8>::on(node(&driver))
        .max_len(1 << 30)
        .step(2 * MIB);
    let mut vector = options.create(&driver).unwrap();
    let error = (0..1024)
        .find_map(|_| vector.extend_unwritten(2 << 20).err())
        .unwrap();
    assert!(matches!(error, Error::NodeTooFull { .. }), "{error}");
    let stripes =
        egmem::shapes::Stripes::over([Location::from(node(&driver)), Location::Device(0)]);
    drop(vector);
    let error = stripes.allocate(&driver, 400 << 20).unwrap_err();
    assert!(
        matches!(error, Error::NodeTooFull { requested, .. } if requested == 200 << 20),
        "{error}"
    );
    nothing_held(&driver);
}

/// Where the larger step does not fit, the needed bytes may.
#[test]
fn near_the_end_it_grows_by_the_needed_bytes() {
    let driver = grace();
    let sim = driver.sim().unwrap();
    let options = Growable::<u8>::on(node(&driver))
        .max_len(64 << 20)
        .step(32 * MIB);
    let mut vector = options.create(&driver).unwrap();
    sim.fail(Call::MemCreate, 1, Code::OUT_OF_MEMORY);
    vector.push(1).unwrap();
    assert_eq!(vector.mapped_bytes(), 2 * MIB);
    vector.extend_unwritten((2 << 20) - 1).unwrap();
    vector.push(1).unwrap();
    assert_eq!(vector.mapped_bytes(), 34 * MIB);
    vector.extend_unwritten(32 << 20).unwrap();
    // The addresses end before the next step does.
    assert_eq!(vector.mapped_bytes(), 64 * MIB);
}

#[test]
fn an_empty_range_of_elements_changes_no_access() {
    let mut vector = words(&grace());
    vector.extend_from_slice(&numbers(0..10)).unwrap();
    let none = [AccessDesc::new(Location::Host, Access::None)];
    for at in [0, 5, 262_144] {
        assert_eq!(vector.set_access_of(at..at, &none), Ok(at..at));
    }
    let error = vector.set_access_of(262_145..262_145, &none).unwrap_err();
    assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
    let (start, end) = (9, 3);
    let error = vector.set_access_of(start..end, &none).unwrap_err();
    assert!(
        matches!(error, Error::InvalidArgument { what: "range", .. }),
        "{error}"
    );
    assert_eq!(vector.get(5), Ok(5));
    // A prefix keeps no access from being changed where nothing is to be changed.
    let _prefix = vector.prefix();
    assert_eq!(vector.set_access_of(5..5, &none), Ok(5..5));
}

/// The last chunk is larger than the elements need.
#[test]
fn gpus_have_no_access_beyond_the_elements() {
    let mut vector = words(&grace());
    vector.extend_from_slice(&numbers(0..10)).unwrap();
    let prefix = vector.prefix();
    vector.extend_from_slice(&numbers(0..10)).unwrap();
    let of_all: [(&dyn AccessChecks, u64); 2] = [(&vector, 160), (&prefix, 80)];
    for (memory, size) in of_all {
        assert_eq!(
            memory.gpu_access(0, Engine::Copy, 0, size),
            Ok(Access::ReadWrite)
        );
        let (offset, len) = (size - 8, 16);
        let error = Err(Error::OutOfRange { offset, len, size });
        assert_eq!(memory.gpu_access(0, Engine::Copy, offset, len), error);
    }
}
