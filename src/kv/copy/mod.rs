//! Batched copies between pages and blocks of a GPU's cache.

mod job;
mod kernel;
mod method;
mod plan;

pub use job::Job;
pub(crate) use job::start;
pub(crate) use kernel::Kernels;
pub use method::CopyMethod;
