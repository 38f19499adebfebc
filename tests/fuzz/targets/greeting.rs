#![no_main]

mod message;

use egmem::exchange::protocol::Greeting;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| message::run::<Greeting>(bytes));
