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
mod part;
mod physical;
mod range;
mod reservation;

pub use mapping::Mapping;
pub use part::{Adjacent, Mapped, MappedPart};
pub use physical::{PhysicalMemory, PhysicalOptions};
pub(crate) use range::GrowingRange;
pub use range::MappedRange;
pub use reservation::{Reservation, ReservationOptions};
