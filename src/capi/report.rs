//! The capabilities of this machine, as JSON.

use std::ffi::c_char;

use egmem::capability::Capabilities;
use egmem::doctor::{InProcess, Report};

use crate::call::call;
use crate::{args, egm_driver, egm_status, text};

/// Tries the capabilities of this machine, and gives the report as JSON, as `egmem doctor --json` prints it: the
/// trials, the reasons for failures, and their remedies. Free the text by egm_string_free().
///
/// The trials run in this process and take milliseconds each: a driver that crashes in one ends the process. `egmem
/// doctor` runs each in a process of its own.
///
/// # Safety
/// `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_capabilities_json(
    driver: *const egm_driver,
    out: *mut *mut c_char,
) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let driver = unsafe { args::object(driver, "driver")? };
        let out = args::out(out, "out")?;
        let mut prober = InProcess(Capabilities::of(&driver.driver));
        let report = match &driver.machine {
            Some(machine) => Report::gather_simulated(&mut prober, machine),
            None => Report::gather(&mut prober),
        };
        // SAFETY: the caller's promise.
        unsafe { text::give_json(out, &report) }
    })
}
