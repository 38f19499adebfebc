//! Frames that are none: garbage, cut off, far too large, far too slow.

use std::time::Duration;

use egmem::exchange::protocol::{Answer, encode};

use crate::exchange_failures::crash::parts;
use crate::exchange_failures::harness::{Role, Setup, eventually, patience};
use crate::exchange_failures::raw::{Raw, hello, ping};
use egmem_tests::pki::Pki;
use egmem_tests::tls_config;

/// A time that no peer need keep unless a test makes it.
const SHORT: Duration = Duration::from_millis(400);

/// An owner that gives a connection so much time.
struct Target {
    owner: Role,
    address: String,
    pki: Option<Pki>,
    _folder: tempfile::TempDir,
}

impl Target {
    /// An owner that gives a handshake, and each step after it, so much time.
    fn new(tls: bool, handshake: Duration, step: Duration) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let pki = tls.then(|| Pki::new(folder.path(), "ca"));
        let files = pki.as_ref().map(|pki| pki.issue("owner"));
        let mut setup = Setup::owner("tcp://127.0.0.1:0", files.as_ref());
        (setup.handshake, setup.step) = (Some(handshake), Some(step));
        // This test is not about silent peers.
        setup.heartbeat = setup.lease;
        let (mut owner, ready) = Role::start(&setup);
        owner.must("publish weights 3000000 1");
        Self {
            owner,
            address: parts(&ready).0,
            pki,
            _folder: folder,
        }
    }

    /// A connection, under TLS where the target wants it, before the hello.
    fn connect(&self) -> Raw {
        match &self.pki {
            None => Raw::plain(&self.address),
            Some(pki) => Raw::tls(
                &self.address,
                tls_config(pki.ca(), Some(&pki.issue("peer"))),
            ),
        }
    }

    /// The same after the hello.
    fn session(&self) -> Raw {
        let mut raw = self.connect();
        raw.welcome(None);
        raw
    }

    /// After all that, nothing is left, and a good peer is served.
    fn end(mut self) {
        eventually("connections end", || {
            self.owner.must("stats").contains("connections: 0,")
        });
        assert_eq!(self.owner.must("importers weights"), "");
        let files = self.pki.as_ref().map(|pki| pki.issue("good"));
        let setup = Setup::peer(&self.address, files.as_ref());
        // Its handshake may take longer than a test allows.
        let mut peer = None;
        eventually("a good peer is greeted", || {
            let mut new = Role::spawn(None, &setup);
            let greeted = new.begins();
            peer = greeted.then_some(new);
            greeted
        });
        let mut peer = peer.expect("it is greeted");
        peer.must("fetch weights fabric");
        peer.must("check weights 1");
        peer.must("release weights");
        peer.finish();
        self.owner.finish();
    }
}

/// Bytes that cannot be a frame, or not a message.
fn nonsense() -> Vec<(&'static str, Vec<u8>)> {
    let framed = |bytes: &[u8]| [&(bytes.len() as u32).to_be_bytes(), bytes].concat();
    let trailing = [hello(None), b"more".to_vec()].concat();
    vec![
        ("an empty frame", framed(b"")),
        ("4 GiB", u32::MAX.to_be_bytes().to_vec()),
        (
            "more than a frame may have",
            0x0100_0000_u32.to_be_bytes().to_vec(),
        ),
        ("no CBOR", framed(&[0xff; 64])),
        (
            "text",
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        ),
        ("arrays in arrays", framed(&[0x81; 3000])),
        ("maps in maps", framed(&b"\xa1\x61a".repeat(1000))),
        // A string, an array and a map that claim to be huge, with nothing in them.
        (
            "a huge string",
            framed(b"\x5b\x00\x00\x00\x7f\xff\xff\xff\xff"),
        ),
        (
            "a huge array",
            framed(b"\x9b\x00\x00\x00\x7f\xff\xff\xff\xff"),
        ),
        (
            "a huge map",
            framed(b"\xbb\x00\x00\x00\x7f\xff\xff\xff\xff"),
        ),
        ("an endless string", framed(b"\x5f\x41a\x41b")),
        ("bytes after the message", framed(&trailing)),
        ("a number", framed(b"\x01")),
        ("another protocol's hello", framed(b"\xa1\x65magic\x63abc")),
    ]
}

fn garbage(tls: bool) {
    // No deadline may help: the server must see the error itself.
    let target = Target::new(tls, 2 * patience(), 2 * patience());
    for (what, bytes) in nonsense() {
        let mut raw = target.connect();
        raw.send(&bytes).ok();
        assert!(raw.closes(), "{what}, instead of a hello");

        let mut raw = target.session();
        raw.send(&bytes).ok();
        if what == "bytes after the message" || !what.contains("hello") {
            assert!(raw.closes(), "{what}, in a session");
        }
    }
    target.end();
}

#[test]
fn garbage_ends_a_plain_connection() {
    garbage(false);
}

#[test]
fn garbage_under_tls_ends_the_connection() {
    garbage(true);
}

#[test]
fn frames_that_stop_half_way_end_the_connection() {
    for tls in [false, true] {
        let whole = hello(None);
        let framed = [&(whole.len() as u32).to_be_bytes(), &whole[..]].concat();
        let cuts = [1, 3, 4, 5, framed.len() - 1];
        let target = Target::new(tls, SHORT, SHORT);
        for cut in cuts {
            // The rest never comes, and the connection stays open. On a busy machine it ends sooner.
            let mut raw = target.connect();
            raw.send(&framed[..cut]).ok();
            assert!(raw.closes(), "{cut} bytes of a hello, then nothing");
        }
        target.end();
        let target = Target::new(tls, 2 * patience(), SHORT);
        for cut in cuts {
            // The connection is closed.
            let mut raw = target.connect();
            raw.send(&framed[..cut]).expect("sent");
            raw.half_close();
            assert!(raw.closes(), "{cut} bytes of a hello, then the end");
            // In a session.
            let mut raw = target.session();
            raw.send(&framed[..cut]).expect("sent");
            assert!(raw.closes(), "{cut} bytes of a request, then nothing");
        }
        target.end();
    }
}

#[test]
fn silent_and_slow_peers_are_dropped() {
    for tls in [false, true] {
        let target = Target::new(tls, SHORT, SHORT);
        // Not a byte, not even of TLS.
        let silent = Raw::plain(&target.address);
        // TLS, or nothing, and then not a byte.
        let mut mute = target.connect();
        if tls {
            mute.send(b"").ok();
        }
        // A byte now and then, so that no single wait is long.
        let mut slow = Raw::plain(&target.address);
        let first = if tls {
            vec![0x16, 3, 1, 2, 0, 1]
        } else {
            vec![0, 0, 3, 0, 1, 1, 1]
        };
        assert!(
            slow.drips(&first, Duration::from_millis(25)),
            "slow before the hello"
        );
        assert!(silent.closes(), "silent");
        assert!(mute.closes(), "silent before the hello");
        target.end();
        let target = Target::new(tls, 2 * patience(), SHORT);
        let mut slow = target.session();
        assert!(
            slow.drips(&[0, 0, 3, 0, 1, 1, 1], Duration::from_millis(25)),
            "slow in a session"
        );
        target.end();
    }
}

#[test]
fn unknown_fields_are_skipped_and_unknown_requests_end_the_connection() {
    let target = Target::new(false, 2 * patience(), 2 * patience());
    let mut raw = target.session();
    // A field of tomorrow: [2, {"list": {"x": 1}}].
    raw.frame(b"\x82\x02\xa1\x64list\xa1\x61x\x01")
        .expect("sent");
    assert!(matches!(raw.reply(2).expect("an answer"), Answer::Names(_)));
    let reply = raw.ask(3, ping()).expect("an answer");
    assert!(matches!(reply, Answer::Done));
    // A request of tomorrow: [4, {"teleport": {}}].
    raw.frame(b"\x82\x04\xa1\x68teleport\xa0").expect("sent");
    assert!(raw.closes());
    target.end();
}

#[test]
fn a_peer_that_asks_and_never_reads_is_dropped() {
    let target = Target::new(false, 2 * patience(), SHORT);
    let mut raw = target.session();
    let request = encode(&(1, ping()));
    let one = [&(request.len() as u32).to_be_bytes(), &request[..]].concat();
    let many = one.repeat(2000);
    // Answers fill its receive buffer, then the server's queue; then it is dropped.
    let mut dropped = false;
    let end = std::time::Instant::now() + patience();
    while !dropped && std::time::Instant::now() < end {
        dropped = raw.send(&many).is_err();
    }
    assert!(dropped, "it may ask for ever");
    drop(raw);
    target.end();
}
