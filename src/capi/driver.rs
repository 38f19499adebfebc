//! Drivers.

use std::ffi::c_char;

use egmem::{Driver, Machine};

use crate::call::{ask, call};
use crate::failure::{Failure, Outcome};
use crate::{args, egm_status};

/// A driver: CUDA's, or a simulated one. Everything that was made from it keeps it alive, so it may be destroyed
/// before them. Any thread may use it, several at a time.
pub struct egm_driver {
    pub(crate) driver: Driver,
    /// The machine that is simulated.
    pub(crate) machine: Option<Machine>,
}

/// Opens the CUDA driver of this machine and initialises it. No library of CUDA is needed to build a program.
///
/// Fails with ::EGM_NO_DRIVER without a usable libcuda.so.1, ::EGM_DRIVER_TOO_OLD before CUDA 12.2,
/// ::EGM_DRIVER_FAILED.
///
/// # Safety
/// `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_driver_open(out: *mut *mut egm_driver) -> egm_status {
    call(|| {
        let out = args::out(out, "out")?;
        let driver = Driver::open()?;
        let machine = None;
        // SAFETY: the caller's promise.
        unsafe { args::give(out, egm_driver { driver, machine }) };
        Ok(())
    })
}

/// Makes a driver that simulates a machine: "gh200", "gh200x4", "gb200", "h200x8", or a description as JSON, which
/// begins with a brace. Its memory is ordinary memory of this process; it needs no GPU.
///
/// Fails with ::EGM_INVALID_ARGUMENT for another name and for a wrong description.
///
/// # Safety
/// `machine` is null or a string; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_driver_simulated(
    machine: *const c_char,
    out: *mut *mut egm_driver,
) -> egm_status {
    call(|| {
        let out = args::out(out, "out")?;
        // SAFETY: the caller's promise.
        let machine = read_machine(unsafe { args::text(machine, "machine")? })?;
        let driver = Driver::simulated(machine.clone())?;
        let machine = Some(machine);
        // SAFETY: the caller's promise.
        unsafe { args::give(out, egm_driver { driver, machine }) };
        Ok(())
    })
}

fn read_machine(text: &str) -> Outcome<Machine> {
    match text.trim_start().starts_with('{') {
        true => serde_json::from_str(text)
            .map_err(|error| Failure::invalid("machine description", error.to_string())),
        false => Ok(Machine::preset(text)?),
    }
}

/// Tells whether the machine is simulated: times measured on it mean nothing.
///
/// # Safety
/// `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_driver_is_simulated(
    driver: *const egm_driver,
    out: *mut bool,
) -> egm_status {
    let answer = |driver: &egm_driver| Ok(driver.driver.is_simulated());
    // SAFETY: the caller's promise.
    unsafe { ask(driver, "driver", out, answer) }
}

/// Destroys a driver. Objects that were made from it stay usable. A null pointer is left alone.
///
/// # Safety
/// `driver` is null, or a driver that no thread uses during the call or afterwards: not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_driver_destroy(driver: *mut egm_driver) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        drop(unsafe { args::take(driver) });
        Ok(())
    })
}

/// Makes an object by a driver and gives it to the caller, which must destroy it.
///
/// # Safety
/// `driver` is null or a driver; `out` is null or may be written.
pub(crate) unsafe fn create<T>(
    driver: *const egm_driver,
    out: *mut *mut T,
    make: impl FnOnce(&Driver) -> Outcome<T>,
) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let driver = unsafe { args::object(driver, "driver")? };
        let out = args::out(out, "out")?;
        let made = make(&driver.driver)?;
        // SAFETY: the caller's promise.
        unsafe { args::give(out, made) };
        Ok(())
    })
}
