//! Whether copies over a border of two chunks move the right bytes.

use egmem::driver::MemcpyDesc;
use egmem::stream::BatchCopy;
use egmem::{Buffer, Growth, Result, Stream};

use crate::Place;

const MIB: u64 = 1 << 20;
const SEED: u64 = 0x0001_0203_0405_0607;

/// Copies 2 MiB over the border of two chunks to another memory and back, by a single copy and by a batch; returns
/// the results as text.
///
/// # Errors
/// The library's.
pub fn copies(place: &Place) -> Result<String> {
    let growth = Growth::steady().chunk(2 * MIB);
    let ours = Buffer::on(place.node).bytes(4 * MIB).growth(growth);
    let ours = ours.allocate(&place.driver)?;
    let theirs = Buffer::on(egmem::driver::Location::Device(place.gpu)).bytes(2 * MIB);
    let theirs = theirs.allocate(&place.driver)?;
    let stream = Stream::new(&place.driver, place.gpu)?;
    let words: Vec<u64> = (0..4 * MIB / 8).map(|index| index ^ SEED).collect();
    let mut said = Vec::new();
    for (name, how) in [
        ("cuMemcpyAsync", How::Single),
        ("cuMemcpyBatchAsync", How::Batch),
        ("Stream::copy_batch", How::Divided),
    ] {
        ours.write_at(0, &words)?;
        let result = round_trip(&ours, &theirs, &stream, how);
        said.push(match result {
            Err(error) => format!("{name}: {error}"),
            Ok(()) => {
                let mut read = vec![0_u64; words.len()];
                ours.read_at(0, &mut read)?;
                let expected = |index: usize| match index as u64 * 8 / MIB {
                    1 | 2 => index as u64 ^ SEED,
                    _ => 0,
                };
                let right = read
                    .iter()
                    .enumerate()
                    .all(|(i, &word)| word == expected(i));
                format!("{name}: {}", if right { "right" } else { "WRONG BYTES" })
            }
        });
    }
    Ok(format!(
        "copies over a border of chunks: {}",
        said.join(", ")
    ))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Single,
    Batch,
    /// A batch that the library divides at the border.
    Divided,
}

/// Moves the middle to `theirs`, zeroes all, and moves it back.
fn round_trip(ours: &Buffer, theirs: &Buffer, stream: &Stream, how: How) -> Result<()> {
    let (here, there) = (ours.device_ptr().add(MIB), theirs.device_ptr());
    for (dst, src) in [(there, here), (here, there)] {
        let (bytes, is_out) = (2 * MIB, dst == there);
        let divided = |to, from| [BatchCopy { to, from, bytes }];
        match how {
            How::Single if is_out => stream.copy(theirs, 0, ours, MIB, bytes)?,
            How::Single => stream.copy(ours, MIB, theirs, 0, bytes)?,
            How::Divided if is_out => stream.copy_batch(theirs, ours, &divided(0, MIB))?,
            How::Divided => stream.copy_batch(ours, theirs, &divided(MIB, 0))?,
            How::Batch => {
                let copy = MemcpyDesc { dst, src, bytes };
                // SAFETY: both ranges are mapped for the GPU and live until the stream is synchronised below; no
                // other code uses them.
                unsafe {
                    let driver = stream.driver();
                    driver.memcpy_batch_async(&[copy], stream.handle())?;
                }
            }
        }
        stream.synchronize()?;
        if dst == there {
            ours.fill(0)?;
        }
    }
    Ok(())
}
