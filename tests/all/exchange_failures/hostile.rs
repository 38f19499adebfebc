//! Peers that replay, steal and say hello twice.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use egmem::exchange::protocol::Answer;

use crate::exchange_failures::crash::parts;
use crate::exchange_failures::harness::{Role, Setup, eventually};
use crate::exchange_failures::raw::{Raw, fetch, hello, ping, socket};
use egmem_tests::pki::Pki;
use egmem_tests::tls_config;

struct Target {
    owner: Role,
    address: String,
    pki: Pki,
    _folder: tempfile::TempDir,
}

fn target() -> Target {
    let folder = tempfile::tempdir().expect("a folder");
    let pki = Pki::new(folder.path(), "ca");
    let mut setup = Setup::owner("tcp://127.0.0.1:0", Some(&pki.issue("owner")));
    // Raw clients do not ping.
    setup.heartbeat = setup.lease;
    let (mut owner, ready) = Role::start(&setup);
    owner.must("publish weights 3000000 1");
    Target {
        owner,
        address: parts(&ready).0,
        pki,
        _folder: folder,
    }
}

impl Target {
    fn connect(&self, name: &str) -> Raw {
        Raw::tls(
            &self.address,
            tls_config(self.pki.ca(), Some(&self.pki.issue(name))),
        )
    }
}

/// Forwards one connection to `address`, and records the bytes that the client sends.
fn recording_proxy(address: String) -> (String, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let own = format!("tcp://{}", listener.local_addr().expect("an address"));
    let record = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&record);
    std::thread::spawn(move || {
        let (mut client, _) = listener.accept().expect("a client");
        let mut server = TcpStream::connect(socket(&address)).expect("it listens");
        let (mut back, mut to) = (
            server.try_clone().expect("a second fd"),
            client.try_clone().expect("a second fd"),
        );
        std::thread::spawn(move || {
            std::io::copy(&mut back, &mut to).ok();
            to.shutdown(std::net::Shutdown::Both).ok();
        });
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = client.read(&mut bytes) {
            kept.lock()
                .expect("no panic under it")
                .extend_from_slice(&bytes[..count]);
            if server.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        server.shutdown(std::net::Shutdown::Both).ok();
    });
    (own, record)
}

#[test]
fn recorded_bytes_open_nothing() {
    let mut target = target();
    let (proxy, record) = recording_proxy(target.address.clone());
    let (mut peer, _) = Role::start(&Setup::peer(&proxy, Some(&target.pki.issue("victim"))));
    peer.must("fetch weights fabric");
    peer.must("release weights");
    peer.finish();
    eventually("it is gone", || {
        target.owner.must("stats").contains("connections: 0,")
    });

    // All that it said: its TLS hello, certificate, hello, fetch and release.
    let bytes = record.lock().expect("no panic under it").clone();
    assert!(bytes.len() > 500, "{} bytes were recorded", bytes.len());
    let mut raw = Raw::plain(&target.address);
    raw.send(&bytes).ok();
    assert!(raw.closes());
    eventually("it is gone", || {
        target.owner.must("stats").contains("connections: 0,")
    });
    let stats = target.owner.must("stats");
    assert!(stats.contains("fetches: 1,"), "{stats}");
    assert_eq!(target.owner.must("importers weights"), "");
    target.owner.finish();
}

#[test]
fn a_second_hello_ends_the_connection() {
    let target = target();
    let mut raw = target.connect("peer");
    raw.welcome(None);
    raw.ask(1, ping()).expect("an answer");
    raw.frame(&hello(None)).expect("sent");
    assert!(raw.closes(), "hello and hello again");
    target.owner.finish();
}

#[test]
fn a_stolen_session_is_worth_nothing_to_another_peer() {
    let mut target = target();
    let mut victim = target.connect("victim");
    let welcome = victim.welcome(None);
    let granted = victim.ask(1, fetch("weights")).expect("an answer");
    assert!(matches!(granted, Answer::Granted(_)), "{granted:?}");
    assert_eq!(target.owner.must("importers weights"), "victim");

    // With the right token and another certificate: at most a session of its own.
    let mut thief = target.connect("thief");
    if let Ok(egmem::exchange::protocol::Greeting::Welcome(theirs)) =
        thief.greet(Some(welcome.session.clone()))
    {
        assert!(!theirs.resumed && theirs.peer == "thief", "{theirs:?}");
    }
    drop(thief);
    // The victim has noticed nothing.
    let reply = victim.ask(2, ping()).expect("an answer");
    assert!(matches!(reply, Answer::Done));
    assert_eq!(target.owner.must("importers weights"), "victim");

    // The victim itself may come back with it, once its connection is gone or before.
    let mut again = target.connect("victim");
    let resumed = again.welcome(Some(welcome.session));
    assert!(resumed.resumed);
    assert_eq!(target.owner.must("importers weights"), "victim");
    drop((victim, again));
    target.owner.finish();
}

#[test]
fn a_made_up_token_resumes_no_session() {
    let target = target();
    let mut raw = target.connect("peer");
    let made_up = egmem::exchange::protocol::Secret::new(&[0x42; 32]).expect("short");
    assert!(!raw.welcome(Some(made_up)).resumed);
    drop(raw);
    target.owner.finish();
}
