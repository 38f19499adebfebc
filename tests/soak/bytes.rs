//! The bytes that clients write into memory, and how they check them.
//!
//! A header names the memory and counts its writes, so that a reader in another process can distinguish a
//! write under way from bytes that do not belong there.

use std::sync::atomic::{Ordering, fence};

use egmem::Result;
use egmem::exchange::RemoteBuffer;
use egmem::kernels::pattern;
use egmem::memory::CpuView;

const MAGIC: u64 = 0x6567_6d65_6d5f_736b;
/// Words of the header: the name, the count of writes (odd while one is under way), the seed.
const HEADER: u64 = 3;
/// Words read or written at a time.
const STEP: usize = 8192;

/// The result of a look at memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The bytes that its owner wrote.
    Good,
    /// Nothing was written yet.
    Empty,
    /// A write was under way, or was broken off by a crash.
    Torn,
}

fn mark(name: &str) -> u64 {
    // FNV-1a.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    hash ^ MAGIC
}

fn header(view: &CpuView<'_>) -> Result<[u64; 3]> {
    let mut header = [0; 3];
    view.read_at(0, &mut header)?;
    Ok(header)
}

/// Writes a new version under `name`: only the name's owner does.
pub fn write(memory: &RemoteBuffer, name: &str, seed: u64) -> Result<()> {
    let view = memory.cpu()?;
    let [_, count, _] = header(&view)?;
    let odd = count | 1;
    view.write_at(0, &[mark(name), odd, seed])?;
    fence(Ordering::SeqCst);
    let words = view.len() / 8;
    let mut at = HEADER;
    while at < words {
        let end = words.min(at + STEP as u64);
        let part: Vec<u64> = (at..end).map(|index| pattern(seed, index)).collect();
        view.write_at(at * 8, &part)?;
        at = end;
    }
    fence(Ordering::SeqCst);
    view.put(8, odd.wrapping_add(1))
}

/// Checks the bytes that the owner of `name` wrote; `Err` describes the bytes found instead.
pub fn check(memory: &RemoteBuffer, name: &str) -> Result<Result<Found, String>> {
    let view = memory.cpu()?;
    let before = header(&view)?;
    if before == [0; 3] {
        return Ok(Ok(Found::Empty));
    }
    let [found, count, seed] = before;
    // A reader can come between the words of the first header.
    if found == 0 {
        return Ok(Ok(Found::Torn));
    }
    if found != mark(name) {
        let text = format!("{name}: begins with {before:x?}, which its owner did not write");
        return Ok(Err(text));
    }
    if count % 2 == 1 {
        return Ok(Ok(Found::Torn));
    }
    fence(Ordering::SeqCst);
    let wrong = first_wrong(&view, HEADER, |index| pattern(seed, index))?;
    fence(Ordering::SeqCst);
    if header(&view)? != before {
        return Ok(Ok(Found::Torn));
    }
    Ok(match wrong {
        None => Ok(Found::Good),
        Some((index, word)) => Err(format!("{name}: word {index} is {word:#x}")),
    })
}

/// Where memory is not zero, if anywhere.
pub fn not_zero(memory: &RemoteBuffer) -> Result<Option<(u64, u64)>> {
    first_wrong(&memory.cpu()?, 0, |_| 0)
}

/// The first word from `first` on that is another than expected, and the word.
fn first_wrong(
    view: &CpuView<'_>,
    first: u64,
    expected: impl Fn(u64) -> u64,
) -> Result<Option<(u64, u64)>> {
    let words = view.len() / 8;
    let mut part = vec![0_u64; STEP];
    let mut at = first;
    while at < words {
        let count = (words - at).min(STEP as u64);
        let part = &mut part[..count as usize];
        view.read_at(at * 8, part)?;
        let wrong = (at..).zip(&*part);
        let mut wrong = wrong.filter(|(index, word)| **word != expected(*index));
        if let Some((index, word)) = wrong.next() {
            return Ok(Some((index, *word)));
        }
        at += count;
    }
    Ok(None)
}
