//! A server in a process of its own, and how its memory is looked at.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use egmem::driver::NodeId;
use egmem::exchange::protocol::Create;
use egmem::exchange::server::{Allocate, Allocation, Published};
use egmem::exchange::{
    self, Address, Limits, PeerList, PeerName, Refusal, Security, Server, Tls, TlsFiles,
};
use egmem::share::Shared;
use egmem::{Buffer, Driver, Growth, Machine};
use serde::{Deserialize, Serialize};

use crate::counting::{anonymous, live, peak, reset, trim};
use crate::peer::{PATIENCE, until};
use crate::runtime;
use egmem_tests::child;
use egmem_tests::pki::Files;

/// The variable that makes this program a server.
pub const SETUP: &str = "EGMEM_BYTES_SETUP";
/// The beginning of lines for the parent; libtest prints others.
const MARK: &str = "@look ";
/// The prefix of names for which an allocator never answers, for as long as its peer waits.
pub const NEVER: &str = "never/";
/// The name that is always there, and one with so many parts that an answer about it is a large frame.
pub const NAME: &str = "a";
pub const IN_PARTS: &str = "parts";

/// glibc's allocator without the memory that it keeps by default: caches of threads, an arena for each thread, and
/// thresholds that grow. Resident is then only memory that is allocated, or that [`trim`] cannot give back.
const TUNABLES: &str = "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0:\
    glibc.malloc.trim_threshold=131072:glibc.malloc.mmap_threshold=131072";

/// The settings of a server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Setup {
    /// For its sockets.
    pub folder: PathBuf,
    pub files: Option<Files>,
    pub limits: Limits,
    /// After so many seconds without a word a connection is closed, and after as many more its session
    /// ends.
    pub lease: u64,
    /// How many names there are beside [`NAME`].
    pub names: usize,
    /// How many parts [`IN_PARTS`] has; without any it is not there.
    pub parts: u64,
}

/// A server's memory, and its counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Look {
    /// Bytes that are allocated.
    pub live: usize,
    /// The most since the last reset.
    pub peak: usize,
    /// Resident bytes of heap and stacks.
    pub anonymous: usize,
    pub connections: u64,
    pub sessions: u64,
    pub leases: u64,
    pub names: u64,
    pub failed_handshakes: u64,
    pub requests: u64,
    /// Requests that were refused for a limit.
    pub limited: u64,
    /// Tasks and blocking calls.
    pub tasks: u64,
}

/// Publishes the names that peers create, but never those that begin with [`NEVER`].
struct Maker {
    memory: Shared,
    server: OnceLock<Server>,
    made: Mutex<HashMap<String, Published>>,
}

impl Allocate for Maker {
    fn may_create(&self, _: &PeerName, _: &str) -> Result<(), (Refusal, String)> {
        Ok(())
    }

    fn create<'a>(&'a self, peer: &'a PeerName, ask: &'a Create) -> Allocation<'a> {
        Box::pin(async move {
            if ask.name.starts_with(NEVER) {
                std::future::pending::<()>().await;
            }
            let refuse = |error: exchange::Error| (Refusal::Invalid, error.to_string());
            let others: PeerList = ask.peers.parse().map_err(refuse)?;
            let who = others.and(peer.clone());
            let server = self.server.get().expect("it serves");
            let publish = server.publish(&ask.name, self.memory.clone());
            let published = publish.who(who).owner(peer.clone()).now();
            let published = published.map_err(refuse)?;
            self.made().insert(ask.name.clone(), published);
            Ok(())
        })
    }

    fn delete<'a>(&'a self, _: &'a PeerName, name: &'a str, _: Duration) -> Allocation<'a> {
        Box::pin(async move {
            if name.starts_with(NEVER) {
                std::future::pending::<()>().await;
            }
            let mut made = self.made();
            let found = made.remove(name);
            if made.is_empty() {
                made.shrink_to_fit();
            }
            drop(made);
            found.map(drop).ok_or((Refusal::NotFound, String::new()))
        })
    }
}

impl Maker {
    fn made(&self) -> std::sync::MutexGuard<'_, HashMap<String, Published>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves until standard input ends, and looks where a line asks for it.
pub fn serve(setup: &Setup) {
    // A huge page would count as 2 MiB as soon as one byte of it is touched.
    // SAFETY: it changes only by which pages the kernel backs this process's memory.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
    let runtime = runtime();
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let buffer = Buffer::on(NodeId(0)).bytes(1 << 20).shareable();
    let memory = Shared::from(buffer.allocate(&driver).unwrap());
    let maker = Arc::new(Maker {
        memory: memory.clone(),
        server: OnceLock::new(),
        made: Mutex::default(),
    });
    let mut options = Server::options()
        .listen(Address::loopback(0))
        .listen(Address::Unix(setup.folder.join("socket")))
        .allocator(Arc::clone(&maker) as Arc<dyn Allocate>)
        .heartbeat(Duration::from_secs(setup.lease) / 2)
        .lease(Duration::from_secs(setup.lease))
        .limits(setup.limits.clone());
    if let Some(files) = setup.files.clone() {
        let files = TlsFiles {
            ca: files.ca,
            cert: files.cert,
            key: files.key,
            crl: None,
        };
        options = options.security(Security::Tls(Tls::load(files).unwrap()));
    }
    let _entered = runtime.enter();
    let server = runtime.block_on(options.start()).unwrap();
    assert!(maker.server.set(server).is_ok());
    let server = maker.server.get().unwrap();
    let publish = |name: String| server.publish(name, memory.clone()).now().unwrap();
    let names = (0..setup.names).map(|name| format!("list/{name:0>200}"));
    let _names: Vec<_> = names.map(publish).collect();
    let in_parts = (setup.parts > 0).then(|| {
        let chunks = Growth::steady().chunk(2 << 20);
        let buffer = Buffer::on(NodeId(0)).bytes(setup.parts * (2 << 20));
        let buffer = buffer.shareable().growth(chunks).allocate(&driver);
        Shared::from(buffer.unwrap())
    });
    let publish_in_parts = || {
        let memory = in_parts.clone()?;
        Some(server.publish(IN_PARTS, memory).now().unwrap())
    };
    let mut name_in_parts = publish_in_parts();
    let mut name = Some(publish(NAME.into()));
    let Address::Tcp { port, .. } = server.addresses()[0] else {
        panic!("no port");
    };
    println!("{MARK}{port}");
    for line in std::io::stdin().lock().lines() {
        match line.unwrap().as_str() {
            "reset" => reset(),
            "trim" => trim(),
            "renew" => {
                drop((name.take(), name_in_parts.take()));
                name = Some(publish(NAME.into()));
                name_in_parts = publish_in_parts();
            }
            "end" => drop(server.end_sessions_if(|_| true)),
            _ => {}
        }
        println!("{MARK}{}", serde_json::to_string(&look(server)).unwrap());
    }
    drop((name, name_in_parts));
    // Nothing else is left but this process's end.
    std::process::exit(0);
}

fn look(server: &Server) -> Look {
    let (live, peak) = (live(), peak());
    let stats = server.stats();
    Look {
        live,
        peak,
        anonymous: anonymous(),
        connections: stats.connections,
        sessions: stats.sessions,
        leases: stats.leases,
        names: stats.names,
        failed_handshakes: stats.failed_handshakes,
        requests: stats.requests,
        limited: stats.refusals.get("limit").copied().unwrap_or(0),
        tasks: stats.tasks,
    }
}

/// The process, as its parent has it.
pub struct Host {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    pub port: u16,
    pub folder: PathBuf,
}

impl Host {
    pub fn start(setup: &Setup) -> Self {
        let mut process = child("", "the_server")
            .env(SETUP, serde_json::to_string(setup).unwrap())
            .env("GLIBC_TUNABLES", TUNABLES)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = process.stdin.take();
        let output = BufReader::new(process.stdout.take().unwrap());
        let mut this = Self {
            process,
            input,
            output,
            port: 0,
            folder: setup.folder.clone(),
        };
        this.port = this.line().parse().unwrap();
        this
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            let count = self.output.read_line(&mut line).unwrap();
            assert!(count > 0, "the server has ended");
            // libtest does not end the line with its test's name.
            if let Some((_, rest)) = line.split_once(MARK) {
                return rest.trim().to_owned();
            }
        }
    }

    fn ask(&mut self, what: &str) -> Look {
        let input = self.input.as_mut().unwrap();
        writeln!(input, "{what}").unwrap();
        serde_json::from_str(&self.line()).unwrap()
    }

    pub fn look(&mut self) -> Look {
        self.ask("look")
    }

    /// Resets the peak of the bytes.
    pub fn reset(&mut self) -> Look {
        self.ask("reset")
    }

    /// The same, with all free pages given back.
    pub fn trimmed(&mut self) -> Look {
        self.ask("trim")
    }

    /// Ends all sessions, also those that wait for their client.
    pub fn end_sessions(&mut self) -> Look {
        self.ask("end")
    }

    /// Waits until every request that has been read is answered, or waits: `requests` of them have come, and nothing
    /// changes. Returns the last look.
    pub fn settled(&mut self, requests: u64) -> Look {
        let mut last = self.look();
        let mut quiet = 0;
        until("quiet", || {
            std::thread::sleep(Duration::from_millis(25));
            let now = self.look();
            let state = |look: &Look| (look.requests, look.tasks, look.leases, look.connections);
            quiet = match state(&now) == state(&last) && now.requests >= requests {
                true => quiet + 1,
                false => 0,
            };
            last = now;
            quiet >= 4
        });
        last
    }

    /// Waits until peers have left nothing. The server keeps expired leases until their name is withdrawn,
    /// so this publishes the name again.
    pub fn empty(&mut self) -> Look {
        until("no connection", || self.look().connections == 0);
        self.ask("renew");
        until("gone", || {
            let now = self.look();
            (now.connections, now.sessions, now.leases) == (0, 0, 0)
        });
        self.trimmed()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.input.take());
        let begun = std::time::Instant::now();
        while matches!(self.process.try_wait(), Ok(None)) && begun.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
