//! A session: a client's state beyond one connection, and its queued notices.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Instant;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use zeroize::Zeroizing;

use super::publication::HolderProcess;
use super::quota::{Counted, LargeAnswers};
use crate::driver::random;
use crate::limits::millis;
use crate::per_driver::lock;
use crate::protocol::{Event, Refused, Secret};
use crate::share::BootId;
use crate::tls::Credential;
use crate::{Error, PeerName, Result};

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

/// A connection that has begun or resumed a session, besides its two ends.
#[derive(Debug)]
pub(super) struct Link {
    pub session: Arc<ServerSession>,
    /// Over a Unix socket, where frames may carry fds: the user at the other end.
    pub user: Option<u32>,
    /// The permits for large answers.
    pub large: LargeAnswers,
    /// Over a Unix socket, the process that connected.
    pub process: Option<HolderProcess>,
    /// The client's machine, as the client claims.
    pub boot: BootId,
    /// Cancelled when it has lost the session: it ends, even while it writes.
    pub lost: CancellationToken,
    /// Counts it. A connection that the session moves to shares this.
    pub counted: Arc<Counted>,
}

impl Link {
    /// Returns the process that connected over a Unix socket.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|process| process.pid)
    }
}

#[derive(Debug, Default)]
struct Outbox {
    /// The last connection, if it lasts.
    link: Weak<Link>,
    /// The newest notice about each lease. The count of a live lease covers its notice; the notice of an ended lease has
    /// its own count.
    notices: BTreeMap<u64, (Event, Option<Counted>)>,
    /// The server's end, and whether the connection was told of it.
    closing: Option<Instant>,
    told: bool,
    /// Set when the session has ended, with the reason.
    dismissed: Option<Refused>,
}

impl Outbox {
    fn is_of(&self, link: &Link) -> bool {
        std::ptr::eq(self.link.as_ptr(), link)
    }

    /// Takes the first notice.
    fn pop(&mut self) -> Option<Event> {
        if let Some(until) = self.closing
            && !std::mem::replace(&mut self.told, true)
        {
            let ms = millis(until.saturating_duration_since(Instant::now()));
            return Some(Event::Closing { ms });
        }
        self.notices.pop_first().map(|(_, (notice, _))| notice)
    }
}

impl ServerSession {
    /// Creates a session that has no connection yet, with its count.
    ///
    /// # Errors
    /// That of the system's random numbers.
    pub fn new(id: u64, peer: PeerName, counted: Counted) -> Result<Self> {
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
            outbox: Mutex::default(),
            wake: Notify::new(),
            credential: Mutex::default(),
            _counted: counted,
        })
    }

    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        lock(&self.outbox)
    }

    /// Gives the session to a connection; the previous one ends. Notices are kept or repeated.
    pub fn take_over(&self, link: &Arc<Link>) {
        self.cut();
        let mut outbox = self.outbox();
        outbox.link = Arc::downgrade(link);
        outbox.told = false;
    }

    /// Returns its connection, if it has one.
    pub fn link(&self) -> Option<Arc<Link>> {
        self.outbox().link.upgrade()
    }

    /// Ends the connection; returns whether it had one that had not ended. The peer may resume the session.
    pub fn cut(&self) -> bool {
        let link = self.link().filter(|link| !link.lost.is_cancelled());
        link.inspect(|link| link.lost.cancel()).is_some()
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
    pub fn is_of(&self, link: &Link) -> bool {
        self.outbox().is_of(link)
    }

    /// Tells the peer about a lease, instead of what it was to be told about that lease before.
    pub fn notify(&self, lease: u64, notice: Event, counted: Option<Counted>) {
        self.outbox().notices.insert(lease, (notice, counted));
        self.wake.notify_one();
    }

    /// Drops the notice about a lease that its holder has released.
    pub fn forget(&self, lease: u64) {
        self.outbox().notices.remove(&lease);
    }

    /// Tells the peer that the server ends by then; each later connection of it too.
    pub fn notify_closing(&self, until: Instant) {
        let mut outbox = self.outbox();
        (outbox.closing, outbox.told) = (Some(until), false);
        drop(outbox);
        self.wake.notify_one();
    }

    /// Takes the next notice.
    #[cfg(test)]
    pub fn notice(&self) -> Option<Event> {
        self.outbox().pop()
    }

    /// Returns how many notices wait to be sent.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.outbox().notices.len()
    }

    /// Returns the next event to send on that connection, if there is one: the last one is why the session has ended.
    pub fn next(&self, link: &Link) -> Option<Event> {
        let mut outbox = self.outbox();
        if !outbox.is_of(link) {
            return None;
        }
        match &outbox.dismissed {
            Some(why) => Some(Event::Dismissed(why.clone())),
            None => outbox.pop(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Limits;
    use crate::server::quota::{Quota, What};

    const PEER: PeerName = PeerName::User(1);

    fn quota() -> Arc<Quota> {
        Quota::new(&Limits::default(), 1 << 20)
    }

    fn session() -> Arc<ServerSession> {
        let counted = quota().count(&PEER, What::Session, 1).unwrap();
        Arc::new(ServerSession::new(1, PEER, counted).unwrap())
    }

    /// Gives the session to a new connection.
    fn take_over(session: &Arc<ServerSession>) -> Arc<Link> {
        let link = Arc::new(Link {
            session: Arc::clone(session),
            user: None,
            large: LargeAnswers::new(1),
            process: None,
            boot: BootId::from_bytes([0; 16]),
            lost: CancellationToken::new(),
            counted: Arc::new(quota().count(&PEER, What::Connection, 1).unwrap()),
        });
        session.take_over(&link);
        link
    }

    fn withdrawing(lease: u64, ms: u64) -> Event {
        Event::Withdrawing { lease, ms }
    }

    fn withdraw(session: &ServerSession, lease: u64) {
        session.notify(lease, withdrawing(lease, 1), None);
    }

    #[test]
    fn only_the_newest_notice_of_a_lease_comes_and_the_servers_end_first() {
        let session = session();
        let link = take_over(&session);
        session.notify(2, withdrawing(2, 1), None);
        session.notify(1, withdrawing(1, 1), None);
        let now = Instant::now();
        session.notify_closing(now + Duration::from_secs(300));
        session.notify(2, withdrawing(2, 9), None);
        session.notify_closing(now);
        let closing = Event::Closing { ms: 0 };
        for notice in [closing.clone(), withdrawing(1, 1), withdrawing(2, 9)] {
            assert_eq!(session.next(&link), Some(notice));
        }
        assert_eq!(session.next(&link), None);
        // The notice may have been lost with the connection.
        let other = take_over(&session);
        assert_eq!(session.next(&other), Some(closing));
        assert_eq!(session.next(&other), None);
    }

    #[test]
    fn a_notice_of_an_ended_lease_is_counted_until_it_is_sent() {
        let (session, quota) = (session(), quota());
        let counted = quota.count(&PEER, What::Record, 1).unwrap();
        session.notify(1, withdrawing(1, 1), Some(counted));
        let other = take_over(&session);
        assert_eq!(quota.used(What::Record), 1);
        assert_eq!(session.next(&other), Some(withdrawing(1, 1)));
        assert_eq!(quota.used(What::Record), 0);
    }

    #[test]
    fn another_connection_takes_over() {
        let session = session();
        let link = take_over(&session);
        withdraw(&session, 1);
        let other = take_over(&session);
        assert!(link.lost.is_cancelled());
        assert_eq!(session.next(&link), None);
        assert!(session.is_of(&other) && !session.is_of(&link));
        assert_eq!(session.next(&other), Some(withdrawing(1, 1)));
        withdraw(&session, 2);
        let third = take_over(&session);
        assert_eq!(session.next(&third), Some(withdrawing(2, 1)));
    }
}
