//! Running a sequence on a driver.

use std::fs::File;
use std::os::fd::OwnedFd;

use super::op::{Addr, Memory, Op, Query, Slot, Source};
use super::state::{Grants, Mapping, Physical, Plain, Range, State};
use super::work::Work;
use super::{Outcome, Record, Sequence, Value};
use crate::driver::{
    Access, AllocationProps, Driver, FabricHandle, Location, PhysicalHandle, PointerAttribute,
    ShareableHandle, StreamHandle,
};
use crate::{Error, Result};

/// Runs `sequence` on `driver` and gives back everything that it made.
///
/// Failing calls are answers, not errors.
pub fn run(driver: &Driver, sequence: &Sequence) -> Record {
    Runner::new(driver).run(sequence, |_| {})
}

/// Runs sequences one after the other; the kernels stay loaded in between.
#[derive(Debug)]
pub struct Runner {
    driver: Driver,
    work: Work,
}

/// `None`: not called. The rest is the call's answer.
type Step = Option<Result<Vec<Value>>>;

impl Runner {
    /// A runner on `driver`.
    pub fn new(driver: &Driver) -> Self {
        Self {
            driver: driver.clone(),
            work: Work::new(driver),
        }
    }

    /// Runs `sequence`, calling `before` with each operation's index before it.
    pub fn run(&mut self, sequence: &Sequence, mut before: impl FnMut(usize)) -> Record {
        let mut run = Run {
            driver: &self.driver,
            work: &mut self.work,
            state: State::default(),
        };
        let mut outcomes = Vec::with_capacity(sequence.ops.len());
        for (index, op) in sequence.ops.iter().enumerate() {
            before(index);
            outcomes.push(match run.step(op) {
                None => Outcome::Skipped,
                Some(Ok(values)) => Outcome::Done(values),
                Some(Err(error)) => failure(&error),
            });
        }
        Record {
            outcomes,
            left: run.give_back(),
        }
    }
}

fn failure(error: &Error) -> Outcome {
    match error.code() {
        Some(code) => Outcome::Failed(code.0),
        None => {
            let debug = format!("{error:?}");
            let end = debug.find(|c: char| !c.is_alphanumeric());
            Outcome::Refused(debug[..end.unwrap_or(debug.len())].to_string())
        }
    }
}

pub(super) struct Run<'a> {
    pub(super) driver: &'a Driver,
    pub(super) work: &'a mut Work,
    pub(super) state: State,
}

fn number(value: impl Into<u64>) -> Value {
    Value::Number(value.into())
}

fn signed(value: i32) -> Value {
    // As CUDA's bit pattern: −1 is 0xffff_ffff.
    Value::Number(u64::from(value as u32))
}

fn done<T>(result: Result<T>) -> Step {
    Some(result.map(|_| Vec::new()))
}

fn again(result: Result<()>) -> Value {
    match result {
        Ok(()) => Value::Number(0),
        Err(error) => match failure(&error) {
            Outcome::Failed(code) => signed(code),
            other => Value::Text(other.to_string()),
        },
    }
}

impl Run<'_> {
    pub(super) fn stream(&self, stream: Option<Slot>) -> Option<StreamHandle> {
        match stream {
            None => Some(StreamHandle { device: 0, raw: 0 }),
            Some(slot) => self.state.streams.get(&slot).copied(),
        }
    }

    /// Waits for a stream that `stream` gave, or a device's legacy stream.
    pub(super) fn synchronize(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: the stream is this run's own and not destroyed, or the driver's.
        unsafe { self.driver.stream_synchronize(stream) }
    }

    fn step(&mut self, op: &Op) -> Step {
        match *op {
            Op::DeviceAttribute { device, attribute } => Some(
                self.driver
                    .device_attribute(device, attribute)
                    .map(|value| vec![signed(value)]),
            ),
            Op::DeviceQuery { device, what } => match what {
                Query::Name => done(self.driver.device_name(device)),
                Query::Uuid => done(self.driver.device_uuid(device)),
                Query::PciBusId => done(self.driver.device_pci_bus_id(device)),
                Query::TotalMem => done(self.driver.device_total_mem(device)),
                Query::MemInfo => done(self.driver.mem_info(device)),
            },
            Op::CanAccessPeer { device, peer } => Some(
                self.driver
                    .device_can_access_peer(device, peer)
                    .map(|can| vec![number(can)]),
            ),
            Op::Granularity { ref props, kind } => Some(
                self.driver
                    .mem_granularity(props, kind)
                    .map(|bytes| vec![number(bytes)]),
            ),
            Op::Create {
                out,
                size,
                ref props,
            } => self.create(out, size, props),
            Op::Release { handle, twice } => self.release(handle, twice),
            Op::Reserve {
                out,
                size,
                alignment,
                hint,
            } => self.reserve(out, size, alignment, hint),
            Op::AddressFree { range, size, twice } => self.address_free(range, size, twice),
            Op::Map {
                at,
                size,
                offset,
                handle,
            } => self.map(at, size, offset, handle),
            Op::Unmap { at, size } => self.unmap(at, size),
            Op::SetAccess {
                at,
                size,
                ref access,
            } => {
                let ptr = self.own_range(at, size)?;
                // SAFETY: `own_range` says that the bytes are in this run's own reservation, or on
                // the first page, which the driver refuses; nothing uses them during the call.
                let result = unsafe { self.driver.mem_set_access(ptr, size, access) };
                if result.is_ok() {
                    for mapping in self.overlapping(at, size) {
                        access.iter().for_each(|desc| mapping.access.set(*desc));
                    }
                }
                done(result)
            }
            Op::GetAccess { at, location } => {
                let ptr = self.state.address(at, 0)?;
                let flags = self.driver.mem_get_access(location, ptr);
                Some(flags.map(|flags| vec![number(flags)]))
            }
            Op::Export { out, handle, kind } => {
                let handle = *self.state.handles.get(&handle)?;
                // SAFETY: what is named is this run's own and not given back.
                let result = unsafe { self.driver.mem_export(handle, kind) };
                Some(result.map(|exported| {
                    self.state.exported.insert(out, exported);
                    Vec::new()
                }))
            }
            Op::Import { out, from } => self.import(out, from),
            Op::Properties { handle } => {
                let handle = *self.state.handles.get(&handle)?;
                // SAFETY: what is named is this run's own and not given back.
                let props = unsafe { self.driver.mem_properties(handle) };
                Some(props.map(|props| {
                    vec![
                        Value::Text(props.location.to_string()),
                        number(props.handle_types.bits()),
                        number(props.gpu_direct_rdma),
                    ]
                }))
            }
            Op::Retain { out, at } => {
                let ptr = self.state.address(at, 0)?;
                let device = match at.of {
                    Memory::Range(slot) => {
                        let handle = self.state.mapping(slot, at.offset, 0).map(|m| m.handle);
                        handle.and_then(|h| self.state.physical.get(&h).map(|p| p.device))
                    }
                    _ => None,
                };
                let handle = self.driver.mem_retain(ptr);
                Some(handle.map(|handle| self.hold(out, handle, device.unwrap_or(true))))
            }
            Op::PointerAttribute { at, attribute } => {
                let ptr = self.state.address(at, 0)?;
                let value = self.driver.pointer_attribute(ptr, attribute);
                Some(value.map(|value| {
                    vec![match attribute {
                        PointerAttribute::DevicePointer
                        | PointerAttribute::HostPointer
                        | PointerAttribute::RangeStartAddr => {
                            Value::Text(self.state.describe(value, at))
                        }
                        _ => number(value),
                    }]
                }))
            }
            Op::AddressRange { at } => {
                let ptr = self.state.address(at, 0)?;
                let range = self.driver.mem_address_range(ptr);
                Some(range.map(|(base, size)| {
                    vec![Value::Text(self.state.describe(base.0, at)), number(size)]
                }))
            }
            Op::DmaBuf { at, size } => {
                let ptr = self.state.address(at, size)?;
                done(self.driver.mem_dma_buf(ptr, size))
            }
            Op::Alloc { out, device, size } => {
                self.plain(out, device, size, false, |d| d.mem_alloc(device, size))
            }
            Op::HostAlloc { out, device, size } => {
                self.plain(out, device, size, true, |d| d.mem_host_alloc(device, size))
            }
            Op::FreePlain { plain, twice } => {
                let plain = self.state.plain.remove(&plain)?;
                let free = || {
                    // SAFETY: the allocation is this run's own, nothing else is under way, and a
                    // second free at once finds the address unallocated.
                    unsafe {
                        if plain.host {
                            self.driver.mem_free_host(plain.device, plain.ptr)
                        } else {
                            self.driver.mem_free(plain.device, plain.ptr)
                        }
                    }
                };
                let result = free();
                Some(result.map(|()| twice.then(|| again(free())).into_iter().collect()))
            }
            Op::StreamCreate { out, device } => {
                let stream = self.driver.stream_create(device);
                Some(stream.map(|stream| {
                    self.state.streams.insert(out, stream);
                    Vec::new()
                }))
            }
            Op::StreamDestroy { stream } => {
                let stream = self.state.streams.remove(&stream)?;
                // SAFETY: the stream is this run's own and its work has been waited for.
                done(unsafe { self.driver.stream_destroy(stream) })
            }
            Op::StreamSynchronize { stream } => done(self.synchronize(self.stream(stream)?)),
            Op::StreamQuery { stream } => {
                let stream = self.stream(stream)?;
                // SAFETY: what is named is this run's own and not given back.
                let idle = unsafe { self.driver.stream_query(stream) };
                Some(idle.map(|idle| vec![number(idle)]))
            }
            Op::StreamWaitEvent { stream, event } => {
                let (event, _) = *self.state.events.get(&event)?;
                let stream = self.stream(stream)?;
                // SAFETY: what is named is this run's own and not given back.
                done(unsafe { self.driver.stream_wait_event(stream, event) })
            }
            Op::EventCreate {
                out,
                device,
                timing,
            } => {
                let event = self.driver.event_create(device, timing);
                Some(event.map(|event| {
                    self.state.events.insert(out, (event, device));
                    Vec::new()
                }))
            }
            Op::EventDestroy { event } => {
                let (event, _) = self.state.events.remove(&event)?;
                // SAFETY: the event is this run's own and nothing waits for it.
                done(unsafe { self.driver.event_destroy(event) })
            }
            Op::EventRecord { event, stream } => {
                let (event, _) = *self.state.events.get(&event)?;
                let stream = self.stream(stream)?;
                // SAFETY: what is named is this run's own and not given back.
                let result = unsafe { self.driver.event_record(event, stream) };
                done(result.and_then(|()| self.synchronize(stream)))
            }
            Op::EventSynchronize { event } => {
                let (event, _) = *self.state.events.get(&event)?;
                // SAFETY: what is named is this run's own and not given back.
                done(unsafe { self.driver.event_synchronize(event) })
            }
            Op::EventQuery { event } => {
                let (event, _) = *self.state.events.get(&event)?;
                // SAFETY: what is named is this run's own and not given back.
                let done = unsafe { self.driver.event_query(event) };
                Some(done.map(|done| vec![number(done)]))
            }
            Op::EventElapsed { start, end } => {
                let (start, _) = *self.state.events.get(&start)?;
                let (end, _) = *self.state.events.get(&end)?;
                // SAFETY: what is named is this run's own and not given back.
                done(unsafe { self.driver.event_elapsed_ms(start, end) })
            }
            Op::PoolCreate { .. }
            | Op::PoolDestroy { .. }
            | Op::PoolSet { .. }
            | Op::PoolGet { .. }
            | Op::PoolTrim { .. }
            | Op::PoolSetAccess { .. }
            | Op::PoolGetAccess { .. }
            | Op::PoolExport { .. }
            | Op::PoolExportPointer { .. }
            | Op::PoolAlloc { .. }
            | Op::PoolFree { .. }
            | Op::DevicePool { .. }
            | Op::SetDevicePool { .. } => self.pool_step(op),
            Op::Memset { .. }
            | Op::Memcpy { .. }
            | Op::WriteKernel { .. }
            | Op::CheckKernel { .. }
            | Op::ReadKernel { .. }
            | Op::CpuWrite { .. }
            | Op::CpuRead { .. } => self.work_step(op),
        }
    }

    fn create(&mut self, out: Slot, size: u64, props: &AllocationProps) -> Step {
        let handle = self.driver.mem_create(size, props);
        Some(handle.map(|handle| {
            self.hold(out, handle, !props.location.is_host());
            Vec::new()
        }))
    }

    /// Notes a reference to `handle`; answers which slot has the same handle.
    fn hold(&mut self, out: Slot, handle: PhysicalHandle, device: bool) -> Vec<Value> {
        let same = match self.state.same_handle(handle) {
            Some(slot) => format!("h{slot}"),
            None => "new".into(),
        };
        // Mapped but released memory may keep its number: then it is the same memory still.
        let mapped = self
            .state
            .ranges
            .values()
            .flat_map(|range| &range.mappings)
            .find(|mapping| mapping.handle == handle)
            .map(|mapping| mapping.defined.clone());
        self.state
            .physical
            .entry(handle)
            .or_insert_with(|| Physical {
                device,
                defined: mapped.unwrap_or_else(|| std::rc::Rc::new(std::cell::Cell::new(!device))),
                references: 0,
            })
            .references += 1;
        self.state.handles.insert(out, handle);
        vec![Value::Text(same)]
    }

    fn release(&mut self, slot: Slot, twice: bool) -> Step {
        let handle = *self.state.handles.get(&slot)?;
        let last = self.state.physical.get(&handle)?.references == 1;
        if twice && (!last || self.state.is_mapped(handle)) {
            return None;
        }
        // SAFETY: this run holds a reference to the handle; mappings keep the memory.
        let result = unsafe { self.driver.mem_release(handle) };
        Some(result.map(|()| {
            self.state.handles.remove(&slot);
            if last {
                self.state.physical.remove(&handle);
            } else if let Some(physical) = self.state.physical.get_mut(&handle) {
                physical.references -= 1;
            }
            // SAFETY: nothing was created since, so the number names no other memory.
            twice
                .then(|| again(unsafe { self.driver.mem_release(handle) }))
                .into_iter()
                .collect()
        }))
    }

    fn reserve(&mut self, out: Slot, size: u64, alignment: u64, hint: Option<Slot>) -> Step {
        let hint = match hint {
            Some(slot) => self.state.ranges.get(&slot)?.base.0,
            None => 0,
        };
        let base = self.driver.mem_address_reserve(size, alignment, hint);
        Some(base.map(|base| {
            let range = Range {
                base,
                size,
                mappings: Vec::new(),
            };
            self.state.ranges.insert(out, range);
            vec![number(base.0.is_multiple_of(alignment.max(2 << 20)))]
        }))
    }

    fn address_free(&mut self, slot: Slot, size: u64, twice: bool) -> Step {
        let range = self.state.ranges.get(&slot)?;
        let base = range.base;
        // SAFETY: the range is this run's own; if something is mapped there, nothing uses it.
        let result = unsafe { self.driver.mem_address_free(base, size) };
        Some(result.map(|()| {
            self.state.ranges.remove(&slot);
            // SAFETY: nothing was reserved since, so the address is nobody's.
            twice
                .then(|| again(unsafe { self.driver.mem_address_free(base, size) }))
                .into_iter()
                .collect()
        }))
    }

    /// The address of `at`, for calls that change mappings: in a range, or nowhere.
    fn own_range(&self, at: Addr, size: u64) -> Option<crate::driver::DevicePtr> {
        match at.of {
            Memory::Range(_) | Memory::Nowhere => self.state.address(at, size),
            Memory::Pooled(_) | Memory::Plain(_) => None,
        }
    }

    fn overlapping(&mut self, at: Addr, size: u64) -> impl Iterator<Item = &mut Mapping> {
        let range = match at.of {
            Memory::Range(slot) => self.state.ranges.get_mut(&slot),
            _ => None,
        };
        let mappings = range.map(|range| range.mappings.iter_mut());
        mappings
            .into_iter()
            .flatten()
            .filter(move |m| m.offset < at.offset + size && at.offset < m.offset + m.size)
    }

    fn map(&mut self, at: Addr, size: u64, offset: u64, handle: Slot) -> Step {
        let ptr = self.own_range(at, size)?;
        let handle = *self.state.handles.get(&handle)?;
        let defined = self.state.physical.get(&handle)?.defined.clone();
        // SAFETY: the bytes are in this run's own reservation, or on the first page, which the
        // driver refuses; the handle is held.
        let result = unsafe { self.driver.mem_map(ptr, size, offset, handle) };
        if result.is_ok()
            && let Memory::Range(slot) = at.of
            && let Some(range) = self.state.ranges.get_mut(&slot)
        {
            range.mappings.push(Mapping {
                offset: at.offset,
                size,
                handle,
                defined,
                access: Grants::default(),
                doubtful: false,
            });
        }
        done(result)
    }

    fn unmap(&mut self, at: Addr, size: u64) -> Step {
        let ptr = self.own_range(at, size)?;
        // SAFETY: the bytes are in this run's own reservation, or on the first page, where nothing
        // is; nothing uses them.
        let result = unsafe { self.driver.mem_unmap(ptr, size) };
        if result.is_ok() {
            self.overlapping(at, size).for_each(|m| m.doubtful = true);
            if let Memory::Range(slot) = at.of
                && let Some(range) = self.state.ranges.get_mut(&slot)
            {
                let inside =
                    |m: &Mapping| at.offset <= m.offset && m.offset + m.size <= at.offset + size;
                range.mappings.retain(|m| !inside(m));
            }
        }
        done(result)
    }

    fn import(&mut self, out: Slot, from: Source) -> Step {
        let garbage;
        let handle = match from {
            Source::Exported(slot) => self.state.exported.get(&slot)?,
            Source::GarbageFd => {
                garbage = ShareableHandle::PosixFd(OwnedFd::from(File::open("/dev/null").ok()?));
                &garbage
            }
            Source::GarbageFabric => {
                garbage = ShareableHandle::Fabric(FabricHandle::from_bytes(&[0x5a; 64]));
                &garbage
            }
        };
        let handle = self.driver.mem_import(handle);
        Some(handle.map(|handle| {
            // Imported device memory counts as unknown until it is written through the import.
            // SAFETY: the handle was just imported.
            let props = unsafe { self.driver.mem_properties(handle) };
            let device = props.map_or(true, |props| !props.location.is_host());
            self.hold(out, handle, device)
        }))
    }

    fn plain(
        &mut self,
        out: Slot,
        device: i32,
        size: u64,
        host: bool,
        allocate: impl FnOnce(&Driver) -> Result<crate::driver::DevicePtr>,
    ) -> Step {
        let ptr = allocate(self.driver);
        Some(ptr.and_then(|ptr| {
            let plain = Plain {
                ptr,
                size,
                device,
                host,
            };
            self.state.plain.insert(out, plain);
            let at = Addr {
                of: Memory::Plain(out),
                offset: 0,
            };
            let stream = StreamHandle { device, raw: 0 };
            self.zero(at, size, stream)?;
            Ok(Vec::new())
        }))
    }

    /// Fills new memory with zeros where somebody is known to have access.
    pub(super) fn zero(&mut self, at: Addr, bytes: u64, stream: StreamHandle) -> Result<()> {
        let device = Location::Device(stream.device);
        if let Some(ptr) = self
            .state
            .accessible(at, bytes, Location::Host, Access::ReadWrite)
        {
            // SAFETY: `accessible` says that the CPU may write these bytes of this run's own
            // memory, which nothing else uses now.
            unsafe { std::ptr::write_bytes(ptr.0 as *mut u8, 0, bytes as usize) };
            self.state.written(at, bytes);
        } else if let Some(ptr) = self.state.accessible(at, bytes, device, Access::ReadWrite) {
            // SAFETY: the same for the stream's device; the work is waited for.
            unsafe { self.driver.memset_d8_async(ptr, 0, bytes, stream) }?;
            self.synchronize(stream)?;
            self.state.written(at, bytes);
        }
        Ok(())
    }

    /// Gives back what is left, and says what cannot be.
    fn give_back(mut self) -> Vec<String> {
        let mut left = Vec::new();
        let mut note = |what: String, result: Result<()>| {
            if let Err(error) = result {
                left.push(format!("{what}: {}", failure(&error)));
            }
        };
        self.give_back_pools(&mut note);
        let driver = self.driver;
        // SAFETY: everything here is this run's own, all work has been waited for, and nothing uses
        // any of it again. For all calls below.
        unsafe {
            for (slot, (event, _)) in &self.state.events {
                note(format!("event {slot}"), driver.event_destroy(*event));
            }
            for (slot, stream) in &self.state.streams {
                note(format!("stream {slot}"), driver.stream_destroy(*stream));
            }
            for (slot, plain) in &self.state.plain {
                let result = if plain.host {
                    driver.mem_free_host(plain.device, plain.ptr)
                } else {
                    driver.mem_free(plain.device, plain.ptr)
                };
                note(format!("m{slot}"), result);
            }
            for (slot, range) in &self.state.ranges {
                for mapping in &range.mappings {
                    let ptr = range.base.add(mapping.offset);
                    let result = driver.mem_unmap(ptr, mapping.size);
                    if !mapping.doubtful {
                        note(format!("mapping r{slot}+{}", mapping.offset), result);
                    }
                }
            }
            for (slot, handle) in &self.state.handles {
                note(format!("h{slot}"), driver.mem_release(*handle));
            }
            for (slot, range) in &self.state.ranges {
                let result = driver.mem_address_free(range.base, range.size);
                note(format!("r{slot}"), result);
            }
        }
        left
    }
}
