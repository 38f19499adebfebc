//! Checks the arguments of calls.

use std::ffi::{CStr, c_char};
use std::ptr::NonNull;
use std::time::Duration;

use crate::failure::{Failure, Outcome};

/// Borrows a handle's object.
///
/// # Safety
/// `handle` is null, or a handle of this library that is not destroyed while `'a` lasts.
#[inline]
pub(crate) unsafe fn object<'a, T>(handle: *const T, what: &'static str) -> Outcome<&'a T> {
    // SAFETY: the caller's promise.
    unsafe { handle.as_ref() }.ok_or_else(|| null(what))
}

/// Borrows a handle's object for a call that changes it.
///
/// # Safety
/// As [`object`]; no other thread uses the handle meanwhile.
pub(crate) unsafe fn object_mut<'a, T>(handle: *mut T, what: &'static str) -> Outcome<&'a mut T> {
    // SAFETY: the caller's promise.
    unsafe { handle.as_mut() }.ok_or_else(|| null(what))
}

/// Checks where a result goes. Results are written on success only.
#[inline]
pub(crate) fn out<T>(out: *mut T, what: &'static str) -> Outcome<NonNull<T>> {
    NonNull::new(out).ok_or_else(|| null(what))
}

#[cold]
fn null(what: &'static str) -> Failure {
    Failure::invalid(what, "it is a null pointer")
}

/// Gives a new object to the caller, which must destroy it.
///
/// # Safety
/// `out` may be written.
pub(crate) unsafe fn give<T>(out: NonNull<*mut T>, object: T) {
    // SAFETY: the caller's promise.
    unsafe { out.write(Box::into_raw(Box::new(object))) }
}

/// Takes an object back from the caller; `None` for a null pointer.
///
/// # Safety
/// `handle` is null, or a handle of this library that is not destroyed and is never used again.
pub(crate) unsafe fn take<T>(handle: *mut T) -> Option<Box<T>> {
    // SAFETY: `give` made it from a box, and the caller promises that this is its last use.
    (!handle.is_null()).then(|| unsafe { Box::from_raw(handle) })
}

/// Reads a string.
///
/// # Safety
/// `text` is null or ends with a zero byte, and does not change while `'a` lasts.
pub(crate) unsafe fn text<'a>(text: *const c_char, what: &'static str) -> Outcome<&'a str> {
    // SAFETY: the caller's promise.
    unsafe { optional_text(text, what)? }.ok_or_else(|| null(what))
}

/// As [`text`], but a null pointer is `None`.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn optional_text<'a>(
    text: *const c_char,
    what: &'static str,
) -> Outcome<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise; not null.
    let text = unsafe { CStr::from_ptr(text) };
    let text = text
        .to_str()
        .map_err(|_| Failure::invalid(what, "it is not UTF-8"))?;
    Ok(Some(text))
}

/// Reads how long a call may take.
pub(crate) fn milliseconds(timeout_ms: u64) -> Outcome<Duration> {
    match timeout_ms {
        0 => Err(Failure::invalid("timeout_ms", "it is 0; valid: 1 or more")),
        some => Ok(Duration::from_millis(some)),
    }
}

/// Borrows `count` values of an array; none at all may be at a null pointer.
///
/// # Safety
/// `first` is null or points to `count` values that do not change while `'a` lasts.
pub(crate) unsafe fn values<'a, T>(
    first: *const T,
    count: usize,
    what: &'static str,
) -> Outcome<&'a [T]> {
    check_array::<T>(first.is_null(), count, what)?;
    match count {
        0 => Ok(&[]),
        // SAFETY: not null, no larger than an allocation can be; the rest is the caller's promise.
        _ => Ok(unsafe { std::slice::from_raw_parts(first, count) }),
    }
}

/// As [`values`], to be written.
///
/// # Safety
/// As [`values`]; nothing else uses them meanwhile, and they are initialised.
pub(crate) unsafe fn values_mut<'a, T>(
    first: *mut T,
    count: usize,
    what: &'static str,
) -> Outcome<&'a mut [T]> {
    check_array::<T>(first.is_null(), count, what)?;
    match count {
        0 => Ok(&mut []),
        // SAFETY: as in `values`.
        _ => Ok(unsafe { std::slice::from_raw_parts_mut(first, count) }),
    }
}

fn check_array<T>(is_null: bool, count: usize, what: &'static str) -> Outcome {
    if is_null && count > 0 {
        return Err(null(what));
    }
    match count.checked_mul(size_of::<T>()) {
        Some(bytes) if bytes <= isize::MAX as usize => Ok(()),
        _ => {
            let why = format!("{count} values are more than an address space has");
            Err(Failure::invalid(what, why))
        }
    }
}
