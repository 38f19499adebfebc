//! A client whose calls block.

use std::time::Duration;

use super::{Blocking, Check};
use crate as exchange;
use crate::driver::Driver;
use crate::memory::{CpuMemory, CpuView, memory_through};
use crate::protocol::Entry;
use crate::{
    Absence, ClientOptions, CreateOptions, FetchOptions, LeaseState, MemoryResult, Result,
    WatchEvent,
};

/// A connection to an exchange server. See [`exchange::Client`].
///
/// The connection closes when the client and everything fetched through it are dropped. The last drop hands pending
/// releases to the connection and does not wait for the server: a program ends at once, even if the server does not
/// answer. [`RemoteBuffer::release`] waits until the server has recorded the release.
///
/// ```
/// use egmem::driver::NodeId;
/// use egmem::exchange::{self, Address, blocking};
/// use egmem::{Buffer, Driver, Machine};
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let server = blocking::Server::start(exchange::Server::options().listen(Address::loopback(0)))?;
/// let buffer = Buffer::on(NodeId(0)).bytes(1 << 20).shareable().allocate(&driver)?;
/// let published = server.publish("weights", buffer)?;
///
/// let options = exchange::Client::options(server.addresses().remove(0));
/// let client = blocking::Client::connect(options, &driver)?;
/// let weights = client.fetch("weights")?;
/// weights.put(0, 42_u64)?;
/// assert_eq!(published.shared()?.word(0)?, 42);
/// weights.release()?;
/// # Ok::<(), egmem::exchange::Error>(())
/// ```
pub type Client = Blocking<exchange::Client>;

impl Client {
    /// Connects, as [`ClientOptions::connect`] does.
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime;
    /// [`System`](crate::MemoryError::System) if no thread can be started.
    pub fn connect(options: ClientOptions, driver: &Driver) -> Result<Self> {
        Self::connect_with(options, driver, None)
    }

    /// Connects, and has this call and every later one of the client and of what it fetches ask `check` while they
    /// wait. A program that handles signals breaks its waits off in this way.
    ///
    /// A call that is broken off has been dropped: its documentation of cancel safety says what that leaves. A
    /// fetch leaves nothing leased or mapped; a creation or deletion may have happened.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); [`Error::Interrupted`](crate::Error::Interrupted) after a break.
    pub fn connect_interruptible(
        options: ClientOptions,
        driver: &Driver,
        check: Check,
    ) -> Result<Self> {
        Self::connect_with(options, driver, Some(check))
    }

    fn connect_with(options: ClientOptions, driver: &Driver, check: Option<Check>) -> Result<Self> {
        let client = Self::start_on("egmem-client", check, options.connect(driver))?;
        client.background.ends_with(client.inner.departing());
        Ok(client)
    }

    /// See [`exchange::Client::list`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        self.background.wait(self.inner.list(prefix))?
    }

    /// See [`exchange::Client::wait`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn wait(&self, name: &str, patience: Duration) -> Result<Entry> {
        self.background.wait(self.inner.wait(name, patience))?
    }

    /// Fetches a name with the default options. See [`FetchOptions::go`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    #[track_caller]
    pub fn fetch(&self, name: impl Into<String>) -> Result<RemoteBuffer> {
        self.fetch_with(name, |options| options)
    }

    /// Fetches a name with options.
    ///
    /// # Errors
    /// As for [`fetch`](Self::fetch).
    #[track_caller]
    pub fn fetch_with(
        &self,
        name: impl Into<String>,
        options: impl FnOnce(FetchOptions) -> FetchOptions,
    ) -> Result<RemoteBuffer> {
        let fetch = options(self.inner.fetch(name));
        Ok(self.beside(self.background.wait(fetch.go())??))
    }

    /// See [`exchange::Client::watch`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn watch(&self, prefix: impl Into<String>) -> Result<Watch> {
        Ok(self.beside(self.background.wait(self.inner.watch(prefix))??))
    }

    /// Follows a name. See [`exchange::Client::follow`].
    #[track_caller]
    pub fn follow(&self, name: impl Into<String>) -> Follow {
        self.follow_with(name, |options| options)
    }

    /// Follows a name, and fetches its memory with options each time.
    #[track_caller]
    pub fn follow_with(
        &self,
        name: impl Into<String>,
        options: impl FnOnce(FetchOptions) -> FetchOptions,
    ) -> Follow {
        self.beside(options(self.inner.fetch(name)).follow())
    }

    /// See [`exchange::Client::create`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn create(&self, options: CreateOptions) -> Result<Entry> {
        self.background.wait(self.inner.create(options))?
    }

    /// See [`exchange::Client::create_or_get`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn create_or_get(&self, options: CreateOptions) -> Result<Entry> {
        self.background.wait(self.inner.create_or_get(options))?
    }

    /// See [`exchange::Client::delete`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn delete(&self, name: impl Into<String>, patience: Duration) -> Result<()> {
        self.background.wait(self.inner.delete(name, patience))?
    }

    /// See [`exchange::Client::close`].
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn close(self) -> Result<()> {
        self.background.wait(self.inner.close())
    }
}

/// Another process's memory, with a lease on it. See [`exchange::RemoteBuffer`].
pub type RemoteBuffer = Blocking<exchange::RemoteBuffer>;

impl RemoteBuffer {
    /// Waits at most `patience` for a state that was not returned yet; otherwise `None`. See
    /// [`exchange::RemoteBuffer::changed`].
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn changed(&self, patience: Duration) -> Result<Option<LeaseState>> {
        self.background.wait_for(patience, self.inner.changed())
    }

    /// See [`exchange::RemoteBuffer::release`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn release(self) -> Result<()> {
        self.background.wait(self.inner.release())?
    }
}

impl CpuMemory for RemoteBuffer {
    fn cpu(&self) -> MemoryResult<CpuView<'_>> {
        self.inner.cpu()
    }
}

// The remote memory that it owns lives as long.
memory_through!(unsafe impl for RemoteBuffer, |this| this.inner);

/// Events about names. See [`exchange::Watch`].
pub type Watch = Blocking<exchange::Watch>;

impl Watch {
    /// Waits at most `patience` for the next event; otherwise `None`.
    ///
    /// # Errors
    /// Those of [`exchange::Watch::recv`]; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a
    /// tokio runtime.
    pub fn recv(&mut self, patience: Duration) -> Result<Option<WatchEvent>> {
        let event = self.background.wait_for(patience, self.inner.recv())?;
        event.transpose()
    }
}

/// The current state of a followed name. See [`exchange::Followed`].
#[derive(Debug)]
#[non_exhaustive]
pub enum Followed {
    /// Memory that was not returned before, with its own lease.
    Memory(Box<RemoteBuffer>),
    /// No memory at present. The caller should drop the memory returned before.
    Gone(Absence),
}

/// Follows a name across withdrawals, deletions, broken connections and exporter restarts. See
/// [`exchange::Follow`].
///
/// ```
/// use std::time::Duration;
///
/// use egmem::driver::NodeId;
/// use egmem::exchange::blocking::{self, Followed};
/// use egmem::exchange::{self, Address};
/// use egmem::{Buffer, Driver, Machine};
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let server = blocking::Server::start(exchange::Server::options().listen(Address::loopback(0)))?;
/// let buffer = Buffer::on(NodeId(0)).bytes(1 << 20).shareable().allocate(&driver)?;
/// let published = server.publish("weights", buffer)?;
///
/// let options = exchange::Client::options(server.addresses().remove(0));
/// let client = blocking::Client::connect(options, &driver)?;
/// let mut follow = client.follow("weights");
/// if let Some(Followed::Memory(weights)) = follow.next(Duration::from_secs(60))? {
///     assert_eq!(weights.len(), 1 << 20);
/// }
/// # drop(published);
/// # Ok::<(), egmem::exchange::Error>(())
/// ```
pub type Follow = Blocking<exchange::Follow>;

impl Follow {
    /// Waits for the next state of the name, for at most the given time, and returns `None` if it has not
    /// changed. The first call returns the current state. A fetch that takes longer is begun anew by the next call.
    ///
    /// # Errors
    ///
    /// Those of [`exchange::Follow::next`], which end the follow;
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime, which does not.
    pub fn next(&mut self, patience: Duration) -> Result<Option<Followed>> {
        let next = self.background.wait_for(patience, self.inner.next())?;
        Ok(next.transpose()?.map(|next| match next {
            exchange::Followed::Memory(remote) => Followed::Memory(Box::new(self.beside(*remote))),
            exchange::Followed::Gone(absence) => Followed::Gone(absence),
        }))
    }
}
