//! `egmem fetch`: takes a lease on memory, maps it here, and uses it.

mod follow;

use std::fs::File;
use std::io::{ErrorKind, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use egmem::Driver;
use egmem::driver::{Access, HandleType, Location, NodeId};
use egmem::exchange::{
    Address, Client, CreateOptions, Error, FetchOptions, LeaseState, Owner, RemoteBuffer, Result,
};
use egmem::memory::CpuView;
use egmem::proof::Prover;
use egmem::size::Bytes;

use crate::connect::{self, Connect, block_on};
use crate::output::{print, progress};
use crate::progress::ByteProgress;
use crate::signals::Ends;
use crate::source::Source;
use crate::trace::create_private;

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
            self.make(client).await?;
        }
        if self.wait > 0 {
            let patience = Duration::from_secs(self.wait);
            client.wait(&self.name, patience).await?;
        }
        let options = self.options(client)?;
        if self.follow {
            return self.follow(options, driver).await;
        }
        let begun = Instant::now();
        let memory = options.go().await?;
        let took = (!driver.is_simulated()).then(|| begun.elapsed());
        self.show_and_use(driver, &memory, took, &|| false)?;
        let to_stdout = self.reads_to_stdout();
        if self.hold {
            hold(&memory, to_stdout).await?;
        }
        match memory.release().await {
            Ok(()) => say(to_stdout, "  released\n".into()),
            Err(error) => Err(error),
        }
    }

    fn options(&self, client: &Client) -> Result<FetchOptions> {
        let mut options = client.fetch(self.name.as_str());
        if let Some(owner) = self.expected_owner(client)? {
            options = options.expect_owner(owner);
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

    /// Returns whether the bytes go to standard output: no other text may then.
    fn reads_to_stdout(&self) -> bool {
        self.read.as_deref() == Some(Path::new("-"))
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
        let to_stdout = self.reads_to_stdout();
        if !to_stdout {
            print(&summary(memory, took))?;
        }
        if let Some(file) = &self.write {
            let bytes = write(file, &memory.cpu()?)?;
            say(
                to_stdout,
                format!("  wrote {} from {}\n", Bytes(bytes), file.display()),
            )?;
        }
        if self.verify {
            let Some(verified) = verify(driver, memory, stop)? else {
                return Ok(false);
            };
            say(to_stdout, verified)?;
        }
        if let Some(file) = &self.read {
            if !read(file, &memory.cpu()?, stop)? {
                return Ok(false);
            }
            say(to_stdout, format!("  copied to {}\n", file.display()))?;
        }
        Ok(true)
    }

    /// Returns the owner that the memory must have, if one is required.
    fn expected_owner(&self, client: &Client) -> Result<Option<Owner>> {
        match self.create {
            true => client.peer_name().map(|own| Some(own.into())),
            false => Ok(self.owner.clone()),
        }
    }

    /// Has the memory created, unless this peer has created it before.
    async fn make(&self, client: &Client) -> Result<()> {
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
}

fn say(to_stdout: bool, text: String) -> Result<()> {
    match to_stdout {
        true => Ok(()),
        false => Ok(print(&text)?),
    }
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
            format!("\n  leased, imported, mapped and granted in {ms:.1} ms ({rate:.1} GB/s)")
        }
        None => "\n  simulated: no times".into(),
    };
    let allocated = match description.padded() {
        padded if padded == description.len || description.is_window() => String::new(),
        padded => format!(" ({} allocated)", Bytes(padded)),
    };
    format!(
        "{}: {}{allocated} in {} part{}, {}\n  {via}\n  {proved}{took}\n",
        memory.name(),
        Bytes(description.len),
        description.parts.len(),
        if description.parts.len() == 1 {
            ""
        } else {
            "s"
        },
        description.access,
    )
}

/// Compares the CPU's and each GPU's reading of the same bytes. Returns `None` if `stop` ended that early.
fn verify(
    driver: &Driver,
    memory: &RemoteBuffer,
    stop: &dyn Fn() -> bool,
) -> Result<Option<String>> {
    let Some(expected) = words(&memory.cpu()?, stop)? else {
        return Ok(None);
    };
    let mut gpus = 0;
    for gpu in 0..driver.device_count()? {
        if stop() {
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
            return Err(Error::Share(egmem::share::Error::Memory(
                egmem::Error::WrongBytes {
                    by: Location::Device(gpu),
                    offset: 0,
                    expected,
                    found,
                },
            )));
        }
        gpus += 1;
    }
    Ok(Some(format!(
        "  verified: the CPU and {gpus} GPU{} read the same bytes\n",
        if gpus == 1 { "" } else { "s" }
    )))
}

/// Returns the exclusive or of all whole words, as [`Prover::read`] computes it; `None` if `stop` ended that
/// early.
fn words(cpu: &CpuView<'_>, stop: &dyn Fn() -> bool) -> Result<Option<u64>> {
    let mut progress = ByteProgress::new("verifying, the CPU reads");
    let mut piece = vec![0_u64; PIECE / 8];
    let count = cpu.len() / 8;
    let mut all = 0;
    let mut done = 0;
    while done < count {
        if stop() {
            return Ok(None);
        }
        progress.show(done * 8, Some(count * 8));
        let now = (count - done).min(piece.len() as u64) as usize;
        cpu.read_at(done * 8, &mut piece[..now])?;
        all = piece[..now].iter().fold(all, |all, word| all ^ word);
        done += now as u64;
    }
    Ok(Some(all))
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
    let mut file: Box<dyn Write> = match to_stdout {
        true => Box::new(std::io::stdout().lock()),
        false => Box::new(create_private(path).map_err(fail)?),
    };
    // On a terminal the bytes themselves are the progress.
    let shown = !(to_stdout && std::io::stdout().is_terminal());
    let mut progress = shown.then(|| ByteProgress::new("reading"));
    let mut piece = vec![0_u8; PIECE];
    let mut done = 0;
    while done < cpu.len() {
        if stop() {
            return Ok(false);
        }
        if let Some(progress) = &mut progress {
            progress.show(done, Some(cpu.len()));
        }
        let count = (cpu.len() - done).min(PIECE as u64) as usize;
        cpu.read_at(done, &mut piece[..count])?;
        match file.write_all(&piece[..count]).and_then(|()| file.flush()) {
            // The reader has closed the pipe.
            Err(error) if to_stdout && error.kind() == ErrorKind::BrokenPipe => return Ok(true),
            written => written.map_err(fail)?,
        }
        done += count as u64;
    }
    Ok(true)
}

/// Waits for a signal, or until the server recalls the memory; losing the memory is an error.
async fn hold(memory: &RemoteBuffer, to_stdout: bool) -> Result<()> {
    let mut signals = Ends::new()?;
    say(to_stdout, "  holding\n".into())?;
    loop {
        let state = tokio::select! {
            _ = signals.next() => return Ok(()),
            state = memory.changed() => state,
        };
        say(to_stdout, format!("  {state}\n"))?;
        match state {
            LeaseState::Lost(error) => return Err(error),
            LeaseState::Withdrawing { .. } => return Ok(()),
            _ => {}
        }
    }
}
