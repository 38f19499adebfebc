//! Data with a copy on each of several nodes and GPUs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use egmem::driver::{Call, Code, Location};
use egmem::proof::Prover;
use egmem::shapes::Replicated;
use egmem::{Buffer, Driver, Error, Machine, Memory, Stream, Topology};
use proptest::prelude::*;

use crate::shapes::{MIB, grace, nothing_held};

/// Elements: more than a granule, and no whole number of them.
const LEN: usize = 300_000;

/// Every host node that a GPU is near to, and every GPU.
fn places(driver: &Driver) -> Vec<Location> {
    let topology = Topology::discover(driver).unwrap();
    let mut places: Vec<Location> = topology.gpus().iter().map(Location::from).collect();
    for gpu in topology.gpus() {
        let node = gpu.host_node().unwrap().into();
        if !places.contains(&node) {
            places.push(node);
        }
    }
    places
}

fn values(epoch: u64) -> Vec<u64> {
    (0..LEN as u64).map(|index| epoch << 32 | index).collect()
}

fn is_held(error: &Error, by: &str) -> bool {
    matches!(error, Error::StillHeld { holders, .. } if holders.iter().any(|who| who.contains(by)))
}

/// Returns the bytes of a replica, wherever it is.
fn read(driver: &Driver, replica: &egmem::shapes::Replica<u64>) -> Vec<u64> {
    let gpu = match replica.location() {
        Location::Device(gpu) => gpu,
        _ => 0,
    };
    let seen = Buffer::near(driver, gpu, (LEN * 8) as u64).unwrap();
    let stream = Stream::new(driver, gpu).unwrap();
    stream.copy(&seen, 0, replica, 0, (LEN * 8) as u64).unwrap();
    let mut values = vec![0; LEN];
    seen.read_at(0, &mut values).unwrap();
    values
}

pub fn every_place_has_its_copy_of_each_version(driver: &Driver) {
    let places = places(driver);
    let data = Replicated::on(places.iter().copied())
        .create(driver, &values(1))
        .unwrap();
    assert_eq!(
        (data.len(), data.epoch(), data.places()),
        (LEN, 1, places.clone())
    );
    for epoch in 1..5 {
        for &place in &places {
            let replica = data.local(place).unwrap();
            assert_eq!((replica.location(), replica.epoch()), (place, epoch));
            assert!(
                read(driver, &replica) == values(epoch),
                "{place}, epoch {epoch}"
            );
            assert_eq!(replica.cpu().is_ok(), place.is_host());
        }
        assert_eq!(data.publish(&values(epoch + 1)), Ok(epoch + 1));
    }
    let host = data.local(Location::Host).unwrap();
    assert_eq!(host.get(LEN - 1), Ok(5 << 32 | (LEN as u64 - 1)));
    drop((data, host));
    nothing_held(driver);
}

/// Readers of the newest version never stop a publisher; those of the one before do.
pub fn a_version_stays_while_it_has_readers(driver: &Driver) {
    let gpu = Location::Device(0);
    let data = Replicated::on(places(driver))
        .create(driver, &values(1))
        .unwrap();
    let first = data.local(gpu).unwrap();
    data.publish(&values(2)).unwrap();
    let again = first.clone();
    drop(first);
    let error = data.publish(&values(3)).unwrap_err();
    assert!(is_held(&error, "replicas of epoch 1: 1"), "{error}");
    assert!(read(driver, &again) == values(1));
    assert_eq!(data.local(gpu).unwrap().epoch(), 2);
    let waited = std::thread::scope(|threads| {
        let publisher = threads.spawn(|| data.publish_within(&values(3), Duration::from_secs(600)));
        std::thread::sleep(Duration::from_millis(20));
        drop(again);
        publisher.join().unwrap()
    });
    assert_eq!(waited, Ok(3));
    assert!(read(driver, &data.local(gpu).unwrap()) == values(3));
}

/// Submits a copy of the newest version by its address, as a kernel of the program's own would read it, and lets it
/// go behind that.
fn read_by_address(data: &Replicated<u64>, target: &Buffer, stream: &Stream) {
    let replica = data.local(Location::Device(stream.device())).unwrap();
    let (to, from) = (target.device_ptr(), replica.device_ptr());
    // SAFETY: both ranges are mapped until the stream has been waited for, the source by its event.
    unsafe { stream.copy_async(to, from, target.len()) }.unwrap();
    replica.release_after(stream).unwrap();
}

/// Work in flight has the version that it was submitted with: by a ticket that owns it, or behind an event.
pub fn gpu_work_in_flight_reads_its_version(driver: &Driver) {
    let gpu = Location::Device(0);
    let data = Replicated::on([gpu]).create(driver, &values(1)).unwrap();
    let stream = Stream::new(driver, 0).unwrap();
    let bytes = (LEN * 8) as u64;
    let seen = || Buffer::near(driver, 0, bytes).unwrap();
    let ticket = stream
        .start_copy((seen(), 0), (data.local(gpu).unwrap(), 0), bytes)
        .unwrap();
    data.publish(&values(2)).unwrap();
    let error = data.publish(&values(3)).unwrap_err();
    assert!(is_held(&error, "replicas of epoch 1: 1"), "{error}");
    let (copied, replica) = ticket.wait().unwrap();
    drop(replica);
    assert_eq!(copied.get::<u64>(bytes - 8), Ok(values(1)[LEN - 1]));
    data.publish(&values(3)).unwrap();

    let target = seen();
    read_by_address(&data, &target, &stream);
    // The slots are written again only after the copy has run, so it reads epoch 3.
    for epoch in 4..8 {
        data.publish_within(&values(epoch), Duration::from_secs(600))
            .unwrap();
    }
    stream.synchronize().unwrap();
    let mut copied = vec![0_u64; LEN];
    target.read_at(0, &mut copied).unwrap();
    assert!(copied == values(3));
    // Data that go before the work has run wait for it.
    read_by_address(&data, &target, &stream);
    drop(data);
    stream.synchronize().unwrap();
    assert_eq!(target.get::<u64>(0), Ok(7 << 32));
    drop((target, stream, copied));
}

/// The calling thread's node, where this is its machine.
pub fn a_thread_reads_the_copy_of_its_node(driver: &Driver) {
    let data = Replicated::on(places(driver))
        .create(driver, &[1_u64])
        .unwrap();
    let topology = Topology::discover(driver).unwrap();
    let local = data.local(Location::HostNumaCurrent);
    if driver.is_simulated() {
        let error = local.unwrap_err();
        assert!(
            matches!(error, Error::InvalidArgument { what: "node", .. }),
            "{error}"
        );
        return;
    }
    for node in topology.nodes() {
        let Ok(_bound) = topology.bind_thread(node.id) else {
            continue;
        };
        let near = data.local(node.id).unwrap().location();
        let local = data.local(Location::HostNumaCurrent).unwrap();
        assert_eq!(local.location(), near);
    }
}

/// Threads and kernels that read while versions come see each of them whole.
pub fn no_reader_sees_a_torn_version(driver: &Driver) {
    let data = Replicated::on(places(driver))
        .create(driver, &[1_u64; 20_000])
        .unwrap();
    let done = AtomicBool::new(false);
    let whole = |replica: &egmem::shapes::Replica<u64>, values: &[u64]| {
        assert!(
            values.iter().all(|value| *value == replica.epoch()),
            "{replica:?}"
        );
    };
    std::thread::scope(|threads| {
        let (data, done, whole) = (&data, &done, &whole);
        for _ in 0..2 {
            threads.spawn(move || {
                let mut last = 0;
                while !done.load(Ordering::Relaxed) {
                    let replica = data.local(Location::Host).unwrap();
                    let mut values = vec![0; 20_000];
                    replica.cpu().unwrap().read_at(0, &mut values).unwrap();
                    whole(&replica, &values);
                    assert!(replica.epoch() >= last);
                    last = replica.epoch();
                }
            });
        }
        threads.spawn(move || {
            let stream = Stream::new(driver, 0).unwrap();
            let mut seen = Buffer::near(driver, 0, 160_000).unwrap();
            while !done.load(Ordering::Relaxed) {
                let replica = data.local(Location::Device(0)).unwrap();
                let ticket = stream.start_copy((seen, 0), (replica, 0), 160_000).unwrap();
                let (buffer, replica) = ticket.wait().unwrap();
                let mut values = vec![0; 20_000];
                buffer.read_at(0, &mut values).unwrap();
                whole(&replica, &values);
                seen = buffer;
            }
        });
        for epoch in 2..60 {
            let published = data.publish_within(&[epoch; 20_000], Duration::from_secs(600));
            assert_eq!(published, Ok(epoch));
        }
        done.store(true, Ordering::Relaxed);
    });
}

pub fn a_replica_is_read_only(driver: &Driver) {
    let gpu = Location::Device(0);
    let data = Replicated::on(places(driver))
        .create(driver, &values(1))
        .unwrap();
    let stream = Stream::new(driver, 0).unwrap();
    let prover = Prover::new(driver, 0).unwrap();
    for who in [gpu, Location::Host] {
        let replica = data.local(who).unwrap();
        prover.read(&replica).unwrap();
        let refused = [
            stream.fill(&replica, 0, 8, 1),
            stream.copy(&replica, 0, &replica.clone(), 8, 8),
            prover.write(&replica, 1),
        ];
        for result in refused {
            assert!(
                matches!(result, Err(Error::NotAccessible { .. })),
                "{result:?}"
            );
        }
        assert_eq!(Memory::len(&replica), (LEN * 8) as u64);
    }
    let host = data.local(Location::Host).unwrap();
    assert!(host.cpu().unwrap().put(0, 1_u64).is_err());
    assert!(matches!(host.get(LEN), Err(Error::OutOfRange { .. })));
}

pub fn what_cannot_be_replicated_is_refused(driver: &Driver) {
    let gpu = Location::Device(0);
    let invalid = |result: egmem::Result<u64>, argument: &str| {
        let error = result.unwrap_err();
        assert!(
            matches!(error, Error::InvalidArgument { what, .. } if what == argument),
            "{error}"
        );
    };
    let create = |places: &[Location], values: &[u64]| {
        let data = Replicated::on(places.iter().copied()).create(driver, values);
        data.map(|data| data.epoch())
    };
    invalid(create(&[], &[1]), "locations");
    invalid(create(&[gpu, gpu], &[1]), "locations");
    invalid(create(&[Location::Host], &[1]), "locations");
    invalid(create(&[gpu], &[]), "values");
    let data = Replicated::on([gpu]).create(driver, &[1_u64, 2]).unwrap();
    invalid(data.publish(&[1]), "values");
    let error = data.local(Location::Host).unwrap_err();
    assert!(matches!(error, Error::NotAccessible { .. }), "{error}");
    let error = data.local(Location::Device(99)).unwrap_err();
    assert!(matches!(error, Error::NoSuchGpu { gpu: 99, .. }), "{error}");
    let error = data.local(Location::HostNuma(99)).unwrap_err();
    assert!(matches!(error, Error::NoSuchNode { .. }), "{error}");
}

/// No reader sees a version that could not be written; readers see the next one.
#[test]
fn a_publication_that_fails_changes_nothing() {
    for nth in [1, 2, 4, 8] {
        let driver = Driver::simulated(Machine::h200x8()).unwrap();
        let all: Vec<Location> = (0..8).map(Location::Device).collect();
        let data = Replicated::on(all).create(&driver, &[1_u64; 1000]).unwrap();
        let sim = driver.sim().unwrap();
        sim.fail(Call::MemcpyAsync, nth, Code::UNKNOWN);
        let failed = data.publish(&[2; 1000]);
        for gpu in 0..8 {
            let replica = data.local(Location::Device(gpu)).unwrap();
            let seen = Buffer::near(&driver, gpu, 8000).unwrap();
            Stream::new(&driver, gpu)
                .unwrap()
                .copy(&seen, 0, &replica, 0, 8000)
                .unwrap();
            assert_eq!((replica.epoch(), seen.get::<u64>(7992)), (1, Ok(1)));
        }
        assert!(failed.is_err(), "{nth}");
        assert_eq!(data.publish(&[2; 1000]), Ok(2), "{nth}");
    }
}

/// Host memory for copies on GPUs alone is limited: larger data go through it piece by piece. The second GPU gets its
/// bytes from the first one, over NVLink, whichever link leads to the CPU: one copy instead of three pieces.
#[test]
fn large_data_reach_gpus_piece_by_piece() {
    for machine in [Machine::h200x8(), Machine::gh200x4()] {
        let driver = Driver::simulated(machine).unwrap();
        let free = |driver: &Driver| driver.simulated_host().unwrap().nodes[0].free;
        let before = free(&driver);
        let len = 17 << 20;
        let values: Vec<u64> = (0..len).collect();
        let data = Replicated::on([Location::Device(0), Location::Device(1)]);
        let data = data.create(&driver, &values).unwrap();
        assert_eq!(before - free(&driver), 64 * MIB);
        for gpu in [0, 1] {
            let replica = data.local(Location::Device(gpu)).unwrap();
            let seen = Buffer::near(&driver, gpu, 24).unwrap();
            let stream = Stream::new(&driver, gpu).unwrap();
            for (to, at) in [(0, 0), (8, 64 * MIB - 8), (16, len * 8 - 8)] {
                stream.copy(&seen, to, &replica, at, 8).unwrap();
            }
            assert_eq!(seen.get::<[u64; 3]>(0), Ok([0, 8 * MIB - 1, len - 1]));
        }
        let copies = driver.sim().unwrap().count(Call::MemcpyAsync);
        data.publish(&values).unwrap();
        let copies = driver.sim().unwrap().count(Call::MemcpyAsync) - copies;
        assert_eq!(copies, 3 + 1);
    }
}

#[derive(Clone, Debug)]
enum Step {
    Publish,
    Hold(usize),
    Release(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        Just(Step::Publish),
        (0..8_usize).prop_map(Step::Hold),
        (0..8_usize).prop_map(Step::Release),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// The model: a number, and the numbers that readers hold.
    #[test]
    fn it_is_a_number_that_readers_hold(steps in prop::collection::vec(step(), 1..40)) {
        let driver = grace();
        let places: Vec<Location> = places(&driver);
        let data = Arc::new(Replicated::on(places.iter().copied()).create(&driver, &[1_u64; 9]).unwrap());
        let mut newest = 1;
        let mut held: Vec<(u64, egmem::shapes::Replica<u64>)> = Vec::new();
        for step in steps {
            match step {
                Step::Publish => {
                    let is_free = held.iter().all(|(epoch, _)| epoch + 1 != newest);
                    let result = data.publish(&[newest + 1; 9]);
                    prop_assert_eq!(result.is_ok(), is_free);
                    newest += u64::from(is_free);
                }
                Step::Hold(place) => {
                    let place = places[place % places.len()];
                    held.push((newest, data.local(place).unwrap()));
                }
                Step::Release(index) if !held.is_empty() => {
                    held.swap_remove(index % held.len());
                }
                Step::Release(_) => {}
            }
            prop_assert_eq!(data.epoch(), newest);
            for (epoch, replica) in &held {
                prop_assert_eq!(replica.epoch(), *epoch);
                if replica.location().is_host() {
                    prop_assert_eq!(replica.get(8), Ok(*epoch));
                }
            }
        }
        // A replica that is held outlives the rest.
        drop(data);
        for (epoch, replica) in held {
            let seen = Buffer::near(&driver, 0, 72).unwrap();
            let gpu = match replica.location() { Location::Device(gpu) => gpu, _ => 0 };
            Stream::new(&driver, gpu).unwrap().copy(&seen, 0, &replica, 0, 72).unwrap();
            prop_assert_eq!(seen.get::<[u64; 9]>(0), Ok([epoch; 9]));
        }
        nothing_held(&driver);
    }
}
