//! A simulated machine's description: a valid one can be simulated.
#![no_main]

use egmem::{Driver, Machine};

libfuzzer_sys::fuzz_target!(|text: &str| {
    let Ok(mut machine) = serde_json::from_str::<Machine>(text) else {
        return;
    };
    let json = serde_json::to_string(&machine).expect("our own");
    assert_eq!(
        serde_json::from_str::<Machine>(&json).expect("our own"),
        machine
    );
    machine.topology_xml = None; // no files of this machine
    if machine.validate().is_ok() {
        Driver::simulated(machine).expect("it is valid");
    }
});
