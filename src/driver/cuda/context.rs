//! Primary contexts: retained once per device, made current for a call, and released.

use std::ptr;
use std::sync::{Mutex, OnceLock};

use super::symbols::{DriverApi, Opaque};
use crate::{Call, Code, DriverError, Error, Result, lock};

/// The devices, and the primary contexts retained so far.
pub(super) struct Contexts {
    devices: Box<[Device]>,
    // Held while a context is being retained, so that it is retained only once.
    retaining: Mutex<()>,
    // A forked child has a copy of this value, but not of the driver's state.
    process: u32,
}

#[derive(Default)]
struct Device {
    /// `CUdevice`
    id: OnceLock<i32>,
    /// `CUcontext`, as a number so that it can be shared; never dereferenced here.
    context: OnceLock<usize>,
    /// The context's number, which the driver gives to no other one.
    number: OnceLock<u64>,
    /// The call that showed that the context was destroyed. Its streams and events are gone, and a context that another
    /// library makes anew may have the same address.
    destroyed: OnceLock<DriverError>,
}

impl Contexts {
    pub(super) fn new(api: &DriverApi) -> Result<Self> {
        let mut count = 0;
        // SAFETY: `count` is a live integer.
        unsafe { api.device_get_count(&mut count)? };
        Ok(Self {
            devices: (0..count).map(|_| Device::default()).collect(),
            retaining: Mutex::new(()),
            process: std::process::id(),
        })
    }

    fn slot(&self, ordinal: i32) -> Option<&Device> {
        self.devices.get(usize::try_from(ordinal).ok()?)
    }

    /// Returns the `CUdevice` of an ordinal. The driver refuses ordinals that do not exist.
    pub(super) fn device(&self, api: &DriverApi, ordinal: i32) -> Result<i32> {
        let known = self.slot(ordinal);
        if let Some(id) = known.and_then(|device| device.id.get()) {
            return Ok(*id);
        }
        let mut id = -1;
        // SAFETY: `id` is a live integer.
        unsafe { api.device_get(&mut id, ordinal)? };
        Ok(known.map_or(id, |device| *device.id.get_or_init(|| id)))
    }

    /// Returns the primary context of an ordinal; retains it on first use.
    fn primary(&self, api: &DriverApi, ordinal: i32) -> Result<Opaque> {
        let id = self.device(api, ordinal)?;
        let slot = self
            .slot(ordinal)
            .ok_or(Error::driver(Call::DeviceGet, Code::INVALID_DEVICE))?;
        if let Some(context) = slot.context.get() {
            return Ok(*context as Opaque);
        }
        let _retaining = lock(&self.retaining);
        if let Some(context) = slot.context.get() {
            return Ok(*context as Opaque);
        }
        let mut context = ptr::null_mut();
        // SAFETY: `context` is a live pointer; `id` is a device; `release` releases the context retained here.
        unsafe { api.device_primary_ctx_retain(&mut context, id)? };
        if let Some(number) = number_of(api, context) {
            let _first = slot.number.set(number);
        }
        Ok(*slot.context.get_or_init(|| context as usize) as Opaque)
    }

    /// Retains the primary context of every device.
    pub(super) fn retain_all(&self, api: &DriverApi) -> Result<()> {
        (0..self.devices.len()).try_for_each(|ordinal| self.primary(api, ordinal as i32).map(drop))
    }

    /// Runs `work` with the primary context of `ordinal` current, and restores the caller's. A context that was destroyed is
    /// never used again.
    pub(super) fn with<T>(
        &self,
        api: &DriverApi,
        ordinal: i32,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if let Some(&source) = self.slot(ordinal).and_then(|slot| slot.destroyed.get()) {
            let device = ordinal;
            return Err(Error::ContextLost { device, source });
        }
        let context = self.primary(api, ordinal)?;
        let explain = |error| self.lost(api, error, ordinal);
        // The driver crashes where it is given a stream of a context that was reset.
        if self.is_gone(api, ordinal, context) {
            let code = Code::CONTEXT_IS_DESTROYED;
            return Err(explain(Error::driver(Call::DevicePrimaryCtxGetState, code)));
        }
        let _guard = Current::enter(api, context).map_err(explain)?;
        work().map_err(explain)
    }

    /// Converts the error if its code means that the device's context is lost, and notes that it was destroyed.
    fn lost(&self, api: &DriverApi, error: Error, device: i32) -> Error {
        let Error::Driver(source) = error else {
            return error;
        };
        let is_destroyed = match source.code {
            Code::CONTEXT_IS_DESTROYED => true,
            Code::INVALID_CONTEXT => {
                source.call == Call::CtxPushCurrent
                    || self
                        .primary(api, device)
                        .is_ok_and(|context| self.is_gone(api, device, context))
            }
            _ => false,
        };
        if is_destroyed && let Some(slot) = self.slot(device) {
            let _first = slot.destroyed.set(source);
        }
        match is_destroyed || source.code.loses_context() {
            true => Error::ContextLost { device, source },
            false => error,
        }
    }

    /// Returns whether the primary context of an ordinal exists in this process; `None` if the driver does not tell.
    fn is_active(&self, api: &DriverApi, ordinal: i32) -> Option<bool> {
        let (mut flags, mut active) = (0, 0);
        let id = self.device(api, ordinal).ok()?;
        // SAFETY: both are live integers.
        unsafe { api.device_primary_ctx_get_state(id, &mut flags, &mut active) }.ok()?;
        Some(active != 0)
    }

    /// Returns the first ordinal whose primary context exists in this process.
    pub(super) fn active(&self, api: &DriverApi) -> Option<i32> {
        let mut ordinals = 0..self.devices.len() as i32;
        ordinals.find(|&ordinal| self.is_active(api, ordinal) == Some(true))
    }

    /// Returns whether the driver says that a primary context, which is retained, does not exist or is another one by now.
    fn is_gone(&self, api: &DriverApi, ordinal: i32, context: Opaque) -> bool {
        if self.is_active(api, ordinal) == Some(false) {
            return true;
        }
        let known = self.slot(ordinal).and_then(|slot| slot.number.get());
        known.is_some_and(|known| number_of(api, context).is_some_and(|now| now != *known))
    }

    /// Runs `work`, which needs no particular context, in the caller's; in that of the first device that has one, or else
    /// of the first device, if the driver needs one and the caller has none.
    pub(super) fn anywhere<T>(
        &self,
        api: &DriverApi,
        mut work: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        match work() {
            Err(error) if error.code() == Some(Code::INVALID_CONTEXT) => {
                self.with(api, self.active(api).unwrap_or(0), work)
            }
            result => result,
        }
    }

    /// Releases the retained contexts.
    pub(super) fn release(&self, api: &DriverApi) {
        if self.process != std::process::id() {
            return;
        }
        for device in &self.devices {
            if let (Some(id), Some(_)) = (device.id.get(), device.context.get()) {
                // SAFETY: `primary` retained it once, and no code can use it through this value, which is
                // being dropped.
                let released = unsafe { api.device_primary_ctx_release(*id) };
                if let Err(error) = released {
                    tracing::debug!(%error, "a primary context was not released");
                }
            }
        }
    }
}

/// Returns the number of a retained context; `None` of drivers before 12.0.
fn number_of(api: &DriverApi, context: Opaque) -> Option<u64> {
    let mut number = 0;
    // SAFETY: `number` is a live integer; the primary context is retained.
    unsafe { api.ctx_get_id(context, &mut number) }.ok()?;
    Some(number)
}

/// Keeps a context current on this thread until dropped.
struct Current<'a> {
    /// `None`: it was current already.
    api: Option<&'a DriverApi>,
}

impl<'a> Current<'a> {
    fn enter(api: &'a DriverApi, context: Opaque) -> Result<Self> {
        let mut current = ptr::null_mut();
        // SAFETY: `current` is a live pointer.
        let known = unsafe { api.ctx_get_current(&mut current) }.is_ok();
        if known && current == context {
            return Ok(Self { api: None });
        }
        // SAFETY: the context is retained for as long as the backend, which `api` belongs to, lives.
        let pushed = unsafe { api.ctx_push_current(context) };
        if let Err(error) = pushed {
            // The call may report an error of earlier work although it has pushed the context.
            let mut after = ptr::null_mut();
            // SAFETY: as above.
            if known && unsafe { api.ctx_get_current(&mut after) }.is_ok() && after == context {
                drop(Self { api: Some(api) });
            }
            return Err(error);
        }
        Ok(Self { api: Some(api) })
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let Some(api) = self.api else { return };
        let mut popped = ptr::null_mut();
        // SAFETY: `popped` is a live pointer; this thread pushed in `enter`, and everything pushed since has
        // been popped.
        if let Err(error) = unsafe { api.ctx_pop_current(&mut popped) } {
            tracing::debug!(%error, "the context was not popped cleanly");
        }
    }
}
