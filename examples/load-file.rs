//! A file goes straight into Extended GPU Memory: by io_uring and by `pread`, past the page cache, without a copy.
//!
//! ```text
//! cargo run --release --example load-file -- model.safetensors
//! ```
//! Without a file, one of 16 MiB is made. On GPU 0's node; where there is no GPU, on a simulated machine.

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Instant;

use egmem::proof::Prover;
use egmem::size::Bytes;
use egmem::{Buffer, Driver, Machine};
use io_uring::{IoUring, opcode, types};
use rustix::fs::{Advice, fadvise};

const PIECE: u64 = 1 << 20; // bytes of a request
const DEPTH: u32 = 16; // requests in flight

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here, so no times are shown");
    }
    let made = tempfile::NamedTempFile::new()?;
    let path = std::env::args_os().nth(1);
    let path = path.as_deref().map_or(made.path(), Path::new);
    if path == made.path() {
        std::fs::write(path, vec![7; 16 << 20])?;
    }
    // Whole blocks, so that the last one can be read past the page cache.
    let bytes = std::fs::metadata(path)?.len().max(1);
    let buffer = Buffer::near(&driver, 0, bytes.next_multiple_of(4096))?;
    let prover = Prover::new(&driver, 0)?;
    println!("{}; GB/s from the disk, and again", Bytes(bytes));
    for name in ["io_uring", "pread", "read and copy"] {
        let mut rates = Vec::new();
        forget(path)?;
        for _ in 0..2 {
            buffer.fill(0)?;
            let start = Instant::now();
            let loaded = match name {
                "io_uring" => by_io_uring(&open_direct(path)?, &buffer),
                "pread" => {
                    Ok(buffer
                        .cpu()?
                        .read_from_file(0, buffer.len(), open_direct(path)?, 0)?)
                }
                _ => std::fs::read(path).and_then(|read| {
                    buffer.write_at(0, &read).map_err(io::Error::other)?;
                    Ok(read.len() as u64)
                }),
            };
            let seconds = start.elapsed().as_secs_f64();
            prover.read(&buffer)?; // a kernel reads the bytes from the disk
            rates.push(match loaded {
                Err(error) => format!("not here: {error}"),
                Ok(loaded) if driver.is_simulated() => Bytes(loaded).to_string(),
                Ok(loaded) => format!("{:>6.2}", loaded as f64 / seconds / 1e9),
            });
        }
        println!("{name:<14} {}", rates.join(" "));
    }
    Ok(())
}

/// Drops the file from the page cache, so that each way begins with the disk.
fn forget(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    file.sync_all()?;
    Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
}

/// Opens a file past the page cache, where its file system can do that.
fn open_direct(path: &Path) -> io::Result<File> {
    let mut direct = OpenOptions::new();
    direct.read(true).custom_flags(libc::O_DIRECT);
    direct.open(path).or_else(|_| File::open(path))
}

fn by_io_uring(file: &File, buffer: &Buffer) -> io::Result<u64> {
    let view = buffer.cpu().map_err(io::Error::other)?;
    let mut ring = IoUring::new(DEPTH)?;
    let (mut next, mut in_flight, mut loaded) = (0, 0, Ok(0));
    while in_flight > 0 || next < view.len() && loaded.is_ok() {
        while next < view.len() && in_flight < DEPTH && loaded.is_ok() {
            let bytes = PIECE.min(view.len() - next) as u32;
            // The CPU's address of EGM is as good as any to the kernel.
            let to = view.as_ptr().wrapping_add(next as usize);
            let read = opcode::Read::new(types::Fd(file.as_raw_fd()), to, bytes);
            // SAFETY: file and memory outlive the request, whose end is waited for below; the view may be written.
            unsafe { ring.submission().push(&read.offset(next).build()) }
                .map_err(io::Error::other)?;
            next += u64::from(bytes);
            in_flight += 1;
        }
        match ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => std::process::abort(), // the kernel may write to the memory at any time
        }
        for done in ring.completion() {
            in_flight -= 1;
            loaded = match u64::try_from(done.result()) {
                Ok(count) => loaded.map(|before: u64| before + count),
                Err(_) => Err(io::Error::from_raw_os_error(-done.result())),
            };
        }
    }
    loaded
}
