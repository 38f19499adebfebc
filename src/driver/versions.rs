//! The features that drivers lack by version, from 12.2 on: [`Driver::open`](super::Driver::open) refuses
//! older ones.

use super::{Code, CudaVersion, DeviceAttribute, HandleTypes, Location};
use crate::Error;

/// A feature that drivers have from some version on.
///
/// docs/driver-versions.md has the same table with sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feature {
    /// The feature's name.
    pub name: &'static str,
    /// The first version that has it.
    pub since: CudaVersion,
    /// The consequence of not having it.
    pub without: &'static str,
}

/// The features that matter to this crate, oldest first.
pub const FEATURES: &[Feature] = &[
    Feature {
        name: "fabric handles",
        since: FABRIC,
        without: "memory is shared within one machine only, as POSIX fds",
    },
    Feature {
        name: "VMM without a context on every GPU",
        since: CudaVersion(12040),
        without: "opening the driver makes a primary context on every visible GPU, some hundred MiB each",
    },
    Feature {
        name: "the attribute HOST_NUMA_MULTINODE_IPC_SUPPORTED",
        since: CudaVersion(12080),
        without: "whether fabric handles of host memory work shows only when one is made",
    },
    Feature {
        name: "the attributes HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED and HOST_NUMA_MEMORY_POOLS_SUPPORTED",
        since: CudaVersion(12090),
        without: "host-NUMA memory and pools may work anyway: only a trial shows it",
    },
    Feature {
        name: "VMM and pools at Location::Host",
        since: HOST,
        without: "choose a NUMA node, Location::HostNuma",
    },
    Feature {
        name: "VMM on machines whose GPUs cannot reach each other",
        since: CudaVersion(13000),
        without: "on machines without peer access between GPUs it may fail",
    },
];

const FABRIC: CudaVersion = CudaVersion(12030);
const HOST: CudaVersion = CudaVersion(13000);

/// Iterates over the features that a driver of version `have` lacks.
pub fn lacking(have: CudaVersion) -> impl Iterator<Item = &'static Feature> {
    FEATURES.iter().filter(move |feature| have < feature.since)
}

impl DeviceAttribute {
    /// Returns the first version whose drivers know the attribute, if that is after 12.2; older drivers
    /// answer `INVALID_VALUE`, which says nothing about the GPU.
    pub const fn since(self) -> Option<CudaVersion> {
        match self {
            Self::HANDLE_TYPE_FABRIC_SUPPORTED => Some(FABRIC),
            Self::HOST_NUMA_MULTINODE_IPC_SUPPORTED => Some(CudaVersion(12080)),
            Self::HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
            | Self::HOST_NUMA_MEMORY_POOLS_SUPPORTED => Some(CudaVersion(12090)),
            Self::HOST_MEMORY_POOLS_SUPPORTED | Self::HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED => {
                Some(HOST)
            }
            _ => None,
        }
    }
}

/// Replaces the error if memory at `location` with `handle_types` was refused because the driver is older
/// than the request.
pub fn explain(
    error: Error,
    have: CudaVersion,
    location: Location,
    handle_types: HandleTypes,
) -> Error {
    // NOT_PERMITTED and OUT_OF_MEMORY have reasons of their own.
    if !matches!(
        error.code(),
        Some(Code::INVALID_VALUE | Code::NOT_SUPPORTED)
    ) {
        return error;
    }
    let too_old = |what, need| Error::DriverTooOld { what, have, need };
    if handle_types.contains(HandleTypes::FABRIC) && have < FABRIC {
        too_old("a fabric handle", FABRIC)
    } else if location == Location::Host && have < HOST {
        too_old("memory at Location::Host", HOST)
    } else {
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Call;

    #[test]
    fn newer_drivers_lack_less() {
        let count = |version| lacking(CudaVersion(version)).count();
        assert_eq!(count(12020), FEATURES.len());
        assert_eq!(count(12030), FEATURES.len() - 1);
        assert_eq!(count(13000), 0);
        assert!(FEATURES.is_sorted_by_key(|feature| feature.since));
    }

    #[test]
    fn the_documentation_has_every_feature() {
        let text = include_str!("../../docs/driver-versions.md");
        for feature in FEATURES {
            let row = format!(
                "| {} | {} | {} |",
                feature.since, feature.name, feature.without
            );
            assert!(text.contains(&row), "docs/driver-versions.md lacks\n{row}");
        }
    }

    #[test]
    fn a_refusal_is_explained_by_age_only_where_age_is_the_reason() {
        let refused = |code| Error::driver(Call::MemCreate, code);
        let explained = |code, have, location, types| {
            explain(refused(code), CudaVersion(have), location, types)
        };
        let old = |what, have, need| Error::DriverTooOld {
            what,
            have: CudaVersion(have),
            need,
        };
        let (host, node) = (Location::Host, Location::HostNuma(0));
        let (none, fabric) = (HandleTypes::NONE, HandleTypes::FABRIC);
        assert_eq!(
            explained(Code::INVALID_VALUE, 12020, node, fabric),
            old("a fabric handle", 12020, FABRIC)
        );
        assert_eq!(
            explained(Code::NOT_SUPPORTED, 12090, host, none),
            old("memory at Location::Host", 12090, HOST)
        );
        for (code, have, location, types) in [
            (Code::INVALID_VALUE, 12030, node, fabric),
            (Code::INVALID_VALUE, 13000, host, none),
            (Code::INVALID_VALUE, 12020, node, none),
            (Code::NOT_PERMITTED, 12020, node, fabric),
            (Code::OUT_OF_MEMORY, 12020, host, none),
        ] {
            assert_eq!(explained(code, have, location, types), refused(code));
        }
    }
}
