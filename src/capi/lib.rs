//! egmem for C and C++. The header `include/egmem.h` has the documentation of each function for C programs; docs/c.md
//! is the guide.
//!
//! Each function checks its arguments, does one thing through the crate `egmem`, and returns an [`egm_status`]. A
//! panic does not leave the library: it becomes [`EGM_INTERNAL`](egm_status::EGM_INTERNAL). This file is that boundary: every
//! function's body runs in `call`. A function that allocates takes the line of the program that calls it, for the ledger:
//! `EGMEM_PS=1` and `EGMEM_LEAKS=1` show it.
//!
//! Handles and places for results are nullable references, `Option<&T>`: C programs pass pointers that are null or as each
//! function's contract says. So bodies need unsafe code only for texts, arrays, options, blocks, and the places of several
//! results, which a program may confuse: those are pointers.
//!
//! Rust programs use the crate `egmem` instead.
#![deny(missing_docs)]
#![allow(
    non_camel_case_types,
    reason = "these are the names of the C interface"
)]

mod args;
mod blocks;
mod buffer;
mod channel;
mod client;
mod driver;
mod failure;
mod group;
mod heap;
mod options;
mod ring;
mod stream;

pub use args::*;
pub use buffer::*;
pub use channel::*;
pub use client::*;
pub use driver::*;
pub use failure::*;
pub use group::*;
pub use heap::*;
pub use options::*;
pub use ring::*;
pub use stream::*;

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use egmem::ledger::{CallSite, called_from};

use args::{handle, object};
use failure::{Failure, Outcome, keep};

/// The major version of this interface in the upper 16 bits, the minor one in the lower. A program that was built for
/// a version runs with a library of the same major version and the same or a higher minor version. These are not the
/// library's numbers: a new soname has a new major version.
pub const EGM_ABI_VERSION: u32 = 1;

/// Returns ::EGM_ABI_VERSION of the library that runs. Any thread may call this.
#[unsafe(no_mangle)]
pub extern "C" fn egm_abi_version() -> u32 {
    EGM_ABI_VERSION
}

/// Returns the library's version, such as "0.1.0". The text is valid for ever. Any thread may call this.
#[unsafe(no_mangle)]
pub extern "C" fn egm_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Runs a function's body and returns its status. Keeps a failure for the thread, and a panic as a failure.
///
/// A body that panics leaves its objects as the crate `egmem` leaves them: usable, since its locks are taken again
/// after a panic, or leaked.
#[inline]
pub(crate) fn call(body: impl FnOnce() -> Outcome) -> egm_status {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => egm_status::EGM_OK,
        Ok(Err(failure)) => keep(failure),
        Err(payload) => keep(Failure::panicked(&*payload)),
    }
}

/// Runs a function that makes something and writes it to `out`, on success only.
#[inline]
pub(crate) fn answer<A>(
    out: Option<&mut MaybeUninit<A>>,
    make: impl FnOnce() -> Outcome<A>,
) -> egm_status {
    call(|| {
        object(out, "out")?.write(make()?);
        Ok(())
    })
}

/// Runs a function of one object.
#[inline]
pub(crate) fn on<T>(reference: Option<T>, body: impl FnOnce(T) -> Outcome) -> egm_status {
    call(|| body(handle(reference)?))
}

/// Runs a function that asks an object and writes the answer, on success only.
#[inline]
pub(crate) fn ask<T, A>(
    reference: Option<&T>,
    out: Option<&mut MaybeUninit<A>>,
    body: impl FnOnce(&T) -> Outcome<A>,
) -> egm_status {
    answer(out, || body(handle(reference)?))
}

/// Runs a function that makes an object by another one and gives it to the caller, which must destroy it.
pub(crate) fn make<T, M>(
    reference: Option<&T>,
    out: Option<&mut MaybeUninit<*mut M>>,
    body: impl FnOnce(&T) -> Outcome<M>,
) -> egm_status {
    ask(reference, out, |object| body(object).map(args::given))
}

/// Runs a function that takes an object back from the caller and drops it. A null pointer is left alone.
///
/// # Safety
/// As [`args::take`].
pub(crate) unsafe fn destroy<T>(handle: *mut T) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        drop(unsafe { args::take(handle) });
        Ok(())
    })
}

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

/// Runs a call that makes entries of the ledger: they have the line that was given, or none.
pub(crate) fn noted(call: impl FnOnce() -> egm_status) -> egm_status {
    let given = NEXT.replace(NONE);
    // SAFETY: the promise of the caller of `egm_call_site`.
    let site = unsafe { copied(given.file) }.map(|file| {
        let site = CallSite::new(file, given.line);
        // SAFETY: as above.
        match unsafe { copied(given.function) } {
            Some(function) => site.function(function),
            None => site,
        }
    });
    called_from(site, call)
}

/// # Safety
/// `text` is null or ends with a zero byte.
unsafe fn copied(text: *const c_char) -> Option<String> {
    // SAFETY: the caller's promise.
    let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) });
    text.map(|text| text.to_string_lossy().into_owned())
}

/// Frees a text that a call has given to the caller. A null pointer is left alone.
///
/// # Safety
/// `text` is null, or such a text that was not freed yet. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_string_free(text: *mut c_char) -> egm_status {
    call(|| {
        if !text.is_null() {
            // SAFETY: `given_text` made it, and the caller promises that this is its last use.
            drop(unsafe { CString::from_raw(text) });
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_status_with_its_message() {
        let status = call(|| panic!("number {}", 7));
        assert_eq!(status, egm_status::EGM_INTERNAL);
        // SAFETY: valid until the thread's next failed call.
        let (message, remedy) = unsafe {
            (
                CStr::from_ptr(egm_last_error_message()),
                CStr::from_ptr(egm_last_error_remedy()),
            )
        };
        let message = message.to_str().unwrap();
        assert!(message.ends_with("number 7"), "{message}");
        assert!(!remedy.is_empty());
    }

    #[test]
    fn a_call_that_succeeds_keeps_the_last_error() {
        assert_eq!(
            egm_status::EGM_INVALID_ARGUMENT,
            call(|| Err(Failure::invalid("it", "that is why")))
        );
        assert_eq!(egm_status::EGM_OK, call(|| Ok(())));
        // SAFETY: valid until the thread's next failed call.
        let message = unsafe { CStr::from_ptr(egm_last_error_message()) };
        assert!(
            message.to_str().unwrap().contains("that is why"),
            "{message:?}"
        );
    }
}
