//! Answers requests about names: lists, watches and waits.

use std::sync::Arc;
use std::time::Duration;

use super::ServerCore;
use super::link::Link;
use super::outcome::{Content, Outcome, Step, invalid};
use super::publication::Publication;
use crate::Refusal;
use crate::protocol::{Answer, List, Names, Wait, Watch, check_name, check_prefix};
use crate::share::MAX_PARTS;
use crate::spiffe::MAX as MAX_SPIFFE;

/// How many names are visited while all others wait for the lock.
const LOOKED: usize = 256;

impl ServerCore {
    pub(super) fn list(&self, link: &Link, ask: &List) -> Outcome {
        check_prefix(&ask.prefix).map_err(invalid)?;
        check_prefix(ask.after.as_deref().unwrap_or_default()).map_err(invalid)?;
        let names = self.page(link, &ask.prefix, ask.after.as_deref());
        Ok(Answer::Names(names).into())
    }

    /// Returns a page of entries that the peer may see, as many as fit into half a frame.
    fn page(&self, link: &Link, prefix: &str, after: Option<&str>) -> Names {
        let mut entries = Vec::new();
        let mut after: Option<Arc<str>> = after.map(Arc::from);
        let mut room = self.limits.frame_bytes as usize / 2;
        let mut left = self.limits.list_page.max(1);
        loop {
            // Takes the lock for each part of the names: a peer may not see most of them.
            let state = self.state();
            let page = state.names.page(prefix, after.as_deref(), LOOKED, |_, id| {
                let Some(found) = state.publications.get(id) else {
                    return Ok(None);
                };
                if found.closing || !found.who.admits(&link.session.peer) {
                    return Ok(None);
                }
                // An estimate: a name and its owner, and for each part four ids and numbers with their keys.
                let owner = found.publication.owner.to_string().len();
                let size = 1024 + owner + 192 * found.publication.description.parts.len();
                let first = left == self.limits.list_page.max(1);
                if left == 0 || (size > room && !first) {
                    return Err(());
                }
                left -= 1;
                room = room.saturating_sub(size);
                Ok(Some(state.entry(&found.publication)))
            });
            drop(state);
            entries.extend(page.items);
            after = page.looked;
            if after.is_none() {
                let more = page.more;
                return Names { entries, more };
            }
        }
    }

    /// Subscribes the session to these names; the existing ones may be more than a page.
    pub(super) fn watch(&self, link: &Link, ask: &Watch) -> Outcome {
        check_prefix(&ask.prefix).map_err(invalid)?;
        let mut state = self.state();
        // A connection that has lost its session cannot watch.
        if link.session.is_of(link.id) {
            state.watch(&link.session, &ask.prefix)?;
        }
        drop(state);
        let names = self.page(link, &ask.prefix, None);
        Ok(Answer::Names(names).into())
    }

    pub(super) fn wait(self: &Arc<Self>, link: &Link, ask: Wait) -> Step {
        if let Err(error) = check_name(&ask.name) {
            return Step::Now(Err(invalid(error)));
        }
        let (inner, link) = (Arc::clone(self), link.clone());
        let longest = Duration::from_millis(ask.ms).min(inner.limits.wait);
        Step::later(async move {
            let waiting = NameWait::enter(&inner, &ask.name);
            let come = tokio::time::timeout(longest, waiting.until_seen(&link)).await;
            match come {
                Ok(publication) => Ok(Content::Name(publication)),
                Err(_) => Err((Refusal::TimedOut, String::new())),
            }
        })
    }
}

/// A request that waits for a name, until dropped.
struct NameWait<'a> {
    inner: &'a ServerCore,
    name: &'a str,
    notify: Arc<tokio::sync::Notify>,
}

impl<'a> NameWait<'a> {
    fn enter(inner: &'a ServerCore, name: &'a str) -> Self {
        let notify = inner.state().await_name(name);
        Self {
            inner,
            name,
            notify,
        }
    }

    async fn until_seen(&self, link: &Link) -> Arc<Publication> {
        loop {
            let changed = self.notify.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            {
                let state = self.inner.state();
                if let Some(found) = state.visible(self.name, &link.session.peer) {
                    return Arc::clone(&found.publication);
                }
            }
            changed.await;
        }
    }
}

impl Drop for NameWait<'_> {
    fn drop(&mut self) {
        self.inner.state().leave(self.name);
    }
}

// An entry with the most parts fits into a frame of the default size.
const _: () = assert!(1024 + MAX_SPIFFE + 192 * MAX_PARTS < 4 << 20);
