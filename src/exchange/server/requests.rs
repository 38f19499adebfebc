//! Answers requests.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::ServerCore;
use super::audit::audit;
use super::options::Allocation;
use super::publication::Publication;
use super::quota::{Counted, CountedFds, Permit, Refused, SMALL, What};
use super::registry::ServerState;
use super::session::Link;
use crate::access::MAX_SPIFFE;
use crate::driver::random;
use crate::protocol::{
    self, Answer, Ask, Create, Delete, Entry, Leases, List, MAX_NAME, Names, Probed, Request, Wait,
    check_name, check_prefix,
};
use crate::share::MAX_PARTS;
use crate::text::bounded;
use crate::{Error, PeerName, Refusal};

/// How many names are visited while all others wait for the lock.
const LOOKED: usize = 256;

/// The bytes of a request that waits. A longer one counts as several.
const REQUEST: usize = 2 << 10;

/// The most bytes of a part in an answer, with its handle.
const PART: usize = 256;

/// A request's answer.
pub(super) struct Answered {
    pub id: u64,
    pub reply: Reply,
    /// Counts the request until its answer is written.
    _counted: Option<Arc<Counted>>,
}

/// Builds an answer, and the fds that go with it, when it is written: until then a description is kept only once.
pub(super) type Build = Box<dyn FnOnce(&ServerCore) -> (Answer, CountedFds) + Send>;

/// An answer, and the permit of a large one.
pub(super) struct Reply {
    pub build: Build,
    pub _large: Option<Permit>,
}

impl Reply {
    pub fn new(answer: Answer, _large: Option<Permit>) -> Self {
        let build = Box::new(|_: &ServerCore| (answer, CountedFds::default()));
        Self { build, _large }
    }
}

impl From<Answer> for Reply {
    fn from(answer: Answer) -> Self {
        Self::new(answer, None)
    }
}

/// Returns whether an answer about this memory may be a large frame.
pub(super) fn is_large(publication: &Publication) -> bool {
    publication.description.parts.len() * PART > SMALL
}

/// Answers a request of a connection with so many others that wait. Its first poll does not block.
pub(super) async fn handle(
    core: Arc<ServerCore>,
    link: Arc<Link>,
    (id, ask): Request,
    waiting: usize,
) -> Answered {
    let subject = subject(&ask);
    let mut counted = None;
    let result = match core.count_request(&link, &ask, waiting) {
        Ok(count) => {
            counted.clone_from(&count);
            core.answer(&link, ask, waiting, count).await
        }
        Err(refused) => Err(refused),
    };
    Answered {
        id,
        reply: result.unwrap_or_else(|refused| core.refused(&link, subject, refused)),
        _counted: counted,
    }
}

/// A request's name in the protocol, and the name of the memory that it is about.
type Subject = (&'static str, Option<String>);

/// Returns a request's subject. The memory's name is not checked yet here, so this escapes and cuts it.
fn subject(ask: &Ask) -> Subject {
    let (request, name) = match ask {
        Ask::Ping => ("ping", None),
        Ask::List(_) => ("list", None),
        Ask::Held(_) => ("held", None),
        Ask::Release(_) => ("release", None),
        Ask::Probe(_) => ("probe", None),
        Ask::Wait(ask) => ("wait", Some(&ask.name)),
        Ask::Fetch(ask) => ("fetch", Some(&ask.name)),
        Ask::Create(ask) => ("create", Some(&ask.name)),
        Ask::Delete(ask) => ("delete", Some(&ask.name)),
    };
    (request, name.map(|name| bounded(name, MAX_NAME)))
}

/// The audit event of a deletion. A deletion goes on if its connection ends before the answer.
struct Deletion<'a> {
    core: &'a ServerCore,
    link: &'a Link,
    name: &'a str,
    bytes: Option<u64>,
    event: Option<&'static str>,
}

impl Drop for Deletion<'_> {
    fn drop(&mut self) {
        if let Some(event) = self.event {
            let (session, name, bytes) = (&self.link.session, self.name, self.bytes);
            let (peer, session, pid) = (&session.peer, session.id, self.link.pid());
            audit! { self.core.audit, Memory, Some(peer), event, session, pid, name, bytes }
        }
    }
}

impl ServerCore {
    /// Reports a refusal.
    fn refused(&self, link: &Link, (request, name): Subject, (reason, detail): Refused) -> Reply {
        self.count_refusal(&reason);
        let (peer, session) = (&link.session.peer, link.session.id);
        let (pid, word) = (link.pid(), bounded(reason.word(), 64));
        audit! {
            self.audit, Refusal, Some(peer), "refused", session, pid, request, name, reason = word
        }
        Answer::Refused(protocol::Refused::new(&reason, &detail)).into()
    }

    /// Waits for the permit of an answer that is large, where it holds up no other, for as long as a frame may take to write.
    pub(super) async fn permit(
        &self,
        link: &Link,
        is_large: bool,
    ) -> Result<Option<Permit>, Refused> {
        if !is_large {
            return Ok(None);
        }
        let permit = timeout(self.options.limits.write, link.large.clone().permit()).await;
        let why = "this peer's other connections do not read their large answers";
        permit
            .map(Some)
            .map_err(|_| (Refusal::TimedOut, why.into()))
    }

    /// Answers with the entry of a name.
    async fn one_entry(
        &self,
        link: &Link,
        publication: Arc<Publication>,
    ) -> Result<Reply, Refused> {
        let _large = self.permit(link, is_large(&publication)).await?;
        let build = Box::new(move |core: &Self| {
            let entries = vec![core.state().entry(&publication)];
            let names = Names {
                entries,
                more: false,
            };
            (Answer::Names(names), CountedFds::default())
        });
        Ok(Reply { build, _large })
    }

    /// Counts a request that may wait.
    fn count_request(
        &self,
        link: &Link,
        ask: &Ask,
        waiting: usize,
    ) -> Result<Option<Arc<Counted>>, Refused> {
        let amount = match ask {
            Ask::Ping | Ask::List(_) | Ask::Held(_) | Ask::Release(_) => return Ok(None),
            Ask::Create(ask) if ask.peers.len() > SMALL => {
                return Err((Refusal::Limit, format!("{SMALL} bytes of peers")));
            }
            Ask::Create(ask) => 1 + ask.peers.len() / REQUEST,
            _ => 1,
        };
        self.count_requests(link, waiting, amount)
            .map(Arc::new)
            .map(Some)
    }

    fn count_requests(
        &self,
        link: &Link,
        waiting: usize,
        amount: usize,
    ) -> Result<Counted, Refused> {
        let limit = self.options.limits.requests_in_flight;
        if waiting >= limit {
            return Err((Refusal::Limit, format!("{limit} requests at once")));
        }
        let counted = (self.quota).count(&link.session.peer, What::Request, amount);
        Ok(counted?)
    }

    async fn answer(
        &self,
        link: &Link,
        ask: Ask,
        waiting: usize,
        counted: Option<Arc<Counted>>,
    ) -> Result<Reply, Refused> {
        match ask {
            Ask::Ping => Ok(Answer::Done.into()),
            Ask::List(list) => {
                check_prefix(&list.prefix)?;
                check_prefix(list.after.as_deref().unwrap_or_default())?;
                self.list(link, waiting, list).await
            }
            Ask::Held(held) => {
                let leases = self.held(link, &held)?;
                Ok(Answer::Expired(Leases { leases }).into())
            }
            Ask::Release(release) => self.release(link, release.lease),
            Ask::Fetch(ask) => self.fetch(link, ask, counted).await,
            Ask::Wait(wait) => self.wait(link, wait).await,
            Ask::Probe(probe) => self.probe(link, probe.lease, counted).await,
            Ask::Create(create) => self.create(link, create).await,
            Ask::Delete(delete) => self.delete(link, delete).await,
        }
    }

    /// Returns a page of names; one whose first entry is long waits for its permit.
    async fn list(&self, link: &Link, waiting: usize, list: List) -> Result<Reply, Refused> {
        let page = |least| {
            let (peer, after) = (&link.session.peer, list.after.as_deref());
            self.page(peer, &list.prefix, after, least)
        };
        let small = page(0);
        if !small.more || !small.entries.is_empty() {
            return Ok(Answer::Names(small).into());
        }
        let _counted = self.count_requests(link, waiting, 1)?;
        let large = self.permit(link, true).await?;
        Ok(Reply::new(Answer::Names(page(1)), large))
    }

    /// Ends a lease that its holder releases.
    pub(super) fn release(&self, link: &Link, lease: u64) -> Result<Reply, Refused> {
        if !self.state().release(&link.session, lease) {
            return Err(not_found());
        }
        self.released.notify_waiters();
        self.count(|stats| &mut stats.released);
        Ok(Answer::Done.into())
    }

    async fn wait(&self, link: &Link, ask: Wait) -> Result<Reply, Refused> {
        check_name(&ask.name)?;
        let waiting = NameWait {
            core: self,
            name: &ask.name,
            notify: self.state().await_name(&ask.name),
        };
        let longest = Duration::from_millis(ask.ms).min(self.options.limits.wait);
        let found = timeout(longest, waiting.until_seen(link)).await;
        let publication = found.map_err(|_| (Refusal::TimedOut, String::new()))?;
        self.one_entry(link, publication).await
    }

    async fn probe(
        &self,
        link: &Link,
        lease: u64,
        counted: Option<Arc<Counted>>,
    ) -> Result<Reply, Refused> {
        let (slot, publication) = {
            let state = self.state();
            let lease = state.lease(link.session.id, lease);
            let lease = lease.ok_or_else(not_found)?;
            let no_slot = || (Refusal::Invalid, "it has no place for a probe".into());
            let slot = lease.probe.ok_or_else(no_slot)?;
            let found = state.publications.get(&lease.publication);
            (slot, Arc::clone(&found.ok_or_else(not_found)?.publication))
        };
        let probe = move || {
            let shared = publication.shared()?;
            let found = shared.word(slot)?;
            let word = random().map_err(|e| Error::system("random bytes", &e))?;
            let wrote = u64::from_ne_bytes(word);
            shared.put_word(slot, wrote)?;
            Ok(Probed { found, wrote })
        };
        let probed = self.driver_call(counted, probe).await?;
        Ok(Answer::Probed(probed).into())
    }

    /// Runs driver calls off the runtime, for at most the time of a request. The request is counted until they
    /// return, which may be later.
    pub(super) async fn driver_call<T: Send + 'static>(
        &self,
        counted: Option<Arc<Counted>>,
        call: impl FnOnce() -> crate::Result<T> + Send + 'static,
    ) -> Result<T, Refused> {
        let call = move || {
            let result = call();
            drop(counted);
            result
        };
        let work = self.tasks.spawn_blocking(call);
        match timeout(self.options.limits.request, work).await {
            Ok(Ok(Ok(result))) => Ok(result),
            Ok(Ok(Err(error))) => Err((Refusal::Internal, error.to_string())),
            Ok(Err(_)) => Err((Refusal::Internal, "a driver call panicked".into())),
            Err(_) => Err((Refusal::TimedOut, "a driver call does not return".into())),
        }
    }

    async fn create(&self, link: &Link, ask: Create) -> Result<Reply, Refused> {
        let allocator = self.allocator()?;
        check_name(&ask.name)?;
        let peer = &link.session.peer;
        allocator.may_create(peer, &ask.name)?;
        within(self.options.limits.wait, allocator.create(peer, &ask)).await?;
        let (session, pid) = (link.session.id, link.pid());
        let (name, bytes) = (&*ask.name, ask.bytes);
        audit! { self.audit, Memory, Some(peer), "created", session, pid, name, bytes }
        let found = self.visible(&ask.name, peer).ok_or_else(not_found)?;
        let id = found.id;
        let reply = self.one_entry(link, found).await;
        // Another connection of the peer may have deleted it and created its name anew.
        if reply.is_err() && self.visible(name, peer).is_some_and(|now| now.id == id) {
            let name = ask.name.clone();
            // Best effort: the client learns from a list whether it exists.
            let _ = self.delete(link, Delete { name, ms: 0 }).await;
        }
        reply
    }

    async fn delete(&self, link: &Link, ask: Delete) -> Result<Reply, Refused> {
        let allocator = self.allocator()?;
        check_name(&ask.name)?;
        let longest = Duration::from_millis(ask.ms).min(self.options.limits.wait);
        let mut deletion = Deletion {
            core: self,
            link,
            name: &ask.name,
            bytes: self.state().bytes_of(&ask.name),
            event: Some("delete_abandoned"),
        };
        let delete = allocator.delete(&link.session.peer, &ask.name, longest);
        // The allocator does the waiting; its other work has the time of a request.
        let deleted = within(longest.saturating_add(self.options.limits.request), delete).await;
        // A refusal is an event of its own.
        deletion.event = deleted.is_ok().then_some("deleted");
        deleted?;
        Ok(Answer::Done.into())
    }

    /// Returns the publication under a name that a peer can see now.
    pub(super) fn visible(&self, name: &str, peer: &PeerName) -> Option<Arc<Publication>> {
        let state = self.state();
        let found = state.visible(name, peer)?;
        Some(Arc::clone(&found.publication))
    }

    /// Returns a page of entries that the peer may see, as many as fit into a small frame, but at least so many.
    pub(super) fn page(
        &self,
        peer: &PeerName,
        prefix: &str,
        after: Option<&str>,
        least: usize,
    ) -> Names {
        let mut page = Page {
            peer,
            prefix,
            last: after.map(Arc::from),
            least,
            limit: self.options.limits.list_page,
            room: SMALL.min(self.options.limits.frame_bytes as usize / 2),
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
}

/// Refuses a name that does not exist or that the peer has no right to: the peer does not learn which.
pub(super) fn not_found() -> Refused {
    (Refusal::NotFound, String::new())
}

/// Waits for the allocator, for this long.
async fn within(limit: Duration, work: Allocation<'_>) -> Result<(), Refused> {
    let worked = timeout(limit, work).await;
    worked.map_err(|_| (Refusal::TimedOut, String::new()))?
}

/// A page of entries that is not complete yet.
struct Page<'a> {
    peer: &'a PeerName,
    prefix: &'a str,
    /// The last name that was visited.
    last: Option<Arc<str>>,
    /// The least entries, and the most.
    least: usize,
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
            let found = (state.publications.get(id)).filter(|found| found.is_visible_to(self.peer));
            let Some(found) = found else {
                continue;
            };
            // An estimate: keys, a name and its owner, and for each part four ids and numbers with their keys.
            let owner = found.publication.owner.to_string().len();
            let parts = found.publication.description.parts.len();
            let size = 128 + name.len() + owner + 192 * parts;
            let count = self.entries.len();
            if count == self.limit || (size > self.room && count >= self.least) {
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
    core: &'a ServerCore,
    name: &'a str,
    notify: Arc<tokio::sync::Notify>,
}

impl NameWait<'_> {
    async fn until_seen(&self, link: &Link) -> Arc<Publication> {
        loop {
            let changed = self.notify.notified();
            {
                let state = self.core.state();
                // While the server is closing, it refuses to grant what this would find.
                if !state.closing
                    && let Some(found) = state.visible(self.name, &link.session.peer)
                {
                    return Arc::clone(&found.publication);
                }
            }
            changed.await;
        }
    }
}

impl Drop for NameWait<'_> {
    fn drop(&mut self) {
        self.core.state().leave(self.name);
    }
}

// An entry with the most parts fits into a frame of the default size.
const _: () = assert!(128 + MAX_NAME + MAX_SPIFFE + 192 * MAX_PARTS < 4 << 20);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Limits;
    use crate::server::quota::Quota;

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
        let mut state = ServerState::new(Arc::default(), Quota::new(&Limits::default(), 1 << 20));
        // None of them has a publication, so that no entry ends the page.
        let names: Vec<Arc<str>> = (0..2 * LOOKED + 3)
            .map(|n| format!("{n:04}").into())
            .collect();
        state.names = names.iter().cloned().zip(0..).collect();
        let mut page = Page {
            peer: &PeerName::Local,
            prefix: "",
            last: None,
            least: 1,
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
