//! Entries of etcd, whose bytes come from any client with write access.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| egmem::exchange::directory::fuzzing::entry(bytes));
