//! The command line against a server that lies: no text of the server steers a terminal.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Output, Stdio};
use std::thread;

use egmem::driver::{Access, Location};
use egmem::exchange::Owner;
use egmem::exchange::protocol::*;
use egmem::share::{BootId, Description, Identity, InstanceId, Part};
use egmem::text::is_unsafe;

use egmem_tests::egmem;

/// Clears a screen, forges a line, and turns text around.
const HOSTILE: &str = "x\u{1b}[2J\u{9b}31m\n+ forged\r\u{202e}gpj\u{2028}\u{7f}";

fn entry(name: &str) -> Entry {
    let part = Part {
        identity: Identity {
            boot: BootId::from_bytes([1; 16]),
            instance: InstanceId::from_bytes([2; 16]),
            allocation: 1,
            generation: 0,
        },
        bytes: 2 << 20,
        location: Location::HostNuma(0),
    };
    Entry {
        name: name.into(),
        memory: Description {
            len: 2 << 20,
            offset: None,
            access: Access::ReadWrite,
            parts: vec![part],
        },
        leases: 0,
        owner: Owner::Server,
    }
}

fn welcome() -> Welcome {
    Welcome {
        version: VERSION,
        instance: InstanceId::from_bytes([2; 16]),
        boot: BootId::from_bytes([1; 16]),
        session: Secret::new(&[3; 32]).unwrap(),
        resumed: false,
        peer: HOSTILE.into(),
        heartbeat_ms: 200_000,
        lease_ms: 600_000,
        frame_bytes: 1 << 20,
        local: None,
    }
}

fn send(stream: &mut TcpStream, message: &impl serde::Serialize) -> std::io::Result<()> {
    let bytes = encode(message);
    stream.write_all(&(bytes.len() as u32).to_be_bytes())?;
    stream.write_all(&bytes)
}

fn receive(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    let mut bytes = vec![0; u32::from_be_bytes(len) as usize];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Greets every client and answers every request with these texts, until the test's process ends.
fn serve(greeting: Greeting, answer: Answer) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (greeting, answer) = (greeting.clone(), answer.clone());
            thread::spawn(move || -> std::io::Result<()> {
                let mut stream = stream?;
                receive(&mut stream)?;
                send(&mut stream, &greeting)?;
                loop {
                    let (id, _): Request = decode(&receive(&mut stream)?).unwrap();
                    let reply = FromServer::Reply(id, answer.clone());
                    send(&mut stream, &reply)?;
                }
            });
        }
    });
    address
}

/// Runs a command that must fail, and returns its error; no output has a character that steers a terminal.
fn fails(args: &[&str]) -> String {
    let mut command = egmem(args);
    let output: Output = command.stdin(Stdio::null()).output().unwrap();
    let (out, err) = (
        String::from_utf8(output.stdout).unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    );
    for text in [&out, &err] {
        let bad = |c: char| is_unsafe(c) && c != '\n';
        assert!(!text.contains(bad), "{args:?}: {text:?}");
        assert!(!text.contains("\n+ forged"), "{args:?}: {text:?}");
    }
    assert!(!output.status.success(), "{args:?}: {out}");
    err
}

#[test]
fn names_of_a_hostile_server_do_not_reach_the_terminal() {
    let names = Answer::Names(Names {
        entries: vec![entry("good"), entry(HOSTILE)],
        more: false,
    });
    let at = serve(Greeting::Welcome(welcome()), names);
    for args in [&["-vvv", "ls", &at][..], &["ls", "--json", &at]] {
        let error = fails(args);
        assert!(error.contains("breaks the protocol"), "{error}");
    }
}

#[test]
fn refusals_of_a_hostile_server_are_escaped() {
    let refused = Refused {
        reason: HOSTILE.into(),
        detail: HOSTILE.into(),
    };
    let answered = serve(
        Greeting::Welcome(welcome()),
        Answer::Refused(refused.clone()),
    );
    let at_once = serve(Greeting::Refused(refused), Answer::Done);
    for at in [&answered, &at_once] {
        for args in [
            &["ls", at][..],
            &["fetch", at, "x", "--sim", "gh200"],
            &["delete", at, "x"],
        ] {
            let error = fails(args);
            assert!(error.contains("\\u{1b}[2J"), "{args:?}: {error}");
        }
    }
}

#[test]
fn socket_paths_of_a_hostile_server_are_not_connected_to() {
    let long = format!("/{}", "x".repeat(200));
    for path in ["relative/socket", "/run/a\u{1b}", "/run/a\0b", "", &long] {
        let mut welcome = welcome();
        welcome.local = Some(path.into());
        let at = serve(Greeting::Welcome(welcome), Answer::Done);
        let error = fails(&["ls", &at]);
        assert!(error.contains("socket's path"), "{path:?}: {error}");
    }
}
