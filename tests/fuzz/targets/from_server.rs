#![no_main]

mod message;

use egmem::exchange::protocol::FromServer;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| message::run::<FromServer>(bytes));
