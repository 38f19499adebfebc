//! Capabilities: tried once, answered with typed reasons, and nothing kept.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use egmem::capability::{Capabilities, HANDLE_TYPES, Path, Support, Trial};
use egmem::driver::sim::PeerAccess;
use egmem::driver::{Backend, Call, Code, CudaVersion, HandleTypes, Location, NodeId, PoolCalls};
use egmem::{Driver, Error, Machine};

const NODE: Location = Location::HostNuma(0);

fn trial(path: Path, handle_types: HandleTypes) -> Trial {
    Trial {
        location: NODE,
        gpu: 0,
        path,
        handle_types,
    }
}

fn simulated(change: impl FnOnce(&mut Machine)) -> Driver {
    let mut machine = Machine::gh200x4();
    change(&mut machine);
    Driver::simulated(machine).unwrap()
}

fn all_trials(location: Location, gpu: i32) -> impl Iterator<Item = Trial> {
    Path::ALL.into_iter().flat_map(move |path| {
        HANDLE_TYPES.map(|handle_types| Trial {
            location,
            gpu,
            path,
            handle_types,
        })
    })
}

#[test]
fn with_a_channel_all_of_a_grace_hopper_node_works_and_nothing_is_kept() {
    let driver = simulated(|machine| machine.imex_channel = true);
    let capabilities = Capabilities::of(&driver);
    let nodes = (0..4).map(Location::HostNuma);
    let devices = (0..4).map(Location::Device);
    for location in nodes.chain(devices) {
        for gpu in 0..4 {
            for trial in all_trials(location, gpu) {
                assert_eq!(capabilities.trial(trial), Support::Yes, "{trial}");
            }
        }
    }
    let held = driver.sim().unwrap().held();
    assert!(held.is_empty(), "{held}");
}

#[test]
fn without_a_channel_fabric_says_so_and_no_fabric_pool_is_ever_made() {
    let driver = simulated(|machine| machine.imex_channel = false);
    let capabilities = Capabilities::of(&driver);
    for location in [NODE, Location::Device(0)] {
        for trial in all_trials(location, 0).filter(|trial| trial.path == Path::Pool) {
            let support = capabilities.trial(trial);
            if !trial.handle_types.contains(HandleTypes::FABRIC) {
                assert_eq!(support, Support::Yes, "{trial}");
                continue;
            }
            match support {
                Support::No(Error::NoImexChannel { path, source }) => {
                    assert!(path.ends_with("channel0"));
                    assert_eq!(source.call, Call::MemCreate, "the reason is VMM's");
                    assert_eq!(source.code, Code::NOT_PERMITTED);
                }
                other => panic!("{trial}: {other:?}"),
            }
        }
    }
    // Only the pools without fabric handles: two at each location.
    assert_eq!(driver.sim().unwrap().count(Call::MemPoolCreate), 4);
}

#[test]
fn a_refused_export_is_enough_to_make_no_fabric_pool() {
    let driver = simulated(|machine| machine.imex_channel = true);
    let sim = driver.sim().unwrap();
    sim.fail(Call::MemExportToShareableHandle, 1, Code::NOT_PERMITTED);
    let support = Capabilities::of(&driver).trial(trial(Path::Pool, HandleTypes::FABRIC));
    let refused = Error::driver(Call::MemExportToShareableHandle, Code::NOT_PERMITTED);
    assert_eq!(support, Support::No(refused));
    assert_eq!(sim.count(Call::MemPoolCreate), 0);
}

#[test]
fn a_driver_with_a_channel_is_not_said_to_lack_one() {
    let driver = simulated(|machine| machine.imex_channel = true);
    let sim = driver.sim().unwrap();
    sim.fail(Call::MemCreate, 1, Code::NOT_PERMITTED);
    let support = Capabilities::of(&driver).support(NODE, Path::Vmm, HandleTypes::FABRIC);
    let refused = Error::driver(Call::MemCreate, Code::NOT_PERMITTED);
    assert_eq!(support, Support::No(refused));
}

#[test]
fn each_thing_is_tried_once_however_many_ask_at_once() {
    let driver = simulated(|_| {});
    let sim = driver.sim().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let capabilities = Capabilities::of(&driver);
                let support = capabilities.trial(trial(Path::Vmm, HandleTypes::POSIX_FD));
                assert!(support.is_yes());
            });
        }
    });
    assert_eq!(sim.count(Call::MemCreate), 1);
    let again = Capabilities::of(&driver.clone());
    assert!(
        again
            .trial(trial(Path::Vmm, HandleTypes::POSIX_FD))
            .is_yes()
    );
    assert_eq!(sim.count(Call::MemCreate), 1);

    let other = simulated(|_| {});
    let support = Capabilities::of(&other).trial(trial(Path::Vmm, HandleTypes::POSIX_FD));
    assert!(support.is_yes());
    assert_eq!(other.sim().unwrap().count(Call::MemCreate), 1);
}

#[test]
fn a_no_is_remembered_but_want_of_memory_is_not() {
    let driver = simulated(|_| {});
    let sim = driver.sim().unwrap();
    let capabilities = Capabilities::of(&driver);

    let plain = trial(Path::Vmm, HandleTypes::NONE);
    sim.fail(Call::MemCreate, 1, Code::OUT_OF_MEMORY);
    match capabilities.trial(plain) {
        Support::Unknown(Error::OutOfMemory { location, .. }) => assert_eq!(location, NODE),
        other => panic!("{other:?}"),
    }
    assert_eq!(capabilities.trial(plain), Support::Yes);
    // Also where a later step finds none.
    let pool = trial(Path::Pool, HandleTypes::NONE);
    sim.fail(Call::StreamCreate, 1, Code::OUT_OF_MEMORY);
    assert!(matches!(capabilities.trial(pool), Support::Unknown(_)));
    assert_eq!(capabilities.trial(pool), Support::Yes);

    let shared = trial(Path::Vmm, HandleTypes::POSIX_FD);
    sim.fail(Call::MemCreate, 1, Code::NOT_SUPPORTED);
    let no = capabilities.trial(shared);
    assert!(matches!(no, Support::No(Error::PlatformUnsupported { .. })));
    assert_eq!(capabilities.trial(shared), no);
}

#[test]
fn whatever_call_fails_nothing_is_kept_and_the_call_is_named() {
    for (path, handle_types) in [
        (Path::Vmm, HandleTypes::POSIX_FD),
        (Path::Vmm, HandleTypes::FABRIC),
        (Path::Pool, HandleTypes::POSIX_FD),
        (Path::Pool, HandleTypes::FABRIC),
    ] {
        let calls = {
            let driver = simulated(|machine| machine.imex_channel = true);
            let support = Capabilities::of(&driver).trial(trial(path, handle_types));
            assert_eq!(support, Support::Yes);
            driver.sim().unwrap().calls()
        };
        assert!(calls.len() >= 8, "{calls:?}");
        for (&call, &uses) in &calls {
            for nth in 1..=uses {
                for code in [Code::OUT_OF_MEMORY, Code::NOT_PERMITTED, Code(4242)] {
                    check_fault(trial(path, handle_types), call, nth, code);
                }
            }
        }
    }
}

fn check_fault(trial: Trial, call: Call, nth: u64, code: Code) {
    let driver = simulated(|machine| machine.imex_channel = true);
    let sim = driver.sim().unwrap();
    sim.fail(call, nth, code);
    let what = format!("{trial}, {call} no. {nth} failing with {code}");
    let support = Capabilities::of(&driver).trial(trial);
    // Giving back is tried again or logged: only the rest can make a trial fail.
    if let Some(error) = support.error() {
        let source = error
            .driver_error()
            .unwrap_or_else(|| panic!("{what}: {error}"));
        assert_eq!((source.call, source.code), (call, code), "{what}");
    } else {
        let gives_back = [
            Call::MemUnmap,
            Call::MemRelease,
            Call::MemAddressFree,
            Call::MemPoolDestroy,
            Call::MemFreeAsync,
            Call::StreamDestroy,
            Call::EventDestroy,
            // Captures are left alone where the driver knows of them.
            Call::ThreadExchangeStreamCaptureMode,
        ];
        // Before a free the driver is asked twice whether the stream is being captured.
        let asked_again = call == Call::StreamIsCapturing && nth > 2;
        assert!(
            gives_back.contains(&call) || asked_again,
            "{what}: went unnoticed"
        );
    }
    sim.cancel_all();
    let held = sim.held();
    assert!(held.is_empty(), "{what}: {held}");
}

#[test]
fn a_missing_node_or_gpu_is_named_with_the_choices() {
    let driver = simulated(|_| {});
    let capabilities = Capabilities::of(&driver);
    let support = |location| capabilities.support(location, Path::Vmm, HandleTypes::NONE);
    for node in [4, 99, -1] {
        assert_eq!(
            support(Location::HostNuma(node)),
            Support::No(Error::NoSuchNode {
                node: NodeId(node),
                gpu: (node == 4).then_some(0),
                choices: (0..4).map(NodeId).collect(),
            })
        );
    }
    assert_eq!(
        support(Location::Device(4)),
        Support::No(Error::NoSuchGpu { gpu: 4, count: 4 })
    );
    let last = i32::MAX;
    assert_eq!(
        support(Location::Device(last)),
        Support::No(Error::NoSuchGpu {
            gpu: last,
            count: 4
        })
    );
    assert_eq!(
        capabilities.trial(Trial {
            gpu: -1,
            ..trial(Path::Pool, HandleTypes::NONE)
        }),
        Support::No(Error::NoSuchGpu { gpu: -1, count: 4 })
    );
}

#[test]
fn an_old_driver_is_the_reason_where_it_is() {
    let driver = simulated(|machine| machine.driver_version = CudaVersion(12020));
    let support = Capabilities::of(&driver).support(NODE, Path::Vmm, HandleTypes::FABRIC);
    match support.require() {
        Err(Error::DriverTooOld { have, need, .. }) => {
            assert_eq!((have.0, need.0), (12020, 12030));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn gpus_that_are_no_peers_cannot_use_each_others_memory() {
    let driver = simulated(|machine| machine.peer_access = PeerAccess::None);
    let capabilities = Capabilities::of(&driver);
    let on_gpu_1 = |gpu| {
        capabilities.trial(Trial {
            location: Location::Device(1),
            gpu,
            path: Path::Vmm,
            handle_types: HandleTypes::NONE,
        })
    };
    assert_eq!(on_gpu_1(1), Support::Yes);
    assert!(matches!(
        on_gpu_1(0),
        Support::No(Error::PlatformUnsupported { .. })
    ));
}

/// A driver that refuses every call, and reports its drop.
#[derive(Debug)]
struct Nothing(Arc<AtomicBool>);

impl Drop for Nothing {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

// SAFETY: it reports no success.
unsafe impl Backend for Nothing {
    fn name(&self) -> &'static str {
        "nothing"
    }
    fn driver_pools(&self) -> &dyn PoolCalls {
        self
    }
}

// SAFETY: as above.
unsafe impl PoolCalls for Nothing {
    fn api(&self) -> &'static str {
        "nothing"
    }
}

#[test]
fn remembered_answers_keep_no_driver_alive() {
    let dropped = Arc::new(AtomicBool::new(false));
    let driver = Driver::from_backend(Arc::new(Nothing(Arc::clone(&dropped))));
    let capabilities = Capabilities::of(&driver);
    let support = capabilities.support(NODE, Path::Vmm, HandleTypes::NONE);
    assert!(!support.is_yes());
    drop((capabilities, driver));
    assert!(dropped.load(Ordering::SeqCst));
}
