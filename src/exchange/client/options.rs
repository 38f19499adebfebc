//! Options of a client.

use std::time::Duration;

use super::{Client, greet, session};
use crate::capability::ImexChannel;
use crate::driver::random;
use crate::share::Peers;
use crate::{Address, Limits, Owner, Security};
use crate::{Driver, Error, MemoryError, Result};

/// When a client reconnects after its connection broke: after a random part of `first`, then of twice that,
/// up to `most`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reconnect {
    /// The longest first pause.
    pub first: Duration,
    /// The longest pause; zero means never to reconnect.
    pub most: Duration,
}

impl Default for Reconnect {
    /// From 50 ms to 5 s.
    fn default() -> Self {
        Self::backoff(Duration::from_millis(50), Duration::from_secs(5))
    }
}

impl Reconnect {
    /// Returns pauses from `first` to `most`, each at least a millisecond.
    pub fn backoff(first: Duration, most: Duration) -> Self {
        let first = first.max(Duration::from_millis(1));
        Self {
            first,
            most: most.max(first),
        }
    }

    /// Never reconnects: a broken connection ends the client and its leases.
    pub const fn never() -> Self {
        Self {
            first: Duration::ZERO,
            most: Duration::ZERO,
        }
    }

    pub(super) const fn is_never(&self) -> bool {
        self.most.is_zero()
    }

    /// Returns the pause before attempt number `attempt`, counted from 0: half to all of it, at random, so
    /// that many clients do not reconnect at once.
    pub(super) fn pause(&self, attempt: u32) -> Duration {
        let whole = self
            .first
            .saturating_mul(1_u32.checked_shl(attempt.min(20)).unwrap_or(u32::MAX))
            .min(self.most);
        let part = random::<2>().map_or(u16::MAX, u16::from_le_bytes);
        let half = whole / 2;
        half + half.mul_f64(f64::from(part) / f64::from(u16::MAX))
    }
}

/// Options of a client; [`connect`](Self::connect) creates it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `connect`"]
pub struct ClientOptions {
    pub(super) address: Address,
    pub(super) security: Security,
    pub(super) peers: Peers,
    pub(super) limits: Limits,
    pub(super) reconnect: Reconnect,
    pub(super) agent: String,
    pub(super) timeout: Duration,
    pub(super) patient: bool,
    pub(super) fabric: Option<bool>,
    /// The owner that fetches expect, unless they name another.
    pub(super) owner: Option<Owner>,
}

impl ClientOptions {
    pub(super) fn new(address: Address) -> Self {
        Self {
            address,
            security: Security::Plain,
            peers: Peers::same_user(),
            limits: Limits::default(),
            reconnect: Reconnect::default(),
            agent: concat!("egmem ", env!("CARGO_PKG_VERSION")).into(),
            timeout: Duration::from_secs(10),
            patient: false,
            fabric: None,
            owner: None,
        }
    }

    /// Sets how the connection is protected. By default not at all, which only loopback addresses and Unix
    /// sockets allow.
    pub fn security(mut self, security: Security) -> Self {
        self.security = security;
        self
    }

    /// Sets which users' servers may be used over Unix sockets, including the fd socket: by default the
    /// same user's.
    pub fn peers(mut self, peers: Peers) -> Self {
        self.peers = peers;
        self
    }

    /// Sets the sizes, counts and times that the client allows.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Sets when to reconnect after the connection broke.
    pub fn reconnect(mut self, reconnect: Reconnect) -> Self {
        self.reconnect = reconnect;
        self
    }

    /// Sets the client's name for the server's log: at most 255 bytes, the rest is cut off.
    pub fn agent(mut self, agent: impl Into<String>) -> Self {
        self.agent = super::text::cut(&agent.into());
        self
    }

    /// Sets how long [`connect`](Self::connect) may take in all; 10 s by default.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets whether [`connect`](Self::connect) retries, until its time is over, if no process listens yet.
    pub fn patient(mut self, on: bool) -> Self {
        self.patient = on;
        self
    }

    /// Sets whether fabric handles can be imported, instead of a trial.
    pub fn fabric(mut self, can: bool) -> Self {
        self.fabric = Some(can);
        self
    }

    /// Refuses memory of another owner in every fetch of the client, as
    /// [`FetchOptions::expect_owner`](super::FetchOptions::expect_owner) does for one fetch, which overrides
    /// this.
    pub fn expect_owner(mut self, owner: impl Into<Owner>) -> Self {
        self.owner = Some(owner.into());
        self
    }

    /// Connects. Fetched memory will be imported into `driver`.
    ///
    /// A task on the current runtime does the client's work.
    ///
    /// # Errors
    /// [`Unreachable`](crate::ShareError::Unreachable) if no process listens,
    /// [`TimedOut`](crate::ShareError::TimedOut), [`NotTrusted`](crate::ShareError::NotTrusted) if either end
    /// refuses the other's certificate or user, [`Error::Insecure`] for another machine's address without TLS,
    /// [`Error::Refused`] by the server, [`Protocol`](crate::ShareError::Protocol) if the peer is not an
    /// exchange server.
    ///
    /// # Cancel safety
    /// If dropped before completion, nothing is left.
    pub async fn connect(self, driver: &Driver) -> Result<Client> {
        let fabric = self.fabric_support(driver).await?;
        let timeout = self.timeout;
        let deadline = crate::limits::deadline(timeout);
        let dial = greet::Dial::new(self, fabric)?;
        let mut attempt = 0;
        loop {
            match greet::establish(&dial, None, deadline).await {
                Ok(established) => return Ok(session::start(dial, established, driver)),
                Err(why) if dial.options.patient && greet::may_pass(&why.error) => {
                    let pause = dial
                        .options
                        .reconnect
                        .pause(attempt)
                        .max(Duration::from_millis(1));
                    attempt += 1;
                    if tokio::time::Instant::now() + pause >= deadline {
                        return Err(why.error);
                    }
                    tokio::time::sleep(pause).await;
                }
                Err(why) => return Err(why.error),
            }
        }
    }

    /// Returns why fabric handles cannot be imported here; `None` if they can.
    async fn fabric_support(&self, driver: &Driver) -> Result<Option<MemoryError>> {
        match self.fabric {
            Some(true) => return Ok(None),
            Some(false) => {
                return Ok(Some(MemoryError::PlatformUnsupported {
                    what: "fabric handles, by the client's options",
                    source: None,
                }));
            }
            None => {}
        }
        let driver = driver.clone();
        // Driver calls, which may take long.
        tokio::task::spawn_blocking(move || importable(&driver))
            .await
            .map_err(|error| Error::failed("trying fabric handles", error.to_string()))
    }
}

/// Returns why fabric handles cannot be imported; `None` if they can.
///
/// Creates, exports, imports and maps memory with fabric handles, which needs the same rights as importing
/// another process's; without an IMEX channel it skips the trial.
fn importable(driver: &Driver) -> Option<MemoryError> {
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
    fn pauses_grow_up_to_the_longest_and_vary() {
        let reconnect = Reconnect::backoff(Duration::from_millis(8), Duration::from_millis(100));
        for (attempt, whole) in [
            (0, 8),
            (1, 16),
            (3, 64),
            (4, 100),
            (40, 100),
            (u32::MAX, 100),
        ] {
            let whole = Duration::from_millis(whole);
            let pauses: Vec<_> = (0..32).map(|_| reconnect.pause(attempt)).collect();
            assert!(
                pauses
                    .iter()
                    .all(|&pause| pause >= whole / 2 && pause <= whole)
            );
            assert!(pauses.iter().any(|&pause| pause != pauses[0]));
        }
        assert!(Reconnect::never().is_never());
        assert!(!Reconnect::default().is_never());
        let least = Reconnect::backoff(Duration::ZERO, Duration::ZERO);
        assert!(!least.is_never() && least.pause(0) > Duration::ZERO);
    }

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
