//! Options of a client, which connect it.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::greet::Dial;
use super::lease::Keep;
use super::open::attempt;
use super::session::ClientSession;
use super::text::{LONGEST, cut};
use super::{Client, actor, greet};
use crate::capability::ImexChannel;
use crate::driver::random;
use crate::setters::setters;
use crate::share::{BootId, Peers};
use crate::{Address, Driver, Limits, MemoryError, Owner, Result, Security};

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

    setters! {
        /// Sets how the connection is protected. By default not at all, which only loopback addresses and Unix
        /// sockets allow.
        security: Security;

        /// Sets which users' servers may be used over Unix sockets, also of a server that is dialed over TCP: by default
        /// the same user's.
        peers: Peers;

        /// Sets the sizes, counts and times that the client allows.
        limits: Limits;

        /// Sets when to reconnect after the connection broke.
        reconnect: Reconnect;

        /// Sets how long [`connect`](Self::connect) may take in all, and then each request until its answer; 10 s by
        /// default. A creation has a [time of its own](crate::CreateOptions::timeout); waits and deletions add the
        /// time that the caller gives them.
        timeout: Duration;

        /// Sets whether [`connect`](Self::connect) retries, until its time is over, if no process listens yet.
        patient: bool;
    }

    /// Sets the client's name for the server's log: at most 255 bytes, the rest is cut off.
    pub fn agent(mut self, agent: impl Into<String>) -> Self {
        self.agent = cut(&agent.into(), LONGEST).to_owned();
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
}

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
