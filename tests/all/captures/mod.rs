//! Work beside another thread's capture of a stream into a graph. Each test runs in a process of its own: other tests'
//! calls at the same time would end the capture, and would fail because of it.

#[path = "../../../benches/measure/measure-heap/cuda.rs"]
mod cuda;
mod heap;
#[cfg(feature = "portable")]
mod kv;
mod pool;
