//! A client whose calls block.

use std::ops::Deref;
use std::time::Duration;

use super::{Background, Follow};
use crate as exchange;
use crate::driver::Driver;
use crate::memory::{CpuMemory, CpuView, memory_through};
use crate::protocol::Entry;
use crate::share::InstanceId;
use crate::{ClientOptions, CreateOptions, FetchOptions, LeaseState, WatchEvent};
use crate::{MemoryResult, Result};

/// A connection to an exchange server. See [`exchange::Client`].
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
#[derive(Clone, Debug)]
pub struct Client {
    // In this order: the thread ends last.
    client: exchange::Client,
    background: Background,
}

impl Client {
    /// Connects, as [`ClientOptions::connect`] does.
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime;
    /// [`System`](crate::MemoryError::System) if no thread can be started.
    pub fn connect(options: ClientOptions, driver: &Driver) -> Result<Self> {
        let background = Background::start("egmem-client")?;
        let client = background.wait(options.connect(driver))??;
        Ok(Self { client, background })
    }

    /// See [`exchange::Client::list`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        self.background.wait(self.client.list(prefix))?
    }

    /// See [`exchange::Client::wait`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn wait(&self, name: &str, patience: Duration) -> Result<Entry> {
        self.background.wait(self.client.wait(name, patience))?
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
        let fetch = options(self.client.fetch(name));
        Ok(RemoteBuffer {
            remote: self.background.wait(fetch.go())??,
            background: self.background.clone(),
        })
    }

    /// See [`exchange::Client::watch`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn watch(&self, prefix: impl Into<String>) -> Result<Watch> {
        Ok(Watch {
            watch: self.background.wait(self.client.watch(prefix))??,
            background: self.background.clone(),
        })
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
        Follow {
            follow: options(self.client.fetch(name)).follow(),
            background: self.background.clone(),
        }
    }

    /// See [`exchange::Client::create`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn create(&self, options: CreateOptions) -> Result<Entry> {
        self.background.wait(self.client.create(options))?
    }

    /// See [`exchange::Client::create_or_get`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn create_or_get(&self, options: CreateOptions) -> Result<Entry> {
        self.background.wait(self.client.create_or_get(options))?
    }

    /// See [`exchange::Client::delete`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn delete(&self, name: impl Into<String>, patience: Duration) -> Result<()> {
        self.background.wait(self.client.delete(name, patience))?
    }

    /// See [`exchange::Client::instance`].
    pub fn instance(&self) -> InstanceId {
        self.client.instance()
    }

    /// See [`exchange::Client::peer`].
    pub fn peer(&self) -> String {
        self.client.peer()
    }

    /// See [`exchange::Client::name`].
    pub fn name(&self) -> String {
        self.client.name()
    }

    /// See [`exchange::Client::close`].
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn close(self) -> Result<()> {
        self.background.wait(self.client.close())
    }
}

/// Another process's memory, with a lease on it. It has all methods of [`exchange::RemoteBuffer`].
#[derive(Debug)]
pub struct RemoteBuffer {
    // In this order: the thread ends last.
    pub(super) remote: exchange::RemoteBuffer,
    pub(super) background: Background,
}

impl RemoteBuffer {
    /// Waits at most `patience` for a state that was not returned yet; otherwise `None`. See
    /// [`exchange::RemoteBuffer::changed`].
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn changed(&self, patience: Duration) -> Result<Option<LeaseState>> {
        self.background.wait_for(patience, self.remote.changed())
    }

    /// See [`exchange::RemoteBuffer::release`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn release(self) -> Result<()> {
        self.background.wait(self.remote.release())?
    }
}

impl Deref for RemoteBuffer {
    type Target = exchange::RemoteBuffer;

    fn deref(&self) -> &Self::Target {
        &self.remote
    }
}

impl CpuMemory for RemoteBuffer {
    fn cpu(&self) -> MemoryResult<CpuView<'_>> {
        (**self).cpu()
    }
}

// The remote memory that it owns lives as long.
memory_through!(unsafe impl for RemoteBuffer, |this| this.remote);

/// Events about names. See [`exchange::Watch`].
#[derive(Debug)]
pub struct Watch {
    watch: exchange::Watch,
    background: Background,
}

impl Watch {
    /// Waits at most `patience` for the next event; otherwise `None`.
    ///
    /// # Errors
    /// Those of [`exchange::Watch::recv`]; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a
    /// tokio runtime.
    pub fn recv(&mut self, patience: Duration) -> Result<Option<WatchEvent>> {
        let event = self.background.wait_for(patience, self.watch.recv())?;
        event.transpose()
    }

    /// See [`exchange::Watch::names`].
    pub fn names(&self) -> impl Iterator<Item = &Entry> {
        self.watch.names()
    }
}
