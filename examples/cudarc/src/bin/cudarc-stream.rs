//! A copy on cudarc's stream goes on while the CPU works: its ticket owns the memory until the copy has ended.
//!
//! ```text
//! cargo run -p egmem-cudarc --bin cudarc-stream
//! ```
//! Without a GPU it says so.

use std::error::Error;
use std::sync::Arc;

use cudarc::driver::CudaContext;
use egmem::{Buffer, Driver, Explained, Stream};

const BYTES: u64 = 64 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    // First, since cudarc panics where there is no libcuda.
    let driver = match Driver::open() {
        Ok(driver) => driver,
        Err(error) => {
            println!("no GPU to show this on: {}", Explained(&error));
            return Ok(());
        }
    };
    let theirs = CudaContext::new(0)?.new_stream()?;
    // SAFETY: cudarc's stream lives until the end of this function, longer than `stream` and its ticket.
    let stream = unsafe { Stream::borrowed(&driver, (&*theirs).into()) };

    let source = Arc::new(Buffer::near(&driver, 0, BYTES)?);
    let numbers: Vec<u64> = (0..BYTES / 8).collect();
    source.write_at(0, &numbers)?;
    let target = Buffer::near(&driver, 0, BYTES)?;
    let copy = stream.start_copy((target, 0), (Arc::clone(&source), 0), BYTES)?;

    let mut seen = vec![0_u64; numbers.len()];
    source.read_at(0, &mut seen)?; // meanwhile
    expect("the CPU reads the source of a copy", &seen, &numbers)?;
    let (target, _) = copy.wait()?;
    target.read_at(0, &mut seen)?;
    expect("and then the copy", &seen, &numbers)?;
    Ok(())
}

/// Checks every word.
fn expect(what: &str, words: &[u64], right: &[u64]) -> Result<(), String> {
    if words != right {
        return Err(format!("{what}: wrong"));
    }
    println!("{what}: right");
    Ok(())
}
