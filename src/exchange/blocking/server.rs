//! A server whose calls block.

use std::time::Duration;

use tokio::sync::broadcast::{Receiver, error::RecvError};

use super::Blocking;
use crate as exchange;
use crate::server::{PublishOptions, ServerEvent, ServerOptions};
use crate::share::Shared;
use crate::{Error, Result};

/// Publishes memory for others to import. See [`exchange::Server`].
pub type Server = Blocking<exchange::Server>;

impl Server {
    /// Starts it, as [`ServerOptions::start`] does.
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime;
    /// [`System`](crate::MemoryError::System) if no thread can be started.
    pub fn start(options: ServerOptions) -> Result<Self> {
        Self::start_on("egmem-server", None, options.start())
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
        Ok(self.beside(options(self.inner.publish(name, memory)).now()?))
    }

    /// Returns the events from now on.
    pub fn events(&self) -> Events {
        self.beside(self.inner.events())
    }

    /// See [`exchange::Server::close`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn close(&self, within: Duration) -> Result<()> {
        self.background.wait(self.inner.close(within))?
    }
}

/// Published memory. See [`exchange::server::Published`].
pub type Published = Blocking<exchange::server::Published>;

impl Published {
    /// See [`exchange::server::Published::withdraw`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn withdraw(&self, within: Duration) -> Result<Shared> {
        self.background.wait(self.inner.withdraw(within))?
    }

    /// See [`exchange::server::Published::vacate`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn vacate(&self, within: Duration) -> Result<()> {
        self.background.wait(self.inner.vacate(within))?
    }
}

/// Events of a server.
pub type Events = Blocking<Receiver<ServerEvent>>;

impl Events {
    /// Waits at most `patience` for the next event; otherwise, or after the server has ended, `None`.
    ///
    /// # Errors
    /// [`Error::LimitReached`] with the number of events that were missed because they were not received in
    /// time; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn recv(&mut self, patience: Duration) -> Result<Option<ServerEvent>> {
        match self.background.wait_for(patience, self.inner.recv())? {
            Some(Ok(event)) => Ok(Some(event)),
            None | Some(Err(RecvError::Closed)) => Ok(None),
            Some(Err(RecvError::Lagged(missed))) => Err(Error::LimitReached {
                what: "events behind (that many were missed)",
                limit: missed,
            }),
        }
    }
}
