//! The parts of a request that an audit event contains.

use crate::protocol::{Ask, MAX_NAME};
use crate::text::bounded;

/// The subject of a request.
#[derive(Clone, Debug, Default)]
pub(in crate::server) struct Asked {
    pub(super) request: &'static str,
    pub(super) name: Option<String>,
    pub(super) group: Option<String>,
    pub(super) rank: Option<u32>,
    pub(super) lease: Option<u64>,
    pub(super) bytes: Option<u64>,
}

impl Asked {
    /// Names are not checked yet here, so this escapes and cuts them. `bytes_of` returns the size of the memory
    /// under a name.
    pub fn of(ask: Option<&Ask>, bytes_of: impl FnOnce(&str) -> Option<u64>) -> Self {
        let text = |text: &str| Some(bounded(text, MAX_NAME));
        let plain = |request| Self {
            request,
            ..Self::default()
        };
        let named = |request, name: &str, bytes| Self {
            name: text(name),
            bytes,
            ..plain(request)
        };
        let group = |request, group: &str| Self {
            group: text(group),
            ..plain(request)
        };
        let lease = |request, lease| Self {
            lease: Some(lease),
            ..plain(request)
        };
        match ask {
            None => plain("unknown"),
            Some(Ask::Ping(_)) => plain("ping"),
            Some(Ask::List(_)) => plain("list"),
            Some(Ask::Watch(_)) => plain("watch"),
            Some(Ask::Redeem(_)) => plain("redeem"),
            Some(Ask::Wait(wait)) => named("wait", &wait.name, None),
            Some(Ask::Fetch(fetch)) => named("fetch", &fetch.name, None),
            Some(Ask::Create(create)) => named("create", &create.name, Some(create.bytes)),
            Some(Ask::Delete(delete)) => named("delete", &delete.name, bytes_of(&delete.name)),
            Some(Ask::Release(release)) => lease("release", release.lease),
            Some(Ask::Probe(probe)) => lease("probe", probe.lease),
            Some(Ask::Join(join)) => Self {
                rank: Some(join.rank),
                bytes: join.memory.as_ref().map(|memory| memory.len),
                ..group("join", &join.group)
            },
            Some(Ask::Offer(offer)) => group("offer", &offer.group),
            Some(Ask::Gather(gather)) => group("gather", &gather.group),
            Some(Ask::Leave(leave)) => group("leave", &leave.group),
        }
    }

    /// Returns the event for such a request when it is granted, unless its lease is reported.
    pub(super) fn granted(&self) -> Option<&'static str> {
        match self.request {
            "create" => Some("created"),
            "delete" => Some("deleted"),
            "join" => Some("group_joined"),
            "leave" => Some("group_left"),
            _ => None,
        }
    }
}
