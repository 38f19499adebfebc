use std::sync::Mutex;

use super::*;
use crate::driver::{Call, Location};
use crate::{Backing, Machine};

const MIB: u64 = 1 << 20;

fn parts(driver: &Driver, count: i32) -> Vec<PhysicalMemory> {
    let part = |node| {
        PhysicalMemory::options(Location::HostNuma(node))
            .create(driver, 2 * MIB)
            .unwrap()
    };
    (0..count).map(part).collect()
}

fn rw(location: Location) -> AccessDesc {
    AccessDesc::new(location, Access::ReadWrite)
}

#[test]
fn the_least_access_of_the_parts_counts() {
    let driver = Driver::simulated(Machine::gh200x4()).unwrap();
    let all = [rw(Location::Host), rw(Location::Device(1))];
    let reading =
        [Location::Host, Location::Device(1)].map(|who| AccessDesc::new(who, Access::Read));
    let sim = driver.sim().unwrap();
    sim.fail(Call::MemSetAccess, 2, crate::driver::Code::NOT_SUPPORTED);
    let range = MappedRange::map_or(&driver, parts(&driver, 3), &all, &reading).unwrap();
    assert_eq!(range.padded(), 6 * MIB);
    for (offset, len, least) in [
        (0, 2 * MIB, Access::ReadWrite),
        (0, 2 * MIB + 1, Access::Read),
        (2 * MIB, 1, Access::Read),
        (4 * MIB, 2 * MIB, Access::ReadWrite),
    ] {
        assert_eq!(range.gpu_access(1, Engine::Copy, offset, len), Ok(least));
        let read_only = least == Access::Read;
        assert_eq!(range.is_read_only_for_cpu(offset, len), read_only);
    }
    for (offset, len) in [(6 * MIB, 1), (0, 6 * MIB + 1), (u64::MAX, 2)] {
        let error = range.gpu_access(1, Engine::Copy, offset, len).unwrap_err();
        assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
    }
    let mut range = range;
    let view = range.cpu(6 * MIB).unwrap();
    assert!(view.put(0, 1_u8).is_err() && view.get::<u8>(6 * MIB - 1) == Ok(0));
    let error = range.cpu(6 * MIB + 1).unwrap_err();
    assert!(matches!(error, Error::OutOfRange { .. }), "{error}");

    range.set_access(&[rw(Location::Host)]).unwrap();
    range.cpu(6 * MIB).unwrap().put(0, 1_u8).unwrap();
    // The second part stays as it was: the CPU's access is still the least.
    sim.fail(Call::MemSetAccess, 2, crate::driver::Code::UNKNOWN);
    let none = [AccessDesc::new(Location::Host, Access::None)];
    range.set_access(&none).unwrap_err();
    assert_eq!(range.mappings()[2].host(), Access::ReadWrite);
    let error = range.cpu(1).unwrap_err();
    assert!(matches!(error, Error::NotAccessible { .. }), "{error}");
}

#[test]
fn kinds_change_at_the_boundaries_of_parts() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let gpu = Location::Device(0);
    let locations = [gpu, gpu, Location::HostNuma(0), gpu];
    let parts = locations.map(|at| {
        PhysicalMemory::options(at)
            .create(&driver, 2 * MIB)
            .unwrap()
    });
    let range = MappedRange::map(&driver, parts.into(), &[rw(gpu)]).unwrap();
    for (offset, len, expected) in [
        (0, 8 * MIB, 4 * MIB),
        (0, MIB, MIB),
        (4 * MIB - 1, 2, 1),
        (4 * MIB, 4 * MIB, 2 * MIB),
        (5 * MIB, MIB, MIB),
        (6 * MIB, 2 * MIB, 2 * MIB),
        (8 * MIB, 0, 0),
    ] {
        assert_eq!(range.of_one_copy(offset, len), expected, "{offset}");
    }
}

#[test]
fn mappings_out_of_order_have_wrong_answers_and_no_overflow() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let gpu = Location::Device(0);
    let memories = [gpu, Location::HostNuma(0), gpu].map(|at| {
        PhysicalMemory::options(at)
            .create(&driver, 2 * MIB)
            .unwrap()
    });
    let reservation = Reservation::options().reserve(&driver, 6 * MIB).unwrap();
    let reservation = Arc::new(reservation);
    let mappings: Vec<Mapping> = [2, 1, 0]
        .map(|at: usize| reservation.map(2 * MIB * at as u64, &memories[at]).unwrap())
        .into();
    // SAFETY: their answers are wrong, and nothing relies on them.
    let all = || unsafe { Adjacent::new(&mappings[..]) };
    assert_eq!(all().of_one_mapping(3 * MIB, 2 * MIB), Some(0));
    assert_eq!(all().of_one_copy(3 * MIB, 2 * MIB), 0);
}

/// Another memory each time it is asked.
struct Alternating(std::cell::Cell<bool>, [PhysicalMemory; 2]);

impl AsRef<PhysicalMemory> for Alternating {
    fn as_ref(&self) -> &PhysicalMemory {
        &self.1[usize::from(self.0.replace(!self.0.get()))]
    }
}

#[test]
fn a_part_that_changes_its_memory_maps_what_is_counted_or_is_refused() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let memory = |bytes| PhysicalMemory::options(Location::HostNuma(0)).create(&driver, bytes);
    for first in [false, true] {
        let sizes = [4 * MIB, 2 * MIB].map(|bytes| memory(bytes).unwrap());
        let part = Alternating(first.into(), sizes);
        match MappedRange::map(&driver, vec![part], &[rw(Location::Host)]) {
            Ok(range) => assert_eq!(range.padded(), range.first().size().padded()),
            Err(error) => assert!(matches!(error, Error::OutOfRange { .. }), "{error}"),
        }
        assert!(driver.sim().unwrap().held().is_empty());
    }
}

#[test]
fn a_step_that_fails_undoes_those_before_it() {
    for call in [Call::MemMap, Call::MemSetAccess] {
        let driver = Driver::simulated(Machine::gh200x4()).unwrap();
        let parts = parts(&driver, 3);
        let sim = driver.sim().unwrap();
        sim.fail(call, 2, crate::driver::Code::UNKNOWN);
        MappedRange::map(&driver, parts, &[rw(Location::Host)]).unwrap_err();
        assert!(sim.held().is_empty(), "{}", sim.held());
    }
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let none: Vec<PhysicalMemory> = Vec::new();
    let error = MappedRange::map(&driver, none, &[]).unwrap_err();
    assert!(matches!(
        error,
        Error::InvalidArgument { what: "parts", .. }
    ));
}

/// Records how many mappings and memories were given back before it.
#[derive(Debug)]
struct Watched(PhysicalMemory, Driver, Arc<Mutex<Vec<(u64, u64)>>>);

impl AsRef<PhysicalMemory> for Watched {
    fn as_ref(&self) -> &PhysicalMemory {
        &self.0
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let count = |call| self.1.sim().unwrap().count(call);
        let now = (count(Call::MemUnmap), count(Call::MemRelease));
        self.2.lock().unwrap().push(now);
    }
}

/// Returns three memories that record when they are dropped.
fn watched(driver: &Driver, seen: &Arc<Mutex<Vec<(u64, u64)>>>) -> Vec<Watched> {
    let part = |_| {
        let memory = PhysicalMemory::options(Location::HostNuma(0)).create(driver, 2 * MIB);
        Watched(memory.unwrap(), driver.clone(), Arc::clone(seen))
    };
    (0..3).map(part).collect()
}

/// Other processes would wait for releases that follow each other at once.
#[test]
fn each_part_is_released_before_the_next_is_unmapped() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let seen = Arc::default();
    drop(MappedRange::map(&driver, watched(&driver, &seen), &[]).unwrap());
    assert_eq!(*seen.lock().unwrap(), [(1, 0), (2, 1), (3, 2)]);
    // The same holds after a failure: the part whose step fails goes first, unmapped before it is released, and then those
    // that were never mapped.
    for (call, nth, expected) in [
        (Call::MemSetAccess, 3, [(1, 0), (2, 1), (3, 2)]),
        (Call::MemSetAccess, 2, [(1, 0), (1, 1), (2, 2)]),
        (Call::MemSetAccess, 1, [(1, 0), (1, 1), (1, 2)]),
        (Call::MemMap, 2, [(0, 0), (0, 1), (1, 2)]),
    ] {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let seen = Arc::default();
        let sim = driver.sim().unwrap();
        sim.fail(call, nth, crate::driver::Code::UNKNOWN);
        let host = [rw(Location::Host)];
        MappedRange::map(&driver, watched(&driver, &seen), &host).unwrap_err();
        assert_eq!(*seen.lock().unwrap(), expected, "{call:?} {nth}");
        assert!(sim.held().is_empty(), "{}", sim.held());
    }
}

#[test]
fn mappings_of_several_reservations_are_refused_and_have_no_access() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let mapped = |backing, hint| {
        let options = Reservation::options().backing(backing).hint(hint);
        let addresses = Arc::new(options.reserve(&driver, 2 * MIB).unwrap());
        let memory = PhysicalMemory::options(Location::HostNuma(0)).backing(backing);
        let memory = memory.create(&driver, 2 * MIB).unwrap();
        addresses.map(0, &memory).unwrap()
    };
    // Other threads may take the addresses behind the first mapping.
    let adjacent = (0..1000).find_map(|at| {
        let hint = DevicePtr((1 << 44) + at * 8 * MIB);
        let first = mapped(Backing::Registered, hint);
        let behind = first.device_ptr().add(2 * MIB);
        let second = mapped(Backing::Driver, behind);
        (second.device_ptr() == behind).then_some((first, second))
    });
    let (mut first, mut second) = adjacent.unwrap();
    let both = &mut [&mut first, &mut second];
    let error = Mapping::set_access_together(both, &[rw(Location::Host)]).unwrap_err();
    assert!(
        matches!(
            error,
            Error::InvalidArgument {
                what: "mappings",
                ..
            }
        ),
        "{error}"
    );
    for mapping in [&first, &second] {
        assert_eq!(mapping.host(), Access::None);
        let error = mapping.cpu().unwrap_err();
        assert!(matches!(error, Error::NotAccessible { .. }), "{error}");
    }
}

#[test]
fn mappings_hold_a_range_if_they_share_a_byte_with_it() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let parts = [2, 6, 4, 2].map(|mib| {
        let options = PhysicalMemory::options(Location::HostNuma(0));
        options.create(&driver, mib * MIB).unwrap()
    });
    let range = MappedRange::map(&driver, parts.into(), &[rw(Location::Host)]).unwrap();
    for offset in (0..16 * MIB).step_by(MIB as usize) {
        for end in [offset + 1, offset + MIB, offset + 5 * MIB, u64::MAX] {
            let held = range.all().holding(offset, end - offset);
            let shares = |mapping: &&Mapping| {
                let own = mapping.range();
                own.start < end && offset < own.end
            };
            let expected: Vec<_> = range.mappings().iter().filter(shares).collect();
            let starts =
                |mappings: &[&Mapping]| mappings.iter().map(|m| m.range()).collect::<Vec<_>>();
            assert_eq!(starts(&held.iter().collect::<Vec<_>>()), starts(&expected));
        }
    }
}
