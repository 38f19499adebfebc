//! How an appender is created.

use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};

use super::Appender;
use super::cells::{Belief, Cells, Constants};
use crate::driver::Location;
use crate::growable::{Growable, GrowableOptions};
use crate::ledger::{Label, Site};
use crate::placement::Placement;
use crate::topology::Topology;
use crate::{Driver, Error, Result};

/// How much memory is kept mapped ahead of the kernels unless told otherwise, in bytes.
const AHEAD: u64 = 16 << 20;

/// Options for an appender; [`create`](Self::create) creates it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `create`"]
pub struct AppenderOptions<T> {
    records: GrowableOptions<T>,
    cursor: Option<Location>,
    ahead: Option<usize>,
}

impl<T: AnyBitPattern + NoUninit> Appender<T> {
    /// Returns options for records at `location`: a node's id, or any [`Location`]. With records in a GPU's memory, the
    /// counters that the CPU needs are on the GPU's host node.
    pub fn on(location: impl Into<Location>) -> AppenderOptions<T> {
        AppenderOptions {
            records: Growable::on(location),
            cursor: None,
            ahead: None,
        }
    }
}

impl<T: AnyBitPattern + NoUninit> AppenderOptions<T> {
    /// Sets the most records that there can ever be: see [`GrowableOptions::max_len`]. Kernels can make the memory grow to
    /// this.
    pub fn max_len(mut self, records: usize) -> Self {
        self.records = self.records.max_len(records);
        self
    }

    /// Sets how many bytes the memory grows by at least: see [`GrowableOptions::step`].
    pub fn step(mut self, bytes: u64) -> Self {
        self.records = self.records.step(bytes);
        self
    }

    /// Makes the records shareable: see [`GrowableOptions::shareable`]. Another process maps those that were collected, by a
    /// `GrowableExport` of [`Appender::records`]. The counters are not shared.
    pub fn shareable(mut self) -> Self {
        self.records = self.records.shareable();
        self
    }

    /// Sets whether to ask the driver for more memory than the node has free.
    pub fn overcommit(mut self, on: bool) -> Self {
        self.records = self.records.overcommit(on);
        self
    }

    /// Sets for how many records memory is kept mapped beyond those reserved. The default is 16 MiB of them. Too few make
    /// kernels wait for memory: 2 MiB took 0.7 ms on an H100's host node (docs/performance-shapes.md). It is also for how many
    /// records a count that a kernel has damaged can map memory, before it is found out.
    pub const fn ahead(mut self, records: usize) -> Self {
        self.ahead = Some(records);
        self
    }

    /// Sets where the cursor lies that kernels reserve records by. By default beside the other counters, on a host node,
    /// where over PCIe each reservation takes a way there and back. In the memory of the GPU whose kernels append,
    /// reservations are as fast as its other atomic additions.
    pub fn cursor_on(mut self, location: impl Into<Location>) -> Self {
        self.cursor = Some(location.into());
        self
    }

    /// Sets which locations may read and write: see [`GrowableOptions::access_by`].
    pub fn access_by<L: Into<Location>>(mut self, who: impl IntoIterator<Item = L>) -> Self {
        self.records = self.records.access_by(who);
        self
    }

    /// Sets the name of its memory in the [ledger](egmem_core::ledger).
    pub fn label(mut self, label: impl Into<Label>) -> Self {
        self.records = self.records.label(label);
        self
    }

    /// Reserves addresses for all records, creates the counters, and maps the first memory.
    ///
    /// # Errors
    /// Those of [`GrowableOptions::create`] and of [`Growable::reserve`]; nothing stays behind then.
    #[track_caller]
    pub fn create(self, driver: &Driver) -> Result<Appender<T>> {
        let placement = self.records.placement.clone();
        let records = self.records.create(driver)?;
        let size = size_of::<T>() as u64;
        let ahead = self.ahead.unwrap_or((AHEAD / size) as usize);
        let ahead = ahead.clamp(1, records.max_len());
        let host = match placement.location {
            Location::Device(gpu) => Topology::of(driver)?.gpu(gpu)?.host_node()?.into(),
            host => host,
        };
        let site = Site::here();
        let memory = |location: Location| {
            let here = Placement {
                location,
                ..placement.clone()
            };
            Ok::<_, Error>((location, here.memory(site.clone()), here.grants(driver)?))
        };
        let cursor = match self.cursor {
            Some(location) if location != host => Some(memory(location)?),
            _ => None,
        };
        let constants = Constants {
            first_record: records.device_ptr(),
            record: size,
            // Four reports for the memory mapped ahead; not one for each warp.
            shift: (ahead as u64 / 4).max(32).ilog2(),
        };
        let cells = Cells::create(driver, memory(host)?, cursor, constants)?;
        let mut appender = Appender {
            cells: Arc::new(cells),
            records,
            ahead,
            belief: Belief::default(),
            stopped: None,
            lost: None,
        };
        appender.records.reserve(ahead)?;
        appender.open(0)?;
        Ok(appender)
    }
}
