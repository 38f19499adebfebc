#![no_main]

mod message;

use egmem::exchange::protocol::Hello;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| message::run::<Hello>(bytes));
