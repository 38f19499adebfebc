//! Why a call failed, as C programs see it, the calling thread's last error, and texts that belong to the caller.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};

use egmem::exchange::Error as ExchangeError;
use egmem::share::Error as ShareError;
use egmem::{DriverError, Error, Explain, Explained, Language};
use serde::Serialize;

use crate::egm_status;

/// A failed call: its status, and the texts for the thread's last error. On the heap, so that results stay small.
#[derive(Debug)]
pub(crate) struct Failure(pub(crate) Box<Reason>);

/// The status, message and remedy of a [`Failure`], and the driver's result.
#[derive(Debug)]
pub(crate) struct Reason {
    status: egm_status,
    pub(crate) message: CString,
    remedy: CString,
    /// The result of the failed driver call, 0 without one.
    cuda_code: i32,
}

/// The result of the body of a call.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    fn new(status: egm_status, message: String, remedy: &str, cuda_code: i32) -> Self {
        Self(Box::new(Reason {
            status,
            message: c_string(message),
            remedy: c_string(remedy.into()),
            cuda_code,
        }))
    }

    fn of<E: Explain>(status: egm_status, error: &E, call: Option<DriverError>) -> Self {
        let told = Explained(error);
        let code = call.map_or(0, |call| call.code.0);
        Self::new(status, told.message(), &told.remedy_in(Language::C), code)
    }

    /// Replaces the remedy by one that fits the call better.
    pub(crate) fn with_remedy(mut self, remedy: &'static str) -> Self {
        self.0.remedy = c_string(remedy.into());
        self
    }

    /// Returns the failure of a call with an invalid argument. The message says what is valid.
    #[cold]
    pub(crate) fn invalid(what: &'static str, why: impl Into<String>) -> Self {
        Error::invalid(what, why).into()
    }

    /// Returns the failure of a call that panicked.
    #[cold]
    pub(crate) fn panicked(payload: &(dyn Any + Send)) -> Self {
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        let text = text.unwrap_or("no reason was given");
        Self::new(
            egm_status::EGM_INTERNAL,
            format!("the library has a defect: {text}"),
            "report this message, and end the process soon: the objects of the call may be unusable",
            0,
        )
    }
}

impl From<Error> for Failure {
    #[cold]
    fn from(error: Error) -> Self {
        Self::of((&error).into(), &error, error.driver_error())
    }
}

impl From<ShareError> for Failure {
    #[cold]
    fn from(error: ShareError) -> Self {
        Self::of((&error).into(), &error, error.driver_error())
    }
}

impl From<ExchangeError> for Failure {
    #[cold]
    fn from(error: ExchangeError) -> Self {
        Self::of((&error).into(), &error, error.driver_error())
    }
}

thread_local! {
    static LAST: RefCell<Option<Failure>> = const { RefCell::new(None) };
}

/// Keeps a failure for the calling thread, and returns its status.
#[cold]
pub(crate) fn keep(failure: Failure) -> egm_status {
    let status = failure.0.status;
    // While the thread ends there is no place for it.
    let _ = LAST.try_with(|cell| cell.replace(Some(failure)));
    status
}

/// Returns a text without the bytes that C strings cannot have.
fn c_string(text: String) -> CString {
    let mut bytes = text.into_bytes();
    bytes.retain(|&byte| byte != 0);
    CString::new(bytes).unwrap_or_default()
}

fn last<T>(none: T, part: impl FnOnce(&Reason) -> T) -> T {
    let found = LAST.try_with(|cell| cell.borrow().as_ref().map(|last| part(&last.0)));
    found.ok().flatten().unwrap_or(none)
}

/// Returns the message of the calling thread's last failed call, with its cause: one line without a full stop. ""
/// before the first failure.
///
/// A call that succeeds changes nothing. The text is valid until the next call of the thread that fails, and until
/// the thread ends. Never null.
#[unsafe(no_mangle)]
pub extern "C" fn egm_last_error_message() -> *const c_char {
    last(c"".as_ptr(), |last| last.message.as_ptr())
}

/// Returns the remedy for the calling thread's last failed call, or "" where the message says what is valid, as for most
/// arguments. Valid as long as egm_last_error_message()'s text. Never null.
#[unsafe(no_mangle)]
pub extern "C" fn egm_last_error_remedy() -> *const c_char {
    last(c"".as_ptr(), |last| last.remedy.as_ptr())
}

/// Returns the result (`CUresult`) of the driver call behind the calling thread's last failed call, or 0 if there was
/// none.
#[unsafe(no_mangle)]
pub extern "C" fn egm_last_error_cuda_code() -> i32 {
    last(0, |last| last.cuda_code)
}

/// Returns a text as one of the caller's, which must free it.
pub(crate) fn given_text(value: String) -> *mut c_char {
    c_string(value).into_raw()
}

/// Returns a value as JSON, a text of the caller's.
pub(crate) fn given_json(value: &impl Serialize) -> Outcome<*mut c_char> {
    let fault = |error| Failure::invalid("value", format!("it cannot be written as JSON: {error}"));
    Ok(given_text(serde_json::to_string(value).map_err(fault)?))
}
