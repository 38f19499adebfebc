//! `egmem.kv.Member`: a process that has a tier.

use egmem::kv;
use pyo3::prelude::*;

/// An open tier on one memory, in this process or another.
#[pyclass(frozen, get_all, module = "egmem.kv")]
pub struct Member {
    /// The process.
    pid: u32,
    /// Whether it is the open tier that was asked.
    is_self: bool,
}

impl Member {
    /// Makes a member's object.
    pub fn of(member: &kv::Member) -> Self {
        Self {
            pid: member.pid,
            is_self: member.is_self,
        }
    }
}

#[pymethods]
impl Member {
    fn __repr__(&self) -> String {
        let which = if self.is_self { ", this one" } else { "" };
        format!("<egmem.kv.Member: process {}{which}>", self.pid)
    }
}
