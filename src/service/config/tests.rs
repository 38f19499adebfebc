use std::time::Duration;

use super::*;
use crate::{Backing, Error, MemoryError, Reuse, ShareError};

const LEAST: &str = "listen = [\"unix:/run/egmem/egmem.sock\"]\n";

#[test]
fn the_sample_is_read_and_survives_writing() {
    let sample = include_str!("../../../docs/egmem.toml");
    let config = ServiceConfig::from_toml(sample).unwrap();
    assert_eq!(config.buffers.len(), 2);
    assert_eq!(config.reserves[0].bytes, 64 << 30);
    let json = serde_json::to_string(&config).unwrap();
    assert_eq!(
        serde_json::from_str::<ServiceConfig>(&json).unwrap(),
        config
    );
    // The commented part is for a program with the feature etcd.
    let (_, directory) = sample.split_once("# [directory]").unwrap();
    let directory = format!("[directory]{}", directory.replace("\n# ", "\n"));
    let with = ServiceConfig::from_toml(&format!("{sample}{directory}"));
    match cfg!(feature = "etcd") {
        true => assert!(with.unwrap().directory.is_some()),
        false => assert!(with.unwrap_err().to_string().contains("feature etcd")),
    }
}

#[test]
fn little_is_enough() {
    let config = ServiceConfig::from_toml(LEAST).unwrap();
    assert_eq!(config.reuse.policy, Reuse::SamePeer);
    assert_eq!(config.node.backing, Backing::Auto);
    assert_eq!(config.create, None);
    assert_eq!(config.lease.expiry, Duration::from_secs(10));
    assert!(!config.plain_anywhere);
}

#[test]
fn loopback_is_plain_in_any_form() {
    for host in ["LocalHost", "127.3.2.1", "[::1]", "[::ffff:127.0.0.1]"] {
        let metrics = format!("[metrics]\naddress = \"{host}:9\"");
        let text = format!("listen = [\"tcp://{host}:9\"]\n{metrics}");
        ServiceConfig::from_toml(&text).unwrap();
    }
}

#[test]
fn what_is_wrong_is_named() {
    let buffer = "[[buffer]]\nname = \"a\"\nbytes = \"1MiB\"\nwho = [\"*\"]\n";
    for (text, words) in [
        ("", "listen"),
        ("listen = []", "listen"),
        ("listen = [\"unix:/a\"]\nlisen = 1", "lisen"),
        ("listen = 7", "line 1"),
        ("@[lease]\nheart_beat = \"1s\"", "heart_beat"),
        ("@[lease]\nheartbeat = \"1 fortnight\"", "fortnight"),
        ("@[lease]\nheartbeat = \"8s\"", "twice"),
        ("@[lease]\nheartbeat = \"1ms\"", "lease.heartbeat"),
        ("@[drain]\ndeadline = \"25h\"", "drain.deadline"),
        ("@[reuse]\npolicy = \"some\"", "same-peer"),
        ("@[reuse]\nthreads = 0", "reuse.threads"),
        ("@[node]\nmax_bytes = \"12 XB\"", "XB"),
        ("@[node]\nbacking = \"pages\"", "registered"),
        ("@[create]\nwho = [\"*\"]\npeer_names = 0", "peer_names"),
        (
            "@[create]\nwho = [\"*\"]\npeer_names = 4097",
            "names_per_peer",
        ),
        (
            "@[create]\nwho = []\nforgive_after = \"0s\"",
            "create.forgive_after",
        ),
        (
            "@[create]\nwho = []\nforgive_after = \"8785h\"",
            "create.forgive_after",
        ),
        (
            "@[create]\nwho = []\n[[create.prefix]]\npeers = [\"*\"]\nnames = [\"kv\"]",
            "slash",
        ),
        (
            "@[create]\nwho = []\n[[create.prefix]]\npeers = [\"*\"]\nnames = []",
            "create.prefix",
        ),
        ("@[[reserve]]\nnode = 0\nbytes = \"0\"", "`bytes`"),
        (
            "@[[reserve]]\nnode = 0\nbytes = \"1G\"\nchunk = \"3MiB\"",
            "`chunk`",
        ),
        (
            "@[[reserve]]\nnode = 0\nbytes = \"1G\"\nchunk = \"4GiB\"",
            "4094 MiB",
        ),
        (
            "@[[reserve]]\nnode = 0\nbytes = \"1G\"\nchunk = \"8MiB\"",
            "min_chunk",
        ),
        (
            "@[[reserve]]\nnode = 0\nbytes = \"1G\"\n[[reserve]]\nnode = 0\nbytes = \"1G\"",
            "node 0: another",
        ),
        (
            "@[node]\nmax_bytes = \"1M\"\n[[reserve]]\nnode = 0\nbytes = \"1G\"",
            "max_bytes",
        ),
        ("listen = [\"nowhere\"]", "tcp://host:port"),
        ("@[create]\nwho = [\"uid:x\"]", "uid:"),
        (
            "@[[buffer]]\nname = \"a b\"\nbytes = \"1\"\nnode = 0\nwho = []",
            "`name`",
        ),
        ("@#", "`node` or `gpu`"),
        ("@#node = 0\ngpu = 0", "`node` or `gpu`"),
        ("@#gpu = -1", "negative"),
        ("@#gpu = 0\naccess = \"none\"", "access"),
        (
            "@[node]\nbacking = \"registered\"\n#gpu = 0\naccess = \"read\"",
            "`node.backing`",
        ),
        ("@#gpu = 0\n#gpu = 0", "'a': another"),
        ("@[limits]\nhandshakes = 0", "`handshakes` is 0"),
        ("@[limits]\nframe_bytes = 1", "`frame_bytes` is 1"),
        ("@[limits]\nwait = 0", "`wait` is 0"),
        ("@[create]\nwho = []\nnode = -1", "`create.node`"),
        ("@[metrics]\naddress = \"nowhere\"", "`metrics.address`"),
        ("@[metrics]\naddress = \"0.0.0.0:1\"", "metrics.anywhere"),
        ("@[metrics]\naddress = \"node7:1\"", "metrics.anywhere"),
        (
            "@[node]\nmax_bytes = \"512KiB\"\n#gpu = 0",
            "buffer 'a': `bytes` is more",
        ),
        (
            "listen = [\"unix:/a\", \"unix:/a\"]",
            "unix:/a is given twice",
        ),
        ("listen = [\"tcp://node7:1\"]", "host name"),
        (
            "listen = [\"tcp://127.0.0.1:1\"]\nplain_anywhere = true\n[tls]\nca = \"a\"\ncert = \"b\"\nkey = \"c\"",
            "exclude",
        ),
    ] {
        let text = text.replace('@', LEAST).replace('#', buffer);
        let error = ServiceConfig::from_toml(&text).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Share(ShareError::Memory(MemoryError::InvalidArgument { .. }))
            ),
            "{error:?}"
        );
        assert!(error.to_string().contains(words), "{text}: {error}");
    }
}
