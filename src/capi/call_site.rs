//! The line of the program that allocates, for the ledger: `EGMEM_PS=1` and `EGMEM_LEAKS=1` show it.

use std::cell::Cell;
use std::ffi::{CStr, c_char};
use std::ptr;

use egmem::ledger::{CallSite, called_from};

use crate::call::call;
use crate::egm_status;
use crate::failure::Outcome;

/// A line as the program gave it.
#[derive(Clone, Copy)]
struct Given {
    file: *const c_char,
    line: u32,
    function: *const c_char,
}

const NONE: Given = Given {
    file: ptr::null(),
    line: 0,
    function: ptr::null(),
};

thread_local! {
    /// The line of the thread's next call that allocates.
    static NEXT: Cell<Given> = const { Cell::new(NONE) };
}

/// Tells the ledger the line of the program that the thread's next call has: one of egm_buffer_create(),
/// egm_buffer_near(), egm_heap_create(), egm_pool_alloc(), egm_channel_receive(), egm_client_fetch(),
/// egm_group_gather(), egm_ring_create(), egm_ring_receive(). In C, the macros at the end of this header call it, and in C++ egmem.hpp does; a binding of another
/// language calls it itself.
/// `function` may be null. A null `file` takes the line back.
///
/// # Safety
/// `file` and `function` are null or end with a zero byte, and stay valid until that call returns. Any thread may call
/// this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_call_site(file: *const c_char, line: u32, function: *const c_char) {
    NEXT.set(Given {
        file,
        line,
        function,
    });
}

/// As [`call`], for a function that makes entries of the ledger: they have the line that was given, or none.
pub(crate) fn call_that_allocates(body: impl FnOnce() -> Outcome) -> egm_status {
    let given = NEXT.replace(NONE);
    // SAFETY: the promise of the caller of `egm_call_site`.
    let site = unsafe { text(given.file) }.map(|file| {
        let site = CallSite::new(file, given.line);
        // SAFETY: as above.
        match unsafe { text(given.function) } {
            Some(function) => site.function(function),
            None => site,
        }
    });
    call(|| called_from(site, body))
}

/// # Safety
/// `text` is null or ends with a zero byte.
unsafe fn text(text: *const c_char) -> Option<String> {
    // SAFETY: the caller's promise.
    let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) });
    text.map(|text| text.to_string_lossy().into_owned())
}
