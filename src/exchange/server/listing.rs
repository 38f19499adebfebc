//! Answers requests about names: lists, watches and waits.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use super::ServerCore;
use super::link::Link;
use super::outcome::{Content, No, Outcome, Step, invalid};
use super::publication::{Publication, Registered};
use super::state::ServerState;
use crate::access::MAX_SPIFFE;
use crate::protocol::{Answer, Entry, List, Names, Wait, Watch, check_name, check_prefix};
use crate::share::MAX_PARTS;
use crate::{PeerName, Refusal};

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
        let mut page = Page {
            peer: &link.session.peer,
            prefix,
            last: after.map(Arc::from),
            limit: self.limits.list_page,
            room: self.limits.frame_bytes as usize / 2,
            entries: Vec::new(),
        };
        loop {
            // Takes the lock for each part of the names: a peer may not see most of them.
            let complete = page.extend(&self.state());
            if let Some(more) = complete {
                let entries = page.entries;
                return Names { entries, more };
            }
        }
    }

    /// Returns the entry of a name as an answer.
    pub(super) fn entry(self: &Arc<Self>, publication: &Arc<Publication>) -> Content {
        let (inner, publication) = (Arc::clone(self), Arc::clone(publication));
        Content::Built(Box::new(move || {
            let names = Names {
                entries: vec![inner.state().entry(&publication)],
                more: false,
            };
            (Answer::Names(names), Vec::new())
        }))
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

    pub(super) fn wait(self: &Arc<Self>, link: &Link, ask: Wait) -> Result<Step, No> {
        check_name(&ask.name).map_err(invalid)?;
        let (inner, link) = (Arc::clone(self), link.clone());
        let longest = Duration::from_millis(ask.ms).min(inner.limits.wait);
        Step::later(async move {
            let waiting = NameWait::enter(&inner, &ask.name);
            let come = tokio::time::timeout(longest, waiting.until_seen(&link)).await;
            let publication = come.map_err(|_| (Refusal::TimedOut, String::new()))?;
            Ok(inner.entry(&publication))
        })
    }
}

/// A page of entries that is not complete yet.
struct Page<'a> {
    peer: &'a PeerName,
    prefix: &'a str,
    /// The last name that was visited.
    last: Option<Arc<str>>,
    /// The most entries.
    limit: usize,
    /// Bytes that are left for entries.
    room: usize,
    entries: Vec<Entry>,
}

impl Page<'_> {
    /// Visits the next names, [`LOOKED`] at most. Returns whether there are more entries once the page is complete.
    fn extend(&mut self, state: &ServerState) -> Option<bool> {
        let (mut visited, mut visited_last) = (0, None);
        let names = names_after(&state.names, self.prefix, self.last.as_deref());
        for (name, id) in names.take(LOOKED) {
            visited += 1;
            visited_last = Some(name);
            let found = state.publications.get(id);
            let admits = |found: &&Registered| found.who.admits(self.peer);
            let Some(found) = found.filter(|found| !found.closing).filter(admits) else {
                continue;
            };
            // An estimate: a name and its owner, and for each part four ids and numbers with their keys.
            let owner = found.publication.owner.to_string().len();
            let size = 1024 + owner + 192 * found.publication.description.parts.len();
            let count = self.entries.len();
            if count == self.limit || (size > self.room && count > 0) {
                return Some(true);
            }
            self.room = self.room.saturating_sub(size);
            self.entries.push(state.entry(&found.publication));
        }
        self.last = visited_last.cloned();
        (visited < LOOKED).then_some(false)
    }
}

/// Returns the names with this prefix that come after `after`, in order.
fn names_after<'a, T>(
    names: &'a BTreeMap<Arc<str>, T>,
    prefix: &'a str,
    after: Option<&'a str>,
) -> impl Iterator<Item = (&'a Arc<str>, &'a T)> {
    let from = match after {
        Some(after) if after >= prefix => Bound::Excluded(after),
        _ => Bound::Included(prefix),
    };
    let names = names.range::<str, _>((from, Bound::Unbounded));
    names.take_while(move |(name, _)| name.starts_with(prefix))
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn page(list: &[&str], prefix: &str, after: Option<&str>, limit: usize) -> Vec<String> {
        let names = list.iter().map(|&name| (name.into(), ())).collect();
        let page = names_after(&names, prefix, after).take(limit);
        page.map(|(name, ())| name.to_string()).collect()
    }

    #[test]
    fn pages_begin_after_the_last_name() {
        let list = ["a", "b/1", "b/2", "b/3", "c"];
        assert_eq!(page(&list, "b/", None, 2), ["b/1", "b/2"]);
        assert_eq!(page(&list, "b/", Some("b/2"), 2), ["b/3"]);
        // A name before the prefix does not lead out of it.
        assert_eq!(page(&list, "b/", Some("a"), 9).len(), 3);
        assert!(page(&list, "b/", Some("c"), 9).is_empty());
    }

    #[test]
    fn a_part_of_the_names_is_visited_under_one_lock() {
        let mut state = ServerState::new(Arc::default(), 1);
        // None of them has a publication, so that no entry ends the page.
        let names: Vec<Arc<str>> = (0..2 * LOOKED + 3)
            .map(|n| format!("{n:04}").into())
            .collect();
        state.names = names.iter().cloned().zip(0..).collect();
        let mut page = Page {
            peer: &PeerName::Local,
            prefix: "",
            last: None,
            limit: 9,
            room: 1 << 20,
            entries: Vec::new(),
        };
        for visited in [LOOKED, 2 * LOOKED] {
            assert_eq!(page.extend(&state), None);
            assert_eq!(page.last.as_ref(), Some(&names[visited - 1]));
        }
        assert_eq!(page.extend(&state), Some(false));
        assert_eq!(page.last.as_ref(), names.last());
    }

    proptest! {
        #[test]
        fn all_pages_together_are_what_a_filter_finds(
            list in proptest::collection::btree_set("[ab/]{1,4}", 0..30),
            prefix in "[ab/]{0,2}",
            limit in 1..7_usize,
        ) {
            let all: Vec<&str> = list.iter().map(String::as_str).collect();
            let mut found: Vec<String> = Vec::new();
            loop {
                let next = page(&all, &prefix, found.last().map(String::as_str), limit);
                found.extend(next.iter().cloned());
                if next.len() < limit {
                    break;
                }
            }
            let expected: Vec<_> = all.into_iter().filter(|n| n.starts_with(&prefix)).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
