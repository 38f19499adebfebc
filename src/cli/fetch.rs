//! `egmem fetch`: takes a lease on memory, maps it here, and uses it.

use std::fs::File;
use std::io::{ErrorKind, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use egmem::Driver;
use egmem::driver::{Access, HandleType, Location, NodeId};
use egmem::exchange::{
    Address, Client, CreateOptions, Error, FetchOptions, Followed, LeaseState, Owner, RemoteBuffer,
    Result,
};
use egmem::memory::CpuView;
use egmem::proof::Prover;
use egmem::size::Bytes;
use tokio_util::sync::CancellationToken;

use crate::common::Source;
use crate::connect::{self, Connect, block_on};
use crate::log::create_private;
use crate::output::{ByteProgress, print, progress};
use crate::signals::{Ends, Left, end_now};

/// Files are copied in pieces of this size.
const PIECE: usize = 1 << 20;

/// `egmem fetch`
#[derive(Args, Debug)]
pub struct Fetch {
    /// The server: unix:/path or tcp://host:port
    #[arg(value_name = "ADDRESS")]
    address: Address,
    /// The memory's name
    #[arg(value_name = "NAME", value_parser = connect::name)]
    name: String,
    /// Create the memory, or take the memory that this peer created there before with the same size and
    /// node; it stays when this program ends
    #[arg(long, requires = "bytes")]
    create: bool,
    /// The size of created memory: 4096, 64MiB, 16GiB
    #[arg(long, value_name = "SIZE", requires = "create")]
    bytes: Option<Bytes>,
    /// The host node of created memory
    #[arg(long, value_name = "NODE", requires = "create")]
    node: Option<i32>,
    /// Peers that may fetch created memory, besides this one: a certificate's name, uid:1000 or *
    #[arg(long, value_name = "PEER", requires = "create")]
    share: Vec<String>,
    /// Fetch it only if this peer created it: a certificate's name, uid:1000, local, or @server for the
    /// server's own memory. With --create the default is this peer
    #[arg(long, value_name = "PEER", conflicts_with = "create")]
    owner: Option<Owner>,
    /// The kind of handle to import; by default, one that works
    #[arg(long)]
    via: Option<Via>,
    /// Fetch it read-only
    #[arg(long, conflicts_with = "write")]
    read_only: bool,
    /// Check that the CPU and each GPU read the same bytes, and have a GPU take part in the fetch's proof; changes none
    #[arg(long)]
    verify: bool,
    /// Copy this file to the start of the memory
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// Copy the memory to this file; - is standard output
    #[arg(long, value_name = "FILE|-")]
    read: Option<PathBuf>,
    /// Hold it until SIGTERM, SIGINT, or until the server recalls it
    #[arg(long)]
    hold: bool,
    /// Stay until SIGTERM or SIGINT, and fetch the name again whenever it has other memory: after its
    /// exporter has restarted, or it was deleted and published again. Repeats --verify and --read each time
    #[arg(long, conflicts_with_all = ["create", "write", "hold", "wait"])]
    follow: bool,
    /// Wait this many seconds for the name to exist
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    wait: u64,
    #[command(flatten)]
    source: Source,
    #[command(flatten)]
    connect: Connect,
}

/// The kind of handle to import.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Via {
    /// POSIX file descriptors: on one machine.
    Fd,
    /// Fabric handles: between the nodes of an IMEX domain.
    Fabric,
}

impl Fetch {
    /// Fetches, uses and releases.
    pub fn run(&self) -> Result<()> {
        let driver = self.source.open()?;
        block_on(async {
            let client = self.connect.client(&self.address, &driver).await?;
            let done = self.fetch(&client, &driver).await;
            client.close().await;
            done
        })
    }

    async fn fetch(&self, client: &Client, driver: &Driver) -> Result<()> {
        if self.create {
            self.create(client).await?;
        }
        if self.wait > 0 {
            let within = Duration::from_secs(self.wait);
            client.wait(&self.name, within).await?;
        }
        let options = self.options(client)?;
        if self.follow {
            return self.follow(options, driver).await;
        }
        let begun = Instant::now();
        let memory = options.go().await?;
        let took = (!driver.is_simulated()).then(|| begun.elapsed());
        self.show_and_use(driver, &memory, took, &|| false)?;
        if self.hold {
            self.hold(&memory).await?;
        }
        memory.release().await?;
        self.say("  released\n")
    }

    /// Has the memory created, unless this peer has created it before.
    async fn create(&self, client: &Client) -> Result<()> {
        let bytes = self.bytes.map_or(0, |bytes| bytes.0);
        let mut options = CreateOptions::new(self.name.as_str(), bytes);
        if let Some(node) = self.node {
            options = options.node(NodeId(node));
        }
        for peer in &self.share {
            options = options.share_with(peer.as_str());
        }
        client.create_or_get(options).await.map(drop)
    }

    fn options(&self, client: &Client) -> Result<FetchOptions> {
        let mut options = client.fetch(self.name.as_str());
        if self.create {
            options = options.expect_owner(client.peer_name()?);
        } else if let Some(owner) = &self.owner {
            options = options.expect_owner(owner.clone());
        }
        if let Some(via) = self.via {
            options = options.via(match via {
                Via::Fd => HandleType::PosixFd,
                Via::Fabric => HandleType::Fabric,
            });
        }
        if self.read_only {
            options = options.read_only();
        }
        if self.write.is_some() {
            options = options.read_write();
        }
        Ok(options)
    }

    /// Returns whether the bytes go to standard output.
    fn reads_to_stdout(&self) -> bool {
        self.read.as_deref() == Some(Path::new("-"))
    }

    /// Prints `text`, unless the memory's bytes go to standard output.
    fn say(&self, text: &str) -> Result<()> {
        if self.reads_to_stdout() {
            return Ok(());
        }
        Ok(print(text)?)
    }

    /// Shows the fetched memory, then checks, writes and reads it as requested. Returns `false` if `stop` ended
    /// that early.
    fn show_and_use(
        &self,
        driver: &Driver,
        memory: &RemoteBuffer,
        took: Option<Duration>,
        stop: &dyn Fn() -> bool,
    ) -> Result<bool> {
        self.say(&summary(memory, took))?;
        if let Some(file) = &self.write {
            let bytes = Bytes(write(file, &memory.cpu()?)?);
            self.say(&format!("  wrote {bytes} from {}\n", file.display()))?;
        }
        if self.verify {
            let Some(gpus) = verify(driver, memory, stop)? else {
                return Ok(false);
            };
            let s = if gpus == 1 { "" } else { "s" };
            self.say(&format!(
                "  verified: the CPU and {gpus} GPU{s} read the same bytes\n"
            ))?;
        }
        if let Some(file) = &self.read {
            if !read(file, &memory.cpu()?, stop)? {
                return Ok(false);
            }
            self.say(&format!("  copied to {}\n", file.display()))?;
        }
        Ok(true)
    }

    /// Waits for a signal, or until the server recalls the memory; losing the memory is an error.
    async fn hold(&self, memory: &RemoteBuffer) -> Result<()> {
        let mut signals = Ends::new()?;
        self.say("  holding\n")?;
        loop {
            let state = tokio::select! {
                _ = signals.next() => return Ok(()),
                state = memory.changed() => state,
            };
            self.say(&format!("  {state}\n"))?;
            match state {
                LeaseState::Lost(error) => return Err(error),
                LeaseState::Withdrawing { .. } => return Ok(()),
                _ => {}
            }
        }
    }

    /// Follows the name until a signal arrives, or an error ends the follow.
    async fn follow(&self, options: FetchOptions, driver: &Driver) -> Result<()> {
        if self.reads_to_stdout() {
            let why = "--follow copies memory more than once; give --read a file";
            return Err(Error::invalid("--read -", why));
        }
        let end = ending()?;
        let mut follow = options.follow();
        let mut held = None;
        loop {
            let next = tokio::select! {
                () = end.cancelled() => break,
                next = follow.next() => next,
            };
            // Before the next memory is used, so that its exporter does not have to wait.
            if held.take().is_some() {
                print("  dropped\n")?;
            }
            match next? {
                Followed::Memory(memory) => {
                    let used = self.show_and_use(driver, &memory, None, &|| end.is_cancelled())?;
                    held = Some(memory);
                    if !used {
                        break;
                    }
                    print("  following\n")?;
                }
                Followed::Gone(why) => print(&format!("{}: gone: {why}\n", self.name))?,
                other => print(&format!("{}: {other:?}\n", self.name))?,
            }
        }
        match held {
            Some(memory) if memory.state() == LeaseState::Held => {
                memory.release().await?;
                Ok(print("  released\n")?)
            }
            _ => Ok(()),
        }
    }
}

/// Returns a token that a signal cancels, received by the runtime's other thread while this one copies. A second signal ends the
/// process at once: a copy to a pipe without a reader does not return.
fn ending() -> Result<CancellationToken> {
    let mut signals = Ends::new()?;
    let token = CancellationToken::new();
    let request = token.clone();
    tokio::spawn(async move {
        signals.next().await;
        request.cancel();
        // Standard output may be full, and this thread must receive the next signal.
        let _ = std::thread::Builder::new().spawn(|| print("  ending\n"));
        let (name, kind) = signals.next().await;
        let name = format!("a second {name}");
        end_now(&name, kind.as_raw_value(), Left::Fetched)
    });
    Ok(token)
}

/// Describes the imported memory.
fn summary(memory: &RemoteBuffer, took: Option<Duration>) -> String {
    let description = memory.description();
    let via = match (memory.via(), memory.no_fabric()) {
        (HandleType::Fabric, _) => "by fabric handle".into(),
        (HandleType::PosixFd, None) => "by POSIX fd (this machine's memory)".into(),
        (HandleType::PosixFd, Some(why)) => format!("by POSIX fd (no fabric handle: {why})"),
    };
    let proof = memory.proved();
    let proved = match (proof.by, &proof.why_not) {
        (Some(Location::Device(gpu)), _) => {
            format!("the server and this end's GPU {gpu} see the same memory")
        }
        (Some(_), _) => "the server and this end's CPU see the same memory".into(),
        (None, Some(why)) => format!("not proved: {why}"),
        (None, None) => "not proved".into(),
    };
    let took = match took {
        Some(took) => {
            let rate = description.len as f64 / took.as_secs_f64() / 1e9;
            let ms = took.as_secs_f64() * 1e3;
            format!("leased, imported, mapped and granted in {ms:.1} ms ({rate:.1} GB/s)")
        }
        None => "simulated: no times".into(),
    };
    let mut size = Bytes(description.len).to_string();
    let padded = description.padded();
    if padded != description.len && !description.is_window() {
        size += &format!(" ({} allocated)", Bytes(padded));
    }
    let (name, parts, access) = (memory.name(), description.parts.len(), description.access);
    let s = if parts == 1 { "" } else { "s" };
    format!("{name}: {size} in {parts} part{s}, {access}\n  {via}\n  {proved}\n  {took}\n")
}

/// Compares the CPU's and each GPU's reading of the same bytes; returns how many GPUs have read them. Returns `None` if
/// `stop` ended that early.
fn verify(driver: &Driver, memory: &RemoteBuffer, stop: &dyn Fn() -> bool) -> Result<Option<u32>> {
    let cpu = memory.cpu()?;
    let mut piece = vec![0_u64; PIECE / 8];
    // The exclusive or of all whole words, as `Prover::read` computes it.
    let mut expected = 0;
    let doing = Some("verifying, the CPU reads");
    let done = in_pieces(doing, cpu.len() / 8 * 8, stop, |at, count| {
        let piece = &mut piece[..count / 8];
        cpu.read_at(at, piece)?;
        expected = piece.iter().fold(expected, |all, word| all ^ word);
        Ok(true)
    })?;
    let mut gpus = 0;
    for gpu in 0..driver.device_count()? {
        if !done || stop() {
            return Ok(None);
        }
        if memory.access(Location::Device(gpu))? == Access::None {
            continue;
        }
        progress(&format!("verifying: GPU {gpu} reads"));
        let found = Prover::new(driver, gpu)?.read(memory);
        progress("");
        let found = found?;
        if found != expected {
            let wrong = egmem::Error::WrongBytes {
                by: Location::Device(gpu),
                offset: 0,
                expected,
                found,
            };
            return Err(egmem::share::Error::Memory(wrong).into());
        }
        gpus += 1;
    }
    Ok(done.then_some(gpus))
}

fn write(path: &Path, cpu: &CpuView<'_>) -> Result<u64> {
    let fail = |error| Error::system(format!("cannot read {}", path.display()), &error);
    let mut file = File::open(path).map_err(fail)?;
    // A pipe has no size.
    let data = file.metadata().ok().filter(|data| data.is_file());
    let total = data.map(|data| data.len());
    let mut progress = ByteProgress::new("writing");
    let mut piece = vec![0_u8; PIECE];
    let mut done = 0;
    loop {
        progress.show(done, total);
        let count = file.read(&mut piece).map_err(fail)?;
        if count == 0 {
            return Ok(done);
        }
        cpu.write_at(done, &piece[..count])?;
        done += count as u64;
    }
}

/// Copies the memory to a file. Returns `false` if `stop` ended that early.
fn read(path: &Path, cpu: &CpuView<'_>, stop: &dyn Fn() -> bool) -> Result<bool> {
    let fail = |error| Error::system(format!("cannot write {}", path.display()), &error);
    let to_stdout = path.as_os_str() == "-";
    let mut file: Box<dyn Write> = if to_stdout {
        Box::new(std::io::stdout().lock())
    } else {
        Box::new(create_private(path).map_err(fail)?)
    };
    // On a terminal the bytes themselves are the progress.
    let shown = !(to_stdout && std::io::stdout().is_terminal());
    let mut piece = vec![0_u8; PIECE];
    in_pieces(shown.then_some("reading"), cpu.len(), stop, |at, count| {
        cpu.read_at(at, &mut piece[..count])?;
        match file.write_all(&piece[..count]).and_then(|()| file.flush()) {
            // The reader has closed the pipe.
            Err(error) if to_stdout && error.kind() == ErrorKind::BrokenPipe => Ok(false),
            written => written.map(|()| true).map_err(fail),
        }
    })
}

/// Calls `work` with the offset and the size of each piece of `len` bytes, until it returns `false`; shows the progress of
/// `doing`. Returns `false` if `stop` ended that early.
fn in_pieces(
    doing: Option<&'static str>,
    len: u64,
    stop: &dyn Fn() -> bool,
    mut work: impl FnMut(u64, usize) -> Result<bool>,
) -> Result<bool> {
    let mut progress = doing.map(ByteProgress::new);
    let mut done = 0;
    while done < len {
        if stop() {
            return Ok(false);
        }
        if let Some(progress) = &mut progress {
            progress.show(done, Some(len));
        }
        let count = (len - done).min(PIECE as u64);
        if !work(done, count as usize)? {
            break;
        }
        done += count;
    }
    Ok(true)
}
