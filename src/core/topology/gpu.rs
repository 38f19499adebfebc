//! GPUs, as the driver reports them.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::peer::known;
use super::{NumaNode, PeerLink};
use crate::driver::{DeviceAttribute, Driver, Location, NodeId};
use crate::{Error, Result};

/// A GPU of the node.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Gpu {
    /// The CUDA ordinal, which is also the id of [`Location::Device`].
    pub ordinal: i32,
    /// The product name.
    pub name: String,
    /// `domain:bus:device.function`, as the driver writes it.
    pub pci_bus_id: String,
    /// The UUID, the same in every process and under any CUDA_VISIBLE_DEVICES.
    pub uuid: Option<GpuUuid>,
    /// The GPU's own memory in bytes.
    pub memory: u64,
    /// Major and minor compute capability, if the driver reports them.
    pub compute_capability: Option<(i32, i32)>,
    /// The nearest host NUMA node, if known; see [`Gpu::host_node`].
    pub host_numa: Option<NodeId>,
    /// How the host node is known.
    pub host_numa_source: Locality,
    /// The NUMA node that the GPU's own memory forms, if the operating system manages it.
    ///
    /// Source: `NUMA_CONFIG` and `NUMA_ID`. Never a host node: EGM lies on [`Gpu::host_node`].
    pub memory_node: Option<NodeId>,
    /// Whether GPU and CPU share page tables, so that each accesses the other's memory coherently.
    ///
    /// Source: `PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES`; `PAGEABLE_MEMORY_ACCESS` alone is also 1 if
    /// the kernel migrates pages in software (HMM) over PCIe.
    pub coherent: bool,
    /// The link between the GPU and the CPU.
    pub link: LinkKind,
    /// The GPUs whose memory this one can map, by ordinal. Source: `cuDeviceCanAccessPeer`.
    pub peers: Vec<i32>,
    /// The links to every other GPU, by ordinal, those without access too.
    pub peer_links: Vec<PeerLink>,
    /// The existing host nodes, for the error if the GPU's is unknown.
    #[serde(skip)]
    pub(super) choices: Vec<NodeId>,
}

impl Gpu {
    /// Returns the host NUMA node nearest to the GPU: where its Extended GPU Memory belongs.
    ///
    /// # Errors
    /// [`Error::NodeUnknown`], with the nodes to choose from, if neither the driver nor PCI locality gives
    /// one. This function never guesses.
    pub fn host_node(&self) -> Result<NodeId> {
        self.host_numa.ok_or_else(|| Error::NodeUnknown {
            gpu: self.ordinal,
            choices: self.choices.clone(),
        })
    }

    /// Returns the link to another GPU.
    ///
    /// ```
    /// use egmem::{Driver, Machine, Topology};
    ///
    /// let driver = Driver::simulated(Machine::h200x8())?; // Driver::open() on a real machine
    /// let topology = Topology::discover(&driver)?;
    /// let link = topology.gpu(0)?.peer_link(1)?;
    /// println!("GPU 0 reaches GPU 1: {}, {}", link.access, link.kind);
    /// # Ok::<(), egmem::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`], also for the GPU itself.
    pub fn peer_link(&self, gpu: i32) -> Result<&PeerLink> {
        let found = self.peer_links.iter().find(|link| link.gpu == gpu);
        found.ok_or(Error::NoSuchGpu {
            gpu,
            count: self.peer_links.len() + 1,
        })
    }

    /// Finds the host node through PCI locality, if the driver does not know it. A node that is not a host node
    /// (a GPU's memory, or one that this machine lacks) does not count.
    pub(super) fn locate(
        &mut self,
        nodes: &[NumaNode],
        pci_node: impl FnOnce(&str) -> Option<NodeId>,
    ) {
        if self.host_numa.is_some() {
            return;
        }
        if let Some(id) = pci_node(&self.pci_bus_id)
            && nodes.iter().any(|node| node.id == id)
        {
            self.host_numa = Some(id);
            self.host_numa_source = Locality::Pci;
        }
    }

    /// Returns device `ordinal` of `count`, as the driver reports it.
    pub(super) fn of_driver(driver: &Driver, ordinal: i32, count: i32) -> Result<Self> {
        let attribute = |attribute| known(driver.device_attribute(ordinal, attribute));
        let known_node = |id: i32| (id >= 0).then_some(NodeId(id));

        let coherent = attribute(DeviceAttribute::PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES)?
            .map(|v| v == 1);
        let integrated = attribute(DeviceAttribute::INTEGRATED)? == Some(1);
        let major = attribute(DeviceAttribute::COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(DeviceAttribute::COMPUTE_CAPABILITY_MINOR)?;
        let compute_capability = major.zip(minor);
        let memory_node = match attribute(DeviceAttribute::NUMA_CONFIG)? {
            Some(0) => None,
            _ => attribute(DeviceAttribute::NUMA_ID)?.and_then(known_node),
        };
        let host_numa = attribute(DeviceAttribute::HOST_NUMA_ID)?.and_then(known_node);
        let others = (0..count).filter(|peer| *peer != ordinal);
        let peer_links: Vec<PeerLink> = others
            .map(|peer| PeerLink::of_driver(driver, ordinal, peer))
            .collect::<Result<_>>()?;
        let name = driver.device_name(ordinal)?;
        Ok(Self {
            ordinal,
            pci_bus_id: driver.device_pci_bus_id(ordinal)?,
            uuid: Some(GpuUuid::of_device(driver.device_uuid(ordinal)?, &name)),
            name,
            memory: driver.device_total_mem(ordinal)?,
            compute_capability,
            host_numa,
            host_numa_source: host_numa.map_or(Locality::Unknown, |_| Locality::Driver),
            memory_node,
            coherent: coherent == Some(true),
            link: LinkKind::guess(coherent, integrated, major),
            peer_links,
            ..Self::default()
        })
    }
}

impl From<&Gpu> for Location {
    fn from(gpu: &Gpu) -> Self {
        Self::Device(gpu.ordinal)
    }
}

/// The source of a GPU's host NUMA node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Locality {
    /// The driver: `HOST_NUMA_ID`.
    Driver,
    /// The operating system, by the GPU's PCI device; the driver does not know.
    Pci,
    /// Unknown.
    #[default]
    Unknown,
}

crate::driver::display_texts! {
    Locality {
        Self::Driver => "driver",
        Self::Pci => "PCI locality",
        Self::Unknown => "unknown",
    }
}

/// The kind of link between a GPU and the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LinkKind {
    /// NVLink-C2C: coherent, as in Grace-Hopper and Grace-Blackwell.
    NvlinkC2c,
    /// PCI Express.
    Pcie,
    /// Unknown, or neither.
    #[default]
    Unknown,
}

impl LinkKind {
    /// Derives the link, for which CUDA has no attribute. NVLink-C2C means a discrete GPU of Hopper or later
    /// that uses the host's page tables: POWER9 machines did the same with Volta over NVLink 2. An integrated
    /// GPU shares the CPU's memory and has no link.
    fn guess(coherent: Option<bool>, integrated: bool, major: Option<i32>) -> Self {
        match (coherent, integrated) {
            (None, _) | (_, true) => Self::Unknown,
            (Some(false), false) => Self::Pcie,
            (Some(true), false) if major.is_some_and(|major| major >= 9) => Self::NvlinkC2c,
            (Some(true), false) => Self::Unknown,
        }
    }
}

crate::driver::display_texts! {
    LinkKind {
        Self::NvlinkC2c => "NVLink-C2C",
        Self::Pcie => "PCIe",
        Self::Unknown => "unknown link",
    }
}

/// A GPU's UUID, formatted like `nvidia-smi`: `GPU-`, or `MIG-` for an instance of a divided GPU, and five groups of
/// hexadecimal digits. CUDA_VISIBLE_DEVICES takes it in this form.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[non_exhaustive]
pub struct GpuUuid {
    /// The number, the most significant byte first.
    pub bytes: [u8; 16],
    /// Whether it is a MIG instance's.
    pub is_mig: bool,
}

impl GpuUuid {
    /// Returns the UUID of the device with this product name. The driver reports a MIG instance's own UUID for it, and
    /// has no attribute for such instances: their names are like `NVIDIA H100 80GB HBM3 MIG 1g.10gb`.
    pub fn of_device(bytes: [u8; 16], name: &str) -> Self {
        let is_mig = name.contains(" MIG ");
        Self { bytes, is_mig }
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_mig { "MIG-" } else { "GPU-" })?;
        for (i, byte) in self.bytes.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GpuUuid({self})")
    }
}

impl std::str::FromStr for GpuUuid {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || {
            Error::invalid(
                "GPU UUID",
                format!("'{text}' is not GPU- or MIG- and 32 hex digits"),
            )
        };
        let (kind, digits) = text.split_once('-').ok_or_else(bad)?;
        let is_mig = match kind {
            "GPU" => false,
            "MIG" => true,
            _ => return Err(bad()),
        };
        let bytes = crate::text::hex_id(digits).ok_or_else(bad)?;
        Ok(Self { bytes, is_mig })
    }
}

impl TryFrom<String> for GpuUuid {
    type Error = Error;
    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<GpuUuid> for String {
    fn from(uuid: GpuUuid) -> Self {
        uuid.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_reads_back_from_its_text() {
        let bytes = std::array::from_fn(|i| 17 * i as u8);
        let text = "00112233-4455-6677-8899-aabbccddeeff";
        for (name, kind) in [("NVIDIA H200", "GPU"), ("NVIDIA H200 MIG 1g.18gb", "MIG")] {
            let uuid = GpuUuid::of_device(bytes, name);
            assert_eq!(uuid.to_string(), format!("{kind}-{text}"));
            assert_eq!(uuid.to_string().parse::<GpuUuid>().unwrap(), uuid);
        }
        for text in [
            "",
            "MIG-",
            "MIG-GPU-00112233-4455-6677-8899-aabbccddeeff/1/0",
            "GPU-",
            "00112233-4455-6677-8899-aabbccddeeff",
            "GPU-0011223g-4455-6677-8899-aabbccddeeff",
        ] {
            assert!(text.parse::<GpuUuid>().is_err(), "{text}");
        }
    }

    #[test]
    fn only_a_discrete_gpu_with_the_hosts_page_tables_is_on_c2c() {
        use LinkKind::*;
        for (coherent, integrated, major, link) in [
            (Some(true), false, Some(9), NvlinkC2c),
            (Some(true), false, Some(10), NvlinkC2c),
            (Some(true), false, Some(7), Unknown), // POWER9 with V100
            (Some(true), true, Some(12), Unknown), // shares the CPU's memory
            (Some(false), false, Some(9), Pcie),
            (None, false, Some(9), Unknown),
        ] {
            assert_eq!(
                LinkKind::guess(coherent, integrated, major),
                link,
                "{coherent:?} {major:?}"
            );
        }
    }
}
