//! What a process holds after many objects: files, threads, memory. Each test counts in a process of its own, since other
//! tests would show in the numbers.

mod cycles;
#[cfg(feature = "portable")]
mod exchange;
