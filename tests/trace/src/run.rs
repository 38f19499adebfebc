//! Running a sequence on a driver.

use super::addr::{Addr, Memory, Slot};
use super::op::{Op, Query};
use super::state::{Plain, State};
use super::work::Work;
use super::{Outcome, Record, Sequence, Value};
use egmem::driver::{Access, Driver, Location, StreamHandle};
use egmem::{Error, Result};

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
pub(super) type Step = Option<Result<Vec<Value>>>;

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

pub(super) fn number(value: impl Into<u64>) -> Value {
    Value::Number(value.into())
}

fn signed(value: i32) -> Value {
    // As CUDA's bit pattern: −1 is 0xffff_ffff.
    Value::Number(u64::from(value as u32))
}

pub(super) fn done<T>(result: Result<T>) -> Step {
    Some(result.map(|_| Vec::new()))
}

pub(super) fn again(result: Result<()>) -> Value {
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
            Op::Granularity { .. }
            | Op::Create { .. }
            | Op::Release { .. }
            | Op::Reserve { .. }
            | Op::AddressFree { .. }
            | Op::Map { .. }
            | Op::Unmap { .. }
            | Op::SetAccess { .. }
            | Op::GetAccess { .. }
            | Op::Export { .. }
            | Op::Import { .. }
            | Op::Properties { .. }
            | Op::Retain { .. }
            | Op::PointerAttribute { .. }
            | Op::AddressRange { .. }
            | Op::DmaBuf { .. } => self.vmm_step(op),
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
                // SAFETY: the stream is this run's own and not destroyed.
                let idle = unsafe { self.driver.stream_query(stream) };
                Some(idle.map(|idle| vec![number(idle)]))
            }
            Op::StreamWaitEvent { stream, event } => {
                let (event, _) = *self.state.events.get(&event)?;
                let stream = self.stream(stream)?;
                // SAFETY: stream and event are this run's own and not destroyed.
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
                // SAFETY: stream and event are this run's own and not destroyed.
                let result = unsafe { self.driver.event_record(event, stream) };
                done(result.and_then(|()| self.synchronize(stream)))
            }
            Op::EventSynchronize { event } => {
                let (event, _) = *self.state.events.get(&event)?;
                // SAFETY: the event is this run's own and not destroyed.
                done(unsafe { self.driver.event_synchronize(event) })
            }
            Op::EventQuery { event } => {
                let (event, _) = *self.state.events.get(&event)?;
                // SAFETY: the event is this run's own and not destroyed.
                let done = unsafe { self.driver.event_query(event) };
                Some(done.map(|done| vec![number(done)]))
            }
            Op::EventElapsed { start, end } => {
                let (start, _) = *self.state.events.get(&start)?;
                let (end, _) = *self.state.events.get(&end)?;
                // SAFETY: both events are this run's own and not destroyed.
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

    fn plain(
        &mut self,
        out: Slot,
        device: i32,
        size: u64,
        host: bool,
        allocate: impl FnOnce(&Driver) -> Result<egmem::driver::DevicePtr>,
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

    /// Fills new memory with zeros if the CPU or a device is known to have access.
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

    /// Gives back the remaining objects. Returns a line for each one that cannot be given back.
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
