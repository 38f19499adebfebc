//! Who may do what with mapped memory.

use super::references::Counted;
use super::state::{Answer, Kind, Region, State, exhausted, fail};
use crate::driver::{Access, AccessDesc, Code, DevicePtr, Location};

impl State {
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
}
