//! Virtual memory management: create, map, grant, share.

use std::os::fd::AsFd;
use std::sync::Arc;

use super::memory::{Memory, Purpose};
use super::space::Range;
use super::state::{
    Answer, Kind, Physical, Reference, Region, State, exhausted, fail, is_granular,
};
use super::{GRANULARITY, share};
use crate::driver::{
    Access, AccessDesc, AllocationProps, Code, CudaVersion, DevicePtr, HandleType, HandleTypes,
    Location, NodeId, PhysicalHandle, ShareableHandle,
};

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
        self.check_fabric(props.location, props.handle_types)?;
        let memory =
            self.new_memory(Purpose::Physical, props.location, props.handle_types, size)?;
        Ok(self.hand_out(memory, size, props.handle_types, props.gpu_direct_rdma))
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
    ) -> PhysicalHandle {
        let handle = PhysicalHandle(self.number());
        let physical = Arc::new(Physical {
            handle,
            location: memory.label.location,
            memory,
            handle_types,
            gpu_direct_rdma,
            size,
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
        Ok(AllocationProps {
            location: physical.location,
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
        let range = Range::reserve(size, alignment, hint).map_err(exhausted)?;
        let start = range.start();
        self.reservations.insert(start, range);
        Ok(DevicePtr(start))
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
        if !is_granular(size) || !is_granular(ptr.0) || !offset.is_multiple_of(GRANULARITY) {
            return fail(Code::INVALID_VALUE);
        }
        if size
            .checked_add(offset)
            .is_none_or(|end| end > physical.size)
        {
            return fail(Code::INVALID_VALUE);
        }
        if size != physical.size {
            return fail(Code::NOT_SUPPORTED);
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
                devices: self.nobody(),
            },
        };
        self.regions.insert(ptr.0, region);
        Ok(())
    }

    pub(super) fn mem_unmap(&mut self, ptr: DevicePtr, size: u64) -> Answer<()> {
        if !is_granular(size) || self.reservation(ptr.0, size).is_none() {
            return fail(Code::INVALID_VALUE);
        }
        // Whole mappings only; gaps are fine: what is unmapped may be unmapped again.
        let end = ptr.0 + size;
        let begins = self.region(ptr.0).is_none_or(|(start, _)| start == ptr.0);
        let ends = |(start, region): (u64, &Region)| start + region.len == end;
        if !begins || !self.region(end - 1).is_none_or(ends) {
            return fail(Code::INVALID_VALUE);
        }
        if let Some(range) = self.reservation(ptr.0, size) {
            range.clear(ptr.0, size).map_err(exhausted)?;
        }
        while let Some(start) = self.regions.range(ptr.0..end).next().map(|(&at, _)| at) {
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
        if descs.is_empty() {
            return fail(Code::INVALID_VALUE);
        }
        for start in &starts {
            let location = match &self.regions[start].kind {
                Kind::Mapping { physical, .. } => physical.location,
                _ => return fail(Code::INVALID_VALUE),
            };
            for desc in descs {
                self.check_grant(desc.location, location)?;
            }
        }
        let host = descs.iter().rev().find(|desc| desc.location.is_host());
        if let Some(desc) = host {
            self.protect(&starts, desc.access)?;
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

    /// Checks that `who` can be granted access to memory that lies at `location`.
    pub(super) fn check_grant(&self, who: Location, location: Location) -> Answer<()> {
        match (who, location) {
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
            (_, Location::Device(device)) => match self.machine.gpu(device) {
                Some(gpu) if !gpu.coherent || gpu.numa_id < 0 => fail(Code::INVALID_VALUE),
                _ => Ok(()),
            },
            _ => Ok(()),
        }
    }

    pub(super) fn mem_get_access(&self, location: Location, ptr: DevicePtr) -> Answer<u64> {
        let Some((_, region)) = self.region(ptr.0) else {
            return fail(Code::INVALID_VALUE);
        };
        let Kind::Mapping { host, devices, .. } = &region.kind else {
            return fail(Code::INVALID_VALUE);
        };
        let access = match location {
            Location::Device(device) if self.device(device).is_err() => {
                return fail(Code::INVALID_VALUE);
            }
            Location::Device(device) => devices[device as usize],
            _ => *host,
        };
        Ok(access.flags().into())
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
                Memory::import(fd.as_fd(), Purpose::Physical).ok_or(Code::INVALID_VALUE)?
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
        let size = memory.size();
        if !is_granular(size) {
            return fail(Code::INVALID_VALUE);
        }
        Ok(self.hand_out(memory, size, HandleTypes::NONE, false))
    }
}
