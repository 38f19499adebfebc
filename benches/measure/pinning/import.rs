//! How long a second process takes until it has the same memory.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Instant;

use egmem::driver::{AccessDesc, HandleType, HandleTypes, Location, ShareableHandle};
use egmem::vmm::{MappedRange, PhysicalMemory};
use egmem::{Backing, Buffer, Driver, Error, Result};

use crate::{Args, Place};

/// The first fd after the standard streams.
const FIRST: i32 = 3;

fn failed(error: std::io::Error) -> Error {
    Error::system("talking to the second process", &error)
}

/// Returns the seconds of an import of `bytes`, for each backing that works: the median of the rounds.
pub fn measure(args: &Args, place: &Place, bytes: u64) -> Result<Vec<(Backing, f64)>> {
    let mut medians = Vec::new();
    for backing in [Backing::Registered, Backing::Driver] {
        let options = Buffer::on(place.node).bytes(bytes).growth(place.growth);
        let options = options.handle_types(HandleTypes::POSIX_FD).backing(backing);
        let buffer = options.allocate(&place.driver)?;
        let mut seconds = Vec::new();
        for _ in 0..args.rounds {
            seconds.push(import(args, &buffer)?);
        }
        seconds.sort_by(f64::total_cmp);
        medians.push((backing, seconds[seconds.len() / 2]));
    }
    Ok(medians)
}

/// Starts a second process, which imports the buffer.
fn import(args: &Args, buffer: &Buffer) -> Result<f64> {
    let mut fds: Vec<OwnedFd> = Vec::new();
    let mut sizes = Vec::new();
    for part in buffer.physical() {
        let ShareableHandle::PosixFd(fd) = part.export(HandleType::PosixFd)? else {
            return Err(Error::invalid("handle", "it is no fd"));
        };
        sizes.extend_from_slice(&part.size().padded().to_le_bytes());
        fds.push(fd);
    }
    let numbers: Vec<i32> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    // Beyond all fds that are passed, so that none is overwritten before it is.
    let spare = numbers.iter().max().unwrap_or(&0) + 1 + FIRST + numbers.len() as i32;
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.arg("--import").arg(fds.len().to_string());
    if let Some(sim) = &args.sim {
        command.args(["--sim", sim]);
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    // SAFETY: between fork and exec the closure only duplicates fds, and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            for (at, &fd) in numbers.iter().enumerate() {
                if libc::dup2(fd, spare + at as i32) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            for at in 0..numbers.len() as i32 {
                if libc::dup2(spare + at, FIRST + at) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                libc::close(spare + at);
            }
            Ok(())
        });
    }
    let mut child = command.spawn().map_err(failed)?;
    let sent = child.stdin.take().map(|mut stdin| stdin.write_all(&sizes));
    sent.transpose().map_err(failed)?;
    let mut answer = String::new();
    if let Some(mut stdout) = child.stdout.take() {
        stdout.read_to_string(&mut answer).map_err(failed)?;
    }
    child.wait().map_err(failed)?;
    answer
        .trim()
        .parse()
        .map_err(|_| Error::failed("importing in a second process", answer))
}

/// Imports the memory behind the fds, whose sizes come in by the standard input, and prints the seconds that it took.
pub fn serve(driver: &Driver, fds: usize) -> Result<()> {
    let mut sizes = Vec::new();
    std::io::stdin().read_to_end(&mut sizes).map_err(failed)?;
    let gpus = (0..driver.device_count()?).map(Location::Device);
    let access: Vec<_> = gpus
        .chain([Location::Host])
        .map(AccessDesc::read_write)
        .collect();
    // The context is made before.
    driver.mem_info(0)?;
    let began = Instant::now();
    let mut parts = Vec::new();
    for (at, size) in sizes.as_chunks::<8>().0.iter().enumerate().take(fds) {
        // SAFETY: the parent passed it, and nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(FIRST + at as i32) };
        let handle = ShareableHandle::PosixFd(fd);
        parts.push(PhysicalMemory::import(
            driver,
            &handle,
            u64::from_le_bytes(*size),
        )?);
    }
    let range = MappedRange::map(driver, parts, &access)?;
    println!("{}", began.elapsed().as_secs_f64());
    drop(range);
    Ok(())
}
