//! Links between two GPUs, as the driver reports them.

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::driver::{Code, Driver, P2pAttribute};

/// The way from a GPU to the memory of another one.
///
/// The driver reports whether there is one, and the operations that it supports. It does not report how many links of
/// NVLink there are, their bandwidth, or whether a switch lies between: NVML and `nvidia-smi topo -m` do.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PeerLink {
    /// The other GPU's ordinal.
    pub gpu: i32,
    /// Whether the GPU can be granted the other's memory. Source: `cuDeviceCanAccessPeer`.
    pub access: bool,
    /// The kind of link; see [`PeerLinkKind`] for how it is known.
    pub kind: PeerLinkKind,
    /// Whether atomic operations of the GPU's kernels on the other's memory are native, so that all GPUs see each of
    /// them as one step. `None`: unknown. Source: `NATIVE_ATOMIC_SUPPORTED`.
    pub native_atomics: Option<bool>,
    /// Whether the GPU can access CUDA arrays in the other's memory. `None`: unknown. Source:
    /// `CUDA_ARRAY_ACCESS_SUPPORTED`.
    pub array_access: Option<bool>,
    /// The link's rank among those of the machine by performance: 0 is the fastest. `None`: unknown. Source:
    /// `PERFORMANCE_RANK`.
    pub performance_rank: Option<i32>,
}

impl PeerLink {
    /// Returns the link from `device` to `peer`, as the driver reports it.
    pub(super) fn of_driver(driver: &Driver, device: i32, peer: i32) -> Result<Self> {
        let access = driver.device_can_access_peer(device, peer)?;
        if !access {
            return Ok(Self {
                access,
                ..Self::unknown(peer)
            });
        }
        let ask = |attribute| known(driver.device_p2p_attribute(device, peer, attribute));
        let flag = |attribute| ask(attribute).map(|told| told.map(|value| value != 0));
        let native_atomics = flag(P2pAttribute::NATIVE_ATOMIC_SUPPORTED)?;
        let partial = flag(P2pAttribute::ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED)?;
        Ok(Self {
            gpu: peer,
            access,
            kind: PeerLinkKind::guess(native_atomics, partial),
            native_atomics,
            array_access: flag(P2pAttribute::CUDA_ARRAY_ACCESS_SUPPORTED)?,
            performance_rank: ask(P2pAttribute::PERFORMANCE_RANK)?,
        })
    }

    /// Returns a link about which only its existence is known.
    pub(super) const fn unknown(gpu: i32) -> Self {
        Self {
            gpu,
            access: true,
            kind: PeerLinkKind::Unknown,
            native_atomics: None,
            array_access: None,
            performance_rank: None,
        }
    }

    /// Describes the link in a few words.
    pub(super) fn words(&self) -> String {
        match (self.access, self.native_atomics) {
            (false, _) => "no access".into(),
            (true, Some(true)) => format!("{}, native atomics", self.kind),
            (true, Some(false)) => format!("{}, no native atomics", self.kind),
            (true, None) => self.kind.to_string(),
        }
    }
}

/// Returns `None`, and no error, if a driver is too old to know the answer, or a backend of the program's own does not know it.
pub(super) fn known(answer: Result<i32>) -> Result<Option<i32>> {
    let unknown = [Code::INVALID_VALUE, Code::NOT_SUPPORTED];
    match answer {
        Err(error) if error.code().is_some_and(|code| unknown.contains(&code)) => Ok(None),
        answer => answer.map(Some),
    }
}

/// The kind of link between two GPUs.
///
/// CUDA has no attribute for it. Each generation of NVLink has all native atomic operations and PCIe does not, so
/// where a GPU can access the other's memory, that attribute tells the kind. Where it cannot, the kind is unknown:
/// NVLink may be there and be switched off, as in a virtual machine or with MIG.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PeerLinkKind {
    /// NVLink, direct or through switches.
    Nvlink,
    /// PCI Express.
    Pcie,
    /// Unknown.
    Unknown,
}

impl PeerLinkKind {
    /// Derives the kind of a link by which memory can be accessed.
    pub(super) const fn guess(native_atomics: Option<bool>, only_some: Option<bool>) -> Self {
        match (native_atomics, only_some) {
            (_, Some(true)) | (None, _) => Self::Unknown,
            (Some(true), _) => Self::Nvlink,
            (Some(false), _) => Self::Pcie,
        }
    }
}

crate::driver::display_texts! {
    PeerLinkKind {
        Self::Nvlink => "NVLink",
        Self::Pcie => "PCIe",
        Self::Unknown => "unknown link",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_is_told_by_native_atomics_alone() {
        for (native, only_some, kind) in [
            (Some(true), Some(false), PeerLinkKind::Nvlink),
            (Some(true), None, PeerLinkKind::Nvlink),
            (Some(false), None, PeerLinkKind::Pcie),
            (Some(true), Some(true), PeerLinkKind::Unknown),
            (Some(false), Some(true), PeerLinkKind::Unknown),
            (None, None, PeerLinkKind::Unknown),
        ] {
            assert_eq!(PeerLinkKind::guess(native, only_some), kind);
        }
    }
}
