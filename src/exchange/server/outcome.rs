//! The results of requests: answers and refusals.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use super::grant::Grant;
use super::publication::Publication;
use crate::Refusal;
use crate::account::Over;
use crate::group::MembersPage;
use crate::protocol::{Answer, Empty};
use crate::transport::HeldFd;

/// A refusal: the reason for programs and for people.
pub(super) type No = (Refusal, String);

/// The content of an answer.
#[derive(Debug)]
pub(super) enum Content {
    /// An answer, and the fds that go with it.
    Answer(Answer, Vec<HeldFd>),
    /// The entry of a name, built when it is written.
    Name(Arc<Publication>),
    /// A grant, likewise.
    Granted(Box<Grant>),
    /// Members of a group, encoded once for all of its ranks.
    Members(MembersPage),
}

impl Content {
    /// Returns an answer with its fds.
    pub fn with_fds(answer: Answer, fds: Vec<HeldFd>) -> Self {
        Self::Answer(answer, fds)
    }
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
    Now(Outcome),
    /// The answer comes later.
    Later(Pin<Box<dyn Future<Output = Outcome> + Send>>),
}

impl Step {
    pub fn later(job: impl Future<Output = Outcome> + Send + 'static) -> Self {
        Self::Later(Box::pin(job))
    }
}

/// Returns an answer without content.
pub(super) fn done() -> Outcome {
    Ok(Answer::Done(Empty {}).into())
}

/// Refuses a malformed request.
pub(super) fn invalid(error: crate::Error) -> No {
    (Refusal::Invalid, error.to_string())
}

/// Refuses a name that does not exist or that the peer has no right to: the peer does not learn which.
pub(super) fn not_found() -> No {
    (Refusal::NotFound, String::new())
}

/// Returns the refusal for exceeding a limit.
pub(super) fn over(over: Over) -> No {
    (Refusal::Limit, over.to_string())
}
