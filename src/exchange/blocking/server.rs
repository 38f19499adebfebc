//! A server whose calls block.

use std::time::Duration;

use super::{Background, as_there};
use crate as exchange;
use crate::server::{Holder, PublishOptions, ServerOptions, ServerStats};
use crate::share::{InstanceId, Shared};
use crate::{Address, Result};

/// Publishes memory for others to import. See [`exchange::Server`].
#[derive(Debug)]
pub struct Server {
    // In this order: the thread ends last.
    inner: exchange::Server,
    background: Background,
}

impl Server {
    as_there! {
        "Server":
        fn addresses(&self) -> Vec<Address>;
        fn instance(&self) -> InstanceId;
        fn stats(&self) -> ServerStats;
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

    /// See [`exchange::Server::close`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn close(&self, within: Duration) -> Result<()> {
        self.background.wait(self.inner.close(within))?
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
    as_there! {
        "server::Published":
        fn name(&self) -> &str;
        fn shared(&self) -> Result<Shared>;
        fn importers(&self) -> Vec<Holder>;
    }

    /// See [`exchange::server::Published::withdraw`].
    ///
    /// # Errors
    /// As there; [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime.
    pub fn withdraw(&self, within: Duration) -> Result<Shared> {
        self.background.wait(self.inner.withdraw(within))?
    }
}
