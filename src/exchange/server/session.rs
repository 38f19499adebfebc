//! A session: a client's state beyond one connection, and its queued notices.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use zeroize::Zeroizing;

use super::quota::Counted;
use crate::driver::random;
use crate::per_driver::lock;
use crate::protocol::{Event, Refused, Secret};
use crate::tls::Credential;
use crate::{Error, PeerName, Result};

/// How many notices are counted at once.
const NOTICES: usize = 128;
/// Random bytes in a token, after the 8 bytes of the session's number. So only one comparison is made, in constant time.
const RANDOM: usize = 32;

/// A client's session. Without a connection it lives as long as its leases.
#[derive(Debug)]
pub(super) struct ServerSession {
    pub id: u64,
    pub peer: PeerName,
    /// Lets another connection of the same peer resume it.
    pub token: Secret,
    outbox: Mutex<Outbox>,
    /// Woken when the outbox has something.
    pub wake: Notify,
    /// The certificates that its peer was verified with, when it connected over TLS last.
    pub credential: Mutex<Option<Credential>>,
    /// Counts it.
    _counted: Counted,
}

/// A connection that has a session.
#[derive(Debug)]
pub(super) struct Attached {
    /// Unique among a server's connections.
    pub id: u64,
    /// The user at the other end of a Unix socket.
    pub user: Option<u32>,
    /// The connection's count, which one that the session moves to shares.
    pub counted: Weak<Counted>,
    /// Cancelled when it has lost the session: it ends, even while it writes.
    pub lost: CancellationToken,
}

#[derive(Debug)]
struct Outbox {
    /// The last connection.
    attached: Attached,
    notices: VecDeque<Event>,
    /// Leases whose grants this connection has not sent yet. Notices about them wait for it.
    unsent: Vec<u64>,
    limit: usize,
    overflown: bool,
    /// Set when the session has ended, with the reason.
    dismissed: Option<Refused>,
    /// Counts notices, many at a time.
    counted: Counted,
}

impl Outbox {
    /// Counts one more; if that fails, the connection is to end, and the lost notices are sent anew when the session is
    /// resumed.
    fn has_room(&mut self) -> bool {
        let counted = self.counted.amount();
        let has_room =
            self.notices.len() < counted || self.counted.resize(counted + NOTICES).is_ok();
        self.overflown |= !has_room;
        has_room
    }

    fn shrink(&mut self) {
        if self.notices.is_empty() {
            self.notices.shrink_to(16);
            // Shrinking never fails.
            let _ = self.counted.resize(0);
        }
    }

    /// Takes the first notice that need not wait for a grant.
    fn pop(&mut self) -> Option<Event> {
        let is_ready = |notice: &Event| match notice {
            Event::Withdrawing(one) => !self.unsent.contains(&one.lease),
            Event::Ended(one) => !self.unsent.contains(&one.lease),
            _ => true,
        };
        let ready = self.notices.iter().position(is_ready)?;
        self.notices.remove(ready)
    }
}

/// The next step of a connection.
#[derive(Debug, PartialEq)]
pub(super) enum Next {
    /// Send this.
    Notice(Event),
    /// Wait.
    Nothing,
    /// Send why the session has ended, then end.
    Dismissed(Refused),
    /// End: the peer does not read its notices.
    Overflown,
}

impl ServerSession {
    /// Creates the session of a connection, with its count; at most `limit` notices wait for it, which `events` counts.
    ///
    /// # Errors
    /// That of the system's random numbers.
    pub fn new(
        id: u64,
        peer: PeerName,
        attached: Attached,
        limit: usize,
        [counted, events]: [Counted; 2],
    ) -> Result<Self> {
        let failed = |error| Error::system("reading random bytes", &error);
        let random = random::<RANDOM>().map(Zeroizing::new).map_err(failed)?;
        let mut token = Zeroizing::new([0; 8 + RANDOM]);
        token[..8].copy_from_slice(&id.to_be_bytes());
        token[8..].copy_from_slice(&random[..]);
        // 40 bytes are never too many for a secret.
        let token =
            Secret::new(&token[..]).ok_or_else(|| Error::invalid("token", "it is too long"))?;
        Ok(Self {
            id,
            peer,
            token,
            outbox: Mutex::new(Outbox {
                attached,
                notices: VecDeque::new(),
                unsent: Vec::new(),
                limit,
                overflown: false,
                dismissed: None,
                counted: events,
            }),
            wake: Notify::new(),
            credential: Mutex::default(),
            _counted: counted,
        })
    }

    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        lock(&self.outbox)
    }

    /// Moves the session to another connection; the previous one ends. Notices are kept or repeated.
    pub fn take_over(&self, attached: Attached) {
        let mut outbox = self.outbox();
        std::mem::replace(&mut outbox.attached, attached)
            .lost
            .cancel();
        outbox.unsent = Vec::new();
        // After an overflow, some were lost: the client asks which of its leases have ended.
        if std::mem::take(&mut outbox.overflown) {
            outbox.notices = VecDeque::new();
        }
        outbox.shrink();
    }

    /// Returns the user at the other end, if its connection is a Unix socket.
    pub fn user(&self) -> Option<u32> {
        self.outbox().attached.user
    }

    /// Returns the count of its connection, if it has one.
    pub fn counted(&self) -> Option<Arc<Counted>> {
        self.outbox().attached.counted.upgrade()
    }

    /// Ends the connection. The peer may resume the session.
    pub fn cut(&self) {
        self.outbox().attached.lost.cancel();
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
        self.outbox().attached.id == connection
    }

    /// Keeps notices about a lease back until [`granted`](Self::granted): its connection is about to send the grant.
    pub fn grants(&self, lease: u64) {
        self.outbox().unsent.push(lease);
    }

    /// Ends that: its connection has sent the grant.
    pub fn granted(&self, lease: u64) {
        self.outbox().unsent.retain(|unsent| *unsent != lease);
        self.wake.notify_one();
    }

    /// Queues a notice for the peer.
    pub fn notify(&self, notice: Event) {
        let mut outbox = self.outbox();
        if outbox.notices.len() >= outbox.limit {
            outbox.overflown = true;
        } else if outbox.has_room() {
            outbox.notices.push_back(notice);
        }
        drop(outbox);
        self.wake.notify_one();
    }

    /// Returns how many notices wait to be sent.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.outbox().notices.len()
    }

    /// Returns the next step of `connection`.
    pub fn next(&self, connection: u64) -> Next {
        let mut outbox = self.outbox();
        if outbox.attached.id != connection {
            return Next::Nothing;
        }
        if let Some(why) = &outbox.dismissed {
            return Next::Dismissed(why.clone());
        }
        if outbox.overflown {
            return Next::Overflown;
        }
        let next = outbox.pop().map_or(Next::Nothing, Next::Notice);
        outbox.shrink();
        next
    }
}

/// A server's sessions by their numbers.
pub(super) type Sessions = HashMap<u64, Arc<ServerSession>>;

/// Returns the session with this token. Knowing its number, with which a token begins, does not reveal the token.
pub(super) fn with_token<'a>(
    sessions: &'a Sessions,
    token: &Secret,
) -> Option<&'a Arc<ServerSession>> {
    let number = token.expose().first_chunk()?;
    let session = sessions.get(&u64::from_be_bytes(*number))?;
    (session.token == *token).then_some(session)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Limits;
    use crate::protocol::{Closing, Withdrawing};
    use crate::server::quota::{Quota, What};

    const PEER: PeerName = PeerName::User(1);

    fn quota() -> Arc<Quota> {
        Quota::new(&Limits::default(), 1 << 20)
    }

    fn attached(id: u64) -> Attached {
        Attached {
            id,
            user: None,
            counted: Weak::new(),
            lost: CancellationToken::new(),
        }
    }

    fn session(limit: usize) -> ServerSession {
        counted_session(1, limit, &quota())
    }

    fn counted_session(id: u64, limit: usize, quota: &Arc<Quota>) -> ServerSession {
        let counted = [What::Session, What::Event].map(|what| quota.none(&PEER, what));
        ServerSession::new(id, PEER, attached(10), limit, counted).unwrap()
    }

    fn closing(ms: u64) -> Event {
        Event::Closing(Closing { ms })
    }

    fn withdrawing(lease: u64) -> Event {
        Event::Withdrawing(Withdrawing { lease, ms: 1 })
    }

    #[test]
    fn tokens_differ_and_name_their_session() {
        let mut sessions = Sessions::default();
        for id in [7, 8] {
            sessions.insert(id, Arc::new(counted_session(id, 1, &quota())));
        }
        let token = sessions[&7].token.clone();
        assert_eq!(with_token(&sessions, &token).unwrap().id, 7);
        for at in [0, 7, 8, 39] {
            let mut other = token.expose().to_vec();
            other[at] ^= 15;
            let other = Secret::new(&other).unwrap();
            assert!(with_token(&sessions, &other).is_none(), "{at}");
        }
        for short in [&[][..], &token.expose()[..8], &token.expose()[..39]] {
            let short = Secret::new(short).unwrap();
            assert!(with_token(&sessions, &short).is_none());
        }
    }

    #[test]
    fn notices_come_in_order() {
        let session = session(9);
        session.notify(closing(1));
        session.notify(closing(2));
        assert_eq!(session.next(10), Next::Notice(closing(1)));
        assert_eq!(session.next(10), Next::Notice(closing(2)));
        assert_eq!(session.next(10), Next::Nothing);
    }

    #[test]
    fn a_peer_that_does_not_read_is_dropped() {
        let one = session(1);
        one.notify(closing(1));
        assert_eq!(one.next(10), Next::Notice(closing(1)));
        one.notify(closing(2));
        one.notify(closing(3));
        assert_eq!(one.next(10), Next::Overflown);
    }

    #[test]
    fn queued_notices_of_all_sessions_are_counted_until_they_are_sent() {
        let quota = quota();
        let one = counted_session(1, usize::MAX, &quota);
        let mut most = quota.count(&PEER, What::Event, 1).unwrap();
        while most.resize(most.amount() + NOTICES).is_ok() {}
        most.resize(most.amount() - 2 * NOTICES).unwrap();
        let mut sent = 0;
        while !one.outbox().overflown {
            one.notify(closing(sent));
            sent += 1;
        }
        assert!(
            (NOTICES as u64..=2 * NOTICES as u64 + 1).contains(&sent),
            "{sent}"
        );
        assert_eq!(one.next(10), Next::Overflown);
        let another = counted_session(2, usize::MAX, &quota);
        one.take_over(attached(11));
        assert_eq!(one.outbox().counted.amount(), 0);
        another.notify(closing(1));
        assert_eq!(another.next(10), Next::Notice(closing(1)));
        one.notify(closing(1));
        assert_eq!(one.outbox().counted.amount(), NOTICES);
        while one.next(11) != Next::Nothing {}
        assert_eq!(one.outbox().counted.amount(), 0);
    }

    #[test]
    fn notices_wait_for_the_grants_of_their_leases_alone() {
        let session = session(9);
        session.grants(1);
        session.grants(2);
        for lease in [1, 2, 3] {
            session.notify(withdrawing(lease));
        }
        assert_eq!(session.next(10), Next::Notice(withdrawing(3)));
        assert_eq!(session.next(10), Next::Nothing, "no grant was sent");
        session.granted(2);
        assert_eq!(session.next(10), Next::Notice(withdrawing(2)));
        assert_eq!(session.next(10), Next::Nothing);
        session.take_over(attached(11));
        assert_eq!(session.next(11), Next::Notice(withdrawing(1)));
    }

    #[test]
    fn another_connection_takes_over() {
        let session = session(9);
        let lost = session.outbox().attached.lost.clone();
        session.notify(closing(1));
        session.take_over(attached(11));
        assert!(lost.is_cancelled());
        assert_eq!(session.next(10), Next::Nothing);
        assert!(session.is_of(11) && !session.is_of(10));
        assert_eq!(session.next(11), Next::Notice(closing(1)));
        session.notify(closing(2));
        session.take_over(attached(12));
        assert_eq!(session.next(12), Next::Notice(closing(2)));
    }
}
