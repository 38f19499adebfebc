//! Entries of etcd, which anybody who may write there may have written.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| egmem::exchange::directory::fuzzing::entry(bytes));
