//! Following a name: returns its memory, and again each time the name gets other memory.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch::Receiver;
use tokio::time::{Instant, sleep_until};

use super::connect::is_final;
use super::session::Link;
use super::watch::{Watch, WatchEvent};
use super::{Client, FetchOptions, LeaseState, Reconnect, RemoteBuffer};
use crate::limits::deadline;
use crate::share::Description;
use crate::{Error, MemoryError, Refusal, Result, ShareError};

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
    /// The client cannot fetch the memory, or cannot watch the name, at present. If this client cannot use this memory
    /// ([`Error::Mismatched`], [`Error::NoCommonHandle`], [`Error::Refused`] with `read_only`, `wrong_owner` or
    /// `no_common_handle`), the next attempt follows when the name gets other memory, another owner or other access;
    /// otherwise after a pause.
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

/// The memory that was returned last.
#[derive(Debug)]
struct Returned {
    /// What the name denoted when it was fetched, and what the server granted.
    memories: [Description; 2],
    lease: Receiver<LeaseState>,
}

/// Follows a name across withdrawals, deletions, broken connections and exporter restarts.
///
/// [`next`](Self::next) returns states, not a history: a caller that is slower than the changes gets the
/// newest one. The same memory (same identity and bounds) is returned only once, with two exceptions: after
/// [`Followed::Gone`], and after the lease on it was withdrawn or lost, because then the exporter no longer
/// keeps the memory for the caller.
///
/// **Memory that was returned before belongs to the caller.** Its lease continues like that of any
/// [`RemoteBuffer`], also when other memory is returned next: nothing is unmapped or replaced under the caller, and
/// the exporter counts a holder until the caller drops it. So when `next` returns, wait for the GPU work that
/// uses the old memory, then drop or release it. Until then [`RemoteBuffer::state`] tells whether the
/// exporter still keeps it.
///
/// Nothing happens between two calls of `next`. The server keeps the watch on the name for as long as the connection
/// lasts; a session can watch 64 names or prefixes. A `Follow` keeps the client's connection open, as a clone of the
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
    watch: Watch,
    /// Why there is no memory, if there is none.
    absence: Option<Absence>,
    /// Whether [`next`](Self::next) returned last that there is none.
    gone: bool,
    returned: Option<Returned>,
    /// Failed fetches and watches in a row.
    failures: u32,
    /// No fetch before.
    fetch_at: Option<Instant>,
    /// No request for a watch before.
    watch_at: Option<Instant>,
    ended: Option<Error>,
}

impl Follow {
    /// Returns the followed name.
    pub fn name(&self) -> &str {
        &self.fetch.name
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
    ///   the lease. A client that released the memory in time sees only [`Absence::NotThere`], as for a name that
    ///   does not exist.
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
        let session = Arc::clone(self.fetch.client.session());
        let end = |link: &Link| {
            let why = link.away()?;
            let ends = matches!(link, Link::Over(_)) || is_final(why);
            ends.then(|| why.clone())
        };
        loop {
            if !self.gone
                && let Some(absence) = &self.absence
            {
                self.gone = true;
                return Ok(Followed::Gone(absence.clone()));
            }
            let due = self.fetch_due();
            let options = self.fetch.clone();
            let fetch = async {
                match due {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
                options.go().await
            };
            tokio::pin!(fetch);
            // The fetch goes on while nothing is learned of the name.
            loop {
                tokio::select! {
                    biased;
                    why = session.link_is(end) => return Err(why),
                    state = lease_change(&mut self.returned) => match state {
                        LeaseState::Lost(why) if is_final(&why) => return Err(why),
                        state if state != LeaseState::Held && !self.gone => {
                            self.gone = true;
                            return Ok(Followed::Gone(Absence::Lease(state)));
                        }
                        _ => {}
                    },
                    updated = update(&mut self.watch, self.watch_at) => match updated {
                        Ok(()) if self.has_changed() || due.is_none() => break,
                        Ok(()) => {}
                        Err(error) => {
                            self.watch_failed(error)?;
                            break;
                        }
                    },
                    fetched = &mut fetch => match fetched {
                        Ok(memory) => return Ok(self.fetched(memory)),
                        Err(error) => {
                            self.fetch_failed(error)?;
                            break;
                        }
                    },
                }
            }
        }
    }

    /// Returns when to fetch, if the caller does not have the memory that the name denotes.
    fn fetch_due(&self) -> Option<Instant> {
        let may_fetch = self.watch.is_current() && !self.is_unusable();
        let entry = self.watch.names().next().filter(|_| may_fetch)?;
        let is_entry = |memory: &Description| is_same(memory, &entry.memory);
        let has = self.holds() && self.returned.as_ref()?.memories.iter().any(is_entry);
        (!has).then(|| self.fetch_at.unwrap_or_else(Instant::now))
    }

    /// Returns whether the exporter keeps the memory returned last, and the caller was not told to drop it.
    fn holds(&self) -> bool {
        let returned = self.returned.as_ref().filter(|_| !self.gone);
        returned.is_some_and(|returned| *returned.lease.borrow() == LeaseState::Held)
    }

    /// Takes over what the watch knows of the name. Returns whether a fetch in progress is of other memory.
    fn has_changed(&mut self) -> bool {
        self.watch_at = None;
        let mut changed = false;
        for event in self.watch.events.drain(..) {
            changed |= !matches!(event, WatchEvent::Missed(_));
            if let WatchEvent::Away(why) = event {
                self.absence = Some(Absence::Away(why));
            }
        }
        if !self.watch.is_current() {
            return changed;
        }
        // Over a new connection this client may get other handles.
        let is_usable_now = std::mem::take(&mut self.watch.listed_anew) && self.is_unusable();
        if self.watch.names().next().is_none() {
            self.absence = Some(Absence::NotThere);
        } else if changed || is_usable_now || self.is_over() {
            self.absence = None;
            self.failures = 0;
            self.fetch_at = None;
        }
        changed
    }

    /// Returns whether a current watch that has the name ends the absence: not that of a fetch which was refused, and which is
    /// repeated after its pause.
    fn is_over(&self) -> bool {
        match self.absence {
            Some(Absence::Away(_)) => true,
            Some(Absence::NotThere) => self.fetch_at.is_none(),
            _ => false,
        }
    }

    /// Returns whether this client cannot use the memory that is listed.
    fn is_unusable(&self) -> bool {
        matches!(&self.absence, Some(Absence::Unavailable(why)) if is_of_this_memory(why))
    }

    fn fetched(&mut self, memory: RemoteBuffer) -> Followed {
        let granted = memory.description().clone();
        let listed = self.watch.names().next().map(|entry| entry.memory.clone());
        self.returned = Some(Returned {
            memories: [listed.unwrap_or_else(|| granted.clone()), granted],
            lease: memory.grant.lease.states(),
        });
        self.gone = false;
        self.absence = None;
        self.failures = 0;
        self.fetch_at = None;
        Followed::Memory(Box::new(memory))
    }

    fn fetch_failed(&mut self, error: Error) -> Result<()> {
        let error = self.may_go_on(error)?;
        tracing::debug!(name = self.fetch.name, %error, "followed memory is not available");
        self.fetch_at = Some(self.pause());
        self.absence = Some(match error.refusal() {
            Some(Refusal::NotFound) => Absence::NotThere,
            _ => Absence::Unavailable(error),
        });
        Ok(())
    }

    /// Notes that the name cannot be watched. A lease that is held says that its memory is still there.
    fn watch_failed(&mut self, error: Error) -> Result<()> {
        let error = self.may_go_on(error)?;
        tracing::debug!(name = self.fetch.name, %error, "cannot watch a followed name");
        self.watch_at = Some(self.pause());
        if !self.holds() {
            self.absence = Some(Absence::Unavailable(error));
        }
        Ok(())
    }

    /// # Errors
    /// The error that ends the follow.
    fn may_go_on(&self, error: Error) -> Result<Error> {
        let session = self.fetch.client.session();
        if !session.is_open() {
            Err(session.down())
        } else if ends(&error) {
            Err(error)
        } else {
            Ok(error)
        }
    }

    /// Counts a failure, and returns when the pause after it ends.
    fn pause(&mut self) -> Instant {
        let mut reconnect = self.fetch.client.session().dial.options.reconnect;
        if reconnect.is_never() {
            reconnect = Reconnect::default();
        }
        let pause = reconnect.pause(self.failures);
        self.failures = self.failures.saturating_add(1);
        deadline(pause.max(Duration::from_millis(1)))
    }
}

async fn update(watch: &mut Watch, at: Option<Instant>) -> Result<()> {
    if let Some(at) = at {
        sleep_until(at).await;
    }
    watch.update().await?;
    // The caller gets the newest state.
    watch.catch_up()
}

/// Waits until the state of the returned memory's lease changes; forever once it was released or lost.
async fn lease_change(returned: &mut Option<Returned>) -> LeaseState {
    if let Some(returned) = returned
        && returned.lease.changed().await.is_ok()
    {
        return returned.lease.borrow_and_update().clone();
    }
    std::future::pending().await
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

/// Returns whether this client cannot use this memory, but perhaps other memory under the name.
fn is_of_this_memory(error: &Error) -> bool {
    use Refusal::{NoCommonHandle, ReadOnly, WrongOwner};
    matches!(
        error,
        Error::Mismatched { .. } | Error::NoCommonHandle { .. }
    ) || matches!(
        error.refusal(),
        Some(NoCommonHandle | ReadOnly | WrongOwner)
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
            watch: Watch::new(&self.client, self.name.clone(), true),
            fetch: self,
            absence: None,
            gone: false,
            returned: None,
            failures: 0,
            fetch_at: None,
            watch_at: None,
            ended: None,
        }
    }
}
