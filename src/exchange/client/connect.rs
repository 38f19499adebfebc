//! Connects a client.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::greet::Dial;
use super::lease::Keep;
use super::open::attempt;
use super::session::ClientSession;
use super::{Client, ClientOptions, actor, greet};
use crate::capability::ImexChannel;
use crate::share::BootId;
use crate::{Address, Driver, MemoryError, Result};

impl Client {
    /// Returns options for a client of the server at `address`.
    pub fn options(address: Address) -> ClientOptions {
        ClientOptions::new(address)
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
        let no_fabric = self.fabric_support(driver).await?;
        self.dial(Some(driver.clone()), no_fabric).await
    }

    /// Connects a client that lists, watches, creates and deletes names. It has no driver to import memory into, so a
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
        let timeout = self.timeout;
        let deadline = crate::limits::deadline(timeout);
        let dial = Dial {
            options: self,
            boot: BootId::current()?,
            no_fabric,
        };
        let mut attempt = 0;
        loop {
            match greet::establish(&dial, None, deadline).await {
                Ok(established) => {
                    let (session, commands) =
                        ClientSession::new(dial, &established, driver.clone());
                    let client = Client(Keep::new(&session));
                    tokio::spawn(actor::run(session, commands, established));
                    return Ok(client);
                }
                Err(why) if dial.options.patient && greet::may_pass(&why.error) => {
                    let pause = dial.options.reconnect.pause(attempt);
                    let pause = pause.max(Duration::from_millis(1));
                    attempt += 1;
                    if Instant::now() + pause >= deadline {
                        return Err(why.error);
                    }
                    sleep(pause).await;
                }
                Err(why) => return Err(why.error),
            }
        }
    }

    /// Returns why fabric handles cannot be imported here; `None` if they can.
    async fn fabric_support(&self, driver: &Driver) -> Result<Option<MemoryError>> {
        if let Some(can) = self.fabric {
            let what = "fabric handles, by the client's options";
            let unsupported = MemoryError::PlatformUnsupported { what, source: None };
            return Ok((!can).then_some(unsupported));
        }
        let driver = driver.clone();
        // Driver calls, which may take long.
        attempt("trying fabric handles", move || importable(&driver)).await
    }
}

/// Returns why fabric handles cannot be imported; `None` if they can.
///
/// Creates, exports, imports and maps memory with fabric handles, which needs the same rights as importing
/// another process's; without an IMEX channel it skips the trial.
pub(crate) fn importable(driver: &Driver) -> Option<MemoryError> {
    use crate::DriverError;
    use crate::capability::{Capabilities, Path, Trial};
    use crate::driver::{Call, Code, DeviceAttribute, HandleTypes, Location};

    let channel = ImexChannel::of(driver);
    if !channel.usable() {
        return Some(MemoryError::NoImexChannel {
            path: channel.path(),
            source: DriverError {
                call: Call::MemCreate,
                code: Code::NOT_PERMITTED,
            },
        });
    }
    let capabilities = Capabilities::of(driver);
    let mut why = None;
    for gpu in 0..driver.device_count().unwrap_or(0) {
        let location = match driver.device_attribute(gpu, DeviceAttribute::HOST_NUMA_ID) {
            Ok(node) if node >= 0 => Location::HostNuma(node),
            _ => Location::Device(gpu),
        };
        let support = capabilities.trial(Trial {
            location,
            gpu,
            path: Path::Vmm,
            handle_types: HandleTypes::FABRIC,
        });
        match support.error() {
            None => return None,
            Some(error) => why = why.or_else(|| Some(error.clone())),
        }
    }
    why.or(Some(MemoryError::NoSuchGpu { gpu: 0, count: 0 }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Machine;

    #[test]
    fn fabric_needs_a_channel() {
        let with = Driver::simulated(Machine::gh200()).unwrap();
        assert_eq!(importable(&with), None);
        let without = Driver::simulated(Machine::gh200x4()).unwrap();
        assert!(matches!(
            importable(&without),
            Some(MemoryError::NoImexChannel { .. })
        ));
    }
}
