//! Frames by hand, as a program of another make would write and read them.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Longer than any answer takes, even emulated.
const PATIENCE: Duration = Duration::from_secs(120);

/// Writes a frame.
pub fn write_frame(stream: &mut TcpStream, bytes: &[u8]) {
    let len = u32::try_from(bytes.len()).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(&len.to_be_bytes()).unwrap();
    stream.write_all(bytes).unwrap();
}

/// Reads a frame.
pub fn read_frame(stream: &mut TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut len = [0; 4];
    stream.read_exact(&mut len).unwrap();
    let mut bytes = vec![0; u32::from_be_bytes(len) as usize];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}
