//! A program whose blocks change their sizes from phase to phase: its memory divided by its live bytes.
//!
//! In each phase nine tenths of the bytes are freed, at random, and as many are allocated in blocks of other sizes.
//! Every page is written. The figure is the most memory at the end of a phase, divided by the live bytes.

use std::alloc::Layout;
use std::io;

use fastrand::Rng;

use crate::entrant::Entrant;
use crate::peak;
use egmem_replay::contestants::{Room, Shared, SharedVisitor};

/// The live bytes at the end of each phase, give or take a block.
const LIVE: u64 = 512 << 20;
/// The phases' least and largest blocks, in bytes.
const SIZES: [(usize, usize); 9] = [
    (64, 512),
    (2 << 10, 16 << 10),
    (64 << 10, 512 << 10),
    (256, 2 << 10),
    (512 << 10, 4 << 20),
    (16 << 10, 64 << 10),
    (16, 128),
    (1 << 20, 8 << 20),
    (4 << 10, 32 << 10),
];
const PAGE: usize = 4096;

/// Prints the figure of each contestant whose memory can be measured, each in a process of its own.
pub fn run(kinds: &[Entrant]) {
    println!("phases of other sizes: memory by live bytes, at the worst end of a phase");
    for kind in kinds {
        match peak::child("phases", "", *kind) {
            Some(ratio) => println!("  {kind:<20} {ratio}"),
            None => println!("  {kind:<20} not known"),
        }
    }
}

/// Runs the phases and prints the figure.
///
/// # Errors
/// If the contestant cannot be made, or the kernel does not report the memory.
pub fn print(kind: Entrant) -> io::Result<()> {
    let room = Room {
        capacity: 8 * LIVE,
        blocks: (2 * LIVE / 16) as u32,
        align: 16,
    };
    let ratio = kind.with_shared(room, Phases)??;
    println!("{ratio:.3}");
    Ok(())
}

struct Phases;

impl SharedVisitor for Phases {
    type Output = io::Result<f64>;

    fn visit<S: Shared + Send + 'static>(self, shared: S) -> io::Result<f64> {
        let mut rng = Rng::with_seed(1);
        // Room for the most blocks, so that this list takes its memory before the clock starts.
        let mut blocks: Vec<(S::Block, Layout)> = Vec::with_capacity((LIVE / 64) as usize * 2);
        let before = peak::status("VmRSS:")? as i64;
        let slot = size_of::<(S::Block, Layout)>();
        let (mut live, mut worst, mut most) = (0_u64, 0.0_f64, 0);
        for (least, largest) in SIZES {
            while live > LIVE / 10 {
                let (block, layout) = blocks.swap_remove(rng.usize(..blocks.len()));
                live -= layout.size() as u64;
                // SAFETY: allocated below with this layout.
                unsafe { shared.free(block, layout) };
            }
            while live < LIVE {
                let size = rng.usize(least..=largest);
                let layout = Layout::from_size_align(size, 16).map_err(io::Error::other)?;
                let block = shared.allocate(layout);
                let block = block.ok_or_else(|| io::Error::other("no room"))?;
                touch(&shared, &block, size)?;
                blocks.push((block, layout));
                live += size as u64;
            }
            most = most.max(blocks.len());
            let grown = peak::status("VmRSS:")? as i64 - before - (most * slot) as i64;
            let memory = shared.backed().map_or(grown as f64, |backed| backed as f64);
            worst = worst.max(memory / live as f64);
        }
        for (block, layout) in blocks {
            // SAFETY: allocated above with this layout.
            unsafe { shared.free(block, layout) };
        }
        Ok(worst)
    }
}

fn touch<S: Shared>(shared: &S, block: &S::Block, size: usize) -> io::Result<()> {
    let address = shared.address(block);
    let address = address.ok_or_else(|| io::Error::other("its bytes are not there"))?;
    for offset in (0..size).step_by(PAGE).chain([size - 1]) {
        // SAFETY: a byte of the block, which only its owner accesses.
        unsafe { address.as_ptr().add(offset).write_volatile(1) };
    }
    Ok(())
}
