//! Peers that send much and allocate nothing while they do, since they are in the same process.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use egmem::exchange::protocol::{
    Ask, Greeting, Hello, MAGIC, Request, Secret, VERSION, Welcome, decode, encode,
};
use egmem::exchange::{Address, Server};
use egmem::share::BootId;

/// Longer than anything here takes, even emulated.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// A message with its length before it.
pub fn framed(bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).unwrap();
    [&length.to_be_bytes(), bytes].concat()
}

/// Requests one after the other, at least `bytes` of them.
pub fn requests(bytes: usize, ask: impl Fn(u64) -> Ask) -> Vec<u8> {
    let mut all = Vec::new();
    for id in 1.. {
        let ask = Some(ask(id));
        all.extend(framed(&encode(&Request { id, ask })));
        if all.len() >= bytes {
            break;
        }
    }
    all.shrink_to_fit();
    all
}

pub fn hello(resume: Option<Secret>, held: Option<Vec<u64>>) -> Vec<u8> {
    framed(&encode(&Hello {
        magic: MAGIC.into(),
        oldest: VERSION,
        newest: VERSION,
        boot: BootId::from_bytes([7; 16]),
        fabric: true,
        resume,
        held,
        agent: "x".repeat(255),
    }))
}

pub fn dial(server: &Server) -> TcpStream {
    let Address::Tcp { host, port } = &server.addresses()[0] else {
        panic!("no port");
    };
    let stream = TcpStream::connect((host.as_str(), *port)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// A session, and the stream that it is on.
pub fn greet(server: &Server, hello: &[u8]) -> (TcpStream, Welcome) {
    let mut stream = dial(server);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(hello).unwrap();
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut bytes = vec![0; u32::from_be_bytes(length) as usize];
    stream.read_exact(&mut bytes).unwrap();
    match decode(&bytes).unwrap() {
        Greeting::Welcome(welcome) => (stream, welcome),
        other => panic!("{other:?}"),
    }
}

/// Sends the bytes on all streams side by side and throws away what comes, until all has been sent on
/// those that the server does not close. Returns how many bytes went.
pub fn flood(streams: &mut [TcpStream], bytes: &[u8]) -> usize {
    const MOST: usize = 64;
    assert!(streams.len() <= MOST);
    let (mut sent, mut closed) = ([0; MOST], [false; MOST]);
    let mut sink = [0; 16 << 10];
    let begun = Instant::now();
    for stream in streams.iter() {
        stream.set_nonblocking(true).unwrap();
    }
    loop {
        let (mut over, mut moved) = (true, false);
        for (at, stream) in streams.iter_mut().enumerate() {
            while !closed[at] {
                match stream.read(&mut sink) {
                    Ok(0) => closed[at] = true,
                    Ok(_) => moved = true,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(_) => closed[at] = true,
                }
            }
            if closed[at] || sent[at] == bytes.len() {
                continue;
            }
            over = false;
            match stream.write(&bytes[sent[at]..]) {
                Ok(count) => {
                    sent[at] += count;
                    moved = true;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => closed[at] = true,
            }
        }
        if over {
            return sent.iter().sum();
        }
        assert!(begun.elapsed() < PATIENCE, "the server does not read");
        if !moved {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Waits until it is so.
#[track_caller]
pub fn until(what: impl std::fmt::Display, mut so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !so() {
        assert!(begun.elapsed() < PATIENCE, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
