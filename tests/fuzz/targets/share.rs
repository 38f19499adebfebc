//! The messages of a channel's peer.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| egmem::share::fuzzing::frame(bytes));
