//! Following a name: returns its memory, and again each time the name gets other memory.

use std::fmt;
use std::time::Duration;

use tokio::sync::watch::Receiver;
use tokio::time::{Instant, sleep_until};

use super::connect::is_final;
use super::session::Link;
use super::{Client, FetchOptions, LeaseState, Reconnect, RemoteBuffer};
use crate::limits::deadline;
use crate::share::Description;
use crate::{Error, MemoryError, Refusal, Result, ShareError};

/// How long one request waits for the name.
const WAIT: Duration = Duration::from_secs(3600);

/// The current state of a followed name.
#[derive(Debug)]
#[non_exhaustive]
pub enum Followed {
    /// Memory that was not returned before: imported, mapped, and with its own lease.
    Memory(Box<RemoteBuffer>),
    /// No memory at present. The caller should drop the memory returned before.
    Gone(Absence),
}

/// Why a followed name has no memory at present.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Absence {
    /// This client cannot fetch anything under the name: it was never published, it was withdrawn or deleted,
    /// or this client has no right to it. The server does not tell which.
    NotThere,
    /// The server is gone, or silent for longer than a lease, with the reason. The client keeps reconnecting.
    Away(String),
    /// The lease on the memory returned last is being withdrawn, or is lost.
    Lease(LeaseState),
    /// The client cannot fetch the memory at present, for example because of a limit, or because this client cannot use this memory
    /// ([`Error::Mismatched`], [`Error::NoCommonHandle`]). The next attempt follows after a pause.
    Unavailable(Error),
}

impl fmt::Display for Absence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotThere => f.write_str("nothing that this client may fetch is under the name"),
            Self::Away(why) => write!(f, "the server is away: {why}"),
            Self::Lease(state) => write!(f, "the lease is {state}"),
            Self::Unavailable(why) => write!(f, "not available: {why}"),
        }
    }
}

/// Follows a name across withdrawals, deletions, broken connections and exporter restarts.
///
/// [`next`](Self::next) returns states, not a history: a caller that is slower than the changes gets the
/// newest one. The same memory is returned again only after [`Followed::Gone`]. A name gets other memory only after the leases
/// on the memory before were withdrawn or lost, so a `Follow` waits for that; once the caller has released the memory, it looks
/// the name up from time to time, with the pauses of the client's [`reconnect`](super::ClientOptions::reconnect) options.
///
/// **Memory that was returned before belongs to the caller.** Its lease continues like that of any
/// [`RemoteBuffer`], also when other memory is returned next: nothing is unmapped or replaced under the caller, and
/// the exporter counts a holder until the caller drops it. So when `next` returns, wait for the GPU work that
/// uses the old memory, then drop or release it. Until then [`RemoteBuffer::state`] tells whether the
/// exporter still keeps it.
///
/// Nothing happens between two calls of `next`. A `Follow` keeps the client's connection open, as a clone of the
/// [`Client`] does.
///
/// ```
/// use egmem::driver::NodeId;
/// use egmem::exchange::{Address, Client, Followed, Server};
/// use egmem::{Buffer, Driver, Machine};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> egmem::exchange::Result<()> {
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let server = Server::options().listen(Address::loopback(0)).start().await?;
/// let client = Client::options(server.addresses().remove(0)).connect(&driver).await?;
///
/// let mut follow = client.follow("weights");
/// assert!(matches!(follow.next().await?, Followed::Gone(_)));
/// let buffer = Buffer::on(NodeId(0)).bytes(1 << 20).shareable().allocate(&driver)?;
/// let published = server.publish("weights", buffer).now()?;
/// let weights = match follow.next().await? {
///     Followed::Memory(weights) => weights,
///     other => panic!("{other:?}"),
/// };
/// assert_eq!(weights.len(), 1 << 20);
/// # drop(published);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Follow {
    fetch: FetchOptions,
    /// The lease on the memory returned last, until it is released.
    lease: Option<Receiver<LeaseState>>,
    /// That memory, until it is gone.
    seen: Option<Description>,
    /// Whether [`next`](Self::next) returned last that there is none.
    gone: bool,
    /// Whether nothing was under the name at the last attempt.
    absent: bool,
    /// Failed attempts in a row.
    failures: u32,
    /// No attempt before.
    not_before: Option<Instant>,
    ended: Option<Error>,
}

impl Follow {
    /// Returns the followed name.
    pub fn name(&self) -> &str {
        &self.fetch.ask.name
    }

    /// Waits until the state of the name differs from the state returned last, and returns the new one. The
    /// first call returns the current state. Failed attempts are repeated with the pauses of the client's
    /// [`reconnect`](super::ClientOptions::reconnect) options.
    ///
    /// # Errors
    /// An error ends the follow: each later call returns the same error.
    ///
    /// - [`Error::Refused`] with `forbidden` or `not_trusted`, [`NotTrusted`](crate::ShareError::NotTrusted):
    ///   this client is no longer admitted, or it lost its right to the memory and kept it until the server ended
    ///   the lease. A client that released the memory in time sees only [`Absence::Lease`], as for a name that was
    ///   withdrawn.
    /// - [`PeerLost`](crate::ShareError::PeerLost) once the client is closed, or its connection is broken and it does
    ///   not [dial again](super::Reconnect::never).
    /// - Those of [`FetchOptions::go`] that a later attempt cannot avoid:
    ///   [`InvalidArgument`](crate::MemoryError::InvalidArgument), [`Protocol`](crate::ShareError::Protocol), and
    ///   [`Error::Refused`] with `stale`, `invalid` or `unsupported`.
    ///
    /// # Cancel safety
    /// Dropping the future loses no state. A fetch in progress is dropped and leaves nothing leased or mapped; the
    /// next call begins it anew.
    pub async fn next(&mut self) -> Result<Followed> {
        if let Some(ended) = &self.ended {
            return Err(ended.clone());
        }
        let next = self.advance().await;
        if let Err(error) = &next {
            self.ended = Some(error.clone());
        }
        next
    }

    async fn advance(&mut self) -> Result<Followed> {
        let session = self.fetch.client.session().clone();
        loop {
            let (holds, gone) = (self.lease.is_some() && !self.gone, self.gone);
            let is_news = |link: &Link| {
                let why = link.away()?;
                let ends = matches!(link, Link::Over(_)) || is_final(why);
                (ends || !gone).then(|| (ends, why.clone()))
            };
            let absence = tokio::select! {
                biased;
                (ends, why) = session.link_is(is_news) => {
                    if ends {
                        return Err(why);
                    }
                    Absence::Away(why.to_string())
                }
                state = lost(self.lease.clone(), self.gone) => match state {
                    Some(LeaseState::Lost(why)) if is_final(&why) => return Err(why),
                    Some(state) => Absence::Lease(state),
                    None => {
                        self.lease = None;
                        continue;
                    }
                },
                fetched = self.attempt(), if !holds => match fetched {
                    Ok(memory) => return Ok(self.fetched(memory)),
                    Err(error) => match self.failed(error)? {
                        Some(absence) => absence,
                        None => continue,
                    },
                },
            };
            self.seen = None;
            if !std::mem::replace(&mut self.gone, true) {
                return Ok(Followed::Gone(absence));
            }
        }
    }

    /// Fetches the memory: after a pause, once the name is there if it was not, and once it has other memory if the caller has
    /// released the last one.
    async fn attempt(&self) -> Result<RemoteBuffer> {
        let (client, name) = (&self.fetch.client, &self.fetch.ask.name);
        if let Some(at) = self.not_before {
            sleep_until(at).await;
        }
        if self.absent {
            client.wait(name, WAIT).await?;
        }
        let mut looks = 0;
        while let Some(seen) = &self.seen {
            match client.entry(name).await? {
                Some(entry) if is_same(seen, &entry.memory) => {}
                _ => break,
            }
            sleep_until(self.pause(looks)).await;
            looks += 1;
        }
        self.fetch.clone().go().await
    }

    /// Returns when a pause after so many attempts ends.
    fn pause(&self, attempts: u32) -> Instant {
        let mut reconnect = self.fetch.client.session().dial.options.reconnect;
        if reconnect.is_never() {
            reconnect = Reconnect::default();
        }
        deadline(reconnect.pause(attempts).max(Duration::from_millis(1)))
    }

    /// Lets the next attempt begin after a pause, which grows with the failures in a row.
    fn pause_next(&mut self) {
        self.not_before = Some(self.pause(self.failures));
        self.failures = self.failures.saturating_add(1);
    }

    fn fetched(&mut self, memory: RemoteBuffer) -> Followed {
        self.lease = Some(memory.grant.lease.states());
        self.seen = Some(memory.description().clone());
        (self.gone, self.absent, self.failures, self.not_before) = (false, false, 0, None);
        Followed::Memory(Box::new(memory))
    }

    /// Returns why there is no memory; `None` if the next attempt tells.
    ///
    /// # Errors
    /// The error that ends the follow.
    fn failed(&mut self, error: Error) -> Result<Option<Absence>> {
        let session = self.fetch.client.session();
        if !session.is_open() {
            return Err(session.down());
        }
        if ends(&error) {
            return Err(error);
        }
        tracing::debug!(name = self.fetch.ask.name, %error, "followed memory is not available");
        if matches!(error.refusal(), Some(Refusal::NotFound | Refusal::Closing)) {
            // Until a request says that the name is there.
            if !std::mem::replace(&mut self.absent, true) {
                return Ok(Some(Absence::NotThere));
            }
            // A request said so, but the fetch after it was refused: the next request may say the same at once.
            self.pause_next();
            return Ok(None);
        }
        if self.absent && error.is_timed_out() {
            return Ok(None);
        }
        self.pause_next();
        let is_lost = error.is_peer_lost();
        Ok((!is_lost).then_some(Absence::Unavailable(error)))
    }
}

/// Waits until the lease is no longer held, or, if that is `known`, until it ends because this client is no longer let in;
/// `None` once it was released.
async fn lost(lease: Option<Receiver<LeaseState>>, known: bool) -> Option<LeaseState> {
    let Some(mut lease) = lease else {
        return std::future::pending().await;
    };
    let is_news = |state: &LeaseState| match state {
        LeaseState::Lost(why) if is_final(why) => true,
        state => !known && *state != LeaseState::Held,
    };
    let state = lease.wait_for(is_news).await;
    state.ok().map(|state| state.clone())
}

/// Returns whether both are the same bytes of the same memory.
fn is_same(one: &Description, other: &Description) -> bool {
    let identities = |memory: &Description| -> Vec<_> {
        let parts = memory.parts.iter();
        parts.map(|part| part.identity).collect()
    };
    (one.offset, one.len) == (other.offset, other.len) && identities(one) == identities(other)
}

/// Returns whether no later attempt can succeed.
fn ends(error: &Error) -> bool {
    use Refusal::{Invalid, Stale, Unsupported};
    is_final(error)
        || matches!(error.refusal(), Some(Invalid | Stale | Unsupported))
        || matches!(
            error,
            Error::Share(
                ShareError::Memory(MemoryError::InvalidArgument { .. })
                    | ShareError::Protocol { .. }
            )
        )
}

impl Client {
    /// Follows a name: [`Follow::next`] returns its memory, and again each time the name gets other memory.
    /// To set options, use [`FetchOptions::follow`].
    #[track_caller]
    pub fn follow(&self, name: impl Into<String>) -> Follow {
        self.fetch(name).follow()
    }
}

impl FetchOptions {
    /// Follows the name, and fetches its memory with these options each time. See [`Follow`].
    ///
    /// With [`instance`](Self::instance) the follow ends when the server restarts.
    pub fn follow(self) -> Follow {
        Follow {
            fetch: self,
            lease: None,
            seen: None,
            gone: false,
            absent: false,
            failures: 0,
            not_before: None,
            ended: None,
        }
    }
}
