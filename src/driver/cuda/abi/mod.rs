//! The structs that cross the C ABI, in plain integers.
//!
//! A driver newer than CUDA's headers may write a value that their enums lack. In a closed Rust enum
//! that is undefined behaviour; an integer holds any value. The test `bindings` compares layouts and
//! numbers with those of CUDA's headers; ci/cudarc runs it for several CUDA versions.

#[cfg(test)]
#[path = "tests.rs"]
mod bindings;
mod layout;

use crate::{Access, AccessDesc, AllocationProps, Call, HandleTypes, Location, PoolProps};
use crate::{Error, Result};

pub(super) use layout::*;

impl From<Location> for MemLocation {
    fn from(location: Location) -> Self {
        let (kind, id) = match location {
            Location::Device(ordinal) => (LOCATION_DEVICE, ordinal),
            Location::Host => (LOCATION_HOST, 0),
            Location::HostNuma(node) => (LOCATION_HOST_NUMA, node),
            Location::HostNumaCurrent => (LOCATION_HOST_NUMA_CURRENT, 0),
        };
        Self { kind, id }
    }
}

impl MemLocation {
    fn to_location(self, call: Call) -> Result<Location> {
        match self.kind {
            LOCATION_DEVICE => Ok(Location::Device(self.id)),
            LOCATION_HOST => Ok(Location::Host),
            LOCATION_HOST_NUMA => Ok(Location::HostNuma(self.id)),
            LOCATION_HOST_NUMA_CURRENT => Ok(Location::HostNumaCurrent),
            kind => Err(Error::failed(
                call.name(),
                format!("the driver names a location type unknown here: {kind}"),
            )),
        }
    }
}

pub(super) fn descs(access: &[AccessDesc]) -> Vec<MemAccessDesc> {
    let desc = |desc: &AccessDesc| MemAccessDesc {
        location: desc.location.into(),
        flags: Access::flags(desc.access),
    };
    access.iter().map(desc).collect()
}

impl MemAllocationProp {
    pub(super) fn to_props(self, call: Call) -> Result<AllocationProps> {
        Ok(AllocationProps {
            location: self.location.to_location(call)?,
            handle_types: HandleTypes::from_bits(self.requested_handle_types),
            gpu_direct_rdma: self.gpu_direct_rdma_capable != 0,
        })
    }
}

impl From<&AllocationProps> for MemAllocationProp {
    fn from(props: &AllocationProps) -> Self {
        Self {
            kind: PINNED,
            requested_handle_types: props.handle_types.bits(),
            location: props.location.into(),
            gpu_direct_rdma_capable: props.gpu_direct_rdma.into(),
            ..Self::ZERO
        }
    }
}

impl From<&PoolProps> for MemPoolProps {
    fn from(props: &PoolProps) -> Self {
        Self {
            kind: PINNED,
            handle_types: props.handle_types.bits(),
            location: props.location.into(),
            win32_security_attributes: std::ptr::null_mut(),
            max_size: props.max_size as usize,
            usage: 0,
            reserved: [0; 54],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_survive_the_way_through_the_driver() {
        for location in [
            Location::Device(3),
            Location::Host,
            Location::HostNuma(2),
            Location::HostNumaCurrent,
        ] {
            let back = MemLocation::from(location).to_location(Call::MemCreate);
            assert_eq!(back, Ok(location));
        }
    }

    #[test]
    fn a_location_of_a_newer_driver_is_an_error() {
        let location = MemLocation { kind: 77, id: 1 };
        let error = location.to_location(Call::MemCreate).unwrap_err();
        assert!(error.to_string().contains("77"), "{error}");
    }
}
