//! The simulated driver's state as its calls reach it: counted, faulted, and under a lock.

use std::sync::{Arc, Mutex, MutexGuard};

use super::answer::{Answer, Fail};
use super::fault::Faults;
use super::machine::Machine;
use super::state::State;
use super::window::Placement;
use crate::{Call, DriverError, Error, Result, lock};

/// The state that the driver API, the runtime API and the controls share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) machine: Arc<Machine>,
    faults: Mutex<Faults>,
    state: Mutex<State>,
}

impl Shared {
    pub(super) fn new(machine: Machine, placement: Placement) -> Self {
        let machine = Arc::new(machine);
        Self {
            state: Mutex::new(State::new(Arc::clone(&machine), placement)),
            faults: Mutex::default(),
            machine,
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under the lock would be a defect of this crate; the state is still the best available.
        lock(&self.state)
    }

    pub(super) fn faults(&self) -> MutexGuard<'_, Faults> {
        lock(&self.faults)
    }

    /// Makes a call: counts it, and fails it if a fault was injected.
    pub(super) fn call<T>(
        &self,
        call: Call,
        answer: impl FnOnce(&mut State) -> Answer<T>,
    ) -> Result<T> {
        let _traced = call.traced();
        self.faults()
            .enter(call)
            .map_err(|code| Error::driver(call, code))?;
        let mut state = self.lock();
        let answered = state.expect_allowed(call).and_then(|()| answer(&mut state));
        answered.map_err(|fail| error(call, fail))
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
