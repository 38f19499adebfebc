//! The C API: its header, and calls from Rust. src/capi/tests/c has the tests in C and C++ (ci/capi).

mod fetch;
mod header;
