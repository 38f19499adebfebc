//! Texts that belong to the caller.

use std::ffi::{CString, c_char};
use std::ptr::NonNull;

use serde::Serialize;

use crate::call::call;
use crate::failure::{Failure, Outcome};
use crate::{egm_status, last_error};

/// Gives a text to the caller.
///
/// # Safety
/// `out` may be written.
pub(crate) unsafe fn give(out: NonNull<*mut c_char>, value: String) {
    // SAFETY: the caller's promise.
    unsafe { out.write(last_error::text(value).into_raw()) };
}

/// Gives a value to the caller as JSON.
///
/// # Safety
/// `out` may be written.
pub(crate) unsafe fn give_json(out: NonNull<*mut c_char>, value: &impl Serialize) -> Outcome {
    let json = serde_json::to_string(value).map_err(|error| {
        Failure::invalid("value", format!("it cannot be written as JSON: {error}"))
    })?;
    // SAFETY: the caller's promise.
    unsafe { give(out, json) };
    Ok(())
}

/// Frees a text that a call has given to the caller. A null pointer is left alone.
///
/// # Safety
/// `text` is null, or such a text that was not freed yet. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_string_free(text: *mut c_char) -> egm_status {
    call(|| {
        if !text.is_null() {
            // SAFETY: `give` made it, and the caller promises that this is its last use.
            drop(unsafe { CString::from_raw(text) });
        }
        Ok(())
    })
}
