//! The answers of `egmem serve --check`, compared with those of `egmem serve`.

use crate::serve_cli::harness::{USUAL, driver, stderr};
use egmem_tests::egmem;

/// Wrong configurations, each with a word of the message. None needs a file or a node to be found wrong.
const WRONG: &[(&str, &str)] = &[
    ("", "listen"),
    ("listen = []", "listen"),
    ("listen = [\"tcp://0.0.0.0:0\"]", "without TLS"),
    ("listen = [\"tcp://10.0.0.1:7740\"]", "without TLS"),
    ("listen = [\"tcp://[::]:7740\"]", "without TLS"),
    ("listen = [\"tcp://node7:7740\"]", "host name"),
    ("@@", "given twice"),
    ("@[limits]\nhandshakes = 0", "`handshakes` is 0"),
    ("@[limits]\nconnections = 0", "`connections` is 0"),
    ("@[limits]\nframe_bytes = 0", "`frame_bytes` is 0"),
    ("@[limits]\nrequest = 0", "`request` is 0"),
    ("@[limits]\nunknown = 1", "unknown"),
    ("@[lease]\nheartbeat = \"0s\"", "lease.heartbeat"),
    ("@[metrics]\naddress = \"0.0.0.0:0\"", "metrics.anywhere"),
    ("@[metrics]\naddress = \"no port\"", "metrics.address"),
    (
        "@[directory]\nendpoints = [\"etcd1\"]\nadvertise = \"tcp://a:1\"",
        "",
    ),
    (
        "@[node]\nmax_bytes = \"1MiB\"\n[[buffer]]\nname = \"a\"\nbytes = \"2MiB\"\ngpu = 0\nwho = []",
        "max_bytes",
    ),
];

#[test]
fn check_and_serve_refuse_with_the_same_words() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("egmem.toml");
    let listen = "listen = [\"unix:/#/socket\"]\n";
    for (text, words) in WRONG {
        let at = folder.path().to_str().unwrap();
        let text = text
            .replace("@@", "listen = [\"unix:/#/a\", \"unix:/#/a\"]")
            .replace('@', listen)
            .replace('#', at.trim_start_matches('/'));
        std::fs::write(&file, &text).unwrap();
        let path = file.to_str().unwrap();
        let check = egmem(&["serve", "--check", "--config", path]).output();
        let serve = egmem(&["serve", "--config", path]).args(driver()).output();
        let (check, serve) = (check.unwrap(), serve.unwrap());
        assert!(!check.status.success(), "{text}");
        assert!(stderr(&check).contains(words), "{text}: {}", stderr(&check));
        assert_eq!(stderr(&check), stderr(&serve), "{text}");
        assert_eq!(check.status, serve.status, "{text}");
    }
}

#[test]
fn the_example_in_the_manual_passes_the_check() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("egmem.toml");
    for text in [
        include_str!("../../../docs/egmem.toml").to_owned(),
        USUAL.replace('@', "/tmp"),
    ] {
        std::fs::write(&file, &text).unwrap();
        let check = egmem(&["serve", "--check", "--config", file.to_str().unwrap()]).output();
        let check = check.unwrap();
        assert!(check.status.success(), "{text}: {}", stderr(&check));
    }
}
