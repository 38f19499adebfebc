//! The message about a ring: a line of text before its memory.

use std::fmt;

use egmem_share::Description;

use super::memory::Shape;
use crate::cursor::numbers;
use crate::size::Granularity;
use crate::{Error, Result};

/// One of a ring's sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Producer,
    Consumer,
}

impl Side {
    /// Returns the beginning of the text: the kind of message, its version, and the side.
    const fn kind(self) -> &'static str {
        match self {
            Self::Producer => "egmem-ring 1 producer",
            Self::Consumer => "egmem-ring 1 consumer",
        }
    }

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
        let kind = self.side.kind();
        let Shape {
            capacity,
            record,
            bytes,
        } = self.shape;
        write!(f, "{kind} {capacity} {record} {bytes}")
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
        for side in [Side::Producer, Side::Consumer] {
            if let Some([capacity, record, bytes]) = numbers(side.kind(), text) {
                let shape = Shape {
                    capacity,
                    record,
                    bytes,
                };
                return Ok(Self { side, shape });
            }
        }
        Err(refused("the other process sent another kind of text"))
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
