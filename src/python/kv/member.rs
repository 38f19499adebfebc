//! `egmem.kv.Member`: a process that has a tier.

use egmem::kv;
use pyo3::prelude::*;

/// An open tier on one memory, in this process or another.
#[pyclass(frozen, module = "egmem.kv")]
pub struct Member {
    pid: u32,
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
    /// The process.
    #[getter]
    fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether it is the open tier that was asked.
    #[getter]
    fn is_self(&self) -> bool {
        self.is_self
    }

    fn __repr__(&self) -> String {
        let which = if self.is_self { ", this one" } else { "" };
        format!("<egmem.kv.Member: process {}{which}>", self.pid)
    }
}
