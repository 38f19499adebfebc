//! The ways to grow.

use std::any::Any;
use std::thread;
use std::time::Duration;

use egmem::driver::{Access, AccessDesc, Location};
use egmem::pinned::PinnedHost;
use egmem::vmm::PhysicalMemory;
use egmem::{Buffer, Growth, Result};

use crate::Place;

/// A way to allocate [`Place::bytes`].
#[derive(Clone, Copy)]
pub enum Way {
    /// Nothing, for two seconds.
    Idle,
    /// One call of `cuMemCreate`.
    OnePiece,
    /// A buffer.
    Buffer(Growth),
    /// `cuMemHostAlloc`.
    Pinned,
}

const MIB: u64 = 1 << 20;

/// The row without growth.
pub const IDLE: &str = "none";

/// All of them, with the names that the table shows.
pub const GROWTHS: &[(&str, Way)] = &[
    (IDLE, Way::Idle),
    ("one piece", Way::OnePiece),
    ("1 GiB (the default)", Way::STEADY),
    ("256 MiB", Way::Buffer(Growth::steady().chunk(256 * MIB))),
    ("64 MiB", Way::Buffer(Growth::steady().chunk(64 * MIB))),
    ("gentle: 16 MiB, rest 100 %", Way::Buffer(Growth::gentle())),
    ("16 MiB, rest 25 %", Way::Buffer(Growth::gentle().rest(25))),
    (
        "64 MiB, rest 50 %",
        Way::Buffer(Growth::gentle().chunk(64 * MIB).rest(50)),
    ),
    (
        "4 MiB, rest 50 %",
        Way::Buffer(Growth::gentle().chunk(4 * MIB).rest(50)),
    ),
    ("cuMemHostAlloc", Way::Pinned),
];

impl Way {
    /// A buffer's default.
    pub const STEADY: Self = Self::Buffer(Growth::steady());

    /// Allocates; the memory is given back when the value is dropped.
    ///
    /// # Errors
    /// The library's.
    pub fn grow(self, place: &Place) -> Result<Box<dyn Any>> {
        let (driver, bytes) = (&place.driver, place.bytes);
        Ok(match self {
            Self::Idle => {
                thread::sleep(Duration::from_secs(2));
                Box::new(())
            }
            Self::OnePiece => {
                let memory = PhysicalMemory::options(place.node).create(driver, bytes)?;
                let mut mapping = memory.map()?;
                let all = place.gpus.iter().copied().chain([Location::Host]);
                let all: Vec<_> = all
                    .map(|location| AccessDesc::new(location, Access::ReadWrite))
                    .collect();
                mapping.set_access(&all)?;
                Box::new((mapping, memory))
            }
            Self::Buffer(growth) => {
                let options = Buffer::on(place.node).access_by(place.gpus.iter().copied());
                Box::new(options.bytes(bytes).growth(growth).allocate(driver)?)
            }
            Self::Pinned => Box::new(PinnedHost::new(driver, place.gpu, bytes)?),
        })
    }
}
