//! The objects of a run, and which accesses to them are known to be safe.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::addr::{Addr, Memory, Slot};
use egmem::driver::{
    Access, AccessDesc, DevicePtr, EventHandle, Location, PhysicalHandle, PoolHandle,
    ShareableHandle, StreamHandle,
};

/// Physical memory, by the handle's number: handles that are the same number are the same object.
#[derive(Debug)]
pub(super) struct Physical {
    pub device: bool,
    /// Whether the bytes are known: device memory starts with anything.
    pub defined: Rc<Cell<bool>>,
    /// How many releases the handle can still take.
    pub references: u32,
}

#[derive(Debug)]
pub(super) struct Mapping {
    pub offset: u64,
    pub size: u64,
    pub handle: PhysicalHandle,
    pub defined: Rc<Cell<bool>>,
    pub access: Grants,
    /// A part was unmapped: the rest of the mapping is unknown.
    pub doubtful: bool,
}

#[derive(Debug)]
pub(super) struct Range {
    pub base: DevicePtr,
    pub size: u64,
    /// The guaranteed alignment; the address may be aligned to more by chance.
    pub alignment: u64,
    pub mappings: Vec<Mapping>,
}

/// Reservations up to this size fit behind any address that a driver gives out.
const FITS_ANYWHERE: u64 = 1 << 30;

impl Range {
    /// Whether the place where the driver put this range decides how it answers a reservation with
    /// the range's address as a hint: another driver's answer proves nothing then.
    pub fn decides(&self, size: u64, alignment: u64) -> bool {
        let by_alignment = alignment.is_power_of_two() && alignment > self.alignment;
        // The search goes from the hint upwards.
        by_alignment || size > FITS_ANYWHERE
    }
}

#[derive(Debug)]
pub(super) struct Pool {
    /// `None` once destroyed: allocations may outlive it.
    pub handle: Option<PoolHandle>,
    pub access: Grants,
}

#[derive(Debug)]
pub(super) struct Pooled {
    pub ptr: DevicePtr,
    pub size: u64,
    /// The pool's slot, or the device whose default pool it is from.
    pub pool: Result<Slot, i32>,
    pub defined: bool,
}

#[derive(Debug)]
pub(super) struct Plain {
    pub ptr: DevicePtr,
    pub size: u64,
    pub device: i32,
    pub host: bool,
}

/// The access of each location, as far as it is certain.
#[derive(Clone, Debug, Default)]
pub(super) struct Grants(Vec<AccessDesc>);

impl Grants {
    pub fn of(location: Location) -> Self {
        let owner = if location.is_host() {
            Location::Host
        } else {
            location
        };
        Self(vec![AccessDesc {
            location: owner,
            access: Access::ReadWrite,
        }])
    }

    pub fn set(&mut self, desc: AccessDesc) {
        // A grant to a host node may or may not be one to the CPU: only `Host` is certain.
        let host = desc.location.is_host();
        self.0
            .retain(|old| old.location != desc.location && !(host && old.location.is_host()));
        if !host || desc.location == Location::Host {
            self.0.push(desc);
        }
    }

    /// Notes a grant that failed, of which a part may have been made: no location is sure to have more access
    /// than before, nor more than the grant gives.
    pub fn limit(&mut self, desc: AccessDesc) {
        let host = desc.location.is_host();
        let same =
            |old: &AccessDesc| old.location == desc.location || (host && old.location.is_host());
        for old in self.0.iter_mut().filter(|old| same(old)) {
            old.access = old.access.min(desc.access);
        }
    }

    pub fn allow(&self, who: Location, need: Access) -> bool {
        self.0
            .iter()
            .any(|desc| desc.location == who && desc.access >= need)
    }
}

/// Everything that a run made and has not given back, by slot.
#[derive(Debug, Default)]
pub(super) struct State {
    pub handles: BTreeMap<Slot, PhysicalHandle>,
    pub physical: BTreeMap<PhysicalHandle, Physical>,
    pub ranges: BTreeMap<Slot, Range>,
    pub exported: BTreeMap<Slot, ShareableHandle>,
    pub pools: BTreeMap<Slot, Pool>,
    /// The pools that were made a device's current one.
    pub current_pools: BTreeMap<i32, Slot>,
    pub pooled: BTreeMap<Slot, Pooled>,
    pub plain: BTreeMap<Slot, Plain>,
    pub streams: BTreeMap<Slot, StreamHandle>,
    pub events: BTreeMap<Slot, (EventHandle, i32)>,
}

/// Device memory above this size begins at a page of 2 MiB.
const OWN_PAGES: u64 = 1 << 20;
/// Nothing is ever mapped at the first page.
const NOWHERE: u64 = 4096;

impl State {
    /// The address of `bytes` bytes at `at`, if all of them are in memory of this run, or nowhere.
    pub fn address(&self, at: Addr, bytes: u64) -> Option<DevicePtr> {
        let end = at.offset.checked_add(bytes)?;
        let (base, size) = match at.of {
            Memory::Range(slot) => self.ranges.get(&slot).map(|r| (r.base, r.size))?,
            Memory::Pooled(slot) => self.pooled.get(&slot).map(|a| (a.ptr, a.size))?,
            Memory::Plain(slot) => self.plain.get(&slot).map(|p| (p.ptr, p.size))?,
            Memory::Nowhere => (DevicePtr(0), NOWHERE),
        };
        (end <= size).then(|| base.add(at.offset))
    }

    /// Whether memory is so small that it shares pages with other allocations of the process, and begins
    /// where those leave room.
    pub fn shares_pages(&self, at: Addr) -> bool {
        match at.of {
            Memory::Plain(slot) => self.plain.get(&slot).is_some_and(|p| p.size <= OWN_PAGES),
            _ => false,
        }
    }

    /// The same, if `who` is known to have the access that it `need`s to all of the bytes. Reading
    /// needs known bytes too.
    pub fn accessible(
        &self,
        at: Addr,
        bytes: u64,
        who: Location,
        need: Access,
    ) -> Option<DevicePtr> {
        let address = self.address(at, bytes)?;
        let reads = need == Access::Read;
        let (granted, defined) = match at.of {
            Memory::Range(slot) => {
                let mapping = self.mapping(slot, at.offset, bytes)?;
                (mapping.access.allow(who, need), mapping.defined.get())
            }
            Memory::Pooled(slot) => {
                let alloc = self.pooled.get(&slot)?;
                let granted = match alloc.pool {
                    Ok(pool) => self.pools.get(&pool)?.access.allow(who, need),
                    Err(device) => who == Location::Device(device),
                };
                (granted, alloc.defined)
            }
            Memory::Plain(slot) => {
                let plain = self.plain.get(&slot)?;
                (plain.host || who == Location::Device(plain.device), true)
            }
            Memory::Nowhere => (false, false),
        };
        (granted && (defined || !reads)).then_some(address)
    }

    /// The one mapping that holds all of the bytes.
    pub fn mapping(&self, range: Slot, offset: u64, bytes: u64) -> Option<&Mapping> {
        self.ranges.get(&range)?.mappings.iter().find(|m| {
            !m.doubtful && m.offset <= offset && offset + bytes <= m.offset.saturating_add(m.size)
        })
    }

    /// Notes that all of `bytes` at `at` were written.
    pub fn written(&mut self, at: Addr, bytes: u64) {
        match at.of {
            Memory::Range(slot) => {
                if let Some(mapping) = self.mapping(slot, at.offset, bytes)
                    && mapping.size == bytes
                {
                    mapping.defined.set(true);
                }
            }
            Memory::Pooled(slot) => {
                if let Some(alloc) = self.pooled.get_mut(&slot)
                    && alloc.size == bytes
                {
                    alloc.defined = true;
                }
            }
            Memory::Plain(_) | Memory::Nowhere => {}
        }
    }

    /// The lowest slot whose handle is the same object.
    pub fn same_handle(&self, handle: PhysicalHandle) -> Option<Slot> {
        self.handles
            .iter()
            .find(|(_, held)| **held == handle)
            .map(|(slot, _)| *slot)
    }

    /// Whether a mapping was made with this handle.
    pub fn is_mapped(&self, handle: PhysicalHandle) -> bool {
        self.ranges
            .values()
            .flat_map(|range| &range.mappings)
            .any(|mapping| mapping.handle == handle)
    }

    /// An address that a driver returned, in terms of the memory that was asked about.
    pub fn describe(&self, address: u64, asked: Addr) -> String {
        if address == 0 {
            return "null".into();
        }
        let start = Addr {
            of: asked.of,
            offset: 0,
        };
        let Some(base) = self.address(start, 0) else {
            return "elsewhere".into();
        };
        let offset = address.wrapping_sub(base.0);
        let found = Addr { offset, ..asked };
        match self.address(found, 0) {
            Some(_) => found.to_string(),
            None => "elsewhere".into(),
        }
    }
}
