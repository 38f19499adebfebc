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
    pub fn new(inner: &Arc<ServerCore>, link: &Link, ask: Option<&Ask>) -> Self {
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
fn asked(ask: Option<&Ask>, bytes_of: impl FnOnce(&str) -> Option<u64>) -> Event {
    let plain = |request| Event {
        request: Some(request),
        ..Event::default()
    };
    let named = |request, name: &str| Event {
        name: Some(bounded(name, MAX_NAME)),
        ..plain(request)
    };
    let group = |request, group: &str| Event {
        group: Some(bounded(group, MAX_NAME)),
        ..plain(request)
    };
    let lease = |request, lease| Event {
        lease: Some(lease),
        ..plain(request)
    };
    match ask {
        None => plain("unknown"),
        Some(Ask::Ping(_)) => plain("ping"),
        Some(Ask::List(_)) => plain("list"),
        Some(Ask::Watch(_)) => plain("watch"),
        Some(Ask::Redeem(_)) => plain("redeem"),
        Some(Ask::Wait(wait)) => named("wait", &wait.name),
        Some(Ask::Fetch(fetch)) => named("fetch", &fetch.name),
        Some(Ask::Create(create)) => Event {
            bytes: Some(create.bytes),
            ..named("create", &create.name)
        },
        Some(Ask::Delete(delete)) => Event {
            bytes: bytes_of(&delete.name),
            ..named("delete", &delete.name)
        },
        Some(Ask::Release(release)) => lease("release", release.lease),
        Some(Ask::Probe(probe)) => lease("probe", probe.lease),
        Some(Ask::Join(join)) => Event {
            rank: Some(join.rank),
            bytes: join.memory.as_ref().map(|memory| memory.len),
            ..group("join", &join.group)
        },
        Some(Ask::Offer(offer)) => group("offer", &offer.group),
        Some(Ask::Gather(gather)) => group("gather", &gather.group),
        Some(Ask::Leave(leave)) => group("leave", &leave.group),
    }
}
