//! Virtual memory management: addresses, and memory mapped there.

use std::sync::Arc;

use super::answer::{Answer, exhausted, fail};
use super::space::Range;
use super::space::{GRANULARITY, is_granular};
use super::state::{Kind, Region, State};
use super::window::Window;
use crate::{Access, Code, DevicePtr, PhysicalHandle};

impl State {
    pub(super) fn mem_address_reserve(
        &mut self,
        size: u64,
        alignment: u64,
        hint: u64,
    ) -> Answer<DevicePtr> {
        if !is_granular(size) || (alignment != 0 && !alignment.is_power_of_two()) {
            return fail(Code::INVALID_VALUE);
        }
        if !hint.is_multiple_of(alignment.max(GRANULARITY)) {
            return fail(Code::INVALID_VALUE);
        }
        let range = self.find_addresses(size, alignment, hint)?;
        let start = range.start;
        self.reservations.insert(start, range);
        Ok(DevicePtr(start))
    }

    fn find_addresses(&mut self, size: u64, alignment: u64, hint: u64) -> Answer<Range> {
        if self.window.is_none() {
            // Without a window, as under a limit on addresses, each reservation is separate.
            self.window = Window::new(self.placement).ok().map(Arc::new);
        }
        let window = self.window.as_ref();
        match window.and_then(|window| window.take(size, alignment, hint)) {
            Some(range) => Ok(range),
            None if hint == 0 => Range::reserve(size, alignment).map_err(exhausted),
            None => Range::reserve_from(size, alignment, hint).map_err(exhausted),
        }
    }

    pub(super) fn mem_address_free(&mut self, ptr: DevicePtr, size: u64) -> Answer<()> {
        match self.reservations.get(&ptr.0) {
            Some(range) if range.len == size && !self.any_mapped(ptr.0, size) => {
                self.reservations.remove(&ptr.0);
                Ok(())
            }
            _ => fail(Code::INVALID_VALUE),
        }
    }

    fn any_mapped(&self, start: u64, len: u64) -> bool {
        let last = self.regions.range(..start + len).next_back();
        last.is_some_and(|(&at, region)| at + region.len > start)
    }

    pub(super) fn mem_map(
        &mut self,
        ptr: DevicePtr,
        size: u64,
        offset: u64,
        handle: PhysicalHandle,
    ) -> Answer<()> {
        let physical = Arc::clone(self.physical(handle)?);
        // The mapping must cover the memory from its start; the driver checks this before anything else
        // about it.
        if size < physical.size || offset != 0 {
            return fail(Code::NOT_SUPPORTED);
        }
        if size > physical.size || !is_granular(ptr.0) {
            return fail(Code::INVALID_VALUE);
        }
        let range = self.reservation(ptr.0, size);
        let range = range.ok_or(Code::INVALID_VALUE)?;
        if self.any_mapped(ptr.0, size) {
            return fail(Code::INVALID_VALUE);
        }
        range
            .place(ptr.0, size, physical.memory.file(), 0, Access::None)
            .map_err(exhausted)?;
        let region = Region {
            len: size,
            memory: Arc::clone(&physical.memory),
            offset: 0,
            kind: Kind::Mapping {
                physical,
                host: Access::None,
                host_newer: false,
                counted: None,
                devices: self.nobody(),
            },
        };
        self.regions.insert(ptr.0, region);
        Ok(())
    }

    pub(super) fn mem_unmap(&mut self, ptr: DevicePtr, size: u64) -> Answer<()> {
        if size == 0 || self.reservation(ptr.0, size).is_none() {
            return fail(Code::INVALID_VALUE);
        }
        // Only whole mappings; gaps are allowed: unmapped addresses may be unmapped again.
        let end = ptr.0 + size;
        let begins = self.region(ptr.0).is_none_or(|(start, _)| start == ptr.0);
        let ends = |(start, region): (u64, &Region)| start + region.len == end;
        if !begins || !self.region(end - 1).is_none_or(ends) {
            return fail(Code::INVALID_VALUE);
        }
        while let Some((start, len)) = self
            .regions
            .range(ptr.0..end)
            .next()
            .map(|(&at, region)| (at, region.len))
        {
            if let Some(range) = self.reservation(start, len) {
                range.clear(start, len).map_err(exhausted)?;
            }
            self.regions.remove(&start);
        }
        Ok(())
    }
}
