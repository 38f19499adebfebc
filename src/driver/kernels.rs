//! The crate's own GPU kernels: their names, arguments and the pattern they check and write.
//!
//! The source is `kernels/proof.cu`, compiled to `kernels/proof.ptx`; the simulator runs the same in Rust. Every
//! argument is 64 bits wide; pointers are 8-byte aligned; counts are in 64-bit words.

use std::ffi::CStr;

/// The kernels as PTX, which the driver compiles for its GPU.
pub const PTX: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("kernels/proof.ptx"), "\0").as_bytes()) {
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
