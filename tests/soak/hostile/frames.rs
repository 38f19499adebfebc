//! Frames that are none, too large, too slow, or hellos that claim too much.

use std::io;
use std::time::Duration;

use egmem::exchange::protocol::Secret;

use super::{Hostile, Target};
use egmem_tests::framed;

use crate::raw::{Raw, hello};

/// Before the hello or after it, over any address.
fn anywhere(hostile: &mut Hostile<'_>, target: &Target) -> io::Result<Raw> {
    match hostile.rng.u32(..4) {
        0 => Raw::tcp(&target.tcp),
        1 => Raw::unix(&target.unix),
        2 => hostile.connect(target),
        _ => hostile.session(target),
    }
}

pub fn garbage(hostile: &mut Hostile<'_>, target: &Target) -> io::Result<()> {
    let mut raw = anywhere(hostile, target)?;
    let mut bytes: Vec<u8> = (0..hostile.rng.usize(1..2000))
        .map(|_| hostile.rng.u8(..))
        .collect();
    match hostile.rng.u32(..4) {
        0 => {}
        // A frame of garbage, one of endless nesting, one that claims a huge array.
        1 => bytes = framed(&bytes),
        2 => bytes = framed(&b"\xa1\x61a".repeat(1000)),
        _ => bytes = framed(b"\x9b\x00\x00\x00\x7f\xff\xff\xff\xff"),
    }
    raw.send(&bytes)?;
    raw.read().map(drop)
}

pub fn oversized(hostile: &mut Hostile<'_>, target: &Target) -> io::Result<()> {
    let mut raw = anywhere(hostile, target)?;
    // A frame is at most 4 MiB, and 256 KiB at first: that much and no more is to be buffered.
    let claimed = hostile
        .rng
        .choice([200 << 10, 4 << 20, 4 << 20 | 1, u32::MAX]);
    raw.send(&claimed.expect("four").to_be_bytes())?;
    for _ in 0..64 {
        raw.send(&[0x5b; 64 << 10])?;
    }
    raw.read().map(drop)
}

pub fn drip(hostile: &mut Hostile<'_>, target: &Target) -> io::Result<()> {
    let mut raw = anywhere(hostile, target)?;
    let bytes = framed(&hello(None));
    for byte in bytes.iter().take(hostile.rng.usize(1..40)) {
        raw.send(std::slice::from_ref(byte))?;
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

pub fn hellos(hostile: &mut Hostile<'_>, target: &Target) -> io::Result<()> {
    let mut raw = hostile.session(target)?;
    for _ in 0..hostile.rng.u32(1..100) {
        raw.frame(&hello(None))?;
    }
    raw.read().map(drop)
}

/// Claims another's session.
pub fn resume(hostile: &mut Hostile<'_>, target: &Target) -> io::Result<()> {
    let mut raw = hostile.connect(target)?;
    let token: Vec<u8> = (0..32).map(|_| hostile.rng.u8(..)).collect();
    raw.frame(&hello(Secret::new(&token)))?;
    let greeting = raw.read()?;
    let welcome = crate::raw::field(&greeting, "welcome");
    if welcome.and_then(|welcome| crate::raw::field(welcome, "resumed"))
        == Some(&ciborium::Value::Bool(true))
    {
        hostile
            .journal
            .violation("a token that nobody was given resumed a session");
    }
    Ok(())
}
