//! Topologies from hwloc's XML.

use egmem::driver::NodeId;
use egmem::driver::sim::{GpuSpec, NodeSpec};
use egmem::topology::{LinkKind, Locality, Topology, TopologySource};
use egmem::{Driver, Error, Machine};

use egmem_tests::data;

const GIB: u64 = 1 << 30;

fn xml(name: &str) -> String {
    std::fs::read_to_string(data(name)).unwrap()
}

#[test]
fn a_quad_gh200_is_read_and_played() {
    let topology = Topology::from_xml(&xml("gh200x4.xml")).unwrap();
    assert_eq!(topology.source(), TopologySource::Xml);
    assert_eq!(topology.node_ids(), [0, 1, 2, 3].map(NodeId));
    for (i, gpu) in (0..4).zip(topology.gpus()) {
        assert_eq!(gpu.ordinal, i);
        assert_eq!(gpu.name, "NVIDIA GH200 120GB");
        assert_eq!(gpu.pci_bus_id, format!("00{i}9:01:00.0"));
        assert_eq!(gpu.host_numa, Some(NodeId(i)));
        assert_eq!(gpu.host_numa_source, Locality::Pci);
        assert_eq!(gpu.memory_node, Some(NodeId(4 + 8 * i)));
        assert_eq!(gpu.memory, 95 * GIB);
        assert_eq!(gpu.link, LinkKind::NvlinkC2c);
        let uuid = gpu.uuid.unwrap().to_string();
        assert_eq!(uuid, format!("GPU-0000000{i}-1111-2222-3333-444444444444"));
        let node = topology.node(NodeId(i)).unwrap();
        assert_eq!(node.cpus.to_string(), format!("{}-{}", 2 * i, 2 * i + 1));
        assert_eq!(node.memory_total, 120 * GIB);
        assert_eq!(node.distances[&NodeId((i + 1) % 4)], 40);
        assert_eq!(node.distances.len(), 4);
    }
    assert!(matches!(
        topology.bind_thread(NodeId(0)),
        Err(Error::InvalidArgument { .. })
    ));

    let driver = Driver::simulated(topology.to_machine()).unwrap();
    let played = Topology::discover(&driver).unwrap();
    assert_eq!(played.source(), TopologySource::Simulated);
    for (gpu, original) in played.gpus().iter().zip(topology.gpus()) {
        assert_eq!(gpu.host_node(), original.host_node());
        assert_eq!(gpu.memory_node, original.memory_node);
        assert_eq!(
            (gpu.uuid, gpu.coherent, gpu.link),
            (original.uuid, true, original.link)
        );
    }
}

#[test]
fn gpus_without_os_devices_are_found_on_the_pci_bus() {
    let topology = Topology::from_xml(&xml("h200-two-sockets.xml")).unwrap();
    let found: Vec<_> = topology
        .gpus()
        .iter()
        .map(|gpu| (gpu.host_numa.map(|n| n.0), gpu.link))
        .collect();
    // The third hangs at the whole machine: its node is unknown, not 0.
    let pcie = LinkKind::Pcie;
    assert_eq!(found, [(Some(0), pcie), (Some(1), pcie), (None, pcie)]);
    assert_eq!(topology.gpus()[0].name, "GH100 [H200 SXM 141GB]");
    assert_eq!(topology.gpus()[0].memory, 0);
    assert!(topology.to_text().contains("memory unknown"));
    let unknown = Error::NodeUnknown {
        gpu: 2,
        choices: vec![NodeId(0), NodeId(1)],
    };
    assert_eq!(topology.gpus()[2].host_node(), Err(unknown));

    // The simulator wants to know the GPUs' memory.
    let mut machine = topology.to_machine();
    assert!(Driver::simulated(machine.clone()).is_err());
    machine
        .gpus
        .iter_mut()
        .for_each(|gpu| gpu.memory = 141 * GIB);
    assert!(Driver::simulated(machine).is_ok());
}

#[test]
fn an_xml_resolves_a_simulated_gpu_that_its_driver_does_not_place() {
    let node = |id| NodeSpec {
        id,
        memory: GIB,
        ..NodeSpec::default()
    };
    let gpu = |bus: &str| GpuSpec {
        memory: GIB,
        pci_bus_id: bus.into(),
        ..GpuSpec::default()
    };
    let mut machine = Machine {
        nodes: vec![node(0), node(1)],
        gpus: vec![
            gpu("0001:8d:00.0"),
            gpu("0002:8f:00.0"),
            gpu("0007:01:00.0"),
        ],
        topology_xml: Some(data("h200-two-sockets.xml")),
        ..Machine::default()
    };
    let driver = Driver::simulated(machine.clone()).unwrap();
    let topology = Topology::discover(&driver).unwrap();
    let found: Vec<_> = topology
        .gpus()
        .iter()
        .map(|gpu| (gpu.host_numa, gpu.host_numa_source))
        .collect();
    let unknown = (None, Locality::Unknown);
    assert_eq!(found, [(Some(NodeId(1)), Locality::Pci), unknown, unknown]);

    machine.topology_xml = Some("/nowhere/at/all.xml".into());
    let error = Topology::of_machine(&machine).unwrap_err();
    assert!(
        matches!(&error, Error::Topology { detail } if detail.contains("/nowhere")),
        "{error}"
    );
}

#[test]
fn what_is_no_topology_is_refused() {
    let good = xml("gh200x4.xml");
    let cut = &good[..good.len() / 2];
    let empty = "<?xml version=\"1.0\"?><!DOCTYPE topology SYSTEM \"hwloc2.dtd\"><topology version=\"2.0\"></topology>";
    for text in [
        "",
        " ",
        "\0",
        "nonsense",
        "<a/>",
        "<topology",
        "{\"nodes\": []}",
        empty,
        cut,
    ] {
        let shown = &text[..text.len().min(60)];
        let result = Topology::from_xml(text);
        assert!(
            matches!(result, Err(Error::Topology { .. })),
            "{shown:?}: {result:?}"
        );
    }
}
