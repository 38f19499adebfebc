//! A range whose parts are created one after the other.

use std::sync::Arc;

use super::{MappedRange, Pairs, least};
use crate::driver::{AccessDesc, Driver};
use crate::vmm::{PhysicalMemory, Reservation};
use crate::{Error, Result};

/// The front of a range. Dropped before it is complete, it unmaps and releases its parts.
#[derive(Debug)]
pub struct GrowingRange {
    pairs: Pairs<PhysicalMemory>,
    reservation: Option<Arc<Reservation>>,
    padded: u64,
    /// Bytes that have parts.
    done: u64,
}

impl GrowingRange {
    /// Begins a range of `padded` bytes.
    pub const fn new(padded: u64) -> Self {
        Self {
            pairs: Pairs {
                mappings: Vec::new(),
                parts: Vec::new(),
            },
            reservation: None,
            padded,
            done: 0,
        }
    }

    /// Returns the parts so far.
    pub fn parts(&self) -> &[PhysicalMemory] {
        &self.pairs.parts
    }

    /// Maps the next part and grants it. The first one reserves the range's addresses.
    ///
    /// # Errors
    /// Those of [`ReservationOptions::reserve`](crate::vmm::ReservationOptions::reserve), [`Reservation::map`] and
    /// [`Mapping::set_access`]; the part is released then.
    pub fn push(
        &mut self,
        driver: &Driver,
        part: PhysicalMemory,
        access: &[AccessDesc],
    ) -> Result<()> {
        let reservation = match &self.reservation {
            Some(reservation) => reservation,
            None => {
                let all = Reservation::options().reserve(driver, self.padded)?;
                self.reservation.insert(Arc::new(all))
            }
        };
        let mut mapping = reservation.map(self.done, &part)?;
        mapping.set_access(access)?;
        self.done += mapping.size().padded();
        self.pairs.mappings.push(mapping);
        self.pairs.parts.push(part);
        Ok(())
    }

    /// Returns the range.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it has no part.
    pub fn finish(self) -> Result<MappedRange> {
        let Some(first) = self.pairs.mappings.first() else {
            return Err(Error::invalid("parts", "the list is empty"));
        };
        Ok(MappedRange {
            start: first.reservation().start(),
            padded: self.done,
            host: least(&self.pairs.mappings),
            pairs: self.pairs,
        })
    }
}
