//! A client whose calls block.

use std::time::Duration;

use super::{Background, Check, as_there};
use crate as exchange;
use crate::accessors::cpu_accessors;
use crate::driver::{Access, DevicePtr, Driver, HandleType, Location};
use crate::memory::{CpuView, impl_cpu_memory, memory_through};
use crate::protocol::Entry;
use crate::share::{Description, InstanceId};
use crate::{
    ClientOptions, CreateOptions, FetchOptions, LeaseState, MemoryResult, Owner, Proof, Result,
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
///
/// Clones are the same connection, and keep the thread.
#[derive(Clone, Debug)]
pub struct Client {
    // In this order: the thread ends last.
    inner: exchange::Client,
    background: Background,
}

impl Client {
    as_there! {
        "Client":
        fn instance(&self) -> InstanceId;
        fn peer(&self) -> String;
        fn name(&self) -> String;
    }

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
        let background = Background::start("egmem-client", check)?;
        let inner = background.wait(options.connect(driver))??;
        background.ends_with(inner.weak_session());
        Ok(Self { inner, background })
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
        Ok(RemoteBuffer {
            inner: self.background.wait(fetch.go())??,
            background: self.background.clone(),
        })
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
#[derive(Debug)]
pub struct RemoteBuffer {
    // In this order: the thread ends last.
    inner: exchange::RemoteBuffer,
    background: Background,
}

impl RemoteBuffer {
    as_there! {
        "RemoteBuffer":
        fn name(&self) -> &str;
        fn owner(&self) -> &Owner;
        fn description(&self) -> &Description;
        fn via(&self) -> HandleType;
        fn no_fabric(&self) -> Option<&str>;
        fn proved(&self) -> &Proof;
        fn state(&self) -> LeaseState;
        fn access(&self, location: impl Into<Location>) -> MemoryResult<Access>;
        fn cpu(&self) -> MemoryResult<CpuView<'_>>;
        fn device_ptr(&self) -> DevicePtr;
        fn len(&self) -> u64;
        fn is_empty(&self) -> bool;
    }

    cpu_accessors!();

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

impl_cpu_memory!(RemoteBuffer);

// The remote memory that it owns lives as long.
memory_through!(unsafe impl for RemoteBuffer, |this| this.inner);
