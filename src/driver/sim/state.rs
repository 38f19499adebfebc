//! The simulated driver's state under one lock; the real driver serialises too.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};

use super::answer::{Answer, Fail, exhausted, fail};
use super::capacity::{Capacity, Charge};
use super::machine::Machine;
use super::memory::{Memory, Purpose};
use super::pool::Pool;
use super::references::Counted;
use super::registered::Registered;
use super::space::Range;
use super::window::{Placement, Window};
use super::work::{Capture, Event, Function, Stream, StreamKey};
use crate::{Access, AllocationProps, Code, HandleTypes, Location, PhysicalHandle};

/// Physical memory under its handle.
#[derive(Debug)]
pub(super) struct Physical {
    pub(super) handle: PhysicalHandle,
    pub(super) memory: Arc<Memory>,
    pub(super) props: AllocationProps,
    pub(super) size: u64,
    /// Counts an import, which lasts until its last mapping is gone too.
    pub(super) _counted: Option<Counted>,
}

/// Handles created and not yet released.
#[derive(Debug)]
pub(super) struct Reference {
    pub(super) physical: Arc<Physical>,
    pub(super) count: u64,
}

/// A range of addresses with memory behind it.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) len: u64,
    pub(super) memory: Arc<Memory>,
    /// The region's start in `memory`.
    pub(super) offset: u64,
    pub(super) kind: Kind,
}

/// The owner of a region.
#[derive(Debug)]
pub(super) enum Kind {
    /// `cuMemMap` created it, within a reservation.
    Mapping {
        physical: Arc<Physical>,
        host: Access,
        /// Whether the host's access was changed after GPU 0's.
        host_newer: bool,
        /// Present if the host has access.
        counted: Option<Counted>,
        devices: Box<[Access]>,
    },
    /// A pool's chunk.
    Chunk { pool: u64 },
    /// An older allocator created it.
    Allocation {
        by: Allocator,
        device: i32,
        /// The bytes requested.
        size: u64,
        _range: Range,
    },
}

/// An older allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Allocator {
    /// `cuMemAlloc`
    Device,
    /// `cuMemAllocManaged`
    Managed,
    /// `cuMemHostAlloc`
    Host,
}

/// The driver's state.
#[derive(Debug)]
pub(super) struct State {
    pub(super) machine: Arc<Machine>,
    pub(super) capacity: Arc<Capacity>,
    pub(super) eager: bool,
    next: u64,
    pub(super) references: HashMap<u64, Reference>,
    /// Exported memory that may be imported again.
    pub(super) exported: HashMap<u128, Weak<Memory>>,
    pub(super) prune_at: usize,
    pub(super) reservations: BTreeMap<u64, Range>,
    /// The window for reservations; created with the first.
    pub(super) window: Option<Arc<Window>>,
    pub(super) placement: Placement,
    pub(super) regions: BTreeMap<u64, Region>,
    /// The process's own memory that is registered, by its start.
    pub(super) registered: BTreeMap<u64, Registered>,
    pub(super) pools: BTreeMap<u64, Pool>,
    pub(super) default_pools: Box<[Option<u64>]>,
    pub(super) current_pools: Box<[Option<u64>]>,
    pub(super) streams: HashMap<StreamKey, Stream>,
    pub(super) events: HashMap<u64, Event>,
    pub(super) captures: HashMap<StreamKey, Capture>,
    /// The device of each loaded module.
    pub(super) modules: HashMap<u64, i32>,
    pub(super) functions: HashMap<u64, Function>,
    /// The fault that lost each device's context.
    pub(super) lost: Box<[Option<Code>]>,
}

impl State {
    pub(super) fn new(machine: Arc<Machine>, placement: Placement) -> Self {
        let gpus = machine.gpus.len();
        Self {
            capacity: Arc::new(Capacity::of(&machine)),
            machine,
            eager: false,
            // Handles look like handles: neither zero nor small numbers.
            next: 0x5100_0000,
            references: HashMap::new(),
            exported: HashMap::new(),
            prune_at: 16,
            reservations: BTreeMap::new(),
            window: None,
            placement,
            regions: BTreeMap::new(),
            registered: BTreeMap::new(),
            pools: BTreeMap::new(),
            default_pools: vec![None; gpus].into(),
            current_pools: vec![None; gpus].into(),
            streams: HashMap::new(),
            events: HashMap::new(),
            captures: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            lost: vec![None; gpus].into(),
        }
    }

    /// Returns a number for a new handle, never used before.
    pub(super) fn number(&mut self) -> u64 {
        self.next += 0x10;
        self.next
    }

    /// Checks that a device exists.
    pub(super) fn device(&self, device: i32) -> Answer<usize> {
        match usize::try_from(device) {
            Ok(index) if index < self.machine.gpus.len() => Ok(index),
            _ => fail(Code::INVALID_DEVICE),
        }
    }

    /// Checks that a device exists and its context lives.
    pub(super) fn context(&self, device: i32) -> Answer<usize> {
        let index = self.device(device)?;
        match self.lost[index] {
            Some(code) => Err(Fail::Lost { device, code }),
            None => Ok(index),
        }
    }

    /// Returns no access for each GPU.
    pub(super) fn nobody(&self) -> Box<[Access]> {
        vec![Access::None; self.machine.gpus.len()].into()
    }

    /// Takes capacity at a location.
    pub(super) fn charge(&self, location: Location, bytes: u64) -> Answer<Charge> {
        self.capacity
            .take(location, bytes)
            .ok_or(Fail::Code(Code::OUT_OF_MEMORY))
    }

    /// Creates memory, taken from the location's capacity and bound to its node.
    pub(super) fn new_memory(
        &self,
        purpose: Purpose,
        location: Location,
        handle_types: HandleTypes,
        size: u64,
    ) -> Answer<Arc<Memory>> {
        let charge = match purpose {
            Purpose::Physical => Some(self.charge(location, size)?),
            Purpose::Pool => None,
        };
        let memory =
            Memory::create(purpose, location, handle_types, size, charge).map_err(exhausted)?;
        super::memory::bind(&memory, 0, size);
        Ok(Arc::new(memory))
    }

    /// Records memory that leaves the process, to recognise it when it is imported.
    pub(super) fn remember(&mut self, memory: &Arc<Memory>) {
        if self.exported.len() >= self.prune_at {
            self.exported.retain(|_, memory| memory.strong_count() > 0);
            self.prune_at = 2 * self.exported.len() + 16;
        }
        self.exported
            .insert(memory.label.id, Arc::downgrade(memory));
    }

    /// Returns the region that contains an address, with its start.
    pub(super) fn region(&self, address: u64) -> Option<(u64, &Region)> {
        let (&start, region) = self.regions.range(..=address).next_back()?;
        (address - start < region.len).then_some((start, region))
    }

    /// Returns the reservation that contains a whole range.
    pub(super) fn reservation(&self, start: u64, len: u64) -> Option<&Range> {
        let (_, range) = self.reservations.range(..=start).next_back()?;
        range.contains(start, len).then_some(range)
    }

    /// Returns the access of a device's kernels to a region.
    pub(super) fn access(&self, region: &Region, device: i32) -> Access {
        match &region.kind {
            Kind::Mapping { devices, .. } => devices[device as usize],
            Kind::Chunk { pool } => self.pools[pool].devices[device as usize],
            Kind::Allocation {
                by: Allocator::Device,
                device: owner,
                ..
            } if *owner != device => Access::None,
            Kind::Allocation { .. } => Access::ReadWrite,
        }
    }

    /// Returns whether a GPU can reach a location at all.
    pub(super) fn reaches(&self, device: i32, location: Location) -> bool {
        match location {
            Location::Device(owner) if self.machine.gpu(owner).is_some() => {
                owner == device || self.machine.peers(device, owner)
            }
            _ => true,
        }
    }
}
