//! The results of requests: answers and refusals.

use std::future::Future;
use std::pin::Pin;

use crate::Refusal;
use crate::protocol::Answer;
use crate::transport::HeldFd;

/// A refusal: the reason for programs and for people.
pub(super) type No = (Refusal, String);

/// The content of an answer.
pub(super) enum Content {
    /// An answer, and the fds that go with it.
    Answer(Answer, Vec<HeldFd>),
    /// An answer that is built when it is written: until then a long description is kept only once.
    Built(Box<dyn FnOnce() -> (Answer, Vec<HeldFd>) + Send>),
}

impl From<Answer> for Content {
    fn from(answer: Answer) -> Self {
        Self::Answer(answer, Vec::new())
    }
}

/// The result of a request.
pub(super) type Outcome = Result<Content, No>;

/// A request in progress.
pub(super) enum Step {
    /// The answer.
    Now(Content),
    /// The answer comes later.
    Later(Pin<Box<dyn Future<Output = Outcome> + Send>>),
}

impl Step {
    /// Returns a step whose answer `job` returns later.
    pub fn later(job: impl Future<Output = Outcome> + Send + 'static) -> Result<Self, No> {
        Ok(Self::Later(Box::pin(job)))
    }
}

/// Returns an answer without content.
pub(super) fn done() -> Outcome {
    Ok(Answer::Done.into())
}

/// Refuses a malformed request.
pub(super) fn invalid(error: crate::Error) -> No {
    (Refusal::Invalid, error.to_string())
}

/// Refuses a name that does not exist or that the peer has no right to: the peer does not learn which.
pub(super) fn not_found() -> No {
    (Refusal::NotFound, String::new())
}
