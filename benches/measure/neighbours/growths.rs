//! The ways to grow.

use std::any::Any;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use egmem::driver::{Access, AccessDesc, Location};
use egmem::pinned::PinnedHost;
use egmem::vmm::{Mapping, PhysicalMemory, Reservation};
use egmem::{Backing, Buffer, Growth, Heap, Result};

use crate::Place;
use crate::steps::{Kind, Steps};

/// A way to allocate [`Place::bytes`].
#[derive(Clone, Copy)]
pub enum Way {
    /// Nothing, for two seconds.
    Idle,
    /// The driver's calls, each timed.
    Calls(Calls),
    /// A buffer.
    Buffer(Growth),
    /// A buffer of registered pages.
    Registered(Growth),
    /// A buffer that can be shared.
    Shareable(Growth),
    /// One block of a heap.
    Heap(Option<Growth>),
    /// `cuMemHostAlloc`.
    Pinned,
}

/// How the driver is called for each chunk.
#[derive(Clone, Copy)]
pub struct Calls {
    /// The bytes of a chunk; 0: one chunk for all.
    pub chunk: u64,
    pub grant: Grant,
    /// In percent of a chunk's time.
    pub rest: u32,
}

/// The locations that are granted the memory, and the moment of the grant.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Grant {
    /// The host and every GPU, each chunk for itself.
    All,
    /// The host alone.
    Host,
    /// The host and the first GPU.
    One,
    /// The host and every GPU, all chunks in one call at the end.
    AtLast,
}

const MIB: u64 = 1 << 20;

/// The row without growth.
pub const IDLE: &str = "none";

const fn calls(mib: u64, grant: Grant, rest: u32) -> Way {
    Way::Calls(Calls {
        chunk: mib * MIB,
        grant,
        rest,
    })
}

/// All of them, with the names that the table shows; those that matter most first, because the time may end.
pub const GROWTHS: &[(&str, Way)] = &[
    (IDLE, Way::Idle),
    ("registered", Way::Registered(Growth::steady())),
    (
        "registered, 256 MiB",
        Way::Registered(Growth::steady().chunk(256 * MIB)),
    ),
    (
        "registered, 1 GiB",
        Way::Registered(Growth::steady().chunk(1024 * MIB)),
    ),
    ("registered, gentle", Way::Registered(Growth::gentle())),
    ("2 MiB", calls(2, Grant::All, 0)),
    ("16 MiB", calls(16, Grant::All, 0)),
    ("64 MiB", calls(64, Grant::All, 0)),
    ("256 MiB", calls(256, Grant::All, 0)),
    ("1 GiB", calls(1024, Grant::All, 0)),
    ("64 MiB, one grant at the end", calls(64, Grant::AtLast, 0)),
    ("heap", Way::Heap(None)),
    ("heap, gentle", Way::Heap(Some(Growth::gentle()))),
    ("16 MiB, rest 25 %", calls(16, Grant::All, 25)),
    ("4 MiB, rest 50 %", calls(4, Grant::All, 50)),
    ("one piece", calls(0, Grant::All, 0)),
    ("64 MiB, host alone", calls(64, Grant::Host, 0)),
    ("64 MiB, one GPU", calls(64, Grant::One, 0)),
    ("cuMemHostAlloc", Way::Pinned),
    ("buffer, gentle", Way::Buffer(Growth::gentle())),
    ("buffer, shareable", Way::Shareable(Growth::steady())),
    (
        "buffer, shareable, gentle",
        Way::Shareable(Growth::gentle()),
    ),
];

impl Way {
    /// A buffer's default.
    pub const STEADY: Self = Self::Buffer(Growth::steady());

    /// Returns the bytes of a chunk, for the picture: of the ways that differ in nothing else.
    pub const fn plain_chunk(self) -> Option<u64> {
        match self {
            Self::Calls(Calls {
                chunk: 1..,
                grant: Grant::All,
                rest: 0,
            }) => Some(self.chunk()),
            _ => None,
        }
    }

    const fn chunk(self) -> u64 {
        match self {
            Self::Calls(calls) => calls.chunk,
            _ => 0,
        }
    }

    /// Returns whether the way is another one on this machine.
    pub fn is_of_use(self, place: &Place) -> bool {
        match self {
            Self::Calls(calls) => {
                (calls.grant != Grant::One || place.gpus.len() > 1) && calls.chunk <= place.bytes
            }
            _ => true,
        }
    }

    /// Allocates.
    ///
    /// # Errors
    /// The library's.
    pub fn grow(self, place: &Place, steps: &mut Steps) -> Result<Grown> {
        let (driver, bytes) = (&place.driver, place.bytes);
        let gpus = || place.gpus.iter().copied();
        Ok(match self {
            Self::Idle => {
                thread::sleep(Duration::from_secs(if driver.is_simulated() {
                    0
                } else {
                    2
                }));
                Grown::Whole(Box::new(()), None)
            }
            Self::Calls(calls) => Grown::Chunks(calls.grow(place, steps)?),
            Self::Buffer(growth) | Self::Shareable(growth) | Self::Registered(growth) => {
                let options = Buffer::on(place.node).access_by(gpus()).bytes(bytes);
                let options = match self {
                    Self::Shareable(_) => options.shareable(),
                    Self::Registered(_) => options.backing(Backing::Registered),
                    _ => options,
                };
                Grown::buffer(options.growth(growth).allocate(driver)?)
            }
            Self::Heap(growth) => {
                let mut options = Heap::on(place.node).access_by(gpus()).limit(bytes);
                if let Some(growth) = growth {
                    options = options.growth(growth);
                }
                let layout = std::alloc::Layout::from_size_align(bytes as usize, 256)
                    .map_err(|error| egmem::Error::invalid("size", error.to_string()))?;
                let heap = options.build(driver)?;
                let block = heap.allocate(layout)?;
                Grown::Whole(Box::new((block, heap)), None)
            }
            Self::Pinned => {
                Grown::Whole(Box::new(PinnedHost::new(driver, place.gpu, bytes)?), None)
            }
        })
    }
}

/// The memory.
pub enum Grown {
    Chunks(Vec<(Mapping, PhysicalMemory)>),
    /// With the size of a buffer's chunks, in bytes.
    Whole(Box<dyn Any>, Option<u64>),
}

impl Grown {
    fn buffer(buffer: Buffer) -> Self {
        let chunk = buffer.physical().first().map(|part| part.size().padded());
        Self::Whole(Box::new(buffer), chunk)
    }

    /// Returns the size of the chunks, in bytes, if it is known.
    pub fn chunk(&self) -> Option<u64> {
        match self {
            Self::Chunks(chunks) => chunks.first().map(|(_, memory)| memory.size().padded()),
            Self::Whole(_, chunk) => *chunk,
        }
    }

    /// Gives it back, the last chunk first.
    ///
    /// # Errors
    /// The driver's.
    pub fn give_back(self, steps: &mut Steps) -> Result<()> {
        let chunks = match self {
            Self::Whole(memory, _) => {
                drop(memory);
                return Ok(());
            }
            Self::Chunks(chunks) => chunks,
        };
        for (mapping, memory) in chunks.into_iter().rev() {
            let unmapped = steps.time(Kind::Unmap, || mapping.unmap());
            unmapped.map_err(|refused| refused.1)?;
            steps.time(Kind::Release, || memory.release())?;
        }
        Ok(())
    }
}

impl Calls {
    fn grow(self, place: &Place, steps: &mut Steps) -> Result<Vec<(Mapping, PhysicalMemory)>> {
        let gpus = match self.grant {
            Grant::Host => &[],
            Grant::One => &place.gpus[..1],
            Grant::All | Grant::AtLast => &place.gpus[..],
        };
        let who = gpus.iter().copied().chain([Location::Host]);
        let access: Vec<_> = who
            .map(|location| AccessDesc::new(location, Access::ReadWrite))
            .collect();
        let range = Reservation::options().reserve(&place.driver, place.bytes)?;
        let range = Arc::new(range);
        let chunk = match self.chunk {
            0 => place.bytes,
            chunk => chunk,
        };
        let mut made: Vec<(Mapping, PhysicalMemory)> = Vec::new();
        for offset in (0..place.bytes).step_by(chunk as usize) {
            let began = Instant::now();
            let bytes = chunk.min(place.bytes - offset);
            let options = PhysicalMemory::options(place.node);
            let memory = steps.time(Kind::Create, || options.create(&place.driver, bytes))?;
            let mut mapping = steps.time(Kind::Map, || range.map(offset, &memory))?;
            if self.grant != Grant::AtLast {
                steps.time(Kind::Grant, || mapping.set_access(&access))?;
            }
            made.push((mapping, memory));
            if self.rest > 0 {
                let rest = began.elapsed() * self.rest / 100;
                steps.time(Kind::Rest, || thread::sleep(rest));
            }
        }
        if self.grant == Grant::AtLast {
            let mut all: Vec<&mut Mapping> = made.iter_mut().map(|(mapping, _)| mapping).collect();
            steps.time(Kind::Grant, || {
                Mapping::set_access_together(&mut all, &access)
            })?;
        }
        Ok(made)
    }
}
