//! egmem's driver trait: the crates above it run unchanged on CUDA and on the simulator.
//!
//! - [`Driver`] is the driver in use. It dereferences to [`Backend`], the driver's calls one by one.
//!
//! # Design
//! `driver::Backend` has one method per driver call, named after it, with the driver's own arguments. All code above is
//! written once. Below are the CUDA driver and, with the feature `simulator`, the simulator; `Driver::from_backend` takes
//! others, such as a null driver for measuring or a recorder.
//!
//! The trait has plain calls and not ideas ("allocate memory on a node"), because this crate is about the order of calls,
//! their rounding and their roll-back. Above the trait these are the same code on a laptop and on a GPU, so a test on the
//! simulator tests them.
//!
//! Result codes are integers (`Code`), functions are looked up one by one, and structures are our own plain mirrors. Tests
//! compare the mirrors with cudarc's bindings for six CUDA versions (`driver/cuda/abi/tests.rs`, `ci/cudarc`). A newer
//! driver may return a code or a value that a closed enum does not have; in Rust that would be undefined behaviour.
//!
//! VMM calls need no current context (from driver 12.4 on; before, every device's primary context is retained when the
//! driver is opened). Other calls push the device's primary context and pop it, so the caller's context stays current in
//! every thread.
#![cfg_attr(
    feature = "simulator",
    doc = "- [`sim`] is the simulated driver, of a [`Machine`] (feature `simulator`, on by default)."
)]
//! - [`Error`] is the error of calls about memory; each layer above has its own, which carries it.
//!
//! Programs depend on the crate `egmem`, which re-exports the items that they need.
#![deny(missing_docs)]

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Implements `Display` for an enum by a text for each variant.
#[macro_export]
macro_rules! display_texts {
    ($type:ty { $($variant:pat => $text:expr,)* }) => {
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(match self {
                    $($variant => $text,)*
                })
            }
        }
    };
}

/// Returns an error from the calling function for the first condition that holds:
/// `refuse! { error; condition => "format", values; … }`, where `error` makes an error of a text.
#[macro_export]
macro_rules! refuse {
    ($error:expr; $($condition:expr => $why:literal $(, $value:expr)*;)*) => {{
        let error = $error;
        $(if $condition {
            return Err(error(format_args!($why $(, $value)*).to_string()));
        })*
    }};
}

/// Defines the setters of options that are built by value: `name(value: Type) => field = expression;`.
#[macro_export]
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident($($value:ident: $type:ty)?) => $($field:ident).+ = $new:expr;)*) => {$(
        $(#[$doc])*
        pub const fn $name(mut self $(, $value: $type)?) -> Self {
            self.$($field).+ = $new;
            self
        }
    )*};
}

/// Defines an error's messages, for a `Display` that escapes them, and its remedies: `pattern => (message), remedy;`.
#[macro_export]
macro_rules! error_texts {
    ($error:ty { $($pattern:pat => ($($message:tt)+), $remedy:expr;)* }) => {
        impl $error {
            fn describe(&self, f: &mut $crate::text::Escaping<'_, '_>) -> std::fmt::Result {
                match self {
                    $($pattern => std::fmt::Write::write_fmt(f, format_args!($($message)+)),)*
                }
            }

            /// Returns what to do about it, in a sentence; nothing where the text says it.
            #[allow(unused_variables)] // most are in the message alone; `_field`: in the remedy alone
            pub fn remedy(&self) -> &'static str {
                match self {
                    $($pattern => $remedy,)*
                }
            }
        }
    };
}

/// Defines what to do about each cause of an error.
#[macro_export]
macro_rules! remedies {
    ($cause:ty { $($variant:pat => $remedy:expr,)* }) => {
        impl $cause {
            pub(super) const fn remedy(self) -> &'static str {
                match self {
                    $($variant => $remedy,)*
                }
            }
        }
    };
}

mod attributes;
#[macro_use]
mod backend;
mod call;
mod cuda;
mod driver;
pub mod error;
pub mod fork;
mod handles;
pub mod numbers;
#[cfg(feature = "simulator")]
pub mod sim;
pub mod size;
pub mod text;
mod types;
pub mod versions;

pub use attributes::*;
pub use backend::{Backend, PoolCalls, SimulatedHost, SimulatedNode};
pub use call::{Call, Code, DriverError};
pub use driver::{Driver, Relaxed, WeakDriver};
pub use error::{Error, Explain, Explained, Language, NoRoom, Result};
pub use handles::*;
pub use numbers::random;
#[cfg(feature = "simulator")]
pub use sim::Machine;
pub use types::*;

/// Locks data that is valid even after a panic: an entry is complete or absent.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub mod kernels {
    //! The crate's own GPU kernels: their names, arguments and the pattern they check and write.
    //!
    //! The source is `kernels/proof.cu`, compiled to `kernels/proof.ptx`; the simulator runs the same in Rust. Every
    //! argument is 64 bits wide; pointers are 8-byte aligned; counts are in 64-bit words.

    use std::ffi::CStr;

    /// The kernels as PTX, which the driver compiles for its GPU.
    pub const PTX: &CStr = match CStr::from_bytes_with_nul(
        concat!(include_str!("kernels/proof.ptx"), "\0").as_bytes(),
    ) {
        Ok(ptx) => ptx,
        Err(_) => panic!("proof.ptx holds a NUL"),
    };

    /// `(ptr, words, expected_seed, new_seed, report)`: checks that word `i` is `pattern(expected_seed, i)` and
    /// replaces it by `pattern(new_seed, i)`; leaves a wrong word as it is, counts it in `report[1]`, and keeps
    /// its index in `report[0]` if it is the lowest so far. `report` starts as `[u64::MAX, 0]`.
    pub const CHECK_REWRITE: &CStr = c"egmem_check_rewrite";

    /// `(ptr, words, report)`: xors all words into `report[0]`, which starts as 0.
    pub const READ: &CStr = c"egmem_read";

    /// `(ptr, words, seed)`: writes `pattern(seed, i)` to word `i`.
    pub const WRITE: &CStr = c"egmem_write";

    /// Returns the word at index `i` under `seed`: the SplitMix64 generator's `i`-th output.
    ///
    /// Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    pub const fn pattern(seed: u64, i: u64) -> u64 {
        let z = seed.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
