//! Machines by name: those that come with the crate, files and the environment.

use std::collections::BTreeMap;
use std::path::Path;

use super::{GpuSpec, Machine, NodeSpec, PeerAccess};
use crate::{Driver, Error, Result};

const GIB: u64 = 1 << 30;
/// The limit of one memory's references, as measured.
const H200_REFERENCES: u32 = 254;
/// The CPUs of a Grace socket.
const GRACE_CPUS: i32 = 72;
/// SLIT distances that Grace machines report: another socket, and GPU memory.
const OTHER_SOCKET: u32 = 40;
const GPU_MEMORY: u32 = 80;
const FAR_GPU_MEMORY: u32 = 120;

impl Machine {
    /// The names that [`Machine::preset`] knows.
    pub const PRESETS: &'static [&'static str] = &["gh200", "gh200x4", "gb200", "h200x8"];

    /// Returns the preset called `name`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], listing the presets, if there is none of that name.
    pub fn preset(name: &str) -> Result<Self> {
        match name {
            "gh200" => Ok(Self::gh200()),
            "gh200x4" => Ok(Self::gh200x4()),
            "gb200" => Ok(Self::gb200()),
            "h200x8" => Ok(Self::h200x8()),
            _ => {
                let all = Self::PRESETS.join(", ");
                let why = format!("'{name}' is neither one of {all} nor a machine's description");
                Err(Error::invalid("preset", why))
            }
        }
    }

    /// Returns one GH200 superchip, 480 GB + 96 GB, a member of an NVLink domain.
    pub fn gh200() -> Self {
        let model = gpu("NVIDIA GH200 480GB", 96 * GIB);
        Self {
            imex_channel: true,
            ..grace("gh200", &[0], 480 * GIB, model, &[(0, 1)])
        }
    }

    /// Returns a quad GH200 node: CPU nodes 0 to 3, GPU memory nodes 4, 12, 20 and 28, 120 GB + 96 GB each.
    pub fn gh200x4() -> Self {
        let model = gpu("NVIDIA GH200 120GB", 96 * GIB);
        let gpus = [(0, 4), (1, 12), (2, 20), (3, 28)];
        grace("gh200x4", &[0, 1, 2, 3], 120 * GIB, model, &gpus)
    }

    /// Returns a GB200 node: two Grace sockets, four GPUs, a member of an NVLink domain.
    pub fn gb200() -> Self {
        let model = GpuSpec {
            compute_capability: (10, 0),
            multiprocessors: 152,
            ..gpu("NVIDIA GB200", 184 * GIB)
        };
        let gpus = [(0, 2), (0, 10), (1, 18), (1, 26)];
        Self {
            imex_channel: true,
            ..grace("gb200", &[0, 1], 480 * GIB, model, &gpus)
        }
    }

    /// Returns eight H200 on an x86-64 host with one NUMA node, as measured (docs/driver-behaviour.md).
    pub fn h200x8() -> Self {
        let gpus = (0..8)
            .map(|ordinal| GpuSpec {
                pci_bus_id: format!("0000:{:02x}:00.0", 0x8d + 2 * ordinal),
                host_numa: 0,
                ..gpu("NVIDIA H200", 71_578 << 21) // 139.8 GiB
            })
            .collect();
        Self {
            name: "h200x8".into(),
            nodes: vec![NodeSpec {
                id: 0,
                cpus: "0-127".into(),
                memory: 560 * GIB,
                distances: BTreeMap::from([(0, 10)]),
            }],
            gpus,
            nvlink: PeerAccess::All,
            memory_references: Some(H200_REFERENCES),
            ..Self::default()
        }
    }
}

fn gpu(name: &str, memory: u64) -> GpuSpec {
    GpuSpec {
        name: name.into(),
        memory,
        ..GpuSpec::default()
    }
}

/// Builds a machine of Grace sockets; `gpus` are pairs of host node and GPU memory node.
fn grace(name: &str, nodes: &[i32], memory: u64, model: GpuSpec, gpus: &[(i32, i32)]) -> Machine {
    let distances = |from: i32, host: i32| -> BTreeMap<i32, u32> {
        let to_node = |to: i32| match (to == from, to == host) {
            (true, _) => 10,
            (_, true) => GPU_MEMORY,
            _ if from == host => OTHER_SOCKET,
            _ => FAR_GPU_MEMORY,
        };
        let to_gpu = |memory: i32, near: i32| match (memory == from, near == host) {
            (true, _) => 10,
            (_, true) => GPU_MEMORY,
            _ => FAR_GPU_MEMORY,
        };
        let nodes = nodes.iter().map(|&to| (to, to_node(to)));
        let gpus = gpus
            .iter()
            .map(|&(near, memory)| (memory, to_gpu(memory, near)));
        nodes.chain(gpus).collect()
    };
    Machine {
        name: name.into(),
        nodes: nodes
            .iter()
            .map(|&id| NodeSpec {
                id,
                cpus: format!("{}-{}", id * GRACE_CPUS, (id + 1) * GRACE_CPUS - 1),
                memory,
                distances: distances(id, id),
            })
            .collect(),
        gpus: gpus
            .iter()
            .enumerate()
            .map(|(ordinal, &(host_numa, numa_id))| GpuSpec {
                pci_bus_id: format!("{:04x}:01:00.0", 9 + 0x10 * ordinal),
                host_numa,
                numa_id,
                coherent: true,
                distances: distances(numa_id, host_numa),
                ..model.clone()
            })
            .collect(),
        nvlink: PeerAccess::All,
        host_pool_for_device: true,
        ..Machine::default()
    }
}

/// The environment variable that names a machine to simulate.
const VARIABLE: &str = "EGMEM_SIM";

impl Machine {
    /// Returns the preset called `name`, or else the machine that the JSON file of that name describes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is neither, or the file cannot be read or is not a correct description;
    /// [`Error::DriverTooOld`] if it describes a driver before 12.2.
    pub fn load(name: impl AsRef<Path>) -> Result<Self> {
        let path = name.as_ref();
        match Self::preset(&path.to_string_lossy()) {
            Err(_) if path.exists() || path.extension().is_some_and(|end| end == "json") => {}
            preset => return preset,
        }
        let fault = |why: String| {
            let why = format!("{}: {why}", path.display());
            Error::invalid("machine description", why)
        };
        let text = std::fs::read_to_string(path).map_err(|error| fault(error.to_string()))?;
        let machine: Self =
            serde_json::from_str(&text).map_err(|error| fault(error.to_string()))?;
        machine.validate()?;
        Ok(machine)
    }

    /// Returns the machine that the environment variable `EGMEM_SIM` names, as for [`load`](Self::load); `None` if the
    /// variable is not set or empty.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that names the variable, if there is no such machine.
    pub fn from_env() -> Result<Option<Self>> {
        let name = std::env::var_os(VARIABLE).filter(|name| !name.is_empty());
        let load = |name| {
            Self::load(name).map_err(|error| match error {
                Error::InvalidArgument { why, .. } => Error::invalid(VARIABLE, why),
                other => Error::invalid(VARIABLE, other.to_string()),
            })
        };
        name.map(load).transpose()
    }
}

impl Driver {
    /// Opens the driver that the environment chooses: the simulated machine that `EGMEM_SIM` names
    /// ([`Machine::from_env`]), otherwise this machine's CUDA driver.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that names the variable, if there is no such machine; those of
    /// [`open`](Self::open) and [`simulated`](Self::simulated).
    pub fn from_env() -> Result<Self> {
        match Machine::from_env()? {
            Some(machine) => Self::simulated(machine),
            None => Self::open(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NodeId;

    #[test]
    fn every_preset_is_valid_and_survives_json() {
        for name in Machine::PRESETS {
            let machine = Machine::preset(name).unwrap();
            machine.validate().unwrap();
            assert_eq!(&machine.name, name);
            let text = serde_json::to_string(&machine).unwrap();
            assert_eq!(serde_json::from_str::<Machine>(&text).unwrap(), machine);
        }
        assert!(Machine::preset("gh300").is_err());
    }

    #[test]
    fn a_quad_node_has_its_known_numbering_and_near_memories() {
        let machine = Machine::gh200x4();
        let memories: Vec<i32> = machine.gpus.iter().map(|gpu| gpu.numa_id).collect();
        assert_eq!(memories, [4, 12, 20, 28]);
        let distance = |from, to| machine.distance(NodeId(from), NodeId(to)).unwrap();
        assert_eq!(distance(2, 2), 10);
        assert_eq!(distance(0, 1), OTHER_SOCKET);
        assert_eq!(distance(1, 12), GPU_MEMORY);
        assert_eq!(distance(12, 1), GPU_MEMORY);
        assert_eq!(distance(12, 4), FAR_GPU_MEMORY);
    }

    #[test]
    fn contradictions_are_named() {
        type Break = fn(&mut Machine);
        let broken: [(&str, Break); 12] = [
            ("no host NUMA node", |m| m.nodes.clear()),
            ("(0, 4) is not a pair", |m| {
                m.nvlink = PeerAccess::Pairs(vec![(1, 2), (0, 4)])
            }),
            ("used twice", |m| m.nodes[1].id = 0),
            ("no memory", |m| m.gpus[0].memory = 0),
            ("does not exist", |m| m.gpus[0].host_numa = 7),
            ("used twice", |m| m.gpus[1].numa_id = 4),
            ("memory_references", |m| m.memory_references = Some(0)),
            ("PCI", |m| m.gpus[0].pci_bus_id = "1:2".into()),
            ("PCI", |m| m.gpus[0].pci_bus_id = "01:00.0".into()),
            ("PCI", |m| m.gpus[0].pci_bus_id = " 0000:01:00.0".into()),
            ("list", |m| m.nodes[0].cpus = "7-3".into()),
            ("cannot be", |m| {
                m.nodes[0].distances.insert(1, 10);
            }),
        ];
        for (words, break_it) in broken {
            let mut machine = Machine::gh200x4();
            break_it(&mut machine);
            let error = machine.validate().unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let mut old = Machine::gh200();
        old.driver_version.0 = 12010;
        assert!(matches!(old.validate(), Err(Error::DriverTooOld { .. })));
    }

    #[test]
    fn unknown_fields_and_sizes_are_refused() {
        for text in [
            r#"{"nodes": [{"memory": 1}], "speed": 3}"#,
            r#"{"nodes": [{"memory": "1 XB"}]}"#,
        ] {
            assert!(serde_json::from_str::<Machine>(text).is_err(), "{text}");
        }
        for text in ["{}", r#"{"nodes": [{}]}"#] {
            let machine: Machine = serde_json::from_str(text).unwrap();
            assert!(machine.validate().is_err(), "{text}");
        }
        let odd: Machine = serde_json::from_str(
            r#"{"nodes": [{"memory": "1 GiB"}], "attributes": {"134": "INVALID_VALUE", "141": 0}}"#,
        )
        .unwrap();
        assert_eq!(odd.nodes[0].memory, GIB);
        assert_eq!(odd.attributes.len(), 2);
    }

    #[test]
    fn a_machine_is_a_preset_or_a_file() {
        assert_eq!(Machine::load("gb200").unwrap(), Machine::gb200());
        let folder = tempfile::tempdir().unwrap();
        let described = Machine {
            name: "mine".into(),
            ..Machine::gh200()
        };
        for name in ["mine.json", "mine"] {
            let path = folder.path().join(name);
            std::fs::write(&path, serde_json::to_vec(&described).unwrap()).unwrap();
            assert_eq!(Machine::load(&path).unwrap(), described);
        }
    }

    #[test]
    fn a_name_that_is_no_machine_is_an_error_that_says_why() {
        let error = |name: &Path| Machine::load(name).unwrap_err().to_string();
        let unknown = error(Path::new("gh300"));
        assert!(
            unknown.contains("'gh300'") && unknown.contains("gh200x4"),
            "{unknown}"
        );
        let missing = error(Path::new("/nonexistent/machine.json"));
        assert!(
            missing.contains("/nonexistent/machine.json: No such file"),
            "{missing}"
        );
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("machine.json");
        for (text, why) in [("{", "EOF"), (r#"{"nodes": []}"#, "no host NUMA node")] {
            std::fs::write(&path, text).unwrap();
            assert!(error(&path).contains(why), "{}", error(&path));
        }
    }
}
