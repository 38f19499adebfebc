//! What a rank receives from rank 0 in a gather, and rank 0 from one that comes: the first byte is the number of ranks.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| egmem::exchange::fuzzing::rendezvous(bytes));
