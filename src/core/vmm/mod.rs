//! Virtual memory management: physical memory, reserved addresses, mappings and access.
//!
//! ```text
//! PhysicalMemory ── map ──▶ Mapping ── set_access ──▶ CPU and GPUs
//!                             │
//!                        Reservation
//! ```
//!
//! Each type releases its resources when dropped, in any order: a mapping keeps the physical
//! memory alive in the driver and its reservation by reference.

pub mod identity;
mod mapping;
pub(crate) mod pages;
mod physical;
mod range;

pub use mapping::Mapping;
pub use physical::{PhysicalMemory, PhysicalOptions};
pub use range::{Adjacent, Mapped, MappedPart, MappedRange};

use crate::backing::Backing;
use crate::driver::{Code, DevicePtr, Driver};
use crate::guard::too_many_mappings;
use crate::size::{Granularity, PaddedSize};
use crate::teardown::give_back_or_log;
use crate::{Error, Result};
use pages::Addresses;

/// Options to reserve addresses; [`reserve`](Self::reserve) does it.
#[derive(Clone, Copy, Debug, Default)]
#[must_use = "options do nothing until `reserve`"]
pub struct ReservationOptions {
    alignment: u64,
    hint: u64,
    /// Whether the kernel reserves them, for pages of this process.
    for_pages: bool,
}

impl ReservationOptions {
    crate::driver::setters! {
        /// Sets the alignment of the first address in bytes: a power of two; 0 leaves it to the driver.
        alignment(bytes: u64) => alignment = bytes;

        /// Sets an address to try first. The driver may choose another.
        hint(address: DevicePtr) => hint = address.0;
    }

    /// Sets what memory will be mapped there, as [`PhysicalMemory::backing`] returns it. The
    /// default is [`Backing::Driver`], which also stands for [`Backing::Auto`].
    pub fn backing(mut self, backing: Backing) -> Self {
        self.for_pages = backing == Backing::Registered;
        self
    }

    /// Reserves at least `bytes` of addresses, rounded up to 2 MiB. Takes no memory.
    ///
    /// Source: `cuMemAddressReserve`; `mmap` for [registered](Backing::Registered) memory.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 bytes or an alignment that is not a power of two;
    /// [`Error::OutOfAddresses`] if the address space has no such hole; the driver's errors; for registered memory
    /// [`Error::System`] if the kernel refuses.
    #[inline]
    pub fn reserve(self, driver: &Driver, bytes: u64) -> Result<Reservation> {
        if self.alignment != 0 {
            Granularity::new(self.alignment).map_err(|_| {
                Error::invalid_of("alignment", "it is not a power of two", "a power of two")
            })?;
        }
        let size = PaddedSize::new(bytes, Granularity::TWO_MIB)?.padded();
        let (start, addresses) = if self.for_pages {
            let alignment = self.alignment.max(Granularity::TWO_MIB.bytes());
            let addresses = Addresses::reserve(size, alignment, self.hint)?;
            (DevicePtr(addresses.start()), Some(Box::new(addresses)))
        } else {
            let start = driver.mem_address_reserve(size, self.alignment, self.hint);
            let start = start.map_err(|error| match error {
                Error::Driver(source) if source.code == Code::OUT_OF_MEMORY => {
                    let requested = size;
                    too_many_mappings(driver, source)
                        .unwrap_or(Error::OutOfAddresses { requested, source })
                }
                other => other,
            })?;
            (start, None)
        };
        Ok(Reservation {
            driver: driver.clone(),
            start,
            size,
            addresses,
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
    /// Reserved by the kernel, for pages of this process; `None`: by the driver. Boxed, because reservations move.
    addresses: Option<Box<Addresses>>,
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

    /// Returns what memory can be mapped there.
    pub const fn backing(&self) -> Backing {
        match self.addresses {
            Some(_) => Backing::Registered,
            None => Backing::Driver,
        }
    }

    /// Returns the addresses for pages of this process.
    pub(crate) fn addresses(&self) -> Option<&Addresses> {
        self.addresses.as_deref()
    }

    pub(super) const fn driver(&self) -> &Driver {
        &self.driver
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(addresses) = &self.addresses {
            // A forked child gives nothing back; otherwise they give themselves back.
            if !self.driver.is_of_this_process() {
                addresses.keep();
            }
            return;
        }
        give_back_or_log(&self.driver, "reserved addresses", || {
            // SAFETY: the range is owned by `self`; mappings hold a reference, so none is left.
            unsafe { self.driver.mem_address_free(self.start, self.size) }
        });
    }
}
