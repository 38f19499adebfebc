//! The fuzzers' seeds: tests/fuzz/seeds/<target>/<name>.

use egmem::Machine;
use egmem::exchange::directory::Exporter;
use egmem::exchange::protocol::encode;
use egmem::share::{BootId, InstanceId};

use crate::protocol::samples;

fn frames(messages: &[Vec<u8>]) -> Vec<u8> {
    let mut all = Vec::new();
    for message in messages {
        all.extend((message.len() as u32).to_be_bytes());
        all.extend(message);
    }
    all
}

fn seeds() -> Vec<(&'static str, String, Vec<u8>)> {
    let mut all = Vec::new();
    let mut put = |target, name: &str, bytes: &[u8]| {
        all.push((target, name.to_owned(), bytes.to_vec()));
    };
    for (name, message) in samples::hellos() {
        put("hello", name, &encode(&message));
    }
    for (name, message) in samples::greetings() {
        put("greeting", name, &encode(&message));
    }
    let mut requests = Vec::new();
    for (name, message) in samples::requests() {
        let bytes = encode(&message);
        put("request", name, &bytes);
        requests.push(bytes.to_vec());
    }
    for (name, message) in samples::from_server() {
        put("from_server", name, &encode(&message));
    }
    // The first byte says how the rest comes in pieces.
    for (name, pieces) in [("whole", 0), ("pieces", 1), ("halves", 40)] {
        let mut bytes = vec![pieces];
        bytes.extend(frames(&requests[..3]));
        put("frames", name, &bytes);
    }
    put("frames", "long", b"\x00\xff\xff\xff\xffabc");
    for (index, text) in [
        "tcp://node7.cluster:7420",
        "127.0.0.1:0",
        "[::1]:7420",
        "unix:/run/egmem.sock",
        "uid:1000",
        "*.gpu.cluster",
        "local",
        "*",
        "job-7/rank:0",
        "0123456789abcdef0123456789abcdef",
    ]
    .iter()
    .enumerate()
    {
        put("text", &format!("text-{index}"), text.as_bytes());
    }
    for (name, memory) in [("memory", samples::memory()), ("window", samples::window())] {
        let memory = ciborium::Value::serialized(&memory).expect("a description");
        let body = ciborium::Value::Map(vec![("memory".into(), memory)]);
        let fields = vec![("version".into(), 1.into()), ("body".into(), body)];
        let mut frame = Vec::new();
        ciborium::into_writer(&ciborium::Value::Map(fields), &mut frame).expect("CBOR");
        put("share", name, &frames(&[frame]));
    }
    for (name, machine) in [("gh200", Machine::gh200()), ("gh200x4", Machine::gh200x4())] {
        let json = serde_json::to_string(&machine).expect("a machine");
        put("machine", name, json.as_bytes());
    }
    // Of a rank that only maps: its statement, and that it has no handles.
    let numbers = [("version", 1), ("rank", 1), ("size", 2)];
    let numbers = numbers.map(|(key, number)| (key.into(), number.into()));
    let boot = ("boot".into(), ciborium::Value::Bytes(vec![1; 16]));
    let empty = ["memory", "no_fabric", "no_fds", "socket"];
    let empty = empty.map(|key| (key.into(), ciborium::Value::Null));
    let statement = numbers.into_iter().chain([boot]).chain(empty).collect();
    let statement = vec![("Ok".into(), ciborium::Value::Map(statement))];
    let mut contribution = Vec::new();
    ciborium::into_writer(&ciborium::Value::Map(statement), &mut contribution).expect("CBOR");
    let length = (contribution.len() as u16).to_be_bytes();
    let handles = b"\0\x05\xa1\x62Ok\x40";
    for (name, kind) in [("plain", 0), ("sealed", 1), ("echoed", 3)] {
        put(
            "group",
            name,
            &[&[kind][..], &length, &contribution, handles].concat(),
        );
    }
    put("rendezvous", "all", b"\x02\x63All");
    put("rendezvous", "missing", b"\x03\xa1\x67Missing\x81\x02");
    put("rendezvous", "refused", b"\x03\xa1\x67Refused\x62no");
    let hello = b"\x02\xa3\x64rank\x01\x64size\x02\x65proof";
    put("rendezvous", "plain", &[&hello[..], b"\xf6"].concat());
    let proof = [&hello[..], b"\x58\x20", &[0; 32]].concat();
    put("rendezvous", "hello", &proof);
    let instance = InstanceId::from_bytes([0xab; 16]);
    let exporter = Exporter {
        addresses: ["tcp://node7:7420", "unix:/run/egmem.sock"]
            .map(|text| text.parse().expect("an address"))
            .to_vec(),
        instance,
        boot: BootId::from_bytes([1; 16]),
    };
    let json = serde_json::to_string(&exporter).expect("an exporter");
    let entry = format!("/egmem/v1/names/job-7/weights@{instance}\n{json}");
    put("directory", "name", entry.as_bytes());
    put(
        "config",
        "example",
        include_bytes!("../../../docs/egmem.toml"),
    );
    all
}

/// With `EGMEM_WRITE_SEEDS=1` they are written; else those that are there must be these.
#[test]
fn seeds_are_those_of_the_messages_as_they_are_now() {
    let root = egmem_tests::root().join("tests/fuzz/seeds");
    for (target, name, bytes) in seeds() {
        let path = root.join(target).join(&name);
        if std::env::var_os("EGMEM_WRITE_SEEDS").is_some() {
            std::fs::create_dir_all(path.parent().expect("a folder")).unwrap();
            std::fs::write(&path, &bytes).unwrap();
        }
        let found = std::fs::read(&path).unwrap_or_default();
        assert!(
            found == bytes,
            "{}: EGMEM_WRITE_SEEDS=1 cargo test -p egmem-tests --test all -- protocol::",
            path.display()
        );
    }
}
