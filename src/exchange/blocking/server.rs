//! A server whose calls block.

use std::time::Duration;

use tokio::sync::broadcast::{Receiver, error::RecvError};

use super::Background;
use crate as exchange;
use crate::server::{Holder, PublishOptions, ServerEvent, ServerOptions, ServerStats};
use crate::share::{InstanceId, Shared};
use crate::{Address, Who};
use crate::{Error, Result};

/// Publishes memory for others to import. See [`exchange::Server`].
#[derive(Clone, Debug)]
pub struct Server {
    // In this order: the thread ends last.
    server: exchange::Server,
    background: Background,
}

impl Server {
    /// Starts it, as [`ServerOptions::start`] does.
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime;
    /// [`System`](crate::MemoryError::System) if no thread can be started.
    pub fn start(options: ServerOptions) -> Result<Self> {
        let background = Background::start("egmem-server")?;
        let server = background.wait(options.start())??;
        Ok(Self { server, background })
    }

    /// Returns the addresses that it listens at, with the ports that the kernel chose.
    pub fn addresses(&self) -> Vec<Address> {
        self.server.addresses()
    }

    /// See [`exchange::Server::instance`].
    pub fn instance(&self) -> InstanceId {
        self.server.instance()
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
            published: options(self.server.publish(name, memory)).now()?,
            background: self.background.clone(),
        })
    }

    /// See [`exchange::Server::stats`].
    pub fn stats(&self) -> ServerStats {
        self.server.stats()
    }

    /// Returns the events from now on.
    pub fn events(&self) -> Events {
        Events {
            events: self.server.events(),
            background: self.background.clone(),
        }
    }

    /// See [`exchange::Server::close`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn close(&self, within: Duration) -> Result<()> {
        self.background.wait(self.server.close(within))?
    }
}

/// Published memory. See [`exchange::server::Published`].
#[derive(Debug)]
pub struct Published {
    // In this order: the thread ends last.
    published: exchange::server::Published,
    background: Background,
}

impl Published {
    /// Returns its name.
    pub fn name(&self) -> &str {
        self.published.name()
    }

    /// See [`exchange::server::Published::shared`].
    ///
    /// # Errors
    /// As there.
    pub fn shared(&self) -> Result<Shared> {
        self.published.shared()
    }

    /// See [`exchange::server::Published::importers`].
    pub fn importers(&self) -> Vec<Holder> {
        self.published.importers()
    }

    /// See [`exchange::server::Published::set_who`].
    pub fn set_who(&self, who: Who) {
        self.published.set_who(who);
    }

    /// See [`exchange::server::Published::withdraw`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn withdraw(&self, within: Duration) -> Result<Shared> {
        self.background.wait(self.published.withdraw(within))?
    }
}

/// Events of a server.
#[derive(Debug)]
pub struct Events {
    events: Receiver<ServerEvent>,
    background: Background,
}

impl Events {
    /// Waits at most `patience` for the next event; otherwise, or after the server has ended, `None`.
    ///
    /// # Errors
    /// [`Error::LimitReached`] with the number of events that were missed because they were not received in
    /// time; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn recv(&mut self, patience: Duration) -> Result<Option<ServerEvent>> {
        match self.background.wait_for(patience, self.events.recv())? {
            Some(Ok(event)) => Ok(Some(event)),
            None | Some(Err(RecvError::Closed)) => Ok(None),
            Some(Err(RecvError::Lagged(missed))) => Err(Error::LimitReached {
                what: "events behind (that many were missed)",
                limit: missed,
            }),
        }
    }
}
