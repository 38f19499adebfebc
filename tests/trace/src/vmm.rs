//! The operations of a run on physical memory and addresses.

use std::fs::File;
use std::os::fd::OwnedFd;

use super::Value;
use super::addr::{Addr, Memory, Slot};
use super::op::{Op, Source};
use super::run::{Run, Step, again, done, number};
use super::state::{Grants, Mapping, Physical, Range};
use egmem::driver::{
    AllocationProps, DevicePtr, FabricHandle, PhysicalHandle, PointerAttribute, ShareableHandle,
};

impl Run<'_> {
    pub(super) fn vmm_step(&mut self, op: &Op) -> Step {
        match *op {
            Op::Granularity { ref props, kind } => Some(
                self.driver
                    .mem_granularity(props, kind)
                    .map(|bytes| vec![number(bytes)]),
            ),
            Op::Create {
                out,
                size,
                ref props,
            } => self.create(out, size, props),
            Op::Release { handle, twice } => self.release(handle, twice),
            Op::Reserve {
                out,
                size,
                alignment,
                hint,
            } => self.reserve(out, size, alignment, hint),
            Op::AddressFree { range, size, twice } => self.address_free(range, size, twice),
            Op::Map {
                at,
                size,
                offset,
                handle,
            } => self.map(at, size, offset, handle),
            Op::Unmap { at, size } => self.unmap(at, size),
            Op::SetAccess {
                at,
                size,
                ref access,
            } => {
                let ptr = self.own_range(at, size)?;
                // SAFETY: `own_range` says that the bytes are in this run's own reservation, or on
                // the first page, which the driver refuses; nothing uses them during the call.
                let result = unsafe { self.driver.mem_set_access(ptr, size, access) };
                for mapping in self.overlapping(at, size) {
                    for desc in access {
                        // A failed call may have granted access to a part of the mappings.
                        match result.is_ok() {
                            true => mapping.access.set(*desc),
                            false => mapping.access.limit(*desc),
                        }
                    }
                }
                done(result)
            }
            Op::GetAccess { at, location } => {
                let ptr = self.state.address(at, 0)?;
                let flags = self.driver.mem_get_access(location, ptr);
                Some(flags.map(|flags| vec![number(flags)]))
            }
            Op::Export { out, handle, kind } => {
                let handle = *self.state.handles.get(&handle)?;
                // SAFETY: the handle is this run's own and not given back.
                let result = unsafe { self.driver.mem_export(handle, kind) };
                Some(result.map(|exported| {
                    self.state.exported.insert(out, exported);
                    Vec::new()
                }))
            }
            Op::Import { out, from } => self.import(out, from),
            Op::Properties { handle } => {
                let handle = *self.state.handles.get(&handle)?;
                // SAFETY: the handle is this run's own and not given back.
                let props = unsafe { self.driver.mem_properties(handle) };
                Some(props.map(|props| {
                    vec![
                        Value::Text(props.location.to_string()),
                        number(props.handle_types.bits()),
                        number(props.gpu_direct_rdma),
                    ]
                }))
            }
            Op::Retain { out, at } => {
                let ptr = self.state.address(at, 0)?;
                let device = match at.of {
                    Memory::Range(slot) => {
                        let handle = self.state.mapping(slot, at.offset, 0).map(|m| m.handle);
                        handle.and_then(|h| self.state.physical.get(&h).map(|p| p.device))
                    }
                    _ => None,
                };
                let handle = self.driver.mem_retain(ptr);
                Some(handle.map(|handle| self.hold(out, handle, device.unwrap_or(true))))
            }
            Op::PointerAttribute { at, attribute } => {
                let ptr = self.state.address(at, 0)?;
                let value = self.driver.pointer_attribute(ptr, attribute);
                Some(value.map(|value| {
                    vec![match attribute {
                        PointerAttribute::DevicePointer
                        | PointerAttribute::HostPointer
                        | PointerAttribute::RangeStartAddr => {
                            Value::Text(self.state.describe(value, at))
                        }
                        _ => number(value),
                    }]
                }))
            }
            Op::AddressRange { at } => {
                let ptr = self.state.address(at, 0)?;
                let range = self.driver.mem_address_range(ptr);
                Some(range.map(|(base, size)| {
                    vec![Value::Text(self.state.describe(base.0, at)), number(size)]
                }))
            }
            Op::DmaBuf { at, size } => {
                let ptr = self.state.address(at, size)?;
                if self.state.shares_pages(at) {
                    return None;
                }
                // SAFETY: nothing is written through the fd, which is closed at once.
                done(unsafe { self.driver.mem_dma_buf(ptr, size) })
            }
            _ => None,
        }
    }

    fn create(&mut self, out: Slot, size: u64, props: &AllocationProps) -> Step {
        let handle = self.driver.mem_create(size, props);
        Some(handle.map(|handle| {
            self.hold(out, handle, !props.location.is_host());
            Vec::new()
        }))
    }

    /// Notes a reference to `handle`; answers which slot has the same handle.
    fn hold(&mut self, out: Slot, handle: PhysicalHandle, device: bool) -> Vec<Value> {
        let same = match self.state.same_handle(handle) {
            Some(slot) => format!("h{slot}"),
            None => "new".into(),
        };
        // Mapped but released memory may keep its number: then it is the same memory still.
        let mapped = self
            .state
            .ranges
            .values()
            .flat_map(|range| &range.mappings)
            .find(|mapping| mapping.handle == handle)
            .map(|mapping| mapping.defined.clone());
        self.state
            .physical
            .entry(handle)
            .or_insert_with(|| Physical {
                device,
                defined: mapped.unwrap_or_else(|| std::rc::Rc::new(std::cell::Cell::new(!device))),
                references: 0,
            })
            .references += 1;
        self.state.handles.insert(out, handle);
        vec![Value::Text(same)]
    }

    fn release(&mut self, slot: Slot, twice: bool) -> Step {
        let handle = *self.state.handles.get(&slot)?;
        let last = self.state.physical.get(&handle)?.references == 1;
        if twice && (!last || self.state.is_mapped(handle)) {
            return None;
        }
        // SAFETY: this run holds a reference to the handle; mappings keep the memory.
        let result = unsafe { self.driver.mem_release(handle) };
        Some(result.map(|()| {
            self.state.handles.remove(&slot);
            if last {
                self.state.physical.remove(&handle);
            } else if let Some(physical) = self.state.physical.get_mut(&handle) {
                physical.references -= 1;
            }
            // SAFETY: nothing was created since, so the number names no other memory.
            twice
                .then(|| again(unsafe { self.driver.mem_release(handle) }))
                .into_iter()
                .collect()
        }))
    }

    fn reserve(&mut self, out: Slot, size: u64, alignment: u64, hint: Option<Slot>) -> Step {
        let hint = match hint {
            Some(slot) => {
                let hinted = self.state.ranges.get(&slot)?;
                if hinted.decides(size, alignment) {
                    return None;
                }
                hinted.base.0
            }
            None => 0,
        };
        let base = self.driver.mem_address_reserve(size, alignment, hint);
        Some(base.map(|base| {
            let range = Range {
                base,
                size,
                alignment: alignment.max(2 << 20),
                mappings: Vec::new(),
            };
            self.state.ranges.insert(out, range);
            vec![number(base.0.is_multiple_of(alignment.max(2 << 20)))]
        }))
    }

    fn address_free(&mut self, slot: Slot, size: u64, twice: bool) -> Step {
        let range = self.state.ranges.get(&slot)?;
        let base = range.base;
        // SAFETY: the range is this run's own; if something is mapped there, nothing uses it.
        let result = unsafe { self.driver.mem_address_free(base, size) };
        Some(result.map(|()| {
            self.state.ranges.remove(&slot);
            // SAFETY: nothing was reserved since, so nothing uses the address.
            twice
                .then(|| again(unsafe { self.driver.mem_address_free(base, size) }))
                .into_iter()
                .collect()
        }))
    }

    /// The address of `at`, for calls that change mappings: in a range, or nowhere.
    fn own_range(&self, at: Addr, size: u64) -> Option<DevicePtr> {
        match at.of {
            Memory::Range(_) | Memory::Nowhere => self.state.address(at, size),
            Memory::Pooled(_) | Memory::Plain(_) => None,
        }
    }

    fn overlapping(&mut self, at: Addr, size: u64) -> impl Iterator<Item = &mut Mapping> {
        let range = match at.of {
            Memory::Range(slot) => self.state.ranges.get_mut(&slot),
            _ => None,
        };
        let mappings = range.map(|range| range.mappings.iter_mut());
        mappings
            .into_iter()
            .flatten()
            .filter(move |m| m.offset < at.offset + size && at.offset < m.offset + m.size)
    }

    fn map(&mut self, at: Addr, size: u64, offset: u64, handle: Slot) -> Step {
        let ptr = self.own_range(at, size)?;
        let handle = *self.state.handles.get(&handle)?;
        let defined = self.state.physical.get(&handle)?.defined.clone();
        // SAFETY: the bytes are in this run's own reservation, or on the first page, which the
        // driver refuses; the handle is held.
        let result = unsafe { self.driver.mem_map(ptr, size, offset, handle) };
        if result.is_ok()
            && let Memory::Range(slot) = at.of
            && let Some(range) = self.state.ranges.get_mut(&slot)
        {
            range.mappings.push(Mapping {
                offset: at.offset,
                size,
                handle,
                defined,
                access: Grants::default(),
                doubtful: false,
            });
        }
        done(result)
    }

    fn unmap(&mut self, at: Addr, size: u64) -> Step {
        let ptr = self.own_range(at, size)?;
        // SAFETY: the bytes are in this run's own reservation, or on the first page, where nothing
        // is; nothing uses them.
        let result = unsafe { self.driver.mem_unmap(ptr, size) };
        if result.is_ok() {
            self.overlapping(at, size).for_each(|m| m.doubtful = true);
            if let Memory::Range(slot) = at.of
                && let Some(range) = self.state.ranges.get_mut(&slot)
            {
                let inside =
                    |m: &Mapping| at.offset <= m.offset && m.offset + m.size <= at.offset + size;
                range.mappings.retain(|m| !inside(m));
            }
        }
        done(result)
    }

    fn import(&mut self, out: Slot, from: Source) -> Step {
        let garbage;
        let handle = match from {
            Source::Exported(slot) => self.state.exported.get(&slot)?,
            Source::GarbageFd => {
                garbage = ShareableHandle::PosixFd(OwnedFd::from(File::open("/dev/null").ok()?));
                &garbage
            }
            Source::GarbageFabric => {
                garbage = ShareableHandle::Fabric(FabricHandle::from_bytes(&[0x5a; 64]));
                &garbage
            }
        };
        let handle = self.driver.mem_import(handle);
        Some(handle.map(|handle| {
            // Imported device memory counts as unknown until it is written through the import.
            // SAFETY: the handle was just imported.
            let props = unsafe { self.driver.mem_properties(handle) };
            let device = props.map_or(true, |props| !props.location.is_host());
            self.hold(out, handle, device)
        }))
    }
}
