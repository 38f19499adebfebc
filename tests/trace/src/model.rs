//! The state that the generator assumes, so that most operations find something to act on.
//!
//! A driver that answers otherwise makes operations be skipped, nothing worse: the runner keeps
//! its own account.

use super::addr::{Addr, Memory, Slot};
use super::op::{Op, Source};
use super::random::Random;
use egmem::driver::{Access, AccessDesc, AllocationProps, HandleType, HandleTypes, Location};

pub(super) const UNIT: u64 = 2 << 20;
/// The most physical memory that a sequence holds by its own account.
const BUDGET: u64 = 384 << 20;
/// No machine has a device or node of this number.
pub(super) const NOBODY: i32 = 99;

#[derive(Clone, Debug)]
pub(super) struct Handle {
    pub slot: Slot,
    pub size: u64,
    pub props: AllocationProps,
}

#[derive(Clone, Debug)]
pub(super) struct Mapped {
    pub offset: u64,
    pub size: u64,
    pub location: Location,
    pub device: bool,
    pub host: bool,
    pub defined: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Reserved {
    pub slot: Slot,
    pub size: u64,
    pub mapped: Vec<Mapped>,
}

#[derive(Clone, Debug)]
pub(super) struct MadePool {
    pub slot: Slot,
    pub host: bool,
    pub posix: bool,
    pub granted: bool,
    pub live: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Block {
    pub at: Addr,
    pub size: u64,
    pub pool: Option<Slot>,
    pub device: bool,
    pub host: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    pub slot: Slot,
    pub timing: bool,
    pub recorded: bool,
}

#[derive(Debug)]
pub(super) struct Model {
    pub ops: Vec<Op>,
    pub random: Random,
    pub devices: i32,
    pub handles: Vec<Handle>,
    pub ranges: Vec<Reserved>,
    pub exported: Vec<Slot>,
    pub pools: Vec<MadePool>,
    /// Allocations from pools, `cuMemAlloc` and `cuMemHostAlloc`.
    pub blocks: Vec<Block>,
    pub streams: Vec<Slot>,
    pub events: Vec<Event>,
    held: u64,
    next: [Slot; 8],
}

/// Index into `next`.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    Handle,
    Range,
    Exported,
    Pool,
    Pooled,
    Plain,
    Stream,
    Event,
}

impl Model {
    pub fn new(random: Random, devices: i32) -> Self {
        Self {
            ops: Vec::new(),
            random,
            devices,
            handles: Vec::new(),
            ranges: Vec::new(),
            exported: Vec::new(),
            pools: Vec::new(),
            blocks: Vec::new(),
            streams: Vec::new(),
            events: Vec::new(),
            held: 0,
            next: [0; 8],
        }
    }

    pub fn slot(&mut self, kind: Kind) -> Slot {
        let next = &mut self.next[kind as usize];
        *next += 1;
        *next - 1
    }

    pub fn device(&mut self) -> i32 {
        self.random.below(self.devices as u64) as i32
    }

    /// The default stream, or one of the sequence's.
    pub fn stream(&mut self) -> Option<Slot> {
        if self.random.percent(40) {
            None
        } else {
            let streams = self.streams.clone();
            self.random.some(&streams)
        }
    }

    /// One more operation, or a few that belong together.
    pub fn next(&mut self) {
        if self.ops.is_empty() || self.random.percent(6) {
            return self.build();
        }
        match self.random.below(100) {
            0..42 => self.next_vmm(),
            42..66 => self.next_pool(),
            66..83 => self.next_stream(),
            83..94 => self.next_work(),
            _ => self.next_device(),
        }
    }

    /// Memory that is created, mapped and granted without a mistake.
    fn build(&mut self) {
        let props = AllocationProps::at(if self.random.percent(70) {
            Location::HostNuma(0)
        } else {
            Location::Device(self.device())
        });
        let props = match self.random.below(2) {
            0 => props,
            _ => props.handle_types(HandleTypes::POSIX_FD),
        };
        let size = UNIT * self.random.pick(&[1, 1, 2, 3, 4]);
        let Some(handle) = self.create(size, props) else {
            return;
        };
        let room = size + UNIT * self.random.below(3);
        let range = self.reserve(room);
        self.map(range, 0, &handle);
        let device = props.location == Location::Device(0) || self.random.percent(90);
        let host = props.location.is_host() && self.random.percent(85);
        self.grant(range, 0, size, device, host);
    }

    pub fn create(&mut self, size: u64, props: AllocationProps) -> Option<Handle> {
        if self.held + size > BUDGET {
            return None;
        }
        self.held += size;
        let slot = self.slot(Kind::Handle);
        self.ops.push(Op::Create {
            out: slot,
            size,
            props,
        });
        let handle = Handle { slot, size, props };
        self.handles.push(handle.clone());
        Some(handle)
    }

    pub fn reserve(&mut self, size: u64) -> Slot {
        let slot = self.slot(Kind::Range);
        self.ops.push(Op::Reserve {
            out: slot,
            size,
            alignment: 0,
            hint: None,
        });
        self.ranges.push(Reserved {
            slot,
            size,
            mapped: Vec::new(),
        });
        slot
    }

    pub fn map(&mut self, range: Slot, offset: u64, handle: &Handle) {
        let at = in_range(range, offset);
        self.ops.push(Op::Map {
            at,
            size: handle.size,
            offset: 0,
            handle: handle.slot,
        });
        let host = handle.props.location.is_host();
        if let Some(range) = self.ranges.iter_mut().find(|r| r.slot == range) {
            range.mapped.push(Mapped {
                offset,
                size: handle.size,
                location: handle.props.location,
                device: false,
                host: false,
                defined: host,
            });
        }
    }

    /// Grants whole mappings to device 0 and the host.
    pub fn grant(&mut self, slot: Slot, offset: u64, size: u64, device: bool, host: bool) {
        let mut access = Vec::new();
        if device {
            access.push(read_write(Location::Device(0)));
        }
        if host {
            access.push(read_write(Location::Host));
        }
        if access.is_empty() {
            return;
        }
        let at = in_range(slot, offset);
        self.ops.push(Op::SetAccess { at, size, access });
        let Some(range) = self.ranges.iter_mut().find(|r| r.slot == slot) else {
            return;
        };
        let mut fill = None;
        for m in &mut range.mapped {
            if m.offset >= offset && m.offset + m.size <= offset + size {
                m.device |= device;
                m.host |= host;
                // Device memory starts with anything: only written bytes can be compared.
                if m.device && !m.defined {
                    m.defined = true;
                    fill = Some((in_range(slot, m.offset), m.size));
                }
            }
        }
        if let Some((at, bytes)) = fill {
            let value = self.random.word() as u8;
            self.ops.push(Op::Memset {
                at,
                value,
                bytes,
                stream: None,
            });
        }
    }

    pub fn forget_handle(&mut self, slot: Slot) {
        if let Some(index) = self.handles.iter().position(|h| h.slot == slot) {
            let handle = self.handles.swap_remove(index);
            // Mapped memory stays until it is unmapped: the account is only about right then, and
            // the budget leaves room.
            self.held = self.held.saturating_sub(handle.size / 2);
        }
    }

    pub fn forget_mapping(&mut self, size: u64) {
        self.held = self.held.saturating_sub(size / 2);
    }

    /// Memory, its size, and whether device 0 and the host are granted access and the bytes known.
    pub fn granted(&mut self) -> Option<(Addr, u64, bool, bool)> {
        let mapped = self.ranges.iter().flat_map(|range| {
            range
                .mapped
                .iter()
                .filter(|m| m.defined)
                .map(|m| (in_range(range.slot, m.offset), m.size, m.device, m.host))
        });
        let blocks = self.blocks.iter().map(|b| (b.at, b.size, b.device, b.host));
        let all: Vec<_> = mapped.chain(blocks).filter(|m| m.2 || m.3).collect();
        self.random.some(&all)
    }

    /// An address to ask about: mostly of something, seldom of nothing.
    pub fn somewhere(&mut self) -> (Addr, u64) {
        if self.random.percent(8) {
            let at = Addr {
                of: Memory::Nowhere,
                offset: 0,
            };
            return (at, UNIT);
        }
        let mut all = Vec::new();
        for range in &self.ranges {
            all.push((in_range(range.slot, 0), range.size));
            for m in &range.mapped {
                // The inside and the start of a mapping are twice as likely as the range.
                all.push((in_range(range.slot, m.offset), m.size));
                all.push((in_range(range.slot, m.offset + 4096), m.size - 4096));
            }
        }
        for block in &self.blocks {
            all.push((block.at, block.size));
        }
        match self.random.some(&all) {
            Some(found) => found,
            None => (in_range(self.reserve(UNIT), 0), UNIT),
        }
    }

    /// A location that may be granted access, or be asked about it.
    pub fn location(&mut self) -> Location {
        match self.random.below(10) {
            0..4 => Location::Device(self.device()),
            4..7 => Location::Host,
            7 => Location::HostNuma(0),
            8 => Location::HostNuma(self.random.pick(&[5, NOBODY])),
            _ => Location::Device(self.random.pick(&[NOBODY, -1])),
        }
    }

    pub fn import(&mut self) {
        let exported = self.exported.clone();
        let from = match (self.random.below(10), self.random.some(&exported)) {
            (0, _) => Source::GarbageFd,
            (1, _) => Source::GarbageFabric,
            (_, Some(slot)) => Source::Exported(slot),
            (_, None) => return self.export(),
        };
        let out = self.slot(Kind::Handle);
        self.ops.push(Op::Import { out, from });
        // Its size is unknown to the model: it is asked about and released, seldom mapped.
        if let Source::Exported(_) = from {
            self.handles.push(Handle {
                slot: out,
                size: UNIT,
                props: AllocationProps::at(Location::HostNuma(0)),
            });
        }
    }

    pub fn export(&mut self) {
        let shareable: Vec<_> = self
            .handles
            .iter()
            .filter(|h| h.props.handle_types == HandleTypes::POSIX_FD)
            .map(|h| h.slot)
            .collect();
        let any: Vec<_> = self.handles.iter().map(|h| h.slot).collect();
        let good = self.random.percent(75);
        let choice = match self.random.some(&shareable) {
            Some(slot) if good => Some(slot),
            _ => self.random.some(&any),
        };
        let Some(handle) = choice else {
            return self.build();
        };
        let kind = if self.random.percent(12) {
            HandleType::Fabric
        } else {
            HandleType::PosixFd
        };
        let out = self.slot(Kind::Exported);
        self.ops.push(Op::Export { out, handle, kind });
        if shareable.contains(&handle) && kind == HandleType::PosixFd {
            self.exported.push(out);
        }
    }
}

pub(super) fn in_range(slot: Slot, offset: u64) -> Addr {
    Addr {
        of: Memory::Range(slot),
        offset,
    }
}

pub(super) fn read_write(location: Location) -> AccessDesc {
    AccessDesc {
        location,
        access: Access::ReadWrite,
    }
}
