//! The effect of a call by one thread on the global capture of another: the call's own result code,
//! and how the capture ends.

use std::cell::Cell;

use egmem::driver::{
    Access, AccessDesc, AllocationProps, CaptureMode, DevicePtr, Driver, EventHandle, HandleType,
    HandleTypes, Location, PhysicalHandle, PoolApi, ShareableHandle,
};
use egmem::{Error, Heap, Result, Stream};
use serde::Serialize;

use crate::cuda::Cuda;
use crate::report::{About, Results};
use crate::{Place, layout};

const GRANULE: u64 = 2 << 20;

/// A call in a mode of the thread's.
#[derive(Debug, Serialize)]
pub struct Row {
    pub call: &'static str,
    /// The mode of the thread that calls: `CUstreamCaptureMode`.
    pub mode: &'static str,
    /// The call's result code: 0 for success.
    pub answer: i32,
    /// The result code of ending the capture: 0 for success, 901 for a capture made invalid.
    pub capture: i32,
}

/// All calls in all modes.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct Captures {
    rows: Vec<Row>,
}

/// Tries each call in each mode.
///
/// # Errors
/// The driver's, before a capture begins or where none can be made.
pub fn probe(place: &Place) -> Result<Captures> {
    let cuda = Cuda::load(place.gpu)?;
    let modes = [
        ("global", CaptureMode::GLOBAL),
        ("thread-local", CaptureMode::THREAD_LOCAL),
        ("relaxed", CaptureMode::RELAXED),
    ];
    let mut rows = Vec::new();
    for (call, act) in CALLS {
        for (name, mode) in modes {
            let things = Things::new(place)?;
            let captured = Stream::new(&place.driver, place.gpu)?;
            cuda.begin(&captured)?;
            // The thread that calls is another than the one that captures.
            let answer = std::thread::scope(|scope| {
                let called = scope.spawn(|| {
                    let things = things;
                    let before = things.driver.thread_exchange_capture_mode(mode)?;
                    let answer = act(&things);
                    things.driver.thread_exchange_capture_mode(before)?;
                    Ok::<_, Error>((answer, things))
                });
                match called.join() {
                    Ok(result) => result,
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            });
            let capture = cuda.end(&captured);
            let (answer, things) = answer?;
            rows.push(Row {
                call,
                mode: name,
                answer: code(&answer),
                capture,
            });
            things.give_back();
        }
    }
    Ok(Captures { rows })
}

fn code(answer: &Result<()>) -> i32 {
    match answer {
        Ok(()) => 0,
        // Of the library's own making: none of CUDA's numbers.
        Err(error) => error.code().map_or(-1, |code| code.0),
    }
}

/// A call that the table names.
type Act = fn(&Things) -> Result<()>;

/// The operands of the calls, made before a capture begins.
struct Things {
    driver: Driver,
    gpu: i32,
    props: AllocationProps,
    access: [AccessDesc; 2],
    /// Room for three granules: the first mapped, the second mapped and granted, the third empty.
    range: DevicePtr,
    mapped: Cell<[bool; 3]>,
    /// A range that nothing is mapped in.
    spare: Cell<Option<DevicePtr>>,
    handles: [PhysicalHandle; 3],
    released: Cell<bool>,
    made: Cell<Option<PhysicalHandle>>,
    fd: ShareableHandle,
    stream: Stream,
    event: EventHandle,
    pinned: Cell<Option<DevicePtr>>,
    heap: Heap,
}

// SAFETY: an exclusive value moves from one thread to the next; CUDA's handles belong to no thread.
unsafe impl Send for Things {}

impl Things {
    fn new(place: &Place) -> Result<Self> {
        let (driver, node) = (place.driver.clone(), Location::from(place.node));
        let props = AllocationProps::at(node).handle_types(HandleTypes::POSIX_FD);
        let access = [node, Location::Device(place.gpu)].map(|location| AccessDesc {
            location,
            access: Access::ReadWrite,
        });
        let range = driver.mem_address_reserve(3 * GRANULE, 0, 0)?;
        let spare = driver.mem_address_reserve(GRANULE, 0, 0)?;
        let create = || driver.mem_create(GRANULE, &props);
        let handles = [create()?, create()?, create()?];
        let stream = Stream::new(&driver, place.gpu)?;
        let event = driver.event_create(place.gpu, false)?;
        // SAFETY: all of it was just made, and no other code has it.
        let fd = unsafe {
            driver.mem_map(range, GRANULE, 0, handles[0])?;
            driver.mem_map(range.add(GRANULE), GRANULE, 0, handles[1])?;
            driver.mem_set_access(range.add(GRANULE), GRANULE, &access)?;
            driver.event_record(event, stream.handle())?;
            driver.mem_export(handles[0], HandleType::PosixFd)?
        };
        let heap = Heap::on(node)
            .access_by([Location::Device(place.gpu)])
            .limit(64 << 20)
            .chunk(8 << 20)
            .build(&driver)?;
        heap.reserve(16 << 20)?;
        stream.synchronize()?;
        Ok(Self {
            driver,
            gpu: place.gpu,
            props,
            access,
            range,
            mapped: Cell::new([true, true, false]),
            spare: Cell::new(Some(spare)),
            handles,
            released: Cell::new(false),
            made: Cell::new(None),
            fd,
            stream,
            event,
            pinned: Cell::new(None),
            heap,
        })
    }

    fn set_mapped(&self, which: usize, is: bool) {
        let mut mapped = self.mapped.get();
        mapped[which] = is;
        self.mapped.set(mapped);
    }

    /// Gives everything back, after any result of the call. Objects whose release the driver refuses stay until
    /// the end.
    fn give_back(self) {
        let driver = &self.driver;
        let tell = |what: &str, result: Result<()>| {
            if let Err(error) = result {
                eprintln!("measure-heap: {what} stays: {error}");
            }
        };
        // SAFETY: all of it is this value's own, and no longer in use. For all calls below.
        unsafe {
            for (index, mapped) in (0..).zip(self.mapped.get()) {
                if mapped {
                    let at = self.range.add(index * GRANULE);
                    tell("a mapping", driver.mem_unmap(at, GRANULE));
                }
            }
            let kept = if self.released.get() { 2 } else { 3 };
            for handle in self.handles[..kept].iter().copied().chain(self.made.get()) {
                tell("memory", driver.mem_release(handle));
            }
            tell("a range", driver.mem_address_free(self.range, 3 * GRANULE));
            if let Some(spare) = self.spare.get() {
                tell("a range", driver.mem_address_free(spare, GRANULE));
            }
            if let Some(ptr) = self.pinned.get() {
                tell("host memory", driver.mem_free_host(self.gpu, ptr));
            }
            tell("an event", driver.event_destroy(self.event));
        }
    }
}

const CALLS: [(&str, Act); 22] = [
    ("cuMemGetInfo", |t| t.driver.mem_info(t.gpu).map(drop)),
    ("cuMemAddressReserve", |t| {
        let more = t.driver.mem_address_reserve(GRANULE, 0, 0)?;
        // SAFETY: just reserved.
        unsafe { t.driver.mem_address_free(more, GRANULE) }
    }),
    ("cuMemAddressFree", |t| {
        let Some(spare) = t.spare.take() else {
            return Ok(());
        };
        // SAFETY: nothing is mapped there.
        unsafe { t.driver.mem_address_free(spare, GRANULE) }
            .inspect_err(|_| t.spare.set(Some(spare)))
    }),
    ("cuMemCreate", |t| {
        t.made.set(Some(t.driver.mem_create(GRANULE, &t.props)?));
        Ok(())
    }),
    ("cuMemRelease", |t| {
        // SAFETY: held, and not mapped.
        unsafe { t.driver.mem_release(t.handles[2])? };
        t.released.set(true);
        Ok(())
    }),
    ("cuMemMap", |t| {
        let at = t.range.add(2 * GRANULE);
        // SAFETY: the place is empty, the memory held.
        unsafe { t.driver.mem_map(at, GRANULE, 0, t.handles[2])? };
        t.set_mapped(2, true);
        Ok(())
    }),
    ("cuMemSetAccess", |t| {
        // SAFETY: mapped, and nobody uses it.
        unsafe { t.driver.mem_set_access(t.range, GRANULE, &t.access) }
    }),
    ("cuMemUnmap", |t| {
        // SAFETY: nobody uses it.
        unsafe { t.driver.mem_unmap(t.range.add(GRANULE), GRANULE)? };
        t.set_mapped(1, false);
        Ok(())
    }),
    ("cuMemExportToShareableHandle", |t| {
        // SAFETY: held.
        unsafe { t.driver.mem_export(t.handles[1], HandleType::PosixFd) }.map(drop)
    }),
    ("cuMemImportFromShareableHandle", |t| {
        t.made.set(Some(t.driver.mem_import(&t.fd)?));
        Ok(())
    }),
    ("cuMemHostAlloc", |t| {
        t.pinned.set(Some(t.driver.mem_host_alloc(t.gpu, GRANULE)?));
        Ok(())
    }),
    ("cuMemAllocAsync", |t| {
        let pools = t.driver.pools(PoolApi::Driver)?;
        // SAFETY: the stream lives, and nobody uses the block.
        unsafe {
            let ptr = pools.alloc_async(GRANULE, t.stream.handle())?;
            pools.free_async(ptr, t.stream.handle())
        }
    }),
    ("cuStreamCreate", |t| {
        Stream::new(&t.driver, t.gpu).map(drop)
    }),
    ("cuStreamQuery", |t| t.stream.is_done().map(drop)),
    ("cuStreamSynchronize", |t| t.stream.synchronize()),
    ("cuEventCreate", |t| {
        let event = t.driver.event_create(t.gpu, false)?;
        // SAFETY: just made.
        unsafe { t.driver.event_destroy(event) }
    }),
    ("cuEventRecord", |t| {
        // SAFETY: both live.
        unsafe { t.driver.event_record(t.event, t.stream.handle()) }
    }),
    ("cuEventQuery", |t| {
        // SAFETY: it lives.
        unsafe { t.driver.event_query(t.event) }.map(drop)
    }),
    ("cuEventSynchronize", |t| {
        // SAFETY: it lives.
        unsafe { t.driver.event_synchronize(t.event) }
    }),
    ("cuCtxSynchronize", |t| t.driver.ctx_synchronize(t.gpu)),
    ("a heap's growth", |t| {
        t.heap.reserve(40 << 20)?;
        t.heap.allocate(layout(30 << 20)?).map(drop)
    }),
    ("a heap's trim", |t| t.heap.trim().map(drop)),
];

impl Results for Captures {
    fn title(&self) -> String {
        "calls of a thread while another captures a stream in global mode".into()
    }

    fn header(&self) -> Vec<&'static str> {
        vec!["call", "mode", "answer", "capture"]
    }

    fn facts(&self) -> usize {
        4
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let line = |row: &Row| {
            vec![
                row.call.to_string(),
                row.mode.to_string(),
                row.answer.to_string(),
                row.capture.to_string(),
            ]
        };
        self.rows.iter().map(line).collect()
    }

    fn verdicts(&self) -> Vec<String> {
        let spoilt = self.rows.iter().filter(|row| row.capture != 0);
        spoilt
            .map(|row| format!("{} in {} mode spoils the capture", row.call, row.mode))
            .collect()
    }

    fn draw(&self, _: &About) -> Option<String> {
        None
    }
}
