//! The client processes: their commands, their messages, and how they die.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use egmem::exchange::{Address, Error, Limits, Refusal, Security, Tls, TlsFiles};
use egmem::{Driver, Machine};
use fastrand::Rng;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::worker;
use egmem_tests::pki::Files;

/// The variable that makes this program a client.
pub const ROLE: &str = "EGMEM_SOAK_ROLE";
/// The beginning of lines for the parent; libtest prints others.
pub const MARK: &str = "@soak ";

/// Of so many steps at which a client can kill itself, it does at one.
const MORTALITY: u32 = 500;

/// The settings of a client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Setup {
    pub name: String,
    pub kind: Kind,
    /// Different for each process that takes a client's place.
    pub seed: u64,
    /// The simulated machine.
    pub driver: String,
    pub address: String,
    pub files: Option<Files>,
}

/// The task of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Creates, fetches, checks, releases and deletes names.
    Worker,
}

/// A command of the parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    Start,
    Load,
    Pause,
    Quit,
}

/// The state and the counts of a client process.
pub struct Client {
    pub setup: Setup,
    pub driver: Driver,
    pub security: Security,
    pub wish: watch::Receiver<Wish>,
    pub tally: Arc<Tally>,
}

/// Plays the role until standard input ends.
pub fn play(setup: &Setup) {
    let machine = Machine::preset(&setup.driver).expect("a preset");
    let driver = Driver::simulated(machine).expect("a simulated driver");
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let (tell, mut wish) = watch::channel(Wish::Start);
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(std::io::Result::ok) {
            tell.send_replace(match line.as_str() {
                "load" => Wish::Load,
                _ => Wish::Pause,
            });
        }
        tell.send_replace(Wish::Quit);
    });
    let client = Arc::new(Client {
        security: security(setup).expect("certificates"),
        setup: setup.clone(),
        driver,
        wish: wish.clone(),
        tally: Arc::default(),
    });
    runtime.block_on(async {
        wish.mark_changed();
        while wish.changed().await.is_ok() {
            match *wish.borrow_and_update() {
                Wish::Start => continue,
                Wish::Quit => return,
                // A process that takes a dead one's place clears its remains, also without load.
                Wish::Load | Wish::Pause => {}
            }
            match setup.kind {
                Kind::Worker => worker::work(&client).await,
            }
            say("idle", client.tally.take());
            if *wish.borrow() == Wish::Pause {
                wish.mark_unchanged();
            }
        }
    });
}

fn security(setup: &Setup) -> egmem::exchange::Result<Security> {
    let Some(files) = &setup.files else {
        return Ok(Security::Plain);
    };
    Ok(Security::Tls(Tls::load(TlsFiles {
        ca: files.ca.clone(),
        cert: files.cert.clone(),
        key: files.key.clone(),
        crl: None,
    })?))
}

/// Sends a line to the parent.
pub fn say(word: &str, rest: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{MARK}{word} {rest}").and_then(|()| out.flush());
}

impl Client {
    /// Where the service listens.
    pub fn address(&self) -> Address {
        self.setup.address.parse().expect("an address")
    }

    /// Whether the load goes on.
    pub fn goes_on(&self) -> bool {
        *self.wish.borrow() == Wish::Load
    }

    /// Ends this process as a crash would, now and then.
    pub fn brink(&self, rng: &mut Rng, state: &str) {
        if rng.u32(..MORTALITY) == 0 {
            die(state);
        }
    }

    /// Does something, and now and then ends this process in the middle of it.
    pub async fn risk<T>(&self, rng: &mut Rng, state: &str, work: impl Future<Output = T>) -> T {
        if rng.u32(..MORTALITY) != 0 {
            return work.await;
        }
        let soon = Duration::from_micros(rng.u64(..5000));
        let _ = tokio::time::timeout(soon, work).await;
        die(state);
    }
}

fn die(state: &str) -> ! {
    say("dying", state);
    let me = rustix::process::getpid();
    let _ = rustix::process::kill_process(me, rustix::process::Signal::KILL);
    unreachable!("SIGKILL cannot be ignored")
}

/// Limits under which nothing hangs for long.
pub fn limits() -> Limits {
    let mut limits = Limits::default();
    limits.request = Duration::from_secs(5);
    limits.handshake = Duration::from_secs(5);
    limits
}

/// Counts of a process's actions, by name.
#[derive(Debug, Default)]
pub struct Tally(Mutex<BTreeMap<String, u64>>);

impl Tally {
    /// Counts something.
    pub fn count(&self, what: impl Into<String>) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(what.into()).or_default() += 1;
    }

    /// Counts an attempt: its success, or the error by which it failed. Errors that no good client
    /// may ever see are violations.
    pub fn note<T>(&self, what: &str, result: Result<T, impl Into<Error>>) -> Option<T> {
        match result.map_err(Into::into) {
            Ok(value) => {
                self.count(what);
                Some(value)
            }
            Err(error) => {
                self.count(format!("{what} failed: {}", kind(&error)));
                if is_violation(&error) {
                    say("violation", format!("{what}: {error}").replace('\n', " "));
                }
                None
            }
        }
    }

    /// The counts since the last call, as JSON.
    fn take(&self) -> String {
        let counts = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        serde_json::to_string(&counts).expect("JSON")
    }
}

/// An error's kind in a word or two.
fn kind(error: &Error) -> String {
    let debug = match (error, error.memory(), error.share()) {
        (Error::Refused { reason, .. }, ..) => return format!("refused, {reason:?}"),
        (_, Some(error), _) => format!("{error:?}"),
        (_, None, Some(error)) => format!("{error:?}"),
        (error, None, None) => format!("{error:?}"),
    };
    let end = debug.find(|c: char| !c.is_alphanumeric());
    debug[..end.unwrap_or(debug.len())].to_owned()
}

fn is_violation(error: &Error) -> bool {
    match error {
        Error::Share(egmem::share::Error::Protocol { .. })
        | Error::DataPlane { .. }
        | Error::Share(egmem::share::Error::Memory(egmem::Error::WrongBytes { .. })) => true,
        Error::Refused { reason, .. } => matches!(
            reason,
            Refusal::Internal | Refusal::Invalid | Refusal::Unsupported | Refusal::Version
        ),
        _ => false,
    }
}
