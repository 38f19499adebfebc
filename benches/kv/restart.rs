//! A tier through the service: found again after its process was killed, and ready after a process has started.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use clap::ValueEnum;
use egmem::Driver;
use egmem::exchange::{Client, blocking};
use egmem::kv::{Key, Load, Tier};
use egmem::pinned::PinnedHost;
use egmem::service::{Service, ServiceConfig};

use crate::setup::{key, median, node};
use crate::{Args, Result};

const PAGE: u64 = 64 << 10;

/// The role of a process.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub enum Role {
    /// Keeps the memory, until its input ends
    Serve,
    /// Fills a tier, and waits to be killed
    Fill,
    /// Attaches the tier, and checks every byte
    Verify,
    /// Attaches the tier
    Attach,
    /// Allocates a tier in memory of its own
    Cold,
    /// Allocates by `cuMemHostAlloc`
    HostAlloc,
}

/// Plays a role. The first line of the output begins with "ready".
pub fn play(args: &Args, role: Role) -> Result<()> {
    let start = Instant::now();
    let driver = args.driver()?;
    let opened = start.elapsed().as_secs_f64() * 1e3;
    let pages = args.bytes / PAGE;
    let wait = |what: String| {
        println!("ready {what}");
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
    };
    match role {
        Role::Serve => return serve(args, &driver),
        Role::Fill => {
            let (tier, _) = attach(args, &driver)?;
            let keys: Vec<Key> = (0..pages).map(key).collect();
            let mut store = tier.prepare_store(&keys)?;
            in_parts(pages, |number| {
                Ok(store
                    .view(number as usize)?
                    .write_at(0, &contents(number))?)
            })?;
            store.commit()?;
            // Left in the middle of a store.
            let _unfinished =
                tier.prepare_store(&(pages..pages + 100).map(key).collect::<Vec<_>>())?;
            wait(format!("{pages} pages"));
        }
        Role::Verify => {
            let (tier, [connected, imported, opened]) = attach(args, &driver)?;
            let found = tier.found();
            let ready = tier.keys();
            let keys: Vec<Key> = ready.iter().map(|(key, _)| *key).collect();
            let load = tier.prepare_load(&keys)?;
            let checked = Instant::now();
            in_parts(keys.len() as u64, |index| {
                check(&load, &keys, index as usize)
            })?;
            let checked = checked.elapsed().as_secs_f64();
            let bytes = (found.ready * PAGE) as f64;
            let times = format!("{connected} {imported} {opened} {checked}");
            wait(format!("{times} {bytes} {}", found.unfinished));
        }
        Role::Attach => {
            let (_tier, [connected, imported, attached]) = attach(args, &driver)?;
            wait(format!("{opened} {connected} {imported} {attached}"));
        }
        Role::Cold => {
            let tier = Tier::on(node(&driver)?)
                .pages(pages)
                .page_bytes(PAGE)
                .create(&driver)?;
            wait(opened.to_string());
            drop(tier);
        }
        Role::HostAlloc => {
            let memory = PinnedHost::new(&driver, 0, args.bytes)?;
            wait(opened.to_string());
            drop(memory);
        }
    }
    Ok(())
}

/// Attaches the tier. Returns it with the milliseconds of: the connection, the import, the attachment.
fn attach(args: &Args, driver: &Driver) -> Result<(Tier, [f64; 3])> {
    let mut begun = Instant::now();
    let mut lap = || {
        let now = Instant::now();
        (now - std::mem::replace(&mut begun, now)).as_secs_f64() * 1e3
    };
    let client = blocking::Client::connect(Client::options(args.at.parse()?), driver)?;
    let connected = lap();
    let memory = client.fetch("kv")?;
    let imported = lap();
    let tier = Tier::attach(Arc::new(memory)).page_bytes(PAGE);
    let tier = tier.pages(args.bytes / PAGE).open()?;
    Ok((tier, [connected, imported, lap()]))
}

/// The words of a page: no two are the same.
fn contents(number: u64) -> Vec<u64> {
    let words = number * (PAGE / 8)..(number + 1) * (PAGE / 8);
    words
        .map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ word >> 7)
        .collect()
}

fn check(load: &Load, keys: &[Key], index: usize) -> Result<(), egmem::kv::Error> {
    let mut number = [0; 8];
    number.copy_from_slice(&keys[index].as_bytes()[..8]);
    let mut words = vec![0_u64; PAGE as usize / 8];
    load.view(index)?.read_at(0, &mut words)?;
    assert!(
        words == contents(u64::from_le_bytes(number)),
        "page {index} has other bytes"
    );
    Ok(())
}

/// Calls `work` for each number below `count`, in several threads.
fn in_parts(count: u64, work: impl Fn(u64) -> Result<(), egmem::kv::Error> + Sync) -> Result<()> {
    let threads = thread::available_parallelism().map_or(1, |threads| threads.get() as u64);
    thread::scope(|scope| {
        let part = |thread| {
            let work = &work;
            scope.spawn(move || (thread..count).step_by(threads as usize).try_for_each(work))
        };
        let parts: Vec<_> = (0..threads).map(part).collect();
        for part in parts {
            part.join().map_err(|_| "a thread has panicked")??;
        }
        Ok(())
    })
}

fn serve(args: &Args, driver: &Driver) -> Result<()> {
    let bytes = Tier::bytes_needed(args.bytes / PAGE, PAGE)?;
    let config = format!(
        "listen = [\"{}\"]\n[[buffer]]\nname = \"kv\"\nbytes = \"{bytes}\"\nnode = {}\nwho = [\"*\"]\n",
        args.at,
        node(driver)?.0
    );
    let runtime = tokio::runtime::Runtime::new()?;
    let service = runtime.block_on(Service::start(ServiceConfig::from_toml(&config)?, driver))?;
    println!("ready");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    drop(service);
    Ok(())
}

/// A process with a role, killed when dropped.
struct Player {
    child: Child,
    ready: String,
    /// Milliseconds from its start until it was ready.
    after: f64,
}

impl Player {
    fn start(args: &Args, role: Role, at: &str, bytes: u64) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--role", &name(role), "--at", at]);
        command.args(["--bytes", &bytes.to_string()]);
        if args.cuda {
            command.arg("--cuda");
        }
        let start = Instant::now();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take().ok_or("no output")?;
        let mut ready = String::new();
        BufReader::new(output).read_line(&mut ready)?;
        let after = start.elapsed().as_secs_f64() * 1e3;
        let player = Self {
            child,
            after,
            ready,
        };
        match player.ready.starts_with("ready") {
            true => Ok(player),
            false => Err(format!("the process for {role:?} has failed").into()),
        }
    }

    fn numbers(&self) -> Vec<f64> {
        self.ready
            .split_whitespace()
            .filter_map(|word| word.parse().ok())
            .collect()
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The name of an option's value.
fn name(value: impl ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}

fn socket(folder: &Path) -> String {
    format!("unix:{}", folder.join("kv.sock").display())
}

/// A process fills a tier and is killed; the next one finds and checks it.
pub fn restart(args: &Args) -> Result<()> {
    let bytes = if args.cuda { 8 << 30 } else { 16 << 20 };
    let folder = tempfile::tempdir()?;
    let at = socket(folder.path());
    let _service = Player::start(args, Role::Serve, &at, bytes)?;
    drop(Player::start(args, Role::Fill, &at, bytes)?); // killed
    println!(
        "\na tier of {} MiB of pages of 64 KiB, whose process was killed (SIGKILL)",
        bytes >> 20
    );
    println!(
        "ms: connected, imported, attached; GB/s of the last two; ms to verify; GB/s of all; pages freed"
    );
    for _ in 0..9 {
        let player = Player::start(args, Role::Verify, &at, bytes)?;
        let numbers = player.numbers();
        let [connected, imported, opened, checked, found, freed] = numbers[..] else {
            return Err(format!("'{}' has other numbers", player.ready).into());
        };
        let checked = checked * 1e3;
        let attached = imported + opened;
        println!(
            "{connected:>8.1} {imported:>8.1} {opened:>8.1} {:>8.1} {checked:>8.1} {:>8.1} {freed:>6}",
            found / attached / 1e6,
            found / (connected + attached + checked) / 1e6,
        );
    }
    Ok(())
}

/// The time from the start of a process until its tier is ready.
pub fn start(args: &Args) -> Result<()> {
    let bytes = if args.cuda { 16 << 30 } else { 16 << 20 };
    let folder = tempfile::tempdir()?;
    let at = socket(folder.path());
    let service = Player::start(args, Role::Serve, &at, bytes)?;
    println!(
        "\n{} MiB, ms after the process has started; of these for opening the driver, and for the connection, import, and table",
        bytes >> 20
    );
    let measure = |what: &str, role, rounds| -> Result<()> {
        let (mut ready, mut steps) = (Vec::new(), vec![Vec::new(); 4]);
        for _ in 0..rounds {
            let player = Player::start(args, role, &at, bytes)?;
            ready.push(player.after);
            for (step, took) in steps.iter_mut().zip(player.numbers()) {
                step.push(took);
            }
        }
        let steps = steps.into_iter().filter(|step| !step.is_empty());
        let steps: String = steps
            .map(|step| format!(" {:>7.1}", median(step)))
            .collect();
        println!("{what:>32} {:>9.0} {steps}", median(ready));
        Ok(())
    };
    measure("through the service", Role::Attach, 5)?;
    drop(service);
    measure("cold, a tier of its own", Role::Cold, 2)?;
    measure("cuMemHostAlloc", Role::HostAlloc, 2)?;
    Ok(())
}
