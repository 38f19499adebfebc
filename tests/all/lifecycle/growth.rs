//! Buffers that are created in chunks: one range to the program, progress, cancellation.

use std::ops::ControlFlow;

use egmem::driver::{Access, Call, Code, HandleTypes, Location, NodeId};
use egmem::ledger::{self, Located};
use egmem::proof::Prover;
use egmem::{Backing, Buffer, BufferOptions, Driver, Error, Growth, Machine, Stream};

use egmem_tests::FdLess;

use crate::lifecycle::{MIB, grace, grant, last, node, nothing_held};

const GIB: u64 = 1 << 30;

/// Three chunks: of 4, 4 and 4 MiB with padding.
fn in_chunks(driver: &Driver) -> BufferOptions {
    let growth = Growth::steady().chunk(4 * MIB);
    Buffer::on(node(driver, 0))
        .bytes(11 * MIB + 8)
        .growth(growth)
}

pub fn chunks_are_one_range(driver: &Driver) {
    let mut buffer = in_chunks(driver).allocate(driver).unwrap();
    let sizes = buffer.physical().iter().map(|part| part.size().padded());
    assert_eq!(sizes.collect::<Vec<_>>(), [4 * MIB; 3]);
    assert_eq!((buffer.len(), buffer.padded()), (11 * MIB + 8, 12 * MIB));
    for gpu in 0..=last(driver) {
        let prover = Prover::new(driver, gpu).unwrap();
        prover.prove(&buffer, &buffer.cpu().unwrap(), 5).unwrap();
    }
    let stream = Stream::new(driver, 0).unwrap();
    let other = Buffer::near(driver, 0, 8 * MIB).unwrap();
    buffer.put(4 * MIB - 4, 0x0123_4567_89ab_cdef_u64).unwrap();
    stream.copy(&other, 0, &buffer, 2 * MIB, 8 * MIB).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(
        other.get::<u64>(2 * MIB - 4).unwrap(),
        0x0123_4567_89ab_cdef
    );
    let host = grant(Location::Host, Access::None);
    buffer.set_access(&[host]).unwrap();
    assert!(matches!(buffer.cpu(), Err(Error::NotAccessible { .. })));
    drop((buffer, other, stream));
    nothing_held(driver);
}

pub fn chunks_are_one_entry_of_the_ledger(driver: &Driver) {
    let label = "in chunks";
    let labelled = || {
        let all = ledger::allocations(driver);
        let mut named = all
            .into_iter()
            .filter(|entry| entry.label.as_deref() == Some(label));
        (named.next(), named.count())
    };
    let mut buffer = in_chunks(driver).label(label).allocate(driver).unwrap();
    let (entry, more) = labelled();
    let entry = entry.unwrap();
    assert_eq!((entry.bytes, more), (12 * MIB, 0));
    assert!(entry.site.unwrap().file.ends_with("growth.rs"));
    let [at] = &entry.mapped[..] else {
        panic!("{:?}", entry.mapped)
    };
    assert_eq!((at.start, at.bytes), (buffer.device_ptr().0, 12 * MIB));
    let in_the_last = buffer.device_ptr().add(9 * MIB);
    let Located::Allocation { offset, .. } = ledger::locate(driver, in_the_last).unwrap() else {
        panic!("no allocation")
    };
    assert_eq!(offset, 9 * MIB);
    // Chunks that differ are shown apart.
    let host = grant(Location::Host, Access::Read);
    buffer.set_access_at(4 * MIB, 4 * MIB, &[host]).unwrap();
    assert_eq!(labelled().0.unwrap().mapped.len(), 3);
    // A mapping that outlives the buffer keeps the entry.
    let mapping = buffer.physical()[1].map().unwrap();
    drop(buffer);
    assert!(labelled().0.is_some());
    drop(mapping);
    assert!(labelled().0.is_none());
    nothing_held(driver);
}

pub fn progress_is_told_and_a_break_gives_everything_back(driver: &Driver) {
    let mut told = Vec::new();
    let buffer = in_chunks(driver).allocate_with(driver, |progress| {
        told.push((progress.done, progress.total));
        ControlFlow::Continue(())
    });
    assert_eq!([4, 8, 12].map(|done| (done * MIB, 12 * MIB)), told[..]);
    drop(buffer.unwrap());
    for (chunks, done) in [(1, 4 * MIB), (2, 8 * MIB), (3, 12 * MIB)] {
        let mut left = chunks;
        let error = in_chunks(driver)
            .label("broken off")
            .allocate_with(driver, |_| {
                left -= 1;
                match left {
                    0 => ControlFlow::Break(()),
                    _ => ControlFlow::Continue(()),
                }
            });
        let total = 12 * MIB;
        assert_eq!(error.unwrap_err(), Error::Cancelled { done, total });
        let all = ledger::allocations(driver);
        assert!(
            all.iter()
                .all(|entry| entry.label.as_deref() != Some("broken off"))
        );
        nothing_held(driver);
    }
}

#[cfg(feature = "portable")]
pub fn chunks_are_shared_together(driver: &Driver) {
    use egmem::driver::HandleType;
    use egmem::share::{ImportOptions, Shared};

    let buffer = in_chunks(driver).handle_types(egmem::driver::HandleTypes::POSIX_FD);
    let shared = Shared::from(buffer.label("sent").allocate(driver).unwrap());
    let description = shared.describe(Access::ReadWrite).unwrap();
    assert_eq!(description.parts.len(), 3);
    let fds = shared.export(HandleType::PosixFd).unwrap();
    let imported = ImportOptions::new()
        .import(driver, &description, fds)
        .unwrap();
    imported.put(4 * MIB - 4, 7_u64).unwrap();
    assert_eq!(shared.buffer().unwrap().get::<u64>(4 * MIB - 4).unwrap(), 7);
    // Importers know each by an identity.
    let all = ledger::allocations(driver);
    let own = all
        .iter()
        .filter(|entry| entry.label.as_deref() == Some("sent"));
    let known = own.filter(|entry| entry.identity.is_some());
    assert_eq!(known.count(), 3);
    drop((imported, shared));
    nothing_held(driver);
}

#[test]
fn host_memory_is_divided_and_a_gpus_is_not() {
    let driver = &grace();
    let sizes = |options: BufferOptions| {
        let buffer = options.allocate(driver).unwrap();
        let parts = buffer.physical().iter();
        parts.map(|part| part.size().padded()).collect::<Vec<_>>()
    };
    let on_node = |bytes| Buffer::on(NodeId(0)).bytes(bytes);
    assert_eq!(
        sizes(on_node(128 * MIB + 1)),
        [64, 64, 2].map(|mib| mib * MIB)
    );
    assert_eq!(sizes(on_node(64 * MIB)), [64 * MIB]);
    // Each chunk of shared memory is a handle.
    let shared = |bytes| on_node(bytes).handle_types(HandleTypes::POSIX_FD);
    assert_eq!(sizes(shared(64 * MIB)), [64 * MIB]);
    assert_eq!(sizes(shared(64 * MIB + 1)), [64 * MIB, 2 * MIB]);
    assert_eq!(sizes(shared(GIB)), [64 * MIB; 16]);
    let on_gpu = Buffer::on(Location::Device(0)).bytes(3 * GIB);
    assert_eq!(sizes(on_gpu), [3 * GIB]);
    // Chunks for access are divided too, each by itself.
    let in_both = on_node(12 * MIB).chunk(6 * MIB);
    let in_both = in_both.growth(Growth::steady().chunk(4 * MIB));
    assert_eq!(sizes(in_both), [4, 2, 4, 2].map(|mib| mib * MIB));
    let buffer = on_node(2 * GIB).allocate(driver).unwrap();
    buffer.put(GIB - 4, 7_u64).unwrap();
    assert_eq!(buffer.get::<u32>(GIB - 4), Ok(7));
    drop(buffer);
    nothing_held(driver);
}

#[test]
fn memory_that_can_be_shared_has_at_most_2048_chunks_however_it_is_spread() {
    let (_, driver) = FdLess::open();
    let small = Growth::steady().chunk(2 * MIB);
    let sizes = |options: BufferOptions| {
        let options = options.shareable().growth(small).overcommit(true);
        let buffer = options.allocate(&driver).unwrap();
        let parts = buffer.physical().iter();
        parts.map(|part| part.size().padded()).collect::<Vec<_>>()
    };
    let on_node = |bytes| Buffer::on(NodeId(0)).bytes(bytes);
    assert_eq!(sizes(on_node(4 * GIB)), [2 * MIB; 2048]);
    let larger = sizes(on_node(4 * GIB + 1));
    assert_eq!((larger.len(), larger[0]), (1025, 4 * MIB));
    assert_eq!(larger[1024], 2 * MIB);
    // Two shares of 2400 MiB together.
    let share = |bytes| egmem::topology::Share {
        node: NodeId(0),
        bytes,
    };
    let spread = sizes(Buffer::spread(&[share(2400 * MIB), share(2400 * MIB)]));
    assert_eq!(spread, [4 * MIB; 1200]);
    // Other memory is not bounded so.
    let other = on_node(4 * GIB + 2 * MIB).growth(small).overcommit(true);
    assert_eq!(other.allocate(&driver).unwrap().physical().len(), 2049);
}

/// With rests, too.
#[test]
fn growth_of_memory_that_can_be_shared_is_reported_and_can_be_cancelled() {
    let driver = &grace();
    let options = in_chunks(driver).handle_types(HandleTypes::POSIX_FD);
    let options = options.growth(Growth::gentle().chunk(4 * MIB));
    let mut seen = Vec::new();
    let buffer = options.clone().allocate_with(driver, |progress| {
        seen.push((progress.done, progress.total));
        ControlFlow::Continue(())
    });
    let all = 12 * MIB;
    assert_eq!(seen, [(4 * MIB, all), (8 * MIB, all), (all, all)]);
    drop(buffer.unwrap());
    nothing_held(driver);
    let error = options.allocate_with(driver, |progress| match progress.done {
        done if done == 8 * MIB => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    });
    let (done, total) = (8 * MIB, all);
    assert_eq!(error.unwrap_err(), Error::Cancelled { done, total });
    nothing_held(driver);
}

#[test]
fn a_shortage_in_the_middle_names_all_that_was_requested() {
    let driver = &grace();
    let sim = driver.sim().unwrap();
    sim.fail(Call::MemCreate, 2, Code::OUT_OF_MEMORY);
    let error = in_chunks(driver).allocate(driver).unwrap_err();
    assert!(
        matches!(error, Error::OutOfMemory { requested, .. } if requested == 12 * MIB),
        "{error}"
    );
    let free = driver.sim().unwrap().machine().nodes[0].memory;
    // Another process takes the remaining memory while the buffer grows.
    let mut taken = None;
    let half = free / 2 + (1 << 30);
    let options = Buffer::on(NodeId(0)).bytes(half);
    let error = options.allocate_with(driver, |progress| {
        if progress.done == 1 << 30 {
            let other = Buffer::on(NodeId(0))
                .bytes(half - (1 << 30))
                .growth(whole());
            taken = Some(other.allocate(driver).unwrap());
        }
        ControlFlow::Continue(())
    });
    let error = error.unwrap_err();
    let left = free - taken.as_ref().unwrap().padded();
    assert!(
        matches!(error, Error::NodeTooFull { requested, free, .. } if requested == half && free == left),
        "{error}"
    );
    drop(taken);
    nothing_held(driver);
}

#[test]
fn room_for_probes_counts_before_the_first_chunk_is_made() {
    let mut machine = Machine::h200x8();
    machine.nodes[0].memory = 64 * MIB;
    let driver = Driver::simulated(machine).unwrap();
    // A chunk of 64 MiB, and one of 2 MiB for the room.
    let options = Buffer::on(NodeId(0))
        .bytes(64 * MIB)
        .backing(Backing::Registered)
        .growth(Growth::steady().chunk(64 * MIB));
    drop(options.clone().allocate(&driver).unwrap());
    let made = || driver.sim().unwrap().count(Call::MemHostRegister);
    let before = made();
    let error = options.room_for_probes().allocate(&driver).unwrap_err();
    assert!(matches!(error, Error::NodeTooFull { .. }), "{error}");
    assert_eq!(made(), before);
    nothing_held(&driver);
}

/// Chunks as large as they can be.
fn whole() -> Growth {
    Growth::steady().chunk(Growth::MAX_CHUNK)
}

#[test]
fn a_panic_in_the_progress_function_leaves_nothing() {
    let driver = &grace();
    let options = in_chunks(driver);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        options.allocate_with(driver, |_| panic!("on purpose"))
    }));
    assert!(panicked.is_err());
    nothing_held(driver);
}

#[test]
fn growth_out_of_range_is_refused_and_a_gentle_one_rests_between_chunks() {
    let driver = &grace();
    for chunk in [0, MIB, 4 << 30] {
        let options = in_chunks(driver).growth(Growth::gentle().chunk(chunk));
        let error = options.allocate(driver).unwrap_err();
        assert!(
            matches!(error, Error::InvalidArgument { what: "growth", .. }),
            "{error}"
        );
    }
    let options = Buffer::on(NodeId(0))
        .bytes(40 * MIB)
        .growth(Growth::gentle());
    assert_eq!(options.allocate(driver).unwrap().physical().len(), 3);
    // More chunks than a buffer can have: the driver refuses the whole.
    let options = Buffer::on(NodeId(0)).bytes(1 << 60).overcommit(true);
    let error = options
        .growth(Growth::gentle())
        .allocate(driver)
        .unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    nothing_held(driver);
}
