//! The exchange for programs without async.
//!
//! Each client and server has a runtime on a thread of its own, so that heartbeats continue while the program
//! does something else. The calls wait on the caller's thread. Within a tokio runtime they fail with
//! [`InvalidArgument`](crate::MemoryError::InvalidArgument) instead of blocking it: use [`exchange`](crate) there. To follow
//! names, use it too. In a forked child they fail so for clients and servers of the parent, whose threads the child has not.
//!
//! The thread ends with the last of the values that were made by way of one client or server.

#[cfg(test)]
mod tests;

use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::{Builder, EnterGuard, Handle};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

use crate as exchange;
use crate::client::ClientSession;
use crate::driver::{Access, DevicePtr, Driver, HandleType, Location};
use crate::fork::Generation;
use crate::limits::deadline;
use crate::memory::{CpuView, cpu_accessors, impl_cpu_memory, memory_through};
use crate::protocol::Entry;
use crate::server::{Holder, PublishOptions, ServerOptions, ServerStats};
use crate::share::{Description, InstanceId, Shared};
use crate::{
    Address, ClientOptions, CreateOptions, Error, FetchOptions, LeaseState, MemoryResult, Owner,
    Proof, Result,
};

/// How long the thread continues the work that its last user has begun. A client's work never
/// takes it: no drop waits for a server's answer.
const GRACE: Duration = Duration::from_secs(if cfg!(test) { 86_400 } else { 5 });

/// How often a call that waits asks whether to give up.
const CHECK: Duration = Duration::from_millis(50);

/// A function that calls ask while they wait, about every 50 ms and on their own thread: after a break the call fails
/// with [`Error::Interrupted`]. It may call this module.
pub type Check = Arc<dyn Fn() -> ControlFlow<()> + Send + Sync>;

/// Methods of the value inside: those that do not wait, then those that do.
macro_rules! forward {
    ($there:literal:
        $(fn $name:ident(&self $(, $arg:ident: $type:ty)*) -> $result:ty;)*
        $(async fn $waiting:ident(&self $(, $with:ident: $of:ty)*) -> $waited:ty;)*
    ) => {
        $(
            #[doc = concat!("See [`exchange::", $there, "::", stringify!($name), "`].")]
            #[allow(clippy::missing_errors_doc)]
            pub fn $name(&self $(, $arg: $type)*) -> $result {
                self.inner.$name($($arg),*)
            }
        )*
        $(
            #[doc = concat!("See [`exchange::", $there, "::", stringify!($waiting), "`].")]
            ///
            /// # Errors
            /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime and in a forked child.
            pub fn $waiting(&self $(, $with: $of)*) -> $waited {
                self.background.wait(self.inner.$waiting($($with),*))?
            }
        )*
    };
}

/// A runtime on a thread of its own, which ends with the last clone.
#[derive(Clone)]
struct Background(Arc<Running>);

struct Running {
    handle: Handle,
    born: Generation,
    /// Asked by calls that wait.
    check: Option<Check>,
    /// The client whose connection ends with the last user.
    client: OnceLock<Weak<ClientSession>>,
    /// Dropped to stop it.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    /// Starts the thread. Calls that wait ask `check`.
    fn start(name: &str, check: Option<Check>) -> Result<Self> {
        outside_async()?;
        let failed = |error| Error::system("starting a runtime", &error);
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(failed)?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::Builder::new().name(name.into());
        let thread = thread.spawn(move || {
            runtime.block_on(async {
                // An error: the sender was dropped.
                let _ = stopped.await;
                let metrics = Handle::current().metrics();
                let until = deadline(GRACE);
                while metrics.num_alive_tasks() > 0 && Instant::now() < until {
                    sleep(Duration::from_millis(1)).await;
                }
            });
            // Ends the tasks; waits for driver calls in progress.
            drop(runtime);
        });
        Ok(Self(Arc::new(Running {
            handle,
            born: Generation::current(),
            check,
            client: OnceLock::new(),
            stop: Some(stop),
            thread: Some(thread.map_err(failed)?),
        })))
    }

    /// Enters the runtime, so that values dropped meanwhile can continue work in the background.
    fn enter(&self) -> EnterGuard<'_> {
        self.0.handle.enter()
    }

    /// Has the last user close this client's connection.
    fn ends_with(&self, client: &Arc<ClientSession>) {
        // There is one client for each thread.
        let _ = self.0.client.set(Arc::downgrade(client));
    }

    /// Waits for `work` on this thread. Every call that blocks waits here.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if the check breaks, after `work` was dropped;
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) in a forked child, which has no such thread.
    fn wait<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        if !self.0.born.is_current() {
            // Its drop would wait for locks that a thread of the parent may have held at the fork.
            std::mem::forget(work);
            let why =
                "it is the parent process's: connect or start another one in the forked child";
            return Err(Error::invalid("client or server", why));
        }
        outside_async()?;
        let Some(check) = &self.0.check else {
            return Ok(self.0.handle.block_on(work));
        };
        let mut work = Box::pin(work);
        loop {
            let slice = async { timeout(CHECK, work.as_mut()).await };
            if let Ok(done) = self.0.handle.block_on(slice) {
                return Ok(done);
            }
            // Outside of the runtime: it may call this module, as a signal handler does.
            if check().is_break() {
                let _context = self.enter();
                drop(work);
                return Err(Error::Interrupted);
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.born.is_current() {
            return; // a forked child has no such thread
        }
        if let Some(client) = self.client.get().and_then(Weak::upgrade) {
            client.depart();
        }
        drop(self.stop.take());
        // Within a runtime nothing may block: the thread then ends by itself.
        if let (Some(thread), true) = (self.thread.take(), outside_async().is_ok()) {
            // At worst it has panicked, which has been reported.
            let _ = thread.join();
        }
    }
}

opaque!(Background);

/// # Errors
/// [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
pub(crate) fn outside_async() -> Result<()> {
    if Handle::try_current().is_ok() {
        let why = "it is within a tokio runtime: await the calls of `exchange` itself there, or make it on a thread of its own";
        return Err(Error::invalid("blocking call", why));
    }
    Ok(())
}

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
    forward! {
        "Client":
        fn instance(&self) -> InstanceId;
        fn peer(&self) -> String;
        fn name(&self) -> String;
        async fn list(&self, prefix: &str) -> Result<Vec<Entry>>;
        async fn wait(&self, name: &str, timeout: Duration) -> Result<Entry>;
        async fn create(&self, options: CreateOptions) -> Result<Entry>;
        async fn create_or_get(&self, options: CreateOptions) -> Result<Entry>;
        async fn delete(&self, name: impl Into<String>, timeout: Duration) -> Result<()>;
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
    /// As [`connect`](Self::connect); [`Error::Interrupted`] after a break.
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
        background.ends_with(inner.session());
        Ok(Self { inner, background })
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
    forward! {
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

    /// Waits at most `timeout` for a state that was not returned yet; otherwise `None`. See
    /// [`exchange::RemoteBuffer::changed`].
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn changed(&self, timeout: Duration) -> Result<Option<LeaseState>> {
        let changed = async {
            tokio::time::timeout(timeout, self.inner.changed())
                .await
                .ok()
        };
        self.background.wait(changed)
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

/// Publishes memory for others to import. See [`exchange::Server`].
#[derive(Debug)]
pub struct Server {
    // In this order: the thread ends last.
    inner: exchange::Server,
    background: Background,
}

impl Server {
    forward! {
        "Server":
        fn addresses(&self) -> Vec<Address>;
        fn instance(&self) -> InstanceId;
        fn stats(&self) -> ServerStats;
        async fn close(&self, within: Duration) -> Result<()>;
    }

    /// Starts it, as [`ServerOptions::start`] does.
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime;
    /// [`System`](crate::MemoryError::System) if no thread can be started.
    pub fn start(options: ServerOptions) -> Result<Self> {
        let background = Background::start("egmem-server", None)?;
        let inner = background.wait(options.start())??;
        Ok(Self { inner, background })
    }

    /// Publishes memory under a name, for every peer that the server admits.
    ///
    /// # Errors
    /// Those of [`PublishOptions::now`].
    pub fn publish(&self, name: impl Into<String>, memory: impl Into<Shared>) -> Result<Published> {
        self.publish_with(name, memory, |options| options)
    }

    /// Publishes memory with options.
    ///
    /// # Errors
    /// Those of [`PublishOptions::now`].
    pub fn publish_with(
        &self,
        name: impl Into<String>,
        memory: impl Into<Shared>,
        options: impl for<'a> FnOnce(PublishOptions<'a>) -> PublishOptions<'a>,
    ) -> Result<Published> {
        Ok(Published {
            inner: options(self.inner.publish(name, memory)).now()?,
            background: self.background.clone(),
        })
    }
}

/// Published memory. See [`exchange::server::Published`].
#[derive(Debug)]
pub struct Published {
    // In this order: the thread ends last.
    inner: exchange::server::Published,
    background: Background,
}

impl Published {
    forward! {
        "server::Published":
        fn name(&self) -> &str;
        fn shared(&self) -> Result<Shared>;
        fn importers(&self) -> Vec<Holder>;
        async fn withdraw(&self, within: Duration) -> Result<Shared>;
    }
}
