//! Why a call failed, as C programs see it: its status, the calling thread's last error, and texts that belong to the caller.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};

use egmem::exchange::{Error as ExchangeError, Refusal};
use egmem::share::Error as ShareError;
use egmem::{Error, Explained, Language};
use serde::Serialize;

/// The result of a call: ::EGM_OK, or the reason for a failure. The values never change; later versions may add some.
///
/// egm_last_error_message() and egm_last_error_remedy() say more.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum egm_status {
    /// The call succeeded.
    EGM_OK = 0,
    /// An argument is invalid: a null pointer, a size of 0, a pointer that is no block, a string that is not UTF-8.
    EGM_INVALID_ARGUMENT = 1,
    /// A range extends beyond its memory.
    EGM_OUT_OF_RANGE = 2,
    /// There is no usable CUDA driver library.
    EGM_NO_DRIVER = 3,
    /// The driver is too old for the request.
    EGM_DRIVER_TOO_OLD = 4,
    /// A library, or a function in it, was not found.
    EGM_MISSING_LIBRARY = 5,
    /// A driver call failed; egm_last_error_cuda_code() returns its result.
    EGM_DRIVER_FAILED = 6,
    /// A GPU's context is lost to an earlier fault. Only a new process gets a new one.
    EGM_CONTEXT_LOST = 7,
    /// The machine, its GPU or its driver does not support the request.
    EGM_UNSUPPORTED = 8,
    /// There is no IMEX channel, so no fabric handles.
    EGM_NO_IMEX_CHANNEL = 9,
    /// The driver had no memory left.
    EGM_OUT_OF_MEMORY = 10,
    /// The request exceeds the free memory of its host nodes and was not passed to the driver.
    EGM_NODE_TOO_FULL = 11,
    /// A heap has no room and may not have more memory.
    EGM_HEAP_FULL = 12,
    /// The address space has no hole for a reservation.
    EGM_OUT_OF_ADDRESSES = 13,
    /// Exports, imports and CPU mappings of a memory are too many.
    EGM_TOO_MANY_REFERENCES = 14,
    /// A GPU's host node is unknown: choose one.
    EGM_NODE_UNKNOWN = 15,
    /// There is no such NUMA node.
    EGM_NO_SUCH_NODE = 16,
    /// There is no such GPU.
    EGM_NO_SUCH_GPU = 17,
    /// A GPU cannot access the memory of another one.
    EGM_NO_PEER_ACCESS = 18,
    /// A location lacks the access that the operation needs.
    EGM_NOT_ACCESSIBLE = 19,
    /// Bytes read back differ from the bytes written.
    EGM_WRONG_BYTES = 20,
    /// The operating system refused an operation.
    EGM_SYSTEM = 21,
    /// The machine's topology cannot be read.
    EGM_TOPOLOGY = 22,
    /// Something is to be given back but is still in use: a heap with blocks.
    EGM_STILL_HELD = 23,
    /// A heap in debug mode has found damage, or a ring a counter that cannot be.
    EGM_DAMAGED = 24,
    /// A probe in a child process died.
    EGM_PROBE_DIED = 25,
    /// A peer is not trusted, or does not trust this process.
    EGM_NOT_TRUSTED = 40,
    /// No connection to a peer was established.
    EGM_UNREACHABLE = 41,
    /// A connected peer has disconnected, fallen silent, or become unreachable.
    EGM_PEER_LOST = 42,
    /// A peer violated the protocol.
    EGM_PROTOCOL = 43,
    /// An operation did not finish in time.
    EGM_TIMED_OUT = 44,
    /// Handles would be sent unencrypted over a network.
    EGM_INSECURE = 60,
    /// Certificates, keys or their files cannot be used, or only one end of a connection uses TLS.
    EGM_TLS = 61,
    /// A server understood a request and refused it.
    EGM_REFUSED = 62,
    /// Memory under a name is not as requested.
    EGM_MISMATCHED = 63,
    /// Handles or leases belong to an earlier run of their exporter.
    EGM_STALE = 64,
    /// Memory that a peer shares cannot be imported here.
    EGM_IMPORT_FAILED = 65,
    /// Memory is imported, but the two ends do not see the same bytes.
    EGM_DATA_PLANE = 66,
    /// No handle type works for all participants.
    EGM_NO_COMMON_HANDLE = 67,
    /// A limit of this process is reached.
    EGM_LIMIT_REACHED = 68,
    /// The directory cannot look a name up.
    EGM_DIRECTORY = 69,
    /// Another failure, which this version has no status for.
    EGM_OTHER = 254,
    /// A defect of the library. Please report it with the message.
    EGM_INTERNAL = 255,
}

use egm_status::*;

impl From<&Error> for egm_status {
    fn from(error: &Error) -> Self {
        match error {
            Error::NoDriver { .. } => EGM_NO_DRIVER,
            Error::DriverTooOld { .. } => EGM_DRIVER_TOO_OLD,
            Error::MissingLibrary { .. } | Error::MissingSymbol { .. } => EGM_MISSING_LIBRARY,
            Error::Driver(_) => EGM_DRIVER_FAILED,
            Error::NoImexChannel { .. } => EGM_NO_IMEX_CHANNEL,
            Error::PlatformUnsupported { .. } => EGM_UNSUPPORTED,
            Error::TooManyReferences { .. } => EGM_TOO_MANY_REFERENCES,
            Error::OutOfMemory { .. } | Error::TooManyMappings { .. } => EGM_OUT_OF_MEMORY,
            Error::NodeTooFull { .. } | Error::NodesTooFull { .. } => EGM_NODE_TOO_FULL,
            Error::NodeUnknown { .. } => EGM_NODE_UNKNOWN,
            Error::NoSuchNode { .. } => EGM_NO_SUCH_NODE,
            Error::NoSuchGpu { .. } => EGM_NO_SUCH_GPU,
            Error::NoPeerAccess { .. } => EGM_NO_PEER_ACCESS,
            Error::InvalidArgument { .. } => EGM_INVALID_ARGUMENT,
            Error::OutOfRange { .. } => EGM_OUT_OF_RANGE,
            Error::NotAccessible { .. } => EGM_NOT_ACCESSIBLE,
            Error::ContextLost { .. } => EGM_CONTEXT_LOST,
            Error::WrongBytes { .. } => EGM_WRONG_BYTES,
            Error::ProbeDied { .. } => EGM_PROBE_DIED,
            Error::System { .. } => EGM_SYSTEM,
            Error::Topology { .. } => EGM_TOPOLOGY,
            Error::StillHeld { .. } => EGM_STILL_HELD,
            Error::HeapDamaged { .. } | Error::CursorDamaged { .. } => EGM_DAMAGED,
            Error::HeapFull { .. } => EGM_HEAP_FULL,
            Error::OutOfAddresses { .. } => EGM_OUT_OF_ADDRESSES,
            _ => EGM_OTHER,
        }
    }
}

impl From<&ShareError> for egm_status {
    fn from(error: &ShareError) -> Self {
        match error {
            ShareError::Memory(error) => error.into(),
            ShareError::NotTrusted { .. } => EGM_NOT_TRUSTED,
            ShareError::Unreachable { .. } => EGM_UNREACHABLE,
            ShareError::PeerLost { .. } => EGM_PEER_LOST,
            ShareError::Protocol { .. } => EGM_PROTOCOL,
            ShareError::TimedOut { .. } => EGM_TIMED_OUT,
            _ => EGM_OTHER,
        }
    }
}

impl From<&ExchangeError> for egm_status {
    fn from(error: &ExchangeError) -> Self {
        match error {
            ExchangeError::Share(error) => error.into(),
            ExchangeError::Insecure { .. } => EGM_INSECURE,
            ExchangeError::Tls { .. } | ExchangeError::TlsAtOneEnd { .. } => EGM_TLS,
            // Memory that is still held at the end of a delete.
            ExchangeError::Refused {
                reason: Refusal::TimedOut,
                ..
            }
            | ExchangeError::RanksMissing { .. } => EGM_TIMED_OUT,
            ExchangeError::Refused { .. } => EGM_REFUSED,
            ExchangeError::Forged { .. } => EGM_NOT_TRUSTED,
            ExchangeError::Mismatched { .. } => EGM_MISMATCHED,
            ExchangeError::Stale { .. } => EGM_STALE,
            ExchangeError::Import { .. } => EGM_IMPORT_FAILED,
            ExchangeError::DataPlane { .. } => EGM_DATA_PLANE,
            ExchangeError::NoCommonHandle { .. } => EGM_NO_COMMON_HANDLE,
            ExchangeError::LimitReached { .. } => EGM_LIMIT_REACHED,
            ExchangeError::Directory { .. } => EGM_DIRECTORY,
            _ => EGM_OTHER,
        }
    }
}

/// Pairs each status with its name, which ends with a zero byte.
macro_rules! names {
    ($($status:ident)*) => {
        &[$(($status, concat!(stringify!($status), "\0"))),*]
    };
}

const NAMES: &[(egm_status, &str)] = names! {
    EGM_OK EGM_INVALID_ARGUMENT EGM_OUT_OF_RANGE EGM_NO_DRIVER EGM_DRIVER_TOO_OLD EGM_MISSING_LIBRARY
    EGM_DRIVER_FAILED EGM_CONTEXT_LOST EGM_UNSUPPORTED EGM_NO_IMEX_CHANNEL EGM_OUT_OF_MEMORY EGM_NODE_TOO_FULL
    EGM_HEAP_FULL EGM_OUT_OF_ADDRESSES EGM_TOO_MANY_REFERENCES EGM_NODE_UNKNOWN EGM_NO_SUCH_NODE EGM_NO_SUCH_GPU
    EGM_NO_PEER_ACCESS EGM_NOT_ACCESSIBLE EGM_WRONG_BYTES EGM_SYSTEM EGM_TOPOLOGY EGM_STILL_HELD EGM_DAMAGED
    EGM_PROBE_DIED EGM_NOT_TRUSTED EGM_UNREACHABLE EGM_PEER_LOST EGM_PROTOCOL EGM_TIMED_OUT EGM_INSECURE EGM_TLS
    EGM_REFUSED EGM_MISMATCHED EGM_STALE EGM_IMPORT_FAILED EGM_DATA_PLANE EGM_NO_COMMON_HANDLE EGM_LIMIT_REACHED
    EGM_DIRECTORY EGM_OTHER EGM_INTERNAL
};

/// Returns the name of a status, such as "EGM_HEAP_FULL"; "EGM_OTHER" for a value that this version does not know.
///
/// The text is valid for ever. Any thread may call this.
#[unsafe(no_mangle)]
pub extern "C" fn egm_status_name(status: i32) -> *const c_char {
    let known = NAMES.iter().find(|(known, _)| *known as i32 == status);
    known
        .map_or("EGM_OTHER\0", |(_, name)| name)
        .as_ptr()
        .cast()
}

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

impl<E: Into<ExchangeError>> From<E> for Failure {
    #[cold]
    fn from(error: E) -> Self {
        let error = error.into();
        let (told, call) = (Explained(&error), error.driver_error());
        let code = call.map_or(0, |call| call.code.0);
        let remedy = told.remedy_in(Language::C);
        Self::new((&error).into(), told.message(), &remedy, code)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_of_the_header_has_a_name() {
        let header = include_str!("include/egmem.h");
        let (_, after) = header.split_once("enum egm_status").unwrap();
        let (statuses, _) = after.split_once('}').unwrap();
        let lines = statuses.lines().map(str::trim);
        let declared = lines.filter_map(|line| line.strip_prefix("EGM_")?.split_once(" = "));
        let names = NAMES.iter().map(|(_, name)| *name);
        assert!(declared.map(|(name, _)| format!("EGM_{name}\0")).eq(names));
    }

    #[test]
    fn every_status_has_its_own_name_and_number() {
        for (index, (status, name)) in NAMES.iter().enumerate() {
            assert_eq!(*name, format!("{status:?}\0"));
            for (other, _) in &NAMES[..index] {
                assert!((*other as i32) < *status as i32);
            }
        }
    }

    #[test]
    fn an_error_of_each_layer_has_the_status_of_the_memorys_error_in_it() {
        let memory = Error::invalid("size", "0");
        let share = ShareError::from(memory.clone());
        let exchange = ExchangeError::from(share.clone());
        for status in [(&memory).into(), (&share).into(), (&exchange).into()] {
            assert_eq!(EGM_INVALID_ARGUMENT, status);
        }
        let late = ShareError::timed_out("a call", std::time::Duration::from_secs(1));
        assert_eq!(EGM_TIMED_OUT, (&late).into());
        assert_eq!(EGM_TIMED_OUT, (&ExchangeError::from(late)).into());
    }
}
