//! A request whose answer is reported.

use std::sync::Arc;

use super::Asked;
use crate::server::ServerCore;
use crate::server::link::Link;
use crate::server::outcome::Outcome;

/// A job whose answer may never be sent: if dropped before [`answered`](Self::answered), it is reported as
/// abandoned.
pub(in crate::server) struct Pending {
    inner: Arc<ServerCore>,
    link: Link,
    asked: Option<Asked>,
}

impl Pending {
    pub fn new(inner: &Arc<ServerCore>, link: &Link, asked: Asked) -> Self {
        Self {
            inner: Arc::clone(inner),
            link: link.clone(),
            asked: Some(asked),
        }
    }

    pub fn answered(mut self, outcome: &Outcome) {
        if let Some(asked) = self.asked.take() {
            self.inner.audit.answered(&self.link, asked, outcome);
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(asked) = self.asked.take() {
            self.inner.audit.abandoned(&self.link, asked);
        }
    }
}
