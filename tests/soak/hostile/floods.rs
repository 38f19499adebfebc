//! Too many connections, hellos, requests, and answers that the peer does not read.

use std::io::{self, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::json;

use super::{Hostile, Target};
use egmem_tests::framed;

use crate::raw::{Raw, request};

/// How long a peer does not read, and how many connections it opens at once.
const UNREAD: Duration = Duration::from_millis(1500);
const CONNECTIONS: usize = 40;

pub fn silent_connections(hostile: &mut Hostile<'_>, target: &Target) -> io::Result<()> {
    let count = hostile.rng.usize(1..CONNECTIONS);
    let silent: Vec<_> = (0..count)
        .map(|at| match at % 2 {
            0 => Raw::tcp(&target.tcp),
            _ => Raw::unix(&target.unix),
        })
        .collect();
    let pause = Duration::from_millis(hostile.rng.u64(..1000));
    std::thread::sleep(pause);
    silent.into_iter().try_for_each(|raw| raw.map(drop))
}

pub fn hello_flood(hostile: &mut Hostile<'_>, target: &Target) -> io::Result<()> {
    let mut sessions = Vec::new();
    for _ in 0..hostile.rng.usize(1..CONNECTIONS) {
        sessions.push(hostile.session(target)?);
        // Some end at once.
        if hostile.rng.bool() {
            sessions.clear();
        }
    }
    Ok(())
}

/// Asks for more than it reads.
pub fn unread(hostile: &mut Hostile<'_>, target: &Target) -> io::Result<()> {
    let mut raw = hostile.session(target)?;
    let what = hostile.rng.choice(["ping", "list"]).expect("two");
    let fields = match what {
        "ping" => json!(null),
        _ => json!({"prefix": ""}),
    };
    let many = framed(&request(1, what, fields)).repeat(500);
    let end = Instant::now() + UNREAD;
    while Instant::now() < end {
        raw.send(&many)?;
    }
    Ok(())
}

pub fn waits(hostile: &mut Hostile<'_>, target: &Target) -> io::Result<()> {
    let mut raw = hostile.session(target)?;
    for id in 0..100 {
        raw.request(
            id,
            "wait",
            json!({"name": format!("never/{id}"), "ms": u64::MAX}),
        )?;
    }
    let pause = Duration::from_millis(hostile.rng.u64(..1000));
    std::thread::sleep(pause);
    raw.read().map(drop)
}

/// The metrics' endpoint: slow heads, heads without end, answers that the peer does not read.
pub fn metrics(hostile: &mut Hostile<'_>, target: &Target) -> io::Result<()> {
    let streams: io::Result<Vec<_>> = (0..hostile.rng.usize(1..16))
        .map(|_| {
            let mut stream = TcpStream::connect(&target.metrics)?;
            stream.set_write_timeout(Some(Duration::from_secs(1)))?;
            match hostile.rng.u32(..3) {
                0 => stream.write_all(b"GET /metr")?,
                1 => stream.write_all(&[b'a'; 20_000])?,
                _ => stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")?,
            }
            Ok(stream)
        })
        .collect();
    let pause = Duration::from_millis(hostile.rng.u64(..500));
    std::thread::sleep(pause);
    streams.map(drop)
}
