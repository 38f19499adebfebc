#![no_main]

mod message;

use egmem::exchange::protocol::Request;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| message::run::<Request>(bytes));
