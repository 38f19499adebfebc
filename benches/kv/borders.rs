//! Tests how the driver handles one copy over the border of two allocations.

use egmem::driver::MemcpyDesc;
use egmem::pinned::DeviceMemory;
use egmem::{Buffer, Driver, Growth, Memory, Stream};

use crate::Result;
use crate::setup::node;

const CHUNK: u64 = 4 << 20;
const BYTES: u64 = 1 << 20;

/// The call of a copy.
#[derive(Clone, Copy, Debug)]
enum By {
    Single,
    Batch,
}

pub fn run(driver: &Driver) -> Result<()> {
    println!(
        "\none copy of 1 MiB of host memory, half of it on each side of a border of allocations"
    );
    for by in [By::Single, By::Batch] {
        for (way, to_gpu) in [("to the GPU", true), ("to the host", false)] {
            let done = match copy(driver, by, to_gpu) {
                Ok(true) => "the bytes are right".to_owned(),
                Ok(false) => "OTHER BYTES".to_owned(),
                Err(error) => format!("refused: {error}"),
            };
            println!("{:>8} {way:<12} {done}", format!("{by:?}"));
        }
    }
    Ok(())
}

/// Copies over a border, and back by copies that go over none. Returns whether the bytes came along.
fn copy(driver: &Driver, by: By, to_gpu: bool) -> Result<bool> {
    let growth = Growth::steady().chunk(CHUNK);
    let host = Buffer::on(node(driver)?).growth(growth).bytes(2 * CHUNK);
    let host = host.allocate(driver)?;
    let device = DeviceMemory::new(driver, 0, BYTES)?;
    let stream = Stream::new(driver, 0)?;
    let at = CHUNK - BYTES / 2;
    let mut bytes = vec![0_u8; BYTES as usize];
    fastrand::fill(&mut bytes);
    let halves = [0, BYTES / 2];
    host.write_at(at, &bytes)?;
    if !to_gpu {
        for half in halves {
            stream.copy(&device, half, &host, at + half, BYTES / 2)?;
        }
        host.fill(0)?;
    }
    let (ours, theirs) = (host.device_ptr().add(at), device.device_ptr());
    let (dst, src) = if to_gpu {
        (theirs, ours)
    } else {
        (ours, theirs)
    };
    let desc = MemcpyDesc {
        dst,
        src,
        bytes: BYTES,
    };
    // SAFETY: both memories live until the work was waited for, and nothing else uses them.
    unsafe {
        match by {
            By::Single => stream.copy_async(dst, src, BYTES)?,
            By::Batch => driver.memcpy_batch_async(&[desc], stream.handle())?,
        }
    }
    stream.finish()?;
    if to_gpu {
        host.fill(0)?;
        for half in halves {
            stream.copy(&host, at + half, &device, half, BYTES / 2)?;
        }
    }
    let mut after = vec![0_u8; BYTES as usize];
    host.read_at(at, &mut after)?;
    Ok(after == bytes)
}
