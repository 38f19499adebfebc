//! The message about a ring: a line of text before its memory.

use std::fmt;

use egmem_share::Description;

use crate::size::Granularity;
use crate::{Error, Growth, Result};

/// The beginning of the text: the kind of message and its version.
const KIND: &str = "egmem-ring 1";

/// One of a ring's sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Producer,
    Consumer,
}

impl Side {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Producer => "the producer's side of a ring",
            Self::Consumer => "the consumer's side of a ring",
        }
    }
}

/// A side that is sent, and the shape of its ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) side: Side,
    pub(super) shape: Shape,
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = match self.side {
            Side::Producer => "producer",
            Side::Consumer => "consumer",
        };
        let Shape {
            capacity,
            record,
            bytes,
        } = self.shape;
        write!(f, "{KIND} {side} {capacity} {record} {bytes}")
    }
}

impl Header {
    /// The most bytes of the text.
    pub(super) const MAX_TEXT: usize = 128;

    /// Reads a text of another process.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another kind of text.
    pub(super) fn read(text: &str) -> Result<Self> {
        let rest = text.strip_prefix(KIND);
        let words: Vec<&str> = rest.unwrap_or("").split_ascii_whitespace().collect();
        let side = match words.first() {
            Some(&"producer") => Some(Side::Producer),
            Some(&"consumer") => Some(Side::Consumer),
            _ => None,
        };
        let numbers = words.iter().skip(1).map_while(|word| word.parse().ok());
        let numbers: Vec<u64> = numbers.collect();
        match (side, &numbers[..], words.len()) {
            (Some(side), &[capacity, record, bytes], 4) => Ok(Self {
                side,
                shape: Shape {
                    capacity,
                    record,
                    bytes,
                },
            }),
            _ => Err(refused("the other process sent another kind of text")),
        }
    }

    /// Checks what another process says about a ring, all of it before any of its memory is imported.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for the other side, for records of another size than `record`, for a shape that no ring
    /// has, and for memory that is not the shape's.
    pub(super) fn check(
        &self,
        side: Side,
        record: Option<u64>,
        memory: &Description,
    ) -> Result<()> {
        if self.side != side {
            return Err(refused(format!("it is {}", self.side.name())));
        }
        let Shape {
            capacity,
            record: found,
            bytes,
        } = self.shape;
        if let Some(wanted) = record.filter(|&wanted| wanted != found) {
            let why = format!("records of {found} bytes");
            return Err(Error::invalid_of("ring", why, format!("{wanted} bytes")));
        }
        let granule = Granularity::TWO_MIB.bytes();
        let records = usize::try_from(capacity);
        let records = records.map_err(|_| refused(format!("{capacity} records")))?;
        if Shape::new(Some(records), found, granule)? != self.shape {
            return Err(refused(format!(
                "{capacity} records of {found} bytes do not have {bytes} bytes"
            )));
        }
        let sizes: Vec<u64> = memory.parts.iter().map(|part| part.bytes).collect();
        if sizes != [granule, bytes] {
            return Err(refused(format!("its memory has parts of {sizes:?} bytes")));
        }
        Ok(())
    }
}

fn refused(why: impl Into<String>) -> Error {
    Error::invalid("ring", why.into())
}

/// How many records a ring has, and where they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// The most records at a time.
    pub(super) capacity: u64,
    /// The size of a record in bytes.
    pub(super) record: u64,
    /// The bytes that the records have: a power of two.
    pub(super) bytes: u64,
}

impl Shape {
    /// Returns a shape with room for `capacity` records, or for as many as one granule holds.
    pub(super) fn new(capacity: Option<usize>, record: u64, granule: u64) -> Result<Self> {
        if record == 0 {
            let why = "records of 0 bytes need no memory";
            return Err(Error::invalid("record type", why));
        }
        // A power of two in one physical memory.
        let most = Growth::MAX_CHUNK.next_power_of_two() / 2;
        if record > most {
            let why = format!("one record of {record} bytes exceeds a ring's memory");
            return Err(Error::invalid_of("record type", why, "1 byte to 2 GiB"));
        }
        let valid = || format!("1 to {}", most / record);
        let capacity = match capacity {
            Some(0) => {
                let why = "a ring without room passes nothing on";
                return Err(Error::invalid_of("records", why, valid()));
            }
            Some(records) => records as u64,
            None => (granule / record).max(1),
        };
        let bytes = capacity.checked_mul(record).filter(|&n| n <= most);
        let Some(bytes) = bytes else {
            let why =
                format!("{capacity} records of {record} bytes exceed 2 GiB, the limit of a ring");
            return Err(Error::invalid_of("records", why, valid()));
        };
        Ok(Self {
            capacity,
            record,
            bytes: bytes.next_power_of_two().max(granule),
        })
    }

    /// Returns where the record with this number begins, in bytes from the first mapping's start. As many records as
    /// the ring has room for follow without a gap.
    ///
    /// The bytes are a power of two, so this goes on evenly where the count passes 2^64.
    pub(super) const fn place(&self, number: u64) -> u64 {
        number.wrapping_mul(self.record) & (self.bytes - 1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GRANULE: u64 = 2 << 20;

    proptest! {
        #[test]
        fn records_follow_each_other_and_stay_inside(
            capacity in 1..100_000_usize,
            record in 1..5_000_u64,
            number in any::<u64>(),
        ) {
            let shape = Shape::new(Some(capacity), record, GRANULE).unwrap();
            prop_assert!(shape.bytes.is_power_of_two() && shape.bytes >= GRANULE);
            prop_assert!(shape.capacity * record <= shape.bytes);
            let place = shape.place(number);
            prop_assert!(place < shape.bytes);
            prop_assert!(place + shape.capacity * record < 2 * shape.bytes);
            // The next record begins where this one ends, also where the count passes 2^64.
            let next = shape.place(number.wrapping_add(1));
            prop_assert_eq!(next, (place + record) & (shape.bytes - 1));
        }
    }

    #[test]
    fn the_count_passes_its_end_without_a_gap() {
        let shape = Shape::new(Some(1000), 48, GRANULE).unwrap();
        let last = shape.place(u64::MAX);
        assert_eq!(shape.place(0), (last + 48) & (shape.bytes - 1));
    }

    #[test]
    fn shapes_that_cannot_be_are_refused() {
        let default = Shape::new(None, 16, GRANULE).unwrap();
        assert_eq!((default.capacity, default.bytes), (131_072, GRANULE));
        let large = Shape::new(None, 3 * GRANULE, GRANULE).unwrap();
        assert_eq!((large.capacity, large.bytes), (1, 4 * GRANULE));
        let most = Shape::new(Some(256 << 20), 8, GRANULE).unwrap();
        assert_eq!(most.bytes, 2 << 30);
        let one = Shape::new(Some(1), 2 << 30, GRANULE).unwrap();
        assert_eq!(one.bytes, 2 << 30);
        for (capacity, record, refused) in [
            (Some(0), 8, "records"),
            (Some((256 << 20) + 1), 8, "records"),
            (Some(2), 2 << 30, "records"),
            (Some(usize::MAX), 8, "records"),
            (None, 0, "record type"),
            (None, (2 << 30) + 1, "record type"),
            (Some(0), u64::MAX, "record type"),
        ] {
            let error = Shape::new(capacity, record, GRANULE).unwrap_err();
            assert!(
                matches!(error, Error::InvalidArgument { what, .. } if what == refused),
                "{error}"
            );
        }
    }
}
