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

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
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

/// Defines an error's messages, which its `Display` escapes, and its remedies: `pattern => (message), remedy;`. The text of one
/// variant is shown as it is: `pattern => text`.
#[macro_export]
macro_rules! error_texts {
    ($error:ty, $own:pat => $text:expr, { $($pattern:pat => ($($message:tt)+), $remedy:expr;)* }) => {
        impl std::fmt::Display for $error {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self {
                    $own => std::fmt::Display::fmt($text, f),
                    other => other.describe(&mut $crate::text::Escaping(f)),
                }
            }
        }

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
#[cfg(feature = "simulator")]
pub use sim::Machine;
pub use types::*;

/// Locks data that is valid even after a panic: an entry is complete or absent.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bits of each half of the permuted part: with 32 bits in all, a number takes 5 bytes of CBOR, and a client
/// lists tens of thousands of leases in its hello.
const HALF: u32 = 16;
const MASK: u64 = (1 << HALF) - 1;
const ROUNDS: u32 = 8;

/// Returns each number once: those below 2^32 first, in an order that only its random keys determine, then as
/// many above them in the same order.
///
/// Peers see the numbers of leases, sessions and allocations. A plain counter would reveal to each peer how
/// many the others were given. So a Feistel network permutes the counter. Its round function is the keyed
/// hash of `HashMap` (SipHash), so numbers never repeat and cannot be put in order without the keys. They are
/// not secrets: knowing one grants no right.
#[derive(Debug, Default)]
pub struct Numbers {
    keys: RandomState,
    given: AtomicU64,
}

impl Numbers {
    /// Returns a number that was not returned before.
    pub fn next(&self) -> u64 {
        self.permute(self.given.fetch_add(1, Ordering::Relaxed))
    }

    fn permute(&self, count: u64) -> u64 {
        let mut halves = (count >> HALF & MASK, count & MASK);
        for round in 0..ROUNDS {
            let mixed = self.keys.hash_one((round, halves.1)) & MASK;
            halves = (halves.1, halves.0 ^ mixed);
        }
        count >> (2 * HALF) << (2 * HALF) | halves.0 << HALF | halves.1
    }
}

/// Returns random bytes from the operating system.
///
/// # Errors
/// The system's, for example `ENOSYS` in a sandbox without `getrandom`.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    // SAFETY: the pointer and length are those of `bytes`, which the call writes.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), N, 0) };
    if got == N as isize {
        Ok(bytes)
    } else {
        Err(io::Error::last_os_error())
    }
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_number_comes_twice_and_none_tells_how_many_came_before() {
        const COUNT: usize = 10_000;
        let numbers = Numbers::default();
        let given: Vec<u64> = (0..COUNT).map(|_| numbers.next()).collect();
        assert_eq!(given.iter().collect::<HashSet<_>>().len(), COUNT);
        assert!(given.iter().all(|number| *number < 1 << (2 * HALF)));
        // Half of them are greater than the previous one, and half are in each half of the range.
        let even = |count: usize| (COUNT * 45 / 100..COUNT * 55 / 100).contains(&count);
        assert!(even(given.windows(2).filter(|two| two[0] < two[1]).count()));
        for bit in 0..2 * HALF {
            assert!(even(
                given
                    .iter()
                    .filter(|number| *number >> bit & 1 == 1)
                    .count()
            ));
        }
        let next = numbers.permute((1 << 32) + 7);
        assert_eq!(next, (1 << 32) + numbers.permute(7));
        // Other keys give other numbers.
        assert_ne!(Numbers::default().next(), given[0]);
    }
}
