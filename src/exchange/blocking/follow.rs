//! A follow with blocking calls.

use std::time::Duration;

use super::{Background, RemoteBuffer};
use crate as exchange;
use crate::Absence;
use crate::Result;

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
#[derive(Debug)]
pub struct Follow {
    // Dropped in this order: the thread ends last.
    pub(super) follow: exchange::Follow,
    pub(super) background: Background,
}

impl Follow {
    /// Returns the followed name. See [`exchange::Follow::name`].
    pub fn name(&self) -> &str {
        self.follow.name()
    }

    /// Waits for the next state of the name, for at most the given time, and returns `None` if it has not
    /// changed. The first call returns the current state. A fetch that has begun continues after a timeout.
    ///
    /// # Errors
    ///
    /// Those of [`exchange::Follow::next`], which end the follow;
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) within a tokio runtime, which does not.
    pub fn next(&mut self, patience: Duration) -> Result<Option<Followed>> {
        let next = self.background.wait_for(patience, self.follow.next())?;
        Ok(match next.transpose()? {
            Some(exchange::Followed::Memory(remote)) => {
                Some(Followed::Memory(Box::new(RemoteBuffer {
                    remote: *remote,
                    background: self.background.clone(),
                })))
            }
            Some(exchange::Followed::Gone(absence)) => Some(Followed::Gone(absence)),
            None => None,
        })
    }
}
