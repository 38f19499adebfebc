//! A heap's calls of the driver, as a sequence to record: the heap grows, gives chunks back, shares
//! blocks and releases others after a stream's work, on a simulated machine whose calls are written down.
//! Between them a GPU writes each chunk and checks it wherever it is mapped.

use std::alloc::Layout;
use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use egmem::driver::*;
use egmem::share::{ImportOptions, ImportedBuffer, Shared};
use egmem::{Block, Heap, Machine, Result, Stream};
use egmem_trace::{Addr, Memory, Op, Sequence, Slot, Source};

const MIB: u64 = 1 << 20;
/// The words at a chunk's start that the GPU writes and checks.
const WORDS: u64 = 512;

/// A heap's work of at least `len` calls, and its end.
///
/// # Errors
/// The heap's, or the simulator's.
pub fn sequence(seed: u64, len: usize) -> Result<Sequence> {
    let recorder = Recorder(Arc::new(Inner {
        driver: Driver::simulated(Machine::h200x8())?,
        state: Mutex::default(),
    }));
    let driver = Driver::from_backend(Arc::new(recorder.clone()));
    let mut random = fastrand::Rng::with_seed(seed);
    let shared = seed.is_multiple_of(2);
    let heap = Heap::on(NodeId(0))
        .access_by([Location::Device(0)])
        .chunk([2 * MIB, 4 * MIB, 16 * MIB][random.usize(..3)])
        .limit(256 * MIB)
        .handle_types(if shared {
            HandleTypes::POSIX_FD
        } else {
            HandleTypes::NONE
        })
        .build(&driver)?;
    let stream = Stream::new(&driver, 0)?;
    let mut blocks: Vec<Block> = Vec::new();
    let mut shares: Vec<(Shared, ImportedBuffer)> = Vec::new();
    while recorder.lock().ops.len() < len {
        match random.u32(..16) {
            0..7 => {
                // In a heap that can be shared, a block lies in one chunk.
                let most = if shared { 2 * MIB } else { 10 * MIB };
                let bytes = random.u64(64 << 10..=most) as usize;
                match Layout::from_size_align(bytes, 256).map(|layout| heap.allocate(layout)) {
                    Ok(Ok(block)) => blocks.push(block),
                    // Full: some go.
                    _ => blocks.truncate(blocks.len() / 2),
                }
            }
            7..10 if !blocks.is_empty() => drop(blocks.swap_remove(random.usize(..blocks.len()))),
            10..12 if !blocks.is_empty() => {
                let block = blocks.swap_remove(random.usize(..blocks.len()));
                drop(block.free_after(&stream));
            }
            12 if shared && !blocks.is_empty() => {
                let block = blocks.swap_remove(random.usize(..blocks.len()));
                let block = block.share()?;
                let description = block.describe(Access::ReadWrite)?;
                let handles = block.export(HandleType::PosixFd)?;
                // Machines with fewer GPUs than the simulated one can do the same.
                let imported = ImportOptions::new()
                    .access_by([Location::Device(0)])
                    .import(&driver, &description, handles)?;
                shares.push((block, imported));
            }
            13 if !shares.is_empty() => drop(shares.swap_remove(random.usize(..shares.len()))),
            14 => heap.reserve(random.u64(1..24) * MIB)?,
            15 => {
                stream.synchronize()?;
                heap.collect()?;
                blocks.truncate(blocks.len() / 2);
                heap.trim()?;
            }
            _ => {}
        }
    }
    drop((shares, blocks, heap, stream));
    let ops = std::mem::take(&mut recorder.lock().ops);
    Ok(Sequence {
        seed,
        devices: 1,
        ops,
    })
}

/// A driver that notes which calls were made of the one under it.
#[derive(Clone, Debug)]
struct Recorder(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    driver: Driver,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    ops: Vec<Op>,
    /// How many of each kind of slot were given out.
    handles: Slot,
    ranges: Slot,
    exported: Slot,
    streams: Slot,
    events: Slot,
    /// The slots of a handle; several are several references.
    slots: HashMap<PhysicalHandle, Vec<Slot>>,
    /// The exported memory, by the file that its descriptors are of.
    files: HashMap<(u64, u64), (Slot, PhysicalHandle)>,
    spaces: Vec<Space>,
    stream_slots: HashMap<StreamHandle, Slot>,
    event_slots: HashMap<EventHandle, Slot>,
    /// The seed of the last write to each memory, by the handle that it was created as.
    seeds: HashMap<PhysicalHandle, u64>,
    /// The handle that an imported one was created as.
    origins: HashMap<PhysicalHandle, PhysicalHandle>,
    written: u64,
}

/// A reserved range and the mappings in it.
#[derive(Debug)]
struct Space {
    slot: Slot,
    range: Range<u64>,
    mapped: Vec<(Range<u64>, PhysicalHandle)>,
}

fn next(counter: &mut Slot) -> Slot {
    *counter += 1;
    *counter - 1
}

fn file(fd: BorrowedFd<'_>) -> Option<(u64, u64)> {
    let file = std::fs::File::from(fd.try_clone_to_owned().ok()?);
    let about = file.metadata().ok()?;
    Some((about.dev(), about.ino()))
}

impl State {
    fn slot(&self, handle: PhysicalHandle) -> Slot {
        let slots = self.slots.get(&handle);
        slots
            .and_then(|slots| slots.last())
            .copied()
            .unwrap_or(Slot::MAX)
    }

    fn hold(&mut self, handle: PhysicalHandle) -> Slot {
        let slot = next(&mut self.handles);
        self.slots.entry(handle).or_default().push(slot);
        slot
    }

    fn at(&self, ptr: DevicePtr) -> Addr {
        let space = self
            .spaces
            .iter()
            .find(|space| space.range.contains(&ptr.0));
        space.map_or(
            Addr {
                of: Memory::Nowhere,
                offset: ptr.0,
            },
            |space| Addr {
                of: Memory::Range(space.slot),
                offset: ptr.0 - space.range.start,
            },
        )
    }

    fn stream(&self, stream: StreamHandle) -> Option<Slot> {
        self.stream_slots.get(&stream).copied()
    }

    fn event(&self, event: EventHandle) -> Slot {
        self.event_slots.get(&event).copied().unwrap_or(Slot::MAX)
    }

    /// The GPU checks the bytes that it wrote through the mappings in a range, or wherever else the memory was
    /// mapped before, and writes new ones.
    fn touch(&mut self, range: Range<u64>) {
        let mapped = self.spaces.iter().flat_map(|space| &space.mapped);
        let within = mapped.filter(|(at, _)| range.start <= at.start && at.end <= range.end);
        let found: Vec<_> = within.map(|(at, handle)| (at.start, *handle)).collect();
        for (start, handle) in found {
            let at = self.at(DevicePtr(start));
            self.written += 1;
            let (seed, threads, stream) = (self.written, 256, None);
            let origin = self.origins.get(&handle).copied().unwrap_or(handle);
            self.ops.push(match self.seeds.insert(origin, seed) {
                Some(expected) => Op::CheckKernel {
                    at,
                    words: WORDS,
                    expected,
                    seed,
                    threads,
                    stream,
                },
                None => Op::WriteKernel {
                    at,
                    words: WORDS,
                    seed,
                    threads,
                    stream,
                },
            });
        }
    }
}

impl Recorder {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn under(&self) -> &Driver {
        &self.0.driver
    }
}

// SAFETY: every result that it reports comes from the driver under it.
unsafe impl Backend for Recorder {
    fn name(&self) -> &'static str {
        "recorder"
    }
    fn simulated_host(&self) -> Option<SimulatedHost> {
        self.under().simulated_host()
    }
    fn driver_pools(&self) -> &dyn PoolCalls {
        self.under().driver_pools()
    }
    fn driver_version(&self) -> Result<CudaVersion> {
        self.under().driver_version()
    }
    fn device_count(&self) -> Result<i32> {
        self.under().device_count()
    }
    fn device_name(&self, device: i32) -> Result<String> {
        self.under().device_name(device)
    }
    fn device_uuid(&self, device: i32) -> Result<[u8; 16]> {
        self.under().device_uuid(device)
    }
    fn device_pci_bus_id(&self, device: i32) -> Result<String> {
        self.under().device_pci_bus_id(device)
    }
    fn device_total_mem(&self, device: i32) -> Result<u64> {
        self.under().device_total_mem(device)
    }
    fn device_attribute(&self, device: i32, attribute: DeviceAttribute) -> Result<i32> {
        self.under().device_attribute(device, attribute)
    }
    fn device_can_access_peer(&self, device: i32, peer: i32) -> Result<bool> {
        self.under().device_can_access_peer(device, peer)
    }
    fn mem_granularity(&self, props: &AllocationProps, kind: GranularityKind) -> Result<u64> {
        self.lock().ops.push(Op::Granularity {
            props: *props,
            kind,
        });
        self.under().mem_granularity(props, kind)
    }
    fn mem_create(&self, size: u64, props: &AllocationProps) -> Result<PhysicalHandle> {
        let handle = self.under().mem_create(size, props)?;
        let mut state = self.lock();
        let out = state.hold(handle);
        let props = *props;
        state.ops.push(Op::Create { out, size, props });
        Ok(handle)
    }
    unsafe fn mem_release(&self, handle: PhysicalHandle) -> Result<()> {
        {
            let mut state = self.lock();
            let slots = state.slots.get_mut(&handle);
            let slot = slots.and_then(Vec::pop).unwrap_or(Slot::MAX);
            state.ops.push(Op::Release {
                handle: slot,
                twice: false,
            });
        }
        // SAFETY: as the caller says. So it is for all calls below.
        unsafe { self.under().mem_release(handle) }
    }
    fn mem_address_reserve(&self, size: u64, alignment: u64, hint: u64) -> Result<DevicePtr> {
        let ptr = self.under().mem_address_reserve(size, alignment, hint)?;
        let mut state = self.lock();
        let slot = next(&mut state.ranges);
        state.spaces.push(Space {
            slot,
            range: ptr.0..ptr.0 + size,
            mapped: Vec::new(),
        });
        state.ops.push(Op::Reserve {
            out: slot,
            size,
            alignment,
            hint: None,
        });
        Ok(ptr)
    }
    unsafe fn mem_address_free(&self, ptr: DevicePtr, size: u64) -> Result<()> {
        {
            let mut state = self.lock();
            if let Memory::Range(range) = state.at(ptr).of {
                let twice = false;
                state.ops.push(Op::AddressFree { range, size, twice });
                state.spaces.retain(|space| space.slot != range);
            }
        }
        // SAFETY: as above.
        unsafe { self.under().mem_address_free(ptr, size) }
    }
    unsafe fn mem_map(
        &self,
        ptr: DevicePtr,
        size: u64,
        offset: u64,
        handle: PhysicalHandle,
    ) -> Result<()> {
        {
            let mut state = self.lock();
            let (at, slot) = (state.at(ptr), state.slot(handle));
            state.ops.push(Op::Map {
                at,
                size,
                offset,
                handle: slot,
            });
            let mut spaces = state.spaces.iter_mut();
            if let Some(space) = spaces.find(|space| space.range.contains(&ptr.0)) {
                space.mapped.push((ptr.0..ptr.0 + size, handle));
            }
        }
        // SAFETY: as above.
        unsafe { self.under().mem_map(ptr, size, offset, handle) }
    }
    unsafe fn mem_unmap(&self, ptr: DevicePtr, size: u64) -> Result<()> {
        {
            let mut state = self.lock();
            let range = ptr.0..ptr.0 + size;
            state.touch(range.clone());
            let at = state.at(ptr);
            state.ops.push(Op::Unmap { at, size });
            for space in &mut state.spaces {
                let inside = |at: &Range<u64>| range.start <= at.start && at.end <= range.end;
                space.mapped.retain(|(at, _)| !inside(at));
            }
        }
        // SAFETY: as above.
        unsafe { self.under().mem_unmap(ptr, size) }
    }
    unsafe fn mem_set_access(
        &self,
        ptr: DevicePtr,
        size: u64,
        access: &[AccessDesc],
    ) -> Result<()> {
        {
            let mut state = self.lock();
            let at = state.at(ptr);
            let access = access.to_vec();
            state.ops.push(Op::SetAccess { at, size, access });
            state.touch(ptr.0..ptr.0 + size);
        }
        // SAFETY: as above.
        unsafe { self.under().mem_set_access(ptr, size, access) }
    }
    fn mem_get_access(&self, location: Location, ptr: DevicePtr) -> Result<u64> {
        let mut state = self.lock();
        let at = state.at(ptr);
        state.ops.push(Op::GetAccess { at, location });
        drop(state);
        self.under().mem_get_access(location, ptr)
    }
    unsafe fn mem_export(
        &self,
        handle: PhysicalHandle,
        kind: HandleType,
    ) -> Result<ShareableHandle> {
        // SAFETY: as above.
        let exported = unsafe { self.under().mem_export(handle, kind)? };
        let mut state = self.lock();
        let (out, slot) = (next(&mut state.exported), state.slot(handle));
        state.ops.push(Op::Export {
            out,
            handle: slot,
            kind,
        });
        if let ShareableHandle::PosixFd(fd) = &exported
            && let Some(file) = file(fd.as_fd())
        {
            state.files.insert(file, (out, handle));
        }
        Ok(exported)
    }
    fn mem_import(&self, handle: &ShareableHandle) -> Result<PhysicalHandle> {
        let imported = self.under().mem_import(handle)?;
        let mut state = self.lock();
        let known = match handle {
            ShareableHandle::PosixFd(fd) => file(fd.as_fd()),
            ShareableHandle::Fabric(_) => None,
        };
        if let Some((from, own)) = known.and_then(|file| state.files.get(&file).copied()) {
            let out = state.hold(imported);
            let from = Source::Exported(from);
            state.ops.push(Op::Import { out, from });
            if own != imported {
                state.origins.insert(imported, own);
            }
        }
        Ok(imported)
    }
    unsafe fn mem_properties(&self, handle: PhysicalHandle) -> Result<AllocationProps> {
        {
            let mut state = self.lock();
            let handle = state.slot(handle);
            state.ops.push(Op::Properties { handle });
        }
        // SAFETY: as above.
        unsafe { self.under().mem_properties(handle) }
    }
    fn stream_create(&self, device: i32) -> Result<StreamHandle> {
        let stream = self.under().stream_create(device)?;
        let mut state = self.lock();
        let out = next(&mut state.streams);
        state.stream_slots.insert(stream, out);
        state.ops.push(Op::StreamCreate { out, device });
        Ok(stream)
    }
    unsafe fn stream_destroy(&self, stream: StreamHandle) -> Result<()> {
        {
            let mut state = self.lock();
            if let Some(stream) = state.stream_slots.remove(&stream) {
                state.ops.push(Op::StreamDestroy { stream });
            }
        }
        // SAFETY: as above.
        unsafe { self.under().stream_destroy(stream) }
    }
    unsafe fn stream_synchronize(&self, stream: StreamHandle) -> Result<()> {
        {
            let mut state = self.lock();
            let stream = state.stream(stream);
            state.ops.push(Op::StreamSynchronize { stream });
        }
        // SAFETY: as above.
        unsafe { self.under().stream_synchronize(stream) }
    }
    unsafe fn stream_is_capturing(&self, stream: StreamHandle) -> Result<bool> {
        // SAFETY: as above. No operation of traces.
        unsafe { self.under().stream_is_capturing(stream) }
    }
    fn thread_exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        self.under().thread_exchange_capture_mode(mode)
    }
    fn ctx_synchronize(&self, device: i32) -> Result<()> {
        self.under().ctx_synchronize(device)
    }
    fn event_create(&self, device: i32, timing: bool) -> Result<EventHandle> {
        let event = self.under().event_create(device, timing)?;
        let mut state = self.lock();
        let out = next(&mut state.events);
        state.event_slots.insert(event, out);
        state.ops.push(Op::EventCreate {
            out,
            device,
            timing,
        });
        Ok(event)
    }
    unsafe fn event_destroy(&self, event: EventHandle) -> Result<()> {
        {
            let mut state = self.lock();
            if let Some(event) = state.event_slots.remove(&event) {
                state.ops.push(Op::EventDestroy { event });
            }
        }
        // SAFETY: as above.
        unsafe { self.under().event_destroy(event) }
    }
    unsafe fn event_record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        {
            let mut state = self.lock();
            let (slot, stream) = (state.event(event), state.stream(stream));
            state.ops.push(Op::EventRecord {
                event: slot,
                stream,
            });
        }
        // SAFETY: as above.
        unsafe { self.under().event_record(event, stream) }
    }
    unsafe fn event_query(&self, event: EventHandle) -> Result<bool> {
        {
            let mut state = self.lock();
            let event = state.event(event);
            state.ops.push(Op::EventQuery { event });
        }
        // SAFETY: as above.
        unsafe { self.under().event_query(event) }
    }
    unsafe fn event_synchronize(&self, event: EventHandle) -> Result<()> {
        {
            let mut state = self.lock();
            let event = state.event(event);
            state.ops.push(Op::EventSynchronize { event });
        }
        // SAFETY: as above.
        unsafe { self.under().event_synchronize(event) }
    }
}
