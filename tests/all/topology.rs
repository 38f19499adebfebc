//! Topology through the public API: every preset, machines with gaps, drawings, JSON.

use std::collections::BTreeMap;
use std::sync::Arc;

use egmem::capability::ImexChannel;
use egmem::driver::sim::{AttributeAnswer, GpuSpec, NodeSpec, PeerAccess, Refusal};
use egmem::driver::{
    Backend, Call, Code, DeviceAttribute, Location, NodeId, PoolCalls, SimulatedHost,
};
use egmem::topology::{
    GpuUuid, LinkKind, Locality, PeerLinkKind, Placement, Topology, TopologySource, free_now,
};
use egmem::vmm::PhysicalMemory;
use egmem::{Driver, Error, Machine};

const GIB: u64 = 1 << 30;

fn discover(machine: Machine) -> Topology {
    Topology::discover(&Driver::simulated(machine).unwrap()).unwrap()
}

#[test]
fn every_preset_is_discovered_as_it_is_described() {
    for name in Machine::PRESETS {
        let machine = Machine::preset(name).unwrap();
        let topology = discover(machine.clone());
        assert_eq!(topology.source(), TopologySource::Simulated);
        assert_eq!(topology.machine(), Some(*name));
        assert_eq!(topology.gpus().len(), machine.gpus.len());
        assert_eq!(topology.nodes().len(), machine.nodes.len());
        for (gpu, spec) in topology.gpus().iter().zip(&machine.gpus) {
            assert_eq!(gpu.name, spec.name);
            assert_eq!(gpu.memory, spec.memory);
            assert_eq!(gpu.host_node().unwrap(), NodeId(spec.host_numa));
            assert_eq!(gpu.host_numa_source, Locality::Driver);
            assert_eq!(
                gpu.memory_node,
                (spec.numa_id >= 0).then_some(NodeId(spec.numa_id))
            );
            assert_eq!(gpu.coherent, spec.coherent);
            assert_eq!(gpu.peers.len(), machine.gpus.len() - 1);
            assert_eq!(Location::from(gpu), Location::Device(gpu.ordinal));
            assert!(
                topology
                    .node(gpu.host_node().unwrap())
                    .unwrap()
                    .gpus
                    .contains(&gpu.ordinal)
            );
        }
        for (node, spec) in topology.nodes().iter().zip(&machine.nodes) {
            assert_eq!((node.id.0, node.memory_total), (spec.id, spec.memory));
            assert_eq!(node.cpus.to_string(), spec.cpus);
            assert_eq!(node.memory_free, Some(spec.memory));
            assert_eq!(node.distances[&node.id], 10);
            assert!(node.distances.keys().all(|to| topology.node(*to).is_ok()));
        }
        let uuids: std::collections::BTreeSet<_> =
            topology.gpus().iter().map(|gpu| gpu.uuid).collect();
        assert_eq!(uuids.len(), machine.gpus.len());

        // A machine described without a driver has the topology that the driver reports.
        let described = Topology::of_machine(&machine).unwrap();
        assert_eq!(described.gpus(), topology.gpus());
        assert_eq!(described.nodes(), topology.nodes());
    }
}

#[test]
fn links_and_memory_nodes_of_the_presets() {
    let quad = discover(Machine::gh200x4());
    let memory_nodes: Vec<_> = quad
        .gpus()
        .iter()
        .map(|gpu| gpu.memory_node.unwrap().0)
        .collect();
    assert_eq!(memory_nodes, [4, 12, 20, 28]);
    assert_eq!(quad.node_ids(), [0, 1, 2, 3].map(NodeId));
    assert!(
        quad.gpus()
            .iter()
            .all(|gpu| gpu.link == LinkKind::NvlinkC2c && gpu.coherent)
    );
    let error = quad.node(NodeId(4)).unwrap_err();
    assert_eq!(
        error,
        Error::NoSuchNode {
            node: NodeId(4),
            gpu: Some(0),
            choices: quad.node_ids()
        }
    );

    let x86 = discover(Machine::h200x8());
    assert!(
        x86.gpus()
            .iter()
            .all(|gpu| gpu.link == LinkKind::Pcie && !gpu.coherent)
    );
    assert_eq!(x86.nodes()[0].gpus, (0..8).collect::<Vec<_>>());
    assert_eq!(
        x86.gpu(8).unwrap_err(),
        Error::NoSuchGpu { gpu: 8, count: 8 }
    );
    assert_eq!(
        x86.gpu(-1).unwrap_err(),
        Error::NoSuchGpu { gpu: -1, count: 8 }
    );
}

/// GPUs 0 and 1 by NVLink, 2 by PCIe, 3 by nothing.
fn mixed_links() -> Machine {
    let mut machine = Machine::h200x8();
    machine.gpus.truncate(4);
    machine.peer_access = PeerAccess::Pairs(vec![(0, 1), (0, 2), (1, 2)]);
    machine.nvlink = PeerAccess::Pairs(vec![(1, 0), (2, 3)]);
    machine
}

#[test]
fn links_between_gpus_are_those_of_the_driver() {
    for name in ["h200x8", "gh200x4", "gb200"] {
        let topology = discover(Machine::preset(name).unwrap());
        for gpu in topology.gpus() {
            let others: Vec<i32> = gpu.peer_links.iter().map(|link| link.gpu).collect();
            assert_eq!(others, gpu.peers);
            for link in &gpu.peer_links {
                assert!(link.access && link.kind == PeerLinkKind::Nvlink, "{link:?}");
                assert_eq!(
                    (link.native_atomics, link.array_access),
                    (Some(true), Some(true))
                );
                assert_eq!(link.performance_rank, Some(0));
            }
        }
    }
    let topology = discover(mixed_links());
    let link = |gpu, to| topology.gpu(gpu).unwrap().peer_link(to).unwrap();
    assert_eq!(link(0, 1).kind, PeerLinkKind::Nvlink);
    assert_eq!(
        (link(0, 2).kind, link(0, 2).native_atomics),
        (PeerLinkKind::Pcie, Some(false))
    );
    assert_eq!(link(0, 2).performance_rank, Some(1));
    // NVLink that gives no access is not seen.
    let none = link(2, 3);
    assert_eq!(
        (none.access, none.kind, none.native_atomics),
        (false, PeerLinkKind::Unknown, None)
    );
    assert_eq!(topology.gpu(0).unwrap().peers, [1, 2]);
    for unknown in [0, 4, -1] {
        let error = topology.gpu(0).unwrap().peer_link(unknown).unwrap_err();
        assert_eq!(
            error,
            Error::NoSuchGpu {
                gpu: unknown,
                count: 4
            }
        );
    }
    assert_eq!(
        Topology::of_machine(&mixed_links()).unwrap().gpus(),
        topology.gpus()
    );
}

#[test]
fn links_between_gpus_are_drawn_and_written() {
    let text = discover(Machine::h200x8()).to_text();
    assert!(
        text.contains(
            "links between GPUs\n  GPUs 0, 1, 2, 3, 4, 5, 6, 7  NVLink, native atomics\n"
        ),
        "{text}"
    );
    let mixed = discover(mixed_links());
    let text = mixed.to_text();
    for line in [
        "GPUs 0, 1    NVLink, native atomics",
        "GPUs 0, 2    PCIe, no native atomics",
        "other pairs  no access",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    // One bar with its lines for each group: three times two GPUs.
    let svg = mixed.to_svg();
    assert_eq!(svg.matches("class=\"nvlink\"").count(), 3);
    assert_eq!(svg.matches("<circle").count(), 6);
    assert!(svg.contains(">PCIe, no native atomics<"));
    let json = serde_json::to_value(&mixed).unwrap();
    let link = &json["gpus"][2]["peer_links"][0];
    assert_eq!(
        (&link["gpu"], &link["kind"], &link["native_atomics"]),
        (&0.into(), &"pcie".into(), &false.into())
    );
    assert_eq!(json["gpus"][2]["peer_links"][2]["access"], false);

    let mut apart = Machine::h200x8();
    apart.peer_access = PeerAccess::None;
    let apart = discover(apart);
    for drawn in [apart.to_text(), apart.to_svg()] {
        assert!(drawn.contains("none gives access"), "{drawn}");
    }
    let alone = discover(Machine::gh200());
    assert!(!alone.to_text().contains("links") && !alone.to_svg().contains("<circle"));
}

/// A backend of one's own may lack the call, as an older driver may lack an attribute.
#[test]
fn a_link_that_the_driver_does_not_know_is_unknown() {
    for code in [Code::NOT_SUPPORTED, Code::INVALID_VALUE] {
        let driver = Driver::simulated(mixed_links()).unwrap();
        driver
            .sim()
            .unwrap()
            .fail(Call::DeviceGetP2PAttribute, 1, code);
        let topology = Topology::discover(&driver).unwrap();
        let link = topology.gpu(0).unwrap().peer_link(1).unwrap();
        assert_eq!(
            (link.access, link.kind, link.native_atomics),
            (true, PeerLinkKind::Unknown, None)
        );
        assert_eq!(link.performance_rank, Some(0));
        assert!(topology.to_text().contains("GPUs 0, 1    unknown link"));
    }
}

fn two_nodes(host_numa: i32) -> Machine {
    let node = |id: i32| NodeSpec {
        id,
        cpus: format!("{}-{}", 2 * id, 2 * id + 1),
        memory: GIB,
        ..NodeSpec::default()
    };
    Machine {
        nodes: vec![node(0), node(1)],
        gpus: vec![GpuSpec {
            memory: GIB,
            host_numa,
            ..GpuSpec::default()
        }],
        ..Machine::default()
    }
}

#[test]
fn an_unknown_host_node_is_an_error_with_choices_and_never_node_0() {
    let mut old_driver = two_nodes(1);
    let attribute = DeviceAttribute::HOST_NUMA_ID.0;
    old_driver.attributes =
        BTreeMap::from([(attribute, AttributeAnswer::Refused(Refusal::InvalidValue))]);
    for machine in [two_nodes(-1), old_driver] {
        let topology = discover(machine);
        let gpu = topology.gpu(0).unwrap();
        let error = Error::NodeUnknown {
            gpu: 0,
            choices: vec![NodeId(0), NodeId(1)],
        };
        assert_eq!(gpu.host_numa_source, Locality::Unknown);
        assert_eq!(gpu.host_node(), Err(error.clone()));
        let placed = Placement::Nearest { gpu: 0 }.request(1).place(&topology);
        assert_eq!(placed, Err(error));
        assert!(topology.nodes().iter().all(|node| node.gpus.is_empty()));
        assert!(topology.to_text().contains("host node unknown"));
        assert!(topology.to_svg().contains("host node unknown"));
    }
}

#[test]
fn a_failing_driver_call_is_reported_by_name() {
    for call in [
        Call::DeviceGetCount,
        Call::DeviceGetName,
        Call::DeviceGetUuid,
        Call::DeviceGetPciBusId,
        Call::DeviceTotalMem,
        Call::DeviceGetAttribute,
        Call::DeviceCanAccessPeer,
        Call::DeviceGetP2PAttribute,
    ] {
        let driver = Driver::simulated(Machine::gh200x4()).unwrap();
        driver.sim().unwrap().fail(call, 1, Code::NOT_PERMITTED);
        let error = Topology::discover(&driver).unwrap_err();
        assert_eq!(
            error.driver_error().map(|e| (e.call, e.code)),
            Some((call, Code::NOT_PERMITTED))
        );
    }
}

#[test]
fn free_memory_follows_allocations() {
    let driver = Driver::simulated(two_nodes(0)).unwrap();
    let mut topology = Topology::discover(&driver).unwrap();
    let size = 64 << 20;
    let memory = PhysicalMemory::options(NodeId(1))
        .create(&driver, size)
        .unwrap();
    assert_eq!(topology.free_memory(NodeId(1)), Ok(Some(GIB - size)));
    assert_eq!(topology.node(NodeId(1)).unwrap().memory_free, Some(GIB));
    topology.refresh_free();
    assert_eq!(
        topology.node(NodeId(1)).unwrap().memory_free,
        Some(GIB - size)
    );
    assert_eq!(topology.node(NodeId(0)).unwrap().memory_free, Some(GIB));
    drop(memory);
    assert_eq!(free_now(&driver, NodeId(1)), Some(GIB));
    assert_eq!(free_now(&driver, NodeId(7)), None);
}

#[test]
fn more_than_is_free_is_refused_before_the_driver_is_asked() {
    let driver = Driver::simulated(two_nodes(0)).unwrap();
    let calls = driver.sim().unwrap().count(Call::MemCreate);
    let error = PhysicalMemory::options(NodeId(1))
        .create(&driver, 2 * GIB)
        .unwrap_err();
    assert_eq!(
        error,
        Error::NodeTooFull {
            node: NodeId(1),
            requested: 2 * GIB,
            free: GIB
        }
    );
    assert!(error.remedy().contains("EGMEM_ALLOW_OVERCOMMIT"));
    assert_eq!(driver.sim().unwrap().count(Call::MemCreate), calls);
}

#[test]
fn no_thread_is_bound_to_cpus_of_another_machine() {
    let topology = discover(Machine::gh200x4());
    assert!(matches!(
        topology.bind_thread(NodeId(0)),
        Err(Error::InvalidArgument { .. })
    ));
    assert!(topology.bind_thread_if_real(NodeId(0)).unwrap().is_none());
    assert!(matches!(
        topology.bind_thread_if_real(NodeId(9)),
        Err(Error::NoSuchNode { .. })
    ));
}

#[test]
fn a_machine_comes_back_from_its_topology() {
    for name in Machine::PRESETS {
        let topology = discover(Machine::preset(name).unwrap());
        let again = discover(topology.to_machine());
        assert_eq!(again.gpus(), topology.gpus());
        assert_eq!(again.nodes(), topology.nodes());
    }
    let mut some_peers = Machine::gh200x4();
    some_peers.peer_access = PeerAccess::Pairs(vec![(0, 1), (2, 3)]);
    let machine = discover(some_peers.clone()).to_machine();
    assert_eq!(machine.peer_access, some_peers.peer_access);
    let machine = discover(mixed_links()).to_machine();
    assert_eq!(machine.nvlink, PeerAccess::Pairs(vec![(0, 1)]));
}

#[test]
fn json_names_the_facts_a_program_needs() {
    let topology = discover(Machine::gh200x4());
    let json: serde_json::Value =
        serde_json::from_str(&serde_json::to_string(&topology).unwrap()).unwrap();
    assert_eq!(json["source"], "simulated");
    assert_eq!(json["gpus"][2]["host_numa"], 2);
    assert_eq!(json["gpus"][2]["memory_node"], 20);
    assert_eq!(json["gpus"][2]["link"], "nvlink_c2c");
    assert_eq!(json["nodes"][3]["distances"]["0"], 40);
    assert_eq!(
        json["nodes"][3]["cpus"],
        topology.nodes()[3].cpus.to_string()
    );
    let uuid: GpuUuid = json["gpus"][0]["uuid"].as_str().unwrap().parse().unwrap();
    assert_eq!(Some(uuid), topology.gpus()[0].uuid);
}

#[test]
fn the_text_picture_says_everything_and_says_simulated() {
    let text = discover(Machine::gh200x4()).to_string();
    assert!(text.lines().next().unwrap().contains("SIMULATED"), "{text}");
    for word in [
        "node 3",
        "GPU 3",
        "is node 28",
        "NVLink-C2C, coherent",
        "96 GiB",
        "distances",
    ] {
        assert!(text.contains(word), "{word} is not in\n{text}");
    }
    let gpu_lines: Vec<_> = text
        .lines()
        .filter(|line| line.contains("GPU "))
        .skip(1)
        .collect();
    let column = |line: &str| {
        line.split_once("NVLink")
            .map(|(before, _)| before.chars().count())
    };
    assert!(
        gpu_lines
            .windows(2)
            .all(|pair| column(pair[0]) == column(pair[1])),
        "{text}"
    );
    assert!(text.lines().all(|line| line.trim_end() == line));
}

/// Many nodes, CPUs that alternate between them, a GPU without a known node, few peers, a long name.
fn crowded() -> Machine {
    let nodes = (0..6).map(|id| NodeSpec {
        id,
        cpus: (0..24)
            .map(|i| (6 * i + id).to_string())
            .collect::<Vec<_>>()
            .join(","),
        memory: 96 * GIB + (123 << 20),
        ..NodeSpec::default()
    });
    let gpus = [0, 0, 3, -1].map(|host_numa| GpuSpec {
        name: "A graphics card with quite a name <&>".into(),
        memory: 24 * GIB,
        host_numa,
        ..GpuSpec::default()
    });
    Machine {
        name: "crowded".into(),
        nodes: nodes.collect(),
        gpus: gpus.to_vec(),
        peer_access: PeerAccess::Pairs(vec![(0, 1)]),
        ..Machine::default()
    }
}

#[test]
fn drawings_are_written_for_every_preset() {
    let mut machines: Vec<Machine> = Machine::PRESETS
        .iter()
        .map(|name| Machine::preset(name).unwrap())
        .collect();
    machines.push(crowded());
    for machine in machines {
        let name = machine.name.clone();
        let topology = discover(machine);
        let svg = topology.to_svg();
        assert!(svg.starts_with("<svg xmlns=") && svg.ends_with("</svg>\n"));
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
        assert!(svg.contains("SIMULATED"));
        for gpu in topology.gpus() {
            assert!(svg.contains(&format!(">GPU {}<", gpu.ordinal)));
            assert!(svg.contains(&gpu.name[..8]));
        }
        assert!(!svg.contains("<&>"));
        if let Some(folder) = std::env::var_os("EGMEM_TEST_DRAWINGS") {
            let path = std::path::Path::new(&folder).join(format!("{name}.svg"));
            std::fs::write(path, svg).unwrap();
        }
    }
}

/// Simulates a host without GPUs.
#[derive(Debug)]
struct HostAlone(SimulatedHost);

// SAFETY: it maps no memory.
unsafe impl Backend for HostAlone {
    fn name(&self) -> &'static str {
        "host-alone"
    }
    fn simulated_host(&self) -> Option<SimulatedHost> {
        Some(self.0.clone())
    }
    fn driver_pools(&self) -> &dyn PoolCalls {
        self
    }
    fn device_count(&self) -> egmem::Result<i32> {
        Ok(0)
    }
}

// SAFETY: as above.
unsafe impl PoolCalls for HostAlone {
    fn api(&self) -> &'static str {
        "host-alone"
    }
}

#[test]
fn a_backend_of_ones_own_describes_the_host_that_it_simulates() {
    let mut host = Machine::gb200().host();
    host.nodes[1].free = GIB;
    let driver = Driver::from_backend(Arc::new(HostAlone(host.clone())));
    assert!(driver.is_simulated());
    assert!(driver.sim().is_none()); // it has no controls of the simulator

    let topology = Topology::discover(&driver).unwrap();
    assert_eq!(topology.source(), TopologySource::Simulated);
    assert_eq!(topology.machine(), Some("gb200"));
    let free: Vec<_> = topology.nodes().iter().map(|n| n.memory_free).collect();
    assert_eq!(free, [Some(host.nodes[0].memory), Some(GIB)]);
    assert_eq!(free_now(&driver, host.nodes[1].id), Some(GIB));
    let present = host.imex_channel;
    assert_eq!(ImexChannel::of(&driver), ImexChannel::Simulated { present });
}
