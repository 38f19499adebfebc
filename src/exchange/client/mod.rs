//! The client: finds memory by name, imports it, and holds a lease on it.

mod actor;
mod buffer;
mod connect;
mod fetch;
mod follow;
mod session;

#[cfg(test)]
pub(crate) mod tests;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

pub use buffer::{LeaseState, Leased, Proof, RemoteBuffer};
pub use connect::{ClientOptions, Reconnect};
pub use fetch::FetchOptions;
pub use follow::{Absence, Follow, Followed};

use super::PeerName;
use crate::driver::{Location, NodeId};
use crate::limits::{deadline, millis};
use crate::protocol::{Answer, Ask, Create, Entry, List, Names};
use crate::share::{BootId, InstanceId};
use crate::{Address, Driver, Error, MemoryError, Mismatch, Owner, PeerList, Refusal, Result};
pub(crate) use connect::importable;
use connect::{Dial, establish};
pub(crate) use fetch::fabric;
pub(crate) use session::ClientSession;
use session::{Link, SessionUser, run_blocking};

/// A connection to an exchange server. Clones are the same connection, which closes when the last clone and
/// everything fetched through it are dropped.
///
/// A task on the runtime that created it keeps the leases alive, and reconnects when the connection breaks:
/// within the time of a lease the server resumes the session. If that fails, leases become
/// [`LeaseState::Lost`].
///
/// ```
/// use egmem::driver::NodeId;
/// use egmem::exchange::{Address, Client, Server};
/// use egmem::{Buffer, Driver, Machine};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> egmem::exchange::Result<()> {
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let server = Server::options().listen(Address::loopback(0)).start().await?;
/// let buffer = Buffer::on(NodeId(0)).bytes(1 << 20).shareable().allocate(&driver)?;
/// let published = server.publish("weights", buffer).now()?;
///
/// let client = Client::options(server.addresses().remove(0)).connect(&driver).await?;
/// let weights = client.fetch("weights").go().await?;
/// weights.put(0, 42_u64)?;
/// assert_eq!(published.shared()?.word(0)?, 42);
/// weights.release().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Client(SessionUser);

impl Client {
    /// Returns options for a client of the server at `address`.
    pub fn options(address: Address) -> ClientOptions {
        ClientOptions::new(address)
    }

    /// Returns the names that begin with `prefix` and that this client may fetch, in order.
    ///
    /// # Errors
    /// [`PeerLost`](crate::ShareError::PeerLost); [`TimedOut`](crate::ShareError::TimedOut) if the server does not
    /// answer within the client's [`timeout`](ClientOptions::timeout);
    /// [`Protocol`](crate::ShareError::Protocol); [`Error::LimitReached`] for more names than
    /// [`Limits::names`](super::Limits).
    ///
    /// # Cancel safety
    /// If dropped before completion, nothing is left.
    pub async fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        let limit = self.session().dial.options.limits.names;
        let (mut entries, mut more) = (Vec::new(), true);
        while more {
            let ask = Ask::List(List {
                prefix: prefix.into(),
                after: entries.last().map(|entry: &Entry| entry.name.clone()),
            });
            let names = self.names(ask).await?;
            more = names.more;
            if more && names.entries.is_empty() {
                return Err(self.broken("an empty page before the last"));
            }
            for entry in names.entries {
                // Otherwise the same page could come again and again.
                if entries.last().is_some_and(|last| last.name >= entry.name) {
                    return Err(self.broken("names out of order"));
                }
                entries.push(entry);
            }
            if entries.len() > limit {
                let (what, limit) = ("names in a list", limit as u64);
                return Err(Error::LimitReached { what, limit });
            }
        }
        Ok(entries)
    }

    /// Returns a name's entry, as soon as there is one that this client may fetch.
    ///
    /// # Errors
    /// [`TimedOut`](crate::ShareError::TimedOut) if there is none after `timeout`, or if the server does not answer
    /// within `timeout` or the client's [`timeout`](ClientOptions::timeout), whichever is longer; those of
    /// [`list`](Self::list).
    ///
    /// # Cancel safety
    /// If dropped before completion, nothing is left.
    pub async fn wait(&self, name: &str, timeout: Duration) -> Result<Entry> {
        let begun = Instant::now();
        loop {
            let left = timeout.saturating_sub(begun.elapsed());
            let ask = Ask::Wait {
                name: name.into(),
                ms: millis(left),
            };
            let asked = Instant::now();
            match self.retry(ask, left.max(self.timeout())).await {
                Ok(answer) => return self.only_entry(answer, name),
                Err(error) if !error.is_timed_out() => return Err(error),
                Err(_) if begun.elapsed() >= timeout => {
                    let what = format!("waiting for '{name}' at {}", self.peer());
                    return Err(Error::timed_out(what, timeout));
                }
                Err(_) => {
                    // The server may limit the wait to less than requested.
                    let least = Duration::from_millis(20);
                    sleep(least.saturating_sub(asked.elapsed())).await;
                }
            }
        }
    }

    /// Ends a name that this client created, after waiting up to `timeout` for its holders. The answer may take the
    /// client's [`timeout`](ClientOptions::timeout) longer.
    ///
    /// # Errors
    /// [`Error::Refused`]: `not_found`, `forbidden`, `timed_out` if it is still held, with the holders; those of
    /// [`list`](Self::list).
    ///
    /// # Cancel safety
    /// As [`create`](Self::create).
    pub async fn delete(&self, name: impl Into<String>, timeout: Duration) -> Result<()> {
        let (name, ms) = (name.into(), millis(timeout));
        let ask = Ask::Delete { name, ms };
        let within = timeout.saturating_add(self.timeout());
        match self.call(ask, within).await? {
            Answer::Done => Ok(()),
            _ => Err(self.broken("unexpected answer to a deletion")),
        }
    }

    /// Asks an allocator service to create memory under a name; [fetch](Self::fetch) the name afterwards.
    ///
    /// # Errors
    /// [`Error::Refused`]: `unsupported` if the server is not an allocator service, `forbidden` for a peer
    /// that may not create memory or for a name outside its prefixes, `exists`, `quota`, `no_memory`;
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a peer to share with that [`PeerList::list`] refuses;
    /// those of [`list`](Self::list).
    ///
    /// # Cancel safety
    /// If dropped before completion, the memory may be created or not: [`list`](Self::list) shows it.
    pub async fn create(&self, options: CreateOptions) -> Result<Entry> {
        let name = options.create.name.clone();
        let peers = PeerList::list(&options.peers)?.to_string();
        let ask = Ask::Create(Create {
            peers,
            ..options.create
        });
        let answer = self.call(ask, options.timeout).await?;
        self.only_entry(answer, &name)
    }

    fn only_entry(&self, answer: Answer, name: &str) -> Result<Entry> {
        let entry = match answer {
            Answer::Names(mut names) => names.entries.pop(),
            _ => None,
        };
        let entry = entry.filter(|entry| entry.name == name);
        entry.ok_or_else(|| self.broken("unexpected answer, not one name's entry"))
    }

    /// Creates memory under a name, or returns the entry of the memory that this client's peer created there
    /// before.
    ///
    /// A process that crashed finds its bytes again in this way, whatever its quota and its rights to create memory
    /// are by then: the name is looked up first. If another client of this peer is creating the name, `egmem serve`
    /// answers when that has ended. [Fetch](Self::fetch) the name with
    /// [`expect_owner`](super::FetchOptions::expect_owner), because it may be deleted and created again in
    /// between. The access list of existing memory stays as it was.
    ///
    /// # Errors
    /// [`Error::Mismatched`] if the name exists and has another owner, another size, or, if
    /// [`node`](CreateOptions::node) is set, another node; [`Error::Refused`] with `exists` if this peer may
    /// not see the name or it is being withdrawn; those of [`create`](Self::create).
    ///
    /// # Cancel safety
    /// As [`create`](Self::create).
    pub async fn create_or_get(&self, options: CreateOptions) -> Result<Entry> {
        let asked = options.create.clone();
        if let Some(entry) = self.entry(&asked.name).await? {
            return self.check_existing(&asked, entry);
        }
        match self.create(options).await {
            // Another client has created it meanwhile.
            Err(exists) if exists.refusal() == Some(&Refusal::Exists) => {
                let entry = self.entry(&asked.name).await?.ok_or(exists)?;
                self.check_existing(&asked, entry)
            }
            made => made,
        }
    }

    /// Returns a name's entry, if this client may see it.
    pub(super) async fn entry(&self, name: &str) -> Result<Option<Entry>> {
        let ask = Ask::List(List {
            prefix: name.into(),
            after: None,
        });
        // Of all names with this prefix, the name itself is the first.
        let first = self.names(ask).await?.entries.into_iter().next();
        Ok(first.filter(|entry| entry.name == name))
    }

    fn check_existing(&self, asked: &Create, entry: Entry) -> Result<Entry> {
        let own = Owner::Peer(self.peer_name()?);
        let places = entry.memory.locations();
        let node = asked.node;
        let elsewhere = node.filter(|node| places != [Location::HostNuma(node.0)]);
        let what = if entry.owner != own {
            Mismatch::Owner {
                expected: own.to_string(),
                found: entry.owner.to_string(),
            }
        } else if entry.memory.len != asked.bytes {
            Mismatch::Size {
                expected: asked.bytes,
                found: entry.memory.len,
            }
        } else if let Some(expected) = elsewhere {
            Mismatch::Node {
                expected,
                found: places,
            }
        } else {
            return Ok(entry);
        };
        Err(Error::Mismatched {
            name: entry.name,
            peer: self.peer(),
            what: Box::new(what),
        })
    }

    /// Returns the server's instance, which changes at a restart.
    pub fn instance(&self) -> InstanceId {
        self.session().terms().welcome.instance
    }

    /// Returns the server's authenticated name and its address.
    pub fn peer(&self) -> String {
        self.session().peer()
    }

    /// Returns this client's name, as the server has authenticated it.
    pub fn name(&self) -> String {
        self.session().terms().welcome.peer.clone()
    }

    /// Returns this client's name as an owner of names.
    ///
    /// # Errors
    /// [`Protocol`](crate::ShareError::Protocol) if the server's text is not a peer name.
    pub fn peer_name(&self) -> Result<PeerName> {
        let broken = |_| self.broken("a name for this client that is not a peer name");
        self.name().parse().map_err(broken)
    }

    /// Ends the connection, after pending releases. Leases that remain become [`LeaseState::Lost`], and other
    /// clones of this client fail.
    ///
    /// Dropping the last clone does the same, once nothing fetched is left.
    pub async fn close(self) {
        self.session().close();
        let is_over = |link: &Link| matches!(link, Link::Over(_)).then_some(());
        self.session().link_is(is_over).await;
    }

    pub(crate) fn session(&self) -> &Arc<ClientSession> {
        &self.0.0
    }

    /// Returns how long a request may take.
    fn timeout(&self) -> Duration {
        self.session().timeout()
    }

    fn broken(&self, detail: &str) -> Error {
        Error::protocol(self.peer(), detail)
    }

    /// Sends a request once.
    async fn call(&self, ask: Ask, timeout: Duration) -> Result<Answer> {
        Ok(self.session().request(ask, timeout).await?.answer)
    }

    /// Sends an idempotent request: again if the connection broke before the answer.
    async fn retry(&self, ask: Ask, timeout: Duration) -> Result<Answer> {
        let begun = Instant::now();
        loop {
            let left = timeout.saturating_sub(begun.elapsed());
            match self.call(ask.clone(), left).await {
                Err(error)
                    if error.is_peer_lost()
                        && self.session().is_open()
                        && begun.elapsed() < timeout => {}
                done => return done,
            }
        }
    }

    async fn names(&self, ask: Ask) -> Result<Names> {
        match self.retry(ask, self.timeout()).await? {
            Answer::Names(names) => Ok(names),
            _ => Err(self.broken("unexpected answer, not names")),
        }
    }
}

impl ClientOptions {
    /// Connects. Fetched memory will be imported into `driver`.
    ///
    /// A task on the current runtime does the client's work.
    ///
    /// # Errors
    /// [`Unreachable`](crate::ShareError::Unreachable) if no process listens,
    /// [`TimedOut`](crate::ShareError::TimedOut), [`NotTrusted`](crate::ShareError::NotTrusted) if either end
    /// refuses the other's certificate or user, [`Error::Insecure`](crate::Error::Insecure) for
    /// another machine's address without TLS, [`Error::Refused`](crate::Error::Refused) by the server,
    /// [`Protocol`](crate::ShareError::Protocol) if the peer is not an exchange server.
    ///
    /// # Cancel safety
    /// If dropped before completion, nothing is left.
    pub async fn connect(self, driver: &Driver) -> Result<Client> {
        let tried = driver.clone();
        let no_fabric = run_blocking("trying fabric handles", move || importable(&tried)).await?;
        self.dial(Some(driver.clone()), no_fabric).await
    }

    /// Connects a client that lists, creates and deletes names. It has no driver to import memory into, so a
    /// fetch fails with [`InvalidArgument`](crate::MemoryError::InvalidArgument).
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    pub async fn connect_without_driver(self) -> Result<Client> {
        let what = "fabric handles, without a driver";
        let unsupported = MemoryError::PlatformUnsupported { what, source: None };
        self.dial(None, Some(unsupported)).await
    }

    async fn dial(self, driver: Option<Driver>, no_fabric: Option<MemoryError>) -> Result<Client> {
        use Refusal::{Closing, Limit};
        let until = deadline(self.timeout);
        let dial = Dial {
            options: self,
            boot: BootId::current()?,
            needs_fds: driver.is_some() && no_fabric.is_some(),
            no_fabric,
        };
        let mut attempt = 0;
        loop {
            let error = match establish(&dial, None, || (), until).await {
                Ok(established) => {
                    let session = ClientSession::new(dial, &established.1, driver);
                    let client = Client(SessionUser::new(&session));
                    tokio::spawn(actor::run(session, established));
                    return Ok(client);
                }
                Err(why) => why,
            };
            // No process listens yet, or the server is too busy.
            let passes = error.is_unreachable() || matches!(error.refusal(), Some(Closing | Limit));
            let pause = dial.options.reconnect.pause(attempt);
            let pause = pause.max(Duration::from_millis(1));
            if !dial.options.patient || !passes || deadline(pause) >= until {
                return Err(error);
            }
            attempt += 1;
            sleep(pause).await;
        }
    }
}

/// A request for new memory from an allocator service. See [`Client::create`].
#[derive(Clone, Debug, PartialEq)]
pub struct CreateOptions {
    create: Create,
    peers: Vec<String>,
    timeout: Duration,
}

impl CreateOptions {
    /// Requests `bytes` under `name`, on a node of the service's choice, for this client only.
    ///
    /// A service lets a peer create only names under its prefixes: by default those that begin with the
    /// peer's own name ([`Client::name`]) and a slash.
    pub fn new(name: impl Into<String>, bytes: u64) -> Self {
        Self {
            create: Create {
                name: name.into(),
                bytes,
                node: None,
                peers: String::new(),
            },
            peers: Vec::new(),
            timeout: Duration::from_secs(300),
        }
    }

    /// Sets which of the service's host nodes to use.
    pub fn node(mut self, node: NodeId) -> Self {
        self.create.node = Some(node);
        self
    }

    /// Lets other peers fetch it: a name or a pattern, as [`PeerList::list`] takes them.
    pub fn share_with(mut self, peer: impl Into<String>) -> Self {
        self.peers.push(peer.into());
        self
    }

    setters! {
        /// Sets how long it may take; 5 minutes by default. Drivers create 4 to 6 GB a second.
        timeout: Duration;
    }
}
