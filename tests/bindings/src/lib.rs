//! The structs of `egmem`'s driver backend, compared with cudarc's bindings.
#![cfg(test)]

#[path = "../../../src/driver/cuda/abi/tests.rs"]
mod bindings;
#[expect(dead_code, reason = "the backend uses what the comparison leaves out")]
#[path = "../../../src/driver/cuda/abi/layout.rs"]
mod layout;
