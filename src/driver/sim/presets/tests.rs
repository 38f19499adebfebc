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
