//! One allocation, as the registry has it.

use std::backtrace::Backtrace;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::allocation::{AllocPath, Allocation, Frames, Imported, MappedAt, Party};
use super::grants::Grants;
use super::label::Label;
use super::site::Site;
use crate::backing::Chosen;
use crate::driver::{DevicePtr, Location, WeakDriver};
use crate::vmm::identity::Identity;

/// The most processes that a record names.
pub const MAX_PARTIES: usize = 16;

/// A range of addresses where memory is mapped.
#[derive(Clone, Debug)]
pub(super) struct Range {
    pub(super) start: DevicePtr,
    pub(super) bytes: u64,
    pub(super) grants: Arc<Grants>,
}

/// The ranges of an allocation: a single one takes no memory of its own.
#[derive(Clone, Debug, Default)]
pub(super) struct Ranges {
    first: Option<Range>,
    /// By their age: a buffer unmaps the oldest of its chunks first.
    more: VecDeque<Range>,
}

impl Ranges {
    pub(super) fn push(&mut self, range: Range) {
        match &self.first {
            None => self.first = Some(range),
            Some(_) => self.more.push_back(range),
        }
    }

    pub(super) fn remove(&mut self, start: DevicePtr) {
        match self.first.take_if(|range| range.start == start) {
            Some(_) => self.first = self.more.pop_front(),
            None => self.more.retain(|range| range.start != start),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Range> {
        self.first.iter().chain(&self.more)
    }
}

/// The data that few allocations have: apart, so that the records are short.
#[derive(Clone, Debug, Default)]
pub(super) struct Rare {
    pub(super) backtrace: Option<Arc<Backtrace>>,
    pub(super) exports: u64,
    exported_to: Vec<Party>,
    pub(super) identity: Option<Identity>,
    pub(super) imported: Option<Imported>,
    pub(super) backing: Option<Chosen>,
}

impl Rare {
    /// Adds a process that a handle was sent to; the oldest makes room.
    pub(super) fn add_party(&mut self, to: Party) {
        self.exported_to.retain(|known| *known != to);
        if self.exported_to.len() >= MAX_PARTIES {
            self.exported_to.remove(0);
        }
        self.exported_to.push(to);
    }
}

/// One allocation.
#[derive(Clone, Debug)]
pub(super) struct Record {
    /// The registry sets it.
    pub(super) number: u64,
    /// [`Driver::address`](crate::Driver::address): the entry's owner keeps the driver alive.
    pub(super) driver: usize,
    pub(super) driver_name: &'static str,
    pub(super) bytes: u64,
    pub(super) location: Location,
    pub(super) path: AllocPath,
    pub(super) label: Option<Label>,
    pub(super) since: Instant,
    pub(super) site: Site,
    pub(super) mapped: Ranges,
    /// Several chunks share the record: their ranges side by side are one.
    pub(super) in_chunks: bool,
    pub(super) rare: Option<Box<Rare>>,
    /// Set once the driver has refused to take the memory back. The owner is gone, so this keeps the driver's address
    /// from being reused.
    pub(super) lost: Option<WeakDriver>,
}

impl Record {
    /// Returns whether the memory exists: memory that a simulated driver did not take back ends with that driver, CUDA's
    /// with the process.
    pub(super) fn is_live(&self) -> bool {
        let lost = self.lost.as_ref();
        self.driver == 0 || lost.is_none_or(WeakDriver::is_alive)
    }

    pub(super) fn rare(&mut self) -> &mut Rare {
        self.rare.get_or_insert_default()
    }

    /// Returns milliseconds since the memory was allocated.
    pub(super) fn age_ms(&self, now: Instant) -> u64 {
        let age = now.saturating_duration_since(self.since).as_millis();
        u64::try_from(age).unwrap_or(u64::MAX)
    }

    /// Returns where the memory is mapped. Chunks side by side with the same access are one range.
    fn mapped_at(&self) -> Vec<MappedAt> {
        let mut all: Vec<MappedAt> = Vec::new();
        for range in self.mapped.iter() {
            let access = range.grants.list();
            match all.last_mut() {
                Some(last)
                    if self.in_chunks
                        && last.start + last.bytes == range.start.0
                        && last.access == access =>
                {
                    last.bytes += range.bytes;
                }
                _ => all.push(MappedAt {
                    start: range.start.0,
                    bytes: range.bytes,
                    access,
                }),
            }
        }
        all
    }

    /// Returns the record's values.
    pub(super) fn to_allocation(&self, now: Instant) -> Allocation {
        let rare = self.rare.as_deref().cloned().unwrap_or_default();
        let mut site = self.site.to_call_site();
        if let Some(site) = &mut site {
            let native = rare.backtrace.clone().map(Frames::captured);
            site.backtrace = site.backtrace.take().or(native);
        }
        Allocation {
            number: self.number,
            driver: self.driver_name.to_owned(),
            bytes: self.bytes,
            location: self.location,
            path: self.path,
            label: self.label.as_ref().map(|label| label.as_str().to_owned()),
            age_ms: self.age_ms(now),
            site,
            mapped: self.mapped_at(),
            exports: rare.exports,
            exported_to: rare.exported_to.clone(),
            identity: rare.identity,
            imported: rare.imported.clone(),
            backing: rare.backing.clone(),
            lost: self.lost.is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::allocation::CallSite;
    use super::*;

    #[test]
    fn frames_are_not_formatted_before_they_are_displayed() {
        let mut record = Record {
            number: 0,
            driver: 0,
            driver_name: "simulated",
            bytes: 1,
            location: Location::Host,
            path: AllocPath::Pinned,
            label: None,
            since: Instant::now(),
            site: Site::here(),
            mapped: Ranges::default(),
            in_chunks: false,
            rare: None,
            lost: None,
        };
        let frames = Arc::new(Backtrace::force_capture());
        record.rare().backtrace = Some(Arc::clone(&frames));
        let site = record.to_allocation(Instant::now()).site.unwrap();
        let seen = site.backtrace.clone().unwrap();
        assert_eq!(seen.to_string(), frames.to_string());
        let read: CallSite = {
            let text = serde_json::to_string(&site).unwrap();
            serde_json::from_str(&text).unwrap()
        };
        assert_eq!(read, site);
    }

    #[test]
    fn ranges_are_removed_in_any_order() {
        let range = |start| Range {
            start: DevicePtr(start),
            bytes: 1,
            grants: Arc::default(),
        };
        let starts = |ranges: &Ranges| {
            let mut starts: Vec<u64> = ranges.iter().map(|range| range.start.0).collect();
            starts.sort_unstable();
            starts
        };
        for order in [[1, 2, 3], [3, 2, 1], [2, 1, 3]] {
            let mut ranges = Ranges::default();
            (1..=3).for_each(|start| ranges.push(range(start)));
            let mut left = vec![1, 2, 3];
            for start in order {
                ranges.remove(DevicePtr(start));
                left.retain(|&other| other != start);
                assert_eq!(starts(&ranges), left);
            }
            ranges.remove(DevicePtr(1));
            ranges.push(range(9));
            assert_eq!(starts(&ranges), [9]);
        }
    }
}
