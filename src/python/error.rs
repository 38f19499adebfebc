//! Errors as Python's exceptions, whose classes are in `egmem/_errors.py`.

use std::ffi::CString;

use egmem::driver::Code;
use egmem::exchange::Refusal;
use egmem::{DriverError, Explain, Explained, Language};
use pyo3::PyTypeInfo;
use pyo3::exceptions::{PyAttributeError, PyImportError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyModule;

use crate::interpreter::python;

/// The classes' module, which imports nothing of this crate.
fn classes(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    static CLASSES: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = CLASSES.get_or_try_init(py, || py.import("egmem._errors").map(Bound::unbind))?;
    Ok(module.bind(py))
}

/// Creates an exception of the class `class`, with its remedy: a `RuntimeError` late in the interpreter's shutdown, which
/// has no modules and attaches no thread.
pub fn raise(class: &str, message: &str, remedy: &str) -> PyErr {
    with_code(class, message, remedy, None)
}

fn with_code(class: &str, message: &str, remedy: &str, code: Option<i32>) -> PyErr {
    let text = || match remedy {
        "" => message.to_owned(),
        _ => format!("{message}; what to do: {remedy}"),
    };
    let made = Python::try_attach(|py| {
        let class = classes(py).and_then(|classes| classes.getattr(class));
        let arguments = (message, remedy, code);
        let made = class.and_then(|class| python(py, || class.call1(arguments)));
        match made {
            Ok(exception) => Some(PyErr::from_value(exception)),
            Err(error) if is_missing(py, &error) => None,
            Err(error) => Some(error),
        }
    });
    // An exception that is made later, by a thread that is attached.
    made.flatten()
        .unwrap_or_else(|| PyRuntimeError::new_err(text()))
}

/// Returns whether an error says that a module or a class is not there.
fn is_missing(py: Python<'_>, error: &PyErr) -> bool {
    error.is_instance_of::<PyImportError>(py) || error.is_instance_of::<PyAttributeError>(py)
}

/// Creates an exception about a request that this memory or driver does not support.
pub fn not_supported(message: &str, remedy: &str) -> PyErr {
    raise("NotSupported", message, remedy)
}

/// Creates an exception about an argument. The message says what is valid.
pub fn invalid(message: &str) -> PyErr {
    raise("InvalidArgument", message, "")
}

/// Shows a warning. The caller has no lock.
///
/// # Errors
/// The warning, where the program has warnings raised.
pub fn warn<C: PyTypeInfo>(py: Python<'_>, text: &str) -> PyResult<()> {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    python(py, || PyErr::warn(py, &py.get_type::<C>(), &text, 1))
}

/// Creates an exception about memory that still has views.
pub fn in_use(message: &str) -> PyErr {
    let remedy = "delete the views first, and wait for streams that copy (stream.synchronize()), or drop the object: its memory is \
         freed with the last view";
    raise("InUse", message, remedy)
}

/// Creates an exception about an object that was closed.
pub fn closed(what: &str) -> PyErr {
    let remedy = "keep it open for as long as it is used";
    raise("Closed", &format!("the {what} is closed"), remedy)
}

/// An error that becomes an exception.
pub trait ToPy: Sized {
    /// Returns the exception.
    fn to_py(self) -> PyErr;
}

/// Converts results, for `?`.
pub trait OrRaise<T> {
    /// Returns the value, or the error as an exception.
    fn or_raise(self) -> PyResult<T>;
}

impl<T, E: ToPy> OrRaise<T> for Result<T, E> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(ToPy::to_py)
    }
}

/// Creates an exception with an error's texts, in Python's words.
pub fn explained(class: &str, error: &impl Explain, driver: Option<DriverError>) -> PyErr {
    let error = Explained(error);
    let remedy = error.remedy_in(Language::Python);
    let code = driver.map(|error| error.code.0);
    with_code(class, &error.message(), &remedy, code)
}

fn class_of(error: &egmem::Error) -> &'static str {
    use egmem::Error::*;
    match error {
        NoDriver { .. } | DriverTooOld { .. } | MissingLibrary { .. } | MissingSymbol { .. } => {
            "NoDriver"
        }
        PlatformUnsupported { .. } | NoImexChannel { .. } | NoPeerAccess { .. } => "NotSupported",
        OutOfMemory { .. } | NodeTooFull { .. } | NodesTooFull { .. } | HeapFull { .. } => {
            "OutOfMemory"
        }
        OutOfAddresses { .. } | TooManyReferences { .. } | TooManyMappings { .. } => "OutOfMemory",
        InvalidArgument { .. } | OutOfRange { .. } => "InvalidArgument",
        NoSuchNode { .. } | NoSuchGpu { .. } | NodeUnknown { .. } => "NoSuchPlace",
        NotAccessible { .. } => "NotAccessible",
        ContextLost { .. } => "ContextLost",
        StillHeld { .. } => "InUse",
        Driver(error) => match error.code {
            Code::OUT_OF_MEMORY => "OutOfMemory",
            Code::NOT_SUPPORTED => "NotSupported",
            Code::NO_DEVICE => "NoDriver",
            _ => "DriverError",
        },
        _ => "Error",
    }
}

impl ToPy for egmem::Error {
    fn to_py(self) -> PyErr {
        explained(class_of(&self), &self, self.driver_error())
    }
}

impl ToPy for egmem::share::Error {
    fn to_py(self) -> PyErr {
        use egmem::share::Error::*;
        let class = match &self {
            Memory(error) => class_of(error),
            TimedOut { .. } => "TimedOut",
            NotTrusted { .. } => "Refused",
            _ => "ConnectionFailed",
        };
        explained(class, &self, self.driver_error())
    }
}

impl ToPy for egmem::exchange::Error {
    fn to_py(self) -> PyErr {
        use egmem::exchange::Error::*;
        let class = match &self {
            Share(error) => return error.clone().to_py(),
            Refused {
                reason: Refusal::TimedOut,
                ..
            }
            | RanksMissing { .. } => "TimedOut",
            Refused { .. } | Insecure { .. } | Forged { .. } => "Refused",
            Tls { .. } | TlsAtOneEnd { .. } => "ConnectionFailed",
            Import { source, .. } => class_of(source),
            NoCommonHandle { .. } => "NotSupported",
            _ => "ExchangeError",
        };
        explained(class, &self, self.driver_error())
    }
}
