//! Options of a client.

use std::time::Duration;

use super::text::{LONGEST, cut};
use crate::driver::random;
use crate::share::Peers;
use crate::{Address, Limits, Owner, Security};

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

#[cfg(test)]
mod tests {
    use super::*;

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
}
