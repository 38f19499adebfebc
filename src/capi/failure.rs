//! Why a call failed, as C programs see it.

use std::any::Any;
use std::borrow::Cow;

use egmem::exchange::Error as ExchangeError;
use egmem::share::Error as ShareError;
use egmem::{Error, Explain, Explained, Language};

use crate::egm_status;

/// A failed call: its status, and the texts for the thread's last error. On the heap, so that results stay small.
#[derive(Debug)]
pub(crate) struct Failure(pub(crate) Box<Reason>);

/// The status, message and remedy of a [`Failure`], and the driver's result.
#[derive(Debug)]
pub(crate) struct Reason {
    pub(crate) status: egm_status,
    pub(crate) message: String,
    pub(crate) remedy: Cow<'static, str>,
    /// The result of the failed driver call, 0 without one.
    pub(crate) cuda_code: i32,
}

/// The result of the body of a call.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    fn new<E: Explain>(status: egm_status, error: &E, code: Option<egmem::DriverError>) -> Self {
        let told = Explained(error);
        Self(Box::new(Reason {
            status,
            message: told.message(),
            remedy: told.remedy_in(Language::C),
            cuda_code: code.map_or(0, |call| call.code.0),
        }))
    }

    /// Replaces the remedy by one that fits the call better.
    pub(crate) fn with_remedy(mut self, remedy: &'static str) -> Self {
        self.0.remedy = remedy.into();
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
        Self(Box::new(Reason {
            status: egm_status::EGM_INTERNAL,
            message: format!(
                "the library has a defect: {}",
                text.unwrap_or("no reason was given")
            ),
            remedy: "report this message, and end the process soon: the objects of the call may be unusable"
                .into(),
            cuda_code: 0,
        }))
    }
}

impl From<Error> for Failure {
    #[cold]
    fn from(error: Error) -> Self {
        Self::new((&error).into(), &error, error.driver_error())
    }
}

impl From<ShareError> for Failure {
    #[cold]
    fn from(error: ShareError) -> Self {
        Self::new((&error).into(), &error, error.driver_error())
    }
}

impl From<ExchangeError> for Failure {
    #[cold]
    fn from(error: ExchangeError) -> Self {
        Self::new((&error).into(), &error, error.driver_error())
    }
}
