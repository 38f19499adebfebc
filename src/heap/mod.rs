//! Suballocation: blocks of Extended GPU Memory in nanoseconds, without a driver call.
#![allow(dead_code)]

mod backing;
mod occupancy;
mod svg;

pub use occupancy::{Chunk, Occupancy, OccupancyTotals};
mod cache;
mod deferred;
