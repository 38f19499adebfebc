//! The log of a service whose readers are slow or gone.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::Instant;

use egmem::exchange::protocol::{Hello, MAGIC, OLDEST, VERSION, encode};
use egmem::share::BootId;

use crate::serve_cli::harness::{PATIENCE, Service, USUAL};

#[test]
fn a_log_that_nobody_reads_does_not_stop_the_service() {
    let (tell, stderr) = mpsc::channel();
    let service = Service::start_with_stderr(USUAL, &["-vvv"], tell);
    let begun = Instant::now();
    // Each session leaves some lines of the log, of which the pipe and the queue hold 1 MiB together.
    while service.metric("egmem_dropped_log_lines_total") == 0 {
        assert!(begun.elapsed() < PATIENCE, "no line is dropped");
        (0..100).for_each(|_| come_and_go(&service));
    }
    assert_eq!(
        crate::serve_cli::harness::names(&service.ls()),
        ["scratch", "weights"]
    );
    // Once the pipe is read, the log reports how many lines were lost, and goes on.
    let mut pipe = stderr.recv().unwrap();
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        pipe.read_to_end(&mut text).unwrap();
        String::from_utf8_lossy(&text).into_owned()
    });
    service.drained();
    let text = reader.join().unwrap();
    assert!(
        text.contains("lines of the log were lost"),
        "{}",
        text.len()
    );
}

#[test]
fn the_log_has_each_tenth_of_a_filling() {
    let small = "bytes = \"16MiB\"\nchunk = \"8MiB\"";
    let config = USUAL.replace(small, "bytes = \"80MiB\"\nchunk = \"2MiB\"");
    let (tell, stderr) = mpsc::channel();
    let service = Service::start_with_stderr(&config, &["-v"], tell);
    service.drained();
    let mut text = String::new();
    stderr.recv().unwrap().read_to_string(&mut text).unwrap();
    let lines: Vec<_> = text
        .lines()
        .filter(|line| line.contains("filling the reserve"))
        .collect();
    assert_eq!(lines.len(), 10, "{text}");
    for words in ["node=0", "ready=80 MiB", "target=80 MiB", "GB/s"] {
        assert!(lines[9].contains(words), "{}", lines[9]);
    }
}

/// A session that is greeted, and ends.
fn come_and_go(service: &Service) {
    let hello = Hello {
        magic: MAGIC.into(),
        oldest: OLDEST,
        newest: VERSION,
        boot: BootId::from_bytes([1; 16]),
        resume: None,
        agent: "x".repeat(255),
        moves: false,
        fabric: false,
    };
    let bytes = encode(&hello);
    let mut stream = UnixStream::connect(service.path("egmem.sock")).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
        .write_all(&(bytes.len() as u32).to_be_bytes())
        .unwrap();
    stream.write_all(&bytes).unwrap();
    let mut len = [0; 4];
    stream.read_exact(&mut len).unwrap();
    let mut welcome = vec![0; u32::from_be_bytes(len) as usize];
    stream.read_exact(&mut welcome).unwrap();
}
