//! The simulated driver: answers like the real one, with real memory behind it.

mod access;
mod alloc;
mod backend;
mod bind;
mod capacity;
mod device;
mod event;
mod fault;
mod grants;
mod held;
mod kernels;
mod machine;
mod memory;
mod physical;
mod pool;
mod presets;
mod ranges;
mod references;
mod share;
mod space;
mod state;
mod stream;
mod validate;
mod vmm;
mod window;

#[cfg(test)]
mod tests;

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use fault::FaultId;
pub use held::Held;
pub use machine::{AttributeAnswer, GpuSpec, Machine, NodeSpec, PeerAccess, Refusal};

use super::{Call, Code, Driver, Location};
use crate::{DriverError, Error, Result};
use backend::Simulator;
use fault::Faults;
use state::{Answer, Fail, State};

/// Physical memory is created and mapped in units of this many bytes, at every location.
const GRANULARITY: u64 = 2 << 20;

/// The simulator's controls: injected faults, call counts, and what is still held.
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
    shared: Arc<Shared>,
}

/// The state that the driver API, the runtime API and the controls share.
#[derive(Debug)]
struct Shared {
    machine: Arc<Machine>,
    faults: Faults,
    state: Mutex<State>,
}

impl Sim {
    /// Makes the `nth` use of `call` from now on fail with `code`: both 1 and 0 mean the next use. The code
    /// need not exist in CUDA.
    ///
    /// The failing call has no other effect, but is counted.
    pub fn fail(&self, call: Call, nth: u64, code: Code) -> FaultId {
        self.shared.faults.add(call, nth, code)
    }

    /// Cancels a fault; returns whether it had not happened yet.
    pub fn cancel(&self, fault: FaultId) -> bool {
        self.shared.faults.remove(|id| id == fault) > 0
    }

    /// Cancels all faults that have not happened yet; returns their number.
    pub fn cancel_all(&self) -> usize {
        self.shared.faults.remove(|_| true)
    }

    /// Returns how often each call was used; unused calls are left out.
    pub fn calls(&self) -> BTreeMap<Call, u64> {
        self.shared.faults.counts()
    }

    /// Returns how often a call was used.
    pub fn count(&self, call: Call) -> u64 {
        self.shared.faults.count(call)
    }

    /// Resets all counts to zero.
    pub fn reset_counts(&self) {
        self.shared.faults.reset_counts();
    }

    /// Returns the counts of objects that are still alive.
    pub fn held(&self) -> Held {
        Held::of(&self.shared.lock())
    }

    /// Returns the free bytes at a location; for the host as a whole, the sum over its nodes.
    pub fn free_bytes(&self, location: Location) -> u64 {
        self.shared.lock().capacity.free(location)
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
        let mut state = self.shared.lock();
        state.eager = eager;
        if eager {
            for device in 0..self.shared.machine.gpus.len() as i32 {
                state.synchronize_device(device);
            }
        }
    }

    /// Returns the simulated machine.
    pub fn machine(&self) -> &Machine {
        &self.shared.machine
    }
}

impl Driver {
    /// Creates a simulated driver of `machine`: for tests, and for development without a GPU.
    ///
    /// With `EGMEM_SIM_PLACEMENT=guarded` in the environment every reservation lies between inaccessible
    /// addresses, and the next reservation of the same size reuses a freed one at once, so that accesses
    /// beyond an end, and many after a free, fault. The default is `packed`: reservations without gaps.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the description contradicts itself, and for another value of
    /// `EGMEM_SIM_PLACEMENT`; [`Error::System`] if the operating system has no memory for it.
    pub fn simulated(machine: Machine) -> Result<Self> {
        machine.validate()?;
        let placement = window::Placement::from_env()?;
        let machine = Arc::new(machine);
        let shared = Arc::new(Shared {
            state: Mutex::new(State::new(Arc::clone(&machine), placement)),
            faults: Faults::new(),
            machine,
        });
        Ok(Self::from_backend(Arc::new(Simulator::new(shared))))
    }

    /// Returns the simulator's controls, if this is the simulator.
    pub fn sim(&self) -> Option<&Sim> {
        let backend: &dyn Any = &**self;
        Some(&backend.downcast_ref::<Simulator>()?.sim)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under the lock would be a defect of this crate; the state is still the best available.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a call, and fails it if a fault was injected.
    fn enter(&self, call: Call) -> Result<()> {
        self.faults
            .enter(call)
            .map_err(|code| Error::driver(call, code))
    }

    /// Makes a call that needs the state.
    fn call<T>(&self, call: Call, answer: impl FnOnce(&mut State) -> Answer<T>) -> Result<T> {
        self.enter(call)?;
        answer(&mut self.lock()).map_err(|fail| error(call, fail))
    }

    /// Makes a call that the machine's description answers.
    fn ask<T>(&self, call: Call, answer: impl FnOnce(&Machine) -> Answer<T>) -> Result<T> {
        self.enter(call)?;
        answer(&self.machine).map_err(|fail| error(call, fail))
    }
}

fn error(call: Call, fail: Fail) -> Error {
    match fail {
        Fail::Code(code) => Error::driver(call, code),
        Fail::Lost { device, code } => Error::ContextLost {
            device,
            source: DriverError { call, code },
        },
    }
}
