//! The generator's virtual memory management and device operations.

use super::model::{Kind, Model, NOBODY, UNIT, in_range, read_write};
use super::op::{Op, Query};
use egmem::driver::{
    Access, AccessDesc, AllocationProps, DeviceAttribute, GranularityKind, HandleTypes, Location,
    PointerAttribute,
};

const TIB: u64 = 1 << 40;

impl Model {
    pub(super) fn next_vmm(&mut self) {
        match self.random.below(36) {
            0..4 => self.odd_create(),
            4..6 => self.odd_reserve(),
            6..10 => self.next_map(),
            10..13 => self.next_unmap(),
            13..18 => self.next_set_access(),
            18..20 => {
                let (at, _) = self.somewhere();
                let location = self.location();
                self.ops.push(Op::GetAccess { at, location });
            }
            20..22 => self.export(),
            22..24 => self.import(),
            24 => match self.random.some(&self.handles.clone()) {
                Some(handle) => self.ops.push(Op::Properties {
                    handle: handle.slot,
                }),
                None => self.odd_create(),
            },
            25..27 => {
                let (at, _) = self.somewhere();
                let out = self.slot(Kind::Handle);
                self.ops.push(Op::Retain { out, at });
                if self.random.percent(80) {
                    self.ops.push(Op::Properties { handle: out });
                    self.ops.push(Op::Release {
                        handle: out,
                        twice: false,
                    });
                }
            }
            27..30 => self.next_question(),
            30..33 => match self.random.some(&self.handles.clone()) {
                Some(handle) => {
                    let twice = self.random.percent(40);
                    self.ops.push(Op::Release {
                        handle: handle.slot,
                        twice,
                    });
                    self.forget_handle(handle.slot);
                }
                None => self.odd_create(),
            },
            _ => self.next_address_free(),
        }
    }

    /// Physical memory of any properties, most of them refused.
    fn odd_create(&mut self) {
        let location = match self.random.below(12) {
            0..4 => Location::HostNuma(0),
            4..6 => Location::Device(self.device()),
            6 => Location::Device(self.random.pick(&[NOBODY, -1])),
            7..9 => Location::Host,
            9 => Location::HostNuma(self.random.pick(&[NOBODY, -1])),
            10 => Location::HostNumaCurrent,
            _ => Location::HostNuma(0),
        };
        let types = HandleTypes::NONE;
        let types = match self.random.below(10) {
            0..5 => types,
            5..8 => HandleTypes::POSIX_FD,
            8 => HandleTypes::FABRIC,
            _ => HandleTypes::POSIX_FD | HandleTypes::FABRIC,
        };
        let mut props = AllocationProps::at(location).handle_types(types);
        props.gpu_direct_rdma = self.random.percent(10);
        let size = match self.random.below(10) {
            0 => 0,
            1 => UNIT + self.random.pick(&[1, 4096, 65536, UNIT / 2]),
            2 => self.random.pick(&[4096, 12345]),
            3 => 64 * TIB,
            _ => UNIT * self.random.pick(&[1, 1, 2, 4, 8, 16]),
        };
        let whole = size > 0 && size < TIB && size % UNIT == 0;
        let valid = matches!(location, Location::HostNuma(0) | Location::Device(0 | 1))
            && whole
            && !types.contains(HandleTypes::FABRIC)
            && !props.gpu_direct_rdma;
        if valid {
            if self.create(size, props).is_none() {
                self.next_unmap();
            }
            return;
        }
        let out = self.slot(Kind::Handle);
        self.ops.push(Op::Create { out, size, props });
        // Some drivers may grant these: then there is something to ask about, and to give back.
        let uncertain = match location {
            Location::Host => types == HandleTypes::NONE && !props.gpu_direct_rdma,
            Location::Device(0..NOBODY) => !types.contains(HandleTypes::FABRIC),
            _ => false,
        };
        if uncertain && whole {
            self.ops.push(Op::Properties { handle: out });
            self.ops.push(Op::Release {
                handle: out,
                twice: false,
            });
        }
    }

    fn odd_reserve(&mut self) {
        let size = match self.random.below(8) {
            0 => 0,
            1 => 12345,
            2 => UNIT + 4096,
            3 => self.random.pick(&[TIB, 64 * TIB]),
            _ => UNIT * (1 + self.random.below(16)),
        };
        let alignment = match self.random.below(8) {
            0 => 4096,
            1 => UNIT,
            2 => 2 * UNIT,
            3 => 1 << 30,
            4 => self.random.pick(&[3 * UNIT, 12345, 1]),
            _ => 0,
        };
        let ranges = self.ranges.clone();
        let hint = match self.random.percent(15) {
            true => self.random.some(&ranges).map(|range| range.slot),
            false => None,
        };
        let good_size = size > 0 && size % UNIT == 0 && size < TIB;
        if good_size && alignment == 0 && hint.is_none() {
            self.reserve(size);
            return;
        }
        let out = self.slot(Kind::Range);
        self.ops.push(Op::Reserve {
            out,
            size,
            alignment,
            hint,
        });
        if self.random.percent(75) {
            self.ops.push(Op::AddressFree {
                range: out,
                size,
                twice: false,
            });
        }
    }

    fn next_map(&mut self) {
        let (handles, ranges) = (self.handles.clone(), self.ranges.clone());
        let (Some(handle), Some(range)) = (self.random.some(&handles), self.random.some(&ranges))
        else {
            return self.odd_create();
        };
        if self.random.percent(30) {
            // Unaligned, half, at an offset, or over an existing mapping.
            let (at, size, offset) = match self.random.below(5) {
                0 => (4096, handle.size, 0),
                1 => (0, handle.size.max(2 * UNIT) / 2, 0),
                2 => (0, handle.size, UNIT),
                3 => (0, 4096, 0),
                _ => (range.mapped.first().map_or(0, |m| m.offset), handle.size, 0),
            };
            self.ops.push(Op::Map {
                at: in_range(range.slot, at),
                size,
                offset,
                handle: handle.slot,
            });
            return;
        }
        let end = |m: &super::model::Mapped| m.offset + m.size;
        let free = range.mapped.iter().map(end).max().unwrap_or(0);
        if free + handle.size <= range.size {
            self.map(range.slot, free, &handle);
        } else {
            let room = handle.size + UNIT * self.random.below(4);
            let fresh = self.reserve(room);
            self.map(fresh, 0, &handle);
        }
    }

    fn next_unmap(&mut self) {
        let ranges = self.ranges.clone();
        let Some(range) = self.random.some(&ranges) else {
            return self.odd_reserve();
        };
        let Some(mapped) = self.random.some(&range.mapped) else {
            // Nothing there: CUDA does not mind.
            self.ops.push(Op::Unmap {
                at: in_range(range.slot, 0),
                size: self.random.pick(&[UNIT, 4096, 0]).min(range.size),
            });
            return;
        };
        let at = in_range(range.slot, mapped.offset);
        match self.random.below(6) {
            0 if mapped.size > UNIT => self.ops.push(Op::Unmap { at, size: UNIT }),
            1 => self.ops.push(Op::Unmap { at, size: 4096 }),
            n => {
                let size = mapped.size;
                for _ in 0..=u64::from(n == 2) {
                    self.ops.push(Op::Unmap { at, size });
                }
                self.forget_mapping(size);
                if let Some(range) = self.ranges.iter_mut().find(|r| r.slot == range.slot) {
                    range.mapped.retain(|m| m.offset != mapped.offset);
                }
            }
        }
    }

    fn next_set_access(&mut self) {
        let ranges = self.ranges.clone();
        let Some(range) = self.random.some(&ranges) else {
            return self.odd_reserve();
        };
        let Some(mapped) = self.random.some(&range.mapped) else {
            let access = vec![read_write(Location::Device(0))];
            let at = in_range(range.slot, 0);
            let size = range.size;
            return self.ops.push(Op::SetAccess { at, size, access });
        };
        if self.random.percent(40) {
            let host = mapped.location.is_host();
            return self.grant(range.slot, mapped.offset, mapped.size, true, host);
        }
        let (offset, size) = match self.random.below(6) {
            0 => (mapped.offset, UNIT),
            1 => (mapped.offset, 4096),
            2 => (0, range.size),
            3 => {
                let ends = range.mapped.iter().map(|m| m.offset + m.size);
                (0, ends.max().unwrap_or(range.size))
            }
            _ => (mapped.offset, mapped.size),
        };
        let mut access = Vec::new();
        for _ in 0..1 + self.random.below(2) {
            let location = self.location();
            let flags = self.random.pick(&[
                Access::ReadWrite,
                Access::ReadWrite,
                Access::Read,
                Access::None,
            ]);
            if access.iter().all(|d: &AccessDesc| d.location != location) {
                access.push(AccessDesc {
                    location,
                    access: flags,
                });
            }
        }
        if self.random.percent(4) {
            access.clear();
        }
        self.ops.push(Op::SetAccess {
            at: in_range(range.slot, offset),
            size,
            access,
        });
        let location = self.location();
        self.ops.push(Op::GetAccess {
            at: in_range(range.slot, mapped.offset),
            location,
        });
    }

    fn next_question(&mut self) {
        let (at, size) = self.somewhere();
        self.ops.push(match self.random.below(8) {
            0..2 => Op::AddressRange { at },
            2 => Op::DmaBuf { at, size },
            _ => Op::PointerAttribute {
                at,
                attribute: self.random.pick(&[
                    PointerAttribute::MemoryType,
                    PointerAttribute::DevicePointer,
                    PointerAttribute::HostPointer,
                    PointerAttribute::DeviceOrdinal,
                    PointerAttribute::RangeStartAddr,
                    PointerAttribute::RangeSize,
                    PointerAttribute::Mapped,
                    PointerAttribute::AllowedHandleTypes,
                ]),
            },
        });
    }

    fn next_address_free(&mut self) {
        let ranges = self.ranges.clone();
        let empty: Vec<_> = ranges.iter().filter(|r| r.mapped.is_empty()).collect();
        let Some(range) = self
            .random
            .some(&empty)
            .or(self.random.some(&ranges.iter().collect::<Vec<_>>()))
        else {
            return self.odd_reserve();
        };
        let bad_size = self.random.percent(20);
        let size = match bad_size {
            true => self.random.pick(&[0, 4096, range.size + UNIT]),
            false => range.size,
        };
        let twice = self.random.percent(40);
        let (slot, size) = (range.slot, size);
        if !bad_size && range.mapped.is_empty() {
            self.ranges.retain(|r| r.slot != slot);
        }
        self.ops.push(Op::AddressFree {
            range: slot,
            size,
            twice,
        });
    }

    pub(super) fn next_device(&mut self) {
        let device = match self.random.percent(70) {
            true => self.device(),
            false => self.random.pick(&[NOBODY, -1]),
        };
        let attributes = [
            DeviceAttribute::INTEGRATED,
            DeviceAttribute::UNIFIED_ADDRESSING,
            DeviceAttribute::COMPUTE_CAPABILITY_MAJOR,
            DeviceAttribute::COMPUTE_CAPABILITY_MINOR,
            DeviceAttribute::MULTIPROCESSOR_COUNT,
            DeviceAttribute::PAGEABLE_MEMORY_ACCESS,
            DeviceAttribute::PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
            DeviceAttribute::DIRECT_MANAGED_MEM_ACCESS_FROM_HOST,
            DeviceAttribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            DeviceAttribute::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            DeviceAttribute::GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
            DeviceAttribute::MEMORY_POOLS_SUPPORTED,
            DeviceAttribute::MEMPOOL_SUPPORTED_HANDLE_TYPES,
            DeviceAttribute::DMA_BUF_SUPPORTED,
            DeviceAttribute::HANDLE_TYPE_FABRIC_SUPPORTED,
            DeviceAttribute::NUMA_CONFIG,
            DeviceAttribute::NUMA_ID,
            DeviceAttribute::HOST_NUMA_ID,
            DeviceAttribute::HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            DeviceAttribute::HOST_NUMA_MEMORY_POOLS_SUPPORTED,
            DeviceAttribute::HOST_NUMA_MULTINODE_IPC_SUPPORTED,
            DeviceAttribute::HOST_MEMORY_POOLS_SUPPORTED,
            DeviceAttribute::HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            DeviceAttribute(0),
            DeviceAttribute(100_000),
        ];
        let op = match self.random.below(10) {
            0..5 => Op::DeviceAttribute {
                device,
                attribute: self.random.pick(&attributes),
            },
            5 => Op::CanAccessPeer {
                device,
                peer: self.random.pick(&[0, 0, NOBODY]),
            },
            6..8 => Op::DeviceQuery {
                device,
                what: self.random.pick(&[
                    Query::Name,
                    Query::Uuid,
                    Query::PciBusId,
                    Query::TotalMem,
                    Query::MemInfo,
                ]),
            },
            _ => {
                let location = match self.random.percent(50) {
                    true => self.location(),
                    false => Location::HostNuma(0),
                };
                let types = self.random.pick(&[
                    HandleTypes::NONE,
                    HandleTypes::POSIX_FD,
                    HandleTypes::FABRIC,
                ]);
                Op::Granularity {
                    props: AllocationProps::at(location).handle_types(types),
                    kind: self
                        .random
                        .pick(&[GranularityKind::Minimum, GranularityKind::Recommended]),
                }
            }
        };
        self.ops.push(op);
    }
}
