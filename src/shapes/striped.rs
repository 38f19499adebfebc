//! One range of addresses whose memory lies at several locations in turn.

use std::ops::Range;

use crate::driver::{Driver, Location};
use crate::ledger::AllocPath;
use crate::memory::Memory;
use crate::size::Granularity;
use crate::{Buffer, BufferOptions, Error, Result};

/// How a range is cut into stripes: which locations take turns, and with how much.
///
/// ```
/// use egmem::driver::NodeId;
/// use egmem::shapes::Stripes;
/// use egmem::{Driver, Machine};
///
/// // 64 MiB on four nodes in turn, 4 MiB at a time; node 0 takes two turns.
/// let driver = Driver::simulated(Machine::gh200x4())?; // Driver::open() on a real machine
/// let plan = Stripes::over([0, 0, 1, 2, 3].map(NodeId)).stripe(4 << 20);
/// let striped = plan.options(64 << 20)?.allocate(&driver)?;
/// let stripes = egmem::shapes::stripes(&striped);
/// assert_eq!(stripes[1].bytes, 8 << 20..12 << 20); // node 0's turns are one stripe
/// assert_eq!(stripes[1].location, NodeId(1).into());
/// striped.fill(1)?;
/// # Ok::<(), egmem::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Stripes {
    turns: Vec<Location>,
    stripe: u64,
    front: Option<(Location, u64)>,
}

impl Stripes {
    /// Takes the locations in this order, again and again, with 2 MiB each: host nodes, GPUs, or both. One that is named
    /// more often gets more.
    pub fn over<L: Into<Location>>(turns: impl IntoIterator<Item = L>) -> Self {
        Self {
            turns: turns.into_iter().map(Into::into).collect(),
            stripe: Granularity::TWO_MIB.bytes(),
            front: None,
        }
    }

    /// Sets the bytes of each turn: a multiple of the driver's granularity, 2 MiB on every driver measured so far. Each
    /// stripe takes three calls of the driver, so more bytes make fewer calls.
    pub const fn stripe(mut self, bytes: u64) -> Self {
        self.stripe = bytes;
        self
    }

    /// Puts the first `bytes` of the range at another location, such as a GPU: a multiple of the granularity.
    pub fn front(mut self, location: impl Into<Location>, bytes: u64) -> Self {
        self.front = Some((location.into(), bytes));
        self
    }

    /// Returns the parts of a range of `bytes`, in the order of addresses. Neighbours are at different locations.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no location, for a stripe or a range of 0 bytes, and for more than 1,048,576 turns of
    /// different locations ([`Buffer::MAX_PARTS`]).
    pub fn parts(&self, bytes: u64) -> Result<Vec<(Location, u64)>> {
        if self.turns.is_empty() {
            return Err(Error::invalid("locations", "the list is empty"));
        }
        if self.stripe == 0 || bytes == 0 {
            let what = if bytes == 0 { "size" } else { "stripe" };
            return Err(Error::invalid_of(what, "it is 0 bytes", "1 byte or more"));
        }
        let front = self
            .front
            .map(|(location, front)| (location, front.min(bytes)));
        let mut rest = bytes - front.map_or(0, |(_, front)| front);
        let stripe = self.checked_stripe(rest)?;
        let turns = self.turns.iter().cycle().map_while(|&location| {
            let part = rest.min(stripe);
            rest -= part;
            (part > 0).then_some((location, part))
        });
        let mut parts: Vec<(Location, u64)> = Vec::new();
        for (location, part) in front.into_iter().chain(turns) {
            match parts.last_mut() {
                Some((last, bytes)) if *last == location => *bytes += part,
                _ if part > 0 => parts.push((location, part)),
                _ => {}
            }
        }
        Ok(parts)
    }

    /// Returns the bytes of each turn of a range of `bytes`: all of them where every turn is at one location.
    fn checked_stripe(&self, bytes: u64) -> Result<u64> {
        if self.turns.windows(2).all(|pair| pair[0] == pair[1]) {
            return Ok(bytes);
        }
        let (turns, most) = (bytes.div_ceil(self.stripe), Buffer::MAX_PARTS as u64);
        if turns <= most {
            return Ok(self.stripe);
        }
        let why = format!(
            "{} bytes make {turns} stripes, more than {most}",
            self.stripe
        );
        let least = bytes.div_ceil(most);
        let least = least.next_multiple_of(Granularity::TWO_MIB.bytes());
        let valid = format!("{least} bytes or more");
        Err(Error::invalid_of("stripe", why, valid))
    }

    /// Returns options for a buffer of `bytes` that is cut like this.
    ///
    /// # Errors
    /// As [`parts`](Self::parts).
    pub fn options(&self, bytes: u64) -> Result<BufferOptions> {
        let options = Buffer::in_parts(self.parts(bytes)?);
        Ok(options.recorded_as(AllocPath::ShapeChunk, None))
    }

    /// Allocates `bytes` that are cut like this, for the CPU, where it can have access, and every GPU.
    ///
    /// # Errors
    /// As [`parts`](Self::parts) and [`BufferOptions::allocate`].
    #[track_caller]
    pub fn allocate(&self, driver: &Driver, bytes: u64) -> Result<Buffer> {
        self.options(bytes)?.allocate(driver)
    }
}

/// A part of a buffer, and where it lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stripe {
    /// Where its memory is.
    pub location: Location,
    /// The bytes from the buffer's start, without padding.
    pub bytes: Range<u64>,
}

/// Returns which part of `buffer` lies where, in the order of addresses. [`Buffer::set_access_at`] changes the access to a
/// range of whole parts, and [`BufferOptions::chunk`] makes them smaller.
pub fn stripes(buffer: &Buffer) -> Vec<Stripe> {
    let mut start = 0;
    let parts = buffer.mappings().iter().map(|mapping| {
        let end = start + mapping.size().padded();
        let stripe = Stripe {
            location: mapping.location(),
            bytes: start..end.min(buffer.len()),
        };
        start = end;
        stripe
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn location(node: i32) -> Location {
        match node {
            3 => Location::Device(0),
            node => Location::HostNuma(node),
        }
    }

    proptest! {
        #[test]
        fn each_byte_is_at_the_location_whose_turn_it_is(
            turns in prop::collection::vec(0..4, 1..6),
            stripe in 1_u64..100,
            front in prop::option::of((0..4, 0_u64..300)),
            bytes in 1_u64..1000,
        ) {
            let mut plan = Stripes::over(turns.iter().map(|&node| location(node))).stripe(stripe);
            if let Some((node, bytes)) = front {
                plan = plan.front(location(node), bytes);
            }
            let parts = plan.parts(bytes).unwrap();
            let all: u64 = parts.iter().map(|(_, part)| part).sum();
            prop_assert_eq!(all, bytes);
            prop_assert!(parts.windows(2).all(|pair| pair[0].0 != pair[1].0));
            prop_assert!(parts.iter().all(|&(_, part)| part > 0));
            let (front_at, front_len) = front.map_or((0, 0), |(node, len)| (node, len));
            let mut at = 0;
            for (place, part) in parts {
                for byte in [at, at + part / 2, at + part - 1] {
                    let expected = match byte.checked_sub(front_len) {
                        None => location(front_at),
                        Some(byte) => location(turns[(byte / stripe) as usize % turns.len()]),
                    };
                    prop_assert_eq!(place, expected, "byte {}", byte);
                }
                at += part;
            }
        }
    }

    #[test]
    fn plans_that_cannot_be_are_refused() {
        let invalid = |result: Result<Vec<(Location, u64)>>, argument: &str| {
            let error = result.unwrap_err();
            let is_it = matches!(error, Error::InvalidArgument { what, .. } if what == argument);
            assert!(is_it, "{error}");
        };
        invalid(Stripes::over::<Location>([]).parts(1), "locations");
        let plan = Stripes::over([Location::HostNuma(0)]);
        invalid(plan.parts(0), "size");
        invalid(plan.stripe(0).parts(1), "stripe");
        let plan = Stripes::over([0, 1].map(Location::HostNuma)).stripe(1);
        invalid(plan.parts(1 << 50), "stripe");
        invalid(plan.parts(u64::MAX), "stripe");
        invalid(plan.parts(Buffer::MAX_PARTS as u64 + 1), "stripe");
        let most = plan.parts(Buffer::MAX_PARTS as u64).unwrap();
        assert_eq!(most.len(), Buffer::MAX_PARTS);
    }

    #[test]
    fn turns_at_one_location_are_one_part_of_any_size() {
        let node = Location::HostNuma(0);
        let plan = Stripes::over([node, node]).stripe(1);
        assert_eq!(plan.parts(1 << 50).unwrap(), [(node, 1 << 50)]);
    }
}
