//! Allocators that the program `replay` and the benchmark "heap" set beside egmem's heap.

pub mod contestants;
