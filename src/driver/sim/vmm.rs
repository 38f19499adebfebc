//! Virtual memory management: physical memory, addresses, memory mapped there, and access rights to it.

use std::sync::Arc;

use super::capacity::Counted;
use super::fault::{Answer, fail};
use super::memory::{self, Memory, Purpose};
use super::space::{GRANULARITY, Range, Window, is_granular};
use super::state::{Kind, Mapping, Physical, Reference, Region, State};
use crate::*;

impl State {
    pub fn mem_create(&mut self, size: u64, props: &AllocationProps) -> Answer<PhysicalHandle> {
        if !is_granular(size) {
            return fail(Code::INVALID_VALUE);
        }
        self.check_location(props.location, props.handle_types)?;
        if props.gpu_direct_rdma && props.location.is_host() {
            return fail(Code::INVALID_VALUE);
        }
        if size > self.capacity.largest(props.location) {
            self.empty_pools();
            return fail(Code::OUT_OF_MEMORY); // the driver checks this before the handle types
        }
        self.check_fabric(props.location, props.handle_types)?;
        let memory =
            self.new_memory(Purpose::Physical, props.location, props.handle_types, size)?;
        Ok(self.hand_out(memory, size, *props, None))
    }

    /// Checks that memory can lie at a location and that the handle types exist there.
    pub fn check_location(&self, location: Location, types: HandleTypes) -> Answer {
        let version = self.machine.driver_version;
        let known = match version {
            CudaVersion(12030..) => HandleTypes::POSIX_FD | HandleTypes::FABRIC,
            _ => HandleTypes::POSIX_FD,
        };
        if !known.contains(types) {
            return fail(Code::INVALID_VALUE);
        }
        match location {
            Location::Device(device) => self.device(device).map(drop),
            Location::HostNuma(node) if self.machine.gives_memory_on(NodeId(node)) => Ok(()),
            Location::Host if version >= CudaVersion(13000) && types == HandleTypes::NONE => Ok(()),
            _ => fail(Code::INVALID_VALUE),
        }
    }

    /// Checks that FABRIC is available if requested.
    pub fn check_fabric(&self, location: Location, types: HandleTypes) -> Answer {
        if !types.contains(HandleTypes::FABRIC) {
            Ok(())
        } else if !self.machine.imex_channel {
            fail(Code::NOT_PERMITTED)
        } else if location.is_host() && !self.machine.gpus.iter().all(|gpu| gpu.coherent) {
            fail(Code::NOT_SUPPORTED)
        } else {
            Ok(())
        }
    }

    fn hand_out(
        &mut self,
        memory: Arc<Memory>,
        size: u64,
        props: AllocationProps,
        counted: Option<Counted>,
    ) -> PhysicalHandle {
        let handle = PhysicalHandle(self.number());
        let physical = Arc::new(Physical {
            handle,
            memory,
            props,
            size,
            _counted: counted,
        });
        self.references
            .insert(handle.0, Reference { physical, count: 1 });
        handle
    }

    pub fn physical(&self, handle: PhysicalHandle) -> Answer<&Arc<Physical>> {
        let reference = self.references.get(handle.0);
        Ok(&reference.ok_or(Code::INVALID_VALUE)?.physical)
    }

    pub fn mem_release(&mut self, handle: PhysicalHandle) -> Answer {
        let reference = self.references.get_mut(handle.0);
        let reference = reference.ok_or(Code::INVALID_VALUE)?;
        reference.count -= 1;
        if reference.count == 0 {
            self.references.remove(handle.0);
        }
        Ok(())
    }

    pub fn mem_retain(&mut self, ptr: DevicePtr) -> Answer<PhysicalHandle> {
        let (_, region) = self.region(ptr.0).ok_or(Code::INVALID_VALUE)?;
        let mapping = region.mapping().ok_or(Code::INVALID_VALUE)?;
        let physical = Arc::clone(&mapping.physical);
        let handle = physical.handle;
        match self.references.get_mut(handle.0) {
            Some(reference) => reference.count += 1,
            None => {
                let reference = Reference { physical, count: 1 };
                self.references.insert(handle.0, reference);
            }
        }
        Ok(handle)
    }

    pub fn mem_properties(&self, handle: PhysicalHandle) -> Answer<AllocationProps> {
        let physical = self.physical(handle)?;
        // Memory of the host as a whole reports its first node.
        let location = match physical.props.location {
            Location::Host => Location::HostNuma(self.machine.nodes[0].id),
            location => location,
        };
        Ok(AllocationProps {
            location,
            ..physical.props
        })
    }

    pub fn mem_export(
        &mut self,
        handle: PhysicalHandle,
        kind: HandleType,
    ) -> Answer<ShareableHandle> {
        let physical = Arc::clone(self.physical(handle)?);
        if !physical.props.handle_types.contains(kind.into()) {
            return fail(Code::INVALID_VALUE);
        }
        let shareable = memory::export(&physical.memory, kind)?;
        self.remember(&physical.memory);
        Ok(shareable)
    }

    pub fn mem_import(&mut self, handle: &ShareableHandle) -> Answer<PhysicalHandle> {
        let imported = memory::import(handle, Purpose::Physical, self.machine.imex_channel)?;
        let known = self
            .exported
            .get(imported.label.id)
            .and_then(|m| m.upgrade());
        let memory = known.unwrap_or_else(|| Arc::new(imported));
        self.remember(&memory);
        let size = memory.size();
        if !is_granular(size) {
            return fail(Code::INVALID_VALUE);
        }
        let counted = Counted::new(&memory);
        let props = AllocationProps::at(memory.label.location);
        Ok(self.hand_out(memory, size, props, Some(counted)))
    }

    pub fn mem_address_reserve(
        &mut self,
        size: u64,
        alignment: u64,
        hint: u64,
    ) -> Answer<DevicePtr> {
        if !is_granular(size)
            || (alignment != 0 && !alignment.is_power_of_two())
            || !hint.is_multiple_of(alignment.max(GRANULARITY))
        {
            return fail(Code::INVALID_VALUE);
        }
        if self.window.is_none() {
            // Without a window, as under a limit on addresses, each reservation is separate.
            self.window = Window::new(self.placement).ok().map(Arc::new);
        }
        let window = self.window.as_ref();
        let range = match window.and_then(|window| window.take(size, alignment, hint)) {
            Some(range) => range,
            None if hint == 0 => Range::reserve(size, alignment)?,
            None => Range::reserve_from(size, alignment, hint)?,
        };
        let start = range.start;
        self.reservations.insert(start, range);
        Ok(DevicePtr(start))
    }

    pub fn mem_address_free(&mut self, ptr: DevicePtr, size: u64) -> Answer {
        match self.reservations.get(ptr.0) {
            Some(range) if range.len == size && !self.any_mapped(ptr.0, size) => {
                self.reservations.remove(ptr.0);
                Ok(())
            }
            _ => fail(Code::INVALID_VALUE),
        }
    }

    fn any_mapped(&self, start: u64, len: u64) -> bool {
        let last = self.regions.up_to(start + len - 1);
        last.is_some_and(|(at, region)| at + region.len > start)
    }

    pub fn mem_map(
        &mut self,
        ptr: DevicePtr,
        size: u64,
        offset: u64,
        handle: PhysicalHandle,
    ) -> Answer {
        let physical = Arc::clone(self.physical(handle)?);
        // The mapping must cover the memory from its start; the driver checks this before anything else
        // about it.
        if size < physical.size || offset != 0 {
            return fail(Code::NOT_SUPPORTED);
        }
        if size > physical.size || !is_granular(ptr.0) {
            return fail(Code::INVALID_VALUE);
        }
        let range = self.reservation(ptr.0, size);
        let range = range.ok_or(Code::INVALID_VALUE)?;
        if self.any_mapped(ptr.0, size) {
            return fail(Code::INVALID_VALUE);
        }
        range.place(ptr.0, size, physical.memory.file(), 0, Access::None)?;
        let region = Region {
            len: size,
            memory: Arc::clone(&physical.memory),
            offset: 0,
            kind: Kind::Mapping(Mapping {
                physical,
                host: Access::None,
                host_newer: false,
                counted: None,
                devices: self.nobody(),
            }),
        };
        self.regions.insert(ptr.0, region);
        Ok(())
    }

    pub fn mem_unmap(&mut self, ptr: DevicePtr, size: u64) -> Answer {
        let range = self.reservation(ptr.0, size).filter(|_| size > 0);
        let range = range.ok_or(Code::INVALID_VALUE)?;
        // Only whole mappings; gaps are allowed: unmapped addresses may be unmapped again.
        let end = ptr.0 + size;
        let begins = self.region(ptr.0).is_none_or(|(start, _)| start == ptr.0);
        let ends = |(start, region): (u64, &Region)| start + region.len == end;
        if !begins || !self.region(end - 1).is_none_or(ends) {
            return fail(Code::INVALID_VALUE);
        }
        range.clear(ptr.0, size)?;
        self.regions.remove_within(ptr.0..end);
        Ok(())
    }

    /// Returns the starts of the mappings that make up a range exactly.
    fn whole_mappings(&self, ptr: DevicePtr, size: u64) -> Answer<Vec<u64>> {
        self.reservation(ptr.0, size).ok_or(Code::INVALID_VALUE)?;
        let mut starts = Vec::new();
        let mut at = ptr.0;
        let regions = self.regions.within(ptr.0..ptr.0 + size).iter();
        for &(start, ref region) in regions.filter(|(_, region)| region.mapping().is_some()) {
            if start != at {
                return fail(Code::INVALID_VALUE);
            }
            starts.push(start);
            at += region.len;
        }
        if size > 0 && at == ptr.0 + size {
            Ok(starts)
        } else {
            fail(Code::INVALID_VALUE)
        }
    }

    /// Grants mapping by mapping, and within each mapping location by location: a failure keeps the grants
    /// before it.
    pub fn mem_set_access(&mut self, ptr: DevicePtr, size: u64, descs: &[AccessDesc]) -> Answer {
        let starts = self.whole_mappings(ptr, size)?;
        // Unknown locations are reported before impossible grants.
        let unknown = |desc: &AccessDesc| match desc.location {
            Location::Device(device) => self.device(device).is_err(),
            Location::HostNumaCurrent => true,
            _ => false,
        };
        if descs.is_empty() || descs.iter().any(unknown) {
            return fail(Code::INVALID_VALUE);
        }
        for start in starts {
            for desc in descs {
                self.grant(start, desc)?;
            }
        }
        Ok(())
    }

    /// Grants one location access to the mapping at `start`.
    fn grant(&mut self, start: u64, desc: &AccessDesc) -> Answer {
        let region = self.regions.get(start).ok_or(Code::INVALID_VALUE)?;
        let mapping = region.mapping().ok_or(Code::INVALID_VALUE)?;
        self.check_grant(desc, mapping.physical.props.location)?;
        let is_host = desc.location.is_host();
        let mut counted = None;
        if is_host {
            if desc.access != Access::None && mapping.counted.is_none() {
                let most = self.machine.max_mappings;
                if most.is_some_and(|most| self.host_mappings() >= most) {
                    return fail(Code::OUT_OF_MEMORY);
                }
                let within = Counted::within(&region.memory, self.machine.memory_references);
                counted = Some(within.ok_or(Code::INVALID_VALUE)?);
            }
            let range = self.reservation(start, region.len);
            let range = range.ok_or(Code::INVALID_VALUE)?;
            range.protect(start, region.len, desc.access)?;
        }
        let kind = self.regions.get_mut(start).map(|region| &mut region.kind);
        let Some(Kind::Mapping(mapping)) = kind else {
            return fail(Code::INVALID_VALUE);
        };
        if is_host && (desc.access == Access::None || counted.is_some()) {
            mapping.counted = counted;
        }
        let (access, is_first) = match desc.location {
            Location::Device(device) => (&mut mapping.devices[device as usize], device == 0),
            _ => (&mut mapping.host, false),
        };
        if *access != desc.access && (is_host || is_first) {
            mapping.host_newer = is_host;
        }
        *access = desc.access;
        Ok(())
    }

    /// Returns the number of mappings that the CPU has access to.
    pub fn host_mappings(&self) -> u64 {
        let mappings = self.regions.values().filter_map(Region::mapping);
        mappings.filter(|it| it.counted.is_some()).count() as u64
    }

    /// Checks that `desc` can be granted for memory at `location`.
    pub fn check_grant(&self, desc: &AccessDesc, location: Location) -> Answer {
        match (desc.location, location) {
            (Location::Device(device), _) => {
                if self.device(device).is_err() {
                    fail(Code::INVALID_VALUE)
                } else if !self.reaches(device, location) {
                    fail(Code::INVALID_DEVICE)
                } else {
                    Ok(())
                }
            }
            // The CPU reaches a GPU's memory only if that is a NUMA node of its own.
            (_, Location::Device(device)) if desc.access != Access::None => {
                match self.machine.gpu(device) {
                    Some(gpu) if !gpu.coherent || gpu.numa_id < 0 => fail(Code::NOT_SUPPORTED),
                    _ => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    pub fn mem_get_access(&self, location: Location, ptr: DevicePtr) -> Answer<u64> {
        let region = self.region(ptr.0);
        if region.is_none() && self.reservation(ptr.0, 1).is_none() {
            return fail(Code::INVALID_VALUE);
        }
        if let Location::Device(device) = location {
            self.device(device)?;
        }
        if location == Location::HostNumaCurrent {
            return fail(Code::INVALID_DEVICE);
        }
        let (_, region) = region.ok_or(Code::INVALID_VALUE)?;
        // The call knows only memory that `cuMemMap` mapped.
        let access = region.mapping().map_or(Access::None, |mapping| {
            let first = mapping.devices.first().copied();
            match (location, mapping.host, first.unwrap_or(Access::None)) {
                (Location::Device(device), ..) => mapping.devices[device as usize],
                // HOST does not mean the CPU here: it is the CPU or GPU 0, whichever got its access last.
                (Location::Host, Access::None, first) => first,
                (Location::Host, _, first) if first != Access::None && !mapping.host_newer => first,
                (_, host, _) => host,
            }
        });
        Ok(access.flags().into())
    }
}
