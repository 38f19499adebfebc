//! Pools of other processes, imported by the process that owns them.

use super::*;
use crate::driver::sim::Machine;
use crate::driver::{Call, HandleTypes, NodeId};
#[cfg(not(miri))]
use crate::fork_check::in_a_child;
#[cfg(not(miri))]
use crate::per_driver::tests::alone;
use crate::stream::Stream;

#[test]
fn an_allocation_is_imported_once_at_a_time() {
    let driver = Driver::simulated(Machine::h200x8()).unwrap();
    let pool = Pool::options(NodeId(0)).handle_types(HandleTypes::POSIX_FD);
    let pool = pool.create(&driver).unwrap();
    let fd = pool.export(HandleType::PosixFd).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let own = pool.allocate(3 << 20, &stream).unwrap();
    // SAFETY: the imports are freed before `own`.
    let pointer = unsafe { own.export_pointer() }.unwrap();

    let node = Location::HostNuma(0);
    let pools = [(); 2].map(|()| ImportedPool::import(&driver, &fd, node).unwrap());
    let import = |pool: &ImportedPool| {
        let (_, tether) = std::io::pipe().unwrap();
        // SAFETY: `own` lives longer.
        unsafe { pool.import_pointer(&pointer, 3 << 20, &stream, tether.into()) }
    };
    let first = import(&pools[0]).unwrap();
    for pool in &pools {
        let error = import(pool).unwrap_err();
        let found = matches!(&error, Error::InvalidArgument { what: "pool allocation", why, .. }
            if why.contains("free it before"));
        assert!(found, "{error}");
    }
    first.cpu().unwrap().put(0, 7_u8).unwrap();
    assert_eq!(own.cpu().unwrap().get::<u8>(0).unwrap(), 7);
    first.free().unwrap();
    import(&pools[1]).unwrap().free().unwrap();
}

/// The driver has one handle, and one set of grants, for all imports of a pool.
#[test]
fn all_imports_of_a_pool_keep_what_a_ticket_relies_on() {
    let driver = Driver::simulated(Machine::h200x8()).unwrap();
    let pool = Pool::options(NodeId(0)).handle_types(HandleTypes::POSIX_FD);
    let pool = pool.create(&driver).unwrap();
    let fd = pool.export(HandleType::PosixFd).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let own = pool.allocate(4096, &stream).unwrap();
    // SAFETY: the imports are freed before `own`.
    let pointer = unsafe { own.export_pointer() }.unwrap();

    let node = Location::HostNuma(0);
    let [first, second] = [(); 2].map(|()| ImportedPool::import(&driver, &fd, node).unwrap());
    let (_, tether) = std::io::pipe().unwrap();
    // SAFETY: `own` lives longer.
    let memory = unsafe { first.import_pointer(&pointer, 4096, &stream, tether.into()) };
    let ticket = stream.start_fill((memory.unwrap(), 0), 4096, 7).unwrap();
    drop(first);
    let none = [AccessDesc::new(Location::Device(0), Access::None)];
    let error = second.set_access(&none).unwrap_err();
    assert!(matches!(error, Error::StillHeld { .. }), "{error}");
    ticket.wait().unwrap().free().unwrap();
    second.set_access(&none).unwrap();
    let third = ImportedPool::import(&driver, &fd, node).unwrap();
    let gpu = Location::Device(0);
    assert_eq!(
        third.access(gpu),
        Ok(Access::None),
        "importing again grants nothing"
    );
    assert_eq!(third.access(Location::Device(1)), Ok(Access::ReadWrite));
    assert_eq!(own.cpu().unwrap().get::<u8>(4095).unwrap(), 7);
    drop((second, third, own, pool, stream));
    let held = driver.sim().unwrap().held();
    assert!(held.is_empty(), "still held: {held}");
}

#[test]
fn an_imported_allocation_is_freed_after_a_capture_of_its_stream() {
    let driver = Driver::simulated(Machine::h200x8()).unwrap();
    let pool = Pool::options(NodeId(0)).handle_types(HandleTypes::POSIX_FD);
    let pool = pool.create(&driver).unwrap();
    let fd = pool.export(HandleType::PosixFd).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let own = pool.allocate(4096, &stream).unwrap();
    // SAFETY: the import is freed before `own`.
    let pointer = unsafe { own.export_pointer() }.unwrap();
    let imported = ImportedPool::import(&driver, &fd, Location::HostNuma(0)).unwrap();
    let (mut freed, tether) = std::io::pipe().unwrap();
    // SAFETY: `own` lives longer.
    let memory = unsafe { imported.import_pointer(&pointer, 4096, &stream, tether.into()) };
    let memory = memory.unwrap();
    let sim = driver.sim().unwrap();
    sim.begin_capture(stream.handle(), false);
    assert!(memory.cpu().is_err());
    memory.free().unwrap();
    assert_eq!(sim.count(Call::MemFreeAsync), 0);
    assert!(sim.end_capture(stream.handle()));
    pool.stats().unwrap();
    assert_eq!(sim.count(Call::MemFreeAsync), 1);
    assert_eq!(
        std::io::Read::read(&mut freed, &mut [0]).unwrap(),
        0,
        "the exporter hears of it"
    );
}

/// A thread that the child does not have may hold them.
#[test]
#[cfg(not(miri))]
fn a_child_that_is_forked_while_the_lists_of_pools_are_locked_has_its_own() {
    let create = |driver: &Driver| {
        let pool = Pool::options(NodeId(0)).handle_types(HandleTypes::POSIX_FD);
        pool.create(driver).unwrap()
    };
    let import = |pool: &Pool| {
        let fd = pool.export(HandleType::PosixFd)?;
        ImportedPool::import(pool.driver(), &fd, Location::HostNuma(0)).map(drop)
    };
    let _alone = alone();
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let pool = create(&driver);
    let guard = std::cell::Cell::new(Some(pool.make_current(0).unwrap()));
    let _locked = (imported(), live(), crate::pool::current());
    assert!(in_a_child(|| {
        drop(guard.take());
        let is_refused = pool
            .make_current(0)
            .is_err_and(|error| error.to_string().contains("forked"));
        let own = create(&Driver::simulated(Machine::gh200()).unwrap());
        is_refused && own.make_current(0).is_ok() && import(&own).is_ok()
    }));
}
