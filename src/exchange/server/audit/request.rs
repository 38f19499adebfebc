//! Requests whose answers are reported.

use std::sync::Arc;

use super::Event;
use crate::protocol::{Ask, MAX_NAME};
use crate::server::ServerCore;
use crate::server::link::Link;
use crate::server::outcome::Outcome;
use crate::text::bounded;

/// A request whose answer may never be sent: if dropped before [`answered`](Self::answered), it is reported as
/// abandoned.
pub(in crate::server) struct Pending {
    inner: Arc<ServerCore>,
    link: Link,
    asked: Option<Event>,
}

impl Pending {
    pub fn new(inner: &Arc<ServerCore>, link: &Link, ask: &Ask) -> Self {
        let asked = asked(ask, |name| inner.state().bytes_of(name));
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

/// Returns the parts of a request that an event contains. Names are not checked yet here, so this escapes and
/// cuts them. `bytes_of` returns the size of the memory under a name.
fn asked(ask: &Ask, bytes_of: impl FnOnce(&str) -> Option<u64>) -> Event {
    let plain = |request| Event {
        request: Some(request),
        ..Event::default()
    };
    let named = |request, name: &str| Event {
        name: Some(bounded(name, MAX_NAME)),
        ..plain(request)
    };
    let lease = |request, lease| Event {
        lease: Some(lease),
        ..plain(request)
    };
    match ask {
        Ask::Ping => plain("ping"),
        Ask::List(_) => plain("list"),
        Ask::Watch(_) => plain("watch"),
        Ask::Wait(wait) => named("wait", &wait.name),
        Ask::Fetch(fetch) => named("fetch", &fetch.name),
        Ask::Create(create) => Event {
            bytes: Some(create.bytes),
            ..named("create", &create.name)
        },
        Ask::Delete(delete) => Event {
            bytes: bytes_of(&delete.name),
            ..named("delete", &delete.name)
        },
        Ask::Release(release) => lease("release", release.lease),
        Ask::Probe(probe) => lease("probe", probe.lease),
    }
}
