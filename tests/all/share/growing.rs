//! A vector that grows, followed by another process.

use std::path::Path;

use egmem::driver::Access;
use egmem::proof::{Prover, check_pattern};
use egmem::shapes::Growable;
use egmem::shapes::sharing::{GrowableExport, GrowableView};
use egmem::share::ImportOptions;
use egmem::{Backing, Driver};

use super::process::{Place, Process, accept, connect, say};
use super::{MIB, last_gpu, node, nothing_held, open};

/// Steps of more than one chunk, so that an update has several.
const STEPS: usize = 4;
const ELEMENTS: usize = 500_000;

#[test]
fn another_process_follows_a_vector() {
    follows(Backing::Driver);
}

#[test]
fn another_process_follows_a_vector_of_registered_memory() {
    follows(Backing::Registered);
}

fn follows(backing: Backing) {
    let driver = open();
    let place = Place::new();
    let listener = place.listen();
    let mut peer = Process::start("follower", &place.socket);
    let options = Growable::<u64>::on(node(&driver)).max_len(STEPS * ELEMENTS);
    let options = options.step(2 * MIB).shareable().backing(backing);
    let mut vector = options.create(&driver).unwrap();
    let mut export = GrowableExport::new(&vector);
    let mut follower = export.follower(accept(&listener), Access::ReadWrite);
    for step in 1..=STEPS {
        let values: Vec<u64> = (vector.len() as u64..).take(ELEMENTS).collect();
        vector.extend_from_slice(&values).unwrap();
        export.send(&vector, &mut follower).unwrap();
        peer.says(&format!("followed {step}"));
    }
    drop(follower);
    // The peer's GPU has written all of it.
    peer.says("wrote");
    let written = vector.prefix();
    check_pattern(&written.cpu().unwrap(), 9).unwrap();
    peer.go();
    peer.ends_well();
    drop((written, vector, export));
    nothing_held(&driver);
}

pub fn follower(driver: &Driver, path: &Path) {
    let mut channel = connect(path);
    let mut view =
        GrowableView::<u64>::receive(driver, &mut channel, ImportOptions::new()).unwrap();
    let start = view.device_ptr();
    for step in 1..=STEPS {
        assert_eq!((view.len(), view.device_ptr()), (step * ELEMENTS, start));
        for index in [0, view.len() / 2, view.len() - 1] {
            assert_eq!(view.get(index), Ok(index as u64));
        }
        say(&format!("followed {step}"));
        if step < STEPS {
            view.follow(&mut channel).unwrap();
        }
    }
    // The exporter has gone from the channel: there is nothing to follow, and the memory stays.
    view.follow(&mut channel).unwrap_err();
    let prover = Prover::new(driver, last_gpu(driver)).unwrap();
    prover.write(&view, 9).unwrap();
    say("wrote");
    super::process::wait_for_go();
}
