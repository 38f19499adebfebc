//! Memory that is never given back because a GPU may still use it. AddressSanitizer does not report it
//! (`ci/lsan.supp`).

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use egmem::driver::sim::PeerAccess;
use egmem::driver::{Call, Code, Location};
use egmem::shapes::Replicated;
use egmem::{Buffer, Driver, Error, Machine, Stream};

use crate::shapes::append_threads::{Threads, record};
use crate::shapes::appender::{appender, write_last};
use crate::shapes::grace;

/// The driver never says whether kernels have ended: their memory stays, also when all else is dropped.
#[test]
fn memory_of_kernels_without_an_end_is_never_unmapped() {
    let driver = grace();
    let sim = driver.sim().unwrap();
    let mut appender = appender(&driver);
    appender.append(&[record(3)]).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    write_last(&appender, &stream, 6);
    let (counters, mapped) = (appender.device_ptr(), sim.held().mappings);
    for nth in 1..200 {
        sim.fail(Call::StreamQuery, nth, Code::UNKNOWN);
        sim.fail(Call::StreamSynchronize, nth, Code::UNKNOWN);
    }
    let unknown =
        |result: Result<(), Error>| assert_eq!(result.unwrap_err().code(), Some(Code::UNKNOWN));
    unknown(appender.pump_while(&stream));
    unknown(appender.collect().map(drop));
    unknown(appender.append(&[record(4)]).map(drop));
    let mut vector = appender.into_growable();
    assert_eq!(vector.get(0), Ok(record(3)));
    vector.truncate(0);
    assert_eq!(vector.shrink_to_fit(), Ok(0));
    drop(vector);
    assert_eq!(sim.held().mappings, mapped);
    sim.cancel_all();
    stream.synchronize().unwrap();
    // SAFETY: the counters are mapped for ever.
    let gpu = unsafe { Threads::open(counters) };
    assert_ne!(gpu.end().load(Relaxed) >> 63, 0);
}

/// A copy cannot be started, and the driver does not report whether those before it have ended: their version is not
/// written again, and not waited for.
#[test]
fn a_version_is_lost_with_a_copy_in_the_middle() {
    let mut machine = Machine::h200x8();
    machine.nvlink = PeerAccess::None; // each GPU reads from the CPU, all at the same time
    let driver = Driver::simulated(machine).unwrap();
    let all: Vec<Location> = (0..8).map(Location::Device).collect();
    let data = Replicated::on(all).create(&driver, &[1_u64; 1000]).unwrap();
    let sim = driver.sim().unwrap();
    sim.fail(Call::MemcpyAsync, 5, Code::UNKNOWN);
    for nth in 1..200 {
        sim.fail(Call::EventSynchronize, nth, Code::UNKNOWN);
        sim.fail(Call::EventQuery, nth, Code::UNKNOWN);
    }
    let error = data.publish(&[2; 1000]).unwrap_err();
    assert_eq!(error.code(), Some(Code::UNKNOWN));
    sim.cancel_all();
    let hours = Duration::from_secs(1_000_000);
    let error = data.publish_within(&[3; 1000], hours).unwrap_err();
    let is_lost = |error: &Error| matches!(error, Error::StillHeld { holders, .. } if holders[0].contains("does not tell"));
    assert!(is_lost(&error), "{error}");
    // Readers go on.
    let replica = data.local(Location::Device(3)).unwrap();
    let seen = Buffer::near(&driver, 3, 8000).unwrap();
    let stream = Stream::new(&driver, 3).unwrap();
    stream.copy(&seen, 0, &replica, 0, 8000).unwrap();
    assert_eq!((replica.epoch(), seen.get::<u64>(7992)), (1, Ok(1)));
}

/// The driver does not report whether GPU work of a reader elsewhere has ended: the publisher does not write that version.
#[cfg(feature = "portable")]
#[test]
fn a_version_that_a_reader_lost_is_not_written() {
    use egmem::shapes::replicated::ReplicatedView;
    use egmem::share::ImportOptions;

    let driver = grace();
    let sim = driver.sim().unwrap();
    let options = Replicated::on([crate::shapes::node(&driver)]).shareable();
    let data = options.create(&driver, &[1_u64; 10]).unwrap();
    let (mut channel, mut others) = crate::shapes::ring_shared::channels();
    data.share(&mut channel).unwrap();
    let options = ImportOptions::new();
    let view = ReplicatedView::<u64>::receive(&driver, &mut others, options).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let replica = view.local(Location::Device(0)).unwrap();
    for nth in 1..200 {
        sim.fail(Call::EventQuery, nth, Code::UNKNOWN);
        sim.fail(Call::EventSynchronize, nth, Code::UNKNOWN);
    }
    replica.release_after(&stream).unwrap();
    drop(view);
    sim.cancel_all();
    assert_eq!(data.publish(&[2; 10]), Ok(2));
    let error = data.publish(&[3; 10]).unwrap_err();
    assert!(matches!(error, Error::StillHeld { .. }), "{error}");
}
