//! The simulator as its calls and its controls reach it, under a lock, and its counts of objects that a program has not freed.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use tracing::span::EnteredSpan;

use super::fault::Faults;
use super::machine::Machine;
use super::space::Placement;
use super::state::{Allocator, FIRST_HANDLE, Kind, State};
use crate::fork::Generation;
use crate::*;

/// The simulator's controls: injected faults, call counts, and counts of live objects.
///
/// ```
/// use egmem::driver::{Call, Code};
///
/// let driver = egmem::Driver::simulated(egmem::Machine::gh200())?;
/// let sim = driver.sim().expect("it is simulated");
/// sim.fail(Call::MemAlloc, 1, Code::OUT_OF_MEMORY);
/// assert!(driver.mem_alloc(0, 4096).is_err()); // the injected fault
/// assert!(driver.mem_alloc(0, 4096).is_ok());
/// assert_eq!(sim.count(Call::MemAlloc), 2);
/// assert_eq!(sim.held().to_string(), "device allocations: 1");
/// # Ok::<(), egmem::Error>(())
/// ```
#[derive(Debug)]
pub struct Sim {
    /// A forked child's calls are refused before they take a lock, which another thread of the parent may have.
    pub(super) born: Generation,
    machine: Arc<Machine>,
    faults: Mutex<Faults>,
    state: Mutex<State>,
}

/// The state during a call, and the call's span, which ends after the state is unlocked.
pub(super) type Entered<'a> = (MutexGuard<'a, State>, Option<EnteredSpan>);

impl Sim {
    pub(super) fn new(machine: Machine, placement: Placement) -> Self {
        let machine = Arc::new(machine);
        Self {
            state: Mutex::new(State::new(Arc::clone(&machine), placement)),
            faults: Mutex::default(),
            born: Generation::current(),
            machine,
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under the lock would be a defect of this crate; the state is still the best available.
        lock(&self.state)
    }

    /// Begins a call: counts it, and fails it if a fault was injected.
    pub(super) fn enter(&self, call: Call) -> Result<Entered<'_>> {
        let traced = call.traced();
        if !self.born.is_current() {
            return Err(Error::driver(call, Code::NOT_INITIALIZED));
        }
        let injected = lock(&self.faults).enter(call);
        injected.map_err(|code| Error::driver(call, code))?;
        let mut state = self.lock();
        state.expect_allowed(call).map_err(|fail| fail.of(call))?;
        Ok((state, traced))
    }

    /// Makes the `nth` use of `call` from now on fail with `code`: both 1 and 0 mean the next use. The code
    /// need not exist in CUDA.
    ///
    /// The failing call has no other effect, but is counted.
    pub fn fail(&self, call: Call, nth: u64, code: Code) {
        lock(&self.faults).add(call, nth, code);
    }

    /// Cancels all faults that have not happened yet; returns their number.
    pub fn cancel_all(&self) -> usize {
        lock(&self.faults).clear()
    }

    /// Returns how often each call was used; unused calls are left out.
    pub fn calls(&self) -> BTreeMap<Call, u64> {
        lock(&self.faults).counts.clone()
    }

    /// Returns how often a call was used.
    pub fn count(&self, call: Call) -> u64 {
        self.calls().get(&call).copied().unwrap_or(0)
    }

    /// Resets all counts to zero.
    pub fn reset_counts(&self) {
        lock(&self.faults).counts.clear();
    }

    /// Returns the counts of objects that are still alive.
    pub fn held(&self) -> Held {
        Held::of(&self.lock())
    }

    /// Returns the free bytes at a location; for the host as a whole, the sum over its nodes.
    pub fn free_bytes(&self, location: Location) -> u64 {
        self.lock().capacity.free(location)
    }

    /// Sets whether work on streams runs at once (`true`) or as late as CUDA allows (`false`, the default),
    /// so that a missing synchronisation shows.
    ///
    /// In the second mode the work runs when a thread waits for it or **queries** it. Without this, a caller
    /// that polls would never see completion. So `Stream::is_done`,
    /// `Event::is_done` and `Heap::collect` run the work and
    /// find it done. To simulate a GPU that is still busy, inject one fault for each query; the work then
    /// waits for the next query:
    ///
    /// ```
    /// use std::alloc::Layout;
    /// use egmem::driver::{Call, Code, NodeId};
    /// use egmem::heap::NotFreed;
    /// use egmem::{Driver, Heap, Machine, Stream};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?;
    /// let sim = driver.sim().expect("it is simulated");
    /// let (heap, stream) = (Heap::on(NodeId(0)).build(&driver)?, Stream::new(&driver, 0)?);
    /// let block = heap.allocate(Layout::new::<u64>())?;
    /// block.free_after(&stream).map_err(NotFreed::forget)?;
    /// sim.fail(Call::EventQuery, 1, Code::NOT_READY); // Call::StreamQuery for a stream
    /// assert_eq!(heap.collect()?, 0); // the GPU is busy
    /// assert_eq!(heap.collect()?, 1); // not any more
    /// # Ok::<(), egmem::Error>(())
    /// ```
    pub fn set_eager(&self, eager: bool) {
        let mut state = self.lock();
        state.eager = eager;
        if eager {
            state.synchronize_all();
        }
    }

    /// Begins a capture of a stream into a graph, in global mode, as another library's thread does. Until
    /// [`end_capture`](Self::end_capture) calls that disturb captures are refused, and make it invalid. With `blocking` the
    /// stream is one that the legacy default stream waits for. No graph is made: work submitted to the stream runs.
    pub fn begin_capture(&self, stream: StreamHandle, blocking: bool) {
        self.lock().begin_capture(stream, blocking);
    }

    /// Ends the capture of a stream; returns whether it is valid. `false` if none had begun.
    pub fn end_capture(&self, stream: StreamHandle) -> bool {
        self.lock().end_capture(stream)
    }

    /// Returns the simulated machine.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }
}

/// Defines the counts: their documentation, names and types, and where they are counted.
macro_rules! held {
    (|$state:ident| $($(#[$doc:meta])* $name:ident: $type:ty = $count:expr;)*) => {
        /// The objects of a simulated driver that are still alive: all zero after a program that freed everything.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub struct Held {
            $($(#[$doc])* pub $name: $type,)*
        }

        impl Held {
            pub(super) fn of($state: &State) -> Self {
                Self { $($name: $count,)* }
            }
        }

        impl fmt::Display for Held {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut separator = "";
                $(if self.$name > 0 {
                    let name = stringify!($name).replace('_', " ");
                    write!(f, "{separator}{name}: {}", self.$name)?;
                    separator = ", ";
                })*
                match separator {
                    "" => f.write_str("nothing"),
                    _ => Ok(()),
                }
            }
        }
    };
}

held! { |state|
    /// References to physical memory: created, imported or retained and not yet released.
    physical_handles: u64 = state.references.values().map(|reference| reference.count).sum();
    /// Reserved address ranges.
    reservations: usize = state.reservations.entries().len();
    /// Mappings in them.
    mappings: usize = regions(state, |kind| matches!(kind, Kind::Mapping(_)));
    /// Pools, created or imported; the devices' own do not count.
    pools: usize = state.pools.values().filter(|pool| !pool.is_default && !pool.destroyed).count();
    /// Allocations from pools, not yet freed.
    pool_allocations: usize = state.pools.values().map(|pool| pool.live.entries().len()).sum();
    /// `cuMemAlloc`.
    device_allocations: usize = by(state, Allocator::Device);
    /// `cuMemHostAlloc`.
    host_allocations: usize = by(state, Allocator::Host);
    /// `cuMemAllocManaged`.
    managed_allocations: usize = by(state, Allocator::Managed);
    /// `cuMemHostRegister`.
    registrations: usize = state.registered.entries().len();
    /// Streams.
    streams: usize = state.streams.entries().iter().filter(|(key, stream)| key.1 >= FIRST_HANDLE && !stream.destroyed).count();
    /// Events.
    events: usize = state.events.entries().len();
    /// Loaded modules.
    modules: usize = state.modules.entries().len();
}

impl Held {
    /// Returns whether nothing is alive.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

fn regions(state: &State, is_such: impl Fn(&Kind) -> bool) -> usize {
    let regions = state.regions.values();
    regions.filter(|region| is_such(&region.kind)).count()
}

fn by(state: &State, allocator: Allocator) -> usize {
    regions(
        state,
        |kind| matches!(kind, Kind::Allocation { by, .. } if *by == allocator),
    )
}
