//! The requirements of a heap's memory, checked before any is created.

use egmem_core::Backing;
use egmem_core::backing::Chosen;
use egmem_core::backing::choose::choose_for_all;

use super::shape::Shape;
use crate::buffer::RequestedAccess;
use crate::capability::shareable::handle_types_of;
use crate::driver::{Access, AccessDesc, Driver, HandleTypes, Location, NodeId};
use crate::ledger::{self, Label};
use crate::ranges::MAX_RANGE;
use crate::size::Granularity;
use crate::topology::{Topology, TopologySource};
use crate::vmm::PhysicalMemory;
use crate::{Error, Growth, Result};

/// The default limit for a node whose memory size is unknown.
const UNKNOWN_TOTAL: u64 = 1 << 40;

/// The most chunks of a heap that was told no size: a quarter of the memory mappings that Linux allows a process by default
/// (65,530), of which each chunk takes one.
const MOST_CHUNKS: u64 = 1 << 14;

/// The most addresses of any processor, in bytes: 5-level page tables have 57 bits.
const MOST_ADDRESSES: u64 = 1 << 57;

/// Everything in a heap's options that concerns its memory.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Where chunks are created, in turn: at least one place. A place that is listed twice gets twice as
    /// many.
    pub nodes: Vec<Location>,
    /// The most bytes on each of `nodes`, in their order, rounded down to the granularity. If empty, only the
    /// limit applies.
    pub shares: Vec<u64>,
    /// The access of the CPU and the GPUs; a GPU that is not named, if it can reach all the memory.
    pub access: RequestedAccess,
    /// What chunks are made of.
    pub backing: Backing,
    /// How chunks may be shared. If they can be, no block lies in two chunks.
    pub handle_types: HandleTypes,
    /// Whether to share chunks as widely as the machine allows.
    pub shareable: bool,
    /// Whether to ask the driver for more memory than a node has free.
    pub overcommit: bool,
    /// Bytes of a chunk, rounded up to the granularity; `None`: those of `growth`, else those of [`Growth::steady`].
    pub chunk: Option<u64>,
    pub growth: Option<Growth>,
    /// Bytes of addresses to reserve, which is also the most memory, rounded down to the granularity; at most
    /// the sum of the shares. `None`: the nodes' memory.
    pub limit: Option<u64>,
    /// The chunks' name in the ledger.
    pub label: Option<Label>,
    /// The program's call that built the heap.
    pub site: ledger::Site,
}

impl Plan {
    /// Creates a plan for memory on one node, with defaults for all else.
    #[track_caller]
    pub(crate) fn on(location: impl Into<Location>) -> Self {
        Self {
            nodes: vec![location.into()],
            shares: Vec::new(),
            access: RequestedAccess::default(),
            backing: Backing::Auto,
            handle_types: HandleTypes::NONE,
            shareable: false,
            overcommit: false,
            chunk: None,
            growth: None,
            limit: None,
            label: None,
            site: ledger::Site::here(),
        }
    }

    /// Checks the plan, and fills it in from the driver and the topology.
    pub(super) fn settle(&self, driver: &Driver) -> Result<Settled> {
        let topology = Topology::of(driver)?;
        let mut sites = self.sites(driver, &topology)?;
        let access = self.access(driver)?;
        // No list would stand for access by all, but this heap grants none.
        let none = [AccessDesc::new(Location::Host, Access::None)];
        let asked = if access.is_empty() {
            &none
        } else {
            &access[..]
        };
        let places = sites
            .iter()
            .map(|site| ((site.location, site.handle_types), asked));
        let chosen = choose_for_all(driver, self.backing, places)?;
        let mut unit = Granularity::TWO_MIB;
        for site in &sites {
            let options = PhysicalMemory::options(site.location)
                .handle_types(site.handle_types)
                .chosen(chosen.clone());
            unit = unit.max(options.granularity_of(driver)?);
        }
        for (site, share) in sites.iter_mut().zip(&self.shares) {
            site.share = unit.round_down(*share);
        }
        // The driver copies nothing across two registrations.
        let joins = chosen.backing != Backing::Registered && !sites.iter().any(Site::is_exportable);
        let mut settled = Settled {
            shape: Shape {
                base: 0,
                unit: unit.bytes(),
                chunk: 0,
                limit: 0,
                joins,
                max_range: MAX_RANGE,
            },
            sites,
            access,
            chosen,
            label: self.label.clone(),
            site: self.site.clone(),
        };
        let limit = match self.limit {
            Some(bytes) => bytes,
            None => settled.total(driver, &topology)?,
        };
        let limit = settled.checked_limit(limit)?;
        settled.shape.limit = limit;
        settled.shape.chunk = self.checked_chunk(unit, limit)?.min(limit);
        Ok(settled)
    }

    fn checked_chunk(&self, unit: Granularity, limit: u64) -> Result<u64> {
        if self.chunk == Some(0) {
            return Err(Error::invalid("chunk", "chunks of 0 bytes add nothing"));
        }
        let default = match self.growth {
            Some(growth) => growth.checked_chunk()?,
            None => Growth::steady().checked_chunk()?.max(limit / MOST_CHUNKS),
        };
        Ok(Growth::chunk_in(unit, self.chunk.unwrap_or(default)))
    }

    /// Returns the nodes, and how chunks on each may be shared.
    fn sites(&self, driver: &Driver, topology: &Topology) -> Result<Vec<Site>> {
        let site = |&location: &Location| {
            match location {
                Location::HostNuma(id) if topology.source() != TopologySource::Driver => {
                    topology.node(NodeId(id))?;
                }
                Location::HostNumaCurrent => {
                    let why = "the calling thread's node differs between threads: name one";
                    return Err(Error::invalid("node", why));
                }
                Location::Device(gpu) => {
                    topology.gpu(gpu)?;
                }
                _ => {}
            }
            let mut handle_types = self.handle_types;
            if self.shareable {
                handle_types |= handle_types_of(driver, location, self.backing)?.handle_types;
            }
            Ok(Site {
                location,
                handle_types,
                share: u64::MAX,
                taken: 0,
            })
        };
        self.nodes.iter().map(site).collect()
    }

    /// Returns the access for every chunk, on any of the nodes: the access that all nodes allow.
    fn access(&self, driver: &Driver) -> Result<Vec<AccessDesc>> {
        let mut nodes = self.nodes.iter();
        let Some(&first) = nodes.next() else {
            return Err(Error::invalid("nodes", "the list is empty"));
        };
        for desc in self.access.gpus.as_deref().unwrap_or_default() {
            if let Location::Device(gpu) = desc.location {
                Error::expect_gpu(gpu, driver.device_count()?)?;
            }
        }
        let mut all = self.access.grants(driver, first)?;
        for &node in nodes {
            let there = self.access.grants(driver, node)?;
            all.retain(|desc| there.contains(desc));
        }
        Ok(all.into_vec())
    }
}

/// A plan with all defaults filled in.
#[derive(Clone, Debug)]
pub(super) struct Settled {
    pub sites: Vec<Site>,
    pub access: Vec<AccessDesc>,
    /// What chunks are made of.
    pub chosen: Chosen,
    /// The start is known once the addresses are reserved.
    pub shape: Shape,
    /// For the ledger.
    pub label: Option<Label>,
    pub site: ledger::Site,
}

/// A place where chunks are created.
#[derive(Clone, Copy, Debug)]
pub(super) struct Site {
    pub location: Location,
    pub handle_types: HandleTypes,
    /// The most bytes to create there.
    pub share: u64,
    /// The bytes created there that are, or become, memory of the heap.
    pub taken: u64,
}

impl Site {
    /// Returns the bytes that may still be created there.
    pub(super) const fn left(&self) -> u64 {
        self.share.saturating_sub(self.taken)
    }

    /// Returns whether its chunks can be exported.
    pub(super) fn is_exportable(&self) -> bool {
        self.handle_types != HandleTypes::NONE
    }
}

impl Settled {
    /// Returns all memory of the places, each counted once.
    fn total(&self, driver: &Driver, topology: &Topology) -> Result<u64> {
        let mut total = 0_u64;
        for location in self.places() {
            let bytes = match location {
                Location::Device(gpu) => driver.device_total_mem(gpu)?,
                Location::HostNuma(id) => topology
                    .node(NodeId(id))
                    .map_or(0, |node| node.memory_total),
                _ => topology.nodes().iter().map(|node| node.memory_total).sum(),
            };
            total = total.saturating_add(match bytes {
                0 => UNKNOWN_TOTAL,
                bytes => bytes,
            });
        }
        Ok(total)
    }

    /// Returns how much of `limit` there are nodes for, in whole units.
    fn checked_limit(&self, limit: u64) -> Result<u64> {
        let unit = self.shape.unit;
        let shares = self.sites.iter().map(|site| site.share);
        let most = limit.min(shares.fold(0, u64::saturating_add));
        if most > MOST_ADDRESSES {
            let why = format!("{limit} bytes exceed the address space");
            return Err(Error::invalid("limit", why));
        }
        if most >= unit {
            return Ok(most / unit * unit);
        }
        let why = if limit < unit {
            format!("{limit} bytes are less than the granularity, {unit}")
        } else {
            format!("every node's share is less than the granularity, {unit} bytes")
        };
        Err(Error::invalid("limit", why))
    }

    /// Returns the locations of the sites, without repetitions.
    pub(super) fn places(&self) -> Vec<Location> {
        let mut places: Vec<Location> = self.sites.iter().map(|site| site.location).collect();
        places.sort_unstable();
        places.dedup();
        places
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Machine;

    #[test]
    fn chunks_by_default_are_no_more_than_a_process_can_map() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let chunk = |limit, growth| {
            let plan = Plan {
                limit: Some(limit),
                growth,
                ..Plan::on(NodeId(0))
            };
            plan.settle(&driver).unwrap().shape.chunk
        };
        assert_eq!(chunk(1 << 40, None), 64 << 20);
        assert_eq!(chunk(4 << 40, None), 256 << 20);
        assert_eq!(chunk(4 << 40, Some(Growth::gentle())), 16 << 20);
    }
}
