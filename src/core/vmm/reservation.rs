//! Reserved addresses.

use crate::driver::{Code, DevicePtr, Driver};
use crate::host::mappings::too_many_mappings;
use crate::size::{Granularity, PaddedSize};
use crate::teardown::give_back_or_log;
use crate::{Error, Result};

/// Options to reserve addresses; [`reserve`](Self::reserve) does it.
#[derive(Clone, Copy, Debug, Default)]
#[must_use = "options do nothing until `reserve`"]
pub struct ReservationOptions {
    alignment: u64,
    hint: u64,
}

impl ReservationOptions {
    crate::driver::setters! {
        /// Sets the alignment of the first address in bytes: a power of two; 0 leaves it to the driver.
        alignment(bytes: u64) => alignment = bytes;

        /// Sets an address to try first. The driver may choose another.
        hint(address: DevicePtr) => hint = address.0;
    }

    /// Reserves at least `bytes` of addresses, rounded up to 2 MiB. Takes no memory.
    ///
    /// Source: `cuMemAddressReserve`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 bytes or an alignment that is not a power of two;
    /// [`Error::OutOfAddresses`] if the address space has no such hole; the driver's errors.
    pub fn reserve(self, driver: &Driver, bytes: u64) -> Result<Reservation> {
        if self.alignment != 0 {
            Granularity::new(self.alignment).map_err(|_| {
                Error::invalid_of("alignment", "it is not a power of two", "a power of two")
            })?;
        }
        let size = PaddedSize::new(bytes, Granularity::TWO_MIB)?.padded();
        let start = driver
            .mem_address_reserve(size, self.alignment, self.hint)
            .map_err(|error| match error {
                Error::Driver(source) if source.code == Code::OUT_OF_MEMORY => {
                    let requested = size;
                    too_many_mappings(driver, source)
                        .unwrap_or(Error::OutOfAddresses { requested, source })
                }
                other => other,
            })?;
        Ok(Reservation {
            driver: driver.clone(),
            start,
            size,
        })
    }
}

/// A range of reserved addresses, freed when dropped.
///
/// Mappings share it by [`Arc`](std::sync::Arc), so it outlives them.
#[derive(Debug)]
pub struct Reservation {
    driver: Driver,
    start: DevicePtr,
    size: u64,
}

impl Reservation {
    /// Returns options for a reservation.
    pub fn options() -> ReservationOptions {
        ReservationOptions::default()
    }

    /// Returns the first address.
    pub const fn start(&self) -> DevicePtr {
        self.start
    }

    /// Returns the size in bytes.
    pub const fn size(&self) -> u64 {
        self.size
    }

    pub(super) const fn driver(&self) -> &Driver {
        &self.driver
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        give_back_or_log(&self.driver, "reserved addresses", || {
            // SAFETY: the range is owned by `self`; mappings hold a reference, so none is left.
            unsafe { self.driver.mem_address_free(self.start, self.size) }
        });
    }
}
