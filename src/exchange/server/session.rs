//! A session: a client's state beyond one connection, and its queued notices.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::Notify;

use crate::PeerName;
use crate::account::{self, Account, Charge, ENTRY, PREPAID, SESSION, shrink};
use crate::per_driver::lock;
use crate::protocol::{Event, Refused, Secret};
use crate::tls::Credential;

/// A client's session. Without a connection it lives as long as its leases.
#[derive(Debug)]
pub(super) struct ServerSession {
    pub id: u64,
    pub peer: PeerName,
    /// Lets another connection of the same peer resume it.
    pub token: Secret,
    outbox: Mutex<Outbox>,
    /// Woken when the outbox has something, or the connection has lost the session.
    pub wake: Notify,
    account: Arc<Account>,
    /// The certificates that its peer was verified with, when it connected over TLS last.
    pub credential: Mutex<Option<Credential>>,
}

#[derive(Debug)]
struct Outbox {
    connection: u64,
    /// The user at the other end of a Unix socket.
    user: Option<u32>,
    notices: VecDeque<Event>,
    /// Grants that this connection has not sent yet. Notices wait for them: they may be about these leases.
    unsent: usize,
    limit: usize,
    overflown: bool,
    /// Set when the session has ended, with the reason.
    dismissed: Option<Refused>,
    /// Watched names that have changed, and whether this peer could see them before.
    news: BTreeMap<Arc<str>, bool>,
    /// The bytes of notices and changed names, and the charge for them and the session.
    bytes: usize,
    charge: Charge,
}

impl Outbox {
    /// Reserves `more` bytes; if that fails, the connection is to end, and the lost notices are sent anew
    /// when the session is resumed.
    fn grow(&mut self, more: usize) -> bool {
        let bytes = self.bytes + more;
        let beyond = bytes.saturating_sub(PREPAID);
        let fits = self.charge.resize(SESSION + beyond).is_ok();
        match fits {
            true => self.bytes = bytes,
            false => self.overflown = true,
        }
        fits
    }

    fn shrink(&mut self, less: usize) {
        self.bytes -= less;
        let beyond = self.bytes.saturating_sub(PREPAID);
        // Shrinking a charge never fails.
        let _ = self.charge.resize(SESSION + beyond);
        if self.notices.is_empty() {
            self.notices.shrink_to(16);
        }
    }

    /// Drops the changed names, and with `notices` the notices too.
    fn clear(&mut self, notices: bool) {
        let mut bytes: usize = self.news.keys().map(|name| news_bytes(name)).sum();
        self.news.clear();
        if notices {
            bytes += self.notices.iter().map(account::event).sum::<usize>();
            self.notices.clear();
        }
        self.shrink(bytes);
    }
}

/// Returns the bytes of a changed name in the queue.
fn news_bytes(name: &str) -> usize {
    2 * ENTRY + name.len()
}

/// The next step of a connection.
#[derive(Debug, PartialEq)]
pub(super) enum Next {
    /// Send this.
    Notice(Event),
    /// Send the entry under this name now, or, if the peer could see it before, that it is gone.
    News(Arc<str>, bool),
    /// Wait.
    Nothing,
    /// End: another connection has taken the session over.
    TakenOver,
    /// Send why the session has ended, then end.
    Dismissed(Refused),
    /// End: the peer does not read its notices.
    Overflown,
}

impl ServerSession {
    /// Creates the session of a connection, and its user; at most `limit` notices wait for it. The charge is of [`SESSION`]
    /// bytes.
    pub fn new(
        id: u64,
        peer: PeerName,
        token: Secret,
        (connection, user): (u64, Option<u32>),
        limit: usize,
        (account, charge): (Arc<Account>, Charge),
    ) -> Self {
        Self {
            id,
            peer,
            token,
            outbox: Mutex::new(Outbox {
                connection,
                user,
                notices: VecDeque::new(),
                unsent: 0,
                limit,
                overflown: false,
                dismissed: None,
                news: BTreeMap::new(),
                bytes: 0,
                charge,
            }),
            wake: Notify::new(),
            account,
            credential: Mutex::default(),
        }
    }

    /// Returns the account of its peer.
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        lock(&self.outbox)
    }

    /// Moves the session to another connection; the previous one ends. Notices about leases are kept or repeated; news of
    /// names are dropped.
    pub fn take_over(&self, connection: u64, user: Option<u32>) {
        let mut outbox = self.outbox();
        outbox.connection = connection;
        outbox.user = user;
        outbox.unsent = 0;
        // After an overflow, some were lost: the client asks which of its leases have ended.
        let overflown = std::mem::take(&mut outbox.overflown);
        outbox.clear(overflown);
        drop(outbox);
        // For the previous connection, which may wait in either of the two; the other one checks anyway.
        self.wake.notify_waiters();
        self.wake.notify_one();
    }

    /// Returns the user at the other end, if its connection is a Unix socket.
    pub fn user(&self) -> Option<u32> {
        self.outbox().user
    }

    /// Ends the connection. The peer may resume the session.
    pub fn cut(&self) {
        self.outbox().overflown = true;
        self.wake.notify_one();
    }

    /// Ends the session. Its connection sends the peer the reason, and nothing after that.
    pub fn dismiss(&self, why: Refused) {
        self.outbox().dismissed.get_or_insert(why);
        self.wake.notify_one();
    }

    /// Returns whether the session has ended early: then no request is answered.
    pub fn is_dismissed(&self) -> bool {
        self.outbox().dismissed.is_some()
    }

    /// Returns whether that connection has the session.
    pub fn is_of(&self, connection: u64) -> bool {
        self.outbox().connection == connection
    }

    /// Keeps notices back until [`granted`](Self::granted): its connection is about to send a grant.
    pub fn grants(&self) {
        self.outbox().unsent += 1;
    }

    /// Ends that, when `connection` has sent the grant.
    pub fn granted(&self, connection: u64) {
        let mut outbox = self.outbox();
        if outbox.connection == connection {
            outbox.unsent = outbox.unsent.saturating_sub(1);
        }
        drop(outbox);
        self.wake.notify_one();
    }

    /// Queues a notice for the peer.
    pub fn tell(&self, notice: Event) {
        let mut outbox = self.outbox();
        if outbox.notices.len() >= outbox.limit {
            outbox.overflown = true;
        } else if outbox.grow(account::event(&notice)) {
            outbox.notices.push_back(notice);
        }
        drop(outbox);
        self.wake.notify_one();
    }

    /// Notes that a watched name has changed, which this peer could see before, or not. At most `limit` names
    /// wait; changes of the same name are sent once.
    pub fn news_of(&self, name: &Arc<str>, seen_before: bool, limit: usize) {
        let mut outbox = self.outbox();
        if let Some(seen) = outbox.news.get_mut(name) {
            *seen |= seen_before;
        } else if outbox.news.len() >= limit {
            outbox.overflown = true;
        } else if outbox.grow(news_bytes(name)) {
            outbox.news.insert(Arc::clone(name), seen_before);
        }
        drop(outbox);
        self.wake.notify_one();
    }

    /// Returns the next step of `connection`.
    pub fn next(&self, connection: u64) -> Next {
        let mut outbox = self.outbox();
        if outbox.connection != connection {
            return Next::TakenOver;
        }
        if let Some(why) = &outbox.dismissed {
            return Next::Dismissed(why.clone());
        }
        if outbox.overflown {
            return Next::Overflown;
        }
        if outbox.unsent > 0 {
            return Next::Nothing;
        }
        if let Some(notice) = outbox.notices.pop_front() {
            outbox.shrink(account::event(&notice));
            return Next::Notice(notice);
        }
        match outbox.news.pop_first() {
            Some((name, seen_before)) => {
                outbox.shrink(news_bytes(&name));
                Next::News(name, seen_before)
            }
            None => Next::Nothing,
        }
    }
}

/// A server's sessions, each with its charge to the limits on sessions.
#[derive(Debug, Default)]
pub(super) struct Sessions(HashMap<u64, (Arc<ServerSession>, Charge)>);

impl Sessions {
    pub fn insert(&mut self, session: Arc<ServerSession>, charge: Charge) {
        self.0.insert(session.id, (session, charge));
    }

    pub fn get(&self, id: u64) -> Option<&Arc<ServerSession>> {
        self.0.get(&id).map(|(session, _)| session)
    }

    pub fn remove(&mut self, id: u64) {
        self.0.remove(&id);
        shrink(&mut self.0);
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<ServerSession>> {
        self.0.values().map(|(session, _)| session)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Limits;
    use crate::account::Accounts;
    use crate::protocol::Closing;

    fn session(limit: usize) -> ServerSession {
        session_within(limit, Limits::default().bytes)
    }

    fn session_within(limit: usize, bytes: usize) -> ServerSession {
        let token = Secret::new(b"token").unwrap();
        let peer = PeerName::User(1);
        let accounts = Accounts::new(&Limits {
            bytes,
            ..Limits::default()
        });
        let account = accounts.of(&peer);
        let charge = account.charge(SESSION).unwrap();
        ServerSession::new(1, peer, token, (10, None), limit, (account, charge))
    }

    fn closing(ms: u64) -> Event {
        Event::Closing(Closing { ms })
    }

    #[test]
    fn notices_come_in_order_and_before_news() {
        let session = session(9);
        session.news_of(&"b".into(), false, 9);
        session.tell(closing(1));
        session.tell(closing(2));
        session.news_of(&"a".into(), false, 9);
        session.news_of(&"b".into(), true, 9);
        assert_eq!(session.next(10), Next::Notice(closing(1)));
        assert_eq!(session.next(10), Next::Notice(closing(2)));
        assert_eq!(session.next(10), Next::News("a".into(), false));
        assert_eq!(session.next(10), Next::News("b".into(), true));
        assert_eq!(session.next(10), Next::Nothing);
    }

    #[test]
    fn a_peer_that_does_not_read_is_dropped() {
        let one = session(1);
        one.tell(closing(1));
        assert_eq!(one.next(10), Next::Notice(closing(1)));
        one.tell(closing(2));
        one.tell(closing(3));
        assert_eq!(one.next(10), Next::Overflown);
        let news = session(1);
        news.news_of(&"a".into(), true, 1);
        news.news_of(&"a".into(), true, 1);
        assert_eq!(news.next(10), Next::News("a".into(), true));
        news.news_of(&"a".into(), true, 1);
        news.news_of(&"b".into(), true, 1);
        assert_eq!(news.next(10), Next::Overflown);
    }

    #[test]
    fn queued_notices_are_charged_until_they_are_sent() {
        let session = session_within(usize::MAX, SESSION + PREPAID);
        let mut told = 0;
        while !session.outbox().overflown {
            session.tell(closing(told));
            session.news_of(&told.to_string().into(), true, usize::MAX);
            told += 1;
        }
        assert!((8..64).contains(&told), "{told}");
        assert_eq!(session.next(10), Next::Overflown);
        session.take_over(11, None);
        assert_eq!(session.outbox().bytes, 0);
        session.tell(closing(1));
        session.news_of(&"a".into(), true, 9);
        assert!(session.outbox().bytes > 0);
        while session.next(11) != Next::Nothing {}
        assert_eq!(session.outbox().bytes, 0);
    }

    #[test]
    fn notices_wait_for_grants() {
        let session = session(9);
        session.grants();
        session.grants();
        session.tell(closing(1));
        session.granted(10);
        assert_eq!(session.next(10), Next::Nothing, "the other was not sent");
        session.granted(10);
        assert_eq!(session.next(10), Next::Notice(closing(1)));
        session.grants();
        session.tell(closing(2));
        session.take_over(11, None);
        session.granted(10);
        assert_eq!(session.next(11), Next::Notice(closing(2)));
    }

    #[tokio::test]
    async fn another_connection_takes_over() {
        let session = session(9);
        session.tell(closing(1));
        session.news_of(&"a".into(), true, 9);
        session.take_over(11, None);
        assert_eq!(session.next(10), Next::TakenOver);
        assert!(session.is_of(11) && !session.is_of(10));
        assert_eq!(session.next(11), Next::Notice(closing(1)));
        assert_eq!(session.next(11), Next::Nothing, "it has to watch anew");
        session.tell(closing(2));
        session.take_over(12, None);
        assert_eq!(session.next(12), Next::Notice(closing(2)));
    }
}
