//! Virtual memory management: addresses, memory mapped there, and access rights to it.

use std::sync::Arc;

use super::capacity::Counted;
use super::fault::{Answer, fail};
use super::space::{GRANULARITY, Range, Window, is_granular};
use super::state::{Kind, Mapping, Region, State};
use crate::*;

impl State {
    pub fn mem_address_reserve(
        &mut self,
        size: u64,
        alignment: u64,
        hint: u64,
    ) -> Answer<DevicePtr> {
        if !is_granular(size) || (alignment != 0 && !alignment.is_power_of_two()) {
            return fail(Code::INVALID_VALUE);
        }
        if !hint.is_multiple_of(alignment.max(GRANULARITY)) {
            return fail(Code::INVALID_VALUE);
        }
        let range = self.find_addresses(size, alignment, hint)?;
        let start = range.start;
        self.reservations.insert(start, range);
        Ok(DevicePtr(start))
    }

    fn find_addresses(&mut self, size: u64, alignment: u64, hint: u64) -> Answer<Range> {
        if self.window.is_none() {
            // Without a window, as under a limit on addresses, each reservation is separate.
            self.window = Window::new(self.placement).ok().map(Arc::new);
        }
        let window = self.window.as_ref();
        Ok(
            match window.and_then(|window| window.take(size, alignment, hint)) {
                Some(range) => range,
                None if hint == 0 => Range::reserve(size, alignment)?,
                None => Range::reserve_from(size, alignment, hint)?,
            },
        )
    }

    pub fn mem_address_free(&mut self, ptr: DevicePtr, size: u64) -> Answer {
        match self.reservations.get(&ptr.0) {
            Some(range) if range.len == size && !self.any_mapped(ptr.0, size) => {
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
        let starts = self.regions.range(ptr.0..end).map(|(&at, _)| at);
        for start in starts.collect::<Vec<_>>() {
            self.regions.remove(&start);
        }
        Ok(())
    }

    /// Returns the starts of the mappings that make up a range exactly.
    fn whole_mappings(&self, ptr: DevicePtr, size: u64) -> Answer<Vec<u64>> {
        if size == 0 || self.reservation(ptr.0, size).is_none() {
            return fail(Code::INVALID_VALUE);
        }
        let end = ptr.0 + size;
        let mut starts = Vec::new();
        let mut at = ptr.0;
        while at < end {
            match self.regions.get(&at) {
                Some(region) if region.mapping().is_some() => {
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
        let region = self.regions.get(&start).ok_or(Code::INVALID_VALUE)?;
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
        let kind = self.regions.get_mut(&start).map(|region| &mut region.kind);
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
