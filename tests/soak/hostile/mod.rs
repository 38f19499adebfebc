//! Hostile peers: each attack takes seconds at most and opens a limited number of connections.

mod floods;
mod frames;
mod rights;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use rustls::ClientConfig;

use crate::journal::Journal;
use crate::raw::Raw;
use crate::service::Service;
use egmem_tests::pki::{Files, Pki};
use egmem_tests::tls_config;

/// A service as a hostile peer knows it.
#[derive(Clone)]
pub struct Target {
    pub tcp: String,
    pub unix: PathBuf,
    pub metrics: String,
}

impl Target {
    pub fn of(service: &Service) -> Self {
        Self {
            tcp: service.tcp.clone(),
            unix: service.unix(),
            metrics: service.metrics_address(),
        }
    }
}

/// The certificates that hostile peers have.
pub struct Arms {
    /// Of a peer that is let in.
    mallory: Arc<ClientConfig>,
    /// Which are not: none, an expired one, another authority's.
    strangers: Vec<Arc<ClientConfig>>,
}

/// The certificate's name of the hostile peer that is let in.
pub const MALLORY: &str = "mallory.test";

impl Arms {
    pub fn new(pki: &Pki, other: &Pki) -> Self {
        let config = |files: &Files| tls_config(pki.ca(), Some(files));
        Self {
            mallory: config(&pki.issue(MALLORY)),
            strangers: vec![
                tls_config(pki.ca(), None),
                config(&pki.expired("expired.test")),
                config(&other.issue("stranger.test")),
            ],
        }
    }
}

/// One hostile peer.
pub struct Hostile<'a> {
    pub rng: Rng,
    pub arms: &'a Arms,
    pub journal: &'a Journal,
}

type Attack = fn(&mut Hostile<'_>, &Target) -> io::Result<()>;

const ATTACKS: &[(&str, Attack)] = &[
    ("garbage", frames::garbage),
    ("oversized frame", frames::oversized),
    ("dripped frame", frames::drip),
    ("second hello", frames::hellos),
    ("resume with many leases", frames::resume),
    ("connections without hello", floods::silent_connections),
    ("hello flood", floods::hello_flood),
    ("unread socket", floods::unread),
    ("waits", floods::waits),
    ("metrics", floods::metrics),
    ("wrong certificate", rights::wrong_certificates),
    ("rights", rights::without_rights),
    ("moves", rights::moves),
    ("quota", rights::quota),
    ("abandoned leases", rights::abandon_leases),
];

impl Hostile<'_> {
    /// Attacks until the time is over.
    pub fn run(mut self, targets: &[Target], until: Instant) {
        while Instant::now() < until {
            let target = &targets[self.rng.usize(..targets.len())];
            let (name, attack) = ATTACKS[self.rng.usize(..ATTACKS.len())];
            // Errors are the services' answers: it is the looks afterwards that count.
            let outcome = match attack(&mut self, target) {
                Ok(()) => "done",
                Err(_) => "cut off",
            };
            self.journal.count(format!("attack {outcome}: {name}"));
            let pause = Duration::from_millis(self.rng.u64(20..150));
            std::thread::sleep(pause);
        }
    }

    /// A connection of the peer that is let in, before the hello, or of any local process.
    fn connect(&mut self, target: &Target) -> io::Result<Raw> {
        match self.rng.bool() {
            true => Raw::unix(&target.unix),
            false => self.mallory(target),
        }
    }

    fn mallory(&self, target: &Target) -> io::Result<Raw> {
        Raw::tls(&target.tcp, &self.arms.mallory)
    }

    fn session(&mut self, target: &Target) -> io::Result<Raw> {
        let mut raw = self.connect(target)?;
        raw.greet()?;
        Ok(raw)
    }

    /// Deletes all names of the peer that is let in.
    pub fn clean(&self, target: &Target) -> io::Result<()> {
        rights::clean(&mut self.mallory(target)?)
    }
}
