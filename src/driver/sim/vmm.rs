//! Virtual memory management: create, map, grant, share.

use std::os::fd::AsFd;
use std::sync::Arc;

use super::memory::{Memory, Purpose};
use super::references::Counted;
use super::share;
use super::space::{Range, Window};
use super::state::{
    Answer, Kind, Physical, Reference, Region, State, exhausted, fail, is_granular,
};
use crate::driver::{
    Access, AccessDesc, AllocationProps, Code, CudaVersion, DevicePtr, HandleType, HandleTypes,
    Location, NodeId, PhysicalHandle, ShareableHandle,
};

/// Reservations of this size were refused where the hint's addresses were taken: 1 TiB, which is
/// to be had without a hint.
const NEAR_HINT: u64 = 1 << 40;

impl State {
    pub(super) fn mem_create(
        &mut self,
        size: u64,
        props: &AllocationProps,
    ) -> Answer<PhysicalHandle> {
        if !is_granular(size) {
            return fail(Code::INVALID_VALUE);
        }
        self.check_location(props.location, props.handle_types)?;
        match props.location {
            Location::Host if props.handle_types != HandleTypes::NONE => {
                return fail(Code::INVALID_VALUE);
            }
            Location::Device(_) => {}
            _ if props.gpu_direct_rdma => return fail(Code::INVALID_VALUE),
            _ => {}
        }
        if size > self.capacity.largest(props.location) {
            return fail(Code::OUT_OF_MEMORY); // Before the handle types are looked at.
        }
        self.check_fabric(props.location, props.handle_types)?;
        let memory =
            self.new_memory(Purpose::Physical, props.location, props.handle_types, size)?;
        let rdma = props.gpu_direct_rdma;
        Ok(self.hand_out(memory, size, props.handle_types, rdma, None))
    }

    /// Checks that memory can lie at a location and that the handle types exist.
    pub(super) fn check_location(&self, location: Location, types: HandleTypes) -> Answer<()> {
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
            Location::HostNuma(node) if self.machine.node(NodeId(node)).is_some() => Ok(()),
            Location::Host if version >= CudaVersion(13000) => Ok(()),
            _ => fail(Code::INVALID_VALUE),
        }
    }

    /// Checks that FABRIC, where it is asked for, can be had.
    pub(super) fn check_fabric(&self, location: Location, types: HandleTypes) -> Answer<()> {
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
        handle_types: HandleTypes,
        gpu_direct_rdma: bool,
        counted: Option<Counted>,
    ) -> PhysicalHandle {
        let handle = PhysicalHandle(self.number());
        let physical = Arc::new(Physical {
            handle,
            location: memory.label.location,
            memory,
            handle_types,
            gpu_direct_rdma,
            size,
            _counted: counted,
        });
        self.references
            .insert(handle.0, Reference { physical, count: 1 });
        handle
    }

    fn physical(&self, handle: PhysicalHandle) -> Answer<&Arc<Physical>> {
        match self.references.get(&handle.0) {
            Some(reference) => Ok(&reference.physical),
            None => fail(Code::INVALID_VALUE),
        }
    }

    pub(super) fn mem_release(&mut self, handle: PhysicalHandle) -> Answer<()> {
        let Some(reference) = self.references.get_mut(&handle.0) else {
            return fail(Code::INVALID_VALUE);
        };
        reference.count -= 1;
        if reference.count == 0 {
            self.references.remove(&handle.0);
        }
        Ok(())
    }

    pub(super) fn mem_retain(&mut self, ptr: DevicePtr) -> Answer<PhysicalHandle> {
        let physical = match self.region(ptr.0) {
            Some((_, region)) => match &region.kind {
                Kind::Mapping { physical, .. } => Arc::clone(physical),
                _ => return fail(Code::INVALID_VALUE),
            },
            None => return fail(Code::INVALID_VALUE),
        };
        let handle = physical.handle;
        self.references
            .entry(handle.0)
            .or_insert(Reference { physical, count: 0 })
            .count += 1;
        Ok(handle)
    }

    pub(super) fn mem_properties(&self, handle: PhysicalHandle) -> Answer<AllocationProps> {
        let physical = self.physical(handle)?;
        // Memory of the host as a whole reads back as that of its first node.
        let location = match physical.location {
            Location::Host => Location::HostNuma(self.machine.nodes[0].id),
            location => location,
        };
        Ok(AllocationProps {
            location,
            handle_types: physical.handle_types,
            gpu_direct_rdma: physical.gpu_direct_rdma,
        })
    }

    pub(super) fn mem_address_reserve(
        &mut self,
        size: u64,
        alignment: u64,
        hint: u64,
    ) -> Answer<DevicePtr> {
        if !is_granular(size) || (alignment != 0 && !alignment.is_power_of_two()) {
            return fail(Code::INVALID_VALUE);
        }
        if alignment != 0 && !hint.is_multiple_of(alignment) {
            return fail(Code::INVALID_VALUE);
        }
        let range = self.find_addresses(size, alignment, hint)?;
        let start = range.start();
        self.reservations.insert(start, range);
        Ok(DevicePtr(start))
    }

    fn find_addresses(&mut self, size: u64, alignment: u64, hint: u64) -> Answer<Range> {
        if self.window.is_none() {
            // Without one, as under a limit on addresses, each reservation is made by itself.
            self.window = Window::new().ok().map(Arc::new);
        }
        let take = |hint| self.window.as_ref()?.take(size, alignment, hint);
        if hint != 0 {
            if let Some(range) = take(hint) {
                return Ok(range);
            }
            let range = Range::reserve(size, alignment, hint).map_err(exhausted)?;
            return match range.start() == hint {
                true => Ok(range),
                // A hint that is taken keeps the search near it, where so much is never free.
                false if size >= NEAR_HINT => fail(Code::OUT_OF_MEMORY),
                false => Ok(take(0).unwrap_or(range)),
            };
        }
        match take(0) {
            Some(range) => Ok(range),
            None => Range::reserve(size, alignment, 0).map_err(exhausted),
        }
    }

    pub(super) fn mem_address_free(&mut self, ptr: DevicePtr, size: u64) -> Answer<()> {
        match self.reservations.get(&ptr.0) {
            Some(range) if range.len() == size && !self.any_mapped(ptr.0, size) => {
                self.reservations.remove(&ptr.0);
                Ok(())
            }
            _ => fail(Code::INVALID_VALUE),
        }
    }

    fn any_mapped(&self, start: u64, len: u64) -> bool {
        let last = self.regions.range(..start + len).next_back();
        last.is_some_and(|(&at, region)| at + region.len > start)
    }

    pub(super) fn mem_map(
        &mut self,
        ptr: DevicePtr,
        size: u64,
        offset: u64,
        handle: PhysicalHandle,
    ) -> Answer<()> {
        let physical = Arc::clone(self.physical(handle)?);
        // All of it or nothing: whatever else is wrong with a part, this comes first.
        if size < physical.size || offset != 0 {
            return fail(Code::NOT_SUPPORTED);
        }
        if size > physical.size || !is_granular(ptr.0) {
            return fail(Code::INVALID_VALUE);
        }
        let Some(range) = self.reservation(ptr.0, size) else {
            return fail(Code::INVALID_VALUE);
        };
        if self.any_mapped(ptr.0, size) {
            return fail(Code::INVALID_VALUE);
        }
        range
            .place(ptr.0, size, physical.memory.file(), 0, Access::None)
            .map_err(exhausted)?;
        let region = Region {
            len: size,
            memory: Arc::clone(&physical.memory),
            offset: 0,
            kind: Kind::Mapping {
                physical,
                host: Access::None,
                counted: None,
                devices: self.nobody(),
            },
        };
        self.regions.insert(ptr.0, region);
        Ok(())
    }

    pub(super) fn mem_unmap(&mut self, ptr: DevicePtr, size: u64) -> Answer<()> {
        if size == 0 || self.reservation(ptr.0, size).is_none() {
            return fail(Code::INVALID_VALUE);
        }
        // Whole mappings only; gaps are fine: what is unmapped may be unmapped again.
        let end = ptr.0 + size;
        let begins = self.region(ptr.0).is_none_or(|(start, _)| start == ptr.0);
        let ends = |(start, region): (u64, &Region)| start + region.len == end;
        if !begins || !self.region(end - 1).is_none_or(ends) {
            return fail(Code::INVALID_VALUE);
        }
        while let Some((start, len)) = self
            .regions
            .range(ptr.0..end)
            .next()
            .map(|(&at, region)| (at, region.len))
        {
            if let Some(range) = self.reservation(start, len) {
                range.clear(start, len).map_err(exhausted)?;
            }
            self.regions.remove(&start);
        }
        Ok(())
    }

    /// The starts of the mappings that make up a range exactly.
    fn whole_mappings(&self, ptr: DevicePtr, size: u64) -> Answer<Vec<u64>> {
        if size == 0 || self.reservation(ptr.0, size).is_none() {
            return fail(Code::INVALID_VALUE);
        }
        let end = ptr.0 + size;
        let mut starts = Vec::new();
        let mut at = ptr.0;
        while at < end {
            match self.regions.get(&at) {
                Some(region) if matches!(region.kind, Kind::Mapping { .. }) => {
                    starts.push(at);
                    at += region.len;
                }
                _ => return fail(Code::INVALID_VALUE),
            }
        }
        if at == end {
            Ok(starts)
        } else {
            fail(Code::INVALID_VALUE)
        }
    }

    pub(super) fn mem_set_access(
        &mut self,
        ptr: DevicePtr,
        size: u64,
        descs: &[AccessDesc],
    ) -> Answer<()> {
        let starts = self.whole_mappings(ptr, size)?;
        // Devices that do not exist come before what cannot be granted.
        let unknown = |desc: &AccessDesc| match desc.location {
            Location::Device(device) => self.device(device).is_err(),
            _ => false,
        };
        if descs.is_empty() || descs.iter().any(unknown) {
            return fail(Code::INVALID_VALUE);
        }
        for start in &starts {
            let location = match &self.regions[start].kind {
                Kind::Mapping { physical, .. } => physical.location,
                _ => return fail(Code::INVALID_VALUE),
            };
            for desc in descs {
                self.check_grant(desc, location)?;
            }
        }
        let host = descs.iter().rev().find(|desc| desc.location.is_host());
        if let Some(desc) = host {
            let counted = self.count_cpu(&starts, desc.access)?;
            self.protect(&starts, desc.access)?;
            self.keep_counted(counted);
        }
        for start in starts {
            if let Some(region) = self.regions.get_mut(&start)
                && let Kind::Mapping { devices, .. } = &mut region.kind
            {
                for desc in descs {
                    if let Location::Device(device) = desc.location {
                        devices[device as usize] = desc.access;
                    }
                }
            }
        }
        Ok(())
    }

    /// Counts the CPU mappings that a grant to the host makes, by their starts; where one of them
    /// would be too many, none. `None` for what is a CPU mapping no more.
    fn count_cpu(&self, starts: &[u64], access: Access) -> Answer<Vec<(u64, Option<Counted>)>> {
        let limit = self.machine.memory_references;
        let mut changes = Vec::new();
        for &start in starts {
            let Some(Region {
                memory,
                kind: Kind::Mapping { counted, .. },
                ..
            }) = self.regions.get(&start)
            else {
                continue;
            };
            match (access, counted) {
                (Access::None, _) => changes.push((start, None)),
                (_, Some(_)) => {}
                (_, None) => {
                    let counted = Counted::within(memory, limit).ok_or(Code::INVALID_VALUE)?;
                    changes.push((start, Some(counted)));
                }
            }
        }
        Ok(changes)
    }

    fn keep_counted(&mut self, changes: Vec<(u64, Option<Counted>)>) {
        for (start, change) in changes {
            if let Some(region) = self.regions.get_mut(&start)
                && let Kind::Mapping { counted, .. } = &mut region.kind
            {
                *counted = change;
            }
        }
    }

    /// Changes what the CPU may do with mappings: all of them or, where the kernel refuses, none.
    fn protect(&mut self, starts: &[u64], access: Access) -> Answer<()> {
        let set = |state: &mut Self, start: u64, access: Access| {
            let len = state.regions.get(&start).map_or(0, |region| region.len);
            let range = state.reservation(start, len).ok_or(Code::INVALID_VALUE)?;
            range.protect(start, len, access).map_err(exhausted)?;
            let mut before = access;
            if let Some(region) = state.regions.get_mut(&start)
                && let Kind::Mapping { host, .. } = &mut region.kind
            {
                before = std::mem::replace(host, access);
            }
            Ok(before)
        };
        let mut done = Vec::new();
        for &start in starts {
            match set(self, start, access) {
                Ok(before) => done.push((start, before)),
                Err(failure) => {
                    for (start, before) in done {
                        let _ = set(self, start, before);
                    }
                    return Err(failure);
                }
            }
        }
        Ok(())
    }

    /// Checks that what `desc` says can be granted for memory that lies at `location`.
    pub(super) fn check_grant(&self, desc: &AccessDesc, location: Location) -> Answer<()> {
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
            // The CPU reaches a GPU's memory only where that is a NUMA node of its own.
            (_, Location::Device(device)) if desc.access != Access::None => {
                match self.machine.gpu(device) {
                    Some(gpu) if !gpu.coherent || gpu.numa_id < 0 => fail(Code::NOT_SUPPORTED),
                    _ => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    pub(super) fn mem_get_access(&self, location: Location, ptr: DevicePtr) -> Answer<u64> {
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
        match region.map(|(_, region)| &region.kind) {
            Some(Kind::Mapping { host, devices, .. }) => {
                let access = match location {
                    Location::Device(device) => devices[device as usize],
                    Location::HostNuma(_) | Location::HostNumaCurrent => *host,
                    // HOST is not the CPU here: the least that GPU 0 and the CPU were granted.
                    Location::Host => devices
                        .iter()
                        .take(1)
                        .chain([host])
                        .copied()
                        .filter(|&access| access != Access::None)
                        .min()
                        .unwrap_or(Access::None),
                };
                Ok(access.flags().into())
            }
            // The call knows nothing of memory that was not mapped by hand.
            Some(_) => Ok(Access::None.flags().into()),
            None => fail(Code::INVALID_VALUE),
        }
    }

    pub(super) fn mem_export(
        &mut self,
        handle: PhysicalHandle,
        kind: HandleType,
    ) -> Answer<ShareableHandle> {
        let physical = Arc::clone(self.physical(handle)?);
        if !physical.handle_types.contains(kind.into()) {
            return fail(Code::INVALID_VALUE);
        }
        let shareable = share::export(&physical.memory, kind).map_err(exhausted)?;
        self.remember(&physical.memory);
        Ok(shareable)
    }

    pub(super) fn mem_import(&mut self, handle: &ShareableHandle) -> Answer<PhysicalHandle> {
        let imported = match handle {
            ShareableHandle::PosixFd(fd) => {
                Memory::import(fd.as_fd(), Purpose::Physical).ok_or(Code::UNKNOWN)?
            }
            ShareableHandle::Fabric(handle) => {
                share::import(handle, Purpose::Physical, self.machine.imex_channel)?
            }
        };
        let known = self
            .exported
            .get(&imported.label.id)
            .and_then(|m| m.upgrade());
        let memory = known.unwrap_or_else(|| Arc::new(imported));
        self.remember(&memory);
        let size = memory.size();
        if !is_granular(size) {
            return fail(Code::INVALID_VALUE);
        }
        let counted = Counted::new(&memory);
        Ok(self.hand_out(memory, size, HandleTypes::NONE, false, Some(counted)))
    }
}
