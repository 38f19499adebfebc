//! Access rights to mapped memory.

use super::answer::{Answer, exhausted, fail};
use super::references::Counted;
use super::state::{Kind, Region, State};
use crate::{Access, AccessDesc, Code, DevicePtr, Location};

impl State {
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
                Some(region) if matches!(region.kind, Kind::Mapping { .. }) => {
                    starts.push(at);
                    at += region.len;
                }
                _ => return fail(Code::INVALID_VALUE),
            }
        }
        match at == end {
            true => Ok(starts),
            false => fail(Code::INVALID_VALUE),
        }
    }

    /// Grants mapping by mapping, and within each mapping location by location: a failure keeps the grants
    /// before it.
    pub(super) fn mem_set_access(
        &mut self,
        ptr: DevicePtr,
        size: u64,
        descs: &[AccessDesc],
    ) -> Answer<()> {
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
    fn grant(&mut self, start: u64, desc: &AccessDesc) -> Answer<()> {
        let Some(Region {
            len,
            memory,
            kind: Kind::Mapping {
                physical, counted, ..
            },
            ..
        }) = self.regions.get(&start)
        else {
            return fail(Code::INVALID_VALUE);
        };
        self.check_grant(desc, physical.props.location)?;
        let is_host = desc.location.is_host();
        let mut new_count = None;
        if is_host {
            if desc.access != Access::None && counted.is_none() {
                if self
                    .machine
                    .max_mappings
                    .is_some_and(|most| self.host_mappings() >= most)
                {
                    return fail(Code::OUT_OF_MEMORY);
                }
                let limit = self.machine.memory_references;
                new_count = Some(Counted::within(memory, limit).ok_or(Code::INVALID_VALUE)?);
            }
            let range = self.reservation(start, *len).ok_or(Code::INVALID_VALUE)?;
            range.protect(start, *len, desc.access).map_err(exhausted)?;
        }
        let Some(Region {
            kind:
                Kind::Mapping {
                    host,
                    host_newer,
                    counted,
                    devices,
                    ..
                },
            ..
        }) = self.regions.get_mut(&start)
        else {
            return fail(Code::INVALID_VALUE);
        };
        if is_host {
            match desc.access {
                Access::None => *counted = None,
                _ => *counted = counted.take().or(new_count),
            }
        }
        let (access, is_first) = match desc.location {
            Location::Device(device) => (&mut devices[device as usize], device == 0),
            _ => (host, false),
        };
        if *access != desc.access && (is_host || is_first) {
            *host_newer = is_host;
        }
        *access = desc.access;
        Ok(())
    }

    /// Returns the number of mappings that the CPU has access to.
    pub(super) fn host_mappings(&self) -> u64 {
        let granted = |region: &&Region| matches!(&region.kind, Kind::Mapping { counted, .. } if counted.is_some());
        self.regions.values().filter(granted).count() as u64
    }

    /// Checks that `desc` can be granted for memory at `location`.
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
            Some(Kind::Mapping {
                host,
                host_newer,
                devices,
                ..
            }) => {
                let access = match location {
                    Location::Device(device) => devices[device as usize],
                    Location::HostNuma(_) | Location::HostNumaCurrent => *host,
                    // HOST does not mean the CPU here: it is the CPU or GPU 0, whichever got its access last.
                    Location::Host => {
                        let first = devices.first().copied().unwrap_or(Access::None);
                        match (*host, first) {
                            (Access::None, access) | (access, Access::None) => access,
                            (host, _) if *host_newer => host,
                            (_, first) => first,
                        }
                    }
                };
                Ok(access.flags().into())
            }
            // The call knows only memory that `cuMemMap` mapped.
            Some(_) => Ok(Access::None.flags().into()),
            None => fail(Code::INVALID_VALUE),
        }
    }
}
