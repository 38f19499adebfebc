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
mod reservation;

pub use mapping::Mapping;
pub use physical::{PhysicalMemory, PhysicalOptions};
pub use range::{Adjacent, Mapped, MappedPart, MappedRange};
pub use reservation::{Reservation, ReservationOptions};
