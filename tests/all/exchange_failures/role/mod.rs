//! The roles of the child processes: an owner publishes, a peer fetches, both on commands by lines.

mod owner;
mod peer;

use std::time::{Duration, Instant};

use egmem::exchange::{Error, Limits, Result, Security, Tls, TlsFiles};
use egmem::proof::{self, Prover};
use egmem::{Driver, Machine};
use tokio::sync::mpsc;

use crate::exchange_failures::harness::{MARK, Setup, fds, mapped, patience};

/// Plays the role until its input ends, then looks for objects that were not given back.
pub fn play(setup: &Setup) {
    let driver = match setup.driver.as_str() {
        "cuda" => Driver::open().expect("a GPU"),
        preset => Driver::simulated(Machine::preset(preset).expect("a preset")).expect("simulated"),
    };
    limit_fds(setup.fds);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let mut commands = commands();
    let before = fds();
    runtime.block_on(async {
        let ended = match setup.role.as_str() {
            "owner" => owner::owner(setup, &driver, &mut commands).await,
            _ => peer::peer(setup, &driver, &mut commands).await,
        };
        if let Err(error) = ended {
            return say("err", kind(&error));
        }
        // Tasks that end in the background may take their time.
        let end = Instant::now() + patience();
        let metrics = tokio::runtime::Handle::current().metrics();
        while metrics.num_alive_tasks() > 0 && Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(metrics.num_alive_tasks(), 0, "tasks");
    });
    drop(runtime);
    if let Some(sim) = driver.sim() {
        assert!(sim.held().is_empty(), "held: {}", sim.held());
        assert!(mapped().is_empty(), "mapped: {:#?}", mapped());
        let now = fds();
        assert!(now <= before, "{now} fds, {before} at the beginning");
    }
}

/// So many fds; a crowd needs more than the 1024 that processes usually have.
fn limit_fds(fds: Option<u64>) {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let current = fds.unwrap_or_else(|| limit.current.unwrap_or(u64::MAX).max(8192));
    let current = Some(limit.maximum.map_or(current, |most| most.min(current)));
    setrlimit(Resource::Nofile, Rlimit { current, ..limit }).expect("up to the hard limit");
}

/// The lines of standard input, which the asynchronous runtime itself cannot stop reading.
fn commands() -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel(64);
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(std::io::Result::ok) {
            if sender.blocking_send(line).is_err() {
                break;
            }
        }
    });
    receiver
}

fn say(word: &str, rest: impl std::fmt::Display) {
    println!("{MARK}{word} {rest}");
}

/// An error's kind and its words, in a line.
fn kind(error: &Error) -> String {
    let debug = match (error.memory(), error.share()) {
        (Some(error), _) => format!("{error:?}"),
        (None, Some(error)) => format!("{error:?}"),
        (None, None) => format!("{error:?}"),
    };
    let kind = debug
        .split(|c: char| !c.is_alphanumeric())
        .next()
        .unwrap_or_default();
    format!("{kind}: {error}").replace('\n', " ")
}

/// A command's words.
struct Words<'a>(std::str::SplitWhitespace<'a>);

impl<'a> Words<'a> {
    fn word(&mut self) -> Result<&'a str> {
        let missing = || Error::invalid("command", "a word is missing");
        self.0.next().ok_or_else(missing)
    }

    fn number(&mut self) -> Result<u64> {
        let word = self.word()?;
        let wrong = |error| Error::invalid("command", format!("{word}: {error}"));
        word.parse().map_err(wrong)
    }
}

fn security(setup: &Setup) -> Result<Security> {
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

fn gone(name: &str) -> Error {
    Error::invalid("command", format!("there is no {name} here"))
}

/// Prints the answer; returns whether to go on.
fn reply(answer: Result<String>) -> bool {
    match answer {
        Ok(word) if word == "quit" => {
            say("ok", "");
            return false;
        }
        Ok(text) => say("ok", text),
        Err(error) => say("err", kind(&error)),
    }
    true
}

/// `write NAME SEED` and `check NAME SEED` by the CPU; `gpu NAME SEED NEXT`: the GPU checks and rewrites.
fn bytes<'a, M: egmem::Memory>(
    line: &str,
    driver: &Driver,
    memory: &M,
    cpu: impl FnOnce() -> Result<egmem::memory::CpuView<'a>>,
) -> Result<String> {
    let mut words = Words(line.split_whitespace());
    let what = words.word()?;
    let _name = words.word()?;
    let seed = words.number()?;
    match what {
        "write" => proof::write_pattern(&cpu()?, seed)?,
        "check" => proof::check_pattern(&cpu()?, seed)?,
        _ => Prover::new(driver, 0)?.check_rewrite(memory, seed, words.number()?)?,
    }
    Ok(String::new())
}

/// Limits with the setup's time for each step.
fn limits(setup: &Setup) -> Limits {
    let mut limits = Limits::default();
    if let Some(step) = setup.step {
        limits.handshake = setup.handshake.unwrap_or(step);
        limits.frame = step;
        limits.write = step;
        limits.request = step.max(limits.request);
    }
    limits
}
