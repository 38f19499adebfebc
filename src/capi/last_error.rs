//! The calling thread's last error.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

use crate::egm_status;
use crate::failure::{Failure, Reason};

/// The texts of the last failed call.
struct LastError {
    message: CString,
    remedy: CString,
    cuda_code: i32,
}

thread_local! {
    static LAST: RefCell<Option<LastError>> = const { RefCell::new(None) };
}

/// Keeps a failure for the calling thread, and returns its status.
#[cold]
pub(crate) fn set(failure: Failure) -> egm_status {
    let Reason {
        status,
        message,
        remedy,
        cuda_code,
    } = *failure.0;
    let last = LastError {
        message: text(message),
        remedy: text(remedy.into_owned()),
        cuda_code,
    };
    // While the thread ends there is no place for it.
    let _ = LAST.try_with(|cell| cell.replace(Some(last)));
    status
}

/// Returns a text without the bytes that C strings cannot have.
pub(crate) fn text(text: String) -> CString {
    let mut bytes = text.into_bytes();
    bytes.retain(|&byte| byte != 0);
    CString::new(bytes).unwrap_or_default()
}

fn last(part: impl FnOnce(&LastError) -> *const c_char) -> *const c_char {
    let found = LAST.try_with(|cell| cell.borrow().as_ref().map(part));
    found.ok().flatten().unwrap_or(c"".as_ptr())
}

/// Returns the message of the calling thread's last failed call, with its cause: one line without a full stop. ""
/// before the first failure.
///
/// A call that succeeds changes nothing. The text is valid until the next call of the thread that fails, and until
/// the thread ends. Never null.
#[unsafe(no_mangle)]
pub extern "C" fn egm_last_error_message() -> *const c_char {
    last(|last| last.message.as_ptr())
}

/// Returns the remedy for the calling thread's last failed call, or "" where the message says what is valid, as for most
/// arguments. Valid as long as egm_last_error_message()'s text. Never null.
#[unsafe(no_mangle)]
pub extern "C" fn egm_last_error_remedy() -> *const c_char {
    last(|last| last.remedy.as_ptr())
}

/// Returns the result (`CUresult`) of the driver call behind the calling thread's last failed call, or 0 if there was
/// none.
#[unsafe(no_mangle)]
pub extern "C" fn egm_last_error_cuda_code() -> i32 {
    let found = LAST.try_with(|cell| cell.borrow().as_ref().map(|last| last.cuda_code));
    found.ok().flatten().unwrap_or(0)
}
