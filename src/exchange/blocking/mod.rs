//! The exchange for programs without async.
//!
//! Each client and server has a runtime on a thread of its own, so that heartbeats continue while the program
//! does something else. The calls wait on the caller's thread. Within a tokio runtime they fail with
//! [`InvalidArgument`](crate::MemoryError::InvalidArgument) instead of blocking it: use [`exchange`](crate) there. To watch or
//! follow names, use it too.
//!
//! The thread ends with the last of the values that were made by way of one client or server.

mod client;
mod server;

#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::{Builder, EnterGuard, Handle};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

pub use client::{Client, RemoteBuffer};
pub use server::{Published, Server};

use crate::client::ClientSession;
use crate::fork::Generation;
use crate::limits::deadline;
use crate::{Error, Result};

/// How long the thread continues the work that its last user has begun. A client's work never
/// takes it: no drop waits for a server's answer.
const GRACE: Duration = Duration::from_secs(if cfg!(test) { 86_400 } else { 5 });

/// How often a call that waits asks whether to give up.
const CHECK: Duration = Duration::from_millis(50);

/// A function that calls ask while they wait, about every 50 ms and on their own thread: after a break the call fails
/// with [`Error::Interrupted`]. It may call this module.
pub type Check = Arc<dyn Fn() -> ControlFlow<()> + Send + Sync>;

/// Methods of the value inside that do not wait.
macro_rules! as_there {
    ($there:literal: $(fn $name:ident(&self $(, $arg:ident: $type:ty)*) -> $result:ty;)*) => {$(
        #[doc = concat!("See [`exchange::", $there, "::", stringify!($name), "`].")]
        #[allow(clippy::missing_errors_doc)]
        pub fn $name(&self $(, $arg: $type)*) -> $result {
            self.inner.$name($($arg),*)
        }
    )*};
}
use as_there;

/// A runtime on a thread of its own, which ends with the last clone.
#[derive(Clone)]
pub(crate) struct Background(Arc<Running>);

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
    pub(crate) fn start(name: &str, check: Option<Check>) -> Result<Self> {
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
    pub(crate) fn enter(&self) -> EnterGuard<'_> {
        self.0.handle.enter()
    }

    /// Has the last user close this client's connection.
    fn ends_with(&self, client: Weak<ClientSession>) {
        // There is one client for each thread.
        let _ = self.0.client.set(client);
    }

    /// Waits for `work` on this thread. Every call that blocks waits here.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if the check breaks, after `work` was dropped.
    pub(crate) fn wait<T>(&self, work: impl Future<Output = T>) -> Result<T> {
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

    /// Waits for `work`, at most `within`.
    pub(crate) fn wait_for<T>(
        &self,
        patience: Duration,
        work: impl Future<Output = T>,
    ) -> Result<Option<T>> {
        self.wait(async { timeout(patience, work).await.ok() })
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

impl fmt::Debug for Background {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Background")
    }
}

fn outside_async() -> Result<()> {
    match Handle::try_current() {
        Ok(_) => Err(Error::invalid(
            "blocking call",
            "it is within a tokio runtime, where the calls of `exchange` itself are to be awaited",
        )),
        Err(_) => Ok(()),
    }
}
