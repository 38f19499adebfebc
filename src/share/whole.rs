//! The memory behind shared memory and its windows, with their exported handles.

use std::sync::Arc;

use super::exports::{Exports, Holds};
use crate::Buffer;
use crate::vmm::PhysicalMemory;

#[derive(Debug)]
pub(super) struct Whole {
    /// The exported handles of each part, except for parts that hold their own. They are dropped before `memory`.
    pub(super) exports: Vec<Exports>,
    pub(super) memory: Memories,
}

#[derive(Debug)]
pub(super) enum Memories {
    Buffer(Arc<Buffer>),
    Physical(Vec<PhysicalMemory>),
    Held(Vec<Arc<dyn Holds>>),
}

impl Whole {
    pub(super) fn new(memory: Memories) -> Self {
        let mut whole = Self {
            exports: Vec::new(),
            memory,
        };
        if !matches!(whole.memory, Memories::Held(_)) {
            let count = whole.count();
            whole.exports.resize_with(count, Exports::default);
        }
        whole
    }

    pub(super) fn count(&self) -> usize {
        match &self.memory {
            Memories::Buffer(buffer) => buffer.physical().len(),
            Memories::Physical(parts) => parts.len(),
            Memories::Held(parts) => parts.len(),
        }
    }

    pub(super) fn part(&self, index: usize) -> &PhysicalMemory {
        match &self.memory {
            Memories::Buffer(buffer) => &buffer.physical()[index],
            Memories::Physical(parts) => &parts[index],
            Memories::Held(parts) => parts[index].physical(),
        }
    }

    pub(super) fn exports(&self, index: usize) -> &Exports {
        match &self.memory {
            Memories::Held(parts) => parts[index].exports(),
            _ => &self.exports[index],
        }
    }
}
