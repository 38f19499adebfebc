//! The simulated driver's state under one lock, which the real driver has too; streams with the work that waits in them,
//! events, and kernels.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use super::by_address::ByAddress;
use super::capacity::{Capacity, Charge, Counted};
use super::fault::{Answer, Fail, fail};
use super::machine::Machine;
use super::memory::{Memory, Purpose, Sharing};
use super::pool::Pool;
use super::space::{Placement, Range, Window};
use crate::*;

/// A device and the driver's pointer: 0 is the device's default stream, and other numbers below [`FIRST_HANDLE`] are threads'.
pub(super) type StreamKey = (i32, u64);

/// Handles look like handles: neither zero nor small numbers.
pub(super) const FIRST_HANDLE: u64 = 0x5100_0000;

/// A position in a stream: after its `seq`-th piece of work.
pub(super) type Point = (StreamKey, u64);

#[derive(Debug, Default)]
pub(super) struct Stream {
    /// The work that has not run.
    pub queue: VecDeque<Work>,
    /// How much work there was, with that in the queue.
    pub submitted: u64,
    /// Its handle was destroyed; the stream lives until its work is done.
    pub destroyed: bool,
    /// For each other stream, the position that this one waits for.
    pub waited: ByAddress<u64, StreamKey>,
}

impl Stream {
    /// Returns how much work has run, or was taken to be run.
    pub fn completed(&self) -> u64 {
        self.submitted - self.queue.len() as u64
    }
}

/// A piece of work, with the program's addresses: they are looked up when it runs, as on a GPU.
#[derive(Debug)]
pub(super) enum Work {
    Copy {
        dst: u64,
        src: u64,
        bytes: u64,
    },
    Fill {
        dst: u64,
        value: u8,
        bytes: u64,
    },
    Kernel {
        kernel: Kernel,
        args: [u64; 5],
    },
    Record,
    Wait(Point),
    /// Memory freed at this point returns to its pool.
    Free {
        pool: u64,
    },
}

/// A stream's part in a capture that has begun, in global mode.
#[derive(Debug)]
pub(super) struct Capture {
    /// The capture's number, which its streams and the events recorded on them share.
    pub id: u64,
    /// Whether the capture began on the stream, or another of its streams has waited for this one since it was drawn in by a
    /// wait. The capture's end needs that.
    pub is_joined: bool,
    /// Whether the stream and the legacy default stream wait for each other.
    pub blocking: bool,
    /// Whether no call has disturbed it.
    pub valid: bool,
}

/// An event: the position that it was recorded at, if any.
#[derive(Debug)]
pub(super) struct Event {
    pub device: i32,
    pub timing: bool,
    pub sharing: Sharing,
    pub recorded: Option<Point>,
    /// The capture that its stream was part of when it was recorded.
    pub captured: Option<u64>,
}

/// A kernel that the simulator can run: on a device, with its arguments and zeros behind them.
pub(super) type Kernel = fn(&State, i32, [u64; 5]) -> Result<(), Code>;

/// Physical memory under its handle.
#[derive(Debug)]
pub(super) struct Physical {
    pub handle: PhysicalHandle,
    pub memory: Arc<Memory>,
    pub props: AllocationProps,
    pub size: u64,
    /// Counts an import, which lasts until its last mapping is gone too.
    pub _counted: Option<Counted>,
}

/// Handles created and not yet released.
#[derive(Debug)]
pub(super) struct Reference {
    pub physical: Arc<Physical>,
    pub count: u64,
}

/// A range of addresses with memory behind it.
#[derive(Debug)]
pub(super) struct Region {
    pub len: u64,
    pub memory: Arc<Memory>,
    /// The region's start in `memory`.
    pub offset: u64,
    pub kind: Kind,
}

impl Region {
    pub fn mapping(&self) -> Option<&Mapping> {
        match &self.kind {
            Kind::Mapping(mapping) => Some(mapping),
            _ => None,
        }
    }
}

/// Memory that `cuMemMap` mapped, within a reservation.
#[derive(Debug)]
pub(super) struct Mapping {
    pub physical: Arc<Physical>,
    pub host: Access,
    /// Whether the host's access was changed after GPU 0's.
    pub host_newer: bool,
    /// Present if the host has access.
    pub counted: Option<Counted>,
    pub devices: Box<[Access]>,
}

/// A registered range.
#[derive(Debug)]
pub(super) struct Registered {
    pub len: u64,
    pub device: i32,
    /// The room that its pages take on a simulated node.
    pub _charge: Option<Charge>,
}

/// The owner of a region.
#[derive(Debug)]
pub(super) enum Kind {
    Mapping(Mapping),
    /// A pool's chunk.
    Chunk {
        pool: u64,
    },
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
#[derive(Debug, Default)]
pub(super) struct State {
    pub machine: Arc<Machine>,
    pub capacity: Capacity,
    pub eager: bool,
    next: u64,
    pub references: ByAddress<Reference>,
    /// Exported memory that may be imported again.
    pub exported: ByAddress<Weak<Memory>, u128>,
    pub prune_at: usize,
    pub reservations: ByAddress<Range>,
    /// The window for reservations; created with the first.
    pub window: Option<Arc<Window>>,
    pub placement: Placement,
    pub regions: ByAddress<Region>,
    /// The process's own memory that is registered, by its start.
    pub registered: ByAddress<Registered>,
    pub pools: ByAddress<Pool>,
    pub default_pools: Box<[Option<u64>]>,
    pub current_pools: Box<[Option<u64>]>,
    pub streams: ByAddress<Stream, StreamKey>,
    pub events: ByAddress<Event>,
    pub captures: ByAddress<Capture, StreamKey>,
    /// The device of each loaded module.
    pub modules: ByAddress<i32>,
    /// The fault that lost each device's context.
    pub lost: Box<[Option<Code>]>,
}

impl State {
    pub fn new(machine: Arc<Machine>, placement: Placement) -> Self {
        let gpus = machine.gpus.len();
        Self {
            capacity: Capacity::of(&machine),
            machine,
            next: FIRST_HANDLE,
            placement,
            default_pools: vec![None; gpus].into(),
            current_pools: vec![None; gpus].into(),
            lost: vec![None; gpus].into(),
            ..Self::default()
        }
    }

    /// Returns a number for a new handle, never used before: the next 15 are not used either.
    pub fn number(&mut self) -> u64 {
        self.next += 0x10;
        self.next
    }

    /// Checks that a device exists.
    pub fn device(&self, device: i32) -> Answer<usize> {
        match usize::try_from(device) {
            Ok(index) if index < self.machine.gpus.len() => Ok(index),
            _ => fail(Code::INVALID_DEVICE),
        }
    }

    /// Checks that a device exists and its context lives.
    pub fn context(&self, device: i32) -> Answer<usize> {
        let index = self.device(device)?;
        match self.lost[index] {
            Some(code) => Err(Fail::Lost { device, code }),
            None => Ok(index),
        }
    }

    /// Returns no access for each GPU.
    pub fn nobody(&self) -> Box<[Access]> {
        vec![Access::None; self.machine.gpus.len()].into()
    }

    /// Takes capacity at a location. Before a refusal, pools give back what they keep.
    pub fn charge(&mut self, location: Location, bytes: u64) -> Answer<Charge> {
        let mut charge = self.capacity.take(location, bytes);
        if charge.is_none() {
            self.empty_pools();
            charge = self.capacity.take(location, bytes);
        }
        Ok(charge.ok_or(Code::OUT_OF_MEMORY)?)
    }

    /// Creates memory, taken from the location's capacity.
    pub fn new_memory(
        &mut self,
        purpose: Purpose,
        location: Location,
        handle_types: HandleTypes,
        size: u64,
    ) -> Answer<Arc<Memory>> {
        let charge = match purpose {
            Purpose::Physical => Some(self.charge(location, size)?),
            Purpose::Pool | Purpose::Event => None,
        };
        let memory = Memory::create(purpose, location, handle_types, size, charge)?;
        Ok(Arc::new(memory))
    }

    /// Records memory that leaves the process, to recognise it when it is imported.
    pub fn remember(&mut self, memory: &Arc<Memory>) {
        if self.exported.entries().len() >= self.prune_at {
            self.exported.retain(|_, memory| memory.strong_count() > 0);
            self.prune_at = 2 * self.exported.entries().len() + 16;
        }
        self.exported
            .insert(memory.label.id, Arc::downgrade(memory));
    }

    /// Returns the region that contains an address, with its start.
    pub fn region(&self, address: u64) -> Option<(u64, &Region)> {
        let (start, region) = self.regions.up_to(address)?;
        (address - start < region.len).then_some((*start, region))
    }

    /// Returns the reservation that contains a whole range.
    pub fn reservation(&self, start: u64, len: u64) -> Option<&Range> {
        let (_, range) = self.reservations.up_to(start)?;
        range.contains(start, len).then_some(range)
    }

    /// Returns the access of a device's kernels to a region.
    pub fn access(&self, region: &Region, device: i32) -> Access {
        match &region.kind {
            Kind::Mapping(mapping) => mapping.devices[device as usize],
            Kind::Chunk { pool } => self.pools[*pool].devices[device as usize],
            Kind::Allocation {
                by: Allocator::Device,
                device: owner,
                ..
            } if *owner != device => Access::None,
            Kind::Allocation { .. } => Access::ReadWrite,
        }
    }

    /// Returns whether a GPU can reach a location at all.
    pub fn reaches(&self, device: i32, location: Location) -> bool {
        match location {
            Location::Device(owner) if self.machine.gpu(owner).is_some() => {
                owner == device || self.machine.peers(device, owner)
            }
            _ => true,
        }
    }
}
