//! The generator's pools.

use super::addr::{Addr, Memory, Slot};
use super::model::{Block, Kind, MadePool, Model, NOBODY, UNIT, read_write};
use super::op::Op;
use egmem::driver::{Access, AccessDesc, HandleTypes, Location, PoolAttribute, PoolProps};

/// The limit of pools that have one: never reached by the small allocations, always exceeded by a
/// big one, so that the answer does not depend on how a driver cuts up its chunks.
const POOL_LIMIT: u64 = 128 << 20;

impl Model {
    pub(super) fn next_pool(&mut self) {
        let live: Vec<_> = self.pools.iter().filter(|p| p.live).cloned().collect();
        let Some(pool) = self.random.some(&live) else {
            return self.make_pool();
        };
        match self.random.below(28) {
            0..2 if live.len() < 3 => self.make_pool(),
            2..4 if live.len() > 1 => self.destroy_pool(pool.slot),
            4..7 => {
                let attribute = self.attribute();
                let value = match attribute {
                    PoolAttribute::ReleaseThreshold => {
                        self.random.pick(&[0, 1, 64 << 20, u64::MAX])
                    }
                    a if a.is_int() => self.random.pick(&[0, 1]),
                    _ => self.random.pick(&[0, 0, 1, 4096]),
                };
                self.ops.push(Op::PoolSet {
                    pool: pool.slot,
                    attribute,
                    value,
                });
                self.ops.push(Op::PoolGet {
                    pool: pool.slot,
                    attribute,
                });
            }
            7..9 => {
                let attribute = self.attribute();
                self.ops.push(Op::PoolGet {
                    pool: pool.slot,
                    attribute,
                });
            }
            9 => {
                let keep = self.random.pick(&[0, UNIT, 1 << 40]);
                self.ops.push(Op::PoolTrim {
                    pool: pool.slot,
                    keep,
                });
            }
            10..13 => self.pool_access(&pool),
            13 => {
                let location = self.location();
                self.ops.push(Op::PoolGetAccess {
                    pool: pool.slot,
                    location,
                });
            }
            // Other exports are not tried: a refused one has been seen to corrupt the heap.
            14 if pool.posix => self.ops.push(Op::PoolExport { pool: pool.slot }),
            15 => {
                let mut pooled = self.pooled();
                // Only of a pool that was exported can a pointer be.
                let own = |(_, of): &(Slot, Option<Slot>)| *of == Some(pool.slot);
                if pool.posix && pooled.iter().any(own) && self.random.percent(70) {
                    self.ops.push(Op::PoolExport { pool: pool.slot });
                    pooled.retain(own);
                }
                match self.random.some(&pooled) {
                    Some((alloc, _)) => self.ops.push(Op::PoolExportPointer { alloc }),
                    None => self.allocate(Some(pool)),
                }
            }
            16..18 => {
                let device = match self.random.percent(65) {
                    true => 0,
                    false => NOBODY,
                };
                if self.random.percent(60) {
                    // A device's pool is made of the device's own memory.
                    let own: Vec<_> = live.iter().filter(|pool| !pool.host).collect();
                    let pool = match self.random.some(&own) {
                        Some(own) if self.random.percent(70) => own.slot,
                        _ => pool.slot,
                    };
                    self.ops.push(Op::SetDevicePool { device, pool });
                }
                self.ops.push(Op::DevicePool { device });
            }
            18..21 => {
                let pooled = self.pooled();
                match self.random.some(&pooled) {
                    Some((alloc, _)) => self.free(alloc),
                    None => self.allocate(Some(pool)),
                }
            }
            21 => self.allocate(None),
            _ => self.allocate(Some(pool)),
        }
    }

    fn attribute(&mut self) -> PoolAttribute {
        self.random.pick(&[
            PoolAttribute::ReuseFollowEventDependencies,
            PoolAttribute::ReuseAllowOpportunistic,
            PoolAttribute::ReuseAllowInternalDependencies,
            PoolAttribute::ReleaseThreshold,
            PoolAttribute::ReservedCurrent,
            PoolAttribute::ReservedHigh,
            PoolAttribute::UsedCurrent,
            PoolAttribute::UsedHigh,
        ])
    }

    fn make_pool(&mut self) {
        let location = match self.random.below(10) {
            0..5 => Location::HostNuma(0),
            5..8 => Location::Device(0),
            8 => self
                .random
                .pick(&[Location::Host, Location::HostNumaCurrent]),
            _ => self.random.pick(&[
                Location::HostNuma(NOBODY),
                Location::HostNuma(-1),
                Location::Device(NOBODY),
            ]),
        };
        let handle_types = match self.random.below(6) {
            0..3 => HandleTypes::NONE,
            3..5 => HandleTypes::POSIX_FD,
            _ => HandleTypes::FABRIC,
        };
        let out = self.slot(Kind::Pool);
        let props = PoolProps {
            location,
            handle_types,
            max_size: self.random.pick(&[0, POOL_LIMIT]),
        };
        self.ops.push(Op::PoolCreate { out, props });
        let made = matches!(location, Location::HostNuma(0) | Location::Device(0));
        if made {
            self.pools.push(MadePool {
                slot: out,
                host: location.is_host(),
                posix: handle_types == HandleTypes::POSIX_FD,
                granted: !location.is_host(),
                live: true,
            });
        } else if location == Location::Host {
            // On a driver that allows such a pool, ask for its access too.
            self.ops.push(Op::PoolGetAccess {
                pool: out,
                location: Location::Host,
            });
            self.ops.push(Op::PoolDestroy { pool: out });
        }
    }

    fn destroy_pool(&mut self, slot: Slot) {
        if let Some(pool) = self.pools.iter_mut().find(|p| p.slot == slot) {
            pool.live = false;
        }
        // Mostly after its allocations are gone; CUDA allows it before, too.
        if self.random.percent(70) {
            let of_pool: Vec<_> = self.pooled();
            for (alloc, pool) in of_pool {
                if pool == Some(slot) {
                    self.free(alloc);
                }
            }
        }
        self.ops.push(Op::PoolDestroy { pool: slot });
    }

    fn pool_access(&mut self, pool: &MadePool) {
        if pool.host && !pool.granted && self.random.percent(60) {
            let access = vec![read_write(Location::Device(0))];
            self.ops.push(Op::PoolSetAccess {
                pool: pool.slot,
                access,
            });
            if let Some(pool) = self.pools.iter_mut().find(|p| p.slot == pool.slot) {
                pool.granted = true;
            }
            for block in &mut self.blocks {
                block.device |= block.pool == Some(pool.slot);
            }
            return;
        }
        let used = self.blocks.iter().any(|b| b.pool == Some(pool.slot));
        let location = match self.location() {
            // The driver refuses this grant. After it, the first allocation from another pool has ended a
            // process with SIGFPE once (docs/driver-behaviour.md).
            location if location.is_host() && !pool.host && !used => Location::Device(0),
            location => location,
        };
        // The pool is known to stay usable only while its owner and device 0 keep their access.
        let mut choices = vec![Access::ReadWrite];
        if location != Location::Device(0) {
            choices.extend([Access::Read, Access::None]);
        }
        let access = self.random.pick(&choices);
        self.ops.push(Op::PoolSetAccess {
            pool: pool.slot,
            access: vec![AccessDesc { location, access }],
        });
        self.ops.push(Op::PoolGetAccess {
            pool: pool.slot,
            location,
        });
    }

    fn pooled(&self) -> Vec<(Slot, Option<Slot>)> {
        let slot = |block: &Block| match block.at.of {
            Memory::Pooled(slot) => Some((slot, block.pool)),
            _ => None,
        };
        self.blocks.iter().filter_map(slot).collect()
    }

    fn allocate(&mut self, pool: Option<MadePool>) {
        let stream = self.stream();
        let out = self.slot(Kind::Pooled);
        let size = match self.random.below(12) {
            0 => 0,
            1 => POOL_LIMIT + (64 << 20),
            2 => 64 << 40,
            3..6 => self.random.pick(&[8, 100, 512, 1000]),
            _ => 4096 * (1 + self.random.below(512)),
        };
        let limited = size > POOL_LIMIT;
        // Without a limit the big one would succeed, and be slow.
        let size = match (limited, &pool) {
            (true, _) if size < 1 << 40 => 64 << 40,
            _ => size,
        };
        self.ops.push(Op::PoolAlloc {
            out,
            pool: pool.as_ref().map(|p| p.slot),
            size,
            stream,
        });
        if size > 0 && !limited {
            self.blocks.push(Block {
                at: Addr {
                    of: Memory::Pooled(out),
                    offset: 0,
                },
                size,
                pool: pool.as_ref().map(|p| p.slot),
                device: pool.as_ref().is_none_or(|p| p.granted),
                host: pool.is_some_and(|p| p.host),
            });
        }
    }

    fn free(&mut self, alloc: Slot) {
        let stream = self.stream();
        self.blocks
            .retain(|block| block.at.of != Memory::Pooled(alloc));
        self.ops.push(Op::PoolFree { alloc, stream });
    }
}
