//! What the child processes do: an owner publishes, a peer fetches, both as they are told by lines.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use egmem::driver::{Access, HandleType, Location};
use egmem::exchange::server::{HolderState, Published};
use egmem::exchange::{
    Client, LeaseState, Limits, RemoteBuffer, Security, Server, Tls, TlsFiles, Who,
};
use egmem::proof::{self, Prover};
use egmem::share::Shared;
use egmem::{Buffer, Driver, Error, Machine, Result};
use tokio::sync::mpsc;

use crate::harness::{MARK, Setup, fds, mapped, patience};

/// Plays the role until its input ends, then looks for what was not given back.
pub fn play(setup: &Setup) {
    let driver = match setup.driver.as_str() {
        "cuda" => Driver::open().expect("a GPU"),
        preset => Driver::simulated(Machine::preset(preset).expect("a preset")).expect("simulated"),
    };
    raise_fd_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let mut commands = commands();
    let before = fds();
    runtime.block_on(async {
        let ended = match setup.role.as_str() {
            "owner" => owner(setup, &driver, &mut commands).await,
            _ => peer(setup, &driver, &mut commands).await,
        };
        if let Err(error) = ended {
            return say("err", kind(&error));
        }
        // What ends in the background may take its time.
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

/// A crowd needs more fds than the 1024 that processes usually have.
fn raise_fd_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(8192, |most| most.min(8192));
    if limit.current.is_some_and(|now| now < wanted) {
        let raised = Rlimit {
            current: Some(wanted),
            ..limit
        };
        setrlimit(Resource::Nofile, raised).expect("up to the hard limit");
    }
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
    let debug = format!("{error:?}");
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

async fn owner(
    setup: &Setup,
    driver: &Driver,
    commands: &mut mpsc::Receiver<String>,
) -> Result<()> {
    let options = Server::options()
        .listen(setup.address.parse()?)
        .security(security(setup)?)
        .heartbeat(setup.heartbeat)
        .lease(setup.lease)
        .limits(limits(setup));
    let server = match &setup.door {
        Some(path) => options.door(Some(path.clone())),
        None => options,
    };
    let server = server.start().await?;
    let mut events = server.events();
    let mut names: HashMap<String, (Shared, Published)> = HashMap::new();
    say(
        "ready",
        format!("{} {}", server.addresses()[0], server.instance()),
    );
    while let Some(line) = commands.recv().await {
        let mut words = Words(line.split_whitespace());
        let answer = async {
            match words.word()? {
                "publish" => {
                    let name = words.word()?;
                    let shared = allocate(driver, words.number()?, words.number()?)?;
                    let who: Vec<&str> = words.0.collect();
                    let who = match who.is_empty() {
                        true => Who::anyone(),
                        false => Who::list(who)?,
                    };
                    let options = server.publish(name, shared.clone());
                    let published = options
                        .access(Access::ReadWrite)
                        .who(who)
                        .probe(true)
                        .now()?;
                    names.insert(name.to_owned(), (shared, published));
                    Ok(String::new())
                }
                "write" | "check" | "gpu" => {
                    let check = line.clone();
                    let name = words.word()?;
                    let (shared, _) = names.get(name).ok_or_else(|| gone(name))?;
                    let buffer = shared.buffer().ok_or_else(|| gone(name))?;
                    bytes(&check, driver, &**buffer, || buffer.cpu())
                }
                "importers" => {
                    let name = words.word()?;
                    let (_, published) = names.get(name).ok_or_else(|| gone(name))?;
                    let holders = published.importers();
                    let peers = holders.iter().map(|holder| match holder.state {
                        HolderState::Expired => format!("{}:expired", holder.peer),
                        _ => holder.peer.to_string(),
                    });
                    Ok(peers.collect::<Vec<_>>().join(" "))
                }
                "withdraw" => {
                    let name = words.word()?;
                    let deadline = Duration::from_millis(words.number()?);
                    let (_, published) = names.get(name).ok_or_else(|| gone(name))?;
                    published.withdraw(deadline).await?;
                    names.remove(name);
                    Ok(String::new())
                }
                "drop" => {
                    let name = words.word()?;
                    names.remove(name).ok_or_else(|| gone(name))?;
                    Ok(String::new())
                }
                "events" => {
                    let mut seen = Vec::new();
                    while let Ok(event) = events.try_recv() {
                        seen.push(format!("{event:?}").replace('\n', " "));
                    }
                    Ok(seen.join(" | "))
                }
                "stats" => Ok(format!("{:?}", server.stats()).replace('\n', " ")),
                "quit" => {
                    names.clear();
                    server.close(patience()).await?;
                    Ok("quit".into())
                }
                other => Err(Error::invalid("command", other)),
            }
        };
        if !reply(answer.await) {
            break;
        }
    }
    Ok(())
}

/// Tells the answer; whether to go on.
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

/// Memory on GPU 0's host node that can be shared, with the pattern of `seed` in it.
fn allocate(driver: &Driver, bytes: u64, seed: u64) -> Result<Shared> {
    let node = driver.device_attribute(0, egmem::driver::DeviceAttribute::HOST_NUMA_ID)?;
    let buffer = Buffer::on(Location::HostNuma(node))
        .access_by([Location::Device(0)])
        .bytes(bytes)
        .shareable()
        .allocate(driver)?;
    proof::write_pattern(&buffer.cpu()?, seed)?;
    Ok(Shared::from(buffer))
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

async fn peer(setup: &Setup, driver: &Driver, commands: &mut mpsc::Receiver<String>) -> Result<()> {
    let client = Client::options(setup.address.parse()?)
        .security(security(setup)?)
        .connect(driver)
        .await?;
    let mut held: HashMap<String, RemoteBuffer> = HashMap::new();
    let mut crowd = Vec::new();
    say("ready", client.instance());
    while let Some(line) = commands.recv().await {
        let mut words = Words(line.split_whitespace());
        let answer = async {
            match words.word()? {
                "fetch" => {
                    let name = words.word()?;
                    let mut fetch = client.fetch(name).access_by([Location::Device(0)]);
                    fetch = match words.word()? {
                        "fabric" => fetch.via(HandleType::Fabric),
                        "fd" => fetch.via(HandleType::PosixFd),
                        _ => fetch,
                    };
                    let buffer = fetch.probe(true).await?;
                    let text = format!(
                        "{:?} {} {:?}",
                        buffer.via(),
                        buffer.description().parts[0].identity,
                        buffer.proved()
                    );
                    held.insert(name.to_owned(), buffer);
                    Ok(text)
                }
                "write" | "check" | "gpu" => {
                    let name = words.word()?;
                    let buffer = held.get(name).ok_or_else(|| gone(name))?;
                    bytes(&line, driver, buffer, || buffer.cpu())
                }
                "crowd" => {
                    let (count, name) = (words.number()?, words.word()?);
                    crowd = gather(setup, driver, count, name).await?;
                    Ok(String::new())
                }
                "disperse" => {
                    for (client, buffer) in crowd.drain(..) {
                        buffer.release().await?;
                        client.clone().close().await;
                    }
                    Ok(String::new())
                }
                "state" => {
                    let name = words.word()?;
                    let buffer = held.get(name).ok_or_else(|| gone(name))?;
                    Ok(state(&buffer.state()))
                }
                "await" => {
                    let name = words.word()?;
                    let wanted = words.word()?;
                    let buffer = held.get_mut(name).ok_or_else(|| gone(name))?;
                    let begin = Instant::now();
                    while !state(&buffer.state()).starts_with(wanted) {
                        let left = patience().saturating_sub(begin.elapsed());
                        let late = |_| Error::TimedOut {
                            what: format!("{wanted}, it is {:?}", buffer.state()),
                            after: patience(),
                        };
                        tokio::time::timeout(left.min(Duration::from_millis(20)), buffer.changed())
                            .await
                            .ok();
                        if left.is_zero() {
                            return Err(late(()));
                        }
                    }
                    let state = state(&buffer.state());
                    Ok(format!("{} {state}", begin.elapsed().as_millis()))
                }
                "release" => {
                    let name = words.word()?;
                    let buffer = held.remove(name).ok_or_else(|| gone(name))?;
                    buffer.release().await.map(|()| String::new())
                }
                "drop" => {
                    let name = words.word()?;
                    held.remove(name).ok_or_else(|| gone(name))?;
                    Ok(String::new())
                }
                "list" => {
                    let entries = client.list("").await?;
                    let names = entries.iter().map(|entry| entry.name.clone());
                    Ok(names.collect::<Vec<_>>().join(" "))
                }
                "instance" => Ok(client.instance().to_string()),
                "quit" => {
                    held.clear();
                    client.clone().close().await;
                    Ok("quit".into())
                }
                other => Err(Error::invalid("command", other)),
            }
        };
        if !reply(answer.await) {
            break;
        }
    }
    Ok(())
}

/// So many clients of their own, all at once, each with the memory of `name`.
async fn gather(
    setup: &Setup,
    driver: &Driver,
    count: u64,
    name: &str,
) -> Result<Vec<(Client, RemoteBuffer)>> {
    let security = security(setup)?;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..count {
        let options = Client::options(setup.address.parse()?)
            .security(security.clone())
            .limits(limits(setup))
            .timeout(setup.step.unwrap_or_else(patience));
        let (driver, name) = (driver.clone(), name.to_owned());
        tasks.spawn(async move {
            let client = options.connect(&driver).await?;
            let buffer = client.fetch(name).via(HandleType::Fabric).await?;
            proof::check_pattern(&buffer.cpu()?, 1)?;
            Ok::<_, Error>((client, buffer))
        });
    }
    let mut crowd = Vec::new();
    while let Some(one) = tasks.join_next().await {
        crowd.push(one.expect("no panic")?);
    }
    Ok(crowd)
}

/// Limits with the setup's time for each step.
fn limits(setup: &Setup) -> Limits {
    let mut limits = Limits::default();
    if let Some(step) = setup.step {
        limits.handshake = step;
        limits.frame = step;
        limits.write = step;
        limits.request = step.max(limits.request);
    }
    limits
}

fn state(state: &LeaseState) -> String {
    match state {
        LeaseState::Held => "held".into(),
        LeaseState::Withdrawing { .. } => "withdrawing".into(),
        LeaseState::Lost(error) => format!("lost {}", kind(error)),
        #[allow(unreachable_patterns)]
        other => format!("{other:?}"),
    }
}
