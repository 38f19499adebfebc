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
use super::session::Link;
use super::state::ServerState;
use crate::access::MAX_SPIFFE;
use crate::driver::random;
use crate::protocol::{
    self, Answer, Ask, Create, Entry, List, MAX_NAME, Names, Probed, Request, check_name,
    check_prefix,
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

/// Builds the answer to a request, and the fds that go with it, when it is written: until then a description is kept only once,
/// and no lease has begun, so that no notice about it can overtake the grant.
type Build = Box<dyn FnOnce(&Requester) -> Result<(Answer, CountedFds), Refused> + Send>;

/// An answer, and the permit of a large one.
pub(super) struct Reply {
    pub build: Build,
    pub _large: Option<Permit>,
}

impl From<Answer> for Reply {
    fn from(answer: Answer) -> Self {
        Self {
            build: Box::new(|_| Ok((answer, CountedFds::default()))),
            _large: None,
        }
    }
}

/// Answers a request of a connection with so many others that wait. Its first poll does not block.
pub(super) async fn handle(
    core: Arc<ServerCore>,
    link: Arc<Link>,
    (id, ask): Request,
    waiting: usize,
) -> (Requester, Reply) {
    let mut requester = Requester {
        core,
        link,
        id,
        subject: subject(&ask),
        waiting,
        counted: None,
    };
    let counted = match &ask {
        Ask::Ping | Ask::List(_) | Ask::Held(_) | Ask::Release { .. } => Ok(()),
        Ask::Create(ask) => requester.count(1 + ask.peers.len() / REQUEST),
        _ => requester.count(1),
    };
    let result = match counted {
        Ok(()) => requester.answer(ask).await,
        Err(refused) => Err(refused),
    };
    let reply = result.unwrap_or_else(|refused| requester.refused(refused).into());
    (requester, reply)
}

/// Returns a request's name in the protocol, and the name of the memory that it is about. That is not checked yet here, so this
/// escapes and cuts it.
fn subject(ask: &Ask) -> (&'static str, Option<String>) {
    let (request, name) = match ask {
        Ask::Ping => ("ping", None),
        Ask::List(_) => ("list", None),
        Ask::Held(_) => ("held", None),
        Ask::Release { .. } => ("release", None),
        Ask::Probe { .. } => ("probe", None),
        Ask::Wait { name, .. } => ("wait", Some(name)),
        Ask::Fetch(ask) => ("fetch", Some(&ask.name)),
        Ask::Create(ask) => ("create", Some(&ask.name)),
        Ask::Delete { name, .. } => ("delete", Some(name)),
    };
    (request, name.map(|name| bounded(name, MAX_NAME)))
}

/// The audit event of a deletion. A deletion goes on if its connection ends before the answer.
struct Deletion<'a> {
    requester: &'a Requester,
    name: &'a str,
    bytes: Option<u64>,
    event: Option<&'static str>,
}

impl Drop for Deletion<'_> {
    fn drop(&mut self) {
        if let Some(event) = self.event {
            let (core, link) = (&self.requester.core, &self.requester.link);
            let (session, pid, name, bytes) = (link.session.id, link.pid(), self.name, self.bytes);
            let peer = Some(&link.session.peer);
            audit! { core.audit, Memory, peer, event, session, pid, name, bytes }
        }
    }
}

/// A connection with a request, until its answer is written.
pub(super) struct Requester {
    pub core: Arc<ServerCore>,
    pub link: Arc<Link>,
    pub id: u64,
    subject: (&'static str, Option<String>),
    /// How many other requests of the connection wait.
    waiting: usize,
    /// Counts the request, if it may wait.
    pub counted: Option<Arc<Counted>>,
}

impl Requester {
    pub fn peer(&self) -> &PeerName {
        &self.link.session.peer
    }

    /// Counts the request, which may wait.
    fn count(&mut self, amount: usize) -> Result<(), Refused> {
        let limit = self.core.options.limits.requests_in_flight;
        if self.waiting >= limit {
            return Err((Refusal::Limit, format!("{limit} requests at once")));
        }
        let counted = (self.core.quota).count(self.peer(), What::Request, amount)?;
        self.counted = Some(Arc::new(counted));
        Ok(())
    }

    /// Reports a refusal.
    fn refused(&self, (reason, detail): Refused) -> Answer {
        let (core, session, pid) = (&self.core, self.link.session.id, self.link.pid());
        let (request, name) = &self.subject;
        core.count_refusal(&reason);
        let (peer, word) = (Some(self.peer()), bounded(reason.word(), 64));
        audit! { core.audit, Refusal, peer, "refused", session, pid, request, name, reason = word }
        Answer::Refused(protocol::Refused::new(&reason, &detail))
    }

    /// Builds the answer, and the fds that go with it.
    pub fn build(&self, build: Build) -> (Answer, CountedFds) {
        build(self).unwrap_or_else(|refused| (self.refused(refused), CountedFds::default()))
    }

    async fn answer(&mut self, ask: Ask) -> Result<Reply, Refused> {
        match ask {
            Ask::Ping => Ok(Answer::Done.into()),
            Ask::List(list) => self.list(list).await,
            Ask::Held(held) => {
                let leases = self.core.held(&self.link, &held)?;
                Ok(Answer::Expired { leases }.into())
            }
            Ask::Release { lease } => self.core.release(&self.link, lease),
            Ask::Fetch(fetch) => self.fetch(fetch).await,
            Ask::Wait { name, ms } => self.wait(&name, ms).await,
            Ask::Probe { lease } => self.probe(lease).await,
            Ask::Create(create) => self.create(create).await,
            Ask::Delete { name, ms } => self.delete(&name, ms).await,
        }
    }

    /// Waits for the permit of an answer that is large, where it holds up no other, for as long as a frame may take to write.
    async fn permit(&self) -> Result<Permit, Refused> {
        let permit = self.link.large.clone().permit();
        let why = "this peer's other connections do not read their large answers";
        let permit = timeout(self.core.options.limits.write, permit).await;
        permit.map_err(|_| (Refusal::TimedOut, why.into()))
    }

    /// Waits for the permit of an answer about this memory, if it may be large.
    pub async fn permit_for(&self, of: &Publication) -> Result<Option<Permit>, Refused> {
        if of.parts * PART <= SMALL {
            return Ok(None);
        }
        self.permit().await.map(Some)
    }

    /// Answers with the entry of a name.
    async fn one_entry(&self, publication: Arc<Publication>) -> Result<Reply, Refused> {
        let _large = self.permit_for(&publication).await?;
        let build = Box::new(move |by: &Self| {
            let state = by.core.state();
            let found = state.visible(&publication.name, by.peer());
            // It may have been withdrawn meanwhile, or be another peer's now.
            let found = found.filter(|found| found.publication.id == publication.id);
            let found = found.ok_or_else(not_found)?;
            let (entries, more) = (vec![found.entry()], false);
            let names = Answer::Names(Names { entries, more });
            Ok((names, CountedFds::default()))
        });
        Ok(Reply { build, _large })
    }

    /// Returns a page of names; one whose first entry is long waits for its permit.
    async fn list(&mut self, list: List) -> Result<Reply, Refused> {
        check_prefix(&list.prefix)?;
        check_prefix(list.after.as_deref().unwrap_or_default())?;
        let small = self.page(&list, 0);
        if !small.more || !small.entries.is_empty() {
            return Ok(Answer::Names(small).into());
        }
        self.count(1)?;
        let _large = Some(self.permit().await?);
        let reply = Reply::from(Answer::Names(self.page(&list, 1)));
        Ok(Reply { _large, ..reply })
    }

    async fn wait(&self, name: &str, ms: u64) -> Result<Reply, Refused> {
        check_name(name)?;
        let seen = async {
            loop {
                let changed = self.core.changes_of(name).notified();
                let found = self.core.visible(name, self.peer());
                // While the server is closing, it refuses to grant what this would find.
                if let Some(found) = found.filter(|_| !self.core.state().closing) {
                    return found;
                }
                changed.await;
            }
        };
        let longest = Duration::from_millis(ms).min(self.core.options.limits.wait);
        let found = timeout(longest, seen).await;
        let publication = found.map_err(|_| (Refusal::TimedOut, String::new()))?;
        self.one_entry(publication).await
    }

    async fn probe(&self, lease: u64) -> Result<Reply, Refused> {
        let (slot, publication) = {
            let state = self.core.state();
            let lease = state.lease(self.link.session.id, lease);
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
        Ok(Answer::Probed(self.driver_call(probe).await?).into())
    }

    /// Runs driver calls off the runtime, for at most the time of a request. The request is counted until they
    /// return, which may be later.
    pub async fn driver_call<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> crate::Result<T> + Send + 'static,
    ) -> Result<T, Refused> {
        let counted = self.counted.clone();
        let call = move || {
            let result = call();
            drop(counted);
            result
        };
        let work = self.core.tasks.spawn_blocking(call);
        match timeout(self.core.options.limits.request, work).await {
            Ok(Ok(Ok(result))) => Ok(result),
            Ok(Ok(Err(error))) => Err((Refusal::Internal, error.to_string())),
            Ok(Err(_)) => Err((Refusal::Internal, "a driver call panicked".into())),
            Err(_) => Err((Refusal::TimedOut, "a driver call does not return".into())),
        }
    }

    async fn create(&self, ask: Create) -> Result<Reply, Refused> {
        if ask.peers.len() > SMALL {
            return Err((Refusal::Limit, format!("{SMALL} bytes of peers")));
        }
        let (core, peer) = (&self.core, self.peer());
        let allocator = core.allocator()?;
        check_name(&ask.name)?;
        allocator.may_create(peer, &ask.name)?;
        within(core.options.limits.wait, allocator.create(peer, &ask)).await?;
        let (session, pid) = (self.link.session.id, self.link.pid());
        let (name, bytes) = (&*ask.name, ask.bytes);
        audit! { core.audit, Memory, Some(peer), "created", session, pid, name, bytes }
        let found = core.visible(name, peer).ok_or_else(not_found)?;
        let id = found.id;
        let reply = self.one_entry(found).await;
        // Another connection of the peer may have deleted it and created its name anew.
        if reply.is_err() && core.visible(name, peer).is_some_and(|now| now.id == id) {
            // Best effort: the client learns from a list whether it exists.
            let _ = self.delete(name, 0).await;
        }
        reply
    }

    async fn delete(&self, name: &str, ms: u64) -> Result<Reply, Refused> {
        let allocator = self.core.allocator()?;
        check_name(name)?;
        let limits = &self.core.options.limits;
        let longest = Duration::from_millis(ms).min(limits.wait);
        let mut deletion = Deletion {
            requester: self,
            name,
            bytes: self.core.state().bytes_of(name),
            event: Some("delete_abandoned"),
        };
        let delete = allocator.delete(self.peer(), name, longest);
        // The allocator does the waiting; its other work has the time of a request.
        let deleted = within(longest.saturating_add(limits.request), delete).await;
        // A refusal is an event of its own.
        deletion.event = deleted.is_ok().then_some("deleted");
        deleted?;
        Ok(Answer::Done.into())
    }

    /// Returns a page of entries that the peer may see, as many as fit into a small frame, but at least so many.
    fn page(&self, list: &List, least: usize) -> Names {
        let limits = &self.core.options.limits;
        let mut page = Page {
            peer: self.peer(),
            prefix: &list.prefix,
            last: list.after.as_deref().map(Arc::from),
            least,
            limit: limits.list_page,
            room: SMALL.min(limits.frame_bytes as usize / 2),
            entries: Vec::new(),
        };
        loop {
            // Takes the lock for each part of the names: a peer may not see most of them.
            let complete = page.extend(&self.core.state());
            if let Some(more) = complete {
                let entries = page.entries;
                return Names { entries, more };
            }
        }
    }
}

impl ServerCore {
    /// Ends a lease that its holder releases.
    pub(super) fn release(&self, link: &Link, lease: u64) -> Result<Reply, Refused> {
        if !self.state().release(&link.session, lease) {
            return Err(not_found());
        }
        self.released.notify_waiters();
        self.count(|stats| &mut stats.released);
        Ok(Answer::Done.into())
    }

    /// Returns the publication under a name that a peer can see now.
    fn visible(&self, name: &str, peer: &PeerName) -> Option<Arc<Publication>> {
        let state = self.state();
        let found = state.visible(name, peer)?;
        Some(Arc::clone(&found.publication))
    }
}

/// Refuses a name that does not exist or that the peer has no right to: the peer does not learn which.
pub(super) fn not_found() -> Refused {
    (Refusal::NotFound, String::new())
}

/// Refuses a request of a connection that has lost its session.
pub(super) fn elsewhere() -> Refused {
    (Refusal::Expired, "the session is elsewhere".into())
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
            let size = 128 + name.len() + owner + 192 * found.publication.parts;
            let count = self.entries.len();
            if count == self.limit || (size > self.room && count >= self.least) {
                return Some(true);
            }
            self.room = self.room.saturating_sub(size);
            self.entries.push(found.entry());
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

// An entry with the most parts fits into a frame of the default size.
const _: () = assert!(128 + MAX_NAME + MAX_SPIFFE + 192 * MAX_PARTS < 4 << 20);

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
        let mut state = ServerState::default();
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
